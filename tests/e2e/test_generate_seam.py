"""`model.generate(custom_generate=dropmatch.hf.decoder(...))` beside plain `model.generate`, on tiny float32 models."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    StoppingCriteria,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
    TopKLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation import MaxLengthCriteria, MinNewTokensLengthLogitsProcessor

import dropmatch
import tiny
from dropmatch.core.reasons import Reason
from dropmatch.errors import ConfigError, UnknownNameError, UnsupportedModelError

LOSSLESS = ("lossless", "exact")
PROMPTS = ["the harbour was quiet", "a train travels sixty kilometres in", "def"]


@pytest.fixture(scope="module")
def world() -> SimpleNamespace:
    """target, an agreeing drafter, one that never agrees, the tokenizer. Nothing of it may be changed by a test."""
    model = tiny.target()
    return SimpleNamespace(
        target=model, draft=tiny.agreeing(model), stranger=tiny.stranger(), tokenizer=tiny.tokenizer()
    )


def inputs(world: SimpleNamespace, *prompts: str) -> dict[str, Tensor]:
    return dict(world.tokenizer(list(prompts or PROMPTS[:1]), return_tensors="pt", padding=True))


def plain(world: SimpleNamespace, ids: dict[str, Tensor], **options: Any) -> Tensor:
    return world.target.generate(**ids, **{"max_new_tokens": 24, "do_sample": False, **options})


def fast(world: SimpleNamespace, ids: dict[str, Tensor], rule: str = "exact", **options: Any) -> Tensor:
    decode = dropmatch.hf.decoder(draft=world.draft, rule=rule)
    return plain(world, ids, custom_generate=decode, **options)


def eos_in(world: SimpleNamespace, at: int, row: int = 0) -> int:
    """The token that plain greedy decoding of the prompts emits at this place of this row, as an EOS id."""
    ids = inputs(world, *PROMPTS)
    return int(plain(world, ids, eos_token_id=None)[row, ids["input_ids"].shape[1] + at])


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("draft_length", [1, 5, 10])
def test_greedy_equals_generate_and_drafts_are_kept(world: SimpleNamespace, rule: str, draft_length: int) -> None:
    ids = inputs(world)
    decode = dropmatch.hf.decoder(draft=world.draft, rule=rule, draft_length=draft_length)
    assert torch.equal(plain(world, ids, custom_generate=decode), plain(world, ids))
    assert 1.2 < decode.stats.requests.tau <= draft_length + 1
    assert decode.stats.requests.emitted == 24


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_padded_batch_equals_single_runs_and_counts_no_padding(world: SimpleNamespace, rule: str) -> None:
    ids = inputs(world, *PROMPTS)
    eos = eos_in(world, 4, row=1)
    decode = dropmatch.hf.decoder(draft=world.draft, rule=rule)
    out = plain(world, ids, custom_generate=decode, eos_token_id=eos)
    assert torch.equal(out, plain(world, ids, eos_token_id=eos))
    emitted, rounds = 0, 0
    width = ids["input_ids"].shape[1]
    for row, prompt in enumerate(PROMPTS):
        single_ids = inputs(world, prompt)
        single = plain(world, single_ids, custom_generate=decode, eos_token_id=eos)[
            0, single_ids["input_ids"].shape[1] :
        ]
        new = out[row, width:]
        assert new[: len(single)].tolist() == single.tolist()
        assert set(new[len(single) :].tolist()) <= {tiny.PAD}
        emitted += decode.stats.requests.emitted
        rounds += decode.stats.requests.rounds
    decode = dropmatch.hf.decoder(draft=world.draft, rule=rule)
    plain(world, ids, custom_generate=decode, eos_token_id=eos)
    assert (decode.stats.requests.emitted, decode.stats.requests.rounds) == (emitted, rounds)
    assert emitted < 3 * 24


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "min_new_tokens": {"min_new_tokens": 12},
    "min_length": {"min_length": 20},
    "bad_words_ids": {"bad_words_ids": [[122], [201, 122], [280, 133]]},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "suppress_tokens": {"suppress_tokens": [122, 133, 14]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [133, 122]},
    "sequence_bias": {"sequence_bias": [[[122], -5.0], [[14, 314], 4.0]]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (6, 1.3)},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "max_length": {"max_length": 29, "max_new_tokens": None},
    "max_new_tokens of 1": {"max_new_tokens": 1},
    "renormalize_logits": {"renormalize_logits": True, "suppress_tokens": [122]},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=2.5)},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
    "max_time": {"max_time": 1000.0},
    "all together": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 9,
        "suppress_tokens": [14],
    },
}


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_generation_config_hold_in_a_padded_batch(world: SimpleNamespace, name: str, rule: str) -> None:
    """repetition_penalty failed here: transformers gives its processor one number per row of the batch."""
    ids = inputs(world, *PROMPTS)
    options = {"eos_token_id": [eos_in(world, 5), eos_in(world, 7, row=1)], **SETTINGS[name]}
    expected = plain(world, ids, **options)
    assert torch.equal(fast(world, ids, rule, **options), expected)


@pytest.mark.parametrize("name", ["repetition_penalty", "bad_words_ids", "no_repeat_ngram_size"])
def test_settings_reach_the_dropout_heads(world: SimpleNamespace, name: str) -> None:
    """With p_drop near 0 the heads agree with the target, so the paper's rule keeps what the target would produce."""
    ids = inputs(world, *PROMPTS[:2])
    decode = dropmatch.hf.decoder(draft=world.draft, rule="dropmatch-naive", p_drop=1e-6)
    out = plain(world, ids, custom_generate=decode, **SETTINGS[name])
    assert torch.equal(out, plain(world, ids, **SETTINGS[name]))
    assert decode.stats.requests.reasons[Reason.HEAD] > 3


