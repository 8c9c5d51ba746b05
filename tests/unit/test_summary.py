"""The table of a comparison, by hand on three prompts."""

from __future__ import annotations

from typing import Any

import pytest

from dropmatch.bench.summary import first_divergence, summarize


def record(tokens: list[int], *, accepted: int, rounds: int, correct: bool | None, **more: Any) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "logprobs": more.pop("logprobs", [-0.5] * len(tokens)),
        "rounds": rounds,
        "drafted": 2 * rounds,
        "accepted": accepted,
        "drafted_at": [rounds, rounds],
        "accepted_at": more.pop("accepted_at", [accepted, 0]),
        "lossy": [{"prob": p} for p in more.pop("lossy", [])],
        "score": {"correct": correct, "metrics": more.pop("metrics", {}), "extracted": None},
    }


def result(**speed: Any) -> dict[str, Any]:
    lossless = {
        "a": record([1, 2, 3, 4], accepted=2, rounds=2, correct=True),
        "b": record([5, 6], accepted=1, rounds=1, correct=True),
        "c": record([7], accepted=0, rounds=1, correct=False),
    }
    lossy = {
        "a": record([1, 2, 9, 9, 9, 9, 9, 9], accepted=6, rounds=2, correct=False, lossy=[0.2], logprobs=[-1.0] * 8),
        "b": record([5, 6], accepted=1, rounds=1, correct=True),
        "c": record([7, 8], accepted=1, rounds=1, correct=True, lossy=[0.4, 0.1]),
    }
    return {
        "prompts": {"a": {"task": "x"}, "b": {"task": "x"}, "c": {"task": "y"}},
        "arms": {
            "lossless L=2": {"rule": "lossless", "draft_length": 2, "items": lossless},
            "dropmatch L=2": {"rule": "dropmatch", "draft_length": 2, "items": lossy},
        },
        "speed": speed or None,
    }


def rows(**speed: Any) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["rule"], row["task"]): row for row in summarize(result(**speed))}


def test_there_is_a_row_per_method_and_task_and_one_for_all() -> None:
    assert set(rows()) == {(rule, task) for rule in ("lossless", "dropmatch") for task in ("all", "x", "y")}
    assert rows()["dropmatch", "x"]["n"] == 2


def test_tau_pools_rounds() -> None:
    row = rows()["dropmatch", "all"]
    assert row["tau"] == pytest.approx((6 + 1 + 1 + 4) / 4)
    assert row["tau_low"] <= row["tau"] <= row["tau_high"]
    assert row["acceptance_by_position"] == [8 / 4, 0.0]


def test_what_the_text_lost() -> None:
    row = rows()["dropmatch", "all"]
    assert (row["lossy_tokens"], row["emitted"]) == (3, 12)
    assert row["lossy_prob_mean"] == pytest.approx(0.7 / 3)
    assert row["lossy_prob_median"] == 0.2
    assert row["logprob_mean"] == pytest.approx((-8.0 - 2 * 0.5 - 2 * 0.5) / 12)
    assert row["logprob_difference"] == pytest.approx(row["logprob_mean"] + 0.5)
    assert row["repetition"] == pytest.approx(2 / 5)  # 9999 stands three times among the five 4-grams of "a"
    assert row["length_ratio"] == pytest.approx(12 / 7)
    assert row["diverged_share"] == pytest.approx(2 / 3)
    assert row["first_divergence_median"] == pytest.approx(1.5)  # at 2 in "a", at 1 in "c"


def test_accuracy_is_paired_with_lossless() -> None:
    row = rows()["dropmatch", "all"]
    assert row["accuracy"] == pytest.approx(2 / 3)
    assert (row["gained"], row["lost"], row["accuracy_difference"]) == (1, 1, 0.0)
    assert row["p_value"] == 1.0
    assert rows()["lossless", "all"]["accuracy_difference"] == 0.0


def test_a_text_that_only_goes_on_diverges_at_its_end() -> None:
    assert first_divergence({"tokens": [1, 2, 3]}, {"tokens": [1, 2]}) == 2
    assert first_divergence({"tokens": [1, 2]}, {"tokens": [1, 2]}) is None


