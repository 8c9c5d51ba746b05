"""Rules of other papers: each from its own formula on small hand-made distributions, its neutral setting against
lossless or greedy verification, and at temperature > 0 by chi-square against the distribution that the formula implies.

The chi-square tests draw 20,000 rows of one position (seed 1, stream = row). With a fresh seed a true null would fail
with chance FALSE_ALARM; the seed is fixed, so a passing test stays passing. A distribution that differs as much as the
target's does from the expected one is told apart by many orders of magnitude (CERTAIN).
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from scipy import stats

from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core import rivals
from dropmatch.core.acceptance import (
    AcceptanceRule,
    AnyOf,
    Guard,
    RejectionSampling,
    RuleOptions,
    TargetMatch,
    make_rule,
    rule_names,
)
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.interfaces import DraftTree
from dropmatch.core.reasons import Reason
from dropmatch.core.rivals import (
    MARS,
    RIVALS,
    UNJOINABLE,
    Cactus,
    Diversed,
    FLy,
    Fuzzy,
    Lenience,
    SGLang,
    TokenV3,
    TopK,
    Typical,
    split_rules,
)
from dropmatch.core.verification import RowSampling, Verification
from dropmatch.core.verify import decide, judge
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.errors import ConfigError, DropMatchError, UnknownNameError
from dropmatch.ops.divergence import js_divergence
from dropmatch.ops.random import Purpose
from scripted import ScriptedModel
from toys import make_row, run, verify

NUDGE = 1e-5  # moves a threshold past a value that float32 softmax rounds by about 1e-7
FLOAT32 = 1e-5
DRAWS = 20_000
FALSE_ALARM = 1e-4
CERTAIN = 1e-12
P4 = torch.tensor([0.5, 0.3, 0.15, 0.05])
Q4 = torch.tensor([0.1, 0.2, 0.3, 0.4])

V = 12
TARGET = ScriptedModel(V, 24, seed=0)
DRAFT = ScriptedModel(V, 24, seed=0, noise=0.6)
TREE = (-1, 0, 0, 0, 1, 1, 2, 4)
CHAIN = (-1, 0, 1, 2, 3, 4, 5)
SAMPLED = SamplingParams(temperature=0.9, seed=3)
EVERY = [
    Typical(),
    Typical(greedy="typical"),
    Lenience(),
    TopK(k=3, ratio=0.5),
    TopK(k=10, delta=0.6),
    SGLang(0.6, 0.8),
    MARS(0.5),
    FLy(window=1),
    Diversed(),
    Fuzzy(),
    Cactus(),
    TokenV3(),
]
DETERMINISTIC = [rule for rule in EVERY if isinstance(rule, (Typical, TopK, MARS, Fuzzy, TokenV3))]


class Identity:
    """A head whose hidden states are the logits."""

    is_linear = True

    def __init__(self, num_tokens: int) -> None:
        self.vocab_size = num_tokens

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def _scripted(
    logits: torch.Tensor, tree: DraftTree, params: SamplingParams | Sequence[SamplingParams] | None = None
) -> Verification:
    """A Verification over given target logits [B, N, V]."""
    B = len(tree.tokens)
    each = list(params) if isinstance(params, Sequence) else [params] * B
    rows = [make_row([0], p) for p in each]
    head = MCDropoutHead(Identity(logits.shape[-1]), DropoutConfig(p_drop=0.0))
    return Verification(tree, logits, logits, RowSampling(rows, torch.device("cpu")), head, with_js=False)


def _one(
    rule: AcceptanceRule,
    p: Sequence[float],
    x: int,
    q: Sequence[float] | None = None,
    *,
    logits: Sequence[float] | None = None,
    params: SamplingParams | None = None,
) -> Reason:
    """The verdict on one drafted token x under target probabilities p (or logits) and draft probabilities q."""
    target = torch.tensor(logits) if logits is not None else torch.tensor(p).log()
    draft = None if q is None else torch.tensor(q).log().expand(1, 2, -1)
    tree = DraftTree.chain(torch.tensor([[0, x]]), torch.tensor([2]), draft)
    return Reason(int(judge(_scripted(target.expand(1, 2, -1), tree, params), [rule])[0, 1]))


# --- each rule from its own definition; the decision flips at the threshold ---


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=1.0)])
def test_typical_compares_with_the_smaller_of_eps_and_scaled_perplexity(params: SamplingParams | None) -> None:
    p = [0.5, 0.3, 0.15, 0.05]
    entropy = -sum(x * math.log(x + 1e-5) for x in p)
    floor = 0.3 * math.exp(-entropy)  # 0.0957, above eps
    assert floor > 0.09
    kind = "typical"
    assert _one(Typical(0.09, 0.3, kind), p, 2, params=params) is not Reason.REJECTED
    assert _one(Typical(0.09, 0.3, kind), p, 3, params=params) is Reason.REJECTED
    assert _one(Typical(0.05 - NUDGE, 0.3, kind), p, 3, params=params) is not Reason.REJECTED  # eps decides
    assert _one(Typical(0.05 + NUDGE, 0.3, kind), p, 3, params=params) is Reason.REJECTED
    scale = 0.15 * math.exp(entropy)
    assert _one(Typical(1.0, scale - NUDGE, kind), p, 2, params=params) is not Reason.REJECTED  # delta decides
    assert _one(Typical(1.0, scale + NUDGE, kind), p, 2, params=params) is Reason.REJECTED


def test_typical_at_temperature_0_is_argmax_match_unless_told_otherwise() -> None:
    p = [0.5, 0.3, 0.15, 0.05]
    assert _one(Typical(), p, 0) is Reason.EXACT
    assert _one(Typical(), p, 1) is Reason.REJECTED
    assert _one(Typical(greedy="typical"), p, 1) is Reason.TYPICAL


def test_lenience_keeps_greedily_from_a_share_of_the_best_on() -> None:
    p = [0.5, 0.3, 0.15, 0.05]
    assert _one(Lenience(0.6 - NUDGE), p, 1) is Reason.LENIENCE
    assert _one(Lenience(0.6 + NUDGE), p, 1) is Reason.REJECTED
    assert _one(Lenience(1.0), p, 0) is Reason.EXACT


@pytest.mark.parametrize(
    ("rule", "x", "is_kept"),
    [
        (TopK(2), 1, True),
        (TopK(2), 2, False),
        (TopK(4, delta=0.35 + NUDGE), 2, True),
        (TopK(4, delta=0.35 - NUDGE), 2, False),
        (TopK(4, ratio=0.3 - NUDGE), 2, True),
        (TopK(4, ratio=0.3 + NUDGE), 2, False),
        (TopK(2, delta=0.35 + NUDGE, ratio=0.3 - NUDGE), 2, False),
        (TopK(4, delta=0.1, ratio=0.0), 1, False),
    ],
)
def test_top_k_asks_for_rank_and_distance_and_ratio(rule: TopK, x: int, is_kept: bool) -> None:
    assert (_one(rule, [0.5, 0.3, 0.15, 0.05], x) is Reason.TOP_K) == is_kept
    assert _one(rule, [0.5, 0.3, 0.15, 0.05], 0) is Reason.EXACT


def test_top_k_lets_equal_tokens_share_a_rank() -> None:
    assert _one(TopK(2), [0.4, 0.2, 0.2, 0.2], 3) is Reason.TOP_K


@pytest.mark.parametrize("logits", [[2.0, 1.8 + NUDGE, 1.0], [2.0, 1.8 - NUDGE, 1.0]])
def test_mars_keeps_the_second_token_above_a_ratio_of_raw_logits(logits: list[float]) -> None:
    expected = Reason.MARS if logits[1] > 1.8 else Reason.REJECTED
    assert _one(MARS(0.9), [], 1, logits=logits) is expected
    hot = SamplingParams(temperature=2.0, seed=5, top_k=1)
    assert (_one(MARS(0.9), [], 1, logits=logits, params=hot) is Reason.REJECTED) == (expected is Reason.REJECTED)
    assert _one(MARS(0.9), [], 0, logits=logits) is Reason.EXACT
    assert _one(MARS(0.1), [], 2, logits=logits) is Reason.REJECTED  # never the third


def test_mars_refuses_at_the_very_threshold() -> None:
    """2 and 1 are exact in float32."""
    assert _one(MARS(0.5), [], 1, logits=[2.0, 1.0, 0.0]) is Reason.REJECTED
    assert _one(MARS(0.5 - NUDGE), [], 1, logits=[2.0, 1.0, 0.0]) is Reason.MARS


def test_mars_needs_a_positive_best_logit() -> None:
    assert _one(MARS(0.9), [], 1, logits=[-1.0, -1.01, -3.0]) is Reason.REJECTED
    assert _one(MARS(0.0), [], 1, logits=[0.0, -0.01, -3.0]) is Reason.REJECTED
    assert _one(MARS(0.9), [], 0, logits=[-1.0, -1.01, -3.0]) is Reason.EXACT


def test_token_v3_keeps_from_a_share_of_the_best_on() -> None:
    p = [0.5, 0.3, 0.15, 0.05]
    assert _one(TokenV3(0.7 + NUDGE), p, 2) is Reason.TOKEN_V3
    assert _one(TokenV3(0.7 - NUDGE), p, 2) is Reason.REJECTED
    assert _one(TokenV3(1.0), p, 3) is Reason.TOKEN_V3


def test_fuzzy_looks_at_the_two_distributions_and_not_at_the_token() -> None:
    p, q = [0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]
    js = float(js_divergence(torch.tensor(p), torch.tensor(q)))
    for x in range(4):
        assert _one(Fuzzy(js + NUDGE), p, x, q) is Reason.FUZZY
        assert _one(Fuzzy(js - NUDGE), p, x, q) is Reason.REJECTED
    assert _one(Fuzzy(0.0), p, 0, q) is Reason.REJECTED  # not even the target's own


def test_fuzzy_takes_a_drafter_without_a_distribution_as_a_point_mass() -> None:
    p = [0.5, 0.3, 0.15, 0.05]
    js = float(js_divergence(torch.tensor(p), torch.tensor([0.0, 1.0, 0.0, 0.0])))
    assert _one(Fuzzy(js + NUDGE), p, 1) is Reason.FUZZY
    assert _one(Fuzzy(js - NUDGE), p, 1) is Reason.REJECTED


def test_diversed_keeps_greedily_the_argmax_of_the_mixture() -> None:
    """w p + (1-w) q: token 1 has 0.3 w + 0.6 (1-w), token 0 has 0.5 w + 0.2 (1-w); equal at w = 2/3."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.6, 0.2]
    assert _one(Diversed(2 / 3 - NUDGE), p, 1, q) is Reason.DIVERSED
    assert _one(Diversed(2 / 3 + NUDGE), p, 1, q) is Reason.REJECTED
    assert _one(Diversed(2 / 3 + NUDGE), p, 0, q) is Reason.EXACT
    assert _one(Diversed(2 / 3 - NUDGE), p, 0, q) is Reason.REJECTED  # the target's own, but not the mixture's


