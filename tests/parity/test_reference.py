"""The tensor rules against the plain-Python oracle, on keyed masks of the running code."""

from __future__ import annotations

import math

import pytest
import torch

from dropmatch.config import DropoutConfig, SamplingParams
from dropmatch.core import reference
from dropmatch.core.acceptance import AnyOf, HeadMatch, JSDivergence, MajorityMatch
from dropmatch.core.interfaces import DraftTree
from dropmatch.core.reasons import Reason
from dropmatch.core.verify import judge
from dropmatch.ops.random import dropout_masks
from scripted import ScriptedModel
from toys import make_row, verify

JS_TOLERANCE = 1e-5  # nats, float32 against float64
TIE_MARGIN = 1e-6  # nearer to a tie than this, float32 may decide otherwise; no case of these seeds is
LABELS = {0: "reject", int(Reason.JS): "js", int(Reason.MAJORITY): "majority"}
V, L, ROWS = 20, 4, 16


@pytest.mark.parametrize("tie", ["centroid", "path"])
@pytest.mark.parametrize(("K", "p_drop"), [(1, 0.3), (2, 0.3), (5, 0.05), (5, 0.3), (8, 0.5)])
def test_tensor_rules_equal_the_plain_python_oracle(K: int, p_drop: float, tie: str) -> None:
    target, drafter = ScriptedModel(V, 24, seed=1, scale=2.0), ScriptedModel(V, 24, seed=1, noise=0.5, scale=2.0)
    generator = torch.Generator().manual_seed(K)
    tokens = torch.randint(V, (ROWS, L + 1), generator=generator)
    rows = [make_row([b, int(tokens[b, 0])], SamplingParams(seed=b)) for b in range(ROWS)]
    logits = torch.zeros(ROWS, L + 1, V)
    for b in range(ROWS):
        for n in range(L + 1):
            logits[b, n] = drafter.head(drafter.state([b, *tokens[b, : n + 1].tolist()]))
            if n < L and b % 2:
                tokens[b, n + 1] = logits[b, n].argmax()
    tree = DraftTree.chain(tokens, torch.full((ROWS,), L + 1), logits)
    config = DropoutConfig(num_paths=K, p_drop=p_drop)
    v = verify(target, rows, tree, config, tie=tie)
    rule = AnyOf((JSDivergence(), MajorityMatch()))
    codes, naive = judge(v, [rule] * ROWS), judge(v, [HeadMatch()] * ROWS)
    weight = target.head.weight.tolist()
    seen = set()
    for b in range(ROWS):
        for n in range(1, L + 1):
            masks = dropout_masks(torch.tensor([[b, 0, n + 1]]), K, 24, p_drop)[0]
            hidden = v.hidden[b, n - 1].tolist()
            heads = [reference.path_logits(hidden, weight, [0.0] * V, mask.tolist(), p_drop) for mask in masks]
            draft = reference.softmax(logits[b, n - 1].tolist())
            expected = reference.judge_position(heads, draft, int(tokens[b, n]), tie=tie)
            if K > 1:
                assert abs(expected.js_draft - max(expected.js_heads)) > TIE_MARGIN
            assert LABELS[int(codes[b, n])] == expected.reason
            assert bool(naive[b, n]) == expected.accept_naive
            assert v.seen.tokens[b, n].tolist() == expected.head_tokens
            assert int(v.seen.majority[b, n]) == expected.majority
            assert float(v.seen.js_draft[b, n]) == pytest.approx(expected.js_draft, abs=JS_TOLERANCE)
            assert float(v.seen.radius[b, n]) == pytest.approx(max(expected.js_heads), abs=JS_TOLERANCE)
            seen.add(expected.reason)
    assert "reject" in seen
    assert len(seen) > 1


def test_oracle_breaks_ties_as_documented() -> None:
    heads = [[5.0, 0.0, 0.0], [0.0, 0.0, 6.0]]
    uniform = [1 / 3] * 3
    assert reference.judge_position(heads, uniform, 0).majority == 2  # larger centroid probability
    assert reference.judge_position(heads, uniform, 0, tie="path").majority == 0
    assert reference.judge_position([[5.0, 0.0], [0.0, 5.0]], [0.5, 0.5], 0).majority == 0  # then the lower id


def test_oracle_divergence_of_known_pairs() -> None:
    assert reference.js_divergence([1.0, 0.0], [0.0, 1.0]) == pytest.approx(0.693147180559945)
    assert reference.js_divergence([0.5, 0.5], [0.5, 0.5]) == 0.0
    midpoint = 0.5 * (math.log(1 / 0.625) + 0.25 * math.log(0.25 / 0.625) + 0.75 * math.log(0.75 / 0.375))
    assert reference.js_divergence([1.0, 0.0], [0.25, 0.75]) == pytest.approx(midpoint)
