"""Which drafted tokens may stay. Pure tensor rules over a Verification; no rule knows a model, cache or tokenizer.

A rule answers for each drafted token, given that its parent is kept: 0 rejects, any other `Reason` code keeps.
`ask` limits the question to nodes that are still open, so that costly evidence is computed only where it matters.
Source: DropMatch (arXiv 2603.03333) section 3.2, Eq. 4-7, Algorithm 1; lossless: arXiv 2211.17192.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dropmatch.core.closed_form import ExpectedHead, ExpectedJS, ExpectedMajority, check_noise
from dropmatch.core.head import MCDropoutHead, Tie
from dropmatch.core.head_rows import HeadRows
from dropmatch.core.judge import NAME as JUDGE
from dropmatch.core.judge import Judge, JudgeHead, make_judge
from dropmatch.core.needs import Need
from dropmatch.core.reasons import Reason
from dropmatch.core.rivals import RIVALS, UNJOINABLE, base_name, make_rival, split_rules
from dropmatch.core.verification import Verification
from dropmatch.errors import ConfigError, UnknownNameError
from dropmatch.ops.random import Purpose, uniform


class AcceptanceRule(Protocol):
    """Decides on drafted tokens.

    needs: evidence it may ask for. couples_draft: at temperature > 0 the drafter samples with the target's own
    Gumbel noise, which makes equal tokens likely; False where the draft must be independent of the target's draw.
    """

    @property
    def needs(self) -> frozenset[Need]: ...

    @property
    def couples_draft(self) -> bool: ...

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        """Reason codes [B, N] int8, 0 where ask is False."""
        ...

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        """The token after the deepest kept node [B]. Returns [B]."""
        ...


def _codes(keep: Tensor, reason: Reason) -> Tensor:
    return keep.to(torch.int8) * int(reason)


class _PlainNext:
    """The next token is the undropped target's own (decision 13)."""

    @property
    def couples_draft(self) -> bool:
        return True

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        return v.plain_at(node)


@dataclass(frozen=True, slots=True)
class TargetMatch(_PlainNext):
    """Keep a token that the target itself produces here: its argmax, or at temperature > 0 its draw.

    Lossless at any temperature, since the output is then the target's own token at every position."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        return _codes(v.is_exact & ask, Reason.EXACT)


@dataclass(frozen=True, slots=True)
class JSDivergence(_PlainNext):
    """Keep if the drafter's distribution is as near to the heads' centroid as the farthest head (Eq. 5-6).

    The token itself plays no part, so at temperature > 0 an unlikely draw can pass: min_centroid_prob sets a floor on
    its centroid probability (0: off). A drafter without a distribution counts as a point mass on its token."""

    min_centroid_prob: float = 0.0

    @property
    def needs(self) -> frozenset[Need]:
        needs = {Need.HEADS, Need.DIVERGENCE}
        return frozenset(needs | {Need.CENTROID_PROB} if self.min_centroid_prob > 0 else needs)

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        heads = v.ensemble(ask)
        keep = ask & (heads.js_draft <= heads.radius)
        if self.min_centroid_prob > 0:
            keep &= heads.centroid_prob >= self.min_centroid_prob
        return _codes(keep, Reason.JS)


@dataclass(frozen=True, slots=True)
class MajorityMatch(_PlainNext):
    """Keep the most frequent token among the K heads (Eq. 7)."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.HEADS})

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        return _codes(ask & (v.ensemble(ask).majority == v.tree.tokens), Reason.MAJORITY)


