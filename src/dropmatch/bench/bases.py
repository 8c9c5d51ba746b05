"""What the figures of a comparison are set against: lossless decoding. Pure functions over JSON values.

Texts and their grades have lossless decoding at the same draft length as their base where it was run, else at another
one, since its texts are the same but for rounding. Speed has that at the same length alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

AGAINST_TEXTS = (
    *("logprob_difference", "length_ratio", "diverged_share", "first_divergence_median", "accuracy_difference"),
    *("difference_low", "difference_high", "gained", "lost", "p_value"),
)


def well_based(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a summary without what older versions set against another base: texts against plain decoding where
    lossless decoding was not run, and speed against lossless decoding at another draft length."""
    texts = {row["task"] for row in rows if row["rule"] == "lossless"}
    speeds = {(row["task"], row["draft_length"]) for row in rows if row["rule"] == "lossless"}
    return [
        {
            **row,
            **({} if row["task"] in texts else {key: None for key in AGAINST_TEXTS if key in row}),
            **({} if (row["task"], row["draft_length"]) in speeds else {"over_lossless": None}),
        }
        for row in rows
    ]


def reference_arm(arms: Mapping[str, Any], name: str) -> str | None:
    """The lossless method whose texts to compare with; None where none was run."""
    lossless = [other for other, arm in arms.items() if arm["rule"] == "lossless"]
    return next(iter([*(other for other in lossless if same_length(arms, name, other)), *lossless]), None)


def same_length(arms: Mapping[str, Any], name: str, other: str) -> bool:
    """Whether two methods draft as far."""
    return bool(arms[name]["draft_length"] == arms[other]["draft_length"])
