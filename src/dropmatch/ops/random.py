"""Counter-based random numbers, so that a number depends on its key alone and not on what else is in the batch.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in int64 tensor arithmetic: the
same bits on CPU and GPU, for any batch and any number of devices. Key: the request's seed. Counter: (block of four
numbers, position, stream of the request, path and purpose).
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_PATH_BITS = 16


class Purpose(IntEnum):
    """What random numbers are for; different purposes never share numbers."""

    MASK = 0
    GUMBEL = 1
    DRAFT = 2
    ACCEPT = 3


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit numbers for each counter. All tensors are int64 holding 32-bit values and broadcast together."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)  # type: ignore[no-untyped-call]
    even, odd = torch.stack((c0, c2)), torch.stack((c1, c3))  # [2, ...]: half the operations of one after the other
    multipliers, steps = _constants(even.device)
    ones = [1] * c0.dim()
    first = torch.stack(torch.broadcast_tensors(*key))  # type: ignore[no-untyped-call]
    first = first.view(2, *ones[first.dim() - 1 :], *first.shape[1:])
    keys = (first + steps.view(_ROUNDS, 2, *ones)) & _MASK
    multipliers = multipliers.view(2, *ones)
    for r in range(_ROUNDS):
        # the product wraps in int64, but its low 64 bits, all that is used, are right
        product = even.mul_(multipliers).flip(0)
        torch.bitwise_right_shift(product, 32, out=even)
        even.bitwise_and_(_MASK).bitwise_xor_(odd).bitwise_xor_(keys[r])
        odd = product.bitwise_and_(_MASK)
    return even[0], odd[0], even[1], odd[1]


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """The two multipliers, and by how much the two keys have grown in each round, [10, 2]."""
    steps = [[r * step & _MASK for step in _KEY_STEPS] for r in range(_ROUNDS)]
    with torch.inference_mode(mode=False):
        return torch.tensor(_MULTIPLIERS, device=device), torch.tensor(steps, device=device)


def random_bits(keys: Tensor, num_paths: int, count: int, purpose: Purpose) -> Tensor:
    """32-bit random numbers.

    keys: [M, 3] int64 of (seed, stream, position). Returns [M, num_paths, count] int64 in [0, 2**32).
    """
    device = keys.device
    seed, stream, position = keys[:, 0, None, None], keys[:, 1, None, None], keys[:, 2, None, None]
    path = torch.arange(num_paths, device=device)[:, None] + (int(purpose) << _PATH_BITS)
    block = torch.arange((count + 3) // 4, device=device)
    words = philox((block, position & _MASK, stream & _MASK, path), (seed & _MASK, (seed >> 32) & _MASK))
    return torch.stack(words, dim=-1).flatten(-2)[..., :count]  # [M, num_paths, count]


def uniform(keys: Tensor, count: int, purpose: Purpose) -> Tensor:
    """Uniform numbers in (0, 1). keys: [M, 3]. Returns [M, count] float64."""
    return (random_bits(keys, 1, count, purpose)[:, 0].double() + 0.5) * 2.0**-32


def gumbel(keys: Tensor, count: int, purpose: Purpose, num_paths: int = 1) -> Tensor:
    """Standard Gumbel noise: argmax(log p + noise) is a draw from p. keys: [M, 3]. Returns [M, num_paths, count]."""
    bits = random_bits(keys, num_paths, count, purpose)
    return (bits.double() + 0.5).mul_(2.0**-32).log_().neg_().log_().neg_().float()


def dropout_masks(keys: Tensor, num_paths: int, d: int, p_drop: float) -> Tensor:
    """Which hidden coordinates each path keeps (Eq. 1). keys: [M, 3]. Returns [M, K, d] bool, False with chance p."""
    return random_bits(keys, num_paths, d, Purpose.MASK) >= round(p_drop * 2**32)
