"""`dropmatch bench vllm` from the command line: arms, figures and the file, on the tiny pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from dropmatch.errors import ConfigError
from engines import environment

ITEMS = [
    {"id": f"gsm8k/test/{i:04d}", "task": "gsm8k", "prompt": prompt, "answer": "18", "meta": {}}
    for i, prompt in enumerate(["Two men count fourteen baskets.", "A train travels sixty kilometres."])
]


def test_the_benchmark_writes_all_arms(pair: tuple[Path, Path], tmp_path: Path) -> None:
    data, output = tmp_path / "gsm8k.jsonl", tmp_path / "bench.json"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    engine = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4, "dtype": "float32"}
    command = [
        *(sys.executable, "-m", "dropmatch.cli", "bench", "vllm"),
        *("--data", str(data), "--output", str(output), "--target", str(pair[0]), "--num-items", "2"),
        *("--speculative-config", json.dumps({"model": str(pair[1]), "num_speculative_tokens": 4})),
        *("--dropmatch", json.dumps({"p_drop": 0.3}), "--dropmatch", json.dumps({"rule": "dropmatch-expected"})),
        *("--engine", json.dumps(engine), "--max-new-tokens", "40"),
    ]
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # starts sooner
    done = subprocess.run(command, env=environment() | one_process, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(output.read_text())
    stock, mine, closed = result["summary"]
    assert [row["arm"] for row in result["summary"]] == ["stock", "dropmatch", "dropmatch-expected"]
    for row in (mine, closed):
        assert row["tau"] > stock["tau"] >= 1.0
        assert row["lossy_tokens"] > 0
    assert stock["lossy_tokens"] is None
    assert stock["over_stock"] == 1.0
    for row in result["summary"]:
        assert 0 <= row["cut_off"] <= row["n"] == 2
        assert row["accuracy"] == 0.0  # a random model is right by accident only
        assert row["tokens_per_second"] > 0
    assert result["provenance"]["vllm"]
    assert json.loads(done.stdout.splitlines()[-1])["summary"] == result["summary"]


def test_json_that_is_none_is_refused_by_its_option(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "dropmatch.cli", "bench", "vllm", "--data", str(tmp_path), "--target", "none"),
        *("--speculative-config", "{model}", "--output", str(tmp_path / "bench.json")),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--speculative-config is not JSON" in done.stderr


def test_vllms_own_lossy_rule_is_an_arm_where_the_version_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from dropmatch.bench.vllm import _arms

    given = ("target", {"model": "draft", "num_speculative_tokens": 4}, [{"rule": "head"}], {"dtype": "float32"})
    assert list(_arms(*given)) == ["stock", "head"]
    monkeypatch.setattr("vllm.config.speculative.RejectionSampleMethod", Literal["standard", "fly"])
    arms = _arms(*given)
    assert list(arms) == ["stock", "head", "fly"]
    assert arms["fly"]["speculative_config"]["rejection_sample_method"] == "fly"
    assert "additional_config" not in arms["stock"] | arms["fly"]


def test_settings_are_refused_before_an_engine_starts() -> None:
    from dropmatch.bench.vllm import _arms

    for given, says in (([{"ruel": "head"}], "Did you mean 'rule'"), ([{"k": 3}, {}], "'dropmatch' stands in")):
        with pytest.raises(ConfigError, match=says):
            _arms("target", {}, given, {})
