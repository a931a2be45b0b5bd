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


def test_kernels_compile_without_spills_and_without_float64():
    """The smallest; all take minutes and are .ci/run's last step."""
    few = ("lse", "finish")
    done = run(str(PROFILING / "resources.py"), "--json", "--arch", "sm_80", "sm_90", "--kernel", *few)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {(row["kernel"].split()[0], row["arch"]) for row in rows} == {
        (k, a) for k in few for a in ("sm_80", "sm_90")
    }
    for row in rows:
        assert row["ok"] and 0 < row["registers"] <= 96 and row["code_bytes"] > 1000 and not row["float64"]


def test_all_kernels_are_compiled_and_have_their_gates():
    code = """
import json
import resources
kernels = list(resources.kernels())
large = all((k.architectures == ((9, 0),)) == k.name.startswith(("flash_large", "wgmma")) for k in kernels)
print(json.dumps([sorted({k.variant for k in kernels}), sorted(resources.MAX_REGISTERS), large]))
print(json.dumps(sorted({k.variant for k in kernels if k.float64})))
"""
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    (compiled, gated, large), float64 = map(json.loads, done.stdout.splitlines())
    assert compiled == gated and large
    assert float64 == ["frontier", "heap", "sampled"]  # scores of trees are float64 by contract, uniforms may be


def test_too_many_registers_fail():
    code = """
import sys
import resources
resources.MAX_REGISTERS["finish"] = 8
sys.argv = ["resources.py", "--kernel", "finish", "--arch", "sm_90"]
sys.exit(resources.main())
"""
    done = run("-c", code)
    assert done.returncode == 1 and "0 kernels compiled as they must be, 1 did not" in done.stderr


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
