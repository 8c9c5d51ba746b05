"""How the time of a token grows with context, vocabulary, K, draft length and batch, beside the floor under it.

One setting is changed at a time, the others stay at a base. The floor is what reading the weights costs: bytes of the
weights that a round needs once each (the target's, and the draft model's for every drafted token) over the bandwidth
measured on the same machine, per token that the round gives. Passes over all points follow one another, so that each
point has timings from different minutes. Prompts are run once and kept, since their prefill is not what is measured.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from dropmatch.api import Decoder
from dropmatch.bench.analyses.show import console
from dropmatch.bench.bandwidth import read_bandwidth
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import write_result
from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.interfaces import Drafter
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.drafters.ngram import NgramDrafter
from dropmatch.errors import ConfigError
from dropmatch.hf.calibration import PROBE_TEXT
from dropmatch.hf.model import HFModel
from dropmatch.hf.prefilled import PrefilledModel, Prompts
from dropmatch.hf.trimmed import rows_of, trimmed
from dropmatch.hf.weights import body_bytes, head_bytes
from dropmatch.provenance import collect

AXES = ("context", "vocabulary", "k", "length", "batch")
PLAIN, LOSSLESS, DROPMATCH, EVERYWHERE = "plain", "lossless", "dropmatch", "dropmatch-paper"
WAYS: Mapping[str, tuple[str, ...]] = {
    "context": (PLAIN, LOSSLESS, DROPMATCH),
    "vocabulary": (PLAIN, LOSSLESS, DROPMATCH),
    "k": (DROPMATCH, EVERYWHERE),
    "length": (LOSSLESS, DROPMATCH),
    "batch": (PLAIN, LOSSLESS, DROPMATCH),
}
"""What is measured along each axis: K means nothing to plain and lossless decoding, a draft length nothing to plain."""
_WARM_UP = 2  # tokens
_PARTS = ("draft", "target", "judge", "rest")


@dataclass(frozen=True, slots=True)
class Point:
    """One setting. way: a rule's name, or plain; vocabulary: tokens, None for all of them."""

    way: str
    context: int
    k: int
    length: int
    batch: int
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True)
class Ladder:
    """Values along each axis, and the base that the others stay at. An axis without values is left out."""

    values: Mapping[str, Sequence[int]]
    context: int = 128
    k: int = 5
    length: int = 5
    batch: int = 1

    def points(self) -> Iterator[tuple[str, int, Point]]:
        """(axis, value, point) in the order of running."""
        base = Point("", self.context, self.k, self.length, self.batch)
        for axis in AXES:
            for value in self.values.get(axis, ()):
                for way in WAYS[axis]:
                    yield axis, value, replace(base, way=way, **{axis: value})

    @property
    def longest(self) -> tuple[int, int]:
        """Most tokens of one prompt, and most rows of a batch."""
        return max([self.context, *self.values.get("context", ())]), max([self.batch, *self.values.get("batch", ())])


def run_scaling(
    decoder: Decoder,
    ladder: Ladder,
    *,
    text: str | None,
    max_new_tokens: int,
    repeats: int,
    minutes: float | None,
    bandwidth_bytes: int | None = None,
    described: Mapping[str, Any],
    output: Path,
    restart: bool = False,
) -> dict[str, Any]:
    """Measure all points and write the results file. Returns what was written.

    text: what the prompts are cut from, None for a built-in one, repeated as often as needed. minutes: begin no further
    timing so long after the models were loaded; points without any are named in the file. bandwidth_bytes: of the block
    read to measure the bandwidth, None for the usual. A stopped run goes on where it was.
    """
    started = time.monotonic()
    provenance = collect(device=str(decoder.target.device))
    bench = _Bench(decoder, ladder, text or PROBE_TEXT, max_new_tokens)
    work = [(repeat, *each) for repeat in range(repeats) for each in ladder.points()]
    written = {
        **described,
        "base": {"context": ladder.context, "k": ladder.k, "length": ladder.length, "batch": ladder.batch},
        "values": {axis: list(ladder.values[axis]) for axis in AXES if ladder.values.get(axis)},
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "p_drop": decoder.dropout.p_drop,
        "heads": decoder.dropout.heads,
        "dtype": str(decoder.target.dtype),
        "vocabulary": decoder.target.vocab_size,
        "text": "built in" if text is None else "given",
        "text_digest": bench.digest,
    }
    bandwidth = read_bandwidth(decoder.target.device, num_bytes=bandwidth_bytes)
    with Journal(output, written, restart=restart) as journal:
        done = {(entry["repeat"], entry["axis"], entry["value"], entry["way"]) for entry in journal.entries}
        with ProgressMeter("timings", len(work), len(done)) as meter:
            for repeat, axis, value, point in work:
                if (repeat, axis, value, point.way) in done:
                    continue
                if minutes is not None and time.monotonic() - started > 60 * minutes:
                    break
                entry = {"repeat": repeat, "axis": axis, "value": value, "way": point.way}
                journal.add({**entry, **bench.measure(point)})
                meter.advance(note=f"{axis} {value}")
        rows = scaling_rows(journal.entries, bandwidth)
        measured = {(row["axis"], row["value"], row["way"]) for row in rows}
        result = {
            "kind": "bench-scaling",
            "settings": {
                **written,
                "left_out": [
                    f"{way.way} at {a} {v}" for a, v, way in ladder.points() if (a, v, way.way) not in measured
                ],
            },
            "bandwidth_bytes_per_s": bandwidth,
            "rows": rows,
            "provenance": provenance,
        }
        write_result(result, output)
        journal.remove()
    return result


