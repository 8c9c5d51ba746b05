"""The summary of a comparison as tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def print_summary(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print quality and, where it was timed, speed of all methods. result: a results file of `dropmatch compare`."""
    console = console or Console()
    for task in dict.fromkeys(row["task"] for row in result["summary"]):
        rows = [row for row in result["summary"] if row["task"] == task]
        console.print(_quality(task, rows))
        if any(row["tokens_per_second"] is not None for row in rows):
            console.print(_speed(task, rows))
    settings = result["settings"]
    console.print(
        f"{settings['target']}"
        + (f" with {settings['draft']}" if settings["draft"] else "")
        + f", {settings['dtype'].removeprefix('torch.')}, K={settings['k']}, p_drop={settings['p_drop']} where a rule "
        "does not say. Intervals: 95%. *: no rule here beats it in both tau and accuracy (log-probability where "
        "nothing is graded). Difference: to lossless decoding, paired by prompt; p: McNemar's exact test.",
        highlight=False,
        markup=False,
    )


def _quality(task: str, rows: list[dict[str, Any]]) -> Table:
    columns = ("rule", "tau", "accuracy", "difference", "p", "lossy", "their prob.", "log-prob.", "length", "changed")
    table = Table(*columns, title=f"{task}, {rows[0]['n']} prompts", title_justify="left")
    for row in rows:
        table.add_row(
            f"{row['arm']}{' *' if row['pareto'] else ''}",
            f"{row['tau']:.2f} ({row['tau_low']:.2f}-{row['tau_high']:.2f})",
            _share(row, "accuracy", "accuracy_low", "accuracy_high", ""),
            _share(row, "accuracy_difference", "difference_low", "difference_high", "+"),
            _number(row["p_value"], ".2g"),
            f"{row['lossy_share']:.2%}",
            _number(row["lossy_prob_mean"], ".2f"),
            _number(row["logprob_mean"], ".3f"),
            _number(row["length_ratio"], ".2f"),
            _number(row["diverged_share"], ".0%"),
        )
    return table


def _speed(task: str, rows: list[dict[str, Any]]) -> Table:
    columns = ("rule", "tokens/s", "over plain", "over lossless", "head and rule / target")
    table = Table(*columns, title=f"{task}, speed at batch 1", title_justify="left")
    for row in rows:
        if row["tokens_per_second"] is None:
            continue
        table.add_row(
            row["arm"],
            f"{row['tokens_per_second']:.2f}",
            _spread(row["over_plain"]),
            _spread(row["over_lossless"]),
            _number(row["judge_over_target"], ".1%"),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _share(row: Mapping[str, Any], value: str, low: str, high: str, sign: str) -> str:
    """A share and its interval in per cent."""
    if row[value] is None:
        return ""
    return f"{100 * row[value]:{sign}.1f} ({100 * row[low]:{sign}.1f} to {100 * row[high]:{sign}.1f})"


def _spread(ratio: Mapping[str, float] | None) -> str:
    return "" if ratio is None else "{median:.2f}x ({min:.2f}-{max:.2f})".format(**ratio)
