"""The CUDA C++ port of three_phase: compiled by nvcc, run on the host and on a GPU, and explained in docs/porting.md.

On the host, cuda_on_host.hpp stands in for CUDA. That shows what a GPU would not: reads out of bounds by a single
element, and each missing barrier in every run.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ddtree_numba as dd
from ddtree_numba import kdtr
from ddtree_numba.attention import three_phase
from ddtree_numba.device.launch import compute_capability
from ddtree_numba.device.runtime import SIMULATOR
from refs import oracle

ROOT = Path(__file__).resolve().parents[1]
NATIVE, PAGE = ROOT / "refs" / "native", ROOT / "docs" / "porting.md"
PORT, NUMBA = NATIVE / "verify_attn.cu", Path(three_phase.__file__)
REFS = sorted((ROOT / "refs").glob("verify_attn_*.kdtr"))
INCLUDES = ["-I", str(ROOT / "tests"), "-I", str(NATIVE), "-I", str(ROOT / "ddtree_numba" / "include")]
# No fused multiply-adds, which NumPy does not have either.
FLAGS = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", *INCLUDES]
GPU_THREADS = 256

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def find_nvcc() -> str | None:
    """A toolkit's nvcc on the PATH, or that of the extra `compile`."""
    wheels = importlib.util.find_spec("nvidia")
    folders = [] if wheels is None else list(wheels.submodule_search_locations or [])
    found = [shutil.which("nvcc"), *(str(path) for folder in folders for path in Path(folder).glob("*/bin/nvcc"))]
    return next((path for path in found if path is not None), None)


NVCC = find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc, which the extra 'compile' brings")


