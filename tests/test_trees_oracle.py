"""The oracles of topk_logprobs, build_tree and the encodings, held against less: enumeration, hand-made trees, Decimal.

The rule of the best-first search itself is held against all prefixes in order in test_refs.py.
"""

from __future__ import annotations

import decimal
import itertools
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from refs import oracle, trees

# The best tree


def closed_sets(num_positions: int, num_candidates: int, size: int) -> list[tuple[tuple[int, ...], ...]]:
    """Every set of this many paths that holds, with a path, its parent: every tree, whatever its shape."""
    paths = [
        path for depth in range(1, num_positions + 1) for path in itertools.product(range(num_candidates), repeat=depth)
    ]
    return [
        nodes
        for nodes in itertools.combinations(paths, size)
        if all(len(path) == 1 or path[:-1] in nodes for path in nodes)
    ]


@pytest.mark.parametrize(("num_positions", "num_candidates", "most"), [(1, 5, 5), (2, 2, 6), (3, 2, 5), (2, 3, 5)])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_tree_has_a_larger_sum_of_path_probabilities(
    num_positions: int, num_candidates: int, most: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # Powers of 2 as probabilities, exponents as log-probs: sums of the latter and products of the former are exact.
    exponents = np.cumsum(rng.integers(0, 4, size=(num_positions, num_candidates)), axis=1)

    def total(nodes: Any) -> Fraction:
        return sum((Fraction(1, 2 ** int(sum(exponents[range(len(path)), path]))) for path in nodes), Fraction(0))

    for size in range(most + 1):
        found = trees.best_first_tree(-exponents.astype(np.float32), size)["ranks"][1:]
        candidates = closed_sets(num_positions, num_candidates, size)
        assert set(found) in [set(nodes) for nodes in candidates]
        assert total(found) == max(total(nodes) for nodes in candidates)


def test_a_batch_by_hand() -> None:
    inf, nan = np.inf, np.nan
    logprobs = np.array([[[-1, -2], [-0.5, -4]], [[-1, -inf], [nan, -0.25]]], dtype=np.float32)
    token_ids = np.array([[[10, 11], [20, 0]], [[12, 13], [22, 23]]], dtype=np.int32)
    tree = trees.draft_tree(logprobs, token_ids, np.array([7, 0], dtype=np.int32), 4)
    expected = {
        "tokens": [[7, 10, 20, 11, 20], [0, 12, -1, -1, -1]],
        "parents": [[-1, 0, 1, 0, 3], [-1, 0, -1, -1, -1]],
        "depths": [[0, 1, 2, 1, 2], [0, 1, 0, 0, 0]],
        "scores": [[0, -1, -1.5, -2, -2.5], [0, -1, -inf, -inf, -inf]],
        "num_nodes": [5, 2],
        "tree_mask": [[[0b1], [0b11], [0b111], [0b1001], [0b11001]], [[0b1], [0b11], [0], [0], [0]]],
        "first_child": [[1, 2, -1, 4, -1], [1, -1, -1, -1, -1]],
        "next_sibling": [[-1, 3, -1, -1, -1], [-1, -1, -1, -1, -1]],
        "input_ids": [[7, 10, 20, 11, 20], [0, 12, 0, 0, 0]],
        "max_depth": 2,
    }
    assert {name: array.tolist() for name, array in tree.items()} == expected
    dtypes = {name: array.dtype.name for name, array in tree.items()}
    assert dtypes.pop("scores") == "float64" and dtypes.pop("tree_mask") == "uint32"
    assert set(dtypes.values()) == {"int32"}


def test_no_budget_gives_the_root() -> None:
    tree = trees.draft_tree(np.zeros((1, 2, 2), np.float32), np.ones((1, 2, 2), np.int32), np.array([5], np.int32), 0)
    assert tree["tokens"].tolist() == tree["input_ids"].tolist() == [[5]] and tree["max_depth"] == 0
    assert tree["tree_mask"].tolist() == [[[1]]] and tree["first_child"].tolist() == [[-1]]


# Encodings


def test_encodings_by_hand() -> None:
    #        0            and  0, 1 behind 0
    #      1   3
    #      2   4
    parents = np.array([[-1, 0, 1, 0, 3], [-1, 0, -1, -1, -1]], dtype=np.int32)
    found = trees.encodings(parents, np.array([2, 1], dtype=np.int32), 2)
    sees = [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
    ]
    none = [-1, -1, -1]
    expected = {
        "positions": [[2, 3, 4, 3, 4], [1, 2, 1, 1, 1]],
        "retrieve_indices": [[[0, 1, 2], [0, 3, 4], none, none], [[0, 1, -1], none, none, none]],
        "retrieve_index": [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]],
        "retrieve_next_token": [[1, 2, -1, 4, -1], [1, -1, -1, -1, -1]],
        "retrieve_next_sibling": [[-1, 3, -1, -1, -1], [-1, -1, -1, -1, -1]],
        "full_mask": [x for row in sees[0] for x in [1, 1, *row]] + [x for row in sees[1] for x in [1, *row]],
        "qlen_only_mask": [x for tree in sees for row in tree for x in row],
        "tensorrt_mask": [[[1], [3], [7], [9], [25]], [[1], [3], [0], [0], [0]]],
        "dense_bias": [[[0 if x else -math.inf for x in row] for row in tree] for tree in sees],
        "bitpacked_mask": [1, 3, 7, 9, 25, 1, 3, 0, 0, 0],
    }
    assert {name: array.tolist() for name, array in found.items()} == expected
    assert {name: array.dtype.name for name, array in found.items()} == {
        "positions": "int32",
        "retrieve_indices": "int32",
        "retrieve_index": "int64",
        "retrieve_next_token": "int64",
        "retrieve_next_sibling": "int64",
        "full_mask": "bool",
        "qlen_only_mask": "bool",
        "tensorrt_mask": "int32",
        "dense_bias": "float32",
        "bitpacked_mask": "uint8",
    }


