"""From single decisions to the kept path, the token after it, and the reasons: against a brute-force reading."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmatch.config import DropoutConfig, SamplingParams
from dropmatch.core.acceptance import HeadMatch, RejectionSampling, TargetMatch, make_rule
from dropmatch.core.interfaces import DraftTree, Verdict
from dropmatch.core.reasons import Reason
from dropmatch.core.verification import Verification
from dropmatch.core.verify import decide, emitted_reasons, judge
from scripted import ScriptedModel
from toys import GENTLE, make_row, verify

V = 6
TARGET = ScriptedModel(V, 12, seed=3)
PROPERTY = settings(deadline=None, derandomize=True, max_examples=120)
FLOAT32 = 1e-5


@st.composite
def judged_trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[bool], list[int]]:
    """Parents, tokens, validity (children of padding are padding) and codes."""
    N = draw(st.integers(1, 9))
    parents = [-1] + [draw(st.integers(0, n - 1)) for n in range(1, N)]
    tokens = [draw(st.integers(0, V - 1)) for _ in range(N)]
    valid = [True] * N
    for n in range(1, N):
        valid[n] = valid[parents[n]] and draw(st.sampled_from([True, True, True, False]))
    codes = [0] + [draw(st.sampled_from([0, 1, 3, 4])) for _ in range(1, N)]
    return parents, tokens, valid, codes


def _path(parents: list[int], node: int) -> list[int]:
    return ([] if parents[node] < 0 else _path(parents, parents[node])) + [node]


def _best_path(v: Verification, valid: list[bool], codes: list[int]) -> list[int]:
    """The documented choice: depth first, then node by node from the root: exact, votes, probability, lower index."""
    parents = v.tree.parents[0].tolist()
    probs = v.target_logits[0].softmax(-1)
    votes = v.seen.votes[0].tolist() if v.seen is not None else [0] * len(parents)
    plain = v.target_logits[0].argmax(-1).tolist()

    def key(path: list[int]) -> tuple[object, ...]:
        steps = []
        for n in path[1:]:
            parent, token = parents[n], int(v.tree.tokens[0, n])
            steps.append((token == plain[parent], votes[n], round(float(probs[parent, token]), 6), -n))
        return (len(path), steps)

    kept = [
        path
        for path in (_path(parents, n) for n in range(len(parents)))
        if all(codes[n] > 0 and valid[n] for n in path[1:])
    ]
    return max(kept, key=key)


@PROPERTY
@given(judged_trees(), st.booleans())
def test_the_longest_kept_path_wins_and_ties_go_as_documented(
    case: tuple[list[int], list[int], list[bool], list[int]], is_asked: bool
) -> None:
    parents, tokens, valid, codes = case
    tree = DraftTree.tree(
        torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([valid]), torch.zeros(1, len(parents), V)
    )
    v = verify(TARGET, [make_row([2, tokens[0]])], tree)
    if is_asked:
        v.ensemble(tree.valid & (tree.depth > 0))
    verdict = decide(v, torch.tensor([codes], dtype=torch.int8), [TargetMatch()])
    expected = _best_path(v, valid, codes)
    got = verdict.path[0, : int(verdict.num_accepted[0]) + 1].tolist()
    assert got == expected
    assert verdict.path[0, len(expected) :].tolist() == []
    assert int(verdict.next_token) == int(v.target_logits[0, expected[-1]].argmax())


@PROPERTY
@given(st.integers(1, 8), st.data())
def test_a_tree_with_one_branch_equals_the_chain(L: int, data: st.DataObject) -> None:
    tokens = torch.tensor([data.draw(st.lists(st.integers(0, V - 1), min_size=L + 1, max_size=L + 1))])
    codes = torch.tensor([[0, *data.draw(st.lists(st.sampled_from([0, 1, 4]), min_size=L, max_size=L))]])
    num_nodes = data.draw(st.integers(1, L + 1))
    logits = torch.randn(1, L + 1, V, generator=torch.Generator().manual_seed(L))
    chain = DraftTree.chain(tokens, torch.tensor([num_nodes]), logits)
    tree = DraftTree.tree(tokens, chain.parents.clone(), chain.valid, logits)
    row = make_row([1, int(tokens[0, 0])])
    rule = make_rule("dropmatch")
    v_chain, v_tree = verify(TARGET, [row], chain), verify(TARGET, [row], tree)
    assert torch.equal(judge(v_chain, [rule]), judge(v_tree, [rule]))
    a, b = (decide(v, codes.to(torch.int8), [rule]) for v in (v_chain, v_tree))
    for name in ("num_accepted", "next_token", "reason"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.path[:, : b.path.shape[1]], b.path)
    assert (a.path[:, b.path.shape[1] :] == b.path[:, -1:]).all()  # a chain's path is as wide as the chain


def test_chain_keeps_the_leading_run_of_accepted_tokens() -> None:
    chain = DraftTree.chain(torch.zeros(3, 5, dtype=torch.int64), torch.tensor([5, 5, 3]))
    codes = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], dtype=torch.int8)
    v = verify(TARGET, [make_row([1, 0])] * 3, chain)
    verdict = decide(v, codes, [TargetMatch()] * 3)
    assert verdict.num_accepted.tolist() == [2, 0, 2]  # the third row drafted two tokens only
    assert verdict.path.tolist() == [[0, 1, 2, 2, 2], [0, 0, 0, 0, 0], [0, 1, 2, 2, 2]]


def test_tie_goes_to_the_targets_own_token_before_votes_and_probability() -> None:
    row = make_row([1, 4])
    best = int(TARGET.head(TARGET.state([1, 4])).argmax())
    others = [t for t in range(V) if t != best]
    tree = DraftTree.tree(torch.tensor([[4, others[0], best, others[1]]]), torch.tensor([[-1, 0, 0, 0]]))
    v = verify(TARGET, [row], tree)
    codes = torch.tensor([[0, 4, 1, 4]], dtype=torch.int8)
    assert decide(v, codes, [TargetMatch()]).path.tolist() == [[0, 2]]


def test_a_deeper_path_beats_the_targets_own_token() -> None:
    row = make_row([1, 4])
    best = int(TARGET.head(TARGET.state([1, 4])).argmax())
    other = (best + 1) % V
    tree = DraftTree.tree(torch.tensor([[4, best, other, 0]]), torch.tensor([[-1, 0, 0, 2]]))
    codes = torch.tensor([[0, 1, 3, 3]], dtype=torch.int8)
    assert decide(verify(TARGET, [row], tree), codes, [TargetMatch()]).path.tolist() == [[0, 2, 3]]


def test_more_votes_win_among_lossy_siblings_and_then_probability() -> None:
    """Two siblings that Eq. 6 keeps, neither the target's own: the one that more heads name is taken."""
    found = False
    for first in range(40):
        row = make_row([first % V, first // V, 2], SamplingParams(seed=first))
        order = TARGET.head(TARGET.state(row.ids)).argsort(descending=True).tolist()
        tree = DraftTree.tree(
            torch.tensor([[2, order[2], order[1]]]), torch.tensor([[-1, 0, 0]]), None, torch.zeros(1, 3, V)
        )
        v = verify(TARGET, [row], tree, DropoutConfig(p_drop=0.3))
        votes = v.ensemble(tree.depth > 0).votes[0].tolist()
        verdict = decide(v, torch.tensor([[0, 3, 3]], dtype=torch.int8), [TargetMatch()])
        expected = 1 if votes[1] > votes[2] else 2  # on equal votes the second-best token, which is node 2
        assert verdict.path.tolist() == [[0, expected]]
        found |= votes[1] > votes[2]
    assert found


def test_the_targets_own_token_wins_even_against_more_votes() -> None:
    """Heavy dropout makes the heads prefer another sibling now and then; the target's own token still comes first."""
    found = 0
    for first in range(60):
        row = make_row([first % V, first // V, 2], SamplingParams(seed=first))
        order = TARGET.head(TARGET.state(row.ids)).argsort(descending=True).tolist()
        tree = DraftTree.tree(
            torch.tensor([[2, order[1], order[0]]]), torch.tensor([[-1, 0, 0]]), None, torch.zeros(1, 3, V)
        )
        v = verify(TARGET, [row], tree, DropoutConfig(p_drop=0.6))
        votes = v.ensemble(tree.depth > 0).votes[0].tolist()
        found += votes[1] > votes[2]
        verdict = decide(v, torch.tensor([[0, 3, 1]], dtype=torch.int8), [TargetMatch()])
        assert verdict.path.tolist() == [[0, 2]]
    assert found > 0


def test_lower_index_wins_when_siblings_repeat_a_token() -> None:
    tree = DraftTree.tree(torch.tensor([[4, 3, 3]]), torch.tensor([[-1, 0, 0]]))
    codes = torch.tensor([[0, 1, 1]], dtype=torch.int8)
    assert decide(verify(TARGET, [make_row([4])], tree), codes, [TargetMatch()]).path.tolist() == [[0, 1]]


@pytest.mark.parametrize(("has_child", "last"), [(True, Reason.RECOVERED), (False, Reason.BONUS)])
def test_emitted_reasons_are_the_path_then_bonus_or_recovered(has_child: bool, last: Reason) -> None:
    verdict = Verdict(
        path=torch.tensor([[0, 2, 3], [0, 0, 0]]),
        num_accepted=torch.tensor([2, 0]),
        next_token=torch.tensor([1, 1]),
        reason=torch.tensor([[0, 0, 3, 1], [0, 0, 0, 0]], dtype=torch.int8),
    )
    codes = emitted_reasons(verdict, torch.tensor([has_child, has_child]))
    assert codes[0].tolist() == [int(Reason.JS), int(Reason.EXACT), int(last)]
    assert codes[1, 0] == int(last)


def _rejected_chain(num: int, dropout: DropoutConfig, params: SamplingParams | None = None) -> Verification:
    """Rows whose one drafted token no head names."""
    prompts = [[b % V, b // V, 3] for b in range(num)]
    tokens = torch.tensor([[3, 0]] * num)
    tree = DraftTree.chain(tokens, torch.full((num,), 2), torch.zeros(num, 2, V))
    rows = [make_row(prompt, params or SamplingParams(seed=b)) for b, prompt in enumerate(prompts)]
    return verify(TARGET, rows, tree, dropout)


@pytest.mark.parametrize("correction", ["centroid", "head1", "mode"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_without_dropout_every_correction_is_the_plain_token(correction: str, temperature: float) -> None:
    params = SamplingParams(seed=5, temperature=temperature)
    v = _rejected_chain(20, DropoutConfig(p_drop=0.0), params)
    codes = torch.zeros(20, 2, dtype=torch.int8)
    verdict = decide(v, codes, [make_rule("dropmatch")] * 20, correction)
    assert torch.equal(verdict.next_token, v.plain_token[:, 0])


def test_corrections_come_from_the_heads_that_they_name() -> None:
    v = _rejected_chain(30, DropoutConfig(p_drop=0.5))
    codes, rules = torch.zeros(30, 2, dtype=torch.int8), [make_rule("dropmatch")] * 30
    keys = torch.tensor([[b, 0, 3] for b in range(30)])  # the token behind three
    logits = v.head.keyed_logits(v.hidden[:, 0], keys)
    heads = v.ensemble(v.tree.depth > 0)
    expected = {
        "centroid": logits.mean(1).argmax(-1),
        "head1": logits[:, 0].argmax(-1),
        "mode": heads.majority[:, 1],
        "plain": v.plain_token[:, 0],
    }
    refused = v.tree.tokens[:, 1]  # must not come back as the correction, unless the target itself says so
    expected = {name: torch.where(token == refused, expected["plain"], token) for name, token in expected.items()}
    got = {name: decide(v, codes, rules, name).next_token for name in expected}
    for name in expected:
        assert torch.equal(got[name], expected[name]), name
    assert not torch.equal(got["head1"], got["plain"])
    assert not torch.equal(got["mode"], got["plain"])


@pytest.mark.parametrize("rule", [TargetMatch(), RejectionSampling()])
def test_lossless_rules_are_never_corrected_by_heads(rule: object) -> None:
    v = _rejected_chain(30, DropoutConfig(p_drop=0.5))
    verdict = decide(v, torch.zeros(30, 2, dtype=torch.int8), [rule] * 30, "head1")
    assert torch.equal(verdict.next_token, v.plain_token[:, 0])


def test_bonus_tokens_are_plain_whatever_the_correction() -> None:
    v = _rejected_chain(30, DropoutConfig(p_drop=0.5))
    kept = torch.tensor([[0, 4]] * 30, dtype=torch.int8)
    verdict = decide(v, kept, [HeadMatch()] * 30, "head1")
    assert torch.equal(verdict.next_token, v.plain_token[:, 1])


@PROPERTY
@given(judged_trees())
def test_dropmatch_never_keeps_less_than_lossless_greedy_on_the_same_tree(
    case: tuple[list[int], list[int], list[bool], list[int]],
) -> None:
    parents, tokens, valid, _ = case
    generator = torch.Generator().manual_seed(len(parents))
    tree = DraftTree.tree(
        torch.tensor([tokens]),
        torch.tensor([parents]),
        torch.tensor([valid]),
        torch.randn(1, len(parents), V, generator=generator),
    )
    row = make_row([2, tokens[0]])
    kept = {}
    for name in ("lossless", "exact", "dropmatch"):
        v, rules = verify(TARGET, [row], tree), [make_rule(name)]
        kept[name] = int(decide(v, judge(v, rules), rules).num_accepted)
    assert kept["dropmatch"] >= kept["lossless"] == kept["exact"]


def test_each_row_gets_the_next_token_of_its_own_rule() -> None:
    """A sampled row under rejection sampling draws from the residual; its neighbours take the target's own draw."""
    params = SamplingParams(temperature=1.0, seed=1)
    rules = [make_rule(name) for name in ("lossless", "exact", "dropmatch-naive")]
    tree = DraftTree.chain(torch.tensor([[3, 0]] * 3), torch.tensor([2] * 3))
    v = verify(TARGET, [make_row([1, 3], params)] * 3, tree, GENTLE)
    verdict = decide(v, torch.zeros(3, 2, dtype=torch.int8), rules)
    assert int(verdict.next_token[0]) != 0  # the refused point mass has nothing left in the residual
    assert torch.equal(verdict.next_token[1:], v.plain_token[1:, 0])


def test_equal_votes_go_to_the_heads_centroid_under_rules_that_ask_the_heads() -> None:
    """Where centroid and target order two siblings differently, each rule's own order holds."""
    rule, found = make_rule("head"), 0
    for first in range(200):
        row = make_row([first % V, first // V, 2], SamplingParams(seed=first))
        order = TARGET.head(TARGET.state(row.ids)).argsort(descending=True).tolist()
        tree = DraftTree.tree(
            torch.tensor([[2, order[1], order[2]]]), torch.tensor([[-1, 0, 0]]), None, torch.zeros(1, 3, V)
        )
        v = verify(TARGET, [row], tree, DropoutConfig(p_drop=0.5))
        heads = v.ensemble(tree.depth > 0)
        if heads.votes[0, 1] != heads.votes[0, 2] or heads.centroid_prob[0, 1] >= heads.centroid_prob[0, 2]:
            continue
        found += 1
        codes = torch.tensor([[0, 5, 5]], dtype=torch.int8)
        assert decide(v, codes, [rule]).path.tolist() == [[0, 2]]
        assert decide(v, codes, [TargetMatch()]).path.tolist() == [[0, 1]]  # its rows know nothing of the heads
    assert found > 3


def test_the_first_drafted_of_the_longest_paths_and_the_greedy_walk_can_be_asked_for() -> None:
    row = make_row([1, 4])
    best = int(TARGET.head(TARGET.state([1, 4])).argmax())
    others = [t for t in range(V) if t != best]
    #    root -> 1 -> 3, root -> 2 (the target's own), root -> 4 -> 5
    tokens = torch.tensor([[4, others[0], best, others[1], others[2], others[3]]])
    tree = DraftTree.tree(tokens, torch.tensor([[-1, 0, 0, 1, 0, 4]]))
    v, rules = verify(TARGET, [row], tree), [TargetMatch()]
    codes = torch.tensor([[0, 3, 3, 3, 3, 3]], dtype=torch.int8)
    assert decide(v, codes, rules, tie_break="first").path.tolist() == [[0, 1, 3]]
    assert decide(v, codes, rules, path_policy="greedy-votes").path.tolist() == [[0, 2]]
    prob = v.target_logits[0, 0].softmax(-1)
    expected = [0, 1, 3] if prob[others[0]] >= prob[others[2]] else [0, 4, 5]
    assert decide(v, codes, rules).path.tolist() == [expected]
