"""argmax_tokens: the target's greedy choice behind each node.

``token[b, i] = argmax_v logits[b, i, v]``, the lowest id among equals; a row that holds a NaN has no choice. One block
a row:

- Phase 1: each thread finds the largest logit of its words, and which group of UNROLL words had it first. Words of 8
  bytes hold 2 or 4 logits, and are compared as such. NaN is larger than all and stays, so that one test at the end
  tells.
- Phase 2: the largest of the row.
- Phase 3: threads that found it look through their group for the lowest id, and the lowest of theirs is the token.

Cost of a row: V logits read, once but for the last group; a comparison each. Nothing but bandwidth.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.device import arrays, runtime
from ddtree_numba.device.arrays import FLOATS, View
from ddtree_numba.device.bf16 import array_to_f32
from ddtree_numba.device.bits import element, load_once, max_nan, max_words, per_word
from ddtree_numba.device.launch import jit, launch

THREADS = 16 if runtime.SIMULATOR else 256
LAUNCH_BOUNDS = (THREADS, 4)
UNROLL = 8
LARGEST_ID = np.int32(2**31 - 1)
NEG_INF = np.float32(-np.inf)
NO_TOKEN = -1


def mirror(words, like, tokens):
    """The kernel in NumPy: the same phases. Arguments as the kernel's, on the host."""
    for b, i in np.ndindex(tokens.shape):
        x = array_to_f32(words[b, i].copy().view(like.dtype))

        # Phase 1: the largest of each thread's words, and the group that had it first
        per = x.size // words.shape[2]
        group = THREADS * UNROLL * per
        in_groups = np.pad(x, (0, -x.size % group), constant_values=NEG_INF).reshape(-1, UNROLL, THREADS, per)
        of_groups = np.maximum.reduce(in_groups, axis=(1, 3))  # NaN is the maximum of whatever holds one
        largest = np.maximum.reduce(of_groups, axis=0)
        first = np.argmax(of_groups == largest, axis=0)

        # Phase 2: the largest of the row
        m = np.maximum.reduce(largest)

        # Phase 3: the lowest id
        token = NO_TOKEN if np.isnan(m) else LARGEST_ID
        for t in range(THREADS):
            if largest[t] == m:
                at = np.arange(group).reshape(UNROLL, THREADS, per)[:, t].ravel() + first[t] * group
                at = at[at < x.size]
                token = min(token, *at[x[at] == m], LARGEST_ID)
        tokens[b, i] = token


@cuda.jit(device=True, inline="always")
def largest_of(word, like, per):
    """The largest logit of a word, or NaN."""
    largest = element(word, 0, like)
    e = 1
    while e < per:
        largest = max_nan(largest, element(word, e, like))
        e += 1
    return largest


@cuda.jit(device=True, inline="always")
def lowest_in(word, like, per, w, m, lowest):
    """The lowest id of a word's logits that equal m, or ``lowest``."""
    e = per - 1
    while e >= 0:
        if element(word, e, like) == m:
            lowest = min(lowest, np.int32(w * per + e))
        e -= 1
    return lowest


