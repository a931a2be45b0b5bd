"""Damaged KDTR files by the thousand, for the readers of both languages: the table of docs/kdtr.md.

    python tests/fuzz_kdtr.py --count 1000000

Needs g++; with clang++ and its fuzzer runtime libFuzzer runs as well. An input that breaks a rule is kept beside the
caller as failed-*.kdtr, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
from test_kdtr import DTYPES, GOLDEN, LONGEST, SAMPLE, get, put, reseal

from ddtree_numba import kdtr

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "tests" / "fuzz_kdtr.cpp"
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-I", str(ROOT / "ddtree_numba" / "include")]
FLAGS += ["-fno-sanitize-recover=all"]
SANITIZERS = "address,undefined"

EVERY_DTYPE = {dtype.name: np.ones((2, 3), dtype) for dtype in DTYPES}
CORPUS = {"none": {}, "golden": GOLDEN, "sample": SAMPLE, "every": EVERY_DTYPE}

ODD_VALUES = [0, 1, 2, 3, 7, 8, 9, 13, 14, 63, 64, 65, 128, 256, 2**31, 2**32 - 1, 2**32, 2**56, 2**61, 2**62]
ODD_VALUES += [2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1]
NAMES = [b"", b"a", b"sm_scale", b"a\0b", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"ab\xe4\xb8", LONGEST, LONGEST + b"n"]
NAMES += ["漢\U0010ffff".encode(), b"\xf4\x90\x80\x80"]


def write_corpus(folder: Path) -> list[Path]:
    paths = [folder / f"{name}.kdtr" for name in CORPUS]
    for path, tensors in zip(paths, CORPUS.values(), strict=True):
        kdtr.write(path, tensors)
    return paths


# ---- mutations -----------------------------------------------------------------------------------------------------


def damage(blob: bytes, rng: random.Random) -> bytes:
    """One mutation: a field, a name, a record, the length or a byte. The checksums are not made to agree."""
    count = min(get(blob, "num_tensors"), (len(blob) - 64) // 256) if len(blob) >= 64 else 0
    choice = rng.randrange(4, 13) if count else rng.randrange(3, 7)

    def odd(field: str) -> int:
        start, old = 8 * rng.randrange(8), get(blob, field)
        bits = 32 if field.endswith(("dtype", "rank", "reserved", "version", "crc")) else 64
        values = [rng.choice(ODD_VALUES), old + 1, old - 1, old + 64, old - 64, old ^ 1 << start, len(blob)]
        return rng.choice(values) % 2**bits

    one, other = (f"{rng.randrange(count)}" for _ in range(2)) if count else ("", "")
    if choice == 3 or len(blob) < 64:
        return blob[: rng.randrange(len(blob) + 1)]
    if choice == 4:
        return blob[: 64 + rng.randrange(len(blob))] + bytes(rng.choice([0, 0, 1, 64, 256]))
    if choice == 5:
        field = rng.choice(["version", "file_size", "file_size", "num_tensors", "num_tensors", "crc"])
        return put(blob, field, odd(field))
    if choice == 6:
        at = rng.choice([rng.randrange(len(blob)), rng.randrange(64 + 256 * count, len(blob) + 1)])
        return (blob[:at] + bytes([rng.randrange(256)]) + blob[at + 1 :])[: len(blob)]
    if choice == 7:
        return put(blob, f"{one}.name", rng.choice([*NAMES, get(blob, f"{other}.name")]))
    if choice == 8:
        sizes = list(get(blob, f"{one}.shape"))
        sizes[rng.randrange(8)] = rng.choice([*ODD_VALUES, *range(7)])
        return put(blob, f"{one}.shape", *sizes)
    if choice == 9:  # often sound: another dtype of the same size, the same tensor in another shape
        dtype, nbytes = rng.randrange(1, 14), get(blob, f"{one}.nbytes")
        items = nbytes // list(kdtr._DTYPES.values())[dtype - 1].itemsize
        shape = rng.choice([[items], [1, items], [items, 1, 1], [0, items]])
        blob = put(put(blob, f"{one}.dtype", dtype), f"{one}.rank", len(shape))
        return put(blob, f"{one}.shape", *shape, *[0] * (8 - len(shape)))
    if choice == 10:  # a record twice or no more, the others where they were
        index, end = 64 + 256 * int(one), 64 + 256 * count
        if rng.random() < 0.5:
            return put(blob[:end] + blob[index : index + 256] + blob[end:], "num_tensors", count + 1)
        return put(blob[:index] + blob[index + 256 :], "num_tensors", count - 1)
    field = f"{one}.{rng.choice(['dtype', 'rank', 'offset', 'nbytes', 'crc', 'reserved'])}"
    return put(blob, field, rng.randrange(16) if field.endswith(("dtype", "rank")) and choice == 11 else odd(field))


def mutated(blob: bytes, rng: random.Random) -> tuple[bytes, int]:
    """Up to four mutations, mostly behind checksums and a length that agree, and their number."""
    rounds = rng.randint(1, 4)
    for _ in range(rounds):
        blob = damage(blob, rng)
    if len(blob) >= 64 and rng.random() < 0.7:
        blob = put(blob, "file_size", len(blob))
    if len(blob) >= 64 and rng.random() < 0.9:
        blob = reseal(blob)
    return blob, rounds


# ---- the readers ---------------------------------------------------------------------------------------------------


def python_outcome(folder: Path, blob: bytes, **options: bool) -> str:
    """What the Python reader says; any exception that leaves here is a fault. tracemalloc must be running."""
    path = folder / "python.kdtr"
    path.write_bytes(blob)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        tensors = kdtr.read(path, **options)
        kind = "ok"
    except kdtr.KdtrError as error:
        kind = type(error).__name__
    peak = tracemalloc.get_traced_memory()[1] - before
    assert peak <= len(blob) + 20_000, f"{peak} bytes were allocated for a file of {len(blob)}"
    if kind == "ok" and options.get("verify", True):
        kdtr.write(folder / "again.kdtr", tensors)
        assert (folder / "again.kdtr").read_bytes() == blob, "what was accepted is not written as the same bytes"
    return kind


def build(folder: Path, compiler: str) -> Path:
    """The C++ program: with libFuzzer by clang++, with its own main function by g++."""
    program = folder / f"fuzz-{compiler}"
    kind = ["-fsanitize=fuzzer," + SANITIZERS] if compiler == "clang++" else ["-fsanitize=" + SANITIZERS, "-DOWN_MAIN"]
    command = [compiler, *FLAGS, *kind, str(SOURCE), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return program


def has_libfuzzer(folder: Path) -> bool:
    """Whether clang++ is here with its fuzzer runtime, which is a package of its own in some distributions."""
    (folder / "probe.cpp").write_text('extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }')
    command = ["clang++", "-fsanitize=fuzzer," + SANITIZERS, "probe.cpp", "-o", "probe"]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, timeout=60).returncode == 0
    except FileNotFoundError:
        return False


class CppReader:
    """The C++ reader in a process of its own, which the sanitizers end at the first fault."""

    def __init__(self, program: Path, folder: Path) -> None:
        pipe = subprocess.PIPE
        environment = os.environ | {"TMPDIR": str(folder)}
        self.process = subprocess.Popen([program, "outcomes"], stdin=pipe, stdout=pipe, stderr=pipe, env=environment)

    def outcomes(self, blobs: list[bytes]) -> list[str]:
        """One for each file, "" if it has ended. Few enough files that the answers fit into the pipe."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            for blob in blobs:
                self.process.stdin.write(struct.pack("<Q", len(blob)) + blob)
            self.process.stdin.flush()
        return [self.process.stdout.readline().decode().strip() for _ in blobs]

    def close(self) -> tuple[int, str]:
        """The exit status and what was said to stderr."""
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdin = None
        errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode, errors.decode(errors="replace")


