"""Table of the closed form's agreement with sampling, one entry a target."""

from __future__ import annotations

from collections.abc import Mapping

from dropmatch.bench.tables.markdown import Named, block, grid


def agreement(named: Named) -> str:
    """A row a target and drop probability."""
    result, name = named
    lines = []
    for target, entry in result["models"].items():
        draft = "itself" if entry["draft"].startswith("the target") else entry["draft"]
        for p_drop, row in entry["by_p_drop"].items():
            chance, radius = row["chance"], row["radius"]
            lines.append(
                [
                    f"{target} ({entry['judged']})",
                    draft,
                    p_drop,
                    f"{chance['mean_error']:.3f} ({chance['mean_error_of_sampling']:.3f})",
                    f"{chance['correlation']:.2f}",
                    _shares(row["head"]),
                    _shares(row["js"]),
                    f"{radius['median_sampled']:.2f}",
                    f"{radius['ratio_median']:.2f}, {radius['ratio_p10']:.2f}-{radius['ratio_p90']:.2f}",
                ]
            )
    head = ["target", "drafter", "p", "error of P (sampling)", "corr.", "`expected-head`", "`expected-js`"]
    commands = ["```", *(entry["provenance"]["command"] for entry in result["models"].values()), "```"]
    paths = ", ".join(str(k) for k in dict.fromkeys(entry["num_paths"] for entry in result["models"].values()))
    samplings = ", ".join(f"{entry['samplings']}" for entry in result["models"].values())
    return block(
        grid([*head, "radius, nats", "closed/sampled"], lines, left=2),
        f"K={paths}; samplings per position, by target: {samplings}. From `{name}`, made by",
        "",
        *commands,
    )


def _shares(row: Mapping[str, float]) -> str:
    """Agreement with one sampling, of two samplings, and the most that a fixed decision could have."""
    keys = ("closed_with_one_sampling", "two_samplings", "best_fixed_with_one_sampling")
    return " / ".join(f"{row[key]:.2f}" for key in keys)
