"""Draft trees as tensors: ancestors, alive nodes, paths. Knows no model.

A[b, n, m] says that m is n or an ancestor of n. The one matrix serves three times: as attention mask among the new
nodes, as depth (row sums less one), and to find the alive nodes (those without a rejected ancestor).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dropmatch.errors import ShapeError


def ancestor_matrix(parents: Tensor) -> Tensor:
    """Ancestor-or-self matrix of a batch of trees.

    parents: [B, N] int64, -1 at node 0 and below the own index elsewhere. Returns [B, N, N] bool.
    Raises ShapeError if a parent does not precede its child. [-1, 0, 0, 1] -> node 3 sees nodes 0, 1, 3.
    """
    B, N = parents.shape
    index = torch.arange(N, device=parents.device)
    if bool(((parents >= index) | ((parents < 0) != (index == 0))).any()):
        raise ShapeError(
            "A draft tree needs parent -1 at node 0 and, elsewhere, a parent of lower index than the node."
        )
    ancestors = torch.eye(N, dtype=torch.bool, device=parents.device).repeat(B, 1, 1)
    rows = torch.arange(B, device=parents.device)
    for n in range(1, N):
        ancestors[:, n] |= ancestors[rows, parents[:, n]]
    return ancestors


def alive_nodes(accepted: Tensor, ancestors: Tensor) -> Tensor:
    """Nodes that are accepted together with all their ancestors.

    accepted: [B, N] bool (the root's own entry is ignored); ancestors: [B, N, N] bool. Returns [B, N] bool.
    For a chain this is cumprod of the accepted flags.
    """
    rejected = ~accepted
    rejected = torch.cat([torch.zeros_like(rejected[:, :1]), rejected[:, 1:]], dim=1)
    return ~(ancestors & rejected[:, None, :]).any(-1)


def chain_to(node: Tensor, num_nodes: int) -> Tensor:
    """`path_to` in chains of num_nodes nodes, without looking at values. node: [B] int64. Returns [B, num_nodes]."""
    return torch.arange(num_nodes, device=node.device).minimum(node[:, None])


def path_to(node: Tensor, ancestors: Tensor) -> Tensor:
    """Nodes from the root to a chosen node, padded by repeating the node itself.

    node: [B] int64; ancestors: [B, N, N] bool. Returns [B, P] with P the longest path of the batch.
    """
    B, N, _ = ancestors.shape
    on_path = ancestors[torch.arange(B, device=node.device), node]  # [B, N]
    index = torch.arange(N, device=node.device).expand(B, N)
    ordered = torch.where(on_path, index, N).sort(dim=-1).values  # parents precede children, so ascending is root-down
    longest = int(on_path.sum(-1).max())
    ordered = ordered[:, :longest]
    return torch.where(ordered == N, node[:, None], ordered)
