"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropmatch.errors import ConfigError

if TYPE_CHECKING:
    from dropmatch import config
    from dropmatch.api import Decoder
    from dropmatch.core.judge import JudgeHead

Target = Annotated[
    str, typer.Option(help="Target model: hub id, local folder, .gguf file, or a named pair (default, small).")
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Draft model or EAGLE-3 head, likewise; or eagle3 (the pair's head), ngram, none. Left out: the pair's "
        "own drafter, or ngram."
    ),
]
Rule = Annotated[str, typer.Option(help="Acceptance rule, or several joined by '+'.")]
Judge = Annotated[Path | None, typer.Option(help="Trained judge, for rules with `judge` in them: its folder or file.")]
NumPaths = Annotated[int, typer.Option("--k", min=1, help="K, dropout paths through the LM head.")]
PDrop = Annotated[
    str | None,
    typer.Option(help="Drop probability of the head's input, auto, or auto-expected. Left out: 0.3, for small auto."),
]
GuardProb = Annotated[
    float, typer.Option(min=0, max=1, help="Never keep a lossy token below this target probability (0: off).")
]
GuardRatio = Annotated[
    float, typer.Option(min=0, max=1, help="... or below this share of the target's best token (0: off).")
]
DraftLength = Annotated[int, typer.Option("--draft-length", "-L", min=0, help="Drafted tokens per round.")]
Heads = Annotated[
    str, typer.Option(help="shortlist: ask the dropout heads about the 1,024 likeliest tokens; or full: about all.")
]
DraftWeights = Annotated[
    str,
    typer.Option(help="own; or, on a CPU, int4 (4-bit weights, for batch 1) or int8 (8-bit products, for batches)."),
]
MinConfidence = Annotated[
    float, typer.Option(min=0, max=1, help="End a draft behind a token the draft model gives less (0: off).")
]
TreeTokens = Annotated[
    int | None,
    typer.Option(help="EAGLE-3: most nodes of a draft tree. Left out: 60, for small 16.", show_default=False),
]
TreeTopK = Annotated[
    int | None,
    typer.Option(help="EAGLE-3: children per node; 1 drafts chains. Left out: 10, for small 4.", show_default=False),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")]
Seed = Annotated[int, typer.Option(min=0, help="Keys dropout masks and sampling noise.")]
DType = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def parse_p_drop(text: str | None) -> config.PDrop | None:
    """A number in [0, 1), "auto" or "auto-expected"; None leaves the choice to load."""
    if text is None or text in ("auto", "auto-expected"):
        return text  # type: ignore[return-value]  # the two names are the only strings left
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--p-drop={text!r} is not allowed. Give a number in [0, 1), auto, or auto-expected."
        ) from None


def load_head(path: Path | None) -> JudgeHead | None:
    """The judge in a folder or file, where one is named."""
    if path is None:
        return None
    from dropmatch.judge import load_judge

    return load_judge(path)


def load_decoder(
    target: str,
    draft: str | None,
    *,
    rule: str,
    k: int,
    p_drop: str | None,
    guard_prob: float = 0.0,
    guard_ratio: float = 0.0,
    draft_length: int,
    dtype: str,
    device: str,
    heads: str = "shortlist",
    draft_weights: str = "own",
    min_confidence: float = 0.0,
    judge: Path | None = None,
    tree_tokens: int | None = None,
    tree_top_k: int | None = None,
) -> Decoder:
    """`dropmatch.load` from command-line values, saying what "auto" chose."""
    import dropmatch
    from dropmatch.hf.loading import hide_progress_bars

    hide_progress_bars()
    options: dict[str, Any] = {"guard_prob": guard_prob, "guard_ratio": guard_ratio, "judge": load_head(judge)}
    decoder = dropmatch.load(
        target,
        draft,
        rule=rule,
        rule_options=dropmatch.RuleOptions(**options),
        num_paths=k,
        p_drop=parse_p_drop(p_drop),
        heads=heads,  # type: ignore[arg-type]  # checked where it is used
        draft_length=draft_length,
        draft_weights=draft_weights,  # type: ignore[arg-type]
        min_confidence=min_confidence,
        tree_tokens=tree_tokens,
        tree_top_k=tree_top_k,
        dtype=dtype,
        device=device,
    )
    if decoder.p_drop_choice is not None:
        choice = decoder.p_drop_choice
        radius, kind = choice.median_radius[choice.p_drop], "expected" if choice.is_expected else "sampled"
        typer.secho(f"p_drop=auto chose {choice.p_drop} (median {kind} radius {radius:.3f} nats).", err=True, dim=True)
    return decoder
