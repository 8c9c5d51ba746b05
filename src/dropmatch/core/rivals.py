"""Acceptance rules of other papers and engines, to compare with. Pure tensor rules; knows no model, cache or dropout.

Letters in the formulas: x the drafted token; p the target's and q the drafter's distribution, both after penalties and,
in sampled rows, after temperature, top-k, top-p and min-p; in greedy rows the plain softmax (temperature 1); z the
target's logits before temperature. A drafter without a distribution, or one that ranks in a sampled row, counts as a
point mass on x.

Every rule but `Fuzzy` reports its kept tokens as `exact` where the target produced them too, as `ratio` where lossless
rejection sampling would have kept them with the same random number, and by its own name otherwise. Drafts are drawn
independently of the target's noise, as the formulas at temperature > 0 ask.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from dropmatch.core.reasons import Reason
from dropmatch.core.verification import Verification
from dropmatch.errors import ConfigError, UnknownNameError
from dropmatch.ops.divergence import LN2, js_divergence
from dropmatch.ops.random import Purpose, uniform

if TYPE_CHECKING:
    from dropmatch.core.acceptance import AcceptanceRule, Need

_TINY = 1e-30  # keeps ratios finite; far below any probability that float32 softmax yields for a drafted token
_ENTROPY_SHIFT = 1e-5  # Medusa's, inside the logarithm
_SGLANG_FLOOR = 1e-9  # of threshold_acc
_FLY_TOP, _FLY_WINDOW = 3, 6


# Options: each field knows its own range, so that Python callers and parsed names meet the same check and message.


def _number(default: float, low: float = 0.0, high: float = 1.0) -> float:
    made: float = field(default=default, metadata={"low": low, "high": high})
    return made


def _count(default: int, low: int) -> int:
    made: int = field(default=default, metadata={"low": low})
    return made


def _choice(default: str, *names: str) -> Any:
    return field(default=default, metadata={"names": names})


def _allowed(option: dataclasses.Field[Any]) -> str:
    meta = option.metadata
    if "allowed" in meta:
        return str(meta["allowed"])
    if "names" in meta:
        return " or ".join(repr(name) for name in meta["names"])
    if isinstance(option.default, int):
        return f"a whole number of at least {meta['low']}"
    bound = "" if math.isinf(meta["high"]) else f" and at most {meta['high']:.4g}"
    return f"a number of at least {meta['low']:.4g}{bound}"


def _is_allowed(option: dataclasses.Field[Any], value: object) -> bool:
    meta = option.metadata
    if "is_allowed" in meta:
        return bool(meta["is_allowed"](value))
    if "names" in meta:
        return value in meta["names"]
    if isinstance(value, bool) or not isinstance(value, int if isinstance(option.default, int) else (int, float)):
        return False
    return bool(meta["low"] <= value <= meta.get("high", math.inf)) and math.isfinite(value)


def _refuse(rule: str, option: dataclasses.Field[Any], value: object) -> ConfigError:
    return ConfigError(f"{rule} option {option.name}={value!r} is not allowed. Give {_allowed(option)}.")


class _Rival:
    """A rule without dropout heads, whose next token is the target's own unless it says otherwise."""

    def __post_init__(self) -> None:
        options: Any = self
        for option in dataclasses.fields(options):
            value = getattr(self, option.name)
            if not _is_allowed(option, value):
                raise _refuse(type(self).__name__, option, value)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    @property
    def couples_draft(self) -> bool:
        return False

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        return _plain(v, node)


# Evidence, gathered for the M tokens in question only. b, n: [M] row and node of a drafted token.


def _plain(v: Verification, node: Tensor) -> Tensor:
    return v.plain_at(node)


def _target_logits(v: Verification, b: Tensor, node: Tensor) -> Tensor:
    """What p is the softmax of, at the nodes (b, node). Returns [M, V] float32."""
    return v.sampling.warp(v.target_logits[b, node].float(), b)


def _draft_probs(v: Verification, b: Tensor, node: Tensor, token: Tensor, *, only_drawn: bool = False) -> Tensor:
    """q over the children of nodes (b, node), a point mass on `token` where there is no q. Returns [M, V].

    only_drawn: count ranked tokens of sampled rows as point masses, since q is then not what they were drawn from."""
    V = v.target_logits.shape[-1]
    point = torch.nn.functional.one_hot(token, V).float()
    if v.tree.child_logits is None:
        return point
    q = v.sampling.warp(v.tree.child_logits[b, node].float(), b).softmax(-1)
    is_ranked = v.sampling.is_sampled[b] & ~v.tree.is_sampled[b] & only_drawn
    return torch.where(is_ranked[:, None], point, q)


