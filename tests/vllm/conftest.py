"""Tests that start vLLM on a CPU. They run in an environment of their own (scripts/test-vllm) and skip elsewhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
SMOLLM2 = "smollm2-135m"
START = 600  # seconds in which an engine starts and does its jobs on two busy cores

sys.path.insert(0, str(HERE))

from engines import Report, environment  # noqa: E402  # found by the line above

found = importlib.util.find_spec("vllm")
# this very folder looks like a package of that name, but has no file of its own to load
collect_ignore = [] if found and found.origin else [path.name for path in HERE.glob("test_*.py")]


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Report]:
    """Run a spec of `offline.py` in a process of its own."""

    def run(spec: dict[str, Any]) -> Report:
        folder = tmp_path_factory.mktemp("engine")
        given, wanted = folder / "spec.json", folder / "report.json"
        given.write_text(json.dumps(spec))
        done = subprocess.run(
            [sys.executable, str(HERE / "offline.py"), str(given), str(wanted)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=START,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return Report(**json.loads(wanted.read_text()))

    return run


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and draft on disk."""
    from models import save_pair

    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M from the cache folder; skips where it was not fetched."""
    from dropmatch.provenance import cache_dir

    folder = cache_dir() / "models" / SMOLLM2
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"needs SmolLM2-135M, and {folder} does not exist (dropmatch fetch small)")
    return folder