def test_diversed_corrects_with_the_mixture_and_ends_with_the_target() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.6, 0.2])
    for x, emitted in ((2, 1), (1, 0)):  # a rejection gives argmax v = 1; behind a kept token the target's 0
        tree = DraftTree.chain(torch.tensor([[0, x]]), torch.tensor([2]), q.log().expand(1, 2, -1))
        v = _scripted(p.log().expand(1, 2, -1), tree)
        verdict = decide(v, judge(v, [Diversed(0.5)]), [Diversed(0.5)])
        assert int(verdict.next_token) == emitted


def test_diversed_does_not_bring_back_a_token_that_a_guard_refused() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.6, 0.2])
    tree = DraftTree.chain(torch.tensor([[0, 1]]), torch.tensor([2]), q.log().expand(1, 2, -1))
    v = _scripted(p.log().expand(1, 2, -1), tree)
    rule = Guard(Diversed(0.5), min_prob=0.4)
    verdict = decide(v, judge(v, [rule]), [rule])
    assert int(verdict.num_accepted) == 0
    assert int(verdict.next_token) == 0


def _agreement_chain(pattern: str, unsure: Sequence[float], rule: FLy, draft_length: int | None = None) -> list[Reason]:
    """Codes of a greedy chain: 'x' is a token that the target refuses at a place with probabilities `unsure`."""
    sure = [0.97, 0.01, 0.01, 0.01]
    probs = torch.tensor([unsure if c == "x" else sure for c in pattern] + [sure])
    tokens = torch.tensor([[0, *(1 if c == "x" else 0 for c in pattern)]])
    v = _scripted(probs.log()[None], DraftTree.chain(tokens, torch.tensor([len(pattern) + 1])))
    for row in v.sampling.rows:
        row.draft_length = len(pattern) if draft_length is None else draft_length
    return [Reason(code) for code in judge(v, [rule])[0, 1:].tolist()]


