"""The V1 model runner (vllm/v1/worker/gpu_model_runner.py): CPU, and what V2 does not serve.

`rejection_sample` gets, for each drafted token, the logits as its sampler compares them; the hidden states lie in the
state that `execute_model` leaves for `sample_tokens`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropmatch.vllm.hook import (
    ATTRIBUTE,
    Asked,
    Drafts,
    current,
    hook_of,
    report,
    wrap_dummy_run,
    wrap_init,
)
from dropmatch.vllm.settings import PluginConfig


@dataclass(frozen=True, slots=True)
class _Step:
    """What `rejection_sample` and the drafter are not told. metadata: None in a step that verifies no drafts."""

    runner: Any
    metadata: Any
    hidden: Tensor
    raw: Tensor


def install(config: PluginConfig) -> None:
    """Wrap the runner's methods. Once per process."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if hasattr(rejection_sampler.rejection_sample, ATTRIBUTE):
        return
    runner: Any = GPUModelRunner
    runner.__init__ = wrap_init(runner.__init__, config)
    runner.sample_tokens = _wrap_sample_tokens(runner.sample_tokens)
    runner._dummy_sampler_run = wrap_dummy_run(runner._dummy_sampler_run)
    proposer: Any = SpecDecodeBaseProposer
    proposer._sample_draft_tokens = _wrap_draft_tokens(proposer._sample_draft_tokens, config)
    rejection_sampler.rejection_sample = _wrap_rejection(rejection_sampler.rejection_sample)


def _wrap_sample_tokens(original: Any) -> Any:
    @functools.wraps(original)
    def sample_tokens(self: Any, *args: Any, **options: Any) -> Any:
        hook, state = hook_of(self), self.execute_model_state
        if hook is None or state is None:
            return original(self, *args, **options)
        if hook.captured is not None:
            hook.captured.append(state.hidden_states[: state.scheduler_output.total_num_scheduled_tokens].clone())
        hook.step = _Step(self, state.spec_decode_metadata, state.sample_hidden_states, state.logits)
        token = current.set(hook)
        try:
            output = original(self, *args, **options)
        finally:
            current.reset(token)
            hook.step = None
        return report(hook, output)

    return sample_tokens


def _wrap_draft_tokens(original: Any, config: PluginConfig) -> Any:
    @functools.wraps(original)
    def sample_draft_tokens(self: Any, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        # stock gives no distribution where all requests are greedy, since its greedy test needs none
        if not self._enable_probabilistic_draft_probs or not sampling_metadata.all_greedy:
            tokens, probs = original(self, hidden_states, sampling_metadata)
            if probs is not None:
                draw_by_seed(tokens, probs, sampling_metadata.generators, _reads_prompt())
            return tokens, probs
        logits = self.model.compute_logits(hidden_states)
        return logits.argmax(dim=-1), logits.softmax(dim=-1, dtype=torch.float32)

    setattr(sample_draft_tokens, ATTRIBUTE, config)
    return sample_draft_tokens


def _reads_prompt() -> np.ndarray | None:
    """Which rows of this step are still reading their prompt, whose draft nobody will use. [B] bool on the host."""
    hook = current.get()
    mask = None if hook is None or hook.step is None else getattr(hook.step.runner, "discard_request_mask", None)
    return None if mask is None else mask.np


def draw_by_seed(
    tokens: Tensor, probs: Tensor, generators: Mapping[int, torch.Generator], unused: np.ndarray | None
) -> None:
    """Draw anew, in place, the drafted tokens of requests that have a seed: vLLM draws all drafts from one stream.

    tokens: [B]; probs: [B, V]; generators: of the rows with a seed, as they serve the target's draws too; unused: [B]
    rows that must not move their generator.
    """
    for row, generator in generators.items():
        if unused is None or not unused[row]:
            noise = torch.empty_like(probs[row]).exponential_(generator=generator)
            tokens[row] = (probs[row] / noise).argmax()


def _wrap_rejection(original: Any) -> Any:
    @functools.wraps(original)
    def rejection_sample(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        hook = current.get()

        def stock(drafted: Tensor) -> Tensor:
            output: Tensor = original(
                drafted,
                num_draft_tokens,
                max_spec_len,
                cu_num_draft_tokens,
                draft_probs,
                target_logits,
                bonus_token_ids,
                sampling_metadata,
                *args,
                **options,
            )
            return output

        step: _Step | None = None if hook is None else hook.step
        if hook is None or step is None:
            return stock(draft_token_ids)
        drafts = _drafts(step, draft_token_ids, num_draft_tokens, draft_probs, target_logits)
        steering = hook.decide(drafts)
        restore = steering.apply(target_logits, drafts.final_row, draft_token_ids)
        # an id of -1 equals no argmax, so that the greedy test refuses it and emits the target's own token
        output = stock(torch.where(steering.refuse, -1, draft_token_ids).contiguous())
        restore()
        num_kept = (output != -1).sum(-1) - 1  # [B]; the token after the kept ones is emitted too
        request, place = hook.places(num_draft_tokens)
        hook.count(place < num_kept[request])
        return output

    setattr(rejection_sample, ATTRIBUTE, True)
    return rejection_sample


def _drafts(
    step: _Step, drafted: Tensor, num_drafts: list[int], draft_probs: Tensor | None, target_logits: Tensor
) -> Drafts:
    runner, metadata = step.runner, step.metadata
    row = metadata.target_logits_indices
    requests = [_asked(runner, request) for request in runner.input_batch.req_ids[: len(num_drafts)]]
    is_sampled = any(asked.temperature > 0 for asked in requests)
    return Drafts(
        requests=requests,
        num_drafts=num_drafts,
        tokens=drafted,
        positions=_positions(runner)[metadata.logits_indices[row]] + 1,
        hidden=step.hidden,
        raw=step.raw,
        final=target_logits,
        raw_row=row,
        final_row=torch.arange(len(drafted), device=drafted.device),
        draft_logits=None
        if draft_probs is None
        else _untempered(draft_probs, requests, num_drafts, runner, is_sampled=is_sampled),
    )


def _asked(runner: Any, request: str) -> Asked:
    hook = hook_of(runner)
    assert hook is not None
    params = runner.requests[request].sampling_params
    # below this vLLM itself decodes greedily
    return hook.asked(params, 0.0 if params.temperature < 1e-5 else params.temperature)


def _positions(runner: Any) -> Tensor:
    positions = runner.positions
    return positions if isinstance(positions, Tensor) else positions.gpu


def _untempered(
    draft_probs: Tensor, requests: list[Asked], num_drafts: list[int], runner: Any, *, is_sampled: bool
) -> Any:
    """The drafter's logits at temperature 1 from probabilities that carry each request's temperature."""
    hook = hook_of(runner)
    assert hook is not None
    if not is_sampled:
        return lambda index: draft_probs[index].log()
    request, _ = hook.places(num_drafts)
    temperature = hook.to_device(np.array([asked.temperature or 1.0 for asked in requests], dtype=np.float32))[request]
    return lambda index: draft_probs[index].log() * temperature[index][:, None]
