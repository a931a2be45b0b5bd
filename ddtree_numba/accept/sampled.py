"""accept_sampled: a path through the draft tree that is a sample of the target's law, at any temperature.

At the current node the target's next token is drawn from its law there. If a child carries that token, the walk goes on
from that child, else the token is the bonus token. What a request emits is so a sequence of draws, each from the
target's law behind the tokens before it, and the tree only decides how many are drawn in one step: the output's law is
the target's own, whatever the tree holds. A child whose token has no probability is never accepted.

A draw inverts the cumulative law: of U uniform in 0 .. 2**64 - 1 and the row's probabilities p as weights
w = floor(p * 2**44), with W their sum, the token is the first v with ::

    w[0] + .. + w[v] > floor(U * W / 2**64)

All sums are integers, hence exact in any order: no rounding decides a draw, and no token without weight can be drawn.
Probabilities of a float32 row from 2**-21 up are exact multiples of 2**-44; for a row of V tokens whose sum is 1 the
law of the draw is less than V * 2**-44 off in total variation, 1e-8 for V = 163,840, and U adds less than V * 2**-64.

U is Philox of the request's seed and the position of the node (device/philox.py). Only one node is visited at each
position, so the draws of a request are independent; and they depend neither on the tree nor on the batch: with the same
laws, any other tree leads to the same tokens, and so does drawing one token at a time.

One block a request; only the rows of accepted nodes are read:

- Phase 1: the walk begins at the root.
- Phase 2: the row's weights, in as many segments as the block has groups of LANES threads; and the segment that the
  draw leads to. An entry that is no probability refuses the row.
- Phase 3: that segment again, a few words for each thread, to the thread in whose words the token lies.
- Phase 4: which token that is.
- Phase 5: the step of the walk, by one thread. Back to phase 2 while it goes on.
- Phase 6: the places behind the path are filled.

Cost of an accepted node: V probabilities read once, V / 32 of them twice, V additions, all by one multiprocessor.

Source: the lossless rule of speculative decoding (Leviathan et al., arXiv 2211.17192) for a draft without a law of its
own, as SpecInfer (arXiv 2305.09781) takes it for trees; proved here by enumeration in the tests.
"""

from __future__ import annotations

from dataclasses import replace
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
from ddtree_numba.device.arrays import FLOATS, View
from ddtree_numba.device.bf16 import array_to_f32
from ddtree_numba.device.bits import element, f32_bits, f32_to_u64, multiply_high, per_word
from ddtree_numba.device.launch import jit, launch
from ddtree_numba.device.philox import mirror_random_bits, random_bits

THREADS = 16 if runtime.SIMULATOR else 1024
LAUNCH_BOUNDS = (THREADS, 1)
LANES = 4 if runtime.SIMULATOR else 32
SEGMENTS = THREADS // LANES
MAX_VOCABULARY = 2**19  # weights of at most 2**44 each, so that no sum overflows

WEIGHT_BITS = 44
SCALE = np.float32(2.0**WEIGHT_BITS)
ONE_BITS = np.uint32(0x3F800000)  # of 1.0
ZERO = np.float32(0.0)  # a literal 0.0 would be float64 on the GPU
LARGEST_DRAW = np.uint64(2**64 - 1)
TWO_32 = 2.0**32

UNIFORMS, BY_NODE, BY_DEPTH = 0, 1, 2  # where the randomness comes from: see the kernel


