"""The LM head of a transformers model as it is: module, bias, scale and soft-cap. Knows no decoder and no dropout.

The model's own output-embedding module is called, so tied, quantised and offloaded heads need no special case.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dropmatch.errors import UnsupportedModelError
from dropmatch.hf.native import NativeLinear
from dropmatch.hf.packed import PackedLinear

# Models whose `logits_scaling` multiplies. Everywhere else (Granite and its kin) it divides.
_SCALING_MULTIPLIES = frozenset({"hyperclovax"})


class HFHead:
    """hidden [..., d] -> logits [..., V], equal to what the model itself computes from the same hidden states.

    logits = softcap * tanh(scale * (weight @ hidden + bias) / softcap), without the tanh where softcap is None.
    weight: [V, d], the model's own memory, or None where the module is not a plain linear layer (quantised, offloaded,
    hooked); bias: [V] or None.
    is_linear: no soft-cap, so the logits of a mean of hidden states are the mean of their logits.
    """

    def __init__(self, model: Any) -> None:
        """Raises UnsupportedModelError if the model has no output embeddings."""
        module = model.get_output_embeddings()
        if module is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no LM head (get_output_embeddings() is None). "
                "Load the model with AutoModelForCausalLM."
            )
        config = model.config.get_text_config(decoder=True)
        self._module = module
        self.scale = _scale(config)
        self.softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self.is_linear = self.softcap is None
        # Detached: hidden states are inference tensors, which a graph may not save.
        is_plain = _is_plain_linear(module)
        self.weight: Tensor | None = module.weight.detach() if is_plain else None
        self.bias: Tensor | None = module.bias.detach() if is_plain and module.bias is not None else None
        self.vocab_size = int(getattr(module, "out_features", config.vocab_size))
        self._device = _device(module)

    @property
    def device(self) -> torch.device | None:
        """Where the weights lie; None when they are offloaded and the module finds its own device."""
        return self._device

    @torch.no_grad()
    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits, never with a graph. hidden: [..., d], moved to the head's device where needed. Returns [..., V]."""
        logits: Tensor = self._module(hidden if self._device is None else hidden.to(self._device))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def _scale(config: Any) -> float:
    """The factor between the LM head's product and the logits."""
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        scale *= config.logit_scale
    if getattr(config, "lm_head_multiplier", None) is not None:  # Falcon-H1
        scale *= config.lm_head_multiplier
    if getattr(config, "logits_scaling", None) is not None:
        scale *= config.logits_scaling if config.model_type in _SCALING_MULTIPLIES else 1 / config.logits_scaling
    return float(scale)


def _is_plain_linear(module: nn.Module) -> bool:
    """True for a linear layer whose weight is an ordinary float tensor in memory, and whose output no hook changes."""
    if (
        type(module) not in (nn.Linear, NativeLinear, PackedLinear)
        or module._forward_hooks
        or module._forward_pre_hooks
    ):
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and weight.is_floating_point() and not weight.is_meta


def _device(module: nn.Module) -> torch.device | None:
    tensor = next(chain(module.parameters(), module.buffers()), None)
    return None if tensor is None or tensor.is_meta else tensor.device
