"""The named cases of verify_attention, what their inputs are, and what every result must satisfy.

A case is a few numbers; `make_inputs` turns it into arrays. Every row that no result may depend on holds NaN: rows
behind a request's prefix and tree, pages that no table entry names, everything of an idle slot. Table entries behind
the live ones hold page numbers that do not exist.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ddtree_numba.attention import flash, three_phase
from ddtree_numba.compare import Report, compare
from refs import oracle

CHUNK, GROUP = three_phase.CHUNK, three_phase.GROUP
STALE_ENTRIES = (2147480000, -1)
SPARE_PAGES = 3
MEAN_COLUMNS = slice(0, None, 8)  # latent columns that all keys share a mean in, as real caches do
ARGUMENTS = ("q", "kv_cache", "cache_seqlens", "tree_mask", "block_table", "sm_scale", "kv_lora_rank")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "uint16": np.dtype(np.uint16),
}


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes
    ----------
    name : str
        Also seeds the random numbers.
    prefixes : tuple of int
        Prefix length of each request in tokens; B is their number.
    Q, H, R, P : int
        Nodes, heads, kv_lora_rank, qk_rope_head_dim.
    dtype, cache_dtype : str
        Of q and of the cache (None: that of q): float32, float16, bfloat16, or uint16 (bfloat16 bits).
    page_size : int or None
        Tokens a page; None means a contiguous cache.
    mask : str
        "bool", "packed" or "causal".
    tree : str
        "random" (each parent among the four nodes before), "chain" or "star".
    padded : int
        How many of the last nodes are padding: their mask rows are empty.
    idle : tuple of int
        Requests without any work: prefix 0, empty masks, NaN rows.
    logit_std : float
        Spread of the scaled logits, in nats.
    slack : int
        Capacity behind the longest request, in tokens.
    simulate : bool
        Whether the case is small enough for the simulator; on a GPU all cases run.
    """

    name: str
    prefixes: tuple[int, ...]
    Q: int = 5
    H: int = 1
    R: int = 32
    P: int = 16
    dtype: str = "float32"
    cache_dtype: str | None = None
    page_size: int | None = None
    mask: str = "packed"
    tree: str = "random"
    padded: int = 0
    idle: tuple[int, ...] = ()
    logit_std: float = 1.5
    slack: int = 3
    simulate: bool = True

    @property
    def B(self) -> int:
        return len(self.prefixes)

    @property
    def D(self) -> int:
        return self.R + self.P

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("prefix_0", (0,)),
    Case("prefix_1", (1,), H=3),
    Case("prefix_0_to_2", (0, 1, 2), mask="bool"),
    Case("prefix_around_a_chunk", (CHUNK - 1, CHUNK, CHUNK + 1)),
    Case("tree_across_a_chunk_border", (CHUNK - 4,), Q=9, mask="bool"),
    Case("prefix_of_two_chunks", (2 * CHUNK + 2,), Q=2),
    Case("prefix_over_a_group", (GROUP + 1,), Q=2),
    Case("one_node", (0, 7), Q=1, H=3, mask="bool"),
    Case("one_node_causal", (CHUNK,), Q=1, mask="causal"),
    Case("ragged_with_idle_slots", (0, 17, 3, 0), Q=5, idle=(0, 3)),
    Case("ragged_paged_with_idle_slot", (17, 0, 3), Q=5, H=2, page_size=3, idle=(1,), mask="bool"),
    Case("padded_nodes", (0, 4), Q=9, padded=4),
    Case("two_words", (5,), Q=33),
    Case("causal", (6, 0), H=3, mask="causal", tree="chain"),
    Case("chain", (6,), tree="chain", mask="bool"),
    Case("star", (6,), Q=9, tree="star"),
    Case("page_size_1", (6, 2), page_size=1),
    Case("page_size_3", (6, 2), page_size=3, mask="bool"),
    Case("page_size_16", (29, 2), page_size=16),
    Case("page_size_64", (70,), page_size=64, H=2, Q=3),
    Case("narrow", (3, 8), R=16, P=16, H=3, Q=3),
    Case("rope_as_wide_as_latent", (3,), R=192, P=192, Q=3),
    Case("rope_wider_than_latent", (5,), R=16, P=48),
    Case("flat_softmax", (40,), logit_std=0.02),
    Case("steep_softmax", (40,), logit_std=12.0),
    Case("float16", (9, 1), dtype="float16"),
    Case("bfloat16", (9, 1), dtype="bfloat16", page_size=3),
    Case("bfloat16_bits", (9, 1), dtype="uint16"),
    Case("float32_on_bfloat16", (9, 1), dtype="float32", cache_dtype="bfloat16"),
    Case("bfloat16_on_float32", (9,), dtype="bfloat16", cache_dtype="float32"),
    Case("float16_on_bfloat16_bits", (9,), dtype="float16", cache_dtype="uint16"),
    # For the mirror only, without a GPU.
    Case("prefix_around_a_group", (GROUP - 1, GROUP, GROUP + 1), page_size=16, simulate=False),
    Case("three_words", (4, 0), Q=65, H=2, simulate=False),
    Case("three_words_bool", (CHUNK - 1,), Q=65, mask="bool", simulate=False),
    Case("large_tree", (200, 0, 130), Q=33, H=3, page_size=16, padded=3, simulate=False),
    Case("long_prefix", (1500, 777), Q=5, H=2, mask="bool", page_size=64, simulate=False),
    Case("long_prefix_bfloat16", (1500,), Q=5, H=2, dtype="bfloat16", simulate=False),
    Case("model_width", (300, 64), Q=9, H=2, R=512, P=64, page_size=16, logit_std=3.0, simulate=False),
    Case("model_width_bfloat16", (300, 64), Q=9, H=2, R=512, P=64, dtype="bfloat16", simulate=False),
)

