"""Side-by-side timing of decoding methods on the same prompts in one run.

Each prompt goes through all arms in turn, so that a machine that drifts drifts for all. All arms generate the same
number of tokens (EOS is ignored) from the same prompts, in one dtype, warmed up. Times are of whole calls, prefill
included, since transformers does not tell prefill apart; our own arms also report the split of their decoding.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import dropmatch
from dropmatch.api import Decoder
from dropmatch.bench.arms import GENERATE
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import write_result
from dropmatch.bench.side_by_side import WARM_UP, Way, own_ways, rotated, speed_over, transformers_ways
from dropmatch.bench.tasks import Item
from dropmatch.config import PDrop
from dropmatch.core.stats import EngineStats
from dropmatch.provenance import collect


@dataclass(slots=True)
class Arm:
    """One way to decode and what it took."""

    way: Way
    seconds: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    stats: list[EngineStats] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.way.name


def run_quick(
    items: Sequence[Item],
    *,
    target: str,
    draft: str | None,
    lengths: Sequence[int],
    max_new_tokens: int,
    num_paths: int,
    p_drop: PDrop | None,
    heads: str,
    draft_weights: str,
    min_confidence: float,
    repeats: int,
    with_peers: bool,
    dtype: str,
    device: str,
    output: Path,
) -> dict[str, Any]:
    """Time all arms on all items and write the results file. Returns what was written."""
    decoder = dropmatch.load(
        target,
        draft,
        num_paths=num_paths,
        p_drop=p_drop,
        heads=heads,  # type: ignore[arg-type]  # checked by load
        draft_weights=draft_weights,  # type: ignore[arg-type]
        min_confidence=min_confidence,
        dtype=dtype,
        device=device,
    )
    provenance = collect(device=str(decoder.target.device))  # as the run starts
    ways = own_ways(decoder, ("lossless", "dropmatch"), lengths)
    if with_peers:
        ways += transformers_ways(decoder, lengths)
    arms = [Arm(way) for way in ways]
    prompts = {item.id: decoder.encode(item.prompt) for item in items}
    with ProgressMeter("measuring", len(arms) * (1 + repeats * len(items))) as meter:
        for arm in arms:
            arm.way.run(prompts[items[0].id], min(WARM_UP, max_new_tokens))
            meter.advance()
        for turn in range(repeats):
            for i, item in enumerate(items):
                for arm in rotated(arms, i + turn):
                    _measure(arm, item.id, prompts[item.id], max_new_tokens, decoder)
                    meter.advance()
    result = {
        "kind": "bench-quick",
        "settings": {
            "target": target,
            "draft": draft,
            "lengths": list(lengths),
            "max_new_tokens": max_new_tokens,
            "k": num_paths,
            "p_drop": decoder.dropout.p_drop,
            "heads": heads,
            "draft_weights": draft_weights,
            "min_confidence": min_confidence,
            "repeats": repeats,
            "dtype": str(decoder.target.dtype),
            "items": [item.id for item in items],
        },
        "summary": _summary(arms),
        "arms": {arm.name: _arm_json(arm) for arm in arms},
        "provenance": provenance,
    }
    write_result(result, output)
    return result


def _measure(arm: Arm, item: str, ids: list[int], num_new: int, decoder: Decoder) -> None:
    started = time.perf_counter()
    tokens, stats = arm.way.run(ids, num_new)
    arm.seconds.setdefault(item, []).append(time.perf_counter() - started)
    arm.tokens[item] = len(tokens)
    arm.texts[item] = decoder.tokenizer.decode(tokens, skip_special_tokens=True)
    if stats is not None:
        arm.stats.append(stats)


def _pooled(arm: Arm) -> EngineStats | None:
    if not arm.stats:
        return None
    pooled = EngineStats()
    for stats in arm.stats:
        pooled.add(stats)
    return pooled


def _arm_json(arm: Arm) -> dict[str, Any]:
    pooled = _pooled(arm)
    return {
        "seconds": arm.seconds,
        "tokens": arm.tokens,
        "texts": arm.texts,
        "stats": None if pooled is None else pooled.to_json(),
    }


def _ratios(arm: Arm, base: Arm) -> Any:
    return speed_over(arm.seconds, arm.tokens, base.seconds, base.tokens)


def _summary(arms: Sequence[Arm]) -> dict[str, Any]:
    """Figures by arm, all speeds as ratios within the run."""
    by_name = {arm.name: arm for arm in arms}
    summary: dict[str, Any] = {}
    for arm in arms:
        total = sum(sum(seconds) for seconds in arm.seconds.values())
        emitted = sum(arm.tokens[item] * len(seconds) for item, seconds in arm.seconds.items())
        row: dict[str, Any] = {"tokens_per_second": emitted / total, "over_plain": _ratios(arm, by_name["plain"])}
        if GENERATE in by_name:
            row["over_generate"] = _ratios(arm, by_name[GENERATE])
        pooled = _pooled(arm)
        if pooled is not None and arm.name != "plain":
            length = arm.name.split("=")[1]
            lossless = by_name[f"lossless L={length}"]
            row["over_lossless"] = _ratios(arm, lossless)
            row["tau"] = pooled.requests.tau
            row["lossy_tokens"] = len(pooled.requests.lossy)
            row["emitted"] = pooled.requests.emitted
            row["judge_over_target"] = pooled.time.judge / pooled.time.target
            row["head_rows_per_round"] = pooled.time.head_rows / pooled.requests.rounds
            if f"transformers assisted L={length}" in by_name:
                row["over_assisted"] = _ratios(arm, by_name[f"transformers assisted L={length}"])
        summary[arm.name] = row
    return summary


def print_table(result: dict[str, Any]) -> None:
    """The summary for people."""
    table = Table("", "tokens/s", "over generate", "over plain", "over lossless", "tau", "head+rule/target", "lossy")

    def ratio(row: dict[str, Any], key: str) -> str:
        return "{median:.2f}x [{min:.2f}, {max:.2f}]".format(**row[key]).replace("[", "\\[") if key in row else ""

    for name, row in result["summary"].items():
        table.add_row(
            name,
            f"{row['tokens_per_second']:.2f}",
            ratio(row, "over_generate"),
            ratio(row, "over_plain"),
            ratio(row, "over_lossless"),
            f"{row['tau']:.2f}" if "tau" in row else "",
            f"{row['judge_over_target']:.1%}" if "judge_over_target" in row else "",
            f"{row['lossy_tokens']}/{row['emitted']}" if "lossy_tokens" in row else "",
        )
    console = Console()
    console.print(table)
    settings = result["settings"]
    console.print(
        f"{len(settings['items'])} prompts, {settings['max_new_tokens']} tokens each, batch 1, {settings['dtype']}, "
        f"K={settings['k']}, p_drop={settings['p_drop']}. Ratios: median over prompts, with minimum and maximum."
    )
