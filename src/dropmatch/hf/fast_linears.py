"""A model's bfloat16 linear layers on a CPU, replaced by the fastest that this machine has."""

from __future__ import annotations

from typing import Any

from torch import nn

from dropmatch.hf.linears import replace_linears
from dropmatch.hf.native import NativeLinear, fits_native
from dropmatch.hf.packed import PackedLinear, can_pack, pack_linears


def speed_up_linears(model: Any) -> int:
    """Replace linear layers in place: by our own kernels where they fit, else by weights packed for oneDNN. Returns how
    many. The model can then no longer be trained or saved: only do this to a model that nobody else holds."""
    return replace_linears(model, fits_native, NativeLinear) + pack_linears(model)


def made_like(module: nn.Module, linear: nn.Linear) -> nn.Module:
    """A layer of the kind of `module`, with the parameters of `linear`; `linear` itself where it cannot be."""
    if isinstance(module, NativeLinear) and fits_native(linear):
        return NativeLinear(linear)
    if isinstance(module, PackedLinear) and can_pack(linear):
        return PackedLinear(linear, keep_weight=True)
    return linear
