"""accept_sampled: kernel and mirror against the oracle, bit for bit; and the proof that sampling is lossless.

The proof enumerates: a node's draw has finitely many outcomes, each an interval of its uniform. All outcomes of all
nodes are tried, in the middle of the intervals, and weighed with the exact lengths; the law of what is emitted is then
the target's own. Samplers that are not lossless fail the same check.

The kernel runs in the simulator, or on a GPU where there is one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from accept_cases import (
    FIELDS,
    INF,
    NAN,
    PARTS,
    STAGED,
    Law,
    changed,
    check_accepted,
    check_contract,
    check_sampled,
    chi_square_survival,
    chi_square_test,
    drafted_tree,
    host_arrays,
    make_tree,
    mirrored_sampled,
    random_law,
    rows_of_law,
    spoiled,
)
from cases import BFLOAT16, cast
from numba import cuda
from test_accept_greedy import PATH, SHARED_ERRORS, TREE, check_refusal
from test_verify_attention import LAYOUTS, big_endian, change, misaligned, value
from tree_cases import FLOAT_NAMES
from wrong_accept import SAMPLED_MISTAKES, build

import ddtree_numba as dd
from ddtree_numba.accept import sampled
from ddtree_numba.device import philox
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.tree.draft_tree import DTYPES
from refs import accept

only_simulated = pytest.mark.skipif(not SIMULATOR, reason="wrong kernels run in the simulator alone")
# In the simulator NumPy says so when an entry that is no probability is made a weight, which nothing reads.
ignores_casts = pytest.mark.filterwarnings(
    "ignore:.*invalid value encountered in cast:RuntimeWarning",
    "ignore:.*overflow encountered in scalar add:RuntimeWarning",
)
each_dtype = pytest.mark.parametrize("dtype", FLOAT_NAMES)
BELOW_ONE = 1 - 2.0**-24


def random_probs(rng: np.random.Generator, *shape: int, dtype: str = "float32", favoured: Any = None) -> np.ndarray:
    """Laws with a few likely tokens, some of no probability; ``favoured`` [B, Q] get most of it."""
    x = rng.random(shape) ** 8
    x[rng.random(shape) < 0.2] = 0
    x[..., 0] += 1e-3
    if favoured is not None:
        share = 4 * x.sum(axis=2) * (rng.random(shape[:2]) < 0.8)
        x += share[..., None] * (np.arange(shape[2]) == favoured[..., None])
    return cast((x / x.sum(axis=2, keepdims=True)).astype(np.float32), dtype)


def favourites(rng: np.random.Generator, tree: dd.DraftTree, vocabulary: int) -> np.ndarray:
    """For each node the token of one of its children, or any."""
    chosen = rng.integers(0, vocabulary, tree.tokens.shape)
    for b, count in enumerate(tree.num_nodes.tolist()):
        for i in rng.permutation(np.arange(1, max(count, 1))):
            chosen[b, tree.parents[b, i]] = tree.tokens[b, i]
    return chosen


def problem_of(seed: int, batch: int, tree_budget: int, vocabulary: int, dtype: str = "float32") -> tuple[Any, Any]:
    """A drafted tree, and laws that favour its tokens."""
    rng = np.random.default_rng(seed)
    tree = drafted_tree(rng, batch, tree_budget, vocabulary=min(vocabulary, 4))
    shape = batch, tree_budget + 1, vocabulary
    return tree, random_probs(rng, *shape, dtype=dtype, favoured=favourites(rng, tree, vocabulary))


def random_draws(rng: np.random.Generator, batch: int, num_nodes: int, kind: str) -> dict[str, Any]:
    """Randomness of each kind that there is."""
    if kind.startswith("float"):
        return {"uniforms": rng.random((batch, num_nodes)).astype(kind)}
    keys = rng.integers(0, 2**64 - 1, batch, dtype=np.uint64, endpoint=True)
    seeds = keys.view(np.int64) if "signed" in kind else keys
    dtype = np.int32 if "int32" in kind else np.int64
    if "by_node" in kind:
        return {"seeds": seeds, "positions": rng.integers(-9, 10**6, (batch, num_nodes)).astype(dtype)}
    return {"seeds": seeds, "positions": rng.integers(-9, 10**6, batch).astype(dtype)}


KINDS_OF_DRAWS = (
    "float32", "float64", "int32", "signed_int32_by_node", "int64_by_node", "signed_int64",
)  # fmt: skip


def check_both(tree: dd.DraftTree, probs: np.ndarray, stop_tokens: Any = None, **draws: Any) -> dd.Accepted:
    """Kernel and mirror against the oracle; the kernel writes over what no walk gives."""
    found = mirrored_sampled(tree, probs, stop_tokens=stop_tokens, **draws)
    check_sampled(found, tree, probs, stop_tokens, **draws)
    out = spoiled(probs.shape[0], tree.max_depth)
    check_accepted(dd.accept_sampled(tree, probs, stop_tokens=stop_tokens, out=out, **draws), found)
    return found


def one_root(rows: Any, dtype: str = "float32") -> tuple[dd.DraftTree, np.ndarray]:
    """A request for each row, of a root alone."""
    probs = cast(np.array(rows, np.float32)[:, None], dtype)
    return make_tree(*[([-1], [0])] * len(rows)), probs


# Random problems


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (1, "float32"), (7, "float32"), (37, "float16"), (37, "bfloat16"), (64, "float32"), (64, "bfloat16"),
        (64, "float16"), (64, "uint16"), (1000, "bfloat16"), (4099, "float32"),
    ],
)  # fmt: skip
def test_kernel_on_drafted_trees(vocabulary, dtype):
    large = vocabulary >= 1000
    tree, probs = problem_of(vocabulary, 1 if large else 3, 2 if large else STAGED, vocabulary, dtype)
    draws = random_draws(np.random.default_rng(0), *probs.shape[:2], KINDS_OF_DRAWS[vocabulary % 6])
    found = check_both(tree, probs, **draws)
    check_contract(found, tree)
    assert vocabulary == 1 or large or found.num_accepted.max() >= 3, "no walk was long"


@pytest.mark.parametrize("kind", KINDS_OF_DRAWS)
def test_kernel_with_every_kind_of_randomness(kind):
    tree, probs = problem_of(3, 2, 8, 8)
    check_both(tree, probs, [2], **random_draws(np.random.default_rng(1), 2, 9, kind))


@pytest.mark.parametrize("seed", range(8))
def test_mirror_on_hundreds_of_drafted_trees(seed):
    rng = np.random.default_rng(100 + seed)
    lengths, flags = [], []
    for n in range(8):
        vocabulary, num_nodes = int(rng.choice([1, 2, 5, 7, 37, 64, 130])), int(rng.integers(1, 40))
        tree, probs = problem_of(int(rng.integers(2**32)), 8, num_nodes - 1, vocabulary, FLOAT_NAMES[n % 4])
        draws = random_draws(rng, 8, num_nodes, KINDS_OF_DRAWS[n % 6])
        stop_tokens = [None, 1, rng.integers(-1, 9, 3).tolist(), rng.integers(-1, 5, (8, 2))][n % 4]
        found = mirrored_sampled(tree, probs, stop_tokens=stop_tokens, **draws)
        check_sampled(found, tree, probs, stop_tokens, **draws)
        check_contract(found, tree)
        lengths += found.num_accepted.tolist()
        flags += found.flags.tolist()
    assert len(set(lengths)) >= 4, "all walks are of few lengths"
    assert set(flags) == {0, dd.STOPPED}


def test_mirror_on_long_rows():
    for vocabulary, dtype in ((4099, "float32"), (4099, "bfloat16"), (20_000, "float16"), (163_840, "float32")):
        tree, probs = problem_of(vocabulary, 2, 3, vocabulary, dtype)
        draws = random_draws(np.random.default_rng(2), 2, 4, "signed_int64")
        check_sampled(mirrored_sampled(tree, probs, **draws), tree, probs, **draws)


# One draw


@each_dtype
def test_ends_of_the_uniforms(dtype):
    # The first and the last token have none of the probability.
    rows = [[0, 0.5, 0, 0.5, 0]] * 9
    uniforms = np.array([[0.0], [-0.0], [2.0**-30], [0.5 - 2.0**-25], [0.5], [BELOW_ONE], [1.0], [7.0], [1e30]])
    tree, probs = one_root(rows, dtype)
    for kind, run in ((np.float64, check_both), (np.float32, mirrored_sampled)):
        found = run(tree, probs, uniforms=uniforms.astype(kind))
        assert found.bonus_tokens.tolist() == [1, 1, 1, 1, 3, 3, 3, 3, 3]
        assert not found.flags.any()


@pytest.mark.parametrize("uniform", [INF, 1e300])
def test_any_uniform_from_1_on_is_the_largest(uniform):
    tree, probs = one_root([[0, 0.5, 0.5, 0]])
    draws = np.full((1, 1), uniform)
    check_sampled(dd.accept_sampled(tree, probs, uniforms=draws), tree, probs, uniforms=draws)
    check_sampled(mirrored_sampled(tree, probs, uniforms=draws), tree, probs, uniforms=draws)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_uniforms_that_are_none(kind):
    tree, probs = one_root([[0.5, 0.5]] * 6)
    uniforms = np.array([[NAN], [-1.0], [-1e-30], [-INF], [-BELOW_ONE], [0.75]]).astype(kind)
    found = check_both(tree, probs, uniforms=uniforms)
    assert found.flags.tolist() == [dd.BAD_TARGET] * 5 + [0]
    assert found.bonus_tokens.tolist() == [-1] * 5 + [1]
    assert found.num_accepted.tolist() == [1] * 6


def test_all_64_bits_of_a_uniform_count():
    # The first token has 2**-44 of 1: half of it is 2**-45, three halves are more than it has.
    tree, probs = one_root([[2.0**-44, 0.5, 0.5]] * 4)
    uniforms = np.array([[0.99], [1.01], [0.4999999], [1.5]]) * 2.0**-44
    found = check_both(tree, probs, uniforms=uniforms)
    assert found.bonus_tokens.tolist() == [0, 1, 0, 1]


def test_laws_need_not_sum_to_1():
    # 1 : 1 : 0 : 2, with sums 4, 1/1000 and 2**-42.
    rows = [[1.0, 1.0, 0.0, 1.0, 1.0], [2.5e-4, 2.5e-4, 0.0, 5e-4, 0.0], [2.0**-44, 2.0**-44, 0, 2.0**-43, 0]]
    for u, tokens in (
        (0.2, [0, 0, 0]),
        (0.26, [1, 1, 1]),
        (0.49, [1, 1, 1]),
        (0.51, [3, 3, 3]),
        (BELOW_ONE, [4, 3, 3]),
    ):
        tree, probs = one_root(rows)
        assert check_both(tree, probs, uniforms=np.full((3, 1), u)).bonus_tokens.tolist() == tokens


def test_borders_between_tokens():
    # Both sides of each border, to the last bit of a float64 uniform, wherever words and segments end.
    vocabulary = 37
    probs = np.full((1, 1, vocabulary), 1 / 64, np.float32)
    probs[..., [5, 20]] = 0
    sums = np.cumsum(probs[0, 0].astype(np.float64)) / probs.sum()
    tree = make_tree(([-1], [0]))
    for v in range(vocabulary):
        if probs[0, 0, v] == 0:
            continue
        middle = sums[v] - 0.5 / 64 / float(probs.sum())
        for u, token in ((middle, v), (math.nextafter(sums[v] - 2.0**-50, 0), v)):
            found = mirrored_sampled(tree, probs, uniforms=np.array([[u]]))
            check_sampled(found, tree, probs, uniforms=np.array([[u]]))
            assert found.bonus_tokens.tolist() == [token]
    exact = np.array([[[0.25, 0.25, 0.0, 0.5]]], np.float32)
    for u, token in ((0.25, 1), (math.nextafter(0.25, 0), 0), (0.5, 3), (math.nextafter(0.5, 0), 1)):
        assert check_both(tree, exact, uniforms=np.array([[u]])).bonus_tokens.tolist() == [token]


@each_dtype
def test_a_child_without_probability_is_never_accepted(dtype):
    # Its token comes first, last and in the middle; the draws are at the ends.
    tree = make_tree(*[([-1, 0, 0, 0], [9, 0, 2, 4])] * 4)
    row = np.array([0, 0.25, 0, 0.75, 0], np.float32)
    probs = cast(np.broadcast_to(row, (4, 4, 5)), dtype)
    found = check_both(tree, probs, uniforms=np.array([[0.0] * 4, [0.25] * 4, [BELOW_ONE] * 4, [1.0] * 4]))
    assert found.nodes.tolist() == [[0, -1]] * 4
    assert found.bonus_tokens.tolist() == [1, 3, 3, 3]


BAD_ROWS = {
    "zeros": [0.0, -0.0, 0.0, 0.0],
    "less than a weight": [2.0**-45] * 4,
    "NaN": [0.5, NAN, 0.5, 0.0],
    "NaN at the end": [0.5, 0.5, 0.0, NAN],
    "negative": [0.5, -0.5, 0.5, 0.5],
    "a little negative": [0.5, 0.5, -1e-30, 0.0],
    "above 1": [1 + 2.0**-7, 0.0, 0.0, 0.0],
    "inf": [0.0, 0.0, INF, 0.0],
    "-inf": [-INF, 1.0, 0.0, 0.0],
}


@ignores_casts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_no_laws(dtype):
    # Each row beside a good one, and once more with 60 more tokens; never is token V or another taken.
    for width in (4, 61, 64):  # odd rows are read one by one
        rows = [[1.0, 0.0, -0.0, 0.0], *BAD_ROWS.values()]
        rows = [[0.0] * (width - 4) + row for row in rows]
        tree, probs = one_root(rows, dtype)
        for u in (0.0, 0.5, 1.0):
            run = check_both if width == 64 and u == 1.0 else mirrored_sampled
            found = run(tree, probs, uniforms=np.full((len(rows), 1), u))
            assert found.flags.tolist() == [0] + [dd.BAD_TARGET] * len(BAD_ROWS)
            assert found.bonus_tokens.tolist() == [width - 4] + [-1] * len(BAD_ROWS)


@only_simulated
@pytest.mark.parametrize("name", ["NaN", "negative", "inf"])
def test_refusing_a_row_warns_of_nothing(name):
    # Recorded, not raised: the simulator may wait for ever for a thread that ended with an exception.
    tree, probs = one_root([BAD_ROWS[name]])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for run in (dd.accept_sampled, mirrored_sampled):
            assert run(tree, probs, uniforms=np.zeros((1, 1))).flags.tolist() == [dd.BAD_TARGET]
    assert [str(warning.message) for warning in said] == []


@ignores_casts
def test_what_was_accepted_before_a_bad_row_stands():
    tree = make_tree(TREE, max_depth=4)
    probs = np.zeros((1, 6, 10), np.float32)
    for node, token in enumerate(PATH):
        probs[0, node, token] = 1
    whole = check_both(tree, probs, uniforms=np.full((1, 6), 0.5))
    assert whole.nodes.tolist() == [[0, 1, 3, 5, -1]]
    probs[0, [2, 4]] = NAN  # nobody comes there
    check_accepted(check_both(tree, probs, uniforms=np.full((1, 6), 0.5)), whole)
    probs[0, 3, 9] = -1
    found = check_both(tree, probs, uniforms=np.full((1, 6), 0.5))
    assert found.nodes.tolist() == [[0, 1, 3, -1, -1]]
    assert found.tokens.tolist() == [[4, 5, -1, -1, -1]]
    assert (found.bonus_tokens.tolist(), found.flags.tolist()) == ([-1], [dd.BAD_TARGET])


# The walk


def certain(targets: np.ndarray, vocabulary: int) -> np.ndarray:
    """Laws that leave no choice."""
    probs = np.zeros((*targets.shape, vocabulary), np.float32)
    np.put_along_axis(probs, targets[..., None], 1, axis=2)
    return probs


def test_certain_laws_give_the_greedy_walk():
    rng = np.random.default_rng(4)
    tree = drafted_tree(rng, 6, 12, vocabulary=5)
    targets = favourites(rng, tree, 5)
    for stop_tokens in (None, [2], rng.integers(-1, 5, (6, 2))):
        wanted = accept.accept_greedy(host_arrays(tree), targets, stop_tokens)
        uniforms, probs = rng.random((6, 13)), certain(targets, 5)
        check_accepted(mirrored_sampled(tree, probs, uniforms=uniforms, stop_tokens=stop_tokens), wanted)
    check_accepted(dd.accept_sampled(tree, probs, uniforms=uniforms, stop_tokens=stop_tokens), wanted)


def test_stop_tokens_as_nodes_and_as_bonus_tokens():
    tree = make_tree(TREE, max_depth=4)
    probs = certain(np.array([PATH]), 10)
    uniforms = np.full((1, 6), 0.3)
    for stops, tokens, bonus in (
        (5, [4, 5, -1, -1, -1], -1),
        ([2, 7], [4, 5, 0, 2, -1], 2),
        ([-1, 0], [4, 5, 0, -1, -1], -1),
    ):
        stop_tokens = np.array(stops) if isinstance(stops, list) else stops
        found = check_both(tree, probs, stop_tokens, uniforms=uniforms)
        assert (found.tokens.tolist(), found.bonus_tokens.tolist()) == ([tokens], [bonus])
        assert found.flags.tolist() == [dd.STOPPED]


def test_broken_links_idle_slots_and_a_lack_of_room():
    tree = make_tree(*[TREE] * 5, max_depth=2)
    tree.num_nodes[1] = 0
    tree.num_nodes[3] = 3
    tree.first_child[2, 0] = 0
    tree.first_child[4, 1] = -9
    probs = certain(np.array([PATH] * 5), 10)
    found = check_both(tree, probs, uniforms=np.full((5, 6), 0.5))
    assert found.num_accepted.tolist() == [3, 0, 1, 2, 2]
    assert found.flags.tolist() == [0, 0, dd.BAD_LINK, dd.BAD_LINK, dd.BAD_LINK]
    assert found.bonus_tokens.tolist() == [0, -1, 4, 5, 5]


@pytest.mark.parametrize("seed", range(8))
def test_garbage_ends(seed):
    rng = np.random.default_rng(seed)
    tree = make_tree(*[([-1], [0])] * 6, num_nodes=9, max_depth=5)
    for name in ("first_child", "next_sibling"):
        later = np.arange(9) + rng.integers(1, 3, (6, 9))
        getattr(tree, name)[...] = np.where(rng.random((6, 9)) < 0.7, later, rng.integers(-3, 12, (6, 9)))
    tree.tokens[...] = rng.integers(-1, 2, (6, 9))
    tree.num_nodes[...] = rng.choice([0, 4, 9, 2**31 - 1, -1], 6)
    probs = random_probs(rng, 6, 9, 2)
    uniforms = rng.random((6, 9))
    if seed == 0:
        found = check_both(tree, probs, uniforms=uniforms)
    else:
        found = mirrored_sampled(tree, probs, uniforms=uniforms)
        check_sampled(found, tree, probs, uniforms=uniforms)
    assert (found.num_accepted <= 6).all()


@pytest.mark.parametrize("kind", ["float32", "int64"])
def test_no_requests(kind):
    tree = dd.build_tree(*(np.zeros((0, 3, 4), t) for t in (np.float32, np.int32)), np.zeros(0, np.int32), 6)
    draws = random_draws(np.random.default_rng(0), 0, 7, kind)
    found = dd.accept_sampled(tree, np.zeros((0, 7, 5), np.float32), stop_tokens=[1], validate=True, **draws)
    assert found.nodes.shape == (0, 4)
    assert found.flags.shape == (0,)


# Seeds and positions


def test_the_draw_is_that_of_the_oracle():
    # A law of 2**12 equal parts shows the upper 12 bits of the draw.
    tree = make_tree(*[([-1], [0])] * 6)
    probs = np.full((6, 1, 4096), 2.0**-12, np.float32)
    seeds = np.array([0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0])
    positions = np.array([0, 5, 2**32, 2**40 + 3, -1, 77])
    bits = [accept.position_bits(*pair) >> 52 for pair in zip(seeds.tolist(), positions.tolist(), strict=True)]
    assert bits[0] == 0x662
    for keys in (seeds, seeds.view(np.uint64)):
        for places in (positions, positions[:, None]):
            found = mirrored_sampled(tree, probs, seeds=keys, positions=places)
            assert found.bonus_tokens.tolist() == bits
    found = dd.accept_sampled(tree, probs[..., :64] * 64, seeds=seeds.view(np.uint64), positions=positions)
    assert found.bonus_tokens.tolist() == [b >> 6 for b in bits]
    assert dd.accept_sampled(tree, probs[..., :64] * 64, seeds=seeds, positions=positions).bonus_tokens.tolist() == [
        b >> 6 for b in bits
    ]


def test_a_nodes_position_is_the_roots_and_its_depth():
    tree, probs = problem_of(5, 5, STAGED, 4)
    seeds, roots = np.array([5, -6, 7, 2**62, 9]), np.array([10, 0, 7, 10**12, -2])
    by_node = roots[:, None] + tree.depths
    first = check_both(tree, probs, seeds=seeds, positions=roots)
    check_accepted(check_both(tree, probs, seeds=seeds, positions=by_node), first)
    narrow = np.where(np.abs(roots) < 2**31, roots, 0).astype(np.int32)
    same = roots == narrow
    found = dd.accept_sampled(tree, probs, seeds=seeds, positions=dd.positions(narrow, tree.depths))
    assert same.sum() == 4
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(found, name)[same], getattr(first, name)[same])


def test_tokens_depend_on_seed_and_position_alone():
    """The same request in other slots, trees and batches: what is emitted is one sequence, cut at different places."""
    vocabulary, law = 3, random_law(11, 3, zeros=0.0)
    seed, position = -12345, 2**33 + 1
    drawn: list[int] = []  # one token at a time, by the oracle
    while len(drawn) < 8:
        weights = accept.row_weights([part / PARTS for part in law(tuple(drawn))])
        drawn.append(accept.draw(weights, accept.position_bits(seed, position + len(drawn))))
    lengths = set()
    for n in range(24):
        rng = np.random.default_rng(n)
        tree = drafted_tree(rng, 1, int(rng.integers(0, 40)), vocabulary=vocabulary, candidates=4)
        own = rows_of_law(tree, law, vocabulary).astype(np.float32)
        batch, slot = int(rng.integers(1, 6)), 0
        slot = int(rng.integers(batch))
        whole = changed(tree, **{name: np.repeat(getattr(tree, name), batch, axis=0) for name in DTYPES})
        probs = random_probs(rng, batch, *own.shape[1:])  # other requests have other laws
        probs[slot] = own[0]
        seeds, positions = rng.integers(0, 99, batch), rng.integers(0, 99, batch)
        seeds[slot], positions[slot] = seed, position
        run = dd.accept_sampled if n < 3 else mirrored_sampled
        found = run(whole, probs, seeds=seeds, positions=positions)
        emitted = [token for token in found.tokens[slot].tolist() if token >= 0]
        assert emitted == drawn[: len(emitted)]
        lengths.add(len(emitted))
    assert len(lengths) >= 3, "all trees lead equally far"


def test_other_seeds_and_positions_give_other_draws():
    tree = make_tree(*[([-1], [0])] * 64)
    probs = np.full((64, 1, 256), 2.0**-8, np.float32)
    count = np.arange(64)
    fixed = np.full(64, 7)
    by_seed = mirrored_sampled(tree, probs, seeds=count, positions=fixed).bonus_tokens
    by_position = mirrored_sampled(tree, probs, seeds=fixed, positions=count).bonus_tokens
    assert np.unique(by_seed).size > 40
    assert np.unique(by_position).size > 40
    assert (by_seed != by_position).sum() > 50


# Lossless: by exact enumeration of all outcomes of the draws

Bend = Callable[[dd.DraftTree, np.ndarray], np.ndarray]
Emitted = tuple[int, ...]


def intervals(row: np.ndarray) -> list[tuple[float, Fraction]]:
    """Middle and length of each outcome's interval, for a row of float64 probabilities, in exact arithmetic."""
    weights = [Fraction(p) for p in row.tolist()]
    total, before, found = sum(weights), Fraction(0), []
    for weight in weights:
        if weight:
            found.append((float((before + weight / 2) / total), weight / total))
        before += weight
    return found


