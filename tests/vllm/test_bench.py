"""`dropmatch bench vllm` from the command line: arms, figures and the file, on the tiny pair."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from engines import environment

ITEMS = [
    {"id": f"gsm8k/test/{i:04d}", "task": "gsm8k", "prompt": prompt, "answer": "18", "meta": {}}
    for i, prompt in enumerate(["Two men count fourteen baskets.", "A train travels sixty kilometres."])
]


def test_the_benchmark_writes_both_arms(pair: tuple[Path, Path], tmp_path: Path) -> None:
    data, output = tmp_path / "gsm8k.jsonl", tmp_path / "bench.json"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    engine = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4, "dtype": "float32"}
    command = [
        *(sys.executable, "-m", "dropmatch.cli", "bench", "vllm"),
        *("--data", str(data), "--output", str(output), "--target", str(pair[0]), "--num-items", "2"),
        *("--speculative-config", json.dumps({"model": str(pair[1]), "num_speculative_tokens": 4})),
        *("--dropmatch", json.dumps({"p_drop": 0.3}), "--engine", json.dumps(engine), "--max-new-tokens", "40"),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(output.read_text())
    stock, mine = result["summary"]
    assert (stock["arm"], mine["arm"]) == ("stock", "dropmatch")
    assert mine["tau"] > stock["tau"] >= 1.0
    assert mine["lossy_tokens"] > 0
    assert stock["lossy_tokens"] is None
    assert stock["over_stock"] == 1.0
    for row in (stock, mine):
        assert row["n"] == 2
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
