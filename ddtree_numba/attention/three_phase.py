"""Variant `three_phase`: tree-verify MLA attention with the whole score row in shared memory.

For one query row q = q[b, i, h, :] and the keys k that node i sees (the prefix and its ancestors)::

    s[k] = (q . row[k, :]) * sm_scale
    m_i  = max_k s[k],    l_i = sum_k exp(s[k] - m_i),    p[k] = exp(s[k] - m_i) / l_i
    out  = sum_k p[k] * row[k, :R],    lse = m_i + log(l_i)

One block works on one (request, node, head); it needs nothing from any other block, so there are no atomics and a row's
bits depend on that row's inputs alone.

- Phase 1: LANES threads share a key. Each multiplies every LANES-th column, so that neighbouring threads read
  neighbouring addresses; the LANES partial sums go to shared memory, where one thread a key adds them. Both sums take
  even and odd terms apart: half as long, so half the rounding error, and two multiply-adds in flight.
- Phase 2: the block's max, then the exponentials in place of the scores, their sum, and the weights in place of them.
  Dividing the weights and not the output lets the roundings of the division average out over the keys.
- Phase 3: each thread owns latent dimensions and walks over the keys. CHUNK keys make a partial sum, and GROUP keys the
  next, so that rounding errors do not grow with the number of keys as they would in one long sum.

Tree keys that the node does not see are never read. Sums run in an order fixed by the key's index alone: any page size
gives the bits of the contiguous cache.

Cost of a block with n visible keys: 2 n (D + R) FLOPs, n (D + R) elements read (from L2 for the most part: the blocks
of a request share its cache). Shared memory: 4 bytes a key, so the row ends at some 56,000 keys on an H200.

Source: safe softmax in three passes, as in the public reference of DDTree (arXiv 2604.12989), absorbed MLA as in
DeepSeek-V2 (arXiv 2405.04434).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.attention.problem import Problem
from ddtree_numba.device import runtime
from ddtree_numba.device.arrays import HOST, View
from ddtree_numba.device.bf16 import array_from_f32, array_to_f32, from_f32, to_f32
from ddtree_numba.device.launch import device_name, jit, launch, shared_bytes_limit
from ddtree_numba.device.runtime import require_backend

# Python threads are dear in the simulator. A smaller block changes the order of phase 2's sum alone.
THREADS = 32 if runtime.SIMULATOR else 256
LAUNCH_BOUNDS = (THREADS, 4)  # at most 64 registers: more cost occupancy, and half the speed with it
LANES = 8
KEYS_PER_PASS = 64
PITCH = LANES + 1  # not LANES: the threads that add up rows of partial sums then hit different banks
CHUNK = 32
GROUP = 16 * CHUNK

ZERO = np.float32(0.0)  # a literal 0.0 would be float64 on the GPU
NEG_INF = np.float32(-np.inf)


def mirror(
    q_nope, q_pe, kv_cache, block_table, cache_seqlens, tree_mask, bits_per_word, sm_scale, max_seqlen, out, lse
):
    """The kernel in NumPy: the same phases, the same order of additions. Arguments as in `Problem`, on the host."""
    batch, num_nodes, num_heads, kv_lora_rank = q_nope.shape
    num_pages, page_size, head_dim = kv_cache.shape
    for b, i, h in np.ndindex(batch, num_nodes, num_heads):
        # Phase 0: this block's query row and keys
        prefix = min(max(cache_seqlens[b], 0), max_seqlen)
        num_keys = prefix + num_nodes
        q_row = array_to_f32(np.concatenate([q_nope[b, i, h], q_pe[b, i, h]]))

        # Phase 1: the scores of the visible keys
        key = np.arange(num_keys)
        j = np.maximum(key - prefix, 0)
        seen = (key < prefix) | ((tree_mask[b, i, j // bits_per_word] >> (j % bits_per_word)) & 1 == 1)
        page = np.clip(block_table[b, key // page_size], 0, num_pages - 1)
        slot = key % page_size
        row = np.zeros((num_keys, head_dim), np.float32)
        row[seen] = array_to_f32(kv_cache[page[seen], slot[seen]])
        terms = (q_row * row).reshape(num_keys, -1, LANES)
        partial = np.add.reduce(terms[:, 0::2], axis=1) + np.add.reduce(terms[:, 1::2], axis=1)
        s = np.add.accumulate(partial[:, 0::2], axis=1)[:, -1]
        s_odd = np.add.accumulate(partial[:, 1::2], axis=1)[:, -1]
        scores = np.where(seen, (s + s_odd) * sm_scale, NEG_INF)

        # Phase 2: the block's max and sum
        m_i = np.fmax.reduce(scores)
        if m_i == NEG_INF:
            m_i = ZERO
        p = np.exp(scores - m_i)
        partial = np.add.reduce(np.pad(p, (0, -num_keys % THREADS)).reshape(-1, THREADS), axis=0)
        while partial.size > 1:
            partial = partial[: partial.size // 2] + partial[partial.size // 2 :]
        l_i = partial[0]
        if l_i == ZERO:
            out[b, i, h] = 0
            lse[b, i, h] = NEG_INF
            continue
        p /= l_i

        # Phase 3: the output, each thread its own latent dimensions
        mid = np.zeros(kv_lora_rank, np.float32)
        acc = np.zeros(kv_lora_rank, np.float32)
        for first in range(0, num_keys, CHUNK):
            stop = first + CHUNK
            chunk = np.add.reduce(p[first:stop, None] * row[first:stop, :kv_lora_rank], axis=0)
            mid += chunk
            if stop % GROUP == 0:
                acc += mid
                mid[:] = 0
        acc += mid
        out[b, i, h] = array_from_f32(acc, out.dtype)
        lse[b, i, h] = m_i + np.log(l_i)


@cuda.jit(device=True, inline="always")
def locate(block_table, b, key, num_pages, page_size):
    """Page and slot of a key; a table entry that is no page (bad contents) is clamped to one."""
    page = block_table[b, np.uint32(key) // np.uint32(page_size)]
    return min(max(page, 0), num_pages - 1), np.uint32(key) % np.uint32(page_size)


@cuda.jit(device=True, inline="always")
def sees(tree_mask, bits_per_word, b, i, j):
    """Whether node i sees tree key j."""
    word = tree_mask[b, i, np.uint32(j) // np.uint32(bits_per_word)]
    return (word >> (np.uint32(j) % np.uint32(bits_per_word))) & 1 == 1


@cuda.jit(device=True, inline="always")
def carry(stop, chunk, mid, acc):
    """Where a chunk ends, pass its sum on to ``mid``; where a group of chunks ends, pass theirs on to ``acc``."""
    if stop % CHUNK == 0:
        mid += chunk
        chunk = ZERO
        if stop % GROUP == 0:
            acc += mid
            mid = ZERO
    return chunk, mid, acc


@cuda.jit(device=True, inline="always")
def block_max(partial, value):
    """Largest value of the block's threads, for each of them."""
    t = cuda.threadIdx.x
    partial[t] = value
    cuda.syncthreads()
    width = THREADS // 2
    while width > 0:
        if t < width:
            partial[t] = max(partial[t], partial[t + width])
        cuda.syncthreads()
        width //= 2
    result = partial[0]
    cuda.syncthreads()
    return result


