"""dropmatch bench gpu: head and rule at the sizes of a 70B model, and a small model end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import Output, check_writable, say_written, stoppable
from dropmatch.errors import ConfigError

NO_GPU = 3
"""Exit code where a GPU is wanted and there is none; bad options end with 2."""


def bench_gpu(
    output: Output = Path("results/bench_gpu.json"),
    seconds: Annotated[float, typer.Option(min=0, help="About how long to measure heads; at least 3 repeats.")] = 90.0,
    max_new_tokens: o.MaxNewTokens = 128,
    small: Annotated[bool, typer.Option("--small", help="Tiny sizes: a check of the program, in seconds.")] = False,
    device: o.Device = "cuda",
) -> None:
    """Head and rule at the sizes of a 70B model, naive and ours, beside the plain head; then a model end to end.

    Sized for under four minutes on a GPU with 16 GiB. Without one it ends with exit code 3; `--device cpu --small` runs
    the same program anywhere."""
    import torch

    from dropmatch.bench.gpu import LARGE, SMALL, print_gpu, run_gpu

    try:
        where = torch.device("cuda" if device == "auto" else device)
    except RuntimeError:
        raise ConfigError(f"--device={device!r} is no device. Give cuda, cuda:1, or cpu with --small.") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        typer.secho(
            "No CUDA device was found, so nothing was measured. Run this where a GPU is, or check the program here "
            "with --device cpu --small.",
            err=True,
        )
        raise typer.Exit(NO_GPU)
    if where.type != "cuda" and not small:
        raise ConfigError(f"--device={device!r} would take hours at these sizes. Add --small.")
    check_writable(output)
    with stoppable(output, resumes=False):
        result = run_gpu(
            device=where,
            shapes=SMALL if small else LARGE,
            seconds=seconds,
            max_new_tokens=max_new_tokens,
            is_small=small,
            output=output,
        )
    print_gpu(result)
    say_written(output)
