"""Variant mma on a CUDA GPU: reference files, corner cases, random shapes, streams, graphs, runs.

What holds on any backend is in test_mma.py, whose kernels run on the GPU too. Each combination of tiles, formats and
layouts is compiled, which takes some ten seconds, so there are few: bfloat16 and float16, packed masks, float32 out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import Case, arguments, exact_results, make_inputs, pack
from test_flash_gpu import bytes_on_gpu, refill
from test_mma import REFERENCES, check_against_oracle, reference_inputs
from test_trees_gpu import run_beside_another_stream
from test_verify_attention_gpu import (
    MODEL,
    SLEEP_CYCLES,
    assert_same_bits,
    library,
    on_device,
    to_host,
    to_torch,
)

import ddtree_numba as dd
from ddtree_numba.attention import mma
from ddtree_numba.device.launch import shared_bytes_limit
from ddtree_numba.device.runtime import SIMULATOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
]

SPLITS: list[dict[str, Any]] = [{}, {"num_splits": 1}, {"num_splits": 3}, {"num_splits": 50}, {"batch_invariant": True}]
INVARIANT = [{"num_splits": 1}, {"num_splits": 2}, {"batch_invariant": True}]
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
each_tiles = pytest.mark.parametrize("tiles", [mma.SMALL, mma.MEDIUM, mma.LARGE], ids=["small", "medium", "large"])


def use(monkeypatch: pytest.MonkeyPatch, tiles: mma.Tiles) -> None:
    """These tiles alone, where the GPU has room for them."""
    if not SIMULATOR and mma.shared_bytes(tiles) > shared_bytes_limit(-1):
        pytest.skip("this GPU has no room for these tiles, and does not take them")
    monkeypatch.setattr(mma, "TILES", (tiles,))


def attend(**given: Any) -> Any:
    """Results in float32 unless asked for otherwise. NumPy arrays by way of PyTorch, whose strides are C's."""
    if isinstance(given["q"], np.ndarray):
        given = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
        return tuple(map(to_host, attend(**given)))
    return dd.verify_attention(**{"out_dtype": "float32"} | given, variant="mma")


def check(inputs: dict[str, Any], **options: Any) -> None:
    check_against_oracle(attend(**arguments(inputs, **options)), inputs)


# Against the oracle


@each_dtype
@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_reference_files(path, dtype):
    inputs = reference_inputs(path, dtype)
    for options in ({}, {"num_splits": 2}):
        check(inputs, **options)


@pytest.mark.parametrize("options", SPLITS, ids=str)
@each_tiles
def test_splits_and_long_prefixes(monkeypatch, tiles, options):
    use(monkeypatch, tiles)
    lengths = (3000, 37, 0, 0, 2047, 2048)
    case = Case("mma_ragged", lengths, Q=17, H=9, page_size=16, padded=2, idle=(3,), dtype="bfloat16", **MODEL)
    check(make_inputs(case), **options)


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}], ids=str)
@each_tiles
def test_lengths_around_tiles(monkeypatch, tiles, options):
    use(monkeypatch, tiles)
    N = tiles.keys
    prefixes = (0, 1, N - 2, N - 1, N, N + 1, 2 * N - 2, 2 * N - 1, 2 * N)
    check(make_inputs(Case("mma_around", prefixes, Q=1, H=2, dtype="bfloat16", **MODEL)), **options)


@pytest.mark.parametrize("seed", range(100))
def test_random_shapes_and_trees(seed):
    rng = np.random.default_rng(seed)
    batch, num_nodes = int(rng.integers(1, 5)), int(rng.choice([1, 2, 5, 9, 17, 33, 65, 129]))
    case = Case(
        "mma_random",
        tuple(int(n) for n in rng.integers(0, int(rng.choice([1, 40, 700, 3000])), batch)),
        Q=num_nodes,
        H=int(rng.choice([1, 3, 8, 16] if num_nodes > 33 else [1, 3, 8, 16, 64])),
        dtype=str(rng.choice(["bfloat16", "float16"])),
        page_size=None if rng.random() < 0.3 else int(rng.choice([1, 3, 16, 64])),
        padded=int(rng.integers(0, num_nodes)) if rng.random() < 0.3 else 0,
        tree=str(rng.choice(["random", "chain", "star"])),
        logit_std=float(rng.choice([0.02, 1.5, 4.0, 12.0])),
        slack=int(rng.integers(0, 40)),
        **MODEL,
    )
    check(make_inputs(case, seed=seed), **SPLITS[seed % len(SPLITS)])


