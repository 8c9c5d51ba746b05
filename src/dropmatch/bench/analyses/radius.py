"""The radius of Eq. 6 against p_drop on a given target: what p_drop="auto" picks, sampled and in closed form, and why.

Asked at positions of the built-in calibration text, or of prompts. The two kinds of radius stand side by side at the
same positions.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from dropmatch.api import Decoder
from dropmatch.bench.analyses.decoding import encode
from dropmatch.bench.analyses.show import console
from dropmatch.bench.progress import ProgressMeter
from dropmatch.bench.results import write_result
from dropmatch.bench.tasks import Item
from dropmatch.core.calibrate import P_DROP_GRID, TARGET_RADIUS, choose_p_drop, expected_radius_at, radius_at
from dropmatch.errors import ConfigError
from dropmatch.hf.calibration import probe_states
from dropmatch.ops.divergence import LN2
from dropmatch.provenance import collect

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_LEAST_RADIUS = 1e-4  # nats; below it a quotient says nothing
_SATURATED = LN2 / 2  # as the warning on saturation has it


def run_radius(
    decoder: Decoder,
    items: Sequence[Item] | None,
    *,
    rates: Sequence[float],
    num_positions: int,
    seed: int,
    described: Mapping[str, Any],
    output: Path,
) -> dict[str, Any]:
    """Measure at all rates and write the results file. Returns what was written.

    items: prompts whose positions are asked, None for the built-in text; at most num_positions, evenly spread.
    Where the head shows no rows there is no closed form, and its figures are None.
    """
    provenance = collect(device=str(decoder.target.device))
    hidden = _spread(
        probe_states(decoder.target, decoder.tokenizer) if items is None else states(decoder, items), num_positions
    )
    config = decoder.dropout
    rows = []
    with ProgressMeter("radius", len(rates)) as meter:
        for rate in rates:
            sampled = radius_at(decoder.target.head, hidden, config, rate, seed=seed)
            expected = _expected(decoder, hidden, rate)
            rows.append(
                {
                    "p_drop": rate,
                    "sampled": figures(sampled),
                    "expected": None if expected is None else figures(expected),
                }
            )
            if expected is not None:
                rows[-1]["expected_over_sampled"] = _ratios(expected, sampled)
            meter.advance()
    result = {
        "kind": "analyze-radius",
        "settings": {
            **described,
            "k": config.num_paths,
            "rates": list(rates),
            "positions": len(hidden),
            "text": "built-in" if items is None else "prompts",
            "items": None if items is None else [item.id for item in items],
            "seed": seed,
            "dtype": str(decoder.target.dtype),
            "hidden_size": hidden.shape[-1],
        },
        "radius": rows,
        "auto": {
            "target_radius": TARGET_RADIUS,
            "sampled": _choice(decoder, hidden, seed, expected=False),
            "expected": None if rows[0]["expected"] is None else _choice(decoder, hidden, seed, expected=True),
        },
        "provenance": provenance,
    }
    write_result(result, output)
    return result


@torch.inference_mode()
def states(decoder: Decoder, items: Sequence[Item]) -> Tensor:
    """Inputs of the LM head [T, d] at all positions of the prompts, each run by itself."""
    parts = []
    for item in items:
        parts.append(decoder.target.add_rows([encode(decoder, item)]).hidden[0])
        decoder.target.filter([])
    return torch.cat(parts)


def _spread(hidden: Tensor, count: int) -> Tensor:
    """At most count of the positions, evenly spread. hidden: [T, d]."""
    T = len(hidden)
    return hidden[torch.linspace(0, T - 1, min(count, T)).round().long().to(hidden.device)]


def _expected(decoder: Decoder, hidden: Tensor, rate: float) -> Tensor | None:
    try:
        return expected_radius_at(decoder.target.head, hidden, decoder.dropout.num_paths, rate)
    except ConfigError as error:  # the head shows no rows
        warnings.warn(f"No closed form: {error}", stacklevel=2)
        return None


def figures(radius: Tensor) -> dict[str, float]:
    """Quantiles, mean and share of wide radii. radius: [T] nats."""
    radius = radius.float().cpu()
    quantiles = torch.quantile(radius, torch.tensor(QUANTILES)).tolist()
    return {
        **{f"q{round(100 * q)}": value for q, value in zip(QUANTILES, quantiles, strict=True)},
        "mean": float(radius.mean()),
        "saturated_share": float((radius > _SATURATED).float().mean()),
    }


def _ratios(expected: Tensor, sampled: Tensor) -> dict[str, float] | None:
    """Quantiles of closed over sampled radius where the sampled one is not nearly 0; None if it is everywhere."""
    is_wide = sampled >= _LEAST_RADIUS
    if not is_wide.any():
        return None
    ratio = (expected[is_wide] / sampled[is_wide]).float().cpu()
    low, median, high = torch.quantile(ratio, torch.tensor([0.1, 0.5, 0.9])).tolist()
    return {"q10": low, "q50": median, "q90": high}


def _choice(decoder: Decoder, hidden: Tensor, seed: int, *, expected: bool) -> dict[str, Any]:
    """What "auto" takes at these positions, the median radius of each rate it tried, and why it stopped."""
    choice = choose_p_drop(decoder.target.head, hidden, decoder.dropout, seed=seed, expected=expected)
    radius = choice.median_radius[choice.p_drop]
    if radius > TARGET_RADIUS:
        why = f"even the smallest rate of the grid exceeds {TARGET_RADIUS} nats"
    elif choice.p_drop == P_DROP_GRID[0]:
        why = f"the largest rate of the grid already stays within {TARGET_RADIUS} nats"
    else:
        larger = P_DROP_GRID[P_DROP_GRID.index(choice.p_drop) - 1]
        why = (
            f"the largest rate whose median radius stays within {TARGET_RADIUS} nats: {larger:g} has "
            f"{choice.median_radius[larger]:.4f}"
        )
    return {
        "p_drop": choice.p_drop,
        "why": why,
        "median_radius": {str(rate): value for rate, value in choice.median_radius.items()},
    }


def print_radius(result: Mapping[str, Any]) -> None:
    """The radius by rate, and both choices of "auto"."""
    table = Table("p_drop", "sampled: 10%", "median", "90%", "> ln 2 / 2", "expected: median", "expected/sampled")
    for row in result["radius"]:
        sampled, expected = row["sampled"], row["expected"]
        ratio = row.get("expected_over_sampled")
        table.add_row(
            f"{row['p_drop']:g}",
            f"{sampled['q10']:.4f}",
            f"{sampled['q50']:.4f}",
            f"{sampled['q90']:.4f}",
            f"{sampled['saturated_share']:.0%}",
            "" if expected is None else f"{expected['q50']:.4f}",
            "" if ratio is None else f"{ratio['q50']:.2f} ({ratio['q10']:.2f} to {ratio['q90']:.2f})",
        )
    shown = console()
    shown.print(table)
    settings = result["settings"]
    shown.print(f"Nats at {settings['positions']} positions, K={settings['k']}, hidden size {settings['hidden_size']}.")
    for kind in ("sampled", "expected"):
        choice = result["auto"][kind]
        if choice is not None:
            name = "auto" if kind == "sampled" else "auto-expected"
            shown.print(f"p_drop={name} picks {choice['p_drop']:g}: {choice['why']}.")