@cuda.jit(device=True, inline="always")
def block_sum(partial, value):
    """Sum of the values of the block's threads in a fixed order, for each of them."""
    t = cuda.threadIdx.x
    partial[t] = value
    cuda.syncthreads()
    width = THREADS // 2
    while width > 0:
        if t < width:
            partial[t] += partial[t + width]
        cuda.syncthreads()
        width //= 2
    result = partial[0]
    cuda.syncthreads()
    return result


@jit(launch_bounds=LAUNCH_BOUNDS)
def kernel(
    q_nope, q_pe, kv_cache, block_table, cache_seqlens, tree_mask, bits_per_word, sm_scale, max_seqlen, out, lse
):
    """One block a (request, node, head); shared memory as in `shared_bytes`."""
    batch, num_nodes, num_heads, kv_lora_rank = q_nope.shape
    num_pages, page_size, head_dim = kv_cache.shape
    h = cuda.blockIdx.x  # gpu: the grid is the mirror's loop over b, i, h
    i = cuda.blockIdx.y  # gpu: as above
    b = cuda.blockIdx.z  # gpu: as above
    t = cuda.threadIdx.x  # gpu: a thread takes every THREADS-th key or dimension
    lane = t % LANES  # gpu: LANES threads score one key
    group = t // LANES  # gpu: as above
    shared = cuda.shared.array(0, types.float32)  # gpu: all dynamic arrays are one, sliced here
    q_row = shared[:head_dim]
    partial = shared[head_dim : head_dim + KEYS_PER_PASS * PITCH]
    scores = shared[head_dim + KEYS_PER_PASS * PITCH :]

    # Phase 0: this block's query row and keys
    prefix = min(max(cache_seqlens[b], 0), max_seqlen)
    num_keys = prefix + num_nodes
    for c in range(t, kv_lora_rank, THREADS):
        q_row[c] = to_f32(q_nope[b, i, h, c])
    for c in range(t, head_dim - kv_lora_rank, THREADS):
        q_row[kv_lora_rank + c] = to_f32(q_pe[b, i, h, c])
    cuda.syncthreads()  # gpu: phase 1 reads the whole row

    # Phase 1: the scores of the visible keys
    q_lane = q_row[lane:]  # gpu: a lane takes every LANES-th column from its own on
    for first in range(0, num_keys, KEYS_PER_PASS):
        stop = min(first + KEYS_PER_PASS, num_keys)
        for key in range(first + group, stop, THREADS // LANES):
            s = NEG_INF
            s_odd = ZERO
            if key < prefix or sees(tree_mask, bits_per_word, b, i, key - prefix):
                page, slot = locate(block_table, b, key, num_pages, page_size)
                row = kv_cache[page, slot, lane:]
                s = ZERO
                c = 0
                while c < head_dim - lane:  # D is a multiple of 2 * LANES
                    s += q_lane[c] * to_f32(row[c])
                    s_odd += q_lane[c + LANES] * to_f32(row[c + LANES])
                    c += 2 * LANES
            partial[(key - first) * PITCH + lane] = s + s_odd
        cuda.syncthreads()  # gpu: the partial sums of this pass are complete
        for key in range(first + t, stop, THREADS):
            s = ZERO
            s_odd = ZERO
            for other in range(0, LANES, 2):
                s += partial[(key - first) * PITCH + other]
                s_odd += partial[(key - first) * PITCH + other + 1]
            scores[key] = (s + s_odd) * sm_scale
        cuda.syncthreads()  # gpu: the next pass overwrites partial

    # Phase 2: the block's max and sum
    m_i = NEG_INF
    for key in range(t, num_keys, THREADS):
        m_i = max(m_i, scores[key])
    m_i = block_max(partial, m_i)
    if m_i == NEG_INF:
        m_i = ZERO  # nothing visible: each weight becomes exp(-inf) = 0, where -inf - -inf would be NaN
    l_i = ZERO
    for key in range(t, num_keys, THREADS):
        p = math.exp(scores[key] - m_i)
        scores[key] = p
        l_i += p
    l_i = block_sum(partial, l_i)
    if l_i == ZERO:
        for d in range(t, kv_lora_rank, THREADS):
            out[b, i, h, d] = from_f32(ZERO, out)
        if t == 0:
            lse[b, i, h] = NEG_INF
        return
    for key in range(t, num_keys, THREADS):
        scores[key] /= l_i
    cuda.syncthreads()  # gpu: phase 3 reads all weights

    # Phase 3: the output, each thread its own latent dimensions
    for d in range(t, kv_lora_rank, THREADS):
        chunk = ZERO
        mid = ZERO
        acc = ZERO
        key = 0
        while key < prefix:  # prefix: runs of keys that lie in one page and one chunk
            page, slot = locate(block_table, b, key, num_pages, page_size)
            run = min(CHUNK - key % CHUNK, page_size - slot, prefix - key)
            p_run = scores[key : key + run]
            column = kv_cache[page, slot : slot + run, d]
            n = 0
            while n < run:
                chunk += p_run[n] * to_f32(column[n])
                n += 1
            key += run
            chunk, mid, acc = carry(key, chunk, mid, acc)
        for key in range(prefix, num_keys):  # tree: the node's ancestors alone
            p = scores[key]
            if p != ZERO:
                page, slot = locate(block_table, b, key, num_pages, page_size)
                chunk += p * to_f32(kv_cache[page, slot, d])
            chunk, mid, acc = carry(key + 1, chunk, mid, acc)
        acc += mid + chunk
        out[b, i, h, d] = from_f32(acc, out)
    if t == 0:
        lse[b, i, h] = m_i + math.log(l_i)


def error_bound(logit_magnitude: float, num_keys: int, head_dim: int) -> float:
    """Bound on the relative Frobenius error of float32 outputs against exact arithmetic; docs/numerics.md derives it.

    Parameters
    ----------
    logit_magnitude : float
        Softmax-weighted root mean square of the scaled logits (or of their terms' norm, where that is larger), nats.
    num_keys : int
        Visible keys of the longest row.
    head_dim : int
        D.

    Returns
    -------
    float
        Of ``norm(out - exact) / norm(exact)``; about twice the error that independent roundings lead to.
    """
    a_rounding = float(np.finfo(np.float32).eps) / 2.4
    in_logits = logit_magnitude * math.sqrt(head_dim / LANES / 2 + 1 + LANES / 2 + 1)
    in_exponentials = 2 * logit_magnitude + 2
    in_sums = math.sqrt(CHUNK + GROUP / CHUNK + num_keys / GROUP)
    return a_rounding * math.hypot(in_logits, in_exponentials, in_sums)


def shared_bytes(problem: Problem) -> int:
    """Dynamic shared memory of a block in bytes: query row, partial sums, a score for each key."""
    return 4 * (problem.head_dim + KEYS_PER_PASS * PITCH + problem.max_seqlen + problem.num_nodes)


def arguments(problem: Problem) -> tuple[Any, ...]:
    """The kernel's arguments, in its order."""
    return (
        problem.q_nope,
        problem.q_pe,
        problem.kv_cache,
        problem.block_table,
        problem.cache_seqlens,
        problem.tree_mask,
        np.int32(problem.bits_per_word),
        np.float32(problem.sm_scale),
        np.int32(problem.max_seqlen),
        problem.out,
        problem.lse,
    )


def run(problem: Problem) -> None:
    """Launch the kernel; the results are in problem.out and problem.lse once the stream has passed.

    Raises
    ------
    ValueError
        The score row does not fit this GPU's shared memory.
    """
    device, nbytes = problem.q_nope.device, shared_bytes(problem)
    if problem.batch == 0:
        return
    require_backend()
    limit = shared_bytes_limit(device)
    if nbytes > limit:
        longest = problem.max_seqlen - -(-(nbytes - limit) // 4)
        enough = f"enough for max_seqlen = {longest}" if longest >= 0 else "too little for the tree alone"
        raise ValueError(
            f"variant 'three_phase' needs {nbytes} bytes of shared memory for max_seqlen = {problem.max_seqlen} and "
            f"{problem.num_nodes} nodes; {device_name(device)} has {limit}, {enough}. "
            "Variant 'flash' has no such limit; or pass a smaller max_seqlen if the prefixes are shorter"
        )
    blocks = (problem.num_heads, problem.num_nodes, problem.batch)
    launch(kernel, blocks, THREADS, arguments(problem), results=2, shared_bytes=nbytes)


def run_mirror(problem: Problem) -> None:
    """Run the mirror on host arrays.

    Raises
    ------
    ValueError
        The arguments lie on a GPU.
    """
    if problem.q_nope.device != HOST:
        raise ValueError(f"variant 'three_phase_numpy' works on host arrays; {problem.q_nope} is on a GPU")
    mirror(*(a.as_numpy() if isinstance(a, View) else a for a in arguments(problem)))
