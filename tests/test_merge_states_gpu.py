"""merge_states on a CUDA GPU: every kind of array, the caller's stream, graphs, full sizes, large arrays.

What holds on any backend is in test_merge_states.py, which runs on the GPU too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import cast
from numba import cuda
from test_merge_states import FLOAT_NAMES, INF, States, check_merged, mirrored, special_states, spoiled, states
from test_trees_gpu import run_beside_another_stream, spoil
from test_verify_attention_gpu import (
    SLEEP_CYCLES,
    TO_KIND,
    assert_same_bits,
    each_device_kind,
    each_kind,
    kind_of,
    library,
    to_host,
)

import ddtree_numba as dd
from ddtree_numba.device.runtime import SIMULATOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
]

FULL = (288, 64, 512)


def on_device(given: States, kind: str) -> tuple[Any, ...]:
    return tuple(TO_KIND[kind](x) for x in given)


def check_on_host(results: tuple[Any, Any], given: States) -> None:
    check_merged(tuple(map(to_host, results)), given)


# Every kind, dtype and width


@each_kind
@pytest.mark.parametrize("dtypes", ["float32 float32", "bfloat16 bfloat16", "float16 float32", "bfloat16 uint16"])
@pytest.mark.parametrize("R", [1, 13, 16, 24, 512, 576])
def test_every_kind(R, dtypes, kind):
    given = special_states(7, 13, R, dtypes=dtypes)
    results = dd.merge_states(*on_device(given, kind))
    assert [kind_of(x) for x in results] == [kind, kind]
    check_on_host(results, given)


@pytest.mark.parametrize("result", FLOAT_NAMES)
@pytest.mark.parametrize("b", FLOAT_NAMES)
@pytest.mark.parametrize("a", FLOAT_NAMES)
def test_all_dtypes_in_words_and_in_single_elements(a, b, result):
    for R in (40, 41):
        given = special_states(7, 13, R, dtypes=f"{a} {b}")
        out = TO_KIND["torch"](spoiled(given, result)[0])
        with np.errstate(over="ignore"):
            check_on_host(dd.merge_states(*on_device(given, "torch"), out=out), given)


@pytest.mark.parametrize("R", range(1, 70))
def test_every_width(R):
    for dtype in ("float32", "bfloat16"):
        given = states(5, 3, R, dtypes=f"{dtype} {dtype}")
        check_on_host(dd.merge_states(*on_device(given, "torch")), given)


@pytest.mark.parametrize("R", [127, 128, 132, 512, 516, 2048, 8192, 100_000])
def test_long_rows(R):
    for dtype in ("float32", "bfloat16"):
        given = states(3, 2, R, dtypes=f"{dtype} {dtype}")
        check_on_host(dd.merge_states(*on_device(given, "torch")), given)


@pytest.mark.parametrize("mark", [-INF, INF], ids=["-inf", "+inf"])
@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_an_empty_state_changes_no_bit(dtype, mark):
    # Every 16-bit pattern, NaN with their payloads included; of float32, with the lower bits filled.
    bits = np.arange(2**16, dtype=np.uint16).reshape(-1, 8, 64)
    if dtype == "float32":
        bits = bits.astype(np.uint32) << np.uint32(16) | bits
    out = bits.view(cast(np.zeros(1), dtype).dtype)
    lse = np.linspace(-1e5, 1e5, out[..., 0].size, dtype=np.float32).reshape(out.shape[:-1])
    empty, nothing = cast(np.full(out.shape, np.nan, np.float32), dtype), np.full(lse.shape, mark, np.float32)
    for given in ((out, lse, empty, nothing), (empty, nothing, out, lse)):
        assert_same_bits(dd.merge_states(*on_device(given, "torch")), (out, lse))


def test_commutative_bit_for_bit():
    torch = library("torch")
    for dtype in FLOAT_NAMES[:3]:
        a, l_a, b, l_b = on_device(states(64, 16, 512, dtypes=f"{dtype} {dtype}"), "torch")
        l_b[::2] = l_a[::2]
        if dtype == "float32":
            a[:8], b[:8] = a[:8] * 1e-44, b[:8] * 1e-44  # multiples of the smallest number, ties among them
        assert_same_bits(dd.merge_states(b, l_b, a, l_a), dd.merge_states(a, l_a, b, l_b))
        torch.cuda.synchronize()


def test_the_kernel_rounds_as_the_mirror():
    given = states(64, 4, 64)
    given[3][:] = given[1]  # ties: no exponential differs
    out, _ = dd.merge_states(*on_device(given, "torch"))
    np.testing.assert_array_equal(to_host(out), mirrored(given)[0])


def check_beside_float64(results: tuple[Any, Any], given: tuple[Any, ...]) -> None:
    """At full size, on the GPU: within the bounds of the page, which are those of check_merged."""
    torch = library("torch")
    out, lse, a, l_a, b, l_b = (x.double() for x in (*results, *given))
    w = torch.sigmoid(l_a - l_b)[..., None]
    exact, exact_lse = w * a + (1 - w) * b, torch.logaddexp(l_a, l_b)
    rounding = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[results[0].dtype]
    bound = 4 * 2.0**-23 * torch.maximum(a.abs(), b.abs()) + rounding * exact.abs() + 2.0**-24
    assert bool(((out - exact).abs() <= bound).all())
    assert bool(((lse - exact_lse).abs() <= 2 * 2.0**-23 * exact_lse.abs().clamp(min=1)).all())


def random_states(*shape: int, dtype: str = "float32", seed: int = 0) -> tuple[Any, ...]:
    torch = library("torch")
    generator = torch.Generator("cuda").manual_seed(seed)
    outs = [torch.randn(shape, device="cuda", generator=generator).to(getattr(torch, dtype)) for _ in range(2)]
    lses = [3 * torch.randn(shape[:-1], device="cuda", generator=generator) for _ in range(2)]
    return outs[0], lses[0], outs[1], lses[1]


@pytest.mark.parametrize("dtype", FLOAT_NAMES[:3])
@pytest.mark.parametrize("shape", [FULL, (9, 64, 512), (2, 9, 128, 512), (100_003, 1, 8)], ids=str)
def test_full_sizes(shape, dtype):
    given = random_states(*shape, dtype=dtype)
    check_beside_float64(dd.merge_states(*given), given)


# Memory


def test_strides_of_torch_tensors():
    torch = library("torch")
    given = random_states(6, 5, 4, 40, dtype="bfloat16")
    expected = dd.merge_states(*given)

    def sliced(x: Any) -> Any:
        big = torch.full([2 * n + 1 for n in x.shape], float("nan"), dtype=x.dtype, device=x.device)
        inner = big[tuple(slice(1, None, 2) for _ in x.shape)]
        return inner.copy_(x)

    for move in (sliced, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)):
        moved = tuple(map(move, given))
        assert_same_bits(dd.merge_states(*moved), expected)
        out, lse = move(torch.zeros_like(given[0])), move(torch.zeros_like(given[1]))
        assert_same_bits(dd.merge_states(*given, out=out, lse=lse), expected)
        assert_same_bits(dd.merge_states(*moved, out=moved[2], lse=moved[1]), expected)
    flashmla = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (given[1], given[3])]
    assert_same_bits(dd.merge_states(given[0], flashmla[0], given[2], flashmla[1]), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [FULL, (64, 8, 4096), (64, 8, 515)], ids=str)
def test_in_place(shape, dtype):
    given = random_states(*shape, dtype=dtype)
    expected = dd.merge_states(*given)
    for out_at, lse_at in ((0, 1), (2, 3), (0, 3), (2, 1)):
        for _ in range(3):
            mine = [x.clone() for x in given]
            assert_same_bits(dd.merge_states(*mine, out=mine[out_at], lse=mine[lse_at]), expected)


@each_device_kind
def test_overlap_is_refused_on_the_device_too(kind):
    given = on_device(states(4, 2, 16), kind)
    with pytest.raises(ValueError, match="out overlaps out_b"):
        dd.merge_states(given[0][:3], given[1][:3], given[0][1:], given[1][1:], out=given[0][:3])
    with pytest.raises(ValueError, match="lse overlaps lse_b"):
        dd.merge_states(given[0][:3], given[1][:3], given[2][:3], given[1][1:], lse=given[1][:3])
    with pytest.raises(ValueError, match="out_a is in GPU 0 and lse_b in host memory"):
        dd.merge_states(*given[:3], np.zeros((4, 2), np.float32))


@pytest.mark.parametrize("shape", [(4_200, 1_024, 512), (1, 2**22 + 5, 512), (2, 2, 2**29 + 8)], ids=str)
def test_states_beyond_two_to_the_31_elements(shape):
    torch = library("torch")
    assert np.prod(shape, dtype=np.int64) > 2**31
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    given = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2)]
    lses = [torch.randn(shape[:-1], device="cuda") for _ in range(2)]
    columns = slice(None, 512), slice(-512, None)
    rows = [(n, m) for n in {0, shape[0] // 2, shape[0] - 1} for m in {0, shape[1] // 2, shape[1] - 1}]
    before = {(n, m, c.start): given[0][n, m, c].clone() for n, m in rows for c in columns}
    out, lse = dd.merge_states(given[0], lses[0], given[1], lses[1], out=given[0])
    assert out is given[0]
    for n, m in rows:
        for c in columns:
            part = before[n, m, c.start][None], lses[0][n, m][None], given[1][n, m, c][None], lses[1][n, m][None]
            check_beside_float64((out[n, m, c][None], lse[n, m][None]), part)
    del given, out, before, part
    torch.cuda.empty_cache()


# Streams, graphs, runs


def test_torch_stream_is_used_and_not_waited_for():
    torch = library("torch")
    given, later = random_states(16, 8, 512), random_states(16, 8, 512, seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results = dd.merge_states(*given)  # compiles
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        for x, y in zip(given, later, strict=True):
            x.copy_(y, non_blocking=True)
        dd.merge_states(*given, out=results[0], lse=results[1])
        done = torch.cuda.Event()
        done.record(stream)
        assert not done.query(), "the call waited for the GPU"
    stream.synchronize()
    check_beside_float64(results, later)


def test_numba_default_stream_is_not_waited_for():
    torch = library("torch")
    given = on_device(states(16, 8, 64), "numba")
    out, lse = dd.merge_states(*given)
    cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # PyTorch's default stream is Numba's
    dd.merge_states(*given, out=out, lse=lse)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the call waited for the GPU"
    check_on_host((out, lse), tuple(map(to_host, given)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_a_graph_with_the_converters(dtype):
    torch = library("torch")
    a, l_a, b, l_b = random_states(2, 9, 64, 512, dtype=dtype)
    theirs = l_a.transpose(1, 2).contiguous()
    base_2 = l_b / float(np.log(2.0))
    ours, nats, out, lse = torch.empty_like(l_a), torch.empty_like(l_b), torch.empty_like(a), torch.empty_like(l_a)

    def step() -> None:
        dd.lse_from_flashmla(theirs, out=ours)
        dd.lse_from_log2(base_2, out=nats)
        dd.merge_states(a, ours, b, nats, out=out, lse=lse)
        dd.merge_states(out, lse, b, nats, out=out, lse=lse)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a synchronization in here is an error
        step()
    for seed in (1, 2, 3):
        for x, y in zip((a, l_a, b, l_b), random_states(2, 9, 64, 512, dtype=dtype, seed=seed), strict=True):
            x.copy_(y)
        theirs.copy_(l_a.transpose(1, 2))
        theirs[1, 7] = float("inf")
        base_2.copy_(l_b / float(np.log(2.0)))
        spoil(ours, nats, out, lse)
        graph.replay()
        torch.cuda.synchronize()
        assert bool(torch.isneginf(ours[1, :, 7]).all())
        first = dd.merge_states(a, ours, b, nats)
        assert_same_bits((out, lse), dd.merge_states(*first, b, nats))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_runs_give_the_same_bits(dtype):
    torch = library("torch")
    given = random_states(*FULL, dtype=dtype)
    first = dd.merge_states(*given)
    check_beside_float64(first, given)
    run_beside_another_stream(lambda: dd.merge_states(*given), first)
    torch.cuda.synchronize()


def test_parts_of_verify_attention_merge_to_the_whole():
    torch = library("torch")
    rng = np.random.default_rng(0)
    batch, nodes, heads, prefix = 2, 5, 4, 64
    q = torch.from_numpy(rng.standard_normal((batch, nodes, heads, 576)).astype(np.float32)).cuda()
    cache = torch.from_numpy(rng.standard_normal((batch, prefix + nodes, 576)).astype(np.float32)).cuda()
    lengths = torch.full((batch,), prefix, dtype=torch.int32, device="cuda")
    mask = torch.ones((batch, nodes, nodes), dtype=torch.bool, device="cuda").tril()
    whole = dd.verify_attention(q, cache, lengths, mask, sm_scale=0.05)
    of_prefix = dd.verify_attention(q, cache, lengths, torch.zeros_like(mask), sm_scale=0.05)
    of_tree = dd.verify_attention(q, cache[:, prefix:], torch.zeros_like(lengths), mask, sm_scale=0.05)
    for found, exact in zip(dd.merge_states(*of_prefix, *of_tree), whole, strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=2e-5)


def test_a_gpu_that_is_not_the_current_one():
    torch = library("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = states(5, 3, 40)
    results = dd.merge_states(*(torch.from_numpy(x).to("cuda:1") for x in given))
    assert {x.device.index for x in results} == {1}
    assert torch.cuda.current_device() == 0
    check_on_host(results, given)
