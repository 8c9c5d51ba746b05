"""A target without a network: its hidden state is a seeded table, looked up by a hash of the whole prefix.

Since the state depends on every token before it, a wrong cache, path or position changes the logits at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropmatch.core.interfaces import ModelOutput

_NUM_STATES = 4099


class TableHead:
    """A linear head hidden @ weight.T."""

    is_linear = True

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.vocab_size = weight.shape[0]
        self.rows = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.rows += hidden.shape[:-1].numel()
        return hidden @ self.weight.T


class ScriptedModel:
    """Implements CachedModel. V: vocabulary; d: hidden size; noise: how much the table differs from that of the same
    seed without noise (a drafter that mostly agrees)."""

    device = torch.device("cpu")

    def __init__(self, V: int = 16, d: int = 24, *, seed: int = 0, noise: float = 0.0, scale: float = 3.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(_NUM_STATES, d, generator=generator)
        weight = torch.randn(V, d, generator=generator) * scale / d**0.5
        if noise:
            self.table = self.table + noise * torch.randn(
                _NUM_STATES, d, generator=torch.Generator().manual_seed(seed + 1)
            )
        self.head = TableHead(weight)
        self.vocab_size = V
        self.rows: list[list[int]] = []
        self.forwards = 0
        self._pending: list[list[list[int]]] = []

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    def state(self, prefix: Sequence[int]) -> Tensor:
        value = 17
        for token in prefix:
            value = (value * 31 + token + 1) % _NUM_STATES
        return self.table[value]

    def add_rows(self, prompts: Sequence[Sequence[int]]) -> ModelOutput:
        self.rows += [list(prompt) for prompt in prompts]
        longest = max(len(prompt) for prompt in prompts)
        hidden = torch.zeros(len(prompts), longest, self.table.shape[1])
        for r, prompt in enumerate(prompts):
            for i in range(len(prompt)):
                hidden[r, i] = self.state(prompt[: i + 1])
        return ModelOutput(hidden)

    def forward(self, tokens: Tensor, ancestors: Tensor | None = None) -> ModelOutput:
        B, N = tokens.shape
        assert len(self.rows) == B
        self.forwards += 1
        if ancestors is None:
            ancestors = torch.ones(N, N, dtype=torch.bool).tril().expand(B, N, N)
        hidden = torch.zeros(B, N, self.table.shape[1])
        for b in range(B):
            for n in range(N):
                path = [int(tokens[b, m]) for m in range(N) if ancestors[b, n, m]]
                hidden[b, n] = self.state([*self.rows[b], *path])
        self._pending = [tokens.tolist()]
        return ModelOutput(hidden)

    def commit(self, num_kept: Sequence[int], path: Tensor | None = None) -> None:
        (tokens,) = self._pending
        for b, count in enumerate(num_kept):
            nodes = range(count) if path is None else path[b, :count].tolist()
            self.rows[b] += [tokens[b][n] for n in nodes]

    def truncate(self, lengths: Sequence[int]) -> None:
        for row, length in zip(self.rows, lengths, strict=True):
            del row[length:]

    def filter(self, keep: Sequence[int]) -> None:
        self.rows = [self.rows[b] for b in keep]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Plain decoding, the slow way."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int((self.state(ids) @ self.head.weight.T).argmax()))
        return ids[len(prompt) :]
