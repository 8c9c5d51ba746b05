"""dropmatch compare: acceptance rules side by side, their speed and what they cost the answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.errors import ConfigError


def compare(
    data: Annotated[list[str], typer.Option(help="JSON-lines file of prompts, or a data set's name; may be repeated.")],
    rules: Annotated[
        str,
        typer.Option(
            help="Rules between commas, with settings of their own behind @: lossless,dropmatch,dropmatch@p=0.1@k=20. "
            "plain decodes without a draft."
        ),
    ] = "lossless,dropmatch",
    output: Annotated[Path, typer.Option("--output", "-o", help="Results file.")] = Path("results/compare.json"),
    target: o.Target = "default",
    draft: o.Draft = None,
    lengths: Annotated[str, typer.Option(help="Draft lengths, separated by commas.")] = "5",
    num: Annotated[int | None, typer.Option(min=1, help="Prompts of each file. Left out: all.")] = None,
    start: Annotated[int, typer.Option(min=0, help="Prompts to skip at the start of each file.")] = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", min=1, help="Left out: the task's own cap.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded together while quality is measured.")] = 16,
    speed_items: Annotated[int, typer.Option(min=0, help="Prompts to time at batch 1 (0: no timing).")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each prompt.")] = 1,
    speed_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a timed answer.")] = 128,
    k: o.NumPaths = 5,
    p_drop: o.PDrop = None,
    guard_prob: o.GuardProb = 0.0,
    guard_ratio: o.GuardRatio = 0.0,
    judge: o.Judge = None,
    heads: o.Heads = "full",
    draft_weights: o.DraftWeights = "own",
    min_confidence: o.MinConfidence = 0.0,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: o.Seed = 0,
    strips: Annotated[int, typer.Option(min=0, help="Prompts whose tokens are written out for reports.")] = 4,
    restart: Annotated[
        bool, typer.Option("--restart", help="Take nothing over from an earlier run of this output.")
    ] = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """Compare acceptance rules on the same prompts: tau, speed, accuracy with intervals, what the text lost.

    A run that is stopped goes on where it was when the same command is given again, and rules or prompts can be added
    to a results file that is there already."""
    from dropmatch.bench.arms import parse_arms, split_list
    from dropmatch.bench.compare import CompareSettings, run_compare
    from dropmatch.bench.tasks import load_items
    from dropmatch.cli.bench import check_writable, parse_lengths
    from dropmatch.config import DropoutConfig
    from dropmatch.core.acceptance import RuleOptions

    draft_lengths = parse_lengths(lengths)
    rule_options = RuleOptions(guard_prob=guard_prob, guard_ratio=guard_ratio, judge=o.load_head(judge))
    head = rule_options.judge
    names = split_list(rules)
    parse_arms(names, draft_lengths, DropoutConfig(num_paths=k), rule_options)  # mistakes show before models load
    check_writable(output)
    items = [item for source in data for item in load_items(source, num, start=start)]
    doubled = next((item.id for i, item in enumerate(items) if item.id in {x.id for x in items[:i]}), None)
    if doubled is not None:
        raise ConfigError(f"Two prompts have the id {doubled!r}. Give each file once, or rename one of them.")
    decoder = o.load_decoder(
        target,
        draft,
        rule="lossless",
        k=k,
        p_drop=p_drop,
        guard_prob=0.0,
        guard_ratio=0.0,
        draft_length=max(draft_lengths),
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
    try:
        result = run_compare(
            decoder,
            items,
            arms,
            settings,
            described=described,
            data=[Path(source).name for source in data],
            output=output,
            restart=restart,
        )
    except KeyboardInterrupt:
        typer.secho(f"\nStopped. Give the same command again to go on; {output} is not written yet.", err=True)
        sys.exit(130)
    from dropmatch.report.terminal import print_summary

    print_summary(result)
    typer.secho(f"Written to {output}.", err=True)
