"""Linear layers with weights packed once into the layout that oneDNN multiplies fastest, for bfloat16 on CPUs.

An ordinary linear layer hands oneDNN a plain row-major matrix at each call, and a forward over a few tokens is bound
by reading it. The packed copy replaces the original, so that memory does not grow, except for the LM head and matrices
tied to the embedding, which have to stay readable by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dropmatch.hf.linears import replace_linears


class PackedLinear(nn.Module):
    """x [..., in] -> x W^T + b [..., out], from packed weights.

    weight: the original matrix if it was kept, else an empty stand-in that tells shape and dtype."""

    packed: Tensor

    def __init__(self, linear: nn.Linear, *, keep_weight: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = linear.weight if keep_weight else torch.empty_like(linear.weight, device="meta")
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.register_buffer("packed", packed, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
        return product


def can_pack(module: nn.Module) -> bool:
    """Whether a module is a plain bfloat16 linear layer on a CPU that oneDNN serves."""
    return (
        type(module) is nn.Linear
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and torch._C._has_mkldnn
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # else the reordering raises, as with AVX2 alone
    )


def pack_linears(model: Any) -> int:
    """Replace a model's linear layers by PackedLinear in place, where they can be. Returns how many.

    The model can then no longer be trained or saved: only do this to a model that nobody else holds.
    """
    kept = _shared_weights(model)
    head = model.get_output_embeddings()
    if head is not None:  # rules may read single rows of it
        kept |= {id(parameter) for parameter in head.parameters()}
    return replace_linears(model, can_pack, lambda linear: PackedLinear(linear, keep_weight=id(linear.weight) in kept))


def _shared_weights(model: nn.Module) -> set[int]:
    """Ids of parameters that more than one module holds, such as a tied embedding."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared
