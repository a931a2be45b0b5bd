"""verify_attention on a CUDA GPU: every kind of array, the caller's stream, graphs, full sizes, large caches.

What holds on any backend is in test_verify_attention.py, which runs on the GPU too. "Bit for bit" means equal bytes.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import (
    BFLOAT16,
    CASES,
    FULL_CASES,
    Case,
    arguments,
    as_float,
    compare_lse,
    compare_out,
    error_bound,
    exact_results,
    make_inputs,
)
from numba import cuda

import ddtree_numba as dd
from ddtree_numba.attention import three_phase
from ddtree_numba.device.launch import shared_bytes_limit
from ddtree_numba.device.runtime import SIMULATOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
]

Results = tuple[np.ndarray, np.ndarray]

KINDS = ("torch", "cupy", "numba", "numpy")
each_kind = pytest.mark.parametrize("kind", KINDS)
each_device_kind = pytest.mark.parametrize("kind", KINDS[:3])
each_variant = pytest.mark.parametrize("variant", ["three_phase", "flash"])
SLEEP_CYCLES = 1_000_000_000  # half a second: much longer than any call takes, once compiled
MODEL: dict[str, Any] = {"R": 512, "P": 64}


def library(name: str) -> Any:
    """Import torch or cupy, or skip the test; what they warn of while being imported is not our affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


# Kinds of arrays. bfloat16 and unsigned bits travel as signed integers, which every library can copy.


def to_torch(x: np.ndarray, device: str = "cuda") -> Any:
    torch = library("torch")
    carriers = {
        BFLOAT16: (np.int16, torch.bfloat16),
        np.dtype(np.uint16): (np.int16, torch.uint16),
        np.dtype(np.uint32): (np.int32, torch.uint32),
    }
    x = np.require(x, requirements=["C", "W"])  # PyTorch warns of what cannot be written, as a file's arrays
    if x.dtype in carriers:
        carrier, dtype = carriers[x.dtype]
        return torch.from_numpy(x.view(carrier)).to(device).view(dtype)
    return torch.from_numpy(x).to(device)


def to_cupy(x: np.ndarray) -> Any:
    cupy = library("cupy")
    return cupy.asarray(x.view(np.uint16)).view(BFLOAT16) if x.dtype == BFLOAT16 else cupy.asarray(x)


def to_numba(x: np.ndarray) -> Any:
    return cuda.to_device(x.view(np.uint16) if x.dtype == BFLOAT16 else x)


TO_KIND = {"torch": to_torch, "cupy": to_cupy, "numba": to_numba, "numpy": lambda x: x}