def test_what_was_not_measured_is_none() -> None:
    without = result()
    del without["arms"]["lossless L=2"]
    for entry in without["arms"]["dropmatch L=2"]["items"].values():
        entry["score"]["correct"] = None
    row = summarize(without)[0]
    assert row["accuracy"] is row["p_value"] is row["logprob_difference"] is row["tokens_per_second"] is None
    assert row["pareto"]


def test_speed_is_a_ratio_by_prompt() -> None:
    def arm(seconds: list[float], tokens: int) -> dict[str, Any]:
        return {
            "seconds": {"a": seconds, "b": [1.0]},
            "tokens": {"a": tokens, "b": 10},
            "time": {"target_s": 2.0, "judge_s": 0.1},
        }

    arms = {"plain": arm([4.0], 8), "lossless L=2": arm([2.0], 8), "dropmatch L=2": arm([1.0, 9.0, 1.0], 8)}
    row = rows(items=["a", "b"], arms=arms)["dropmatch", "all"]
    assert row["tokens_per_second"] == pytest.approx(18 / 2.0)
    assert row["over_plain"] == {"median": 2.5, "min": 1.0, "max": 4.0}
    assert row["over_lossless"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert row["judge_over_target"] == 0.05
    assert rows(items=["a", "b"], arms=arms)["dropmatch", "y"]["over_plain"] is None  # "c" was not timed


def timed(**lengths: int) -> dict[str, Any]:
    """A result whose lossless method has another draft length or is missing, with every method timed on "a"."""
    given = result()
    arms = given["arms"]
    arms["plain"] = {"rule": "plain", "draft_length": 0, "items": arms["lossless L=2"]["items"]}
    lossless = arms.pop("lossless L=2")
    for name, length in lengths.items():
        arms[f"{name} L={length}"] = {**lossless, "draft_length": length}
    arm = {"seconds": {"a": [1.0]}, "tokens": {"a": 8}, "time": {"target_s": 2.0, "judge_s": 0.1}}
    given["speed"] = {"items": ["a"], "arms": dict.fromkeys(arms, arm)}
    return {row["rule"]: row for row in summarize(given) if row["task"] == "all"}


def test_speed_over_lossless_is_at_the_same_draft_length_or_not_at_all() -> None:
    """It was over lossless decoding at any other length, which is of another speed."""
    rows = timed(lossless=5)
    assert rows["dropmatch"]["over_lossless"] is rows["plain"]["over_lossless"] is None
    assert rows["dropmatch"]["over_plain"]["median"] == 1.0
    assert rows["lossless"]["over_lossless"]["median"] == 1.0
    assert rows["dropmatch"]["length_ratio"] == pytest.approx(12 / 7)  # the texts are the same at any length
    assert rows["dropmatch"]["gained"] == 1
    assert timed(lossless=2)["dropmatch"]["over_lossless"]["median"] == 1.0


def test_plain_decoding_does_not_stand_in_for_lossless() -> None:
    row = timed()["dropmatch"]
    names = ("over_lossless", "length_ratio", "logprob_difference", "diverged_share", "accuracy_difference", "p_value")
    assert all(row[name] is None for name in names)
    assert row["accuracy"] == pytest.approx(2 / 3)


def test_the_heads_share_of_time_stands_where_all_timed_prompts_are() -> None:
    """A task's row had that of all tasks."""
    arm = {
        "seconds": {"a": [1.0], "c": [1.0]},
        "tokens": {"a": 8, "c": 8},
        "time": {"target_s": 2.0, "judge_s": 0.1},
    }
    arms = {"lossless L=2": arm, "dropmatch L=2": arm}
    shares = {
        task: rows(items=["a", "c"], arms=arms)["dropmatch", task]["judge_over_target"] for task in ("all", "x", "y")
    }
    assert shares == {"all": 0.05, "x": None, "y": None}
    assert rows(items=["a"], arms=arms)["dropmatch", "x"]["judge_over_target"] == 0.05


def test_the_front_is_marked() -> None:
    marked = {key: row["pareto"] for key, row in rows().items()}
    assert marked["dropmatch", "y"]
    assert not marked["lossless", "y"]  # shorter drafts kept, and wrong
    assert marked["lossless", "x"]
    assert marked["dropmatch", "x"]
