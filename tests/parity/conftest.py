"""Tiny transformers models from configs, seeded, with weights large enough for logits that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

VOCABULARY = 97
WINDOW = 3  # below the depth of the trees and the length of the rows that the tests build

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
_GPT = {"n_embd": 32, "n_inner": 48, "n_layer": 3, "n_head": 4}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}

# name -> (causal LM class, config options)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-mixed": ("Qwen2ForCausalLM", {**_ALTERNATING, "use_sliding_window": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "mistral-full": ("MistralForCausalLM", {"sliding_window": None}),
    "gemma2": ("Gemma2ForCausalLM", {**_ALTERNATING, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3ForCausalLM", {**_ALTERNATING, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "granite": ("GraniteForCausalLM", {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2ForCausalLM", {**_ALTERNATING, "logit_scale": 0.25}),
    "phi": ("PhiForCausalLM", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": WINDOW}),
    "gpt-neox": ("GPTNeoXForCausalLM", {"rotary_pct": 0.5}),
    "gpt2": ("GPT2LMHeadModel", _GPT),
    "gptj": ("GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {**_MOE, "shared_expert_intermediate_size": 24}),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": WINDOW}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**_ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        },
    ),
}


def build(name: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa", **options: Any) -> Any:
    """A seeded model in eval mode. Vectors are drawn too: norms at 1 and biases at 0 would hide mistakes."""
    class_name, own = MODELS[name]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**{**_SHAPE, **own, **options}, attn_implementation=attention)
    torch.manual_seed(7)
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture
def tiny() -> Callable[..., Any]:
    """build(name, dtype, attention, **config options)."""
    return build