def to_host(x: Any) -> np.ndarray:
    """Any kind of array as NumPy; bfloat16 as ml_dtypes has it."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "copy_to_host"):
        return np.asarray(x.copy_to_host())
    if hasattr(x, "get"):
        return np.asarray(x.view(np.uint16).get().view(BFLOAT16) if x.dtype == BFLOAT16 else x.get())
    torch = library("torch")
    if x.dtype in (torch.bfloat16, torch.uint16):
        host = x.detach().view(torch.int16).cpu().numpy()
        return host.view(BFLOAT16 if x.dtype == torch.bfloat16 else np.uint16)
    return np.asarray(x.detach().cpu().numpy())


def on_device(inputs: dict[str, Any], kind: str) -> dict[str, Any]:
    """The arguments of verify_attention as arrays of one kind."""
    convert = TO_KIND[kind]
    return {name: convert(x) if isinstance(x, np.ndarray) else x for name, x in arguments(inputs).items()}


def kind_of(x: Any) -> str:
    return "numpy" if isinstance(x, np.ndarray) else type(x).__module__.split(".")[0]


def attend(inputs: dict[str, Any], **changes: Any) -> Results:
    """With NumPy arrays, in and out. For flash by way of PyTorch, whose strides need the kernels that the tests use."""
    given = arguments(inputs, **changes)
    if changes.get("variant") == "three_phase":
        return dd.verify_attention(**given)
    given = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    out, lse = dd.verify_attention(**given)
    return to_host(out), to_host(lse)


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def assert_same_bits(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    for name, a, e in zip(("out", "lse"), map(to_host, actual), map(to_host, expected), strict=True):
        assert a.shape == e.shape, name
        np.testing.assert_array_equal(bits(a), bits(e), name)


@functools.lru_cache(maxsize=4)
def solved(case: Case, variant: str = "auto") -> tuple[dict[str, Any], Results]:
    """Inputs of a case, and its results with NumPy arrays."""
    inputs = make_inputs(case)
    return inputs, attend(inputs, variant=variant)


# All cases, in every kind. A kernel of flash takes some ten seconds to compile, for each combination of dtypes, layouts
# and widths: so it has cases of few combinations, and test_flash_gpu.py more of them.

FLASH_CASES = (*("model_width", "model_width_bfloat16", "full_float32", "full_bfloat16", "full_tree_of_1025"),)
VARIANT_CASES = [("three_phase", case) for case in (*CASES, *FULL_CASES)]
VARIANT_CASES += [("flash", case) for case in (*CASES, *FULL_CASES) if case.name in FLASH_CASES]


@pytest.mark.parametrize(("variant", "case"), VARIANT_CASES, ids=str)
def test_against_the_oracle(variant, case):
    inputs, (out, lse) = solved(case, variant)
    exact_out, exact_lse = exact_results(inputs)
    compare_out(out, exact_out, error_bound(inputs, variant)).check()
    compare_lse(lse, exact_lse).check()
    empty = np.isneginf(exact_lse)
    assert np.all(as_float(out)[empty] == 0)


@each_kind
@pytest.mark.parametrize(("variant", "case"), VARIANT_CASES, ids=str)
def test_every_kind_gets_its_own_kind_and_the_same_bits(variant, case, kind):
    if (variant, kind) == ("flash", "numpy") and case.dtype != "float32":
        pytest.skip("copies of NumPy arrays have strides of their own, and so a kernel")
    inputs, expected = solved(case, variant)
    given = on_device(inputs, kind)
    out, lse = dd.verify_attention(**given, variant=variant)
    assert [kind_of(out), kind_of(lse)] == [kind, kind]
    assert out.dtype == given["q"].dtype
    assert to_host(lse).dtype == np.float32
    assert_same_bits((out, lse), expected)


@each_device_kind
@pytest.mark.parametrize(
    ("variant", "mask"),
    [("three_phase", "packed"), ("three_phase", "bool"), ("three_phase", "causal"), ("flash", "packed")],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_given_results_and_validate(kind, variant, mask, dtype):
    case = Case("given", (37, 0), Q=9, H=4, page_size=16, mask=mask, dtype=dtype, **MODEL)
    inputs, expected = solved(case, variant)
    given = on_device(inputs, kind)
    out, lse = (TO_KIND[kind](np.zeros_like(x)) for x in expected)
    results = dd.verify_attention(**given, out=out, lse=lse, validate=True, variant=variant)
    assert results[0] is out
    assert results[1] is lse
    assert_same_bits(results, expected)


@each_device_kind
@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
def test_out_dtype(kind, out_dtype):
    inputs, (exact, lse) = solved(Case("out_dtype", (37,), Q=3, H=2, **MODEL), "three_phase")
    out, same_lse = dd.verify_attention(**on_device(inputs, kind), out_dtype=out_dtype, variant="three_phase")
    expected = exact.astype({"bfloat16": BFLOAT16}.get(out_dtype, out_dtype))
    assert_same_bits((out, same_lse), (expected, lse))
    if kind == "torch":
        torch = library("torch")
        dtype = getattr(torch, out_dtype)
        assert out.dtype == dtype
        again, _ = dd.verify_attention(**on_device(inputs, kind), out_dtype=dtype, variant="three_phase")
        assert again.dtype == dtype


@each_device_kind
def test_no_requests(kind):
    given = on_device(make_inputs(Case("none", (), Q=3, H=2)), kind)
    out, lse = dd.verify_attention(**given, validate=True)
    assert [kind_of(out), kind_of(lse)] == [kind, kind]
    assert [tuple(out.shape), tuple(lse.shape)] == [(0, 3, 2, 32), (0, 3, 2)]


@each_variant
def test_kinds_may_be_mixed_on_one_gpu(variant):
    inputs, expected = solved(Case("mixed", (37, 0), Q=9, H=4, **MODEL), variant)
    given = on_device(inputs, "torch")
    given["kv_cache"] = to_cupy(inputs["kv_cache"])
    given["cache_seqlens"] = to_numba(inputs["cache_seqlens"])
    results = dd.verify_attention(**given, variant=variant)
    assert kind_of(results[0]) == "torch"
    assert_same_bits(results, expected)


class Foreign:
    """An array of a library that is not known by name."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__cuda_array_interface__ = interface
        self.owner = owner


