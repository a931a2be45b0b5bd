"""profiling/harness.py on a CUDA GPU: what is wrong is refused, what is slower is caught, what is the same is not.

The same on a GPU that is made up is in test_harness.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from numba import cuda
from test_harness import compare
from wrong_merges import MISTAKES, build

import ddtree_numba as dd
from ddtree_numba.device.runtime import SIMULATOR

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))

import bench_accept  # noqa: E402
import bench_ceilings  # noqa: E402
import bench_merge_states  # noqa: E402
import harness  # noqa: E402
import tables  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
]

SIZE = (288, 64, 512)
ROUNDS = 50_000  # some 100 microseconds


@pytest.fixture
def merging():
    pytest.importorskip("torch")
    pytest.importorskip("pynvml")
    return bench_merge_states.Gpu("abc", 10, 0.2)


def merged(gpu, operator):
    """The rows of ours and of another kernel."""
    gpu.peers = lambda *_: {}
    rows = bench_merge_states.merge_rows(gpu, SIZE, "float32", "C order", {"other": operator})
    return {row["variant"]: row for row in rows}


def test_a_kernel_made_wrong_on_purpose_is_refused_before_it_is_timed(merging):
    rows = merged(merging, build(MISTAKES["weights_swapped"]).merge_states)
    assert rows["merge_states"]["right"] is True and float(rows["merge_states"]["microseconds"]) > 0
    assert rows["other"]["right"] is False and not rows["other"].get("note")
    assert not rows["other"].keys() & set(harness.TIMES)


def test_the_same_kernel_twice_takes_the_same_time(merging):
    rows = merged(merging, dd.merge_states)
    ours, other = ([float(rows[name][x]) for x in ("microseconds", "graph_us")] for name in ("merge_states", "other"))
    spread = max(float(row["spread_microseconds"]) for row in rows.values())
    assert abs(ours[0] - other[0]) <= max(0.03 * ours[0], 2 * spread, 0.3)
    assert abs(ours[1] - other[1]) <= max(0.03 * ours[1], 0.3)


@cuda.jit
def work(x, rounds):
    """As long as it is told to, in registers."""
    i = cuda.grid(1)
    y = x[i]
    for _ in range(rounds):
        y = y * np.float32(0.5) + np.float32(1.0)
    x[i] = y


def worked(gpu, rounds):
    """The row of `work`."""
    x = gpu.torch.zeros(132 * 256, device="cuda")
    view = cuda.as_cuda_array(x)

    def call():
        work[132, 256, harness.stream()](view, rounds)

    def right():
        call()
        return bool((x == 2).all())  # where the iteration settles

    row = harness.measured({"operator": "work", "variant": "work"}, gpu, right, call, gpu.time)
    return {**row, "host_us": ""}  # the host's time is no subject here


def test_a_kernel_slowed_by_10_percent_is_caught_and_a_repetition_is_not(merging, tmp_path):
    fields = ("operator", "variant", "right", *harness.TIMES, "repeats", "note", *harness.MACHINE)
    for name, rounds in (("old", ROUNDS), ("again", ROUNDS), ("slow", ROUNDS * 11 // 10)):
        row = worked(merging, rounds)
        assert row["right"], row
        tables.write_rows(tmp_path / name / "work.csv", [row], fields)
    code, out = compare(tmp_path / "old", tmp_path / "again")
    assert code == 0, out
    code, out = compare(tmp_path / "old", tmp_path / "slow")
    assert code == 1 and "3 slower" in out, out  # alone, in a graph, sustained


def test_times_grow_with_the_work(merging):
    one, two = (worked(merging, rounds) for rounds in (ROUNDS, 2 * ROUNDS))
    for name in ("microseconds", "graph_us", "sustained_us"):
        assert float(two[name]) == pytest.approx(2 * float(one[name]), rel=0.1), name


def test_sustained_clock_and_power_are_those_of_a_busy_gpu(merging):
    row = worked(merging, ROUNDS)
    assert 0 < float(row["sustained_mhz"]) < 5000 and 10 < float(row["sustained_w"]) < 2000


@cuda.jit
def first_largest(logits, tokens):
    """A thread a row."""
    b, i = cuda.blockIdx.x, cuda.threadIdx.x
    best = 0
    for v in range(logits.shape[2]):
        if logits[b, i, v] > logits[b, i, best]:
            best = v
    tokens[b, i] = best


def test_a_kernel_of_ones_own_is_measured_and_drawn_with_one_call(merging, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")

    def argmax(logits, *, out):
        first_largest[logits.shape[0], logits.shape[1], harness.stream()](*map(cuda.as_cuda_array, (logits, out)))
        return out

    monkeypatch.setattr(bench_accept, "ARGMAX", (((200, 65, 1000), "float32"),))
    rows = {row["variant"]: row for row in tables.read_rows(harness.against("argmax_tokens", "mine", argmax, tmp_path))}
    assert rows["mine"]["right"] == "True" and all(rows["mine"][name] for name in harness.TIMES)
    assert float(rows["mine"]["microseconds"]) > float(rows["argmax_tokens"]["microseconds"])
    assert {file.suffix for file in tmp_path.iterdir()} == {".csv", ".svg", ".png"}


def test_float32_products_that_use_tf32_would_be_refused():
    torch = pytest.importorskip("torch")
    pytest.importorskip("pynvml")
    gpu = bench_ceilings.Gpu("abc", 3, 0)
    a, b = gpu.matrix("float32", 0), gpu.matrix("float32", 1)
    exact = gpu.multiply(a, b, torch.empty_like(a))
    assert gpu.error(a, b, exact) <= bench_ceilings.BOUNDS["float32"]
    rounded = (x.view(torch.int32).bitwise_and(-(1 << 13)).view(torch.float32) for x in (a, b))  # TF32 has 10 bits
    assert gpu.error(a, b, gpu.multiply(*rounded, exact)) > bench_ceilings.BOUNDS["float32"]
