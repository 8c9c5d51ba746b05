"""What the dropout heads cost beside one target forward at batch 1 (Table 4 of the DropMatch paper).

One text, one cached context, q input tokens whose successors are judged. In every repeat the body, the plain head and
each way to judge run one after the other, so that a machine that drifts drifts for all; on a GPU each waits for the
device. A way to judge is the acceptance rule as the engine calls it, at all q positions: real decoding asks the heads
only where the drafted token is not the target's own, so these are costs of the worst round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from dropmatch.api import Decoder
from dropmatch.bench.analyses.chain import judge_chain
from dropmatch.bench.analyses.show import console
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import write_result
from dropmatch.core.acceptance import AcceptanceRule, make_rule
from dropmatch.core.head import MCDropoutHead
from dropmatch.errors import ConfigError
from dropmatch.hf.calibration import PROBE_TEXT
from dropmatch.hf.model import HFModel
from dropmatch.provenance import collect

BODY, PLAIN = "body", "plain head"
_WAYS = (
    ("lossless", "lossless", "full"),
    ("heads, naive (Eq. 4)", "head", "full"),
    ("heads with JS (Eq. 6, 7)", "js+majority", "full"),
    ("shortlist, naive", "head", "shortlist"),
    ("shortlist with JS", "js+majority", "shortlist"),
    ("closed form of Eq. 4", "expected-head", "full"),
    ("closed form of Eq. 6, 7", "expected-js+expected-majority", "full"),
)


@dataclass(slots=True)
class _Bench:
    """The fixed input of all measurements. ids: context, q input tokens and the last successor."""

    model: HFModel
    ids: list[int]
    num_inputs: int
    draft_logits: Tensor

    @property
    def tokens(self) -> Tensor:
        start = len(self.ids) - 1 - self.num_inputs
        return torch.tensor([self.ids[start:-1]], device=self.model.device)  # [1, q]


def run_overhead(
    decoder: Decoder,
    *,
    num_inputs: int,
    context: int,
    repeats: int,
    shortlist_size: int,
    text: str | None,
    described: Mapping[str, Any],
    output: Path,
) -> dict[str, Any]:
    """Measure and write the results file. Returns what was written.

    num_inputs: q tokens of the forward; context: cached tokens in front of them; text: None for the built-in one,
    repeated as often as needed.
    """
    provenance = collect(device=str(decoder.target.device))
    bench = _prepare(decoder, num_inputs, context, text or PROBE_TEXT)
    skipped: list[str] = []
    seconds = _measure(decoder, bench, repeats, shortlist_size, skipped)
    result = {
        "kind": "analyze-overhead",
        "settings": {
            **described,
            "inputs": num_inputs,
            "context": context,
            "batch": 1,
            "repeats": repeats,
            "k": decoder.dropout.num_paths,
            "p_drop": decoder.dropout.p_drop,
            "shortlist_size": shortlist_size,
            "vocabulary": decoder.target.vocab_size,
            "hidden_size": int(decoder.target.anatomy.config.hidden_size),
            "dtype": str(decoder.target.dtype),
            "draft_distribution": "the target's own at the positions after, since its values do not matter to the time",
            "skipped": skipped,
        },
        "rows": overhead_rows(seconds),
        "seconds": {name: [round(value, 7) for value in values] for name, values in seconds.items()},
        "provenance": provenance,
    }
    write_result(result, output)
    return result


@torch.inference_mode()
def _prepare(decoder: Decoder, num_inputs: int, context: int, text: str) -> _Bench:
    ids = list(decoder.tokenizer(text)["input_ids"])
    if not ids:
        raise ConfigError("The text is empty. Give one with at least a word.")
    needed = context + num_inputs + 1
    limit = decoder.config.max_length
    if limit is not None and needed > limit:
        raise ConfigError(
            f"--context {context} and --inputs {num_inputs} need {needed} positions; the models have {limit}."
        )
    ids = (ids * (needed // len(ids) + 1))[:needed]
    model = HFModel(decoder.target.model, probe=False)
    model.add_rows([ids[:context]])
    logits = model.head(model.forward(torch.tensor([ids[context:]], device=model.device)).hidden)  # [1, q + 1, V]
    return _Bench(model, ids, num_inputs, logits.roll(-1, dims=1))


@torch.inference_mode()
def _measure(
    decoder: Decoder, bench: _Bench, repeats: int, shortlist_size: int, skipped: list[str]
) -> dict[str, list[float]]:
    """Seconds of each part in each repeat. skipped: gets the ways that this head or these settings do not allow."""
    model = bench.model
    hidden = model.forward(bench.tokens).hidden
    logits = model.head(hidden)
    ways: dict[str, Callable[[], Any]] = {
        BODY: lambda: model.forward(bench.tokens),
        PLAIN: lambda: model.head(hidden),
    }
    for name, rule_name, heads in _WAYS:
        dropout = replace(decoder.dropout, heads=heads, shortlist_size=shortlist_size)  # type: ignore[arg-type]  # a Heads
        way = _way(bench, hidden, logits, MCDropoutHead(model.head, dropout), make_rule(rule_name))
        if heads == "shortlist" and not MCDropoutHead(model.head, dropout).can_shortlist:
            skipped.append(f"{name}: no shortlist on this head at shortlist_size={shortlist_size}")
            continue
        try:
            way()  # warms up, and finds heads that show no rows
        except ConfigError as error:
            skipped.append(f"{name}: {error}")
            continue
        ways[name] = way
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with ProgressMeter("overhead", repeats) as meter:
        for _ in range(repeats):
            for name, way in ways.items():
                seconds[name].append(_timed(way, model.device))
            meter.advance()
    return seconds


def _way(
    bench: _Bench, hidden: Tensor, logits: Tensor, head: MCDropoutHead, rule: AcceptanceRule
) -> Callable[[], Tensor]:
    return lambda: judge_chain(bench.ids, hidden, logits, bench.draft_logits, head, rule)


def _timed(way: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    way()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def overhead_rows(seconds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """One row per part: milliseconds (median, 10% and 90%), and its share of the forward, which is body and plain head.

    added: what a way costs over judging losslessly in the same repeat, median over repeats."""
    forward = statistics.median(b + h for b, h in zip(seconds[BODY], seconds[PLAIN], strict=True))
    base = seconds["lossless"]
    rows = []
    for name, values in seconds.items():
        is_way = name not in (BODY, PLAIN)
        added = statistics.median(v - b for v, b in zip(values, base, strict=True)) if is_way else None
        ordered = sorted(values)
        rows.append(
            {
                "part": name,
                "ms_median": 1e3 * statistics.median(values),
                "ms_q10": 1e3 * ordered[len(ordered) // 10],
                "ms_q90": 1e3 * ordered[(len(ordered) * 9) // 10],
                "share_of_forward": statistics.median(values) / forward,
                "added_ms": None if added is None else 1e3 * added,
                "added_share": None if added is None else added / forward,
            }
        )
    return rows


def print_overhead(result: Mapping[str, Any]) -> None:
    """The table, and what it was measured on."""
    table = Table("", "ms", "10% to 90%", "of a forward", "ms over lossless", "points of a forward")
    for row in result["rows"]:
        table.add_row(
            row["part"],
            f"{row['ms_median']:.3f}",
            f"{row['ms_q10']:.3f} to {row['ms_q90']:.3f}",
            f"{row['share_of_forward']:.2%}",
            "" if row["added_ms"] is None else f"{row['added_ms']:+.3f}",
            "" if row["added_share"] is None else f"{row['added_share']:+.2%}",
        )
    settings = result["settings"]
    shown = console()
    shown.print(table)
    shown.print(
        f"One forward over {settings['inputs']} tokens behind {settings['context']} cached ones, batch 1, "
        f"K={settings['k']}, {settings['dtype'].removeprefix('torch.')}, vocabulary {settings['vocabulary']}; "
        f"all {settings['inputs']} positions judged, {settings['repeats']} interleaved repeats."
    )
    for reason in settings["skipped"]:
        shown.print(f"Left out: {reason}")
