"""target_probs: the target's law at each node: softmax(logits / temperature) over what top_k, then top_p keep.

For one row x = logits[b, q, :], with temperature T and m = max_v x[v]::

    e[v] = exp((x[v] - m) / T)              float32
    w[v] = floor(e[v] * 2**44)              uint64, the token's weight; the mass of a set is the sum of its weights
    K    = {v: x[v] >= the top_k-th largest logit}
    N    = {v in K: x[v] >= y}              y the largest logit with mass({v in K: x[v] >= y}) >= top_p * mass(K)
    probs[v] = e[v] * (2**44 / mass(N)) if v in N, else 0

Masses are integers: V <= 2**19 weights of at most 2**44 fit, and every order of summation gives the same bits.

One block a row. Few tokens are kept as a rule, so they are looked for in shared memory. Of n disjoint groups of logits,
the k-th largest of their maxima is a lower bound on the k-th largest logit (see tree/topk_threshold.py).

- Phase 1: each of THREADS threads finds the maxima of UNROLL groups; words of 8 bytes hold 2 or 4 logits.
- Phase 2: at temperature 0, the first of the largest logits has it all.
- Phase 3: the k-th largest maximum, bit by bit from the highest, for k = top_k, but at most WANTED.
- Phase 4: a second pass adds up the weights (top_k needs no sum) and collects the keys of logits that reach this
  threshold. A key is an integer that orders like the logit.
- Phase 5: the least key that is kept. The keys collected are sorted and their weights added up along the order, so that
  both borders are read off. Where there is no room for all (ties, sorted rows), or where they are fewer than top_k or
  have less mass than top_p, the border is found over the whole row, bit by bit, a pass for each bit in doubt.
- Phase 6: a last pass writes the probabilities.

Cost of a row: 3 V logits read, twice from L2, and V float32 written; V exponentials, with top_k only those of what is
kept. 25 KB of shared memory.

Source: top_k of Fan et al. 2018, "Hierarchical Neural Story Generation"; top_p of Holtzman et al. 2019, "The Curious
Case of Neural Text Degeneration".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.device import arrays
from ddtree_numba.device.arrays import FLOATS, View
from ddtree_numba.device.bf16 import array_to_f32, to_f32
from ddtree_numba.device.bits import element, max_nan, per_word
from ddtree_numba.device.launch import jit, launch
from ddtree_numba.device.runtime import require_backend
from ddtree_numba.tree.topk_threshold import (
    KEPT,
    THREADS,
    UNROLL,
    block_max,
    block_sum,
    float_of,
    mirror_ordered,
    ordered,
    sort_falling,
)

LAUNCH_BOUNDS = (THREADS, 1)
WANTED = THREADS  # groups whose maxima set the threshold, at most
ITEMS = 2 * THREADS  # keys that there is room for, a power of two
MAX_VOCABULARY = 2**19
LEAST_CONSTANT = 1024  # elements of the array that a number becomes: so many requests share it

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
NEG_INF = np.float32(-np.inf)
POS_INF = np.float32(np.inf)
LEAST_TEMPERATURE = np.float32(2.0**-126)  # its reciprocal is finite; what is below counts as 0
UNIT = np.float32(2.0**44)  # weight of the likeliest
FRACTION = np.float32(2.0**32)
NO_KEY = np.uint32(0x007FFFFF)  # of -inf
NONE = np.uint64(0)
SINGLE = np.uint64(1)
HALF = np.uint64(32)
LOWER = np.uint64(0xFFFFFFFF)
NO_TOKEN = np.int32(2**31 - 1)
# Bits of a key that say nothing, by dtype of the logits.
LOWEST = {"float32": 0, "float16": 13, "bfloat16": 16, "uint16": 16}


@np.errstate(over="ignore")  # finite logits may lie so far apart that their difference is -inf
def mirror(words, logits, temperatures, top_ks, top_ps, lowest, probs):
    """The kernel in NumPy: the same phases and groups, the same masses. Arrays as in `arguments`, on the host."""
    probs[...] = 0
    for b, q in np.ndindex(words.shape[:2]):
        # Phase 1: the maxima of THREADS * UNROLL groups, and the row's
        row = words[b, q].copy()
        x = array_to_f32(row.view(logits.dtype))
        vocabulary = x.size
        per = vocabulary // row.size
        in_groups = np.pad(x, (0, -vocabulary % (THREADS * UNROLL * per)), constant_values=NEG_INF)
        maxima = np.maximum.reduce(in_groups.reshape(-1, UNROLL, THREADS, per), axis=(0, 3))
        m = np.maximum.reduce(maxima, axis=None)
        temperature, top_p, k = temperatures[b], top_ps[b], int(top_ks[b])
        good = np.isfinite(m) and np.isfinite(temperature) and temperature >= 0 and top_p > 0
        if not good:
            continue

        # Phase 2: at temperature 0, the first of the largest
        if temperature < LEAST_TEMPERATURE:
            probs[b, q, x.argmax()] = 1
            continue
        rate = ONE / temperature

        # Phase 3: a threshold that enough logits reach
        k = k if 0 < k < vocabulary else vocabulary
        limited = k < vocabulary or top_p < 1
        maxima = mirror_ordered(maxima)
        threshold = np.uint32(0)
        for bit in range(31, max(lowest, KEPT) - 1, -1):
            trial = threshold | np.uint32(1 << bit)
            if np.count_nonzero(maxima >= trial) >= min(k, WANTED):
                threshold = trial

        # Phase 4: the mass of the row, and the keys that reach the threshold
        e = np.exp((x - m) * rate, dtype=np.float64).astype(np.float32)
        weights = (e * UNIT).astype(np.uint64)
        keys = mirror_ordered(x)
        total = int(weights.sum())
        reach = keys >= max(threshold, NO_KEY + np.uint32(1))
        found = np.count_nonzero(reach)

        # Phase 5: the least key that is kept, and the mass of all that are
        border, kept = 0, total
        if limited:
            kept = 0
            if found <= ITEMS and (threshold <= NO_KEY or found >= k or k == vocabulary):
                border, kept = mirror_among_items(keys[reach], weights[reach], total, k, vocabulary, float(top_p))
            if kept == 0:
                known = int(threshold) if k <= WANTED else 0
                border, kept = mirror_in_row(weights, keys, k, float(top_p), known, int(lowest))

        # Phase 6: write what is kept
        scale = UNIT / np.float32(kept)
        probs[b, q] = np.where(keys >= border, e * scale, ZERO)


def mirror_needed(top_p, total):
    """The mass that ``top_p`` asks for."""
    return max(1, -(-int(top_p * 2**32) * total // 2**32))


def mirror_among_items(items, weights, total, k, vocabulary, top_p):
    order = np.argsort(items)[::-1]
    items, masses = items[order], np.cumsum(weights[order])
    border = items[min(k, items.size) - 1]
    kept = int(masses[items >= border][-1])
    if top_p < 1:
        need = mirror_needed(top_p, kept if k < vocabulary else total)
        if kept < need:
            return 0, 0
        border = items[masses >= need][0]
        kept = int(masses[items >= border][-1])
    return border, kept


def mirror_in_row(weights, keys, k, top_p, known, lowest):
    border = 0
    if k < keys.size:
        border = mirror_least_key(keys, np.ones_like(weights), k, known, lowest)
    kept = int(weights[keys >= border].sum())
    if top_p < 1:
        border = mirror_least_key(keys, weights, mirror_needed(top_p, kept), border, lowest)
        kept = int(weights[keys >= border].sum())
    return border, kept


def mirror_least_key(keys, amounts, target, known, lowest):
    key = 0
    for bit in range(31, lowest - 1, -1):
        trial = key | 1 << bit
        if trial <= known or amounts[keys >= trial].sum() >= target:
            key = trial
    return key


@cuda.jit(device=True, inline="always")
def exponential(x, m, rate):
    """``e`` of a logit, at most 1."""
    return np.float32(math.exp((x - m) * rate))


@cuda.jit(device=True, inline="always")
def weight(x, m, rate):
    """A logit's share of a mass: exact integers, so that every order of summation gives the same bits."""
    return np.uint64(exponential(x, m, rate) * UNIT)


