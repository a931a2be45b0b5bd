"""Launches as the driver gets them, and calls that are remembered: with a driver and libraries that only take notes.

What a GPU makes of it is in test_launch_gpu.py.
"""

import contextlib
import ctypes
import functools
import gc
import itertools
import sys
import threading
import types
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver as bindings

import ddtree_numba as dd
import ddtree_numba.attention
from ddtree_numba.attention import flash, mma, remembered, verify, wgmma_host
from ddtree_numba.device import launch, runtime
from ddtree_numba.device.arrays import View

B, Q, H, PAGES, PAGE = 2, 3, 16, 5, 64
R, D = 512, 576
VARIANTS = ("three_phase", "flash", "mma", "wgmma")
LIBRARIES = ("torch", "cupy")
each_library = pytest.mark.parametrize("library", LIBRARIES)
each_variant = pytest.mark.parametrize("variant", VARIANTS)


# Libraries whose arrays have an address and nothing behind it


class Memory:
    """Addresses that nobody had before, or, once told so, those that were freed."""

    def __init__(self):
        self.next = itertools.count(0x7F00_0000_0000, 1 << 24)
        self.again = []

    def address(self):
        return self.again.pop(0) if self.again else next(self.next)


def in_order(shape, itemsize):
    return tuple(itemsize * int(np.prod(shape[n + 1 :], dtype=np.int64)) for n in range(len(shape)))


def fake_torch(memory):
    """As much of PyTorch as calls use; dtypes are objects of its own."""

    class DType:
        def __init__(self, name):
            self.name = name

        def __str__(self):
            return f"torch.{self.name}"

    class Tensor:
        is_cuda = True

        def __init__(self, shape, dtype, device=0, address=None, strides=None):
            self.shape, self.dtype, self.gpu = tuple(shape), dtype, device
            self.address = memory.address() if address is None else address
            self.strides = strides or in_order(shape, 1)
            self.device = SimpleNamespace(index=device)

        def data_ptr(self):
            return self.address

        def size(self):
            return self.shape

        def stride(self):
            return self.strides

        def get_device(self):
            return self.gpu

        def is_contiguous(self):
            return self.strides == in_order(self.shape, 1)

        def new_empty(self, shape, dtype):
            return Tensor(shape, dtype, self.gpu)

    module = types.ModuleType("torch")
    module.Tensor, module.dtype = Tensor, DType
    for name in ("float32", "float16", "bfloat16", "int32", "bool", "uint8"):
        setattr(module, name, DType(name))
    module.empty = lambda shape, dtype, device: Tensor(shape, dtype, int(device.split(":")[1]))
    module.stream = 0x100
    module._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: module.stream + device)
    module.make = lambda shape, name, **kw: Tensor(shape, getattr(module, name), **kw)
    return module


def fake_cupy(memory):
    """As much of CuPy as calls use."""

    class ndarray:  # noqa: N801  its name in CuPy
        def __init__(self, shape, dtype, device=0, address=None, strides=None):
            self.shape, self.dtype = tuple(shape), np.dtype(dtype)
            self.data = SimpleNamespace(ptr=memory.address() if address is None else address, device_id=device)
            self.strides = in_order(shape, self.dtype.itemsize)
            if strides:
                self.strides = tuple(self.dtype.itemsize * n for n in strides)
            self.device = SimpleNamespace(id=device)

    module = types.ModuleType("cupy")
    module.ndarray = ndarray
    module.empty = lambda shape, dtype: ndarray(shape, dtype)
    module.stream = 0x200
    module.cuda = SimpleNamespace(
        Device=lambda device: contextlib.nullcontext(),
        get_current_stream=lambda: SimpleNamespace(ptr=module.stream),
    )
    module.make = lambda shape, name, **kw: ndarray(shape, wgmma_dtype(name), **kw)
    return module


def wgmma_dtype(name):
    return dd.device.arrays.BFLOAT16 if name == "bfloat16" else np.dtype(name)


# A driver that notes what it is told to start


class Driver:
    """The bindings' structures; its two functions are made up."""

    def __init__(self):
        for name in ("CUfunction", "CUkernel", "CUstream", "CUlaunchConfig", "CUlaunchAttribute", "CUresult"):
            setattr(self, name, getattr(bindings, name))
        self.CUlaunchAttributeID = bindings.CUlaunchAttributeID
        self.status, self.device = bindings.CUresult.CUDA_SUCCESS, 0
        self.sizes = {}  # parameters of a launch, by the address of their addresses
        self.started = []

    def cuLaunchKernelEx(self, config, function, parameters, extra):  # noqa: N802  its name in CUDA
        pointers = (ctypes.c_uint64 * self.sizes[parameters]).from_address(parameters)
        words = tuple(ctypes.c_uint64.from_address(p).value for p in pointers)
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        attributes = [(a.id, a.value.programmaticStreamSerializationAllowed) for a in config.attrs[: config.numAttrs]]
        shape = (grid, config.blockDimX, config.sharedMemBytes, tuple(attributes))
        self.started.append(SimpleNamespace(to=int(config.hStream), what=(int(function), *shape, words)))
        return (self.status,)

    def cuCtxGetDevice(self):  # noqa: N802
        return self.status, self.device


