"""May a setting be used? What it costs the answers against a stated budget, with bounds. Pure functions over records.

Three measures, each against lossless answers to the same prompts: the drop in accuracy where there is ground truth, the
share of tokens that lossless decoding would not have kept, and the loss of mean log-probability under the target.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import stats

from dropmatch.bench.intervals import paired_difference
from dropmatch.errors import ConfigError

Status = Literal["within", "unproven", "broken"]
Records = Mapping[str, Mapping[str, Any]]
_RESAMPLES = 2000
_TAIL = 0.025  # of one side: bounds are those of a 95% interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The most that a setting may cost. None: not looked at. accuracy_drop: 0.02 is two points; lossy_share: of the
    emitted tokens; logprob_loss: nats a token, of the target's own log-probability."""

    accuracy_drop: float | None = None
    lossy_share: float | None = None
    logprob_loss: float | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            limit = getattr(self, name)
            if limit is not None and not 0.0 <= limit < math.inf:
                raise ConfigError(f"{name}={limit!r} is out of range. Allowed: 0 or more.")


@dataclass(frozen=True, slots=True)
class Check:
    """One measure of one setting. value: the cost measured; worst: the upper end of its 95% interval; confidence: how
    sure the sample makes it that the true cost is within the limit; needed: about how many prompts would show a cost of
    this value to be within, None where it is not or already is."""

    measure: str
    limit: float
    value: float
    worst: float
    confidence: float
    num_items: int
    needed: int | None

    @property
    def status(self) -> Status:
        """within: even the worst end holds; unproven: the value holds, its worst end does not."""
        if self.worst <= self.limit:
            return "within"
        return "unproven" if self.value <= self.limit else "broken"


def check_budget(budget: Budget, records: Records, lossless: Records) -> list[Check]:
    """All measures that the budget names. records, lossless: by item, the same items, each with its "score"."""
    checks = []
    if budget.accuracy_drop is not None:
        checks.append(_accuracy(budget.accuracy_drop, records, lossless))
    if budget.lossy_share is not None:
        checks.append(_lossy(budget.lossy_share, records))
    if budget.logprob_loss is not None:
        checks.append(_logprob(budget.logprob_loss, records, lossless))
    return checks


def overall(checks: Sequence[Check]) -> Status:
    """The worst status of all."""
    found = {check.status for check in checks}
    return "broken" if "broken" in found else "unproven" if "unproven" in found else "within"


def _accuracy(limit: float, records: Records, lossless: Records) -> Check:
    graded = [item for item, record in records.items() if record["score"]["correct"] is not None]
    if not graded:
        raise ConfigError("An accuracy budget needs prompts with ground truth, and none of these has any.")
    before, after = ([bool(side[item]["score"]["correct"]) for item in graded] for side in (lossless, records))
    paired = paired_difference(before, after)
    center, half = (paired.low + paired.high) / 2, (paired.high - paired.low) / 2
    deviation = half / stats.norm.ppf(1 - _TAIL)
    confidence = float(stats.norm.cdf((limit + center) / deviation))
    value, n = 0.0 - paired.difference, len(graded)
    needed = None
    if value < limit < -paired.low:
        needed = n
        while -_low(paired.gained / n * needed, paired.lost / n * needed, needed) > limit:
            needed = math.ceil(1.05 * needed) + 1
    return Check("accuracy drop", limit, value, -paired.low, confidence, n, needed)


def _low(gained: float, lost: float, n: int) -> float:
    """The lower bound of `paired_difference` if n items changed as these did."""
    p_gained, p_lost = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    center = p_gained - p_lost
    return float(center - stats.norm.ppf(1 - _TAIL) * math.sqrt((p_gained + p_lost - center**2) / (n + 2)))


def _lossy(limit: float, records: Records) -> Check:
    lossy = np.array([len(record["lossy"]) for record in records.values()], float)
    emitted = np.array([len(record["tokens"]) for record in records.values()], float)
    draws = _draws(len(records))
    shares = lossy[draws].sum(1) / emitted[draws].sum(1)
    # where none was seen among n tokens, about three in n could still be there
    worst = max(float(np.quantile(shares, 1 - _TAIL)), 3.0 / float(emitted.sum()))
    confidence = float((shares <= limit).mean()) if lossy.any() else 1 - (1 - min(limit, 1.0)) ** float(emitted.sum())
    value, n = float(lossy.sum() / emitted.sum()), len(records)
    needed = _needed(n, value, worst, limit)
    if needed is not None and not lossy.any():
        needed = math.ceil(n * worst / limit)  # this bound shrinks with n itself
    return Check("lossy share", limit, value, worst, confidence, n, needed)


def _logprob(limit: float, records: Records, lossless: Records) -> Check:
    items = list(records)

    def sums(side: Records) -> tuple[Any, Any]:
        totals = [math.fsum(side[item]["logprobs"]) for item in items]
        return np.array(totals), np.array([len(side[item]["logprobs"]) for item in items], float)

    (total, count), (base_total, base_count) = sums(records), sums(lossless)
    draws = _draws(len(items))
    losses = base_total[draws].sum(1) / base_count[draws].sum(1) - total[draws].sum(1) / count[draws].sum(1)
    value = float(base_total.sum() / base_count.sum() - total.sum() / count.sum())
    worst = max(value, float(np.quantile(losses, 1 - _TAIL)))
    needed = _needed(len(items), value, worst, limit)
    return Check("log-prob loss", limit, value, worst, float((losses <= limit).mean()), len(items), needed)


def _needed(n: int, value: float, worst: float, limit: float) -> int | None:
    """Items that would bring the worst end within the limit: intervals shrink with the root of n."""
    return math.ceil(n * ((worst - value) / (limit - value)) ** 2) if value < limit < worst else None


def _draws(n: int) -> Any:
    """Always the same resamples of n items. [R, n]."""
    return np.random.default_rng(0).integers(0, n, (_RESAMPLES, n))


def faster_share(records: Records, seconds: float, other: Records, other_seconds: float) -> float:
    """Share of resamples of the items in which the first method is faster. seconds: of one round at batch 1."""
    items = list(records)
    draws = _draws(len(items))

    def rate(side: Records, cost: float) -> Any:
        yielded = np.array([side[item]["accepted"] + side[item]["rounds"] for item in items], float)
        rounds = np.array([side[item]["rounds"] for item in items], float)
        return yielded[draws].sum(1) / rounds[draws].sum(1) / cost

    return float((rate(records, seconds) > rate(other, other_seconds)).mean())


def tau_by_length(records: Records, lengths: Sequence[int]) -> dict[int, float]:
    """tau at shorter draft lengths, read off the share of rounds that kept a token at each place of a longer draft."""
    rounds = sum(record["rounds"] for record in records.values())
    longest = max(lengths)
    kept = [0] * longest
    for record in records.values():
        for i, count in enumerate(record["accepted_at"][:longest]):
            kept[i] += count
    return {length: 1.0 + sum(kept[:length]) / rounds for length in lengths}


def pooled_tau(records: Records) -> float:
    """Mean tokens per verification, the bonus included."""
    rounds = sum(record["rounds"] for record in records.values())
    return float((sum(record["accepted"] for record in records.values()) + rounds) / rounds)


def mean_length(records: Records) -> float:
    """Mean tokens of an answer."""
    return statistics.fmean(len(record["tokens"]) for record in records.values())
