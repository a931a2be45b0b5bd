"""accept_greedy: the longest path of the draft tree that the target's own tokens spell.

``target_tokens[b, i]`` is the target's choice behind node i. From the root on, the walk goes to the child that carries
the token chosen at the current node; the token that no child carries is the bonus token::

    cur = 0, t = target[0]
    while a child of cur carries t:  accept it;  cur = child, t = target[cur]
    bonus = t

One block a request:

- Phase 1: tokens, links and targets of its nodes, and the stop tokens, come into shared memory, all loads at once. A
  walk in global memory would wait for one load after the other, some 0.3 us each.
- Phase 2: for every node, which child carries its target, and whether that token stops the request; a thread a node,
  because one thread on its way would look at one sibling after the other.
- Phase 3: one thread walks. Every link leads to a later node or ends the walk, and no path is longer than the result
  has room for, so that no contents keep it running.
- Phase 4: the places behind the path are filled.

Trees of more than MAX_STAGED nodes are left where they are, and phase 3 looks at the siblings itself.

Of children with the same token the first is taken, which is the one of the lowest index.

Cost of a request: 16 Q bytes read (20 Q with targets of 64 bits), 8 (max_depth + 1) written, and the latency of the
walk. Links of no tree, by which many nodes share one chain of siblings, cost up to Q / 2 steps for each node.

Source: follow_verified_tree in github.com/liranringel/ddtree, ddtree.py; DDTree (arXiv 2604.12989).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.accept import accepted
from ddtree_numba.accept.accepted import (
    INT32,
    INT64,
    NO_TOKEN,
    Accepted,
    child_with,
    mirror_child_with,
    mirror_stops,
    mirror_take,
    stops,
    take,
)
from ddtree_numba.device import arrays, runtime
from ddtree_numba.device.launch import launch
from ddtree_numba.tree.build_tree import LARGEST_TOKEN

THREADS = 8 if runtime.SIMULATOR else 128
MAX_STAGED = 24 if runtime.SIMULATOR else 2048  # nodes, and stop tokens; 48 KB of shared memory


def mirror(
    tokens, first_child, next_sibling, num_nodes, target_tokens, stop_tokens, nodes, num_accepted, bonus_tokens, flags,
    emitted,
):  # fmt: skip
    """The kernel in NumPy: the same phases. Arguments as the kernel's, on the host."""
    for b in range(tokens.shape[0]):
        n = min(num_nodes[b], tokens.shape[1])

        # Phase 1: the tree of the request
        tree = tokens[b], first_child[b], next_sibling[b]
        targets = [int(t) for t in target_tokens[b]]

        # Phase 2: the child that carries each target
        children = [mirror_child_with(*tree, i, targets[i], n) for i in range(n)]
        stopping = [mirror_stops(stop_tokens[b], targets[i]) for i in range(n)]

        # Phase 3: the walk
        count = seen = 0
        bonus = NO_TOKEN
        cur = 0 if n > 0 else -1
        if n > 0:
            nodes[b, 0] = 0
            count = 1
        while cur >= 0:
            cur, bonus, count, seen = mirror_take(
                targets[cur], children[cur], stopping[cur], nodes[b], emitted[b], count, seen
            )
        num_accepted[b], bonus_tokens[b], flags[b] = count, bonus, seen

        # Phase 4: what is behind the path
        nodes[b, count:] = -1
        emitted[b, count if bonus >= 0 else max(count - 1, 0) :] = NO_TOKEN


@cuda.jit(device=True, inline="always")
def as_token(t):
    """A token as int32, what is none as -1."""
    return np.int32(t) if 0 <= t <= LARGEST_TOKEN else NO_TOKEN


