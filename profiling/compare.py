"""Compare two measurements: ``python profiling/compare.py OLD NEW``.

OLD and NEW are CSV files of this folder's benchmarks, folders of them, or commits, whose profiling/results are taken.
Rows belong together when all columns agree that say what was measured. A time is slower or faster when it has moved by
more than its noise, which is the largest of

- `SPREADS` times both interquartile ranges, added as squares, where the row has one;
- `SHARE` of the old time, since two runs differ by more than the calls within one; of a host's time, `HOST_SHARE` of
  the longer one, since two runs of the same code have been apart by a factor of two;
- `TICK` microseconds, the resolution of CUDA events with some room.

An error is more where it has grown by more than `ERROR_SHARE`: the same inputs give the same bits, so only code moves
it. Rows that are wrong, gone, or have lost a number count as worse.

Prints what changed (``--all``: everything). The exit code is 0 if nothing is worse, 1 if something is, 2 if the two
cannot be compared.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "profiling/results"

SPREADS = 2.0
SHARE, HOST_SHARE = 0.03, 0.55
TICK = 0.3
ERROR_SHARE = 0.02

TIMES = {
    "microseconds": "spread_microseconds",
    "dirty_microseconds": "",
    "graph_us": "",
    "host_us": "",
    "sustained_us": "",
}
ERRORS = ("rel_frobenius", "max_abs", "max_ulp", "lse_error")
# What follows from times, and what says nothing of speed or error.
DERIVED = ("spread_microseconds", "gb_per_s", "tflops", "repeats", "note", "bound", "checked", "logit_magnitude")
DERIVED += ("ns", "cycles", "timer_ns", "kernel_mhz", "call_us", "clocked_call_us")  # of a trace
DERIVED += ("sustained_mhz", "sustained_w", "sustained_gb_per_s", "sustained_tflops")
MACHINE = ("gpu", "driver", "sm_clock_mhz", "cpu")
VERSIONS = ("power_w", "temperature_c", "python", "numpy", "numba_cuda", "torch", "triton", "cupy", "commit")
MEASURED = {*TIMES, *ERRORS, *DERIVED, *MACHINE, *VERSIONS, "right"}

Row = dict[str, str]
Key = tuple[tuple[str, str], ...]


class Change(NamedTuple):
    """One number of one row, before and after."""

    file: str
    key: Key
    column: str
    old: str
    new: str
    verdict: str  # "slower", "faster", "more error", "less error", "same", "wrong", "gone", "new"

    @property
    def worse(self) -> bool:
        return self.verdict in ("slower", "more error", "wrong", "gone")


class Incomparable(Exception):
    """One side is no measurement."""


def read_side(text: str) -> dict[str, list[Row]]:
    """The rows of each CSV file that an argument stands for, by the file's name.

    Raises
    ------
    Incomparable
        It is neither a CSV file, nor a folder with any, nor a commit with any.
    """
    path = Path(text)
    if path.is_file():
        return {path.name: rows_of(path.read_text(encoding="utf-8"), text)}
    if path.is_dir():
        found = {str(file.relative_to(path)): file.read_text(encoding="utf-8") for file in sorted(path.rglob("*.csv"))}
    else:
        found = dict(files_of_commit(text))
    tables = {name: rows_of(contents, f"{text}: {name}") for name, contents in found.items() if is_result(contents)}
    if not tables:
        raise Incomparable(f"{text} is no CSV file, no folder with results, and no commit with any in {RESULTS}")
    return tables


def files_of_commit(commit: str) -> Iterator[tuple[str, str]]:
    """Name below profiling/results and contents of each CSV file of a commit."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    for name in git("ls-tree", "-r", "--name-only", commit, "--", RESULTS).splitlines():
        if name.endswith(".csv"):
            yield name.removeprefix(f"{RESULTS}/"), git("show", f"{commit}:{name}")


def is_result(text: str) -> bool:
    """Whether these are a benchmark's columns: every one of them states the commit."""
    return "commit" in text.split("\n", 1)[0].strip().split(",")


def rows_of(text: str, where: str) -> list[Row]:
    rows = list(csv.DictReader(io.StringIO(text)))
    if not is_result(text) or not rows or any(None in row.values() for row in rows):
        raise Incomparable(f"{where} is no result of a benchmark: no column commit, no rows, or rows that are cut")
    return rows


def key_of(row: Row) -> Key:
    """What was measured: all columns that are no result, but for the empty ones, which a later version may add."""
    return tuple((name, value) for name, value in row.items() if name not in MEASURED and value)


