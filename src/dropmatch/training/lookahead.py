"""EAGLE-3's training-time test: the head is run on its own outputs in training as it will be in drafting.

Row t is the pair of token c_{t+1} and the target's state G_t. Step 0 reads states; step s > 0 reads the head's own
output of step s - 1 beside the true token c_{t+1+s}. A row at step s attends to the step-0 pairs of rows 0 .. t and to
its own pairs of steps 1 .. s: what a drafted token s levels deep sees. Pure tensor code; see drafter.py for the other
half.
Source: arXiv 2503.01840, section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dropmatch.eagle3.model import Attend, Eagle3Head


def lookahead(head: Eagle3Head, ids: Tensor, taps: Tensor, num_steps: int) -> list[Tensor]:
    """Outputs of each step before the final norm. ids: [B, L]; taps: [B, T, A] of the first T tokens.

    Returns num_steps tensors [B, T, H]. Tokens past the end count as id 0; what they yield has no truth to learn from.
    """
    B, T, _ = taps.shape
    short = T + num_steps - ids.shape[1]
    ids = torch.nn.functional.pad(ids, (0, max(short, 0)))
    attention = _Lookahead(head.settings.num_layers, T, taps.device)
    feature, outputs = head.fuse(taps), []
    rows = torch.arange(T, device=taps.device).expand(B, T)
    for step in range(num_steps):
        out = head(ids[:, 1 + step : 1 + step + T], feature, rows + step, attention.at(step))
        outputs.append(out)
        feature = head.next_feature(out)
    return outputs


class _Lookahead:
    """Keys and values of all steps so far, by layer."""

    def __init__(self, num_layers: int, T: int, device: torch.device) -> None:
        self._keys: list[list[Tensor]] = [[] for _ in range(num_layers)]  # by layer and step, each [B, heads, T, hd]
        self._values: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self._hidden_from = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)

    def at(self, step: int) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            groups = q.shape[1] // k.shape[1]
            keys, values = self._keys[layer], self._values[layer]
            keys.append(k.repeat_interleave(groups, dim=1))
            values.append(v.repeat_interleave(groups, dim=1))
            if step == 0:
                return torch.nn.functional.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
            T = q.shape[2]
            q = q * q.shape[-1] ** -0.5
            before = (q @ keys[0].transpose(-1, -2)).masked_fill(self._hidden_from, float("-inf"))  # [B, heads, T, T]
            own = [(q * key).sum(-1, keepdim=True) for key in keys[1:]]  # one score per step, of the row itself
            weights = torch.cat([before, *own], dim=-1).softmax(-1)
            mixed = weights[..., :T] @ values[0]
            for s, value in enumerate(values[1:]):
                mixed = mixed + weights[..., T + s, None] * value
            return mixed

        return attend
