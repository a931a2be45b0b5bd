"""Times of the conversions between encodings of draft trees on this GPU, as CSV.

``python profiling/bench_encodings.py --out profiling/results/nvidia-h200`` writes encodings.csv there. Each result is
checked first against `refs.trees`; what is wrong is not timed, and the exit code says so. Random trees of Q nodes, each
on one of the six nodes before it; a prefix of 1000 tokens, where it matters. The columns of time are those of
harness.py; gb_per_s counts all that goes in and out once, over microseconds. The variant ``numpy`` is the same mask
made on the host.

Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import harness
import numpy as np
from harness import MACHINE, TIMES, Job, Row, measured, with_rate

import ddtree_numba as dd
from ddtree_numba import masks
from refs import trees

SIZES = ((8, 65), (1, 65), (64, 65), (256, 65), (64, 17), (8, 257))  # B, Q
PREFIX = 1000
# What goes in, what comes out, and more arguments.
CONVERSIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "depths_from_parents": (("parents",), ("depths",), {}),
    "positions": (("cache_seqlens", "depths"), ("positions",), {}),
    "links_from_parents": (("parents",), ("first_child", "next_sibling"), {}),
    "parents_from_links": (("first_child", "next_sibling"), ("parents",), {}),
    "sglang_links": (("parents",), ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling"), {}),
    "mask_from_parents": (("parents",), ("tree_mask",), {"packed": True}),
    "parents_from_mask": (("tree_mask",), ("parents",), {}),
    "unpack_mask": (("tree_mask", "Q"), ("mask_bool",), {}),
    "pack_mask": (("mask_bool",), ("tree_mask",), {}),
    "full_mask": (("tree_mask", "cache_seqlens", "seqlens_sum"), ("full_mask",), {}),
    "tree_mask_from_full_mask": (("full_mask", "cache_seqlens", "Q"), ("tree_mask",), {"packed": True}),
    "qlen_only_mask": (("tree_mask",), ("qlen_only_mask",), {}),
    "tensorrt_mask": (("tree_mask",), ("tensorrt_mask",), {}),
    "dense_bias": (("tree_mask",), ("dense_bias",), {}),
    "tree_mask_from_bias": (("dense_bias",), ("tree_mask",), {"packed": True}),
    "retrieve_indices": (("parents", "max_depth"), ("retrieve_indices",), {}),
    "parents_from_retrieve_indices": (("retrieve_indices", "Q"), ("parents",), {}),
}
QUICK = ("links_from_parents", "mask_from_parents", "full_mask", "retrieve_indices")
ORDERS = ("breadth_first", "depth_first")

FIELDS = (
    *("operator", "B", "Q", "variant", "checked", "right", *TIMES),
    *("gb_per_s", "repeats", "note", *MACHINE),
)


class Gpu(harness.Gpu):
    """Tests put NumPy in its place."""

    def as_bytes(self, x: Any) -> Any:
        """The array's own memory."""
        return x.view(self.torch.uint8)


def random_parents(batch: int, num_nodes: int) -> np.ndarray:
    """Trees whose nodes hang on one of the six nodes before them, int32 [B, Q]."""
    node = np.arange(num_nodes)
    chosen = np.random.default_rng(0).integers(np.maximum(node - 6, 0), np.maximum(node, 1), (batch, num_nodes))
    return np.where(node, chosen, -1).astype(np.int32)


def every_form(batch: int, num_nodes: int) -> dict[str, np.ndarray]:
    """The same trees in every encoding, by the oracle."""
    parents = random_parents(batch, num_nodes)
    lengths = np.full(batch, PREFIX, np.int32)
    tokens, scores = np.zeros((2, batch, num_nodes), np.int64)
    given = parents.tolist(), tokens.tolist(), scores.astype(float).tolist()
    tree = trees.assemble(*given, num_nodes=num_nodes, max_depth=num_nodes)
    depth = int(tree["depths"].max())
    forms = {**tree, **trees.encodings(parents, lengths, depth), "cache_seqlens": lengths}
    forms["max_depth"] = np.int32(depth)
    return {**forms, "mask_bool": forms["qlen_only_mask"].reshape(batch, num_nodes, num_nodes)}


def spoil_bytes(gpu: Any, *results: Any) -> None:
    """Overwrite arrays of any type."""
    for x in results:
        gpu.as_bytes(x)[...] = 249


