"""The front end: the whole configuration is checked before a model is loaded, and each request when it comes in."""

from __future__ import annotations

import functools
import logging
from typing import Any

from dropmatch.core.acceptance import Need
from dropmatch.core.flat import judging_bytes
from dropmatch.errors import ConfigError
from dropmatch.vllm import compat
from dropmatch.vllm.compat import UnsupportedVLLMError
from dropmatch.vllm.install import given_config, wrap
from dropmatch.vllm.metrics import Counters, detach
from dropmatch.vllm.settings import KEY, PREFIX, PluginConfig, RequestSettings, parse_config, parse_request

logger = logging.getLogger(__name__)

WITH_DISTRIBUTION = ("draft_model", "eagle", "eagle3", "mtp")
METHODS = ("ngram", *WITH_DISTRIBUTION)
_COUNTERS = "_dropmatch_counters"


def install(vllm_config: Any) -> None:
    """Check everything and wrap the front end. Raises ConfigError or UnsupportedVLLMError."""
    compat.check_vllm(compat.COMMON + compat.REQUESTS)
    config = check_config(vllm_config)
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.metrics.loggers import StatLoggerManager

    wrap(InputProcessor, "_validate_params", _checks_request)
    for seam in compat.REQUESTS:
        owner, _, name = seam.path.rpartition(".")
        wrap(compat.Seam(owner, ()).find(), name, functools.partial(_checks_early, vllm_config=vllm_config))
    wrap(StatLoggerManager, "__init__", _makes_counters)
    wrap(StatLoggerManager, "record", _counts)
    wrap(InprocClient, "__init__", _calibrates)
    logger.info("DropMatch is on: %s. Outputs may differ from the target's own.", config)


def check_config(vllm_config: Any) -> PluginConfig:
    """The plugin's settings, checked against the rest of the server's. May switch draft_sample_method (see below)."""
    config = parse_config(given_config(vllm_config))
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise ConfigError(
            f'"{KEY}" in --additional-config judges drafted tokens, and this server drafts none. Add '
            '--speculative-config, such as \'{"model": DRAFT, "num_speculative_tokens": 10}\'.'
        )
    _refuse_features(vllm_config)
    if speculative.method not in METHODS:
        raise UnsupportedVLLMError(
            f"Speculative method {speculative.method!r} is not supported. Use one of {', '.join(METHODS)}, or remove "
            f'"{KEY}" from --additional-config.'
        )
    settings = config.settings()
    if settings.needs_distribution and not config.point_mass and _can_give_distribution(speculative):
        # vLLM drafts greedily unless told otherwise and keeps no distribution then; at temperature 0 the drafted tokens
        # are the same either way
        if speculative.draft_sample_method != "probabilistic":
            logger.info(
                "Rule %r reads the drafter's distribution: draft_sample_method is 'probabilistic'.", config.rule
            )
        speculative.draft_sample_method = "probabilistic"
    check_settings(settings, config, vllm_config, rule=config.rule)
    if isinstance(config.p_drop, str) and vllm_config.parallel_config.data_parallel_size > 1:
        raise ConfigError(
            f"p_drop={config.p_drop!r} measures the model at start, which does not work with data parallelism. Give a "
            "number."
        )
    return config


def _refuse_features(vllm_config: Any) -> None:
    speculative = vllm_config.speculative_config
    refused = {
        f"rejection_sample_method={speculative.rejection_sample_method!r}": speculative.rejection_sample_method
        != "standard",
        "adaptive verification": getattr(speculative, "enable_adaptive_verification", False),
        "parallel drafting": getattr(speculative, "parallel_drafting", False),
        "batch-sharded sampling": getattr(vllm_config.parallel_config, "enable_batch_sharded_sampling", False),
        "watermarking": getattr(vllm_config, "watermark_config", None) is not None,
        "diffusion models": getattr(vllm_config.model_config, "is_diffusion", False),
        "LoRA adapters": vllm_config.lora_config is not None,
    }
    for name, is_on in refused.items():
        if is_on:
            raise UnsupportedVLLMError(
                f'DropMatch does not go with {name}. Switch that off, or remove "{KEY}" from --additional-config.'
            )


def _can_give_distribution(speculative: Any) -> bool:
    return speculative.method in WITH_DISTRIBUTION and not getattr(speculative, "use_heterogeneous_vocab", False)


