"""Times of merge_states on this GPU beside PyTorch and a Triton kernel, as CSV.

``python profiling/bench_merge_states.py --out profiling/results/nvidia-h200`` writes merge_states.csv there. Each
result is checked first against float64; what is wrong is not timed, and the exit code says so. Times are those of
bench_trees.py: microseconds is one call with L2 flushed, graph_us a call's part of a graph with nothing flushed,
host_us the wall time until a call returns. gb_per_s counts what must move, two states read and one written, over
microseconds.

Needs PyTorch and nvidia-ml-py; Triton, which comes with PyTorch, is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from a plain checkout

import bench_trees
from bench_trees import MACHINE, TIMES, Row, commit_here, measured, spoil
from rich.console import Console
from rich.progress import track
from tables import write_rows

import ddtree_numba as dd
from ddtree_numba.device import runtime

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

REPEATS = 30

# [T, H, R], dtype, layout. The first two are a batch of 32 trees of 9 nodes with the heads of a DeepSeek class model.
SIZES = (
    ((288, 64, 512), "float32", "C order"),
    ((288, 64, 512), "bfloat16", "C order"),
    ((288, 64, 512), "float16", "C order"),
    ((288, 64, 512), "bfloat16", "lse [H, T]"),
    ((288, 64, 512), "bfloat16", "in place"),
    ((9, 64, 512), "float32", "C order"),
    ((9, 64, 512), "bfloat16", "C order"),
    ((4096, 64, 512), "float32", "C order"),
    ((4096, 64, 512), "bfloat16", "C order"),
    ((2048, 32, 128), "bfloat16", "C order"),
    ((288, 64, 509), "bfloat16", "C order"),
)
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of the result, relative
EPS = 2.0**-23
# Of max(|a|, |b|), and of max(1, |lse|): what docs/merge_states.md derives for ours; more for fast exponentials.
BOUNDS = {"merge_states": (4 * EPS, 2 * EPS)}
PEER_BOUNDS = (32 * EPS, 16 * EPS)

FIELDS = (
    *("operator", "T", "H", "R", "dtype", "layout", "variant", "checked", "right", *TIMES),
    *("gb_per_s", "repeats", "note", "triton", *MACHINE),
)


def bytes_moved(shape: tuple[int, int, int], dtype: str) -> int:
    """Two states read and one written."""
    t, h, r = shape
    return 3 * t * h * (r * ITEMSIZE[dtype] + 4)


def composite(torch: Any, a: Any, l_a: Any, b: Any, l_b: Any) -> tuple[Any, Any]:
    """The definition in PyTorch, in float32."""
    lse = torch.logaddexp(l_a, l_b)
    w_a, w_b = torch.exp(l_a - lse)[..., None], torch.exp(l_b - lse)[..., None]
    return (w_a * a.float() + w_b * b.float()).to(a.dtype), lse


if triton is not None:

    @triton.jit
    def triton_kernel(a, l_a, b, l_b, out, lse, R: tl.constexpr, BLOCK: tl.constexpr):
        """A program a row, in C order."""
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        inside = column < R
        x = tl.load(a + row * R + column, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(b + row * R + column, mask=inside, other=0.0).to(tl.float32)
        of_a, of_b = tl.load(l_a + row), tl.load(l_b + row)
        m = tl.maximum(of_a, of_b)
        e_a, e_b = tl.exp(of_a - m), tl.exp(of_b - m)
        s = e_a + e_b
        tl.store(out + row * R + column, ((e_a / s) * x + (e_b / s) * y).to(out.dtype.element_ty), mask=inside)
        tl.store(lse + row, m + tl.log(s))


class Gpu(bench_trees.Gpu):
    """All that needs PyTorch and a GPU. Tests put NumPy in its place."""

    def states(self, shape: tuple[int, int, int], dtype: str, layout: str) -> tuple[Any, Any, Any, Any]:
        """Random states, the same ones for the same shape."""
        torch = self.torch
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*sizes: int) -> Any:
            return torch.randn(sizes, device="cuda", generator=generator)

        outs = [normal(*shape).to(getattr(torch, dtype)) for _ in range(2)]
        lses = [3 * normal(*shape[:2]) for _ in range(2)]
        if layout == "lse [H, T]":
            lses = [x.t().contiguous().t() for x in lses]
        return outs[0], lses[0], outs[1], lses[1]

    def results(self, states: tuple[Any, Any, Any, Any]) -> tuple[Any, Any]:
        """Arrays for the results, in C order."""
        torch = self.torch
        return torch.empty_like(states[0]), torch.empty(states[1].shape, device="cuda")

    def right(self, found: tuple[Any, Any], states: Any, dtype: str, bounds: tuple[float, float]) -> bool:
        """Whether results are within bounds of float64, piece by piece for the memory's sake."""
        torch = self.torch
        for n in range(0, len(states[0]), 256):
            out, lse, a, l_a, b, l_b = (x[n : n + 256].double() for x in (*found, *states))
            w = torch.sigmoid(l_a - l_b)[..., None]
            exact = w * a + (1 - w) * b
            bound = bounds[0] * torch.maximum(a.abs(), b.abs()) + ROUNDING[dtype] * exact.abs() + 2.0**-24
            exact_lse = torch.logaddexp(l_a, l_b)
            near = bool(((out - exact).abs() <= bound).all())  # a NaN is not
            near = near and bool(((lse - exact_lse).abs() <= bounds[1] * exact_lse.abs().clamp(min=1)).all())
            if not near:
                return False
        return True

    def peers(self, states: Any, results: Any) -> dict[str, Callable[[], tuple[Any, Any]]]:
        """PyTorch as it is and compiled, and a kernel in Triton."""
        torch = self.torch
        torch.compiler.reset()  # each size is compiled anew, and PyTorch allows only so many
        compiled = torch.compile(lambda *given: composite(torch, *given), fullgraph=True, dynamic=False)
        found: dict[str, Callable[[], tuple[Any, Any]]] = {
            "torch_eager": lambda: composite(torch, *states),
            "torch_compile": lambda: compiled(*states),
        }
        if triton is not None and all(x.is_contiguous() for x in states):
            rows, columns = states[1].numel(), states[0].shape[-1]

            def by_triton() -> tuple[Any, Any]:
                triton_kernel[(rows,)](*states, *results, R=columns, BLOCK=triton.next_power_of_2(columns), num_warps=2)
                return results

            found["triton"] = by_triton
        return found