@cuda.jit(device=True, inline="always")
def needed(top_p, total):
    """The mass that ``top_p`` asks for: ceil(floor(top_p * 2**32) * total / 2**32), at least 1, for top_p < 1."""
    share = np.uint64(top_p * FRACTION)
    return max(share * (total >> HALF) + ((share * (total & LOWER) + LOWER) >> HALF), SINGLE)


@cuda.jit(device=True, inline="always")
def largest_in(word, like, per, largest):
    """The largest logit of a word, or ``largest``, or NaN."""
    e = 0
    while e < per:
        largest = max_nan(largest, element(word, e, like))
        e += 1
    return largest


@cuda.jit(device=True, inline="always")
def first_of(row, like, m, place):
    """The lowest id of the logits that equal ``m``, for each thread."""
    t = cuda.threadIdx.x
    if t == 0:
        place[0] = NO_TOKEN
    cuda.syncthreads()
    per = per_word(row, like)
    w = t
    while w < row.shape[0]:
        word = row[w]
        e = 0
        while e < per:
            if element(word, e, like) == m:
                cuda.atomic.min(place, 0, np.int32(w * per + e))
            e += 1
        w += THREADS
    cuda.syncthreads()
    return place[0]


@cuda.jit(device=True, inline="always")
def write_only(result, token):
    """All probability to one token, or none where ``token`` is none."""
    v = cuda.threadIdx.x
    while v < result.shape[0]:
        result[v] = ONE if v == token else ZERO
        v += THREADS


