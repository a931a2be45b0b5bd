"""What the benchmarks of this folder share: the check ahead of the clock, the clocks, the machine, the command line.

A benchmark is a list of jobs, each of which yields rows. `measured` makes a row: it refuses to time what is wrong. The
usual columns of time, in microseconds, are

- microseconds, spread_microseconds: CUDA events around one call, with nothing of it in L2 and nothing there to write
  back: 256 MiB are written and then read before each call. Median and interquartile range of `REPEATS`; pauses between
  the calls keep the GPU cool (burst). On the CPU, wall time of `CPU_REPEATS`.
- graph_us: a call's part of a CUDA graph of `GRAPH_CALLS` calls (fewer where they are long), nothing flushed.
- host_us: wall time until a call returns, which is before its kernel has run.
- sustained_us: a call's part of a second of calls back to back, as graphs, so that power limits the clock as it does in
  service; on copies of the inputs in turn, so that L2 does not hold them. Behind it stand the median SM clock and power
  of that second, sustained_mhz and sustained_w.

Each row also says on what it was measured (`MACHINE`). Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the scripts run from a plain checkout

import numpy as np
from rich.console import Console
from rich.progress import track
from tables import read_rows, write_rows, write_text

from ddtree_numba.device import runtime

ROOT = Path(__file__).resolve().parent.parent

Row = dict[str, Any]
Times = dict[str, str]
Job = Callable[[], Iterable[Row]]

REPEATS, QUICK_REPEATS = 30, 5
WARM_UPS = 3
GRAPH_CALLS = 20
GRAPH_REPEATS = 5
GRAPH_MICROSECONDS = 20_000  # most that the calls of one graph take
CPU_REPEATS = 3
SUSTAIN, QUICK_SUSTAIN = 1.0, 0.2  # seconds
SAMPLE_SECONDS = 0.02  # between two looks at clock and power
MOST_LAUNCHES = 400  # in the graph that is repeated for the sustained time
ROTATED_BYTES, MOST_COPIES = 128 << 20, 8  # inputs are copied until they are as large, which is more than L2
FLUSH_BYTES = 256 << 20
LOGIT_STD = 5.0
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}

SUSTAINED = ("sustained_us", "sustained_mhz", "sustained_w")
TIMES = ("microseconds", "spread_microseconds", "graph_us", "host_us", *SUSTAINED)
MACHINE = (
    *("gpu", "driver", "sm_clock_mhz", "power_w", "temperature_c", "cpu"),
    *("python", "numpy", "numba_cuda", "torch", "triton", "cupy", "commit"),
)
PACKAGES = {
    "numba_cuda": ("numba-cuda",),
    "torch": ("torch",),
    "triton": ("triton",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
}


def nothing() -> None:
    """Where nothing has to be done ahead of a call."""


class Gpu:
    """All that needs PyTorch and a GPU. Tests put NumPy in its place."""

    place = "cuda"

    def __init__(self, commit: str, repeats: int = REPEATS, sustain: float = SUSTAIN) -> None:
        import pynvml
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees none")
        self.torch, self.nvml, self.commit, self.repeats, self.sustain = torch, pynvml, commit, repeats, sustain
        pynvml.nvmlInit()
        # By its UUID: NVML counts all GPUs, PyTorch those that CUDA_VISIBLE_DEVICES leaves.
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        self.handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    # Arrays

    def logits(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Normal logits of standard deviation `LOGIT_STD`, the same ones for the same shape."""
        torch = self.torch
        generator = torch.Generator(self.place).manual_seed(0)
        return (torch.randn(shape, device=self.place, generator=generator) * LOGIT_STD).to(getattr(torch, dtype))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An uninitialised array."""
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=self.place)

    def to_device(self, x: np.ndarray) -> Any:
        """A copy on the GPU."""
        return self.torch.from_numpy(x).to(self.place)

    def to_host(self, x: Any) -> np.ndarray:
        """The elements on the host; bfloat16 as float32."""
        return (x.float() if x.dtype == self.torch.bfloat16 else x).cpu().numpy()

    def free(self) -> None:
        """Give memory back that nothing holds."""
        gc.collect()
        self.torch.cuda.empty_cache()

    # Times

    def time(
        self,
        call: Callable[..., Any],
        calls_in_graph: int = GRAPH_CALLS,
        *,
        inputs: Sequence[Any] = (),
        before: Callable[[], Any] = nothing,
        replay: Callable[[], Any] | None = None,
    ) -> Times:
        """The usual times of ``call(*inputs)``.

        calls_in_graph : 0 where a call cannot be captured.
        inputs : arrays of which the sustained time takes copies in turn.
        before : runs ahead of each call and is not timed, but for the sustained time.
        replay : a call as a CUDA graph of its own, which is then timed in its place; host_us stays that of ``call``.
        """

        def once() -> Any:
            return call(*inputs)

        median, spread = self.alone(replay or once, before)
        found = {"microseconds": f"{median:.1f}", "spread_microseconds": f"{spread:.1f}"}
        if replay is not None:
            found["graph_us"] = f"{self.warm(replay, before):.2f}"
        elif calls_in_graph:
            calls = max(1, min(calls_in_graph, int(GRAPH_MICROSECONDS / max(median, 1))))
            found["graph_us"] = f"{self.in_graph(once, calls):.2f}"
        found["host_us"] = f"{self.on_host(once, before):.1f}"
        if self.sustain and replay is not None:

            def again() -> None:
                before()
                replay()

            found |= self.sustained([again], self.sustain, capture=False)
        elif self.sustain:
            found |= self.sustained(self.rotated(call, inputs), self.sustain, capture=calls_in_graph > 0)
        return found

    def alone(
        self, call: Callable[[], Any], before: Callable[[], Any] = nothing, *, dirty: bool = False
    ) -> tuple[float, float]:
        """Median and interquartile range of the device time of a call from a flushed L2.

        dirty : leave L2 full of lines that must be written back before the call's own can take their places.
        """
        times = []
        for n in range(WARM_UPS + self.repeats):
            before()
            self.flush.zero_()
            if not dirty:
                self.flush.view(self.torch.int64).sum()  # reads all, so that what was written leaves L2
            microseconds = self.between_events(call)
            if n >= WARM_UPS:
                times.append(microseconds)
        return median_and_spread(times)

    def warm(self, call: Callable[[], Any], before: Callable[[], Any] = nothing) -> float:
        """Device time of a call with nothing flushed, median."""
        times = []
        for _ in range(1 + GRAPH_REPEATS):
            before()
            times.append(self.between_events(call))
        return statistics.median(times[1:])

    def in_graph(self, call: Callable[[], Any], calls: int) -> float:
        """Device time of a call among ``calls`` in a CUDA graph; it has run before, so nothing is compiled in there."""
        return self.warm(self.capture(call, calls)) / calls

    def on_host(self, call: Callable[[], Any], before: Callable[[], Any] = nothing) -> float:
        """Wall time until a call returns, median."""
        times = []
        for _ in range(self.repeats):
            before()
            self.torch.cuda.synchronize()
            times.append(wall_time(call))
        self.torch.cuda.synchronize()
        return statistics.median(times)

    def sustained(self, calls: Sequence[Callable[[], Any]], seconds: float, *, capture: bool = True) -> Times:
        """Calls in turn, back to back for so long: time of one, and median clock and power meanwhile.

        capture : as CUDA graphs; else launched one by one, and the time may be the host's.
        """
        cuda = self.torch.cuda

        def around() -> None:
            for call in calls:
                call()

        around()
        microseconds = max(1.0, self.warm(self.capture(around) if capture else around))
        rounds = max(1, min(int(GRAPH_MICROSECONDS / 2 / microseconds), MOST_LAUNCHES // len(calls)))
        go = self.capture(around, rounds) if capture else lambda: [around() for _ in range(rounds)]
        go()
        cuda.synchronize()
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        queued: deque[Any] = deque()
        samples: list[tuple[float, float]] = []
        count, start = 0, time.perf_counter()
        begin.record()
        while (now := time.perf_counter() - start) < seconds or not samples:
            go()
            count += rounds * len(calls)
            queued.append(cuda.Event())
            queued[-1].record()
            if len(queued) > 3:  # the host stays three graphs ahead, so that the GPU never waits and the end is near
                queued.popleft().synchronize()
            if now >= len(samples) * SAMPLE_SECONDS:
                samples.append((self.clock(), self.power()))
        end.record()
        cuda.synchronize()
        clock, power = (statistics.median(values) for values in zip(*samples, strict=True))
        values = (f"{begin.elapsed_time(end) * 1e3 / count:.2f}", f"{clock:.0f}", f"{power:.0f}")
        return dict(zip(SUSTAINED, values, strict=True))

    def rotated(self, call: Callable[..., Any], inputs: Sequence[Any]) -> list[Callable[[], Any]]:
        """The call on its inputs, and on copies of them."""
        nbytes = sum(x.nbytes for x in inputs)
        copies = min(MOST_COPIES, -(-ROTATED_BYTES // nbytes)) if nbytes else 1
        sets = [inputs, *([x.clone() for x in inputs] for _ in range(copies - 1))]
        return [lambda given=given: call(*given) for given in sets]

    def between_events(self, call: Callable[[], Any]) -> float:
        """Device time of whatever ``call`` puts on the stream, in microseconds."""
        cuda = self.torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        # Two milliseconds of waiting on the GPU, so that the host has prepared the launch when the first event passes.
        cuda._sleep(4_000_000)
        begin.record()
        call()
        end.record()
        cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    def capture(self, call: Callable[[], Any], calls: int = 1) -> Callable[[], Any]:
        """What replays calls, which have run before, as one CUDA graph."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        return graph.replay

    # The machine

    def clock(self) -> int:
        """The SM clock in MHz at this moment."""
        return self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)

    def power(self) -> float:
        """Watts at this moment, where NVML knows them; else their mean of about the last second."""
        nvml = self.nvml
        try:
            field = nvml.nvmlDeviceGetFieldValues(self.handle, [nvml.NVML_FI_DEV_POWER_INSTANT])[0]
            if field.nvmlReturn == nvml.NVML_SUCCESS:
                return field.value.uiVal / 1000
        except nvml.NVMLError:
            pass
        return nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000

    def machine(self) -> Row:
        """What a row must say so that it can be compared with another."""
        return {
            "gpu": self.torch.cuda.get_device_name(),
            "driver": self.nvml.nvmlSystemGetDriverVersion(),
            "sm_clock_mhz": self.clock(),
            "power_w": round(self.power()),
            "temperature_c": self.nvml.nvmlDeviceGetTemperature(self.handle, self.nvml.NVML_TEMPERATURE_GPU),
            **host_machine(),
            "commit": self.commit,
        }


