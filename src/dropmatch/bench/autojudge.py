"""Auto-Judge with and without DropMatch by threshold: Tables 8 and 9, Figures 5 and 6 of the DropMatch paper.

Each part is a comparison of its own, in a file that `compare` would write too, so that a stopped run goes on where it
was and a finished part is not run again. GSM8K gives Table 8 and Figure 5, MBPP Table 9 (in the place of
LiveCodeBench; with a judge of its own), and IFEval, which the judge of GSM8K has never seen, Figure 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dropmatch.api import Decoder
from dropmatch.bench.arms import ArmSpec, parse_arms
from dropmatch.bench.compare import run_compare
from dropmatch.bench.comparison import read_finished
from dropmatch.bench.journal import describe_difference
from dropmatch.bench.results import write_result
from dropmatch.bench.settings import NEWER, CompareSettings, shared_settings
from dropmatch.bench.takeover import prompt_digest
from dropmatch.bench.tasks import Item
from dropmatch.config import DropoutConfig
from dropmatch.core.acceptance import RuleOptions
from dropmatch.core.judge import JudgeHead
from dropmatch.core.reasons import Reason
from dropmatch.errors import ConfigError
from dropmatch.judge import judge_info, load_judge
from dropmatch.provenance import collect

FORMAT = 1
_FIGURES = (
    *("n", "accuracy", "accuracy_low", "accuracy_high", "tau", "tau_low", "tau_high", "tokens_per_second"),
    *("over_plain", "over_lossless", "lossy_share", "length_ratio", "metrics"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoJudgeSettings:
    """What is compared. window: drafted tokens per round; thresholds: numbers or quantiles of each judge; p_drops: of
    DropMatch beside the judge; base_lengths: draft lengths of lossless decoding to compare with."""

    window: int = 32
    thresholds: tuple[str, ...] = ("q0.04", "q0.12", "q0.2", "q0.4", "q0.6")
    p_drops: tuple[float, ...] = (0.3,)
    base_lengths: tuple[int, ...] = (8,)

    def __post_init__(self) -> None:
        if not self.thresholds or not self.p_drops:
            raise ConfigError("Give at least one threshold, such as q0.2, and one drop probability, such as 0.3.")


@dataclass(frozen=True, slots=True)
class Part:
    """One evaluation set. name: gsm8k, mbpp or ifeval; data: the name of its file; judge: where the head lies."""

    name: str
    items: Sequence[Item]
    data: str
    judge: Path
    head: JudgeHead

    @property
    def info(self) -> dict[str, Any]:
        """How the judge was trained; empty for heads in the exported form, which do not say."""
        return judge_info(self.judge) if self.judge.is_dir() else {}


def make_part(name: str, items: Sequence[Item], data: str, judge: Path) -> Part:
    """A part with its judge loaded. Raises ConfigError if prompts that it was trained on are among the items."""
    part = Part(name, items, data, judge, load_judge(judge))
    names, texts = set(part.info.get("items", ())), part.info.get("prompts")
    seen = [item.id in names if texts is None else prompt_digest(item.turns) in texts for item in items]
    leak = next((item.id for item, is_seen in zip(items, seen, strict=True) if is_seen), None)
    if leak is not None:
        raise ConfigError(
            f"{leak} was among the prompts that the judge {judge} was trained on. Evaluate on others: --start-{name}."
        )
    return part


def arms_of(settings: AutoJudgeSettings, head: JudgeHead, dropout: DropoutConfig) -> list[ArmSpec]:
    """All methods of one part. Raises ConfigError naming a threshold that cannot be."""
    window = settings.window
    names = [f"lossless@L={length}" for length in dict.fromkeys([*settings.base_lengths, window])]
    names += [f"dropmatch@p={p:g}" for p in settings.p_drops]
    names += [f"judge(threshold={threshold})" for threshold in settings.thresholds]
    names += [
        f"dropmatch+judge(threshold={threshold})@p={p:g}" for p in settings.p_drops for threshold in settings.thresholds
    ]
    return parse_arms(names, [window], dropout, RuleOptions(judge=head))


def run_autojudge(
    decoder: Decoder,
    parts: Sequence[Part],
    settings: AutoJudgeSettings,
    compare: CompareSettings,
    *,
    described: Mapping[str, Any],
    output: Path,
    restart: bool = False,
) -> dict[str, Any]:
    """Run all parts and write autojudge.json beside their own files in the folder `output`. Returns what it says."""
    provenance = collect(device=str(decoder.target.device))
    results = {}
    for part in parts:
        arms = arms_of(settings, part.head, decoder.dropout)
        own = {**described, "judge": f"{part.head.name} ({part.head.digest})", "window": settings.window}
        path = output / f"{part.name}.json"
        finished = None if restart else _finished(path, part, arms, decoder, compare, own)
        results[part.name] = finished or run_compare(
            decoder, part.items, arms, compare, described=own, data=[part.data], output=path, restart=restart
        )
    rows = {part.name: part_rows(results[part.name], part.head, settings) for part in parts}
    result = {
        "kind": "bench-autojudge",
        "format": FORMAT,
        "settings": {
            **described,
            "window": settings.window,
            "thresholds": list(settings.thresholds),
            "p_drops": list(settings.p_drops),
            "base_lengths": list(settings.base_lengths),
            "k": decoder.dropout.num_paths,
            "heads": decoder.dropout.heads,
            "dtype": str(decoder.target.dtype),
            "seed": compare.seed,
            "max_new_tokens": compare.max_new_tokens,
            "batch": compare.batch,
        },
        "parts": {part.name: _part_facts(part, results[part.name]) for part in parts},
        "rows": rows,
        "table8": threshold_table(rows.get("gsm8k", ()), settings),
        "table9": threshold_table(rows.get("mbpp", ()), settings),
        "figure5": curves(rows.get("gsm8k", ())),
        "figure6": curves(rows.get("ifeval", ())),
        "provenance": provenance,
    }
    write_result(result, output / "autojudge.json")
    return result


def _finished(
    path: Path,
    part: Part,
    arms: Sequence[ArmSpec],
    decoder: Decoder,
    compare: CompareSettings,
    described: Mapping[str, Any],
) -> dict[str, Any] | None:
    """The part's file, where it holds exactly what is asked for."""
    if not path.exists():
        return None
    result = read_finished(path)
    wanted = {
        **shared_settings(decoder, compare, described),
        "items": [item.id for item in part.items],
        "speed_items": compare.speed_items,
        "repeats": compare.repeats,
        "speed_tokens": compare.speed_tokens,
    }
    held = {name: value for name, value in result["settings"].items() if name in wanted}
    if describe_difference(held, wanted, NEWER):
        return None
    turns = {item: prompt["turns"] for item, prompt in result["prompts"].items()}
    is_same = turns == {item.id: list(item.turns) for item in part.items}
    return result if is_same and list(result["arms"]) == [arm.name for arm in arms] else None


