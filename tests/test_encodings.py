"""Encodings of trees: each conversion against a definition in plain Python, round trips, bad contents, errors."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda
from test_verify_attention_gpu import TO_KIND, kind_of, library
from test_verify_attention_gpu import to_host as floats_to_host

from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.tree import encodings
from ddtree_numba.tree.draft_tree import DTYPES, DraftTree

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SIZES = (1, 2, 31, 32, 33, 64, 65)
LENGTHS = (3, 0, 7, 1)

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(SIMULATOR, reason="kernels run in the simulator here; these tests need a CUDA GPU")


# Trees


def a_tree(shape: str, size: int, num_nodes: int, rng: np.random.Generator) -> list[int]:
    """Parents of a tree of ``size`` nodes, padded to ``num_nodes``."""
    parent = {"chain": lambda i: i - 1, "star": lambda i: 0, "random": lambda i: int(rng.integers(i))}[shape]
    return [-1] + [parent(i) for i in range(1, size)] + [-1] * (num_nodes - size)


@functools.cache
def batch_of(num_nodes: int, seed: int = 0) -> np.ndarray:
    """Four requests: a random tree, the root alone, a chain of half the nodes, a star; int32 [4, Q]."""
    rng = np.random.default_rng([num_nodes, seed])
    kinds = (("random", num_nodes), ("chain", 1), ("chain", -(-num_nodes // 2)), ("star", num_nodes))
    return np.array([a_tree(shape, size, num_nodes, rng) for shape, size in kinds], np.int32)


# Definitions, a tree at a time: ``parents`` is a tuple

Tree = tuple[int, ...]


@functools.lru_cache(20_000)
def lineage(parents: Tree, i: int) -> list[int]:
    """The nodes from the root to i; nothing for padding, and for a node that does not hang on the root."""
    if i == 0:
        return [0]
    above = lineage(parents, parents[i]) if 0 <= parents[i] < i else []
    return [*above, i] if above else []


@functools.lru_cache(20_000)
def children(parents: Tree, i: int) -> list[int]:
    return [j for j in range(len(parents)) if len(lineage(parents, j)) > 1 and parents[j] == i]


def links(parents: Tree) -> tuple[list[int], list[int]]:
    first = {i: children(parents, i)[0] for i in range(len(parents)) if children(parents, i)}
    following = {}
    for i in range(len(parents)):
        siblings = children(parents, i)
        following.update(zip(siblings, siblings[1:], strict=False))
    return tuple([known.get(i, -1) for i in range(len(parents))] for known in (first, following))


def tidy(parents: Tree) -> list[int]:
    """Parents without what leads nowhere: what a round trip gives back."""
    return [path[-2] if len(path := lineage(parents, i)) > 1 else -1 for i in range(len(parents))]


@functools.lru_cache(20_000)
def depth_first(parents: Tree, i: int = 0) -> list[int]:
    return [i] + [j for child in children(parents, i) for j in depth_first(parents, child)]


def breadth_first(parents: Tree) -> list[int]:
    found, level = [], [0]
    while level:
        found += level
        level = [child for i in level for child in children(parents, i)]
    return found


def integers_of(seen: list[set[int]], bits: int, count: int) -> list[list[int]]:
    """Rows as ``count`` integers of ``bits`` bits each."""
    rows = [sum(1 << j for j in row) for row in seen]
    return [[row >> bits * w & (1 << bits) - 1 for w in range(count)] for row in rows]


# All conversions with their arguments and exact results


@dataclass(frozen=True)
class Call:
    """``encodings.<name>(*args, **options)`` gives ``expected``, an array or a tuple of arrays."""

    name: str
    args: tuple[Any, ...]
    expected: Any
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name + "".join(f" {name}" for name in self.options if name != "max_seqlen")

    def run(self, kind: str = "numpy", **more: Any) -> Any:
        args = [TO_KIND[kind](x) if isinstance(x, np.ndarray) else x for x in self.args]
        options = {n: TO_KIND[kind](x) if isinstance(x, np.ndarray) else x for n, x in self.options.items()}
        return getattr(encodings, self.name)(*args, **options, **more)

    @property
    def results(self) -> tuple[np.ndarray, ...]:
        return self.expected if isinstance(self.expected, tuple) else (self.expected,)

    def check(self, actual: Any, kind: str = "numpy") -> None:
        several = isinstance(self.expected, tuple)
        assert isinstance(actual, tuple) is several, self
        for a, e in zip(actual if several else (actual,), self.results, strict=True):
            assert kind_of(a) == kind, self
            a = to_host(a)
            wanted = np.dtype(np.uint16) if e.dtype == BFLOAT16 and kind == "numba" else e.dtype
            assert (a.dtype, a.shape) == (wanted, e.shape), self
            np.testing.assert_array_equal(a.view(e.dtype), e, str(self))


def to_host(x: Any) -> np.ndarray:
    if kind_of(x) == "torch" and str(x.dtype) == "torch.uint32":
        return to_host(x.view(library("torch").int32)).view(np.uint32)
    return floats_to_host(x)


@functools.cache
def solved(num_nodes: int, seed: int = 0) -> list[Call]:
    return calls(batch_of(num_nodes, seed))


def calls(parents: np.ndarray) -> list[Call]:
    """Every conversion of a batch. What a round trip gives back has no parent that leads nowhere."""
    batch, num_nodes = parents.shape
    trees = [tuple(tree) for tree in parents.tolist()]
    lengths = np.array(LENGTHS[:batch], np.int32)
    longest = int(lengths.max(initial=0)) + 2
    seen = [[set(lineage(tree, i)) for i in range(num_nodes)] for tree in trees]
    num_words = -(-num_nodes // 32)

    def array(values: Any, dtype: Any, *shape: int) -> np.ndarray:
        return np.array(values, dtype).reshape(shape)

    back = array([tidy(tree) for tree in trees], np.int32, batch, num_nodes)
    first_child, next_sibling = (
        array([links(tree)[n] for tree in trees], np.int32, batch, num_nodes) for n in range(2)
    )
    depths = array(
        [[max(len(lineage(tree, i)) - 1, 0) for i in range(num_nodes)] for tree in trees], np.int32, batch, num_nodes
    )
    bools = array(
        [[[j in row for j in range(num_nodes)] for row in tree] for tree in seen],
        np.bool_,
        batch,
        num_nodes,
        num_nodes,
    )
    words = array([integers_of(tree, 32, num_words) for tree in seen], np.uint32, batch, num_nodes, num_words)

    leaves = [[i for i in range(num_nodes) if lineage(t, i) and not children(t, i)] for t in trees]
    deepest = int(depths.max(initial=0))
    most = max((len(row) for row in leaves), default=1)
    paths = np.full((batch, max(num_nodes - 1, 1), deepest + 2), -1, np.int32)
    for b, tree in enumerate(trees):
        for row, leaf in enumerate(leaves[b]):
            path = lineage(tree, leaf)
            paths[b, row, : len(path)] = path

    full = [
        j < n or j - n in row for tree, n in zip(seen, lengths.tolist(), strict=True) for row in tree
        for j in range(n + num_nodes)
    ]  # fmt: skip
    bias = np.array([-np.inf, 0.0])[bools.astype(int)]
    wide = np.full((batch, num_nodes, longest + num_nodes), -np.inf)
    for b, n in enumerate(lengths.tolist()):
        wide[b, :, :n] = 0
        wide[b, :, n : n + num_nodes] = bias[b]

    index = np.arange(batch * num_nodes, dtype=np.int64).reshape(batch, num_nodes)
    wide_links = first_child.astype(np.int64), next_sibling.astype(np.int64)
    flat, total = array(full, np.bool_, len(full)), int(lengths.sum())
    found = [
        Call("links_from_parents", (parents,), (first_child, next_sibling)),
        Call("parents_from_links", (first_child, next_sibling), back),
        Call("sglang_links", (parents,), (index, *wide_links)),
        Call("parents_from_sglang", wide_links, back),
        Call("depths_from_parents", (parents,), depths),
        Call("positions", (lengths, depths), lengths[:, None] + depths),
        Call("parents_from_mask", (bools,), back),
        Call("parents_from_mask", (words,), back),
        Call("pack_mask", (bools,), words),
        Call("unpack_mask", (words, num_nodes), bools),
        Call("full_mask", (bools, lengths, total), flat),
        Call("full_mask", (words, lengths, total), flat),
        Call("tree_mask_from_full_mask", (flat, lengths, num_nodes), bools),
        Call("tree_mask_from_full_mask", (flat, lengths, num_nodes), words, {"packed": True}),
        Call("qlen_only_mask", (words,), bools.reshape(-1)),
        Call("tree_mask_from_qlen_only", (bools.reshape(-1), num_nodes), words, {"packed": True}),
        Call("tensorrt_mask", (bools,), words.view(np.int32)),
        Call("tensorrt_mask", (words,), words.view(np.int32)),
        Call("tree_mask_from_tensorrt", (words.view(np.int32),), bools),
        Call("retrieve_indices", (parents, deepest + 1), paths),
        Call("retrieve_indices", (parents, deepest), paths[:, :most, :-1].copy(), {"max_leaves": most}),
        Call("parents_from_retrieve_indices", (paths, num_nodes), back),
        Call("parents_from_retrieve_indices", (paths[:, ::-1].astype(np.int64), num_nodes), back),
        Call("dense_bias", (bools,), bias.astype(np.float32)),
        Call("dense_bias", (words, "float16"), bias.astype(np.float16)),
        Call(
            "dense_bias", (words, "bfloat16"), wide.astype(BFLOAT16), {"cache_seqlens": lengths, "max_seqlen": longest}
        ),
        Call("tree_mask_from_bias", (bias.astype(np.float32),), bools),
        Call("tree_mask_from_bias", (bias.astype(BFLOAT16),), words, {"packed": True}),
    ]
    if np.array_equal(parents, back):  # the host's way refuses other contents
        found += [
            Call("mask_from_parents", (parents,), bools),
            Call("mask_from_parents", (parents,), words, {"packed": True}),
        ]
    if num_nodes <= 32:
        bits = 8 if num_nodes <= 8 else 16 if num_nodes <= 16 else 32
        integers = array([integers_of(tree, bits, 1) for tree in seen], f"u{bits // 8}", batch * num_nodes)
        found += [
            Call("bitpacked_mask", (bools,), integers),
            Call("bitpacked_mask", (words,), integers),
            Call("tree_mask_from_bitpacked", (integers, num_nodes), bools),
        ]
    return found


@pytest.mark.parametrize("num_nodes", [*SIZES, 8, 9, 16, 17])
def test_against_the_definitions(num_nodes):
    for call in solved(num_nodes):
        call.check(call.run(validate=True))


@pytest.mark.parametrize("num_nodes", [1, 9, 33])
def test_device_arrays_give_device_arrays(num_nodes):
    for call in solved(num_nodes):
        call.check(call.run("numba"), "numba")


@pytest.mark.parametrize("kind", ["numpy", "numba"])
def test_results_go_where_they_are_told(kind):
    for call in solved(9):
        out = tuple(TO_KIND[kind](np.full_like(x, 1)) for x in call.results)
        given_out = out if len(out) > 1 else out[0]
        actual = call.run(kind, out=given_out)
        call.check(actual, kind)
        for a, o in zip(actual if len(out) > 1 else (actual,), out, strict=True):
            assert a is o, call


def test_strides():
    for call in solved(9):
        call = replace(
            call,
            args=tuple(strided(x) if isinstance(x, np.ndarray) else x for x in call.args),
            options={n: strided(x) if isinstance(x, np.ndarray) else x for n, x in call.options.items()},
        )
        out = tuple(strided(np.zeros_like(x)) for x in call.results)
        call.check(call.run(out=out if len(out) > 1 else out[0]))


def strided(x: np.ndarray) -> np.ndarray:
    """The same array with its last axis backwards in memory, every second element."""
    room = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    view = room[..., ::-2]
    view[...] = x
    return view


def test_no_requests():
    for call in calls(np.zeros((0, 5), np.int32)):
        if call.name != "mask_from_parents":
            call.check(call.run("numba", validate=True), "numba")
        call.check(call.run(validate=True))


def test_other_trees_stay_what_they_are():
    """A request's results depend on its own tree alone."""
    parents = batch_of(33)
    alone = encodings.links_from_parents(parents[3:])
    together = encodings.links_from_parents(parents)
    for a, t in zip(alone, together, strict=True):
        np.testing.assert_array_equal(a[0], t[3])


