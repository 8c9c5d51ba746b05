"""dropmatch selfcheck: would the rule keep random tokens on this model?"""

from __future__ import annotations

import json
import warnings
from typing import Annotated

import typer

from dropmatch.cli import options as o

_PROMPTS = (
    "Explain in one paragraph why the sky is blue.",
    "A train travels 60 km in 45 minutes. How fast is it in km/h?",
    "Write a Python function that reverses a string.",
    "List three uses of salt besides cooking.",
)


def selfcheck(
    target: o.Target = "default",
    rule: o.Rule = "dropmatch",
    k: o.NumPaths = 5,
    p_drop: o.PDrop = "0.3",
    guard_prob: o.GuardProb = 0.0,
    guard_ratio: o.GuardRatio = 0.0,
    draft_length: Annotated[int, typer.Option("--draft-length", "-L", min=1, help="Drafted tokens per round.")] = 5,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=2, help="Tokens per prompt; the last one is never drafted.")
    ] = 32,
    limit: Annotated[float, typer.Option(min=0, max=1, help="Share of kept random tokens that still passes.")] = 0.01,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
    as_json: o.AsJson = False,
) -> None:
    """Draft uniformly random tokens and count how many the rule keeps. Exit code 1 above the limit."""
    from dropmatch.config import SamplingParams
    from dropmatch.core.calibrate import SaturationWarning

    decoder = o.load_decoder(
        target,
        "random",
        rule=rule,
        k=k,
        p_drop=p_drop,
        guard_prob=guard_prob,
        guard_ratio=guard_ratio,
        draft_length=draft_length,
        dtype=dtype,
        device=device,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SaturationWarning)
        run = decoder.run(_PROMPTS, SamplingParams(max_new_tokens=max_new_tokens, eos_ids=()))
    stats = run.stats.requests
    # only the first drafted token of a round is judged for sure; those behind a rejection are never reached
    tried, kept = stats.drafted_at[0], stats.accepted_at[0]
    share = kept / tried
    is_fit = share <= limit
    if as_json:
        print(
            json.dumps(
                {
                    "tried": tried,
                    "kept": kept,
                    "share": share,
                    "limit": limit,
                    "passes": is_fit,
                    "p_drop": decoder.dropout.p_drop,
                    "saturates": bool(caught),
                }
            )
        )
    else:
        print(
            f"{kept} of {tried} random first tokens kept ({share:.1%}) by {rule!r} at p_drop={decoder.dropout.p_drop}."
        )
        for warning in caught:
            print(f"warning: {warning.message}")
        advice = "Use --p-drop auto, a smaller --p-drop, or --guard-prob 0.05."
        print("passes" if is_fit else f"FAILS: the rule keeps tokens that no model proposed. {advice}")
    if not is_fit:
        raise typer.Exit(1)
