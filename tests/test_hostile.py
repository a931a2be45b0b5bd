"""Every row of the table of hostile arguments (hostile.py): the answer is as tabled, and nothing else has happened.

On a GPU the same rows are made of device arrays, and there are some that only exist there.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import fuzz_arguments
import numpy as np
import pytest
from hostile import OPERATORS, PAGE, Operator, Row, arrays_in, as_numba, copied, get, page, put
from numba import cuda

import ddtree_numba as dd
from ddtree_numba.device import arrays as device_arrays
from ddtree_numba.device import launch as launching
from ddtree_numba.device.runtime import SIMULATOR

# What the simulator says of the arithmetic of contents that no float holds.
pytestmark = pytest.mark.filterwarnings("ignore:.*(overflow|invalid value) encountered:RuntimeWarning")


@contextlib.contextmanager
def counted_launches() -> Iterator[list[Any]]:
    """Kernels that are started meanwhile, in the simulator or on a GPU."""
    started: list[Any] = []

    def counting(plain: Any) -> Any:
        def run(kernel: Any, *args: Any) -> None:
            started.append(kernel)
            plain(kernel, *args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_simulate", "_launch"):
            patch.setattr(launching, name, counting(getattr(launching, name)))
        yield started


def call(operator: Operator, given: dict[str, Any]) -> Any:
    return operator.function(**(as_numba(given) if operator.name.endswith("on the device") else given))


def check_right_call(operator: Operator) -> None:
    """The operator's right call gives what it should."""
    given = operator.given()
    before = copied(given)
    operator.check(before, call(operator, given), given)


GROUPS = [
    pytest.param(operator, [row for row in operator.rows if row.argument == argument], id=f"{operator.name}-{argument}")
    for operator in OPERATORS
    for argument in dict.fromkeys(row.argument for row in operator.rows)
]


only_simulated = pytest.mark.skipif(not SIMULATOR, reason="on a GPU these rows are made of device arrays")
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; this needs a CUDA GPU")


@only_simulated
@pytest.mark.parametrize("operator, rows", GROUPS)
def test_the_answers_are_as_tabled(operator: Operator, rows: list[Row]):
    for row in rows:
        given = row.change(operator.given())
        if row.error is None:
            before = copied(given)
            operator.check(before, call(operator, given), given)
            continue
        arrays = [x for x in arrays_in(given) if x.nbytes < 2**24]  # a large one is one element, shown many times
        memory = [x.tobytes() for x in arrays]
        with counted_launches() as started, pytest.raises(row.error, match=row.answer) as caught:
            call(operator, given)
        assert type(caught.value) is row.error, row
        assert "\n" not in str(caught.value), row
        assert not started, f"a kernel was launched: {row}"
        assert memory == [x.tobytes() for x in arrays], f"something was written: {row}"
    check_right_call(operator)


@only_simulated
def test_launches_are_counted():
    with counted_launches() as started:
        for operator in OPERATORS:
            before = len(started)
            call(operator, operator.given())
            launches = not operator.name.endswith("on the host") and operator.name not in (
                "workspace_bytes",
                "yarn_sm_scale",
            )
            assert (len(started) > before) == launches, operator.name


def test_every_public_operator_is_in_the_table():
    functions = {name for name in dd.__all__ if inspect.isfunction(getattr(dd, name))}
    assert functions == {operator.name.split()[0] for operator in OPERATORS}


def test_every_array_of_every_operator_is_in_the_table():
    for operator in OPERATORS:
        for name, x in operator.given().items():
            if next(arrays_in(x), None) is not None:
                rows = [row for row in operator.rows if row.argument.startswith(name)]
                assert any(row.error for row in rows), f"{operator.name}: {name}"


@only_simulated
def test_the_page_is_that_of_the_table():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/hostile.py --write"


# Objects with an interface that is none


class Interface:
    """Whatever it says of itself."""

    def __init__(self, **changes: Any) -> None:
        self.interface = {"shape": (2, 3), "typestr": "<f4", "data": (4096, False), "version": 3} | changes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if "raises" in self.interface:
            raise RuntimeError("it is gone")
        return {name: x for name, x in self.interface.items() if x is not ...}


@pytest.mark.parametrize(
    "changes",
    [
        {"raises": True},
        {"shape": ...},
        {"typestr": ...},
        {"typestr": "nonsense"},
        {"data": ...},
        {"data": None},
        {"data": (4096,)},
        {"shape": "ab"},
        {"shape": 3},
        {"shape": (2, None)},
        {"shape": (2, -3)},
        {"strides": (4,)},
        {"strides": (12, "x")},
        {"mask": "one"},
    ],
    ids=str,
)
def test_an_interface_that_cannot_be_read_is_refused(changes):
    with pytest.raises(TypeError, match="^q has a __cuda_array_interface__ ") as caught:
        device_arrays._view_device("q", Interface(**changes), "numba")
    assert "\n" not in str(caught.value)


