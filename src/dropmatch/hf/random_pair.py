"""A target and a draft model with random weights, for measuring speed where no trained ones are at hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

_LAYERS, _HEAD = 0.4, 3.0  # sizes of a layer's products and of the logits, of an input of size 1


@dataclass(frozen=True, slots=True)
class PairShape:
    """Sizes of a target; its draft model has the first draft_layers of its layers."""

    vocab_size: int = 32_000
    hidden_size: int = 1024
    layers: int = 16
    draft_layers: int = 2
    heads: int = 16
    key_value_heads: int = 4
    positions: int = 4096


def random_pair(shape: PairShape, *, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Any, Any]:
    """Llama models. The draft model shares embeddings, first layers and LM head with the target, whose later layers
    change little, so that it is often right and sometimes not. Texts mean nothing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=-(-shape.hidden_size * 11 // 4 // 64) * 64,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=shape.positions,
        initializer_range=_LAYERS / math.sqrt(shape.hidden_size),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = LlamaForCausalLM(config)
        torch.nn.init.normal_(target.model.embed_tokens.weight)
        torch.nn.init.normal_(target.lm_head.weight, std=_HEAD / math.sqrt(shape.hidden_size))
        draft = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "num_hidden_layers": shape.draft_layers}))
    draft.load_state_dict(target.state_dict(), strict=False)
    return target.to(device, dtype).eval(), draft.to(device, dtype).eval()