@cuda.jit(device=True, inline="always")
def visit(word, like, per, m, rate, limit, weigh, mass, items, counter):
    """Add a word's weights to ``mass`` if they are asked for, and collect the keys of logits that reach ``limit``."""
    e = 0
    while e < per:
        x = element(word, e, like)
        if weigh:
            mass += weight(x, m, rate)
        if x >= limit:
            at = cuda.atomic.add(counter, 0, 1)
            if at < ITEMS:
                items[at] = ordered(x)
        e += 1
    return mass


@cuda.jit(device=True, inline="always")
def add_up(masses, size):
    """Make masses[i] the sum of the first i + 1, for the first ``size``, a power of two (Brent and Kung 1982)."""
    gap = 1
    while gap < size:
        at = cuda.threadIdx.x
        while at < size // (2 * gap):
            i = (2 * at + 2) * gap - 1
            masses[i] += masses[i - gap]
            at += THREADS
        cuda.syncthreads()
        gap *= 2
    gap = size // 4
    while gap > 0:
        at = cuda.threadIdx.x
        while at < size // (2 * gap) - 1:
            i = (2 * at + 3) * gap - 1
            masses[i] += masses[i - gap]
            at += THREADS
        cuda.syncthreads()
        gap //= 2


@cuda.jit(device=True, inline="always")
def mass_from(items, masses, size, key, place):
    """Mass of the items that are at least ``key``, by the place of the last of them."""
    i = cuda.threadIdx.x
    while i < size:
        if items[i] >= key and (i + 1 == size or items[i + 1] < key):
            place[0] = i
        i += THREADS
    cuda.syncthreads()
    mass = masses[place[0]]
    cuda.syncthreads()
    return mass


@cuda.jit(device=True, inline="always")
def first_with_mass(items, masses, size, need, place):
    """The first item up to which there is a mass of ``need``."""
    i = cuda.threadIdx.x
    while i < size:
        if masses[i] >= need and (i == 0 or masses[i - 1] < need):
            place[0] = i
        i += THREADS
    cuda.syncthreads()
    item = items[place[0]]
    cuda.syncthreads()
    return item


