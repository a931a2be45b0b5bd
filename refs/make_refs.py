"""Generate the reference files of all operators: ``python refs/make_refs.py [--out DIR]``.

Inputs are the same bytes on every machine and with every NumPy version: raw words of a bit generator, whose stream
NumPy guarantees (NEP 19; distributions are not guaranteed), then integer arithmetic and single, correctly rounded IEEE
operations. So are trees and their encodings. out, logprobs and lse are the oracle's float64 results, rounded to
float32 (but for the lse of topk_logprobs); their last bit may depend on the BLAS or the library of mathematical
functions.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from a plain checkout

from ddtree_numba import kdtr
from refs import oracle, trees

__all__ = [
    "CASES",
    "Case",
    "ENCODING_CASES",
    "EncodingCase",
    "MERGE_CASES",
    "MERGE_ROWS",
    "MergeCase",
    "SPECIAL_ROWS",
    "TOPK_CASES",
    "TREE_CASES",
    "TopkCase",
    "TreeCase",
    "build",
    "build_encodings",
    "build_merge",
    "build_topk",
    "build_trees",
    "main",
]

Tensors = dict[str, npt.NDArray[Any] | np.generic]

KV_LORA_RANK, QK_ROPE_HEAD_DIM = 512, 64  # R, P of the models; some files are narrower
SM_SCALE = 0.14467962580268923  # Kimi K2: 192**-0.5 * (0.1 * ln 64 + 1)**2
DRAFT_POSITIONS, CANDIDATES = 8, 8
POISON_ROWS = 3  # capacity behind a contiguous cache's longest request
SPARE_PAGES = 4  # pages that no table entry names
STALE_ENTRIES = (2147480000, -1)  # behind the live entries of a table row
ROPE_TO_LATENT = 3.0  # kpe is not normalized and is larger than ckv in real caches
MEAN_COLUMNS = 8  # latent columns, evenly spaced, that all keys share a mean in, as real caches do
MEAN_TO_LATENT = 2.0
SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
FLOATS: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Case:
    """One reference file: H, each request's prefix length and tree budget, the logits' target spread, the seed.

    ``head_logits``, if there, has a factor and a shift (nats) for the logits of each head. The last column of all keys
    is then 1, so that what a query has there shifts all its logits alike.
    """

    num_heads: int
    prefixes: tuple[int, ...]
    tree_budgets: tuple[int, ...]  # one below the largest leaves padded nodes
    logit_std: float
    seed: int
    latent_std: float = 1.0
    page_size: int | None = None
    kv_lora_rank: int = KV_LORA_RANK
    qk_rope_head_dim: int = QK_ROPE_HEAD_DIM
    dtype: str = "float32"  # of q and the cache
    head_logits: tuple[tuple[float, float], ...] = ()

    @property
    def name(self) -> str:
        narrow = f"r{self.kv_lora_rank}_" if self.kv_lora_rank != KV_LORA_RANK else ""
        sizes = f"{narrow}h{self.num_heads}_p{max(self.prefixes)}_b{max(self.tree_budgets)}"
        marks = "_wide" * bool(self.head_logits) + f"_{SHORT[self.dtype]}" * (self.dtype != "float32")
        return f"verify_attn_{sizes}{marks}"


NARROW: dict[str, Any] = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
NARROWEST: dict[str, Any] = {"kv_lora_rank": 16, "qk_rope_head_dim": 16}
# An ordinary head; one whose logits reach 9e3 nats on either side of 0; three whose logits lie within some 20 nats of
# each other and far from 0, the last all below -5.9e4.
WIDE = ((1.0, 0.0), (1000.0, 0.0), (1.0, 1e4), (1.0, -1e4), (1.0, -6e4))
CASES = (
    # Next to uniform weights, no prefix: padded nodes see nothing at all.
    Case(num_heads=8, prefixes=(0, 0), tree_budgets=(8, 5), logit_std=0.02, seed=2, latent_std=0.2),
    Case(num_heads=8, prefixes=(1, 0, 1), tree_budgets=(4, 4, 4), logit_std=1.0, seed=1),
    Case(num_heads=8, prefixes=(37, 5), tree_budgets=(8, 6), logit_std=2.0, seed=3),
    Case(num_heads=16, prefixes=(200, 77), tree_budgets=(16, 16), logit_std=1.5, seed=4, page_size=16),
    Case(num_heads=64, prefixes=(128,), tree_budgets=(16,), logit_std=3.0, seed=5),
    Case(num_heads=64, prefixes=(2048,), tree_budgets=(16,), logit_std=4.0, seed=6),
    # Long and odd shapes, narrow rows: what tiles and splits of the keys must get right.
    Case(num_heads=2, prefixes=(4097,), tree_budgets=(8,), logit_std=2.0, seed=51, **NARROW),
    Case(num_heads=1, prefixes=(20,), tree_budgets=(32,), logit_std=1.5, seed=52, **NARROW),
    Case(num_heads=1, prefixes=(40,), tree_budgets=(64,), logit_std=1.5, seed=53, **NARROW),
    Case(num_heads=3, prefixes=(3, 700, 0, 1300), tree_budgets=(6, 4, 6, 5), logit_std=2.0, seed=54, **NARROWEST),
    Case(num_heads=1, prefixes=(0, 5000), tree_budgets=(3, 4), logit_std=2.0, seed=60, page_size=64, **NARROWEST),
    # The rotary part is as wide as the latent one.
    Case(2, prefixes=(30,), tree_budgets=(4,), logit_std=1.5, seed=56, kv_lora_rank=192, qk_rope_head_dim=192),
    Case(num_heads=5, prefixes=(60,), tree_budgets=(4,), logit_std=3.0, seed=57, head_logits=WIDE, **NARROW),
    Case(num_heads=9, prefixes=(150,), tree_budgets=(16,), logit_std=2.0, seed=58, dtype="bfloat16", **NARROW),
)


def build(case: Case) -> Tensors:
    """Make the tensors of one file for verify_attention.

    Parameters
    ----------
    case : Case
        What to make; B = number of prefixes, Q = largest tree budget + 1, D = kv_lora_rank + qk_rope_head_dim.

    Returns
    -------
    dict of str to numpy array or scalar
        operator : uint8 [16], ASCII; q : `case.dtype` [B, Q, H, D]; kv_cache : `case.dtype` [B, S, D], or paged
        [num_pages, page_size, D], NaN wherever no live row stands; cache_seqlens : int32 [B]; parents, depths :
        int32 [B, Q]; num_nodes : int32 [B]; tree_mask : uint32 [B, Q, ceil(Q/32)]; block_table : int32 [B, max_pages],
        paged only; kv_lora_rank : int32; sm_scale, logit_std, logit_max, logit_magnitude : float64; out : float32
        [B, Q, H, R], for 16-bit inputs too; lse : float32 [B, Q, H], in nats.
    """
    bits = np.random.PCG64(case.seed)
    num_requests, num_nodes = len(case.prefixes), max(case.tree_budgets) + 1
    parents = np.full((num_requests, num_nodes), -1, dtype=np.int32)
    depths = np.zeros((num_requests, num_nodes), dtype=np.int32)
    counts = np.zeros(num_requests, dtype=np.int32)
    for b, tree_budget in enumerate(case.tree_budgets):
        tree = trees.best_first_tree(_draft_logprobs(bits), tree_budget)
        n = counts[b] = len(tree["parents"])
        parents[b, :n], depths[b, :n] = tree["parents"], tree["depths"]
        assert _is_real_tree(tree["parents"], tree["depths"]), f"{case.name}: request {b} needs another seed"

    dim, latent = case.kv_lora_rank + case.qk_rope_head_dim, slice(0, case.kv_lora_rank)
    scales = np.full(dim, case.latent_std * ROPE_TO_LATENT, dtype=np.float32)
    scales[latent] = case.latent_std
    means = np.zeros(dim, dtype=np.float32)
    shared = slice(0, case.kv_lora_rank, case.kv_lora_rank // MEAN_COLUMNS)
    means[shared] = MEAN_TO_LATENT * case.latent_std
    means[shared][1::2] *= -1
    # Variance of an unscaled logit over queries of unit variance.
    variance = math.fsum(float(x) ** 2 for x in (*scales, *means))
    q_std = np.float32(case.logit_std / (SM_SCALE * math.sqrt(variance)))

    q = _normal(bits, (num_requests, num_nodes, case.num_heads, dim)) * q_std
    rows = [_normal(bits, (length + num_nodes, dim)) * scales + means for length in case.prefixes]
    for h, (factor, shift) in enumerate(case.head_logits):
        q[:, :, h] *= np.float32(factor)
        q[:, :, h, -1] = np.float32(shift / SM_SCALE)
        for live in rows:
            live[:, -1] = 1
    kv_cache, block_table = _place(bits, rows, case.page_size)

    problem: dict[str, Any] = {
        "q": q.astype(FLOATS[case.dtype]),
        "kv_cache": kv_cache.astype(FLOATS[case.dtype]),
        "cache_seqlens": np.array(case.prefixes, dtype=np.int32),
        "tree_mask": _ancestor_words(parents, counts),
        "sm_scale": np.float64(SM_SCALE),
        "kv_lora_rank": np.int32(case.kv_lora_rank),
    }
    if block_table is not None:
        problem["block_table"] = block_table
    out, lse = oracle.verify_attention(**problem)
    statistics = {name: np.float64(value) for name, value in oracle.logit_statistics(**problem).items()}
    return {
        "operator": np.frombuffer(b"verify_attention", dtype=np.uint8),
        **problem,
        "parents": parents,
        "depths": depths,
        "num_nodes": counts,
        **statistics,
        "out": out.astype(np.float32),
        "lse": lse.astype(np.float32),
    }


@dataclass(frozen=True)
class MergeCase:
    """One file for merge_states: the dtype of out, its shape, the seed. The first rows are those of MERGE_ROWS."""

    dtype: str
    shape: tuple[int, ...]  # [B, Q, H, R]
    seed: int

    @property
    def name(self) -> str:
        return f"merge_states_r{self.shape[-1]}_{SHORT[self.dtype]}"


MERGE_CASES = (
    MergeCase("float32", shape=(2, 5, 3, 32), seed=61),
    MergeCase("bfloat16", shape=(2, 3, 5, 48), seed=62),
    MergeCase("float16", shape=(1, 10, 3, 16), seed=63),
)
INF = math.inf
# lse of the two states in nats, by what a row is for. All are float32 numbers, but for 1e-3. inf: the state is empty.
MERGE_ROWS: dict[str, tuple[float, float]] = {
    "a is empty": (-INF, 1.5),
    "b is empty": (-0.75, -INF),
    "a is empty, +inf": (INF, -2.25),
    "b is empty, +inf": (3.0, INF),
    "both are empty": (-INF, -INF),
    "both are empty, +inf": (INF, INF),
    "both are empty, each by its sign": (INF, -INF),
    "b is empty, a far below": (-1e5, -INF),
    "equal": (2.5, 2.5),
    "equal, far above": (1e5, 1e5),
    "equal, far below": (-1e5, -1e5),
    "1e-3 apart": (0.0, 1e-3),
    "1 apart": (4.0, 3.0),
    "1 apart, far above": (1e5, 1e5 + 1),
    "1 apart, far below": (-1e5, -1e5 - 1),
    "100 apart": (-20.0, 80.0),
    "100 apart, the other way": (80.0, -20.0),
    "1e4 apart": (-3.0, 9997.0),
    "1e4 apart, the other way": (1e4, 0.0),
    "2e5 apart": (-1e5, 1e5),
}


def build_merge(case: MergeCase) -> Tensors:
    """Make the tensors of one file for merge_states.

    Parameters
    ----------
    case : MergeCase
        What to make. Rows behind those of `MERGE_ROWS` are ordinary ones: lse of standard deviation 3.

    Returns
    -------
    dict of str to numpy array or scalar
        operator : uint8 [12], ASCII; out_a, out_b : `case.dtype` [B, Q, H, R], NaN where the state is empty; lse_a,
        lse_b : float32 [B, Q, H], in nats; out : float32 [B, Q, H, R], for 16-bit inputs too; lse : float32 [B, Q, H].
    """
    bits = np.random.PCG64(case.seed)
    states: dict[str, npt.NDArray[Any]] = {}
    for which, name in enumerate("ab"):
        out, lse = _normal(bits, case.shape), _normal(bits, case.shape[:-1]) * np.float32(3)
        special = [pair[which] for pair in MERGE_ROWS.values()]
        lse.reshape(-1)[: len(special)] = special
        out[np.isinf(lse)] = np.nan
        states |= {f"out_{name}": out.astype(FLOATS[case.dtype]), f"lse_{name}": lse}
    merged, lse = oracle.merge_states(**states)
    return {
        "operator": np.frombuffer(b"merge_states", dtype=np.uint8),
        **states,
        "out": merged.astype(np.float32),
        "lse": lse.astype(np.float32),
    }


def _put(where: Any, value: float) -> Callable[[npt.NDArray[np.float32], int], None]:
    def put(row: npt.NDArray[np.float32], k: int) -> None:
        row[where] = value

    return put


def _leave_few(row: npt.NDArray[np.float32], k: int) -> None:
    keep = max(1, k - 3)
    row[: len(row) // 2] = row[len(row) // 2 + keep :] = -np.inf


def _shift(by: float) -> Callable[[npt.NDArray[np.float32], int], None]:
    def shift(row: npt.NDArray[np.float32], k: int) -> None:
        row += np.float32(by)

    return shift


def _signed_zeros(row: npt.NDArray[np.float32], k: int) -> None:
    np.negative(np.abs(row), out=row)
    row[1::5], row[3::5] = -0.0, 0.0


def _sort(row: npt.NDArray[np.float32], k: int) -> None:
    row.sort()


def _round(row: npt.NDArray[np.float32], k: int) -> None:
    np.rint(row, out=row)


# What a row is changed to, in the order of the rows of most files. Two refused rows are never neighbours.
SPECIAL_ROWS: dict[str, Callable[[npt.NDArray[np.float32], int], None]] = {
    "all equal": _put(slice(None), -2.5),
    "a NaN": _put(19, np.nan),
    "the maximum three times": _put([5, 16, 20], 50.0),
    "nothing but -inf": _put(slice(None), -np.inf),
    "some -inf": _put(slice(None, None, 20), -np.inf),
    "a +inf": _put(20, np.inf),
    "few finite ones": _leave_few,
    "large": _shift(1000.0),
    "a NaN in front": _put(0, np.nan),
    "very negative": _shift(-1000.0),
    "one far above the others": _put(20, 200.0),
    "zeros of both signs": _signed_zeros,
    "rising": _sort,
    "whole numbers": _round,
}


@dataclass(frozen=True)
class TopkCase:
    """One file for topk_logprobs: V, k, the dtype, B and L, the seed; what the first rows are changed to."""

    vocabulary: int
    k: int
    dtype: str
    batch: int
    draft_positions: int
    seed: int
    special: tuple[str, ...] = ()  # names from SPECIAL_ROWS

    @property
    def name(self) -> str:
        return f"topk_logprobs_v{self.vocabulary}_k{self.k}_{SHORT[self.dtype]}"


EVERY = tuple(SPECIAL_ROWS)
TOPK_CASES = (
    TopkCase(4099, k=8, dtype="float32", batch=2, draft_positions=3, seed=11, special=("all equal", "rising")),
    TopkCase(1031, k=64, dtype="bfloat16", batch=2, draft_positions=1, seed=12),
    TopkCase(257, k=16, dtype="float16", batch=2, draft_positions=7, seed=13, special=EVERY),
    TopkCase(300, k=1, dtype="float32", batch=2, draft_positions=7, seed=14, special=EVERY),
    TopkCase(21, k=21, dtype="bfloat16", batch=2, draft_positions=7, seed=15, special=EVERY),
)
LOGIT_STD = 3.0


def build_topk(case: TopkCase) -> Tensors:
    """Make the tensors of one file for topk_logprobs.

    Parameters
    ----------
    case : TopkCase
        What to make.

    Returns
    -------
    dict of str to numpy array or scalar
        operator : uint8 [13], ASCII; logits : `case.dtype` [B, L, V], in nats; k : int32; logprobs : float32
        [B, L, k]; token_ids : int32 [B, L, k]; lse : float64 [B, L], the exact log-sum-exp, not finite where the row
        is refused.
    """
    bits = np.random.PCG64(case.seed)
    rows = _normal(bits, (case.batch * case.draft_positions, case.vocabulary)) * np.float32(LOGIT_STD)
    for row, name in zip(rows, case.special, strict=False):
        SPECIAL_ROWS[name](row, case.k)
    logits = rows.reshape(case.batch, case.draft_positions, case.vocabulary).astype(FLOATS[case.dtype])
    logprobs, token_ids, lse = oracle.topk_logprobs(logits, case.k)
    return {
        "operator": np.frombuffer(b"topk_logprobs", dtype=np.uint8),
        "logits": logits,
        "k": np.int32(case.k),
        "logprobs": logprobs.astype(np.float32),
        "token_ids": token_ids,
        "lse": lse,
    }


@dataclass(frozen=True)
class TreeCase:
    """One file for build_tree: how its log-probs are drawn, L, K, the tree budget, B, the seed."""

    kind: str
    draft_positions: int
    candidates: int
    tree_budget: int
    batch: int
    seed: int

    @property
    def name(self) -> str:
        return f"build_tree_{self.kind}_l{self.draft_positions}_k{self.candidates}_b{self.tree_budget}"


TREE_CASES = (
    TreeCase("steep", draft_positions=8, candidates=8, tree_budget=16, batch=3, seed=21),
    TreeCase("steep", draft_positions=3, candidates=3, tree_budget=64, batch=2, seed=22),  # 39 prefixes at most
    TreeCase("steep", draft_positions=12, candidates=1, tree_budget=20, batch=2, seed=23),  # a chain
    TreeCase("steep", draft_positions=4, candidates=4, tree_budget=0, batch=2, seed=24),  # the root alone
    TreeCase("flat", draft_positions=1, candidates=40, tree_budget=40, batch=2, seed=25),  # a star
    TreeCase("flat", draft_positions=15, candidates=64, tree_budget=64, batch=2, seed=26),
    TreeCase("flat", draft_positions=16, candidates=32, tree_budget=255, batch=2, seed=27),
    TreeCase("flat", draft_positions=12, candidates=20, tree_budget=1100, batch=1, seed=32),  # more than 32 * 32 nodes
    TreeCase("bfloat16", draft_positions=4, candidates=8, tree_budget=31, batch=3, seed=28),
    TreeCase("wide", draft_positions=5, candidates=6, tree_budget=100, batch=3, seed=29),
    TreeCase("equal", draft_positions=3, candidates=5, tree_budget=100, batch=2, seed=30),
    TreeCase("ended", draft_positions=5, candidates=6, tree_budget=32, batch=8, seed=31),
)

# Request, position, candidate, value: where a row of kind "ended" ends. What follows is a better candidate than all.
ENDS = (
    (0, 2, 3, -np.inf),
    (1, 0, 2, np.nan),
    (2, 1, 4, np.inf),
    (3, 0, 0, -np.inf),  # the root alone
    (4, 3, 0, np.nan),  # depth 3
    (5, 0, 1, np.inf),
    (5, 1, 1, -np.inf),
    (5, 2, 1, np.nan),  # a chain to depth 3, then full rows
    (6, 1, 0, np.inf),  # depth 1
)


def build_trees(case: TreeCase) -> Tensors:
    """Make the tensors of one file for build_tree.

    Parameters
    ----------
    case : TreeCase
        What to make.

    Returns
    -------
    dict of str to numpy array or scalar
        operator : uint8 [10], ASCII; logprobs : float32 [B, L, K], in nats; token_ids : int32 [B, L, K]; root_tokens :
        int32 [B]; tree_budget : int32; then the tree, as from `refs.trees.assemble`.
    """
    bits = np.random.PCG64(case.seed)
    shape = (case.batch, case.draft_positions, case.candidates)
    logprobs = _LOGPROBS[case.kind](bits, shape)
    words = bits.random_raw(math.prod(shape)).reshape(shape)
    # Distinct in a row: the order of random words, in steps that the offset does not reach.
    order, offset = np.argsort(words, axis=2, kind="stable"), (words % np.uint64(997)).astype(np.int64)
    token_ids = (997 * order + offset).astype(np.int32)
    root_tokens = (bits.random_raw(case.batch) >> np.uint64(47)).astype(np.int32)
    token_ids[0, 0, 0] = root_tokens[-1] = 0  # an ordinary token
    return {
        "operator": np.frombuffer(b"build_tree", dtype=np.uint8),
        "logprobs": logprobs,
        "token_ids": token_ids,
        "root_tokens": root_tokens,
        "tree_budget": np.int32(case.tree_budget),
        **trees.draft_tree(logprobs, token_ids, root_tokens, case.tree_budget),
    }


def _steep(bits: np.random.PCG64, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """1 to 2 nats from one candidate to the next, in multiples of 2**-8."""
    drops = 256 + (bits.random_raw(math.prod(shape)) >> np.uint64(56)).astype(np.int32).reshape(shape)
    drops[:, :, 0] -= 192
    return (-np.cumsum(drops, axis=2)).astype(np.float32) * np.float32(2**-8)


def _flat(bits: np.random.PCG64, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """0 to 0.12 nats from one candidate to the next, in multiples of 2**-8."""
    drops = (bits.random_raw(math.prod(shape)) >> np.uint64(59)).astype(np.int32).reshape(shape)
    drops[:, :, 0] += 16
    return (-np.cumsum(drops, axis=2)).astype(np.float32) * np.float32(2**-8)


def _bfloat16(bits: np.random.PCG64, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Rounded to bfloat16, as a draft head has them: neighbours tie, and so do sums of different paths."""
    return (_flat(bits, shape) * np.float32(0.75)).astype(ml_dtypes.bfloat16).astype(np.float32)


