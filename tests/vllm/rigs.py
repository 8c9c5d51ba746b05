"""What stock vLLM needs to run on a CPU where its own support has gaps. For tests only; apply before importing vllm.

v2: Model Runner V2 needs Triton, which has no CPU back end; its interpreter runs the kernels, slowly.
v1-sampling: stock V1 speculative decoding at temperature > 0 expands per-request values through int64 on CPUs.
"""

from __future__ import annotations

import os
import types
from typing import Any


def apply(name: str | None) -> None:
    if name == "v2":
        _interpret_triton()
    elif name == "v1-sampling":
        _mend_expand()
    elif name is not None:
        raise ValueError(f"Unknown rig {name!r}.")


def _interpret_triton() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    import numpy as np
    import triton.backends
    from triton.runtime.interpreter import InterpreterBuilder

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)

    def with_bool_mask(name: str, place: int) -> None:
        """The interpreter's masks may be integers, which numpy's indexing does not take for masks."""
        original = getattr(InterpreterBuilder, name)

        def call(self: Any, pointers: Any, *args: Any) -> Any:
            mask = args[place]
            data = getattr(mask, "data", None)
            if data is not None and data.dtype != np.bool_:
                mask.data = data.astype(np.bool_)
            return original(self, pointers, *args)

        setattr(InterpreterBuilder, name, call)

    with_bool_mask("create_masked_load", 0)
    with_bool_mask("create_masked_store", 1)
    import triton.language as tl
    import vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils as stock

    # the interpreter knows no device library
    stock.tldevice = types.SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))


def _mend_expand() -> None:
    import torch
    import vllm.v1.sample.rejection_sampler as stock

    def expand(output: Any, values: Any, cu_num_tokens: Any, replace_from: int, replace_to: int) -> None:
        counts = torch.diff(cu_num_tokens.long(), prepend=torch.zeros(1, dtype=torch.int64))
        replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
        output.copy_(replaced.repeat_interleave(counts))

    expand.register_warmup = lambda *args, **options: None  # type: ignore[attr-defined]
    stock._expand = expand


def watch_for_waits() -> None:
    """Make every step of the plugin fail that would wait for the device or ask it for a shape."""
    from dropmatch.vllm import hook, v1, v2
    from watches import NoWaiting

    def watched(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            with NoWaiting():
                return original(*args, **options)

        setattr(owner, name, call)

    watched(hook.Hook, "decide")
    watched(hook.Hook, "count")
    watched(hook.Hook, "places")
    watched(hook.Steering, "apply")
    watched(v1, "_drafts")
    watched(v2._Chunk, "drafts")
    watched(v2._Chunk, "__init__")