@dataclass(frozen=True, slots=True)
class HeadMatch(_PlainNext):
    """Keep a token that any of the K heads produces (Eq. 4)."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.HEADS})

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        return _codes(ask & (v.ensemble(ask).votes > 0), Reason.HEAD)


@dataclass(frozen=True, slots=True)
class AnyOf(_PlainNext):
    """Keep what any of the rules keeps; the first that does gives the reason. Later rules are asked only about what
    the earlier ones left open, which changes no decision."""

    rules: tuple[AcceptanceRule, ...]

    def __post_init__(self) -> None:
        if any(isinstance(rule, RejectionSampling) for rule in self.rules):
            raise ConfigError(
                "RejectionSampling draws its own next token and cannot be joined. Use TargetMatch in AnyOf."
            )

    @property
    def needs(self) -> frozenset[Need]:
        return needs_of(self.rules)

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        codes = torch.zeros_like(ask, dtype=torch.int8)
        for rule in self.rules:
            codes += rule.judge(v, ask & (codes == 0))
        return codes


@dataclass(frozen=True, slots=True)
class Guard:
    """A floor on the token's own undropped target probability (temperature 1) under another rule.

    min_prob: absolute floor; min_ratio: floor relative to the target's best token. The target's own token always
    passes. Tokens below the floor are not even asked about, which changes no decision."""

    rule: AcceptanceRule
    min_prob: float = 0.0
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        for name in ("min_prob", "min_ratio"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"Guard {name}={getattr(self, name)!r} is out of range. Allowed: [0, 1]; 0 is off.")

    @property
    def needs(self) -> frozenset[Need]:
        return self.rule.needs

    @property
    def couples_draft(self) -> bool:
        return self.rule.couples_draft

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        prob, best = v.target_probs(ask & ~v.is_exact)
        passes = (prob >= self.min_prob) & (prob >= self.min_ratio * best)  # NaN, where not asked, is False
        return self.rule.judge(v, ask & (v.is_exact | passes))

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        return self.rule.next_token(v, node)


@dataclass(frozen=True, slots=True)
class RejectionSampling:
    """Lossless speculative sampling: keep with chance min(1, p/q), else draw from (p - q)+ (arXiv 2211.17192).

    p is the target's and q the drafter's processed and warped distribution. A drafter that ranks rather than samples
    is a point mass: its children are tried in order, each with chance p(x) of what is left. Greedy rows match the
    argmax."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset()

    @property
    def couples_draft(self) -> bool:
        return False

    def judge(self, v: Verification, ask: Tensor) -> Tensor:
        greedy = ~v.sampling.is_sampled[:, None]
        codes = _codes(v.is_exact & ask & greedy, Reason.EXACT)
        if v.sampling.any_sampled:
            codes += _codes(self._ratio_test(v, ask & ~greedy) & ask & ~greedy, Reason.RATIO)
        return codes

    def _ratio_test(self, v: Verification, ask: Tensor) -> Tensor:
        if not v.tree.is_chain and bool(v.tree.is_sampled.any()):
            raise ConfigError(
                "Rule 'lossless' cannot judge siblings that were sampled. Let the drafter rank a tree's tokens "
                "(is_sampled=False), or draft a chain."
            )
        B, N = ask.shape
        row = torch.arange(B, device=ask.device)
        p = v.sampling.warp(v.target_logits.flatten(0, 1), row.repeat_interleave(N)).softmax(-1).view(B, N, -1)
        q = _draft_probs(v, p)
        keep = torch.zeros_like(ask)
        left = torch.ones(B, N, device=ask.device)  # mass at each node that no refused child has taken
        taken = torch.zeros_like(ask)  # nodes that already have a kept child
        tried = torch.zeros(B, N, dtype=torch.int64, device=ask.device)  # children of each node tried so far
        for n in range(1, N):
            parent, token = v.parent[:, n], v.tree.tokens[:, n]
            # siblings need numbers of their own, and the numbers must not depend on the draft length
            keys = v.sampling.keys(row, v.positions[row, parent] + (tried[row, parent] << 24))
            tried[row, parent] += 1
            u = uniform(keys, 1, Purpose.ACCEPT)[:, 0].float()
            p_token = p[row, parent, token]
            q_token = torch.ones_like(p_token)
            if q is not None:
                q_token = torch.where(v.tree.is_sampled, q[row, parent, token], 1.0)
            chance = p_token / (left[row, parent] * q_token).clamp(min=1e-30)
            keep[:, n] = (u < chance) & ask[:, n] & ~taken[row, parent]
            taken[row, parent] |= keep[:, n]
            refused = v.tree.valid[:, n] & ~keep[:, n]
            left[row, parent] -= torch.where(refused, p_token, 0.0)
        return keep

    def next_token(self, v: Verification, node: Tensor) -> Tensor:
        plain = v.plain_at(node)
        if not v.sampling.any_sampled:
            return plain
        row = torch.arange(len(node), device=node.device)
        p = v.sampling.warp(v.target_logits[row, node], row).softmax(-1)  # [B, V]
        children = v.tree.children(node)  # all refused, or node were not the deepest
        listed = torch.zeros_like(p).scatter_add_(-1, v.tree.tokens, children.float()).clamp_(max=1.0)
        q = _draft_probs(v, p)
        if q is not None:
            drawn = q[row, node] * children.any(-1, keepdim=True)
            listed = torch.where(v.tree.is_sampled[:, None], 0.0, listed * p) + torch.where(
                v.tree.is_sampled[:, None], drawn, 0.0
            )
        else:
            listed = listed * p
        residual = (p - listed).clamp(min=0.0)
        is_empty = residual.sum(-1, keepdim=True) <= 0.0  # p equals q up to rounding: nothing is left to draw from
        residual = torch.where(is_empty, p, residual)
        position = v.positions[row, node]
        noise = v.sampling.noise(row, position, p.shape[-1], Purpose.GUMBEL)
        assert noise is not None
        return torch.where(v.sampling.is_sampled, (residual.log() + noise[:, 0]).argmax(-1), plain)