def mirror(
    tokens, first_child, next_sibling, num_nodes, target_probs, seeds, positions, uniforms, stop_tokens, nodes,
    num_accepted, bonus_tokens, flags, emitted,
):  # fmt: skip
    """The kernel in NumPy: the same phases. Arguments on the host; either ``seeds`` and ``positions`` or ``uniforms``.

    ``target_probs`` [B, Q, V] may be float64 here, and so may ``uniforms``.
    """
    for b in range(tokens.shape[0]):
        # Phase 1: the root
        n = min(num_nodes[b], tokens.shape[1])
        tree = tokens[b], first_child[b], next_sibling[b]
        count = seen = 0
        bonus = NO_TOKEN
        cur = 0 if n > 0 else -1
        if n > 0:
            nodes[b, 0] = 0
            count = 1
        while cur >= 0:
            t = NO_TOKEN
            draw = mirror_draw(b, cur, count - 1, seeds, positions, uniforms)
            row = target_probs[b, cur]
            p = row if row.dtype == np.float64 else array_to_f32(row)
            if draw is not None and np.all((p >= 0) & (p <= 1)):
                # Phase 2: the weights, and the segment that the draw leads to
                weights = np.floor(np.ldexp(p.astype(np.float64), WEIGHT_BITS)).astype(np.uint64)
                share = -(-p.size // SEGMENTS)
                segments = np.pad(weights, (0, share * SEGMENTS - p.size)).reshape(SEGMENTS, share)
                ends = np.cumsum(segments.sum(axis=1, dtype=np.uint64), dtype=np.uint64)
                total = int(ends[-1])
                target = draw * total >> 64
                if total > 0:
                    segment = int(np.argmax(ends > target))

                    # Phase 3: the place in the segment
                    target -= int(ends[segment - 1]) if segment else 0
                    inside = np.cumsum(segments[segment], dtype=np.uint64)

                    # Phase 4: the token
                    t = segment * share + int(np.argmax(inside > target))

            # Phase 5: the step of the walk
            child, stopping = mirror_child_with(*tree, cur, t, n), mirror_stops(stop_tokens[b], t)
            cur, bonus, count, seen = mirror_take(t, child, stopping, nodes[b], emitted[b], count, seen)
        num_accepted[b], bonus_tokens[b], flags[b] = count, bonus, seen

        # Phase 6: what is behind the path
        nodes[b, count:] = -1
        emitted[b, count if bonus >= 0 else max(count - 1, 0) :] = NO_TOKEN


def mirror_draw(b, node, depth, seeds, positions, uniforms):
    """The node's U as an int, or None where a uniform is none."""
    if uniforms is not None:
        u = float(uniforms[b, node])
        if u >= 1:
            return 2**64 - 1
        return int(u * 2.0**64) if u >= 0 else None
    position = int(positions[b]) + depth if positions.ndim == 1 else int(positions[b, node])
    return mirror_random_bits(int(seeds[b]) % 2**64, position % 2**64)


@cuda.jit(device=True, inline="always")
def draw_of_uniform(u):
    """floor(u * 2**64) for u from 0 up, exactly; the largest for u >= 1."""
    x = np.float64(u)
    if x >= 1.0:
        return LARGEST_DRAW
    high = np.uint64(x * TWO_32)
    return (high << np.uint64(32)) | np.uint64((x * TWO_32 - np.float64(high)) * TWO_32)


@cuda.jit(device=True, inline="always")
def weight(p):
    """A probability as an integer."""
    return f32_to_u64(p * SCALE)


@cuda.jit(device=True, inline="always")
def mass_of(word, like, per):
    """The sum of a word's weights."""
    mass = np.uint64(0)
    e = 0
    while e < per:
        mass += weight(element(word, e, like))
        e += 1
    return mass


@cuda.jit(device=True, inline="always")
def worst_of(word, like, per, worst):
    """The largest of the bits of a word's elements, or ``worst``: above those of 1.0 where one is no probability."""
    e = 0
    while e < per:
        worst = max(worst, f32_bits(element(word, e, like) + ZERO))
        e += 1
    return worst


@cuda.jit(device=True, inline="always")
def scan(values, value):
    """``values[t]`` becomes the sum of what threads 0 .. t bring (Hillis and Steele 1986)."""
    t = cuda.threadIdx.x
    values[t] = value
    cuda.syncthreads()
    reach = 1
    while reach < cuda.blockDim.x:  # not THREADS, for which the compiler would write the steps out
        before = np.uint64(0)
        if t >= reach:
            before = values[t - reach]
        cuda.syncthreads()
        values[t] += before
        cuda.syncthreads()
        reach *= 2


@cuda.jit(device=True, inline="always")
def sample(row, like, draw, values, found, rest):
    """The token of a row that the draw leads to, told to each thread; -1 where the row is no law."""
    t = cuda.threadIdx.x  # gpu: a thread is one of LANES that share a segment
    per = per_word(row, like)
    num_words = row.shape[0]
    share = (num_words + SEGMENTS - 1) // SEGMENTS

    # Phase 2: the weights, and the segment that the draw leads to
    segment = t // LANES
    end = min((segment + 1) * share, num_words)
    w = segment * share + t % LANES
    mass = np.uint64(0)
    worst = np.uint32(0)
    while w < end - 7 * LANES:  # gpu: eight loads are on their way before the first is used
        word_0, word_1, word_2, word_3 = row[w], row[w + LANES], row[w + 2 * LANES], row[w + 3 * LANES]
        v = w + 4 * LANES
        word_4, word_5, word_6, word_7 = row[v], row[v + LANES], row[v + 2 * LANES], row[v + 3 * LANES]
        mass += mass_of(word_0, like, per) + mass_of(word_1, like, per)
        mass += mass_of(word_2, like, per) + mass_of(word_3, like, per)
        mass += mass_of(word_4, like, per) + mass_of(word_5, like, per)
        mass += mass_of(word_6, like, per) + mass_of(word_7, like, per)
        worst = worst_of(word_0, like, per, worst_of(word_1, like, per, worst))
        worst = worst_of(word_2, like, per, worst_of(word_3, like, per, worst))
        worst = worst_of(word_4, like, per, worst_of(word_5, like, per, worst))
        worst = worst_of(word_6, like, per, worst_of(word_7, like, per, worst))
        w += 8 * LANES
    while w < end:
        mass += mass_of(row[w], like, per)
        worst = worst_of(row[w], like, per, worst)
        w += LANES
    refused = cuda.syncthreads_or(np.int32(worst > ONE_BITS))  # gpu: any thread's
    scan(values, mass)
    total = values[THREADS - 1]
    if refused or total == 0:
        return NO_TOKEN
    target = multiply_high(draw, total)
    if t % LANES == LANES - 1:
        before = np.uint64(0)
        if segment > 0:
            before = values[t - LANES]
        if before <= target and target < values[t]:
            found[0] = segment
            rest[0] = target - before
    cuda.syncthreads()  # gpu: the segment is known

    # Phase 3: the place in the segment
    target = rest[0]
    end = min((found[0] + 1) * share, num_words)
    portion = (share + THREADS - 1) // THREADS
    first = found[0] * share + t * portion
    last = min(first + portion, end)
    mass = np.uint64(0)
    w = first
    while w < last:
        mass += mass_of(row[w], like, per)
        w += 1
    scan(values, mass)
    reached = values[t] - mass
    if reached <= target and target < values[t]:
        # Phase 4: the token
        w = first
        e = 0
        reached += weight(element(row[w], e, like))
        while reached <= target:
            e += 1
            if e == per:
                e = 0
                w += 1
            reached += weight(element(row[w], e, like))
        found[1] = w * per + e
    cuda.syncthreads()  # gpu: the token is known
    return found[1]


@jit(launch_bounds=LAUNCH_BOUNDS)
def kernel(
    tokens, first_child, next_sibling, num_nodes, words, like, source, seeds, positions, uniforms, stop_tokens, nodes,
    num_accepted, bonus_tokens, flags, emitted,
):  # fmt: skip
    """One block a request; ``words`` [B, Q, V / n] hold n probabilities each, of the dtype of ``like``.

    ``source`` says where draws come from: UNIFORMS, ``uniforms`` [B, Q]; BY_NODE, ``seeds`` [B] and ``positions``
    [B, Q]; BY_DEPTH, ``positions`` are the root's, and the depth is added. ``emitted`` is the tokens of the result.
    """
    b = cuda.blockIdx.x  # gpu: the grid is the mirror's loop over b
    t = cuda.threadIdx.x  # gpu: which thread walks
    n = min(num_nodes[b], tokens.shape[1])
    values = cuda.shared.array(THREADS, types.uint64)  # gpu: what the threads tell each other
    found = cuda.shared.array(2, types.int32)  # gpu: as above
    rest = cuda.shared.array(1, types.uint64)  # gpu: as above
    step = cuda.shared.array(4, types.int32)  # gpu: where the walk is: node, bonus, count, flags

    # Phase 1: the root
    if t == 0:
        step[0] = 0 if n > 0 else -1
        step[1] = NO_TOKEN
        step[2] = 1 if n > 0 else 0
        step[3] = 0
        if n > 0:
            nodes[b, 0] = 0
    cuda.syncthreads()  # gpu: the walk has begun

    cur = step[0]
    while cur >= 0:
        draw = np.uint64(0)
        good = True
        if source == UNIFORMS:
            u = uniforms[b, cur]
            good = u >= ZERO
            if good:
                draw = draw_of_uniform(u)
        else:
            position = np.int64(positions[b, cur])
            if source == BY_DEPTH:
                position += step[2] - 1
            draw = random_bits(np.uint64(seeds[b]), np.uint64(position))
        token = NO_TOKEN
        if good:
            token = sample(words[b, cur], like, draw, values, found, rest)

        # Phase 5: the step of the walk
        if t == 0:
            child = child_with(tokens[b], first_child[b], next_sibling[b], cur, token, n)
            stopping = stops(stop_tokens[b], token)
            child, bonus, count, seen = take(token, child, stopping, nodes[b], emitted[b], step[2], step[3])
            step[0] = child
            step[1] = bonus
            step[2] = count
            step[3] = seen
        cuda.syncthreads()  # gpu: the next node is known
        cur = step[0]
        cuda.syncthreads()  # gpu: all have read it

    # Phase 6: what is behind the path
    count = step[2]
    bonus = step[1]
    if t == 0:
        num_accepted[b] = count
        bonus_tokens[b] = bonus
        flags[b] = step[3]
    i = t
    while i < nodes.shape[1]:
        if i >= count:
            nodes[b, i] = -1
        if i >= (count if bonus >= 0 else count - 1):
            emitted[b, i] = NO_TOKEN
        i += THREADS


def bytes_moved(num_accepted: int, vocabulary: int, itemsize: int) -> int:
    """Bytes that `accept_sampled` must read: a row of the law for each of the accepted nodes of all requests."""
    return num_accepted * vocabulary * itemsize


def accept_sampled(
    tree: Any,
    target_probs: Any,
    *,
    seeds: Any = None,
    positions: Any = None,
    uniforms: Any = None,
    stop_tokens: Any = None,
    out: Accepted | None = None,
    validate: bool = False,
) -> Accepted:
    """Accept a path of each draft tree, and a bonus token, as a sample of the target's law.

    What a request emits has the law of sampling token after token from the target alone, whatever the tree.

    Parameters
    ----------
    tree : DraftTree
        Of B requests and Q nodes; `build_tree` makes it. A request without nodes (``num_nodes`` 0) is idle.
    target_probs : float [B, Q, V]
        The target's probabilities behind each node, 0 to 1, of a sum of about 1 (what is drawn is proportional to
        them). float32, float16, bfloat16, or uint16 read as bfloat16 bits; any strides. `target_probs` makes it. Rows
        off the path do not matter.
    seeds : int64 or uint64 [B], optional
        Each request's seed, all its 64 bits. Together with ``positions``.
    positions : int32 or int64 [B] or [B, Q], optional
        Absolute position of the root of each request (as ``cache_seqlens``), or of each node (as `positions` makes it).
        The draw behind a node is a function of seed and position.
    uniforms : float32 or float64 [B, Q], optional
        In place of seeds and positions: a number for each node, 0 up to but not including 1. The token is the first
        whose cumulative probability exceeds it. 1 and more count as the largest U. The law is as fine as the numbers
        are: float32 ones, multiples of 2**-24 as a rule, hit tokens of less probability too often or never.
    stop_tokens : int, list, tuple or set of ints, or int32 or int64 [n] or [B, n], optional
        As in `accept_greedy`.
    out : Accepted, optional
        As in `accept_greedy`.
    validate : bool
        As in `accept_greedy`.

    Returns
    -------
    Accepted
        Of the kind of array of ``tree.tokens``. BAD_TARGET is flagged where the walk comes to a row with an entry that
        is NaN, negative or above 1, or to a row of zeros (of less than 2**-44 each), or to a uniform that is negative
        or NaN.

    Raises
    ------
    TypeError
        An argument is no array that kernels take, or has the wrong dtype; ``tree`` is no DraftTree.
    ValueError
        Neither seeds and positions nor uniforms are given, or more than these; a wrong shape or device; V = 0 or above
        2**19; a stop token that is negative or no int32; an output that overlaps an input; with ``validate``, a number
        of nodes beyond Q, or a link that leads to no later node of its tree.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream without synchronizing, except for NumPy arrays, which are copied to the device
    and back. With ``out``, nothing is allocated (but stop tokens given as numbers, at their first use), so a call can
    be captured in a CUDA graph; a replay draws afresh, because seeds and positions are device arrays.

    Source: Leviathan et al., arXiv 2211.17192; SpecInfer, arXiv 2305.09781; Philox, SC 2011.
    """
    views = accepted.tree_arguments(tree)
    batch, num_nodes = views["tokens"].shape
    probs = arrays.view("target_probs", target_probs)
    arrays.require_dtype(probs, *FLOATS, np.uint16)
    arrays.require_shape(probs, "[B, Q, V]", batch, num_nodes, None)
    if not 1 <= probs.shape[2] <= MAX_VOCABULARY:
        raise ValueError(f"{probs} has V = {probs.shape[2]}; it must be between 1 and {MAX_VOCABULARY}")
    source, draws = randomness(views["tokens"], seeds, positions, uniforms)
    stop = accepted.stop_argument(stop_tokens, views["tokens"], batch)
    arrays.require_one_place([views["tokens"], probs, *draws])
    out, found = accepted.results(out, views, tree.max_depth, [probs, *draws, stop])
    if arrays.require_flag("validate", validate):
        accepted.check_tree(views)
    if batch:
        walked = [views[name] for name in ("tokens", "first_child", "next_sibling", "num_nodes")]
        args = (*walked, probs.in_words(), probs.columns(0, 1), np.int32(source), *draws, stop, *found)
        launch(kernel, (batch, 1, 1), THREADS, args, results=5, shared_bytes=0)
    return out


def randomness(tokens: View, seeds: Any, positions: Any, uniforms: Any) -> tuple[int, list[View]]:
    """Where draws come from, and the kernel's seeds, positions and uniforms; what is not given is replaced.

    Raises
    ------
    TypeError, ValueError
        As in `accept_sampled`.
    """
    batch, num_nodes = tokens.shape
    given = [name for name, x in (("seeds", seeds), ("positions", positions), ("uniforms", uniforms)) if x is not None]
    if given not in (["uniforms"], ["seeds", "positions"]):
        raise ValueError(
            f"the randomness is given by {' and '.join(given) or 'nothing'}; "
            "it must be either seeds and positions, or uniforms"
        )
    if uniforms is not None:
        found = arrays.view("uniforms", uniforms)
        arrays.require_dtype(found, np.float32, np.float64)
        arrays.require_shape(found, "[B, Q]", batch, num_nodes)
        unused = arrays.constant(tokens.device, _zero)
        return UNIFORMS, [unused, unused.repeated(1), found]
    keys, places = arrays.view("seeds", seeds), arrays.view("positions", positions)
    arrays.require_dtype(keys, INT64, np.uint64)
    arrays.require_shape(keys, "[B]", batch)
    arrays.require_dtype(places, INT32, INT64)
    unused = arrays.constant(tokens.device, _zero)
    unused = replace(unused, dtype=np.dtype(np.float32), shape=(1, 1), strides=(4, 4))
    if len(places.shape) == 1:
        arrays.require_shape(places, "[B] or [B, Q]", batch)
        spread = replace(places, shape=(batch, num_nodes), strides=(*places.strides, 0))
        return BY_DEPTH, [keys, spread, unused]
    arrays.require_shape(places, "[B] or [B, Q]", batch, num_nodes)
    return BY_NODE, [keys, places, unused]


def _zero() -> np.ndarray:
    return np.zeros(1, INT64)