def emitted_law(
    tree: dd.DraftTree, probs: np.ndarray, stop_tokens: Any, run: Any, bend: Bend | None = None
) -> dict[Emitted, Fraction]:
    """Law of what a step emits: every outcome at every node, whether the walk comes there or not."""
    rows = probs if bend is None else bend(tree, probs)
    outcomes = [intervals(row) for row in rows[0]]
    trials = list(itertools.product(*outcomes))
    uniforms = np.array([[middle for middle, _ in trial] for trial in trials])
    return _collect(
        tree, rows, uniforms, [math.prod(share for _, share in trial) for trial in trials], stop_tokens, run
    )


def visited_law(
    tree: dd.DraftTree, probs: np.ndarray, stop_tokens: Any, run: Any, bend: Bend | None = None
) -> dict[Emitted, Fraction]:
    """The same for trees with many nodes: a node's outcomes are tried where a walk asks for its uniform.

    It asks by ending there with BAD_TARGET, as all uniforms are NaN at first.
    """
    rows = probs if bend is None else bend(tree, probs)
    law: dict[Emitted, Fraction] = {}
    uniforms, shares = np.full((1, tree.tokens.shape[1]), NAN), [Fraction(1)]
    while shares:
        found = run(*_repeated(tree, rows, len(shares)), uniforms=uniforms, stop_tokens=stop_tokens)
        asked = (found.flags & dd.BAD_TARGET) != 0
        for trial in np.flatnonzero(~asked).tolist():
            emitted = tuple(token for token in found.tokens[trial].tolist() if token >= 0)
            law[emitted] = law.get(emitted, Fraction(0)) + shares[trial]
        next_uniforms, next_shares = [], []
        for trial in np.flatnonzero(asked).tolist():
            node = int(found.nodes[trial, found.num_accepted[trial] - 1])
            assert np.isnan(uniforms[trial, node])
            for middle, share in intervals(rows[0, node]):
                next_uniforms.append(uniforms[trial].copy())
                next_uniforms[-1][node] = middle
                next_shares.append(shares[trial] * share)
        uniforms, shares = np.array(next_uniforms), next_shares
    return law


