"""Variant `mma`: tree-verify MLA attention on tensor cores, for bfloat16 and float16 at the widths of the models.

The walk is that of flash.py: the rows of a request are its (node, head) pairs, a block takes a tile of rows over a run
of key tiles, and the work of all requests is shared out in even parts. What differs is what a tile is made of. Query
tile and key tiles stay in the cache's own 16-bit format in shared memory, where copies that pass no register bring
them, and both products are done by a warp at a time, 16 x 8 x 16 numbers an instruction, with float32 sums::

    s[k]  = (q . row[k, :]) * sm_scale * log2(e)          for the keys k of this tile
    ref   = max_k s[k] where that exceeds ref by more than LAG, else ref as it was
    p[k]  = exp2(s[k] - ref),  w[k] = p[k] rounded to the cache's format
    l_i   = l_i * exp2(ref before - ref) + sum_k p[k],    w_i likewise of w[k]
    acc   = acc * exp2(ref before - ref) + sum_k w[k] * row[k, :R]

and at the end ``out = acc / w_i``, ``lse = ref * log(2) + log(l_i)``.

The reference of a row lags behind its maximum: weights are at most 2**LAG, which neither format minds, and hardly any
tile but the first has accumulators to scale. Two sums of the weights: the products take rounded ones, so out is a mean
with weights w[k] / w_i, whose rounding errors cancel where the rows are alike, and a node that sees one key gets its
very row. The lse takes l_i, of weights that are not rounded: one rounding is up to 2**-9 of bfloat16, which would be
its absolute error in nats.

- Phase 1: the key tile has come, and the next one is sent for. There is room for two.
- Phase 2: scores. Each warp has some rows, 16 keys and a share of the columns; the shares go to shared memory apart.
- Phase 3: weights. A few lanes a row add the shares up, find reference and weights, and write these, rounded, over the
  scores. Only a tile that reaches past the prefix looks at the mask.
- Phase 4: values. A warp has all rows and 64 of the columns, its accumulators in registers.
- Phase 5: the result, or a state for combine, which is flash's: accumulators times l_i / w_i, so that one sum serves.

Copies write zeros in place of rows behind the last key, since 0 * NaN in a product would be NaN. No block waits for
another, nothing is atomic, and all sums have a fixed order: the same inputs give the same bits.

Rows in shared memory lie 16 bytes more than their columns apart, so that the eight rows of a small matrix begin in
different banks, for any place in the row.

Cost: 2 n (D + R) FLOPs for a row that sees n keys. A key tile is read once by each row tile, from L2 for the most part.

Source: PTX ISA, mma.m16n8k16, ldmatrix, cp.async (sm_80 and later); FlashAttention-2 (arXiv 2307.08691);
even parts of all tiles: stream-K (arXiv 2301.03598).
"""

from __future__ import annotations

import functools
import math
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.attention import flash
from ddtree_numba.attention.flash import (
    ALL,
    combined,
    in_pieces,
    key_range,
    key_tiles,
    log_sum,
    node_and_head,
    own_part,
    own_share,
    parts_of_all,
    prefix_of,
    quotient,
    reciprocal,
    require_workspace,
)
from ddtree_numba.attention.problem import Problem
from ddtree_numba.attention.three_phase import locate, sees
from ddtree_numba.device import runtime
from ddtree_numba.device.arrays import HOST, View, empty, kernel_dtype, view
from ddtree_numba.device.bf16 import array_from_f32, array_to_f32, from_f32
from ddtree_numba.device.bits import element
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
from ddtree_numba.device.ptx import (
    commit_copies,
    copy_async,
    exp2_approx,
    load_matrices,
    load_matrices_transposed,
    multiplied,
    multiply_tiles,
    pack_pair,
    scale_rows,
    store_tiles,
    wait_copies,
)
from ddtree_numba.device.runtime import require_backend
from ddtree_numba.device.tiles import fill
from ddtree_numba.device.warp import fresh_thread, shuffle_xor, warp_sync, warp_votes

R, P = 512, 64  # kv_lora_rank and qk_rope_head_dim, the only ones
D = R + P
WARPS = 8
THREADS = 32 * WARPS
STEP = 16  # columns or keys of one product of matrices
PITCH = D // 2 + 4  # words of a row of queries or keys in shared memory: 16 bytes of padding
OUT_PITCH = R + 4  # float32 of a row of the result there
LAG = np.float32(8.0)
FORMATS = tuple(np.dtype(name) for name in ("uint16", "float16"))  # as kernels see them

