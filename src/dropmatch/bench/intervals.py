"""Uncertainty of shares, paired differences and ratios of sums. Pure numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

_RESAMPLES = 2000


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share; (0, 1) where n is 0."""
    if n == 0:
        return 0.0, 1.0
    interval = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Share of successes of B less that of A over the same items. gained, lost: items only B, only A got right;
    low, high: 95% interval (Bonett and Price 2012); p_value: exact McNemar test."""

    difference: float
    low: float
    high: float
    gained: int
    lost: int
    p_value: float


def paired_difference(a: Sequence[bool], b: Sequence[bool]) -> PairedDifference:
    """Compare two methods on the same items, one entry each. Raises ValueError if the lengths differ."""
    gained = sum(y and not x for x, y in zip(a, b, strict=True))
    lost = sum(x and not y for x, y in zip(a, b, strict=True))
    n = len(a)
    p_value = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    # an adjusted Wald interval: it does not shrink to nothing where no item differs
    p_gained, p_lost = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    center = p_gained - p_lost
    half = stats.norm.ppf(0.975) * math.sqrt((p_gained + p_lost - center**2) / (n + 2))
    difference = (gained - lost) / n if n else 0.0
    return PairedDifference(
        difference, max(-1.0, float(center - half)), min(1.0, float(center + half)), gained, lost, p_value
    )


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = 0.95
) -> tuple[float, float]:
    """Bootstrap interval of sum(numerators) / sum(denominators), items drawn as pairs. Always the same draws."""
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    draws = np.random.default_rng(0).integers(0, len(top), (_RESAMPLES, len(top)))
    ratios = top[draws].sum(1) / bottom[draws].sum(1)
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the median. Always the same draws; with few values it is narrow rather than wide."""
    given = np.asarray(values, float)
    draws = np.random.default_rng(0).integers(0, len(given), (_RESAMPLES, len(given)))
    low, high = np.quantile(np.median(given[draws], axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def is_on_front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points no other one beats: at least as good in both figures (larger is better) and better in one."""
    return [not any(x >= a and y >= b and (x > a or y > b) for x, y in points if (x, y) != (a, b)) for a, b in points]