@pytest.mark.parametrize("at", [0, 3, 11])
def test_it_stops_at_the_first_of_several_eos_ids(world: SimpleNamespace, at: int) -> None:
    ids = inputs(world)
    options = {"eos_token_id": [eos_in(world, at), tiny.EOS, 319]}
    out = fast(world, ids, "lossless", **options)
    assert torch.equal(out, plain(world, ids, **options))
    assert out.shape[1] == ids["input_ids"].shape[1] + at + 1


def test_without_an_eos_id_it_goes_on_to_the_cap(world: SimpleNamespace) -> None:
    ids = inputs(world)
    out = fast(world, ids, eos_token_id=None, max_new_tokens=40)
    assert torch.equal(out, plain(world, ids, eos_token_id=None, max_new_tokens=40))
    assert out.shape[1] == ids["input_ids"].shape[1] + 40


def test_rows_that_end_early_are_padded_with_the_eos_where_no_pad_token_is_set(world: SimpleNamespace) -> None:
    """Zeros were put there: `generate` keeps the pad token it falls back to in a private place."""
    ids = inputs(world, *PROMPTS)
    model = copy.deepcopy(world.target)
    model.generation_config.pad_token_id = None
    other = SimpleNamespace(**{**vars(world), "target": model})
    options = {"eos_token_id": [eos_in(world, 4, row=1), 318]}
    out = fast(other, ids, **options)
    assert torch.equal(out, plain(other, ids, **options))
    assert int(out[1, -1]) == options["eos_token_id"][0]


class Doubled(LogitsProcessor):
    """A caller's own processor: favours tokens by the parity of the length, and works in place."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids.shape[1] % 2 :: 2] *= 0.5
        return scores


class StopAfter(StoppingCriteria):
    """Ends a row once it has so many tokens in all."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_logits_processor_of_the_caller_holds(world: SimpleNamespace, rule: str) -> None:
    ids = inputs(world, *PROMPTS)
    options = {"logits_processor": [Doubled()]}
    expected = plain(world, ids, **options)
    assert torch.equal(fast(world, ids, rule, **options), expected)
    assert not torch.equal(expected, plain(world, ids))


@pytest.mark.parametrize("rule", [*LOSSLESS, "dropmatch"])
def test_a_criterion_that_stops_after_seven_tokens_sees_no_overshoot(world: SimpleNamespace, rule: str) -> None:
    ids = inputs(world)
    length = ids["input_ids"].shape[1] + 7
    out = fast(world, ids, rule, stopping_criteria=[StopAfter(length)])
    assert out.shape[1] == length


