"""Oracles of the accept operators: argmax, the walk, the draws, the target's law, what moves in the cache.

Plain Python, one request, one row and one token at a time: integers where the contract is exact, float64 where it is
not. They share no line with the kernels and their mirrors. A function tells the walk what a node's target token is, so
the greedy and the sampled one are the same walk; cache rows move out of a copy of the whole cache, so no order of the
moves can matter; what top_p keeps comes from sorting all tokens.

`emitted_law` is the proof that a walk is lossless: it sums over all outcomes of the draws of one step, so that the law
of what the step emits can be held against the target's own, without a histogram.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "BAD_LINK",
    "BAD_TARGET",
    "STOPPED",
    "accept_greedy",
    "accept_sampled",
    "argmax_tokens",
    "compact_kv",
    "draw",
    "emitted_law",
    "gather_accepted",
    "philox4x32",
    "position_bits",
    "row_law",
    "row_weights",
    "sequence_law",
    "target_probs",
    "uniform_bits",
    "verify_tree_greedy",
]

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
TargetLaw = Callable[[tuple[int, ...]], Sequence[Any]]

BAD_TARGET, BAD_LINK, STOPPED = 1, 2, 4

_MASK32, _MASK64 = 2**32 - 1, 2**64 - 1
_FLOATS = ("float16", "bfloat16", "float32", "float64")


# The target's choice


def argmax_tokens(logits: Array) -> npt.NDArray[np.int32]:
    """The likeliest token of each row.

    Parameters
    ----------
    logits : float [.., V]
        In nats. float16, bfloat16 (ml_dtypes), float32 or float64; V >= 1.

    Returns
    -------
    int32 [..]
        Of equal logits the lowest id (0.0 and -0.0 are equal); -1 for a row that holds a NaN.

    Raises
    ------
    TypeError
        logits has none of the dtypes above.
    """
    _require_float("logits", logits)
    tokens = np.zeros(logits.shape[:-1], dtype=np.int32)
    for row in np.ndindex(*tokens.shape):
        values = logits[row].astype(np.float64).tolist()
        tokens[row] = -1 if any(map(math.isnan, values)) else values.index(max(values))
    return tokens


def target_probs(
    logits: Array,
    temperature: Array | float,
    top_k: Array | int | None = None,
    top_p: Array | float | None = None,
) -> npt.NDArray[np.float64]:
    """The law to draw from: softmax at a temperature over the tokens that top_k, then top_p, keep.

    Parameters
    ----------
    logits : float [B, Q, V]
        In nats. float16, bfloat16 (ml_dtypes), float32 or float64.
    temperature : float, or float [B]
        0 gives all to the lowest of the likeliest tokens.
    top_k : int, or int [B], optional
        Keeps each logit that is no less than the k-th largest. Below 1 and from V on: keeps all.
    top_p : float, or float [B], optional
        Of what top_k keeps, renormalised: keeps the likeliest tokens that have this much together, and any as likely
        as the last of them. From 1 on: keeps all.

    Returns
    -------
    float64 [B, Q, V]
        0 for what is not kept. All 0: a row with a NaN or +inf, or of nothing but -inf; all rows of a request whose
        temperature is negative, infinite or NaN, or whose top_p is 0, negative or NaN.

    Raises
    ------
    TypeError
        logits has none of the dtypes above.
    """
    _require_float("logits", logits)
    batch, _, vocabulary = logits.shape
    temperatures = np.broadcast_to(np.asarray(temperature, dtype=np.float64), batch).tolist()
    counts = np.broadcast_to(np.asarray(0 if top_k is None else top_k), batch).tolist()
    masses = np.broadcast_to(np.asarray(1 if top_p is None else top_p, dtype=np.float64), batch).tolist()
    probs = np.zeros(logits.shape)
    for b, i in np.ndindex(*logits.shape[:2]):
        values = logits[b, i].astype(np.float64).tolist()
        if any(map(math.isnan, values)) or not math.isfinite(max(values)):
            continue
        if not (0 <= temperatures[b] < math.inf and masses[b] > 0):
            continue
        if temperatures[b] == 0:
            probs[b, i, values.index(max(values))] = 1
            continue
        falling = sorted(values, reverse=True)
        least = falling[counts[b] - 1] if 0 < counts[b] < vocabulary else -math.inf
        falling = [value for value in falling if value >= least]
        shares = _softmax(falling, temperatures[b])
        if masses[b] < 1:
            # Of equal logits the last one counts, so that all are kept or none.
            ends = [n for n in range(1, len(falling)) if falling[n] != falling[n - 1]] + [len(falling)]
            enough = next((n for n in ends if math.fsum(shares[:n]) >= masses[b]), len(falling))
            least = falling[enough - 1]
            falling = falling[:enough]
        kept = [token for token, value in enumerate(values) if value >= least]
        probs[b, i, kept] = _softmax([values[token] for token in kept], temperatures[b])
    return probs


def _softmax(values: list[float], temperature: float) -> list[float]:
    peak = max(values)
    weights = [math.exp((value - peak) / temperature) for value in values]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


# Random bits


def philox4x32(counter: Sequence[int], key: Sequence[int], rounds: int = 10) -> tuple[int, int, int, int]:
    """Philox4x32: four random words from a counter and a key.

    Parameters
    ----------
    counter : four ints of 32 bits
    key : two ints of 32 bits
    rounds : int
        10 is the usual number.

    Returns
    -------
    four ints of 32 bits

    Notes
    -----
    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the known answers of its
    library Random123 hold.
    """
    c, k = list(counter), list(key)
    for _ in range(rounds):
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & _MASK32, (k[1] + 0xBB67AE85) & _MASK32]
    return c[0], c[1], c[2], c[3]


def position_bits(seed: int, position: int) -> int:
    """64 random bits of a request's seed and a position; both are taken modulo 2**64."""
    seed, position = seed & _MASK64, position & _MASK64
    words = philox4x32((position & _MASK32, position >> 32, 0, 0), (seed & _MASK32, seed >> 32))
    return words[0] * 2**32 + words[1]


