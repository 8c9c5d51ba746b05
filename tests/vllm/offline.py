"""Starts one vLLM engine and runs jobs on it; a process of its own for each test setting.

Reads a JSON object {"rig", "environment", "engine", "jobs"} from a file and writes {"jobs": {name: ...}, "status":
[...]} to another. A job is {"name", "prompts", "params": one object or one per prompt}. "profile": run vLLM's
memory profiling too; "watch": fail where the plugin waits for the device.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import rigs


def main(given: str, wanted: str) -> None:
    spec = json.loads(Path(given).read_text())
    os.environ.update(spec.get("environment", {}))
    rigs.apply(spec.get("rig"))
    from vllm import LLM

    llm = LLM(**spec["engine"])
    if spec.get("watch"):
        rigs.watch_for_waits()
    jobs = {job["name"]: _run(llm, job) for job in spec["jobs"]}
    result: dict[str, Any] = {"jobs": jobs, "status": None}
    if spec["engine"].get("additional_config", {}).get("dropmatch"):
        from dropmatch.vllm.engine import status

        if spec.get("profile"):
            llm.collective_rpc(_profile)
        result["status"] = llm.collective_rpc(status)
    Path(wanted).write_text(json.dumps(result))


def _profile(worker: Any) -> None:
    """What vLLM does to measure memory before it sizes its cache; CPUs skip it where the size is given."""
    worker.model_runner.profile_run()


def _run(llm: Any, job: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    def params(options: dict[str, Any]) -> Any:
        options = dict(options)
        if "json" in options:
            options["structured_outputs"] = StructuredOutputsParams(json=options.pop("json"))
        return SamplingParams(**options)

    asked = job["params"]
    chosen = [params(options) for options in asked] if isinstance(asked, list) else params(asked)
    before = _metrics(llm)
    start = time.perf_counter()
    try:
        outputs = llm.generate(job["prompts"], chosen, use_tqdm=False)
    except (ValueError, VLLMValidationError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - start
    after = _metrics(llm)
    return {
        "seconds": seconds,
        "metrics": {name: value - before.get(name, 0) for name, value in after.items()},
        "outputs": [
            [
                {
                    "tokens": list(sample.token_ids),
                    "text": sample.text,
                    "finish": sample.finish_reason,
                    "logprobs": None
                    if sample.logprobs is None
                    else [
                        {str(token): entry.logprob for token, entry in position.items()} for position in sample.logprobs
                    ],
                }
                for sample in output.outputs
            ]
            for output in outputs
        ],
    }


def _metrics(llm: Any) -> dict[str, float]:
    from vllm.v1.metrics.reader import Counter

    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Counter) and ("spec_decode" in metric.name or "dropmatch" in metric.name):
            reason = metric.labels.get("reason")
            found[metric.name.removeprefix("vllm:") + (f"/{reason}" if reason else "")] = metric.value
        if metric.name in {"vllm:num_preemptions", "vllm:prefix_cache_hits"}:
            found[metric.name.removeprefix("vllm:")] = getattr(metric, "value", 0)
    return found


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