def encoding_rows(gpu: Any, forms: dict[str, np.ndarray], names: Sequence[str]) -> Iterator[Row]:
    """A row for each conversion, and one for the mask on the host."""
    batch, num_nodes = forms["parents"].shape
    sizes = {"Q": num_nodes, "max_depth": int(forms["max_depth"]), "seqlens_sum": batch * PREFIX}
    known = {"B": batch, "Q": num_nodes, "checked": "all elements"}
    for name in names:
        takes, gives, more = CONVERSIONS[name]
        given = [gpu.to_device(forms[x]) for x in takes if x not in sizes]
        out = tuple(gpu.to_device(forms[x]) for x in gives)
        row = {"operator": name, "variant": name, **known}
        nbytes = sum(forms[x].nbytes for x in (*takes, *gives) if x not in sizes)

        rest = [sizes[x] for x in takes if x in sizes]  # behind the arrays in every signature
        convert = partial(getattr(dd, name), out=out if len(out) > 1 else out[0], **more)

        def call(*arrays: Any, convert: Callable[..., Any] = convert, rest: list[int] = rest) -> Any:
            return convert(*arrays, *rest)

        def right(call: Callable[..., Any] = call, given: Any = given, out: Any = out, gives: Any = gives) -> bool:
            spoil_bytes(gpu, *out)
            call(*given)
            return all(np.array_equal(gpu.to_host(x), forms[form]) for x, form in zip(out, gives, strict=True))

        row = measured(row, gpu, right, call, partial(gpu.time, inputs=given))
        yield with_rate(row, "gb_per_s", nbytes)

    def on_host() -> np.ndarray:
        return masks.pack_mask(masks.mask_from_parents(forms["parents"]))

    row = {"operator": "mask_from_parents", "variant": "numpy", **known}
    yield measured(row, gpu, lambda: np.array_equal(on_host(), forms["tree_mask"]), on_host, harness.wall_times)


def relabel_rows(gpu: Any, forms: dict[str, np.ndarray], order: str) -> Iterator[Row]:
    """relabel, which moves every array of a tree."""
    batch, num_nodes = forms["parents"].shape
    expected = trees.relabel(forms, order)
    names = [field.name for field in fields(dd.DraftTree) if field.name != "max_depth"]
    depth = int(forms["max_depth"])
    tree = dd.DraftTree(**{name: gpu.to_device(forms[name]) for name in names}, max_depth=depth)
    out = dd.DraftTree(**{name: gpu.to_device(forms[name]) for name in names}, max_depth=depth)
    permutation = gpu.to_device(forms["parents"])

    def call() -> Any:
        return dd.relabel(tree, order, out=out, permutation=permutation)

    def right() -> bool:
        spoil_bytes(gpu, permutation, *(getattr(out, name) for name in names))
        call()
        same = all(np.array_equal(gpu.to_host(getattr(out, name)), expected[name]) for name in names)
        return same and np.array_equal(gpu.to_host(permutation), expected["permutation"])

    row = {"operator": "relabel", "B": batch, "Q": num_nodes, "variant": order, "checked": "all elements"}
    nbytes = 2 * sum(forms[name].nbytes for name in names) + forms["parents"].nbytes
    yield with_rate(measured(row, gpu, right, call, gpu.time), "gb_per_s", nbytes)


def size_rows(gpu: Any, batch: int, num_nodes: int, names: Sequence[str], orders: Sequence[str]) -> Iterator[Row]:
    """All rows of one size."""
    forms = every_form(batch, num_nodes)
    yield from encoding_rows(gpu, forms, names)
    for order in orders:
        yield from relabel_rows(gpu, forms, order)


def jobs(gpu: Any, quick: bool) -> list[Job]:
    """The measurements one after the other; a few conversions of one size with ``quick``."""
    if quick:
        return [partial(size_rows, gpu, *SIZES[0], QUICK, ())]
    return [partial(size_rows, gpu, *size, tuple(CONVERSIONS), ORDERS) for size in SIZES]


def line(row: Row) -> str:
    """A row for people."""
    sizes = ",".join(str(row.get(name, "")) for name in "BQ")
    return f"{row.get('operator', ''):30}{sizes:10} {row['variant']:30}{harness.times_of(row)}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    count = lambda quick: len(jobs(None, quick))  # noqa: E731
    return harness.main(__doc__, "encodings", FIELDS, jobs, count, line, Gpu, arguments, ("numpy",))


if __name__ == "__main__":
    sys.exit(main())
