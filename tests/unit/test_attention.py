"""Attention by key head against transformers' own, which copies keys for every query head."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dropmatch.hf.attention import GROUPED, grouped_attention, grouped_sdpa


class Layer(nn.Module):
    is_causal = True

    def __init__(self, num_key_value_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask_rows", [3, 1])
@pytest.mark.parametrize(("groups", "num_new"), [(4, 5), (4, 1), (1, 5)])
def test_masked_attention_equals_that_of_copied_keys(
    dtype: torch.dtype, mask_rows: int, groups: int, num_new: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2 * groups, num_new, 16, generator=generator).to(dtype)
    key, value = torch.randn(2, 3, 2, 11, 16, generator=generator).to(dtype)
    mask = torch.rand(mask_rows, 1, num_new, 11, generator=generator) < 0.5
    mask[..., 0] = True
    given = (Layer(groups), query, key, value, mask)
    expected, _ = sdpa_attention_forward(*given, scaling=0.3)
    got, _ = grouped_sdpa(*given, scaling=0.3)
    torch.testing.assert_close(got, expected)


def test_attention_without_a_mask_stays_causal() -> None:
    query = torch.randn(1, 4, 6, 16, generator=torch.Generator().manual_seed(0))
    key = query[:, :2].clone()
    expected, _ = sdpa_attention_forward(Layer(2), query, key, key, None)
    got, _ = grouped_sdpa(Layer(2), query, key, key, None)
    assert torch.equal(got, expected)
    assert torch.equal(got[:, 0, :2], key[:, :1, 0].expand(1, 2, 16))  # the first token sees itself alone


@pytest.mark.parametrize(
    ("implementation", "looks_up", "is_grouped"),
    [("sdpa", True, True), ("eager", True, False), ("sdpa", False, False)],
)
def test_a_models_config_is_as_before_after_the_block(implementation: str, looks_up: bool, is_grouped: bool) -> None:
    config = SimpleNamespace(_attn_implementation=implementation, _attn_implementation_internal=implementation)
    with suppress(KeyError), grouped_attention(SimpleNamespace(config=config, _supports_attention_backend=looks_up)):
        assert config._attn_implementation_internal == (GROUPED if is_grouped else implementation)
        raise KeyError
    assert config._attn_implementation_internal == implementation