class PrefersOdd(LogitsProcessor):
    """Breaks ties by less than bfloat16 can hold."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 1e-3 * (torch.arange(scores.shape[1]) % 2)


def test_processors_of_a_bfloat16_model_work_in_float32(world: SimpleNamespace) -> None:
    """As in `generate`. What they gave was rounded back to bfloat16, so that small penalties were lost."""
    model = copy.deepcopy(world.target).bfloat16()
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[0::2]  # every logit is there twice
    pair = SimpleNamespace(target=model, draft=world.draft)
    options = {"logits_processor": [PrefersOdd()], "eos_token_id": None, "max_new_tokens": 10}
    out = fast(pair, inputs(world), **options)
    assert torch.equal(out, plain(pair, inputs(world), **options))
    assert bool((out[0, -10:] % 2 == 1).all())


def test_a_length_criterion_of_the_caller_holds(world: SimpleNamespace) -> None:
    """It was taken for the one that `generate` makes itself, and dropped."""
    ids = inputs(world)
    length = ids["input_ids"].shape[1] + 6
    options = {"stopping_criteria": [MaxLengthCriteria(length)]}
    out = fast(world, ids, **options)
    assert torch.equal(out, plain(world, ids, **options))
    assert out.shape[1] == length


def test_a_criterion_on_a_batch_without_eos_needs_a_pad_token(world: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="Set pad_token_id"):
        fast(
            SimpleNamespace(**{**vars(world), "target": _without_special_ids(world.target)}),
            inputs(world, *PROMPTS),
            stopping_criteria=[StopAfter(30)],
        )


def _without_special_ids(model: Any) -> Any:
    model = copy.deepcopy(model)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("width", [1, 2])
def test_stop_strings_cut_as_generate_cuts_them(world: SimpleNamespace, width: int) -> None:
    """width: the stop string is split over so many tokens. transformers refuses its own for callables."""
    ids = inputs(world)
    start = ids["input_ids"].shape[1]
    new = plain(world, ids)[0, start:].tolist()
    at = next(i for i in range(5, 20) if "\ufffd" not in world.tokenizer.decode(new[i : i + width]))
    stop = world.tokenizer.decode(new[at : at + width])
    expected = plain(world, ids, stop_strings=[stop], tokenizer=world.tokenizer)
    assert expected.shape[1] < start + 24
    decode = dropmatch.hf.decoder(draft=world.draft, rule="exact", tokenizer=world.tokenizer, stop=["never", stop])
    assert torch.equal(plain(world, ids, custom_generate=decode), expected)
    criteria = [StopStringCriteria(world.tokenizer, [stop])]
    assert torch.equal(fast(world, ids, stopping_criteria=criteria), expected)


def test_stop_strings_given_to_generate_are_refused_by_transformers(world: SimpleNamespace) -> None:
    """Nothing is ignored: the user reads transformers' error, and our documentation says where they go instead."""
    with pytest.raises(ValueError, match="stop strings"):
        fast(world, inputs(world), stop_strings=["x"], tokenizer=world.tokenizer)
    assert "stop_strings" in (dropmatch.hf.decoder.__doc__ or "")


class Recorder:
    """A streamer that keeps all it is given."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


def test_a_streamer_gets_the_prompt_and_every_token_once(world: SimpleNamespace) -> None:
    ids = inputs(world)
    streamer = Recorder()
    decode = dropmatch.hf.decoder(draft=world.draft, rule="exact", streamer=streamer)
    out = plain(world, ids, custom_generate=decode, eos_token_id=eos_in(world, 9))
    assert streamer.puts[0] == ids["input_ids"][0].tolist()
    assert [token for put in streamer.puts for token in put] == out[0].tolist()
    assert streamer.ends == 1


def test_text_streamers_show_the_whole_text(world: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    ids = inputs(world)
    streamer = TextStreamer(world.tokenizer, skip_prompt=True)
    out = plain(world, ids, custom_generate=dropmatch.hf.decoder(world.draft, rule="exact", streamer=streamer))
    text = world.tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    assert capsys.readouterr().out == text + "\n"
    in_thread = TextIteratorStreamer(world.tokenizer, skip_prompt=True, timeout=30)
    decode = dropmatch.hf.decoder(draft=world.draft, rule="exact", streamer=in_thread)
    thread = threading.Thread(target=lambda: plain(world, ids, custom_generate=decode))
    thread.start()
    assert "".join(in_thread) == text
    thread.join()


def test_a_streamer_is_ended_when_decoding_fails(world: SimpleNamespace) -> None:
    """A TextIteratorStreamer's reader waits for the end, and would wait for ever."""
    streamer = Recorder()
    decode = dropmatch.hf.decoder(draft=world.draft, streamer=streamer)
    with pytest.raises(RuntimeError, match="on purpose"):
        plain(world, inputs(world), custom_generate=decode, logits_processor=[FailsAt(14)])
    assert streamer.ends == 1


