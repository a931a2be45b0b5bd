"""profiling/compare.py: what is within the noise is the same, what is not has a verdict, and the exit code says so."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "profiling" / "compare.py"
ROW = {
    "operator": "merge_states",
    "T": "288",
    "dtype": "float32",
    "variant": "merge_states",
    "right": "True",
    "microseconds": "30.0",
    "spread_microseconds": "1.0",
    "graph_us": "28.0",
    "rel_frobenius": "1e-7",
    "gb_per_s": "3000",
    "gpu": "NVIDIA H200",
    "commit": "abc",
}
OTHER = {**ROW, "T": "9", "microseconds": "4.0", "spread_microseconds": "0", "graph_us": "", "rel_frobenius": ""}


def write(path: Path, *rows: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def run(*arguments) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "changed, code, verdict",
    [
        ({}, 0, "4 same"),
        ({"microseconds": "32.8"}, 0, "4 same"),  # 2 * hypot(1, 1) = 2.83
        ({"microseconds": "32.9"}, 1, "1 slower, 3 same"),
        ({"microseconds": "27.1"}, 0, "1 faster, 3 same"),
        ({"microseconds": "33.9", "spread_microseconds": "2.0"}, 0, "4 same"),
        ({"microseconds": "99", "spread_microseconds": ""}, 1, "1 slower, 3 same"),
        ({"graph_us": "28.8"}, 0, "4 same"),  # no spread: 3 %
        ({"graph_us": "28.9"}, 1, "1 slower, 3 same"),
        ({"rel_frobenius": "1.01e-7"}, 0, "4 same"),
        ({"rel_frobenius": "1.03e-7"}, 1, "1 more error, 3 same"),
        ({"rel_frobenius": "9e-8"}, 0, "1 less error, 3 same"),
        ({"rel_frobenius": "nan"}, 1, "1 gone, 3 same"),
        ({"microseconds": ""}, 1, "1 gone, 3 same"),
        ({"microseconds": "failed"}, 1, "1 gone, 3 same"),
        ({"right": "False"}, 1, "1 wrong, 4 same"),
        ({"right": ""}, 1, "1 wrong, 4 same"),
        ({"dtype": "float16"}, 1, "1 gone, 1 new, 1 same"),
        ({"gb_per_s": "1", "commit": "def"}, 0, "4 same"),
        ({"cupy": "14.2.0", "sustained_mhz": "1400", "sustained_w": "690"}, 0, "4 same"),
        ({"sustained_us": "29"}, 0, "1 new, 4 same"),
    ],
)
def test_verdicts(tmp_path, changed, code, verdict):
    old = write(tmp_path / "old.csv", ROW, OTHER)
    new = write(tmp_path / "new.csv", {**ROW, **changed}, OTHER)
    found, out = run(old, new)
    assert (found, out.splitlines()[-1]) == (code, verdict)


@pytest.mark.parametrize(
    "column, old, new, verdict",
    [
        ("sustained_us", "50", "51.6", "slower"),
        ("sustained_us", "50", "51.4", "same"),
        ("host_us", "100", "220", "same"),
        ("host_us", "220", "100", "same"),
        ("host_us", "100", "225", "slower"),
        ("max_ulp", "3", "4", "more error"),
    ],
)
def test_numbers_that_came_later_are_compared_too(tmp_path, column, old, new, verdict):
    sides = [write(tmp_path / f"{n}.csv", {**OTHER, column: value}) for n, value in enumerate((old, new))]
    code, out = run(*sides)
    assert code == (verdict != "same") and ("2 same" in out if verdict == "same" else f"1 {verdict}, 1 same" in out)


def test_a_small_time_may_move_by_the_clocks_tick(tmp_path):
    old = write(tmp_path / "old.csv", OTHER)
    assert run(old, write(tmp_path / "a.csv", {**OTHER, "microseconds": "4.25"}))[0] == 0
    assert run(old, write(tmp_path / "b.csv", {**OTHER, "microseconds": "4.35"}))[0] == 1


def test_the_table_says_what_changed_and_all_shows_the_rest(tmp_path):
    old, new = (
        write(tmp_path / "old.csv", ROW, OTHER),
        write(tmp_path / "new.csv", {**ROW, "microseconds": "45"}, OTHER),
    )
    _, out = run(old, new)
    assert "T=288 dtype=float32" in out and "+50.0%" in out and "T=9" not in out
    assert "T=9" in run(old, new, "--all")[1]


def test_other_machines_are_pointed_out(tmp_path):
    old, new = write(tmp_path / "old.csv", ROW), write(tmp_path / "new.csv", {**ROW, "gpu": "NVIDIA A100"})
    code, out = run(old, new)
    assert code == 0 and "the machines differ: NVIDIA H200" in out and "NVIDIA A100" in out


def test_folders_and_files_that_one_side_lacks(tmp_path):
    for side in ("old", "new"):
        write(tmp_path / side / "gpu" / "merge.csv", ROW)
        write(tmp_path / side / "notes.csv", {"prompt": "no benchmark"})
    assert run(tmp_path / "old", tmp_path / "new") == (0, "3 same\n")
    write(tmp_path / "new" / "gpu" / "more.csv", ROW)
    assert run(tmp_path / "old", tmp_path / "new")[0] == 0
    assert run(tmp_path / "new", tmp_path / "old")[0] == 1


def test_a_column_that_came_later_is_no_other_row(tmp_path):
    old, new = write(tmp_path / "old.csv", ROW), write(tmp_path / "new.csv", {"page_size": "", **ROW})
    assert run(old, new) == (0, "3 same\n")


def test_commits_of_a_checkout(tmp_path):
    inside = subprocess.run(["git", "rev-parse", "HEAD"], cwd=SCRIPT.parent, capture_output=True)
    if inside.returncode != 0:
        pytest.skip("not a git checkout")
    code, out = run("HEAD", "HEAD")
    assert code == 0 and out.endswith(" same\n")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: path / "missing", "is no CSV file, no folder with results, and no commit"),
        (lambda path: path, "is no CSV file, no folder with results, and no commit"),
        (lambda path: write(path / "x.csv", {"a": "1"}), "is no result of a benchmark"),
        (lambda path: write(path / "x.csv", ROW, ROW), "x.csv has two rows of operator=merge_states T=288"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path, make, message):
    wrong = make(tmp_path)
    code, out = run(wrong, wrong)
    assert code == 2 and message in out