def test_a_small_tree_by_hand():
    parents = np.array([[-1, 0, 0, 1]], np.int32)
    index, next_token, next_sibling = encodings.sglang_links(np.repeat(parents, 2, axis=0))
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert next_token.tolist() == [[1, 3, -1, -1]] * 2
    assert next_sibling.tolist() == [[-1, 2, -1, -1]] * 2
    depths = encodings.depths_from_parents(parents)
    assert encodings.positions(np.array([5], np.int32), depths).tolist() == [[5, 6, 6, 7]]
    assert encodings.retrieve_indices(parents, 2).tolist() == [[[0, 2, -1], [0, 1, 3], [-1, -1, -1]]]
    assert encodings.bitpacked_mask(encodings.mask_from_parents(parents)).tolist() == [0b1, 0b11, 0b101, 0b1011]


def test_a_large_tree():
    """1025 nodes: the device way of masks and back, where words, rows and blocks are many."""
    rng = np.random.default_rng(5)
    parents = np.array([a_tree("random", 1025, 1025, rng), a_tree("random", 700, 1025, rng)], np.int32)
    words = encodings.mask_from_parents(cuda.to_device(parents), packed=True)
    expected = encodings.mask_from_parents(parents, packed=True)
    np.testing.assert_array_equal(to_host(words), expected)
    depths = encodings.depths_from_parents(parents)
    np.testing.assert_array_equal(depths, np.maximum(encodings.unpack_mask(expected, 1025).sum(axis=-1) - 1, 0))
    paths = encodings.retrieve_indices(parents, int(depths.max()))
    np.testing.assert_array_equal(encodings.parents_from_retrieve_indices(paths, 1025), parents)