class Machine:
    """A GPU 0 as far as calls can tell, and how many calls went the full way."""

    def __init__(self, monkeypatch):
        self.driver, self.memory, self.full = Driver(), Memory(), 0
        monkeypatch.setattr(launch, "driver", self.driver, raising=False)
        monkeypatch.setattr(runtime, "SIMULATOR", False)
        monkeypatch.setattr(runtime, "require_backend", lambda: None)
        monkeypatch.setattr(runtime, "has_gpu", lambda: False)  # sizes are those of the simulator
        for module in ("flash", "mma", "three_phase", "wgmma_host"):
            monkeypatch.setattr(f"ddtree_numba.attention.{module}.require_backend", lambda: None)
        current = lambda: SimpleNamespace(id=self.driver.device)  # noqa: E731
        monkeypatch.setattr(launch.cuda, "get_current_device", current)

        class Gpus:
            def __getitem__(self, device):
                return contextlib.nullcontext()

        monkeypatch.setattr(launch.cuda, "gpus", Gpus())
        # Kernels are numbers here: one for each function and kind of arguments.
        numbers = {}

        def compiled(kernel, device, keys):
            number = numbers.setdefault((id(kernel), device, keys), len(numbers) + 1)
            return SimpleNamespace(handle=bindings.CUkernel(number), kept=kernel)

        monkeypatch.setattr(launch, "_compiled", compiled)
        wgmma = SimpleNamespace(THREADS=384, SHARED_BYTES=1000, COMBINE_BLOCKS=4, COMBINE_THREADS=256)
        for module in (wgmma, flash, mma):
            for name in ("make_kernel", "make_combine"):
                make = functools.cache(lambda *kind: SimpleNamespace(kind=kind))
                monkeypatch.setattr(module, name, make, raising=False)
        monkeypatch.setattr(ddtree_numba.attention, "wgmma", wgmma, raising=False)
        monkeypatch.setattr(wgmma_host, "tensor_map", lambda pointer, *_: (pointer, *range(15)))
        plain_prepare, plain_run = launch.prepare, verify._checked_and_launched

        def prepare(*args):
            made = plain_prepare(*args)
            self.driver.sizes[ctypes.addressof(made.pointers)] = len(made.values)
            return made

        def run(*args, **options):
            self.full += 1
            return plain_run(*args, **options)

        monkeypatch.setattr(launch, "prepare", prepare)
        monkeypatch.setattr(verify, "_checked_and_launched", run)
        self.libraries = {"torch": fake_torch(self.memory), "cupy": fake_cupy(self.memory)}
        for name, module in self.libraries.items():
            monkeypatch.setitem(sys.modules, name, module)

    def call(self, given):
        """Results of a call, and what it started."""
        before = len(self.driver.started)
        results = dd.verify_attention(**given)
        return results, self.driver.started[before:]

    def inputs(self, library, variant, *, results=True, plan=True):
        """A call's arguments; results also means a workspace."""
        make = self.libraries[library].make
        given = {
            "q": make((B, Q, H, D), "bfloat16"),
            "kv_cache": make((PAGES * B, PAGE, D), "bfloat16"),
            "cache_seqlens": make((B,), "int32"),
            "tree_mask": make((B, Q, Q), "bool"),
            "block_table": make((B, PAGES), "int32"),
            "sm_scale": 0.1,
            "max_seqlen": 200,
            "variant": variant,
        }
        if results:
            given["out"] = make((B, Q, H, R), "bfloat16")
            given["lse"] = make((B, Q, H), "float32")
            if variant != "three_phase":
                given["workspace"] = make((1 << 24,), "uint8")
        if variant == "wgmma" and plan:
            given["plan"] = self.plan(library)
        return given

    def plan(self, library, max_seqlen=200):
        lengths = self.libraries[library].make((B,), "int32")
        return dd.plan_attention(lengths, num_nodes=Q, num_heads=H, max_seqlen=max_seqlen)


@pytest.fixture
def machine(monkeypatch):
    yield Machine(monkeypatch)
    remembered.forget()


