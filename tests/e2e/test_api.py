"""`dropmatch.load` and what it returns, on a tiny pair in local folders."""

from __future__ import annotations

import functools
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import dropmatch
import tiny
from dropmatch import SamplingParams, SaturationWarning
from dropmatch.config import EngineConfig
from dropmatch.core.calibrate import PDropChoice
from dropmatch.core.reasons import Reason
from dropmatch.errors import (
    ConfigError,
    DropMatchError,
    ModelNotFoundError,
    TokenizerMismatchError,
    UnknownNameError,
    UnsupportedModelError,
)

PROMPT = "why is the sky blue"
GENTLE = 0.05
"""A p_drop that does not saturate the radius of a model this small."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyPair:
    return tiny.save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def decoder(pair: tiny.TinyPair) -> dropmatch.Decoder:
    return dropmatch.load(str(pair.target), str(pair.draft), p_drop=GENTLE)


@pytest.fixture(scope="module")
def exact(pair: tiny.TinyPair) -> dropmatch.Decoder:
    return dropmatch.load(str(pair.target), str(pair.draft), rule="exact")


def plain_ids(decoder: dropmatch.Decoder, prompt: list[int], count: int) -> list[int]:
    """transformers' own greedy tokens."""
    ids = torch.tensor([prompt])
    out = decoder.target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rule", ["exact", "lossless"])
@pytest.mark.parametrize("draft", ["folder", "ngram", "random", "none"])
def test_lossless_rules_give_the_tokens_of_generate(pair: tiny.TinyPair, rule: str, draft: str) -> None:
    decoder = dropmatch.load(str(pair.target), str(pair.draft) if draft == "folder" else draft, rule=rule)
    done = decoder.generate(PROMPT, max_new_tokens=30)
    assert done.tokens == plain_ids(decoder, decoder.encode(PROMPT), 30)
    assert len(done.reasons) == len(done.tokens) == done.stats.emitted
    assert done.prompt_tokens == len(decoder.encode(PROMPT))
    assert done.logprobs is None
    assert not done.stats.lossy


def test_text_is_that_of_the_tokens(decoder: dropmatch.Decoder) -> None:
    done = decoder.generate(PROMPT, max_new_tokens=30)
    assert done.text == decoder.tokenizer.decode(done.tokens, skip_special_tokens=True)
    assert done.finish_reason == "length"


def test_a_string_becomes_a_chat_message_and_chat_false_takes_it_as_it_is(decoder: dropmatch.Decoder) -> None:
    ids = decoder.encode(PROMPT)
    assert decoder.tokenizer.decode(ids) == f"<|user|>user: {PROMPT}<|end|><|user|>assistant: "
    assert decoder.encode([{"role": "user", "content": PROMPT}]) == ids
    assert decoder.encode(PROMPT, chat=False) == decoder.tokenizer(PROMPT)["input_ids"]


def test_every_form_of_a_prompt_gives_the_same_generation(exact: dropmatch.Decoder) -> None:
    """generate and stream had no chat=False; numpy integers and tensors were taken for messages."""
    ids = exact.encode(PROMPT, chat=False)
    expected = exact.generate(ids, max_new_tokens=8).tokens
    forms: list[Any] = [torch.tensor(ids), np.array(ids), list(np.array(ids)), tuple(ids)]
    for form in forms:
        assert exact.generate(form, max_new_tokens=8).tokens == expected
    assert exact.generate(PROMPT, chat=False, max_new_tokens=8).tokens == expected
    streamed = exact.stream(PROMPT, chat=False, max_new_tokens=8)
    assert [token for chunk in streamed for token in chunk.tokens] == expected
    assert exact.run([PROMPT], SamplingParams(max_new_tokens=8), chat=False).generations[0].tokens == expected


