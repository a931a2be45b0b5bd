"""Variant `heap`: the reference's best-first search with a binary heap in shared memory, one thread a request.

The readable builder, and the definition that the fast one is held against. The heap holds slots (see search.py); `push`
and `pop` are the textbook's, with the order of `stands_before`.

- Phase 0: the block copies the rows into shared memory and offers the likeliest first token.
- Phase 1: thread 0 pops the best entry, makes a node of it, and pushes its sibling and its first child, until the
  budget is spent or the heap is empty.
- Phase 2: the block writes the tree.

Cost of a request: tree_budget pops of O(log tree_budget) comparisons, each some dependent reads of shared memory, on
one thread; L * min(K, tree_budget) log-probabilities read.

Source: github.com/liranringel/ddtree, ddtree.py; DDTree (arXiv 2604.12989).
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.device.launch import device_name, jit, shared_bytes_limit
from ddtree_numba.tree.search import (
    FIELDS,
    NEG_INF,
    STATIC_BYTES,
    THREADS,
    Problem,
    carve,
    launch_search,
    logprob_of,
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
    word_of,
    write_tree,
)

LAUNCH_BOUNDS = (THREADS, 1)


def mirror(logprobs, token_ids, root_tokens, tree):
    """The kernel in NumPy: the same phases and the same heap, on host arrays; ``tree`` holds the results by name."""
    batch, length, _ = logprobs.shape
    room = tree["tokens"].shape[1]
    words = -(-length // FIELDS)
    for b in range(batch):
        slot_score, node_score = np.full(room, -np.inf), np.full(room, -np.inf)
        slot_ranks = np.zeros((words, room), np.int64)
        slot_parent, slot_depth, slot_rank, slot_last, heap = np.zeros((5, room), np.int16)
        node_parent, node_depth, node_rank, node_first, node_next = nodes = np.full((5, room), -1, np.int16)

        # Phase 0: the rows, and the likeliest first token into the heap
        rows = mirror_rows(logprobs, b)
        node_depth[:] = 0
        node_score[0] = 0.0
        size = 0
        if rows[0].size > 0:
            slot_score[0] = rows[0][0]
            slot_parent[0], slot_depth[0], slot_rank[0] = 0, 1, 0
            slot_ranks[0, 0] = mirror_one_at(1)
            heap[0] = 0
            size = 1

        # Phase 1: take the best entry, and push its sibling and its first child
        n = 1
        while n < room and size > 0:
            slot = mirror_pop(heap, size, slot_score, slot_ranks)
            size -= 1
            score, depth, rank = slot_score[slot], slot_depth[slot], slot_rank[slot]
            node_score[n] = score
            node_parent[n], node_depth[n], node_rank[n] = slot_parent[slot], depth, rank
            if rank == 0:
                node_first[slot_parent[slot]] = n
            else:
                node_next[slot_last[slot]] = n
            has_child = depth < length and rows[depth].size > 0
            if has_child:
                slot_score[n] = score + rows[depth][0]
                slot_parent[n], slot_depth[n], slot_rank[n] = n, depth + 1, 0
                slot_ranks[:, n] = slot_ranks[:, slot]
                slot_ranks[mirror_word_of(depth + 1), n] += mirror_one_at(depth + 1)
            if rank + 1 < rows[depth - 1].size:
                slot_score[slot] = score - rows[depth - 1][rank] + rows[depth - 1][rank + 1]
                slot_rank[slot], slot_last[slot] = rank + 1, n
                slot_ranks[mirror_word_of(depth), slot] += mirror_one_at(depth)
                mirror_push(heap, size, slot, slot_score, slot_ranks)
                size += 1
            if has_child:
                mirror_push(heap, size, n, slot_score, slot_ranks)
                size += 1
            n += 1

        # Phase 2: the tree
        mirror_write_tree(token_ids, root_tokens, b, n, node_score, nodes, tree)


def mirror_stands_before(slot_score, slot_ranks, x, y):
    if slot_score[x] != slot_score[y]:
        return slot_score[x] > slot_score[y]
    return tuple(slot_ranks[:, x]) < tuple(slot_ranks[:, y])


def mirror_push(heap, size, slot, slot_score, slot_ranks):
    at = size
    while at > 0 and mirror_stands_before(slot_score, slot_ranks, slot, heap[(at - 1) // 2]):
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = slot


def mirror_pop(heap, size, slot_score, slot_ranks):
    best = heap[0]
    slot = heap[size - 1]
    at = 0
    child = 1
    while child < size - 1:
        if child + 1 < size - 1 and mirror_stands_before(slot_score, slot_ranks, heap[child + 1], heap[child]):
            child += 1
        if mirror_stands_before(slot_score, slot_ranks, slot, heap[child]):
            break
        heap[at] = heap[child]
        at = child
        child = 2 * at + 1
    heap[at] = slot
    return best


@cuda.jit(device=True, inline="always")
def push(heap, size, slot, slot_score, slot_ranks, words):
    """Put a slot into a heap of ``size`` slots: it rises while it stands before its parent."""
    at = size
    while at > 0 and stands_before(slot_score, slot_ranks, words, slot, heap[(at - 1) // 2]):
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = slot


@cuda.jit(device=True, inline="always")
def pop(heap, size, slot_score, slot_ranks, words):
    """Take the best slot out of a heap of ``size`` slots: the last one sinks from the root to its place."""
    best = heap[0]
    slot = heap[size - 1]
    at = 0
    child = 1
    while child < size - 1:
        if child + 1 < size - 1 and stands_before(slot_score, slot_ranks, words, heap[child + 1], heap[child]):
            child += 1
        if stands_before(slot_score, slot_ranks, words, slot, heap[child]):
            break
        heap[at] = heap[child]
        at = child
        child = 2 * at + 1
    heap[at] = slot
    return best


@jit(launch_bounds=LAUNCH_BOUNDS)
def kernel(
    logprobs, token_ids, root_tokens, columns, slots, tokens, parents, depths, scores, num_nodes, tree_mask,
    first_child, next_sibling, input_ids,
):  # fmt: skip
    """One block a request; ``columns`` of each row are in shared memory, laid out as in `carve`."""
    length = logprobs.shape[1]
    room = tokens.shape[1]
    words = (length + FIELDS - 1) // FIELDS
    b = cuda.blockIdx.x  # gpu: the grid is the mirror's loop over b
    count = cuda.shared.array(1, types.int32)  # gpu: tells all threads what thread 0 found
    node_score, slot_score, node_info, slot_info, slot_ranks, heap, first = carve(room, slots, words)
    pitch = columns + 1
    first //= 4
    rows = cuda.shared.array(0, types.float32)[first : first + (length + 1) * pitch]  # gpu: as in carve

    # Phase 0: the rows, and the likeliest first token into the heap
    stage(logprobs, b, columns, rows, node_score, slot_score, node_info)
    if cuda.threadIdx.x == 0:  # gpu: the search is one thread's
        size = 0
        logprob = logprob_of(rows, columns, logprobs, b, 1, 0)
        if logprob > NEG_INF:
            slot_score[0] = logprob
            slot_info[0] = pack(0, 0, 1, 0)
            for w in range(words):
                slot_ranks[w * slots] = one_at(1) if w == 0 else np.int64(0)
            heap[0] = 0
            size = 1

        # Phase 1: take the best entry, and push its sibling and its first child
        n = 1
        while n < room and size > 0:
            slot = pop(heap, size, slot_score, slot_ranks, words)
            size -= 1
            score = slot_score[slot]
            parent, _, depth, at = unpack(slot_info[slot])
            rank = at - (depth - 1) * pitch
            node_score[n] = score
            node_info[n] = slot_info[slot]
            logprob = logprob_of(rows, columns, logprobs, b, depth + 1, 0)
            has_child = logprob > NEG_INF
            if has_child:
                slot_score[n] = score + logprob
                slot_info[n] = pack(n, 0, depth + 1, depth * pitch)
                for w in range(words):
                    slot_ranks[w * slots + n] = slot_ranks[w * slots + slot]
                slot_ranks[word_of(depth + 1) * slots + n] += one_at(depth + 1)
            logprob = logprob_of(rows, columns, logprobs, b, depth, rank + 1)
            if logprob > NEG_INF:
                slot_score[slot] = score - logprob_of(rows, columns, logprobs, b, depth, rank) + logprob
                slot_info[slot] = pack(parent, n, depth, at + 1)
                slot_ranks[word_of(depth) * slots + slot] += one_at(depth)
                push(heap, size, slot, slot_score, slot_ranks, words)
                size += 1
            if has_child:
                push(heap, size, n, slot_score, slot_ranks, words)
                size += 1
            n += 1
        count[0] = n
    cuda.syncthreads()  # gpu: the search is done

    # Phase 2: the tree
    write_tree(
        token_ids, root_tokens, b, columns, count[0], node_score, node_info, tokens, parents, depths, scores, num_nodes,
        tree_mask, first_child, next_sibling, input_ids,
    )  # fmt: skip


def run(problem: Problem) -> None:
    """Launch the kernel; the tree is there once the stream has passed.

    Raises
    ------
    ValueError
        The budget exceeds this GPU's shared memory.
    """
    layout = make_layout(problem, group=1, row_bytes=4)
    if layout.columns < 1:
        device = problem.logprobs.device
        limit = shared_bytes_limit(device)
        room = (limit - STATIC_BYTES - 8 * (problem.length + 1)) // layout.bytes_of_nodes(1, 1)
        raise ValueError(
            f"tree_budget = {problem.num_nodes - 1} with L = {problem.length} needs more shared memory than the "
            f"{limit} bytes of {device_name(device)}; {room - 1} would fit"
        )
    launch_search(kernel, problem, layout)


def run_mirror(problem: Problem) -> None:
    """Run the mirror on host arrays.

    Raises
    ------
    ValueError
        The arguments lie on a GPU.
    """
    run_search_mirror("heap_numpy", mirror, problem)