UNSURE = [0.5, 0.4, 0.06, 0.04]


@pytest.mark.parametrize(
    ("pattern", "is_forgiven"),
    [
        ("xoo", True),
        ("oxoo", True),
        ("xo", False),  # the window of two does not fit
        ("xxoo", False),  # the second rejection is in the window of the first
        ("xox", False),
    ],
)
def test_fly_forgives_where_the_whole_window_agrees_again(pattern: str, is_forgiven: bool) -> None:
    codes = _agreement_chain(pattern, UNSURE, FLy(window=2))
    assert (codes[pattern.index("x")] is Reason.FLY) == is_forgiven
    assert all(code is Reason.EXACT for code, c in zip(codes, pattern, strict=True) if c == "o")


def test_fly_judges_each_rejection_by_its_own_window() -> None:
    assert _agreement_chain("xxoo", UNSURE, FLy(window=2))[:2] == [Reason.REJECTED, Reason.FLY]
    assert _agreement_chain("xooxoo", UNSURE, FLy(window=2)).count(Reason.FLY) == 2


def test_fly_asks_for_the_entropy_of_the_three_best() -> None:
    entropy = -sum(x * math.log(x) for x in UNSURE[:3])  # not renormalised
    assert _agreement_chain("xo", UNSURE, FLy(entropy - NUDGE, 1))[0] is Reason.FLY
    assert _agreement_chain("xo", UNSURE, FLy(entropy + NUDGE, 1))[0] is Reason.REJECTED


def test_fly_never_keeps_what_the_target_excludes() -> None:
    assert _agreement_chain("xo", [0.5, 0.0, 0.4, 0.1], FLy(window=1))[0] is Reason.REJECTED


@pytest.mark.parametrize(("draft_length", "window"), [(2, 1), (4, 3), (7, 6), (12, 6)])
def test_fly_window_is_by_default_six_or_one_less_than_the_draft(draft_length: int, window: int) -> None:
    assert _agreement_chain("x" + "o" * window, UNSURE, FLy(), draft_length)[0] is Reason.FLY
    assert _agreement_chain("x" + "o" * (window - 1), UNSURE, FLy(), draft_length)[0] is Reason.REJECTED


def test_fly_cannot_forgive_the_only_token() -> None:
    assert _agreement_chain("x", UNSURE, FLy()) == [Reason.REJECTED]


def _coins(v: Verification) -> torch.Tensor:
    """The random numbers of a chain's drafted tokens, [B, N - 1]."""
    row = torch.arange(len(v.tree.tokens)).repeat_interleave(v.tree.tokens.shape[1])
    keys = v.sampling.keys(row, v.positions.flatten())
    return rivals.uniform(keys, 1, Purpose.ACCEPT).view(v.tree.tokens.shape)[:, :-1]


def _drawn(num: int, rule_x: int, p: torch.Tensor, q: torch.Tensor) -> Verification:
    """`num` sampled rows that all drafted the token rule_x from q."""
    params = [SamplingParams(temperature=1.0, seed=1, stream=stream) for stream in range(num)]
    tree = DraftTree.chain(
        torch.tensor([[0, rule_x]] * num),
        torch.full((num,), 2),
        q.log().expand(num, 2, -1),
        torch.ones(num, dtype=torch.bool),
    )
    return _scripted(p.log().expand(num, 2, -1), tree, params)


