"""The Auto-Judge rule: what it keeps, what it reads, and that asking late decides as asking everything at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core import head as head_module
from dropmatch.core.acceptance import AnyOf, JSDivergence, Judge, MajorityMatch, RuleOptions, TargetMatch, make_rule
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.flat import FlatJudge
from dropmatch.core.head import MCDropoutHead
from dropmatch.core.interfaces import DraftTree
from dropmatch.core.judge import JudgeHead, judge_features
from dropmatch.core.needs import Need
from dropmatch.core.reasons import Reason
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.drafters.ngram import NgramDrafter
from dropmatch.errors import ConfigError, ShapeError
from scripted import ScriptedModel
from toys import GENTLE, Result, TreeDrafter, judge_head, make_row, run, run_one, verify

V, D = 16, 24
PROMPTS = [[1, 2, 3], [4], [5, 6], [9, 8, 7, 6]]
BUSHY = (-1, 0, 0, 1, 1, 2, 3, 6)
FLOAT32 = 1e-5


def _target() -> ScriptedModel:
    return ScriptedModel(V, D, seed=0)


def _drafter(noise: float = 1.2) -> DraftModelDrafter:
    return DraftModelDrafter(ScriptedModel(V, D, seed=0, noise=noise), V)


def _decode(
    rule: object, prompts: Sequence[Sequence[int]], *, window: int = 8, count: int = 40, drafter: object = None
) -> list[Result]:
    engine = SpeculativeEngine(
        _target(), drafter or _drafter(), rule=rule, dropout=GENTLE, config=EngineConfig(draft_length=window)
    )
    return run(engine, prompts, SamplingParams(max_new_tokens=count))


def _chain(prompts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]]) -> DraftTree:
    tokens = torch.tensor([[prompt[-1], *draft] for prompt, draft in zip(prompts, drafts, strict=True)])
    return DraftTree.chain(tokens, torch.full((len(prompts),), tokens.shape[1]))


# --- the head ---


def test_the_probability_is_the_logistic_function_of_scaled_features() -> None:
    head = JudgeHead(
        mean=torch.tensor([1.0, 0.0]), scale=torch.tensor([2.0, 1.0]), weight=torch.tensor([1.0, -0.5]), bias=0.25
    )
    # (5 - 1) / 2 * 1 + (3 - 0) / 1 * -0.5 + 0.25 = 0.75, and 0 * 1 + 0 * -0.5 + 0.25 = 0.25
    p = head.probability(torch.tensor([[5.0, 3.0], [1.0, 0.0]]))
    assert p.tolist() == pytest.approx([1 / (1 + 2.718281828**-0.75), 1 / (1 + 2.718281828**-0.25)])


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(0.3, 0.3), (1.5, 1.5), ("q0", 0.1), ("q1", 0.9), ("q0.5", 0.2), ("q0.25", 0.15), ("q.75", 0.55)],
)
def test_a_threshold_is_a_number_or_a_quantile(wanted: float | str, expected: float) -> None:
    head = dataclasses.replace(judge_head(3), thresholds=(0.1, 0.2, 0.9))
    assert head.threshold(wanted) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": "TD"}, "features='TD'"),
        ({"mean": torch.zeros(4)}, r"'mean' has shape \[4\] beside 3 weights"),
        ({"scale": torch.ones(3, 1)}, r"'scale' has shape \[3, 1\]"),
        ({"weight": torch.tensor([1.0, float("nan"), 0.0])}, "'weight' holds numbers that are not finite"),
        ({"mean": torch.tensor([1.0, float("inf"), 0.0])}, "'mean' holds numbers that are not finite"),
        ({"scale": torch.tensor([1.0, 0.0, 1.0])}, "'scale' holds numbers that are not positive"),
        ({"bias": float("nan")}, "'bias' is nan"),
        ({"draft_size": 1}, "'draft_size' is 1, which does not fit DT"),
        ({"features": "DD-DT"}, "'draft_size' is 0, which does not fit DD-DT"),
        ({"features": "DD-DT", "draft_size": 3}, "'draft_size' is 3"),
        ({"thresholds": (0.2, 0.1)}, "'thresholds'"),
        ({"thresholds": (0.2, float("nan"))}, "'thresholds'"),
        ({"thresholds": (0.2, 1.1)}, "'thresholds'"),
    ],
)
def test_a_head_that_makes_no_sense_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(judge_head(3), **change)


# --- the rule by name ---


def test_the_rule_takes_its_options_from_the_name_and_its_head_from_the_options() -> None:
    options = RuleOptions(judge=judge_head(D))
    assert make_rule("judge", options) == Judge(options.judge, "q0.2")
    assert make_rule("judge(threshold=0.014)", options) == Judge(options.judge, 0.014)
    assert make_rule("judge(threshold=q0.44, veto=3)", options) == Judge(options.judge, "q0.44", 3)
    joined = AnyOf((TargetMatch(), JSDivergence(), MajorityMatch(), Judge(options.judge, 0.1)))
    assert make_rule("dropmatch+judge(threshold=0.1)", options) == joined


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("judge(threshold=-0.1)", "a number of at least 0, or a quantile"),
        ("judge(threshold=q1.2)", "a quantile from q0 to q1"),
        ("judge(threshold=qx)", "a quantile from q0 to q1"),
        ("judge(threshold=nan)", "a number of at least 0"),
        ("judge(threshold=inf)", "a number of at least 0"),
        ("judge(threshold=high)", "a number of at least 0"),
        ("judge(veto=-1)", "a whole number of at least 0"),
        ("judge(treshold=0.1)", "Did you mean 'threshold'"),
        ("judge(0.1)", "Unknown option"),
        ("lossless+judge", "joins 'lossless'"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rule(name, RuleOptions(judge=judge_head(D)))


@pytest.mark.parametrize("options", [{"threshold": -1.0}, {"threshold": "0.2"}, {"threshold": True}, {"veto": -1}])
def test_the_rule_as_an_object_checks_its_options_too(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="is not allowed"):
        Judge(judge_head(D), **options)


def test_a_rule_without_a_head_says_where_heads_come_from() -> None:
    with pytest.raises(ConfigError, match=r"needs a trained head.*--judge.*dropmatch train judge"):
        make_rule("dropmatch+judge")


def test_a_quantile_of_a_head_without_thresholds_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"'toy' has no thresholds.*'q0.2'.*Give a number"):
        Judge(dataclasses.replace(judge_head(D), thresholds=()))


# --- what it reads ---


def test_features_are_the_clean_states_behind_the_drafted_tokens_themselves() -> None:
    drafts = [[7, 3, 9], [2, 2, 5], [0, 1, 2], [8, 8, 8]]
    v = verify(_target(), [make_row(prompt) for prompt in PROMPTS], _chain(PROMPTS, drafts))
    b, n = torch.tensor([0, 1, 3]), torch.tensor([1, 3, 2])
    expected = [_target().state([*PROMPTS[i], *drafts[i][:k]]) for i, k in [(0, 1), (1, 3), (3, 2)]]
    head = judge_head(D)
    before = judge_features(v, b, n, head)
    v.ensemble(v.tree.valid & (v.tree.parents >= 0))  # the dropout heads leave the states as they were
    assert torch.equal(judge_features(v, b, n, head), torch.stack(expected))
    assert torch.equal(before, judge_features(v, b, n, head))


def test_on_a_tree_each_node_is_judged_on_its_own_path() -> None:
    head, prompt = judge_head(D), PROMPTS[0]
    rule = Judge(head, 0.5)
    tree = TreeDrafter(ScriptedModel(V, D, seed=5), BUSHY).propose([make_row(prompt)], [9])
    v = verify(_target(), [make_row(prompt)], tree)
    codes = rule.judge(v, tree.valid & (tree.parents >= 0))
    for node in range(1, len(BUSHY)):
        path, at = [], node
        while at > 0:
            path.insert(0, int(tree.tokens[0, at]))
            at = BUSHY[at]
        state = _target().state([*prompt, *path])
        is_own = int(_target().head(_target().state([*prompt, *path[:-1]])).argmax()) == path[-1]
        keeps = bool(head.probability(state[None]) < 0.5)
        expected = Reason.EXACT if is_own else Reason.JUDGE if keeps else Reason.REJECTED
        assert int(codes[0, node]) == expected
    assert len(set(codes[0, 1:].tolist())) > 1


def test_the_draft_states_are_the_drafters_own_behind_every_drafted_token() -> None:
    """The last token too, which drafting alone never runs; rows with shorter drafts among longer ones."""
    drafter = _drafter()
    rule = Judge(judge_head(2 * D, draft_size=D))
    rows = [dataclasses.replace(make_row(prompt), rule=rule) for prompt in PROMPTS]
    drafter.add_rows(rows, None)
    limits = [5, 1, 3, 5]
    tree = drafter.propose(rows, limits)
    assert tree.draft_hidden is not None
    for b, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True)):
        for n in range(limit + 1):
            state = drafter.model.state([*prompt, *tree.tokens[b, 1 : n + 1].tolist()])
            assert torch.equal(tree.draft_hidden[b, n], state)


def test_draft_states_cost_nothing_where_no_rule_reads_them() -> None:
    forwards = {}
    for name, head in {"DT": judge_head(D), "DD-DT": judge_head(2 * D, draft_size=D)}.items():
        drafter = _drafter()
        _decode(Judge(head, 0.0), [PROMPTS[0]], drafter=drafter, window=4, count=20)
        forwards[name] = drafter.model.forwards
    rounds = sum(len(r.chunks) for r in _decode(Judge(judge_head(D), 0.0), [PROMPTS[0]], window=4, count=20))
    assert forwards["DT"] < forwards["DD-DT"] <= forwards["DT"] + rounds


def test_a_judge_on_both_states_equals_scoring_by_hand() -> None:
    head = judge_head(2 * D, draft_size=D, seed=3)
    assert make_rule("judge", RuleOptions(judge=head)).needs == {Need.TARGET_HIDDEN, Need.DRAFT_HIDDEN}
    (result,) = _decode(Judge(head, 0.5), [PROMPTS[2]], window=5, count=60)
    target, draft = _target(), _drafter().model
    judged = [i for i, reason in enumerate(result.reasons) if reason is Reason.JUDGE]
    assert judged
    for i in judged:
        prefix = [*PROMPTS[2], *result.tokens[: i + 1]]
        assert head.probability(torch.cat([draft.state(prefix), target.state(prefix)])[None]) < 0.5


def test_a_judge_on_draft_states_refuses_a_drafter_without_any() -> None:
    rule = Judge(judge_head(2 * D, draft_size=D), 0.5)
    drafter = NgramDrafter(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"reads the draft model's hidden states \(DD-DT\).*--features DT"):
        _decode(rule, [[1, 2, 1, 2, 1]], drafter=drafter, count=60)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (judge_head(D + 1), "states of 25 numbers of its target, and this target gives 24"),
        (judge_head(2 * D, draft_size=D - 1), "states of 23 numbers of its draft model, and this draft model gives 24"),
    ],
)
def test_a_judge_of_another_pair_is_refused_by_size(head: JudgeHead, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        _decode(Judge(head, 0.5), PROMPTS)


@pytest.mark.parametrize("name", ["judge", "dropmatch+judge"])
def test_flat_rows_which_lack_those_states_refuse_the_judge(name: str) -> None:
    rule = make_rule(name, RuleOptions(judge=judge_head(D), guard_prob=0.1))
    with pytest.raises(ConfigError, match=r"hidden states behind the drafted tokens.*own engine"):
        FlatJudge(rule, MCDropoutHead(_target().head, GENTLE), memory_bytes=1 << 20, ask="all")


# --- what it keeps ---


def test_threshold_zero_is_lossless_and_above_one_keeps_every_draft() -> None:
    strict, loose = Judge(judge_head(D), 0.0), Judge(judge_head(D), 1.01)
    for prompt, a, b in zip(PROMPTS, _decode(strict, PROMPTS), _decode(loose, PROMPTS), strict=True):
        assert a.tokens == _target().greedy(prompt, 40)
        assert set(a.reasons) <= {Reason.EXACT, Reason.BONUS, Reason.RECOVERED}
        assert b.stats.accepted == b.stats.drafted
        assert Reason.RECOVERED not in b.reasons
        assert Reason.JUDGE in b.reasons


def test_a_higher_threshold_keeps_no_less_of_the_same_draft() -> None:
    tree = _chain(PROMPTS, [[7, 3, 9, 1], [2, 2, 5, 4], [0, 1, 2, 3], [8, 8, 8, 8]])
    v = verify(_target(), [make_row(prompt) for prompt in PROMPTS], tree)
    ask = tree.valid & (tree.parents >= 0)
    kept = [Judge(judge_head(D), theta).judge(v, ask) > 0 for theta in (0.0, 0.3, 0.5, 0.7, 1.1)]
    for fewer, more in itertools.pairwise(kept):
        assert bool((fewer <= more).all())
    assert 0 < int(kept[2].sum()) < int(kept[-1].sum()) == int(ask.sum())


def test_states_that_are_not_numbers_are_never_kept() -> None:
    v = verify(_target(), [make_row(PROMPTS[0])], _chain(PROMPTS[:1], [[7, 3]]))
    v.hidden[0, 1:] = float("nan")
    codes = Judge(judge_head(D), 1.1).judge(v, torch.tensor([[False, True, True]]))
    assert not (codes == int(Reason.JUDGE)).any()


@pytest.mark.parametrize("window", [1, 2, 16, 32, 64])
def test_any_window_decodes_what_its_rule_says(window: int) -> None:
    """At threshold 0 the text is the target's own whatever the window; the last rounds draft less than the window."""
    for result, prompt in zip(_decode(Judge(judge_head(D), 0.0), PROMPTS, window=window), PROMPTS, strict=True):
        assert result.tokens == _target().greedy(prompt, 40)
    for result in _decode(Judge(judge_head(D), 1.01), PROMPTS, window=window):
        assert len(result.tokens) == 40
        assert len(result.stats.drafted_at) == min(window, 39)
        # the last round drafts one token less than is left, since a round yields one more than it keeps
        assert result.stats.rounds == -(-40 // (min(window, 39) + 1))


def test_every_token_carries_its_reason() -> None:
    (result,) = _decode(make_rule("dropmatch+judge(threshold=0.5)", RuleOptions(judge=judge_head(D))), [PROMPTS[1]])
    assert {Reason.EXACT, Reason.JUDGE} <= set(result.reasons)
    assert {Reason.JS, Reason.MAJORITY} & set(result.reasons)
    for i, reason in enumerate(result.reasons):
        prefix = [*PROMPTS[1], *result.tokens[:i]]
        own = int(_target().head(_target().state(prefix)).argmax())
        if reason in (Reason.EXACT, Reason.BONUS, Reason.RECOVERED):
            assert result.tokens[i] == own
        else:
            assert result.tokens[i] != own
    judged = {token.index for token in result.stats.lossy if token.reason is Reason.JUDGE}
    assert judged == {i for i, reason in enumerate(result.reasons) if reason is Reason.JUDGE}


COMPOSITIONS = ["judge(threshold=0.5)", "dropmatch+judge(threshold=0.5)", "dropmatch+judge(threshold=0.6, veto=2)"]
COMPOSITIONS += ["judge(threshold=0.5)+dropmatch", "dropmatch-paper+judge(threshold=0.5)"]


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_asking_late_decides_as_asking_everything_at_once(name: str, temperature: float) -> None:
    """The parts of a join are asked about what is still open; here each is asked about every token instead."""
    rule = make_rule(name, RuleOptions(judge=judge_head(D)))
    params = SamplingParams(temperature=temperature, seed=3)
    prompts = [[i, (i * 7) % V, 3] for i in range(V)]
    drafter = _drafter()
    rows = [dataclasses.replace(make_row(prompt, params), rule=rule) for prompt in prompts]
    drafter.add_rows(rows, None)
    tree = drafter.propose(rows, [8] * len(rows))
    ask = tree.valid & (tree.parents >= 0)
    lazy = rule.judge(verify(_target(), rows, tree), ask)
    eager = torch.zeros_like(lazy)
    for part in rule.rules if isinstance(rule, AnyOf) else (rule,):
        codes = part.judge(verify(_target(), rows, tree), ask)
        eager = torch.where(eager > 0, eager, codes)
    assert torch.equal(lazy, eager)
    assert int(Reason.JUDGE) in lazy
    assert int(Reason.REJECTED) in lazy[ask]


def test_dropmatch_is_not_asked_where_the_judge_came_first_and_kept() -> None:
    rows = [make_row(prompt) for prompt in PROMPTS]
    drafter = _drafter()
    drafter.add_rows(rows, None)
    tree = drafter.propose(rows, [8] * len(rows))
    ask = tree.valid & (tree.parents >= 0)
    asked = {}
    for name in ("dropmatch+judge(threshold=0.5)", "judge(threshold=0.5)+dropmatch"):
        v = verify(_target(), rows, tree)
        codes = make_rule(name, RuleOptions(judge=judge_head(D))).judge(v, ask)
        asked[name] = (v.head.rows_asked, (codes > 0).tolist())
    (late, kept), (early, same) = asked.values()
    assert kept == same
    assert early < late


def test_the_union_keeps_what_either_part_keeps() -> None:
    rows = [make_row(prompt) for prompt in PROMPTS]
    drafter = _drafter()
    drafter.add_rows(rows, None)
    tree = drafter.propose(rows, [8] * len(rows))
    ask = tree.valid & (tree.parents >= 0)
    options = RuleOptions(judge=judge_head(D))
    names = ("dropmatch", "judge(threshold=0.5)", "dropmatch+judge(threshold=0.5)")
    a, b, both = (make_rule(name, options).judge(verify(_target(), rows, tree), ask) > 0 for name in names)
    assert torch.equal(both, a | b)
    assert bool((both & ~a).any())
    assert bool((both & ~b).any())


def test_the_veto_drops_exactly_the_judged_tokens_that_the_centroid_ranks_low(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [make_row(prompt) for prompt in PROMPTS]
    drafter = _drafter()
    drafter.add_rows(rows, None)
    tree = drafter.propose(rows, [8] * len(rows))
    ask = tree.valid & (tree.parents >= 0)
    v = verify(_target(), rows, tree)
    free = Judge(judge_head(D), 0.6).judge(v, ask)
    vetoed = Judge(judge_head(D), 0.6, veto=2).judge(v, ask)
    dropped = 0
    for b, n in (free == int(Reason.JUDGE)).nonzero().tolist():
        parent = torch.tensor([n - 1])
        row = verify(_target(), [rows[b]], _chain([PROMPTS[b]], [tree.tokens[b, 1:].tolist()]))
        centroid = row.correction_logits(parent, "centroid")[0]
        best = centroid.topk(2).indices.tolist()
        assert (int(vetoed[b, n]) == Reason.JUDGE) == (int(tree.tokens[b, n]) in best)
        dropped += int(vetoed[b, n]) == 0
    assert dropped
    assert torch.equal(free == int(Reason.EXACT), vetoed == int(Reason.EXACT))
    assert torch.equal(Judge(judge_head(D), 0.6, veto=V).judge(v, ask), free)
    monkeypatch.setattr(head_module, "_BYTES_CAP", 1)  # one position at a time
    assert torch.equal(Judge(judge_head(D), 0.6, veto=2).judge(v, ask), vetoed)


@pytest.mark.parametrize("head", [judge_head(D), judge_head(2 * D, draft_size=D)], ids=["DT", "DD-DT"])
def test_a_row_does_not_depend_on_its_batch_mates(head: JudgeHead) -> None:
    rule = make_rule("dropmatch+judge(threshold=0.5)", RuleOptions(judge=head))
    together = _decode(rule, PROMPTS, window=6)
    for prompt, result in zip(PROMPTS, together, strict=True):
        (alone,) = _decode(rule, [prompt], window=6)
        assert alone.tokens == result.tokens
        assert alone.reasons == result.reasons


def test_rows_of_one_batch_may_have_different_judges() -> None:
    rules = [
        Judge(judge_head(D), 0.5),
        Judge(judge_head(2 * D, draft_size=D), 0.5),
        TargetMatch(),
        Judge(judge_head(D), 2.0),
    ]
    engine = SpeculativeEngine(_target(), _drafter(), dropout=GENTLE, config=EngineConfig(draft_length=5))
    mixed = run(engine, PROMPTS, [SamplingParams(max_new_tokens=30, rule=rule) for rule in rules])
    for prompt, rule, result in zip(PROMPTS, rules, mixed, strict=True):
        alone = run_one(
            _target(),
            _drafter(),
            prompt,
            SamplingParams(max_new_tokens=30),
            rule=rule,
            config=EngineConfig(draft_length=5),
        )
        assert alone.tokens == result.tokens


def test_without_dropout_the_union_is_the_judge_alone_wherever_js_keeps_nothing_more() -> None:
    """p_drop=0: the radius is zero and the majority is the target's own token, so only the judge adds to exact."""
    options = RuleOptions(judge=judge_head(D))
    results = []
    for name in ("judge(threshold=0.5)", "dropmatch+judge(threshold=0.5)"):
        engine = SpeculativeEngine(
            _target(), _drafter(), rule=make_rule(name, options), dropout=DropoutConfig(p_drop=0.0)
        )
        results.append([r.tokens for r in run(engine, PROMPTS, SamplingParams(max_new_tokens=40))])
    assert results[0] == results[1]