def test_a_streamer_is_refused_for_a_batch(world: SimpleNamespace) -> None:
    decode = dropmatch.hf.decoder(draft=world.draft, streamer=Recorder())
    with pytest.raises(ConfigError, match="streamer"):
        plain(world, inputs(world, *PROMPTS), custom_generate=decode)


@pytest.mark.parametrize("rule", [*LOSSLESS, "dropmatch"])
def test_sampling_repeats_under_a_seed_and_differs_between_seeds(world: SimpleNamespace, rule: str) -> None:
    ids = inputs(world)
    options = {"do_sample": True, "temperature": 1.3, "top_k": 0}
    outputs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outputs.append(fast(world, ids, rule, **options))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    torch.manual_seed(5)
    decode = dropmatch.hf.decoder(draft=world.draft, rule=rule)
    twice = [plain(world, ids, custom_generate=decode, **options) for _ in range(2)]
    assert not torch.equal(*twice)


def test_a_seed_of_the_decoder_fixes_sampling(world: SimpleNamespace) -> None:
    decode = dropmatch.hf.decoder(draft=world.draft, rule="exact", seed=3)
    options = {"do_sample": True, "custom_generate": decode}
    assert torch.equal(plain(world, inputs(world), **options), plain(world, inputs(world), **options))


def test_sampling_by_the_exact_rule_depends_neither_on_drafter_nor_on_draft_length(world: SimpleNamespace) -> None:
    ids = inputs(world, *PROMPTS)
    outputs = set()
    for draft in (world.draft, world.stranger, "ngram"):
        for draft_length in (1, 3, 8):
            decode = dropmatch.hf.decoder(draft=draft, rule="exact", draft_length=draft_length, seed=11)
            out = plain(world, ids, custom_generate=decode, do_sample=True, temperature=1.5, top_p=0.9)
            outputs.add(tuple(out.flatten().tolist()))
    assert len(outputs) == 1


SEED, NUM_ROWS, MIN_P_VALUE = 20, 1200, 1e-4
"""One fixed seed each: a right sampler fails one of the eight cases with chance 8e-4, and then always."""

