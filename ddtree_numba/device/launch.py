"""Launching kernels: the caller's stream, shared memory above 48 KB, or the simulator.

Numba's internals are used here and, for the simulator, in arrays.py and simulator.py: another version means changes
there.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.device import runtime
from ddtree_numba.device.arrays import HOST, View, kernel_dtype, view

if runtime.SIMULATOR:
    from ddtree_numba.device import simulator
    from ddtree_numba.device.arrays import SimulatedArray

# The simulator has no limit of its own; it takes that of compute capability 9.0, so that both refuse alike. So do the
# mirrors where there is neither.
SIMULATED_SHARED_BYTES = 227 * 1024
SIMULATED_MULTIPROCESSORS = 3
SIMULATED_NAME = "the simulator (as compute capability 9.0)"


def device_name(device: int) -> str:
    """Name of a GPU, for messages; -1 means the current one."""
    if not runtime.has_gpu():
        return SIMULATED_NAME
    gpu = cuda.get_current_device() if device == HOST else cuda.gpus[device]
    name = gpu.name
    return name.decode() if isinstance(name, bytes) else str(name)


def shared_bytes_limit(device: int) -> int:
    """Most bytes of shared memory that one block may have on a GPU; -1 means the current one."""
    if not runtime.has_gpu():
        return SIMULATED_SHARED_BYTES
    gpu = cuda.get_current_device() if device == HOST else cuda.gpus[device]
    return int(gpu.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def multiprocessors(device: int) -> int:
    """How many a GPU has; -1 means the current one."""
    if not runtime.has_gpu():
        return SIMULATED_MULTIPROCESSORS
    gpu = cuda.get_current_device() if device == HOST else cuda.gpus[device]
    return int(gpu.MULTIPROCESSOR_COUNT)


def compute_capability(device: int) -> tuple[int, int]:
    """Of a GPU; -1 means the current one."""
    if not runtime.has_gpu():
        return 9, 0
    major, minor = (cuda.get_current_device() if device == HOST else cuda.gpus[device]).compute_capability
    return int(major), int(minor)


def jit(*, launch_bounds: tuple[int, int]) -> Any:
    """``cuda.jit`` with a cap on registers: threads a block, and blocks that must fit a multiprocessor.

    The simulator has no registers and does not know the option.
    """
    return cuda.jit if runtime.SIMULATOR else cuda.jit(launch_bounds=launch_bounds)


def launch(
    kernel: Any, blocks: tuple[int, int, int], threads: int, args: tuple[Any, ...], *, results: int, shared_bytes: int
) -> None:
    """Start a kernel on the caller's current stream; for device arrays this returns before it has run.

    Parameters
    ----------
    kernel : dispatcher
        A function under ``@cuda.jit``; compiled for these arguments on first use.
    blocks : tuple of int
        Grid (x, y, z).
    threads : int
        Threads a block.
    args : tuple of View, numpy.int32, numpy.float32 and tuples of int
        The place and kind of the first View decide device and stream. A tuple arrives as one of int64.
    results : int
        How many of the last arguments are written to. Host arrays are copied to the device, and these copied back.
    shared_bytes : int
        Dynamic shared memory of a block, in bytes.

    Raises
    ------
    RuntimeError
        There is no usable GPU and the simulator is off.
    """
    runtime.require_backend()
    device = first_view(args).device
    if runtime.SIMULATOR:
        _simulate(kernel, blocks, threads, args, shared_bytes)
    elif device == HOST:
        on_device = tuple(copy_in(a) if isinstance(a, View) else a for a in args)
        _launch(kernel, blocks, threads, on_device, shared_bytes)
        for home, copy in zip(args[-results:], on_device[-results:], strict=True):
            copy_out(home, copy)
    elif device == cuda.get_current_device().id:
        _launch(kernel, blocks, threads, args, shared_bytes)
    else:
        with cuda.gpus[device]:
            _launch(kernel, blocks, threads, args, shared_bytes)


def first_view(args: tuple[Any, ...]) -> View:
    """The argument whose place and kind decide device and stream."""
    return next(a for a in args if isinstance(a, View))


def copy_in(x: View) -> View:
    """A host array on the device, in C order."""
    return view(x.name, cuda.to_device(np.ascontiguousarray(x.as_numpy()).reshape(x.shape)))


def copy_out(home: View, copy: View) -> None:
    """What kernels made of `copy_in` back to the host array (synchronizes)."""
    np.copyto(home.as_numpy(), copy.owner.copy_to_host())


def _launch(kernel: Any, blocks: tuple[int, int, int], threads: int, args: tuple[Any, ...], shared_bytes: int) -> None:
    from cuda.core import LaunchConfig
    from cuda.core import launch as core_launch

    where = first_view(args)
    function = _compiled(kernel, where.device, type_keys(args))
    # What Numba's own launch would prepare from its device arrays, made from the views, which is much faster.
    words: list[Any] = []
    for a in args:
        if isinstance(a, View):
            words += [0, 0, math.prod(a.shape), a.dtype.itemsize, a.pointer, *a.shape, *a.strides]
        elif isinstance(a, tuple):
            words += a
        else:
            words.append(ctypes.c_float(float(a)) if isinstance(a, np.float32) else ctypes.c_int32(int(a)))
    config = LaunchConfig(grid=blocks, block=threads, shmem_size=shared_bytes)
    core_launch(_caller_stream(where.kind, where.device), config, function.kernel, *words)


def _caller_stream(kind: str, device: int) -> Any:
    """The stream that the caller's library works on now: PyTorch's, CuPy's, or Numba's default stream."""
    from cuda.core import Stream

    pointer = 0
    if kind == "torch":
        pointer = sys.modules["torch"].cuda.current_stream(device).cuda_stream
    elif kind == "cupy":
        pointer = sys.modules["cupy"].cuda.get_current_stream().ptr
    return Stream.from_handle(pointer)


def type_keys(args: tuple[Any, ...]) -> tuple[tuple[np.dtype[Any], int, str], ...]:
    """What a kernel is compiled for, argument by argument: dtype, rank (0: a scalar), layout ("C" order or "A" any).

    Of a tuple: int64, how many, "tuple".
    """
    keys = []
    for a in args:
        if isinstance(a, View):
            keys.append((kernel_dtype(a.dtype), len(a.shape), "C" if a.in_c_order else "A"))
        elif isinstance(a, tuple):
            keys.append((np.dtype(np.int64), len(a), "tuple"))
        else:
            keys.append((a.dtype, 0, ""))
    return tuple(keys)


def signature(keys: tuple[tuple[np.dtype[Any], int, str], ...]) -> tuple[Any, ...]:
    """Numba's types for `type_keys`."""
    found: list[Any] = []
    for dtype, rank, layout in keys:
        scalar = getattr(types, dtype.name)
        if layout == "tuple":
            found.append(types.UniTuple(scalar, rank))
        else:
            found.append(types.Array(scalar, rank, layout) if rank else scalar)
    return tuple(found)


