"""Weight-only int4 for draft models on CPUs: a draft token costs the bytes that are read for it.

Weights are rounded to 4 bits in groups of 32 with a scale and an offset each (no data set, no calibration) and
multiplied by torch's own CPU kernel. Whatever a drafter proposes, the acceptance rule guards the output: only tau can
change. Wide inputs (prompts, large batches) keep the original weights, since arithmetic, not reading, sets their time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmatch.errors import UnsupportedModelError
from dropmatch.hf.linears import replace_linears

GROUP_SIZE = 32
_LEVELS = 16
_NARROW = 8  # rows up to which the int4 kernel is faster than a bfloat16 product
_MULTIPLE = 64  # output features that the kernel's blocks need


class Int4Linear(nn.Module):
    """A linear layer that reads 4-bit weights for up to 8 rows of input and its original ones for more.

    linear: bfloat16, on the CPU, in_features a multiple of 32, out_features of 64 (see `fits`).
    """

    packed: Tensor
    scales_and_offsets: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        packed, scales_and_offsets = pack_int4(linear.weight.detach())
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales_and_offsets", scales_and_offsets, persistent=False)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is a plain linear layer that the kernel can take."""
        return (
            type(module) is nn.Linear
            and module.weight.dtype == torch.bfloat16
            and module.weight.device.type == "cpu"
            and module.in_features % GROUP_SIZE == 0
            and module.out_features % _MULTIPLE == 0
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] bfloat16. Returns [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        if len(rows) > _NARROW:
            return F.linear(x, self.weight, self.bias)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            rows, self.packed, GROUP_SIZE, self.scales_and_offsets
        )
        if self.bias is not None:
            product = product + self.bias
        return product.view(*x.shape[:-1], self.out_features)


def pack_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to 4 bits by groups of 32 along the input. weight: [out, in] bfloat16.

    Returns the packed weights [out, in / 2] uint8 and [in / 32, out, 2] bfloat16 (scale, value of code 8).
    """
    out, width = weight.shape
    groups = weight.float().view(out, width // GROUP_SIZE, GROUP_SIZE)
    low, high = groups.amin(-1), groups.amax(-1)
    # rounded to what the kernel reads before the codes are chosen, so that the codes fit the scale in use
    scale = ((high - low) / (_LEVELS - 1)).clamp(min=1e-8).bfloat16().float()
    middle = (low + scale * (_LEVELS // 2)).bfloat16().float()
    codes = (groups - middle[..., None]).div_(scale[..., None]).round_().add_(_LEVELS // 2).clamp_(0, _LEVELS - 1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).view(out, width), 1)
    return packed, torch.stack([scale, middle], dim=-1).transpose(0, 1).contiguous().bfloat16()


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