def view(shape=(2, 3), dtype="float32", device=0, pointer=0x7F00_0000_0000):
    dtype = np.dtype(dtype)
    return View("x", "torch", device, pointer, shape, in_order(shape, dtype.itemsize), dtype, False, None)


# Launches


def test_parameters_are_the_words_that_the_kernel_reads(machine):
    kernel = object()
    args = (view(), np.int32(-5), np.float32(1.5), (7, -8), view((4,), "uint8", pointer=0x10))
    launch.launch(kernel, (4, 5, 6), 64, args, results=1, shared_bytes=100)
    (started,) = machine.driver.started
    function, grid, threads, shared_bytes, attributes, words = started.what
    assert (grid, threads, shared_bytes, attributes, started.to) == ((4, 5, 6), 64, 100, (), 0x100)
    assert int(launch._compiled(kernel, 0, launch.type_keys(args)).handle) == function
    low = 2**32 - 1  # the four bytes of an int32 or float32
    assert words[:9] == (0, 0, 6, 4, 0x7F00_0000_0000, 2, 3, 12, 4)
    assert [words[9] & low, words[10] & low] == [2**32 - 5, int(np.float32(1.5).view(np.uint32))]
    assert words[11:13] == (7, 2**64 - 8)
    assert words[13:] == (0, 0, 4, 1, 0x10, 4, 1)


def test_overlap_is_an_attribute_of_the_launch(machine):
    launch.launch(object(), (1, 1, 1), 32, (view(),), results=1, shared_bytes=0, overlap=True)
    serialization = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert machine.driver.started[0].what[4] == ((serialization, 1),)


def test_a_launch_keeps_one_configuration_for_each_stream(machine):
    made = launch.prepare(object(), (1, 1, 1), 32, (view(),), 0)
    for stream in (5, 6, 5):
        launch.start(made, stream)
    assert [x.to for x in machine.driver.started] == [5, 6, 5] and sorted(made.configs) == [5, 6]
    for stream in range(1000):
        launch.start(made, stream)
    assert len(made.configs) <= launch.MOST_STREAMS


def test_a_refused_launch_is_an_error_with_the_name_of_the_status(machine):
    machine.driver.status = bindings.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(RuntimeError, match=r"4 blocks|\(4, 1, 1\).*CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"):
        launch.launch(object(), (4, 1, 1), 32, (view(),), results=1, shared_bytes=0)


# Calls that come again


@each_library
@each_variant
def test_a_call_that_comes_again_starts_the_same_without_its_checks(machine, variant, library):
    given = machine.inputs(library, variant)
    (out, lse), first = machine.call(given)
    assert machine.full == 1 and len(first) == (1 if variant == "three_phase" else 2)
    for _ in range(3):
        results, again = machine.call(given)
        assert [x.what for x in again] == [x.what for x in first]
        assert results[0] is given["out"] is out and results[1] is given["lse"] is lse
    assert machine.full == 1


@each_library
def test_a_call_without_a_plan_makes_its_plan_again(machine, library):
    given = machine.inputs(library, "wgmma", plan=False)
    _, first = machine.call(given)
    _, again = machine.call(given)
    assert len(first) == 3 and [x.what for x in again] == [x.what for x in first] and machine.full == 1


@each_library
def test_auto_and_a_pair_of_queries_are_remembered(machine, library):
    given = machine.inputs(library, "flash")
    make = machine.libraries[library].make
    given |= {"variant": "auto", "q": [make((B, Q, H, R), "bfloat16"), make((B, Q, H, D - R), "bfloat16")]}
    _, first = machine.call(given)
    _, again = machine.call(given)
    assert [x.what for x in again] == [x.what for x in first] and machine.full == 1


@each_library
def test_a_call_starts_on_the_stream_that_is_current_then(machine, library):
    given = machine.inputs(library, "flash")
    machine.call(given)
    for stream in (0x300, 0, 0x300):
        machine.libraries[library].stream = stream
        assert {x.to for x in machine.call(given)[1]} == {stream}
    assert machine.full == 1


def moved(name):
    def change(machine, library, given):
        x = given[name]
        given[name] = type(x)(x.shape, x.dtype)

    return change


def with_strides(name, strides, shape=None):
    def change(machine, library, given):
        x = given[name]
        address = x.data_ptr() if library == "torch" else x.data.ptr
        given[name] = type(x)(shape or x.shape, x.dtype, address=address, strides=strides)

    return change


def option(**options):
    def change(machine, library, given):
        given.update(options)

    return change