def _repeated(tree: dd.DraftTree, rows: np.ndarray, count: int) -> tuple[dd.DraftTree, np.ndarray]:
    many = changed(tree, **{name: np.repeat(getattr(tree, name), count, axis=0) for name in DTYPES})
    return many, np.broadcast_to(rows, (count, *rows.shape[1:]))


def _collect(
    tree: dd.DraftTree, rows: np.ndarray, uniforms: np.ndarray, shares: list[Any], stop_tokens: Any, run: Any
) -> dict[Emitted, Fraction]:
    found = run(*_repeated(tree, rows, len(shares)), uniforms=uniforms, stop_tokens=stop_tokens)
    law: dict[Emitted, Fraction] = {}
    for tokens, share in zip(found.tokens.tolist(), shares, strict=True):
        emitted = tuple(token for token in tokens if token >= 0)
        law[emitted] = law.get(emitted, Fraction(0)) + share
    return law


def check_lossless(found: dict[Emitted, Fraction], law: Law, stops: tuple[int, ...] = ()) -> None:
    """Raise AssertionError unless each sequence has the target's own probability, and they are a complete prefix code.

    Then going on with the target, or with another step, gives sequences of the target's own law.
    """
    ordered = sorted(found)
    for one, following in itertools.pairwise(ordered):
        assert following[: len(one)] != one, f"FAIL {following} continues {one}"
    for sequence in ordered:
        assert sequence and not set(sequence[:-1]) & set(stops), f"FAIL {sequence} goes on behind a stop token"
        own = math.prod(Fraction(law(sequence[:n])[token], PARTS) for n, token in enumerate(sequence))
        difference = abs(float(found[sequence] - own))
        assert difference <= 1e-12, f"FAIL {sequence} has probability {float(found[sequence])}, not {float(own)}"
    assert abs(float(sum(found.values())) - 1) <= 1e-12, "FAIL the probabilities do not sum to 1"


