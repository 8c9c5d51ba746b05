"""Drafting with caches, batches and masks against the same trees grown by hand, one row and one path at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import eagle
from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.acceptance import TargetMatch
from dropmatch.core.engine import Round, SpeculativeEngine
from dropmatch.core.interfaces import DraftTree
from dropmatch.core.sequence import Row
from dropmatch.core.verify import decide, judge
from dropmatch.eagle3.drafter import Eagle3Drafter
from dropmatch.eagle3.model import Eagle3Head
from dropmatch.errors import ConfigError
from dropmatch.hf.model import HFModel
from toys import run

CLOSE = 1e-4
"""float32 log-probabilities of about 10, summed in another order."""
PROMPTS = [[5, 9, 100, 31], [7, 250], [3, 3, 8, 120, 44, 9, 17], [60]]


@pytest.fixture(scope="module")
def model() -> Any:
    return eagle.target()


def head_for(model: Any, **changes: Any) -> Eagle3Head:
    return eagle.random_head(model.get_input_embeddings().weight.detach(), **changes)


def tapped(model: Any, head: Eagle3Head) -> HFModel:
    return HFModel(model, tap_layers=head.settings.tap_layers, probe=False)


class Spy(Eagle3Drafter):
    """Keeps what was proposed, and checks the stable cache after each commit."""

    target: HFModel

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        assert self.pairs == [len(row.ids) - 1 for row in rows] == self.target.lengths
        tree = super().propose(rows, max_new)
        assert self.pairs == self.target.lengths
        self.seen = getattr(self, "seen", [])
        self.seen.append(([list(row.ids) for row in rows], tree, list(max_new)))
        return tree


def spied(model: Any, head: Eagle3Head, **options: Any) -> tuple[HFModel, Spy]:
    target, drafter = tapped(model, head), Spy(head, eagle.V, **options)
    drafter.target = target
    return target, drafter


def by_hand(
    model: Any, head: Eagle3Head, ids: list[int], depth: int, k: int, total: int
) -> dict[tuple[int, ...], float]:
    """Paths of the best nodes, {tokens below the root: score}: every output recomputed from the whole sequence."""
    n = len(ids) - 1
    taps = head.settings.tap_layers
    with torch.no_grad():
        states = model(torch.tensor([ids[:n]]), output_hidden_states=True).hidden_states
    fused = head.fuse(torch.cat([states[tap][0] for tap in taps], dim=-1))  # [n, H]

    def outputs(path: tuple[int, ...]) -> Tensor:
        """The output behind the pairs and the tokens of a path, [H]."""
        if path:
            outputs(path[:-1])
        tokens = [*ids[1:], *path]
        features = [*fused, *(head.next_feature(memo[path[:i]]) for i in range(len(path)))]
        N = len(tokens)
        mask = torch.ones(N, N, dtype=torch.bool).tril()
        out = head(
            torch.tensor([tokens]),
            torch.stack(features)[None],
            torch.arange(N)[None],
            lambda layer, q, k, v: torch.nn.functional.scaled_dot_product_attention(
                q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=mask
            ),
        )
        memo[path] = out[0, -1]
        return out[0, -1]

    memo: dict[tuple[int, ...], Tensor] = {}

    def children(path: tuple[int, ...], score: float) -> list[tuple[tuple[int, ...], float]]:
        log_probs = head.logits(outputs(path)).log_softmax(-1)
        best = sorted(range(len(log_probs)), key=lambda d: (-float(log_probs[d]), d))[:k]
        return [((*path, int(head.target_ids[d])), score + float(log_probs[d])) for d in best]

    pool = children((), 0.0)
    frontier = pool
    for _ in range(depth - 1):
        level = [child for path, score in frontier for child in children(path, score)]
        pool = pool + level
        frontier = sorted(level, key=lambda entry: -entry[1])[:k]
    return dict(sorted(pool, key=lambda entry: -entry[1])[: total - 1])


def paths_of(tree: DraftTree, b: int) -> list[tuple[int, ...]]:
    N = tree.tokens.shape[1]
    return [
        tuple(int(tree.tokens[b, m]) for m in range(1, N) if tree.ancestors[b, n, m])
        for n in range(1, N)
        if tree.valid[b, n]
    ]


@pytest.mark.parametrize(
    ("name", "total", "top_k"),
    [*((name, 9, 3) for name in eagle.VARIANTS), (next(iter(eagle.VARIANTS)), 4, 12)],
)
def test_a_tree_holds_the_best_paths_grown_by_hand_in_every_round(
    model: Any, name: str, total: int, top_k: int
) -> None:
    head = head_for(model, **eagle.VARIANTS[name])
    target, drafter = spied(model, head, tree_tokens=total, top_k=top_k)
    engine = SpeculativeEngine(target, drafter, rule="exact", config=EngineConfig(draft_length=3, max_batch=3))
    run(engine, PROMPTS[:3], SamplingParams(max_new_tokens=5))
    assert len(drafter.seen) >= 2
    for prefixes, tree, max_new in drafter.seen:
        for b, ids in enumerate(prefixes):
            if max_new[b] == 3:
                expected = by_hand(model, head, ids, 3, top_k, total)
                assert sorted(paths_of(tree, b)) == sorted(expected)


@pytest.mark.parametrize("rule", ["exact", "lossless", "dropmatch-naive", "dropmatch"])
@pytest.mark.parametrize("top_k", [1, 4])
def test_trees_are_whole_within_their_budget_and_the_same_twice(model: Any, rule: str, top_k: int) -> None:
    head = head_for(model)
    runs = []
    for _ in range(2):
        target, drafter = spied(model, head, tree_tokens=12, top_k=top_k)
        engine = SpeculativeEngine(
            target, drafter, rule=rule, dropout=DropoutConfig(p_drop=0.05), config=EngineConfig(max_batch=3)
        )
        params = [SamplingParams(max_new_tokens=n, draft_length=L) for n, L in ((20, 5), (9, 1), (14, 3), (12, 4))]
        results = run(engine, PROMPTS, params)
        runs.append(([result.tokens for result in results], drafter.seen))
        assert [len(result.tokens) for result in results] == [20, 9, 14, 12]
    assert runs[0][0] == runs[1][0]
    shapes = set()
    for (prefixes, tree, max_new), (_, again, _) in zip(runs[0][1], runs[1][1], strict=True):
        assert torch.equal(tree.tokens, again.tokens)
        assert torch.equal(tree.parents, again.parents)
        assert tree.is_chain == (top_k == 1)
        assert tree.tokens.shape[1] <= 12
        for b, ids in enumerate(prefixes):
            assert int(tree.tokens[b, 0]) == ids[-1]
            assert bool(tree.valid[b, 0])
            parents, valid = tree.parents[b].tolist(), tree.valid[b].tolist()
            assert all(valid[parents[n]] for n in range(1, len(valid)) if valid[n])
            assert int((tree.depth[b] * tree.valid[b]).max()) <= (max_new[b] if len(ids) > 1 else 0)
            paths = paths_of(tree, b)
            assert len(set(paths)) == len(paths)
            shapes.add(tuple(parents))
    assert top_k == 1 or len(shapes) > 3  # rows and rounds do get trees of their own


def plain(model: Any, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    engine = SpeculativeEngine(HFModel(model, probe=False), None, rule="exact")
    return [result.tokens for result in run(engine, prompts, params)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("top_k", [1, 4])
def test_the_exact_rule_gives_the_targets_own_tokens(model: Any, temperature: float, top_k: int) -> None:
    """Wrong positions, masks or kept paths on the target's side would change the text."""
    params = SamplingParams(max_new_tokens=16, temperature=temperature)
    target, drafter = spied(model, head_for(model), tree_tokens=12, top_k=top_k)
    engine = SpeculativeEngine(target, drafter, rule="exact", config=EngineConfig(max_batch=3))
    results = run(engine, PROMPTS, params)
    assert [result.tokens for result in results] == plain(model, PROMPTS, params)


