"""Figures as text, alike in documents and in the terminal. Those that were not measured are empty."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def number(value: float | None, form: str) -> str:
    """A number in one of Python's formats."""
    return "" if value is None else format(value, form)


def share(row: Mapping[str, Any], value: str, low: str, high: str, *, sign: str = "") -> str:
    """A share of a summary's row and its interval in per cent. sign: "+" shows that of positive ones too."""
    if row[value] is None:
        return ""
    return f"{100 * row[value]:{sign}.1f} ({100 * row[low]:{sign}.1f} to {100 * row[high]:{sign}.1f})"


def spread_of(ratios: Sequence[float]) -> dict[str, float]:
    """What `spread` shows of ratios."""
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def spread(ratio: Mapping[str, float] | None) -> str:
    """A ratio of speeds: median, minimum and maximum over prompts."""
    return "" if ratio is None else "{median:.2f}x ({min:.2f}-{max:.2f})".format(**ratio)


def over_base(way: Mapping[str, Any]) -> dict[str, float]:
    """How many times as fast a way to multiply is as the one that all are compared with in its file."""
    ratio: dict[str, float] = way["over_packed"] if "over_packed" in way else way["over_torch"]
    return ratio