SMALL_TREES = {
    "root alone": ([-1], [1]),
    "one child": ([-1, 0], [1, 0]),
    "chain of token 0": ([-1, 0, 1, 2], [0, 0, 0, 0]),
    "star of all tokens": ([-1, 0, 0, 0], [2, 2, 1, 0]),
    "equal siblings": ([-1, 0, 0, 0, 1], [0, 1, 1, 1, 0]),
    "equal siblings with children": ([-1, 0, 0, 1, 2], [0, 1, 1, 0, 2]),
    "two and two": ([-1, 0, 0, 1, 2], [0, 0, 1, 1, 0]),
}
LARGER_TREES = {
    "full of 3": ([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [0, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]),
    "chain and siblings": ([-1, 0, 1, 2, 0, 1, 2, 3, 3], [0, 2, 1, 0, 2, 1, 0, 1, 1]),
    "binary of depth 3": ([-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6], [0, *[0, 1] * 7]),
}


def random_parents(seed: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 10))
    parents, depths = [-1], [0]
    while len(parents) < size:
        parent = int(rng.integers(len(parents)))
        if depths[parent] < 3:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return parents, rng.integers(0, 3, size).tolist()


@pytest.mark.parametrize("name", SMALL_TREES)
def test_lossless_over_all_outcomes_of_all_nodes(name):
    tree = make_tree(SMALL_TREES[name])
    for vocabulary in (3, 4) if tree.tokens.shape[1] <= 4 else (3,):
        for seed, zeros, stops in ((0, 0.0, ()), (1, 0.4, ()), (2, 0.2, (1,)), (3, 0.0, (0, 2))):
            law = random_law(seed, vocabulary, zeros)
            probs = rows_of_law(tree, law, vocabulary)
            found = emitted_law(tree, probs, list(stops) or None, mirrored_sampled)
            check_lossless(found, law, stops)
            assert found == visited_law(tree, probs, list(stops) or None, mirrored_sampled)


