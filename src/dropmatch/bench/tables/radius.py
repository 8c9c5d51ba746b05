"""Table of analyze radius: the radius of Eq. 6 by drop probability, and what "auto" picks."""

from __future__ import annotations

from dropmatch.bench.figures import number
from dropmatch.bench.tables.markdown import Named, block, grid, machine, made_by, pair, percent


def radius(named: Named) -> str:
    """Sampled and closed radius side by side."""
    result, name = named
    settings = result["settings"]
    lines = []
    for row in result["radius"]:
        sampled, expected, ratio = row["sampled"], row["expected"], row.get("expected_over_sampled")
        lines.append(
            [
                f"{row['p_drop']:g}",
                *(f"{sampled[key]:.4f}" for key in ("q10", "q50", "q90", "mean")),
                percent(sampled["saturated_share"], 0),
                number(None if expected is None else expected["q50"], ".4f"),
                "" if ratio is None else f"{ratio['q50']:.2f} ({ratio['q10']:.2f}-{ratio['q90']:.2f})",
            ]
        )
    head = ["p_drop", "sampled: 10%", "median", "90%", "mean", "above ln 2 / 2", "closed form: median"]
    choices = [
        f'`p_drop="{"auto" if kind == "sampled" else "auto-expected"}"` picks {choice["p_drop"]:g}: {choice["why"]}.'
        for kind in ("sampled", "expected")
        if (choice := result["auto"].get(kind)) is not None
    ]
    text = "the built-in text" if settings["items"] is None else f"{len(settings['items'])} prompts"
    return block(
        grid([*head, "closed / sampled (10%-90%)"], lines, left=0),
        f"Largest JS(head, centroid) in nats at {settings['positions']} positions of {text}, K={settings['k']}, hidden "
        f"size {settings['hidden_size']}. {' '.join(choices)} Pair: {pair(settings)}; {machine(result)}. "
        f"{made_by(result, name)}",
    )
