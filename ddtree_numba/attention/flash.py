"""Variant `flash`: tree-verify MLA attention in tiles, online softmax, keys split over the whole GPU.

The rows of a request are its (node, head) pairs, node by node. A block takes a tile of rows and walks over a run of key
tiles. Each key tile is staged once in shared memory for all rows, and what was seen so far is kept as
(m_i, l_i, acc)::

    s[k]  = (q . row[k, :]) * sm_scale              for the keys k of this tile
    m     = max(m_i, max_k s[k])
    p[k]  = exp(s[k] - m)
    l_i   = l_i * exp(m_i - m) + sum_k p[k]
    acc   = acc * exp(m_i - m) + sum_k p[k] * row[k, :R]
    m_i   = m

and at the end ``out = acc / l_i``, ``lse = m_i + log(l_i)``.

- Phase 1: the key tile goes from registers, where it was loaded ahead, to shared memory.
- Phase 2: scores. A thread holds a small tile of them. The eight lanes of a group take every eighth run of four columns
  each, and their sums are added up as a tree: the chains of additions are D / 8 long.
- Phase 3: online softmax, a few lanes a row. Only a tile that reaches past the prefix looks at the mask. l_i is kept
  in two numbers, so that no addition to it loses anything.
- Phase 4: values. A thread holds the accumulators of its rows and columns in registers, and adds the sums over a key
  tile to them, four columns at a time. Half of the next key tile is loaded meanwhile.
- Phase 5: after FOLD key tiles the accumulators are added to a sum in global memory and begin anew. So no sum is long,
  and rounding errors hardly grow with the number of keys.

Work is counted in pairs of a row tile and a key tile, in the order (request, row tile, key tile), and block n of N
takes the n-th part of all pairs: as even as it gets, however different the lengths. A row tile that ends up in several
blocks is left by each as a partial state in the workspace, and `combine` merges them in the order of the keys. With
``num_splits`` each row tile is cut into as many even parts, with ``batch_invariant`` into parts of CHUNK keys; then a
row's bits depend on its own request alone. No block waits for another and nothing is atomic.

Cost: 2 n (D + R) FLOPs for a row that sees n keys. Each key tile is read once by each row tile, from L2 for the most
part: D / (D + R) / rows of a tile bytes a FLOP.

Source: online softmax (Milakov and Gimelshein, arXiv 1805.02867), FlashAttention-2 (arXiv 2307.08691); even parts of
all tiles: stream-K (arXiv 2301.03598); absorbed MLA: DeepSeek-V2 (arXiv 2405.04434).
"""

from __future__ import annotations

import functools
import math
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.attention.problem import Problem
from ddtree_numba.attention.three_phase import locate, sees
from ddtree_numba.device import runtime
from ddtree_numba.device.arrays import HOST, View, empty, view
from ddtree_numba.device.bf16 import array_from_f32, array_to_f32, from_f32
from ddtree_numba.device.launch import (
    compute_capability,
    copy_in,
    copy_out,
    device_name,
    jit,
    launch,
    multiprocessors,
    shared_bytes_limit,
)
from ddtree_numba.device.runtime import require_backend
from ddtree_numba.device.tiles import (
    fill,
    load4,
    load_words,
    multiply_add,
    scale_and_add,
    store4,
    store_words,
    sum_over_groups,
)
from ddtree_numba.device.warp import fresh_thread, shuffle_xor, warp_sync

ALL, TREE, PREFIX = 0, 1, 2  # parts of a request's keys
FOLD = 16  # key tiles
LEAST_WORK = 6  # pairs of LARGE tiles a multiprocessor; with less, SMALL spreads it better
CHUNK = 2048  # keys of a part with batch_invariant
GROUPS = 8  # of lanes: each has its share of a score's columns
COMBINE_ROWS = 8  # of a block

ZERO = np.float32(0.0)  # a literal 0.0 would be float64 on the GPU
NEG_INF = np.float32(-np.inf)
ONE = np.float32(1.0)
NO_BITS = np.uint32(0)
SMALLEST = np.uint32(1)  # of divisors: no branch is made for a division by zero


class Tiles(NamedTuple):
    """Sizes of a block's work. Rows and keys: multiples of what the warps cover."""

    rows: int
    keys: int
    warps: int
    score_rows: int  # a thread holds score_rows * score_keys scores
    score_keys: int
    value_rows: int  # and accumulators of as many rows
    max_rank: int  # largest kv_lora_rank: 128 accumulators a thread
    blocks: int  # a multiprocessor must hold


LARGE = Tiles(rows=64, keys=32, warps=8, score_rows=8, score_keys=4, value_rows=8, max_rank=512, blocks=1)
SMALL = Tiles(rows=16, keys=16, warps=4, score_rows=4, score_keys=4, value_rows=4, max_rank=1024, blocks=2)
# Python threads are dear in the simulator, and have no registers.
TINY = Tiles(rows=16, keys=16, warps=1, score_rows=8, score_keys=8, value_rows=4, max_rank=1024, blocks=1)
TILES = (TINY,) if runtime.SIMULATOR else (LARGE, SMALL)


class Tuned(NamedTuple):
    """What was found fastest on one GPU, in place of the built-in choice."""

    few_keys: int  # up to which three_phase is taken
    large: Tiles
    large_waves: int  # blocks of the grid, in units of what the GPU holds at a time
    small: Tiles
    small_waves: int


