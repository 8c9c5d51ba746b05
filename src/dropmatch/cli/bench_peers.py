"""dropmatch bench peers: other packages' speculative decoding beside ours, on the same prompts in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dropmatch.cli import options as o
from dropmatch.cli.runs import (
    Output,
    Restart,
    Start,
    check_writable,
    describe,
    load_prompts,
    parse_lengths,
    say_written,
    split_words,
    stoppable,
)
from dropmatch.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from dropmatch.bench.peers.race import Contestant

_TRANSFORMERS, _NONE = "transformers", "none"


def bench_peers(
    data: Annotated[
        list[str] | None, typer.Option(help="JSON-lines file of prompts, such as gsm8k.jsonl; may be repeated.")
    ] = None,
    output: Output = Path("results/bench_peers.json"),
    target: o.Target = "default",
    draft: o.Draft = None,
    num: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 12,
    start: Start = 0,
    peers: Annotated[
        str,
        typer.Option(
            help="Which, separated by commas: transformers, economize, flashspec, or none. The last two are installed "
            "from PyPI on first use, into an environment of their own in the cache folder."
        ),
    ] = "transformers,economize,flashspec",
    lengths: Annotated[str, typer.Option(help="Draft lengths, separated by commas.")] = "5,10",
    max_new_tokens: o.MaxNewTokens = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Passes over all prompts.")] = 1,
    prepare: Annotated[bool, typer.Option("--prepare", help="Install the peers and measure nothing.")] = False,
    restart: Restart = False,
    dtype: o.DType = "auto",
    device: o.Device = "auto",
) -> None:
    """Our plain and lossless decoding beside transformers, economize and flashspec: speed, and whether texts agree.

    A run that is stopped goes on where it was when the same command is given again."""
    from dropmatch.bench.peers.environment import PEERS, ready_environment
    from dropmatch.bench.peers.race import contestants, print_race, run_race

    chosen = split_words(peers)
    known = (_TRANSFORMERS, *PEERS)
    if chosen == [_NONE]:
        chosen = []
    for name in chosen:
        if name not in known:
            raise UnknownNameError("peer", name, (*known, _NONE))
    draft_lengths = parse_lengths(lengths)
    packages = [name for name in chosen if name in PEERS]
    if prepare and not packages:
        raise ConfigError(f"--prepare installs peers, and --peers={peers!r} names none of {', '.join(PEERS)}.")
    if not prepare:
        if not data:
            raise ConfigError("No prompts were given. Name a file with --data, such as gsm8k.jsonl.")
        check_writable(output)
        items = load_prompts(data, num, start)
    racing: list[Contestant] = []
    left_out: dict[str, str] = {}
    if packages:
        python, left_out = ready_environment(packages)
        for reason in left_out.values():
            typer.secho(f"warning: {reason} Measuring goes on without it.", err=True)
        racing = contestants([name for name in packages if name not in left_out], draft_lengths, python)
    if prepare:
        if left_out:
            raise typer.Exit(1)
        typer.secho(f"Ready: {', '.join(f'{name} {PEERS[name]}' for name in packages)} in {python}.", err=True)
        return
    decoder = o.load_decoder(
        target, draft, rule="lossless", k=1, p_drop="0", draft_length=draft_lengths[0], dtype=dtype, device=device
    )
    with stoppable(output):
        result = run_race(
            decoder,
            items,
            racing,
            lengths=draft_lengths,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            with_transformers=_TRANSFORMERS in chosen,
            left_out=left_out,
            described=describe(target, draft, data or []),
            output=output,
            restart=restart,
        )
    print_race(result)
    say_written(output)
