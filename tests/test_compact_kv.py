"""compact_kv and gather_accepted against a copy of the cache: every byte of the memory that caches are views of.

Kernels run in the simulator, or on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from cases import BFLOAT16
from numba import cuda
from test_build_tree import function_source, phases
from test_verify_attention import (
    LAYOUTS,
    as_strided,
    big_endian,
    change,
    half_aligned_strides,
    misaligned,
    read_only,
    value,
)
from wrong_compact import GATHER_MISTAKES, MISTAKES, RACES, build, build_race

import ddtree_numba as dd
from ddtree_numba.accept import compact_kv
from ddtree_numba.device import arrays
from ddtree_numba.device.runtime import SIMULATOR
from refs import accept as oracle

ROWS = compact_kv.ROWS
LARGEST, LEAST = 2**31 - 1, -(2**31)
only_simulated = pytest.mark.skipif(not SIMULATOR, reason="wrong kernels run in the simulator alone")

Memory = list[np.ndarray]


# Problems


@dataclass(frozen=True)
class Layers:
    """How the caches of all layers, [n, m, ...], are views of memory."""

    name: str
    memory: Callable[[int, int], list[tuple[tuple[int, ...], Any]]]  # shapes and dtypes, from n and m
    views: Callable[..., Memory] = lambda *memory: list(memory)

    def __str__(self) -> str:
        return self.name


ONE_WORD = Layers("int64_without_axes", lambda n, m: [((n, m), "int64")])
KEYS_AND_VALUES = Layers(
    "keys_and_values",
    lambda n, m: [((n, m, 2, 4), BFLOAT16), ((n, m, 2, 3), "float16"), ((n, m, 2, 4), BFLOAT16)],
)
INTERLEAVED = Layers("interleaved", lambda n, m: [((n, m, 3, 4), "float32")], lambda x: [x[:, :, i] for i in range(3)])
PIECES = Layers(
    "first_two_of_three_columns", lambda n, m: [((n, m, 2, 3), "float32")], lambda x: [x[:, :, i, :2] for i in range(2)]
)
TWO_LAYOUTS = Layers(
    "one_shape_and_two_layouts", lambda n, m: [((n, m, 4), "uint8"), ((m, n, 4), "uint8")],
    lambda x, y: [x, y.swapaxes(0, 1)],
)  # fmt: skip
LONG_ROWS = Layers("rows_of_40_words", lambda n, m: [((n, m, 40), "int64")])
LAYERS = (
    Layers("float32", lambda n, m: [((n, m, 3), "float32")]),
    Layers("bfloat16", lambda n, m: [((n, m, 6), BFLOAT16)]),
    Layers("float16", lambda n, m: [((n, m, 3), "float16")]),
    Layers("uint8", lambda n, m: [((n, m, 7), "uint8")]),
    Layers("int64", lambda n, m: [((n, m, 3), "int64")]),
    ONE_WORD,
    Layers("axis_of_the_kv_head", lambda n, m: [((n, m, 1, 4), BFLOAT16)]),
    KEYS_AND_VALUES,
    INTERLEAVED,
    PIECES,
    Layers("in_front_and_in_reverse", lambda n, m: [((3, n, m, 2), "float16")], lambda x: list(x[::-1])),
    Layers("spread_out", lambda n, m: [((2 * n, 2 * m, 8), "uint8")], lambda x: [x[1::2, ::2, 1:6]]),
    Layers("backwards", lambda n, m: [((n, m, 4), "float16")], lambda x: [x[::-1, ::-1]]),
    Layers("axes_swapped", lambda n, m: [((m, n, 3), "float32")], lambda x: [x.swapaxes(0, 1)]),
    TWO_LAYOUTS,
    LONG_ROWS,
)
WORDS = {"float32": 4, "bfloat16": 4, "float16": 2, "uint8": 1, "int64": 8, "spread_out": 1, "rows_of_40_words": 8}


@dataclass(frozen=True)
class Problem:
    """Arguments of compact_kv; ``memory`` is what the caches are views of."""

    layers: Layers
    memory: Memory
    lengths: np.ndarray
    nodes: np.ndarray
    counts: np.ndarray
    table: np.ndarray | None


def random_bytes(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Any bits at all, so that NaN of every kind are among the floats."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(bytearray(rng.bytes(size)), dtype).reshape(shape)


def padded(paths: Any, columns: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Nodes, with -1 behind, and their numbers."""
    columns = max(map(len, paths), default=1) if columns is None else columns
    nodes = [[*path, *[-1] * (columns - len(path))] for path in paths]
    return np.array(nodes, np.int32).reshape(-1, columns), np.array([len(path) for path in paths], np.int32)


