"""DecodeStep from the NumPy mirrors alone: the same chain and arrays, without a GPU and without the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.accept import argmax_tokens, compact_kv, greedy, sampled, target_probs
from ddtree_numba.accept.accepted import BAD_TARGET, INT32, NO_TOKEN, STOPPED, Accepted, shapes
from ddtree_numba.step import Forward
from ddtree_numba.tree.build_tree import build_tree
from ddtree_numba.tree.draft_tree import DraftTree
from ddtree_numba.tree.topk_logprobs import MAX_K, topk_logprobs

WALKED = ("tokens", "first_child", "next_sibling", "num_nodes")


class MirrorStep:
    """Parameters, attributes and call are those of `DecodeStep` on contiguous caches, with NumPy arrays of one kind.

    ``stop_tokens`` is a list, and temperature, top_k and top_p are arrays [B].
    """

    def __init__(
        self,
        like: np.ndarray,
        *,
        batch: int,
        draft_positions: int,
        vocabulary: int,
        tree_budget: int,
        candidates: int | None = None,
        sampled: bool = False,
        stop_tokens: list[int],
    ) -> None:
        self.candidates = candidates or max(min(tree_budget, vocabulary, MAX_K), 1)
        self.tree_budget, self.sampled = tree_budget, sampled
        self.stop_tokens = np.tile(np.array(stop_tokens or [NO_TOKEN], INT32), (batch, 1))
        self.tree = DraftTree.empty(like, batch, tree_budget, min(draft_positions, tree_budget))
        self.accepted = Accepted.empty(like, batch, self.tree.max_depth)

    def __call__(
        self,
        draft_logits: np.ndarray,
        root_tokens: np.ndarray,
        cache_seqlens: np.ndarray,
        target_forward: Forward,
        *,
        kv_caches: list[np.ndarray],
        seeds: Any = None,
        temperature: Any = None,
        top_k: Any = None,
        top_p: Any = None,
    ) -> Accepted:
        tree, accepted = self.tree, self.accepted
        batch, num_nodes = tree.tokens.shape
        best = topk_logprobs(draft_logits, self.candidates, variant="threshold_numpy")
        build_tree(*best, root_tokens, self.tree_budget, out=tree, variant="heap_numpy")
        idle = (root_tokens < 0) | (cache_seqlens < 0) | (cache_seqlens > kv_caches[0].shape[1] - num_nodes)
        for name, nothing in (("tokens", NO_TOKEN), ("parents", -1), ("depths", 0), ("scores", -np.inf)):
            getattr(tree, name)[idle] = nothing
        for name, nothing in (("first_child", -1), ("next_sibling", -1), ("input_ids", 0), ("tree_mask", 0)):
            getattr(tree, name)[idle] = nothing
        tree.num_nodes[idle] = 0
        lengths = np.where(idle, 0, cache_seqlens).astype(INT32)

        logits = target_forward(tree, lengths[:, None] + tree.depths, lengths)

        walked = [getattr(tree, name) for name in WALKED]
        path = [getattr(accepted, name) for name in shapes(0, 0)]
        if self.sampled:
            probs = np.empty_like(logits)
            lowest = target_probs.LOWEST[logits.dtype.name]
            target_probs.mirror(logits, logits, temperature, top_k, top_p, lowest, probs)
            arguments = [*walked, probs, seeds, lengths, None, self.stop_tokens, *path]
            sampled.mirror(*arguments)
        else:
            tokens = np.empty(tree.tokens.shape, INT32)
            argmax_tokens.mirror(logits, logits, tokens)
            arguments = [*walked, tokens, self.stop_tokens, *path]
            greedy.mirror(*arguments)
        by_request = np.arange(batch, dtype=INT32)[:, None]
        for cache in kv_caches:
            compact_kv.mirror(
                cache, np.zeros(1, np.int64), cache.shape[2], by_request, lengths, accepted.nodes, accepted.num_accepted
            )
        live = root_tokens >= 0
        cache_seqlens[live] += accepted.num_accepted[live]
        going_on = (accepted.flags & (STOPPED | BAD_TARGET)) == 0
        root_tokens[live] = np.where(going_on, accepted.bonus_tokens, NO_TOKEN)[live]
        return accepted
