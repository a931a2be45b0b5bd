"""Every encoding of a draft tree that engines use, each converted on the device, for a whole batch, and back.

A tree of Q nodes is one thing in many clothes: parents, links (first child, next sibling), ancestor masks as bools, as
words or as a bias, root-to-leaf paths. docs/tree_encodings.md shows one tree in all of them. B requests stand beside
each other; a request with fewer than Q nodes is padded.

One rule covers padding and bad contents alike. Node 0 is the root. Any other node's parent is an earlier node, and a
node from which the parents do not lead to the root is padding: its mask row is empty, its links are -1, its depth is 0.
Walks follow a parent only to a smaller index and a link only to a larger one, so that no contents keep a kernel
running, and an index that leads elsewhere ends the walk. ``validate=True`` refuses such contents instead.

Most kernels run a thread for each node, or for each word of each node's row, and write each element of the result once:
no atomics, no order, nothing allocated. Results that several threads of a request build together (parents from links,
paths) take a block a request, with a barrier between the phases.

Cost: a walk takes as many steps as the node is deep; links and relabelling also scan the Q parents for each node. Trees
are small, and the arrays stay in the caches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba import masks as on_host
from ddtree_numba.device import arrays, runtime
from ddtree_numba.device.arrays import BFLOAT16, FLOATS, View, contiguous_strides
from ddtree_numba.device.bf16 import array_to_f32, from_f32, to_f32
from ddtree_numba.device.launch import device_name, launch, shared_bytes_limit
from ddtree_numba.tree import draft_tree
from ddtree_numba.tree.draft_tree import DraftTree

# Python threads are dear in the simulator: few of them, each with many items, in two blocks so that strides are tested.
THREADS = 8 if runtime.SIMULATOR else 128
MAX_BLOCKS = 2 if runtime.SIMULATOR else 65536

BOOL: np.dtype[Any] = np.dtype(np.bool_)
INT32: np.dtype[Any] = np.dtype(np.int32)
INT64: np.dtype[Any] = np.dtype(np.int64)
UINT32: np.dtype[Any] = np.dtype(np.uint32)

LARGEST_INT32 = 2**31 - 1
ZERO = np.float32(0.0)  # a literal 0.0 would be float64 on the GPU
NEG_INF = np.float32(-np.inf)


# Arguments


def _integer(name: str, value: Any, least: int) -> int:
    number = arrays.require_integer(name, value)
    if not least <= number <= LARGEST_INT32:
        raise ValueError(f"{name} is {number}; it must be between {least} and {LARGEST_INT32}")
    return number


def _require_sizes(x: View, batch: int, num_nodes: int) -> None:
    if num_nodes < 1:
        raise ValueError(f"{x} has Q = {num_nodes}; it must be at least 1")
    if batch > 65535:
        raise ValueError(f"{x} has B = {batch}; it must be at most 65535, which is what a grid takes")


def _per_node(name: str, x: Any, *dtypes: Any, like: View | None = None) -> View:
    """An argument of shape [B, Q]; that of ``like``, where it is given."""
    found = arrays.view(name, x)
    arrays.require_dtype(found, *dtypes)
    arrays.require_shape(found, "[B, Q]", *((None, None) if like is None else like.shape))
    _require_sizes(found, *found.shape)
    return found


def _lengths(x: Any, batch: int) -> View:
    found = arrays.view("cache_seqlens", x)
    arrays.require_dtype(found, INT32)
    arrays.require_shape(found, "[B]", batch)
    return found


def _mask(name: str, x: Any, *dtypes: Any) -> tuple[View, int]:
    """A mask of shape [B, Q, Q] (bool) or [B, Q, ceil(Q/32)], and how many bits a word of it holds."""
    found = arrays.view(name, x)
    arrays.require_dtype(found, *(dtypes or (BOOL, UINT32)))
    if len(found.shape) != 3:
        raise ValueError(f"{name} has shape {list(found.shape)}; it must be [B, Q, Q] or [B, Q, ceil(Q/32)]")
    batch, num_nodes, _ = found.shape
    _require_sizes(found, batch, num_nodes)
    if found.dtype == BOOL:
        arrays.require_shape(found, "[B, Q, Q]", batch, num_nodes, num_nodes)
        return found, 1
    arrays.require_shape(found, "[B, Q, ceil(Q/32)]", batch, num_nodes, -(-num_nodes // 32))
    return found, 32


def _flat(name: str, x: Any, *dtypes: Any) -> View:
    found = arrays.view(name, x)
    arrays.require_dtype(found, *dtypes)
    arrays.require_shape(found, "[n]", None)
    return found


def _unflatten(flat: View, *shape: int) -> View:
    """The same elements in C order along several axes."""
    return replace(flat, shape=shape, strides=contiguous_strides(shape, flat.strides[0]))


def _result(name: str, given: Any, like: View, dtype: np.dtype[Any], axes: str, *shape: int) -> tuple[Any, View]:
    """The caller's array for a result, checked, or a new one of the kind of ``like``; and its view.

    The view is said to be of the kind of ``like`` too, because the kind decides the stream.
    """
    if given is None:
        given = arrays.empty(like, shape, dtype)
    found = arrays.view(name, given)
    arrays.require_dtype(found, *((dtype, np.uint16) if dtype == BFLOAT16 else (dtype,)))
    arrays.require_shape(found, axes, *shape)
    return given, replace(found, kind=like.kind)


def _mask_result(out: Any, like: View, batch: int, num_nodes: int, packed: bool) -> tuple[Any, View, int]:
    if arrays.require_flag("packed", packed):
        num_words = -(-num_nodes // 32)
        return *_result("out", out, like, UINT32, "[B, Q, ceil(Q/32)]", batch, num_nodes, num_words), 32
    return *_result("out", out, like, BOOL, "[B, Q, Q]", batch, num_nodes, num_nodes), 1


def _node_results(out: Any, like: View, dtype: np.dtype[Any], *names: str) -> tuple[tuple[Any, ...], list[View]]:
    """Several results of the shape of ``like``, [B, Q], and their views."""
    if out is None:
        out = (None,) * len(names)
    elif not isinstance(out, (tuple, list)) or len(out) != len(names):
        what = f"a sequence of {len(out)}" if isinstance(out, (tuple, list)) else f"a {type(out).__name__}"
        raise TypeError(f"out is {what}; it must be the tuple ({', '.join(names)})")
    found = [
        _result(f"out's {name}", x, like, dtype, "[B, Q]", *like.shape) for name, x in zip(names, out, strict=True)
    ]
    return tuple(x for x, _ in found), [x for _, x in found]


def _require_apart(written: list[View], read: list[View]) -> None:
    """Raise ValueError unless all lie in one place, and each result has memory of its own."""
    arrays.require_one_place([*read, *written])
    for n, result in enumerate(written):
        arrays.require_apart(result, [*read, *written[:n]])


def _on_device(name: str, x: Any) -> bool:
    """Whether an argument that may also be a list or any other thing that NumPy reads is a device array."""
    if isinstance(x, np.ndarray):
        return False
    try:
        return arrays.view(name, x).kind != "numpy"
    except TypeError:
        return False


def _copy_out(out: Any, made: np.ndarray, axes: str) -> Any:
    """A result that was made on the host, in the caller's array if there is one."""
    if out is None:
        return made
    found = arrays.view("out", out)
    arrays.require_dtype(found, made.dtype)
    arrays.require_shape(found, axes, *made.shape)
    _require_apart([found], [arrays.view("the argument", made)])
    np.copyto(found.as_numpy(), made)
    return out


# Contents, checked on the host


def _refuse(name: str, values: np.ndarray, bad: np.ndarray, rule: str) -> None:
    """Raise ValueError for the first bad element, if there is one."""
    where = np.argwhere(bad)
    if where.size:
        at = tuple(int(n) for n in where[0])
        raise ValueError(f"{name}[{', '.join(map(str, at))}] is {values[at]}; {rule}")


def _check_parents(parents: np.ndarray, name: str = "parents") -> None:
    num_nodes = parents.shape[-1]
    node = np.arange(num_nodes)
    _refuse(name, parents, (node == 0) & (parents != -1), "the root's parent must be -1")
    _refuse(name, parents, (parents < -1) | (parents >= node), "it must be -1 or the index of an earlier node")
    of_parent = np.take_along_axis(parents, np.maximum(parents, 0), axis=-1)
    _refuse(name, parents, (parents > 0) & (of_parent == -1), "that node is padding, and has no children")


