"""From the records of a comparison to its table: one row per method and task. Pure functions over JSON values.

tau pools rounds over items; bases.py says what figures are set against. Figures that cannot be had are None.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dropmatch.bench.arms import GENERATE, PLAIN
from dropmatch.bench.bases import AGAINST_TEXTS, reference_arm, same_length
from dropmatch.bench.figures import spread_of
from dropmatch.bench.intervals import is_on_front, paired_difference, ratio_interval, wilson
from dropmatch.bench.tasks import pooled_metrics

Record = Mapping[str, Any]
Records = Mapping[str, Record]
_GRAM = 4


def summarize(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a comparison's summary. result: a results file with "arms", "prompts" and, perhaps, "speed"."""
    tasks = {item: prompt["task"] for item, prompt in result["prompts"].items()}
    names = sorted(set(tasks.values()))
    groups = [("all", list(tasks))] if len(names) != 1 else []
    groups += [(name, [item for item, task in tasks.items() if task == name]) for name in names]
    rows: list[dict[str, Any]] = []
    for task, items in groups:
        group = []
        for name, arm in result["arms"].items():
            base = reference_arm(result["arms"], name)
            records = {item: arm["items"][item] for item in items}
            lossless = None if base is None else {item: result["arms"][base]["items"][item] for item in items}
            group.append(
                {
                    "arm": name,
                    "rule": arm["rule"],
                    "draft_length": arm["draft_length"],
                    "task": task,
                    **figures(records, lossless),
                    **_speed_figures(
                        result.get("speed"),
                        name,
                        base if base is not None and same_length(result["arms"], name, base) else None,
                        items,
                    ),
                }
            )
        _mark_front(group)
        rows += group
    return rows


def figures(records: Records, lossless: Records | None) -> dict[str, Any]:
    """What one method did on some items, by item. lossless: the reference on the same items, None without one."""
    every = list(records.values())
    rounds = [record["rounds"] for record in every]
    yielded = [record["accepted"] + record["rounds"] for record in every]
    lengths = [len(record["tokens"]) for record in every]
    emitted = sum(lengths)
    lossy = [token["prob"] for record in every for token in record["lossy"]]
    logprobs = [x for record in every for x in record["logprobs"]]
    tau_low, tau_high = ratio_interval(yielded, rounds)
    return {
        "n": len(every),
        "tau": sum(yielded) / sum(rounds),
        "tau_low": tau_low,
        "tau_high": tau_high,
        "acceptance_by_position": _acceptance(every),
        "emitted": emitted,
        "lossy_tokens": len(lossy),
        "lossy_share": len(lossy) / emitted,
        "lossy_prob_mean": statistics.fmean(lossy) if lossy else None,
        "lossy_prob_median": statistics.median(lossy) if lossy else None,
        "logprob_mean": statistics.fmean(logprobs) if logprobs else None,
        "repetition": _repetition(every),
        "length_mean": emitted / len(every),
        **_against_lossless(records, lossless),
        **_accuracy(records, lossless),
    }


def _acceptance(records: Sequence[Record]) -> list[float]:
    """Share of rounds with a draft of that length in which the token at each place was kept."""
    longest = max((len(record["drafted_at"]) for record in records), default=0)
    drafted, accepted = [0] * longest, [0] * longest
    for record in records:
        for i, count in enumerate(record["drafted_at"]):
            drafted[i] += count
        for i, count in enumerate(record["accepted_at"]):
            accepted[i] += count
    return [a / d for a, d in zip(accepted, drafted, strict=True) if d]