def uniform_bits(uniform: float) -> int | None:
    """floor(uniform * 2**64), at most 2**64 - 1; None where it is negative or NaN."""
    if math.isnan(uniform) or uniform < 0:
        return None
    return _MASK64 if uniform >= 1 else math.floor(Fraction(uniform) * 2**64)


# One draw


def row_weights(probs: Sequence[float]) -> list[int] | None:
    """The exact law of a row, floor(p * 2**44) for each token; None where there is none.

    Parameters
    ----------
    probs : floats
        Each one in 0 .. 1; they need not sum to 1.

    Returns
    -------
    list of int, or None
        None: an entry is NaN, negative or above 1, or all weights are 0.
    """
    if not all(0 <= p <= 1 for p in probs):  # false for a NaN
        return None
    weights = [math.floor(math.ldexp(p, 44)) for p in probs]
    return weights if any(weights) else None


def draw(weights: Sequence[int], bits: int) -> int:
    """The token whose share of the weights, laid end to end, holds the point ``bits / 2**64`` of them."""
    point = bits * sum(weights) // 2**64
    for token, weight in enumerate(weights):
        if point < weight:
            return token
        point -= weight
    raise AssertionError("the point lies below the sum")


def row_law(weights: Sequence[int]) -> list[Fraction]:
    """Probability of each token under `draw`, when all 2**64 values of the bits are equally likely.

    A token takes the bits from ``ceil(2**64 * a / W)`` to ``ceil(2**64 * (a + w) / W)``, where a is the weight before
    it: within 2**-64 of ``w / W``.
    """
    total, before, borders = sum(weights), 0, [0]
    for weight in weights:
        before += weight
        borders.append(-(-before * 2**64 // total))
    return [Fraction(end - start, 2**64) for start, end in zip(borders, borders[1:], strict=False)]


# The walk


def accept_greedy(tree: Arrays, target_tokens: Array, stop_tokens: Any = None) -> Arrays:
    """Walk down each tree along the target's tokens.

    Parameters
    ----------
    tree : dict
        Of a `DraftTree`: tokens, first_child, next_sibling : int [B, Q]; num_nodes : int [B]; max_depth : int.
    target_tokens : int [B, Q]
        The target's token behind each node.
    stop_tokens : None, int, or ints [n] or [B, n]
        Tokens that end the output; negative ones are none.

    Returns
    -------
    dict
        nodes : int32 [B, max_depth + 1], accepted nodes, the root first, -1 behind; num_accepted : int32 [B], the root
        counted; bonus_tokens : int32 [B], -1 where there is none; flags : int32 [B], of BAD_TARGET, BAD_LINK, STOPPED;
        tokens : int32 [B, max_depth + 1], what is emitted, -1 behind. An idle request, of no node, has -1 in all, 0
        accepted and no flag.
    """
    return _accept(tree, lambda b, node, depth: int(target_tokens[b, node]), stop_tokens)


def accept_sampled(
    tree: Arrays,
    target_probs: Array,
    *,
    seeds: Array | None = None,
    positions: Array | None = None,
    uniforms: Array | None = None,
    stop_tokens: Any = None,
) -> Arrays:
    """The same walk along tokens drawn from the target's law, one draw at each node that is reached.

    Parameters
    ----------
    tree : dict
        As for `accept_greedy`.
    target_probs : float [B, Q, V]
        The target's law behind each node, as for `row_weights`. float16, bfloat16 (ml_dtypes), float32 or float64.
    seeds : int [B], optional
    positions : int [B] or [B, Q], optional
        Of the root, or of each node; with seeds.
    uniforms : float [B, Q], optional
        In place of both: a number for each node, as for `uniform_bits`.
    stop_tokens
        As for `accept_greedy`.

    Returns
    -------
    dict
        As from `accept_greedy`.

    Raises
    ------
    TypeError
        target_probs has none of the dtypes above.
    ValueError
        Neither seeds and positions nor uniforms are given, or both.
    """
    _require_float("target_probs", target_probs)
    if (seeds is None) != (positions is None) or (seeds is None) == (uniforms is None):
        raise ValueError("give seeds and positions, or uniforms")

    def target(b: int, node: int, depth: int) -> int:
        if uniforms is not None:
            bits = uniform_bits(float(uniforms[b, node]))
        else:
            assert seeds is not None and positions is not None
            position = int(positions[b]) + depth if positions.ndim == 1 else int(positions[b, node])
            bits = position_bits(int(seeds[b]), position)
        weights = row_weights(target_probs[b, node].astype(np.float64).tolist())
        return -1 if bits is None or weights is None else draw(weights, bits)

    return _accept(tree, target, stop_tokens)


def _accept(tree: Arrays, target: Callable[[int, int, int], int], stop_tokens: Any) -> Arrays:
    """All walks of a batch; ``target(b, node, depth)`` is asked once for each node that is reached."""
    batch, width = len(tree["num_nodes"]), int(tree["max_depth"]) + 1
    found: Arrays = {
        "nodes": np.full((batch, width), -1, dtype=np.int32),
        "num_accepted": np.zeros(batch, dtype=np.int32),
        "bonus_tokens": np.full(batch, -1, dtype=np.int32),
        "flags": np.zeros(batch, dtype=np.int32),
        "tokens": np.full((batch, width), -1, dtype=np.int32),
    }
    stops = np.asarray([] if stop_tokens is None else stop_tokens)
    for b in range(batch):
        if tree["num_nodes"][b] <= 0:
            continue
        own = stops[b] if stops.ndim == 2 else stops.reshape(-1)
        path, emitted, bonus, flags = _walk(tree, b, width, target, {int(x) for x in own})
        found["nodes"][b, : len(path)] = path
        found["num_accepted"][b] = len(path)
        found["bonus_tokens"][b] = bonus
        found["flags"][b] = flags
        found["tokens"][b, : len(emitted)] = emitted
    return found


def _walk(
    tree: Arrays, b: int, width: int, target: Callable[[int, int, int], int], stops: set[int]
) -> tuple[list[int], list[int], int, int]:
    """Accepted nodes, emitted tokens, bonus token and flags of one request."""
    path: list[int] = [0]
    emitted: list[int] = []
    flags = 0
    while True:
        token = target(b, path[-1], len(path) - 1)
        if not 0 <= token < 2**31:
            return path, emitted, -1, flags | BAD_TARGET
        emitted.append(token)
        flags |= STOPPED * (token in stops)
        child: int | None = None
        if len(path) < width:
            child, broken = _child_with(tree, b, path[-1], token)
            flags |= BAD_LINK * broken
        if child is None:
            return path, emitted, token, flags
        path.append(child)
        if flags & STOPPED:
            return path, emitted, -1, flags


def _child_with(tree: Arrays, b: int, node: int, token: int) -> tuple[int | None, bool]:
    """The first child with a token, if there is one, and whether the chain broke before it was found."""
    count = min(int(tree["num_nodes"][b]), tree["tokens"].shape[1])
    link, last = int(tree["first_child"][b, node]), node
    while link != -1:
        if not last < link < count:
            return None, True
        if tree["tokens"][b, link] == token:
            return link, False
        link, last = int(tree["next_sibling"][b, link]), link
    return None, False


# The law of a step


def emitted_law(
    tree: Arrays,
    target_law: TargetLaw,
    *,
    request: int = 0,
    stop_tokens: Any = None,
    accept: Callable[[Arrays, Array, Any], Arrays] = accept_greedy,
) -> dict[tuple[int, ...], Any]:
    """Law of the tokens that one step emits, summed over all outcomes of the draws at the nodes that it reaches.

    Parameters
    ----------
    tree : dict
        As for `accept_greedy`; one request of it is looked at.
    target_law : callable
        Of the tokens behind the root, as a tuple, the probabilities of all tokens as the next one: Fractions for an
        exact result, or floats.
    request : int
        Which request.
    stop_tokens : None, int, or ints [n]
        As for `accept_greedy`.
    accept : callable
        The walk to look at, called as ``accept(tree, target_tokens, stop_tokens)`` with one request.

    Returns
    -------
    dict
        Of each sequence that can be emitted, its probability.

    Raises
    ------
    ValueError
        The walk refuses a target token that it was given.

    Notes
    -----
    A node's target token is drawn when the walk asks for it, which it does by stopping there with BAD_TARGET: all
    target tokens are -1 at first.

    The walk is lossless exactly if the probability of each sequence is the product of the target's conditional
    probabilities along it, and the sequences are a complete prefix code: none continues another, and every long
    sequence of tokens starts with one. Going on from the emitted tokens by drawing from the target, or by another step,
    then gives sequences of the target's own law.
    """
    one = {name: array[request : request + 1] if np.ndim(array) else array for name, array in tree.items()}
    law: dict[tuple[int, ...], Any] = {}
    pending: list[tuple[Array, Any]] = [(np.full(one["tokens"].shape, -1, dtype=np.int64), Fraction(1))]
    while pending:
        targets, probability = pending.pop()
        found = accept(one, targets, stop_tokens)
        emitted = tuple(token for token in found["tokens"][0].tolist() if token != -1)
        if not found["flags"][0] & BAD_TARGET:
            law[emitted] = law.get(emitted, 0) + probability
            continue
        node = int(found["nodes"][0, int(found["num_accepted"][0]) - 1])
        if targets[0, node] != -1:
            raise ValueError(f"target token {targets[0, node]} of node {node} was refused")
        for token, share in enumerate(target_law(emitted)):
            if share:
                drawn = targets.copy()
                drawn[0, node] = token
                pending.append((drawn, probability * share))
    return law


def sequence_law(target_law: TargetLaw, length: int) -> dict[tuple[int, ...], Any]:
    """The target's own law of the next tokens, drawn one after the other.

    Parameters
    ----------
    target_law : callable
        As for `emitted_law`.
    length : int
        Number of tokens.

    Returns
    -------
    dict
        Of each sequence of this length that can occur, its probability.
    """
    law: dict[tuple[int, ...], Any] = {(): Fraction(1)}
    for _ in range(length):
        law = {
            (*sequence, token): probability * share
            for sequence, probability in law.items()
            for token, share in enumerate(target_law(sequence))
            if share
        }
    return law


# What was accepted


def compact_kv(
    kv_caches: Sequence[Array],
    cache_seqlens: Array,
    nodes: Array,
    num_accepted: Array,
    block_table: Array | None = None,
) -> tuple[list[Array], Array]:
    """Move accepted rows next to the prefix, out of a copy of each cache.

    Parameters
    ----------
    kv_caches : sequence of arrays
        One a layer: [B, S, ..], or paged [num_pages, page_size, ..].
    cache_seqlens : int [B]
        Prefix length of each request; node i stands in row ``cache_seqlens[b] + i``.
    nodes : int [B, W]
        Accepted nodes.
    num_accepted : int [B]
        How many of them count.
    block_table : int [B, max_pages], optional
        Pages of each request; given, the caches are paged.

    Returns
    -------
    kv_caches : list of arrays
    cache_seqlens : int [B]
        Both new; the arguments keep their contents.

    Notes
    -----
    A move to or from a row that is none of the request's, or to behind its source, is left out: all of them where the
    length is negative. A length that would leave the cache stays.
    """
    after = [cache.copy() for cache in kv_caches]
    lengths = cache_seqlens.copy()
    rows = kv_caches[0].shape[1] * (1 if block_table is None else block_table.shape[1])
    for b, length in enumerate(cache_seqlens.tolist()):
        path = nodes[b, : max(int(num_accepted[b]), 0)].tolist()
        for old, new in zip(kv_caches, after, strict=True):
            for k, node in enumerate(path):
                source = _row_of(old, block_table, b, length + node)
                target = _row_of(old, block_table, b, length + k)
                if length >= 0 and node >= k and source is not None and target is not None:
                    new[target] = old[source]
        if 0 <= length <= rows - len(path):
            lengths[b] = length + len(path)
    return after, lengths


def _row_of(cache: Array, block_table: Array | None, b: int, position: int) -> tuple[int, int] | None:
    """Where a request's row stands, if it stands anywhere."""
    page, slot = divmod(position, cache.shape[1])
    table = [b] if block_table is None else block_table[b].tolist()
    if not 0 <= page < len(table) or not 0 <= table[page] < cache.shape[0]:
        return None
    return table[page], slot


def gather_accepted(x: Array, nodes: Array) -> Array:
    """Rows of the accepted nodes.

    Parameters
    ----------
    x : array [B, Q, ..]
        A row for each node, say hidden states.
    nodes : int [B, W]
        Accepted nodes, -1 where there is none.

    Returns
    -------
    array [B, W, ..]
        Zeros where there is no node, or no row for it.
    """
    found = np.zeros((*nodes.shape, *x.shape[2:]), dtype=x.dtype)
    for b, k in np.ndindex(*nodes.shape):
        if 0 <= nodes[b, k] < x.shape[1]:
            found[b, k] = x[b, nodes[b, k]]
    return found


def verify_tree_greedy(
    predicts: Array,
    accept_index: Array,
    accept_token_num: Array,
    candidates: Array,
    retrive_index: Array,
    retrive_next_token: Array,
    retrive_next_sibling: Array,
    target_predict: Array,
) -> tuple[Array, Array, Array]:
    """SGLang's greedy verification, on copies.

    Parameters
    ----------
    predicts : int [B * Q]
    accept_index : int [B, S]
    accept_token_num : int [B]
        What is written to; other elements keep their contents.
    candidates : int [B, Q]
        Tokens of the nodes.
    retrive_index : int [B, Q]
        Place of each node in the flattened arrays.
    retrive_next_token, retrive_next_sibling : int [B, Q]
        First child and next sibling, -1: none. They may lead to smaller nodes.
    target_predict : int [B, Q]
        The target's token behind each node.

    Returns
    -------
    predicts, accept_index, accept_token_num
        The target's token at each accepted place; the places, the root's first; accepted nodes, the root not counted.

    Notes
    -----
    Source: verify_tree_greedy of SGLang (sgl-kernel, csrc/speculative/eagle_utils.cu); the spelling is theirs. A walk
    ends at an index outside of its array, and when it has visited Q nodes; with a root outside, nothing is accepted.
    """
    predicts, accept_index, accept_token_num = predicts.copy(), accept_index.copy(), accept_token_num.copy()
    targets = target_predict.reshape(-1).tolist()
    batch, num_nodes = candidates.shape
    for b in range(batch):
        places: list[int] = [int(retrive_index[b, 0])]
        if not 0 <= places[0] < batch * num_nodes:
            accept_token_num[b] = 0
            continue
        node, visited = int(retrive_next_token[b, 0]), 0
        while len(places) < accept_index.shape[1] and 0 <= node < num_nodes and visited < num_nodes:
            visited += 1
            if int(candidates[b, node]) != targets[places[-1]]:
                node = int(retrive_next_sibling[b, node])
                continue
            if not 0 <= int(retrive_index[b, node]) < batch * num_nodes:
                break
            places.append(int(retrive_index[b, node]))
            node = int(retrive_next_token[b, node])
        predicts[places] = [targets[place] for place in places]
        accept_index[b, : len(places)] = places
        accept_token_num[b] = len(places) - 1
    return predicts, accept_index, accept_token_num


def _require_float(name: str, array: Array) -> None:
    if array.dtype.name not in _FLOATS:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be one of: {', '.join(_FLOATS)}")