def run(*command: object, **options) -> str:
    """Standard output and error of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=120,
        **options,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def nvcc(*arguments: object) -> str:
    assert NVCC is not None
    library = Path(NVCC).resolve().parent.parent / "lib"  # the wheels have no lib64, where nvcc looks
    return run(NVCC, "-std=c++17", "-O2", *INCLUDES, "-L", library, *arguments)


# On the host

Change = tuple[str, str]

# Each must be noticed by the check program.
MISTAKES: dict[str, Change] = {
    "last key left out": ("num_keys = prefix + num_nodes;", "num_keys = prefix + num_nodes - 1;"),
    "prefix one short": ("min(max(cache_seqlens(b), 0)", "min(max(cache_seqlens(b) - 1, 0)"),
    "mask bit off by one": (">> (j % bits_per_word)", ">> ((j + 1) % bits_per_word)"),
    "mask of the first word": ("tree_mask(b, i, j / bits_per_word)", "tree_mask(b, i, 0)"),
    "mask of the first request": ("tree_mask(b, i,", "tree_mask(0, i,"),
    "table of the first request": ("block_table(b, key / page_size)", "block_table(0, key / page_size)"),
    "run from the start of the page": ("column = &kv_cache(page, slot, d);", "column = &kv_cache(page, 0, d);"),
    "first node for all": ("q_row[c] = q(b, i, h, c)", "q_row[c] = q(b, 0, h, c)"),
    "odd terms left out": (
        "partial[(key - first) * PITCH + lane] = s + s_odd;",
        "partial[(key - first) * PITCH + lane] = s;",
    ),
    "scale forgotten": ("(s + s_odd) * sm_scale", "s + s_odd"),
    "max from 0": ("float m_i = NEG_INF;", "float m_i = 0.0f;"),
    "max for sum": ("l_i = block_sum(partial, l_i);", "l_i = block_max(partial, l_i);"),
    "not divided": ("scores[key] /= l_i;", "scores[key] /= 1.0f;"),
    "last chunk left out": ("acc += mid + chunk;", "acc += mid;"),
    "last group left out": ("acc += mid + chunk;", "acc += chunk;"),
    "column by column": ("column[std::int64_t{n} * head_dim]", "column[n]"),
    "lse without max": ("m_i + logf(l_i)", "logf(l_i)"),
    "lse in bits": ("logf(l_i)", "log2f(l_i)"),
    "empty row not written": ("out(b, i, h, d) = 0.0f;", "(void)d;"),
}
# The same sums in another order. Their results are as good, and the bits differ.
ORDERS: dict[str, Change] = {
    "one long sum": ("if (stop % CHUNK == 0)", "if (stop < 0)"),
    "no groups": ("if (stop % GROUP == 0)", "if (stop < 0)"),
    "lanes added one by one": ("s_odd += partial[", "s += partial["),
    "even and odd terms in one sum": ("s_odd += q_lane[", "s += q_lane["),
}
# Where the functions of the GPU begin and end.
GPU_PART = ("struct Place {", "// Dynamic shared memory of a block")
BARRIER = "__syncthreads();"
RIGHT = {"right": PORT.read_text(encoding="utf-8")}
BARRIERS = RIGHT["right"].count(BARRIER)


def changed(source: str, old: str, new: str) -> str:
    """With one text replaced; a text that is no longer there raises, so that a mistake cannot stop being one."""
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    return source.replace(old, new)


def without_barrier(source: str, n: int) -> str:
    """Without the n-th barrier."""
    pieces = source.split(BARRIER)
    return BARRIER.join(pieces[: n + 1]) + "/* no barrier */" + BARRIER.join(pieces[n + 1 :])


def ports() -> dict[str, str]:
    """The port under the name "right", and wrong ones."""
    right = RIGHT["right"]
    found = RIGHT | {name: changed(right, *change) for name, change in (MISTAKES | ORDERS).items()}
    found |= {f"barrier {n}": without_barrier(right, n) for n in range(BARRIERS)}
    step = "if (t < width) partial[t] += "
    return found | {"diverged": changed(right, step, f"if (t == 0) {BARRIER} else {step}")}


def on_host(sources: dict[str, str]) -> str:
    """One C++ file of many ports, in which the environment variable PORT chooses the kernel.

    What stands before and behind the functions of the GPU is that of the first source: compiling it again for each
    kernel would take longest.
    """
    host = next(iter(sources.values()))
    host, launches = re.subn(r"(\w+)<<<([^>]*)>>>\(", r"cuda_on_host::configure(\1, \2)(", host)
    head, tail = host[: host.index(GPU_PART[0])], host[host.index(GPU_PART[1]) :]
    lines = ['#include "cuda_on_host.hpp"', '#line 1 "verify_attn.cu"', head]
    # The libraries of C++ and NumPy round these differently; rounded from float64 they are equal.
    lines += [f"#define {name}f(x) static_cast<float>(std::{name}(static_cast<double>(x)))" for name in ("exp", "log")]
    for n, (name, source) in enumerate(sources.items()):
        kernel = source[source.index(GPU_PART[0]) : source.index(GPU_PART[1])]
        shared = r"\1* \2 = cuda_on_host::shared_memory<\1>();"
        kernel, arrays = re.subn(r"extern __shared__ (\w+) (\w+)\[\];", shared, kernel)
        assert launches == arrays == 1
        line = source[: source.index(GPU_PART[0])].count("\n") + 1
        lines += [f"namespace port_{n} {{", f'#line {line} "verify_attn.cu, {name}"', kernel, "}"]
    lines += ["auto* const kernel = [] {", '    const char* chosen = std::getenv("PORT");']
    lines += ['    const std::string name = chosen == nullptr ? "right" : chosen;']
    lines += [f'    if (name == "{name}") return &port_{n}::kernel;' for n, name in enumerate(sources)]
    lines += ['    throw std::invalid_argument("no port " + name);', "}();", tail]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("porting")


@pytest.fixture(scope="module")
def check_object(folder) -> Path:
    run("g++", *FLAGS, "-c", NATIVE / "check_verify_attn.cpp", "-o", folder / "check.o")
    return folder / "check.o"


def build(folder: Path, check_object: Path, name: str, sources: dict[str, str], *flags: str) -> Path:
    (folder / f"{name}.cpp").write_text(on_host(sources), encoding="utf-8")
    run("g++", *FLAGS, *flags, folder / f"{name}.cpp", check_object, "-o", folder / name)
    return folder / name


@pytest.fixture(scope="module")
def program(folder, check_object) -> Path:
    """The check program with the port and all wrong ones."""
    return build(folder, check_object, "ports", ports(), "-w")  # of some, parameters are unused


def check(program: Path, *arguments: object, port: str = "right", **environment: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [str(word) for word in (program, *arguments)],
        env=os.environ | {"PORT": port} | environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.fixture(scope="module")
def few_heads(folder) -> list[Path]:
    """The reference files with a head each, those of eight heads with two: no block sees another, and 64 take long."""
    (folder / "refs").mkdir()
    for path in REFS:
        tensors = dict(kdtr.read(path))
        for name in ("q", "out", "lse"):
            if "wide" not in path.name:  # each of its heads is special
                heads = 2 if "_h8_" in path.name else 1
                tensors[name] = np.ascontiguousarray(tensors[name][:, :, -heads:])
        kdtr.write(folder / "refs" / path.name, tensors)
    return [folder / "refs" / path.name for path in REFS]


def one_request(path: Path, prefix: int) -> Path:
    """A file with a prefix of this length, a root and a child, one narrow head."""
    rng = np.random.default_rng(7)
    q = rng.standard_normal((1, 2, 1, 32)).astype(np.float32)
    kv_cache = rng.standard_normal((1, prefix + 2, 32)).astype(np.float32)
    given = q, kv_cache, np.array([prefix], np.int32), np.array([[[1], [3]]], np.uint32)
    out, lse = oracle.verify_attention(*given, sm_scale=0.25, kv_lora_rank=16)
    tensors = dict(zip(("q", "kv_cache", "cache_seqlens", "tree_mask"), given, strict=True))
    tensors |= {"sm_scale": np.float64(0.25), "kv_lora_rank": np.int32(16), "logit_magnitude": np.float64(1.5)}
    tensors |= {"operator": np.frombuffer(b"verify_attention", np.uint8)}
    kdtr.write(path, tensors | {"out": out.astype(np.float32), "lse": lse.astype(np.float32)})
    return path


@pytest.fixture(scope="module")
def sanitized(folder, check_object) -> Path:
    """The check program with the port alone, without a warning, under sanitizers."""
    return build(folder, check_object, "sanitized", RIGHT, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@needs_gxx
def test_the_port_passes_every_reference_file_on_the_host_under_sanitizers(sanitized, few_heads):
    code, lines = check(sanitized, *few_heads)
    assert code == 0 and len(lines) == len(REFS) == 16
    assert all(line.endswith("  ok") for line in lines)


@needs_gxx
def test_the_port_adds_in_the_mirrors_order_so_bits_are_equal(folder, program, few_heads):
    code, _ = check(program, "--save", folder / "found", *few_heads)
    assert code == 0
    for path in few_heads:
        out, lse = mirror(path)
        found = kdtr.read(folder / "found" / path.name)
        assert found["out"].tobytes() == out.tobytes(), path.name
        assert found["lse"].tobytes() == lse.tobytes(), path.name


@functools.cache
def mirror(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """What the mirror makes of a file with the GPU's block size, exp and log rounded from float64."""
    tensors = kdtr.read(path)
    names = ("q", "kv_cache", "cache_seqlens", "tree_mask")
    given = {name: np.asarray(tensors[name]) for name in names} | {"block_table": tensors.get("block_table")}
    exp, log = np.exp, np.log
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(three_phase, "THREADS", GPU_THREADS)
        patch.setattr(np, "exp", lambda x: exp(x, dtype=np.float64).astype(np.float32))
        patch.setattr(np, "log", lambda x: log(x, dtype=np.float64).astype(np.float32))
        return dd.verify_attention(
            **given,
            sm_scale=float(tensors["sm_scale"]),
            kv_lora_rank=int(tensors["kv_lora_rank"]),
            variant="three_phase_numpy",
            out_dtype=np.float32,
        )


