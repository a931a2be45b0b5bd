"""Times of what follows the target's forward pass, and of a whole decoding step, on this GPU, as CSV.

``python profiling/bench_accept.py --out profiling/results/nvidia-h200`` writes accept.csv there: argmax_tokens,
accept_greedy, accept_sampled, target_probs, compact_kv and gather_accepted beside what PyTorch offers, a copy of 1 GiB
as the ceiling of the memory, and a step as one CUDA graph with each of its stages alone. Each result is checked first,
against the mirrors, NumPy in float64 or PyTorch's indexing; what is wrong is not timed, and the exit code says so.
The columns of time are those of harness.py, and

- dirty_microseconds: as microseconds, but L2 is full of lines that must be written back before the call's own can take
  their places: 50 MB of them cost a call that reads as much some 12 microseconds of its own bandwidth. A call behind a
  kernel that writes much meets that, a call behind one that reads much does not.

For a step, graph_us is one replay, host_us that of the launches without a graph, and sustained_us holds two small
copies that set it back. Of compact_kv the moves are timed, as `DecodeStep` runs them, without the kernel that adds to
the lengths; the stage ``finish`` of a step does that. gb_per_s is what the operator must move, as the functions beside
it count, over microseconds. ``case`` also names the sweep over one size that a row belongs to; ``path`` is how many
nodes a request has accepted, the root counted, on average.

Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import harness
import numpy as np
from harness import (
    GRAPH_CALLS,
    ITEMSIZE,
    MACHINE,
    Job,
    Row,
    Times,
    ends,
    measured,
    nothing,
    spoil,
    wall_times,
    with_rate,
)

import ddtree_numba as dd
from ddtree_numba import step as step_module
from ddtree_numba.accept import accepted, argmax_tokens, compact_kv, greedy, sampled, target_probs
from ddtree_numba.device import arrays, launch

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
# Sweeps: in place of one size of PROBS_SHAPE; and of the first of COMPACT.
SWEPT_VOCABULARIES, SWEPT_BATCHES, SWEPT_NODES = (32000, 65536, 262144), (1, 4, 16), (9, 17, 33)
SWEPT_PAGES = (1, 16, 256)
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
TIMES = ("microseconds", "spread_microseconds", "dirty_microseconds", *harness.TIMES[2:])
FIELDS = (
    *("operator", "case", "dtype", "B", "Q", "V", "layers", "path", "page_size", "variant", "checked", "right"),
    *(*TIMES, "gb_per_s", "repeats", "note", *MACHINE),
)


class Gpu(harness.Gpu):
    """Inputs, images of results, and peers. Tests put NumPy in its place."""

    # Inputs

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

    def argmax(self, logits: Any) -> Any:
        """The largest logit of each row."""
        return self.torch.argmax(logits, -1)

    def multinomial(self, probs: Any) -> Any:
        """A token of each row."""
        return self.torch.multinomial(probs.flatten(0, 1), 1).view(probs.shape[:2])

    def softmax(self, logits: Any, top_k: int | None, top_p: float | None) -> Any:
        """Softmax with filters as engines have them: top_k by topk, top_p by sorting the row."""
        torch = self.torch
        x = logits.float() / TEMPERATURE
        if top_k is not None:
            x = x.masked_fill(x < torch.topk(x, top_k).values[..., -1:], -torch.inf)
        if top_p is not None:
            rising, ids = torch.sort(x, -1)
            cut = torch.softmax(rising, -1).cumsum(-1) <= 1 - top_p
            cut[..., -1] = False
            x = torch.empty_like(x).scatter_(-1, ids, rising.masked_fill_(cut, -torch.inf))
        return torch.softmax(x, -1)

    def move(self, caches: list[Any], target: Any, source: Any) -> Callable[[], Any]:
        """Rows by index, layer after layer."""
        flat = [cache.flatten(0, 1) for cache in caches]

        def call() -> None:
            for rows in flat:
                rows[target] = rows[source]

        return call

    def take(self, nodes: Any) -> Callable[[Any], Any]:
        """Rows [B, columns, ...] by index; the root's where there is no node."""
        batch = self.torch.arange(len(nodes), device="cuda")[:, None]
        at = nodes.long().clamp(min=0)
        return lambda x: x[batch, at]

    def copies(self) -> tuple[Any, Any]:
        """Two arrays, the first to be copied to the second."""
        torch = self.torch
        source = torch.arange(COPY_BYTES // 8, dtype=torch.int64, device="cuda")
        return source, torch.empty_like(source)

    # Times

    def time(
        self,
        call: Callable[..., Any],
        calls_in_graph: int = GRAPH_CALLS,
        *,
        inputs: tuple[Any, ...] = (),
        before: Callable[[], Any] = nothing,
        replay: Callable[[], Any] | None = None,
    ) -> Times:
        """The usual times, and that with L2 full of what must be written back."""
        found = super().time(call, calls_in_graph, inputs=inputs, before=before, replay=replay)
        dirty, _ = self.alone(replay or partial(call, *inputs), before, dirty=True)
        return {**found, "dirty_microseconds": f"{dirty:.1f}"}


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


def roots_of(gpu: Any, batch: int) -> Any:
    """Any root tokens [B]."""
    return gpu.to_device(np.arange(batch, dtype=np.int32))


def drafted(gpu: Any, batch: int, num_nodes: int) -> dd.DraftTree:
    """Trees of a drafter that is sure of itself."""
    return dd.build_tree(*gpu.drafts(batch, num_nodes - 1), roots_of(gpu, batch), num_nodes - 1)


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


def argmax_rows(
    gpu: Any,
    shape: tuple[int, int, int],
    dtype: str,
    sweep: str = "",
    others: dict[str, Callable[..., Any]] | None = None,
) -> Iterator[Row]:
    """argmax_tokens and ``others`` of its signature, and PyTorch's argmax, which may choose among equals."""
    logits = gpu.logits(shape, dtype)
    host = gpu.to_host(logits)
    expected = host.argmax(-1)
    largest = np.take_along_axis(host, expected[..., None], -1)
    out = gpu.empty(shape[:2], "int32")
    known = {"operator": "argmax_tokens", "case": sweep, "dtype": dtype, "checked": "all rows"}
    known |= dict(zip("BQV", shape, strict=True))
    ours = {"argmax_tokens": dd.argmax_tokens, **(others or {})}
    calls = {name: partial(operator, out=out) for name, operator in ours.items()} | {"torch_argmax": gpu.argmax}
    for variant, call in calls.items():

        def right(variant: str = variant, call: Callable[..., Any] = call) -> bool:
            spoil(out)
            found = gpu.to_host(call(logits))
            if variant in ours:
                return np.array_equal(found, expected)
            return np.array_equal(np.take_along_axis(host, found[..., None], -1), largest)

        row = measured({**known, "variant": variant}, gpu, right, call, partial(gpu.time, inputs=(logits,)))
        yield with_rate(row, "gb_per_s", argmax_tokens.bytes_moved(*shape, ITEMSIZE[dtype]))


def greedy_rows(gpu: Any, batch: int, num_nodes: int, sweep: str = "") -> Iterator[Row]:
    """accept_greedy, and the walk in Python behind copies to the host; nothing is copied back."""
    tree = drafted(gpu, batch, num_nodes)
    host = tree.to_host()
    tokens = spelled(host, FOLLOWED)
    targets = gpu.to_device(tokens)
    out = dd.Accepted.empty(targets, batch, tree.max_depth)
    expected = dd.Accepted.empty(tokens, batch, tree.max_depth)
    greedy.mirror(*walked(host), tokens, no_stop(batch), *columns(expected))
    known = {"operator": "accept_greedy", "case": sweep, "B": batch, "Q": num_nodes, "checked": "all requests"}
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

    row = measured({**known, "variant": "accept_greedy"}, gpu, right, ours, gpu.time)
    yield with_rate(row, "gb_per_s", greedy.bytes_moved(batch, num_nodes, tree.max_depth))
    on_wall = partial(wall_times, repeats=gpu.repeats)
    yield measured({**known, "variant": "cpu"}, gpu, right_on_cpu, on_cpu, on_wall)


def sampled_rows(gpu: Any, shape: tuple[int, int, int], dtype: str, sweep: str = "") -> Iterator[Row]:
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
    known = {"operator": "accept_sampled", "case": sweep, "dtype": dtype, **dict(zip("BQV", shape, strict=True))}
    timer = partial(gpu.time, inputs=(probs,))

    def ours(probs: Any) -> Any:
        return dd.accept_sampled(tree, probs, **draws, out=out)

    def right() -> bool:
        spoil(*columns(out))
        return same_paths(gpu, ours(probs), expected)

    row = {**known, "path": f"{expected.num_accepted.mean():.1f}", "variant": "accept_sampled"}
    row = measured({**row, "checked": "all requests"}, gpu, right, ours, timer)
    nbytes = sampled.bytes_moved(int(expected.num_accepted.sum()), vocabulary, ITEMSIZE[dtype])
    yield with_rate(row, "gb_per_s", nbytes)

    def possible() -> bool:
        tokens = gpu.to_host(gpu.multinomial(probs))
        return bool(np.all(np.take_along_axis(on_host, tokens[..., None], -1) > 0))

    row = {**known, "variant": "torch_multinomial", "checked": "no impossible token"}
    yield measured(row, gpu, possible, gpu.multinomial, partial(timer, calls_in_graph=0))


def probs_rows(
    gpu: Any, top_k: int | None, top_p: float | None, shape: tuple[int, int, int] | None = None, sweep: str = ""
) -> Iterator[Row]:
    """target_probs, and PyTorch's operators, which cut ties as they come."""
    shape, dtype = shape or PROBS_SHAPE, PROBS_DTYPE
    logits = gpu.logits(shape, dtype)
    out = gpu.empty(shape, "float32")
    filters = [f"{name} {x}" for name, x in (("top_k", top_k), ("top_p", top_p)) if x is not None]
    case = ", ".join(filters) or "no filter"
    known = {"operator": "target_probs", "case": f"{case}, {sweep}" if sweep else case, "dtype": dtype}
    known |= dict(zip("BQV", shape, strict=True))
    at = sorted({(0, 0), (shape[0] // 2, shape[1] // 2), (shape[0] - 1, shape[1] - 1)})
    nbytes = target_probs.bytes_moved(*shape, ITEMSIZE[dtype])
    timer = partial(gpu.time, inputs=(logits,))

    def ours(logits: Any) -> Any:
        return dd.target_probs(logits, TEMPERATURE, top_k, top_p, out=out)

    def theirs(logits: Any) -> Any:
        return gpu.softmax(logits, top_k, top_p)

    def right() -> bool:
        spoil(out)
        probs = ours(logits)
        return all(right_law(gpu.to_host(logits[place]), gpu.to_host(probs[place]), top_k, top_p) for place in at)

    row = {**known, "variant": "target_probs", "checked": f"rows {', '.join(f'{b}:{q}' for b, q in at)}"}
    yield with_rate(measured(row, gpu, right, ours, timer), "gb_per_s", nbytes)

    def right_sums() -> bool:
        probs = theirs(logits)
        return all(abs(gpu.to_host(probs[place]).astype(np.float64).sum() - 1) < 1e-4 for place in at)

    row = {**known, "variant": "torch_eager", "checked": "sums"}
    yield with_rate(measured(row, gpu, right_sums, theirs, timer), "gb_per_s", nbytes)


def caches_of(gpu: Any, layers: int, batch: int, capacity: int, page_size: int) -> tuple[list[Any], np.ndarray | None]:
    """Layers of random bits, and the table of their pages in any order; none for contiguous ones."""
    shape, table = (batch, capacity, HEAD_DIM), None
    if page_size:
        per_request = -(-capacity // page_size)
        shape = (batch * per_request, page_size, HEAD_DIM)
        pages = np.random.default_rng(0).permutation(batch * per_request)
        table = pages.astype(np.int32).reshape(batch, per_request)
    return [gpu.fill(gpu.empty(shape, "bfloat16"), layer) for layer in range(layers)], table


def compact_rows(gpu: Any, layers: int, batch: int, count: int, page_size: int, sweep: str = "") -> Iterator[Row]:
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
    some = {layer: caches[layer] for layer in ends(layers)}
    known = {"operator": "compact_kv", "dtype": "bfloat16", "B": batch, "Q": TREE_NODES, "layers": layers}
    case = "paged" if page_size else "contiguous"
    known |= {"path": count, "page_size": page_size or "", "case": f"{case}, {sweep}" if sweep else case}
    known["checked"] = f"layers {', '.join(map(str, some))}"
    nbytes = compact_kv.bytes_moved(batch * (count - 1), layers, HEAD_DIM * ITEMSIZE["bfloat16"])

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
        row = measured({**known, "variant": variant}, gpu, check, call, gpu.time)
        yield with_rate(row, "gb_per_s", nbytes)


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
    yield with_rate(measured(row, gpu, right, call, gpu.time), "gb_per_s", 2 * COPY_BYTES)


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
    nbytes = compact_kv.gathered_bytes(shape[0] * count, shape[0] * COLUMNS, shape[2] * ITEMSIZE["bfloat16"])

    def ours(x: Any) -> Any:
        return dd.gather_accepted(x, path, out=out)

    def right() -> bool:
        spoil(out)
        found = gpu.to_host(ours(x))
        return np.array_equal(found[:, :count], taken) and not found[:, count:].any()

    theirs = gpu.take(path.nodes)

    def right_of_torch() -> bool:
        return np.array_equal(gpu.to_host(theirs(x))[:, :count], taken)

    for variant, check, call in (("gather_accepted", right, ours), ("torch_index", right_of_torch, theirs)):
        row = measured({**known, "variant": variant}, gpu, check, call, partial(gpu.time, inputs=(x,)))
        yield with_rate(row, "gb_per_s", nbytes)


def step_rows(gpu: Any, case: str) -> Iterator[Row]:
    """A step as one graph, with a target whose logits lie ready; then each of its stages alone."""
    sizes, sampling = STEP, case == "sampled"
    batch, budget, vocabulary = sizes["batch"], sizes["tree_budget"], sizes["vocabulary"]
    drafts = gpu.logits((batch, sizes["draft_positions"], vocabulary), "bfloat16") * SHARPNESS
    logits = gpu.logits((batch, budget + 1, vocabulary), "bfloat16")
    first_roots, first_lengths = roots_of(gpu, batch), gpu.to_device(np.full(batch, STEP_PREFIX, np.int32))
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
        for layer in ends(len(caches)):
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
            [caches[layer] for layer in ends(len(caches))],
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


def sweeps() -> Iterator[tuple[Callable[..., Iterator[Row]], str, tuple[Any, ...]]]:
    """Each operator over one size after the other."""
    batch, num_nodes, vocabulary = PROBS_SHAPE
    shapes = [("V sweep", (batch, num_nodes, v)) for v in SWEPT_VOCABULARIES]
    shapes += [("B sweep", (b, num_nodes, vocabulary)) for b in SWEPT_BATCHES]
    shapes += [("Q sweep", (batch, q, vocabulary)) for q in SWEPT_NODES]
    for name, shape in shapes:
        yield argmax_rows, name, (shape, "bfloat16")
        yield sampled_rows, name, (shape, "bfloat16")
        yield probs_rows, name, (50, 0.9, shape)
        if name != "V sweep":
            yield greedy_rows, name, shape[:2]
    layers, batch, count, _ = COMPACT[0]
    for page_size in SWEPT_PAGES:
        yield compact_rows, "page sweep", (layers, batch, count, page_size)


def jobs(gpu: Any, quick: bool) -> list[Job]:
    """The measurements one after the other; the first of each kind with ``quick``."""
    few = slice(1) if quick else slice(None)
    every: list[tuple[Callable[..., Iterator[Row]], tuple[Any, ...]]] = [
        *((argmax_rows, job) for job in ARGMAX[few]),
        *((greedy_rows, job) for job in GREEDY[few]),
        *((sampled_rows, job) for job in SAMPLED[few]),
        *((probs_rows, job) for job in FILTERS[few]),
        (copy_rows, ()),
        *((compact_rows, job) for job in COMPACT[few]),
        (gather_rows, (GATHER,)),
        *((step_rows, (case,)) for case in tuple(STAGES)[few]),
        *(() if quick else ((rows, (*given, name)) for rows, name, given in sweeps())),
    ]
    return [partial(rows, gpu, *given) for rows, given in every]


def argmax_against(gpu: Any, name: str, call: Callable[..., Any], quick: bool) -> Iterator[Row]:
    """An argmax of someone else beside ours and PyTorch's."""
    for shape, dtype in ARGMAX[: 2 if quick else None]:
        yield from argmax_rows(gpu, shape, dtype, others={name: call})


def line(row: Row) -> str:
    """A row for people."""
    sizes = ",".join(str(row.get(name, "")) for name in ("B", "Q", "V", "layers", "path"))
    text = f"{row.get('operator', ''):16}{row.get('case', ''):29} {row.get('dtype', ''):9}{sizes:22} "
    return f"{text}{row['variant']:18}{harness.times_of(row)}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    count = lambda quick: len(jobs(None, quick))  # noqa: E731
    return harness.main(__doc__, "accept", FIELDS, jobs, count, line, Gpu, arguments, PEERS)


if __name__ == "__main__":
    sys.exit(main())
