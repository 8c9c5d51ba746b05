"""Jensen-Shannon divergence: bounds, zeros, rounding, and the point mass."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmatch.core import reference
from dropmatch.errors import ShapeError
from dropmatch.ops.divergence import LN2, js_divergence, js_from_log_probs, js_point_mass, log_probs

FLOAT32 = 1e-6  # nats; sums of a few dozen float32 terms below 1
SMALL_RELATIVE = 0.02  # a divergence of 1e-6 still has two figures in float32


def _random_probs(*shape: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).softmax(-1)


def test_equal_distributions_have_no_divergence() -> None:
    p = _random_probs(20, 50)
    assert float(js_divergence(p, p).max()) <= FLOAT32


def test_disjoint_distributions_reach_ln_2() -> None:
    p, q = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.1, 0.9])
    assert float(js_divergence(p, q)) == pytest.approx(LN2, abs=FLOAT32)
    assert math.log(2.0) == LN2


def test_divergence_is_symmetric() -> None:
    p, q = _random_probs(30, 40, seed=1), _random_probs(30, 40, seed=2)
    assert torch.allclose(js_divergence(p, q), js_divergence(q, p), rtol=0, atol=FLOAT32)


def test_tensor_version_equals_plain_python() -> None:
    p, q = _random_probs(25, 33, seed=3), _random_probs(25, 33, seed=4)
    q[:, ::3] = 0.0
    q /= q.sum(-1, keepdim=True)
    got = js_divergence(p, q)
    expected = [reference.js_divergence(a, b) for a, b in zip(p.double().tolist(), q.double().tolist(), strict=True)]
    assert got.tolist() == pytest.approx(expected, abs=FLOAT32)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.tuples(st.floats(-60, 60), st.floats(-60, 60)), min_size=2, max_size=20))
def test_divergence_stays_between_zero_and_ln_2(pairs: list[tuple[float, float]]) -> None:
    p_logits, q_logits = torch.tensor(pairs).T
    value = float(js_from_log_probs(log_probs(p_logits), log_probs(q_logits)))
    expected = reference.js_divergence(
        reference.softmax(p_logits.double().tolist()), reference.softmax(q_logits.double().tolist())
    )
    assert 0.0 <= value <= LN2 + FLOAT32  # float32 rounds ln 2 up
    assert value == pytest.approx(expected, abs=FLOAT32)


def test_small_divergences_survive_rounding() -> None:
    """The radius of concentrated heads is about 1e-3 and below; a difference of entropies would lose it."""
    p_logits = torch.randn(64, generator=torch.Generator().manual_seed(5))
    q_logits = p_logits + 0.003 * torch.randn(64, generator=torch.Generator().manual_seed(6))
    expected = reference.js_divergence(
        reference.softmax(p_logits.double().tolist()), reference.softmax(q_logits.double().tolist())
    )
    assert expected < 5e-6
    got = float(js_from_log_probs(log_probs(p_logits), log_probs(q_logits)))
    assert got == pytest.approx(expected, rel=SMALL_RELATIVE)


def test_masked_logits_count_as_zero_probability() -> None:
    p_logits = torch.tensor([0.0, 1.0, float("-inf"), 2.0])
    q_logits = torch.tensor([float("-inf"), 1.0, 0.5, 2.0])
    got = js_from_log_probs(log_probs(p_logits), log_probs(q_logits))
    assert float(got) == pytest.approx(float(js_divergence(p_logits.softmax(-1), q_logits.softmax(-1))), abs=FLOAT32)
    assert bool(got.isfinite())


def test_point_mass_equals_the_general_form() -> None:
    q = _random_probs(9, seed=7)
    one_hot = torch.eye(9)
    expected = js_divergence(one_hot, q.expand(9, 9))
    assert torch.allclose(js_point_mass(q.log()), expected, rtol=0, atol=FLOAT32)


def test_point_mass_on_a_certain_or_an_impossible_token() -> None:
    assert js_point_mass(torch.tensor([0.0, float("-inf")])).tolist() == pytest.approx([0.0, LN2], abs=FLOAT32)


def test_half_precision_is_computed_in_float32() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(8)).bfloat16()
    assert log_probs(logits).dtype == torch.float32
    assert torch.equal(log_probs(logits), log_probs(logits.float()))


def test_different_vocabularies_are_refused() -> None:
    with pytest.raises(ShapeError, match="vocabularies differ: 3 and 4"):
        js_divergence(torch.ones(3) / 3, torch.ones(4) / 4)
