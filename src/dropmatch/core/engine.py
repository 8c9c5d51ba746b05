"""The decoding loop: draft, verify, commit, for a ragged batch whose rows join and leave at any step.

One row is a batch of one; a chain is a tree. Only `step`, and the commits it calls, change state.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.acceptance import (
    AcceptanceRule,
    Need,
    RejectionSampling,
    TargetMatch,
    as_rule,
    check_head,
    needs_of,
)
from dropmatch.core.calibrate import RadiusWatch
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.interfaces import CachedModel, Drafter, DraftTree, ModelOutput, Verdict
from dropmatch.core.reasons import Reason
from dropmatch.core.sequence import Decode, FinishReason, Row, TextStream
from dropmatch.core.stats import EngineStats, LossyToken, RequestStats
from dropmatch.core.verification import RowSampling, Verification
from dropmatch.core.verify import decide, emitted_reasons, judge
from dropmatch.errors import ConfigError, StateError


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step gave one request.

    tokens, with the reason each was kept and, where asked for, the target's log-probability (temperature 1, after
    processing). text: what can be shown now. finish_reason: None while the request goes on; stats: its counts, in the
    last chunk only.
    """

    request: int
    tokens: tuple[int, ...]
    reasons: tuple[Reason, ...]
    logprobs: tuple[float, ...] | None
    text: str
    finish_reason: FinishReason | None
    stats: RequestStats | None


@dataclass(frozen=True, slots=True)
class Round:
    """One round's evidence and verdict, for those who study rules.

    requests: [B] numbers of the rows; num_generated: [B] tokens that each had generated before this round."""

    requests: list[int]
    num_generated: list[int]
    verification: Verification
    verdict: Verdict


