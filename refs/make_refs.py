"""Generate the reference files of all operators: ``python refs/make_refs.py [--out DIR]``.

Inputs are the same bytes on every machine and with every NumPy version: raw words of a bit generator, whose stream
NumPy guarantees (NEP 19; distributions are not guaranteed), then integer arithmetic and single, correctly rounded IEEE
operations. So are trees, their encodings, and what is accepted of them. out, logprobs, lse and the results of
target_probs are the oracle's float64 results, rounded to float32 (but for the lse of topk_logprobs); their last bit may
depend on the BLAS or the library of mathematical functions.
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
from refs import accept, oracle, trees

__all__ = [
    "ARGMAX_CASES",
    "ARGMAX_ROWS",
    "ArgmaxCase",
    "CASES",
    "COMPACT_CASES",
    "Case",
    "CompactCase",
    "ENCODING_CASES",
    "EncodingCase",
    "GREEDY_CASES",
    "GreedyCase",
    "LAW_ROWS",
    "MERGE_CASES",
    "MERGE_ROWS",
    "MergeCase",
    "PROBS_CASES",
    "ProbsCase",
    "SAMPLED_CASES",
    "SGLANG_CASES",
    "SPECIAL_ROWS",
    "SampledCase",
    "SglangCase",
    "TOPK_CASES",
    "TREE_CASES",
    "TopkCase",
    "TreeCase",
    "WALKS",
    "Walk",
    "build",
    "build_argmax",
    "build_compact",
    "build_encodings",
    "build_greedy",
    "build_merge",
    "build_probs",
    "build_sampled",
    "build_sglang",
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
    # What tensor cores take: 16-bit formats at the widths of the models.
    Case(num_heads=4, prefixes=(40, 9), tree_budgets=(8, 6), logit_std=2.0, seed=64, page_size=16, dtype="bfloat16"),
    Case(num_heads=5, prefixes=(20,), tree_budgets=(6,), logit_std=3.0, seed=65, dtype="float16"),
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


@dataclass(frozen=True)
class ArgmaxCase:
    """One file for argmax_tokens: V, the dtype, B and Q, the seed; what the first rows are changed to."""

    vocabulary: int
    dtype: str
    batch: int
    num_nodes: int
    seed: int
    special: tuple[str, ...]  # names from ARGMAX_ROWS

    @property
    def name(self) -> str:
        return f"argmax_tokens_v{self.vocabulary}_{SHORT[self.dtype]}"


def _nan_among_nothing(row: npt.NDArray[np.float32], k: int) -> None:
    row[:], row[19] = -np.inf, np.nan


# What a row is changed to, in the order of the rows of most files. Two refused rows are never neighbours.
ARGMAX_ROWS: dict[str, Callable[[npt.NDArray[np.float32], int], None]] = {
    "the maximum at the end, three times": _put(slice(-3, None), 50.0),
    "a NaN behind the maximum": lambda row, k: row.__setitem__([-2, -1], [50.0, np.nan]),
    "the maximum at the front": _put(0, 50.0),
    "a NaN in front": _put(0, np.nan),
    "a +inf, twice": _put([5, 16], np.inf),
    "a NaN among -inf": _nan_among_nothing,
    "-inf but for the last": _put(slice(None, -1), -np.inf),
    **{
        name: SPECIAL_ROWS[name]
        for name in (
            *("all equal", "the maximum three times", "nothing but -inf", "some -inf", "zeros of both signs"),
            *("rising", "whole numbers"),
        )
    },
}
EVERY_ARGMAX = tuple(ARGMAX_ROWS)
ARGMAX_CASES = (
    ArgmaxCase(8193, "float32", batch=1, num_nodes=2, seed=71, special=EVERY_ARGMAX[:2]),
    ArgmaxCase(1031, "bfloat16", batch=2, num_nodes=4, seed=72, special=EVERY_ARGMAX[:3]),
    ArgmaxCase(257, "float16", batch=2, num_nodes=8, seed=73, special=EVERY_ARGMAX),
    ArgmaxCase(300, "bfloat16", batch=2, num_nodes=8, seed=74, special=EVERY_ARGMAX),
    ArgmaxCase(61, "float32", batch=2, num_nodes=8, seed=75, special=EVERY_ARGMAX),
    ArgmaxCase(1, "float32", batch=1, num_nodes=4, seed=76, special=("a NaN in front", "nothing but -inf")),
)


def build_argmax(case: ArgmaxCase) -> Tensors:
    """Make the tensors of one file for argmax_tokens.

    Parameters
    ----------
    case : ArgmaxCase
        What to make.

    Returns
    -------
    dict of str to numpy array
        operator : uint8 [13], ASCII; logits : `case.dtype` [B, Q, V], in nats; target_tokens : int32 [B, Q].
    """
    bits = np.random.PCG64(case.seed)
    rows = _normal(bits, (case.batch * case.num_nodes, case.vocabulary)) * np.float32(LOGIT_STD)
    for row, name in zip(rows, case.special, strict=False):
        ARGMAX_ROWS[name](row, 1)
    logits = rows.reshape(case.batch, case.num_nodes, case.vocabulary).astype(FLOATS[case.dtype])
    return {
        "operator": np.frombuffer(b"argmax_tokens", dtype=np.uint8),
        "logits": logits,
        "target_tokens": accept.argmax_tokens(logits),
    }


@dataclass(frozen=True)
class Walk:
    """One request: a tree, the target's token behind each node, and what is wrong with either."""

    parents: tuple[int, ...] = (-1,)
    tokens: tuple[int, ...] = (7,)
    targets: tuple[int, ...] = (5,)
    stops: tuple[int, ...] = ()
    links: tuple[tuple[str, int, int], ...] = ()  # array, node, and the link that stands there instead
    num_nodes: int | None = None  # in place of the true number


