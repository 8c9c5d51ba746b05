"""dropmatch bench autojudge: a trained judge with and without DropMatch, by threshold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import (
    QualityBatch,
    Repeats,
    SpeedTokens,
    check_writable,
    parse_lengths,
    parse_rates,
    split_words,
    stoppable,
)
from dropmatch.errors import ConfigError


def autojudge(
    judge: Annotated[Path | None, typer.Option(help="Judge trained on GSM8K: for --gsm8k and --ifeval.")] = None,
    code_judge: Annotated[Path | None, typer.Option(help="Judge trained on MBPP: for --mbpp.")] = None,
    gsm8k: Annotated[Path | None, typer.Option(help="Prompts of Table 8 and Figure 5 (JSON lines).")] = None,
    mbpp: Annotated[Path | None, typer.Option(help="Prompts of Table 9.")] = None,
    ifeval: Annotated[Path | None, typer.Option(help="Prompts of Figure 6.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of results.")] = Path("results/autojudge"),
    target: o.Target = "default",
    draft: o.Draft = None,
    thresholds: Annotated[
        str, typer.Option(help="Thresholds between commas: quantiles of the judge's validation labels, or numbers.")
    ] = "q0.04,q0.12,q0.2,q0.4,q0.6",
    p_drops: Annotated[
        str, typer.Option(help="Drop probabilities of DropMatch beside the judge, between commas.")
    ] = "0.3",
    window: Annotated[int, typer.Option(min=1, help="Drafted tokens per round.")] = 32,
    base_lengths: Annotated[str, typer.Option(help="Draft lengths of lossless decoding, beside the window's.")] = "8",
    num_gsm8k: Annotated[int, typer.Option(min=1, help="Prompts of --gsm8k.")] = 50,
    start_gsm8k: Annotated[int, typer.Option(min=0, help="Prompts to skip: those that the judge learned from.")] = 0,
    num_mbpp: Annotated[int, typer.Option(min=1, help="Prompts of --mbpp.")] = 50,
    start_mbpp: Annotated[int, typer.Option(min=0, help="Prompts to skip.")] = 0,
    num_ifeval: Annotated[int, typer.Option(min=1, help="Prompts of --ifeval.")] = 50,
    start_ifeval: Annotated[int, typer.Option(min=0, help="Prompts to skip.")] = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", min=1, help="Left out: each task's own cap.")
    ] = None,
    batch: QualityBatch = 16,
    speed_items: Annotated[int, typer.Option(min=0, help="Prompts of each part to time at batch 1 (0: none).")] = 4,
    repeats: Repeats = 1,
    speed_tokens: SpeedTokens = 128,
    k: o.NumPaths = 5,
    heads: o.Heads = "shortlist",
    draft_weights: o.DraftWeights = "own",
    seed: o.Seed = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Take nothing over from an earlier run.")] = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """Auto-Judge against Auto-Judge with DropMatch: accuracy, tau and speed by threshold, in and out of distribution.

    A stopped run goes on where it was when the same command is given again; finished parts are not run again."""
    from dropmatch.bench.autojudge import AutoJudgeSettings, arms_of, make_part, print_autojudge, run_autojudge
    from dropmatch.bench.settings import CompareSettings
    from dropmatch.bench.tasks import load_items
    from dropmatch.config import DropoutConfig

    settings = AutoJudgeSettings(
        window=window,
        thresholds=tuple(split_words(thresholds)),
        p_drops=tuple(parse_rates(p_drops, name="--p-drops", example="0.2,0.3")),
        base_lengths=tuple(parse_lengths(base_lengths, name="--base-lengths")),
    )
    wanted = (
        ("gsm8k", gsm8k, judge, "--judge", num_gsm8k, start_gsm8k),
        ("mbpp", mbpp, code_judge, "--code-judge", num_mbpp, start_mbpp),
        ("ifeval", ifeval, judge, "--judge", num_ifeval, start_ifeval),
    )
    parts = []
    for name, path, head, option, num, start in wanted:
        if path is None:
            continue
        if head is None:
            raise ConfigError(f"--{name} needs a judge. Give {option}.")
        part = make_part(name, load_items(path, num, start=start), path.name, head)
        arms_of(settings, part.head, DropoutConfig(num_paths=k))  # mistakes show before models load
        check_writable(output / f"{name}.json")
        parts.append(part)
    if not parts:
        raise ConfigError("Nothing to do. Give at least one of --gsm8k, --mbpp and --ifeval.")
    decoder = o.load_decoder(
        target,
        draft,
        rule="lossless",
        k=k,
        p_drop=str(settings.p_drops[0]),
        draft_length=window,
        dtype=dtype,
        device=device,
        heads=heads,
        draft_weights=draft_weights,
    )
    compare = CompareSettings(
        max_new_tokens=max_new_tokens,
        batch=batch,
        seed=seed,
        speed_items=speed_items,
        repeats=repeats,
        speed_tokens=speed_tokens,
    )
    with stoppable():
        result = run_autojudge(
            decoder,
            parts,
            settings,
            compare,
            described={"target": target, "draft": draft, "draft_weights": draft_weights},
            output=output,
            restart=restart,
        )
    print_autojudge(result)
    for name, facts in result["parts"].items():
        trained_for = facts["judge"]["trained_for"]
        if trained_for not in ([None, None], [target, draft]):
            note = (
                f"The judge of {name} was trained for {trained_for[0]} and {trained_for[1]}, by other names than these."
            )
            typer.secho(note, err=True)
        own = facts["judge"]["draft_weights"]
        if facts["judge"]["features"] == "DD-DT" and own not in (None, draft_weights):
            note = (
                f"The judge of {name} learned from states of a draft model with --draft-weights {own}, and reads those "
                f"of {draft_weights} here."
            )
            typer.secho(note, err=True)
    print(
        json.dumps({"output": str(output / "autojudge.json"), "table8": result["table8"], "table9": result["table9"]})
    )
