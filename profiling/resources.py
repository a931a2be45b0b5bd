"""Registers, shared memory and spills of every kernel on every architecture, compiled offline: no GPU, no driver.

Run ``python profiling/resources.py``. The exit code is 1 when a kernel spills registers, uses local memory, takes more
registers than `MAX_REGISTERS`, or holds double-precision instructions other than where they belong: attention and top-k
are float32 throughout, and a stray Python literal would be float64; the scores of the tree builders are float64 by
contract, and accept_sampled takes uniforms of 64 bits. Needs the toolkit wheels of the extra ``compile``.

wgmma's kernels are compiled for sm_90a, and linked from LTO code as Numba does it: linked from PTX, the registers that
warps hand to each other would not count.

``--mix`` prints two more tables. Occupancy: how many blocks and warps a multiprocessor holds at a time, and what limits
them. Instructions: how many of each kind stand in the code, not how often they run; of the machine code where there is
an nvdisasm (on the path, or from ``pip install nvidia-cuda-nvdisasm``), else of the PTX, where addresses and loops look
different.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

os.environ["NUMBA_ENABLE_CUDASIM"] = "0"  # compiling is for real, whether or not there is a GPU

import ml_dtypes
import numpy as np
from cuda.bindings import nvjitlink
from numba.cuda import compiler
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ddtree_numba import step
from ddtree_numba.accept import accepted, argmax_tokens, compact_kv, greedy, sampled, sglang, target_probs
from ddtree_numba.attention import flash, merge, mma, schedule, three_phase, wgmma_host
from ddtree_numba.attention.problem import Problem, make_problem
from ddtree_numba.device import arrays, launch
from ddtree_numba.tree import build_frontier, build_heap, draft_tree, search, topk_rounds, topk_threshold

ARCHITECTURES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
COMMON = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))  # sm_86 has nothing that one of its neighbours lacks: mma alone
HOPPER = (9, 0, "a")  # what wgmma's kernels are compiled for
DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

# Of a thread, on any architecture: launch bounds of 1,024 threads a multiprocessor leave 64, of 896 threads 72, of 256
# threads all 255, of 1,280 threads 48. A builder's block of 256 threads has one busy warp, so 128 cost it nothing: its
# shared memory limits the blocks first. The last six have no bounds; of their blocks of 32, 128 or 256 threads, one or
# a few a request, no more run at once.
MAX_REGISTERS = {
    "three_phase": 64,
    "flash_large": 255,
    "flash_small": 255,
    "flash_combine": 64,
    "mma_large": 208,
    "mma_medium": 208,
    "mma_small": 128,
    "wgmma": 168,
    "wgmma_plan": 96,  # of one block on the whole GPU
    "wgmma_combine": 128,
    "wgmma_copy": 40,
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
    "prepare": 96,
    "finish": 32,
}
TITLE = "shared: dynamic bytes a block; attention: prefix 2,048, 17 nodes; heap and frontier: L,K,budget"


REGISTERS, REGISTER_UNIT, PARTITIONS = 65536, 256, 4  # of a multiprocessor; a warp gets them in such units
SHARED_UNIT, SHARED_RESERVED = 128, 1024  # bytes of shared memory of a block, beside its own
# Warps and blocks that a multiprocessor holds, and its bytes of shared memory. CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"; cuda_occupancy.h of the toolkit.
LIMITS = {
    (8, 0): (64, 32, 164 << 10),
    (8, 6): (48, 16, 100 << 10),
    (8, 9): (48, 24, 100 << 10),
    (9, 0): (64, 32, 228 << 10),
    (10, 0): (64, 32, 228 << 10),
    (12, 0): (48, 24, 100 << 10),
}

# Kinds of instructions: what their names begin with in machine code, and in PTX.
KINDS = {
    "FFMA": (r"FFMA", r"fma\.\S*f32"),
    "FADD": (r"FADD", r"(add|sub)\.\S*f32"),
    "FMUL": (r"FMUL", r"mul\.\S*f32"),
    "MUFU": (r"MUFU", r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\.approx"),
    "FP64": (r"D(ADD|MUL|FMA|SETP|MNMX)", r"\w+\.\S*f64"),
    "LDS": (r"LDS", r"ld(\.volatile)?\.shared"),
    "STS": (r"STS", r"st(\.volatile)?\.shared"),
    "LDG": (r"LDG", r"ld(\.volatile)?\.global"),
    "STG": (r"STG", r"st(\.volatile)?\.global"),
    "LD": (r"LD\b", r"ld(\.volatile)?\.[ubfsv]\d"),  # of an address whose memory the compiler does not know
    "ST": (r"ST\b", r"st(\.volatile)?\.[ubfsv]\d"),
    "local": (r"(LDL|STL)", r"(ld|st)\.local"),
    "SHFL": (r"SHFL", r"shfl"),
    "VOTE": (r"(VOTE|REDUX|MATCH)", r"(vote|redux|match)"),
    "BAR": (r"BAR", r"(bar|barrier)\."),
    "BRA": (r"(BRA|BRX|JMP)", r"bra"),
    "CALL": (r"CALL", r"call"),
    "INT": (
        r"U?(IMAD|IADD|VIADD|LEA|LOP|SHF|SHL|SHR|ISETP|V?IMNMX|IABS|PRMT|POPC|FLO|BREV)",
        r"(add|sub|mul|mad|min|max|abs|neg|and|or|xor|not|shl|shr|setp|prmt|popc|clz|bfind|brev|shf|cvta)\b",
    ),
}


class Kernel(NamedTuple):
    """What to compile, and what it may hold."""

    name: str
    dispatcher: Any
    signature: tuple[Any, ...]
    bounds: tuple[int, int]  # launch bounds: threads a block, blocks a multiprocessor
    shared: int  # dynamic shared memory of a block in bytes, at the sizes that TITLE says
    float64: bool = False  # whether double precision belongs there
    architectures: tuple[tuple[int, int], ...] = COMMON  # that have the shared memory
    hopper: bool = False  # whether it is for sm_90a alone, and linked from LTO code

    @property
    def variant(self) -> str:
        return self.name.split()[0]


def kernels() -> Iterator[Kernel]:
    """Every kernel. Layouts and dtypes combine freely, and each combination compiles anew.

    So of each variant, all in one dtype and in C order stand first, then the one that is farthest from it: all strides
    free, dtypes mixed.
    """
    return chain(attention_kernels(), merge_kernels(), topk_kernels(), build_kernels(), accept_kernels())


def attention_kernels() -> Iterator[Kernel]:
    """verify_attention; the last with a bool mask, all strides free, three dtypes."""
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
        yield Kernel(f"three_phase {name}", three_phase.kernel, signature, three_phase.LAUNCH_BOUNDS, nbytes)
        yield from flash_kernels(name, problem)
    yield from mma_kernels()
    yield from wgmma_kernels()


def flash_kernels(name: str, problem: Problem) -> Iterator[Kernel]:
    """flash in both tiles, and its combine; single elements are read with the small tiles alone."""
    plan = flash.plan_of(problem, None, False)
    head, tail = flash.arguments(problem, plan)
    results = (arrays.view("workspace", np.zeros(4, np.float32)), problem.out, problem.lse)
    signature = launch.signature(launch.type_keys((*head, *tail, *results)))
    tiles = {"large": (flash.LARGE, ((9, 0),)), "small": (flash.SMALL, COMMON)}
    for size, (tile, architectures) in tiles.items():
        shape = plan.shape._replace(tiles=tile)
        bounds, nbytes = (32 * tile.warps, tile.blocks), flash.shared_bytes(tile, problem.head_dim)
        kernel = flash.make_kernel(shape)
        if shape.wide or size == "small":
            label = f"flash_{size} {name}"
            yield Kernel(label, kernel, signature, bounds, nbytes, architectures=architectures)
    signature = launch.signature(launch.type_keys((problem.cache_seqlens, *tail, np.int32(1), *results)))
    bounds = (32 * flash.COMBINE_ROWS, 4)
    yield Kernel(f"flash_combine {name}", flash.make_combine(plan.shape), signature, bounds, 0)


def mma_kernels() -> Iterator[Kernel]:
    """mma in its tiles, the last with a bool mask, all strides free that may be, results in another format."""
    num_nodes = 17
    q = np.zeros((1, num_nodes, 64, 576))
    cache = np.zeros((1, 2048 + num_nodes, 576))
    words = np.zeros((1, num_nodes, 1), np.uint32)
    tiles = {
        "large": (mma.LARGE, ((9, 0), (10, 0))),
        "medium": (mma.MEDIUM, ((8, 0), (9, 0), (10, 0))),
        "small": (mma.SMALL, ARCHITECTURES),
    }
    problems = [(dtype.name, q.astype(dtype), cache.astype(dtype), words, None) for dtype in DTYPES[1:]]
    bools = np.zeros((1, num_nodes, 2 * num_nodes), np.bool_)[..., ::2]
    strided_out = np.zeros((1, num_nodes, 64, 1024), np.float16)[..., ::2]
    bfloat16 = q.astype(DTYPES[2])[:, ::-1], cache.astype(DTYPES[2])[:, ::-1]
    problems.append(("bfloat16, strided", *bfloat16, bools, strided_out))
    for name, q, cache, mask, out in problems:
        given = {"sm_scale": 1.0, "kv_lora_rank": 512, "block_table": None, "max_seqlen": None, "out": out, "lse": None}
        given |= {"out_dtype": None, "workspace": None, "validate": False}
        problem = make_problem(q, cache, np.zeros(1, np.int32), mask, **given)
        head, tail = mma.arguments(problem, mma.plan_of(problem, None, False))
        results = (arrays.view("workspace", np.zeros(4, np.float32)), problem.out, problem.lse)
        signature = launch.signature(launch.type_keys((*head, *tail, *results)))
        for size, (tile, architectures) in tiles.items():
            kernel, nbytes = mma.make_kernel(tile), mma.shared_bytes(tile)
            label = f"mma_{size} {name}"
            yield Kernel(label, kernel, signature, (mma.THREADS, 1), nbytes, architectures=architectures)


def wgmma_kernels() -> Iterator[Kernel]:
    """wgmma with its plan and combine; then with a bool mask, all strides free that may be, results to be copied."""
    num_nodes = 17
    words = np.zeros((1, num_nodes, 1), np.uint32)
    bools = np.zeros((1, num_nodes, 2 * num_nodes), np.bool_)[..., ::2]
    strided_out = np.zeros((1, num_nodes, 64, 1024), np.float32)[..., ::2]
    seen = set()
    for name, dtype, mask, out in (
        ("bfloat16", DTYPES[2], words, None),
        ("float16", DTYPES[1], words, None),
        ("bfloat16, strided", DTYPES[2], bools, strided_out),
    ):
        q, cache = np.zeros((1, num_nodes, 64, 576), dtype), np.zeros((1, 2048 + num_nodes, 576), dtype)
        given = {"sm_scale": 1.0, "kv_lora_rank": 512, "block_table": None, "max_seqlen": None, "out": out, "lse": None}
        given |= {"out_dtype": None, "workspace": np.zeros(2**23, np.float32), "validate": False}
        problem = make_problem(q, cache, np.zeros(1, np.int32), mask, **given)
        views = {f.name: x for f in fields(problem) if isinstance(x := getattr(problem, f.name), arrays.View)}
        problem = replace(problem, **{name: replace(x, device=0) for name, x in views.items()})  # as if it lay there
        room = mock.patch.multiple(
            wgmma_host,
            tensor_map=lambda *numbers: (0,) * 16,
            empty=lambda like, shape, dtype: np.zeros(shape, dtype),
        )
        with room:
            launched = recorded(lambda problem=problem: wgmma_host.run(problem), wgmma_host)
        for kernel, signature, nbytes in launched:
            if (kernel, signature) in seen:  # the plan does not depend on dtypes
                continue
            seen.add((kernel, signature))
            variant = {"wgmma": "wgmma", "plan_blocks": "wgmma_plan", "copy_rows": "wgmma_copy"}
            label = f"{variant.get(kernel.py_func.__name__, 'wgmma_combine')} {name}"
            if label.startswith("wgmma_copy"):
                label += f" {signature[0].dtype}"
            bounds = kernel.targetoptions.get("launch_bounds") or (COPY_BOUNDS if "copy" in label else PLAN_BOUNDS)
            yield Kernel(label, kernel, signature, bounds, nbytes, architectures=((9, 0),), hopper=True)


# Of kernels that have no bounds: the threads of their blocks.
PLAN_BOUNDS, COPY_BOUNDS = (schedule.THREADS, 1), (wgmma_host.COPY_THREADS, 1)


def strided(x: np.ndarray) -> np.ndarray:
    """An array of the same shape and dtype in which no two elements stand side by side."""
    return np.zeros((*x.shape, 2), x.dtype)[..., 0]


def launched(run: Any, problem: Any, room: ModuleType) -> tuple[Any, tuple[Any, ...], int]:
    """Kernel, argument types and dynamic shared memory of what ``run`` launches, which it does from module ``room``."""
    return recorded(lambda: run(problem), room)[0]


def recorded(call: Callable[[], Any], room: ModuleType) -> list[tuple[Any, tuple[Any, ...], int]]:
    """The same of all that a call launches."""
    found = []

    def record(kernel: Any, blocks: Any, threads: int, args: Any, *, shared_bytes: int, **_: Any) -> None:
        found.append((kernel, launch.signature(launch.type_keys(args)), shared_bytes))

    with mock.patch.multiple(room, launch=record, require_backend=lambda: None, create=True):
        call()
    return found


def merge_kernels() -> Iterator[Kernel]:
    """merge_states, the last with single elements for words, all strides free, dtypes mixed; the converter of lse."""
    float32, float16, bfloat16 = DTYPES
    layouts = [(dtype.name, np.ascontiguousarray, (dtype,) * 3) for dtype in DTYPES]
    layouts.append(("mixed", np.ascontiguousarray, (bfloat16, float32, float16)))
    layouts.append(("mixed, strided", strided, (bfloat16, float32, float16)))
    for name, lay, dtypes in layouts:
        outs = [arrays.view("out", lay(np.zeros((2, 64, 512), dtype))) for dtype in dtypes]
        lses = [arrays.view("lse", lay(np.zeros((2, 64), np.float32))) for _ in range(3)]
        args, _ = next(merge.launches([outs[0], lses[0], outs[1], lses[1], outs[2], lses[2]]))
        signature = launch.signature(launch.type_keys(args))
        yield Kernel(f"merge_states {name}", merge.kernel, signature, merge.LAUNCH_BOUNDS, 0)
    for name, lay in (("in C order", np.ascontiguousarray), ("strided", strided)):
        lse = arrays.view("lse", lay(np.zeros((1, 1, 64), np.float32)))
        signature = launch.signature(launch.type_keys((lse, merge.ONE, lse)))
        yield Kernel(f"lse {name}", merge.convert_kernel, signature, merge.LAUNCH_BOUNDS, 0)


def topk_kernels() -> Iterator[Kernel]:
    """topk_logprobs; `threshold` reads words of 8 bytes from rows in C order, and single logits from others."""
    in_c_order = [(dtype.name, np.ascontiguousarray, dtype) for dtype in DTYPES]
    for layout, lay, dtype in (*in_c_order, ("bfloat16 strided", strided, DTYPES[2])):
        given = np.zeros((2, 3, 64), dtype), np.zeros((2, 3, 8), np.float32), np.zeros((2, 3, 8), np.int32)
        problem = topk_rounds.Problem(*map(arrays.view, ("logits", "logprobs", "token_ids"), map(lay, given)))
        for name, module in (("rounds", topk_rounds), ("threshold", topk_threshold)):
            kernel, signature, nbytes = launched(module.run, problem, module)
            yield Kernel(f"{name} {layout}", kernel, signature, module.LAUNCH_BOUNDS, nbytes)


def build_kernels() -> Iterator[Kernel]:
    """build_tree at sizes for which `frontier` differs; the last with ids of 64 bits and all strides free."""
    heap, frontier = ("heap", build_heap), ("frontier", build_frontier)
    for length, candidates, budget, lay, ids, variants in (
        (15, 64, 64, np.ascontiguousarray, np.int32, (heap, frontier)),
        (4, 64, 4000, np.ascontiguousarray, np.int32, (frontier,)),
        (15, 1000, 2000, strided, np.int64, (heap, frontier)),
    ):
        rows = np.zeros((2, length, candidates), np.float32)
        given = lay(rows), lay(rows.astype(ids)), lay(np.zeros(2, ids))
        shapes = draft_tree.shapes(2, budget + 1)
        tree = {name: arrays.view(name, lay(np.zeros(shapes[name], d))) for name, d in draft_tree.DTYPES.items()}
        problem = search.Problem(*map(arrays.view, ("logprobs", "token_ids", "root_tokens"), given), tree)
        for name, module in variants:
            # There may be no GPU to ask for its limit.
            with mock.patch.object(search, "shared_bytes_limit", lambda device: launch.SIMULATED_SHARED_BYTES):
                kernel, signature, nbytes = launched(module.run, problem, search)
            layout = f"{np.dtype(ids).name}{' strided' if lay is strided else ''}"
            yield Kernel(
                f"{name} {length},{candidates},{budget} {layout}",
                kernel,
                signature,
                module.LAUNCH_BOUNDS,
                nbytes,
                float64=True,
            )


def accept_kernels() -> Iterator[Kernel]:
    """Accepting and moving, the last of each with single elements for words, ids of 64 bits, all strides free."""
    float32, _, bfloat16 = DTYPES
    for layout, lay, dtype, ids in (
        ("bfloat16", np.ascontiguousarray, bfloat16, np.int32),
        ("float32 strided", strided, float32, np.int64),
    ):
        for name, (room, call) in accept_calls(lay, dtype, np.dtype(ids)).items():
            ((kernel, signature, nbytes),) = recorded(call, room)
            bounds = kernel.targetoptions["launch_bounds"] or (room.THREADS, 1)
            yield Kernel(f"{name} {layout}", kernel, signature, bounds, nbytes, float64=name == "sampled")
    yield from step_kernels()


def step_kernels() -> Iterator[Kernel]:
    """The small ones of a step and of the lengths, whose arrays are the caller's: all strides free."""
    tree = tree_of(strided)
    views = [arrays.view(name, getattr(tree, name)) for name in draft_tree.DTYPES]
    vector, matrix = views[list(draft_tree.DTYPES).index("num_nodes")], views[0]
    for name, kernel, args in (
        ("advance", compact_kv.advance_kernel, (vector, np.int32(0), np.int32(0), vector)),
        ("prepare", step.prepare_kernel, (vector, vector, np.int32(0), *views, vector, matrix)),
        ("finish", step.finish_kernel, (vector, vector, vector, vector, vector)),
    ):
        yield Kernel(name, kernel, launch.signature(launch.type_keys(args)), (step.THREADS, 1), 0)


