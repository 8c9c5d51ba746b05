"""dropmatch train: draft heads and judges for a target, on text that the target writes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dropmatch.cli import options as o
from dropmatch.errors import ConfigError

train_app = typer.Typer(help="Train what a target needs, on text that it writes itself.", no_args_is_help=True)


@train_app.callback()
def _group() -> None:
    """Keeps `train` a group of commands."""


@train_app.command()
def eagle3(
    prompts: Annotated[list[Path], typer.Option(help="JSON-lines file of prompts, or .jsonl.gz; may be repeated.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the finished head.")],
    target: o.Target = "small",
    work: Annotated[
        Path | None, typer.Option(help="Folder for answers and checkpoints. Left out: OUTPUT with -work behind it.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts to take. Left out: all.")] = None,
    exclude_task: Annotated[list[str] | None, typer.Option(help="Leave out a task; may be repeated.")] = None,
    max_new_tokens: o.MaxNewTokens = 256,
    max_tokens: Annotated[int, typer.Option(min=0, help="Answer tokens to learn from (0: no limit).")] = 200_000,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Leave out longer prompts.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Answers written together.")] = 32,
    feature_dtype: Annotated[str, typer.Option(help="Hidden states on disk: float16, bfloat16, float32.")] = "float16",
    draft_vocab: Annotated[int, typer.Option(min=1, help="Tokens that the head can draft.")] = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Steps that the head looks ahead in training.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the answers.")] = 4,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one update.")] = 2048,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of one sequence; the rest is cut.")] = 512,
    learning_rate: Annotated[float, typer.Option(help="Peak of the schedule.")] = 1e-3,
    intermediate: Annotated[int | None, typer.Option(min=1, help="Width of the MLP. Left out: the target's.")] = None,
    family: Annotated[str, typer.Option(help="Format to write: official or speculators.")] = "official",
    seed: o.Seed = 0,
    restart: Annotated[bool, typer.Option(help="Throw away answers and checkpoints of an earlier run.")] = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """Train an EAGLE-3 draft head. A run that is stopped goes on where it was when the same command is given again."""
    from dropmatch.cli.bench import check_writable
    from dropmatch.config import check_choice
    from dropmatch.training.distill import DistillSettings
    from dropmatch.training.eagle3 import TrainSettings, train_eagle3
    from dropmatch.training.prompts import read_prompts
    from dropmatch.training.target import load_tapped

    check_choice("family", family, ("official", "speculators"))
    data = DistillSettings(
        max_new_tokens=max_new_tokens,
        max_tokens=max_tokens,
        max_prompt_tokens=max_prompt_tokens,
        batch=batch,
        dtype=feature_dtype,
    )
    settings = TrainSettings(
        draft_vocab_size=draft_vocab,
        steps=steps,
        epochs=epochs,
        batch_tokens=batch_tokens,
        max_length=max_length,
        learning_rate=learning_rate,
        intermediate_size=intermediate,
        seed=seed,
    )
    if output.exists() and not (output / "config.json").exists():
        raise ConfigError(f"--output={str(output)!r} exists and holds no head. Name a new folder.")
    check_writable(output.with_name(output.name + ".partial"))
    chosen = read_prompts(prompts, exclude_tasks=exclude_task or ())[:num_prompts]
    report: dict[str, Any] = train_eagle3(
        load_tapped(target, dtype=dtype, device=device),
        chosen,
        output,
        work or output.with_name(output.name + "-work"),
        target_name=target,
        data=data,
        settings=settings,
        family=family,  # type: ignore[arg-type]  # checked above
        restart=restart,
    )
    held = report["held_out"]
    typer.secho(
        f"Written to {output}. On held-out answers a chain of {held['steps']} would yield tau {held['chain_tau']}.",
        err=True,
    )
    print(json.dumps({"output": str(output), "held_out": held, "vocabulary_coverage": report["vocabulary_coverage"]}))
