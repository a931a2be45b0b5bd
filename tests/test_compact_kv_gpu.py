"""compact_kv and gather_accepted on a CUDA GPU: kinds of arrays, all layers of a model, large caches, streams, graphs.

What holds on any backend is in test_compact_kv.py, which runs on the GPU too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda
from test_compact_kv import (
    GATHER_COUNTS,
    GATHER_NODES,
    GATHERED,
    INTERLEAVED,
    KEYS_AND_VALUES,
    LAYERS,
    LENGTHS,
    ONE_WORD,
    PATHS,
    Problem,
    accepted,
    assert_same_bytes,
    by_definition,
    check_gathered,
    padded,
    problem_of,
    random_problem,
    run,
)
from test_trees_gpu import carrier, run_beside_another_stream
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

import ddtree_numba as dd
from ddtree_numba.device.runtime import SIMULATOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU"),
]

NUM_LAYERS, PAGE_SIZE, WIDTH = 61, 64, 576


# Every kind, and views of memory


def check_kind(problem: Problem, kind: str) -> None:
    """Raise AssertionError unless all bytes of the memory are right, the caches being views of arrays of one kind."""
    to = TO_KIND[kind]
    exact, exact_lengths = run(problem, by_definition)
    memory, lengths = [to(x.copy()) for x in problem.memory], to(problem.lengths.copy())
    path = accepted(to(problem.nodes), to(problem.counts))
    table = None if problem.table is None else to(problem.table)
    assert dd.compact_kv(problem.layers.views(*memory), lengths, path, block_table=table) is lengths
    np.testing.assert_array_equal(to_host(lengths), exact_lengths)
    assert_same_bytes([to_host(x).view(y.dtype) for x, y in zip(memory, exact, strict=True)], exact)


@each_kind
@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("layers", [*LAYERS[:4], ONE_WORD, KEYS_AND_VALUES], ids=str)
def test_every_kind(layers, page_size, kind):
    check_kind(problem_of(layers, page_size, PATHS, LENGTHS), kind)


@pytest.mark.parametrize("kind", ["cupy", "torch"])
@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_views_of_device_memory(layers, kind):
    if kind == "torch" and layers.name in ("in_front_and_in_reverse", "backwards"):
        pytest.skip("PyTorch has no negative strides")
    for page_size in (None, 16):
        check_kind(problem_of(layers, page_size, PATHS, LENGTHS), kind)


@pytest.mark.parametrize("seed", range(4))
def test_random_problems(seed):
    rng = np.random.default_rng(seed)
    for _ in range(100):
        check_kind(random_problem(rng), "cupy")


@pytest.mark.parametrize("width", [1, 2, 8, 40])
def test_every_row_moves_to_its_neighbours_place(width):
    """Long chains in which every row is target and source, of one word and more, many times over."""
    torch = library("torch")
    nodes, counts = (to_torch(x) for x in padded([range(1, 801)] * 264))
    for dtype in (torch.int64, torch.int32, torch.uint8):
        before = torch.randint(0, 100, (264, 1000, width), device="cuda").to(dtype)
        expected = before.clone()
        expected[:, 5:805] = before[:, 6:806]
        for _ in range(10):
            cache, lengths = before.clone(), torch.full((264,), 5, dtype=torch.int32, device="cuda")
            dd.compact_kv(cache, lengths, accepted(nodes, counts))
            assert torch.equal(cache, expected)
            assert bool((lengths == 805).all())


@each_kind
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16_of_two_axes", "uint8", "few_nodes", "many_words"])
def test_gather_of_every_kind(name, kind):
    x = GATHERED[name](np.random.default_rng(0))
    to = TO_KIND[kind]
    path = accepted(to(GATHER_NODES), to(GATHER_COUNTS))
    found = dd.gather_accepted(to(x), path)
    assert kind_of(found) == kind
    check_gathered(to_host(found).view(x.dtype), x)
    out = to(np.full((*GATHER_NODES.shape, *x.shape[2:]), 1, x.dtype))
    assert dd.gather_accepted(to(x), path, out=out) is out
    check_gathered(to_host(out).view(x.dtype), x)


# A model's caches, beside PyTorch's own indexing


def random_bits(*shape: int, dtype: Any = None) -> Any:
    """Any bits, NaN among them, as bfloat16."""
    torch = library("torch")
    bits = torch.empty(shape, dtype=torch.int16, device="cuda").random_(-(2**15), 2**15)
    return bits.view(torch.bfloat16 if dtype is None else dtype)


def random_paths(batch: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """One slot is idle; one path has a root alone, and one is a chain of neighbours."""
    rng = np.random.default_rng(seed)
    paths = [[0, *sorted(1 + rng.permutation(2 * columns)[: rng.integers(1, columns)])] for _ in range(batch)]
    paths[1], paths[2], paths[3] = [0], [], [0, *range(2, columns + 1)]
    return padded(paths, columns)


def places(lengths: Any, nodes: np.ndarray, counts: np.ndarray, page_size: int, table: np.ndarray) -> tuple[Any, Any]:
    """Sources and targets of all moves, as rows of the flat cache."""
    sources, targets = [], []
    for b, count in enumerate(counts):
        for k, node in enumerate(nodes[b, :count]):
            for row, found in ((lengths[b] + node, sources), (lengths[b] + k, targets)):
                found.append(int(table[b, row // page_size]) * page_size + int(row % page_size))
    return (library("torch").tensor(rows, device="cuda") for rows in (sources, targets))


def check_moves(caches: list[Any], lengths: np.ndarray, nodes: Any, counts: Any, table: np.ndarray | None) -> None:
    """Raise AssertionError unless every layer is what indexing makes of it."""
    torch = library("torch")
    batch, page_size = lengths.size, caches[0].shape[1]
    pages = np.arange(batch)[:, None] if table is None else table
    sources, targets = places(lengths, nodes, counts, page_size, pages)
    expected = []
    for cache in caches:
        rows = carrier(cache).flatten(0, 1).clone()
        rows[targets] = rows[sources]
        expected.append(rows)
    given = to_torch(lengths.copy())
    path = accepted(to_torch(nodes), to_torch(counts))
    dd.compact_kv(caches, given, path, block_table=None if table is None else to_torch(table))
    np.testing.assert_array_equal(to_host(given), lengths + counts)
    for n, (cache, rows) in enumerate(zip(caches, expected, strict=True)):
        assert torch.equal(carrier(cache).flatten(0, 1), rows), f"layer {n}"


def a_model(storage: str, batch: int = 8, pages: int = 18) -> tuple[list[Any], np.ndarray]:
    """All layers of bfloat16 in one of three ways, and pages of requests in any order."""
    num_pages = batch * pages + 5
    if storage == "apart":
        caches = [random_bits(num_pages, PAGE_SIZE, WIDTH) for _ in range(NUM_LAYERS)]
    elif storage == "one_behind_the_other":
        caches = list(random_bits(NUM_LAYERS, num_pages, PAGE_SIZE, WIDTH))
    else:
        whole = random_bits(num_pages, PAGE_SIZE, NUM_LAYERS, WIDTH)
        caches = [whole[:, :, n] for n in range(NUM_LAYERS)]
    order = np.random.default_rng(0).permutation(num_pages)[: batch * pages]
    return caches, order.reshape(batch, pages).astype(np.int32)


@pytest.mark.parametrize("storage", ["apart", "one_behind_the_other", "interleaved"])
def test_61_layers_of_a_model(storage):
    torch = library("torch")
    caches, table = a_model(storage)
    lengths = np.array([1000, 0, 37, 63, 64, 65, 127, 1023], np.int32)
    for seed in (1, 2):
        nodes, counts = random_paths(8, 40, seed)
        check_moves(caches, lengths, nodes, counts, table)
        lengths = np.minimum(lengths + counts, 1000).astype(np.int32)
    del caches
    torch.cuda.empty_cache()


def test_a_large_batch():
    nodes, counts = random_paths(256, 17, 3)
    lengths = np.random.default_rng(3).integers(0, 400, 256).astype(np.int32)
    check_moves([random_bits(256, 450, WIDTH) for _ in range(2)], lengths, nodes, counts, None)


def test_gather_of_hidden_states():
    torch = library("torch")
    x = random_bits(64, 61, 7168)
    nodes, counts = random_paths(64, 16, 4)
    found = dd.gather_accepted(x, accepted(to_torch(nodes), to_torch(counts)))
    at = to_torch(nodes).long()
    rows = carrier(x).gather(1, at.clamp(min=0, max=60)[..., None].expand(-1, -1, 7168))
    rows[(at < 0) | (at > 60)] = 0
    assert torch.equal(carrier(found), rows)


# Caches of more than 2**31 elements


def enough_memory(nbytes: float) -> None:
    if library("torch").cuda.mem_get_info()[0] < nbytes:
        pytest.skip(f"needs {nbytes / 1e9:.0f} GB of free GPU memory")


def test_page_numbers_above_a_million():
    torch = library("torch")
    enough_memory(20e9)
    num_pages, page_size = 1_100_000, 4
    assert num_pages * page_size * WIDTH > 2**31
    # Both ends, and both sides of 2**31 bytes and of 2**31 elements.
    ids = [num_pages - 1, 0, 1_000_001, 932_067, 932_068, 466_033, 466_034, 1, 1_048_576]
    table = np.array([ids, [n ^ 2 for n in reversed(ids)]], np.int32) % num_pages
    assert len(set(table.ravel())) == table.size
    nodes, counts = padded([[0, 3, 5, 6, 9, 14, 20, 24], [0, 2, 3, 4, 17, 21]])
    check_moves([random_bits(num_pages, page_size, WIDTH)], np.array([9, 13], np.int32), nodes, counts, table)
    torch.cuda.empty_cache()


def test_requests_of_more_than_a_million_tokens():
    torch = library("torch")
    enough_memory(20e9)
    capacity = 1_300_000
    assert 3 * capacity * WIDTH > 2**31
    nodes, counts = padded([[0, 2, 5, 6], [0, 1, 7], [0, *range(2, 50)]])
    lengths = np.array([0, 1_250_000, 1_299_900], np.int32)
    check_moves([random_bits(3, capacity, WIDTH)], lengths, nodes, counts, None)
    torch.cuda.empty_cache()


def test_layers_more_than_two_to_the_31_words_apart():
    torch = library("torch")
    enough_memory(20e9)
    whole = torch.empty((2, 2, 1_900_000, 577), dtype=torch.uint8, device="cuda").random_(0, 256)
    assert whole[0].numel() > 2**31
    path = accepted(*(to_torch(x) for x in padded([[0, 2, 3, 9], [0, 4]])))
    lengths = np.array([1_899_980, 5], np.int32)
    expected = whole.clone()
    for b, k, node in ((0, 1, 2), (0, 2, 3), (0, 3, 9), (1, 1, 4)):
        expected[:, b, lengths[b] + k] = whole[:, b, lengths[b] + node]
    dd.compact_kv(list(whole), to_torch(lengths), path)
    assert torch.equal(whole, expected)
    del whole, expected
    torch.cuda.empty_cache()


# Streams, graphs, runs


def test_torch_stream_is_used_and_not_waited_for():
    torch = library("torch")
    problem = problem_of(INTERLEAVED, 3, PATHS, LENGTHS)
    exact, exact_lengths = run(problem, by_definition)
    later = to_torch(problem.memory[0]), to_torch(problem.lengths)
    memory, lengths = torch.zeros_like(later[0]), torch.zeros_like(later[1])
    path, table = accepted(to_torch(problem.nodes), to_torch(problem.counts)), to_torch(problem.table)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        dd.compact_kv(INTERLEAVED.views(memory), lengths, path, block_table=table)  # compiles
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        memory.copy_(later[0], non_blocking=True)
        lengths.copy_(later[1], non_blocking=True)
        dd.compact_kv(INTERLEAVED.views(memory), lengths, path, block_table=table)
        done = torch.cuda.Event()
        done.record(stream)
        assert not done.query(), "the call waited for the GPU"
    stream.synchronize()
    np.testing.assert_array_equal(to_host(lengths), exact_lengths)
    assert_same_bytes([to_host(memory)], exact)


def test_numba_default_stream_is_not_waited_for():
    torch = library("torch")
    problem = problem_of(ONE_WORD, 3, PATHS, LENGTHS)
    exact, exact_lengths = run(problem, by_definition)
    path, table = accepted(cuda.to_device(problem.nodes), cuda.to_device(problem.counts)), cuda.to_device(problem.table)
    rows = cuda.to_device(GATHERED["float32"](np.random.default_rng(0)))
    other = accepted(cuda.to_device(GATHER_NODES), cuda.to_device(GATHER_COUNTS))
    out = dd.gather_accepted(rows, other)
    for _ in range(2):  # the first compiles
        memory, lengths = cuda.to_device(problem.memory[0]), cuda.to_device(problem.lengths)
        cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)  # PyTorch's default stream is Numba's
        dd.compact_kv(memory, lengths, path, block_table=table)
        dd.gather_accepted(rows, other, out=out)
        done = torch.cuda.Event()
        done.record()
    assert not done.query(), "a call waited for the GPU"
    np.testing.assert_array_equal(lengths.copy_to_host(), exact_lengths)
    assert_same_bytes([memory.copy_to_host()], exact)
    check_gathered(out.copy_to_host(), rows.copy_to_host())


def test_in_a_graph():
    torch = library("torch")
    caches, table = a_model("interleaved", pages=4)
    page_table, lengths = to_torch(table), torch.zeros(8, dtype=torch.int32, device="cuda")
    nodes, counts = (to_torch(x) for x in random_paths(8, 16, 0))
    path = accepted(nodes, counts)
    states = torch.empty((8, 40, WIDTH), dtype=torch.bfloat16, device="cuda").normal_()
    out = torch.empty((8, 16, WIDTH), dtype=torch.bfloat16, device="cuda")

    def step() -> None:
        dd.gather_accepted(states, path, out=out)
        dd.compact_kv(caches, lengths, path, block_table=page_table)

    step()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "something was allocated"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a synchronization in here is an error
        step()
    for seed in (1, 2, 3):
        given = [*random_paths(8, 16, seed), np.random.default_rng(seed).integers(0, 150, 8).astype(np.int32)]
        for x, new in zip((nodes, counts, lengths), given, strict=True):
            x.copy_(to_torch(new))
        states.normal_()
        whole = [carrier(cache).clone() for cache in caches]
        sources, targets = places(given[2], *given[:2], PAGE_SIZE, table)
        graph.replay()
        torch.cuda.synchronize()
        np.testing.assert_array_equal(to_host(lengths), given[2] + given[1])
        for cache, rows in zip(caches, whole, strict=True):
            flat = rows.flatten(0, 1)
            flat[targets] = flat[sources]
            assert torch.equal(carrier(cache).flatten(0, 1), flat)
        assert torch.equal(carrier(out), carrier(dd.gather_accepted(states, path)))


def test_a_cupy_graph():
    cupy = library("cupy")
    problem = problem_of(INTERLEAVED, 3, PATHS, LENGTHS)
    exact, exact_lengths = run(problem, by_definition)
    memory, lengths, nodes, counts, table = map(
        TO_KIND["cupy"], (problem.memory[0], problem.lengths, problem.nodes, problem.counts, problem.table)
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        views = INTERLEAVED.views(memory)
        dd.compact_kv(views, lengths, accepted(nodes, counts), block_table=table)
        stream.synchronize()
        stream.begin_capture()
        dd.compact_kv(views, lengths, accepted(nodes, counts), block_table=table)
        graph = stream.end_capture()
        memory.set(problem.memory[0])
        lengths.set(problem.lengths)
        graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(to_host(lengths), exact_lengths)
    assert_same_bytes([to_host(memory)], exact)


@pytest.mark.parametrize("layers", [1, NUM_LAYERS])
def test_a_hundred_runs_give_the_same_bits(layers):
    torch = library("torch")
    caches, table = a_model("apart", pages=4)
    caches, page_table = caches[:layers], to_torch(table)
    whole = [carrier(x).clone() for x in caches]
    start = to_torch(np.array([0, 5, 60, 64, 65, 100, 127, 150], np.int32))
    path = accepted(*(to_torch(x) for x in random_paths(8, 33, 5)))

    def moved() -> list[Any]:
        for cache, old in zip(caches, whole, strict=True):
            carrier(cache).copy_(old)
        lengths = start.clone()
        dd.compact_kv(caches, lengths, path, block_table=page_table)
        return [*caches, lengths]

    first = [carrier(x).clone() for x in moved()]
    assert not torch.equal(first[0], whole[0])
    run_beside_another_stream(moved, first)
    torch.cuda.synchronize()


# Wrong places


@each_device_kind
def test_arrays_in_different_places_are_refused(kind):
    problem = problem_of(KEYS_AND_VALUES, 3, PATHS, LENGTHS)
    to = TO_KIND[kind]
    memory, lengths, table = [to(x) for x in problem.memory], to(problem.lengths), to(problem.table)
    path = accepted(to(problem.nodes), to(problem.counts))
    for wrong in (
        {"kv_caches": problem.memory},
        {"kv_caches": [memory[0], problem.memory[1]]},
        {"cache_seqlens": problem.lengths},
        {"accepted": accepted(problem.nodes, problem.counts)},
        {"accepted": accepted(path.nodes, problem.counts)},
        {"block_table": problem.table},
    ):
        right = {"kv_caches": memory, "cache_seqlens": lengths, "accepted": path, "block_table": table}
        with pytest.raises(ValueError, match="all arguments must be NumPy arrays, or all on one GPU"):
            dd.compact_kv(**right | wrong)
    for x, exact in zip((*memory, lengths), (*problem.memory, problem.lengths), strict=True):
        assert to_host(x).tobytes() == exact.tobytes()


@each_device_kind
def test_overlap_is_refused_on_the_device_too(kind):
    to = TO_KIND[kind]
    cache = to(np.zeros((2, 12, 4), np.int32))
    nodes, counts = padded([[0, 2], [0, 1]])
    with pytest.raises(ValueError, match="overlaps"):
        dd.compact_kv(cache, cache[0, :2, 0], accepted(to(nodes), to(counts)))
    with pytest.raises(ValueError, match="the same cache twice"):
        dd.compact_kv([cache, cache], to(np.zeros(2, np.int32)), accepted(to(nodes), to(counts)))
    with pytest.raises(ValueError, match="out overlaps x"):
        dd.gather_accepted(cache, accepted(to(nodes), to(counts)), out=cache[:, 2:4])


def test_a_gpu_that_is_not_the_current_one():
    torch = library("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem = problem_of(KEYS_AND_VALUES, 3, PATHS, LENGTHS)
    exact, exact_lengths = run(problem, by_definition)
    memory, lengths = [to_torch(x, "cuda:1") for x in problem.memory], to_torch(problem.lengths, "cuda:1")
    path = accepted(*(to_torch(x, "cuda:1") for x in (problem.nodes, problem.counts)))
    dd.compact_kv(memory, lengths, path, block_table=to_torch(problem.table, "cuda:1"))
    assert torch.cuda.current_device() == 0
    np.testing.assert_array_equal(to_host(lengths), exact_lengths)
    assert_same_bytes([to_host(x) for x in memory], exact)
