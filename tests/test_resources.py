"""profiling/resources.py --mix: what a multiprocessor holds, and what instructions a kernel is made of."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PROFILING = Path(__file__).resolve().parent.parent / "profiling"


def has_toolkit():
    """Whether NVVM and nvJitLink are installed, which the extra `compile` brings; asked in another process."""
    code = "from cuda.bindings import nvjitlink, nvvm; nvjitlink.version(); nvvm.version()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not has_toolkit(), reason="needs the extra 'compile' (NVVM and nvJitLink)")


def run(*arguments) -> str:
    """In another process, since resources.py turns the simulator off for its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROFILING.parent), str(PROFILING)])}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def answer(code: str):
    return json.loads(run("-c", f"import json\nimport resources\n{code}"))


@pytest.fixture(scope="module")
def rows():
    few = ("--kernel", "lse", "finish", "--arch", "sm_90")
    script = str(PROFILING / "resources.py")
    plain, mixed = (json.loads(run(script, "--json", *few, *more)) for more in ((), ("--mix",)))
    return plain, mixed


def test_all_else_is_as_without_mix(rows):
    plain, mixed = rows
    assert list(plain[0]) == [
        *(
            "kernel",
            "arch",
            "registers",
            "stack",
            "spill_stores",
            "spill_loads",
            "float64",
            "code_bytes",
            "shared",
            "ok",
        )
    ]
    assert len(plain) == len(mixed) == 3
    assert [{**row, **one} for row, one in zip(mixed, plain, strict=True)] == mixed


def test_occupancy_follows_the_kernels_own_numbers(rows):
    for row in rows[1]:
        assert row["threads"] == 128 and row["warps"] == 4 * row["blocks"] <= row["most_warps"] == 64
        assert (row["blocks"], row["limited_by"]) == (16, "threads")  # few registers, no shared memory


def test_the_instructions_are_those_of_the_kernel(rows):
    for row in rows[1]:
        mix = dict(row["mix"])
        assert mix.pop("of") in ("SASS", "PTX")
        every = mix.pop("all")
        assert every == sum(mix.values()) and mix["local"] == mix["FP64"] == 0
        assert (mix["FMUL"] > 0) == row["kernel"].startswith("lse")
        assert mix["LDG"] + mix["LD"] >= 1 and mix["STG"] + mix["ST"] >= 1


SASS = """
        .section        .text.kernel,"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @P0  FFMA.FTZ R2, R3, R4, R5 ;
        /*0020*/             @!UP1 FADD R2, R2, -R3 ;
        /*0030*/                   DADD R2, R4, R6 ;
        /*0040*/                   LDS.128 R4, [R2] ;
        /*0050*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0060*/                   LD.E R4, desc[UR4][R2.64] ;
        /*0070*/                   STL [R1], R4 ;
        /*0080*/                   SHFL.BFLY PT, R3, R2, 0x1, 0x1f ;
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00a0*/                   MUFU.EX2 R3, R2 ;
        /*00b0*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*00c0*/                   CALL.REL.NOINC `(division) ;
.L_x_1:
        /*10d0*/                   BRA `(.L_x_1);
        /*10e0*/                   NOP;
"""
PTX = """
.visible .entry kernel(.param .u64 x)
{
        .reg .f32 %f<9>;
        ld.param.u64 %rd1, [x];
        fma.rn.f32 %f1, %f2, %f3, %f4;
        @%p1 add.rn.f32 %f1, %f2, %f3;  // add.f64 here is a comment;
        add.rn.f64 %fd1, %fd2, %fd3;
        ld.shared.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
        ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
        ld.u32 %r1, [%rd1];
        st.local.f32 [%rd1], %f1;
        // begin inline asm
shfl.sync.bfly.b32 %r1, %r2, %r3, 31, -1;
        { vote.sync.ballot.b32 %r1, %p1, -1; }
        // end inline asm
        bar.sync 0;
        ex2.approx.f32 %f1, %f2;
        add.s32 %r1, %r1, 1;
        call.uni (x), f, (y);
        bra.uni $L1;
        ret;
}
"""


