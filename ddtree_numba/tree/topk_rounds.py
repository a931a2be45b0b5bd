"""Variant `rounds`: top-k log-probabilities in k rounds, each a search for the next best logit.

For one row x = logits[b, l, :]::

    m = max_v x[v],    lse = m + log(sum_v exp(x[v] - m)),    logprob[v] = x[v] - lse

The readable variant: one block a row, thread t takes every THREADS-th logit.

- Phase 1: the maximum of the row, then the sum of the exponentials. A row with a NaN or +inf, or all -inf, has no
  finite logsumexp: all its entries become -inf with id -1.
- Phase 2: round r finds the best among the logits that stand behind the last one taken: smaller, or equal with a larger
  id. So no logit needs a mark, and ties go to the lowest id.

Cost of a row: (k + 2) V logits read, from L2 but for the first pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.device import runtime
from ddtree_numba.device.arrays import HOST, View
from ddtree_numba.device.bf16 import array_to_f32, to_f32
from ddtree_numba.device.launch import jit, launch
from ddtree_numba.device.runtime import require_backend

THREADS = 32 if runtime.SIMULATOR else 512
LAUNCH_BOUNDS = (THREADS, 2)

ZERO = np.float32(0.0)
NEG_INF = np.float32(-np.inf)
POS_INF = np.float32(np.inf)
NO_ID = np.int32(2**31 - 1)


@dataclass(frozen=True)
class Problem:
    """Checked arguments of topk_logprobs, as views: float [B, L, V], float32 [B, L, k], int32 [B, L, k]."""

    logits: View
    logprobs: View
    token_ids: View


@np.errstate(over="ignore")  # finite logits may lie so far apart that their difference is -inf
def mirror(logits, logprobs, token_ids):
    """The kernel in NumPy: the same phases, the same order of additions. Arrays as the operator's, on the host."""
    _, _, vocabulary = logits.shape
    k = logprobs.shape[2]
    for b, l in np.ndindex(logits.shape[:2]):
        # Phase 1: the row's logsumexp
        x = array_to_f32(logits[b, l])
        m = np.fmax.reduce(x)
        lse = m
        if np.isfinite(m):
            partial = np.pad(np.exp(x - m), (0, -vocabulary % THREADS)).reshape(-1, THREADS)
            partial = np.add.reduce(partial, axis=0)
            while partial.size > 1:
                partial = partial[: partial.size // 2] + partial[partial.size // 2 :]
            lse = m + np.log(partial[0])
        if not np.isfinite(lse):
            logprobs[b, l], token_ids[b, l] = NEG_INF, -1
            continue

        # Phase 2: k rounds, each the best of what stands behind the last
        v = np.arange(vocabulary)
        last, last_id = POS_INF, -1
        for r in range(k):
            behind = (x < last) | ((x == last) & (v > last_id))
            last = x[behind].max()
            last_id = v[behind & (x == last)][0]
            logprobs[b, l, r], token_ids[b, l, r] = last - lse, last_id


@cuda.jit(device=True, inline="always")
def is_finite(x):
    """Neither infinite nor NaN."""
    return x > NEG_INF and x < POS_INF


@cuda.jit(device=True, inline="always")
def block_best(values, ids, value, index):
    """The largest of the threads' values, and among equal ones the one of the lowest id, for each of them."""
    t = cuda.threadIdx.x
    values[t] = value
    ids[t] = index
    cuda.syncthreads()
    width = THREADS // 2
    while width > 0:
        if t < width:
            other = t + width
            if values[other] > values[t] or (values[other] == values[t] and ids[other] < ids[t]):
                values[t] = values[other]
                ids[t] = ids[other]
        cuda.syncthreads()
        width //= 2
    value, index = values[0], ids[0]
    cuda.syncthreads()
    return value, index


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


@jit(launch_bounds=LAUNCH_BOUNDS)
def kernel(logits, logprobs, token_ids):
    """One block a row of logits."""
    _, length, vocabulary = logits.shape
    k = logprobs.shape[2]
    b = cuda.blockIdx.x // length  # gpu: the grid is the mirror's loop over b, l
    l = cuda.blockIdx.x % length  # gpu: as above
    t = cuda.threadIdx.x  # gpu: a thread takes every THREADS-th logit
    values = cuda.shared.array(THREADS, types.float32)  # gpu: what the threads tell each other
    ids = cuda.shared.array(THREADS, types.int32)  # gpu: as above

    # Phase 1: the row's logsumexp
    m = NEG_INF
    v = t
    while v < vocabulary:
        m = max(m, to_f32(logits[b, l, v]))
        v += THREADS
    m, _ = block_best(values, ids, m, t)
    lse = m
    if is_finite(m):
        partial = ZERO
        v = t
        while v < vocabulary:
            partial += math.exp(to_f32(logits[b, l, v]) - m)  # a NaN anywhere makes the sum NaN
            v += THREADS
        lse = m + math.log(block_sum(values, partial))
    if not is_finite(lse):
        for r in range(t, k, THREADS):
            logprobs[b, l, r] = NEG_INF
            token_ids[b, l, r] = -1
        return

    # Phase 2: k rounds, each the best of what stands behind the last
    last = POS_INF
    last_id = np.int32(-1)
    for r in range(k):
        best = NEG_INF
        best_id = NO_ID
        v = t
        while v < vocabulary:
            x = to_f32(logits[b, l, v])
            behind = x < last or (x == last and v > last_id)
            if behind and (x > best or best_id == NO_ID):
                best = x
                best_id = np.int32(v)
            v += THREADS
        last, last_id = block_best(values, ids, best, best_id)
        if t == 0:
            logprobs[b, l, r] = last - lse
            token_ids[b, l, r] = last_id


def run(problem: Problem) -> None:
    """Launch the kernel; the results are there once the stream has passed."""
    rows = problem.logits.shape[0] * problem.logits.shape[1]
    if rows == 0:
        return
    require_backend()
    args = (problem.logits, problem.logprobs, problem.token_ids)
    launch(kernel, (rows, 1, 1), THREADS, args, results=2, shared_bytes=0)


def run_mirror(problem: Problem) -> None:
    """Run the mirror on host arrays.

    Raises
    ------
    ValueError
        The arguments lie on a GPU.
    """
    if problem.logits.device != HOST:
        raise ValueError(f"variant 'rounds_numpy' works on host arrays; {problem.logits} is on a GPU")
    mirror(problem.logits.as_numpy(), problem.logprobs.as_numpy(), problem.token_ids.as_numpy())
