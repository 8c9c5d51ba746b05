"""Attention masks and positions for new tokens behind a ragged cache. Pure tensor code; knows no model.

Row b's keys are its cached tokens in columns 0 to lengths[b] - 1 and the new nodes in the N columns behind them.
Columns further right belong to longer rows and are hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def node_positions(lengths: Sequence[int], depth: Tensor | None, num_new: int, device: torch.device) -> Tensor:
    """Position of each new node: cached length plus depth. depth: [B, N], None for a chain. Returns [B, N] int64."""
    B = len(lengths)
    if depth is None:
        depth = torch.arange(num_new, device=device).expand(B, num_new)
    if min(lengths) == max(lengths):
        return depth + lengths[0]
    return depth + torch.tensor(lengths, device=device)[:, None]


def visible_keys(
    lengths: Sequence[int], ancestors: Tensor | None, num_new: int, window: int | None, device: torch.device
) -> Tensor:
    """Which keys each new node attends to: all cached ones of its row and its ancestors, itself included.

    ancestors: [B, N, N] bool, None for a chain; window: keys at position <= own position - window are hidden, with
    positions by depth, not by column. Returns bool [B or 1, 1, N, T], T = max(lengths) + N; never an empty row.
    """
    longest = max(lengths)
    total = longest + num_new
    if window is not None and window >= total:
        window = None
    is_even = min(lengths) == longest
    if ancestors is None and is_even:
        mask = torch.ones(num_new, total, dtype=torch.bool, device=device).tril(longest)
        if window is not None:
            mask = mask.triu(longest - window + 1)
        return mask[None, None]
    if ancestors is None:
        lower = torch.ones(num_new, num_new, dtype=torch.bool, device=device).tril()
        ancestors = lower.expand(len(lengths), num_new, num_new)
    if is_even and window is None:
        mask = ancestors.new_ones(len(lengths), num_new, total)
        mask[:, :, longest:] = ancestors
        return mask[:, None]
    return _ragged(torch.tensor(lengths, device=device), ancestors, total, window)[:, None]


def _ragged(lengths: Tensor, ancestors: Tensor, total: int, window: int | None) -> Tensor:
    """The general case of `visible_keys`. lengths: [B]. Returns [B, N, T]."""
    B, N, _ = ancestors.shape
    column = torch.arange(total, device=lengths.device)
    node = column - lengths[:, None]  # [B, T]; the new node in this column, negative where a cached token is
    is_node = (node >= 0) & (node < N)
    node = node.clamp(0, N - 1)
    among_new = ancestors.gather(2, node[:, None, :].expand(B, N, total)) & is_node[:, None]
    mask = among_new | (column < lengths[:, None])[:, None]
    if window is not None:
        depth = ancestors.sum(-1) - 1  # [B, N]
        key_position = torch.where(is_node, lengths[:, None] + depth.gather(1, node), column)
        query_position = lengths[:, None] + depth
        mask &= key_position[:, None, :] > query_position[:, :, None] - window
    return mask


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that eager attention adds to its scores: 0 where visible, the dtype's lowest number elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)
