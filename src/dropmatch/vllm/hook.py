"""What runs inside a worker, the same for both model runners: settings per request, decisions, counts.

Nothing here waits for the device while tokens are decoded. Knows flat rows and vLLM's model, but neither runner.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropmatch.config import DropoutConfig, PDrop
from dropmatch.core.acceptance import AcceptanceRule, is_closed_form
from dropmatch.core.calibrate import choose_p_drop
from dropmatch.core.flat import Ask, FlatJudge, FlatRows
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.reasons import Reason
from dropmatch.errors import ConfigError, StateError
from dropmatch.vllm.head import VLLMHead
from dropmatch.vllm.settings import PluginConfig, RequestSettings, parse_request

logger = logging.getLogger(__name__)

ATTRIBUTE = "_dropmatch"
"""Where a model runner keeps its `Hook`."""

COUNTS = ("drafted", "asked", "lossy", "unknown")
"""Judged drafted tokens; those the heads were asked about; kept ones that lossless decoding would have refused; those
judged while the drafter's distribution was missing. Kept tokens by `Reason` follow."""

NUM_COUNTS = len(COUNTS) + max(Reason) + 1
_MOST_JUDGES = 64

current: ContextVar[Hook | None] = ContextVar("dropmatch_hook", default=None)
"""The hook of the runner that is sampling just now, for functions of vLLM that are not told."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as the runner knows it. temperature: 0 is greedy."""

    settings: RequestSettings
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Drafts:
    """One step's drafted tokens. requests, num_drafts: on the host, in the order of the rows. The rest as `FlatRows`,
    with positions [M] of the tokens that the rows predict; draft_logits: None where the drafter has no distribution or
    it is missing."""

    requests: Sequence[Asked]
    num_drafts: Sequence[int]
    tokens: Tensor
    positions: Tensor
    hidden: Tensor
    raw: Tensor
    final: Tensor
    raw_row: Tensor
    final_row: Tensor
    draft_logits: Callable[[Tensor], Tensor] | None


@dataclass(frozen=True, slots=True)
class Steering:
    """What to write where. logit: [M] for the drafted token's place in `final`, NaN to leave it; refuse: [M] bool."""

    logit: Tensor
    refuse: Tensor

    def apply(self, final: Tensor, row: Tensor, tokens: Tensor) -> Callable[[], None]:
        """Write the logits in place. Returns what puts the old ones back."""
        token = tokens.clamp(min=0)
        before = final[row, token]
        limit = torch.finfo(final.dtype).max
        final[row, token] = torch.where(self.logit.isnan(), before, self.logit.clamp(max=limit).to(final.dtype))

        def restore() -> None:
            final[row, token] = before

        return restore