def _repetition(records: Sequence[Record]) -> float | None:
    """Share of 4-grams of tokens that stood earlier in the same text."""
    repeated = total = 0
    for record in records:
        tokens = record["tokens"]
        grams = [tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else None


def _against_lossless(records: Records, lossless: Records | None) -> dict[str, Any]:
    if lossless is None:
        return dict.fromkeys(AGAINST_TEXTS[:4])
    first = [at for item in records if (at := first_divergence(records[item], lossless[item])) is not None]
    mean = [statistics.fmean(x for r in side.values() for x in r["logprobs"]) for side in (records, lossless)]
    tokens = [sum(len(r["tokens"]) for r in side.values()) for side in (records, lossless)]
    return {
        "logprob_difference": mean[0] - mean[1],
        "length_ratio": tokens[0] / tokens[1],
        "diverged_share": len(first) / len(records),
        "first_divergence_median": statistics.median(first) if first else None,
    }


def first_divergence(record: Record, other: Record) -> int | None:
    """Index of the first token at which two texts differ; None where they are the same."""
    a, b = record["tokens"], other["tokens"]
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _accuracy(records: Records, lossless: Records | None) -> dict[str, Any]:
    empty = dict.fromkeys(("graded", "accuracy", "accuracy_low", "accuracy_high", *AGAINST_TEXTS[4:]))
    graded = [item for item, record in records.items() if record["score"]["correct"] is not None]
    metrics = pooled_metrics([record["score"]["metrics"] for record in records.values()])
    if not graded:
        return {**empty, "metrics": metrics}
    right = [bool(records[item]["score"]["correct"]) for item in graded]
    low, high = wilson(sum(right), len(right))
    figures = {
        **empty,
        "graded": len(graded),
        "accuracy": sum(right) / len(right),
        "accuracy_low": low,
        "accuracy_high": high,
    }
    if lossless is not None:
        paired = paired_difference([bool(lossless[item]["score"]["correct"]) for item in graded], right)
        figures |= {
            "accuracy_difference": paired.difference,
            "difference_low": paired.low,
            "difference_high": paired.high,
            "gained": paired.gained,
            "lost": paired.lost,
            "p_value": paired.p_value,
        }
    return {**figures, "metrics": metrics}


def _speed_figures(
    speed: Mapping[str, Any] | None, name: str, base: str | None, items: Sequence[str]
) -> dict[str, Any]:
    """Ratios item by item (median of the repeats each), as median, minimum and maximum over items. base: lossless
    decoding at the same draft length. The head's share of the time is known of all timed items together only."""
    timed = [item for item in items if speed is not None and item in speed["items"]]
    if speed is None or not timed or name not in speed["arms"]:
        return dict.fromkeys(("tokens_per_second", "over_generate", "over_plain", "over_lossless", "judge_over_target"))
    arm = speed["arms"][name]
    seconds = sum(statistics.median(arm["seconds"][item]) for item in timed)
    target = arm["time"]["target_s"] if len(timed) == len(speed["items"]) else None

    def over(other: str | None) -> dict[str, float] | None:
        if other is None or other not in speed["arms"]:
            return None
        ratios = speed_ratios(speed, name, other, timed)
        return spread_of(ratios)

    return {
        "tokens_per_second": sum(arm["tokens"][item] for item in timed) / seconds,
        "over_generate": over(GENERATE),
        "over_plain": over(PLAIN),
        "over_lossless": over(base),
        "judge_over_target": arm["time"]["judge_s"] / target if target else None,
    }


def speed_ratios(speed: Mapping[str, Any], name: str, other: str, items: Sequence[str]) -> list[float]:
    """Tokens per second of one method over those of another, prompt by prompt. items: timed prompts."""
    arm, base = speed["arms"][name], speed["arms"][other]
    return [_rate(arm, item) / _rate(base, item) for item in items]


def _rate(arm: Mapping[str, Any], item: str) -> float:
    return float(arm["tokens"][item] / statistics.median(arm["seconds"][item]))


def _mark_front(rows: list[dict[str, Any]]) -> None:
    """Mark the methods that none beats in both tau and accuracy (log-probability where nothing is graded)."""
    key = "accuracy" if all(row["accuracy"] is not None for row in rows) else "logprob_mean"
    marks = is_on_front([(row["tau"], row[key] if row[key] is not None else 0.0) for row in rows])
    for row, mark in zip(rows, marks, strict=True):
        row["pareto"] = mark
