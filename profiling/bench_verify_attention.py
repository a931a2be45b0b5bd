"""Errors and times of verify_attention beside PyTorch's eager attention, on this GPU, as CSV.

``python profiling/bench_verify_attention.py --out profiling/results/nvidia-h200`` writes verify_attention.csv there.
Each row is checked against float64 first: a variant that is wrong is reported and not timed. Times are CUDA events
around one call, L2 flushed before each, median of `REPEATS`, in microseconds. Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

try:
    import pynvml
    import torch
except ImportError as error:
    sys.exit(f"{error}: this compares with PyTorch and reads the clocks; pip install torch nvidia-ml-py")
from rich.console import Console
from rich.progress import track
from tables import write_rows

import ddtree_numba as dd
from ddtree_numba.attention import three_phase
from ddtree_numba.check import reference_files
from ddtree_numba.device import runtime

REPEATS = 30
WARM_UPS = 3
KV_LORA_RANK, HEAD_DIM = 512, 576

# (B, H, Q, prefix): the shapes that peers are measured at; float32 and bfloat16, logits of standard deviation 2 nats.
SHAPES = ((1, 64, 17, 2048), (8, 64, 9, 2048), (64, 16, 33, 1024), (2, 8, 9, 37), (1, 8, 9, 40000))
# The same kernel on inputs of small logit spread, where errors in the logits all but vanish.
SMALL_SPREAD = (2, 8, 9, 37)


def flops(batch: int, num_heads: int, num_nodes: int, prefix: int) -> int:
    """Multiplications and additions of all nodes over prefix and tree; masked tree keys are counted too."""
    return 2 * batch * num_nodes * num_heads * (prefix + num_nodes) * (HEAD_DIM + KV_LORA_RANK)


def make_inputs(shape: tuple[int, int, int, int], dtype: torch.dtype, logit_std: float) -> dict[str, Any]:
    """Random queries and rows with a given spread of the logits, and random trees: parents among the last 6 nodes."""
    batch, num_heads, num_nodes, prefix = shape
    random = np.random.default_rng(0)
    torch.manual_seed(0)
    q = torch.randn(batch, num_nodes, num_heads, HEAD_DIM, device="cuda")
    q *= logit_std / (dd.KIMI_K2_SM_SCALE * HEAD_DIM**0.5)
    parents = np.full((batch, num_nodes), -1)
    for i in range(1, num_nodes):
        parents[:, i] = random.integers(max(0, i - 6), i, size=batch)
    return {
        "q": q.to(dtype),
        "kv_cache": torch.randn(batch, prefix + num_nodes, HEAD_DIM, device="cuda").to(dtype),
        "cache_seqlens": torch.full((batch,), prefix, dtype=torch.int32, device="cuda"),
        "tree_mask": torch.from_numpy(dd.mask_from_parents(parents)).cuda(),
    }


def dense(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """The same problem as dense caches of just the live rows: one batch if all lengths agree, else a request each."""
    mask, table, lengths = inputs["tree_mask"], inputs.get("block_table"), inputs["cache_seqlens"].tolist()
    batch, num_nodes = inputs["q"].shape[:2]
    if mask.dtype != torch.bool:
        mask = torch.from_numpy(dd.unpack_mask(mask.cpu().numpy(), num_nodes)).cuda()
    if table is None and len(set(lengths)) == 1:
        return [{**inputs, "tree_mask": mask, "kv_cache": inputs["kv_cache"][:, : lengths[0] + num_nodes]}]
    parts = []
    for b in range(batch):
        one = slice(b, b + 1)
        cache = inputs["kv_cache"][one]
        if table is not None:
            live = -(-(lengths[b] + num_nodes) // inputs["kv_cache"].shape[1])
            cache = inputs["kv_cache"][table[b, :live].long()].flatten(0, 1)[None]
        parts.append({"q": inputs["q"][one], "kv_cache": cache[:, : lengths[b] + num_nodes], "tree_mask": mask[one]})
    return parts


def eager(parts: list[dict[str, Any]], sm_scale: float, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """What PyTorch computes operator by operator; with ``dtype=torch.float64``, the reference."""
    results = [eager_dense(part, sm_scale, dtype) for part in parts]
    return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


def eager_dense(part: dict[str, Any], sm_scale: float, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """`eager` for one batch of equal lengths; a node that sees nothing gets 0 and -inf."""
    q, cache, mask = part["q"], part["kv_cache"], part["tree_mask"]
    if dtype is not None:
        q, cache = q.to(dtype), cache.to(dtype)
    batch, num_nodes, num_heads, head_dim = q.shape
    scores = torch.matmul(q.reshape(batch, -1, head_dim), cache.transpose(1, 2)).mul_(sm_scale)
    scores = scores.view(batch, num_nodes, num_heads, -1)
    scores[..., -num_nodes:].masked_fill_(~mask[:, :, None, :], float("-inf"))
    lse = torch.logsumexp(scores, -1)
    p = torch.softmax(scores, -1).masked_fill_(lse[..., None] == float("-inf"), 0)
    return torch.matmul(p.view(batch, num_nodes * num_heads, -1), cache[..., :KV_LORA_RANK]).view(*q.shape[:3], -1), lse


def errors(out: torch.Tensor, lse: torch.Tensor, exact_out: torch.Tensor, exact_lse: torch.Tensor) -> dict[str, float]:
    """Relative Frobenius and maximum error of the output, and of lse relative to max(1, |lse|)."""
    difference = out.double() - exact_out
    of_lse = torch.where(lse == exact_lse, 0.0, (lse.double() - exact_lse).abs() / exact_lse.abs().clamp(min=1))
    return {
        "rel_frobenius": float(difference.norm() / exact_out.norm()),
        "max_abs": float(difference.abs().max()),
        "lse_error": float(of_lse.max()),
    }


def logit_magnitude(inputs: dict[str, Any], sm_scale: float) -> float:
    """The argument of three_phase.error_bound, for random inputs: weighted root mean square of the scaled logits."""
    q, cache, mask = inputs["q"].double(), inputs["kv_cache"].double(), inputs["tree_mask"]
    scores = torch.einsum("bihd,bkd->bihk", q, cache) * sm_scale
    terms = torch.einsum("bihd,bkd->bihk", q.square(), cache.square()) * sm_scale**2
    scores[..., -q.shape[1] :].masked_fill_(~mask[:, :, None, :], float("-inf"))
    p = torch.softmax(scores, -1)
    weighted = torch.where(p > 0, p * torch.maximum(scores.square(), terms), 0.0)
    return float(weighted.sum(-1).mean().sqrt())


def median_microseconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Median and interquartile range of the device time of a call, L2 flushed before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for n in range(WARM_UPS + REPEATS):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Two milliseconds of waiting on the GPU, so that the host has prepared the launch when the first event passes.
        torch.cuda._sleep(4_000_000)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if n >= WARM_UPS:
            times.append(begin.elapsed_time(end) * 1e3)
    quarters = statistics.quantiles(times, n=4)
    return statistics.median(times), quarters[2] - quarters[0]


def machine(commit: str) -> dict[str, Any]:
    """What a row must say so that it can be compared with another: GPU, driver, clock, power, versions, commit."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "power_w": round(pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        "temperature_c": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        "numba_cuda": version("numba-cuda"),
        "torch": torch.__version__,
        "commit": commit,
    }