def test_host_arrays_of_any_rank_and_lists_are_worked_on_by_the_host():
    one = encodings.mask_from_parents([-1, 0, 0], packed=True, validate=True)
    assert one.tolist() == [[1], [3], [5]]
    assert encodings.unpack_mask(one, 3).dtype == np.bool_
    out = np.zeros((3, 3), np.bool_)
    assert encodings.mask_from_parents([-1, 0, 0], out=out) is out
    assert out.tolist() == encodings.unpack_mask(one, 3).tolist()
    assert encodings.pack_mask(out, validate=True).tolist() == one.tolist()


@st.composite
def any_parents(draw: Any) -> np.ndarray:
    """Two requests of up to 12 nodes; padding may stand anywhere."""
    num_nodes = draw(st.integers(1, 12))
    trees = []
    for _ in range(2):
        tree = [-1]
        for i in range(1, num_nodes):
            live = [j for j in range(i) if j == 0 or tree[j] >= 0]
            tree.append(draw(st.sampled_from([-1, *live])))
        trees.append(tree)
    return np.array(trees, np.int32)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(any_parents())
def test_round_trips(parents):
    for call in calls(parents):
        call.check(call.run(validate=True))


# Contents that are no tree


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    st.integers(1, 9).flatmap(
        lambda n: st.lists(st.lists(st.integers(-3, 11), min_size=n, max_size=n), min_size=2, max_size=2)
    )
)
def test_parents_that_are_no_tree_count_as_padding(trees):
    parents = np.array(trees, np.int32)
    for call in calls(parents):
        call.check(call.run())
    parents = cuda.to_device(parents)
    seen = [[[j in lineage(tuple(t), i) for j in range(len(t))] for i in range(len(t))] for t in trees]
    assert to_host(encodings.mask_from_parents(parents)).tolist() == seen


BAD_PARENTS = {
    "cycle": ([-1, 2, 1, 0], r"parents\[1, 1\] is 2; it must be -1 or the index of an earlier node"),
    "itself": ([-1, 1, 0, 0], r"parents\[1, 1\] is 1; .* earlier node"),
    "below": ([-1, 0, -2, 0], r"parents\[1, 2\] is -2; .* earlier node"),
    "above": ([-1, 0, 0, 2**31 - 1], r"parents\[1, 3\] is 2147483647; .* earlier node"),
    "dangling": ([-1, 0, -1, 2], r"parents\[1, 3\] is 2; that node is padding"),
    "root": ([0, 0, 0, 0], r"parents\[1, 0\] is 0; the root's parent must be -1"),
}


@pytest.mark.parametrize("bad", BAD_PARENTS)
def test_validate_names_the_parent(bad):
    tree, message = BAD_PARENTS[bad]
    parents = np.array([[-1, 0, 0, 1], tree], np.int32)
    for call in (
        lambda **more: encodings.links_from_parents(parents, **more),
        lambda **more: encodings.sglang_links(parents, **more),
        lambda **more: encodings.depths_from_parents(parents, **more),
        lambda **more: encodings.retrieve_indices(parents, 3, **more),
        lambda **more: encodings.mask_from_parents(cuda.to_device(parents), **more),
    ):
        call()
        with pytest.raises(ValueError, match=message):
            call(validate=True)
    with pytest.raises(ValueError, match="parents"):
        encodings.mask_from_parents(parents, validate=True)


BAD_LINKS = {
    "cycle": ([1, 0, -1], [-1, -1, -1], r"first_child\[0, 1\] is 0; .* later node, below 3"),
    "sibling cycle": ([1, -1, -1], [-1, 2, 1], r"next_sibling\[0, 2\] is 1; .* later node"),
    "outside": ([1, -1, -1], [-1, 3, -1], r"next_sibling\[0, 1\] is 3; .* below 3"),
    "below": ([-2, -1, -1], [-1, -1, -1], r"first_child\[0, 0\] is -2"),
    "twice": ([1, 2, -1], [-1, 2, -1], r"node 2 of request 0 a child twice"),
    "loose": ([1, -1, -1], [2, -1, -1], r"next_sibling\[0, 0\] is 2; the node is the child of none"),
    "dangling": ([-1, 2, -1], [-1, -1, -1], r"first_child\[0, 1\] is 2; the node is the child of none"),
}