WARPERS: dict[str, dict[str, Any]] = {
    "temperature and top_k": {"temperature": 1.5, "top_k": 12},
    "top_p": {"temperature": 2.0, "top_k": 0, "top_p": 0.7},
    "min_p": {"temperature": 2.0, "top_k": 0, "min_p": 0.08},
    "a warper of the caller in front": {"temperature": 1.5, "top_k": 30, "logits_processor": [TopKLogitsWarper(7)]},
}


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("name", WARPERS)
def test_sampled_tokens_follow_the_warped_softmax(world: SimpleNamespace, name: str, rule: str) -> None:
    """Chi-square of the first token of many rows; three tokens are generated, so that drafts are judged."""
    options = dict(WARPERS[name])
    ids = inputs(world)
    processors = options.get("logits_processor", [])
    config = GenerationConfig(do_sample=True, **{k: v for k, v in options.items() if k != "logits_processor"})
    with torch.no_grad():
        scores = world.target(ids["input_ids"]).logits[:, -1]
    expected = world.target._get_logits_processor(
        config, input_ids_seq_length=1, encoder_input_ids=ids["input_ids"], logits_processor=processors, device="cpu"
    )(ids["input_ids"], scores).softmax(-1)[0]
    torch.manual_seed(SEED)
    decode = dropmatch.hf.decoder(draft=world.draft, rule=rule, draft_length=2)
    out = world.target.generate(
        **ids, custom_generate=decode, do_sample=True, max_new_tokens=3, num_return_sequences=NUM_ROWS, **options
    )
    assert out.shape == (NUM_ROWS, ids["input_ids"].shape[1] + 3)
    counts = out[:, ids["input_ids"].shape[1]].bincount(minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    is_rare = expected.double() * NUM_ROWS < 5
    seen = torch.cat([counts[~is_rare], counts[is_rare].sum()[None]])
    wanted = torch.cat([expected.double()[~is_rare], expected.double()[is_rare].sum()[None]]) * NUM_ROWS
    keep = wanted > 1e-9
    assert int(keep.sum()) >= 5
    wanted = wanted[keep] * seen.sum() / wanted[keep].sum()
    assert chisquare(seen[keep].numpy(), wanted.numpy()).pvalue > MIN_P_VALUE


def test_several_sequences_per_prompt_differ(world: SimpleNamespace) -> None:
    torch.manual_seed(SEED)
    ids = inputs(world, *PROMPTS[:2])
    out = fast(world, ids, "dropmatch", do_sample=True, temperature=2.0, num_return_sequences=3)
    assert len(out) == 6
    assert len({tuple(row) for row in out.tolist()}) == 6
    width = ids["input_ids"].shape[1]
    assert torch.equal(out[:, :width], ids["input_ids"].repeat_interleave(3, 0))


def test_a_dict_comes_back_where_it_is_asked_for(world: SimpleNamespace) -> None:
    ids = inputs(world)
    out = fast(world, ids, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain(world, ids))  # type: ignore[attr-defined]


def _embeds(world: SimpleNamespace, ids: dict[str, Tensor]) -> dict[str, Any]:
    return {"inputs_embeds": world.target.get_input_embeddings()(ids.pop("input_ids"))}


def _used_cache(world: SimpleNamespace, ids: dict[str, Tensor]) -> dict[str, Any]:
    with torch.no_grad():
        return {"cache": world.target(ids["input_ids"][:, :-1], use_cache=True).cache}


REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "output_scores": {"return_dict_in_generate": True, "output_scores": True},
    "output_logits": {"return_dict_in_generate": True, "output_logits": True},
    "output_attentions": {"return_dict_in_generate": True, "output_attentions": True},
    "output_hidden_states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "typical_p": {"do_sample": True, "typical_p": 0.5},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 0.01},
    "eta_cutoff": {"do_sample": True, "eta_cutoff": 0.01},
    "top_h": {"do_sample": True, "top_h": 0.5},
    "guidance_scale": {"guidance_scale": 1.5},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [5, 6]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "position_ids": {"position_ids": torch.arange(6)[None] + 3},
}


@pytest.mark.filterwarnings("ignore")  # transformers has its own remarks on some of these
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(world: SimpleNamespace, name: str) -> None:
    ids = inputs(world)
    options = dict(REFUSED[name])
    if name == "position_ids":
        options["position_ids"] = torch.arange(ids["input_ids"].shape[1])[None] + 3
    with pytest.raises(ConfigError, match=name):
        fast(world, ids, **options)


@pytest.mark.parametrize(("name", "make"), [("inputs_embeds", _embeds), ("cache", _used_cache)])
def test_inputs_that_would_be_ignored_are_refused(
    world: SimpleNamespace, name: str, make: Callable[..., dict[str, Any]]
) -> None:
    ids = inputs(world)
    with pytest.raises(ConfigError, match=name):
        fast(world, ids, **make(world, ids))


def test_right_padding_is_refused(world: SimpleNamespace) -> None:
    right = tiny.tokenizer()
    right.padding_side = "right"
    with pytest.raises(ConfigError, match="padding_side"):
        fast(world, dict(right(PROMPTS, return_tensors="pt", padding=True)))


