"""DropMatch against lossless decoding by batch size (Table 5 of the DropMatch paper), side by side in one run.

Each wave of prompts goes through both methods in turn, so that a machine that drifts drifts for both. Both generate the
same number of tokens (EOS is ignored). Rows end in different rounds, as they do in use: the last rounds of a wave run
with fewer rows. Finished waves go to a journal; a stopped run goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dropmatch.api import Decoder
from dropmatch.bench.analyses.decoding import fingerprint
from dropmatch.bench.analyses.show import console
from dropmatch.bench.fields import MAYBE, NUMBER
from dropmatch.bench.figures import spread_of
from dropmatch.bench.journal import Journal
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import write_result
from dropmatch.bench.settings import NEWER, weights_of
from dropmatch.bench.side_by_side import rotated
from dropmatch.bench.tasks import Item
from dropmatch.config import EngineConfig, SamplingParams
from dropmatch.core.acceptance import make_rule
from dropmatch.errors import ConfigError
from dropmatch.provenance import collect

BASE = "lossless"
_RUN = {
    "arm": str,
    **dict.fromkeys(("batch", "repeat", "wave", "emitted", "rounds", "accepted", "lossy_tokens"), int),
    **dict.fromkeys(("seconds", "decode_s", "target_s", "judge_s"), NUMBER),
    "peak_bytes": MAYBE,
}


def check_rule(rule: str) -> None:
    """Raises UnknownNameError for a rule that does not exist, ConfigError for lossless itself."""
    make_rule(rule)
    if rule == BASE:
        raise ConfigError("The rule is set against lossless decoding. Name another one, such as dropmatch.")


def run_batch(
    decoder: Decoder,
    items: Sequence[Item],
    *,
    batches: Sequence[int],
    draft_length: int,
    max_new_tokens: int,
    repeats: int,
    rule: str,
    seed: int,
    described: Mapping[str, Any],
    output: Path,
    restart: bool = False,
) -> dict[str, Any]:
    """Time both methods at every batch size and write the results file. Returns what was written.

    items: at least as many as the largest batch; a batch size takes as many whole waves of them as there are. A size
    that does not fit into GPU memory ends the run there and is reported as such. rule: set against lossless.
    """
    check_rule(rule)
    batches = sorted(set(batches))
    if len(items) < batches[-1]:
        raise ConfigError(
            f"A batch of {batches[-1]} needs as many prompts, and {len(items)} were given. Give more with --num, or "
            "smaller --batches."
        )
    arms = [BASE, rule]
    provenance = collect(device=str(decoder.target.device))
    written = {
        **described,
        "batches": batches,
        "rule": rule,
        "draft_length": draft_length,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "k": decoder.dropout.num_paths,
        "p_drop": decoder.dropout.p_drop,
        "heads": decoder.dropout.heads,
        "dtype": str(decoder.target.dtype),
        "seed": seed,
        "items": [item.id for item in items],
        "prompts": fingerprint(items),
    }
    prompts = [decoder.encode(item.prompt) for item in items]
    params = SamplingParams(max_new_tokens=max_new_tokens, eos_ids=(), seed=seed)
    work = list(_work(len(items), batches, repeats, arms))
    written |= weights_of(decoder)
    with Journal(output, written, restart=restart, newer=NEWER) as journal:
        done = {(e["batch"], e["repeat"], e["wave"], e["arm"]) for e in journal.found("arm", _RUN)}
        journal.say_taken_over(f"{len(done)} of {len(work)} runs of a wave")
        full = next((e["out_of_memory"] for e in journal.found("out_of_memory", {"out_of_memory": int})), None)
        warm: set[tuple[int, str]] = set()
        with ProgressMeter("batches", len(work), len(done)) as meter:
            for batch, repeat, wave, arm in work:
                if (batch, repeat, wave, arm) in done or (full is not None and batch >= full):
                    continue
                config = EngineConfig(
                    draft_length=draft_length, max_batch=batch, seed=seed, max_length=decoder.config.max_length
                )
                ids = prompts[wave * batch : (wave + 1) * batch]
                try:
                    if (batch, arm) not in warm:
                        _run(decoder, ids, _warm_up(params), arm, config)
                        warm.add((batch, arm))
                    entry = _run(decoder, ids, params, arm, config)
                except torch.OutOfMemoryError:
                    full = batch
                    journal.add({"out_of_memory": batch})
                    continue
                journal.add({"batch": batch, "repeat": repeat, "wave": wave, "arm": arm, **entry})
                meter.advance(note=f"batch {batch}")
        runs = [entry for entry in journal.entries if "arm" in entry]
        result = {
            "kind": "bench-batch",
            "settings": {**written, "out_of_memory_at": full},
            "summary": batch_rows([e for e in runs if full is None or e["batch"] < full], rule),
            "runs": runs,
            "provenance": provenance,
        }
        write_result(result, output)
        journal.remove()
    return result


def _work(
    num_items: int, batches: Sequence[int], repeats: int, arms: Sequence[str]
) -> Iterator[tuple[int, int, int, str]]:
    """(batch, repeat, wave, arm) in the order of running: methods in turn, each wave beginning with the other one."""
    for batch in batches:
        for repeat in range(repeats):
            for wave in range(num_items // batch):
                for arm in rotated(arms, repeat + wave):
                    yield batch, repeat, wave, arm


def _warm_up(params: SamplingParams) -> SamplingParams:
    return replace(params, max_new_tokens=min(8, params.max_new_tokens))


def _run(
    decoder: Decoder, prompts: Sequence[list[int]], params: SamplingParams, rule: str, config: EngineConfig
) -> dict[str, Any]:
    device = decoder.target.device
    _reset_peak(device)
    started = time.perf_counter()
    done = decoder.run(prompts, params, engine=decoder.engine(rule=rule, config=config))
    seconds = time.perf_counter() - started
    time_split, requests = done.stats.time, done.stats.requests
    return {
        "seconds": seconds,
        "decode_s": time_split.decode,
        "prefill_s": time_split.prefill,
        "draft_s": time_split.draft,
        "target_s": time_split.target,
        "judge_s": time_split.judge,
        "emitted": requests.emitted,
        "rounds": requests.rounds,
        "accepted": requests.accepted,
        "steps": time_split.target_forwards,
        "lossy_tokens": len(requests.lossy),
        "peak_bytes": _peak(device),
    }


def batch_rows(runs: Sequence[Mapping[str, Any]], rule: str) -> list[dict[str, Any]]:
    """One row per batch size: throughput of both, their ratio wave by wave, tau, peak memory. Sizes of which a wave
    was left unfinished (out of memory) are left out."""
    rows = []
    for batch in dict.fromkeys(run["batch"] for run in runs):
        mine = [run for run in runs if run["batch"] == batch]
        arms = {arm: {(r["repeat"], r["wave"]): r for r in mine if r["arm"] == arm} for arm in (BASE, rule)}
        if arms[BASE].keys() != arms[rule].keys():
            continue
        row: dict[str, Any] = {"batch": batch, "waves": len(arms[BASE])}
        for arm, waves in arms.items():
            every = list(waves.values())
            emitted = sum(r["emitted"] for r in every)
            row[arm] = {
                "tokens_per_second": emitted / sum(r["seconds"] for r in every),
                "decode_tokens_per_second": emitted / sum(r["decode_s"] for r in every),
                "tau": sum(r["accepted"] + r["rounds"] for r in every) / sum(r["rounds"] for r in every),
                "judge_over_target": sum(r["judge_s"] for r in every) / sum(r["target_s"] for r in every),
                "lossy_share": sum(r["lossy_tokens"] for r in every) / emitted,
                "peak_bytes": max((r["peak_bytes"] for r in every if r["peak_bytes"] is not None), default=None),
            }
        for name, key in (("whole", "seconds"), ("decode", "decode_s")):
            ratios = [
                (run["emitted"] / run[key]) / (arms[BASE][wave]["emitted"] / arms[BASE][wave][key])
                for wave, run in arms[rule].items()
            ]
            row[f"{name}_over_lossless"] = spread_of(ratios)
        rows.append(row)
    return rows


# -- memory ---------------------------------------------------------------------------------------------------------

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _reset_peak(device: torch.device) -> None:
    """Begin to measure anew: the GPU's allocator, or this process's resident memory on Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        with suppress(OSError):  # not allowed in some containers; the peak is then of the whole run so far
            _CLEAR.write_text("5")


