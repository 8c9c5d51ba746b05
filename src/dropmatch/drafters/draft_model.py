"""A smaller model drafts a chain, token by token, with its own KV cache.

The draft model lags the target by what the last round kept: those tokens go in first, together with the root.
Proposals are the processed argmax of greedy rows and a draw of sampled ones; what they were drawn from is recorded.
Where a rule reads the draft model's hidden states, the last drafted token is run too, which drafting does not need.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dropmatch.core.interfaces import CachedModel, DraftTree, ModelOutput, Verdict
from dropmatch.core.needs import Need
from dropmatch.core.sequence import Row
from dropmatch.core.verification import RowSampling
from dropmatch.errors import ConfigError
from dropmatch.ops.random import Purpose


class DraftModelDrafter:
    """Chains from a draft model. vocab_size: the target's; ids that only one of the two knows are never drafted.

    min_confidence: a row's draft ends behind the first token that the draft model itself gives a smaller probability
    (temperature 1), since what follows an unsure token is seldom kept. 0 always drafts to the full length.
    """

    name = "draft-model"

    def __init__(self, model: CachedModel, vocab_size: int, *, min_confidence: float = 0.0) -> None:
        if not 0.0 <= min_confidence <= 1.0:
            raise ConfigError(f"min_confidence={min_confidence!r} is out of range. Allowed: [0, 1]; 0 is off.")
        self.model = model
        self.vocab_size = vocab_size
        self.min_confidence = min_confidence
        self._num_shared = min(model.vocab_size, vocab_size)
        self._lengths: list[int] = []  # tokens of each row that the draft cache may keep after the verdict

    def add_rows(self, rows: Sequence[Row], output: ModelOutput) -> None:
        self.model.add_rows([self._known(row.ids[:-1]) for row in rows])
        self._lengths += [len(row.ids) - 1 for row in rows]

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        device = self.model.device
        num_steps = max(max_new)
        sampling = RowSampling(rows, device)
        B = len(rows)
        row = torch.arange(B, device=device)
        roots = torch.tensor([len(r.ids) - 1 for r in rows], device=device)
        pending = [self._known(r.ids[cached:]) for r, cached in zip(rows, self.model.lengths, strict=True)]
        wants_hidden = any(Need.DRAFT_HIDDEN in r.rule.needs for r in rows)
        hidden = self._feed(pending)  # [B, d]
        states = [hidden]
        logits = self.model.head(hidden)  # [B, Vd]
        tokens = [torch.tensor([r.ids[-1] for r in rows], device=device)]
        recorded: list[Tensor] = []
        drafts: list[list[int]] = [[] for _ in rows]
        num_drafted = torch.tensor(max_new, device=device)
        for step in range(num_steps):
            logits = sampling.process(self._to_target_vocabulary(logits), range(B), drafts)
            recorded.append(logits)
            tokens.append(self._choose(sampling, logits, rows, row, roots + step + 1))
            if sampling.any_processed:
                drafts = [[*draft, token] for draft, token in zip(drafts, tokens[-1].tolist(), strict=True)]
            if self.min_confidence > 0:
                is_sure = self._confidence(logits, tokens[-1]) >= self.min_confidence
                num_drafted = torch.where(is_sure, num_drafted, num_drafted.clamp(max=step + 1))
                num_steps = int(num_drafted.max())
            is_last = step + 1 >= num_steps
            if is_last and not wants_hidden:
                break
            hidden = self.model.forward(tokens[-1][:, None]).hidden[:, -1]
            states.append(hidden)
            if is_last:  # run for its state alone, and not committed
                break
            logits = self.model.head(hidden)
            # a row that drafts no further stays where it is: behind its last token there may be no more positions
            self.model.commit([int(step + 1 < limit) for limit in max_new])
        recorded.append(torch.zeros_like(recorded[0]))  # nothing is drafted behind the last node
        return DraftTree.chain(
            torch.stack(tokens, dim=1),
            num_drafted + 1,
            torch.stack(recorded, dim=1),
            sampling.is_sampled,
            torch.stack(states, dim=1) if wants_hidden else None,
        )

    def commit(self, verdict: Verdict, output: ModelOutput) -> None:
        # the last drafted token was never run, so a fully kept draft leaves the cache one token short
        kept = zip(self.model.lengths, self._lengths, verdict.num_kept, strict=True)
        self.model.truncate([min(cached, root + n) for cached, root, n in kept])

    def filter(self, keep: Sequence[int]) -> None:
        self.model.filter(keep)
        self._lengths = [self._lengths[b] for b in keep]

    def _feed(self, pending: list[list[int]]) -> Tensor:
        """Run and cache tokens that the draft model has not seen. Returns the state behind the last of each row."""
        counts = [len(ids) for ids in pending]
        width = max(counts)
        device = self.model.device
        padded = torch.tensor([ids + [ids[-1]] * (width - len(ids)) for ids in pending], device=device)
        hidden = self.model.forward(padded).hidden
        self.model.commit(counts)
        self._lengths = [cached - 1 for cached in self.model.lengths]  # the root is the last of the pending tokens
        last = torch.tensor(counts, device=device) - 1
        return hidden[torch.arange(len(pending), device=device), last]

    def _confidence(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """The draft model's probability of its own tokens. logits: [B, V]; tokens: [B]. Returns [B]."""
        logits = logits.float()
        return (logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)).exp()

    def _choose(
        self, sampling: RowSampling, logits: Tensor, rows: Sequence[Row], row: Tensor, position: Tensor
    ) -> Tensor:
        coupled = [r.rule.couples_draft for r in rows]
        if all(coupled) or not sampling.any_sampled:
            return sampling.choose(logits, row, position, Purpose.GUMBEL)
        independent = sampling.choose(logits, row, position, Purpose.DRAFT)
        if not any(coupled):
            return independent
        shared = sampling.choose(logits, row, position, Purpose.GUMBEL)
        return torch.where(torch.tensor(coupled, device=logits.device), shared, independent)

    def _to_target_vocabulary(self, logits: Tensor) -> Tensor:
        """Cut or pad with -inf to the target's size. logits: [B, Vd]. Returns [B, V]."""
        if logits.shape[-1] == self.vocab_size:
            return logits
        padding = (0, self.vocab_size - self._num_shared)
        return torch.nn.functional.pad(logits[:, : self._num_shared], padding, value=float("-inf"))

    def _known(self, ids: Sequence[int]) -> list[int]:
        """Ids past the draft model's vocabulary, which only a padded target can produce, stand for id 0."""
        return [token if token < self.model.vocab_size else 0 for token in ids]
