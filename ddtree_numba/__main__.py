"""Command line: ``python -m ddtree_numba`` with ``info``, ``check [FILES]`` or ``decode --prompt TEXT``."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import platform
import sys
from pathlib import Path
from typing import Any

import ddtree_numba
from ddtree_numba import check
from ddtree_numba.compare import Report
from ddtree_numba.decode import cli
from ddtree_numba.device import launch, runtime
from ddtree_numba.device.arrays import HOST

PACKAGES = (
    *("numba", "numba-cuda", "numpy", "ml_dtypes", "cuda-bindings", "cuda-core", "cuda-toolkit"),
    *("cupy-cuda13x", "cupy-cuda12x", "torch", "triton", "matplotlib"),
)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 when a check failed, 2 for wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m ddtree_numba", description=ddtree_numba.__doc__)
    parser.add_argument("--version", action="version", version=ddtree_numba.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="GPU, driver, versions, shared memory, and which backend runs and why")
    info.add_argument("--json", action="store_true", help="print JSON")
    checks = commands.add_parser(
        "check",
        help="every variant of every operator against the reference files",
        description="Every variant of every operator against the reference files. Variants for tensor cores are "
        "checked on files of their formats and widths, where the GPU has what they need; wgmma and its mirror take "
        "paged caches in pages of 64 tokens, into which a file's are copied.",
        epilog="Exit code: 0 if all passed, 1 if something failed or a file could not be read, 2 if there is no file.",
    )
    checks.add_argument(
        "files", nargs="*", type=Path, metavar="FILES", help="KDTR files; default: all of the checkout's refs/"
    )
    checks.add_argument("--json", action="store_true", help="print JSON")
    checks.add_argument("--full", action="store_true", help="all blocks also in the simulator (hours)")
    checks.add_argument(
        "--budget", type=_seconds, default=4.0, metavar="SECONDS", help="simulator: time for each file (default: 4)"
    )
    decoding = commands.add_parser(
        "decode",
        help="a language model's reply to a prompt, by draft trees",
        epilog="Exit code: 0; 1 if the tokens are not those of decoding one a step, or the model cannot be had.",
    )
    cli.add_arguments(decoding)
    options = parser.parse_args(arguments)
    if options.command == "decode":
        return cli.run(options)
    if options.command == "info":
        return run_info(options.json)
    return run_check(options.files, options.json, None if options.full else options.budget)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time in seconds; --full checks all")
    return value


def collect_info() -> dict[str, str]:
    """What `info` prints, as a dict of text."""
    facts = {"ddtree_numba": ddtree_numba.__version__, "python": platform.python_version()}
    facts["backend"] = "Numba's CUDA simulator" if runtime.SIMULATOR else "CUDA"
    facts["why"] = runtime.REASON
    problem = runtime.probe_driver()
    if problem is None and not runtime.SIMULATOR:
        facts.update(_gpu_facts())
    elif problem is not None:
        facts["GPU"] = f"none: {problem}"
    limit = launch.shared_bytes_limit(HOST) if runtime.SIMULATOR or problem is None else 0
    facts["shared memory a block"] = f"{limit} bytes" if limit else "unknown"
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return facts


def _gpu_facts() -> dict[str, str]:
    from cuda.bindings import driver
    from numba import cuda

    gpu = cuda.get_current_device()
    _, memory = driver.cuDeviceTotalMem(gpu.id)
    _, version = driver.cuDriverGetVersion()
    module = Path("/proc/driver/nvidia/version")
    facts = {
        "GPU": launch.device_name(gpu.id),
        "GPUs": str(len(cuda.gpus)),
        "compute capability": ".".join(map(str, gpu.compute_capability)),
        "multiprocessors": str(gpu.MULTIPROCESSOR_COUNT),
        "memory": f"{memory / 2**30:.1f} GiB",
        "driver supports CUDA": f"{version // 1000}.{version % 1000 // 10}",
    }
    if module.exists():
        facts["driver"] = module.read_text().splitlines()[0].split(":", 1)[-1].strip()
    return facts


def run_info(as_json: bool) -> int:
    """Print what this machine is; always 0."""
    facts = collect_info()
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, fact in facts.items():
        table.add_row(name, fact)
    Console().print(table)
    return 0


def run_check(files: list[Path], as_json: bool, budget: float | None) -> int:
    """Check the files and print a table or JSON; 0: every row passed, 1: one failed, 2: there is no file."""
    files = files or check.reference_files()
    if not files:
        print(
            f"no reference files in {check.REFERENCE_FOLDER}: they are part of the source checkout, not of the "
            "installed package. Run from a checkout (pip install -e .) or name files: check FILES",
            file=sys.stderr,
        )
        return 2
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    notes = Console(stderr=True, soft_wrap=True)
    if runtime.SIMULATOR and budget is not None:
        notes.print(f"time budget: {budget:g} s for each file, but no less than 4 blocks or rows (--full checks all)")
    rows: list[check.Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=notes, transient=True)
    task = progress.add_task("", total=len(files))
    if runtime.SIMULATOR and len(files) > 1 and "fork" in multiprocessing.get_all_start_methods():
        # The largest first, so that the last one to end is a small one.
        jobs = [(n, path, budget) for n, path in enumerate(files)]
        jobs.sort(key=lambda job: job[1].stat().st_size if job[1].is_file() else 0, reverse=True)
        found: dict[int, list[check.Row]] = {}
        with multiprocessing.get_context("fork").Pool() as pool, progress:  # Python threads share one core
            for n, of_file in pool.imap_unordered(_check_file, jobs):
                found[n] = of_file
                progress.update(task, description=escape(files[n].name), advance=1)
        rows = [row for n in range(len(files)) for row in found[n]]
    else:
        with progress:
            for path in files:
                rows += check.check_file(path, budget, lambda what: progress.update(task, description=escape(what)))
                progress.advance(task)
    passed = all(row.passed for row in rows)
    if as_json:
        print(json.dumps({"passed": passed, "info": collect_info(), "rows": [row.as_dict() for row in rows]}, indent=2))
    else:
        _print_rows(rows)
    return 0 if passed else 1


def _check_file(job: tuple[int, Path, float | None]) -> tuple[int, list[check.Row]]:
    n, path, budget = job
    return n, list(check.check_file(path, budget))


def _print_rows(rows: list[check.Row]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for title in ("file", "variant", "checked"):
        table.add_column(title, overflow="fold")
    for title in ("max abs", "rel. F.", "bound", "others", "seconds"):
        table.add_column(title, justify="right", no_wrap=True, min_width=7)
    table.add_column("", no_wrap=True, min_width=4)
    table.caption = (
        "verify_attention: errors of out (bound: of rel. F., relative Frobenius); lse relative to max(1, |lse|). "
        "merge_states: errors of out relative to the states' largest element; lse likewise. "
        "topk_logprobs: errors of logprobs relative to max(1, |lse|, |logit|); ids exact. "
        "target_probs: relative to p * (1 + |a|), a = (logit - max) / temperature. exact: results must be equal."
    )
    for row in rows:
        cells = (row.variant, row.checked.split(":")[0], *_cells(row.reports), f"{row.seconds:.3f}")
        verdict = "[green]ok[/]" if row.passed else "[bold red]FAIL[/]"
        table.add_row(escape(row.file.removesuffix(".kdtr")), *cells, verdict)
    console = Console(width=None if sys.stdout.isatty() else 132)
    console.print(table)
    for row in rows:
        if ":" in row.checked:
            console.print(escape(f"{row.file} {row.variant}: {row.checked}"), highlight=False)
    for row in rows:
        if not row.passed:
            console.print("[red]FAIL[/]", escape(f"{row.file} {row.variant}: {row.problem}"), highlight=False)
    failed = sum(not row.passed for row in rows)
    console.print(f"{len(rows) - failed} passed, {failed} failed", highlight=False)


def _cells(reports: tuple[Report, ...]) -> tuple[str, str, str, str]:
    """Max abs, relative Frobenius and bound of the first result that has a bound, and the other results in a word."""
    exact = [report for report in reports if check.is_exact(report)]
    bounded = [report for report in reports if not check.is_exact(report)]
    if not bounded:
        errors = [report.max_abs_error for report in exact if report.max_abs_error is not None]
        return _number(max(errors, default=None)), "-", "exact" if exact else "-", "-"
    first, *others = bounded
    bound = first.max_abs if first.rel_frobenius is None else first.rel_frobenius
    words = [f"{report.name} {_number(report.max_abs_error)}" for report in others]
    if exact:
        words.append("exact" if all(exact) else "differ")
    return _number(first.max_abs_error), _number(first.rel_frobenius_error), _number(bound), ", ".join(words)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.1e}"


if __name__ == "__main__":
    sys.exit(main())
