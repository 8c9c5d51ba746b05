"""The engine process: every worker must be hooked, counts pass through, and p_drop="auto" is measured before work."""

from __future__ import annotations

import logging
import time
from typing import Any

from dropmatch.core.calibrate import PROBE_TEXT
from dropmatch.errors import StateError
from dropmatch.vllm import compat, metrics
from dropmatch.vllm.hook import ATTRIBUTE, Hook, check_weight, hook_of
from dropmatch.vllm.install import given_config, wrap
from dropmatch.vllm.settings import PluginConfig, parse_config

logger = logging.getLogger(__name__)

_PROBE = "dropmatch-probe"
_SHORTEST_PROBE = 8


def install(vllm_config: Any) -> None:
    """Wrap scheduler and loop. Raises where this vLLM or its configuration does not fit."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc

    from dropmatch.vllm.frontend import check_config

    compat.check_vllm(compat.COMMON)
    check_config(vllm_config)
    wrap(Scheduler, "update_from_output", _remembers)
    wrap(Scheduler, "make_stats", _attaches)
    wrap(EngineCoreProc, "run_busy_loop", _settles_first)


def check_workers(executor: Any, vllm_config: Any) -> None:
    """Build each worker's head. Raises StateError if any worker is not hooked."""
    config = parse_config(given_config(vllm_config))
    found = executor.collective_rpc(activate)
    if not all(found):
        names = sorted({str(answer) for answer in executor.collective_rpc(runner_name)})
        raise StateError(
            f"DropMatch is configured, but {found.count(None)} of {len(found)} workers run without it (model runner: "
            f'{", ".join(names)}). Load the plugin in all processes (is VLLM_PLUGINS set?), or remove "dropmatch" from '
            "--additional-config."
        )
    check_weight(config.settings(), all(answer["has_weight"] for answer in found if answer), config.rule)


def activate(worker: Any) -> dict[str, Any] | None:
    """In a worker: build the head. None where the runner is not hooked."""
    hook = hook_of(worker.model_runner)
    return None if hook is None else hook.activate(worker.model_runner.model)


def runner_name(worker: Any) -> str:
    kind = type(worker.model_runner)
    return f"{kind.__module__}.{kind.__qualname__}"


def forget_warm_up(executor: Any) -> None:
    executor.collective_rpc(_forget)


def _forget(worker: Any) -> None:
    _own_hook(worker).reset_counts()


def _own_hook(worker: Any) -> Hook:
    hook = hook_of(worker.model_runner)
    if hook is None:
        raise StateError(f"The model runner {runner_name(worker)} has no {ATTRIBUTE}.")
    return hook


def status(worker: Any) -> dict[str, Any]:
    """For operators and tests: what a worker's hook is doing."""
    hook = _own_hook(worker)
    return {
        "p_drop": hook.p_drop,
        "dummy_passes": hook.num_dummy_passes,
        "runner": runner_name(worker),
        "counts": hook.counts(),
    }


def settle_p_drop(core: Any) -> None:
    """Measure p_drop="auto": one prompt runs through the idle engine, and the workers look at its hidden states."""
    config: PluginConfig = parse_config(given_config(core.vllm_config))
    if not isinstance(config.p_drop, str) or config.settings().rule is None:
        return
    executor = core.model_executor
    executor.collective_rpc(_capture)
    _run_probe(core)
    chosen = executor.collective_rpc(_settle)
    values = {value for value in chosen if value is not None}
    if len(values) != 1:
        raise StateError(f"p_drop={config.p_drop!r}: the workers chose differently: {chosen}. Give a number.")
    executor.collective_rpc(_forget)
    logger.info("DropMatch measured p_drop=%s on this model.", values.pop())


def _capture(worker: Any) -> None:
    _own_hook(worker).captured = []


def _settle(worker: Any) -> float | None:
    hook = _own_hook(worker)
    if not hook.captured:  # a pipeline stage without the LM head
        hook.captured = None
        return None
    return hook.settle()


def _run_probe(core: Any) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    request = EngineCoreRequest(
        request_id=_PROBE,
        prompt_token_ids=_probe_ids(core.vllm_config),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=_PROBE,  # so that no user's prompt meets its cached blocks
        data_parallel_rank=None,
    )
    core.add_request(*core.preprocess_add_request(request))
    while core.scheduler.has_requests():
        core.step_fn()


def _probe_ids(vllm_config: Any) -> list[int]:
    """The built-in text that radii are measured on, cut to what one prompt may hold."""
    from vllm.tokenizers import cached_tokenizer_from_config

    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        raise StateError("p_drop='auto' needs the tokenizer, and skip_tokenizer_init is set. Give a number.")
    ids = list(cached_tokenizer_from_config(model).encode(PROBE_TEXT))
    room = model.max_model_len - 1
    if room < _SHORTEST_PROBE:
        raise StateError(f"p_drop='auto' needs prompts of {_SHORTEST_PROBE} tokens, and max_model_len is {room + 1}.")
    return ids[:room]


def _remembers(original: Any) -> Any:
    def update_from_output(self: Any, scheduler_output: Any, output: Any, *args: Any, **options: Any) -> Any:
        metrics.remember(self, output)
        return original(self, scheduler_output, output, *args, **options)

    return update_from_output


def _attaches(original: Any) -> Any:
    def make_stats(self: Any, *args: Any, **options: Any) -> Any:
        stats = original(self, *args, **options)
        metrics.attach(self, stats)
        return stats

    return make_stats


def _settles_first(original: Any) -> Any:
    def run_busy_loop(self: Any, *args: Any, **options: Any) -> Any:
        if given_config(self.vllm_config) is not None:
            settle_p_drop(self)
        return original(self, *args, **options)

    return run_busy_loop
