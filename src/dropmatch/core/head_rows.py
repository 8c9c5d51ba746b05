"""Single rows of a linear LM head: what the closed forms and the shortlist read instead of the whole matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dropmatch.core.interfaces import LMHead
from dropmatch.errors import ConfigError


class LinearHead(LMHead, Protocol):
    """An LM head whose weight rows can be read: logits = cap(scale * (weight @ hidden + bias)).

    weight: [V, d], or None where it is not a plain matrix in memory. bias [V] or None, scale (1) and softcap (None) may
    be missing; softcap is the c of c * tanh(x / c)."""

    weight: Tensor | None


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The parts of a linear head. weight: [V, d]; bias: [V] or None; softcap: None where the head has none."""

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None

    def project(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits of a few tokens, as the head itself computes them. hidden: [M, K, d]; tokens: [M, T].
        Returns [M, K, T] in the head's dtype."""
        rows = self._rows(tokens)  # [M, T, d]
        hidden = hidden.to(rows.device)
        if rows.device.type == "cpu":  # where a batched product copies the rows first, into another order
            logits = torch.stack([F.linear(h, w) for h, w in zip(hidden, rows, strict=True)])
        else:
            logits = hidden @ rows.transpose(-1, -2)
        if self.bias is not None:
            logits = logits + self.bias[tokens.to(self.bias.device)][:, None]
        logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.to(tokens.device)

    @classmethod
    def of(cls, head: LMHead) -> HeadRows:
        """Raises ConfigError if the head does not show its rows, saying why and what to use instead."""
        weight = getattr(head, "weight", None)
        softcap = getattr(head, "softcap", None)
        if not isinstance(weight, Tensor):
            why = "its LM head gives no weight matrix (quantised, offloaded, hooked or split over devices)"
        elif not head.is_linear and softcap is None:
            why = "its LM head is not linear and names no soft-cap"
        else:
            bias = getattr(head, "bias", None)
            return cls(weight, bias if isinstance(bias, Tensor) else None, float(getattr(head, "scale", 1.0)), softcap)
        raise ConfigError(
            f"The closed-form rules, p_drop='auto-expected' and the shortlist need rows of the target's LM head, but "
            f"{why}. Use the sampled rules, such as 'dropmatch', with heads='full' and p_drop='auto' or a number, or "
            "load the target in bfloat16 or float32."
        )

    def _rows(self, tokens: Tensor) -> Tensor:
        """tokens: [M, T]. Returns [M, T, d]. On a CPU index_select does in half the time what indexing does."""
        flat = tokens.to(self.weight.device).flatten()
        return self.weight.index_select(0, flat).view(*tokens.shape, -1)

    def products(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """scale * h_j * w_vj. hidden: [M, d]; tokens: [M, T]. Returns [M, T, d] float32; summed over d, a score."""
        rows = self._rows(tokens).float()
        return (rows * (hidden.to(rows.device).float() * self.scale)[:, None]).to(tokens.device)

    def scores(self, products: Tensor, tokens: Tensor) -> Tensor:
        """What goes into the soft-cap. products: [M, T, d]; tokens: [M, T]. Returns [M, T]."""
        scores = products.sum(-1)
        return scores if self.bias is None else scores + self.scale * self.bias[tokens].float()

    def slope(self, products: Tensor, tokens: Tensor) -> Tensor:
        """Derivative of the logit by the score: below 1 only under a soft-cap. Returns [M, T]."""
        if self.softcap is None:
            return torch.ones(tokens.shape, dtype=products.dtype, device=tokens.device)
        return 1.0 - torch.tanh(self.scores(products, tokens) / self.softcap).square()