def compare_rows(file: str, old: list[Row], new: list[Row]) -> Iterator[Change]:
    """Every number of every row of two files.

    Raises
    ------
    Incomparable
        Two rows of a file are of the same thing.
    """
    before, after = by_key(file, old), by_key(file, new)
    for key in before.keys() - after.keys():
        yield Change(file, key, "", "", "", "gone")
    for key in after.keys() - before.keys():
        yield Change(file, key, "", "", "", "new")
    for key in before:
        if key not in after:
            continue
        one, other = before[key], after[key]
        if one.get("right") == "True" and other.get("right") != "True":
            yield Change(file, key, "right", "True", other.get("right") or "-", "wrong")
        for column in (*TIMES, *ERRORS):
            a, b = one.get(column) or "", other.get(column) or ""
            if a or b:
                yield Change(file, key, column, a, b, verdict(column, a, b, noise(column, one, other)))


def by_key(file: str, rows: list[Row]) -> dict[Key, Row]:
    found: dict[Key, Row] = {}
    for row in rows:
        if found.setdefault(key_of(row), row) is not row:
            raise Incomparable(f"{file} has two rows of {shown(key_of(row))}")
    return found


def noise(column: str, old: Row, new: Row) -> float:
    """How far a number may move without having changed."""
    before = number(old.get(column))
    if column in ERRORS:
        return ERROR_SHARE * before
    if column == "host_us":
        return HOST_SHARE * max(before, number(new.get(column)))
    spreads = [number(row.get(TIMES[column])) if TIMES[column] else 0.0 for row in (old, new)]
    return max(SPREADS * math.hypot(*(s if math.isfinite(s) else 0.0 for s in spreads)), SHARE * before, TICK)


def number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def verdict(column: str, old: str, new: str, allowed: float) -> str:
    if not old:
        return "new"
    before, after = number(old), number(new)
    if not math.isfinite(after):
        return "gone" if math.isfinite(before) else "same"
    if abs(after - before) <= allowed:
        return "same"
    if column in ERRORS:
        return "more error" if not after <= before else "less error"
    return "slower" if not after <= before else "faster"


def shown(key: Key) -> str:
    return " ".join(f"{name}={value}" for name, value in key)


def machine_of(files: dict[str, list[Row]]) -> list[str]:
    rows = [row for rows in files.values() for row in rows]
    return sorted({" ".join(row.get(name) or "-" for name in MACHINE) for row in rows})


def main() -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a CSV file, a folder or a commit")
    parser.add_argument("new", help="the same")
    parser.add_argument("--all", action="store_true", help="also print what stayed the same")
    options = parser.parse_args()
    try:
        old, new = read_side(options.old), read_side(options.new)
        if len(old) == len(new) == 1:  # two files may have different names
            new = dict(zip(old, new.values(), strict=True))
        if not old.keys() & new.keys():
            raise Incomparable(f"{options.old} and {options.new} have no file of the same name")
        changes = [change for name in old if name in new for change in compare_rows(name, old[name], new[name])]
        changes += [Change(name, (), "", "", "", "gone") for name in old if name not in new]
        changes += [Change(name, (), "", "", "", "new") for name in new if name not in old]
    except Incomparable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_changes(changes if options.all else [change for change in changes if change.verdict != "same"])
    machines = [machine_of(side) for side in (old, new)]
    if machines[0] != machines[1]:
        print(f"the machines differ: {'; '.join(machines[0])}, then {'; '.join(machines[1])}")
    counts = {verdict: sum(change.verdict == verdict for change in changes) for verdict in COLOURS}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "nothing to compare")
    return 1 if any(change.worse for change in changes) else 0


COLOURS = {"slower": "red", "more error": "red", "wrong": "red", "gone": "red"}
COLOURS |= {"faster": "green", "less error": "green", "new": "", "same": ""}


def print_changes(changes: list[Change]) -> None:
    if not changes:
        return
    table = Table("file", "what", "column", "old", "new", "change", "", box=None, pad_edge=False)
    order = list(COLOURS)
    for change in sorted(changes, key=lambda change: (order.index(change.verdict), change.file, change.key)):
        ratio = number(change.new) / number(change.old) - 1 if number(change.old) else math.nan
        share = f"{ratio:+.1%}" if math.isfinite(ratio) else ""
        columns = (change.file, shown(change.key), change.column, change.old, change.new, share, change.verdict)
        table.add_row(*columns, style=COLOURS[change.verdict] or None)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