#       0
#     1   2        and their tokens    7
#    3 4   5                         10 11
#    6      8                     12 13   14
#   7 9                           15       17
#                                16 18
_SMALL: dict[str, Any] = {
    "parents": (-1, 0, 0, 1, 1, 2, 3, 6, 5, 6),
    "tokens": (7, 10, 11, 12, 13, 14, 15, 16, 17, 18),
}
_TO_A_LEAF = (10, 12, 0, 15, 0, 0, 18, 0, 0, 99)  # nodes 0, 1, 3, 6, 9
_CHAIN = {"parents": (-1, *range(39)), "tokens": tuple(range(100, 140))}
_ALONG = (*range(101, 140), 77)  # the target's tokens along the chain


def _instead(values: tuple[int, ...], node: int, value: int) -> tuple[int, ...]:
    return (*values[:node], value, *values[node + 1 :])


# By what a request is for. 31 stands behind the nodes of a chain of 24 in a batch with Q = 24.
WALKS: dict[str, Walk] = {
    "to a leaf": Walk(**_SMALL, targets=_TO_A_LEAF),
    "no node": Walk(num_nodes=0),
    "the root alone": Walk(),
    "no child": Walk(**_SMALL, targets=_instead(_TO_A_LEAF, 1, 14)),
    "nothing at the root": Walk(**_SMALL, targets=_instead(_TO_A_LEAF, 0, 3)),
    "the second child": Walk(**_SMALL, targets=(11, 0, 14, 0, 0, 17, 0, 0, 11, 0)),
    # Of the children 1, 2 and 3 of the root, 1 and 3 have the same token; only below 3 the walk could go on.
    "equal siblings": Walk((-1, 0, 0, 0, 1, 3, 5), (1, 4, 9, 4, 5, 6, 8), (4, 6, 6, 6, 6, 8, 8)),
    "equal siblings in a row": Walk((-1, 0, 1, 1, 1, 2), (1, 3, 2, 2, 2, 9), (3, 2, 9, 8, 8, 6)),
    "token 0": Walk((-1, 0, 0, 2, 3), (0, 3, 0, 0, 6), (0, 0, 0, 0, 0)),
    "a stop token as a node": Walk(**_SMALL, targets=_TO_A_LEAF, stops=(12, 15)),
    "a stop token as the last node": Walk(**_SMALL, targets=_TO_A_LEAF, stops=(18,)),
    "a stop token as the bonus": Walk(**_SMALL, targets=_TO_A_LEAF, stops=(99,)),
    "a stop token off the path": Walk(**_SMALL, targets=_TO_A_LEAF, stops=(13, 7)),
    "token 0 stops": Walk((-1, 0, 0, 2, 3), (0, 3, 0, 0, 6), (0, 0, 0, 0, 0), stops=(0,)),
    "no target at the root": Walk(**_SMALL, targets=_instead(_TO_A_LEAF, 0, -1)),
    "no target at a node": Walk(**_SMALL, targets=_instead(_TO_A_LEAF, 3, -1)),
    "no target at the last node": Walk(**_SMALL, targets=_instead(_TO_A_LEAF, 9, -(2**31))),
    "no target off the path": Walk(**_SMALL, targets=_instead(_TO_A_LEAF, 4, -1)),
    "a link to itself": Walk(**_SMALL, targets=_instead(_TO_A_LEAF, 0, 11), links=(("next_sibling", 1, 1),)),
    "a link back": Walk(**_SMALL, targets=_TO_A_LEAF, links=(("first_child", 3, 1),)),
    "a link behind the last node": Walk(**_SMALL, targets=_TO_A_LEAF, links=(("first_child", 6, 10),)),
    "a link behind all": Walk(**_SMALL, targets=_TO_A_LEAF, links=(("next_sibling", 7, 2**31 - 1),)),
    "a negative link": Walk(**_SMALL, targets=_TO_A_LEAF, links=(("first_child", 1, -2),)),
    "a broken link that is not met": Walk(**_SMALL, targets=_TO_A_LEAF, links=(("next_sibling", 1, 0),)),
    "a stop token and a broken link": Walk(**_SMALL, targets=_TO_A_LEAF, stops=(15,), links=(("first_child", 3, -9),)),
    "a negative number of nodes": Walk(**_SMALL, targets=_TO_A_LEAF, num_nodes=-1),
    "more nodes than there is room for": Walk(
        (-1, *range(23)), tuple(range(30, 54)), (*range(31, 54), 3), num_nodes=99
    ),
    "fewer nodes than have links": Walk(**_SMALL, targets=_TO_A_LEAF, num_nodes=6),
    # Files of int64 targets.
    "a long chain": Walk(**_CHAIN, targets=_ALONG),
    "a chain, left at node 33": Walk(**_CHAIN, targets=_instead(_ALONG, 33, 9)),
    "a chain, stopped behind node 34": Walk(**_CHAIN, targets=_instead(_ALONG, 34, 555)),
    "the largest token": Walk(**_CHAIN, targets=_instead(_ALONG, 5, 2**31 - 1)),
    "above the largest token": Walk(**_CHAIN, targets=_instead(_ALONG, 6, 2**31)),
    "a token of 41 bits": Walk(**_CHAIN, targets=_instead(_ALONG, 7, 2**40 + 108)),
    "a token of -2**40": Walk(**_CHAIN, targets=_instead(_ALONG, 8, -(2**40) + 109)),
}
EVERY_WALK = tuple(WALKS)
STOP_COLUMNS = 2
# Of an int64 file, for all requests. The low half of the second one is a token on every path of a chain.
STOP_TOKENS = (555, 2**32 + 101, -1)


