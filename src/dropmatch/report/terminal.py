"""The summary of a comparison as tables in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dropmatch.bench.bases import reference_arm
from dropmatch.bench.figures import number, share, spread

_WIDTH = 160  # where the tables go to a file or a pipe


def print_summary(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print quality and, where it was timed, speed of all methods. result: a results file of `dropmatch compare`."""
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH)
    references = {name for name in result["arms"] if reference_arm(result["arms"], name) == name}
    for task in dict.fromkeys(row["task"] for row in result["summary"]):
        rows = [row for row in result["summary"] if row["task"] == task]
        console.print(_quality(task, rows, references))
        console.print(_text(task, rows))
        if any(row["tokens_per_second"] is not None for row in rows):
            console.print(_speed(task, rows))
    settings = result["settings"]
    console.print(
        f"{settings['target']}"
        + (f" with {settings['draft']}" if settings["draft"] else "")
        + f", {settings['dtype'].removeprefix('torch.')}, K={settings['k']}, p_drop={settings['p_drop']} where a rule "
        "does not say. Intervals: 95%. *: no rule here beats it in both tau and accuracy (log-probability where "
        "nothing is graded). Difference: to lossless decoding, paired by prompt; p: McNemar's exact test. Length: over "
        "lossless; repeated: 4-grams; first change: median token.",
        highlight=False,
        markup=False,
    )


def _quality(task: str, rows: list[dict[str, Any]], references: Collection[str]) -> Table:
    """references: methods that others are compared with, and that so have no difference of their own."""
    table = _table(f"{task}, {rows[0]['n']} prompts", "tau", "accuracy", "difference", "gained, lost", "p")
    for row in rows:
        cells = [
            escape(f"{row['arm']}{' *' if row['pareto'] else ''}"),
            f"{row['tau']:.2f} ({row['tau_low']:.2f}-{row['tau_high']:.2f})",
            share(row, "accuracy", "accuracy_low", "accuracy_high"),
        ]
        if row["arm"] in references:
            cells.append("" if row["accuracy"] is None else "reference")
        else:
            cells += [
                share(row, "accuracy_difference", "difference_low", "difference_high", sign="+"),
                "" if row["gained"] is None else f"+{row['gained']}, -{row['lost']}",
                number(row["p_value"], ".2g"),
            ]
        table.add_row(*cells)
    return table


def _text(task: str, rows: list[dict[str, Any]]) -> Table:
    columns = ("lossy", "their prob.", "log-prob.", "length", "repeated", "changed", "first change")
    table = _table(f"{task}, what the text lost", *columns)
    for row in rows:
        table.add_row(
            escape(row["arm"]),
            f"{row['lossy_share']:.2%}",
            number(row["lossy_prob_mean"], ".2f"),
            number(row["logprob_mean"], ".3f"),
            number(row["length_ratio"], ".2f"),
            number(row["repetition"], ".1%"),
            number(row["diverged_share"], ".0%"),
            number(row["first_divergence_median"], ".0f"),
        )
    return table


def _speed(task: str, rows: list[dict[str, Any]]) -> Table:
    beside = any(row.get("over_generate") for row in rows)
    columns = ("tokens/s", *["over generate"] * beside, "over plain", "over lossless", "head and rule / target")
    table = _table(f"{task}, speed at batch 1", *columns)
    for row in rows:
        if row["tokens_per_second"] is None:
            continue
        table.add_row(
            escape(row["arm"]),
            f"{row['tokens_per_second']:.2f}",
            *[spread(row.get("over_generate"))] * beside,
            spread(row["over_plain"]),
            spread(row["over_lossless"]),
            number(row["judge_over_target"], ".1%"),
        )
    return table


def _table(title: str, *figures: str) -> Table:
    """A table of rules and figures."""
    table = Table("rule", title=escape(title), title_justify="left")
    for name in figures:
        table.add_column(name, justify="right")
    return table
