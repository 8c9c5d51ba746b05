"""The shortlist of likely tokens against heads over the whole vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dropmatch.bench.heads import ComparingHead
from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core import head as head_module
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.head import HeadEnsemble, MCDropoutHead
from dropmatch.core.head_rows import HeadRows
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.ops.divergence import log_probs
from scripted import ScriptedModel, TableHead

ALMOST_ALL = 1e-4  # one token of little mass is left to the rest: only rounding and its own noise remain
LITTLE_MASS = 0.05  # relative: the rest holds a tenth of the mass here, and as one token it hides its own divergence
V, D, M = 3000, 96, 48


def make_case(seed: int) -> tuple[TableHead, Tensor, Tensor, Tensor]:
    """A head with a realistic spread of logits, hidden states, keys, and a drafter near the target."""
    generator = torch.Generator().manual_seed(seed)
    head = TableHead(torch.randn(V, D, generator=generator) * 3.0 / D**0.5)
    hidden = torch.randn(M, D, generator=generator)
    keys = torch.stack([torch.full((M,), seed), torch.zeros(M, dtype=torch.int64), torch.arange(M)], dim=-1)
    draft = log_probs(head(hidden + 0.2 * torch.randn(M, D, generator=generator)))
    return head, hidden, keys, draft


def ask_both(size: int, seed: int, p_drop: float) -> tuple[HeadEnsemble, HeadEnsemble]:
    head, hidden, keys, draft = make_case(seed)
    config = DropoutConfig(p_drop=p_drop, heads="shortlist", shortlist_size=size)
    full = MCDropoutHead(head, replace(config, heads="full"))(
        hidden,
        keys,
        pick=lambda logits, index: logits.argmax(-1),
        with_js=True,
        draft_log_probs=lambda index: draft[index],
    )
    listed = MCDropoutHead(head, config).ask_shortlist(hidden, keys, head(hidden), draft, with_js=True)
    return full, listed


@pytest.mark.parametrize("p_drop", [0.05, 0.3])
def test_a_list_of_almost_all_tokens_says_what_the_whole_vocabulary_says(p_drop: float) -> None:
    full, listed = ask_both(V - 1, seed=0, p_drop=p_drop)
    assert torch.equal(listed.tokens, full.tokens)
    assert torch.equal(listed.majority, full.majority)
    torch.testing.assert_close(listed.js_heads, full.js_heads, atol=ALMOST_ALL, rtol=ALMOST_ALL)
    torch.testing.assert_close(listed.js_draft, full.js_draft, atol=ALMOST_ALL, rtol=ALMOST_ALL)


def test_a_short_list_finds_the_same_tokens_and_nearly_the_same_divergences() -> None:
    full, listed = ask_both(500, seed=1, p_drop=0.1)
    assert torch.equal(listed.tokens, full.tokens)
    assert full.js_draft is not None
    assert listed.js_draft is not None
    assert full.radius is not None
    assert listed.radius is not None
    assert ((listed.radius - full.radius).abs() / full.radius).median() < LITTLE_MASS
    assert ((listed.js_draft <= listed.radius) == (full.js_draft <= full.radius)).float().mean() >= 0.95


@pytest.mark.parametrize("with_js", [True, False])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, with_js: bool) -> None:
    """Gathered rows of a hundred positions at once can need more memory than the model."""
    head, hidden, keys, draft = make_case(4)
    asking = MCDropoutHead(head, DropoutConfig(p_drop=0.1, heads="shortlist", shortlist_size=100))
    given = draft if with_js else None
    whole = asking.ask_shortlist(hidden, keys, head(hidden), given, with_js=with_js)
    monkeypatch.setattr(head_module, "_BYTES_CAP", 7 * 4 * 100 * D)  # seven positions at a time
    most: list[int] = []
    ask = MCDropoutHead._ask_listed

    def counting(self: MCDropoutHead, rows: HeadRows, hidden: Tensor, *rest: Any, **options: Any) -> HeadEnsemble:
        most.append(len(hidden))
        return ask(self, rows, hidden, *rest, **options)

    monkeypatch.setattr(MCDropoutHead, "_ask_listed", counting)
    parts = asking.ask_shortlist(hidden, keys, head(hidden), given, with_js=with_js)
    assert most == [7] * 6 + [6]
    assert asking.rows_asked == 2 * M
    for name in ("tokens", "majority", "votes", "js_heads", "js_draft"):
        one, other = getattr(whole, name), getattr(parts, name)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_a_comparison_gives_the_rank_of_the_least_likely_token_of_a_head() -> None:
    head, hidden, keys, draft = make_case(3)
    comparing = ComparingHead(head, DropoutConfig(p_drop=0.3, heads="shortlist", shortlist_size=64))
    comparing.comparisons = []
    plain = head(hidden)
    comparing.ask_shortlist(hidden, keys, plain, draft, with_js=True)
    order = plain.argsort(dim=-1, descending=True).tolist()
    tokens = comparing.keyed_logits(hidden, keys).argmax(-1).tolist()
    for each, ranked, named in zip(comparing.comparisons, order, tokens, strict=True):
        assert each.worst_rank == 1 + max(ranked.index(token) for token in named)
        if each.worst_rank > 64:
            assert not each.same_tokens
    assert len({each.worst_rank for each in comparing.comparisons}) > 5


def test_without_dropout_the_radius_of_a_shortlist_is_zero() -> None:
    _, listed = ask_both(100, seed=2, p_drop=0.0)
    assert listed.radius is not None
    assert not listed.radius.any()


def decode(config: DropoutConfig, params: SamplingParams) -> tuple[list[int], int]:
    target = ScriptedModel(64, 48)
    drafter = DraftModelDrafter(ScriptedModel(64, 48, noise=0.4), 64)
    engine = SpeculativeEngine(target, drafter, dropout=config, config=EngineConfig(draft_length=6))
    engine.add([1, 2, 3], params)
    return [token for chunk in engine.run() for token in chunk.tokens], target.head.rows


def test_the_engine_projects_fewer_rows_and_decodes_the_same() -> None:
    listed = DropoutConfig(p_drop=0.1, heads="shortlist", shortlist_size=63)
    params = SamplingParams(max_new_tokens=80)
    tokens, rows = decode(listed, params)
    expected, all_rows = decode(replace(listed, heads="full"), params)
    assert tokens == expected
    assert rows < all_rows


def test_sampled_and_processed_rows_are_done_in_full() -> None:
    listed = DropoutConfig(p_drop=0.1, heads="shortlist", shortlist_size=8)
    for params in (
        SamplingParams(max_new_tokens=40, temperature=1.0),
        SamplingParams(max_new_tokens=40, repetition_penalty=1.3),
    ):
        assert decode(listed, params) == decode(replace(listed, heads="full"), params)
