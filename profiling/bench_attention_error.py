"""Errors of attention against the number of keys, the spread of the logits and the dtype, on this GPU, as CSV.

``python profiling/bench_attention_error.py --out profiling/results/nvidia-h200`` writes attention_error.csv there: the
relative Frobenius error of out against float64, with the bound that docs/numerics.md derives for it in float32; in 16
bits it is twice the error of casting the exact result. One request, 8 heads, 9 nodes, D = 576.

- Keys: logits of standard deviation 2 nats, and in float32 also 0.02, where the softmax is all but flat.
- Logits: `SWEPT_KEYS` keys, spreads from flat to a softmax that picks single keys.

Variants: three_phase (as far as its score row goes), flash, in 16 bits mma and wgmma, PyTorch's eager attention, the
Triton kernel of the other benchmark, and, in float32, `naive`: kernels of this script that add up each sum one term
after the other, as the formula reads. max_ulp is max_abs in units in the last place, which are as large as the spacing
of the output dtype's numbers at the largest absolute value of the exact out: rounding that result is half a unit at
most.

Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import peers
from bench_verify_attention import EVEN, WAYS, Case, Gpu, bound_to, bounds, planned, short, takes
from harness import MACHINE, Job, Row, note_of, spoil

import ddtree_numba as dd

import numpy as np  # isort: skip  (numba.cuda follows the package, which chooses the backend)
from numba import cuda  # isort: skip
from numba.core.errors import NumbaPerformanceWarning  # isort: skip

NUM_HEADS, NUM_NODES = 8, 9
KEYS = (
    *(16, 32, 64, 97, 128, 256, 512, 1000, 1024, 2048, 4096, 4097, 8192, 16384, 20001),
    *(32768, 50001, 65536, 100003, 131072),
)  # of the longest row: prefix and tree
FEW_KEYS = (64, 512, 4096)  # with --quick
LOGIT_STDS = (2.0, 0.02)
SWEPT_KEYS = 4097  # of the sweep over the logits; one of KEYS, so that both sweeps share its rows of LOGIT_STDS
SWEPT_STDS = (0.1, 0.5, 1.0, 4.0, 8.0, 16.0, 32.0)
FEW_STDS = (0.02, 0.5, 8.0)
HALVES = ("bfloat16", "float16")
MOST_KEYS = 8192  # of 16 bits: up to here flash takes one set of tiles, and is compiled once
VARIANTS = ("three_phase", "flash", "mma", "wgmma", "torch_eager", "triton", "naive")
MANTISSA = {"float32": 23, "float16": 10, "bfloat16": 7}  # bits behind the leading one
THREADS = 64
ZERO = np.float32(0.0)
NEG_INF = np.float32(-np.inf)

FIELDS = (
    *("keys", "logit_std", "logit_magnitude", "dtype", "variant", "tiles", "rel_frobenius", "max_abs", "max_ulp"),
    *("lse_error", "bound", "right", "note", *MACHINE),
)


# One long sum for each number, as the formula reads


@cuda.jit
def naive_scores(q, rows, sees, sm_scale, scores):
    """A thread a (row, key): the dot product, one column after the other. Arrays of one request."""
    key = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    i, h = cuda.blockIdx.y // q.shape[1], cuda.blockIdx.y % q.shape[1]
    num_keys, num_nodes = rows.shape[0], q.shape[0]
    if key < num_keys:
        s = NEG_INF
        if key < num_keys - num_nodes or sees[i, key - num_keys + num_nodes]:
            s = ZERO
            for c in range(rows.shape[1]):
                s += q[i, h, c] * rows[key, c]
            s *= sm_scale
        scores[i, h, key] = s


@cuda.jit
def naive_output(scores, rows, out, lse):
    """A thread a (row, column): maximum, sum of the exponentials and weighted sum, one key after the other."""
    d = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    i, h = cuda.blockIdx.y // out.shape[1], cuda.blockIdx.y % out.shape[1]
    if d < out.shape[2]:
        m = NEG_INF
        for key in range(rows.shape[0]):
            m = max(m, scores[i, h, key])
        l = ZERO
        acc = ZERO
        for key in range(rows.shape[0]):
            p = math.exp(scores[i, h, key] - m)
            l += p
            acc += p * rows[key, d]
        out[i, h, d] = acc / l
        if d == 0:
            lse[i, h] = m + math.log(l)


def naive(q: Any, rows: Any, sees: Any, sm_scale: float, scores: Any, out: Any, lse: Any) -> tuple[Any, Any]:
    """Attention of one request by the two kernels; all nodes see at least one key."""
    blocks = q.shape[0] * q.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPerformanceWarning)  # of small grids
        naive_scores[(-(-rows.shape[0] // THREADS), blocks), THREADS](q, rows, sees, np.float32(sm_scale), scores)
        naive_output[(-(-out.shape[2] // THREADS), blocks), THREADS](scores, rows, out, lse)
    return out[None], lse[None]


def naive_bound(logit_magnitude: float, num_keys: int, head_dim: int) -> float:
    """As `three_phase.error_bound`: D additions and the scale in line; then num_keys, of values and of weights."""
    a_rounding = float(np.finfo(np.float32).eps) / 2.4
    in_logits = logit_magnitude * math.sqrt(head_dim + 1)
    in_exponentials = 2 * logit_magnitude + 2
    return a_rounding * math.hypot(in_logits, in_exponentials, math.sqrt(2 * num_keys))


# Measurements


def ulp(dtype: str, largest: float) -> float:
    """The spacing of a dtype's normal numbers at a value."""
    return math.ldexp(1.0, math.frexp(largest)[1] - 1 - MANTISSA[dtype])


