"""profiling/trace_wgmma.py and the places of wgmma's clocks, without a GPU: clocks here are made up."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ddtree_numba.attention import clocks

ROOT = Path(__file__).resolve().parent.parent
PROFILING = ROOT / "profiling"
sys.path.insert(0, str(PROFILING))

import compare  # noqa: E402
import trace_wgmma  # noqa: E402

BLOCKS, CYCLE = 7, 0.55  # nanoseconds
PAIR = 4000  # cycles


# The places


def places() -> dict[int, list[str]]:
    """The clock's calls in the source of the kernel: of each warpgroup the names of its places, from top to bottom."""
    source = (ROOT / "ddtree_numba" / "attention" / "wgmma.py").read_text(encoding="utf-8")
    calls = [x for x in ast.walk(ast.parse(source)) if isinstance(x, ast.Call) and ast.unparse(x.func) == "clock"]
    found: dict[int, list[str]] = {}
    for call in sorted(calls, key=lambda call: call.lineno):
        *given, warpgroup, event = map(ast.unparse, call.args)
        assert given == ["clocks", "n", "j"]
        found.setdefault(int(warpgroup), []).append(event)
    return found


def test_the_kernel_looks_at_its_clocks_at_every_place_that_has_a_name_in_their_order():
    for warpgroup, names in enumerate(clocks.NAMES):
        assert list(dict.fromkeys(places()[warpgroup])) == list(names)
        assert [getattr(clocks, name) for name in names] == list(range(len(names)))
        assert len(names) <= clocks.EVENTS


def test_one_mask_tells_the_pairs_that_are_kept():
    assert [pair & -clocks.PAIRS == 0 for pair in range(40)] == [pair < clocks.PAIRS for pair in range(40)]
    assert max(trace_wgmma.TRACED) < clocks.PAIRS


def test_there_is_memory_for_all_that_the_kernel_writes():
    assert clocks.words(BLOCKS) == BLOCKS * passed(0).size * clocks.WORDS


# What is made of the clocks


def passed(block: int) -> np.ndarray:
    """Cycles [warpgroup, pair, event] of a block; 0 where there is no such place."""
    found = np.zeros((2, clocks.PAIRS, clocks.EVENTS), np.int64)
    for warpgroup, names in enumerate(clocks.NAMES):
        for pair in range(clocks.PAIRS):
            found[warpgroup, pair, : len(names)] = 10**9 * (block + 1) + PAIR * pair + 200 * np.arange(len(names))
        found[warpgroup, :, : len(names)] += 30 * warpgroup
    return found


