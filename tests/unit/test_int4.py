"""Weight-only int4 linear layers against their own rounded weights and the original layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dropmatch.errors import UnsupportedModelError
from dropmatch.hf import native
from dropmatch.hf.int4 import GROUP_SIZE, Int4Linear, quantize_int4, round_int4

ROUNDING = 0.02  # bfloat16 has 8 bits of mantissa; products of a few hundred terms agree to about 1%
FOUR_BITS = 0.12  # 15 steps over the range of 32 normal weights leave an error of about 8% of their norm


def make_linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(128, 192, bias=bias).bfloat16().requires_grad_(False)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The 4-bit rounding written out plainly."""
    result = torch.empty_like(weight, dtype=torch.float32)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], GROUP_SIZE):
            group = weight[row, start : start + GROUP_SIZE].float()
            scale = ((group.max() - group.min()) / 15).bfloat16().float()
            middle = (group.min() + 8 * scale).bfloat16().float()
            codes = ((group - middle) / scale).round().add(8).clamp(0, 15)
            result[row, start : start + GROUP_SIZE] = (codes - 8) * scale + middle
    return result


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_narrow_input_is_multiplied_by_the_rounded_weights(bias: bool, is_native: bool) -> None:
    if is_native and native.library() is None:
        pytest.skip(f"no compiled kernels: {native.why_unavailable()}")
    linear = make_linear(bias)
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.float() @ rounded(linear.weight).T + (linear.bias.float() if bias else 0.0)
    got = Int4Linear(linear, is_native=is_native)(x).float()
    assert got.shape == (2, 3, 192)
    assert (got - expected).norm() < ROUNDING * expected.norm()


def test_wide_input_keeps_the_original_weights() -> None:
    linear = make_linear()
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = linear(x).float()
    assert (Int4Linear(linear)(x).float() - expected).norm() < 0.005 * expected.norm()  # bfloat16's own rounding


def test_rounding_error_stays_within_four_bits() -> None:
    linear = make_linear()
    error = (rounded(linear.weight) - linear.weight.float()).norm() / linear.weight.float().norm()
    assert 0 < error < FOUR_BITS


def test_a_group_of_equal_weights_is_kept_as_it_is() -> None:
    linear = make_linear(bias=False)
    linear.weight.fill_(0.5)
    codes, scales, middles = round_int4(linear.weight)
    assert codes.shape == (192, 128)
    assert scales.shape == middles.shape == (192, 4)
    x = torch.ones(1, 128).bfloat16()
    torch.testing.assert_close(Int4Linear(linear)(x), linear(x))


def test_every_fitting_layer_is_replaced_and_others_stay() -> None:
    model = nn.Sequential(make_linear(), nn.ReLU(), nn.Linear(192, 7).bfloat16(), nn.Embedding(4, 8))
    assert quantize_int4(model) == 1
    assert isinstance(model[0], Int4Linear)
    assert type(model[2]) is nn.Linear


def test_a_model_that_is_not_bfloat16_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="must be bfloat16 on a CPU"):
        quantize_int4(nn.Sequential(nn.Linear(128, 192)))
