"""Is the radius of Eq. 6 fit for this model? Choosing p_drop from the model's own radius, and a watch on saturation.

The radius, max_i JS(path_i, centroid), grows with p_drop and shrinks with the hidden size. On a small model p_drop =
0.3 drives it towards its ceiling ln 2, where Eq. 6 keeps almost anything. Knows hidden states, but no text or model.
"""

from __future__ import annotations

import statistics
import warnings
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from dropmatch.config import DropoutConfig
from dropmatch.core.closed_form import head_radius
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.head_rows import HeadRows
from dropmatch.core.interfaces import LMHead
from dropmatch.core.verification import NodeEnsemble
from dropmatch.errors import ConfigError
from dropmatch.ops.divergence import LN2

P_DROP_GRID = (0.3, 0.25, 0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.015, 0.01, 0.005)
TARGET_RADIUS = 0.03
"""Nats. The paper's mean JS(centroid, heads) among tokens kept by Eq. 6 is 0.0313 (Table 3)."""

PROBE_TEXT = """\
The harbour was quiet when the last boat came in. Two men carried the nets ashore, counted the baskets, and wrote the \
numbers on a slate: fourteen of herring, three of cod. If each basket holds 25 kilograms, the catch weighs 425 \
kilograms in all, and at 2 euros a kilogram it is worth 850 euros.

def area(width, height):
    # the area of a rectangle
    return width * height

Question: Why is the sky blue? Answer: Sunlight holds all colours, and the air scatters short waves, which we see as \
blue, more strongly than long ones.
"""
"""Prose, arithmetic, code and a question, so that no single kind of text sets the radius."""

_SATURATED = LN2 / 2
_WATCHED = 32
_ENOUGH = 8 * _WATCHED  # positions behind which nothing is watched any more, since reading a radius makes the host wait
_BLOCK = 64  # positions whose closed form is computed at once


class SaturationWarning(UserWarning):
    """The radius of Eq. 6 is so wide that it keeps almost anything."""


@dataclass(frozen=True, slots=True)
class PDropChoice:
    """The chosen p_drop and the median radius (nats) at each p tried. is_expected: radii of the closed form."""

    p_drop: float
    median_radius: dict[float, float]
    is_expected: bool = False


@torch.inference_mode()
def choose_p_drop(
    head: LMHead, hidden: Tensor, config: DropoutConfig, *, seed: int = 0, expected: bool = False
) -> PDropChoice:
    """The largest p_drop of P_DROP_GRID whose median radius stays within TARGET_RADIUS on these hidden states.

    hidden: [T, d], inputs of the LM head at positions of ordinary text. If even the smallest p exceeds it, that one.
    expected: take the closed form's radius, which draws no masks, instead of that of sampled heads. Raises ConfigError
    for K=1, where no head has others to be far from.
    """
    if config.num_paths == 1:
        raise ConfigError(
            "p_drop='auto' measures how far the heads are from their mean, and K=1 is a single one. Give p_drop as a "
            "number, or K of at least 2."
        )
    if len(hidden) == 0:
        raise ConfigError("p_drop='auto' needs at least one hidden state to measure the radius at.")
    measured: dict[float, float] = {}
    for p_drop in P_DROP_GRID:
        if expected:
            radius = expected_radius_at(head, hidden, config.num_paths, p_drop)
        else:
            radius = radius_at(head, hidden, config, p_drop, seed=seed)
        measured[p_drop] = float(radius.median())
        if measured[p_drop] <= TARGET_RADIUS:
            break
    return PDropChoice(p_drop, measured, expected)


@torch.inference_mode()
def radius_at(head: LMHead, hidden: Tensor, config: DropoutConfig, p_drop: float, *, seed: int = 0) -> Tensor:
    """The radius max_i JS(path_i, centroid) in nats at each hidden state. hidden: [T, d]. Returns [T]."""
    settings = DropoutConfig(
        num_paths=config.num_paths, p_drop=p_drop, mask_sharing=config.mask_sharing, noise=config.noise
    )
    T = len(hidden)
    position = torch.arange(T, device=hidden.device)
    keys = torch.stack([torch.full_like(position, seed), torch.zeros_like(position), position], dim=-1)
    heads = MCDropoutHead(head, settings)(hidden, keys, pick=lambda logits, index: logits.argmax(-1), with_js=True)
    assert heads.radius is not None
    return heads.radius


@torch.inference_mode()
def expected_radius_at(head: LMHead, hidden: Tensor, num_paths: int, p_drop: float) -> Tensor:
    """The closed form's radius in nats at each hidden state. hidden: [T, d]. Returns [T].

    Raises ConfigError if the head does not show its rows."""
    rows = HeadRows.of(head)
    parts = torch.split(hidden, _BLOCK)
    return torch.cat([head_radius(rows, part, head(part), num_paths, p_drop) for part in parts])


class RadiusWatch:
    """Warns once when the radius, where it was asked for, is mostly near its ceiling ln 2. Looks at the first positions
    only: it is the model and p_drop that saturate, not the text."""

    def __init__(self, p_drop: float) -> None:
        self._p_drop = p_drop
        self._recent: deque[float] = deque(maxlen=_WATCHED)
        self._has_warned = False
        self._num_seen = 0

    def see(self, ensemble: NodeEnsemble | None) -> None:
        if ensemble is None or self._has_warned or self._num_seen >= _ENOUGH:
            return
        # one read: where nothing was asked there is no radius either
        radii = [radius for radius in ensemble.radius.flatten().tolist() if radius == radius]
        self._num_seen += len(radii)
        self._recent.extend(radii)
        if len(self._recent) == _WATCHED and statistics.median(self._recent) > _SATURATED:
            self._has_warned = True
            warnings.warn(
                f"The dropout radius saturates: its median over the last {_WATCHED} positions is "
                f"{statistics.median(self._recent):.2f} nats of at most {LN2:.2f}, so Eq. 6 keeps almost any token. "
                f"p_drop={self._p_drop} is too large for this model: use p_drop='auto', a smaller p_drop, or a guard "
                "on the token's target probability.",
                SaturationWarning,
                stacklevel=4,
            )
