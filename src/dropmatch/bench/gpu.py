"""Head and rule at the sizes of a 70B model, and a small model end to end: one run of some minutes for a GPU.

The body of a 70B model is not needed to say what its dropout heads cost: hidden states and an LM head of its size are
drawn at random, since no value changes the time. In every repeat the plain head and each way to judge q drafted tokens
run one after the other, timed by the GPU's own events. "naive" is what a plain prototype does: K passes through the
head, K distributions over the vocabulary in memory, divergences by their definition.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from dropmatch.bench.analyses.chain import judge_chain
from dropmatch.bench.analyses.show import console
from dropmatch.bench.bandwidth import read_bandwidth
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import write_result
from dropmatch.config import DropoutConfig, EngineConfig, Heads, SamplingParams
from dropmatch.core.acceptance import make_rule
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.head import MCDropoutHead
from dropmatch.provenance import collect

PLAIN, NAIVE = "plain head", "naive: K passes"
_WAYS: tuple[tuple[str, str, Heads], ...] = (
    ("lossless", "lossless", "full"),
    ("heads with JS (Eq. 6, 7)", "js+majority", "full"),
    ("shortlist with JS", "js+majority", "shortlist"),
    ("closed form of Eq. 6, 7", "expected-js+expected-majority", "full"),
)
ONE_OPEN: tuple[tuple[str, str, Heads], ...] = (
    ("dropmatch, one token open", "dropmatch", "full"),
    ("dropmatch, one token open, shortlist", "dropmatch", "shortlist"),
    ("closed form, one token open", "dropmatch-expected", "full"),
)
"""As decoding goes: the target's own token settles all but one position."""
_P_DROP = 0.3
_FEWEST, _MOST = 3, 50  # repeats


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of the head. inputs: each q to measure; shortlist: its tokens; dtype: a name of torch's."""

    hidden_size: int = 8192
    vocabulary: int = 128_256
    paths: int = 5
    inputs: tuple[int, ...] = (6, 11)
    shortlist: int = 1024
    dtype: str = "bfloat16"


LARGE = Shapes()
SMALL = Shapes(hidden_size=64, vocabulary=512, paths=5, inputs=(6, 11), shortlist=64, dtype="float32")