def error_rows(gpu: Any, num_keys: int, logit_std: float, dtype: str = "float32") -> Iterator[Row]:
    """A row for each variant."""
    inputs = gpu.inputs(Case((1, NUM_HEADS, NUM_NODES, num_keys - NUM_NODES), dtype, logit_std))
    sm_scale = dd.KIMI_K2_SM_SCALE
    exact = gpu.exact(inputs, sm_scale)
    results = gpu.results(inputs)
    known: Row = {"keys": num_keys, "logit_std": f"{logit_std:g}", "logit_magnitude": f"{exact[2]:.4g}", "dtype": dtype}
    limits: dict[str, float] = bounds(gpu, exact, dtype, num_keys)
    limits["naive"] = naive_bound(exact[2], num_keys, inputs["q"].shape[3])
    last_place = ulp(dtype, gpu.largest(exact[0]))

    def make(variant: str) -> Callable[..., Any]:
        if variant in peers.PEERS:
            return partial(*unpacked(gpu.peer(variant, inputs, results, sm_scale)))
        if variant == "naive":
            given = (inputs[name][0] for name in ("q", "kv_cache", "tree_mask"))
            scores = gpu.scores(NUM_NODES, NUM_HEADS, num_keys)
            return partial(naive, *given, sm_scale, scores, results["out"][0], results["lse"][0])
        way = WAYS[variant, EVEN if variant in ("flash", "mma") else ""]
        return partial(*unpacked(bound_to(dd.verify_attention, inputs, results, sm_scale, **way)))

    for variant in VARIANTS:
        if variant == "three_phase" and not fits(num_keys):
            continue
        if variant == "naive" and dtype != "float32":
            continue
        if not (peers.takes if variant in peers.PEERS else takes)(variant, dtype):
            continue
        row: Row = {**known, "variant": variant, "right": True}
        try:
            with planned(None) as plans:
                call = make(variant)
                spoil(*results.values())
                found = gpu.errors(call(), exact[:2])
            row |= {name: f"{value:.3e}" for name, value in found.items()}
            row["max_ulp"] = f"{found['max_abs'] / last_place:.3f}"
            if plans:
                row["tiles"] = plans[0]
            if variant in limits:
                row["bound"] = f"{limits[variant]:.3e}"
                row["right"] = found["rel_frobenius"] <= limits[variant]
        except Exception as error:  # one row must not cost the others; it is not right, and the exit code says so
            row |= {"right": False, "note": short(note_of(error))}
        yield {**row, **gpu.machine()}


def unpacked(peer: peers.Peer) -> tuple[Any, ...]:
    """A call and what it is called with, one after the other."""
    return (peer.call, *peer.arrays)


def fits(num_keys: int) -> bool:
    """Whether three_phase has room for as many scores, here and on a GPU of compute capability 9.0."""
    return 4 * num_keys < 200 * 1024


class Errors(Gpu):
    """With room for the scores of `naive`."""

    def scores(self, *shape: int) -> Any:
        return self.torch.empty(shape, device=self.place)


def problems(quick: bool) -> list[tuple[int, float, str]]:
    """Keys, spread of the logits and dtype of what is measured."""
    keys = FEW_KEYS if quick else KEYS
    found = [(n, std, "float32") for std in LOGIT_STDS for n in keys if not quick or std == LOGIT_STDS[0]]
    halves = HALVES[:1] if quick else HALVES
    found += [(n, LOGIT_STDS[0], dtype) for dtype in halves for n in keys if n <= MOST_KEYS]
    swept, stds = (FEW_KEYS[1], FEW_STDS) if quick else (SWEPT_KEYS, SWEPT_STDS)
    found += [(swept, std, dtype) for dtype in ("float32", *halves) for std in stds]
    return found + ([] if quick else [(swept, LOGIT_STDS[1], dtype) for dtype in halves])


def jobs(gpu: Any, quick: bool) -> list[Job]:
    """The measurements one after the other."""
    return [partial(error_rows, gpu, *problem) for problem in problems(quick)]


def line(row: Row) -> str:
    """A row for people."""
    found = f"rel {row.get('rel_frobenius', '-'):9} (bound {row.get('bound', '-'):9}) {row.get('max_ulp', '-'):>8} ulp"
    text = f"{row.get('keys', ''):>7} std {row.get('logit_std', ''):4} {row.get('dtype', ''):9}{row['variant']:12}"
    text += f"{row.get('tiles', ''):6} {found} lse {row.get('lse_error', '-')}"
    return f"{text} {row.get('note', '')}{'' if row['right'] else '  WRONG'}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    count = lambda quick: len(problems(quick))  # noqa: E731
    names = tuple(peers.PEERS)
    return harness.main(__doc__, "attention_error", FIELDS, jobs, count, line, Errors, arguments, names)


if __name__ == "__main__":
    sys.exit(main())
