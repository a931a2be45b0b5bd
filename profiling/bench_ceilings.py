"""What this GPU reaches at most: a copy within its memory, and matrix products, as CSV.

``python profiling/bench_ceilings.py --out profiling/results/nvidia-h200`` writes ceilings.csv there, the roofs under
which the other benchmarks' GB/s and TFLOP/s stand: copies by PyTorch, and products of square matrices of random numbers
by cuBLAS, in bfloat16 on tensor cores and in float32 without them (no TF32). Each result is checked first; what is
wrong is not timed, and the exit code says so. gb_per_s counts bytes read and written, tflops multiplications and
additions, of one call alone (microseconds); sustained_gb_per_s and sustained_tflops are those of a second of calls,
which the power limit slows down. The other columns are those of harness.py.

Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import harness
from harness import MACHINE, TIMES, Job, Row, measured, spoil, with_rate

COPY_BYTES = 1 << 30
SIZE = 8192
# Relative Frobenius error: the rounding of the result; 8192 float32 additions, far below what TF32 would leave (3e-4).
BOUNDS = {"bfloat16": 2.0**-8, "float32": 2e-5}
CHECKED_ROWS = 64

FIELDS = (
    *("operator", "case", "dtype", "variant", "checked", "right", *TIMES),
    *("gb_per_s", "tflops", "sustained_gb_per_s", "sustained_tflops", "repeats", "note", *MACHINE),
)


class Gpu(harness.Gpu):
    """Matrices and copies. Tests put NumPy in its place."""

    def copies(self) -> tuple[Any, Any]:
        """Two arrays, the first to be copied to the second."""
        source = self.torch.arange(COPY_BYTES // 8, dtype=self.torch.int64, device="cuda")
        return source, self.torch.empty_like(source)

    def matrix(self, dtype: str, seed: int) -> Any:
        """Random numbers [SIZE, SIZE]."""
        generator = self.torch.Generator("cuda").manual_seed(seed)
        return self.torch.randn(SIZE, SIZE, device="cuda", generator=generator).to(getattr(self.torch, dtype))

    def multiply(self, a: Any, b: Any, out: Any) -> Any:
        """a @ b, without TF32."""
        self.torch.backends.cuda.matmul.allow_tf32 = False
        return self.torch.matmul(a, b, out=out)

    def error(self, a: Any, b: Any, found: Any) -> float:
        """Relative Frobenius error of the first rows of a product."""
        exact = a[:CHECKED_ROWS].double() @ b.double()
        return float((found[:CHECKED_ROWS].double() - exact).norm() / exact.norm())


def sustained_rate(row: Row, column: str, work: float) -> Row:
    """The row with ``work`` a second, of one call alone and of many."""
    if row.get("sustained_us"):
        of_many = with_rate({"microseconds": row["sustained_us"]}, column, work)
        row[f"sustained_{column}"] = of_many[column]
    return with_rate(row, column, work)


def copy_rows(gpu: Any) -> Iterator[Row]:
    """Bytes read and written."""
    source, target = gpu.copies()

    def call() -> None:
        target[...] = source

    def right() -> bool:
        spoil(target)
        call()
        return bool((source == target).all())

    row = {"operator": "copy", "case": f"{COPY_BYTES >> 20} MiB", "variant": "torch_copy", "checked": "all elements"}
    timer = partial(gpu.time, calls_in_graph=0)  # in a graph a copy engine makes it, which is slower
    yield sustained_rate(measured(row, gpu, right, call, timer), "gb_per_s", 2 * COPY_BYTES)


def matmul_rows(gpu: Any, dtype: str) -> Iterator[Row]:
    """The product of two square matrices."""
    a, b, out = gpu.matrix(dtype, 0), gpu.matrix(dtype, 1), gpu.empty((SIZE, SIZE), dtype)

    def call() -> Any:
        return gpu.multiply(a, b, out)

    def right() -> bool:
        spoil(out)
        return gpu.error(a, b, call()) <= BOUNDS[dtype]

    row = {"operator": "matmul", "case": "x".join([str(SIZE)] * 3), "dtype": dtype, "variant": "torch_matmul"}
    row |= {"checked": f"{CHECKED_ROWS} rows"}
    yield sustained_rate(measured(row, gpu, right, call, gpu.time), "tflops", 2 * SIZE**3)


def jobs(gpu: Any, quick: bool) -> list[Job]:
    """The measurements one after the other, also with ``quick``."""
    return [partial(copy_rows, gpu), *(partial(matmul_rows, gpu, dtype) for dtype in BOUNDS)]


def line(row: Row) -> str:
    """A row for people."""
    rates = " ".join(f"{row[name]} {name}" for name in FIELDS if name.endswith(("gb_per_s", "tflops")) and name in row)
    known = f"{row.get('operator', ''):8}{row.get('case', ''):16} {row.get('dtype', ''):9}{row['variant']:13}"
    return f"{known}{harness.times_of(row)} {rates}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    return harness.main(__doc__, "ceilings", FIELDS, jobs, lambda quick: 1 + len(BOUNDS), line, Gpu, arguments)


if __name__ == "__main__":
    sys.exit(main())
