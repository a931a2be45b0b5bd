"""Variant flash on a CUDA GPU: both kinds of tiles, long prefixes, large caches, streams, graphs, runs.

What holds on any backend is in test_flash.py. Each combination of tiles, dtypes, layouts and widths is compiled, which
takes some ten seconds, so nearly all tests have the widths of the model, a packed mask, and float32 or bfloat16.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from cases import (
    Case,
    arguments,
    as_float,
    check_results,
    compare_lse,
    compare_out,
    error_bound,
    exact_results,
    make_inputs,
    pack,
)
from numba import cuda
from test_trees_gpu import run_beside_another_stream
from test_verify_attention_gpu import (
    MODEL,
    SLEEP_CYCLES,
    assert_same_bits,
    library,
    on_device,
    to_host,
    to_torch,
    torch_attention,
)

import ddtree_numba as dd
from ddtree_numba.attention import flash
from ddtree_numba.device.runtime import SIMULATOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
]

SPLITS: list[dict[str, Any]] = [
    {},
    {"num_splits": 1},
    {"num_splits": 2},
    {"num_splits": 3},
    {"num_splits": 50},
    {"batch_invariant": True},
]
INVARIANT = [SPLITS[1], SPLITS[2], SPLITS[5]]
each_tiles = pytest.mark.parametrize("tiles", [flash.SMALL, flash.LARGE], ids=["small", "large"])
RAGGED = Case("flash_ragged", (3000, 37, 0, 0, 2047, 2048), Q=17, H=9, page_size=16, padded=2, idle=(3,), **MODEL)


@functools.lru_cache(maxsize=4)
def exactly(case: Case) -> tuple[dict[str, Any], np.ndarray, np.ndarray, float]:
    """Inputs of a case, out and lse of the oracle, and the bound on the error of out."""
    inputs = make_inputs(case)
    return inputs, *exact_results(inputs), error_bound(inputs, "flash")


def attend(**given: Any) -> Any:
    """NumPy arrays by way of PyTorch: copies of them have other strides, for which other kernels would be compiled."""
    if isinstance(given["q"], np.ndarray):
        given = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
        return tuple(map(to_host, attend(**given)))
    return dd.verify_attention(**given, variant="flash")


def check(case: Case, **options: Any) -> None:
    inputs, exact_out, exact_lse, bound = exactly(case)
    out, lse = attend(**arguments(inputs, **options))
    compare_out(out, exact_out, bound).check()
    compare_lse(lse, exact_lse).check()
    empty = np.isneginf(exact_lse)
    assert np.all(as_float(out)[empty] == 0) and np.all(np.isneginf(lse[empty]))


# Against the oracle


@pytest.mark.parametrize("options", SPLITS, ids=str)
@each_tiles
def test_splits_and_long_prefixes(monkeypatch, tiles, options):
    monkeypatch.setattr(flash, "TILES", (tiles,))
    check(RAGGED, **options)


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}], ids=str)
@each_tiles
def test_lengths_around_tiles(monkeypatch, tiles, options):
    monkeypatch.setattr(flash, "TILES", (tiles,))
    N = tiles.keys
    prefixes = (0, 1, N - 2, N - 1, N, N + 1, 2 * N - 2, 2 * N - 1, 2 * N, flash.FOLD * N - 1, flash.FOLD * N)
    check(Case("around", prefixes, Q=1, H=2, **MODEL), **options)


@pytest.mark.parametrize("options", [{}, {"num_splits": 2}, {"batch_invariant": True}], ids=str)
def test_bfloat16(options):
    case = Case("flash_bfloat16", (3000, 37, 0, 0), Q=17, H=16, dtype="bfloat16", page_size=64, idle=(3,), **MODEL)
    check(case, **options)


@pytest.mark.parametrize(("R", "P", "mask"), [(16, 16, "bool"), (192, 192, "packed")])
def test_widths(monkeypatch, R, P, mask):
    monkeypatch.setattr(flash, "TILES", (flash.SMALL,))
    for options in SPLITS:
        check(Case("widths", (500, 3), Q=17, H=3, R=R, P=P, mask=mask), **options)


@pytest.mark.parametrize("prefix", [0, 200])
def test_each_mask_bit(prefix):
    """With q = 0 and unit vectors for rows, output k of a node is 1/n if it sees key k, of n keys."""
    num_nodes, width = 257, 512
    num_keys = prefix + num_nodes
    mask = np.random.default_rng(prefix).random((1, num_nodes, num_nodes)) < 0.5
    cache = np.zeros((1, num_keys, width + 64), np.float32)
    cache[0, :, :num_keys] = np.eye(num_keys, dtype=np.float32)
    q = np.zeros((1, num_nodes, 1, width + 64), np.float32)
    seen = np.concatenate([np.ones((1, num_nodes, prefix), np.bool_), mask], axis=2)
    count = seen.sum(axis=2, dtype=np.float32)
    expected = np.zeros((1, num_nodes, width), np.float32)
    expected[..., :num_keys] = seen / np.maximum(count, np.float32(1))[..., None]
    for options in SPLITS:
        out, lse = attend(
            q=q,
            kv_cache=cache,
            cache_seqlens=np.array([prefix], np.int32),
            tree_mask=pack(mask),
            sm_scale=1.0,
            **options,
        )
        np.testing.assert_array_equal(out[:, :, 0], expected)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[:, :, 0], np.log(count.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("options", SPLITS, ids=str)
def test_nodes_that_see_themselves_alone_get_their_own_row(options):
    inputs = make_inputs(Case("alone", (0,), Q=70, H=2, **MODEL))
    eye = np.eye(70, dtype=np.bool_)[None]
    out, lse = attend(**arguments(inputs, tree_mask=pack(eye)), **options)
    np.testing.assert_array_equal(out, np.repeat(inputs["kv_cache"][:, :70, None, :512], 2, axis=2))
    compare_lse(lse, exact_results(inputs | {"tree_mask": eye})[1]).check()


@pytest.mark.parametrize("options", SPLITS, ids=str)
def test_nan_queries_stay_in_their_row(options):
    inputs = make_inputs(Case("nan_queries", (600,), Q=9, H=4, **MODEL))
    expected = attend(**arguments(inputs), **options)
    q = inputs["q"].copy()
    q[0, 2, 1, 575] = np.nan
    q[0, 5, 3] = np.inf
    out, lse = attend(**arguments(inputs, q=q), **options)
    assert np.isnan(out[0, 2, 1]).all() and np.isnan(lse[0, 2, 1])
    others = np.ones((1, 9, 4), np.bool_)
    others[0, 2, 1] = others[0, 5, 3] = False
    assert_same_bits((out[others], lse[others]), (expected[0][others], expected[1][others]))


def test_nan_in_a_live_row_stays_in_its_request():
    inputs = make_inputs(Case("nan_row", (600, 37), Q=9, H=4, **MODEL))
    expected = attend(**arguments(inputs))
    inputs["kv_cache"][0, 100] = np.nan
    out, lse = attend(**arguments(inputs))
    assert_same_bits((out[1:], lse[1:]), (expected[0][1:], expected[1][1:]))


@pytest.mark.parametrize("score", [-6e4, 6e4])
@pytest.mark.parametrize("options", SPLITS, ids=str)
def test_logits_far_from_zero(score, options):
    inputs = make_inputs(Case("far", (600,), Q=3, H=2, **MODEL))
    inputs["q"][:] = np.float32(math.copysign(1.0, score))
    noise = np.random.default_rng(1).standard_normal(inputs["kv_cache"].shape)
    inputs["kv_cache"] = (1.0 + 1e-5 * noise).astype(np.float32)
    inputs["sm_scale"] = abs(score) / 576
    check_results(attend(**arguments(inputs), **options), inputs, "flash")


def test_logits_of_magnitude_1e4():
    check(Case("huge_logits", (600,), Q=9, H=4, logit_std=1e4, **MODEL))


def test_strides_of_everything():
    torch = library("torch")
    inputs = make_inputs(Case("flash_strides", (40, 3), Q=5, H=2, **MODEL))
    expected = attend(**arguments(inputs))
    right = on_device(inputs, "torch")

    def spread(x: Any) -> Any:
        big = torch.zeros([2 * n + 1 for n in x.shape], dtype=x.dtype, device=x.device)
        inner = big[tuple(slice(1, None, 2) for _ in x.shape)]
        inner.copy_(x)
        return inner

    given = right | {name: spread(right[name]) for name in ("q", "kv_cache")}
    out, lse = (spread(torch.zeros(x.shape, device="cuda")) for x in expected)
    results = attend(**given, out=out, lse=lse)
    assert results[0] is out and results[1] is lse
    assert_same_bits(results, expected)  # both take the small tiles: there is little work


# Beside PyTorch's own float32


@pytest.mark.parametrize(("length", "logit_std"), [(1000, 3.0), (16384, 0.02), (131072 - 9, 0.02), (131072 - 9, 3.0)])
def test_float32_is_no_worse_than_eager_pytorch(length, logit_std):
    torch = library("torch")
    inputs = make_inputs(Case("flash_eager", (length,), Q=9, H=16, logit_std=logit_std, slack=0, **MODEL))
    exact, exact_lse = (x.cpu().numpy() for x in torch_attention(inputs, torch.float64))
    eager, _ = (x.cpu().numpy() for x in torch_attention(inputs, torch.float32))
    norm = np.linalg.norm(exact)
    eager_error = float(np.linalg.norm(eager.astype(np.float64) - exact) / norm)
    given = on_device(inputs, "torch")
    # The oracle's statistics take the host a minute beyond.
    bound = error_bound(inputs, "flash") if length <= 16384 else math.inf
    for options in ({}, {"num_splits": 1}, {"batch_invariant": True}):
        out, lse = map(to_host, attend(**given, **options))
        error = float(np.linalg.norm(out.astype(np.float64) - exact) / norm)
        print(f"\n{length} keys, logit_std {logit_std}, {options}: ours {error:.3g}, eager {eager_error:.3g}", end="")
        assert error <= eager_error and error <= bound
        compare_lse(lse, exact_lse).check()
    torch.cuda.empty_cache()


# Bits


@pytest.mark.parametrize("options", INVARIANT, ids=str)
def test_bits_do_not_depend_on_other_requests(options):
    inputs = make_inputs(Case("others", (5000, 100, 3000, 0), Q=9, H=16, **MODEL))
    given = on_device(inputs, "torch")
    expected = tuple(map(to_host, attend(**given, **options)))
    for b, length in ((0, 17), (2, 2049), (1, 0)):
        lengths = inputs["cache_seqlens"].copy()
        lengths[b] = length
        others = [n for n in range(4) if n != b]
        out, lse = map(to_host, attend(**given | {"cache_seqlens": to_torch(lengths)}, **options))
        assert_same_bits((out[others], lse[others]), (expected[0][others], expected[1][others]))
    if "batch_invariant" in options:
        for kept in ([2], [0, 1], [3, 2, 1, 0], [0, 0, 0, 1, 2, 3, 3]):
            names = ("q", "kv_cache", "cache_seqlens", "tree_mask")
            moved = {name: to_torch(inputs[name][kept]) for name in names}
            results = attend(**given | moved, **options, max_seqlen=int(inputs["cache_seqlens"][kept].max()))
            assert_same_bits(results, tuple(x[kept] for x in expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=str)
def test_the_same_bits_in_every_run(dtype, options):
    torch = library("torch")
    case = Case("flash_again", (4000, 37, 900, 2500), Q=17, H=16, dtype=dtype, slack=0, **MODEL)
    given = on_device(make_inputs(case), "torch")
    first = attend(**given, **options)
    run_beside_another_stream(lambda: attend(**given, **options), first)
    torch.cuda.synchronize()


# Caches of more than 2**31 elements


def test_page_numbers_above_a_million():
    torch = library("torch")
    num_pages, page_size = 1_100_000, 4
    if torch.cuda.mem_get_info()[0] < 10e9:
        pytest.skip("needs 10 GB of free GPU memory")
    assert num_pages * page_size * 576 > 2**31
    inputs = make_inputs(
        Case("millions", (4 * 9 - 5,), Q=5, H=4, dtype="bfloat16", page_size=page_size, slack=20, **MODEL)
    )
    expected = attend(**arguments(inputs))
    check_results(expected, inputs, "flash")
    pages = torch.full((num_pages, page_size, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    given = on_device(inputs, "torch")
    # Both ends, and both sides of 2**31 bytes and of 2**31 elements.
    ids = [num_pages - 1, 0, 1_000_001, 932_067, 932_068, 466_033, 466_034, 1, 1_048_576]
    table = np.full_like(inputs["block_table"], 2147480000)
    table[0, : len(ids)] = ids
    for page, home in zip(ids, inputs["block_table"][0], strict=False):
        pages[page] = given["kv_cache"][int(home)]
    given |= {"kv_cache": pages, "block_table": to_torch(table)}
    assert_same_bits(attend(**given, validate=True), expected)
    del pages, given
    torch.cuda.empty_cache()


# Workspace, streams, graphs


def bytes_on_gpu(n: int, device: str = "cuda") -> Any:
    """Bytes that are NaN as float32."""
    torch = library("torch")
    return torch.full((n,), 255, dtype=torch.uint8, device=device)


def scratch_size(inputs: dict[str, Any], **options: Any) -> int:
    batch, num_nodes, num_heads, _ = inputs["q"].shape
    capacity = inputs["kv_cache"].shape[1] - num_nodes
    return dd.workspace_bytes(batch, num_nodes, num_heads, capacity, variant="flash", **options)


@pytest.mark.parametrize("options", SPLITS, ids=str)
def test_a_workspace_of_just_the_bytes_that_it_needs(options):
    inputs = make_inputs(Case("workspace", (3000, 5), Q=9, H=16, **MODEL))
    given = on_device(inputs, "torch")
    expected = attend(**given, **options)
    nbytes = scratch_size(inputs, **options)
    memory = bytes_on_gpu(nbytes + 4096)
    assert_same_bits(attend(**given, **options, workspace=memory[:nbytes]), expected)
    assert bool((memory[nbytes:] == 255).all()), "something was written behind the workspace"


def test_workspaces_that_will_not_do():
    torch = library("torch")
    inputs = make_inputs(Case("workspace", (300,), Q=9, H=4, **MODEL))
    given = on_device(inputs, "torch")
    out, lse = torch.zeros((1, 9, 4, 512), device="cuda"), torch.zeros((1, 9, 4), device="cuda")
    enough = bytes_on_gpu(scratch_size(inputs) + 64)
    wrong = [
        (enough[4:], "multiple of 16"),
        (enough[::2], "C order"),
        (enough[:64], r"workspace has 64 bytes; it must have at least \d+"),
        (given["q"], "workspace overlaps q"),
        (given["kv_cache"], "workspace overlaps kv_cache"),
        (out, "workspace overlaps out"),
        (lse, "workspace overlaps lse"),
        (np.zeros(2**20, np.float32), "q is in GPU 0 and workspace in host memory"),
    ]
    if torch.cuda.device_count() > 1:
        wrong.append((bytes_on_gpu(2**24, "cuda:1"), "q is in GPU 0 and workspace in GPU 1"))
    for workspace, message in wrong:
        with pytest.raises(ValueError, match=message):
            attend(**given, workspace=workspace, out=out, lse=lse)
    assert not out.any() and not lse.any()


def test_eight_streams_at_once():
    torch = library("torch")
    problems = []
    for seed in range(8):
        inputs = make_inputs(Case("streams", (2000 - 200 * seed, 37), Q=9, H=16, **MODEL), seed=seed)
        given = on_device(inputs, "torch")
        problems.append((given, attend(**given), torch.cuda.Stream()))
    torch.cuda.synchronize()
    found: list[list[Any]] = [[] for _ in problems]
    torch.cuda._sleep(SLEEP_CYCLES // 10)
    for _ in range(5):
        for (given, _, stream), results in zip(problems, found, strict=True):
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                results.append(attend(**given))
    torch.cuda.synchronize()
    for (_, expected, _), results in zip(problems, found, strict=True):
        for result in results:
            assert_same_bits(result, expected)


def refill(given: dict[str, Any], later: dict[str, Any]) -> None:
    """Other contents in the same memory."""
    torch = library("torch")
    for name, x in on_device(later, "torch").items():
        if isinstance(x, torch.Tensor):
            carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
            given[name].view(carrier).copy_(x.view(carrier))


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"batch_invariant": True}], ids=str)
def test_graph_replays_with_other_contents_and_lengths(options):
    torch = library("torch")
    case = Case("flash_graph", (3000, 37, 2100), Q=9, H=16, slack=0, **MODEL)
    inputs = make_inputs(case)
    given = on_device(inputs, "torch")
    buffers = {
        "out": torch.zeros((3, 9, 16, 512), device="cuda"),
        "lse": torch.zeros((3, 9, 16), device="cuda"),
        "workspace": bytes_on_gpu(scratch_size(inputs, **options)),
    }
    attend(**given, **options, **buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(**given, **options, **buffers)
    for seed, lengths in ((1, (0, 3000, 1)), (2, (3000, 3000, 3000)), (3, (16, 0, 2047))):
        later = make_inputs(case, seed=seed)
        later["kv_cache"] = np.nan_to_num(later["kv_cache"])  # rows of longer prefixes
        later["cache_seqlens"] = np.array(lengths, np.int32)
        refill(given, later)
        for x in buffers.values():
            x.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        results = tuple(map(to_host, (buffers["out"], buffers["lse"])))
        assert_same_bits(results, attend(**given, **options))
    check_results(results, later, "flash")


def test_all_kernels_run_on_the_stream_of_q_whatever_kinds_the_others_are():
    torch = library("torch")
    inputs = make_inputs(Case("flash_mixed_kinds", (700, 37), Q=17, H=9, **MODEL))
    given = on_device(inputs, "torch")
    whole = attend(**given)
    mixed = given | {"cache_seqlens": cuda.as_cuda_array(given["cache_seqlens"])}
    pair = tuple(
        cuda.as_cuda_array(x) for x in dd.prefix_attention(**{k: x for k, x in given.items() if k != "tree_mask"})
    )
    results = [(torch.zeros_like(whole[0]), torch.zeros_like(whole[1])) for _ in range(2)]
    workspace = bytes_on_gpu(max(scratch_size(inputs), scratch_size(inputs, prefix_tail=True)))

    def step() -> None:
        attend(**mixed, out=results[0][0], lse=results[0][1], workspace=workspace)
        out, lse = results[1]
        dd.verify_attention_prefix_tail(**mixed, prefix=pair, out=out, lse=lse, workspace=workspace)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a launch on any other stream is an error here
        step()
    for x in (*results[0], *results[1]):
        x.fill_(255)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(results[0], whole)
    check_results(tuple(map(to_host, results[1])), inputs, "flash")


# Prefix and tail


def test_prefix_and_tail():
    inputs = make_inputs(Case("flash_tail", (700,), Q=17, H=9, padded=2, **MODEL))
    given = on_device(inputs, "torch")
    prefix_given = {name: x for name, x in given.items() if name != "tree_mask"}
    pair = dd.prefix_attention(**prefix_given)
    check_results(tuple(map(to_host, pair)), inputs, "flash", "prefix")
    whole = attend(**given)
    for prefix in (pair, dd.prefix_attention):
        results = tuple(map(to_host, dd.verify_attention_prefix_tail(**given, prefix=prefix)))
        check_results(results, inputs, "flash")
        np.testing.assert_allclose(results[0], to_host(whole[0]), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(results[1], to_host(whole[1]), rtol=1e-6, atol=1e-6)
    empty = inputs | {"cache_seqlens": np.zeros(1, np.int32), "tree_mask": inputs["tree_mask"]}
    results = dd.verify_attention_prefix_tail(**on_device(empty, "torch"), prefix=dd.prefix_attention)
    check_results(tuple(map(to_host, results)), empty, "flash")


def test_prefix_and_tail_in_bfloat16_from_another_backend():
    torch = library("torch")
    case = Case("flash_tail_bfloat16", (700, 37), Q=17, H=9, dtype="bfloat16", **MODEL)
    inputs = make_inputs(case)
    given = on_device(inputs, "torch")

    def theirs(q: Any, kv_cache: Any, cache_seqlens: Any, **options: Any) -> tuple[Any, Any]:
        assert options["block_table"] is None
        outs, lses = [], []
        for b, length in enumerate(cache_seqlens.tolist()):
            rows = kv_cache[b, :length].float()
            s = q[b].float() @ rows.T * options["sm_scale"]
            outs.append(torch.softmax(s, dim=-1) @ rows[:, : options["kv_lora_rank"]])
            lses.append(torch.logsumexp(s, dim=-1))
        return torch.stack(outs), torch.stack(lses)

    results = dd.verify_attention_prefix_tail(**given, prefix=theirs)
    check_results(tuple(map(to_host, results)), inputs, "flash")


def test_prefix_and_tail_in_a_graph():
    torch = library("torch")
    case = Case("flash_tail_graph", (1500,), Q=9, H=16, slack=0, **MODEL)
    inputs = make_inputs(case)
    given = on_device(inputs, "torch")
    prefix_given = {name: x for name, x in given.items() if name != "tree_mask"}
    shape = (1, 9, 16)
    pair, results = ((torch.zeros((*shape, 512), device="cuda"), torch.zeros(shape, device="cuda")) for _ in range(2))
    of_prefix = {"out": pair[0], "lse": pair[1], "workspace": bytes_on_gpu(scratch_size(inputs))}
    of_tail = {"out": results[0], "lse": results[1], "workspace": bytes_on_gpu(scratch_size(inputs, prefix_tail=True))}

    def step() -> None:
        dd.prefix_attention(**prefix_given, **of_prefix)
        dd.verify_attention_prefix_tail(**given, prefix=pair, **of_tail)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, length in ((1, 1500), (2, 0), (3, 31)):
        later = make_inputs(case, seed=seed)
        later["cache_seqlens"] = np.array([length], np.int32)
        refill(given, later)
        for x in (*of_prefix.values(), *of_tail.values()):
            x.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        found = tuple(map(to_host, results))
        eager = dd.verify_attention_prefix_tail(**given, prefix=dd.prefix_attention(**prefix_given))
        assert_same_bits(found, eager)
        check_results(found, later, "flash")
