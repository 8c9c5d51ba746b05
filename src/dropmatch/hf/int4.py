"""Weight-only int4 for draft models on CPUs: a draft token costs the bytes that are read for it.

Weights are rounded to 4 bits in groups of 32 with a scale and an offset each (no data set, no calibration) and
multiplied by our own kernel (`hf.native`) or, where that cannot be compiled, by torch's. Whatever a drafter proposes,
the acceptance rule guards the output: only tau can change. Wide inputs (prompts, large batches) keep the original
weights, since arithmetic, not reading, sets their time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmatch.errors import UnsupportedModelError
from dropmatch.hf import native
from dropmatch.hf.linears import replace_linears
from dropmatch.hf.native import GROUP_SIZE

_LEVELS = 16
_MIDDLE = _LEVELS // 2
_NARROW = native.MOST_INT4_ROWS  # above, a bfloat16 product is the faster one
_MULTIPLE = 64  # output features that torch's blocks need


class Int4Linear(nn.Module):
    """A linear layer that reads 4-bit weights for up to 8 rows of input and its original ones for more.

    linear: bfloat16, on the CPU, in_features a multiple of 32, out_features of 64 (see `fits`).
    is_native: multiplied by our own kernel, which rounds inputs to 8 bits. weight, bias: the original ones.
    """

    packed: Tensor
    scales: Tensor | None

    def __init__(self, linear: nn.Linear, *, is_native: bool | None = None) -> None:
        """is_native: None takes our own kernel where there is one."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.is_native = native.library() is not None if is_native is None else is_native
        self.is_wide_native = native.fits_native(linear)  # for wide inputs: not where oneDNN is faster
        codes, scales, middles = round_int4(linear.weight.detach())
        if self.is_native:
            self.register_buffer("packed", native.pack_int4(codes, scales, middles), persistent=False)
            self.scales = None
            return
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        self.register_buffer("packed", packed, persistent=False)
        both = torch.stack([scales, middles], dim=-1).transpose(0, 1).contiguous()  # [in / 32, out, 2]
        self.register_buffer("scales", both, persistent=False)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is a plain linear layer that the kernel can take."""
        return (
            type(module) is nn.Linear
            and native.is_readable(module.weight)
            and (module.bias is None or native.is_readable(module.bias))
            and module.in_features % GROUP_SIZE == 0
            and module.out_features % _MULTIPLE == 0
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] bfloat16. Returns [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        product: Tensor
        if len(rows) > _NARROW or not native.is_plain(rows):  # torch says what is wrong with another dtype
            product = (native.linear if self.is_wide_native else F.linear)(rows, self.weight, self.bias)
        elif self.is_native:
            product = native.multiply_int4(rows, self.packed, self.bias, self.out_features)
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP_SIZE, self.scales)
            product = product if self.bias is None else product + self.bias
        return product.view(*x.shape[:-1], self.out_features)


def round_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round to 4 bits by groups of 32 along the input. weight: [out, in] bfloat16.

    Returns codes [out, in] uint8 of 0 to 15; scales and middles (the value of code 8) [out, in / 32] bfloat16. A
    weight is (code - 8) * scale + middle.
    """
    out, width = weight.shape
    groups = weight.float().view(out, width // GROUP_SIZE, GROUP_SIZE)
    low, high = groups.amin(-1), groups.amax(-1)
    # rounded to what the kernel reads before the codes are chosen, so that the codes fit the scale in use
    scales = ((high - low) / (_LEVELS - 1)).clamp(min=1e-8).bfloat16()
    middles = (low + scales.float() * _MIDDLE).bfloat16()
    codes = groups.sub(middles.float()[..., None]).div_(scales.float()[..., None]).round_().add_(_MIDDLE)
    return codes.clamp_(0, _LEVELS - 1).to(torch.uint8).view(out, width), scales, middles


def quantize_int4(model: nn.Module) -> int:
    """Replace a model's linear layers, its LM head included, by Int4Linear in place. Returns how many.

    Raises UnsupportedModelError if no layer fits: the model must be bfloat16 and on the CPU.
    """
    count = replace_linears(model, Int4Linear.fits, Int4Linear)
    if not count:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear layer for int4. The draft model must be bfloat16 on a CPU, with "
            f"input features in multiples of {GROUP_SIZE}. Load it so, or leave its weights as they are."
        )
    return count