@pytest.mark.parametrize("bad", BAD_LINKS)
def test_validate_names_the_link(bad):
    first_child, next_sibling, message = BAD_LINKS[bad]
    for function, dtype in ((encodings.parents_from_links, np.int32), (encodings.parents_from_sglang, np.int64)):
        args = [np.array([x], dtype) for x in (first_child, next_sibling)]
        parents = function(*args)[0].tolist()
        assert all(-1 <= parent < i for i, parent in enumerate(parents))
        with pytest.raises(ValueError) as caught:
            function(*args, validate=True)
        text = str(caught.value).replace("retrieve_next_token", "first_child").replace("retrieve_", "")
        assert re.search(message, text), text


def test_links_that_lead_anywhere():
    rng = np.random.default_rng(11)
    for num_nodes in (1, 5, 33):
        links = rng.integers(-3, num_nodes + 3, (2, 4, num_nodes)).astype(np.int32)
        links[:, 3] = rng.choice([-(2**31), 2**31 - 1, -1, 0, num_nodes], (2, num_nodes))
        parents = encodings.parents_from_links(*links)
        assert np.all((parents >= -1) & (parents < np.arange(num_nodes)) | (parents == -1))
        tree = a_draft_tree(batch_of(num_nodes))
        for order in encodings.ORDERS:
            bad = replace(tree, first_child=links[0], next_sibling=links[1], parents=links[0][::-1].copy())
            _, permutation = encodings.relabel(bad, order)
            assert np.all((permutation >= 0) & (permutation < num_nodes))


def test_lengths_that_contradict_the_size_write_nothing_outside():
    mask = np.repeat(np.tri(3, dtype=np.bool_)[None], 3, axis=0)
    for lengths in ([9, 9, 9], [2**31 - 1] * 3, [-5, 0, -(2**31)], [4, 2**31 - 1, 0], [0, 0, 0], [1, 1, 2]):
        room = np.full(3 * (4 + 9) + 20, 7, np.uint8)
        out = room[10:-10].view(np.bool_)
        lengths = np.array(lengths, np.int32)
        encodings.full_mask(mask, lengths, 4, out=out)
        assert (room[:10] == 7).all() and (room[-10:] == 7).all()
        back = encodings.tree_mask_from_full_mask(out, lengths, 3)
        assert back.shape == (3, 3, 3)
        used = 3 * int(np.maximum(lengths, 0).sum(dtype=np.int64)) + 27
        if used <= out.size:
            assert np.array_equal(back, mask)
            assert (room[10 + used :] == 7).all()


def test_a_mask_of_changing_lengths_stands_at_the_beginning():
    mask = np.repeat(np.tri(3, dtype=np.bool_)[None], 2, axis=0)
    out = np.zeros(3 * (10 + 6), np.bool_)
    for lengths in ([4, 6], [1, 0]):
        lengths = np.array(lengths, np.int32)
        expected = encodings.full_mask(mask, lengths, int(lengths.sum()))
        assert np.array_equal(encodings.full_mask(mask, lengths, 10, out=out)[: expected.size], expected)
        assert np.array_equal(encodings.tree_mask_from_full_mask(out, lengths, 3, validate=True), mask)


def test_other_contents_are_clamped():
    depths = np.array([[0, -7, 9, 2]], np.int32)
    assert encodings.positions(np.array([-3], np.int32), depths).tolist() == [[0, 0, 3, 2]]
    assert encodings.positions(np.array([2**31 - 1], np.int32), depths).tolist() == [[2**31 - 1] * 4]
    mask = np.tri(3, dtype=np.bool_)[None]
    bias = encodings.dense_bias(mask, cache_seqlens=np.array([99], np.int32), max_seqlen=2)
    assert np.array_equal(bias == 0, np.hstack([np.ones((3, 2)), mask[0]])[None] == 1)
    deep = encodings.retrieve_indices(np.array([[-1, 0, 1, 2, 1]], np.int32), 1, max_leaves=1)
    assert deep.tolist() == [[[0, 1]]]
    mask = np.full((1, 3, 1), 0xFFFFFFFF, np.uint32)
    assert encodings.bitpacked_mask(mask).tolist() == [7, 7, 7]
    assert encodings.tree_mask_from_tensorrt(mask.view(np.int32), packed=True).tolist() == [[[7]] * 3]
    odd = np.array([[[-0.0, np.nan, -np.inf], [np.finfo(np.float32).min, 0, 1], [np.inf, 0, 0]]], np.float32)
    seen = encodings.tree_mask_from_bias(odd)
    assert seen.tolist() == [[[True, False, False], [False, True, False], [False, True, True]]]
    assert encodings.inverse_permutation(np.array([[2, 2, 9, -1]], np.int32)).tolist() == [[-1, -1, 0, -1]]


def octets(*shape: int) -> np.ndarray:
    """A bool array with a byte of 2 at its end."""
    made = np.zeros(shape, np.uint8)
    made.reshape(-1)[-1] = 2
    return made.view(np.bool_)