def measure(name: str, inputs: dict[str, Any], sm_scale: float, exact: Any, bound: float, commit: str) -> list[dict]:
    """A row for our kernel and one for PyTorch eager: errors first, then, if they are within bounds, times."""
    batch, num_nodes, num_heads, _ = inputs["q"].shape
    prefix = int(inputs["cache_seqlens"].max())
    work = flops(batch, num_heads, num_nodes, prefix)
    rows = []
    parts = dense(inputs)
    calls = {
        "three_phase": lambda: dd.verify_attention(**inputs, sm_scale=sm_scale, variant="three_phase"),
        "torch_eager": lambda: eager(parts, sm_scale),
    }
    for variant, call in calls.items():
        found = errors(*call(), *exact)
        right = variant != "three_phase" or (found["rel_frobenius"] <= bound and found["lse_error"] <= 1e-5)
        microseconds, spread = median_microseconds(call) if right else (float("nan"), float("nan"))
        rows.append(
            {
                "case": name,
                "B": batch,
                "H": num_heads,
                "Q": num_nodes,
                "prefix": prefix,
                "dtype": str(inputs["q"].dtype).removeprefix("torch."),
                "variant": variant,
                **{key: f"{value:.3e}" for key, value in found.items()},
                "bound": f"{bound:.3e}",
                "right": right,
                "microseconds": f"{microseconds:.1f}",
                "spread_microseconds": f"{spread:.1f}",
                "tflops": f"{work / microseconds / 1e6:.2f}",
                **machine(commit),
            }
        )
    return rows


