"""compact_kv: the cache rows of the accepted nodes move next to the prefix; and the same for rows of any other array.

A forward pass over the tree leaves the KV row of node i behind the prefix, at ``cache_seqlens[b] + i``. Of the accepted
nodes n[0] < n[1] < .. the next step needs the rows as part of the prefix::

    row[len + k] = row[len + n[k]]    for k < num_accepted;    then len += num_accepted

In place, and in parallel: n[k] >= k, so the target of a move is never the source of a later one. A block moves the rows
of one request, layer after layer, in tiles of ROWS moves, rising in k, each by LANES threads; of UNROLL words for each
thread all are read before one is written, with a barrier between the two. A word read late has never been written over:
what was written before stands in rows up to k, and its own source is n[j] >= j >= k, and equal only where a row would
move onto itself. Moves with n[k] < k are no outcome of a walk, and left out.

- Phase 1: where the tile's rows are, and where they go, one thread a move. What is no row of the cache is left out.
- Phase 2: in every layer words are read, as many as fit, then written.

A block waits three times, one load behind the other, before it knows its rows, and the layers share that: a request has
only as many blocks as it takes to fill the GPU, and each takes every so many-th layer.

A second kernel adds to the lengths, once all moves have ended. Contiguous caches are paged ones with a page for each
request.

Cost: each row that moves is read and written once, and nothing else. All layers are moved by one launch: addresses of
layers of one layout differ by a constant each, which are on the device from the first call on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.accept.accepted import INT32, Accepted
from ddtree_numba.device import arrays, runtime
from ddtree_numba.device.arrays import HOST, View
from ddtree_numba.device.launch import copy_in, copy_out, jit, launch, multiprocessors
from ddtree_numba.device.runtime import require_backend

THREADS = 8 if runtime.SIMULATOR else 256
LAUNCH_BOUNDS = (THREADS, 5)
LANES = 2 if runtime.SIMULATOR else 32
ROWS = THREADS // LANES  # that move at once
UNROLL = 5  # words of a thread on their way: 1,280 bytes of a row
BLOCKS = 8  # of a multiprocessor that keep its memory busy
LARGEST_INT32 = 2**31 - 1
WORDS = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}


def mirror(cache, offsets, row_words, block_table, cache_seqlens, nodes, num_accepted):
    """The kernel in NumPy: the same phases. Arguments as the kernel's, on the host."""
    for b in range(cache_seqlens.size):
        count = min(num_accepted[b], nodes.shape[1]) if cache_seqlens[b] >= 0 else 0
        for first in range(0, count, ROWS):
            # Phase 1: where rows are and where they go
            moves = []
            for k in range(first, min(first + ROWS, count)):
                if nodes[b, k] > k:
                    source = mirror_place(cache, block_table, b, int(cache_seqlens[b]) + int(nodes[b, k]))
                    target = mirror_place(cache, block_table, b, int(cache_seqlens[b]) + k)
                    if source and target:
                        moves.append((source, target))

            # Phase 2: words are read, then written
            for offset in offsets:
                columns = slice(offset, offset + row_words)
                words = [cache[(*source, columns)].copy() for source, _ in moves]
                for (_, target), row in zip(moves, words, strict=True):
                    cache[(*target, columns)] = row


def mirror_place(cache, block_table, b, row):
    """Page of a request's row and its place there, or None."""
    page, slot = divmod(row, cache.shape[1])
    if row < 0 or page >= block_table.shape[1] or not 0 <= block_table[b, page] < cache.shape[0]:
        return None
    return block_table[b, page], slot


@cuda.jit(device=True, inline="always")
def page_of(block_table, b, row, num_pages, page_size):
    """The page that holds a request's row, or -1."""
    page = row // page_size
    if page >= block_table.shape[1]:
        return -1
    entry = block_table[b, page]
    return entry if 0 <= entry < num_pages else -1


@cuda.jit(device=True, inline="always")
def word_at(row, w, end):
    """Word w of a row, or 0 from ``end`` on."""
    word = row.dtype.type(0)
    if w < end:
        word = row[w]
    return word


