"""Intervals and paired tests against closed forms and simulation."""

from __future__ import annotations

import numpy as np
import pytest

from dropmatch.bench.intervals import is_on_front, median_interval, paired_difference, ratio_interval, wilson


def test_wilson_is_the_textbook_interval() -> None:
    low, high = wilson(8, 10)
    z, n, p = 1.959964, 10, 0.8
    center = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * ((p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5)
    assert (low, high) == pytest.approx((center - half, center + half), abs=1e-6)
    assert wilson(0, 0) == (0.0, 1.0)


def test_a_paired_difference_counts_only_items_that_differ() -> None:
    a = [True, True, False, False, True, False]
    b = [True, False, True, True, True, False]
    result = paired_difference(a, b)
    assert (result.gained, result.lost) == (2, 1)
    assert result.difference == pytest.approx(1 / 6)
    assert result.low < result.difference < result.high
    assert result.p_value == pytest.approx(1.0)  # 2 against 1 of three coin flips: every outcome is as likely or less


def test_mcnemar_is_exact() -> None:
    result = paired_difference([True] * 8 + [False] * 20, [False] * 8 + [False] * 20)
    assert result.p_value == pytest.approx(2 * 0.5**8)


def test_no_difference_still_has_an_interval() -> None:
    result = paired_difference([True] * 20, [True] * 20)
    assert result.difference == 0.0
    assert result.low < 0.0 < result.high
    assert result.p_value == 1.0


def test_paired_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(400):
        u = rng.random(120)
        a, b = u < 0.7, (u < 0.62) | ((u > 0.9) & (rng.random(120) < 0.3))
        truth = 0.62 + 0.1 * 0.3 - 0.7
        result = paired_difference(a.tolist(), b.tolist())
        hits += result.low <= truth <= result.high
    assert 0.92 <= hits / 400 <= 0.985


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shorter|longer"):
        paired_difference([True], [True, False])


def test_a_ratio_interval_holds_the_ratio_and_repeats_itself() -> None:
    top, bottom = [10, 12, 7, 30], [4, 5, 3, 9]
    low, high = ratio_interval(top, bottom)
    assert low < sum(top) / sum(bottom) < high
    assert (low, high) == ratio_interval(top, bottom)
    assert ratio_interval([6, 6], [2, 2]) == (3.0, 3.0)


def test_a_median_interval_holds_the_median_and_repeats_itself() -> None:
    values = [1.0, 1.1, 1.3, 1.4, 2.0, 0.9, 1.2]
    low, high = median_interval(values)
    assert 0.9 <= low < 1.2 < high <= 2.0
    assert (low, high) == median_interval(values)
    assert median_interval([1.5]) == (1.5, 1.5)


def test_the_front_keeps_what_nothing_beats() -> None:
    points = [(1.0, 0.9), (2.0, 0.8), (1.5, 0.7), (2.0, 0.8), (3.0, 0.1)]
    assert is_on_front(points) == [True, True, False, True, True]
