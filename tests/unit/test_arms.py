"""Methods written as text."""

from __future__ import annotations

import pytest

from dropmatch.bench.arms import parse_arms, split_list
from dropmatch.config import DropoutConfig
from dropmatch.core.acceptance import Guard, RuleOptions
from dropmatch.errors import ConfigError, UnknownNameError

DROPOUT = DropoutConfig(num_paths=5, p_drop=0.3)


def arms(*rules: str, lengths: tuple[int, ...] = (5,)) -> list[object]:
    return list(parse_arms(rules, lengths, DROPOUT, RuleOptions()))


def test_commas_inside_brackets_belong_to_the_rule() -> None:
    assert split_list("lossless, typical(eps=0.1,delta=0.3),dropmatch") == [
        "lossless",
        "typical(eps=0.1,delta=0.3)",
        "dropmatch",
    ]


def test_every_rule_meets_every_length_and_plain_stands_once() -> None:
    made = parse_arms(["plain", "lossless", "dropmatch@k=20"], [5, 10], DROPOUT, RuleOptions())
    assert [arm.name for arm in made] == [
        "plain",
        "lossless L=5",
        "lossless L=10",
        "dropmatch@k=20 L=5",
        "dropmatch@k=20 L=10",
    ]
    assert made[-1].dropout.num_paths == 20
    assert made[1].dropout == DROPOUT


def test_an_arm_may_have_its_own_settings() -> None:
    (arm,) = parse_arms(["dropmatch@p=0.1@guard=0.2@L=7"], [5, 10], DROPOUT, RuleOptions())
    assert (arm.name, arm.dropout.p_drop, arm.draft_length) == ("dropmatch@p=0.1@guard=0.2 L=7", 0.1, 7)
    assert isinstance(arm.made, Guard)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("dropmatch@p=2", r"'p'.*'2'.*\[0.0, 1.0\)"),
        ("dropmatch@k=many", "'k'.*'many'"),
        ("dropmatch@L=0", "'L'.*'0'"),
        ("dropmatch@seed=-1", r"'seed'.*'-1'.*\[0|'seed'.*'-1'.*at least 0"),
        ("dropmatch@seed=x", "'seed'.*'x'"),
        ("dropmatch@guard=nan", r"nan.*\[0, 1\]"),
        ("dropmatch@guard-ratio=-1", r"-1.*\[0, 1\]"),
    ],
)
def test_bad_values_are_named(rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arms(rule)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("plain@k=3", "'k' means nothing to plain decoding. It takes no settings. Write 'plain'"),
        ("plain@L=4", "'L' means nothing to plain"),
        *((f"lossless@{setting}", "Only @L is allowed") for setting in ("k=3", "p=0.1", "heads=full", "guard=0.1")),
        ("lossless@guard-ratio=0.1", "'guard-ratio' means nothing to lossless"),
    ],
)
def test_settings_that_mean_nothing_are_refused(rule: str, message: str) -> None:
    """`plain@k=3` drafted after all, and `lossless@k=3` was no reference."""
    with pytest.raises(ConfigError, match=message):
        arms(rule)


def test_lossless_decoding_may_have_a_draft_length_of_its_own() -> None:
    (arm,) = parse_arms(["lossless@L=2"], [5], DROPOUT, RuleOptions())
    assert (arm.name, arm.is_lossless) == ("lossless L=2", True)


def test_an_arm_may_have_a_seed_of_its_own() -> None:
    first, second = parse_arms(["dropmatch@seed=3", "dropmatch"], [5], DROPOUT, RuleOptions())
    assert (first.name, first.seed, second.seed) == ("dropmatch@seed=3 L=5", 3, None)


@pytest.mark.parametrize("rule", ["dropmach", "dropmatch@q=1"])
def test_unknown_names_are_refused(rule: str) -> None:
    with pytest.raises(UnknownNameError):
        arms(rule)


def test_no_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="No rule"):
        arms()
