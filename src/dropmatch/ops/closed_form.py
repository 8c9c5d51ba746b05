"""What dropout on a linear head does on average, without drawing a mask. Pure tensor functions; knows no rule or model.

With inverted dropout a head's logit of token v is z_v + sum_j e_j h_j w_vj, where the e_j are independent, 1/(1-p) - 1
with chance 1 - p and -1 with chance p: mean 0, variance p/(1-p). Differences of logits are therefore nearly normal with
known moments. `rows` below always holds the products h_j w_vj. Source: DropMatch (arXiv 2603.03333), Eq. 1-6;
docs/closed-form.md derives and measures what stands here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dropmatch.errors import ShapeError
from dropmatch.ops.divergence import LN2

# A margin so many deviations from zero is certain; further out, squares of it would only lose digits.
_CERTAIN = 30.0
_TINY = 1e-30
_NODES = 128  # of the quadrature over the largest of K gamma variables; 64 differ from 1024 by under 0.1%


def win_chance(margin: Tensor, rows: Tensor, p_drop: float, *, num_exact: int = 2) -> Tensor:
    """Chance that one dropout head prefers a token to all of its rivals.

    margin: [..., R] the token's plain score less each rival's; rows: [..., R, d] the same difference of products h * w,
    coordinate by coordinate. Returns [...]. The num_exact coordinates that move the margins most are summed over kept
    and dropped (2**num_exact terms); the rest counts as normal, its orthant probability by sequential truncation
    (Mendell and Elston, 1974). num_exact = d is the sum over all masks. Equal scores that never move count half.
    """
    if margin.shape != rows.shape[:-1]:
        raise ShapeError(f"margin {tuple(margin.shape)} and rows {tuple(rows.shape)} do not name the same rivals.")
    margin, rows = margin.float(), rows.float()
    num_exact = min(num_exact, rows.shape[-1])
    square, odds = rows.square(), p_drop / (1.0 - p_drop)
    reach = odds * square.sum(-1) + margin.square()  # a rival out of reach has no say in which coordinates matter
    largest = (square / reach.clamp(min=_TINY)[..., None]).sum(-2).topk(num_exact, dim=-1).indices  # [..., E]
    index = largest[..., None, :].expand(*rows.shape[:-1], num_exact)
    kept = _patterns(num_exact, rows.device)  # [2**E, E]
    is_kept = kept.to(rows.dtype)  # a number and a number would take torch's default dtype, whatever it is
    noise = is_kept * odds - (1.0 - is_kept)
    weight = (is_kept * (1.0 - p_drop) + (1.0 - is_kept) * p_drop).prod(-1)  # [2**E]
    shift = noise @ rows.gather(-1, index).transpose(-1, -2)  # [..., 2**E, R]
    rest = rows.scatter(-1, index, 0.0)
    covariance = odds * rest @ rest.transpose(-1, -2)  # [..., R, R]
    return (weight * orthant_chance(margin[..., None, :] + shift, covariance[..., None, :, :])).sum(-1)


def _patterns(count: int, device: torch.device) -> Tensor:
    """All ways to keep some of `count` coordinates. [2**count, count] bool."""
    number = torch.arange(2**count, device=device)
    return (number[:, None] >> torch.arange(count, device=device)) & 1 == 1


def orthant_chance(mean: Tensor, covariance: Tensor) -> Tensor:
    """Chance that all of R normal variables are positive, by sequential truncation.

    mean: [..., R]; covariance: [..., R, R], broadcast against it. Returns [...]. The least likely variable is taken to
    be positive first, mean and covariance of the others follow as if they were normal still, and so on. Exact for one
    variable and for independent ones.
    """
    R = mean.shape[-1]
    covariance = covariance.expand(*mean.shape, R).clone()
    mean = mean.clone()
    is_done = torch.zeros_like(mean, dtype=torch.bool)
    log_chance = mean.new_zeros(mean.shape[:-1])
    for _ in range(R):
        deviation = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=_TINY).sqrt()  # [..., R]
        standard = (mean / deviation).clamp(-_CERTAIN, _CERTAIN).masked_fill(is_done, torch.inf)
        first = standard.argmin(-1, keepdim=True)  # [..., 1]
        at = standard.gather(-1, first)
        log_first = torch.special.log_ndtr(at)
        log_chance = log_chance + log_first[..., 0]
        # moments of a standard normal cut off below -at
        up = torch.exp(-0.5 * at.square() - 0.5 * math.log(2 * math.pi) - log_first)
        narrowed = (up * (up + at)).clamp(0.0, 1.0)
        loading = covariance.gather(-2, first[..., None].expand(*first.shape, R))[..., 0, :] / deviation.gather(
            -1, first
        )
        mean = mean + loading * up
        covariance = covariance - narrowed[..., None] * loading[..., :, None] * loading[..., None, :]
        is_done = is_done.scatter(-1, first, True)
    return log_chance.exp()


def any_head_chance(chance: Tensor, num_paths: int) -> Tensor:
    """Chance that at least one of K independent heads does what one does with the given chance: 1 - (1 - P)^K."""
    return -torch.expm1(num_paths * torch.log1p(-chance.clamp(0.0, 1.0)))


def logit_spread(probs: Tensor, rows: Tensor, p_drop: float) -> tuple[Tensor, Tensor]:
    """How far one head's logits scatter, seen with the plain head's own probabilities.

    probs: [..., M] of the likeliest tokens, the tail left out; rows: [..., M, d] products h * w of these tokens.
    Returns the expected variance [...] over tokens v ~ probs of the logit noise, and its degrees of freedom [...]: 1 if
    two tokens share the mass, more with more contenders. The tail is taken to scatter as the listed tokens do on
    average, each counted once.
    """
    probs, rows = probs.float(), rows.float()
    listed = probs.sum(-1)
    share = probs / listed[..., None]
    centred = rows - (share[..., None] * rows).sum(-2, keepdim=True)
    square = centred.square().sum(-1)  # [..., M] expected squared distance from the mean token, in units of p/(1-p)
    inside = (share * square).sum(-1)
    tail = (1.0 - listed).clamp(min=0.0)
    scaled = centred * share.sqrt()[..., None]
    gram = scaled @ scaled.transpose(-1, -2)  # its eigenvalues weigh the chi-squares that the variance is a sum of
    freedom = inside.square() / gram.square().sum((-1, -2)).clamp(min=_TINY)
    variance = p_drop / (1.0 - p_drop) * ((1.0 - tail) * inside + tail * square.mean(-1))
    return variance, freedom.clamp(min=1.0)


def expected_divergence(variance: Tensor, num_paths: int) -> Tensor:
    """Expected JS of one of K heads to their centroid, in nats, to second order: (1 - 1/K) / 8 of the variance."""
    return variance * ((1.0 - 1.0 / num_paths) / 8.0)


def expected_radius(variance: Tensor, freedom: Tensor, num_paths: int) -> Tensor:
    """Expected max_i JS(head_i, centroid) over K heads in nats, between 0 and ln 2 (Eq. 6 without its masks).

    variance, freedom: [...] from `logit_spread`. Returns [...]. The mean divergence, times how far the largest of K - 1
    gamma variables stands above its mean, bent to the ceiling: x -> ln 2 (1 - exp(-x / ln 2)).
    """
    radius = expected_divergence(variance, num_paths) * max_over_mean(freedom, num_paths - 1)
    return -LN2 * torch.expm1(-radius / LN2)


def max_over_mean(freedom: Tensor, count: int) -> Tensor:
    """Expected largest of `count` chi-square variables over their mean. freedom: [...]. Returns [...], 1 for one."""
    if count < 2:
        return torch.ones_like(freedom)
    shape = (freedom / 2.0)[..., None]
    # nodes denser near 0, up to where a gamma variable's tail is below 1e-5 of its mean
    nodes = torch.linspace(0.0, 1.0, _NODES, dtype=freedom.dtype, device=freedom.device).square()
    x = nodes * (shape + 12.0 * shape.sqrt() + 12.0)
    below = torch.special.gammainc(shape.expand_as(x), x)
    return torch.trapezoid(1.0 - below**count, x) / shape[..., 0]
