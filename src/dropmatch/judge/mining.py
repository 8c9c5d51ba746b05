"""Which mismatches matter: labels for a judge, made from the target's own answers.

For one prompt (greedy everywhere, after Auto-Judge): let the target answer; find the first token from which the draft
model would have parted; put the draft model's token there and let the target finish; if the answer then says the same,
the mismatch is unimportant and the new answer is kept, else it is important and the old one stays; go on behind it.

The steps of one prompt hang on each other, so many prompts run side by side in one batch of the target. A prompt's row
stays in the cache from step to step and is cut back to what the steps share, so that nothing is read twice, and the old
answer is tried as a draft of the new one: its tokens are kept only where the target itself would have written them.
Knows tokens, two models and a grader; no task, file or tokenizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from dropmatch.config import SamplingParams
from dropmatch.core.acceptance import TargetMatch
from dropmatch.core.interfaces import CachedModel
from dropmatch.core.sequence import Decode, Row, TextStream
from dropmatch.errors import ConfigError

_SCANNED = 16  # tokens that the draft model reads at once; mismatches are seldom farther apart
_GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class MiningPrompt:
    """What to answer. key: its name; ids: the prompt's tokens; max_new_tokens, stop: as in SamplingParams."""

    key: str
    ids: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Label:
    """One mismatch. position: index in the answer; is_important: the draft model's token changed what it says."""

    position: int
    is_important: bool
    target_token: int
    draft_token: int


@dataclass(slots=True)
class Mined:
    """One prompt's yield. reference: the target's own answer; response: the answer with all harmless draft tokens in
    it; generated: tokens that the target wrote for it; rollouts: answers that were finished anew."""

    prompt: MiningPrompt
    reference: list[int] = field(default_factory=list)
    response: list[int] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    generated: int = 0
    rollouts: int = 0

    @property
    def is_cut_off(self) -> bool:
        """Whether the target's own answer took all the tokens that it was allowed."""
        return len(self.reference) >= self.prompt.max_new_tokens


class Grader(Protocol):
    """Says what answers come to, and whether two of them come to the same."""

    def grade(self, answers: Sequence[tuple[str, str]]) -> Sequence[object]:
        """What each of (key, text) comes to."""
        ...

    def same(self, key: str, reference: object, other: object) -> bool:
        """Whether two answers to one prompt come to the same."""
        ...


