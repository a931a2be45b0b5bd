"""Prefix and tail: attention to the prefix by any backend, to the tree by ours, merged by their log-sum-exps.

An engine that has a fast kernel for plain decoding attention can keep it for the prefix, where no mask is needed, and
leave the tree alone to ours: the two sets of keys are disjoint, so `merge_states` makes their states that of both.

- `prefix_attention`: one such backend, variant `flash` on the prefix alone.
- `verify_attention_prefix_tail`: the tail, and the merge.

Source: split of prefix and tree in engines' tree verification; merging by log-sum-exp as in FlashInfer
(arXiv 2501.01005), section 2.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ddtree_numba.attention import flash, merge
from ddtree_numba.attention.problem import Problem, check_contents, make_problem
from ddtree_numba.attention.verify import require_splits
from ddtree_numba.device import arrays
from ddtree_numba.device.arrays import FLOATS, View


def prefix_attention(
    q: Any,
    kv_cache: Any,
    cache_seqlens: Any,
    *,
    sm_scale: float,
    kv_lora_rank: int = 512,
    block_table: Any = None,
    max_seqlen: int | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    workspace: Any = None,
    validate: bool = False,
) -> tuple[Any, Any]:
    """MLA attention of all nodes to the prefix alone, as a state for `verify_attention_prefix_tail`.

    Parameters
    ----------
    q, kv_cache, cache_seqlens, sm_scale, kv_lora_rank, block_table, max_seqlen, num_splits, batch_invariant, out, lse,
    out_dtype, workspace, validate
        As for `verify_attention` with variant flash. The tree's rows of the cache are not read.

    Returns
    -------
    out : float [B, Q, H, R]
        0 where the prefix is empty.
    lse : float32 [B, Q, H]
        In nats; -inf where the prefix is empty.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `verify_attention`.
    """
    batch_invariant = arrays.require_flag("batch_invariant", batch_invariant)
    problem = make_problem(
        q,
        kv_cache,
        cache_seqlens,
        None,
        sm_scale=sm_scale,
        kv_lora_rank=kv_lora_rank,
        block_table=block_table,
        max_seqlen=max_seqlen,
        out=out,
        lse=lse,
        out_dtype=out_dtype,
        workspace=workspace,
        validate=False,
    )
    nothing = arrays.constant(problem.q_nope.device, _no_words, problem.num_nodes).repeated(problem.batch)
    problem = replace(problem, tree_mask=nothing)
    if arrays.require_flag("validate", validate):
        check_contents(problem)
    flash.run(problem, flash.plan_of(problem, require_splits(num_splits), batch_invariant, part=flash.PREFIX))
    return problem.results


def _no_words(num_nodes: int) -> np.ndarray:
    return np.zeros((num_nodes, -(-num_nodes // 32)), np.uint32)


def verify_attention_prefix_tail(
    q: Any,
    kv_cache: Any,
    cache_seqlens: Any,
    tree_mask: Any,
    *,
    prefix: Any,
    sm_scale: float,
    kv_lora_rank: int = 512,
    block_table: Any = None,
    max_seqlen: int | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    workspace: Any = None,
    validate: bool = False,
) -> tuple[Any, Any]:
    """What `verify_attention` computes, with attention to the prefix taken from any backend.

    Parameters
    ----------
    q, kv_cache, cache_seqlens, tree_mask
        As for `verify_attention`. The prefix's rows of the cache are not read here.
    prefix : pair of arrays, or callable
        The state of the prefix: out float [B, Q, H, R] and lse float32 [B, Q, H] in nats, of all nodes over the rows
        0 .. cache_seqlens[b] - 1; -inf or +inf where the prefix is empty. A callable is called as
        ``prefix(q, kv_cache, cache_seqlens, sm_scale=, kv_lora_rank=, block_table=)`` with what was given here, and
        returns the pair; `prefix_attention` is one.
    sm_scale, kv_lora_rank, block_table, max_seqlen, num_splits, batch_invariant
        As for `verify_attention` with variant flash; splits are those of the tree's keys.
    out : float [B, Q, H, R], optional
        Written to in place of a new array; may be the prefix's own.
    lse : float32 [B, Q, H], optional
        Likewise.
    out_dtype, validate
        As for `verify_attention`.
    workspace : array, optional
        Scratch memory of `workspace_bytes(..., prefix_tail=True)` bytes: states of the tail, which is kept in float32.

    Returns
    -------
    out : float [B, Q, H, R]
    lse : float32 [B, Q, H]
        As from `verify_attention`, to rounding: that of the prefix's out to its dtype, and of the merge.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `verify_attention` and `merge_states`; ``prefix`` is no pair.

    Notes
    -----
    Source: see `merge_states`.
    """
    batch_invariant = arrays.require_flag("batch_invariant", batch_invariant)
    problem = make_problem(
        q,
        kv_cache,
        cache_seqlens,
        tree_mask,
        sm_scale=sm_scale,
        kv_lora_rank=kv_lora_rank,
        block_table=block_table,
        max_seqlen=max_seqlen,
        out=out,
        lse=lse,
        out_dtype=out_dtype,
        workspace=workspace,
        validate=validate,
    )
    plan = flash.plan_of(replace(problem, workspace=None), require_splits(num_splits), batch_invariant, part=flash.TREE)
    scratch, tail_out, tail_lse = tail_memory(problem, plan.workspace_floats)
    if callable(prefix):
        prefix = prefix(
            q, kv_cache, cache_seqlens, sm_scale=sm_scale, kv_lora_rank=kv_lora_rank, block_table=block_table
        )
    prefix_out, prefix_lse = prefix_state(prefix, problem)
    flash.run(replace(problem, workspace=scratch, out=tail_out, lse=tail_lse), plan)
    prefix_out = replace(prefix_out, kind=problem.q_nope.kind)  # whose stream all of this runs on
    merge.run([prefix_out, prefix_lse, tail_out, tail_lse, problem.out, problem.lse])
    return problem.results


def tail_memory(problem: Problem, floats: int) -> tuple[View, View, View]:
    """Scratch memory of so many floats, and behind it out and lse of the tail, in the caller's workspace or a new one.

    Raises
    ------
    ValueError
        The workspace is too small.
    """
    shape = problem.q_nope.shape
    num_rows = problem.batch * problem.num_nodes * problem.num_heads
    needed = floats + num_rows * (problem.kv_lora_rank + 1)
    memory = problem.workspace
    if memory is None:
        memory = arrays.view("workspace", arrays.empty(problem.q_nope, (needed,), np.dtype(np.float32)))
    if memory.shape[0] < needed:
        raise ValueError(
            f"workspace has {4 * memory.shape[0]} bytes; it must have at least {4 * needed} "
            "(see workspace_bytes with prefix_tail=True)"
        )
    parts = []
    place = 0
    for lengths in ((floats,), shape, shape[:3]):
        strides = arrays.contiguous_strides(lengths, 4)
        parts.append(replace(memory, pointer=memory.pointer + 4 * place, shape=lengths, strides=strides))
        place += int(np.prod(lengths))
    return parts[0], parts[1], parts[2]


def prefix_state(prefix: Any, problem: Problem) -> tuple[View, View]:
    """The checked state of the prefix.

    Raises
    ------
    TypeError, ValueError
        It is no pair, or one of the two is no such array.
    """
    if not isinstance(prefix, (tuple, list)) or len(prefix) != 2:
        raise TypeError(
            f"prefix is a {type(prefix).__name__}; it must be the pair (out, lse), or a callable that returns it"
        )
    prefix_out, prefix_lse = arrays.view("prefix out", prefix[0]), arrays.view("prefix lse", prefix[1])
    arrays.require_dtype(prefix_out, *FLOATS, np.uint16)
    arrays.require_shape(prefix_out, "[B, Q, H, kv_lora_rank]", *problem.q_nope.shape)
    arrays.require_dtype(prefix_lse, np.float32)
    arrays.require_shape(prefix_lse, "[B, Q, H]", *problem.q_nope.shape[:3])
    arrays.require_one_place([problem.q_nope, prefix_out, prefix_lse])
    for written, own, other in ((problem.out, prefix_out, prefix_lse), (problem.lse, prefix_lse, prefix_out)):
        arrays.require_apart(written, [other] if merge.same_memory(written, own) else [other, own])
    if problem.workspace is not None:
        arrays.require_apart(problem.workspace, [prefix_out, prefix_lse])
    return prefix_out, prefix_lse