def accept_calls(lay: Any, dtype: np.dtype, ids: np.dtype) -> dict[str, tuple[ModuleType, Callable[[], Any]]]:
    """Calls that launch one kernel each, and the module that they do it from."""
    tree = tree_of(lay)
    paths = {name: lay(np.zeros(shape, np.int32)) for name, shape in accepted.shapes(2, 3).items()}
    path = accepted.Accepted(**paths)
    rows, probs = lay(np.zeros((2, 4, 64), dtype)), np.zeros((2, 4, 64), np.float32)
    lengths, numbers, per_node = lay(np.zeros(2, np.int32)), lay(np.zeros(2, ids)), lay(np.zeros((2, 4), ids))
    draws = {"seeds": lay(np.zeros(2, np.int64)), "positions": lay(np.zeros(2, np.int32))}
    if lay is strided:
        draws = {"uniforms": lay(np.zeros((2, 4)))}
    controls = lay(np.ones(2, np.float32)), lay(np.ones(2, np.int32)), lay(np.ones(2, np.float32))
    cache = np.zeros((2, 8, 64), dtype)[:, :: 2 if lay is strided else 1]  # rows must follow C order
    moved = [arrays.view("x", x) for x in (lengths, paths["nodes"], paths["num_accepted"], paths["nodes"])]
    flat = lay(np.zeros(8, np.int32))
    return {
        "argmax_tokens": (argmax_tokens, lambda: argmax_tokens.argmax_tokens(rows)),
        "sampled": (sampled, lambda: sampled.accept_sampled(tree, rows, **draws, stop_tokens=numbers, out=path)),
        "target_probs": (target_probs, lambda: target_probs.target_probs(rows, *controls, out=lay(probs))),
        "greedy": (greedy, lambda: greedy.accept_greedy(tree, per_node, stop_tokens=numbers, out=path)),
        "compact_kv": (compact_kv, lambda: compact_kv.move([arrays.view("cache", cache)], *moved)),
        "gather": (compact_kv, lambda: compact_kv.gather_accepted(cache, path)),
        "sglang": (sglang, lambda: sglang.verify_tree_greedy(flat, paths["nodes"], lengths, *[per_node] * 5)),
    }


