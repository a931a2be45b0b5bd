"""The compile gates: every kernel to machine code, and gates that can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROFILING = Path(__file__).resolve().parent.parent / "profiling"


def has_toolkit():
    """Whether NVVM and nvJitLink are installed, which the extra `compile` brings; asked in another process."""
    code = "from cuda.bindings import nvjitlink, nvvm; nvjitlink.version(); nvvm.version()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not has_toolkit(), reason="needs the extra 'compile' (NVVM and nvJitLink)")


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROFILING.parent), str(PROFILING)])}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


# Registers a thread, by variant: launch bounds of 1,024 threads a multiprocessor leave 64, of 896 threads 72, of 256
# threads all 255, of 1,280 threads 48. A builder's block of 256 threads has one busy warp, so 128 cost it nothing: its
# shared memory limits the blocks first. The last six have no bounds; of their blocks of 32, 128 or 256 threads, one or
# a few a request, no more run at once.
REGISTERS = {
    "three_phase": 64,
    "flash_large": 255,
    "flash_small": 255,
    "flash_combine": 64,
    "merge_states": 72,
    "lse": 72,
    "rounds": 64,
    "threshold": 64,
    "heap": 128,
    "frontier": 128,
    "argmax_tokens": 64,
    "sampled": 64,
    "target_probs": 64,
    "compact_kv": 48,
    "gather": 40,
    "greedy": 96,
    "sglang": 96,
    "advance": 32,
    "prepare": 80,
    "finish": 32,
}
FLOAT64 = ("heap", "frontier", "sampled")  # scores of trees are float64 by contract, and uniforms may be


def test_every_kernel_compiles_without_spills_and_without_float64():
    done = run(str(PROFILING / "resources.py"), "--json", "--arch", "sm_80", "sm_90")  # .ci/run compiles for all
    rows = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert {row["arch"] for row in rows} == {"sm_80", "sm_90"}
    for name in {row["kernel"] for row in rows}:
        wanted = {"sm_90"} if name.startswith("flash_large") else {"sm_80", "sm_90"}  # shared memory
        assert {row["arch"] for row in rows if row["kernel"] == name} == wanted
    assert {row["kernel"].split()[0] for row in rows} == REGISTERS.keys()
    for row in rows:
        variant = row["kernel"].split()[0]
        assert row["ok"] and 0 < row["registers"] <= REGISTERS[variant] and row["code_bytes"] > 1000
        assert bool(row["float64"]) == (variant in FLOAT64)


def test_the_gates_see_spills_and_float64():
    code = """
import json
import resources
from numba import cuda, types

attention = next(resources.kernels())
(crowded,) = resources.compile_kernel(attention.dispatcher, attention.signature, (1024, 2), (9, 0))

@cuda.jit
def with_literal(x):
    x[0] += 0.1

(doubled,) = resources.compile_kernel(with_literal, (types.Array(types.float32, 1, "C"),), (32, 1), (9, 0))
print(json.dumps([crowded, doubled]))
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    crowded, doubled = json.loads(done.stdout)
    assert crowded["spill_stores"] > 0 and crowded["registers"] <= 32
    assert doubled["float64"] > 0


def test_one_front_end_makes_the_ptx_of_each_architecture():
    """Names hold a number that differs between compilations; all else is what cuda.compile_ptx returns."""
    code = r"""
import re
import resources
from numba import cuda

*_, kernel = resources.accept_kernels()
compiled = resources.front_end_of(kernel.dispatcher, kernel.signature, kernel.bounds)
for cc in resources.ARCHITECTURES:
    found = resources.ptx_of(compiled, cc)
    expected, _ = cuda.compile_ptx(
        kernel.dispatcher.py_func, kernel.signature, device=False, cc=cc, launch_bounds=kernel.bounds
    )
    found, expected = (re.sub(r"_ZN\w+", "NAME", ptx) for ptx in (found, expected))
    assert found == expected and f"sm_{cc[0]}{cc[1]}" in found and "NAME" in found
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