def merge_rows(gpu: Any, shape: tuple[int, int, int], dtype: str, layout: str) -> Iterator[Row]:
    """Rows of one size: ours, then the peers. In place there is ours alone."""
    states = gpu.states(shape, dtype, layout)
    results = gpu.results(states)
    known: Row = {"operator": "merge_states", "dtype": dtype, "layout": layout, "checked": "all elements"}
    known |= dict(zip("THR", shape, strict=True)) | {"triton": triton.__version__ if triton is not None else ""}

    def ours() -> Any:
        return dd.merge_states(*states, out=results[0], lse=results[1])

    in_place = layout == "in place"
    calls = {"merge_states": ours, **({} if in_place else gpu.peers(states, results))}
    for variant, call in calls.items():

        def right(variant: str = variant, call: Callable[[], Any] = call) -> bool:
            spoil(*results)
            return gpu.right(call(), states, dtype, BOUNDS.get(variant, PEER_BOUNDS))

        def right_in_place() -> bool:
            given = gpu.states(shape, dtype, layout)
            return gpu.right(dd.merge_states(*given, out=given[0], lse=given[1]), states, dtype, BOUNDS["merge_states"])

        def again_in_place() -> Any:  # the state grows with each call; how long it takes does not depend on that
            return dd.merge_states(*states, out=states[0], lse=states[1])

        row = {**known, "variant": variant}
        one, two = (right_in_place, again_in_place) if in_place else (right, call)
        row = measured(row, gpu, one, two, gpu.time)
        if "microseconds" in row:
            row["gb_per_s"] = f"{bytes_moved(shape, dtype) / float(row['microseconds']) / 1e3:.0f}"
        yield row


def line(row: Row) -> str:
    """A row for people."""
    sizes = ",".join(str(row[name]) for name in "THR")
    text = f"{sizes:14} {row['dtype']:9} {row['layout']:11} {row['variant']:14}"
    text += " ".join(f"{row.get(name, ''):>9}" for name in (*TIMES, "gb_per_s"))
    return f"{text} {row.get('note', '')}{'' if row['right'] else '  WRONG'}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, print; 1 when a result of ours was wrong, 2 when nothing can be measured here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("profiling/results/local"), help="folder for the CSV")
    parser.add_argument("--commit", help="commit that is measured; default: what git says")
    parser.add_argument("--quick", action="store_true", help="two sizes, to merge_states_quick.csv")
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
    sizes = SIZES[:2] if options.quick else SIZES
    rows = [
        row
        for size in track(sizes, "measuring", console=Console(stderr=True))
        for row in merge_rows(gpu, *size)
    ]  # fmt: skip
    write_rows(options.out / ("merge_states_quick.csv" if options.quick else "merge_states.csv"), rows, FIELDS)
    print(f"{'T,H,R':51}" + " ".join(f"{name:>9.9}" for name in (*TIMES, "gb_per_s")))
    for row in rows:
        print(line(row))
    return 0 if all(row["right"] for row in rows if row["variant"] == "merge_states") else 1


if __name__ == "__main__":
    sys.exit(main())
