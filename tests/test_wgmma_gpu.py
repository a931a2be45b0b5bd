"""Variant wgmma on a GPU of compute capability 9.x: reference files, corner cases, random shapes, graphs, plans.

What needs no GPU is in test_wgmma.py and test_schedule.py. Each combination of input format, result format and kind of
mask is compiled, which takes some eleven seconds, so there are few: `MADE` holds them all, and a test keeps count.
Masks are packed unless a test says otherwise, and all arrays are PyTorch's in C order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import BFLOAT16, Case, arguments, as_float, exact_results, make_inputs, pack
from test_flash_gpu import bytes_on_gpu, refill
from test_mma import REFERENCES, reference_inputs
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
from ddtree_numba.attention import verify
from ddtree_numba.compare import compare
from ddtree_numba.device.launch import compute_capability
from ddtree_numba.device.runtime import SIMULATOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
    pytest.mark.skipif(
        not SIMULATOR and compute_capability(-1)[0] != 9, reason="these kernels are for compute capability 9.x alone"
    ),
]

# q and cache, out, mask
MADE = {
    ("bfloat16", "bfloat16", "packed"),
    ("bfloat16", "float32", "packed"),
    ("bfloat16", "bfloat16", "bool"),
    ("float16", "float16", "packed"),
}
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])

# Relative to the norm: a rounding of each weight, and for results in 16 bits one of each result.
BOUNDS = {"float32": 2.0e-3, "bfloat16": 3.0e-3, "float16": 6.0e-4}
used: set[tuple[str, str, str]] = set()


def made_for(given: dict[str, Any]) -> tuple[str, str, str]:
    q, mask = given["q"], given["tree_mask"]
    dtype = str(q.dtype).split(".")[-1]
    out = dtype if given.get("out_dtype") is None else str(given["out_dtype"])
    return dtype, out, "bool" if mask is not None and "bool" in str(mask.dtype) else "packed"


def attend(**given: Any) -> Any:
    """NumPy arrays by way of PyTorch, whose strides are C's."""
    if isinstance(given["q"], np.ndarray):
        given = {name: to_torch(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
        return tuple(map(to_host, attend(**given)))
    used.add(made_for(given))
    return dd.verify_attention(**given, variant="wgmma")


def check_against_oracle(results: tuple[np.ndarray, np.ndarray], inputs: dict[str, Any]) -> None:
    out, lse = as_float(results[0]), results[1]
    exact, exact_lse = exact_results(inputs)
    compare(out, exact, name="out", rel_frobenius=BOUNDS[out.dtype.name]).check()
    empty = np.isneginf(exact_lse)
    assert not out[empty].any() and np.isneginf(lse[empty]).all(), "rows that see nothing"
    assert np.isfinite(lse[~empty]).all()
    error = np.abs(np.subtract(lse, exact_lse, where=~empty, out=np.zeros_like(exact_lse)))
    bound = np.where(np.abs(exact_lse) > 10, 1e-5 * np.abs(np.where(empty, 0, exact_lse)), 1e-4)
    assert (error <= np.where(empty, 1, bound)).all(), f"FAIL lse: {error.max():.2e}"


def check(inputs: dict[str, Any], **options: Any) -> None:
    check_against_oracle(attend(**arguments(inputs, **options)), inputs)


def case(name: str, prefixes: tuple[int, ...], dtype: str = "bfloat16", **given: Any) -> Case:
    return Case(f"wgmma_{name}", prefixes, dtype=dtype, **MODEL | given)


# Against the oracle


@each_dtype
@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_reference_files(path, dtype):
    check(contiguous(reference_inputs(path, dtype)))


def contiguous(inputs: dict[str, Any]) -> dict[str, Any]:
    """The rows of pages of other sizes than wgmma takes, request by request."""
    table, cache = inputs["block_table"], inputs["kv_cache"]
    if table is None or cache.shape[1] % 64 == 0:
        return inputs
    rows = cache[np.clip(table, 0, len(cache) - 1)].reshape(len(table), -1, cache.shape[2])
    return inputs | {"kv_cache": rows, "block_table": None}


def test_results_in_float32():
    check(make_inputs(case("float32", (3000, 37, 0), Q=17, H=9)), out_dtype="float32")


@each_dtype
@pytest.mark.parametrize("page_size", [None, 64, 128, 192])
def test_ragged_lengths_and_pages(page_size, dtype):
    lengths = (3000, 37, 0, 0, 2047, 2048, 63, 64)
    check(make_inputs(case("ragged", lengths, dtype, Q=17, H=9, page_size=page_size, padded=2, idle=(3,))))


@pytest.mark.parametrize("Q", [1, 2, 64, 65])
def test_lengths_around_tiles(Q):
    lengths = {0, 1, *(n * 64 + k - own for n in (1, 2, 3) for k in (-1, 0, 1) for own in (0, Q))}
    check(make_inputs(case("around", tuple(sorted(n for n in lengths if n >= 0)), Q=Q, H=2, page_size=64)))


@pytest.mark.parametrize("H", [1, 3, 7, 16, 40, 63, 64, 65, 128])
def test_heads_that_do_not_divide_64(H):
    check(make_inputs(case("heads", (700, 90), Q=5, H=H)))


@each_dtype
@pytest.mark.parametrize("Q", [513, 1025])
def test_large_trees(Q, dtype):
    check(make_inputs(case("large", (5, 900), dtype, Q=Q, H=1, page_size=64)))


@pytest.mark.parametrize("batch", [1, 7, 133, 300])
def test_many_requests(batch):
    lengths = tuple(int(n) for n in np.random.default_rng(batch).integers(0, 900, batch))
    check(make_inputs(case("many", lengths, Q=3, H=8, page_size=64)))


def test_one_long_request_over_the_whole_gpu():
    check(make_inputs(case("long", (40000,), Q=9, H=8, page_size=64)))


@pytest.mark.parametrize("mask", ["bool", "causal"])
@pytest.mark.parametrize("Q", [5, 33, 65, 129])
def test_kinds_of_masks(mask, Q):
    inputs = make_inputs(case("masks", (100, 0), Q=Q, H=3, mask=mask, tree="chain" if mask == "causal" else "random"))
    check(inputs)


def test_bool_and_packed_masks_give_the_same_bits():
    inputs = make_inputs(case("both", (300, 17, 0), Q=70, H=4, mask="bool", padded=3))
    packed = arguments(inputs, tree_mask=pack(inputs["tree_mask"]))
    assert_same_bits(attend(**arguments(inputs)), attend(**packed))


@pytest.mark.parametrize("logit_std", [0.02, 4.0, 12.0, 200.0])
def test_spreads_of_logits(logit_std):
    check(make_inputs(case("spread", (1000, 37), Q=9, H=8, logit_std=logit_std)))


@pytest.mark.parametrize("step", [0.01, 0.1, 1.0, 40.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_rising_and_falling_scores(step, sign):
    """References lag behind scores that rise by ``step`` nats a key, and stay where they fall."""
    inputs = make_inputs(case("rising", (200,), Q=1, H=4))
    q, cache = np.zeros_like(inputs["q"]), inputs["kv_cache"].copy()
    q[..., -1] = sign
    cache[0, :201, -1] = np.arange(201)
    check(inputs | {"q": q, "kv_cache": cache, "sm_scale": step})


@pytest.mark.parametrize("tens", range(30))
def test_random_shapes_and_trees(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        given = random_case(seed)
        print(f"seed {seed}: {given}, {given.dtype}, {given.prefixes}, Q {given.Q}, H {given.H}, {given.page_size}")
        check(make_inputs(given, seed=seed))


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    batch, num_nodes = int(rng.integers(1, 9)), int(rng.choice([1, 2, 5, 9, 17, 33, 65, 129]))
    return Case(
        "wgmma_random",
        tuple(int(n) for n in rng.integers(0, int(rng.choice([1, 40, 700, 3000])), batch)),
        Q=num_nodes,
        H=int(rng.choice([1, 3, 8, 16] if num_nodes > 33 else [1, 3, 8, 16, 40, 64])),
        dtype=str(rng.choice(["bfloat16", "float16"])),
        page_size=None if rng.random() < 0.3 else int(rng.choice([64, 128, 256])),
        padded=int(rng.integers(0, num_nodes)) if rng.random() < 0.3 else 0,
        tree=str(rng.choice(["random", "chain", "star"])),
        logit_std=float(rng.choice([0.02, 1.5, 4.0, 12.0])),
        slack=int(rng.integers(0, 140)),
        **MODEL,
    )


@pytest.mark.parametrize("prefix", [0, 200])
def test_each_mask_bit(prefix):
    """With q = 0 and unit vectors for rows, output k of a node is 1/n if it sees key k, of n keys."""
    num_nodes, width = 257, 512
    num_keys = prefix + num_nodes
    mask = np.random.default_rng(prefix).random((1, num_nodes, num_nodes)) < 0.5
    cache = np.zeros((1, num_keys, width + 64), BFLOAT16)
    cache[0, :, :num_keys] = np.eye(num_keys)
    seen = np.concatenate([np.ones((1, num_nodes, prefix), np.bool_), mask], axis=2)
    count = seen.sum(axis=2, dtype=np.float32)
    expected = np.zeros((1, num_nodes, width), np.float32)
    expected[..., :num_keys] = seen / np.maximum(count, np.float32(1))[..., None]
    out, lse = attend(
        q=np.zeros((1, num_nodes, 1, width + 64), BFLOAT16),
        kv_cache=cache,
        cache_seqlens=np.array([prefix], np.int32),
        tree_mask=pack(mask),
        sm_scale=1.0,
        out_dtype="float32",
    )
    np.testing.assert_allclose(out[:, :, 0], expected, rtol=2e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[:, :, 0], np.log(count.astype(np.float64)), rtol=1e-6, atol=1e-6)


# What may hold NaN


@pytest.mark.parametrize("page_size", [None, 64])
def test_nan_where_no_result_depends_on_it(page_size):
    """Behind lengths, in unused pages, in idle requests: the bits are those of zeros there."""
    inputs = make_inputs(case("poison", (600, 37, 0, 130), Q=9, H=4, page_size=page_size, slack=200, idle=(2,)))
    clean = np.nan_to_num(inputs["kv_cache"].astype(np.float32)).astype(inputs["kv_cache"].dtype)
    expected = attend(**arguments(inputs, kv_cache=clean))
    assert_same_bits(attend(**arguments(inputs)), expected)


def test_nan_queries_stay_in_their_row_and_nan_rows_in_their_request():
    inputs = make_inputs(case("nan", (600, 37), Q=9, H=4))
    expected = attend(**arguments(inputs))
    q, cache = inputs["q"].copy(), inputs["kv_cache"].copy()
    q[0, 2, 1, 575] = np.nan
    cache[1, 20] = np.nan
    out, lse = attend(**arguments(inputs, q=q, kv_cache=cache))
    others = np.ones((9, 4), np.bool_)
    others[2, 1] = False
    assert np.isnan(as_float(out)[0, 2, 1]).all() and np.isnan(lse[0, 2, 1]), "a NaN query"
    assert np.isnan(as_float(out)[1]).all() and np.isnan(lse[1]).all(), "a NaN row that all nodes see"
    # Not bit by bit: the references of a warp's rows move together.
    out, exact = (as_float(x)[0][others].astype(np.float64) for x in (out, expected[0]))
    compare(out, exact, name="out", rel_frobenius=BOUNDS["bfloat16"]).check()
    np.testing.assert_allclose(lse[0][others], expected[1][0][others], atol=1e-4)


# Layouts


@pytest.mark.parametrize("pair", [False, True])
def test_queries_and_rows_between_others(pair):
    inputs = make_inputs(case("between", (300, 3), Q=5, H=4))
    given = on_device(inputs, "torch")
    expected = attend(**given)
    torch = library("torch")
    q = torch.full((2, 5, 4, 640), float("nan"), dtype=torch.bfloat16, device="cuda")
    q[..., 32:608] = given["q"]
    cache = torch.full((*given["kv_cache"].shape[:2], 592), float("nan"), dtype=torch.bfloat16, device="cuda")
    cache[..., 8:584] = given["kv_cache"]
    part = q[..., 32:608]
    # The halves' q_pe lies elsewhere.
    moved = (part[..., :512], part[..., 512:].contiguous()) if pair else part
    used.add(("bfloat16", "bfloat16", "packed"))
    found = dd.verify_attention(**given | {"q": moved, "kv_cache": cache[..., 8:584]}, variant="wgmma")
    assert_same_bits(found, expected)


def test_results_of_other_strides_and_numpy_arrays():
    inputs = make_inputs(case("results", (300, 3), Q=5, H=4))
    given = on_device(inputs, "torch")
    expected = attend(**given)
    torch = library("torch")
    out = torch.zeros((4, 2, 5, 520), dtype=torch.bfloat16, device="cuda").permute(1, 2, 0, 3)[..., 3:515]
    lse = torch.zeros((4, 5, 2), device="cuda").permute(2, 1, 0)
    assert_same_bits(attend(**given, out=out, lse=lse), expected)
    host = dd.verify_attention(**arguments(inputs), variant="wgmma")
    assert_same_bits(host, tuple(map(to_host, expected)))


# Bits, streams, graphs


@each_dtype
def test_the_same_bits_in_every_run(dtype):
    """Also beside kernels that fill the GPU."""
    torch = library("torch")
    given = on_device(make_inputs(case("again", (4000, 37, 900, 2500), dtype, Q=17, H=16, slack=0)), "torch")
    first = attend(**given)
    run_beside_another_stream(lambda: attend(**given), first)
    torch.cuda.synchronize()


def scratch_size(inputs: dict[str, Any]) -> int:
    batch, num_nodes, num_heads, _ = inputs["q"].shape
    capacity = inputs["kv_cache"].shape[1] - num_nodes
    return int(dd.workspace_bytes(batch, num_nodes, num_heads, capacity, variant="wgmma"))


@pytest.mark.parametrize("offset", [0, 16, 112])
def test_a_workspace_of_just_the_bytes_that_it_needs(offset):
    inputs = make_inputs(case("workspace", (3000, 5), Q=9, H=16))
    given = on_device(inputs, "torch")
    expected = attend(**given)
    nbytes = scratch_size(inputs)
    memory = bytes_on_gpu(offset + nbytes + 4096)
    assert_same_bits(attend(**given, workspace=memory[offset : offset + nbytes]), expected)
    assert bool((memory[:offset] == 255).all()) and bool((memory[offset + nbytes :] == 255).all()), "written beside it"


def test_eight_streams_at_once():
    torch = library("torch")
    problems = []
    for seed in range(8):
        given = on_device(make_inputs(case("streams", (2000 - 200 * seed, 37), Q=9, H=16), seed=seed), "torch")
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


LATER = ((1, (0, 3000, 1)), (2, (3000, 3000, 3000)), (3, (16, 0, 2047)))


@pytest.mark.parametrize("planned", [False, True])
def test_graph_replays_with_other_contents_and_lengths(planned):
    """Also with a plan that is made within the graph, for two layers."""
    torch = library("torch")
    inputs = make_inputs(case("graph", (3000, 37, 2100), Q=9, H=16, slack=0))
    given = on_device(inputs, "torch")
    buffers = [
        {
            "out": torch.zeros((3, 9, 16, 512), dtype=torch.bfloat16, device="cuda"),
            "lse": torch.zeros((3, 9, 16), device="cuda"),
            "workspace": bytes_on_gpu(scratch_size(inputs)),
        }
        for _ in range(2 if planned else 1)
    ]

    def step() -> None:
        plan = None
        if planned:
            plan = dd.plan_attention(given["cache_seqlens"], num_nodes=9, num_heads=16, max_seqlen=3000)
        for layer in buffers:
            attend(**given, **layer, plan=plan)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, lengths in LATER:
        later = make_inputs(case("graph", (3000, 37, 2100), Q=9, H=16, slack=0), seed=seed)
        clean = np.nan_to_num(later["kv_cache"].astype(np.float32))  # rows of longer prefixes
        later["kv_cache"] = clean.astype(inputs["kv_cache"].dtype)
        later["cache_seqlens"] = np.array(lengths, np.int32)
        refill(given, later)
        for layer in buffers:
            for x in layer.values():
                x.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        expected = attend(**given)
        for layer in buffers:
            assert_same_bits((layer["out"], layer["lse"]), expected)
        check_against_oracle((to_host(buffers[0]["out"]), to_host(buffers[0]["lse"])), later)


# Plans


def test_one_plan_serves_all_layers():
    torch = library("torch")
    layers = [make_inputs(case("layers", (2500, 0, 700), Q=9, H=16, page_size=64), seed=seed) for seed in range(4)]
    lengths = to_torch(layers[0]["cache_seqlens"])
    most = layers[0]["block_table"].shape[1] * 64 - 9
    plan = dd.plan_attention(lengths, num_nodes=9, num_heads=16, max_seqlen=most)
    for inputs in layers:
        given = on_device(inputs, "torch")
        assert_same_bits(attend(**given, plan=plan), attend(**given))
    memory = bytes_on_gpu(scratch_size(layers[0]) + 64)
    assert_same_bits(attend(**given, plan=plan, workspace=memory), attend(**given))
    torch.cuda.synchronize()


def test_a_plan_of_the_longest_prefixes_clamps_the_lengths():
    inputs = make_inputs(case("clamped", (1000, 200), Q=5, H=8))
    given = on_device(inputs, "torch")
    plan = dd.plan_attention(given["cache_seqlens"], num_nodes=5, num_heads=8, max_seqlen=300)
    expected = attend(**given, max_seqlen=300)
    assert_same_bits(attend(**given, plan=plan), expected)


@pytest.mark.parametrize("given_lengths", ["the same", "others"])
def test_a_plan_that_cuts_no_row_tile_by_lengths_on_the_host(given_lengths):
    """Nothing is merged, and results are right even where the host's lengths are not those of the device."""
    prefixes = (130,) * 66
    found = prefixes if given_lengths == "the same" else tuple(range(0, 660, 10))
    inputs = make_inputs(case("whole", found, Q=9, H=8))
    given = on_device(inputs, "torch")
    most = inputs["kv_cache"].shape[1] - 9
    known = np.array(prefixes, np.int32)
    plan = dd.plan_attention(given["cache_seqlens"], num_nodes=9, num_heads=8, max_seqlen=most, host_lengths=known)
    assert not plan.merges, "this GPU has other multiprocessors than the sizes are for"
    check_against_oracle(tuple(map(to_host, attend(**given, plan=plan))), inputs)


def test_lengths_on_the_host_must_be_there():
    lengths = to_torch(np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="^host_lengths is on GPU 0; it must be in the host's memory"):
        dd.plan_attention(lengths, num_nodes=3, num_heads=8, max_seqlen=9, host_lengths=lengths)


def test_wrong_plans_are_refused():
    given = on_device(make_inputs(case("refused", (100, 200), Q=5, H=8)), "torch")
    lengths = given["cache_seqlens"]
    for sizes in ((2, 4, 8, 100), (2, 5, 9, 100), (2, 5, 8, 10**6), (1, 5, 8, 100)):
        batch, num_nodes, num_heads, most = sizes
        plan = dd.plan_attention(lengths[:batch], num_nodes=num_nodes, num_heads=num_heads, max_seqlen=most)
        with pytest.raises(ValueError, match="^plan is for B = "):
            attend(**given, plan=plan)


# What auto makes of it


@pytest.mark.parametrize("page_size", [None, 64, 16])
def test_auto_takes_it_where_it_can_and_mma_elsewhere(monkeypatch, page_size):
    """Bit for bit, with and without a plan, in a workspace of the stated size."""
    monkeypatch.setattr(verify, "WGMMA_PAIRS", 1)
    inputs = make_inputs(case("auto", (3000, 37), Q=9, H=16, page_size=page_size))
    given = on_device(inputs, "torch")
    capacity = inputs["kv_cache"].shape[1] if page_size is None else inputs["block_table"].shape[1] * page_size
    lengths = given["cache_seqlens"]
    plan = dd.plan_attention(lengths, num_nodes=9, num_heads=16, max_seqlen=capacity - 9)
    memory = bytes_on_gpu(dd.workspace_bytes(2, 9, 16, capacity - 9))
    taken = "mma" if page_size == 16 else "wgmma"
    expected = dd.verify_attention(**given, variant=taken)
    for options in ({}, {"plan": plan}, {"workspace": memory}, {"workspace": memory, "plan": plan}):
        assert_same_bits(dd.verify_attention(**given, **options), expected)
    expected = dd.verify_attention(**given, batch_invariant=True, variant="mma")
    found = dd.verify_attention(**given, batch_invariant=True, plan=plan)
    assert_same_bits(found, expected)
    check_against_oracle((to_host(found[0]), to_host(found[1])), inputs)


# Beside kernels that fill the GPU, with blocks of one step still waiting for room


def test_beside_a_kernel_that_fills_the_gpu():
    torch = library("torch")
    given = on_device(make_inputs(case("beside", (3000, 1500, 37), Q=17, H=16)), "torch")
    first = attend(**given)
    torch.cuda.synchronize()
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(streams[0]):
        for _ in range(50):
            torch.mm(matrix, matrix)
    with torch.cuda.stream(streams[1]):
        found = [attend(**given) for _ in range(50)]
    torch.cuda.synchronize()
    for results in found:
        assert_same_bits(results, first)


def test_few_kernels_were_compiled():
    """Stands last: each of them takes eleven seconds."""
    assert used <= MADE, f"not foreseen: {used - MADE}"