def _at(values: Tensor, token: Tensor) -> Tensor:
    return values.gather(-1, token[:, None])[:, 0]


def _label(v: Verification, keep: Tensor, reason: Reason) -> Tensor:
    """Codes [B, N] of kept tokens: `exact` for the target's own, else the rule's reason."""
    own = torch.where(v.is_exact, int(Reason.EXACT), int(reason))
    return torch.where(keep, own, 0).to(torch.int8)


def _by_test(
    v: Verification, ask: Tensor, reason: Reason, test: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Codes where a deterministic test(logits [M, V], x [M], b, node) holds."""
    keep = torch.zeros_like(ask)
    b, n = ask.nonzero(as_tuple=True)
    node = v.parent[b, n]
    keep[b, n] = test(_target_logits(v, b, node), v.tree.tokens[b, n], b, node)
    return _label(v, keep, reason)


def _by_chance(
    v: Verification, ask: Tensor, rule: str, reason: Reason, chance: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Codes of sampled rows, where x is kept if u < chance(p(x), q(x)); `ratio` if also u < p(x)/q(x)."""
    codes = torch.zeros_like(ask, dtype=torch.int8)
    ask = ask & v.sampling.is_sampled[:, None]
    b, n = ask.nonzero(as_tuple=True)
    if len(b) == 0:
        return codes
    _require_chain(v, ask, f"{rule} at temperature > 0")
    node, token = v.parent[b, n], v.tree.tokens[b, n]
    p = _at(_target_logits(v, b, node).softmax(-1), token)
    q = _at(_draft_probs(v, b, node, token, only_drawn=True), token)
    # the numbers of `RejectionSampling`, so that a neutral setting decides as it does, token by token
    u = uniform(v.sampling.keys(b, v.positions[b, node]), 1, Purpose.ACCEPT)[:, 0].float()
    is_lossless = u < p / q.clamp(min=_TINY)
    kept = torch.where(is_lossless, int(Reason.RATIO), int(reason))
    codes[b, n] = torch.where(u < chance(p, q), kept, 0).to(torch.int8)
    return codes


def _matches(v: Verification, ask: Tensor) -> Tensor:
    """Codes of greedy rows under strict greedy verification: x is the argmax."""
    return _label(v, ask & v.is_exact & ~v.sampling.is_sampled[:, None], Reason.EXACT)


def _draw(v: Verification, node: Tensor, p: Tensor, left: Tensor) -> Tensor:
    """Sampled rows: a token drawn from `left` [B, V] at `node` [B], from p where nothing is left. Others: plain."""
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, p)
    row = torch.arange(len(node), device=node.device)
    noise = v.sampling.noise(row, v.positions[row, node], p.shape[-1], Purpose.GUMBEL)
    assert noise is not None
    return torch.where(v.sampling.is_sampled, (left.log() + noise[:, 0]).argmax(-1), _plain(v, node))


def _next_of_chain(
    v: Verification, node: Tensor, residual: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
) -> Tensor:
    """The token after `node` [B]: in sampled rows from residual(p [B, V], q [B, V], refused x [B]), by default
    (p - q)+, or from p after a fully kept draft; in greedy rows the target's own."""
    if not v.sampling.any_sampled:
        return _plain(v, node)
    row = torch.arange(len(node), device=node.device)
    p = _target_logits(v, row, node).softmax(-1)
    child = v.tree.children(node)
    token = v.tree.tokens[row, child.int().argmax(-1)]
    q = _draft_probs(v, row, node, token, only_drawn=True)
    left = p - q if residual is None else residual(p, q, token)
    return _draw(v, node, p, torch.where(child.any(-1, keepdim=True), left.clamp(min=0.0), p))


def _require_chain(v: Verification, ask: Tensor, what: str) -> None:
    """Raise ConfigError if a row in question branches."""
    if v.tree.is_chain:
        return
    previous = torch.arange(ask.shape[1], device=ask.device) - 1
    branches = v.tree.valid & (v.tree.parents != previous) & ask.any(-1, keepdim=True)
    if bool(branches.any()):
        raise ConfigError(
            f"Rule {what} is defined for chains only, and the draft is a tree. Use a drafter of chains, or a rule "
            "that trees have, such as 'lossless', 'dropmatch' or 'typical'."
        )