@dataclass(frozen=True)
class GreedyCase:
    """One file for accept_greedy: its requests, Q, max_depth, the targets' dtype, and random trees behind them."""

    walks: tuple[str, ...]  # names from WALKS
    num_nodes: int
    max_depth: int
    dtype: str
    random_trees: int
    seed: int

    @property
    def name(self) -> str:
        return f"accept_greedy_q{self.num_nodes}_{self.dtype}"


GREEDY_CASES = (
    GreedyCase(EVERY_WALK[:28], num_nodes=24, max_depth=6, dtype="int32", random_trees=4, seed=81),
    GreedyCase(EVERY_WALK[28:], num_nodes=40, max_depth=39, dtype="int64", random_trees=3, seed=82),
)


def build_greedy(case: GreedyCase) -> Tensors:
    """Make the tensors of one file for accept_greedy.

    Parameters
    ----------
    case : GreedyCase
        What to make. Behind its walks come best-first trees of different sizes whose targets often lead on.

    Returns
    -------
    dict of str to numpy array or scalar
        operator : uint8 [13], ASCII; the trees, as from `refs.trees.assemble`, with the links and numbers of nodes that
        the walks change; target_tokens : `case.dtype` [B, Q]; stop_tokens : int32 [B, 2], or int64 [3], a negative one
        is none; the result of `refs.accept.accept_greedy` behind ``accepted.``.
    """
    bits = np.random.PCG64(case.seed)
    walks = [WALKS[name] for name in case.walks]
    walks += [_random_walk(bits, case.num_nodes - 5 * n) for n in range(case.random_trees)]
    tree = _trees_of(walks, case.num_nodes, case.max_depth)
    targets = [[*walk.targets, *[5] * (case.num_nodes - len(walk.targets))] for walk in walks]
    stops: npt.NDArray[Any] = np.array(STOP_TOKENS, dtype=np.int64)
    if case.dtype == "int32":
        padded = [[*[-1] * (STOP_COLUMNS - len(walk.stops)), *walk.stops] for walk in walks]
        stops = np.array(padded, dtype=np.int32)
    target_tokens = np.array(targets, dtype=case.dtype)
    return {
        "operator": np.frombuffer(b"accept_greedy", dtype=np.uint8),
        **tree,
        "target_tokens": target_tokens,
        "stop_tokens": stops,
        **_prefixed("accepted.", accept.accept_greedy(tree, target_tokens, stops)),
    }


