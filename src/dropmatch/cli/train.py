"""dropmatch train: draft heads and judges for a target, on text that the target writes itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import check_writable, file_names, load_prompts, stoppable
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
    batch: Annotated[int, typer.Option(min=1, help="Answers written together.")] = 48,
    feature_dtype: Annotated[str, typer.Option(help="Hidden states on disk: float16, bfloat16, float32.")] = "float16",
    draft_vocab: Annotated[int, typer.Option(min=1, help="Tokens that the head can draft.")] = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Steps that the head looks ahead in training.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the answers.")] = 3,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one update.")] = 512,
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
    from dropmatch.config import check_choice
    from dropmatch.training.distill import DistillSettings
    from dropmatch.training.eagle3 import TrainSettings, train_eagle3
    from dropmatch.training.prompts import read_prompts
    from dropmatch.training.target import load_tapped, public_name

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
    if output.name in ("", ".."):
        output = output.resolve()
    work = work or output.with_name(output.name + "-work")
    _check_folders(output, work)
    chosen = read_prompts(prompts, exclude_tasks=exclude_task or ())[:num_prompts]
    tapped = load_tapped(target, dtype=dtype, device=device)
    with stoppable(kept="Answers and checkpoints so far are kept."):
        report: dict[str, Any] = train_eagle3(
            tapped,
            chosen,
            output,
            work,
            target_name=public_name(target),
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


def _check_folders(output: Path, work: Path) -> None:
    """Raise before a long run whose head could not be written, or would be written over something else."""
    from dropmatch.eagle3.checkpoint import HEAD_FILES, is_eagle3_folder

    if output.exists():
        others = sorted({path.name for path in output.iterdir()} - HEAD_FILES) if output.is_dir() else []
        is_head = is_eagle3_folder(output)
        if not is_head or others:
            what = f"holds more than a head ({', '.join(others[:3])})" if is_head else "holds no head"
            raise ConfigError(f"--output={str(output)!r} exists and {what}. It would be replaced: name a new folder.")
    if output.resolve() in (work.resolve(), *work.resolve().parents):
        raise ConfigError(
            f"--work={str(work)!r} lies in --output={str(output)!r}, which is replaced as a whole at the end. Name a "
            "folder outside it."
        )
    check_writable(output / "config.json" if output.exists() else output)
    try:
        work.mkdir(parents=True, exist_ok=True)
        is_possible = os.access(work, os.W_OK)
    except OSError:
        is_possible = False
    if not is_possible:
        raise ConfigError(f"--work={str(work)!r} cannot be written. Name a folder that is yours.")


@train_app.command()
def judge(
    data: Annotated[list[str], typer.Option(help="JSON-lines file of prompts with answers or tests; may be repeated.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the finished judge.")],
    target: o.Target = "default",
    draft: o.Draft = None,
    labels: Annotated[
        Path | None, typer.Option(help="File of mined labels, made or taken up. Left out: labels.json in OUTPUT.")
    ] = None,
    num: Annotated[int | None, typer.Option(min=1, help="Prompts of each file. Left out: all.")] = None,
    start: Annotated[int, typer.Option(min=0, help="Prompts to skip at the start of each file.")] = 0,
    features: Annotated[str, typer.Option(help="DD-DT (states of both models) or DT (the target's alone).")] = "DD-DT",
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", min=1, help="Left out: the task's own cap.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts mined side by side.")] = 8,
    draft_length: Annotated[int, typer.Option("--draft-length", "-L", min=0, help="Old tokens tried at once.")] = 6,
    label_share: Annotated[float, typer.Option(help="Share of the mismatches that are asked about.")] = 1.0,
    validation: Annotated[float, typer.Option(help="Share of the prompts kept apart.")] = 0.1,
    folds: Annotated[
        int, typer.Option(min=1, help="Keep each of so many parts apart once, instead of one share of the prompts.")
    ] = 1,
    right_only: Annotated[
        bool, typer.Option("--right-only", help="Learn only from prompts that the target itself answers rightly.")
    ] = False,
    refit: Annotated[bool, typer.Option("--refit", help="Fit the chosen strength to all labels at the end.")] = False,
    draft_weights: o.DraftWeights = "own",
    seed: Annotated[int, typer.Option(min=0, help="Shuffles the split.")] = 52,
    restart: Annotated[bool, typer.Option("--restart", help="Throw away labels that are there.")] = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """Train a judge: find out which deviations of the draft model change the target's answers, and fit a head to that.

    A run that is stopped goes on where it was when the same command is given again. Evaluate on other prompts."""
    from dropmatch.config import check_choice
    from dropmatch.core.judge import FEATURES
    from dropmatch.judge.fitting import require_scikit_learn
    from dropmatch.training.judge import FitSettings, MiningSettings, draft_model, train_judge

    check_choice("features", features, FEATURES)
    require_scikit_learn()
    mining = MiningSettings(
        max_new_tokens=max_new_tokens, batch=batch, draft_length=draft_length, label_share=label_share
    )
    fit = FitSettings(
        features=features, validation=validation, seed=seed, refit=refit, folds=folds, right_only=right_only
    )
    labels = labels or output / "labels.json"
    for path in (output / "judge.json", labels):
        check_writable(path)
    items = load_prompts(data, num, start)
    decoder = o.load_decoder(
        target,
        draft,
        rule="exact",
        k=1,
        p_drop="0",
        draft_length=1,
        dtype=dtype,
        device=device,
        draft_weights=draft_weights,
    )
    draft_model(decoder)  # a pair without one shows before anything is mined
    with stoppable():
        info = train_judge(
            decoder,
            items,
            output,
            labels,
            mining=mining,
            fit=fit,
            described={"target": target, "draft": draft, "draft_weights": draft_weights},
            data=file_names(data),
            restart=restart,
        )
    _print_judge(output, info)


def _print_judge(output: Path, info: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("threshold", "", "mismatches kept", "important ones kept", title="On the validation labels")
    for point in info["operating_points"][::5]:
        kept, important = (f"{point[name]:.0%}" for name in ("kept", "important_kept"))
        table.add_row(point["quantile"], f"{point['threshold']:.4f}", kept, important)
    Console(stderr=True).print(table)
    cut, count = info["mining"]["answers_cut_off"], len(info["items"])
    if cut:
        note = f"{cut} of {count} answers were cut off, and compared as far as they got. Allow longer ones with -n."
        typer.secho(note, err=True)
    sides = {side: {key: info[side][key] for key in ("prompts", "labels", "important")} for side in
             ("training", "validation")}  # fmt: skip
    print(json.dumps({"output": str(output), "C": info["C"], "auc": info["auc"], **sides, "mining": info["mining"]}))


@train_app.command("convert-judge")
def convert_judge(
    pickled: Annotated[Path, typer.Argument(help="A judge as a pickle (.pkl) or of torch.save (.pt).")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    features: Annotated[str, typer.Option(help="What it reads: DT or DD-DT. The pickle does not say.")] = "DT",
    draft_size: Annotated[int, typer.Option(min=0, help="With DD-DT: size of the draft model's state.")] = 0,
    fold: Annotated[int | None, typer.Option(min=0, help="Which head of a list, from 0 on.")] = None,
) -> None:
    """Take a judge's numbers out of somebody's pickle without running it, and write them as a judge of ours."""
    from dropmatch.judge import save_judge
    from dropmatch.judge.pickles import read_pickled_judge

    check_writable(output / "judge.json")
    head = read_pickled_judge(pickled, features=features, draft_size=draft_size, fold=fold)
    save_judge(head, output, {"converted_from": pickled.name})
    print(json.dumps({"output": str(output), "features": head.features, "numbers": head.weight.numel()}))