def host_machine() -> Row:
    """The processor, and the packages."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cpu = (models[0] if models else platform.processor()).replace("(R)", "").replace("(TM)", "")
    found = {"cpu": cpu, "python": platform.python_version(), "numpy": np.__version__}
    return found | {name: version_of(*packages) for name, packages in PACKAGES.items()}


def version_of(*packages: str) -> str:
    """The version of the first of these that is installed, or nothing."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


def median_and_spread(times: list[float]) -> tuple[float, float]:
    """Median and interquartile range."""
    if len(times) < 2:
        return times[0], 0.0
    quarters = statistics.quantiles(times, n=4)
    return statistics.median(times), quarters[2] - quarters[0]


def wall_time(call: Callable[[], Any]) -> float:
    """Microseconds until a call returns."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def wall_times(call: Callable[[], Any], repeats: int = CPU_REPEATS) -> Times:
    """Median and interquartile range of the wall time of a call that waits for its results."""
    median, spread = median_and_spread([wall_time(call) for _ in range(repeats)])
    return {"microseconds": f"{median:.1f}", "spread_microseconds": f"{spread:.1f}"}


# Rows


def spoil(*results: Any) -> None:
    """Overwrite what may still hold another variant's right result."""
    for x in results:
        x[...] = -7


def ends(count: int) -> list[int]:
    """The first and the last of so many."""
    return sorted({0, count - 1})


