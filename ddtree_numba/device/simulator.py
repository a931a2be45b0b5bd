"""Numba's simulator with a greenlet for each CUDA thread, where Numba has a Python thread.

One thread of a block runs at a time, from one barrier to the next; then comes the next thread. Numba's threads take
turns by Python's lock and are asked again and again whether they wait: 5 to 10 times slower, and never the same twice.
A missing barrier shows more often here too, since each thread is as far ahead of the next as barriers allow, and each
warp as far ahead of the next as the block's barriers do.

Threads wait for each other as a block, as a warp of 32, or at a named barrier; those that have ended are not waited
for. Threads that wait for what never comes are an error. A thread that waits for another in a loop, without a barrier,
waits for ever; no kernel of this package does. Kernels that are not started by this package run as Numba runs them.

Source: numba_cuda/numba/cuda/simulator/kernel.py and kernelapi.py, whose BlockManager and whose notion of the current
thread are replaced while a kernel runs. Another version of Numba means changes here.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import greenlet
import numpy as np
from numba.cuda import types
from numba.cuda.np import numpy_support
from numba.cuda.simulator import kernel as numba_kernel
from numba.cuda.simulator import kernelapi

_lock = threading.Lock()  # Numba simulates one kernel at a time
_plain_array = kernelapi.FakeCUDAShared.array
_plain_swap = kernelapi.swapped_cuda_module
_LATER = object()
WARP = 32


class Thread(greenlet.greenlet):
    """A CUDA thread; what Numba's stand-in for the module cuda, and our twins of intrinsics, ask of it."""

    def __init__(self, body: Callable[[], None], block: Block, block_index: Any, index: Any, number: int) -> None:
        super().__init__(body)
        self.starter = greenlet.getcurrent()
        self.block, self.blockIdx, self.threadIdx, self.thread_id = block, block_index, index, number
        self.copies: list[list[Any]] = [[]]  # asynchronous ones that are not done, by groups; the last is still open
        self.answer: Any = None

    def syncthreads(self) -> None:
        self.starter.switch(None)

    def with_warp(self, x: Any, work: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """What ``work`` makes of all that the warp's threads bring: a list in their order, and so its answer for each.

        It runs once, when all of them are here.
        """
        number = self.thread_id // WARP
        brought = self.block.brought[number]
        brought[self] = x
        self.starter.switch(("warp", number))
        if brought:
            threads = sorted(brought, key=lambda thread: thread.thread_id)
            for thread, answer in zip(threads, work([brought[thread] for thread in threads]), strict=True):
                thread.answer = answer
            brought.clear()
            self.block.brought[number] = {}  # threads that go on at once may meet again before others have left
        return self.answer

    def barrier_sync(self, number: int, threads: int) -> None:
        """Wait at a named barrier for as many threads, with those that only arrive."""
        self.block.arrived[number] += 1
        self.starter.switch(("barrier", number, threads))

    def barrier_arrive(self, number: int, threads: int) -> None:
        """Be one of the threads that a named barrier waits for, and go on."""
        self.block.arrived[number] += 1

    def of_all(self, x: Any) -> list[Any]:
        """What all threads of the block bring, in their order."""
        values = self.block.values
        values[self.thread_id] = x
        self.syncthreads()
        found = [values[n] for n in sorted(values)]
        self.syncthreads()
        return found

    def syncthreads_count(self, predicate: Any) -> int:
        return sum(map(bool, self.of_all(predicate)))

    def syncthreads_and(self, predicate: Any) -> int:
        return int(all(self.of_all(predicate)))

    def syncthreads_or(self, predicate: Any) -> int:
        return int(any(self.of_all(predicate)))


class Block:
    """Runs a block; in the place of Numba's BlockManager."""

    def __init__(self, f: Callable[..., None], grid_dim: Any, block_dim: tuple[int, int, int], debug: bool) -> None:
        self.f, self.block_dim = f, block_dim
        self.values: dict[int, Any] = {}
        self.brought: dict[int, dict[Thread, Any]] = defaultdict(dict)  # by the threads of each warp
        self.arrived: dict[int, int] = defaultdict(int)  # at each named barrier

    def run(self, block_index: tuple[int, int, int], *args: Any) -> None:
        x, y, z = self.block_dim
        indices = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        threads = [
            Thread(self._body(block_index, index, args), self, kernelapi.Dim3(*block_index), kernelapi.Dim3(*index), n)
            for n, index in enumerate(indices)
        ]
        turns, waiting = deque(threads), defaultdict[Any, list[Thread]](list)
        try:
            while turns:
                thread = turns.popleft()
                place = thread.switch()
                if place is _LATER:
                    turns.append(thread)
                elif not thread.dead:
                    waiting[place].append(thread)
                    if place is not None and self._complete(place, waiting[place], ()):
                        turns.extendleft(reversed(waiting.pop(place)))
                if not turns:
                    threads = [thread for thread in threads if not thread.dead]
                    for place in [p for p in waiting if self._complete(p, waiting[p], threads)]:
                        turns.extend(sorted(waiting.pop(place), key=lambda thread: thread.thread_id))
            if waiting:
                where = ", ".join(f"{len(found)} at {place or 'syncthreads'}" for place, found in waiting.items())
                raise RuntimeError(f"threads of block {block_index} wait for what never comes: {where}")
        finally:
            for thread in threads:  # only after an error: the others leave what they have entered
                if not thread.dead:
                    thread.throw()

    def _complete(self, place: Any, waiting: Sequence[Thread], living: Sequence[Thread]) -> bool:
        """Whether all threads that meet at a place are there; those of an incomplete warp once no other can run."""
        if place is None:
            return len(waiting) == len(living)
        if place[0] == "warp":
            own = [thread for thread in living if thread.thread_id // WARP == place[1]]
            return len(waiting) == (len(own) if own else WARP)
        if self.arrived[place[1]] < place[2]:
            return False
        self.arrived[place[1]] -= place[2]
        return True

    def _body(self, block_index: Any, index: Any, args: tuple[Any, ...]) -> Callable[[], None]:
        def body() -> None:
            try:
                self.f(*args)
            except Exception as error:
                where = f"thread {index} of block {block_index}"
                raise type(error)(f"{where}: {error}").with_traceback(error.__traceback__) from None

        return body


def current_thread() -> Thread:
    """The CUDA thread that asks."""
    thread = greenlet.getcurrent()
    assert isinstance(thread, Thread)
    return thread


def let_others_go_first() -> None:
    """Let the block's other threads run to their next barrier, or end, before this one: what a test calls a race."""
    current_thread().starter.switch(_LATER)


def run(kernel: Any, blocks: tuple[int, int, int], threads: int, shared_bytes: int, args: tuple[Any, ...]) -> None:
    """Run a kernel under ``@cuda.jit`` to its end; Python threads that call at once wait for each other."""
    with _lock, _greenlets():
        kernel[blocks, threads, 0, shared_bytes](*args)


@contextmanager
def _greenlets() -> Iterator[None]:
    asked = SimpleNamespace(current_thread=greenlet.getcurrent)
    with (
        ExitStack() as until_the_end,
        mock.patch.object(numba_kernel, "BlockManager", Block),
        mock.patch.object(numba_kernel, "swapped_cuda_module", _swapped_once(until_the_end)),
        mock.patch.object(kernelapi, "threading", asked),
        mock.patch.object(kernelapi.FakeCUDAShared, "array", _array),
    ):
        yield


def _swapped_once(until_the_end: ExitStack) -> Callable[[Any, Any], Any]:
    """Numba's stand-in takes the place of ``cuda`` in a module while a kernel runs, not for each call of a function."""
    swapped: set[int] = set()
    nothing = nullcontext()

    def swap(function: Any, stand_in: Any) -> Any:
        if id(function.__globals__) not in swapped:
            swapped.add(id(function.__globals__))
            until_the_end.enter_context(_plain_swap(function, stand_in))
        return nothing

    return swap


def _array(self: Any, shape: Any, dtype: Any, alignment: Any = None) -> np.ndarray:
    """cuda.shared.array; Numba's own reads the whole stack to learn the line that it is called from."""
    if shape == 0:
        plain: np.ndarray = _plain_array(self, shape, dtype)  # which starts at a multiple of 16 bytes
        return plain
    caller = sys._getframe(1)
    key = (caller.f_code.co_filename, caller.f_lineno)
    if key not in self._allocations:
        as_numpy = numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else dtype
        self._allocations[key] = np.empty(shape, as_numpy)
    found: np.ndarray = self._allocations[key]
    return found
