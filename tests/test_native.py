"""The C++ header and the C++ check: same bytes and same errors as the Python module, and wrong results do not pass."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from test_kdtr import DAMAGE, DTYPES, GOLDEN_BYTES, LONGEST, SAMPLE, dump, mutate, put, reseal
from test_native_checks import Built, built

from ddtree_numba import kdtr

ROOT = Path(__file__).resolve().parents[1]
INCLUDE, NATIVE = ROOT / "ddtree_numba" / "include", ROOT / "refs" / "native"
REFS = sorted((ROOT / "refs").glob("verify_attn_*.kdtr"))
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-I", str(INCLUDE)]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

# Replacing operator new counts what a read asks for, all of it, freed or not.
DRIVER = r"""
#include <cstdlib>
#include <iostream>
#include <new>
#include <typeinfo>

#include "kdtr.hpp"

static std::size_t requested = 0;

__attribute__((noinline)) void* operator new(std::size_t size) {
    requested += size;
    if (void* p = std::malloc(size)) return p;
    throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, std::size_t) noexcept { std::free(p); }

template <class Action>
std::string outcome(Action action) {
    using namespace kdtr;
    try {
        action();
        return "ok";
    }
#define KIND(name) catch (const name& e) { return typeid(e) == typeid(name) ? #name : "a class derived from " #name; }
    KIND(KdtrEmptyError) KIND(KdtrMagicError) KIND(KdtrVersionError) KIND(KdtrTruncatedError)
    KIND(KdtrChecksumError) KIND(KdtrTrailingError) KIND(KdtrLayoutError) KIND(KdtrNameError) KIND(KdtrDtypeError)
    KIND(KdtrShapeError) KIND(KdtrValueError) KIND(KdtrError)
    catch (const std::system_error& e) { return e.code().message(); }
    catch (const std::exception& e) { return e.what(); }
}

static_assert(std::is_base_of_v<std::runtime_error, kdtr::KdtrError>);
static_assert(std::is_base_of_v<kdtr::KdtrLayoutError, kdtr::KdtrTrailingError>);

