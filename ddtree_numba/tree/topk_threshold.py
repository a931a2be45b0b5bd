"""Variant `threshold`: top-k log-probabilities in two passes over the row.

The mathematics is that of topk_rounds.py. Of n disjoint groups of logits, the k-th largest of their maxima is a lower
bound on the k-th largest logit, since k logits are at least as large. For n well above k it is a tight one: about
n log(n / (n - k)) logits reach it, 66 for k = 64 and n = 1024, if they lie in random order. So

- Phase 1: each of THREADS threads finds the maxima of UNROLL groups; words of 8 bytes hold 2 or 4 logits.
- Phase 2: the k-th largest maximum, bit by bit from the highest: a bit stays set if k maxima still reach the trial. The
  last KEPT bits are left 0, which lowers the threshold by less than 1 in 2,000.
- Phase 3: the second pass adds up the exponentials and collects the logits that reach the threshold.
- Phase 4: where more reach it than ITEMS have room for (ties, sorted rows), the k-th item of the whole row is found bit
  by bit, a pass over the row for each bit in doubt, and exactly k are collected.
- Phase 5: the items are sorted, and the best k written.

An item is one uint64: in the upper half an integer that orders like the logit, in the lower the complement of the id.
So items are all different, larger logits stand first, and ties go to the lowest id, whatever order they come in.

Cost of a row: 2 V logits read, the second time from L2; V exponentials. 20 KB of shared memory.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.device import runtime
from ddtree_numba.device.arrays import HOST, View
from ddtree_numba.device.bf16 import array_to_f32
from ddtree_numba.device.bits import bits_f32, element, f32_bits, per_word
from ddtree_numba.device.launch import jit, launch
from ddtree_numba.device.runtime import require_backend
from ddtree_numba.tree.topk_rounds import NEG_INF, ZERO, Problem, is_finite

THREADS = 16 if runtime.SIMULATOR else 1024
LAUNCH_BOUNDS = (THREADS, 1)
UNROLL = 4
ITEMS = 2048  # at least the largest k, a power of two
KEPT = 12  # low bits of the threshold that are not looked for
SIGN = np.uint32(1 << 31)


@np.errstate(over="ignore")  # finite logits may lie so far apart that their difference is -inf
def mirror(words, like, logprobs, token_ids):
    """The kernel in NumPy: the same phases and groups. ``words`` and ``like`` as in `arguments`, on the host."""
    k = logprobs.shape[2]
    for b, l in np.ndindex(words.shape[:2]):
        # Phase 1: the maxima of THREADS * UNROLL groups, and the row's
        row = words[b, l].copy()
        x = array_to_f32(row.view(like.dtype))
        vocabulary = x.size
        per = vocabulary // row.size
        in_groups = np.pad(x, (0, -vocabulary % (THREADS * UNROLL * per)), constant_values=NEG_INF)
        in_groups = in_groups.reshape(-1, UNROLL, THREADS, per)
        maxima = np.fmax.reduce(in_groups, axis=(0, 3))
        m = np.fmax.reduce(maxima, axis=None)
        if not np.isfinite(m):
            logprobs[b, l], token_ids[b, l] = NEG_INF, -1
            continue

        # Phase 2: a threshold that at least k logits reach
        keys = mirror_ordered(maxima)
        threshold = np.uint32(0)
        for bit in range(31, KEPT - 1, -1):
            trial = threshold | np.uint32(1 << bit)
            if np.count_nonzero(keys >= trial) >= k:
                threshold = trial

        # Phase 3: the sum of exponentials, and the items that reach the threshold
        e = np.exp(in_groups - m)
        partial = np.add.reduce(e.transpose(0, 3, 1, 2).reshape(-1, UNROLL, THREADS), axis=0)
        partial = (partial[0] + partial[1]) + (partial[2] + partial[3])
        while partial.size > 1:
            partial = partial[: partial.size // 2] + partial[partial.size // 2 :]
        lse = m + np.log(partial[0])
        if not np.isfinite(lse):
            logprobs[b, l], token_ids[b, l] = NEG_INF, -1
            continue
        all_items = mirror_ordered(x).astype(np.uint64) << np.uint64(32)
        all_items |= ~np.arange(vocabulary, dtype=np.uint32)
        items = all_items[mirror_ordered(x) >= threshold]

        # Phase 4: too many, so find the k-th item itself
        if items.size > ITEMS:
            items = np.partition(all_items, vocabulary - k)[vocabulary - k :]

        # Phase 5: sort, and write the best k
        items = np.sort(items)[::-1][:k]
        token_ids[b, l] = ~items.astype(np.uint32)
        logprobs[b, l] = x[token_ids[b, l]] + ZERO - lse


def mirror_ordered(x):
    bits = (x + ZERO).view(np.uint32)
    return np.where(bits >= SIGN, ~bits, bits | SIGN)


@cuda.jit(device=True, inline="always")
def ordered(x):
    """An unsigned integer that orders like the float; 0.0 and -0.0 are one, and -inf is above 0."""
    bits = f32_bits(x + ZERO)
    return ~bits if bits >= SIGN else bits | SIGN


@cuda.jit(device=True, inline="always")
def float_of(key):
    """The inverse of `ordered`."""
    return bits_f32(key ^ SIGN if key >= SIGN else ~key)


@cuda.jit(device=True, inline="always")
def item_of(x, v):
    """The logit x at id v as an item."""
    return (np.uint64(ordered(x)) << np.uint64(32)) | np.uint64(~np.uint32(v))


@cuda.jit(device=True, inline="always")
def count_from(row, like, item, counter):
    """How many items of the row are at least ``item``, told to each thread; ``counter`` is 0 before and after."""
    t = cuda.threadIdx.x
    per = per_word(row, like)
    count = 0
    w = t
    while w < row.shape[0]:
        word = row[w]
        e = 0
        while e < per:
            if item_of(element(word, e, like), w * per + e) >= item:
                count += 1
            e += 1
        w += THREADS
    cuda.atomic.add(counter, 0, count)
    cuda.syncthreads()
    total = counter[0]
    cuda.syncthreads()
    if t == 0:
        counter[0] = 0
    cuda.syncthreads()
    return total


@cuda.jit(device=True, inline="always")
def kth_item(row, like, k, threshold, largest, counter):
    """The k-th largest item of the row, bit by bit; trials that the bounds decide take no pass."""
    per = per_word(row, like)
    vocabulary = row.shape[0] * per
    id_bits = 0
    while (vocabulary - 1) >> id_bits > 0:
        id_bits += 1
    low = np.uint64(0xFFFFFFFF) & ~((np.uint64(1) << np.uint64(id_bits)) - np.uint64(1))  # bits that all items have
    item = low
    bit = 63
    nothing = np.uint64(ordered(NEG_INF))
    if (
        np.uint64(threshold) <= nothing
        and count_from(row, like, (nothing + np.uint64(1)) << np.uint64(32), counter) < k
    ):
        item = low | (nothing << np.uint64(32))  # fewer than k are above -inf, as where a vocabulary is masked
        bit = id_bits - 1
    while bit >= 0:
        if bit >= 32 or bit < id_bits:
            trial = item | (np.uint64(1) << np.uint64(bit))
            if trial <= (np.uint64(threshold) << np.uint64(32)):
                item = trial
            elif np.uint32(trial >> np.uint64(32)) <= largest:
                if count_from(row, like, trial, counter) >= k:
                    item = trial
        bit -= 1
    return item


@cuda.jit(device=True, inline="always")
def collect_from(row, like, item, items, counter):
    """Put the row's items that are at least ``item`` into ``items``, as many as it takes; ``counter`` counts all."""
    per = per_word(row, like)
    w = cuda.threadIdx.x
    while w < row.shape[0]:
        word = row[w]
        e = 0
        while e < per:
            found = item_of(element(word, e, like), w * per + e)
            if found >= item:
                at = cuda.atomic.add(counter, 0, 1)
                if at < ITEMS:
                    items[at] = found
            e += 1
        w += THREADS