def test_without_a_chat_template_strings_are_plain_text_and_messages_are_refused(tmp_path: Path) -> None:
    pair = tiny.save_pair(tmp_path, chat=False)
    decoder = dropmatch.load(str(pair.target), "none")
    assert decoder.encode(PROMPT) == decoder.tokenizer(PROMPT)["input_ids"]
    for wrong in ([{"role": "user", "content": PROMPT}], None):
        with pytest.raises(ConfigError, match="no chat template"):
            decoder.encode(wrong or PROMPT, chat=True)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        (torch.tensor([], dtype=torch.int64), "empty"),
        (["one prompt", "another"], "several prompts go to run"),
        ({"role": "user", "content": "x"}, "list of messages"),
        ([{"content": "x"}], "'role' and 'content'"),
        ([1, "x"], "cannot be made of 1"),
        ([[1, 2]], "list of token ids"),
        ([True, False], "cannot be made of True"),
        ([5, 999], "999 is outside"),
        ([-1], "-1 is outside"),
    ],
)
def test_prompts_that_make_no_sense_are_refused_in_words(decoder: dropmatch.Decoder, prompt: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder.generate(prompt)


def test_an_empty_text_is_refused_where_it_gives_no_token(decoder: dropmatch.Decoder) -> None:
    with pytest.raises(ConfigError, match="prompt is empty"):
        decoder.generate("", chat=False)
    assert decoder.generate("", max_new_tokens=2).tokens  # an empty message is still a message


def test_one_text_given_to_run_is_not_taken_for_a_list_of_letters(decoder: dropmatch.Decoder) -> None:
    with pytest.raises(ConfigError, match="list of prompts"):
        decoder.run(PROMPT)


def test_the_stream_gives_the_same_text_and_tokens_in_pieces(decoder: dropmatch.Decoder) -> None:
    done = decoder.generate(PROMPT, max_new_tokens=40)
    chunks = list(decoder.stream(PROMPT, max_new_tokens=40))
    assert len(chunks) > 3
    assert [t for chunk in chunks for t in chunk.tokens] == done.tokens
    assert [r for chunk in chunks for r in chunk.reasons] == done.reasons
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1].stats is not None


def test_bad_arguments_of_stream_raise_before_the_first_chunk(decoder: dropmatch.Decoder) -> None:
    with pytest.raises(ConfigError, match="temprature"):
        decoder.stream(PROMPT, temprature=1.0)
    with pytest.raises(ConfigError, match="empty"):
        decoder.stream([])


def test_a_stream_given_up_early_leaves_nothing_behind(exact: dropmatch.Decoder) -> None:
    expected = exact.generate(PROMPT, max_new_tokens=20).tokens
    stream = exact.stream(PROMPT, max_new_tokens=200)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert exact.generate(PROMPT, max_new_tokens=20).tokens == expected
    assert exact.target.lengths == []


