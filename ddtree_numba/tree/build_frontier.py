"""Variant `frontier`: the best-first search by one warp a request, which finds the best entry by comparing all.

A heap makes one thread wait for one read of shared memory after the other. Here a warp looks at all entries at once.
The slots lie in groups of LANES; lane g knows the best of group g, and a warp reduction finds the best of these. When
it is taken, a second one finds the best of what is left of its group, one slot a lane. So a node takes the same few
dependent steps however large the tree is, and since the best entry under a total order is the best however it is
found, the tree is the reference's, bit for bit.

- Phase 0: the block copies the rows into shared memory and offers the likeliest first token.
- Phase 1: warp 0 takes the best entry, tree_budget times. Scores are compared as unsigned integers whose order is
  theirs, by their upper halves, which one instruction reduces over a warp. Only where lanes are tied do the lower
  halves and the words of ranks decide. All lanes compute the same new entries, and the lanes of the two groups that got
  one take it over if it is better than their best.
- Phase 2: the block writes the tree.

Cost of a request: tree_budget steps of some 500 cycles on an H200; L * min(K, tree_budget) log-probabilities read.

Source: the rule is that of github.com/liranringel/ddtree, ddtree.py; DDTree (arXiv 2604.12989).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.device import runtime
from ddtree_numba.device.bits import f64_bits
from ddtree_numba.device.launch import device_name, jit, shared_bytes_limit
from ddtree_numba.device.warp import choose, warp_max, warp_min, warp_sync, warp_votes
from ddtree_numba.tree.search import (
    FIELD_BITS,
    FIELDS,
    THREADS,
    Layout,
    Problem,
    carve,
    columns_used,
    launch_search,
    make_layout,
    mirror_one_at,
    mirror_rows,
    mirror_word_of,
    mirror_write_tree,
    one_at,
    pack,
    run_search_mirror,
    stage,
    stands_before,
    unpack,
    write_tree,
)

LANES = THREADS if runtime.SIMULATOR else 32
LAUNCH_BOUNDS = (THREADS, 1)
ZERO = np.uint32(0)
ONE = np.uint32(1)
ALL_ONES = np.uint32(0xFFFFFFFF)
NO_ENTRY = np.uint32(0x00100000)  # the upper half of -inf
LOWER = np.uint64(0xFFFFFFFF)
SIGN = np.uint64(1 << 63)
HALF_BITS = np.int64(FIELDS * FIELD_BITS // 2)  # a word of ranks is compared in two halves
HALF_MASK = np.int64((1 << HALF_BITS) - 1)


def mirror(logprobs, token_ids, root_tokens, tree):
    """The kernel in NumPy: the same phases, one comparison of all slots; ``tree`` holds the results by name."""
    batch, length, _ = logprobs.shape
    room = tree["tokens"].shape[1]
    words = -(-length // FIELDS)
    for b in range(batch):
        slot_score, node_score = np.full(room, -np.inf), np.full(room, -np.inf)
        slot_ranks = np.zeros((words, room), np.int64)
        slot_parent, slot_depth, slot_rank, slot_last = np.zeros((4, room), np.int16)
        node_parent, node_depth, node_rank, node_first, node_next = nodes = np.full((5, room), -1, np.int16)

        # Phase 0: the rows, and the likeliest first token into slot 0
        rows = mirror_rows(logprobs, b)
        node_depth[:] = 0
        node_score[0] = 0.0
        if rows[0].size > 0:
            slot_score[0] = rows[0][0]
            slot_parent[0], slot_depth[0], slot_rank[0] = 0, 1, 0
            slot_ranks[0, 0] = mirror_one_at(1)

        # Phase 1: take the best entry, and offer its sibling and its first child
        n = 1
        while n < room:
            best = np.flatnonzero(slot_score == slot_score.max())
            slot = best[np.lexsort(slot_ranks[::-1, best])[0]]
            score, parent, depth, rank, last = (
                x[slot] for x in (slot_score, slot_parent, slot_depth, slot_rank, slot_last)
            )
            if score == -np.inf:
                break
            node_score[n] = score
            node_parent[n], node_depth[n], node_rank[n] = parent, depth, rank
            if rank == 0:
                node_first[parent] = n
            else:
                node_next[last] = n
            slot_ranks[:, n] = slot_ranks[:, slot]
            if depth < length and rows[depth].size > 0:
                slot_score[n] = score + rows[depth][0]
                slot_parent[n], slot_depth[n], slot_rank[n] = n, depth + 1, 0
                slot_ranks[mirror_word_of(depth + 1), n] += mirror_one_at(depth + 1)
            slot_score[slot] = -np.inf
            if rank + 1 < rows[depth - 1].size:
                slot_score[slot] = score - rows[depth - 1][rank] + rows[depth - 1][rank + 1]
                slot_rank[slot], slot_last[slot] = rank + 1, n
                slot_ranks[mirror_word_of(depth), slot] += mirror_one_at(depth)
            n += 1

        # Phase 2: the tree
        mirror_write_tree(token_ids, root_tokens, b, n, node_score, nodes, tree)


@cuda.jit(device=True, inline="always")
def ordered(score):
    """An unsigned integer that grows with the score; 0.0 and -0.0 are one."""
    bits = f64_bits(score)
    return ~bits + np.uint64(1) if bits > SIGN else bits | SIGN


@cuda.jit(device=True, inline="always")
def upper_half(score):
    """The upper half of `ordered`; that of -inf, which is no entry, is NO_ENTRY, and all others are above."""
    return np.uint32(ordered(score) >> np.uint64(32))


@cuda.jit(device=True, inline="always")
def several_in(votes):
    """Whether more than one lane voted; one always has."""
    return votes & np.uint32(votes - ONE) != ZERO


@cuda.jit(device=True, inline="always")
def first_of(votes):
    """The first lane that voted, counted from 1."""
    return np.uint32(cuda.ffs(votes))


@cuda.jit(device=True, inline="always")
def one_in(first_depth, depth):
    """The value of 1 in the field of a depth, in the word whose first field is first_depth's; 0 in other words."""
    place = np.uint32(max(depth, first_depth) - first_depth)
    here = (depth >= first_depth) & (place < np.uint32(FIELDS))
    shift = np.uint32(FIELD_BITS * (FIELDS - 1) - FIELD_BITS * min(place, np.uint32(FIELDS - 1)))
    return np.int64(here) << np.int64(shift)


