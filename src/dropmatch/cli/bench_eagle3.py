"""dropmatch bench eagle3: an EAGLE-3 head with and without DropMatch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import (
    Data,
    Output,
    QualityBatch,
    Repeats,
    Restart,
    SpeedItems,
    SpeedTokens,
    Start,
    check_writable,
    describe,
    load_prompts,
    parse_lengths,
    say_written,
    stoppable,
)
from dropmatch.errors import ConfigError


def bench_eagle3(
    data: Data,
    other_data: Annotated[
        list[str] | None,
        typer.Option(help="Prompts unlike those the head was trained on, likewise. Left out: twelve in Korean."),
    ] = None,
    output: Output = Path("results/bench_eagle3.json"),
    target: o.Target = "small",
    draft: Annotated[str, typer.Option(help="The head: a folder, a hub id, or eagle3 for the pair's own.")] = "eagle3",
    draft_model: Annotated[str | None, typer.Option(help="A draft model to set beside it.")] = None,
    draft_weights: o.DraftWeights = "own",
    num: Annotated[int | None, typer.Option(min=1, help="Prompts of each file. Left out: all.")] = 20,
    start: Start = 0,
    lengths: Annotated[
        str, typer.Option(help="Levels of the trees, between commas: the paper's L plus one.")
    ] = "6,8,10",
    rule: Annotated[str, typer.Option(help="Acceptance rule with the head.")] = "dropmatch-naive",
    other_rule: Annotated[str, typer.Option(help="Acceptance rule with the other drafters.")] = "dropmatch",
    tree_tokens: o.TreeTokens = None,
    tree_top_k: o.TreeTopK = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens a turn.")] = 192,
    batch: QualityBatch = 8,
    speed_items: SpeedItems = 4,
    repeats: Repeats = 1,
    speed_tokens: SpeedTokens = 128,
    k: o.NumPaths = 5,
    p_drop: o.PDrop = None,
    heads: o.Heads = "shortlist",
    seed: o.Seed = 0,
    restart: Restart = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """An EAGLE-3 head with and without DropMatch at several depths, and away from its training text.

    A run that is stopped goes on where it was when the same command is given again."""
    from dropmatch.bench.eagle3 import Eagle3Bench, korean_items, parts_folder, print_eagle3, run_eagle3
    from dropmatch.bench.settings import CompareSettings

    levels = parse_lengths(lengths)
    if draft_model is None and draft_weights != "own":
        raise ConfigError(f"--draft-weights={draft_weights} is for a draft model. Name one with --draft-model.")
    Eagle3Bench(levels, rule, other_rule).check()
    check_writable(output)
    parts_folder(output)
    items = load_prompts(data, num, start)
    others = load_prompts(other_data, num, start) if other_data else korean_items(max_new_tokens)
    decoder = o.load_decoder(
        target,
        draft,
        rule=rule,
        k=k,
        p_drop=p_drop,
        draft_length=levels[0],
        dtype=dtype,
        device=device,
        heads=heads,
        tree_tokens=tree_tokens,
        tree_top_k=tree_top_k,
    )
    model = None
    own_weights = {} if draft_weights == "own" else {"draft_weights": draft_weights}
    if draft_model is not None:
        from dropmatch.api import load_draft_model

        model = load_draft_model(
            draft_model,
            decoder,
            dtype=dtype,
            device=device,
            draft_weights=draft_weights,  # type: ignore[arg-type]
        )
    with stoppable(output):
        result = run_eagle3(
            decoder,
            items,
            others,
            Eagle3Bench(levels, rule, other_rule, model),
            CompareSettings(
                max_new_tokens=max_new_tokens,
                batch=batch,
                seed=seed,
                speed_items=speed_items,
                repeats=repeats,
                speed_tokens=speed_tokens,
                strips=2,
            ),
            described=describe(target, draft, data, draft_model=draft_model, **own_weights),
            data=[*data, *(other_data or ["korean"])],
            output=output,
            restart=restart,
        )
    print_eagle3(result)
    say_written(output)
