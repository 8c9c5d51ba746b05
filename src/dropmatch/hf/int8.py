"""8-bit draft models on CPUs whose int8 products (VNNI) outrun their float ones, for batches and long inputs.

Weights are rounded once per output feature, inputs at each call per row; products are summed exactly in 32 bits. No
data set, no calibration. Whatever a drafter proposes, the acceptance rule guards the output: only tau can change.
"""

from __future__ import annotations

import platform
import warnings

import torch
from torch import Tensor, nn

from dropmatch.errors import UnsupportedModelError
from dropmatch.hf.linears import replace_linears

_LARGEST = 127


class SlowWeightsWarning(UserWarning):
    """Weights in a format that this CPU multiplies slower than the model's own."""


class Int8Linear(nn.Module):
    """A linear layer with weights and inputs in 8 bits.

    linear: floating point, on the CPU (see `fits`). weight: an empty stand-in that tells its shape and dtype.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = torch.empty_like(linear.weight, device="meta")
        codes, scales = _round(linear.weight.detach().float())
        self.register_buffer("codes", codes.t(), persistent=False)  # [in, out] as the product takes it
        self.register_buffer("scales", scales[:, 0], persistent=False)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is a plain linear layer in the CPU's memory."""
        return type(module) is nn.Linear and module.weight.is_floating_point() and module.weight.device.type == "cpu"

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features]. Returns [..., out_features] in x's dtype."""
        codes, scales = _round(x.reshape(-1, self.in_features).float())
        product = torch._int_mm(codes, self.codes).float().mul_(scales).mul_(self.scales)
        if self.bias is not None:
            product += self.bias
        return product.to(x.dtype).view(*x.shape[:-1], self.out_features)


def _round(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to 8 bits by its largest entry. matrix: [R, C] float32. Returns codes [R, C], scales [R, 1]."""
    scales = matrix.abs().amax(-1, keepdim=True).div_(_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return matrix.div(scales).round_().to(torch.int8), scales


def quantize_int8(model: nn.Module) -> int:
    """Replace a model's linear layers, its LM head included, by Int8Linear in place. Returns how many.

    Raises UnsupportedModelError if no layer fits: the model must be on the CPU. Warns (SlowWeightsWarning) on an x86
    CPU without VNNI.
    """
    count = replace_linears(model, Int8Linear.fits, Int8Linear)
    if not count:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no linear layer for int8. The draft model must be on a CPU. Load it so, or "
            "leave its weights as they are."
        )
    if not _has_fast_products():
        warnings.warn(
            "This CPU has no VNNI, and torch multiplies 8-bit weights many times slower than its own without it. "
            'Drafting will be slow: use draft_weights="own", or "int4" for single prompts.',
            SlowWeightsWarning,
            stacklevel=4,
        )
    return count


def _has_fast_products() -> bool:
    """Whether 8-bit products have instructions of their own here. Off x86 nobody measured them."""
    has_narrow = torch.cpu.get_capabilities().get("avx_vnni", False)
    return torch.cpu._is_vnni_supported() or has_narrow or platform.machine() not in {"x86_64", "AMD64"}