def _check_lengths(lengths: np.ndarray, longest: int = LARGEST_INT32) -> None:
    _refuse("cache_seqlens", lengths, (lengths < 0) | (lengths > longest), f"it must be between 0 and {longest}")


def _check_words(name: str, words: np.ndarray, bits_per_word: int, num_nodes: int) -> None:
    """A bool is 0 or 1, and words [.., W] have no bit at or past Q."""
    if bits_per_word == 1:
        _refuse(name, words, words > 1, "a bool must be 0 or 1")
        return
    spare = bits_per_word * words.shape[-1] - num_nodes
    if spare:
        last = words[..., -1]
        bad = last >> last.dtype.type(bits_per_word - spare) != 0
        _refuse(name, last, bad, f"the last word of a row must have no bit at or past node {num_nodes}")


def _check_links(names: tuple[str, str], first_child: np.ndarray, next_sibling: np.ndarray) -> None:
    num_nodes = first_child.shape[1]
    for name, links in zip(names, (first_child, next_sibling), strict=True):
        bad = (links != -1) & ((links <= np.arange(num_nodes)) | (links >= num_nodes))
        _refuse(name, links, bad, f"it must be -1 or the index of a later node, below {num_nodes}")
    parents = np.full_like(first_child, -1)
    for b, i in np.ndindex(*first_child.shape):
        child = first_child[b, i]
        while child != -1:  # ends: links lead to later nodes alone
            if parents[b, child] != -1:
                raise ValueError(f"{names[0]} and {names[1]} make node {child} of request {b} a child twice")
            parents[b, child] = i
            child = next_sibling[b, child]
    for name, links in zip(names, (first_child, next_sibling), strict=True):
        childless = parents == -1
        if name == names[0]:
            childless[:, 0] = False
        _refuse(name, links, childless & (links != -1), "the node is the child of none, so it must be -1")


def _check_tree_mask(seen: np.ndarray) -> None:
    """Each row of bool [B, Q, Q] is empty, or its parent's row and the node itself; an idle request sees nothing."""
    num_nodes = seen.shape[1]
    below = seen & np.tri(num_nodes, k=-1, dtype=np.bool_)
    last = num_nodes - 1 - np.argmax(below[..., ::-1], axis=-1)
    tree = on_host.mask_from_parents(np.where(below.any(axis=-1), last, -1))
    busy: np.ndarray = np.any(seen, axis=(1, 2), keepdims=True)
    tree &= busy
    where = np.argwhere((tree != seen).any(axis=-1))
    if where.size:
        b, i = (int(n) for n in where[0])
        columns = np.flatnonzero(seen[b, i]).tolist()
        raise ValueError(f"tree_mask[{b}, {i}] sees {columns}; it must see nothing, or what its parent sees and itself")


def _check_paths(paths: np.ndarray, num_nodes: int) -> None:
    bad = (paths < -1) | (paths >= num_nodes)
    _refuse("paths", paths, bad, f"it must be -1 or the index of a node, below {num_nodes}")
    _refuse("paths", paths, (paths > 0) & (np.arange(paths.shape[2]) == 0), "a path must begin at the root, node 0")
    after = np.zeros_like(paths, np.bool_)
    after[..., 1:] = (paths[..., 1:] != -1) & (paths[..., 1:] <= paths[..., :-1])
    after[..., 1:] |= (paths[..., 1:] != -1) & (paths[..., :-1] == -1)
    _refuse("paths", paths, after, "it must be -1, or follow a node of smaller index")
    parents: dict[tuple[int, int], int] = {}
    for b, row, column in np.argwhere(paths[..., 1:] != -1).tolist():
        parent, child = paths[b, row, column : column + 2].tolist()
        known = parents.setdefault((b, child), parent)
        if known != parent:
            raise ValueError(f"paths[{b}, {row}, {column + 1}] is {child}, here a child of {parent}, before of {known}")


# Launching