class Miner:
    """Mines prompts, `batch` of them side by side.

    target: without rows; new_draft: a draft model with a cache of its own, one per prompt. draft_length: tokens of the
    old answer that are tried at once. max_length: most tokens of a row. is_asked(key, position): False leaves a
    mismatch unlabelled, with the target's token in place. on_rollout: called behind each finished answer.
    """

    def __init__(
        self,
        target: CachedModel,
        new_draft: Callable[[], CachedModel],
        grader: Grader,
        *,
        decode: Decode,
        eos_ids: frozenset[int],
        batch: int = 8,
        draft_length: int = 6,
        max_length: int | None = None,
        is_asked: Callable[[str, int], bool] = lambda key, position: True,
        on_rollout: Callable[[], None] = lambda: None,
    ) -> None:
        self.target = target
        self.grader = grader
        self.batch = batch
        self.rounds = 0  # forwards of the target, prompts left out
        self.generated = 0
        self.rollouts = 0
        self._new_draft = new_draft
        self._decode = decode
        self._eos_ids = eos_ids
        self._draft_length = draft_length
        self._max_length = max_length
        self._is_asked = is_asked
        self._on_rollout = on_rollout
        self._works: list[_Work] = []  # one per row of the target, in its order

    @torch.inference_mode()
    def run(self, prompts: Sequence[MiningPrompt]) -> Iterator[Mined]:
        """Each prompt as it is finished. Raises ConfigError for a prompt that leaves no room for an answer."""
        for prompt in prompts:
            self._room(prompt)
        waiting = deque(prompts)
        try:
            while waiting or self._works:
                self._admit(waiting)
                self._round()
                yield from self._settle()
        finally:  # the caller may stop in the middle
            self._works = []
            self.target.filter([])

    def _room(self, prompt: MiningPrompt) -> int:
        room = prompt.max_new_tokens
        if self._max_length is not None:
            room = min(room, self._max_length - len(prompt.ids) - 1)  # the last token may be exchanged and answered
        if room < 1 or not prompt.ids:
            raise ConfigError(
                f"{prompt.key}: its prompt of {len(prompt.ids)} tokens leaves no room for an answer below the limit of "
                f"{self._max_length}. Leave it out."
            )
        return room

    def _can_read(self, prompt: MiningPrompt, position: int) -> bool:
        """Whether a row may hold a token at this index of the answer. Each harmless exchange at the end of an answer
        that was cut off lets the next one be a token longer."""
        return self._max_length is None or len(prompt.ids) + position < self._max_length

    def _admit(self, waiting: deque[MiningPrompt]) -> None:
        new = [waiting.popleft() for _ in range(min(len(waiting), self.batch - len(self._works)))]
        if not new:
            return
        self.target.add_rows([prompt.ids[:-1] for prompt in new])
        for prompt in new:
            work = _Work(Mined(prompt), self._room(prompt))
            work.row = self._row(work, [])
            self._works.append(work)

    def _row(self, work: _Work, answer: Sequence[int]) -> Row:
        """A row with the beginning of an answer in it. At least one token may follow, unless the answer has ended."""
        prompt = work.mined.prompt
        row = Row(
            request=0,
            ids=list(prompt.ids),
            prompt_length=len(prompt.ids),
            params=_GREEDY,
            rule=TargetMatch(),
            seed=0,
            stream=0,
            eos_ids=self._eos_ids,
            draft_length=self._draft_length,
            max_new_tokens=max(work.room, len(answer) + 1),
            text=TextStream(self._decode, prompt.ids, prompt.stop, False),
        )
        for token in answer:
            row.append(token)
        return row

    def _round(self) -> None:
        """One forward of the target for all rows: what they still have to read, then the old answer's tokens to try."""
        most = 1 + self._draft_length
        chunks: list[list[int]] = []
        unread: list[int] = []  # known tokens of each chunk; the others are tried
        places: list[tuple[int, int]] = []
        for b, (work, length) in enumerate(zip(self._works, self.target.lengths, strict=True)):
            known = work.row.ids[length : length + most]
            chunks.append(known)
            unread.append(len(known))
            if length + len(known) == len(work.row.ids):
                chunks[b] = [*known, *self._draft(work)[: most - len(known)]]
                places += [(b, n) for n in range(len(known) - 1, len(chunks[b]))]
        width = max(map(len, chunks))
        padded = [chunk + [chunk[-1]] * (width - len(chunk)) for chunk in chunks]
        hidden = self.target.forward(torch.tensor(padded, device=self.target.device)).hidden
        self.rounds += 1
        best = iter(self._best(hidden, places))
        kept = list(unread)
        for b in dict.fromkeys(row for row, _ in places):
            draft = chunks[b][unread[b] :]
            kept[b] += self._append(self._works[b], draft, list(islice(best, len(draft) + 1)))
        self.target.commit(kept)

    def _best(self, hidden: Tensor, places: Sequence[tuple[int, int]]) -> list[int]:
        """The target's own token behind each of these rows and nodes."""
        if not places:
            return []
        b, n = torch.tensor(places, device=hidden.device).unbind(1)
        tokens: list[int] = self.target.head(hidden[b, n]).argmax(-1).tolist()
        return tokens

    def _append(self, work: _Work, draft: Sequence[int], own: Sequence[int]) -> int:
        """Emit the target's tokens as far as the draft foresaw them, and the one behind. Returns how many drafted
        tokens stay."""
        num_kept = 0
        for i, token in enumerate(own):
            self.generated += 1
            work.mined.generated += 1
            is_foreseen = i < len(draft) and draft[i] == token
            num_kept += is_foreseen
            if work.row.append(token) or not is_foreseen:
                break
        return num_kept

    def _draft(self, work: _Work) -> list[int]:
        """What the old answer says from here on; nothing while there is none."""
        old, ids = work.mined.response, work.row.ids
        at = len(ids) - work.row.prompt_length
        limit = min(self._draft_length, work.row.max_new_tokens - at - 1)
        if not old or limit < 1:
            return []
        start = _resume(old, ids[work.row.prompt_length :], work.shift)
        work.shift = start - at
        return old[start : start + limit]

    def _settle(self) -> Iterator[Mined]:
        """Grade the answers that are finished and send their rows on to the next mismatch; give out those without."""
        while any(work.row.finish_reason is not None and not work.is_done for work in self._works):
            ended = [work for work in self._works if work.row.finish_reason is not None and not work.is_done]
            outcomes = self.grader.grade([(work.mined.prompt.key, work.text) for work in ended])
            for work, outcome in zip(ended, outcomes, strict=True):
                self._judge(work, outcome)
                self._advance(work)
        done = [work.mined for work in self._works if work.is_done]
        if done:
            keep = [b for b, work in enumerate(self._works) if not work.is_done]
            self._works = [self._works[b] for b in keep]
            self.target.filter(keep)
        yield from done

    def _judge(self, work: _Work, outcome: object) -> None:
        """Label the mismatch whose answer came in, or note what the target's own comes to."""
        mined, answer = work.mined, work.row.ids[work.row.prompt_length :]
        if work.swap is None:
            mined.reference, mined.response, work.outcome = answer, answer, outcome
            return
        position, token = work.swap
        is_same = self.grader.same(mined.prompt.key, work.outcome, outcome)
        mined.labels.append(Label(position, not is_same, mined.response[position], token))
        mined.rollouts += 1
        self.rollouts += 1
        if is_same:
            mined.response = answer
        self._on_rollout()

    def _advance(self, work: _Work) -> None:
        """Turn the row to the next mismatch behind the last, or finish it."""
        mined = work.mined
        if work.scanner is None:
            work.scanner = _Scanner(self._new_draft(), mined.prompt.ids, self.target.vocab_size)
        start = 0 if work.swap is None else work.swap[0] + 1
        swap = work.scanner.mismatch(mined.response, start)
        while swap is not None and not self._is_asked(mined.prompt.key, swap[0]):
            swap = work.scanner.mismatch(mined.response, swap[0] + 1)
        if swap is None or not self._can_read(mined.prompt, swap[0]):
            work.is_done, work.scanner = True, None
            return
        b = self._works.index(work)
        cached = work.row.ids[: self.target.lengths[b]]
        work.swap, work.shift = swap, 0
        work.row = self._row(work, [*mined.response[: swap[0]], swap[1]])
        lengths = list(self.target.lengths)
        lengths[b] = min(_common(cached, work.row.ids), len(work.row.ids) - 1)
        self.target.truncate(lengths)


