"""dropmatch bench scaling: time per token by context, vocabulary, K, draft length and batch, beside the floor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import (
    Output,
    Restart,
    check_writable,
    describe,
    parse_lengths,
    say_written,
    split_words,
    stoppable,
)
from dropmatch.errors import ConfigError

_NONE, _AUTO = "none", "auto"
_PARTS = (8, 4, 2, 1)
"""What `auto` divides a vocabulary by."""


def _values(text: str, name: str) -> list[int]:
    return [] if text == _NONE else sorted(parse_lengths(text, name=name))


def bench_scaling(
    output: Output = Path("results/bench_scaling.json"),
    target: o.Target = "default",
    draft: o.Draft = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="JSON-lines file of prompts, joined to the text to decode behind. Left out: a built-in text."
        ),
    ] = None,
    contexts: Annotated[str, typer.Option(help="Tokens of context, separated by commas, or none.")] = (
        "128,512,1024,2048,4096"
    ),
    vocabularies: Annotated[
        str, typer.Option(help="Tokens of the vocabulary, to whose first ones the models are cut; auto: parts of it.")
    ] = _AUTO,
    paths: Annotated[str, typer.Option("--paths", help="K, dropout paths.")] = "1,2,5,10,20",
    lengths: Annotated[str, typer.Option(help="Draft lengths.")] = "1,2,5,10,16",
    batches: Annotated[str, typer.Option(help="Rows decoded together.")] = "1,2,4,8,16",
    context: Annotated[int, typer.Option(min=1, help="Tokens of context on the other axes.")] = 128,
    k: o.NumPaths = 5,
    draft_length: Annotated[int, typer.Option("--draft-length", "-L", min=1, help="... draft length.")] = 5,
    p_drop: o.PDrop = None,
    heads: o.Heads = "shortlist",
    draft_weights: o.DraftWeights = "own",
    max_new_tokens: o.MaxNewTokens = 24,
    repeats: Annotated[int, typer.Option(min=1, help="Passes over all points.")] = 2,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no further timing after so long. Left out: no limit.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder to draw pictures into.")] = None,
    format: Annotated[str, typer.Option(help="Formats of --plots, separated by commas: png, svg, pdf.")] = "svg",
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw what --output holds, and measure nothing.")] = False,
    restart: Restart = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """Time per token against context, vocabulary, K, draft length and batch, with what reading the weights costs.

    A run that is stopped goes on where it was when the same command is given again."""
    from dropmatch.bench.results import read_json
    from dropmatch.bench.scaling import Ladder, print_scaling, run_scaling

    forms = split_words(format)
    if redraw and plots is None:
        raise ConfigError("--redraw draws pictures. Name their folder with --plots.")
    if plots is not None:
        from dropmatch.report.charts import require_matplotlib
        from dropmatch.report.scaling import check_forms

        require_matplotlib()
        check_forms(forms)
    if redraw:
        result = read_json(output, "Measure first, or name the results file with --output.")
        if not isinstance(result, dict) or result.get("kind") != "bench-scaling":
            raise ConfigError(f"{output} is not a results file of bench scaling. Name one with --output.")
    else:
        values = {
            "context": _values(contexts, "--contexts"),
            "vocabulary": [1] if vocabularies == _AUTO else _values(vocabularies, "--vocabularies"),
            "k": _values(paths, "--paths"),
            "length": _values(lengths, "--lengths"),
            "batch": _values(batches, "--batches"),
        }
        if not any(values.values()):
            raise ConfigError("Every axis is none. Give values to at least one, such as --contexts 128,1024.")
        check_writable(output)
        text = _text(data)
        decoder = o.load_decoder(
            target,
            draft,
            rule="dropmatch",
            k=k,
            p_drop=p_drop,
            draft_length=draft_length,
            dtype=dtype,
            device=device,
            heads=heads,
            draft_weights=draft_weights,
        )
        if vocabularies == _AUTO:
            values["vocabulary"] = [decoder.target.vocab_size // part for part in _PARTS]
        with stoppable(output):
            result = run_scaling(
                decoder,
                Ladder(values, context=context, k=k, length=draft_length),
                text=text,
                max_new_tokens=max_new_tokens,
                repeats=repeats,
                minutes=minutes,
                described=describe(target, draft, data or [], draft_weights=draft_weights),
                output=output,
                restart=restart,
            )
        print_scaling(result)
        say_written(output)
    if plots is not None:
        from dropmatch.report.scaling import write_scaling_plots

        files = write_scaling_plots(result, plots, forms)
        typer.secho(f"{len(files)} pictures written to {plots}.", err=True)


def _text(data: list[str] | None) -> str | None:
    """All prompts as one text."""
    if not data:
        return None
    from dropmatch.cli.runs import load_prompts

    return "\n\n".join(item.prompt for item in load_prompts(data, None, 0))