@cuda.jit(device=True, inline="always")
def takes_over(new, slot, upper, code, slot_score, slot_ranks, words):
    """Whether the entry in ``slot``, of upper half ``new``, stands before the best so far."""
    if new == upper and new > NO_ENTRY:
        return stands_before(slot_score, slot_ranks, words, slot, np.uint32(code - ONE))
    return new > upper


@cuda.jit(device=True, inline="always")
def best_of_tied(tied, code, slot_score, slot_ranks, words):
    """The code of the best entry among ``tied`` lanes, whose upper halves are equal: by lower half, then by ranks.

    No warp reduction stands behind a condition that lanes may answer differently.
    """
    slots = np.uint32(slot_score.shape[0])
    at = np.uint32(max(code, ONE) - ONE)
    lower = np.uint32(ordered(slot_score[at]) & LOWER)
    greatest = warp_max(choose(tied, lower, ZERO))
    tied = tied & (lower == greatest)
    w = 0
    while several_in(warp_votes(tied)) and w < words:
        word = slot_ranks[at]
        half = np.uint32(word >> HALF_BITS)
        least = warp_min(choose(tied, half, ALL_ONES))
        tied = tied & (half == least)
        half = np.uint32(word & HALF_MASK)
        least = warp_min(choose(tied, half, ALL_ONES))
        tied = tied & (half == least)
        at = np.uint32(at + slots)
        w += 1
    return warp_max(choose(tied, code, ZERO))