@jit(launch_bounds=LAUNCH_BOUNDS)
def kernel(words, like, tokens):
    """One block a row; ``words`` [B, Q, V / n] hold n logits each, of the dtype of ``like``."""
    num_rows = words.shape[1]
    num_words = words.shape[2]
    per = per_word(words, like)
    b = cuda.blockIdx.x // num_rows  # gpu: the grid is the mirror's loop over b, i
    i = cuda.blockIdx.x % num_rows  # gpu: as above
    t = cuda.threadIdx.x  # gpu: a thread takes words t, t + THREADS, .. of each group of words
    values = cuda.shared.array(THREADS, types.float32)  # gpu: what the threads tell each other
    ids = cuda.shared.array(THREADS, types.int32)  # gpu: as above
    row = words[b, i]

    # Phase 1: the largest of each thread's words, and the group that had it first
    largest = NEG_INF
    first = t
    w = t
    while w < num_words - 7 * THREADS:  # gpu: eight loads are on their way before the first is used
        v = w + 4 * THREADS
        word_0, word_1 = load_once(row, w), load_once(row, w + THREADS)
        word_2, word_3 = load_once(row, w + 2 * THREADS), load_once(row, w + 3 * THREADS)
        word_4, word_5 = load_once(row, v), load_once(row, v + THREADS)
        word_6, word_7 = load_once(row, v + 2 * THREADS), load_once(row, v + 3 * THREADS)
        word = max_words(
            max_words(max_words(word_0, word_1, like), max_words(word_2, word_3, like), like),
            max_words(max_words(word_4, word_5, like), max_words(word_6, word_7, like), like),
            like,
        )
        of_group = largest_of(word, like, per)
        if not of_group <= largest:
            first = w
        largest = max_nan(largest, of_group)
        w += UNROLL * THREADS
    last = w
    while w < num_words:
        of_group = largest_of(row[w], like, per)
        if not of_group <= largest:
            first = last
        largest = max_nan(largest, of_group)
        w += THREADS

    # Phase 2: the largest of the row
    values[t] = largest
    cuda.syncthreads()  # gpu: all have written
    width = THREADS // 2
    while width > 0:
        if t < width:
            values[t] = max_nan(values[t], values[t + width])
        cuda.syncthreads()  # gpu: the next step reads what this one wrote
        width //= 2
    m = values[0]

    # Phase 3: the lowest id
    lowest = LARGEST_ID
    if largest == m:
        w = first
        while w < min(first + UNROLL * THREADS, num_words):
            lowest = lowest_in(row[w], like, per, w, m, lowest)
            w += THREADS
    ids[t] = lowest
    cuda.syncthreads()  # gpu: as above
    width = THREADS // 2
    while width > 0:
        if t < width:
            ids[t] = min(ids[t], ids[t + width])
        cuda.syncthreads()  # gpu: as above
        width //= 2
    if t == 0:
        tokens[b, i] = ids[0] if m == m else NO_TOKEN


def arguments(logits: View, tokens: View) -> tuple[View, ...]:
    """The kernel's arguments: the logits as words of 8 bytes where rows can be read so, else as they are."""
    return logits.in_words(), logits.columns(0, 1), tokens


def bytes_moved(batch: int, num_rows: int, vocabulary: int, itemsize: int) -> int:
    """Bytes that `argmax_tokens` must move: each logit of ``itemsize`` bytes read, a token of 4 a row written."""
    return batch * num_rows * (vocabulary * itemsize + 4)


def argmax_tokens(logits: Any, *, out: Any = None) -> Any:
    """The token of the largest logit of each row: what the target chooses behind each node at temperature 0.

    Parameters
    ----------
    logits : float [B, Q, V]
        float32, float16, bfloat16, or uint16 read as bfloat16 bits. Any strides.
    out : int32 [B, Q], optional
        Written to in place of a new array.

    Returns
    -------
    int32 [B, Q]
        Of the kind of array of ``logits``. Among equal logits the lowest id; 0.0 and -0.0 are equal. -1 in a row that
        holds a NaN, which `accept_greedy` flags where its walk comes there. 0 in a row of nothing but -inf.

    Raises
    ------
    TypeError
        An argument is no array that kernels take, or has the wrong dtype.
    ValueError
        A wrong shape or device; V = 0; V or the number of rows is 2**31 or more; an output that overlaps the logits.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream without synchronizing, except for NumPy arrays, which are copied to the device
    and back. With ``out``, nothing is allocated, so a call can be captured in a CUDA graph.
    """
    x = arrays.view("logits", logits)
    arrays.require_dtype(x, *FLOATS, np.uint16)
    arrays.require_shape(x, "[B, Q, V]", None, None, None)
    batch, num_rows, vocabulary = x.shape
    if not 1 <= vocabulary < 2**31:
        raise ValueError(f"{x} has V = {vocabulary}; it must be at least 1 and less than 2**31")
    if batch * num_rows >= 2**31:
        raise ValueError(f"{x} has {batch * num_rows} rows; they must be less than 2**31")
    if out is None:
        out = arrays.empty(x, (batch, num_rows), np.dtype(np.int32))
    tokens = arrays.view("out", out)
    arrays.require_dtype(tokens, np.int32)
    arrays.require_shape(tokens, "[B, Q]", batch, num_rows)
    arrays.require_one_place([x, tokens])
    arrays.require_apart(tokens, [x])
    if batch * num_rows:
        launch(kernel, (batch * num_rows, 1, 1), THREADS, arguments(x, tokens), results=1, shared_bytes=0)
    return out
