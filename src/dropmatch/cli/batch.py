"""dropmatch bench batch: DropMatch against lossless decoding by batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import (
    Data,
    Output,
    Restart,
    Start,
    check_writable,
    describe,
    load_prompts,
    parse_lengths,
    say_written,
    stoppable,
)


def batch(
    data: Data,
    output: Output = Path("results/bench_batch.json"),
    target: o.Target = "default",
    draft: o.Draft = None,
    num: Annotated[
        int | None, typer.Option(min=1, help="Prompts of each file. Left out: as many as the largest batch.")
    ] = None,
    start: Start = 0,
    batches: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,4,8,16,32",
    rule: o.Rule = "dropmatch",
    draft_length: Annotated[int, typer.Option("--draft-length", "-L", min=1, help="Drafted tokens per round.")] = 10,
    max_new_tokens: o.MaxNewTokens = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Passes over all prompts at each size.")] = 1,
    k: o.NumPaths = 5,
    p_drop: o.PDrop = None,
    heads: o.Heads = "shortlist",
    draft_weights: o.DraftWeights = "own",
    min_confidence: o.MinConfidence = 0.0,
    seed: o.Seed = 0,
    restart: Restart = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """DropMatch over lossless throughput by batch size, on the same prompts in one run.

    A run that is stopped goes on where it was when the same command is given again."""
    from dropmatch.bench.batch import check_rule, print_batch, run_batch

    check_rule(rule)
    sizes = parse_lengths(batches, name="--batches")
    check_writable(output)
    items = load_prompts(data, num or max(sizes), start)
    decoder = o.load_decoder(
        target,
        draft,
        rule=rule,
        k=k,
        p_drop=p_drop,
        draft_length=draft_length,
        dtype=dtype,
        device=device,
        heads=heads,
        draft_weights=draft_weights,
        min_confidence=min_confidence,
    )
    with stoppable(output):
        result = run_batch(
            decoder,
            items,
            batches=sizes,
            draft_length=draft_length,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            rule=rule,
            seed=seed,
            described=describe(target, draft, data, draft_weights=draft_weights, min_confidence=min_confidence),
            output=output,
            restart=restart,
        )
    print_batch(result)
    say_written(output)