@cuda.jit(device=True, inline="always")
def among_items(items, masses, place, found, k, vocabulary, top_p, total, m, rate):
    """The least item that is kept, and the mass of all that are; 0 where the items have less than is needed."""
    size = 2
    while size < found:
        size *= 2
    i = found + cuda.threadIdx.x
    while i < size:
        items[i] = np.uint32(0)
        i += THREADS
    cuda.syncthreads()
    sort_falling(items, size)
    i = cuda.threadIdx.x
    while i < size:
        masses[i] = weight(float_of(items[i]), m, rate) if i < found else NONE
        i += THREADS
    cuda.syncthreads()
    add_up(masses, size)
    border = items[min(k, found) - 1]
    kept = mass_from(items, masses, size, border, place)
    if top_p < ONE:
        need = needed(top_p, kept if k < vocabulary else total)
        if kept < need:
            return border, NONE
        border = first_with_mass(items, masses, size, need, place)
        kept = mass_from(items, masses, size, border, place)
    return border, kept


@cuda.jit(device=True, inline="always")
def amount_from(row, like, key, by_mass, m, rate, sums):
    """Of the row's logits whose key is at least ``key``, the mass, or else the number."""
    per = per_word(row, like)
    amount = NONE
    w = cuda.threadIdx.x
    while w < row.shape[0]:
        word = row[w]
        e = 0
        while e < per:
            x = element(word, e, like)
            if ordered(x) >= key:
                amount += weight(x, m, rate) if by_mass else SINGLE
            e += 1
        w += THREADS
    return block_sum(sums, amount)


@cuda.jit(device=True, inline="always")
def least_key(row, like, target, by_mass, known, m, rate, lowest, sums):
    """The largest key from which there is ``target``, bit by bit; trials that the bounds decide take no pass."""
    key = np.uint32(0)
    largest = ordered(m)
    bit = 31
    while bit >= lowest:
        trial = key | (np.uint32(1) << np.uint32(bit))
        if trial <= known:
            key = trial
        elif trial <= largest:
            if amount_from(row, like, trial, by_mass, m, rate, sums) >= target:
                key = trial
        bit -= 1
    return key


@cuda.jit(device=True, inline="always")
def in_row(row, like, k, vocabulary, top_p, total, known, m, rate, lowest, sums):
    """As `among_items`, over the whole row; ``known`` is a key that top_k keeps."""
    border = np.uint32(0)
    kept = total
    if k < vocabulary:
        border = least_key(row, like, np.uint64(k), False, known, m, rate, lowest, sums)
        kept = amount_from(row, like, border, True, m, rate, sums)
    if top_p < ONE:
        border = least_key(row, like, needed(top_p, kept), True, border, m, rate, lowest, sums)
        kept = amount_from(row, like, border, True, m, rate, sums)
    return border, kept


@cuda.jit(device=True, inline="always")
def probability(x, m, rate, limit, scale):
    """Of a logit: 0 below ``limit``."""
    return exponential(x, m, rate) * scale if x >= limit else ZERO


