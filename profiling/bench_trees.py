"""Times of topk_logprobs and build_tree on this GPU, and of the same trees built on this CPU, as CSV.

``python profiling/bench_trees.py --out profiling/results/nvidia-h200`` writes trees.csv there. Each result is checked
first, trees against `refs.trees` bit for bit, top-k against PyTorch in float64; what is wrong is not timed, and the
exit code says so. The columns of time are those of harness.py; gb_per_s is what the operator must move, as the
functions beside it count, over microseconds. ``inputs`` names the sweep over one size that a row belongs to, if any.

Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import harness
import numpy as np
from harness import ITEMSIZE, MACHINE, TIMES, Job, Row, ends, measured, spoil, wall_times, with_rate

import ddtree_numba as dd
from ddtree_numba.check import LOGPROB_BOUND
from ddtree_numba.tree import build_tree, topk_logprobs
from refs import trees

# Trees: L positions, logits of standard deviation `harness.LOGIT_STD` over V tokens, K = tree_budget.
LENGTH, VOCABULARY = 15, 32000
BUDGETS = (16, 64, 256, 1024)
BATCHES = (1, 8, 32, 64, 256, 1024)
TIED_BUDGETS = (64, 256)  # of logits rounded to bfloat16, of which many are equal
SWEPT_BATCH, SWEPT_BUDGET = 64, 64  # of the sweeps over K and L
SWEPT_K = (1, 4, 16, 256)
SWEPT_LENGTHS = (1, 3, 7, 31)
SWEPT_BUDGETS = (1, 4, 32, 128, 512)  # beside `BUDGETS`, for a batch of one
HEAP_BUDGET, HEAP_BATCH = 256, 64  # the readable variant is measured up to these
# Most nodes of a batch for each builder on the CPU, so that all of them together take well below a minute.
CPU_NODES = {"cpu_heap": 1 << 20, "refs_trees": 1 << 17}

# Top-k: [B, L, V], k, dtype. The vocabularies are Kimi K2's and Qwen's.
TOPK = (
    *(((8, 15, 163840), k, "bfloat16") for k in (16, 64, 256, 1024)),
    ((8, 15, 163840), 64, "float32"),
    ((1, 15, 163840), 64, "bfloat16"),
    ((1, 15, 163840), 64, "float32"),
    ((64, 15, 151936), 64, "bfloat16"),
    ((64, 15, 151936), 64, "float32"),
)
TOPK_SWEEPS = {
    "V sweep": tuple(((8, 15, vocabulary), 64) for vocabulary in (8192, 32000, 65536, 128256, 262144)),
    "B sweep": tuple(((batch, 15, 163840), 64) for batch in (2, 4, 16, 32, 64)),
    "L sweep": tuple(((8, length, 163840), 64) for length in (1, 4, 31)),
    "K sweep": tuple(((8, 15, 163840), k) for k in (1, 4, 32, 128, 512)),
}
ROUNDS_K = 64  # the readable variant is measured up to this
CHAIN = ((64, 15, 151936), 64, "bfloat16", 64)  # [B, L, V], k, dtype, tree_budget

FIELDS = (
    *("operator", "inputs", "B", "L", "V", "K", "budget", "variant", "checked", "right", *TIMES),
    *("gb_per_s", "repeats", "note", *MACHINE),
)


# Trees on the CPU


def tree_on_cpu(rows: list[list[float]], token_ids: list[list[int]], root: int, budget: int) -> Row:
    """The public reference's builder, from its rule: a heap of tuples over lists of Python floats.

    Written for speed: no NumPy inside the search, and the parent travels with the entry, so that no path is looked up.
    Like the reference it also makes each node's children by token, and what each node sees as bool.

    Source: github.com/liranringel/ddtree, ddtree.py; DDTree (arXiv 2604.12989).
    """
    push, pop, length, last = heapq.heappush, heapq.heappop, len(rows), len(rows[0]) - 1
    tokens, parents, depths, scores = [root], [-1], [0], [0.0]
    children: list[dict[int, int]] = [{}]
    heap = [(-rows[0][0], (0,), 0)]
    while heap and len(tokens) <= budget:
        negative, ranks, parent = pop(heap)
        score, depth, rank, node = -negative, len(ranks), ranks[-1], len(tokens)
        row = rows[depth - 1]
        token = token_ids[depth - 1][rank]
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        scores.append(score)
        children[parent][token] = node
        children.append({})
        if rank < last:
            push(heap, (-(score - row[rank] + row[rank + 1]), (*ranks[:-1], rank + 1), parent))
        if depth < length:
            push(heap, (-(score + rows[depth][0]), (*ranks, 0), node))
    sees = np.zeros((len(tokens), len(tokens)), np.bool_)
    for node, parent in enumerate(parents):
        if node:
            sees[node] = sees[parent]
        sees[node, node] = True
    return {
        "tokens": np.array(tokens, np.int32),
        "parents": np.array(parents, np.int32),
        "depths": np.array(depths, np.int32),
        "scores": np.array(scores),
        "children": children,
        "sees": sees,
    }


def batch_on_cpu(logprobs: np.ndarray, token_ids: np.ndarray, roots: np.ndarray, budget: int) -> list[Row]:
    """`tree_on_cpu` for each request of host arrays."""
    batch = zip(logprobs, token_ids, roots, strict=True)
    return [tree_on_cpu(rows.tolist(), ids.tolist(), int(root), budget) for rows, ids, root in batch]


def batch_by_refs(logprobs: np.ndarray, token_ids: np.ndarray, roots: np.ndarray, budget: int) -> list[Row]:
    """The oracle's trees: `refs.trees.best_first_tree`, and the tokens of its ranks."""
    found = []
    for rows, ids, root in zip(logprobs, token_ids, roots, strict=True):
        tree = trees.best_first_tree(rows, budget)
        tokens = [root, *(ids[len(path) - 1, path[-1]] for path in tree["ranks"][1:])]
        found.append({**tree, "tokens": np.array(tokens, np.int32)})
    return found


