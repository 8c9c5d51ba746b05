"""Forward of a Llama-like decoder on a CPU with a few calls a layer: a draft token of a small model costs transformers'
hundreds of small operations almost as much as its weights.

Same values, rounded at the same places; products side by side are one product. Only for models whose layers multiply by
our kernels; every other one runs as transformers has it. hf/probe.py compares both when a model is wrapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from dropmatch.hf import native
from dropmatch.hf.cache import RaggedCache
from dropmatch.hf.int4 import Int4Linear
from dropmatch.hf.native import NativeLinear
from dropmatch.hf.support import Anatomy

_FAMILIES = frozenset({"llama", "qwen2"})  # those whose forward is exactly what stands here
# What their classes are made of. A module that someone has put in another's place may compute anything.
_PARTS = frozenset({nn.Embedding, nn.ModuleList, nn.SiLU, SiLUActivation, NativeLinear, Int4Linear})
_IDLE_HOOKS = "transformers.utils.output_capturing"  # stay once output_hidden_states was asked for; change nothing
_LANES = 16
_ROTATED = 32  # head sizes are multiples of it


class _Product:
    """One linear layer, or several of the same input whose outputs stand side by side."""

    def __init__(self, *linears: NativeLinear | Int4Linear) -> None:
        self.out_features = sum(linear.out_features for linear in linears)
        first = linears[0]
        self.weight = _merged(linears, "weight")
        self.bias = None if first.bias is None else _merged(linears, "bias")
        self.packed = _merged(linears, "packed") if isinstance(first, Int4Linear) else None
        self._is_native = not isinstance(first, Int4Linear) or first.is_wide_native

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """x: [rows, in]; added: [rows, out]. Returns [rows, out]."""
        if self.packed is not None and len(x) <= native.MOST_INT4_ROWS:
            return native.multiply_int4(x, self.packed, self.bias, self.out_features, added)
        if self._is_native:
            return native.multiply(x, self.weight, self.bias, added)
        product = F.linear(x, self.weight, self.bias)
        return product if added is None else product + added


@dataclass(frozen=True, slots=True)
class _Layer:
    """A decoder layer's parts. Norms: weight and epsilon; scale: of the attention's scores."""

    attention_norm: tuple[Tensor, float]
    query_key_value: _Product
    scale: float
    out: _Product
    mlp_norm: tuple[Tensor, float]
    gate_up: _Product
    down: _Product


class LeanBody:
    """A decoder without its LM head. Made by `lean_body`."""

    def __init__(self, anatomy: Anatomy) -> None:
        body, config = anatomy.body, anatomy.config
        self._embedding: Tensor = body.embed_tokens.weight
        self._rotary = body.rotary_emb
        self._norm = _norm(body.norm)
        self._layers = [_parts(layer) for layer in anatomy.layers]
        self._heads = int(config.num_attention_heads)
        self._key_heads = int(config.num_key_value_heads)

    def __call__(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: RaggedCache, tapped: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens, positions: [B, N]; mask: [B or 1, 1, N, S] bool, None where all cached keys and the causal new ones
        are seen. Returns hidden [B, N, d] behind the last norm, and the inputs [B, N, d] of the tapped layers."""
        B, N = tokens.shape
        x = F.embedding(tokens.reshape(-1), self._embedding)  # [B N, d]
        cosines, sines = (part.reshape(B * N, -1).contiguous() for part in self._rotary(x, positions))
        taps = {}
        if mask is not None:
            groups = self._heads // self._key_heads
            rows, S = mask.shape[0], mask.shape[-1]
            mask = mask[:, :, None].expand(rows, 1, groups, N, S).reshape(rows, 1, groups * N, S)
        for index, layer in enumerate(self._layers):
            if index in tapped:
                taps[index] = x.view(B, N, -1)
            mixed = layer.query_key_value(native.rms_norm(x, *layer.attention_norm))
            native.rotate(mixed, cosines, sines, self._heads + self._key_heads)
            heads = mixed.view(B, N, self._heads + 2 * self._key_heads, -1)
            new = heads[:, :, self._heads :].transpose(1, 2)
            keys, values = cache.update(new[:, : self._key_heads], new[:, self._key_heads :], index)
            attended = _attend(heads[:, :, : self._heads], keys, values, mask, layer.scale)
            x = layer.out(attended.view(B * N, -1), x)
            x = layer.down(native.silu_product(layer.gate_up(native.rms_norm(x, *layer.mlp_norm))), x)
        return native.rms_norm(x, *self._norm).view(B, N, -1), [taps[index] for index in tapped]


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """query: [B, N, H, d]; key, value: [B, H / G, S, d]; mask: [B or 1, 1, G N, S] or None. Returns [B, N, H d]."""
    B, N, H, d = query.shape
    if mask is None and N > 1:  # a prompt, behind nothing
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, is_causal=True, scale=scale, enable_gqa=key.shape[1] != H
        )
        return attended.transpose(1, 2).reshape(B, N, -1)
    G = H // key.shape[1]
    grouped = query.view(B, N, H // G, G, d).permute(0, 2, 3, 1, 4).reshape(B, H // G, G * N, d)
    attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    return attended.view(B, H // G, G, N, d).permute(0, 3, 1, 2, 4).reshape(B, N, -1)


def lean_body(anatomy: Anatomy) -> LeanBody | None:
    """The decoder in its lean form, or None where it is not one that this file knows. The layers' weights are moved
    side by side in memory; they keep their values and their place in the model."""
    family, body = anatomy.config.model_type, anatomy.body
    if (
        family not in _FAMILIES
        or anatomy.is_eager
        or set(anatomy.layer_types) != {"full_attention"}
        or not all(_is_as_written(module, family) for module in body.modules())
        or not native.is_readable(body.embed_tokens.weight)
        or not all(_is_known(layer, 2 * len(body.rotary_emb.inv_freq)) for layer in anatomy.layers)
        or not _is_norm(body.norm)
    ):
        return None
    return LeanBody(anatomy)


def _is_as_written(module: nn.Module, family: str) -> bool:
    """Whether a module is one that the family's own file makes, and nobody has changed what it computes."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return (
        (type(module).__module__ == f"transformers.models.{family}.modeling_{family}" or type(module) in _PARTS)
        and "forward" not in vars(module)
        and all(getattr(hook, "__module__", None) == _IDLE_HOOKS for hook in hooks)
    )


def _is_known(layer: Any, rotated: int) -> bool:
    """Whether the kernels can take a layer. rotated: how much of a head has rotary positions."""
    attention, mlp = layer.self_attn, layer.mlp
    products = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    kinds = {type(product) for product in products}
    has_bias = [product.bias is not None for product in products]
    return (
        kinds in ({NativeLinear}, {Int4Linear})
        and all(getattr(product, "is_native", True) and native.is_readable(product.weight) for product in products)
        and len(set(has_bias[:3])) == 1
        and has_bias[4] == has_bias[5]
        and attention.head_dim == rotated
        and rotated % _ROTATED == 0
        and mlp.gate_proj.out_features % _LANES == 0
        and not layer.training
        and _is_norm(layer.input_layernorm)
        and _is_norm(layer.post_attention_layernorm)
    )


def _is_norm(module: Any) -> bool:
    return native.is_readable(module.weight) and len(module.weight) % _LANES == 0


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight, float(module.variance_epsilon)


def _parts(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        attention_norm=_norm(layer.input_layernorm),
        query_key_value=_Product(attention.q_proj, attention.k_proj, attention.v_proj),
        scale=float(attention.scaling),
        out=_Product(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_Product(mlp.gate_proj, mlp.up_proj),
        down=_Product(mlp.down_proj),
    )


def _merged(linears: Sequence[NativeLinear | Int4Linear], name: str) -> Tensor:
    """The layers' tensors of a name, one behind the other along dimension 0 in one piece of memory. Each layer's own
    becomes a view of its part, unless they stand like that already."""
    parts: list[Tensor] = [getattr(linear, name).detach() for linear in linears]
    if all(_follows(a, b) for a, b in pairwise(parts)):
        return parts[0].as_strided([sum(map(len, parts)), *parts[0].shape[1:]], parts[0].stride())
    merged = torch.cat(parts)
    start = 0
    for linear, part in zip(linears, parts, strict=True):
        own, view = getattr(linear, name), merged[start : start + len(part)]
        setattr(linear, name, nn.Parameter(view, requires_grad=False) if isinstance(own, nn.Parameter) else view)
        start += len(part)
    return merged


def _follows(a: Tensor, b: Tensor) -> bool:
    return (
        a.is_contiguous()
        and b.is_contiguous()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and b.storage_offset() == a.storage_offset() + a.numel()
    )