def another_dtype(machine, library, given):
    given["out"] = machine.libraries[library].make((B, Q, H, R), "float32")
    address = given["out"].data_ptr() if library == "torch" else given["out"].data.ptr
    machine.call(given)
    given["out"] = machine.libraries[library].make((B, Q, H, R), "float16", address=address)


def causal(machine, library, given):
    given["tree_mask"] = machine.libraries[library].make((B, Q, 1), "bool")
    given["tree_mask"] = given["tree_mask"].__class__((B, Q, Q), given["tree_mask"].dtype)


CHANGES = {
    **{f"{name} lies elsewhere": moved(name) for name in ("q", "kv_cache", "cache_seqlens", "tree_mask")},
    **{f"{name} lies elsewhere": moved(name) for name in ("block_table", "out", "lse", "workspace")},
    "the cache has other strides": with_strides("kv_cache", (2 * PAGE * D, D, 1)),
    "the cache has more pages": with_strides("kv_cache", (PAGE * D, D, 1), (20 * B, PAGE, D)),
    "out has another dtype": another_dtype,
    "another scale": option(sm_scale=0.2),
    "another bound": option(max_seqlen=201),
    "another variant": option(variant="mma"),
    "splits": option(num_splits=2),
    "the same bits for every batch": option(batch_invariant=True),
}


@each_library
@pytest.mark.parametrize("change", CHANGES)
def test_another_call_is_checked_and_starts_something_else(machine, change, library):
    given = machine.inputs(library, "flash")
    _, first = machine.call(given)
    CHANGES[change](machine, library, given)
    before = machine.full
    _, other = machine.call(given)
    assert machine.full == before + 1, "it must be checked"
    assert [x.what for x in other] != [x.what for x in first]


@each_library
def test_another_plan_is_another_call(machine, library):
    given = machine.inputs(library, "wgmma")
    _, first = machine.call(given)
    given["plan"] = machine.plan(library)
    _, other = machine.call(given)
    assert machine.full == 2 and [x.what for x in other] != [x.what for x in first]
    given["plan"] = machine.plan(library, max_seqlen=201)
    with pytest.raises(ValueError, match="plan is for"):
        machine.call(given)


BAD = {
    "True for 1": ({"num_splits": 1}, {"num_splits": True}, TypeError),
    "a bound of True": ({"max_seqlen": 1}, {"max_seqlen": True}, TypeError),
    "a bound as a float": ({"max_seqlen": 200}, {"max_seqlen": 200.0}, TypeError),
    "a scale as a bool": ({"sm_scale": 1}, {"sm_scale": True}, TypeError),
    "a scale that is not above 0": ({}, {"sm_scale": 0.0}, ValueError),
    "an unhashable option": ({}, {"out_dtype": []}, TypeError),
    "a plan for another variant": ({}, {"plan": "plan"}, ValueError),
    "a variant that there is not": ({}, {"variant": "flush"}, ValueError),
}


@each_library
@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_refused_after_a_right_call_that_looks_like_it(machine, case, library):
    right, wrong, error = BAD[case]
    given = machine.inputs(library, "flash") | right
    for _ in range(3):
        machine.call(given)
    before = len(machine.driver.started)
    with pytest.raises(error):
        machine.call(given | wrong)
    assert len(machine.driver.started) == before


@each_library
def test_a_sequence_of_one_or_three_queries_is_refused_after_right_calls(machine, library):
    given = machine.inputs(library, "flash")
    machine.call(given)
    machine.call(given)
    for q in ((given["q"],), [given["q"], None], (given["q"], given["q"], given["q"])):
        with pytest.raises(TypeError):
            machine.call(given | {"q": q})


@each_library
def test_contents_are_checked_at_every_call_that_asks_for_it(machine, library, monkeypatch):
    checked = []
    monkeypatch.setattr("ddtree_numba.attention.problem.check_contents", checked.append)
    given = machine.inputs(library, "flash")
    machine.call(given)
    for n in (1, 2, 3):
        machine.call(given | {"validate": True})
        assert len(checked) == n


@each_library
def test_arrays_on_another_gpu_than_the_current_one_are_not_remembered(machine, library):
    given = machine.inputs(library, "flash")
    machine.call(given)
    machine.driver.device = 1
    _, started = machine.call(given)
    machine.call(given)
    assert len(started) == 2 and machine.full == 3
    machine.driver.device = 0
    machine.call(given)
    assert machine.full == 3, "and what is remembered for their own stays"


@each_library
def test_a_thread_without_a_context_goes_the_full_way(machine, library, monkeypatch):
    given = machine.inputs(library, "flash")
    machine.call(given)
    none = bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT
    monkeypatch.setattr(machine.driver, "cuCtxGetDevice", lambda: (none, bindings.CUdevice(0)))
    machine.call(given)
    assert machine.full == 2


