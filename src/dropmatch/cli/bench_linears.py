"""dropmatch bench linears: the linear layers of a model by every way this machine has to multiply them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import Output, check_writable, parse_lengths, say_written, stoppable


def bench_linears(
    output: Output = Path("results/bench_linears.json"),
    target: o.Target = "default",
    rows: Annotated[str, typer.Option(help="Tokens multiplied together, separated by commas.")] = "1,2,6,11,24,128",
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each.")] = 7,
) -> None:
    """Linear layers alone, on a CPU in bfloat16: torch's own, packed for oneDNN, and our kernels, side by side."""
    from dropmatch.bench.linears import print_linears, run_linears

    counts = parse_lengths(rows, name="--rows")
    check_writable(output)
    with stoppable(output, resumes=False):
        result = run_linears(target, rows=counts, repeats=repeats, output=output)
    print_linears(result)
    say_written(output)
