"""Quality budgets: bounds, confidence, and what counts as proven."""

from __future__ import annotations

from typing import Any

import pytest

from dropmatch.bench.budget import Budget, check_budget, faster_share, overall, pooled_tau, tau_by_length
from dropmatch.errors import ConfigError


def _record(
    *, correct: bool | None = None, tokens: int = 100, lossy: int = 0, logprob: float = -0.1, **counts: Any
) -> dict[str, Any]:
    return {
        "tokens": [0] * tokens,
        "lossy": [{}] * lossy,
        "logprobs": [logprob] * tokens,
        "score": {"correct": correct},
        "rounds": 20,
        "accepted": 80,
        "accepted_at": [20, 20, 20, 20],
        **counts,
    }


def _records(*entries: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {str(i): entry for i, entry in enumerate(entries)}


def _records_from(start: int, correct: list[bool]) -> dict[str, dict[str, Any]]:
    return {str(start + i): _record(correct=right) for i, right in enumerate(correct)}


def _graded(right: int, wrong: int) -> dict[str, dict[str, Any]]:
    return _records(*[_record(correct=True)] * right, *[_record(correct=False)] * wrong)


def test_an_accuracy_that_did_not_move_is_unproven_on_few_prompts_and_within_on_many() -> None:
    few, many = _graded(8, 2), _graded(800, 200)
    (check,) = check_budget(Budget(accuracy_drop=0.02), few, few)
    assert (check.value, check.status) == (0.0, "unproven")
    assert check.worst > 0.02
    assert 0.5 < check.confidence < 0.95
    assert check.needed is not None
    assert check.needed > 10
    (sure,) = check_budget(Budget(accuracy_drop=0.02), many, many)
    assert sure.status == "within"
    assert sure.needed is None
    assert sure.confidence > 0.99


@pytest.mark.parametrize(("num_gained", "num_lost"), [(0, 0), (2, 2)])
def test_as_many_prompts_as_said_are_needed(num_gained: int, num_lost: int) -> None:
    """If further prompts change as these did. The number is found in steps of 5%."""

    def check(times: int) -> Any:
        before = _graded(num_lost * times, num_gained * times)
        after = _graded(0, num_lost * times) | _records_from(num_lost * times, [True] * num_gained * times)
        same = _records_from(len(before), [True] * 36 * times)
        return check_budget(Budget(accuracy_drop=0.05), {**after, **same}, {**before, **same})[0]

    first = check(1)
    assert first.status == "unproven"
    assert first.needed is not None
    times = first.needed // first.num_items
    assert check(times + 1).status == "within"
    assert check(max(1, times - 2) if num_gained else 1).status == "unproven"


def test_a_drop_beyond_the_limit_is_broken_and_little_trusted() -> None:
    (check,) = check_budget(Budget(accuracy_drop=0.02), _graded(60, 40), _graded(90, 10))
    assert check.value == pytest.approx(0.3)
    assert (check.status, check.needed) == ("broken", None)
    assert check.confidence < 0.01


def test_ungraded_prompts_do_not_count_and_none_graded_is_an_error() -> None:
    mixed = {**_graded(5, 0), "x": _record()}
    assert check_budget(Budget(accuracy_drop=0.5), mixed, mixed)[0].num_items == 5
    with pytest.raises(ConfigError, match="ground truth"):
        check_budget(Budget(accuracy_drop=0.5), _records(_record()), _records(_record()))


def test_lossy_share_is_pooled_and_no_lossy_token_seen_is_no_proof_of_none() -> None:
    records = _records(*[_record(lossy=2)] * 10, *[_record(lossy=6)] * 10)
    (check,) = check_budget(Budget(lossy_share=0.05), records, records)
    assert check.value == pytest.approx(0.04)
    assert 0.04 < check.worst < 0.06
    clean = _records(*[_record()] * 4)
    (none,) = check_budget(Budget(lossy_share=0.005), clean, clean)
    assert none.value == 0.0
    assert none.worst == pytest.approx(3 / 400)
    assert none.status == "unproven"
    assert check_budget(Budget(lossy_share=0.01), clean, clean)[0].status == "within"


def test_logprob_loss_is_the_difference_of_means_per_token() -> None:
    before = _records(*[_record(logprob=-0.1)] * 6)
    after = _records(*[_record(logprob=-0.12, tokens=50)] * 3, *[_record(logprob=-0.16, tokens=150)] * 3)
    (check,) = check_budget(Budget(logprob_loss=0.1), after, before)
    assert check.value == pytest.approx(0.05)  # 0.15 nats a token over 600 tokens, less 0.1
    assert check.value < check.worst <= 0.06 + 1e-9
    assert check.status == "within"


def test_the_worst_measure_decides() -> None:
    records = _records(*[_record(lossy=10)] * 10)
    checks = check_budget(Budget(lossy_share=0.05, logprob_loss=1.0), records, records)
    assert [check.status for check in checks] == ["broken", "within"]
    assert overall(checks) == "broken"
    assert overall([]) == "within"


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lossy_share=-0\.1 is out of range"):
        Budget(lossy_share=-0.1)


def test_tau_at_shorter_lengths_counts_the_rounds_that_kept_each_place() -> None:
    records = _records(_record(accepted=30, accepted_at=[18, 10, 2]), _record(accepted=10, accepted_at=[10]))
    assert tau_by_length(records, [1, 2, 3]) == pytest.approx({1: 1 + 28 / 40, 2: 1 + 38 / 40, 3: 2.0})
    assert tau_by_length(records, [3])[3] == pooled_tau(records)


def test_confidence_in_speed_needs_items_that_agree() -> None:
    fast = _records(*[_record(accepted=80)] * 10)
    slow = _records(*[_record(accepted=60)] * 10)
    assert faster_share(fast, 1.0, slow, 1.0) == 1.0
    assert faster_share(fast, 2.0, slow, 1.0) == 0.0
    mixed = _records(*[_record(accepted=100)] * 5, *[_record(accepted=22)] * 5)
    assert 0.05 < faster_share(mixed, 1.0, slow, 1.0) < 0.95