@needs_gxx
@pytest.mark.parametrize("order", ORDERS)
def test_another_order_of_additions_passes_the_check_and_has_other_bits(folder, program, few_heads, order):
    path = next(path for path in few_heads if "p1300" in path.name)  # more keys than a group has
    code, _ = check(program, "--save", folder / order, path, port=order)
    assert code == 0
    assert kdtr.read(folder / order / path.name)["out"].tobytes() != mirror(path)[0].tobytes()


# Far logits, padded nodes, two words of mask, pages, groups: the quick ones first.
TELLING = ("_wide.", "_h8_p0_", "_p20_b32.", "_h16_p200_", "_p1300_")
# The last one of block_sum guards what a later call would write, and there is none.
GUARDING = [n for n in range(BARRIERS) if n != 5]


@needs_gxx
@pytest.mark.parametrize("port", [*MISTAKES, *(f"barrier {n}" for n in GUARDING)])
def test_wrong_ports_fail(program, few_heads, port):
    paths = [path for mark in TELLING for path in few_heads if mark in path.name]
    assert len(paths) == len(TELLING)
    for path in paths:
        code, lines = check(program, path, port=port)
        if code == 0:
            continue
        # Or some threads return early, which the stand-in for CUDA does not let pass.
        assert (code == 1 and re.search("  FAIL (out: |lse is off)", lines[0])) or (code == 3 and "barrier" in port)
        return
    pytest.fail("no file told")


