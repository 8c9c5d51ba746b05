"""All linear layers of a model, one after the other, by every way this machine has to multiply them.

A forward over one token, over a draft, over a prompt: what part of it is the reading of weights, and what a way wastes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dropmatch.bench.bandwidth import read_bandwidth
from dropmatch.bench.figures import over_base, spread, spread_of
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import write_result
from dropmatch.bench.side_by_side import rotated
from dropmatch.errors import ConfigError
from dropmatch.hf.int4 import Int4Linear
from dropmatch.hf.loading import load_model
from dropmatch.hf.native import MOST_INT4_ROWS, NativeLinear, fits_native, is_plain, why_unavailable
from dropmatch.hf.packed import PackedLinear, can_pack
from dropmatch.hf.pairs import PAIRS, ensure_pair
from dropmatch.provenance import collect

TORCH, PACKED, NATIVE = "torch", "packed for oneDNN", "ours"
INT4_TORCH, INT4_NATIVE = "int4, torch", "int4, ours"


def run_linears(model: str, *, rows: Sequence[int], repeats: int, output: Path) -> dict[str, Any]:
    """model: as for `load`; of a named pair, its target. rows: tokens multiplied together. repeats: timings of each.

    Raises ConfigError if the model has no bfloat16 linear layer on a CPU.
    """
    folder = str(ensure_pair(model).target) if model in PAIRS else model
    layers = _layers(load_model(folder, dtype="auto", device="cpu"), model)
    ways = _ways(layers)
    bandwidth = read_bandwidth(torch.device("cpu"))
    measured = []
    with ProgressMeter("linears", len(rows) * repeats) as meter, torch.inference_mode():
        for count in rows:
            measured.append(_measure(ways, layers, count, repeats, meter))
    weights = sum(layer.weight.numel() for layer in layers)
    result = {
        "kind": "bench-linears",
        "settings": {
            "model": model,
            "layers": len(layers),
            "weights": weights,
            "repeats": repeats,
            "not_native": why_unavailable(),
        },
        "bandwidth_bytes_per_s": bandwidth,
        "floor_ms": 1e3 * 2 * weights / bandwidth,
        "rows": measured,
        "provenance": collect(device="cpu"),
    }
    write_result(result, output)
    return result


def _layers(model: Any, name: str) -> list[nn.Linear]:
    layers = [m for m in model.modules() if type(m) is nn.Linear and is_plain(m.weight)]
    if not layers:
        raise ConfigError(f"{name} has no bfloat16 linear layers on a CPU, and nothing else is multiplied here.")
    return layers


def _ways(layers: Sequence[nn.Linear]) -> dict[str, list[nn.Module]]:
    """By way, a layer for each. oneDNN's packed layers and ours are there only where every layer fits."""
    ways: dict[str, list[nn.Module]] = {TORCH: list(layers)}
    if all(map(can_pack, layers)):
        ways[PACKED] = [PackedLinear(layer, keep_weight=True) for layer in layers]
    is_native = all(map(fits_native, layers))
    if is_native:
        ways[NATIVE] = [NativeLinear(layer) for layer in layers]
    if all(map(Int4Linear.fits, layers)):
        ways[INT4_TORCH] = [Int4Linear(layer, is_native=False) for layer in layers]
        if is_native:
            ways[INT4_NATIVE] = [Int4Linear(layer, is_native=True) for layer in layers]
    return ways


def _measure(
    ways: dict[str, list[nn.Module]], layers: Sequence[nn.Linear], count: int, repeats: int, meter: ProgressMeter
) -> dict[str, Any]:
    """Milliseconds of each way, and how many times as fast as packed weights it is (or, where the CPU cannot pack, as
    torch), by repeats side by side."""
    torch.manual_seed(0)
    inputs = {width: torch.randn(count, width).bfloat16() for width in {layer.in_features for layer in layers}}
    here = {name: way for name, way in ways.items() if count <= MOST_INT4_ROWS or not name.startswith("int4")}
    seconds: dict[str, list[float]] = {name: [] for name in here}
    for way in here.values():
        _seconds(way, inputs)  # warm up
    for repeat in range(repeats):
        for name in rotated(list(here), repeat):
            seconds[name].append(_seconds(here[name], inputs))
        meter.advance()
    base, ratio = (PACKED, "over_packed") if PACKED in ways else (TORCH, "over_torch")
    by_way = {
        name: {
            "ms_median": 1e3 * statistics.median(values),
            ratio: spread_of([theirs / own for theirs, own in zip(seconds[base], values, strict=True)]),
        }
        for name, values in seconds.items()
    }
    return {"tokens": count, "ways": by_way}


def _seconds(way: Sequence[Callable[[Tensor], Tensor]], inputs: dict[int, Tensor]) -> float:
    started = time.perf_counter()
    for layer in way:
        layer(inputs[layer.in_features])  # type: ignore[attr-defined]  # linear layers of any kind have it
    return time.perf_counter() - started


def print_linears(result: dict[str, Any]) -> None:
    """One row for each number of tokens, one column for each way: milliseconds, and over the base."""
    names = list(dict.fromkeys(name for row in result["rows"] for name in row["ways"]))
    table = Table(title=f"linear layers of {result['settings']['model']}, floor {result['floor_ms']:.0f} ms")
    for title in ("tokens", *names):
        table.add_column(title, justify="right")
    for row in result["rows"]:
        cells = [
            f"{way['ms_median']:.1f} ms, {spread(over_base(way))}" if (way := row["ways"].get(name)) else ""
            for name in names
        ]
        table.add_row(str(row["tokens"]), *cells)
    Console().print(table)
