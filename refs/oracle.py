"""Float64 oracles of verify_attention, merge_states and topk_logprobs: each definition, written down once.

They share no line with the kernels and their mirrors, so that they cannot share a mistake with them. In attention there
are no tiles, no running maximum and no packing helpers: for each node the visible rows are picked out of the cache by
their indices, and softmax runs over exactly these. A row that a node does not see is never loaded for it, so whatever
it holds, NaN included, cannot reach that node's result. States are merged by the logistic function of the gap between
their lse, without a maximum of the two. The best tokens come from sorting all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["logit_statistics", "merge_states", "topk_logprobs", "verify_attention"]

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

# By name, since ml_dtypes need not be imported to read an array of its bfloat16. Each casts to float64 exactly.
_FLOATS = ("float16", "bfloat16", "float32", "float64")


def verify_attention(
    q: Array,
    kv_cache: Array,
    cache_seqlens: Array,
    tree_mask: Array | None,
    *,
    sm_scale: float,
    kv_lora_rank: int,
    block_table: Array | None = None,
    part: str = "all",
) -> tuple[Float64, Float64]:
    """MLA attention of a draft tree in absorbed form, in float64.

    For node i of request b and head h, over the visible keys k::

        s[k]            = (q[b, i, h, :] . row[k, :]) * sm_scale
        out[b, i, h, :] = sum_k softmax(s)[k] * row[k, :kv_lora_rank]
        lse[b, i, h]    = log(sum_k exp(s[k]))

    Visible are the prefix rows 0 .. cache_seqlens[b] - 1 and, of the Q rows right behind them, those of ``tree_mask``.

    Parameters
    ----------
    q : float [B, Q, H, D]
        Queries with W_UK absorbed, then their rotary part. float16, bfloat16 (ml_dtypes), float32 or float64.
    kv_cache : float [B, S, D], or paged float [num_pages, page_size, D]
        A row is ckv (kv_lora_rank columns), then kpe. Same dtypes as q, not necessarily the same one.
    cache_seqlens : int [B]
        Prefix length of each request in tokens, the tree's rows not counted.
    tree_mask : bool [B, Q, Q], or uint32 [B, Q, ceil(Q/32)] (bit j % 32 of word j // 32), or None
        Node i sees tree row j. None means causal: node i sees 0 .. i.
    sm_scale : float
        Softmax scale; the scaled logits are in nats.
    kv_lora_rank : int
        R, the columns that are also the value.
    block_table : int [B, max_pages], optional
        Page of each run of page_size tokens; given, the cache is paged. Only entries of visible rows are read.
    part : {"all", "prefix", "tree"}
        Of the visible rows, those to attend to: all, the prefix alone, or the tree's alone. `merge_states` of the last
        two is the first.

    Returns
    -------
    out : float64 [B, Q, H, R]
        Latent output; 0 for a node that sees nothing (of this part).
    lse : float64 [B, Q, H]
        Log-sum-exp in nats; -inf for a node that sees nothing.

    Raises
    ------
    TypeError
        q or kv_cache has none of the dtypes above, or tree_mask is neither bool nor uint32.
    ValueError
        part is none of the three.

    Notes
    -----
    A non-finite value in a visible row spreads as IEEE arithmetic has it, to the nodes that see the row and no others.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, absorbed; tree visibility: DDTree (arXiv 2604.12989).
    """
    kv_lora_rank, scale = int(kv_lora_rank), float(sm_scale)
    out = np.zeros((*q.shape[:3], kv_lora_rank))
    lse = np.full(q.shape[:3], -np.inf)
    with np.errstate(invalid="ignore"):  # a visible NaN or inf is the caller's affair, not a warning
        for b, i, queries, keys in _visible(q, kv_cache, cache_seqlens, tree_mask, block_table, part):
            scores = queries @ keys.T * scale
            peak = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - peak)
            total = weights.sum(axis=1, keepdims=True)
            out[b, i] = weights / total @ keys[:, :kv_lora_rank]
            lse[b, i] = (peak + np.log(total))[:, 0]
    return out, lse


def logit_statistics(
    q: Array,
    kv_cache: Array,
    cache_seqlens: Array,
    tree_mask: Array | None,
    *,
    sm_scale: float,
    kv_lora_rank: int,
    block_table: Array | None = None,
) -> dict[str, float]:
    """What an error bound needs to know about the logits of a problem.

    Parameters
    ----------
    q, kv_cache, cache_seqlens, tree_mask, sm_scale, kv_lora_rank, block_table
        As for `verify_attention`.

    Returns
    -------
    dict of str to float
        ``logit_std``: standard deviation over all visible scaled logits, in nats. ``logit_max``: their largest absolute
        value. ``logit_magnitude``: ::

            sqrt(mean over (b, i, h) of sum_k softmax(s)[k] * max(s[k]**2, sm_scale**2 * sum_c (q[c] * row[k, c])**2))

        which is the size of the logits whose rounding an output feels: the final sum's, or, where the products cancel,
        that of a random walk over them. Nodes that see nothing are left out; if all do, each figure is 0.

    Raises
    ------
    TypeError
        As for `verify_attention`.
    """
    del kv_lora_rank  # taken so that both functions can be called with the same arguments; all D columns make a logit
    scale = float(sm_scale)
    logits: list[Float64] = [np.zeros(0)]
    row_means: list[Float64] = [np.zeros(0)]
    for _, _, queries, keys in _visible(q, kv_cache, cache_seqlens, tree_mask, block_table):
        scores = queries @ keys.T * scale
        walks = (queries**2) @ (keys**2).T * scale**2
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        logits.append(scores.ravel())
        row_means.append((weights * np.maximum(scores**2, walks)).sum(axis=1))
    pooled, means = np.concatenate(logits), np.concatenate(row_means)
    if pooled.size == 0:
        return {"logit_std": 0.0, "logit_max": 0.0, "logit_magnitude": 0.0}
    return {
        "logit_std": float(pooled.std()),
        "logit_max": float(np.abs(pooled).max()),
        "logit_magnitude": float(np.sqrt(means.mean())),
    }


def merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Float64, Float64]:
    """Attention over two disjoint sets of keys, from the attention over each, in float64.

    With the weight ``w = 1 / (1 + exp(lse_b - lse_a))`` of state a::

        out = w * out_a + (1 - w) * out_b
        lse = log(exp(lse_a) + exp(lse_b))

    Parameters
    ----------
    out_a, out_b : float [..., H, R]
        Outputs. float16, bfloat16 (ml_dtypes), float32 or float64, not necessarily the same one.
    lse_a, lse_b : float [..., H]
        Log-sum-exps in nats. -inf or +inf says that the state is empty: its out is not looked at, NaN or not.

    Returns
    -------
    out : float64 [..., H, R]
        0 where both states are empty.
    lse : float64 [..., H]
        -inf where both states are empty; never +inf.

    Raises
    ------
    TypeError
        An argument has none of the dtypes above.
    ValueError
        Shapes that do not belong together.

    Notes
    -----
    Commutative to the last bit, associative up to rounding; an empty state changes nothing. A NaN for an lse is not
    empty: it makes its row NaN.

    Source: "Attention states and recursive attention", FlashInfer's documentation; the convention that +inf is empty is
    FlashMLA's.
    """
    rows = lse_a.shape, (*lse_a.shape, *out_a.shape[-1:])
    for name, array in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if array.dtype.name not in _FLOATS:
            raise TypeError(f"{name} has dtype {array.dtype}; it must be one of: {', '.join(_FLOATS)}")
        if array.shape != rows[name.startswith("out")]:
            raise ValueError(f"{name} has shape {array.shape}; out must be [..., H, R], lse [..., H], of both states")
    a, log_a = _without_empty(out_a, lse_a)
    b, log_b = _without_empty(out_b, lse_b)
    neither = np.isneginf(log_a) & np.isneginf(log_b)
    with np.errstate(over="ignore", invalid="ignore"):  # exp is inf, the weight 0; -inf - -inf is replaced
        gap = np.where(neither, 0.0, log_b - log_a)
        out = a / (1 + np.exp(gap))[..., None] + b / (1 + np.exp(-gap))[..., None]
        return out, np.logaddexp(log_a, log_b)


def _without_empty(out: Array, lse: Array) -> tuple[Float64, Float64]:
    """A state in float64; where it is empty, 0 and -inf."""
    empty = np.isinf(lse)
    return np.where(empty[..., None], 0.0, out.astype(np.float64)), np.where(empty, -np.inf, lse.astype(np.float64))


def topk_logprobs(logits: Array, k: int) -> tuple[Float64, npt.NDArray[np.int32], Float64]:
    """Log-probabilities and ids of the k best tokens of each row, in float64.

    Parameters
    ----------
    logits : float [.., V]
        In nats. float16, bfloat16 (ml_dtypes), float32 or float64.
    k : int
        1 to V.

    Returns
    -------
    logprobs : float64 [.., k]
        ``logit - lse``, falling; -inf for a logit of -inf.
    token_ids : int32 [.., k]
        Of equal logits the lowest id comes first (0.0 and -0.0 are equal).
    lse : float64 [..]
        Log-sum-exp of the row. Where it is not finite (a NaN, a +inf, or nothing but -inf), all entries of logprobs
        are -inf and all of token_ids -1.

    Raises
    ------
    TypeError
        logits has none of the dtypes above.
    """
    if logits.dtype.name not in _FLOATS:
        raise TypeError(f"logits has dtype {logits.dtype}; it must be one of: {', '.join(_FLOATS)}")
    rows = logits.shape[:-1]
    logprobs = np.full((*rows, k), -np.inf)
    token_ids = np.full((*rows, k), -1, dtype=np.int32)
    lse = np.zeros(rows)
    for row in np.ndindex(*rows):
        values = logits[row].astype(np.float64).tolist()
        lse[row] = _logsumexp(values)
        if math.isfinite(lse[row]):
            best = sorted((-value, token) for token, value in enumerate(values))[:k]
            logprobs[row] = [-negative - lse[row] for negative, _ in best]
            token_ids[row] = [token for _, token in best]
    return logprobs, token_ids, lse


def _logsumexp(values: list[float]) -> float:
    if any(map(math.isnan, values)):
        return math.nan  # max() would depend on where it stands
    peak = max(values)
    # The sum is exact but for one rounding, whatever the order.
    return peak + math.log(math.fsum(math.exp(value - peak) for value in values)) if math.isfinite(peak) else peak


def _visible(
    q: Array,
    kv_cache: Array,
    cache_seqlens: Array,
    tree_mask: Array | None,
    block_table: Array | None,
    part: str = "all",
) -> Iterator[tuple[int, int, Float64, Float64]]:
    """Yield b, i, float64 [H, D] queries, float64 [n, D] visible rows, for each node that sees n >= 1 rows."""
    if part not in ("all", "prefix", "tree"):
        raise ValueError(f"part is {part!r}; it must be one of: all, prefix, tree")
    for name, array in (("q", q), ("kv_cache", kv_cache)):
        if array.dtype.name not in _FLOATS:
            raise TypeError(f"{name} has dtype {array.dtype}; it must be one of: {', '.join(_FLOATS)}")
    if tree_mask is not None and tree_mask.dtype.name not in ("bool", "uint32"):
        raise TypeError(f"tree_mask has dtype {tree_mask.dtype}; it must be bool or uint32")
    num_requests, num_nodes = q.shape[:2]
    for b in range(num_requests):
        length = int(cache_seqlens[b])
        prefix = np.arange(0 if part == "tree" else length)
        for i in range(num_nodes):
            tree = [length + j for j in range(num_nodes) if part != "prefix" and _sees(tree_mask, b, i, j)]
            seen = np.concatenate([prefix, np.array(tree, dtype=prefix.dtype)])
            if seen.size == 0:
                continue
            if block_table is None:
                rows = kv_cache[b, seen]
            else:
                page_size = kv_cache.shape[1]
                rows = kv_cache[block_table[b, seen // page_size], seen % page_size]
            yield b, i, q[b, i].astype(np.float64), rows.astype(np.float64)


def _sees(tree_mask: Array | None, b: int, i: int, j: int) -> bool:
    if tree_mask is None:
        return j <= i
    if tree_mask.dtype == np.bool_:
        return bool(tree_mask[b, i, j])
    return int(tree_mask[b, i, j // 32]) // 2 ** (j % 32) % 2 == 1