# Layers that share memory


@pytest.mark.parametrize("seed", range(200))
def test_the_first_overlap_is_that_of_all_pairs(seed):
    rng = np.random.default_rng(seed)
    memory = np.zeros(240, np.uint8)
    views = []
    for _ in range(int(rng.integers(2, 6))):
        start, size = int(rng.integers(0, 200)), int(rng.choice([1, 2, 4]))
        x = memory[start : start + 40 // size * size].view(f"u{size}")
        x = x[: x.size // 2 * 2].reshape(2, -1)[:, :: int(rng.choice([1, 2, 3, -1]))]
        views.append(x[:: int(rng.choice([1, -1]))])
    places = tuple((x.ctypes.data, x.shape, x.strides, x.dtype.itemsize) for x in views)
    pairs = [(i, j) for j in range(len(views)) for i in range(j) if np.shares_memory(views[i], views[j])]
    found = device_arrays.first_overlap(places)
    assert found in pairs if pairs else found is None


# Arguments at random: fuzz_arguments.py, for a few sets

SLOW = ("prefix_attention", "verify_attention_prefix_tail", "target_probs", "topk_logprobs")


@only_simulated
@pytest.mark.parametrize("operator", OPERATORS, ids=[operator.name for operator in OPERATORS])
def test_arguments_at_random(operator: Operator):
    count = 12 if operator.name in SLOW else 36
    counts = fuzz_arguments.run(operator, count, seed=0)
    assert not counts.failures, "\n".join(counts.failures)
    assert counts.tried == count == counts.kernels + counts.others + counts.errors
    assert counts.kernels + counts.others >= count // 4
    assert counts.errors >= count // 8


def test_every_operator_is_drawn_for():
    assert list(fuzz_arguments.DRAWS) == [operator.name for operator in OPERATORS]


def takes_for_ever(**_: Any) -> None:
    while True:
        pass


def is_off_by_one(**given: Any) -> Any:
    return RIGHT(**given) + 1


def writes_an_argument(**given: Any) -> Any:
    found = RIGHT(**given)
    given["logits"][...] = 0
    return found


def writes_beside(**given: Any) -> Any:
    found = RIGHT(**given)
    if given["out"] is not None:
        fuzz_arguments.memory_of(given["out"])[...] = 5
    return found


def names_nothing(**given: Any) -> Any:
    try:
        return RIGHT(**given)
    except ValueError:
        raise ValueError("something is wrong") from None


def raises_another(**given: Any) -> Any:
    try:
        return RIGHT(**given)
    except TypeError as error:
        raise KeyError(str(error)) from None


RIGHT = dd.argmax_tokens
WRONG = {
    takes_for_ever: "Hang: no end after",
    is_off_by_one: "FAIL tokens",
    writes_an_argument: "an argument was changed",
    writes_beside: "beside a result|FAIL tokens",
    names_nothing: "the message names no argument",
    raises_another: "KeyError",
}


@only_simulated
@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_operator_is_found(monkeypatch, wrong):
    operator = next(operator for operator in OPERATORS if operator.name == "argmax_tokens")
    wrong.__signature__ = inspect.signature(RIGHT)
    monkeypatch.setattr(dd, "argmax_tokens", wrong)
    monkeypatch.setattr(fuzz_arguments, "LIMIT_S", 0.05)
    counts = fuzz_arguments.run(operator, 30 if wrong is not takes_for_ever else 3, seed=0)
    assert re.search(WRONG[wrong], "\n".join(counts.failures))


# On a GPU: the same rows with device arrays, and what only exists there


class OnDevice:
    """A device array that lies like a NumPy array: strides, odd addresses, shared memory and read-only included."""

    def __init__(self, x: np.ndarray, memory: Any, offset: int) -> None:
        pointer = memory.__cuda_array_interface__["data"][0] + offset if memory.size else 0
        kind = "<u2" if x.dtype.name == "bfloat16" else x.dtype.str
        data = (pointer, not x.flags.writeable)
        self.shape, self.memory = x.shape, memory
        self.__cuda_array_interface__ = {
            "shape": x.shape, "strides": x.strides, "typestr": kind, "data": data, "version": 3
        }  # fmt: skip


Memories = dict[int, tuple[Any, np.ndarray]]


def owner_of(x: np.ndarray) -> np.ndarray:
    """The array whose memory a view is of, also where NumPy's as_strided stands between."""
    while True:
        base = getattr(x.base, "base", None) if not isinstance(x.base, np.ndarray) else x.base
        if not isinstance(base, np.ndarray):
            return x
        x = base


def to_gpu(given: Any, memories: Memories) -> Any:
    """Arguments with device arrays; views of one memory become views of one memory, a copy of it."""
    if isinstance(given, np.ndarray) and given.dtype.kind not in "OU":
        owner = owner_of(given)
        address = owner.ctypes.data
        if address not in memories:
            raw = np.frombuffer((ctypes.c_uint8 * owner.nbytes).from_address(address), np.uint8).copy()
            memories[address] = cuda.to_device(raw), raw
        return OnDevice(given, memories[address][0], given.ctypes.data - address)
    if isinstance(given, dict):
        return {name: to_gpu(x, memories) for name, x in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)(to_gpu(x, memories) for x in given)
    if isinstance(given, (dd.DraftTree, dd.Accepted)):
        return replace(given, **{name: to_gpu(x, memories) for name, x in vars(given).items()})
    return given


def check_right_call_on_the_gpu(operator: Operator) -> None:
    given = operator.given()
    before, on_gpu = copied(given), to_gpu(given, {})
    operator.check(before, operator.function(**on_gpu), on_gpu)
    cuda.synchronize()  # an error of the kernel would show here


def on_gpu(row: Row) -> bool:
    """Rows that device arrays can have; of the dtypes float8 has no name in the interface."""
    return not row.host and row.mistake != "float8_e4m3fn"


@gpu
@needs_gpu
@pytest.mark.parametrize("operator, rows", [group for group in GROUPS if not group.id.split("-")[0].endswith("host")])
def test_the_answers_are_the_same_for_device_arrays(operator: Operator, rows: list[Row]):
    for row in filter(on_gpu, rows):
        given = row.change(operator.given())
        before, memories = copied(given), {}
        moved = to_gpu(given, memories)
        if row.error is None:
            operator.check(before, operator.function(**moved), moved)
            cuda.synchronize()
            continue
        with counted_launches() as started, pytest.raises(row.error, match=row.answer) as caught:
            operator.function(**moved)
        assert type(caught.value) is row.error, row
        assert not started, f"a kernel was launched: {row}"
        for memory, raw in memories.values():
            assert raw.size == 0 or (memory.copy_to_host() == raw).all(), f"something was written: {row}"
        check_right_call_on_the_gpu(operator)


def array_paths(given: Any, path: str = "") -> Iterator[str]:
    """Where the arrays are."""
    if isinstance(given, np.ndarray):
        yield path
    elif isinstance(given, dict):
        for name, x in given.items():
            yield from array_paths(x, name)
    elif isinstance(given, (list, tuple)):
        for n, x in enumerate(given):
            yield from array_paths(x, f"{path}[{n}]")
    elif isinstance(given, (dd.DraftTree, dd.Accepted)):
        for name, x in vars(given).items():
            yield from array_paths(x, f"{path}.{name}")


# What compact_kv and gather_accepted do not read of an Accepted.
UNREAD = ("accepted.bonus_tokens", "accepted.flags")
DEVICE_OPERATORS = [
    x for x in OPERATORS if not x.name.endswith("host") and next(arrays_in(x.given()), None) is not None
]
each_device_operator = pytest.mark.parametrize("operator", DEVICE_OPERATORS, ids=[x.name for x in DEVICE_OPERATORS])


OF_MANY = [x for x in DEVICE_OPERATORS if len(list(array_paths(x.given()))) > 1]


@gpu
@needs_gpu
@pytest.mark.parametrize("operator", OF_MANY, ids=[x.name for x in OF_MANY])
def test_host_arrays_among_device_arrays_are_refused(operator: Operator):
    given = operator.given()
    for path in array_paths(given):
        if path not in UNREAD:
            moved = put(to_gpu(given, {}), path, get(given, path))
            with counted_launches() as started, pytest.raises(ValueError, match="host memory"):
                operator.function(**moved)
            assert not started
            check_right_call_on_the_gpu(operator)


def freed_pointer() -> int:
    """The address of device memory that was given back to the driver."""
    from cuda.bindings import driver

    cuda.current_context()
    status, pointer = driver.cuMemAlloc(2**26)
    assert status == driver.CUresult.CUDA_SUCCESS
    (status,) = driver.cuMemFree(pointer)
    assert status == driver.CUresult.CUDA_SUCCESS
    return int(pointer)


@gpu
@needs_gpu
@each_device_operator
@pytest.mark.parametrize("where", ["freed", "on the host", "nowhere"])
def test_pointers_to_no_device_memory_are_refused(operator: Operator, where: str):
    given = operator.given()
    for path in array_paths(given):
        if path not in UNREAD:
            moved = to_gpu(given, {})
            x = get(moved, path)
            home = np.zeros(2**16, np.uint8)
            pointer = freed_pointer() if where == "freed" else home.ctypes.data if where == "on the host" else 0
            x.__cuda_array_interface__["data"] = pointer, False
            with counted_launches() as started, pytest.raises(ValueError, match="which is not memory of a GPU"):
                operator.function(**moved)
            assert not started
            check_right_call_on_the_gpu(operator)
