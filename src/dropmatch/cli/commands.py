"""All commands, one file each. Heavy imports live inside the commands, so that --help is quick."""

from __future__ import annotations

import sys
import warnings

import typer

from dropmatch.cli.analyze import analyze_app
from dropmatch.cli.autojudge import autojudge
from dropmatch.cli.batch import batch
from dropmatch.cli.bench import bench_app
from dropmatch.cli.bench_eagle3 import bench_eagle3
from dropmatch.cli.bench_gpu import bench_gpu
from dropmatch.cli.bench_linears import bench_linears
from dropmatch.cli.bench_peers import bench_peers
from dropmatch.cli.bench_scaling import bench_scaling
from dropmatch.cli.bench_vllm import bench_vllm
from dropmatch.cli.compare import compare
from dropmatch.cli.demo import demo
from dropmatch.cli.fetch import fetch
from dropmatch.cli.generate import generate
from dropmatch.cli.llm_judge import llm_judge
from dropmatch.cli.lm_eval import PASS_ALL, lm_eval, lm_eval_tasks
from dropmatch.cli.report import report
from dropmatch.cli.selfcheck import selfcheck
from dropmatch.cli.train import train_app
from dropmatch.cli.tune import tune
from dropmatch.errors import DropMatchError

app = typer.Typer(
    help="Speculative decoding that keeps more drafted tokens (DropMatch), without training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(demo)
app.command()(compare)
app.command()(report)
app.command()(tune)
app.command()(llm_judge)
app.command()(selfcheck)
app.command()(fetch)
app.command("lm-eval", context_settings=PASS_ALL)(lm_eval)
app.command("lm-eval-tasks")(lm_eval_tasks)
bench_app.command()(batch)
bench_app.command()(autojudge)
bench_app.command("eagle3")(bench_eagle3)
bench_app.command("gpu")(bench_gpu)
bench_app.command("linears")(bench_linears)
bench_app.command("peers")(bench_peers)
bench_app.command("scaling")(bench_scaling)
bench_app.command("vllm")(bench_vllm)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
app.add_typer(analyze_app, name="analyze")


def run() -> None:
    """Run the command line. Our own errors, and files that may not be read or written, become one message and exit code
    2, warnings one line each."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        app()
    except DropMatchError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(2)
    except PermissionError as error:
        if error.filename is None:
            raise
        typer.secho(f"error: {error.filename}: {error.strerror}. Give a path that is yours.", fg="red", err=True)
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe went away, as `| head` does
        sys.stderr.close()
        sys.exit(1)