# The rules.


@dataclass(frozen=True, slots=True)
class Typical(_Rival):
    """Medusa's typical acceptance: p(x) > min(eps, delta * exp(-H(p))), with H in nats over log(p + 1e-5).

    Defaults 0.09 and 0.3. Temperature > 0: after a rejection the token is drawn from p, so the outputs follow
    q·[kept] + (share rejected)·p. Temperature 0: the argmax must match, as in Medusa; greedy="typical" applies the
    formula to the plain softmax instead. Trees are fine; among equally long paths the engine's own tie-break holds
    (Medusa takes the largest sum of log p). arXiv 2401.10774; vLLM V0 had the same formula and constants."""

    eps: float = _number(0.09)
    delta: float = _number(0.3)
    greedy: Literal["argmax", "typical"] = _choice("argmax", "argmax", "typical")

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        if self.greedy == "typical":
            return _by_test(v, ask, Reason.TYPICAL, self._test)
        return _matches(v, ask) + _by_test(v, ask & v.sampling.is_sampled[:, None], Reason.TYPICAL, self._test)

    def _test(self, logits: Tensor, token: Tensor, b: Tensor, node: Tensor) -> Tensor:
        p = logits.softmax(-1)
        entropy = -(p * (p + _ENTROPY_SHIFT).log()).sum(-1)
        return _at(p, token) > (self.delta * (-entropy).exp()).clamp(max=self.eps)


@dataclass(frozen=True, slots=True)
class Lenience(_Rival):
    """Rejection sampling with the draft's probability scaled down by `factor` l.

    Temperature > 0 (chains): u < p(x) / (l q(x)), after a rejection a draw from (p - q)+; no token then has more than
    p(x)/l. Temperature 0: p(x) >= l max p. l = 1 is lossless. The source sets no default; ours is 0.5. It scales q in
    the test only, hence the unscaled residual (the nearest to p that this test allows). arXiv 2211.17192, A.5."""

    factor: float = _number(0.5)

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        greedy = _by_test(v, ask & ~v.sampling.is_sampled[:, None], Reason.LENIENCE, self._test)
        return greedy + _by_chance(v, ask, "lenience", Reason.LENIENCE, self._chance)

    def _test(self, logits: Tensor, token: Tensor, b: Tensor, node: Tensor) -> Tensor:
        p = logits.softmax(-1)
        return _at(p, token) >= self.factor * p.amax(-1)

    def _chance(self, p: Tensor, q: Tensor) -> Tensor:
        return p / (self.factor * q).clamp(min=_TINY)

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        return _next_of_chain(v, node)


@dataclass(frozen=True, slots=True)
class TopK(_Rival):
    """Relaxed acceptance: x among the k likeliest, p(x) >= max p - delta, and p(x) >= ratio · max p.

    Equal logits share a rank. delta=1 and ratio=0 switch their test off; with them k=1, the default of the sources, is
    greedy. TensorRT-LLM: k and delta (its documents use 10 and 0.6, or 15 and 0.5). vLLM's unmerged pull request 45229:
    k=3, ratio=0.5. speculators: k and ratio=exp(-accept_tolerance). The sources relax greedy decoding, the first two
    inside the thinking phase only; here the rule holds everywhere and, as our extension, at temperature > 0 on the
    warped p, with a draw from p after a rejection. Trees are fine."""

    k: int = _count(1, 1)
    delta: float = _number(1.0)
    ratio: float = _number(0.0)

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        return _by_test(v, ask, Reason.TOP_K, self._test)

    def _test(self, logits: Tensor, token: Tensor, b: Tensor, node: Tensor) -> Tensor:
        p = logits.softmax(-1)
        own, best = _at(p, token), p.amax(-1)
        rank = (logits > _at(logits, token)[:, None]).sum(-1)
        return (rank < self.k) & (own >= best - self.delta) & (own >= self.ratio * best)


