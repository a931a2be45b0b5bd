"""What each public operator must give, whatever contents its arguments hold: from the oracles, or written down here.

Contents count as the documentation says: lengths and pages are clamped, parents and links that lead nowhere count as
none. Each check raises AssertionError; ``before`` are copies of the arguments, ``after`` the arguments themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from accept_cases import check_greedy, check_sampled, check_tokens
from cases import as_float
from test_target_probs import check as check_probs
from tree_cases import check_topk, check_trees

import ddtree_numba as dd
from ddtree_numba.attention import schedule
from ddtree_numba.device import arrays
from ddtree_numba.tree.draft_tree import DTYPES
from ddtree_numba.tree.encodings import _check_tree
from refs import accept, oracle, trees

Arguments = dict[str, Any]

LARGEST = 2**31 - 1
EPS = 2.0**-23
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


def host(x: Any) -> np.ndarray:
    """A result in NumPy."""
    return x if isinstance(x, np.ndarray) else arrays.view("a result", x).to_host()


def same(found: Any, wanted: np.ndarray, name: str = "result") -> None:
    """Raise AssertionError unless all elements are equal, NaN to NaN."""
    found = host(found)
    assert found.shape == wanted.shape, f"FAIL {name}: shape {found.shape} for {wanted.shape}"
    equal = found == wanted
    if wanted.dtype.kind == "f":
        equal |= np.isnan(found) & np.isnan(wanted)
    at = np.argwhere(~equal)
    assert not len(at), f"FAIL {name}{at[0].tolist()}: {found[tuple(at[0])]} for {wanted[tuple(at[0])]}"


# Trees and their encodings


def node_paths(parents: np.ndarray) -> list[list[int]]:
    """Of one request: the nodes from the root to each node; none for padding."""
    paths: list[list[int]] = [[0]]
    for i, parent in enumerate(parents.tolist()[1:], start=1):
        path = paths[parent] if 0 <= parent < i else []
        paths.append([*path, i] if path else [])
    return paths


def seen_by_parents(parents: np.ndarray) -> np.ndarray:
    """bool [.., Q, Q]."""
    num_nodes = parents.shape[-1]
    seen = np.zeros((*parents.shape, num_nodes), np.bool_)
    if num_nodes == 0:  # the host takes it
        return seen
    for at in np.ndindex(parents.shape[:-1]):
        for i, path in enumerate(node_paths(parents[at])):
            seen[(*at, i, path)] = True
    return seen


def links_of(parents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first, following = np.full_like(parents, -1), np.full_like(parents, -1)
    for b, row in enumerate(parents):
        family: dict[int, list[int]] = {}
        for path in node_paths(row)[1:]:
            if path:
                family.setdefault(path[-2], []).append(path[-1])
        for parent, children in family.items():
            first[b, parent] = children[0]
            following[b, children[:-1]] = children[1:]
    return first, following


def bits(mask: np.ndarray, num_nodes: int) -> np.ndarray:
    """bool [.., Q] of bools, whose lowest bit counts, or of words."""
    if mask.dtype == np.bool_:
        return mask.view(np.uint8) & 1 == 1
    width = 8 * mask.dtype.itemsize
    words = mask.view(f"u{mask.dtype.itemsize}")
    columns = [words[..., j // width] >> words.dtype.type(j % width) & words.dtype.type(1) for j in range(num_nodes)]
    return np.stack(columns, axis=-1) == 1


def as_mask(seen: np.ndarray, packed: bool) -> np.ndarray:
    """bool [.., Q], or words of 32 bits."""
    if not packed:
        return seen
    num_nodes = seen.shape[-1]
    words = np.zeros((*seen.shape[:-1], -(-num_nodes // 32)), np.uint32)
    for j in range(num_nodes):
        words[..., j // 32] |= seen[..., j].astype(np.uint32) << np.uint32(j % 32)
    return words


def same_mask(found: Any, seen: np.ndarray, packed: Any) -> None:
    same(found, as_mask(seen, bool(packed)))


def claimed(found: Any, claims: list[list[set[int]]]) -> None:
    """Parents that one of those who claim a child has; -1 where none does."""
    for (b, i), parent in np.ndenumerate(host(found)):
        assert parent in (claims[b][i] or {-1}), f"FAIL parents[{b}, {i}]: {parent} for one of {claims[b][i]}"


def check_links(before: Arguments, found: Any, after: Arguments) -> None:
    for x, wanted in zip(found, links_of(before["parents"]), strict=True):
        same(x, wanted)


def check_sglang_links(before: Arguments, found: Any, after: Arguments) -> None:
    parents = before["parents"]
    same(found[0], np.arange(parents.size).reshape(parents.shape))
    check_links(before, found[1:], after)


def parents_from_links(names: tuple[str, str]) -> Callable[..., None]:
    def check(before: Arguments, found: Any, after: Arguments) -> None:
        first, following = (before[name].tolist() for name in names)
        num_nodes = before[names[0]].shape[1]
        claims: list[list[set[int]]] = [[set() for _ in row] for row in first]
        for b, row in enumerate(first):
            for i, child in enumerate(row):
                last = i
                while last < child < num_nodes:
                    claims[b][child].add(i)
                    last, child = child, following[b][child]
        claimed(found, claims)

    return check


def check_depths(before: Arguments, found: Any, after: Arguments) -> None:
    same(found, np.maximum(seen_by_parents(before["parents"]).sum(axis=-1) - 1, 0))


def check_positions(before: Arguments, found: Any, after: Arguments) -> None:
    depths = np.clip(before["depths"].astype(np.int64), 0, before["depths"].shape[1] - 1)
    same(found, np.minimum(np.maximum(before["cache_seqlens"].astype(np.int64), 0)[:, None] + depths, LARGEST))


def check_mask_from_parents(before: Arguments, found: Any, after: Arguments) -> None:
    same_mask(found, seen_by_parents(np.asarray(before["parents"])), before.get("packed", False))


def check_parents_from_mask(before: Arguments, found: Any, after: Arguments) -> None:
    mask = before["tree_mask"]
    num_nodes = mask.shape[1]
    earlier = bits(mask, num_nodes) & np.tri(num_nodes, k=-1, dtype=np.bool_)
    same(found, np.where(earlier.any(axis=-1), num_nodes - 1 - np.argmax(earlier[..., ::-1], axis=-1), -1))


def check_pack_mask(before: Arguments, found: Any, after: Arguments) -> None:
    mask = np.asarray(before["mask"])
    same_mask(found, bits(mask, mask.shape[-1]), True)


def check_unpack_mask(before: Arguments, found: Any, after: Arguments) -> None:
    same(found, bits(np.asarray(before["words"]), int(before["num_nodes"])))


def check_full_mask(before: Arguments, found: Any, after: Arguments) -> None:
    mask, total = before["tree_mask"], int(before["seqlens_sum"])
    batch, num_nodes = mask.shape[:2]
    seen = bits(mask, num_nodes)
    found = host(found)
    assert found.shape == (num_nodes * (total + batch * num_nodes),)
    start = 0
    for b, length in enumerate(np.clip(before["cache_seqlens"].astype(np.int64), 0, total).tolist()):
        for i in range(num_nodes):
            row = [*[True] * length, *seen[b, i]]
            end = max(min(start + len(row), found.size), start)
            same(found[start:end], np.array(row[: end - start], np.bool_))
            start += len(row)
    if before.get("out") is not None and start < found.size:
        same(found[start:].view(np.uint8), before["out"][start:].view(np.uint8), "what is behind the mask")


def check_from_full_mask(before: Arguments, found: Any, after: Arguments) -> None:
    mask, num_nodes = before["mask"].view(np.uint8) & 1 == 1, int(before["num_nodes"])
    lengths = np.maximum(before["cache_seqlens"].astype(np.int64), 0).tolist()
    seen = np.zeros((len(lengths), num_nodes, num_nodes), np.bool_)
    start = 0
    for b, length in enumerate(lengths):
        for i in range(num_nodes):
            row = mask[start + length : start + length + num_nodes]
            seen[b, i, : row.size] = row
            start += length + num_nodes
    same_mask(found, seen, before.get("packed", False))


def check_qlen_only(before: Arguments, found: Any, after: Arguments) -> None:
    mask = before["tree_mask"]
    same(found, bits(mask, mask.shape[1]).reshape(-1))


def check_from_qlen_only(before: Arguments, found: Any, after: Arguments) -> None:
    num_nodes = int(before["num_nodes"])
    seen = (before["mask"].view(np.uint8) & 1 == 1).reshape(-1, num_nodes, num_nodes)
    same_mask(found, seen, before.get("packed", False))


def check_bitpacked(before: Arguments, found: Any, after: Arguments) -> None:
    mask = before["tree_mask"]
    words = as_mask(bits(mask, mask.shape[1]), True).reshape(-1)
    same(found, words.astype(np.uint8 if mask.shape[1] <= 8 else np.uint16 if mask.shape[1] <= 16 else np.uint32))


def check_from_bitpacked(before: Arguments, found: Any, after: Arguments) -> None:
    num_nodes = int(before["num_nodes"])
    words = before["words"].reshape(-1, num_nodes, 1)
    same_mask(found, bits(words, num_nodes), before.get("packed", False))


def check_tensorrt(before: Arguments, found: Any, after: Arguments) -> None:
    mask = before["tree_mask"]
    same(found, as_mask(bits(mask, mask.shape[1]), True).view(np.int32))


def check_from_tensorrt(before: Arguments, found: Any, after: Arguments) -> None:
    words = before["words"]
    same_mask(found, bits(words, words.shape[1]), before.get("packed", False))


def check_bias(before: Arguments, found: Any, after: Arguments) -> None:
    mask = before["tree_mask"]
    batch, num_nodes = mask.shape[:2]
    longest = 0 if before.get("max_seqlen") is None else int(before["max_seqlen"])
    lengths = before.get("cache_seqlens")
    wanted = np.full((batch, num_nodes, longest + num_nodes), -np.inf, np.float32)
    seen = bits(mask, num_nodes)
    for b in range(batch):
        length = 0 if lengths is None else min(max(int(lengths[b]), 0), longest)
        wanted[b, :, :length] = 0
        wanted[b, :, length : length + num_nodes][seen[b]] = 0
    same(as_float(host(found)).astype(np.float32), wanted)


def check_from_bias(before: Arguments, found: Any, after: Arguments) -> None:
    same_mask(found, as_float(before["bias"]).astype(np.float32) == 0, before.get("packed", False))


def check_retrieve_indices(before: Arguments, found: Any, after: Arguments) -> None:
    parents, width = before["parents"], int(before["max_depth"]) + 1
    leaves = before.get("max_leaves")
    wanted = np.full(
        (len(parents), max(parents.shape[1] - 1, 1) if leaves is None else int(leaves), width), -1, np.int32
    )
    for b, row in enumerate(parents):
        paths = [path for path in node_paths(row) if path]
        inner = {path[-2] for path in paths if len(path) > 1}
        ends = [path for path in paths if path[-1] not in inner]
        for n, path in enumerate(ends[: wanted.shape[1]]):
            wanted[b, n, : len(path)] = path[:width]
    same(found, wanted)


def check_from_retrieve_indices(before: Arguments, found: Any, after: Arguments) -> None:
    num_nodes = int(before["num_nodes"])
    claims: list[list[set[int]]] = []
    for rows in before["paths"].tolist():
        claims.append([set() for _ in range(num_nodes)])
        for path in rows:
            for parent, child in zip(path, path[1:], strict=False):
                if 0 <= parent < child < num_nodes:
                    claims[-1][child].add(parent)
    claimed(found, claims)


def check_relabel(before: Arguments, found: Any, after: Arguments) -> None:
    tree = {name: getattr(before["tree"], name) for name in DTYPES}
    new, permutation = found[0].to_host(), host(found[1])
    batch, num_nodes = permutation.shape
    assert ((permutation >= 0) & (permutation < num_nodes)).all() and (permutation[:, 0] == 0).all()
    assert new.max_depth == before["tree"].max_depth
    same(new.num_nodes, tree["num_nodes"])
    for name in ("tokens", "depths", "scores", "input_ids"):
        same(getattr(new, name), np.take_along_axis(tree[name], permutation, 1), name)
    parents = np.full_like(permutation, -1)
    for b, n in np.ndindex(batch, num_nodes):
        places = np.flatnonzero(permutation[b] == tree["parents"][b, permutation[b, n]])
        parents[b, n] = places[0] if places.size else -1
    same(new.parents, parents, "parents")
    for x, wanted in zip((new.first_child, new.next_sibling), links_of(parents), strict=True):
        same(x, wanted, "links")
    same_mask(new.tree_mask, seen_by_parents(parents), True)
    try:
        _check_tree(tree)
    except ValueError:
        return
    with np.errstate(invalid="ignore"):
        exact = trees.relabel(tree | {"max_depth": np.int32(new.max_depth)}, before["order"])
    same(permutation, exact["permutation"], "permutation")


def check_inverse(before: Arguments, found: Any, after: Arguments) -> None:
    permutation = before["permutation"]
    wanted = np.full_like(permutation, -1)
    for b, n in reversed(list(np.ndindex(permutation.shape))):
        if 0 <= permutation[b, n] < permutation.shape[1]:
            wanted[b, permutation[b, n]] = n
    same(found, wanted)


# Building


def check_topk_logprobs(before: Arguments, found: Any, after: Arguments) -> None:
    check_topk(tuple(map(host, found)), before["logits"], int(before["k"]))


def check_build_tree(before: Arguments, found: Any, after: Arguments) -> None:
    problem = {name: before[name] for name in ("logprobs", "token_ids", "root_tokens")}
    problem["tree_budget"] = int(before["tree_budget"])
    rows = problem["logprobs"]
    live = np.logical_and.accumulate(np.isfinite(rows), axis=2)
    with np.errstate(invalid="ignore"):
        rising = live[..., 1:] & (rows[..., 1:] > rows[..., :-1])
    tokens = [problem[name].astype(np.int64) for name in ("token_ids", "root_tokens")]
    if (live & (rows > 0)).any() or rising.any() or any(((x < 0) | (x > LARGEST)).any() for x in tokens):
        mirror = "frontier_numpy" if str(before.get("variant", "")).startswith("frontier") else "heap_numpy"
        made = dd.build_tree(**problem, variant=mirror)
        expected = {name: getattr(made, name) for name in DTYPES}
    else:
        expected = None
    depth = found.max_depth
    assert depth >= min(rows.shape[1], problem["tree_budget"])
    found = dd.DraftTree(
        **{name: getattr(found, name) for name in DTYPES}, max_depth=min(rows.shape[1], problem["tree_budget"])
    )
    check_trees(found, problem, expected)


# Attention


def attention_inputs(before: Arguments) -> tuple[dict[str, Any], np.ndarray]:
    """The oracle's arguments, contents clamped; and which requests hold finite numbers alone, where it matters."""
    q = before["q"]
    if isinstance(q, (tuple, list)):
        q = np.concatenate([as_float(x).astype(np.float64) for x in q], axis=3)
    q, cache = as_float(q), as_float(before["kv_cache"])
    if cache.ndim == 4:
        cache = cache[:, :, 0]
    batch, num_nodes = q.shape[:2]
    table = before.get("block_table")
    pages = np.arange(batch)[:, None] if table is None else np.clip(table, 0, cache.shape[0] - 1)
    capacity = pages.shape[1] * cache.shape[1]
    longest = before.get("max_seqlen")
    lengths = np.clip(
        before["cache_seqlens"].astype(np.int64), 0, capacity - num_nodes if longest is None else int(longest)
    )
    mask = before.get("tree_mask")
    seen = (
        np.broadcast_to(np.tri(num_nodes, dtype=np.bool_), (batch, num_nodes, num_nodes))
        if mask is None
        else bits(mask, num_nodes)
    )
    rows = np.zeros((batch, max(capacity, 1), cache.shape[2]))
    finite = np.zeros(batch, np.bool_)
    for b in range(batch):
        live = int(lengths[b]) + num_nodes
        keys = np.arange(live)
        rows[b, :live] = cache[pages[b, keys // cache.shape[1]], keys % cache.shape[1]].astype(np.float64)
        finite[b] = np.isfinite(rows[b]).all() and np.isfinite(q[b].astype(np.float64)).all()
        if not finite[b]:
            rows[b] = 0
    given = {
        "q": np.where(finite[:, None, None, None], q.astype(np.float64), 0.0),
        "kv_cache": rows,
        "cache_seqlens": lengths,
        "tree_mask": seen,
        "sm_scale": float(before["sm_scale"]),
        "kv_lora_rank": int(before["kv_lora_rank"]),
    }
    return given, finite


def close_attention(
    found: Any, exact: tuple[np.ndarray, np.ndarray], given: dict[str, Any], finite: np.ndarray, weights: float = 0.0
) -> None:
    """Within the rounding of float32 logits, sums and results; tests of the operators have the derived bounds.

    weights : the rounding of each weight, where they are rounded; a mean under them is off by twice as much at most.
    """
    out, lse = (as_float(host(x)) for x in found)
    assert out.shape == exact[0].shape and lse.shape == exact[1].shape
    norms = [np.sqrt((x**2).sum(axis=-1)).max(initial=0) for x in (given["q"], given["kv_cache"])]
    logit = given["sm_scale"] * norms[0] * norms[1]
    if logit > 1e4:
        return  # the rounding of the logits decides
    bound = EPS * (32 + 8 * logit)
    size = np.abs(given["kv_cache"]).max(initial=0)
    for b in np.flatnonzero(finite):
        limit = size * (bound + ROUNDING[out.dtype.name] + 2 * weights) + SMALLEST[out.dtype.name]
        error = np.abs(out[b].astype(np.float64) - exact[0][b])
        error = np.where(np.abs(exact[0][b]) + limit < float(ml_dtypes.finfo(out.dtype).max), error, 0)  # else infinite
        assert (error <= limit).all(), f"FAIL out[{b}]: off by {error.max()}, {limit} allowed"
        seen = np.isfinite(exact[1][b])
        assert (lse[b][~seen] == -np.inf).all() and (out[b][~seen] == 0).all(), f"FAIL request {b}: nothing is seen"
        error = np.abs(lse[b][seen] - exact[1][b][seen]) / np.maximum(1, np.abs(exact[1][b][seen]))
        assert (error <= bound).all(), f"FAIL lse[{b}]: off by {error.max()}"


def check_attention(part: str) -> Callable[..., None]:
    def check(before: Arguments, found: Any, after: Arguments) -> None:
        given, finite = attention_inputs(before)
        with np.errstate(all="ignore"):
            exact = oracle.verify_attention(**given, part=part)
        rounded = str(before.get("variant", "")).startswith("mma")
        weights = ROUNDING[as_float(before["kv_cache"]).dtype.name] if rounded else 0.0
        close_attention(found, exact, given, finite, weights)

    return check


def check_prefix_tail(before: Arguments, found: Any, after: Arguments) -> None:
    given, finite = attention_inputs(before)
    if callable(before["prefix"]):
        check_attention("all")(before, found, after)
        return
    out, lse = (as_float(x).astype(np.float64) for x in before["prefix"])
    usual = np.isfinite(lse) | np.isinf(lse)
    finite = (
        finite & usual.all(axis=(1, 2)) & np.isfinite(np.where(np.isinf(lse)[..., None], 0, out)).all(axis=(1, 2, 3))
    )
    with np.errstate(all="ignore"):
        exact = oracle.merge_states(out, lse, *oracle.verify_attention(**given, part="tree"))
    largest = np.abs(np.where(np.isfinite(out), out, 0)).max(initial=0)  # sizes the rounding, as rows of the cache do
    rows = np.full((1, *given["kv_cache"].shape[1:]), largest)
    given = given | {"kv_cache": np.concatenate([given["kv_cache"], rows])}
    close_attention(found, exact, given, finite)


def check_merge(before: Arguments, found: Any, after: Arguments) -> None:
    a, b = (as_float(before[name]) for name in ("out_a", "out_b"))
    out, lse = as_float(host(found[0])), host(found[1])
    with np.errstate(all="ignore"):
        exact, exact_lse = oracle.merge_states(a, before["lse_a"], b, before["lse_b"])
        sizes = [
            np.where(np.isinf(before[l])[..., None], 0, np.abs(x.astype(np.float64)))
            for l, x in (("lse_a", a), ("lse_b", b))
        ]
        scale = np.maximum(*sizes)
        name = out.dtype.name
        bound = 4 * EPS * scale + ROUNDING[name] * np.abs(exact) + SMALLEST[name]
        largest = float(ml_dtypes.finfo(out.dtype).max)
        fine = np.abs(out.astype(np.float64) - exact) <= bound
        # NaN and infinity spread; what exceeds the dtype of the result has no bound.
        fine |= ~np.isfinite(scale) | np.isnan(exact) | (np.abs(exact) > largest * (1 - 2 * ROUNDING[name] - EPS))
        assert fine.all(), f"FAIL out{np.argwhere(~fine)[0].tolist()}"
        close = np.abs(lse - exact_lse) <= 2 * EPS * np.maximum(1, np.abs(exact_lse))
        fine = close | (lse == exact_lse) | (np.isnan(lse) & np.isnan(exact_lse))
        assert fine.all(), f"FAIL lse{np.argwhere(~fine)[0].tolist()}"
    assert (out[np.isneginf(exact_lse)] == 0).all(), "FAIL: two empty states give 0"


def check_log2(before: Arguments, found: Any, after: Arguments) -> None:
    lse = before["lse"]
    with np.errstate(all="ignore"):
        same(found, np.where(lse == np.inf, -np.inf, lse * np.float32(np.log(2))).astype(np.float32))


def check_flashmla(before: Arguments, found: Any, after: Arguments) -> None:
    lse = before["lse"]
    same(found, np.where(lse == np.inf, np.float32(-np.inf), lse).swapaxes(1, 2))


# Accepting


def check_argmax(before: Arguments, found: Any, after: Arguments) -> None:
    check_tokens(host(found), accept.argmax_tokens(as_float(before["logits"])))


def stops(before: Arguments) -> Any:
    given = before.get("stop_tokens")
    return list(given) if isinstance(given, (set, frozenset, range)) else given


def check_accept_greedy(before: Arguments, found: Any, after: Arguments) -> None:
    check_greedy(found, before["tree"], before["target_tokens"], stops(before))


def check_accept_sampled(before: Arguments, found: Any, after: Arguments) -> None:
    draws = {name: before.get(name) for name in ("seeds", "positions", "uniforms")}
    check_sampled(found, before["tree"], before["target_probs"], stops(before), **draws)


def check_target_probs(before: Arguments, found: Any, after: Arguments) -> None:
    check_probs(host(found), *(before.get(name) for name in ("logits", "temperature", "top_k", "top_p")))


def check_sglang(before: Arguments, found: Any, after: Arguments) -> None:
    assert found is None
    names = ("predicts", "accept_index", "accept_token_num")
    if before["accept_index"].shape[1] == 0:
        exact: Any = [before["predicts"], before["accept_index"], np.zeros_like(before["accept_token_num"])]
    else:
        exact = accept.verify_tree_greedy(**before)
    for name, wanted in zip(names, exact, strict=True):
        same(after[name], wanted, name)


def check_compact(before: Arguments, found: Any, after: Arguments) -> None:
    layers, moved = (
        given["kv_caches"] if isinstance(given["kv_caches"], (list, tuple)) else [given["kv_caches"]]
        for given in (before, after)
    )
    taken = before["accepted"]
    if layers[0].shape[1] == 0:  # no row to move, and no room for a longer prefix
        same(found, before["cache_seqlens"], "cache_seqlens")
        return
    exact, lengths = accept.compact_kv(
        layers, before["cache_seqlens"], taken.nodes, np.minimum(taken.num_accepted, taken.nodes.shape[1]),
        before.get("block_table"),
    )  # fmt: skip
    assert found is after["cache_seqlens"]
    same(found, lengths, "cache_seqlens")
    for n, (x, wanted) in enumerate(zip(moved, exact, strict=True)):
        x = host(x)
        where = np.flatnonzero(np.frombuffer(x.tobytes(), np.uint8) != np.frombuffer(wanted.tobytes(), np.uint8))
        assert not where.size, f"FAIL kv_caches[{n}]: {where.size} bytes differ, first {where[0]}"


def check_gather(before: Arguments, found: Any, after: Arguments) -> None:
    x, taken = before["x"], before["accepted"]
    x = x.view(np.uint8) if x.dtype == np.bool_ else x  # NumPy makes 1 of other bytes, a copy of bytes does not
    counted = np.arange(taken.nodes.shape[1]) < taken.num_accepted[:, None]
    wanted = accept.gather_accepted(x, np.where(counted, taken.nodes, -1))
    found = host(found)
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes(), "FAIL: other bytes"


def check_plan(before: Arguments, found: Any, after: Arguments) -> None:
    lengths, num_nodes, num_heads, most, *_ = before.values()
    assert (found.batch, found.num_nodes, found.num_heads, found.max_seqlen) == (
        len(lengths),
        num_nodes,
        num_heads,
        most,
    )
    if found.batch == 0:
        return
    row_tiles = -(-num_nodes * num_heads // 64)
    exact = schedule.mirror(lengths, num_nodes, most, row_tiles, found.blocks, not found.merges)
    pieces = found.pieces.to_host()
    for c, wanted in enumerate(exact):
        n, taken = c, []
        while n >= 0 and pieces[n, schedule.COUNT]:
            taken.append(tuple(int(x) for x in pieces[n, : schedule.NEXT]))
            n = int(pieces[n, schedule.NEXT])
        assert taken == wanted, f"FAIL: block {c} has {taken}, not {wanted}"


def check_workspace(before: Arguments, found: Any, after: Arguments) -> None:
    assert type(found) is int and found >= 0 and found % 16 == 0, f"FAIL: {found!r}"


def check_scale(before: Arguments, found: Any, after: Arguments) -> None:
    factor = float(before["factor"])
    correction = 0.1 * float(before["mscale_all_dim"]) * math.log(factor) + 1 if factor > 1 else 1.0
    exact = float(before["qk_head_dim"]) ** -0.5 * correction * correction
    assert isinstance(found, float) and math.isclose(found, exact, rel_tol=1e-12), f"FAIL: {found} for {exact}"


CHECKS: dict[str, Callable[[Arguments, Any, Arguments], None]] = {
    "topk_logprobs": check_topk_logprobs,
    "build_tree": check_build_tree,
    "links_from_parents": check_links,
    "parents_from_links": parents_from_links(("first_child", "next_sibling")),
    "sglang_links": check_sglang_links,
    "parents_from_sglang": parents_from_links(("retrieve_next_token", "retrieve_next_sibling")),
    "depths_from_parents": check_depths,
    "positions": check_positions,
    "mask_from_parents": check_mask_from_parents,
    "parents_from_mask": check_parents_from_mask,
    "pack_mask": check_pack_mask,
    "unpack_mask": check_unpack_mask,
    "full_mask": check_full_mask,
    "tree_mask_from_full_mask": check_from_full_mask,
    "qlen_only_mask": check_qlen_only,
    "tree_mask_from_qlen_only": check_from_qlen_only,
    "bitpacked_mask": check_bitpacked,
    "tree_mask_from_bitpacked": check_from_bitpacked,
    "tensorrt_mask": check_tensorrt,
    "tree_mask_from_tensorrt": check_from_tensorrt,
    "dense_bias": check_bias,
    "tree_mask_from_bias": check_from_bias,
    "retrieve_indices": check_retrieve_indices,
    "parents_from_retrieve_indices": check_from_retrieve_indices,
    "relabel": check_relabel,
    "inverse_permutation": check_inverse,
    "verify_attention": check_attention("all"),
    "prefix_attention": check_attention("prefix"),
    "verify_attention_prefix_tail": check_prefix_tail,
    "plan_attention": check_plan,
    "workspace_bytes": check_workspace,
    "yarn_sm_scale": check_scale,
    "merge_states": check_merge,
    "lse_from_log2": check_log2,
    "lse_from_flashmla": check_flashmla,
    "argmax_tokens": check_argmax,
    "accept_greedy": check_accept_greedy,
    "accept_sampled": check_accept_sampled,
    "target_probs": check_target_probs,
    "verify_tree_greedy": check_sglang,
    "compact_kv": check_compact,
    "gather_accepted": check_gather,
}
