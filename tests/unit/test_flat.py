"""Flat rows are judged as the tree engine judges them, in any blocks, without waiting for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dropmatch.config import DropoutConfig, SamplingParams
from dropmatch.core.acceptance import RuleOptions, make_rule
from dropmatch.core.flat import SURE, FlatDecision, FlatJudge, FlatRows, bytes_per_row
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.interfaces import DraftTree
from dropmatch.core.reasons import Reason
from dropmatch.core.verification import RowSampling, Verification
from scripted import ScriptedModel
from toys import make_row
from watches import NoWaiting, Peak

V, D, B, L = 16, 24, 12, 5
MODEL = ScriptedModel(V, D)
GREEDY_RULES = (
    "exact",
    "js",
    "majority",
    "head",
    "dropmatch",
    "dropmatch-paper",
    "dropmatch-naive",
    "expected-head",
    "expected-js",
    "expected-majority",
    "dropmatch-expected",
)
GREEDY_ONLY = ("expected-head", "expected-majority", "dropmatch-expected")
ROUNDING = 1e-5  # float32 sums over 16 tokens
SHIFTED = 2e-4  # as ROUNDING, after a logit was moved by hundreds of times its own rounding


def _case(*, seed: int = 0, distribution: bool = True) -> tuple[DraftTree, Tensor, Tensor]:
    """B random chains of L drafted tokens, half of them the target's own: tree, hidden [B, L + 1, d], logits."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, L + 1, D, generator=generator)
    logits = MODEL.head(hidden)
    draft_logits = logits + torch.randn(logits.shape, generator=generator)
    tokens = torch.zeros(B, L + 1, dtype=torch.int64)
    tokens[:, 1:] = draft_logits[:, :-1].argmax(-1)
    num_nodes = torch.full((B,), L + 1)
    return DraftTree.chain(tokens, num_nodes, draft_logits if distribution else None), hidden, logits


def _head(p_drop: float = 0.2, K: int = 5) -> MCDropoutHead:
    return MCDropoutHead(MODEL.head, DropoutConfig(p_drop=p_drop, num_paths=K))


def _flat(tree: DraftTree, hidden: Tensor, logits: Tensor, *, temperature: float = 0.0, seed: int = 7) -> FlatRows:
    """The chains as a serving engine lays them out: all rows of a request after one another, the bonus row last."""
    N = L + 1
    row = torch.arange(B)[:, None] * N + torch.arange(L)
    position = (torch.arange(L) + 3).expand(B, L)  # prompts of three tokens, so that the root is at 2
    keys = torch.stack([torch.full((B, L), seed), torch.zeros(B, L, dtype=torch.int64), position], dim=-1)
    child = tree.child_logits
    flat_child = None if child is None else child[:, :L].reshape(B * L, V)
    return FlatRows(
        hidden=hidden.reshape(B * N, D),
        raw=logits.reshape(B * N, V),
        final=logits.reshape(B * N, V) / (temperature or 1.0),
        raw_row=row.flatten(),
        final_row=row.flatten(),
        tokens=tree.tokens[:, 1:].flatten(),
        keys=keys.view(-1, 3),
        temperature=torch.full((B * L,), temperature),
        draft_logits=None if flat_child is None else lambda index: flat_child[index],
    )


def _judge(rule: str, rows: FlatRows, *, head: MCDropoutHead | None = None, **options: object) -> FlatDecision:
    settings = {"memory_bytes": 2**30, "ask": "all", "is_sampled": False, "rule_options": None} | options
    judge = FlatJudge(
        make_rule(rule, settings["rule_options"]),
        head or _head(),
        memory_bytes=settings["memory_bytes"],
        ask=settings["ask"],
    )
    return judge(rows, is_sampled=settings["is_sampled"])


def _by_tree(rule: str, case: tuple[DraftTree, Tensor, Tensor], options: RuleOptions | None = None) -> Tensor:
    """Codes [B, L] of the tree engine."""
    tree, hidden, logits = case
    rows = [make_row([1, 2, 0], SamplingParams(seed=7)) for _ in range(B)]
    v = Verification(
        tree,
        hidden,
        logits,
        RowSampling(rows, torch.device("cpu")),
        _head(),
        with_js=True,
        with_centroid_prob=True,
    )
    ask = tree.valid.clone()
    ask[:, 0] = False
    return make_rule(rule, options).judge(v, ask)[:, 1:]