def test_the_root_alone_is_a_leaf() -> None:
    found = trees.encodings(np.array([[-1]], dtype=np.int32), np.array([0], dtype=np.int32), 0)
    assert found["retrieve_indices"].tolist() == [[[0]]]


def random_trees(seed: int, num_nodes: int, batch: int = 4) -> dict[str, np.ndarray]:
    """Nodes that hang on random earlier ones; trees of random sizes, one of them full."""
    rng = np.random.default_rng(seed)
    sizes = [num_nodes, *rng.integers(1, num_nodes + 1, size=batch - 1).tolist()]
    parents = [[-1, *(int(rng.integers(0, i)) for i in range(1, size))] for size in sizes]
    tokens = [rng.integers(0, 1000, size=size).tolist() for size in sizes]
    scores = [(-rng.random(size)).tolist() for size in sizes]
    return trees.assemble(parents, tokens, scores, num_nodes=num_nodes, max_depth=num_nodes - 1)


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 8, 9, 31, 32, 33, 64, 65])
def test_forms_of_random_trees_by_matrices(num_nodes: int) -> None:
    tree = random_trees(num_nodes, num_nodes)
    batch = len(tree["num_nodes"])
    lengths = np.array([3, 0, 5, 1], dtype=np.int32)
    found = trees.encodings(tree["parents"], lengths, num_nodes - 1)
    full = []
    for b, count in enumerate(tree["num_nodes"]):
        # Steps along edges: I + A + A**2 + ... tells who is above whom.
        edges = np.zeros((num_nodes, num_nodes), dtype=np.int64)
        edges[np.arange(1, count), tree["parents"][b, 1:count]] = 1
        sees = np.zeros_like(edges)
        sees[:count, :count] = np.eye(count, dtype=np.int64)
        for _ in range(num_nodes):
            sees = (sees + sees @ edges > 0).astype(np.int64)
        octets = np.packbits(sees.astype(bool), axis=1, bitorder="little")
        for i in range(num_nodes):
            assert int.from_bytes(octets[i].tobytes(), "little") == int.from_bytes(
                tree["tree_mask"][b, i].astype("<u4").tobytes(), "little"
            )
            assert tree["depths"][b, i] == max(sees[i].sum() - 1, 0)
            children = np.flatnonzero(edges[:, i]).tolist()
            walked, child = [], int(tree["first_child"][b, i])
            while child >= 0:
                walked.append(child)
                child = int(tree["next_sibling"][b, child])
            assert walked == children
        leaves = np.flatnonzero((edges.sum(axis=0) == 0) & (np.arange(num_nodes) < count))
        for row, leaf in itertools.zip_longest(found["retrieve_indices"][b], leaves.tolist()):
            path = np.flatnonzero(sees[leaf]).tolist() if leaf is not None else []
            assert row.tolist() == path + [-1] * (num_nodes - len(path))
        full.append(np.hstack([np.ones((num_nodes, lengths[b]), dtype=bool), sees.astype(bool)]).ravel())
        square = slice(b * num_nodes**2, (b + 1) * num_nodes**2)
        assert (found["qlen_only_mask"][square] == sees.astype(bool).ravel()).all()
        assert (found["dense_bias"][b] == np.where(sees, 0, -np.inf)).all()
        assert (found["positions"][b] == lengths[b] + tree["depths"][b]).all()
    assert (found["full_mask"] == np.concatenate(full)).all()
    assert (found["tensorrt_mask"].view(np.uint32) == tree["tree_mask"]).all()
    assert (found["retrieve_next_token"] == tree["first_child"]).all()
    assert (found["retrieve_next_sibling"] == tree["next_sibling"]).all()
    assert found["retrieve_index"].ravel().tolist() == list(range(batch * num_nodes))
    assert ("bitpacked_mask" in found) == (num_nodes <= 32)
    if num_nodes <= 32:
        bits = found["bitpacked_mask"]
        assert bits.dtype.itemsize * 8 == (8 if num_nodes <= 8 else 16 if num_nodes <= 16 else 32)
        assert (bits == tree["tree_mask"].ravel()).all()