def tree_of(lay: Any) -> draft_tree.DraftTree:
    """Two trees of 4 nodes."""
    shapes = draft_tree.shapes(2, 4)
    found = {name: lay(np.zeros(shapes[name], dtype)) for name, dtype in draft_tree.DTYPES.items()}
    return draft_tree.DraftTree(**found, max_depth=3)


def front_end_of(
    kernel: Any, signature: tuple[Any, ...], bounds: tuple[int, int], cc: tuple[Any, ...] = ARCHITECTURES[0]
) -> Any:
    """A kernel as Numba gives it to NVVM, which is the same for all architectures here and takes most of the time."""
    code, _ = compiler._compile_pyfunc_with_fixup(
        kernel.py_func, signature, device=False, cc=cc, abi="numba", launch_bounds=bounds
    )
    return code


def ptx_of(code: Any, cc: tuple[Any, ...]) -> str:
    """The PTX for one architecture: what cuda.compile_ptx returns."""
    (ptx,) = code.get_asm_strs(cc=cc)
    return ptx


def linked(data: bytes, cc: tuple[Any, ...]) -> tuple[str, bytes]:
    """What nvJitLink says of the kernel, from PTX or for HOPPER from LTO code, and the machine code."""
    options = [f"-arch=sm_{''.join(map(str, cc))}", "-verbose", *(["-lto"] if cc == HOPPER else [])]
    linker = nvjitlink.create(len(options), options)
    try:
        kind = nvjitlink.InputType.LTOIR if cc == HOPPER else nvjitlink.InputType.PTX
        nvjitlink.add_data(linker, kind, data, len(data), "kernel")
        nvjitlink.complete(linker)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
    finally:
        nvjitlink.destroy(linker)
    return log.decode(), bytes(cubin)