CPU_BUILDERS = {"cpu_heap": batch_on_cpu, "refs_trees": batch_by_refs}


# Checks, on host arrays

CHECKED = {"parents": np.int32, "tokens": np.int32, "depths": np.int32, "scores": np.int64}  # as bits


def same_tree(found: Row, expected: Row) -> bool:
    """Parents, tokens and depths, and every bit of the scores; the oracle's nodes, and nothing behind them."""
    n = len(expected["parents"])
    return all(
        np.array_equal(np.asarray(found[name])[:n].view(bits), expected[name].view(bits))
        for name, bits in CHECKED.items()
    ) and bool(np.all(np.asarray(found["parents"])[n:] == -1))


def right_trees(found: list[Row], logprobs: np.ndarray, ids: np.ndarray, roots: np.ndarray, budget: int) -> bool:
    """Whether the first and the last tree are the oracle's."""
    at = ends(len(logprobs))
    expected = batch_by_refs(logprobs[at], ids[at], roots[at], budget)
    return all(same_tree(found[b], tree) for b, tree in zip(at, expected, strict=True))


def right_topk(values: np.ndarray, ids: np.ndarray | None, exact: dict[str, np.ndarray]) -> bool:
    """Whether log-probabilities are within the bound, and the ids, where given, exactly those expected."""
    near = bool(np.all(np.abs(values - exact["logprobs"]) <= LOGPROB_BOUND * exact["scale"]))
    return near and (ids is None or np.array_equal(ids, exact["token_ids"]))


# The GPU


