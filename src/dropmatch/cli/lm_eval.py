"""dropmatch lm-eval: lm-evaluation-harness with "dropmatch" among its models; and the tasks that read local files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

# every word behind the command belongs to lm-eval, --help too
PASS_ALL = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness with the model `dropmatch`: all arguments are its own, as of its command `lm_eval`.

    dropmatch lm-eval run --model dropmatch --model_args target=default,rule=dropmatch --tasks gsm8k"""
    from dropmatch.integrations.lm_eval import register

    register()
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", *context.args]  # lm-eval reads its arguments from there
    cli_evaluate()


def lm_eval_tasks(
    templates: Annotated[
        Path, typer.Argument(help="Folder of task files (.yaml) in which DATA_DIR stands for --data.")
    ],
    data: Annotated[Path, typer.Option(help="Folder of the JSON-lines files that the tasks read.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for the finished task files.")],
) -> None:
    """Finish task files of lm-evaluation-harness that read local data, for its --include_path."""
    from dropmatch.integrations.local_tasks import write_tasks

    names = write_tasks(templates, data, output)
    typer.secho(f"Wrote {', '.join(names)}. Run them with --include_path {output}.", err=True)
