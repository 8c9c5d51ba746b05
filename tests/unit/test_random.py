"""Counter-based random numbers: the published Philox answers, and what a number may and may not depend on."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from dropmatch.ops import random as random_ops
from dropmatch.ops.random import Purpose, dropout_masks, gumbel, philox, random_bits, uniform

FALSE_ALARM = 1e-6  # chance of failing with a fresh seed; the seeds are fixed, so a passing test stays so

# Random123 known-answer file, philox4x32 with 10 rounds: counter, key, result
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


def _keys(*rows: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    got = philox(_words(counter), _words(key))
    assert " ".join(f"{int(word):08x}" for word in got) == expected


def test_counters_and_keys_broadcast() -> None:
    counters = tuple(torch.tensor(words).view(shape) for words, shape in zip(
        ([[3], [4]], [5, 6, 7], [8], [9]), ((2, 1), (3,), (1,), ()), strict=True
    ))  # fmt: skip
    key = (torch.tensor(11), torch.tensor([[12], [13]]))
    together = philox(counters, key)
    for i in range(2):
        for j in range(3):
            one = philox(tuple(torch.tensor(w) for w in (3 + i, 5 + j, 8, 9)), (torch.tensor(11), torch.tensor(12 + i)))
            assert [int(word[i, j]) for word in together] == [int(word) for word in one]


def test_bits_follow_the_documented_counter_layout() -> None:
    """Counter (block, position, stream, path and purpose), key (low and high half of the seed)."""
    seed, stream, position, path = 0x1234_5678_9ABC_DEF0, 7, 11, 3
    bits = random_bits(_keys((seed, stream, position)), 5, 8, Purpose.GUMBEL)[0, path]
    for block in range(2):
        counter = tuple(torch.tensor(c) for c in (block, position, stream, path + (int(Purpose.GUMBEL) << 16)))
        key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32))
        assert bits[4 * block : 4 * block + 4].tolist() == [int(w) for w in philox(counter, key)]


def test_masks_do_not_depend_on_batch_composition() -> None:
    keys = _keys((1, 0, 5), (2, 0, 5), (1, 3, 5), (1, 0, 6))
    together = dropout_masks(keys, 5, 30, 0.3)
    for m in range(len(keys)):
        assert torch.equal(dropout_masks(keys[m : m + 1], 5, 30, 0.3)[0], together[m])
    assert torch.equal(dropout_masks(keys.flip(0), 5, 30, 0.3), together.flip(0))


def test_more_paths_or_coordinates_leave_the_first_ones_alone() -> None:
    keys = _keys((4, 2, 9))
    large = dropout_masks(keys, 8, 40, 0.3)
    assert torch.equal(dropout_masks(keys, 3, 17, 0.3), large[:, :3, :17])


@pytest.mark.parametrize("other", [(6, 0, 0), (5 + 2**32, 0, 0), (5, 1, 0), (5, 0, 1)])
def test_seed_stream_and_position_each_change_the_numbers(other: tuple[int, int, int]) -> None:
    a, b = random_bits(_keys((5, 0, 0), other), 1, 64, Purpose.MASK)[:, 0]
    assert not bool((a == b).any())


def test_paths_and_purposes_never_share_numbers() -> None:
    keys = _keys((5, 0, 0))
    words = [random_bits(keys, 4, 32, purpose).flatten() for purpose in Purpose]
    assert len(torch.cat(words).unique()) == len(Purpose) * 4 * 32


def test_the_largest_seed_is_accepted() -> None:
    bits = random_bits(_keys((2**63 - 1, 2**40, 2**31)), 2, 10, Purpose.DRAFT)
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 2**32


@pytest.mark.parametrize("p_drop", [0.02, 0.3, 0.5, 0.9])
def test_coordinates_are_dropped_at_the_asked_rate(p_drop: float) -> None:
    """Seed 0, 200,000 bits, two-sided binomial test; false alarm 1e-6."""
    keys = torch.stack([torch.zeros(100), torch.zeros(100), torch.arange(100)], dim=1).long()
    masks = dropout_masks(keys, 5, 400, p_drop)
    dropped = int((~masks).sum())
    assert stats.binomtest(dropped, masks.numel(), p_drop).pvalue > FALSE_ALARM


def test_zero_drop_rate_drops_nothing() -> None:
    assert bool(dropout_masks(_keys((0, 0, 0), (9, 9, 9)), 5, 1000, 0.0).all())


def test_masks_are_independent_across_paths_and_positions() -> None:
    """Seed 3: agreement of neighbouring masks at p=0.5 is binomial(1/2); false alarm 1e-6 each."""
    keys = torch.tensor([[3, 0, position] for position in range(50)])
    masks = dropout_masks(keys, 4, 512, 0.5)
    for a, b in ((masks[:, 1:], masks[:, :-1]), (masks[1:], masks[:-1]), (masks[..., 1:], masks[..., :-1])):
        agree = int((a == b).sum())
        assert stats.binomtest(agree, a.numel(), 0.5).pvalue > FALSE_ALARM


def test_uniform_numbers_are_uniform() -> None:
    """Seed 1, Kolmogorov-Smirnov on 40,000 numbers; false alarm 1e-6."""
    keys = torch.tensor([[1, stream, 0] for stream in range(100)])
    numbers = uniform(keys, 400, Purpose.ACCEPT).flatten()
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > FALSE_ALARM


def test_gumbel_argmax_draws_from_the_distribution() -> None:
    """Seed 2, 20,000 draws, chi-square over 6 tokens; false alarm 1e-6."""
    probs = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.04, 0.01])
    keys = torch.tensor([[2, 0, position] for position in range(20_000)])
    drawn = (probs.log() + gumbel(keys, 6, Purpose.GUMBEL)[:, 0]).argmax(-1)
    counts = drawn.bincount(minlength=6).double()
    expected = probs.double() / probs.double().sum() * len(keys)
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > FALSE_ALARM


def test_extreme_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[[0, 2**32 - 1]]])
    monkeypatch.setattr(random_ops, "random_bits", lambda *arguments: extremes)
    keys = _keys((0, 0, 0))
    assert bool(gumbel(keys, 2, Purpose.GUMBEL).isfinite().all())
    numbers = uniform(keys, 2, Purpose.ACCEPT)
    assert float(numbers.min()) > 0.0
    assert float(numbers.max()) < 1.0