@each_variant
def test_any_cuda_array_interface_will_do(variant):
    inputs, expected = solved(Case("foreign", (37,), Q=3, H=2, **MODEL), variant)
    given = on_device(inputs, "numba")
    for name in ("q", "kv_cache", "cache_seqlens", "tree_mask"):
        given[name] = Foreign(given[name].__cuda_array_interface__, given[name])
    results = dd.verify_attention(**given, variant=variant)
    assert kind_of(results[0]) == "numba"
    assert_same_bits(results, expected)


@each_variant
def test_torch_tensors_that_require_gradients(variant):
    inputs, expected = solved(Case("gradients", (37,), Q=3, H=2, **MODEL), variant)
    given = on_device(inputs, "torch")
    given["q"].requires_grad_()
    given["kv_cache"].requires_grad_()
    out, lse = dd.verify_attention(**given, variant=variant)
    assert not out.requires_grad
    assert_same_bits((out, lse), expected)


# Strides


def test_strides_of_torch_tensors():
    case = Case("strides", (37, 0), Q=9, H=4, **MODEL)
    inputs, expected = solved(case, "three_phase")
    torch = library("torch")
    right = on_device(inputs, "torch")

    def swapped(x: Any) -> Any:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def sliced(x: Any) -> Any:
        big = torch.zeros([2 * n + 1 for n in x.shape], dtype=x.dtype, device=x.device)
        inner = big[tuple(slice(1, None, 2) for _ in x.shape)]
        inner.copy_(x)
        return inner

    for layout in (swapped, sliced):
        given = right | {name: layout(right[name]) for name in ("q", "kv_cache")}
        assert not given["q"].is_contiguous()
        out = layout(torch.zeros(expected[0].shape, device="cuda"))
        lse = layout(torch.zeros(expected[1].shape, device="cuda"))
        assert_same_bits(dd.verify_attention(**given, out=out, lse=lse, validate=True, variant="three_phase"), expected)
    parts = right["q"][..., : case.R], right["q"][..., case.R :]
    assert_same_bits(dd.verify_attention(**right | {"q": parts}, variant="three_phase"), expected)
    with_head = right["kv_cache"][:, :, None, :]
    assert_same_bits(dd.verify_attention(**right | {"kv_cache": with_head}, variant="three_phase"), expected)
    alone = {name: right[name][:1].expand(3, *right[name].shape[1:]) for name in ("q", "kv_cache")}
    alone |= {name: to_torch(inputs[name][[0, 0, 0]]) for name in ("cache_seqlens", "tree_mask")}
    out, lse = map(to_host, dd.verify_attention(**right | alone, variant="three_phase"))
    for b in range(3):
        assert_same_bits((out[b], lse[b]), (expected[0][0], expected[1][0]))


def test_negative_strides_of_cupy_arrays():
    inputs, expected = solved(Case("strides", (37, 0), Q=9, H=4, **MODEL), "three_phase")
    given = on_device(inputs, "cupy")
    for name in ("q", "kv_cache", "cache_seqlens", "tree_mask"):
        flipped = tuple(slice(None, None, -1) for _ in given[name].shape)
        given[name] = given[name][flipped].copy()[flipped]
        assert given[name].strides[0] < 0
    assert_same_bits(dd.verify_attention(**given, validate=True, variant="three_phase"), expected)


# Accuracy beside PyTorch's own float32