@dataclass(frozen=True, slots=True)
class SGLang(_Rival):
    """SGLang's thresholds: children are tried in order with one coin u per node, P adding up their p(x); a child is
    kept if u <= P / threshold_acc or p(x) >= threshold_single.

    Temperature > 0: if none is kept the token is drawn from p without the tried ones; q plays no part. Both
    thresholds are 1 by default, which is lossless. Temperature 0: strict greedy matching, as in the source, whatever
    the thresholds. Trees are fine."""

    threshold_single: float = _number(1.0)
    threshold_acc: float = _number(1.0)

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        codes = _matches(v, ask)
        return codes + self._walk(v, ask) if v.sampling.any_sampled else codes

    def _walk(self, v: Verification, ask: Tensor) -> Tensor:
        ask = ask & v.sampling.is_sampled[:, None]
        B, N = ask.shape
        row = torch.arange(B, device=ask.device)
        prob = torch.zeros(B, N, device=ask.device)
        b, n = (v.tree.valid & ask.any(-1, keepdim=True)).nonzero(as_tuple=True)
        prob[b, n] = _at(_target_logits(v, b, v.parent[b, n]).softmax(-1), v.tree.tokens[b, n])
        tokens, parents = v.tree.tokens, v.tree.parents
        same = (tokens[:, :, None] == tokens[:, None]) & (parents[:, :, None] == parents[:, None])
        prob.masked_fill_(
            (same & v.tree.valid[:, None]).tril(-1).any(-1), 0.0
        )  # a sibling's repetition, which was tried already
        keys = v.sampling.keys(row.repeat_interleave(N), v.positions.flatten())
        coin = uniform(keys, 1, Purpose.ACCEPT).view(B, N)  # of each node's children
        tried = torch.zeros(B, N, device=ask.device)  # P of each node so far
        taken = torch.zeros_like(ask)  # nodes that already have a kept child
        codes = torch.zeros_like(ask, dtype=torch.int8)
        for c in range(1, N):
            parent = v.parent[:, c]
            tried[row, parent] += prob[:, c]
            mass, u = tried[row, parent], coin[row, parent]
            keep = (u <= mass / max(self.threshold_acc, _SGLANG_FLOOR)) | (prob[:, c] >= self.threshold_single)
            keep &= ask[:, c] & ~taken[row, parent]
            taken[row, parent] |= keep
            codes[:, c] = torch.where(u <= mass, int(Reason.RATIO), int(Reason.SGLANG)) * keep
        return codes

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        if not v.sampling.any_sampled:
            return _plain(v, node)
        row = torch.arange(len(node), device=node.device)
        p = _target_logits(v, row, node).softmax(-1)
        children = v.tree.children(node)
        listed = torch.zeros_like(p).scatter_add_(-1, v.tree.tokens, children.float())
        return _draw(v, node, p, p.masked_fill(listed > 0, 0.0))


@dataclass(frozen=True, slots=True)
class MARS(_Rival):
    """Keep the target's best token, or its second where the two are close: z2 / z1 > theta, and z1 > 0.

    z: raw logits, also at temperature > 0, where the token after a rejection is the target's draw. theta=0.9; 1 is
    greedy. Trees are fine. arXiv 2601.15498, read second-hand; the authors' code is said to differ: strict at
    temperature 0, and mixed with rejection sampling above it."""

    theta: float = _number(0.9)

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        return _by_test(v, ask, Reason.MARS, lambda logits, token, b, node: self._test(v, token, b, node))

    def _test(self, v: Verification, token: Tensor, b: Tensor, node: Tensor) -> Tensor:
        logits = v.target_logits[b, node].float()
        best, second = logits.topk(2, dim=-1).values.unbind(-1)
        own = _at(logits, token)
        return (own == best) | ((own == second) & (best > 0) & (second > self.theta * best))


@dataclass(frozen=True, slots=True)
class FLy(_Rival):
    """Lossless verification that forgives a rejection where the target is unsure and the draft soon agrees again.

    A rejected x stays if the three largest p have entropy -Σ p log p >= threshold (nats, not renormalised), p(x) > 0,
    and the next `window` drafted tokens exist and are all kept by lossless verification. threshold=0.3;
    window=0 takes min(6, K - 1), K the row's draft length. Lossless verification is the argmax at temperature 0 and
    u < p/q with a draw from (p - q)+ above it. Chains only. arXiv 2511.22972; in vLLM as "fly"."""

    threshold: float = _number(0.3, high=math.log(_FLY_TOP))
    window: int = _count(0, 0)

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        _require_chain(v, ask, "fly")
        drafted = v.tree.valid & ask.any(-1, keepdim=True)
        drafted[:, 0] = False
        native = _matches(v, drafted) + _by_chance(v, drafted, "fly", Reason.FLY, lambda p, q: p / q.clamp(min=_TINY))
        b, n = (ask & (native == 0)).nonzero(as_tuple=True)
        window = torch.tensor([self._window(row.draft_length) for row in v.sampling.rows], device=ask.device)[b]
        agreed = (native > 0).cumsum(-1)
        end = (n + window).clamp(max=ask.shape[1] - 1)  # a window past the draft counts too few
        resumes = agreed[b, end] - agreed[b, n] == window
        b, n = b[resumes], n[resumes]
        logits = _target_logits(v, b, v.parent[b, n])
        top = logits.softmax(-1).topk(min(_FLY_TOP, logits.shape[-1]), dim=-1).values
        is_unsure = -torch.xlogy(top, top).sum(-1) >= self.threshold
        codes = native * ask
        codes[b, n] = (is_unsure & (_at(logits, v.tree.tokens[b, n]) > -math.inf)).to(torch.int8) * int(Reason.FLY)
        return codes

    def _window(self, draft_length: int) -> int:
        return self.window or max(1, min(_FLY_WINDOW, draft_length - 1))

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        return _next_of_chain(v, node)


