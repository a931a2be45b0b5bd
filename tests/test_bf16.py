"""Number formats: every bfloat16, and rounding to it, in kernels (simulated or not) and on NumPy arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numba import cuda

from ddtree_numba.device.arrays import view
from ddtree_numba.device.bf16 import (
    array_from_f32,
    array_to_f32,
    bf16_to_f32,
    f32_to_bf16,
    from_f32,
    to_f32,
)
from ddtree_numba.device.launch import launch
from ddtree_numba.device.runtime import SIMULATOR

# Overflow to infinity and NaN are among what is tested; NumPy, and so the simulator, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast")

EVERY = np.arange(2**16, dtype=np.uint16)
SOME = EVERY[:: 211 if SIMULATOR else 1]


@cuda.jit
def convert_kernel(x, out):
    k = cuda.threadIdx.x + 32 * cuda.blockIdx.x
    if k < x.size:
        out[k] = from_f32(to_f32(x[k]), out)


@cuda.jit
def widen_kernel(x, out):
    k = cuda.threadIdx.x + 32 * cuda.blockIdx.x
    if k < x.size:
        out[k] = bf16_to_f32(x[k])


@cuda.jit
def narrow_kernel(x, out):
    k = cuda.threadIdx.x + 32 * cuda.blockIdx.x
    if k < x.size:
        out[k] = f32_to_bf16(x[k])


def on_device(kernel, x, dtype):
    out = np.zeros(x.size, dtype)
    blocks = (-(-x.size // 32), 1, 1)
    launch(kernel, blocks, 32, (view("x", x), view("out", out)), results=1, shared_bytes=0)
    return out


def floats():
    """Every bfloat16 as float32, the halfway points above them, and the float32 neighbours of these."""
    bits = SOME.astype(np.uint32) << np.uint32(16)
    around = [bits + np.uint32(offset) for offset in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    return np.concatenate(around).view(np.float32)


def same(actual, expected):
    """The same floats: equal, or NaN on both sides; zeros with the same sign."""
    a, e = array_to_f32(actual), array_to_f32(expected)
    return bool(np.all((a == e) & (np.signbit(a) == np.signbit(e)) | (np.isnan(a) & np.isnan(e))))


def test_arrays_agree_with_ml_dtypes():
    every = array_to_f32(EVERY)
    assert same(every, EVERY.view(ml_dtypes.bfloat16).astype(np.float32))
    assert same(array_from_f32(every, np.dtype(np.uint16)), EVERY)
    assert array_from_f32(every[:9], np.dtype(np.float16)).dtype == np.float16


@pytest.mark.parametrize("kernel", [widen_kernel, convert_kernel], ids=["bf16_to_f32", "to_f32"])
def test_widening_is_exact(kernel):
    assert same(on_device(kernel, SOME, np.float32), array_to_f32(SOME))


@pytest.mark.parametrize("kernel", [narrow_kernel, convert_kernel], ids=["f32_to_bf16", "from_f32"])
def test_narrowing_rounds_to_nearest_even(kernel):
    x = floats()
    assert same(on_device(kernel, x, np.uint16), array_from_f32(x, np.dtype(np.uint16)))


def test_float16_both_ways():
    halves = SOME.view(np.float16)
    assert same(on_device(convert_kernel, halves, np.float32), halves.astype(np.float32))
    x = floats()
    assert same(on_device(convert_kernel, x, np.float16), x.astype(np.float16))