@each_dtype
def test_a_tree_of_1025_nodes(dtype):
    check(make_inputs(Case("mma_1025", (5,), Q=1025, H=1, dtype=dtype, page_size=16, **MODEL)))


@pytest.mark.parametrize("prefix", [0, 200])
def test_each_mask_bit(prefix):
    """With q = 0 and unit vectors for rows, output k of a node is 1/n if it sees key k, of n keys."""
    num_nodes, width = 257, 512
    num_keys = prefix + num_nodes
    mask = np.random.default_rng(prefix).random((1, num_nodes, num_nodes)) < 0.5
    cache = np.zeros((1, num_keys, width + 64), np.float16)
    cache[0, :, :num_keys] = np.eye(num_keys, dtype=np.float16)
    seen = np.concatenate([np.ones((1, num_nodes, prefix), np.bool_), mask], axis=2)
    count = seen.sum(axis=2, dtype=np.float32)
    expected = np.zeros((1, num_nodes, width), np.float32)
    expected[..., :num_keys] = seen / np.maximum(count, np.float32(1))[..., None]
    for options in SPLITS:
        out, lse = attend(
            q=np.zeros((1, num_nodes, 1, width + 64), np.float16),
            kv_cache=cache,
            cache_seqlens=np.array([prefix], np.int32),
            tree_mask=pack(mask),
            sm_scale=1.0,
            **options,
        )
        np.testing.assert_allclose(out[:, :, 0], expected, rtol=3e-7)  # states of split rows are weighed twice
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[:, :, 0], np.log(count.astype(np.float64)), rtol=1e-6)


@pytest.mark.parametrize("options", SPLITS, ids=str)
def test_nodes_that_see_themselves_alone_get_their_own_row(options):
    inputs = make_inputs(Case("mma_alone", (0,), Q=70, H=2, dtype="bfloat16", **MODEL))
    eye = np.eye(70, dtype=np.bool_)[None]
    out, _ = attend(**arguments(inputs, tree_mask=pack(eye)), **options)
    own = np.repeat(inputs["kv_cache"][:, :70, None, :512].astype(np.float32), 2, axis=2)
    np.testing.assert_array_equal(out, own)


def test_nan_where_no_result_depends_on_it():
    case = Case("mma_poison", (600, 37, 0), Q=9, H=4, page_size=16, slack=40, idle=(2,), dtype="bfloat16", **MODEL)
    inputs = make_inputs(case)
    clean = np.nan_to_num(inputs["kv_cache"].astype(np.float32)).astype(inputs["kv_cache"].dtype)
    for options in SPLITS:
        expected = attend(**arguments(inputs, kv_cache=clean), **options)
        assert_same_bits(attend(**arguments(inputs), **options), expected)


@pytest.mark.parametrize("options", SPLITS, ids=str)
def test_nan_queries_stay_in_their_row_and_nan_rows_in_their_request(options):
    inputs = make_inputs(Case("mma_nan", (600, 37), Q=9, H=4, dtype="bfloat16", **MODEL))
    expected = attend(**arguments(inputs), num_splits=3)
    q, cache = inputs["q"].copy(), inputs["kv_cache"].copy()
    q[0, 2, 1, 575] = np.nan
    q[0, 5, 3] = np.inf
    cache[1, 20] = np.nan
    out, lse = attend(**arguments(inputs, q=q, kv_cache=cache), num_splits=3)
    assert np.isnan(out[0, 2, 1]).all() and np.isnan(lse[0, 2, 1])
    others = np.ones((9, 4), np.bool_)
    others[2, 1] = others[5, 3] = False
    assert_same_bits((out[0][others], lse[0][others]), (expected[0][0][others], expected[1][0][others]))
    assert np.isfinite(attend(**arguments(inputs), **options)[0]).all()