def measured(
    row: Row, gpu: Any, right: Callable[[], bool], call: Callable[..., Any], timer: Callable[[Any], Times]
) -> Row:
    """The row with its verdict, with the times only if it was right, and with the machine as it was right after."""
    found: Row = {"right": False}
    try:
        found["right"] = bool(right())
        if found["right"]:
            found |= timer(call)
    except Exception as error:  # one row must not cost the others; it is not right, and the exit code says so
        found = {"right": False, "note": note_of(error)}
    return {**row, **found, "repeats": CPU_REPEATS if timer is wall_times else gpu.repeats, **gpu.machine()}


def note_of(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")


def with_rate(row: Row, column: str, work: float) -> Row:
    """The row with ``work`` a second as ``column``, gb_per_s of bytes or tflops of operations, if it was timed."""
    if "microseconds" in row:
        rate = work / float(row["microseconds"]) / 1e6
        row[column] = f"{rate:.2f}" if column == "tflops" else f"{rate * 1e3:.0f}"
    return row


def rows_of(gpu: Any, job: Job) -> Iterator[Row]:
    """The rows of a job; one that is not right where its inputs cannot be made. Then its memory is free again."""
    try:
        yield from job()
    except Exception as error:  # one job must not cost the others
        yield {"variant": "", "right": False, "note": note_of(error), **gpu.machine()}
    gpu.free()


def require_columns(path: Path, fields: Sequence[str]) -> None:
    """Refuse to append to a file of other columns.

    Raises
    ------
    ValueError
        The file is there, and its first line is not these columns.
    """
    if path.exists():
        with path.open(newline="") as file:
            found = next(csv.reader(file), [])
        if found != list(fields):
            other = ", ".join(sorted(set(found) ^ set(fields))) or "their order"
            raise ValueError(f"{path} has other columns than the rows to append: {other}")


class Kept:
    """The file of a measurement, written whole after each job, and beside it, until the last one, how far it is.

    A start that is cut so loses the job that it was at and no other: the next start with the same settings goes on
    behind the jobs that are done.

    Attributes
    ----------
    rows : list of dict
        All rows of the file.
    base : int
        How many of them were there before this measurement.
    jobs : int
        How many jobs of it are done.
    """

    def __init__(self, path: Path, fields: Sequence[str], settings: Row, append: bool, again: bool) -> None:
        self.path, self.fields, self.settings = path, fields, {**settings, "append": append}
        self.mark = path.with_suffix(".unfinished")
        self.rows: list[Row] = []
        self.base, self.jobs = 0, 0
        if again or not self.go_on():
            self.rows = list(read_rows(path)) if append else []
            self.base = len(self.rows)

    def go_on(self) -> bool:
        """Take up what an earlier start has left, if that had the same settings."""
        commit = self.settings["commit"]
        if commit == "unknown" or commit.endswith("-dirty"):
            return False  # the code may be another one by now
        try:
            found = json.loads(self.mark.read_text(encoding="utf-8"))
            if found["settings"] != self.settings:
                return False
            base, count, jobs = (int(found[name]) for name in ("base", "rows", "jobs"))
        except (OSError, ValueError, KeyError, TypeError):
            return False
        rows = read_rows(self.path)[:count]  # without those of a job that was cut between file and mark
        if len(rows) < count or any(row.get("commit") != commit for row in rows[base:]):
            return False
        self.rows, self.base, self.jobs = list(rows), base, jobs
        return True

    def add(self, rows: list[Row]) -> None:
        """The rows of one more job."""
        write_rows(self.path, [*self.rows, *rows], self.fields)
        self.rows += rows
        self.jobs += 1
        found = {"settings": self.settings, "base": self.base, "rows": len(self.rows), "jobs": self.jobs}
        write_text(self.mark, json.dumps(found))

    def finish(self) -> None:
        """All jobs are done: the next start begins anew."""
        self.mark.unlink(missing_ok=True)


def times_of(row: Row) -> str:
    """The times of a row for people."""
    found = " ".join(f"{row.get(name, '-') or '-':>9}" for name in ("microseconds", "graph_us", "host_us"))
    if row.get("sustained_us"):
        found += f" {row['sustained_us']:>9} at {row['sustained_mhz']} MHz, {row['sustained_w']} W"
    return found + f" {row.get('note', '')}{'' if row['right'] else '  WRONG'}"


# Commands


def main(
    description: str,
    name: str,
    fields: Sequence[str],
    jobs: Callable[[Any, bool], Iterable[Job]],
    number_of_jobs: Callable[[bool], int],
    line: Callable[[Row], str],
    gpu_class: Callable[..., Any],
    arguments: list[str] | None = None,
    peers: Sequence[str] = (),
) -> int:
    """The command line of a benchmark: measure, print, write.

    Parameters
    ----------
    description, name
        What ``--help`` says, and the name of the CSV file.
    fields
        Its columns.
    jobs
        Called with the GPU and whether to be quick; each job yields rows. They are made as they are needed.
    number_of_jobs
        How many there are, for the progress bar.
    line
        A row for people.
    gpu_class
        Called with commit, repeats and seconds of the sustained time.
    arguments
        Of the command line.
    peers
        Variants that are not ours, whose failure is noted but is no failure of the run.

    Returns
    -------
    int
        1 when a result was wrong, 2 when nothing can be measured here, 130 when it was interrupted.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "profiling" / "results" / "local", help="folder for the CSV")
    parser.add_argument("--commit", help="commit that is measured; default: what git says")
    parser.add_argument("--quick", action="store_true", help=f"a short sweep, to {name}_quick.csv")
    parser.add_argument("--append", action="store_true", help="add the rows to the file instead of replacing it")
    parser.add_argument("--again", action="store_true", help="start anew, whatever a start that was cut has measured")
    parser.add_argument("--sustain", type=float, metavar="SECONDS", help="length of the sustained times; 0: none")
    options = parser.parse_args(arguments)
    path = options.out / f"{name}{'_quick' if options.quick else ''}.csv"
    try:
        if options.append:
            require_columns(path, fields)
        gpu = open_gpu(gpu_class, options.commit, options.quick, options.sustain)
    except (ImportError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    machine = gpu.machine()
    settings = {"gpu": machine["gpu"], "commit": machine["commit"], "sustain": options.sustain}
    kept = Kept(path, fields, settings, options.append, options.again)
    total, done = number_of_jobs(options.quick), kept.jobs
    if done:
        print(f"{done} of {total} jobs are in {path} and are not measured again")
    every = track(jobs(gpu, options.quick), name, total=total, console=Console(stderr=True))
    try:
        for job in itertools.islice(every, done, None):
            rows = []
            for row in rows_of(gpu, job):
                print(line(row), flush=True)
                rows.append(row)
            kept.add(rows)
    except KeyboardInterrupt:
        print(f"{path} holds what was measured", file=sys.stderr)
        return 130
    kept.finish()
    ours = [row for row in kept.rows[kept.base :] if row["variant"] not in peers]
    return 0 if all(str(row["right"]) == "True" for row in ours) else 1


def open_gpu(gpu_class: Callable[..., Any], commit: str | None, quick: bool, sustain: float | None = None) -> Any:
    """The GPU to measure on.

    Raises
    ------
    RuntimeError
        There is none.
    ImportError
        PyTorch or nvidia-ml-py is missing.
    """
    if runtime.SIMULATOR:
        raise RuntimeError(f"this measures a GPU, and there is none: {runtime.REASON}")
    if sustain is None:
        sustain = QUICK_SUSTAIN if quick else SUSTAIN
    try:
        return gpu_class(commit or commit_here(), QUICK_REPEATS if quick else REPEATS, sustain)
    except ImportError as error:
        needs = "this compares with PyTorch and reads the clocks; pip install torch nvidia-ml-py"
        raise ImportError(f"{error}: {needs}") from error
    except RuntimeError as error:
        raise RuntimeError(f"this measures a GPU, and there is none: {error}") from error


def commit_here() -> str:
    """What git says of the checkout."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        return subprocess.check_output(command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def stream() -> Any:
    """PyTorch's current stream for a kernel of Numba's: ``kernel[blocks, threads, stream()](..)``."""
    import torch
    from numba import cuda

    return cuda.external_stream(torch.cuda.current_stream().cuda_stream)


def against(
    operator: str,
    name: str,
    call: Callable[..., Any],
    out: Path | str = ROOT / "profiling" / "results" / "local",
    *,
    quick: bool = False,
) -> Path:
    """Measure a kernel of your own beside ours: the same checks, inputs and times as in the benchmarks, and a figure.

    Parameters
    ----------
    operator : {"verify_attention", "merge_states", "topk_logprobs", "build_tree", "argmax_tokens"}
        What it computes.
    name
        What its rows and curve are called.
    call
        It has the signature of ``ddtree_numba``'s operator, ``out=`` and the like included; arrays are PyTorch's. It
        launches on PyTorch's current stream (`stream`), so that a CUDA graph can hold it, and does not synchronize.
    out
        Folder for the CSV and the figure.
    quick
        Two sizes alone, and shorter times of them.

    Returns
    -------
    Path
        The CSV, OPERATOR_NAME.csv, with ``quick`` OPERATOR_NAME_quick.csv, written after each row. Where the results
        were wrong, its column right says so, and there are no times.
    """
    import bench_accept
    import bench_merge_states
    import bench_trees
    import bench_verify_attention
    import plot_speedup

    benchmarks = {
        "verify_attention": (bench_verify_attention, bench_verify_attention.rows_against),
        "merge_states": (bench_merge_states, bench_merge_states.rows_against),
        "topk_logprobs": (bench_trees, bench_trees.topk_against),
        "build_tree": (bench_trees, bench_trees.build_against),
        "argmax_tokens": (bench_accept, bench_accept.argmax_against),
    }
    benchmark, rows_against = benchmarks[operator]
    gpu = open_gpu(benchmark.Gpu, None, quick)
    path = Path(out) / f"{operator}_{name}{'_quick' if quick else ''}.csv"
    rows = []
    for row in rows_of(gpu, lambda: rows_against(gpu, name, call, quick)):
        print(benchmark.line(row), flush=True)
        rows.append(row)
        write_rows(path, rows, benchmark.FIELDS)
    plot_speedup.draw_file(path, Path(out))
    return path