@pytest.mark.parametrize("ask", ["all", "open"])
@pytest.mark.parametrize("distribution", [True, False])
@pytest.mark.parametrize("rule", GREEDY_RULES)
def test_flat_rows_get_the_codes_of_the_tree_engine(rule: str, distribution: bool, ask: str) -> None:
    case = _case(distribution=distribution)
    codes = _judge(rule, _flat(*case), ask=ask).code.view(B, L)
    assert torch.equal(codes, _by_tree(rule, case))
    assert bool((codes > 0).any())


@pytest.mark.parametrize(
    "options", [RuleOptions(guard_prob=0.2), RuleOptions(guard_ratio=0.3), RuleOptions(js_min_centroid_prob=0.1)]
)
def test_guards_reach_flat_rows(options: RuleOptions) -> None:
    case = _case()
    codes = _judge("dropmatch", _flat(*case), rule_options=options).code.view(B, L)
    assert torch.equal(codes, _by_tree("dropmatch", case, options))
    assert not torch.equal(codes, _by_tree("dropmatch", case))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_blocks_change_no_decision(temperature: float) -> None:
    rows = _flat(*_case(), temperature=temperature)
    whole = _judge("dropmatch", rows, is_sampled=temperature > 0)
    single = _judge("dropmatch", rows, is_sampled=temperature > 0, memory_bytes=1)
    assert torch.equal(whole.code, single.code)
    assert torch.allclose(whole.logit, single.logit, rtol=ROUNDING, equal_nan=True)


def test_greedy_steering_raises_lossy_tokens_and_refuses_exact_ones_the_rule_rejects() -> None:
    rows = _flat(*_case())
    decision = _judge("dropmatch-paper", rows)
    exact = rows.final[rows.final_row].argmax(-1) == rows.tokens
    kept = decision.code > 0
    assert torch.equal(decision.logit == SURE, kept & ~exact)
    assert torch.equal(decision.refuse, exact & ~kept)
    assert torch.equal(decision.lossy > 0, kept & ~exact)
    assert bool((kept & ~exact).any())


def test_a_placeholder_or_masked_token_is_never_kept() -> None:
    case = _case()
    rows = _flat(*case)
    final = rows.final.clone()
    final[rows.final_row[::2], rows.tokens[::2]] = -torch.inf
    tokens = rows.tokens.clone()
    tokens[1::4] = -1
    decision = _judge("js", replace(rows, final=final, tokens=tokens))
    assert not bool((decision.code[::2] > 0).any())
    assert not bool((decision.code[1::4] > 0).any())
    assert bool((decision.code > 0).any())


def test_masks_and_penalties_reach_the_heads() -> None:
    """The heads' own favourite is masked: they then name another, as the plain head does."""
    tree, hidden, logits = _case()
    rows = _flat(tree, hidden, logits)
    masked = rows.final.clone()
    best = masked.argmax(-1, keepdim=True)
    masked.scatter_(-1, best, -torch.inf)
    second = masked.argmax(-1)
    tokens = second[rows.final_row]
    undropped = _head(1e-12)  # heads that are projected, but drop nothing
    moved = replace(rows, final=masked, tokens=tokens)
    assert bool((_judge("head", moved, head=undropped).code > 0).all())
    assert not bool((_judge("head", replace(rows, tokens=tokens), head=undropped).code > 0).any())


@pytest.mark.parametrize("rule", ["exact", "head", "majority", "dropmatch", "dropmatch-paper"])
def test_without_dropout_a_sampled_row_is_left_to_the_engine(rule: str) -> None:
    rows = _flat(*_case(), temperature=0.7)
    decision = _judge(rule, rows, head=_head(0.0), is_sampled=True)
    assert bool(decision.logit.isnan().all())
    assert not bool(decision.refuse.any())
    assert float(decision.lossy.max()) == 0.0