class Hook:
    """The plugin's part of one model runner."""

    def __init__(self, config: PluginConfig, *, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.step: Any = None  # the runner's own notes between its calls
        self.captured: list[Tensor] | None = None
        self._hidden_size, self._dtype, self.device = hidden_size, dtype, device
        self._head: VLLMHead | None = None
        self._p_drop: PDrop = config.p_drop
        self._judges: dict[tuple[AcceptanceRule, DropoutConfig], FlatJudge] = {}
        self._counts = torch.zeros(NUM_COUNTS, dtype=torch.float64, device=device)
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self._snapshot: _Snapshot | None = None
        self.num_dummy_passes = 0
        self._has_warned = False

    def activate(self, model: Any) -> dict[str, Any]:
        """Build the head once the model is loaded. Returns what the engine wants to know."""
        self._head = VLLMHead(model, hidden_size=self._hidden_size, dtype=self._dtype, device=self.device)
        return {"has_weight": self._head.weight is not None, "vocab_size": self._head.vocab_size}

    @property
    def p_drop(self) -> PDrop:
        """The server's p_drop, a number once it is settled."""
        return self._p_drop

    @property
    def is_settled(self) -> bool:
        return not isinstance(self._p_drop, str)

    def read(self, extra: dict[str, object] | None) -> RequestSettings:
        """A request's settings. They were checked when the request came in."""
        return parse_request(self.config, extra)

    def asked(self, params: Any, temperature: float) -> Asked:
        """A request by vLLM's sampling parameters, at the temperature that the runner decodes it with."""
        seed = self.config.seed if params.seed is None else params.seed
        return Asked(self.read(params.extra_args), seed, temperature)

    def settle(self) -> float:
        """Choose p_drop from the hidden states that `captured` holds."""
        if self._head is None or not self.captured:
            raise StateError("p_drop='auto' has no hidden states to measure the radius at.")
        states = torch.cat(self.captured)
        self.captured = None
        config = self.config.dropout(self.config.k, self.config.p_drop)
        rule = self.config.settings().rule
        expected = self._p_drop == "auto-expected" or (rule is not None and is_closed_form(rule))
        self._p_drop = choose_p_drop(self._head, states, config, expected=expected).p_drop
        return self._p_drop

    def decide(self, drafts: Drafts) -> Steering:
        """Judge one step's drafted tokens, each request by its own settings."""
        M = drafts.tokens.shape[0]
        logit = torch.full((M,), torch.nan, device=self.device)
        refuse = torch.zeros(M, dtype=torch.bool, device=self.device)
        starts = np.cumsum([0, *drafts.num_drafts])
        for (settings, is_sampled), members in self._groups(drafts).items():
            index = torch.arange(M, device=self.device)
            if len(members) < len(drafts.requests):
                index = self.to_device(np.concatenate([np.arange(starts[b], starts[b + 1]) for b in members]))
            rows = self._rows(drafts, members, starts, index, settings)
            decision = self._judge(settings)(rows, is_sampled=is_sampled)
            logit[index] = decision.logit
            refuse[index] = decision.refuse
            counted = torch.stack([decision.code.double(), decision.share.double(), decision.lossy.double()])
            self._pending.append((index, counted, decision.asked))
            if settings.needs_distribution and drafts.draft_logits is None and not self.config.point_mass:
                self._counts[COUNTS.index("unknown")] += len(index)
        return Steering(logit, refuse)

    def _groups(self, drafts: Drafts) -> dict[tuple[RequestSettings, bool], list[int]]:
        """Requests that are judged alike, in the order of the batch."""
        groups: dict[tuple[RequestSettings, bool], list[int]] = {}
        for b, (asked, count) in enumerate(zip(drafts.requests, drafts.num_drafts, strict=True)):
            is_waiting = isinstance(asked.settings.dropout.p_drop, str) and not self.is_settled
            if count > 0 and asked.settings.rule is not None and not is_waiting and self._can_judge(asked.settings):
                groups.setdefault((asked.settings, asked.temperature > 0), []).append(b)
        return groups

    def _can_judge(self, settings: RequestSettings) -> bool:
        """False where a request asks for rows of a head that shows none. The front end knows no head, and an error here
        would end the server for all, so such a request keeps vLLM's lossless verification, and the log says so once."""
        if not settings.needs_weight or self._head is None or self._head.weight is not None:
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "A request asks for a rule in closed form (%s), which reads rows of the LM head's weight, and this "
                "server's is quantised or not a plain matrix. Such requests are decoded losslessly. Use a sampled "
                "rule, such as 'dropmatch'.",
                settings.rule,
            )
        return False

    def _rows(
        self, drafts: Drafts, members: list[int], starts: np.ndarray, index: Tensor, settings: RequestSettings
    ) -> FlatRows:
        counts = [drafts.num_drafts[b] for b in members]
        seed = self.to_device(np.repeat(np.array([drafts.requests[b].seed for b in members], dtype=np.int64), counts))
        temperature = np.array([drafts.requests[b].temperature for b in members], dtype=np.float32)
        positions = drafts.positions[index].long()
        if settings.dropout.mask_sharing == "round":
            first = self.to_device(np.repeat(starts[members], counts))
            positions = drafts.positions[first].long() - 1  # the root's own, as the tree engine keys a round
        elif settings.dropout.mask_sharing == "fixed":
            positions = torch.zeros_like(positions)
        draft = drafts.draft_logits
        logits: Callable[[Tensor], Tensor] | None = None
        if draft is not None:
            logits = lambda i: draft(index[i])  # noqa: E731  # a def would need its own copy of `draft`
        elif not self.config.point_mass:
            vocab = drafts.raw.shape[-1]
            logits = lambda i: torch.full((len(i), vocab), torch.nan, device=self.device)  # noqa: E731
        return FlatRows(
            hidden=drafts.hidden,
            raw=drafts.raw,
            final=drafts.final,
            raw_row=drafts.raw_row[index],
            final_row=drafts.final_row[index],
            tokens=drafts.tokens[index].long(),
            keys=torch.stack([seed, torch.zeros_like(seed), positions], dim=-1),
            temperature=self.to_device(np.repeat(temperature, counts)),
            draft_logits=logits,
        )

    def _judge(self, settings: RequestSettings) -> FlatJudge:
        assert settings.rule is not None
        key = (settings.rule, settings.dropout)
        if key not in self._judges:
            if len(self._judges) >= _MOST_JUDGES:
                self._judges.pop(next(iter(self._judges)))
            self._judges[key] = self._new_judge(settings)
        return self._judges[key]

    def _new_judge(self, settings: RequestSettings) -> FlatJudge:
        if self._head is None:
            raise StateError("The plugin was asked for a decision before the model was loaded.")
        assert settings.rule is not None
        dropout = settings.dropout
        if isinstance(dropout.p_drop, str):
            dropout = self.config.dropout(dropout.num_paths, self._p_drop)
        automatic: Ask = "open" if self.device.type == "cpu" else "all"
        ask: Ask = automatic if self.config.ask == "auto" else self.config.ask
        head = MCDropoutHead(self._head, dropout)
        return FlatJudge(settings.rule, head, memory_bytes=self.config.memory_bytes, ask=ask)

    def count(self, accepted: Tensor) -> None:
        """Add up the step's decisions. accepted: [M] bool, which drafted tokens the engine kept."""
        for index, (code, share, lossy), asked in self._pending:
            kept = accepted[index].double()
            self._counts[0] += len(index)
            self._counts[1] += asked.sum()
            self._counts[2] += (kept * lossy).sum()
            reasons = self._counts[len(COUNTS) :]
            reasons.index_add_(0, code.long(), kept * share)
            reasons[int(Reason.RATIO)] += (kept * (1.0 - share)).sum()
        if self._pending:
            self._pending = []
            self._snapshot = _Snapshot(self._counts)

    def counts(self) -> list[float]:
        """All counts so far; waits for the device."""
        return [float(value) for value in self._counts.tolist()]

    def reset_counts(self) -> None:
        self._counts.zero_()
        self._snapshot = None

    def take_snapshot(self) -> _Snapshot | None:
        """The counts behind the last step, once."""
        snapshot, self._snapshot = self._snapshot, None
        return snapshot

    def dummy_pass(self, max_rows: int) -> None:
        """Judge a full block of noise, so that memory profiling sees what judging takes."""
        settings = self.config.settings()
        if settings.rule is None or max_rows == 0 or self._head is None:
            return
        if not self.is_settled:
            settings = RequestSettings(settings.rule, self.config.dropout(self.config.k, 0.3))
        judge = self._new_judge(settings)
        M = min(judge.block(self._hidden_size), max_rows)
        hidden = torch.randn(M, self._hidden_size, device=self.device).to(self._dtype)
        raw = self._head(hidden)
        index = torch.arange(M, device=self.device)
        zeros = torch.zeros_like(index)
        for temperature in (0.0, 1.0):
            if temperature > 0 and settings.is_greedy_only:
                continue
            rows = FlatRows(
                hidden=hidden,
                raw=raw,
                final=raw.float(),
                raw_row=index,
                final_row=index,
                tokens=zeros,
                keys=torch.stack([zeros, zeros, index], dim=-1),
                temperature=torch.full((M,), temperature, device=self.device),
                draft_logits=lambda i: raw[i].float(),
            )
            judge(rows, is_sampled=temperature > 0)
        self.num_dummy_passes += 1

    def places(self, num_drafts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Request and place in its draft of each drafted token. Two [M] on the device."""
        counts = np.asarray(num_drafts)
        request = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(request)) - np.repeat(np.cumsum(counts) - counts, counts)
        both = self.to_device(np.stack([request, place]))
        return both[0], both[1]

    def to_device(self, values: np.ndarray) -> Tensor:
        """A small host array on the device, without waiting."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


class _Snapshot:
    """Counts on their way to the host."""

    def __init__(self, counts: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if counts.device.type == "cuda":
            self._host = torch.empty_like(counts, device="cpu", pin_memory=True)
            self._host.copy_(counts, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = counts.cpu().clone()

    def read(self) -> list[float]:
        """Wait for the copy. Called where vLLM itself has waited for the same step's tokens."""
        if self._event is not None:
            self._event.synchronize()
        return [float(value) for value in self._host.tolist()]


def wrap_init(original: Any, config: PluginConfig) -> Any:
    """A runner's __init__ that gives the runner its hook."""

    @functools.wraps(original)
    def init(self: Any, vllm_config: Any, device: torch.device, *args: Any, **options: Any) -> None:
        original(self, vllm_config, device, *args, **options)
        model = vllm_config.model_config
        hook = Hook(config, hidden_size=model.get_hidden_size(), dtype=model.dtype, device=torch.device(device))
        setattr(self, ATTRIBUTE, hook)

    return init


def wrap_dummy_run(original: Any) -> Any:
    """A runner's _dummy_sampler_run that judges a block of noise too."""

    @functools.wraps(original)
    def dummy_run(self: Any, *args: Any, **options: Any) -> Any:
        output = original(self, *args, **options)
        hook = hook_of(self)
        if hook is not None:
            hook.dummy_pass(_max_drafted_rows(self.vllm_config))
        return output

    return dummy_run


def hook_of(runner: Any) -> Hook | None:
    return getattr(runner, ATTRIBUTE, None)


def report(hook: Hook, output: Any) -> Any:
    """Attach the step's counts to what the runner hands to the engine, when its tokens have reached the host."""
    from dropmatch.vllm.metrics import COUNTS_ATTRIBUTE

    snapshot = hook.take_snapshot()
    if snapshot is None or output is None:
        return output
    if not hasattr(output, "get_output"):
        setattr(output, COUNTS_ATTRIBUTE, snapshot.read())
        return output
    wait = output.get_output

    def get_output() -> Any:
        result = wait()
        setattr(result, COUNTS_ATTRIBUTE, snapshot.read())
        return result

    output.get_output = get_output
    return output


def _max_drafted_rows(vllm_config: Any) -> int:
    """Most drafted tokens that one step can bring."""
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    drafted = scheduler.max_num_seqs * speculative.num_speculative_tokens
    return int(min(drafted, scheduler.max_num_batched_tokens))


def check_weight(settings: RequestSettings, has_weight: bool, rule: str) -> None:
    """Raise ConfigError where a rule reads rows of a head that shows none."""
    if settings.needs_weight and not has_weight:
        raise ConfigError(
            f"Rule {rule!r} reads rows of the LM head's weight, and this server's is split over devices, quantised or "
            "not a plain matrix. Use a sampled rule, such as 'dropmatch' or 'dropmatch-naive', or one device."
        )