int main(int argc, char** argv) {
    const std::string mode = argv[1];
    if (mode == "rewrite") {
        for (int i = 2; i < argc; i += 2) kdtr::write(argv[i + 1], kdtr::read(argv[i]).tensors);
    } else if (mode == "read") {  // paths on stdin; outcome and bytes requested
        for (std::string path; std::getline(std::cin, path);) {
            requested = 0;
            const std::string kind = outcome([&] { kdtr::read(path); });
            std::cout << requested << " " << kind << "\n";
        }
    } else if (mode == "write") {  // into the file argv[2], each refused
        using kdtr::Tensor;
        using kdtr::Dtype;
        const std::string longest(159, 'n');
        const std::vector<std::vector<Tensor>> refused = {
            {{"", Dtype::uint8, {}, {1}}}, {{longest + "n", Dtype::uint8, {}, {1}}},
            {{std::string("a\0b", 3), Dtype::uint8, {}, {1}}}, {{"\xc0\x80", Dtype::uint8, {}, {1}}},
            {{"x", Dtype::uint8, {}, {1}}, {"x", Dtype::uint8, {}, {1}}}, {{"x", Dtype(0), {}, {1}}},
            {{"x", Dtype(14), {}, {1}}}, {{"x", Dtype::uint8, {1, 1, 1, 1, 1, 1, 1, 1, 1}, {1}}},
            {{"x", Dtype::uint8, {2}, {1}}}, {{"x", Dtype::int16, {0, 1ull << 62}, {}}},
            {{"x", Dtype::uint8, {1ull << 32, 1ull << 32}, {}}}, {{"x", Dtype::boolean, {2}, {1, 2}}}};
        for (const auto& tensors : refused) std::cout << outcome([&] { kdtr::write(argv[2], tensors); }) << "\n";
    } else if (mode == "use") {
        const float values[] = {1.5f, -2};
        kdtr::write(argv[2], {kdtr::Tensor::of<float>("x", {1, 2}, values), kdtr::Tensor::of<bool>("e", {0}, nullptr)});
        const kdtr::File file = kdtr::read(argv[2]);
        const kdtr::Tensor& x = file.at("x");
        std::cout << x.size() << " " << x.as<float>()[0] << " " << x.as<float>()[1] << " " << x.shape.size() << "\n"
                  << file.at("e").size() << " " << (file.at("e").as<bool>() == nullptr) << "\n"
                  << outcome([&] { x.as<double>(); }) << "\n" << outcome([&] { file.at("y"); }) << "\n"
                  << (file.find("y") == nullptr) << "\n";
    } else {
        std::cout << outcome([&] { kdtr::write(argv[2], {}); }) << "\n";
    }
}
"""


def run(*command, **options) -> str:
    return subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=60, **options).stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> list[Path]:
    """The driver as users compile it, and under the sanitizers, which end it at the first fault."""
    folder = tmp_path_factory.mktemp("native")
    (folder / "driver.cpp").write_text(DRIVER, encoding="utf-8")
    run("g++", *FLAGS, "driver.cpp", "-o", "plain", cwd=folder)
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    # Not optimized: under the sanitizers that takes three times as long.
    run("g++", *FLAGS, "-O0", *sanitizers, "driver.cpp", "-o", "sanitized", cwd=folder)
    return [folder / "plain", folder / "sanitized"]


# The header


def test_rewriting_keeps_every_byte(tmp_path, programs):
    rng = np.random.default_rng(3)
    every = {}
    for dtype in DTYPES:
        for shape in [(), (1,), (0,), (3, 0, 2), (2, 3, 4), (64,), (1, 2, 1, 2, 1, 2, 1, 3)]:
            raw = rng.integers(0, 2 if dtype == np.bool_ else 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
            every[f"{dtype.name} {shape}"] = raw.view(dtype).reshape(shape)
    limits = {LONGEST.decode(): np.zeros([1] * 8), "ä" * 79: np.zeros((2**63 // 4 - 1, 0, 1), np.int16)}
    limits |= {"\U0010ffff\ud7ff\ue000\u0800": np.zeros(0, np.int8)}
    for i, tensors in enumerate([{}, SAMPLE, every, limits]):
        kdtr.write(tmp_path / f"{i}.kdtr", tensors)
    for program in programs:
        run(program, "rewrite", *[name for i in range(4) for name in (f"{i}.kdtr", f"{i}.copy")], cwd=tmp_path)
        for i in range(4):
            assert (tmp_path / f"{i}.copy").read_bytes() == (tmp_path / f"{i}.kdtr").read_bytes()
            (tmp_path / f"{i}.copy").unlink()
    assert len(list(tmp_path.iterdir())) == 4, "a temporary file was left"


def python_outcome(path: Path) -> str:
    try:
        kdtr.read(path)
    except kdtr.KdtrError as error:
        return type(error).__name__
    return "ok"


def crafted(folder: Path) -> list[bytes]:
    blobs = []
    # Pairs, so that the checks must come in the same order; without new checksums as well.
    all_edits = [edits for _, _, edits in DAMAGE]
    for first, second in itertools.combinations_with_replacement(all_edits, 2):
        damaged = GOLDEN_BYTES
        for field, *values in (*first, *second):
            damaged = put(damaged, field, *values)
        blobs.append(reseal(damaged))
        if first is second:
            blobs += [damaged, blobs[-1][:0x240] + b"\xff" + blobs[-1][0x241:]]
    # Each form of UTF-8, at both ends of its range and one beyond.
    points = ["7f", "80", "c1bf", "c280", "dfbf", "df", "e09fbf", "e0a080", "ed9fbf", "eda080", "edbfbf", "ee8080"]
    points += ["efbfbf", "efbf", "f08fbfbf", "f0908080", "f48fbfbf", "f4908080", "f5808080", "ff", "c220", "e2822020"]
    blobs += [reseal(put(GOLDEN_BYTES, "0.name", bytes.fromhex(point))) for point in points]
    padding = bytearray(GOLDEN_BYTES)
    padding[0x27F] = 1
    mask = dump(folder, {"mask": np.ones(3, np.bool_)}).replace(b"\1\1\1", b"\1\2\1")
    blobs += [reseal(bytes(padding)), reseal(mask)]
    sample = dump(folder, SAMPLE)
    rng = random.Random(23)
    blobs += [mutate(sample, rng) for _ in range(1500)]
    empty = dump(folder, {})
    blobs += [empty[:length] for length in range(65)] + [empty + b"\0", GOLDEN_BYTES + bytes(64), b"x", sample]
    blobs += [rng.randbytes(rng.randrange(400)) for _ in range(50)]
    blobs += [GOLDEN_BYTES[:12] + rng.randbytes(rng.randrange(400)) for _ in range(50)]
    return blobs


@pytest.mark.parametrize("kind", ["truncations", "bit flips", "crafted"])
def test_the_same_damage_is_the_same_error(tmp_path, programs, kind):
    if kind == "truncations":
        blobs = [GOLDEN_BYTES[:length] for length in range(len(GOLDEN_BYTES) + 1)]
    elif kind == "bit flips":
        number = int.from_bytes(GOLDEN_BYTES, "little")
        blobs = [(number ^ 1 << bit).to_bytes(len(GOLDEN_BYTES), "little") for bit in range(8 * len(GOLDEN_BYTES))]
    else:
        blobs = crafted(tmp_path)
    paths = [tmp_path / f"{i}.kdtr" for i in range(len(blobs))]
    for path, blob in zip(paths, blobs, strict=True):
        path.write_bytes(blob)
    wanted = [python_outcome(path) for path in paths]
    if kind == "crafted":
        every = {name for name in kdtr.__all__ if name.startswith("Kdtr")} - {"KdtrError"}
        assert set(wanted) == every | {"ok"}
    else:
        assert wanted.count("ok") == (kind == "truncations")
    for program in programs:
        lines = run(program, "read", input="".join(f"{path}\n" for path in paths)).splitlines()
        found = [line.split(" ", 1) for line in lines]
        assert [outcome for _, outcome in found] == wanted
        for (requested, _), blob in zip(found, blobs, strict=True):
            assert int(requested) <= 3 * len(blob) + 20_000, "a claim of the file was believed"


def test_a_large_file_is_held_once(tmp_path, programs):
    kdtr.write(tmp_path / "large.kdtr", {"x": np.zeros(10**6, np.float32)})
    requested, outcome = run(programs[0], "read", input=f"{tmp_path}/large.kdtr\n").split()
    assert outcome == "ok" and int(requested) <= 4 * 10**6 + 20_000


def test_what_is_no_file_is_a_system_error(tmp_path, programs):
    (tmp_path / "none").touch()
    for program in programs:
        lines = run(program, "read", input=f"{tmp_path}\n{tmp_path}/missing\n{tmp_path}/none\n").splitlines()
        kinds = [line.split(" ", 1)[1] for line in lines]
        assert kinds == ["Is a directory", "No such file or directory", "KdtrEmptyError"]


def test_what_kdtr_cannot_hold_is_refused_and_the_old_file_stays(tmp_path, programs):
    old = tmp_path / "old.kdtr"
    old.write_bytes(b"old")
    wanted = ["KdtrNameError"] * 5 + ["KdtrDtypeError"] * 2 + ["KdtrShapeError"] * 4 + ["KdtrValueError"]
    for program in programs:
        assert run(program, "write", old).splitlines() == wanted
        assert run(program, "empty", tmp_path / "missing" / "x").strip() == "No such file or directory"
        assert run(program, "empty", tmp_path).strip() == "Is a directory"
    assert old.read_bytes() == b"old" and list(tmp_path.iterdir()) == [old]


def test_failed_write_leaves_nothing(tmp_path, programs):
    # A limit on the size of files stands in for a full disk; the shell ignores the signal, so that the write fails.
    kdtr.write(tmp_path / "large.kdtr", {"x": np.zeros(10**6, np.float32)})
    (tmp_path / "old.kdtr").write_bytes(b"old")
    limited = "trap '' XFSZ; ulimit -f 100; exec \"$0\" rewrite large.kdtr old.kdtr"
    failed = subprocess.run(["sh", "-c", limited, programs[0]], cwd=tmp_path, capture_output=True, timeout=60)
    assert failed.returncode != 0 and b"File too large" in failed.stderr
    assert (tmp_path / "old.kdtr").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.kdtr", "old.kdtr"]


def test_a_symbolic_link_is_followed_and_the_umask_kept(tmp_path, programs):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("folder/real")
    run("sh", "-c", 'umask 027; exec "$0" empty link', programs[1], cwd=tmp_path)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "real").read_bytes() == dump(tmp_path, {})
    assert (tmp_path / "folder" / "real").stat().st_mode & 0o777 == 0o640


def test_tensors_from_and_to_values(tmp_path, programs):
    for program in programs:
        lines = run(program, "use", tmp_path / "use.kdtr").splitlines()
        assert lines == ["2 1.5 -2 2", "0 1", "KdtrDtypeError", "no tensor 'y'", "1"]
    found = kdtr.read(tmp_path / "use.kdtr")
    assert found["x"].tolist() == [[1.5, -2]] and (found["e"].shape, found["e"].dtype) == ((0,), np.bool_)


# The check of verify_attn


checker = built  # the same programs, compiled once


def check(programs: Built, *paths: Path) -> tuple[int, list[str]]:
    return programs.run("check_verify_attn", *paths)


def test_all_reference_files_pass(checker):
    code, lines = check(checker, *REFS)
    assert code == 0 and len(lines) == len(REFS) == 16
    for path, line in zip(REFS, lines, strict=True):
        assert line.startswith(f"{path}  max abs ") and line.endswith("  ok")


def edited(source: Path, target: Path, name: str, index: tuple[int, ...], value: float) -> Path:
    tensors = dict(kdtr.read(source))
    tensors[name] = tensors[name].copy()
    tensors[name][index] = value
    kdtr.write(target, tensors)
    return target


SMALL = ROOT / "refs" / "verify_attn_h8_p0_b8.kdtr"  # its second request has padded nodes, which see nothing
PAGED = ROOT / "refs" / "verify_attn_h16_p200_b16.kdtr"
BFLOAT16 = ROOT / "refs" / "verify_attn_r32_h9_p150_b16_bf16.kdtr"


@pytest.mark.parametrize(
    "source, name, index, value, verdict",
    [
        (SMALL, "out", (1, 3, 7, 511), 1e-3, "FAIL out: an element is off, out: the norm is off"),
        (SMALL, "out", (1, 8, 0, 0), 1e-4, "FAIL out: an element is off"),  # of a node that sees nothing
        (SMALL, "out", (0, 0, 0, 0), np.nan, "FAIL out: an element is off, out: the norm is off"),
        (SMALL, "lse", (0, 2, 1), 0, "FAIL lse is off"),
        (SMALL, "lse", (1, 8, 0), np.inf, "FAIL lse is off"),
        (SMALL, "lse", (1, 8, 0), np.nan, "FAIL lse is off"),
        (SMALL, "kv_cache", (0, 0, 0), 9, "out: the norm is off"),
        (BFLOAT16, "kv_cache", (0, 3, 5), 9, "out: the norm is off, lse is off"),
        (BFLOAT16, "q", (0, 0, 8, 47), np.nan, "FAIL out: an element is off, out: the norm is off, lse is off"),
        (PAGED, "tree_mask", (0, 5, 0), 1, "out: the norm is off, lse is off"),
        (PAGED, "sm_scale", (), 0.144, "out: the norm is off, lse is off"),
        (PAGED, "block_table", (1, 2), 24, "FAIL a table entry in use is out of range"),
        (PAGED, "block_table", (1, 2), -1, "FAIL a table entry in use is out of range"),
        (PAGED, "cache_seqlens", (0,), -1, "FAIL the cache has no room for prefix and tree"),
        (SMALL, "cache_seqlens", (0,), 2**31 - 1, "FAIL the cache has no room for prefix and tree"),
        (SMALL, "kv_lora_rank", (), 577, "FAIL kv_lora_rank is not 1 to D"),
        (SMALL, "operator", (0,), 65, "FAIL the operator is not verify_attention"),
    ],
)
def test_one_wrong_value_fails(tmp_path, checker, source, name, index, value, verdict):
    code, (wrong, right) = check(checker, edited(source, tmp_path / "wrong.kdtr", name, index, value), SMALL)
    assert code == 1 and verdict in wrong
    assert right.endswith("  ok"), "one bad file must not hide the others"


def test_damage_missing_tensors_and_no_files_fail(tmp_path, checker):
    tensors = dict(kdtr.read(SMALL))
    kdtr.write(tmp_path / "missing.kdtr", {name: tensors[name] for name in tensors if name != "lse"})
    kdtr.write(tmp_path / "dtype.kdtr", tensors | {"q": tensors["q"].astype(np.float64)})
    kdtr.write(tmp_path / "shape.kdtr", tensors | {"out": tensors["out"][:, :, :, :-1]})
    narrow = dict(kdtr.read(BFLOAT16))
    kdtr.write(tmp_path / "narrow.kdtr", narrow | {"kv_cache": narrow["kv_cache"][:, :, :-1]})
    (tmp_path / "flipped.kdtr").write_bytes(SMALL.read_bytes()[:-100] + b"\x55" + SMALL.read_bytes()[-99:])
    names = ["missing", "dtype", "shape", "narrow", "flipped", "absent"]
    code, lines = check(checker, *[tmp_path / f"{name}.kdtr" for name in names])
    assert code == 1
    reasons = ["no tensor 'lse'", "tensor 'q' is float64, not float32", "another shape", "another shape"]
    reasons += ["CRC-32", "No such file"]
    for line, reason in zip(lines, reasons, strict=True):
        assert "  FAIL " in line and reason in line
    assert check(checker)[0] == 2