@cuda.jit(device=True, inline="always")
def largest_in(word, like, per, largest):
    """The largest logit of a word, or ``largest``."""
    e = 0
    while e < per:
        largest = max(largest, element(word, e, like))
        e += 1
    return largest


@cuda.jit(device=True, inline="always")
def visit(word, like, per, w, m, limit, total, items, counter):
    """Add a word's exponentials to ``total``, one after the other, and collect its logits that reach ``limit``."""
    e = 0
    while e < per:
        x = element(word, e, like)
        total += math.exp(x - m)
        if x >= limit:
            at = cuda.atomic.add(counter, 0, 1)
            if at < ITEMS:
                items[at] = item_of(x, w * per + e)
        e += 1
    return total


@cuda.jit(device=True, inline="always")
def block_max(values, value):
    """Largest of the threads' values, for each of them."""
    t = cuda.threadIdx.x
    values[t] = value
    cuda.syncthreads()
    width = THREADS // 2
    while width > 0:
        if t < width:
            values[t] = max(values[t], values[t + width])
        cuda.syncthreads()
        width //= 2
    result = values[0]
    cuda.syncthreads()
    return result


@cuda.jit(device=True, inline="always")
def block_sum(values, value):
    """Sum of the threads' values in a fixed order, for each of them."""
    t = cuda.threadIdx.x
    values[t] = value
    cuda.syncthreads()
    width = THREADS // 2
    while width > 0:
        if t < width:
            values[t] += values[t + width]
        cuda.syncthreads()
        width //= 2
    result = values[0]
    cuda.syncthreads()
    return result


