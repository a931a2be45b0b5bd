"""profiling/harness.py on a GPU that is made up: a clock that kernels move on, and all that is asked of PyTorch.

What measures is the harness itself; what is measured takes as long as it is told to.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_merge_states import Numpy as Merging
from test_results import Accepting, Numpy
from wrong_merges import MISTAKES, build

import ddtree_numba as dd

PROFILING = Path(__file__).resolve().parent.parent / "profiling"
sys.path.insert(0, str(PROFILING))

import bench_ceilings  # noqa: E402
import bench_encodings  # noqa: E402
import bench_merge_states  # noqa: E402
import harness  # noqa: E402
import sweep  # noqa: E402
import tables  # noqa: E402
import trace_wgmma  # noqa: E402


class Device:
    """A clock in microseconds, what has run, and the parts of PyTorch and NVML that the harness uses."""

    def __init__(self):
        self.now, self.log, self.captured = 0.0, [], None
        device = self

        class Event:
            def __init__(self, enable_timing=False):
                self.time = None

            def record(self):
                self.time = device.now

            def synchronize(self):
                assert self.time is not None

            def elapsed_time(self, end):
                return (end.time - self.time) / 1e3

        class Graph:
            def replay(self):
                for kernel in self.kernels:
                    kernel()

        @contextmanager
        def graph(one):
            device.captured = one.kernels = []
            yield
            device.captured = None

        cuda = SimpleNamespace(Event=Event, CUDAGraph=Graph, graph=graph)
        cuda._sleep = lambda cycles: device.run("sleep", 2000)
        cuda.synchronize = cuda.empty_cache = lambda: None
        cuda.get_device_name = lambda: "made up"
        self.torch = SimpleNamespace(cuda=cuda, int64="int64")
        self.nvml = SimpleNamespace(
            NVML_CLOCK_SM=1,
            NVML_TEMPERATURE_GPU=0,
            NVML_FI_DEV_POWER_INSTANT=186,
            NVML_SUCCESS=0,
            nvmlSystemGetDriverVersion=lambda: "1.0",
            nvmlDeviceGetClockInfo=lambda handle, kind: 1755,
            nvmlDeviceGetTemperature=lambda handle, kind: 40,
            nvmlDeviceGetPowerUsage=lambda handle: 123_000,
            nvmlDeviceGetFieldValues=self.fields,
            NVMLError=OSError,
        )
        self.field = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=650_000))

    def fields(self, handle, wanted):
        if self.field is None:
            raise OSError("not supported")
        return [self.field]

    def run(self, name, microseconds):
        if self.captured is not None:
            self.captured.append(partial(self.run, name, microseconds))
            return
        self.log.append(name)
        self.now += microseconds

    def zero_(self):
        self.run("write", 100)

    def view(self, dtype):
        return SimpleNamespace(sum=lambda: self.run("read", 100))


class MadeUp(harness.Gpu):
    """The harness on a device that is made up."""

    def __init__(self, commit="abc", repeats=5, sustain=0.01):
        self.device = Device()
        self.commit, self.repeats, self.sustain = commit, repeats, sustain
        self.torch, self.nvml, self.handle, self.flush = self.device.torch, self.device.nvml, 0, self.device

    def kernel(self, microseconds, name="kernel"):
        return lambda *arrays: self.device.run(name, microseconds)


class Array:
    """One that can be copied."""

    def __init__(self, nbytes, copies=None):
        self.nbytes, self.copies = nbytes, [] if copies is None else copies
        self.copies.append(self)

    def clone(self):
        return Array(self.nbytes, self.copies)


def test_all_times_are_those_of_the_kernel():
    gpu = MadeUp()
    found = gpu.time(gpu.kernel(123.4))
    assert found.pop("host_us")
    assert found == {
        "microseconds": "123.4",
        "spread_microseconds": "0.0",
        "graph_us": "123.40",
        "sustained_us": "123.40",
        "sustained_mhz": "1755",
        "sustained_w": "650",
    }
    assert list(found) == [name for name in harness.TIMES if name in found]


def test_l2_is_written_and_then_read_ahead_of_each_call_and_not_when_dirty():
    gpu = MadeUp(repeats=2)
    gpu.alone(gpu.kernel(5), gpu.kernel(7, "before"))
    assert gpu.device.log == ["before", "write", "read", "sleep", "kernel"] * (harness.WARM_UPS + 2)
    gpu = MadeUp(repeats=2)
    gpu.alone(gpu.kernel(5), dirty=True)
    assert gpu.device.log == ["write", "sleep", "kernel"] * (harness.WARM_UPS + 2)


def test_median_and_interquartile_range_after_the_warm_up():
    gpu, times = MadeUp(repeats=5), iter([900, 800, 700, 3, 1, 5, 2, 4])  # the first three are warm-ups
    assert gpu.alone(lambda: gpu.device.run("kernel", next(times))) == (3, 3)


def test_what_runs_ahead_of_a_call_is_timed_only_where_calls_follow_each_other():
    gpu = MadeUp()
    found = gpu.time(gpu.kernel(50), before=gpu.kernel(9), replay=gpu.kernel(30, "replay"))
    assert (found["microseconds"], found["graph_us"], found["sustained_us"]) == ("30.0", "30.00", "39.00")


def test_what_cannot_be_captured_has_no_time_in_a_graph():
    gpu = MadeUp()
    gpu.capture = None
    found = gpu.time(gpu.kernel(50), 0)
    assert "graph_us" not in found and found["sustained_us"] == "50.00"


def test_without_sustained_times_there_are_none():
    gpu = MadeUp(sustain=0)
    assert set(gpu.time(gpu.kernel(50))) == {"microseconds", "spread_microseconds", "graph_us", "host_us"}


@pytest.mark.parametrize("nbytes, sets", [(50 << 20, 3), (1 << 20, harness.MOST_COPIES), (1 << 30, 1)])
def test_sustained_calls_take_copies_of_their_inputs_in_turn(nbytes, sets):
    gpu, array, seen = MadeUp(), Array(nbytes), []

    def call(x):
        seen.append(x)
        gpu.device.run("kernel", 10)

    gpu.sustained(gpu.rotated(call, [array]), 0.001)
    assert len(array.copies) == sets and set(seen[:sets]) == set(array.copies)
    assert all(seen[n] is seen[n % sets] for n in range(len(seen)))


def test_power_of_this_moment_or_of_the_last_second():
    gpu = MadeUp()
    assert gpu.power() == 650
    gpu.device.field.nvmlReturn = 3
    assert gpu.power() == 123
    gpu.device.field = None
    assert gpu.power() == 123


def test_rows_say_on_what_they_were_measured():
    row = MadeUp("f00").machine()
    assert tuple(row) == harness.MACHINE
    assert row["gpu"] == "made up" and row["commit"] == "f00" and row["sm_clock_mhz"] == 1755
    assert row["numba_cuda"] == harness.version_of("numba-cuda") and row["numpy"] == np.__version__
    assert harness.version_of("no-such-package", "numpy") == np.__version__
    assert harness.version_of("no-such-package") == ""


def test_what_is_wrong_is_not_timed():
    gpu = MadeUp()
    row = harness.measured({"variant": "x"}, gpu, lambda: False, gpu.kernel(1), gpu.time)
    assert row["right"] is False and "microseconds" not in row and gpu.device.log == []
    row = harness.measured({"variant": "x"}, gpu, lambda: 1 / 0, gpu.kernel(1), gpu.time)
    assert row["right"] is False and row["note"].startswith("ZeroDivisionError") and gpu.device.log == []
    assert harness.times_of(row).endswith("WRONG")


# Files


FIELDS = ("variant", "right", *harness.TIMES, "repeats", "note", *harness.MACHINE)


SETTINGS = {"gpu": "made up", "commit": "abc", "sustain": None}


def kept(path, append=False, again=False, fields=FIELDS, **settings):
    return harness.Kept(path, fields, SETTINGS | settings, append, again)


def variants(path):
    return [row["variant"] for row in tables.read_rows(path)]


def test_rows_are_appended_whole_or_not_at_all(tmp_path):
    path, row = tmp_path / "new" / "x.csv", {"variant": "a", "right": True}
    first = kept(path, append=True)
    first.add([row])
    first.finish()
    more = kept(path, append=True)
    more.add([{**row, "variant": "b"}, {**row, "variant": "c"}])
    assert variants(path) == ["a", "b", "c"]
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not in fieldnames"):
        more.add([row, {**row, "surprise": 1}])
    for fields, other in (((*FIELDS, "more"), "more"), (FIELDS[::-1], "their order")):
        with pytest.raises(ValueError, match=f"has other columns than the rows to append: {other}"):
            harness.require_columns(path, fields)
    assert path.read_bytes() == before


def test_a_job_that_was_cut_between_its_rows_and_the_mark_is_measured_again(tmp_path, monkeypatch):
    path, row = tmp_path / "x.csv", {"right": True, "commit": "abc"}
    first = kept(path)
    first.add([{**row, "variant": "a"}])
    monkeypatch.setattr(harness, "write_text", lambda path, text: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.add([{**row, "variant": "b"}])
    assert variants(path) == ["a", "b"]
    again = kept(path)
    assert again.jobs == 1 and [row["variant"] for row in again.rows] == ["a"]


@pytest.mark.parametrize("broken", ["", "[1]", '{"settings"', '{"settings": {}}', "null"])
def test_a_mark_that_is_no_mark_begins_anew(tmp_path, broken):
    path = tmp_path / "x.csv"
    kept(path).add([{"variant": "a", "right": True, "commit": "abc"}])
    assert kept(path).jobs == 1
    path.with_suffix(".unfinished").write_text(broken)
    assert kept(path).jobs == 0


@pytest.mark.parametrize("other", [{"commit": "abd"}, {"gpu": "another"}, {"sustain": 0.0}, {"append": True}])
def test_what_was_measured_in_another_way_is_not_gone_on_with(tmp_path, other):
    path = tmp_path / "x.csv"
    kept(path).add([{"variant": "a", "right": True, "commit": "abc"}])
    assert kept(path).jobs == 1 and kept(path, **other).jobs == 0


@pytest.mark.parametrize("commit", ["abc-dirty", "unknown"])
def test_code_that_may_have_changed_begins_anew(tmp_path, commit):
    path = tmp_path / "x.csv"
    kept(path, commit=commit).add([{"variant": "a", "right": True, "commit": commit}])
    assert kept(path, commit=commit).jobs == 0


def test_rows_of_a_file_that_was_exchanged_are_not_gone_on_with(tmp_path):
    path = tmp_path / "x.csv"
    kept(path).add([{"variant": "a", "right": True, "commit": "abc"}])
    tables.write_rows(path, [{"variant": "a", "right": True, "commit": "other"}], FIELDS)
    assert kept(path).jobs == 0
    tables.write_rows(path, [], FIELDS)
    assert kept(path).jobs == 0


# The command line


@pytest.fixture
def with_gpu(monkeypatch):
    """The harness takes it that there is one; kernels run where they did."""
    monkeypatch.setattr(harness, "runtime", SimpleNamespace(SIMULATOR=False))


def kernel_rows(gpu, microseconds, noise, right=True, variant="kernel"):
    """A row of a kernel whose time is a little different each time."""
    kernel = lambda: gpu.device.run("kernel", microseconds * (1 + noise.normal(0, 0.01)))  # noqa: E731
    yield harness.measured({"variant": variant}, gpu, lambda: right, kernel, gpu.time)


def measure(out, *more, microseconds=100.0, seed=0, made=MadeUp, **how):
    """The command line of a benchmark with one kernel."""
    noise = np.random.default_rng(seed)
    jobs = lambda gpu, quick: [lambda: kernel_rows(gpu, microseconds, noise, **how)]  # noqa: E731
    line = lambda row: row["variant"] + harness.times_of(row)  # noqa: E731
    given = ["--out", str(out), "--commit", "abc", "--sustain", "0.01", *more]
    return harness.main("Measures.", "bench", FIELDS, jobs, lambda quick: 1, line, made, given, ("peer",))


def measure_jobs(out, names, cut_at=None, *more, wrong=()):
    """The command line of a benchmark with a job of two rows for each name; the one at which it is cut has one."""
    ran = []

    def rows(gpu, name):
        ran.append(name)
        for variant in (name, f"{name} again"):
            if variant == f"{cut_at} again":
                raise KeyboardInterrupt
            yield harness.measured({"variant": variant}, gpu, lambda: name not in wrong, gpu.kernel(1), gpu.time)

    jobs = lambda gpu, quick: [partial(rows, gpu, name) for name in names]  # noqa: E731
    given = ["--out", str(out), "--commit", "abc", "--sustain", "0", *more]
    count = lambda quick: len(names)  # noqa: E731
    code = harness.main("Measures.", "bench", FIELDS, jobs, count, lambda row: row["variant"], MadeUp, given)
    return code, ran


def test_a_measurement_that_is_cut_keeps_its_rows_and_the_next_start_goes_on_behind_them(with_gpu, tmp_path, capsys):
    path = tmp_path / "bench.csv"
    assert measure_jobs(tmp_path, "abcd", "c") == (130, ["a", "b", "c"])
    assert variants(path) == ["a", "a again", "b", "b again"]
    assert measure_jobs(tmp_path, "abcd") == (0, ["c", "d"])
    assert "2 of 4 jobs are in" in capsys.readouterr().out
    assert variants(path) == [f"{name}{more}" for name in "abcd" for more in ("", " again")]
    assert [file.name for file in tmp_path.iterdir()] == ["bench.csv"]
    assert measure_jobs(tmp_path, "abcd") == (0, [*"abcd"]) and len(variants(path)) == 8  # it was complete: anew


def test_a_measurement_that_is_cut_begins_anew_where_that_is_asked_for(with_gpu, tmp_path):
    assert measure_jobs(tmp_path, "ab", "b") == (130, ["a", "b"])
    assert measure_jobs(tmp_path, "ab", None, "--again") == (0, ["a", "b"])
    assert measure_jobs(tmp_path, "ab", "b") == (130, ["a", "b"])
    assert measure_jobs(tmp_path, "ab", None, "--quick") == (0, ["a", "b"])  # another file
    assert measure_jobs(tmp_path, "ab") == (0, ["b"])


def test_rows_that_are_appended_stand_once_behind_the_older_ones_however_often_it_is_cut(with_gpu, tmp_path):
    path = tmp_path / "bench.csv"
    assert measure_jobs(tmp_path, "x", None, wrong="x") == (1, ["x"])
    assert measure_jobs(tmp_path, "abc", "b", "--append") == (130, ["a", "b"])
    assert measure_jobs(tmp_path, "abc", "c", "--append") == (130, ["b", "c"])
    assert measure_jobs(tmp_path, "abc", None, "--append") == (0, ["c"])  # what was there before is not its failure
    assert variants(path) == [f"{name}{more}" for name in "xabc" for more in ("", " again")]


def test_what_was_wrong_before_the_cut_is_in_the_exit_code(with_gpu, tmp_path):
    assert measure_jobs(tmp_path, "ab", "b", wrong="a") == (130, ["a", "b"])
    assert measure_jobs(tmp_path, "ab") == (1, ["b"])


def compare(*sides):
    command = [sys.executable, str(PROFILING / "compare.py"), *map(str, sides)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_a_measurement_from_the_command_line_to_the_file(with_gpu, tmp_path, capsys):
    assert measure(tmp_path) == 0
    assert "kernel" in capsys.readouterr().out
    (row,) = tables.read_rows(tmp_path / "bench.csv")
    assert row["right"] == "True" and row["commit"] == "abc" and row["repeats"] == str(harness.REPEATS)
    assert float(row["microseconds"]) == pytest.approx(100, rel=0.03) and row["sustained_w"] == "650"
    assert measure(tmp_path, "--append") == 0 and len(tables.read_rows(tmp_path / "bench.csv")) == 2
    assert measure(tmp_path) == 0 and len(tables.read_rows(tmp_path / "bench.csv")) == 1
    assert measure(tmp_path, "--quick") == 0
    assert tables.read_rows(tmp_path / "bench_quick.csv")[0]["repeats"] == str(harness.QUICK_REPEATS)


def test_other_columns_are_refused_before_anything_is_measured(with_gpu, tmp_path, capsys):
    (tmp_path / "bench.csv").write_text("variant,other\na,1\n")
    assert measure(tmp_path, "--append", made=None) == 2
    assert "has other columns" in capsys.readouterr().err


def test_a_kernel_that_is_wrong_is_refused_and_the_exit_code_says_so(with_gpu, tmp_path):
    assert measure(tmp_path, right=False) == 1
    (row,) = tables.read_rows(tmp_path / "bench.csv")
    assert row["right"] == "False" and not any(row[name] for name in harness.TIMES)
    assert measure(tmp_path, right=False, variant="peer") == 0  # noted, but no failure of ours


@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_slowed_by_10_percent_is_caught_and_a_repetition_is_not(with_gpu, tmp_path, seed):
    for name, microseconds, n in (("old", 100, 0), ("again", 100, 1), ("slow", 110, 2)):
        measure(tmp_path / name, microseconds=microseconds, seed=[seed, n])
    # The host's time is that of this machine, and no subject here.
    for name in ("old", "again", "slow"):
        rows = tables.read_rows(tmp_path / name / "bench.csv")
        tables.write_rows(tmp_path / name / "bench.csv", [{**row, "host_us": ""} for row in rows], FIELDS)
    code, out = compare(tmp_path / "old", tmp_path / "again")
    assert code == 0, out
    code, out = compare(tmp_path / "old", tmp_path / "slow")
    assert code == 1 and "3 slower" in out, out  # alone, in a graph, sustained


@pytest.mark.skipif(not harness.runtime.SIMULATOR, reason="there is a GPU")
@pytest.mark.parametrize("script", [bench_ceilings, bench_encodings, trace_wgmma], ids=lambda script: script.__name__)
def test_measuring_says_that_it_needs_a_gpu(script, tmp_path, capsys):
    assert script.main(["--out", str(tmp_path)]) == 2
    assert "there is none" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_what_is_not_installed_is_named(with_gpu, tmp_path, capsys):
    def no_torch(*_):
        raise ImportError("No module named 'torch'")

    assert measure(tmp_path, made=no_torch) == 2
    assert "No module named 'torch': this compares with PyTorch" in capsys.readouterr().err


# Benchmarks on NumPy arrays, with times that are made up


@pytest.mark.parametrize("mistake", ["weights_swapped", "last_row_left_out", "lse_in_bits"])
def test_a_kernel_made_wrong_on_purpose_is_not_timed(mistake):
    gpu, wrong = Merging(), build(MISTAKES[mistake]).merge_states
    rows = {
        row["variant"]: row
        for row in bench_merge_states.merge_rows(gpu, (3, 2, 32), "float32", "C order", {"wrong": wrong})
    }
    assert rows["wrong"]["right"] is False and "microseconds" not in rows["wrong"]
    assert rows["merge_states"]["right"] and gpu.timed == len(rows) - 1


class Encoding(Numpy):
    """Stands in for bench_encodings.Gpu."""

    def to_device(self, x):
        return x.copy()

    def to_host(self, x):
        return x

    def as_bytes(self, x):
        return x.view(np.uint8)


def test_encodings_on_numpy(monkeypatch):
    monkeypatch.setattr(bench_encodings, "SIZES", ((2, 9),))
    (job,) = bench_encodings.jobs(Encoding(), quick=False)
    rows = list(job())
    assert [row for row in rows if not row["right"]] == []
    names = [(name, name) for name in bench_encodings.CONVERSIONS]
    names += [("mask_from_parents", "numpy"), *(("relabel", order) for order in bench_encodings.ORDERS)]
    assert [(row["operator"], row["variant"]) for row in rows] == names
    assert all(row.keys() <= set(bench_encodings.FIELDS) and bench_encodings.line(row) for row in rows)
    links = rows[names.index(("links_from_parents", "links_from_parents"))]
    assert links["gb_per_s"] == f"{3 * 2 * 9 * 4 / 8e3:.0f}"


@pytest.mark.parametrize("name", ["depths_from_parents", "sglang_links", "full_mask"])
def test_a_conversion_that_does_nothing_is_not_timed(monkeypatch, name):
    gpu = Encoding()
    monkeypatch.setattr(dd, name, lambda *args, **kwargs: None)
    forms = bench_encodings.every_form(2, 9)
    (row, on_host) = bench_encodings.encoding_rows(gpu, forms, (name,))
    assert row["right"] is False and "microseconds" not in row and on_host["right"] and gpu.timed == 0


class Ceilings(Numpy):
    """Stands in for bench_ceilings.Gpu."""

    def copies(self):
        return np.arange(16), np.empty(16, np.int64)

    def empty(self, shape, dtype):
        return np.empty(shape, np.float32)

    def matrix(self, dtype, seed):
        return np.random.default_rng(seed).normal(0, 1, (bench_ceilings.SIZE,) * 2).astype(np.float32)

    def multiply(self, a, b, out):
        return np.matmul(a, b, out=out)

    def error(self, a, b, found):
        return float(np.abs(found - a.astype(float) @ b.astype(float)).max())


def test_ceilings_on_numpy(monkeypatch):
    monkeypatch.setattr(bench_ceilings, "SIZE", 20)
    rows = [row for job in bench_ceilings.jobs(Ceilings(), quick=True) for row in job()]
    assert [(row["operator"], row["right"]) for row in rows] == [("copy", True), ("matmul", True), ("matmul", True)]
    copy, *products = rows
    assert copy["gb_per_s"] == copy["sustained_gb_per_s"] == f"{2 * bench_ceilings.COPY_BYTES / 8e3:.0f}"
    assert all(row["tflops"] == row["sustained_tflops"] == f"{2 * 20**3 / 8e6:.2f}" for row in products)
    assert all(row.keys() <= set(bench_ceilings.FIELDS) and bench_ceilings.line(row) for row in rows)


# A kernel of one's own


@pytest.fixture
def beside(monkeypatch, with_gpu):
    """`harness.against` on small sizes and NumPy arrays."""
    pytest.importorskip("matplotlib")
    import bench_accept
    import bench_trees

    monkeypatch.setattr(bench_merge_states, "SIZES", (((3, 2, 32), "float32", "C order"),))
    monkeypatch.setattr(bench_merge_states, "Gpu", lambda *_: Merging())
    monkeypatch.setattr(bench_accept, "ARGMAX", (((2, 3, 41), "float32"),))
    monkeypatch.setattr(bench_accept, "Gpu", lambda *_: Accepting())
    monkeypatch.setattr(bench_trees, "Gpu", lambda *_: Numpy())
    monkeypatch.setattr(bench_trees, "BATCHES", (1,))
    monkeypatch.setattr(bench_trees, "LENGTH", 3)
    monkeypatch.setattr(bench_trees, "SWEPT_BUDGET", 5)
    monkeypatch.setattr(bench_trees, "TOPK", (None, ((1, 2, 101), 5, "float32")))


OPERATORS = {
    "merge_states": dd.merge_states,
    "argmax_tokens": dd.argmax_tokens,
    "topk_logprobs": dd.topk_logprobs,
    "build_tree": dd.build_tree,
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_kernel_of_ones_own_is_measured_and_drawn_with_one_call(beside, tmp_path, operator):
    path = harness.against(operator, "mine", OPERATORS[operator], tmp_path)
    assert path == tmp_path / f"{operator}_mine.csv"
    rows = {row["variant"]: row for row in tables.read_rows(path)}
    assert rows["mine"]["right"] == "True" and rows["mine"]["microseconds"] and len(rows) >= 3
    assert {file.suffix for file in tmp_path.iterdir()} == {".csv", ".svg", ".png"}


def test_a_quick_look_at_a_kernel_of_ones_own_has_two_sizes_and_a_file_of_its_own(beside, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_merge_states, "SIZES", tuple(((t, 2, 32), "float32", "C order") for t in (3, 4, 5)))
    for quick, sizes in ((True, {"3", "4"}), (False, {"3", "4", "5"})):
        path = harness.against("merge_states", "mine", dd.merge_states, tmp_path, quick=quick)
        assert path.name == f"merge_states_mine{'_quick' * quick}.csv"
        assert {row["T"] for row in tables.read_rows(path)} == sizes


def test_a_kernel_of_ones_own_that_is_cut_keeps_its_rows(beside, tmp_path):
    def cut(*_, **__):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harness.against("merge_states", "mine", cut, tmp_path)
    assert variants(tmp_path / "merge_states_mine.csv") == ["merge_states"]


def test_a_wrong_kernel_of_ones_own_is_not_timed(beside, tmp_path):
    def wrong(logits, *, out):
        found = dd.argmax_tokens(logits, out=out)
        found[-1, -1] += 1
        return found

    path = harness.against("argmax_tokens", "mine", wrong, tmp_path)
    rows = {row["variant"]: row for row in tables.read_rows(path)}
    assert rows["mine"]["right"] == "False" and not rows["mine"]["microseconds"]
    assert rows["argmax_tokens"]["right"] == "True"


# Everything with one command


def test_every_step_of_the_sweep_is_there_and_with_a_gpu_the_benchmarks_are(tmp_path):
    here, there = (sweep.steps(tmp_path, True, gpu) for gpu in (False, True))
    assert [step.script for step in there if step not in here][: len(sweep.BENCHMARKS)] == [
        f"bench_{name}.py" for name in sweep.BENCHMARKS
    ]
    assert not any(step.script.startswith("bench_") for step in here)
    for step in (*here, *there):
        assert (PROFILING / step.script).exists(), step.script
    assert all(str(sweep.COMMITTED) in step.arguments for step in here if step.script != "resources.py")


def test_a_step_that_fails_or_takes_too_long_does_not_cost_the_rest(monkeypatch, tmp_path, capsys):
    (tmp_path / "good.py").write_text("print('measured')")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(sweep, "FOLDER", tmp_path)
    monkeypatch.setattr(sweep, "TIMEOUT", 0.5)
    every = [sweep.Step(f"{name}.py", (), f"{name}.log") for name in ("bad", "slow", "good")]
    monkeypatch.setattr(sweep, "steps", lambda *_: every)
    assert sweep.main(["--out", str(tmp_path / "out")]) == 1
    out = capsys.readouterr().out
    assert "failed (3)" in out and "stopped after 0 s" in out and "done" in out
    assert (tmp_path / "out" / "good.log").read_text() == "measured\n"
    monkeypatch.setattr(sweep, "steps", lambda *_: every[2:])
    assert sweep.main(["--out", str(tmp_path / "out")]) == 0
