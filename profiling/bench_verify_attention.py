"""Errors and times of verify_attention beside PyTorch's eager attention, on this GPU, as CSV.

``python profiling/bench_verify_attention.py --out profiling/results/nvidia-h200`` writes verify_attention.csv there.
Each row is checked against float64 first; what is wrong is not timed, and the exit code says so. microseconds is the
device time of one call by CUDA events, L2 flushed before each, median of `REPEATS`; spread_microseconds their
interquartile range. Columns of `flash`:

- tiles: rows and keys of its tiles, as it chose them. The variant flash_small has nothing but the smaller ones.
- splits: "even" is the default, even parts of all work; else num_splits, or the keys of a part with batch_invariant.

Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from a plain checkout

import bench_trees
import numpy as np
from bench_trees import MACHINE, Row, commit_here, measured, spoil
from rich.console import Console
from rich.progress import track
from tables import write_rows

import ddtree_numba as dd
from ddtree_numba import kdtr
from ddtree_numba.attention import flash, three_phase
from ddtree_numba.check import LSE_BOUND, reference_files
from ddtree_numba.device import runtime

REPEATS = 30
KV_LORA_RANK, HEAD_DIM = 512, 576  # reference files of other widths are left to `python -m ddtree_numba check`
MOST_SCORES = 1 << 27  # of a piece of the float64 reference: 1 GB
THREE_PHASE_FLOPS = 1e11  # the readable variant is measured up to these
RAGGED = (100, 16000, 350, 8000, 1000, 12000, 2048, 600, 16000, 100, 4096, 230, 15000, 1500, 512, 6000)  # prefixes

EVEN, CHUNKS = "even", f"{flash.CHUNK} keys"
# Variant and splits of a row, and what the call is given.
WAYS: dict[tuple[str, str], dict[str, Any]] = {
    ("three_phase", ""): {"variant": "three_phase"},
    ("flash", EVEN): {"variant": "flash"},
    ("flash", "1"): {"variant": "flash", "num_splits": 1},
    ("flash", CHUNKS): {"variant": "flash", "batch_invariant": True},
    ("flash_small", EVEN): {"variant": "flash"},
    ("torch_eager", ""): {},
}
USUAL = (("three_phase", ""), ("flash", EVEN), ("flash_small", EVEN), ("torch_eager", ""))
IN_PARTS = (("flash", EVEN), ("flash", "1"), ("flash", CHUNKS), ("torch_eager", ""))
BESIDE_PEER = (("flash", EVEN), ("torch_eager", ""))

Way = tuple[str, str]


class Case(NamedTuple):
    """Random inputs: B, H, Q, the longest prefix; dtype; standard deviation of the logits in nats; what is measured."""

    shape: tuple[int, int, int, int]
    dtype: str
    logit_std: float = 2.0
    ways: tuple[Way, ...] = USUAL
    prefixes: tuple[int, ...] = ()  # of the requests, where they differ

    @property
    def name(self) -> str:
        return f"logit std {self.logit_std:g}{', ragged' * bool(self.prefixes)}"


CASES = (
    *(
        Case(shape, dtype)
        for shape in ((1, 64, 17, 2048), (8, 64, 9, 2048), (64, 16, 33, 1024), (2, 8, 9, 37), (1, 8, 9, 40000))
        for dtype in ("float32", "bfloat16")
    ),
    Case((1, 64, 17, 131072), "float32"),
    Case((1, 64, 17, 131072), "bfloat16", ways=BESIDE_PEER),
    Case((1, 64, 65, 32768), "float32", ways=BESIDE_PEER),
    Case((32, 64, 9, 8192), "bfloat16", ways=BESIDE_PEER),
    # Parts of fixed size, in a batch of equal lengths and in one of very different ones.
    Case((8, 64, 9, 2048), "float32", ways=(("flash", "1"), ("flash", CHUNKS))),
    Case((len(RAGGED), 64, 9, max(RAGGED)), "float32", ways=IN_PARTS, prefixes=RAGGED),
    # The same kernels on inputs of small logit spread, where errors in the logits all but vanish.
    Case((2, 8, 9, 37), "float32", logit_std=0.02),
)
QUICK = (Case((8, 64, 9, 2048), "float32"), Case((2, 8, 9, 37), "float32"))

FIELDS = (
    *("case", "B", "H", "Q", "prefix", "dtype", "variant", "splits", "tiles", "rel_frobenius", "max_abs", "lse_error"),
    *("bound", "right", "microseconds", "spread_microseconds", "tflops", "repeats", "note", *MACHINE),
)


def flops(num_heads: int, num_nodes: int, prefixes: list[int]) -> int:
    """Multiplications and additions of all nodes over prefix and tree; masked tree keys are counted too."""
    return 2 * num_nodes * num_heads * sum(n + num_nodes for n in prefixes) * (HEAD_DIM + KV_LORA_RANK)


def random_parents(batch: int, num_nodes: int) -> np.ndarray:
    """Trees whose nodes hang on one of the six nodes before them."""
    random = np.random.default_rng(0)
    parents = np.full((batch, num_nodes), -1)
    for i in range(1, num_nodes):
        parents[:, i] = random.integers(max(0, i - 6), i, size=batch)
    return parents


class Gpu(bench_trees.Gpu):
    """All that needs PyTorch and a GPU. Tests put NumPy in its place."""

    place = "cuda"

    def __init__(self, commit: str, repeats: int) -> None:
        super().__init__(commit, repeats)
        self.torch.backends.cuda.matmul.allow_tf32 = False

    def inputs(self, case: Case) -> dict[str, Any]:
        """Random queries and rows with a given spread of the logits, and random trees; the same ones each time."""
        torch = self.torch
        (batch, num_heads, num_nodes, prefix), dtype = case.shape, getattr(torch, case.dtype)
        generator = torch.Generator(self.place).manual_seed(0)

        def normal(*sizes: int) -> Any:
            return torch.randn(sizes, device=self.place, generator=generator)

        q = normal(batch, num_nodes, num_heads, HEAD_DIM) * (case.logit_std / (dd.KIMI_K2_SM_SCALE * HEAD_DIM**0.5))
        lengths = case.prefixes or (prefix,) * batch
        return {
            "q": q.to(dtype),
            "kv_cache": normal(batch, prefix + num_nodes, HEAD_DIM).to(dtype),
            "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=self.place),
            "tree_mask": torch.from_numpy(dd.mask_from_parents(random_parents(batch, num_nodes))).to(self.place),
        }

    def from_file(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a reference file; the mask as bool, as in all other rows."""
        mask = dd.unpack_mask(tensors["tree_mask"], tensors["q"].shape[1])
        given = {name: tensors[name] for name in ("q", "kv_cache", "cache_seqlens", "block_table") if name in tensors}
        return {name: self.to_gpu(x) for name, x in (given | {"tree_mask": mask}).items()}

    def to_gpu(self, x: Any) -> Any:
        """A NumPy array on the GPU."""
        if x.dtype.name == "bfloat16":
            return self.to_gpu(x.view(np.uint16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(np.array(x)).to(self.place)

    def results(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arrays for the results of verify_attention."""
        torch, q = self.torch, inputs["q"]
        out = torch.empty((*q.shape[:3], KV_LORA_RANK), dtype=q.dtype, device=self.place)
        return {"out": out, "lse": torch.empty(q.shape[:3], device=self.place)}

    def dense(self, inputs: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
        """Queries, cache and mask of the same problem with the live rows alone: one batch, or a request each."""
        q, cache, mask, table = (inputs.get(name) for name in ("q", "kv_cache", "tree_mask", "block_table"))
        lengths, num_nodes = inputs["cache_seqlens"].tolist(), q.shape[1]
        if table is None and len(set(lengths)) == 1:
            return [(q, cache[:, : lengths[0] + num_nodes], mask)]
        parts = []
        for b, length in enumerate(lengths):
            one, live = slice(b, b + 1), length + num_nodes
            if table is None:
                rows = cache[one, :live]
            else:
                rows = cache[table[b, : -(-live // cache.shape[1])].long()].flatten(0, 1)[None, :live]
            parts.append((q[one], rows, mask[one]))
        return parts

    def eager(self, inputs: dict[str, Any], sm_scale: float) -> Callable[[], tuple[Any, Any]]:
        """What PyTorch computes operator by operator."""
        torch, parts = self.torch, self.dense(inputs)

        def call() -> tuple[Any, Any]:
            results = [self.eager_dense(*part, sm_scale) for part in parts]
            if len(results) == 1:
                return results[0]
            return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])

        return call

    def eager_dense(self, q: Any, cache: Any, mask: Any, sm_scale: float) -> tuple[Any, Any]:
        """One batch of equal lengths; a node that sees nothing gets 0 and -inf."""
        torch, (batch, num_nodes, num_heads, head_dim) = self.torch, q.shape
        scores = torch.matmul(q.reshape(batch, -1, head_dim), cache.transpose(1, 2)).mul_(sm_scale)
        scores = scores.view(batch, num_nodes, num_heads, -1)
        scores[..., -num_nodes:].masked_fill_(~mask[:, :, None, :], float("-inf"))
        lse = torch.logsumexp(scores, -1)
        p = torch.softmax(scores, -1).masked_fill_(lse[..., None] == float("-inf"), 0)
        out = torch.matmul(p.view(batch, num_nodes * num_heads, -1), cache[..., :KV_LORA_RANK])
        return out.view(*q.shape[:3], -1), lse

    def exact(self, inputs: dict[str, Any], sm_scale: float) -> tuple[Any, Any, float]:
        """out and lse in float64, and the logit_magnitude of the error bounds; piece by piece for the memory's sake."""
        torch, shape = self.torch, inputs["q"].shape
        found: list[tuple[Any, Any, Any]] = []
        for q, cache, mask in self.dense(inputs):
            for b in range(len(q)):
                queries, keys = q[b].flatten(0, 1).double(), cache[b].double()
                sees = mask[b].repeat_interleave(shape[2], 0)
                step = max(1, MOST_SCORES // len(keys))
                for n in range(0, len(queries), step):
                    found.append(self.exact_rows(queries[n : n + step], keys, sees[n : n + step], sm_scale))
        out, lse, squares = (torch.cat(parts) for parts in zip(*found, strict=True))
        magnitude = float(squares[lse > float("-inf")].mean().sqrt())
        return out.view(*shape[:3], -1), lse.view(shape[:3]), magnitude

    def exact_rows(self, q: Any, keys: Any, sees: Any, sm_scale: float) -> tuple[Any, Any, Any]:
        """out, lse and squared logit magnitude of rows of one request."""
        torch = self.torch
        scores = (q @ keys.T).mul_(sm_scale)
        walks = (q.square() @ keys.square().T).mul_(sm_scale**2)
        scores[:, -sees.shape[1] :].masked_fill_(~sees, float("-inf"))
        lse = torch.logsumexp(scores, -1)
        p = torch.softmax(scores, -1).masked_fill_(lse[:, None] == float("-inf"), 0)
        squares = torch.where(p > 0, p * torch.maximum(scores.square_(), walks), 0.0).sum(-1)
        return p @ keys[:, :KV_LORA_RANK], lse, squares

    def errors(self, found: tuple[Any, Any], exact: tuple[Any, Any]) -> dict[str, float]:
        """Relative Frobenius and maximum error of out, and of lse relative to max(1, |lse|)."""
        torch, (out, lse), (exact_out, exact_lse) = self.torch, found, exact
        difference = out.double() - exact_out
        of_lse = torch.where(lse == exact_lse, 0.0, (lse.double() - exact_lse).abs() / exact_lse.abs().clamp(min=1))
        return {
            "rel_frobenius": float(difference.norm() / exact_out.norm()),
            "max_abs": float(difference.abs().max()),
            "lse_error": float(of_lse.max()),
        }

    def cast(self, x: Any, dtype: str) -> Any:
        """Rounded to a dtype."""
        return x.to(getattr(self.torch, dtype))

    def time(self, call: Callable[[], Any], calls_in_graph: int = 1) -> dict[str, str]:
        """Device time of a call alone."""
        median, spread = self.alone(call)
        return {"microseconds": f"{median:.1f}", "spread_microseconds": f"{spread:.1f}"}


@contextmanager
def planned(tiles: tuple[Any, ...] | None) -> Iterator[list[Any]]:
    """The plans of flash that are made meanwhile; it has these tiles to choose from, or its own."""
    kept, plans = (flash.TILES, flash.make_plan), []

    def noted(*args: Any, **kwargs: Any) -> Any:
        plans.append(kept[1](*args, **kwargs))
        return plans[-1]

    flash.TILES, flash.make_plan = tiles or kept[0], noted
    try:
        yield plans
    finally:
        flash.TILES, flash.make_plan = kept


def bounds(gpu: Any, exact: tuple[Any, Any, float], dtype: str, num_keys: int) -> dict[str, float]:
    """What the error of each variant is held to: the derived bound, or twice the error of casting the exact result."""
    if dtype != "float32":
        cast = 2 * gpu.errors((gpu.cast(exact[0], dtype), exact[1]), exact[:2])["rel_frobenius"]
        return {"three_phase": cast, "flash": cast}
    return {
        "three_phase": three_phase.error_bound(exact[2], num_keys, HEAD_DIM),
        "flash": flash.error_bound(exact[2], num_keys, HEAD_DIM),
    }


def rows_of(
    gpu: Any, name: str, inputs: dict[str, Any], dtype: str, ways: tuple[Way, ...], sm_scale: float, exact: Any
) -> Iterator[Row]:
    """Rows of one problem: errors first, then, if they are within bounds, times."""
    batch, num_nodes, num_heads, _ = inputs["q"].shape
    prefixes = [int(n) for n in inputs["cache_seqlens"]]
    work = flops(num_heads, num_nodes, prefixes)
    limits = bounds(gpu, exact, dtype, max(prefixes) + num_nodes)
    results = gpu.results(inputs)
    known: Row = {"case": name, "B": batch, "H": num_heads, "Q": num_nodes, "prefix": max(prefixes), "dtype": dtype}
    small, taken = f"{flash.SMALL.rows}x{flash.SMALL.keys}", ""
    for variant, splits in ways:
        if variant == "three_phase" and work > THREE_PHASE_FLOPS:
            continue
        if variant == "flash_small" and taken == small:
            continue  # flash itself has just taken these
        bound = limits["three_phase" if variant == "three_phase" else "flash"]
        row: Row = {**known, "variant": variant, "splits": splits, "bound": f"{bound:.3e}"}
        if variant == "torch_eager":
            call = gpu.eager(inputs, sm_scale)
        else:

            def call(way: dict[str, Any] = WAYS[variant, splits]) -> Any:
                return dd.verify_attention(**inputs, **results, sm_scale=sm_scale, kv_lora_rank=KV_LORA_RANK, **way)

        def right(
            row: Row = row, ours: bool = variant != "torch_eager", call: Callable[[], Any] = call, bound: float = bound
        ) -> bool:
            spoil(*results.values())
            errors = gpu.errors(call(), exact[:2])
            row.update({key: f"{value:.3e}" for key, value in errors.items()})
            return not ours or (errors["rel_frobenius"] <= bound and errors["lse_error"] <= LSE_BOUND)

        with planned((flash.SMALL,) if variant == "flash_small" else None) as plans:
            found = measured(row, gpu, right, call, gpu.time)  # with what `right` has put into the row
        if plans:
            found["tiles"] = f"{plans[0].shape.tiles.rows}x{plans[0].shape.tiles.keys}"
        if variant == "flash":
            taken = found.get("tiles", "")
        if "microseconds" in found:
            found["tflops"] = f"{work / float(found['microseconds']) / 1e6:.2f}"
        yield found


def reference_rows(gpu: Any, path: Path) -> Iterator[Row]:
    """Rows for one reference file, against the expected values stored in it."""
    tensors = kdtr.read(path)
    exact = gpu.to_gpu(tensors["out"]), gpu.to_gpu(tensors["lse"]), float(tensors["logit_magnitude"])
    ways = (("three_phase", ""), *BESIDE_PEER)
    dtype, sm_scale = tensors["q"].dtype.name, float(tensors["sm_scale"])
    yield from rows_of(gpu, path.stem, gpu.from_file(tensors), dtype, ways, sm_scale, exact)


def case_rows(gpu: Any, case: Case) -> Iterator[Row]:
    """Rows for one random problem, against float64."""
    inputs = gpu.inputs(case)
    exact = gpu.exact(inputs, dd.KIMI_K2_SM_SCALE)
    yield from rows_of(gpu, case.name, inputs, case.dtype, case.ways, dd.KIMI_K2_SM_SCALE, exact)


def files() -> list[Path]:
    """The reference files of these widths."""
    paths = reference_files("verify_attention")
    widths = {path: kdtr.read(path, verify=False) for path in paths}
    return [
        path
        for path, tensors in widths.items()
        if (int(tensors["kv_lora_rank"]), tensors["q"].shape[3]) == (KV_LORA_RANK, HEAD_DIM)
    ]


def jobs(gpu: Any, quick: bool) -> list[Callable[[], Iterator[Row]]]:
    """The measurements one after the other."""
    some, cases = (files()[:1], QUICK) if quick else (files(), CASES)
    return [
        *(lambda p=path: reference_rows(gpu, p) for path in some),
        *(lambda c=case: case_rows(gpu, c) for case in cases),
    ]


def line(row: Row) -> str:
    """A row for people."""
    shape = ",".join(f"{row[name]:>{width}}" for name, width in (("B", 3), ("H", 3), ("Q", 3), ("prefix", 6)))
    way = f"{row['variant']:12}{row['splits']:10}{row.get('tiles', ''):6}"
    found = f"rel {row.get('rel_frobenius', '-')} (bound {row['bound']}) lse {row.get('lse_error', '-')}"
    times = f"{row.get('microseconds', '-'):>9} us {row.get('tflops', '-'):>6} TFLOP/s"
    text = f"{row['case']:26}{shape} {row['dtype']:9}{way} {found} {times}"
    return f"{text} {row.get('note', '')}{'' if row['right'] else '  WRONG'}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, print; 1 when a result was wrong, 2 when nothing can be measured here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("profiling/results/local"), help="folder for the CSV")
    parser.add_argument("--commit", help="commit that is measured; default: what git says")
    parser.add_argument("--quick", action="store_true", help="three problems, to verify_attention_quick.csv")
    options = parser.parse_args(arguments)
    if runtime.SIMULATOR:
        print(f"this measures a GPU, and there is none: {runtime.REASON}", file=sys.stderr)
        return 2
    try:
        gpu = Gpu(options.commit or commit_here(), 5 if options.quick else REPEATS)
    except ImportError as error:
        needs = "this compares with PyTorch and reads the clocks; pip install torch nvidia-ml-py"
        print(f"{error}: {needs}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"this measures a GPU, and there is none: {error}", file=sys.stderr)
        return 2
    rows: list[Row] = []
    for job in track(jobs(gpu, options.quick), "measuring", console=Console(stderr=True)):
        for row in job():
            print(line(row), flush=True)
            rows.append(row)
    name = "verify_attention_quick.csv" if options.quick else "verify_attention.csv"
    write_rows(options.out / name, rows, FIELDS)
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