@dataclass(frozen=True, slots=True)
class Diversed(_Rival):
    """Static ensemble verification: verify against v = w p + (1 - w) q, with w = `weight`.

    Temperature > 0 (chains): u < 1 - w + w p(x)/q(x), after a rejection a draw from (p - q)+, so that the outputs
    follow v. Temperature 0 (trees too): x = argmax v, and after a rejection argmax v is emitted, as transformers does;
    the bonus token is the target's. w = 1 is lossless. The source sets no default; ours is 0.7, since at 0.5 a sure
    target and a sure drafter tie. arXiv 2604.07622; in transformers as assistant_ensemble_weight. (The paper's dynamic
    weight is trained, and not here.)"""

    weight: float = _number(0.7)

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        greedy = _by_test(
            v,
            ask & ~v.sampling.is_sampled[:, None],
            Reason.DIVERSED,
            lambda logits, token, b, node: self._mixture(v, logits, token, b, node).argmax(-1) == token,
        )
        return greedy + _by_chance(v, ask, "diversed", Reason.DIVERSED, self._chance)

    def _mixture(self, v: Verification, logits: Tensor, token: Tensor, b: Tensor, node: Tensor) -> Tensor:
        return self.weight * logits.softmax(-1) + (1.0 - self.weight) * _draft_probs(v, b, node, token)

    def _chance(self, p: Tensor, q: Tensor) -> Tensor:
        return 1.0 - self.weight + self.weight * p / q.clamp(min=_TINY)

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        token = _next_of_chain(v, node)
        if v.tree.child_logits is None or bool(v.sampling.is_sampled.all()):
            return token
        row = torch.arange(len(node), device=node.device)
        best = self._mixture(v, _target_logits(v, row, node), token, row, node).argmax(-1)
        child = v.tree.children(node)
        # a guard may have refused argmax v itself, which must not come back as the correction
        is_refused = (child & (v.tree.tokens == best[:, None])).any(-1)
        return torch.where(child.any(-1) & ~is_refused & ~v.sampling.is_sampled, best, token)


@dataclass(frozen=True, slots=True)
class Fuzzy(_Rival):
    """Keep whatever was drafted where the two models agree: JS(p, q) <= threshold, in nats.

    The token plays no part, so the rule can refuse the target's own and is not greedy matching at any threshold; kept
    tokens are all reported as `fuzzy`. Temperature > 0: the same test on the warped p and q, with a draw from p after
    a rejection. The source tunes the threshold per model pair; our default is 0.1. Trees are fine.
    arXiv 2502.20704, read second-hand."""

    threshold: float = _number(0.1, high=LN2)

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        codes = _by_test(
            v,
            ask,
            Reason.FUZZY,
            lambda logits, token, b, node: (
                js_divergence(logits.softmax(-1), _draft_probs(v, b, node, token)) <= self.threshold
            ),
        )
        return torch.where(codes > 0, int(Reason.FUZZY), 0).to(torch.int8)