@jit(launch_bounds=LAUNCH_BOUNDS)
def kernel(words, logits, temperatures, top_ks, top_ps, lowest, probs):
    """One block a row; ``words`` [B, Q, V / n] are the logits, n to a word."""
    _, num_nodes, num_words = words.shape
    vocabulary = logits.shape[2]
    per = per_word(words, logits)
    b = cuda.blockIdx.x // num_nodes  # gpu: the grid is the mirror's loop over b, q
    q = cuda.blockIdx.x % num_nodes  # gpu: as above
    t = cuda.threadIdx.x  # gpu: a thread takes words t, t + THREADS, .. of each group of words
    items = cuda.shared.array(ITEMS, types.uint32)  # gpu: what the threads tell each other
    masses = cuda.shared.array(ITEMS, types.uint64)  # gpu: as above
    place = cuda.shared.array(1, types.int32)  # gpu: as above
    row = words[b, q]
    result = probs[b, q]

    # Phase 1: the maxima of THREADS * UNROLL groups, and the row's
    max_0 = max_1 = max_2 = max_3 = NEG_INF
    w = t
    while w < num_words - 3 * THREADS:  # gpu: four loads are on their way before the first is used
        word_0, word_1, word_2, word_3 = row[w], row[w + THREADS], row[w + 2 * THREADS], row[w + 3 * THREADS]
        max_0 = largest_in(word_0, logits, per, max_0)
        max_1 = largest_in(word_1, logits, per, max_1)
        max_2 = largest_in(word_2, logits, per, max_2)
        max_3 = largest_in(word_3, logits, per, max_3)
        w += UNROLL * THREADS
    if w < num_words:
        max_0 = largest_in(row[w], logits, per, max_0)
    if w < num_words - THREADS:
        max_1 = largest_in(row[w + THREADS], logits, per, max_1)
    if w < num_words - 2 * THREADS:
        max_2 = largest_in(row[w + 2 * THREADS], logits, per, max_2)
    m = max_nan(max_nan(max_0, max_1), max_nan(max_2, max_3))
    m = float_of(block_max(items, ordered(m if m == m else POS_INF)))  # NaN has no order
    temperature, top_p, k = temperatures[b], top_ps[b], top_ks[b]
    good = m > NEG_INF and m < POS_INF and temperature >= ZERO and temperature < POS_INF and top_p > ZERO
    if not good:
        write_only(result, NO_TOKEN)
        return

    # Phase 2: at temperature 0, the first of the largest
    if temperature < LEAST_TEMPERATURE:
        write_only(result, first_of(row, logits, m, place))
        return
    rate = ONE / temperature

    # Phase 3: a threshold that enough logits reach
    if k <= 0 or k > vocabulary:
        k = np.int32(vocabulary)
    limited = k < vocabulary or top_p < ONE
    threshold = np.uint32(0)
    limit = POS_INF
    if limited:
        key_0, key_1, key_2, key_3 = ordered(max_0), ordered(max_1), ordered(max_2), ordered(max_3)
        bit = 31
        while bit >= max(lowest, KEPT):  # bits that a dtype does not have decide nothing
            trial = threshold | (np.uint32(1) << np.uint32(bit))
            reached = cuda.syncthreads_count(np.int32(key_0 >= trial))  # gpu: over the threads
            reached += cuda.syncthreads_count(np.int32(key_1 >= trial))  # gpu: as above
            reached += cuda.syncthreads_count(np.int32(key_2 >= trial))  # gpu: as above
            reached += cuda.syncthreads_count(np.int32(key_3 >= trial))  # gpu: as above
            if reached >= min(k, WANTED):
                threshold = trial
            bit -= 1
        limit = float_of(max(threshold, NO_KEY + np.uint32(1)))

    # Phase 4: the mass of the row, and the keys that reach the threshold
    weigh = k == vocabulary
    if t == 0:
        place[0] = 0
    cuda.syncthreads()  # gpu: counting starts from 0
    mass = NONE
    w = t
    while w < num_words - 3 * THREADS:
        word_0, word_1, word_2, word_3 = row[w], row[w + THREADS], row[w + 2 * THREADS], row[w + 3 * THREADS]
        mass = visit(word_0, logits, per, m, rate, limit, weigh, mass, items, place)
        mass = visit(word_1, logits, per, m, rate, limit, weigh, mass, items, place)
        mass = visit(word_2, logits, per, m, rate, limit, weigh, mass, items, place)
        mass = visit(word_3, logits, per, m, rate, limit, weigh, mass, items, place)
        w += UNROLL * THREADS
    while w < num_words:
        mass = visit(row[w], logits, per, m, rate, limit, weigh, mass, items, place)
        w += THREADS
    total = block_sum(masses, mass)
    found = place[0]
    cuda.syncthreads()  # gpu: all have read how many

    # Phase 5: the least key that is kept, and the mass of all that are
    border, kept = np.uint32(0), total
    if limited:
        kept = NONE
        if found <= ITEMS and (threshold <= NO_KEY or found >= k or k == vocabulary):
            border, kept = among_items(items, masses, place, found, k, vocabulary, top_p, total, m, rate)
        if kept == NONE:
            known = threshold if k <= WANTED else np.uint32(0)
            border, kept = in_row(row, logits, k, vocabulary, top_p, total, known, m, rate, lowest, masses)

    # Phase 6: write what is kept
    scale = UNIT / np.float32(kept)
    limit = float_of(max(border, NO_KEY))
    source = logits[b, q]
    v = t
    while v < vocabulary - 3 * THREADS:
        x_0, x_1 = to_f32(source[v]), to_f32(source[v + THREADS])
        x_2, x_3 = to_f32(source[v + 2 * THREADS]), to_f32(source[v + 3 * THREADS])
        result[v] = probability(x_0, m, rate, limit, scale)
        result[v + THREADS] = probability(x_1, m, rate, limit, scale)
        result[v + 2 * THREADS] = probability(x_2, m, rate, limit, scale)
        result[v + 3 * THREADS] = probability(x_3, m, rate, limit, scale)
        v += UNROLL * THREADS
    while v < vocabulary:
        result[v] = probability(to_f32(source[v]), m, rate, limit, scale)
        v += THREADS