@pytest.mark.parametrize("name", [*LARGER_TREES, *range(24)])
def test_lossless_over_all_outcomes_of_larger_trees(name):
    tree = make_tree(LARGER_TREES[name] if name in LARGER_TREES else random_parents(name))
    for seed, zeros, stops in ((4, 0.0, ()), (5, 0.4, ()), (6, 0.0, (2,))):
        law = random_law(seed, 3, zeros)
        found = visited_law(tree, rows_of_law(tree, law, 3), list(stops) or None, mirrored_sampled)
        check_lossless(found, law, stops)
        assert name not in LARGER_TREES or len(found) >= 3


@pytest.mark.parametrize("max_depth", [0, 1, 2])
def test_lossless_with_a_lack_of_room(max_depth):
    law = random_law(7, 3, 0.2)
    for parents_and_tokens in LARGER_TREES.values():
        tree = make_tree(parents_and_tokens, max_depth=max_depth)
        found = visited_law(tree, rows_of_law(tree, law, 3), None, mirrored_sampled)
        check_lossless(found, law)
        assert max(map(len, found)) == max_depth + 1


@pytest.mark.parametrize("name", ["star of all tokens", "equal siblings with children"])
def test_the_kernel_is_lossless(name):
    # float32 holds the laws exactly.
    tree = make_tree(SMALL_TREES[name])
    vocabulary, law = 3, random_law(8, 3, 0.0)
    probs = rows_of_law(tree, law, vocabulary).astype(np.float32)
    check_lossless(visited_law(tree, probs, [1], dd.accept_sampled), law, (1,))


def of_children(tree: dd.DraftTree, node: int) -> list[int]:
    return tree.tokens[0, np.flatnonzero(tree.parents[0] == node)].tolist()


