"""A model that runs no prompt twice: what it cached for one stands for each of its beginnings too.

For measurements that decode behind the same long prompts again and again. Knows nothing of drafters or rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from dropmatch.core.interfaces import ModelOutput
from dropmatch.hf.cache import RaggedCache
from dropmatch.hf.model import HFModel


class Prompts:
    """Prompts with their cached keys and values, one row each."""

    def __init__(self) -> None:
        self._known: list[tuple[list[int], RaggedCache]] = []

    def beginning(self, ids: Sequence[int]) -> RaggedCache | None:
        """A copy of the cache of a known prompt that begins with these ids, cut to them; None if there is none."""
        for known, cache in self._known:
            if known[: len(ids)] == list(ids):
                part = cache.select([0], 0)
                part.truncate([len(ids)])
                return part
        return None

    def add(self, ids: Sequence[int], cache: RaggedCache) -> None:
        """Keep a prompt of one row. The cache must not be used afterwards."""
        self._known.append((list(ids), cache))


class PrefilledModel(HFModel):
    """An HFModel whose prompts come from `prompts` where they are known, and are added where they are not.

    The hidden states of a prompt are not kept: its add_rows returns zeros, so no drafter may read them.
    """

    def __init__(self, model: HFModel, prompts: Prompts) -> None:
        super().__init__(model.model, probe=False)
        self.head, self.vocab_size = model.head, model.vocab_size
        self._prompts = prompts

    def add_rows(self, prompts: Sequence[Sequence[int]]) -> ModelOutput:
        """As HFModel's, but hidden [R, S, d] is zero."""
        for ids in prompts:
            part = self._prompts.beginning(ids)
            if part is None:
                fresh = HFModel(self.model, probe=False)
                fresh.add_rows([ids])
                self._prompts.add(ids, fresh._cache)
                part = self._prompts.beginning(ids)
                assert part is not None
            self._cache.append(part)
        self._twins.add(range(len(prompts)))
        return self._empty(len(prompts), max(map(len, prompts), default=0))