@needs_gxx
def test_a_long_row_needs_the_attribute_and_too_long_a_one_is_refused(folder, check_object, program, tmp_path):
    long, too_long = one_request(tmp_path / "long.kdtr", 13_000), one_request(tmp_path / "too_long.kdtr", 58_000)
    code, (line,) = check(program, long)
    assert code == 0 and line.endswith("  ok")
    without = re.sub(r"CHECK\(cudaFuncSetAttribute\(.*\)\);", "", RIGHT["right"])
    code, (line,) = check(build(folder, check_object, "without", {"right": without}), long)
    assert code == 1 and line.endswith("  FAIL cudaGetLastError(): invalid argument")
    code, (line,) = check(program, too_long)
    wanted = f"a score row of 58002 keys needs {4 * (32 + 64 * 9 + 58_002)} bytes of shared memory; this GPU has 232448"
    assert code == 1 and line.endswith(f"  FAIL {wanted}")


@needs_gxx
def test_offsets_have_64_bits(folder):
    source = RIGHT["right"]
    main = """
}
int main() {
    const auto* start = reinterpret_cast<const char*>(std::uintptr_t{1} << 40);
    const Array<const char, 3> cache{start, {5, 50000, 50000}};
    return &cache(4, 49999, 49998) - start == 12499999998 ? 0 : 1;
}
"""
    head = '#include "cuda_on_host.hpp"\n' + source[: source.index(GPU_PART[0])]
    (folder / "offsets.cpp").write_text(head + main, encoding="utf-8")
    run("g++", *FLAGS, "-w", folder / "offsets.cpp", "-o", folder / "offsets")  # some constants are unused
    run(folder / "offsets")


@needs_gxx
def test_the_stand_in_sees_barriers_that_not_all_threads_reach(program, few_heads):
    command = [program, few_heads[3]]
    done = subprocess.run(command, env=os.environ | {"PORT": "diverged"}, capture_output=True, encoding="utf-8")
    assert done.returncode == 3 and "wait at different barriers" in done.stderr


# nvcc

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
STRICT = ["-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror"]


@pytest.fixture(scope="module")
def compiled(folder) -> tuple[Path, str, str]:
    """The port's object file for all architectures from one PTX, what ptxas says, and the PTX."""
    return compile_port(folder / "gpu", PORT.read_text(encoding="utf-8"), ARCHITECTURES)


def compile_port(folder: Path, source: str, architectures: tuple[str, ...]) -> tuple[Path, str, str]:
    folder.mkdir()
    (folder / "verify_attn.cu").write_text(source, encoding="utf-8")
    codes = [word for arch in architectures for word in ("-gencode", f"arch=compute_80,code={arch}")]
    arguments = [*STRICT, *codes, "-Xptxas", "-v", "--keep", "--keep-dir", folder, "-c", folder / "verify_attn.cu"]
    log = nvcc(*arguments, "-o", folder / "port.o")
    (ptx,) = folder.glob("*.ptx")
    return folder / "port.o", log, ptx.read_text(encoding="utf-8")


@needs_nvcc
def test_nvcc_compiles_it_without_warnings_spills_or_float64(compiled):
    _, log, ptx = compiled
    assert sorted(re.findall(r"Compiling entry function '\w*kernel\w*' for '(\w+)'", log)) == sorted(ARCHITECTURES)
    resources = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert resources == [("0", "0", "0")] * len(ARCHITECTURES)
    registers = [int(used) for used in re.findall(r"Used (\d+) registers", log)]
    assert len(registers) == len(ARCHITECTURES) and all(32 <= used <= 64 for used in registers)
    assert "fma.rn.f32" in ptx and ".f64" not in ptx


@needs_nvcc
def test_the_gates_see_spills_float64_and_warnings(folder):
    source = PORT.read_text(encoding="utf-8")
    crowded = changed(source, "__launch_bounds__(THREADS, 4)", "__launch_bounds__(1024, 2)")
    crowded = changed(crowded, "scores[key] = (s + s_odd) * sm_scale;", "scores[key] = (s + s_odd) * sm_scale * 1.1;")
    _, log, ptx = compile_port(folder / "crowded", crowded, ("sm_90",))
    assert re.search(r" [1-9]\d* bytes spill stores", log) and ".f64" in ptx
    unused = changed(source, "    float* q_row = shared;", "    int unused;\n    float* q_row = shared;")
    with pytest.raises(AssertionError, match="unused"):
        compile_port(folder / "unused", unused, ("sm_90",))


