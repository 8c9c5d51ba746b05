"""Counts: tau over whole rounds, pooled; JSON without NaN; the hint where speculation does not pay."""

from __future__ import annotations

import json
import math

import pytest

from dropmatch.core.reasons import Reason
from dropmatch.core.stats import EngineStats, LossyToken, RequestStats, TimeSplit


def _stats(*rounds: tuple[int, int]) -> RequestStats:
    stats = RequestStats()
    for drafted, accepted in rounds:
        stats.record_round(drafted, accepted)
        stats.emitted += accepted + 1
        stats.reasons.update([Reason.JS] * accepted + [Reason.BONUS if accepted == drafted else Reason.RECOVERED])
    return stats


def _strict(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def test_tau_counts_the_bonus_token_and_can_pass_the_draft_length() -> None:
    assert _stats((5, 5), (5, 5)).tau == 6.0
    assert _stats((5, 0)).tau == 1.0
    assert _stats((5, 5)).accepted_per_round == 5.0


def test_tau_is_pooled_over_rounds_not_averaged_over_requests() -> None:
    pooled = RequestStats()
    pooled.add(_stats((5, 5)))
    pooled.add(_stats((5, 0), (5, 0), (5, 0)))
    assert pooled.tau == pytest.approx((6 + 1 + 1 + 1) / 4)


def test_pooling_equals_recording_everything_in_one_place() -> None:
    a, b = _stats((2, 1), (5, 3)), _stats((3, 3), (0, 0))
    together = _stats((2, 1), (5, 3), (3, 3), (0, 0))
    a.add(b)
    assert a == together


def test_acceptance_by_position_counts_rounds_that_drafted_so_far() -> None:
    stats = _stats((3, 3), (3, 1), (1, 0))
    assert stats.drafted_at == [3, 2, 2]
    assert stats.accepted_at == [2, 1, 1]
    assert stats.to_json()["acceptance_by_position"] == pytest.approx([2 / 3, 1 / 2, 1 / 2])


def test_empty_stats_are_finite_json() -> None:
    stats = EngineStats()
    assert math.isnan(stats.requests.tau)
    loaded = json.loads(_strict(stats.to_json()))
    assert loaded["tau"] is None
    assert loaded["tokens_per_second"] is None
    assert loaded["predicted_speedup"] is None
    assert loaded["hint"] is None


def test_full_stats_are_finite_json_with_labelled_reasons() -> None:
    stats = EngineStats(requests=_stats((4, 2), (4, 4)), time=TimeSplit(draft=1.0, target=2.0, judge=0.5, rest=0.5))
    stats.requests.lossy.append(LossyToken(3, 10, 11, 0.2, 0.7, Reason.JS))
    loaded = json.loads(_strict(stats.to_json()))
    assert loaded["reasons"] == {"js": 6, "bonus": 1, "recovered": 1}
    assert sum(loaded["reason_shares"].values()) == pytest.approx(1.0)
    assert loaded["lossy"] == [
        {"index": 3, "token": 10, "best_token": 11, "prob": 0.2, "best_prob": 0.7, "reason": "js"}
    ]
    assert loaded["lossy_share"] == pytest.approx(1 / 8)
    assert loaded["time"]["decode_s"] == 4.0
    assert loaded["tokens_per_second"] == pytest.approx(8 / 4)


def test_predicted_speedup_is_tau_target_steps_against_the_whole_loop() -> None:
    split = TimeSplit(prefill=100.0, draft=1.0, target=2.0, judge=0.5, rest=0.5)
    assert split.predicted_speedup(4.0) == pytest.approx(4.0 * 2.0 / 4.0)
    assert math.isnan(TimeSplit().predicted_speedup(4.0))


def test_hint_appears_only_where_speculation_does_not_pay() -> None:
    slow = EngineStats(requests=_stats((5, 1)), time=TimeSplit(draft=9.0, target=1.0))
    fast = EngineStats(requests=_stats((5, 5)), time=TimeSplit(draft=0.1, target=1.0))
    plain = EngineStats(requests=_stats((0, 0)), time=TimeSplit(target=1.0, rest=0.1))
    assert "does not pay" in slow.hint()
    assert "0.20x" in slow.hint()
    assert "tau 2.00" in slow.hint()
    assert fast.hint() is None
    assert plain.hint() is None


def test_engine_stats_add_up() -> None:
    a = EngineStats(requests=_stats((5, 1)), time=TimeSplit(draft=1.0, target=2.0, target_forwards=3, head_rows=4))
    a.add(EngineStats(requests=_stats((5, 5)), time=TimeSplit(draft=0.5, target=1.0, target_forwards=1, head_rows=1)))
    assert a.requests == _stats((5, 1), (5, 5))
    assert a.time == TimeSplit(draft=1.5, target=3.0, target_forwards=4, head_rows=5)