SIMULATED = tuple(case for case in CASES if case.simulate)

# Sizes as models have them; for a GPU only.
MODEL: dict[str, Any] = {"R": 512, "P": 64, "simulate": False}
FULL_CASES = (
    Case("full_float32", (1000, 37, 0), Q=17, H=16, page_size=16, logit_std=3.0, **MODEL),
    Case("full_float32_long", (3000 - 9,), Q=9, H=64, mask="bool", logit_std=4.0, **MODEL),
    Case("full_bfloat16", (1000, 37, 0, 0), Q=17, H=64, dtype="bfloat16", page_size=64, idle=(3,), **MODEL),
    Case("full_float16", (700, 64), Q=33, H=16, dtype="float16", page_size=16, padded=5, **MODEL),
    Case("full_float32_on_bfloat16", (513,), Q=17, H=8, cache_dtype="bfloat16", mask="causal", **MODEL),
    Case("full_tree_of_1025", (5,), Q=1025, H=1, **MODEL),
    Case("full_tree_of_1025_bfloat16", (5,), Q=1025, H=1, dtype="bfloat16", mask="bool", page_size=16, **MODEL),
)


def make_inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """The arrays of a case.

    Returns
    -------
    dict
        q, kv_cache, cache_seqlens, tree_mask, block_table (None without pages), sm_scale, kv_lora_rank: the arguments
        of verify_attention. parents: int32 [B, Q], -1 for the root and for padding.
    """
    rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
    lengths = np.array(case.prefixes, np.int32)
    capacity = int(lengths.max(initial=0)) + case.Q + case.slack

    parents = np.full((case.B, case.Q), -1, np.int32)
    for b, i in np.ndindex(case.B, case.Q):
        if b not in case.idle and 0 < i < case.Q - case.padded:
            parents[b, i] = {"random": rng.integers(max(0, i - 4), i), "chain": i - 1, "star": 0}[case.tree]
    mask = ancestor_mask(parents)
    mask[list(case.idle)] = False

    live = rng.standard_normal((case.B, capacity, case.D))
    live[..., MEAN_COLUMNS] += 2.0
    live[..., case.R :] *= 3.0  # kpe is not normalized, and larger than ckv in real caches
    row_norm = np.sqrt(1.5 * (case.R + 9 * case.P))  # expected: a mean of 2 in every eighth column adds one half
    for b, length in enumerate(lengths):
        live[b, 0 if b in case.idle else length + case.Q :] = np.nan

    cache, table = live, None
    if case.page_size is not None:
        cache, table = to_pages(live, lengths + case.Q, case.page_size, rng)
    return {
        "q": cast(rng.standard_normal((case.B, case.Q, case.H, case.D)), case.dtype),
        "kv_cache": cast(cache, case.cache_dtype or case.dtype),
        "cache_seqlens": lengths,
        "tree_mask": {"bool": mask, "packed": pack(mask), "causal": None}[case.mask],
        "block_table": table,
        "sm_scale": float(case.logit_std / row_norm),
        "kv_lora_rank": case.R,
        "parents": parents,
    }


def ancestor_mask(parents: np.ndarray) -> np.ndarray:
    """bool [B, Q, Q]: node i sees itself and its ancestors; padding sees nothing."""
    mask = np.zeros((*parents.shape, parents.shape[-1]), np.bool_)
    for b, i in np.ndindex(*parents.shape):
        j = i if i == 0 or parents[b, i] >= 0 else -1
        while j >= 0:
            mask[b, i, j] = True
            j = parents[b, j]
    return mask


