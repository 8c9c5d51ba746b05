"""What of a transformers model we rely on, and which models we refuse, by name. Runs nothing.

A model can be verified over a draft tree if every layer is softmax attention over cached keys: rejected tokens are
then left behind by lengths and masks. A recurrent state cannot be taken back, a relative bias by column cannot follow
a tree. hf/probe.py checks by numbers what this file reads from configs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dropmatch.errors import UnsupportedModelError
from dropmatch.hf.attention import GROUPED

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_ATTENTION = frozenset({"sdpa", "eager"})
# Their frequencies change with the longest position of a batch: past that point rows would depend on each other.
_GROWING_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a causal language model that a cached forward needs.

    body: the decoder without LM head; layers: its decoder layers; layer_types: one name per layer; windows: attention
    window of each layer type, None for full attention; max_positions: positions that exist, None without a limit;
    cache_name: the argument that takes the cache; is_eager: masks are added, not selected by.
    """

    body: Any
    config: Any
    layers: Sequence[nn.Module]
    layer_types: tuple[str, ...]
    windows: dict[str, int | None]
    max_positions: int | None
    cache_name: str
    is_eager: bool


def examine(model: Any) -> Anatomy:
    """Find the parts of a model. Raises UnsupportedModelError if it cannot be verified or rolled back, and says why."""
    name = f"{model.config.model_type!r} ({type(model).__name__})"
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(f"{name} attends to an encoder. Use a decoder-only causal language model.")
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no causal LM head. Load the model with AutoModelForCausalLM.")
    layer_types = _layer_types(config)
    _refuse_layers(name, model, config, layer_types)
    body = model.get_decoder()
    cache_name = _cache_argument(name, body)
    if getattr(config, "alibi", False):
        raise UnsupportedModelError(
            f"{name} uses ALiBi, a bias by column that cannot follow a draft tree. Use a model with position ids."
        )
    implementation = body.config._attn_implementation or "eager"
    implementation = "sdpa" if implementation == GROUPED else implementation
    if implementation not in _ATTENTION:
        raise UnsupportedModelError(
            f"{name} runs attention {implementation!r}, which cannot take a draft tree's mask. "
            'Load it with attn_implementation="sdpa" (or "eager").'
        )
    if model.training:
        raise UnsupportedModelError(f"{name} is in training mode, so its dropout is active. Call model.eval() first.")
    return Anatomy(
        body=body,
        config=config,
        layers=_decoder_layers(name, body, config.num_hidden_layers),
        layer_types=layer_types,
        windows={kind: config.sliding_window if kind == "sliding_attention" else None for kind in layer_types},
        max_positions=_max_positions(config),
        cache_name=cache_name,
        is_eager=implementation == "eager",
    )


def _layer_types(config: Any) -> tuple[str, ...]:
    """One name per layer, read as transformers' own cache reads it."""
    named = getattr(config, "layer_types", None)
    if named is not None:
        return tuple(str(kind) for kind in named[: config.num_hidden_layers])
    is_sliding = getattr(config, "sliding_window", None) is not None
    return ("sliding_attention" if is_sliding else "full_attention",) * int(config.num_hidden_layers)


def _refuse_layers(name: str, model: Any, config: Any, layer_types: Sequence[str]) -> None:
    """Raise for the first layer that keeps a state, shares keys or masks by itself."""
    for index, kind in enumerate(layer_types):
        if kind not in _LAYER_TYPES:
            raise UnsupportedModelError(
                f"Layer {index} of {name} is of type {kind!r} and cannot be rolled back after a rejection. "
                "Use a model whose layers are all full or sliding-window attention."
            )
    if model._is_stateful:
        raise UnsupportedModelError(
            f"{name} keeps a recurrent state, which cannot be rolled back after a rejection. "
            "Use an attention-only model."
        )
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "kv_sharing_modes", None):
        raise UnsupportedModelError(f"{name} shares keys and values between layers, which our cache does not hold.")
    if getattr(config, "cross_attention_layers", None):
        first = config.cross_attention_layers[0]
        raise UnsupportedModelError(f"Layer {first} of {name} is a cross-attention layer. Use a text-only model.")
    for index, kind in enumerate(getattr(config, "attention_layers", None) or ()):
        if kind == "local":
            raise UnsupportedModelError(
                f"Layer {index} of {name} cuts a local window by column inside the layer, which cannot follow a draft "
                "tree. Use another model."
            )


def _cache_argument(name: str, body: Any) -> str:
    """Name of the forward's cache argument: `cache` since transformers 5.24, `past_key_values` before."""
    parameters = inspect.signature(body.forward).parameters
    if "position_ids" not in parameters:
        raise UnsupportedModelError(
            f"{name} takes no position ids, like recurrent and ALiBi models, so the nodes of a draft tree cannot "
            "be placed. Use a model with position ids."
        )
    for cache_name in ("cache", "past_key_values"):
        if cache_name in parameters:
            return cache_name
    raise UnsupportedModelError(f"{name} takes no key-value cache. Use a causal language model with one.")


def _decoder_layers(name: str, body: nn.Module, num_layers: int) -> Sequence[nn.Module]:
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise UnsupportedModelError(f"{name} has no list of its {num_layers} decoder layers.")


def _max_positions(config: Any) -> int | None:
    """Positions that the model has; None where rotary embeddings go on without a limit."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return getattr(config, "max_position_embeddings", None)
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = [
        kind.get("original_max_position_embeddings") or config.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") in _GROWING_ROPE
    ]
    return min(limits, default=None)
