"""Tiny models for vLLM: heads of 32 numbers, which its CPU attention has; a draft that mostly agrees; random drafters
that read the target's states."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import tiny

WINDOW = 512
VOCAB = 320
WIDTH = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.25,
    "max_position_embeddings": WINDOW,
    "bos_token_id": None,
    "eos_token_id": tiny.EOS,
    "pad_token_id": tiny.PAD,
    "tie_word_embeddings": False,
}


def _llama(*, num_layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=num_layers)).eval()


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)


def save_pair(folder: Path, *, noise: float = 0.02) -> tuple[Path, Path]:
    """A random Llama and a copy of it with noise. Returns the two folders."""
    target, draft = folder / "target", folder / "draft"
    model = _llama(num_layers=2)
    _save(model, target)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * noise)
    _save(model, draft)
    return target, draft


def save_eagle3(folder: Path) -> tuple[Path, Path]:
    """A random Llama of eight layers and a random EAGLE-3 head with a smaller vocabulary of its own."""
    import eagle
    from dropmatch.eagle3.checkpoint import save_head

    target, draft = folder / "target", folder / "head"
    model = _llama(num_layers=8)
    _save(model, target)
    head = eagle.random_head(
        model.get_input_embeddings().weight.detach(),
        family="official",
        hidden_size=WIDTH,
        target_hidden_size=WIDTH,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        max_positions=WINDOW,
    )
    save_head(head, draft, family="official", dtype=torch.float32)
    return target, draft


def save_eagle(folder: Path) -> tuple[Path, Path]:
    """A random Llama and a random EAGLE drafter: one layer behind a projection of embedding and hidden state."""
    target, head = folder / "target", folder / "head"
    _save(_llama(num_layers=2), target)
    _save(_llama(num_layers=1), head)
    weights = load_file(head / "model.safetensors")
    layer = {name.removeprefix("model."): weight for name, weight in weights.items() if ".layers." in name}
    del layer["layers.0.input_layernorm.weight"]  # an EAGLE head does without
    fc = torch.randn(WIDTH, 2 * WIDTH) * SIZES["initializer_range"]
    save_file(layer | {"fc.weight": fc}, head / "model.safetensors", {"format": "pt"})
    return target, head


def save_mtp(folder: Path) -> tuple[Path, Path]:
    """A random MiMo: a Qwen2 with a layer that predicts one token further. Target and drafter are one folder."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, num_hidden_layers=2)).eval()
    _save(model, folder)
    weights = load_file(folder / "model.safetensors")
    prefix, place = "model.layers.1.", "model.mtp_layers.0."
    layer = {place + name.removeprefix(prefix): weight.clone() for name, weight in weights.items() if prefix in name}
    norms = {f"{place}{name}_layernorm.weight": torch.ones(WIDTH) for name in ("token", "hidden", "final")}
    projection = {f"{place}input_proj.weight": torch.randn(WIDTH, 2 * WIDTH) * SIZES["initializer_range"]}
    save_file(weights | layer | norms | projection, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, folder