def _peak(device: torch.device) -> int | None:
    """Bytes at most in use since the last reset, weights included; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not _STATUS.exists():
        return None
    line = next((line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")), None)
    return None if line is None else 1024 * int(line.split()[1])


def print_batch(result: Mapping[str, Any]) -> None:
    """The table, and what it was measured on."""
    settings = result["settings"]
    rule = settings["rule"]
    table = Table(
        "batch", "decoding only", "whole calls", "tau", "tokens/s", "head+rule/target", "lossy", "peak memory"
    )
    for row in result["summary"]:
        base, mine = row[BASE], row[rule]
        peak = "" if mine["peak_bytes"] is None else f"{mine['peak_bytes'] / 2**30:.2f} GiB"
        table.add_row(
            str(row["batch"]),
            _ratio(row["decode_over_lossless"]),
            _ratio(row["whole_over_lossless"]),
            f"{base['tau']:.2f} to {mine['tau']:.2f}",
            f"{base['tokens_per_second']:.1f} to {mine['tokens_per_second']:.1f}",
            f"{mine['judge_over_target']:.1%}",
            f"{mine['lossy_share']:.1%}",
            peak,
        )
    shown = console()
    shown.print(table)
    shown.print(
        f"{rule} over {BASE}: median over waves of prompts, with minimum and maximum. L={settings['draft_length']}, "
        f"{settings['max_new_tokens']} tokens a prompt, K={settings['k']}, p_drop={settings['p_drop']}, "
        f"{settings['dtype'].removeprefix('torch.')}."
    )
    if settings["out_of_memory_at"] is not None:
        shown.print(f"A batch of {settings['out_of_memory_at']} did not fit into memory.")


def _ratio(ratio: Mapping[str, float]) -> str:
    return "{median:.2f}x \\[{min:.2f}, {max:.2f}]".format(**ratio)
