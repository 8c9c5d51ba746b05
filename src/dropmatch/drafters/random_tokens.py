"""Drafts of uniformly random tokens, which no target should keep: a check on rules, not a way to go faster."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dropmatch.core.interfaces import DraftTree, ModelOutput, Verdict
from dropmatch.core.sequence import Row
from dropmatch.ops.random import Purpose, gumbel, random_bits


class RandomDrafter:
    """Chains of random tokens. vocab_size: the target's.

    with_distribution gives Eq. 6 a distribution to compare: a softmax over Gumbel noise times `sharpness`, the drafted
    token being the noise's argmax. 0 is uniform, 4 nearly sure. Without it a draft is a point mass.
    """

    name = "random"

    def __init__(
        self, device: torch.device, vocab_size: int, *, with_distribution: bool = True, sharpness: float = 4.0
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._with_distribution = with_distribution
        self._sharpness = sharpness

    def add_rows(self, rows: Sequence[Row], output: ModelOutput) -> None:
        """No state."""

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        B, L = len(rows), max(max_new)
        keys = torch.tensor(
            [[row.seed, row.stream, len(row.ids) + i] for row in rows for i in range(L)], device=self._device
        )
        logits = None
        if self._with_distribution:
            noise = gumbel(keys, self._vocab_size, Purpose.DRAFT)[:, 0]
            drafted = noise.argmax(-1).view(B, L)
            logits = torch.nn.functional.pad(noise.view(B, L, -1) * self._sharpness, (0, 0, 0, 1))
        else:
            drafted = (random_bits(keys, 1, 1, Purpose.DRAFT)[:, 0, 0] % self._vocab_size).view(B, L)
        roots = torch.tensor([[row.ids[-1]] for row in rows], device=self._device)
        num_nodes = torch.tensor(max_new, device=self._device) + 1
        return DraftTree.chain(torch.cat([roots, drafted], dim=1), num_nodes, logits)

    def commit(self, verdict: Verdict, output: ModelOutput) -> None:
        """No state."""

    def filter(self, keep: Sequence[int]) -> None:
        """No state."""