def test_validate_names_other_contents():
    i32 = functools.partial(np.array, dtype=np.int32)
    words = np.array([[[1], [2], [8]]], np.uint32)
    chain = np.tri(3, dtype=np.bool_)[None]
    paths = [[0, 1, -1], [0, 2, 3]]
    for name, args, options, message in (
        ("positions", (i32([1, -1]), i32([[0], [0]])), {}, r"cache_seqlens\[1\] is -1; .* between 0"),
        ("positions", (i32([1]), i32([[0, 2]])), {}, r"depths\[0, 1\] is 2; it must be between 0 and 1"),
        ("positions", (i32([2**31 - 1]), i32([[0, 1]])), {}, r"cache_seqlens\[0\] is 2147483647; .* 2147483646"),
        ("unpack_mask", (words, 3), {}, r"words\[0, 2\] is 8; .* no bit at or past node 3"),
        ("qlen_only_mask", (words,), {}, r"tree_mask\[0, 2\] is 8"),
        ("tensorrt_mask", (words,), {}, r"tree_mask\[0, 2\] is 8"),
        ("bitpacked_mask", (words,), {}, r"tree_mask\[0, 2\] is 8"),
        ("dense_bias", (words,), {}, r"tree_mask\[0, 2\] is 8"),
        ("full_mask", (words, i32([0]), 0), {}, r"tree_mask\[0, 2\] is 8"),
        ("parents_from_mask", (words,), {}, r"tree_mask\[0, 2\] is 8"),
        ("tree_mask_from_tensorrt", (words.view(np.int32),), {}, r"words\[0, 2\] is 8"),
        ("tree_mask_from_bitpacked", (words.astype(np.uint8).reshape(-1), 3), {}, r"words\[2\] is 8"),
        ("pack_mask", (octets(1, 2, 2),), {}, r"mask\[0, 1, 1\] is 2; a bool must be 0 or 1"),
        ("parents_from_mask", (octets(1, 2, 2),), {}, r"tree_mask\[0, 1, 1\] is 2"),
        ("tree_mask_from_qlen_only", (octets(4), 2), {}, r"mask\[3\] is 2"),
        ("tree_mask_from_full_mask", (octets(6), i32([1]), 2), {}, r"mask\[5\] is 2"),
        ("tree_mask_from_full_mask", (octets(4), i32([1]), 2), {}, r"mask holds 4 elements; these lengths need 6"),
        ("tree_mask_from_full_mask", (octets(4), i32([-1]), 2), {}, r"cache_seqlens\[0\] is -1"),
        ("full_mask", (chain, i32([2]), 3), {}, r"seqlens_sum is 3; cache_seqlens sums up to 2"),
        ("full_mask", (chain, i32([-2]), 3), {}, r"cache_seqlens\[0\] is -2"),
        ("parents_from_mask", (chain.swapaxes(1, 2).copy(),), {}, r"tree_mask\[0, 0\] sees \[0, 1, 2\]; .* its parent"),
        ("parents_from_mask", (chain & ~np.eye(3, k=-2, dtype=np.bool_),), {}, r"tree_mask\[0, 2\] sees \[1, 2\]"),
        ("parents_from_mask", (np.eye(3, dtype=np.bool_)[None],), {}, r"tree_mask\[0, 1\] sees \[1\]"),
        ("dense_bias", (chain,), {"cache_seqlens": i32([3]), "max_seqlen": 2}, r"cache_seqlens\[0\] is 3; .* 0 and 2"),
        ("tree_mask_from_bias", (np.full((1, 1, 1), -1.0, np.float16),), {}, r"bias\[0, 0, 0\] is -1.0; .* 0 or -inf"),
        ("tree_mask_from_bias", (np.full((1, 1, 1), np.nan, np.float32),), {}, r"bias\[0, 0, 0\] is nan"),
        ("retrieve_indices", (i32([[-1, 0, 1]]), 1), {}, r"parents\[0, 2\] is 1; .* deeper than max_depth = 1"),
        ("retrieve_indices", (i32([[-1, 0, 0]]), 1), {"max_leaves": 1}, r"parents\[0\] has 2 leaves; max_leaves is 1"),
        ("parents_from_retrieve_indices", (i32([paths]), 3), {}, r"paths\[0, 1, 2\] is 3; .* below 3"),
        ("parents_from_retrieve_indices", (i32([[[1, 2]]]), 3), {}, r"paths\[0, 0, 0\] is 1; .* begin at the root"),
        ("parents_from_retrieve_indices", (i32([[[0, 2, 1]]]), 3), {}, r"paths\[0, 0, 2\] is 1; .* smaller index"),
        ("parents_from_retrieve_indices", (i32([[[0, -1, 2]]]), 3), {}, r"paths\[0, 0, 2\] is 2; .* smaller index"),
        (
            "parents_from_retrieve_indices",
            (i32([[[0, 2, -1], [0, 1, 2]]]), 3),
            {},
            r"paths\[0, 1, 2\] is 2, here a child of 1, before of 0",
        ),
        ("inverse_permutation", (i32([[0, 2]]),), {}, r"permutation\[0, 1\] is 2; .* between 0 and 1"),
        ("inverse_permutation", (i32([[0, 1], [1, 1]]),), {}, r"permutation\[1\] holds a node twice"),
    ):
        function = getattr(encodings, name)
        function(*args, **options)
        with pytest.raises(ValueError, match=message):
            function(*args, **options, validate=True)
    idle = np.zeros((2, 3, 1), np.uint32)
    assert encodings.parents_from_mask(idle, validate=True).tolist() == [[-1] * 3] * 2, "an idle request sees nothing"


# Other orders


def a_draft_tree(parents: np.ndarray) -> DraftTree:
    """A tree for each request, padding behind the last node; token 0 stands among the tokens."""
    batch, num_nodes = parents.shape
    live = (parents >= 0) | (np.arange(num_nodes) == 0)
    rng = np.random.default_rng(num_nodes)
    tokens = np.where(live, rng.permutation(batch * num_nodes).reshape(batch, num_nodes), -1).astype(np.int32)
    known = {call.name: call for call in calls(parents) if call.options in ({}, {"packed": True})}
    first_child, next_sibling = known["links_from_parents"].expected
    return DraftTree(
        tokens=tokens,
        parents=parents,
        depths=known["depths_from_parents"].expected,
        scores=np.where(live, -rng.random((batch, num_nodes)), -np.inf),
        num_nodes=live.sum(axis=1).astype(np.int32),
        tree_mask=known["mask_from_parents"].expected,
        first_child=first_child,
        next_sibling=next_sibling,
        input_ids=np.where(live, tokens, tokens[:, :1]).astype(np.int32),
        max_depth=num_nodes,
    )


def fields_of(tree: DraftTree) -> dict[str, np.ndarray]:
    return {name: to_host(getattr(tree, name)) for name in DTYPES}


def of_kind(tree: DraftTree, kind: str) -> DraftTree:
    return replace(tree, **{name: TO_KIND[kind](x) for name, x in fields_of(tree).items()})


