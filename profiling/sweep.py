"""Measure everything and draw it: ``python profiling/sweep.py --out DIR [--short]``.

Runs every benchmark of this folder, one after the other, each in a process of its own, then compiles the table of the
kernels' resources, draws all figures and writes the report, all into DIR. ``--short`` measures a few sizes of each, in
less than eight minutes, and leaves the table to machines without a GPU. What fails or takes too long does not cost the
rest, and the exit code says so.

Where there is no GPU it does what can be done there: the table of resources (``--short``: of one architecture), and
figures and report from the committed measurements.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from a plain checkout

from rich.console import Console
from rich.table import Table

from ddtree_numba.device import runtime

FOLDER = Path(__file__).resolve().parent
COMMITTED = FOLDER / "results" / "nvidia-h200"
BENCHMARKS = ("ceilings", "trees", "encodings", "merge_states", "accept", "verify_attention", "attention_error")
TIMEOUT, SHORT_TIMEOUT = 3600.0, 240.0  # seconds of a step


class Step(NamedTuple):
    """A script of this folder with its arguments; ``file`` is what its output is kept in."""

    script: str
    arguments: tuple[str, ...]
    file: str

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(FOLDER / self.script), *self.arguments]


def steps(out: Path, short: bool, gpu: bool, commit: str | None = None) -> list[Step]:
    """What is run, in this order."""
    results = out if gpu else COMMITTED
    more = (*(("--quick",) if short else ()), *(("--commit", commit) if commit else ()))
    benchmarks = [Step(f"bench_{name}.py", ("--out", str(out), *more), f"{name}.log") for name in BENCHMARKS]
    table = Step("resources.py", ("--json", *(("--arch", "sm_90") if short else ())), "resources.json")
    drawn = ("--results", str(results), "--out", str(out / "figures"))
    plots = [Step(path.name, drawn, f"{path.stem}.log") for path in sorted(FOLDER.glob("plot_*.py"))]
    report = Step("report.py", ("--results", str(results), "--out", str(out / "report.html")), "report.log")
    return [*(benchmarks if gpu else []), *([] if gpu and short else [table]), *plots, report]


def run(step: Step, out: Path, timeout: float) -> tuple[str, float]:
    """How a step ended, and after how many seconds."""
    start = time.perf_counter()
    with (out / step.file).open("w") as file:
        try:
            code = subprocess.run(step.command, stdout=file, timeout=timeout).returncode
            ended = "done" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            ended = f"stopped after {timeout:.0f} s"
    return ended, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """Run the steps; 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "local", help="folder for everything")
    parser.add_argument("--short", action="store_true", help="a few sizes of each, in less than eight minutes")
    parser.add_argument("--commit", help="commit that is measured; default: what git says")
    options = parser.parse_args(arguments)
    out, gpu = options.out.resolve(), not runtime.SIMULATOR
    out.mkdir(parents=True, exist_ok=True)
    if not gpu:
        print(f"There is no GPU ({runtime.REASON}), so nothing is measured. What can be done here is done: the table")
        print(f"of registers and shared memory, and figures and report from {COMMITTED}.")
    table = Table("step", "ended", "seconds", "output", box=None, pad_edge=False)
    every = steps(out, options.short, gpu, options.commit)
    failed, timeout = 0, SHORT_TIMEOUT if options.short and gpu else TIMEOUT
    for n, step in enumerate(every, 1):
        print(f"[{n}/{len(every)}] {step.script}", file=sys.stderr, flush=True)
        ended, seconds = run(step, out, timeout)
        failed += ended != "done"
        style = None if ended == "done" else "red"
        table.add_row(step.script, ended, f"{seconds:.0f}", str(out / step.file), style=style)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
