"""The intrinsics of ptx.py, each against a definition written from the tables of the PTX ISA.

They run in the simulator, as twins, or on a GPU where there is one: the same tests, the same definitions.
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from ddtree_numba.device.arrays import view
from ddtree_numba.device.launch import launch
from ddtree_numba.device.ptx import (
    barrier_arrive,
    barrier_sync,
    commit_copies,
    copy_async,
    exp2_approx,
    load_matrices,
    load_matrices_transposed,
    multiply_tiles,
    pack_pair,
    scale_rows,
    store_tiles,
    wait_copies,
)
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.device.warp import shuffle_xor

# Where there is a GPU all of these run on it.
pytestmark = [] if SIMULATOR else [pytest.mark.gpu]
only_simulated = pytest.mark.skipif(not SIMULATOR, reason="a mistake that a GPU need not show")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [BFLOAT16, np.dtype(np.float16)]
LANES = 32


def run(kernel: Any, *arrays: np.ndarray, threads: int = LANES, shared_bytes: int = 8192, results: int = 1) -> None:
    """One block; the last arrays are the results."""
    views = tuple(view(f"x{n}", x) for n, x in enumerate(arrays))
    launch(kernel, (1, 1, 1), threads, views, results=results, shared_bytes=shared_bytes)


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# Asynchronous copies


@cuda.jit
def copies(x, sizes, out):
    shared = cuda.shared.array(0, types.uint32, alignment=16)
    t = cuda.threadIdx.x
    copy_async(shared, 4 * t, x[t], 8, sizes[t])
    commit_copies()
    copy_async(shared, 4 * (t + 32), x[31 - t], 16, np.int32(16))
    commit_copies()
    wait_copies(1)
    cuda.syncthreads()
    for n in range(4):
        out[0, t, n] = shared[4 * (31 - t) + n]
    wait_copies(0)
    cuda.syncthreads()
    for n in range(4):
        out[1, t, n] = shared[4 * (t + 32) + n]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_bring_sixteen_bytes_or_zeros(dtype):
    x = numbers(LANES, 24, dtype=dtype)
    sizes = np.where(np.arange(LANES) % 3 == 1, 0, 16).astype(np.int32)
    x[sizes == 0, 8:16] = np.nan  # what is not read must not come through
    out = np.zeros((2, LANES, 4), np.uint32)
    run(copies, x, sizes, out)
    first = np.where(sizes[:, None] == 16, x[:, 8:16].view(np.uint32), 0)
    np.testing.assert_array_equal(out[0], first[::-1])
    np.testing.assert_array_equal(out[1], x[::-1, 16:24].view(np.uint32))


@cuda.jit
def reads_early(x, out):
    shared = cuda.shared.array(0, types.uint32, alignment=16)
    t = cuda.threadIdx.x
    shared[4 * t] = 7
    cuda.syncthreads()
    copy_async(shared, 4 * t, x[t], 0, np.int32(16))
    commit_copies()
    out[0, t] = shared[4 * t]  # still under way: neither what was there nor what comes
    wait_copies(1)
    out[1, t] = shared[4 * t]
    wait_copies(0)
    out[2, t] = shared[4 * t]


@only_simulated
def test_the_twin_shows_copies_that_are_read_or_overwritten_too_early():
    x, out = numbers(LANES, 8, dtype=np.float16), np.zeros((3, LANES), np.uint32)
    run(reads_early, x, out)
    assert (out[:2] == 0xFFFFFFFF).all()
    np.testing.assert_array_equal(out[2], x[:, :2].view(np.uint32)[:, 0])


@cuda.jit
def copies_to_an_odd_place(x, out):
    shared = cuda.shared.array(0, types.uint32, alignment=16)
    copy_async(shared, 4 * cuda.threadIdx.x + 2, x[cuda.threadIdx.x], 0, np.int32(16))


@cuda.jit
def copies_from_an_odd_place(x, out):
    shared = cuda.shared.array(0, types.uint32, alignment=16)
    copy_async(shared, 4 * cuda.threadIdx.x, x[cuda.threadIdx.x], 4, np.int32(16))


@only_simulated
@pytest.mark.parametrize("kernel", [copies_to_an_odd_place, copies_from_an_odd_place])
def test_the_twin_refuses_copies_that_are_not_aligned(kernel):
    with pytest.raises(ValueError, match="not aligned to 16 bytes"):
        run(kernel, numbers(LANES, 16, dtype=np.float16), np.zeros(1, np.float32))


# Matrices

PITCH = 12  # words of a row: its places differ from those of a packed matrix


@cuda.jit
def loads(x, places, plain, transposed):
    shared = cuda.shared.array(0, types.uint32, alignment=16)
    words = cuda.local.array(8, types.uint32)
    t = cuda.threadIdx.x
    for n in range(PITCH):
        shared[t * PITCH + n] = x[t, n]
    cuda.syncthreads()
    load_matrices(shared, places[t], words, 0)
    load_matrices_transposed(shared, places[t], words, 4)
    for r in range(4):
        plain[t, r] = words[r]
        transposed[t, r] = words[4 + r]


def test_matrices_by_the_addresses_of_the_lanes():
    halves = np.arange(LANES * PITCH * 2, dtype=np.uint16).reshape(LANES, 2 * PITCH)
    rng = np.random.default_rng(1)
    rows, chunks = rng.permutation(LANES), rng.integers(0, 3, LANES)
    places = (rows * PITCH + 4 * chunks).astype(np.int32)
    plain, transposed = np.zeros((2, LANES, 4), np.uint32)
    run(loads, halves.view(np.uint32), places, plain, transposed, results=2)
    for lane, i in itertools.product(range(LANES), range(4)):
        # Row r of matrix i is where lane 8 i + r points.
        matrix = np.array([halves[rows[8 * i + r], 8 * chunks[8 * i + r] :][:8] for r in range(8)])
        row, column = lane // 4, 2 * (lane % 4)
        low, high = int(matrix[row, column]), int(matrix[row, column + 1])
        assert plain[lane, i] == low | high << 16
        low, high = int(matrix[column, row]), int(matrix[column + 1, row])
        assert transposed[lane, i] == low | high << 16


def elements_of_a(lane: int, i: int) -> tuple[int, int]:
    """Row and column of a_i: PTX ISA, m16n8k16, A of .f16 and .bf16."""
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    column = thread * 2 + (i & 1) if i < 4 else thread * 2 + (i & 1) + 8
    return row, column


def elements_of_b(lane: int, i: int) -> tuple[int, int]:
    """Row and column of b_i."""
    group, thread = lane >> 2, lane % 4
    return (thread * 2 + (i & 1) if i < 2 else thread * 2 + (i & 1) + 8), group


def elements_of_c(lane: int, i: int) -> tuple[int, int]:
    """Row and column of c_i and d_i."""
    group, thread = lane >> 2, lane % 4
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


@cuda.jit
def multiplies_one(a, b, c, like, d):
    t = cuda.threadIdx.x
    left = cuda.local.array(4, types.uint32)
    right = cuda.local.array(2, types.uint32)
    acc = cuda.local.array(4, types.float32)
    for r in range(4):
        left[r] = a[t, r]
        acc[r] = c[t, r]
    for r in range(2):
        right[r] = b[t, r]
    multiply_tiles(acc, left, right, 1, 1, like)
    for r in range(4):
        d[t, r] = acc[r]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_product_of_matrices(dtype):
    a, b, c = numbers(16, 16, dtype=dtype), numbers(16, 8, dtype=dtype, seed=1), numbers(16, 8, seed=2)
    lanes_a, lanes_b = np.zeros((LANES, 8), dtype), np.zeros((LANES, 4), dtype)
    lanes_c, lanes_d = np.zeros((2, LANES, 4), np.float32)
    for lane in range(LANES):
        lanes_a[lane] = [a[elements_of_a(lane, i)] for i in range(8)]
        lanes_b[lane] = [b[elements_of_b(lane, i)] for i in range(4)]
        lanes_c[lane] = [c[elements_of_c(lane, i)] for i in range(4)]
    run(multiplies_one, lanes_a.view(np.uint32), lanes_b.view(np.uint32), lanes_c, np.zeros(1, dtype), lanes_d)
    expected = c + a.astype(np.float64) @ b.astype(np.float64)
    for lane, i in itertools.product(range(LANES), range(4)):
        assert abs(lanes_d[lane, i] - expected[elements_of_c(lane, i)]) < 1e-5


@cuda.jit
def multiplies_many(x, y, factors, like, out):
    """out = diag(factors) (x y), x 32 x 48, y 48 x 16, by tiles of shared memory."""
    shared = cuda.shared.array(0, types.uint32, alignment=16)
    floats = cuda.shared.array(0, types.float32)
    left = cuda.local.array(8, types.uint32)
    right = cuda.local.array(4, types.uint32)
    acc = cuda.local.array(16, types.float32)
    f = cuda.local.array(4, types.float32)
    t = cuda.threadIdx.x
    for n in range(24):
        shared[t * 28 + n] = x[t, n]
    at_y = 32 * 28
    for r in range(2):
        if t + 32 * r < 48:
            for n in range(8):
                shared[at_y + (t + 32 * r) * 12 + n] = y[t + 32 * r, n]
    for n in range(16):
        acc[n] = np.float32(0.0)
    for n in range(4):
        f[n] = factors[t // 4 + 8 * n]
    cuda.syncthreads()
    for k in range(3):
        for i in range(2):
            load_matrices(shared, (t % 16 + 16 * i) * 28 + 8 * k + t // 16 * 4, left, 4 * i)
        load_matrices_transposed(shared, at_y + (t % 16 + 16 * k) * 12 + t // 16 * 4, right, 0)
        multiply_tiles(acc, left, right, 2, 2, like)
    scale_rows(acc, f, 2, 2)
    cuda.syncthreads()
    store_tiles(acc, 2, 2, floats, t // 4 * 18 + t % 4 * 2, 18)
    cuda.syncthreads()
    for n in range(16):
        out[t, n] = floats[t * 18 + n]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_tiles_scaled_and_stored(dtype):
    x, y, factors = numbers(32, 48, dtype=dtype), numbers(48, 16, dtype=dtype, seed=1), numbers(32, seed=2)
    out = np.zeros((32, 16), np.float32)
    run(multiplies_many, x.view(np.uint32), y.view(np.uint32), factors, np.zeros(1, dtype), out)
    expected = (x.astype(np.float64) @ y.astype(np.float64)) * factors[:, None]
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5)


@only_simulated
def test_accumulators_are_float32():
    one = np.ones((LANES, 8), np.float16).view(np.uint32)
    c, d = np.full((LANES, 4), 2.0**24, np.float32), np.zeros((LANES, 4), np.float32)
    c[0] = 2.0**28
    small = np.full((LANES, 4), 2.0**-4, np.float16).view(np.uint32)
    run(multiplies_one, one, small, c, np.zeros(1, np.float16), d)
    assert (d[0] == 2.0**28).all() and (d[1:] == 2.0**24).all()  # 1 more: half of the last place, to even


# Numbers


@cuda.jit
def powers(x, out):
    t = cuda.threadIdx.x
    out[t] = exp2_approx(x[t])


def test_powers_of_two():
    x = numbers(LANES) * np.float32(20)
    x[:6] = 0, -np.inf, np.nan, -200, 7, 127
    out = np.zeros(LANES, np.float32)
    run(powers, x, out)
    assert out[0] == 1 and out[1] == 0 and np.isnan(out[2]) and out[3] == 0 and out[4] == 128
    np.testing.assert_allclose(out[4:], np.exp2(x[4:].astype(np.float64)), rtol=3e-7)


@cuda.jit
def packs(x, like, out):
    t = cuda.threadIdx.x
    out[t] = pack_pair(x[t, 0], x[t, 1], like)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairs_are_rounded_to_nearest_even(dtype):
    x = numbers(LANES, 2) * np.float32(3)
    step = float(ml_dtypes.finfo(dtype).eps)
    x[0] = 1 + step / 2, 1 + 3 * step / 2  # ties: down to even, up to even
    x[1] = -1 - step / 2 - 2.0**-23, 0
    x[2] = np.inf, -np.inf
    out = np.zeros(LANES, np.uint32)
    run(packs, x, np.zeros(1, dtype), out)
    np.testing.assert_array_equal(out, x.astype(dtype).view(np.uint32)[:, 0])
    assert out.view(dtype)[:2].astype(float).tolist() == [1, 1 + 2 * step]


@cuda.jit
def quads(x, out):
    t = cuda.threadIdx.x
    total = x[t] + shuffle_xor(x[t], np.int32(1))
    out[t] = total + shuffle_xor(total, np.int32(2))


def test_sums_of_quads_in_several_warps():
    x, out = np.arange(96, dtype=np.float32), np.zeros(96, np.float32)
    run(quads, x, out, threads=96)
    np.testing.assert_array_equal(out, np.repeat(x.reshape(24, 4).sum(axis=1), 4))


@cuda.jit
def one_warp_alone(x, out):
    t = cuda.threadIdx.x
    if t >= 64:
        return
    if t >= 32:
        out[t] = shuffle_xor(shuffle_xor(x[t], np.int32(4)), np.int32(2))
    cuda.syncthreads()
    if t < 32:
        out[t] = out[t + 32]


def test_a_warp_does_not_wait_for_the_others():
    x, out = np.arange(96, dtype=np.float32), np.zeros(96, np.float32)
    run(one_warp_alone, x, out, threads=96)
    expected = 32 + (np.arange(LANES) ^ 6)
    np.testing.assert_array_equal(out, [*expected, *expected, *[0] * 32])


# Named barriers


@cuda.jit
def hands_over(out):
    """Warp 0 fills two rooms in turn, warp 1 reads them; warp 2 takes no part, and ends before."""
    room = cuda.shared.array(0, types.int32)
    t = cuda.threadIdx.x
    warp, lane = t // 32, t % 32
    if warp == 0:
        for n in range(6):
            if n >= 2:
                barrier_sync(3 + n % 2, 64)  # empty again
            room[n % 2 * 32 + lane] = 100 * n + lane
            barrier_arrive(1 + n % 2, 64)
    elif warp == 1:
        for n in range(6):
            barrier_sync(1 + n % 2, 64)
            out[n, lane] = room[n % 2 * 32 + 31 - lane]
            if n < 4:
                barrier_arrive(3 + n % 2, 64)


def test_named_barriers_hand_over_between_warps():
    out = np.zeros((6, LANES), np.int32)
    run(hands_over, out, threads=96)
    expected = 100 * np.arange(6)[:, None] + 31 - np.arange(LANES)
    np.testing.assert_array_equal(out, expected)


@cuda.jit
def waits_for_ever(out):
    barrier_sync(1, 64)
    out[0] = 1


@only_simulated
def test_a_barrier_that_never_fills_is_an_error():
    with pytest.raises(RuntimeError, match="wait for what never comes: 32 at"):
        run(waits_for_ever, np.zeros(1, np.float32))


@cuda.jit
def some_lanes_stay_away(x, out):
    shared = cuda.shared.array(0, types.uint32, alignment=16)
    words = cuda.local.array(4, types.uint32)
    if cuda.threadIdx.x < 20:
        load_matrices(shared, 0, words, 0)
    cuda.syncthreads()


@only_simulated
def test_lanes_that_stay_away_from_their_warp_are_an_error():
    with pytest.raises(RuntimeError, match=r"20 at \('warp', 0\)"):
        run(some_lanes_stay_away, np.zeros(1, np.float32), np.zeros(1, np.float32))
