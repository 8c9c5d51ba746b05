"""The EAGLE-3 draft head: a few decoder layers, the first of which attends to pairs of a token and a feature.

A feature is either the fused hidden states of the target (`fuse`) or the head's own last output (`next_feature`). The
attention itself is the caller's, since drafting reads a cache and training looks ahead: see drafter.py and
dropmatch.training. Torch only; knows no files. Source: arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dropmatch.eagle3.settings import HeadSettings

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B, heads, N, head_dim], keys and values [B, kv heads, N, head_dim]) -> mixed values, as queries."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the mean square in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Projections and rotary positions around the caller's attention. width: of the input."""

    def __init__(self, settings: HeadSettings, width: int) -> None:
        super().__init__()
        inner, shared = settings.num_heads * settings.head_dim, settings.num_kv_heads * settings.head_dim
        self.head_dim = settings.head_dim
        self.q_proj = nn.Linear(width, inner, bias=settings.attention_bias)
        self.k_proj = nn.Linear(width, shared, bias=settings.attention_bias)
        self.v_proj = nn.Linear(width, shared, bias=settings.attention_bias)
        self.o_proj = nn.Linear(inner, settings.hidden_size, bias=settings.attention_bias)
        self.q_norm = RMSNorm(settings.head_dim, settings.rms_norm_eps) if settings.has_qk_norm else None
        self.k_norm = RMSNorm(settings.head_dim, settings.rms_norm_eps) if settings.has_qk_norm else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        """x: [B, N, width]; rotation: cosine and sine [B, 1, N, head_dim]. Returns [B, N, H]."""
        q, k, v = (self._split(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attend(_rotate(q, rotation), _rotate(k, rotation), v)  # [B, heads, N, head_dim]
        merged: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return merged

    def _split(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        return x.view(B, N, -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(settings.hidden_size, settings.intermediate_size, bias=settings.mlp_bias)
        self.up_proj = nn.Linear(settings.hidden_size, settings.intermediate_size, bias=settings.mlp_bias)
        self.down_proj = nn.Linear(settings.intermediate_size, settings.hidden_size, bias=settings.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class PairLayer(nn.Module):
    """The first layer: its attention sees the token's embedding beside the feature, its residual the feature alone."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.norm_before_residual = settings.norm_before_residual
        self.input_layernorm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.hidden_norm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.self_attn = Attention(settings, 2 * settings.hidden_size)
        self.post_attention_layernorm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.mlp = MLP(settings)

    def forward(
        self, embedded: Tensor, feature: Tensor, rotation: tuple[Tensor, Tensor], attend: Callable[..., Tensor]
    ) -> Tensor:
        normed = self.hidden_norm(feature)
        pair = torch.cat([self.input_layernorm(embedded), normed], dim=-1)  # [B, N, 2H]
        x = (normed if self.norm_before_residual else feature) + self.self_attn(pair, rotation, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class PlainLayer(nn.Module):
    """Any further layer: an ordinary decoder layer."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.self_attn = Attention(settings, settings.hidden_size)
        self.post_attention_layernorm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.mlp = MLP(settings)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Callable[..., Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Head(nn.Module):
    """The draft head. Its parameters carry the names of the speculators format.

    embedding: [V, H] of the target, frozen and no parameter. target_ids: [Vd] int64, the target's id of each drafted
    one. inv_freq, rope_scale: see hf/rotary.py.
    """

    inv_freq: Tensor
    target_ids: Tensor

    def __init__(
        self, settings: HeadSettings, embedding: Tensor, target_ids: Tensor, inv_freq: Tensor, rope_scale: float
    ) -> None:
        super().__init__()
        H, taps = settings.hidden_size, settings.num_taps
        self.settings = settings
        self.embedding = embedding.detach()
        self.rope_scale = rope_scale
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.input_norm = (
            RMSNorm(taps * settings.target_hidden_size, settings.rms_norm_eps) if settings.norm_before_fc else None
        )
        self.fc_norm = (
            nn.ModuleList(RMSNorm(settings.target_hidden_size, settings.rms_norm_eps) for _ in range(taps))
            if settings.fc_norm
            else None
        )
        self.fc = nn.Linear(taps * settings.target_hidden_size, H, bias=False)
        layers = [PairLayer(settings), *(PlainLayer(settings) for _ in range(settings.num_layers - 1))]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(H, settings.rms_norm_eps)
        self.lm_head = nn.Linear(H, settings.draft_vocab_size, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def fuse(self, taps: Tensor) -> Tensor:
        """Features of target states. taps: [..., num_taps * Ht], in the tapped layers' order. Returns [..., H]."""
        taps = taps.to(self.dtype)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            parts = torch.split(taps, self.settings.target_hidden_size, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: Tensor = self.fc(taps)
        return fused

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Outputs before the final norm. tokens, positions: [B, N], in the target's ids; features: [B, N, H].
        Returns [B, N, H]."""
        embedded = nn.functional.embedding(tokens, self.embedding).to(self.dtype)
        angles = positions[..., None].float() * self.inv_freq  # [B, N, head_dim / 2]
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        rotation = ((angles.cos() * self.rope_scale).to(self.dtype), (angles.sin() * self.rope_scale).to(self.dtype))
        first, *others = self.layers
        x: Tensor = first(embedded, features, rotation, lambda q, k, v: attend(0, q, k, v))
        for index, layer in enumerate(others, start=1):
            x = layer(x, rotation, lambda q, k, v, index=index: attend(index, q, k, v))
        return x

    def next_feature(self, out: Tensor) -> Tensor:
        """What an output of `forward` is fed back as."""
        return self.norm(out) if self.settings.norm_output else out

    def logits(self, out: Tensor) -> Tensor:
        """Logits over the draft vocabulary. out: [..., H] of `forward`. Returns [..., Vd]."""
        logits: Tensor = self.lm_head(self.norm(out))
        return logits


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin
