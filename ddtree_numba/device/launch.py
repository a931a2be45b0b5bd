"""Launching kernels: the caller's stream, shared memory above 48 KB, or the simulator.

On a GPU a launch is prepared (`prepare`), which makes all that the driver needs to know, and started (`start`) on a
stream, as often as one likes.

Numba's internals are used here and, for the simulator, in arrays.py and simulator.py: another version means changes
there.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.device import recording, runtime
from ddtree_numba.device.arrays import HOST, View, kernel_dtype, view

if runtime.SIMULATOR:
    from ddtree_numba.device import simulator
    from ddtree_numba.device.arrays import SimulatedArray
else:
    from cuda.bindings import driver

# The simulator has no limit of its own; it takes that of compute capability 9.0, so that both refuse alike. So do the
# mirrors where there is neither.
SIMULATED_SHARED_BYTES = 227 * 1024
SIMULATED_MULTIPROCESSORS = 3
SIMULATED_NAME = "the simulator (as compute capability 9.0)"
MOST_STREAMS = 64  # that a prepared launch keeps a configuration for


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
    kernel: Any,
    blocks: tuple[int, int, int],
    threads: int,
    args: tuple[Any, ...],
    *,
    results: int,
    shared_bytes: int,
    overlap: bool = False,
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
    overlap : bool
        Blocks may start before the kernel ahead on the stream has ended (programmatic dependent launch): for kernels
        that execute griddepcontrol.wait before they touch anything that others write.

    Raises
    ------
    RuntimeError
        There is no usable GPU and the simulator is off, or the driver refuses the launch.
    """
    runtime.require_backend()
    device = first_view(args).device
    made: Launch | None = None
    if runtime.SIMULATOR:
        _simulate(kernel, blocks, threads, args, shared_bytes)
    elif device == HOST:
        on_device = tuple(copy_in(a) if isinstance(a, View) else a for a in args)
        _launch(kernel, blocks, threads, on_device, shared_bytes, overlap)
        for home, copy in zip(args[-results:], on_device[-results:], strict=True):
            copy_out(home, copy)
    elif device == cuda.get_current_device().id:
        made = _launch(kernel, blocks, threads, args, shared_bytes, overlap)
    else:
        with cuda.gpus[device]:
            _launch(kernel, blocks, threads, args, shared_bytes, overlap)
    if (noted := recording.current()) is not None:
        noted.launches.append(made)


def first_view(args: tuple[Any, ...]) -> View:
    """The argument whose place and kind decide device and stream."""
    return next(a for a in args if isinstance(a, View))


def copy_in(x: View) -> View:
    """A host array on the device, in C order."""
    return view(x.name, cuda.to_device(np.ascontiguousarray(x.as_numpy()).reshape(x.shape)))


def copy_out(home: View, copy: View) -> None:
    """What kernels made of `copy_in` back to the host array (synchronizes)."""
    np.copyto(home.as_numpy(), copy.owner.copy_to_host())


@dataclass(frozen=True, eq=False)
class Launch:
    """All that the driver needs to know of a launch but the stream.

    Attributes
    ----------
    function : CUfunction
    blocks : tuple of int
        Grid (x, y, z).
    threads : int
        Threads a block.
    shared_bytes : int
        Dynamic shared memory of a block.
    overlap : bool
        See `launch`.
    kind, device
        Of the first view, which decide the stream.
    values : ctypes array of uint64
        The parameters, one a word: the driver reads the first bytes of each, as many as the kernel declares.
    pointers : ctypes array of uint64
        The address of each value.
    configs : dict
        What the driver is told, by stream. A configuration never changes, since threads share it.
    """

    function: Any
    blocks: tuple[int, int, int]
    threads: int
    shared_bytes: int
    overlap: bool
    kind: str
    device: int
    values: Any
    pointers: Any
    configs: dict[int, Any] = field(default_factory=dict)


def prepare(
    kernel: Any,
    blocks: tuple[int, int, int],
    threads: int,
    args: tuple[Any, ...],
    shared_bytes: int,
    overlap: bool = False,
) -> Launch:
    """A launch of a kernel with these arguments, which lie on the current device; nothing starts."""
    where = first_view(args)
    kernel_object = _compiled(kernel, where.device, type_keys(args))
    # What Numba's own launch would prepare from its device arrays, made from the views, which is much faster.
    words: list[int] = []
    for a in args:
        if isinstance(a, View):
            words += [0, 0, math.prod(a.shape), a.dtype.itemsize, a.pointer, *a.shape, *a.strides]
        elif isinstance(a, tuple):
            words += a
        else:
            # Four bytes, which stand first in a word of a little-endian machine.
            words.append(int(a.view(np.uint32)) if isinstance(a, np.float32) else int(a))
    values = (ctypes.c_uint64 * len(words))(*words)
    first = ctypes.addressof(values)
    pointers = (ctypes.c_uint64 * len(words))(*range(first, first + 8 * len(words), 8))
    # The driver takes a CUkernel, which has a function in every context, in place of a CUfunction.
    function = driver.CUfunction(int(kernel_object.handle))
    return Launch(function, blocks, threads, shared_bytes, overlap, where.kind, where.device, values, pointers)


def start(made: Launch, stream: int) -> None:
    """Start a prepared launch on a stream of its device.

    Raises
    ------
    RuntimeError
        The driver refuses it.
    """
    config = made.configs.get(stream)
    if config is None:
        config = _config(made, stream)
        if len(made.configs) >= MOST_STREAMS:
            made.configs.clear()
        made.configs[stream] = config
    (status,) = driver.cuLaunchKernelEx(config, made.function, ctypes.addressof(made.pointers), 0)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"the driver refused to launch a kernel of {made.blocks} blocks, {made.threads} threads and "
            f"{made.shared_bytes} bytes of shared memory ({status.name})"
        )


def _config(made: Launch, stream: int) -> Any:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = made.blocks
    config.blockDimX, config.blockDimY, config.blockDimZ = made.threads, 1, 1
    config.sharedMemBytes = made.shared_bytes
    config.hStream = driver.CUstream(stream)
    config.numAttrs = 0
    if made.overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


def _launch(*what: Any) -> Launch:
    """`prepare`, and `start` on the caller's current stream."""
    made = prepare(*what)
    start(made, caller_stream(made.kind, made.device))
    return made


def current_device() -> int:
    """The GPU whose context this thread has; -1 where it has none yet."""
    status, device = driver.cuCtxGetDevice()
    return int(device) if status == driver.CUresult.CUDA_SUCCESS else HOST


def caller_stream(kind: str, device: int) -> int:
    """The stream that the caller's library works on now: PyTorch's, CuPy's, or Numba's default stream."""
    if kind == "torch":
        torch = sys.modules["torch"]
        # What torch.cuda.current_stream makes an object of, which costs microseconds.
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        return int(raw(device) if raw else torch.cuda.current_stream(device).cuda_stream)
    if kind == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return 0


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
