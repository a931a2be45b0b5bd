"""Registers, shared memory and spills of every kernel on every architecture, compiled offline: no GPU, no driver.

Run ``python profiling/resources.py``. The exit code is 1 when a kernel spills registers, uses local memory, or holds a
double-precision instruction (attention is float32 throughout; a stray Python literal would be float64). Needs the
toolkit wheels of the extra ``compile``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "0"  # compiling is for real, whether or not there is a GPU

import ml_dtypes
import numpy as np
from cuda.bindings import nvjitlink
from numba import cuda
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ddtree_numba.attention import three_phase
from ddtree_numba.attention.problem import make_problem
from ddtree_numba.device import launch

ARCHITECTURES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


def kernels() -> Iterator[tuple[str, Any, tuple[Any, ...], tuple[int, int], int]]:
    """Every kernel: name, dispatcher, argument types, launch bounds, dynamic shared memory at a prefix of 2,048.

    Layouts and dtypes combine freely, and each combination compiles anew: all in one dtype and in C order stand first,
    then the one that is farthest from it, bool mask, all strides free, three dtypes.
    """
    num_nodes = 17
    q = np.zeros((1, num_nodes, 64, 576))
    cache = np.zeros((1, 2048 + num_nodes, 576))
    words = np.zeros((1, num_nodes, 1), np.uint32)
    problems = [(dtype.name, q.astype(dtype), cache.astype(dtype), words, None) for dtype in DTYPES]
    strided_out = np.zeros((1, num_nodes, 64, 1024), np.float16)[..., ::2]
    bools = np.zeros((1, num_nodes, 2 * num_nodes), np.bool_)[..., ::2]
    bfloat16_rows = cache.astype(DTYPES[2])[:, ::-1]
    problems.append(("mixed, strided", q.astype(np.float32)[:, ::-1], bfloat16_rows, bools, strided_out))
    for name, q, cache, mask, out in problems:
        problem = make_problem(
            q,
            cache,
            np.zeros(1, np.int32),
            mask,
            sm_scale=1.0,
            kv_lora_rank=512,
            block_table=None,
            max_seqlen=None,
            out=out,
            lse=None,
            out_dtype=None,
            workspace=None,
            validate=False,
        )
        signature = launch.signature(launch.type_keys(three_phase.arguments(problem)))
        nbytes = three_phase.shared_bytes(problem)
        yield f"three_phase {name}", three_phase.kernel, signature, three_phase.LAUNCH_BOUNDS, nbytes


def compile_kernel(kernel: Any, signature: tuple[Any, ...], bounds: tuple[int, int], cc: tuple[int, int]) -> dict:
    """Compile to machine code; returns registers a thread, bytes spilled, of stack and of code, and float64 count."""
    ptx, _ = cuda.compile_ptx(kernel.py_func, signature, device=False, cc=cc, launch_bounds=bounds)
    linker = nvjitlink.create(2, [f"-arch=sm_{cc[0]}{cc[1]}", "-verbose"])
    try:
        data = ptx.encode()
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, data, len(data), "kernel")
        nvjitlink.complete(linker)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
        code_bytes = nvjitlink.get_linked_cubin_size(linker)
    finally:
        nvjitlink.destroy(linker)
    text = log.decode()
    used = {name: int(re.search(pattern, text)[1]) for name, pattern in PATTERNS.items()}
    return {**used, "float64": len(re.findall(r"\.f64\b", ptx)), "code_bytes": code_bytes}


PATTERNS = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}


def main() -> int:
    """Compile all, print a table or JSON, and return 1 if a kernel is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    try:
        nvjitlink.version()
    except Exception as error:
        sys.exit(f"{error}\nThis needs the toolkit wheels: pip install 'ddtree-numba[compile]'")
    jobs = [(*kernel, cc) for kernel in kernels() for cc in ARCHITECTURES]
    rows = []
    for name, kernel, signature, bounds, nbytes, cc in track(jobs, "compiling", console=Console(stderr=True)):
        found = compile_kernel(kernel, signature, bounds, cc)
        ok = not (found["stack"] or found["spill_stores"] or found["spill_loads"] or found["float64"])
        rows.append({"kernel": name, "arch": f"sm_{cc[0]}{cc[1]}", **found, "shared": nbytes, "ok": ok})
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        table = Table(*rows[0], title="shared: dynamic bytes a block at a prefix of 2,048 and 17 nodes")
        for row in rows:
            table.add_row(*("ok" if v is True else "FAIL" if v is False else str(v) for v in row.values()))
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    failed = sum(not row["ok"] for row in rows)
    print(f"{len(rows) - failed} kernels compiled as they must be, {failed} did not", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