@pytest.mark.parametrize(
    ("rule", "chance", "reason"),
    [
        (Lenience(0.4), 0.15 / (0.4 * 0.3 * 2), Reason.LENIENCE),
        (Diversed(0.8), 0.2 + 0.8 * 0.15 / 0.6, Reason.DIVERSED),
        (Cactus(0.05), (0.15 + math.sqrt(0.1 * 0.15 * 0.85)) / 0.6, Reason.CACTUS),
    ],
)
def test_random_rules_flip_at_their_chance_and_name_what_lossless_keeps(
    rule: AcceptanceRule, chance: float, reason: Reason
) -> None:
    """p(x) = 0.15 and q(x) = 0.6: `ratio` below 0.25, the rule's own name up to its chance, then rejected."""
    v = _drawn(400, 2, P4, torch.tensor([0.1, 0.2, 0.6, 0.1]))
    codes, coin = judge(v, [rule] * 400)[:, 1], _coins(v)[:, 0]
    expected = torch.where(coin < 0.25, int(Reason.RATIO), torch.where(coin < chance, int(reason), 0))
    assert torch.equal(codes.long(), expected)
    assert {int(Reason.RATIO), int(reason), 0} == set(codes.tolist())


def test_sglang_walks_children_with_one_coin_and_growing_mass() -> None:
    num = 400
    params = [SamplingParams(temperature=1.0, seed=1, stream=stream) for stream in range(num)]
    tree = DraftTree.tree(torch.tensor([[0, 2, 1, 3]] * num), torch.tensor([[-1, 0, 0, 0]] * num))
    v = _scripted(P4.log().expand(num, 4, -1), tree, params)
    coin = rivals.uniform(v.sampling.keys(torch.arange(num), v.positions[:, 0]), 1, Purpose.ACCEPT)[:, 0]
    codes = judge(v, [SGLang(threshold_acc=0.5)] * num)
    expected = torch.zeros(num, 3, dtype=torch.int8)
    for b, u in enumerate(coin.tolist()):
        mass = 0.0
        for c, own in enumerate((0.15, 0.3, 0.05)):
            mass += own
            if u <= mass / 0.5:
                expected[b, c] = int(Reason.RATIO if u <= mass else Reason.SGLANG)
                break
    assert torch.equal(codes[:, 1:], expected)
    assert len(set(map(tuple, expected.tolist()))) == 5  # each child by either name, where it can be
    single = judge(v, [SGLang(threshold_single=0.3 - NUDGE)] * num)
    assert torch.equal(single[:, 2] > 0, coin > 0.15)  # the second child, whatever the coin, if the first is refused
    assert not bool((judge(v, [SGLang(threshold_single=0.3 + NUDGE)] * num)[:, 2] == int(Reason.SGLANG)).any())


# --- neutral settings ---


def _drafted(prompts: list[list[int]], shape: Sequence[int], params: Sequence[SamplingParams]) -> DraftTree:
    """Drafts of DRAFT in the given shape: the best tokens of greedy rows, independent draws of sampled chains."""
    B, N = len(prompts), len(shape)
    logits, tokens = torch.zeros(B, N, V), torch.zeros(B, N, dtype=torch.int64)
    sampling = RowSampling(
        [make_row(prompt, p) for prompt, p in zip(prompts, params, strict=True)], torch.device("cpu")
    )
    is_chain = tuple(shape) == tuple(range(-1, N - 1))
    paths: list[list[list[int]]] = [[] for _ in prompts]
    for n, parent in enumerate(shape):
        if n == 0:
            tokens[:, 0] = torch.tensor([prompt[-1] for prompt in prompts])
        elif is_chain:
            position = torch.tensor([len(prompt) - 1 + n for prompt in prompts])
            tokens[:, n] = sampling.choose(logits[:, parent], torch.arange(B), position, Purpose.DRAFT)
        else:
            tokens[:, n] = logits[:, parent].argsort(-1, descending=True)[:, list(shape[1:n]).count(parent)]
        for b, prompt in enumerate(prompts):
            paths[b].append([] if n == 0 else [*paths[b][parent], int(tokens[b, n])])
            logits[b, n] = DRAFT.head(DRAFT.state([*prompt, *paths[b][n]]))
    if is_chain:
        return DraftTree.chain(tokens, torch.full((B,), N), logits, sampling.is_sampled)
    return DraftTree.tree(tokens, torch.tensor(shape).expand(B, N), None, logits)


