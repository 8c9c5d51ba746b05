"""dropmatch demo: one prompt decoded three ways side by side: plain, lossless speculative, DropMatch."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from dropmatch.cli import options as o

_PROMPT = "Write a Python function that returns the n-th Fibonacci number, and explain in two sentences how it works."


def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask the model.")] = _PROMPT,
    pair: Annotated[
        str, typer.Option(help="default (Qwen2.5-Coder 1.5B and 0.5B) or small (SmolLM2-135M).")
    ] = "default",
    rule: o.Rule = "dropmatch",
    k: o.NumPaths = 5,
    p_drop: o.PDrop = None,
    draft_length: o.DraftLength = 5,
    max_new_tokens: o.MaxNewTokens = 128,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
    as_json: o.AsJson = False,
) -> None:
    """Decode one prompt plainly, losslessly and with DropMatch, and compare."""
    from rich.console import Console
    from rich.table import Table

    from dropmatch.cli.render import coloured, legend, reason_shares
    from dropmatch.config import SamplingParams, check_choice
    from dropmatch.core.acceptance import make_rule
    from dropmatch.hf.pairs import PAIRS
    from dropmatch.provenance import collect

    check_choice("pair", pair, PAIRS)
    if pair == "small" and dtype == "auto":
        dtype = "float32"  # cheap at this size, and lossless is then plain decoding to the last token
    decoder = o.load_decoder(
        pair,
        None,
        rule=rule,
        k=k,
        p_drop=p_drop,
        draft_length=draft_length,
        dtype=dtype,
        device=device,
    )
    params = SamplingParams(max_new_tokens=max_new_tokens)
    arms: dict[str, Any] = {
        "plain": {"drafter": None, "rule": make_rule("exact")},
        "lossless": {"rule": make_rule("lossless")},
        rule: {},
    }
    console = Console(stderr=as_json)
    ids = decoder.encode(prompt)
    for settings in arms.values():  # warm-up: first calls pay for lazy initialisation
        decoder.run([ids], SamplingParams(max_new_tokens=4), engine=decoder.engine(**settings))
    runs = {}
    for name, settings in arms.items():
        console.rule(f"[bold]{name}")
        runs[name] = decoder.run([ids], params, engine=decoder.engine(**settings))
        (generation,) = runs[name].generations
        console.print(
            coloured(
                generation.tokens,
                generation.reasons,
                lambda tokens: decoder.tokenizer.decode(tokens, skip_special_tokens=True),
            )
        )
    table = Table("", "tokens", "tokens/s", "over plain", "tau", "lossy", "reasons tokens were kept")
    plain = runs["plain"].stats.tokens_per_second
    for name, run in runs.items():
        stats = run.stats
        table.add_row(
            name,
            str(stats.requests.emitted),
            f"{stats.tokens_per_second:.2f}",
            f"{stats.tokens_per_second / plain:.2f}x",
            f"{stats.requests.tau:.2f}",
            str(len(stats.requests.lossy)),
            reason_shares(stats),
        )
    console.print(legend())
    console.print(table)
    console.print(
        "DropMatch is lossy: its text may differ from the target's. In bfloat16 even lossless may part from plain at a "
        "near-tie, since forwards over one and over several tokens round differently. One prompt on a busy machine "
        "says nothing reliable about speed or quality: see docs/results.md for measured runs.",
        style="dim",
    )
    if as_json:
        result = {
            "arms": {
                name: {"text": run.generations[0].text, "stats": run.stats.to_json()} for name, run in runs.items()
            },
            "settings": {"pair": pair, "rule": rule, "k": k, "p_drop": decoder.dropout.p_drop, "L": draft_length},
            "provenance": collect(device=str(decoder.target.device)),
        }
        print(json.dumps(result))
