"""Mining and features on real architectures against plain forwards of the models, prefix by prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import tiny
from dropmatch.config import EngineConfig, SamplingParams
from dropmatch.core.acceptance import Judge
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.core.judge import JudgeHead
from dropmatch.core.reasons import Reason
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.hf.model import HFModel
from dropmatch.judge.features import draft_token_states
from dropmatch.judge.mining import Mined, Miner, MiningPrompt
from toys import GENTLE, judge_head, run

CLOSE = 1e-4  # float32 hidden states of size about 1, summed in another order
LIMIT = 24
PROMPTS = [MiningPrompt(f"p{i}", (3 + i, 40 + 7 * i, 90, 12 * i + 5), LIMIT) for i in range(4)]


class LengthGrader:
    """Answers come to whether they have an even number of letters."""

    def grade(self, answers: Sequence[tuple[str, str]]) -> list[int]:
        return [len(text) % 2 for _, text in answers]

    def same(self, key: str, reference: object, other: object) -> bool:
        return reference == other


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    target = tiny.target()
    return target, tiny.agreeing(target, noise=0.04)


@pytest.fixture(scope="module")
def mined(models: tuple[Any, Any]) -> list[Mined]:
    target, draft = models
    tokenizer = tiny.tokenizer()
    miner = Miner(
        HFModel(target, probe=False),
        lambda: HFModel(draft, probe=False),
        LengthGrader(),
        decode=lambda ids: str(tokenizer.decode(ids)),
        eos_ids=frozenset({tiny.EOS}),
        batch=3,
    )
    return sorted(miner.run(PROMPTS), key=lambda one: one.prompt.key)


@torch.inference_mode()
def _state(model: Any, ids: Sequence[int]) -> torch.Tensor:
    return model.model(input_ids=torch.tensor([list(ids)])).last_hidden_state[0, -1]


@torch.inference_mode()
def _next(model: Any, ids: Sequence[int]) -> int:
    return int(model(input_ids=torch.tensor([list(ids)])).logits[0, -1].argmax())


def test_answers_and_mismatches_are_those_of_plain_forwards(models: tuple[Any, Any], mined: list[Mined]) -> None:
    target, draft = models
    assert {label.is_important for one in mined for label in one.labels} == {True, False}
    for one in mined:
        ids = list(one.prompt.ids)
        for token in one.reference:
            assert _next(target, ids) == token
            ids.append(token)
        labels = {label.position: label for label in one.labels}
        for at in range(len(one.response)):
            said = _next(draft, [*one.prompt.ids, *one.response[:at]])
            if at in labels:
                assert said == labels[at].draft_token != labels[at].target_token
                stays = labels[at].target_token if labels[at].is_important else said
                assert one.response[at] == stays
            else:
                assert said == one.response[at]


def test_features_are_the_final_states_behind_the_draft_tokens(models: tuple[Any, Any], mined: list[Mined]) -> None:
    for model in models:
        for one in mined:
            for label, state in zip(one.labels, draft_token_states(HFModel(model, probe=False), one), strict=True):
                ids = [*one.prompt.ids, *one.response[: label.position], label.draft_token]
                assert torch.allclose(state, _state(model, ids), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("head", [judge_head(32), judge_head(64, draft_size=32)], ids=["DT", "DD-DT"])
def test_decoding_judges_the_features_that_training_reads(models: tuple[Any, Any], head: JudgeHead) -> None:
    target, draft = models
    wrapped = HFModel(target, probe=False)
    drafter = DraftModelDrafter(HFModel(draft, probe=False), wrapped.vocab_size)
    config = EngineConfig(draft_length=6)
    engine = SpeculativeEngine(wrapped, drafter, rule=Judge(head, 0.5), dropout=GENTLE, config=config)
    results = run(engine, [prompt.ids for prompt in PROMPTS], SamplingParams(max_new_tokens=LIMIT))
    judged = 0
    for prompt, result in zip(PROMPTS, results, strict=True):
        for at, reason in enumerate(result.reasons):
            ids = [*prompt.ids, *result.tokens[: at + 1]]
            if reason is Reason.JUDGE:
                states = [_state(draft, ids), _state(target, ids)] if head.draft_size else [_state(target, ids)]
                assert head.probability(torch.cat(states)[None]) < 0.5 + CLOSE
                judged += 1
    assert judged > 3
