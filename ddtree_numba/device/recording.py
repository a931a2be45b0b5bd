"""What an operator did on this thread: the launches that it made, and the arrays that it allocated.

`launch` and `empty` note it here while a caller records; attention/remembered.py is the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Recording:
    """What was done meanwhile.

    Attributes
    ----------
    launches : list of Launch or None
        In their order. None is one that cannot be started again as it is: in the simulator, of copies of host arrays,
        or on another GPU than the current one.
    allocated : list of tuple
        What for ("" where nobody said) and how many elements along each axis.
    """

    launches: list[Any] = field(default_factory=list)
    allocated: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


_of_thread = threading.local()


@contextmanager
def recording() -> Iterator[Recording]:
    """Note all launches and allocations of this thread, inside."""
    outer = current()
    _of_thread.found = found = Recording()
    try:
        yield found
    finally:
        _of_thread.found = outer


def current() -> Recording | None:
    """Where this thread notes what it does; None: nobody records."""
    return getattr(_of_thread, "found", None)