@functools.cache
def make_kernel(slots_per_lane: int, row_bytes: int) -> Any:
    """The kernel for groups of ``LANES * slots_per_lane`` slots (a power of two) and rows of 4 or 8 bytes an entry.

    Both are constants of the compiled code, so that the common case, one slot a lane, has no loop over them.
    """
    group_bits = np.uint32((LANES * slots_per_lane).bit_length() - 1)
    row_type = types.float64 if row_bytes == 8 else types.float32

    @jit(launch_bounds=LAUNCH_BOUNDS)
    def kernel(
        logprobs, token_ids, root_tokens, columns, slots, tokens, parents, depths, scores, num_nodes, tree_mask,
        first_child, next_sibling, input_ids,
    ):  # fmt: skip
        """One block a request; all ``columns`` that the search may need are in shared memory; see `carve`."""
        length = logprobs.shape[1]
        room = np.uint32(tokens.shape[1])
        words = (length + FIELDS - 1) // FIELDS
        b = cuda.blockIdx.x  # gpu: the grid is the mirror's loop over b
        lane = np.uint32(cuda.threadIdx.x)  # gpu: lane g of warp 0 knows the best slot of group g
        count = cuda.shared.array(1, types.int32)  # gpu: tells all threads what warp 0 found
        node_score, slot_score, node_info, slot_info, slot_ranks, slot_upper, first = carve(
            tokens.shape[1], slots, words
        )
        first //= row_bytes
        rows = cuda.shared.array(0, row_type)[first : first + (length + 1) * (columns + 1)]  # gpu: as in carve
        pitch = np.uint32(columns + 1)

        # Phase 0: the rows, and the likeliest first token into slot 0
        stage(logprobs, b, columns, rows, node_score, slot_score, node_info)
        warp = np.uint32(lane // np.uint32(LANES))  # gpu: the others wait at the end of the search
        if warp_max(warp) == ZERO:  # gpu: a reduction tells the compiler that no lane is left out
            slot_upper = slot_upper[warp:]  # gpu: from 0, which is not told, so that the address stays in a register
            s = lane
            while s < np.uint32(slots):
                slot_upper[s] = NO_ENTRY
                s = np.uint32(s + np.uint32(LANES))
            my_word = min(lane, np.uint32(words - 1))  # gpu: lane w keeps words w, the lanes behind do as the last
            my_ranks = slot_ranks[np.uint32(my_word * np.uint32(slots)) :]
            my_first_depth = np.uint32(my_word * np.uint32(FIELDS) + 1)
            slot_score[0] = np.float64(rows[0])
            slot_info[0] = pack(0, 0, 1, 0)
            my_ranks[0] = one_at(1) * np.int64(my_word == ZERO)
            upper = upper_half(np.float64(rows[0])) if lane == ZERO else NO_ENTRY
            code = ONE if upper > NO_ENTRY else ZERO
            warp_sync()

            # Phase 1: take the best entry, and offer its sibling and its first child
            # gpu: all lanes compute the same, and store the same, which takes no branches
            n = ONE
            while n < room:
                top = warp_max(upper)
                tied = upper == top
                best = warp_max(choose(tied, code, ZERO))
                if several_in(warp_votes(tied)):
                    if best == ZERO:
                        break
                    best = best_of_tied(tied, code, slot_score, slot_ranks, words)
                slot = np.uint32(best - ONE)
                info = slot_info[slot]
                score = slot_score[slot]
                word = my_ranks[slot]
                group = np.uint32(slot >> group_bits)
                s = np.uint32(np.uint32(group << group_bits) + lane)
                other_upper = slot_upper[s]
                parent, _, depth, at = unpack(info)
                below = np.uint32(depth * pitch)
                logprob = np.float64(rows[at])
                next_logprob = np.float64(rows[np.uint32(at + ONE)])
                first_logprob = np.float64(rows[below])

                # gpu: the best of the slot's group without it, while the scores are on their way
                other_upper = choose(s != slot, other_upper, NO_ENTRY)
                other = choose(other_upper > NO_ENTRY, np.uint32(s + ONE), ZERO)
                for _ in range(1, slots_per_lane):
                    s = np.uint32(s + np.uint32(LANES))
                    new = choose(s != slot, slot_upper[s], NO_ENTRY)
                    takes = new > other_upper
                    if (new == other_upper) & (new > NO_ENTRY):
                        takes = stands_before(slot_score, slot_ranks, words, s, np.uint32(other - ONE))
                    other_upper = choose(takes, new, other_upper)
                    other = choose(takes, np.uint32(s + ONE), other)
                other_top = warp_max(other_upper)
                other_tied = other_upper == other_top
                votes = warp_votes(other_tied)
                if slots_per_lane == 1:
                    other_best = np.uint32(np.uint32(group << group_bits) + first_of(votes))
                    other_best = choose(other_top > NO_ENTRY, other_best, ZERO)
                else:
                    other_best = warp_max(choose(other_tied, other, ZERO))

                sibling = score - logprob + next_logprob
                child = score + first_logprob
                sibling_upper = upper_half(sibling)
                child_upper = upper_half(child)
                warp_sync()  # gpu: all lanes have read what is now overwritten
                node_score[n] = score
                node_info[n] = info
                slot_score[slot] = sibling
                slot_upper[slot] = sibling_upper
                slot_info[slot] = pack(parent, n, depth, np.uint32(at + ONE))
                my_ranks[slot] = word + one_in(my_first_depth, depth)
                slot_score[n] = child
                slot_upper[n] = child_upper
                slot_info[n] = pack(n, 0, np.uint32(depth + ONE), below)
                my_ranks[n] = word + one_in(my_first_depth, np.uint32(depth + ONE))
                warp_sync()  # gpu: ties are decided by what was stored

                # gpu: the lanes of the two groups take over what is better
                mine, mine_too = lane == group, lane == np.uint32(n >> group_bits)
                was_upper, was = upper, code
                upper = choose(mine, other_top, upper)
                code = choose(mine, other_best, code)
                takes = mine & (sibling_upper > upper)
                even = mine & (sibling_upper == upper)
                upper = choose(takes, sibling_upper, upper)
                code = choose(takes, best, code)
                takes = mine_too & (child_upper > upper)
                even |= mine_too & (child_upper == upper)
                upper = choose(takes, child_upper, upper)
                code = choose(takes, np.uint32(n + ONE), code)
                if several_in(votes) | (warp_votes(even) != ZERO):
                    # gpu: the same once more, with all of the scores and the ranks where that decides
                    if several_in(votes) & (other_best != ZERO):
                        other_best = best_of_tied(other_tied, other, slot_score, slot_ranks, words)
                    upper, code = was_upper, was
                    if mine:
                        upper, code = other_top, other_best
                        if takes_over(sibling_upper, slot, upper, code, slot_score, slot_ranks, words):
                            upper, code = sibling_upper, best
                    if mine_too and takes_over(child_upper, n, upper, code, slot_score, slot_ranks, words):
                        upper, code = child_upper, np.uint32(n + ONE)
                n = np.uint32(n + ONE)
            count[0] = n
        cuda.syncthreads()  # gpu: the search is done

        # Phase 2: the tree
        write_tree(
            token_ids, root_tokens, b, columns, count[0], node_score, node_info, tokens, parents, depths, scores,
            num_nodes, tree_mask, first_child, next_sibling, input_ids,
        )  # fmt: skip

    return kernel


def plan(problem: Problem) -> tuple[int, Layout] | None:
    """Slots a lane, and the layout; None where rows do not fit this GPU's shared memory, or paths the lanes' words."""
    slots_per_lane = 1
    while LANES * LANES * slots_per_lane < problem.num_nodes - 1:
        slots_per_lane *= 2
    for row_bytes in (8, 4):
        layout = make_layout(problem, group=LANES * slots_per_lane, row_bytes=row_bytes)
        if layout.columns == columns_used(problem) and layout.words <= LANES:
            return slots_per_lane, layout
    return None


def run_if_it_fits(problem: Problem) -> bool:
    """Launch the kernel, or return False where `plan` finds no room."""
    planned = plan(problem)
    if planned is None:
        return False
    slots_per_lane, layout = planned
    launch_search(make_kernel(slots_per_lane, layout.row_bytes), problem, layout)
    return True


def run(problem: Problem) -> None:
    """Launch the kernel; the tree is there once the stream has passed.

    Raises
    ------
    ValueError
        The rows that the budget needs exceed this GPU's shared memory.
    """
    if not run_if_it_fits(problem):
        device = problem.logprobs.device
        raise ValueError(
            f"variant 'frontier' keeps {columns_used(problem)} columns of L = {problem.length} rows and "
            f"{problem.num_nodes} nodes in shared memory, and a word of {FIELDS} ranks a lane; {device_name(device)} "
            f"has {shared_bytes_limit(device)} bytes and {LANES} lanes, which is too little. Variant 'heap' needs less"
        )


def run_mirror(problem: Problem) -> None:
    """Run the mirror on host arrays.

    Raises
    ------
    ValueError
        The arguments lie on a GPU.
    """
    run_search_mirror("frontier_numpy", mirror, problem)
