"""Random EAGLE-3 heads and targets for tests: every switch, sizes that differ wherever they may."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tiny
from dropmatch.eagle3.model import Eagle3Head
from dropmatch.eagle3.settings import HeadSettings
from dropmatch.hf.rotary import rotary_frequencies

V, H, NUM_LAYERS = 320, 32, 8
TAPS = (2, 4, 5)

SETTINGS = HeadSettings(
    family="speculators",
    hidden_size=H,
    target_hidden_size=H,
    intermediate_size=40,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_layers=1,
    vocab_size=V,
    draft_vocab_size=200,
    rms_norm_eps=1e-5,
    max_positions=256,
    rope={"rope_type": "default", "rope_theta": 10000.0},
    tap_layers=TAPS,
)

# name -> what differs from SETTINGS
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm-before-residual": {"norm_before_residual": True},
    "norm-before-fc": {"norm_before_fc": True},
    "fc-norm": {"fc_norm": True},
    "norm-output": {"norm_output": True, "norm_before_residual": True},
    "three-layers": {"num_layers": 3},
    "qwen3": {"has_qk_norm": True, "head_dim": 16, "rope": {"rope_type": "default", "rope_theta": 1e6}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3-rope": {
        "rope": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "full-vocabulary": {"draft_vocab_size": V},
    "two-taps": {"tap_layers": (1, 6)},
}


def target(*, seed: int = 0, num_layers: int = NUM_LAYERS, hidden_size: int = H) -> Any:
    """A Llama in float32 with enough layers for three taps. Its tokenizer is that of `tiny`."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tiny.EOS,
        pad_token_id=tiny.PAD,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def random_head(embedding: Tensor, *, seed: int = 3, dtype: torch.dtype = torch.float32, **changes: Any) -> Eagle3Head:
    """A head with large random weights, norms and biases included. changes: fields of HeadSettings."""
    settings = replace(SETTINGS, **changes)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(settings.vocab_size, generator=generator)[: settings.draft_vocab_size].sort().values
    frequencies, scale = rotary_frequencies(settings.rope, settings.head_dim, settings.max_positions)
    head = Eagle3Head(settings, embedding.to(dtype), ids, frequencies, scale).to(dtype)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if parameter.dim() == 1 and "norm" in name:
                parameter.copy_(1.0 + 0.2 * noise)
            else:
                parameter.copy_(noise * (0.2 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5))
    return head.requires_grad_(False).eval()
