"""The closed form of dropout on a linear head, and the rules that use it: exact small cases, knobs, refusals."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.acceptance import AcceptanceRule, AnyOf, Guard, RuleOptions, TargetMatch, make_rule
from dropmatch.core.calibrate import choose_p_drop
from dropmatch.core.closed_form import ExpectedHead, ExpectedJS, ExpectedMajority, head_chance, radius
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.flat import FlatJudge, FlatRows, judging_bytes
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.head_rows import HeadRows
from dropmatch.core.interfaces import DraftTree
from dropmatch.core.reasons import Reason
from dropmatch.core.verification import Verification
from dropmatch.core.verify import judge
from dropmatch.errors import ConfigError, ShapeError
from dropmatch.ops.closed_form import (
    any_head_chance,
    expected_divergence,
    expected_radius,
    logit_spread,
    max_over_mean,
    orthant_chance,
    win_chance,
)
from dropmatch.ops.divergence import LN2, js_divergence
from dropmatch.vllm.head import VLLMHead
from dropmatch.vllm.hook import Asked, Drafts, Hook
from dropmatch.vllm.settings import PluginConfig, parse_config, parse_request
from scripted import ScriptedModel, TableHead
from toys import GENTLE, TreeDrafter, collect, make_row, run, verify
from watches import Peak

FLOAT32 = 1e-5
V = 12
NAMES = ("expected-head", "expected-js", "expected-majority", "dropmatch-expected")
TARGET = ScriptedModel(V, 24, seed=0)
DRAFT = ScriptedModel(V, 24, seed=0, noise=0.6)
TREE = (-1, 0, 0, 0, 1, 1, 2, 4)
CHAIN = (-1, 0, 1, 2, 3)


# --- moments and chances, by enumeration of all masks ---


def _all_masks(d: int, p_drop: float) -> tuple[Tensor, Tensor]:
    """Noise factors [2**d, d] float64 and the chance [2**d] of each."""
    kept = torch.tensor(list(itertools.product((False, True), repeat=d)))
    noise = torch.where(kept, 1 / (1 - p_drop) - 1.0, -1.0).double()
    return noise, torch.where(kept, 1 - p_drop, p_drop).double().prod(-1)


def _case(d: int, R: int, seed: int) -> tuple[Tensor, Tensor]:
    """margin [R] and rows [R, d] of a token that is a little behind its rivals."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(R, d, generator=generator) / d**0.5
    return torch.randn(R, generator=generator) * 0.3, rows


def _exact_chance(margin: Tensor, rows: Tensor, p_drop: float) -> float:
    noise, weight = _all_masks(rows.shape[-1], p_drop)
    wins = (margin.double() + noise @ rows.double().T > 0).all(-1)
    return float(weight[wins].sum())


@pytest.mark.parametrize("p_drop", [0.05, 0.3, 0.6])
@pytest.mark.parametrize(("d", "R"), [(1, 1), (3, 2), (7, 1), (8, 5)])
def test_win_chance_over_all_coordinates_is_the_sum_over_all_masks(d: int, R: int, p_drop: float) -> None:
    for seed in range(5):
        margin, rows = _case(d, R, seed)
        exact = _exact_chance(margin, rows, p_drop)
        assert float(win_chance(margin, rows, p_drop, num_exact=d)) == pytest.approx(exact, abs=FLOAT32)


# A dozen equal coordinates are far from normal: a chance then moves in steps of single masks.
TWELVE_COORDINATES = {0: 0.05, 2: 0.05, 8: 0.025}  # mean error over the cases, by num_exact


@pytest.mark.parametrize("p_drop", [0.1, 0.3])
def test_the_normal_approximation_is_near_the_enumeration_with_twelve_coordinates(p_drop: float) -> None:
    """Seeds 0..19, d = 12, four rivals: more coordinates summed exactly leave less to the approximation."""
    error: dict[int, float] = {}
    for num_exact, bound in TWELVE_COORDINATES.items():
        errors = []
        for seed in range(20):
            margin, rows = _case(12, 4, seed)
            got = float(win_chance(margin, rows, p_drop, num_exact=num_exact))
            errors.append(abs(got - _exact_chance(margin, rows, p_drop)))
        error[num_exact] = sum(errors) / len(errors)
        assert error[num_exact] < bound
    assert error[8] < min(error[0], error[2])


def test_one_large_coordinate_needs_the_exact_sum() -> None:
    """A token that wins just when one dominant coordinate is dropped wins with chance p, not with a normal one."""
    rows = torch.cat([torch.tensor([[-3.0]]), torch.full((1, 100), 0.001)], dim=-1)
    margin = torch.tensor([-2.5])
    assert float(win_chance(margin, rows, 0.1)) == pytest.approx(0.1, abs=1e-4)
    assert abs(float(win_chance(margin, rows, 0.1, num_exact=0)) - 0.1) > 0.05


def test_independent_variables_have_the_product_of_their_chances() -> None:
    mean, deviation = torch.tensor([0.3, -0.2, 1.0]), torch.tensor([1.0, 2.0, 0.5])
    got = orthant_chance(mean, torch.diag(deviation.square()))
    assert float(got) == pytest.approx(float(torch.special.ndtr(mean / deviation).prod()), abs=FLOAT32)