@cuda.jit(device=True, inline="always")
def sort_falling(items, size):
    """Bitonic sort of the first ``size`` items, a power of two, largest first (Batcher 1968)."""
    run = 2
    while run <= size:
        gap = run // 2
        while gap > 0:
            at = cuda.threadIdx.x
            while at < size // 2:
                i = 2 * at - (at & (gap - 1))
                j = i + gap
                rising = (i & run) != 0
                if (items[i] < items[j]) != rising:
                    items[i], items[j] = items[j], items[i]
                at += THREADS
            cuda.syncthreads()
            gap //= 2
        run *= 2


@cuda.jit(device=True, inline="always")
def write_nothing(logprobs, token_ids, b, l):
    """A row without a finite logsumexp has no candidates."""
    for r in range(cuda.threadIdx.x, logprobs.shape[2], THREADS):
        logprobs[b, l, r] = NEG_INF
        token_ids[b, l, r] = -1


@jit(launch_bounds=LAUNCH_BOUNDS)
def kernel(words, like, logprobs, token_ids):
    """One block a row; ``words`` [B, L, V / n] hold n logits each, of the dtype of ``like``."""
    length = words.shape[1]
    num_words = words.shape[2]
    k = logprobs.shape[2]
    per = per_word(words, like)
    b = cuda.blockIdx.x // length  # gpu: the grid is the mirror's loop over b, l
    l = cuda.blockIdx.x % length  # gpu: as above
    t = cuda.threadIdx.x  # gpu: a thread takes words t, t + THREADS, .. of each group of words
    values = cuda.shared.array(THREADS, types.float32)  # gpu: what the threads tell each other
    items = cuda.shared.array(ITEMS, types.uint64)  # gpu: as above
    counter = cuda.shared.array(1, types.int32)  # gpu: as above
    row = words[b, l]
    if t == 0:
        counter[0] = 0

    # Phase 1: the maxima of THREADS * UNROLL groups, and the row's
    max_0 = max_1 = max_2 = max_3 = NEG_INF
    w = t
    while w < num_words - 3 * THREADS:  # gpu: four loads are on their way before the first is used
        word_0, word_1, word_2, word_3 = row[w], row[w + THREADS], row[w + 2 * THREADS], row[w + 3 * THREADS]
        max_0 = largest_in(word_0, like, per, max_0)
        max_1 = largest_in(word_1, like, per, max_1)
        max_2 = largest_in(word_2, like, per, max_2)
        max_3 = largest_in(word_3, like, per, max_3)
        w += UNROLL * THREADS
    if w < num_words:
        max_0 = largest_in(row[w], like, per, max_0)
    if w < num_words - THREADS:
        max_1 = largest_in(row[w + THREADS], like, per, max_1)
    if w < num_words - 2 * THREADS:
        max_2 = largest_in(row[w + 2 * THREADS], like, per, max_2)
    m = block_max(values, max(max(max_0, max_1), max(max_2, max_3)))
    if not is_finite(m):
        write_nothing(logprobs, token_ids, b, l)
        return

    # Phase 2: a threshold that at least k logits reach
    key_0, key_1, key_2, key_3 = ordered(max_0), ordered(max_1), ordered(max_2), ordered(max_3)
    threshold = np.uint32(0)
    bit = 31
    while bit >= KEPT:
        trial = threshold | (np.uint32(1) << np.uint32(bit))
        reached = cuda.syncthreads_count(np.int32(key_0 >= trial))  # gpu: over the threads
        reached += cuda.syncthreads_count(np.int32(key_1 >= trial))  # gpu: as above
        reached += cuda.syncthreads_count(np.int32(key_2 >= trial))  # gpu: as above
        reached += cuda.syncthreads_count(np.int32(key_3 >= trial))  # gpu: as above
        if reached >= k:
            threshold = trial
        bit -= 1

    # Phase 3: the sum of exponentials, and the items that reach the threshold
    limit = float_of(max(threshold, ordered(NEG_INF)))
    sum_0 = sum_1 = sum_2 = sum_3 = ZERO
    w = t
    while w < num_words - 3 * THREADS:
        word_0, word_1, word_2, word_3 = row[w], row[w + THREADS], row[w + 2 * THREADS], row[w + 3 * THREADS]
        sum_0 = visit(word_0, like, per, w, m, limit, sum_0, items, counter)
        sum_1 = visit(word_1, like, per, w + THREADS, m, limit, sum_1, items, counter)
        sum_2 = visit(word_2, like, per, w + 2 * THREADS, m, limit, sum_2, items, counter)
        sum_3 = visit(word_3, like, per, w + 3 * THREADS, m, limit, sum_3, items, counter)
        w += UNROLL * THREADS
    if w < num_words:
        sum_0 = visit(row[w], like, per, w, m, limit, sum_0, items, counter)
    if w < num_words - THREADS:
        sum_1 = visit(row[w + THREADS], like, per, w + THREADS, m, limit, sum_1, items, counter)
    if w < num_words - 2 * THREADS:
        sum_2 = visit(row[w + 2 * THREADS], like, per, w + 2 * THREADS, m, limit, sum_2, items, counter)
    lse = m + math.log(block_sum(values, (sum_0 + sum_1) + (sum_2 + sum_3)))
    if not is_finite(lse):
        write_nothing(logprobs, token_ids, b, l)
        return
    found = counter[0]
    cuda.syncthreads()  # gpu: all have read the counter

    # Phase 4: too many, so find the k-th item itself
    if found > ITEMS:
        if t == 0:
            counter[0] = 0
        cuda.syncthreads()  # gpu: counting starts from 0
        item = kth_item(row, like, k, threshold, ordered(m), counter)
        collect_from(row, like, item, items, counter)
        found = k

    # Phase 5: sort, and write the best k
    size = 2
    while size < found:
        size *= 2
    for index in range(found + t, size, THREADS):
        items[index] = np.uint64(0)
    cuda.syncthreads()  # gpu: all items are there
    sort_falling(items, size)
    for r in range(t, k, THREADS):
        logprobs[b, l, r] = float_of(np.uint32(items[r] >> np.uint64(32))) - lse
        token_ids[b, l, r] = np.int32(~np.uint32(items[r] & np.uint64(0xFFFFFFFF)))


def arguments(problem: Problem) -> tuple[Any, ...]:
    """The kernel's arguments: the logits as words of 8 bytes where rows can be read so, else as they are."""
    logits = problem.logits
    return logits.in_words(), logits.columns(0, 1), problem.logprobs, problem.token_ids


def run(problem: Problem) -> None:
    """Launch the kernel; the results are there once the stream has passed."""
    rows = problem.logits.shape[0] * problem.logits.shape[1]
    if rows == 0:
        return
    require_backend()
    launch(kernel, (rows, 1, 1), THREADS, arguments(problem), results=2, shared_bytes=0)


def run_mirror(problem: Problem) -> None:
    """Run the mirror on host arrays.

    Raises
    ------
    ValueError
        The arguments lie on a GPU.
    """
    if problem.logits.device != HOST:
        raise ValueError(f"variant 'threshold_numpy' works on host arrays; {problem.logits} is on a GPU")
    mirror(*(a.as_numpy() if isinstance(a, View) else a for a in arguments(problem)))