@pytest.mark.parametrize("top_k", [1, 4])
def test_without_dropout_the_head_rule_is_greedy_eagle3_token_for_token(model: Any, top_k: int) -> None:
    """Text, rounds and what each round kept."""
    outcomes = []
    for rule in ("dropmatch-naive", "exact"):
        target, drafter = spied(model, head_for(model), tree_tokens=12, top_k=top_k)
        engine = SpeculativeEngine(target, drafter, rule=rule, dropout=DropoutConfig(p_drop=0.0))
        results = run(engine, PROMPTS, SamplingParams(max_new_tokens=20))
        outcomes.append([[chunk.tokens for chunk in result.chunks] for result in results])
    assert outcomes[0] == outcomes[1]


def observed(model: Any, observer: Callable[[Round], None], *, rule: str) -> None:
    """Decode with large trees and strong dropout, showing each round to the observer."""
    target, drafter = spied(model, head_for(model), tree_tokens=40, top_k=6)
    engine = SpeculativeEngine(target, drafter, rule=rule, dropout=DropoutConfig(p_drop=0.3))
    engine.observer = observer
    run(engine, PROMPTS[:3], SamplingParams(max_new_tokens=24))


@pytest.mark.parametrize("rule", ["exact+head", "dropmatch"])
def test_a_rule_that_includes_exact_never_keeps_a_shorter_path_than_lossless_on_the_same_tree(
    model: Any, rule: str
) -> None:
    gained = []

    def look(round_: Round) -> None:
        v = round_.verification
        lossless = decide(v, judge(v, [TargetMatch()] * len(round_.requests)), [TargetMatch()] * len(round_.requests))
        assert bool((round_.verdict.num_accepted >= lossless.num_accepted).all())
        gained.append(int((round_.verdict.num_accepted - lossless.num_accepted).sum()))

    observed(model, look, rule=rule)
    assert sum(gained) > 0