def _draft_probs(v: Verification, p: Tensor) -> Tensor | None:
    """What sampled drafts were drawn from, [B, N, V], or None if no row samples its draft."""
    if v.tree.child_logits is None or not bool(v.tree.is_sampled.any()):
        return None
    B, N, V = v.tree.child_logits.shape
    row = torch.arange(B, device=p.device).repeat_interleave(N)
    return v.sampling.warp(v.tree.child_logits.flatten(0, 1), row).softmax(-1).view(B, N, V)


_ATOMS: dict[str, Callable[[RuleOptions], AcceptanceRule]] = {
    "exact": lambda options: TargetMatch(),
    "js": lambda options: JSDivergence(options.js_min_centroid_prob),
    "majority": lambda options: MajorityMatch(),
    "head": lambda options: HeadMatch(),
    "lossless": lambda options: RejectionSampling(),
    "expected-head": lambda options: ExpectedHead(options.head_chance),
    "expected-js": lambda options: ExpectedJS(),
    "expected-majority": lambda options: ExpectedMajority(),
}
_PRESETS: dict[str, tuple[str, ...]] = {
    "dropmatch": ("exact", "js", "majority"),
    "dropmatch-paper": ("js", "majority"),
    "dropmatch-naive": ("head",),
    "dropmatch-expected": ("exact", "expected-js", "expected-majority"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOptions:
    """Options of rules made by name. js_min_centroid_prob: floor of Eq. 6 (0: off). include_plain_argmax: let
    `dropmatch-naive` also keep the target's own token. guard_prob, guard_ratio: see `Guard` (0: off). head_chance: the
    least chance that `expected-head` keeps a token with. judge: the trained head of `judge`."""

    js_min_centroid_prob: float = 0.0
    include_plain_argmax: bool = False
    guard_prob: float = 0.0
    guard_ratio: float = 0.0
    head_chance: float = 0.5
    judge: JudgeHead | None = None


def rule_names() -> list[str]:
    """All rules and presets that can be named."""
    return sorted([*_ATOMS, *_PRESETS, *RIVALS, JUDGE])


def make_rule(name: str, options: RuleOptions | None = None) -> AcceptanceRule:
    """A rule by name: an atom, a preset, a rival or the judge with options, or several joined by '+', such as
    "exact+top-k(k=3,ratio=0.5)" or "dropmatch+judge(threshold=q0.2)".

    Raises UnknownNameError with near matches, and ConfigError where rules cannot be joined.
    """
    options = options or RuleOptions()
    atoms: list[str] = []
    for part in split_rules(name):
        if base_name(part) not in (*RIVALS, JUDGE) and part not in _ATOMS and part not in _PRESETS:
            raise UnknownNameError("acceptance rule", part, rule_names())
        atoms += _PRESETS.get(part, (part,))
    alone = next((base_name(atom) for atom in atoms if base_name(atom) in UNJOINABLE), None)
    if options.include_plain_argmax and "lossless" not in atoms and alone is None:
        atoms.insert(0, "exact")
    atoms = list(dict.fromkeys(atoms))
    if alone is not None and len(atoms) > 1:
        raise ConfigError(
            f"Rule {name!r} joins {alone!r}, which draws its own token after a rejection. Use {alone!r} by itself."
        )
    if "lossless" in atoms and len(atoms) > 1:
        raise ConfigError(
            f"Rule {name!r} joins 'lossless' with lossy rules. Use 'exact' in its place, or 'lossless' alone."
        )
    rules = tuple(_make_atom(atom, options) for atom in atoms)
    rule = rules[0] if len(rules) == 1 else AnyOf(rules)
    if (options.guard_prob != 0 or options.guard_ratio != 0) and "lossless" not in atoms:  # NaN goes to be refused
        rule = Guard(rule, options.guard_prob, options.guard_ratio)
    return rule


def _make_atom(atom: str, options: RuleOptions) -> AcceptanceRule:
    if base_name(atom) == JUDGE:
        return make_judge(atom, options)
    return _ATOMS[atom](options) if atom in _ATOMS else make_rival(atom)


def as_rule(rule: object, options: RuleOptions | None = None) -> AcceptanceRule:
    """A rule by name or as an object. Raises ConfigError for anything else, and for options given with an object."""
    if isinstance(rule, str):
        return make_rule(rule, options)
    if isinstance(rule, type) or not hasattr(rule, "judge"):
        raise ConfigError(
            f"rule={rule!r} is not allowed. Give a name (see rule_names()) or a rule, such as TargetMatch()."
        )
    if options is not None:
        raise ConfigError("rule_options go with a rule by name. Give the rule object the options it needs.")
    return rule  # type: ignore[return-value]  # a Protocol: judge is what tells it


def is_closed_form(rule: AcceptanceRule) -> bool:
    """Whether a rule judges by what dropout heads do on average, and asks no sampled ones."""
    return Need.HEADS not in rule.needs and reads_rows(rule)


def reads_rows(rule: AcceptanceRule) -> bool:
    """Whether any part of a rule is in closed form, and so reads rows of the LM head."""
    return bool(_closed_parts(rule))


def _closed_parts(rule: AcceptanceRule) -> list[AcceptanceRule]:
    if isinstance(rule, Guard):
        return _closed_parts(rule.rule)
    if isinstance(rule, AnyOf):
        return [part for joined in rule.rules for part in _closed_parts(joined)]
    return [rule] if isinstance(rule, ExpectedHead | ExpectedJS | ExpectedMajority) else []


def check_head(rule: AcceptanceRule, head: MCDropoutHead, *, is_sampled: bool) -> None:
    """Raise ConfigError where a rule in closed form cannot read this head, at temperature > 0 if is_sampled."""
    closed = _closed_parts(rule)
    if closed:
        HeadRows.of(head.head)
    if is_sampled and any(not isinstance(part, ExpectedJS) for part in closed):
        check_noise(head.config)


def needs_of(rules: Sequence[AcceptanceRule]) -> frozenset[Need]:
    """Evidence that any of the rules may ask for."""
    return frozenset[Need]().union(*(rule.needs for rule in rules))


__all__ = [
    "AcceptanceRule",
    "AnyOf",
    "Guard",
    "HeadMatch",
    "JSDivergence",
    "Judge",
    "JudgeHead",
    "MajorityMatch",
    "Need",
    "RejectionSampling",
    "RuleOptions",
    "TargetMatch",
    "Tie",
    "as_rule",
    "check_head",
    "is_closed_form",
    "make_rule",
    "needs_of",
    "reads_rows",
    "rule_names",
]
