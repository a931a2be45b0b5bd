"""What the warpgroups of `wgmma` do when, by clocks within the kernel, as CSV.

``python profiling/trace_wgmma.py --out profiling/results/nvidia-h200`` writes wgmma_trace.csv there, for
plot_pipeline.py: a row for each place (ddtree_numba/attention/clocks.py) that the two consumer warpgroups of one block
pass, in some pairs of key tiles far from the beginning. The kernel is compiled a second time, with clocks; its results
must be those of the other one bit for bit.

ns is counted from the first row, in cycles of the multiprocessor's clock, whose length comes from the nanosecond timer
that all blocks read with it; kernel_mhz says it, and timer_ns is that timer itself, which is coarser. call_us and
clocked_call_us are the time of a whole call without and with clocks, so what they cost. The other columns are those of
harness.py.

Needs PyTorch, nvidia-ml-py, and a GPU of compute capability 9.x.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import bench_verify_attention
import harness
import numpy as np
from bench_verify_attention import Case, of_wgmma
from harness import MACHINE, Job, Row, spoil

import ddtree_numba as dd
from ddtree_numba.attention import clocks, remembered, wgmma_host
from ddtree_numba.device.arrays import view
from ddtree_numba.device.launch import multiprocessors

CASE = Case((1, 64, 17, 32768), "bfloat16", page_size=64)
BLOCK = 5
TRACED = range(2, 10)  # pairs: behind the first ones, whose tiles come late
RUNS = 200  # calls ahead of the one that is traced, so that the clock is the usual one
PLAUSIBLE = (0.3, 3.0)  # nanoseconds a cycle

FIELDS = (
    *("case", "B", "H", "Q", "prefix", "page_size", "dtype", "variant", "block", "warpgroup", "pair", "event"),
    *("ns", "cycles", "timer_ns", "kernel_mhz", "call_us", "clocked_call_us", "right", "note", *MACHINE),
)


class Gpu(bench_verify_attention.Gpu):
    """Inputs, and memory for clocks."""

    def __init__(self, commit: str, repeats: int = harness.REPEATS, sustain: float = harness.SUSTAIN) -> None:
        super().__init__(commit, repeats, sustain)
        if self.torch.cuda.get_device_capability()[0] != 9:
            raise RuntimeError(f"{self.torch.cuda.get_device_name()} is not of compute capability 9.x")

    def same_bits(self, a: Any, b: Any) -> bool:
        """Whether two arrays are the same, NaN or not."""
        return bool(self.torch.equal(a.view(self.torch.uint8), b.view(self.torch.uint8)))


@contextmanager
def clocked_kernel(gpu: Gpu) -> Iterator[Any]:
    """Calls of wgmma take the kernel with clocks meanwhile; gives the array of the clocks."""
    from ddtree_numba.attention import wgmma  # compiles for a GPU alone

    blocks = multiprocessors(gpu.torch.cuda.current_device())
    memory = gpu.torch.zeros(clocks.words(blocks), dtype=gpu.torch.int64, device=gpu.place)
    place, usual = (view("clocks", memory).pointer,), wgmma_host.launch

    def launch(kernel: Any, blocks: Any, threads: int, args: tuple[Any, ...], **how: Any) -> None:
        args = tuple(place if x is wgmma_host.NO_CLOCKS else x for x in args)
        usual(kernel, blocks, threads, args, **how)

    remembered.forget()
    try:
        with (
            mock.patch.object(wgmma_host, "launch", launch),
            mock.patch.object(wgmma, "make_kernel", partial(wgmma.make_kernel, clocked=True)),
        ):
            yield memory
    finally:
        remembered.forget()  # a launch with clocks would write to memory that is gone


def clocks_of(memory: np.ndarray) -> np.ndarray:
    """The clocks [blocks, warpgroup, pair, event, word]."""
    return memory.reshape(-1, 2, clocks.PAIRS, clocks.EVENTS, clocks.WORDS)


def cycle_of(found: np.ndarray) -> float:
    """Nanoseconds a cycle: the slope of one clock against the other, over all blocks.

    Raises
    ------
    RuntimeError
        It is no length of a cycle.
    """
    above = below = 0.0
    for block in found:
        seen = block[block[..., clocks.NANOSECONDS] > 0]
        if len(seen) > 1:
            cycles, times = (seen[:, word] - seen[0, word] for word in (clocks.CYCLES, clocks.NANOSECONDS))
            cycles, times = cycles - cycles.mean(), times - times.mean()
            above, below = above + float(cycles @ times), below + float(cycles @ cycles)
    cycle = above / below if below else 0.0
    if not PLAUSIBLE[0] < cycle < PLAUSIBLE[1]:
        raise RuntimeError(f"a cycle would be {cycle} ns by the two clocks")
    return cycle


def events_of(found: np.ndarray, block: int, pairs: range) -> list[Row]:
    """Warpgroup, pair, event and time of each place of a block in these pairs.

    Raises
    ------
    RuntimeError
        The block has not passed all of them, or in another order.
    """
    cycle = cycle_of(found)
    rows: list[Row] = []
    some = found[block, :, pairs.start : pairs.stop]
    for warpgroup, names in enumerate(clocks.NAMES):
        passed = some[warpgroup, :, : len(names)].reshape(-1, clocks.WORDS)
        if not passed.all():
            raise RuntimeError(f"block {block} has not passed all places of pairs {pairs.start} to {pairs.stop - 1}")
        if (np.diff(passed[:, clocks.CYCLES]) < 0).any():
            raise RuntimeError(f"warpgroup {warpgroup} of block {block} has passed places in another order")
        places = [(pair, name) for pair in pairs for name in names]
        for (pair, name), (cycles, time) in zip(places, passed.tolist(), strict=True):
            rows.append({"warpgroup": warpgroup, "pair": pair, "event": name, "cycles": cycles, "timer_ns": time})
    first = {name: min(row[name] for row in rows) for name in ("cycles", "timer_ns")}
    for row in rows:
        row |= {name: row[name] - first[name] for name in first}
        row |= {"ns": f"{row['cycles'] * cycle:.1f}", "kernel_mhz": f"{1e3 / cycle:.0f}"}
    return rows


def trace_rows(gpu: Gpu, case: Case = CASE) -> Iterator[Row]:
    """A row for each place; of results that differ one that is not right."""
    batch, num_heads, num_nodes, prefix = case.shape
    known: Row = {"case": "trace", "B": batch, "H": num_heads, "Q": num_nodes, "prefix": prefix}
    known |= {"page_size": case.page_size, "dtype": case.dtype, "variant": "wgmma", "block": BLOCK}
    inputs = gpu.inputs(case)
    results = gpu.results(inputs)
    peer = of_wgmma(gpu, inputs, results, dd.KIMI_K2_SM_SCALE, planned=True)
    call = partial(peer.call, *peer.arrays)

    def called() -> list[Any]:
        spoil(*results.values())
        call()
        return [x.clone() for x in results.values()]

    usual = called()
    call_us, _ = gpu.alone(call)
    with clocked_kernel(gpu) as memory:
        same = all(map(gpu.same_bits, usual, called()))
        clocked_call_us, _ = gpu.alone(call)
        for _ in range(RUNS):
            call()
        memory.zero_()
        same &= all(map(gpu.same_bits, usual, called()))
        found = clocks_of(gpu.to_host(memory))
    known |= {"call_us": f"{call_us:.1f}", "clocked_call_us": f"{clocked_call_us:.1f}", "right": same, **gpu.machine()}
    if not same:
        yield {**known, "note": "with clocks the results are other ones"}
        return
    for row in events_of(found, BLOCK, TRACED):
        yield {**known, **row}


def jobs(gpu: Gpu, quick: bool) -> list[Job]:
    """One, also with ``quick``."""
    return [partial(trace_rows, gpu)]


def line(row: Row) -> str:
    """A row for people."""
    if not row["right"]:
        return f"{row.get('note', '')}  WRONG"
    return f"warpgroup {row['warpgroup']}  pair {row['pair']:2}  {row['event']:16}{row['ns']:>10} ns"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    return harness.main(__doc__, "wgmma_trace", FIELDS, jobs, lambda quick: 1, line, Gpu, arguments)


if __name__ == "__main__":
    sys.exit(main())
