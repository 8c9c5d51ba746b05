"""dropmatch selfcheck: would the rule keep random tokens on this model?"""

from __future__ import annotations

import json
import warnings
from typing import Annotated, Any

import typer

from dropmatch.cli import options as o

_PROMPTS = (
    "Explain in one paragraph why the sky is blue.",
    "A train travels 60 km in 45 minutes. How fast is it in km/h?",
    "Write a Python function that reverses a string.",
    "List three uses of salt besides cooking.",
)

# Sharpness of the random drafts' distributions: Eq. 6 compares distributions, and a wide one is near a wide centroid.
_DRAFTS = {"uniform": 0.0, "random": 1.0, "sure": 4.0}


def selfcheck(
    target: o.Target = "default",
    rule: o.Rule = "dropmatch",
    k: o.NumPaths = 5,
    p_drop: o.PDrop = None,
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
    """Draft uniformly random tokens, under distributions from uniform to sure, and count how many the rule keeps.

    Exit code 1 if it keeps more than the limit of any kind.
    """
    from dropmatch.config import SamplingParams
    from dropmatch.core.calibrate import SaturationWarning
    from dropmatch.drafters.random_tokens import RandomDrafter

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
    params = SamplingParams(max_new_tokens=max_new_tokens, eos_ids=())
    by_draft: dict[str, dict[str, Any]] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SaturationWarning)
        for name, sharpness in _DRAFTS.items():
            drafter = RandomDrafter(decoder.target.device, decoder.target.vocab_size, sharpness=sharpness)
            stats = decoder.run(_PROMPTS, params, engine=decoder.engine(drafter=drafter)).stats.requests
            # only the first drafted token of a round is judged for sure; those behind a rejection are never reached
            tried, kept = stats.drafted_at[0], stats.accepted_at[0]
            by_draft[name] = {"tried": tried, "kept": kept, "share": kept / tried}
    worst = max(by_draft, key=lambda name: by_draft[name]["share"])
    is_fit = by_draft[worst]["share"] <= limit
    if as_json:
        print(
            json.dumps(
                {
                    **by_draft[worst],
                    "draft": worst,
                    "by_draft": by_draft,
                    "limit": limit,
                    "passes": is_fit,
                    "p_drop": decoder.dropout.p_drop,
                    "saturates": bool(caught),
                }
            )
        )
    else:
        for name, found in by_draft.items():
            print(
                f"{name:8} {found['kept']} of {found['tried']} random tokens kept ({found['share']:.1%}) by {rule!r} "
                f"at p_drop={decoder.dropout.p_drop}"
            )
        for message in dict.fromkeys(str(warning.message) for warning in caught):
            print(f"warning: {message}")
        advice = "Use --p-drop auto, a smaller --p-drop, or --guard-prob 0.05."
        print("passes" if is_fit else f"FAILS: the rule keeps tokens that no model proposed. {advice}")
    if not is_fit:
        raise typer.Exit(1)