@cuda.jit(device=True, inline="always")
def put(row, w, end, word):
    """The reverse."""
    if w < end:
        row[w] = word


@jit(launch_bounds=LAUNCH_BOUNDS)
def kernel(block_table, cache_seqlens, nodes, num_accepted, offsets, row_words, cache):
    """Block (x, y) moves the rows of request x in layers y, y + gridDim.y, ..

    ``cache`` [num_pages, page_size, words] is the layer at the lowest address; the row of layer l begins at word
    ``offsets[l]`` of that row, far behind its own ``row_words``.
    """
    b = cuda.blockIdx.x  # gpu: the grid is the mirror's loop over b
    k = cuda.threadIdx.x // LANES  # gpu: the thread's move in a tile
    lane = cuda.threadIdx.x % LANES  # gpu: it takes words lane, lane + LANES, .. of the row
    pages = cuda.shared.array((2, ROWS), types.int32)  # gpu: of source and target; source -1 where nothing moves
    slots = cuda.shared.array((2, ROWS), types.int32)  # gpu: likewise
    num_pages = cache.shape[0]
    page_size = cache.shape[1]
    length = np.int64(cache_seqlens[b])
    count = min(num_accepted[b], nodes.shape[1])
    if length < 0:
        count = 0
    first = 0
    while first < count:
        # Phase 1: where rows are and where they go
        if lane == 0:
            pages[0, k] = -1
            if first + k < count:
                node = nodes[b, first + k]
                if node > first + k:
                    source = length + node
                    target = length + first + k
                    pages[1, k] = page_of(block_table, b, target, num_pages, page_size)
                    if pages[1, k] >= 0:
                        pages[0, k] = page_of(block_table, b, source, num_pages, page_size)
                    slots[0, k] = source % page_size
                    slots[1, k] = target % page_size
        cuda.syncthreads()  # gpu: all moves are known

        # Phase 2: words are read, then written
        moves = pages[0, k] >= 0
        source_row = cache[max(pages[0, k], 0), slots[0, k] if moves else 0]
        target_row = cache[pages[1, k] if moves else 0, slots[1, k] if moves else 0]
        layer = cuda.blockIdx.y  # gpu: blocks share the layers
        while layer < offsets.shape[0]:
            start = 0
            while start < row_words:
                w = offsets[layer] + start + lane
                end = offsets[layer] + (row_words if moves else 0)
                word_0 = word_at(source_row, w, end)
                word_1 = word_at(source_row, w + LANES, end)
                word_2 = word_at(source_row, w + 2 * LANES, end)
                word_3 = word_at(source_row, w + 3 * LANES, end)
                word_4 = word_at(source_row, w + 4 * LANES, end)
                cuda.syncthreads()  # gpu: all have read
                put(target_row, w, end, word_0)
                put(target_row, w + LANES, end, word_1)
                put(target_row, w + 2 * LANES, end, word_2)
                put(target_row, w + 3 * LANES, end, word_3)
                put(target_row, w + 4 * LANES, end, word_4)
                start += UNROLL * LANES
            layer += cuda.gridDim.y  # gpu: as above
        cuda.syncthreads()  # gpu: the list of moves may change
        first += ROWS


@cuda.jit
def advance_kernel(num_accepted, most, capacity, cache_seqlens):
    """A thread a request: the accepted rows are part of the prefix now, if they lie inside the cache."""
    b = cuda.grid(1)
    if b < cache_seqlens.size:
        length = cache_seqlens[b]
        count = min(num_accepted[b], most)
        if count > 0 and 0 <= length <= capacity - count:
            cache_seqlens[b] = length + count


@cuda.jit
def gather_kernel(nodes, num_accepted, x, out):
    """One block copies row k of request b; all words."""
    b = cuda.blockIdx.x // nodes.shape[1]
    k = cuda.blockIdx.x % nodes.shape[1]
    node = nodes[b, k]
    there = k < num_accepted[b] and 0 <= node < x.shape[1]
    w = cuda.threadIdx.x
    while w < x.shape[2]:
        word = x.dtype.type(0)
        if there:
            word = x[b, node, w]
        out[b, k, w] = word
        w += THREADS


