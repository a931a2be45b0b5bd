"""check: every variant of every operator on reference files, against the expected values stored in them.

A reference file says in its tensor ``operator`` which operator it is for. The expected values come from the float64
oracle beside the files, so that this module needs no oracle, and cannot share a mistake with one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numba import cuda

from ddtree_numba import kdtr
from ddtree_numba.accept import argmax_tokens as argmax
from ddtree_numba.accept import compact_kv as compact
from ddtree_numba.accept import greedy, sampled, sglang
from ddtree_numba.accept import target_probs as probabilities
from ddtree_numba.accept.accepted import Accepted
from ddtree_numba.attention import flash, merge, mma, three_phase, wgmma_host
from ddtree_numba.attention.verify import verify_attention
from ddtree_numba.compare import Report, compare
from ddtree_numba.device import runtime
from ddtree_numba.device.arrays import HOST
from ddtree_numba.masks import pack_mask, unpack_mask
from ddtree_numba.tree import encodings
from ddtree_numba.tree.build_tree import build_tree
from ddtree_numba.tree.draft_tree import DTYPES, DraftTree
from ddtree_numba.tree.topk_logprobs import topk_logprobs

REFERENCE_FOLDER = Path(__file__).resolve().parent.parent / "refs"

# The simulator's pace in attention: multiply-adds a second, and the seconds that a key and the start of a block take
# beside them.
SIMULATED_RATE = 400_000.0
SIMULATED_KEY = 0.0002
SIMULATED_START = 0.006
# In flash and mma: pairs of a row tile and a key tile; the seconds that one takes, and those that each of D columns
# adds.
SIMULATED_PAIR = 0.03
SIMULATED_COLUMN = 0.0004
# In merge_states: elements of the output a second, and the seconds that a row takes beside them.
SIMULATED_ELEMENTS = 20_000.0
SIMULATED_STATE = 0.002
# In topk_logprobs: logits of a row a second, and the seconds that a row and each of the k results take beside this.
SIMULATED_LOGITS = 8_000.0
SIMULATED_ROW = 0.1
SIMULATED_ROUND = 0.01
# In build_tree: nodes a second. In the encodings: pairs of nodes of a tree.
SIMULATED_NODES = 110.0
SIMULATED_PAIRS = 6_000.0
# In the accept operators: the seconds that a file takes at most, so that all of them take some ten; those of a row of
# argmax_tokens, and the logits a second beside them; those of a row of target_probs; those of a request that is sampled
# in two ways, and the probabilities a second beside them.
SIMULATED_MOST = 1.0
SIMULATED_ARGMAX = 0.05
SIMULATED_ARGMAX_LOGITS = 35_000.0
SIMULATED_PROBS = 0.6
SIMULATED_WALKS = 0.15
SIMULATED_PROBABILITIES = 1_400.0

# verify_attention: the contract on lse, relative to max(1, |lse|).
LSE_BOUND = 1e-5

# merge_states: the bound on out, relative to the largest element of the row's states, and on lse.
MERGE_BOUND = 4 * float(np.finfo(np.float32).eps)

# topk_logprobs: the bound on logprobs, relative to max(1, |lse|, |logit|).
LOGPROB_BOUND = 4 * float(np.finfo(np.float32).eps)

# target_probs: the bound on probabilities, relative to p * (1 + |a|), a being the token's exponent.
PROBS_BOUND = 4 * float(np.finfo(np.float32).eps)

# What a walk through a tree leaves.
ACCEPTED = ("nodes", "num_accepted", "bonus_tokens", "flags", "tokens")

# verify_tree_greedy: what is read, in SGLang's order, and what is written to.
SGLANG_FORMS = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")
SGLANG_RESULTS = ("predicts", "accept_index", "accept_token_num")

# tree_encodings: what engines take.
ENGINE_FORMS = (
    *("positions", "retrieve_indices", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling"),
    *("full_mask", "qlen_only_mask", "tensorrt_mask", "dense_bias"),
)

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """What one variant did on one file.

    ``checked`` says which part was compared; ``reports`` are the comparisons, one for each result, or none where it did
    not come to them; ``seconds`` is the wall time, compilation left out; ``problem`` is empty when the row passed.
    """

    file: str
    operator: str
    variant: str
    checked: str
    reports: tuple[Report, ...]
    seconds: float
    problem: str

    @property
    def passed(self) -> bool:
        return not self.problem

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "file": self.file,
            "operator": self.operator,
            "variant": self.variant,
            "checked": self.checked,
            "passed": self.passed,
            "problem": self.problem,
            "seconds": self.seconds,
            "reports": [report.as_dict() for report in self.reports],
        }


def is_exact(report: Report) -> bool:
    """Whether the results had to be equal: integers, and floats that must not differ at all."""
    return (report.max_abs or 0.0) == 0.0 and report.rel_frobenius is None


def reference_files(operator: str | None = None) -> list[Path]:
    """The reference files of a source checkout, in name order: all, or those for one operator."""
    paths = sorted([*REFERENCE_FOLDER.glob("*.kdtr"), *REFERENCE_FOLDER.glob("captured/*.kdtr")])
    return [path for path in paths if operator is None or _operator_of(kdtr.read(path, verify=False)) == operator]


def _operator_of(tensors: Tensors) -> str:
    return bytes(tensors.get("operator", b"")).decode(errors="replace")


def check_file(path: Path, seconds: float | None, started: Callable[[str], None] = lambda what: None) -> Iterator[Row]:
    """Check every variant on one file.

    Parameters
    ----------
    path : Path
        A KDTR file.
    seconds : float or None
        Time budget of the simulated variants together; at least four blocks or rows, four nodes of each tree, or one
        tree's encodings are checked whatever it is. None means all.
    started : callable
        Told what begins, for a progress bar.

    Yields
    ------
    Row
        One for each variant; a single failed one when the file cannot be read or is for no operator of ours.
    """
    try:
        tensors = kdtr.read(path)
        name = _operator_of(tensors)
        if name not in OPERATORS:
            raise ValueError(f"tensor 'operator' says {name!r}; it must be one of: {', '.join(OPERATORS)}")
        operator = OPERATORS[name]
        missing = [tensor for tensor in operator.needed if tensor not in tensors]
        if missing:
            raise ValueError(f"tensors are missing: {', '.join(missing)}")
    except (OSError, ValueError) as error:  # kdtr's errors are ValueErrors
        reason = str(error)
        yield Row(path.name, "?", "-", "nothing", (), 0.0, reason)
        return
    on_tensor_cores = ("mma", "wgmma")
    variants = [x for x in operator.variants if not x.startswith(on_tensor_cores) or takes(x, tensors)]
    simulated = [variant for variant in variants if runtime.SIMULATOR and not variant.endswith("_numpy")]
    for variant in variants:
        started(f"{path.name} {variant}")
        share = seconds / len(simulated) if seconds is not None and variant in simulated else None
        try:
            checked, reports, elapsed = operator.check(tensors, variant, share)
            problem = "; ".join(str(report) for report in reports if not report.passed)
            yield Row(path.name, name, variant, checked, reports, elapsed, problem)
        except Exception as error:  # whatever went wrong belongs into the table, and the other rows still count
            reason = f"{type(error).__name__}: {error}"
            yield Row(path.name, name, variant, "nothing", (), 0.0, reason)


def takes(variant: str, tensors: Tensors) -> bool:
    """Whether a variant for tensor cores takes the format and widths of a file, and this GPU has what it needs.

    The simulator has what mma needs, and nothing for wgmma.
    """
    q, rank = tensors["q"], int(tensors["kv_lora_rank"])
    if q.dtype.itemsize != 2 or q.ndim != 4 or (rank, q.shape[3]) != (mma.R, mma.D):
        return False
    if variant == "wgmma":
        batch, num_nodes, num_heads, head_dim = q.shape
        longest = int(tensors["cache_seqlens"].max(initial=0))
        return not wgmma_host.takes_sizes(batch, num_nodes, num_heads, rank, head_dim, longest, HOST)
    return variant.endswith("_numpy") or mma.takes_widths(rank, mma.D, HOST)


def _first(name: str, count: int) -> str:
    return f"{name} 0" if count == 1 else f"{name}s 0-{count - 1}"


def _run(
    variant: str, inputs: dict[str, Any], results: Tensors, call: Callable[[dict[str, Any], dict[str, Any]], None]
) -> tuple[Tensors, float]:
    """Let ``call`` write into results where the variant works; the results on the host, and the seconds it took."""
    on_device = not variant.endswith("_numpy")
    arrays: tuple[dict[str, Any], dict[str, Any]] = inputs, results
    if on_device:
        runtime.require_backend()
        arrays = _to_device(inputs), _to_device(results)

    def timed() -> float:
        start = time.perf_counter()
        call(*arrays)
        if on_device:
            cuda.synchronize()
        return time.perf_counter() - start

    elapsed = timed()
    if on_device:
        if not runtime.SIMULATOR:
            arrays = arrays[0], _to_device(results)  # what is updated in place starts anew
            elapsed = timed()  # the first call compiled
        results = {name: array.copy_to_host().view(results[name].dtype) for name, array in arrays[1].items()}
    return results, elapsed


def _to_device(arrays: dict[str, Any]) -> dict[str, Any]:
    """Copies on the GPU; bfloat16, which Numba does not know, as its bits, which our operators take."""

    return {
        name: None if array is None else cuda.to_device(_bits(np.ascontiguousarray(array)))
        for name, array in arrays.items()
    }


def _bits(array: np.ndarray) -> np.ndarray:
    """bfloat16 as its bits, in the same memory; anything else as it is."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _unwritten(like: np.ndarray) -> np.ndarray:
    """An array to write into, of values that no result has: what is never written must show."""
    if like.dtype.kind == "b":
        return ~like
    is_float = like.dtype.kind == "f" or like.dtype.name == "bfloat16"
    return np.full_like(like, np.nan if is_float else np.iinfo(like.dtype).max)


