"""What each drafter proposes, and that its own cache follows the verdicts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmatch.config import EngineConfig, SamplingParams
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.interfaces import DraftTree
from dropmatch.core.reasons import Reason
from dropmatch.core.sequence import Row
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.drafters.ngram import NgramDrafter
from dropmatch.drafters.random_tokens import RandomDrafter
from dropmatch.errors import ConfigError
from scripted import ScriptedModel
from toys import GENTLE, MarkovModel, make_row, run, run_one

CPU = torch.device("cpu")


def _propose_ngrams(drafter: NgramDrafter, ids: Sequence[int], limit: int = 5) -> list[int]:
    row = make_row(ids)
    drafter.add_rows([row], None)
    tree = drafter.propose([row], [limit])
    drafter.filter([])
    return tree.tokens[0, 1:][tree.valid[0, 1:]].tolist()


@pytest.mark.parametrize(
    ("ids", "limit", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, [4, 1]),  # the suffix 1 2 3 was followed by 4 1
        ([1, 2, 3, 4, 1, 2, 3], 9, [4, 1, 2, 3]),  # no further than the row goes
        ([9, 2, 3, 7, 5, 2, 3, 8, 2, 3], 1, [8]),  # the latest of two occurrences
        ([1, 2, 3, 5, 9, 2, 3, 6, 1, 2, 3], 1, [5]),  # a longer match wins over a later one
        ([1, 2, 3, 4], 5, []),
        ([7], 5, []),
        ([7, 7], 5, [7]),
        ([1, 2, 1], 0, []),
    ],
)
def test_ngram_drafts_what_followed_the_longest_suffix(ids: list[int], limit: int, expected: list[int]) -> None:
    assert _propose_ngrams(NgramDrafter(CPU), ids, limit) == expected


def test_ngram_sizes_are_respected() -> None:
    ids = [1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3]
    assert _propose_ngrams(NgramDrafter(CPU, max_ngram=1, min_ngram=1), ids, 1) == [8]
    assert _propose_ngrams(NgramDrafter(CPU, max_ngram=3, min_ngram=3), ids, 1) == [9]
    assert _propose_ngrams(NgramDrafter(CPU, max_ngram=4, min_ngram=4), ids, 1) == []


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(1, 2), (3, 0), (0, 0)])
def test_ngram_refuses_impossible_sizes(max_ngram: int, min_ngram: int) -> None:
    with pytest.raises(ConfigError, match="1 <= min_ngram <= max_ngram"):
        NgramDrafter(CPU, max_ngram=max_ngram, min_ngram=min_ngram)


def _slow_ngram(ids: list[int], limit: int) -> list[int]:
    for size in (3, 2, 1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:] and size < len(ids):
                return ids[end : end + limit]
    return []


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(0, 5))
def test_ngram_index_of_a_growing_row_equals_a_search(bursts: list[list[int]], limit: int) -> None:
    drafter, row = NgramDrafter(CPU), make_row([0])
    row.ids = []
    drafter.add_rows([row], None)
    for burst in bursts:
        row.ids += burst
        tree = drafter.propose([row], [limit])
        assert tree.tokens[0, 1:][tree.valid[0, 1:]].tolist() == _slow_ngram(row.ids, limit)


def test_ngram_rows_keep_their_own_index_when_others_leave() -> None:
    drafter = NgramDrafter(CPU)
    rows = [make_row([1, 2, 1]), make_row([5, 6, 5])]
    drafter.add_rows(rows, None)
    drafter.propose(rows, [2, 2])
    drafter.filter([1])
    assert drafter.propose(rows[1:], [2]).tokens.tolist() == [[5, 6, 5]]


def test_ngram_repeats_are_kept_and_counted_as_point_masses() -> None:
    """A target that cycles: the n-gram drafter finds the cycle, and Eq. 6 sees a point mass."""
    V = 6
    probs = torch.full((V, V), 1e-4)
    probs[torch.arange(V), (torch.arange(V) + 1) % V] = 1.0
    target = MarkovModel.from_probs(probs / probs.sum(-1, keepdim=True))
    result = run_one(target, NgramDrafter(CPU), [0], SamplingParams(max_new_tokens=40), rule="exact")
    assert result.tokens == [(i + 1) % V for i in range(40)]
    assert result.stats.tau > 3


class _Spy(DraftModelDrafter):
    """Keeps what was proposed."""

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        tree = super().propose(rows, max_new)
        self.seen = getattr(self, "seen", [])
        self.seen.append(([list(row.ids) for row in rows], tree, list(max_new)))
        return tree


@pytest.mark.parametrize("rule", ["exact", "dropmatch", "dropmatch-naive"])
def test_draft_model_proposes_its_own_greedy_continuation_after_every_verdict(rule: str) -> None:
    """Its state hashes the whole prefix, so a stale or missing cache entry would change the next draft."""
    target, draft = ScriptedModel(seed=4), ScriptedModel(seed=4, noise=0.7)
    drafter = _Spy(draft, 16)
    engine = SpeculativeEngine(target, drafter, rule=rule, dropout=GENTLE, config=EngineConfig(max_batch=3))
    params = [SamplingParams(max_new_tokens=n, draft_length=L, seed=n) for n, L in ((30, 5), (9, 1), (17, 3), (25, 0))]
    run(engine, [[1, 2], [3], [4, 5, 6], [7, 8]], params)
    oracle = ScriptedModel(seed=4, noise=0.7)
    for prefixes, tree, max_new in drafter.seen:
        for b, ids in enumerate(prefixes):
            assert int(tree.tokens[b, 0]) == ids[-1]
            assert int(tree.valid[b].sum()) == max_new[b] + 1
            drafted = tree.tokens[b, 1 : 1 + max_new[b]].tolist()
            assert drafted == oracle.greedy(ids, max_new[b])
            for n, prefix_end in enumerate(range(max_new[b])):
                state = oracle.state([*ids, *drafted[:prefix_end]])
                assert torch.allclose(tree.child_logits[b, n], oracle.head(state), atol=1e-5)


def test_draft_cache_never_holds_rejected_tokens() -> None:
    target, draft = ScriptedModel(seed=4), ScriptedModel(seed=9)
    drafter = DraftModelDrafter(draft, 16)
    engine = SpeculativeEngine(target, drafter, rule="exact", dropout=GENTLE)
    request = engine.add([1, 2, 3], SamplingParams(max_new_tokens=20))
    ids = [1, 2, 3]
    while engine.has_work:
        for chunk in engine.step():
            assert chunk.request == request
            ids += chunk.tokens
        for row in draft.rows:
            assert row == ids[: len(row)]
            assert len(row) < len(ids)
    assert draft.rows == []


def test_a_row_that_joins_in_a_round_without_drafts_survives_another_rows_end() -> None:
    """The drafter's own lengths once covered only the rows of its last proposal, so that filtering to a row admitted
    in a round that drafts nothing was an index past their end."""
    target, draft = ScriptedModel(seed=4), ScriptedModel(seed=4)
    engine = SpeculativeEngine(target, DraftModelDrafter(draft, 16), rule="exact")
    engine.add([1, 2], SamplingParams(max_new_tokens=3, draft_length=1))
    (chunk,) = engine.step()
    assert len(chunk.tokens) == 2  # so that the next round has no room for a draft
    late = engine.add([3, 4], SamplingParams(max_new_tokens=4, draft_length=0))
    tokens = [token for chunk in engine.run() if chunk.request == late for token in chunk.tokens]
    assert tokens == ScriptedModel(seed=4).greedy([3, 4], 4)


@pytest.mark.parametrize(("draft_size", "target_size"), [(12, 16), (16, 12)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_vocabularies_of_different_size_work_both_ways(draft_size: int, target_size: int, temperature: float) -> None:
    """Padded vocabularies: ids that only one side has are never drafted, and have no probability in Eq. 6."""
    target, draft = ScriptedModel(target_size, seed=4), ScriptedModel(draft_size, seed=4)
    drafter = _Spy(draft, target_size)
    params = SamplingParams(max_new_tokens=40, temperature=temperature)
    plain = run_one(ScriptedModel(target_size, seed=4), None, [1, 2], params)
    result = run_one(target, drafter, [1, 2], params, rule="exact")
    assert result.tokens == plain.tokens
    if target_size > draft_size and temperature > 0:
        assert max(plain.tokens) >= draft_size  # the target did use ids that the drafter lacks
    for _, tree, max_new in drafter.seen:
        assert tree.child_logits.shape[-1] == target_size
        assert int(tree.tokens[:, 1 : 1 + max_new[0]].max()) < min(draft_size, target_size)
        if draft_size < target_size:
            assert bool((tree.child_logits[:, :-1, draft_size:] == float("-inf")).all())
    lossy = run_one(ScriptedModel(target_size, seed=4), DraftModelDrafter(draft, target_size), [1, 2], params)
    assert len(lossy.tokens) == 40


def test_random_drafts_are_keyed_and_spread() -> None:
    drafter = RandomDrafter(CPU, 50)
    rows = [make_row([1, 2], SamplingParams(seed=3)), make_row([1, 2], SamplingParams(seed=4))]
    both = drafter.propose(rows, [4, 2])
    alone = drafter.propose(rows[1:], [2])
    assert both.tokens[1, 1:3].tolist() == alone.tokens[0, 1:].tolist()
    assert both.valid.sum(-1).tolist() == [5, 3]
    assert torch.equal(both.child_logits[:, :-1].argmax(-1), both.tokens[:, 1:])
    assert len(set(both.tokens[0, 1:].tolist())) > 1
    assert int(both.tokens.min()) >= 0
    assert int(both.tokens.max()) < 50


def test_random_drafts_leave_the_exact_rule_lossless() -> None:
    target = ScriptedModel(seed=4)
    for with_distribution in (True, False):
        drafter = RandomDrafter(CPU, 16, with_distribution=with_distribution)
        result = run_one(ScriptedModel(seed=4), drafter, [1, 2], SamplingParams(max_new_tokens=30), rule="exact")
        assert result.tokens == target.greedy([1, 2], 30)
        assert set(result.reasons) <= {Reason.EXACT, Reason.RECOVERED, Reason.BONUS}


@pytest.mark.parametrize("min_confidence", [0.3, 0.6, 0.95])
def test_an_unsure_draft_ends_early_and_changes_no_lossless_output(min_confidence: float) -> None:
    prompts = [(1, 2, 3), (4,)]
    target = ScriptedModel()
    drafter = DraftModelDrafter(ScriptedModel(noise=0.5), 16, min_confidence=min_confidence)
    engine = SpeculativeEngine(target, drafter, rule="exact", config=EngineConfig(draft_length=8))
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_new_tokens=40))
    produced: dict[int, list[int]] = {0: [], 1: []}
    for chunk in engine.run():
        produced[chunk.request] += chunk.tokens
    assert produced == {i: target.greedy(prompt, 40) for i, prompt in enumerate(prompts)}
    full = engine.stats.requests.rounds * 8
    assert engine.stats.requests.drafted < 0.8 * full


def test_a_draft_ends_behind_the_first_unsure_token() -> None:
    drafter = DraftModelDrafter(ScriptedModel(), 16, min_confidence=0.6)
    row = make_row([1, 2, 3])
    drafter.add_rows([row], None)
    tree = drafter.propose([row], [8])
    num_drafted = int(tree.valid.sum()) - 1
    assert tree.child_logits is not None
    probs = tree.child_logits[0].softmax(-1)
    confidence = [float(probs[n, tree.tokens[0, n + 1]]) for n in range(num_drafted)]
    assert min(confidence[:-1], default=1.0) >= 0.6
    assert num_drafted == 8 or confidence[-1] < 0.6


def test_a_confidence_outside_zero_to_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="out of range"):
        DraftModelDrafter(ScriptedModel(), 16, min_confidence=1.5)
