"""A tiny pair for vLLM: heads of 32 numbers, which its CPU attention has, and a draft that mostly agrees."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiny

WINDOW = 512
VOCAB = 320


def _llama(*, num_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.25,
        max_position_embeddings=WINDOW,
        bos_token_id=None,
        eos_token_id=tiny.EOS,
        pad_token_id=tiny.PAD,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def save_pair(folder: Path, *, noise: float = 0.02) -> tuple[Path, Path]:
    """A random Llama and a copy of it with noise. Returns the two folders."""
    target, draft = folder / "target", folder / "draft"
    model = _llama(num_layers=2)
    model.save_pretrained(target)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * noise)
    model.save_pretrained(draft)
    for place in (target, draft):
        tiny.tokenizer().save_pretrained(place)
    return target, draft


def save_eagle3(folder: Path) -> tuple[Path, Path]:
    """A random Llama of eight layers and a random EAGLE-3 head with a smaller vocabulary of its own."""
    import eagle
    from dropmatch.eagle3.checkpoint import save_head

    target, draft = folder / "target", folder / "head"
    model = _llama(num_layers=8)
    model.save_pretrained(target)
    tiny.tokenizer().save_pretrained(target)
    head = eagle.random_head(
        model.get_input_embeddings().weight.detach(),
        family="official",
        hidden_size=64,
        target_hidden_size=64,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        max_positions=WINDOW,
    )
    save_head(head, draft, family="official", dtype=torch.float32)
    return target, draft