def resources_of(code: Any, cc: tuple[Any, ...], mix: bool = False) -> dict:
    """Compile to machine code; returns registers a thread, bytes spilled, of stack and of code, and float64 count.

    With ``mix`` also the static shared memory of a block, and the instructions by kind.
    """
    ptx = ptx_of(code, cc)
    text, cubin = linked(code.get_ltoir(cc=cc) if cc == HOPPER else ptx.encode(), cc)
    used = {name: int(re.search(pattern, text)[1]) for name, pattern in PATTERNS.items()}
    found = {**used, "float64": len(re.findall(r"\.f64\b", ptx)), "code_bytes": len(cubin)}
    if mix:
        static = re.search(r"(\d+) bytes smem", text)
        found["static_shared"] = int(static[1]) if static else 0
        found["mix"] = mix_of(disassembled(cubin), ptx)
    return found


def occupancy(cc: tuple[int, int], threads: int, registers: int, shared: int) -> dict[str, Any]:
    """Blocks and warps that a multiprocessor holds at a time, of how many warps at most, and what limits them."""
    most_warps, most_blocks, shared_bytes = LIMITS[cc]
    warps = -(-threads // 32)
    of_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    of_block = -(-(shared + SHARED_RESERVED) // SHARED_UNIT) * SHARED_UNIT
    limits = {
        "threads": most_warps // warps,
        "blocks": most_blocks,
        "registers": REGISTERS // PARTITIONS // of_warp * PARTITIONS // warps,
        "shared": shared_bytes // of_block,
    }
    blocks = min(limits.values())
    by = "+".join(name for name, limit in limits.items() if limit == blocks)
    return {"blocks": blocks, "warps": blocks * warps, "most_warps": most_warps, "limited_by": by}


def nvdisasm() -> str | None:
    """The disassembler: on the path, or of the toolkit wheels."""
    spec = find_spec("nvidia")
    wheels = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    return shutil.which("nvdisasm") or next((str(x) for folder in wheels for x in folder.glob("*/bin/nvdisasm")), None)


def disassembled(cubin: bytes) -> str | None:
    """The machine code as text; None without a disassembler that knows it."""
    tool = nvdisasm()
    if tool is None:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--print-code", file.name], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


def mix_of(sass: str | None, ptx: str) -> dict[str, Any]:
    """Instructions by kind, where they were counted, and how many there are in all."""
    if sass is not None:
        names = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", sass, re.M)
        names = [name for name in names if name != "NOP"]
    else:
        statement = r"(?:^|[;{])[ \t]*(?:@!?%?\w+[ \t]+)?([a-z][\w.:]*)[ \t][^;{}]*"
        names = re.findall(statement + r"(?:\{[^{}]*\}[^;{}]*)*(?=;)", re.sub(r"//[^\n]*", "", ptx), re.M)
    patterns = {kind: re.compile(pair[sass is None]) for kind, pair in KINDS.items()}
    counts = Counter(next((kind for kind, p in patterns.items() if p.match(name)), "other") for name in names)
    kinds = {kind: counts[kind] for kind in (*KINDS, "other")}
    return {"of": "PTX" if sass is None else "SASS", "all": len(names), **kinds}


def compile_kernel(
    kernel: Any, signature: tuple[Any, ...], bounds: tuple[int, int], *ccs: tuple[Any, ...], mix: bool = False
) -> list:
    """The resources of a kernel on each of these architectures."""
    code = front_end_of(kernel, signature, bounds, *(cc for cc in ccs if cc == HOPPER))
    return [resources_of(code, cc, mix) for cc in ccs]


PATTERNS = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}


JOBS: list[tuple[Kernel, list, bool]] = []  # and architectures, and whether the instructions are wanted; workers are
# forked from this process, and find it filled


def _compile_job(n: int) -> list:
    kernel, ccs, mix = JOBS[n]
    if kernel.hopper:
        ccs = [HOPPER for _ in ccs]
    return compile_kernel(kernel.dispatcher, kernel.signature, kernel.bounds, *ccs, mix=mix)


def print_mix(rows: list[dict], width: int | None) -> None:
    """Occupancy, and instructions."""
    table = Table(
        "kernel", "arch", "threads", "blocks", "warps", "limited by", title="blocks and warps a multiprocessor"
    )
    for row in rows:
        warps = f"{row['warps']} of {row['most_warps']}"
        table.add_row(row["kernel"], row["arch"], str(row["threads"]), str(row["blocks"]), warps, row["limited_by"])
    Console(width=width).print(table)
    where = " and ".join(sorted({row["mix"]["of"] for row in rows}))
    table = Table("kernel", "arch", *[k for k in rows[0]["mix"] if k != "of"], title=f"instructions in the {where}")
    for row in rows:
        table.add_row(row["kernel"], row["arch"], *(str(n) for kind, n in row["mix"].items() if kind != "of"))
    Console(width=width and 200).print(table)


def main() -> int:
    """Compile all, print a table or JSON, and return 1 if a kernel is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    names = [f"sm_{major}{minor}" for major, minor in ARCHITECTURES]
    parser.add_argument("--arch", nargs="+", choices=names, default=names, help="architectures; default: all")
    parser.add_argument("--kernel", nargs="+", choices=MAX_REGISTERS, default=MAX_REGISTERS, help="default: all")
    parser.add_argument("--mix", action="store_true", help="occupancy and instructions too")
    options = parser.parse_args()
    try:
        nvjitlink.version()
    except Exception as error:
        sys.exit(f"{error}\nThis needs the toolkit wheels: pip install 'ddtree-numba[compile]'")
    wanted = [cc for cc, name in zip(ARCHITECTURES, names, strict=True) if name in options.arch]
    JOBS.extend(
        (kernel, [cc for cc in wanted if cc in kernel.architectures], options.mix)
        for kernel in kernels()
        if kernel.variant in options.kernel
    )
    rows, mixes = [], []
    with multiprocessing.get_context("fork").Pool() as pool:  # a process a core: compiling holds the interpreter's lock
        results = pool.imap(_compile_job, range(len(JOBS)))
        found_all = list(track(results, "compiling", total=len(JOBS), console=Console(stderr=True)))
    compiled = [(kernel, cc) for kernel, ccs, _ in JOBS for cc in ccs]
    for (kernel, cc), found in zip(compiled, chain.from_iterable(found_all), strict=True):
        ok = not (found["stack"] or found["spill_stores"] or found["spill_loads"])
        ok = ok and kernel.float64 == bool(found["float64"]) and 0 < found["registers"] <= MAX_REGISTERS[kernel.variant]
        more = {name: found.pop(name) for name in ("static_shared", "mix") if name in found}
        rows.append({"kernel": kernel.name, "arch": f"sm_{cc[0]}{cc[1]}", **found, "shared": kernel.shared, "ok": ok})
        if options.mix:
            held = occupancy(cc, kernel.bounds[0], found["registers"], kernel.shared + more["static_shared"])
            mixes.append({**rows[-1], "threads": kernel.bounds[0], **held, **more})
    if options.json:
        print(json.dumps(mixes or rows, indent=2))
    else:
        table = Table(*rows[0], title=TITLE)
        for row in rows:
            table.add_row(*("ok" if v is True else "FAIL" if v is False else str(v) for v in row.values()))
        width = None if sys.stdout.isatty() else 120
        Console(width=width).print(table)
        if mixes:
            print_mix(mixes, width)
    failed = sum(not row["ok"] for row in rows)
    print(f"{len(rows) - failed} kernels compiled as they must be, {failed} did not", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
