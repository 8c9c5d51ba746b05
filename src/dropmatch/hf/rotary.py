"""Rotary frequencies by transformers' own rules, for layers that transformers does not know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dropmatch.errors import UnsupportedModelError

# "longrope" changes its frequencies with the length of the text, so keys of one row would not fit together.
_KNOWN = ("default", "linear", "dynamic", "llama3", "yarn")


def rotary_frequencies(rope: Mapping[str, Any], head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] float32 and the factor on cosine and sine.

    rope: rope_type, rope_theta and what the type needs. "dynamic" keeps the frequencies of rows within max_positions.
    Raises UnsupportedModelError for types or parameters that cannot be used.
    """
    kind = rope.get("rope_type")
    if kind not in _KNOWN:
        raise UnsupportedModelError(
            f"Rotary positions of type {kind!r} are not known here. Known: {', '.join(_KNOWN)}."
        )
    try:
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters=dict(rope),
        )
        embedding = LlamaRotaryEmbedding(config)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UnsupportedModelError(f"Rotary positions {_short(rope)} cannot be used: {error}.") from error
    frequencies, scale = embedding.inv_freq.float(), torch.tensor(float(embedding.attention_scaling))
    if not bool(frequencies.isfinite().all() & scale.isfinite()):
        raise UnsupportedModelError(
            f"Rotary positions {_short(rope)} cannot be used: their frequencies are no numbers."
        )
    return frequencies, float(scale)


def _short(rope: Mapping[str, Any]) -> str:
    shown = repr(dict(rope))
    return shown if len(shown) <= 200 else shown[:197] + "..."
