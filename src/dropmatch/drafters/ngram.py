"""Prompt n-grams: what followed the last few tokens when they stood in this row before (prompt lookup decoding).

Needs no model and costs nothing to speak of; pays where the output repeats the prompt or itself. It has no
distribution: the drafted tokens count as point masses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dropmatch.core.interfaces import DraftTree, ModelOutput, Verdict
from dropmatch.core.sequence import Row
from dropmatch.errors import ConfigError


class NgramDrafter:
    """Chains copied from the row itself. max_ngram..min_ngram: lengths of the suffix to look for, longest first; the
    latest earlier occurrence wins."""

    name = "ngram"

    def __init__(self, device: torch.device, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(f"min_ngram={min_ngram}, max_ngram={max_ngram}: give 1 <= min_ngram <= max_ngram.")
        self._device = device
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._index: list[_Index] = []

    def add_rows(self, rows: Sequence[Row], output: ModelOutput) -> None:
        self._index += [_Index(self._sizes) for _ in rows]

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        drafts = [
            index.continuation(row.ids, limit) for row, index, limit in zip(rows, self._index, max_new, strict=True)
        ]
        width = 1 + max(len(draft) for draft in drafts)
        tokens = [
            [row.ids[-1], *draft, *[row.ids[-1]] * (width - 1 - len(draft))]
            for row, draft in zip(rows, drafts, strict=True)
        ]
        num_nodes = torch.tensor([1 + len(draft) for draft in drafts], device=self._device)
        return DraftTree.chain(torch.tensor(tokens, device=self._device), num_nodes)

    def commit(self, verdict: Verdict, output: ModelOutput) -> None:
        """Nothing to do: the row itself is the state."""

    def filter(self, keep: Sequence[int]) -> None:
        self._index = [self._index[b] for b in keep]


class _Index:
    """Where each n-gram of a growing list was last followed by something."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._seen = 0
        self._follows: dict[tuple[int, ...], int] = {}

    def continuation(self, ids: list[int], limit: int) -> list[int]:
        """Up to limit tokens that followed the longest known suffix of ids."""
        for end in range(max(self._seen, 1), len(ids)):  # the n-gram before `end` is followed by ids[end]
            for size in self._sizes:
                if size <= end:
                    self._follows[tuple(ids[end - size : end])] = end
        self._seen = len(ids)
        if limit <= 0:
            return []
        for size in self._sizes:
            at = self._follows.get(tuple(ids[-size:])) if size < len(ids) else None
            if at is not None:
                return ids[at : at + limit]
        return []