def _wide(bits: np.random.PCG64, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Up to 2 nats, up to 2**-36 at every other position: float64 rounds sums of both, so the order of adding shows."""
    words = bits.random_raw(math.prod(shape)).reshape(shape)
    values = (1 + (words >> np.uint64(41))).astype(np.float32) * np.float32(2**-22)
    values[:, ::2] *= np.float32(2**-37)
    return -np.sort(values, axis=2)


def _equal(bits: np.random.PCG64, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Half a nat everywhere in the first request, 0 in the others: ranks alone decide."""
    del bits
    logprobs = np.zeros(shape, dtype=np.float32)
    logprobs[0] = -0.5
    return logprobs


def _ended(bits: np.random.PCG64, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Like "steep", with rows that end early; a better candidate behind an end would show."""
    logprobs = _steep(bits, shape)
    for request, position, candidate, value in ENDS:
        logprobs[request, position, candidate] = value
        logprobs[request, position, candidate + 1 :] = -(2.0**-8)
    return logprobs


_LOGPROBS: dict[str, Callable[[np.random.PCG64, tuple[int, ...]], npt.NDArray[np.float32]]] = {
    "steep": _steep,
    "flat": _flat,
    "bfloat16": _bfloat16,
    "wide": _wide,
    "equal": _equal,
    "ended": _ended,
}


@dataclass(frozen=True)
class EncodingCase:
    """One file for tree_encodings: Q, the number of nodes of each best-first tree of the batch, the seed."""

    num_nodes: int
    tree_sizes: tuple[int, ...]
    seed: int

    @property
    def name(self) -> str:
        return f"tree_encodings_q{self.num_nodes}"


ENCODING_CASES = (
    # A Q for each width of SGLang's bit-packed mask, and one beyond; sizes around the borders of words.
    EncodingCase(num_nodes=8, tree_sizes=(8, 7, 1), seed=41),
    EncodingCase(num_nodes=16, tree_sizes=(9, 16), seed=42),
    EncodingCase(num_nodes=32, tree_sizes=(31, 32, 17), seed=43),
    EncodingCase(num_nodes=65, tree_sizes=(31, 32, 33, 65, 64), seed=44),
)


def build_encodings(case: EncodingCase) -> Tensors:
    """Make the tensors of one file for tree_encodings.

    Parameters
    ----------
    case : EncodingCase
        What to make. Behind its best-first trees come a chain, a star, and a tree whose nodes hang on random earlier
        ones, all of Q nodes.

    Returns
    -------
    dict of str to numpy array or scalar
        operator : uint8 [14], ASCII; cache_seqlens : int32 [B]; the trees, as from `refs.trees.assemble`; their forms,
        as from `refs.trees.encodings`; each array of the trees in the two other orders, as from `refs.trees.relabel`,
        behind ``breadth_first.`` and ``depth_first.``.
    """
    bits = np.random.PCG64(case.seed)
    last = case.num_nodes - 1
    found = [trees.best_first_tree(_flat(bits, (1, 8, 8))[0], size - 1)["parents"].tolist() for size in case.tree_sizes]
    found.append([-1, *range(last)])
    found.append([-1] + [0] * last)
    found.append([-1, *(int(word % np.uint64(i + 1)) for i, word in enumerate(bits.random_raw(last)))])
    tokens = [(bits.random_raw(len(parents)) >> np.uint64(47)).astype(np.int64).tolist() for parents in found]
    scores = [[-0.25 * node for node in range(len(parents))] for parents in found]
    tree = trees.assemble(found, tokens, scores, num_nodes=case.num_nodes, max_depth=last)
    cache_seqlens = (bits.random_raw(len(found)) >> np.uint64(59)).astype(np.int32)
    cache_seqlens[-1] = 0
    return {
        "operator": np.frombuffer(b"tree_encodings", dtype=np.uint8),
        "cache_seqlens": cache_seqlens,
        **tree,
        **trees.encodings(tree["parents"], cache_seqlens, last),
        **{
            f"{order}.{name}": array
            for order in ("breadth_first", "depth_first")
            for name, array in trees.relabel(tree, order).items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files of all cases."""
    parser = argparse.ArgumentParser(description="Generate the reference files of all operators.")
    beside = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=beside, metavar="DIR", help="folder; default: beside this script")
    folder: Path = parser.parse_args(arguments).out
    folder.mkdir(parents=True, exist_ok=True)
    makers: list[tuple[str, Callable[[], Tensors]]] = [
        *((case.name, partial(build, case)) for case in CASES),
        *((case.name, partial(build_merge, case)) for case in MERGE_CASES),
        *((case.name, partial(build_topk, case)) for case in TOPK_CASES),
        *((case.name, partial(build_trees, case)) for case in TREE_CASES),
        *((case.name, partial(build_encodings, case)) for case in ENCODING_CASES),
    ]
    for name, make in track(makers, description="Reference files"):
        kdtr.write(folder / f"{name}.kdtr", make())


def _normal(bits: np.random.PCG64, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Irwin-Hall: the sum of twelve 16-bit integers, centred; its standard deviation is 2**16. Exact in float32."""
    # A word is four integers; the byte order is pinned, since the order of the four depends on it.
    words = bits.random_raw(3 * math.prod(shape)).astype("<u8")
    sums = words.view("<u2").reshape(-1, 12).sum(axis=1, dtype=np.int32) - 6 * 65535
    return (sums.astype(np.float32) * np.float32(2**-16)).reshape(shape)


def _draft_logprobs(bits: np.random.PCG64) -> npt.NDArray[np.float32]:
    """Falling log-probs in multiples of 2**-8; later positions are less certain. A row's probabilities sum to < 1."""
    words = bits.random_raw(DRAFT_POSITIONS * CANDIDATES).reshape(DRAFT_POSITIONS, CANDIDATES)
    drops = 282 + (words >> np.uint64(56)).astype(np.int32)  # 1.1 to 2.1 nats from one candidate to the next
    drops[:, 0] = 104 + (words[:, 0] >> np.uint64(58)).astype(np.int32) + 24 * np.arange(DRAFT_POSITIONS)
    return (-np.cumsum(drops, axis=1)).astype(np.float32) * np.float32(2**-8)


def _is_real_tree(parents: npt.NDArray[np.int32], depths: npt.NDArray[np.int32]) -> bool:
    """Neither a chain nor a star: it branches, at two nodes if there is room, and goes deep."""
    branching = int((np.bincount(parents[1:]) >= 2).sum())
    wanted_branching, wanted_depth = (1, 2) if len(parents) <= 7 else (2, 3)
    return branching >= wanted_branching and wanted_depth <= depths.max() <= DRAFT_POSITIONS


def _ancestor_words(parents: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
    """Pack "node i sees itself and its ancestors"; a padded node's row is all false."""
    num_requests, num_nodes = parents.shape
    words = np.zeros((num_requests, num_nodes, -(-num_nodes // 32)), dtype=np.uint32)
    for b in range(num_requests):
        for i in range(counts[b]):
            j = i
            while j >= 0:
                words[b, i, j // 32] |= np.uint32(1 << j % 32)
                j = int(parents[b, j])
    return words


def _place(
    bits: np.random.PCG64, rows: list[npt.NDArray[np.float32]], page_size: int | None
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32] | None]:
    """Lay live rows into a contiguous or a paged cache whose every other row is NaN."""
    dim, longest = rows[0].shape[1], max(map(len, rows))
    if page_size is None:
        kv_cache = np.full((len(rows), longest + POISON_ROWS, dim), np.nan, dtype=np.float32)
        for b, live in enumerate(rows):
            kv_cache[b, : len(live)] = live
        return kv_cache, None
    used = [-(-len(live) // page_size) for live in rows]
    num_pages = sum(used) + SPARE_PAGES
    shuffled = np.argsort(bits.random_raw(num_pages), kind="stable").astype(np.int32)
    kv_cache = np.full((num_pages, page_size, dim), np.nan, dtype=np.float32)
    block_table = np.resize(np.array(STALE_ENTRIES, dtype=np.int32), (len(rows), max(used) + len(STALE_ENTRIES)))
    for b, live in enumerate(rows):
        pages, shuffled = shuffled[: used[b]], shuffled[used[b] :]
        block_table[b, : used[b]] = pages
        for t, row in enumerate(live):
            kv_cache[pages[t // page_size], t % page_size] = row
    return kv_cache, block_table


if __name__ == "__main__":
    main()
