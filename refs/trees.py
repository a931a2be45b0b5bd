"""Best-first draft tree, in pure Python: the rule of the search, one heap entry at a time.

The kernels' trees are held against this one, ties and last bits included. It was written from the rule, not from the
code of the public reference (github.com/liranringel/ddtree, ddtree.py; paper: arXiv 2604.12989).
"""

from __future__ import annotations

import heapq
import math
from typing import TypedDict

import numpy as np
import numpy.typing as npt

__all__ = ["BestFirstTree", "best_first_tree"]


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
        first NaN or -inf ends its row: it and what follows are no candidates.
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
            if math.isnan(value) or value == -math.inf:
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