def bytes_moved(batch: int, num_rows: int, vocabulary: int, itemsize: int) -> int:
    """Bytes that `target_probs` must move: each logit of ``itemsize`` bytes read, each float32 probability written."""
    return batch * num_rows * vocabulary * (itemsize + 4)


def target_probs(logits: Any, temperature: Any, top_k: Any = None, top_p: Any = None, *, out: Any = None) -> Any:
    """The target's law at each node: softmax(logits / temperature) over what top_k, then top_p keep; 0 elsewhere.

    Parameters
    ----------
    logits : float [B, Q, V]
        Of the target, in nats: float32, float16, bfloat16, or uint16 read as bfloat16 bits. Any strides.
    temperature : float or float32 [B]
        0 (or below 2**-126) gives the likeliest token probability 1; of equal logits the lowest id.
    top_k : int or int32 [B], optional
        Keeps the logits that are at least the top_k-th largest: more than top_k where there are ties. None, at most 0,
        or at least V: off.
    top_p : float or float32 [B], optional
        Keeps, of these, the logits from y on, y being the largest of which those from y on have at least top_p of the
        mass that top_k keeps. None, or 1 (in an array: 1 or more): off.
    out : float32 [B, Q, V], optional
        Written to in place of a new array.

    Returns
    -------
    probs : float32 [B, Q, V]
        Each entry in [0, 1], each row with sum 1 up to rounding; of the kind of array of ``logits``. All 0 in a row
        that holds a NaN or +inf or nothing but -inf, and in all rows of a request whose temperature is negative,
        infinite or NaN, or whose top_p is NaN or at most 0: `accept_sampled` flags these.

    Raises
    ------
    TypeError
        An array is none that kernels take, or has the wrong dtype; temperature or top_p is neither a number nor an
        array; top_k is neither an integer nor an array (bool is none).
    ValueError
        A wrong shape or device; V is 0 or above 2**19; 2**31 rows or more; a number that is no temperature (negative,
        NaN, or beyond float32) or no top_p (NaN, at most 0, or above 1); an output that overlaps an input.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream without synchronizing, except for NumPy arrays, which are copied to the device
    and back. A number becomes an array of at least 1,024 elements, kept for the life of the process; so with ``out``
    nothing is allocated once a call with the same numbers has run, and a call can be captured in a CUDA graph.
    Arithmetic is float32, masses are exact integers: what is kept depends on no order of summation.

    Source: Fan et al. 2018 (top_k), Holtzman et al. 2019 (top_p).
    """
    x = arrays.view("logits", logits)
    arrays.require_dtype(x, *FLOATS, np.uint16)
    arrays.require_shape(x, "[B, Q, V]", None, None, None)
    if not 1 <= x.shape[2] <= MAX_VOCABULARY:
        raise ValueError(f"{x} has V = {x.shape[2]}; it must be between 1 and {MAX_VOCABULARY}")
    rows = x.shape[0] * x.shape[1]
    if rows >= 2**31:
        raise ValueError(f"{x} has {rows} rows; they must be less than 2**31")
    temperatures, top_ks, top_ps = controls(x, temperature, top_k, top_p)
    if out is None:
        out = arrays.empty(x, x.shape, np.dtype(np.float32))
    result = arrays.view("out", out)
    arrays.require_dtype(result, np.float32)
    arrays.require_shape(result, "[B, Q, V]", *x.shape)
    arrays.require_one_place([x, temperatures, top_ks, top_ps, result])
    arrays.require_apart(result, [x, temperatures, top_ks, top_ps])
    if rows > 0:
        require_backend()
        args = arguments(x, temperatures, top_ks, top_ps, result)
        launch(kernel, (rows, 1, 1), THREADS, args, results=1, shared_bytes=0)
    return out


