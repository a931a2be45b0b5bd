"""One decoding step of SmolLM2-135M-Instruct as reference files: ``python refs/make_captures.py [--out DIR]``.

Real activations have what random ones lack: columns far larger than the others, keys that take nearly all attention,
logits with long tails. The step is one of prompt lookup on a prompt that asks for a repetition; the files hold its
draft and tree, what attention was given in an early and a late layer, the accepted path, and the target's logits along
it. Results are not the model's own: they are what the oracles give for the captured inputs.

Needs the extra ``decode``. Which bits are captured depends on the BLAS, and so the files are kept, not made anew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from a plain checkout

import ddtree_numba as dd
from ddtree_numba import kdtr
from ddtree_numba.decode import loop, model
from ddtree_numba.decode.mirror_step import MirrorStep
from refs import accept, oracle, trees

PROMPT = "Repeat this list: red apple, green pear, yellow lemon, red apple, green pear, yellow lemon, red apple."
BUDGET, DRAFT_POSITIONS, MAX_TOKENS = 16, 8, 24
TOPK = 8
END = 2  # the model's end token
LAYERS = (1, 29)  # the first is not typical: its keys have hardly met


class Step(MirrorStep):
    """A step that keeps what went through it."""

    kept: list[dict[str, Any]] = []  # by step
    attended: list[dict[str, Any]] = []  # by layer, of the step that runs

    def __call__(self, draft_logits: Any, root_tokens: Any, cache_seqlens: Any, forward: Any, **rest: Any) -> Any:
        found: dict[str, Any] = {"draft_logits": draft_logits.copy(), "root_tokens": root_tokens.copy()}

        def keeping(*arguments: Any) -> Any:
            logits = forward(*arguments)
            found["target_logits"] = logits
            return logits

        self.attended.clear()
        accepted = super().__call__(draft_logits, root_tokens, cache_seqlens, keeping, **rest)
        found["layers"] = [self.attended[n] for n in LAYERS]
        found["nodes"] = accepted.nodes.copy()
        self.kept.append(found)
        return accepted


def attention(q: Any, kv_cache: Any, cache_seqlens: Any, tree_mask: Any, **rest: Any) -> Any:
    """verify_attention, which keeps the rows that live of the cache."""
    num_rows = int(cache_seqlens[0]) + q.shape[1]
    Step.attended.append(
        {
            "q": q.copy(),
            "kv_cache": kv_cache[:, :num_rows].copy(),
            "cache_seqlens": cache_seqlens.copy(),
            "tree_mask": tree_mask.copy(),
            "sm_scale": np.float64(rest["sm_scale"]),
            "kv_lora_rank": np.int32(rest["kv_lora_rank"]),
        }
    )
    return dd.verify_attention(q, kv_cache, cache_seqlens, tree_mask, **rest)


def capture() -> dict[str, Any]:
    """The step that accepted most."""
    Step.kept.clear()
    with mock.patch.object(model, "verify_attention", attention), mock.patch.object(loop, "MirrorStep", Step):
        sizes = {"budget": BUDGET, "draft_positions": DRAFT_POSITIONS, "max_tokens": MAX_TOKENS}
        loop.decode(PROMPT, loaded=loop.load(backend="numpy"), **sizes)
    return max(Step.kept, key=lambda step: int((step["nodes"] >= 0).sum()))


def build(step: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tensors of each file, as refs/make_refs.py lays them out, by its name."""
    # The target's logits along the accepted path: what a drafter that knows the target would draft.
    logits = step["target_logits"][:, step["nodes"][0, :DRAFT_POSITIONS]]
    logprobs, token_ids, lse = oracle.topk_logprobs(logits, TOPK)
    topk = {"logits": logits, "k": np.int32(TOPK), "logprobs": logprobs.astype(np.float32), "token_ids": token_ids}
    topk["lse"] = lse
    logprobs, token_ids, _ = oracle.topk_logprobs(step["draft_logits"], BUDGET)
    builder = {"logprobs": logprobs.astype(np.float32), "token_ids": token_ids, "root_tokens": step["root_tokens"]}
    tree = trees.draft_tree(**builder, tree_budget=BUDGET)
    builder["tree_budget"] = np.int32(BUDGET)
    target_tokens = step["target_logits"].argmax(axis=2).astype(np.int32)
    stops = np.array([[-1, END]], np.int32)
    accepted = accept.accept_greedy(tree, target_tokens, stops)
    np.testing.assert_array_equal(accepted["nodes"], step["nodes"])  # the loop walked the same tree
    walk = {**tree, "target_tokens": target_tokens, "stop_tokens": stops}
    walk |= {f"accepted.{name}": array for name, array in accepted.items()}
    files = {"topk_logprobs": topk, "build_tree": {**builder, **tree}, "accept_greedy": walk}
    for n, problem in zip(LAYERS, step["layers"], strict=True):
        out, lse = oracle.verify_attention(**problem)
        statistics = oracle.logit_statistics(**problem)
        files[f"verify_attn_layer{n}"] = {
            **problem,
            **{name: tree[name] for name in ("parents", "depths", "num_nodes")},
            **{name: np.float64(value) for name, value in statistics.items()},
            "out": out.astype(np.float32),
            "lse": lse.astype(np.float32),
        }
    for name, tensors in files.items():
        operator = name.replace("verify_attn", "verify_attention").split("_layer")[0]
        files[name] = {"operator": np.frombuffer(operator.encode(), np.uint8), **tensors}
    return files


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Capture a decoding step as reference files.")
    folder = Path(__file__).resolve().parent / "captured"
    parser.add_argument(
        "--out", type=Path, default=folder, metavar="DIR", help="folder; default: captured/ beside this"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, tensors in build(capture()).items():
        kdtr.write(options.out / f"{name}_smollm2.kdtr", tensors)


if __name__ == "__main__":
    main()
