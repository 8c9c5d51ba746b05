"""Judging drafted tokens that come as flat rows, as serving engines hold them: one row per drafted token, any number of
requests, no tree. The rules and heads are those of `acceptance` and `head`; this module only feeds them.

Two things differ from `Verification`. Nothing waits for the device unless `Ask` is "open", so that an engine may
schedule ahead. And the engine keeps its own rejection sampler: a decision says which logit of the drafted token makes
that sampler keep it as often as the rule would.

At temperature 0 a rule's answer is carried over as it is. At temperature > 0 the engine keeps a token x if u < p(x) /
q(x), with a random number u of its own. Each dropout path would do so with its own p_i(x) and the same u, and that is
what "a path produces x" means here: the rule is asked once for each stretch of u between the p_i(x), and the largest u
that it keeps becomes the token's probability. At p_drop = 0 all p_i are p, and nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dropmatch.core.acceptance import AcceptanceRule, Need, reads_rows
from dropmatch.core.head import MCDropoutHead, point_mass_divergence
from dropmatch.core.reasons import Reason
from dropmatch.core.verification import NodeEnsemble
from dropmatch.errors import ConfigError
from dropmatch.ops.divergence import log_probs

Ask = Literal["all", "open"]
"""Which rows the heads are asked about: all of them, or only those a rule has not decided yet, for which the host waits
until the device has counted them. Decisions are the same."""

SURE = 1e30
"""Stands for the logit of a token that must be kept; exp of its distance to any other is 0 in float32."""

_ALMOST_ONE = 1.0 - 1e-6


@dataclass(frozen=True, slots=True)
class FlatRows:
    """M drafted tokens, each with what the target says at the position that predicts it.

    hidden: [R, d] inputs of the LM head; raw: [R, V] logits of the plain head, -inf where a grammar forbids a token;
    final: [F, V] the same logits as the engine's sampler compares them, after penalties, masks and, in sampled rows,
    temperature, top-k, top-p and min-p. raw_row, final_row: [M] where each drafted token's rows lie.
    tokens: [M] int64, negative where there is nothing to judge. keys: [M, 3] random keys of the masks.
    temperature: [M], 0 in greedy rows. draft_logits: index [m] -> [m, V], the drafter's logits at temperature 1, NaN
    where they are not known; None counts the draft as a point mass.
    """

    hidden: Tensor
    raw: Tensor
    final: Tensor
    raw_row: Tensor
    final_row: Tensor
    tokens: Tensor
    keys: Tensor
    temperature: Tensor
    draft_logits: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]


@dataclass(frozen=True, slots=True)
class FlatDecision:
    """What to do about M drafted tokens. All [M].

    logit: what to write at the drafted token in `final`, NaN where nothing changes. refuse: greedy rows whose token the
    engine would keep and the rule does not. code: `Reason` of the rule's opinion, 0 where it keeps nothing that the
    engine would not. share: how much of a kept token counts for `code`, the rest for `ratio` (1 in greedy rows).
    lossy: chance that a kept token is one that lossless decoding would have refused. asked: heads were asked.
    """

    logit: Tensor
    refuse: Tensor
    code: Tensor
    share: Tensor
    lossy: Tensor
    asked: Tensor


def bytes_per_row(num_paths: int, vocab_size: int, hidden_size: int) -> int:
    """Upper bound on the memory that asking num_paths heads about one drafted token takes for a moment."""
    return 4 * vocab_size * (20 + 3 * num_paths) + 80 * num_paths * hidden_size


def judging_bytes(rule: AcceptanceRule, num_paths: int, vocab_size: int, hidden_size: int) -> int:
    """Upper bound on the memory that judging one drafted token by this rule takes for a moment."""
    asked = num_paths if Need.HEADS in rule.needs else 0
    # a few dozen rows of the head, their differences and covariances
    closed = 2_800 * hidden_size + 320_000 if reads_rows(rule) else 0
    return bytes_per_row(asked, vocab_size, hidden_size) + closed


class FlatJudge:
    """One rule with one set of dropout heads over flat rows.

    memory_bytes: cap on temporary memory; rows are judged in blocks that stay below it (one row at least).
    Raises ConfigError for rules that read states behind the drafted tokens: a flat row holds the one before.
    """

    def __init__(self, rule: AcceptanceRule, head: MCDropoutHead, *, memory_bytes: int, ask: Ask) -> None:
        if rule.needs & {Need.TARGET_HIDDEN, Need.DRAFT_HIDDEN}:
            raise ConfigError(
                "Rule 'judge' reads hidden states behind the drafted tokens, which serving engines do not hand over. "
                "Use it with dropmatch's own engine, or another rule such as 'dropmatch'."
            )
        self.rule = rule
        self.head = head
        self.ask: Ask = ask
        self.memory_bytes = memory_bytes

    def block(self, hidden_size: int) -> int:
        """Rows judged at once."""
        row = judging_bytes(self.rule, self.head.config.num_paths, self.head.head.vocab_size, hidden_size)
        return max(1, self.memory_bytes // row)

    def __call__(self, rows: FlatRows, *, is_sampled: bool) -> FlatDecision:
        """is_sampled: whether the rows have temperature > 0; all or none of them."""
        step = self.block(rows.hidden.shape[-1])
        parts = []
        for start in range(0, max(len(rows), 1), step):
            index = torch.arange(start, min(start + step, len(rows)), device=rows.tokens.device)
            parts.append(self._decide(_Block(rows, index, self.head, self.rule, self.ask, is_sampled)))
        if len(parts) == 1:
            return parts[0]
        return FlatDecision(
            *(
                torch.cat([getattr(part, name) for part in parts])
                for name in ("logit", "refuse", "code", "share", "lossy", "asked")
            )
        )

    def _decide(self, v: _Block) -> FlatDecision:
        return self._decide_sampled(v) if v.sampling.any_sampled else self._decide_greedy(v)

    def _decide_greedy(self, v: _Block) -> FlatDecision:
        code = self.rule.judge(v, v.ask)[:, 1]  # type: ignore[arg-type]  # reads like a Verification
        kept, exact = code > 0, v.exact
        return FlatDecision(
            logit=torch.where(kept & ~exact, SURE, torch.nan),
            refuse=exact & ~kept,
            code=code,
            share=torch.ones_like(v.temperature),
            lossy=(kept & ~exact).float(),
            asked=v.asked,
        )

    def _decide_sampled(self, v: _Block) -> FlatDecision:
        sure = torch.full_like(v.plain_prob, torch.inf)
        levels = [sure, v.plain_prob]
        if Need.HEADS in self.rule.needs:
            v.ensemble(v.ask)
            levels += list(v.path_probs.unbind(-1))
        best = torch.where(v.allowed, v.plain_prob, 0.0)  # what the engine keeps anyway
        code = torch.full_like(best, int(Reason.RATIO), dtype=torch.int8)
        for level in levels:
            v.level = level
            answer = self.rule.judge(v, v.ask)[:, 1]  # type: ignore[arg-type]
            chance = torch.where(answer > 0, level.clamp(max=1.0), 0.0)
            code = torch.where(chance > best, answer, code)
            best = torch.maximum(best, chance)
        raised = v.allowed & (best > v.plain_prob)
        others = v.normalizer + torch.log1p(-v.plain_prob.clamp(max=_ALMOST_ONE))
        odds = best.log() - torch.log1p(-best.clamp(max=_ALMOST_ONE))
        logit = torch.where(best > _ALMOST_ONE, SURE, odds + others)
        q = v.draft_prob()
        before, after = (v.plain_prob / q).clamp(max=1.0), (best / q).clamp(max=1.0)
        lossy = torch.where(raised, 1.0 - before / after, 0.0)
        return FlatDecision(
            logit=torch.where(raised, logit, torch.nan),
            refuse=torch.zeros_like(v.allowed),
            code=torch.where(v.allowed, code, 0),
            share=lossy,
            lossy=lossy,
            asked=v.asked,
        )


@dataclass(slots=True)
class _Blank:
    """Stands for a head whose logits are known already."""

    vocab_size: int
    is_linear: bool = False

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden[..., :1]


@dataclass(slots=True)
class _Pairs:
    """The m drafted tokens as m chains of a root and one node."""

    tokens: Tensor
    valid: Tensor
    child_logits: object | None
    is_chain: bool = True


@dataclass(slots=True)
class _Sampling:
    """What the rules in closed form ask of `RowSampling`, for rows that are all greedy or whose temperature the engine
    has applied already."""

    any_sampled: bool
    is_bare: Tensor

    def warp(self, logits: Tensor, row: Tensor) -> Tensor:
        return logits


class _Block:
    """Some rows' evidence under the names that rules read on a `Verification`: [m, 2] with the drafted token at 1.

    level: in sampled rows, the u * q(x) that the rule is asked about just now.
    """

    def __init__(
        self, rows: FlatRows, index: Tensor, head: MCDropoutHead, rule: AcceptanceRule, ask: Ask, is_sampled: bool
    ) -> None:
        self.head = head
        self._rows, self._index, self._mode = rows, index, ask
        self._needs = rule.needs
        raw = rows.raw[rows.raw_row[index]].float()  # [m, V]
        final = rows.final[rows.final_row[index]].float()
        drafted = rows.tokens[index]
        self.token = drafted.clamp(min=0)
        at_token = final.gather(-1, self.token[:, None])[:, 0]
        self.allowed = (drafted >= 0) & (at_token > -torch.inf)  # neither a placeholder nor masked
        self.temperature = rows.temperature[index]
        self._divisor = torch.where(self.temperature > 0, self.temperature, 1.0)[:, None]
        self._masked = final == -torch.inf
        # before temperature, top-k, top-p and min-p, which no divergence or floor takes part in
        self._plain = torch.where(self._masked, raw, final * self._divisor) if is_sampled else final
        self._shift = (self._plain - raw).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._impossible = self._plain == -torch.inf
        self.sampling = _Sampling(is_sampled, (self._plain == raw).all(-1))
        m = len(self.token)
        self.level = torch.zeros(m, device=final.device)
        self.normalizer, self.plain_prob = self.level, self.level
        self.exact = torch.zeros(m, dtype=torch.bool, device=final.device)
        if is_sampled:
            self.normalizer = final.logsumexp(-1)
            self.plain_prob = (at_token - self.normalizer).exp()
            self.path_probs = torch.zeros(m, head.config.num_paths, device=final.device)
        else:
            self.exact = self.allowed & (final.argmax(-1) == self.token)
        pair = torch.stack([self.token, self.token], dim=-1)
        self.ask = torch.stack([torch.zeros_like(self.allowed), self.allowed], dim=-1)
        self.tree = _Pairs(pair, torch.ones_like(self.ask), rows.draft_logits)
        self.parent = torch.zeros_like(pair)
        self.hidden = rows.hidden[rows.raw_row[index]][:, None].expand(m, 2, -1)
        self.target_logits = self._plain[:, None].expand(m, 2, -1)
        self.asked = torch.zeros(m, dtype=torch.bool, device=final.device)
        self._majority = torch.full((m,), -1, device=final.device)
        self._votes = torch.zeros(m, dtype=torch.int64, device=final.device)
        self._radius, self._js, self._centroid_prob = (torch.full_like(self.level, torch.nan) for _ in range(3))

    @property
    def is_exact(self) -> Tensor:
        """[m, 2]: the target produces the token, at temperature > 0 under the u in question."""
        exact = self.plain_prob >= self.level if self.sampling.any_sampled else self.exact
        return torch.stack([torch.zeros_like(exact), exact & self.allowed], dim=-1)

    def places(self, ask: Tensor) -> tuple[Tensor, Tensor]:
        """Row and node of what is asked, or of more than that where asking is cheaper than counting."""
        if self._mode == "open":
            b, n = ask.nonzero(as_tuple=True)
            return b, n
        b = torch.arange(len(ask), device=ask.device)
        return b, torch.ones_like(b)

    def target_probs(self, ask: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of each drafted token and of the target's best, at temperature 1. Two [m, 2]."""
        normalizer = self._plain.logsumexp(-1)
        prob = (self._plain.gather(-1, self.token[:, None])[:, 0] - normalizer).exp()
        best = (self._plain.amax(-1) - normalizer).exp()
        return torch.stack([prob, prob], dim=-1), torch.stack([best, best], dim=-1)

    def draft_log_probs(self, b: Tensor, n: Tensor) -> Tensor:
        """[m, V] at temperature 1."""
        assert self._rows.draft_logits is not None
        return log_probs(self._rows.draft_logits(self._index[b]))

    def draft_prob(self) -> Tensor:
        """[m] the probability that each token was drafted with in a sampled row."""
        if self._rows.draft_logits is None:
            return torch.ones_like(self.level)
        logits = self._rows.draft_logits(self._index).float() / self._divisor
        prob = (logits.gather(-1, self.token[:, None])[:, 0] - logits.logsumexp(-1)).exp()
        return prob.nan_to_num(nan=1.0).clamp(min=1e-30)

    def ensemble(self, ask: Tensor) -> NodeEnsemble:
        """The heads' answers, each row asked once at most."""
        if self._mode == "open":
            new = (ask[:, 1] & ~self.asked).nonzero(as_tuple=True)[0]
            if len(new) > 0:
                self._ask_heads(new)
        elif not self._has_answers:
            self._ask_heads(torch.arange(len(ask), device=ask.device))
            self._has_answers = True
        return self._answers()

    _has_answers = False

    def _ask_heads(self, b: Tensor) -> None:
        with_js = Need.DIVERGENCE in self._needs
        draft = self._rows.draft_logits
        head, process = self.head, self._process
        if head.p_drop == 0.0:
            # all paths are the plain head; projected anew, in a batch of another shape, they would differ by rounding
            head = MCDropoutHead(_Blank(head.head.vocab_size), head.config, tie=head.tie)
            process = self._repeat
        heads = head(
            self.hidden[b, 0],
            self._rows.keys[self._index[b]],
            pick=lambda logits, index: self._pick(logits, b[index]),
            process=lambda logits, index: process(logits, b[index]),
            with_js=with_js,
            draft_log_probs=None if draft is None else lambda index: self.draft_log_probs(b[index], b[index]),
            keep_centroid=Need.CENTROID_PROB in self._needs or (with_js and draft is None),
        )
        self.asked[b] = self.allowed[b]
        self._majority[b] = heads.majority
        self._votes[b] = (heads.tokens == self.token[b][:, None]).sum(-1)
        if heads.radius is not None:
            self._radius[b] = heads.radius
        if heads.centroid_logits is not None:
            centroid = heads.centroid_logits
            at_token = centroid.gather(-1, self.token[b][:, None])[:, 0]
            self._centroid_prob[b] = (at_token - centroid.logsumexp(-1)).exp()
            if with_js and draft is None:
                self._js[b] = point_mass_divergence(centroid, self.token[b])
        if heads.js_draft is not None:
            self._js[b] = heads.js_draft

    def _process(self, logits: Tensor, b: Tensor) -> Tensor:
        """Path logits [m, K, V] with what the engine did to the plain ones."""
        changed = logits.float() + self._shift[b][:, None]
        return changed.masked_fill_(self._impossible[b][:, None], -torch.inf)

    def _repeat(self, logits: Tensor, b: Tensor) -> Tensor:
        """The plain logits as each path's. Returns [m, K, V]."""
        return self._plain[b][:, None].expand(-1, logits.shape[1], -1)

    def _pick(self, logits: Tensor, b: Tensor) -> Tensor:
        if self.sampling.any_sampled:
            for k in range(logits.shape[1]):
                warped = (logits[:, k] / self._divisor[b]).masked_fill_(self._masked[b], -torch.inf)
                log_prob = warped.gather(-1, self.token[b][:, None])[:, 0] - warped.logsumexp(-1)
                self.path_probs[b, k] = log_prob.exp()
        return logits.argmax(-1)

    def _answers(self) -> NodeEnsemble:
        majority, votes = self._majority, self._votes
        if self.sampling.any_sampled:
            votes = (self.path_probs >= self.level[:, None]).sum(-1)
            majority = torch.where(2 * votes > self.path_probs.shape[-1], self.token, -1)

        def both(values: Tensor) -> Tensor:
            return torch.stack([values, values], dim=1)

        return NodeEnsemble(
            tokens=both(majority[:, None]),
            majority=both(majority),
            votes=both(votes),
            radius=both(self._radius),
            js_draft=both(self._js),
            centroid_prob=both(self._centroid_prob),
            asked=both(self.asked),
        )
