"""Damaged files do no harm in either language, and the fuzzers of fuzz_kdtr.cpp and fuzz_kdtr.py notice if one does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import tracemalloc
from pathlib import Path

import fuzz_kdtr
import pytest
from fuzz_kdtr import CppReader, fuzz_both, mutated, python_outcome, tallies, write_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kdtr import DOC

from ddtree_numba import kdtr

KINDS = {name for name in kdtr.__all__ if name.startswith("Kdtr")} - {"KdtrError"}
HEADER = Path(kdtr.__file__).parent / "include" / "kdtr.hpp"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def folder():
    """In memory where that is possible: each accepted file is written and reaches the disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def corpus(folder) -> list[Path]:
    (folder / "corpus").mkdir()
    return write_corpus(folder / "corpus")


@pytest.fixture(scope="module")
def program(folder) -> Path:
    return fuzz_kdtr.build(folder, "g++")


@pytest.fixture(scope="module")
def reader(program, folder):
    reader = CppReader(program, folder)
    yield reader
    code, errors = reader.close()
    assert code == 0, errors


@pytest.fixture(scope="module")
def libfuzzer(folder) -> Path:
    if not fuzz_kdtr.has_libfuzzer(folder):
        pytest.skip("needs clang++ with its fuzzer runtime")
    return fuzz_kdtr.build(folder, "clang++")


def run(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    environment = os.environ | {"TMPDIR": str(folder)}
    return subprocess.run(words, capture_output=True, encoding="utf-8", timeout=120, env=environment, cwd=folder)


# ---- both languages ------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(rng=st.randoms(use_true_random=False), index=st.integers(0, 3))
def test_both_languages_say_the_same_of_a_damaged_file(folder, corpus, reader, rng, index):
    damaged, _ = mutated(corpus[index].read_bytes(), rng)
    tracemalloc.start()
    try:
        wanted = python_outcome(folder, damaged)
        assert wanted == python_outcome(folder, damaged, copy=True)
        unverified = python_outcome(folder, damaged, verify=False)
    finally:
        tracemalloc.stop()
    assert wanted in KINDS | {"ok"}
    assert unverified in KINDS | {"ok"} if wanted in KINDS else unverified == "ok"
    assert reader.outcomes([damaged]) == [wanted]


def test_thousands_of_damaged_files_are_no_fault_in_either_language(folder, program):
    inputs, mutations, kinds, faults = fuzz_both(2500, 7, program, folder)
    assert (inputs, faults) == (2500, 0) and mutations > inputs
    assert set(kinds) == KINDS | {"ok"}, "some check was never reached"


def test_a_reader_that_checks_less_is_a_fault(folder, program, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kdtr, "_check_payload", lambda *args: None)
    *_, faults = fuzz_both(300, 7, program, folder)
    assert faults > 0
    errors = capsys.readouterr().err
    said = re.search(r"(failed-\w+\.kdtr): Python says .*not written as the same bytes.*, C\+\+ Kdtr", errors)
    assert said and (tmp_path / said[1]).exists()


def test_a_reader_that_ends_is_a_fault(folder, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    *_, faults = fuzz_both(100, 7, Path(shutil.which("false") or ""), folder)
    assert faults == 2 and "C++ no more" in capsys.readouterr().err  # the answer that is missing, and the exit status


# ---- C++ -----------------------------------------------------------------------------------------------------------


def test_100000_mutated_files_under_the_sanitizers(folder, program, corpus):
    done = run(folder, program, "mutate", 100_000, 1, *corpus)
    assert done.returncode == 0, done.stderr
    inputs, mutations, kinds = tallies(done.stdout)
    assert inputs == sum(kinds.values()) == 100_000 and mutations > inputs
    assert set(kinds) == KINDS | {"ok"}, "some check was never reached"


def test_libfuzzer(tmp_path, folder, libfuzzer, corpus):
    bounds = ["-max_len=8192", "-runs=200000", "-max_total_time=4", "-seed=1"]
    done = run(folder, libfuzzer, *bounds, tmp_path, corpus[0].parent)
    assert done.returncode == 0, done.stderr
    inputs, mutations, kinds = tallies(done.stdout)
    assert inputs == sum(kinds.values()) >= 1000 and mutations > 0
    assert set(kinds) >= KINDS - {"KdtrValueError"} | {"ok"}, "some check was never reached"
    assert any(tmp_path.iterdir()), "no input led to new code: the program was not instrumented"


# What a header does wrong if the environment says so, and what the fuzzer then says.
WRONG = {
    "NAMES": ("if (names.count(name) != 0) throw", "the name occurs twice"),
    "RESERVED": ("if (r.reserved != 0) throw", "what was accepted is written as the same bytes"),
    "CLAIMS": ("take(table.data(),", "memory is asked for by the length of the file"),
}


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("forgetful")
    text = HEADER.read_text(encoding="utf-8")
    for name, (check, _) in WRONG.items():
        assert text.count(check) == 1
        off = f'std::getenv("{name}")'
        believe = f"if ({off} != nullptr) table.reserve(header.file_size % 65536); {check}"
        text = text.replace(check, believe if name == "CLAIMS" else check.replace("if (", f"if ({off} == nullptr && "))
    (folder / "kdtr.hpp").write_text(text, encoding="utf-8")
    command = ["g++", "-std=c++17", "-DOWN_MAIN", "-I", folder, fuzz_kdtr.SOURCE, "-o", folder / "program"]
    subprocess.run(command, check=True, timeout=120)
    return folder / "program"


@pytest.mark.parametrize("name", [None, *WRONG])
def test_a_header_that_checks_less_is_caught(folder, corpus, forgetful, monkeypatch, name):
    if name:
        monkeypatch.setenv(name, "1")
    done = run(folder, forgetful, "mutate", 20_000, 1, *corpus)
    assert done.returncode != 0 and WRONG[name][1] in done.stderr if name else done.returncode == 0


# ---- the table -----------------------------------------------------------------------------------------------------


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_documented_command_prints_the_documented_table(program, monkeypatch, capsys):
    monkeypatch.setattr(fuzz_kdtr, "build", lambda folder, compiler: program)
    monkeypatch.setattr(fuzz_kdtr, "has_libfuzzer", lambda folder: False)  # its row is the business of test_libfuzzer
    assert fuzz_kdtr.main(["--count", "300"]) == 0
    head, rule, *rows = capsys.readouterr().out.splitlines()
    documented = DOC[DOC.index(head) :].splitlines()[:5]
    assert documented[1] == rule
    assert [cells(row)[0] for row in documented[2:]] == [*(cells(row)[0] for row in rows), "C++, libFuzzer"]
    count = re.search(r"python tests/fuzz_kdtr\.py --count (\d+)\n", DOC)
    assert count, "the command is missing"
    for shown, wanted in [(rows, 300), (documented[2:], int(count[1]))]:
        for row in shown:
            mutations, inputs, refused, accepted, faults, _ = (int(cell.replace(",", "")) for cell in cells(row)[1:])
            assert (inputs, faults) == (wanted, 0) and refused + accepted == inputs and mutations > 0.9 * inputs


def test_the_command_fails_where_there_is_a_fault(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fuzz_kdtr, "build", lambda folder, compiler: Path(shutil.which("false") or ""))
    monkeypatch.setattr(fuzz_kdtr, "has_libfuzzer", lambda folder: True)
    assert fuzz_kdtr.main(["--count", "10"]) == 1
    assert [cells(row)[5] for row in capsys.readouterr().out.splitlines()[2:]] == ["2", "1", "1"]