@each_library
def test_subclasses_and_mixed_libraries_are_not_remembered(machine, library):
    given = machine.inputs(library, "flash")
    plain = given["q"]
    other = machine.inputs(LIBRARIES[library == "torch"], "flash")
    subclass = type("Own", (type(plain),), {})
    for q in (subclass(plain.shape, plain.dtype), other["q"]):
        before = machine.full
        for _ in range(3):
            machine.call(given | {"q": q})
        assert machine.full == before + 3


@each_library
def test_results_in_other_strides_of_wgmma_are_copied_at_every_call(machine, library):
    given = machine.inputs(library, "wgmma")
    with_strides("out", (Q * H * 1024, H * 1024, 1024, 1))(machine, library, given)
    starts = [len(machine.call(given)[1]) for _ in range(3)]
    assert starts == [3, 3, 3] and machine.full == 3


# Results that the call allocates


@each_library
@each_variant
def test_allocated_results_are_new_and_their_call_is_remembered_by_address(machine, variant, library):
    given = machine.inputs(library, variant, results=False)
    address = (lambda x: x.data_ptr()) if library == "torch" else (lambda x: x.data.ptr)
    one, _ = machine.call(given)
    two, second = machine.call(given)
    assert machine.full == 2, "the second call finds what to allocate, but not these addresses"
    addresses = [address(x) for x in two]
    assert not set(addresses) & {address(x) for x in one}
    for found, first in zip(two, one, strict=True):
        assert type(found) is type(first) and (found.shape, found.dtype) == (first.shape, first.dtype)
    # Allocated in the same order: out, lse, workspace.
    workspace = [] if variant == "three_phase" else [max(machine.memory.again, default=addresses[1] + (1 << 24))]
    machine.memory.again = [*addresses, *workspace]
    three, third = machine.call(given)
    assert machine.full == 2 and [x.what for x in third] == [x.what for x in second]
    assert [address(x) for x in three] == addresses
    machine.call(given)
    assert machine.full == 3, "other addresses are another call"


@each_library
def test_what_is_given_is_not_allocated(machine, library):
    given = machine.inputs(library, "flash", results=False)
    whole = machine.inputs(library, "flash")
    for name in ("out", "lse", "workspace"):
        (out, lse), _ = machine.call(given | {name: whole[name]})
        for _ in range(2):
            (out, lse), _ = machine.call(given | {name: whole[name]})
            assert (out is whole["out"], lse is whole["lse"]) == (name == "out", name == "lse")


# What is kept


@each_library
def test_no_array_is_kept_alive(machine, library):
    given = machine.inputs(library, "wgmma")
    for _ in range(2):
        machine.call(given)
    names = [name for name, x in given.items() if not isinstance(x, (str, int, float))]
    alive = {name: weakref.ref(given[name]) for name in names}
    del given
    machine.driver.started.clear()
    gc.collect()
    assert [name for name, x in alive.items() if x() is not None] == []


@each_library
def test_calls_that_were_not_used_for_long_are_forgotten(machine, library, monkeypatch):
    monkeypatch.setattr(remembered, "MOST", 8)
    given = machine.inputs(library, "flash")
    for n in range(40):
        machine.call(given | {"sm_scale": 0.1 + n})
        machine.call(given)
        assert len(remembered._young) + len(remembered._old) <= 8
    assert machine.full == 40, "the call that is used all the time stays"
    machine.call(given | {"sm_scale": 1.1})
    assert machine.full == 41


@each_library
def test_threads_start_their_own_calls(machine, library):
    calls = [machine.inputs(library, variant) for variant in VARIANTS for _ in range(2)]
    wanted = [tuple(x.what for x in machine.call(given)[1]) for given in calls]
    assert len(set(wanted)) == len(calls)
    started = threading.local()
    plain = machine.driver.cuLaunchKernelEx

    def noting(config, function, parameters, extra):
        answer = plain(config, function, parameters, extra)
        pointers = (ctypes.c_uint64 * machine.driver.sizes[parameters]).from_address(parameters)
        started.words.append(tuple(ctypes.c_uint64.from_address(p).value for p in pointers))
        return answer

    machine.driver.cuLaunchKernelEx = noting
    wrong = []

    def work(given, expected):
        for n in range(50):
            if n % 10 == 9:
                remembered.forget()
            started.words = []
            dd.verify_attention(**given)
            if started.words != [what[-1] for what in expected]:
                wrong.append(started.words)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(calls, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