def bent(change: Callable[[np.ndarray, list[int]], np.ndarray]) -> Bend:
    """A sampler that draws at each node from a law that is changed by its children's tokens."""

    def bend(tree: dd.DraftTree, probs: np.ndarray) -> np.ndarray:
        rows = probs.copy()
        for node in range(probs.shape[1]):
            rows[0, node] = change(probs[0, node], of_children(tree, node))
        return rows

    return bend


def retried(row: np.ndarray, children: list[int]) -> np.ndarray:
    """A draw that no child carries is drawn once more."""
    kept = np.isin(np.arange(row.size), children)
    return row * kept + row[~kept].sum() * row


def preferred(row: np.ndarray, children: list[int]) -> np.ndarray:
    """A child gets a thousandth more than it should."""
    more = np.isin(np.arange(row.size), children) / max(len(set(children)), 1)
    return 0.999 * row + 0.001 * more if children else row


def tried_one_by_one(row: np.ndarray, children: list[int]) -> np.ndarray:
    """Each child in turn is accepted with its token's probability; if none is, any token is drawn."""
    left, found = 1.0, np.zeros_like(row)
    for token in children:
        found[token] += left * row[token]
        left *= 1 - row[token]
    return found + left * row


def never_zero(row: np.ndarray, children: list[int]) -> np.ndarray:
    return (row + 2.0**-20) / (1 + row.size * 2.0**-20)


WRONG_LAWS = {
    "retried": retried,
    "preferred": preferred,
    "tried_one_by_one": tried_one_by_one,
    "never_zero": never_zero,
}


@pytest.mark.parametrize("name", WRONG_LAWS)
def test_a_sampler_that_is_not_lossless_fails(name):
    tree = make_tree(SMALL_TREES["two and two"])
    law = random_law(1, 3, 0.0) if name != "never_zero" else random_law(2, 3, 0.6)
    probs = rows_of_law(tree, law, 3)
    check_lossless(visited_law(tree, probs, None, mirrored_sampled), law)
    found = visited_law(tree, probs, None, mirrored_sampled, bent(WRONG_LAWS[name]))
    assert abs(float(sum(found.values())) - 1) < 1e-12
    with pytest.raises(AssertionError, match="FAIL"):
        check_lossless(found, law)


def test_one_uniform_for_all_nodes_fails():
    tree = make_tree(SMALL_TREES["two and two"])
    law = random_law(1, 3, 0.0)

    def run(tree: dd.DraftTree, probs: np.ndarray, *, uniforms: np.ndarray, stop_tokens: Any) -> dd.Accepted:
        shared = np.broadcast_to(uniforms[:, :1], uniforms.shape)
        return mirrored_sampled(tree, probs, uniforms=shared, stop_tokens=stop_tokens)

    with pytest.raises(AssertionError, match="FAIL"):
        check_lossless(emitted_law(tree, rows_of_law(tree, law, 3), None, run), law)


def test_a_walk_that_goes_on_behind_a_stop_token_fails():
    tree = make_tree(SMALL_TREES["chain of token 0"])
    law = random_law(1, 3, 0.0)
    found = visited_law(tree, rows_of_law(tree, law, 3), None, mirrored_sampled)
    check_lossless(found, law)
    with pytest.raises(AssertionError, match="FAIL .* behind a stop token"):
        check_lossless(found, law, (0,))


def test_intervals_are_those_of_the_oracle():
    # The oracle's law of a row counts all 2**64 draws.
    for seed in range(20):
        row = np.array(random_law(seed, 5, 0.3)(())) / PARTS
        weights = accept.row_weights(row.tolist())
        exact = [share for share in accept.row_law(weights) if share]
        shares = [share for _, share in intervals(row)]
        assert all(abs(a - b) < Fraction(1, 2**63) for a, b in zip(shares, exact, strict=True))


# Chi-square


def test_survival_function_of_chi_square():
    for x in (0.1, 1.0, 5.0, 40.0):
        assert chi_square_survival(x, 2) == pytest.approx(math.exp(-x / 2), rel=1e-12)
        assert chi_square_survival(x, 1) == pytest.approx(math.erfc(math.sqrt(x / 2)), rel=1e-11)
        assert chi_square_survival(x, 4) == pytest.approx(math.exp(-x / 2) * (1 + x / 2), rel=1e-12)
    # Upper five and one per cent, from tables.
    for x, freedom, p in (
        (3.841458820694124, 1, 0.05), (18.307038053275146, 10, 0.05), (67.50480654954124, 50, 0.05),
        (124.34211340400407, 100, 0.05), (76.15389124901273, 50, 0.01), (1074.679449, 1000, 0.05),
    ):  # fmt: skip
        assert chi_square_survival(x, freedom) == pytest.approx(p, rel=1e-6)
    assert chi_square_survival(0.0, 7) == 1.0
    assert chi_square_survival(1e4, 7) == pytest.approx(0, abs=1e-300)


def test_the_chi_square_test_tells_laws_apart():
    rng = np.random.default_rng(0)
    probabilities = np.array([0.5, 0.3, 0.15, 0.05 - 1e-6, 1e-6, 0.0])
    values = [chi_square_test(rng.multinomial(10**5, probabilities), probabilities) for _ in range(200)]
    # Under the law p values are uniform.
    assert abs(np.mean(values) - 0.5) < 5 * (1 / 12 / 200) ** 0.5
    assert min(values) > 1e-4
    moved = probabilities + np.array([0.01, -0.01, 0, 0, 0, 0])
    assert chi_square_test(rng.multinomial(10**5, moved), probabilities) < 1e-6
    assert chi_square_test([50, 30, 15, 5, 0, 1], probabilities) == 0.0


def test_counts_of_draws():
    """A few thousand requests by the mirror: first tokens and pairs of a two-level tree."""
    batch, vocabulary = 8000, 6
    tree = make_tree(([-1, 0, 0, 1, 1, 2], [0, 1, 4, 0, 2, 5]))
    law = random_law(3, vocabulary, 0.0)
    probs = rows_of_law(tree, law, vocabulary).astype(np.float32)
    many, rows = _repeated(tree, probs, batch)
    found = mirrored_sampled(many, rows, seeds=np.arange(batch) * 7919 - 5, positions=np.arange(batch) % 13)
    first = np.array(law(())) / PARTS
    assert chi_square_test(np.bincount(found.tokens[:, 0], minlength=vocabulary), first) > 1e-3
    for token in (1, 4):
        second = found.tokens[found.tokens[:, 0] == token, 1]
        assert chi_square_test(np.bincount(second, minlength=vocabulary), np.array(law((token,))) / PARTS) > 1e-3
    bad = first + np.array([-0.05, 0.05, 0, 0, 0, 0])
    assert chi_square_test(np.bincount(found.tokens[:, 0], minlength=vocabulary), bad) < 1e-3


