"""Table of bench vllm: stock vLLM and DropMatch inside vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropmatch.bench.figures import number, share
from dropmatch.bench.tables.markdown import Named, block, grid, machine, made_by, tokens_each


def vllm(named: Named) -> str:
    """A row an arm, stock first."""
    result, name = named
    settings, provenance = result["settings"], result["provenance"]
    lines = [
        [
            row["arm"],
            number(row["tau"], ".2f"),
            number(row["tokens_per_second"], ".1f"),
            f"{row['over_stock']:.2f}x",
            share(row, "accuracy", "accuracy_low", "accuracy_high"),
            "" if row["gained"] is None else f"{row['gained']}, {row['lost']}",
            number(row["p_value"], ".2g"),
            str(row["cut_off"]),
            "" if row["lossy_tokens"] is None else f"{row['lossy_tokens']:.0f} of {row['tokens']}",
        ]
        for row in result["summary"]
    ]
    given = "; ".join(_listed(arm) or "its defaults" for arm in settings["dropmatch"])
    draft = settings["speculative"].get("model", settings["speculative"].get("method"))
    engine = f"{settings['speculative']['num_speculative_tokens']} drafted tokens a round"
    engine += f", {_listed(settings['engine'])}" if settings["engine"] else ""
    return block(
        grid(["", "tau", "tokens/s", "over stock", "accuracy", "gained, lost", "p", "cut off", "lossy tokens"], lines),
        f"{len(settings['items'])} prompts at once, {tokens_each(settings)}, temperature 0; "
        f"median of {settings['repeats']} passes after a warm-up. Accuracy in per cent with Wilson's 95% interval, p "
        f"of McNemar's exact test against stock. Pair: `{settings['target']}` with `{draft}`, {engine}; "
        f"DropMatch with {given}; vLLM {provenance['vllm']}; {machine(result)}. {made_by(result, name)}",
    )


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in options.items())