def _part_facts(part: Part, result: Mapping[str, Any]) -> dict[str, Any]:
    speed = result.get("speed")
    return {
        "file": f"{part.name}.json",
        "judge": _judge_facts(part),
        "timed_items": 0 if speed is None else len(speed["items"]),
        "repeats": 0 if speed is None else speed["repeats"],
    }


def _judge_facts(part: Part) -> dict[str, Any]:
    info = part.info
    return {
        "trained_for": [info.get("target"), info.get("draft")],
        "draft_weights": info.get("draft_weights"),
        "name": part.head.name,
        "digest": part.head.digest,
        "features": part.head.features,
        "tasks": info.get("tasks"),
        "auc": info.get("auc"),
        "training": info.get("training"),
        "in_distribution": None if "tasks" not in info else part.name in info["tasks"],
    }


def part_rows(result: Mapping[str, Any], head: JudgeHead, settings: AutoJudgeSettings) -> list[dict[str, Any]]:
    """One row per method: which it is, its threshold, and its figures with their intervals."""
    tasks = {prompt["task"] for prompt in result["prompts"].values()}
    group = next(iter(tasks)) if len(tasks) == 1 else "all"
    by_arm = {row["arm"]: row for row in result["summary"] if row["task"] == group}
    rows = []
    for name, row in by_arm.items():
        threshold = next((t for t in settings.thresholds if f"judge(threshold={t})" in row["rule"]), None)
        dropout = result["settings"]["arm_dropout"].get(name)
        method = row["rule"].split("@")[0].split("(")[0]
        rows.append(
            {
                "method": method,
                "draft_length": row["draft_length"],
                "quantile": threshold if threshold is not None and threshold.startswith("q") else None,
                "threshold": None if threshold is None else head.threshold(_number(threshold)),
                "p_drop": dropout["p_drop"] if dropout is not None and "dropmatch" in method else None,
                "judged_share": judged_share(result["arms"][name]["items"]),
                **{key: row[key] for key in _FIGURES},
            }
        )
    return rows