# Memory


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_of_inputs_and_results(layout):
    tree, probs = problem_of(6, 3, 6, 16)
    rng = np.random.default_rng(0)
    moved = changed(tree, **{name: layout(getattr(tree, name)) for name in DTYPES})
    stops = np.array([[3, -1]] * 3)
    draws = random_draws(
        rng, 3, 7, "float64" if layout in (LAYOUTS["backwards"], np.asfortranarray) else "int64_by_node"
    )
    plain = spoiled(3, tree.max_depth)
    out = dd.Accepted(**{name: layout(getattr(plain, name)) for name in FIELDS})
    given = {name: layout(x) for name, x in draws.items()}
    assert dd.accept_sampled(moved, layout(probs), stop_tokens=layout(stops), out=out, validate=True, **given) is out
    packed = dd.Accepted(**{name: np.ascontiguousarray(getattr(out, name)) for name in FIELDS})
    check_sampled(packed, tree, probs, stops, **draws)


@pytest.mark.parametrize("start", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_begin_anywhere(dtype, start):
    rng = np.random.default_rng(0)
    tree = make_tree(*[([-1], [0])] * 3)
    probs = random_probs(rng, 3, 1, 48, dtype=dtype)[..., start : start + 40]
    check_both(tree, probs, uniforms=rng.random((3, 1)))


def test_numba_arrays_give_numba_arrays_and_inputs_are_not_changed():
    tree, probs = problem_of(7, 3, 6, 8)
    draws = random_draws(np.random.default_rng(0), 3, 7, "signed_int64")
    inputs = [probs, *draws.values(), *(getattr(tree, name) for name in DTYPES)]
    before = [x.tobytes() for x in inputs]
    given = changed(tree, **{name: cuda.to_device(getattr(tree, name)) for name in DTYPES})
    on_device = {name: cuda.to_device(x) for name, x in draws.items()}
    found = dd.accept_sampled(given, cuda.to_device(probs), **on_device)
    assert all(isinstance(getattr(found, name), type(on_device["seeds"])) for name in FIELDS)
    check_sampled(found.to_host(), tree, probs, **draws)
    for x in inputs:
        x.flags.writeable = False
    check_accepted(dd.accept_sampled(tree, probs, **draws), found.to_host())
    assert before == [x.tobytes() for x in inputs]


def test_bfloat16_bits_are_bfloat16():
    tree, probs = problem_of(8, 3, 6, 12, "bfloat16")
    draws = random_draws(np.random.default_rng(0), 3, 7, "float32")
    assert probs.dtype == BFLOAT16
    check_accepted(dd.accept_sampled(tree, probs.view(np.uint16), **draws), dd.accept_sampled(tree, probs, **draws))


# Wrong arguments: one exception that names the argument, before anything is written


def uniforms_alone(a: dict[str, Any]) -> dict[str, Any]:
    return {"seeds": None, "positions": None, "uniforms": np.zeros((2, 6))}


def uniforms_as(function: Any) -> Any:
    return lambda a: uniforms_alone(a) | {"uniforms": function(np.zeros((2, 6)))}


def flags_in_uniforms(a: dict[str, Any]) -> dict[str, Any]:
    uniforms = np.zeros((2, 6), np.float32)
    out = dataclasses.replace(a["out"], flags=uniforms[:, 0].view(np.int32))
    return {"seeds": None, "positions": None, "uniforms": uniforms, "out": out}


EITHER = "it must be either seeds and positions, or uniforms"
# Which text the message must hold, the exception, what is changed. B=2, Q=6, V=10, max_depth=4.
ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    *SHARED_ERRORS,
    ("target_probs is None", "target_probs is a ", TypeError, value("target_probs", None)),
    (
        "target_probs is float64",
        "target_probs has dtype float64; it must be float32 or float16 or bfloat16 or uint16",
        TypeError,
        change("target_probs", lambda x: x.astype(np.float64)),
    ),
    (
        "target_probs is int32",
        "target_probs has dtype int32",
        TypeError,
        change("target_probs", lambda x: x.astype(np.int32)),
    ),
    (
        "target_probs is of another Q",
        r"target_probs has shape \[2, 5, 10\]; it must be \[B, Q, V\] = \[2, 6, any\]",
        ValueError,
        change("target_probs", lambda x: x[:, :5]),
    ),
    (
        "target_probs has 2 axes",
        r"target_probs has shape \[2, 6\]",
        ValueError,
        change("target_probs", lambda x: x[..., 0]),
    ),
    ("there is no vocabulary", "target_probs .*V = 0", ValueError, change("target_probs", lambda x: x[..., :0])),
    (
        "there are too many tokens",
        "target_probs .*V = 524289; it must be between 1 and 524288",
        ValueError,
        value("target_probs", np.broadcast_to(np.float32(0), (2, 6, 2**19 + 1))),
    ),
    ("target_probs is misaligned", "target_probs .*not aligned", ValueError, change("target_probs", misaligned)),
    ("target_probs is big-endian", "target_probs .*byte order", TypeError, change("target_probs", big_endian)),
    (
        "there is no randomness",
        f"given by nothing; {EITHER}",
        ValueError,
        lambda a: {"seeds": None, "positions": None},
    ),
    ("seeds alone", f"given by seeds; {EITHER}", ValueError, value("positions", None)),
    ("positions alone", f"given by positions; {EITHER}", ValueError, value("seeds", None)),
    (
        "both kinds of randomness",
        f"given by seeds and positions and uniforms; {EITHER}",
        ValueError,
        value("uniforms", np.zeros((2, 6))),
    ),
    (
        "seeds and uniforms",
        f"given by seeds and uniforms; {EITHER}",
        ValueError,
        lambda a: {"positions": None, "uniforms": np.zeros((2, 6))},
    ),
    ("seeds is a number", "seeds is a ", TypeError, value("seeds", 5)),
    (
        "seeds is int32",
        "seeds has dtype int32; it must be int64 or uint64",
        TypeError,
        change("seeds", lambda x: x.astype(np.int32)),
    ),
    (
        "seeds is of another batch",
        r"seeds has shape \[1\]; it must be \[B\] = \[2\]",
        ValueError,
        change("seeds", lambda x: x[:1]),
    ),
    ("seeds has 2 axes", r"seeds has shape \[2, 1\]", ValueError, change("seeds", lambda x: x[:, None])),
    (
        "positions is float64",
        "positions has dtype float64; it must be int32 or int64",
        TypeError,
        change("positions", lambda x: x.astype(np.float64)),
    ),
    (
        "positions is uint64",
        "positions has dtype uint64",
        TypeError,
        change("positions", lambda x: x.astype(np.uint64)),
    ),
    (
        "positions is of another batch",
        r"positions has shape \[3\]; it must be \[B\] or \[B, Q\] = \[2\]",
        ValueError,
        value("positions", np.zeros(3, np.int64)),
    ),
    (
        "positions is of another Q",
        r"positions has shape \[2, 5\]; it must be \[B\] or \[B, Q\] = \[2, 6\]",
        ValueError,
        value("positions", np.zeros((2, 5), np.int64)),
    ),
    ("uniforms is a list", "uniforms is a ", TypeError, uniforms_as(lambda x: x.tolist())),
    (
        "uniforms is float16",
        "uniforms has dtype float16; it must be float32 or float64",
        TypeError,
        uniforms_as(lambda x: x.astype(np.float16)),
    ),
    (
        "uniforms is of one node",
        r"uniforms has shape \[2\]; it must be \[B, Q\] = \[2, 6\]",
        ValueError,
        uniforms_as(lambda x: x[:, 0]),
    ),
    ("uniforms is misaligned", "uniforms .*not aligned", ValueError, uniforms_as(misaligned)),
    (
        "a result is the positions",
        r"out\.flags overlaps positions",
        ValueError,
        lambda a: {"positions": a["out"].flags},
    ),
    (
        "a result is the laws",
        r"out\.nodes overlaps target_probs",
        ValueError,
        lambda a: {"out": dataclasses.replace(a["out"], nodes=a["target_probs"][:, 0, :5].view(np.int32))},
    ),
    ("a result is the uniforms", r"out\.flags overlaps uniforms", ValueError, flags_in_uniforms),
]