def test_instructions_are_counted_by_kind():
    code = f"""
sass, ptx = {SASS!r}, {PTX!r}
print(json.dumps([resources.mix_of(sass, ptx), resources.mix_of(None, ptx)]))
"""
    sass, ptx = answer(code)
    one = dict.fromkeys(("FFMA", "FADD", "FP64", "LDS", "LDG", "LD", "local", "SHFL", "BAR", "MUFU", "INT", "CALL"), 1)
    assert {k: n for k, n in sass.items() if n} == {"of": "SASS", "all": 14, **one, "BRA": 1, "other": 1}
    assert {k: n for k, n in ptx.items() if n} == {"of": "PTX", "all": 15, **one, "VOTE": 1, "BRA": 1, "other": 1}


# The toolkit's own calculation, for threads, registers and shared memory from the command line.
PROGRAM = """
#include <cstdio>
#include <cstring>
#include "cuda_occupancy.h"
int main() {
    int major, minor, warps, multiprocessor, block, threads, registers, shared;
    while (std::scanf("%d %d %d %d %d %d %d %d", &major, &minor, &warps, &multiprocessor, &block, &threads, &registers,
                      &shared) == 8) {
        cudaOccDeviceProp device;
        std::memset(static_cast<void*>(&device), 0, sizeof device);
        device.computeMajor = major;
        device.computeMinor = minor;
        device.maxThreadsPerBlock = 1024;
        device.maxThreadsPerMultiprocessor = 32 * warps;
        device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.warpSize = 32;
        device.sharedMemPerBlock = 49152;
        device.sharedMemPerMultiprocessor = multiprocessor;
        device.sharedMemPerBlockOptin = block;
        device.reservedSharedMemPerBlock = 1024;
        device.numSms = 1;
        cudaOccFuncAttributes kernel;
        std::memset(static_cast<void*>(&kernel), 0, sizeof kernel);
        kernel.maxThreadsPerBlock = 1024;
        kernel.numRegs = registers;
        kernel.maxDynamicSharedSizeBytes = block;
        kernel.partitionedGCConfig = PARTITIONED_GC_OFF;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        cudaOccDeviceState state;
        state.carveoutConfig = 100;
        cudaOccResult result;
        cudaOccError error =
            cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, shared);
        std::printf("%d\\n", error ? -1 : result.activeBlocksPerMultiprocessor);
    }
}
"""


def occupancy_header() -> Path | None:
    spec = find_spec("nvidia")
    folders = spec.submodule_search_locations if spec else None
    return next((x for folder in folders or () for x in Path(folder).glob("*/include/cuda_occupancy.h")), None)


def test_occupancy_is_what_the_toolkit_calculates(tmp_path):
    header, compiler = occupancy_header(), shutil.which("g++") or shutil.which("clang++")
    if header is None or compiler is None:
        pytest.skip("needs cuda_occupancy.h of the toolkit wheels and a C++ compiler")
    source, program = tmp_path / "occupancy.cpp", tmp_path / "occupancy"
    source.write_text(PROGRAM)
    command = [compiler, "-std=c++17", f"-I{header.parent}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    code = """
cases = [
    (*cc, threads, registers, shared)
    for cc in resources.ARCHITECTURES
    for threads in (32, 96, 128, 256, 512, 1024)
    for registers in (16, 20, 33, 64, 65, 72, 128, 168, 255)
    for shared in (0, 1, 1000, 10_000, 33_000, 75_632, 99 << 10, 163 << 10, 227 << 10)
    if shared + 1024 <= resources.LIMITS[cc][2]
]
found = [resources.occupancy(case[:2], *case[2:])["blocks"] for case in cases]
print(json.dumps([cases, found, [list(resources.LIMITS[case[:2]]) for case in cases]]))
"""
    cases, found, limits = answer(code)
    lines = [
        f"{major} {minor} {warps} {shared_bytes} {shared_bytes - 1024} {threads} {registers} {shared}"
        for (major, minor, threads, registers, shared), (warps, _, shared_bytes) in zip(cases, limits, strict=True)
    ]
    done = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True)
    assert len(cases) > 1000
    assert [int(n) for n in done.stdout.split()] == found
