"""Training-free speculative decoding that keeps more drafted tokens: Monte Carlo dropout on the target's LM head.

    import dropmatch

    decoder = dropmatch.load("default")
    print(decoder.generate("Write a haiku about dropout.").text)

Lossy by design: with any rule but "lossless" and "exact" the output can differ from the target's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dropmatch import hf
    from dropmatch.api import Decoder, Generation, Run, load
    from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
    from dropmatch.core.acceptance import (
        AnyOf,
        Guard,
        HeadMatch,
        JSDivergence,
        MajorityMatch,
        RejectionSampling,
        RuleOptions,
        TargetMatch,
        make_rule,
        rule_names,
    )
    from dropmatch.core.calibrate import SaturationWarning
    from dropmatch.core.engine import Chunk, SpeculativeEngine
    from dropmatch.core.reasons import Reason
    from dropmatch.errors import DropMatchError

# name -> module. Loaded at first use, so that `import dropmatch` and the command line stay quick.
_HOMES = {
    "AnyOf": "core.acceptance",
    "Chunk": "core.engine",
    "Decoder": "api",
    "DropMatchError": "errors",
    "DropoutConfig": "config",
    "EngineConfig": "config",
    "Generation": "api",
    "Guard": "core.acceptance",
    "HeadMatch": "core.acceptance",
    "JSDivergence": "core.acceptance",
    "MajorityMatch": "core.acceptance",
    "Reason": "core.reasons",
    "RejectionSampling": "core.acceptance",
    "RuleOptions": "core.acceptance",
    "Run": "api",
    "SamplingParams": "config",
    "SaturationWarning": "core.calibrate",
    "SpeculativeEngine": "core.engine",
    "TargetMatch": "core.acceptance",
    "hf": "hf",
    "load": "api",
    "make_rule": "core.acceptance",
    "rule_names": "core.acceptance",
}

__all__ = [
    "AnyOf",
    "Chunk",
    "Decoder",
    "DropMatchError",
    "DropoutConfig",
    "EngineConfig",
    "Generation",
    "Guard",
    "HeadMatch",
    "JSDivergence",
    "MajorityMatch",
    "Reason",
    "RejectionSampling",
    "RuleOptions",
    "Run",
    "SamplingParams",
    "SaturationWarning",
    "SpeculativeEngine",
    "TargetMatch",
    "hf",
    "load",
    "make_rule",
    "rule_names",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dropmatch' has no attribute {name!r}")
    module = importlib.import_module(f"dropmatch.{_HOMES[name]}")
    return module if name == "hf" else getattr(module, name)