@dataclass(slots=True, eq=False)
class _Work:
    """A prompt under way. swap: the mismatch that the row is about, None while the target writes its own answer;
    shift: how far the old answer runs ahead of the row."""

    mined: Mined
    room: int
    row: Row = field(init=False)
    outcome: object = None
    swap: tuple[int, int] | None = None
    shift: int = 0
    scanner: _Scanner | None = None
    is_done: bool = False

    @property
    def text(self) -> str:
        assert self.row.text is not None
        return self.row.text.text


class _Scanner:
    """Where the draft model would have written another token, told a stretch at a time."""

    def __init__(self, draft: CachedModel, prompt: Sequence[int], vocab_size: int) -> None:
        self._draft = draft
        self._prompt = list(prompt)
        self._num_shared = min(draft.vocab_size, vocab_size)
        self._read = list(prompt[:-1])  # what is cached
        self._guesses: dict[int, int] = {}  # by index in prompt and answer
        draft.add_rows([self._known(self._read)])

    def mismatch(self, answer: Sequence[int], start: int) -> tuple[int, int] | None:
        """The first position of the answer from `start` on where the draft model's token differs, and that token."""
        ids = [*self._prompt, *answer]
        num_same = _common(self._read, ids)
        if num_same < len(self._read):
            self._draft.truncate([num_same])
            del self._read[num_same:]
            self._guesses = {at: token for at, token in self._guesses.items() if at <= num_same}
        for at in range(len(self._prompt) + start, len(ids)):
            while at not in self._guesses:
                self._scan(ids, at)
            if self._guesses[at] != ids[at]:
                return at - len(self._prompt), self._guesses[at]
        return None

    def _scan(self, ids: Sequence[int], first: int) -> None:
        """Read on, and guess the tokens from index `first`."""
        cached = len(self._read)
        chunk = list(ids[cached : cached + _SCANNED])
        hidden = self._draft.forward(torch.tensor([self._known(chunk)], device=self._draft.device)).hidden[0]
        self._draft.commit([len(chunk)])
        self._read += chunk
        skip = max(0, first - cached - 1)  # node n has read ids[cached + n] and guesses the one behind
        best = self._draft.head(hidden[skip:])[:, : self._num_shared].argmax(-1).tolist()
        self._guesses.update({cached + skip + n + 1: token for n, token in enumerate(best)})

    def _known(self, ids: Sequence[int]) -> list[int]:
        """Ids past the draft model's vocabulary, which only a padded target can produce, stand for id 0."""
        return [token if token < self._draft.vocab_size else 0 for token in ids]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _resume(old: Sequence[int], answer: Sequence[int], shift: int) -> int:
    """Where an old answer goes on from what a new one ends with: behind the same two tokens, or the same one, nearest
    to where it is expected; else where it is expected. shift: how far the old one ran ahead so far."""
    expected = len(answer) + shift
    for size in (2, 1):
        tail = list(answer[-size:])
        if len(tail) < size:
            continue
        ends = [i for i in range(size, len(old) + 1) if list(old[i - size : i]) == tail]
        if ends:
            return min(ends, key=lambda end: abs(end - expected))
    return expected
