"""topk_logprobs and build_tree on a CUDA GPU: every kind of array, the caller's stream, graphs, full sizes.

What holds on any backend is in test_topk_logprobs.py and test_build_tree.py, which run on the GPU too.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from cases import BFLOAT16
from numba import cuda
from test_verify_attention_gpu import (
    SLEEP_CYCLES,
    TO_KIND,
    each_device_kind,
    each_kind,
    kind_of,
    library,
    to_host,
    to_torch,
)
from tree_cases import (
    EPS,
    NAN,
    TOPK_CASES,
    TREE_CASES,
    check_topk,
    check_trees,
    ended,
    expected_trees,
    falling,
    filled,
    make_logits,
    make_trees,
    random_ids,
    random_trees,
    rounded,
)

import ddtree_numba as dd
from ddtree_numba.device.launch import shared_bytes_limit
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.tree import search
from ddtree_numba.tree.draft_tree import DTYPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
]

TREE_KERNELS, TOPK_KERNELS = ("heap", "frontier"), ("rounds", "threshold")
each_builder = pytest.mark.parametrize("variant", TREE_KERNELS)
each_topk = pytest.mark.parametrize("variant", TOPK_KERNELS)
H200_SHARED_BYTES = 227 * 1024


def on_device(problem: dict[str, Any], kind: str) -> dict[str, Any]:
    """The arguments of build_tree as arrays of one kind."""
    return {name: TO_KIND[kind](x) if isinstance(x, np.ndarray) else x for name, x in problem.items()}


def problem_of(fill: Any, tree_budget: int, *, ids: str = "int32", seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    logprobs = fill(rng)
    return {
        "logprobs": logprobs,
        "token_ids": random_ids(rng, ids, logprobs.shape),
        "root_tokens": random_ids(rng, "int32", logprobs.shape[:1]),
        "tree_budget": tree_budget,
    }


def carrier(x: Any) -> Any:
    """A tensor as signed integers of its size: not every version copies, fills or compares unsigned ones."""
    torch = library("torch")
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def spoil(*tensors: Any) -> None:
    """Fill with what no result holds."""
    for x in tensors:
        carrier(x).fill_(0x55)


def tensors_of(tree: dd.DraftTree) -> list[Any]:
    return [getattr(tree, name) for name in DTYPES]


@functools.lru_cache(maxsize=8)
def solved(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A case of build_tree by name, and its trees."""
    problem = make_trees(next(case for case in TREE_CASES if case.name == name))
    return problem, expected_trees(problem)


# All cases, in every kind


@each_kind
@pytest.mark.parametrize("case", TREE_CASES, ids=str)
@each_builder
def test_trees_of_every_kind(variant, case, kind):
    problem, exact = solved(case.name)
    tree = dd.build_tree(**on_device(problem, kind), variant=variant)
    assert {kind_of(x) for x in tensors_of(tree)} == {kind}
    check_trees(tree, problem, exact)


@each_kind
@pytest.mark.parametrize("case", TOPK_CASES, ids=str)
@each_topk
def test_topk_of_every_kind(variant, case, kind):
    logits = make_logits(case)
    results = dd.topk_logprobs(TO_KIND[kind](logits), case.k, variant=variant)
    assert [kind_of(x) for x in results] == [kind, kind]
    check_topk(tuple(to_host(x) for x in results), logits, case.k)


@each_device_kind
def test_given_results_and_validate(kind):
    problem, exact = solved("requests_of_all_sizes")
    given = on_device(problem, kind)
    out = dd.DraftTree.empty(given["logprobs"], 5, 20, 4)
    assert {kind_of(x) for x in tensors_of(out)} == {kind}
    assert dd.build_tree(**given, out=out, validate=True) is out
    check_trees(out, problem, exact)
    logits = np.random.default_rng(0).standard_normal((2, 3, 1000)).astype(np.float32)
    pair = TO_KIND[kind](np.zeros((2, 3, 9), np.float32)), TO_KIND[kind](np.zeros((2, 3, 9), np.int32))
    results = dd.topk_logprobs(TO_KIND[kind](logits), 9, out=pair)
    assert results[0] is pair[0]
    assert results[1] is pair[1]
    check_topk(tuple(map(to_host, pair)), logits, 9)


