"""topk_logprobs: the operator that users call. It checks, chooses a variant and hands over."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.device import arrays
from ddtree_numba.device.arrays import FLOATS
from ddtree_numba.tree import topk_rounds, topk_threshold
from ddtree_numba.tree.topk_rounds import Problem

VARIANTS = ("auto", "rounds", "rounds_numpy", "threshold", "threshold_numpy")
MAX_K = 1024


def bytes_moved(batch: int, length: int, vocabulary: int, k: int, itemsize: int) -> int:
    """Bytes that `topk_logprobs` must move: each logit of ``itemsize`` bytes read, each result of 4 and 4 written."""
    return batch * length * (vocabulary * itemsize + k * (4 + 4))


def topk_logprobs(logits: Any, k: int, *, variant: str = "auto", out: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """The k likeliest tokens of each row, and their log-probabilities under the softmax of the whole row.

    Parameters
    ----------
    logits : float [B, L, V]
        float32, float16, bfloat16, or uint16 read as bfloat16 bits. Any strides. A temperature other than 1 is the
        caller's division.
    k : int
        1 to 1024, at most V.
    variant : {"auto", "rounds", "rounds_numpy", "threshold", "threshold_numpy"}
        "rounds" is the readable one, "threshold" the fast one, which "auto" means; the others are their NumPy mirrors
        for host arrays.
    out : pair of arrays, optional
        float32 [B, L, k] and int32 [B, L, k], written to in place of new arrays.

    Returns
    -------
    logprobs : float32 [B, L, k]
        ``logit - logsumexp``, in nats, falling; of the kind of array of ``logits``.
    token_ids : int32 [B, L, k]
        Equal logits stand in the order of their ids. -inf logits stand last, with log-probability -inf. In a row that
        has no finite logsumexp (a NaN or +inf in it, or all -inf) all entries are -inf with id -1; `build_tree` takes
        entries of -inf as no candidates.

    Raises
    ------
    TypeError
        An argument is no array that kernels take, or has the wrong dtype.
    ValueError
        A wrong shape, device or variant; k above V or 1024; 2**31 rows or more; an output that overlaps an input.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream without synchronizing, except for NumPy arrays, which are copied to the device
    and back. With ``out``, nothing is allocated, so a call can be captured in a CUDA graph. The order is that of the
    logits, exactly; the logsumexp is float32.
    """
    arrays.require_one_of("variant", variant, VARIANTS)
    x = arrays.view("logits", logits)
    arrays.require_dtype(x, *FLOATS, np.uint16)
    arrays.require_shape(x, "[B, L, V]", None, None, None)
    batch, length, vocabulary = x.shape
    k = arrays.require_integer("k", k)
    if vocabulary < 1:
        raise ValueError(f"{x} has V = 0; it must be at least 1")
    if not 1 <= k <= min(MAX_K, vocabulary):
        raise ValueError(f"k is {k}; it must be between 1 and {min(MAX_K, vocabulary)}, and {x} has V = {vocabulary}")
    if vocabulary >= 2**31:
        raise ValueError(f"{x} has V = {vocabulary}; it must be less than 2**31")
    if batch * length >= 2**31:
        raise ValueError(f"{x} has {batch * length} rows; they must be less than 2**31")
    shape = (batch, length, k)
    if out is None:
        out = arrays.empty(x, shape, np.dtype(np.float32)), arrays.empty(x, shape, np.dtype(np.int32))
    elif not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError("out must be a pair of arrays, logprobs and token_ids")
    results = arrays.view("out[0]", out[0]), arrays.view("out[1]", out[1])
    for result, dtype in zip(results, (np.float32, np.int32), strict=True):
        arrays.require_dtype(result, dtype)
        arrays.require_shape(result, "[B, L, k]", *shape)
    arrays.require_one_place([x, *results])
    arrays.require_apart(results[0], [x, results[1]])
    arrays.require_apart(results[1], [x])
    runs = {
        "auto": topk_threshold.run,
        "rounds": topk_rounds.run,
        "rounds_numpy": topk_rounds.run_mirror,
        "threshold": topk_threshold.run,
        "threshold_numpy": topk_threshold.run_mirror,
    }
    runs[variant](Problem(x, *results))
    return out[0], out[1]
