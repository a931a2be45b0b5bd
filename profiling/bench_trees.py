"""Times of topk_logprobs and build_tree on this GPU, and of the same trees built on this CPU, as CSV.

``python profiling/bench_trees.py --out profiling/results/nvidia-h200`` writes trees.csv there. Each result is checked
first, trees against `refs.trees` bit for bit, top-k against PyTorch in float64; what is wrong is not timed, and the
exit code says so. Columns of time, in microseconds:

- microseconds, spread_microseconds: on the GPU, CUDA events around one call, L2 flushed before each, median and
  interquartile range of `REPEATS`; on the CPU, wall time of the batch, of `CPU_REPEATS`.
- graph_us: a call's part of a CUDA graph of `GRAPH_CALLS` calls, nothing flushed.
- host_us: wall time until a call returns, which is before its kernel has run.

Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import heapq
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from a plain checkout

import numpy as np
from rich.console import Console
from rich.progress import track
from tables import write_rows

import ddtree_numba as dd
from ddtree_numba.check import LOGPROB_BOUND
from ddtree_numba.device import runtime
from refs import trees

Row = dict[str, Any]
Times = dict[str, str]

REPEATS = 30
WARM_UPS = 3
GRAPH_CALLS = 20
GRAPH_REPEATS = 5
CPU_REPEATS = 3

# Trees: L positions, logits of standard deviation 5 over V tokens, K = tree_budget.
LENGTH, VOCABULARY, LOGIT_STD = 15, 32000, 5.0
BUDGETS = (16, 64, 256, 1024)
BATCHES = (1, 8, 32, 64, 256, 1024)
TIED_BUDGETS = (64, 256)  # of logits rounded to bfloat16, of which many are equal
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
ROUNDS_K = 64  # the readable variant is measured up to this
CHAIN = ((64, 15, 151936), 64, "bfloat16", 64)  # [B, L, V], k, dtype, tree_budget

TIMES = ("microseconds", "spread_microseconds", "graph_us", "host_us")
MACHINE = (
    *("gpu", "driver", "sm_clock_mhz", "power_w", "temperature_c", "cpu"),
    *("python", "numpy", "numba_cuda", "torch", "commit"),
)
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


def ends(batch: int) -> list[int]:
    """The requests that are checked: the first and the last."""
    return sorted({0, batch - 1})


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


class Gpu:
    """All that needs PyTorch and a GPU: inputs, exact results, peers, times. Tests put NumPy in its place."""

    def __init__(self, commit: str, repeats: int) -> None:
        import pynvml
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees none")
        self.torch, self.nvml, self.commit, self.repeats = torch, pynvml, commit, repeats
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def logits(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Normal logits of standard deviation `LOGIT_STD`, the same ones for the same shape."""
        torch = self.torch
        generator = torch.Generator("cuda").manual_seed(0)
        return (torch.randn(shape, device="cuda", generator=generator) * LOGIT_STD).to(getattr(torch, dtype))

    def rows(self, batch: int, k: int, dtype: str) -> tuple[Any, Any, Any]:
        """Log-probabilities [B, L, k], ids and roots for build_tree, from PyTorch."""
        torch = self.torch
        logits = self.logits((batch, LENGTH, VOCABULARY), dtype)
        logprobs, ids = torch.log_softmax(logits.float(), -1).topk(k)
        return logprobs.clamp_(max=0), ids.int(), self.roots(batch)

    def roots(self, batch: int) -> Any:
        """Any root tokens [B]."""
        return self.torch.arange(batch, dtype=self.torch.int32, device="cuda")

    def copy(self, x: Any) -> Any:
        """The same elements in C order."""
        return x.contiguous()

    def to_host(self, x: Any) -> np.ndarray:
        """The elements on the host; bfloat16 as float32."""
        return (x.float() if x.dtype == self.torch.bfloat16 else x).cpu().numpy()

    def pair(self, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Arrays for the results of topk_logprobs."""
        torch = self.torch
        return torch.empty(shape, device="cuda"), torch.empty(shape, dtype=torch.int32, device="cuda")

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

    def peers(self, logits: Any, k: int) -> dict[str, Callable[[], Any]]:
        """What PyTorch offers: the best logits alone, and with the logsumexp that makes log-probabilities of them."""
        torch = self.torch

        def eager() -> Any:
            values, ids = torch.topk(logits, k)
            return values.float() - torch.logsumexp(logits.float(), -1, keepdim=True), ids

        return {"torch_topk": lambda: torch.topk(logits, k), "torch_eager": eager}

    def time(self, call: Callable[[], Any], calls_in_graph: int = GRAPH_CALLS) -> Times:
        """The times of a call."""
        median, spread = self.alone(call)
        graph, host = self.in_graph(call, calls_in_graph), self.on_host(call)
        values = (f"{median:.1f}", f"{spread:.1f}", f"{graph:.2f}", f"{host:.1f}")
        return dict(zip(TIMES, values, strict=True))

    def alone(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Median and interquartile range of the device time of a call, L2 flushed before each."""
        times = []
        for n in range(WARM_UPS + self.repeats):
            self.flush.zero_()
            microseconds = self.between_events(call)
            if n >= WARM_UPS:
                times.append(microseconds)
        quarters = statistics.quantiles(times, n=4)
        return statistics.median(times), quarters[2] - quarters[0]

    def between_events(self, call: Callable[[], Any]) -> float:
        """Device time of whatever ``call`` puts on the stream, in microseconds."""
        cuda = self.torch.cuda
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        # Two milliseconds of waiting on the GPU, so that the host has prepared the launch when the first event passes.
        cuda._sleep(4_000_000)
        begin.record()
        call()
        end.record()
        cuda.synchronize()
        return begin.elapsed_time(end) * 1e3

    def in_graph(self, call: Callable[[], Any], calls: int) -> float:
        """Device time of a call among ``calls`` in a CUDA graph; it has run before, so nothing is compiled in there."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        times = [self.between_events(graph.replay) / calls for _ in range(1 + GRAPH_REPEATS)]
        return statistics.median(times[1:])

    def on_host(self, call: Callable[[], Any]) -> float:
        """Wall time until a call returns, median."""
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
            self.torch.cuda.synchronize()
        return statistics.median(times)

    def machine(self) -> Row:
        """What a row must say so that it can be compared with another."""
        nvml, gpu = self.nvml, self.handle
        return {
            "gpu": self.torch.cuda.get_device_name(),
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "power_w": round(nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            "temperature_c": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "torch": self.torch.__version__,
            "commit": self.commit,
            **host_machine(),
        }


def host_machine() -> Row:
    """The processor that builds trees on the CPU, and the packages."""
    models = [line for line in read_lines("/proc/cpuinfo") if line.startswith("model name")]
    name = models[0].split(":", 1)[1].strip() if models else platform.processor()
    found = {"cpu": name.replace("(R)", "").replace("(TM)", "")}
    found |= {"python": platform.python_version(), "numpy": np.__version__}
    try:
        return {**found, "numba_cuda": version("numba-cuda")}
    except PackageNotFoundError:
        return {**found, "numba_cuda": "unknown"}


def read_lines(path: str) -> list[str]:
    """The lines of a file, or none where there is no such file."""
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def wall_times(call: Callable[[], Any]) -> Times:
    """Median and range of the wall time of a call on the CPU."""
    times = []
    for _ in range(CPU_REPEATS):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return {"microseconds": f"{statistics.median(times):.1f}", "spread_microseconds": f"{max(times) - min(times):.1f}"}


# Measurements


def build_rows(gpu: Any, given: tuple[Any, Any, Any], inputs: str, budget: int) -> Iterator[Row]:
    """Rows of one batch of trees: our variants, then the builders on the CPU."""
    host = tuple(gpu.to_host(x) for x in given)
    batch, length, candidates = given[0].shape
    known = {"operator": "build_tree", "inputs": inputs, "B": batch, "L": length, "K": candidates, "budget": budget}
    known["checked"] = f"requests {', '.join(map(str, ends(batch)))}"

    for variant in ("frontier", "heap"):
        if variant == "heap" and (budget > HEAP_BUDGET or batch > HEAP_BATCH):
            continue
        out = dd.DraftTree.empty(given[0], batch, budget, min(length, budget))

        def call(variant: str = variant, out: dd.DraftTree = out) -> Any:
            return dd.build_tree(*given, budget, variant=variant, out=out)

        def right(call: Callable[[], Any] = call, out: dd.DraftTree = out) -> bool:
            spoil(*(getattr(out, name) for name in CHECKED))
            return right_trees(rows_of_tree(gpu, call()), *host, budget)

        yield measured({**known, "variant": variant}, gpu, right, call, gpu.time)

    for variant, builder in CPU_BUILDERS.items():
        row = {**known, "variant": variant}
        if batch * budget > CPU_NODES[variant]:
            yield {**row, "right": True, "checked": "", "note": "left out: too slow"}
            continue

        def call(builder: Callable[..., list[Row]] = builder) -> Any:
            return builder(*host, budget)

        def right(builder: Callable[..., list[Row]] = builder) -> bool:
            at = ends(batch)
            found = builder(*(x[at] for x in host), budget)
            return right_trees(found, *(x[at] for x in host), budget)

        yield measured(row, gpu, right, call, wall_times)


def spoil(*results: Any) -> None:
    """Overwrite what may still hold another variant's right result."""
    for x in results:
        x[...] = -7


def rows_of_tree(gpu: Any, tree: Any) -> list[Row]:
    """A DraftTree as one dict a request, on the host."""
    columns = [gpu.to_host(getattr(tree, name)) for name in CHECKED]
    return [dict(zip(CHECKED, one, strict=True)) for one in zip(*columns, strict=True)]


def measured(
    row: Row, gpu: Any, right: Callable[[], bool], call: Callable[[], Any], timer: Callable[[Any], Times]
) -> Row:
    """The row with its verdict, with the times only if it was right, and with the machine as it was right after."""
    found: Row = {"right": False}
    try:
        found["right"] = right()
        if found["right"]:
            found |= timer(call)
    except Exception as error:  # one row must not cost the others; it is not right, and the exit code says so
        found = {"right": False, "note": f"{type(error).__name__}: {error}".replace("\n", " ")}
    return {**row, **found, "repeats": CPU_REPEATS if timer is wall_times else gpu.repeats, **gpu.machine()}


def topk_rows(gpu: Any, shape: tuple[int, int, int], k: int, dtype: str) -> Iterator[Row]:
    """Rows of one top-k: our variants, and PyTorch's. GB/s counts the logits once."""
    logits = gpu.logits(shape, dtype)
    exact = gpu.exact_topk(logits, k)
    nbytes = shape[0] * shape[1] * shape[2] * (4 if dtype == "float32" else 2)
    known = {"operator": "topk_logprobs", "inputs": dtype, "K": k, "checked": "all rows"}
    known |= dict(zip("BLV", shape, strict=True))
    out = gpu.pair((*shape[:2], k))
    ours: dict[str, Callable[[], Any]] = {
        variant: lambda v=variant: dd.topk_logprobs(logits, k, variant=v, out=out)
        for variant in ("threshold", "rounds")
        if variant == "threshold" or k <= ROUNDS_K
    }
    for variant, call in {**ours, **gpu.peers(logits, k)}.items():

        def right(variant: str = variant, call: Callable[[], Any] = call) -> bool:
            spoil(*out)
            values, ids = (gpu.to_host(x) for x in call())
            if variant == "torch_topk":  # the logits themselves
                return np.array_equal(values, exact["values"])
            return right_topk(values, ids if variant in ours else None, exact)  # PyTorch does not order ties

        row = measured({**known, "variant": variant}, gpu, right, call, gpu.time)
        if "microseconds" in row:
            row["gb_per_s"] = f"{nbytes / float(row['microseconds']) / 1e3:.0f}"
        yield row


def chain_rows(gpu: Any, shape: tuple[int, int, int], k: int, dtype: str, budget: int) -> Iterator[Row]:
    """From logits to trees: our two kernels, and PyTorch's top-k with the copy to the host and the heap there."""
    logits = gpu.logits(shape, dtype)
    exact = gpu.exact_topk(logits, k)
    pair = gpu.pair((*shape[:2], k))
    roots = gpu.roots(shape[0])
    out = dd.DraftTree.empty(pair[0], shape[0], budget, min(shape[1], budget))
    eager = gpu.peers(logits, k)["torch_eager"]
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
        return batch_on_cpu(*(gpu.to_host(x) for x in (*eager(), roots)), budget)

    def right_on_cpu() -> bool:
        values, ids = (gpu.to_host(x) for x in eager())
        trees_right = right_trees(call_on_cpu(), values, ids, gpu.to_host(roots), budget)
        return right_topk(values, None, exact) and trees_right

    one = {**known, "variant": "threshold + frontier"}
    yield measured(one, gpu, right, call, lambda chain: gpu.time(chain, 1))
    yield measured({**known, "variant": "torch_eager + cpu_heap"}, gpu, right_on_cpu, call_on_cpu, wall_times)


def jobs(gpu: Any, quick: bool) -> Iterator[Callable[[], Iterator[Row]]]:
    """The measurements one after the other; a tenth of them with ``quick``."""
    budgets, batches = (BUDGETS[:2], BATCHES[:2]) if quick else (BUDGETS, BATCHES)
    for dtype, some in (("float32", budgets), ("bfloat16", [k for k in TIED_BUDGETS if k in budgets])):
        logprobs, ids, roots = gpu.rows(batches[-1], max(some), dtype)
        for budget in some:
            for batch in batches:
                given = gpu.copy(logprobs[:batch, :, :budget]), gpu.copy(ids[:batch, :, :budget]), roots[:batch]
                yield lambda g=given, i=f"{dtype} logits", k=budget: build_rows(gpu, g, i, k)
    for shape, k, dtype in TOPK[:1] if quick else TOPK:
        yield lambda s=shape, k=k, d=dtype: topk_rows(gpu, s, k, d)
    yield lambda: chain_rows(gpu, *CHAIN)


def number_of_jobs(quick: bool) -> int:
    """How many `jobs` there are, for the progress bar; counting them would make their inputs."""
    builds = 2 * 2 + 2 if quick else (len(BUDGETS) + len(TIED_BUDGETS)) * len(BATCHES)
    return builds + (1 if quick else len(TOPK)) + 1


def line(row: Row) -> str:
    """A row for people."""
    sizes = ",".join(str(row.get(name, "")) for name in ("B", "L", "K", "budget"))
    text = f"{row['operator']:14}{row['inputs']:16} {sizes:18} {row['variant']:24}"
    text += " ".join(f"{row.get(name, ''):>9}" for name in (*TIMES, "gb_per_s"))
    return f"{text} {row.get('note', '')}{'' if row['right'] else '  WRONG'}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, write, print; 1 when a result was wrong, 2 when nothing can be measured here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("profiling/results/local"), help="folder for the CSV")
    parser.add_argument("--commit", help="commit that is measured; default: what git says")
    parser.add_argument("--quick", action="store_true", help="a tenth of it, to trees_quick.csv, to see that it runs")
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
    every = track(
        jobs(gpu, options.quick), "measuring", total=number_of_jobs(options.quick), console=Console(stderr=True)
    )
    rows = [row for job in every for row in job()]
    write_rows(options.out / ("trees_quick.csv" if options.quick else "trees.csv"), rows, FIELDS)
    print(f"{'B,L,K,budget':>42} {'':15}" + " ".join(f"{name:>9.9}" for name in (*TIMES, "gb_per_s")))
    for row in rows:
        print(line(row))
    return 0 if all(row["right"] for row in rows) else 1


def commit_here() -> str:
    """What git says of the checkout."""
    return subprocess.check_output(["git", "describe", "--always", "--abbrev=40", "--dirty"], text=True).strip()


if __name__ == "__main__":
    sys.exit(main())
