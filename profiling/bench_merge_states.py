"""Times of merge_states on this GPU beside PyTorch and a Triton kernel, as CSV.

``python profiling/bench_merge_states.py --out profiling/results/nvidia-h200`` writes merge_states.csv there. Each
result is checked first against float64; what is wrong is not timed, and the exit code says so. The columns of time are
those of harness.py; gb_per_s counts what must move, two states read and one written, over microseconds.

Needs PyTorch and nvidia-ml-py; Triton, which comes with PyTorch, is left out where it is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
from harness import ITEMSIZE, MACHINE, TIMES, Job, Row, measured, spoil, with_rate

import ddtree_numba as dd
from ddtree_numba.attention import merge

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

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
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of the result, relative
EPS = 2.0**-23
# Of max(|a|, |b|), and of max(1, |lse|): what docs/merge_states.md derives for ours; more for fast exponentials.
BOUNDS = {"merge_states": (4 * EPS, 2 * EPS)}
PEER_BOUNDS = (32 * EPS, 16 * EPS)

FIELDS = (
    *("operator", "T", "H", "R", "dtype", "layout", "variant", "checked", "right", *TIMES),
    *("gb_per_s", "repeats", "note", *MACHINE),
)


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


class Gpu(harness.Gpu):
    """Inputs, exact results and peers. Tests put NumPy in its place."""

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

    def peers(self, states: Any, results: Any) -> dict[str, Callable[..., tuple[Any, Any]]]:
        """PyTorch as it is and compiled, and a kernel in Triton."""
        torch = self.torch
        torch.compiler.reset()  # each size is compiled anew, and PyTorch allows only so many
        compiled = torch.compile(lambda *states: composite(torch, *states), fullgraph=True, dynamic=False)
        found = {"torch_eager": partial(composite, torch), "torch_compile": compiled}
        if triton is not None and all(x.is_contiguous() for x in states):
            rows, columns = states[1].numel(), states[0].shape[-1]

            def by_triton(*states: Any) -> tuple[Any, Any]:
                triton_kernel[(rows,)](*states, *results, R=columns, BLOCK=triton.next_power_of_2(columns), num_warps=2)
                return results

            found["triton"] = by_triton
        return found


def merge_rows(
    gpu: Any,
    shape: tuple[int, int, int],
    dtype: str,
    layout: str,
    others: dict[str, Callable[..., Any]] | None = None,
) -> Iterator[Row]:
    """Rows of one size: ours and ``others`` of its signature, then the peers. In place there is ours alone."""
    states = gpu.states(shape, dtype, layout)
    results = gpu.results(states)
    known: Row = {"operator": "merge_states", "dtype": dtype, "layout": layout, "checked": "all elements"}
    known |= dict(zip("THR", shape, strict=True))
    if layout == "in place":

        def in_place(*given: Any) -> Any:  # how long it takes does not depend on how large the state has grown
            return dd.merge_states(*given, out=given[0], lse=given[1])

        calls = {"merge_states": in_place}
    else:
        ours = {"merge_states": dd.merge_states, **(others or {})}
        calls = {name: partial(operator, out=results[0], lse=results[1]) for name, operator in ours.items()}
        calls |= gpu.peers(states, results)
    for variant, call in calls.items():

        def right(variant: str = variant, call: Callable[..., Any] = call) -> bool:
            spoil(*results)
            return gpu.right(call(*gpu.states(shape, dtype, layout)), states, dtype, BOUNDS.get(variant, PEER_BOUNDS))

        row = measured({**known, "variant": variant}, gpu, right, call, partial(gpu.time, inputs=states))
        yield with_rate(row, "gb_per_s", merge.bytes_moved(shape[0] * shape[1], shape[2], ITEMSIZE[dtype]))


def jobs(gpu: Any, quick: bool) -> list[Job]:
    """The measurements one after the other."""
    return [lambda size=size: merge_rows(gpu, *size) for size in (SIZES[:2] if quick else SIZES)]


def rows_against(gpu: Any, name: str, call: Callable[..., Any], quick: bool) -> Iterator[Row]:
    """A kernel of someone else beside ours and the peers."""
    sizes = [size for size in SIZES if size[2] == "C order"]
    for size in sizes[: 2 if quick else None]:
        yield from merge_rows(gpu, *size, {name: call})


def line(row: Row) -> str:
    """A row for people."""
    sizes = ",".join(str(row.get(name, "")) for name in "THR")
    return f"{sizes:14} {row.get('dtype', ''):9} {row.get('layout', ''):11} {row['variant']:14}{harness.times_of(row)}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    count = lambda quick: len(jobs(None, quick))  # noqa: E731
    peers = ("torch_eager", "torch_compile", "triton")
    return harness.main(__doc__, "merge_states", FIELDS, jobs, count, line, Gpu, arguments, peers)


if __name__ == "__main__":
    sys.exit(main())