ZERO = np.float32(0.0)  # a literal 0.0 would be float64 on the GPU
NEG_INF = np.float32(-np.inf)
ONE = np.float32(1.0)
LN_2 = np.float32(math.log(2.0))
LOG2_E = math.log2(math.e)
NOBODY = np.uint32(0)
SMALLEST = np.uint32(1)  # of divisors: no branch is made for a division by zero


class Tiles(NamedTuple):
    """Sizes of a block's work; eight warps share it."""

    rows: int  # 32 or 64: accumulators take rows * 2 registers of a thread
    keys: int  # 16 or 32
    score_rows: int  # of a warp in phase 2: 16 or 32


LARGE = Tiles(rows=64, keys=32, score_rows=32)
MEDIUM = Tiles(rows=64, keys=32, score_rows=16)
SMALL = Tiles(rows=32, keys=16, score_rows=16)
# Python threads are dear in the simulator.
TILES = (SMALL,) if runtime.SIMULATOR else (LARGE, MEDIUM, SMALL)


def column_shares(tiles: Tiles) -> int:
    """How many warps share the columns of a score."""
    return WARPS // (tiles.rows // tiles.score_rows * (tiles.keys // STEP))


def shared_bytes(tiles: Tiles) -> int:
    """Dynamic shared memory of a block in bytes: query tile, two key tiles, scores, four numbers a row, twelve more."""
    scores = column_shares(tiles) * tiles.rows * (tiles.keys + 4)
    return 4 * ((tiles.rows + 2 * tiles.keys) * PITCH + scores + 4 * tiles.rows + 12)


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
    scale_log2,
    max_seqlen,
    part,
    num_splits,
    part_tiles,
    out,
    lse,
):
    """Both kernels in NumPy: the same phases, roundings and order of additions. Arguments as theirs, on the host."""
    M, N = tiles.rows, tiles.keys
    batch, num_nodes, num_heads, _ = q_nope.shape
    num_pages, page_size, _ = kv_cache.shape
    num_rows = num_nodes * num_heads
    row_tiles = -(-num_rows // M)
    shares = column_shares(tiles)

    # Phase 0: this block's work
    prefixes = np.clip(cache_seqlens, 0, max_seqlen).astype(int)
    counts = [-(-(int(n) + num_nodes) // N) for n in prefixes]
    for b, row_tile, parts in parts_of_all(counts, row_tiles, num_blocks, num_splits, part_tiles):
        rows = np.arange(row_tile * M, min(row_tile * M + M, num_rows))
        i, h = rows // num_heads, rows % num_heads
        q_tile = array_to_f32(np.concatenate([q_nope[b, i, h], q_pe[b, i, h]], axis=1))
        stop = prefixes[b] + num_nodes
        states = []
        for first, last in parts:
            if first == last:
                continue
            ref, l_i, w_i = (np.full(len(rows), x, np.float32) for x in (NEG_INF, ZERO, ZERO))
            acc = np.zeros((len(rows), R), np.float32)
            for tile in range(first, last):
                # Phase 1: the key tile in shared memory
                key = tile * N + np.arange(N)
                live = np.minimum(key, stop - 1)
                page = np.clip(block_table[b, live // page_size], 0, num_pages - 1)
                row = array_to_f32(kv_cache[page, live % page_size])
                row[key >= stop] = 0

                # Phase 2: scores
                s = np.zeros((len(rows), N), np.float32)
                for c in range(0, D, D // shares):
                    columns = slice(c, c + D // shares)
                    s = s + multiplied(q_tile[:, columns], row[:, columns].T, np.zeros_like(s))

                # Phase 3: weights
                s = s * scale_log2
                j = np.clip(key - prefixes[b], 0, num_nodes - 1)
                seen = (tree_mask[b, i][:, j // bits_per_word] >> (j % bits_per_word)) & 1 == 1
                s = np.where((key < prefixes[b]) | seen & (key < stop), s, NEG_INF)
                m = np.fmax.reduce(s, axis=1)
                moved = np.where(m > ref + LAG, m, ref)
                base = np.where(moved == NEG_INF, ZERO, moved)
                p = np.exp2(s - base[:, None])
                w = array_to_f32(array_from_f32(p, kv_cache.dtype))
                scale = np.exp2(ref - base)
                l_i = l_i * scale + sum_of_lanes(p, tiles)
                w_i = w_i * scale + sum_of_lanes(w, tiles)
                ref = moved

                # Phase 4: values
                acc = multiplied(w, row[:, :R], acc * scale[:, None])
            states.append((ref, l_i, w_i, acc))

        # Phase 5: the result, or a state for combine
        if len(states) == 1:
            ref, l, w, acc = states[0]
            m = ref * LN_2
        else:
            m, l, acc = combined(
                [
                    (ref * LN_2, l, acc * np.where(w == ZERO, ZERO, l / np.where(w == ZERO, 1, w))[:, None])
                    for ref, l, w, acc in states
                ]
            )
            w = l
        nothing = l == ZERO
        out[b, i, h] = array_from_f32(
            np.where(nothing[:, None], ZERO, acc / np.where(nothing, 1, w)[:, None]), out.dtype
        )
        lse[b, i, h] = np.where(nothing, NEG_INF, m + np.log(np.where(nothing, 1, l)))


def sum_of_lanes(x, tiles):
    """Sums of rows of weights as the lanes of phase 3 form them."""
    lanes = THREADS // tiles.rows
    pairs = x.reshape(len(x), -1, lanes, 2)
    s = np.add.accumulate(pairs[..., 0] + pairs[..., 1], axis=1)[:, -1]
    while s.shape[1] > 1:
        s = s.reshape(len(s), -1, 2)
        s = s[:, :, 0] + s[:, :, 1]
    return s[:, 0]


@functools.cache
def make_kernel(tiles: Tiles) -> Any:
    """The kernel for these sizes."""
    M, N = tiles.rows, tiles.keys
    Q_LANES, K_LANES = THREADS // M, THREADS // N  # lanes that copy a row
    # Scores: a warp has SCORE_TILES * 16 rows, 16 keys, and a share of the columns.
    SCORE_TILES, ROW_GROUPS, KEY_GROUPS = tiles.score_rows // STEP, M // tiles.score_rows, N // STEP
    SHARES = column_shares(tiles)
    STEPS = D // STEP // SHARES
    SCORES = SCORE_TILES * 2 * 4
    S_PITCH = N + 4  # words of a row of scores; its weights, two a word, take the front of it
    SHARE = M * S_PITCH
    # Weights: LANES lanes a row, PAIRS pairs of neighbouring keys a lane.
    LANES = THREADS // M
    PAIRS = N // (2 * LANES)
    KEYS_OF_LANE = 2 * PAIRS
    # Values: a warp has all rows and 64 columns, a thread a quarter of a row and of the one eight behind it.
    ROW_TILES, COLUMN_TILES = M // STEP, R // WARPS // 8
    ACC = ROW_TILES * COLUMN_TILES * 4
    A_WORDS, B_WORDS, ROWS_OF_THREAD = 4 * ROW_TILES, 2 * COLUMN_TILES, 2 * ROW_TILES
    # Places in shared memory, in words; the result of a run lies over tiles and scores.
    K_TILES = M * PITCH
    S_TILE = K_TILES + 2 * N * PITCH
    REF = S_TILE + SHARES * SHARE
    L_I, W_I, SCALE = REF + M, REF + 2 * M, REF + 3 * M
    assert M * OUT_PITCH <= REF
    # What the block works on, where it takes no registers: request, first row, key tiles, keys.
    REQUEST = REF + 4 * M
    ROW, FIRST, LAST, LEFT, COUNT, PREFIX_LENGTH, STOP = (REQUEST + n for n in range(1, 8))
    SLOT = M * (R + 2)  # of the workspace: a state's accumulators, its maxima, its sums

    @cuda.jit(device=True, inline="always")
    def slot_of(first, num_splits):
        """Where this block leaves a state; with even parts of all work it has two, since a row tile may end in it."""
        block = np.int64(np.uint32(cuda.blockIdx.x))
        if num_splits == 0:
            block += block + (first == 0)
        return block * SLOT

    @cuda.jit(device=True, inline="always")
    def copy_queries(words, q_nope, q_pe, numbers):
        """Send for the query tile; zeros for rows that do not exist."""
        t = np.int32(fresh_thread() & (THREADS - 1))
        r, lane = t // Q_LANES, t % Q_LANES
        b, num_heads = numbers[REQUEST], q_nope.shape[2]
        row, num_rows = numbers[ROW] + r, q_nope.shape[1] * num_heads
        size = np.int32(16)
        if row >= num_rows:
            size = np.int32(0)
        i, h = node_and_head(min(row, num_rows - 1), num_heads)
        at, c = np.int32(r * PITCH + lane * 4), np.int32(lane * 8)
        while c < R:
            copy_async(words, at, q_nope[b, i, h], c, size)
            at, c = np.int32(at + Q_LANES * 4), np.int32(c + Q_LANES * 8)
        while c < D:
            copy_async(words, at, q_pe[b, i, h], c - R, size)
            at, c = np.int32(at + Q_LANES * 4), np.int32(c + Q_LANES * 8)

    @cuda.jit(device=True, inline="always")
    def copy_keys(words, kv_cache, block_table, numbers, tile):
        """Send for a key tile, to the room that its number has; zeros behind the last key."""
        t = np.int32(fresh_thread() & (THREADS - 1))
        r, lane = t // K_LANES, t % K_LANES
        key, stop = np.int32(tile * N + r), numbers[STOP]
        size = np.int32(16)
        if key >= stop:
            size = np.int32(0)
        page_size = max(np.uint32(kv_cache.shape[1]), SMALLEST)
        page, slot = locate(block_table, numbers[REQUEST], min(key, stop - 1), kv_cache.shape[0], page_size)
        row = kv_cache[page, slot]
        at, c = np.int32(K_TILES + ((tile & 1) * N + r) * PITCH + lane * 4), np.int32(lane * 8)
        while c < D:
            copy_async(words, at, row, c, size)
            at, c = np.int32(at + K_LANES * 4), np.int32(c + K_LANES * 8)

    @cuda.jit(device=True, inline="always")
    def score(words, scores, tile, s, a, b, like):
        """Phase 2: this warp's share of its scores."""
        t = np.int32(fresh_thread() & (THREADS - 1))
        warp, lane = t >> 5, t & 31
        row = warp % ROW_GROUPS * SCORE_TILES * STEP
        key = warp // ROW_GROUPS % KEY_GROUPS * STEP
        share = warp // (ROW_GROUPS * KEY_GROUPS)
        # Matrices of A: rows 0 and 8, then the same eight columns on; of B: columns 0 and 8, then eight keys on.
        q_at = np.int32((row + (lane & 15)) * PITCH + (lane >> 4) * 4 + share * STEPS * 8)
        k_row = (tile & 1) * N + key + (lane & 7) + (lane >> 4) * 8
        k_at = np.int32(K_TILES + k_row * PITCH + (lane >> 3 & 1) * 4 + share * STEPS * 8)
        fill(s, 0, SCORES, ZERO)
        for _ in range(STEPS):
            for i in range(SCORE_TILES):
                load_matrices(words, q_at + i * STEP * PITCH, a, 4 * i)
            load_matrices(words, k_at, b, 0)
            multiply_tiles(s, a, b, SCORE_TILES, 2, like)
            q_at, k_at = np.int32(q_at + 8), np.int32(k_at + 8)
        at = S_TILE + share * SHARE + (row + (lane >> 2)) * S_PITCH + key + (lane & 3) * 2
        store_tiles(s, SCORE_TILES, 2, scores, np.int32(at), S_PITCH)

    @cuda.jit(device=True, inline="always")
    def visible(tree_mask, bits_per_word, numbers, row, key, num_heads):
        """Whether a row of the tile sees a key: one of the prefix, or one that the mask shows to its node."""
        j = key - numbers[PREFIX_LENGTH]
        if j < 0:
            return True
        num_nodes = tree_mask.shape[1]
        if j >= num_nodes:
            return False
        i, _ = node_and_head(numbers[ROW] + row, num_heads)
        return sees(tree_mask, bits_per_word, numbers[REQUEST], min(i, num_nodes - 1), j)

    @cuda.jit(device=True, inline="always")
    def weigh(words, scores, tile, p, scale_log2, tree_mask, bits_per_word, numbers, num_heads, like):
        """Phase 3: rounded weights over the scores; the rows' references, sums, and factors for what was before."""
        t = np.int32(fresh_thread() & (THREADS - 1))
        row, lane = t // LANES, t % LANES
        at = S_TILE + row * S_PITCH
        masked = (tile + 1) * N > numbers[PREFIX_LENGTH]
        m = NEG_INF
        for n in range(KEYS_OF_LANE):
            key = n // 2 * 2 * LANES + lane * 2 + n % 2
            s = scores[at + key]
            for share in range(1, SHARES):
                s += scores[at + share * SHARE + key]
            s *= scale_log2
            if masked and not visible(tree_mask, bits_per_word, numbers, row, tile * N + key, num_heads):
                s = NEG_INF
            p[n] = s
            m = max(m, s)
        other = 1
        while other < LANES:
            m = max(m, shuffle_xor(m, np.int32(other)))
            other *= 2
        ref = scores[REF + row]
        moved = ref
        if m > ref + LAG:
            moved = m
        base = moved
        if moved == NEG_INF:
            base = ZERO  # nothing seen yet: each weight becomes exp2(-inf) = 0, where -inf - -inf would be NaN
        warp_sync()  # all lanes of the row have read its scores and its reference
        l, w = ZERO, ZERO
        for n in range(PAIRS):
            low, high = exp2_approx(p[2 * n] - base), exp2_approx(p[2 * n + 1] - base)
            pair = pack_pair(low, high, like)
            words[at + n * LANES + lane] = pair
            l += low + high
            w += element(pair, 0, like) + element(pair, 1, like)
        other = 1
        while other < LANES:
            l += shuffle_xor(l, np.int32(other))
            w += shuffle_xor(w, np.int32(other))
            other *= 2
        if lane == 0:
            scale = exp2_approx(ref - base)
            scores[REF + row] = moved
            scores[SCALE + row] = scale
            scores[L_I + row] = scores[L_I + row] * scale + l
            scores[W_I + row] = scores[W_I + row] * scale + w

    @cuda.jit(device=True, inline="always")
    def accumulate(words, scores, tile, acc, a, b, factors, like):
        """Phase 4: the weighted values of the key tile, added to the scaled accumulators."""
        t = np.int32(fresh_thread() & (THREADS - 1))
        warp, lane = t >> 5, t & 31
        moved = False
        for n in range(ROWS_OF_THREAD):
            factors[n] = scores[SCALE + (lane >> 2) + 8 * n]
            moved = moved or factors[n] != ONE
        if warp_votes(moved) != NOBODY:
            scale_rows(acc, factors, ROW_TILES, COLUMN_TILES)
        w_at = np.int32(S_TILE + (lane & 15) * S_PITCH + (lane >> 4) * 4)
        # Matrices of B, transposed when they are loaded: keys 0 and 8, then the same eight columns on.
        v_row = (tile & 1) * N + (lane & 15)
        v_at = np.int32(K_TILES + v_row * PITCH + warp * (R // WARPS // 2) + (lane >> 4) * 4)
        for _ in range(N // STEP):
            for i in range(ROW_TILES):
                load_matrices(words, w_at + i * STEP * S_PITCH, a, 4 * i)
            for j in range(COLUMN_TILES // 2):
                load_matrices_transposed(words, v_at + j * 8, b, 4 * j)
            multiply_tiles(acc, a, b, ROW_TILES, COLUMN_TILES, like)
            w_at, v_at = np.int32(w_at + 8), np.int32(v_at + STEP * PITCH)

    @cuda.jit(device=True, inline="always")
    def start_rows(scores):
        """A thread a row: nothing seen."""
        row = np.int32(fresh_thread() & (THREADS - 1))
        if row < M:
            scores[REF + row] = NEG_INF
            scores[L_I + row] = ZERO
            scores[W_I + row] = ZERO

    @cuda.jit(device=True, inline="always")
    def store_result(scores, acc):
        """The accumulators as rows of R columns at the front of shared memory."""
        t = np.int32(fresh_thread() & (THREADS - 1))
        warp, lane = t >> 5, t & 31
        at = (lane >> 2) * OUT_PITCH + warp * (R // WARPS) + (lane & 3) * 2
        store_tiles(acc, ROW_TILES, COLUMN_TILES, scores, np.int32(at), OUT_PITCH)

    @cuda.jit(device=True, inline="always")
    def write_rows(scores, out, lse, numbers):
        """Phase 5: a complete state as rows of out and lse."""
        t = np.int32(fresh_thread() & (THREADS - 1))
        warp, lane = t >> 5, t & 31
        b, num_heads = numbers[REQUEST], out.shape[2]
        r = warp
        while r < M and numbers[ROW] + r < out.shape[1] * num_heads:
            i, h = node_and_head(numbers[ROW] + r, num_heads)
            w = scores[W_I + r]
            share = reciprocal(w)
            d = lane
            while d < R:
                value = ZERO
                if w != ZERO:
                    value = quotient(scores[r * OUT_PITCH + d], w, share)
                out[b, i, h, d] = from_f32(value, out)
                d += 32
            if lane == 0:
                lse[b, i, h] = log_sum(scores[REF + r] * LN_2, scores[L_I + r])
            r += WARPS

    @cuda.jit(device=True, inline="always")
    def write_state(scores, workspace, slot):
        """Phase 5: a state for combine, its accumulators such that l_i is their sum of weights."""
        t = np.int32(fresh_thread() & (THREADS - 1))
        warp, lane = t >> 5, t & 31
        r = warp
        while r < M:
            l = scores[L_I + r]
            share = l * reciprocal(scores[W_I + r])
            d = lane
            while d < R:
                workspace[slot + r * R + d] = scores[r * OUT_PITCH + d] * share
                d += 32
            if lane == 0:
                workspace[slot + M * R + r] = scores[REF + r] * LN_2
                workspace[slot + M * (R + 1) + r] = l
            r += WARPS

    @cuda.jit(device=True, inline="always")
    def write_empty_state(workspace, slot):
        """Phase 5 of a part without keys, a thread a row."""
        row = np.int32(fresh_thread() & (THREADS - 1))
        if row < M:
            workspace[slot + M * R + row] = NEG_INF
            workspace[slot + M * (R + 1) + row] = ZERO

    @jit(launch_bounds=(THREADS, 1))
    def kernel(
        q_nope,
        q_pe,
        kv_cache,
        block_table,
        cache_seqlens,
        tree_mask,
        bits_per_word,
        scale_log2,
        max_seqlen,
        part,
        num_splits,
        part_tiles,
        workspace,
        out,
        lse,
    ):
        """Block n of N; with num_splits > 0 a block for each part of each row tile, else N even parts of all work."""
        num_nodes, num_heads = q_nope.shape[1], q_nope.shape[2]
        t = cuda.threadIdx.x
        # gpu: all dynamic arrays are one, sliced by the places above; sums come ahead of the first tile. Matrices and
        # copies take addresses that are multiples of 16.
        words = cuda.shared.array(0, types.uint32, alignment=16)
        scores = cuda.shared.array(0, types.float32, alignment=16)
        sums = cuda.shared.array(0, types.int64, alignment=16)
        numbers = cuda.shared.array(0, types.int32, alignment=16)
        acc = cuda.local.array(ACC, types.float32)
        s = cuda.local.array(SCORES, types.float32)
        a = cuda.local.array(A_WORDS, types.uint32)
        b_words = cuda.local.array(B_WORDS, types.uint32)
        p = cuda.local.array(KEYS_OF_LANE, types.float32)
        factors = cuda.local.array(ROWS_OF_THREAD, types.float32)
        row_tiles = (num_nodes * num_heads + M - 1) // M

        # Phase 0: this block's work
        if num_splits > 0:
            b, row_tile, first, left = own_part(
                cache_seqlens, row_tiles, max_seqlen, num_nodes, part, num_splits, part_tiles, N
            )
            if left == 0:
                write_empty_state(workspace, slot_of(first, num_splits))
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
                _, numbers[STOP] = key_range(cache_seqlens, b, max_seqlen, num_nodes, part)
            start_rows(scores)
            cuda.syncthreads()
            copy_queries(words, q_nope, q_pe, numbers)
            copy_keys(words, kv_cache, block_table, numbers, numbers[FIRST])
            commit_copies()
            fill(acc, 0, ACC, ZERO)

            tile = numbers[FIRST]
            while tile < numbers[LAST]:
                # Phase 1: the key tile in shared memory
                wait_copies(0)
                cuda.syncthreads()  # gpu: all threads' copies are there, and nobody reads the other room any more
                if tile + 1 < numbers[LAST]:
                    copy_keys(words, kv_cache, block_table, numbers, np.int32(tile + 1))
                    commit_copies()

                # Phase 2: scores
                score(words, scores, tile, s, a, b_words, q_nope)
                cuda.syncthreads()

                # Phase 3: weights
                weigh(words, scores, tile, p, scale_log2, tree_mask, bits_per_word, numbers, num_heads, q_nope)
                cuda.syncthreads()

                # Phase 4: values
                accumulate(words, scores, tile, acc, a, b_words, factors, q_nope)
                tile = np.int32(tile + 1)

            # Phase 5: the result, or a state for combine
            cuda.syncthreads()  # gpu: nobody reads the tiles any more
            store_result(scores, acc)
            cuda.syncthreads()
            if numbers[FIRST] == 0 and numbers[LAST] == numbers[COUNT]:
                write_rows(scores, out, lse, numbers)
            else:
                write_state(scores, workspace, slot_of(numbers[FIRST], num_splits))
            cuda.syncthreads()
            if t == 0:
                numbers[LEFT] -= numbers[LAST] - numbers[FIRST]
                numbers[FIRST] = 0
                numbers[ROW] += M
                if numbers[ROW] >= num_nodes * num_heads:
                    numbers[ROW] = 0
                    numbers[REQUEST] += 1
            cuda.syncthreads()

    return kernel


def make_combine(tiles: Tiles) -> Any:
    """The kernel that merges the states of row tiles that were split: that of flash, told our rows and keys."""
    as_flash = flash.SMALL._replace(rows=tiles.rows, keys=tiles.keys)
    return flash.make_combine(flash.Shape(as_flash, R, D, 1))


class Plan(NamedTuple):
    """How a call is shared out: the grid, and what the kernels are told of it."""

    tiles: Tiles
    num_blocks: int
    num_splits: int  # 0: even parts of all work
    part_tiles: int  # 0: even parts of each row tile
    slots: int  # states that the workspace must hold

    @property
    def workspace_floats(self) -> int:
        return max(self.slots * self.tiles.rows * (R + 2), 4)


def fitting_tiles(device: int) -> list[Tiles]:
    """Those that a GPU has the shared memory for, the best first; none if it lacks the instructions."""
    if compute_capability(device) < (8, 0):
        return []
    return [tiles for tiles in TILES if shared_bytes(tiles) <= shared_bytes_limit(device)]


def make_plan(
    batch: int,
    num_nodes: int,
    num_heads: int,
    kv_lora_rank: int,
    head_dim: int,
    max_seqlen: int,
    *,
    device: int,
    num_splits: int | None,
    batch_invariant: bool,
) -> Plan:
    """Choose tiles and grid from sizes and the GPU alone; lengths are not known here.

    Raises
    ------
    ValueError
        Other widths than R and P, a GPU without the instructions, or more parts than a grid holds.
    """
    if (kv_lora_rank, head_dim) != (R, D):
        raise ValueError(
            f"variant 'mma' takes kv_lora_rank = {R} and D = {D} alone (here they are {kv_lora_rank} and {head_dim}); "
            "variant 'flash' takes others"
        )
    fitting = fitting_tiles(device)
    if not fitting:
        raise ValueError(
            "variant 'mma' needs compute capability 8.0 or later and "
            f"{shared_bytes(TILES[-1])} bytes of shared memory, which {device_name(device)} does not have"
        )
    tiles = fitting[0]
    row_tiles = -(-num_nodes * num_heads // tiles.rows)
    most_tiles = -(-(num_nodes + max_seqlen) // tiles.keys)
    part_tiles = 0
    if num_splits is None and batch_invariant:
        part_tiles = flash.CHUNK // tiles.keys
        num_splits = -(-most_tiles // part_tiles)
    if num_splits is None:
        num_blocks = min(multiprocessors(device), batch * row_tiles * most_tiles)
        return Plan(tiles, num_blocks, 0, 0, 2 * num_blocks)
    num_blocks = batch * row_tiles * num_splits
    if num_blocks >= 2**31:
        most = (2**31 - 1) // max(batch * row_tiles, 1)
        raise ValueError(f"num_splits is {num_splits}; a grid holds at most {most} for {batch * row_tiles} row tiles")
    return Plan(tiles, num_blocks, num_splits, part_tiles, num_blocks if num_splits > 1 else 0)


def plan_of(problem: Problem, num_splits: int | None, batch_invariant: bool) -> Plan:
    """`make_plan` for checked arguments, of formats and strides that the kernel takes.

    Raises
    ------
    TypeError
        q and the cache are not both bfloat16 or both float16.
    ValueError
        As `make_plan`, or the workspace is too small, or rows cannot be read 16 bytes at a time.
    """
    plan = make_plan(
        problem.batch,
        problem.num_nodes,
        problem.num_heads,
        problem.kv_lora_rank,
        problem.head_dim,
        problem.max_seqlen,
        device=problem.q_nope.device,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
    )
    q, cache = problem.q_nope, problem.kv_cache
    if not same_format(problem):
        raise TypeError(
            "variant 'mma' takes q and kv_cache both bfloat16 or both float16; "
            f"here they are {q.dtype} and {cache.dtype}"
        )
    for x in unreadable(problem):
        raise ValueError(
            f"{x} has strides {x.strides} in bytes, at an address {x.pointer % 16} above a multiple of 16; variant "
            "'mma' reads 16 bytes at a time: the last axis must be contiguous, address and strides multiples of 16"
        )
    require_workspace(problem, plan.workspace_floats)
    return plan


def takes(problem: Problem) -> bool:
    """Whether `plan_of` would refuse nothing but a workspace or a number of splits."""
    widths = takes_widths(problem.kv_lora_rank, problem.head_dim, problem.q_nope.device)
    return widths and same_format(problem) and not unreadable(problem)


def takes_widths(kv_lora_rank: int, head_dim: int, device: int) -> bool:
    """Whether they are R and D, and a GPU has the instructions and the memory."""
    return (kv_lora_rank, head_dim) == (R, D) and bool(fitting_tiles(device))


def same_format(problem: Problem) -> bool:
    """Whether q and the cache are both bfloat16 or both float16."""
    q, cache = (kernel_dtype(x.dtype) for x in (problem.q_nope, problem.kv_cache))
    return q in FORMATS and q == cache


def unreadable(problem: Problem) -> list[View]:
    """Arrays whose rows cannot be read 16 bytes at a time."""
    given = (problem.q_nope, problem.q_pe, problem.kv_cache)
    return [x for x in given if 0 not in x.shape and not in_pieces(x, 16)]


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
    workspace = problem.workspace
    if workspace is None:
        workspace = view(
            "workspace", empty(problem.q_nope, (plan.workspace_floats,), np.dtype(np.float32), "workspace")
        )
    head, tail = arguments(problem, plan)
    results = (workspace, problem.out, problem.lse)
    launch(
        make_kernel(plan.tiles),
        (plan.num_blocks, 1, 1),
        THREADS,
        (*head, *tail, *results),
        results=3,
        shared_bytes=shared_bytes(plan.tiles),
    )
    if plan.num_splits != 1:
        rows = problem.num_nodes * problem.num_heads
        blocks = (-(-rows // flash.COMBINE_ROWS), problem.batch, 1)
        lengths = replace(problem.cache_seqlens, kind=problem.q_nope.kind)  # whose stream it is
        args = (lengths, *tail, np.int32(plan.num_blocks), *results)
        launch(make_combine(plan.tiles), blocks, 32 * flash.COMBINE_ROWS, args, results=3, shared_bytes=0)


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
        np.float32(problem.sm_scale * LOG2_E),
    )
    splits = map(np.int32, (ALL, plan.num_splits, plan.part_tiles))
    return head, (np.int32(problem.max_seqlen), *splits)


def run_mirror(problem: Problem, plan: Plan) -> None:
    """Run the mirror on host arrays.

    Raises
    ------
    ValueError
        The arguments lie on a GPU.
    """
    if problem.q_nope.device != HOST:
        raise ValueError(f"variant 'mma_numpy' works on host arrays; {problem.q_nope} is on a GPU")
    head, tail = arguments(problem, plan)
    given = (a.as_numpy() if isinstance(a, View) else a for a in (*head, *tail, problem.out, problem.lse))
    mirror(plan.tiles, plan.num_blocks, *given)
