"""Training against drafting: a row of the training-time test is what drafting computes from the same tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import eagle
from dropmatch.eagle3.drafter import Eagle3Drafter
from dropmatch.eagle3.model import Eagle3Head
from dropmatch.hf.cache import RaggedCache
from dropmatch.hf.masks import node_positions, visible_keys
from dropmatch.training.lookahead import lookahead

CLOSE = 1e-5
"""Of the largest number: float32 sums in another order."""


def is_close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= CLOSE * float(b.abs().max())


def drafted(head: Eagle3Head, ids: Tensor, taps: Tensor, row: int, num_steps: int) -> list[Tensor]:
    """Outputs of drafting behind row + 1 real pairs with the tokens that training forces. ids: [L]; taps: [T, A]."""
    drafter = Eagle3Drafter(head, eagle.V)
    cache = RaggedCache(head.settings.num_layers, num_rows=1)
    out = drafter._run_pairs(cache, ids[None, 1 : row + 2], taps[None, : row + 1])
    cache.commit([row + 1])
    outputs = [out[0, -1]]
    for step in range(1, num_steps):
        positions = node_positions(cache.lengths, None, 1, ids.device)
        mask = visible_keys(cache.lengths, None, 1, None, ids.device)
        feature = head.next_feature(outputs[-1])[None, None]
        out = drafter._run(cache, ids[None, row + 1 + step : row + 2 + step], feature, positions, mask)
        cache.commit([1])
        outputs.append(out[0, 0])
    return outputs


@pytest.mark.parametrize("name", eagle.VARIANTS)
def test_every_row_and_step_of_training_equals_drafting(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(eagle.V, eagle.H, generator=generator)
    head = eagle.random_head(embedding, **eagle.VARIANTS[name])
    T, num_steps = 9, 4
    ids = torch.randint(eagle.V, (2, T + num_steps), generator=generator)
    taps = torch.randn(2, T, head.settings.num_taps * eagle.H, generator=generator)
    with torch.inference_mode():
        outputs = lookahead(head, ids, taps, num_steps)
        for b in range(2):
            for row in range(T):
                expected = drafted(head, ids[b], taps[b], row, num_steps)
                for step in range(num_steps):
                    assert is_close(outputs[step][b, row], expected[step]), (row, step)


def test_padding_on_the_right_changes_no_real_row() -> None:
    generator = torch.Generator().manual_seed(6)
    head = eagle.random_head(torch.randn(eagle.V, eagle.H, generator=generator))
    ids = torch.randint(eagle.V, (1, 12), generator=generator)
    taps = torch.randn(1, 9, 3 * eagle.H, generator=generator)
    alone = lookahead(head, ids, taps, 3)
    padded = lookahead(head, torch.nn.functional.pad(ids, (0, 5)), torch.nn.functional.pad(taps, (0, 0, 0, 5)), 3)
    for a, b in zip(alone, padded, strict=True):
        assert is_close(b[:, :9], a)