def _number(threshold: str) -> float | str:
    return threshold if threshold.startswith("q") else float(threshold)


def judged_share(records: Mapping[str, Any]) -> float:
    """Share of all tokens that only the judge kept."""
    judged = sum(token["reason"] == Reason.JUDGE.label for record in records.values() for token in record["lossy"])
    emitted = sum(len(record["tokens"]) for record in records.values())
    return float(judged / emitted)


def threshold_table(rows: Sequence[Mapping[str, Any]], settings: AutoJudgeSettings) -> list[dict[str, Any]]:
    """Tables 8 and 9: a row per threshold with Auto-Judge alone and, by drop probability, with DropMatch."""
    table = []
    for at, given in enumerate(settings.thresholds):
        alone = [row for row in rows if row["method"] == "judge"]
        joined = [row for row in rows if row["method"] == "dropmatch+judge"]
        if not alone:
            return []
        count = len(settings.thresholds)
        table.append(
            {
                "given": given,
                "quantile": alone[at]["quantile"],
                "threshold": alone[at]["threshold"],
                "judge": _cells(alone[at]),
                "dropmatch+judge": {f"{p:g}": _cells(joined[i * count + at]) for i, p in enumerate(settings.p_drops)},
            }
        )
    return table


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("judged_share", *_FIGURES)}


def curves(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Figures 5 and 6: accuracy against tau, a curve per method and drop probability, its points by threshold."""
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = row["method"] + ("" if row["p_drop"] is None else f" p={row['p_drop']:g}")
        keys = ("draft_length", "quantile", "threshold", "tau", "tau_low", "tau_high")
        point = {key: row[key] for key in (*keys, "accuracy", "accuracy_low", "accuracy_high", "n")}
        series.setdefault(name, []).append(point)
    return [{"name": name, "points": sorted(points, key=lambda p: p["tau"])} for name, points in series.items()]


def print_autojudge(result: Mapping[str, Any]) -> None:
    """One table per part."""
    console = Console()
    for name, rows in result["rows"].items():
        facts = result["parts"][name]["judge"]
        place = {True: "in distribution", False: "out of distribution", None: "trained on unknown data"}
        title = f"{name}, {place[facts['in_distribution']]}"
        table = Table("method", "L", "threshold", "p_drop", "accuracy", "tau", "tokens/s", "by judge only", title=title)
        for row in rows:
            table.add_row(
                row["method"],
                str(row["draft_length"]),
                "" if row["threshold"] is None else f"{row['quantile'] or ''} {row['threshold']:.4f}".strip(),
                "" if row["p_drop"] is None else f"{row['p_drop']:g}",
                _with_interval(row, "accuracy", 100),
                _with_interval(row, "tau", 1),
                "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}",
                f"{row['judged_share']:.1%}",
            )
        console.print(table)


def _with_interval(row: Mapping[str, Any], key: str, scale: int) -> str:
    if row[key] is None:
        return ""
    digits = 1 if scale == 100 else 2
    low, mid, high = (f"{row[name] * scale:.{digits}f}" for name in (f"{key}_low", key, f"{key}_high"))
    return f"{mid} ({low}-{high})"
