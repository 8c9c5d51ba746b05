"""Lossless speculative decoding, ours and others', on the same prompts with the same pair in one run.

Prompt by prompt with all ways in turn, so that a machine that drifts drifts for all; one process works at a time. Whole
calls, prefill included. Every way should give the text of plain greedy decoding: how far each does is part of the
result, since in half precision a near-tie can fall the other way in a forward of another width. Finished timings go to
a journal; a stopped run goes on where it was.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dropmatch.api import Decoder
from dropmatch.bench.analyses.decoding import fingerprint
from dropmatch.bench.analyses.show import console
from dropmatch.bench.arms import GENERATE, PLAIN
from dropmatch.bench.figures import spread
from dropmatch.bench.journal import Journal
from dropmatch.bench.peers.environment import PEERS
from dropmatch.bench.peers.process import CHILD, PeerError, PeerProcess
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import write_result
from dropmatch.bench.side_by_side import WARM_UP, Way, own_ways, rotated, speed_over, transformers_ways
from dropmatch.bench.tasks import Item
from dropmatch.core.stats import EngineStats
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.errors import ConfigError
from dropmatch.hf.model import HFModel
from dropmatch.provenance import collect

OURS = (PLAIN, "lossless")
ANSWER_SECONDS = 1800.0
"""How long a peer may take to load, or for one prompt."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way of a peer's. command: what starts its process; lengths: draft lengths to time, None for its default."""

    name: str
    command: tuple[str, ...]
    lengths: tuple[int | None, ...]

    def label(self, length: int | None) -> str:
        return f"{self.name} {PEERS[self.name]}, {'default' if length is None else f'L={length}'}"


def contestants(peers: Sequence[str], lengths: Sequence[int], python: Path) -> list[Contestant]:
    """How each peer takes part: its default, and economize at our draft lengths too."""
    every: dict[str, tuple[int | None, ...]] = {"economize": (None, *lengths), "flashspec": (None,)}
    return [Contestant(peer, (str(python), str(CHILD), peer), every[peer]) for peer in peers]


def run_race(
    decoder: Decoder,
    items: Sequence[Item],
    peers: Sequence[Contestant],
    *,
    lengths: Sequence[int],
    max_new_tokens: int,
    repeats: int,
    with_transformers: bool,
    left_out: Mapping[str, str],
    described: Mapping[str, Any],
    output: Path,
    restart: bool = False,
) -> dict[str, Any]:
    """Time all ways on all items and write the results file. Returns what was written.

    left_out: peers that could not be installed, and why. One that fails while it loads or decodes is left out too, with
    its reason. Raises ConfigError where the drafter is no model that others could load.
    """
    models = _folders(decoder)
    provenance = collect(device=str(decoder.target.device))
    written = {
        **described,
        "lengths": list(lengths),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "dtype": str(decoder.target.dtype),
        "items": [item.id for item in items],
        "prompts": fingerprint(items),
        "peers": [peer.label(length) for peer in peers for length in peer.lengths],
        "transformers": with_transformers,
    }
    reasons = dict(left_out)
    prompts = {item.id: decoder.encode(item.prompt) for item in items}
    with Journal(output, written, restart=restart) as journal, ExitStack() as stack:
        ways = own_ways(decoder, ("lossless",), lengths)
        if with_transformers:
            ways += transformers_ways(decoder, lengths, with_schedule=True)
        versions: dict[str, dict[str, str]] = {}
        owner: dict[str, str] = {}
        for peer in peers:
            with _leaving_out(reasons, peer.name):
                process = stack.enter_context(
                    PeerProcess(peer.name, peer.command, _settings(decoder, models), timeout=ANSWER_SECONDS)
                )
                versions[peer.name] = process.versions
                ways += [_peer_way(process, peer, length) for length in peer.lengths]
                owner |= {peer.label(length): peer.name for length in peer.lengths}
        _measure(ways, owner, prompts, max_new_tokens, repeats, journal, reasons)
        entries = [entry for entry in journal.entries if owner.get(entry["way"]) not in reasons]
        names = [way.name for way in ways if owner.get(way.name) not in reasons]
        result = {
            "kind": "bench-peers",
            "settings": {**written, "left_out": reasons, "versions": versions},
            "summary": race_rows(entries, names),
            "ways": {name: _way_json(entries, name) for name in names},
            "provenance": provenance,
        }
        write_result(result, output)
        journal.remove()
    return result


def _folders(decoder: Decoder) -> dict[str, str]:
    """What the peers load. Raises ConfigError where the draft is not a model of transformers'."""
    drafter = decoder.drafter
    if not (isinstance(drafter, DraftModelDrafter) and isinstance(drafter.model, HFModel)):
        raise ConfigError(
            "The peers draft with a model, and this drafter is none. Name one with --draft, or take a pair that has "
            "one, such as --target default."
        )
    return {"target": decoder.target.model.name_or_path, "draft": drafter.model.model.name_or_path}


def _settings(decoder: Decoder, models: Mapping[str, str]) -> dict[str, Any]:
    return {
        **models,
        "dtype": str(decoder.target.dtype).removeprefix("torch."),
        "device": str(decoder.target.device),
        "threads": torch.get_num_threads(),
    }


@contextmanager
def _leaving_out(reasons: dict[str, str], peer: str) -> Iterator[None]:
    """Go on without a peer that fails, and keep why."""
    try:
        yield
    except PeerError as error:
        reasons[peer] = str(error)


