"""Variant `wgmma`: tree-verify MLA attention on Hopper's tensor cores (sm_90a), for kv_lora_rank 512 and rope 64.

A block of three warpgroups owns 64 rows of (node, head), and goes over key tiles of 64 in pairs, A (even) and B (odd):

- warpgroup 0: scores and softmax of A, output columns 0 .. 255
- warpgroup 1: scores and softmax of B, output columns 256 .. 511
- warpgroup 2: three threads that send for queries, for A and for B

Two named barriers keep the tensor pipe in this order: QK(A) | QK(B) | PV(A) | PV(B) | QK(next A) ..., so that
softmax(A) runs under QK(B), softmax(B) under PV(A), and copies under both. Weights are taken relative to a reference of
the row, which moves only where a score exceeds it by 2**8: no warpgroup waits for the other's maximum, and accumulators
are almost never scaled. Weights are rounded to the cache's format for PV; the lse takes those that are not.

- Phase 0: barriers.
- Phase 1: copies. What lies behind a tensor arrives as zeros, and rows behind the last live one are cleared, since
  0 * NaN would be NaN.
- Phase 2: scores and weights. Only tiles that reach past the prefix look at the mask.
- Phase 3: values.
- Phase 4: the result, or a state for `combine`, which merges those of a row tile in the order of its keys.

Which block has which tiles is planned by another kernel (schedule.py), once for all layers of a step. No block waits
for another and nothing is atomic: the same inputs give the same bits.

Source: FlashMLA's seesaw (github.com/deepseek-ai/FlashMLA, docs); the lazy reference: FlashAttention-4.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.attention.clocks import (
    EVENTS,
    MAXIMA_B,
    P_A_THERE,
    P_B_THERE,
    PAIRS,
    PV_A_LEFT,
    PV_A_LEFT_DONE,
    PV_A_RIGHT_DONE,
    PV_B_LEFT_DONE,
    PV_B_RIGHT_DONE,
    QK_B,
    QK_B_DONE,
    SCORES_A,
    WEIGHTS_A,
    WEIGHTS_B,
    WORDS,
)
from ddtree_numba.attention.schedule import (
    COUNT,
    FIRST,
    ITEMS,
    LISTED,
    NEXT,
    NUM,
    ORDER,
    PREFIX,
    REQUEST,
    ROW_TILE,
    SLOT,
    SPLITS,
    STATES,
    over,
)
from ddtree_numba.device import hopper
from ddtree_numba.device.hopper import (
    add_part,
    add_state,
    address,
    async_fence,
    clear_shared,
    clear_tile,
    copy_box,
    descriptor,
    exp_tile,
    exp_tile_in_place,
    factor,
    inverses,
    keep_clocks,
    keep_part,
    let_follow,
    load_shared,
    load_state,
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
    no_state,
    parameter_at,
    prefetch,
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
    store_state,
    tile_max,
    tile_most,
    tile_sum,
    touch,
    wait_for_kernel,
    weights,
)
from ddtree_numba.device.warp import fresh_thread

THREADS = 384
LAUNCH_BOUNDS = (THREADS, 1)
PRODUCER, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 256, 232, 40

# Shared memory, bytes: queries | keys of A | keys of B | probabilities of B | references | exchange | mbarriers.
BOX = 64 * 128  # 64 rows of 64 columns, 128-byte swizzle
TILE = 9 * BOX
ROPE = 8 * BOX  # the box of columns that are no values
KEYS_A, KEYS_B = TILE, 2 * TILE
PROBS_A, PROBS_B = KEYS_A + ROPE, 3 * TILE  # probabilities of A take the place of its rope box
REFERENCE_A, REFERENCE_B = PROBS_B + BOX, PROBS_B + BOX + 256
EXCHANGE = REFERENCE_B + 256  # twice: sums of warpgroups 0 and 1, their references, 64 floats each
BARRIERS = EXCHANGE + 2048
SHARED_BYTES = BARRIERS + 512  # all that a block may have
QUERY_FULL, FULL_A, FULL_B = 0, 72, 144  # nine each: a box a barrier
QUERY_FREE, LEFT_FREE_A, LEFT_FREE_B, RIGHT_FREE_A, RIGHT_FREE_B, A_SENT = 216, 224, 232, 240, 248, 256
ROPE_FREE_B = 264
ROOM = 1024  # of a warp, to turn rows in; eight of them take the place of the probabilities of B
TOUCHED = 272  # a word for each lane, which nobody reads

# The tensor maps stand among the parameters, behind those of two arrays of three axes: 22 words, so that their places
# are multiples of 64 bytes as copies want them, since parameters begin 16 bytes behind one on these GPUs.
maps_here = parameter_at(22)

# The order in which the boxes of a tile are free again, so sent and taken: of A, warpgroup 0 is done with its values
# before warpgroup 1, of B behind it, and no probabilities take the place of B's rope.
ORDER_A, ORDER_B = (0, 1, 2, 3, 8, 4, 5, 6, 7), (8, 4, 5, 6, 7, 0, 1, 2, 3)

# A state, bytes: half of the columns after the other, in each the four warps', of each 16 eights a lane, lane by lane;
# float16, relative to the largest magnitude of a row's half, at least TINY. Beside it these, and the rows' lse.
STATE, HALF_STATE, WARP_STATE, PART = 65536, 32768, 8192, 2048  # a part: 64 columns, four eights a lane
LSES, SCALES = 0, 1  # of what is beside a state: its lse, the magnitudes of its first half, of its second

# Named barriers.
P_A_READY, P_B_READY, SUMS, ALONE_0, ALONE_1, QK_A_ISSUED, QK_B_ISSUED = 1, 2, 3, 5, 6, 7, 8

ZERO, SLACK = np.float32(0.0), np.float32(8.0)
LOWEST = np.float32(-1e30)  # the reference of a row that has seen no key
TINY = np.float32(1e-30)
LOG2_E = np.float32(1.4426950408889634)
ALL = 0xFFFFFFFF
INF = np.float32(np.inf)
u64, i64, u32, i32 = types.uint64, types.int64, types.uint32, types.int32

device = cuda.jit(device=True, inline="always")


@device
def words_seen(mask, b, node, first, num_nodes, column):
    """Which of a tile's keys a node sees, bit c for key c, of which only those of this lane's columns must be right.

    first : tree column of the tile's key 0; keys below 0 are of the prefix.
    column : the lane's first column of each 8.
    """
    start = max(first, 0)
    word = start >> 5
    shift = u64(start & 31)
    num_words = mask.shape[2]
    found = u64(0)
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
    return found


@device
def bools_seen(mask, b, node, first, num_nodes, column):
    found = u64(0)
    c = column
    while c < 64:
        t = i32(first + c)
        on = t < 0
        if t >= 0 and t < num_nodes:
            on = mask[b, node, t] & 1 != 0
        if on:
            found |= u64(1) << u64(c)
        c = i32(c + (7 if c & 1 else 1))
    return found


@device
def page_of(block_table, b, j, page_size):
    """Where key tile j of a request is."""
    return block_table[b, over(j * 64, page_size)]


@device
def row_of(j, page_size):
    """The first row of key tile j within its page."""
    return j * 64 - over(j * 64, page_size) * page_size


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
def fragment_here():
    """Where in a state's half the accumulators of this thread begin, in bytes."""
    t = i32(fresh_thread())
    return (t >> 5 & 3) * WARP_STATE + (t & 31) * 16


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
    """Zeros for the values of rows behind the last live one: there may be NaN, and 0 * NaN is NaN.

    Called behind the scores, of which those of these rows are masked, and ahead of a barrier that the values wait for.
    """
    t = i32(fresh_thread()) & 127
    row = live + (t >> 3)
    while row < 64:
        for box in range(8):
            clear_shared(tile + box * BOX + row * 128 + (t & 7) * 16)
        row += 16
    async_fence()