def test_ctrl_c_in_the_middle_leaves_the_decoder_usable(
    exact: dropmatch.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = exact.generate(PROMPT, max_new_tokens=20).tokens
    body = type(exact.target.model.model)
    forward, calls = body.forward, []

    @functools.wraps(forward)
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 9:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(body, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            for _ in exact.stream(PROMPT, max_new_tokens=50):
                pass
    assert len(calls) == 9
    assert exact.generate(PROMPT, max_new_tokens=20).tokens == expected


def test_calls_of_one_decoder_may_overlap(exact: dropmatch.Decoder) -> None:
    """All engines shared the caches of the loaded models: a second call ruined the first, or failed."""
    other = "def area(width, height)"
    expected = [exact.generate(prompt, max_new_tokens=25).tokens for prompt in (PROMPT, other)]
    got: list[list[int]] = [[], []]
    streams = [exact.stream(prompt, max_new_tokens=25) for prompt in (PROMPT, other)]
    for chunks in zip(*streams, strict=False):
        for tokens, chunk in zip(got, chunks, strict=True):
            tokens.extend(chunk.tokens)
        assert exact.generate(PROMPT, max_new_tokens=3).tokens == expected[0][:3]
    for tokens, stream in zip(got, streams, strict=True):
        tokens.extend(token for chunk in stream for token in chunk.tokens)
    for tokens, wanted in zip(got, expected, strict=True):
        assert wanted[: len(tokens)] == tokens
        assert len(tokens) >= len(wanted) - 6


@pytest.mark.parametrize("rule", ["exact", "lossless", "dropmatch"])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_many_prompts_at_once_equal_single_runs(decoder: dropmatch.Decoder, rule: str, temperature: float) -> None:
    prompts = [PROMPT, "a train", "def area(width, height): return width * height; the men carried the nets"]
    params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=4)
    run = decoder.run(prompts, params, engine=decoder.engine(rule=rule))
    singles = [decoder.run([prompt], params, engine=decoder.engine(rule=rule)) for prompt in prompts]
    assert [g.tokens for g in run.generations] == [s.generations[0].tokens for s in singles]
    assert [g.reasons for g in run.generations] == [s.generations[0].reasons for s in singles]
    assert run.stats.requests.emitted == sum(s.stats.requests.emitted for s in singles)


def test_more_prompts_than_the_batch_holds_wait_and_come_back_in_order(decoder: dropmatch.Decoder) -> None:
    prompts = [PROMPT, "a train", "def", "the harbour", "so how fast"]
    config = EngineConfig(max_batch=2)
    run = decoder.run(prompts, SamplingParams(max_new_tokens=7), engine=decoder.engine(config=config))
    assert [g.tokens for g in run.generations] == [decoder.generate(p, max_new_tokens=7).tokens for p in prompts]


def test_no_prompts_give_no_generations(decoder: dropmatch.Decoder) -> None:
    run = decoder.run([])
    assert run.generations == []
    json.dumps(run.stats.to_json(), allow_nan=False)


def test_a_stop_string_cuts_text_tokens_and_logprobs(exact: dropmatch.Decoder) -> None:
    whole = exact.generate(PROMPT, max_new_tokens=30, chat=False)
    at = next(i for i in range(6, 25) if "\ufffd" not in exact.tokenizer.decode(whole.tokens[i : i + 2]))
    stop = exact.tokenizer.decode(whole.tokens[at : at + 2])
    assert stop not in exact.tokenizer.decode(whole.tokens[: at + 1])
    done = exact.generate(PROMPT, chat=False, max_new_tokens=30, stop=(stop,), logprobs=True)
    assert done.finish_reason == "stop"
    assert done.tokens == whole.tokens[: at + 2]
    assert done.text == exact.tokenizer.decode(whole.tokens[:at])
    assert done.logprobs is not None
    assert len(done.logprobs) == len(done.reasons) == len(done.tokens) == done.stats.emitted
    kept = exact.generate(PROMPT, chat=False, max_new_tokens=30, stop=(stop,), include_stop=True)
    assert kept.text == done.text + stop


LOGPROB_TOLERANCE = 1e-4
"""Float32 over batches of other shapes."""


def test_logprobs_are_those_of_the_target(decoder: dropmatch.Decoder) -> None:
    ids = decoder.encode(PROMPT)
    done = decoder.generate(PROMPT, max_new_tokens=15, logprobs=True)
    with torch.no_grad():
        logits = decoder.target.model(torch.tensor([ids + done.tokens])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(done.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(done.logprobs), expected, atol=LOGPROB_TOLERANCE, rtol=0)


def test_eos_of_the_model_ends_a_row_and_an_empty_tuple_ignores_it(exact: dropmatch.Decoder) -> None:
    tokens = exact.generate(PROMPT, max_new_tokens=12).tokens
    done = exact.generate(PROMPT, max_new_tokens=12, eos_ids=(tokens[5],))
    assert done.tokens == tokens[: tokens.index(tokens[5]) + 1]
    assert done.finish_reason == "eos"
    assert exact.eos_ids == {tiny.EOS}
    assert exact.generate(PROMPT, max_new_tokens=12, eos_ids=()).tokens == tokens


def test_an_eos_id_that_the_model_does_not_have_does_no_harm(exact: dropmatch.Decoder) -> None:
    """Such ids come with configs of padded vocabularies; with min_new_tokens they raised an IndexError."""
    done = exact.generate(PROMPT, max_new_tokens=8, min_new_tokens=4, eos_ids=(5000, -1))
    assert done.tokens == exact.generate(PROMPT, max_new_tokens=8, eos_ids=()).tokens


def test_threads_may_share_a_decoder(exact: dropmatch.Decoder) -> None:
    prompts = [PROMPT, "a train", "def area(width, height)", "the harbour"]
    expected = [exact.generate(prompt, max_new_tokens=20).tokens for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda prompt: exact.generate(prompt, max_new_tokens=20).tokens, prompts * 3))
    assert got == expected * 3


def test_a_processor_that_raises_leaves_the_decoder_usable(exact: dropmatch.Decoder) -> None:
    def fail(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")

    expected = exact.generate(PROMPT, max_new_tokens=8).tokens
    with pytest.raises(RuntimeError, match="on purpose"):
        exact.run([PROMPT, "a train"], SamplingParams(processors=(fail,)))
    assert exact.generate(PROMPT, max_new_tokens=8).tokens == expected


def test_params_and_options_go_together(decoder: dropmatch.Decoder) -> None:
    params = SamplingParams(max_new_tokens=50, temperature=1.0, seed=3)
    done = decoder.generate(PROMPT, params, max_new_tokens=9)
    assert done.tokens == decoder.generate(PROMPT, replace(params, max_new_tokens=9)).tokens
    assert len(done.tokens) == 9
    assert params.max_new_tokens == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 5}, "Unknown sampling option 'max_tokens'. Allowed: .*max_new_tokens"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": "END"}, "tuple of strings"),
        ({"stop": None}, "tuple of strings"),
        ({"temperature": None}, "temperature=None is not allowed. Give a number"),
        ({"top_p": "0.9"}, "top_p='0.9' is not allowed. Give a number"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed=.* out of range"),
        ({"suppress_tokens": (320,)}, "suppress_tokens has 320"),
        ({"suppress_tokens": (-1,)}, "suppress_tokens has -1"),
        ({"rule": "js-div"}, "Did you mean 'js'"),
    ],
)
def test_bad_sampling_options_are_named(decoder: dropmatch.Decoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder.generate(PROMPT, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "dropmach"}, UnknownNameError, "Did you mean 'dropmatch"),
        ({"rule": "lossless+js"}, ConfigError, "'exact' in its place"),
        ({"p_drop": 1.5}, ConfigError, "p_drop"),
        ({"p_drop": "automatic"}, UnknownNameError, "Did you mean 'auto'"),
        ({"num_paths": 0}, ConfigError, "num_paths"),
        ({"draft_length": -1}, ConfigError, "draft_length"),
        ({"max_batch": 0}, ConfigError, "max_batch"),
        ({"seed": -1}, ConfigError, "seed"),
        ({"rule": dropmatch.TargetMatch(), "rule_options": dropmatch.RuleOptions()}, ConfigError, "rule_options"),
    ],
)
def test_bad_options_of_load_are_refused_before_any_weights_are_read(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dropmatch.load("/no/such/folder", **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "int4"}, UnknownNameError, "dtype"),
        ({"device": "gpu"}, ConfigError, "no device"),
        ({"device": "cuda:99"}, ConfigError, "cuda:99"),
        ({"device": "cpu", "device_map": "auto"}, ConfigError, "exclude each other"),
    ],
)
def test_bad_dtypes_and_devices_are_refused(
    pair: tiny.TinyPair, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        dropmatch.load(str(pair.target), "none", **options)


def test_dtype_and_device_are_taken(pair: tiny.TinyPair) -> None:
    decoder = dropmatch.load(str(pair.target), str(pair.draft), dtype="bfloat16", device="cpu", p_drop=GENTLE)
    assert decoder.target.dtype == torch.bfloat16
    assert decoder.drafter.model.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert len(decoder.generate(PROMPT, max_new_tokens=12, eos_ids=()).tokens) == 12


def test_a_device_map_is_taken(pair: tiny.TinyPair, exact: dropmatch.Decoder) -> None:
    decoder = dropmatch.load(str(pair.target), "ngram", rule="exact", device_map={"": "cpu"})
    assert decoder.generate(PROMPT, max_new_tokens=12).tokens == exact.generate(PROMPT, max_new_tokens=12).tokens


def test_a_draft_that_reads_other_tokens_is_refused(pair: tiny.TinyPair, tmp_path: Path) -> None:
    other = tiny.save(tmp_path, tiny.target(), lines=("other words altogether, and many of these",))
    with pytest.raises(TokenizerMismatchError, match="do not share a tokenizer: id"):
        dropmatch.load(str(pair.target), other)


def test_a_draft_of_another_vocabulary_size_is_fine_with_the_same_tokenizer(
    pair: tiny.TinyPair, exact: dropmatch.Decoder, tmp_path: Path
) -> None:
    stranger = tiny.save(tmp_path, tiny.target(seed=5, vocab_size=384))
    decoder = dropmatch.load(str(pair.target), stranger, rule="exact")
    assert decoder.generate(PROMPT, max_new_tokens=12).tokens == exact.generate(PROMPT, max_new_tokens=12).tokens


def test_the_target_folder_as_draft_keeps_every_token(pair: tiny.TinyPair) -> None:
    for rule in ("exact", "js", "dropmatch"):
        decoder = dropmatch.load(str(pair.target), str(pair.target), rule=rule, p_drop=GENTLE)
        done = decoder.generate(PROMPT, max_new_tokens=24)
        assert done.stats.tau == 6.0, rule
        assert done.tokens == plain_ids(decoder, decoder.encode(PROMPT), 24)


def test_missing_and_unfit_models_are_named(tmp_path: Path, pair: tiny.TinyPair) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        dropmatch.load(str(tmp_path / "no such folder"))
    tiny.target().save_pretrained(tmp_path / "bare")
    with pytest.raises(ModelNotFoundError, match="tokenizer"):
        dropmatch.load(str(tmp_path / "bare"))
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text('{"model_type": "bert"}')
    tiny.tokenizer().save_pretrained(tmp_path / "encoder")
    with pytest.raises(UnsupportedModelError, match="encoder-only"):
        dropmatch.load(str(tmp_path / "encoder"))
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        dropmatch.load(str(pair.target), str(tmp_path / "nowhere"))


def save_gpt2(folder: Path, positions: int) -> str:
    """A model whose positions end. Returns the folder."""
    torch.manual_seed(3)
    config = GPT2Config(vocab_size=320, n_positions=positions, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5)
    model = GPT2LMHeadModel(config)
    model.generation_config.eos_token_id = None
    return tiny.save(folder, model)


def test_a_huge_max_new_tokens_ends_at_the_last_position(tmp_path: Path, pair: tiny.TinyPair) -> None:
    folder = save_gpt2(tmp_path / "gpt2", 40)
    for draft in ("none", "ngram", str(pair.draft), folder):
        decoder = dropmatch.load(folder, draft, rule="exact")
        done = decoder.generate("the harbour", chat=False, max_new_tokens=10**6, eos_ids=())
        assert done.prompt_tokens + len(done.tokens) == 40, draft
        assert done.finish_reason == "length"
    with pytest.raises(ConfigError, match="no room"):
        decoder.generate([5] * 40)
    with pytest.raises(ConfigError, match="no room"):
        decoder.run([PROMPT, [5] * 400])
    assert len(decoder.generate([5] * 39).tokens) == 1


def test_a_draft_with_fewer_positions_limits_the_row(tmp_path: Path, pair: tiny.TinyPair) -> None:
    """It failed in the middle, with the tokens so far lost."""
    decoder = dropmatch.load(str(pair.target), save_gpt2(tmp_path / "gpt2", 40), rule="exact")
    done = decoder.generate("the harbour", chat=False, max_new_tokens=500, eos_ids=())
    assert done.prompt_tokens + len(done.tokens) == 40


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose radius is near its ceiling at the paper's p_drop of 0.3."""
    return tiny.save(tmp_path_factory.mktemp("sharp"), tiny.target(scale=1.0))


def test_random_drafts_on_a_tiny_model_warn_that_the_radius_saturates(sharp: str) -> None:
    decoder = dropmatch.load(sharp, "random")
    with pytest.warns(SaturationWarning, match="p_drop='auto'"):
        decoder.generate(PROMPT, max_new_tokens=80, eos_ids=())


def test_p_drop_auto_keeps_under_one_in_a_hundred_random_tokens(sharp: str) -> None:
    decoder = dropmatch.load(sharp, "random", p_drop="auto")
    assert decoder.p_drop_choice is not None
    assert decoder.dropout.p_drop == decoder.p_drop_choice.p_drop < 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("error", SaturationWarning)
        stats = decoder.run([PROMPT, "a train"], SamplingParams(max_new_tokens=120, eos_ids=())).stats.requests
    assert stats.drafted_at[0] > 200
    assert stats.accepted_at[0] < stats.drafted_at[0] / 100


def test_p_drop_auto_serves_a_model_with_few_positions(tmp_path: Path) -> None:
    """The built-in text has more tokens than such a model has positions."""
    decoder = dropmatch.load(save_gpt2(tmp_path, 40), "none", p_drop="auto")
    assert 0 < float(decoder.dropout.p_drop) <= 0.3


def test_a_guard_keeps_out_tokens_that_the_target_finds_unlikely(pair: tiny.TinyPair) -> None:
    options = dropmatch.RuleOptions(guard_prob=0.05)
    stats = {
        guard: dropmatch.load(str(pair.target), str(pair.draft), p_drop=0.2, rule_options=guard)
        .generate(PROMPT, max_new_tokens=120, eos_ids=())
        .stats
        for guard in (options, None)
    }
    assert any(token.prob < 0.05 for token in stats[None].lossy)
    assert all(token.prob >= 0.05 for token in stats[options].lossy)


def test_statistics_say_when_speculation_does_not_pay(pair: tiny.TinyPair, tmp_path: Path) -> None:
    stranger = tiny.save(tmp_path, tiny.target(seed=5))
    decoder = dropmatch.load(str(pair.target), stranger, rule="exact", draft_length=10)
    stats = decoder.run([PROMPT], SamplingParams(max_new_tokens=12, eos_ids=())).stats
    assert stats.predicted_speedup < 1.0
    assert "does not pay" in (stats.hint() or "")
    plain = decoder.run([PROMPT], SamplingParams(max_new_tokens=4), engine=decoder.engine(drafter=None)).stats
    assert plain.hint() is None


def test_statistics_are_strict_json(decoder: dropmatch.Decoder) -> None:
    run = decoder.run([PROMPT], SamplingParams(max_new_tokens=1))
    for stats in (run.stats, run.generations[0].stats, decoder.engine().stats):
        json.dumps(stats.to_json(), allow_nan=False)


def test_reasons_of_a_lossy_rule_are_of_its_own(decoder: dropmatch.Decoder) -> None:
    done = decoder.generate(PROMPT, max_new_tokens=100, eos_ids=())
    allowed = {Reason.EXACT, Reason.JS, Reason.MAJORITY, Reason.BONUS, Reason.RECOVERED}
    assert {Reason.EXACT, Reason.RECOVERED} <= set(done.reasons) <= allowed


def test_every_error_is_of_one_family() -> None:
    for error in (ConfigError, UnknownNameError, ModelNotFoundError, TokenizerMismatchError, UnsupportedModelError):
        assert issubclass(error, DropMatchError)


def test_an_unsure_draft_model_drafts_less_and_changes_no_lossless_token(
    pair: tiny.TinyPair, exact: dropmatch.Decoder
) -> None:
    cautious = dropmatch.load(str(pair.target), str(pair.draft), rule="exact", min_confidence=0.5)
    params = dropmatch.SamplingParams(max_new_tokens=40, eos_ids=())
    careful, usual = (decoder.run(["the harbour"], params) for decoder in (cautious, exact))
    assert careful.generations[0].tokens == usual.generations[0].tokens
    assert careful.stats.requests.drafted < usual.stats.requests.drafted


def test_options_of_draft_models_are_refused_without_one(pair: tiny.TinyPair) -> None:
    for options in ({"draft_weights": "int4"}, {"min_confidence": 0.5}):
        with pytest.raises(dropmatch.DropMatchError, match="has no weights"):
            dropmatch.load(str(pair.target), "ngram", **options)


def test_int4_needs_a_bfloat16_draft_model(pair: tiny.TinyPair) -> None:
    with pytest.raises(dropmatch.DropMatchError, match="must be bfloat16 on a CPU"):
        dropmatch.load(str(pair.target), str(pair.draft), draft_weights="int4")


def test_a_shortlist_is_passed_on_to_the_heads(pair: tiny.TinyPair) -> None:
    for given, expected in (({}, "shortlist"), ({"heads": "full"}, "full")):
        decoder = dropmatch.load(str(pair.target), str(pair.draft), **given)  # type: ignore[arg-type]
        assert decoder.engine().head.config.heads == expected
    with pytest.raises(dropmatch.DropMatchError, match="Available: full, shortlist"):
        dropmatch.load(str(pair.target), str(pair.draft), heads="short")


def test_a_draft_model_in_int4_decodes_losslessly(tmp_path: Path) -> None:
    # bfloat16 forwards over one and over several tokens round differently, so a near-tie may flip: the prompt has none
    folders = tmp_path / "target", tmp_path / "draft"
    for folder, scale in zip(folders, (0.3, 0.31), strict=True):
        tiny.target(hidden_size=64, scale=scale).bfloat16().save_pretrained(folder)
        tiny.tokenizer().save_pretrained(folder)
    plain = dropmatch.load(str(folders[0]), "none")
    drafted = dropmatch.load(str(folders[0]), str(folders[1]), rule="exact", draft_weights="int4")
    params = dropmatch.SamplingParams(max_new_tokens=12, eos_ids=())
    expected, got = (decoder.run(["the harbour"], params) for decoder in (plain, drafted))
    assert got.generations[0].tokens == expected.generations[0].tokens
    assert got.stats.requests.drafted > 0


def test_a_draft_model_in_int8_decodes_losslessly(pair: tiny.TinyPair, exact: dropmatch.Decoder) -> None:
    rounded = dropmatch.load(str(pair.target), str(pair.draft), rule="exact", draft_weights="int8")
    params = dropmatch.SamplingParams(max_new_tokens=40, eos_ids=())
    expected, got = (decoder.run(["the harbour", "a"], params) for decoder in (exact, rounded))
    assert [g.tokens for g in got.generations] == [g.tokens for g in expected.generations]
    assert got.stats.requests.accepted > 0


def test_auto_takes_the_expected_radius_under_a_rule_in_closed_form(pair: tiny.TinyPair) -> None:
    def choice(rule: str, p_drop: Any) -> PDropChoice:
        decoder = dropmatch.load(str(pair.target), str(pair.draft), rule=rule, p_drop=p_drop)
        assert decoder.p_drop_choice is not None
        assert decoder.dropout.p_drop == decoder.p_drop_choice.p_drop
        return decoder.p_drop_choice

    assert not choice("dropmatch", "auto").is_expected
    assert choice("dropmatch-expected", "auto").is_expected
    assert choice("dropmatch", "auto-expected") == choice("dropmatch-expected", "auto")
