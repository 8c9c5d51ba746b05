"""Jensen-Shannon divergence between distributions over the vocabulary. Nats, float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dropmatch.errors import ShapeError

_LOG_ZERO = -1e4  # stands for log 0: finite, so that 0 * log 0 is 0, and exp of it is exactly 0 in float32
_TINY = 1e-38
LN2 = math.log(2.0)


def log_probs(logits: Tensor) -> Tensor:
    """Log-softmax over the last dimension in float32, with -inf replaced by a finite stand-in for log 0."""
    return torch.log_softmax(logits.float(), dim=-1).clamp_(min=_LOG_ZERO)


def log_probs_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """`log_probs` of a few tokens alone. logits: [M, V]; tokens: [M, T]. Returns [M, T]."""
    logits = logits.float()
    return (logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)).clamp_(min=_LOG_ZERO)


def js_from_log_probs(log_p: Tensor, log_q: Tensor, q: Tensor | None = None) -> Tensor:
    """Jensen-Shannon divergence in nats, between 0 and ln 2.

    log_p, log_q: [..., V] from `log_probs`; q: exp(log_q) where the caller has it. Returns [...]. Eq. 6.
    Raises ShapeError if the last dimensions differ.
    """
    if log_p.shape[-1] != log_q.shape[-1]:
        raise ShapeError(f"The vocabularies differ: {log_p.shape[-1]} and {log_q.shape[-1]} entries. Pad the smaller.")
    p = log_p.exp()
    q = log_q.exp() if q is None else q
    log_m = (p + q).mul_(0.5).clamp_(min=_TINY).log_()
    # summed element by element, since the difference of two entropies loses the small divergences to rounding
    terms = (log_p - log_m).mul_(p).add_((log_q - log_m).mul_(q))
    return terms.sum(-1).mul_(0.5).clamp_(min=0.0, max=LN2)


def js_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats, between 0 and ln 2.

    p, q: [..., V] probabilities, any float dtype; computed in float32. Returns [...]. Zeros are allowed (0 log 0 = 0).
    Raises ShapeError if the last dimensions differ. Eq. 6.
    """
    return js_from_log_probs(p.float().log().clamp(min=_LOG_ZERO), q.float().log().clamp(min=_LOG_ZERO))


def js_point_mass(log_q: Tensor) -> Tensor:
    """Divergence between a distribution and the point mass on one token, from the token's log-probability alone.

    log_q: [...] log-probability of the token. Returns [...] in nats. The point mass is the distribution of a drafter
    that has none, such as an n-gram match.
    """
    log_q = log_q.float().clamp(min=_LOG_ZERO)
    q = log_q.exp()
    log_m = torch.log((1.0 + q) * 0.5)
    return (0.5 * (-log_m + q * (log_q - log_m) + (1.0 - q) * LN2)).clamp(min=0.0, max=LN2)
