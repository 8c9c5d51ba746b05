"""Linear layers on CPUs by kernels of our own, where torch's leave much of the machine idle.

A verification multiplies each weight with the 6 to 12 tokens of a draft. oneDNN has no good kernel for so few rows
without AMX: see `dropmatch bench linears`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmatch.hf.native.library import library, why_unavailable

__all__ = [
    "GROUP_SIZE",
    "MOST_INT4_ROWS",
    "NativeLinear",
    "fits_native",
    "library",
    "multiply",
    "multiply_int4",
    "pack_int4",
    "why_unavailable",
]

_LANES = 16
GROUP_SIZE = 32
MOST_INT4_ROWS = 8


class NativeLinear(nn.Module):
    """x [..., in] -> x W^T + b [..., out] in bfloat16, from the original's own parameters, summed in float32.

    A row's result does not depend on the rows beside it, bit for bit. Gradients and other dtypes go through torch.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight, self.bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b [..., out]. x: [..., in]; weight: [out, in], of a layer that `fits_native`; bias: [out]."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or _wants_gradient(x, weight):
        return F.linear(x, weight, bias)
    kernels = library()
    assert kernels is not None  # else nothing fits
    features, inputs = weight.shape
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], features)
    if rows := x.numel() // inputs:
        kernels.linear_bf16(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *(rows, features, inputs, weight.stride(0)),
            torch.get_num_threads(),
        )
    return out


def fits_native(module: nn.Module) -> bool:
    """Whether a module is a plain bfloat16 linear layer in the CPU's memory that the kernels can take, and win at: on a
    CPU with AMX, oneDNN is faster."""
    return (
        type(module) is nn.Linear
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and (module.bias is None or module.bias.dtype == torch.bfloat16)
        and module.in_features % _LANES == 0
        and module.in_features > 0
        and module.weight.stride(1) == 1
        and not torch.cpu._is_amx_tile_supported()
        and library() is not None
    )


def pack_int4(codes: Tensor, scales: Tensor, middles: Tensor) -> Tensor:
    """codes: [out, in] uint8 of 0 to 15; scales, middles (the value of code 8): [out, in / 32] bfloat16. out: a
    multiple of 16. Returns what multiply_int4 reads, a flat uint8 tensor of in * out * 5 / 8 bytes."""
    kernels = library()
    assert kernels is not None
    codes, scales, middles = codes.contiguous(), scales.contiguous(), middles.contiguous()
    packed = torch.empty(codes.numel() * 5 // 8, dtype=torch.uint8)
    kernels.pack_int4(codes.data_ptr(), scales.data_ptr(), middles.data_ptr(), packed.data_ptr(), *codes.shape)
    return packed


def multiply_int4(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """x: [rows, in] bfloat16, at most 8 rows. Returns x W^T + bias [rows, out_features] bfloat16. Inputs are rounded to
    8 bits in groups of 32."""
    kernels = library()
    assert kernels is not None
    x = x.contiguous()
    out = x.new_empty(len(x), out_features)
    if len(x):
        kernels.linear_int4(
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            *(len(x), out_features, x.shape[1]),
            torch.get_num_threads(),
        )
    return out


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
