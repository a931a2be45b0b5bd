"""Launching kernels: the caller's stream, shared memory above 48 KB, and the simulator's pace.

The one place that uses Numba's internals, so that another version of Numba means changes here alone.
"""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from typing import Any

from numba import cuda

from ddtree_numba.device import runtime
from ddtree_numba.device.arrays import HOST

# What a kernel gets without asking; beyond it a kernel attribute must be raised first (CUDA C++ Programming Guide,
# "Shared Memory", compute capability 7.x and later).
SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
# The simulator has no limit of its own; it takes that of compute capability 9.0, so that both refuse alike.
SIMULATED_SHARED_BYTES = 227 * 1024
SIMULATED_NAME = "the simulator (as compute capability 9.0)"

_simulator_lock = threading.Lock()
_shared_bytes_allowed: dict[tuple[int, int], int] = {}


def device_name(device: int) -> str:
    """Name of a GPU, for messages; -1 means the current one."""
    if runtime.SIMULATOR:
        return SIMULATED_NAME
    gpu = cuda.get_current_device() if device == HOST else cuda.gpus[device]
    name = gpu.name
    return name.decode() if isinstance(name, bytes) else str(name)


def shared_bytes_limit(device: int) -> int:
    """Most bytes of shared memory that one block may have on a GPU; -1 means the current one."""
    if runtime.SIMULATOR:
        return SIMULATED_SHARED_BYTES
    gpu = cuda.get_current_device() if device == HOST else cuda.gpus[device]
    return int(gpu.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def caller_stream(kind: str, device: int) -> Any:
    """The stream that the caller's library works on now: PyTorch's, CuPy's, or Numba's default stream."""
    pointer = 0
    if kind == "torch":
        pointer = sys.modules["torch"].cuda.current_stream(device).cuda_stream
    elif kind == "cupy":
        pointer = sys.modules["cupy"].cuda.get_current_stream().ptr
    return cuda.external_stream(pointer) if pointer else 0


def launch(
    kernel: Any, blocks: tuple[int, int, int], threads: int, args: tuple[Any, ...], *, kind: str, device: int, shared_bytes: int
) -> None:
    """Start a kernel on the caller's stream; returns before it has run.

    Parameters
    ----------
    kernel : dispatcher
        A function under ``@cuda.jit``; compiled for these arguments on first use.
    blocks : tuple of int
        Grid (x, y, z).
    threads : int
        Threads a block.
    args : tuple
        Numba arrays and NumPy scalars.
    kind, device
        Of the caller's arrays, as in `View`.
    shared_bytes : int
        Dynamic shared memory of a block, in bytes.
    """
    runtime.require_backend()
    if runtime.SIMULATOR:
        _simulate(kernel, blocks, threads, args, shared_bytes)
        return
    with nullcontext() if device == HOST else cuda.gpus[device]:
        compiled = kernel.compile(tuple(kernel.typeof_pyval(a) for a in args))
        if shared_bytes > SHARED_BYTES_WITHOUT_ASKING:
            _allow_shared_bytes(compiled, shared_bytes)
        stream = cuda.cudadrv.driver._to_core_stream(caller_stream(kind, device))
        compiled.launch(args, blocks, (threads, 1, 1), stream, shared_bytes)


def _allow_shared_bytes(compiled: Any, shared_bytes: int) -> None:
    from cuda.bindings import driver

    function = compiled._codelibrary.get_cufunc()
    key = (int(function.handle), function.device.id)
    if _shared_bytes_allowed.get(key, 0) >= shared_bytes:
        return
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, function.handle, function.device.id)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver refused {shared_bytes} bytes of shared memory a block ({status.name})")
    _shared_bytes_allowed[key] = shared_bytes


def _simulate(kernel: Any, blocks: tuple[int, int, int], threads: int, args: tuple[Any, ...], shared_bytes: int) -> None:
    """One Python thread per CUDA thread: a short switch interval lets each reach the next barrier 3-10 times sooner."""
    with _simulator_lock:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(5e-5)
        try:
            kernel[blocks, threads, 0, shared_bytes](*args)
        finally:
            sys.setswitchinterval(interval)
