"""Masks on the host: packing, its inverse, ancestors."""

from __future__ import annotations

import numpy as np
import pytest

import ddtree_numba as dd
from ddtree_numba.masks import causal_words


@pytest.mark.parametrize("num_nodes", [1, 31, 32, 33, 64, 65, 1025])
def test_packing_and_back(num_nodes):
    mask = np.random.default_rng(num_nodes).random((2, num_nodes, num_nodes)) < 0.5
    words = dd.pack_mask(mask)
    assert words.dtype == np.uint32 and words.shape == (2, num_nodes, -(-num_nodes // 32))
    assert np.array_equal(dd.unpack_mask(words, num_nodes), mask)
    j = num_nodes - 1
    assert np.array_equal(words[:, :, j // 32] >> np.uint32(j % 32) & 1 == 1, mask[:, :, j])
    if num_nodes % 32:
        assert not np.any(words[..., -1] >> np.uint32(num_nodes % 32)), "bits past Q are 0"


def test_ancestors():
    parents = [[-1, 0, 0, 1, 3, -1], [-1, 0, 1, 2, 3, 4]]
    mask = dd.mask_from_parents(parents)
    seen = [[list(np.flatnonzero(row)) for row in tree] for tree in mask]
    assert seen[0] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], []], "the last node is padding"
    assert np.array_equal(dd.pack_mask(mask[1]), causal_words(6)), "a chain is causal"


@pytest.mark.parametrize("parents", [[-1, 1], [-1, 2, 0], [0, 0], [-2]])
def test_parents_that_are_no_tree(parents):
    with pytest.raises(ValueError, match="earlier node"):
        dd.mask_from_parents(parents)


def test_wrong_types_and_sizes():
    for call, exception, name in (
        (lambda: dd.mask_from_parents([[-1.0, 0.0]]), TypeError, "parents"),
        (lambda: dd.mask_from_parents("a"), TypeError, "parents"),
        (lambda: dd.pack_mask(np.ones((2, 2), np.uint8)), TypeError, "mask"),
        (lambda: dd.unpack_mask(np.ones((3, 1), np.int64), 3), TypeError, "words"),
        (lambda: dd.unpack_mask(np.ones((3, 1), np.uint32), 40), ValueError, "words"),
    ):
        with pytest.raises(exception, match=name):
            call()