@each_device_kind
def test_no_requests(kind):
    problem = problem_of(falling(0, 3, 4), 5)
    check_trees(dd.build_tree(**on_device(problem, kind), validate=True), problem)
    for shape in ((0, 3, 9), (2, 0, 9)):
        logprobs, token_ids = dd.topk_logprobs(TO_KIND[kind](np.zeros(shape, np.float32)), 4)
        assert [kind_of(logprobs), kind_of(token_ids)] == [kind, kind]
        assert [tuple(logprobs.shape), tuple(token_ids.shape)] == [(*shape[:2], 4)] * 2


def test_kinds_may_be_mixed_on_one_gpu():
    problem, exact = solved("plain")
    given = on_device(problem, "torch")
    given["token_ids"] = TO_KIND["cupy"](problem["token_ids"])
    given["root_tokens"] = TO_KIND["numba"](problem["root_tokens"])
    tree = dd.build_tree(**given)
    assert {kind_of(x) for x in tensors_of(tree)} == {"torch"}
    check_trees(tree, problem, exact)


def test_strides_of_torch_tensors():
    torch = library("torch")
    problem, exact = solved("int64_ids")
    given = on_device(problem, "torch")

    def sliced(x: Any) -> Any:
        big = torch.zeros([2 * n + 1 for n in x.shape], dtype=x.dtype, device=x.device)
        inner = big[tuple(slice(1, None, 2) for _ in x.shape)]
        inner.copy_(x)
        return inner

    moved = {name: sliced(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    for variant in TREE_KERNELS:
        check_trees(dd.build_tree(**moved, variant=variant, validate=True), problem, exact)
    logits = np.random.default_rng(0).standard_normal((3, 2, 400)).astype(BFLOAT16)
    plain = to_torch(logits)
    for x in (sliced(plain), plain.transpose(0, 1).contiguous().transpose(0, 1)):
        for variant in TOPK_KERNELS:
            check_topk(tuple(map(to_host, dd.topk_logprobs(x, 11, variant=variant))), logits, 11)
    for start in (1, 2, 3, 4):
        for variant in TOPK_KERNELS:
            results = dd.topk_logprobs(plain[..., start : start + 388], 11, variant=variant)
            check_topk(tuple(map(to_host, results)), logits[..., start : start + 388], 11)


# Random problems, thousands


@pytest.mark.parametrize("seed", range(6))
def test_random_trees(seed):
    rng = np.random.default_rng(1000 + seed)
    count = 0
    while count < 1000:
        problem = random_trees(rng, 100, largest=50)
        exact = expected_trees(problem)
        given = on_device(problem, "torch")
        for variant in TREE_KERNELS:
            check_trees(dd.build_tree(**given, variant=variant), problem, exact)
        count += 100
    # 6 seeds of 1,000 problems: 6,000 in all.


@pytest.mark.parametrize("seed", range(4))
def test_random_larger_trees(seed):
    rng = np.random.default_rng(seed)
    length, candidates, tree_budget = int(rng.integers(4, 33)), int(rng.integers(2, 65)), int(rng.integers(60, 300))
    rows = (rounded, falling, rounded, falling)[seed](8, length, candidates, scale=float(rng.choice([0.1, 2.0])))
    problem = problem_of(ended((1, 2, 1, NAN), (6, 0, 0, NAN), rows=rows), tree_budget, seed=seed)
    exact = expected_trees(problem)
    for variant in TREE_KERNELS:
        check_trees(dd.build_tree(**on_device(problem, "torch"), variant=variant, validate=True), problem, exact)


# Full sizes


def check_all_builders(problem: dict[str, Any], *variants: str) -> None:
    """One computation of the oracle for several variants: for large trees it takes seconds."""
    given, exact = on_device(problem, "torch"), expected_trees(problem)
    for variant in variants:
        check_trees(dd.build_tree(**given, variant=variant), problem, exact)


@pytest.mark.parametrize("fill", [falling, rounded], ids=["falling", "ties"])
def test_a_budget_of_1024_with_1024_candidates(fill):
    # All rows fit the 227 KB of an H200, and not much more.
    fits = shared_bytes_limit(-1) >= H200_SHARED_BYTES
    check_all_builders(problem_of(fill(2, 32, 1024), 1024), "heap", "auto", *(["frontier"] if fits else []))


@pytest.mark.parametrize(
    ("length", "candidates", "tree_budget"),
    [(1, 1024, 1024), (15, 64, 1024), (8, 1000, 1000), (15, 16, 2000), (32, 64, 1023)],
)
def test_large_budgets(length, candidates, tree_budget):
    check_all_builders(problem_of(rounded(2, length, candidates), tree_budget), *TREE_KERNELS)


def test_all_equal_at_a_budget_of_1024():
    check_all_builders(problem_of(filled(1, 32, 32, value=-0.5), 1024), *TREE_KERNELS)


def test_1024_requests():
    ends = ((1023, 2, 0, NAN), (500, 0, 0, NAN), (0, 0, 1, NAN))
    check_all_builders(problem_of(ended(*ends, rows=falling(1024, 8, 16)), 32), *TREE_KERNELS)


@pytest.mark.parametrize("length", [160, 161, 200])
def test_many_positions(length):
    # All ranks of a path count: those of 161 positions are more words than a warp has lanes.
    problem = problem_of(filled(2, length, 2, value=0.0), 220)
    check_all_builders(problem, "heap", "auto", *(["frontier"] if length <= 160 else []))


def test_rows_beyond_shared_memory_are_read_from_global_memory():
    # 1,500 columns of 41 rows are 246 KB.
    problem = problem_of(rounded(2, 40, 1500, scale=0.1), 1500)
    given, exact = on_device(problem, "torch"), expected_trees(problem)
    for variant in ("heap", "auto"):
        check_trees(dd.build_tree(**given, variant=variant), problem, exact)
    with pytest.raises(ValueError, match="frontier.* shared memory"):
        dd.build_tree(**given, variant="frontier")


@each_builder
def test_a_budget_beyond_shared_memory_is_refused_by_name(variant):
    torch = library("torch")
    problem = problem_of(falling(1, 32, 4), search.MAX_BUDGET)
    given = on_device(problem, "torch")
    with pytest.raises(ValueError, match="shared memory") as caught:
        dd.build_tree(**given, variant=variant)
    assert torch.cuda.get_device_name() in str(caught.value)
    smaller = problem | {"tree_budget": 100}
    check_trees(dd.build_tree(**given | {"tree_budget": 100}, variant=variant), smaller)


# topk at full size, beside PyTorch


def check_beside_torch(logits: Any, k: int, results: tuple[Any, Any]) -> None:
    """Values and ids exactly those of a stable sort; logprobs within 4 eps * max(1, |lse|, |logit|) of float64."""
    torch = library("torch")
    logprobs, token_ids = results
    wide = logits.float()
    values, order = torch.sort(wide, dim=-1, descending=True, stable=True)
    chosen = wide.gather(-1, token_ids.long())
    assert torch.equal(chosen, torch.topk(wide, k, dim=-1).values)
    assert torch.equal(chosen, values[..., :k])
    assert torch.equal(token_ids.long(), order[..., :k])
    lse = torch.logsumexp(wide.double(), dim=-1, keepdim=True)
    exact = chosen.double() - lse
    unit = torch.maximum(chosen.double().abs(), lse.abs()).clamp(min=1.0)
    assert float(((logprobs.double() - exact).abs() / unit).max()) <= 4 * EPS
    assert bool((logprobs <= 0).all())
    assert bool((logprobs[..., 1:] <= logprobs[..., :-1]).all())


def random_logits(*shape: int, dtype: str = "bfloat16", std: float = 3.0, seed: int = 0) -> Any:
    torch = library("torch")
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * std).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("k", [1, 8, 64])
def test_topk_of_a_full_vocabulary(k, dtype):
    logits = random_logits(8, 15, 163_840, dtype=dtype)
    check_beside_torch(logits, k, dd.topk_logprobs(logits, k))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_topk
def test_topk_of_a_quarter_of_a_million(variant, dtype):
    logits = random_logits(1, 3, 262_144, dtype=dtype)
    check_beside_torch(logits, 50, dd.topk_logprobs(logits, 50, variant=variant))


@pytest.mark.parametrize("vocabulary", [151_643, 151_644, 129_280])
def test_topk_of_vocabularies_of_any_size(vocabulary):
    for dtype in ("float32", "bfloat16"):
        logits = random_logits(2, 3, vocabulary, dtype=dtype)
        check_beside_torch(logits, 64, dd.topk_logprobs(logits, 64))


def test_topk_of_1024():
    torch = library("torch")
    logits = random_logits(2, 2, 163_840)
    check_beside_torch(logits, 1024, dd.topk_logprobs(logits, 1024))
    for x in (torch.sort(logits.float(), dim=-1).values, torch.zeros(1, 2, 163_840, device="cuda"), logits[..., :1024]):
        check_beside_torch(x, 1024, dd.topk_logprobs(x, 1024))


def test_topk_where_more_reach_the_threshold_than_there_is_room():
    torch = library("torch")
    rising = torch.arange(100_000, device="cuda").float().mul(2.0**-10).expand(1, 2, -1)
    few = random_logits(1, 2, 100_000, std=0.01)
    for x in (
        rising,
        rising.flip(-1).contiguous(),
        few.mul(64).round(),
        torch.full((1, 1, 100_001), 7.0, device="cuda"),
    ):
        for k in (1, 64, 1000):
            check_beside_torch(x, k, dd.topk_logprobs(x, k))


def test_logits_beyond_two_to_the_31_elements():
    torch = library("torch")
    length, vocabulary = 8_200, 262_144
    assert length * vocabulary > 2**31
    if torch.cuda.mem_get_info()[0] < 8e9:
        pytest.skip("needs 8 GB of free GPU memory")
    logits = torch.empty((1, length, vocabulary), dtype=torch.bfloat16, device="cuda").normal_(0.0, 3.0)
    for shape in ((1, length), (length, 1)):
        x = logits.view(*shape, vocabulary)
        logprobs, token_ids = dd.topk_logprobs(x, 8)
        for rows in (slice(0, 2), slice(4095, 4098), slice(8191, 8194), slice(length - 2, length)):
            part = logits[:, rows]
            check_beside_torch(part, 8, (logprobs.view(1, length, 8)[:, rows], token_ids.view(1, length, 8)[:, rows]))
    del logits, x
    torch.cuda.empty_cache()


def test_candidates_beyond_two_to_the_31_elements():
    torch = library("torch")
    batch, stride = 3, 2**30 + 4  # in elements: the last request begins behind 2**31
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("needs 24 GB of free GPU memory")
    problem = problem_of(falling(batch, 4, 8), 20)
    given = on_device(problem, "torch")
    for name in ("logprobs", "token_ids"):
        memory = torch.empty(2 * stride + 32, dtype=given[name].dtype, device="cuda")
        given[name] = torch.as_strided(memory, (batch, 4, 8), (stride, 8, 1)).copy_(given[name])
    exact = expected_trees(problem)
    for variant in TREE_KERNELS:
        check_trees(dd.build_tree(**given, variant=variant), problem, exact)
    del given, memory
    torch.cuda.empty_cache()


# Streams and graphs


@pytest.mark.parametrize("results_given", [True, False])
@each_builder
def test_torch_stream_is_used_and_not_waited_for(variant, results_given):
    torch = library("torch")
    first, later = (problem_of(rounded(16, 8, 16), 40, seed=seed) for seed in (1, 2))
    logits, later_logits = (random_logits(4, 3, 4096, seed=seed) for seed in (1, 2))
    given, later_rows = on_device(first, "torch"), to_torch(later["logprobs"])
    later |= {name: first[name] for name in ("token_ids", "root_tokens")}
    later_exact = expected_trees(later)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tree, pair = dd.build_tree(**given, variant=variant), dd.topk_logprobs(logits, 8)  # compiles
        check_trees(tree, first)
        if not results_given:
            tree = pair = None  # their memory serves again: new memory from the driver would be waited for
        torch.cuda.synchronize()
        # The inputs get their values on the stream behind a sleep: only kernels behind both read them.
        torch.cuda._sleep(SLEEP_CYCLES)
        given["logprobs"].copy_(later_rows, non_blocking=True)
        logits.copy_(later_logits, non_blocking=True)
        tree = dd.build_tree(**given, variant=variant, out=tree)
        pair = dd.topk_logprobs(logits, 8, out=pair)
        done = torch.cuda.Event()
        done.record(stream)
        assert not done.query(), "a call waited for the GPU"
    stream.synchronize()
    assert done.query()
    check_trees(tree, later, later_exact)
    check_beside_torch(later_logits, 8, pair)


def test_cupy_stream_is_used_and_not_waited_for():
    cupy = library("cupy")
    source = """extern "C" __global__ void spin(long long cycles) {
        long long start = clock64();
        while (clock64() - start < cycles) {}
    }"""
    spin = cupy.RawKernel(source, "spin")
    first, later = (problem_of(rounded(16, 8, 16), 40, seed=seed) for seed in (1, 2))
    given, later_rows = on_device(first, "cupy"), TO_KIND["cupy"](later["logprobs"])
    later |= {name: first[name] for name in ("token_ids", "root_tokens")}
    exact = expected_trees(later)
    out = dd.DraftTree.empty(given["logprobs"], 16, 40, 8)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        check_trees(dd.build_tree(**given, out=out), first)
        spin((1,), (1,), (np.int64(1),))
        cupy.copyto(cupy.empty_like(later_rows), later_rows)
        stream.synchronize()
        spin((1,), (1,), (np.int64(SLEEP_CYCLES),))
        cupy.copyto(given["logprobs"], later_rows)
        dd.build_tree(**given, out=out)
        assert not stream.done, "the call waited for the GPU"
    stream.synchronize()
    check_trees(out, later, exact)


def test_numba_default_stream_is_not_waited_for():
    torch = library("torch")
    problem = problem_of(rounded(16, 8, 16), 40)
    exact = expected_trees(problem)
    given = on_device(problem, "numba")
    out = dd.DraftTree.empty(given["logprobs"], 16, 40, 8)
    dd.build_tree(**given, out=out)
    cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # PyTorch's default stream is Numba's
    dd.build_tree(**given, out=out)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the call waited for the GPU"
    check_trees(out, problem, exact)


@pytest.mark.parametrize("builder", ["auto", *TREE_KERNELS])
@pytest.mark.parametrize("finder", TOPK_KERNELS)
def test_from_logits_to_trees_in_one_graph(finder, builder):
    torch = library("torch")
    batch, length, vocabulary, k, tree_budget = 64, 7, 8192, 32, 48
    logits = random_logits(batch, length, vocabulary)
    roots = torch.arange(batch, dtype=torch.int32, device="cuda")
    pair = (
        torch.empty((batch, length, k), device="cuda"),
        torch.empty((batch, length, k), dtype=torch.int32, device="cuda"),
    )
    tree = dd.DraftTree.empty(logits, batch, tree_budget, length)

    def step() -> None:
        dd.topk_logprobs(logits, k, variant=finder, out=pair)
        dd.build_tree(*pair, roots, tree_budget, variant=builder, out=tree)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a synchronization in here is an error
        step()
    for seed in (1, 2, 3):
        logits.copy_(random_logits(batch, length, vocabulary, seed=seed, std=float(seed)))
        logits[seed, 1, 77] = NAN
        roots.add_(1000)
        spoil(*pair, *tensors_of(tree))
        graph.replay()
        torch.cuda.synchronize()
        eager_pair = dd.topk_logprobs(logits, k, variant=finder)
        eager = dd.build_tree(*eager_pair, roots, tree_budget, variant=builder, validate=True)
        for again, once in zip((*pair, *tensors_of(tree)), (*eager_pair, *tensors_of(eager)), strict=True):
            assert torch.equal(carrier(again), carrier(once))
        problem = {
            "logprobs": to_host(pair[0]),
            "token_ids": to_host(pair[1]),
            "root_tokens": to_host(roots),
            "tree_budget": tree_budget,
        }
        check_trees(tree, problem)
        assert int(tree.depths[seed].max()) == 1  # the NaN ended row 1


def test_replays_do_not_wait():
    torch = library("torch")
    problem = problem_of(rounded(64, 8, 16), 40)
    given = on_device(problem, "torch")
    out = dd.DraftTree.empty(given["logprobs"], 64, 40, 8)
    dd.build_tree(**given, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dd.build_tree(**given, out=out)
    graph.replay()
    torch.cuda.synchronize()
    spoil(*tensors_of(out))
    torch.cuda._sleep(SLEEP_CYCLES)
    graph.replay()
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the replay waited for the GPU"
    check_trees(out, problem)


def test_cupy_graph_replays_with_new_contents():
    cupy = library("cupy")
    first, later = (problem_of(rounded(16, 8, 16), 40, seed=seed) for seed in (1, 2))
    given = on_device(first, "cupy")
    out = dd.DraftTree.empty(given["logprobs"], 16, 40, 8)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        dd.build_tree(**given, out=out)
        stream.synchronize()
        stream.begin_capture()
        dd.build_tree(**given, out=out)
        graph = stream.end_capture()
        for name in ("logprobs", "token_ids", "root_tokens"):
            given[name].set(later[name])
        graph.launch(stream)
    stream.synchronize()
    check_trees(out, later)


@each_builder
def test_a_hundred_runs_give_the_same_trees(variant):
    torch = library("torch")
    problem = problem_of(rounded(132, 15, 32), 128)
    given = on_device(problem, "torch")
    first = dd.build_tree(**given, variant=variant)
    check_trees(first, problem)
    run_beside_another_stream(lambda: tensors_of(dd.build_tree(**given, variant=variant)), tensors_of(first))
    torch.cuda.synchronize()


@each_topk
def test_a_hundred_runs_give_the_same_logprobs(variant):
    torch = library("torch")
    logits = random_logits(4, 7, 32_000)
    first = dd.topk_logprobs(logits, 16, variant=variant)
    check_beside_torch(logits, 16, first)
    run_beside_another_stream(lambda: dd.topk_logprobs(logits, 16, variant=variant), first)
    torch.cuda.synchronize()


def run_beside_another_stream(call: Any, first: Any) -> None:
    """A hundred runs, some of them while another stream keeps the GPU busy: the same bits each time."""
    torch = library("torch")
    busy = torch.cuda.Stream()
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for run in range(100):
        if run % 10 == 5:
            with torch.cuda.stream(busy):
                for _ in range(4):
                    torch.mm(matrix, matrix)
        for again, once in zip(call(), first, strict=True):
            assert torch.equal(carrier(again), carrier(once)), f"run {run}"


# Wrong places and contents


def test_arrays_in_host_memory_beside_device_arrays_are_refused():
    problem, exact = solved("plain")
    given = on_device(problem, "torch")
    for name in ("token_ids", "root_tokens"):
        with pytest.raises(ValueError, match=rf"logprobs is in GPU 0 and {name} in host memory"):
            dd.build_tree(**given | {name: problem[name]})
        with pytest.raises(TypeError, match=rf"{name} is a PyTorch tensor on cpu"):
            dd.build_tree(**given | {name: to_torch(problem[name], "cpu")})
    with pytest.raises(ValueError, match=r"logprobs is in host memory and token_ids in GPU 0"):
        dd.build_tree(**given | {"logprobs": problem["logprobs"]})
    with pytest.raises(ValueError, match=r"logprobs is in GPU 0 and out\.tokens in host memory"):
        dd.build_tree(**given, out=dd.DraftTree.empty(problem["logprobs"], 3, 20, 4))
    for variant in ("heap_numpy", "frontier_numpy"):
        with pytest.raises(ValueError, match=f"'{variant}' works on host arrays"):
            dd.build_tree(**given, variant=variant)
    check_trees(dd.build_tree(**given), problem, exact)
    logits = random_logits(1, 2, 100)
    for variant in ("rounds_numpy", "threshold_numpy"):
        with pytest.raises(ValueError, match=f"'{variant}' works on host arrays"):
            dd.topk_logprobs(logits, 3, variant=variant)
    with pytest.raises(ValueError, match=r"logits is in GPU 0 and out\[0\] in host memory"):
        dd.topk_logprobs(logits, 3, out=(np.zeros((1, 2, 3), np.float32), np.zeros((1, 2, 3), np.int32)))
    with pytest.raises(TypeError, match="logits is a PyTorch tensor on cpu"):
        dd.topk_logprobs(logits.cpu(), 3)


@each_device_kind
def test_overlap_is_refused_on_the_device_too(kind):
    problem, exact = solved("plain")
    given = on_device(problem, kind)
    out = dd.DraftTree.empty(given["logprobs"], 3, 20, 4)
    same = {name: getattr(out, name) for name in DTYPES} | {"depths": out.tokens}
    with pytest.raises(ValueError, match=r"out\.depths overlaps out\.tokens"):
        dd.build_tree(**given, out=dd.DraftTree(**same, max_depth=4))
    check_trees(dd.build_tree(**given, out=out), problem, exact)


@each_device_kind
def test_validate_finds_wrong_contents_on_the_device(kind):
    problem, exact = solved("plain")
    given = on_device(problem, kind)
    rows, ids = problem["logprobs"].copy(), problem["token_ids"].copy()
    rows[2, 1, 3] = 0.5
    ids[1, 0, 2] = -1
    for name, x, match in (("logprobs", rows, r"logprobs\[2, 1, 3\]"), ("token_ids", ids, r"token_ids\[1, 0, 2\]")):
        with pytest.raises(ValueError, match=match):
            dd.build_tree(**given | {name: TO_KIND[kind](x)}, validate=True)
    check_trees(dd.build_tree(**given, validate=True), problem, exact)


@each_builder
def test_wrong_contents_give_some_tree(variant):
    torch = library("torch")
    rows = torch.randn((32, 6, 9), device="cuda") * 5
    rows[16:] = rows[16:].mul(1e38)
    rows[8:24, ::2, ::3] = NAN
    ids = torch.full((32, 6, 9), 5, dtype=torch.int32, device="cuda")
    tree = dd.build_tree(rows, ids, ids[:, 0, 0], 60, variant=variant).to_host()
    torch.cuda.synchronize()
    for b, count in enumerate(tree.num_nodes.tolist()):
        assert 1 <= count <= 61
        assert (tree.parents[b, 1:count] < np.arange(1, count)).all()
        assert (tree.parents[b, 1:count] >= 0).all()


def test_a_gpu_that_is_not_the_current_one():
    torch = library("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem, exact = solved("requests_of_all_sizes")
    second = {n: to_torch(x, "cuda:1") if isinstance(x, np.ndarray) else x for n, x in problem.items()}
    for variant in TREE_KERNELS:
        tree = dd.build_tree(**second, variant=variant)
        assert {x.device.index for x in tensors_of(tree)} == {1}
        assert torch.cuda.current_device() == 0
        check_trees(tree, problem, exact)
    logits = random_logits(2, 3, 1000).to("cuda:1")
    results = dd.topk_logprobs(logits, 5)
    assert {x.device.index for x in results} == {1}
    check_beside_torch(logits, 5, results)