def tallies(output: str) -> tuple[int, int, Counter[str]]:
    """Inputs, mutations and outcomes that the C++ program counted."""
    kinds: Counter[str] = Counter()
    sums = {"inputs": 0, "mutations": 0}
    for line in output.splitlines():
        word, *rest = line.split()
        if word == "outcome":
            kinds[rest[0]] = int(rest[1])
        elif word in sums:
            sums[word] = int(rest[0])
    return sums["inputs"], sums["mutations"], kinds


# ---- the table -----------------------------------------------------------------------------------------------------


def keep(blob: bytes, why: str) -> None:
    name = f"failed-{zlib.crc32(blob):08x}.kdtr"
    Path(name).write_bytes(blob)
    print(f"{name}: {why}", file=sys.stderr)


def fuzz_both(count: int, seed: int, program: Path, folder: Path) -> tuple[int, int, Counter[str], int]:
    """The same files to the readers of both languages: inputs, mutations, outcomes, faults."""
    rng = random.Random(seed)
    corpus = [path.read_bytes() for path in write_corpus(folder)]
    reader = CppReader(program, folder)
    kinds: Counter[str] = Counter()
    mutations = faults = done = 0
    ended = False
    tracemalloc.start()
    while done < count and not ended:
        blobs, wanted = [], []
        for _ in range(min(500, count - done)):
            blob, rounds = mutated(rng.choice(corpus), rng)
            mutations += rounds
            blobs.append(blob)
            try:
                wanted.append(python_outcome(folder, blob, copy=rng.random() < 0.5))
            except Exception as error:
                wanted.append(repr(error))
                faults += 1
                keep(blob, wanted[-1])
        found = reader.outcomes(blobs)
        for blob, python, cpp in zip(blobs, wanted, found, strict=True):
            kinds[python] += 1
            if python != cpp and not ended:
                faults += 1
                keep(blob, f"Python says {python}, C++ {cpp or 'no more'}")
            ended = not cpp
        done += len(blobs)
    tracemalloc.stop()
    code, errors = reader.close()
    print(errors, end="", file=sys.stderr)
    return done, mutations, kinds, faults + (code != 0)


