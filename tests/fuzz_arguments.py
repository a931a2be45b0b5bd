"""Arguments at random, right and wrong: each call gives a right result or a documented error.

About half of the sets are right: random small shapes, dtypes, strides and memory, pages or none, and contents of which
some are hostile. In the others one or two mistakes are made, from the table of hostile.py or from pools; some of these
are none in the end, and the call must then give the right result too. What is right is told by hostile_checks.py.

A failure is an exception that is not documented, a message that names no argument, a result that is off, an argument
that was changed, a byte written beside a result, or a call that does not end. It is printed with what replays it.

    python tests/fuzz_arguments.py --operator compact_kv --count 1000 --seed 0
"""

from __future__ import annotations

import argparse
import inspect
import re
import signal
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from hostile import (  # noqa: E402  isort: skip  (imports the package, which chooses the backend)
    FUZZED,
    OPERATORS,
    PAGE,
    Arguments,
    Operator,
    arrays_in,
    as_numba,
    copied,
    get,
    in_one_place,
    locked,
    odd_address,
    one_memory,
    put,
    swapped_dtype,
    uneven_strides,
)

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from accept_cases import changed, drafted_tree, following_targets  # noqa: E402
from cases import DTYPES as FLOAT_DTYPES  # noqa: E402
from cases import cast  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402
from rich.table import Table  # noqa: E402

import ddtree_numba as dd  # noqa: E402
from ddtree_numba.attention import mma  # noqa: E402
from ddtree_numba.device import launch as launching  # noqa: E402
from ddtree_numba.tree.draft_tree import DTYPES as TREE_DTYPES  # noqa: E402

Rng = np.random.Generator
NAN, INF = np.nan, np.inf
LIMIT_S = 60.0  # of one call
LARGEST_INT32 = 2**31 - 1
HOSTILE_INTEGERS = (-(2**31), 2**31 - 1, -1, 0, 10**9, -7)
HOSTILE_FLOATS = (NAN, INF, -INF, 0.0, -0.0, 1e30, -1e30)
DOCUMENTED = (TypeError, ValueError)
ALSO_NAMED = ("a stop token", "the randomness", "q_nope", "q_pe", "variant")
WRITTEN = ("out", "workspace", "permutation", "predicts", "accept_index", "accept_token_num", "kv_caches")


class Hang(BaseException):
    """A call has not ended in time; no handler of errors catches it."""


# Small helps


def chance(rng: Rng, share: float) -> bool:
    return bool(rng.random() < share)


def pick(rng: Rng, *things: Any) -> Any:
    return things[int(rng.integers(len(things)))]


def size(rng: Rng, least: int, most: int) -> int:
    return int(rng.integers(least, most + 1))


def laid(rng: Rng, x: np.ndarray) -> np.ndarray:
    """The same elements in memory of any order of axes, with gaps or backwards, inside of a larger buffer."""
    if x.ndim == 0 or chance(rng, 0.5):
        return x.copy()
    order = rng.permutation(x.ndim)
    steps = [pick(rng, 1, 1, 2, -1) for _ in range(x.ndim)]
    wide = [n * abs(step) + size(rng, 0, 1) for n, step in zip(x.shape, steps, strict=True)]
    memory = np.zeros([wide[axis] for axis in order], x.dtype)
    if memory.nbytes:
        memory.view(np.uint8).fill(0x5A)
    view = memory.transpose(np.argsort(order))
    view = view[tuple(slice(0, n * abs(s), abs(s)) for n, s in zip(x.shape, steps, strict=True))]
    view = view[tuple(slice(None, None, -1 if s < 0 else 1) for s in steps)]
    view[...] = x
    return view


def spoil(rng: Rng, x: np.ndarray, values: Any, share: float = 0.3) -> np.ndarray:
    """The array, with some probability, with hostile values in some places."""
    if x.size and chance(rng, share):
        x = x.copy()
        for _ in range(size(rng, 1, 2)):
            at = tuple(int(rng.integers(n)) for n in x.shape)
            value = pick(rng, *values)
            x[at] = x.dtype.type(value) if x.dtype.kind == "f" else value
    return x


def floats(rng: Rng, *shape: int, special: float = 0.3, scale: float = 2.0) -> np.ndarray:
    x = np.array(rng.standard_normal(shape) * scale, np.float32)
    if chance(rng, 0.2):
        x = np.array(np.round(x))  # ties
    return spoil(rng, x, HOSTILE_FLOATS, special)