def padded(head_dim: int) -> int:
    """Columns of a row in shared memory: each group has as many."""
    return -(-head_dim // (4 * GROUPS)) * 4 * GROUPS


def shared_bytes(tiles: Tiles, head_dim: int) -> int:
    """Dynamic shared memory of a block in bytes: key tile, query tile, weights, five numbers a row, twelve more."""
    pitch = tiles.rows + 8
    return 4 * ((tiles.keys + tiles.rows) * padded(head_dim) + tiles.keys * pitch + 5 * tiles.rows + 12)


def unfit(tiles: Tiles) -> str:
    """Which rule of the kernel these sizes break; "" for those that a kernel can have."""
    M, N, W, SR, SK, TR = tiles[:6]
    if min(tiles) < 1:
        return "all sizes are at least 1"
    warp_rows, score_warps, value_warps = (max(n, 1) for n in (M // W, M // (2 * SR), M // (4 * TR)))
    pass_keys = max(W // score_warps, 1) * 2 * SK  # that all warps have scores of at a time
    rules = {
        "warps are 1, 2, 4, 8 or 16": W in (1, 2, 4, 8, 16),
        "rows are a multiple of 8, and at most a thread each": M % COMBINE_ROWS == 0 and M <= 32 * W,
        "a warp has 1, 2, 4, 8, 16 or 32 rows": warp_rows * W == M and warp_rows in (1, 2, 4, 8, 16, 32),
        "keys are 16 or 32, as the error bound has it": N in (16, 32),
        "half warps stage as many keys each": N % (2 * W) == 0,
        "the lanes of a row have as many keys each": N * warp_rows % 32 == 0,
        "8, 16, 32 or 64 scores a thread": SR * SK in (8, 16, 32, 64),
        "warps cover the scores": score_warps * 2 * SR == M and W % score_warps == 0 and N % pass_keys == 0,
        "value_rows are 4 or 8": TR in (4, 8),
        "warps cover the values": value_warps * 4 * TR == M and W % value_warps == 0,
        "at most 1,024 threads in the blocks that a multiprocessor must hold": 32 * W * tiles.blocks <= 1024,
    }
    return next((rule for rule, kept in rules.items() if not kept), "")


class Shape(NamedTuple):
    """What a kernel is made for."""

    tiles: Tiles
    kv_lora_rank: int
    head_dim: int
    wide: int  # 1: four elements of q and of the cache may be read at once


def mirror(
    tiles,
    num_blocks,
    q_nope,
    q_pe,
    kv_cache,
    block_table,
    cache_seqlens,
    tree_mask,
    bits_per_word,
    sm_scale,
    max_seqlen,
    part,
    num_splits,
    part_tiles,
    out,
    lse,
):
    """Both kernels in NumPy: the same phases, the same order of additions. Arguments as theirs, on the host."""
    M, N = tiles.rows, tiles.keys
    batch, num_nodes, num_heads, R = q_nope.shape
    num_pages, page_size, D = kv_cache.shape
    num_rows = num_nodes * num_heads
    row_tiles = -(-num_rows // M)

    # Phase 0: this block's work
    prefixes = np.clip(cache_seqlens, 0, max_seqlen).astype(int)
    origins = prefixes if part == TREE else np.zeros_like(prefixes)
    stops = np.maximum(prefixes, 1) if part == PREFIX else prefixes + num_nodes
    counts = [-(-int(n) // N) for n in stops - origins]
    for b, row_tile, parts in parts_of_all(counts, row_tiles, num_blocks, num_splits, part_tiles):
        rows = np.arange(row_tile * M, min(row_tile * M + M, num_rows))
        i, h = rows // num_heads, rows % num_heads
        q_tile = array_to_f32(np.concatenate([q_nope[b, i, h], q_pe[b, i, h]], axis=1))
        origin, stop = origins[b], stops[b]
        states = []
        for first, last in parts:
            if first == last:
                continue
            m_i, l_i, l_low, m_sum = (np.full(len(rows), x, np.float32) for x in (NEG_INF, ZERO, ZERO, NEG_INF))
            acc, acc_sum = np.zeros((len(rows), R), np.float32), np.zeros((len(rows), R), np.float32)
            for tile in range(first, last):
                # Phase 1: the key tile to shared memory
                key = origin + tile * N + np.arange(N)
                live = np.minimum(key, stop - 1)
                page = np.clip(block_table[b, live // page_size], 0, num_pages - 1)
                row = array_to_f32(kv_cache[page, live % page_size])
                row[key >= stop] = 0

                # Phase 2: scores
                terms = np.pad(q_tile[:, None] * row, ((0, 0), (0, 0), (0, padded(D) - D)))
                terms = terms.reshape(*terms.shape[:2], -1, GROUPS, 4).swapaxes(3, 4)
                s = np.add.accumulate(terms.reshape(*terms.shape[:2], -1, GROUPS), axis=2)[:, :, -1]
                while s.shape[2] > 1:
                    s = s[:, :, : s.shape[2] // 2] + s[:, :, s.shape[2] // 2 :]
                s = s[:, :, 0] * sm_scale

                # Phase 3: online softmax
                j = np.clip(key - prefixes[b], 0, num_nodes - 1)
                seen = (tree_mask[b, i][:, j // bits_per_word] >> (j % bits_per_word)) & 1 == 1
                s = np.where((key < prefixes[b]) | seen & (key < stop), s, NEG_INF)
                m = np.fmax(m_i, np.fmax.reduce(s, axis=1))
                base = np.where(m == NEG_INF, ZERO, m)
                p = np.exp(s - base[:, None])
                scale = np.exp(m_i - base)
                m_i = m
                l_i, l_low = add_exactly(l_i * scale, l_low * scale, sum_of_lanes(p, tiles))

                # Phase 4: values
                sums = np.add.reduce(p[:, :, None] * row[:, :R], axis=1)
                acc = acc * scale[:, None] + sums

                # Phase 5: sums that do not grow long
                if tile + 1 == last or (tile + 1 - first) % FOLD == 0:
                    scale = np.exp(m_sum - base)
                    acc_sum = acc_sum * scale[:, None] + acc
                    m_sum, acc[:] = m_i, 0
            states.append((m_sum, l_i + l_low, acc_sum))

        # Phase 6: the result, or a state for combine
        m, l, acc = states[0] if len(states) == 1 else combined(states)
        empty = l == ZERO
        out[b, i, h] = array_from_f32(np.where(empty[:, None], ZERO, acc / np.where(empty, 1, l)[:, None]), out.dtype)
        lse[b, i, h] = np.where(empty, NEG_INF, m + np.log(np.where(empty, 1, l)))


def sum_of_lanes(p, tiles):
    """Sums of rows of weights as the lanes of phase 3 form them."""
    lanes = tiles.keys // (32 * tiles.warps // tiles.rows)
    s = np.add.accumulate(p.reshape(len(p), lanes, -1), axis=1)[:, -1]
    while s.shape[1] > 1:
        pairs = s.reshape(len(s), -1, 2)
        s = pairs[:, :, 0] + pairs[:, :, 1]
    return s[:, 0]


def combined(states):
    """One state of several, in their order."""
    m = functools.reduce(np.fmax, (m_n for m_n, _, _ in states))
    base = np.where(m == NEG_INF, ZERO, m)
    l, l_low, acc = np.zeros_like(m), np.zeros_like(m), np.zeros_like(states[0][2])
    for m_n, l_n, acc_n in states:
        p = np.exp(m_n - base)
        l, l_low = add_exactly(l, l_low, l_n * p)
        acc = acc + acc_n * p[:, None]
    return m, l + l_low, acc


def parts_of_all(counts, row_tiles, num_blocks, num_splits, part_tiles):
    """Request, row tile and the runs of key tiles, first to last and one, that it is cut into; requests have counts."""
    work = sum(counts) * row_tiles
    num_blocks = max(min(num_blocks, work), 1)
    borders = [n * work // num_blocks for n in range(num_blocks + 1)]
    begin = 0
    for b, row_tile in np.ndindex(len(counts), row_tiles):
        count = counts[b]
        if num_splits:
            parts = [part_of(n, num_splits, part_tiles, count) for n in range(num_splits)]
        else:
            cuts = sorted({begin, begin + count, *(n for n in borders if begin < n < begin + count)})
            parts = [(first - begin, last - begin) for first, last in zip(cuts, cuts[1:], strict=False)]
        begin += count
        yield b, row_tile, parts


def part_of(part, num_splits, part_tiles, count):
    """Key tiles first .. last - 1 of a part: part_tiles of them, or, where that is 0, an even share."""
    first, last = part * part_tiles, (part + 1) * part_tiles
    if part_tiles == 0:
        first, last = part * count // num_splits, (part + 1) * count // num_splits
    return min(first, count), min(last, count)


@cuda.jit(device=True, inline="always")
def log_sum(m, l):
    """Log-sum-exp from the maximum and the sum of exponentials; -inf where nothing was seen."""
    if l == ZERO:
        return NEG_INF
    return m + math.log(l)


@cuda.jit(device=True, inline="always")
def reciprocal(l):
    """What a row's accumulators are multiplied by; nothing is read of it where nothing was seen."""
    if l == ZERO:
        return ZERO
    return ONE / l


@cuda.jit(device=True, inline="always")
def quotient(x, l, share):
    """``x / l``, with the reciprocal of l at hand: a step of Newton's rounds as a division would, which is a call."""
    q = x * share
    return q + (x - q * l) * share


@cuda.jit(device=True, inline="always")
def node_and_head(row, num_heads):
    """Of a request's row; unsigned division is in line, where a signed one of 64 bits would be a call."""
    i = np.int32(np.uint32(row) // max(np.uint32(num_heads), SMALLEST))
    return i, np.int32(row - i * num_heads)


@cuda.jit(device=True, inline="always")
def prefix_of(cache_seqlens, b, max_seqlen):
    return min(max(cache_seqlens[b], 0), max_seqlen)


@cuda.jit(device=True, inline="always")
def key_range(cache_seqlens, b, max_seqlen, num_nodes, part):
    """The request's keys that count: from the first on, up to the last and one; of an empty prefix, an unseen one."""
    prefix = prefix_of(cache_seqlens, b, max_seqlen)
    if part == TREE:
        return prefix, prefix + num_nodes
    if part == PREFIX:
        return 0, max(prefix, 1)
    return 0, prefix + num_nodes


@cuda.jit(device=True, inline="always")
def key_tiles(cache_seqlens, b, max_seqlen, num_nodes, part, tile_keys):
    """Tiles that a request's keys make, one at least."""
    origin, stop = key_range(cache_seqlens, b, max_seqlen, num_nodes, part)
    return (stop - origin + tile_keys - 1) // tile_keys


@cuda.jit(device=True, inline="always")
def share_sums(sums, cache_seqlens, row_tiles, max_seqlen, num_nodes, part, tile_keys, threads):
    """Each thread counts the work of as many requests, pairs of a row tile and a key tile; returns how many."""
    batch = cache_seqlens.shape[0]
    each = (batch + threads - 1) // threads
    t = cuda.threadIdx.x
    work = np.int64(0)
    b = t * each
    while b < min((t + 1) * each, batch):
        work += key_tiles(cache_seqlens, b, max_seqlen, num_nodes, part, tile_keys) * row_tiles
        b += 1
    sums[t] = work
    cuda.syncthreads()
    return each


@cuda.jit(device=True, inline="always")
def all_work(sums, batch, each):
    """Pairs of all requests."""
    total = np.int64(0)
    n = 0
    while n * each < batch:
        total += sums[n]
        n += 1
    return total


def add_exactly(total, low, x):
    """``total + x``, and ``low`` with what its rounding lost (Knuth, TAOCP 2, 4.2.2, theorem B).

    An error of the sum of the weights is an error of the whole row, which does not average out over columns.
    """
    rounded = total + x
    added = rounded - total
    return rounded, low + ((total - (rounded - added)) + (x - added))


add_exactly_device = cuda.jit(device=True, inline="always")(add_exactly)
part_of_device = cuda.jit(device=True, inline="always")(part_of)


@cuda.jit(device=True, inline="always")
def own_part(cache_seqlens, row_tiles, max_seqlen, num_nodes, part, num_splits, part_tiles, tile_keys):
    """Request, row tile, first key tile and number of key tiles of this block's part."""
    block = np.int64(cuda.blockIdx.x)
    row_tile, b = block // num_splits % row_tiles, block // num_splits // row_tiles
    count = key_tiles(cache_seqlens, b, max_seqlen, num_nodes, part, tile_keys)
    first, last = part_of_device(block % num_splits, num_splits, part_tiles, count)
    return b, row_tile, first, last - first


@cuda.jit(device=True, inline="always")
def own_share(sums, cache_seqlens, row_tiles, max_seqlen, num_nodes, part, tile_keys, threads):
    """Where this block's even share of all work begins, as `own_part`, and how many pairs it has."""
    block, batch = np.int64(cuda.blockIdx.x), cache_seqlens.shape[0]
    each = share_sums(sums, cache_seqlens, row_tiles, max_seqlen, num_nodes, part, tile_keys, threads)
    work = all_work(sums, batch, each)
    num_blocks = min(np.int64(cuda.gridDim.x), work)  # so that no block between two others lacks work
    first = block * work // num_blocks
    left = (block + 1) * work // num_blocks - first
    if block >= num_blocks:
        left = np.int64(0)
    b = np.int64(0)
    count = 1
    if left > 0:
        while first >= sums[b]:
            first -= sums[b]
            b += 1
        b *= each
        count = key_tiles(cache_seqlens, b, max_seqlen, num_nodes, part, tile_keys)
        while first >= count * row_tiles:
            first -= count * row_tiles
            b += 1
            count = key_tiles(cache_seqlens, b, max_seqlen, num_nodes, part, tile_keys)
    cuda.syncthreads()
    return b, first // count, first % count, left


@functools.cache
def make_kernel(shape: Shape) -> Any:
    """The kernel for these sizes."""
    tiles = shape.tiles
    M, N, WARPS = tiles.rows, tiles.keys, tiles.warps
    R, D, DP, WIDE = shape.kv_lora_rank, shape.head_dim, padded(shape.head_dim), shape.wide
    THREADS = 32 * WARPS
    HALVES = 2 * WARPS  # half warps: each stages every HALVES-th row
    STAGED = N // HALVES  # key rows of a half warp
    AHEAD = STAGED // 2  # of them, loaded ahead of phase 4: more registers are not free
    RUNS = -(-DP // 64)  # of four columns that a lane stages in a row
    WORDS, ROW_WORDS = STAGED * RUNS * 4, RUNS * 4
    # Scores: a warp has 2 * SR rows and 2 * SK keys, a thread every other one of them.
    SR, SK = tiles.score_rows, tiles.score_keys
    SCORES, KEY_RUNS = SR * SK, SK * 4
    KEPT = SCORES // GROUPS
    SCORE_WARPS = M // (2 * SR)
    PITCH = M + 8  # of a key's row of weights: the lanes of phase 3 then hit different banks
    # Softmax: LANES lanes a row.
    WARP_ROWS = M // WARPS
    LANES = 32 // WARP_ROWS
    # Values: a warp has 4 * TR rows and 32 * TC columns, a thread TR of these rows and TC fours of these columns.
    TR = tiles.value_rows
    VALUE_WARPS = M // (4 * TR)
    TC = -(-R // (WARPS // VALUE_WARPS * 32))
    COLS = TC * 4
    SUMS = TR * 4  # over a key tile, of four columns at a time
    ACC = TR * COLS
    # Places in shared memory: the key tile, the query tile, and what `shared_bytes` lists.
    Q_TILE = N * DP
    WEIGHTS = Q_TILE + M * DP
    M_I = WEIGHTS + N * PITCH
    L_I, L_LOW, SCALE, M_SUM = M_I + M, M_I + 2 * M, M_I + 3 * M, M_I + 4 * M
    # What the block works on, in shared memory, where it takes no registers: request, first row, key tiles, keys.
    REQUEST = M_I + 5 * M
    ROW, FIRST, LAST, LEFT, COUNT, PREFIX_LENGTH, ORIGIN, STOP = (REQUEST + n for n in range(1, 9))
    SLOT = M * (R + 2)  # of the workspace: a state's accumulators, its maxima, its sums

    @cuda.jit(device=True, inline="always")
    def slot_of(first, num_splits):
        """Where this block leaves a state; with even parts of all work it has two, since a row tile may end in it."""
        block = np.int64(np.uint32(cuda.blockIdx.x))
        if num_splits == 0:
            block += block + (first == 0)
        return block * SLOT

    @cuda.jit(device=True, inline="always")
    def stage_queries(shared, q_nope, q_pe, numbers, words):
        """The query tile to shared memory; for rows that do not exist, the last one."""
        t = fresh_thread() & (THREADS - 1)
        half, lane = t >> 4, t & 15
        b, num_heads = numbers[REQUEST], q_nope.shape[2]
        num_rows = q_nope.shape[1] * num_heads
        r = half
        while r < M:
            row = min(numbers[ROW] + r, num_rows - 1)
            i, h = node_and_head(row, num_heads)
            fill(words, 0, ROW_WORDS, NO_BITS)
            for k in range(RUNS):
                c = lane * 4 + k * 64
                if c < R:
                    load_words(q_nope[b, i, h], c, words, 4 * k, WIDE)
                elif c < D:
                    load_words(q_pe[b, i, h], c - R, words, 4 * k, WIDE)
            at = Q_TILE + r * DP + (lane * 4 ^ (r & 1) << 4)
            for k in range(RUNS):
                if lane * 4 + k * 64 < DP:
                    store_words(words, 4 * k, q_nope, shared, at + k * 64)
            r += HALVES

    @cuda.jit(device=True, inline="always")
    def load_keys(kv_cache, block_table, numbers, tile, words, begin, end):
        """Rows begin .. end - 1 of this half warp's part of a key tile into registers; behind the last key, its row."""
        t = fresh_thread() & (THREADS - 1)
        half, lane = t >> 4, t & 15
        page_size = max(np.uint32(kv_cache.shape[1]), SMALLEST)
        for n in range(begin, end):
            fill(words, n * ROW_WORDS, ROW_WORDS, NO_BITS)  # else what they held before would stay alive
            key = min(numbers[ORIGIN] + tile * N + half + n * HALVES, numbers[STOP] - 1)
            page, slot = locate(block_table, numbers[REQUEST], key, kv_cache.shape[0], page_size)
            row = kv_cache[page, slot]
            for k in range(RUNS):
                if lane * 4 + k * 64 < D:
                    load_words(row, lane * 4 + k * 64, words, n * ROW_WORDS + k * 4, WIDE)

    @cuda.jit(device=True, inline="always")
    def store_keys(shared, kv_cache, numbers, tile, words, zeros):
        """Phase 1: the registers to shared memory, zeros behind the last key.

        Odd rows swap halves of 32 columns, so that neighbouring rows lie in different banks.
        """
        t = fresh_thread() & (THREADS - 1)
        half, lane = t >> 4, t & 15
        for n in range(STAGED):
            r = half + n * HALVES
            at = r * DP + (lane * 4 ^ (r & 1) << 4)
            for k in range(RUNS):
                if lane * 4 + k * 64 < D:
                    store_words(words, n * ROW_WORDS + k * 4, kv_cache, shared, at + k * 64)
                elif lane * 4 + k * 64 < DP:
                    store4(zeros, 0, shared, at + k * 64)
            if numbers[ORIGIN] + tile * N + r >= numbers[STOP]:
                for k in range(RUNS):
                    if lane * 4 + k * 64 < DP:
                        store4(zeros, 0, shared, at + k * 64)

    @cuda.jit(device=True, inline="always")
    def score(shared, sm_scale, s, a, k):
        """Phase 2: scores of the query tile and the key tile, a row of them a key."""
        t = fresh_thread() & (THREADS - 1)
        warp, lane = t >> 5, t & 31
        group, row_side, key_side = lane >> 2, lane >> 1 & 1, lane & 1
        row = warp % SCORE_WARPS * 2 * SR + row_side
        key = np.int32(warp // SCORE_WARPS * 2 * SK + key_side)
        while key < N:
            q_at = np.int32(Q_TILE + row * DP + (group * 4 ^ row_side * 16))
            k_at = np.int32(key * DP + (group * 4 ^ key_side * 16))
            stop = np.int32(k_at + DP)
            fill(s, 0, SCORES, ZERO)
            while k_at < stop:
                for j in range(SK):
                    load4(shared, k_at + j * 2 * DP, k, 4 * j)
                for i in range(SR):
                    load4(shared, q_at + i * 2 * DP, a, 0)
                    multiply_add(s, i * SK, a, k, 1, SK, 4)
                k_at = np.int32(k_at + GROUPS * 4)
                q_at = np.int32(q_at + GROUPS * 4)
            sum_over_groups(s, SCORES)
            for n in range(KEPT):
                e = group * KEPT + n
                i, j = e // SK, e % SK
                shared[np.uint32(WEIGHTS + (key + 2 * j) * PITCH + row + 2 * i)] = s[n] * sm_scale
            key = np.int32(key + WARPS // SCORE_WARPS * 2 * SK)

    @cuda.jit(device=True, inline="always")
    def mask(shared, tree_mask, bits_per_word, numbers, tile, num_heads):
        """Phase 3, a tile that reaches past the prefix: -inf for what node i does not see."""
        t = fresh_thread() & (THREADS - 1)
        warp, lane = t >> 5, t & 31
        row = warp * WARP_ROWS + lane % WARP_ROWS
        num_nodes = tree_mask.shape[1]
        i, _ = node_and_head(numbers[ROW] + row, num_heads)
        b, i = numbers[REQUEST], min(i, num_nodes - 1)
        key = lane // WARP_ROWS
        while key < N:
            j = numbers[ORIGIN] + tile * N + key - numbers[PREFIX_LENGTH]
            if j >= 0:
                visible = False
                if j < num_nodes:
                    visible = sees(tree_mask, bits_per_word, b, i, j)
                if not visible:
                    shared[np.uint32(WEIGHTS + key * PITCH + row)] = NEG_INF
            key += LANES

    @cuda.jit(device=True, inline="always")
    def softmax(shared):
        """Phase 3: weights in place of the scores; the rows' maxima, sums, and factors for what was before."""
        t = fresh_thread() & (THREADS - 1)
        warp, lane = t >> 5, t & 31
        row = warp * WARP_ROWS + lane % WARP_ROWS
        part = lane // WARP_ROWS
        m_i = shared[np.uint32(M_I + row)]
        m = m_i
        key = part
        while key < N:
            m = max(m, shared[np.uint32(WEIGHTS + key * PITCH + row)])
            key += LANES
        other = WARP_ROWS
        while other < 32:
            m = max(m, shuffle_xor(m, np.int32(other)))
            other *= 2
        base = m
        if m == NEG_INF:
            base = ZERO  # nothing seen yet: each weight becomes exp(-inf) = 0, where -inf - -inf would be NaN
        l = ZERO
        key = part
        while key < N:
            at = np.uint32(WEIGHTS + key * PITCH + row)
            p = math.exp(shared[at] - base)
            shared[at] = p
            l += p
            key += LANES
        other = WARP_ROWS
        while other < 32:
            l += shuffle_xor(l, np.int32(other))
            other *= 2
        warp_sync()  # all lanes of the row have read its maximum
        if part == 0:
            scale = math.exp(m_i - base)
            shared[np.uint32(M_I + row)] = m
            l_i, l_low = shared[np.uint32(L_I + row)] * scale, shared[np.uint32(L_LOW + row)] * scale
            l_i, l_low = add_exactly_device(l_i, l_low, l)
            shared[np.uint32(L_I + row)] = l_i
            shared[np.uint32(L_LOW + row)] = l_low
            shared[np.uint32(SCALE + row)] = scale

    @cuda.jit(device=True, inline="always")
    def own_values():
        """First row and first column of this thread's accumulators."""
        t = fresh_thread() & (THREADS - 1)
        warp, lane = t >> 5, t & 31
        row = warp % VALUE_WARPS * 4 * TR + ((lane & 1) + (lane >> 3 & 1) * 2) * TR
        column = warp // VALUE_WARPS * 32 * TC + ((lane >> 1 & 3) + (lane >> 4) * 4) * 4
        return row, column

    @cuda.jit(device=True, inline="always")
    def accumulate(shared, acc, sums, p, v):
        """Phase 4: the weighted values of the key tile, four columns at a time, added to the scaled accumulators."""
        row, column = own_values()
        for n in range(TC):
            fill(sums, 0, SUMS, ZERO)
            p_at = np.int32(WEIGHTS + row)
            even = np.int32(column + 32 * n)
            odd = np.int32((even ^ 16) + DP)  # odd rows are swapped
            while even < N * DP:
                for i in range(TR // 4):
                    load4(shared, p_at + 4 * i, p, 4 * i)
                load4(shared, even, v, 0)
                multiply_add(sums, 0, p, v, TR, 4, 1)
                for i in range(TR // 4):
                    load4(shared, p_at + PITCH + 4 * i, p, 4 * i)
                load4(shared, odd, v, 0)
                multiply_add(sums, 0, p, v, TR, 4, 1)
                p_at = np.int32(p_at + 2 * PITCH)
                even, odd = np.int32(even + 2 * DP), np.int32(odd + 2 * DP)
            for i in range(TR // 4):
                load4(shared, SCALE + row + 4 * i, p, 4 * i)
            scale_and_add(acc, 4 * n, COLS, p, sums, TR, 4)

    @cuda.jit(device=True, inline="always")
    def start_rows(shared):
        """A thread a row: nothing seen."""
        row = fresh_thread() & (THREADS - 1)
        if row < M:
            shared[np.uint32(M_I + row)] = NEG_INF
            shared[np.uint32(L_I + row)] = ZERO
            shared[np.uint32(L_LOW + row)] = ZERO
            shared[np.uint32(M_SUM + row)] = NEG_INF

    @cuda.jit(device=True, inline="always")
    def close_rows(shared):
        """Phase 5, a thread a row: the factor for the sums of before, and the maximum that they will be at."""
        row = fresh_thread() & (THREADS - 1)
        if row < M:
            m = shared[np.uint32(M_I + row)]
            base = m
            if m == NEG_INF:
                base = ZERO
            scale = math.exp(shared[np.uint32(M_SUM + row)] - base)
            shared[np.uint32(SCALE + row)] = scale
            shared[np.uint32(M_SUM + row)] = m

    @cuda.jit(device=True, inline="always")
    def store_rows(shared, workspace, slot):
        """Phase 6, a thread a row: maximum and sum of a state for combine."""
        row = fresh_thread() & (THREADS - 1)
        if row < M:
            workspace[np.uint64(slot + M * R + row)] = shared[np.uint32(M_SUM + row)]
            l = shared[np.uint32(L_I + row)] + shared[np.uint32(L_LOW + row)]
            workspace[np.uint64(slot + M * (R + 1) + row)] = l

    @cuda.jit(device=True, inline="always")
    def add_sums(shared, workspace, slot, acc, p, v):
        """Phase 5: add what earlier key tiles left in the workspace to the accumulators."""
        row, column = own_values()
        at = slot + row * R + column
        for i in range(TR):
            p[0] = shared[np.uint32(SCALE + row + i)]
            for j in range(TC):
                if column + 32 * j < R:
                    load4(workspace, at + i * R + 32 * j, v, 0)
                    multiply_add(acc, i * COLS + 4 * j, p, v, 1, 4, 1)

    @cuda.jit(device=True, inline="always")
    def store_sums(acc, array, first):
        """The accumulators as rows of R columns."""
        row, column = own_values()
        at = first + row * R + column
        for i in range(TR):
            for j in range(TC):
                if column + 32 * j < R:
                    store4(acc, i * COLS + 4 * j, array, at + i * R + 32 * j)

    @cuda.jit(device=True, inline="always")
    def write_rows(shared, out, lse, numbers):
        """Phase 6: a complete state, its accumulators at the front of shared memory, as rows of out and lse."""
        t = fresh_thread() & (THREADS - 1)
        warp, lane = t >> 5, t & 31
        b, num_heads = numbers[REQUEST], out.shape[2]
        r = warp
        while r < M and numbers[ROW] + r < out.shape[1] * num_heads:
            row = numbers[ROW] + r
            i, h = node_and_head(row, num_heads)
            l = shared[np.uint32(L_I + r)] + shared[np.uint32(L_LOW + r)]
            share = reciprocal(l)
            d = lane
            while d < R:
                value = ZERO
                if l != ZERO:
                    value = quotient(shared[np.uint32(r * R + d)], l, share)
                out[b, i, h, d] = from_f32(value, out)
                d += 32
            if lane == 0:
                lse[b, i, h] = log_sum(shared[np.uint32(M_SUM + r)], l)
            r += WARPS

    @jit(launch_bounds=(THREADS, tiles.blocks))
    def kernel(
        q_nope,
        q_pe,
        kv_cache,
        block_table,
        cache_seqlens,
        tree_mask,
        bits_per_word,
        sm_scale,
        max_seqlen,
        part,
        num_splits,
        part_tiles,
        workspace,
        out,
        lse,
    ):
        """Block n of N; with num_splits > 0 a block for each part of each row tile, else N even parts of all work."""
        batch, num_nodes, num_heads, _ = q_nope.shape
        t = cuda.threadIdx.x
        shared = cuda.shared.array(0, types.float32)  # gpu: all dynamic arrays are one, sliced by the places above
        sums = cuda.shared.array(0, types.int64)  # gpu: the same memory, ahead of the first tile
        numbers = cuda.shared.array(0, types.int32)  # gpu: the same memory, at places of its own
        words = cuda.local.array(WORDS, types.uint32)
        acc = cuda.local.array(ACC, types.float32)
        s = cuda.local.array(SCORES, types.float32)
        a = cuda.local.array(4, types.float32)
        q_words = cuda.local.array(ROW_WORDS, types.uint32)
        zeros = cuda.local.array(4, types.float32)
        fill(zeros, 0, 4, ZERO)
        k = cuda.local.array(KEY_RUNS, types.float32)
        p = cuda.local.array(TR, types.float32)
        v = cuda.local.array(4, types.float32)
        tile_sums = cuda.local.array(SUMS, types.float32)
        num_rows = num_nodes * num_heads
        row_tiles = (num_rows + M - 1) // M

        # Phase 0: this block's work
        if num_splits > 0:
            b, row_tile, first, left = own_part(
                cache_seqlens, row_tiles, max_seqlen, num_nodes, part, num_splits, part_tiles, N
            )
            if left == 0:  # an empty state for combine
                start_rows(shared)
                store_rows(shared, workspace, slot_of(first, num_splits))
        else:
            b, row_tile, first, left = own_share(
                sums, cache_seqlens, row_tiles, max_seqlen, num_nodes, part, N, THREADS
            )
        if t == 0:
            numbers[REQUEST], numbers[ROW], numbers[FIRST], numbers[LEFT] = b, row_tile * M, first, left
        cuda.syncthreads()
        while numbers[LEFT] > 0:
            if t == 0:
                b = numbers[REQUEST]
                count = key_tiles(cache_seqlens, b, max_seqlen, num_nodes, part, N)
                numbers[COUNT], numbers[LAST] = count, min(numbers[FIRST] + numbers[LEFT], count)
                numbers[PREFIX_LENGTH] = prefix_of(cache_seqlens, b, max_seqlen)
                numbers[ORIGIN], numbers[STOP] = key_range(cache_seqlens, b, max_seqlen, num_nodes, part)
            start_rows(shared)
            cuda.syncthreads()
            load_keys(kv_cache, block_table, numbers, numbers[FIRST], words, 0, STAGED)
            stage_queries(shared, q_nope, q_pe, numbers, q_words)
            fill(acc, 0, ACC, ZERO)

            tile = numbers[FIRST]
            while tile < numbers[LAST]:
                # Phase 1: the key tile to shared memory
                store_keys(shared, kv_cache, numbers, tile, words, zeros)
                cuda.syncthreads()

                # Phase 2: scores
                score(shared, sm_scale, s, a, k)
                cuda.syncthreads()

                # Phase 3: online softmax
                if numbers[ORIGIN] + (tile + 1) * N > numbers[PREFIX_LENGTH]:
                    mask(shared, tree_mask, bits_per_word, numbers, tile, num_heads)
                softmax(shared)
                cuda.syncthreads()

                # Phase 4: values
                tile = np.int32(tile + 1)
                load_keys(kv_cache, block_table, numbers, tile, words, 0, AHEAD)
                accumulate(shared, acc, tile_sums, p, v)
                load_keys(kv_cache, block_table, numbers, tile, words, AHEAD, STAGED)
                cuda.syncthreads()

                # Phase 5: sums that do not grow long
                if tile == numbers[LAST] or (tile - numbers[FIRST]) % FOLD == 0:
                    close_rows(shared)
                    cuda.syncthreads()
                    if tile - numbers[FIRST] > FOLD:
                        add_sums(shared, workspace, slot_of(numbers[FIRST], num_splits), acc, p, v)
                    if tile < numbers[LAST]:
                        store_sums(acc, workspace, slot_of(numbers[FIRST], num_splits))
                        fill(acc, 0, ACC, ZERO)

            # Phase 6: the result, or a state for combine
            if numbers[FIRST] == 0 and numbers[LAST] == numbers[COUNT]:
                store_sums(acc, shared, 0)
                cuda.syncthreads()
                write_rows(shared, out, lse, numbers)
            else:
                slot = slot_of(numbers[FIRST], num_splits)
                store_sums(acc, workspace, slot)
                store_rows(shared, workspace, slot)
            cuda.syncthreads()
            if t == 0:
                numbers[LEFT] -= numbers[LAST] - numbers[FIRST]
                numbers[FIRST] = 0
                numbers[ROW] += M
                if numbers[ROW] >= out.shape[1] * out.shape[2]:
                    numbers[ROW] = 0
                    numbers[REQUEST] += 1
            cuda.syncthreads()

    return kernel


@functools.cache
def make_combine(shape: Shape) -> Any:
    """The kernel that merges the states of row tiles that were split: a warp a row."""
    M, N, R = shape.tiles.rows, shape.tiles.keys, shape.kv_lora_rank
    THREADS = 32 * COMBINE_ROWS
    SLOT = M * (R + 2)
    RUNS = -(-R // 128)  # of four columns a lane
    ACC = 4 * RUNS

    @cuda.jit(device=True, inline="always")
    def state(workspace, slot, r):
        """Maximum and sum of a row in a state."""
        return workspace[slot + M * R + r], workspace[slot + M * (R + 1) + r]

    @jit(launch_bounds=(THREADS, 4))
    def kernel(cache_seqlens, max_seqlen, part, num_splits, part_tiles, num_blocks, workspace, out, lse):
        """A block has COMBINE_ROWS rows of one tile of one request."""
        batch, num_nodes, num_heads, _ = out.shape
        t = fresh_thread() & (THREADS - 1)
        warp, lane = t >> 5, t & 31
        b = np.int64(cuda.blockIdx.y)
        row = np.int64(cuda.blockIdx.x) * COMBINE_ROWS + warp
        row_tile = np.int64(cuda.blockIdx.x) * COMBINE_ROWS // M
        sums = cuda.shared.array(THREADS, types.int64)
        v = cuda.local.array(ACC, types.float32)
        fill(v, 0, ACC, ZERO)
        acc = cuda.local.array(ACC, types.float32)
        p = cuda.local.array(1, types.float32)
        num_rows = num_nodes * num_heads
        row_tiles = (num_rows + M - 1) // M

        # Phase 1: where this row's states are
        count = key_tiles(cache_seqlens, b, max_seqlen, num_nodes, part, N)
        if num_splits > 0:
            first_slot = (b * row_tiles + row_tile) * num_splits
            step, ahead = 1, 0
            states = np.int64(num_splits)
            if part_tiles > 0:
                states = np.int64((count + part_tiles - 1) // part_tiles)
            if count == 1:
                states = np.int64(1)
        else:
            each = share_sums(sums, cache_seqlens, row_tiles, max_seqlen, num_nodes, part, N, THREADS)
            work = all_work(sums, batch, each)
            begin = row_tile * count
            n = 0
            while (n + 1) * each <= b:
                begin += sums[n]
                n += 1
            other = n * each
            while other < b:
                begin += key_tiles(cache_seqlens, other, max_seqlen, num_nodes, part, N) * row_tiles
                other += 1
            num_blocks = min(np.int64(num_blocks), work)
            first_block = ((begin + 1) * num_blocks - 1) // work
            states = ((begin + count) * num_blocks - 1) // work - first_block + 1
            first_slot = 2 * first_block
            step, ahead = 2, 1  # the first state is the last of its block
        if states == 1 or row >= num_rows:
            return
        i, h = node_and_head(row, num_heads)
        r = row % M

        # Phase 2: maximum and sum of all states
        m = NEG_INF
        for n in range(states):
            slot = (first_slot + n * step + (ahead if n == 0 else 0)) * SLOT
            m_n, l_n = state(workspace, slot, r)
            if l_n != ZERO:
                m = max(m, m_n)
        base = m
        if m == NEG_INF:
            base = ZERO
        l, l_low = ZERO, ZERO
        for n in range(states):
            slot = (first_slot + n * step + (ahead if n == 0 else 0)) * SLOT
            m_n, l_n = state(workspace, slot, r)
            l, l_low = add_exactly_device(l, l_low, l_n * math.exp(m_n - base))
        l += l_low

        # Phase 3: the weighted sum of their accumulators
        fill(acc, 0, ACC, ZERO)
        for n in range(states):
            slot = (first_slot + n * step + (ahead if n == 0 else 0)) * SLOT
            m_n, l_n = state(workspace, slot, r)
            if l_n != ZERO:
                p[0] = math.exp(m_n - base)
                for k in range(RUNS):
                    if lane * 4 + k * 128 < R:
                        load4(workspace, slot + r * R + lane * 4 + k * 128, v, 4 * k)
                multiply_add(acc, 0, p, v, 1, ACC, 1)
        share = reciprocal(l)
        for n in range(ACC):
            d = lane * 4 + n // 4 * 128 + n % 4
            if d < R:
                value = ZERO
                if l != ZERO:
                    value = quotient(acc[n], l, share)
                out[b, i, h, d] = from_f32(value, out)
        if lane == 0:
            lse[b, i, h] = log_sum(m, l)

    return kernel


def error_bound(logit_magnitude: float, num_keys: int, head_dim: int) -> float:
    """Bound on the relative Frobenius error of float32 outputs against exact arithmetic; docs/numerics.md derives it.

    Parameters
    ----------
    logit_magnitude : float
        Softmax-weighted root mean square of the scaled logits (or of their terms' norm, where that is larger), nats.
    num_keys : int
        Visible keys of the longest row.
    head_dim : int
        D.

    Returns
    -------
    float
        Of ``norm(out - exact) / norm(exact)``; about twice the error that independent roundings lead to.
    """
    a_rounding = float(np.finfo(np.float32).eps) / 2.4
    in_logits = logit_magnitude * math.sqrt(padded(head_dim) / GROUPS + math.log2(GROUPS) + 1)
    in_exponentials = 2 * logit_magnitude + 3
    in_sums = math.sqrt(LARGE.keys + FOLD + num_keys / (FOLD * SMALL.keys) + 2)
    return a_rounding * math.hypot(in_logits, in_exponentials, in_sums)


class Plan(NamedTuple):
    """How a call is shared out: the grid, and what the kernels are told of it."""

    shape: Shape
    part: int  # of the keys: ALL, TREE or PREFIX
    num_blocks: int
    num_splits: int  # 0: even parts of all work
    part_tiles: int  # 0: even parts of each row tile
    slots: int  # states that the workspace must hold

    @property
    def workspace_floats(self) -> int:
        return max(self.slots * self.shape.tiles.rows * (self.shape.kv_lora_rank + 2), 4)

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.shape.tiles, self.shape.head_dim)


def make_plan(
    batch: int,
    num_nodes: int,
    num_heads: int,
    kv_lora_rank: int,
    head_dim: int,
    max_seqlen: int,
    *,
    device: int,
    wide: bool,
    num_splits: int | None,
    batch_invariant: bool,
    part: int,
    tuned: Tuned | None = None,
) -> Plan:
    """Choose tiles and grid from sizes and the GPU alone; lengths are not known here.

    Raises
    ------
    ValueError
        kv_lora_rank or head_dim is too large for this variant, or there are more parts than a grid holds.
    """
    tiles = fitting_tiles(kv_lora_rank, head_dim, device)
    if not tiles:
        raise ValueError(
            f"variant 'flash' takes kv_lora_rank up to {TILES[-1].max_rank} (here it is {kv_lora_rank}) and needs "
            f"{shared_bytes(TILES[-1], head_dim)} bytes of shared memory for D = {head_dim}, of which "
            f"{device_name(device)} has {shared_bytes_limit(device)}; variant 'three_phase' takes any width"
        )
    longest = {ALL: num_nodes + max_seqlen, TREE: num_nodes, PREFIX: max(max_seqlen, 1)}[part]
    little = batch * tile_pairs(LARGE, num_nodes * num_heads, longest) < LEAST_WORK * multiprocessors(device)
    # With splits given or fixed, bits would depend on the batch.
    spread = little and num_splits is None and not batch_invariant
    # Reading single elements takes registers that LARGE does not have.
    chosen, waves = tiles[-1] if spread or not wide else tiles[0], 1
    if tuned is not None and wide and all(fits(x, kv_lora_rank, head_dim, device) for x in (tuned.large, tuned.small)):
        chosen, waves = (tuned.small, tuned.small_waves) if spread else (tuned.large, tuned.large_waves)
    row_tiles, most_tiles = -(-num_nodes * num_heads // chosen.rows), -(-longest // chosen.keys)
    shape = Shape(chosen, kv_lora_rank, head_dim, int(wide))
    part_tiles = 0
    if num_splits is None and batch_invariant:
        part_tiles = CHUNK // chosen.keys
        num_splits = -(-most_tiles // part_tiles)
    if num_splits is None:
        num_blocks = min(multiprocessors(device) * chosen.blocks * waves, batch * row_tiles * most_tiles)
        return Plan(shape, part, num_blocks, 0, 0, 2 * num_blocks)
    num_blocks = batch * row_tiles * num_splits
    if num_blocks >= 2**31:
        most = (2**31 - 1) // max(batch * row_tiles, 1)
        raise ValueError(f"num_splits is {num_splits}; a grid holds at most {most} for {batch * row_tiles} row tiles")
    slots = num_blocks if num_splits > 1 or most_tiles > FOLD else 0
    return Plan(shape, part, num_blocks, num_splits, part_tiles, slots)


def fitting_tiles(kv_lora_rank: int, head_dim: int, device: int) -> list[Tiles]:
    """The tiles whose accumulators fit the registers, and which fit a GPU's shared memory.

    LARGE is for compute capability 9 alone: on 10 it has the memory, but the compiler spills a few registers.
    """
    major = compute_capability(device)[0]
    return [x for x in TILES if (x != LARGE or major == 9) and fits(x, kv_lora_rank, head_dim, device)]


def fits(tiles: Tiles, kv_lora_rank: int, head_dim: int, device: int) -> bool:
    """Whether accumulators fit the registers, and a block a GPU's shared memory."""
    return kv_lora_rank <= tiles.max_rank and shared_bytes(tiles, head_dim) <= shared_bytes_limit(device)


def tile_pairs(tiles: Tiles, num_rows: int, num_keys: int) -> int:
    """Pairs of a row tile and a key tile that make the work of a request."""
    return -(-num_rows // tiles.rows) * -(-num_keys // tiles.keys)


def plan_of(
    problem: Problem, num_splits: int | None, batch_invariant: bool, part: int = ALL, tuned: Tuned | None = None
) -> Plan:
    """`make_plan` for checked arguments; a caller's workspace must hold its states.

    Raises
    ------
    ValueError
        As `make_plan`, or the workspace is too small.
    """
    plan = make_plan(
        problem.batch,
        problem.num_nodes,
        problem.num_heads,
        problem.kv_lora_rank,
        problem.head_dim,
        problem.max_seqlen,
        device=problem.q_nope.device,
        wide=all(in_pieces(x, 4 * x.dtype.itemsize) for x in (problem.q_nope, problem.q_pe, problem.kv_cache)),
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        part=part,
        tuned=tuned,
    )
    require_workspace(problem, plan.workspace_floats)
    return plan


def require_workspace(problem: Problem, floats: int) -> None:
    """Raise ValueError where the caller's workspace holds fewer."""
    if problem.workspace is not None and problem.workspace.shape[0] < floats:
        raise ValueError(
            f"workspace has {4 * problem.workspace.shape[0]} bytes; it must have at least {4 * floats} "
            "(see workspace_bytes)"
        )


def in_pieces(x: View, size: int) -> bool:
    """Whether so many bytes along the last axis can be read at once."""
    rows = [stride for n, stride in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
    return x.strides[-1] == x.dtype.itemsize and all(place % size == 0 for place in (x.pointer, *rows))


def run(problem: Problem, plan: Plan) -> None:
    """Launch the kernels; the results are in problem.out and problem.lse once the stream has passed."""
    if problem.batch == 0:
        return
    require_backend()
    if problem.q_nope.device == HOST and not runtime.SIMULATOR:
        copies: dict[str, Any] = {
            f.name: copy_in(x) for f in fields(problem) if isinstance(x := getattr(problem, f.name), View)
        }
        run(replace(problem, **copies), plan)
        copy_out(problem.out, copies["out"])
        copy_out(problem.lse, copies["lse"])
        return
    tiles, count = plan.shape.tiles, plan.workspace_floats
    workspace = problem.workspace
    if workspace is None:
        workspace = view("workspace", empty(problem.q_nope, (count,), np.dtype(np.float32), "workspace"))
    head, tail = arguments(problem, plan)
    threads = 32 * tiles.warps
    results = (workspace, problem.out, problem.lse)
    launch(
        make_kernel(plan.shape),
        (plan.num_blocks, 1, 1),
        threads,
        (*head, *tail, *results),
        results=3,
        shared_bytes=plan.shared_bytes,
    )
    if plan.num_splits != 1:
        blocks = (-(-problem.num_nodes * problem.num_heads // COMBINE_ROWS), problem.batch, 1)
        lengths = replace(problem.cache_seqlens, kind=problem.q_nope.kind)  # whose stream it is
        args = (lengths, *tail, np.int32(plan.num_blocks), *results)
        launch(make_combine(plan.shape), blocks, 32 * COMBINE_ROWS, args, results=3, shared_bytes=0)


def arguments(problem: Problem, plan: Plan) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments of the mirror and, but for the results, of the first kernel; the second are for both kernels."""
    head = (
        problem.q_nope,
        problem.q_pe,
        problem.kv_cache,
        problem.block_table,
        problem.cache_seqlens,
        problem.tree_mask,
        np.int32(problem.bits_per_word),
        np.float32(problem.sm_scale),
    )
    splits = map(np.int32, (plan.part, plan.num_splits, plan.part_tiles))
    return head, (np.int32(problem.max_seqlen), *splits)


def run_mirror(problem: Problem, plan: Plan) -> None:
    """Run the mirror on host arrays.

    Raises
    ------
    ValueError
        The arguments lie on a GPU.
    """
    if problem.q_nope.device != HOST:
        raise ValueError(f"variant 'flash_numpy' works on host arrays; {problem.q_nope} is on a GPU")
    head, tail = arguments(problem, plan)
    given = (a.as_numpy() if isinstance(a, View) else a for a in (*head, *tail, problem.out, problem.lse))
    mirror(plan.shape.tiles, plan.num_blocks, *given)