@functools.cache
def make_kernel(kind: str, out_kind: str, packed: bool = True, clocked: bool = False) -> Any:
    """The kernel for inputs of a kind, "bf16" or "f16", results of one, "f32" too, and masks of words or bools.

    clocked : write clocks (clocks.py), for profiling/trace_wgmma.py, to the address that ``clocks`` has.
    """

    def at(base, offsets):
        return [base + offset for offset in offsets]

    def qk_of(keys, order):
        """A wgmma of 64 columns for each box, in the order in which they are taken."""
        boxes = [at(b * BOX, range(0, 128, 32)) for b in order]
        return [make_wgmma(kind, 64, x, at(keys, x), first=n == 0, commit=n in (0, 8)) for n, x in enumerate(boxes)]

    def pv_of(keys, probs, steps=slice(None), commit=True):
        """Values are the transposed view of keys, 16 keys a step; probs None: from registers."""
        a = None if probs is None else at(probs, range(0, 128, 32))[steps]
        return make_wgmma(kind, 256, a, at(keys, range(0, 8192, 2048))[steps], b_transposed=1, commit=commit)

    # All places as offsets from one descriptor of the beginning: registers are scarce.
    qk0_a, qk1_a, qk2_a, qk3_a, qk4_a, qk5_a, qk6_a, qk7_a, qk8_a = qk_of(KEYS_A, ORDER_A)
    qk0_b, qk1_b, qk2_b, qk3_b, qk4_b, qk5_b, qk6_b, qk7_b, qk8_b = qk_of(KEYS_B, ORDER_B)
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
        def store_rows(acc, at, below, inverse, stored, stored_below, room):
            store_floats(acc, at, below, inverse, stored, stored_below)

    else:

        @device
        def store_rows(acc, at, below, inverse, stored, stored_below, room):
            room += (i32(fresh_thread()) >> 5) * ROOM
            store_halves(acc, at, below, inverse, stored, stored_below, room, lane_here())

    seen_by = words_seen if packed else bools_seen

    @device
    def masked(s, mask, pieces, n, num_heads, num_nodes, tree):
        """Scores of a tile whose first key is tree column ``tree``, -inf where a row's node does not see a key."""
        b = pieces[n, REQUEST]
        first = pieces[n, ROW_TILE] * 64 + row_here()
        column = i32((lane_here() & 3) * 2)
        node = min(over(first, num_heads), num_nodes - 1)
        other = min(over(first + 8, num_heads), num_nodes - 1)
        seen = seen_by(mask, b, node, tree, num_nodes, column) >> u64(column)
        return mask_tile(s, (seen, seen_by(mask, b, other, tree, num_nodes, column) >> u64(column)))

    @device
    def arrived(boxes, offset):
        """Wait for a box of keys."""
        mbarrier_wait(boxes[0] + offset, boxes[1])

    @device
    def both_arrived(boxes, offset):
        """Wait for a box of queries and one of keys."""
        mbarrier_wait(boxes[2] + offset, boxes[3])
        mbarrier_wait(boxes[0] + offset, boxes[1])

    def scores_of(wait, order, qk1, qk2, qk3, qk4, qk5, qk6, qk7, qk8):
        _, at1, at2, at3, at4, at5, at6, at7, at8 = (8 * box for box in order)

        @device
        def scores(s, boxes, d):
            """The scores of a tile behind its first box, box by box as they arrive."""
            wait(boxes, at1)
            s = qk1(s, d, d)
            wait(boxes, at2)
            s = qk2(s, d, d)
            wait(boxes, at3)
            s = qk3(s, d, d)
            wait(boxes, at4)
            s = qk4(s, d, d)
            wait(boxes, at5)
            s = qk5(s, d, d)
            wait(boxes, at6)
            s = qk6(s, d, d)
            wait(boxes, at7)
            s = qk7(s, d, d)
            wait(boxes, at8)
            return qk8(s, d, d)

        return scores

    scores_a = scores_of(arrived, ORDER_A, qk1_a, qk2_a, qk3_a, qk4_a, qk5_a, qk6_a, qk7_a, qk8_a)
    scores_b = scores_of(arrived, ORDER_B, qk1_b, qk2_b, qk3_b, qk4_b, qk5_b, qk6_b, qk7_b, qk8_b)
    first_scores = scores_of(both_arrived, ORDER_A, qk1_a, qk2_a, qk3_a, qk4_a, qk5_a, qk6_a, qk7_a, qk8_a)

    if clocked:

        @device
        def clock(clocks, n, j, warpgroup, event):
            """The clocks of now, by one thread of the warpgroup, for the first pairs of a block's first piece.

            Without a branch, since accumulators may be in flight: any bit of ``others`` is a reason not to write.
            """
            c = i32(cuda.blockIdx.x)
            pair = j >> 1
            others = i32(fresh_thread()) & 127 | pair & -PAIRS | n ^ c
            place = ((c * 2 + warpgroup) * PAIRS + pair) * EVENTS + event
            keep_clocks(clocks[0] + i64(place) * (8 * WORDS), others)

    else:

        @device
        def clock(clocks, n, j, warpgroup, event):
            pass

    @device
    def wait_whole(full, parity):
        for i in range(9):
            mbarrier_wait(full + 8 * i, parity)

    @cuda.jit(launch_bounds=LAUNCH_BOUNDS)
    def wgmma(
        states, beside, q_nope_map, q_pe_map, kv_map, block_table, mask, page_size, num_heads, num_nodes,
        scale, clocks, plan, pieces, out, lse,
    ):  # fmt: skip
        s0 = shared_address(cuda.shared.array(0, types.uint8, alignment=1024))
        t = cuda.threadIdx.x
        warp = t >> 5
        lane = t & 31
        c = cuda.blockIdx.x
        num_rows = num_nodes * num_heads
        bar = s0 + BARRIERS

        # Phase 0: barriers
        let_follow()
        map_at = maps_here()
        count, b, first, row_tile = i32(0), i32(0), i32(0), i32(0)
        page, ahead = i32(0), i32(0)
        if t == 0:
            for i in range(27):
                mbarrier_init(bar + QUERY_FULL + 8 * i, 1)
            mbarrier_init(bar + QUERY_FREE, 8)
            for i in range(4):
                mbarrier_init(bar + LEFT_FREE_A + 8 * i, 4)
            mbarrier_init(bar + A_SENT, 1)
            mbarrier_init(bar + ROPE_FREE_B, 4)
            mbarrier_fence()
        if warp >= 8:
            count, b, first, row_tile = pieces[c, COUNT], pieces[c, REQUEST], pieces[c, FIRST], pieces[c, ROW_TILE]
        cuda.syncthreads()

        # Phase 1: copies
        if warp >= 8:
            fewer_registers()
            if warp == 10 and count > 0:
                # Words of the mask to where they are near, for the end of each piece.
                prefetch(address(plan))
                n = i32(c)
                while n >= 0:
                    b, row_tile = pieces[n, REQUEST], pieces[n, ROW_TILE]
                    for i in range(2):
                        node = min(over(row_tile * 64 + lane * 2 + i, num_heads), num_nodes - 1)
                        at = address(mask) + i64(b) * mask.strides[0] + i64(node) * mask.strides[1]
                        touch(bar + TOUCHED + lane * 4, at)
                    n = pieces[n, NEXT]
            if t == PRODUCER + 96 and count > 0:
                n = i32(c)
                while n >= 0:
                    if n != c:
                        b, row_tile = pieces[n, REQUEST], pieces[n, ROW_TILE]
                        mbarrier_wait(bar + QUERY_FREE, (pieces[n, ORDER] - 1) & 1)
                    for k in range(4):
                        mbarrier_expect(bar + QUERY_FULL + 8 * k, BOX)
                        copy_box(s0 + k * BOX, map_at, bar + QUERY_FULL + 8 * k, k * 64, row_tile * 64, b)
                    mbarrier_expect(bar + QUERY_FULL + 64, BOX)
                    copy_box(s0 + ROPE, map_at + 128, bar + QUERY_FULL + 64, 0, row_tile * 64, b)
                    for k in range(4, 8):
                        mbarrier_expect(bar + QUERY_FULL + 8 * k, BOX)
                        copy_box(s0 + k * BOX, map_at, bar + QUERY_FULL + 8 * k, k * 64, row_tile * 64, b)
                    n = pieces[n, NEXT]
            if t == PRODUCER and count > 0:
                u = 0
                n = i32(c)
                while n >= 0:
                    if n != c:
                        count, b, first = pieces[n, COUNT], pieces[n, REQUEST], pieces[n, FIRST]
                    j = first
                    stop = first + count
                    page = page_of(block_table, b, j, page_size)
                    while j < stop:
                        row = row_of(j, page_size)
                        ahead = page
                        if j + 2 < stop:
                            ahead = page_of(block_table, b, j + 2, page_size)
                        if u > 0:
                            mbarrier_wait(bar + LEFT_FREE_A, (u - 1) & 1)
                        for k in range(4):
                            mbarrier_expect(bar + FULL_A + 8 * k, BOX)
                            copy_box(s0 + KEYS_A + k * BOX, map_at + 256, bar + FULL_A + 8 * k, k * 64, row, page)
                        if u > 0:
                            mbarrier_wait(bar + RIGHT_FREE_A, (u - 1) & 1)
                        mbarrier_expect(bar + FULL_A + 64, BOX)
                        copy_box(s0 + KEYS_A + ROPE, map_at + 256, bar + FULL_A + 64, 512, row, page)
                        for k in range(4, 8):
                            mbarrier_expect(bar + FULL_A + 8 * k, BOX)
                            copy_box(s0 + KEYS_A + k * BOX, map_at + 256, bar + FULL_A + 8 * k, k * 64, row, page)
                        if u == 0:
                            mbarrier_arrive(bar + A_SENT)
                        page = ahead
                        u = i32(u + 1)
                        j = i32(j + 2)
                    n = pieces[n, NEXT]
            if t == PRODUCER + 32 and count > 0:
                u = 0
                n = i32(c)
                mbarrier_wait(bar + A_SENT, 0)  # what is needed first is asked for first
                while n >= 0:
                    if n != c:
                        count, b, first = pieces[n, COUNT], pieces[n, REQUEST], pieces[n, FIRST]
                    j = first + 1
                    stop = first + count
                    if j < stop:
                        page = page_of(block_table, b, j, page_size)
                    while j < stop:
                        row = row_of(j, page_size)
                        ahead = page
                        if j + 2 < stop:
                            ahead = page_of(block_table, b, j + 2, page_size)
                        if u > 0:
                            mbarrier_wait(bar + ROPE_FREE_B, (u - 1) & 1)
                        mbarrier_expect(bar + FULL_B + 64, BOX)
                        copy_box(s0 + KEYS_B + ROPE, map_at + 256, bar + FULL_B + 64, 512, row, page)
                        if u > 0:
                            mbarrier_wait(bar + RIGHT_FREE_B, (u - 1) & 1)
                        for k in range(4, 8):
                            mbarrier_expect(bar + FULL_B + 8 * k, BOX)
                            copy_box(s0 + KEYS_B + k * BOX, map_at + 256, bar + FULL_B + 8 * k, k * 64, row, page)
                        if u > 0:
                            mbarrier_wait(bar + LEFT_FREE_B, (u - 1) & 1)
                        for k in range(4):
                            mbarrier_expect(bar + FULL_B + 8 * k, BOX)
                            copy_box(s0 + KEYS_B + k * BOX, map_at + 256, bar + FULL_B + 8 * k, k * 64, row, page)
                        page = ahead
                        u = i32(u + 1)
                        j = i32(j + 2)
                    n = pieces[n, NEXT]
            return  # in here: code of the consumers behind this would get the producers' registers

        # Descriptors are made in each branch, not ahead of both: else the compiler keeps them, and all places that
        # barriers have, in registers of each lane, and moves them before each wgmma.
        if warp < 4:
            # Warpgroup 0: tiles A, columns 0 .. 255
            dq = descriptor(s0, 16, 1024)  # for what has its columns in a row: queries, keys, probabilities
            dv = descriptor(s0, 8192, 1024)  # for values
            more_registers()
            full = bar + FULL_A
            u = i32(0)
            n = i32(cuda.blockIdx.x)
            while n >= 0:
                count = pieces[n, COUNT]
                if count == 0:
                    break
                # Keys of the prefix from the piece's first tile on. The rest is read anew where it is needed: registers
                # are scarce.
                ahead = i32(pieces[n, PREFIX] - pieces[n, FIRST] * 64)
                o = wait_o(zeros())
                ro = (LOWEST, LOWEST)  # reference of o and l
                rp = (LOWEST, LOWEST)  # of the next probabilities
                l = (ZERO, ZERO)
                boxes = (full, u & 1, bar + QUERY_FULL, pieces[n, ORDER] & 1)
                both_arrived(boxes, 0)
                s = first_scores(qk0_a(undefined(), dq, dq), boxes, dq)
                if count > 1:
                    named_arrive(QK_A_ISSUED, 256)
                s = wait_s(s)
                u = i32(u + 1)
                j = i32(0)
                while j < count:
                    if j + 2 >= count:
                        if lane_here() == 0:
                            mbarrier_arrive(bar + QUERY_FREE)
                    clock(clocks, n, j, 0, SCORES_A)
                    # Phase 2: softmax of A, under QK(B)
                    tree = i32(j * 64 - ahead)
                    if tree > -64:
                        s = masked(s, mask, pieces, n, num_heads, num_nodes, tree)
                        clear_rows(s0 + KEYS_A, num_nodes - tree)
                    x = exp_tile(s, rp, scale)
                    m = tile_max(s)
                    if cuda.any_sync(ALL, m[0] * scale > rp[0] + SLACK or m[1] * scale > rp[1] + SLACK):
                        rp = raised(rp, quad_max(m), scale)
                        x = exp_tile(s, rp, scale)
                    # P(A) to warpgroup 1, once no warp reads the box that it takes the place of
                    p = pack_tile(x)
                    named_sync(ALONE_0, 128)
                    keep_probabilities(p, s0 + PROBS_A)
                    keep_pair(s0 + REFERENCE_A, rp)
                    async_fence()
                    named_arrive(P_A_READY, 256)
                    if cuda.any_sync(ALL, rp[0] != ro[0] or rp[1] != ro[1]):
                        f = factor(ro, rp)
                        ro = moved(ro, rp)
                        l = rows_times(l, f)
                        if j > 0:
                            o = scale_tile(o, f)
                    l = rows_add(l, tile_sum(x))
                    clock(clocks, n, j, 0, WEIGHTS_A)
                    # Phase 3: PV(A) left from registers
                    if j + 1 < count:
                        named_sync(QK_B_ISSUED, 256)
                    clock(clocks, n, j, 0, PV_A_LEFT)
                    o = pv_a_left(o, p, dv)
                    o = wait_o(o)
                    clock(clocks, n, j, 0, PV_A_LEFT_DONE)
                    if lane_here() == 0:
                        mbarrier_arrive(bar + LEFT_FREE_A)
                    if j + 1 < count:
                        # PV(B) left
                        named_sync(P_B_READY, 256)
                        clock(clocks, n, j, 0, P_B_THERE)
                        rn = pair_at(s0 + REFERENCE_B)
                        rp = rows_max(rp, rn)
                        if cuda.any_sync(ALL, rn[0] != ro[0] or rn[1] != ro[1]):
                            f = factor(ro, rn)
                            ro = moved(ro, rn)
                            o = scale_tile(o, f)
                            l = rows_times(l, f)
                        if j + 2 < count:
                            o = pv_b_left(o, dq, dv)
                            # QK of the next A, its first box behind PV(B)
                            mbarrier_wait(full, u & 1)
                            s = qk0_a(undefined(), dq, dq)
                            o = wait_o_but_one(o)
                            clock(clocks, n, j, 0, PV_B_LEFT_DONE)
                            if lane_here() == 0:
                                mbarrier_arrive(bar + LEFT_FREE_B)
                            s = scores_a(s, (full, u & 1), dq)
                            if j + 3 < count:
                                named_arrive(QK_A_ISSUED, 256)
                            s = wait_s(s)
                            u = i32(u + 1)
                        else:
                            o = pv_b_left(o, dq, dv)
                            o = wait_o(o)
                            clock(clocks, n, j, 0, PV_B_LEFT_DONE)
                            if lane_here() == 0:
                                mbarrier_arrive(bar + LEFT_FREE_B)
                    j = i32(j + 2)
                # Phase 4: sums of both warpgroups, results or a state
                xa = s0 + EXCHANGE + (pieces[n, ORDER] & 1) * 1024
                l = quad_sum(l)
                keep_pair(xa, l)
                keep_pair(xa + 512, ro)
                named_sync(SUMS, 256)
                f = factor(pair_at(xa + 768), ro)
                l = rows_add(l, rows_times(pair_at(xa + 256), f))
                inverse = inverses(l)
                if cuda.any_sync(ALL, l[0] == ZERO or l[1] == ZERO):
                    o = clear_tile(o, inverse)
                e = log_sums(ro, l)
                b = pieces[n, REQUEST]
                row, q4 = row_here(), lane_here() & 3
                r0 = pieces[n, ROW_TILE] * 64 + row
                r1 = r0 + 8
                slot = pieces[n, SLOT]
                if slot < 0:
                    at = address(out) + (i64(b) * num_rows + r0) * (512 * out_bytes) + q4 * lane_bytes
                    store_rows(o, at, at + 8 * 512 * out_bytes, inverse, r0 < num_rows, r1 < num_rows, s0 + PROBS_B)
                    if q4 == 0:
                        if r0 < num_rows:
                            lse[b, r0] = e[0]
                        if r1 < num_rows:
                            lse[b, r1] = e[1]
                else:
                    most = rows_max(rows_times(quad_max(tile_most(o)), inverse), (TINY, TINY))
                    place = address(states) + i64(slot) * STATE + fragment_here()
                    store_state(o, place, rows_times(inverse, inverses(most)))
                    if q4 == 0:
                        for i in range(2):
                            beside[slot, LSES, row + 8 * i] = e[i]
                            beside[slot, SCALES, row + 8 * i] = most[i]
                n = pieces[n, NEXT]
        else:
            # Warpgroup 1: tiles B, columns 256 .. 511
            dq = descriptor(s0, 16, 1024)
            dv = descriptor(s0, 8192, 1024)
            more_registers()
            full = bar + FULL_B
            u = i32(0)
            n = i32(cuda.blockIdx.x)
            while n >= 0:
                count = pieces[n, COUNT]
                if count == 0:
                    break
                # Keys of the prefix from the piece's first tile on. The rest is read anew where it is needed: registers
                # are scarce.
                ahead = i32(pieces[n, PREFIX] - pieces[n, FIRST] * 64)
                o = wait_o(zeros())
                ro = (LOWEST, LOWEST)
                rp = (LOWEST, LOWEST)
                l = (ZERO, ZERO)
                wait_whole(bar + QUERY_FULL, pieces[n, ORDER] & 1)
                if count == 1:
                    if lane_here() == 0:
                        mbarrier_arrive(bar + QUERY_FREE)
                j = i32(0)
                while j < count:
                    if j + 1 < count:
                        # Phase 2: QK(B), behind QK(A)
                        named_sync(QK_A_ISSUED, 256)
                        mbarrier_wait(full + 64, u & 1)
                        clock(clocks, n, j, 1, QK_B)
                        s = scores_b(qk0_b(undefined(), dq, dq), (full, u & 1), dq)
                        named_arrive(QK_B_ISSUED, 256)
                        s = wait_s(s)
                        clock(clocks, n, j, 1, QK_B_DONE)
                        if lane_here() == 0:
                            mbarrier_arrive(bar + ROPE_FREE_B)
                        u = i32(u + 1)
                        if j + 3 >= count:
                            if lane_here() == 0:
                                mbarrier_arrive(bar + QUERY_FREE)
                        tree = i32((j + 1) * 64 - ahead)
                        if tree > -64:
                            s = masked(s, mask, pieces, n, num_heads, num_nodes, tree)
                            clear_rows(s0 + KEYS_B, num_nodes - tree)
                            named_sync(ALONE_1, 128)
                        m = tile_max(s)
                        clock(clocks, n, j, 1, MAXIMA_B)
                        # Phase 3: PV(A) right, the exponentials of B between its halves: a warp issues few wgmmas ahead
                        named_sync(P_A_READY, 256)
                        clock(clocks, n, j, 1, P_A_THERE)
                        rn = pair_at(s0 + REFERENCE_A)
                        rp = rows_max(rp, rn)
                        if cuda.any_sync(ALL, m[0] * scale > rp[0] + SLACK or m[1] * scale > rp[1] + SLACK):
                            rp = raised(rp, quad_max(m), scale)
                        if cuda.any_sync(ALL, rn[0] != ro[0] or rn[1] != ro[1]):
                            f = factor(ro, rn)
                            ro = moved(ro, rn)
                            l = rows_times(l, f)
                            if j > 0:
                                o = scale_tile(o, f)
                        o = pv_a_right_low(o, dq, dv)
                        x = exp_tile_in_place(s, rp, scale)
                        o = pv_a_right_high(o, dq, dv)
                        p = pack_tile(x)
                        keep_probabilities(p, s0 + PROBS_B)
                        keep_pair(s0 + REFERENCE_B, rp)
                        async_fence()
                        named_arrive(P_B_READY, 256)
                        clock(clocks, n, j, 1, WEIGHTS_B)
                        sums = tile_sum(x)
                        o = wait_o(o)
                        clock(clocks, n, j, 1, PV_A_RIGHT_DONE)
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
                        clock(clocks, n, j, 1, PV_B_RIGHT_DONE)
                        if lane_here() == 0:
                            mbarrier_arrive(bar + RIGHT_FREE_B)
                    else:
                        named_sync(P_A_READY, 256)
                        rn = pair_at(s0 + REFERENCE_A)
                        if cuda.any_sync(ALL, rn[0] != ro[0] or rn[1] != ro[1]):
                            f = factor(ro, rn)
                            ro = moved(ro, rn)
                            l = rows_times(l, f)
                            if j > 0:
                                o = scale_tile(o, f)
                        o = pv_a_right(o, dq, dv)
                        o = wait_o(o)
                        if lane_here() == 0:
                            mbarrier_arrive(bar + RIGHT_FREE_A)
                    j = i32(j + 2)
                xa = s0 + EXCHANGE + (pieces[n, ORDER] & 1) * 1024
                l = quad_sum(l)
                keep_pair(xa + 256, l)
                keep_pair(xa + 768, ro)
                named_sync(SUMS, 256)
                f = factor(pair_at(xa + 512), ro)
                l = rows_add(l, rows_times(pair_at(xa), f))
                inverse = inverses(l)
                if cuda.any_sync(ALL, l[0] == ZERO or l[1] == ZERO):
                    o = clear_tile(o, inverse)
                b = pieces[n, REQUEST]
                row, q4 = row_here(), lane_here() & 3
                r0 = pieces[n, ROW_TILE] * 64 + row
                r1 = r0 + 8
                slot = pieces[n, SLOT]
                if slot < 0:
                    at = address(out) + (i64(b) * num_rows + r0) * (512 * out_bytes) + q4 * lane_bytes
                    at += 256 * out_bytes
                    store_rows(o, at, at + 8 * 512 * out_bytes, inverse, r0 < num_rows, r1 < num_rows, s0 + PROBS_B)
                else:
                    most = rows_max(rows_times(quad_max(tile_most(o)), inverse), (TINY, TINY))
                    place = address(states) + i64(slot) * STATE + HALF_STATE + fragment_here()
                    store_state(o, place, rows_times(inverse, inverses(most)))
                    if q4 == 0:
                        for i in range(2):
                            beside[slot, SCALES + 1, row + 8 * i] = most[i]
                n = pieces[n, NEXT]

    return wgmma


