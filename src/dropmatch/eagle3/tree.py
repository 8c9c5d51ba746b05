"""Which tokens a drafted tree holds: choices among scores, the same on every run. Pure tensor code.

Scores are sums of log-probabilities along a path. Ties go to the earlier candidate everywhere, which is what keeps a
tree whole: a child never scores above its parent and never comes before it. Source: arXiv 2406.16858, section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor


def best_tokens(log_probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each row, best first, equal ones by lower id.

    log_probs: [..., V]. Returns values and ids [..., k].
    """
    values, ids = log_probs.topk(k, dim=-1)
    last = values[..., -1:]
    is_torn = (log_probs >= last).sum(-1) > k  # equals of the last one were left out, and topk chose among them freely
    if bool(is_torn.any()):
        ordered = log_probs[is_torn].sort(dim=-1, descending=True, stable=True)
        values[is_torn], ids[is_torn] = ordered.values[..., :k], ordered.indices[..., :k]
    ids, order = ids.sort(dim=-1)
    values = values.gather(-1, order)
    return first_best(values, k, ids)


def first_best(scores: Tensor, k: int, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k largest scores [..., M], best first and the earlier of equals first. Returns them with their indices, or
    with labels [..., M] in the indices' place."""
    ordered = scores.sort(dim=-1, descending=True, stable=True)
    index = ordered.indices[..., :k]
    return ordered.values[..., :k], index if labels is None else labels.gather(-1, index)


def keep_best(scores: Tensor, parents: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best candidates of a pool as nodes of a tree.

    scores: [B, M], -inf where there is no candidate; parents: [B, M] index of the parent in the pool, -1 for the root.
    Returns chosen [B, n] pool indices in the pool's order, the nodes' parents [B, n] with the root as node 0 and the
    first chosen as node 1, and is_real [B, n], False for padding (placed last, below the root).
    Scores [-1, -2, -1.5] with parents [-1, -1, 0] and count 2 -> chosen [0, 2], parents [0, 1].
    """
    B, M = scores.shape
    values, index = first_best(scores, min(count, M))
    index = index.masked_fill(values == float("-inf"), M).sort(dim=-1).values
    is_real = index < M
    width = max(int(is_real.sum(-1).max()), 1)
    index, is_real = index[:, :width], is_real[:, :width]
    number = torch.zeros(B, M + 1, dtype=torch.int64, device=scores.device)
    node = torch.arange(1, width + 1, device=scores.device).expand(B, width)
    number.scatter_(1, index, node * is_real)
    chosen = index.clamp(max=M - 1)
    above = parents.gather(1, chosen)
    node_parents = torch.where((above >= 0) & is_real, number.gather(1, above.clamp(min=0)), 0)
    assert bool(((node_parents > 0) | (above < 0) | ~is_real).all()), "a kept node lost its parent"
    return chosen, node_parents, is_real