def reference_rows(path: Path, commit: str) -> list[dict]:
    """Rows for one reference file, against the expected values stored in it."""
    tensors = dd.kdtr.read(path)
    names = ("q", "kv_cache", "cache_seqlens", "tree_mask", "block_table")
    inputs = {name: torch.from_numpy(np.array(tensors[name])).cuda() for name in names if name in tensors}
    exact = [torch.from_numpy(np.array(tensors[name])).cuda().double() for name in ("out", "lse")]
    num_keys = int(tensors["cache_seqlens"].max()) + tensors["q"].shape[1]
    bound = three_phase.error_bound(float(tensors["logit_magnitude"]), num_keys, HEAD_DIM)
    return measure(path.stem, inputs, float(tensors["sm_scale"]), exact, bound, commit)


def shape_rows(shape: tuple[int, int, int, int], dtype: torch.dtype, logit_std: float, commit: str) -> list[dict]:
    """Rows for one random problem, against PyTorch in float64."""
    inputs = make_inputs(shape, dtype, logit_std)
    exact = eager(dense(inputs), dd.KIMI_K2_SM_SCALE, torch.float64)
    if dtype == torch.float32:
        bound = three_phase.error_bound(logit_magnitude(inputs, dd.KIMI_K2_SM_SCALE), sum(shape[2:]), HEAD_DIM)
    else:
        rounded = exact[0].to(dtype).double()
        bound = 2 * float((rounded - exact[0]).norm() / exact[0].norm())
    return measure(f"logit std {logit_std:g}", inputs, dd.KIMI_K2_SM_SCALE, exact, bound, commit)


def main() -> int:
    """Measure, write, print; 1 when a variant was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("profiling/results/local"), help="folder for the CSV")
    parser.add_argument("--commit", help="commit that is measured; default: what git says")
    options = parser.parse_args()
    if runtime.SIMULATOR or not torch.cuda.is_available():
        print(f"this measures a GPU, and there is none: {runtime.REASON}", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    commit = (
        options.commit
        or subprocess.check_output(["git", "describe", "--always", "--abbrev=40", "--dirty"], text=True).strip()
    )
    jobs: list[Callable[[], list[dict]]] = [
        lambda p=path: reference_rows(p, commit) for path in reference_files("verify_attention")
    ]
    jobs += [
        lambda s=shape, d=dtype: shape_rows(s, d, 2.0, commit)
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
    ]
    jobs.append(lambda: shape_rows(SMALL_SPREAD, torch.float32, 0.02, commit))
    rows = [row for job in track(jobs, "measuring", console=Console(stderr=True)) for row in job()]
    write_rows(options.out / "verify_attention.csv", rows, list(rows[0]))
    for row in rows:
        print(
            f"{row['case']:26} {row['B']:>3},{row['H']:>3},{row['Q']:>3},{row['prefix']:>6} {row['dtype']:9}"
            f"{row['variant']:12} rel {row['rel_frobenius']} (bound {row['bound']}) max {row['max_abs']} "
            f"lse {row['lse_error']} {row['microseconds']:>9} us {row['tflops']:>6} TFLOP/s"
            f"{'' if row['right'] else '  WRONG'}"
        )
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