def relabelled(tree: DraftTree, order: str) -> tuple[DraftTree, np.ndarray]:
    """By definition: node by node, each field of its own."""
    batch, num_nodes = tree.parents.shape
    permutation = np.tile(np.arange(num_nodes, dtype=np.int32), (batch, 1))
    parents = np.full_like(tree.parents, -1)
    for b, old_parents in enumerate(map(tuple, tree.parents.tolist())):
        found = depth_first(old_parents) if order == "depth_first" else breadth_first(old_parents)
        permutation[b, : len(found)] = found
        for new, old in enumerate(found[1:], 1):
            parents[b, new] = found.index(old_parents[old])
    moved = {
        name: np.take_along_axis(getattr(tree, name), permutation, axis=1)
        for name in ("tokens", "depths", "scores", "input_ids")
    }
    whole = a_draft_tree(parents)
    return replace(whole, **moved, num_nodes=tree.num_nodes, max_depth=tree.max_depth), permutation


@pytest.mark.parametrize("order", encodings.ORDERS)
@pytest.mark.parametrize("num_nodes", [1, 2, 9, 33, 65])
def test_relabel(num_nodes, order):
    tree = a_draft_tree(batch_of(num_nodes))
    expected, expected_permutation = relabelled(tree, order)
    out = replace(tree, **{name: np.full_like(x, 77) for name, x in fields_of(tree).items()})
    permutation = np.full_like(tree.parents, 77)
    results = encodings.relabel(tree, order, out=out, permutation=permutation, validate=True)
    assert results[0] is out and results[1] is permutation
    np.testing.assert_array_equal(permutation, expected_permutation)
    for name, x in fields_of(expected).items():
        np.testing.assert_array_equal(getattr(out, name), x, name)
    again, same = encodings.relabel(out, order, validate=True)
    assert np.array_equal(same, np.tile(np.arange(num_nodes), (4, 1))), "what is in order stays"
    np.testing.assert_array_equal(again.tokens, out.tokens)
    inverse = encodings.inverse_permutation(permutation, validate=True)
    np.testing.assert_array_equal(np.take_along_axis(out.tokens, inverse, axis=1), tree.tokens)
    np.testing.assert_array_equal(
        np.take_along_axis(permutation, inverse, axis=1), np.tile(np.arange(num_nodes), (4, 1))
    )


def test_orders_by_hand():
    #      0
    #     / \
    #    1   2
    #   / \   \
    #  4   5   3
    tree = a_draft_tree(np.array([[-1, 0, 0, 2, 1, 1, -1]], np.int32))
    deep, permutation = encodings.relabel(of_kind(tree, "numba"), "depth_first")
    assert kind_of(permutation) == kind_of(deep.tokens) == "numba"
    assert to_host(permutation).tolist() == [[0, 1, 4, 5, 2, 3, 6]]
    assert to_host(deep.parents).tolist() == [[-1, 0, 1, 1, 0, 4, -1]]
    wide, permutation = encodings.relabel(tree, "breadth_first")
    assert permutation.tolist() == [[0, 1, 2, 4, 5, 3, 6]]
    assert wide.parents.tolist() == [[-1, 0, 0, 1, 1, 2, -1]]
    assert wide.mask_bool().sum() == tree.mask_bool().sum()


def test_relabel_of_no_requests():
    for order in encodings.ORDERS:
        made, permutation = encodings.relabel(a_draft_tree(np.zeros((0, 3), np.int32)), order, validate=True)
        assert permutation.shape == made.tokens.shape == (0, 3)


def test_validate_names_what_is_wrong_with_a_tree():
    tree = a_draft_tree(np.array([[-1, 0, 0, 1, -1]], np.int32))
    i32 = functools.partial(np.array, dtype=np.int32)
    for changes, message in (
        ({"parents": i32([[-1, 0, 0, 4, -1]])}, r"tree.parents\[0, 3\] is 4; .* earlier node"),
        ({"parents": i32([[-1, 0, -1, 1, 0]])}, r"tree.parents\[0, 2\] is -1; it must be -1 behind num_nodes"),
        ({"parents": i32([[-1, 0, 0, 2, -1]])}, r"tree.parents\[0, 3\] is 2; by the links it must be 1"),
        ({"num_nodes": i32([0])}, r"tree.num_nodes\[0\] is 0; it must be between 1 and 5"),
        ({"num_nodes": i32([3])}, r"tree.parents\[0, 3\] is 1; it must be -1 behind num_nodes"),
        ({"first_child": i32([[1, 0, -1, -1, -1]])}, r"tree.first_child\[0, 1\] is 0; .* later node"),
        ({"first_child": i32([[1, -1, -1, -1, -1]])}, r"tree.parents\[0, 3\] is 1; no link leads to this node"),
    ):
        bad = replace(tree, **changes)
        for order in encodings.ORDERS:
            encodings.relabel(bad, order)
            with pytest.raises(ValueError, match=message):
                encodings.relabel(bad, order, validate=True)


# Errors, each before any launch


