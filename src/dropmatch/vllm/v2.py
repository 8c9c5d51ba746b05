"""Model Runner V2 (vllm/v1/worker/gpu/): the default on GPUs.

`GPUModelRunner.sample` has the hidden states, `RejectionSampler.__call__` the raw logits, and `rejection_sample` what
the sampler compares, a chunk of requests at a time. Row r verifies the token stored at row r + 1 of the same request;
a request's last row is its bonus row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dropmatch.vllm.hook import (
    ATTRIBUTE,
    Drafts,
    Hook,
    current,
    hook_of,
    report,
    wrap_dummy_run,
    wrap_init,
)
from dropmatch.vllm.settings import PluginConfig


@dataclass(slots=True)
class _Step:
    """What `rejection_sample` is not told. params: sampling parameters by request index; requests_seen: requests of
    this step whose chunks are done."""

    hidden: Tensor
    input_batch: Any
    raw: Tensor | None = None
    params: dict[int, Any] | None = None
    requests_seen: int = 0


def install(config: PluginConfig) -> None:
    """Wrap the runner's methods. Once per process."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    if hasattr(rejection_sampler.rejection_sample, ATTRIBUTE):
        return
    runner: Any = GPUModelRunner
    runner.__init__ = wrap_init(runner.__init__, config)
    runner.load_model = _wrap_load(runner.load_model)
    runner.sample = _wrap_sample(runner.sample)
    runner.sample_tokens = _wrap_sample_tokens(runner.sample_tokens)
    runner._dummy_sampler_run = wrap_dummy_run(runner._dummy_sampler_run)
    sampler: Any = Sampler
    sampler.add_request = _wrap_add_request(sampler.add_request)
    rejection: Any = rejection_sampler.RejectionSampler
    rejection.__call__ = _wrap_call(rejection.__call__)
    rejection_sampler.rejection_sample = _wrap_rejection(rejection_sampler.rejection_sample)


def _wrap_load(original: Any) -> Any:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **options: Any) -> Any:
        output = original(self, *args, **options)
        sampler = getattr(self, "sampler", None)
        if sampler is not None:
            setattr(sampler, ATTRIBUTE, {})  # request index -> SamplingParams
        return output

    return load_model


def _wrap_add_request(original: Any) -> Any:
    @functools.wraps(original)
    def add_request(self: Any, req_idx: int, *args: Any, **options: Any) -> Any:
        params = getattr(self, ATTRIBUTE, None)
        if params is not None:
            params[req_idx] = options.get("sampling_params", args[-1] if args else None)
        return original(self, req_idx, *args, **options)

    return add_request


def _wrap_sample(original: Any) -> Any:
    @functools.wraps(original)
    def sample(self: Any, hidden_states: Tensor, input_batch: Any, *args: Any, **options: Any) -> Any:
        hook = hook_of(self)
        if hook is None:
            return original(self, hidden_states, input_batch, *args, **options)
        if hook.captured is not None:
            hook.captured.append(hidden_states[: input_batch.num_tokens].clone())
        hook.step = _Step(hidden_states, input_batch)
        token = current.set(hook)
        try:
            return original(self, hidden_states, input_batch, *args, **options)
        finally:
            current.reset(token)
            hook.step = None

    return sample


def _wrap_sample_tokens(original: Any) -> Any:
    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **options: Any) -> Any:
        output = original(self, *args, **options)
        hook = hook_of(self)
        return output if hook is None else report(hook, output)

    return sample_tokens


def _wrap_call(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: Any, logits: Tensor, input_batch: Any, *args: Any, **options: Any) -> Any:
        hook = current.get()
        if hook is not None and hook.step is not None:
            hook.step.raw = logits
            hook.step.params = getattr(self.sampler, ATTRIBUTE)
        return original(self, logits, input_batch, *args, **options)

    return call


def _wrap_rejection(original: Any) -> Any:
    @functools.wraps(original)
    def rejection_sample(
        target_logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        cu_num_logits: Tensor,
        pos: Tensor,
        idx_mapping: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        *args: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        hook = current.get()

        def stock(logits: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
            output: tuple[Tensor, Tensor] = original(
                logits,
                draft_logits,
                drafted,
                cu_num_logits,
                pos,
                idx_mapping,
                expanded_idx_mapping,
                expanded_local_pos,
                *args,
                **options,
            )
            return output

        step: _Step | None = None if hook is None else hook.step
        if hook is None or step is None or step.raw is None:
            return stock(target_logits, draft_sampled)
        chunk = _Chunk(hook, step, len(cu_num_logits) - 1)
        if sum(chunk.num_drafts) == 0:
            return stock(target_logits, draft_sampled)
        if chunk.is_sampled and target_logits.dtype != torch.float32:
            target_logits = target_logits.float()  # raised logits need more bits than bfloat16 has
        row = chunk.row
        drafts = chunk.drafts(target_logits, draft_logits, draft_sampled, pos, expanded_idx_mapping, expanded_local_pos)
        steering = hook.decide(drafts)
        restore = steering.apply(target_logits, row, drafts.tokens)
        drafted = draft_sampled.clone()
        drafted[row + 1] = torch.where(steering.refuse, -1, drafted[row + 1])
        sampled, num_sampled = stock(target_logits, drafted)
        restore()
        request, place = hook.places(chunk.num_drafts)
        hook.count(place < num_sampled[request] - 1)
        return sampled, num_sampled

    setattr(rejection_sample, ATTRIBUTE, True)
    return rejection_sample


class _Chunk:
    """The requests of one call of `rejection_sample`: a stretch of the step's batch."""

    def __init__(self, hook: Hook, step: _Step, num_requests: int) -> None:
        batch = step.input_batch
        first, last = step.requests_seen, step.requests_seen + num_requests
        bounds = batch.cu_num_logits_np[first : last + 1]
        self.start = int(bounds[0])
        self.num_drafts = [int(n) - 1 for n in bounds[1:] - bounds[:-1]]
        assert step.params is not None
        params = [step.params[int(index)] for index in batch.idx_mapping_np[first:last]]
        self.requests = [hook.asked(each, float(each.temperature)) for each in params]
        self.is_sampled = any(asked.temperature > 0 for asked in self.requests)
        request, place = hook.places(self.num_drafts)
        starts = hook.to_device(bounds[:-1].astype("int64") - self.start)
        self.row = starts[request] + place  # [M] rows of this chunk that verify a drafted token
        self._hook, self._step = hook, step
        step.requests_seen = last

    def drafts(
        self,
        target_logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
    ) -> Drafts:
        row, step = self.row, self._step
        raw_row = row + self.start
        assert step.raw is not None
        state, place = expanded_idx_mapping[row].long(), expanded_local_pos[row].long()
        vocab = target_logits.shape[-1]

        def draft(index: Tensor) -> Tensor:
            assert draft_logits is not None
            logits = draft_logits[state[index], place[index]]
            missing = vocab - logits.shape[-1]  # padding may differ between the two models
            return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :vocab]

        return Drafts(
            requests=self.requests,
            num_drafts=self.num_drafts,
            tokens=draft_sampled[row + 1],
            positions=pos[row] + 1,
            hidden=step.hidden[step.input_batch.logits_indices],
            raw=step.raw,
            final=target_logits,
            raw_row=raw_row,
            final_row=row,
            draft_logits=None if draft_logits is None else draft,
        )