def torch_attention(inputs: dict[str, Any], dtype: Any) -> tuple[Any, Any]:
    """Dense attention in PyTorch: matmul, mask, softmax, matmul. Every node must see something."""
    torch = library("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions name this setting differently
        torch.backends.cuda.matmul.allow_tf32 = False
    outs, lses = [], []
    _, num_nodes, num_heads, head_dim = inputs["q"].shape
    for b, length in enumerate(inputs["cache_seqlens"].tolist()):
        key = np.arange(length + num_nodes)
        if inputs["block_table"] is None:
            rows = inputs["kv_cache"][b, key]
        else:
            page_size = inputs["kv_cache"].shape[1]
            rows = inputs["kv_cache"][inputs["block_table"][b, key // page_size], key % page_size]
        seen = np.ones((num_nodes, key.size), np.bool_)
        seen[:, length:] = dd.unpack_mask(inputs["tree_mask"][b], num_nodes)
        q, rows, seen = to_torch(inputs["q"][b]).to(dtype), to_torch(rows).to(dtype), to_torch(seen)
        s = (q.reshape(-1, head_dim) @ rows.T * inputs["sm_scale"]).reshape(num_nodes, num_heads, -1)
        s = s.masked_fill(~seen[:, None, :], -math.inf)
        outs.append(torch.softmax(s, dim=-1) @ rows[:, : inputs["kv_lora_rank"]])
        lses.append(torch.logsumexp(s, dim=-1))
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize(
    "case",
    [
        Case("eager", (1000, 37, 0), Q=17, H=16, page_size=16, logit_std=1.5, **MODEL),
        Case("eager", (1000, 37, 0), Q=17, H=16, page_size=16, logit_std=4.0, **MODEL),
        Case("eager_long", (3000,), Q=9, H=64, logit_std=3.0, **MODEL),
        Case("eager_flat", (2000,), Q=9, H=16, logit_std=0.02, **MODEL),
    ],
    ids=lambda case: f"{case.name}_{case.logit_std}",
)
@each_variant
def test_float32_is_no_worse_than_eager_pytorch(variant, case):
    torch = library("torch")
    inputs, results = solved(case, variant)
    exact, exact_lse = (x.cpu().numpy() for x in torch_attention(inputs, torch.float64))
    eager, _ = (x.cpu().numpy() for x in torch_attention(inputs, torch.float32))
    norm = np.linalg.norm(exact)
    error = float(np.linalg.norm(results[0].astype(np.float64) - exact) / norm)
    eager_error = float(np.linalg.norm(eager.astype(np.float64) - exact) / norm)
    print(f"\n{case.name}: logit_std {case.logit_std}, ours {error:.3g}, eager {eager_error:.3g}, ", end="")
    print(f"bound {error_bound(inputs, variant):.3g}")
    assert error <= eager_error
    assert error <= error_bound(inputs, variant)
    compare_lse(results[1], exact_lse).check()
    # The two references must agree, or one of them is wrong.
    oracle_out, oracle_lse = exact_results(inputs)
    assert np.linalg.norm(oracle_out - exact) <= 1e-12 * norm
    np.testing.assert_allclose(oracle_lse, exact_lse, rtol=0, atol=1e-11)


# Streams and graphs

STREAM_CASE = Case("stream", (200, 37), Q=9, H=4, page_size=16, **MODEL)


def other_inputs(seed: int, variant: str) -> tuple[dict[str, Any], Results]:
    """The same shapes with other numbers, and shorter prefixes (the rows behind them are live, too)."""
    inputs = make_inputs(STREAM_CASE, seed=seed)
    inputs["cache_seqlens"] = np.maximum(inputs["cache_seqlens"] - seed, 0).astype(np.int32)
    return inputs, attend(inputs, variant=variant)


def scratch(inputs: dict[str, Any], variant: str, empty: Any) -> dict[str, Any]:
    """A workspace of NaN for flash, which then allocates nothing; ``empty(n)`` makes bytes of a kind."""
    if variant != "flash":
        return {}
    batch, num_nodes, num_heads, _ = inputs["q"].shape
    capacity = inputs["kv_cache"].shape[1]
    if inputs["block_table"] is not None:
        capacity *= inputs["block_table"].shape[1]
    workspace = empty(dd.workspace_bytes(batch, num_nodes, num_heads, capacity - num_nodes))
    workspace[:] = 255
    return {"workspace": workspace}


@pytest.mark.parametrize("results_given", [True, False])
@each_variant
def test_torch_stream_is_used_and_not_waited_for(variant, results_given):
    torch = library("torch")
    inputs, expected = solved(STREAM_CASE, variant)
    later, later_expected = other_inputs(1, variant)
    given, later_q = on_device(inputs, "torch"), to_torch(later["q"])
    later_given = on_device(later, "torch") | {"q": given["q"]}
    options = {}
    if results_given:
        out, lse = (torch.zeros(x.shape, device="cuda") for x in expected)
        options = {"out": out, "lse": lse}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compiles, and warms the allocator.
        assert_same_bits(dd.verify_attention(**given, **options, variant=variant), expected)
        torch.cuda.synchronize()
        # q gets its values on the stream behind a sleep: only a kernel behind both reads them.
        torch.cuda._sleep(SLEEP_CYCLES)
        given["q"].copy_(later_q, non_blocking=True)
        results = dd.verify_attention(**later_given, **options, variant=variant)
        done = torch.cuda.Event()
        done.record(stream)
        assert not done.query(), "the call waited for the GPU"
    stream.synchronize()
    assert done.query()
    assert_same_bits(results, later_expected)


@each_variant
def test_cupy_stream_is_used_and_not_waited_for(variant):
    cupy = library("cupy")
    source = """extern "C" __global__ void spin(long long cycles) {
        long long start = clock64();
        while (clock64() - start < cycles) {}
    }"""
    spin = cupy.RawKernel(source, "spin")
    inputs, expected = solved(STREAM_CASE, variant)
    later, later_expected = other_inputs(1, variant)
    given, later_q = on_device(inputs, "cupy"), to_cupy(later["q"])
    later_given = on_device(later, "cupy") | {"q": given["q"]}
    options = {"out": cupy.zeros(expected[0].shape, "float32"), "lse": cupy.zeros(expected[1].shape, "float32")}
    options |= scratch(inputs, variant, lambda n: cupy.empty(n, "uint8"))
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        assert_same_bits(dd.verify_attention(**given, **options, variant=variant), expected)
        spin((1,), (1,), (np.int64(1),))
        cupy.copyto(cupy.empty_like(later_q), later_q)
        stream.synchronize()
        spin((1,), (1,), (np.int64(SLEEP_CYCLES),))
        cupy.copyto(given["q"], later_q)
        results = dd.verify_attention(**later_given, **options, variant=variant)
        assert not stream.done, "the call waited for the GPU"
    stream.synchronize()
    assert_same_bits(results, later_expected)


@each_variant
def test_numba_default_stream_is_not_waited_for(variant):
    torch = library("torch")
    inputs, expected = solved(STREAM_CASE, variant)
    given = on_device(inputs, "numba")
    out, lse = (cuda.device_array(x.shape, x.dtype) for x in expected)
    options = {"out": out, "lse": lse, **scratch(inputs, variant, lambda n: cuda.device_array(n, "uint8"))}
    dd.verify_attention(**given, **options, variant=variant)
    cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # PyTorch's default stream is Numba's
    dd.verify_attention(**given, **options, variant=variant)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the call waited for the GPU"
    assert_same_bits((out, lse), expected)


@pytest.mark.parametrize(
    ("variant", "mask"), [("three_phase", "packed"), ("three_phase", "causal"), ("flash", "packed")]
)
@pytest.mark.parametrize("page_size", [16, None])
def test_torch_graph_replays_with_new_contents(variant, page_size, mask):
    torch = library("torch")
    case = replace(STREAM_CASE, page_size=page_size, mask=mask)
    inputs, expected = solved(case, variant)
    given = on_device(inputs, "torch")
    results = tuple(torch.zeros(x.shape, device="cuda") for x in expected)
    options = {"out": results[0], "lse": results[1], "max_seqlen": max(case.prefixes)}
    options |= scratch(inputs, variant, lambda n: torch.empty(n, dtype=torch.uint8, device="cuda"))
    dd.verify_attention(**given, **options, variant=variant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dd.verify_attention(**given, **options, variant=variant)
    for seed in (1, 2):
        later = make_inputs(case, seed=seed)
        later["cache_seqlens"] = later["cache_seqlens"] - np.int32(seed)
        later["sm_scale"] = inputs["sm_scale"]
        for name, x in on_device(later, "torch").items():
            if isinstance(x, torch.Tensor):
                # Same-sized integers: not every dtype can be copied on every version.
                carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
                shape = given[name].shape
                assert x.shape == shape
                given[name].view(carrier).copy_(x.view(carrier))
        for x in results:
            x.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(results, attend(later, max_seqlen=max(case.prefixes), variant=variant))


@each_variant
def test_cupy_graph_replays_with_new_contents(variant):
    cupy = library("cupy")
    inputs, expected = solved(STREAM_CASE, variant)
    later, later_expected = other_inputs(2, variant)
    given = on_device(inputs, "cupy")
    out, lse = (cupy.zeros(x.shape, "float32") for x in expected)
    options = {"out": out, "lse": lse, **scratch(inputs, variant, lambda n: cupy.empty(n, "uint8"))}
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        dd.verify_attention(**given, **options, variant=variant)
        stream.synchronize()
        stream.begin_capture()
        dd.verify_attention(**given, **options, variant=variant)
        graph = stream.end_capture()
        for name in ("q", "kv_cache", "cache_seqlens", "tree_mask", "block_table"):
            given[name].set(later[name])
        graph.launch(stream)
    stream.synchronize()
    assert_same_bits((out, lse), later_expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_variant
def test_a_hundred_runs_give_the_same_bits(variant, dtype):
    torch = library("torch")
    inputs, expected = solved(Case("again", (1000, 37, 0), Q=17, H=16, page_size=16, dtype=dtype, **MODEL), variant)
    given = on_device(inputs, "torch")
    first = dd.verify_attention(**given, variant=variant)
    assert_same_bits(first, expected)
    busy = torch.cuda.Stream()
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for run in range(100):
        if run % 10 == 5:  # from here on, another stream works beside ours
            with torch.cuda.stream(busy):
                for _ in range(4):
                    torch.mm(matrix, matrix)
        for again, once in zip(dd.verify_attention(**given, variant=variant), first, strict=True):
            carrier = torch.int16 if once.element_size() == 2 else torch.int32
            assert torch.equal(again.view(carrier), once.view(carrier)), f"run {run}"
    torch.cuda.synchronize()


# Shared memory


def longest_row(case: Case) -> int:
    """Prefix and tree of the longest row that fits this GPU's shared memory."""
    return shared_bytes_limit(-1) // 4 - case.D - three_phase.KEYS_PER_PASS * three_phase.PITCH


KEYS_IN_48_KB = 12 * 1024 - (512 + 64) - three_phase.KEYS_PER_PASS * three_phase.PITCH


@pytest.mark.parametrize("num_keys", [KEYS_IN_48_KB - 1, KEYS_IN_48_KB, KEYS_IN_48_KB + 1, 20000])
def test_shared_memory_around_and_above_48_kb(num_keys):
    case = Case(f"keys_{num_keys}", (num_keys - 2,), Q=2, H=2, slack=0, **MODEL)
    inputs, (out, lse) = solved(case, "three_phase")
    exact_out, exact_lse = exact_results(inputs)
    compare_out(out, exact_out, error_bound(inputs, "three_phase")).check()
    compare_lse(lse, exact_lse).check()


def test_the_longest_row_works_and_one_more_is_refused_by_name():
    torch = library("torch")
    inputs, expected = solved(Case("longest", (37,), Q=3, H=2, slack=0, **MODEL), "three_phase")
    given = on_device(inputs, "torch")
    longest = longest_row(Case("longest", (37,), **MODEL)) - 3
    given["kv_cache"] = torch.nn.functional.pad(given["kv_cache"], (0, 0, 0, longest + 1 - 37))
    assert_same_bits(dd.verify_attention(**given, max_seqlen=longest, variant="three_phase"), expected)
    with pytest.raises(ValueError, match="shared memory") as caught:
        dd.verify_attention(**given, variant="three_phase")
    assert torch.cuda.get_device_name() in str(caught.value)
    assert f"max_seqlen = {longest}." in str(caught.value)
    assert_same_bits(dd.verify_attention(**given, max_seqlen=longest, variant="three_phase"), expected)
    torch.cuda.synchronize()


# Caches of more than 2**31 elements


@pytest.fixture(scope="module")
def large_pages() -> Any:
    """bfloat16 [240000, 16, 576], all NaN: 2.2e9 elements, 4.4 GB."""
    torch = library("torch")
    num_pages, page_size, head_dim = 240_000, 16, 576
    assert num_pages * page_size * head_dim > 2**31
    if torch.cuda.mem_get_info()[0] < 8e9:
        pytest.skip("needs 8 GB of free GPU memory")
    pages = torch.full((num_pages, page_size, head_dim), math.nan, dtype=torch.bfloat16, device="cuda")
    yield pages
    del pages
    torch.cuda.empty_cache()


@each_variant
def test_pages_beyond_two_to_the_31_elements(variant, large_pages):
    torch = library("torch")
    # Both ends, and on both sides of 2**31 bytes and of 2**31 elements.
    ids = [239_999, 0, 233_016, 233_017, 116_508, 116_509, 1]
    inputs, expected = solved(
        Case("large_paged", (16 * 7 - 9,), Q=9, H=4, dtype="bfloat16", page_size=16, slack=0, **MODEL), variant
    )
    given = on_device(inputs, "torch")
    for page, home in zip(ids, inputs["block_table"][0], strict=True):
        large_pages[page] = given["kv_cache"][int(home)]
    given |= {"kv_cache": large_pages, "block_table": torch.tensor([ids], dtype=torch.int32, device="cuda")}
    assert_same_bits(dd.verify_attention(**given, validate=True, variant=variant), expected)
    for page in ids:
        large_pages[page] = math.nan


@each_variant
def test_requests_beyond_two_to_the_31_elements(variant, large_pages):
    torch = library("torch")
    inputs = make_inputs(Case("large", (50,), Q=3, H=2, dtype="bfloat16", slack=0, **MODEL))
    expected = attend(inputs, variant=variant, batch_invariant=True)
    given = on_device(inputs, "torch")
    batch = 240
    cache = large_pages.view(batch, 16_000, 576)
    live = [0, batch - 1]
    for b in live:
        cache[b, :53] = given["kv_cache"][0]
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")
    lengths[live] = 50
    mask = np.zeros((batch, 3, 1), np.uint32)
    mask[live] = inputs["tree_mask"]
    given |= {"kv_cache": cache, "cache_seqlens": lengths, "tree_mask": to_torch(mask)}
    given["q"] = given["q"].expand(batch, *given["q"].shape[1:])
    out, lse = map(to_host, dd.verify_attention(**given, max_seqlen=50, variant=variant, batch_invariant=True))
    for b in live:
        assert_same_bits((out[b], lse[b]), (expected[0][0], expected[1][0]))
    assert not bits(out[1:-1]).any()
    assert np.isneginf(lse[1:-1]).all()
    for b in live:
        cache[b, :53] = math.nan


# Wrong places


def test_arrays_in_host_memory_beside_device_arrays_are_refused():
    inputs, expected = solved(Case("places", (37, 0), Q=3, H=2, page_size=16, **MODEL))
    given = on_device(inputs, "torch")
    for name in ("kv_cache", "cache_seqlens", "tree_mask", "block_table"):
        with pytest.raises(ValueError, match=rf"q is in GPU 0 and {name} in host memory"):
            dd.verify_attention(**given | {name: inputs[name]})
        on_cpu = to_torch(inputs[name], "cpu")
        with pytest.raises(TypeError, match=rf"{name} is a PyTorch tensor on cpu"):
            dd.verify_attention(**given | {name: on_cpu})
    with pytest.raises(ValueError, match=r"q is in host memory and kv_cache in GPU 0"):
        dd.verify_attention(**given | {"q": inputs["q"]})
    with pytest.raises(ValueError, match=r"q is in GPU 0 and out in host memory"):
        dd.verify_attention(**given, out=np.zeros(expected[0].shape, np.float32))
    with pytest.raises(ValueError, match=r"q is in GPU 0 and lse in host memory"):
        dd.verify_attention(**given, lse=np.zeros(expected[1].shape, np.float32))
    for mirror in ("three_phase_numpy", "flash_numpy"):
        with pytest.raises(ValueError, match=f"'{mirror}' works on host arrays"):
            dd.verify_attention(**given, variant=mirror)
    with pytest.raises(ValueError, match=r"q is in GPU 0 and workspace in host memory"):
        dd.verify_attention(**given, workspace=np.zeros(2**20, np.float32))
    assert_same_bits(dd.verify_attention(**given), expected)


def test_an_interface_that_points_to_host_memory_is_refused():
    inputs, expected = solved(Case("pointer", (37,), Q=3, H=2, **MODEL))
    given = on_device(inputs, "numba")
    q = inputs["q"]
    interface = q.__array_interface__ | {"version": 3, "strides": None}
    with pytest.raises(ValueError, match=r"\bq\b.* not memory of a GPU"):
        dd.verify_attention(**given | {"q": Foreign(interface, q)})
    assert_same_bits(dd.verify_attention(**given), expected)


@each_device_kind
def test_overlap_is_refused_on_the_device_too(kind):
    inputs, expected = solved(Case("overlap", (37,), Q=3, H=2, **MODEL))
    given = on_device(inputs, kind)
    with pytest.raises(ValueError, match="out overlaps q"):
        dd.verify_attention(**given, out=given["q"][:, :, :, :512])
    assert_same_bits(dd.verify_attention(**given), expected)


@each_device_kind
def test_validate_finds_wrong_contents_on_the_device(kind):
    inputs, expected = solved(Case("contents", (37, 4), Q=3, H=2, page_size=16, slack=0, **MODEL))
    given = on_device(inputs, kind)
    wrong = {
        "cache_seqlens": np.array([37, -1], np.int32),
        "block_table": np.full_like(inputs["block_table"], -1),
        "tree_mask": inputs["tree_mask"] | np.uint32(8),
    }
    for name, x in wrong.items():
        with pytest.raises(ValueError, match=rf"{name}\["):
            dd.verify_attention(**given | {name: TO_KIND[kind](x)}, validate=True)
    assert_same_bits(dd.verify_attention(**given, validate=True), expected)


@each_variant
def test_wrong_contents_do_not_read_out_of_bounds(variant):
    torch = library("torch")
    inputs, expected = solved(Case("clamped", (37, 0), Q=3, H=2, page_size=16, **MODEL), variant)
    given = on_device(inputs, "torch")
    lengths = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    assert_same_bits(
        dd.verify_attention(**given | {"cache_seqlens": lengths}, max_seqlen=37, variant=variant), expected
    )
    for entry in (-(2**31), -1, 2**31 - 1):
        table = torch.full_like(given["block_table"], entry)
        dd.verify_attention(**given | {"block_table": table}, variant=variant)
    torch.cuda.synchronize()
    assert_same_bits(dd.verify_attention(**given, variant=variant), expected)


# Several GPUs


def test_a_gpu_that_is_not_the_current_one():
    torch = library("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs, expected = solved(Case("second_gpu", (37, 0), Q=9, H=4, **MODEL))
    first = on_device(inputs, "torch")
    second = {name: to_torch(x, "cuda:1") if kind_of(x) == "numpy" else x for name, x in arguments(inputs).items()}
    for changes in ({}, {"tree_mask": None, "variant": "three_phase"}):
        out, lse = dd.verify_attention(**second | changes)
        assert [x.device.index for x in (out, lse)] == [1, 1]
        assert torch.cuda.current_device() == 0
        assert_same_bits((out, lse), dd.verify_attention(**first | changes))
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(stream):
        results = dd.verify_attention(**second)
    stream.synchronize()
    assert_same_bits(results, expected)
    with pytest.raises(ValueError, match="q is in GPU 1 and kv_cache in GPU 0"):
        dd.verify_attention(**second | {"kv_cache": first["kv_cache"]})
    with pytest.raises(ValueError, match="q is in GPU 0 and out in GPU 1"):
        dd.verify_attention(**first, out=torch.zeros(expected[0].shape, device="cuda:1"))
    assert_same_bits(dd.verify_attention(**first), expected)