def test_two_centred_normals_are_near_the_arcsine_law() -> None:
    """P(both positive) = 1/4 + arcsin(rho) / (2 pi). Truncation is exact at rho = 0, elsewhere off by up to 0.02."""
    for rho in (-0.9, -0.5, 0.0, 0.5, 0.9):
        got = float(orthant_chance(torch.zeros(2), torch.tensor([[1.0, rho], [rho, 1.0]])))
        exact = 0.25 + math.asin(rho) / (2 * math.pi)
        assert got == pytest.approx(exact, abs=0.02 if rho else FLOAT32)


def test_a_rival_that_is_masked_changes_nothing_and_a_masked_token_never_wins() -> None:
    margin, rows = _case(20, 3, 0)
    more = torch.cat([rows, torch.randn(1, 20)])
    free = float(win_chance(margin, rows, 0.3))
    assert float(win_chance(torch.cat([margin, torch.tensor([1e30])]), more, 0.3)) == pytest.approx(free, abs=FLOAT32)
    assert float(win_chance(torch.cat([margin, torch.tensor([-1e30])]), more, 0.3)) < FLOAT32


def test_chances_of_all_tokens_add_up() -> None:
    """A head produces one token. Seed 1, eight tokens, p = 0.3: sequential truncation leaves 2% at most."""
    generator = torch.Generator().manual_seed(1)
    scores, rows = torch.randn(8, generator=generator), torch.randn(8, 64, generator=generator) / 8
    total = 0.0
    for i in range(8):
        rest = [j for j in range(8) if j != i]
        total += float(win_chance(scores[i] - scores[rest], rows[i] - rows[rest], 0.3))
    assert total == pytest.approx(1.0, abs=0.02)


SAME_RIVAL = 0.06  # of 0.5: what is left behind a truncation counts as normal, and a copy of a rival as half a rival


def test_a_rival_listed_twice_lowers_a_chance_a_little() -> None:
    rows = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    once, twice = (float(win_chance(torch.zeros(n), rows.expand(n, -1), 0.3, num_exact=0)) for n in (1, 2))
    assert once == pytest.approx(0.5, abs=FLOAT32)
    assert once - SAME_RIVAL < twice < once


