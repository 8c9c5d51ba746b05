"""Acceptance rules side by side on the same prompts: what they keep, what it costs the answers, how fast they are.

Quality is measured in batches (answers.py), speed apart from it at batch 1 (timings.py). Each finished answer and
timing goes to a journal, so that a stopped run goes on where it was; a finished file is extended (takeover.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dropmatch.api import Decoder
from dropmatch.bench.answers import measure_quality, with_pieces
from dropmatch.bench.arms import ArmSpec
from dropmatch.bench.comparison import FORMAT, write_compare
from dropmatch.bench.journal import Journal, say_taken_over
from dropmatch.bench.settings import NEWER, CompareSettings, shared_settings
from dropmatch.bench.summary import summarize
from dropmatch.bench.takeover import (
    Key,
    in_order_of,
    journal_records,
    limits,
    prompt_digest,
    read_earlier,
    records_of,
    with_earlier_arms,
)
from dropmatch.bench.tasks import Item, score_all
from dropmatch.bench.timings import measure_speed
from dropmatch.config import DropoutConfig
from dropmatch.core.acceptance import RuleOptions
from dropmatch.hf.calibration import settle_p_drop
from dropmatch.provenance import collect

_SPEED_SETTINGS = ("speed_items", "repeats", "speed_tokens", "with_generate")


def run_compare(
    decoder: Decoder,
    items: Sequence[Item],
    arms: Sequence[ArmSpec],
    settings: CompareSettings,
    *,
    described: Mapping[str, Any],
    data: Sequence[str],
    output: Path,
    options: RuleOptions | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Run, score and write a comparison. Returns what was written.

    described: further settings for the results file, such as the models' names; data: where the prompts come from. An
    interrupt leaves the journal, and the same call goes on from it. Answers in a results file that is there already
    are taken over; it must have the same models and settings, and no prompt that is not among items. options: its
    methods run beside arms, made with these; None: those that are not among arms are dropped. Speed is measured anew,
    or kept from that file where speed_items is 0. restart: nothing is taken over. Raises ConfigError, DataError.
    """
    provenance = collect(device=str(decoder.target.device))
    same = shared_settings(decoder, settings, described)
    with Journal(output, same, restart=restart, newer=NEWER) as journal:
        # read while the journal keeps others out, who might add to it
        earlier = None if restart else read_earlier(output, same, items, settings)
        if earlier is not None:
            items = in_order_of(earlier, items)
            if options is not None:
                arms = with_earlier_arms(arms, earlier, decoder.dropout, options, where=output)
        arms = [replace(arm, dropout=settle(decoder, arm)) for arm in arms]
        records = _taken_over(earlier, journal, items, arms, settings, output)
        if earlier is not None:
            provenance["earlier"] = _earlier_runs(earlier)
        measure_quality(decoder, items, arms, settings, journal, records)
        for arm, item in itertools.product(arms, items[: settings.strips]):
            key = arm.name, item.id, prompt_digest(item.turns)
            records[key] = with_pieces(records[key], decoder)
        speed = measure_speed(decoder, items, arms, settings, journal)
        written = {**same, **_described(items, arms, settings, data)}
        if speed is None and earlier is not None and earlier["speed"] is not None:
            speed = earlier["speed"]
            written |= {name: earlier["settings"].get(name) for name in _SPEED_SETTINGS}
        result: dict[str, Any] = {
            "kind": "compare",
            "format": FORMAT,
            "settings": written,
            "prompts": {
                item.id: {"task": item.task, "turns": list(item.turns), **limits(item, settings.max_new_tokens)}
                for item in items
            },
            "arms": score_records(items, arms, records),
            "speed": speed,
        }
        result = {**result, "summary": summarize(result), "provenance": provenance}
        write_compare(result, output)
        journal.remove()
    return result


def _described(
    items: Sequence[Item], arms: Sequence[ArmSpec], settings: CompareSettings, data: Sequence[str]
) -> dict[str, Any]:
    """Settings in which runs may differ whose answers stand in one file."""
    return {
        "data": list(data),
        "rules": list(dict.fromkeys(arm.rule for arm in arms)),
        "lengths": sorted({arm.draft_length for arm in arms if not arm.is_plain}),
        "arm_dropout": {a.name: {"k": a.dropout.num_paths, "p_drop": a.dropout.p_drop} for a in arms if not a.is_plain},
        "batch": settings.batch,
        "items": [item.id for item in items],
        **{name: getattr(settings, name) for name in _SPEED_SETTINGS},
    }


def _taken_over(
    earlier: Mapping[str, Any] | None,
    journal: Journal,
    items: Sequence[Item],
    arms: Sequence[ArmSpec],
    settings: CompareSettings,
    output: Path,
) -> dict[Key, dict[str, Any]]:
    """Answers of earlier runs, those of the journal before those of the file. Says on standard error how many."""
    finished = {} if earlier is None else records_of(earlier)
    unfinished = journal_records(journal, items, settings)
    wanted = {(arm.name, item.id, prompt_digest(item.turns)) for arm in arms for item in items}
    if earlier is not None:
        count = len(wanted & finished.keys() - unfinished.keys())
        date = str(earlier["provenance"].get("date", ""))[:16].replace("T", " ")
        state = f"finished on {date} UTC" if date else "finished"
        say_taken_over(output, state, f"{count} of {len(wanted)} answers")
    journal.say_taken_over(f"{len(wanted & unfinished.keys())} of {len(wanted)} answers")
    return {**finished, **unfinished}


def _earlier_runs(earlier: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is told of the runs whose answers are taken over, oldest first."""
    before = {key: value for key, value in earlier["provenance"].items() if key != "earlier"}
    return [*earlier["provenance"].get("earlier", []), before]


def settle(decoder: Decoder, arm: ArmSpec) -> DropoutConfig:
    """The method's dropout with p_drop="auto" replaced by a number."""
    return settle_p_drop(decoder.target, decoder.tokenizer, arm.dropout, rule=arm.made)[0]


def score_records(
    items: Sequence[Item], arms: Sequence[ArmSpec], by_key: Mapping[Key, dict[str, Any]]
) -> dict[str, Any]:
    """The "arms" of a results file: each method's records with their scores."""
    records = {
        (arm.name, item.id): by_key[arm.name, item.id, prompt_digest(item.turns)] for arm in arms for item in items
    }
    pairs = [(arm, item) for arm in arms for item in items]
    scores = score_all([item for _, item in pairs], [records[arm.name, item.id]["texts"] for arm, item in pairs])
    scored: dict[str, Any] = {}
    for (arm, item), score in zip(pairs, scores, strict=True):
        entry = scored.setdefault(arm.name, {"rule": arm.rule, "draft_length": arm.draft_length, "items": {}})
        entry["items"][item.id] = {
            **records[arm.name, item.id],
            "score": {"correct": score.correct, "metrics": score.metrics, "extracted": score.extracted},
        }
    return scored