def test_a_model_in_training_mode_is_refused(world: SimpleNamespace) -> None:
    model = copy.deepcopy(world.target).train()
    with pytest.raises(UnsupportedModelError, match=r"model\.eval"):
        fast(SimpleNamespace(**{**vars(world), "target": model}), inputs(world))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "js-div"}, UnknownNameError, "Did you mean 'js'"),
        ({"draft": "smollm2-135m"}, ConfigError, "loaded transformers model"),
        ({"draft": None}, ConfigError, "loaded transformers model"),
        ({"draft_length": -1}, ConfigError, "draft_length"),
        ({"num_paths": 0}, ConfigError, "num_paths"),
        ({"p_drop": 1.0}, ConfigError, "p_drop"),
        ({"p_drop": "auto"}, ConfigError, "tokenizer"),
        ({"seed": -4}, ConfigError, "seed"),
        ({"stop": ["x"]}, ConfigError, "tokenizer"),
        ({"stop": "END"}, ConfigError, "list of strings"),
        ({"stop": [""]}, ConfigError, "not empty"),
    ],
)
def test_bad_options_are_refused_when_the_decoder_is_made(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Not in the middle of the first call, after minutes of loading. stop="END" was taken for three stop strings."""
    with pytest.raises(error, match=message):
        dropmatch.hf.decoder(**options)


def test_models_and_configs_stay_as_they_were(world: SimpleNamespace) -> None:
    """transformers' assisted generation lets num_assistant_tokens drift from call to call."""

    def state() -> list[Any]:
        return [
            thing
            for model in (world.target, world.draft)
            for thing in (
                model.config.to_dict(),
                model.generation_config.to_dict(),
                {name: tensor.clone() for name, tensor in model.state_dict().items()},
                [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
                {key for module in model.modules() for key in vars(module)},
            )
        ]

    ids = inputs(world, *PROMPTS)
    before, expected = state(), plain(world, ids)
    config = GenerationConfig(max_new_tokens=9, do_sample=True, pad_token_id=0, eos_token_id=1)
    config_before = config.to_dict()
    for rule in (*LOSSLESS, "dropmatch"):
        fast(world, ids, rule)
        world.target.generate(
            **ids, generation_config=config, custom_generate=dropmatch.hf.decoder(draft=world.draft, rule=rule)
        )
    after = state()
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=0)
    torch.testing.assert_close(after[7], before[7], rtol=0, atol=0)
    assert [x for i, x in enumerate(after) if i not in (2, 7)] == [x for i, x in enumerate(before) if i not in (2, 7)]
    assert config.to_dict() == config_before
    assert torch.equal(plain(world, ids), expected)


class FailsAt(LogitsProcessor):
    """Raises at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.length:
            raise RuntimeError("on purpose")
        return scores


def test_a_decoder_is_used_again_also_after_an_exception(world: SimpleNamespace) -> None:
    decode = dropmatch.hf.decoder(draft=world.draft, rule="exact")
    long, short = inputs(world, *PROMPTS), inputs(world, PROMPTS[2])
    for ids in (long, short, long):
        assert torch.equal(plain(world, ids, custom_generate=decode), plain(world, ids))
        with pytest.raises(RuntimeError, match="on purpose"):
            plain(world, ids, custom_generate=decode, logits_processor=[FailsAt(ids["input_ids"].shape[1] + 3)])
    assert torch.equal(plain(world, short, custom_generate=decode), plain(world, short))


def test_one_decoder_serves_two_targets(world: SimpleNamespace) -> None:
    decode = dropmatch.hf.decoder(draft=world.draft, rule="exact")
    other = tiny.target(seed=9)
    ids = inputs(world)
    for model in (world.target, other, world.target):
        pair = SimpleNamespace(target=model)
        assert torch.equal(plain(pair, ids, custom_generate=decode), plain(pair, ids))


def test_the_target_as_its_own_drafter_keeps_every_token(world: SimpleNamespace) -> None:
    """Target and drafter shared one cache when they were one object."""
    ids = inputs(world, *PROMPTS[:2])
    decode = dropmatch.hf.decoder(draft=world.target, rule="exact", draft_length=5)
    assert torch.equal(plain(world, ids, custom_generate=decode), plain(world, ids))
    assert decode.stats.requests.tau == 6.0


@pytest.mark.parametrize("rule", LOSSLESS)
def test_prompt_ngrams_draft_without_a_model(world: SimpleNamespace, rule: str) -> None:
    ids = {name: torch.cat([t] * 3, dim=1) for name, t in inputs(world, *PROMPTS[:2]).items()}
    ids = {name: t[:, -30:] for name, t in ids.items()}
    ids["attention_mask"] = torch.ones_like(ids["attention_mask"])
    decode = dropmatch.hf.decoder(rule=rule)
    assert torch.equal(plain(world, ids, custom_generate=decode), plain(world, ids))
    assert decode.stats.requests.drafted > 0


@pytest.mark.parametrize("vocab_size", [300, 352])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_drafter_of_another_vocabulary_size_serves(world: SimpleNamespace, vocab_size: int, rule: str) -> None:
    ids = inputs(world, *PROMPTS)
    decode = dropmatch.hf.decoder(draft=tiny.stranger(vocab_size=vocab_size), rule=rule)
    assert torch.equal(plain(world, ids, custom_generate=decode), plain(world, ids))
    torch.manual_seed(SEED)
    sampled = plain(world, ids, custom_generate=decode, do_sample=True, temperature=3.0, top_k=0)
    assert int(sampled.max()) < 320


def test_a_drafter_with_too_few_positions_is_refused_before_it_runs(world: SimpleNamespace) -> None:
    """It failed in the middle, with the tokens so far lost."""
    config = GPT2Config(vocab_size=320, n_positions=24, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
    draft = GPT2LMHeadModel(config).eval()
    decode = dropmatch.hf.decoder(draft=draft, rule="exact")
    ids = inputs(world)
    with pytest.raises(ConfigError, match="24 positions"):
        plain(world, ids, custom_generate=decode)
    fits = {"max_new_tokens": 24 - ids["input_ids"].shape[1]}
    assert torch.equal(plain(world, ids, custom_generate=decode, **fits), plain(world, ids, **fits))


def test_a_target_is_decoded_up_to_its_last_position(world: SimpleNamespace) -> None:
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=320, n_positions=32, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5, eos_token_id=1
    )
    model = GPT2LMHeadModel(config).eval()
    pair = SimpleNamespace(target=model, draft=world.draft)
    ids = inputs(world)
    options = {"max_new_tokens": 32 - ids["input_ids"].shape[1], "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(fast(pair, ids, **options), plain(pair, ids, **options))


def test_p_drop_auto_is_settled_once_per_target(world: SimpleNamespace) -> None:
    decode = dropmatch.hf.decoder(draft=world.draft, p_drop="auto", tokenizer=world.tokenizer)
    ids = inputs(world)
    assert torch.equal(plain(world, ids, custom_generate=decode), plain(world, ids, custom_generate=decode))


def test_plain_rules_count_reasons_and_the_statistics_are_of_the_latest_call(world: SimpleNamespace) -> None:
    decode = dropmatch.hf.decoder(draft=world.draft, rule="exact")
    plain(world, inputs(world), custom_generate=decode, max_new_tokens=20)
    plain(world, inputs(world), custom_generate=decode, max_new_tokens=5)
    requests = decode.stats.requests
    assert requests.emitted == 5
    assert set(requests.reasons) <= {Reason.EXACT, Reason.BONUS, Reason.RECOVERED}
    assert not requests.lossy


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_agree(world: SimpleNamespace, attention: str) -> None:
    model = copy.deepcopy(world.target)
    model.set_attn_implementation(attention)
    pair = SimpleNamespace(target=model, draft=world.draft)
    ids = inputs(world, *PROMPTS)
    assert torch.equal(fast(pair, ids), plain(world, ids))


def test_a_processor_of_transformers_given_by_the_caller_takes_the_place_of_its_own(world: SimpleNamespace) -> None:
    ids = inputs(world, *PROMPTS)
    eos = eos_in(world, 2)
    own = MinNewTokensLengthLogitsProcessor(ids["input_ids"].shape[1], 8, eos, device="cpu")
    options = {"eos_token_id": eos, "logits_processor": [own]}
    assert torch.equal(fast(world, ids, **options), plain(world, ids, **options))