@cuda.jit
def kernel(
    tokens, first_child, next_sibling, num_nodes, target_tokens, stop_tokens, nodes, num_accepted, bonus_tokens, flags,
    emitted,
):  # fmt: skip
    """One block a request; ``emitted`` is the tokens of the result."""
    b = cuda.blockIdx.x  # gpu: the grid is the mirror's loop over b
    t = cuda.threadIdx.x  # gpu: a thread copies nodes t, t + THREADS, ..
    num_stop = stop_tokens.shape[1]
    room = tokens.shape[1]
    staged = cuda.shared.array(0, types.int32)  # gpu: 5 rows of Q, and the stop tokens
    ends = cuda.shared.array(2, types.int32)  # gpu: what thread 0 found

    # Phase 1: the tree of the request
    stage = room <= MAX_STAGED and num_stop <= MAX_STAGED
    if stage:
        i = t
        while i < room:
            token, child, sibling, target = tokens[b, i], first_child[b, i], next_sibling[b, i], target_tokens[b, i]
            staged[i] = token
            staged[room + i] = child
            staged[2 * room + i] = sibling
            staged[3 * room + i] = as_token(target)
            i += THREADS
        i = t
        while i < num_stop:
            staged[5 * room + i] = as_token(stop_tokens[b, i])
            i += THREADS
    n = min(num_nodes[b], room)
    cuda.syncthreads()  # gpu: all nodes are there
    targets = staged[3 * room : 4 * room]
    steps = staged[4 * room : 5 * room]

    # Phase 2: the child that carries each target
    if stage:
        i = t
        while i < n:
            child = child_with(staged[:room], staged[room : 2 * room], staged[2 * room : 3 * room], i, targets[i], n)
            steps[i] = 2 * child + stops(staged[5 * room : 5 * room + num_stop], targets[i])  # gpu: two in one word
            i += THREADS
    cuda.syncthreads()  # gpu: all nodes know

    # Phase 3: the walk
    if t == 0:
        count = 0
        seen = 0
        bonus = NO_TOKEN
        cur = -1
        if n > 0:
            nodes[b, 0] = 0
            count = 1
            cur = 0
        while cur >= 0:
            if stage:
                target = targets[cur]
                child = steps[cur] >> 1
                stopping = (steps[cur] & 1) == 1
            else:
                target = as_token(target_tokens[b, cur])
                child = child_with(tokens[b], first_child[b], next_sibling[b], cur, target, n)
                stopping = stops(stop_tokens[b], target)
            cur, bonus, count, seen = take(target, child, stopping, nodes[b], emitted[b], count, seen)
        num_accepted[b] = count
        bonus_tokens[b] = bonus
        flags[b] = seen
        ends[0] = count
        ends[1] = count if bonus >= 0 else max(count - 1, 0)
    cuda.syncthreads()  # gpu: the path is known

    # Phase 4: what is behind the path
    i = t
    while i < nodes.shape[1]:
        if i >= ends[0]:
            nodes[b, i] = -1
        if i >= ends[1]:
            emitted[b, i] = NO_TOKEN
        i += THREADS


def bytes_moved(batch: int, num_nodes: int, max_depth: int) -> int:
    """Bytes that `accept_greedy` must move: each node's token, two links and target read, what is accepted written.

    Targets of 32 bits; no stop tokens.
    """
    return batch * (num_nodes * 4 * 4 + 4 + (max_depth + 1) * 2 * 4 + 3 * 4)


def accept_greedy(
    tree: Any, target_tokens: Any, *, stop_tokens: Any = None, out: Accepted | None = None, validate: bool = False
) -> Accepted:
    """Accept the longest path of each draft tree that the target's choices spell, and a bonus token.

    Parameters
    ----------
    tree : DraftTree
        Of B requests and Q nodes; `build_tree` makes it. A request without nodes (``num_nodes`` 0) is idle.
    target_tokens : int32 or int64 [B, Q]
        The target's token behind each node; `argmax_tokens` makes it. What is no int32 from 0 up means that there is
        none, and ends a walk that comes there. What stands behind the last node, or off the path, does not matter.
    stop_tokens : int, list, tuple or set of ints, or int32 or int64 [n] or [B, n], optional
        Tokens that end a request. The path is cut behind the first that is emitted; a negative entry of an array is
        none. Numbers are copied to the device once and kept for the life of the process; an array's contents may change
        between replays of a graph.
    out : Accepted, optional
        Written to in place of a new one (`Accepted.empty`, with the tree's max_depth).
    validate : bool
        Also check the trees' numbers of nodes and links, which copies them to the host.

    Returns
    -------
    Accepted
        Of the kind of array of ``tree.tokens``.

    Raises
    ------
    TypeError
        An argument is no array that kernels take, or has the wrong dtype; ``tree`` is no DraftTree.
    ValueError
        A wrong shape or device; a stop token that is negative or no int32; an output that overlaps an input; with
        ``validate``, a number of nodes beyond Q, or a link that leads to no later node of its tree.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream without synchronizing, except for NumPy arrays, which are copied to the device
    and back. With ``out``, nothing is allocated (but stop tokens given as numbers, at their first use), so a call can
    be captured in a CUDA graph.

    Source: github.com/liranringel/ddtree, ddtree.py, follow_verified_tree; DDTree (arXiv 2604.12989).
    """
    views = accepted.tree_arguments(tree)
    targets = arrays.view("target_tokens", target_tokens)
    arrays.require_dtype(targets, INT32, INT64)
    arrays.require_shape(targets, "[B, Q]", *views["tokens"].shape)
    arrays.require_one_place([views["tokens"], targets])
    batch, num_nodes = targets.shape
    stop = accepted.stop_argument(stop_tokens, views["tokens"], batch)
    out, found = accepted.results(out, views, tree.max_depth, [targets, stop])
    if arrays.require_flag("validate", validate):
        accepted.check_tree(views)
    if batch:
        walked = [views[name] for name in ("tokens", "first_child", "next_sibling", "num_nodes")]
        staged = num_nodes <= MAX_STAGED and stop.shape[1] <= MAX_STAGED
        shared = INT32.itemsize * (5 * num_nodes + stop.shape[1]) if staged else 0
        launch(kernel, (batch, 1, 1), THREADS, (*walked, targets, stop, *found), results=5, shared_bytes=shared)
    return out
