"""check: every variant of every operator on reference files, against the expected values stored in them.

A reference file says in its tensor ``operator`` which operator it is for. The expected values come from the float64
oracle beside the files, so that this module needs no oracle, and cannot share a mistake with one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import kdtr
from ddtree_numba.attention import three_phase
from ddtree_numba.attention.verify import verify_attention
from ddtree_numba.compare import Report, compare
from ddtree_numba.device import runtime
from ddtree_numba.masks import pack_mask, unpack_mask

REFERENCE_FOLDER = Path(__file__).resolve().parent.parent / "refs"

# The simulator's pace: multiply-adds a second, and the seconds that starting a block takes whatever its size.
SIMULATED_RATE = 400_000.0
SIMULATED_START = 0.04

# The tensors of a file for verify_attention; a paged one also has block_table.
NEEDED = ("q", "kv_cache", "cache_seqlens", "tree_mask", "kv_lora_rank", "sm_scale", "logit_magnitude", "out", "lse")

# verify_attention: the contract on lse, relative to max(1, |lse|).
LSE_BOUND = 1e-5


@dataclass(frozen=True)
class Row:
    """What one variant did on one file.

    ``checked`` says which part was compared; ``out`` and ``lse`` are the comparisons, None where it came to none;
    ``seconds`` is the wall time of a call, compilation left out; ``problem`` is empty when the row passed.
    """

    file: str
    operator: str
    variant: str
    checked: str
    out: Report | None
    lse: Report | None
    seconds: float
    problem: str

    @property
    def passed(self) -> bool:
        return not self.problem

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "file": self.file,
            "operator": self.operator,
            "variant": self.variant,
            "checked": self.checked,
            "passed": self.passed,
            "problem": self.problem,
            "seconds": self.seconds,
            "out": None if self.out is None else self.out.as_dict(),
            "lse": None if self.lse is None else self.lse.as_dict(),
        }


def reference_files() -> list[Path]:
    """The reference files of a source checkout, in name order."""
    return sorted(REFERENCE_FOLDER.glob("*.kdtr"))


def check_file(path: Path, seconds: float | None, started: Callable[[str], None] = lambda what: None) -> Iterator[Row]:
    """Check every variant on one file.

    Parameters
    ----------
    path : Path
        A KDTR file.
    seconds : float or None
        Time budget of each simulated variant; at least four blocks are checked whatever it is. None means all blocks.
    started : callable
        Told what begins, for a progress bar.

    Yields
    ------
    Row
        One for each variant; a single failed one when the file cannot be read or is for no operator of ours.
    """
    try:
        tensors = kdtr.read(path)
        operator = bytes(tensors.get("operator", b"")).decode(errors="replace")
        if operator != "verify_attention":
            raise ValueError(f"tensor 'operator' says {operator!r}; it must be 'verify_attention'")
        missing = [name for name in NEEDED if name not in tensors]
        if missing:
            raise ValueError(f"tensors are missing: {', '.join(missing)}")
    except (OSError, ValueError) as error:  # kdtr's errors are ValueErrors
        reason = str(error)
        yield Row(path.name, "?", "-", "nothing", None, None, 0.0, reason)
        return
    for variant in ("three_phase_numpy", "three_phase"):
        started(f"{path.name} {variant}")
        try:
            yield _check_verify_attention(path, tensors, variant, seconds)
        except Exception as error:  # whatever went wrong belongs into the table, and the other rows still count
            reason = f"{type(error).__name__}: {error}"
            yield Row(path.name, operator, variant, "nothing", None, None, 0.0, reason)


def _check_verify_attention(path: Path, tensors: dict[str, np.ndarray], variant: str, seconds: float | None) -> Row:
    simulated = runtime.SIMULATOR and variant == "three_phase"
    arrays, checked = _select(tensors, seconds if simulated else None)
    num_keys = int(arrays["cache_seqlens"].max(initial=0)) + arrays["q"].shape[1]
    bound = three_phase.error_bound(float(tensors["logit_magnitude"]), num_keys, arrays["q"].shape[3])

    result: dict[str, Any] = {
        "out": np.full(arrays["expected_out"].shape, np.nan, np.float32),
        "lse": np.full(arrays["expected_lse"].shape, np.nan, np.float32),
    }
    names = ("q", "kv_cache", "cache_seqlens", "tree_mask", "block_table")
    inputs: dict[str, Any] = {name: arrays.get(name) for name in names}
    on_device = variant == "three_phase" and not runtime.SIMULATOR
    if on_device:
        runtime.require_backend()
        inputs = {name: None if x is None else cuda.to_device(np.ascontiguousarray(x)) for name, x in inputs.items()}
        result = {name: cuda.to_device(x) for name, x in result.items()}

    def call() -> float:
        start = time.perf_counter()
        verify_attention(
            **inputs,
            sm_scale=float(tensors["sm_scale"]),
            kv_lora_rank=int(tensors["kv_lora_rank"]),
            variant=variant,
            **result,
        )
        if on_device:
            cuda.synchronize()
        return time.perf_counter() - start

    elapsed = call()
    if on_device:
        elapsed = call()
        result = {name: x.copy_to_host() for name, x in result.items()}

    out = compare(result["out"], arrays["expected_out"], name="out", rel_frobenius=bound)
    expected = arrays["expected_lse"]
    unit = np.where(np.isfinite(expected), np.maximum(1, np.abs(expected)), 1)
    lse = compare(result["lse"] / unit, expected / unit, name="lse", max_abs=LSE_BOUND)
    problem = "; ".join(str(report) for report in (out, lse) if not report.passed)
    return Row(path.name, "verify_attention", variant, checked, out, lse, elapsed, problem)


def _select(tensors: dict[str, np.ndarray], seconds: float | None) -> tuple[dict[str, Any], str]:
    """The part of a file that the time budget allows: all requests, the first nodes, the first and last heads.

    The first n nodes of a tree are a tree, because parents come before children, and their rows are the first n behind
    the prefix. So a part needs no hook in the kernel, and each offset but the last node's is met.
    """
    batch, num_nodes, num_heads, head_dim = tensors["q"].shape
    nodes, heads = num_nodes, list(range(num_heads))
    if seconds is not None:
        num_keys = int(tensors["cache_seqlens"].max(initial=0)) + num_nodes
        multiply_adds = num_keys * (head_dim + int(tensors["kv_lora_rank"]))
        blocks = int(seconds / (SIMULATED_START + multiply_adds / SIMULATED_RATE))
        if blocks < batch * num_nodes * num_heads:
            heads = sorted({0, num_heads - 1})
            nodes = min(num_nodes, max(2, math.ceil(4 / (batch * len(heads))), blocks // (batch * len(heads))))
    arrays = dict(tensors)
    arrays["q"] = tensors["q"][:, :nodes, heads]
    mask = unpack_mask(tensors["tree_mask"], num_nodes)
    arrays["tree_mask"] = pack_mask(mask[:, :nodes, :nodes])
    arrays["expected_out"] = tensors["out"][:, :nodes, heads]
    arrays["expected_lse"] = tensors["lse"][:, :nodes, heads]
    total = batch * num_nodes * num_heads
    if nodes == num_nodes and len(heads) == num_heads:
        return arrays, f"all {total} blocks"
    count = batch * nodes * len(heads)
    which = f"nodes 0-{nodes - 1}, heads {' and '.join(map(str, heads))}"
    return arrays, f"{count} of {total} blocks: {which}, all requests"
