"""build_tree: the operator that users call. It checks, chooses a variant and hands over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ddtree_numba.device import arrays, runtime
from ddtree_numba.device.arrays import View
from ddtree_numba.tree import build_frontier, build_heap
from ddtree_numba.tree.draft_tree import DraftTree, empty_tree, views
from ddtree_numba.tree.search import MAX_BUDGET, Problem

LARGEST_TOKEN = 2**31 - 1
VARIANTS = ("auto", "heap", "heap_numpy", "frontier", "frontier_numpy")


def bytes_moved(batch: int, length: int, candidates: int, tree_budget: int) -> int:
    """Bytes that `build_tree` must move, of trees that come to their budget.

    Read are the log-probabilities that can matter, the first tree_budget of each row, the token of each node and the
    root; written is all that a `DraftTree` holds.
    """
    num_nodes = tree_budget + 1
    read = 4 * length * min(candidates, tree_budget) + 4 * tree_budget + 4
    words = -(-num_nodes // 32)
    written = num_nodes * (6 * 4 + 8 + 4 * words) + 4
    return batch * (read + written)


def build_tree(
    logprobs: Any,
    token_ids: Any,
    root_tokens: Any,
    tree_budget: int,
    *,
    variant: str = "auto",
    out: DraftTree | None = None,
    validate: bool = False,
) -> DraftTree:
    """The best draft tree of each request: the tree_budget likeliest prefixes under the product of the rows.

    A path of ranks (r_1, .., r_d) takes token ``token_ids[b, i, r_i]`` at position i; its score is the sum of
    ``logprobs[b, i, r_i]``. Best-first search takes the path of the highest score, tree_budget times; among equal
    scores the lexicographically smallest tuple of ranks goes first. The result is the public reference's, to the last
    bit of every score: float64 over float32 log-probabilities, in the reference's order of operations.

    Parameters
    ----------
    logprobs : float32 [B, L, K]
        Log-probability of each position's candidates, in nats; each row at most 0 and not increasing. The first entry
        that is not finite ends its row. Any strides. `topk_logprobs` makes it.
    token_ids : int32 or int64 [B, L, K]
        Token of each candidate. Duplicates are different candidates.
    root_tokens : int32 or int64 [B]
        The last accepted token of each request.
    tree_budget : int
        Most nodes beside the root, 0 to 4094, less where shared memory ends first. Fewer where the rows run out.
    variant : {"auto", "heap", "heap_numpy", "frontier", "frontier_numpy"}
        All give the same tree. "heap" is the readable one, "frontier" the fast one; the others are their NumPy mirrors
        for host arrays. "auto" is "frontier" where the rows fit shared memory, else "heap", and "heap" in the
        simulator.
    out : DraftTree, optional
        Written to in place of a new tree (`DraftTree.empty`); its max_depth must be min(L, tree_budget) or more.
    validate : bool
        Also check contents, which copies them to the host.

    Returns
    -------
    DraftTree
        With room for Q = tree_budget + 1 nodes, of the kind of array of ``logprobs``.

    Raises
    ------
    TypeError
        An argument is no array that kernels take, or has the wrong dtype.
    ValueError
        A wrong shape, device, budget or variant; an output that overlaps an input; a budget that exceeds the GPU's
        shared memory; with ``validate``, a row that is above 0 or increases, or a candidate without a token.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream without synchronizing, except for NumPy arrays, which are copied to the device
    and back. With ``out``, nothing is allocated, so a call can be captured in a CUDA graph.

    Source: github.com/liranringel/ddtree, ddtree.py; DDTree (arXiv 2604.12989).
    """
    arrays.require_one_of("variant", variant, VARIANTS)
    tree, problem = _checked(logprobs, token_ids, root_tokens, tree_budget, out)
    if arrays.require_flag("validate", validate):
        check_contents(problem)
    problem = _without_rows_behind(problem)
    if problem.batch == 0 and not variant.endswith("_numpy"):
        return tree
    if variant == "auto":
        if runtime.SIMULATOR or not build_frontier.run_if_it_fits(problem):
            build_heap.run(problem)
        return tree
    runs = {
        "heap": build_heap.run,
        "heap_numpy": build_heap.run_mirror,
        "frontier": build_frontier.run,
        "frontier_numpy": build_frontier.run_mirror,
    }
    runs[variant](problem)
    return tree


def _checked(
    logprobs: Any, token_ids: Any, root_tokens: Any, tree_budget: Any, out: DraftTree | None
) -> tuple[DraftTree, Problem]:
    rows = arrays.view("logprobs", logprobs)
    arrays.require_dtype(rows, np.float32)
    arrays.require_shape(rows, "[B, L, K]", None, None, None)
    batch, length, candidates = rows.shape
    if length < 1 or candidates < 1:
        raise ValueError(f"{rows} has L = {length}, K = {candidates}; both must be at least 1")
    ids = arrays.view("token_ids", token_ids)
    arrays.require_dtype(ids, np.int32, np.int64)
    arrays.require_shape(ids, "[B, L, K]", *rows.shape)
    roots = arrays.view("root_tokens", root_tokens)
    arrays.require_dtype(roots, np.int32, np.int64)
    arrays.require_shape(roots, "[B]", batch)
    arrays.require_one_place([rows, ids, roots])
    tree_budget = arrays.require_integer("tree_budget", tree_budget)
    if not 0 <= tree_budget <= MAX_BUDGET:
        raise ValueError(f"tree_budget is {tree_budget}; it must be between 0 and {MAX_BUDGET}")

    max_depth = min(length, tree_budget)
    if out is None:  # new arrays lie apart
        out = empty_tree(rows, batch, tree_budget, max_depth)
        return out, Problem(rows, ids, roots, views(out, batch, tree_budget + 1))
    if not isinstance(out, DraftTree):
        raise TypeError(f"out is a {type(out).__qualname__}; it must be a DraftTree")
    if arrays.require_integer("out.max_depth", out.max_depth) < max_depth:
        raise ValueError(f"out has max_depth = {out.max_depth}; it must be at least {max_depth}")
    written = views(out, batch, tree_budget + 1, "out.")
    arrays.require_one_place([rows, *written.values()])
    others: list[View] = [rows, ids, roots]
    for result in written.values():
        arrays.require_apart(result, others)
        others.append(result)
    return out, Problem(rows, ids, roots, written)


def _without_rows_behind(problem: Problem) -> Problem:
    """No path is longer than the budget, so the rows behind take no shared memory."""
    batch, length, candidates = problem.logprobs.shape
    used = (batch, min(length, max(problem.num_nodes - 1, 1)), candidates)
    rows, ids = (replace(x, shape=used) for x in (problem.logprobs, problem.token_ids))
    return replace(problem, logprobs=rows, token_ids=ids)


def check_contents(problem: Problem) -> None:
    """Check the rows (copies them to the host).

    Raises
    ------
    ValueError
        A row is above 0, or increases before its first entry that is not finite; a candidate or a root has a token
        that is negative or no int32.
    """
    logprobs, token_ids = problem.logprobs.to_host(), problem.token_ids.to_host()
    live = np.logical_and.accumulate(np.isfinite(logprobs), axis=2)
    with np.errstate(invalid="ignore"):
        rising = live[..., 1:] & (logprobs[..., 1:] > logprobs[..., :-1])
    for wrong, what in (
        (live & (logprobs > 0), "is above 0"),
        (np.pad(rising, ((0, 0), (0, 0), (1, 0))), "is larger than the entry before it"),
    ):
        if wrong.any():
            b, d, r = (int(n) for n in np.argwhere(wrong)[0])
            raise ValueError(f"logprobs[{b}, {d}, {r}] is {logprobs[b, d, r]}, which {what}")
    root_tokens = problem.root_tokens.to_host()
    for name, tokens, used in (("token_ids", token_ids, live), ("root_tokens", root_tokens, np.True_)):
        wrong = used & ((tokens < 0) | (tokens > LARGEST_TOKEN))
        if wrong.any():
            at = tuple(int(n) for n in np.argwhere(wrong)[0])
            raise ValueError(f"{name}[{', '.join(map(str, at))}] is {tokens[at]}; a token is 0 to {LARGEST_TOKEN}")
