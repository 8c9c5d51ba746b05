"""RaggedCache as tensors: where tokens are written, what commit, truncate, filter and append move."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dropmatch.errors import ShapeError
from dropmatch.hf.cache import RaggedCache
from dropmatch.hf.masks import additive, node_positions, visible_keys

CPU = torch.device("cpu")


def states(rows: list[list[int]], head_dim: int = 2) -> Tensor:
    """[B, 3, N, head_dim] with each token's number everywhere."""
    return torch.tensor(rows, dtype=torch.float32)[:, None, :, None].expand(-1, 3, -1, head_dim)


def write(cache: RaggedCache, rows: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """One forward: the same tokens into every layer; values are keys plus 1000 and of another width."""
    cache.begin(len(rows[0]))
    return [cache.update(states(rows), states(rows, head_dim=5) + 1000, index) for index in range(len(cache.layers))]


def content(cache: RaggedCache) -> list[list[int]]:
    """Cached tokens of each row; both layers, all heads, keys and values must agree."""
    rows = []
    for row, length in enumerate(cache.lengths):
        keys = cache.layers[0].keys[row, 0, :length, 0]
        for layer in cache.layers:
            assert (layer.keys[row, :, :length] == keys[:, None]).all()
            assert (layer.values[row, :, :length] == keys[:, None] + 1000).all()
        rows.append(keys.int().tolist())
    return rows


def filled(*lengths: int) -> RaggedCache:
    """Row b holds the tokens 100 b + 1, 100 b + 2, ..."""
    cache = RaggedCache(2, num_rows=len(lengths))
    write(cache, [[100 * b + n for n in range(1, max(lengths) + 1)] for b in range(len(lengths))])
    cache.commit(lengths)
    return cache


def test_tokens_are_not_cached_before_commit() -> None:
    cache = filled(3, 1)
    keys, values = write(cache, [[7, 8], [107, 108]])[0]
    assert keys.shape == (2, 3, 5, 2)
    assert values.shape == (2, 3, 5, 5)
    assert keys[0, 0, :, 0].tolist() == [1, 2, 3, 7, 8]
    assert keys[1, 0, :3, 0].tolist() == [101, 107, 108]
    assert cache.lengths == [3, 1]
    cache.commit([0, 2])
    assert content(cache) == [[1, 2, 3], [101, 107, 108]]


@pytest.mark.parametrize("lengths", [(3, 1), (2, 2)])
def test_commit_of_a_path_gathers_its_columns(lengths: tuple[int, int]) -> None:
    """Row 0 keeps nodes 0, 2, 3 and row 1 nodes 0, 4; each path is padded by its last node."""
    cache = filled(*lengths)
    before = content(cache)
    write(cache, [[10, 11, 12, 13, 14], [110, 111, 112, 113, 114]])
    cache.commit([3, 2], torch.tensor([[0, 2, 3, 3], [0, 4, 4, 4]]))
    assert content(cache) == [before[0] + [10, 12, 13], before[1] + [110, 114]]


def test_the_next_forward_writes_over_rejected_tokens() -> None:
    cache = filled(2, 4)
    write(cache, [[10, 11, 12], [110, 111, 112]])
    cache.commit([1, 3])
    write(cache, [[20], [120]])
    cache.commit([1, 1])
    assert content(cache) == [[1, 2, 10, 20], [101, 102, 103, 104, 110, 111, 112, 120]]


def test_steps_do_not_allocate() -> None:
    cache = filled(5)
    buffer = cache.layers[0].keys
    for step in range(50):
        write(cache, [[step, step, step]])
        cache.commit([1])
    assert cache.layers[0].keys is buffer


def test_growing_keeps_content_and_grows_geometrically() -> None:
    cache = filled(3, 1)
    capacities = []
    for step in range(400):
        write(cache, [[1000 + step] * 9, [2000 + step] * 9])
        cache.commit([9, 1])
        capacities.append(cache.layers[0].keys.shape[2])
    assert len(set(capacities)) < 8
    rows = content(cache)
    assert rows[0][:5] == [1, 2, 3, 1000, 1000]
    assert rows[1] == [101, *range(2000, 2400)]


def test_room_that_was_never_written_is_zero() -> None:
    """A masked column has attention weight 0, and 0 times a leftover NaN is NaN."""
    cache = filled(40, 1)
    keys, values = write(cache, [[7], [7]])[0]
    assert keys.isfinite().all()
    assert values.isfinite().all()
    cache.append(filled(300))
    assert cache.layers[0].keys[:2, :, 41:].eq(0).all()


def test_truncate_forgets_the_end() -> None:
    cache = filled(3, 2)
    cache.truncate([1, 2])
    assert content(cache) == [[1], [101, 102]]
    for wrong in ([2, 2], [1], [-1, 0]):
        with pytest.raises(ShapeError, match="Cannot truncate"):
            cache.truncate(wrong)


def test_filter_keeps_rows_in_order_with_their_pending_tokens() -> None:
    cache = filled(3, 1, 2)
    write(cache, [[10, 11], [110, 111], [210, 211]])
    cache.filter([2, 0])
    cache.commit([2, 1])
    assert content(cache) == [[201, 202, 210, 211], [1, 2, 3, 10]]


def test_filter_of_all_rows_copies_nothing() -> None:
    cache = filled(3, 1)
    buffer = cache.layers[0].keys
    cache.filter([0, 1])
    assert cache.layers[0].keys is buffer


def test_filter_to_nothing_and_start_again() -> None:
    cache = filled(3, 1)
    lengths = cache.lengths
    cache.filter([])
    assert cache.lengths == []
    assert cache.layers[0].keys is None
    cache.append(filled(2))
    assert content(cache) == [[1, 2]]
    assert cache.lengths is lengths


def test_append_joins_rows_of_other_capacity_and_empty_ones() -> None:
    cache = filled(2, 300)
    cache.append(RaggedCache(2, num_rows=1))
    cache.append(filled(3))
    assert cache.lengths == [2, 300, 0, 3]
    write(cache, [[10], [110], [210], [310]])
    cache.commit([1, 1, 1, 1])
    rows = content(cache)
    assert [rows[0], rows[2], rows[3]] == [[1, 2, 10], [210], [1, 2, 3, 310]]
    assert rows[1][-2:] == [400, 110]


def test_append_to_rows_without_tokens() -> None:
    cache = RaggedCache(2, num_rows=2)
    cache.append(filled(3))
    write(cache, [[10], [110], [210]])
    cache.commit([1, 1, 1])
    assert content(cache) == [[10], [110], [1, 2, 3, 210]]


@pytest.mark.parametrize("num_kept", [[3, 1], [1], [-1, 0]])
def test_commit_refuses_what_the_forward_did_not_run(num_kept: list[int]) -> None:
    cache = filled(1, 1)
    write(cache, [[10, 11], [110, 111]])
    with pytest.raises(ShapeError, match="the last forward ran 2 tokens for each of 2 rows"):
        cache.commit(num_kept)


def test_commit_counts_a_forward_once() -> None:
    cache = filled(1)
    write(cache, [[10]])
    cache.commit([1])
    with pytest.raises(ShapeError, match="ran 0 tokens"):
        cache.commit([1])


def test_commit_refuses_a_path_that_is_too_short() -> None:
    cache = filled(1)
    write(cache, [[10, 11, 12]])
    with pytest.raises(ShapeError, match="path of shape"):
        cache.commit([3], torch.tensor([[0, 1]]))


TREE = torch.tensor(  # node 0 -> 1, 2; node 2 -> 3, so that node 2's column is not its position
    [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], dtype=torch.bool
)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 9])
@pytest.mark.parametrize("lengths", [[3, 1, 0], [4, 4, 4], [5]])
@pytest.mark.parametrize("is_chain", [True, False])
def test_mask_equals_its_definition(lengths: list[int], window: int | None, is_chain: bool) -> None:
    """A node sees its row's cached tokens and its ancestors that are less than a window away by position."""
    ancestors = torch.ones(4, 4, dtype=torch.bool).tril()[None] if is_chain else TREE
    ancestors = ancestors.expand(len(lengths), 4, 4)
    depth = ancestors.sum(-1) - 1
    mask = visible_keys(lengths, None if is_chain else ancestors, 4, window, CPU).expand(len(lengths), -1, -1, -1)
    positions = node_positions(lengths, None if is_chain else depth, 4, CPU)
    assert mask.shape == (len(lengths), 1, 4, max(lengths) + 4)
    for b, length in enumerate(lengths):
        for n in range(4):
            position = length + int(depth[b, n])
            assert positions[b, n] == position
            for column in range(mask.shape[-1]):
                m = column - length
                key_position = column if m < 0 else length + int(depth[b, m]) if m < 4 else -1
                is_mine = m < 0 or (m < 4 and bool(ancestors[b, n, m]))
                is_near = window is None or key_position > position - window
                assert bool(mask[b, 0, n, column]) == (is_mine and is_near)


def test_additive_mask_is_zero_or_the_lowest_number() -> None:
    mask = additive(torch.tensor([True, False]), torch.bfloat16)
    assert mask.tolist() == [0.0, torch.finfo(torch.bfloat16).min]
    assert mask.dtype == torch.bfloat16


def test_a_part_takes_rows_and_gives_back_what_it_wrote() -> None:
    """Rows 0 and 2 hold the same tokens and run as one; keys are narrower than values."""
    cache = RaggedCache(2, num_rows=3)
    write(cache, [[1, 2, 3], [101, 0, 0], [1, 2, 3]])
    cache.commit([3, 1, 3])
    part = cache.select([0, 1], room=2)
    assert content(part) == [[1, 2, 3], [101]]
    write(part, [[4, 5], [102, 103]])
    cache.spread(part, [0, 1, 0])
    cache.commit([2, 1, 1])
    assert content(cache) == [[1, 2, 3, 4, 5], [101, 102], [1, 2, 3, 4]]