@dataclass(slots=True)
class _Clock:
    """Wall time by part. On a GPU each lap waits for the device, so that a part pays for its own kernels."""

    device: torch.device
    last: float = field(default_factory=time.perf_counter)

    def lap(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        elapsed, self.last = now - self.last, now
        return elapsed


class SpeculativeEngine:
    """Speculative decoding of many requests with one target, one drafter and an acceptance rule per request.

    target: a `CachedModel`. drafter: a `Drafter`, or None for plain decoding. rule: the default acceptance rule, by
    name or object. decode: ids -> text, needed for stop strings and text chunks. eos_ids: the model's own
    end-of-sequence ids. max_length: most tokens of a row (None: no limit).
    """

    def __init__(
        self,
        target: CachedModel,
        drafter: Drafter | None,
        *,
        rule: str | AcceptanceRule = "dropmatch",
        dropout: DropoutConfig | None = None,
        config: EngineConfig | None = None,
        decode: Decode | None = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.config = config or EngineConfig()
        self.head = MCDropoutHead(target.head, dropout or DropoutConfig())
        self.rule = as_rule(rule)
        self.decode = decode
        self.eos_ids = frozenset(eos_ids)
        self.stats = EngineStats()
        self.observer: Callable[[Round], None] | None = None  # sees each round before its tokens are emitted
        self._watch = RadiusWatch(self.head.p_drop)
        self._waiting: deque[Row] = deque()
        self._rows: list[Row] = []
        self._num_requests = 0
        self._is_torn = False  # a step was left by an exception, so rows and caches may disagree

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._rows)

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queue a prompt of at least one token id. Returns the request's number. Raises ConfigError on bad input."""
        params = params or SamplingParams()
        if not prompt:
            raise ConfigError("The prompt is empty. Give at least one token id, such as the beginning-of-sequence id.")
        bad = next((t for t in prompt if not 0 <= t < self.target.vocab_size), None)
        if bad is not None:
            raise ConfigError(
                f"Prompt token id {bad} is outside the target's vocabulary [0, {self.target.vocab_size})."
            )
        bad = next((t for t in params.suppress_tokens if not 0 <= t < self.target.vocab_size), None)
        if bad is not None:
            raise ConfigError(f"suppress_tokens has {bad}; the target's vocabulary is [0, {self.target.vocab_size}).")
        if params.stop and self.decode is None:
            raise ConfigError("stop strings need a tokenizer. Build the engine with decode=tokenizer.decode.")
        room = params.max_new_tokens
        if self.config.max_length is not None:
            room = min(room, self.config.max_length - len(prompt))
            if room < 1:
                raise ConfigError(
                    f"The prompt has {len(prompt)} tokens and leaves no room below the limit of "
                    f"{self.config.max_length}. Shorten it."
                )
        rule = self.rule if params.rule is None else as_rule(params.rule)
        is_lossless = isinstance(rule, TargetMatch | RejectionSampling)
        if self.config.correction != "plain" and not is_lossless and Need.HEADS not in rule.needs:
            raise ConfigError(
                f"correction={self.config.correction!r} goes with rules that ask the dropout heads, and this one does "
                f"not: {rule}. Use correction='plain'."
            )
        if self.drafter is not None:
            check_head(rule, self.head, is_sampled=params.temperature > 0)
        request = self._num_requests  # counted behind the last check, since keys of rows without a seed hang on it
        self._num_requests += 1
        has_key = params.seed is not None
        self._waiting.append(
            Row(
                request=request,
                ids=list(prompt),
                prompt_length=len(prompt),
                params=params,
                rule=rule,
                seed=params.seed if params.seed is not None else self.config.seed,
                stream=params.stream if has_key else request + 1,
                eos_ids=self.eos_ids if params.eos_ids is None else frozenset(params.eos_ids),
                draft_length=self.config.draft_length if params.draft_length is None else params.draft_length,
                max_new_tokens=room,
                text=TextStream(self.decode, prompt, params.stop, params.include_stop) if self.decode else None,
            )
        )
        return request

    def cancel(self, request: int) -> bool:
        """Drop a request, waiting or in flight. Returns False if it is not known (any more)."""
        for row in self._waiting:
            if row.request == request:
                self._waiting.remove(row)
                return True
        keep = [b for b, row in enumerate(self._rows) if row.request != request]
        if len(keep) == len(self._rows):
            return False
        self._filter(keep)
        return True

    def cancel_all(self) -> None:
        """Drop all requests, waiting or in flight. Makes the engine usable again after a step that raised."""
        self._waiting.clear()
        self._rows = []
        self.target.filter([])
        if self.drafter is not None:
            self.drafter.filter([])
        self._is_torn = False

    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        """One round for every row in flight. Returns a chunk per row; rows that end leave the batch.

        Raises StateError if an earlier step raised: its rows cannot go on. Call cancel_all and add them again."""
        if self._is_torn:
            raise StateError(
                "An earlier step of this engine raised; its rows cannot go on. Call cancel_all(), then add them again."
            )
        self._is_torn = True
        chunks = self._step()
        self._is_torn = False
        return chunks

    def _step(self) -> list[Chunk]:
        clock = _Clock(self.target.device)
        self._admit()
        times = self.stats.time
        times.prefill += clock.lap()
        if not self._rows:
            return []
        rows = self._rows
        tree, is_drafted = self._propose()
        times.draft += clock.lap()
        output = self.target.forward(tree.tokens, None if tree.is_chain else tree.ancestors)
        logits = self.target.head(output.hidden)  # [B, N, V]
        times.target_forwards += 1
        times.target += clock.lap()
        rules = [row.rule for row in rows]
        needs = needs_of(rules)
        v = Verification(
            tree,
            output.hidden,
            logits,
            RowSampling(rows, self.target.device),
            self.head,
            with_js=Need.DIVERGENCE in needs,
            with_centroid_prob=Need.CENTROID_PROB in needs,
        )
        codes = judge(v, rules)
        if self.config.protect_eos:
            codes = self._without_lossy_eos(v, codes)
        verdict = decide(
            v,
            codes,
            rules,
            self.config.correction,
            path_policy=self.config.path_policy,
            tie_break=self.config.tie_break,
        )
        if self.observer is not None:
            self.observer(Round([row.request for row in rows], [row.num_generated for row in rows], v, verdict))
        times.head_rows = self.head.rows_asked
        self._watch.see(v.seen)
        times.judge += clock.lap()
        chunks, accepted = self._emit(tree, v, verdict)
        self._commit(tree, replace(verdict, accepted=accepted), output, is_drafted)
        times.rest += clock.lap()
        return chunks

    def run(self) -> list[Chunk]:
        """Step until nothing is left to do. Returns all chunks."""
        chunks: list[Chunk] = []
        while self.has_work:
            chunks += self.step()
        return chunks

    def _admit(self) -> None:
        new = list(islice(self._waiting, self.config.max_batch - len(self._rows)))
        if not new:
            return
        # the last prompt token is the first root, so that the first round already verifies a draft
        output = self.target.add_rows([row.ids[:-1] for row in new])
        if self.drafter is not None:
            self.drafter.add_rows(new, output)
        self._rows += new
        for _ in new:
            self._waiting.popleft()

    def _propose(self) -> tuple[DraftTree, bool]:
        """The round's tree, and whether the drafter made it."""
        # a round yields one token more than it keeps drafted ones, so drafting up to the cap would be waste
        max_new = [min(row.draft_length, row.max_new_tokens - row.num_generated - 1) for row in self._rows]
        if self.drafter is None or max(max_new) == 0:
            roots = torch.tensor([[row.ids[-1]] for row in self._rows], device=self.target.device)
            return DraftTree.chain(roots, torch.ones(len(roots), dtype=torch.int64, device=self.target.device)), False
        return self.drafter.propose(self._rows, max_new), True

    def _without_lossy_eos(self, v: Verification, codes: Tensor) -> Tensor:
        is_eos = torch.zeros_like(codes, dtype=torch.bool)
        for b, row in enumerate(self._rows):
            for eos in row.eos_ids:
                is_eos[b] |= v.tree.tokens[b] == eos
        is_lossless = v.is_exact | (codes == int(Reason.RATIO))
        return codes.masked_fill(is_eos & ~is_lossless, 0)

    def _emit(self, tree: DraftTree, v: Verification, verdict: Verdict) -> tuple[list[Chunk], list[int]]:
        """A chunk per row, and the drafted tokens that each row kept."""
        B, P = verdict.path.shape
        device = verdict.path.device
        row_index = torch.arange(B, device=device)
        deepest = verdict.path[:, -1]
        has_child = tree.children(deepest).any(-1)
        reasons = emitted_reasons(verdict, has_child)
        tokens = torch.zeros(B, P, dtype=torch.int64, device=device)
        tokens[:, : P - 1] = tree.tokens.gather(-1, verdict.path[:, 1:])
        tokens[row_index, verdict.num_accepted] = verdict.next_token
        wants_logprobs = any(row.params.logprobs for row in self._rows)
        logprobs = self._logprobs(v, verdict, tokens) if wants_logprobs else None
        # one transfer for all that the host needs of this round, unless tokens are kept that are not the target's own
        drafted = (tree.valid & (tree.depth > 0)).int().mul(tree.depth).amax(-1)
        is_lossy = self._is_lossy(tree, v, verdict)
        counts = torch.stack([verdict.num_accepted, drafted, is_lossy.sum(-1)], dim=1)
        packed = torch.cat([counts, tokens, reasons.long()], dim=1).tolist()
        lossy = self._lossy_tokens(tree, v, is_lossy) if any(row[2] for row in packed) else {}
        chunks = []
        for b, row in enumerate(self._rows):
            accepted, num_drafted, _ = packed[b][:3]
            row.stats.record_round(num_drafted, accepted)
            self.stats.requests.record_round(num_drafted, accepted)
            kept: list[int] = []
            why: list[Reason] = []
            for i in range(accepted + 1):
                token, reason = packed[b][3 + i], Reason(packed[b][3 + P + i])
                if (b, i) in lossy:
                    best_token, prob, best_prob = lossy[b, i]
                    entry = LossyToken(row.num_generated, token, best_token, prob, best_prob, reason)
                    row.stats.lossy.append(entry)
                    self.stats.requests.lossy.append(entry)
                kept.append(token)
                why.append(reason)
                if row.append(token):
                    break
            for stats in (row.stats, self.stats.requests):
                stats.emitted += len(kept)
                stats.reasons.update(why)
            is_last = row.finish_reason is not None
            chunks.append(
                Chunk(
                    request=row.request,
                    tokens=tuple(kept),
                    reasons=tuple(why),
                    logprobs=tuple(logprobs[b][: len(kept)]) if logprobs is not None and row.params.logprobs else None,
                    text=row.text.pop(is_last=is_last) if row.text is not None else "",
                    finish_reason=row.finish_reason,
                    stats=row.stats if is_last else None,
                )
            )
        return chunks, [row[0] for row in packed]

    def _is_lossy(self, tree: DraftTree, v: Verification, verdict: Verdict) -> Tensor:
        """Kept tokens that are not the target's own. Returns [B, N] bool."""
        on_path = torch.zeros_like(tree.valid).scatter_(1, verdict.path, True)
        return on_path & ~v.is_exact & (tree.depth > 0) & (verdict.reason != int(Reason.RATIO))

    def _lossy_tokens(
        self, tree: DraftTree, v: Verification, is_lossy: Tensor
    ) -> dict[tuple[int, int], tuple[int, float, float]]:
        """Lossy tokens as {(row, place): (target's token, probability, its best)}."""
        b, n = is_lossy.nonzero(as_tuple=True)
        prob, best = v.target_probs_at(b, n)
        plain = v.plain_token[b, v.parent[b, n]]
        place = tree.depth[b, n] - 1
        # one transfer: float32 holds any token id
        columns = torch.stack([column.float() for column in (b, place, plain, prob, best)], dim=-1)
        return {(int(row), int(at)): (int(token), p, p_best) for row, at, token, p, p_best in columns.tolist()}

    def _logprobs(self, v: Verification, verdict: Verdict, tokens: Tensor) -> list[list[float]]:
        B, _ = tokens.shape
        logits = v.target_logits[torch.arange(B, device=tokens.device)[:, None], verdict.path].float()  # [B, P, V]
        return (logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)).tolist()

    def _commit(self, tree: DraftTree, verdict: Verdict, output: ModelOutput, is_drafted: bool) -> None:
        keep = [b for b, row in enumerate(self._rows) if row.finish_reason is None]
        if keep:
            self.target.commit(verdict.num_kept, None if tree.is_chain else verdict.path)
            if self.drafter is not None and is_drafted:
                self.drafter.commit(verdict, output)
        if len(keep) < len(self._rows):
            self._filter(keep)

    def _filter(self, keep: list[int]) -> None:
        self._rows = [self._rows[b] for b in keep]
        self.target.filter(keep)
        if self.drafter is not None:
            self.drafter.filter(keep)
