"""Draft trees in pure Python: the rule of the best-first search, one heap entry at a time, and every form of a tree.

The kernels' trees are held against these, ties and last bits included. The search was written from the rule, not from
the code of the public reference (github.com/liranringel/ddtree, ddtree.py; paper: arXiv 2604.12989). All forms of a
tree (masks, links, leaf paths, what engines take) are read off one thing: the path from the root to each node.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

__all__ = ["BestFirstTree", "assemble", "best_first_tree", "draft_tree", "encodings", "relabel", "root_paths"]

Arrays = dict[str, npt.NDArray[Any]]


class BestFirstTree(TypedDict):
    """A tree of n nodes in pop order, node 0 the root."""

    parents: npt.NDArray[np.int32]
    depths: npt.NDArray[np.int32]
    ranks: list[tuple[int, ...]]
    scores: npt.NDArray[np.float64]


def best_first_tree(logprobs: npt.NDArray[np.float32], tree_budget: int) -> BestFirstTree:
    """Take the `tree_budget` likeliest prefixes under a product of per-position distributions.

    A prefix of depth d is a rank tuple (r_1 .. r_d), its score the sum of logprobs[0, r_1] .. logprobs[d - 1, r_d].
    The heap holds ``(-score, ranks)``, so that the smallest rank tuple wins a tie. A popped prefix becomes a node; it
    pushes its next sibling, of score ``score - logprobs[d - 1, r] + logprobs[d - 1, r + 1]``, then its first child, of
    score ``score + logprobs[d, 0]``. The search ends at the budget or with an empty heap.

    Parameters
    ----------
    logprobs : float32 [L, K]
        Log-probabilities in nats of the K best tokens of each draft position, each row non-increasing and <= 0. The
        first entry that is not finite ends its row: it and what follows are no candidates.
    tree_budget : int
        Most nodes beside the root.

    Returns
    -------
    dict
        parents : int32 [n], the root's -1; depths : int32 [n], the root's 0; ranks : list of n tuples, the root's ();
        scores : float64 [n] in nats, by the recurrence above (a direct sum may differ in the last bit), the root's 0.
        n = 1 + the number of pops; nodes in pop order, so a parent stands before its children.

    Notes
    -----
    Source: github.com/liranringel/ddtree, ddtree.py; DDTree (arXiv 2604.12989).
    """
    # Each row's candidates as Python floats, which are float64: all arithmetic is float64 over float32 values.
    rows: list[list[float]] = []
    for row in logprobs:
        candidates: list[float] = []
        for value in row:
            if not math.isfinite(value):
                break
            candidates.append(float(value))
        rows.append(candidates)

    ranks: list[tuple[int, ...]] = [()]
    scores = [0.0]
    heap: list[tuple[float, tuple[int, ...]]] = []
    if rows and rows[0]:
        heapq.heappush(heap, (-rows[0][0], (0,)))
    while heap and len(ranks) <= tree_budget:
        negative, path = heapq.heappop(heap)
        score, depth, rank = -negative, len(path), path[-1]
        ranks.append(path)
        scores.append(score)
        row = rows[depth - 1]
        if rank + 1 < len(row):
            heapq.heappush(heap, (-(score - row[rank] + row[rank + 1]), (*path[:-1], rank + 1)))
        if depth < len(rows) and rows[depth]:
            heapq.heappush(heap, (-(score + rows[depth][0]), (*path, 0)))

    index_of = {path: index for index, path in enumerate(ranks)}
    return {
        "parents": np.array([-1] + [index_of[path[:-1]] for path in ranks[1:]], dtype=np.int32),
        "depths": np.array([len(path) for path in ranks], dtype=np.int32),
        "ranks": ranks,
        "scores": np.array(scores, dtype=np.float64),
    }


def draft_tree(
    logprobs: npt.NDArray[np.float32],
    token_ids: npt.NDArray[np.int32],
    root_tokens: npt.NDArray[np.int32],
    tree_budget: int,
) -> Arrays:
    """The best-first trees of a batch, with everything that is derived from them.

    Parameters
    ----------
    logprobs : float32 [B, L, K]
        As for `best_first_tree`, in nats.
    token_ids : int32 [B, L, K]
        Token of each candidate.
    root_tokens : int32 [B]
        The root's token.
    tree_budget : int
        Most nodes beside the root; Q is one more.

    Returns
    -------
    dict
        As from `assemble`.
    """
    found = [best_first_tree(rows, tree_budget) for rows in logprobs]
    tokens = [
        [int(root), *(int(ids[len(path) - 1, path[-1]]) for path in tree["ranks"][1:])]
        for tree, ids, root in zip(found, token_ids, root_tokens, strict=True)
    ]
    parents = [tree["parents"].tolist() for tree in found]
    scores = [tree["scores"].tolist() for tree in found]
    return assemble(parents, tokens, scores, num_nodes=tree_budget + 1, max_depth=min(logprobs.shape[1], tree_budget))


def assemble(
    parents: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]],
    *,
    num_nodes: int,
    max_depth: int,
) -> Arrays:
    """Lay trees of different sizes into the arrays of a batch with room for Q = `num_nodes` nodes each.

    Parameters
    ----------
    parents, tokens, scores : one sequence for each tree
        Of its nodes; the root comes first, its parent is -1, and each parent comes before its children.
    num_nodes : int
        Q, at least the size of the largest tree.
    max_depth : int
        Bound on every depth.

    Returns
    -------
    dict
        tokens, parents, depths, first_child, next_sibling, input_ids : int32 [B, Q]; scores : float64 [B, Q];
        num_nodes : int32 [B]; tree_mask : uint32 [B, Q, ceil(Q/32)]; max_depth : int32 scalar. Behind the last node:
        token, parent and links -1, depth 0, score -inf, an empty mask row, and the root's token in input_ids.
    """

    def padded(rows: Sequence[Sequence[Any]], fill: Any, dtype: Any) -> npt.NDArray[Any]:
        return np.array([[*row, *[fill] * (num_nodes - len(row))] for row in rows], dtype=dtype)

    forms = [_tree_forms(one, num_nodes) for one in padded(parents, -1, np.int64).tolist()]
    return {
        "tokens": padded(tokens, -1, np.int32),
        "parents": padded(parents, -1, np.int32),
        "depths": np.array([form["depths"] for form in forms], dtype=np.int32),
        "scores": padded(scores, -math.inf, np.float64),
        "num_nodes": np.array([len(one) for one in parents], dtype=np.int32),
        "tree_mask": np.array([form["words"] for form in forms], dtype=np.uint32),
        "first_child": np.array([form["first_child"] for form in forms], dtype=np.int32),
        "next_sibling": np.array([form["next_sibling"] for form in forms], dtype=np.int32),
        "input_ids": np.array([[*one, *[one[0]] * (num_nodes - len(one))] for one in tokens], dtype=np.int32),
        "max_depth": np.array(max_depth, dtype=np.int32),
    }


def root_paths(parents: Sequence[int]) -> list[list[int]]:
    """Nodes from the root to each node, itself included; the path of a padded node is empty."""
    paths: list[list[int]] = [[0]]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append([*paths[parent], node] if parent >= 0 else [])
    return paths


def _tree_forms(parents: Sequence[int], num_nodes: int) -> dict[str, list[Any]]:
    paths = root_paths(parents)
    children: list[list[int]] = [[] for _ in paths]
    for path in paths[1:]:
        if path:
            children[path[-2]].append(path[-1])
    next_sibling = [-1] * num_nodes
    for family in children:
        for elder, younger in zip(family, family[1:], strict=False):
            next_sibling[elder] = younger
    bits = [sum(2**node for node in path) for path in paths]
    return {
        "paths": paths,
        "depths": [max(len(path) - 1, 0) for path in paths],
        "first_child": [family[0] if family else -1 for family in children],
        "next_sibling": next_sibling,
        "leaves": [path for path, family in zip(paths, children, strict=True) if path and not family],
        "sees": [[node in path for node in range(num_nodes)] for path in paths],
        "bits": bits,
        "words": [[row >> 32 * word & 0xFFFFFFFF for word in range(-(-num_nodes // 32))] for row in bits],
    }


def encodings(parents: npt.NDArray[np.int32], cache_seqlens: npt.NDArray[np.int32], max_depth: int) -> Arrays:
    """What engines take in place of a tree.

    Parameters
    ----------
    parents : int32 [B, Q]
        -1 for the root and behind the last node.
    cache_seqlens : int32 [B]
        Prefix length of each request.
    max_depth : int
        Bound on every depth.

    Returns
    -------
    dict
        positions : int32 [B, Q], ``cache_seqlens + depths``; retrieve_indices : int32 [B, max(Q - 1, 1),
        max_depth + 1], the path to each leaf, leaves in ascending order, -1 elsewhere; retrieve_index : int64 [B, Q],
        b * Q + i; retrieve_next_token, retrieve_next_sibling : int64 [B, Q], first child and next sibling; full_mask :
        bool [sum over b of Q * (cache_seqlens[b] + Q)], rows of prefix and tree columns, all of the prefix visible;
        qlen_only_mask : bool [B * Q * Q]; bitpacked_mask : uint8, uint16 or uint32 [B * Q], only where Q <= 32;
        tensorrt_mask : int32 [B, Q, ceil(Q/32)], the bits of `tree_mask`; dense_bias : float32 [B, Q, Q], 0 where a
        node sees another and -inf elsewhere.
    """
    num_requests, num_nodes = parents.shape
    forms = [_tree_forms(row, num_nodes) for row in parents.tolist()]
    lengths = cache_seqlens.tolist()
    leaf_paths = [[[*path, *[-1] * (max_depth + 1 - len(path))] for path in form["leaves"]] for form in forms]
    no_leaf = [-1] * (max_depth + 1)
    max_leaves = max(num_nodes - 1, 1)
    full = [
        seen
        for form, length in zip(forms, lengths, strict=True)
        for row in form["sees"]
        for seen in [True] * length + row
    ]
    found = {
        "positions": np.array(
            [[length + depth for depth in form["depths"]] for form, length in zip(forms, lengths, strict=True)],
            dtype=np.int32,
        ),
        "retrieve_indices": np.array(
            [paths + [no_leaf] * (max_leaves - len(paths)) for paths in leaf_paths], dtype=np.int32
        ),
        "retrieve_index": np.arange(num_requests * num_nodes, dtype=np.int64).reshape(num_requests, num_nodes),
        "retrieve_next_token": np.array([form["first_child"] for form in forms], dtype=np.int64),
        "retrieve_next_sibling": np.array([form["next_sibling"] for form in forms], dtype=np.int64),
        "full_mask": np.array(full, dtype=np.bool_),
        "qlen_only_mask": np.array([form["sees"] for form in forms], dtype=np.bool_).reshape(-1),
        "tensorrt_mask": np.array([form["words"] for form in forms], dtype=np.uint32).view(np.int32),
        "dense_bias": np.array(
            [[[0.0 if seen else -math.inf for seen in row] for row in form["sees"]] for form in forms],
            dtype=np.float32,
        ),
    }
    if num_nodes <= 32:
        width = np.uint8 if num_nodes <= 8 else np.uint16 if num_nodes <= 16 else np.uint32
        found["bitpacked_mask"] = np.array([form["bits"] for form in forms], dtype=width).reshape(-1)
    return found


def relabel(tree: Arrays, order: str) -> Arrays:
    """The same trees with their nodes in another order.

    Parameters
    ----------
    tree : dict
        As from `assemble`.
    order : str
        "depth_first": a node, then each child's subtree. "breadth_first": by depth, then by the parent's new place.
        Children of one node stay as they stood.

    Returns
    -------
    dict
        The arrays of the tree, and permutation : int32 [B, Q], the old index of each new node; padded nodes stay.
    """
    parents, tokens, scores, permutation = [], [], [], []
    num_nodes = tree["parents"].shape[1]
    for b, count in enumerate(tree["num_nodes"].tolist()):
        paths = root_paths(tree["parents"][b, :count].tolist())
        # In lexicographic order a path stands before its continuations, and these before the next sibling.
        keys = {"depth_first": lambda path: (0, path), "breadth_first": lambda path: (len(path), path)}
        old = [path[-1] for path in sorted(paths, key=keys[order])]
        new = {node: index for index, node in enumerate(old)}
        parents.append([-1] + [new[paths[node][-2]] for node in old[1:]])
        tokens.append([int(tree["tokens"][b, node]) for node in old])
        scores.append([float(tree["scores"][b, node]) for node in old])
        permutation.append(old + list(range(count, num_nodes)))
    made = assemble(parents, tokens, scores, num_nodes=num_nodes, max_depth=int(tree["max_depth"]))
    return {**made, "permutation": np.array(permutation, dtype=np.int32)}
