"""The simulator's threads: barriers, what threads bring together, shared memory, errors, and races that show."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numba import cuda, float32, int32

from ddtree_numba.device.runtime import SIMULATOR

if not SIMULATOR:
    pytest.skip("kernels run on a GPU here", allow_module_level=True)

from numba.cuda.simulator import kernel as numba_kernel

from ddtree_numba.device import simulator
from ddtree_numba.device.arrays import SimulatedArray

THREADS = 8


def run(kernel, *arrays: np.ndarray, blocks=(1, 1, 1), threads: int = THREADS, shared_bytes: int = 0) -> None:
    simulator.run(kernel, blocks, threads, shared_bytes, tuple(map(SimulatedArray, arrays)))


@cuda.jit
def rotate(x, out):
    row = cuda.shared.array(THREADS, float32)
    t = cuda.threadIdx.x
    row[t] = x[cuda.blockIdx.y, t]
    cuda.syncthreads()
    out[cuda.blockIdx.y, t] = row[(t + 1) % THREADS] + cuda.blockDim.x * cuda.gridDim.y


@cuda.jit
def counts(x, out):
    t = cuda.threadIdx.x
    out[0, t] = cuda.syncthreads_count(x[t])
    out[1, t] = cuda.syncthreads_and(x[t])
    out[2, t] = cuda.syncthreads_or(x[t])


@cuda.jit
def some_end_early(out):
    t = cuda.threadIdx.x
    if t % 2 == 0:
        out[t] = 1
        return
    cuda.syncthreads()
    out[t] = out[t - 1] + cuda.laneid


@cuda.jit
def fails_behind_a_barrier(out):
    cuda.syncthreads()
    out[cuda.threadIdx.x + 5] = 1


@cuda.jit(device=True)
def add_one(x, t):
    cuda.syncthreads()
    cuda.atomic.add(x, 0, 1)
    return t


@cuda.jit
def dynamic_and_atomic(out):
    row = cuda.shared.array(0, int32)
    t = cuda.threadIdx.x
    row[add_one(out, t)] = t
    cuda.syncthreads()
    out[1 + t] = row[THREADS - 1 - t]


def test_threads_of_all_blocks_meet_at_barriers():
    x = np.arange(3 * THREADS, dtype=np.float32).reshape(3, THREADS)
    out = np.zeros_like(x)
    run(rotate, x, out, blocks=(1, 3, 1))
    np.testing.assert_array_equal(out, np.roll(x, -1, axis=1) + 3 * THREADS)


@pytest.mark.parametrize("true", [(), (3,), range(THREADS)], ids=["none", "one", "all"])
def test_votes_of_a_block(true):
    x, out = np.zeros(THREADS, np.int32), np.zeros((3, THREADS), np.int32)
    x[list(true)] = 5
    run(counts, x, out)
    wanted = [len(true), len(true) == THREADS, len(true) > 0]
    np.testing.assert_array_equal(out, np.repeat(np.array(wanted, np.int32)[:, None], THREADS, axis=1))


def test_threads_that_have_ended_are_not_waited_for():
    out = np.zeros(THREADS, np.int32)
    run(some_end_early, out)
    assert out.tolist() == [1, 2, 1, 4, 1, 6, 1, 8]


def test_dynamic_shared_memory_atomics_and_barriers_in_device_functions():
    out = np.zeros(1 + THREADS, np.int32)
    run(dynamic_and_atomic, out, shared_bytes=4 * THREADS)
    assert out.tolist() == [THREADS, *reversed(range(THREADS))]


def test_an_error_says_which_thread_and_the_next_kernel_runs():
    out = np.zeros(THREADS, np.int32)
    with pytest.raises(IndexError, match=r"thread \(3, 0, 0\) of block \(0, 0, 0\): "):
        run(fails_behind_a_barrier, out)
    test_dynamic_shared_memory_atomics_and_barriers_in_device_functions()
    assert fails_behind_a_barrier.py_func.__globals__["cuda"] is cuda


def test_callers_on_several_python_threads_wait_for_each_other():
    outs = [np.zeros(1 + THREADS, np.int32) for _ in range(4)]
    callers = [
        threading.Thread(target=run, args=(dynamic_and_atomic, out), kwargs={"shared_bytes": 4 * THREADS})
        for out in outs
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(out.tolist() == [THREADS, *reversed(range(THREADS))] for out in outs)


@cuda.jit
def without_a_barrier(out, late):
    row = cuda.shared.array(THREADS, float32)
    t = cuda.threadIdx.x
    row[t] = 0
    cuda.syncthreads()
    if t == late[0]:
        simulator.let_others_go_first()
    row[t] = 1 + t
    out[t] = row[(t + 1) % THREADS]


def test_a_thread_may_let_the_others_go_first():
    out, late = np.zeros(THREADS, np.float32), np.zeros(1, np.int32)
    late[0] = -1
    run(without_a_barrier, out, late)
    assert out.tolist() == [0] * (THREADS - 1) + [1], "each is ahead of the next"
    late[0] = 3
    run(without_a_barrier, out, late)
    assert out[3] == 5 and out[2] == 0


def test_other_kernels_run_as_numba_runs_them():
    plain = numba_kernel.BlockManager
    assert plain is not simulator.Block
    x = np.arange(THREADS, dtype=np.float32)[None]
    out = np.zeros_like(x)
    rotate[1, THREADS](x, out)
    np.testing.assert_array_equal(out, np.roll(x, -1, axis=1) + THREADS)
    run(rotate, x, out)
    assert numba_kernel.BlockManager is plain
