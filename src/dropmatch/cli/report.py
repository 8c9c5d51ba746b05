"""dropmatch report: a comparison as one HTML page, as pictures, or in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli.runs import check_writable, say_written
from dropmatch.errors import ConfigError


def report(
    results: Annotated[Path, typer.Argument(help="Results file of `dropmatch compare`.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML file. Left out: beside the results file.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder to write the pictures to, as files too.")] = None,
    format: Annotated[str, typer.Option(help="Formats of --plots, separated by commas: png, svg, pdf.")] = "png,svg",
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Print the tables; a page is written only with --output too.")
    ] = False,
) -> None:
    """Write a comparison as one HTML page that needs no network: tables, pictures, single tokens, answers."""
    from dropmatch.bench.comparison import read_finished
    from dropmatch.report.terminal import print_summary

    if terminal and output is None and plots is None:
        print_summary(read_finished(results))
        return

    from dropmatch.report.page import require_report, write_plots, write_report

    require_report()
    wants_page = output is not None or not terminal
    output = output or results.with_suffix(".html")
    if output.resolve() == results.resolve():
        raise ConfigError(f"--output={str(output)!r} is the results file itself. Name another file.")
    if plots is not None and plots.exists() and not plots.is_dir():
        raise ConfigError(f"--plots={str(plots)!r} is a file. Name a folder.")
    result = read_finished(results)
    if wants_page:
        check_writable(output)
    if plots is not None:
        files = write_plots(result, plots, [form.strip() for form in format.split(",") if form.strip()])
        typer.secho(f"{len(files)} pictures written to {plots}.", err=True)
    if wants_page:
        write_report(result, output, source=results.name)
        say_written(output)
    if terminal:
        print_summary(result)