class RandomHead:
    """An LM head of a given size with random weights. weight: [V, d]."""

    is_linear = True
    bias = None
    scale = 1.0

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        dtype = getattr(torch, shapes.dtype)
        self.weight = torch.randn(shapes.vocabulary, shapes.hidden_size, device=device, dtype=dtype)
        self.weight *= 2.0 / math.sqrt(shapes.hidden_size)
        self.vocab_size = shapes.vocabulary

    def __call__(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


def naive_verdict(
    head: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, draft_logits: Tensor, masks: Tensor, p_drop: float
) -> Tensor:
    """Algorithm 1 as a prototype has it. hidden: [q, d]; tokens: [q] drafted; draft_logits: [q, V]; masks: [K, q, d]
    True = kept. Returns [q] bool, whether each token is kept (Eq. 6 or Eq. 7)."""
    logits = torch.stack([head(hidden * mask / (1.0 - p_drop)) for mask in masks]).float()  # [K, q, V]
    probs = logits.softmax(-1)
    centroid = logits.mean(0).softmax(-1)  # [q, V], Eq. 5
    radius = _js(probs, centroid).amax(0)
    is_near = _js(draft_logits.float().softmax(-1), centroid) <= radius
    return is_near | (logits.argmax(-1).mode(0).values == tokens)


def _js(p: Tensor, q: Tensor) -> Tensor:
    """Jensen-Shannon divergence by its definition, in nats. p, q: [..., V]."""
    middle = (p + q) / 2
    return (torch.xlogy(p, p / middle).sum(-1) + torch.xlogy(q, q / middle).sum(-1)) / 2


def run_gpu(
    *, device: torch.device, shapes: Shapes, seconds: float, max_new_tokens: int, is_small: bool, output: Path
) -> dict[str, Any]:
    """Measure and write the results file. Returns what was written.

    seconds: about how long the repeats of all head measurements may take together. is_small: a tiny model end to end.
    """
    provenance = collect(device=str(device))
    bandwidth = read_bandwidth(device, num_bytes=2**22 if is_small else None)
    heads = {}
    for q in shapes.inputs:
        heads[str(q)] = _measure_heads(device, shapes, q, seconds / len(shapes.inputs))
        _empty_cache(device)
    model = _end_to_end(device, max_new_tokens, is_small)
    result = {
        "kind": "bench-gpu",
        "settings": {
            **asdict(shapes),
            "inputs": list(shapes.inputs),
            "p_drop": _P_DROP,
            "max_new_tokens": max_new_tokens,
            "is_small": is_small,
        },
        "bandwidth_bytes_per_s": bandwidth,
        "floor_ms": 1e3 * shapes.vocabulary * shapes.hidden_size * getattr(torch, shapes.dtype).itemsize / bandwidth,
        "heads": heads,
        "model": model,
        "provenance": provenance,
    }
    write_result(result, output)
    return result


@torch.inference_mode()
def _measure_heads(device: torch.device, shapes: Shapes, q: int, seconds: float) -> list[dict[str, Any]]:
    """A row per way at q inputs."""
    ways = _ways(device, shapes, q)
    peaks = {name: _peak(way, device) for name, way in ways.items()}  # warms up, too
    times: dict[str, list[float]] = {name: [] for name in ways}
    started = time.perf_counter()
    with ProgressMeter(f"q={q}", _MOST) as meter:
        for repeat in range(_MOST):
            if repeat >= _FEWEST and time.perf_counter() - started > seconds:
                break
            for name, way in ways.items():
                times[name].append(_milliseconds(way, device))
            meter.advance()
    return gpu_rows(times, peaks)


def _ways(device: torch.device, shapes: Shapes, q: int) -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    head = RandomHead(shapes, device)
    hidden = torch.randn(1, q, shapes.hidden_size, device=device, dtype=head.weight.dtype)
    logits = head(hidden)
    # each draft has another position's distribution, which Eq. 6 refuses, so that Eq. 7 is asked everywhere too
    draft_logits = torch.cat([logits, logits[:, -1:]], dim=1).roll(1, dims=1)
    own = logits[0].argmax(-1).tolist()
    strange = [(token + 1) % shapes.vocabulary for token in own]  # no node settles itself
    one_open = [*own[: q // 2], strange[q // 2], *own[q // 2 + 1 :]]
    drafted = torch.tensor(strange, device=device)

    def naive() -> Tensor:
        masks = torch.rand(shapes.paths, q, shapes.hidden_size, device=device) >= _P_DROP
        return naive_verdict(head, hidden[0], drafted, draft_logits[0, :q], masks, _P_DROP)

    def judged(rule: str, heads: Heads, tokens: list[int]) -> Callable[[], Tensor]:
        config = DropoutConfig(num_paths=shapes.paths, p_drop=_P_DROP, heads=heads, shortlist_size=shapes.shortlist)
        asked, made = MCDropoutHead(head, config), make_rule(rule)
        return lambda: judge_chain([0, *tokens], hidden, logits, draft_logits, asked, made)

    ways: dict[str, Callable[[], Any]] = {PLAIN: lambda: head(hidden), NAIVE: naive}
    ways |= {name: judged(rule, heads, strange) for name, rule, heads in _WAYS}
    return ways | {name: judged(rule, heads, one_open) for name, rule, heads in ONE_OPEN}


def _milliseconds(way: Callable[[], Any], device: torch.device) -> float:
    """One call, from the moment it is given to the device until its last kernel ends."""
    if device.type != "cuda":
        started = time.perf_counter()
        way()
        return 1e3 * (time.perf_counter() - started)
    make: Callable[..., Any] = torch.cuda.Event
    begin, end = make(enable_timing=True), make(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    way()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))


def _peak(way: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes at most in use during a call beyond those before it; None where the device does not tell. Runs it twice, so
    that workspaces of the first call are not counted."""
    way()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    way()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _empty_cache(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def gpu_rows(times: Mapping[str, Sequence[float]], peaks: Mapping[str, int | None]) -> list[dict[str, Any]]:
    """A row per way: milliseconds (median, 10% and 90%), over the plain head in the same repeat and over the naive way
    (medians of ratios), and the peak of memory beyond what was there."""
    rows = []
    for name, values in times.items():
        ordered = sorted(values)
        rows.append(
            {
                "way": name,
                "repeats": len(values),
                "ms_median": statistics.median(values),
                "ms_q10": ordered[len(ordered) // 10],
                "ms_q90": ordered[(len(ordered) * 9) // 10],
                "over_plain_head": _median_ratio(values, times[PLAIN]),
                "over_naive": _median_ratio(values, times[NAIVE]),
                "peak_bytes": peaks[name],
            }
        )
    return rows


def _median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


# -- a model end to end ---------------------------------------------------------------------------------------------

_LENGTH, _PROMPT = 5, 64
_MODEL_WAYS: tuple[tuple[str, str, Heads], ...] = (
    ("plain", "exact", "full"),
    (f"lossless L={_LENGTH}", "lossless", "full"),
    (f"dropmatch L={_LENGTH}", "dropmatch", "full"),
    (f"dropmatch L={_LENGTH}, shortlist", "dropmatch", "shortlist"),
    (f"dropmatch-expected L={_LENGTH}", "dropmatch-expected", "full"),
)


def _end_to_end(device: torch.device, max_new_tokens: int, is_small: bool) -> dict[str, Any]:
    """Decoding with a pair of random weights: {"rows", "why_not"}, one of them None."""
    try:
        from dropmatch.hf.model import HFModel
        from dropmatch.hf.random_pair import PairShape, random_pair
    except ImportError as error:  # the heads need torch alone, so a machine with nothing else has measured them
        return {"rows": None, "why_not": f"No model was run: {error}. Install dropmatch with its dependencies."}
    from dropmatch.drafters.draft_model import DraftModelDrafter

    shape = PairShape(512, 64, 4, 1, 4, 2, 512) if is_small else PairShape()
    dtype = torch.float32 if is_small else torch.bfloat16
    target, draft = random_pair(shape, dtype=dtype, device=str(device))
    prompt = [(31 * i + 7) % shape.vocab_size for i in range(_PROMPT)]

    def run(rule: str, heads: Heads, num_new: int) -> SpeculativeEngine:
        engine = SpeculativeEngine(
            HFModel(target, probe=False),
            None if rule == "exact" else DraftModelDrafter(HFModel(draft, probe=False), shape.vocab_size),
            rule=rule,
            dropout=DropoutConfig(p_drop=0.1, heads=heads, shortlist_size=shape.vocab_size // 8),
            config=EngineConfig(draft_length=_LENGTH, max_length=shape.positions),
        )
        engine.add(prompt, SamplingParams(max_new_tokens=num_new, eos_ids=()))
        engine.run()
        return engine

    rows = []
    for name, rule, heads in _MODEL_WAYS:
        run(rule, heads, min(8, max_new_tokens))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        stats = run(rule, heads, max_new_tokens).stats
        split = stats.time
        rows.append(
            {
                "way": name,
                "tokens_per_second": stats.tokens_per_second,
                "tau": stats.requests.tau,
                "judge_over_target": split.judge / split.target,
                **{f"{part}_s": getattr(split, part) for part in ("draft", "target", "judge", "rest")},
                "rounds": stats.requests.rounds,
                "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            }
        )
    return {"rows": rows, "why_not": None, "shape": asdict(shape), "dtype": str(dtype)}


def print_gpu(result: Mapping[str, Any]) -> None:
    """The tables, and what they were measured on."""
    settings, shown = result["settings"], console()
    for q, rows in result["heads"].items():
        table = Table(f"q={q}", "ms", "10% to 90%", "of the plain head", "of naive", "peak memory")
        for row in rows:
            table.add_row(
                row["way"],
                f"{row['ms_median']:.3f}",
                f"{row['ms_q10']:.3f} to {row['ms_q90']:.3f}",
                f"{row['over_plain_head']:.2f}",
                f"{row['over_naive']:.3f}",
                "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f} MiB",
            )
        shown.print(table)
    shown.print(
        f"d={settings['hidden_size']}, V={settings['vocabulary']}, K={settings['paths']}, {settings['dtype']}, "
        f"{result['provenance']['device']}. Reading the head once takes at least {result['floor_ms']:.3f} ms "
        f"({result['bandwidth_bytes_per_s'] / 1e9:.0f} GB/s measured)."
    )
    model = result["model"]
    if model["rows"] is None:
        shown.print(model["why_not"], markup=False)
        return
    table = Table("model", "tokens/s", "tau", "head+rule/target", "ms a round: draft", "target", "head+rule", "rest")
    for row in model["rows"]:
        parts = [f"{1e3 * row[f'{part}_s'] / row['rounds']:.2f}" for part in ("draft", "target", "judge", "rest")]
        table.add_row(
            row["way"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['tau']:.2f}",
            f"{row['judge_over_target']:.1%}",
            *parts,
        )
    shown.print(table)
    shape = model["shape"]
    shown.print(
        f"A pair of random weights: {shape['layers']} layers of {shape['hidden_size']}, drafted by the first "
        f"{shape['draft_layers']}; vocabulary {shape['vocab_size']}, {settings['max_new_tokens']} tokens, batch 1."
    )
