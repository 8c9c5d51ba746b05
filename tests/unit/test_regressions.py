"""Faults that an adversarial reading found, each told by its test."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from dropmatch.config import DropoutConfig, EngineConfig, SamplingParams
from dropmatch.core.acceptance import AnyOf, RejectionSampling
from dropmatch.core.engine import SpeculativeEngine
from dropmatch.drafters.draft_model import DraftModelDrafter
from dropmatch.errors import ConfigError, StateError
from dropmatch.hf.model import HFModel
from scripted import ScriptedModel
from toys import ListDrafter, collect, run, run_one


def gpt2() -> HFModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=320, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=None, eos_token_id=None
    )
    return HFModel(GPT2LMHeadModel(config).eval())


def test_a_row_near_the_draft_models_last_position_does_not_hold_up_its_batch_mate() -> None:
    """All rows of a batch were drafted to the longest row's length, past the positions that a short-lived row had."""
    prompts, limits = [list(range(5, 35)), [7, 8, 9]], [10, 20]
    engine = SpeculativeEngine(gpt2(), DraftModelDrafter(gpt2(), 320), rule="exact", config=EngineConfig(max_length=32))
    for prompt, limit in zip(prompts, limits, strict=True):
        engine.add(prompt, SamplingParams(max_new_tokens=limit))
    together = collect(engine.run())
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        plain = SpeculativeEngine(gpt2(), None, rule="exact", config=EngineConfig(max_length=32))
        plain.add(prompt, SamplingParams(max_new_tokens=limit))
        assert together[i].tokens == collect(plain.run())[0].tokens


def shortlisting(seed: int, rule: str = "dropmatch", drafter: str = "model") -> SpeculativeEngine:
    target = ScriptedModel(V=64, seed=seed, scale=2.0)
    draft = ScriptedModel(V=64, seed=seed, noise=0.5, scale=2.0)
    words = ListDrafter(lambda ids: draft.greedy(ids, 3))
    return SpeculativeEngine(
        target,
        DraftModelDrafter(draft, 64) if drafter == "model" else words,
        rule=rule,
        dropout=DropoutConfig(p_drop=0.2, heads="shortlist", shortlist_size=8),
    )


@pytest.mark.parametrize("drafter", ["model", "words"])
@pytest.mark.parametrize(
    "mate",
    [
        SamplingParams(max_new_tokens=30, temperature=1.0),
        SamplingParams(max_new_tokens=30, suppress_tokens=(5,)),
        SamplingParams(max_new_tokens=30, rule="js+majority"),
    ],
)
def test_a_shortlisted_row_does_not_depend_on_a_mate_that_is_done_in_full(mate: SamplingParams, drafter: str) -> None:
    """One sampled or processed row switched the heads of the whole batch."""
    rule = "dropmatch" if drafter == "model" else "dropmatch-naive"
    params = SamplingParams(max_new_tokens=30)
    for seed in range(6):
        (alone,) = run(shortlisting(seed, rule, drafter), [[1, 2, 3]], params)
        beside = run(shortlisting(seed, rule, drafter), [[1, 2, 3], [4, 5]], [params, mate])[0]
        assert (beside.tokens, beside.reasons) == (alone.tokens, alone.reasons)


@pytest.mark.parametrize("p_drop", [0.0, 1e-9])
def test_a_shortlist_breaks_ties_as_the_full_head_does(p_drop: float) -> None:
    """Twins in the vocabulary went to the one that topk named first, so that not even p_drop=0 was lossless."""
    target = ScriptedModel(V=64, seed=0)
    target.head.weight[1::2] = target.head.weight[0::2]
    expected = target.greedy([1, 2, 3], 20)
    drafter = ListDrafter(lambda ids: [token ^ 1 for token in expected[len(ids) - 3 :]])
    result = run_one(
        target,
        drafter,
        [1, 2, 3],
        SamplingParams(max_new_tokens=20),
        rule="majority",
        dropout=DropoutConfig(p_drop=p_drop, heads="shortlist", shortlist_size=8),
    )
    assert result.tokens == expected


def test_a_refused_end_of_sequence_does_not_come_back_as_the_correction() -> None:
    target = ScriptedModel(V=8, seed=192, scale=1.5)
    result = run_one(
        target,
        ListDrafter(lambda ids: [0]),
        [1, 2, 3],
        SamplingParams(max_new_tokens=2, eos_ids=(0,)),
        rule="majority",
        dropout=DropoutConfig(p_drop=0.3),
        config=EngineConfig(correction="head1", protect_eos=True),
    )
    assert result.tokens[0] == target.greedy([1, 2, 3], 1)[0] != 0


def test_an_engine_whose_step_raised_says_so_and_works_again_after_cancel_all() -> None:
    """It went on with rows that had tokens which the target's cache lacked: wrong tokens without a word."""
    target, calls = ScriptedModel(V=32, seed=3), [0]

    def boom(ids: list[int]) -> bool:
        calls[0] += 1
        if calls[0] == 3:
            raise TimeoutError
        return False

    engine = SpeculativeEngine(target, None, rule="exact")
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=20))
    engine.add([4, 5], SamplingParams(max_new_tokens=20, stop_checks=(boom,)))
    with pytest.raises(TimeoutError):
        engine.run()
    with pytest.raises(StateError, match="cancel_all"):
        engine.step()
    engine.cancel_all()
    request = engine.add([1, 2, 3], SamplingParams(max_new_tokens=20))
    assert collect(engine.run())[request].tokens == target.greedy([1, 2, 3], 20)


def test_a_prefill_that_raises_loses_no_waiting_request(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ScriptedModel()
    engine = SpeculativeEngine(target, None, rule="exact")
    engine.add([1, 2, 3])

    def fail(prompts: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(target, "add_rows", fail)
        with pytest.raises(MemoryError):
            engine.step()
    assert engine.has_work


@pytest.mark.parametrize("rule", ["dropmatch-expected", "top-k(k=2)", "exact+fuzzy"])
def test_a_correction_that_a_rule_would_ignore_is_refused(rule: str) -> None:
    engine = SpeculativeEngine(ScriptedModel(), None, rule=rule, config=EngineConfig(correction="mode"))
    with pytest.raises(ConfigError, match="Use correction='plain'"):
        engine.add([1, 2])


def test_independent_noise_of_a_mate_does_not_stop_a_greedy_closed_form_row() -> None:
    target = ScriptedModel(V=32, seed=3)
    engine = SpeculativeEngine(
        target,
        DraftModelDrafter(ScriptedModel(V=32, seed=3, noise=0.5), 32),
        dropout=DropoutConfig(p_drop=0.1, noise="independent"),
    )
    mates = [
        SamplingParams(max_new_tokens=20, rule="expected-head"),
        SamplingParams(max_new_tokens=20, temperature=1.0),
    ]
    assert len(run(engine, [[1, 2], [1, 2]], mates)) == 2


def test_rejection_sampling_cannot_be_joined_as_an_object_either() -> None:
    with pytest.raises(ConfigError, match="cannot be joined"):
        AnyOf((RejectionSampling(),))


def test_temperatures_and_path_counts_that_break_the_arithmetic_are_refused() -> None:
    with pytest.raises(ConfigError, match="too small"):
        SamplingParams(temperature=1e-38)
    with pytest.raises(ConfigError, match="out of range"):
        DropoutConfig(num_paths=2**16)
