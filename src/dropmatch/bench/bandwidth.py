"""How fast a device reads memory: what the floor under a forward is made of."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

_REPEATS = 5


def read_bandwidth(device: torch.device, *, num_bytes: int | None = None) -> float:
    """Bytes per second at best, over a few ways to read a block once. num_bytes: its size, far beyond any cache;
    None takes 2 GiB on a GPU and 512 MiB elsewhere."""
    size = num_bytes or (2 * 2**30 if device.type == "cuda" else 2**29)
    block = torch.ones(size // 4, device=device)
    reads: tuple[Callable[[Tensor], Tensor], ...] = (torch.sum, torch.amax, lambda x: torch.dot(x, x))
    best = min(_seconds(read, block) for read in reads for _ in range(_REPEATS))
    return block.nbytes / best


def _seconds(read: Callable[[Tensor], Tensor], block: Tensor) -> float:
    if block.device.type == "cuda":
        torch.cuda.synchronize(block.device)
    started = time.perf_counter()
    read(block)
    if block.device.type == "cuda":
        torch.cuda.synchronize(block.device)
    return time.perf_counter() - started