def test_page_numbers_above_a_million():
    torch = library("torch")
    num_pages, page_size = 1_100_000, 4
    if torch.cuda.mem_get_info()[0] < 10e9:
        pytest.skip("needs 10 GB of free GPU memory")
    assert num_pages * page_size * 576 > 2**31
    inputs = make_inputs(Case("mma_millions", (31,), Q=5, H=4, dtype="bfloat16", page_size=4, slack=20, **MODEL))
    expected = attend(**arguments(inputs))
    pages = torch.full((num_pages, page_size, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    given = on_device(inputs, "torch")
    ids = [num_pages - 1, 0, 1_000_001, 932_067, 932_068, 466_033, 466_034, 1, 1_048_576]
    table = np.full_like(inputs["block_table"], 2147480000)
    table[0, : len(ids)] = ids
    for page, home in zip(ids, inputs["block_table"][0], strict=False):
        pages[page] = given["kv_cache"][int(home)]
    given |= {"kv_cache": pages, "block_table": to_torch(table)}
    assert_same_bits(attend(**given, validate=True), expected)
    del pages, given
    torch.cuda.empty_cache()


# Bits


@pytest.mark.parametrize("options", INVARIANT, ids=str)
def test_bits_do_not_depend_on_other_requests(options):
    inputs = make_inputs(Case("mma_others", (5000, 100, 3000, 0), Q=9, H=16, dtype="bfloat16", **MODEL))
    given = on_device(inputs, "torch")
    expected = tuple(map(to_host, attend(**given, **options)))
    for b, length in ((0, 17), (2, 2049), (1, 0)):
        lengths = inputs["cache_seqlens"].copy()
        lengths[b] = length
        others = [n for n in range(4) if n != b]
        out, lse = map(to_host, attend(**given | {"cache_seqlens": to_torch(lengths)}, **options))
        assert_same_bits((out[others], lse[others]), (expected[0][others], expected[1][others]))


@each_dtype
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}], ids=str)
def test_the_same_bits_in_every_run(dtype, options):
    torch = library("torch")
    case = Case("mma_again", (4000, 37, 900, 2500), Q=17, H=16, dtype=dtype, slack=0, **MODEL)
    given = on_device(make_inputs(case), "torch")
    first = attend(**given, **options)
    run_beside_another_stream(lambda: attend(**given, **options), first)
    torch.cuda.synchronize()


# Workspace, streams, graphs


def scratch_size(inputs: dict[str, Any], **options: Any) -> int:
    batch, num_nodes, num_heads, _ = inputs["q"].shape
    capacity = inputs["kv_cache"].shape[1] - num_nodes
    return dd.workspace_bytes(batch, num_nodes, num_heads, capacity, variant="mma", **options)


@pytest.mark.parametrize("options", SPLITS, ids=str)
def test_a_workspace_of_just_the_bytes_that_it_needs(options):
    inputs = make_inputs(Case("mma_workspace", (3000, 5), Q=9, H=16, dtype="bfloat16", **MODEL))
    given = on_device(inputs, "torch")
    expected = attend(**given, **options)
    nbytes = scratch_size(inputs, **options)
    memory = bytes_on_gpu(nbytes + 4096)
    assert_same_bits(attend(**given, **options, workspace=memory[:nbytes]), expected)
    assert bool((memory[nbytes:] == 255).all()), "something was written behind the workspace"


def test_eight_streams_at_once():
    torch = library("torch")
    problems = []
    for seed in range(8):
        case = Case("mma_streams", (2000 - 200 * seed, 37), Q=9, H=16, dtype="bfloat16", **MODEL)
        given = on_device(make_inputs(case, seed=seed), "torch")
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


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"batch_invariant": True}], ids=str)
def test_graph_replays_with_other_contents_and_lengths(options):
    torch = library("torch")
    case = Case("mma_graph", (3000, 37, 2100), Q=9, H=16, slack=0, dtype="bfloat16", **MODEL)
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
        clean = np.nan_to_num(later["kv_cache"].astype(np.float32))  # rows of longer prefixes
        later["kv_cache"] = clean.astype(inputs["kv_cache"].dtype)
        later["cache_seqlens"] = np.array(lengths, np.int32)
        refill(given, later)
        for x in buffers.values():
            x.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        results = tuple(map(to_host, (buffers["out"], buffers["lse"])))
        assert_same_bits(results, attend(**given, **options))
    check_against_oracle(results, later)


def test_numpy_arrays_and_rows_in_the_middle_of_others():
    inputs = make_inputs(Case("mma_numpy", (40, 3), Q=5, H=2, dtype="float16", **MODEL))
    expected = attend(**arguments(inputs))
    given = arguments(inputs) | {"out_dtype": np.float32, "variant": "mma"}
    assert_same_bits(dd.verify_attention(**given), expected)
    right = on_device(inputs, "torch")
    torch = library("torch")
    big = torch.zeros((*right["q"].shape[:-1], 640), dtype=right["q"].dtype, device="cuda")
    big[..., 32:608] = right["q"]
    assert_same_bits(attend(**right | {"q": big[..., 32:608]}), expected)
    exact, _ = exact_results(inputs)
    assert exact.shape == expected[0].shape
