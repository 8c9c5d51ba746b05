"""Tables of bench autojudge: by threshold (Tables 8 and 9), and tau against accuracy (Figures 5 and 6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dropmatch.bench.figures import number, share
from dropmatch.bench.tables import published
from dropmatch.bench.tables.markdown import (
    Named,
    Result,
    block,
    grid,
    made_by,
    options,
    pair,
    percent,
    tau,
    tokens_each,
)
from dropmatch.errors import DataError

_PAPER_P_DROP = 0.3
_PLACE = {True: "of the kind it learned from", False: "of a kind it never saw", None: "and its training data unknown"}
_Published = Mapping[float, tuple[tuple[float, float], tuple[float, float]]]


def all_parts(named: Named) -> str:
    """Every table that the file has."""
    parts: dict[str, Callable[[Named], str]] = {
        "table8": table8,
        "table9": table9,
        "figure5": figure5,
        "figure6": figure6,
    }
    if not any(named[0].get(key) for key in parts):
        raise DataError(f"{named[1]} has none of {', '.join(parts)}.")
    return "\n".join(render(named) for key, render in parts.items() if named[0].get(key))


def table8(named: Named) -> str:
    """Table 8: GSM8K by threshold."""
    speeds = [
        [f"paper: none, L={length}", "", "", f"{rate:.1f}"] for length, rate in published.JUDGE_BASE_SPEED.items()
    ]
    return _by_threshold(
        named,
        "table8",
        "gsm8k",
        published.JUDGE_GSM8K,
        lambda value, rate: [f"{value:.1f}", "", f"{rate:.1f}"],
        speeds,
        "Paper: Table 8, GSM8K 8-shot",
    )


def table9(named: Named) -> str:
    """Table 9: code by threshold, MBPP in the place of LiveCodeBench."""
    return _by_threshold(
        named,
        "table9",
        "mbpp",
        published.JUDGE_CODE,
        lambda steps, value: [f"{value:.2f}", f"{steps:.2f}", ""],
        [],
        "Paper: Table 9, on LiveCodeBench",
    )


def _by_threshold(
    named: Named,
    key: str,
    part: str,
    paper: _Published,
    shown: Callable[[float, float], list[str]],
    base: Sequence[list[str]],
    source: str,
) -> str:
    result, name = named
    table = _present(result, key, name)
    drops = list(table[0]["dropmatch+judge"])
    figures = ("accuracy", "tau", "tokens/s")
    head = ["threshold", *(f"judge: {figure}" for figure in figures), "kept by the judge alone"]
    for p in drops:
        head += [f"with DropMatch p={p}: {figure}" for figure in figures]
    rows = result["rows"][part]
    lines = []
    for row in rows:
        if row["method"] == "lossless":
            joined = {
                f"{r['p_drop']:g}": r
                for r in rows
                if r["method"] == "dropmatch" and r["draft_length"] == row["draft_length"]
            }
            cells = [text for p in drops for text in (_cells(joined[p]) if p in joined else [""] * 3)]
            lines.append([f"none, L={row['draft_length']}", *_cells(row), "", *cells])
    for row in table:
        judge = row["judge"]
        joined_cells = [text for p in drops for text in _cells(row["dropmatch+judge"][p])]
        lines.append([_threshold(row), *_cells(judge), percent(judge["judged_share"]), *joined_cells])
    empty = [""] * (3 * len(drops))
    lines += [[*cells, "", *empty] for cells in base]
    for threshold, (alone, with_dropmatch) in paper.items():
        joined_cells = [
            text for p in drops for text in (shown(*with_dropmatch) if float(p) == _PAPER_P_DROP else [""] * 3)
        ]
        lines.append([f"paper: {threshold:g}", *shown(*alone), "", *joined_cells])
    return block(
        grid(head, lines),
        "Accuracy in per cent with Wilson's 95% interval, tau with its 95% bootstrap interval over prompts; tokens/s "
        f"where timed. A threshold is of its own judge, so the paper's rows are no pairs of ours. {_run(result, part)} "
        f"{source}, Llama-3.1 8B/70B. {made_by(result, name)}",
    )


def figure5(named: Named) -> str:
    """Figure 5: accuracy against tau on what the judge was trained for."""
    return _curves(named, "figure5", "gsm8k", "Figure 5")


def figure6(named: Named) -> str:
    """Figure 6: accuracy against tau on IFEval."""
    return _curves(named, "figure6", "ifeval", "Figure 6")


def _curves(named: Named, key: str, part: str, source: str) -> str:
    result, name = named
    lines = [
        [
            curve["name"],
            str(point["draft_length"]),
            _threshold(point),
            tau(point),
            share(point, "accuracy", "accuracy_low", "accuracy_high"),
        ]
        for curve in _present(result, key, name)
        for point in curve["points"]
    ]
    n = result[key][0]["points"][0]["n"]
    return block(
        grid(["method", "L", "threshold", "tau", "accuracy"], lines, left=1),
        f"Points of each curve by rising tau, n={n}. Accuracy in per cent with Wilson's 95% interval, tau with its 95% "
        f"bootstrap interval over prompts. {_run(result, part)} The paper has these as pictures ({source}, p_drop 0.2 "
        f"and 0.3). {made_by(result, name)}",
    )


def _present(result: Result, key: str, name: str) -> Any:
    if not result.get(key):
        raise DataError(f"{name} has no {key}: its evaluation set was not run. Run it, or take the table out.")
    return result[key]


def _cells(row: Mapping[str, Any]) -> list[str]:
    speed = number(row["tokens_per_second"], ".1f")
    return [share(row, "accuracy", "accuracy_low", "accuracy_high"), tau(row), speed]


def _threshold(row: Mapping[str, Any]) -> str:
    if row["threshold"] is None:
        return ""
    return f"{row['threshold']:.2g}" + (f" ({row['quantile']})" if row["quantile"] else "")


def _run(result: Result, part: str) -> str:
    settings, facts = result["settings"], result["parts"][part]
    judge, n = facts["judge"], result["rows"][part][0]["n"]
    auc = f", validation AUC {judge['auc']:.2f}" if judge.get("auc") is not None else ""
    timed = (
        f", {facts['timed_items']} of them timed {facts['repeats']} times at batch 1" if facts["timed_items"] else ""
    )
    return (
        f"{n} prompts of {part}{timed}; the judge `{judge['name']}` ({judge['features']}{auc}) is asked about prompts "
        f"{_PLACE[judge['in_distribution']]}. Window {settings['window']}, {tokens_each(settings)}, "
        f"{options(settings)}; pair: {pair(settings)}; torch {result['provenance']['torch']}."
    )
