"""The dropout rules in closed form: what K random heads would say on average, read off the head's own weight rows.

No masks, no seeds, no K x V logits: a position costs a few dozen rows of the head. Equal inputs give equal decisions
whatever the batch, the seed or `mask_sharing`; K and p_drop come from the engine's DropoutConfig and act as two knobs
of leniency. Source: the rules are those of DropMatch (arXiv 2603.03333), Eq. 4, 6 and 7; docs/closed-form.md derives
the closed forms and says where they fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropmatch.config import DropoutConfig
from dropmatch.core.head_rows import HeadRows
from dropmatch.core.reasons import Reason
from dropmatch.core.verification import Verification
from dropmatch.errors import ConfigError
from dropmatch.ops.closed_form import any_head_chance, expected_radius, logit_spread, win_chance
from dropmatch.ops.divergence import js_from_log_probs, js_point_mass, log_probs
from dropmatch.ops.random import Purpose

if TYPE_CHECKING:
    from dropmatch.core.acceptance import Need

# Sizes of the shortlists, by measured error: docs/closed-form.md.
_NUM_RIVALS = 32  # tokens that the drafted one must beat
_NUM_TOKENS = 64  # likeliest tokens that the divergence is computed over
_NUM_LEADERS = 4  # tokens that the drafted one is compared with for the likeliest head token
_BLOCK = 16  # positions done at once
_LOWEST = -1e30  # stands for a masked score: finite, so that differences are no NaN


class _ExpectedRule:
    """A rule that asks for no sampled evidence and leaves the next token to the target."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    @property
    def couples_draft(self) -> bool:
        return True

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        return v.plain_at(node)


@dataclass(frozen=True, slots=True)
class ExpectedHead(_ExpectedRule):
    """Keep a token that is among the tokens of K dropout heads with at least a given chance (Eq. 4 without masks).

    chance: in (0, 1]; at 0.5 the sampled rule's own majority over many seeds. At temperature > 0 the chance is
    conditional on the position's Gumbel noise, which all heads share, so that p_drop = 0 stays lossless."""

    chance: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.chance, Real) or not 0.0 < self.chance <= 1.0:
            raise ConfigError(
                f"ExpectedHead chance={self.chance!r} (head_chance, by name) is out of range. Allowed: (0, 1]."
            )

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        def is_kept(b: Tensor, n: Tensor) -> Tensor:
            return any_head_chance(head_chance(v, b, n), v.head.config.num_paths) >= self.chance

        return _judge(v, ask, Reason.EXPECTED_HEAD, is_kept)


@dataclass(frozen=True, slots=True)
class ExpectedMajority(_ExpectedRule):
    """Keep the token that a dropout head produces most often (Eq. 7 without masks)."""

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        def is_kept(b: Tensor, n: Tensor) -> Tensor:
            contest = _Contest(v, b, n)
            chances = contest.chances(1 + contest.num_leaders)
            return chances[:, 0] > chances[:, 1:].amax(-1)

        return _judge(v, ask, Reason.EXPECTED_MAJORITY, is_kept)


@dataclass(frozen=True, slots=True)
class ExpectedJS(_ExpectedRule):
    """Keep if the drafter's distribution is as near to the plain head's as the farthest of K dropout heads is expected
    to be from their centroid (Eq. 6 without masks).

    As in Eq. 6 the token itself plays no part, temperature does not enter, and a drafter without a distribution counts
    as a point mass on its token. K = 1 has no radius."""

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        def is_kept(b: Tensor, n: Tensor) -> Tensor:
            return draft_divergence(v, b, n) <= radius(v, b, v.parent[b, n])

        return _judge(v, ask, Reason.EXPECTED_JS, is_kept)


