"""GGUF files become ordinary folders of safetensors, once, and are loaded from there ever after.

Knows transformers and the cache folder; nothing of pairs or packages. Its three traps are: embedding and head come out
of a GGUF in two quantisations although the model ties them; the loaded model counts as quantised and will not be
saved; the tokenizer misses what the file format cannot say (normalisation, digit splitting, unused padding tokens).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from dropmatch.errors import IntegrityError, ModelNotFoundError, UnsupportedModelError
from dropmatch.provenance import cache_dir

_UNUSED = 5  # gguf.TokenType.UNUSED: padding of the vocabulary, no token of the upstream tokenizer
# Two quantisations of one matrix have a cosine near 1 in every row, two trained apart are near 0.
_TIED_COSINE = 0.9
# Upstream marks these as ordinary added tokens, a GGUF marks them as control tokens.
_QWEN_NOT_SPECIAL = frozenset(
    ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
)


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a GGUF says and transformers drops: pre-tokenizer name, padding ids, end-of-turn id, context length."""

    pre_tokenizer: str
    unused_ids: frozenset[int]
    end_of_turn_id: int | None
    context_length: int | None


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def folder_in_one_step(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` on success and removed on any failure.

    The caller holds the lock of `folder`; what an earlier, killed process left behind is removed first.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def lock_for(name: str) -> FileLock:
    """The lock between processes that make the cache entry `name`."""
    folder = cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / f"{name}.lock")


def ensure_converted(path: Path) -> Path:
    """Folder of the converted user's file, made on first use; keyed by content, so a changed file is converted anew."""
    _check_is_gguf(path)
    name = f"{path.stem}-{file_sha256(path)[:12]}"
    folder = cache_dir() / "models" / name
    with lock_for(name):
        if not folder.exists():
            convert_gguf(path, folder)
    return folder


def convert_gguf(path: Path, out_dir: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Dequantise a GGUF and write model, tokenizer and generation config to `out_dir`, whole or not at all.

    Peak memory is about three times the written size. The caller holds the lock of `out_dir`.
    Raises IntegrityError for a file that is no GGUF, UnsupportedModelError for an architecture that is unknown.
    """
    _check_is_gguf(path)
    _check_packages()
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    facts = read_facts(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
    except (ValueError, KeyError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"transformers cannot read {path}: {error}\nUse the model's original weights instead of a GGUF."
        ) from error
    tokenizer = restore_tokenizer(tokenizer, facts)
    tie_head(model)
    model.hf_quantizer = None  # the weights are dense by now; the loader's mark would forbid save_pretrained
    # Greedy unless the caller samples: upstream's sampling settings are not in the file and not wanted here.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=_end_ids(tokenizer, facts),
        pad_token_id=tokenizer.pad_token_id,
    )
    with folder_in_one_step(out_dir) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def read_facts(path: Path) -> GgufFacts:
    """Read from the header what from_pretrained ignores."""
    from gguf import GGUFReader

    try:
        fields = GGUFReader(path).fields
    except (ValueError, IndexError, OverflowError) as error:
        raise IntegrityError(f"{path} is a damaged GGUF file: {error}\nDownload it again.") from error

    def value(key: str, default: Any = None) -> Any:
        return fields[key].contents() if key in fields else default

    types = value("tokenizer.ggml.token_type", [])
    return GgufFacts(
        pre_tokenizer=value("tokenizer.ggml.pre", ""),
        unused_ids=frozenset(i for i, kind in enumerate(types) if kind == _UNUSED),
        end_of_turn_id=value("tokenizer.ggml.eot_token_id"),
        context_length=value(f"{value('general.architecture')}.context_length"),
    )


def restore_tokenizer(tokenizer: Any, facts: GgufFacts) -> Any:
    """The tokenizer as upstream has it: without padding tokens, with its normaliser, digit splitting and template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    is_qwen = facts.pre_tokenizer == "qwen2"
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, dict):  # a BPE; a unigram's list keeps its ids by position
        spec["model"]["vocab"] = {token: i for token, i in vocabulary.items() if i not in facts.unused_ids}
    if is_qwen:
        spec["normalizer"] = {"type": "NFC"}
        for token in spec["added_tokens"]:
            token["special"] = token["special"] and token["content"] not in _QWEN_NOT_SPECIAL
    if facts.pre_tokenizer == "smollm":
        digits = {"type": "Digits", "individual_digits": True}
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, spec["pre_tokenizer"]]}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)),
        bos_token=None if is_qwen else tokenizer.bos_token,  # Qwen has none; the file names a stand-in
        eos_token=tokenizer.eos_token,
        unk_token=tokenizer.unk_token,
        pad_token=tokenizer.pad_token,
        chat_template=tokenizer.chat_template,
        model_max_length=facts.context_length,
        clean_up_tokenization_spaces=False,
    )


def tie_head(model: Any) -> None:
    """Tie embedding and head where they are two quantisations of one matrix.

    Many files store a tied matrix twice, coarse for the embedding and finer for the head. The head's copy stays.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is head.weight or embedding.weight.shape != head.weight.shape:
        return
    rows = [weight.detach()[::16].float() for weight in (embedding.weight, head.weight)]  # [V / 16, d] each
    if torch.nn.functional.cosine_similarity(*rows).mean() < _TIED_COSINE:
        return
    model.config.tie_word_embeddings = True
    embedding.weight = head.weight


def _end_ids(tokenizer: Any, facts: GgufFacts) -> list[int]:
    """Every id that ends a turn. Qwen's own generation config also ends at <|endoftext|>; the file names only one."""
    ids = [tokenizer.eos_token_id, facts.end_of_turn_id]
    if facts.pre_tokenizer == "qwen2":
        ids.append(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    return list(dict.fromkeys(i for i in ids if i is not None))


def _check_is_gguf(path: Path) -> None:
    if not path.is_file():
        raise ModelNotFoundError(f"There is no file {path}. Give the path of a .gguf file.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise IntegrityError(f"{path} is not a GGUF file: it begins with {magic!r}, not b'GGUF'. Download it again.")


def _check_packages() -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelNotFoundError(
            f"Reading a GGUF needs the Python packages {' and '.join(missing)}. Run: pip install {' '.join(missing)}"
        )
