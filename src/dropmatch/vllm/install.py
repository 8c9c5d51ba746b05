"""Where the plugin gets into vLLM's processes, and when it stays out.

vLLM calls `watch` in the front end, the engine and each worker. It wraps three functions that see the configuration;
everything else is wrapped only where "dropmatch" is configured, after versions and signatures were checked.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from dropmatch.vllm.settings import KEY

_MARK = "_dropmatch"


def watch() -> None:
    """Wrap what sees the configuration, in modules that this process has loaded."""
    if "vllm.engine.arg_utils" in sys.modules:
        from vllm.engine.arg_utils import EngineArgs

        wrap(EngineArgs, "create_engine_config", _configured)
    if "vllm.v1.engine.core" in sys.modules:
        _watch_engine()
    if "vllm.v1.worker.worker_base" in sys.modules:
        _watch_workers()


def _watch_engine() -> None:
    from vllm.v1.engine.core import EngineCore

    wrap(EngineCore, "_initialize_kv_caches", _engine_starts)
    _watch_workers()  # an engine may make its worker in its own process


def _watch_workers() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    wrap(WorkerBase, "__init__", _worker_starts)


def wrap(owner: Any, name: str, wrapper: Any) -> None:
    """Replace owner.name by wrapper(original), once."""
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapped = functools.wraps(original)(wrapper(original))
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)


def given_config(vllm_config: Any) -> object:
    """The operator's settings as given, None where the plugin is not asked for."""
    additional = getattr(vllm_config, "additional_config", None)
    return additional.get(KEY) if isinstance(additional, Mapping) else None


def _configured(original: Any) -> Any:
    def create_engine_config(self: Any, *args: Any, **options: Any) -> Any:
        vllm_config = original(self, *args, **options)
        if given_config(vllm_config) is not None:
            from dropmatch.vllm import frontend

            frontend.install(vllm_config)
            if "vllm.v1.engine.core" in sys.modules:
                _watch_engine()
        return vllm_config

    return create_engine_config


def _engine_starts(original: Any) -> Any:
    def initialize_kv_caches(self: Any, vllm_config: Any, *args: Any, **options: Any) -> Any:
        if given_config(vllm_config) is None:
            return original(self, vllm_config, *args, **options)
        from dropmatch.vllm import engine

        engine.install(vllm_config)
        engine.check_workers(self.model_executor, vllm_config)
        output = original(self, vllm_config, *args, **options)
        engine.forget_warm_up(self.model_executor)
        return output

    return initialize_kv_caches


def _worker_starts(original: Any) -> Any:
    def init(self: Any, vllm_config: Any, *args: Any, **options: Any) -> None:
        given = given_config(vllm_config)
        if given is not None:
            from dropmatch.vllm import compat
            from dropmatch.vllm.settings import parse_config

            config = parse_config(given)
            if vllm_config.use_v2_model_runner:
                from dropmatch.vllm import v2

                compat.check_vllm(compat.V2)
                v2.install(config)
            else:
                from dropmatch.vllm import v1

                compat.check_vllm(compat.V1)
                v1.install(config)
        original(self, vllm_config, *args, **options)

    return init
