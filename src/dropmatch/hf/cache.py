"""Key-value cache for a ragged batch that can take back drafted tokens. Knows tensors and lengths; no model, no masks.

Every row has its own length. A forward of N tokens writes row b's keys and values in place at columns lengths[b] to
lengths[b] + N - 1, without counting them; `commit` counts the kept ones. Nothing is copied to reject a draft. Layers
with a sliding window keep all their keys, since a window cannot be widened again after a rejection: the mask cuts.

hf/model.py drives it; transformers' attention layers call `update`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dropmatch.errors import ShapeError

# Buffers grow by half and start with room for a few hundred new tokens, so that a decoding step allocates nothing.
_FIRST_ROOM = 256
_ROUND_TO = 64


class _Write:
    """Where one forward writes: the same columns in every layer, so they are worked out once.

    start: the common first column, or None when rows differ; end: columns that attention reads.
    """

    __slots__ = ("_columns", "_lengths", "end", "num_new", "start")

    def __init__(self, lengths: Sequence[int], num_new: int) -> None:
        self.num_new = num_new
        self.end = max(lengths, default=0) + num_new
        self.start = lengths[0] if lengths and min(lengths) == max(lengths) else None
        self._lengths = list(lengths)
        self._columns: dict[torch.device, Tensor] = {}

    def columns(self, device: torch.device) -> Tensor:
        """[B, 1, N, 1] int64: the column of each new token. One tensor per device."""
        if device not in self._columns:
            first = torch.tensor(self._lengths, device=device).view(-1, 1, 1, 1)
            self._columns[device] = first + torch.arange(self.num_new, device=device).view(1, 1, -1, 1)
        return self._columns[device]


class RaggedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values of one layer, on the device of the keys it is given.

    keys, values: [B, H, capacity, head_dim], or None while nothing was written.
    """

    def __init__(self, cache_write: list[_Write]) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self._write = cache_write  # a one-element list shared by all layers

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for this forward. New room is zero: a masked NaN would still poison the weighted sum."""
        self.keys = _grown(self.keys, key_states, self._write[0].end)
        self.values = _grown(self.values, value_states, self._write[0].end)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens in place. key_states: [B, H, N, head_dim]. Returns views of all columns in use."""
        write = self._write[0]
        if self.keys is None or self.values is None or self.keys.shape[2] < write.end:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            if write.start is not None:
                buffer[:, :, write.start : write.end] = new
            else:
                buffer.scatter_(2, write.columns(new.device).expand_as(new), new)
        return self.keys[:, :, : write.end], self.values[:, :, : write.end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        write = self._write[0]
        return write.end - write.num_new + query_length, 0

    def get_seq_length(self) -> int:
        write = self._write[0]
        return write.end - write.num_new

    def get_max_length(self) -> int:
        return -1

    def move(self, source: Tensor, target: Tensor | slice) -> None:
        """Copy columns source to target. source: [B, 1, P, 1]; target: the same, or a slice when rows are even."""
        for buffer in (self.keys, self.values):
            if buffer is None:
                continue
            B, H, _, d = buffer.shape
            index = source.to(buffer.device).expand(B, H, -1, d)
            kept = buffer.gather(2, index)
            if isinstance(target, slice):
                buffer[:, :, target] = kept
            else:
                buffer.scatter_(2, target.to(buffer.device).expand_as(index), kept)

    def select_rows(self, keep: Tensor | None) -> None:
        """Keep these rows; None drops everything, room included."""
        if keep is None or self.keys is None or self.values is None:
            self.keys = self.values = None
            self.is_initialized = False
            return
        self.keys = self.keys.index_select(0, keep)
        self.values = self.values.index_select(0, keep)

    def append_rows(self, num_rows: int, other: RaggedLayer, other_rows: int) -> None:
        """Put another layer's rows behind this layer's num_rows rows. A layer without buffers stands for empty rows."""
        self.keys = _stacked(self.keys, num_rows, other.keys, other_rows)
        self.values = _stacked(self.values, num_rows, other.values, other_rows)
        self.is_initialized = self.keys is not None


class RaggedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Cache of a batch of rows with different lengths, in the form that transformers' models expect.

    lengths: cached tokens of each row; one list for the cache's life, changed in place.
    """

    def __init__(self, num_layers: int, num_rows: int = 0) -> None:
        self.lengths: list[int] = [0] * num_rows
        self._write = [_Write(self.lengths, 0)]
        super().__init__(layers=[RaggedLayer(self._write) for _ in range(num_layers)])

    @property
    def num_pending(self) -> int:
        """Tokens of the last forward that are written but not yet counted."""
        return self._write[0].num_new

    def begin(self, num_new: int) -> None:
        """Announce a forward of num_new tokens per row. Uncommitted tokens of an earlier forward are overwritten."""
        self._write[0] = _Write(self.lengths, num_new)

    def commit(self, num_kept: Sequence[int], path: Tensor | None = None) -> None:
        """Count tokens of the last forward as cached.

        num_kept: [B], at most the forward's tokens; path: [B, P] ascending nodes, of which row b keeps the first
        num_kept[b], or None for the first tokens. Raises ShapeError if the numbers do not fit the last forward.
        Length 7 and path [0, 2, 5] with 3 kept: columns 7, 9, 12 become 7, 8, 9.
        """
        longest = self._check_kept(num_kept, path)
        if path is not None and longest > 1:  # the root is where it belongs
            self._gather(path[:, 1:longest])
        self.lengths[:] = [length + kept for length, kept in zip(self.lengths, num_kept, strict=True)]
        self.begin(0)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget cached tokens behind lengths[b]. Raises ShapeError if a row has fewer."""
        if len(lengths) != len(self.lengths) or any(
            not 0 <= new <= old for new, old in zip(lengths, self.lengths, strict=True)
        ):
            raise ShapeError(f"Cannot truncate rows of {self.lengths} cached tokens to {list(lengths)}.")
        self.lengths[:] = lengths
        self.begin(0)

    def filter(self, keep: Sequence[int]) -> None:
        """Keep only these rows, in this order. Tokens that wait for commit stay with their rows."""
        if list(keep) == list(range(len(self.lengths))):
            return
        index = torch.tensor(list(keep)) if keep else None
        for layer in self.layers:
            if index is not None and layer.keys is not None:
                index = index.to(layer.keys.device)  # once per device, not per layer
            layer.select_rows(index)
        self.lengths[:] = [self.lengths[row] for row in keep]
        self.begin(self.num_pending if keep else 0)

    def append(self, other: RaggedCache) -> None:
        """Put another cache's rows behind this one's. The other must not be used afterwards."""
        for layer, new in zip(self.layers, other.layers, strict=True):
            layer.append_rows(len(self.lengths), new, len(other.lengths))
        self.lengths.extend(other.lengths)
        self.begin(0)

    def select(self, rows: Sequence[int], room: int) -> RaggedCache:
        """A copy of these rows' cached tokens, with room for a forward of `room` tokens."""
        part = RaggedCache(len(self.layers))
        part.lengths.extend(self.lengths[row] for row in rows)
        index = torch.tensor(list(rows))
        end = max(part.lengths) + room
        for layer, own in zip(self.layers, part.layers, strict=True):
            if layer.keys is not None and layer.values is not None:
                there = index.to(layer.keys.device)
                own.keys = layer.keys[:, :, :end].index_select(0, there)
                own.values = layer.values[:, :, :end].index_select(0, there)
                own.is_initialized = True
        return part

    def spread(self, part: RaggedCache, index: Sequence[int]) -> None:
        """Take over the last forward of a part: row b gets what the part's row index[b] wrote, uncounted."""
        num_new = part.num_pending
        self.begin(num_new)
        rows = torch.tensor(list(index))
        for layer, other in zip(self.layers, part.layers, strict=True):
            there = rows.to(other.keys.device)
            columns = part._write[0].columns(other.keys.device)
            layer.update(*(_columns_of(buffer, columns)[there] for buffer in (other.keys, other.values)))

    def _check_kept(self, num_kept: Sequence[int], path: Tensor | None) -> int:
        longest = max(num_kept, default=0)
        if len(num_kept) != len(self.lengths) or longest > self.num_pending or min(num_kept, default=0) < 0:
            raise ShapeError(
                f"Cannot commit {list(num_kept)} tokens: the last forward ran {self.num_pending} tokens "
                f"for each of {len(self.lengths)} rows."
            )
        if path is not None and (path.shape[0] != len(self.lengths) or path.shape[1] < longest):
            raise ShapeError(f"A path of shape {tuple(path.shape)} cannot hold {list(num_kept)} kept tokens.")
        return longest

    def _gather(self, path: Tensor) -> None:
        """Move the columns of path nodes [B, P'] to the columns behind the root. Padding lands behind the kept ones."""
        write, width = self._write[0], path.shape[1]
        source = path[:, None, :, None]
        if write.start is not None:
            source = source + write.start
            target: Tensor | slice = slice(write.start + 1, write.start + 1 + width)
        else:
            columns = write.columns(path.device)
            source = source + columns[:, :, :1]
            target = columns[:, :, 1 : 1 + width]
        for layer in self.layers:
            layer.move(source, target)


def _columns_of(buffer: Tensor, columns: Tensor) -> Tensor:
    """Picks columns [B, 1, N, 1] of a buffer [B, H, S, d]. Keys and values may differ in H and d. [B, H, N, d]."""
    _, H, _, d = buffer.shape
    return buffer.gather(2, columns.expand(-1, H, -1, d))


def _grown(buffer: Tensor | None, new: Tensor, end: int) -> Tensor:
    """A buffer with room for `end` columns that starts with the given one's content."""
    B, H, _, d = new.shape
    wanted = end + _FIRST_ROOM if buffer is None else max(end, buffer.shape[2] * 3 // 2)
    grown = new.new_zeros(B, H, -(-wanted // _ROUND_TO) * _ROUND_TO, d)
    if buffer is not None:
        grown[:, :, : buffer.shape[2]] = buffer
    return grown


def _stacked(first: Tensor | None, first_rows: int, second: Tensor | None, second_rows: int) -> Tensor | None:
    """Rows of two buffers of different capacity in one; None stands for rows without a token."""
    if first_rows == 0:
        return second
    if second_rows == 0:
        return first
    like = first if first is not None else second
    if like is None:
        return None
    capacity = max(buffer.shape[2] for buffer in (first, second) if buffer is not None)
    stacked = like.new_zeros(first_rows + second_rows, like.shape[1], capacity, like.shape[3])
    if first is not None:
        stacked[:first_rows, :, : first.shape[2]] = first
    if second is not None:
        stacked[first_rows:, :, : second.shape[2]] = second
    return stacked