def fuzz_cpp(command: list[str | Path], folder: Path) -> tuple[int, int, Counter[str], int]:
    """A run of the C++ program by itself: inputs, mutations, outcomes, faults."""
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=os.environ | {"TMPDIR": str(folder)})
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
    return *tallies(done.stdout), int(done.returncode != 0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="inputs of each row (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    shared = Path("/dev/shm")  # each accepted file is written and reaches the disk, which takes long on a real one
    faults = 0
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as name:
        folder = Path(name)
        own = build(folder, "g++")
        rows = {"both, the same files": lambda: fuzz_both(args.count, args.seed, own, folder)}
        mutate: list[str | Path] = [own, "mutate", str(args.count), str(args.seed), *write_corpus(folder)]
        rows["C++, g++"] = lambda: fuzz_cpp(mutate, folder)
        if has_libfuzzer(folder):
            (folder / "corpus").mkdir()
            write_corpus(folder / "corpus")
            options = ["-max_len=8192", f"-runs={args.count}", f"-seed={args.seed}", "-artifact_prefix=failed-"]
            libfuzzer: list[str | Path] = [build(folder, "clang++"), *options, folder / "corpus"]
            rows["C++, libFuzzer"] = lambda: fuzz_cpp(libfuzzer, folder)
        print("| readers | mutations | inputs | refused | accepted | faults | seconds |")
        print("|---|---:|---:|---:|---:|---:|---:|")
        for title, run in rows.items():
            start = time.perf_counter()
            inputs, mutations, kinds, wrong = run()
            seconds = time.perf_counter() - start
            refused = inputs - kinds["ok"]
            cells = [f"{n:,}" for n in (mutations, inputs, refused, kinds["ok"], wrong, round(seconds))]
            print(f"| {title} | {' | '.join(cells)} |", flush=True)
            print(f"{title}: {dict(sorted(kinds.items()))}", file=sys.stderr, flush=True)
            faults += wrong
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
