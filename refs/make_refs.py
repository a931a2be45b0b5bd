"""Generate the reference files of verify_attention: ``python refs/make_refs.py [--out DIR]``.

Inputs are the same bytes on every machine and with every NumPy version: raw words of a bit generator, whose stream
NumPy guarantees (NEP 19; distributions are not guaranteed), then integer arithmetic and single, correctly rounded IEEE
operations. out and lse are the oracle's float64 results rounded to float32; their last bit may depend on the BLAS.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from a plain checkout

from ddtree_numba import kdtr
from refs import oracle, trees

__all__ = ["CASES", "Case", "build", "main"]

KV_LORA_RANK, QK_ROPE_HEAD_DIM = 512, 64
SM_SCALE = 0.14467962580268923  # Kimi K2: 192**-0.5 * (0.1 * ln 64 + 1)**2
DRAFT_POSITIONS, CANDIDATES = 8, 8
POISON_ROWS = 3  # capacity behind a contiguous cache's longest request
SPARE_PAGES = 4  # pages that no table entry names
STALE_ENTRIES = (2147480000, -1)  # behind the live entries of a table row
ROPE_TO_LATENT = 3.0  # kpe is not normalized and is larger than ckv in real caches
MEAN_COLUMNS = slice(0, KV_LORA_RANK, 64)  # latent columns that all keys share a mean in, as real caches do
MEAN_TO_LATENT = 2.0


@dataclass(frozen=True)
class Case:
    """One reference file: H, each request's prefix length and tree budget, the logits' target spread, the seed."""

    num_heads: int
    prefixes: tuple[int, ...]
    tree_budgets: tuple[int, ...]  # one below the largest leaves padded nodes
    logit_std: float
    seed: int
    latent_std: float = 1.0
    page_size: int | None = None

    @property
    def name(self) -> str:
        return f"verify_attn_h{self.num_heads}_p{max(self.prefixes)}_b{max(self.tree_budgets)}"


CASES = (
    # Next to uniform weights, no prefix: padded nodes see nothing at all.
    Case(num_heads=8, prefixes=(0, 0), tree_budgets=(8, 5), logit_std=0.02, seed=2, latent_std=0.2),
    Case(num_heads=8, prefixes=(1, 0, 1), tree_budgets=(4, 4, 4), logit_std=1.0, seed=1),
    Case(num_heads=8, prefixes=(37, 5), tree_budgets=(8, 6), logit_std=2.0, seed=3),
    Case(num_heads=16, prefixes=(200, 77), tree_budgets=(16, 16), logit_std=1.5, seed=4, page_size=16),
    Case(num_heads=64, prefixes=(128,), tree_budgets=(16,), logit_std=3.0, seed=5),
    Case(num_heads=64, prefixes=(2048,), tree_budgets=(16,), logit_std=4.0, seed=6),
)


def build(case: Case) -> dict[str, npt.NDArray[Any] | np.generic]:
    """Make the tensors of one file.

    Parameters
    ----------
    case : Case
        What to make; B = number of prefixes, Q = largest tree budget + 1, D = 576.

    Returns
    -------
    dict of str to numpy array or scalar
        operator : uint8 [16], ASCII; q : float32 [B, Q, H, D]; kv_cache : float32 [B, S, D], or paged
        [num_pages, page_size, D], NaN wherever no live row stands; cache_seqlens : int32 [B]; parents, depths :
        int32 [B, Q]; num_nodes : int32 [B]; tree_mask : uint32 [B, Q, ceil(Q/32)]; block_table : int32 [B, max_pages],
        paged only; kv_lora_rank : int32; sm_scale, logit_std, logit_max, logit_magnitude : float64; out : float32
        [B, Q, H, R]; lse : float32 [B, Q, H], in nats.
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

    dim, latent = KV_LORA_RANK + QK_ROPE_HEAD_DIM, slice(0, KV_LORA_RANK)
    scales = np.full(dim, case.latent_std * ROPE_TO_LATENT, dtype=np.float32)
    scales[latent] = case.latent_std
    means = np.zeros(dim, dtype=np.float32)
    means[MEAN_COLUMNS] = MEAN_TO_LATENT * case.latent_std
    means[MEAN_COLUMNS][1::2] *= -1
    # Variance of an unscaled logit over queries of unit variance.
    variance = math.fsum(float(x) ** 2 for x in (*scales, *means))
    q_std = np.float32(case.logit_std / (SM_SCALE * math.sqrt(variance)))

    q = _normal(bits, (num_requests, num_nodes, case.num_heads, dim)) * q_std
    rows = [_normal(bits, (length + num_nodes, dim)) * scales + means for length in case.prefixes]
    kv_cache, block_table = _place(bits, rows, case.page_size)

    problem: dict[str, Any] = {
        "q": q,
        "kv_cache": kv_cache,
        "cache_seqlens": np.array(case.prefixes, dtype=np.int32),
        "tree_mask": _ancestor_words(parents, counts),
        "sm_scale": np.float64(SM_SCALE),
        "kv_lora_rank": np.int32(KV_LORA_RANK),
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files of all cases."""
    parser = argparse.ArgumentParser(description="Generate the reference files of verify_attention.")
    beside = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=beside, metavar="DIR", help="folder; default: beside this script")
    folder: Path = parser.parse_args(arguments).out
    folder.mkdir(parents=True, exist_ok=True)
    for case in track(CASES, description="Reference files"):
        kdtr.write(folder / f"{case.name}.kdtr", build(case))


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
