"""Table of llm-judge: ratings of each method's answers, and win rates against one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dropmatch.bench.figures import share
from dropmatch.bench.tables.markdown import Named, block, grid, made_by


def ratings(named: Named) -> str:
    """A row a method and task; columns of what was asked."""
    result, name = named
    settings, rows = result["settings"], result["summary"]
    against = settings["against"]
    head = ["method", "task", "n"]
    head += ["rating"] if settings["grade"] else []
    head += ["KoMT-bench score"] if settings["grade"] and settings["komt"] else []
    head += [f"wins against {against}", "won, tied, lost"] if against is not None else []
    lines = []
    for row in rows:
        cells = [row["arm"], row["task"], str(row["n"])]
        cells += [_mean(row, "score", "score")] if settings["grade"] else []
        cells += [_mean(row, "komt_score", "komt")] if settings["grade"] and settings["komt"] else []
        if against is not None:
            is_base = row["arm"] == against
            cells += [
                "" if is_base else share(row, "win_rate", "win_low", "win_high"),
                "" if is_base else f"{row['won']}, {row['tied']}, {row['lost']}",
            ]
        lines.append([*cells, str(row["invalid_ratings"] + row["undecided"])])
    asked = "Ratings from 1 to 10. " if settings["grade"] else ""
    wins = "Wins in per cent, both orders asked, a tie counts half. " if against is not None else ""
    missing = len(result["unanswered"])
    unanswered = f" {missing} of {result['questions']} questions got no reply." if missing else ""
    return block(
        grid([*head, "invalid replies"], lines, left=2),
        f"{asked}{wins}95% bootstrap intervals over prompts. Judge: `{settings['model']}` at temperature "
        f"{settings['temperature']:g}, on the answers in `{settings['results']}`.{unanswered} {made_by(result, name)}",
    )


def _mean(row: Mapping[str, Any], value: str, bounds: str) -> str:
    if row[value] is None:
        return ""
    return f"{row[value]:.2f} ({row[f'{bounds}_low']:.2f} to {row[f'{bounds}_high']:.2f})"
