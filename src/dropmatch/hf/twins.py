"""Which rows of a batch hold the same tokens, so that a forward runs them once.

Rows of one prompt under several rules or seeds are twins until their texts part. Only numbers; no model, no cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import count

from torch import Tensor


def first_of_each(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Where each distinct key stands first, and for every key which of those it is: "aba" -> [0, 1], [0, 1, 0]."""
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    index = [number[key] for key in keys]
    return [index.index(i) for i in range(len(number))], index


class TwinRows:
    """One number per row: rows with equal numbers hold equal cached tokens. Rows that come to hold the same tokens by
    chance are not found."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._fresh = count()
        self._forward: list[int] = []  # the same for the tokens of the last forward, cached ones included

    def add(self, index: Sequence[int]) -> None:
        """New rows; rows with the same index are twins."""
        self._numbers += self._renumbered(index)

    def filter(self, keep: Sequence[int]) -> None:
        self._numbers = [self._numbers[row] for row in keep]
        self._forward = [self._forward[row] for row in keep] if self._forward else []

    def begin(self, tokens: Tensor, ancestors: Tensor | None) -> tuple[list[int], list[int]]:
        """Rows of a forward that must be run, and for every row which of them it equals. tokens: [B, N]."""
        if len(set(self._numbers)) == len(self._numbers):
            self._forward = self._numbers
            rows = list(range(len(self._numbers)))
            return rows, rows
        given = tokens.tolist()
        trees = [()] * len(given) if ancestors is None else [tuple(row) for row in ancestors.flatten(1).tolist()]
        keys = [(n, tuple(row), tree) for n, row, tree in zip(self._numbers, given, trees, strict=True)]
        first, self._forward = first_of_each(keys)
        return first, self._forward

    def commit(self, num_kept: Sequence[int], path: Tensor | None) -> None:
        """Follow a commit of the last forward: twins that keep different tokens part."""
        if len(set(self._forward)) == len(self._forward):
            self._numbers = self._renumbered(range(len(self._forward)))
        else:
            paths = [()] * len(num_kept) if path is None else [tuple(row) for row in path.tolist()]
            kept = [row[:number] for row, number in zip(paths, num_kept, strict=True)]
            self._numbers = self._renumbered(list(zip(self._forward, num_kept, kept, strict=True)))
        self._forward = []

    def truncate(self, lengths: Sequence[int]) -> None:
        """Follow a truncation: rows that were twins and end at one length stay so."""
        self._numbers = self._renumbered(list(zip(self._numbers, lengths, strict=True)))

    def _renumbered(self, keys: Sequence[Hashable]) -> list[int]:
        fresh = {key: next(self._fresh) for key in dict.fromkeys(keys)}
        return [fresh[key] for key in keys]