COMBINE_THREADS, COMBINE_BLOCKS = 256, 2  # threads of a block; blocks an SM
ROOMS = COMBINE_THREADS // 32 * ROOM
AT_ONCE = 3  # states that a warp asks for together: four would spill


@functools.cache
def make_combine(out_kind: str) -> Any:
    """Merge the states of row tiles that are not whole.

    A part is 16 rows and 64 columns, 32 numbers a lane, as the accumulators lie in the states; what is beside a state
    is read by one lane of each quad. Where parts are few and states many, two, four or eight warps share a part. What
    can be found without the states is found before the kernel ahead has ended.
    """
    out_bytes = 4 if out_kind == "f32" else 2
    lane_bytes = 8 if out_kind == "f32" else 16
    store_halves = make_store_halves("bf16" if out_kind == "f32" else out_kind)
    out_is_float = out_kind == "f32"
    zeros = make_zeros(32)

    @cuda.jit(launch_bounds=(COMBINE_THREADS, COMBINE_BLOCKS))
    def combine(plan, items, states, beside, out, lse, num_rows):
        t = i32(cuda.threadIdx.x)
        warp, lane = t >> 5, t & 31
        q4 = lane & 3
        parts = cuda.shared.array((36, 8, 32), types.float32)
        rooms = cuda.shared.array(ROOMS, types.uint8, alignment=128)
        grid = i32(cuda.gridDim.x)
        num_items, splits = plan[ITEMS], plan[SPLITS]
        # Warps that share a part, as a power of two: as many as let all units run at once, if there are states for them
        level = i32(0)
        while level < 3 and num_items << 3 + level <= grid and splits > AT_ONCE << level:
            level = i32(level + 1)
        step = i32(1) << level
        unit = i32(cuda.blockIdx.x)
        units = num_items << 2 + level
        first = warp & step - 1
        next_item, next_slot = (i32(0), i32(0)), i32(0)
        if unit < units:
            next_item = item_at(items, unit >> 2 + level)
            next_slot = slot_of_state(items, next_item, first + (q4 << level))
        elif unit > 0:
            return  # one block is enough to wait for the kernel ahead
        wait_for_kernel()
        while unit < units:
            n, item, slot = i32(unit >> 2 + level), next_item, next_slot
            num = item[1]
            at = ((unit << 3 | warp) >> level) & 31
            rows, part = at >> 2, at & 3
            row = (rows & 3) * 16 + (lane >> 2)
            place = address(states) + rows * WARP_STATE + part * PART + lane * 16
            unit += grid
            if unit < units:
                next_item = item_at(items, unit >> 2 + level)
                next_slot = slot_of_state(items, next_item, first + (q4 << level))
            # Phase 1: sums of this warp's states, relative to the largest lse so far, in units of log2
            m, l, x = (LOWEST, LOWEST), (ZERO, ZERO), zeros()
            k = first
            while k < num:
                if k > first:
                    slot = slot_of_state(items, item, k + (q4 << level))
                y0 = load_state(place + i64(cuda.shfl_sync(ALL, slot, 0)) * STATE)
                y1, y2 = no_state(), no_state()
                if k + step < num:
                    y1 = load_state(place + i64(cuda.shfl_sync(ALL, slot, 1)) * STATE)
                if k + 2 * step < num:
                    y2 = load_state(place + i64(cuda.shfl_sync(ALL, slot, 2)) * STATE)
                e = lses_at(beside, slot, row, k + (q4 << level) < num and q4 < AT_ONCE)
                c = scales_at(beside, slot, rows >> 2, row)
                most = rows_max(m, quad_max(e))
                g, e = weights(m, most), weights(e, most)
                m = most
                l = rows_add(rows_times(l, g), e)
                e = rows_times(e, c)
                x = add_state(scale_tile(x, g), y0, of_lane(e, lane & 28))
                if k + step < num:
                    x = add_state(x, y1, of_lane(e, lane & 28 | 1))
                if k + 2 * step < num:
                    x = add_state(x, y2, of_lane(e, lane & 28 | 2))
                k = i32(k + AT_ONCE * step)
            l = quad_sum(l)
            # Phase 2: the sums of warps that share a part
            if step > 1:
                cuda.syncthreads()
                parts[32, warp, lane], parts[33, warp, lane] = m
                parts[34, warp, lane], parts[35, warp, lane] = l
                keep_part(x, shared_address(parts) + t * 4)
                cuda.syncthreads()
                for w in range(warp + 1, warp + step if first == 0 else 0):
                    other = (parts[32, w, lane], parts[33, w, lane])
                    most = rows_max(m, other)
                    g, e = weights(m, most), weights(other, most)
                    m = most
                    l = rows_add(rows_times(l, g), rows_times((parts[34, w, lane], parts[35, w, lane]), e))
                    x = add_part(scale_tile(x, g), shared_address(parts) + (w * 32 + lane) * 4, e)
            # Phase 3: results
            if first == 0:
                inverse, e = inverses(l), log_sums(m, l)
                b, r = items[n, REQUEST], items[n, ROW_TILE] * 64 + row
                column = (rows >> 2) * 256 + part * 64
                at = address(out) + ((i64(b) * num_rows + r) * 512 + column) * out_bytes + q4 * lane_bytes
                below = at + 8 * 512 * out_bytes
                if out_is_float:
                    store_floats(x, at, below, inverse, r < num_rows, r + 8 < num_rows)
                else:
                    room = shared_address(rooms) + warp * ROOM
                    store_halves(x, at, below, inverse, r < num_rows, r + 8 < num_rows, room, lane)
                if rows < 4 and part == 0 and q4 == 0:
                    if r < num_rows:
                        lse[b, r] = e[0]
                    if r + 8 < num_rows:
                        lse[b, r + 8] = e[1]

    return combine


@device
def item_at(items, m):
    """Where an item's states are listed, and how many there are."""
    return items[m, STATES], items[m, NUM]


@device
def slot_of_state(items, item, i):
    """Of an item's state i, or of its last one."""
    return items[item[0] + min(i, item[1] - 1), LISTED]


@device
def lses_at(beside, slot, row, there):
    """Of a lane's two rows of a state, in units of log2; -inf of one that is not there."""
    if there:
        return beside[slot, LSES, row] * LOG2_E, beside[slot, LSES, row + 8] * LOG2_E
    return -INF, -INF


@device
def scales_at(beside, slot, half, row):
    return beside[slot, SCALES + half, row], beside[slot, SCALES + half, row + 8]


@device
def of_lane(pair, lane):
    return cuda.shfl_sync(ALL, pair[0], lane), cuda.shfl_sync(ALL, pair[1], lane)
