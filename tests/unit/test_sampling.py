"""top-k, top-p, min-p and the repetition penalty against plain Python, one setting per row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmatch.core.reference import softmax
from dropmatch.ops.sampling import likeliest, most_likely, penalize_repetition, restrict

EDGE = 1e-5  # cases whose cumulative mass is this near to top_p are decided by rounding and left out


def _allowed(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int] | None:
    """Tokens that stay, read off the definitions; None if rounding decides."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])
    allowed = order[:top_k] if top_k > 0 else order
    if top_p < 1.0:
        probs = softmax([logits[v] for v in allowed])
        kept, mass = [], 0.0
        for v, p in zip(allowed, probs, strict=True):
            if kept and abs(mass - top_p) < EDGE:
                return None
            if kept and mass >= top_p:
                break
            kept.append(v)
            mass += p
        allowed = kept
    if min_p > 0.0:
        probs = softmax([logits[v] for v in allowed])
        if any(abs(p - min_p * max(probs)) < EDGE for p in probs):
            return None
        allowed = [v for v, p in zip(allowed, probs, strict=True) if p >= min_p * max(probs)]
    return set(allowed)


_setting = st.tuples(
    st.integers(0, 12), st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]), st.sampled_from([0.0, 0.05, 0.3, 1.0])
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.lists(_setting, min_size=1, max_size=6), st.integers(0, 10_000))
def test_restrict_keeps_what_the_definitions_say_in_each_row(rows: list[tuple[int, float, float]], seed: int) -> None:
    logits = torch.randn(len(rows), 10, generator=torch.Generator().manual_seed(seed)) * 2
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    got = restrict(logits, top_k, top_p, min_p)
    for m, row in enumerate(rows):
        expected = _allowed(logits[m].tolist(), *row)
        if expected is None:
            continue
        kept = got[m].isfinite()
        assert set(kept.nonzero()[:, 0].tolist()) == expected
        assert torch.equal(got[m][kept], logits[m][kept])


def test_restrict_always_leaves_the_best_token() -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    got = restrict(logits, torch.full((50,), 1), torch.full((50,), 0.0), torch.full((50,), 1.0))
    assert torch.equal(got.isfinite().sum(-1), torch.ones(50, dtype=torch.int64))
    assert torch.equal(got.argmax(-1), logits.argmax(-1))


def test_restrict_with_everything_off_changes_nothing() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    off = restrict(logits, torch.zeros(3, dtype=torch.int64), torch.ones(3), torch.zeros(3))
    assert torch.equal(off, logits)
    assert torch.equal(restrict(logits, torch.full((3,), 99), torch.ones(3), torch.zeros(3)), logits)


def test_restrict_does_not_write_into_its_input() -> None:
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    restrict(logits, torch.tensor([2, 0]), torch.tensor([1.0, 0.5]), torch.tensor([0.0, 0.2]))
    assert torch.equal(logits, before)


def test_repetition_penalty_pushes_seen_tokens_down_once() -> None:
    logits = torch.tensor([[2.0, -2.0, 3.0, 0.0]])
    got = penalize_repetition(logits, torch.tensor([0, 1, 1, 0, 3]), 2.0)
    assert got.tolist() == [[1.0, -4.0, 3.0, 0.0]]
    assert logits[0, 0] == 2.0


def test_repetition_penalty_below_one_favours_seen_tokens() -> None:
    got = penalize_repetition(torch.tensor([[1.0, -1.0]]), torch.tensor([0, 1]), 0.5)
    assert got[0].tolist() == pytest.approx([2.0, -0.5])
    assert not math.isnan(float(got.sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_of_equal_scores_is_the_most_likely(dtype: torch.dtype) -> None:
    """As `argmax` has it: whole texts hang on which of two equal tokens is taken."""
    for seed in range(50):
        scores = torch.randint(40, (2, 3, 900 + seed), generator=torch.Generator().manual_seed(seed)).to(dtype)
        first = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)
        assert torch.equal(most_likely(scores), first)
    assert most_likely(torch.full((1, 70), float("-inf"), dtype=dtype)).item() == 0


@pytest.mark.parametrize(("V", "count"), [(64, 4), (65, 4), (1003, 7), (151_936, 1024), (100, 60)])
def test_the_likeliest_are_those_of_topk(V: int, count: int) -> None:
    generator = torch.Generator().manual_seed(V)
    scores = torch.randn(3, V, generator=generator)
    scores[1, V - 3 :] += 10.0  # behind the last whole bin
    scores[2] = scores[2].sort(descending=True).values  # all in the same bins
    values, ids = likeliest(scores, count)
    best = scores.topk(count, dim=-1)
    assert torch.equal(values, best.values)
    assert torch.equal(ids, best.indices)


def test_the_likeliest_of_rows_with_ties_and_impossible_tokens() -> None:
    scores = torch.full((2, 640), float("-inf"))
    scores[0, ::64] = 1.0
    scores[1, 5] = 2.0
    values, ids = likeliest(scores, 12)
    assert values[0].tolist() == [1.0] * 10 + [float("-inf")] * 2
    assert sorted(ids[0, :10].tolist()) == list(range(0, 640, 64))
    assert ids[1, 0] == 5
    assert all(len(set(row)) == 12 for row in ids.tolist())