def test_errors(monkeypatch):
    def launched(*args: Any, **options: Any) -> None:
        raise AssertionError("a kernel was launched")

    parents = np.array([[-1, 0, 0], [-1, 0, 1]], np.int32)
    mask, words = encodings.mask_from_parents(parents), encodings.mask_from_parents(parents, packed=True)
    lengths = np.array([1, 2], np.int32)
    first_child, next_sibling = encodings.links_from_parents(parents)
    tree = a_draft_tree(parents)
    locked = np.zeros_like(parents)
    locked.flags.writeable = False
    monkeypatch.setattr(encodings, "launch", launched)
    e = encodings
    wide = np.zeros((1, 33, 2), np.uint32)
    i64 = parents.astype(np.int64)
    for call, exception, message in (
        (lambda: e.links_from_parents([[-1, 0]]), TypeError, "parents is a builtins.list"),
        (lambda: e.links_from_parents(i64), TypeError, "parents has dtype int64; it must be int32"),
        (lambda: e.links_from_parents(parents[0]), ValueError, r"parents has shape \[3\]; it must be \[B, Q\]"),
        (lambda: e.links_from_parents(parents[:, :0]), ValueError, r"parents .* has Q = 0; it must be at least 1"),
        (lambda: e.links_from_parents(np.zeros((65536, 1), np.int32)), ValueError, "has B = 65536; .* at most 65535"),
        (lambda: e.links_from_parents(parents, out=locked), TypeError, r"out is a ndarray; .* \(first_child, next_sib"),
        (lambda: e.links_from_parents(parents, out=(locked,)), TypeError, "out is a sequence of 1; it must be"),
        (lambda: e.links_from_parents(parents, out=(locked, locked)), ValueError, "out's first_child is read-only"),
        (lambda: e.links_from_parents(parents, out=(i64, i64)), TypeError, "out's first_child has dtype int64"),
        (
            lambda: e.links_from_parents(parents, out=(tree.depths, tree.depths)),
            ValueError,
            "out's next_sibling overlaps out's first_child",
        ),
        (lambda: e.links_from_parents(parents, out=(parents, tree.depths)), ValueError, "first_child overlaps parents"),
        (lambda: e.sglang_links(parents, out=(i64, i64, i64)), ValueError, "retrieve_next_token overlaps out's retr"),
        (lambda: e.sglang_links(parents, out=()), TypeError, "out is a sequence of 0; .*retrieve_index"),
        (lambda: e.parents_from_links(first_child, next_sibling[:1]), ValueError, r"next_sibling .* \[2, 3\]"),
        (lambda: e.parents_from_sglang(first_child, next_sibling), TypeError, "retrieve_next_token .* must be int64"),
        (lambda: e.depths_from_parents(parents, out=parents), ValueError, "out overlaps parents"),
        (lambda: e.depths_from_parents(parents, out=locked[:1]), ValueError, r"out has shape \[1, 3\]; .*\[2, 3\]"),
        (
            lambda: e.positions(lengths[:1], parents),
            ValueError,
            r"cache_seqlens has shape \[1\]; it must be \[B\] = \[2",
        ),
        (lambda: e.positions(lengths.astype(np.int64), parents), TypeError, "cache_seqlens has dtype int64"),
        (lambda: e.parents_from_mask(mask[0]), ValueError, r"tree_mask has shape \[3, 3\]; it must be \[B, Q, Q\] or"),
        (lambda: e.parents_from_mask(mask[:, :2]), ValueError, r"tree_mask has shape \[2, 2, 3\]; .* \[2, 2, 2\]"),
        (lambda: e.parents_from_mask(mask.astype(np.uint8)), TypeError, "tree_mask has dtype uint8"),
        (lambda: e.parents_from_mask(wide[:, :32]), ValueError, r"tree_mask has shape \[1, 32, 2\]; .* \[1, 32, 1\]"),
        (lambda: e.mask_from_parents(parents, out=locked), TypeError, "out has dtype int32; it must be bool"),
        (lambda: e.mask_from_parents(parents, packed=True, out=words[:1]), ValueError, "out has shape"),
        (lambda: e.mask_from_parents(cuda.to_device(i64)), TypeError, "parents has dtype int64"),
        (lambda: e.pack_mask(cuda.to_device(words)), TypeError, "mask has dtype uint32; it must be bool"),
        (lambda: e.unpack_mask(cuda.to_device(words), 4), ValueError, "words has shape"),
        (lambda: e.unpack_mask(words, True), TypeError, "num_nodes is True; it must be an integer"),
        (lambda: e.full_mask(mask, lengths, 3.0), TypeError, "seqlens_sum is 3.0; it must be an integer"),
        (lambda: e.full_mask(mask, lengths, -1), ValueError, "seqlens_sum is -1; it must be between 0"),
        (lambda: e.full_mask(mask, lengths, 3, out=mask.reshape(-1)), ValueError, r"out has shape \[18\]; .* \[27\]"),
        (lambda: e.tree_mask_from_full_mask(mask.reshape(-1), lengths, 4), ValueError, "mask holds 18 .* at least 32"),
        (lambda: e.tree_mask_from_qlen_only(mask.reshape(-1), 4), ValueError, r"a multiple of Q \* Q = 16"),
        (lambda: e.tree_mask_from_qlen_only(mask, 3), ValueError, r"mask has shape \[2, 3, 3\]; it must be \[n\]"),
        (lambda: e.bitpacked_mask(wide), ValueError, "num_nodes is 33; .* at most 32. .* holds any number"),
        (lambda: e.tree_mask_from_bitpacked(np.zeros(33, np.uint32), 33), ValueError, "num_nodes is 33; .* any number"),
        (lambda: e.tree_mask_from_bitpacked(np.zeros(9, np.uint8), 9), TypeError, "words .* it must be uint16"),
        (lambda: e.tree_mask_from_bitpacked(np.zeros(9, np.uint8), 4), ValueError, "a multiple of Q = 4"),
        (lambda: e.tree_mask_from_tensorrt(words), TypeError, "words has dtype uint32; it must be int32"),
        (lambda: e.dense_bias(mask, "float64"), TypeError, "dtype is 'float64'"),
        (lambda: e.dense_bias(mask, out=np.zeros((2, 3, 3))), TypeError, "out has dtype float64; it must be float32"),
        (lambda: e.dense_bias(mask, max_seqlen=3), ValueError, "cache_seqlens is None; .* together"),
        (lambda: e.dense_bias(mask, cache_seqlens=lengths), ValueError, "max_seqlen is None; .* together"),
        (lambda: e.dense_bias(mask, cache_seqlens=lengths, max_seqlen=-1), ValueError, "max_seqlen is -1"),
        (lambda: e.tree_mask_from_bias(np.zeros((2, 3, 4), np.float32)), ValueError, r"bias .* must be \[B, Q, Q\]"),
        (lambda: e.tree_mask_from_bias(mask), TypeError, "bias has dtype bool"),
        (lambda: e.retrieve_indices(parents, -1), ValueError, "max_depth is -1; it must be between 0"),
        (lambda: e.retrieve_indices(parents, 2, max_leaves=0), ValueError, "max_leaves is 0; it must be between 1"),
        (lambda: e.parents_from_retrieve_indices(mask, 3), TypeError, "paths has dtype bool; .* int32 or int64"),
        (lambda: e.parents_from_retrieve_indices(i64[:, :, None][..., :0], 3), ValueError, "has no column"),
        (lambda: e.parents_from_retrieve_indices(i64[:, :, None], 0), ValueError, "num_nodes is 0"),
        (lambda: e.relabel(parents, "depth_first"), TypeError, "tree is a ndarray; it must be a DraftTree"),
        (lambda: e.relabel(tree, "depth_first", out=parents), TypeError, "out is a ndarray; it must be a DraftTree"),
        (lambda: e.relabel(tree, "preorder"), ValueError, "order is 'preorder'; .* depth_first, breadth_first"),
        (lambda: e.relabel(tree, "depth_first", out=tree), ValueError, "out.tokens overlaps tree.tokens"),
        (lambda: e.relabel(tree, "depth_first", out=replace(tree, max_depth=1)), ValueError, "out.max_depth is 1"),
        (lambda: e.relabel(tree, "depth_first", permutation=tree.depths), ValueError, "permutation overlaps tree.dep"),
        (lambda: e.relabel(replace(tree, scores=lengths), "depth_first"), TypeError, "tree.scores has dtype int32"),
        (lambda: e.inverse_permutation(i64), TypeError, "permutation has dtype int64"),
        (lambda: e.inverse_permutation(parents, out=parents), ValueError, "out overlaps permutation"),
    ):
        with pytest.raises(exception, match=message):
            call()