@functools.cache
def _compiled(kernel: Any, device: int, keys: tuple[tuple[np.dtype[Any], int, str], ...]) -> Any:
    """The kernel's function on a device for arguments of these types, compiled on first use.

    A block gets more than 48 KB of shared memory only after a kernel attribute has been raised (CUDA C++ Programming
    Guide, "Shared Memory", compute capability 7.x and later). It is a cap, so it is raised once, to what the device's
    limit leaves beside the kernel's own, statically sized arrays.
    """
    from cuda.bindings import driver

    function = kernel.compile(signature(keys))._codelibrary.get_cufunc()
    attributes = driver.CUfunction_attribute
    attribute = attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    status, static = driver.cuKernelGetAttribute(attribute, function.handle, device)
    if status == driver.CUresult.CUDA_SUCCESS:
        attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        cap = shared_bytes_limit(device) - static
        (status,) = driver.cuKernelSetAttribute(attribute, cap, function.handle, device)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver refused shared memory above 48 KB a block ({status.name})")
    return function


def _simulate(
    kernel: Any, blocks: tuple[int, int, int], threads: int, args: tuple[Any, ...], shared_bytes: int
) -> None:
    simulated = tuple(SimulatedArray(a.as_numpy()) if isinstance(a, View) else a for a in args)
    simulator.run(kernel, blocks, threads, shared_bytes, simulated)
