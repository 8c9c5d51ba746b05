"""dropmatch tune: the fastest setting of a pair that stays within a quality budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import (
    Batch,
    Data,
    MaxNewTokens,
    Num,
    Output,
    Restart,
    Start,
    check_writable,
    describe,
    load_prompts,
    parse_lengths,
    parse_rates,
    say_written,
    split_words,
    stoppable,
)


def tune(
    data: Data,
    output: Output = Path("results/tune.json"),
    target: o.Target = "default",
    draft: o.Draft = None,
    num: Num = None,
    start: Start = 0,
    max_accuracy_drop: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="0.02 is two points. Left out, as the others: 0.02 with ground truth."),
    ] = None,
    max_lossy_share: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Of the tokens. Left out, as the others: 0.05 without ground truth."),
    ] = None,
    max_logprob_loss: Annotated[
        float | None, typer.Option(min=0, help="Nats a token, of the target's own log-probability.")
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Recommend lossy settings only where the budget is proven to hold.")
    ] = False,
    forms: Annotated[
        str, typer.Option(help="Of sampled, full (sampled, heads over all tokens), expected (closed form).")
    ] = "sampled,expected",
    lengths: Annotated[str, typer.Option(help="Draft lengths, separated by commas.")] = "3,5,8,12",
    ks: Annotated[str, typer.Option(help="Numbers of dropout paths.")] = "5",
    p_drops: Annotated[str, typer.Option(help="Drop probabilities: numbers, auto, auto-expected.")] = "0.1,0.2,0.3",
    guards: Annotated[str, typer.Option(help="Least target probability of a lossy token; 0 is none.")] = "0,0.05",
    finalists: Annotated[int, typer.Option(min=1, help="Candidates that go to the finals.")] = 3,
    cost_items: Annotated[int, typer.Option(min=1, help="Prompts that are timed at batch 1.")] = 2,
    cost_tokens: Annotated[int, typer.Option(min=4, help="Tokens of each.")] = 48,
    max_new_tokens: MaxNewTokens = None,
    batch: Batch = 16,
    seed: o.Seed = 0,
    draft_weights: o.DraftWeights = "own",
    min_confidence: o.MinConfidence = 0.0,
    restart: Restart = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """Choose draft length, K, p_drop, guard, and sampled or closed form for your pair on your prompts: the fastest
    within a quality budget, with the evidence and how sure it is.

    A run that is stopped goes on where it was when the same command is given again."""
    from dropmatch.bench.budget import Budget
    from dropmatch.bench.tune import TuneSettings, candidates, default_budget, print_tune, run_tune
    from dropmatch.config import DropoutConfig

    settings = TuneSettings(
        forms=split_words(forms),
        lengths=parse_lengths(lengths),
        ks=parse_lengths(ks, name="--ks"),
        p_drops=split_words(p_drops),
        guards=parse_rates(guards, name="--guards", example="0,0.05"),
        finalists=finalists,
        cost_items=cost_items,
        cost_tokens=cost_tokens,
        max_new_tokens=max_new_tokens,
        batch=batch,
        seed=seed,
        strict=strict,
    )
    for candidate in candidates(settings):
        DropoutConfig(num_paths=candidate.k, p_drop=o.parse_p_drop(candidate.p_drop))  # type: ignore[arg-type]  # not None
    check_writable(output)
    items = load_prompts(data, num, start)
    limits = {
        "accuracy_drop": max_accuracy_drop,
        "lossy_share": max_lossy_share,
        "logprob_loss": max_logprob_loss,
    }
    is_stated = any(limit is not None for limit in limits.values())
    budget = Budget(**limits) if is_stated else default_budget(items)
    decoder = o.load_decoder(
        target,
        draft,
        rule="lossless",
        k=settings.ks[0],
        p_drop=None,
        draft_length=max(settings.lengths),
        dtype=dtype,
        device=device,
        draft_weights=draft_weights,
        min_confidence=min_confidence,
    )
    described = describe(target, draft, data, draft_weights=draft_weights, min_confidence=min_confidence, device=device)
    if dtype != "auto":
        described["dtype"] = dtype
    with stoppable(output):
        result = run_tune(decoder, items, budget, settings, described=described, output=output, restart=restart)
    print_tune(result)
    say_written(output)