# On a GPU: every kind of array, the caller's stream, graphs

each_device_kind = pytest.mark.parametrize("kind", ["torch", "cupy", "numba"])


@gpu
@needs_gpu
@each_device_kind
@pytest.mark.parametrize("num_nodes", [9, 33, 65])
def test_every_kind_of_array_on_a_gpu(num_nodes, kind):
    for call in solved(num_nodes):
        call.check(call.run(kind), kind)
        out = tuple(TO_KIND[kind](np.full_like(x, 1)) for x in call.results)
        actual = call.run(kind, out=out if len(out) > 1 else out[0], validate=True)
        call.check(actual, kind)
    tree = a_draft_tree(batch_of(num_nodes))
    for order in encodings.ORDERS:
        expected, expected_permutation = relabelled(tree, order)
        made, permutation = encodings.relabel(of_kind(tree, kind), order, validate=True)
        assert kind_of(permutation) == kind_of(made.tokens) == kind
        np.testing.assert_array_equal(to_host(permutation), expected_permutation)
        for name, x in fields_of(expected).items():
            np.testing.assert_array_equal(to_host(getattr(made, name)), x, name)


@gpu
@needs_gpu
def test_trees_of_1025_nodes_on_a_gpu():
    rng = np.random.default_rng(3)
    parents = np.array([a_tree(shape, 1025, 1025, rng) for shape in ("random", "chain", "star")], np.int32)
    expected = encodings.mask_from_parents(parents)
    on_device = cuda.to_device(parents)
    mask = encodings.mask_from_parents(on_device)
    np.testing.assert_array_equal(to_host(mask), expected)
    for back in (
        encodings.parents_from_mask(mask),
        encodings.parents_from_links(*encodings.links_from_parents(on_device)),
        encodings.parents_from_sglang(*encodings.sglang_links(on_device)[1:]),
        encodings.parents_from_retrieve_indices(encodings.retrieve_indices(on_device, 1024), 1025),
        encodings.parents_from_mask(encodings.tree_mask_from_bias(encodings.dense_bias(mask, "float16"))),
    ):
        np.testing.assert_array_equal(to_host(back), parents)


@gpu
@needs_gpu
def test_a_graph_replays_every_conversion_with_other_trees():
    torch = library("torch")
    first, later = solved(9), solved(9, seed=1)
    tree, later_tree = (a_draft_tree(batch_of(9, seed)) for seed in (0, 1))
    static = of_kind(tree, "torch")
    jobs = []
    for call in first:
        out = tuple(TO_KIND["torch"](np.zeros_like(x)) for x in call.results)
        on_torch = {n: TO_KIND["torch"](x) if isinstance(x, np.ndarray) else x for n, x in call.options.items()}
        args = [TO_KIND["torch"](x) if isinstance(x, np.ndarray) else x for x in call.args]
        jobs.append((call, args, on_torch, out))
    moved = DraftTree.empty(static.tokens, 4, 8, tree.max_depth)
    permutation = torch.zeros((4, 9), dtype=torch.int32, device="cuda")

    def run() -> None:
        for call, args, options, out in jobs:
            getattr(encodings, call.name)(*args, **options, out=out if len(out) > 1 else out[0])
        encodings.relabel(static, "breadth_first", out=moved, permutation=permutation)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replayed = []
    for (call, args, options, out), other in zip(jobs, later, strict=True):
        same = [getattr(x, "shape", x) == getattr(y, "shape", y) for x, y in zip(call.args, other.args, strict=True)]
        if not all(same) or [x.shape for x in call.results] != [x.shape for x in other.results]:
            continue  # a size that depends on the tree: depth and number of leaves
        replayed.append((other, out))
        for target, source in zip([*args, *options.values()], [*other.args, *other.options.values()], strict=True):
            if isinstance(source, np.ndarray):
                copy_bits(target, TO_KIND["torch"](source))
    for name, x in fields_of(later_tree).items():
        copy_bits(getattr(static, name), TO_KIND["torch"](x))
    graph.replay()
    torch.cuda.synchronize()
    assert len(replayed) > 20
    for call, out in replayed:
        call.check(out if len(out) > 1 else out[0], "torch")
    expected, expected_permutation = relabelled(later_tree, "breadth_first")
    np.testing.assert_array_equal(to_host(permutation), expected_permutation)
    np.testing.assert_array_equal(to_host(moved.tree_mask), expected.tree_mask)


def copy_bits(target: Any, source: Any) -> None:
    """Not every dtype can be copied on every version: same-sized integers can."""
    torch = library("torch")
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[source.element_size()]
    target.view(carrier).copy_(source.view(carrier))


@gpu
@needs_gpu
def test_nothing_waits_for_the_gpu():
    torch = library("torch")
    parents = TO_KIND["torch"](batch_of(33))
    out = torch.empty((4, 33, 2), dtype=torch.uint32, device="cuda")
    encodings.mask_from_parents(parents, packed=True, out=out)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        encodings.mask_from_parents(parents, packed=True, out=out)
        done = torch.cuda.Event()
        done.record(stream)
        assert not done.query(), "the call waited for the GPU"
    stream.synchronize()
