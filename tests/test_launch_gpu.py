"""Remembered calls on a CUDA GPU: the bits of checked calls, streams, graphs, threads, and what a call costs the host.

What needs no GPU is in test_launch.py.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import numpy as np
import pytest
from cases import Case, make_inputs
from test_verify_attention_gpu import MODEL, TO_KIND, library, on_device

import ddtree_numba as dd
from ddtree_numba.attention import remembered, verify
from ddtree_numba.device.launch import compute_capability
from ddtree_numba.device.runtime import SIMULATOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
]

VARIANTS = ("three_phase", "flash", "mma", "wgmma")
each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_library = pytest.mark.parametrize("kind", ["torch", "cupy"])
CASE = Case("launch", (200, 37), Q=9, H=16, page_size=64, mask="packed", dtype="bfloat16", **MODEL)
MAX_SEQLEN = 200
MOST_MICROSECONDS = 30.0  # of host time, with everything given; an idle machine takes much less
MOST_ALLOCATING = 60.0


def skip_unless_taken(variant: str) -> None:
    major = compute_capability(-1)[0]
    if (variant == "wgmma" and major != 9) or (variant == "mma" and major < 8):
        pytest.skip(f"variant {variant!r} does not run on this GPU")


def inputs_of(kind: str, variant: str, seed: int = 0, *, results: bool = True) -> dict[str, Any]:
    """A call's arguments on the GPU, with a plan where the variant takes one."""
    skip_unless_taken(variant)
    library(kind)
    inputs = make_inputs(CASE, seed=seed)
    given = on_device(inputs, kind) | {"variant": variant, "max_seqlen": MAX_SEQLEN}
    batch, num_nodes, num_heads, _ = inputs["q"].shape
    if variant == "wgmma":
        sizes = {"num_nodes": num_nodes, "num_heads": num_heads, "max_seqlen": MAX_SEQLEN}
        given["plan"] = dd.plan_attention(given["cache_seqlens"], **sizes)
    if results:
        given |= buffers_of(kind, variant)
    return given


def buffers_of(kind: str, variant: str) -> dict[str, Any]:
    make, shape = TO_KIND[kind], (len(CASE.prefixes), CASE.Q, CASE.H)
    given = {"out": make(np.zeros((*shape, 512), np.float32)), "lse": make(np.zeros(shape, np.float32))}
    if variant != "three_phase":
        nbytes = dd.workspace_bytes(*shape, MAX_SEQLEN, variant=variant)
        given["workspace"] = make(np.zeros(nbytes, np.uint8))
    return given


def bits(results: tuple[Any, Any]) -> tuple[np.ndarray, ...]:
    """float32 results on the host, as integers."""
    return tuple(np.asarray(x.cpu() if hasattr(x, "cpu") else x.get()).view(np.uint32) for x in results)


def spoil(given: dict[str, Any]) -> None:
    for name in ("out", "lse", "workspace"):
        if name in given:
            given[name][...] = 77


