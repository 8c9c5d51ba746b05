"""dropmatch bench: measurements that write results files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import Output, check_writable, parse_lengths
from dropmatch.errors import ConfigError

bench_app = typer.Typer(help="Measurements side by side in one run, written to results files.", no_args_is_help=True)


@bench_app.callback()
def _group() -> None:
    """Keeps `bench` a group of commands."""


@bench_app.command()
def quick(
    data: Annotated[Path, typer.Option(help="Folder with gsm8k.jsonl and humaneval.jsonl.")],
    output: Output = Path("results/bench_quick.json"),
    target: o.Target = "default",
    draft: o.Draft = None,
    num_gsm8k: Annotated[int, typer.Option(min=0, help="Prompts from gsm8k.jsonl.")] = 8,
    num_humaneval: Annotated[int, typer.Option(min=0, help="Prompts from humaneval.jsonl.")] = 4,
    max_new_tokens: o.MaxNewTokens = 64,
    lengths: Annotated[str, typer.Option(help="Draft lengths, separated by commas.")] = "5,10",
    k: o.NumPaths = 5,
    p_drop: o.PDrop = None,
    heads: o.Heads = "shortlist",
    draft_weights: o.DraftWeights = "own",
    min_confidence: o.MinConfidence = 0.0,
    repeats: Annotated[int, typer.Option(min=1, help="Passes over all prompts and arms.")] = 1,
    peers: Annotated[bool, typer.Option(help="Also time transformers' generate and assisted generation.")] = True,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """Plain, transformers' generate and assisted, lossless and DropMatch on the same prompts in one run."""
    from dropmatch.bench.quick import print_table, run_quick
    from dropmatch.bench.tasks import load_items

    draft_lengths = parse_lengths(lengths)
    drop = o.parse_p_drop(p_drop)
    check_writable(output)
    prompts = load_items(data / "gsm8k.jsonl", num_gsm8k) + load_items(data / "humaneval.jsonl", num_humaneval)
    if not prompts:
        raise ConfigError("--num-gsm8k and --num-humaneval are both 0. Give at least one prompt.")
    result = run_quick(
        prompts,
        target=target,
        draft=draft,
        lengths=draft_lengths,
        max_new_tokens=max_new_tokens,
        num_paths=k,
        p_drop=drop,
        heads=heads,
        draft_weights=draft_weights,
        min_confidence=min_confidence,
        repeats=repeats,
        with_peers=peers,
        dtype=dtype,
        device=device,
        output=output,
    )
    print_table(result)
    print(json.dumps({"output": str(output), **result["summary"]}))


@bench_app.command()
def heads(
    data: Annotated[Path, typer.Option(help="Folder with gsm8k.jsonl and humaneval.jsonl.")],
    output: Output = Path("results/heads_shortlist.json"),
    target: o.Target = "default",
    draft: o.Draft = None,
    num_gsm8k: Annotated[int, typer.Option(min=0, help="Prompts from gsm8k.jsonl.")] = 8,
    num_humaneval: Annotated[int, typer.Option(min=0, help="Prompts from humaneval.jsonl.")] = 4,
    max_new_tokens: o.MaxNewTokens = 96,
    draft_length: o.DraftLength = 10,
    k: o.NumPaths = 5,
    p_drop: o.PDrop = None,
    shortlist_size: Annotated[int, typer.Option(min=2, help="Tokens of the shortlist.")] = 1024,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """Dropout heads over a shortlist against the whole vocabulary: decisions and cost at the same positions."""
    from dropmatch.bench.heads import run_heads
    from dropmatch.bench.tasks import load_items

    drop = o.parse_p_drop(p_drop)
    check_writable(output)
    result = run_heads(
        load_items(data / "gsm8k.jsonl", num_gsm8k) + load_items(data / "humaneval.jsonl", num_humaneval),
        target=target,
        draft=draft,
        draft_length=draft_length,
        max_new_tokens=max_new_tokens,
        num_paths=k,
        p_drop=drop,
        shortlist_size=shortlist_size,
        dtype=dtype,
        device=device,
        output=output,
    )
    print(json.dumps({"output": str(output), **result["summary"]}))