def _exact(name: str, actual: Any, expected: np.ndarray) -> Report:
    """Comparison of results that must be equal, dtype and infinities included."""
    if np.asarray(actual).dtype != expected.dtype:
        return Report(name, passed=False, reason=f"dtype {np.asarray(actual).dtype}, expected {expected.dtype}")
    return compare(actual, expected, name=name, max_abs=0.0)


_Outcome = tuple[str, tuple[Report, ...], float]


def _check_verify_attention(tensors: Tensors, variant: str, seconds: float | None) -> _Outcome:
    """out within the bound of its dtype, which is that of q; lse within LSE_BOUND * max(1, |lse|).

    float32: the bound that docs/numerics.md derives from the size of the logits. float16 and bfloat16: twice the error
    of casting the expected result to that dtype, which is 1.8e-3 for bfloat16. Casting is one rounding to nearest; the
    other of the two is for a variant that rounds its weights to the dtype as well, as tensor cores need. Errors of
    float32 arithmetic vanish beside either.

    wgmma, kernel and mirror, gets paged files in pages of the size that it takes.
    """
    arrays, checked = _select(tensors, variant, seconds)
    if variant.startswith("wgmma") and "block_table" in arrays:
        arrays |= _in_pages(arrays, wgmma_host.KEYS)
        checked += f" in pages of {wgmma_host.KEYS}"
    dtype = arrays["q"].dtype
    module = flash if variant.startswith("flash") else three_phase
    if dtype == np.float32:
        num_keys = int(arrays["cache_seqlens"].max(initial=0)) + arrays["q"].shape[1]
        bound = module.error_bound(float(tensors["logit_magnitude"]), num_keys, arrays["q"].shape[3])
    else:
        exact = arrays["expected_out"]
        casting = compare(exact.astype(dtype), exact, rel_frobenius=1.0)
        bound = 2 * (casting.rel_frobenius_error or 0.0)

    def call(inputs: dict[str, Any], results: dict[str, Any]) -> None:
        verify_attention(
            **inputs,
            sm_scale=float(tensors["sm_scale"]),
            kv_lora_rank=int(tensors["kv_lora_rank"]),
            variant=variant,
            **results,
        )

    names = ("q", "kv_cache", "cache_seqlens", "tree_mask", "block_table")
    unwritten = {
        "out": _unwritten(arrays["expected_out"].astype(dtype)),
        "lse": _unwritten(arrays["expected_lse"]),
    }
    result, elapsed = _run(variant, {name: arrays.get(name) for name in names}, unwritten, call)

    out = compare(result["out"], arrays["expected_out"], name="out", rel_frobenius=bound)
    return checked, (out, _compare_lse(result["lse"], arrays["expected_lse"], LSE_BOUND)), elapsed


