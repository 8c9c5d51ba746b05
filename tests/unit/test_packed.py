"""Packed linear layers give what the originals give, and keep what others read of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from dropmatch.hf.head import HFHead
from dropmatch.hf.model import HFModel
from dropmatch.hf.packed import PackedLinear, can_pack, pack_linears

needs_packing = pytest.mark.skipif(
    not (torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN has no bfloat16 on this CPU",
)
ROUNDING = 0.01  # relative: bfloat16 sums in another order


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 64), (70, 64)])
def test_a_packed_layer_gives_the_product_of_the_original(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, bias=bias).bfloat16().requires_grad_(False)
    x = torch.randn(shape).bfloat16()
    expected, got = linear(x).float(), PackedLinear(linear, keep_weight=False)(x).float()
    assert got.shape == expected.shape
    assert (got - expected).norm() <= ROUNDING * expected.norm()


@pytest.mark.skipif(not torch._C._has_mkldnn, reason="needs a torch with oneDNN")
@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_only_bfloat16_layers_on_a_cpu_that_has_it_are_packed(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool
) -> None:
    """With AVX2 alone the packing itself raises."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bfloat16)
    assert can_pack(nn.Linear(8, 8).bfloat16()) == has_bfloat16
    assert not can_pack(nn.Linear(8, 8))
    assert not can_pack(nn.Linear(8, 8, device="meta").bfloat16())
    assert not can_pack(nn.Embedding(8, 8).bfloat16())


@needs_packing
def test_a_packed_model_decodes_like_the_original_and_its_head_stays_readable() -> None:
    model = tiny.target().bfloat16()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        expected = model(ids).logits.float()
    head = model.get_output_embeddings().weight.clone()
    assert pack_linears(model) == 2 * 7 + 1
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    with torch.inference_mode():
        got = model(ids).logits.float()
    assert (got - expected).norm() <= ROUNDING * expected.norm()
    weight = HFHead(model).weight
    assert weight is not None
    assert torch.equal(weight, head)
    assert HFModel(model).vocab_size == 320  # and the load probe passes


@needs_packing
def test_weights_that_nobody_reads_by_row_are_not_held_twice() -> None:
    model = tiny.target().bfloat16()
    pack_linears(model)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.weight.is_meta
    assert layer.weight.shape == (48, 32)
    assert layer.weight.dtype == torch.bfloat16
