"""8-bit linear layers against the product of their own rounded factors, written out plainly."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from dropmatch.errors import UnsupportedModelError
from dropmatch.hf.int8 import Int8Linear, SlowWeightsWarning, quantize_int8

EIGHT_BITS = 0.012  # 255 steps over the range of normal numbers: each factor is off by about 0.5% of its norm


def make_linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(128, 192, bias=bias).to(dtype).requires_grad_(False)


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def rounded(matrix: Tensor) -> Tensor:
    scale = matrix.abs().amax(-1, keepdim=True) / 127
    return (matrix / scale).round() * scale


@pytest.mark.parametrize("bias", [True, False])
def test_factors_are_rounded_by_row_and_multiplied_exactly(bias: bool) -> None:
    linear, x = make_linear(bias), inputs(2, 3, 128)
    expected = rounded(x) @ rounded(linear.weight).T + (linear.bias if bias else 0.0)
    got = Int8Linear(linear)(x)
    assert got.shape == (2, 3, 192)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert 0 < (got - linear(x)).norm() / linear(x).norm() < EIGHT_BITS


def test_a_row_does_not_depend_on_the_others() -> None:
    layer, x = Int8Linear(make_linear()), inputs(5, 128)
    assert torch.equal(layer(x)[3], layer(torch.cat([x[3:4], 1000 * x[:2]]))[0])


def test_a_row_of_zeros_gives_the_bias() -> None:
    linear = make_linear()
    assert torch.equal(Int8Linear(linear)(torch.zeros(1, 128))[0], linear.bias)


def test_results_have_the_type_of_the_input() -> None:
    layer = Int8Linear(make_linear(dtype=torch.bfloat16))
    assert layer(inputs(2, 128).bfloat16()).dtype == torch.bfloat16


def test_every_linear_layer_is_replaced_and_gives_up_its_memory() -> None:
    model = nn.Sequential(make_linear(), nn.ReLU(), nn.Linear(192, 7), nn.Embedding(4, 8))
    assert quantize_int8(model) == 2
    assert isinstance(model[0], Int8Linear)
    assert model[0].weight.is_meta
    assert model[0].weight.shape == (192, 128)


def test_a_model_that_is_not_on_the_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="must be on a CPU"):
        quantize_int8(nn.Sequential(nn.Linear(128, 192, device="meta")))


@pytest.mark.parametrize("has_vnni", [True, False])
def test_a_cpu_that_is_slow_at_it_is_told_of(monkeypatch: pytest.MonkeyPatch, has_vnni: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx_vnni": has_vnni})
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quantize_int8(nn.Sequential(make_linear()))
    assert [warning.category for warning in seen] == ([] if has_vnni else [SlowWeightsWarning])
    assert all("draft_weights=" in str(warning.message) for warning in seen)
