"""Variant ``wgmma``: tree-verify MLA attention on Hopper's tensor cores (sm_90a), kv_lora_rank 512, rope 64.

DRAFT: compiled, not run.

A block of three warpgroups owns 64 rows of (node, head) and goes over key tiles of 64 in pairs, A (even) and B (odd):

- warpgroup 0: scores and softmax of A, output columns 0 .. 255
- warpgroup 1: scores and softmax of B, output columns 256 .. 511
- warpgroup 2: two threads that copy tiles, one for queries and A, one for B

The tensor pipe is kept in this order, by two named barriers: QK(A) | QK(B) | PV(A) | PV(B) | QK(next A) ..., so that
softmax(A) runs under QK(B), softmax(B) under PV(A), and copies under both. Probabilities are taken relative to a
reference of the row that moves only where a score exceeds it by 2**8: no warpgroup waits for the other's maximum, and
accumulators are almost never rescaled.

Source: FlashMLA's seesaw (github.com/deepseek-ai/FlashMLA, docs); FlashAttention-4 for the lazy reference.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.attention import schedule
from ddtree_numba.device import hopper
from ddtree_numba.device.bf16 import f32_to_bf16
from ddtree_numba.device.warp import fresh_thread
from ddtree_numba.device.hopper import (
    acquire_map,
    address,
    async_fence,
    clear_shared,
    copy_box,
    descriptor,
    exp_tile,
    exp_tile_in_place,
    factor,
    inverses,
    keep_map,
    load_shared,
    log_sums,
    make_pack_tile,
    make_store_halves,
    make_undefined,
    make_wait,
    make_wgmma,
    make_zeros,
    mask_tile,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_fence,
    mbarrier_init,
    mbarrier_wait,
    moved,
    named_arrive,
    named_sync,
    quad_max,
    quad_sum,
    raised,
    rows_add,
    rows_max,
    rows_times,
    scale_tile,
    shared_address,
    store_floats,
    store_matrices,
    store_shared,
    tile_max,
    tile_sum,
)

THREADS = 384
LAUNCH_BOUNDS = (THREADS, 1)
PRODUCER, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 256, 240, 24

# Shared memory, bytes: queries | keys of A | keys of B | probabilities of B | references | exchange | mbarriers.
BOX = 64 * 128  # 64 rows of 64 columns, 128-byte swizzle
TILE = 9 * BOX
ROPE = 8 * BOX  # the box of columns that are no values
KEYS_A, KEYS_B = TILE, 2 * TILE
PROBS_A, PROBS_B = KEYS_A + ROPE, 3 * TILE  # probabilities of A take the place of its rope box
REFERENCE_A, REFERENCE_B = PROBS_B + BOX, PROBS_B + BOX + 256
EXCHANGE = REFERENCE_B + 256  # twice: sums of warpgroups 0 and 1, their references, 64 floats each
BARRIERS = EXCHANGE + 2048
SHARED_BYTES = BARRIERS + 256
QUERY_FULL, QUERY_FREE, FULL_A, FULL_B, LEFT_FREE_A, LEFT_FREE_B, RIGHT_FREE_A, RIGHT_FREE_B = (
    *(0, 8, 16, 88, 160, 168, 176, 184),
)

# Named barriers.
P_A_READY, P_B_READY, SUMS, ALONE_0, ALONE_1, QK_A_ISSUED, QK_B_ISSUED = 1, 2, 3, 5, 6, 7, 8

PIECE_FIELDS = 6  # request, row tile, first key tile, key tiles (0: the end), slot or -1
MODE, RUN, LENGTH, SHARE, CUT, STARTS = 0, 1, 2, 3, 4, 8  # of the plan

ZERO, SLACK = np.float32(0.0), np.float32(8.0)
LOWEST = np.float32(-1e30)  # the reference of a row that has seen no key
ALL = 0xFFFFFFFF
u64, i64, u32, i32 = types.uint64, types.int64, types.uint32, types.int32

device = cuda.jit(device=True, inline="always")
key_tiles, count_of, slot_of = map(device, (schedule.key_tiles, schedule.count_of, schedule.slot_of))
hopper_release = hopper.instruction("fence.proxy.tensormap::generic.release.gpu;")


@device
def over(a, b):
    """a // b of numbers that are not negative; signed division takes a call, and wgmma then waits for itself."""
    return i32(u32(a) // u32(b))


@device
def warp_sum(x):
    for lanes in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(ALL, x, lanes)
    return x


@device
def warp_scan(x, lane):
    """The sum of the lanes up to this one."""
    for lanes in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(ALL, x, lanes)
        if lane >= lanes:
            x += other
    return x


@device
def tiles_of(lengths, b, num_nodes, max_seqlen):
    """Key tiles of request b, 0 behind the last request."""
    if b < lengths.shape[0]:
        return i32(key_tiles(lengths[b], num_nodes, max_seqlen))
    return i32(0)


@device
def runs_in_all(lengths, num_nodes, max_seqlen, run, lane):
    """Runs of so many tiles in all requests."""
    total = i32(0)
    first = 0
    while first < lengths.shape[0]:
        total += over(tiles_of(lengths, first + lane, num_nodes, max_seqlen) + run - 1, run)
        first += 32
    return warp_sum(total)


@device
def write_piece(pieces, c, n, b, row_tile, first, count, slot):
    pieces[c, n, 0] = b
    pieces[c, n, 1] = row_tile
    pieces[c, n, 2] = first
    pieces[c, n, 3] = count
    pieces[c, n, 4] = slot


@device
def line_pieces(lengths, num_nodes, max_seqlen, pieces, c, n, row_tile, low, high, length, share, cut, row_tiles, lane):
    """Write the pieces of a line from low to high; n is how many the block has. Returns how many it has then."""
    blocks = cuda.gridDim.x
    before = i32(0)
    first = 0
    while first < lengths.shape[0] and before < high:
        tiles = tiles_of(lengths, first + lane, num_nodes, max_seqlen)
        end = before + warp_scan(tiles, lane)
        begin = end - tiles
        at = max(begin, low)
        stop = min(end, high)
        there = at < stop
        votes = cuda.ballot_sync(ALL, there)
        if there:
            place = n + cuda.popc(votes & ((1 << lane) - 1))
            slot = -1
            if at > begin or stop < end:
                count = count_of(u32(row_tile), u32(at), u32(length), u32(share), u32(cut), u32(row_tiles))
                slot = i32(slot_of(u32(count), u32(at), u32(begin), u32(share), u32(cut), u32(row_tile), u32(blocks)))
            write_piece(pieces, c, place, first + lane, row_tile, at - begin, stop - at, slot)
        n += cuda.popc(votes)
        before = cuda.shfl_sync(ALL, end, 31)
        first += 32
    return n


@device
def plan_pieces(lengths, num_nodes, max_seqlen, row_tiles, pieces, plan, lane):
    """Phase 0, one warp: from the lengths, this block's pieces; block 0 leaves the plan for `combine`."""
    c = cuda.blockIdx.x
    blocks = cuda.gridDim.x
    num_requests = lengths.shape[0]
    length = i32(0)
    longest = i32(0)
    first = 0
    while first < num_requests:
        tiles = tiles_of(lengths, first + lane, num_nodes, max_seqlen)
        length += tiles
        longest = max(longest, tiles)
        first += 32
    length = warp_sum(length)
    for lanes in (16, 8, 4, 2, 1):
        longest = max(longest, cuda.shfl_xor_sync(ALL, longest, lanes))
    share = over(length * row_tiles + blocks - 1, blocks)
    cut = min(over(blocks, row_tiles), over(length, share)) * share
    run = i32(0)
    if num_requests * row_tiles <= blocks:
        low = i32(1)
        high = longest
        while low < high:
            middle = (low + high) >> 1
            if runs_in_all(lengths, num_nodes, max_seqlen, middle, lane) * row_tiles <= blocks:
                high = middle
            else:
                low = middle + 1
        even = low * schedule.TILE + schedule.PIECE
        if low < longest:
            even += schedule.MERGE
        if even <= share * schedule.TILE + 2 * schedule.PIECE + schedule.MERGE:
            run = low

    n = i32(0)
    if run > 0:
        before = i32(0)
        first = 0
        while first < num_requests:
            tiles = tiles_of(lengths, first + lane, num_nodes, max_seqlen)
            runs = over(tiles + run - 1, run)
            end = before + warp_scan(runs, lane)
            mine = c - (end - runs) * row_tiles
            if mine >= 0 and mine < runs * row_tiles:
                index = over(mine, row_tiles)
                at = index * run
                slot = c if runs > 1 else -1
                write_piece(pieces, c, 0, first + lane, mine - index * row_tiles, at, min(run, tiles - at), slot)
            if c == 0 and first + lane < num_requests:
                plan[STARTS + first + lane] = end - runs
            before = cuda.shfl_sync(ALL, end, 31)
            first += 32
        n = i32(1) if c < before * row_tiles else i32(0)
        length = before
    else:
        if c < over(cut, share) * row_tiles:
            team = over(c, row_tiles)
            low = team * share
            n = line_pieces(
                lengths, num_nodes, max_seqlen, pieces, c, n, c - team * row_tiles, low, low + share, length, share, cut,
                row_tiles, lane,
            )  # fmt: skip
        else:
            rest = length - cut
            low = c * share - cut * row_tiles
            high = min(low + share, rest * row_tiles)
            while low < high:
                row_tile = over(low, rest)
                begin = row_tile * rest
                stop = min(high, begin + rest)
                n = line_pieces(
                    lengths, num_nodes, max_seqlen, pieces, c, n, row_tile, cut + low - begin, cut + stop - begin,
                    length, share, cut, row_tiles, lane,
                )  # fmt: skip
                low = stop
        if c == 0:
            before = i32(0)
            first = 0
            while first < num_requests:
                tiles = tiles_of(lengths, first + lane, num_nodes, max_seqlen)
                end = before + warp_scan(tiles, lane)
                if first + lane < num_requests:
                    plan[STARTS + first + lane] = end - tiles
                before = cuda.shfl_sync(ALL, end, 31)
                first += 32
    if lane == 0:
        if n < pieces.shape[1]:
            pieces[c, n, 3] = 0
        if c == 0:
            plan[RUN] = run
            plan[LENGTH] = length
            plan[SHARE] = share
            plan[CUT] = cut
            plan[STARTS + num_requests] = length


@device
def seen_by(mask, bits_per_word, b, node, first, num_nodes, column):
    """Which of a tile's keys a node sees, bit c for key c, of which only those of this lane's columns must be right.

    first : tree column of the tile's key 0; keys below 0 are of the prefix.
    column : the lane's first column of each 8.
    """
    found = u64(0)
    if bits_per_word == 32:
        start = max(first, 0)
        word = start >> 5
        shift = u64(start & 31)
        num_words = mask.shape[2]
        if word < num_words:
            found = u64(mask[b, node, word])
        if word + 1 < num_words:
            found |= u64(mask[b, node, word + 1]) << u64(32)
        found >>= shift
        if word + 2 < num_words and shift > u64(0):
            found |= u64(mask[b, node, word + 2]) << (u64(64) - shift)
        if num_nodes - start < 64:
            found &= (u64(1) << u64(max(num_nodes - start, 0))) - u64(1)
        if first < 0:
            found = found << u64(-first) | ((u64(1) << u64(-first)) - u64(1))
    else:
        for m in range(8):
            for e in range(2):
                c = 8 * m + column + e
                t = first + c
                on = t < 0
                if t >= 0 and t < num_nodes:
                    on = mask[b, node, t] & 1 != 0
                if on:
                    found |= u64(1) << u64(c)
    return found >> u64(column)


@device
def masked(s, mask, bits_per_word, pieces, c, n, num_heads, num_nodes, tree):
    """Scores of a tile whose first key is tree column ``tree``, -inf where a row's node does not see a key."""
    b = pieces[c, n, 0]
    first = pieces[c, n, 1] * 64 + row_here()
    column = (lane_here() & 3) * 2
    node = min(over(first, num_heads), num_nodes - 1)
    other = min(over(first + 8, num_heads), num_nodes - 1)
    seen = seen_by(mask, bits_per_word, b, node, tree, num_nodes, column)
    return mask_tile(s, (seen, seen_by(mask, bits_per_word, b, other, tree, num_nodes, column)))


# Where a thread is, worked out anew wherever it is needed: kept, it would take registers throughout.


@device
def lane_here():
    return i32(fresh_thread()) & 31


@device
def row_here():
    """This thread's first row of a fragment; the other one is 8 below."""
    t = i32(fresh_thread())
    return (t >> 5 & 3) * 16 + (t >> 2 & 7)


@device
def keep_probabilities(p, at):
    """A tile of probabilities to the other warpgroup's reach."""
    t = i32(fresh_thread())
    store_matrices(p, at + ((t >> 5 & 3) * 16 + (t & 15)) * 128, t >> 4 & 1, t & 7)


@device
def keep_pair(at, pair):
    """A value of each of this thread's rows, from the lane that holds the first columns."""
    if lane_here() & 3 == 0:
        at += row_here() * 4
        store_shared(at, pair[0])
        store_shared(at + 32, pair[1])


@device
def pair_at(at):
    at += row_here() * 4
    return load_shared(at), load_shared(at + 32)


@device
def clear_rows(tile, live):
    """Zeros for the values of rows behind the last live one: there may be NaN, and 0 * NaN is NaN."""
    t = i32(fresh_thread()) & 127
    row = live + (t >> 3)
    while row < 64:
        for box in range(8):
            clear_shared(tile + box * BOX + row * 128 + (t & 7) * 16)
        row += 16
    async_fence()


@functools.cache
def make_kernel(kind: str, out_kind: str) -> Any:
    """The kernel for inputs of a kind, "bf16" or "f16", and results of one, "f32" too."""

    def at(base, offsets):
        return [base + offset for offset in offsets]

    def qk_of(keys):
        """A wgmma of 64 columns for each box, in the order in which they are taken."""
        boxes = [at(b * BOX, range(0, 128, 32)) for b in range(9)]
        return [make_wgmma(kind, 64, x, at(keys, x), first=b == 0, commit=b in (0, 7)) for b, x in enumerate(boxes)]

    def pv_of(keys, probs, steps=slice(None), commit=True):
        """Values are the transposed view of keys, 16 keys a step; probs None: from registers."""
        a = None if probs is None else at(probs, range(0, 128, 32))[steps]
        return make_wgmma(kind, 256, a, at(keys, range(0, 8192, 2048))[steps], b_transposed=1, commit=commit)

    # All places as offsets from one descriptor of the beginning: registers are scarce.
    qk0_a, qk1_a, qk2_a, qk3_a, qk4_a, qk5_a, qk6_a, qk7_a, qk8_a = qk_of(KEYS_A)
    qk0_b, qk1_b, qk2_b, qk3_b, qk4_b, qk5_b, qk6_b, qk7_b, qk8_b = qk_of(KEYS_B)
    RIGHT = 4 * BOX
    pv_a_left, pv_b_left = pv_of(KEYS_A, None), pv_of(KEYS_B, PROBS_B)
    pv_a_right = pv_of(KEYS_A + RIGHT, PROBS_A)
    pv_a_right_low = pv_of(KEYS_A + RIGHT, PROBS_A, slice(2), commit=False)
    pv_a_right_high = pv_of(KEYS_A + RIGHT, PROBS_A, slice(2, 4))
    pv_b_right = pv_of(KEYS_B + RIGHT, None)
    wait_s, wait_o, wait_o_but_one = make_wait(32), make_wait(128), make_wait(128, 1)
    undefined, zeros = make_undefined(32), make_zeros(128)
    pack_tile = make_pack_tile(kind)
    out_bytes = 4 if out_kind == "f32" else 2
    lane_bytes = 8 if out_kind == "f32" else 16
    store_halves = make_store_halves("bf16" if out_kind == "f32" else out_kind)
    fewer_registers = hopper.fewer_registers(PRODUCER_REGISTERS)
    more_registers = hopper.more_registers(CONSUMER_REGISTERS)
    out_is_float = out_kind == "f32"

    if out_is_float:

        @device
        def store_rows(acc, at, below, inverse, stored, stored_below, quarter):
            store_floats(acc, at, below, inverse, stored, stored_below)

    else:

        @device
        def store_rows(acc, at, below, inverse, stored, stored_below, quarter):
            store_halves(acc, at, below, inverse, stored, stored_below, quarter)

    @device
    def scores_a(s, full, parity, d):
        """The scores of a tile behind its first box, box by box as they arrive; rope before the right half."""
        mbarrier_wait(full + 8, parity)
        s = qk1_a(s, d, d)
        mbarrier_wait(full + 16, parity)
        s = qk2_a(s, d, d)
        mbarrier_wait(full + 24, parity)
        s = qk3_a(s, d, d)
        mbarrier_wait(full + 64, parity)
        s = qk8_a(s, d, d)
        mbarrier_wait(full + 32, parity)
        s = qk4_a(s, d, d)
        mbarrier_wait(full + 40, parity)
        s = qk5_a(s, d, d)
        mbarrier_wait(full + 48, parity)
        s = qk6_a(s, d, d)
        mbarrier_wait(full + 56, parity)
        return qk7_a(s, d, d)

    @device
    def scores_b(s, full, parity, d):
        mbarrier_wait(full + 8, parity)
        s = qk1_b(s, d, d)
        mbarrier_wait(full + 16, parity)
        s = qk2_b(s, d, d)
        mbarrier_wait(full + 24, parity)
        s = qk3_b(s, d, d)
        mbarrier_wait(full + 64, parity)
        s = qk8_b(s, d, d)
        mbarrier_wait(full + 32, parity)
        s = qk4_b(s, d, d)
        mbarrier_wait(full + 40, parity)
        s = qk5_b(s, d, d)
        mbarrier_wait(full + 48, parity)
        s = qk6_b(s, d, d)
        mbarrier_wait(full + 56, parity)
        return qk7_b(s, d, d)

    @device
    def wait_whole(full, parity):
        for i in range(9):
            mbarrier_wait(full + 8 * i, parity)

    @cuda.jit(launch_bounds=LAUNCH_BOUNDS)
    def wgmma(
        q_nope_map, q_pe_map, kv_map, block_table, lengths, mask, bits_per_word, page_size, max_seqlen, num_heads,
        num_nodes, scale, maps, pieces, plan, out, lse, states, state_lses,
    ):  # fmt: skip
        s0 = shared_address(cuda.shared.array(0, types.uint8, alignment=1024))
        t = cuda.threadIdx.x
        warp = t >> 5
        lane = t & 31
        c = cuda.blockIdx.x
        num_rows = num_nodes * num_heads
        row_tiles = (num_rows + 63) >> 6
        bar = s0 + BARRIERS

        # Phase 0: what this block has to do
        if t == 32:
            mbarrier_init(bar + QUERY_FULL, 1)
            mbarrier_init(bar + QUERY_FREE, 8)
            for i in range(18):
                mbarrier_init(bar + FULL_A + 8 * i, 1)
            for i in range(4):
                mbarrier_init(bar + LEFT_FREE_A + 8 * i, 4)
            mbarrier_fence()
        if warp == 0:
            plan_pieces(lengths, num_nodes, max_seqlen, row_tiles, pieces, plan, lane)
        cuda.syncthreads()
        num_pieces = pieces.shape[1]

        # Phase 1: copies
        if warp >= 8:
            fewer_registers()
            map_at = address(maps) + i64(c) * 512
            if t == PRODUCER:
                keep_map(map_at, q_nope_map)
                keep_map(map_at + 128, q_pe_map)
                keep_map(map_at + 256, kv_map)
                hopper_release()
                acquire_map(map_at)
                acquire_map(map_at + 128)
                acquire_map(map_at + 256)
                map_at += 256
                u = 0
                n = i32(0)
                while n < num_pieces:
                    count = pieces[c, n, 3]
                    if count == 0:
                        break
                    b = pieces[c, n, 0]
                    row_tile = pieces[c, n, 1]
                    first = pieces[c, n, 2]
                    if n > 0:
                        mbarrier_wait(bar + QUERY_FREE, (n - 1) & 1)
                    mbarrier_expect(bar + QUERY_FULL, TILE)
                    for i in range(8):
                        copy_box(s0 + i * BOX, map_at - 256, bar + QUERY_FULL, i * 64, row_tile * 64, b)
                    copy_box(s0 + ROPE, map_at - 128, bar + QUERY_FULL, 0, row_tile * 64, b)
                    j = first
                    while j < first + count:
                        entry = over(j * 64, page_size)
                        row = j * 64 - entry * page_size
                        page = block_table[b, entry]
                        if u > 0:
                            mbarrier_wait(bar + LEFT_FREE_A, (u - 1) & 1)
                        for i in range(4):
                            mbarrier_expect(bar + FULL_A + 8 * i, BOX)
                            copy_box(s0 + KEYS_A + i * BOX, map_at, bar + FULL_A + 8 * i, i * 64, row, page)
                        if u > 0:
                            mbarrier_wait(bar + RIGHT_FREE_A, (u - 1) & 1)
                        mbarrier_expect(bar + FULL_A + 64, BOX)
                        copy_box(s0 + KEYS_A + ROPE, map_at, bar + FULL_A + 64, 512, row, page)
                        for i in range(4, 8):
                            mbarrier_expect(bar + FULL_A + 8 * i, BOX)
                            copy_box(s0 + KEYS_A + i * BOX, map_at, bar + FULL_A + 8 * i, i * 64, row, page)
                        u += 1
                        j = i32(j + 2)
                    n = i32(n + 1)
            if t == PRODUCER + 32:
                map_at += 384
                keep_map(map_at, kv_map)
                hopper_release()
                acquire_map(map_at)
                u = 0
                n = i32(0)
                while n < num_pieces:
                    count = pieces[c, n, 3]
                    if count == 0:
                        break
                    b = pieces[c, n, 0]
                    first = pieces[c, n, 2]
                    j = first + 1
                    while j < first + count:
                        entry = over(j * 64, page_size)
                        row = j * 64 - entry * page_size
                        page = block_table[b, entry]
                        if u > 0:
                            mbarrier_wait(bar + LEFT_FREE_B, (u - 1) & 1)
                        for i in range(4):
                            mbarrier_expect(bar + FULL_B + 8 * i, BOX)
                            copy_box(s0 + KEYS_B + i * BOX, map_at, bar + FULL_B + 8 * i, i * 64, row, page)
                        mbarrier_expect(bar + FULL_B + 64, BOX)
                        copy_box(s0 + KEYS_B + ROPE, map_at, bar + FULL_B + 64, 512, row, page)
                        if u > 0:
                            mbarrier_wait(bar + RIGHT_FREE_B, (u - 1) & 1)
                        for i in range(4, 8):
                            mbarrier_expect(bar + FULL_B + 8 * i, BOX)
                            copy_box(s0 + KEYS_B + i * BOX, map_at, bar + FULL_B + 8 * i, i * 64, row, page)
                        u += 1
                        j = i32(j + 2)
                    n = i32(n + 1)
            return  # in here: code of the consumers behind this would get the producers' registers

        dq = descriptor(s0, 16, 1024)  # for what has its columns in a row: queries, keys, probabilities
        dv = descriptor(s0, 8192, 1024)  # for values
        more_registers()
        if warp < 4:
            # Warpgroup 0: tiles A, columns 0 .. 255
            full = bar + FULL_A
            u = 0
            n = i32(0)
            while n < num_pieces:
                count = pieces[c, n, 3]
                if count == 0:
                    break
                # Keys of the prefix from the piece's first tile on. The rest is read anew where it is needed: registers
                # are scarce.
                ahead = min(max(lengths[pieces[c, n, 0]], 0), max_seqlen) - pieces[c, n, 2] * 64
                o = wait_o(zeros())
                ro = (LOWEST, LOWEST)  # reference of o and l
                rp = (LOWEST, LOWEST)  # of the next probabilities
                l = (ZERO, ZERO)
                mbarrier_wait(bar + QUERY_FULL, n & 1)
                live = ahead + num_nodes
                if live < 64:
                    wait_whole(full, u & 1)
                    clear_rows(s0 + KEYS_A, live)
                    named_sync(ALONE_0, 128)
                mbarrier_wait(full, u & 1)
                s = scores_a(qk0_a(undefined(), dq, dq), full, u & 1, dq)
                if count > 1:
                    named_arrive(QK_A_ISSUED, 256)
                s = wait_s(s)
                u += 1
                j = i32(0)
                while j < count:
                    if j + 2 >= count:
                        if lane_here() == 0:
                            mbarrier_arrive(bar + QUERY_FREE)
                    # softmax of A, under QK(B)
                    tree = j * 64 - ahead
                    if tree > -64:
                        s = masked(s, mask, bits_per_word, pieces, c, n, num_heads, num_nodes, tree)
                    x = exp_tile(s, rp, scale)
                    m = tile_max(s)
                    if cuda.any_sync(ALL, m[0] * scale > rp[0] + SLACK or m[1] * scale > rp[1] + SLACK):
                        rp = raised(rp, quad_max(m), scale)
                        x = exp_tile(s, rp, scale)
                    p = pack_tile(x)
                    if cuda.any_sync(ALL, rp[0] != ro[0] or rp[1] != ro[1]):
                        f = factor(ro, rp)
                        ro = moved(ro, rp)
                        o = scale_tile(o, f)
                        l = rows_times(l, f)
                    if j + 1 < count:
                        named_sync(QK_B_ISSUED, 256)
                    else:
                        named_sync(ALONE_0, 128)
                    # PV(A) left from registers; P(A) to warpgroup 1 under it
                    o = pv_a_left(o, p, dv)
                    keep_probabilities(p, s0 + PROBS_A)
                    keep_pair(s0 + REFERENCE_A, rp)
                    async_fence()
                    named_arrive(P_A_READY, 256)
                    l = rows_add(l, tile_sum(x))
                    o = wait_o(o)
                    if lane_here() == 0:
                        mbarrier_arrive(bar + LEFT_FREE_A)
                    if j + 1 < count:
                        # PV(B) left
                        named_sync(P_B_READY, 256)
                        rn = pair_at(s0 + REFERENCE_B)
                        rp = rows_max(rp, rn)
                        if cuda.any_sync(ALL, rn[0] != ro[0] or rn[1] != ro[1]):
                            f = factor(ro, rn)
                            ro = moved(ro, rn)
                            o = scale_tile(o, f)
                            l = rows_times(l, f)
                        if j + 2 < count:
                            live = ahead + num_nodes - (j + 2) * 64
                            if live < 64:
                                wait_whole(full, u & 1)
                                clear_rows(s0 + KEYS_A, live)
                                named_sync(ALONE_0, 128)
                            o = pv_b_left(o, dq, dv)
                            # QK of the next A, its first box behind PV(B)
                            mbarrier_wait(full, u & 1)
                            s = qk0_a(undefined(), dq, dq)
                            o = wait_o_but_one(o)
                            if lane_here() == 0:
                                mbarrier_arrive(bar + LEFT_FREE_B)
                            s = scores_a(s, full, u & 1, dq)
                            if j + 3 < count:
                                named_arrive(QK_A_ISSUED, 256)
                            s = wait_s(s)
                            u += 1
                        else:
                            o = pv_b_left(o, dq, dv)
                            o = wait_o(o)
                            if lane_here() == 0:
                                mbarrier_arrive(bar + LEFT_FREE_B)
                    j = i32(j + 2)
                # Sums of both warpgroups; results or a state
                xa = s0 + EXCHANGE + (n & 1) * 1024
                l = quad_sum(l)
                keep_pair(xa, l)
                keep_pair(xa + 512, ro)
                named_sync(SUMS, 256)
                f = factor(pair_at(xa + 768), ro)
                l = rows_add(l, rows_times(pair_at(xa + 256), f))
                inverse = inverses(l)
                e = log_sums(ro, l)
                b = pieces[c, n, 0]
                row, q4 = row_here(), lane_here() & 3
                r0 = pieces[c, n, 1] * 64 + row
                r1 = r0 + 8
                slot = pieces[c, n, 4]
                if slot < 0:
                    at = address(out) + (i64(b) * num_rows + r0) * (512 * out_bytes) + q4 * lane_bytes
                    store_rows(o, at, at + 8 * 512 * out_bytes, inverse, r0 < num_rows, r1 < num_rows, q4)
                    if q4 == 0:
                        if r0 < num_rows:
                            lse[b, r0] = e[0]
                        if r1 < num_rows:
                            lse[b, r1] = e[1]
                else:
                    at = address(states) + (i64(slot) * 64 + row) * 2048 + q4 * 8
                    store_floats(o, at, at + 8 * 2048, inverse, True, True)
                    if q4 == 0:
                        state_lses[slot, row] = e[0]
                        state_lses[slot, row + 8] = e[1]
                n = i32(n + 1)
        else:
            # Warpgroup 1: tiles B, columns 256 .. 511
            full = bar + FULL_B
            u = 0
            n = i32(0)
            while n < num_pieces:
                count = pieces[c, n, 3]
                if count == 0:
                    break
                # Keys of the prefix from the piece's first tile on. The rest is read anew where it is needed: registers
                # are scarce.
                ahead = min(max(lengths[pieces[c, n, 0]], 0), max_seqlen) - pieces[c, n, 2] * 64
                o = wait_o(zeros())
                ro = (LOWEST, LOWEST)
                rp = (LOWEST, LOWEST)
                l = (ZERO, ZERO)
                mbarrier_wait(bar + QUERY_FULL, n & 1)
                if count == 1:
                    if lane_here() == 0:
                        mbarrier_arrive(bar + QUERY_FREE)
                j = i32(0)
                while j < count:
                    if j + 1 < count:
                        live = ahead + num_nodes - (j + 1) * 64
                        if live < 64:
                            wait_whole(full, u & 1)
                            clear_rows(s0 + KEYS_B, live)
                            named_sync(ALONE_1, 128)
                        # QK(B), behind QK(A)
                        named_sync(QK_A_ISSUED, 256)
                        mbarrier_wait(full, u & 1)
                        s = scores_b(qk0_b(undefined(), dq, dq), full, u & 1, dq)
                        named_arrive(QK_B_ISSUED, 256)
                        s = wait_s(s)
                        u += 1
                        if j + 3 >= count:
                            if lane_here() == 0:
                                mbarrier_arrive(bar + QUERY_FREE)
                        tree = (j + 1) * 64 - ahead
                        if tree > -64:
                            s = masked(s, mask, bits_per_word, pieces, c, n, num_heads, num_nodes, tree)
                        m = tile_max(s)
                        # PV(A) right, the exponentials of B between its halves: a warp issues few wgmmas ahead
                        named_sync(P_A_READY, 256)
                        rn = pair_at(s0 + REFERENCE_A)
                        rp = rows_max(rp, rn)
                        if cuda.any_sync(ALL, m[0] * scale > rp[0] + SLACK or m[1] * scale > rp[1] + SLACK):
                            rp = raised(rp, quad_max(m), scale)
                        if cuda.any_sync(ALL, rn[0] != ro[0] or rn[1] != ro[1]):
                            f = factor(ro, rn)
                            ro = moved(ro, rn)
                            o = scale_tile(o, f)
                            l = rows_times(l, f)
                        o = pv_a_right_low(o, dq, dv)
                        x = exp_tile_in_place(s, rp, scale)
                        o = pv_a_right_high(o, dq, dv)
                        p = pack_tile(x)
                        keep_probabilities(p, s0 + PROBS_B)
                        keep_pair(s0 + REFERENCE_B, rp)
                        async_fence()
                        named_arrive(P_B_READY, 256)
                        sums = tile_sum(x)
                        o = wait_o(o)
                        if lane_here() == 0:
                            mbarrier_arrive(bar + RIGHT_FREE_A)
                        # PV(B) right from registers
                        if cuda.any_sync(ALL, rp[0] != ro[0] or rp[1] != ro[1]):
                            f = factor(ro, rp)
                            ro = moved(ro, rp)
                            o = scale_tile(o, f)
                            l = rows_times(l, f)
                        o = pv_b_right(o, p, dv)
                        l = rows_add(l, sums)
                        o = wait_o(o)
                        if lane_here() == 0:
                            mbarrier_arrive(bar + RIGHT_FREE_B)
                    else:
                        named_sync(P_A_READY, 256)
                        rn = pair_at(s0 + REFERENCE_A)
                        if cuda.any_sync(ALL, rn[0] != ro[0] or rn[1] != ro[1]):
                            f = factor(ro, rn)
                            ro = moved(ro, rn)
                            o = scale_tile(o, f)
                            l = rows_times(l, f)
                        o = pv_a_right(o, dq, dv)
                        o = wait_o(o)
                        if lane_here() == 0:
                            mbarrier_arrive(bar + RIGHT_FREE_A)
                    j = i32(j + 2)
                xa = s0 + EXCHANGE + (n & 1) * 1024
                l = quad_sum(l)
                keep_pair(xa + 256, l)
                keep_pair(xa + 768, ro)
                named_sync(SUMS, 256)
                f = factor(pair_at(xa + 512), ro)
                l = rows_add(l, rows_times(pair_at(xa), f))
                inverse = inverses(l)
                b = pieces[c, n, 0]
                row, q4 = row_here(), lane_here() & 3
                r0 = pieces[c, n, 1] * 64 + row
                r1 = r0 + 8
                slot = pieces[c, n, 4]
                if slot < 0:
                    at = address(out) + (i64(b) * num_rows + r0) * (512 * out_bytes) + q4 * lane_bytes
                    at += 256 * out_bytes
                    store_rows(o, at, at + 8 * 512 * out_bytes, inverse, r0 < num_rows, r1 < num_rows, q4)
                else:
                    at = address(states) + (i64(slot) * 64 + row) * 2048 + q4 * 8 + 1024
                    store_floats(o, at, at + 8 * 2048, inverse, True, True)

                n = i32(n + 1)
    return wgmma


end_of = device(schedule.end_of)
COMBINE_ROWS = 8


@functools.cache
def make_combine(out_kind: str) -> Any:
    """Merge the states of row tiles that are not whole: a warp a row. Blocks (row tiles of all requests, 64 / 8)."""
    to_bf16 = out_kind == "bf16"

    @cuda.jit
    def combine(plan, states, state_lses, out, lse, row_tiles, num_rows, blocks):
        item = cuda.blockIdx.x
        b = over(item, row_tiles)
        row_tile = item - b * row_tiles
        lane = cuda.threadIdx.x & 31
        r = cuda.blockIdx.y * COMBINE_ROWS + (cuda.threadIdx.x >> 5)
        if row_tile * 64 + r >= num_rows:
            return
        run, length, share, cut = plan[RUN], plan[LENGTH], plan[SHARE], plan[CUT]
        begin, end = plan[STARTS + b], plan[STARTS + b + 1]
        if run > 0 and end - begin <= 1:
            return
        # Phase 1: the largest lse; Phase 2: weights and rows
        m = np.float32(-np.inf)
        z = np.float32(0.0)
        acc = cuda.local.array(16, types.float32)
        for i in range(16):
            acc[i] = np.float32(0.0)
        for phase in range(2):
            at = begin
            while at < end:
                if run > 0:
                    slot = at * row_tiles + row_tile
                    stop = at + 1
                else:
                    count = count_of(u32(row_tile), u32(at), u32(length), u32(share), u32(cut), u32(row_tiles))
                    stop = i32(end_of(u32(count), u32(at), u32(end), u32(share), u32(cut)))
                    if at == begin and stop == end:
                        return
                    slot = i32(
                        slot_of(u32(count), u32(at), u32(begin), u32(share), u32(cut), u32(row_tile), u32(blocks))
                    )
                e = state_lses[slot, r]
                if phase == 0:
                    m = max(m, e)
                elif e > np.float32(-np.inf):
                    w = cuda.libdevice.expf(e - m)
                    z += w
                    for i in range(16):
                        acc[i] += w * states[slot, r, lane + 32 * i]
                at = stop
        inverse = np.float32(1.0) / z if z > np.float32(0.0) else np.float32(0.0)
        for i in range(16):
            x = acc[i] * inverse
            if to_bf16:
                out[b, row_tile * 64 + r, lane + 32 * i] = f32_to_bf16(x)
            else:
                out[b, row_tile * 64 + r, lane + 32 * i] = x
        if lane == 0:
            if z > np.float32(0.0):
                lse[b, row_tile * 64 + r] = m + cuda.libdevice.logf(z)
            else:
                lse[b, row_tile * 64 + r] = np.float32(-np.inf)

    return combine