@needs_gxx
@needs_nvcc
def test_it_links_and_says_what_is_wrong_where_no_gpu_is_visible(folder, check_object, compiled):
    nvcc(check_object, compiled[0], "-o", folder / "no_gpu")
    code, lines = check(folder / "no_gpu", *REFS[:2], CUDA_VISIBLE_DEVICES="")
    assert code == 1 and len(lines) == 2
    assert all("  FAIL cudaGetDevice(&device): " in line and "CUDA" in line for line in lines)


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(SIMULATOR, reason="the port runs on a CUDA GPU alone")
@needs_nvcc
def test_the_port_passes_every_reference_file_on_a_gpu_and_is_close_to_the_numba_kernel(folder):
    major, minor = compute_capability(-1)
    program = folder / "on_gpu"
    nvcc(f"-arch=sm_{major}{minor}", NATIVE / "check_verify_attn.cpp", PORT, "-o", program)
    long = one_request(folder / "long.kdtr", 13_000)
    code, lines = check(program, "--save", folder / "gpu_results", *REFS, long)
    assert code == 0 and len(lines) == len(REFS) + 1, "\n".join(lines)
    for path in REFS:
        tensors, found = kdtr.read(path), kdtr.read(folder / "gpu_results" / path.name)
        names = ("q", "kv_cache", "cache_seqlens", "tree_mask")
        out, lse = dd.verify_attention(
            **{name: tensors[name] for name in names},
            block_table=tensors.get("block_table"),
            sm_scale=float(tensors["sm_scale"]),
            kv_lora_rank=int(tensors["kv_lora_rank"]),
            variant="three_phase",
            out_dtype=np.float32,
        )
        # The order of additions is one; which multiply-adds are fused is each compiler's choice.
        num_keys = int(tensors["cache_seqlens"].max()) + out.shape[1]
        bound = three_phase.error_bound(float(tensors["logit_magnitude"]), num_keys, tensors["q"].shape[3])
        assert np.linalg.norm(found["out"] - out) <= bound * np.linalg.norm(out), path.name
        seen = np.isfinite(lse)
        assert np.array_equal(np.isfinite(found["lse"]), seen)
        assert np.all(np.abs(found["lse"][seen] - lse[seen]) <= 1e-6 * np.maximum(1, np.abs(lse[seen]))), path.name


# The page

# Where each source has what the page explains line by line: from one text up to another.
EXPLAINED = {
    "py": (NUMBA, "@cuda.jit(device=True", "def error_bound("),
    "cpp": (PORT, "// A Numba array", "void require("),
}


def quoted(language: str) -> list[str]:
    """The page's blocks in one language."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def explained(language: str) -> str:
    path, first, last = EXPLAINED[language]
    source = path.read_text(encoding="utf-8")
    return source[source.index(first) : source.index(last)]


def headings(text: str, mark: str) -> list[str]:
    return re.findall(rf"^\s*{mark} (Phase \d: .*)$", text, re.MULTILINE)


def constants(text: str) -> Iterator[tuple[str, str]]:
    for name in ("LANES", "KEYS_PER_PASS", "PITCH", "CHUNK", "GROUP"):
        (value,) = re.findall(rf"\b{name} = ([\w *+]+?)(?:;|  #|$)", text, re.MULTILINE)
        yield name, value


def test_port_and_kernel_have_the_same_phases_and_constants():
    numba, port = NUMBA.read_text(encoding="utf-8"), PORT.read_text(encoding="utf-8")
    phases = headings(explained("py"), "#")
    assert len(phases) == 4 and headings(port, "//") == phases
    assert headings(PAGE.read_text(encoding="utf-8"), "##") == phases
    assert dict(constants(port)) == dict(constants(numba))
    assert f"THREADS = {GPU_THREADS};" in port and f"else {GPU_THREADS}\n" in numba


@pytest.mark.parametrize("language", ["py", "cpp"])
def test_every_excerpt_stands_in_its_source(language):
    source = EXPLAINED[language][0].read_text(encoding="utf-8")
    blocks = quoted(language)
    assert len(blocks) >= 6
    for block in blocks:
        assert any(textwrap.indent(block, " " * n) in source for n in (0, 4, 8)), block


@pytest.mark.parametrize("language", ["py", "cpp"])
def test_the_page_leaves_out_no_line_of_the_kernels(language):
    on_page = {line.strip() for block in quoted(language) for line in block.splitlines()}
    in_source = [line.strip() for line in explained(language).splitlines()]
    assert len(in_source) > 100
    assert [line for line in in_source if line not in on_page] == []
