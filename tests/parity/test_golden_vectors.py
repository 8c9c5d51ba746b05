"""The golden cases: an independent float64 reading of the paper, replayed through the real head, rules and engine.

They come as one file, acceptance.npz, in the folder that --shared names; see its README for the keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core import head as head_module
from dropmatch.core import reference
from dropmatch.core.acceptance import AnyOf, HeadMatch, JSDivergence, MajorityMatch
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.head import HeadEnsemble, MCDropoutHead
from dropmatch.core.interfaces import DraftTree, ModelOutput, Verdict
from dropmatch.core.reasons import Reason
from dropmatch.core.sequence import Row
from dropmatch.core.verification import RowSampling, Verification
from dropmatch.core.verify import decide, judge
from dropmatch.ops.divergence import log_probs
from scripted import TableHead
from toys import make_row

JS_TOLERANCE = 1e-5  # nats, float32 against float64; no case lies within 1e-6 of a tie
NUM_CASES = 60
ALGORITHM_1 = AnyOf((JSDivergence(), MajorityMatch()))
REASONS = {0: "reject", int(Reason.JS): "js", int(Reason.MAJORITY): "majority"}


class BiasedHead(TableHead):
    """hidden @ weight.T + bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight)
        self.bias = 0.0 if bias is None else bias

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().__call__(hidden) + self.bias


@dataclass
class Case:
    """One golden case. masks: [T, K, d]."""

    name: str
    p_drop: float
    hidden: torch.Tensor
    head: BiasedHead
    masks: torch.Tensor
    draft_probs: torch.Tensor
    draft_tokens: torch.Tensor
    expected: dict[str, np.ndarray]

    @property
    def num_tokens(self) -> int:
        return len(self.draft_tokens)

    @property
    def config(self) -> DropoutConfig:
        return DropoutConfig(num_paths=self.masks.shape[1], p_drop=self.p_drop)

    def dropout_head(self) -> MCDropoutHead:
        return MCDropoutHead(self.head, self.config, tie="path")


@pytest.fixture(scope="module")
def cases(shared_dir: Path) -> list[Case]:
    keys = [
        "js_draft",
        "js_heads",
        "head_tokens",
        "majority",
        "majority_count",
        "accept_js",
        "reason",
        "prefix_js",
        "accept_naive",
    ]
    with np.load(shared_dir / "vectors" / "acceptance.npz") as data:
        index = json.loads(str(data["index"]))
        loaded = []
        for entry in index:
            name = entry["name"]
            bias = torch.from_numpy(data[f"{name}/bias"]) if f"{name}/bias" in data else None
            assert (bias is not None) == bool(entry["bias"])
            loaded.append(
                Case(
                    name=name,
                    p_drop=entry["p_drop"],
                    hidden=torch.from_numpy(data[f"{name}/hidden"]),
                    head=BiasedHead(torch.from_numpy(data[f"{name}/weight"]), bias),
                    masks=torch.from_numpy(data[f"{name}/masks"]).bool().transpose(0, 1).contiguous(),
                    draft_probs=torch.from_numpy(data[f"{name}/draft_probs"]),
                    draft_tokens=torch.from_numpy(data[f"{name}/draft_tokens"]).long(),
                    expected={key: data[f"{name}/{key}"] for key in keys},
                )
            )
    return loaded


def _naive(case: Case) -> list[bool]:
    return case.expected["accept_naive"].astype(bool).tolist()


def _prefix(accept: Sequence[bool]) -> int:
    return next((i for i, kept in enumerate(accept) if not kept), len(accept))


def _tree(case: Case) -> DraftTree:
    T = case.num_tokens
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), case.draft_tokens])[None]
    logits = torch.cat([case.draft_probs.log(), torch.zeros_like(case.draft_probs[:1])])[None].float()
    return DraftTree.chain(tokens, torch.tensor([T + 1]), logits)


