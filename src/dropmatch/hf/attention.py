"""Attention over a mask without a copy of the keys for every query head.

Most models share one key head among several query heads. With a mask, transformers' sdpa attention copies keys and
values once per query head and layer, which at a batch or a long context costs as much as the attention itself. Here
the query heads of one key head stand side by side as more queries instead: the same product, nothing copied but the
queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

GROUPED = "dropmatch_grouped_sdpa"  # what a config may say while another thread runs a forward


def grouped_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, its masked case by key head.

    query: [B, H, N, d]; key, value: [B, H / G, S, d]; attention_mask: [B or 1, 1, N, S] or None. Returns [B, N, H, d].
    Masks that differ by head, and biases by position, go to transformers as they are.
    """
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    B, H, N, d = query.shape
    G = H // key.shape[1]
    is_plain = attention_mask is not None and attention_mask.shape[1] == 1 and kwargs.get("position_bias") is None
    if G == 1 or N == 1 or not is_plain:
        output: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **kwargs)
        return output
    assert attention_mask is not None
    rows, _, _, S = attention_mask.shape
    mask = attention_mask[:, :, None].expand(rows, 1, G, N, S).reshape(rows, 1, G * N, S)
    attended, _ = sdpa(_Ungrouped, query.reshape(B, H // G, G * N, d), key, value, mask, **kwargs)  # [B, G N, H / G, d]
    return attended.view(B, G, N, H // G, -1).permute(0, 2, 3, 1, 4).reshape(B, N, H, -1), None


class _Ungrouped:
    """What transformers' function reads of a layer: as many query heads as key heads."""

    num_key_value_groups = 1
    is_causal = False


@contextmanager
def grouped_attention(body: Any) -> Iterator[None]:
    """Let the layers of a decoder with sdpa attention use grouped_sdpa during the block.

    Others are left alone, and so are those that do not look their attention up by name (Falcon)."""
    config = body.config
    before = config._attn_implementation
    if before != "sdpa" or not getattr(body, "_supports_attention_backend", False):
        yield
        return
    config._attn_implementation_internal = GROUPED
    try:
        yield
    finally:
        config._attn_implementation_internal = before


ALL_ATTENTION_FUNCTIONS.register(GROUPED, grouped_sdpa)
ALL_MASK_ATTENTION_FUNCTIONS.register(GROUPED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
