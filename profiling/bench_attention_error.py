"""Errors of attention against the number of keys, on this GPU, as CSV.

``python profiling/bench_attention_error.py --out profiling/results/nvidia-h200`` writes attention_error.csv there: the
relative Frobenius error of out against float64, in float32, with the bound that docs/numerics.md derives for it. One
request, 8 heads, 9 nodes, D = 576; logits of standard deviation 2 nats, and 0.02, where the softmax is all but flat.
Variants: three_phase (as far as its score row goes), flash, PyTorch's eager attention, and `naive`: kernels of this
script that add up each sum one term after the other, as the formula reads.

Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from a plain checkout

from bench_trees import MACHINE, Row, commit_here, spoil
from bench_verify_attention import EVEN, WAYS, Case, Gpu, bounds, planned
from rich.console import Console
from rich.progress import track
from tables import write_rows

import ddtree_numba as dd
from ddtree_numba.device import runtime

import numpy as np  # isort: skip  (numba.cuda follows the package, which chooses the backend)
from numba import cuda  # isort: skip
from numba.core.errors import NumbaPerformanceWarning  # isort: skip

NUM_HEADS, NUM_NODES = 8, 9
KEYS = (
    *(16, 32, 64, 97, 128, 256, 512, 1000, 1024, 2048, 4096, 4097, 8192, 16384, 20001),
    *(32768, 50001, 65536, 100003, 131072),
)  # of the longest row: prefix and tree
LOGIT_STDS = (2.0, 0.02)
VARIANTS = ("three_phase", "flash", "torch_eager", "naive")
THREADS = 64
ZERO = np.float32(0.0)
NEG_INF = np.float32(-np.inf)

FIELDS = (
    *("keys", "logit_std", "logit_magnitude", "variant", "tiles", "rel_frobenius", "max_abs", "lse_error", "bound"),
    *("right", "note", *MACHINE),
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


def error_rows(gpu: Any, num_keys: int, logit_std: float) -> Iterator[Row]:
    """A row for each variant."""
    inputs = gpu.inputs(Case((1, NUM_HEADS, NUM_NODES, num_keys - NUM_NODES), "float32", logit_std))
    exact = gpu.exact(inputs, dd.KIMI_K2_SM_SCALE)
    results = gpu.results(inputs)
    known: Row = {"keys": num_keys, "logit_std": f"{logit_std:g}", "logit_magnitude": f"{exact[2]:.4g}"}
    limits: dict[str, float] = bounds(gpu, exact, "float32", num_keys)
    limits["naive"] = naive_bound(exact[2], num_keys, inputs["q"].shape[3])

    def ours(variant: str) -> Any:
        way = WAYS[variant, EVEN if variant == "flash" else ""]
        given = {**inputs, **results, "sm_scale": dd.KIMI_K2_SM_SCALE, "kv_lora_rank": results["out"].shape[3]}
        return dd.verify_attention(**given, **way)

    calls: dict[str, Callable[[], Any]] = {
        "three_phase": lambda: ours("three_phase"),
        "flash": lambda: ours("flash"),
        "torch_eager": gpu.eager(inputs, dd.KIMI_K2_SM_SCALE),
        "naive": lambda: naive(
            *(inputs[name][0] for name in ("q", "kv_cache", "tree_mask")),
            dd.KIMI_K2_SM_SCALE,
            gpu.scores(NUM_NODES, NUM_HEADS, num_keys),
            results["out"][0],
            results["lse"][0],
        ),
    }
    for variant, call in calls.items():
        if variant == "three_phase" and not fits(num_keys):
            continue
        row: Row = {**known, "variant": variant, "right": True}
        spoil(*results.values())
        try:
            with planned(None) as plans:
                found = gpu.errors(call(), exact[:2])
            row |= {name: f"{value:.3e}" for name, value in found.items()}
            if plans:
                row["tiles"] = f"{plans[0].shape.tiles.rows}x{plans[0].shape.tiles.keys}"
            if variant in limits:
                row["bound"] = f"{limits[variant]:.3e}"
                row["right"] = found["rel_frobenius"] <= limits[variant]
        except Exception as error:  # one row must not cost the others; it is not right, and the exit code says so
            row |= {"right": False, "note": f"{type(error).__name__}: {error}".replace("\n", " ")}
        yield {**row, **gpu.machine()}


def fits(num_keys: int) -> bool:
    """Whether three_phase has room for as many scores, here and on a GPU of compute capability 9.0."""
    return 4 * num_keys < 200 * 1024


class Errors(Gpu):
    """With room for the scores of `naive`."""

    def scores(self, *shape: int) -> Any:
        return self.torch.empty(shape, device=self.place)


def line(row: Row) -> str:
    """A row for people."""
    found = f"rel {row.get('rel_frobenius', '-')} (bound {row.get('bound', '-'):9}) lse {row.get('lse_error', '-')}"
    text = f"{row['keys']:>7} std {row['logit_std']:4} {row['variant']:12}{row.get('tiles', ''):6} {found}"
    return f"{text} {row.get('note', '')}{'' if row['right'] else '  WRONG'}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, print; 1 when an error was above its bound, 2 when nothing can be measured here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("profiling/results/local"), help="folder for the CSV")
    parser.add_argument("--commit", help="commit that is measured; default: what git says")
    options = parser.parse_args(arguments)
    if runtime.SIMULATOR:
        print(f"this measures a GPU, and there is none: {runtime.REASON}", file=sys.stderr)
        return 2
    try:
        gpu = Errors(options.commit or commit_here(), 1)
    except ImportError as error:
        needs = "this compares with PyTorch and reads the clocks; pip install torch nvidia-ml-py"
        print(f"{error}: {needs}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"this measures a GPU, and there is none: {error}", file=sys.stderr)
        return 2
    problems = [(num_keys, logit_std) for logit_std in LOGIT_STDS for num_keys in KEYS]
    rows: list[Row] = []
    for problem in track(problems, "measuring", console=Console(stderr=True)):
        for row in error_rows(gpu, *problem):
            print(line(row), flush=True)
            rows.append(row)
    write_rows(options.out / "attention_error.csv", rows, FIELDS)
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