def pack(mask: np.ndarray) -> np.ndarray:
    """uint32 [B, Q, ceil(Q/32)] of a bool mask, bit by bit."""
    num_nodes = mask.shape[-1]
    words = np.zeros((*mask.shape[:-1], -(-num_nodes // 32)), np.uint32)
    for j in range(num_nodes):
        words[..., j // 32] |= mask[..., j].astype(np.uint32) << np.uint32(j % 32)
    return words


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Values in one of `DTYPES`; uint16 gets the bits of bfloat16."""
    return x.astype(BFLOAT16).view(np.uint16) if dtype == "uint16" else x.astype(DTYPES[dtype])


def to_pages(
    rows: np.ndarray, stops: np.ndarray, page_size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Spread [B, S, D] rows over shuffled pages; rows from ``stops[b]`` on, and all other slots, hold NaN.

    Returns
    -------
    pages : [num_pages, page_size, D]
    block_table : int32 [B, max_pages]
        Entries behind the live ones are no pages.
    """
    batch, capacity, head_dim = rows.shape
    max_pages = -(-capacity // page_size)
    used = [-(-int(stop) // page_size) for stop in stops]
    ids = rng.permutation(sum(used) + SPARE_PAGES)
    pages = np.full((ids.size, page_size, head_dim), np.nan, rows.dtype)
    table = np.resize(np.array(STALE_ENTRIES, np.int32), (batch, max_pages))
    taken = 0
    for b, stop in enumerate(stops):
        table[b, : used[b]] = ids[taken : taken + used[b]]
        taken += used[b]
        for key in range(int(stop)):
            pages[table[b, key // page_size], key % page_size] = rows[b, key]
    return pages, table


def arguments(inputs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The keyword arguments of verify_attention, some of them replaced or added."""
    return {name: inputs[name] for name in ARGUMENTS} | changes


def as_float(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits as bfloat16; anything else as it is."""
    return x.view(BFLOAT16) if x.dtype == np.uint16 else x


def exact_results(inputs: dict[str, Any], part: str = "all") -> tuple[np.ndarray, np.ndarray]:
    """out and lse of the float64 oracle at the inputs as they are, rounding included."""
    return oracle.verify_attention(**_for_oracle(inputs), part=part)


def error_bound(inputs: dict[str, Any], variant: str = "three_phase") -> float:
    """The derived bound on the relative Frobenius error of a variant's float32 outputs."""
    statistics = oracle.logit_statistics(**_for_oracle(inputs))
    _, num_nodes, _, head_dim = inputs["q"].shape
    num_keys = int(inputs["cache_seqlens"].max(initial=0)) + num_nodes
    module = flash if variant.startswith("flash") else three_phase
    return module.error_bound(statistics["logit_magnitude"], num_keys, head_dim)


def _for_oracle(inputs: dict[str, Any]) -> dict[str, Any]:
    changes = {"q": as_float(inputs["q"]), "kv_cache": as_float(inputs["kv_cache"])}
    return arguments(inputs, **changes)


def compare_out(out: np.ndarray, exact: np.ndarray, bound: float, name: str = "out") -> Report:
    """float32 against the derived bound; float16 and bfloat16 against twice the error of casting the exact result."""
    out = as_float(out)
    if out.dtype != np.float32:
        norm = np.linalg.norm(exact)
        bound = 2 * float(np.linalg.norm(exact.astype(out.dtype).astype(np.float64) - exact) / norm) if norm else 0.0
    return compare(out, exact, name=name, rel_frobenius=bound)


def compare_lse(lse: np.ndarray, exact: np.ndarray, bound: float = 1e-5, name: str = "lse") -> Report:
    """Error relative to max(1, |lse|)."""
    assert lse.dtype == np.float32
    scale = np.maximum(1.0, np.abs(np.where(np.isfinite(exact), exact, 1.0)))
    return compare(lse / scale, exact / scale, name=name, max_abs=bound)


def check_results(
    results: tuple[np.ndarray, np.ndarray], inputs: dict[str, Any], variant: str = "three_phase", part: str = "all"
) -> None:
    """Raise AssertionError unless out and lse are those of the oracle, within the bounds; empty rows exactly."""
    out, lse = results
    exact_out, exact_lse = exact_results(inputs, part)
    compare_out(out, exact_out, error_bound(inputs, variant)).check()
    compare_lse(lse, exact_lse).check()
    empty = np.isneginf(exact_lse)
    assert np.all(as_float(out)[empty] == 0), "a node that sees nothing must get 0"
    assert np.all(np.isneginf(lse[empty])), "a node that sees nothing must get -inf"
