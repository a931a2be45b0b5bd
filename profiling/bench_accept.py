"""Times of what follows the target's forward pass, and of a whole decoding step, on this GPU, as CSV.

``python profiling/bench_accept.py --out profiling/results/nvidia-h200`` writes accept.csv there: argmax_tokens,
accept_greedy, accept_sampled, target_probs, compact_kv and gather_accepted beside what PyTorch offers, a copy of 1 GiB
as the ceiling of the memory, and a step as one CUDA graph with each of its stages alone. Each result is checked first,
against the mirrors, NumPy in float64 or PyTorch's indexing; what is wrong is not timed, and the exit code says so.
Columns of time, in microseconds:

- microseconds, spread_microseconds: CUDA events around one call, with nothing of it in L2 and nothing there to write
  back: 256 MiB are written and then read before each call. Median and interquartile range of `REPEATS`. For ``cpu``,
  wall time.
- dirty_microseconds: the same after writing alone, as bench_trees.py has it. Then L2 is full of lines that must be
  written back before the call's own can take their places: 50 MB of them cost a call that reads as much some 12
  microseconds of its own bandwidth. A call behind a kernel that writes much meets that, a call behind one that reads
  much does not.
- graph_us: a call's part of a CUDA graph of `GRAPH_CALLS` calls (fewer where they are long), nothing flushed. For a
  step, one replay.
- host_us: wall time until a call returns, which is before its kernel has run. For a step, without a graph.

Of compact_kv the moves are timed, as `DecodeStep` runs them, without the kernel that adds to the lengths; the stage
``finish`` of a step does that. gb_per_s counts, over microseconds: argmax_tokens, the logits; accept_sampled, the rows
of the accepted nodes; target_probs, logits and results; compact_kv and gather_accepted, what is read and written of
rows. ``path`` is how many nodes a request has accepted, the root counted, on average.

Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from a plain checkout

import bench_trees
import numpy as np
from bench_trees import GRAPH_CALLS, GRAPH_REPEATS, MACHINE, WARM_UPS, Row, Times, commit_here, measured, spoil
from rich.console import Console
from rich.progress import track
from tables import write_rows

import ddtree_numba as dd
from ddtree_numba import step as step_module
from ddtree_numba.accept import accepted, compact_kv, greedy, sampled
from ddtree_numba.device import arrays, launch, runtime

REPEATS = 30
GRAPH_MICROSECONDS = 20_000  # most that the calls of one graph take

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
LENGTH = 15  # L
VOCABULARY = 163_840  # Kimi K2's
TREE_VOCABULARY = 32_000  # of the tokens in the trees; no vocabulary here is smaller
SHARPNESS = 4.0  # the drafter's logits have a standard deviation of 20: sure enough for paths of 4 to 5 nodes
FOLLOWED = 0.8  # how often the target's token is that of a child
PEAK = 40.0  # a logit above all others

ARGMAX = (  # [B, Q, V], dtype
    ((8, 65, 163840), "bfloat16"),
    ((8, 65, 163840), "float32"),
    ((1, 17, 163840), "bfloat16"),
    ((64, 65, 32000), "bfloat16"),
    ((8, 65, 151936), "float16"),
)
GREEDY = ((8, 65), (1, 65), (64, 65), (64, 257))  # B, Q
SAMPLED = (
    ((8, 65, 163840), "float32"),
    ((8, 65, 163840), "bfloat16"),
    ((64, 65, 32000), "float32"),
    ((1, 65, 163840), "float32"),
)
PROBS_SHAPE, PROBS_DTYPE, TEMPERATURE = (8, 65, 163840), "bfloat16", 0.7
FILTERS: tuple[tuple[int | None, float | None], ...] = ((None, None), (50, None), (None, 0.9), (50, 0.9))
COMPACT = tuple((*size, page) for page in (64, 0) for size in ((61, 64, 6), (61, 64, 16), (61, 8, 6), (1, 8, 6)))
HEAD_DIM, CAPACITY, TREE_NODES, COLUMNS = 576, 2048, 65, 16  # of a cache; of the trees; of the paths
COPY_BYTES = 1 << 30
GATHER = (8, 65, 7168)  # hidden states, of Kimi K2's width
STEP = {"batch": 8, "draft_positions": LENGTH, "vocabulary": VOCABULARY, "tree_budget": 64}
STEP_LAYERS, STEP_PREFIX, PAGE_SIZE = 61, 1000, 64

EPS, WEIGHT = 2.0**-23, 2.0**-44  # of float32; of the smallest weight beside the largest, in target_probs

PEERS = ("cpu", "torch_argmax", "torch_multinomial", "torch_eager", "torch_index", "torch_copy")
STAGES = {
    "greedy": ("topk_logprobs", "build_tree", "prepare", "argmax_tokens", "accept_greedy", "compact_kv", "finish"),
    "sampled": (*("topk_logprobs", "build_tree", "prepare", "target_probs", "accept_sampled", "compact_kv", "finish"),),
}
TIMES = ("microseconds", "spread_microseconds", "dirty_microseconds", "graph_us", "host_us")
FIELDS = (
    *("operator", "case", "dtype", "B", "Q", "V", "layers", "path", "page_size", "variant", "checked", "right"),
    *(*TIMES, "gb_per_s", "repeats", "note", *MACHINE),
)


class Gpu(bench_trees.Gpu):
    """All that needs PyTorch and a GPU. Tests put NumPy in its place."""

    # Inputs

    def to_device(self, x: np.ndarray) -> Any:
        """A copy on the GPU."""
        return self.torch.from_numpy(x).cuda()

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An uninitialised array."""
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device="cuda")

    def drafts(self, batch: int, k: int) -> tuple[Any, Any]:
        """Log-probabilities [B, L, k] and ids of a drafter that is sure of itself."""
        torch = self.torch
        logits = self.logits((batch, LENGTH, TREE_VOCABULARY), "float32") * SHARPNESS
        logprobs, ids = torch.log_softmax(logits, -1).topk(k)
        return logprobs.clamp_(max=0), ids.int()

    def law(self, tokens: np.ndarray, vocabulary: int, dtype: str) -> Any:
        """Probabilities [B, Q, V]: `FOLLOWED` for the token of each node, the rest over all."""
        torch = self.torch
        probs = torch.softmax(self.logits((*tokens.shape, vocabulary), "float32"), -1).mul_(1 - FOLLOWED)
        at = self.to_device(tokens.astype(np.int64))[..., None]
        probs.scatter_add_(-1, at, torch.full(at.shape, FOLLOWED, device="cuda"))
        return probs.to(getattr(torch, dtype))

    def peak(self, logits: Any, tokens: np.ndarray) -> None:
        """Make these tokens by far the likeliest, in place."""
        logits.scatter_(-1, self.to_device(tokens.astype(np.int64))[..., None], PEAK)

    def fill(self, cache: Any, layer: int) -> Any:
        """Random bits, the same ones for the same layer, in place."""
        generator = self.torch.Generator("cuda").manual_seed(layer)
        cache.view(self.torch.int16).random_(generator=generator)
        return cache

    # Results

    def image(self, x: Any) -> Any:
        """A copy of the bytes."""
        return x.contiguous().view(self.torch.uint8).clone()

    def same(self, image: Any, x: Any) -> bool:
        """Whether an array has the bytes of an image."""
        return bool(self.torch.equal(image, x.contiguous().view(self.torch.uint8)))

    def moved(self, cache: Any, target: Any, source: Any) -> Any:
        """Image of the cache after its rows, counted over all pages, have moved."""
        found = cache.clone()
        found.flatten(0, 1)[target] = cache.flatten(0, 1)[source]
        return self.image(found)

    # What PyTorch offers

    def argmax(self, logits: Any) -> Callable[[], Any]:
        """The largest logit of each row."""
        return lambda: self.torch.argmax(logits, -1)

    def multinomial(self, probs: Any) -> Callable[[], Any]:
        """A token of each row."""
        rows = probs.flatten(0, 1)
        return lambda: self.torch.multinomial(rows, 1).view(probs.shape[:2])

    def softmax(self, logits: Any, top_k: int | None, top_p: float | None) -> Callable[[], Any]:
        """Softmax with filters as engines have them: top_k by topk, top_p by sorting the row."""
        torch = self.torch

        def call() -> Any:
            x = logits.float() / TEMPERATURE
            if top_k is not None:
                x = x.masked_fill(x < torch.topk(x, top_k).values[..., -1:], -torch.inf)
            if top_p is not None:
                rising, ids = torch.sort(x, -1)
                cut = torch.softmax(rising, -1).cumsum(-1) <= 1 - top_p
                cut[..., -1] = False
                x = torch.empty_like(x).scatter_(-1, ids, rising.masked_fill_(cut, -torch.inf))
            return torch.softmax(x, -1)

        return call

    def move(self, caches: list[Any], target: Any, source: Any) -> Callable[[], Any]:
        """Rows by index, layer after layer."""
        flat = [cache.flatten(0, 1) for cache in caches]

        def call() -> None:
            for rows in flat:
                rows[target] = rows[source]

        return call

    def take(self, x: Any, nodes: Any) -> Callable[[], Any]:
        """Rows [B, columns, ...] by index; the root's where there is no node."""
        batch = self.torch.arange(len(x), device="cuda")[:, None]
        at = nodes.long().clamp(min=0)
        return lambda: x[batch, at]

    def copies(self) -> tuple[Any, Any]:
        """Two arrays, the first to be copied to the second."""
        torch = self.torch
        source = torch.arange(COPY_BYTES // 8, dtype=torch.int64, device="cuda")
        return source, torch.empty_like(source)

    # Times

    def time(
        self,
        call: Callable[[], Any],
        calls_in_graph: int = GRAPH_CALLS,
        *,
        before: Callable[[], Any] = lambda: None,
        replay: Callable[[], Any] | None = None,
    ) -> Times:
        """The times of a call; of a graph, where its ``replay`` is given. ``before`` is run ahead and not timed.

        0 ``calls_in_graph``: no graph.
        """
        median, spread = self.cold(replay or call, before, dirty=False)
        dirty, _ = self.cold(replay or call, before, dirty=True)
        if replay is not None:
            graph = f"{self.warm(replay, before):.2f}"
        elif calls_in_graph:
            graph = f"{self.in_graph(call, max(1, min(calls_in_graph, int(GRAPH_MICROSECONDS / median)))):.2f}"
        else:
            graph = ""
        host = self.host(call, before)
        return dict(zip(TIMES, (f"{median:.1f}", f"{spread:.1f}", f"{dirty:.1f}", graph, f"{host:.1f}"), strict=True))

    def cold(self, call: Callable[[], Any], before: Callable[[], Any], *, dirty: bool) -> tuple[float, float]:
        """Median and interquartile range of the device time of a call from a flushed L2."""
        times = []
        for n in range(WARM_UPS + self.repeats):
            before()
            self.flush.zero_()
            if not dirty:
                self.flush.view(self.torch.int64).sum()  # reads all, so that what was written leaves L2
            microseconds = self.between_events(call)
            if n >= WARM_UPS:
                times.append(microseconds)
        quarters = statistics.quantiles(times, n=4)
        return statistics.median(times), quarters[2] - quarters[0]

    def warm(self, call: Callable[[], Any], before: Callable[[], Any]) -> float:
        """Device time of a call with nothing flushed, median."""
        times = []
        for _ in range(1 + GRAPH_REPEATS):
            before()
            times.append(self.between_events(call))
        return statistics.median(times[1:])

    def host(self, call: Callable[[], Any], before: Callable[[], Any]) -> float:
        """Wall time until a call returns, median."""
        times = []
        for _ in range(self.repeats):
            before()
            self.torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        self.torch.cuda.synchronize()
        return statistics.median(times)

    def wall(self, call: Callable[[], Any]) -> Times:
        """Wall time of a call that waits for its results, median and interquartile range."""
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
        quarters = statistics.quantiles(times, n=4)
        values = (f"{statistics.median(times):.1f}", f"{quarters[2] - quarters[0]:.1f}")
        return dict(zip(TIMES, values, strict=False))

    def capture(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """What replays a call, which has run before, as one CUDA graph."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            call()
        return graph.replay

    def free(self) -> None:
        """Give memory back that nothing holds."""
        gc.collect()
        self.torch.cuda.empty_cache()


# Inputs and checks, on host arrays


def spelled(tree: dd.DraftTree, share: float) -> np.ndarray:
    """A token for each node of trees on the host: with probability ``share`` that of a random child, else any."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, TREE_VOCABULARY, tree.tokens.shape, dtype=np.int32)
    for b, parents in enumerate(tree.parents):
        for node in np.unique(parents[parents >= 0]):
            if rng.random() < share:
                tokens[b, node] = tree.tokens[b, rng.choice(np.flatnonzero(parents == node))]
    return tokens


def drafted(gpu: Any, batch: int, num_nodes: int) -> dd.DraftTree:
    """Trees of a drafter that is sure of itself."""
    return dd.build_tree(*gpu.drafts(batch, num_nodes - 1), gpu.roots(batch), num_nodes - 1)


def walked(tree: dd.DraftTree) -> tuple[Any, Any, Any, Any]:
    """What a walk reads of trees."""
    return tree.tokens, tree.first_child, tree.next_sibling, tree.num_nodes


def columns(path: dd.Accepted) -> list[Any]:
    """The arrays of accepted paths."""
    return [getattr(path, name) for name in accepted.shapes(0, 0)]


def no_stop(batch: int) -> np.ndarray:
    """Stop tokens for a mirror: none."""
    return np.full((batch, 1), accepted.NO_TOKEN)


def same_paths(gpu: Any, found: dd.Accepted, expected: dd.Accepted) -> bool:
    """Whether all that was accepted is as expected."""
    pairs = zip(columns(found), columns(expected), strict=True)
    return all(np.array_equal(gpu.to_host(x), y) for x, y in pairs)


def walk_on_cpu(
    tokens: np.ndarray, first_child: np.ndarray, next_sibling: np.ndarray, num_nodes: np.ndarray, targets: np.ndarray
) -> list[tuple[list[int], int]]:
    """Nodes and bonus token of each request, in Python."""
    found = []
    trees = (x.tolist() for x in (tokens, first_child, next_sibling, num_nodes, targets))
    for words, children, siblings, n, target in zip(*trees, strict=True):
        path = [0] if n else []
        child = children[0] if n else -1
        while child >= 0:
            if words[child] == target[path[-1]]:
                path.append(child)
                child = children[child]
            else:
                child = siblings[child]
        found.append((path, target[path[-1]] if path else accepted.NO_TOKEN))
    return found


def right_law(logits: np.ndarray, probs: np.ndarray, top_k: int | None, top_p: float | None) -> bool:
    """Whether a row is within the bound that docs/target_probs.md derives, and keeps what it must."""
    x, probs = logits.astype(np.float64), probs.astype(np.float64)
    far = (x.max() - x) / np.float64(np.float32(TEMPERATURE))
    law = np.exp(-far)
    if top_k is not None:
        law[x < -np.sort(-x)[top_k - 1]] = 0
    law /= law.sum()
    if top_p is not None:
        lowest = x[probs > 0].min(initial=np.inf)
        slack = EPS * (4 + 3 * (law * far).sum())
        if law[x > lowest].sum() >= top_p + slack or law[x >= lowest].sum() < top_p - slack:
            return False
        law[x < lowest] = 0
        law /= law.sum()
    bound = law * (EPS * (4 + 1.5 * far + 1.5 * (law * far).sum()) + WEIGHT * x.size) + 2.0**-125
    return bool(np.all(np.abs(probs - law) <= bound))


def paths_by_hand(batch: int, count: int, num_nodes: int, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Accepted nodes [B, room] and how many, all rows of which but the root's move."""
    rng = np.random.default_rng(0)
    nodes = np.full((batch, room), -1, np.int32)
    for row in nodes:
        row[:count] = 0, *np.sort(rng.choice(np.arange(count, num_nodes), count - 1, replace=False))
    return nodes, np.full(batch, count, np.int32)


# Measurements


def with_bandwidth(row: Row, nbytes: int) -> Row:
    """The row with GB/s, if it was timed."""
    if "microseconds" in row:
        row["gb_per_s"] = f"{nbytes / float(row['microseconds']) / 1e3:.0f}"
    return row


def argmax_rows(gpu: Any, shape: tuple[int, int, int], dtype: str) -> Iterator[Row]:
    """argmax_tokens, and PyTorch's argmax, which may choose among equals."""
    logits = gpu.logits(shape, dtype)
    host = gpu.to_host(logits)
    expected = host.argmax(-1)
    largest = np.take_along_axis(host, expected[..., None], -1)
    out = gpu.empty(shape[:2], "int32")
    known = {"operator": "argmax_tokens", "dtype": dtype, "checked": "all rows"}
    known |= dict(zip("BQV", shape, strict=True))

    def ours() -> Any:
        return dd.argmax_tokens(logits, out=out)

    def right() -> bool:
        spoil(out)
        return np.array_equal(gpu.to_host(ours()), expected)

    theirs = gpu.argmax(logits)

    def right_of_torch() -> bool:
        return np.array_equal(np.take_along_axis(host, gpu.to_host(theirs())[..., None], -1), largest)

    for variant, check, call in (("argmax_tokens", right, ours), ("torch_argmax", right_of_torch, theirs)):
        row = measured({**known, "variant": variant}, gpu, check, call, gpu.time)
        yield with_bandwidth(row, logits.shape[0] * shape[1] * shape[2] * ITEMSIZE[dtype])


def greedy_rows(gpu: Any, batch: int, num_nodes: int) -> Iterator[Row]:
    """accept_greedy, and the walk in Python behind copies to the host; nothing is copied back."""
    tree = drafted(gpu, batch, num_nodes)
    host = tree.to_host()
    tokens = spelled(host, FOLLOWED)
    targets = gpu.to_device(tokens)
    out = dd.Accepted.empty(targets, batch, tree.max_depth)
    expected = dd.Accepted.empty(tokens, batch, tree.max_depth)
    greedy.mirror(*walked(host), tokens, no_stop(batch), *columns(expected))
    known = {"operator": "accept_greedy", "B": batch, "Q": num_nodes, "checked": "all requests"}
    known["path"] = f"{expected.num_accepted.mean():.1f}"

    def ours() -> Any:
        return dd.accept_greedy(tree, targets, out=out)

    def right() -> bool:
        spoil(*columns(out))
        return same_paths(gpu, ours(), expected)

    def on_cpu() -> list[tuple[list[int], int]]:
        return walk_on_cpu(*(gpu.to_host(x) for x in (*walked(tree), targets)))

    def right_on_cpu() -> bool:
        paths = zip(expected.nodes, expected.num_accepted, expected.bonus_tokens, strict=True)
        return on_cpu() == [(nodes[:count].tolist(), int(bonus)) for nodes, count, bonus in paths]

    yield measured({**known, "variant": "accept_greedy"}, gpu, right, ours, gpu.time)
    yield measured({**known, "variant": "cpu"}, gpu, right_on_cpu, on_cpu, gpu.wall)


def sampled_rows(gpu: Any, shape: tuple[int, int, int], dtype: str) -> Iterator[Row]:
    """accept_sampled, which reads the rows that its walk visits, and PyTorch's multinomial over all rows."""
    batch, num_nodes, vocabulary = shape
    tree = drafted(gpu, batch, num_nodes)
    host = tree.to_host()
    probs = gpu.law(spelled(host, 1.0), vocabulary, dtype)
    on_host = gpu.to_host(probs)
    seeds = np.arange(batch, dtype=np.int64) * 7919
    positions = np.arange(batch, dtype=np.int32) + STEP_PREFIX
    draws = {"seeds": gpu.to_device(seeds), "positions": gpu.to_device(positions)}
    out = dd.Accepted.empty(probs, batch, tree.max_depth)
    expected = dd.Accepted.empty(seeds, batch, tree.max_depth)
    sampled.mirror(*walked(host), on_host, seeds, positions, None, no_stop(batch), *columns(expected))
    known = {"operator": "accept_sampled", "dtype": dtype, "path": f"{expected.num_accepted.mean():.1f}"}
    known |= dict(zip("BQV", shape, strict=True))

    def ours() -> Any:
        return dd.accept_sampled(tree, probs, **draws, out=out)

    def right() -> bool:
        spoil(*columns(out))
        return same_paths(gpu, ours(), expected)

    row = {**known, "variant": "accept_sampled", "checked": "all requests"}
    nbytes = int(expected.num_accepted.sum()) * vocabulary * ITEMSIZE[dtype]
    yield with_bandwidth(measured(row, gpu, right, ours, gpu.time), nbytes)

    theirs = gpu.multinomial(probs)

    def possible() -> bool:
        return bool(np.all(np.take_along_axis(on_host, gpu.to_host(theirs())[..., None], -1) > 0))

    row = {**known, "variant": "torch_multinomial", "path": "", "checked": "no impossible token"}
    yield measured(row, gpu, possible, theirs, lambda call: gpu.time(call, 0))


def probs_rows(gpu: Any, top_k: int | None, top_p: float | None) -> Iterator[Row]:
    """target_probs, and PyTorch's operators, which cut ties as they come."""
    shape, dtype = PROBS_SHAPE, PROBS_DTYPE
    logits = gpu.logits(shape, dtype)
    out = gpu.empty(shape, "float32")
    filters = [f"{name} {x}" for name, x in (("top_k", top_k), ("top_p", top_p)) if x is not None]
    known = {"operator": "target_probs", "case": ", ".join(filters) or "no filter", "dtype": dtype}
    known |= dict(zip("BQV", shape, strict=True))
    at = sorted({(0, 0), (shape[0] // 2, shape[1] // 2), (shape[0] - 1, shape[1] - 1)})
    nbytes = shape[0] * shape[1] * shape[2] * (ITEMSIZE[dtype] + 4)

    def ours() -> Any:
        return dd.target_probs(logits, TEMPERATURE, top_k, top_p, out=out)

    def right() -> bool:
        spoil(out)
        probs = ours()
        return all(right_law(gpu.to_host(logits[place]), gpu.to_host(probs[place]), top_k, top_p) for place in at)

    row = {**known, "variant": "target_probs", "checked": f"rows {', '.join(f'{b}:{q}' for b, q in at)}"}
    yield with_bandwidth(measured(row, gpu, right, ours, gpu.time), nbytes)

    theirs = gpu.softmax(logits, top_k, top_p)

    def right_sums() -> bool:
        probs = theirs()
        return all(abs(gpu.to_host(probs[place]).astype(np.float64).sum() - 1) < 1e-4 for place in at)

    row = {**known, "variant": "torch_eager", "checked": "sums"}
    yield with_bandwidth(measured(row, gpu, right_sums, theirs, gpu.time), nbytes)


def caches_of(gpu: Any, layers: int, batch: int, capacity: int, page_size: int) -> tuple[list[Any], np.ndarray | None]:
    """Layers of random bits, and the table of their pages in any order; none for contiguous ones."""
    shape, table = (batch, capacity, HEAD_DIM), None
    if page_size:
        per_request = -(-capacity // page_size)
        shape = (batch * per_request, page_size, HEAD_DIM)
        pages = np.random.default_rng(0).permutation(batch * per_request)
        table = pages.astype(np.int32).reshape(batch, per_request)
    return [gpu.fill(gpu.empty(shape, "bfloat16"), layer) for layer in range(layers)], table


def compact_rows(gpu: Any, layers: int, batch: int, count: int, page_size: int) -> Iterator[Row]:
    """compact_kv, and PyTorch's indexing, layer after layer."""
    caches, table = caches_of(gpu, layers, batch, CAPACITY, page_size)
    nodes, counts = paths_by_hand(batch, count, TREE_NODES, COLUMNS)
    start = np.random.default_rng(1).integers(0, CAPACITY - TREE_NODES, batch, dtype=np.int32)

    def rows(places: np.ndarray) -> Any:
        """Places in the requests [B, n] as rows over all pages."""
        of_request = np.arange(batch)[:, None]
        size = page_size or CAPACITY
        pages = of_request if table is None else table[of_request, places // size].astype(np.int64)
        return gpu.to_device((pages * size + places % size).ravel())

    source = rows(start[:, None] + nodes[:, 1:count])
    target = rows(start[:, None] + np.arange(1, count))
    path = dd.Accepted(gpu.to_device(nodes), gpu.to_device(counts), None, None)
    block_table = None if table is None else gpu.to_device(table)
    lengths = gpu.to_device(start)
    view = arrays.view("cache_seqlens", lengths)
    some = {layer: caches[layer] for layer in bench_trees.ends(layers)}
    known = {"operator": "compact_kv", "dtype": "bfloat16", "B": batch, "Q": TREE_NODES, "layers": layers}
    known |= {"path": count, "page_size": page_size or "", "case": "paged" if page_size else "contiguous"}
    known["checked"] = f"layers {', '.join(map(str, some))}"
    nbytes = 2 * layers * batch * (count - 1) * HEAD_DIM * ITEMSIZE["bfloat16"]

    def after(call: Callable[[], Any]) -> bool:
        for layer, cache in some.items():
            gpu.fill(cache, layer)
        expected = {layer: gpu.moved(cache, target, source) for layer, cache in some.items()}
        call()
        return all(gpu.same(expected[layer], cache) for layer, cache in some.items())

    def right() -> bool:
        same = after(lambda: dd.compact_kv(caches, lengths, path, block_table=block_table))
        same = same and np.array_equal(gpu.to_host(lengths), start + counts)
        lengths[...] = gpu.to_device(start)
        return same and after(ours)

    def ours() -> Any:
        return compact_kv.run(compact_kv.moves_of(caches, view, path, block_table))

    theirs = gpu.move(caches, target, source)
    for variant, check, call in (("compact_kv", right, ours), ("torch_index", lambda: after(theirs), theirs)):
        yield with_bandwidth(measured({**known, "variant": variant}, gpu, check, call, gpu.time), nbytes)


def copy_rows(gpu: Any) -> Iterator[Row]:
    """A copy within the GPU's memory: what any kernel here can reach."""
    source, target = gpu.copies()
    image = gpu.image(source)

    def call() -> None:
        target[...] = source

    def right() -> bool:
        spoil(target)
        call()
        return gpu.same(image, target)

    row = {"operator": "copy", "case": f"{COPY_BYTES >> 20} MiB", "variant": "torch_copy", "checked": "all bytes"}
    yield with_bandwidth(measured(row, gpu, right, call, gpu.time), 2 * COPY_BYTES)


def gather_rows(gpu: Any, shape: tuple[int, int, int]) -> Iterator[Row]:
    """gather_accepted, and PyTorch's indexing, which has no zeros behind the path."""
    count = 6
    nodes, counts = paths_by_hand(shape[0], count, shape[1], COLUMNS)
    x = gpu.logits(shape, "bfloat16")
    path = dd.Accepted(gpu.to_device(nodes), gpu.to_device(counts), None, None)
    out = gpu.empty((shape[0], COLUMNS, shape[2]), "bfloat16")
    taken = gpu.to_host(x)[np.arange(shape[0])[:, None], nodes[:, :count]]
    known = {"operator": "gather_accepted", "case": f"rows of {shape[2]}", "dtype": "bfloat16", "path": count}
    known |= {"B": shape[0], "Q": shape[1], "checked": "all rows"}
    nbytes = shape[0] * (count + COLUMNS) * shape[2] * ITEMSIZE["bfloat16"]

    def ours() -> Any:
        return dd.gather_accepted(x, path, out=out)

    def right() -> bool:
        spoil(out)
        found = gpu.to_host(ours())
        return np.array_equal(found[:, :count], taken) and not found[:, count:].any()

    theirs = gpu.take(x, path.nodes)

    def right_of_torch() -> bool:
        return np.array_equal(gpu.to_host(theirs())[:, :count], taken)

    for variant, check, call in (("gather_accepted", right, ours), ("torch_index", right_of_torch, theirs)):
        yield with_bandwidth(measured({**known, "variant": variant}, gpu, check, call, gpu.time), nbytes)


def step_rows(gpu: Any, case: str) -> Iterator[Row]:
    """A step as one graph, with a target whose logits lie ready; then each of its stages alone."""
    sizes, sampling = STEP, case == "sampled"
    batch, budget, vocabulary = sizes["batch"], sizes["tree_budget"], sizes["vocabulary"]
    drafts = gpu.logits((batch, sizes["draft_positions"], vocabulary), "bfloat16") * SHARPNESS
    logits = gpu.logits((batch, budget + 1, vocabulary), "bfloat16")
    first_roots, first_lengths = gpu.roots(batch), gpu.to_device(np.full(batch, STEP_PREFIX, np.int32))
    roots, lengths = gpu.to_device(np.zeros(batch, np.int32)), gpu.to_device(np.zeros(batch, np.int32))
    caches, table = caches_of(gpu, STEP_LAYERS, batch, CAPACITY, PAGE_SIZE)
    block_table = gpu.to_device(table)
    controls: dict[str, Any] = {}
    if sampling:
        controls = {
            "temperature": gpu.to_device(np.full(batch, TEMPERATURE, np.float32)),
            "top_k": gpu.to_device(np.full(batch, 50, np.int32)),
            "top_p": gpu.to_device(np.full(batch, 0.9, np.float32)),
        }
    seeds = gpu.to_device(np.arange(batch, dtype=np.int64))
    step = dd.DecodeStep(drafts, **sizes, sampled=sampling)
    best, choice, tree, path = step._best, step._choice, step.tree, step.accepted

    def eager() -> Any:
        given = {**controls, "seeds": seeds} if sampling else {}
        forward = lambda *_: logits  # noqa: E731
        return step(drafts, roots, lengths, forward, kv_caches=caches, block_table=block_table, **given)

    def start() -> None:
        roots[...] = first_roots
        lengths[...] = first_lengths

    def fresh() -> None:
        start()
        for layer in bench_trees.ends(len(caches)):
            gpu.fill(caches[layer], layer)

    fresh()
    eager()  # for the trees, by which the target chooses
    gpu.peak(logits, spelled(tree.to_host(), FOLLOWED))
    known = {"operator": "step", "case": case, "dtype": "bfloat16", "B": batch, "Q": budget + 1, "V": vocabulary}
    known |= {"layers": STEP_LAYERS, "page_size": PAGE_SIZE}

    # What each stage writes, and what runs it alone on the arrays as a step leaves them

    live = arrays.view("live_lengths", step.live_lengths)
    own: list[Any] = []  # the launches of prepare and finish, which are the step's own

    def noted(*args: Any, **sizes: Any) -> None:
        own.append((args, sizes))
        launch.launch(*args, **sizes)

    with mock.patch.object(step_module, "launch", noted):
        fresh()
        eager()

    def again_own(n: int) -> None:
        args, sizes = own[n]
        launch.launch(*args, **sizes)

    stages: dict[str, tuple[list[Any], Callable[[], Any]]] = {
        "topk_logprobs": (list(best), lambda: dd.topk_logprobs(drafts, best[0].shape[2], out=best)),
        "build_tree": (
            [tree.tokens, tree.parents, tree.depths, tree.scores],
            lambda: dd.build_tree(*best, roots, budget, out=tree),
        ),
        "prepare": ([step.positions, step.live_lengths], lambda: again_own(0)),
        "argmax_tokens": ([choice], lambda: dd.argmax_tokens(logits, out=choice)),
        "target_probs": ([choice], lambda: dd.target_probs(logits, **controls, out=choice)),
        "accept_greedy": (columns(path), lambda: dd.accept_greedy(tree, choice, out=path)),
        "accept_sampled": (
            columns(path),
            lambda: dd.accept_sampled(tree, choice, seeds=seeds, positions=step.live_lengths, out=path),
        ),
        "compact_kv": (
            [caches[layer] for layer in bench_trees.ends(len(caches))],
            lambda: compact_kv.run(compact_kv.moves_of(caches, live, path, block_table)),
        ),
        "finish": ([roots, lengths], lambda: again_own(1)),
    }
    written = [x for name in STAGES[case] for x in stages[name][0]]

    wanted = {name: [gpu.image(x) for x in stages[name][0]] for name in STAGES[case]}
    everything = [image for name in STAGES[case] for image in wanted[name]]
    known["path"] = f"{gpu.to_host(path.num_accepted).mean():.1f}"
    nodes = gpu.to_host(path.nodes)
    moving = bool(np.any(nodes > np.arange(nodes.shape[1])))
    graph: list[Callable[[], Any]] = []

    def again(name: str) -> None:
        """The arrays as they are ahead of a stage, or of the whole step, and none of its results among them."""
        fresh()
        if name not in ("compact_kv", "finish"):  # what these write has just been made anew
            spoil(*(stages[name][0] if name else [*columns(path), step.positions, tree.tokens, tree.parents]))

    def right() -> bool:
        graph.append(gpu.capture(eager))
        again("")
        graph[0]()
        return moving and all(gpu.same(*pair) for pair in zip(everything, written, strict=True))

    row = {**known, "variant": "graph", "checked": "as without a graph"}
    row = measured(row, gpu, right, eager, lambda call: gpu.time(call, before=start, replay=graph[0]))
    yield row

    for name in STAGES[case]:

        def right_stage(name: str = name, arrays_hold: bool = row["right"]) -> bool:
            if not arrays_hold:
                fresh()
                eager()
            again(name)
            stages[name][1]()
            return all(gpu.same(*pair) for pair in zip(wanted[name], stages[name][0], strict=True))

        row = {**known, "operator": "stage", "variant": name, "checked": "as in the step"}
        row = measured(row, gpu, right_stage, stages[name][1], gpu.time)
        yield row


def jobs(quick: bool) -> list[tuple[Callable[..., Iterator[Row]], tuple[Any, ...]]]:
    """The measurements one after the other; the first of each kind with ``quick``."""
    few = slice(1) if quick else slice(None)
    return [
        *((argmax_rows, job) for job in ARGMAX[few]),
        *((greedy_rows, job) for job in GREEDY[few]),
        *((sampled_rows, job) for job in SAMPLED[few]),
        *((probs_rows, job) for job in FILTERS[few]),
        (copy_rows, ()),
        *((compact_rows, job) for job in COMPACT[few]),
        (gather_rows, (GATHER,)),
        *((step_rows, (case,)) for case in tuple(STAGES)[few]),
    ]


def rows_of(gpu: Any, job: Callable[..., Iterator[Row]], given: tuple[Any, ...]) -> list[Row]:
    """The rows of a job; one that is not right where its inputs cannot be made. Then its memory is free again."""
    rows: list[Row] = []
    try:
        rows.extend(job(gpu, *given))
    except Exception as error:  # one job must not cost the others
        note = f"{job.__name__}{given}: {type(error).__name__}: {error}".replace("\n", " ")
        rows.append({"operator": job.__name__, "variant": "", "right": False, "note": note, **gpu.machine()})
    gpu.free()
    return rows


def line(row: Row) -> str:
    """A row for people."""
    sizes = ",".join(str(row.get(name, "")) for name in ("B", "Q", "V", "layers", "path"))
    text = f"{row['operator']:16}{row.get('case', ''):21} {row.get('dtype', ''):9}{sizes:22} {row['variant']:18}"
    text += " ".join(f"{row.get(name, ''):>9}" for name in (*TIMES, "gb_per_s"))
    return f"{text} {row.get('note', '')}{'' if row['right'] else '  WRONG'}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, print; 1 when a result of ours was wrong, 2 when nothing can be measured here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("profiling/results/local"), help="folder for the CSV")
    parser.add_argument("--commit", help="commit that is measured; default: what git says")
    parser.add_argument("--quick", action="store_true", help="one of each kind, to accept_quick.csv")
    options = parser.parse_args(arguments)
    if runtime.SIMULATOR:
        print(f"this measures a GPU, and there is none: {runtime.REASON}", file=sys.stderr)
        return 2
    try:
        gpu = Gpu(options.commit or commit_here(), 5 if options.quick else REPEATS)
    except ImportError as error:
        needs = "this compares with PyTorch and reads the clocks; pip install torch nvidia-ml-py"
        print(f"{error}: {needs}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"this measures a GPU, and there is none: {error}", file=sys.stderr)
        return 2
    every = track(jobs(options.quick), "measuring", console=Console(stderr=True))
    rows = [row for job, given in every for row in rows_of(gpu, job, given)]
    write_rows(options.out / ("accept_quick.csv" if options.quick else "accept.csv"), rows, FIELDS)
    print(f"{'B,Q,V,layers,path':>63} {'':25}" + " ".join(f"{name:>9.9}" for name in (*TIMES, "gb_per_s")))
    for row in rows:
        print(line(row))
    return 0 if all(row["right"] for row in rows if row["variant"] not in PEERS) else 1


if __name__ == "__main__":
    sys.exit(main())
