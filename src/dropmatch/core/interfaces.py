"""The seams between drafter, target, head and engine. Data and protocols only; no logic beyond shapes.

Letters: B rows, N nodes (root included), K dropout paths, d hidden, V vocabulary, P path length, S prompt length.

A draft is always a tree of N nodes per row. Node 0 is the root: the row's last token, whose keys and values are not
cached yet. Parents precede children. Everything predicted (target logits, heads, the drafter's distribution) is
stored at the PARENT node, since siblings share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dropmatch.ops.tree import ancestor_matrix

if TYPE_CHECKING:
    from dropmatch.core.sequence import Row


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A batch of draft trees, one per row.

    tokens: [B, N] int64; node 0 is the row's last token.
    parents: [B, N] int64; -1 at the root, otherwise below the node's own index.
    valid: [B, N] bool; False pads rows with shorter drafts. The root is always valid.
    ancestors: [B, N, N] bool; ancestors[b, n, m] says that m is n or one of its ancestors.
    child_logits: [B, N, V] the drafter's distribution over each node's children (processed, before temperature), or
        None where the drafter has none (a point mass on each drafted token).
    is_sampled: [B] bool; the row's children were sampled from child_logits rather than chosen by rank.
    is_chain: every node n has the parent n - 1.
    draft_hidden: [B, N, D] the drafter's own final hidden states behind each node, where a rule asked for them
        (`Need.DRAFT_HIDDEN`) and the drafter has any; else None.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    ancestors: Tensor
    child_logits: Tensor | None
    is_sampled: Tensor
    is_chain: bool
    draft_hidden: Tensor | None = None

    @staticmethod
    def chain(
        tokens: Tensor,
        num_nodes: Tensor,
        child_logits: Tensor | None = None,
        is_sampled: Tensor | None = None,
        draft_hidden: Tensor | None = None,
    ) -> DraftTree:
        """A chain per row. tokens: [B, N] with the root first; num_nodes: [B] nodes of each row, root included."""
        B, N = tokens.shape
        device = tokens.device
        index = torch.arange(N, device=device)
        lower = torch.ones(N, N, dtype=torch.bool, device=device).tril()
        return DraftTree(
            tokens=tokens,
            parents=(index - 1).expand(B, N),
            valid=index < num_nodes.to(device)[:, None],
            ancestors=lower.expand(B, N, N),
            child_logits=child_logits,
            is_sampled=torch.zeros(B, dtype=torch.bool, device=device) if is_sampled is None else is_sampled,
            is_chain=True,
            draft_hidden=draft_hidden,
        )

    @staticmethod
    def tree(
        tokens: Tensor,
        parents: Tensor,
        valid: Tensor | None = None,
        child_logits: Tensor | None = None,
        is_sampled: Tensor | None = None,
        draft_hidden: Tensor | None = None,
    ) -> DraftTree:
        """Any tree. tokens, parents: [B, N]; raises ShapeError if a parent does not precede its child."""
        B, N = tokens.shape
        device = tokens.device
        return DraftTree(
            tokens=tokens,
            parents=parents,
            valid=torch.ones(B, N, dtype=torch.bool, device=device) if valid is None else valid,
            ancestors=ancestor_matrix(parents),
            child_logits=child_logits,
            is_sampled=torch.zeros(B, dtype=torch.bool, device=device) if is_sampled is None else is_sampled,
            is_chain=False,
            draft_hidden=draft_hidden,
        )

    def children(self, node: Tensor) -> Tensor:
        """[B, N] bool, the drafted children of `node` [B]."""
        return self.valid & (self.parents == node[:, None])

    @property
    def depth(self) -> Tensor:
        """[B, N] distance from the root."""
        return self.ancestors.sum(-1) - 1


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What one forward gives. hidden: [B, N, d] after the final norm (the LM head's input).
    aux: [B, N, A] hidden states that the drafter asked for (EAGLE-3 taps), or None."""

    hidden: Tensor
    aux: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round kept. path: [B, P] nodes from the root to the chosen node, padded by repeating the last;
    num_accepted: [B] drafted tokens kept (the path without the root); next_token: [B] the token after them;
    reason: [B, N] int8 codes of `Reason` for each drafted node (0: rejected). accepted: num_accepted where the host
    has read it already, so that nobody has to wait for the device again."""

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    reason: Tensor
    accepted: list[int] | None = None

    @property
    def num_kept(self) -> list[int]:
        """Nodes of each row's path, the root included."""
        accepted = self.num_accepted.tolist() if self.accepted is None else self.accepted
        return [count + 1 for count in accepted]


class LMHead(Protocol):
    """hidden [..., d] -> logits [..., V], with everything the model does there (bias, scale, soft-cap)."""

    is_linear: bool  # False under logit soft-capping: the mean of logits is then not the logits of the mean
    vocab_size: int

    def __call__(self, hidden: Tensor) -> Tensor: ...


class CachedModel(Protocol):
    """A decoder with its own key-value cache over a ragged batch of rows. Used as target and as draft model."""

    head: LMHead
    vocab_size: int
    device: torch.device
    lengths: list[int]  # cached tokens of each row

    def add_rows(self, prompts: Sequence[Sequence[int]]) -> ModelOutput:
        """Append rows and cache their tokens (a prompt may be empty). hidden: [R, S, d], right-padded."""
        ...

    def forward(self, tokens: Tensor, ancestors: Tensor | None = None) -> ModelOutput:
        """Run N new tokens per row and write their keys and values behind each row's cached ones, without counting
        them as cached. tokens: [B, N]; ancestors: [B, N, N] attention among the new tokens, None for a chain."""
        ...

    def commit(self, num_kept: Sequence[int], path: Tensor | None = None) -> None:
        """Count tokens of the last forward as cached: the first num_kept[b], or those at path[b, :num_kept[b]]."""
        ...

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget cached tokens behind lengths[b]."""
        ...

    def filter(self, keep: Sequence[int]) -> None:
        """Keep only the rows with these indices, in this order."""
        ...


class Drafter(Protocol):
    """Proposes a draft tree for each row."""

    name: str

    def add_rows(self, rows: Sequence[Row], output: ModelOutput) -> None:
        """New rows, appended. output: what the target's prefill gave for all but the last prompt token of each."""
        ...

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        """A tree with at most max_new[b] drafted tokens on any path of row b."""
        ...

    def commit(self, verdict: Verdict, output: ModelOutput) -> None:
        """Follow the verdict. output: the target's forward over the last proposed tree."""
        ...

    def filter(self, keep: Sequence[int]) -> None:
        """Keep only the rows with these indices, in this order."""
        ...