def bytes_moved(num_moves: int, layers: int, row_bytes: int) -> int:
    """Bytes that `compact_kv` must move: each row that moves, of all requests, in every layer, read and written."""
    return 2 * num_moves * layers * row_bytes


def compact_kv(kv_caches: Any, cache_seqlens: Any, accepted: Accepted, *, block_table: Any = None) -> Any:
    """Move the cache rows of the accepted nodes next to the prefix, in place, and add them to the prefix.

    Parameters
    ----------
    kv_caches : array or sequence of arrays
        One layer's cache or all layers', written to. Contiguous [B, S, ...], or with ``block_table`` paged
        [num_pages, page_size, ...]. Any dtype; the axes of a row follow each other as in C, others have any strides.
        Layers may differ in the size of a row, and must not overlap.
    cache_seqlens : int32 [B]
        Prefix of each request before the step, in tokens; written to. The row of node i is row
        ``cache_seqlens[b] + i`` of the request.
    accepted : Accepted
        From `accept_greedy` or `accept_sampled`; ``nodes`` and ``num_accepted`` are read.
    block_table : int32 [B, max_pages], optional
        Page of rows n * page_size .. of each request.

    Returns
    -------
    array
        ``cache_seqlens`` itself, ``num_accepted`` larger.

    Raises
    ------
    TypeError
        An argument is no array that kernels take, or has the wrong dtype; ``accepted`` is no Accepted.
    ValueError
        A wrong shape or device; no cache at all, or one twice; caches that overlap each other or the other arrays, or
        are read-only; a row whose axes do not follow each other.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream without synchronizing, except for NumPy arrays, which are copied to the device
    and back. The layers' addresses are copied to the device at the first call and kept for the life of the process, 8
    bytes a layer; later calls for the same layers allocate nothing, so they can be captured in a CUDA graph.

    Contents that lead outside (a negative length, rows behind the cache, a table entry that is no page) leave those
    moves out, and a length that would leave the cache as it is.
    """
    lengths = lengths_argument(cache_seqlens)
    moves = moves_of(kv_caches, lengths, accepted, block_table)
    arrays.require_apart(lengths, [moves.nodes, moves.counts, moves.table])
    run(moves)
    if lengths.shape[0]:
        counts = replace(moves.counts, kind=lengths.kind)  # one stream for both launches
        args = (counts, np.int32(moves.nodes.shape[1]), np.int32(moves.capacity), lengths)
        launch(advance_kernel, (-(-lengths.shape[0] // THREADS), 1, 1), THREADS, args, results=1, shared_bytes=0)
    return cache_seqlens


class Moves(NamedTuple):
    """What `run` moves: checked arguments of one place, and the rows that each request has room for."""

    caches: list[View]
    lengths: View
    nodes: View
    counts: View
    table: View
    capacity: int


def lengths_argument(cache_seqlens: Any) -> View:
    """The lengths, checked.

    Raises
    ------
    TypeError, ValueError
        They are no int32 [B].
    """
    found = arrays.view("cache_seqlens", cache_seqlens)
    arrays.require_dtype(found, INT32)
    arrays.require_shape(found, "[B]", None)
    return found


def moves_of(kv_caches: Any, lengths: View, accepted: Accepted, block_table: Any, others: Sequence[View] = ()) -> Moves:
    """Check the arguments of `compact_kv`, and that no cache shares memory with ``others``.

    Raises
    ------
    TypeError, ValueError
        As there.
    """
    layers = list(kv_caches) if isinstance(kv_caches, (list, tuple)) else [kv_caches]
    caches = [arrays.view(f"kv_caches[{n}]" if len(layers) > 1 else "kv_caches", x) for n, x in enumerate(layers)]
    if not caches:
        raise ValueError("kv_caches has no layers; there must be at least 1")
    batch = lengths.shape[0]
    nodes, counts = path_arguments(accepted, batch)
    if block_table is None:
        table = arrays.constant(lengths.device, arrays.one_page_each, batch)
    else:
        table = arrays.view("block_table", block_table)
        arrays.require_dtype(table, INT32)
        arrays.require_shape(table, "[B, max_pages]", batch, None)
    small = [lengths, nodes, counts, table]
    arrays.require_one_place([*caches, *small])
    layouts = {(cache.shape, cache.strides, cache.dtype): cache for cache in caches}.values()
    for cache in layouts:
        if len(cache.shape) < 2 or (block_table is None and cache.shape[0] != batch):
            axes = f"[B, S, ...] with B = {batch}" if block_table is None else "[num_pages, page_size, ...]"
            raise ValueError(f"{cache.name} has shape {list(cache.shape)}; it must be {axes}")
        if 0 in cache.shape[2:]:
            raise ValueError(f"{cache} has rows of no elements")
        if cache.shape[:2] != caches[0].shape[:2]:
            raise ValueError(f"{cache} and {caches[0]} differ in their first two axes; all layers must have the same")
        arrays.require_apart(cache, [*small, *others])
        in_rows(cache)
    taken = [x.extent() for x in (*small, *others)]
    for cache in caches:
        low, high = cache.extent()
        if cache.read_only or any(low < end and start < high for start, end in taken):
            arrays.require_apart(cache, [*small, *others])
    if 0 not in caches[0].shape and len({cache.pointer for cache in caches}) < len(caches):
        raise ValueError("kv_caches has the same cache twice; its rows would move twice")
    places = tuple((cache.pointer, cache.shape, cache.strides, cache.dtype.itemsize) for cache in caches)
    if meeting := arrays.first_overlap(places):
        one, other = (caches[n].name for n in meeting)
        raise ValueError(f"{other} overlaps {one} in memory; each layer needs memory of its own")
    capacity = min(table.shape[1] * caches[0].shape[1], LARGEST_INT32)
    return Moves(caches, lengths, nodes, counts, table, capacity)


def run(moves: Moves) -> None:
    """Move the rows; the lengths stay as they are."""
    caches, *small, _ = moves
    if 0 in caches[0].shape or 0 in small[0].shape:
        return
    require_backend()
    if caches[0].device == HOST and not runtime.SIMULATOR:
        on_device = [copy_in(x) for x in small]
        for home in map(in_rows, caches):
            copy = copy_in(home)
            move([copy], *on_device)
            copy_out(home, copy)
    else:
        move(caches, *small)


def path_arguments(accepted: Any, batch: int) -> tuple[View, View]:
    """The accepted nodes and how many they are, checked.

    Raises
    ------
    TypeError, ValueError
        ``accepted`` is no Accepted, or one of the two is wrong.
    """
    if not isinstance(accepted, Accepted):
        raise TypeError(f"accepted is a {type(accepted).__qualname__}; it must be an Accepted")
    nodes = arrays.view("accepted.nodes", accepted.nodes)
    counts = arrays.view("accepted.num_accepted", accepted.num_accepted)
    arrays.require_dtype(nodes, INT32)
    arrays.require_shape(nodes, "[B, max_depth + 1]", batch, None)
    arrays.require_dtype(counts, INT32)
    arrays.require_shape(counts, "[B]", batch)
    arrays.require_one_place([nodes, counts])
    return nodes, counts


def in_rows(x: View) -> View:
    """An array [n, m, ...] as [n, m, bytes] of uint8.

    Raises
    ------
    ValueError
        The elements of a row do not follow each other as in C.
    """
    size = math.prod(x.shape[2:]) * x.dtype.itemsize
    row = replace(x, shape=x.shape[2:], strides=x.strides[2:])
    if 0 not in x.shape and not row.in_c_order:
        raise ValueError(f"{x} has strides {x.strides}; the axes behind the second must follow each other as in C")
    shape, strides = (*x.shape[:2], size), (*x.strides[:2], 1)
    return replace(x, shape=shape, strides=strides, dtype=np.dtype(np.uint8))


def as_words(rows: View, size: int) -> View:
    """Rows of bytes as rows of words of ``size`` bytes."""
    shape, strides = (*rows.shape[:2], rows.shape[2] // size), (*rows.strides[:2], size)
    return replace(rows, shape=shape, strides=strides, dtype=np.dtype(WORDS[size]))


def word_size(rows: View, *pointers: int) -> int:
    """Bytes of the largest word that rows can be read in, at all these addresses."""
    return math.gcd(8, rows.shape[2], *rows.strides[:2], *pointers)


def move(caches: list[View], lengths: View, nodes: View, counts: View, table: View) -> None:
    """Launch the kernel on checked arguments of one place; once for all layers of one layout."""
    layouts: dict[tuple[Any, ...], list[View]] = {}
    for x in caches:
        layouts.setdefault((x.shape, x.strides, x.dtype), []).append(x)
    for layers in layouts.values():
        first = min(layers, key=lambda x: x.pointer)
        rows = in_rows(first)
        size = word_size(rows, *(x.pointer for x in layers))
        cache = as_words(rows, size)
        words = cache.shape[2]
        numbers = [(x.pointer - first.pointer) // size for x in layers]
        offsets = arrays.constant(lengths.device, _offsets, *numbers)
        cache = replace(cache, shape=(*cache.shape[:2], words + max(numbers)))
        args = (replace(table, kind=lengths.kind), lengths, nodes, counts, offsets, np.int32(words), cache)
        batch = lengths.shape[0]
        blocks = min(len(layers), -(-BLOCKS * multiprocessors(lengths.device) // batch))
        launch(kernel, (batch, blocks, 1), THREADS, args, results=1, shared_bytes=0)


def _offsets(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def gathered_bytes(num_accepted: int, num_rows: int, row_bytes: int) -> int:
    """Bytes that `gather_accepted` must move: accepted rows of all requests read; all rows of the result written."""
    return (num_accepted + num_rows) * row_bytes


def gather_accepted(x: Any, accepted: Accepted, *, out: Any = None) -> Any:
    """The rows of the accepted nodes, one behind the other: hidden states for the next draft, for example.

    Parameters
    ----------
    x : array [B, Q, ...]
        A row for each node. Any dtype; the axes of a row follow each other as in C, others have any strides.
    accepted : Accepted
        From `accept_greedy` or `accept_sampled`; ``nodes`` and ``num_accepted`` are read.
    out : array [B, max_depth + 1, ...], optional
        Of the dtype of ``x``; written to in place of a new array.

    Returns
    -------
    array [B, max_depth + 1, ...]
        Row k is ``x[b, nodes[b, k]]``, and zeros from ``num_accepted[b]`` on, or where the node is none of ``x``.

    Raises
    ------
    TypeError
        An argument is no array that kernels take, or has the wrong dtype; ``accepted`` is no Accepted.
    ValueError
        A wrong shape or device; a row whose axes do not follow each other; an output that overlaps an input.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream without synchronizing, except for NumPy arrays, which are copied to the device
    and back. With ``out``, nothing is allocated, so a call can be captured in a CUDA graph.
    """
    given = arrays.view("x", x)
    if len(given.shape) < 2:
        raise ValueError(f"{given.name} has shape {list(given.shape)}; it must be [B, Q, ...]")
    nodes, counts = path_arguments(accepted, given.shape[0])
    shape = (*nodes.shape, *given.shape[2:])
    if out is None:
        out = arrays.empty(given, shape, given.dtype)
    found = arrays.view("out", out)
    arrays.require_dtype(found, given.dtype, *([np.uint16] if given.dtype == arrays.BFLOAT16 else []))
    arrays.require_shape(found, "[B, max_depth + 1, ...]", *shape)
    arrays.require_one_place([given, nodes, counts, found])
    arrays.require_apart(found, [given, nodes, counts])
    if math.prod(nodes.shape) >= 2**31:
        raise ValueError(f"{nodes} has {math.prod(nodes.shape)} elements; they must be less than 2**31")
    if 0 not in shape:
        pair = [in_rows(given), in_rows(found)]
        size = math.gcd(*(word_size(rows, rows.pointer) for rows in pair))
        args = (replace(nodes, kind=given.kind), counts, *(as_words(rows, size) for rows in pair))
        launch(gather_kernel, (math.prod(nodes.shape), 1, 1), THREADS, args, results=1, shared_bytes=0)
    return out
