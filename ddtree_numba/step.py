"""DecodeStep: one step of decoding, from the drafter's logits to the next root, with nothing allocated on the way.

::

    draft logits [B, L, V]
      -> topk_logprobs        the best candidates of each position
      -> build_tree           the draft tree
      -> prepare              positions; idle slots made inert
      -> target_forward       the caller's: the target's logits behind each node, through verify_attention
      -> argmax_tokens, accept_greedy, or target_probs, accept_sampled
      -> compact_kv           accepted rows next to the prefix
      -> finish               lengths grow, the bonus token is the next root

All sizes are fixed, all contents are on the device, and no call waits for the GPU, so that a step can be captured in a
CUDA graph, and replayed. A slot without a request has a negative root token: its tree has no nodes, nothing of it is
accepted or moved, and its length stays. A request becomes such a slot when it emits a stop token, when the target has
no token for it, or when its cache has no room for the Q rows of a tree.

Two small kernels are this file's own, a block and a thread for each request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba.accept import compact_kv
from ddtree_numba.accept.accepted import BAD_TARGET, INT32, NO_TOKEN, STOPPED, Accepted, shapes, stop_argument
from ddtree_numba.accept.argmax_tokens import argmax_tokens
from ddtree_numba.accept.compact_kv import LARGEST_INT32
from ddtree_numba.accept.greedy import accept_greedy
from ddtree_numba.accept.sampled import MAX_VOCABULARY, accept_sampled, randomness
from ddtree_numba.accept.target_probs import controls, target_probs
from ddtree_numba.device import arrays, runtime
from ddtree_numba.device.arrays import View
from ddtree_numba.device.launch import launch
from ddtree_numba.tree.build_tree import build_tree
from ddtree_numba.tree.draft_tree import DTYPES, DraftTree
from ddtree_numba.tree.search import MAX_BUDGET
from ddtree_numba.tree.topk_logprobs import MAX_K, topk_logprobs

THREADS = 8 if runtime.SIMULATOR else 128
NEG_INF = np.float64(-np.inf)

Forward = Callable[[DraftTree, Any, Any], Any]


@cuda.jit
def prepare_kernel(
    root_tokens, lengths, most, tokens, parents, depths, scores, num_nodes, tree_mask, first_child, next_sibling,
    input_ids, live_lengths, positions,
):  # fmt: skip
    """One block a request: positions of its nodes; or, where it is none or longer than ``most``, no tree, length 0."""
    b = cuda.blockIdx.x
    t = cuda.threadIdx.x
    idle = root_tokens[b] < 0 or lengths[b] < 0 or lengths[b] > most
    length = 0 if idle else lengths[b]
    if t == 0:
        live_lengths[b] = length
        if idle:
            num_nodes[b] = 0
    i = t
    while i < tokens.shape[1]:
        if idle:
            tokens[b, i] = NO_TOKEN
            parents[b, i] = -1
            depths[b, i] = 0
            scores[b, i] = NEG_INF
            first_child[b, i] = -1
            next_sibling[b, i] = -1
            input_ids[b, i] = 0
            for word in range(tree_mask.shape[2]):
                tree_mask[b, i, word] = 0
        positions[b, i] = length + depths[b, i]
        i += THREADS


@cuda.jit
def finish_kernel(num_accepted, bonus_tokens, flags, lengths, root_tokens):
    """One thread a request: its length and root for the next step."""
    b = cuda.grid(1)
    if b < lengths.size and root_tokens[b] >= 0:
        lengths[b] += num_accepted[b]
        going_on = (flags[b] & (STOPPED | BAD_TARGET)) == 0
        root_tokens[b] = bonus_tokens[b] if going_on else NO_TOKEN


class DecodeStep:
    """A decoding step of B requests with all memory that it needs.

    Parameters
    ----------
    like : array
        A CuPy, Numba or PyTorch array on a GPU, or a NumPy array: what kind of arrays the step works on, and where.
    batch, draft_positions, vocabulary : int
        B, L, V.
    tree_budget : int
        Most nodes of a tree beside the root; Q = tree_budget + 1.
    candidates : int, optional
        K, the best tokens of each position that the tree is built from. By default the tree_budget best, all that a
        tree can hold (1024 at most, and V at most).
    sampled : bool
        Whether tokens are sampled (`accept_sampled`) or the likeliest are taken (`accept_greedy`). Sampling takes 4 B Q
        V bytes for the probabilities.
    stop_tokens : int, list, tuple or set of ints, or int32 or int64 [n] or [B, n], optional
        As in `accept_greedy`.

    Attributes
    ----------
    tree : DraftTree
        Of the last step.
    positions : int32 [B, Q]
        Absolute position of each node, 0 in idle slots.
    live_lengths : int32 [B]
        ``cache_seqlens`` before the step, 0 in idle slots.
    accepted : Accepted
        Of the last step.

    Raises
    ------
    TypeError
        ``like`` is no such array, or a size no integer.
    ValueError
        A size is below 1 (``batch`` and ``tree_budget``: below 0), or above what the operators take; more candidates
        than V or 1024; a stop token that is none.
    """

    def __init__(
        self,
        like: Any,
        *,
        batch: int,
        draft_positions: int,
        vocabulary: int,
        tree_budget: int,
        candidates: int | None = None,
        sampled: bool = False,
        stop_tokens: Any = None,
    ) -> None:
        sizes = {"batch": batch, "draft_positions": draft_positions, "vocabulary": vocabulary}
        for name, size in {**sizes, "tree_budget": tree_budget}.items():
            least = 0 if name in ("batch", "tree_budget") else 1
            if arrays.require_integer(name, size) < least:
                raise ValueError(f"{name} is {size}; it must be at least {least}")
        if candidates is None:
            candidates = max(min(tree_budget, vocabulary, MAX_K), 1)
        if not 1 <= arrays.require_integer("candidates", candidates) <= min(vocabulary, MAX_K):
            raise ValueError(f"candidates is {candidates}; it must be between 1 and {min(vocabulary, MAX_K)}")
        if tree_budget > MAX_BUDGET:
            raise ValueError(f"tree_budget is {tree_budget}; it must be at most {MAX_BUDGET}")
        if vocabulary > LARGEST_INT32:
            raise ValueError(f"vocabulary is {vocabulary}; it must be at most {LARGEST_INT32}")
        if sampled and vocabulary > MAX_VOCABULARY:
            raise ValueError(f"vocabulary is {vocabulary}; for sampling it must be at most {MAX_VOCABULARY}")
        place = arrays.view("like", like)
        stop_argument(stop_tokens, place, batch)
        self._like = place
        self.draft_shape = (batch, draft_positions, vocabulary)
        self.logits_shape = (batch, tree_budget + 1, vocabulary)
        self.tree_budget = tree_budget
        self.sampled = sampled
        self.stop_tokens = stop_tokens
        rows = (batch, draft_positions, candidates)
        self._best = arrays.empty(place, rows, np.dtype(np.float32)), arrays.empty(place, rows, INT32)
        self.tree = DraftTree.empty(like, batch, tree_budget, min(draft_positions, tree_budget))
        self.positions = arrays.empty(place, (batch, tree_budget + 1), INT32)
        self.live_lengths = arrays.empty(place, (batch,), INT32)
        if sampled:
            self._choice = arrays.empty(place, self.logits_shape, np.dtype(np.float32))
        else:
            self._choice = arrays.empty(place, self.logits_shape[:2], INT32)
        self.accepted = Accepted.empty(like, batch, self.tree.max_depth)

    def __call__(
        self,
        draft_logits: Any,
        root_tokens: Any,
        cache_seqlens: Any,
        target_forward: Forward,
        *,
        kv_caches: Any = (),
        block_table: Any = None,
        seeds: Any = None,
        temperature: Any = None,
        top_k: Any = None,
        top_p: Any = None,
    ) -> Accepted:
        """Run the step.

        Parameters
        ----------
        draft_logits : float [B, L, V]
            The drafter's logits of the next L positions.
        root_tokens : int32 [B]
            The last token of each request, whose KV row is not in the cache yet; negative in idle slots. Written to:
            the bonus token, or -1 where the request ends: it has stopped, the target had no token, or the cache had no
            room for Q rows behind its prefix, so that nothing was done.
        cache_seqlens : int32 [B]
            Prefix of each request, in tokens. Written to: ``num_accepted`` larger.
        target_forward : callable
            ``target_forward(tree, positions, cache_seqlens)`` is given `tree`, `positions` and `live_lengths`, writes
            the KV rows of the nodes behind the prefixes (of ``tree.num_nodes`` nodes: an idle slot has none, and no
            cache row of its own), and returns the target's logits [B, Q, V], of any float dtype. In a captured graph
            they must lie where they did before.
        kv_caches, block_table
            As in `compact_kv`; with no caches nothing is moved.
        seeds : int64 or uint64 [B]
            For sampling; see `accept_sampled`. The root's position is its ``cache_seqlens``.
        temperature, top_k, top_p
            For sampling; see `target_probs`. temperature is needed, and a device array if graphs are to change it.

        Returns
        -------
        Accepted
            `accepted`, which the next step overwrites.

        Raises
        ------
        TypeError
            An argument is no array that kernels take, or has the wrong dtype, or is not of the kind of ``like``.
        ValueError
            A wrong shape or device; an array that is one of the step's own; sampling without seeds and temperature, or
            these without sampling; whatever the operators refuse.
        RuntimeError
            There is no usable GPU and the simulator is off.

        Notes
        -----
        Runs on the caller's current stream without synchronizing. To capture a graph, run one step before, which
        compiles the kernels and copies constants; then everything but ``target_forward`` allocates nothing.
        """
        batch = self.draft_shape[0]
        draft = self._own_kind("draft_logits", draft_logits)
        arrays.require_shape(draft, "[B, L, V]", *self.draft_shape)
        roots, lengths = self._own_kind("root_tokens", root_tokens), self._own_kind("cache_seqlens", cache_seqlens)
        tree = [arrays.view(f"tree.{name}", getattr(self.tree, name)) for name in DTYPES]
        path = {name: arrays.view(f"accepted.{name}", getattr(self.accepted, name)) for name in shapes(0, 0)}
        made = [arrays.view("live_lengths", self.live_lengths), arrays.view("positions", self.positions)]
        for x, other in ((roots, lengths), (lengths, roots)):
            arrays.require_dtype(x, INT32)
            arrays.require_shape(x, "[B]", batch)
            arrays.require_apart(x, [other, draft, *tree, *path.values(), *made])
        arrays.require_one_place([tree[0], draft, roots, lengths])
        if self.sampled:
            if seeds is None or temperature is None:
                raise ValueError("a step that samples needs seeds and temperature")
            randomness(tree[0], seeds, self.live_lengths, None)
            controls(draft, temperature, top_k, top_p)
        elif not all(x is None for x in (seeds, temperature, top_k, top_p)):
            raise ValueError("seeds, temperature, top_k and top_p are for steps made with sampled=True")
        moves = None
        if not isinstance(kv_caches, (list, tuple)) or kv_caches:
            moves = compact_kv.moves_of(kv_caches, made[0], self.accepted, block_table, [roots, lengths])

        logprobs, token_ids = topk_logprobs(draft_logits, self._best[0].shape[2], out=self._best)
        build_tree(logprobs, token_ids, root_tokens, self.tree_budget, out=self.tree)
        if batch:
            most = (LARGEST_INT32 if moves is None else moves.capacity) - self.logits_shape[1]
            args = (roots, lengths, np.int32(most), *tree, *made)
            launch(prepare_kernel, (batch, 1, 1), THREADS, args, results=len(tree) + 2, shared_bytes=0)
        logits = target_forward(self.tree, self.positions, self.live_lengths)
        found = self._own_kind("target_forward's logits", logits)
        arrays.require_shape(found, "[B, Q, V]", *self.logits_shape)
        if self.sampled:
            target_probs(logits, temperature, top_k, top_p, out=self._choice)
            accept_sampled(
                self.tree, self._choice, seeds=seeds, positions=self.live_lengths, stop_tokens=self.stop_tokens,
                out=self.accepted,
            )  # fmt: skip
        else:
            argmax_tokens(logits, out=self._choice)
            accept_greedy(self.tree, self._choice, stop_tokens=self.stop_tokens, out=self.accepted)
        if moves is not None:
            compact_kv.run(moves)
        if batch:
            ended = (*(path[name] for name in ("num_accepted", "bonus_tokens", "flags")), lengths, roots)
            launch(finish_kernel, (-(-batch // THREADS), 1, 1), THREADS, ended, results=2, shared_bytes=0)
        return self.accepted

    def _own_kind(self, name: str, x: Any) -> View:
        """An argument's view; all kernels of a step run on one stream, which the kind of arrays decides."""
        found = arrays.view(name, x)
        if found.kind != self._like.kind:
            raise TypeError(f"{name} is a {found.kind} array; this step works on {self._like.kind} arrays")
        return found
