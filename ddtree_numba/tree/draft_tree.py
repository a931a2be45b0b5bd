"""DraftTree: what the builder makes and everything downstream reads, as arrays where the caller's arrays lie.

Node 0 is the root: the last accepted token, whose KV row is not in the cache yet. The other nodes stand in the order in
which the best-first search took them, so a parent stands before its children, and children of one node in the order of
falling probability. It is not breadth-first order; `relabel` makes that, or depth-first order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree_numba.device import arrays
from ddtree_numba.device.arrays import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INT32: np.dtype[Any] = np.dtype(np.int32)
DTYPES: dict[str, np.dtype[Any]] = {
    "tokens": INT32,
    "parents": INT32,
    "depths": INT32,
    "scores": np.dtype(np.float64),
    "num_nodes": INT32,
    "tree_mask": np.dtype(np.uint32),
    "first_child": INT32,
    "next_sibling": INT32,
    "input_ids": INT32,
}


@dataclass(frozen=True, eq=False, repr=False)
class DraftTree:
    """Draft trees of B requests with room for Q = tree_budget + 1 nodes each, the root included.

    Attributes
    ----------
    tokens : int32 [B, Q]
        Token of each node; -1 behind the last node. Token 0 is an ordinary token.
    parents : int32 [B, Q]
        Parent of each node, smaller than the node's own index; -1 for the root and behind the last node.
    depths : int32 [B, Q]
        The root's is 0; 0 also behind the last node. ``cache_seqlens + depths`` are the positions for RoPE.
    scores : float64 [B, Q]
        Log-probability of the path from the root, in nats, the root's 0; -inf behind the last node.
    num_nodes : int32 [B]
        Nodes of each tree, the root counted.
    tree_mask : uint32 [B, Q, ceil(Q/32)]
        Node i sees node j when bit j % 32 of word j // 32 is set: itself and its ancestors; 0 behind the last node.
    first_child, next_sibling : int32 [B, Q]
        Links, children in ascending node order; -1 where there is none.
    input_ids : int32 [B, Q]
        ``tokens`` with the root's token in place of the -1 behind the last node: safe to embed.
    max_depth : int
        Bound on every depth, known on the host: the number of draft positions, or the budget if that is smaller.
    """

    tokens: Any
    parents: Any
    depths: Any
    scores: Any
    num_nodes: Any
    tree_mask: Any
    first_child: Any
    next_sibling: Any
    input_ids: Any
    max_depth: int

    @classmethod
    def empty(cls, like: Any, batch: int, tree_budget: int, max_depth: int) -> DraftTree:
        """An uninitialised tree to pass as ``out``, of the kind of array and in the place of ``like``.

        Parameters
        ----------
        like : array
            A CuPy, Numba or PyTorch array on a GPU, or a NumPy array.
        batch : int
            B.
        tree_budget : int
            Most nodes beside the root.
        max_depth : int
            Bound on every depth.

        Raises
        ------
        TypeError
            ``like`` is no such array, or a size no integer.
        ValueError
            A size is negative.
        """
        for name, size in (("batch", batch), ("tree_budget", tree_budget), ("max_depth", max_depth)):
            if arrays.require_integer(name, size) < 0:
                raise ValueError(f"{name} is {size}; it must be at least 0")
        return empty_tree(arrays.view("like", like), batch, tree_budget, max_depth)

    def __repr__(self) -> str:
        batch, num_nodes = self.tokens.shape
        kind = type(self.tokens).__module__.split(".")[0]
        return f"DraftTree(B={batch}, Q={num_nodes}, max_depth={self.max_depth}, {kind} arrays)"

    def mask_bool(self) -> Any:
        """`tree_mask` as bool [B, Q, Q]; 1 GB at B = 1024, Q = 1025."""
        from ddtree_numba.tree.encodings import unpack_mask

        return unpack_mask(self.tree_mask, self.tokens.shape[1])

    def text(
        self,
        request: int = 0,
        *,
        decode: Callable[[int], str] | None = None,
        accepted: Any = None,
        max_nodes: int | None = None,
    ) -> str:
        """One request's tree, a line a node; see `ddtree_numba.tree.draw.text`."""
        from ddtree_numba.tree import draw

        return draw.text(self, request, decode=decode, accepted=accepted, max_nodes=max_nodes)

    def plot(
        self,
        request: int = 0,
        *,
        decode: Callable[[int], str] | None = None,
        accepted: Any = None,
        ax: Axes | None = None,
        theme: str = "light",
        max_labels: int = 80,
    ) -> Axes:
        """Draw one request's tree with matplotlib; see `ddtree_numba.tree.draw.plot`."""
        from ddtree_numba.tree import draw

        return draw.plot(self, request, decode=decode, accepted=accepted, ax=ax, theme=theme, max_labels=max_labels)

    def to_host(self) -> DraftTree:
        """The same tree in NumPy arrays; synchronizes."""
        copies = {name: arrays.view(name, getattr(self, name)).to_host() for name in DTYPES}
        return DraftTree(**copies, max_depth=self.max_depth)


def shapes(batch: int, num_nodes: int) -> dict[str, tuple[int, ...]]:
    """Shape of each array of a tree with room for ``num_nodes`` nodes, the root included."""
    per_node = {field.name: (batch, num_nodes) for field in fields(DraftTree) if field.name in DTYPES}
    return {**per_node, "num_nodes": (batch,), "tree_mask": (batch, num_nodes, -(-num_nodes // 32))}


def empty_tree(like: View, batch: int, tree_budget: int, max_depth: int) -> DraftTree:
    """An uninitialised tree of the kind of array, and in the place, of ``like``."""
    wanted = shapes(batch, tree_budget + 1)
    made = {name: arrays.empty(like, wanted[name], dtype) for name, dtype in DTYPES.items()}
    return DraftTree(**made, max_depth=max_depth)


def views(tree: DraftTree, batch: int, num_nodes: int, prefix: str = "") -> dict[str, View]:
    """The tree's arrays, checked: dtype, shape, one place.

    Raises
    ------
    TypeError, ValueError
        An array is none, or has a wrong dtype or shape, or lies elsewhere; the message names it.
    """
    wanted = shapes(batch, num_nodes)
    found = {}
    for name, dtype in DTYPES.items():
        found[name] = arrays.view(prefix + name, getattr(tree, name))
        arrays.require_dtype(found[name], dtype)
        axes = {"num_nodes": "[B]", "tree_mask": "[B, Q, ceil(Q/32)]"}.get(name, "[B, Q]")
        arrays.require_shape(found[name], axes, *wanted[name])
    arrays.require_one_place(list(found.values()))
    return found
