"""The FLOPs and bytes that rates are made of, against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ddtree_numba.attention import merge, verify

SMALL = {"kv_lora_rank": 4, "qk_rope_head_dim": 2}


def test_flops_of_one_node_that_sees_one_key():
    """The node's own row: a product of 6 columns, then one weighted row of 4, a multiplication and an addition each."""
    assert verify.flops(1, 1, [0], **SMALL) == 2 * 6 + 2 * 4


def test_flops_are_those_of_a_loop_over_rows_and_keys():
    prefixes, num_nodes, num_heads = (7, 0, 3), 5, 2
    count = 0
    for prefix in prefixes:
        for _ in range(num_nodes * num_heads):
            for _ in range(prefix + num_nodes):
                count += 2 * 6  # the score
                count += 2 * 4  # its share of the output
    assert verify.flops(num_nodes, num_heads, prefixes, **SMALL) == count


def test_flops_of_the_models_widths():
    """8 requests of 64 heads, 9 nodes and 2,048 tokens: 4,608 rows, 2,057 keys each."""
    assert verify.flops(9, 64, [2048] * 8) == 4608 * 2057 * 2 * (576 + 512) == 20_625_555_456


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bytes_are_those_of_the_arrays(dtype):
    """Contiguous arrays that hold nothing but live rows."""
    prefix, num_nodes, num_heads, batch = 11, 5, 2, 3
    arrays = (
        np.empty((batch, num_nodes, num_heads, 6), dtype),
        np.empty((batch, prefix + num_nodes, 6), dtype),
        np.empty(batch, np.int32),
        np.empty((batch, num_nodes, num_nodes), np.bool_),
        np.empty((batch, num_nodes, num_heads, 4), dtype),
        np.empty((batch, num_nodes, num_heads), np.float32),
    )
    expected = sum(x.nbytes for x in arrays)
    assert verify.bytes_moved(num_nodes, num_heads, [prefix] * batch, np.dtype(dtype).itemsize, **SMALL) == expected


def test_bytes_of_different_lengths_count_live_rows_alone():
    """Two requests of one node and one head: 1 + 10 cache rows and 2 queries of 6 columns, 2 outputs of 4."""
    assert verify.bytes_moved(1, 1, [0, 9], 2, **SMALL) == 11 * 12 + 2 * 12 + 2 * (4 + 1) + 2 * (8 + 4)


def test_no_requests_move_and_compute_nothing():
    assert verify.flops(9, 64, []) == verify.bytes_moved(9, 64, [], 2) == 0


def test_merges_move_two_states_in_and_one_out():
    states = [(np.empty((10, 16), np.float16), np.empty(10, np.float32)) for _ in range(3)]
    assert merge.bytes_moved(10, 16, 2) == sum(out.nbytes + lse.nbytes for out, lse in states)


def test_merges_take_three_flops_an_element():
    """``w_a * a + w_b * b``."""
    assert merge.flops(10, 16) == 10 * 16 * 3
