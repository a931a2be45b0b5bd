"""The bytes that operators must move, against counts by hand and against the arrays themselves."""

from __future__ import annotations

import numpy as np

import ddtree_numba as dd
from ddtree_numba.accept import accepted, argmax_tokens, compact_kv, greedy, sampled, target_probs
from ddtree_numba.tree import build_tree, topk_logprobs
from ddtree_numba.tree.draft_tree import DTYPES


def test_topk_reads_every_logit_and_writes_two_numbers_a_result():
    # 2 * 3 rows of 100 logits of 2 bytes, and of 5 results of 8 bytes
    assert topk_logprobs.bytes_moved(2, 3, 100, 5, 2) == 1200 + 240
    logits = np.zeros((2, 3, 100), np.float32)
    results = dd.topk_logprobs(logits, 5)
    assert topk_logprobs.bytes_moved(2, 3, 100, 5, 4) == logits.nbytes + sum(x.nbytes for x in results)


def test_a_tree_of_two_nodes_by_hand():
    read = 2 * 2 * 4 + 2 * 4 + 4  # two rows of two log-probabilities, two tokens, the root
    nodes = 3 * (4 + 4 + 4 + 8 + 4 + 4 + 4 + 4)  # token, parent, depth, score, mask, links, input id of each
    assert build_tree.bytes_moved(1, 2, 7, 2) == read + nodes + 4  # and the number of nodes
    assert build_tree.bytes_moved(5, 2, 7, 2) == 5 * (read + nodes + 4)


def test_what_a_tree_writes_is_all_that_it_holds():
    tree = dd.DraftTree.empty(np.zeros(1, np.float32), 3, 64, 9)
    written = sum(getattr(tree, name).nbytes for name in DTYPES)
    read = 3 * (9 * 20 * 4 + 64 * 4 + 4)  # 20 candidates, fewer than nodes
    assert build_tree.bytes_moved(3, 9, 20, 64) == read + written


def test_argmax_reads_every_logit_and_writes_a_token_a_row():
    assert argmax_tokens.bytes_moved(2, 3, 10, 4) == 6 * 40 + 6 * 4


def test_a_greedy_walk_reads_four_numbers_a_node_and_writes_the_path():
    # three nodes of 16 bytes, their number; nodes and tokens of three places; three numbers a request
    assert greedy.bytes_moved(1, 3, 2) == 48 + 4 + 24 + 12
    written = sum(4 * int(np.prod(shape)) for shape in accepted.shapes(7, 5).values())
    assert greedy.bytes_moved(7, 20, 5) == 7 * (20 * 16 + 4) + written


def test_a_sampled_walk_reads_a_row_for_each_accepted_node():
    assert sampled.bytes_moved(5, 100, 2) == 1000


def test_target_probs_reads_logits_and_writes_floats():
    assert target_probs.bytes_moved(2, 3, 10, 2) == 60 * 2 + 60 * 4


def test_rows_that_move_are_read_and_written_in_every_layer():
    assert compact_kv.bytes_moved(3, 4, 8) == 2 * 3 * 4 * 8


def test_gathered_rows_are_read_where_accepted_and_written_everywhere():
    assert compact_kv.gathered_bytes(5, 8, 16) == 5 * 16 + 8 * 16
