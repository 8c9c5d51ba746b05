"""Watches over the operations of torch: which would wait for the device, and how much memory they take at once."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class NoWaiting(TorchDispatchMode):
    """Raises where an operation's result would have to reach the host, or its shape depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "item", "bincount")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        assert not any(name.startswith(wait) for wait in self.WAITS), f"{name} waits for the device"
        if name in {"index", "index_put", "index_put_", "_index_put_impl_"}:
            assert all(i is None or i.dtype != torch.bool for i in args[1]), f"{name} by a mask waits for the device"
        return func(*args, **(kwargs or {}))


class Peak(TorchDispatchMode):
    """Most bytes of storages made inside that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key not in self.alive and storage.nbytes():
                self.alive[key] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, key, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return out
