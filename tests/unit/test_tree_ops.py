"""Ancestors, alive nodes and paths of random trees against loops; the chain is the special case."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dropmatch.core.interfaces import DraftTree
from dropmatch.errors import ShapeError
from dropmatch.ops.tree import alive_nodes, ancestor_matrix, path_to

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)


@st.composite
def tree_shapes(draw: st.DrawFn, max_nodes: int = 12) -> list[int]:
    """Parents of a random tree."""
    N = draw(st.integers(1, max_nodes))
    return [-1] + [draw(st.integers(0, n - 1)) for n in range(1, N)]


def _path(parents: list[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def test_documented_example_of_the_ancestor_matrix() -> None:
    A = ancestor_matrix(torch.tensor([[-1, 0, 0, 1]]))
    assert A[0, 3].nonzero()[:, 0].tolist() == [0, 1, 3]


@PROPERTY
@given(st.lists(tree_shapes(), min_size=1, max_size=3))
def test_ancestor_rows_are_root_paths(shapes: list[list[int]]) -> None:
    N = min(len(shape) for shape in shapes)
    shapes = [shape[:N] for shape in shapes]
    A = ancestor_matrix(torch.tensor(shapes))
    for b, shape in enumerate(shapes):
        for n in range(N):
            assert A[b, n].nonzero()[:, 0].tolist() == _path(shape, n)


@PROPERTY
@given(tree_shapes(), st.data())
def test_a_node_is_alive_if_its_whole_path_is_accepted(shape: list[int], data: st.DataObject) -> None:
    accepted = data.draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    alive = alive_nodes(torch.tensor([accepted]), ancestor_matrix(torch.tensor([shape])))[0]
    expected = [all(accepted[m] for m in _path(shape, n) if m > 0) for n in range(len(shape))]
    assert alive.tolist() == expected


@PROPERTY
@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_chain_acceptance_equals_cumprod(accepted: list[bool]) -> None:
    flags = torch.tensor([[True, *accepted]])
    N = flags.shape[1]
    lower = torch.ones(1, N, N, dtype=torch.bool).tril()
    assert torch.equal(alive_nodes(flags, lower).int(), flags.int().cumprod(-1).int())


@PROPERTY
@given(tree_shapes(), st.data())
def test_path_runs_from_the_root_and_repeats_its_end(shape: list[int], data: st.DataObject) -> None:
    nodes = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=4))
    A = ancestor_matrix(torch.tensor([shape] * len(nodes)))
    paths = path_to(torch.tensor(nodes), A)
    expected = [_path(shape, node) for node in nodes]
    longest = max(len(path) for path in expected)
    assert paths.tolist() == [path + [path[-1]] * (longest - len(path)) for path in expected]


@pytest.mark.parametrize("parents", [[0, 0], [-1, 1], [-1, 2, 0], [-1, -1], [-1, 0, -1]])
def test_malformed_trees_are_refused(parents: list[int]) -> None:
    with pytest.raises(ShapeError, match="parent -1 at node 0"):
        ancestor_matrix(torch.tensor([parents]))


def test_chain_and_tree_constructors_agree() -> None:
    tokens = torch.tensor([[5, 1, 2, 3]])
    chain = DraftTree.chain(tokens, torch.tensor([4]))
    tree = DraftTree.tree(tokens, torch.tensor([[-1, 0, 1, 2]]))
    for name in ("tokens", "parents", "valid", "ancestors", "depth", "is_sampled"):
        assert torch.equal(getattr(chain, name), getattr(tree, name)), name
    assert chain.is_chain
    assert not tree.is_chain


def test_shorter_rows_of_a_chain_are_padded_as_invalid() -> None:
    chain = DraftTree.chain(torch.zeros(3, 4, dtype=torch.int64), torch.tensor([4, 1, 2]))
    assert chain.valid.sum(-1).tolist() == [4, 1, 2]
    assert bool(chain.valid[:, 0].all())