def _inject_masks(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The t-th drafted token stands at position t + 1 of a row whose prompt is one token."""
    monkeypatch.setattr(head_module, "dropout_masks", lambda keys, K, d, p_drop: case.masks[keys[:, 2] - 1])


def _verification(case: Case) -> Verification:
    hidden = torch.cat([case.hidden, torch.zeros_like(case.hidden[:1])])[None]
    sampling = RowSampling([make_row([0])], torch.device("cpu"))
    return Verification(_tree(case), hidden, case.head(hidden), sampling, case.dropout_head(), with_js=True)


def test_the_file_holds_all_cases(cases: list[Case]) -> None:
    assert len(cases) == NUM_CASES
    assert {case.config.num_paths for case in cases} == {1, 2, 3, 4, 5, 8}
    assert {isinstance(case.head.bias, torch.Tensor) for case in cases} == {True, False}


def test_head_reproduces_tokens_votes_and_divergences(cases: list[Case]) -> None:
    for case in cases:
        heads: HeadEnsemble = case.dropout_head()(
            case.hidden,
            torch.zeros(case.num_tokens, 3, dtype=torch.int64),
            pick=lambda logits, index: logits.argmax(-1),
            with_js=True,
            draft_log_probs=lambda index, case=case: log_probs(case.draft_probs.log()[index]),
            masks=case.masks,
        )
        assert heads.tokens.tolist() == case.expected["head_tokens"].tolist(), case.name
        assert heads.majority.tolist() == case.expected["majority"].tolist(), case.name
        assert heads.votes.tolist() == case.expected["majority_count"].tolist(), case.name
        np.testing.assert_allclose(heads.js_heads, case.expected["js_heads"], rtol=0, atol=JS_TOLERANCE)
        np.testing.assert_allclose(heads.js_draft, case.expected["js_draft"], rtol=0, atol=JS_TOLERANCE)


def test_rules_reproduce_decisions_reasons_and_prefixes(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    for case in cases:
        _inject_masks(case, monkeypatch)
        v = _verification(case)
        codes = judge(v, [ALGORITHM_1])
        assert [REASONS[code] for code in codes[0, 1:].tolist()] == case.expected["reason"].tolist(), case.name
        assert (codes[0, 1:] > 0).tolist() == case.expected["accept_js"].astype(bool).tolist(), case.name
        verdict = decide(v, codes, [ALGORITHM_1])
        assert int(verdict.num_accepted) == int(case.expected["prefix_js"]), case.name
        np.testing.assert_allclose(v.seen.js_draft[0, 1:], case.expected["js_draft"], rtol=0, atol=JS_TOLERANCE)
        np.testing.assert_allclose(v.seen.radius[0, 1:], case.expected["js_heads"].max(-1), rtol=0, atol=JS_TOLERANCE)
        naive = judge(_verification(case), [HeadMatch()])
        assert (naive[0, 1:] > 0).tolist() == _naive(case), case.name


class _GivenTarget:
    """A CachedModel for one forward: the case's hidden states, whatever the tokens."""

    device = torch.device("cpu")

    def __init__(self, case: Case) -> None:
        self.head = case.head
        self.vocab_size = case.head.vocab_size
        self.hidden = torch.cat([case.hidden, case.hidden[:1]])[None]
        self.lengths: list[int] = []
        self.kept: list[int] = []

    def add_rows(self, prompts: Sequence[Sequence[int]]) -> ModelOutput:
        return ModelOutput(torch.zeros(1, 0, self.hidden.shape[-1]))

    def forward(self, tokens: torch.Tensor, ancestors: torch.Tensor | None = None) -> ModelOutput:
        return ModelOutput(self.hidden[:, : tokens.shape[1]])

    def commit(self, num_kept: Sequence[int], path: torch.Tensor | None = None) -> None:
        self.kept = list(num_kept)

    def truncate(self, lengths: Sequence[int]) -> None:
        raise AssertionError("a target is never truncated")

    def filter(self, keep: Sequence[int]) -> None:
        """Nothing is cached."""


class _GivenDrafter:
    name = "given"

    def __init__(self, case: Case) -> None:
        self.tree = _tree(case)

    def add_rows(self, rows: Sequence[Row], output: ModelOutput) -> None:
        """No state."""

    def propose(self, rows: Sequence[Row], max_new: Sequence[int]) -> DraftTree:
        return self.tree

    def commit(self, verdict: Verdict, output: ModelOutput) -> None:
        """No state."""

    def filter(self, keep: Sequence[int]) -> None:
        """No state."""


@pytest.mark.filterwarnings("ignore::dropmatch.core.calibrate.SaturationWarning")
@pytest.mark.parametrize("is_naive", [False, True])
def test_one_engine_step_keeps_the_golden_prefix(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch, is_naive: bool
) -> None:
    for case in cases:
        _inject_masks(case, monkeypatch)
        target = _GivenTarget(case)
        engine = SpeculativeEngine(
            target,
            _GivenDrafter(case),
            rule=HeadMatch() if is_naive else ALGORITHM_1,
            dropout=case.config,
            config=EngineConfig(draft_length=case.num_tokens),
        )
        engine.head.tie = "path"
        engine.add([0], SamplingParams(max_new_tokens=case.num_tokens + 5))
        (chunk,) = engine.step()
        kept = _prefix(_naive(case)) if is_naive else int(case.expected["prefix_js"])
        plain = case.head(target.hidden[0, kept]).argmax()
        assert list(chunk.tokens) == [*case.draft_tokens[:kept].tolist(), int(plain)], case.name
        assert target.kept == [kept + 1], case.name
        labels = [reason.label for reason in chunk.reasons]
        expected = ["head"] * kept if is_naive else case.expected["reason"][:kept].tolist()
        assert labels == [*expected, "bonus" if kept == case.num_tokens else "recovered"], case.name


def test_plain_python_oracle_reproduces_every_case(cases: list[Case]) -> None:
    for case in cases:
        bias = [0.0] * case.head.vocab_size if isinstance(case.head.bias, float) else case.head.bias.tolist()
        weight = case.head.weight.double().tolist()
        for t in range(case.num_tokens):
            heads = [
                reference.path_logits(case.hidden[t].tolist(), weight, bias, mask.tolist(), case.p_drop)
                for mask in case.masks[t]
            ]
            got = reference.judge_position(heads, case.draft_probs[t].tolist(), int(case.draft_tokens[t]), tie="path")
            assert got.reason == case.expected["reason"][t], (case.name, t)
            assert got.head_tokens == case.expected["head_tokens"][t].tolist()
            assert (got.majority, got.majority_count) == (
                int(case.expected["majority"][t]),
                int(case.expected["majority_count"][t]),
            )
            assert got.accept_naive == bool(case.expected["accept_naive"][t])
            assert got.js_draft == pytest.approx(float(case.expected["js_draft"][t]), abs=JS_TOLERANCE)
            assert got.js_heads == pytest.approx(case.expected["js_heads"][t].tolist(), abs=JS_TOLERANCE)