def made_up(tick: int = 1) -> np.ndarray:
    """The clocks, whose timer moves on by so many nanoseconds at a time."""
    found = np.stack([passed(block) for block in range(BLOCKS)])
    times = np.where(found > 0, (5e6 + (found % 10**9) * CYCLE).astype(np.int64) // tick * tick, 0)
    return np.stack([found, times], axis=-1).reshape(-1)


@pytest.mark.parametrize("tick", [1, 32, 1024])
def test_times_are_cycles_of_the_length_that_the_timer_says(tick):
    found = trace_wgmma.clocks_of(made_up(tick))
    assert trace_wgmma.cycle_of(found) == pytest.approx(CYCLE, rel=0.02)
    rows = trace_wgmma.events_of(found, 5, range(2, 10))
    assert len(rows) == 8 * sum(map(len, clocks.NAMES))
    assert rows[0] | {"warpgroup": 0, "pair": 2, "event": "SCORES_A", "ns": "0.0", "cycles": 0} == rows[0]
    last = next(row for row in rows if (row["pair"], row["event"]) == (9, "PV_B_RIGHT_DONE"))
    assert last["warpgroup"] == 1 and last["cycles"] == 7 * PAIR + 6 * 200 + 30
    assert float(last["ns"]) == pytest.approx(last["cycles"] * CYCLE, rel=0.02)
    assert abs(last["timer_ns"] - last["cycles"] * CYCLE) <= tick + 1
    assert all(row.keys() <= set(trace_wgmma.FIELDS) and trace_wgmma.line(row | {"right": True}) for row in rows)


def test_places_that_were_not_passed_or_in_another_order_are_no_trace():
    found = trace_wgmma.clocks_of(made_up())
    left_out = found.copy()
    left_out[5, 1, 9, clocks.P_A_THERE] = 0
    with pytest.raises(RuntimeError, match="has not passed all places of pairs 2 to 9"):
        trace_wgmma.events_of(left_out, 5, range(2, 10))
    assert trace_wgmma.events_of(left_out, 5, range(2, 9)) and trace_wgmma.events_of(left_out, 4, range(2, 10))
    swapped = found.copy()
    swapped[5, 0, 3, :2] = found[5, 0, 3, 1::-1]
    with pytest.raises(RuntimeError, match="warpgroup 0 of block 5 has passed places in another order"):
        trace_wgmma.events_of(swapped, 5, range(2, 10))


def test_a_timer_that_stands_still_is_no_measure_of_cycles():
    found = trace_wgmma.clocks_of(made_up(10**9))
    found[..., clocks.NANOSECONDS] = 5
    with pytest.raises(RuntimeError, match="a cycle would be 0.0 ns"):
        trace_wgmma.events_of(found, 5, range(2, 10))


def test_a_trace_is_compared_by_its_places_alone():
    measured = {"ns", "cycles", "timer_ns", "kernel_mhz", "call_us", "clocked_call_us", "right", "note"}
    named = set(trace_wgmma.FIELDS) - measured - set(trace_wgmma.MACHINE)
    assert not named & compare.MEASURED and measured | set(trace_wgmma.MACHINE) <= compare.MEASURED


class Gpu:
    """Stands in for trace_wgmma.Gpu; its memory of clocks is filled by whoever calls between `zero_` and the end."""

    def __init__(self, differs_from_call: int = 10**6):
        self.calls, self.differs, self.memory = 0, differs_from_call, None
        self.out = np.zeros(4)

    def inputs(self, case):
        assert case.shape == (1, 64, 17, 32768) and (case.dtype, case.page_size) == ("bfloat16", 64)
        return {}

    def results(self, inputs):
        return {"out": Cloned(self.out), "lse": Cloned(self.out[:2])}

    def call(self):
        self.out[:] = 2.0 if self.calls >= self.differs else 1.0
        self.calls += 1
        if self.memory is not None:
            self.memory = made_up()

    def alone(self, call):
        call()
        return 100.0 + 0.5 * (self.memory is not None), 0.1

    @contextmanager
    def clocked(self, _):
        self.memory = np.zeros(0)
        yield self

    def zero_(self):
        self.memory = np.zeros(clocks.words(BLOCKS), np.int64)

    def to_host(self, _):
        return self.memory

    def same_bits(self, a, b):
        return a.tobytes() == b.tobytes()

    def machine(self):
        return {"gpu": "made up", "commit": "abc"}


class Cloned(np.ndarray):
    """An array with PyTorch's name for a copy."""

    def __new__(cls, x):
        return x.view(cls)

    def clone(self):
        return self.copy()


def rows_from(gpu, monkeypatch):
    monkeypatch.setattr(trace_wgmma, "of_wgmma", lambda *_, planned: SimpleNamespace(call=gpu.call, arrays=()))
    monkeypatch.setattr(trace_wgmma, "clocked_kernel", gpu.clocked)
    monkeypatch.setattr(trace_wgmma, "RUNS", 3)
    return list(trace_wgmma.trace_rows(gpu))


def test_the_last_call_is_the_one_that_is_traced(monkeypatch):
    rows = rows_from(Gpu(), monkeypatch)
    assert len(rows) == 8 * sum(map(len, clocks.NAMES)) and all(row["right"] for row in rows)
    assert {(row["block"], row["call_us"], row["clocked_call_us"], row["gpu"]) for row in rows} == {
        (trace_wgmma.BLOCK, "100.0", "100.5", "made up")
    }
    assert all(row.keys() <= set(trace_wgmma.FIELDS) for row in rows)


@pytest.mark.parametrize("call", [2, 7], ids=["the first with clocks", "the one that is traced"])
def test_a_kernel_whose_results_change_with_clocks_in_it_is_not_traced(call, monkeypatch):
    (row,) = rows_from(Gpu(differs_from_call=call), monkeypatch)
    assert row["right"] is False and "ns" not in row and trace_wgmma.line(row).endswith("WRONG")


# The kernel with clocks takes the place of the other one

SWAP = """
import sys
from types import SimpleNamespace
from unittest import mock
import numpy as np
import trace_wgmma
from ddtree_numba.attention import clocks, remembered, wgmma, wgmma_host
from ddtree_numba.device.arrays import View

torch = SimpleNamespace(cuda=SimpleNamespace(current_device=lambda: 0), int64=np.int64,
                        zeros=lambda n, dtype, device: np.zeros(n, dtype))
gpu = SimpleNamespace(torch=torch, place="cuda")
calls = []
usual = lambda kernel, blocks, threads, args, **how: calls.append((kernel, args, how))
out = View("out", "numpy", -1, 0, (640,), (8,), np.dtype(np.int64), False, None)
plain = wgmma.make_kernel
remembered.keep("call", None)
with mock.patch.multiple(wgmma_host, launch=usual), mock.patch.object(trace_wgmma, "multiprocessors", lambda _: 10):
    with trace_wgmma.clocked_kernel(gpu) as memory:
        assert "call" not in remembered._young
        remembered.keep("call", None)
        kernel = wgmma.make_kernel("bf16", "bf16", False)
        wgmma_host.launch(kernel, (10, 1, 1), 384, (wgmma_host.NO_CLOCKS, np.int32(3), out), results=1)
    assert wgmma_host.launch is usual and wgmma.make_kernel is plain and "call" not in remembered._young
(started, args, how), = calls
assert started is kernel is plain("bf16", "bf16", False, clocked=True) and kernel is not plain("bf16", "bf16", False)
assert args == ((memory.ctypes.data,), 3, out) and memory.shape == (clocks.words(10),)
assert how == {"results": 1}
"""


def test_the_kernel_with_clocks_and_its_memory_are_there_for_the_trace_alone():
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": f"{ROOT}{os.pathsep}{PROFILING}"}
    done = subprocess.run([sys.executable, "-c", SWAP], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