@pytest.mark.parametrize("error", [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_wrong_arguments(monkeypatch, error):
    right = {
        "tree": make_tree(TREE, TREE, max_depth=4),
        "target_probs": np.full((2, 6, 10), 0.1, np.float32),
        "seeds": np.array([1, -2]),
        "positions": np.array([3, 4], np.int32),
        "uniforms": None,
        "stop_tokens": None,
        "out": spoiled(2, 4),
    }
    check_refusal(monkeypatch, sampled, dd.accept_sampled, right, error)


def test_validate_refuses_wrong_links():
    tree, probs = make_tree(TREE, max_depth=4), np.full((1, 6, 10), 0.1, np.float32)
    uniforms = np.zeros((1, 6))
    dd.accept_sampled(tree, probs, uniforms=uniforms, validate=True)
    tree.next_sibling[0, 2] = 1
    with pytest.raises(ValueError, match=r"tree\.next_sibling\[0, 2\] is 1"):
        dd.accept_sampled(tree, probs, uniforms=uniforms, validate=True)
    tree.num_nodes[0] = 7
    with pytest.raises(ValueError, match=r"tree\.num_nodes\[0\] is 7"):
        dd.accept_sampled(tree, probs, uniforms=uniforms, validate=True)


def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    tree, probs = make_tree(TREE), np.full((1, 6, 10), 0.1, np.float32)
    with pytest.raises(TypeError, match=r"\btarget_probs\b is a PyTorch tensor on cpu"):
        dd.accept_sampled(tree, torch.from_numpy(probs), uniforms=np.zeros((1, 6)))
    with pytest.raises(TypeError, match=r"\buniforms\b is a PyTorch tensor on cpu"):
        dd.accept_sampled(tree, probs, uniforms=torch.zeros((1, 6)))


# Wrong kernels must fail: else the comparisons above would prove nothing


def sampled_traps() -> list[tuple[dd.DraftTree, np.ndarray, dict[str, Any]]]:
    rng = np.random.default_rng(0)
    # Two chains; one walk is certain to come to the end, the other to the second node.
    tree = make_tree(*[([-1, 0, 1], [0, 3, 5])] * 2)
    probs = (rng.random((2, 3, 20)) / 20).astype(np.float32)
    for b, node, token in ((0, 0, 3), (0, 1, 5), (1, 0, 3)):
        probs[b, node] = np.arange(20) == token
    seeds, roots = np.array([7, -(2**40)]), np.array([2**40 + 5, -1])
    rows = np.zeros((4, 20), np.float32)
    rows[:, [0, 19]] = -0.0
    rows[:, [1, 6, 18]] = 0.25, 0.25, 0.5
    rows[3, 3] = NAN
    tiny = one_root([[2.0**-44, 0.5, 0.5]] * 2)
    odd = make_tree(*[([-1], [0])] * 2), random_probs(rng, 2, 1, 19, dtype="bfloat16")
    return [
        (*one_root(rows), {"uniforms": np.array([[0.0], [0.25], [1.0], [0.5]])}),
        (tree, probs, {"seeds": seeds, "positions": roots}),
        (tree, probs, {"seeds": seeds, "positions": roots[:, None] + tree.depths}),
        (tree, probs, {"uniforms": rng.random((2, 3))}),
        (*tiny, {"uniforms": np.array([[0.5], [1.01]]) * 2.0**-44}),
        (*odd, {"uniforms": np.array([[0.7], [0.999]])}),
    ]


TRAPS = sampled_traps() if SIMULATOR else []


def check_traps(made: Any) -> None:
    """Raise AssertionError unless the kernel of a module that was run anew passes all traps."""
    for tree, probs, draws in TRAPS:
        out = spoiled(probs.shape[0], tree.max_depth)
        check_sampled(made.accept_sampled(tree, probs, out=out, **draws), tree, probs, **draws)


@only_simulated
@ignores_casts
def test_the_kernel_without_a_mistake_passes():
    check_traps(build(sampled))
    assert philox.ROUNDS == 10


@only_simulated
@ignores_casts
@pytest.mark.parametrize("mistake", SAMPLED_MISTAKES)
def test_a_kernel_with_a_mistake_fails(mistake):
    module, text = SAMPLED_MISTAKES[mistake]
    made = build(sampled, module, text)
    with pytest.raises(AssertionError, match="FAIL"):
        check_traps(made)