def check_settings(settings: RequestSettings, config: PluginConfig, vllm_config: Any, *, rule: str) -> None:
    """Raise ConfigError where this server cannot judge by these settings."""
    speculative = vllm_config.speculative_config
    has_distribution = _can_give_distribution(speculative) and speculative.draft_sample_method == "probabilistic"
    if settings.needs_distribution and not has_distribution and not config.point_mass:
        if _can_give_distribution(speculative):
            how = 'start the server with "draft_sample_method": "probabilistic" in --speculative-config'
        else:
            how = f"draft with one of {', '.join(WITH_DISTRIBUTION)} and one vocabulary"
        raise ConfigError(
            f"Rule {rule!r} compares distributions (js), and method {speculative.method!r} gives none here. Either "
            f"{how}, or use 'dropmatch-naive', 'majority' or 'exact+majority', or set \"point_mass\": true, which "
            "takes the draft for a point mass on its token and is another rule."
        )
    if settings.needs_weight and vllm_config.parallel_config.tensor_parallel_size > 1:
        raise ConfigError(
            f"Rule {rule!r} reads rows of the LM head's weight, which tensor parallelism splits. Use a sampled rule, "
            "such as 'dropmatch' or 'dropmatch-naive', or one device."
        )
    if settings.rule is None:
        return
    model, k = vllm_config.model_config, settings.dropout.num_paths
    row = judging_bytes(settings.rule, k, model.get_vocab_size(), model.get_hidden_size())
    if row > config.memory_bytes:
        smaller = "Give a smaller k, or start" if Need.HEADS in settings.rule.needs else "Start"
        raise ConfigError(
            f"Rule {rule!r} with k={k} takes {row // 2**20} MiB for one drafted token, and memory_mb is "
            f"{config.memory_mb}. {smaller} the server with a larger memory_mb."
        )


def check_request(params: Any, vllm_config: Any) -> None:
    """Raise ConfigError naming the field of vllm_xargs, where one request asks for what cannot be."""
    config = parse_config(given_config(vllm_config))
    extra = params.extra_args
    settings = parse_request(config, extra)
    rule = str((extra or {}).get(f"{PREFIX}rule", config.rule))
    try:
        check_settings(settings, config, vllm_config, rule=rule)
    except ConfigError as error:
        asked = ", ".join(f"{key}={value!r}" for key, value in (extra or {}).items() if key.startswith(PREFIX))
        raise ConfigError(f"{asked}: {error}") from None
    if settings.is_greedy_only and params.temperature > 0:
        raise ConfigError(
            f"{PREFIX}rule={rule!r} knows what heads do on average at temperature 0 alone, and this request has "
            f"temperature={params.temperature}. Give temperature 0, or {PREFIX}rule='dropmatch-naive' or 'lossless'."
        )


def _checks_request(original: Any) -> Any:
    def validate_params(self: Any, params: Any, *args: Any, **options: Any) -> Any:
        output = original(self, params, *args, **options)
        if hasattr(params, "extra_args") and given_config(self.vllm_config) is not None:
            _refuse_bad(params, self.vllm_config)
        return output

    return validate_params


def _checks_early(original: Any, *, vllm_config: Any) -> Any:
    """The server calls this before it begins to answer: a stream that has begun can no longer be a bad request."""

    def to_sampling_params(self: Any, *args: Any, **options: Any) -> Any:
        params = original(self, *args, **options)
        _refuse_bad(params, vllm_config)
        return params

    return to_sampling_params


def _refuse_bad(params: Any, vllm_config: Any) -> None:
    """Raise vLLM's own error for bad requests, which its server answers with status 400."""
    from vllm.exceptions import VLLMValidationError

    try:
        check_request(params, vllm_config)
    except ConfigError as error:
        raise VLLMValidationError(str(error), parameter="vllm_xargs") from error


def _makes_counters(original: Any) -> Any:
    def init(self: Any, vllm_config: Any, *args: Any, **options: Any) -> None:
        original(self, vllm_config, *args, **options)
        if given_config(vllm_config) is not None:
            setattr(self, _COUNTERS, Counters(vllm_config.model_config.served_model_name))

    return init


def _counts(original: Any) -> Any:
    def record(self: Any, scheduler_stats: Any, *args: Any, **options: Any) -> Any:
        counts = None if scheduler_stats is None else detach(scheduler_stats)
        counters = getattr(self, _COUNTERS, None)
        if counts is not None and counters is not None:
            engine = options.get("engine_idx")
            counters.update(0 if engine is None else engine, counts)
        return original(self, scheduler_stats, *args, **options)

    return record


def _calibrates(original: Any) -> Any:
    def init(self: Any, vllm_config: Any, *args: Any, **options: Any) -> None:
        original(self, vllm_config, *args, **options)
        if given_config(vllm_config) is not None:
            from dropmatch.vllm import engine

            engine.settle_p_drop(self.engine_core)

    return init