@pytest.mark.parametrize("order", ["depth_first", "breadth_first"])
def test_other_orders_by_hand(order: str) -> None:
    #      0
    #    1   2
    #    4   3 5
    parents, tokens = [[-1, 0, 0, 2, 1, 2]], [[10, 11, 12, 13, 14, 15]]
    tree = trees.assemble(parents, tokens, [[0.0, -1.0, -2.0, -3.0, -4.0, -5.0]], num_nodes=7, max_depth=2)
    new = trees.relabel(tree, order)
    expected = {
        "depth_first": ([0, 1, 4, 2, 3, 5, 6], [-1, 0, 1, 0, 3, 3, -1], [0, 1, 2, 1, 2, 2, 0]),
        "breadth_first": ([0, 1, 2, 4, 3, 5, 6], [-1, 0, 0, 1, 2, 2, -1], [0, 1, 1, 2, 2, 2, 0]),
    }[order]
    assert [new[name].tolist() for name in ("permutation", "parents", "depths")] == [[x] for x in expected]
    assert new["tokens"].tolist() == [[tree["tokens"][0, old] for old in expected[0]]]
    assert new["scores"].tolist() == [[tree["scores"][0, old] for old in expected[0]]]


@pytest.mark.parametrize("order", ["depth_first", "breadth_first"])
@pytest.mark.parametrize("num_nodes", [1, 2, 9, 33])
def test_other_orders_of_random_trees(order: str, num_nodes: int) -> None:
    tree = random_trees(num_nodes, num_nodes)
    new = trees.relabel(tree, order)
    for b, count in enumerate(tree["num_nodes"].tolist()):
        old = new["permutation"][b].tolist()
        assert sorted(old) == list(range(num_nodes)) and old[0] == 0 and old[count:] == list(range(count, num_nodes))
        for i in range(1, count):
            assert old[new["parents"][b, i]] == tree["parents"][b, old[i]] and new["parents"][b, i] < i
        for name in ("tokens", "depths", "scores", "input_ids"):
            assert (new[name][b] == tree[name][b, old]).all()
        siblings: dict[int, list[int]] = {}
        for i in range(1, count):
            siblings.setdefault(int(new["parents"][b, i]), []).append(old[i])
        assert all(family == sorted(family) for family in siblings.values())
        depths, parents = new["depths"][b, :count].tolist(), new["parents"][b, 1:count].tolist()
        if order == "breadth_first":
            assert depths == sorted(depths) and parents == sorted(parents)
        else:
            # A node stands right behind its parent or behind a whole subtree of it: each subtree is one run.
            for i, path in enumerate(trees.root_paths(new["parents"][b, :count].tolist())):
                below = [n for n in range(count) if int(new["tree_mask"][b, n, i // 32]) >> i % 32 & 1]
                assert below == list(range(i, i + len(below))) and path[-1] == i


# topk_logprobs


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_topk_against_decimals(dtype: Any) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((2, 3, 40)) * 4).astype(dtype)
    logits[1] += np.asarray(300, dtype)
    logprobs, token_ids, lse = oracle.topk_logprobs(logits, 40)
    with decimal.localcontext(decimal.Context(prec=40)):
        for row in np.ndindex(2, 3):
            exact = [decimal.Decimal(x) for x in logits[row].astype(np.float64).tolist()]
            total = sum(x.exp() for x in exact).ln()
            assert lse[row] == pytest.approx(float(total), rel=1e-15)
            for logprob, token in zip(logprobs[row], token_ids[row], strict=True):
                assert logprob == pytest.approx(float(exact[token] - total), rel=1e-13)
            order = sorted(range(40), key=lambda token: (-exact[token], token))
            assert token_ids[row].tolist() == order
    shorter = oracle.topk_logprobs(logits, 7)
    assert (shorter[0] == logprobs[..., :7]).all() and (shorter[1] == token_ids[..., :7]).all()
    assert (logprobs.dtype, token_ids.dtype, lse.dtype) == (np.float64, np.int32, np.float64)


def test_topk_rows_by_hand() -> None:
    inf, nan = np.inf, np.nan
    for logits, ids, probabilities in (
        ([0, 0, 0, 0], [0, 1, 2], [0.25, 0.25, 0.25]),
        ([-0.0, 0.0, -9e9, 0.0], [0, 1, 3], [1 / 3, 1 / 3, 1 / 3]),
        ([-inf, 2, -inf, -inf], [1, 0, 2], [1, 0, 0]),
        ([3e38, -3e38, 3e38, 0], [0, 2, 3], [0.5, 0.5, 0]),
        ([1, nan, 2, 3], [-1, -1, -1], [0, 0, 0]),
        ([nan, 1, 2, 3], [-1, -1, -1], [0, 0, 0]),
        ([1, 2, inf, 3], [-1, -1, -1], [0, 0, 0]),
        ([inf, -inf, nan, 3], [-1, -1, -1], [0, 0, 0]),
        ([-inf] * 4, [-1, -1, -1], [0, 0, 0]),
    ):
        logprobs, token_ids, lse = oracle.topk_logprobs(np.array(logits, dtype=np.float32), 3)
        assert token_ids.tolist() == ids
        # Log of 0.5 at 3e38 is below the spacing of float64 there.
        wanted = [1.0 if p == 0.5 else p for p in probabilities]
        assert np.exp(logprobs).tolist() == pytest.approx(wanted, rel=1e-14)
        assert np.isfinite(lse) == (ids[0] >= 0)


def test_topk_refuses_dtypes_that_it_would_misread() -> None:
    with pytest.raises(TypeError, match="logits has dtype uint16"):
        oracle.topk_logprobs(np.zeros(3, np.uint16), 1)
