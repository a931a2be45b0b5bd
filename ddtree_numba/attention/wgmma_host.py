"""Variant `wgmma` from the host: what it takes, its plan and workspace, tensor maps, launches, and the mirror.

The kernels are in wgmma.py, which only compiles for a GPU and is imported when one is there to run them; which block
takes which key tiles is in schedule.py.

Three kernels run, in the order of the stream: `plan_blocks` cuts the work into pieces from lengths that lie on the
device, `wgmma` does the pieces, `combine` merges the states of row tiles that were cut. The first depends on lengths
and sizes alone, so a model plans once a step (`plan_attention`) and hands the plan to every layer.

The kernel copies boxes of 64 rows x 64 columns by tensor maps. A map describes memory as three axes (columns, rows,
pages) with two strides, which is where all conditions on layouts come from: see `takes`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ddtree_numba.attention import schedule
from ddtree_numba.attention.flash import require_workspace
from ddtree_numba.attention.mma import D, R
from ddtree_numba.attention.problem import Problem
from ddtree_numba.device import runtime
from ddtree_numba.device.arrays import (
    HOST,
    View,
    contiguous_strides,
    empty,
    kernel_dtype,
    require_dtype,
    require_integer,
    require_shape,
    shown,
    view,
)
from ddtree_numba.device.bf16 import array_from_f32, array_to_f32
from ddtree_numba.device.launch import (
    compute_capability,
    copy_in,
    copy_out,
    device_name,
    launch,
    multiprocessors,
)
from ddtree_numba.device.ptx import multiplied
from ddtree_numba.device.runtime import require_backend

ROWS = KEYS = 64  # of a tile
LOG2_E = math.log2(math.e)
LN_2 = np.float32(math.log(2.0))
KINDS = {np.dtype("uint16"): "bf16", np.dtype("float16"): "f16", np.dtype("float32"): "f32"}  # of what kernels see
FORMATS = ("bf16", "f16")

ALIGNMENT = 128  # of each part of the workspace, in bytes
LONGEST_STRIDE = 2**40  # of a tensor map, in bytes; they stay below
COPY_THREADS = 256
NO_CLOCKS = (0,)  # the address that a clocked kernel writes to

# Of the mirror, as the kernel has them.
SLACK = np.float32(8.0)
LOWEST = np.float32(-1e30)
TINY = np.float32(1e-30)
WARP_ROWS = 16  # a warp moves the references of all its rows, or none
ZERO = np.float32(0.0)
NEG_INF = np.float32(-np.inf)


# Sizes and memory


class Sizes(NamedTuple):
    """What the grid and all arrays follow from; lengths are known to the device alone."""

    batch: int
    num_nodes: int
    num_heads: int
    blocks: int  # one for each multiprocessor

    @property
    def num_rows(self) -> int:
        return self.num_nodes * self.num_heads

    @property
    def row_tiles(self) -> int:
        return -(-self.num_rows // ROWS)

    @property
    def slots(self) -> int:
        """States that there may be."""
        return int(schedule.slots(self.row_tiles, self.blocks))


class Part(NamedTuple):
    """An array in a workspace."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Its bytes, up to where the next part may begin."""
        nbytes = math.prod(self.shape) * np.dtype(self.dtype).itemsize
        return -(-nbytes // ALIGNMENT) * ALIGNMENT


@functools.lru_cache(maxsize=1024)
def plan_parts(sizes: Sizes) -> tuple[Part, ...]:
    """What `plan_blocks` writes."""
    pieces = int(schedule.most_pieces(sizes.batch, sizes.row_tiles, sizes.blocks))
    return (
        Part("plan", (int(schedule.plan_words(sizes.batch, sizes.blocks)),), "int32"),
        Part("pieces", (pieces, schedule.PIECE_FIELDS), "int32"),
        Part("items", (sizes.slots, schedule.ITEM_FIELDS), "int32"),
    )


@functools.lru_cache(maxsize=1024)
def state_parts(sizes: Sizes) -> tuple[Part, ...]:
    """What `wgmma` leaves for `combine`."""
    return (
        Part("states", (sizes.slots, ROWS, R), "float16"),
        Part("beside", (sizes.slots, 3, ROWS), "float32"),
    )


@functools.lru_cache(maxsize=1024)
def bytes_of(parts: tuple[Part, ...]) -> int:
    """Bytes that hold the parts wherever the memory begins, if at a multiple of 16."""
    return sum(part.nbytes for part in parts) + ALIGNMENT - 16


def cut(memory: View, parts: tuple[Part, ...]) -> dict[str, View]:
    """The parts as views of one array."""
    start = -(-memory.pointer // ALIGNMENT) * ALIGNMENT
    return {
        name: View(name, memory.kind, memory.device, start + offset, shape, strides, dtype, False, memory.owner)
        for name, offset, shape, strides, dtype in places(parts)
    }


@functools.lru_cache(maxsize=1024)
def places(parts: tuple[Part, ...]) -> tuple[tuple[str, int, tuple[int, ...], tuple[int, ...], np.dtype[Any]], ...]:
    """Name, offset, shape, strides and dtype of each part; remembered, since each call asks for them."""
    found, offset = [], 0
    for part in parts:
        dtype = np.dtype(part.dtype)
        found.append((part.name, offset, part.shape, contiguous_strides(part.shape, dtype.itemsize), dtype))
        offset += part.nbytes
    return tuple(found)


def workspace_bytes(
    variant: str, batch: int, num_nodes: int, num_heads: int, kv_lora_rank: int, head_dim: int, max_seqlen: int
) -> int:
    """Bytes that a workspace must have on the current GPU; a call that is given a plan needs a little less.

    Raises
    ------
    ValueError
        Other widths than R and P, another GPU, or sizes whose counts no 32 bits hold.
    """
    counts = _counts(batch, num_nodes, num_heads, max_seqlen, HOST)
    require(variant, _widths(kv_lora_rank, head_dim), _gpu(HOST), counts)
    sizes = Sizes(batch, num_nodes, num_heads, multiprocessors(HOST))
    return bytes_of(plan_parts(sizes) + state_parts(sizes))


# What is taken


def takes(problem: Problem) -> str:
    """An empty string where the kernel takes the checked arguments, else why not."""
    return refused(problem) or _gpu(problem.q_nope.device) or _layouts(problem) or _backend()


def takes_sizes(
    batch: int, num_nodes: int, num_heads: int, kv_lora_rank: int, head_dim: int, max_seqlen: int, device: int
) -> str:
    """An empty string where the kernel takes these sizes on a GPU, in layouts and formats of its own, else why not."""
    return (
        _widths(kv_lora_rank, head_dim)
        or _gpu(device)
        or _counts(batch, num_nodes, num_heads, max_seqlen, device)
        or _backend()
    )


def refused(problem: Problem) -> str:
    """An empty string where the mirror takes the checked arguments, in any layout, else why not."""
    sizes = (problem.batch, problem.num_nodes, problem.num_heads, problem.max_seqlen)
    return (
        _widths(problem.kv_lora_rank, problem.head_dim) or _formats(problem) or _counts(*sizes, problem.q_nope.device)
    )


def require_taken(variant: str, problem: Problem, *reasons: str) -> None:
    """Raise ValueError unless the mirror takes the arguments and there is no other reason; TypeError for dtypes."""
    require(variant, _widths(problem.kv_lora_rank, problem.head_dim))
    if formats := _formats(problem):
        raise TypeError(f"variant {variant!r} {formats}")
    require(variant, refused(problem), *reasons)


def require(variant: str, *reasons: str) -> None:
    """Raise ValueError with the first reason that is one."""
    for reason in filter(None, reasons):
        raise ValueError(f"variant {variant!r} {reason}")


def _widths(kv_lora_rank: int, head_dim: int) -> str:
    if (kv_lora_rank, head_dim) == (R, D):
        return ""
    return (
        f"takes kv_lora_rank = {R} and D = {D} alone (here they are {kv_lora_rank} and {head_dim}); "
        "variant 'flash' takes others"
    )


def _formats(problem: Problem) -> str:
    q, cache = (KINDS.get(kernel_dtype(x.dtype)) for x in (problem.q_nope, problem.kv_cache))
    if q in FORMATS and q == cache:
        return ""
    return (
        "takes q and kv_cache both bfloat16 or both float16; "
        f"here they are {problem.q_nope.dtype} and {problem.kv_cache.dtype}"
    )


def _gpu(device: int) -> str:
    if compute_capability(device)[0] == 9:
        return ""
    return f"needs compute capability 9.x, which {device_name(device)} does not have; variant 'mma' takes others"


def _backend() -> str:
    return "does not run in the simulator; its mirror is 'wgmma_numpy'" if runtime.SIMULATOR else ""


def _counts(batch: int, num_nodes: int, num_heads: int, max_seqlen: int, device: int) -> str:
    """Kernels count places, rows and pieces in 32 bits."""
    sizes = Sizes(batch, num_nodes, num_heads, multiprocessors(device))
    places = batch * sizes.row_tiles * (-(-(max_seqlen + num_nodes) // KEYS) + schedule.PIECE + 1) + sizes.blocks
    pieces = int(schedule.most_pieces(batch, sizes.row_tiles, sizes.blocks)) * schedule.PIECE_FIELDS
    rows = max(batch, 1) * sizes.row_tiles * ROWS
    most = max(places, pieces, sizes.slots * ROWS, rows, max_seqlen + num_nodes)
    if most < 2**31:
        return ""
    return (
        f"counts up to {most} for B = {batch}, Q = {num_nodes}, H = {num_heads} and max_seqlen = {max_seqlen}; "
        "it must be less than 2**31"
    )


def _layouts(problem: Problem) -> str:
    if problem.batch == 0:
        return ""
    cache = problem.kv_cache
    for x in (problem.q_nope, problem.q_pe):
        if row_stride(x) is None:
            return (
                f"takes queries whose nodes and heads are one axis of rows with one stride; here {x} has strides "
                f"{x.strides}"
            )
    for x, strides in (*((x, query_strides(x)) for x in (problem.q_nope, problem.q_pe)), (cache, cache_strides(cache))):
        aligned = x.pointer % 16 == 0 and all(s % 16 == 0 and 0 < s < LONGEST_STRIDE for s in strides)
        if x.strides[-1] != x.dtype.itemsize or not aligned:
            return (
                f"copies rows by tensor maps: the last axis must be contiguous, address and other strides multiples of "
                f"16 bytes above 0; here {x} has strides {x.strides}, at an address {x.pointer % 16} above such a "
                "multiple"
            )
    if cache.shape[1] % KEYS and problem.block_table.shape[1] != 1:
        return f"takes pages of a multiple of {KEYS} tokens, or one page a request; here they have {cache.shape[1]}"
    return ""


def row_stride(q: View) -> int | None:
    """The stride of [B, Q, H, ..] as [B, Q * H, ..] in bytes; None where there is none."""
    _, num_nodes, num_heads, _ = q.shape
    _, of_nodes, of_heads, _ = q.strides
    if num_heads == 1:
        return of_nodes if num_nodes > 1 else ROW_OF_ONE
    return of_heads if num_nodes == 1 or of_nodes == num_heads * of_heads else None


ROW_OF_ONE = 2 * D  # a stride along an axis of length 1, which no copy uses


def query_strides(q: View) -> tuple[int, int]:
    """Of rows and of requests."""
    rows = row_stride(q)
    assert rows is not None
    return rows, q.strides[0] if q.shape[0] > 1 else q.shape[1] * q.shape[2] * rows


def cache_strides(cache: View) -> tuple[int, int]:
    """Of tokens and of pages."""
    num_pages, page_size, _ = cache.shape
    rows = cache.strides[1] if page_size > 1 else ROW_OF_ONE
    return rows, cache.strides[0] if num_pages > 1 else page_size * rows


def require_alone(variant: str, num_splits: int | None, batch_invariant: bool) -> None:
    """Raise ValueError for what this variant has no choice of."""
    if num_splits is not None:
        raise ValueError(f"num_splits is {num_splits}; variant {variant!r} shares all work out evenly and takes None")
    if batch_invariant:
        raise ValueError(f"batch_invariant is True; variant {variant!r} shares all work out evenly and takes False")


# The plan


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """How the work of a step is shared out, on the device: for `verify_attention(..., plan=...)`.

    Made by `plan_attention`. Its contents are for the kernels alone.

    Attributes
    ----------
    batch, num_nodes, num_heads : int
        B, Q, H: the calls that it is for have these.
    max_seqlen : int
        Bound that prefix lengths were clamped to; a cache that it is used with holds as many tokens, and the tree.
    """

    batch: int
    num_nodes: int
    num_heads: int
    max_seqlen: int
    blocks: int = field(repr=False)
    plan: View = field(repr=False)
    pieces: View = field(repr=False)
    items: View = field(repr=False)
    merges: bool = field(default=True, repr=False)  # whether row tiles may be split

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.batch, self.num_nodes, self.num_heads, self.blocks)

    @functools.cached_property
    def facts(self) -> str:
        """All that a call with it depends on, but for its contents; a string, since those remember their hash."""
        views = [(x.device, x.pointer, x.shape, x.strides, x.dtype.str) for x in (self.plan, self.pieces, self.items)]
        return repr((self.sizes, self.max_seqlen, views, self.merges))


def plan_attention(
    cache_seqlens: Any, *, num_nodes: int, num_heads: int, max_seqlen: int, host_lengths: Any = None
) -> AttentionPlan:
    """Share out the work of a step, once for all its layers, for ``verify_attention(..., plan=...)``.

    It is for ``variant="wgmma"``, and for "auto" where that takes it. Without a plan every call makes its own, by one
    more small kernel.

    Parameters
    ----------
    cache_seqlens : int32 [B]
        Prefix length of each request in tokens, as `verify_attention` is given it. Clamped to 0 .. max_seqlen.
    num_nodes, num_heads : int
        Q and H of the calls.
    max_seqlen : int
        Bound on every prefix length. The caches must hold max_seqlen + Q tokens a request.
    host_lengths : int32 [B], optional
        The same lengths in the host's memory, where the caller has them there. Where these say that no row tile need be
        cut, none is, and calls with the plan do without the kernel that merges: 2 to 5 us a call. Lengths that are not
        the same cost balance, never the right result.

    Returns
    -------
    AttentionPlan
        On the device of ``cache_seqlens``. The lengths as they are when the kernel runs are in it: whoever changes
        them makes a new plan.

    Raises
    ------
    TypeError
        ``cache_seqlens`` is no int32 array that kernels take, or a size no integer.
    ValueError
        A wrong shape or size, or a GPU without the instructions of the variant.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream without synchronizing, so it may be captured in a graph, with the calls that
    use it or apart from them.
    """
    lengths = view("cache_seqlens", cache_seqlens)
    require_dtype(lengths, np.int32)
    require_shape(lengths, "[B]", None)
    given = {"num_nodes": num_nodes, "num_heads": num_heads, "max_seqlen": max_seqlen}
    checked = {name: require_integer(name, value) for name, value in given.items()}
    for name, least in (("num_nodes", 1), ("num_heads", 1), ("max_seqlen", 0)):
        if checked[name] < least:
            raise ValueError(f"{name} is {checked[name]}; it must be at least {least}")
    num_nodes, num_heads, max_seqlen = checked.values()
    (batch,) = lengths.shape
    if batch > 65535 or num_nodes > 65535:
        raise ValueError(f"cache_seqlens has B = {batch} and num_nodes is {num_nodes}; both must be at most 65535")
    require("wgmma", _gpu(lengths.device), _counts(batch, num_nodes, num_heads, max_seqlen, lengths.device))
    require_backend()
    sizes = Sizes(batch, num_nodes, num_heads, multiprocessors(lengths.device))
    whole = False
    if host_lengths is not None:
        known = view("host_lengths", host_lengths)
        require_dtype(known, np.int32)
        require_shape(known, "[B]", batch)
        if known.device != HOST:
            raise ValueError(f"host_lengths is on GPU {known.device}; it must be in the host's memory")
        whole = schedule.is_whole(known.as_numpy(), num_nodes, max_seqlen, sizes.row_tiles, sizes.blocks)
    parts = plan_parts(sizes)
    memory = view("plan", empty(lengths, (bytes_of(parts) // 4,), np.dtype(np.int32)))
    found = replace(plan_in(cut(memory, parts), sizes, max_seqlen), merges=not whole)
    make(found, lengths)
    return found


def plan_in(room: dict[str, View], sizes: Sizes, max_seqlen: int) -> AttentionPlan:
    """A plan yet to be made, in these parts of a memory."""
    return AttentionPlan(*sizes[:3], max_seqlen, sizes.blocks, room["plan"], room["pieces"], room["items"])


def make(found: AttentionPlan, lengths: View) -> None:
    """Launch the kernel that fills a plan."""
    if found.batch == 0:
        return
    numbers = (found.num_nodes, found.max_seqlen, found.sizes.row_tiles, found.blocks, not found.merges)
    args = (lengths, *map(np.int32, numbers), found.plan, found.pieces, found.items)
    launch(schedule.plan_blocks, (1, 1, 1), schedule.THREADS, args, results=3, shared_bytes=0)


def require_plan(plan: Any, problem: Problem) -> None:
    """Raise TypeError unless ``plan`` is one, ValueError unless it is for calls of the problem's sizes and device."""
    if not isinstance(plan, AttentionPlan):
        raise TypeError(f"plan is {shown(plan)}; it must be an AttentionPlan (see plan_attention)")
    ours = (problem.batch, problem.num_nodes, problem.num_heads, problem.q_nope.device)
    its = (plan.batch, plan.num_nodes, plan.num_heads, plan.plan.device)
    if its != ours or plan.max_seqlen > problem.max_seqlen:
        here, there = (
            f"B = {sizes[0]}, Q = {sizes[1]}, H = {sizes[2]}, max_seqlen = {most} on "
            + ("the host" if sizes[3] == HOST else f"GPU {sizes[3]}")
            for sizes, most in ((its, plan.max_seqlen), (ours, problem.max_seqlen))
        )
        raise ValueError(f"plan is for {here}; it must be for {there}, with no larger max_seqlen")


# Launches


def check(problem: Problem, num_splits: int | None, batch_invariant: bool, plan: Any) -> None:
    """Raise what a call of the variant must, for checked arguments; nothing has run.

    Raises
    ------
    TypeError
        q and the cache are not both bfloat16 or both float16; the plan is none.
    ValueError
        num_splits or batch_invariant is given, the kernel does not take the arguments, the plan is for other sizes, or
        the workspace is too small.
    """
    require_alone("wgmma", num_splits, batch_invariant)
    require_taken("wgmma", problem, _gpu(problem.q_nope.device), _layouts(problem))
    if plan is not None:
        require_plan(plan, problem)
    require_workspace(problem, bytes_of(parts_of(problem, plan)) // 4)
    require("wgmma", _backend())


def parts_of(problem: Problem, plan: AttentionPlan | None) -> tuple[Part, ...]:
    """The parts of a call's workspace."""
    sizes = sizes_of(problem)
    return state_parts(sizes) + (plan_parts(sizes) if plan is None else ())


def sizes_of(problem: Problem) -> Sizes:
    device = problem.q_nope.device
    return Sizes(problem.batch, problem.num_nodes, problem.num_heads, multiprocessors(device))


def run(problem: Problem, plan: AttentionPlan | None = None) -> None:
    """Launch the kernels; the results are in problem.out and problem.lse once the stream has passed."""
    if problem.batch == 0:
        return
    require_backend()
    if problem.q_nope.device == HOST:
        copies: dict[str, Any] = {
            f.name: copy_in(x) for f in fields(problem) if isinstance(x := getattr(problem, f.name), View)
        }
        if plan is not None:
            plan = replace(plan, plan=copy_in(plan.plan), pieces=copy_in(plan.pieces), items=copy_in(plan.items))
        run(replace(problem, **copies), plan)
        copy_out(problem.out, copies["out"])
        copy_out(problem.lse, copies["lse"])
        return
    from ddtree_numba.attention import wgmma  # compiles for a GPU alone

    sizes, kind = sizes_of(problem), problem.q_nope.kind  # whose stream it is
    memory, parts = problem.workspace, parts_of(problem, plan)
    if memory is None:
        memory = view("workspace", empty(problem.q_nope, (bytes_of(parts) // 4,), np.dtype(np.float32), "workspace"))
    room = cut(replace(memory, kind=kind), parts)
    if plan is None:
        plan = plan_in(room, sizes, problem.max_seqlen)
        make(plan, replace(problem.cache_seqlens, kind=kind))
    out, lse = rows_of(problem.out, 16), rows_of(problem.lse, 4)

    input_kind, out_kind = KINDS[kernel_dtype(problem.q_nope.dtype)], KINDS[kernel_dtype(out.dtype)]
    table, mask = replace(problem.block_table, kind=kind), replace(problem.tree_mask, kind=kind)
    scale = np.float32(problem.sm_scale * LOG2_E)
    numbers = map(np.int32, (problem.kv_cache.shape[1], sizes.num_heads, sizes.num_nodes))
    given = (room["states"], room["beside"], *maps_of(problem), table, mask, *numbers, scale)
    launch(
        wgmma.make_kernel(input_kind, out_kind, problem.bits_per_word == 32),
        (sizes.blocks, 1, 1),
        wgmma.THREADS,
        (*given, NO_CLOCKS, plan.plan, plan.pieces, out, lse),
        results=2,
        shared_bytes=wgmma.SHARED_BYTES,
    )
    if plan.merges and plan.max_seqlen + sizes.num_nodes > KEYS:  # else no row tile is split
        # An item has two states or more, and 32 parts, which eight warps each may share.
        blocks = min(sizes.slots // 2 * 32, sizes.blocks * wgmma.COMBINE_BLOCKS)
        states = (replace(plan.plan, kind=kind), plan.items, room["states"], room["beside"])
        launch(
            wgmma.make_combine(out_kind),
            (blocks, 1, 1),
            wgmma.COMBINE_THREADS,
            (*states, out, lse, np.int32(sizes.num_rows)),
            results=0,
            shared_bytes=0,
            overlap=True,
        )
    for rows, target in ((out, problem.out), (lse, problem.lse)):
        if rows.pointer != target.pointer:
            spread(replace(rows, kind=kind), target)


def rows_of(target: View, alignment: int) -> View:
    """A result as [B, Q * H, ...] in C order: the caller's memory, or, for other strides or addresses, a new array."""
    batch, num_nodes, num_heads, *columns = target.shape
    shape = (batch, num_nodes * num_heads, *columns)
    if not (target.in_c_order and target.pointer % alignment == 0):
        target = view(target.name, empty(target, shape, target.dtype))
    return replace(target, shape=shape, strides=contiguous_strides(shape, target.dtype.itemsize))


def spread(rows: View, target: View) -> None:
    """Launch the copy of [B, Q * H, ...] in C order to a caller's [B, Q, H, ...] of any strides."""
    if len(target.shape) == 3:
        rows = replace(rows, shape=(*rows.shape, 1), strides=(*rows.strides, rows.dtype.itemsize))
        target = replace(target, shape=(*target.shape, 1), strides=(*target.strides, target.dtype.itemsize))
    blocks = (-(-math.prod(rows.shape) // (4 * COPY_THREADS)), 1, 1)
    launch(copy_rows, blocks, COPY_THREADS, (rows, target), results=1, shared_bytes=0)


@cuda.jit
def copy_rows(rows, target):
    """Elements of rows [B, Q * H, n] to target [B, Q, H, n], four or so a thread."""
    batch, num_nodes, num_heads, columns = target.shape
    n = cuda.grid(1)
    while n < batch * num_nodes * num_heads * columns:
        row, d = n // columns, n % columns
        node, h = row // num_heads, row % num_heads
        b, i = node // num_nodes, node % num_nodes
        target[b, i, h, d] = rows[b, i * num_heads + h, d]
        n += cuda.gridsize(1)


# Tensor maps


def maps_of(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """The tensor maps of q_nope, q_pe and the cache."""
    kind = KINDS[kernel_dtype(problem.q_nope.dtype)]
    queries = [
        tensor_map(x.pointer, (x.shape[3], x.shape[1] * x.shape[2], x.shape[0]), query_strides(x), kind)
        for x in (problem.q_nope, problem.q_pe)
    ]
    cache = problem.kv_cache
    num_pages, page_size, _ = cache.shape
    return (*queries, tensor_map(cache.pointer, (D, page_size, num_pages), cache_strides(cache), kind))


@functools.lru_cache(maxsize=4096)
def tensor_map(pointer: int, shape: tuple[int, int, int], strides: tuple[int, int], kind: str) -> tuple[int, ...]:
    """A tensor map of [pages, rows, columns] as 16 int64, boxes of 64 x 64, 128-byte swizzle, zeros outside.

    Parameters
    ----------
    pointer : int
    shape : tuple of int
        Columns, rows, pages.
    strides : tuple of int
        Of rows and of pages, in bytes.
    kind : str
        "bf16" or "f16".

    Notes
    -----
    It is made on the host alone, from these numbers, so it is remembered: layers come again with every step.
    """
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    name = {"bf16": "BFLOAT16", "f16": "FLOAT16"}[kind]
    status, found = driver.cuTensorMapEncodeTiled(
        getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_{name}"),
        3,
        pointer,
        [driver.cuuint64_t(n) for n in shape],
        [driver.cuuint64_t(s) for s in strides],
        [driver.cuuint32_t(n) for n in (64, 64, 1)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver refused a tensor map of shape {shape} and strides {strides} ({status.name})")
    return tuple(int(x) for x in np.frombuffer(ctypes.string_at(found.getPtr(), 128), np.int64))


# The mirror


def run_mirror(problem: Problem, num_splits: int | None, batch_invariant: bool) -> None:
    """Run the mirror on host arrays, as on a GPU of as many multiprocessors as there are here, or three.

    Raises
    ------
    TypeError, ValueError
        The arguments lie on a GPU, or are not those of the variant, whatever their layout.
    """
    require_alone("wgmma_numpy", num_splits, batch_invariant)
    require_taken("wgmma_numpy", problem)
    if problem.q_nope.device != HOST:
        raise ValueError(f"variant 'wgmma_numpy' works on host arrays; {problem.q_nope} is on a GPU")
    if problem.batch == 0:
        return
    given = (problem.q_nope, problem.q_pe, problem.kv_cache, problem.block_table, problem.cache_seqlens)
    args: list[Any] = [multiprocessors(HOST), *(x.as_numpy() for x in (*given, problem.tree_mask))]
    args += [problem.bits_per_word, np.float32(problem.sm_scale * LOG2_E), problem.max_seqlen]
    args += [problem.out.as_numpy(), problem.lse.as_numpy()]
    mirror(*args)


def mirror(
    blocks,
    q_nope,
    q_pe,
    kv_cache,
    block_table,
    cache_seqlens,
    tree_mask,
    bits_per_word,
    scale_log2,
    max_seqlen,
    out,
    lse,
):
    """`plan_blocks`, `wgmma` and `combine` in NumPy: the same pieces, references and roundings.

    Its sums of products are in the order of ptx.py's twins, and the states of a row tile are merged three by three
    from the first on: a GPU adds in orders of its own.
    """
    _, num_nodes, num_heads, _ = q_nope.shape
    num_pages, page_size, _ = kv_cache.shape
    num_rows = num_nodes * num_heads
    row_tiles = -(-num_rows // ROWS)

    def write(b, rows, values, lses):
        i, h = rows // num_heads, rows % num_heads
        out[b, i, h] = array_from_f32(values, out.dtype)
        lse[b, i, h] = lses

    states: dict[tuple[int, int], list[Any]] = {}
    for pieces in schedule.mirror(cache_seqlens, num_nodes, max_seqlen, row_tiles, blocks):
        for b, row_tile, first, count, slot, prefix in pieces:
            rows = np.arange(row_tile * ROWS, min(row_tile * ROWS + ROWS, num_rows))
            i, h = rows // num_heads, rows % num_heads
            q_tile = array_to_f32(np.concatenate([q_nope[b, i, h], q_pe[b, i, h]], axis=1))
            stop = prefix + num_nodes
            ref, l = np.full(len(rows), LOWEST), np.zeros(len(rows), np.float32)
            acc = np.zeros((len(rows), R), np.float32)
            for tile in range(first, first + count):
                # Phase 1: the key tile; rows behind the last key are zeros, since 0 * NaN would be NaN
                key = tile * KEYS + np.arange(KEYS)
                live = np.minimum(key, stop - 1)
                page = block_table[b, live // page_size]
                inside = (page >= 0) & (page < num_pages) & (key < stop)
                row = array_to_f32(kv_cache[np.where(inside, page, 0), live % page_size])
                row[~inside] = 0

                # Phase 2: scores, in units of log2 once scaled
                s = multiplied(q_tile, row.T, np.zeros((len(rows), KEYS), np.float32))
                j = np.clip(key - prefix, 0, num_nodes - 1)
                seen = (tree_mask[b, i][:, j // bits_per_word] >> (j % bits_per_word)) & 1 == 1
                s = np.where((key < prefix) | seen & (key < stop), s, NEG_INF)

                # The reference, which moves for the rows of a warp once one of them needs it
                m = np.fmax.reduce(s, axis=1) * scale_log2
                needed = np.add.reduceat(m > ref + SLACK, np.arange(0, len(rows), WARP_ROWS)) > 0
                moved = np.where(np.repeat(needed, WARP_ROWS)[: len(rows)], np.fmax(ref, m), ref)
                factor = np.exp2(ref - moved)
                ref = moved

                # Phase 3: probabilities, rounded for values, as they are for their sum
                p = np.exp2(s * scale_log2 - ref[:, None])
                l = l * factor + p.sum(axis=1)
                acc = multiplied(array_to_f32(array_from_f32(p, kv_cache.dtype)), row[:, :R], acc * factor[:, None])
            # Phase 4: the result, or a state
            state = state_of(ref, l, acc)
            if slot < 0:
                write(b, rows, *state)
            else:
                states.setdefault((b, row_tile), []).append((first, kept(state[0]), state[1]))
    for (b, row_tile), found in states.items():
        rows = np.arange(row_tile * ROWS, min(row_tile * ROWS + ROWS, num_rows))
        write(b, rows, *merged([state for _, *state in sorted(found, key=lambda state: state[0])]))


def state_of(ref, l, acc):
    """Values and lse, in nats, of sums relative to a reference; zeros where nothing was seen."""
    nothing = l == ZERO
    one = np.where(nothing, np.float32(1.0), l)
    values = np.where(nothing[:, None], ZERO, acc * (np.float32(1.0) / one)[:, None])
    return values, np.where(nothing, NEG_INF, (ref + np.log2(one)) * LN_2)


def kept(values):
    """A state's values as its memory has them: float16, relative to the largest magnitude of a row's half."""
    halves = values.reshape(len(values), 2, R // 2)
    most = np.maximum(np.fmax.reduce(np.abs(halves), axis=2, keepdims=True), TINY)
    return ((halves * (np.float32(1.0) / most)).astype(np.float16).astype(np.float32) * most).reshape(values.shape)


def merged(states):
    """Of the states of one row tile: their mean by weights exp(lse), and its lse."""
    m, l, x = LOWEST, ZERO, ZERO
    for first in range(0, len(states), 3):
        some = states[first : first + 3]
        most = functools.reduce(np.maximum, [e for _, e in some], m)
        scale = np.exp(m - most)
        m, l, x = most, l * scale, x * np.asarray(scale)[..., None]
        for values, e in some:
            weight = np.exp(e - most)
            l, x = l + weight, x + weight[:, None] * values
    nothing = l == ZERO
    one = np.where(nothing, np.float32(1.0), l)
    values = np.where(nothing[:, None], ZERO, x * (np.float32(1.0) / one)[:, None])
    return values, np.where(nothing, NEG_INF, m + np.log(one))
