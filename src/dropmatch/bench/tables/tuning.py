"""Tables of tune: the finalists with the recommendation, and the screening that chose them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dropmatch.bench.tables.markdown import Named, Result, block, grid, made_by, pair, tokens_each
from dropmatch.bench.verdict import cost, verdict


def finals(named: Named) -> str:
    """A row a method, the fastest first; the recommended one in bold."""
    result, name = named
    chosen = result["recommendation"]["arm"]
    lines = [
        [
            f"**{row['arm']}**" if row["arm"] == chosen else row["arm"],
            f"{row['tau']:.2f}",
            f"{row['predicted_over_plain']:.2f}x",
            f"{row['predicted_over_lossless']:.2f}x",
            _costs(row["checks"], "value"),
            _costs(row["checks"], "worst"),
            row["status"],
        ]
        for row in sorted(result["finals"], key=lambda row: -row["predicted_tokens_per_second"])
    ]
    head = ["", "tau", "over plain", "over lossless", "cost to answers", "at worst (95%)", "budget"]
    said = " ".join(line if line.endswith(".") else f"{line}." for line in verdict(result))
    return block(
        grid(head, lines),
        f"Speed is predicted: tau over the measured cost of a round, decoding only, at batch 1. {said} {_run(result)} "
        f"{made_by(result, name)}",
    )


def screening(named: Named) -> str:
    """A row a candidate and rung, the fastest first; those that went on in bold."""
    result, name = named
    lines = []
    for number, rung in enumerate(result["screening"], start=1):
        for row in sorted(rung["rows"], key=lambda row: -row["predicted_tokens_per_second"]):
            lines.append(
                [
                    f"{number} ({rung['items']} prompts)",
                    f"**{row['rule']}**" if row["rule"] in rung["kept"] else row["rule"],
                    str(row["draft_length"]),
                    f"{row['tau']:.2f}",
                    f"{row['predicted_over_plain']:.2f}x",
                    _costs(row["checks"], "value"),
                ]
            )
    head = ["rung", "rule", "best L", "tau", "predicted over plain", "cost to answers"]
    return block(
        grid(head, lines, left=2),
        "Each rung doubles the prompts and keeps half of the candidates (bold). tau at the best draft length is read "
        f"off longer drafts. {_run(result)} {made_by(result, name)}",
    )


def _costs(checks: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(cost(check, check[key]) for check in checks) or "none"


def _run(result: Result) -> str:
    settings = result["settings"]
    return (
        f"{len(settings['items'])} prompts, a third of them for screening, {tokens_each(settings)}. Pair: "
        f"{pair(settings)}; torch {result['provenance']['torch']}."
    )