def _peer_way(process: PeerProcess, peer: Contestant, length: int | None) -> Way:
    def run(ids: list[int], num_new: int) -> tuple[list[int], EngineStats | None]:
        return process.generate(ids, num_new, length), None

    return Way(peer.label(length), run)


def _measure(
    ways: Sequence[Way],
    owner: Mapping[str, str],
    prompts: Mapping[str, list[int]],
    max_new_tokens: int,
    repeats: int,
    journal: Journal,
    reasons: dict[str, str],
) -> None:
    """Journal a timing of every way, prompt and repeat. reasons: gets the peers that fail."""
    done = {(entry["way"], entry["item"], entry["repeat"]) for entry in journal.entries}
    warm: set[str] = set()
    with ProgressMeter("measuring", len(ways) * len(prompts) * repeats, len(done)) as meter:
        for repeat, (i, (item, ids)) in itertools.product(range(repeats), enumerate(prompts.items())):
            for way in rotated(ways, i + repeat):
                peer = owner.get(way.name, "")
                if (way.name, item, repeat) in done or peer in reasons:
                    continue
                with _leaving_out(reasons, peer):
                    if way.name not in warm:
                        way.run(ids, min(WARM_UP, max_new_tokens))
                        warm.add(way.name)
                    journal.add(
                        {"way": way.name, "item": item, "repeat": repeat, **_timed(way.run, ids, max_new_tokens)}
                    )
                meter.advance(note=way.name)


def _timed(run: Callable[[list[int], int], tuple[list[int], EngineStats | None]], ids: list[int], num_new: int) -> Any:
    started = time.perf_counter()
    tokens, stats = run(ids, num_new)
    entry: dict[str, Any] = {"seconds": time.perf_counter() - started, "tokens": tokens}
    if stats is not None:
        entry |= {"rounds": stats.requests.rounds, "accepted": stats.requests.accepted}
    return entry


def _way_json(entries: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    mine = [entry for entry in entries if entry["way"] == name]
    seconds: dict[str, list[float]] = {}
    for entry in mine:
        seconds.setdefault(entry["item"], []).append(entry["seconds"])
    return {"seconds": seconds, "tokens": {entry["item"]: entry["tokens"] for entry in mine}}


def race_rows(entries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """One row per way: speed over transformers' generate, over our plain decoding and over the fastest peer's way, each
    prompt by prompt (median, minimum, maximum), tau, and on how many prompts the tokens are those of plain decoding.

    entries: {"way", "item", "repeat", "seconds", "tokens"} and, of ours, "rounds" and "accepted". The fastest peer is
    the one with most tokens per second over all prompts; null where there is none.
    """
    ways = {name: _way_json(entries, name) for name in names}
    rates = {name: _rate(way) for name, way in ways.items()}
    others = [name for name in names if not name.startswith(OURS) and name != GENERATE]
    fastest = max(others, key=rates.__getitem__, default=None)

    def over(name: str, base: str | None) -> Any:
        if base is None or base not in ways:
            return None
        way, other = ways[name], ways[base]
        counts = [{item: len(tokens) for item, tokens in each["tokens"].items()} for each in (way, other)]
        return speed_over(way["seconds"], counts[0], other["seconds"], counts[1])

    rows = []
    for name in names:
        parted = [_first_difference(ways[name]["tokens"][i], ways[PLAIN]["tokens"][i]) for i in ways[PLAIN]["tokens"]]
        rounds = [entry for entry in entries if entry["way"] == name and "rounds" in entry]
        total = sum(entry["rounds"] for entry in rounds)
        rows.append(
            {
                "way": name,
                "is_ours": name.startswith(OURS),
                "is_fastest_peer": name == fastest,
                "tokens_per_second": rates[name],
                "over_generate": over(name, GENERATE),
                "over_plain": over(name, PLAIN),
                "over_fastest_peer": over(name, fastest),
                "tau": (sum(entry["accepted"] for entry in rounds) + total) / total if total else None,
                "same_text": sum(place is None for place in parted),
                "prompts": len(parted),
                "first_difference": statistics.median([p for p in parted if p is not None] or [0]) or None,
            }
        )
    return rows


def _rate(way: Mapping[str, Any]) -> float:
    tokens = sum(len(way["tokens"][item]) * len(times) for item, times in way["seconds"].items())
    return float(tokens / sum(sum(times) for times in way["seconds"].values()))


def _first_difference(tokens: Sequence[int], other: Sequence[int]) -> int | None:
    """Number, from 1, of the first token that differs; None where none does."""
    pairs = enumerate(zip(tokens, other, strict=True), start=1)
    return next((place for place, (a, b) in pairs if a != b), None)


def print_race(result: Mapping[str, Any]) -> None:
    """The table, and what it was measured on."""
    table = Table("", "tokens/s", "over generate", "over plain", "over the fastest peer", "tau", "text as plain")
    for row in result["summary"]:
        table.add_row(
            row["way"] + (" (fastest peer)" if row["is_fastest_peer"] else ""),
            f"{row['tokens_per_second']:.2f}",
            *(spread(row[key]) for key in ("over_generate", "over_plain", "over_fastest_peer")),
            "" if row["tau"] is None else f"{row['tau']:.2f}",
            f"{row['same_text']} of {row['prompts']}",
        )
    shown, settings = console(), result["settings"]
    shown.print(table)
    shown.print(
        f"{len(settings['items'])} prompts, {settings['max_new_tokens']} tokens each, batch 1, "
        f"{settings['dtype'].removeprefix('torch.')}, whole calls. Ratios: median over prompts (minimum-maximum)."
    )
    for reason in settings["left_out"].values():
        shown.print(f"Left out: {reason}", markup=False)