@dataclass(frozen=True, slots=True)
class Cactus(_Rival):
    """Rejection sampling against the target pulled towards x within a budget `delta` of KL divergence (second order).

    h(x) = min(1, p(x) + sqrt(2 delta p(x) (1 - p(x)))), other tokens scaled to fill 1 - h(x). Temperature > 0
    (chains): u < h(x)/q(x), after a rejection a draw from (h - q)+. Temperature 0: p is then a point mass and h = p,
    so the argmax must match. delta=0 is lossless. The source asks for a delta and uses 1.0 in its example, our
    default. arXiv 2604.04987."""

    delta: float = _number(1.0, high=math.inf)

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        return _matches(v, ask) + _by_chance(
            v, ask, "cactus", Reason.CACTUS, lambda p, q: self._raised(p) / q.clamp(min=_TINY)
        )

    def _raised(self, p: Tensor) -> Tensor:
        return (p + (2.0 * self.delta * p * (1.0 - p)).sqrt()).clamp(max=1.0)

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        def residual(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
            own = _at(p, token)
            # h of the other tokens; x was refused, so h(x) < q(x) and nothing is left of it
            h = p * ((1.0 - self._raised(own)) / (1.0 - own).clamp(min=_TINY))[:, None]
            return h.scatter(-1, token[:, None], 0.0) - q

        return _next_of_chain(v, node, residual)


@dataclass(frozen=True, slots=True)
class TokenV3(_Rival):
    """SpecCascade's token-specific rule: keep x if p(x) >= max p · (1 - alpha).

    Temperature > 0: after a rejection a draw from p, so that with drafts from q the outputs follow the source's
    q·[kept] + (share rejected)·p. alpha=0 is greedy up to ties. The source sets no default; ours is 0.5. Trees are
    fine. arXiv 2405.19261. At temperature 0 this is `Lenience` with l = 1 - alpha."""

    alpha: float = _number(0.5)

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        return _by_test(v, ask, Reason.TOKEN_V3, self._test)

    def _test(self, logits: Tensor, token: Tensor, b: Tensor, node: Tensor) -> Tensor:
        p = logits.softmax(-1)
        return _at(p, token) >= p.amax(-1) * (1.0 - self.alpha)


RIVALS: dict[str, Callable[..., AcceptanceRule]] = {
    "cactus": Cactus,
    "diversed": Diversed,
    "fly": FLy,
    "fuzzy": Fuzzy,
    "lenience": Lenience,
    "mars": MARS,
    "sglang": SGLang,
    "token-v3": TokenV3,
    "top-k": TopK,
    "typical": Typical,
}
UNJOINABLE = frozenset({"cactus", "diversed", "fly", "lenience", "sglang"})
"""Rules whose next token at temperature > 0 comes from a residual of their own, which no join with another rule has."""


def split_rules(names: str) -> list[str]:
    """The parts of a joined name: "exact + top-k(k=3,ratio=0.5)" -> ["exact", "top-k(k=3,ratio=0.5)"]."""
    return [part.strip() for part in re.split(r"\+(?![^(]*\))", names)]


def base_name(part: str) -> str:
    """A rule's name without its options."""
    return part.partition("(")[0].strip()


def make_rival(part: str) -> AcceptanceRule:
    """A rule of this module by name, with options where given: "typical(eps=0.09, delta=0.3)".

    Raises UnknownNameError with near matches for names and options, and ConfigError for values out of range.
    """
    name = base_name(part)
    if name not in RIVALS:
        raise UnknownNameError("acceptance rule", name, RIVALS)
    made: Any = RIVALS[name]
    options = {option.name: option for option in dataclasses.fields(made)}
    return RIVALS[name](**parse_options(part.strip()[len(name) :].strip(), name, options))


def parse_options(text: str, name: str, options: Mapping[str, dataclasses.Field[Any]]) -> dict[str, object]:
    """Values of "(key=value, ...)", each read as the type of its option's default and checked against its range."""
    if not text:
        return {}
    if not re.fullmatch(r"\([^()]*\)", text):
        raise ConfigError(f"Options of rule {name!r} are written as {name}(option=value, ...), not {name}{text}.")
    values: dict[str, object] = {}
    for item in filter(None, (item.strip() for item in text[1:-1].split(","))):
        key, equals, given = (piece.strip() for piece in item.partition("="))
        if key not in options:
            raise UnknownNameError(f"option of rule {name!r}:", key, options)
        option = options[key]
        kind: Any = option.metadata.get("read", type(option.default))
        if not equals or key in values:
            raise ConfigError(f"Option {key!r} of rule {name!r} needs one value. Give {key}={option.default}.")
        try:
            value = kind(given)
        except ValueError:
            raise _refuse(f"Rule {name!r}", option, given) from None
        if not _is_allowed(option, value):
            raise _refuse(f"Rule {name!r}", option, given)
        values[key] = value
    return values
