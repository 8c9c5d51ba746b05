"""dropmatch analyze: the DropMatch paper's analyses of dropout heads, on any pair."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    parse_rates,
    say_written,
    split_words,
    stoppable,
)
from dropmatch.errors import ConfigError

if TYPE_CHECKING:
    from dropmatch.api import Decoder

analyze_app = typer.Typer(
    help="The paper's analyses of dropout heads on your pair, written to results files.", no_args_is_help=True
)

DraftLength = Annotated[int, typer.Option("--draft-length", "-L", min=1, help="Drafted tokens per round.")]


@analyze_app.command()
def heads(
    data: Data,
    output: Output = Path("results/analyze_heads.json"),
    target: o.Target = "default",
    draft: o.Draft = None,
    num: Num = None,
    start: Start = 0,
    rates: Annotated[str, typer.Option(help="Drop probabilities of the single heads, between commas.")] = (
        "0.1,0.2,0.3,0.4,0.5"
    ),
    parts: Annotated[str, typer.Option(help="Which of accuracy, votes, divergence.")] = "accuracy,votes,divergence",
    k: o.NumPaths = 5,
    p_drop: o.PDrop = None,
    draft_length: DraftLength = 5,
    max_new_tokens: MaxNewTokens = None,
    batch: Batch = 16,
    seed: o.Seed = 0,
    draft_weights: o.DraftWeights = "own",
    restart: Restart = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """What single heads are worth: each one's accuracy alone by drop probability, how many of them agree, and the
    divergences of tokens kept by Eq. 6 and by Eq. 7 (Tables 1 to 3).

    A run that is stopped goes on where it was when the same command is given again."""
    from dropmatch.bench.analyses.decoding import DecodingSettings
    from dropmatch.bench.analyses.heads import print_heads, run_heads_analysis

    drops = parse_rates(rates)
    check_writable(output)
    items = load_prompts(data, num, start)
    decoder = _decoder(target, draft, k, p_drop, draft_length, dtype, device, draft_weights)
    with stoppable(output):
        result = run_heads_analysis(
            decoder,
            items,
            rates=drops,
            parts=split_words(parts),
            settings=DecodingSettings(max_new_tokens, batch, draft_length, seed),
            described=describe(target, draft, data, draft_weights=draft_weights),
            output=output,
            restart=restart,
        )
    print_heads(result)
    say_written(output)


@analyze_app.command()
def similarity(
    data: Data,
    encoder: Annotated[str, typer.Option(help="Sentence-embedding model with mean pooling: folder or hub id.")],
    entailment: Annotated[
        str | None, typer.Option(help="Classifier for natural language inference, likewise. Left out: cosine only.")
    ] = None,
    output: Output = Path("results/analyze_similarity.json"),
    target: o.Target = "default",
    draft: o.Draft = None,
    num: Num = 40,
    start: Start = 0,
    rates: Annotated[str, typer.Option(help="Drop probabilities, between commas.")] = "0.1,0.3",
    k: o.NumPaths = 5,
    draft_length: DraftLength = 5,
    max_new_tokens: MaxNewTokens = None,
    batch: Batch = 16,
    seed: o.Seed = 0,
    draft_weights: o.DraftWeights = "own",
    restart: Restart = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """How alike the heads' whole answers are: cosine of embeddings, and entailment both ways (Figure 3).

    A run that is stopped goes on where it was when the same command is given again."""
    from dropmatch.bench.analyses.decoding import DecodingSettings
    from dropmatch.bench.analyses.similarity import print_similarity, run_similarity
    from dropmatch.hf.encoders import load_encoder, load_entailment
    from dropmatch.hf.loading import hide_progress_bars

    drops = parse_rates(rates)
    check_writable(output)
    items = load_prompts(data, num, start)
    hide_progress_bars()
    sentence_encoder = load_encoder(encoder)
    entails = None if entailment is None else load_entailment(entailment)
    decoder = _decoder(target, draft, k, None, draft_length, dtype, device, draft_weights)
    with stoppable(output):
        result = run_similarity(
            decoder,
            items,
            rates=drops,
            encoder=sentence_encoder,
            entailment=entails,
            settings=DecodingSettings(max_new_tokens, batch, draft_length, seed),
            described=describe(target, draft, data, draft_weights=draft_weights, encoder=encoder, nli=entailment),
            output=output,
            restart=restart,
        )
    print_similarity(result)
    say_written(output)


@analyze_app.command()
def overhead(
    output: Output = Path("results/analyze_overhead.json"),
    target: o.Target = "default",
    inputs: Annotated[int, typer.Option(min=1, help="Input tokens of the forward; all of them are judged.")] = 5,
    context: Annotated[int, typer.Option(min=1, help="Cached tokens in front of them.")] = 256,
    repeats: Annotated[int, typer.Option(min=3, help="Interleaved measurements of each part.")] = 30,
    shortlist_size: Annotated[int, typer.Option(min=2, help="Tokens of the shortlist.")] = 1024,
    text: Annotated[Path | None, typer.Option(help="Text file to read. Left out: a built-in text.")] = None,
    k: o.NumPaths = 5,
    p_drop: o.PDrop = None,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """What the heads cost beside one target forward at batch 1: naive, with divergences, on a shortlist, in closed form
    (Table 4)."""
    from dropmatch.bench.analyses.overhead import print_overhead, run_overhead

    check_writable(output)
    words = None if text is None else _read(text)
    decoder = _decoder(target, "none", k, p_drop, inputs, dtype, device, "own")
    with stoppable(output, resumes=False):
        result = run_overhead(
            decoder,
            num_inputs=inputs,
            context=context,
            repeats=repeats,
            shortlist_size=shortlist_size,
            text=words,
            described={"target": target, "text": "built-in" if text is None else text.name},
            output=output,
        )
    print_overhead(result)
    say_written(output)


@analyze_app.command()
def radius(
    data: Annotated[
        list[str] | None, typer.Option(help="Prompts to ask at, as above. Left out: the text that p_drop=auto reads.")
    ] = None,
    output: Output = Path("results/analyze_radius.json"),
    target: o.Target = "default",
    num: Num = 8,
    start: Start = 0,
    rates: Annotated[str | None, typer.Option(help="Drop probabilities. Left out: the grid of p_drop=auto.")] = None,
    positions: Annotated[int, typer.Option(min=2, help="Most positions asked, evenly spread.")] = 256,
    k: o.NumPaths = 5,
    seed: o.Seed = 0,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """The radius of Eq. 6 against the drop probability, sampled and in closed form, and what p_drop=auto picks."""
    from dropmatch.bench.analyses.radius import print_radius, run_radius
    from dropmatch.core.calibrate import P_DROP_GRID

    drops = sorted(P_DROP_GRID if rates is None else parse_rates(rates), reverse=True)
    check_writable(output)
    items = load_prompts(data, num, start) if data else None
    decoder = _decoder(target, "none", k, "0.3", 1, dtype, device, "own")
    with stoppable(output, resumes=False):
        result = run_radius(
            decoder,
            items,
            rates=drops,
            num_positions=positions,
            seed=seed,
            described=describe(target, None, data or []),
            output=output,
        )
    print_radius(result)
    say_written(output)


def _decoder(
    target: str,
    draft: str | None,
    k: int,
    p_drop: str | None,
    draft_length: int,
    dtype: str,
    device: str,
    draft_weights: str,
) -> Decoder:
    return o.load_decoder(
        target,
        draft,
        rule="lossless",
        k=k,
        p_drop=p_drop,
        draft_length=draft_length,
        dtype=dtype,
        device=device,
        draft_weights=draft_weights,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text={str(path)!r} cannot be read as UTF-8 text: {error}.") from error