def checked(given: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Bits of a call that is not remembered."""
    remembered.forget()
    return bits(dd.verify_attention(**given))


@pytest.fixture
def full_calls(monkeypatch):
    """Grows by one for each call that is checked."""
    seen: list[str] = []
    plain = verify._checked_and_launched

    def run(*args: Any, **options: Any) -> Any:
        seen.append(options["variant"])
        return plain(*args, **options)

    monkeypatch.setattr(verify, "_checked_and_launched", run)
    return seen


def synchronize() -> None:
    from numba import cuda

    cuda.synchronize()


@each_library
@each_variant
def test_a_remembered_call_gives_the_same_bits(full_calls, variant, kind):
    given = inputs_of(kind, variant)
    expected = checked(given)
    for _ in range(3):
        spoil(given)
        for one, other in zip(bits(dd.verify_attention(**given)), expected, strict=True):
            assert np.array_equal(one, other)
    assert len(full_calls) == 1


@each_variant
def test_a_remembered_call_reads_contents_as_they_are_then(full_calls, variant):
    given, later = inputs_of("torch", variant), inputs_of("torch", variant, seed=1)
    later["sm_scale"] = given["sm_scale"]
    expected = checked(later)
    checked(given)
    calls = len(full_calls)
    for name in ("q", "kv_cache", "block_table", "tree_mask", "cache_seqlens"):
        bytes_of = library("torch").uint8  # not every dtype can be copied on every version
        given[name].view(bytes_of).copy_(later[name].view(bytes_of))
    spoil(given)
    for one, other in zip(bits(dd.verify_attention(**given)), expected, strict=True):
        assert np.array_equal(one, other)
    assert len(full_calls) == calls


@each_variant
def test_arrays_elsewhere_are_another_call(full_calls, variant):
    given, other = inputs_of("torch", variant), inputs_of("torch", variant, seed=1)
    first, second = checked(given), checked(other)
    assert not np.array_equal(first[0], second[0])
    dd.verify_attention(**given)
    for _ in range(3):
        for one, expected in ((given, first), (other, second)):
            spoil(one)
            for x, y in zip(bits(dd.verify_attention(**one)), expected, strict=True):
                assert np.array_equal(x, y)
    assert len(full_calls) == 3


@each_library
@each_variant
def test_allocated_results_have_the_same_bits(variant, kind):
    given = inputs_of(kind, variant, results=False) | {"out_dtype": "float32"}
    expected = checked(given)
    kept = []
    for n in range(12):
        results = dd.verify_attention(**given)
        kept.append(results)
        if n % 3 == 2:
            kept.clear()  # so that addresses come again
        for one, other in zip(bits(results), expected, strict=True):
            assert np.array_equal(one, other)


@each_variant
def test_a_remembered_call_runs_on_the_stream_that_is_current_then(full_calls, variant):
    torch = library("torch")
    given = inputs_of("torch", variant)
    expected = checked(given)
    right = given["q"].clone()
    for _ in range(3):
        stream = torch.cuda.Stream()
        spoil(given)
        given["q"].zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            given["q"].copy_(right)  # the call must come behind this
            results = dd.verify_attention(**given)
            done = torch.cuda.Event()
            done.record(stream)
            assert not done.query(), "the call waited for the GPU"
        stream.synchronize()
        for one, other in zip(bits(results), expected, strict=True):
            assert np.array_equal(one, other)
    assert len(full_calls) == 1


@pytest.mark.parametrize("allocating", [False, True])
@pytest.mark.parametrize("before", [1, 3])
@each_variant
def test_a_graph_replays_calls_that_were_remembered_or_are_within_it(variant, before, allocating):
    torch = library("torch")
    given = inputs_of("torch", variant, results=not allocating)
    if allocating:
        given["out_dtype"] = "float32"
    expected = checked(given)
    for _ in range(before):
        dd.verify_attention(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = dd.verify_attention(**given)
        second = dd.verify_attention(**given)
    for _ in range(2):
        for results in (first, second):
            for x in results:
                x.fill_(77)
        graph.replay()
        torch.cuda.synchronize()
        for results in (first, second):
            for one, other in zip(bits(results), expected, strict=True):
                assert np.array_equal(one, other)
    for _ in range(3):
        for one, other in zip(bits(dd.verify_attention(**given)), expected, strict=True):
            assert np.array_equal(one, other), "a call behind the capture"


@each_variant
def test_a_call_remembered_within_a_capture_is_right_behind_it(full_calls, variant):
    torch = library("torch")
    given = inputs_of("torch", variant)
    expected = checked(given)
    remembered.forget()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dd.verify_attention(**given)
    calls = len(full_calls)
    spoil(given)
    for one, other in zip(bits(dd.verify_attention(**given)), expected, strict=True):
        assert np.array_equal(one, other)
    assert len(full_calls) == calls


def test_gradients_are_ignored_as_ever(full_calls):
    given = inputs_of("torch", "flash")
    expected = checked(given)
    given["q"].requires_grad_()
    for _ in range(2):
        results = dd.verify_attention(**given)
        assert not any(x.requires_grad for x in results)
        for one, other in zip(bits(results), expected, strict=True):
            assert np.array_equal(one, other)


def test_eight_threads_with_a_stream_each():
    torch = library("torch")
    variants = [v for v in VARIANTS if v != "wgmma" or compute_capability(-1)[0] == 9]
    calls = [inputs_of("torch", variants[n % len(variants)], seed=n) for n in range(8)]
    wanted = [checked(given) for given in calls]
    remembered.forget()
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(n: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(100):
                for name in ("out", "lse"):
                    calls[n][name].fill_(77)
                results = dd.verify_attention(**calls[n])
                if not all(np.array_equal(x, y) for x, y in zip(bits(results), wanted[n], strict=True)):
                    wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_current_gpu_is_not_taken_for_the_arrays_own():
    torch = library("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("this needs two GPUs")
    given = inputs_of("torch", "flash")
    expected = checked(given)
    for device in (1, 0, 1):
        with torch.cuda.device(device):
            for _ in range(2):
                spoil(given)
                results = dd.verify_attention(**given)
                torch.cuda.synchronize(0)
                for one, other in zip(bits(results), expected, strict=True):
                    assert np.array_equal(one, other)


def host_microseconds(given: dict[str, Any]) -> float:
    """Median time of a call on its core, with nothing waiting on the GPU; by the clock, other programs would count."""
    times = []
    for n in range(400):
        if n % 20 == 0:
            synchronize()  # so that the queue is never full
        start = time.thread_time_ns()
        dd.verify_attention(**given)
        times.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(times[100:])


@each_library
@each_variant
def test_what_a_call_that_comes_again_costs_the_host(variant, kind, capsys):
    given = inputs_of(kind, variant)
    without = {name: x for name, x in given.items() if name not in ("out", "lse", "workspace")}
    found, allocating = host_microseconds(given), host_microseconds(without)
    with capsys.disabled():
        print(f"\n{variant} of {kind}: {found:.1f} us of host time; {allocating:.1f} us with allocations")
    assert found <= MOST_MICROSECONDS and allocating <= MOST_ALLOCATING
