"""The checked arguments of verify_attention: one form for every variant, every error before any launch.

Whatever the caller brings (one q or a pair, a contiguous or a paged cache, a bool, packed or causal mask), the variants
see one form: q in two parts, a paged cache with a block table, and a mask of words with a given number of bits each. A
contiguous cache is a paged one with a page for each request, and a bool mask is a packed one with one bit a word.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np

from ddtree_numba.device import arrays
from ddtree_numba.device.arrays import FLOATS, View
from ddtree_numba.masks import causal_words, unpack_mask


@dataclass(frozen=True)
class Problem:
    """Checked arguments, as views of the caller's memory. B requests, Q nodes, H heads, R + P = D columns.

    Attributes
    ----------
    q_nope : float [B, Q, H, R]
        The absorbed part of the queries.
    q_pe : float [B, Q, H, P]
        The rotary part.
    kv_cache : float [num_pages, page_size, D]
    block_table : int32 [B, max_pages]
        Page of keys n * page_size .. of each request.
    cache_seqlens : int32 [B]
        Prefix length of each request, in tokens.
    tree_mask : uint8 or uint32 [B, Q, num_words]
        Node i of request b sees tree key j when bit j % bits_per_word of word j // bits_per_word is set.
    bits_per_word : int
        1 for a bool mask, 32 for a packed one.
    sm_scale : float
    max_seqlen : int
        Upper bound on the prefix, in tokens; longer lengths are clamped to it.
    out : float [B, Q, H, R]
    lse : float32 [B, Q, H]
        Natural logarithm.
    workspace : View or None
        The caller's scratch memory, as float32 [n].
    results : tuple
        The caller's own arrays behind ``out`` and ``lse``.
    """

    q_nope: View
    q_pe: View
    kv_cache: View
    block_table: View
    cache_seqlens: View
    tree_mask: View
    bits_per_word: int
    sm_scale: float
    max_seqlen: int
    out: View
    lse: View
    workspace: View | None
    results: tuple[Any, Any]

    @property
    def batch(self) -> int:
        return self.q_nope.shape[0]

    @property
    def num_nodes(self) -> int:
        return self.q_nope.shape[1]

    @property
    def num_heads(self) -> int:
        return self.q_nope.shape[2]

    @property
    def kv_lora_rank(self) -> int:
        return self.q_nope.shape[3]

    @property
    def head_dim(self) -> int:
        return self.kv_cache.shape[2]


def make_problem(
    q: Any,
    kv_cache: Any,
    cache_seqlens: Any,
    tree_mask: Any,
    *,
    sm_scale: float,
    kv_lora_rank: int,
    block_table: Any,
    max_seqlen: int | None,
    out: Any,
    lse: Any,
    out_dtype: Any,
    workspace: Any,
    validate: bool,
) -> Problem:
    """Check the arguments of `verify_attention` (which documents them) and bring them into one form.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, what it was and what it must be.
    """
    q_nope, q_pe = _queries(q, kv_lora_rank)
    batch, num_nodes, num_heads, _ = q_nope.shape
    head_dim = kv_lora_rank + q_pe.shape[3]
    sizes = f"{q_nope.name} has B = {batch}, Q = {num_nodes}, H = {num_heads}"
    if num_nodes < 1 or num_heads < 1:
        raise ValueError(f"{sizes}; Q and H must be at least 1")
    if batch > 65535 or num_nodes > 65535:
        raise ValueError(f"{sizes}; B and Q must be at most 65535, which is what a grid takes")

    sm_scale = _scale(sm_scale)
    cache, table, capacity = _cache(kv_cache, block_table, batch, head_dim)
    if batch and capacity < num_nodes:
        raise ValueError(
            f"kv_cache holds {capacity} tokens a request; it must hold the prefix and the tree's {num_nodes} rows"
        )
    longest = max(capacity - num_nodes, 0)
    max_seqlen = longest if max_seqlen is None else arrays.require_integer("max_seqlen", max_seqlen)
    if not 0 <= max_seqlen <= longest:
        raise ValueError(
            f"max_seqlen is {max_seqlen}; it must be between 0 and {longest} "
            f"(the cache holds {capacity} tokens a request, the tree takes {num_nodes})"
        )

    seqlens = arrays.view("cache_seqlens", cache_seqlens)
    arrays.require_dtype(seqlens, np.int32)
    arrays.require_shape(seqlens, "[B]", batch)
    mask, bits_per_word = _mask(tree_mask, q_nope)

    given = [q_nope, q_pe, cache, seqlens, table, mask]
    scratch = None if workspace is None else _scratch(workspace)
    arrays.require_one_place(given)
    results, out_view, lse_view = _results(out, lse, out_dtype, q_nope)
    arrays.require_one_place([q_nope, out_view, lse_view])
    arrays.require_apart(out_view, [*given, lse_view])
    arrays.require_apart(lse_view, given)
    if scratch is not None:
        arrays.require_one_place([q_nope, scratch])
        arrays.require_apart(scratch, [*given, out_view, lse_view])

    problem = Problem(
        q_nope=q_nope,
        q_pe=q_pe,
        kv_cache=cache,
        block_table=table,
        cache_seqlens=seqlens,
        tree_mask=mask,
        bits_per_word=bits_per_word,
        sm_scale=sm_scale,
        max_seqlen=max_seqlen,
        out=out_view,
        lse=lse_view,
        workspace=scratch,
        results=results,
    )
    if arrays.require_flag("validate", validate):
        check_contents(problem)
    return problem


def _queries(q: Any, kv_lora_rank: int) -> tuple[View, View]:
    kv_lora_rank = arrays.require_integer("kv_lora_rank", kv_lora_rank)
    if kv_lora_rank < 16 or kv_lora_rank % 16:
        raise ValueError(f"kv_lora_rank is {kv_lora_rank}; it must be a positive multiple of 16")
    if isinstance(q, (tuple, list)):
        if len(q) != 2:
            raise TypeError(f"q is a sequence of {len(q)}; it must be one array or the pair (q_nope, q_pe)")
        q_nope, q_pe = arrays.view("q_nope", q[0]), arrays.view("q_pe", q[1])
        arrays.require_dtype(q_nope, *FLOATS, np.uint16)
        arrays.require_dtype(q_pe, q_nope.dtype)
        arrays.require_shape(q_nope, "[B, Q, H, kv_lora_rank]", None, None, None, kv_lora_rank)
        arrays.require_shape(q_pe, "[B, Q, H, qk_rope_head_dim]", *q_nope.shape[:3], None)
    else:
        whole = arrays.view("q", q)
        arrays.require_dtype(whole, *FLOATS, np.uint16)
        arrays.require_shape(whole, "[B, Q, H, D]", None, None, None, None)
        head_dim = whole.shape[3]
        if head_dim <= kv_lora_rank:
            raise ValueError(
                f"{whole} has D = {head_dim}; it must be kv_lora_rank + qk_rope_head_dim, and kv_lora_rank is "
                f"{kv_lora_rank}"
            )
        q_nope, q_pe = whole.columns(0, kv_lora_rank), whole.columns(kv_lora_rank, head_dim)
    rope = q_pe.shape[3]
    if rope < 16 or rope % 16:
        raise ValueError(f"{q_pe.name} leaves qk_rope_head_dim = {rope}; it must be a positive multiple of 16")
    return q_nope, q_pe


def _cache(kv_cache: Any, block_table: Any, batch: int, head_dim: int) -> tuple[View, View, int]:
    cache = arrays.view("kv_cache", kv_cache)
    arrays.require_dtype(cache, *FLOATS, np.uint16)
    if len(cache.shape) == 4:
        arrays.require_shape(cache, "[.., .., 1, D]", None, None, 1, head_dim)
        cache = cache.without_axis(2)
    if block_table is None:
        arrays.require_shape(cache, "[B, S, D]", batch, None, head_dim)
        table = arrays.constant(cache.device, arrays.one_page_each, batch)
    else:
        arrays.require_shape(cache, "[num_pages, page_size, D]", None, None, head_dim)
        table = arrays.view("block_table", block_table)
        arrays.require_dtype(table, np.int32)
        arrays.require_shape(table, "[B, max_pages]", batch, None)
        if batch and (cache.shape[0] == 0 or cache.shape[1] == 0):
            raise ValueError(f"{cache} has no page or no slot; it must hold at least one row")
    capacity = table.shape[1] * cache.shape[1]
    if capacity >= 2**31:
        raise ValueError(f"kv_cache allows {capacity} tokens a request; it must be less than 2**31")
    return cache, table, capacity


def _mask(tree_mask: Any, q: View) -> tuple[View, int]:
    batch, num_nodes = q.shape[:2]
    if tree_mask is None:
        return arrays.constant(q.device, causal_words, num_nodes).repeated(batch), 32
    mask = arrays.view("tree_mask", tree_mask)
    if mask.dtype == np.bool_:
        arrays.require_shape(mask, "[B, Q, Q]", batch, num_nodes, num_nodes)
        return mask, 1
    arrays.require_dtype(mask, np.bool_, np.uint32)
    arrays.require_shape(mask, "[B, Q, ceil(Q/32)]", batch, num_nodes, -(-num_nodes // 32))
    return mask, 32


def _results(out: Any, lse: Any, out_dtype: Any, q: View) -> tuple[tuple[Any, Any], View, View]:
    batch, num_nodes, num_heads, kv_lora_rank = q.shape
    dtype = q.dtype if out_dtype is None else arrays.resolve_dtype("out_dtype", out_dtype)
    if out is None:
        out = arrays.empty(q, q.shape, dtype, "out")
    out_view = arrays.view("out", out)
    if out_dtype is None:
        arrays.require_dtype(out_view, *FLOATS, np.uint16)
    elif out_view.dtype != dtype and not (dtype == arrays.BFLOAT16 and out_view.dtype == np.uint16):
        raise TypeError(f"out has dtype {out_view.dtype}, but out_dtype is {dtype}")
    arrays.require_shape(out_view, "[B, Q, H, kv_lora_rank]", *q.shape)
    if lse is None:
        lse = arrays.empty(q, q.shape[:3], np.dtype(np.float32), "lse")
    lse_view = arrays.view("lse", lse)
    arrays.require_dtype(lse_view, np.float32)
    arrays.require_shape(lse_view, "[B, Q, H]", *q.shape[:3])
    return (out, lse), out_view, lse_view


def _scratch(workspace: Any) -> View:
    scratch = arrays.view("workspace", workspace)
    nbytes = math.prod(scratch.shape) * scratch.dtype.itemsize
    if nbytes and not (scratch.in_c_order and scratch.pointer % 16 == 0):
        raise ValueError(f"{scratch} must be in C order, at an address that is a multiple of 16")
    return replace(scratch, shape=(nbytes // 4,), strides=(4,), dtype=np.dtype(np.float32))


def _scale(sm_scale: Any) -> float:
    scalar = isinstance(sm_scale, np.ndarray) and sm_scale.ndim == 0 and sm_scale.dtype.kind in "fiu"
    if isinstance(sm_scale, bool) or not (scalar or isinstance(sm_scale, Real)):
        raise TypeError(f"sm_scale is {arrays.shown(sm_scale)}; it must be a number")
    try:
        value = float(sm_scale)
    except OverflowError:
        value = math.inf
    if not (value <= float(np.finfo(np.float32).max) and np.float32(value) > 0):  # NaN fails the first
        text = value if math.isfinite(value) else arrays.shown(sm_scale)
        raise ValueError(f"sm_scale is {text}; it must be a float32 above 0 (Kimi K2: 0.144680, never D**-0.5)")
    return value


def check_contents(problem: Problem) -> None:
    """Check what only the device knows: lengths, live table entries and mask bits (copies them to the host).

    Raises
    ------
    ValueError
        A length is negative or above ``max_seqlen``; a packed mask has a bit at or past Q, or a bool mask a byte other
        than 0 and 1; a table entry of a live page is no page.
    """
    lengths = problem.cache_seqlens.to_host()
    wrong = np.flatnonzero((lengths < 0) | (lengths > problem.max_seqlen))
    if wrong.size:
        b = int(wrong[0])
        raise ValueError(f"cache_seqlens[{b}] is {lengths[b]}; it must be between 0 and {problem.max_seqlen}")

    words = problem.tree_mask.to_host()
    if problem.bits_per_word == 1:
        if (words > 1).any():
            raise ValueError("tree_mask has a byte other than 0 and 1; kernels read the lowest bit of a bool")
        seen: np.ndarray = np.any(words, axis=1)
    else:
        spare = 32 * words.shape[2] - problem.num_nodes
        past_the_end = words[..., -1] >> np.uint32(32 - spare) if spare else words[..., :0]
        if past_the_end.any():
            b, i = (int(n) for n in np.argwhere(past_the_end)[0])
            raise ValueError(f"tree_mask[{b}, {i}] has a bit at or past column {problem.num_nodes}")
        seen = np.any(unpack_mask(words, problem.num_nodes), axis=1)

    # A request is live up to its prefix and the last tree row that any node sees; an idle slot has no live page.
    num_pages, page_size, _ = problem.kv_cache.shape
    table = problem.block_table.to_host()
    for b, length in enumerate(lengths):
        rows = int(length) + int(np.max(np.flatnonzero(seen[b]), initial=-1)) + 1
        live = table[b, : -(-rows // page_size)]
        bad = np.flatnonzero((live < 0) | (live >= num_pages))
        if bad.size:
            n = int(bad[0])
            raise ValueError(f"block_table[{b}, {n}] is {live[n]}; it must be between 0 and {num_pages - 1}")