@pytest.mark.parametrize("p_drop", [1e-9, 0.99, math.nextafter(1.0, 0.0)])
def test_extreme_rates_give_chances_and_radii(p_drop: float) -> None:
    margin, rows = _case(8, 3, 0)
    assert 0.0 <= float(win_chance(margin, rows, p_drop)) <= 1.0 + FLOAT32
    value = float(expected_radius(*logit_spread(torch.full((3,), 1 / 3), rows, p_drop), 5))
    assert 0.0 <= value <= LN2 + FLOAT32


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_plays_no_part(dtype: torch.dtype) -> None:
    """Programs set it, and the closed form then mixed dtypes and raised."""
    margin, rows = _case(8, 3, 0)
    variance, freedom = torch.ones(1), torch.full((1,), 2.0)
    want = win_chance(margin, rows, 0.3), expected_radius(variance, freedom, 5)
    torch.set_default_dtype(dtype)
    try:
        got = win_chance(margin, rows, 0.3), expected_radius(variance, freedom, 5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_margins_and_rows_must_name_the_same_rivals() -> None:
    with pytest.raises(ShapeError, match=r"margin \(3,\) and rows \(2, 5\)"):
        win_chance(torch.zeros(3), torch.zeros(2, 5), 0.3)


def test_chance_of_any_head() -> None:
    assert any_head_chance(torch.tensor([0.0, 0.1, 1.0]), 5).tolist() == pytest.approx([0.0, 1 - 0.9**5, 1.0])


@pytest.mark.parametrize("p_drop", [0.05, 0.3, 0.5])
@pytest.mark.parametrize("d", [2, 8, 12])
def test_spread_is_the_expected_variance_over_all_masks(d: int, p_drop: float) -> None:
    """Var over tokens of the noise, averaged over all 2**d masks: no approximation while no token is left out."""
    generator = torch.Generator().manual_seed(d)
    probs, rows = torch.randn(6, generator=generator).softmax(-1), torch.randn(6, d, generator=generator)
    noise, weight = _all_masks(d, p_drop)
    moved = noise @ rows.double().T  # [2**d, 6]
    mean = (probs * moved).sum(-1, keepdim=True)
    exact = float((weight * (probs * (moved - mean).square()).sum(-1)).sum())
    assert float(logit_spread(probs, rows, p_drop)[0]) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("num_paths", [2, 3])
def test_expected_divergence_is_the_mean_over_all_masks_where_dropout_is_gentle(num_paths: int) -> None:
    """d = 4, all masks of K = 2 and 3 heads: the mean JS to the centroid, to second order in the noise. The noise is
    scaled to a hundredth, so the next order is 1e-4 of it."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(5, 4, generator=generator) * 0.01
    logits = torch.randn(5, generator=generator)
    noise, weight = _all_masks(4, 0.3)
    heads = logits.double() + noise @ rows.double().T  # [16, 5]
    total = 0.0
    for chosen in itertools.product(range(16), repeat=num_paths):
        paths = heads[list(chosen)]
        centroid = paths.mean(0).softmax(-1)
        share = float(weight[list(chosen)].prod())
        total += share * sum(_js(path.softmax(-1), centroid) for path in paths) / num_paths
    variance, _ = logit_spread(logits.softmax(-1), rows, 0.3)
    assert float(expected_divergence(variance, num_paths)) == pytest.approx(total, rel=0.01)


def _js(p: Tensor, q: Tensor) -> float:
    """float64, since these divergences are far below float32's rounding."""
    m = (p + q) / 2
    return float(((p * (p / m).log()).sum() + (q * (q / m).log()).sum()) / 2)


def test_tail_is_bracketed_and_folded_in() -> None:
    """The variance lies between what the listed tokens give and that plus the tail's mass at its farthest token."""
    generator = torch.Generator().manual_seed(5)
    probs = torch.randn(400, generator=generator).mul(2).softmax(-1).sort(descending=True).values
    rows = torch.randn(400, 30, generator=generator)
    full = float(logit_spread(probs, rows, 0.3)[0])
    for M in (8, 32, 128):
        listed = probs[:M]
        share = listed / listed.sum()
        centre = (share[:, None] * rows[:M]).sum(0)
        square = (rows - centre).square().sum(-1) * 0.3 / 0.7
        low = float(listed.sum() * (share * square[:M]).sum())
        high = low + float((1 - listed.sum()) * square[M:].max())
        assert low <= full <= high
        folded = float(logit_spread(listed, rows[:M], 0.3)[0])
        assert abs(folded - full) < 0.5 * abs(low - full)


def test_degrees_of_freedom_count_the_contenders() -> None:
    rows = torch.eye(9)[:, :8]  # the ninth token never moves
    two = torch.tensor([0.5, 0.5, *[0.0] * 7])
    assert float(logit_spread(two, rows, 0.3)[1]) == pytest.approx(1.0, abs=FLOAT32)
    assert float(logit_spread(torch.full((9,), 1 / 9), rows, 0.3)[1]) > 7


# --- the radius ---


@pytest.mark.parametrize(
    ("freedom", "count", "exact"), [(1, 2, 1 + 2 / math.pi), (2, 3, 1 + 1 / 2 + 1 / 3), (2, 1, 1.0)]
)
def test_largest_of_several_chi_squares(freedom: float, count: int, exact: float) -> None:
    """Known means: two chi-squares of one degree (1 + 2/pi) and exponentials (harmonic numbers)."""
    assert float(max_over_mean(torch.tensor([float(freedom)]), count)) == pytest.approx(exact, rel=1e-3)


def test_radius_equals_sampled_gaussian_heads_where_they_move_little() -> None:
    """Seed 0, 4,000 draws of K heads, standard error under 2%. K - 1 independent gammas bound the K dependent ones from
    below, by at most 11% (K = 3), and are exact at K = 2."""
    generator = torch.Generator().manual_seed(0)
    for width, freedom in ((1, 1), (6, 6)):
        for K in (2, 3, 5, 20):
            moved = torch.randn(4000, K, width, generator=generator)
            square = (moved - moved.mean(1, keepdim=True)).square().sum(-1)
            sampled = float(square.amax(1).mean() / square.mean())
            got = float(max_over_mean(torch.tensor([float(freedom)]), K - 1))
            assert sampled * 0.87 < got < sampled * 1.03
            if K == 2:
                assert got == 1.0


def test_radius_keeps_its_slope_at_zero_and_stays_below_ln_2() -> None:
    variance, freedom = torch.tensor([1e-4, 1.0, 1e3]), torch.full((3,), 2.0)
    got = expected_radius(variance, freedom, 5)
    assert float(got[0]) == pytest.approx(1e-4 * 0.1 * (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=2e-3)
    assert bool((got[1:] > got[:-1]).all())
    assert float(got[2]) <= LN2 + FLOAT32


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.floats(0.0, 50.0), st.floats(1.0, 40.0))
def test_radius_grows_with_the_number_of_heads(variance: float, freedom: float) -> None:
    values = [
        float(expected_radius(torch.tensor([variance]), torch.tensor([freedom]), K)) for K in (1, 2, 3, 5, 10, 20)
    ]
    assert values[0] == 0.0
    assert values == sorted(values)


# --- rules ---


def _drafted(
    prompt: list[int], shape: tuple[int, ...], *, with_distribution: bool, model: ScriptedModel
) -> tuple[Tensor, Tensor | None]:
    logits, seen = torch.zeros(1, len(shape), V), [0] * len(shape)
    tokens, paths = torch.zeros(1, len(shape), dtype=torch.int64), [[]]
    tokens[0, 0] = prompt[-1]
    for n, parent in enumerate(shape):
        if n > 0:
            tokens[0, n] = logits[0, parent].argsort(descending=True)[seen[parent]]
            seen[parent] += 1
            paths.append([*paths[parent], int(tokens[0, n])])
        logits[0, n] = model.head(model.state([*prompt, *paths[n]]))
    return tokens, logits if with_distribution else None


def _many(
    num: int = 24,
    dropout: DropoutConfig = GENTLE,
    params: SamplingParams | None = None,
    *,
    shape: tuple[int, ...] = TREE,
    with_distribution: bool = True,
    model: ScriptedModel = DRAFT,
    target: object = TARGET,
) -> Callable[[], Verification]:
    prompts = [[1, b % V, b // V, 5] for b in range(num)]
    drafts = [_drafted(prompt, shape, with_distribution=with_distribution, model=model) for prompt in prompts]
    tree = DraftTree.tree(
        torch.cat([tokens for tokens, _ in drafts]),
        torch.tensor([shape] * num),
        None,
        torch.cat([logits for _, logits in drafts]) if with_distribution else None,
    )
    rows = [make_row(prompt, params or SamplingParams(seed=b)) for b, prompt in enumerate(prompts)]
    return lambda: verify(target, rows, tree, dropout)


def _codes(rule: AcceptanceRule, v: Verification) -> Tensor:
    return judge(v, [rule] * len(v.tree.tokens))


def test_names_presets_and_reasons() -> None:
    assert make_rule("expected-head", RuleOptions(head_chance=0.3)) == ExpectedHead(0.3)
    assert make_rule("expected-js") == ExpectedJS()
    assert make_rule("dropmatch-expected") == AnyOf((TargetMatch(), ExpectedJS(), ExpectedMajority()))
    assert make_rule("exact+expected-head+js").rules[1] == ExpectedHead(0.5)
    assert [Reason(code).label for code in (18, 19, 20)] == ["expected_head", "expected_js", "expected_majority"]


@pytest.mark.parametrize("chance", [0.0, -0.1, 1.1, float("nan"), "0.5"])
def test_a_chance_out_of_range_is_refused(chance: float) -> None:
    with pytest.raises(ConfigError, match=r"ExpectedHead chance=.*Allowed: \(0, 1\]"):
        ExpectedHead(chance)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["expected-head", "expected-majority", "dropmatch-expected"])
def test_without_dropout_exactly_the_targets_own_tokens_stay(name: str, temperature: float) -> None:
    make = _many(dropout=DropoutConfig(p_drop=0.0), params=SamplingParams(temperature=temperature, seed=3))
    assert torch.equal(_codes(make_rule(name), make()) > 0, _codes(TargetMatch(), make()) > 0)


@pytest.mark.parametrize("name", NAMES)
def test_neither_heads_nor_seeds_nor_mask_sharing_play_a_part(name: str) -> None:
    v = _many(params=SamplingParams(seed=1))()
    codes = _codes(make_rule(name), v)
    assert v.head.rows_asked == 0
    for other in (
        _many(params=SamplingParams(seed=2)),
        _many(dropout=DropoutConfig(p_drop=GENTLE.p_drop, mask_sharing="fixed")),
        _many(dropout=DropoutConfig(p_drop=GENTLE.p_drop, heads="shortlist", shortlist_size=4)),
    ):
        assert torch.equal(_codes(make_rule(name), other()), codes)
    assert v.seen is None
    assert bool((codes > 0).any())
    assert not bool((codes[:, 1:] > 0).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_rows_decisions_do_not_depend_on_its_batch_mates_or_slot(name: str) -> None:
    rule = make_rule(name)
    together = _codes(rule, _many()())
    prompts = [[1, b % V, b // V, 5] for b in range(24)]
    for order in ([5], [7, 5, 20], [20, 7, 5]):
        drafts = [_drafted(prompts[b], TREE, with_distribution=True, model=DRAFT) for b in order]
        tree = DraftTree.tree(
            torch.cat([d[0] for d in drafts]),
            torch.tensor([TREE] * len(order)),
            None,
            torch.cat([d[1] for d in drafts]),
        )
        alone = _codes(rule, verify(TARGET, [make_row(prompts[b], SamplingParams(seed=b)) for b in order], tree))
        assert torch.equal(alone, together[order])


@pytest.mark.parametrize("name", NAMES)
def test_longer_drafts_do_not_change_the_earlier_decisions(name: str) -> None:
    long = _codes(make_rule(name), _many(shape=CHAIN)())
    for length in (1, 2, 3):
        assert torch.equal(_codes(make_rule(name), _many(shape=CHAIN[: length + 1])()), long[:, : length + 1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chain_and_one_branch_tree_emit_the_same_tokens(name: str, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=4)
    config = EngineConfig(draft_length=3)

    def decode(shape: tuple[int, ...]) -> list[int]:
        model, draft = ScriptedModel(V, 24), ScriptedModel(V, 24, noise=0.6)
        engine = SpeculativeEngine(model, TreeDrafter(draft, shape), rule=name, dropout=GENTLE, config=config)
        return [t for result in run(engine, [[1, 2], [3, 4, 5]], params) for t in result.tokens]

    wide = decode((-1, 0, 1, 2))
    assert len(wide) == 60
    v_chain, v_tree = _many(shape=(-1, 0, 1, 2))(), _many(shape=(-1, 0, 1, 2))()
    chain = DraftTree.chain(v_chain.tree.tokens, torch.full((24,), 4), v_chain.tree.child_logits)
    rows = [make_row([1, b % V, b // V, 5], SamplingParams(seed=b)) for b in range(24)]
    codes = _codes(make_rule(name), verify(TARGET, rows, chain))
    assert torch.equal(codes, _codes(make_rule(name), v_tree))


def test_more_heads_and_more_dropout_only_add_tokens_far_from_the_plain_argmax() -> None:
    """More heads make every keep likelier; more dropout does so for tokens that are not the target's own."""
    for rule in (ExpectedHead(), ExpectedJS()):
        kept = None
        for K in (2, 3, 5, 9, 20):
            codes = _codes(rule, _many(dropout=DropoutConfig(num_paths=K, p_drop=0.1))()) > 0
            assert kept is None or not bool((kept & ~codes).any())
            kept = codes
        kept = None
        for p_drop in (0.02, 0.05, 0.1, 0.2):
            v = _many(dropout=DropoutConfig(p_drop=p_drop))()
            codes = (_codes(rule, v) > 0) & ~v.is_exact
            assert kept is None or int((codes & ~kept).sum()) > int((kept & ~codes).sum())
            kept = codes


def test_more_heads_are_nothing_to_the_majority() -> None:
    codes = [_codes(ExpectedMajority(), _many(dropout=DropoutConfig(num_paths=K, p_drop=0.2))()) for K in (1, 5, 50)]
    assert torch.equal(codes[0], codes[1])
    assert torch.equal(codes[0], codes[2])


CLEAR = 0.05  # share of votes that a majority must be ahead by: the vote itself is off by 0.03, the chances by as much


@pytest.mark.parametrize("p_drop", [0.1, 0.3])
def test_the_likeliest_token_of_a_head_is_the_majority_of_many(p_drop: float) -> None:
    """400 heads at the 24 rows' first nodes, mask seeds 0..23."""
    v = _many(dropout=DropoutConfig(num_paths=400, p_drop=p_drop), shape=(-1, 0, 0, 0))()
    kept = (_codes(ExpectedMajority(), v) > 0)[:, 1:]
    heads = v.ensemble(v.tree.depth > 0)
    votes = torch.zeros(24, V).scatter_add_(-1, heads.tokens[:, 1], torch.ones(24, 400)).topk(2).values / 400
    is_clear = votes[:, 0] - votes[:, 1] > CLEAR
    sampled = (heads.majority == v.tree.tokens)[:, 1:]
    assert int(is_clear.sum()) > 12
    assert torch.equal(kept[is_clear], sampled[is_clear])


def test_greedy_rows_among_sampled_ones_are_judged_as_alone() -> None:
    prompts = [[1, b % V, b // V, 5] for b in range(24)]
    alone = _many(shape=CHAIN)()
    params = [SamplingParams(seed=b) if b % 2 else SamplingParams(temperature=0.9, top_k=4, seed=b) for b in range(24)]
    mixed = verify(TARGET, [make_row(p, q) for p, q in zip(prompts, params, strict=True)], alone.tree)
    b, n = (alone.tree.depth > 0).nonzero(as_tuple=True)
    is_greedy = b % 2 == 1
    assert torch.equal(head_chance(mixed, b, n)[is_greedy], head_chance(alone, b, n)[is_greedy])


CUT_ERROR = {1.0: (0.0, 0.02), 0.8: (0.03, 0.1)}
"""Closed against sampled chance at p_drop 0.2, mean over positions by top-p: 0.011 and 0.058 were seen, 300 heads."""


@pytest.mark.parametrize("top_p", CUT_ERROR)
def test_top_p_costs_accuracy_since_each_head_cuts_by_its_own(top_p: float) -> None:
    """60 positions, mask and sampling seed 5."""
    model, draft = ScriptedModel(40, 96, seed=0), ScriptedModel(40, 96, seed=0, noise=0.8)
    rows = [make_row([1, b % 40, b // 40, 5], SamplingParams(temperature=0.8, seed=5, top_p=top_p)) for b in range(60)]
    tokens = torch.stack([draft.head(draft.state(row.ids)).topk(2).indices for row in rows])
    tokens[:, 0] = 5
    tree = DraftTree.chain(tokens, torch.full((60,), 2))
    v = verify(model, rows, tree, DropoutConfig(num_paths=300, p_drop=0.2), with_js=False)
    b, n = (tree.depth > 0).nonzero(as_tuple=True)
    sampled = v.ensemble(tree.depth > 0).votes[b, n] / 300
    low, high = CUT_ERROR[top_p]
    assert low < float((head_chance(v, b, n) - sampled).abs().mean()) < high


@pytest.mark.parametrize("name", NAMES)
def test_logits_that_are_no_numbers_keep_nothing(name: str) -> None:
    v = _many()()
    v.target_logits = v.target_logits.clone()
    v.target_logits[0], v.target_logits[1] = torch.nan, -torch.inf
    v.is_exact[:2] = False
    kept = _codes(make_rule(name), v) > 0
    assert not bool(kept[:2].any())
    assert torch.equal(kept[2:], (_codes(make_rule(name), _many()()) > 0)[2:])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(2, 1), (3, 2)])
def test_tiny_vocabularies_and_states_are_judged(name: str, size: tuple[int, int]) -> None:
    model = ScriptedModel(*size)
    rows = [make_row([b // 2, b % 2], SamplingParams(seed=b)) for b in range(4)]
    logits = torch.stack([model.head(model.state(row.ids)) for row in rows])
    tokens = torch.stack([torch.tensor([row.ids[-1] for row in rows]), logits.argmax(-1)], dim=1)
    tree = DraftTree.chain(tokens, torch.full((4,), 2), torch.stack([logits, logits], dim=1))
    v = verify(model, rows, tree, DropoutConfig(p_drop=0.01))
    assert bool((_codes(make_rule(name), v)[:, 1] > 0).all())


def test_a_larger_chance_keeps_less() -> None:
    kept = [_codes(ExpectedHead(chance), _many()()) > 0 for chance in (0.05, 0.3, 0.5, 0.9)]
    for more, less in itertools.pairwise(kept):
        assert not bool((less & ~more).any())
    assert int(kept[0].sum()) > int(kept[-1].sum())


def test_siblings_get_one_decision_from_the_radius_and_one_likeliest_token() -> None:
    js, majority = (_codes(rule, _many()()) > 0 for rule in (ExpectedJS(), ExpectedMajority()))
    assert torch.equal(js[:, 1], js[:, 2])
    assert torch.equal(js[:, 1], js[:, 3])
    assert int(majority[:, 1:4].sum(-1).max()) == 1


@pytest.mark.parametrize("name", NAMES)
def test_guard_equals_filtering_after_the_fact(name: str) -> None:
    rule, make = make_rule(name), _many()
    v = make()
    free = _codes(rule, v)
    prob, best = v.target_probs(v.tree.depth > 0)
    passes = v.is_exact | ((prob >= 0.1) & (prob >= 0.2 * best))
    assert torch.equal(_codes(Guard(rule, 0.1, 0.2), make()), torch.where(passes, free, 0))


def test_drafts_without_a_distribution_are_point_masses() -> None:
    v = _many(with_distribution=False)()
    kept = _codes(ExpectedJS(), v) > 0
    b, n = (v.tree.depth > 0).nonzero(as_tuple=True)
    logits = v.target_logits[b, v.parent[b, n]]
    one_hot = torch.nn.functional.one_hot(v.tree.tokens[b, n], V).float()
    expected = js_divergence(one_hot, logits.softmax(-1)) <= radius(v, b, v.parent[b, n])
    assert torch.equal(kept[b, n], expected)
    assert bool(expected.any())


def test_target_as_its_own_drafter_is_kept() -> None:
    make = _many(shape=CHAIN, model=TARGET)
    for rule in (ExpectedJS(), ExpectedHead(), make_rule("dropmatch-expected")):
        assert bool((_codes(rule, make())[:, 1:] > 0).all())


def test_one_head_has_no_radius() -> None:
    assert not bool((_codes(ExpectedJS(), _many(dropout=DropoutConfig(num_paths=1))()) > 0).any())


def test_masked_tokens_are_never_kept_and_open_ones_are_judged_among_themselves() -> None:
    banned = tuple(range(0, V, 2))
    v = _many(params=SamplingParams(suppress_tokens=banned))()
    for name in ("expected-head", "expected-majority"):
        kept = _codes(make_rule(name), v) > 0
        assert not bool((kept & (v.tree.tokens % 2 == 0)).any())
        assert bool(kept.any())


# --- heads that are not plain ---


class FullHead(TableHead):
    """Bias, scale and soft-cap, as HFHead has them."""

    def __init__(self, weight: Tensor, *, bias: Tensor | None = None, scale: float = 1.0, softcap: float | None = None):
        super().__init__(weight)
        self.bias, self.scale, self.softcap, self.is_linear = bias, scale, softcap, softcap is None

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = super().__call__(hidden)
        logits = (logits if self.bias is None else logits + self.bias) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _with_head(**options: object) -> ScriptedModel:
    model = ScriptedModel(V, 24, seed=0)
    model.head = FullHead(model.head.weight, **options)
    return model


def test_a_scale_is_the_same_as_larger_weights() -> None:
    scaled, larger = _with_head(scale=0.5), ScriptedModel(V, 24, seed=0)
    larger.head = TableHead(larger.head.weight * 0.5)
    for name in NAMES:
        assert torch.equal(
            _codes(make_rule(name), _many(target=scaled)()), _codes(make_rule(name), _many(target=larger)())
        )


def test_a_bias_moves_scores_but_no_noise() -> None:
    bias = torch.randn(V, generator=torch.Generator().manual_seed(2))
    target = _with_head(bias=bias)
    rows = HeadRows.of(target.head)
    hidden, tokens = target.table[:3], torch.arange(V).expand(3, V)
    products = rows.products(hidden, tokens)
    assert torch.allclose(rows.scores(products, tokens), target.head(hidden), rtol=0, atol=FLOAT32)
    assert torch.allclose(products.sum(-1), target.head(hidden) - bias, rtol=0, atol=FLOAT32)
    assert not torch.equal(_codes(ExpectedHead(), _many(target=target)()), _codes(ExpectedHead(), _many()()))


def test_a_soft_cap_changes_no_greedy_chance() -> None:
    capped = _with_head(softcap=4.0)
    for name in ("expected-head", "expected-majority"):
        plain = _codes(make_rule(name), _many()())
        assert torch.equal(_codes(make_rule(name), _many(target=capped)()), plain)


def test_a_soft_cap_shrinks_the_radius_by_its_slope() -> None:
    capped = HeadRows.of(_with_head(softcap=4.0).head)
    hidden, tokens = TARGET.table[:3], torch.arange(V).expand(3, V)
    products = capped.products(hidden, tokens)
    scores = capped.scores(products, tokens).requires_grad_()
    (slope,) = torch.autograd.grad((4.0 * torch.tanh(scores / 4.0)).sum(), scores)
    assert torch.allclose(capped.slope(products, tokens), slope, rtol=0, atol=FLOAT32)
    b, node = torch.arange(24), torch.zeros(24, dtype=torch.int64)
    free, bent = radius(_many()(), b, node), radius(_many(target=_with_head(softcap=4.0))(), b, node)
    assert float(bent.median()) < float(free.median())


def test_heads_without_rows_are_refused_with_the_way_out() -> None:
    class Quantised(FullHead):
        def __call__(self, hidden: Tensor) -> Tensor:
            return hidden @ self.hidden_weight.T

    target = _with_head()
    target.head = Quantised(target.head.weight)
    target.head.hidden_weight, target.head.weight = target.head.weight, None
    for name in NAMES:
        with pytest.raises(ConfigError, match=r"no weight matrix \(quantised, offloaded.*Use the sampled rules"):
            _codes(make_rule(name), _many(target=target)())


def test_a_bend_without_a_name_is_refused() -> None:
    target = _with_head()
    target.head.is_linear = False
    with pytest.raises(ConfigError, match="not linear and names no soft-cap"):
        _codes(ExpectedHead(), _many(target=target)())


def test_independent_noise_is_refused_only_where_it_is_used() -> None:
    dropout = DropoutConfig(p_drop=0.1, noise="independent")
    _codes(ExpectedHead(), _many(dropout=dropout)())
    with pytest.raises(ConfigError, match=r"noise='independent'.*Use noise='shared'"):
        _codes(ExpectedHead(), _many(dropout=dropout, params=SamplingParams(temperature=0.7))())


@pytest.mark.parametrize(
    ("params", "dropout", "is_plain", "says"),
    [
        (SamplingParams(rule="dropmatch-expected"), GENTLE, False, "no weight matrix"),
        (
            SamplingParams(rule="expected-head", temperature=0.7),
            DropoutConfig(p_drop=0.1, noise="independent"),
            True,
            "Use noise='shared'",
        ),
    ],
)
def test_a_request_that_cannot_be_judged_is_refused_before_its_batch_mates_lose_a_step(
    params: SamplingParams, dropout: DropoutConfig, is_plain: bool, says: str
) -> None:
    """It used to raise in the first step, which left all rows of the engine unusable."""

    def engine() -> SpeculativeEngine:
        target = ScriptedModel(V, 24)
        if not is_plain:
            target.head = _Opaque(target.head.weight)
        return SpeculativeEngine(target, TreeDrafter(DRAFT, CHAIN), rule="dropmatch", dropout=dropout)

    alone, beside = engine(), engine()
    for one in (alone, beside):
        one.add([1, 2, 3], SamplingParams(max_new_tokens=20))
    with pytest.raises(ConfigError, match=says):
        beside.add([1, 2, 4], params)
    assert collect(beside.run())[0].tokens == collect(alone.run())[0].tokens


class _Opaque:
    """A head that shows no rows."""

    is_linear, vocab_size, weight = True, V, None

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, hidden: Tensor) -> Tensor:
        return hidden @ self._weight.T


def test_a_head_without_rows_leaves_the_sampled_choice_of_p_drop() -> None:
    head = _Opaque(TARGET.head.weight)
    with pytest.raises(ConfigError, match=r"p_drop='auto-expected'.*p_drop='auto' or a number"):
        choose_p_drop(head, TARGET.table[:20], DropoutConfig(), expected=True)
    assert choose_p_drop(head, TARGET.table[:20], DropoutConfig()).p_drop > 0


@pytest.mark.parametrize("expected", [False, True])
def test_one_head_has_no_radius_to_choose_p_drop_by(expected: bool) -> None:
    """A radius of 0 used to choose the largest p_drop."""
    with pytest.raises(ConfigError, match="K=1 is a single one"):
        choose_p_drop(TARGET.head, TARGET.table[:20], DropoutConfig(num_paths=1), expected=expected)


# --- in serving engines ---


def _flat(head: TableHead, hidden: Tensor, raw: Tensor, *, temperature: float = 0.0) -> FlatRows:
    """The second best token of every row, with the target's own distribution as the drafter's."""
    index = torch.arange(len(hidden))
    return FlatRows(
        hidden=hidden,
        raw=raw,
        final=raw / (temperature or 1.0),
        raw_row=index,
        final_row=index,
        tokens=raw.topk(2).indices[:, 1],
        keys=torch.stack([index, index, index], dim=-1),
        temperature=torch.full((len(hidden),), temperature),
        draft_logits=lambda i: raw[i],
    )


def _kept(name: str, head: TableHead, rows: FlatRows, *, is_sampled: bool = False) -> Tensor:
    judge = FlatJudge(make_rule(name), MCDropoutHead(head, GENTLE), memory_bytes=2**30, ask="all")
    return judge(rows, is_sampled=is_sampled).code > 0


@pytest.mark.parametrize("name", ["expected-head", "expected-majority"])
def test_a_grammars_mask_holds_in_front_of_a_soft_cap(name: str) -> None:
    """Forbidden tokens used to come back as rivals, with the scores they have in front of the cap."""
    hidden = TARGET.table[:40]
    allowed = torch.arange(V) % 4 == 1
    kept = []
    for options in ({}, {"softcap": 4.0}):
        head = _with_head(**options).head
        kept.append(_kept(name, head, _flat(head, hidden, head(hidden).masked_fill(~allowed, -torch.inf))))
    assert torch.equal(kept[0], kept[1])
    assert bool(kept[0].any()) or name == "expected-majority"


@pytest.mark.parametrize(("name", "temperature"), [*((name, 0.0) for name in NAMES), ("expected-js", 0.8)])
def test_flat_rows_are_judged_without_a_projection(name: str, temperature: float) -> None:
    head = TableHead(TARGET.head.weight)
    rows = _flat(head, TARGET.table[:20], head(TARGET.table[:20]), temperature=temperature)
    before = head.rows
    assert len(_kept(name, head, rows, is_sampled=temperature > 0)) == 20
    assert head.rows == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "K"), [((64, 8), 5), ((64, 512), 5), ((3000, 8), 500)])
def test_memory_stays_below_the_stated_bound(name: str, size: tuple[int, int], K: int) -> None:
    """Rows of a large hidden size used to take six times what the cap allowed; K takes nothing."""
    generator = torch.Generator().manual_seed(0)
    head = TableHead(torch.randn(*size, generator=generator) / size[1] ** 0.5)
    hidden = torch.randn(4, size[1], generator=generator)
    rows, rule = _flat(head, hidden, head(hidden)), make_rule(name)
    judge = FlatJudge(rule, MCDropoutHead(head, DropoutConfig(num_paths=K, p_drop=0.1)), memory_bytes=2**40, ask="all")
    with Peak() as watch:
        judge(rows, is_sampled=False)
    assert 4 * judging_bytes(rule, K, *size) / 12 < watch.peak < 4 * judging_bytes(rule, K, *size)


def _llm(weight: Tensor | None, logits: Tensor) -> SimpleNamespace:
    """A model of vLLM with this LM head. logits: [V, d] what it multiplies by."""
    return SimpleNamespace(
        compute_logits=lambda hidden: hidden.float() @ logits.T,
        lm_head=SimpleNamespace(weight=weight, bias=None),
        logits_processor=SimpleNamespace(soft_cap=None, scale=1.0),
    )


@pytest.mark.parametrize(
    ("dtype", "has_rows"), [(torch.bfloat16, True), (torch.float32, True), (torch.float8_e4m3fn, False)]
)
def test_heads_of_vllm_may_have_a_dtype_of_their_own(dtype: torch.dtype, has_rows: bool) -> None:
    """A float32 or float8 head under bfloat16 states used to end the server's start, whatever the rule."""
    weight = TARGET.head.weight.to(dtype)
    llm = _llm(weight, weight.float())
    head = VLLMHead(llm, hidden_size=24, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (head.weight is not None) == has_rows


def test_rows_of_another_matrix_are_not_taken_for_the_heads_own() -> None:
    other = TARGET.head.weight.clone()
    other[-1] += 1.0
    head = VLLMHead(_llm(other, TARGET.head.weight), hidden_size=24, dtype=torch.float32, device=torch.device("cpu"))
    assert head.weight is None


def test_a_request_for_rows_that_a_server_lacks_is_decoded_losslessly_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The front end lets it through, and an error in the worker would end the server for all."""
    config = PluginConfig(rule="majority", p_drop=0.1)
    hook = Hook(config, hidden_size=24, dtype=torch.float32, device=torch.device("cpu"))
    assert hook.activate(_llm(None, TARGET.head.weight))["has_weight"] is False
    hidden = TARGET.table[:6]
    raw = hidden @ TARGET.head.weight.T
    index = torch.arange(6)
    settings = parse_request(config, {"dropmatch_rule": "expected-head"}), config.settings()
    asked = [Asked(each, 0, 0.0) for each in settings]
    drafts = Drafts(asked, [3, 3], raw.topk(2).indices[:, 1], index, hidden, raw, raw, index, index, None)
    with caplog.at_level(logging.WARNING):
        hook.decide(drafts)
        steering = hook.decide(drafts)
    assert bool(steering.logit[:3].isnan().all())
    assert not bool(steering.refuse[:3].any())
    assert [record.message.split(" (")[0] for record in caplog.records] == ["A request asks for a rule in closed form"]
    assert hook.counts()[0] == 0  # nothing was counted yet
    hook.count(torch.zeros(6, dtype=torch.bool))
    assert hook.counts()[0] == 6  # the other request, twice


@pytest.mark.parametrize(("rule", "is_expected"), [("dropmatch-expected", True), ("head+expected-head", False)])
def test_a_server_measures_auto_as_the_engine_does(
    rule: str, is_expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def choose(*args: object, expected: bool) -> SimpleNamespace:
        seen.append(expected)
        return SimpleNamespace(p_drop=0.1)

    monkeypatch.setattr("dropmatch.vllm.hook.choose_p_drop", choose)
    config = PluginConfig(rule=rule, p_drop="auto")
    hook = Hook(config, hidden_size=24, dtype=torch.float32, device=torch.device("cpu"))
    hook.activate(_llm(TARGET.head.weight, TARGET.head.weight))
    hook.captured = [TARGET.table[:5]]
    assert hook.settle() == 0.1
    assert seen == [is_expected]


def test_a_servers_head_chance_is_checked_whatever_its_rule() -> None:
    """0 used to be allowed as "off" until a request asked for the rule, and was then called the request's mistake."""
    for value in (0, 1.5, True):
        with pytest.raises(ConfigError, match=r"head_chance=.*Give a number in \(0, 1\]"):
            parse_config({"head_chance": value})
