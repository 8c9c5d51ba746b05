"""Kernels of our own for CPUs, where torch's leave much of the machine idle.

A verification multiplies each weight with the 6 to 12 tokens of a draft. oneDNN has no good kernel for so few rows
without AMX: see `dropmatch bench linears`.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmatch.hf.native.library import library, why_unavailable

__all__ = [
    "GROUP_SIZE",
    "MOST_INT4_ROWS",
    "NativeLinear",
    "fits_native",
    "is_plain",
    "is_readable",
    "library",
    "linear",
    "multiply",
    "multiply_int4",
    "pack_int4",
    "rms_norm",
    "rotate",
    "silu_product",
    "why_unavailable",
]

_LANES = 16
GROUP_SIZE = 32
MOST_INT4_ROWS = 8


class NativeLinear(nn.Module):
    """x [..., in] -> x W^T + b [..., out] in bfloat16, from the original's own parameters, summed in float32.

    A row's result does not depend on the rows beside it, bit for bit.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b by our own kernel if it can read all of them. Else, and for gradients, by torch, which says what is
    wrong: a layer may have been moved or cast since it was made. Shapes: as for `multiply`."""
    if (
        is_plain(x)
        and is_readable(weight)
        and (bias is None or is_readable(bias))
        and x.shape[-1:] == weight.shape[1:]
        and not _wants_gradient(x, weight, bias)
    ):
        return multiply(x, weight, bias)
    return F.linear(x, weight, bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None) -> Tensor:
    """x W^T + b [..., out], and added [..., out] to the rounded product. Looks at nothing: x [..., in] is plain, weight
    [out, in] and bias [out] are those of a layer that `fits_native`, added is plain and contiguous."""
    features, inputs = weight.shape
    x = x.contiguous()
    out = x.new_empty(*x.shape[:-1], features)
    if rows := x.numel() // inputs:
        _kernels().linear_bf16(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if added is None else added.data_ptr(),
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
        and is_readable(module.weight)
        and (module.bias is None or is_readable(module.bias))
        and module.in_features % _LANES == 0
        and module.in_features > 0
        and not torch.cpu._is_amx_tile_supported()
        and library() is not None
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether it is bfloat16 in the CPU's memory. A subclass, of a quantiser say, may only look like that."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu"


def is_readable(tensor: Tensor) -> bool:
    """Whether it is plain, and each row in one piece."""
    return is_plain(tensor) and tensor.stride(-1) == 1


def pack_int4(codes: Tensor, scales: Tensor, middles: Tensor) -> Tensor:
    """codes: [out, in] uint8 of 0 to 15; scales, middles (the value of code 8): [out, in / 32] bfloat16. out: a
    multiple of 16. Returns what multiply_int4 reads, a flat uint8 tensor of in * out * 5 / 8 bytes."""
    codes, scales, middles = codes.contiguous(), scales.contiguous(), middles.contiguous()
    packed = torch.empty(codes.numel() * 5 // 8, dtype=torch.uint8)
    _kernels().pack_int4(codes.data_ptr(), scales.data_ptr(), middles.data_ptr(), packed.data_ptr(), *codes.shape)
    return packed


def multiply_int4(
    x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int, added: Tensor | None = None
) -> Tensor:
    """x: [rows, in], plain, at most 8 rows. Returns x W^T + bias [rows, out_features] bfloat16, and added
    [rows, out_features] to it. Inputs are rounded to 8 bits in groups of 32."""
    x = x.contiguous()
    rows, inputs = x.shape
    out = x.new_empty(rows, out_features)
    if rows:
        _kernels().linear_int4(
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if added is None else added.data_ptr(),
            out.data_ptr(),
            *(rows, out_features, inputs),
            torch.get_num_threads(),
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon), rounded as Llama's norm rounds. x: [rows, width] bfloat16, contiguous;
    width: a multiple of 16."""
    out = torch.empty_like(x)
    _kernels().rms_norm(x.data_ptr(), weight.data_ptr(), epsilon, out.data_ptr(), *x.shape)
    return out


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, num_heads: int) -> None:
    """Rotary positions in place, for the first num_heads heads of x [rows, width] bfloat16, contiguous. cosines, sines:
    [rows, head size] bfloat16, contiguous; head size: a multiple of 32."""
    rows, size = cosines.shape
    _kernels().rotate(x.data_ptr(), cosines.data_ptr(), sines.data_ptr(), rows, num_heads, size, x.shape[1])


def silu_product(both: Tensor) -> Tensor:
    """silu(gate) * up [rows, width] of both = [gate, up] [rows, 2 width] bfloat16, contiguous; width: a multiple of
    16."""
    rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty(rows, width)
    _kernels().silu_product(both.data_ptr(), out.data_ptr(), rows, width)
    return out


def _kernels() -> ctypes.CDLL:
    kernels = library()
    assert kernels is not None  # else no layer was replaced
    return kernels


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