class Gpu(harness.Gpu):
    """Inputs, exact results and peers. Tests put NumPy in its place."""

    def rows(self, batch: int, length: int, k: int, dtype: str) -> tuple[Any, Any, Any]:
        """Log-probabilities [B, L, k], ids and roots for build_tree, from PyTorch."""
        torch = self.torch
        logits = self.logits((batch, length, VOCABULARY), dtype)
        logprobs, ids = torch.log_softmax(logits.float(), -1).topk(k)
        return logprobs.clamp_(max=0), ids.int(), self.roots(batch)

    def roots(self, batch: int) -> Any:
        """Any root tokens [B]."""
        return self.torch.arange(batch, dtype=self.torch.int32, device="cuda")

    def pair(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Arrays for the results of topk_logprobs."""
        return self.empty(shape, "float32"), self.empty(shape, "int32")

    def exact_topk(self, logits: Any, k: int) -> dict[str, np.ndarray]:
        """Logits falling, ids with ties in rising order, log-probabilities in float64, and the scale of their bound."""
        torch = self.torch
        found = []
        for request in logits:  # one at a time, for the memory's sake
            values, ids = torch.sort(request, dim=-1, descending=True, stable=True)
            values, ids = values[:, :k].double(), ids[:, :k].int()
            lse = torch.logsumexp(request.double(), -1, keepdim=True)
            scale = torch.maximum(values.abs(), lse.abs()).clamp(min=1)
            found.append([x.cpu().numpy() for x in (values, ids, values - lse, scale)])
        names = ("values", "token_ids", "logprobs", "scale")
        return {name: np.stack(parts) for name, parts in zip(names, zip(*found, strict=True), strict=True)}

    def peers(self, k: int) -> dict[str, Callable[[Any], Any]]:
        """What PyTorch offers: the best logits alone, and with the logsumexp that makes log-probabilities of them."""
        torch = self.torch

        def eager(logits: Any) -> Any:
            values, ids = torch.topk(logits, k)
            return values.float() - torch.logsumexp(logits.float(), -1, keepdim=True), ids

        return {"torch_topk": lambda logits: torch.topk(logits, k), "torch_eager": eager}


# Measurements


def build_rows(
    gpu: Any, given: tuple[Any, Any, Any], inputs: str, budget: int, others: dict[str, Callable[..., Any]] | None = None
) -> Iterator[Row]:
    """Rows of one batch of trees: our variants and ``others`` of their signature, then the builders on the CPU."""
    host = tuple(gpu.to_host(x) for x in given)
    batch, length, candidates = given[0].shape
    known = {"operator": "build_tree", "inputs": inputs, "B": batch, "L": length, "K": candidates, "budget": budget}
    known["checked"] = f"requests {', '.join(map(str, ends(batch)))}"
    variants = {name: partial(dd.build_tree, variant=name) for name in ("frontier", "heap")}
    for variant, build in {**variants, **(others or {})}.items():
        if variant == "heap" and (budget > HEAP_BUDGET or batch > HEAP_BATCH):
            continue
        out = dd.DraftTree.empty(given[0], batch, budget, min(length, budget))

        def call(*given: Any, build: Callable[..., Any] = build, out: dd.DraftTree = out) -> Any:
            return build(*given, budget, out=out)

        def right(call: Callable[..., Any] = call, out: dd.DraftTree = out) -> bool:
            spoil(*(getattr(out, name) for name in CHECKED))
            return right_trees(rows_of_tree(gpu, call(*given)), *host, budget)

        row = measured({**known, "variant": variant}, gpu, right, call, partial(gpu.time, inputs=given))
        yield with_rate(row, "gb_per_s", build_tree.bytes_moved(batch, length, candidates, budget))

    for variant, builder in CPU_BUILDERS.items():
        row = {**known, "variant": variant}
        if batch * budget > CPU_NODES[variant]:
            yield {**row, "right": True, "checked": "", "note": "left out: too slow"}
            continue

        def call(builder: Callable[..., list[Row]] = builder) -> Any:
            return builder(*host, budget)

        def right(builder: Callable[..., list[Row]] = builder) -> bool:
            some = [x[ends(batch)] for x in host]
            return right_trees(builder(*some, budget), *some, budget)

        yield measured(row, gpu, right, call, wall_times)


def rows_of_tree(gpu: Any, tree: Any) -> list[Row]:
    """A DraftTree as one dict a request, on the host."""
    columns = [gpu.to_host(getattr(tree, name)) for name in CHECKED]
    return [dict(zip(CHECKED, one, strict=True)) for one in zip(*columns, strict=True)]


def topk_rows(
    gpu: Any,
    shape: tuple[int, int, int],
    k: int,
    dtype: str,
    sweep: str = "",
    others: dict[str, Callable[..., Any]] | None = None,
) -> Iterator[Row]:
    """Rows of one top-k: our variants and ``others`` of their signature, and PyTorch's."""
    logits = gpu.logits(shape, dtype)
    exact = gpu.exact_topk(logits, k)
    known = {"operator": "topk_logprobs", "inputs": f"{dtype}, {sweep}" if sweep else dtype, "K": k}
    known |= {"checked": "all rows", **dict(zip("BLV", shape, strict=True))}
    out = gpu.pair((*shape[:2], k))
    variants = {name: partial(dd.topk_logprobs, variant=name) for name in ("threshold", "rounds")}
    if k > ROUNDS_K or sweep:
        del variants["rounds"]
    ours: dict[str, Callable[..., Any]] = {
        name: lambda logits, operator=operator: operator(logits, k, out=out)
        for name, operator in {**variants, **(others or {})}.items()
    }
    for variant, call in {**ours, **gpu.peers(k)}.items():

        def right(variant: str = variant, call: Callable[..., Any] = call) -> bool:
            spoil(*out)
            values, ids = (gpu.to_host(x) for x in call(logits))
            if variant == "torch_topk":  # the logits themselves
                return np.array_equal(values, exact["values"])
            return right_topk(values, ids if variant in ours else None, exact)  # PyTorch does not order ties

        row = measured({**known, "variant": variant}, gpu, right, call, partial(gpu.time, inputs=(logits,)))
        yield with_rate(row, "gb_per_s", topk_logprobs.bytes_moved(*shape, k, ITEMSIZE[dtype]))


def chain_rows(gpu: Any, shape: tuple[int, int, int], k: int, dtype: str, budget: int) -> Iterator[Row]:
    """From logits to trees: our two kernels, and PyTorch's top-k with the copy to the host and the heap there."""
    logits = gpu.logits(shape, dtype)
    exact = gpu.exact_topk(logits, k)
    pair = gpu.pair((*shape[:2], k))
    roots = gpu.roots(shape[0])
    out = dd.DraftTree.empty(pair[0], shape[0], budget, min(shape[1], budget))
    eager = gpu.peers(k)["torch_eager"]
    known = {"operator": "chain", "inputs": dtype, "K": k, "budget": budget, **dict(zip("BLV", shape, strict=True))}
    known["checked"] = f"all top-k, requests {', '.join(map(str, ends(shape[0])))}"

    def call() -> Any:
        dd.topk_logprobs(logits, k, variant="threshold", out=pair)
        return dd.build_tree(*pair, roots, budget, variant="frontier", out=out)

    def right() -> bool:
        spoil(*pair, *(getattr(out, name) for name in CHECKED))
        tree = rows_of_tree(gpu, call())
        values, ids = (gpu.to_host(x) for x in pair)
        return right_topk(values, ids, exact) and right_trees(tree, values, ids, gpu.to_host(roots), budget)

    def call_on_cpu() -> Any:
        return batch_on_cpu(*(gpu.to_host(x) for x in (*eager(logits), roots)), budget)

    def right_on_cpu() -> bool:
        values, ids = (gpu.to_host(x) for x in eager(logits))
        trees_right = right_trees(call_on_cpu(), values, ids, gpu.to_host(roots), budget)
        return right_topk(values, None, exact) and trees_right

    yield measured({**known, "variant": "threshold + frontier"}, gpu, right, call, gpu.time)
    yield measured({**known, "variant": "torch_eager + cpu_heap"}, gpu, right_on_cpu, call_on_cpu, wall_times)


def jobs(gpu: Any, quick: bool) -> list[Job]:
    """The measurements one after the other; a tenth of them with ``quick``."""

    def builds(inputs: str, batch: int, length: int, k: int, budget: int) -> Job:
        dtype = inputs.split()[0]
        return lambda: build_rows(gpu, gpu.rows(batch, length, k, dtype), inputs, budget)

    few = slice(2) if quick else slice(None)
    tied = [budget for budget in TIED_BUDGETS if budget in BUDGETS[few]]
    one = "float32 logits"
    sweeps = [
        *(builds(f"{one}, K sweep", SWEPT_BATCH, LENGTH, k, SWEPT_BUDGET) for k in SWEPT_K),
        *(builds(f"{one}, L sweep", SWEPT_BATCH, length, SWEPT_BUDGET, SWEPT_BUDGET) for length in SWEPT_LENGTHS),
        *(builds(f"{one}, budget sweep", 1, LENGTH, budget, budget) for budget in SWEPT_BUDGETS),
        *(
            lambda s=shape, k=k, name=name: topk_rows(gpu, s, k, "bfloat16", name)
            for name, sizes in TOPK_SWEEPS.items()
            for shape, k in sizes
        ),
    ]
    return [
        *(builds(one, batch, LENGTH, budget, budget) for budget in BUDGETS[few] for batch in BATCHES[few]),
        *(builds("bfloat16 logits", batch, LENGTH, budget, budget) for budget in tied for batch in BATCHES[few]),
        *(lambda s=shape, k=k, d=dtype: topk_rows(gpu, s, k, d) for shape, k, dtype in TOPK[: 1 if quick else None]),
        lambda: chain_rows(gpu, *CHAIN),
        *([] if quick else sweeps),
    ]


def build_against(gpu: Any, name: str, call: Callable[..., Any], quick: bool) -> Iterator[Row]:
    """A builder of someone else beside ours."""
    for batch in BATCHES[: 2 if quick else 4]:
        given = gpu.rows(batch, LENGTH, SWEPT_BUDGET, "float32")
        yield from build_rows(gpu, given, "float32 logits", SWEPT_BUDGET, {name: call})


def topk_against(gpu: Any, name: str, call: Callable[..., Any], quick: bool) -> Iterator[Row]:
    """A top-k of someone else beside ours and PyTorch's."""
    for shape, k, dtype in TOPK[1 : 3 if quick else 6]:
        yield from topk_rows(gpu, shape, k, dtype, others={name: call})


def line(row: Row) -> str:
    """A row for people."""
    sizes = ",".join(str(row.get(name, "")) for name in ("B", "L", "K", "budget"))
    text = f"{row.get('operator', ''):14}{row.get('inputs', ''):29} {sizes:18} {row['variant']:24}"
    return text + harness.times_of(row)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    return harness.main(__doc__, "trees", FIELDS, jobs, lambda quick: len(jobs(None, quick)), line, Gpu, arguments)


if __name__ == "__main__":
    sys.exit(main())
