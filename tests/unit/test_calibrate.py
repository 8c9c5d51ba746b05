"""Choosing p_drop from the model's own radius, and the watch on saturation."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmatch.config import DropoutConfig, SamplingParams
from dropmatch.core import calibrate
from dropmatch.core.acceptance import RuleOptions, is_closed_form, make_rule
from dropmatch.core.calibrate import (
    P_DROP_GRID,
    TARGET_RADIUS,
    RadiusWatch,
    SaturationWarning,
    choose_p_drop,
    expected_radius_at,
    radius_at,
)
from dropmatch.core.reasons import Reason
from dropmatch.core.verification import NodeEnsemble
from dropmatch.drafters.random_tokens import RandomDrafter
from dropmatch.errors import ConfigError
from dropmatch.ops.divergence import LN2
from scripted import ScriptedModel
from toys import run_one

V = 1000
SMALL = ScriptedModel(V, 24, seed=2, scale=4.0)  # few hidden coordinates: p_drop=0.3 is far too much
PROMPT = [5, 6, 7]
MOST_STEPS_APART = 2


def _random_drafter() -> RandomDrafter:
    return RandomDrafter(torch.device("cpu"), V)


def _ensemble(radius: list[float]) -> NodeEnsemble:
    values = torch.tensor([radius])
    zeros = torch.zeros(values.shape, dtype=torch.int64)
    return NodeEnsemble(
        tokens=zeros[..., None],
        majority=zeros,
        votes=zeros,
        radius=values,
        js_draft=values,
        centroid_prob=values,
        asked=~values.isnan(),
    )


def test_random_drafts_on_a_small_target_raise_a_saturation_warning() -> None:
    """Seed 0. The default rate on a model of 24 hidden coordinates lets Eq. 6 keep random tokens; that must not pass
    in silence."""
    with pytest.warns(SaturationWarning, match=r"p_drop=0\.3 is too large.*p_drop='auto'"):
        result = run_one(
            SMALL,
            _random_drafter(),
            PROMPT,
            SamplingParams(max_new_tokens=150),
            dropout=DropoutConfig(p_drop=0.3),
        )
    assert result.stats.reasons[Reason.JS] > 0


def test_random_drafts_are_not_kept_at_the_chosen_rate() -> None:
    """Seed 0. Of about 1,000 random tokens over 1,000 ids less than 1% may stay; chance matches are about 0.1%."""
    choice = choose_p_drop(SMALL.head, SMALL.table[:200], DropoutConfig())
    assert choice.p_drop < 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run_one(
            ScriptedModel(V, 24, seed=2, scale=4.0),
            _random_drafter(),
            PROMPT,
            SamplingParams(max_new_tokens=200),
            dropout=DropoutConfig(p_drop=choice.p_drop),
        )
    assert result.stats.drafted > 900
    assert result.stats.accepted < 0.01 * result.stats.drafted


def test_random_point_masses_are_not_kept_even_at_saturation() -> None:
    """Without a distribution a random draft is a point mass on an unlikely token, ln 2 away from anything."""
    drafter = RandomDrafter(torch.device("cpu"), V, with_distribution=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturationWarning)
        result = run_one(
            ScriptedModel(V, 24, seed=2, scale=4.0),
            drafter,
            PROMPT,
            SamplingParams(max_new_tokens=100),
            dropout=DropoutConfig(p_drop=0.3),
        )
    assert result.stats.accepted < 0.01 * result.stats.drafted


def test_choice_is_the_largest_rate_within_the_target_radius() -> None:
    choice = choose_p_drop(SMALL.head, SMALL.table[:100], DropoutConfig())
    measured = list(choice.median_radius)
    assert measured == list(P_DROP_GRID[: len(measured)])
    assert choice.p_drop == measured[-1]
    assert choice.median_radius[choice.p_drop] <= TARGET_RADIUS
    assert all(choice.median_radius[p] > TARGET_RADIUS for p in measured[:-1])


def test_a_head_that_hardly_moves_keeps_the_papers_rate() -> None:
    flat = ScriptedModel(V, 24, seed=2, scale=0.1)
    assert choose_p_drop(flat.head, flat.table[:50], DropoutConfig()).p_drop == P_DROP_GRID[0]


def test_a_head_that_always_exceeds_gets_the_smallest_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "TARGET_RADIUS", -1.0)
    choice = choose_p_drop(SMALL.head, SMALL.table[:10], DropoutConfig())
    assert choice.p_drop == P_DROP_GRID[-1]
    assert list(choice.median_radius) == list(P_DROP_GRID)


def test_radius_grows_with_the_rate_and_stays_below_ln_2() -> None:
    """Seed 0, medians over 100 states; the steps are far larger than their noise."""
    medians = [float(radius_at(SMALL.head, SMALL.table[:100], DropoutConfig(), p).median()) for p in (0.02, 0.1, 0.3)]
    assert medians == sorted(medians)
    assert float(radius_at(SMALL.head, SMALL.table[:100], DropoutConfig(), 0.5).max()) <= LN2 + 1e-6
    assert float(radius_at(SMALL.head, SMALL.table[:10], DropoutConfig(), 0.0).max()) == 0.0


def test_expected_choice_draws_no_masks_and_is_near_the_sampled_one() -> None:
    """The closed radius is within a factor of two of the sampled one where the radius is small, so that the choice is
    off by two steps of the grid at most. Seeds only move the sampled one."""
    states = SMALL.table[:200]
    sampled = choose_p_drop(SMALL.head, states, DropoutConfig())
    expected = choose_p_drop(SMALL.head, states, DropoutConfig(), expected=True)
    assert expected == choose_p_drop(SMALL.head, states, DropoutConfig(), seed=9, expected=True)
    assert (sampled.is_expected, expected.is_expected) == (False, True)
    steps = [P_DROP_GRID.index(choice.p_drop) for choice in (sampled, expected)]
    assert abs(steps[0] - steps[1]) <= MOST_STEPS_APART
    assert expected.median_radius[expected.p_drop] <= TARGET_RADIUS
    for p in (0.02, 0.05):
        closed = float(expected_radius_at(SMALL.head, states, 5, p).median())
        drawn = float(radius_at(SMALL.head, states, DropoutConfig(), p).median())
        assert 0.5 < closed / drawn < 2.0


def test_expected_radius_does_not_depend_on_the_block_a_position_stands_in() -> None:
    whole = expected_radius_at(SMALL.head, SMALL.table[:130], 5, 0.1)
    alone = torch.cat([expected_radius_at(SMALL.head, SMALL.table[i : i + 1], 5, 0.1) for i in (0, 64, 129)])
    assert torch.allclose(whole[[0, 64, 129]], alone, rtol=1e-5)


def test_expected_choice_needs_the_rows_of_the_head() -> None:
    class Hidden:
        is_linear, vocab_size = True, V

        def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
            return SMALL.head(hidden)

    with pytest.raises(ConfigError, match="no weight matrix"):
        choose_p_drop(Hidden(), SMALL.table[:5], DropoutConfig(), expected=True)


@pytest.mark.parametrize(
    ("rule", "is_closed"),
    [
        ("dropmatch", False),
        ("exact", False),
        ("lossless", False),
        ("top-k(k=3)", False),
        ("expected-head", True),
        ("dropmatch-expected", True),
        ("expected-head+majority", False),
    ],
)
def test_rules_in_closed_form_are_known(rule: str, is_closed: bool) -> None:
    assert is_closed_form(make_rule(rule)) is is_closed
    if "lossless" not in rule:
        assert is_closed_form(make_rule(rule, RuleOptions(guard_prob=0.1))) is is_closed


def test_choice_needs_hidden_states() -> None:
    with pytest.raises(ConfigError, match="at least one hidden state"):
        choose_p_drop(SMALL.head, SMALL.table[:0], DropoutConfig())


def test_watch_warns_once_when_most_radii_are_wide() -> None:
    watch = RadiusWatch(0.3)
    watch.see(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.see(_ensemble([0.6] * 31))  # too few to judge by
    with pytest.warns(SaturationWarning, match=r"0\.60 nats of at most 0\.69"):
        watch.see(_ensemble([0.6]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.see(_ensemble([0.6] * 40))


def test_watch_stays_silent_on_ordinary_and_on_unasked_positions() -> None:
    watch = RadiusWatch(0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.see(_ensemble([0.02, 0.6] * 15 + [0.02] * 10))
        watch.see(_ensemble([float("nan")] * 100))


@settings(deadline=None, derandomize=True, max_examples=20)
@given(st.integers(0, 2**40), st.integers(2, 8))
def test_choice_depends_on_its_arguments_only(seed: int, K: int) -> None:
    config = DropoutConfig(num_paths=K)
    first = choose_p_drop(SMALL.head, SMALL.table[:8], config, seed=seed)
    assert choose_p_drop(SMALL.head, SMALL.table[:8], config, seed=seed) == first
