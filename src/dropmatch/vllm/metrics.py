"""Counts from the workers to Prometheus: worker -> ModelRunnerOutput -> scheduler stats -> front end.

They ride on objects that vLLM sends anyway, so that no step and no scrape waits for them. The front end keeps counters
beside the stock vllm:spec_decode_* ones, which move by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dropmatch.core.reasons import Reason
from dropmatch.vllm.hook import COUNTS, NUM_COUNTS
from dropmatch.vllm.settings import KEY

COUNTS_ATTRIBUTE = "dropmatch_counts"
NAMES = {
    "drafted": ("vllm:dropmatch_drafted_tokens", "Drafted tokens judged by a DropMatch rule."),
    "asked": ("vllm:dropmatch_asked_tokens", "Drafted tokens that the dropout heads were asked about."),
    "lossy": (
        "vllm:dropmatch_lossy_tokens",
        "Kept tokens that lossless decoding would have refused; at temperature > 0 their expected number.",
    ),
    "unknown": (
        "vllm:dropmatch_unknown_distribution_tokens",
        "Drafted tokens judged without the drafter's distribution, which the rule wanted and a step did not have.",
    ),
}
KEPT = ("vllm:dropmatch_kept_tokens", "Kept drafted tokens by the reason they were kept for.")


def remember(scheduler: Any, output: Any) -> None:
    """In the engine: note the counts that came with a step's output."""
    counts = getattr(output, COUNTS_ATTRIBUTE, None)
    if counts is not None:
        setattr(scheduler, COUNTS_ATTRIBUTE, counts)


def attach(scheduler: Any, stats: Any) -> None:
    """In the engine: put the counts so far into the stats that go to the front end. kv_connector_stats is the one field
    that carries free data; `detach` takes them out again before anyone else reads it."""
    counts = getattr(scheduler, COUNTS_ATTRIBUTE, None)
    if stats is not None and counts is not None:
        stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: counts}


def detach(stats: Any) -> list[float] | None:
    """In the front end: take the counts out of the stats."""
    carried = getattr(stats, "kv_connector_stats", None)
    if not carried or KEY not in carried:
        return None
    counts: list[float] = carried[KEY]
    stats.kv_connector_stats = {key: value for key, value in carried.items() if key != KEY} or None
    return counts


class Counters:
    """Prometheus counters of one front end. Values arrive as totals of each engine."""

    def __init__(self, model_name: str) -> None:
        import prometheus_client

        labels = ["model_name", "engine"]
        self._model = model_name
        self._plain = {key: prometheus_client.Counter(name, text, labels) for key, (name, text) in NAMES.items()}
        self._kept = prometheus_client.Counter(*KEPT, [*labels, "reason"])
        self._last: dict[int, list[float]] = {}

    def update(self, engine: int, counts: Sequence[float]) -> None:
        last = self._last.get(engine, [0.0] * NUM_COUNTS)
        grown = [max(0.0, now - before) for now, before in zip(counts, last, strict=True)]
        self._last[engine] = list(counts)
        labels = (self._model, str(engine))
        for key, by in zip(COUNTS, grown, strict=False):
            self._plain[key].labels(*labels).inc(by)
        for reason in Reason:
            by = grown[len(COUNTS) + int(reason)]
            if by > 0 and reason is not Reason.REJECTED:
                self._kept.labels(*labels, reason.label).inc(by)