def problem_of(
    layers: Layers, page_size: int | None, paths: Any, lengths: Any, *, capacity: int | None = None, seed: int = 0
) -> Problem:
    """Paged, each request has pages anywhere among all, and there are more of them."""
    rng = np.random.default_rng(seed)
    nodes, counts = padded(paths)
    batch = len(counts)
    if capacity is None:
        capacity = max(lengths, default=0) + max(int(nodes.max(initial=0)), nodes.shape[1]) + 2
    n, m, table = batch, capacity, None
    if page_size is not None:
        pages = -(-capacity // page_size)
        n, m = batch * pages + 3, page_size
        table = rng.permutation(n)[: batch * pages].reshape(batch, pages).astype(np.int32)
    memory = [random_bytes(rng, shape, dtype) for shape, dtype in layers.memory(n, m)]
    return Problem(layers, memory, np.array(lengths, np.int32), nodes, counts, table)


FAR = 2 * ROWS + 1
PATHS = (
    [0, *(k + 1 + k // 2 for k in range(1, FAR))],  # more than two tiles of moves
    [0],
    [],  # an idle slot
    [0, *range(2, FAR + 1)],  # all but the first move by one: every row is target and source
    [0, 1, 2, 3],  # all stand where they should
)
LENGTHS = (5, 0, 3, 2, 9)


def accepted(nodes: Any, counts: Any) -> dd.Accepted:
    return dd.Accepted(nodes, counts, bonus_tokens=None, flags=None)


def run(problem: Problem, move: Callable[..., np.ndarray]) -> tuple[Memory, np.ndarray]:
    """The memory and the lengths after a move; the problem stays as it is."""
    memory = [x.copy() for x in problem.memory]
    table = None if problem.table is None else problem.table.copy()
    given = problem.nodes.copy(), problem.counts.copy()
    lengths = move(problem.layers.views(*memory), problem.lengths.copy(), *given, table)
    for before, after in zip((problem.nodes, problem.counts, problem.table), (*given, table), strict=True):
        np.testing.assert_array_equal(before, after)
    return memory, lengths


def by_definition(caches: Memory, lengths: np.ndarray, nodes: Any, counts: Any, table: Any) -> np.ndarray:
    after, lengths = oracle.compact_kv(caches, lengths, nodes, counts, table)
    for cache, new in zip(caches, after, strict=True):
        cache[...] = new
    return lengths


def by_mirror(caches: Memory, lengths: np.ndarray, nodes: Any, counts: Any, table: Any) -> np.ndarray:
    """Only the moves: the lengths are what they were."""
    table = np.arange(lengths.size, dtype=np.int32)[:, None] if table is None else table
    for cache in caches:
        rows = compact_kv.in_rows(arrays.view("cache", cache)).as_numpy()
        compact_kv.mirror(rows, np.zeros(1, np.int64), rows.shape[2], table, lengths, nodes, counts)
    return lengths


def by_kernel(module: Any = dd) -> Callable[..., np.ndarray]:
    def move(caches: Memory, lengths: np.ndarray, nodes: Any, counts: Any, table: Any) -> np.ndarray:
        given = caches[0] if len(caches) == 1 else caches
        result = module.compact_kv(given, lengths, accepted(nodes, counts), block_table=table)
        assert result is lengths, "the lengths were not updated in place"
        return result

    return move


def check_moved(problem: Problem, module: Any = dd) -> None:
    """Raise AssertionError unless compact_kv of a module moves what it should, and changes no other byte."""
    memory, lengths = run(problem, by_definition)
    found, found_lengths = run(problem, by_kernel(module))
    np.testing.assert_array_equal(found_lengths, lengths, "FAIL: lengths")
    assert_same_bytes(found, memory)


def assert_same_bytes(found: Memory, expected: Memory) -> None:
    for actual, exact in zip(found, expected, strict=True):
        assert actual.dtype == exact.dtype and actual.shape == exact.shape
        differ = np.flatnonzero(np.frombuffer(actual.tobytes(), np.uint8) != np.frombuffer(exact.tobytes(), np.uint8))
        assert differ.size == 0, f"FAIL: {differ.size} of {exact.nbytes} bytes differ, first byte {differ[0]}"


def check_mirror(problem: Problem) -> None:
    assert_same_bytes(run(problem, by_mirror)[0], run(problem, by_definition)[0])


# Layers and pages


@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_layers(layers, page_size):
    problem = problem_of(layers, page_size, PATHS, LENGTHS)
    moved, _ = run(problem, by_definition)
    assert all(after.tobytes() != before.tobytes() for after, before in zip(moved, problem.memory, strict=True))
    check_mirror(problem)
    check_moved(problem)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages(page_size):
    problem = problem_of(KEYS_AND_VALUES, page_size, PATHS, LENGTHS)
    check_mirror(problem)
    check_moved(problem)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_paths_over_the_borders_of_pages(page_size):
    # Each length around a border; the path's rows stand on both sides of it, and of the next.
    lengths = [page_size + n for n in (-1, 0, 1)]
    paths = [[0, 1, page_size, page_size + 2, 2 * page_size + 3]] if page_size > 1 else [[0, 1, 2, 4, 7]]
    problem = problem_of(ONE_WORD, page_size, paths * 3, lengths)
    check_mirror(problem)
    check_moved(problem)


def test_requests_may_share_the_pages_of_their_prefix():
    problem = problem_of(INTERLEAVED, 3, [[0, 2, 3], [0, 1, 4], [0, 3]], (6, 7, 8))
    problem.table[:, :2] = problem.table[0, :2]
    check_moved(problem)


@pytest.mark.parametrize("layers", [ONE_WORD, LONG_ROWS, Layers("bytes", lambda n, m: [((n, m, 3), "uint8")])], ids=str)
@pytest.mark.parametrize("page_size", [None, 3])
def test_every_row_moves_to_its_neighbours_place(layers, page_size):
    # Each row but the ends is source and target, in one tile and from tile to tile.
    problem = problem_of(layers, page_size, [range(1, 3 * ROWS + 2), [*range(2, 2 * ROWS)]], (4, 0))
    check_mirror(problem)
    check_moved(problem)


def test_rows_that_stand_where_they_should_are_left_alone():
    problem = problem_of(KEYS_AND_VALUES, None, [[0, 1, 2, 3, 4], [0], []], (2, 0, 3))
    memory, lengths = run(problem, by_kernel())
    assert_same_bytes(memory, problem.memory)
    assert lengths.tolist() == [7, 1, 3]
    # Neither a source nor a target need exist for what does not move.
    problem = replace(problem, lengths=np.array([100, 101, 102], np.int32))
    memory, lengths = run(problem, by_kernel())
    assert_same_bytes(memory, problem.memory)
    assert lengths.tolist() == [100, 101, 102]


def test_what_stands_behind_the_count_is_not_read():
    problem = problem_of(ONE_WORD, None, [[0, 2, 5, 6, 8]] * 4, (3, 0, 1, 4))
    problem = replace(problem, counts=np.array([2, 1, 0, 5], np.int32))
    check_mirror(problem)
    check_moved(problem)


@pytest.mark.parametrize("page_size", [None, 4])
def test_no_requests(page_size):
    problem = problem_of(KEYS_AND_VALUES, page_size, [], [], capacity=8)
    memory, lengths = run(problem, by_kernel())
    assert lengths.shape == (0,)
    assert_same_bytes(memory, problem.memory)


def test_caches_without_rows():
    for cache, table in ((np.zeros((2, 0, 3)), None), (np.zeros((0, 4, 3)), np.zeros((2, 0), np.int32))):
        lengths = np.array([0, 1], np.int32)
        dd.compact_kv(cache, lengths, accepted(*padded([[0, 1], [0]])), block_table=table)
        assert lengths.tolist() == [0, 1]


def test_words_are_as_large_as_rows_allow(monkeypatch):
    words = {}

    def note(kernel: Any, blocks: Any, threads: int, args: Any, **options: Any) -> None:
        if kernel is compact_kv.kernel:
            words[layers.name] = args[-1].dtype.itemsize

    monkeypatch.setattr(compact_kv, "launch", note)
    for layers in LAYERS:
        if layers.name in WORDS:
            run(problem_of(layers, None, PATHS, LENGTHS), by_kernel())
    assert words == WORDS


def test_layers_of_one_layout_take_one_launch(monkeypatch):
    launches: list[int] = []
    monkeypatch.setattr(compact_kv, "launch", lambda kernel, *args, **options: launches.append(kernel))
    for layers, layouts in ((INTERLEAVED, 1), (KEYS_AND_VALUES, 2), (TWO_LAYOUTS, 2)):
        launches.clear()
        run(problem_of(layers, None, PATHS, LENGTHS), by_kernel())
        if SIMULATOR:  # host arrays of a GPU travel one by one
            assert launches == [compact_kv.kernel] * layouts + [compact_kv.advance_kernel]


@pytest.mark.parametrize("processors", [1, 2])
def test_layers_share_the_blocks_that_there_are(monkeypatch, processors):
    grids = []
    plain = compact_kv.launch

    def note(kernel: Any, blocks: Any, *args: Any, **options: Any) -> None:
        grids.append(blocks)
        plain(kernel, blocks, *args, **options)

    monkeypatch.setattr(compact_kv, "multiprocessors", lambda device: processors)
    monkeypatch.setattr(compact_kv, "BLOCKS", 1)
    monkeypatch.setattr(compact_kv, "launch", note)
    check_moved(problem_of(INTERLEAVED, 3, [[0, 2, 4, 5, 7]], (2,)))
    if SIMULATOR:
        assert grids[0] == (1, processors, 1)


def test_a_second_step_goes_on_from_the_first():
    rng = np.random.default_rng(0)
    cache = rng.integers(0, 1000, (2, 20, 2))
    lengths = np.array([3, 0], np.int32)
    rows = [cache[b, : lengths[b]].tolist() for b in range(2)]
    for path in ([0, 2, 4], [0, 1, 5], [0]):
        for b in range(2):
            rows[b] += [cache[b, lengths[b] + node].tolist() for node in path]
        dd.compact_kv(cache, lengths, accepted(*padded([path, path])))
        assert [cache[b, : lengths[b]].tolist() for b in range(2)] == rows


# Contents that lead outside


def with_contents(**contents: Any) -> Callable[[Problem], Problem]:
    """A problem with other contents in its first requests."""

    def changed(problem: Problem) -> Problem:
        mine = {name: getattr(problem, name).copy() for name in contents}
        for name, x in mine.items():
            for b, row in enumerate(contents[name]):
                x[b] = row
        return replace(problem, **mine)

    return changed


BEHIND = 12345  # stands for the first number that is no page of the cache


def with_pages(*entries: tuple[int, int, int]) -> Callable[[Problem], Problem]:
    """A problem with other entries of the table: request, place, entry."""

    def changed(problem: Problem) -> Problem:
        assert problem.table is not None
        table = problem.table.copy()
        for b, place, entry in entries:
            table[b, place] = problem.memory[0].shape[0] if entry == BEHIND else entry
        return replace(problem, table=table)

    return changed


OUTSIDE = {
    "negative_lengths": with_contents(lengths=[-1, -7, LEAST]),
    "lengths_at_the_end": with_contents(lengths=[10, 13, 12]),
    "lengths_behind_the_cache": with_contents(lengths=[14, 1000, LARGEST]),
    "nodes_that_fall": with_contents(nodes=[[6, 5, 4, 3, 2], [0, 3, 2, 7, 6]]),
    "nodes_below_their_place": with_contents(nodes=[[0, 0, 1, 2, 3], [0, 0, 0, 0, 5]]),
    "one_node_over_and_over": with_contents(nodes=[[5, 5, 5, 5, 5], [0, 4, 4, 4, 4]]),
    "negative_nodes": with_contents(nodes=[[-1, -2, -3, 4, 6], [LEAST, LEAST, LEAST, 4, 5]]),
    "nodes_behind_the_cache": with_contents(nodes=[[0, 2, 100, LARGEST, 5], [0, LARGEST, 4, 5, 6]]),
    "more_accepted_than_there_are_columns": with_contents(counts=[6, 1000, LARGEST]),
    "fewer_than_none": with_contents(counts=[-1, -1000, LEAST]),
    "all_at_their_ends": with_contents(
        lengths=[LARGEST, LARGEST, LEAST], nodes=[LARGEST, [0, 1, 2, 3, LARGEST], LARGEST], counts=[LARGEST] * 3
    ),
}
# Of tables of three pages.
BAD_PAGES = {
    "no_page_at_all": with_pages((0, 0, -1), (0, 1, LARGEST), (0, 2, LEAST)),
    "source_on_no_page": with_pages((1, 1, 10_000), (1, 2, -2)),
    "target_on_no_page": with_pages((2, 0, -1)),
    "page_just_behind_the_last": with_pages((0, 1, BEHIND), (2, 0, BEHIND)),
}


def outside(name: str, page_size: int | None) -> Problem:
    """Three requests of 14 rows each, not all of which have bad contents."""
    paths = [[0, 2, 4, 5, 8], [0, 1, 3, 6, 7], [1, 2, 3, 4, 5]]
    right = problem_of(INTERLEAVED, page_size, paths, (1, 4, 0), capacity=14)
    return (OUTSIDE | BAD_PAGES)[name](right)


@pytest.mark.parametrize("name", OUTSIDE)
def test_contents_that_lead_outside_leave_those_moves_out(name):
    for page_size in (None, 1, 5, 7):
        check_mirror(outside(name, page_size))
    for page_size in (None, 5):
        check_moved(outside(name, page_size))


@pytest.mark.parametrize("name", BAD_PAGES)
def test_moves_from_and_to_what_is_no_page_are_left_out(name):
    problem = outside(name, 5)
    check_mirror(problem)
    check_moved(problem)


def random_problem(rng: np.random.Generator) -> Problem:
    """Any contents, half of them such as a walk gives."""
    batch, columns, capacity = int(rng.integers(1, 4)), int(rng.integers(1, 3 * ROWS)), int(rng.integers(1, 20))
    page_size = None if rng.random() < 0.3 else int(rng.integers(1, 6))
    wild = rng.random() < 0.5
    least, most = (-3, capacity + 5) if wild else (0, max(capacity - columns, 1))
    lengths = rng.integers(least, most, batch)
    if wild:
        paths = rng.integers(least, most + columns, (batch, columns)).tolist()
    else:
        paths = [np.sort(rng.permutation(2 * columns)[:columns]).tolist() for _ in range(batch)]
    layers = LAYERS[int(rng.integers(len(LAYERS)))]
    problem = problem_of(layers, page_size, paths, lengths, capacity=capacity, seed=int(rng.integers(2**31)))
    counts = rng.integers(-1 if wild else 0, columns + 1 + 2 * wild, batch).astype(np.int32)
    table = problem.table
    if wild and table is not None:
        # No page is given twice: what two requests write to one row is not told.
        none = rng.choice([-1, -5, LARGEST, problem.memory[0].size], table.shape)
        table = np.where(rng.random(table.shape) < 0.2, none, table).astype(np.int32)
    return replace(problem, counts=counts, table=table)


def test_mirror_on_random_problems():
    rng = np.random.default_rng(1)
    for _ in range(300):
        check_mirror(random_problem(rng))


def test_kernel_on_random_problems():
    rng = np.random.default_rng(2)
    for _ in range(15 if SIMULATOR else 200):
        check_moved(random_problem(rng))


# Kinds of arrays


@pytest.mark.parametrize("page_size", [None, 3])
def test_numba_arrays(page_size):
    problem = problem_of(KEYS_AND_VALUES, page_size, PATHS, LENGTHS)
    memory, lengths = run(problem, by_definition)
    on_device = [cuda.to_device(x.view(np.uint16)) for x in problem.memory]
    table = None if page_size is None else cuda.to_device(problem.table)
    given = cuda.to_device(problem.lengths)
    path = accepted(cuda.to_device(problem.nodes), cuda.to_device(problem.counts))
    assert dd.compact_kv(tuple(on_device), given, path, block_table=table) is given
    np.testing.assert_array_equal(given.copy_to_host(), lengths)
    assert_same_bytes([x.copy_to_host() for x in on_device], [x.view(np.uint16) for x in memory])


@pytest.mark.parametrize("layout", ["spread_out", "backwards", "axes_swapped"])
def test_strides_of_the_small_arrays(layout):
    problem = problem_of(ONE_WORD, 3, PATHS, LENGTHS)
    exact, exact_lengths = run(problem, by_definition)
    memory = [x.copy() for x in problem.memory]
    lengths, nodes, counts, table = (
        LAYOUTS[layout](x) for x in (problem.lengths, problem.nodes, problem.counts, problem.table)
    )
    dd.compact_kv(memory, lengths, accepted(nodes, counts), block_table=table)
    assert_same_bytes(memory, exact)
    np.testing.assert_array_equal(lengths, exact_lengths)


def test_after_accept_greedy():
    # Its own results as they are, the chain 0 - 2 - 3 of a tree with node 1 beside it.
    tree = dd.build_tree(
        np.log(np.array([[[0.5, 0.4], [0.9, 0.05]]], np.float32)), np.array([[[7, 8], [5, 6]]], np.int32),
        np.array([4], np.int32), 4,
    )  # fmt: skip
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    wanted = next(i for i, (token, parent) in enumerate(zip(tokens, parents, strict=True)) if (token, parent) == (8, 0))
    leaf = next(i for i, parent in enumerate(parents) if parent == wanted)
    targets = np.full((1, 5), 99, np.int32)
    targets[0, 0], targets[0, wanted] = 8, tokens[leaf]
    path = dd.accept_greedy(tree, targets)
    cache = np.arange(20.0).reshape(1, 10, 2)
    lengths = np.array([3], np.int32)
    dd.compact_kv(cache, lengths, path)
    assert lengths.tolist() == [6]
    assert cache[0, 3:6, 0].tolist() == [6.0, 2.0 * (3 + wanted), 2.0 * (3 + leaf)]


# gather_accepted

GATHERED = {
    "float32": lambda rng: random_bytes(rng, (4, 9, 3), np.float32),
    "bfloat16": lambda rng: random_bytes(rng, (4, 9, 6), BFLOAT16),
    "float16_of_two_axes": lambda rng: random_bytes(rng, (4, 9, 2, 3), np.float16),
    "uint8": lambda rng: random_bytes(rng, (4, 9, 5), np.uint8),
    "int64_without_axes": lambda rng: random_bytes(rng, (4, 9), np.int64),
    "bool": lambda rng: rng.random((4, 9, 3)) < 0.5,
    "many_words": lambda rng: random_bytes(rng, (4, 9, 40), np.float64),
    "spread_out": lambda rng: random_bytes(rng, (8, 18, 8), np.float32)[::2, 1::2, 2:7],
    "backwards": lambda rng: random_bytes(rng, (4, 9, 4), np.float16)[::-1, ::-1],
    "axes_swapped": lambda rng: random_bytes(rng, (9, 4, 2), np.float32).swapaxes(0, 1),
    "broadcast": lambda rng: np.broadcast_to(random_bytes(rng, (9, 4), np.float32), (4, 9, 4)),
    "few_nodes": lambda rng: random_bytes(rng, (4, 3, 2), np.float32),
    "no_nodes": lambda rng: random_bytes(rng, (4, 0, 2), np.float32),
    "rows_of_nothing": lambda rng: random_bytes(rng, (4, 9, 0), np.float32),
}
# A path, one with nodes behind its count, an idle slot, and one with what is no node.
GATHER_NODES = np.array([[0, 2, 3, 7, 8], [0, 1, 5, 6, 2], [-1] * 5, [0, -4, 9, LARGEST, LEAST]], np.int32)
GATHER_COUNTS = np.array([5, 2, 0, 5], np.int32)


def check_gathered(found: Any, x: np.ndarray, nodes: Any = GATHER_NODES, counts: Any = GATHER_COUNTS) -> None:
    """Raise AssertionError unless the rows are those of the nodes, and zeros elsewhere."""
    live = np.arange(nodes.shape[1]) < counts[:, None]
    exact = oracle.gather_accepted(x, np.where(live, nodes, -1))
    assert_same_bytes([found], [exact])


def gathered(x: np.ndarray, module: Any = dd) -> np.ndarray:
    """Into an array that holds what no result does."""
    out = np.full((*GATHER_NODES.shape, *x.shape[2:]), 1, x.dtype)
    assert module.gather_accepted(x, accepted(GATHER_NODES, GATHER_COUNTS), out=out) is out
    return out


@pytest.mark.parametrize("name", GATHERED)
def test_gather(name):
    x = GATHERED[name](np.random.default_rng(0))
    check_gathered(gathered(x), x)
    check_gathered(dd.gather_accepted(x, accepted(GATHER_NODES, GATHER_COUNTS)), x)


@pytest.mark.parametrize("shape", [(0, 9, 3), (4, 9, 3)])
def test_gather_of_no_requests_and_of_no_columns(shape):
    columns = 5 if shape[0] == 0 else 0
    nodes, counts = np.zeros((shape[0], columns), np.int32), np.ones(shape[0], np.int32)
    found = dd.gather_accepted(np.ones(shape, np.float32), accepted(nodes, counts))
    assert found.shape == (shape[0], columns, 3) and found.dtype == np.float32


def test_gather_into_given_arrays():
    x = GATHERED["bfloat16"](np.random.default_rng(0))
    path = accepted(GATHER_NODES, GATHER_COUNTS)
    whole = np.full((9, 11, 8), 9, np.uint16)
    before = whole.copy()
    out = whole[1:9:2, 10:0:-2, 2:]
    assert dd.gather_accepted(x, path, out=out) is out
    check_gathered(out.view(BFLOAT16), x)
    out[...] = 9
    np.testing.assert_array_equal(whole, before)


def test_gather_of_numba_arrays():
    x = GATHERED["bfloat16"](np.random.default_rng(0))
    path = accepted(cuda.to_device(GATHER_NODES), cuda.to_device(GATHER_COUNTS))
    found = dd.gather_accepted(cuda.to_device(x.view(np.uint16)), path)
    assert type(found) is type(path.nodes)
    check_gathered(found.copy_to_host().view(BFLOAT16), x)


# Wrong arguments: one exception that names the argument, before anything is written


def right_arguments(page_size: int | None = None) -> dict[str, Any]:
    """B = 2, S = 12, two layers of float32 [.., 4]; paths of three."""
    shape = (2, 12, 4) if page_size is None else (8, page_size, 4)
    rng = np.random.default_rng(0)
    return {
        "kv_caches": [rng.standard_normal(shape).astype(np.float32) for _ in range(2)],
        "cache_seqlens": np.array([3, 1], np.int32),
        "accepted": accepted(*padded([[0, 2, 3], [0, 4]])),
        "block_table": None if page_size is None else np.arange(8, dtype=np.int32).reshape(2, 4)[:, ::-1].copy(),
    }


def all_bytes(given: dict[str, Any]) -> list[bytes]:
    path = given["accepted"]
    rest = [path.nodes, path.num_accepted, given["cache_seqlens"]]
    return [x.tobytes() for x in (*given["kv_caches"], *rest, given["block_table"]) if x is not None]


def layer(function: Any) -> Any:
    """The second layer is made from the right one."""
    return lambda a: {"kv_caches": [a["kv_caches"][0], function(a["kv_caches"][1])]}


def path_with(**functions: Any) -> Any:
    """An array of ``accepted`` is made from the right one."""

    def changes(a: dict[str, Any]) -> dict[str, Any]:
        return {"accepted": replace(a["accepted"], **{n: f(getattr(a["accepted"], n)) for n, f in functions.items()})}

    return changes


def over_the_cache(name: str) -> Any:
    """A small array that lies in a cache."""

    def changes(a: dict[str, Any]) -> dict[str, Any]:
        cache = np.zeros(a["kv_caches"][0].shape, np.int32)
        changed: dict[str, Any] = {"kv_caches": [cache, a["kv_caches"][1]]}
        if name == "cache_seqlens":
            return changed | {"cache_seqlens": cache[0, :2, 0]}
        if name == "block_table":
            return changed | {"block_table": cache[:2, 0, :]}
        mine = cache[:2, 0, :3] if name == "nodes" else cache[0, :2, 0]
        return changed | {"accepted": replace(a["accepted"], **{name: mine})}

    return changes


def columns_swapped(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.reshape(2, 12, 2, 2).transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)


# What the message says, the exception, what is changed of `right_arguments`; then those with pages of 3.
ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    ("no cache", "kv_caches has no layers; there must be at least 1", ValueError, value("kv_caches", [])),
    ("cache is None", "kv_caches is a builtins.NoneType", TypeError, value("kv_caches", None)),
    ("layer is None", r"kv_caches\[1\] is a builtins.NoneType", TypeError, layer(lambda x: None)),
    ("layer is a list", r"kv_caches\[1\] is a builtins.list", TypeError, layer(lambda x: x.tolist())),
    ("layer of objects", r"kv_caches\[1\] has dtype object", TypeError, layer(lambda x: np.full(x.shape, None))),
    ("layer is big-endian", r"kv_caches\[1\] has dtype >f4; .* native byte order", TypeError, layer(big_endian)),
    ("layer is misaligned", r"kv_caches\[1\] .* is not aligned", ValueError, layer(misaligned)),
    ("strides are misaligned", r"kv_caches\[1\] .* is not aligned", ValueError, layer(half_aligned_strides)),
    ("layer is read-only", r"kv_caches\[1\] is read-only", ValueError, layer(read_only)),
    (
        "layer is one request many times", r"kv_caches\[1\] .* overlaps itself", ValueError,
        layer(lambda x: as_strided(x[:1].copy(), x.shape)),
    ),
    ("layer has one axis", r"kv_caches\[1\] has shape \[96\]; it must be \[B, S, ...\]", ValueError, layer(np.ravel)),
    ("other batch", r"kv_caches\[\d\] has shape \[1, 12, 4\]; it must be .* B = 2", ValueError, lambda a: {
        "kv_caches": [x[:1] for x in a["kv_caches"]]
    }),
    ("other capacity", "differ in their first two axes", ValueError, layer(lambda x: x[:, :11])),
    ("rows of no elements", "has rows of no elements", ValueError, layer(lambda x: x[..., :0])),
    ("row is not in C order", "the axes behind the second must follow each other", ValueError, layer(columns_swapped)),
    ("row has gaps", "the axes behind the second must follow each other", ValueError, layer(lambda x: x[..., ::2])),
    ("one cache twice", "kv_caches has the same cache twice", ValueError, lambda a: {
        "kv_caches": [a["kv_caches"][0]] * 2
    }),
    *[
        (f"layer overlaps {name}", rf"kv_caches\[0\] overlaps \S*{name}", ValueError, over_the_cache(name))
        for name in ("cache_seqlens", "nodes", "num_accepted")
    ],
    ("lengths are None", "cache_seqlens is a builtins.NoneType", TypeError, value("cache_seqlens", None)),
    ("lengths are int64", "cache_seqlens has dtype int64; it must be int32", TypeError, change(
        "cache_seqlens", lambda x: x.astype(np.int64)
    )),
    ("lengths have two axes", r"cache_seqlens has shape \[2, 1\]", ValueError, change(
        "cache_seqlens", lambda x: x[:, None]
    )),
    ("lengths are read-only", "cache_seqlens is read-only", ValueError, change("cache_seqlens", read_only)),
    ("lengths are the counts", "cache_seqlens overlaps accepted.num_accepted", ValueError, lambda a: {
        "cache_seqlens": a["accepted"].num_accepted
    }),
    ("lengths are nodes", "cache_seqlens overlaps accepted.nodes", ValueError, lambda a: {
        "cache_seqlens": a["accepted"].nodes[:, 0]
    }),
    ("accepted is None", "accepted is a NoneType; it must be an Accepted", TypeError, value("accepted", None)),
    ("accepted is a pair", "accepted is a tuple; it must be an Accepted", TypeError, lambda a: {
        "accepted": (a["accepted"].nodes, a["accepted"].num_accepted)
    }),
    ("nodes are None", "accepted.nodes is a builtins.NoneType", TypeError, path_with(nodes=lambda x: None)),
    ("nodes are int64", "accepted.nodes has dtype int64", TypeError, path_with(nodes=lambda x: x.astype(np.int64))),
    ("nodes of one request", r"accepted.nodes has shape \[1, 3\]", ValueError, path_with(nodes=lambda x: x[:1])),
    ("nodes have one axis", r"accepted.nodes has shape \[2\]", ValueError, path_with(nodes=lambda x: x[:, 0])),
    ("counts are floats", "accepted.num_accepted has dtype float32", TypeError, path_with(
        num_accepted=lambda x: x.astype(np.float32)
    )),
    ("counts of one request", r"accepted.num_accepted has shape \[1\]", ValueError, path_with(
        num_accepted=lambda x: x[:1]
    )),
]  # fmt: skip
PAGED_ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    ("table is a list", "block_table is a builtins.list", TypeError, change("block_table", lambda x: x.tolist())),
    ("table is int64", "block_table has dtype int64", TypeError, change("block_table", lambda x: x.astype(np.int64))),
    ("table of one request", r"block_table has shape \[1, 4\]", ValueError, change("block_table", lambda x: x[:1])),
    ("table has one axis", r"block_table has shape \[4\]", ValueError, change("block_table", lambda x: x[0])),
    ("lengths are in the table", "cache_seqlens overlaps block_table", ValueError, lambda a: {
        "cache_seqlens": a["block_table"][:, 0]
    }),
    ("layer overlaps the table", r"kv_caches\[0\] overlaps block_table", ValueError, over_the_cache("block_table")),
    ("layer has one axis", r"kv_caches\[1\] has shape .*; it must be \[num_pages, page_size, ...\]", ValueError, layer(
        np.ravel
    )),
    ("fewer pages in one layer", "differ in their first two axes", ValueError, layer(lambda x: x[1:])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("page_size", "message", "exception", "changes"),
    [*((None, *e[1:]) for e in ERRORS), *((3, *e[1:]) for e in PAGED_ERRORS)],
    ids=[*(e[0] for e in ERRORS), *(f"paged: {e[0]}" for e in PAGED_ERRORS)],
)
def test_wrong_arguments(monkeypatch, page_size, message, exception, changes):
    right = right_arguments(page_size)
    before = all_bytes(right)
    with monkeypatch.context() as patch:
        patch.setattr(compact_kv, "launch", lambda *args, **options: pytest.fail("a kernel was launched"))
        with pytest.raises(exception, match=message) as caught:
            dd.compact_kv(**right | changes(right))
    assert "\n" not in str(caught.value)
    assert before == all_bytes(right), "something was written"


@pytest.mark.parametrize("page_size", [None, 3])
def test_the_right_arguments_are_right(page_size):
    right = right_arguments(page_size)
    assert dd.compact_kv(**right).tolist() == [6, 3]


def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    right = right_arguments()
    with pytest.raises(TypeError, match="kv_caches is a PyTorch tensor on cpu"):
        dd.compact_kv(**right | {"kv_caches": torch.zeros(2, 12, 4)})


GATHER_ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    ("x is None", "x is a builtins.NoneType", TypeError, value("x", None)),
    ("x is of objects", "x has dtype object", TypeError, lambda a: {"x": np.full((4, 9, 3), None), "out": None}),
    ("x has one axis", r"x has shape \[4\]; it must be \[B, Q, ...\]", ValueError, change("x", lambda x: x[:, 0, 0])),
    ("x is of other requests", r"accepted.nodes has shape \[4, 5\]", ValueError, change("x", lambda x: x[:3])),
    ("x has gaps in its rows", "x .* the axes behind the second must follow each other", ValueError, lambda a: {
        "x": np.zeros((4, 9, 6), np.float32)[..., ::2]
    }),
    ("x is big-endian", "x has dtype >f4", TypeError, change("x", big_endian)),
    ("accepted is an array", "accepted is a ndarray; it must be", TypeError, value("accepted", GATHER_NODES)),
    ("nodes are int64", "accepted.nodes has dtype int64", TypeError, path_with(nodes=lambda x: x.astype(np.int64))),
    ("counts have two axes", r"accepted.num_accepted has shape \[4, 1\]", ValueError, path_with(
        num_accepted=lambda x: x[:, None]
    )),
    ("out has another dtype", "out has dtype float16; it must be float32", TypeError, change(
        "out", lambda x: x.astype(np.float16)
    )),
    ("out is bits of other floats", "out has dtype uint32; it must be float32", TypeError, change(
        "out", lambda x: x.view(np.uint32)
    )),
    ("out has a row too few", r"out has shape \[4, 4, 3\]", ValueError, change("out", lambda x: x[:, :4])),
    ("out has wider rows", r"out has shape \[4, 5, 4\]", ValueError, value("out", np.zeros((4, 5, 4), np.float32))),
    ("out is read-only", "out is read-only", ValueError, change("out", read_only)),
    ("out is one place many times", "out .* overlaps itself", ValueError, change(
        "out", lambda x: as_strided(x[:1].copy(), x.shape)
    )),
    ("out is part of x", "out overlaps x", ValueError, lambda a: {"out": a["x"][:, 4:]}),
    ("out has gaps in its rows", "out .* the axes behind the second must follow each other", ValueError, value(
        "out", np.zeros((4, 5, 6), np.float32)[..., ::2]
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "exception", "changes"), [e[1:] for e in GATHER_ERRORS], ids=[e[0] for e in GATHER_ERRORS]
)
def test_wrong_arguments_of_gather(monkeypatch, message, exception, changes):
    x, out = np.ones((4, 9, 3), np.float32), np.full((4, 5, 3), 7, np.float32)
    right = {"x": x, "accepted": accepted(GATHER_NODES, GATHER_COUNTS), "out": out}
    with monkeypatch.context() as patch:
        patch.setattr(compact_kv, "launch", lambda *args, **options: pytest.fail("a kernel was launched"))
        with pytest.raises(exception, match=message) as caught:
            dd.gather_accepted(**right | changes(right))
    assert "\n" not in str(caught.value)
    assert (x == 1).all() and (out == 7).all(), "something was written"
    check_gathered(dd.gather_accepted(**right), x)


def test_no_backend(monkeypatch):
    def refuse() -> None:
        raise RuntimeError("no kernel can run")

    monkeypatch.setattr(compact_kv, "require_backend", refuse)
    right = right_arguments()
    before = all_bytes(right)
    with pytest.raises(RuntimeError, match="no kernel can run"):
        dd.compact_kv(**right)
    assert before == all_bytes(right)


# Mirror and kernel are one algorithm


def test_mirror_and_kernel_have_the_same_phases():
    found = phases(compact_kv, "mirror")
    assert found == phases(compact_kv, "kernel")
    assert [phase[:9] for phase in found] == ["# Phase 1", "# Phase 2"]


def test_what_only_the_gpu_needs_is_marked():
    for line in function_source(compact_kv, "kernel").splitlines():
        assert "cuda." not in line or "  # gpu: " in line, line


# Wrong kernels must fail: else the comparisons above would prove nothing

TRAPS = (
    problem_of(TWO_LAYOUTS, 3, ([0, 2, 3, 5, 6, 9], [0, 1, 3, 4]), (2, 4)),
    replace(problem_of(ONE_WORD, 2, [range(1, 8), [0, 2, 3, 5, 7, 8, 9]], (1, 3)), counts=np.array([7, 3], np.int32)),
    problem_of(LONG_ROWS, None, [[0, 2, 3]], (1,)),
    problem_of(PIECES, None, [[0, 2]], (1,)),
    problem_of(INTERLEAVED, None, [[0, 2, 4]], (1,)),
    *(outside(name, None) for name in ("lengths_at_the_end", "nodes_below_their_place")),
    *(outside(name, 5) for name in ("negative_lengths", "target_on_no_page", "page_just_behind_the_last")),
)


def check_traps(module: Any) -> None:
    """Raise AssertionError or IndexError unless the compact_kv of a module passes all traps."""
    for problem in TRAPS:
        check_moved(problem, module)


@only_simulated
def test_the_module_without_a_mistake_passes():
    module = build()
    check_traps(module)
    for name in ("float32", "few_nodes", "many_words"):
        x = GATHERED[name](np.random.default_rng(0))
        check_gathered(gathered(x, module), x)


@only_simulated
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_kernel_with_a_mistake_fails(mistake):
    with pytest.raises((AssertionError, IndexError)):
        check_traps(build(*MISTAKES[mistake]))


@only_simulated
@pytest.mark.parametrize("mistake", GATHER_MISTAKES)
def test_a_gather_with_a_mistake_fails(mistake):
    module = build(*GATHER_MISTAKES[mistake])
    with pytest.raises((AssertionError, IndexError)):
        for name in ("float32", "few_nodes", "many_words"):
            x = GATHERED[name](np.random.default_rng(0))
            check_gathered(gathered(x, module), x)


@only_simulated
@pytest.mark.parametrize("race", RACES)
def test_a_missing_barrier_shows_and_a_late_thread_alone_does_not(race):
    layers = Layers("two_words", lambda n, m: [((n, m, 2), "int64")])
    problem = problem_of(layers, None, [[0, *range(2, 2 * ROWS + 1)]], (2,))
    check_moved(problem, build_race(race, with_barrier=True))
    with pytest.raises((AssertionError, IndexError)):
        check_moved(problem, build_race(race, with_barrier=False))
