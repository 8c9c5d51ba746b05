"""What decoding costs, counted instead of timed: numbers that are the same on every machine.

`Meter` sees every operation that torch runs inside its block, and adds up

    target_forwards, target_tokens      calls of the target's body, prefill included, and the tokens they ran
    drafter_forwards, drafter_tokens    the same of the draft model's body
    head_rows                           hidden states multiplied with the whole LM head of the target, paths included
    gathered_rows                       single rows of that head that were read out
    tokens_judged                       drafted tokens that a rule decided about
    positions_asked                     positions at which the K dropout heads were asked
    host_syncs                          times that the host had to wait for a value, had the tensors lain on a GPU
    host_uploads                        tensors made of the host's own numbers, which would be copied to the GPU
    operations                          operations dispatched, decomposed to those that have a kernel
    bytes_allocated                     bytes of all tensors that operations made (views and in-place results are none)

A host sync is a read of a tensor's values (item, bool, int, tolist, numpy, a copy to the CPU) or an operation whose
result has a size that hangs on values (nonzero, unique, a boolean index).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

COUNTS = (
    "target_forwards",
    "target_tokens",
    "drafter_forwards",
    "drafter_tokens",
    "head_rows",
    "gathered_rows",
    "tokens_judged",
    "positions_asked",
    "host_syncs",
    "host_uploads",
    "operations",
    "bytes_allocated",
)
OF_TORCH = ("host_syncs", "host_uploads", "operations", "bytes_allocated")
"""Counts that another version of torch or transformers may change although dropmatch does not."""

_READS = {
    getattr(Tensor, name)
    for name in ("tolist", "numpy", "cpu", "__array__", "__contains__")  # values leave without an operation on a CPU
}
_UPLOADS = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor}
_VALUE_SIZED = {
    aten.nonzero.default,
    aten.nonzero_numpy.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
_PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0, aten.mv.default: 1, aten.linear.default: 0}
"""Products, with the place of the argument whose rows are multiplied with the other one."""
_GATHERS = {aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.gather.default}


class Meter(TorchDispatchMode):
    """Counts inside its with block, into `counts`. head_weight: the [V, d] matrix of the target's LM head."""

    def __init__(self, head_weight: Tensor) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._head = _storage(head_weight)
        self._width = head_weight.shape[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:  # under inference mode whole composites arrive here: count what they are made of
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        known = {_storage(tensor) for tensor in _tensors((args, *kwargs.values()))}
        fresh = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in _tensors((out,))}
        self.counts["operations"] += 1
        self.counts["bytes_allocated"] += sum(size for storage, size in fresh.items() if storage not in known)
        self.counts["host_syncs"] += _syncs(func, args)
        if self._head in known:
            self._count_head(func, args, out)
        return out

    def _count_head(self, func: Any, args: Any, out: Any) -> None:
        if func in _PRODUCTS:
            rows = args[_PRODUCTS[func]]
            if _storage(rows) == self._head:  # the head stands on the left: its factor's columns are the rows asked
                rows = args[_PRODUCTS[func] + 1].transpose(-1, -2)
            self.counts["head_rows"] += rows.numel() // rows.shape[-1]
        elif func in _GATHERS:
            self.counts["gathered_rows"] += out.numel() // self._width


class _Crossings(TorchFunctionMode):
    """Values that leave or enter tensors without an operation where the tensors are on a CPU already."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts["host_syncs"] += func in _READS
        self.counts["host_uploads"] += func in _UPLOADS
        return func(*args, **(kwargs or {}))


def _syncs(func: Any, args: Any) -> int:
    """How often one operation would make the host wait for a GPU."""
    if func is aten._local_scalar_dense.default or func in _VALUE_SIZED:
        return 1
    if func is aten.equal.default:
        return 1
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        masks = sum(1 for index in args[1] if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8))
        is_fill = func is not aten.index.Tensor and len(args[1]) == masks == 1 and args[2].numel() == 1
        return 0 if is_fill else masks  # torch turns a fill under one mask into masked_fill
    return 0


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operation has no kernel of its own on a CPU, but is made of others."""
    key = torch._C.DispatchKey
    return func.has_kernel_for_dispatch_key(key.CompositeImplicitAutograd) and not func.has_kernel_for_dispatch_key(
        key.CPU
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def counted(head_weight: Tensor, *, target: nn.Module, drafter: nn.Module | None = None) -> Iterator[Counter[str]]:
    """Counts of what happens in the block. target, drafter: bodies, called with input_ids [B, N]."""
    meter = Meter(head_weight)
    with ExitStack() as stack:
        for name, body in (("target", target), ("drafter", drafter)):
            if body is not None:
                handle = body.register_forward_pre_hook(_body_hook(meter.counts, name), with_kwargs=True)
                stack.callback(handle.remove)
        stack.enter_context(_Crossings(meter.counts))
        stack.enter_context(meter)
        yield meter.counts


def _body_hook(counts: Counter[str], name: str) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        counts[f"{name}_forwards"] += 1
        counts[f"{name}_tokens"] += kwargs["input_ids"].numel()

    return hook


def differences(expected: dict[str, dict[str, int]], found: dict[str, dict[str, int]]) -> list[str]:
    """What grew or shrank, one line a count: "dropmatch, batch 1: host_syncs grew from 40 to 52 (+30.0%)"."""
    lines = [f"{case}: not recorded" for case in found if case not in expected]
    for case, counts in found.items():
        for name, count in counts.items():
            before = expected.get(case, {}).get(name, count)
            if count != before:
                share = f" ({count / before - 1:+.1%})" if before else ""
                lines.append(f"{case}: {name} {'grew' if count > before else 'shrank'} from {before} to {count}{share}")
    return lines