def arguments(logits: View, temperatures: View, top_ks: View, top_ps: View, probs: View) -> tuple[Any, ...]:
    """The kernel's arguments: the logits as words of 8 bytes where rows can be read so, else as they are."""
    lowest = np.int32(LOWEST[logits.dtype.name])
    return logits.in_words(), logits, temperatures, top_ks, top_ps, lowest, probs


def controls(logits: View, temperature: Any, top_k: Any, top_p: Any) -> tuple[View, View, View]:
    """temperature, top_k and top_p as views [B], checked.

    Raises
    ------
    TypeError, ValueError
        As in `target_probs`.
    """
    return (
        _per_request("temperature", temperature, _checked_temperature, _floats_of_bits, logits),
        _per_request("top_k", 0 if top_k is None else top_k, _checked_top_k, _integers, logits),
        _per_request("top_p", 1.0 if top_p is None else top_p, _checked_top_p, _floats_of_bits, logits),
    )


def _per_request(name: str, given: Any, checked: Callable[[Any], int], make: Callable[..., Any], logits: View) -> View:
    """A control as a view [B]: the caller's array, or for a number a part of a longer array of it.

    So both lie in C order, and the kernel is compiled for one kind of arrays only.
    """
    batch = logits.shape[0]
    dtype = make(0, 1).dtype
    if isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, bool):
        size = max(LEAST_CONSTANT, 1 << (batch - 1).bit_length())
        return arrays.constant(logits.device, make, checked(given), size).columns(0, batch)
    if not hasattr(given, "shape") and not hasattr(given, "__cuda_array_interface__"):
        raise TypeError(f"{name} is {arrays.shown(given)}; it must be a number, or an array [B] of {dtype}")
    found = arrays.view(name, given)
    arrays.require_dtype(found, dtype)
    arrays.require_shape(found, "[B]", batch)
    return found


def _checked_temperature(given: Any) -> int:
    most = float(np.finfo(np.float32).max)
    if not 0 <= given <= most:
        raise ValueError(f"temperature is {arrays.shown(given)}; it must be at least 0 and finite in float32")
    return _bits(given)


def _checked_top_k(given: Any) -> int:
    if isinstance(given, int):
        given = max(0, min(given, MAX_VOCABULARY + 1))  # of any size: beyond V it is no limit
    top_k = arrays.require_integer("top_k", given)
    return top_k if 0 < top_k <= MAX_VOCABULARY else 0


def _checked_top_p(given: Any) -> int:
    if not 0 < given <= 1:
        raise ValueError(f"top_p is {arrays.shown(given)}; it must be above 0 and at most 1")
    return _bits(max(float(given), float(np.finfo(np.float32).tiny)))


def _bits(x: Any) -> int:
    return int(np.float32(x).view(np.uint32))


def _floats_of_bits(bits: int, size: int) -> np.ndarray:
    return np.full(size, bits, np.uint32).view(np.float32)


def _integers(n: int, size: int) -> np.ndarray:
    return np.full(size, n, np.int32)
