"""A kernel of your own beside ours: ``python docs/examples/own_kernel.py [--full]``.

It merges attention states as `ddtree_numba.merge_states` does, a block a row, in float32 alone. On a GPU it is checked
and timed on two sizes of the benchmark, with ``--full`` on all, beside ours, PyTorch and Triton, and its figure is
drawn; that needs PyTorch, nvidia-ml-py and matplotlib. Without a GPU it is checked in the simulator.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))

import ddtree_numba as dd

from numba import cuda  # isort: skip  (behind the package, which chooses between GPU and simulator)
from ddtree_numba.device.runtime import SIMULATOR  # isort: skip

THREADS = 32 if SIMULATOR else 128


@cuda.jit
def kernel(out_a, lse_a, out_b, lse_b, out, lse):
    """A block a row [R], its threads the columns in turn. It does not know of empty states: -inf - -inf is NaN."""
    row, column = cuda.blockIdx.x, cuda.threadIdx.x
    m = max(lse_a[row], lse_b[row])
    w_a, w_b = math.exp(lse_a[row] - m), math.exp(lse_b[row] - m)
    total = w_a + w_b
    while column < out.shape[1]:
        out[row, column] = (w_a * out_a[row, column] + w_b * out_b[row, column]) / total
        column += cuda.blockDim.x
    if cuda.threadIdx.x == 0:
        lse[row] = m + math.log(total)


def mine(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any, lse: Any) -> tuple[Any, Any]:
    """The signature of `ddtree_numba.merge_states`, for arrays in C order."""
    if "float32" not in str(out_a.dtype):
        raise TypeError("this kernel takes float32 alone")
    a, b, merged = (x.reshape(-1, x.shape[-1]) for x in (out_a, out_b, out))
    l_a, l_b, l = (x.reshape(-1) for x in (lse_a, lse_b, lse))
    kernel[len(l), THREADS, stream_of(out_a)](a, l_a, b, l_b, merged, l)
    return out, lse


def stream_of(x: Any) -> Any:
    """PyTorch's current stream for its tensors, so that a call can be captured in a CUDA graph."""
    if isinstance(x, np.ndarray):
        return 0
    import torch

    return cuda.external_stream(torch.cuda.current_stream().cuda_stream)


def main() -> int:
    """Measure on a GPU, else check; 1 if a result was wrong."""
    if not SIMULATOR:
        import harness

        print(harness.against("merge_states", "mine", mine, quick="--full" not in sys.argv))
        return 0
    random = np.random.default_rng(0)
    states = [random.normal(size=shape).astype(np.float32) for shape in ((3, 2, 40), (3, 2)) * 2]
    out, lse = mine(*states, out=np.empty_like(states[0]), lse=np.empty_like(states[1]))
    exact_out, exact_lse = dd.merge_states(*(x.astype(np.float32) for x in states))
    right = np.allclose(out, exact_out, rtol=1e-5, atol=1e-6) and np.allclose(lse, exact_lse, rtol=1e-5, atol=1e-6)
    print(f"{'ok  ' if right else 'FAIL'} in Numba's simulator; times need a GPU")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
