"""From names to models: what is found where, what is refused and how, and the check of two tokenizers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from dropmatch.errors import (
    ConfigError,
    IntegrityError,
    ModelNotFoundError,
    TokenizerMismatchError,
    UnknownNameError,
    UnsupportedModelError,
)
from dropmatch.hf import loading, pairs
from dropmatch.hf.loading import check_tokenizers, load_model, load_tokenizer, resolve_model
from weights import byte_tokenizer, save_llama, write_gguf


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Empty caches and no network."""
    monkeypatch.setenv("DROPMATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def unreachable(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "llama")


# Names


def test_a_folder_is_taken_as_it_is(llama: Path) -> None:
    assert resolve_model(llama) == resolve_model(str(llama)) == llama


def test_a_gguf_and_a_folder_with_one_are_converted(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "mine.gguf")
    folder = resolve_model(path)
    assert folder.parent == tmp_path / "cache" / "models"
    assert resolve_model(tmp_path) == folder
    assert load_model(path).config.model_type == "llama"


def test_a_folder_with_several_ggufs_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files.*a\.gguf"):
        resolve_model(tmp_path)


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"neither a config\.json nor a \.gguf"):
        resolve_model(tmp_path / "empty")


def test_a_file_that_is_no_gguf_is_refused(llama: Path) -> None:
    with pytest.raises(IntegrityError, match="not a GGUF"):
        resolve_model(llama / "config.json")


def test_a_pair_members_name_is_its_model(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    monkeypatch.setattr(loading, "ensure_model", lambda model: llama if model.name == "smollm2-135m" else None)
    assert resolve_model("smollm2-135m") == llama


def test_a_packaged_hub_id_falls_back_to_the_package_and_says_so(
    monkeypatch: pytest.MonkeyPatch, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pairs, "ensure_packaged", lambda model, **_: llama)
    assert resolve_model("Qwen/Qwen2.5-Coder-0.5B-Instruct") == llama
    (record,) = caplog.records
    assert "no route to host" in record.getMessage()
    assert "qwen2.5-coder-0.5b" in record.getMessage()


def test_a_hub_id_out_of_reach_says_what_was_tried_and_what_to_do() -> None:
    with pytest.raises(ModelNotFoundError) as error:
        resolve_model("some/model")
    for part in ("no folder 'some/model'", "not in the local hub cache", "no route to host", "Give a model folder"):
        assert part in str(error.value)


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(ModelNotFoundError, match=r"Did you mean 'qwen2\.5-coder-1\.5b'"):
        resolve_model("qwen2.5-coder-15b")


@pytest.mark.parametrize("name", ["/no/such/folder", "missing.gguf", "a/b/c", "", "../x", "a..b"])
def test_what_cannot_be_a_hub_id_is_not_asked_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as error:
        resolve_model(name)
    assert "no route to host" not in str(error.value)


# Models


def test_a_loaded_model_is_ready_to_decode(llama: Path) -> None:
    model = load_model(llama)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "sdpa"
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", torch.float32])
def test_the_dtype_can_be_chosen(llama: Path, dtype: torch.dtype | str) -> None:
    assert load_model(llama, dtype=dtype, device="cpu").dtype == torch.float32


def test_wrong_options_name_what_is_allowed(llama: Path) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'float16'"):
        load_model(llama, dtype="flaot16")
    with pytest.raises(ConfigError, match="is no device"):
        load_model(llama, device="gpu")
    with pytest.raises(ConfigError, match="CUDA devices"):
        load_model(llama, device="cuda:99")
    with pytest.raises(ConfigError, match="exclude each other"):
        load_model(llama, device="cpu", device_map="auto")


def test_a_device_map_places_the_model(llama: Path) -> None:
    assert load_model(llama, device_map={"": "cpu"}).device == torch.device("cpu")


def test_truncated_weights_are_refused(llama: Path) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(IntegrityError, match="cannot be read"):
        load_model(llama)


def test_missing_weights_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"no file named model\.safetensors"):
        load_model(llama)


def test_a_missing_tensor_is_refused(llama: Path) -> None:
    """transformers would fill it with random numbers, warn, and go on."""
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=r"lacks 1 .*layers\.1\.mlp\.up_proj"):
        load_model(llama)


def test_weights_of_another_size_are_refused(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(IntegrityError, match="cannot be read"):
        load_model(llama)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": '])
def test_a_damaged_config_is_refused(llama: Path, text: str) -> None:
    (llama / "config.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"config\.json"):
        load_model(llama)


def test_encoders_are_refused(tmp_path: Path) -> None:
    size = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    BertForMaskedLM(BertConfig(vocab_size=20, **size)).save_pretrained(tmp_path / "bert")
    with pytest.raises(UnsupportedModelError, match=r"encoder-only model \(bert\)"):
        load_model(tmp_path / "bert")
    T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=16, d_kv=8, num_heads=2, num_layers=1)).save_pretrained(
        tmp_path / "t5"
    )
    with pytest.raises(UnsupportedModelError, match=r"encoder-decoder model \(t5\)"):
        load_model(tmp_path / "t5")


def test_an_unknown_model_type_is_refused(llama: Path) -> None:
    (llama / "config.json").write_text('{"model_type": "newest"}')
    with pytest.raises(UnsupportedModelError, match="newest"):
        load_model(llama)


# Tokenizers


def test_a_tokenizer_reads_back_what_it_wrote(llama: Path) -> None:
    tokenizer = load_tokenizer(llama)
    text = "def f(x):\n\treturn 12  # 日本 🙂\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_folder_without_tokenizer_says_so(llama: Path) -> None:
    for path in llama.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelNotFoundError, match="no tokenizer"):
        load_tokenizer(llama)


def test_a_damaged_tokenizer_is_refused(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{")
    with pytest.raises(IntegrityError, match="tokenizer"):
        load_tokenizer(llama)


def test_equal_tokenizers_pass() -> None:
    check_tokenizers(byte_tokenizer(), byte_tokenizer())


def test_padding_only_the_models_vocabulary_is_fine(llama: Path) -> None:
    model = load_model(llama)
    model.resize_token_embeddings(model.config.vocab_size + 13)
    model.save_pretrained(llama)
    check_tokenizers(load_tokenizer(llama), byte_tokenizer())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": ["zz"]}, "id 257 is '<|endoftext|>' for the target and 'zz' for the draft"),
        ({"digits": True}, "for the draft"),
    ],
    ids=["an id that stands for another token", "another splitting of digits"],
)
def test_the_first_difference_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerMismatchError) as error:
        check_tokenizers(byte_tokenizer(), byte_tokenizer(**changes))
    assert message in str(error.value)
    assert "n-gram drafter" in str(error.value)


def test_a_token_that_only_the_draft_has_is_named() -> None:
    draft = byte_tokenizer()
    draft.add_tokens(["<think>"])
    with pytest.raises(TokenizerMismatchError, match="id 260 is no token for the target and '<think>' for the draft"):
        check_tokenizers(byte_tokenizer(), draft)
