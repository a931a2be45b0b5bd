"""Calls that come again: the launches of an earlier call with the same arrays, started without its checks.

A model calls `verify_attention` with the same arrays at every step. All that a call checks and prepares follows from
where arrays lie, their shapes, strides and dtypes, and from the options; contents are the kernels' business. These
facts are a call's key, and what it launched is remembered by it: function, grid and packed parameters, all of them
numbers. Arrays are not kept. Whatever lies at an address later with the same facts gets the same launches.

Remembered are calls whose arrays are all PyTorch tensors, or all CuPy arrays, on the current GPU. A call that allocates
results or workspace is remembered in two steps: by its key, what to allocate; by the addresses of that, its launches.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Hashable
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from ddtree_numba.device.launch import Launch, caller_stream, current_device, start
from ddtree_numba.device.recording import Recording

MOST = 4096  # calls; a model has one for each layer and batch size
# Of options: they never change, and none equals another of its type that means something else.
PLAIN = (float, int, bool, str, type, NoneType, np.float32, np.float64, np.int32, np.int64, np.bool_)


class Call(NamedTuple):
    """What a call launches, given all of its arrays."""

    kind: str
    device: int
    launches: tuple[Launch, ...]

    def start(self) -> None:
        """Start it on the caller's current stream."""
        stream = caller_stream(self.kind, self.device)
        for launch in self.launches:
            start(launch, stream)


class Allocating(NamedTuple):
    """What a call allocates before it launches: shape and dtype of each, None where the caller gives it."""

    kind: str
    device: int
    number: int  # of its own, for keys
    out: tuple[tuple[int, ...], Any] | None
    lse: tuple[tuple[int, ...], Any] | None
    workspace: tuple[tuple[int, ...], Any] | None

    def allocate(self, q: Any, out: Any, lse: Any, workspace: Any) -> tuple[Any, Any, Any, Hashable]:
        """The three with what was missing, in the kind of q and on its GPU, and the key of the call that has them."""
        make = q.new_empty if self.kind == "torch" else sys.modules["cupy"].empty
        key: list[int] = [self.number]
        made = []
        for given, wanted in zip((out, lse, workspace), self[3:], strict=True):
            if wanted is not None:
                given = make(wanted[0], dtype=wanted[1])
                key.append(given.data_ptr() if self.kind == "torch" else given.data.ptr)
            made.append(given)
        return (*made, tuple(key))


_numbers = itertools.count()
# Least recently used calls go first, by halves: a dict that is full becomes the old one. So a hit costs one look-up and
# no lock, where most calls hit.
_young: dict[Hashable, Call | Allocating] = {}
_old: dict[Hashable, Call | Allocating] = {}
_lock = threading.Lock()


def key_of(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> Hashable | None:
    """All that the checks and launches of a call depend on; None where the call cannot be remembered.

    Each option counts with its type, since 1 == True == 1.0.
    """
    form = form_of(tuple(map(type, arrays)), tuple(map(type, options)))
    if form is None:
        return None
    number, given, facts = form
    try:
        return number, facts(given(arrays)), options
    except RuntimeError:  # a tensor without memory of its own, which the checks know better
        return None


class Form(NamedTuple):
    """Calls whose arrays and options are of certain types."""

    number: int  # of its own, for keys
    given: Callable[[tuple[Any, ...]], tuple[Any, ...]]  # arrays that are not None
    facts: Callable[[tuple[Any, ...]], tuple[Any, ...]]


@functools.lru_cache(maxsize=1024)
def form_of(arrays: tuple[type, ...], options: tuple[type, ...]) -> Form | None:
    """The form of calls with these types; None: such calls are not remembered."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    plain = {*PLAIN, torch.dtype} if torch is not None else PLAIN
    if not all(t in plain or issubclass(t, np.dtype) for t in options):
        return None
    given = [n for n, t in enumerate(arrays) if t is not NoneType]
    kinds = {arrays[n] for n in given}
    if len(given) > 1 and torch is not None and kinds == {torch.Tensor}:
        return Form(next(_numbers), itemgetter(*given), torch_facts)
    if len(given) > 1 and cupy is not None and kinds == {cupy.ndarray}:
        return Form(next(_numbers), itemgetter(*given), cupy_facts)
    return None


def torch_facts(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Fact by fact, since this is most of what a call costs.

    An address tells the GPU, and the shape of a contiguous tensor its strides.
    """
    tensor = sys.modules["torch"].Tensor
    return (
        *map(tensor.data_ptr, arrays),
        *[x.shape for x in arrays],
        *[x.dtype for x in arrays],
        None if all(map(tensor.is_contiguous, arrays)) else tuple(map(tensor.stride, arrays)),
    )


def cupy_facts(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([(x.data.ptr, x.shape, x.strides, x.data.device_id, x.dtype) for x in arrays])


def find(key: Hashable) -> Call | Allocating | None:
    """What is remembered by a key, which then counts as just used; None also where another GPU is current."""
    found = _young.get(key)
    if found is None:
        found = _old.get(key)
        if found is None:
            return None
        keep(key, found)
    return found if found.device == current_device() else None


def remember(key: Hashable, made: Recording, results: tuple[Any, Any]) -> None:
    """Keep what a call did, if it can be done again by its key alone."""
    if not made.launches or None in made.launches:
        return
    first: Launch = made.launches[0]
    if any((launch.kind, launch.device) != (first.kind, first.device) for launch in made.launches):
        return
    shapes = dict(made.allocated)
    if not shapes:
        keep(key, Call(first.kind, first.device, tuple(made.launches)))
    elif shapes.keys() <= {"out", "lse", "workspace"}:
        dtypes = {"out": results[0].dtype, "lse": results[1].dtype, "workspace": results[1].dtype}  # float32, both
        wanted = [(shapes[name], dtype) if name in shapes else None for name, dtype in dtypes.items()]
        keep(key, Allocating(first.kind, first.device, next(_numbers), *wanted))


def keep(key: Hashable, found: Call | Allocating) -> None:
    """Remember it as just used."""
    global _young, _old
    with _lock:
        if len(_young) >= MOST // 2:
            _young, _old = {}, _young
        _young[key] = found


def forget() -> None:
    """Nothing is remembered any more."""
    global _young, _old
    with _lock:
        _young, _old = {}, {}