def test_a_raised_logit_gives_the_probability_of_the_most_lenient_path() -> None:
    """At temperature > 0 `head` keeps x whenever any path would with the same random number: max_i p_i(x)."""
    tree, hidden, logits = _case(distribution=False)
    rows = _flat(tree, hidden, logits, temperature=0.7)
    head = _head()
    decision = _judge("head", rows, head=head, is_sampled=True)
    steered = rows.final[rows.final_row].clone()
    own = steered.softmax(-1).gather(-1, rows.tokens[:, None])[:, 0]
    raised = ~decision.logit.isnan()
    steered[raised, rows.tokens[raised]] = decision.logit[raised]
    got = steered.softmax(-1).gather(-1, rows.tokens[:, None])[:, 0]
    paths = (head.keyed_logits(rows.hidden[rows.raw_row], rows.keys) / 0.7).softmax(-1)  # [M, K, V]
    of_token = paths.gather(-1, rows.tokens[:, None, None].expand(-1, 5, 1))[..., 0]
    assert torch.allclose(got, torch.maximum(own, of_token.amax(-1)), atol=SHIFTED)
    assert torch.allclose(decision.lossy[raised], 1 - own[raised] / got[raised], atol=SHIFTED)
    majority = _judge("majority", rows, head=head, is_sampled=True)
    middle = torch.where(majority.logit.isnan(), own, 0.0)
    raised = ~majority.logit.isnan()
    steered = rows.final[rows.final_row].clone()
    steered[raised, rows.tokens[raised]] = majority.logit[raised]
    got = torch.where(raised, steered.softmax(-1).gather(-1, rows.tokens[:, None])[:, 0], middle)
    assert torch.allclose(got, torch.maximum(own, of_token.median(-1).values), atol=SHIFTED)  # three of five paths


def test_other_tokens_keep_their_odds_when_one_is_raised() -> None:
    rows = _flat(*_case(distribution=False), temperature=1.3)
    decision = _judge("head", rows, is_sampled=True)
    raised = (~decision.logit.isnan()).nonzero()[:, 0]
    before = rows.final[rows.final_row][raised]
    after = before.clone()
    after[torch.arange(len(raised)), rows.tokens[raised]] = decision.logit[raised]
    others = torch.ones_like(before, dtype=torch.bool).scatter_(-1, rows.tokens[raised][:, None], False)
    p, q = before.softmax(-1)[others], after.softmax(-1)[others]
    ratio = (q / p).view(len(raised), V - 1)
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=SHIFTED)
    assert len(raised) > 5


def test_js_keeps_a_sampled_token_for_sure_and_says_so() -> None:
    rows = _flat(*_case(), temperature=0.7)
    decision = _judge("js", rows, is_sampled=True)
    sure = decision.logit == SURE
    assert bool(sure.any())
    assert bool((decision.code[sure] == int(Reason.JS)).all())


def test_an_unknown_distribution_passes_no_divergence_test() -> None:
    tree, hidden, logits = _case()
    known = _flat(tree, hidden, logits)
    unknown = replace(known, draft_logits=lambda index: torch.full((len(index), V), torch.nan))
    assert not bool((_judge("js", unknown).code > 0).any())
    assert not bool((_judge("expected-js", unknown).code > 0).any())
    assert torch.equal(_judge("exact+majority", unknown).code, _judge("exact+majority", known).code)


@pytest.mark.parametrize(
    ("rule", "temperature"),
    [(rule, t) for rule in GREEDY_RULES for t in (0.0, 0.8) if t == 0.0 or rule not in GREEDY_ONLY],
)
def test_asking_all_rows_never_waits_for_the_device(rule: str, temperature: float) -> None:
    rows = _flat(*_case(), temperature=temperature)
    judge = FlatJudge(make_rule(rule), _head(), memory_bytes=2**30, ask="all")
    with NoWaiting():
        judge(rows, is_sampled=temperature > 0)


def test_the_watch_on_waiting_would_see_one() -> None:
    rows = _flat(*_case())
    judge = FlatJudge(make_rule("dropmatch"), _head(), memory_bytes=2**30, ask="open")
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        judge(rows, is_sampled=False)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("K", [1, 5, 12])
def test_memory_stays_below_the_stated_bound(K: int, temperature: float) -> None:
    """A vocabulary large against everything else, so that its vectors are what is counted."""
    M, d, V = 8, 8, 4000
    generator = torch.Generator().manual_seed(0)
    model = ScriptedModel(V, d)
    hidden = torch.randn(M, d, generator=generator)
    raw = model.head(hidden)
    draft = raw + torch.randn(M, V, generator=generator)
    index = torch.arange(M)
    rows = FlatRows(
        hidden,
        raw,
        raw / (temperature or 1.0),
        index,
        index,
        draft.argmax(-1),
        torch.stack([index, index, index], dim=-1),
        torch.full((M,), temperature),
        lambda i: draft[i],
    )
    head = MCDropoutHead(model.head, DropoutConfig(p_drop=0.1, num_paths=K))
    judge = FlatJudge(make_rule("dropmatch"), head, memory_bytes=2**40, ask="all")
    with Peak() as watch:
        judge(rows, is_sampled=temperature > 0)
    bound = M * bytes_per_row(K, V, d)
    assert bound / 4 < watch.peak < bound
