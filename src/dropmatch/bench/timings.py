"""Speed of all methods at batch 1: the other half of a comparison.

Prompt by prompt with the methods in turn, so that a machine that drifts drifts for all.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dropmatch.api import Decoder
from dropmatch.bench.answers import encode_turn
from dropmatch.bench.arms import GENERATE, PLAIN, ArmSpec
from dropmatch.bench.fields import NUMBER
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.settings import CompareSettings, seed_of
from dropmatch.bench.side_by_side import Way, generate_way, rotated
from dropmatch.bench.takeover import conditions
from dropmatch.bench.tasks import Item
from dropmatch.config import EngineConfig, SamplingParams

_WARM_UP = 8  # tokens
_Timer = Callable[[Item, int], tuple[float, int, dict[str, float]]]
"""Of a prompt and the most tokens: seconds of a whole call at batch 1, prefill included, its tokens, its parts."""
_TIMING = {
    **dict.fromkeys(("arm", "item"), str),
    **dict.fromkeys(("repeat", "tokens"), int),
    "seconds": NUMBER,
    "time": dict,
}


def measure_speed(
    decoder: Decoder, items: Sequence[Item], arms: Sequence[ArmSpec], settings: CompareSettings, journal: Journal
) -> dict[str, Any] | None:
    timed = _first_of_each_task(items, settings.speed_items)
    if not timed:
        return None
    methods = list(arms)
    if not any(arm.is_plain for arm in methods):
        methods.insert(0, replace(methods[0], rule=PLAIN, draft_length=0))
    names = [method.name for method in methods] + ([GENERATE] if settings.with_generate else [])
    entries = _earlier_timings(journal, timed, names, settings)
    done = {(e["arm"], e["item"], e["repeat"]) for e in entries}
    total = len(names) * len(timed) * settings.repeats
    if done:
        journal.say_taken_over(f"{len(done)} of {total} timings")
    with ProgressMeter("speed", total, len(done)) as meter:
        timers: dict[str, _Timer] = {}
        if len(done) < meter.total:
            timers = {method.name: partial(_time_one, decoder, method, settings) for method in methods}
            if settings.with_generate:
                timers[GENERATE] = partial(_time_generate, decoder, generate_way(decoder))
            for timer in timers.values():  # warm up
                timer(timed[0], _WARM_UP)
        for repeat, (i, item) in itertools.product(range(settings.repeats), enumerate(timed)):
            for name in rotated(names, i + repeat):
                if (name, item.id, repeat) in done:
                    continue
                seconds, tokens, parts = timers[name](item, settings.speed_tokens)
                entry = {
                    "arm": name,
                    "item": item.id,
                    **conditions(item, settings.speed_tokens),
                    "repeat": repeat,
                    "seconds": seconds,
                    "tokens": tokens,
                    "time": parts,
                }
                journal.add({"speed": entry})
                entries.append(entry)
                meter.advance()
    return {
        "items": [item.id for item in timed],
        "repeats": settings.repeats,
        "max_new_tokens": settings.speed_tokens,
        "arms": {name: _speed_of(name, entries) for name in names},
    }


def _first_of_each_task(items: Sequence[Item], number: int) -> list[Item]:
    """The first `number` prompts of each task, in the order given."""
    seen: Counter[str] = Counter()
    chosen = []
    for item in items:
        seen[item.task] += 1
        if seen[item.task] <= number:
            chosen.append(item)
    return chosen


def _earlier_timings(
    journal: Journal, timed: Sequence[Item], names: Sequence[str], settings: CompareSettings
) -> list[dict[str, Any]]:
    """Timings of an earlier run that this one would repeat: the same prompts, limits, methods and repeats."""
    wanted = {item.id: conditions(item, settings.speed_tokens) for item in timed}
    return [
        timing
        for timing in journal.found("speed", _TIMING, numbers="time", is_inner=True)
        if (given := wanted.get(timing["item"])) is not None
        and all(timing.get(name) == value for name, value in given.items())
        and timing["arm"] in names
        and timing["repeat"] < settings.repeats
    ]


def _speed_of(name: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    mine = [entry for entry in entries if entry["arm"] == name]
    seconds: dict[str, list[float]] = {}
    for entry in mine:
        seconds.setdefault(entry["item"], []).append(entry["seconds"])
    return {
        "seconds": seconds,
        "tokens": {entry["item"]: entry["tokens"] for entry in mine},
        "time": {key: sum(entry["time"][key] for entry in mine) for key in mine[0]["time"]},
    }


def _time_one(
    decoder: Decoder, arm: ArmSpec, settings: CompareSettings, item: Item, max_new_tokens: int
) -> tuple[float, int, dict[str, float]]:
    ids = encode_turn(decoder, item)
    config = EngineConfig(draft_length=arm.draft_length, max_length=decoder.config.max_length)
    engine = decoder.engine(rule=arm.made, config=config, dropout=arm.dropout, drafter=None if arm.is_plain else "own")
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=settings.temperature,
        stop=item.stop,
        seed=seed_of(arm, settings),
    )
    started = time.perf_counter()
    done = decoder.run([ids], params, engine=engine)
    return time.perf_counter() - started, len(done.generations[0].tokens), done.stats.time.to_json()


def _time_generate(decoder: Decoder, way: Way, item: Item, max_new_tokens: int) -> tuple[float, int, dict[str, float]]:
    """Of transformers, which knows no parts. It generates that many tokens, whatever they are."""
    ids = encode_turn(decoder, item)
    started = time.perf_counter()
    tokens, _ = way.run(ids, max_new_tokens)
    return time.perf_counter() - started, len(tokens), {}