def _batch(num: int = 40, shape: Sequence[int] = CHAIN, params: SamplingParams | None = None) -> Verification:
    prompts = [[1, b % V, b // V, 5] for b in range(num)]
    each = [SamplingParams(seed=b) if params is None else SamplingParams(**_with_stream(params, b)) for b in range(num)]
    rows = [make_row(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
    return verify(TARGET, rows, _drafted(prompts, shape, each), DropoutConfig(p_drop=0.1))


def _with_stream(params: SamplingParams, stream: int) -> dict[str, object]:
    return {"temperature": params.temperature, "seed": params.seed, "top_k": params.top_k, "stream": stream}


def _codes(rule: AcceptanceRule, v: Verification) -> torch.Tensor:
    return judge(v, [rule] * len(v.tree.tokens))


@pytest.mark.parametrize("shape", [CHAIN, TREE])
@pytest.mark.parametrize(
    "rule",
    [Typical(), Lenience(1.0), TopK(), MARS(1.0), Diversed(1.0), TokenV3(0.0), SGLang(), SGLang(0.1, 0.1), Cactus(3.0)],
    ids=str,
)
def test_neutral_settings_are_greedy_matching_at_temperature_0(rule: AcceptanceRule, shape: Sequence[int]) -> None:
    v = _batch(shape=shape)
    codes = _codes(rule, v)
    assert torch.equal(codes, _codes(TargetMatch(), v))
    assert bool((codes > 0).any())
    every = torch.zeros(len(codes), dtype=torch.int64)
    assert torch.equal(rule.next_token(v, every), v.plain_token[:, 0])


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(temperature=1.3, seed=8, top_k=5)], ids=["warm", "top-k"])
@pytest.mark.parametrize("rule", [Lenience(1.0), Diversed(1.0), Cactus(0.0), FLy(math.log(3))], ids=str)
def test_neutral_settings_are_rejection_sampling_draw_by_draw(rule: AcceptanceRule, params: SamplingParams) -> None:
    v = _batch(200, params=params)
    codes, lossless = _codes(rule, v), _codes(RejectionSampling(), v)
    assert torch.equal(codes, lossless)
    verdict, expected = (decide(v, codes, [r] * 200) for r in (rule, RejectionSampling()))
    assert torch.equal(verdict.next_token, expected.next_token)
    assert 0 < int(verdict.num_accepted.sum()) < 200 * (len(CHAIN) - 1)


@pytest.mark.parametrize("rule", [Lenience(1.0), Diversed(1.0), Cactus(0.0), FLy(math.log(3))], ids=str)
def test_a_token_that_was_ranked_counts_as_a_point_mass_in_sampled_rows(rule: AcceptanceRule) -> None:
    """A recorded distribution that the tokens were not drawn from must not enter the ratio or the residual."""
    drawn = _batch(200, params=SAMPLED)
    tree = DraftTree.chain(drawn.tree.tokens, torch.full((200,), len(CHAIN)), drawn.tree.child_logits)
    v = Verification(tree, drawn.hidden, TARGET.head(drawn.hidden), drawn.sampling, drawn.head, with_js=False)
    codes = _codes(rule, v)
    assert torch.equal(codes, _codes(RejectionSampling(), v))
    verdict, expected = (decide(v, codes, [r] * 200) for r in (rule, RejectionSampling()))
    assert torch.equal(verdict.next_token, expected.next_token)


def test_fly_without_a_rejection_to_forgive_is_lossless_greedy() -> None:
    v = _batch()
    assert torch.equal(_codes(FLy(math.log(3)), v), _codes(TargetMatch(), v))


@pytest.mark.parametrize("params", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "rules",
    [
        [Lenience(1.0), Lenience(0.7), Lenience(0.3)],
        [Diversed(1.0), Diversed(0.6), Diversed(0.0)],
        [Cactus(0.0), Cactus(0.1), Cactus(2.0)],
        [TokenV3(0.0), TokenV3(0.6), TokenV3(1.0)],
        [TopK(1), TopK(3), TopK(12)],
        [MARS(1.0), MARS(0.6), MARS(0.1)],
        [Fuzzy(0.0), Fuzzy(0.1), Fuzzy(0.5)],
        [FLy(1.0, 2), FLy(0.5, 2), FLy(0.0, 2)],
        [SGLang(), SGLang(1.0, 0.5), SGLang(0.3, 0.5)],
    ],
    ids=lambda rules: type(rules[0]).__name__,
)
def test_a_looser_setting_keeps_all_that_a_stricter_one_keeps(
    rules: list[AcceptanceRule], params: SamplingParams | None
) -> None:
    v = _batch(params=params)
    kept = [_codes(rule, v) > 0 for rule in rules]
    if isinstance(rules[0], Diversed) and params is None:
        kept = kept[1:]  # greedily another argmax, not a wider set
    for strict, loose in itertools.pairwise(kept):
        assert not bool((strict & ~loose).any())


# --- distributions at temperature > 0 ---


def _emitted(rule: AcceptanceRule, p: torch.Tensor, q: torch.Tensor, *, length: int = 1) -> torch.Tensor:
    """Counts [V] of the first token that DRAWS rows emit; every position has the target p and the draft q."""
    params = [SamplingParams(temperature=1.0, seed=1, stream=stream) for stream in range(DRAWS)]
    rows = RowSampling([make_row([0], one) for one in params], torch.device("cpu"))
    every, N = torch.arange(DRAWS), length + 1
    logits = q.log().expand(DRAWS, N, -1)
    drafts = [rows.choose(logits[:, 0], every, torch.full((DRAWS,), n), Purpose.DRAFT) for n in range(1, N)]
    tokens = torch.stack([torch.zeros(DRAWS, dtype=torch.int64), *drafts], dim=1)
    tree = DraftTree.chain(tokens, torch.full((DRAWS,), N), logits, rows.is_sampled)
    v = _scripted(p.log().expand(DRAWS, N, -1), tree, params)
    verdict = decide(v, judge(v, [rule] * DRAWS), [rule] * DRAWS)
    return torch.where(verdict.num_accepted > 0, tokens[:, 1], verdict.next_token).bincount(minlength=len(p))


def _p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.double() / expected.double().sum() * counts.sum()
    return float(stats.chisquare(counts.double().numpy(), expected.numpy()).pvalue)


def _after(chance: torch.Tensor, left: torch.Tensor, q: torch.Tensor = Q4) -> torch.Tensor:
    """Tokens from q kept with their chance [V], else drawn from `left`: one distribution [V], or one per x [V, V]."""
    left = left / left.sum(-1, keepdim=True)
    refused = q * (1 - chance)
    return q * chance + (refused @ left if left.dim() == 2 else refused.sum() * left)


def _cactus(delta: float) -> torch.Tensor:
    raised = (P4 + (2 * delta * P4 * (1 - P4)).sqrt()).clamp(max=1)
    h = P4[None] * ((1 - raised) / (1 - P4))[:, None]  # [x, V]
    h[range(4), range(4)] = raised
    return _after((raised / Q4).clamp(max=1), (h - Q4).clamp(min=1e-12))


def _sglang(single: float, acc: float) -> torch.Tensor:
    chance = torch.where(P4.ge(single), 1.0, (P4 / acc).clamp(max=1))
    return _after(chance, P4[None].expand(4, 4) * (1 - torch.eye(4)))


def _kept(tokens: Sequence[int]) -> torch.Tensor:
    """Formula of a rule that keeps these tokens and else draws from p."""
    return _after(torch.tensor([float(x in tokens) for x in range(4)]), P4)


def _fly() -> torch.Tensor:
    """Threshold 0, window 1: x1 is kept natively, or if x2 is."""
    ratio = (P4 / Q4).clamp(max=1)
    agree = (Q4 * ratio).sum()
    return _after(ratio + (1 - ratio) * agree, (P4 - Q4).clamp(min=0))


IMPLIED = {
    "lenience": (Lenience(0.5), _after((P4 / (0.5 * Q4)).clamp(max=1), (P4 - Q4).clamp(min=0))),
    "diversed": (Diversed(0.6), 0.6 * P4 + 0.4 * Q4),
    "cactus": (Cactus(0.05), _cactus(0.05)),
    "cactus wide": (Cactus(1.0), _cactus(1.0)),
    "sglang single": (SGLang(threshold_single=0.3 - NUDGE), _sglang(0.3 - NUDGE, 1.0)),
    "sglang acc": (SGLang(threshold_acc=0.4), _sglang(1.0, 0.4)),
    "typical": (Typical(), _kept([0, 1, 2])),
    "token-v3": (TokenV3(0.75), _kept([0, 1, 2])),
    "top-k": (TopK(3, ratio=0.4), _kept([0, 1])),
    "fuzzy all": (Fuzzy(math.log(2)), Q4),
}


@pytest.mark.parametrize("name", IMPLIED)
def test_outputs_follow_the_distribution_that_the_formula_implies(name: str) -> None:
    """Seed 1; 20,000 draws; false alarm 1e-4 each."""
    rule, expected = IMPLIED[name]
    counts = _emitted(rule, P4, Q4)
    assert _p_value(counts, expected) > FALSE_ALARM
    assert _p_value(counts, P4) < CERTAIN  # the test would see a lossless rule


def test_fly_outputs_follow_its_formula() -> None:
    counts = _emitted(FLy(0.0, 1), P4, Q4, length=2)
    assert _p_value(counts, _fly()) > FALSE_ALARM
    assert _p_value(counts, P4) < CERTAIN


NEUTRAL = [Lenience(1.0), Diversed(1.0), Cactus(0.0), SGLang(), FLy(math.log(3)), Fuzzy(0.0)]


@pytest.mark.parametrize("rule", NEUTRAL, ids=str)
def test_neutral_settings_reproduce_the_target(rule: AcceptanceRule) -> None:
    """Seed 1; false alarm 1e-4 each."""
    assert _p_value(_emitted(rule, P4, Q4), P4) > FALSE_ALARM


def test_lenience_never_exceeds_its_guarantee() -> None:
    """No token above p / l, up to four standard errors of a share."""
    shares = _emitted(Lenience(0.25), torch.tensor([0.9, 0.05, 0.04, 0.01]), Q4) / DRAWS
    bound = torch.tensor([0.9, 0.05, 0.04, 0.01]) / 0.25
    assert bool((shares <= bound + 4 * 0.5 / DRAWS**0.5).all())
    assert float(shares[3]) > 0.03  # near the bound, so that the bound is what holds it


def test_sglang_defaults_reproduce_the_target_on_a_tree() -> None:
    """Two ranked children of the root and one below each. Seed 1; false alarm 1e-4."""
    params = [SamplingParams(temperature=1.0, seed=1, stream=stream) for stream in range(DRAWS)]
    tree = DraftTree.tree(
        torch.tensor([[0, 2, 1, 3, 3]]).expand(DRAWS, -1), torch.tensor([[-1, 0, 0, 1, 2]]).expand(DRAWS, -1)
    )
    v = _scripted(P4.log().expand(DRAWS, 5, -1), tree, params)
    verdict = decide(v, judge(v, [SGLang()] * DRAWS), [SGLang()] * DRAWS)
    kept = tree.tokens[torch.arange(DRAWS), verdict.path[:, 1]]
    first = torch.where(verdict.num_accepted > 0, kept, verdict.next_token)
    assert _p_value(first.bincount(minlength=4), P4) > FALSE_ALARM
    assert set(verdict.num_accepted.tolist()) == {0, 1, 2}


def test_sglang_counts_a_repeated_sibling_once() -> None:
    """A token that was refused must not be tried again with its mass doubled. Seed 1; false alarm 1e-4."""
    params = [SamplingParams(temperature=1.0, seed=1, stream=stream) for stream in range(DRAWS)]
    tree = DraftTree.tree(
        torch.tensor([[0, 2, 2, 1]]).expand(DRAWS, -1), torch.tensor([[-1, 0, 0, 0]]).expand(DRAWS, -1)
    )
    v = _scripted(P4.log().expand(DRAWS, 4, -1), tree, params)
    verdict = decide(v, judge(v, [SGLang()] * DRAWS), [SGLang()] * DRAWS)
    kept = tree.tokens[torch.arange(DRAWS), verdict.path[:, -1]]
    first = torch.where(verdict.num_accepted > 0, kept, verdict.next_token)
    assert _p_value(first.bincount(minlength=4), P4) > FALSE_ALARM


# --- batches, trees, composition ---


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_a_row_does_not_depend_on_its_batch_mates(rule: AcceptanceRule) -> None:
    """Greedy and sampled rows in one batch, of two rules, against each row alone."""
    prompts = [[1, b % V, b // V, 5] for b in range(12)]
    params = [SamplingParams(seed=b, temperature=0.0 if b % 3 else 0.9) for b in range(12)]
    rules = [rule if b % 4 else RejectionSampling() for b in range(12)]
    rows = [make_row(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    v = verify(TARGET, rows, _drafted(prompts, CHAIN, params))
    codes = judge(v, rules)
    verdict = decide(v, codes, rules)
    for b in range(12):
        alone = verify(TARGET, rows[b : b + 1], _drafted(prompts[b : b + 1], CHAIN, params[b : b + 1]))
        own = judge(alone, rules[b : b + 1])
        assert torch.equal(own[0], codes[b])
        assert int(decide(alone, own, rules[b : b + 1]).next_token) == int(verdict.next_token[b])


@pytest.mark.parametrize("rule", [rule for rule in EVERY if not isinstance(rule, FLy)], ids=str)
@pytest.mark.parametrize("params", [None, SAMPLED], ids=["greedy", "sampled"])
def test_a_decision_does_not_depend_on_the_draft_length(rule: AcceptanceRule, params: SamplingParams | None) -> None:
    long, short = _batch(params=params), _batch(params=params, shape=CHAIN[:4])
    assert torch.equal(long.tree.tokens[:, :4], short.tree.tokens)
    assert torch.equal(_codes(rule, long)[:, :4], _codes(rule, short))


@pytest.mark.parametrize("rule", EVERY, ids=str)
@pytest.mark.parametrize("params", [None, SAMPLED], ids=["greedy", "sampled"])
def test_a_tree_with_one_branch_equals_the_chain(rule: AcceptanceRule, params: SamplingParams | None) -> None:
    v = _batch(params=params)
    chain = v.tree
    tree = DraftTree.tree(chain.tokens, chain.parents, chain.valid, chain.child_logits, chain.is_sampled)
    same = Verification(tree, v.hidden, TARGET.head(v.hidden), v.sampling, v.head, with_js=False)
    codes = _codes(rule, v)
    assert torch.equal(_codes(rule, same), codes)
    tokens = [decide(one, codes, [rule] * len(codes)).next_token for one in (v, same)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("rule", [FLy(), Lenience(), Diversed(), Cactus()], ids=str)
def test_rules_of_chains_refuse_a_tree_with_the_reason(rule: AcceptanceRule) -> None:
    v = _batch(shape=TREE, params=SAMPLED)
    with pytest.raises(ConfigError, match=r"is defined for chains only, and the draft is a tree\. Use a drafter"):
        _codes(rule, v)
    if not isinstance(rule, FLy):
        assert bool((_codes(rule, _batch(shape=TREE)) > 0).any())  # temperature 0 is fine


def test_a_chain_rule_minds_its_own_rows_only() -> None:
    """A row that branches under another rule is none of its business."""
    tokens, parents = torch.tensor([[5, 1, 2], [5, 1, 2]]), torch.tensor([[-1, 0, 1], [-1, 0, 0]])
    rows = [make_row([1, 5], SAMPLED)] * 2
    rules = [Lenience(), make_rule("lossless")]
    v = verify(TARGET, rows, DraftTree.tree(tokens, parents))
    decide(v, judge(v, rules), rules)
    with pytest.raises(ConfigError, match="chains only"):
        judge(v, rules[::-1])


def test_rules_work_on_trees_where_each_child_is_judged_at_its_parent() -> None:
    v = _batch(shape=TREE)
    p = v.target_logits.softmax(-1).gather(1, v.parent[..., None].expand(-1, -1, V))
    own = p.gather(-1, v.tree.tokens[..., None])[..., 0]
    expected = (own >= 0.5 * p.amax(-1)) & (v.tree.depth > 0)
    assert torch.equal(_codes(TokenV3(0.5), v) > 0, expected)
    assert torch.equal(_codes(Lenience(0.5), v) > 0, expected)
    assert torch.equal(_codes(TopK(V, ratio=0.5), v) > 0, expected)


@pytest.mark.parametrize("rule", [rule for rule in EVERY if not isinstance(rule, FLy)], ids=str)
@pytest.mark.parametrize("params", [None, SAMPLED], ids=["greedy", "sampled"])
def test_guard_equals_filtering_after_the_fact(rule: AcceptanceRule, params: SamplingParams | None) -> None:
    v = _batch(params=params)
    free, guarded = _codes(rule, v), _codes(Guard(rule, 0.1, 0.3), v)
    prob, best = v.target_probs(v.tree.depth > 0)
    passes = v.is_exact | ((prob >= 0.1) & (prob >= 0.3 * best))
    assert torch.equal(guarded, torch.where(passes, free, 0))


@pytest.mark.parametrize("rule", DETERMINISTIC, ids=str)
def test_joined_rules_keep_what_either_keeps_and_the_first_gives_the_reason(rule: AcceptanceRule) -> None:
    v = _batch()
    exact, own = _codes(TargetMatch(), v), _codes(rule, v)
    assert torch.equal(_codes(AnyOf((TargetMatch(), rule)), v), torch.where(exact > 0, exact, own))


@pytest.mark.parametrize("rule", EVERY, ids=str)
def test_the_targets_own_token_is_called_exact_in_greedy_rows(rule: AcceptanceRule) -> None:
    v = _batch()
    codes = _codes(rule, v)
    own = codes[v.is_exact & (codes > 0)]
    assert set(own.tolist()) == ({int(Reason.FUZZY)} if isinstance(rule, Fuzzy) else {int(Reason.EXACT)})


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", RIVALS)
def test_the_engine_runs_every_rule_by_name(name: str, temperature: float) -> None:
    target, draft = ScriptedModel(V, 24, seed=0), ScriptedModel(V, 24, seed=0, noise=0.6)
    engine = SpeculativeEngine(target, DraftModelDrafter(draft, V), rule=name, config=EngineConfig(draft_length=4))
    results = run(engine, [[1, 2, 3], [4], [5, 6]], SamplingParams(max_new_tokens=30, temperature=temperature))
    own = {Reason.EXACT, Reason.RATIO, Reason.BONUS, Reason.RECOVERED, _reason_of(name)}
    assert all(len(result.tokens) == 30 and set(result.reasons) <= own for result in results)
    assert engine.head.rows_asked == 0


def _reason_of(name: str) -> Reason:
    return Reason[name.upper().replace("-", "_")]


# --- names and options ---


def test_options_are_read_from_the_name() -> None:
    assert make_rule("typical") == Typical(0.09, 0.3)
    assert make_rule("typical(eps=0.1, delta=.2, greedy=typical)") == Typical(0.1, 0.2, "typical")
    assert make_rule("top-k(k=10,delta=0.6)") == TopK(10, 0.6, 0.0)
    assert make_rule(" cactus ( delta = 1e+0 ) ") == Cactus(1.0)
    assert make_rule("fly()") == FLy()
    assert set(RIVALS) < set(rule_names())


def test_rules_with_options_join() -> None:
    assert make_rule("exact+top-k(k=3,ratio=0.5)") == AnyOf((TargetMatch(), TopK(3, ratio=0.5)))
    assert make_rule("mars(theta=0.8) + dropmatch-naive") == AnyOf((MARS(0.8), make_rule("head")))
    assert make_rule("mars", RuleOptions(guard_prob=0.05)) == Guard(MARS(), 0.05)
    assert make_rule("fuzzy", RuleOptions(include_plain_argmax=True)) == AnyOf((TargetMatch(), Fuzzy()))
    assert make_rule("cactus", RuleOptions(include_plain_argmax=True)) == Cactus()
    assert split_rules("a+b(c=1e+2)+d") == ["a", "b(c=1e+2)", "d"]


@pytest.mark.parametrize("name", sorted(UNJOINABLE))
def test_rules_with_a_residual_of_their_own_do_not_join(name: str) -> None:
    with pytest.raises(ConfigError, match=f"joins '{name}', which draws its own token"):
        make_rule(f"exact+{name}")
    assert make_rule(f"{name}+{name}") == RIVALS[name]()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("typicl", r"Unknown acceptance rule 'typicl'\. Did you mean 'typical'"),
        ("typicl(eps=1)", r"Unknown acceptance rule .*Did you mean 'typical'"),
        (
            "typical(epz=1)",
            r"Unknown option of rule 'typical': 'epz'\. Did you mean 'eps'.*Available: delta, eps, greedy",
        ),
        (
            "typical(eps=abc)",
            r"Rule 'typical' option eps='abc' is not allowed\. Give a number of at least 0 and at most 1",
        ),
        ("typical(eps=nan)", "eps='nan' is not allowed"),
        ("typical(eps=1.5)", "eps='1.5' is not allowed"),
        ("typical(greedy=yes)", "Give 'argmax' or 'typical'"),
        ("typical(eps)", r"Option 'eps' of rule 'typical' needs one value\. Give eps=0\.09"),
        ("typical(eps=0.1,eps=0.2)", "Option 'eps' of rule 'typical' needs one value"),
        ("typical(eps=0.1", r"written as typical\(option=value"),
        ("typical(eps=(0.1))", r"written as typical\(option=value"),
        ("top-k(k=2.5)", r"k='2\.5' is not allowed\. Give a whole number of at least 1"),
        ("top-k(k=0)", "k='0' is not allowed"),
        ("cactus(delta=inf)", "delta='inf' is not allowed. Give a number of at least 0\\."),
    ],
)
def test_bad_names_say_what_is_allowed(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rule(name)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Typical(eps=-0.1),
        lambda: Lenience(1.1),
        lambda: TopK(k=True),
        lambda: TopK(k=2.0),
        lambda: MARS(float("nan")),
        lambda: FLy(window=-1),
        lambda: Fuzzy("0.1"),
        lambda: Cactus(math.inf),
    ],
)
def test_values_out_of_range_are_refused_in_python_too(build: object) -> None:
    with pytest.raises(DropMatchError, match=r"is not allowed\. Give"):
        build()


def test_unknown_errors_are_of_their_kind() -> None:
    with pytest.raises(UnknownNameError):
        make_rule("typical(epz=1)")


def test_the_document_lists_every_rule_with_its_defaults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for name in rule_names():
        assert any(f"`{name}`" in row.split("|")[1] for row in rows), name
    for name, rule in RIVALS.items():
        row = next(row for row in rows if row.startswith(f"| `{name}`"))
        for option in dataclasses.fields(rule):
            shown = f"{option.default:g}" if isinstance(option.default, float) else option.default
            assert f"{option.name}={shown}" in row, (name, option.name)


def test_every_rule_names_its_formula_and_source() -> None:
    for rule in RIVALS.values():
        text = inspect.getdoc(rule)
        assert "arXiv" in text or rule in (TopK, SGLang)
        assert "emperature 0" in text or rule in (MARS, TopK, TokenV3, Fuzzy)
