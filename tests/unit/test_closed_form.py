"""The closed form of dropout on a linear head, and the rules that use it: exact small cases, knobs, refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.acceptance import AcceptanceRule, AnyOf, Guard, RuleOptions, TargetMatch, make_rule
from dropmatch.core.closed_form import ExpectedHead, ExpectedJS, ExpectedMajority, radius
from dropmatch.core.engine import SpeculativeEngine
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
from scripted import ScriptedModel, TableHead
from toys import GENTLE, TreeDrafter, make_row, run, verify

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


@pytest.mark.parametrize("chance", [0.0, -0.1, 1.1, float("nan")])
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
    ):
        assert torch.equal(_codes(make_rule(name), other()), codes)
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
