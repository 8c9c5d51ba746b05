"""dropmatch generate: one prompt, streamed, with the figures behind it."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from dropmatch.cli import options as o


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from standard input.")],
    target: o.Target = "default",
    draft: o.Draft = None,
    rule: o.Rule = "dropmatch",
    k: o.NumPaths = 5,
    p_drop: o.PDrop = None,
    guard_prob: o.GuardProb = 0.0,
    guard_ratio: o.GuardRatio = 0.0,
    judge: o.Judge = None,
    heads: o.Heads = "shortlist",
    draft_length: o.DraftLength = 5,
    draft_weights: o.DraftWeights = "own",
    min_confidence: o.MinConfidence = 0.0,
    tree_tokens: o.TreeTokens = None,
    tree_top_k: o.TreeTopK = None,
    max_new_tokens: o.MaxNewTokens = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    seed: o.Seed = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End in front of this text; may be repeated.")] = None,
    chat: Annotated[bool | None, typer.Option(help="Use the chat template. Left out: where there is one.")] = None,
    show_reasons: Annotated[bool, typer.Option(help="Colour tokens by the reason they were kept.")] = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
    as_json: o.AsJson = False,
) -> None:
    """Generate from a prompt with speculative decoding; statistics go to standard error."""
    from rich.console import Console

    from dropmatch.cli.render import coloured, legend, stats_table
    from dropmatch.config import SamplingParams
    from dropmatch.core.reasons import Reason

    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    decoder = o.load_decoder(
        target,
        draft,
        rule=rule,
        k=k,
        p_drop=p_drop,
        guard_prob=guard_prob,
        guard_ratio=guard_ratio,
        judge=judge,
        draft_length=draft_length,
        dtype=dtype,
        device=device,
        heads=heads,
        draft_weights=draft_weights,
        min_confidence=min_confidence,
        tree_tokens=tree_tokens,
        tree_top_k=tree_top_k,
    )
    ids = decoder.encode(text, chat=chat)
    if as_json:
        from dropmatch.provenance import collect

        run = decoder.run([ids], params)
        (generation,) = run.generations
        result = {
            "text": generation.text,
            "tokens": generation.tokens,
            "reasons": [reason.label for reason in generation.reasons],
            "finish_reason": generation.finish_reason,
            "prompt_tokens": generation.prompt_tokens,
            "stats": run.stats.to_json(),
            "settings": {
                "target": target,
                "draft": draft,
                "rule": rule,
                "k": k,
                "p_drop": decoder.dropout.p_drop,
                "guard_prob": guard_prob,
                "guard_ratio": guard_ratio,
                "judge": None if judge is None else str(judge),
                "draft_length": draft_length,
                "max_new_tokens": max_new_tokens,
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "seed": seed,
                "stop": list(params.stop),
                "dtype": str(decoder.target.dtype),
            },
            "provenance": collect(device=str(decoder.target.device)),
        }
        print(json.dumps(result))
        return
    engine = decoder.engine()
    engine.add(ids, params)
    tokens: list[int] = []
    reasons: list[Reason] = []
    while engine.has_work:
        for chunk in engine.step():
            tokens += chunk.tokens
            reasons += chunk.reasons
            if not show_reasons:
                print(chunk.text, end="", flush=True)
    if show_reasons:
        console = Console()
        console.print(coloured(tokens, reasons, lambda ids: decoder.tokenizer.decode(ids, skip_special_tokens=True)))
        console.print(legend())
    else:
        print()
    Console(stderr=True).print(stats_table(engine.stats))
