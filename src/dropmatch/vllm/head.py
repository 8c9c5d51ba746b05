"""The target's LM head as vLLM computes it: vocabulary-parallel, gathered, trimmed, scaled and soft-capped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dropmatch.core.head_rows import HeadRows
from dropmatch.errors import ConfigError

_PROBED = 4
_PROBED_ROWS = 4096  # of the weight at once
_ROUNDING = 0.02  # of the largest logit: bfloat16 keeps eight bits


class VLLMHead:
    """hidden [..., d] -> logits [..., V] through the model's own `compute_logits`.

    With tensor parallelism this is a collective call, so all ranks must ask for the same rows; they do, since they
    decide alike. weight: [V, d] where one rank holds the whole unquantised matrix, else None.
    """

    def __init__(self, model: Any, *, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._model = model
        layer = _find(model, "logits_processor")
        head = _find(model, "lm_head")
        self.softcap = getattr(layer, "soft_cap", None)
        self.scale = float(getattr(layer, "scale", 1.0))
        self.is_linear = self.softcap is None and layer is not None
        probe = torch.randn(
            _PROBED, hidden_size, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(0)
        )
        logits = model.compute_logits(probe)
        if logits is None:
            raise ConfigError(
                "This rank sees no logits: vLLM gathers them on the first rank only here. The plugin needs a platform "
                "that gives them to all ranks."
            )
        self.vocab_size = int(logits.shape[-1])
        self.bias = getattr(head, "bias", None)
        self.weight: Tensor | None = None
        weight = getattr(head, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point():
            self.weight = weight if self._explains(logits, probe, weight) else None

    def _explains(self, logits: Tensor, probe: Tensor, weight: Tensor) -> bool:
        """Whether the weight's rows give the logits that the model itself computes."""
        if weight.shape[0] < self.vocab_size or weight.shape[1] != probe.shape[1]:
            return False  # sharded or quantised
        if self.softcap is not None and self.scale != 1.0:
            return False  # vLLM scales behind the cap, and HeadRows in front of it
        if weight.dtype.itemsize < 2:
            return False  # float8, whose scales lie elsewhere
        rows = HeadRows(weight, self.bias, self.scale, self.softcap)
        hidden, logits = probe.to(weight.dtype)[None], logits.float()  # a head may be kept in float32
        worst = torch.zeros((), device=probe.device)
        for tokens in torch.split(torch.arange(self.vocab_size, device=probe.device), _PROBED_ROWS):
            mine = rows.project(hidden, tokens[None])[0].float()  # [_PROBED, T]
            worst = torch.maximum(worst, (mine - logits[:, tokens]).abs().max())
        return bool(worst <= _ROUNDING * logits.abs().max())

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._model.compute_logits(hidden.reshape(-1, hidden.shape[-1]))
        return logits.view(*hidden.shape[:-1], -1)


def _find(model: Any, name: str) -> Any:
    """A layer of the language model, which multimodal models keep one level down."""
    for owner in (model, getattr(model, "language_model", None)):
        found = getattr(owner, name, None)
        if found is not None:
            return found
    return None