def _prefixed(prefix: str, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    return {prefix + name: array for name, array in arrays.items()}


def _random_walk(bits: np.random.PCG64, num_nodes: int, vocabulary: int = 2**17) -> Walk:
    """A best-first tree of 3 candidates a position; a target is a child's token seven times in eight."""
    found = trees.best_first_tree(_flat(bits, (1, 8, 3))[0], num_nodes - 1)
    parents = found["parents"].tolist()
    words = bits.random_raw(64 + 2 * num_nodes).astype(object)
    # Distinct at each position, so that siblings differ.
    ids = [[(int(words[8 * d + r]) >> 8) % (vocabulary // 3) * 3 + r for r in range(3)] for d in range(8)]
    tokens = [int(words[64]) % vocabulary, *(ids[len(path) - 1][path[-1]] for path in found["ranks"][1:])]
    targets = []
    for node, word in enumerate(words[64 + num_nodes :]):
        children = [child for child, parent in enumerate(parents) if parent == node]
        leads_on = children and word % 8 > 0
        targets.append(tokens[children[(word >> 8) % len(children)]] if leads_on else (word >> 8) % vocabulary)
    return Walk(tuple(parents), tuple(tokens), tuple(targets))


def _trees_of(walks: Sequence[Walk], num_nodes: int, max_depth: int) -> dict[str, npt.NDArray[Any]]:
    """The trees of a batch. An idle request holds what a builder would leave there: no tree."""
    scores = [[-0.25 * node for node in range(len(walk.parents))] for walk in walks]
    parents, tokens = [walk.parents for walk in walks], [walk.tokens for walk in walks]
    tree = trees.assemble(parents, tokens, scores, num_nodes=num_nodes, max_depth=max_depth)
    for b, walk in enumerate(walks):
        for name, node, link in walk.links:
            tree[name][b, node] = link
        if walk.num_nodes is not None:
            tree["num_nodes"][b] = walk.num_nodes
        if walk.num_nodes == 0:
            tree["tokens"][b] = tree["input_ids"][b] = -1
            tree["scores"][b], tree["tree_mask"][b] = -np.inf, 0
    return tree


# What the law behind a node is changed to.
LAW_ROWS: dict[str, Callable[[npt.NDArray[np.float32], int], None]] = {
    "zeros on both sides": lambda row, k: row.__setitem__([0, 1, 2, -2, -1], 0.0),
    "all zero": _put(slice(None), 0.0),
    "one token": lambda row, k: row.__setitem__(slice(None), np.arange(len(row)) == len(row) - 1),
    "a NaN": _put(-1, np.nan),
    "zeros of both signs": _put(slice(1, None, 2), -0.0),
    "below 0": _put(0, -(2.0**-20)),
    "all of two": lambda row, k: row.__setitem__(slice(None), np.arange(len(row)) >= len(row) - 2),  # of sum 2
    "above 1": _put(3, 1.0 + 2**-7),
    "equal": _put(slice(None), 2.0**-8),  # of sum below 1
    "+inf": _put(3, np.inf),
    "tiny": _put(slice(None), 2.0**-44),
    "too tiny": _put(slice(None), 2.0**-45),
    "one of them just large enough": lambda row, k: row.__setitem__(slice(None), 2.0**-44 * (np.arange(len(row)) == 5)),
}
# Of the roots of the first requests. A float32 holds all of them.
UNIFORMS = (0.0, 1 - 2**-24, 0.5, 0.0, 1 - 2**-24, 0.25, 0.0, 0.5, 1 - 2**-24, 0.5, 1 - 2**-24, 0.5, 0.0)
BAD_UNIFORMS = (1.0, np.nan, -(2.0**-30), -0.0, np.inf)


@dataclass(frozen=True)
class SampledCase:
    """One file for accept_sampled: V, the probabilities' dtype, Q, B, whether each node has its own position, the seed.

    The first requests have, at the root, the rows of LAW_ROWS and UNIFORMS; those behind them BAD_UNIFORMS, then an
    idle one, and one whose second node has no law.
    """

    vocabulary: int
    dtype: str
    num_nodes: int
    batch: int
    position_a_node: bool
    special: bool
    seed: int

    @property
    def name(self) -> str:
        return f"accept_sampled_v{self.vocabulary}_{SHORT[self.dtype]}"


SAMPLED_CASES = (
    SampledCase(41, "float32", num_nodes=9, batch=24, position_a_node=False, special=True, seed=91),
    SampledCase(40, "bfloat16", num_nodes=9, batch=24, position_a_node=True, special=True, seed=91),
    SampledCase(1031, "bfloat16", num_nodes=4, batch=2, position_a_node=True, special=False, seed=154),
)


def build_sampled(case: SampledCase) -> Tensors:
    """Make the tensors of one file for accept_sampled, whose walks are drawn in two ways.

    Parameters
    ----------
    case : SampledCase
        What to make.

    Returns
    -------
    dict of str to numpy array or scalar
        operator : uint8 [14], ASCII; the trees, as from `refs.trees.assemble`; target_probs : `case.dtype` [B, Q, V];
        seeds : int64 [B] and positions : int64 [B], or uint64 [B] and int32 [B, Q]; uniforms : float32 [B, Q], or
        float64; stop_tokens : int32 [2]; the results of `refs.accept.accept_sampled` from seeds and positions behind
        ``seeded.``, and from uniforms behind ``uniform.``.
    """
    bits = np.random.PCG64(case.seed)
    walks = [_random_walk(bits, case.num_nodes - b % 3, case.vocabulary) for b in range(case.batch)]
    law = _laws(bits, case, walks)
    uniforms = (bits.random_raw(law.size // case.vocabulary) >> np.uint64(40)).astype(np.float64) * 2.0**-24
    uniforms = uniforms.reshape(law.shape[:2]).astype(np.float64 if case.position_a_node else np.float32)
    if case.special:
        uniforms[: len(LAW_ROWS), 0] = UNIFORMS
        behind = len(LAW_ROWS) + len(BAD_UNIFORMS)
        uniforms[len(LAW_ROWS) : behind, 0] = BAD_UNIFORMS
        for row, change in zip(law[:, 0], LAW_ROWS.values(), strict=False):
            change(row, 1)
        walks[behind] = Walk(num_nodes=0)
        law[behind + 1, 0] = np.arange(case.vocabulary) == walks[behind + 1].tokens[1]
        law[behind + 1, 1, 7] = np.nan
    seeds = bits.random_raw(case.batch)
    positions = (bits.random_raw(case.batch) >> np.uint64(44)).astype(np.int64)
    positions[-2:] = (2**32 - 1, -2)  # the carry into the high half, and out of it
    tree = _trees_of(walks, case.num_nodes, max_depth=6)
    if case.position_a_node:
        positions[-2:] = (2**31 - 9, -2)
        positions = (positions[:, None] + tree["depths"]).astype(np.int32)
    else:
        seeds = seeds.view(np.int64)
    stop_tokens = np.array([walks[0].tokens[1], 3], dtype=np.int32)  # one of them is a node
    problem = {"tree": tree, "target_probs": law.astype(FLOATS[case.dtype]), "stop_tokens": stop_tokens}
    return {
        "operator": np.frombuffer(b"accept_sampled", dtype=np.uint8),
        **tree,
        "target_probs": problem["target_probs"],
        "seeds": seeds,
        "positions": positions,
        "uniforms": uniforms,
        "stop_tokens": stop_tokens,
        **_prefixed("seeded.", accept.accept_sampled(**problem, seeds=seeds, positions=positions)),
        **_prefixed("uniform.", accept.accept_sampled(**problem, uniforms=uniforms)),
    }


def _laws(bits: np.random.PCG64, case: SampledCase, walks: Sequence[Walk]) -> npt.NDArray[np.float32]:
    """Multiples of 2**-24 that sum to 1; some three quarters of it on the children's tokens, one token in four 0."""
    words = (bits.random_raw(case.batch * case.num_nodes * case.vocabulary) >> np.uint64(52)).astype(np.int64)
    shares = words.reshape(case.batch, case.num_nodes, case.vocabulary)
    shares[shares % 4 == 0] = 0
    for b, walk in enumerate(walks):
        for node in range(len(walk.parents)):
            tokens = sorted({walk.tokens[child] for child, parent in enumerate(walk.parents) if parent == node})
            if tokens:
                shares[b, node, tokens] += 3 * shares[b, node].sum() // len(tokens)
    shares = shares * 2**24 // shares.sum(axis=2, keepdims=True)
    largest = np.argmax(shares, axis=2)[..., None]
    np.put_along_axis(shares, largest, np.take_along_axis(shares, largest, 2) + 2**24 - shares.sum(2, keepdims=True), 2)
    return shares.astype(np.float32) * np.float32(2**-24)


@dataclass(frozen=True)
class ProbsCase:
    """One file for target_probs: V, the dtype, Q, the seed, and temperature, top_k and top_p of each request.

    The first row of a request is an ordinary one, the second is rounded to whole numbers; others are as in `special`.
    """

    vocabulary: int
    dtype: str
    num_nodes: int
    requests: tuple[tuple[float, int, float], ...]
    seed: int
    special: tuple[str, ...] = ()  # names from SPECIAL_ROWS

    @property
    def name(self) -> str:
        return f"target_probs_v{self.vocabulary}_{SHORT[self.dtype]}"


PROBS_CASES = (
    ProbsCase(
        vocabulary=157,
        dtype="float32",
        num_nodes=3,
        requests=(
            *((1.0, 0, 1.0), (0.7, 0, 1.0), (0.0, 0, 1.0), (1.3, 5, 1.0), (0.8, 0, 0.9), (1.0, 20, 0.5)),
            *((2.5, 157, 0.999), (1.0, 1, 1.0), (0.6, -1, 0.01), (1.0, 1000, 1.5), (0.0, 3, 0.2), (1.1, 40, 0.97)),
            *((1.0, 2, 0.8), (0.9, 156, 0.95)),
        ),
        seed=95,
        special=(
            *("some -inf", "a NaN", "all equal", "a +inf", "the maximum three times", "nothing but -inf", "large"),
            *("a NaN in front", "very negative", "some -inf", "zeros of both signs", "all equal"),
            *("few finite ones", "rising"),
        ),
    ),
    ProbsCase(
        vocabulary=515,
        dtype="bfloat16",
        num_nodes=2,
        requests=((1.0, 0, 1.0), (0.9, 50, 0.95), (0.0, 0, 1.0), (1.2, 0, 0.8), (1.0, 300, 0.99)),
        seed=96,
    ),
)
# How far, at least, the sums at the border of top_p are from it: float32 sums must not fall on its other side.
TOP_P_MARGIN = 1e-5


def build_probs(case: ProbsCase) -> Tensors:
    """Make the tensors of one file for target_probs.

    Parameters
    ----------
    case : ProbsCase
        What to make.

    Returns
    -------
    dict of str to numpy array
        operator : uint8 [12], ASCII; logits : `case.dtype` [B, Q, V], in nats; temperature, top_p : float32 [B];
        top_k : int32 [B]; target_probs : float32 [B, Q, V], 0 for what is not kept or has a logit of -inf, and nothing
        else.
    """
    bits = np.random.PCG64(case.seed)
    rows = _normal(bits, (len(case.requests), case.num_nodes, case.vocabulary)) * np.float32(LOGIT_STD)
    np.rint(rows[:, 1], out=rows[:, 1])
    for row, name in zip(rows[:, -1], case.special, strict=False):
        SPECIAL_ROWS[name](row, 8)
    logits = rows.astype(FLOATS[case.dtype])
    temperature, top_p = (np.array([request[n] for request in case.requests], dtype=np.float32) for n in (0, 2))
    top_k = np.array([request[1] for request in case.requests], dtype=np.int32)
    probs = accept.target_probs(logits, temperature, top_k, top_p)
    for by in (-TOP_P_MARGIN, TOP_P_MARGIN):
        near = np.where((temperature > 0) & (top_p < 1), top_p.astype(np.float64) + by, top_p)
        same = (accept.target_probs(logits, temperature, top_k, near) > 0) == (probs > 0)
        assert same.all(), f"{case.name}: rows {np.argwhere(~same)[:, :2].tolist()} need another seed or top_p"
    return {
        "operator": np.frombuffer(b"target_probs", dtype=np.uint8),
        "logits": logits,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "target_probs": probs.astype(np.float32),
    }


@dataclass(frozen=True)
class CompactCase:
    """One file for compact_kv: the cache's dtype, each request's prefix length, the layers' trailing axes, the seed."""

    dtype: str
    prefixes: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    num_nodes: int
    seed: int
    page_size: int | None = None
    lost_page: tuple[int, int] | None = None  # request and place in its table

    @property
    def name(self) -> str:
        return f"compact_kv_{f'page{self.page_size}' if self.page_size else 'contiguous'}_{self.dtype}"


COMPACT_CASES = (
    # The last three: no length; the last node stands behind S = 40; the accepted rows have no room.
    CompactCase("float32", (0, 5, 17, 3, 9, -2, 32, 38), layers=((12,), (1, 8)), num_nodes=20, seed=101),
    # The trees lie over the borders of pages; an idle request; a prefix that ends with a page.
    CompactCase("bfloat16", (60, 120, 64, 7), layers=((8,), (8,)), num_nodes=20, seed=102, page_size=64),
    CompactCase(
        "uint8",
        prefixes=(14, 31, 9, 0),
        layers=((12,), (12,)),
        num_nodes=40,
        seed=103,
        page_size=16,
        lost_page=(3, 1),
    ),
)
IDLE_REQUEST = 2  # of each file
CAPACITY = 40  # S of a contiguous cache
HIDDEN_SIZE = 6


def build_compact(case: CompactCase) -> Tensors:
    """Make the tensors of one file for compact_kv and gather_accepted.

    Parameters
    ----------
    case : CompactCase
        What to make. Every row of the caches, live or not, is another, so that a row that should have stayed shows.

    Returns
    -------
    dict of str to numpy array
        operator : uint8 [10], ASCII; kv_cache_0, kv_cache_1 : `case.dtype` [B, S, ..], or paged [num_pages, page_size,
        ..]; block_table : int32 [B, max_pages], paged only; cache_seqlens : int32 [B]; what was accepted, as from
        `refs.accept.accept_greedy`, behind ``accepted.``; the caches and lengths afterwards behind ``compacted.``; x :
        float32 [B, Q, 6], and its accepted rows as gathered : float32 [B, max_depth + 1, 6].
    """
    bits = np.random.PCG64(case.seed)
    batch = len(case.prefixes)
    walks = [_random_walk(bits, case.num_nodes) for _ in case.prefixes]
    walks[IDLE_REQUEST] = Walk(num_nodes=0)
    tree = _trees_of(walks, case.num_nodes, max_depth=8)
    accepted = accept.accept_greedy(tree, np.array([_padded(walk.targets, case.num_nodes) for walk in walks]))
    lengths = [length + case.num_nodes for length in case.prefixes]
    problem: dict[str, Any] = {}
    if case.page_size is None:
        rows = batch, CAPACITY
    else:
        rows = sum(-(-length // case.page_size) for length in lengths) + SPARE_PAGES, case.page_size
        places = [np.zeros((length, 1), dtype=np.float32) for length in lengths]
        problem["block_table"] = _place(bits, places, case.page_size)[1]
        if case.lost_page:
            problem["block_table"][case.lost_page] = -5
    for n, columns in enumerate(case.layers):
        words = bits.random_raw(math.prod((*rows, *columns))).reshape(*rows, *columns) >> np.uint64(56)
        exact = words.astype(np.uint8) if case.dtype == "uint8" else words.astype(np.float32) - np.float32(128)
        problem[f"kv_cache_{n}"] = exact if case.dtype == "uint8" else exact.astype(FLOATS[case.dtype])
    cache_seqlens = np.array(case.prefixes, dtype=np.int32)
    caches = [problem[f"kv_cache_{n}"] for n in range(len(case.layers))]
    moved, lengths_after = accept.compact_kv(
        caches, cache_seqlens, accepted["nodes"], accepted["num_accepted"], problem.get("block_table")
    )
    x = _normal(bits, (batch, case.num_nodes, HIDDEN_SIZE))
    return {
        "operator": np.frombuffer(b"compact_kv", dtype=np.uint8),
        **problem,
        "cache_seqlens": cache_seqlens,
        **_prefixed("accepted.", accepted),
        **{f"compacted.kv_cache_{n}": cache for n, cache in enumerate(moved)},
        "compacted.cache_seqlens": lengths_after,
        "x": x,
        "gathered": accept.gather_accepted(x, accepted["nodes"]),
    }


def _padded(values: Sequence[int], size: int) -> list[int]:
    return [*values, *[5] * (size - len(values))]


@dataclass(frozen=True)
class SglangCase:
    """One file for verify_tree_greedy: Q, the columns of accept_index, the dtype, B, the seed."""

    num_nodes: int
    columns: int
    dtype: str
    batch: int
    seed: int

    @property
    def name(self) -> str:
        return f"verify_tree_greedy_q{self.num_nodes}_{self.dtype}"


SGLANG_CASES = (
    SglangCase(num_nodes=16, columns=9, dtype="int64", batch=6, seed=111),
    # Fewer columns than a path has nodes; the places of the nodes are not in order.
    SglangCase(num_nodes=33, columns=4, dtype="int32", batch=4, seed=112),
)


def build_sglang(case: SglangCase) -> Tensors:
    """Make the tensors of one file for verify_tree_greedy.

    Parameters
    ----------
    case : SglangCase
        What to make. The nodes behind the root stand in reverse order, so that every link leads to a smaller one.

    Returns
    -------
    dict of str to numpy array
        operator : uint8 [18], ASCII; predicts : int32 [B * Q], accept_index : int32 [B, S], accept_token_num : int32
        [B], with contents of which some stay; candidates, retrive_index, retrive_next_token, retrive_next_sibling,
        target_predict : `case.dtype` [B, Q]; the first three afterwards behind ``accepted.``.
    """
    bits = np.random.PCG64(case.seed)
    batch, num_nodes = case.batch, case.num_nodes
    walks = [_random_walk(bits, num_nodes - 3 * (b % 3)) for b in range(batch)]
    tree = _trees_of(walks, num_nodes, max_depth=8)
    old = [0, *range(num_nodes - 1, 0, -1)]  # of each new node; its own inverse
    new = np.array([*old, -1])
    places = np.arange(batch * num_nodes).reshape(batch, num_nodes)
    if case.dtype == "int32":
        places = places[::-1, ::-1]
    targets = np.array([_padded(walk.targets, num_nodes) for walk in walks])[:, old]
    target_predict = np.zeros(batch * num_nodes, dtype=np.int64)
    target_predict[places] = targets
    given = {
        "candidates": tree["tokens"][:, old],
        "retrive_index": places,
        "retrive_next_token": new[tree["first_child"]][:, old],
        "retrive_next_sibling": new[tree["next_sibling"]][:, old],
        "target_predict": target_predict.reshape(batch, num_nodes),
    }
    problem = {
        "predicts": -1000 - np.arange(batch * num_nodes, dtype=np.int32),
        "accept_index": np.full((batch, case.columns), -1, dtype=np.int32),
        "accept_token_num": np.full(batch, -7, dtype=np.int32),
        **{name: np.ascontiguousarray(array.astype(case.dtype)) for name, array in given.items()},
    }
    names = ("accepted.predicts", "accepted.accept_index", "accepted.accept_token_num")
    return {
        "operator": np.frombuffer(b"verify_tree_greedy", dtype=np.uint8),
        **problem,
        **dict(zip(names, accept.verify_tree_greedy(**problem), strict=True)),
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
        *((case.name, partial(build_argmax, case)) for case in ARGMAX_CASES),
        *((case.name, partial(build_greedy, case)) for case in GREEDY_CASES),
        *((case.name, partial(build_sampled, case)) for case in SAMPLED_CASES),
        *((case.name, partial(build_probs, case)) for case in PROBS_CASES),
        *((case.name, partial(build_compact, case)) for case in COMPACT_CASES),
        *((case.name, partial(build_sglang, case)) for case in SGLANG_CASES),
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
