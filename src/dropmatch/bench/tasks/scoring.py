"""Scores of answers, by the task of their items."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from dropmatch.bench.tasks.item import Item, Score
from dropmatch.bench.tasks.registry import TASKS
from dropmatch.errors import ConfigError


def score(item: Item, answers: Sequence[str]) -> Score:
    """Score the answers to one item, one text per turn. Model-written code runs in the sandbox."""
    return TASKS[item.task].score(item, answers)


def score_all(items: Sequence[Item], answers: Sequence[Sequence[str]]) -> list[Score]:
    """Score the answers to many items, in their order; as many sandboxes at a time as this process may use cores."""
    if len(items) != len(answers):
        raise ConfigError(f"{len(items)} items and {len(answers)} lists of answers. Give one list per item.")
    pool = ThreadPoolExecutor(_num_cores())  # a thread only waits for its sandbox, which is a process
    try:
        waiting = [
            pool.submit(score, item, texts) if TASKS[item.task].runs_code else None
            for item, texts in zip(items, answers, strict=True)
        ]
        return [
            score(item, texts) if future is None else future.result()
            for item, texts, future in zip(items, answers, waiting, strict=True)
        ]
    finally:  # at an error or Ctrl-C those that have not begun are not run any more
        pool.shutdown(cancel_futures=True)


def pooled_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of many items of one task: means, each over the items that have it.

    IFEval's instruction-level figures are shares of all instructions together, as lm-evaluation-harness has them;
    ifeval_mean is that of its four figures.
    """
    names = dict.fromkeys(name for one in metrics for name in one)
    pooled = {name: statistics.fmean(one[name] for one in metrics if name in one) for name in names}
    if instructions := pooled.pop("instructions", 0.0):
        for kind in ("strict", "loose"):
            pooled[f"inst_level_{kind}"] = pooled.pop(f"followed_{kind}") / instructions
        four = [f"{level}_level_{kind}" for level in ("prompt", "inst") for kind in ("strict", "loose")]
        pooled["ifeval_mean"] = statistics.fmean(pooled[name] for name in four)
    return pooled


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
