"""dropmatch llm-judge: a chat model rates the answers of a comparison."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import check_writable, say_written, stoppable


def llm_judge(
    results: Annotated[Path, typer.Argument(help="Results file of `dropmatch compare`.")],
    endpoint: Annotated[str, typer.Option(help="OpenAI-compatible endpoint, such as http://localhost:8000/v1.")],
    model: Annotated[str, typer.Option(help="The judge's name at the endpoint.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="JSON-lines file of the items, for categories and reference answers; may be repeated."),
    ] = None,
    grade: Annotated[bool, typer.Option(help="Ratings from 1 to 10 of each answer.")] = True,
    against: Annotated[
        str | None, typer.Option(help='Win rates against this method, such as "lossless L=5". Left out: none.')
    ] = None,
    komt: Annotated[
        bool, typer.Option("--komt", help="Also KoMT-bench's score: square roots of ratings of answers not in Korean.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Left out: beside the results file, as NAME.judged.json.")
    ] = None,
    key_variable: Annotated[
        str, typer.Option(help="Environment variable with the API key; it is written nowhere.")
    ] = "OPENAI_API_KEY",
    concurrency: Annotated[int, typer.Option(min=1, help="Questions in flight.")] = 8,
    timeout: Annotated[float, typer.Option(help="Most seconds of one try.")] = 120.0,
    retries: Annotated[int, typer.Option(min=0, help="Further tries of a question, with growing waits.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 2048,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Write results although some questions got no reply.")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Take no replies over from an earlier run.")] = False,
    as_json: o.AsJson = False,
) -> None:
    """Let a chat model judge the answers of a comparison: ratings, and win rates against one method.

    A run that is stopped goes on where it was when the same command is given again."""
    from dropmatch.bench.chat_endpoint import ChatEndpoint
    from dropmatch.bench.llm_judge import JudgeSettings, judge_results
    from dropmatch.bench.tasks import load_items

    output = output or results.with_name(f"{results.stem}.judged.json")
    check_writable(output)
    judge = ChatEndpoint(
        url=endpoint,
        model=model,
        key_variable=key_variable,
        seconds=timeout,
        retries=retries,
        concurrency=concurrency,
        max_tokens=max_tokens,
    )
    settings = JudgeSettings(grade=grade, against=against, komt=komt, allow_missing=allow_missing)
    items = [item for source in data or () for item in load_items(source)]
    with stoppable(kept="All replies so far are kept."):
        result = judge_results(results, judge, settings, output=output, data=items, restart=restart)
    if as_json:
        print(json.dumps({"output": str(output), "summary": result["summary"]}))
    else:
        _print_summary(result)
    say_written(output)


def _print_summary(result: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    settings = result["settings"]
    table = Table(title=f"judged by {settings['model']}, 95% intervals over items", title_justify="left")
    columns = {"score": "rating", "komt": "KoMT", "win": f"wins against {settings['against']}"}
    shown = [
        name
        for name, wanted in (("score", settings["grade"]), ("komt", settings["komt"] and settings["grade"]),
                             ("win", settings["against"] is not None))
        if wanted
    ]  # fmt: skip
    table.add_column("method")
    table.add_column("task")
    for name in ("n", *(columns[name] for name in shown), "invalid"):
        table.add_column(name, justify="right")
    for row in result["summary"]:
        cells = [_figure(row, name) for name in shown]
        invalid = row["invalid_ratings"] + row["undecided"]
        table.add_row(row["arm"], row["task"], str(row["n"]), *cells, str(invalid))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _figure(row: Mapping[str, Any], name: str) -> str:
    """A figure with its interval. A win rate is a share of all pairs."""
    value = row["win_rate" if name == "win" else f"{name}_score" if name != "score" else "score"]
    if value is None:
        return "-"
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if name == "win":
        return f"{value:.1%} ({low:.1%} to {high:.1%})"
    return f"{value:.2f} ({low:.2f} to {high:.2f})"
