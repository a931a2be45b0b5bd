"""Accepted: what a walk through the draft tree took, as arrays where the caller's lie; and what the walks share.

A walk begins at the root with the target's token there. While a child of the current node carries that token, the child
is accepted, and the target's token at the child comes next. The first token that no child carries is the bonus token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba.device import arrays
from ddtree_numba.device.arrays import View
from ddtree_numba.tree.build_tree import LARGEST_TOKEN
from ddtree_numba.tree.draft_tree import DraftTree
from ddtree_numba.tree.draft_tree import views as tree_views

INT32: np.dtype[Any] = np.dtype(np.int32)
INT64: np.dtype[Any] = np.dtype(np.int64)
NO_TOKEN = -1

BAD_TARGET = 1
BAD_LINK = 2
STOPPED = 4


@dataclass(frozen=True, eq=False, repr=False)
class Accepted:
    """The accepted path of each of B requests; max_depth is the tree's.

    Attributes
    ----------
    nodes : int32 [B, max_depth + 1]
        Indices of the accepted nodes, rising, the root (0) first; -1 behind the last.
    num_accepted : int32 [B]
        How many there are, the root counted: the acceptance length that papers report. 0 for an idle slot, a request
        whose tree has no nodes.
    bonus_tokens : int32 [B]
        The target's token behind the last accepted node, the root of the next tree; -1 where there is none.
    flags : int32 [B]
        A sum of these, 0 where nothing is to be said:

        - BAD_TARGET (1): the target has no token at the last accepted node, so there is no bonus token. Its row held a
          NaN, or was no probability distribution. What was accepted before stands.
        - BAD_LINK (2): a link led to no later node of the tree, and the children behind it were not seen.
        - STOPPED (4): a stop token was emitted, as an accepted node or as the bonus token.
    tokens : int32 [B, max_depth + 1]
        What the request emits: the tokens of the accepted nodes but for the root's, which was emitted before, then the
        bonus token; -1 behind. None in an `Accepted` that was made by hand.
    """

    nodes: Any
    num_accepted: Any
    bonus_tokens: Any
    flags: Any
    tokens: Any = None

    @classmethod
    def empty(cls, like: Any, batch: int, max_depth: int) -> Accepted:
        """Uninitialised arrays to pass as ``out``, of the kind of array and in the place of ``like``.

        Parameters
        ----------
        like : array
            A CuPy, Numba or PyTorch array on a GPU, or a NumPy array.
        batch : int
            B.
        max_depth : int
            The tree's bound on depths.

        Raises
        ------
        TypeError
            ``like`` is no such array, or a size no integer.
        ValueError
            A size is negative.
        """
        for name, size in (("batch", batch), ("max_depth", max_depth)):
            if arrays.require_integer(name, size) < 0:
                raise ValueError(f"{name} is {size}; it must be at least 0")
        return _empty(arrays.view("like", like), batch, max_depth)

    def __repr__(self) -> str:
        batch, columns = self.nodes.shape
        kind = type(self.nodes).__module__.split(".")[0]
        return f"Accepted(B={batch}, max_depth={columns - 1}, {kind} arrays)"

    def to_host(self) -> Accepted:
        """The same in NumPy arrays; synchronizes."""
        given = {name: getattr(self, name) for name in shapes(0, 0)}
        return Accepted(**{name: x if x is None else arrays.view(name, x).to_host() for name, x in given.items()})


def shapes(batch: int, max_depth: int) -> dict[str, tuple[int, ...]]:
    """Shape of each array."""
    path = (batch, max_depth + 1)
    return {"nodes": path, "num_accepted": (batch,), "bonus_tokens": (batch,), "flags": (batch,), "tokens": path}


def _empty(like: View, batch: int, max_depth: int) -> Accepted:
    return Accepted(**{name: arrays.empty(like, shape, INT32) for name, shape in shapes(batch, max_depth).items()})


# Arguments


def tree_arguments(tree: Any) -> dict[str, View]:
    """The tree's arrays, checked.

    Raises
    ------
    TypeError, ValueError
        ``tree`` is no DraftTree, or one of its arrays is wrong.
    """
    if not isinstance(tree, DraftTree):
        raise TypeError(f"tree is a {type(tree).__qualname__}; it must be a DraftTree")
    tokens = arrays.view("tree.tokens", tree.tokens)
    arrays.require_shape(tokens, "[B, Q]", None, None)
    batch, num_nodes = tokens.shape
    if num_nodes < 1:
        raise ValueError(f"{tokens} has Q = 0; it must be at least 1")
    depth = arrays.require_integer("tree.max_depth", tree.max_depth)
    if depth < 0:
        raise ValueError(f"tree.max_depth is {depth}; it must be at least 0")
    if depth >= 2**31 - 1:
        raise ValueError(f"tree.max_depth is {depth}; it must be less than 2**31 - 1")
    return tree_views(tree, batch, num_nodes, "tree.")


def stop_argument(stop_tokens: Any, like: View, batch: int) -> View:
    """Stop tokens as [B, n]; numbers are copied to the device once and kept there.

    Raises
    ------
    TypeError
        They are neither integers nor an int32 or int64 array on a GPU or in NumPy.
    ValueError
        A token is negative or no int32; an array is neither [n] nor [B, n].
    """
    if stop_tokens is None:
        stop_tokens = ()
    if isinstance(stop_tokens, (int, np.integer)):
        stop_tokens = (stop_tokens,)
    if isinstance(stop_tokens, (list, tuple, range, set, frozenset)):
        numbers = sorted(arrays.require_integer("a stop token", token) for token in stop_tokens)
        for number in numbers:
            if not 0 <= number <= LARGEST_TOKEN:
                raise ValueError(f"a stop token is {number}; a token is 0 to {LARGEST_TOKEN}")
        # -1 is no token; an array of no elements would have no address.
        return arrays.constant(like.device, _tokens, *(numbers or [NO_TOKEN])).repeated(batch)
    try:
        found = arrays.view("stop_tokens", stop_tokens)
    except TypeError as error:
        raise TypeError(f"{error}, or an integer, or a list, tuple or set of integers") from None
    arrays.require_dtype(found, INT32, INT64)
    if len(found.shape) == 1:
        found = found.repeated(batch)
    elif len(found.shape) != 2 or found.shape[0] != batch:
        raise ValueError(f"stop_tokens has shape {list(found.shape)}; it must be [n] or [B, n] with B = {batch}")
    arrays.require_one_place([like, found])
    return found


def _tokens(*numbers: int) -> np.ndarray:
    return np.array(numbers, INT64)


def results(out: Any, tree: dict[str, View], max_depth: int, read: list[View]) -> tuple[Accepted, list[View]]:
    """The caller's arrays for the results, checked, or new ones; and their views.

    Raises
    ------
    TypeError, ValueError
        ``out`` is no Accepted, or one of its arrays is wrong or overlaps what is read.
    """
    like = tree["tokens"]
    wanted = shapes(like.shape[0], max_depth)
    if out is None:  # new arrays lie apart
        out = _empty(like, like.shape[0], max_depth)
        return out, [arrays.view(name, getattr(out, name)) for name in wanted]
    if not isinstance(out, Accepted):
        raise TypeError(f"out is a {type(out).__qualname__}; it must be an Accepted")
    found: list[View] = []
    for name, shape in wanted.items():
        x = arrays.view(f"out.{name}", getattr(out, name))
        arrays.require_dtype(x, INT32)
        arrays.require_shape(x, "[B, max_depth + 1]" if len(shape) == 2 else "[B]", *shape)
        found.append(x)
    arrays.require_one_place([like, *found])
    others = [*tree.values(), *read]
    for x in found:
        arrays.require_apart(x, others)
        others.append(x)
    return out, found


def check_tree(tree: dict[str, View]) -> None:
    """Check what a walk reads of the trees (copies it to the host).

    Raises
    ------
    ValueError
        A number of nodes is not between 0 and Q, or a link leads to no later node of its tree.
    """
    counts = tree["num_nodes"].to_host()
    num_nodes = tree["tokens"].shape[1]
    for b, n in enumerate(counts):
        if not 0 <= n <= num_nodes:
            raise ValueError(f"tree.num_nodes[{b}] is {n}; it must be between 0 and Q = {num_nodes}")
    node = np.arange(num_nodes)
    inside = node < counts[:, None]
    for name in ("first_child", "next_sibling"):
        links = tree[name].to_host()
        bad = inside & (links != -1) & ((links <= node) | (links >= counts[:, None]))
        if bad.any():
            b, i = (int(n) for n in np.argwhere(bad)[0])
            raise ValueError(
                f"tree.{name}[{b}, {i}] is {links[b, i]}; it must be -1 or a later node of the tree, "
                f"which has {counts[b]}"
            )


# The walk's parts, for kernels and for mirrors


def mirror_child_with(tokens, first_child, next_sibling, node, t, n):
    """The first child of a node that carries token t, or -1; -2 where a link led outside the tree before that.

    All arrays are rows of one request, which has n nodes.
    """
    before = node
    child = first_child[node]
    while child > before and child < n:  # each link leads to a later node, so that no contents keep it running
        token, sibling = tokens[child], next_sibling[child]  # both at once: on the GPU one wait a sibling, not two
        if token == t:
            return child
        before = child
        child = sibling
    return -1 if child == -1 else -2


def mirror_stops(stop_tokens, t):
    """Whether t is one of the stop tokens."""
    found = False
    for s in range(stop_tokens.shape[0]):
        found = found or stop_tokens[s] == t
    return found


def mirror_take(t, child, stopping, nodes, emitted, count, seen):
    """One step of the walk: accept the child that carries t, as `child_with` found it, or take t as the bonus token.

    ``nodes`` and ``emitted`` are rows of one request, of which ``count`` nodes are accepted so far; ``seen`` are its
    flags. Returns the child, or -1 where the walk ends, the bonus token or -1, and the new count and flags.
    """
    bonus = NO_TOKEN
    if t < 0 or t > LARGEST_TOKEN:
        return -1, bonus, count, seen | BAD_TARGET
    if count == nodes.shape[0]:
        child = -1
    if child == -2:
        seen |= BAD_LINK
    emitted[count - 1] = t
    if child >= 0:
        nodes[count] = child
        count += 1
    else:
        bonus = t
    if stopping:
        seen |= STOPPED
        child = -1
    return child, bonus, count, seen


child_with, stops, take = map(cuda.jit(device=True, inline="always"), (mirror_child_with, mirror_stops, mirror_take))