def test_more_heads_never_shorten_the_naive_path_on_the_same_tree(model: Any) -> None:
    """The first K of one fixed list of masks: admissible children only ever become more."""

    def look(round_: Round) -> None:
        v, rules = round_.verification, [TargetMatch()] * len(round_.requests)
        assert v.seen is not None
        is_named = v.seen.tokens == v.tree.tokens[..., None]  # [B, N, K]
        kept = [decide(v, is_named[..., :K].any(-1).to(torch.int8), rules).num_accepted for K in (1, 2, 3, 5)]
        assert all(bool((fewer <= more).all()) for fewer, more in pairwise(kept))
        assert torch.equal(kept[-1], round_.verdict.num_accepted)
        grown.append(int((kept[-1] - kept[0]).sum()))

    grown: list[int] = []
    observed(model, look, rule="head")
    assert sum(grown) > 0


def test_siblings_hear_the_same_heads(model: Any) -> None:
    """Masks are drawn once per node, so a shared prefix gets one decision whatever hangs below it."""

    def look(round_: Round) -> None:
        v = round_.verification
        seen = v.seen
        assert seen is not None
        for b in range(len(round_.requests)):
            by_parent: dict[int, list[int]] = {}
            for n in range(1, v.tree.tokens.shape[1]):
                if v.tree.valid[b, n]:
                    tokens = seen.tokens[b, n].tolist()
                    assert by_parent.setdefault(int(v.tree.parents[b, n]), tokens) == tokens

    observed(model, look, rule="head")


def test_rules_that_look_at_distributions_get_those_of_the_head(model: Any) -> None:
    head = head_for(model)
    target, drafter = spied(model, head, tree_tokens=9, top_k=3)
    engine = SpeculativeEngine(target, drafter, rule="dropmatch", dropout=DropoutConfig(p_drop=0.05))
    run(engine, [PROMPTS[0]], SamplingParams(max_new_tokens=5, draft_length=3))
    (ids,), tree, _ = drafter.seen[0]
    assert tree.child_logits is not None
    scores = by_hand(model, head, ids, 3, 3, 9)
    outside = torch.ones(eagle.V, dtype=torch.bool)
    outside[head.target_ids] = False
    for n in range(1, tree.tokens.shape[1]):
        parent = int(tree.parents[0, n])
        path = paths_of(tree, 0)[n - 1]
        log_probs = tree.child_logits[0, parent].log_softmax(-1)
        expected = scores[path] - (scores[path[:-1]] if len(path) > 1 else 0.0)
        assert abs(float(log_probs[path[-1]]) - expected) < CLOSE
        assert bool((tree.child_logits[0, parent][outside] == float("-inf")).all())


def test_suppressed_tokens_are_not_drafted(model: Any) -> None:
    head = head_for(model)
    banned = tuple(int(token) for token in head.target_ids[:150])
    target, drafter = spied(model, head, tree_tokens=12, top_k=4)
    engine = SpeculativeEngine(target, drafter, rule="exact", config=EngineConfig(max_batch=3))
    params = SamplingParams(max_new_tokens=12, suppress_tokens=banned)
    results = run(engine, PROMPTS[:3], params)
    assert [result.tokens for result in results] == plain(model, PROMPTS[:3], params)
    for _, tree, _ in drafter.seen:
        drafted = tree.tokens[:, 1:][tree.valid[:, 1:]]
        assert not set(drafted.tolist()) & set(banned)


def test_a_row_without_drafts_does_not_disturb_its_batch_mates(model: Any) -> None:
    head = head_for(model)
    params = [SamplingParams(max_new_tokens=12, draft_length=L) for L in (4, 0, 4)]
    target, drafter = tapped(model, head), Eagle3Drafter(head, eagle.V, tree_tokens=12, top_k=4)
    together = run(SpeculativeEngine(target, drafter, rule="exact"), PROMPTS[:3], params)
    for prompt, own, result in zip(PROMPTS, params, together, strict=False):
        alone = SpeculativeEngine(
            tapped(model, head), Eagle3Drafter(head, eagle.V, tree_tokens=12, top_k=4), rule="exact"
        )
        (expected,) = run(alone, [prompt], own)
        assert [chunk.tokens for chunk in result.chunks] == [chunk.tokens for chunk in expected.chunks]


def test_a_target_without_taps_is_refused(model: Any) -> None:
    engine = SpeculativeEngine(HFModel(model, probe=False), Eagle3Drafter(head_for(model), eagle.V), rule="exact")
    engine.add([1, 2, 3])
    with pytest.raises(ConfigError, match=r"tap_layers=\[2, 4, 5\]"):
        engine.step()


@pytest.mark.parametrize("options", [{"tree_tokens": 1}, {"tree_tokens": 10**6}, {"top_k": 0}, {"top_k": True}])
def test_sizes_that_make_no_tree_are_refused(model: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not allowed"):
        Eagle3Drafter(head_for(model), eagle.V, **options)