def _launch_items(kernel: Any, batch: int, items: int, args: tuple[Any, ...], results: int) -> None:
    """Threads share the items of each request, and each takes every (threads of a request)-th of them."""
    if batch and items:
        blocks = (min(-(-items // THREADS), MAX_BLOCKS), batch, 1)
        launch(kernel, blocks, THREADS, args, results=results, shared_bytes=0)


def _launch_requests(kernel: Any, batch: int, args: tuple[Any, ...], results: int, shared_bytes: int = 0) -> None:
    """One block for each request."""
    if batch:
        launch(kernel, (1, batch, 1), THREADS, args, results=results, shared_bytes=shared_bytes)


# What kernels share


@cuda.jit(device=True, inline="always")
def parent_of(parents, b, i):
    """The parent of node i, or -1; a parent that is no earlier node counts as none."""
    parent = parents[b, i]
    return parent if 0 <= parent < i else -1


@cuda.jit(device=True, inline="always")
def depth_of(parents, b, i):
    """Steps from node i up to the root, or -1 for padding."""
    depth = 0
    node = i
    while node > 0:
        node = parent_of(parents, b, node)
        depth += 1
    return depth if node == 0 else -1


@cuda.jit(device=True, inline="always")
def link_of(links, b, i):
    """The node that a link of node i leads to, or -1; a link that leads to no later node counts as none."""
    link = links[b, i]
    return link if i < link < links.shape[1] else -1


@cuda.jit(device=True, inline="always")
def sees(mask, bits_per_word, b, i, j):
    """Whether node i sees node j."""
    word = mask[b, i, np.uint32(j) // np.uint32(bits_per_word)]
    return (word >> (np.uint32(j) % np.uint32(bits_per_word))) & 1 == 1


@cuda.jit(device=True, inline="always")
def prefix_of(cache_seqlens, b, longest):
    """The prefix of a request; a length out of bounds is clamped."""
    return np.int64(min(max(cache_seqlens[b], 0), longest))


@cuda.jit(device=True, inline="always")
def full_row(cache_seqlens, b, i, num_nodes, longest):
    """Where node i's row of a full mask begins: behind all requests before b, and i rows of this one."""
    start = np.int64(0)
    other = 0
    while other < b:
        start += num_nodes * (prefix_of(cache_seqlens, other, longest) + num_nodes)
        other += 1
    return start + i * (prefix_of(cache_seqlens, b, longest) + num_nodes)


# Links


@cuda.jit
def links_kernel(parents, first_child, next_sibling):
    """A thread a node: of the later nodes, the first that is its child and the first that has its parent."""
    num_nodes = parents.shape[1]
    b = cuda.blockIdx.y
    i = cuda.grid(1)
    while i < num_nodes:
        child = -1
        sibling = -1
        if depth_of(parents, b, i) >= 0:
            parent = parent_of(parents, b, i)
            j = num_nodes - 1
            while j > i:
                other = parents[b, j]
                if other == i:
                    child = j
                if i > 0 and other == parent:
                    sibling = j
                j -= 1
        first_child[b, i] = child
        next_sibling[b, i] = sibling
        i += cuda.gridsize(1)


@cuda.jit
def parents_from_links_kernel(first_child, next_sibling, parents):
    """A block a request."""
    num_nodes = parents.shape[1]
    b = cuda.blockIdx.y
    t = cuda.threadIdx.x

    # Phase 1: nobody has a parent
    i = t
    while i < num_nodes:
        parents[b, i] = -1
        i += THREADS
    cuda.syncthreads()

    # Phase 2: each node tells its children
    i = t
    while i < num_nodes:
        child = link_of(first_child, b, i)
        while child > 0:
            parents[b, child] = i
            child = link_of(next_sibling, b, child)
        i += THREADS


@cuda.jit
def global_index_kernel(retrieve_index):
    """A thread a node."""
    num_nodes = retrieve_index.shape[1]
    b = cuda.blockIdx.y
    i = cuda.grid(1)
    while i < num_nodes:
        retrieve_index[b, i] = b * num_nodes + i
        i += cuda.gridsize(1)


def links_from_parents(parents: Any, *, out: Any = None, validate: bool = False) -> tuple[Any, Any]:
    """First child and next sibling of each node, children in ascending node order.

    Parameters
    ----------
    parents : int32 [B, Q]
        Parent of each node, an earlier one; -1 for the root, which is node 0, and for padding.
    out : tuple of two int32 [B, Q], optional
        Arrays for the results.
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    first_child, next_sibling : int32 [B, Q]
        -1 where there is none.

    Raises
    ------
    TypeError, ValueError
        A wrong kind of array, dtype, shape or place, B above 65535, Q below 1, or results that overlap anything.
    ValueError
        With ``validate``: the root's parent is not -1, another parent is neither -1 nor an earlier node that is not
        padding itself.
    """
    tree = _per_node("parents", parents, INT32)
    results, links = _node_results(out, tree, INT32, "first_child", "next_sibling")
    _require_apart(links, [tree])
    if arrays.require_flag("validate", validate):
        _check_parents(tree.to_host())
    batch, num_nodes = tree.shape
    _launch_items(links_kernel, batch, num_nodes, (tree, *links), 2)
    return results[0], results[1]


def parents_from_links(first_child: Any, next_sibling: Any, *, out: Any = None, validate: bool = False) -> Any:
    """The inverse of `links_from_parents`.

    Parameters
    ----------
    first_child, next_sibling : int32 [B, Q]
        -1 where there is none. A link that leads to no later node ends the list of children.
    out : int32 [B, Q], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    int32 [B, Q]
        -1 for the root and for nodes that are the child of none. Of two nodes that claim one child, either may get it.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    ValueError
        With ``validate``: a link is neither -1 nor a later node, a node is a child twice, or the child of none but has
        links.
    """
    return _parents_from_links(("first_child", "next_sibling"), first_child, next_sibling, INT32, out, validate)


def _parents_from_links(
    names: tuple[str, str], first_child: Any, next_sibling: Any, dtype: np.dtype[Any], out: Any, validate: bool
) -> Any:
    children = _per_node(names[0], first_child, dtype)
    siblings = _per_node(names[1], next_sibling, dtype, like=children)
    out, parents = _result("out", out, children, INT32, "[B, Q]", *children.shape)
    _require_apart([parents], [children, siblings])
    if arrays.require_flag("validate", validate):
        _check_links(names, children.to_host(), siblings.to_host())
    _launch_requests(parents_from_links_kernel, children.shape[0], (children, siblings, parents), 1)
    return out


def sglang_links(parents: Any, *, out: Any = None, validate: bool = False) -> tuple[Any, Any, Any]:
    """SGLang's three arrays for its walk over the accepted path.

    Parameters
    ----------
    parents : int32 [B, Q]
    out : tuple of three int64 [B, Q], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    retrieve_index : int64 [B, Q]
        Index of each node in the flat batch, b * Q + i. Padding has one too: SGLang gives one to every node, also to
        one whose parent it does not find; no link leads there.
    retrieve_next_token, retrieve_next_sibling : int64 [B, Q]
        First child and next sibling as indices within the request, -1 where there is none.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.

    Source: sgl-project/sglang, sgl-kernel/csrc/speculative/eagle_utils.cu (build_tree_efficient) and
    python/sglang/srt/speculative/eagle_utils.py, where they are named; older versions spell them retrive_*.
    """
    tree = _per_node("parents", parents, INT32)
    names = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    results, (index, *links) = _node_results(out, tree, INT64, *names)
    _require_apart([index, *links], [tree])
    if arrays.require_flag("validate", validate):
        _check_parents(tree.to_host())
    batch, num_nodes = tree.shape
    _launch_items(global_index_kernel, batch, num_nodes, (index,), 1)
    _launch_items(links_kernel, batch, num_nodes, (tree, *links), 2)
    return results[0], results[1], results[2]


def parents_from_sglang(
    retrieve_next_token: Any, retrieve_next_sibling: Any, *, out: Any = None, validate: bool = False
) -> Any:
    """The inverse of `sglang_links`.

    Parameters
    ----------
    retrieve_next_token, retrieve_next_sibling : int64 [B, Q]
    out : int32 [B, Q], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    int32 [B, Q]

    Raises
    ------
    TypeError, ValueError
        As in `parents_from_links`.
    """
    names = ("retrieve_next_token", "retrieve_next_sibling")
    return _parents_from_links(names, retrieve_next_token, retrieve_next_sibling, INT64, out, validate)


# Depths and positions


@cuda.jit
def depths_kernel(parents, depths):
    """A thread a node."""
    b = cuda.blockIdx.y
    i = cuda.grid(1)
    while i < parents.shape[1]:
        depths[b, i] = max(depth_of(parents, b, i), 0)
        i += cuda.gridsize(1)


@cuda.jit
def positions_kernel(depths, cache_seqlens, positions):
    """A thread a node."""
    num_nodes = depths.shape[1]
    b = cuda.blockIdx.y
    i = cuda.grid(1)
    while i < num_nodes:
        depth = np.int64(min(max(depths[b, i], 0), num_nodes - 1))
        positions[b, i] = min(prefix_of(cache_seqlens, b, LARGEST_INT32) + depth, LARGEST_INT32)
        i += cuda.gridsize(1)


def depths_from_parents(parents: Any, *, out: Any = None, validate: bool = False) -> Any:
    """Depth of each node.

    Parameters
    ----------
    parents : int32 [B, Q]
    out : int32 [B, Q], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    int32 [B, Q]
        0 for the root and for padding.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    """
    tree = _per_node("parents", parents, INT32)
    out, depths = _result("out", out, tree, INT32, "[B, Q]", *tree.shape)
    _require_apart([depths], [tree])
    if arrays.require_flag("validate", validate):
        _check_parents(tree.to_host())
    batch, num_nodes = tree.shape
    _launch_items(depths_kernel, batch, num_nodes, (tree, depths), 1)
    return out


def positions(cache_seqlens: Any, depths: Any, *, out: Any = None, validate: bool = False) -> Any:
    """Position of each node for RoPE: the prefix and the node's depth, never its index.

    Parameters
    ----------
    cache_seqlens : int32 [B]
        Prefix length of each request, in tokens. A negative one counts as 0.
    depths : int32 [B, Q]
        Clamped to 0 .. Q - 1.
    out : int32 [B, Q], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    int32 [B, Q]
        In tokens; padding, whose depth is 0, has the root's.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    ValueError
        With ``validate``: a length is negative or above 2**31 - Q, or a depth is not between 0 and Q - 1.
    """
    deep = _per_node("depths", depths, INT32)
    batch, num_nodes = deep.shape
    lengths = _lengths(cache_seqlens, batch)
    out, where = _result("out", out, deep, INT32, "[B, Q]", batch, num_nodes)
    _require_apart([where], [lengths, deep])
    if arrays.require_flag("validate", validate):
        _check_lengths(lengths.to_host(), LARGEST_INT32 - (num_nodes - 1))
        values = deep.to_host()
        bad = (values < 0) | (values >= num_nodes)
        _refuse("depths", values, bad, f"it must be between 0 and {num_nodes - 1}")
    _launch_items(positions_kernel, batch, num_nodes, (deep, lengths, where), 1)
    return out


# Masks: bools are words of one bit, so that one kernel converts between all that are [B, Q, words of n bits].


@cuda.jit
def mask_kernel(parents, bits_per_word, mask):
    """A thread a word: the bits of those ancestors that fall into it."""
    num_nodes, num_words = mask.shape[1], mask.shape[2]
    b = cuda.blockIdx.y
    n = cuda.grid(1)
    while n < num_nodes * num_words:
        i = n // num_words
        first = n % num_words * bits_per_word
        word = np.uint32(0)
        if depth_of(parents, b, i) >= 0:
            node = i
            while node >= first:  # ancestors are smaller and smaller
                if node < first + bits_per_word:
                    word |= np.uint32(1) << np.uint32(node - first)
                node = parent_of(parents, b, node)
        mask[b, i, n % num_words] = word
        n += cuda.gridsize(1)


@cuda.jit
def repack_kernel(mask, bits_per_word, bits_per_result, result):
    """A thread a word of the result: the same bits, otherwise cut into words."""
    num_nodes, num_words = result.shape[1], result.shape[2]
    b = cuda.blockIdx.y
    n = cuda.grid(1)
    while n < num_nodes * num_words:
        i = n // num_words
        first = n % num_words * bits_per_result
        word = np.uint32(0)
        j = first
        while j < first + bits_per_result and j < num_nodes:
            if sees(mask, bits_per_word, b, i, j):
                word |= np.uint32(1) << np.uint32(j - first)
            j += 1
        result[b, i, n % num_words] = word
        n += cuda.gridsize(1)


@cuda.jit
def parents_from_mask_kernel(mask, bits_per_word, parents):
    """A thread a node: the last of the earlier nodes that it sees."""
    num_nodes = parents.shape[1]
    b = cuda.blockIdx.y
    i = cuda.grid(1)
    while i < num_nodes:
        parent = -1
        j = 0
        while j < i:
            if sees(mask, bits_per_word, b, i, j):
                parent = j
            j += 1
        parents[b, i] = parent
        i += cuda.gridsize(1)


def _repack(mask: View, bits_per_word: int, result: View, bits_per_result: int) -> None:
    """Write the bits of one view [B, Q, words] to another; the two may differ in word size."""
    batch, num_nodes, num_words = result.shape
    args = (mask, np.int32(bits_per_word), np.int32(bits_per_result), result)
    _launch_items(repack_kernel, batch, num_nodes * num_words, args, 1)


def mask_from_parents(parents: Any, *, packed: bool = False, out: Any = None, validate: bool = False) -> Any:
    """Ancestor mask of a tree: node i sees itself and its ancestors.

    Parameters
    ----------
    parents : int32 [B, Q] on the device, or integers [.., Q] on the host
        Parent of each node, an earlier one; -1 for the root, which is node 0, and for padding. Lists, NumPy arrays and
        whatever else NumPy reads are worked on by the host, and always checked.
    packed : bool
        32 nodes a word in place of a byte each.
    out : array of the result's shape and dtype, optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    bool [B, Q, Q], or packed uint32 [B, Q, ceil(Q/32)]
        Row i sees column j; packed: bit j % 32 of word j // 32. Rows of padding are empty.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`; on the host also a parent that is no earlier node.
    """
    packed = arrays.require_flag("packed", packed)
    if not _on_device("parents", parents):
        made = on_host.mask_from_parents(parents)
        if arrays.require_flag("validate", validate):
            _check_parents(np.asarray(parents))
        if packed:
            made = on_host.pack_mask(made)
        return _copy_out(out, made, "[.., Q, ceil(Q/32)]" if packed else "[.., Q, Q]")
    tree = _per_node("parents", parents, INT32)
    batch, num_nodes = tree.shape
    out, mask, bits_per_word = _mask_result(out, tree, batch, num_nodes, packed)
    _require_apart([mask], [tree])
    if arrays.require_flag("validate", validate):
        _check_parents(tree.to_host())
    _launch_items(mask_kernel, batch, num_nodes * mask.shape[2], (tree, np.int32(bits_per_word), mask), 1)
    return out


def parents_from_mask(tree_mask: Any, *, out: Any = None, validate: bool = False) -> Any:
    """The inverse of `mask_from_parents`: a node's parent is the last of the earlier nodes that it sees.

    Parameters
    ----------
    tree_mask : bool [B, Q, Q] or packed uint32 [B, Q, ceil(Q/32)]
    out : int32 [B, Q], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    int32 [B, Q]
        -1 for the root and for padding, whose rows are empty.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    ValueError
        With ``validate``: a bool is a byte other than 0 and 1, a bit stands at or past Q, or a row is neither empty nor
        its parent's row and the node itself. A request whose rows are all empty is idle, and allowed.
    """
    mask, bits_per_word = _mask("tree_mask", tree_mask)
    batch, num_nodes, _ = mask.shape
    out, parents = _result("out", out, mask, INT32, "[B, Q]", batch, num_nodes)
    _require_apart([parents], [mask])
    if arrays.require_flag("validate", validate):
        words = mask.to_host()
        _check_words("tree_mask", words, bits_per_word, num_nodes)
        _check_tree_mask(words != 0 if bits_per_word == 1 else on_host.unpack_mask(words, num_nodes))
    _launch_items(parents_from_mask_kernel, batch, num_nodes, (mask, np.int32(bits_per_word), parents), 1)
    return out


def pack_mask(mask: Any, *, out: Any = None, validate: bool = False) -> Any:
    """Pack a bool mask into words of 32 nodes.

    Parameters
    ----------
    mask : bool [B, Q, Q] on the device, or bool [.., Q] on the host
    out : uint32 [B, Q, ceil(Q/32)], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    uint32 [B, Q, ceil(Q/32)]
        Column j is bit j % 32 of word j // 32; bits past Q are 0.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    ValueError
        With ``validate``: a bool is a byte other than 0 and 1.
    """
    if not _on_device("mask", mask):
        made = on_host.pack_mask(mask)
        if arrays.require_flag("validate", validate):
            _check_words("mask", np.asarray(mask).view(np.uint8), 1, made.shape[-1])
        return _copy_out(out, made, "[.., Q, ceil(Q/32)]")
    bools, bits_per_word = _mask("mask", mask, BOOL)
    batch, num_nodes, _ = bools.shape
    out, words, bits_per_result = _mask_result(out, bools, batch, num_nodes, True)
    _require_apart([words], [bools])
    if arrays.require_flag("validate", validate):
        _check_words("mask", bools.to_host(), bits_per_word, num_nodes)
    _repack(bools, bits_per_word, words, bits_per_result)
    return out


def unpack_mask(words: Any, num_nodes: int, *, out: Any = None, validate: bool = False) -> Any:
    """The inverse of `pack_mask`.

    Parameters
    ----------
    words : uint32 [B, Q, ceil(Q/32)] on the device, or uint32 [.., ceil(Q/32)] on the host
    num_nodes : int
        Q.
    out : bool [B, Q, Q], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    bool [B, Q, Q]

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`; there are not ceil(Q/32) words a row.
    ValueError
        With ``validate``: a bit stands at or past Q.
    """
    num_nodes = _integer("num_nodes", num_nodes, 1)
    if not _on_device("words", words):
        made = on_host.unpack_mask(words, num_nodes)
        if arrays.require_flag("validate", validate):
            _check_words("words", np.asarray(words), 32, num_nodes)
        return _copy_out(out, made, "[.., Q, Q]")
    packed = arrays.view("words", words)
    arrays.require_dtype(packed, UINT32)
    arrays.require_shape(packed, "[B, Q, ceil(Q/32)]", None, num_nodes, -(-num_nodes // 32))
    _require_sizes(packed, packed.shape[0], num_nodes)
    out, mask, bits_per_result = _mask_result(out, packed, packed.shape[0], num_nodes, False)
    _require_apart([mask], [packed])
    if arrays.require_flag("validate", validate):
        _check_words("words", packed.to_host(), 32, num_nodes)
    _repack(packed, 32, mask, bits_per_result)
    return out


# The same masks as engines lay them out


@cuda.jit
def full_mask_kernel(mask, bits_per_word, cache_seqlens, longest, full):
    """A block a row at a time, a thread an element: the prefix, then the node's row of the tree."""
    num_nodes = mask.shape[1]
    b = cuda.blockIdx.y
    i = cuda.blockIdx.x
    prefix = prefix_of(cache_seqlens, b, longest)
    while i < num_nodes:
        start = full_row(cache_seqlens, b, i, num_nodes, longest)
        stop = min(prefix + num_nodes, full.shape[0] - start)  # lengths that contradict the size end at its end
        column = np.int64(cuda.threadIdx.x)
        while column < stop:
            seen = True
            if column >= prefix:
                seen = sees(mask, bits_per_word, b, i, column - prefix)
            full[start + column] = seen
            column += THREADS
        i += cuda.gridDim.x


@cuda.jit
def from_full_mask_kernel(full, cache_seqlens, bits_per_word, mask):
    """A thread a word."""
    num_nodes, num_words = mask.shape[1], mask.shape[2]
    b = cuda.blockIdx.y
    n = cuda.grid(1)
    while n < num_nodes * num_words:
        i = n // num_words
        first = n % num_words * bits_per_word
        start = full_row(cache_seqlens, b, i, num_nodes, LARGEST_INT32)
        start += prefix_of(cache_seqlens, b, LARGEST_INT32)
        word = np.uint32(0)
        j = first
        while j < first + bits_per_word and j < num_nodes and start + j < full.shape[0]:
            if full[start + j] & 1 == 1:
                word |= np.uint32(1) << np.uint32(j - first)
            j += 1
        mask[b, i, n % num_words] = word
        n += cuda.gridsize(1)


def full_mask(tree_mask: Any, cache_seqlens: Any, seqlens_sum: int, *, out: Any = None, validate: bool = False) -> Any:
    """SGLang's FULL_MASK: for each request Q rows of prefix + Q columns, one request behind the other.

    Parameters
    ----------
    tree_mask : bool [B, Q, Q] or packed uint32 [B, Q, ceil(Q/32)]
    cache_seqlens : int32 [B]
        Prefix length of each request, in tokens; clamped to 0 .. ``seqlens_sum``.
    seqlens_sum : int
        Their sum, known on the host. With a larger number the mask stands at the beginning of the result and the rest
        is not written to: so that lengths may change under a captured graph. With a smaller one it is cut off.
    out : bool [Q * (seqlens_sum + B * Q)], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    bool [Q * (seqlens_sum + B * Q)]
        Prefix columns are True, for padding too; the rest is the mask's row.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    ValueError
        With ``validate``: a length is negative, their sum is not ``seqlens_sum``, a bool is a byte other than 0 and 1,
        or a bit stands at or past Q.

    Source: sgl-project/sglang, sgl-kernel/csrc/speculative/eagle_utils.cu (TreeMaskMode, build_tree_efficient) and
    python/sglang/srt/speculative/eagle_utils.py.
    """
    mask, bits_per_word = _mask("tree_mask", tree_mask)
    batch, num_nodes, _ = mask.shape
    lengths = _lengths(cache_seqlens, batch)
    seqlens_sum = _integer("seqlens_sum", seqlens_sum, 0)
    size = num_nodes * (seqlens_sum + batch * num_nodes)
    out, full = _result("out", out, mask, BOOL, "[Q * (seqlens_sum + B * Q)]", size)
    _require_apart([full], [mask, lengths])
    if arrays.require_flag("validate", validate):
        values = lengths.to_host()
        _check_lengths(values)
        if values.sum(dtype=np.int64) != seqlens_sum:
            raise ValueError(f"seqlens_sum is {seqlens_sum}; cache_seqlens sums up to {values.sum(dtype=np.int64)}")
        _check_words("tree_mask", mask.to_host(), bits_per_word, num_nodes)
    if batch:
        args = (mask, np.int32(bits_per_word), lengths, np.int32(seqlens_sum), full)
        blocks = (min(num_nodes, MAX_BLOCKS), batch, 1)
        launch(full_mask_kernel, blocks, THREADS, args, results=1, shared_bytes=0)
    return out


def tree_mask_from_full_mask(
    mask: Any, cache_seqlens: Any, num_nodes: int, *, packed: bool = False, out: Any = None, validate: bool = False
) -> Any:
    """The inverse of `full_mask`: the last Q columns of each row.

    Parameters
    ----------
    mask : bool [n]
        What lies behind the last request is not read.
    cache_seqlens : int32 [B]
        Prefix length of each request, in tokens. A negative one counts as 0; what would lie past n reads as False.
    num_nodes : int
        Q.
    packed : bool
        32 nodes a word in place of a byte each.
    out : array of the result's shape and dtype, optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    bool [B, Q, Q], or packed uint32 [B, Q, ceil(Q/32)]

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    ValueError
        n is less than B * Q * Q. With ``validate``: a length is negative, n is less than Q * (their sum + B * Q), or a
        bool is a byte other than 0 and 1.
    """
    full = _flat("mask", mask, BOOL)
    lengths = arrays.view("cache_seqlens", cache_seqlens)
    arrays.require_dtype(lengths, INT32)
    arrays.require_shape(lengths, "[B]", None)
    batch, num_nodes = lengths.shape[0], _integer("num_nodes", num_nodes, 1)
    _require_sizes(lengths, batch, num_nodes)
    if full.shape[0] < batch * num_nodes**2:
        raise ValueError(
            f"mask holds {full.shape[0]} elements; {batch} requests of {num_nodes} nodes need at least "
            f"{batch * num_nodes**2}"
        )
    out, tree_mask, bits_per_word = _mask_result(out, full, batch, num_nodes, packed)
    _require_apart([tree_mask], [full, lengths])
    if arrays.require_flag("validate", validate):
        values = lengths.to_host()
        _check_lengths(values)
        least = num_nodes * (int(values.sum(dtype=np.int64)) + batch * num_nodes)
        if full.shape[0] < least:
            raise ValueError(f"mask holds {full.shape[0]} elements; these lengths need {least}")
        _check_words("mask", full.to_host(), 1, num_nodes)
    args = (full, lengths, np.int32(bits_per_word), tree_mask)
    _launch_items(from_full_mask_kernel, batch, num_nodes * tree_mask.shape[2], args, 1)
    return out


def qlen_only_mask(tree_mask: Any, *, out: Any = None, validate: bool = False) -> Any:
    """SGLang's QLEN_ONLY: the bool mask [B, Q, Q] as one flat array.

    Parameters
    ----------
    tree_mask : bool [B, Q, Q] or packed uint32 [B, Q, ceil(Q/32)]
    out : bool [B * Q * Q], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    bool [B * Q * Q]

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    ValueError
        With ``validate``: a bool is a byte other than 0 and 1, or a bit stands at or past Q.

    Source: sgl-project/sglang, sgl-kernel/csrc/speculative/eagle_utils.cu (build_tree_efficient).
    """
    mask, bits_per_word = _mask("tree_mask", tree_mask)
    batch, num_nodes, _ = mask.shape
    out, flat = _result("out", out, mask, BOOL, "[B * Q * Q]", batch * num_nodes**2)
    _require_apart([flat], [mask])
    if arrays.require_flag("validate", validate):
        _check_words("tree_mask", mask.to_host(), bits_per_word, num_nodes)
    _repack(mask, bits_per_word, _unflatten(flat, batch, num_nodes, num_nodes), 1)
    return out


def tree_mask_from_qlen_only(
    mask: Any, num_nodes: int, *, packed: bool = False, out: Any = None, validate: bool = False
) -> Any:
    """The inverse of `qlen_only_mask`.

    Parameters
    ----------
    mask : bool [B * Q * Q]
    num_nodes : int
        Q.
    packed : bool
        32 nodes a word in place of a byte each.
    out : array of the result's shape and dtype, optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    bool [B, Q, Q], or packed uint32 [B, Q, ceil(Q/32)]

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`; the size of ``mask`` is no multiple of Q * Q.
    ValueError
        With ``validate``: a bool is a byte other than 0 and 1.
    """
    flat, num_nodes = _flat("mask", mask, BOOL), _integer("num_nodes", num_nodes, 1)
    batch, rest = divmod(flat.shape[0], num_nodes**2)
    if rest:
        raise ValueError(f"mask holds {flat.shape[0]} elements; it must be a multiple of Q * Q = {num_nodes**2}")
    _require_sizes(flat, batch, num_nodes)
    out, tree_mask, bits_per_result = _mask_result(out, flat, batch, num_nodes, packed)
    _require_apart([tree_mask], [flat])
    if arrays.require_flag("validate", validate):
        _check_words("mask", flat.to_host(), 1, num_nodes)
    _repack(_unflatten(flat, batch, num_nodes, num_nodes), 1, tree_mask, bits_per_result)
    return out


def _bitpacked_dtype(name: str, num_nodes: int) -> np.dtype[Any]:
    """The integer that holds a row: the smallest of 8, 16 and 32 bits."""
    if num_nodes > 32:
        raise ValueError(
            f"{name} is {num_nodes}; a bit-packed mask of one integer a node holds at most 32. The packed mask of "
            "mask_from_parents(..., packed=True) and pack_mask holds any number"
        )
    return np.dtype(np.uint8 if num_nodes <= 8 else np.uint16 if num_nodes <= 16 else np.uint32)


def bitpacked_mask(tree_mask: Any, *, out: Any = None, validate: bool = False) -> Any:
    """SGLang's QLEN_ONLY_BITPACKING: one integer a node, in one flat array.

    Parameters
    ----------
    tree_mask : bool [B, Q, Q] or packed uint32 [B, Q, 1]
        Q is at most 32.
    out : uint8, uint16 or uint32 [B * Q], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    uint8 (Q up to 8), uint16 (up to 16) or uint32 (up to 32) [B * Q]
        Node i of request b sees node j when bit j of element b * Q + i is set.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`; Q is above 32.
    ValueError
        With ``validate``: a bool is a byte other than 0 and 1, or a bit stands at or past Q.

    Source: sgl-project/sglang, python/sglang/srt/speculative/eagle_utils.py (the dtypes) and
    sgl-kernel/csrc/speculative/eagle_utils.cu (build_tree_efficient_partial_packed, the order of the bits).
    """
    mask, bits_per_word = _mask("tree_mask", tree_mask)
    batch, num_nodes, _ = mask.shape
    dtype = _bitpacked_dtype("tree_mask's num_nodes", num_nodes)
    out, flat = _result("out", out, mask, dtype, "[B * Q]", batch * num_nodes)
    _require_apart([flat], [mask])
    if arrays.require_flag("validate", validate):
        _check_words("tree_mask", mask.to_host(), bits_per_word, num_nodes)
    _repack(mask, bits_per_word, _unflatten(flat, batch, num_nodes, 1), 8 * dtype.itemsize)
    return out


def tree_mask_from_bitpacked(
    words: Any, num_nodes: int, *, packed: bool = False, out: Any = None, validate: bool = False
) -> Any:
    """The inverse of `bitpacked_mask`.

    Parameters
    ----------
    words : uint8 (Q up to 8), uint16 (up to 16) or uint32 (up to 32) [B * Q]
    num_nodes : int
        Q.
    packed : bool
        uint32 words in place of a byte a node.
    out : array of the result's shape and dtype, optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    bool [B, Q, Q], or packed uint32 [B, Q, 1]

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`; Q is above 32, or the size of ``words`` is no multiple of Q.
    ValueError
        With ``validate``: a bit stands at or past Q.
    """
    num_nodes = _integer("num_nodes", num_nodes, 1)
    dtype = _bitpacked_dtype("num_nodes", num_nodes)
    flat = _flat("words", words, dtype)
    batch, rest = divmod(flat.shape[0], num_nodes)
    if rest:
        raise ValueError(f"words holds {flat.shape[0]} elements; it must be a multiple of Q = {num_nodes}")
    _require_sizes(flat, batch, num_nodes)
    out, tree_mask, bits_per_result = _mask_result(out, flat, batch, num_nodes, packed)
    _require_apart([tree_mask], [flat])
    if arrays.require_flag("validate", validate):
        _check_words("words", flat.to_host()[:, None], 8 * dtype.itemsize, num_nodes)
    _repack(_unflatten(flat, batch, num_nodes, 1), 8 * dtype.itemsize, tree_mask, bits_per_result)
    return out


def tensorrt_mask(tree_mask: Any, *, out: Any = None, validate: bool = False) -> Any:
    """TensorRT-LLM's packed mask (spec_decoding_packed_mask): our words, in signed integers.

    Parameters
    ----------
    tree_mask : bool [B, Q, Q] or packed uint32 [B, Q, ceil(Q/32)]
    out : int32 [B, Q, ceil(Q/32)], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    int32 [B, Q, ceil(Q/32)]
        Node i sees node j when bit j % 32 of word j // 32 is set; bit 31 is the sign.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    ValueError
        With ``validate``: a bool is a byte other than 0 and 1, or a bit stands at or past Q.

    Source: NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/speculative/spec_tree_manager.py (compute_spec_dec_packed_mask) and
    cpp/tensorrt_llm/kernels/convertSpecDecodingMaskToPackedMask.cu, which writes the rows of live nodes alone, one
    request behind the other.
    """
    mask, bits_per_word = _mask("tree_mask", tree_mask)
    batch, num_nodes, _ = mask.shape
    num_words = -(-num_nodes // 32)
    out, words = _result("out", out, mask, INT32, "[B, Q, ceil(Q/32)]", batch, num_nodes, num_words)
    _require_apart([words], [mask])
    if arrays.require_flag("validate", validate):
        _check_words("tree_mask", mask.to_host(), bits_per_word, num_nodes)
    _repack(mask, bits_per_word, replace(words, dtype=UINT32), 32)
    return out


def tree_mask_from_tensorrt(words: Any, *, packed: bool = False, out: Any = None, validate: bool = False) -> Any:
    """The inverse of `tensorrt_mask`.

    Parameters
    ----------
    words : int32 [B, Q, ceil(Q/32)]
    packed : bool
        uint32 words in place of a byte a node.
    out : array of the result's shape and dtype, optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    bool [B, Q, Q], or packed uint32 [B, Q, ceil(Q/32)]

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    ValueError
        With ``validate``: a bit stands at or past Q.
    """
    signed, bits_per_word = _mask("words", words, INT32)
    batch, num_nodes, _ = signed.shape
    out, tree_mask, bits_per_result = _mask_result(out, signed, batch, num_nodes, packed)
    _require_apart([tree_mask], [signed])
    if arrays.require_flag("validate", validate):
        _check_words("words", replace(signed, dtype=UINT32).to_host(), bits_per_word, num_nodes)
    _repack(replace(signed, dtype=UINT32), bits_per_word, tree_mask, bits_per_result)
    return out


# Bias


@cuda.jit
def bias_kernel(mask, bits_per_word, cache_seqlens, bias):
    """A thread an element."""
    num_nodes, columns = bias.shape[1], bias.shape[2]
    b = cuda.blockIdx.y
    n = cuda.grid(1)
    while n < num_nodes * columns:
        i = n // columns
        j = n % columns - prefix_of(cache_seqlens, b, columns - num_nodes)
        seen = j < 0
        if 0 <= j < num_nodes:
            seen = sees(mask, bits_per_word, b, i, j)
        value = NEG_INF
        if seen:
            value = ZERO
        bias[b, i, n % columns] = from_f32(value, bias)
        n += cuda.gridsize(1)


@cuda.jit
def from_bias_kernel(bias, bits_per_word, mask):
    """A thread a word."""
    num_nodes, num_words = mask.shape[1], mask.shape[2]
    b = cuda.blockIdx.y
    n = cuda.grid(1)
    while n < num_nodes * num_words:
        i = n // num_words
        first = n % num_words * bits_per_word
        word = np.uint32(0)
        j = first
        while j < first + bits_per_word and j < num_nodes:
            if to_f32(bias[b, i, j]) == ZERO:
                word |= np.uint32(1) << np.uint32(j - first)
            j += 1
        mask[b, i, n % num_words] = word
        n += cuda.gridsize(1)


def _no_prefix(batch: int) -> np.ndarray:
    return np.zeros(batch, np.int32)


def dense_bias(
    tree_mask: Any,
    dtype: Any = "float32",
    *,
    cache_seqlens: Any = None,
    max_seqlen: int | None = None,
    out: Any = None,
    validate: bool = False,
) -> Any:
    """The mask as a bias to add to the scores: 0 where a node sees, -inf where it does not.

    Parameters
    ----------
    tree_mask : bool [B, Q, Q] or packed uint32 [B, Q, ceil(Q/32)]
    dtype : dtype
        float32, float16 or bfloat16, by any library's name for it.
    cache_seqlens : int32 [B], optional
        Prefix length of each request, in tokens; clamped to 0 .. ``max_seqlen``. Given, the bias covers the prefix too.
    max_seqlen : int, optional
        Upper bound on the prefix, in tokens; goes with ``cache_seqlens``.
    out : array of the result's shape and dtype, optional
        uint16 is taken for bfloat16.
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    float [B, Q, Q], or with ``cache_seqlens`` float [B, Q, max_seqlen + Q]
        With a prefix of n tokens, columns 0 .. n - 1 are 0, columns n .. n + Q - 1 are the tree's, the rest is -inf.
        Numba device arrays hold bfloat16 as uint16. Rows of padding are -inf throughout where there is no prefix, and
        a softmax over such a row is NaN in most libraries.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`; one of ``cache_seqlens`` and ``max_seqlen`` is given without the other.
    ValueError
        With ``validate``: a length is not between 0 and ``max_seqlen``, a bool is a byte other than 0 and 1, or a bit
        stands at or past Q.
    """
    mask, bits_per_word = _mask("tree_mask", tree_mask)
    batch, num_nodes, _ = mask.shape
    if (cache_seqlens is None) != (max_seqlen is None):
        missing = "cache_seqlens" if cache_seqlens is None else "max_seqlen"
        raise ValueError(f"{missing} is None; cache_seqlens and max_seqlen must be given together")
    if cache_seqlens is None:
        longest = 0
        lengths = arrays.constant(mask.device, _no_prefix, batch)
    else:
        longest = _integer("max_seqlen", max_seqlen, 0)
        lengths = _lengths(cache_seqlens, batch)
    axes = "[B, Q, Q]" if cache_seqlens is None else "[B, Q, max_seqlen + Q]"
    resolved = arrays.resolve_dtype("dtype", dtype)
    out, bias = _result("out", out, mask, resolved, axes, batch, num_nodes, longest + num_nodes)
    _require_apart([bias], [mask, lengths])
    if arrays.require_flag("validate", validate):
        _check_lengths(lengths.to_host(), longest)
        _check_words("tree_mask", mask.to_host(), bits_per_word, num_nodes)
    args = (mask, np.int32(bits_per_word), lengths, bias)
    _launch_items(bias_kernel, batch, num_nodes * bias.shape[2], args, 1)
    return out


def tree_mask_from_bias(bias: Any, *, packed: bool = False, out: Any = None, validate: bool = False) -> Any:
    """The inverse of `dense_bias` without a prefix: a node sees where the bias is 0.

    Parameters
    ----------
    bias : float [B, Q, Q]
        float32, float16 or bfloat16; uint16 is read as bfloat16. Anything but 0 counts as not seen.
    packed : bool
        32 nodes a word in place of a byte each.
    out : array of the result's shape and dtype, optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    bool [B, Q, Q], or packed uint32 [B, Q, ceil(Q/32)]

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    ValueError
        With ``validate``: a value is neither 0 nor -inf.
    """
    values = arrays.view("bias", bias)
    arrays.require_dtype(values, *FLOATS, np.uint16)
    if len(values.shape) != 3 or values.shape[1] != values.shape[2]:
        raise ValueError(f"bias has shape {list(values.shape)}; it must be [B, Q, Q]")
    batch, num_nodes, _ = values.shape
    _require_sizes(values, batch, num_nodes)
    out, tree_mask, bits_per_word = _mask_result(out, values, batch, num_nodes, packed)
    _require_apart([tree_mask], [values])
    if arrays.require_flag("validate", validate):
        x = array_to_f32(values.to_host())
        _refuse("bias", x, ~((x == 0) | np.isneginf(x)), "it must be 0 or -inf")
    args = (values, np.int32(bits_per_word), tree_mask)
    _launch_items(from_bias_kernel, batch, num_nodes * tree_mask.shape[2], args, 1)
    return out


# Root-to-leaf paths


@cuda.jit
def paths_kernel(parents, paths):
    """A block a request; a byte of shared memory a node."""
    num_nodes = parents.shape[1]
    max_leaves, width = paths.shape[1], paths.shape[2]
    b = cuda.blockIdx.y
    t = cuda.threadIdx.x
    is_leaf = cuda.shared.array(0, types.uint8)

    # Phase 1: no path yet; every node that hangs on the root may be a leaf
    n = t
    while n < max_leaves * width:
        paths[b, n // width, n % width] = -1
        n += THREADS
    i = t
    while i < num_nodes:
        is_leaf[i] = 1 if depth_of(parents, b, i) >= 0 else 0
        i += THREADS
    cuda.syncthreads()

    # Phase 2: a parent is none
    i = t
    while i < num_nodes:
        parent = parent_of(parents, b, i)
        if parent >= 0:
            is_leaf[parent] = 0
        i += THREADS
    cuda.syncthreads()

    # Phase 3: each leaf counts the leaves before it, and writes its path from the end
    i = t
    while i < num_nodes:
        if is_leaf[i] == 1:
            row = 0
            j = 0
            while j < i:
                if is_leaf[j] == 1:
                    row += 1
                j += 1
            if row < max_leaves:
                depth = depth_of(parents, b, i)
                node = i
                while node >= 0:
                    if depth < width:
                        paths[b, row, depth] = node
                    node = parent_of(parents, b, node)
                    depth -= 1
        i += THREADS


@cuda.jit
def parents_from_paths_kernel(paths, parents):
    """A block a request."""
    num_nodes = parents.shape[1]
    max_leaves, steps = paths.shape[1], paths.shape[2] - 1
    b = cuda.blockIdx.y
    t = cuda.threadIdx.x

    # Phase 1: nobody has a parent
    i = t
    while i < num_nodes:
        parents[b, i] = -1
        i += THREADS
    cuda.syncthreads()

    # Phase 2: each step of each path is a parent and its child
    n = t
    while n < max_leaves * steps:
        parent = paths[b, n // steps, n % steps]
        child = paths[b, n // steps, n % steps + 1]
        if 0 <= parent < child < num_nodes:
            parents[b, child] = parent
        n += THREADS


def retrieve_indices(
    parents: Any, max_depth: int, *, max_leaves: int | None = None, out: Any = None, validate: bool = False
) -> Any:
    """Root-to-leaf paths, as Medusa and EAGLE gather candidates by them.

    Parameters
    ----------
    parents : int32 [B, Q]
    max_depth : int
        Bound on every depth. Nodes below it are left out of their paths.
    max_leaves : int, optional
        Bound on the number of leaves; default: max(Q - 1, 1), which is always enough. Later leaves are left out.
    out : int32 [B, max_leaves, max_depth + 1], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    int32 [B, max_leaves, max_depth + 1]
        Row n is the path to the n-th leaf, by node index: the root first, -1 behind the leaf. Rows behind the last leaf
        are -1 throughout. The root alone is a leaf.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`; ``max_depth`` is negative, ``max_leaves`` below 1, or Q above the bytes of shared
        memory of a block.
    ValueError
        With ``validate``: also a tree that is deeper than ``max_depth`` or has more than ``max_leaves`` leaves.

    Source: FasterDecoding/Medusa, medusa/model/utils.py (generate_medusa_buffers), and SafeAILab/EAGLE,
    eagle/model/cnets.py (topK_genrate); Medusa, and EAGLE when it samples, put the rows into another order.
    """
    tree = _per_node("parents", parents, INT32)
    batch, num_nodes = tree.shape
    limit = shared_bytes_limit(tree.device)
    if num_nodes > limit:
        raise ValueError(f"{tree} has Q = {num_nodes}; {device_name(tree.device)} has {limit} bytes of shared memory")
    width = _integer("max_depth", max_depth, 0) + 1
    rows = max(num_nodes - 1, 1) if max_leaves is None else _integer("max_leaves", max_leaves, 1)
    out, paths = _result("out", out, tree, INT32, "[B, max_leaves, max_depth + 1]", batch, rows, width)
    _require_apart([paths], [tree])
    if arrays.require_flag("validate", validate):
        values = tree.to_host()
        _check_parents(values)
        seen = on_host.mask_from_parents(values)
        depths = seen.sum(axis=-1) - 1
        _refuse("parents", values, depths >= width, f"the node is deeper than max_depth = {width - 1}")
        leaves = (seen.sum(axis=-2) == 1).sum(axis=-1)  # seen by itself alone
        if batch and leaves.max() > rows:
            b = int(np.argmax(leaves > rows))
            raise ValueError(f"parents[{b}] has {leaves[b]} leaves; max_leaves is {rows}")
    _launch_requests(paths_kernel, batch, (tree, paths), 1, shared_bytes=num_nodes)
    return out


def parents_from_retrieve_indices(paths: Any, num_nodes: int, *, out: Any = None, validate: bool = False) -> Any:
    """The inverse of `retrieve_indices`; the order of the rows does not matter.

    Parameters
    ----------
    paths : int32 or int64 [B, max_leaves, max_depth + 1]
        A step that does not lead to a later node is passed over.
    num_nodes : int
        Q.
    out : int32 [B, Q], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    int32 [B, Q]
        -1 for the root and for nodes on no path. Where paths disagree, any of them decides.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`; a path has no column.
    ValueError
        With ``validate``: an entry is neither -1 nor a node, a path does not begin at the root, does not ascend or goes
        on behind -1, or a node has two parents.
    """
    found = arrays.view("paths", paths)
    arrays.require_dtype(found, INT32, INT64)
    arrays.require_shape(found, "[B, max_leaves, max_depth + 1]", None, None, None)
    batch, num_nodes = found.shape[0], _integer("num_nodes", num_nodes, 1)
    _require_sizes(found, batch, num_nodes)
    if found.shape[2] < 1:
        raise ValueError(f"{found} has no column; it must have at least one, for the root")
    out, parents = _result("out", out, found, INT32, "[B, Q]", batch, num_nodes)
    _require_apart([parents], [found])
    if arrays.require_flag("validate", validate):
        _check_paths(found.to_host(), num_nodes)
    _launch_requests(parents_from_paths_kernel, batch, (found, parents), 1)
    return out


# Other orders of the nodes


@cuda.jit
def depth_first_kernel(first_child, next_sibling, parents, permutation):
    """A thread a request: down to the first child, else on to the next sibling of the node or of an ancestor."""
    batch, num_nodes = permutation.shape
    b = cuda.grid(1)
    if b < batch:
        n = 0
        node = 0
        while node >= 0 and n < num_nodes:
            permutation[b, n] = node
            n += 1
            following = link_of(first_child, b, node)
            while following < 0 and node > 0:
                following = link_of(next_sibling, b, node)
                node = parent_of(parents, b, node)
            node = following
        while n < num_nodes:
            permutation[b, n] = n
            n += 1


@cuda.jit
def breadth_first_kernel(first_child, next_sibling, parents, permutation):
    """A thread a request: the permutation is the queue itself."""
    batch, num_nodes = permutation.shape
    b = cuda.grid(1)
    if b < batch:
        permutation[b, 0] = 0
        n = 1
        head = 0
        while head < n:
            child = link_of(first_child, b, permutation[b, head])
            while child >= 0 and n < num_nodes:
                permutation[b, n] = child
                n += 1
                child = link_of(next_sibling, b, child)
            head += 1
        while n < num_nodes:
            permutation[b, n] = n
            n += 1


@cuda.jit(device=True, inline="always")
def find(permutation, b, old):
    """The new index of an old node, or -1."""
    found = -1
    n = permutation.shape[1] - 1
    while n >= 0:
        if permutation[b, n] == old:
            found = n
        n -= 1
    return found


@cuda.jit
def relabel_kernel(
    permutation,
    tokens,
    parents,
    depths,
    scores,
    num_nodes,
    input_ids,
    new_tokens,
    new_parents,
    new_depths,
    new_scores,
    new_num_nodes,
    new_input_ids,
):
    """A thread a node."""
    b = cuda.blockIdx.y
    n = cuda.grid(1)
    if n == 0:
        new_num_nodes[b] = num_nodes[b]
    while n < permutation.shape[1]:
        old = permutation[b, n]
        new_tokens[b, n] = tokens[b, old]
        new_parents[b, n] = find(permutation, b, parents[b, old]) if parents[b, old] >= 0 else -1
        new_depths[b, n] = depths[b, old]
        new_scores[b, n] = scores[b, old]
        new_input_ids[b, n] = input_ids[b, old]
        n += cuda.gridsize(1)


@cuda.jit
def inverse_kernel(permutation, inverse):
    """A thread a node."""
    b = cuda.blockIdx.y
    i = cuda.grid(1)
    while i < permutation.shape[1]:
        inverse[b, i] = find(permutation, b, i)
        i += cuda.gridsize(1)


ORDERS = ("depth_first", "breadth_first")


def relabel(
    tree: DraftTree, order: str, *, out: DraftTree | None = None, permutation: Any = None, validate: bool = False
) -> tuple[DraftTree, Any]:
    """The same trees with their nodes in another order. Parents stay ahead of their children.

    Parameters
    ----------
    tree : DraftTree
        B requests, Q nodes.
    order : str
        "depth_first": a node, then the whole subtree of its first child, then that of the next. "breadth_first": level
        by level; within a level by the parent's new index, then by the order of siblings. Siblings keep their order.
    out : DraftTree, optional
        Arrays for the result; ``max_depth`` must be the tree's.
    permutation : int32 [B, Q], optional
        Array for the permutation.
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    tree : DraftTree
        All fields for the new order.
    permutation : int32 [B, Q]
        ``permutation[b, new]`` is the old index. The root and padding stay where they are.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`; ``tree`` or ``out`` is no DraftTree, ``order`` is none of the two.
    ValueError
        With ``validate``: `parents`, links or `num_nodes` are wrong or contradict each other, or padding does not stand
        behind the last node.

    Notes
    -----
    A thread walks over each whole tree, Q steps one after the other: good for many requests at a time, and slow for a
    single large tree.
    """
    for name, x in (("tree", tree), ("out", out)):
        if not isinstance(x, DraftTree) and (name == "tree" or x is not None):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a DraftTree")
    arrays.require_one_of("order", order, ORDERS)
    depth = _integer("tree.max_depth", tree.max_depth, 0)
    tokens = _per_node("tree.tokens", tree.tokens, INT32)
    batch, num_nodes = tokens.shape
    old = draft_tree.views(tree, batch, num_nodes, "tree.")
    if out is None:
        out = draft_tree.empty_tree(tokens, batch, num_nodes - 1, depth)
    elif arrays.require_integer("out.max_depth", out.max_depth) != depth:
        raise ValueError(f"out.max_depth is {out.max_depth}; it must be the tree's, {depth}")
    new = draft_tree.views(out, batch, num_nodes, "out.")
    permutation, new_order = _result("permutation", permutation, tokens, INT32, "[B, Q]", batch, num_nodes)
    _require_apart([*new.values(), new_order], list(old.values()))
    if arrays.require_flag("validate", validate):
        _check_tree({name: x.to_host() for name, x in old.items()})
    if batch == 0:
        return out, permutation

    new = {name: replace(x, kind=tokens.kind) for name, x in new.items()}  # one stream for all launches
    links = (old["first_child"], old["next_sibling"], old["parents"])
    kernel = depth_first_kernel if order == "depth_first" else breadth_first_kernel
    launch(kernel, (-(-batch // THREADS), 1, 1), THREADS, (*links, new_order), results=1, shared_bytes=0)
    moved = ("tokens", "parents", "depths", "scores", "num_nodes", "input_ids")
    args = (new_order, *(old[name] for name in moved), *(new[name] for name in moved))
    _launch_items(relabel_kernel, batch, num_nodes, args, len(moved))
    # Siblings keep their order, so the new parents tell the rest.
    _launch_items(links_kernel, batch, num_nodes, (new["parents"], new["first_child"], new["next_sibling"]), 2)
    mask = new["tree_mask"]
    _launch_items(mask_kernel, batch, num_nodes * mask.shape[2], (new["parents"], np.int32(32), mask), 1)
    return out, permutation


def _check_tree(tree: dict[str, np.ndarray]) -> None:
    parents, num_nodes = tree["parents"], tree["num_nodes"]
    _check_parents(parents, "tree.parents")
    wide = parents.shape[1]
    _refuse("tree.num_nodes", num_nodes, (num_nodes < 1) | (num_nodes > wide), f"it must be between 1 and {wide}")
    node = np.arange(wide)
    live = node < num_nodes[:, None]
    bad = (node > 0) & (live != (parents >= 0))
    _refuse("tree.parents", parents, bad, "it must be -1 behind num_nodes, and a node's index before")
    names = ("tree.first_child", "tree.next_sibling")
    _check_links(names, tree["first_child"], tree["next_sibling"])
    for b, i in np.ndindex(*parents.shape):
        child = tree["first_child"][b, i]
        while child != -1:
            if parents[b, child] != i:
                raise ValueError(f"tree.parents[{b}, {child}] is {parents[b, child]}; by the links it must be {i}")
            child = tree["next_sibling"][b, child]
    linked = np.zeros_like(live)
    for links in (tree["first_child"], tree["next_sibling"]):
        for b, i in np.argwhere(links != -1):
            linked[b, links[b, i]] = True
    _refuse("tree.parents", parents, (node > 0) & live & ~linked, "no link leads to this node")


def inverse_permutation(permutation: Any, *, out: Any = None, validate: bool = False) -> Any:
    """The permutation that undoes another.

    Parameters
    ----------
    permutation : int32 [B, Q]
        As `relabel` returns it: the old index of each new node.
    out : int32 [B, Q], optional
    validate : bool
        Check the contents; copies them to the host.

    Returns
    -------
    int32 [B, Q]
        The new index of each old node; -1 for one that does not occur, the first of several places.

    Raises
    ------
    TypeError, ValueError
        As in `links_from_parents`.
    ValueError
        With ``validate``: a row does not hold each of 0 .. Q - 1 once.
    """
    found = _per_node("permutation", permutation, INT32)
    batch, num_nodes = found.shape
    out, inverse = _result("out", out, found, INT32, "[B, Q]", batch, num_nodes)
    _require_apart([inverse], [found])
    if arrays.require_flag("validate", validate):
        values = found.to_host()
        bad = (values < 0) | (values >= num_nodes)
        _refuse("permutation", values, bad, f"it must be between 0 and {num_nodes - 1}")
        wrong = np.flatnonzero((np.sort(values, axis=1) != np.arange(num_nodes)).any(axis=1))
        if wrong.size:
            raise ValueError(f"permutation[{wrong[0]}] holds a node twice; it must hold each once")
    _launch_items(inverse_kernel, batch, num_nodes, (found, inverse), 1)
    return out