def of_any_float(rng: Rng, x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return cast(x, pick(rng, *FLOAT_DTYPES))


def result(rng: Rng, shape: tuple[int, ...], *dtypes: Any) -> Any:
    """None, or memory for a result."""
    return None if chance(rng, 0.4) else laid(rng, np.ones(shape, pick(rng, *dtypes)))


def lengths_of(rng: Rng, batch: int, most: int) -> np.ndarray:
    return laid(rng, spoil(rng, rng.integers(0, most + 1, batch).astype(np.int32), HOSTILE_INTEGERS))


# Right arguments of each operator


def argmax_tokens(rng: Rng) -> Arguments:
    shape = size(rng, 0, 2), size(rng, 0, 2), size(rng, 1, 9)
    return {"logits": laid(rng, of_any_float(rng, floats(rng, *shape))), "out": result(rng, shape[:2], np.int32)}


def topk_logprobs(rng: Rng) -> Arguments:
    batch, length, vocabulary = size(rng, 0, 2), size(rng, 0, 2), size(rng, 1, 9)
    k = size(rng, 1, vocabulary)
    outs = (result(rng, (batch, length, k), dtype) for dtype in (np.float32, np.int32))
    out = tuple(outs)
    variants = ("rounds", "rounds", "rounds", "threshold", "auto", "rounds_numpy", "threshold_numpy")
    return {
        "logits": laid(rng, of_any_float(rng, floats(rng, batch, length, vocabulary))), "k": k,
        "variant": pick(rng, *variants), "out": None if any(x is None for x in out) else out,
    }  # fmt: skip


def empty_tree(rng: Rng, batch: int, budget: int, max_depth: int) -> dd.DraftTree:
    tree = dd.DraftTree.empty(np.zeros(1), batch, budget, max_depth)
    return replace(tree, **{name: laid(rng, np.full_like(getattr(tree, name), 7)) for name in TREE_DTYPES})


def build_tree(rng: Rng) -> Arguments:
    batch, length, candidates, budget = size(rng, 0, 2), size(rng, 1, 4), size(rng, 1, 4), size(rng, 0, 8)
    rows = -np.sort(rng.random((batch, length, candidates)).astype(np.float32) * 3, axis=2)
    if chance(rng, 0.3):
        rows = np.round(rows)
    rows = spoil(rng, rows, (NAN, INF, -INF, -0.5, 2.0, 0.0))
    kind = pick(rng, np.int32, np.int64)
    ids = spoil(rng, rng.integers(0, 50, rows.shape).astype(kind), (0, -1, 2**31 - 1), 0.2)
    out = None if chance(rng, 0.4) else empty_tree(rng, batch, budget, min(length, budget) + size(rng, 0, 1))
    return {
        "logprobs": laid(rng, rows), "token_ids": laid(rng, ids),
        "root_tokens": laid(rng, rng.integers(0, 50, batch).astype(pick(rng, np.int32, np.int64))),
        "tree_budget": budget, "variant": pick(rng, "heap", "heap", "frontier", "auto", "heap_numpy", "frontier_numpy"),
        "out": out, "validate": chance(rng, 0.2),
    }  # fmt: skip


def parents_of(rng: Rng, batch: int | None = None, num_nodes: int | None = None) -> np.ndarray:
    batch = size(rng, 0, 3) if batch is None else batch
    num_nodes = pick(rng, *range(1, 11), 17, 33) if num_nodes is None else num_nodes
    parents = np.full((batch, num_nodes), -1, np.int32)
    for b in range(batch):
        for i in range(1, size(rng, 1, num_nodes)):
            parents[b, i] = rng.integers(0, i)
    return spoil(rng, parents, (*HOSTILE_INTEGERS, 1, 2, 5), 0.4)


def from_parents(
    *dtypes: Any, more: Callable[[Rng, np.ndarray], Arguments] | None = None
) -> Callable[[Rng], Arguments]:
    """Arguments of encodings that take parents and give arrays [B, Q]."""

    def draw(rng: Rng) -> Arguments:
        parents = parents_of(rng)
        given: Arguments = {"parents": laid(rng, parents), "validate": chance(rng, 0.2)}
        if more is not None:
            return given | more(rng, parents)
        outs = tuple(laid(rng, np.ones(parents.shape, dtype)) for dtype in dtypes)
        return given | {"out": None if chance(rng, 0.4) else outs if len(outs) > 1 else outs[0]}

    return draw


def links(names: tuple[str, str], dtype: Any) -> Callable[[Rng], Arguments]:
    def draw(rng: Rng) -> Arguments:
        parents = np.maximum(parents_of(rng), -1)
        pair = dd.links_from_parents(parents)
        hostile = (*HOSTILE_INTEGERS, 1, 2, 3)
        given = {name: laid(rng, spoil(rng, x.astype(dtype), hostile)) for name, x in zip(names, pair, strict=True)}
        return given | {"out": result(rng, parents.shape, np.int32), "validate": chance(rng, 0.2)}

    return draw


def positions(rng: Rng) -> Arguments:
    depths = spoil(rng, rng.integers(0, 5, (size(rng, 0, 3), size(rng, 1, 8))).astype(np.int32), HOSTILE_INTEGERS)
    given = {"cache_seqlens": lengths_of(rng, len(depths), 9), "depths": laid(rng, depths)}
    return given | {"out": result(rng, depths.shape, np.int32), "validate": chance(rng, 0.2)}


def some_mask(rng: Rng, parents: np.ndarray | None = None, packed: bool | None = None) -> np.ndarray:
    """A tree's mask, or any bits: bool or words."""
    parents = parents_of(rng) if parents is None else parents
    batch, num_nodes = parents.shape
    packed = chance(rng, 0.5) if packed is None else packed
    if chance(rng, 0.4):
        if packed:
            words = -(-num_nodes // 32)
            return rng.integers(0, 2**32, (batch, num_nodes, words), dtype=np.uint64).astype(np.uint32)
        return (
            rng.integers(0, 256 if chance(rng, 0.3) else 2, (batch, num_nodes, num_nodes)).astype(np.uint8).view(bool)
        )
    earlier = np.where((parents < 0) | (parents >= np.arange(num_nodes)), -1, parents)
    return np.asarray(dd.mask_from_parents(earlier, packed=packed))


def packed_or_not(rng: Rng, batch: int, num_nodes: int) -> Arguments:
    if chance(rng, 0.5):
        return {"packed": True, "out": result(rng, (batch, num_nodes, -(-num_nodes // 32)), np.uint32)}
    return {"packed": False, "out": result(rng, (batch, num_nodes, num_nodes), np.bool_)}


def on_host_parents(rng: Rng) -> Arguments:
    parents = parents_of(rng)
    return {"parents": parents.tolist() if chance(rng, 0.3) else laid(rng, parents), "validate": chance(rng, 0.3)} | (
        packed_or_not(rng, *parents.shape)
    )


def mask_and(more: Callable[[Rng, np.ndarray], Arguments]) -> Callable[[Rng], Arguments]:
    """Arguments of encodings that take a tree_mask."""

    def draw(rng: Rng) -> Arguments:
        mask = some_mask(rng)
        return {"tree_mask": laid(rng, mask), "validate": chance(rng, 0.2)} | more(rng, mask)

    return draw


def flat_result(dtype: Any, power: int) -> Callable[[Rng, np.ndarray], Arguments]:
    return lambda rng, mask: {"out": result(rng, (mask.shape[0] * mask.shape[1] ** power,), dtype)}


def bitpacked_result(rng: Rng, mask: np.ndarray) -> Arguments:
    width = np.uint8 if mask.shape[1] <= 8 else np.uint16 if mask.shape[1] <= 16 else np.uint32
    return {"out": result(rng, (mask.shape[0] * mask.shape[1],), width)}


def full_mask_more(rng: Rng, mask: np.ndarray) -> Arguments:
    batch, num_nodes = mask.shape[:2]
    lengths = lengths_of(rng, batch, 5)
    total = int(np.clip(lengths.astype(np.int64), 0, 20).sum()) + pick(rng, 0, 0, 3)
    out = result(rng, (num_nodes * (total + batch * num_nodes),), np.bool_)
    return {"cache_seqlens": lengths, "seqlens_sum": total, "out": out}


def from_full_mask(rng: Rng) -> Arguments:
    batch, num_nodes = size(rng, 0, 3), size(rng, 1, 9)
    lengths = lengths_of(rng, batch, 5)
    n = num_nodes * (int(np.clip(lengths.astype(np.int64), 0, 5).sum()) + batch * num_nodes) + size(rng, 0, 2)
    given = {
        "mask": laid(rng, rng.integers(0, 2, n).astype(np.bool_)),
        "cache_seqlens": lengths,
        "num_nodes": num_nodes,
    }
    return given | packed_or_not(rng, batch, num_nodes) | {"validate": chance(rng, 0.2)}


def from_qlen_only(rng: Rng) -> Arguments:
    batch, num_nodes = size(rng, 0, 3), size(rng, 1, 9)
    mask = rng.integers(0, 2, batch * num_nodes**2).astype(np.bool_)
    return {"mask": laid(rng, mask), "num_nodes": num_nodes} | packed_or_not(rng, batch, num_nodes)


def from_bitpacked(rng: Rng) -> Arguments:
    batch, num_nodes = size(rng, 0, 3), pick(rng, 1, 5, 8, 9, 16, 17, 32)
    width = 8 if num_nodes <= 8 else 16 if num_nodes <= 16 else 32
    words = rng.integers(0, 2**width, batch * num_nodes).astype(f"u{width // 8}")
    return {"words": laid(rng, words), "num_nodes": num_nodes} | packed_or_not(rng, batch, num_nodes)


def from_tensorrt(rng: Rng) -> Arguments:
    words = some_mask(rng, packed=True).view(np.int32)
    return {"words": laid(rng, words), "validate": chance(rng, 0.2)} | packed_or_not(rng, *words.shape[:2])


def bias_more(rng: Rng, mask: np.ndarray) -> Arguments:
    batch, num_nodes = mask.shape[:2]
    dtype = pick(rng, "float32", "float16", "bfloat16")
    given: Arguments = {"dtype": dtype, "cache_seqlens": None, "max_seqlen": None}
    longest = 0
    if chance(rng, 0.5):
        longest = size(rng, 0, 5)
        given |= {"cache_seqlens": lengths_of(rng, batch, longest), "max_seqlen": longest}
    kind = FLOAT_DTYPES[dtype] if dtype != "bfloat16" or chance(rng, 0.5) else np.dtype(np.uint16)
    return given | {"out": result(rng, (batch, num_nodes, longest + num_nodes), kind)}


def from_bias(rng: Rng) -> Arguments:
    batch, num_nodes = size(rng, 0, 3), size(rng, 1, 9)
    bias = np.where(rng.random((batch, num_nodes, num_nodes)) < 0.5, np.float32(0), np.float32(-INF))
    bias = of_any_float(rng, spoil(rng, bias, HOSTILE_FLOATS))
    return {"bias": laid(rng, bias), "validate": chance(rng, 0.2)} | packed_or_not(rng, batch, num_nodes)


def retrieve_more(rng: Rng, parents: np.ndarray) -> Arguments:
    batch, num_nodes = parents.shape
    depth, leaves = size(rng, 0, 6), pick(rng, None, 1, 2, 5)
    rows = max(num_nodes - 1, 1) if leaves is None else leaves
    return {"max_depth": depth, "max_leaves": leaves, "out": result(rng, (batch, rows, depth + 1), np.int32)}


def from_retrieve_indices(rng: Rng) -> Arguments:
    batch, num_nodes = size(rng, 0, 3), size(rng, 1, 8)
    paths = np.sort(rng.integers(-1, num_nodes, (batch, size(rng, 0, 4), size(rng, 1, 4))), axis=2)
    paths = spoil(rng, paths.astype(pick(rng, np.int32, np.int64)), HOSTILE_INTEGERS)
    given = {"paths": laid(rng, paths), "num_nodes": num_nodes, "out": result(rng, (batch, num_nodes), np.int32)}
    return given | {"validate": chance(rng, 0.2)}


def some_tree(rng: Rng) -> dd.DraftTree:
    tree = drafted_tree(rng, size(rng, 1, 3), size(rng, 0, 7), length=size(rng, 1, 4), candidates=3)
    spoiled = {}
    for name in ("num_nodes", "first_child", "next_sibling", "parents"):
        spoiled[name] = spoil(rng, getattr(tree, name), (*HOSTILE_INTEGERS, 1, 2, 3), 0.15)
    tree = changed(tree, **spoiled)
    return changed(tree, **{name: laid(rng, getattr(tree, name)) for name in TREE_DTYPES})


def relabel(rng: Rng) -> Arguments:
    tree = some_tree(rng)
    batch, num_nodes = tree.tokens.shape
    return {
        "tree": tree, "order": pick(rng, "depth_first", "breadth_first"),
        "out": None if chance(rng, 0.4) else empty_tree(rng, batch, num_nodes - 1, tree.max_depth),
        "permutation": result(rng, (batch, num_nodes), np.int32), "validate": chance(rng, 0.3),
    }  # fmt: skip


def inverse_permutation(rng: Rng) -> Arguments:
    batch, num_nodes = size(rng, 0, 3), size(rng, 1, 9)
    permutation = np.argsort(rng.random((batch, num_nodes)), axis=1).astype(np.int32)
    permutation = laid(rng, spoil(rng, permutation, (*HOSTILE_INTEGERS, 1, 2)))
    return {"permutation": permutation, "out": result(rng, permutation.shape, np.int32), "validate": chance(rng, 0.2)}


def attention(rng: Rng, widths: tuple[int, int] | None = None, dtype: str | None = None) -> Arguments:
    """Of any widths and dtypes, or of these; then q and cache are mostly such as are read 16 bytes at a time."""

    def of_float(x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return of_any_float(rng, x) if dtype is None else cast(x, dtype)

    def placed(x: np.ndarray) -> np.ndarray:
        return laid(rng, x) if dtype is None or chance(rng, 0.2) else x

    batch, num_nodes, heads = pick(rng, 0, 1, 1, 1, 2), size(rng, 1, 3), pick(rng, 1, 1, 2)
    rank, rope = widths or (pick(rng, 16, 16, 32), 16)
    capacity = num_nodes + size(rng, 0, 5)
    q = of_float(floats(rng, batch, num_nodes, heads, rank + rope, special=0.1, scale=1.0))
    table, shape = None, (batch, capacity, rank + rope)
    if chance(rng, 0.5):
        page_size = size(rng, 1, 4)
        pages = -(-capacity // page_size)
        number = batch * pages + size(rng, 1, 2)
        table = rng.permutation(number)[: batch * pages].reshape(batch, pages).astype(np.int32)
        table, shape = laid(rng, spoil(rng, table, HOSTILE_INTEGERS)), (number, page_size, rank + rope)
        capacity = pages * page_size
    cache = of_float(floats(rng, *shape, special=0.2, scale=1.0))
    if chance(rng, 0.1):
        cache = cache[:, :, None]
    longest = None if chance(rng, 0.5) else size(rng, 0, capacity - num_nodes)
    mask = None if chance(rng, 0.3) else laid(rng, some_mask(rng, parents_of(rng, batch, num_nodes)))
    q = placed(q)
    return {
        "q": (q[..., :rank], q[..., rank:]) if chance(rng, 0.2) else q, "kv_cache": placed(cache),
        "cache_seqlens": lengths_of(rng, batch, capacity - num_nodes), "tree_mask": mask,
        "sm_scale": float(pick(rng, 0.25, 0.1, 1.0, 1e-30)), "kv_lora_rank": rank, "block_table": table,
        "max_seqlen": longest, "num_splits": pick(rng, None, None, None, 1), "batch_invariant": chance(rng, 0.2),
        "out": result(rng, (batch, num_nodes, heads, rank), *FLOAT_DTYPES.values()),
        "lse": result(rng, (batch, num_nodes, heads), np.float32),
        "workspace": None if chance(rng, 0.7) else np.zeros(2**16, np.float32), "validate": chance(rng, 0.15),
    }  # fmt: skip


def verify_attention(rng: Rng) -> Arguments:
    if chance(rng, 0.05):
        given = attention(rng, (mma.R, mma.P), pick(rng, "float16", "bfloat16"))
        return given | {"variant": pick(rng, "mma", "mma_numpy")}
    variants = ("three_phase",) * 10 + ("auto", "three_phase_numpy", "three_phase_numpy", "flash_numpy", "flash")
    return attention(rng) | {"variant": pick(rng, *variants), "plan": None}


def prefix_attention(rng: Rng) -> Arguments:
    return {name: x for name, x in attention(rng).items() if name != "tree_mask"}


def prefix_tail(rng: Rng) -> Arguments:
    given = attention(rng)
    q = given["q"]
    shape = (q[0] if isinstance(q, tuple) else q).shape[:3]
    state = of_any_float(rng, floats(rng, *shape, given["kv_lora_rank"], special=0.1, scale=1.0))
    return given | {"prefix": (laid(rng, state), laid(rng, floats(rng, *shape, special=0.3)))}


def merge_states(rng: Rng) -> Arguments:
    shape = tuple(size(rng, 0 if chance(rng, 0.1) else 1, 3) for _ in range(size(rng, 1, 4))) + (
        pick(rng, 1, 3, 4, 8, 16),
    )
    given = {}
    for name in ("a", "b"):
        given[f"out_{name}"] = laid(rng, of_any_float(rng, floats(rng, *shape, special=0.2)))
        given[f"lse_{name}"] = laid(rng, spoil(rng, floats(rng, *shape[:-1]), (INF, -INF, NAN, 3e38, -3e38), 0.4))
    out, lse = result(rng, shape, *FLOAT_DTYPES.values()), result(rng, shape[:-1], np.float32)
    if chance(rng, 0.2):
        out = given[pick(rng, "out_a", "out_b")]
    if chance(rng, 0.2):
        lse = given[pick(rng, "lse_a", "lse_b")]
    return given | {"out": out, "lse": lse}


def lse_from_log2(rng: Rng) -> Arguments:
    lse = laid(rng, floats(rng, *(size(rng, 0, 3) for _ in range(size(rng, 0, 5)))))
    return {"lse": lse, "out": lse if chance(rng, 0.2) else result(rng, lse.shape, np.float32)}


def lse_from_flashmla(rng: Rng) -> Arguments:
    shape = tuple(size(rng, 0, 4) for _ in range(3))
    return {"lse": laid(rng, floats(rng, *shape)), "out": result(rng, (shape[0], shape[2], shape[1]), np.float32)}


def plan_attention(rng: Rng) -> Arguments:
    most = size(rng, 0, 99)
    lengths = lengths_of(rng, size(rng, 0, 4), most)
    return {"cache_seqlens": lengths, "num_nodes": size(rng, 1, 70), "num_heads": size(rng, 1, 9), "max_seqlen": most}


def workspace_bytes(rng: Rng) -> Arguments:
    names = ("batch", "num_nodes", "num_heads", "max_seqlen")
    given: Arguments = {name: pick(rng, 0, 1, 2, 65, 10**4, 2**31 - 1, 2**62) for name in names}
    given |= {"kv_lora_rank": pick(rng, 16, 32, 512, 1024), "qk_rope_head_dim": pick(rng, 16, 64)}
    given |= {"num_splits": pick(rng, None, 1, 7, 10**6), "batch_invariant": chance(rng, 0.5)}
    return given | {"prefix_tail": chance(rng, 0.5)}


def yarn_sm_scale(rng: Rng) -> Arguments:
    number = float(pick(rng, 40, 64.0, 1, 0.5, 0, -3.0, 1e300))
    return {
        "factor": number,
        "qk_head_dim": pick(rng, 1, 64, 192, 2**40),
        "mscale_all_dim": float(pick(rng, 1, 0, -1, 0.7)),
    }


def stop_tokens(rng: Rng, batch: int) -> Any:
    tokens = rng.integers(-1, 5, (batch, size(rng, 0, 3)))
    several = pick(rng, [1, 2], (0,), {3, 1}, [], 2, range(2))
    return pick(rng, None, None, several, laid(rng, tokens.astype(pick(rng, np.int32, np.int64))), tokens[0])


def accepted_result(rng: Rng, tree: dd.DraftTree) -> Any:
    if chance(rng, 0.5):
        return None
    made = dd.Accepted.empty(np.zeros(1), tree.tokens.shape[0], tree.max_depth)
    return replace(made, **{name: laid(rng, np.ones_like(x)) for name, x in vars(made).items()})


def accept_greedy(rng: Rng) -> Arguments:
    tree = some_tree(rng)
    targets = following_targets(rng, drafted_tree(rng, *tree.tokens.shape[:1], tree.tokens.shape[1] - 1))
    targets = np.where(rng.random(targets.shape) < 0.5, np.roll(tree.tokens, -1, 1), targets)
    targets = spoil(rng, targets.astype(pick(rng, np.int32, np.int64)), HOSTILE_INTEGERS)
    return {
        "tree": tree, "target_tokens": laid(rng, targets), "stop_tokens": stop_tokens(rng, len(targets)),
        "out": accepted_result(rng, tree), "validate": chance(rng, 0.2),
    }  # fmt: skip


def accept_sampled(rng: Rng) -> Arguments:
    tree = some_tree(rng)
    batch, num_nodes = tree.tokens.shape
    probs = rng.random((batch, num_nodes, size(rng, 1, 7))).astype(np.float32)
    probs /= probs.sum(axis=2, keepdims=True)
    if chance(rng, 0.2):
        probs[0, 0] = 0
    probs = spoil(rng, probs, (NAN, INF, -0.5, 1.5, 0.0, -0.0, 1e-20))
    given: Arguments = {"tree": tree, "target_probs": laid(rng, of_any_float(rng, probs))}
    if chance(rng, 0.5):
        uniforms = rng.random((batch, num_nodes)).astype(pick(rng, np.float32, np.float64))
        given["uniforms"] = laid(rng, spoil(rng, uniforms, (NAN, -0.5, 1.0, 7.0, 0.0, INF)))
    else:
        given["seeds"] = laid(rng, rng.integers(0, 2**63, batch).astype(pick(rng, np.int64, np.uint64)))
        places = rng.integers(0, 100, (batch, num_nodes)).astype(pick(rng, np.int32, np.int64))
        places = spoil(rng, places, HOSTILE_INTEGERS)
        given["positions"] = laid(rng, places if chance(rng, 0.5) else places[:, 0])
    return given | {
        "stop_tokens": stop_tokens(rng, batch), "out": accepted_result(rng, tree), "validate": chance(rng, 0.2)
    }  # fmt: skip


def target_probs(rng: Rng) -> Arguments:
    batch, rows, vocabulary = pick(rng, 0, 1, 1, 2), pick(rng, 0, 1, 1, 1), size(rng, 1, 9)
    logits = of_any_float(rng, floats(rng, batch, rows, vocabulary))

    def control(number: Any, dtype: Any, hostile: Any) -> Any:
        return number if chance(rng, 0.5) else laid(rng, spoil(rng, np.full(batch, number, dtype), hostile))

    return {
        "logits": laid(rng, logits),
        "temperature": control(pick(rng, 0.0, 0.5, 1.0, 3.0, 1), np.float32, (NAN, INF, -1.0, 0.0, 1e-40)),
        "top_k": pick(rng, None, control(size(rng, -1, 10), np.int32, HOSTILE_INTEGERS)),
        "top_p": pick(rng, None, control(pick(rng, 0.1, 0.5, 0.9, 1.0), np.float32, (NAN, 0.0, -1.0, 2.0, INF))),
        "out": result(rng, logits.shape, np.float32),
    }  # fmt: skip


def verify_tree_greedy(rng: Rng) -> Arguments:
    tree = drafted_tree(rng, size(rng, 1, 3), size(rng, 0, 7), idle=False)
    batch, num_nodes = tree.tokens.shape
    places = rng.permutation(batch * num_nodes) if chance(rng, 0.3) else np.arange(batch * num_nodes)
    read = {
        "candidates": tree.tokens, "retrive_index": places.reshape(batch, num_nodes),
        "retrive_next_token": tree.first_child, "retrive_next_sibling": tree.next_sibling,
        "target_predict": following_targets(rng, tree),
    }  # fmt: skip
    hostile = (*HOSTILE_INTEGERS, 1, 2, 3)
    given = {n: laid(rng, spoil(rng, x.astype(pick(rng, np.int32, np.int64)), hostile, 0.2)) for n, x in read.items()}
    shapes = {"predicts": (batch * num_nodes + size(rng, 0, 1),), "accept_index": (batch, size(rng, 0, 5))}
    shapes["accept_token_num"] = (batch,)
    return {n: laid(rng, rng.integers(-99, -9, s).astype(np.int32)) for n, s in shapes.items()} | given


def some_accepted(rng: Rng, batch: int) -> dd.Accepted:
    nodes = np.sort(np.argsort(rng.random((batch, 8)), axis=1)[:, : size(rng, 0, 5)], axis=1).astype(np.int32)
    if chance(rng, 0.7) and nodes.shape[1]:
        nodes[:, 0] = 0
    counts = rng.integers(0, nodes.shape[1] + 1, batch).astype(np.int32)
    nodes, counts = spoil(rng, nodes, (*HOSTILE_INTEGERS, 1, 2), 0.25), spoil(rng, counts, HOSTILE_INTEGERS, 0.15)
    return dd.Accepted(laid(rng, nodes), laid(rng, counts), None, None)


ANY_DTYPES = ("float32", "float16", "uint8", "int64", "complex128", "bool", "S3", "i4,f8", ml_dtypes.bfloat16)


def some_bytes(rng: Rng, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    return np.frombuffer(bytearray(rng.bytes(int(np.prod(shape)) * dtype.itemsize)), dtype).reshape(shape)


def in_rows(rng: Rng, x: np.ndarray) -> np.ndarray:
    """The array with gaps or swaps in its first two axes alone."""
    if chance(rng, 0.5):
        return x
    memory = np.zeros((x.shape[1] + 1, 2 * x.shape[0], *x.shape[2:]), x.dtype)
    view = memory.swapaxes(0, 1)[::2, 1:]
    view[...] = x
    return view


def compact_kv(rng: Rng) -> Arguments:
    batch, capacity = size(rng, 0, 3), size(rng, 0, 14)
    table, outer = None, (batch, capacity)
    if chance(rng, 0.5):
        page_size, pages = size(rng, 1, 4), size(rng, 0, 4)
        number = batch * pages + size(rng, 0, 2)
        table = rng.permutation(number)[: batch * pages].reshape(batch, pages).astype(np.int32)
        table = laid(rng, spoil(rng, table, (-1, 2**31 - 1, -(2**31), 10**9)))
        outer, capacity = (number, page_size), pages * page_size
    dtype = pick(rng, *ANY_DTYPES)
    tail = pick(rng, (), (1,), (3,), (2, 3), (8,))
    if chance(rng, 0.3):  # layers between each other
        memory = some_bytes(rng, (*outer, 3, *tail), dtype)
        caches: Any = [memory[:, :, n] for n in rng.permutation(3)[: size(rng, 1, 3)]]
    else:
        caches = [in_rows(rng, some_bytes(rng, (*outer, *tail), dtype)) for _ in range(size(rng, 1, 3))]
    if len(caches) == 1 and chance(rng, 0.5):
        caches = caches[0]
    return {
        "kv_caches": caches, "cache_seqlens": lengths_of(rng, batch, max(capacity - 5, 0)),
        "accepted": some_accepted(rng, batch), "block_table": table,
    }  # fmt: skip


def gather_accepted(rng: Rng) -> Arguments:
    batch = size(rng, 0, 3)
    shape = (batch, size(rng, 0, 8), *pick(rng, (), (1,), (3,), (2, 3), (8,), (0,)))
    dtype = pick(rng, *ANY_DTYPES)
    x, taken = in_rows(rng, some_bytes(rng, shape, dtype)), some_accepted(rng, batch)
    out = None if chance(rng, 0.4) else np.zeros((*taken.nodes.shape, *shape[2:]), dtype)
    return {"x": x, "accepted": taken, "out": out}


def pack_mask(rng: Rng) -> Arguments:
    mask = some_mask(rng, packed=False)
    out = result(rng, (*mask.shape[:2], -(-mask.shape[1] // 32)), np.uint32)
    return {"mask": laid(rng, mask), "out": out, "validate": chance(rng, 0.2)}


def unpack_mask(rng: Rng) -> Arguments:
    words = some_mask(rng, packed=True)
    out = result(rng, (*words.shape[:2], words.shape[1]), np.bool_)
    return {"words": laid(rng, words), "num_nodes": words.shape[1], "out": out, "validate": chance(rng, 0.2)}


def square_result(rng: Rng, mask: np.ndarray) -> Arguments:
    return {"out": result(rng, mask.shape[:2], np.int32)}


def words_result(rng: Rng, mask: np.ndarray) -> Arguments:
    return {"out": result(rng, (*mask.shape[:2], -(-mask.shape[1] // 32)), np.int32)}


INT32, INT64 = np.int32, np.int64
DRAWS: dict[str, Callable[[Rng], Arguments]] = {
    "topk_logprobs": topk_logprobs,
    "build_tree": build_tree,
    "links_from_parents": from_parents(INT32, INT32),
    "parents_from_links": links(("first_child", "next_sibling"), INT32),
    "sglang_links": from_parents(INT64, INT64, INT64),
    "parents_from_sglang": links(("retrieve_next_token", "retrieve_next_sibling"), INT64),
    "depths_from_parents": from_parents(INT32),
    "positions": positions,
    "mask_from_parents on the host": on_host_parents,
    "mask_from_parents on the device": from_parents(more=lambda rng, parents: packed_or_not(rng, *parents.shape)),
    "parents_from_mask": mask_and(square_result),
    "pack_mask on the host": pack_mask,
    "pack_mask on the device": pack_mask,
    "unpack_mask on the host": unpack_mask,
    "unpack_mask on the device": unpack_mask,
    "full_mask": mask_and(full_mask_more),
    "tree_mask_from_full_mask": from_full_mask,
    "qlen_only_mask": mask_and(flat_result(np.bool_, 2)),
    "tree_mask_from_qlen_only": from_qlen_only,
    "bitpacked_mask": mask_and(bitpacked_result),
    "tree_mask_from_bitpacked": from_bitpacked,
    "tensorrt_mask": mask_and(words_result),
    "tree_mask_from_tensorrt": from_tensorrt,
    "dense_bias": mask_and(bias_more),
    "tree_mask_from_bias": from_bias,
    "retrieve_indices": from_parents(more=retrieve_more),
    "parents_from_retrieve_indices": from_retrieve_indices,
    "relabel": relabel,
    "inverse_permutation": inverse_permutation,
    "verify_attention": verify_attention,
    "prefix_attention": prefix_attention,
    "verify_attention_prefix_tail": prefix_tail,
    "plan_attention": plan_attention,
    "workspace_bytes": workspace_bytes,
    "yarn_sm_scale": yarn_sm_scale,
    "merge_states": merge_states,
    "lse_from_log2": lse_from_log2,
    "lse_from_flashmla": lse_from_flashmla,
    "argmax_tokens": argmax_tokens,
    "accept_greedy": accept_greedy,
    "accept_sampled": accept_sampled,
    "target_probs": target_probs,
    "verify_tree_greedy": verify_tree_greedy,
    "compact_kv": compact_kv,
    "gather_accepted": gather_accepted,
}


# Mistakes

SCALARS = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    7,
    16,
    24,
    2**31,
    2**40,
    -(2**70),
    10**30,
    10**5000,
    1.5,
    NAN,
    INF,
    -INF,
    1e39,
    1j,
    "auto",
    "x",
    b"x",
    [1],
    (1, 2),
    {},
    {1},
    np.int64(3),
    np.float32(0.5),
    np.bool_(True),
    np.array(2),
    np.ones(3),
    object(),
)
SOME_DTYPES = (
    "float32",
    "float64",
    "float16",
    "int32",
    "int64",
    "uint32",
    "uint16",
    "uint8",
    "int8",
    "bool",
    "complex64",
    "U2",
    "i4,f4",
    ml_dtypes.bfloat16,
)


def as_dtype(rng: Rng, x: np.ndarray) -> np.ndarray:
    dtype = np.dtype(pick(rng, *SOME_DTYPES))
    same_width = x.dtype.itemsize == dtype.itemsize and x.flags.c_contiguous and dtype.kind not in "U"
    return x.view(dtype) if same_width and chance(rng, 0.5) else np.zeros(x.shape, dtype)


def cut(rng: Rng, x: np.ndarray) -> np.ndarray:
    axis = int(rng.integers(x.ndim))
    return x[
        (slice(None),) * axis + (pick(rng, slice(1, None), slice(0, 0), slice(None, None, 2), slice(None, -1), 0),)
    ]


def grown(rng: Rng, x: np.ndarray) -> np.ndarray:
    axis = int(rng.integers(x.ndim))
    return np.concatenate([x, np.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)], axis)


MISTAKES: tuple[Callable[[Rng, np.ndarray], Any], ...] = (
    as_dtype,
    as_dtype,
    cut,
    cut,
    grown,
    grown,
    lambda rng, x: x[None],
    lambda rng, x: x[..., None],
    lambda rng, x: x.T,
    lambda rng, x: x.tolist(),
    lambda rng, x: pick(rng, *SCALARS),
    lambda rng, x: x.astype(object),
    lambda rng, x: np.ma.masked_array(x),
    lambda rng, x: np.zeros(x.shape, swapped_dtype(x.dtype)),
    lambda rng, x: odd_address(x),
    lambda rng, x: uneven_strides(x),
    lambda rng, x: in_one_place(x),
    lambda rng, x: np.broadcast_to(x[:1], x.shape),
    lambda rng, x: locked(x),
    lambda rng, x: np.zeros(x.shape, "V0"),
    lambda rng, x: np.zeros(tuple(rng.permutation(x.shape)), x.dtype),
)


def places(given: Any, path: str = "") -> Iterator[str]:
    """All places in arguments that a mistake can be made in."""
    if isinstance(given, dict):
        for name, x in given.items():
            yield from places(x, name)
        return
    yield path
    if isinstance(given, (tuple, list)):
        for n, x in enumerate(given):
            yield from places(x, f"{path}[{n}]")
    elif isinstance(given, (dd.DraftTree, dd.Accepted)):
        for name, x in vars(given).items():
            yield from places(x, f"{path}.{name}")


def mistaken(rng: Rng, operator: Operator, given: Arguments) -> Arguments:
    """The arguments with one mistake more, or as they are where it cannot be made in them."""
    if any(x.dtype.hasobject for x in arrays_in(given)):  # other mistakes would make objects of any bytes
        return given
    try:
        if chance(rng, 0.25):
            row = operator.rows[int(rng.integers(len(operator.rows)))]
            made = row.change(given)
            return given if any(x.nbytes > 2**24 for x in arrays_in(made)) else made
        path = pick(rng, *places(given))
        x = get(given, path)
        if not isinstance(x, np.ndarray):
            return put(given, path, pick(rng, *SCALARS))
        others = [p for p in places(given) if p != path and isinstance(get(given, p), np.ndarray)]
        if others and chance(rng, 0.15):
            other = pick(rng, *others)
            one, two = one_memory(get(given, other), x) if chance(rng, 0.7) else (get(given, other),) * 2
            return put(put(given, other, one), path, two)
        return put(given, path, pick(rng, *MISTAKES)(rng, x))
    except (IndexError, TypeError, ValueError, AttributeError, KeyError, OverflowError):
        return given


def may_not_run(given: Arguments) -> bool:
    """Whether sizes are right, but too large for a test (the allocation is the caller's own), or tokens no int32."""
    for name in ("max_depth", "seqlens_sum", "max_seqlen", "max_leaves", "num_splits", "num_nodes"):
        n = given.get(name)
        if isinstance(n, (int, np.integer)) and not isinstance(n, bool) and 100 < n < 2**31 and "batch" not in given:
            return True
    targets = given.get("target_predict")
    if isinstance(targets, np.ndarray) and targets.dtype == np.int64 and (np.abs(targets) > LARGEST_INT32).any():
        return True  # a GPU cuts them to 32 bits, the simulator raises an OverflowError
    depths = [getattr(given.get(name), "max_depth", 0) for name in ("tree", "out")]
    return any(isinstance(n, (int, np.integer)) and 100 < n < 2**63 for n in depths)


# Running


@dataclass
class Counts:
    """What has become of the sets."""

    tried: int = 0
    kernels: int = 0  # right results, of a kernel
    others: int = 0  # right results of a mirror, of the host, or of nothing to do
    errors: int = 0
    failures: list[str] = field(default_factory=list)

    def row(self, name: str) -> list[str]:
        return [name, *(f"{n:,}" for n in (self.tried, self.kernels, self.others, self.errors, len(self.failures)))]


@contextmanager
def launches(started: list[Any]) -> Iterator[None]:
    def counting(plain: Any) -> Any:
        def run(*args: Any) -> None:
            started.append(args[0])
            plain(*args)

        return run

    with (
        mock.patch.object(launching, "_simulate", counting(launching._simulate)),
        mock.patch.object(launching, "_launch", counting(launching._launch)),
    ):
        yield


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang(f"no end after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def memory_of(x: np.ndarray) -> np.ndarray:
    """The array that owns the memory of a view."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x


def may_change(operator: Operator, given: Arguments) -> list[np.ndarray]:
    """Arrays that the operator writes to."""
    names = [*WRITTEN, "lse" if "sm_scale" in given or "lse_a" in given else ""]
    names += ["cache_seqlens"] if operator.name == "compact_kv" else []
    return [x for name in names for x in arrays_in(given.get(name))]


def bits_of(x: np.ndarray) -> bytes:
    return b"" if x.dtype.hasobject else x.tobytes()


def beside(x: np.ndarray, owner: np.ndarray, before: bytes) -> bool:
    """Whether nothing but the elements of ``x`` has changed in its memory."""
    offset = x.ctypes.data - owner.ctypes.data
    if owner is x or not owner.flags.c_contiguous or offset < 0:
        return True
    if x.size == 0 or owner.dtype.hasobject:
        return bits_of(owner) == before
    raw = bytearray(before)
    np.ndarray(x.shape, x.dtype, raw, offset=offset, strides=x.strides)[...] = x
    return bytes(raw) == bits_of(owner)


def names_of(operator: Operator) -> re.Pattern[str]:
    names = [*inspect.signature(operator.function).parameters, *ALSO_NAMED]
    return re.compile(rf"\b({'|'.join(names)})\b")


def one_set(operator: Operator, rng: Rng, counts: Counts) -> None:
    """Draw a set of arguments, call, and raise AssertionError unless the answer is as it must be."""
    given = DRAWS[operator.name](rng)
    if chance(rng, 0.55):
        for _ in range(1 if chance(rng, 0.7) else 2):
            given = mistaken(rng, operator, given)
    if may_not_run(given):
        given = DRAWS[operator.name](rng)
    before = copied(given)
    written = may_change(operator, given)
    owners = [memory_of(x) for x in written]
    shared = [bits_of(x) for x in owners]
    read = [x for x in arrays_in(given) if not any(x is y or np.may_share_memory(x, y) for y in written)]
    bits = [bits_of(x) for x in read]
    started: list[Any] = []
    counts.tried += 1
    try:
        with launches(started), time_limit(LIMIT_S):
            device = operator.name.endswith("on the device")
            found = operator.function(**(as_numba(given) if device else given))
    except DOCUMENTED as error:
        told = [str(error), f"{type(error).__name__}: {error}"]
        assert names_of(operator).search(told[0]), f"the message names no argument: {told[1]}"
        assert "\n" not in told[0] and len(told[0]) < 600, f"the message is no line: {told[1]}"
        assert not started, f"a kernel was launched before: {told[1]}"
        assert shared == [bits_of(x) for x in owners], f"something was written before: {told[1]}"
        assert bits == [bits_of(x) for x in read], f"something was changed before: {told[1]}"
        counts.errors += 1
        return
    assert bits == [bits_of(x) for x in read], "an argument was changed"
    for x, owner, old in zip(written, owners, shared, strict=True):
        alone = sum(memory_of(y) is owner for y in written) == 1
        assert not alone or beside(x, owner, old), "something was written beside a result"
    operator.check(before, found, given)
    if started:
        counts.kernels += 1
    else:
        counts.others += 1


def described(given: Any) -> str:
    if isinstance(given, np.ndarray):
        return f"{given.dtype}{list(given.shape)}"
    if isinstance(given, dict):
        return ", ".join(f"{name}={described(x)}" for name, x in given.items())
    return " ".join(repr(given).split())[:80]


def run(operator: Operator, count: int, seed: int, *, first: int = 0, seconds: float = INF, step: Any = None) -> Counts:
    """Try so many sets, each from a seed of its own, or as many as fit into the time."""
    counts = Counts()
    end = time.monotonic() + seconds
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for n in range(first, first + count):
            if time.monotonic() > end:
                break
            try:
                one_set(operator, np.random.default_rng([zlib.crc32(operator.name.encode()), seed, n]), counts)
            except (Hang, Exception) as error:
                where = f"--operator '{operator.name}' --seed {seed} --first {n} --count 1"
                counts.failures.append(f"{where}: {type(error).__name__}: {str(error)[:400]}")
            if step is not None:
                step()
    return counts


def write(found: dict[str, Counts], command: str) -> None:
    """Put the counts into the page; those of other operators stay, and so does the command of all."""
    text = PAGE.read_text(encoding="utf-8")
    section = FUZZED.search(text)
    assert section
    if len(found) < len(OPERATORS):
        command = section[0].split("```")[1].removeprefix("bash").strip()
    rows = {cells[0]: cells for line in section[0].splitlines() if len(cells := line.strip("| ").split(" | ")) == 6}
    rows |= {name: counts.row(name) for name, counts in found.items()}
    numbers = [[int(cell.replace(",", "")) for cell in rows[operator.name][1:]] for operator in OPERATORS]
    tried, *_, failed = (sum(column) for column in zip(*numbers, strict=True))
    lines = [
        "<!-- fuzzed -->",
        f"{tried:,} sets, {failed:,} failures, in the simulator:",
        "",
        "```bash",
        command,
        "```",
        "",
        "| operator | tried | right results of a kernel | other right results | documented errors | failures |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(rows[operator.name])} |" for operator in OPERATORS),
        "",
        "Other right results are those of mirrors, of NumPy on the host, and of nothing to do (no requests).",
        "<!-- end of fuzzed -->",
        "",
    ]
    PAGE.write_text(FUZZED.sub(lambda _: "\n".join(lines), text), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--operator", default="all", help="a name, or its beginning; default: all")
    parser.add_argument("--count", type=int, default=100, help="sets for each operator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first set, to replay one")
    parser.add_argument("--seconds", type=float, default=INF, help="at most this long for each operator")
    parser.add_argument("--write", action="store_true", help="put the counts into docs/hostile_input.md")
    options = parser.parse_args()
    chosen = [x for x in OPERATORS if options.operator == "all" or x.name.startswith(options.operator)]
    if not chosen:
        parser.error(f"no operator begins with {options.operator!r}; there are: {', '.join(DRAWS)}")
    console = Console()
    found: dict[str, Counts] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=options.count * len(chosen))
        for n, operator in enumerate(chosen):
            progress.update(bar, description=operator.name)
            found[operator.name] = run(
                operator, options.count, options.seed, first=options.first, seconds=options.seconds,
                step=lambda: progress.advance(bar),
            )  # fmt: skip
            progress.update(bar, completed=options.count * (n + 1))
            for failure in found[operator.name].failures[:20]:
                console.print(failure, markup=False, highlight=False, soft_wrap=True)
    summary = Table("operator", *("tried", "kernels", "others", "errors", "failures"))
    for name, counts in found.items():
        summary.add_row(*counts.row(name))
    console.print(summary)
    if options.write:
        limit = "" if options.seconds == INF else f" --seconds {options.seconds:g}"
        write(found, f"python tests/fuzz_arguments.py --count {options.count} --seed {options.seed}{limit} --write")
    return int(any(counts.failures for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
