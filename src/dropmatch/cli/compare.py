"""dropmatch compare: acceptance rules side by side, their speed and what they cost the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import (
    Data,
    MaxNewTokens,
    Num,
    Output,
    QualityBatch,
    Repeats,
    SpeedItems,
    SpeedTokens,
    Start,
    check_writable,
    file_names,
    load_prompts,
    parse_lengths,
    say_written,
    stoppable,
)


def compare(
    data: Data,
    rules: Annotated[
        str,
        typer.Option(
            help="Rules between commas, with settings of their own behind @: lossless,dropmatch,dropmatch@p=0.1@k=20. "
            "plain decodes without a draft."
        ),
    ] = "lossless,dropmatch",
    output: Output = Path("results/compare.json"),
    target: o.Target = "default",
    draft: o.Draft = None,
    lengths: Annotated[str, typer.Option(help="Draft lengths, separated by commas.")] = "5",
    num: Num = None,
    start: Start = 0,
    max_new_tokens: MaxNewTokens = None,
    batch: QualityBatch = 16,
    speed_items: SpeedItems = 4,
    repeats: Repeats = 1,
    speed_tokens: SpeedTokens = 128,
    generate: Annotated[
        bool,
        typer.Option("--generate", help="Time transformers' generate beside them, on a second copy of the target."),
    ] = False,
    k: o.NumPaths = 5,
    p_drop: o.PDrop = None,
    guard_prob: o.GuardProb = 0.0,
    guard_ratio: o.GuardRatio = 0.0,
    judge: o.Judge = None,
    heads: o.Heads = "shortlist",
    draft_weights: o.DraftWeights = "own",
    min_confidence: o.MinConfidence = 0.0,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: o.Seed = 0,
    strips: Annotated[int, typer.Option(min=0, help="Prompts whose tokens are written out for reports.")] = 4,
    restart: Annotated[
        bool, typer.Option("--restart", help="Write the output anew: take nothing over from an earlier run of it.")
    ] = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """Compare acceptance rules on the same prompts: tau, speed, accuracy with intervals, what the text lost.

    A run that is stopped goes on where it was when the same command is given again. A results file that is there
    already is extended: its rules run beside those given, on its prompts, which must be among those given, and on new
    ones. Only what is missing is decoded. A file of other models or settings is refused."""
    from dropmatch.bench.arms import parse_arms, split_list
    from dropmatch.bench.compare import run_compare
    from dropmatch.bench.comparison import read_compare
    from dropmatch.bench.settings import CompareSettings
    from dropmatch.bench.takeover import with_earlier_arms
    from dropmatch.config import DropoutConfig
    from dropmatch.core.acceptance import RuleOptions

    draft_lengths = parse_lengths(lengths)
    rule_options = RuleOptions(guard_prob=guard_prob, guard_ratio=guard_ratio, judge=o.load_head(judge))
    head = rule_options.judge
    names = split_list(rules)
    check_writable(output)

    unloaded = DropoutConfig(num_paths=k)  # mistakes show before models load
    arms = parse_arms(names, draft_lengths, unloaded, rule_options)
    if output.exists() and not restart:
        arms = with_earlier_arms(arms, read_compare(output), unloaded, rule_options, where=output)
    items = load_prompts(data, num, start)
    decoder = o.load_decoder(
        target,
        draft,
        rule="lossless",
        k=k,
        p_drop=p_drop,
        draft_length=max(1, *(arm.draft_length for arm in arms)),
        dtype=dtype,
        device=device,
        heads=heads,
        draft_weights=draft_weights,
        min_confidence=min_confidence,
    )
    arms = parse_arms(names, draft_lengths, decoder.dropout, rule_options)
    settings = CompareSettings(
        max_new_tokens=max_new_tokens,
        batch=batch,
        temperature=temperature,
        seed=seed,
        speed_items=speed_items,
        repeats=repeats,
        speed_tokens=speed_tokens,
        with_generate=generate,
        strips=strips,
    )
    described = {
        "target": target,
        "draft": draft,
        "guard_prob": guard_prob,
        "guard_ratio": guard_ratio,
        "judge": None if head is None else f"{head.name} ({head.digest})",
        "draft_weights": draft_weights,
        "min_confidence": min_confidence,
    }
    with stoppable(output):
        result = run_compare(
            decoder,
            items,
            arms,
            settings,
            described=described,
            data=file_names(data),
            output=output,
            options=rule_options,
            restart=restart,
        )
    from dropmatch.report.terminal import print_summary

    print_summary(result)
    say_written(output)
