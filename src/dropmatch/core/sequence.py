"""One row of the batch: its tokens, settings, text so far and why it ended. Knows no model.

A row's ids always end with the root: the last token, whose keys and values are not cached yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from dropmatch.config import SamplingParams
from dropmatch.core.stats import RequestStats
from dropmatch.ops.sampling import penalize_repetition

if TYPE_CHECKING:
    from dropmatch.core.acceptance import AcceptanceRule

FinishReason = Literal["eos", "stop", "length"]
Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"


class TextStream:
    """Text of a growing list of tokens, cut in front of the first stop string.

    Characters split over tokens are held back until they are whole, and so is any tail that could still become a stop
    string; `pop` gives what is safe to show.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int], stop: tuple[str, ...], include_stop: bool) -> None:
        self._decode = decode
        self._stop = stop
        self._include_stop = include_stop
        self._ids = list(prompt[-8:])  # context, since a token's text can depend on the ones before
        self._skip = len(decode(self._ids))
        self._start = 0
        self.text = ""
        self._sent = 0
        self.is_stopped = False

    def push(self, token: int) -> bool:
        """Add a token. Returns True if it completes a stop string."""
        self._ids.append(token)
        piece = self._decode(self._ids[self._start :])[self._skip :]
        text = self.text + piece
        searched_from = max(0, len(self.text) - max((len(s) for s in self._stop), default=0))
        hits = [(at, s) for s in self._stop if (at := text.find(s, searched_from)) >= 0]
        if hits:
            at, found = min(hits)
            self.text = text[: at + len(found)] if self._include_stop else text[:at]
            self.is_stopped = True
            return True
        if piece and not piece.endswith(_REPLACEMENT):  # else an unfinished character, held until it is whole
            self.text = text
            # decode only a short window from here on, so that a long text does not cost more per token
            self._start = max(0, len(self._ids) - 8)
            self._skip = len(self._decode(self._ids[self._start :]))
        return False

    def finish(self) -> None:
        """No more tokens come: an unfinished character becomes text."""
        if not self.is_stopped:
            self.text += self._decode(self._ids[self._start :])[self._skip :]

    def pop(self, *, is_last: bool) -> str:
        """Text that was not given out before and can no longer change."""
        end = len(self.text)
        if not is_last:
            for s in self._stop:
                held = next((n for n in range(min(len(s) - 1, len(self.text)), 0, -1) if self.text.endswith(s[:n])), 0)
                end = min(end, len(self.text) - held)
        new = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return new


@dataclass(slots=True, eq=False)
class Row:
    """A request in flight. Only the engine changes it."""

    request: int
    ids: list[int]
    prompt_length: int
    params: SamplingParams
    rule: AcceptanceRule
    seed: int
    stream: int
    eos_ids: frozenset[int]
    draft_length: int
    max_new_tokens: int
    text: TextStream | None = None
    finish_reason: FinishReason | None = None
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def num_generated(self) -> int:
        return len(self.ids) - self.prompt_length

    def can_shortlist(self, *, has_distribution: bool) -> bool:
        """Whether the dropout heads may be asked about a shortlist of tokens only: a greedy row with logits as the head
        gives them, whose rule needs no centroid over the vocabulary. has_distribution: the drafter's."""
        needs = {need.value for need in self.rule.needs}
        needs_centroid = "centroid_prob" in needs or ("divergence" in needs and not has_distribution)
        return not (self.params.temperature > 0 or self.needs_processing or needs_centroid)

    @property
    def needs_processing(self) -> bool:
        return self.params.needs_processing

    def process(self, logits: Tensor, path: Sequence[int] = ()) -> Tensor:
        """Apply penalties, masks and the caller's processors to logits that follow ids + path.

        logits: [R, V], all with this one prefix. Returns [R, V]; the input is not changed.
        """
        params = self.params
        ids = torch.tensor([*self.ids, *path], device=logits.device)
        if params.repetition_penalty != 1.0:
            logits = penalize_repetition(logits, ids, params.repetition_penalty)
        masked = list(params.suppress_tokens)
        if len(ids) - self.prompt_length < params.min_new_tokens:
            masked += [eos for eos in self.eos_ids if 0 <= eos < logits.shape[-1]]
        if masked:
            logits = logits.index_fill(-1, torch.tensor(masked, device=logits.device), float("-inf"))
        for processor in params.processors:
            logits = processor(ids.expand(logits.shape[0], -1), logits)
        return logits

    def append(self, token: int) -> bool:
        """Emit one token. Returns True, and sets finish_reason, if the row ends with it."""
        self.ids.append(token)
        is_stopped = self.text is not None and token not in self.eos_ids and self.text.push(token)
        if token in self.eos_ids:
            self.finish_reason = "eos"
        elif is_stopped or any(check(self.ids) for check in self.params.stop_checks):
            self.finish_reason = "stop"
        elif self.num_generated >= self.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None and self.text is not None:
            self.text.finish()
        return self.finish_reason is not None