def _judge(v: Verification, ask: Tensor, reason: Reason, is_kept: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Codes [B, N] from a test of drafted tokens (b, n), a block at a time. Without dropout only exact tokens stay."""
    codes = torch.zeros_like(ask, dtype=torch.int8)
    if v.head.p_drop == 0.0 and reason is not Reason.EXPECTED_JS:
        return (ask & v.is_exact).to(torch.int8) * int(reason)
    rows, nodes = v.places(ask)
    for start in range(0, len(rows), _BLOCK):
        b, n = rows[start : start + _BLOCK], nodes[start : start + _BLOCK]
        codes[b, n] = (is_kept(b, n) & ask[b, n]).to(torch.int8) * int(reason)
    return codes


class _Contest:
    """The drafted tokens (b, n) [M] and their strongest rivals, as every dropout head of the position sees them.

    Token 0 is the drafted one, the others are sorted by the score that the plain head gives them."""

    def __init__(self, v: Verification, b: Tensor, n: Tensor) -> None:
        head = HeadRows.of(v.head.head)
        node, drafted = v.parent[b, n], v.tree.tokens[b, n][:, None]
        noise = _shared_noise(v, b, node)
        scores = v.sampling.warp(v.target_logits[b, node].float(), b)
        scores = (scores if noise is None else scores + noise).clamp(min=_LOWEST)  # [M, V]
        num_rivals = min(_NUM_RIVALS, scores.shape[-1] - 1)
        rivals = scores.scatter(-1, drafted, -torch.inf).topk(num_rivals, dim=-1).indices
        tokens = torch.cat([drafted, rivals], dim=-1)  # [M, 1 + R]
        products = head.products(v.hidden[b, node], tokens)  # [M, 1 + R, d]
        scores, slope = scores.gather(-1, tokens), head.slope(products, tokens)
        if head.softcap is not None:
            # a cap is monotone, so a greedy argmax can be taken in front of it, where the head is linear
            is_bare = _is_bare(v, b)[:, None]
            is_open = scores > _LOWEST  # serving engines mask by a grammar what is bare otherwise
            scores = torch.where(is_bare & is_open, head.scores(products, tokens), scores)
            slope = torch.where(is_bare, 1.0, slope)
        if v.sampling.any_sampled:
            slope = slope / v.sampling.temperature[b][:, None]
        self.num_leaders = min(_NUM_LEADERS, num_rivals)
        self._scores, self._products, self._p_drop = scores, products * slope[..., None], v.head.p_drop

    def chances(self, count: int) -> Tensor:
        """Chance [M, count] that one head produces each of the first tokens of the list. All at once, since the chance
        of one token is a long row of small operations."""
        device = self._scores.device
        place = torch.arange(self._scores.shape[-1] - 1, device=device)
        others = place + (place >= torch.arange(count, device=device)[:, None])  # [count, R] all places but its own
        margin = self._scores[:, :count, None] - self._scores[:, others]
        chance = win_chance(margin, self._products[:, :count, None] - self._products[:, others], self._p_drop)
        return torch.where(self._scores[:, :count] > _LOWEST, chance, 0.0)  # where all are masked, none wins


def head_chance(v: Verification, b: Tensor, n: Tensor) -> Tensor:
    """Chance that one dropout head produces the drafted token at (b, n) [M]. Returns [M]."""
    return _Contest(v, b, n).chances(1)[:, 0]


def _is_bare(v: Verification, b: Tensor) -> Tensor:
    """Rows [M] whose tokens are the argmax of the head's own logits: greedy and without processors."""
    return v.sampling.is_bare[b]


def _shared_noise(v: Verification, b: Tensor, node: Tensor) -> Tensor | None:
    """The Gumbel noise [M, V] of the nodes, zero in greedy rows."""
    if not v.sampling.any_sampled or not bool(v.sampling.is_sampled[b].any()):
        return None
    check_noise(v.head.config)
    noise = v.sampling.noise(b, v.positions[b, node], v.target_logits.shape[-1], Purpose.GUMBEL)
    return None if noise is None else noise[:, 0]


def check_noise(config: DropoutConfig) -> None:
    """Raise ConfigError unless all heads of a position sample with one noise."""
    if config.noise != "shared":
        raise ConfigError(
            f"The closed-form rules know heads that share their sampling noise, and noise={config.noise!r}. "
            "Use noise='shared', temperature 0, or a sampled rule such as 'dropmatch-naive'."
        )


def radius(v: Verification, b: Tensor, node: Tensor) -> Tensor:
    """Expected radius of Eq. 6 at the nodes (b, node) [M], in nats. Returns [M]."""
    return head_radius(
        HeadRows.of(v.head.head), v.hidden[b, node], v.target_logits[b, node], v.head.config.num_paths, v.head.p_drop
    )


def head_radius(head: HeadRows, hidden: Tensor, logits: Tensor, num_paths: int, p_drop: float) -> Tensor:
    """Expected radius of Eq. 6 in nats. hidden: [M, d]; logits: [M, V] of the plain head. Returns [M]."""
    log_p = log_probs(logits)
    best = log_p.topk(min(_NUM_TOKENS, log_p.shape[-1]), dim=-1)
    products = head.products(hidden, best.indices)
    products = products * head.slope(products, best.indices)[..., None]
    variance, freedom = logit_spread(best.values.exp(), products, p_drop)
    return expected_radius(variance, freedom, num_paths)


def draft_divergence(v: Verification, b: Tensor, n: Tensor) -> Tensor:
    """JS between the drafter's distribution and the plain head's at the parents of (b, n) [M], in nats. Returns [M]."""
    node = v.parent[b, n]
    log_p = log_probs(v.target_logits[b, node])
    if v.tree.child_logits is None:
        return js_point_mass(log_p.gather(-1, v.tree.tokens[b, n][:, None])[:, 0])
    return js_from_log_probs(v.draft_log_probs(b, node), log_p)
