"""What keeps a server from starting: unknown keys, missing drafters, features and versions that do not fit.

No model is loaded: the configuration is refused before that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dropmatch.errors import ConfigError, DropMatchError, StateError
from dropmatch.vllm import compat, engine, frontend
from dropmatch.vllm.compat import UnsupportedVLLMError
from dropmatch.vllm.settings import RULES
from engines import environment


def configure(pair: tuple[Path, Path], dropmatch: object, **options: Any) -> Any:
    """vLLM's own way from engine arguments to a configuration."""
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {
        "model": str(pair[0]),
        "enforce_eager": True,
        "max_model_len": 128,
        "dtype": "float32",
        "speculative_config": {"model": str(pair[1]), "num_speculative_tokens": 2},
        "additional_config": {} if dropmatch is None else {"dropmatch": dropmatch},
    }
    return EngineArgs(**(arguments | options)).create_engine_config()


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


def test_without_the_key_vllm_is_left_alone(pair: tuple[Path, Path]) -> None:
    assert configure(pair, None).speculative_config.draft_sample_method == "greedy"


def test_a_rule_that_reads_distributions_makes_the_drafter_keep_them(pair: tuple[Path, Path]) -> None:
    assert configure(pair, {"rule": "dropmatch"}).speculative_config.draft_sample_method == "probabilistic"
    assert configure(pair, {"rule": "dropmatch-naive"}).speculative_config.draft_sample_method == "greedy"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ruel": "dropmatch"}, "Did you mean 'rule'"),
        ({"rule": "typical"}, "Available: dropmatch, dropmatch-expected"),
        ({"rule": "lossless+js"}, "'lossless'"),
        ({"k": 0}, "k=0"),
        ({"p_drop": 1.5}, "p_drop=1.5"),
        ({"p_drop": "some"}, "p_drop"),
        ({"guard": -1}, "guard=-1"),
        ({"memory_mb": 0}, "memory_mb=0"),
        ({"k": 50_000}, "memory_mb"),
        ("dropmatch", "Give a JSON object"),
    ],
)
def test_a_bad_value_says_what_is_allowed(pair: tuple[Path, Path], given: object, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configure(pair, given)
    assert says in str(refused.value)


def test_a_server_with_a_bad_key_ends_and_says_what_is_allowed(pair: tuple[Path, Path]) -> None:
    command = [
        *(str(Path(sys.executable).parent / "vllm"), "serve", str(pair[0]), "--max-model-len=128", "--port=1"),
        *("--speculative-config", json.dumps({"model": str(pair[1]), "num_speculative_tokens": 2})),
        *("--additional-config", json.dumps({"dropmatch": {"p_dorp": 0.3}})),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "Did you mean 'p_drop'? Available: ask, guard" in done.stdout + done.stderr


def test_without_a_drafter_there_is_nothing_to_judge(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="--speculative-config"):
        configure(pair, {}, speculative_config=None)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in {"lossless", "exact"}])
def test_ngrams_serve_rules_without_distributions_alone(pair: tuple[Path, Path], rule: str) -> None:
    def start(**options: object) -> Any:
        return configure(pair, {"rule": rule, **options}, speculative_config=NGRAM)

    if rule in {"dropmatch", "dropmatch-paper", "js", "dropmatch-expected", "expected-js"}:
        with pytest.raises(ConfigError, match=r"'ngram' gives none here.*eagle3.*dropmatch-naive.*point_mass"):
            start()
        assert start(point_mass=True) is not None
    else:
        assert start() is not None


def test_closed_forms_need_the_whole_head_on_one_device(pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="tensor parallelism"):
        configure(pair, {"rule": "expected-head"}, tensor_parallel_size=2, distributed_executor_backend="mp")


def test_other_verification_methods_are_refused_by_name(pair: tuple[Path, Path]) -> None:
    speculative = {"model": str(pair[1]), "num_speculative_tokens": 2, "rejection_sample_method": "block"}
    with pytest.raises(UnsupportedVLLMError, match="rejection_sample_method='block'"):
        configure(pair, {}, speculative_config=speculative)


def test_lora_is_refused_by_name(pair: tuple[Path, Path]) -> None:
    with pytest.raises(UnsupportedVLLMError, match="LoRA"):
        configure(pair, {}, enable_lora=True)


def test_a_version_out_of_range_is_refused_with_both_versions_named(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.34.1")
    with pytest.raises(
        UnsupportedVLLMError, match=r"supports vllm >=0.28,<0.34, and this is vllm 0.34.1: .*out of range"
    ):
        configure(pair, {})
    assert configure(pair, None) is not None


def test_a_changed_signature_is_refused_by_name(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.metrics.loggers import StatLoggerManager

    def record(self: object, everything: object) -> None: ...

    monkeypatch.setattr(StatLoggerManager, "record", record)
    with pytest.raises(UnsupportedVLLMError, match=r"differs at vllm.v1.metrics.loggers:StatLoggerManager.record"):
        configure(pair, {})


def test_every_seam_of_the_v1_runner_is_there() -> None:
    compat.check_vllm(compat.COMMON + compat.REQUESTS + compat.V1)


class _Executor:
    """Workers whose runners nobody hooked."""

    def collective_rpc(self, function: Any) -> list[Any]:
        worker = type("Worker", (), {"model_runner": type("OtherRunner", (), {})()})()
        return [function(worker)]


def test_a_worker_without_the_hook_is_an_error(pair: tuple[Path, Path]) -> None:
    vllm_config = configure(pair, {})
    with pytest.raises(StateError, match=r"1 of 1 workers run without it.*OtherRunner"):
        engine.check_workers(_Executor(), vllm_config)


def test_errors_are_of_the_family() -> None:
    assert issubclass(UnsupportedVLLMError, DropMatchError)
    assert set(frontend.WITH_DISTRIBUTION) < set(frontend.METHODS)
