"""A tiny MLA layer with `verify_attention` between its two GEMMs, against plain multi-head attention.

Multi-head latent attention caches one row a token, ``[ckv, kpe]``. Written out, head h has the key and the value::

    k[h] = [W_UK[h] ckv, kpe]          v[h] = W_UV[h] ckv

``q_nope . (W_UK ckv) = (W_UK^T q_nope) . ckv``: so the first GEMM absorbs W_UK into the query, attention works on the
cached rows themselves, and the second GEMM applies W_UV to its latent output. This script computes it both ways, with
keys and values written out in float64, and compares.

Run: ``python docs/examples/absorbed_mla.py``. NumPy arrays and the simulator without a GPU; CuPy arrays with one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the script runs from a plain checkout

import numpy as np

import ddtree_numba as dd
from ddtree_numba.device import runtime

B, H = 2, 2  # requests, heads
QK_NOPE_HEAD_DIM, QK_ROPE_HEAD_DIM, KV_LORA_RANK, V_HEAD_DIM = 32, 16, 64, 32
PREFIXES = (11, 3)
PARENTS = np.array([[-1, 0, 0, 1, 1], [-1, 0, 1, -1, -1]])  # a tree of five nodes; one of three and two padded nodes
SM_SCALE = dd.yarn_sm_scale(1.0, qk_head_dim=QK_NOPE_HEAD_DIM + QK_ROPE_HEAD_DIM)  # the width before absorption

# Relative Frobenius error. Three sums round in float32: absorption, logits, projection. Each, of up to 80 terms, rounds
# by about eps/2.4 * sqrt(80) = 4.4e-7, and the softmax multiplies a logit's error by the logit's size, 4 or less.
TOLERANCE = 5e-6


def make_layer(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights, one step's queries and the cache, float32. The tree's rows stand behind each prefix; the rest is NaN."""
    num_nodes = PARENTS.shape[1]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    kv_cache = np.full((B, max(PREFIXES) + num_nodes, KV_LORA_RANK + QK_ROPE_HEAD_DIM), np.nan, np.float32)
    for b, length in enumerate(PREFIXES):
        kv_cache[b, : length + num_nodes] = normal(length + num_nodes, KV_LORA_RANK + QK_ROPE_HEAD_DIM)
    return {
        "w_uk": normal(H, QK_NOPE_HEAD_DIM, KV_LORA_RANK) * np.float32(KV_LORA_RANK**-0.5),
        "w_uv": normal(H, V_HEAD_DIM, KV_LORA_RANK) * np.float32(KV_LORA_RANK**-0.5),
        "q_nope": normal(B, num_nodes, H, QK_NOPE_HEAD_DIM),
        "q_pe": normal(B, num_nodes, H, QK_ROPE_HEAD_DIM),
        "kv_cache": kv_cache,
    }


def absorbed(xp: Any, layer: dict[str, Any]) -> tuple[Any, Any]:
    """out [B, Q, H, v_head_dim] and lse [B, Q, H], as a serving engine computes them."""
    q_absorbed = xp.einsum("bqhn,hnr->bqhr", layer["q_nope"], layer["w_uk"])
    latent, lse = dd.verify_attention(
        (q_absorbed, layer["q_pe"]),
        layer["kv_cache"],
        xp.asarray(np.array(PREFIXES, np.int32)),
        xp.asarray(dd.mask_from_parents(PARENTS)),
        sm_scale=SM_SCALE,
        kv_lora_rank=KV_LORA_RANK,
    )
    return xp.einsum("bqhr,hvr->bqhv", latent, layer["w_uv"]), lse


def explicit(layer: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The same by the definition of multi-head attention, in float64: keys and values of each head, node by node."""
    exact = {name: x.astype(np.float64) for name, x in layer.items()}
    w_uk, w_uv, q_nope, q_pe, cache = (exact[name] for name in ("w_uk", "w_uv", "q_nope", "q_pe", "kv_cache"))
    out, lse = np.zeros((*q_nope.shape[:3], V_HEAD_DIM)), np.zeros(q_nope.shape[:3])
    for b, i, h in np.ndindex(*lse.shape):
        visible = list(range(PREFIXES[b]))
        node = i if i == 0 or PARENTS[b, i] >= 0 else -1  # a padded node sees the prefix alone
        while node >= 0:
            visible.append(PREFIXES[b] + node)
            node = PARENTS[b, node]
        ckv, kpe = np.split(cache[b, visible], [KV_LORA_RANK], axis=1)
        keys = np.concatenate([ckv @ w_uk[h].T, kpe], axis=1)
        logits = keys @ np.concatenate([q_nope[b, i, h], q_pe[b, i, h]]) * SM_SCALE
        lse[b, i, h] = np.log(np.exp(logits).sum())
        out[b, i, h] = np.exp(logits - lse[b, i, h]) @ (ckv @ w_uv[h].T)
    return out, lse


def main() -> int:
    """Compare the two and print the reports; returns the exit code."""
    layer = make_layer(np.random.default_rng(0))
    if runtime.SIMULATOR:
        print("NumPy arrays, the kernel in Numba's simulator")
        out, lse = absorbed(np, layer)
    else:
        import cupy

        print("CuPy arrays, the kernel on the GPU")
        results = absorbed(cupy, {name: cupy.asarray(x) for name, x in layer.items()})
        out, lse = (x.get() for x in results)
    exact_out, exact_lse = explicit(layer)
    reports = (
        dd.compare.compare(out, exact_out, name="out after W_UV, against explicit heads", rel_frobenius=TOLERANCE),
        dd.compare.compare(lse, exact_lse, name="lse", rel_frobenius=TOLERANCE),
    )
    for report in reports:
        print(report)
    return 0 if all(reports) else 1


if __name__ == "__main__":
    sys.exit(main())
