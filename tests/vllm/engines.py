"""How tests talk to processes that run vLLM."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Report:
    """What one engine did. jobs: by name; status: of each worker."""

    jobs: dict[str, dict[str, Any]]
    status: list[dict[str, Any]] | None

    def tokens(self, job: str) -> list[list[int]]:
        """Tokens of each prompt's first sample."""
        assert "error" not in self.jobs[job], self.jobs[job]["error"]
        return [output[0]["tokens"] for output in self.jobs[job]["outputs"]]

    def metric(self, job: str, name: str) -> float:
        return float(self.jobs[job]["metrics"].get(name, 0))


def environment() -> dict[str, str]:
    """Of a process that runs vLLM: small, quiet, off line."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE), str(HERE.parent)]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