def _in_pages(arrays: dict[str, Any], page_size: int) -> Tensors:
    """A paged cache in pages of another size, last page first, with NaN behind prefix and tree; and its table."""
    table, cache, num_nodes = arrays["block_table"], arrays["kv_cache"], arrays["q"].shape[1]
    batch, capacity = len(table), -(-table.shape[1] * cache.shape[1] // page_size) * page_size
    rows = np.full((batch, capacity, cache.shape[2]), np.nan, cache.dtype)
    for b, length in enumerate(arrays["cache_seqlens"]):
        key = np.arange(length + num_nodes)
        rows[b, key] = cache[table[b, key // cache.shape[1]], key % cache.shape[1]]
    pages = rows.reshape(-1, page_size, cache.shape[2])[::-1]
    new_table = np.arange(len(pages), dtype=np.int32)[::-1].reshape(batch, -1)
    return {"kv_cache": np.ascontiguousarray(pages), "block_table": np.ascontiguousarray(new_table)}


def _compare_lse(actual: np.ndarray, expected: np.ndarray, bound: float) -> Report:
    """Comparison of lse relative to max(1, |lse|)."""
    unit = np.where(np.isfinite(expected), np.maximum(1, np.abs(expected)), 1)
    return compare(actual / unit, expected / unit, name="lse", max_abs=bound)


def _select(tensors: Tensors, variant: str, seconds: float | None) -> tuple[dict[str, Any], str]:
    """The part of a file that the time budget allows: all requests, the first nodes, the first and last heads.

    The first n nodes of a tree are a tree, because parents come before children, and their rows are the first n behind
    the prefix. So a part needs no hook in the kernel, and each offset but the last node's is met.
    """
    batch, num_nodes, num_heads, head_dim = tensors["q"].shape
    nodes, heads = num_nodes, list(range(num_heads))
    if seconds is not None:
        num_keys = int(tensors["cache_seqlens"].max(initial=0)) + num_nodes
        if variant in ("flash", "mma"):
            tiles = flash.TILES[0] if variant == "flash" else mma.SMALL
            rows, keys = tiles.rows, tiles.keys
            a_row_tile = -(-num_keys // keys) * (SIMULATED_PAIR + head_dim * SIMULATED_COLUMN)
            blocks = int(seconds / a_row_tile) * rows
        else:
            multiply_adds = num_keys * (head_dim + int(tensors["kv_lora_rank"]))
            blocks = int(seconds / (SIMULATED_START + num_keys * SIMULATED_KEY + multiply_adds / SIMULATED_RATE))
        if blocks < batch * num_nodes * num_heads:
            heads = sorted({0, num_heads - 1})
            nodes = min(num_nodes, max(2, math.ceil(4 / (batch * len(heads))), blocks // (batch * len(heads))))
    arrays = dict(tensors)
    arrays["q"] = tensors["q"][:, :nodes, heads]
    mask = unpack_mask(tensors["tree_mask"], num_nodes)
    arrays["tree_mask"] = pack_mask(mask[:, :nodes, :nodes])
    arrays["expected_out"] = tensors["out"][:, :nodes, heads]
    arrays["expected_lse"] = tensors["lse"][:, :nodes, heads]
    total = batch * num_nodes * num_heads
    if nodes == num_nodes and len(heads) == num_heads:
        return arrays, f"all {total} rows"
    count = batch * nodes * len(heads)
    which = f"{_first('node', nodes)}, head{'s' * (len(heads) > 1)} {' and '.join(map(str, heads))}"
    return arrays, f"{count} of {total} rows: {which}, all requests"


def _check_merge_states(tensors: Tensors, variant: str, seconds: float | None) -> _Outcome:
    """out within MERGE_BOUND * M, M being the largest element of the row's states, and half an eps of a 16-bit dtype
    more; lse within MERGE_BOUND * max(1, |lse|). Beside an empty state, all is exact.

    In units of eps, the spacing of float32 at 1: the gap d between the two lse is rounded by |d| / 2, and exp is good
    to 2, which makes e = exp(-d) wrong by |d| / 2 + 2 of itself. The weights 1 / (1 + e) and e / (1 + e) move apart by
    e / (1 + e)**2 of this, which with |a - b| <= 2 M shifts out by at most 1.1 M. The sum 1 + e, a division, a product
    and the final sum round by 1/2 each, 2 M together, and the stored value by 1/2 M: 3.6 of the 4. For lse, e / (1 + e)
    of e's error is at most 1, log1p(e) <= ln 2 is good to 2 units, 1.4, and the sum and the stored value are rounded by
    1/2 of max(1, |lse|) each: 3.4 of the 4. A 16-bit out is rounded once more, by half an eps of its dtype at most.
    """
    names = ("out_a", "lse_a", "out_b", "lse_b")
    arrays = {name: tensors[name] for name in (*names, "out", "lse")}
    rows = arrays["lse"].size
    checked = f"all {rows} rows"
    if seconds is not None:
        width = arrays["out"].shape[-1]
        count = max(4, int(seconds / (SIMULATED_STATE + width / SIMULATED_ELEMENTS)))
        if count < rows:
            checked = f"{count} of {rows} rows: {_first('row', count)}"
            arrays = {name: array.reshape(rows, *array.shape[arrays["lse"].ndim :]) for name, array in arrays.items()}
            arrays = {name: array[:count] for name, array in arrays.items()}

    def call(inputs: dict[str, Any], results: dict[str, Any]) -> None:
        if variant == "kernel_numpy":
            merge.mirror(*(_bits(x) for x in inputs.values()), *(_bits(x) for x in results.values()))
        else:
            merge.merge_states(**inputs, **results)

    dtype = arrays["out_a"].dtype
    expected = {"out": arrays["out"].astype(dtype), "lse": arrays["lse"]}
    unwritten = {name: _unwritten(array) for name, array in expected.items()}
    result, elapsed = _run(variant, {name: arrays[name] for name in names}, unwritten, call)

    empty = {name: np.isinf(arrays[f"lse_{name}"]) for name in "ab"}
    states = [np.where(empty[name][..., None], 0, arrays[f"out_{name}"].astype(np.float64)) for name in "ab"]
    size = np.max(np.abs(states), axis=(0, -1))
    unit = np.where(size > 0, size, 1)[..., None]
    bound = MERGE_BOUND + (0.0 if dtype == np.float32 else float(ml_dtypes.finfo(dtype).eps) / 2)
    out = compare(result["out"] / unit, arrays["out"] / unit, name="out", max_abs=bound)
    reports = [out, _compare_lse(result["lse"], arrays["lse"], MERGE_BOUND)]
    alone = empty["a"] | empty["b"]
    if alone.any():
        reports += [
            _exact(f"{name} beside an empty state", result[name][alone], expected[name][alone]) for name in expected
        ]
    return checked, tuple(reports), elapsed


def _check_topk_logprobs(tensors: Tensors, variant: str, seconds: float | None) -> _Outcome:
    """Ids must be equal, logprobs within LOGPROB_BOUND * M, where M = max(1, |lse|, |logit|).

    In units of u = eps/2, half the spacing of float32 at 1: m + log(sum) is rounded by u * |lse|, its logarithm by as
    much, logit - lse and the stored value by u * |logprob| each, which is at most 2 u * M. These are 6 of the 8 u * M.
    After n additions in a row the sum of exp(x - m) is wrong by about u * sqrt(n) of itself, its logarithm by as much
    absolutely; x - m and exp add 2 u or 3 u, averaged over the terms. 2 u * M hold this on the files: their long rows,
    in which n may be 260, have an lse of 10 and more, or equal logits, which add up exactly.
    """
    logits, k = tensors["logits"], int(tensors["k"])
    batch, length, vocabulary = logits.shape
    requests, positions = batch, length
    if seconds is not None:
        a_row = SIMULATED_ROW + k * SIMULATED_ROUND + vocabulary / SIMULATED_LOGITS
        rows = max(4, int(seconds / a_row))
        requests = min(batch, max(1, rows // length))
        positions = length if requests > 1 else min(length, rows)
    part = slice(0, requests), slice(0, positions)
    checked = f"all {batch * length} rows"
    if (requests, positions) != (batch, length):
        which = f"{_first('request', requests)}, {_first('position', positions)}"
        checked = f"{requests * positions} of {batch * length} rows: {which}"

    def call(inputs: dict[str, Any], results: dict[str, Any]) -> None:
        topk_logprobs(inputs["logits"], k, variant=variant, out=(results["logprobs"], results["token_ids"]))

    expected = {name: tensors[name][part] for name in ("logprobs", "token_ids")}
    unwritten = {name: _unwritten(array) for name, array in expected.items()}
    result, elapsed = _run(variant, {"logits": logits[part]}, unwritten, call)

    chosen = np.take_along_axis(logits[part].astype(np.float64), np.maximum(expected["token_ids"], 0), axis=2)
    sizes = np.maximum(np.abs(chosen), np.abs(tensors["lse"][part])[..., None])
    unit = np.where(np.isfinite(expected["logprobs"]), np.maximum(1, sizes), 1)
    actual = result["logprobs"] / unit
    logprobs = compare(actual, expected["logprobs"] / unit, name="logprobs", max_abs=LOGPROB_BOUND)
    return checked, (logprobs, _exact("token_ids", result["token_ids"], expected["token_ids"])), elapsed


def _check_build_tree(tensors: Tensors, variant: str, seconds: float | None) -> _Outcome:
    batch, num_nodes = tensors["tokens"].shape
    nodes = num_nodes
    if seconds is not None:
        nodes = min(num_nodes, max(4, int(seconds * SIMULATED_NODES / batch)))
    expected = _first_nodes(tensors, nodes)
    total = batch * num_nodes
    checked = f"all {total} nodes"
    if nodes < num_nodes:
        checked = f"{batch * nodes} of {total} nodes: nodes 0-{nodes - 1} of all requests"

    def call(inputs: dict[str, Any], results: dict[str, Any]) -> None:
        out = DraftTree(**results, max_depth=int(tensors["max_depth"]))
        build_tree(**inputs, tree_budget=nodes - 1, variant=variant, out=out)

    inputs = {name: tensors[name] for name in ("logprobs", "token_ids", "root_tokens")}
    unwritten = {name: _unwritten(array) for name, array in expected.items()}
    result, elapsed = _run(variant, inputs, unwritten, call)
    return checked, tuple(_exact(name, result[name], array) for name, array in expected.items()), elapsed


def _first_nodes(tensors: Tensors, nodes: int) -> Tensors:
    """The first nodes of each tree: what a smaller budget gives, since nodes stand in the order of the search."""
    tree = {name: tensors[name] if name == "num_nodes" else tensors[name][:, :nodes] for name in DTYPES}
    tree["num_nodes"] = np.minimum(tree["num_nodes"], nodes)
    tree["tree_mask"] = tree["tree_mask"][:, :, : -(-nodes // 32)]
    for name in ("first_child", "next_sibling"):
        tree[name] = np.where(tree[name] < nodes, tree[name], np.int32(-1))
    return tree


def _check_tree_encodings(tensors: Tensors, variant: str, seconds: float | None) -> _Outcome:
    """Every conversion of a tree into another form, and back."""
    batch, num_nodes = tensors["parents"].shape
    requests = batch
    if seconds is not None:
        requests = min(batch, max(1, int(seconds * SIMULATED_PAIRS / num_nodes**2)))
    checked = f"all {batch} trees"
    if requests < batch:
        checked = f"{requests} of {batch} trees: {_first('request', requests)}"
    given = _first_requests(tensors, requests)
    depth = int(tensors["max_depth"])
    total = int(given["cache_seqlens"].sum())
    packs_into_integers = "bitpacked_mask" in given

    of_tree = ("first_child", "next_sibling", "depths", "tree_mask", "parents")
    expected = {name: given[name] for name in (*of_tree, *_engine_forms(given))}
    for order in encodings.ORDERS:
        expected |= {name: array for name, array in given.items() if name.startswith(f"{order}.")}
    # The way back from each form.
    for form in ("mask", "sglang", "retrieve_indices"):
        expected[f"parents_from_{form}"] = given["parents"]
    for form in ("full_mask", "qlen_only", "tensorrt", "bias", *["bitpacked"] * packs_into_integers):
        expected[f"tree_mask_from_{form}"] = given["tree_mask"]

    def call(x: dict[str, Any], out: dict[str, Any]) -> None:
        parents, mask, lengths = x["parents"], x["tree_mask"], x["cache_seqlens"]
        encodings.links_from_parents(parents, out=(out["first_child"], out["next_sibling"]))
        encodings.depths_from_parents(parents, out=out["depths"])
        encodings.mask_from_parents(parents, packed=True, out=out["tree_mask"])
        encodings.positions(lengths, x["depths"], out=out["positions"])
        encodings.retrieve_indices(parents, depth, out=out["retrieve_indices"])
        names = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
        encodings.sglang_links(parents, out=tuple(out[name] for name in names))
        encodings.full_mask(mask, lengths, total, out=out["full_mask"])
        encodings.qlen_only_mask(mask, out=out["qlen_only_mask"])
        encodings.tensorrt_mask(mask, out=out["tensorrt_mask"])
        encodings.dense_bias(mask, out=out["dense_bias"])
        encodings.parents_from_links(x["first_child"], x["next_sibling"], out=out["parents"])
        encodings.parents_from_mask(mask, out=out["parents_from_mask"])
        encodings.parents_from_sglang(*(x[name] for name in names[1:]), out=out["parents_from_sglang"])
        paths = x["retrieve_indices"]
        encodings.parents_from_retrieve_indices(paths, num_nodes, out=out["parents_from_retrieve_indices"])
        back: dict[str, Any] = {"packed": True}
        full, flat, packed = x["full_mask"], x["qlen_only_mask"], x.get("bitpacked_mask")
        encodings.tree_mask_from_full_mask(full, lengths, num_nodes, out=out["tree_mask_from_full_mask"], **back)
        encodings.tree_mask_from_qlen_only(flat, num_nodes, out=out["tree_mask_from_qlen_only"], **back)
        encodings.tree_mask_from_tensorrt(x["tensorrt_mask"], out=out["tree_mask_from_tensorrt"], **back)
        encodings.tree_mask_from_bias(x["dense_bias"], out=out["tree_mask_from_bias"], **back)
        if packs_into_integers:
            encodings.bitpacked_mask(mask, out=out["bitpacked_mask"])
            encodings.tree_mask_from_bitpacked(packed, num_nodes, out=out["tree_mask_from_bitpacked"], **back)
        tree = DraftTree(**{name: x[name] for name in DTYPES}, max_depth=depth)
        for order in encodings.ORDERS:
            new = DraftTree(**{name: out[f"{order}.{name}"] for name in DTYPES}, max_depth=depth)
            encodings.relabel(tree, order, out=new, permutation=out[f"{order}.permutation"])

    unwritten = {name: _unwritten(array) for name, array in expected.items()}
    result, elapsed = _run(variant, given, unwritten, call)
    return checked, tuple(_exact(name, result[name], array) for name, array in expected.items()), elapsed


def _engine_forms(tensors: Tensors) -> tuple[str, ...]:
    """The forms of a tree that a file holds; one integer a node is a form only where a tree fits."""
    return (*ENGINE_FORMS, *["bitpacked_mask"] * ("bitpacked_mask" in tensors))


def _first_requests(tensors: Tensors, requests: int) -> Tensors:
    """The first requests of a batch of trees, of flat arrays too."""
    num_nodes = tensors["parents"].shape[1]
    sizes = {
        "full_mask": num_nodes * (int(tensors["cache_seqlens"][:requests].sum()) + requests * num_nodes),
        "qlen_only_mask": requests * num_nodes**2,
        "bitpacked_mask": requests * num_nodes,
    }
    arrays = {name: array for name, array in tensors.items() if array.ndim and name != "operator"}
    return {name: array[: sizes.get(name, requests)] for name, array in arrays.items()}


def _affordable(seconds: float | None, each: float, total: int) -> int:
    """How many of so many pieces of work there is time for; at least four."""
    return total if seconds is None else min(total, max(4, int(min(seconds, SIMULATED_MOST) / each)))


def _spread(count: int, batch: int) -> list[int]:
    """That many requests, one every so often, since each of them is another difficulty."""
    return [n * batch // count for n in range(count)]


def _check_argmax_tokens(tensors: Tensors, variant: str, seconds: float | None) -> _Outcome:
    logits, expected = tensors["logits"], tensors["target_tokens"]
    total = expected.size
    each = SIMULATED_ARGMAX + logits.shape[2] / SIMULATED_ARGMAX_LOGITS
    count = _affordable(seconds, each, total)
    checked = f"all {total} rows"
    if count < total:
        checked = f"{count} of {total} rows: {_first('row', count)}"
        logits, expected = logits.reshape(1, total, -1)[:, :count], expected.reshape(1, total)[:, :count]

    def call(inputs: dict[str, Any], results: dict[str, Any]) -> None:
        if variant == "kernel_numpy":
            argmax.mirror(_bits(inputs["logits"]), _bits(inputs["logits"]), results["target_tokens"])
        else:
            argmax.argmax_tokens(inputs["logits"], out=results["target_tokens"])

    result, elapsed = _run(variant, {"logits": logits}, {"target_tokens": _unwritten(expected)}, call)
    return checked, (_exact("target_tokens", result["target_tokens"], expected),), elapsed


def _walk_arguments(x: dict[str, Any], max_depth: int) -> tuple[tuple[Any, ...], DraftTree]:
    """The tree as a walk's mirror takes it, and as its function does."""
    names = ("tokens", "first_child", "next_sibling", "num_nodes")
    return tuple(x[name] for name in names), DraftTree(**{name: x[name] for name in DTYPES}, max_depth=max_depth)


def _accepted(arrays: dict[str, Any], prefix: str) -> Accepted:
    return Accepted(**{name: arrays[prefix + name] for name in ACCEPTED})


def _check_accept_greedy(tensors: Tensors, variant: str, seconds: float | None) -> _Outcome:
    depth, batch = int(tensors["max_depth"]), len(tensors["num_nodes"])
    stop_tokens = tensors["stop_tokens"]
    expected = {name: tensors[f"accepted.{name}"] for name in ACCEPTED}

    def call(x: dict[str, Any], out: dict[str, Any]) -> None:
        walked, tree = _walk_arguments(x, depth)
        if variant == "kernel_numpy":
            stops = np.broadcast_to(stop_tokens, (batch, stop_tokens.shape[-1]))
            arguments = [*walked, x["target_tokens"], stops, *out.values()]
            greedy.mirror(*arguments)
        else:
            greedy.accept_greedy(tree, x["target_tokens"], stop_tokens=x["stop_tokens"], out=_accepted(out, ""))

    inputs = {name: tensors[name] for name in (*DTYPES, "target_tokens", "stop_tokens")}
    unwritten = {name: _unwritten(array) for name, array in expected.items()}
    result, elapsed = _run(variant, inputs, unwritten, call)
    reports = tuple(_exact(name, result[name], array) for name, array in expected.items())
    return f"all {batch} requests", reports, elapsed


def _check_accept_sampled(tensors: Tensors, variant: str, seconds: float | None) -> _Outcome:
    """Draws from seeds and positions, then from uniforms; integers decide both, so all results must be equal."""
    depth, batch = int(tensors["max_depth"]), len(tensors["num_nodes"])
    stop_tokens = tensors["stop_tokens"]
    each = SIMULATED_WALKS + tensors["target_probs"].shape[2] / SIMULATED_PROBABILITIES
    part = _spread(_affordable(seconds, each, batch), batch)
    given = (*DTYPES, "target_probs", "seeds", "positions", "uniforms")
    inputs = {name: tensors[name][part] for name in given} | {"stop_tokens": stop_tokens}
    expected = {
        f"{kind}.{name}": tensors[f"{kind}.{name}"][part] for kind in ("seeded", "uniform") for name in ACCEPTED
    }
    count = len(part)
    checked = f"all {batch} requests"
    if count < batch:
        checked = f"{count} of {batch} requests: {', '.join(map(str, part))}"

    def call(x: dict[str, Any], out: dict[str, Any]) -> None:
        walked, tree = _walk_arguments(x, depth)
        probs, seeds, positions, uniforms = (x[name] for name in ("target_probs", "seeds", "positions", "uniforms"))
        if variant == "kernel_numpy":
            stops = np.broadcast_to(stop_tokens, (count, stop_tokens.shape[-1]))
            for kind, draws in (("seeded", (seeds, positions, None)), ("uniform", (None, None, uniforms))):
                arguments = [*walked, _bits(probs), *draws, stops, *(out[f"{kind}.{name}"] for name in ACCEPTED)]
                sampled.mirror(*arguments)
        else:
            seeded, uniform = _accepted(out, "seeded."), _accepted(out, "uniform.")
            stop: dict[str, Any] = {"stop_tokens": x["stop_tokens"]}
            sampled.accept_sampled(tree, probs, seeds=seeds, positions=positions, out=seeded, **stop)
            sampled.accept_sampled(tree, probs, uniforms=uniforms, out=uniform, **stop)

    unwritten = {name: _unwritten(array) for name, array in expected.items()}
    result, elapsed = _run(variant, inputs, unwritten, call)
    return checked, tuple(_exact(name, result[name], array) for name, array in expected.items()), elapsed


def _check_target_probs(tensors: Tensors, variant: str, seconds: float | None) -> _Outcome:
    """The same tokens must be kept, with probabilities within PROBS_BOUND * p * (1 + |a|), a = (x - max) / T.

    In units of u = eps/2: x - max, 1/T and their product are rounded by u each, which makes the exponent a wrong by
    3 u * |a| and exp(a) by as much of itself; exp adds 4 u, but no more than u near exp(0) = 1. The sum of the row is
    wrong by the mean of this over its probabilities, in which only the error of 1/T does not average out: u * mean |a|,
    which is 3 u at most on the files. The sum as a float32, its reciprocal, the product with exp(a), and the expected
    value are rounded by u each. These are 8 u where a is 0; elsewhere 11 u + 3 u * |a|, below 8 u * (1 + |a|) from
    |a| = 0.6 on, and exp is not off by more than 2 u before.
    """
    batch, num_nodes = tensors["logits"].shape[:2]
    total = batch * num_nodes
    count = _affordable(seconds, SIMULATED_PROBS, total)
    part = _spread(min(count, batch), batch)
    nodes = count // len(part)
    checked = f"all {total} rows"
    if count < total:
        which = f"{_first('node', nodes)} of requests {', '.join(map(str, part))}"
        checked = f"{nodes * len(part)} of {total} rows: {which}"
    inputs = {"logits": tensors["logits"][part, :nodes]}
    inputs |= {name: tensors[name][part] for name in ("temperature", "top_k", "top_p")}
    expected = tensors["target_probs"][part, :nodes]

    def call(x: dict[str, Any], out: dict[str, Any]) -> None:
        limits = x["temperature"], x["top_k"], x["top_p"]
        if variant == "kernel_numpy":
            logits = _bits(x["logits"])
            probabilities.mirror(logits, logits, *limits, probabilities.LOWEST[logits.dtype.name], out["target_probs"])
        else:
            probabilities.target_probs(x["logits"], *limits, out=out["target_probs"])

    result, elapsed = _run(variant, inputs, {"target_probs": _unwritten(expected)}, call)

    found, kept = result["target_probs"], expected > 0
    logits = np.where(kept, inputs["logits"].astype(np.float64), -np.inf)
    temperature = np.where(inputs["temperature"] > 0, inputs["temperature"], 1).astype(np.float64)[:, None, None]
    below = logits.max(axis=2, keepdims=True, where=kept, initial=-np.inf)
    exponents = np.zeros(logits.shape)
    np.subtract(logits, below, out=exponents, where=kept)
    unit = np.where(kept, expected * (1 + np.abs(exponents / temperature)), 1)
    probs = compare(found / unit, expected / unit, name="target_probs", max_abs=PROBS_BOUND)
    return checked, (probs, _exact("kept", found > 0, kept)), elapsed


def _check_compact_kv(tensors: Tensors, variant: str, seconds: float | None) -> _Outcome:
    """Every byte of the caches. The lengths and `gather_accepted` have kernels, and no mirrors."""
    caches = [name for name in tensors if name.startswith("kv_cache_")]
    batch = len(tensors["cache_seqlens"])
    given = [f"accepted.{name}" for name in ACCEPTED]
    inputs = {name: tensors.get(name) for name in (*given, "x", "block_table")}
    results = {name: np.array(tensors[name]) for name in caches}
    expected = {name: tensors[f"compacted.{name}"] for name in caches}
    if variant != "kernel_numpy":
        results["cache_seqlens"] = np.array(tensors["cache_seqlens"])
        results["gathered"] = _unwritten(tensors["gathered"])
        expected |= {"cache_seqlens": tensors["compacted.cache_seqlens"], "gathered": tensors["gathered"]}

    def call(x: dict[str, Any], out: dict[str, Any]) -> None:
        if variant == "kernel_numpy":
            table = np.arange(batch)[:, None] if x["block_table"] is None else x["block_table"]
            path = tensors["cache_seqlens"], x["accepted.nodes"], x["accepted.num_accepted"]
            for cache in out.values():
                rows = _bits(cache).reshape(*cache.shape[:2], -1)
                compact.mirror(rows, np.zeros(1, np.int64), rows.shape[2], table, *path)
            return
        accepted = _accepted(x, "accepted.")
        layers = [out[name] for name in caches]
        compact.compact_kv(layers, out["cache_seqlens"], accepted, block_table=x["block_table"])
        compact.gather_accepted(x["x"], accepted, out=out["gathered"])

    result, elapsed = _run(variant, inputs, results, call)
    reports = tuple(_exact(name, result[name], array) for name, array in expected.items())
    return f"all {batch} requests", reports, elapsed


def _check_verify_tree_greedy(tensors: Tensors, variant: str, seconds: float | None) -> _Outcome:
    inputs = {name: tensors[name] for name in SGLANG_FORMS}
    results = {name: np.array(tensors[name]) for name in SGLANG_RESULTS}

    def call(x: dict[str, Any], out: dict[str, Any]) -> None:
        if variant == "kernel_numpy":
            sglang.mirror(*x.values(), *out.values())
        else:
            sglang.verify_tree_greedy(**out, **x)

    result, elapsed = _run(variant, inputs, results, call)
    reports = tuple(_exact(name, result[name], tensors[f"accepted.{name}"]) for name in SGLANG_RESULTS)
    return f"all {len(inputs['candidates'])} requests", reports, elapsed


class _Operator(NamedTuple):
    """What a file for it must hold, its variants, and what checks one: of tensors, variant and time budget."""

    needed: tuple[str, ...]
    variants: tuple[str, ...]
    check: Callable[[Tensors, str, float | None], _Outcome]


OPERATORS = {
    # A paged file also has block_table.
    "verify_attention": _Operator(
        (
            *("q", "kv_cache", "cache_seqlens", "tree_mask", "kv_lora_rank", "sm_scale", "logit_magnitude"),
            *("out", "lse"),
        ),
        ("three_phase_numpy", "three_phase", "flash_numpy", "flash", "mma_numpy", "mma", "wgmma_numpy", "wgmma"),
        _check_verify_attention,
    ),
    "merge_states": _Operator(
        ("out_a", "lse_a", "out_b", "lse_b", "out", "lse"),
        ("kernel_numpy", "kernel"),
        _check_merge_states,
    ),
    "topk_logprobs": _Operator(
        ("logits", "k", "logprobs", "token_ids", "lse"),
        ("rounds_numpy", "rounds", "threshold_numpy", "threshold"),
        _check_topk_logprobs,
    ),
    "build_tree": _Operator(
        ("logprobs", "token_ids", "root_tokens", "tree_budget", "max_depth", *DTYPES),
        ("heap_numpy", "heap", "frontier_numpy", "frontier"),
        _check_build_tree,
    ),
    # Trees of up to 32 nodes also have bitpacked_mask.
    "tree_encodings": _Operator(
        (
            *("cache_seqlens", "max_depth", *DTYPES, *ENGINE_FORMS),
            *(f"{order}.{name}" for order in encodings.ORDERS for name in (*DTYPES, "permutation")),
        ),
        ("kernels",),
        _check_tree_encodings,
    ),
    "argmax_tokens": _Operator(
        ("logits", "target_tokens"),
        ("kernel_numpy", "kernel"),
        _check_argmax_tokens,
    ),
    # Links and numbers of nodes of a tree may be wrong here.
    "accept_greedy": _Operator(
        ("max_depth", *DTYPES, "target_tokens", "stop_tokens", *(f"accepted.{name}" for name in ACCEPTED)),
        ("kernel_numpy", "kernel"),
        _check_accept_greedy,
    ),
    "accept_sampled": _Operator(
        (
            *("max_depth", *DTYPES, "target_probs", "seeds", "positions", "uniforms", "stop_tokens"),
            *(f"{kind}.{name}" for kind in ("seeded", "uniform") for name in ACCEPTED),
        ),
        ("kernel_numpy", "kernel"),
        _check_accept_sampled,
    ),
    "target_probs": _Operator(
        ("logits", "temperature", "top_k", "top_p", "target_probs"),
        ("kernel_numpy", "kernel"),
        _check_target_probs,
    ),
    # A paged file also has block_table; each layer is a kv_cache and a compacted one.
    "compact_kv": _Operator(
        (
            *("kv_cache_0", "compacted.kv_cache_0", "cache_seqlens", "compacted.cache_seqlens", "x", "gathered"),
            *(f"accepted.{name}" for name in ACCEPTED),
        ),
        ("kernel_numpy", "kernel"),
        _check_compact_kv,
    ),
    "verify_tree_greedy": _Operator(
        (*SGLANG_FORMS, *SGLANG_RESULTS, *(f"accepted.{name}" for name in SGLANG_RESULTS)),
        ("kernel_numpy", "kernel"),
        _check_verify_tree_greedy,
    ),
}