class _Bench:
    """Models, prompts and what is known of them."""

    def __init__(self, decoder: Decoder, ladder: Ladder, text: str, max_new_tokens: int) -> None:
        """Raises ConfigError where drafter, text or lengths will not do."""
        self._decoder = decoder
        self._max_new = max_new_tokens
        context, batch = ladder.longest
        lengths = [ladder.length, *ladder.values.get("length", ())]
        most = context + max_new_tokens + max(lengths)
        limit = decoder.config.max_length
        if limit is not None and most > limit:
            raise ConfigError(
                f"A context of {context} and {max_new_tokens} new tokens need {most} positions; the models have "
                f"{limit}."
            )
        for size in ladder.values.get("vocabulary", ()):
            if size > decoder.target.vocab_size:
                raise ConfigError(
                    f"A vocabulary of {size} was asked for; the target has {decoder.target.vocab_size} tokens."
                )
        ids = list(decoder.tokenizer(text)["input_ids"])
        if not ids:
            raise ConfigError("The text is empty. Give one with at least a word.")
        needed = context + batch  # each row of a batch begins one token later, so that no two hold the same
        self._ids = (ids * (needed // len(ids) + 1))[:needed]
        self.digest = hashlib.sha256(json.dumps(self._ids).encode()).hexdigest()[:16]
        self._prompts = {"target": Prompts(), "draft": Prompts()}
        self._cut: dict[int, tuple[HFModel, HFModel | None]] = {}
        own = decoder.drafter
        self._draft = own.model if isinstance(own, DraftModelDrafter) and isinstance(own.model, HFModel) else None
        if self._draft is None and not isinstance(own, NgramDrafter):
            raise ConfigError("Scaling is measured with a draft model or n-grams. Name another drafter with --draft.")
        if any(size < decoder.target.vocab_size for size in ladder.values.get("vocabulary", ())):
            for model in (decoder.target, self._draft):
                if model is not None:
                    rows_of(model.head)  # minutes before it would be cut
        for model, name in ((decoder.target, "target"), (self._draft, "draft")):
            if model is not None:  # the longest first: it stands for all that are shorter
                PrefilledModel(model, self._prompts[name]).add_rows([self._ids[:context]])

    def measure(self, point: Point) -> dict[str, Any]:
        """Decode at one point. Returns seconds of the parts, steps, tokens, and the bytes that a step must read."""
        self._run(point, min(_WARM_UP, self._max_new))
        stats = self._run(point, self._max_new).stats
        split, requests = stats.time, stats.requests
        target, draft = self._models(point)
        drafted = requests.drafted / requests.rounds
        read = body_bytes(target) + head_bytes(target)
        if draft is not None and point.way != PLAIN:
            read += round(drafted * (body_bytes(draft) + head_bytes(draft)))
        return {
            **{f"{part}_s": getattr(split, part) for part in _PARTS},
            "steps": split.target_forwards,
            "rounds": requests.rounds,
            "emitted": requests.emitted,
            "accepted": requests.accepted,
            "positions_asked": split.head_rows,
            "bytes_a_step": read,
        }

    def _run(self, point: Point, max_new_tokens: int) -> SpeculativeEngine:
        target, draft = self._models(point)
        engine = SpeculativeEngine(
            PrefilledModel(target, self._prompts["target"]),
            self._drafter(point, draft),
            rule="exact" if point.way == PLAIN else point.way,
            dropout=self._dropout(point, target.vocab_size),
            config=EngineConfig(draft_length=point.length, max_batch=point.batch),
        )
        params = SamplingParams(max_new_tokens=max_new_tokens, eos_ids=())
        for row in range(point.batch):
            ids = self._ids[row : row + point.context]
            engine.add([token % target.vocab_size for token in ids], params)
        engine.run()
        return engine

    def _drafter(self, point: Point, draft: HFModel | None) -> Drafter | None:
        if point.way == PLAIN:
            return None
        if draft is None:
            return NgramDrafter(self._decoder.target.device)
        own = self._decoder.drafter
        assert isinstance(own, DraftModelDrafter)
        size = point.vocabulary or self._decoder.target.vocab_size
        model = PrefilledModel(draft, self._prompts["draft"])
        return DraftModelDrafter(model, size, min_confidence=own.min_confidence)

    def _dropout(self, point: Point, vocabulary: int) -> DropoutConfig:
        dropout = replace(self._decoder.dropout, num_paths=point.k)
        return replace(dropout, heads="full") if dropout.shortlist_size >= vocabulary else dropout

    def _models(self, point: Point) -> tuple[HFModel, HFModel | None]:
        size, target = point.vocabulary, self._decoder.target
        if size is None or size == target.vocab_size:
            return target, self._draft
        if size not in self._cut:
            draft = self._draft
            cut = None if draft is None else trimmed(draft, min(size, draft.vocab_size))
            self._cut = {size: (trimmed(target, size), cut)}  # one at a time: packed heads are copies
        return self._cut[size]


def scaling_rows(entries: Sequence[Mapping[str, Any]], bandwidth: float) -> list[dict[str, Any]]:
    """One row per point: milliseconds a token (median, minimum, maximum over passes), of a step's parts, tokens a step
    and row, the floor of a token, and how many times the floor the time is. bandwidth: bytes per second."""
    rows = []
    for axis, value, way in dict.fromkeys((e["axis"], e["value"], e["way"]) for e in entries):
        mine = [e for e in entries if (e["axis"], e["value"], e["way"]) == (axis, value, way)]
        one = mine[0]  # every pass decodes the same tokens
        times = [1e3 * sum(e[f"{part}_s"] for part in _PARTS) / e["emitted"] for e in mine]
        floor = 1e3 * one["bytes_a_step"] / bandwidth * one["steps"] / one["emitted"]
        rows.append(
            {
                "axis": axis,
                "value": value,
                "way": way,
                "passes": len(mine),
                "ms_a_token": statistics.median(times),
                "ms_min": min(times),
                "ms_max": max(times),
                "floor_ms": floor,
                "over_floor": statistics.median(times) / floor,
                "tau": (one["accepted"] + one["rounds"]) / one["rounds"],
                "steps": one["steps"],
                "emitted": one["emitted"],
                "bytes_a_step": one["bytes_a_step"],
                "positions_asked": one["positions_asked"],
                **{
                    f"{part}_ms_a_step": statistics.median(1e3 * e[f"{part}_s"] / e["steps"] for e in mine)
                    for part in _PARTS
                },
            }
        )
    return sorted(rows, key=lambda row: (AXES.index(row["axis"]), WAYS[row["axis"]].index(row["way"]), row["value"]))


def print_scaling(result: Mapping[str, Any]) -> None:
    """A table per axis, and what they were measured on."""
    shown = console()
    for axis in result["settings"]["values"]:
        table = Table(axis, "way", "ms a token", "floor", "over the floor", "tau", *(f"{p}, ms a step" for p in _PARTS))
        for row in result["rows"]:
            if row["axis"] == axis:
                table.add_row(
                    f"{row['value']:,}",
                    row["way"],
                    f"{row['ms_a_token']:.1f} ({row['ms_min']:.1f}-{row['ms_max']:.1f})",
                    f"{row['floor_ms']:.1f}",
                    f"{row['over_floor']:.2f}",
                    f"{row['tau']:.2f}",
                    *(f"{row[f'{part}_ms_a_step']:.1f}" for part in _PARTS),
                )
        shown.print(table)
    settings = result["settings"]
    base = ", ".join(f"{name} {value}" for name, value in settings["base"].items())
    shown.print(
        f"Decoding only, {settings['max_new_tokens']} tokens a row, {settings['dtype'].removeprefix('torch.')}; where "
        f"an axis does not say otherwise: {base}. Floor: weights read at "
        f"{result['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s."
    )
    if settings["left_out"]:
        shown.print(f"Left out, for lack of time: {', '.join(settings['left_out'])}.", markup=False)
