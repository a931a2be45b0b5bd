"""The oracles of the accept operators, held against less: hand-made walks, enumeration of all draws, known answers.

That a walk is lossless is proved here by `emitted_law`, which sums over all outcomes of the draws of a step, on many
small trees: the law of what is emitted is the target's own, and the emitted sequences are a complete prefix code.
"""

from __future__ import annotations

import decimal
import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from refs import accept, trees

NAN, INF = math.nan, math.inf
Law = Callable[[tuple[int, ...]], list[Any]]


# Trees and laws


def assembled(*requests: tuple[list[int], list[int]], num_nodes: int = 0, max_depth: int | None = None) -> Any:
    """A batch of trees, each of parents and tokens."""
    parents, tokens = [parents for parents, _ in requests], [tokens for _, tokens in requests]
    num_nodes = num_nodes or max(map(len, parents))
    scores = [[0.0] * len(one) for one in parents]
    depth = num_nodes - 1 if max_depth is None else max_depth
    return trees.assemble(parents, tokens, scores, num_nodes=num_nodes, max_depth=depth)


def random_law(seed: int, vocabulary: int, zeros: float = 0.3) -> Law:
    """A function of the prefix: whole numbers up to 25, some of them 0, divided by their sum."""
    known: dict[tuple[int, ...], list[Fraction]] = {}

    def law(prefix: tuple[int, ...]) -> list[Fraction]:
        if prefix not in known:
            rng = np.random.default_rng([seed, *prefix])
            weights = np.where(rng.random(vocabulary) < zeros, 0, rng.integers(1, 25, vocabulary)).tolist()
            weights[int(rng.integers(vocabulary))] += 1
            known[prefix] = [Fraction(weight, sum(weights)) for weight in weights]
        return known[prefix]

    return law


def random_tree(seed: int, vocabulary: int, most: int) -> tuple[list[int], list[int]]:
    """Random parents and tokens; with few tokens, siblings often have equal ones."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, most + 1))
    # Every third tree is deep.
    parents = [-1, *(int(rng.integers(max(0, i - 2) if seed % 3 == 0 else 0, i)) for i in range(1, size))]
    return parents, rng.integers(0, vocabulary, size).tolist()


TREES = {
    "root alone": ([-1], [2]),
    "chain": ([-1, 0, 1, 2, 3], [0, 1, 2, 0, 1]),
    "chain of token 0": ([-1, 0, 1, 2, 3], [0, 0, 0, 0, 0]),
    "star": ([-1, 0, 0], [2, 0, 1]),
    "star of all tokens": ([-1, 0, 0, 0], [2, 2, 1, 0]),
    "equal siblings": ([-1, 0, 0, 0, 1, 2, 3], [0, 1, 1, 1, 0, 2, 1]),
    "equal siblings of different depth": ([-1, 0, 0, 2, 3, 1], [0, 2, 2, 1, 0, 0]),
    "full": ([-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [0, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]),
    **{f"random {seed}": random_tree(seed, 3, 12) for seed in range(40)},
}


# Known answers of the generator


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, words: Any) -> None:
    assert accept.philox4x32(counter, key) == words
    assert accept.philox4x32(counter, key, rounds=0) == counter
    assert accept.philox4x32(counter, key, rounds=9) != words


def test_bits_of_a_position() -> None:
    assert accept.position_bits(0, 0) == 0x6627E8D5E169C58D
    words = accept.philox4x32((0xFFFFFFFE, 0xFFFFFFFF, 0, 0), (0xFFFFFFFD, 0xFFFFFFFF))
    assert accept.position_bits(-3, -2) == words[0] << 32 | words[1]
    assert accept.position_bits(2**64 - 3, 2**64 - 2) == accept.position_bits(-3, -2)
    words = accept.philox4x32((7, 5, 0, 0), (9, 11))
    assert accept.position_bits(11 * 2**32 + 9, 5 * 2**32 + 7) == words[0] << 32 | words[1]
    found = {accept.position_bits(seed, position) for seed in range(40) for position in range(40)}
    assert len(found) == 1600
    ones = sum(bin(x).count("1") for x in found) / 1600
    assert abs(ones - 32) < 5 * 4 / 40  # the mean of 1600 sums of 64 coins


def test_bits_of_a_uniform() -> None:
    most = 2**64 - 1
    for uniform, bits in (
        (0.0, 0), (-0.0, 0), (0.5, 2**63), (1 - 2**-24, 2**64 - 2**40), (1 - 2**-53, 2**64 - 2**11), (1.0, most),
        (2.5, most), (INF, most), (2**-64, 1), (2**-65, 0), (3 * 2**-65, 1), (5e-324, 0),
    ):  # fmt: skip
        assert accept.uniform_bits(uniform) == bits
    assert [accept.uniform_bits(x) for x in (NAN, -INF, -1.0, -5e-324)] == [None] * 4


# One draw


def test_weights_by_hand() -> None:
    one = 2**44
    for row, weights in (
        ([1.0, 0.0, -0.0], [one, 0, 0]),
        ([0.25, 0.75], [one // 4, 3 * one // 4]),
        ([1.0, 1.0], [one, one]),
        ([2**-44, 1.99 * 2**-44, 0.99 * 2**-44], [1, 1, 0]),
        ([0.1], [math.floor(Fraction(0.1) * one)]),
    ):
        assert accept.row_weights(row) == weights
    for row in ([0.0, -0.0], [2**-45] * 9, [0.5, NAN], [-1e-30, 1.0], [1 + 2**-23, 0.0], [INF, 0.0], [0.5, -INF]):
        assert accept.row_weights(row) is None


def random_weights(seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    scales = (1, 2**5, 2**44)
    weights = [int(rng.integers(0, scales[int(rng.integers(3))], endpoint=True)) for _ in range(rng.integers(1, 9))]
    return weights if any(weights) else [1]


@pytest.mark.parametrize("seed", range(40))
def test_a_draw_has_the_law_of_its_row(seed: int) -> None:
    """Draws rise with the bits, so that their borders tell the token of every one of 2**64 values."""
    weights = random_weights(seed)
    total, law, start = sum(weights), accept.row_law(weights), 0
    assert sum(law) == 1
    for token, (weight, share) in enumerate(zip(weights, law, strict=True)):
        assert (share == 0) == (weight == 0) and abs(share - Fraction(weight, total)) < Fraction(1, 2**64)
        count = int(share * 2**64)
        if count:
            assert accept.draw(weights, start) == accept.draw(weights, start + count - 1) == token
        start += count
    assert start == 2**64


def test_draws_by_cumulative_sums() -> None:
    rng = np.random.default_rng(0)
    for seed in range(200):
        weights = random_weights(seed)
        bits = int(rng.integers(0, 2**64, dtype=np.uint64))
        point = bits * sum(weights) // 2**64
        sums = list(itertools.accumulate(weights))
        assert accept.draw(weights, bits) == min(v for v in range(len(weights)) if sums[v] > point)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("seed", range(5))
def test_the_law_of_a_row_is_the_softmax_that_it_was_made_of(seed: int, dtype: Any) -> None:
    logits = np.random.default_rng(seed).standard_normal(50) * 4
    exact = np.exp(logits) / np.exp(logits).sum()
    row = exact.astype(dtype).astype(np.float64)
    weights = accept.row_weights(row.tolist())
    assert weights is not None
    law = np.array(accept.row_law(weights), dtype=np.float64)
    np.testing.assert_allclose(law, row / row.sum(), rtol=0, atol=50 * 2**-44)
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert np.abs(law - exact).sum() < 50 * 2**-44 + 2 * eps + 50 * float(ml_dtypes.finfo(dtype).smallest_subnormal)


# The walk


def walked(tree: Any, targets: list[list[int]], stops: Any = None) -> dict[str, Any]:
    return {name: x.tolist() for name, x in accept.accept_greedy(tree, np.array(targets), stops).items()}


def test_a_batch_by_hand() -> None:
    #        0            and  0, 1 behind 0, and a chain of three
    #      1   3
    #      2   4
    tree = assembled(([-1, 0, 1, 0, 3], [7, 10, 20, 11, 0]), ([-1, 0], [0, 5]), ([-1, 0, 1], [3, 3, 3]), max_depth=2)
    found = walked(tree, [[11, 0, 0, 0, 9], [5, -1, 0, 0, 0], [3, 4, 3, 3, 3]])
    assert found == {
        "nodes": [[0, 3, 4], [0, 1, -1], [0, 1, -1]],
        "num_accepted": [3, 2, 2],
        "bonus_tokens": [9, -1, 4],
        "flags": [0, accept.BAD_TARGET, 0],
        "tokens": [[11, 0, 9], [5, -1, -1], [3, 4, -1]],
    }
    arrays = accept.accept_greedy(tree, np.zeros((3, 5), np.int64))
    assert {x.dtype.name for x in arrays.values()} == {"int32"}


TREE = ([-1, 0, 0, 1, 2, 3], [9, 4, 6, 5, 5, 0])
PATH = [4, 5, 8, 0, 8, 2]  # nodes 0, 1, 3, 5, then 2


@pytest.mark.parametrize(
    ("targets", "stops", "nodes", "tokens", "bonus", "flags"),
    [
        (PATH, None, [0, 1, 3, 5], [4, 5, 0, 2], 2, 0),
        (PATH, 5, [0, 1, 3], [4, 5], -1, accept.STOPPED),
        (PATH, [7, 0], [0, 1, 3, 5], [4, 5, 0], -1, accept.STOPPED),
        (PATH, [-1, 2], [0, 1, 3, 5], [4, 5, 0, 2], 2, accept.STOPPED),
        (PATH, np.array([[2]]), [0, 1, 3, 5], [4, 5, 0, 2], 2, accept.STOPPED),
        (PATH, [9, 6, 8], [0, 1, 3, 5], [4, 5, 0, 2], 2, 0),  # tokens off the path, and the root's
        ([7, *PATH[1:]], 7, [0], [7], 7, accept.STOPPED),
        ([2**31 - 1, *PATH[1:]], None, [0], [2**31 - 1], 2**31 - 1, 0),
        ([2**31, *PATH[1:]], None, [0], [], -1, accept.BAD_TARGET),
        ([2**32 + 4, *PATH[1:]], None, [0], [], -1, accept.BAD_TARGET),
        ([-1, *PATH[1:]], -1, [0], [], -1, accept.BAD_TARGET),  # a negative stop token is none
        ([*PATH[:3], -5, 8, 2], None, [0, 1, 3], [4, 5], -1, accept.BAD_TARGET),
        ([*PATH[:2], -5, 0, -5, 2], None, [0, 1, 3, 5], [4, 5, 0, 2], 2, 0),  # nobody comes there
    ],
)
def test_walks_by_hand(targets: Any, stops: Any, nodes: Any, tokens: Any, bonus: int, flags: int) -> None:
    found = walked(assembled(TREE, max_depth=4), [targets], stops)
    assert found == {
        "nodes": [nodes + [-1] * (5 - len(nodes))],
        "num_accepted": [len(nodes)],
        "bonus_tokens": [bonus],
        "flags": [flags],
        "tokens": [tokens + [-1] * (5 - len(tokens))],
    }


@pytest.mark.parametrize(
    ("name", "node", "link", "nodes", "flags"),
    [
        ("first_child", 0, 0, [0], accept.BAD_LINK),
        ("first_child", 0, 6, [0], accept.BAD_LINK),
        ("first_child", 0, 2**31 - 1, [0], accept.BAD_LINK),
        ("first_child", 0, -2, [0], accept.BAD_LINK),
        ("first_child", 0, -1, [0], 0),
        ("first_child", 0, 2, [0], 0),  # a wrong, later node is a node
        ("first_child", 1, 1, [0, 1], accept.BAD_LINK),
        ("first_child", 1, 0, [0, 1], accept.BAD_LINK),
        ("first_child", 5, 3, [0, 1, 3, 5], accept.BAD_LINK),
        ("next_sibling", 1, 1, [0, 1, 3, 5], 0),  # behind the child that was found
        ("next_sibling", 3, -7, [0, 1, 3, 5], 0),
    ],
)
def test_broken_links_end_the_walk(name: str, node: int, link: int, nodes: list[int], flags: int) -> None:
    tree = assembled(TREE, max_depth=4)
    tree[name][0, node] = link
    found = accept.accept_greedy(tree, np.array([PATH]))
    assert found["nodes"][0].tolist() == nodes + [-1] * (5 - len(nodes)) and found["flags"].tolist() == [flags]
    assert found["bonus_tokens"][0] == PATH[nodes[-1]] == found["tokens"][0, len(nodes) - 1]


def test_a_cycle_of_siblings_ends() -> None:
    tree = assembled(([-1, 0, 0, 0], [9, 1, 2, 3]))
    tree["next_sibling"][0, 2] = 1
    found = walked(tree, [[3, 3, 3, 3]])
    assert (found["flags"], found["bonus_tokens"]) == ([accept.BAD_LINK], [3])


@pytest.mark.parametrize("count", [-(2**31), -1, 0])
def test_an_idle_request_has_nothing(count: int) -> None:
    tree = assembled(TREE, TREE, max_depth=4)
    tree["num_nodes"][0] = count
    found = accept.accept_greedy(tree, np.array([PATH, PATH]), [4])
    assert found["num_accepted"].tolist() == [0, 2] and found["flags"].tolist() == [0, accept.STOPPED]
    assert all((found[name][0] == -1).all() for name in ("nodes", "bonus_tokens", "tokens"))


def test_no_more_nodes_than_are_there_and_than_there_is_room_for() -> None:
    chain = ([-1, 0, 1, 2, 3], [5, 1, 2, 3, 4])
    targets = np.array([[1, 2, 3, 4, 6]])
    for max_depth in range(5):
        found = accept.accept_greedy(assembled(chain, max_depth=max_depth), targets)
        assert found["nodes"].tolist() == [list(range(max_depth + 1))]
        assert found["bonus_tokens"].tolist() == [int(targets[0, max_depth])] and found["flags"].tolist() == [0]
    for count in range(1, 9):
        tree = assembled(chain, max_depth=4)
        tree["num_nodes"][0] = count
        found = accept.accept_greedy(tree, targets)
        assert found["num_accepted"].tolist() == [min(count, 5)]
        assert found["flags"].tolist() == [accept.BAD_LINK * (count < 5)]


@pytest.mark.parametrize("seed", range(60))
def test_walks_of_random_trees_by_their_paths(seed: int) -> None:
    """Without links: of all paths, the longest whose every node is the first child with its parent's target token."""
    parents, tokens = random_tree(seed, 3, 20)
    targets = np.random.default_rng(1000 + seed).integers(0, 3, len(parents)).tolist()

    def follows(parent: int, child: int) -> bool:
        fitting = [n for n, p in enumerate(parents) if p == parent and tokens[n] == targets[parent]]
        return fitting[:1] == [child]

    paths = [
        path
        for path in trees.root_paths(parents)
        if all(follows(parent, child) for parent, child in itertools.pairwise(path))
    ]
    (longest,) = (path for path in paths if len(path) == max(map(len, paths)))
    found = accept.accept_greedy(assembled((parents, tokens)), np.array([targets]))
    count = int(found["num_accepted"][0])
    assert found["nodes"][0, :count].tolist() == longest and (found["nodes"][0, count:] == -1).all()
    assert found["tokens"][0, :count].tolist() == [targets[node] for node in longest]
    assert found["bonus_tokens"][0] == targets[longest[-1]]


# The law of a step


def assert_lossless(law: dict[tuple[int, ...], Any], target: Law, vocabulary: int, stops: tuple[int, ...] = ()) -> None:
    """The target's own law on each emitted sequence, which together are a complete prefix code."""
    support = [sequence for sequence, probability in law.items() if probability]
    # A prefix code: none continues another. In lexicographic order a continuation would follow at once.
    assert all(b[: len(a)] != a for a, b in itertools.pairwise(sorted(support)))
    # Complete: it has all the probability there is, by the target's own measure.
    own = {sequence: own_probability(target, sequence) for sequence in support}
    assert math.isclose(sum(own.values()), 1, rel_tol=0, abs_tol=1e-12)
    assert math.isclose(sum(law.values()), 1, rel_tol=0, abs_tol=1e-12)
    for sequence in support:
        assert all(0 <= token < vocabulary for token in sequence) and sequence
        assert not set(sequence[:-1]) & set(stops)
        assert abs(law[sequence] - own[sequence]) <= 1e-12, sequence
    # What starts with a prefix has the probability that the target gives to the prefix.
    for prefix in {sequence[:n] for sequence in support for n in range(len(sequence))}:
        starts = sum(probability for sequence, probability in law.items() if sequence[: len(prefix)] == prefix)
        assert abs(starts - own_probability(target, prefix)) <= 1e-12, prefix


def own_probability(target: Law, sequence: tuple[int, ...]) -> Any:
    product: Any = Fraction(1)
    for n, token in enumerate(sequence):
        product *= target(sequence[:n])[token]
    return product


@pytest.mark.parametrize("name", TREES)
def test_what_a_step_emits_has_the_law_of_the_target(name: str) -> None:
    tree = assembled(TREES[name])
    for seed, zeros in ((0, 0.0), (1, 0.3), (2, 0.7)):
        target = random_law(seed, 3, zeros)
        law = accept.emitted_law(tree, target)
        assert_lossless(law, target, 3)
        # Fractions: equal to the last bit, and not only to 1e-12.
        assert law == {sequence: own_probability(target, sequence) for sequence in law}
        assert max(map(len, law)) <= int(tree["depths"].max()) + 1
        rounded = accept.emitted_law(tree, lambda prefix, law=target: [float(x) for x in law(prefix)])
        assert rounded == {sequence: pytest.approx(float(p), abs=1e-12) for sequence, p in law.items()}
    assert len({*accept.emitted_law(tree, random_law(0, 3, 0.0))}) >= 3


@pytest.mark.parametrize("name", TREES)
def test_a_complete_prefix_code_by_counting(name: str) -> None:
    """Where every token can be drawn, 3 ** -length sums to 1 over the emitted sequences, whatever the law."""
    law = accept.emitted_law(assembled(TREES[name]), random_law(3, 3, 0.0))
    assert sum(Fraction(1, 3 ** len(sequence)) for sequence in law) == 1


def test_every_path_of_a_tree_is_emitted() -> None:
    for name in ("full", "chain", "star of all tokens"):
        parents, tokens = TREES[name]
        law = accept.emitted_law(assembled((parents, tokens)), random_law(4, 3, 0.0))
        paths = {tuple(tokens[node] for node in path[1:]) for path in trees.root_paths(parents)}
        emitted = {sequence[:-1] for sequence in law}
        inner = {path for path in paths if all((*path, token) in paths for token in range(3))}
        assert emitted == paths - inner


@pytest.mark.parametrize("name", list(TREES)[:30])
@pytest.mark.parametrize("max_depth", [0, 1, 2])
def test_a_lack_of_room_keeps_the_law(name: str, max_depth: int) -> None:
    target = random_law(5, 3)
    law = accept.emitted_law(assembled(TREES[name], max_depth=max_depth), target)
    assert_lossless(law, target, 3)
    assert max(map(len, law)) <= max_depth + 1


@pytest.mark.parametrize("name", list(TREES)[:30])
@pytest.mark.parametrize("stops", [(0,), (1, 2)])
def test_stop_tokens_keep_the_law(name: str, stops: tuple[int, ...]) -> None:
    target = random_law(6, 3)
    assert_lossless(accept.emitted_law(assembled(TREES[name]), target, stop_tokens=list(stops)), target, 3, stops)


@pytest.mark.parametrize("seed", range(10))
def test_broken_links_keep_the_law(seed: int) -> None:
    tree = assembled(random_tree(3 * seed, 3, 12), num_nodes=12)
    rng = np.random.default_rng(seed)
    for name in ("first_child", "next_sibling"):
        tree[name][0, rng.integers(0, 12, 4)] = rng.integers(-3, 15, 4)
    target = random_law(seed, 3)
    assert_lossless(accept.emitted_law(tree, target), target, 3)


@pytest.mark.parametrize("seed", range(6))
def test_steps_one_after_the_other_have_the_law_of_the_target(seed: int) -> None:
    """Each step with another tree, which depends on what was emitted before; sequences of one length compared."""
    length, target = 4, random_law(seed, 3)
    law: dict[tuple[int, ...], Fraction] = {}
    pending: list[tuple[tuple[int, ...], Fraction]] = [((), Fraction(1))]
    while pending:
        before, probability = pending.pop()
        if len(before) >= length:
            law[before[:length]] = law.get(before[:length], Fraction(0)) + probability
            continue
        tree = assembled(random_tree(hash((seed, *before)) % 1000, 3, 7))
        step = accept.emitted_law(tree, lambda prefix, before=before: target((*before, *prefix)))
        pending += [((*before, *tokens), probability * share) for tokens, share in step.items()]
    assert law == accept.sequence_law(target, length)


def test_the_law_of_sequences_by_hand() -> None:
    half, third = Fraction(1, 2), Fraction(1, 3)
    rows = {(): [half, half], (0,): [third, 1 - third], (1,): [0, 1]}
    assert accept.sequence_law(rows.__getitem__, 0) == {(): 1}
    assert accept.sequence_law(rows.__getitem__, 1) == {(0,): half, (1,): half}
    assert accept.sequence_law(rows.__getitem__, 2) == {(0, 0): half / 3, (0, 1): half * 2 / 3, (1, 1): half}


def test_an_idle_request_emits_nothing() -> None:
    tree = assembled(TREES["star"])
    tree["num_nodes"][0] = 0
    assert accept.emitted_law(tree, random_law(0, 3)) == {(): 1}


def test_one_request_of_a_batch() -> None:
    batch = assembled(*TREES.values(), num_nodes=13, max_depth=12)
    target = random_law(7, 3)
    for b, name in enumerate(TREES):
        if b % 9 == 0:
            assert accept.emitted_law(batch, target, request=b) == accept.emitted_law(assembled(TREES[name]), target)


# Walks that are wrong, which the law must show


def bonus_of_the_root(tree: Any, targets: Any, stops: Any) -> Any:
    """The bonus token is drawn from the wrong row."""
    found = accept.accept_greedy(tree, targets, stops)
    if found["bonus_tokens"][0] >= 0:
        found["tokens"][0, found["num_accepted"][0] - 1] = targets[0, 0]
    return found


def without_a_bonus(tree: Any, targets: Any, stops: Any) -> Any:
    """Drops the bonus where a node was accepted: what is emitted then depends on what would have come next."""
    found = accept.accept_greedy(tree, targets, stops)
    if found["bonus_tokens"][0] >= 0 and found["num_accepted"][0] > 1:
        found["tokens"][0, found["num_accepted"][0] - 1] = -1
    return found


def other_rows(tree: Any, targets: Any, stops: Any) -> Any:
    """Each node's token comes from the draw of the node before it."""
    return accept.accept_greedy(tree, targets[:, [0, *range(tree["tokens"].shape[1] - 1)]], stops)


def no_token_0(tree: Any, targets: Any, stops: Any) -> Any:
    """Takes token 0 for none."""
    return accept.accept_greedy(tree, np.where(targets == 0, 1, targets), stops)


@pytest.mark.parametrize("wrong", [bonus_of_the_root, without_a_bonus, other_rows, no_token_0])
def test_a_wrong_walk_shows(wrong: Any) -> None:
    shown = 0
    for name in TREES:
        target = random_law(8, 3, 0.0)
        try:
            assert_lossless(accept.emitted_law(assembled(TREES[name]), target, accept=wrong), target, 3)
        except (AssertionError, ValueError):
            shown += 1
    assert shown > len(TREES) / 3


def test_a_refused_token_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"target token 0 of node \d was refused"):
        accept.emitted_law(
            assembled(TREES["star"]),
            random_law(0, 3, 0.0),
            accept=lambda tree, targets, stops: accept.accept_greedy(tree, np.where(targets == 0, -1, targets), stops),
        )


# The sampled walk


def quarters(seed: int, size: int, vocabulary: int) -> np.ndarray:
    """Rows of probabilities in quarters, [1, size, V]."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, (size, 4))
    return (tokens[:, :, None] == np.arange(vocabulary)).sum(axis=1)[None].astype(np.float32) / 4


def all_uniforms(size: int) -> Iterator[np.ndarray]:
    for numbers in itertools.product(range(4), repeat=size):
        yield np.array([numbers]) / np.float32(4) + np.float32(0.1)


@pytest.mark.parametrize("name", ["root alone", "star", "chain"])
@pytest.mark.parametrize("seed", range(3))
def test_sampling_over_all_uniforms_has_the_law_of_the_rows(name: str, seed: int) -> None:
    """A quarter of each unit interval for each quarter of probability: all draws, each as likely as the others."""
    parents, tokens = (TREES[name][n][:4] for n in (0, 1))
    tree, rows = assembled((parents, tokens)), quarters(seed, len(parents), 3)
    node_of = {tuple(tokens[n] for n in path[1:]): path[-1] for path in trees.root_paths(parents)}
    law: dict[tuple[int, ...], Fraction] = {}
    for uniforms in all_uniforms(len(parents)):
        found = accept.accept_sampled(tree, rows, uniforms=uniforms)
        emitted = tuple(token for token in found["tokens"][0].tolist() if token >= 0)
        law[emitted] = law.get(emitted, Fraction(0)) + Fraction(1, 4 ** len(parents))
    exact = accept.emitted_law(tree, lambda prefix: [Fraction(float(p)) for p in rows[0, node_of[prefix]]])
    assert law == exact


@pytest.mark.parametrize("a_node", [False, True])
def test_seeded_draws_are_those_of_the_positions(a_node: bool) -> None:
    batch, size, vocabulary = 30, 7, 5
    rng = np.random.default_rng(int(a_node))
    tree = assembled(*(random_tree(seed, vocabulary, size) for seed in range(batch)), num_nodes=size)
    probs = rng.random((batch, size, vocabulary)).astype(np.float32)
    seeds = rng.integers(-(2**63), 2**63, batch)
    roots = rng.integers(-(2**62), 2**62, batch)
    positions = roots[:, None] + 3 * np.arange(size) if a_node else roots
    found = accept.accept_sampled(tree, probs, seeds=seeds, positions=positions)
    assert found["num_accepted"].max() >= 2 and (found["flags"] == 0).all()
    for b in range(batch):
        for depth in range(int(found["num_accepted"][b])):
            node = int(found["nodes"][b, depth])
            position = int(roots[b]) + (3 * node if a_node else depth)
            weights = accept.row_weights(probs[b, node].tolist())
            assert weights is not None
            token = accept.draw(weights, accept.position_bits(int(seeds[b]), position))
            assert found["tokens"][b, depth] == token
    unsigned = accept.accept_sampled(tree, probs, seeds=seeds.view(np.uint64), positions=positions)
    assert all((unsigned[name] == found[name]).all() for name in found)


def test_seeded_draws_do_not_depend_on_the_tree_or_the_batch() -> None:
    """With laws that are a function of the prefix, the tokens of a position are the same under any tree."""
    vocabulary, seeds, start = 4, np.array([5, 5, 99]), np.array([40, 40, 40])
    target = random_law(9, vocabulary, 0.0)
    emitted = []
    for seed in range(20):
        requests = [random_tree(100 * seed + b, vocabulary, 9) for b in range(3)]
        tree = assembled(*requests, num_nodes=9, max_depth=8)
        probs = np.zeros((3, 9, vocabulary))
        for b, (parents, tokens) in enumerate(requests):
            for path in trees.root_paths(parents):
                probs[b, path[-1]] = [float(p) for p in target(tuple(tokens[node] for node in path[1:]))]
        found = accept.accept_sampled(tree, probs, seeds=seeds, positions=start)
        emitted.append([[token for token in row if token >= 0] for row in found["tokens"].tolist()])
    longest = [max((step[b] for step in emitted), key=len) for b in range(3)]
    assert min(map(len, longest)) >= 2
    for step in emitted:
        for b in range(3):
            assert step[b] == longest[b][: len(step[b])]
    assert longest[0][:2] == longest[1][:2] and any(step[0] != step[2] for step in emitted)


@pytest.mark.parametrize("row", [[0, 0, 0], [NAN, 1, 0], [0.5, 0.5, -1e-9], [1.5, 0, 0], [2**-45] * 3])
def test_a_row_without_a_law_is_flagged_where_the_walk_comes_to_it(row: list[float]) -> None:
    tree = assembled(([-1, 0, 0], [9, 1, 2]))
    sure = [[0, 1, 0], row, [0, 0, 1]]
    for order, count, flags in (([0, 1, 2], 2, 1), ([1, 0, 2], 1, 1), ([0, 2, 1], 2, 0)):
        probs = np.array([[sure[n] for n in order]], dtype=np.float32)
        found = accept.accept_sampled(tree, probs, uniforms=np.full((1, 3), 0.5))
        assert (found["num_accepted"].tolist(), found["flags"].tolist()) == ([count], [flags])
        assert (found["bonus_tokens"][0] == -1) == bool(flags)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1 - 2**-24, 3), (1.0, 3), (INF, 3), (-0.0, 1), (0.5, 3)])
def test_no_token_without_probability_is_drawn_at_the_ends(uniform: float, token: int) -> None:
    probs = np.array([[[0, 0.5, 0, 0.5, 0]]], dtype=np.float32)
    found = accept.accept_sampled(assembled(([-1], [0])), probs, uniforms=np.array([[uniform]]))
    assert found["bonus_tokens"].tolist() == [token]
    for bad in (NAN, -1e-30):
        found = accept.accept_sampled(assembled(([-1], [0])), probs, uniforms=np.array([[bad]]))
        assert found["flags"].tolist() == [accept.BAD_TARGET]


def test_randomness_is_given_in_one_way() -> None:
    tree, probs, one = assembled(([-1], [0])), np.ones((1, 1, 2)), np.ones(1, np.int64)
    for given in ({}, {"seeds": one}, {"positions": one}, {"seeds": one, "positions": one, "uniforms": one}):
        with pytest.raises(ValueError, match="give seeds and positions, or uniforms"):
            accept.accept_sampled(tree, probs, **given)


# argmax_tokens


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_argmax_by_hand(dtype: Any) -> None:
    rows = [
        ([1, 3, 2, 3], 1), ([3, 1, 2, 3], 0), ([1, 2, 3, 4], 3), ([-0.0, 0.0, -1, 0.0], 0), ([0.0, -0.0, -1, 0], 0),
        ([-INF] * 4, 0), ([-INF, -INF, -9, -INF], 2), ([1, INF, 2, INF], 1), ([NAN, 1, 2, 3], -1),
        ([3, 1, 2, NAN], -1), ([-INF, NAN, -INF, -INF], -1), ([INF, NAN, 1, 2], -1), ([NAN] * 4, -1),
    ]  # fmt: skip
    logits = np.array([[row for row, _ in rows]], dtype=dtype)
    found = accept.argmax_tokens(logits)
    assert found.dtype == np.int32 and found.tolist() == [[token for _, token in rows]]
    assert accept.argmax_tokens(logits[0, 0, :1]).tolist() == 0


# target_probs


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_target_probs_against_decimals(dtype: Any, temperature: float) -> None:
    logits = (np.random.default_rng(3).standard_normal((2, 2, 30)) * 4).astype(dtype)
    probs = accept.target_probs(logits, temperature)
    with decimal.localcontext(decimal.Context(prec=40)):
        for b, i in np.ndindex(2, 2):
            exponents = [decimal.Decimal(x) / decimal.Decimal(temperature) for x in logits[b, i].astype(float).tolist()]
            weights = [x.exp() for x in exponents]
            for p, weight in zip(probs[b, i], weights, strict=True):
                assert p == pytest.approx(float(weight / sum(weights)), rel=1e-13)


def kept(row: list[float], temperature: float = 1.0, **limits: Any) -> list[int]:
    probs = accept.target_probs(np.array([[row]], dtype=np.float64), temperature, **limits)[0, 0]
    assert probs.sum() == pytest.approx(1, rel=1e-14)
    exact = np.exp(np.array(row) / temperature) * (probs > 0)
    np.testing.assert_allclose(probs, exact / exact.sum(), rtol=1e-13)
    return np.flatnonzero(probs).tolist()


def test_kept_tokens_by_hand() -> None:
    logs = [math.log(p) for p in (0.1, 0.4, 0.1, 0.3, 0.1)]
    assert kept(logs, top_k=1) == [1] and kept(logs, top_k=2) == [1, 3]
    for count in (3, 4, 5, 0, -1, 99):  # ties at the border are all kept; the rest is off
        assert kept(logs, top_k=count) == [0, 1, 2, 3, 4]
    for mass, tokens in ((1e-9, [1]), (0.399, [1]), (0.401, [1, 3]), (0.699, [1, 3]), (0.701, [0, 1, 2, 3, 4])):
        assert kept(logs, top_p=mass) == tokens
    for mass in (1.0, 1.5, INF):
        assert kept(logs, top_p=mass) == [0, 1, 2, 3, 4]
    # Over what top_k kept, which is renormalised: 4/7 of it is the likeliest token's.
    assert kept(logs, top_k=2, top_p=0.57) == [1] and kept(logs, top_k=2, top_p=0.58) == [1, 3]
    # At another temperature: squares, 16 : 9 : 1 : 1 : 1.
    assert kept(logs, 0.5, top_p=0.57) == [1] and kept(logs, 0.5, top_p=0.58) == [1, 3]
    equal = [2.0] * 4
    assert kept(equal, top_k=1) == kept(equal, top_p=0.01) == [0, 1, 2, 3]
    assert kept([0.0, -INF, 1.0, -INF], top_k=3) == kept([0.0, -INF, 1.0, -INF], top_p=0.999) == [0, 2]


@pytest.mark.parametrize("seed", range(30))
def test_kept_tokens_by_counting(seed: int) -> None:
    """What is kept, by the definition that asks each token: how many, and how much, is likelier or as likely."""
    rng = np.random.default_rng(seed)
    row = np.round(rng.standard_normal(12) * 2, 1 + seed % 2)
    top_k, top_p = int(rng.integers(0, 14)), float(rng.uniform(0, 1.1))
    by_k = [x for x in row if 0 < top_k < 12 and (row > x).sum() >= top_k]  # not kept: k others are larger
    left = np.array([x for x in row if x not in by_k])
    shares = np.exp(left) / np.exp(left).sum()
    by_p = {float(x) for x in left if top_p < 1 and shares[left > x].sum() >= top_p}
    expected = [n for n, x in enumerate(row) if x not in by_k and float(x) not in by_p]
    assert kept(row.tolist(), top_k=top_k, top_p=top_p) == expected


def test_temperature_0_and_rows_without_a_law() -> None:
    rows = [[1, 3, 3, 2], [NAN, 1, 2, 3], [1, 2, INF, 3], [-INF] * 4, [-INF, -2, -2, -9]]
    probs = accept.target_probs(np.array([rows, rows], dtype=np.float32), np.array([0, 1], dtype=np.float32), 2, 0.1)
    assert probs[0].tolist() == [[0, 1, 0, 0], [0] * 4, [0] * 4, [0] * 4, [0, 1, 0, 0]]
    assert probs[1].tolist() == [[0, 0.5, 0.5, 0], [0] * 4, [0] * 4, [0] * 4, [0, 0.5, 0.5, 0]]
    for temperature, top_p in ((-1.0, 1.0), (NAN, 1.0), (INF, 1.0), (1.0, 0.0), (1.0, NAN), (0.0, -1.0)):
        assert not accept.target_probs(np.zeros((1, 1, 3)), temperature, top_p=top_p).any()


# compact_kv, gather_accepted, verify_tree_greedy


@pytest.mark.parametrize("page_size", [None, 1, 3, 4])
def test_rows_move_next_to_the_prefix(page_size: int | None) -> None:
    """A list of rows for each request: the prefix, then what was accepted, then what stood there before."""
    rng = np.random.default_rng(5)
    lengths, capacity = np.array([0, 3, 7], dtype=np.int32), 24
    nodes = np.array([[0, 2, 3, 9], [0, 1, -1, -1], [-1, -1, -1, -1]], dtype=np.int32)
    counts = np.array([4, 2, 0], dtype=np.int32)
    rows = rng.integers(0, 99, (3, capacity, 2))
    cache, table = rows, None
    if page_size:
        pages = capacity // page_size
        table = rng.permutation(3 * pages).reshape(3, pages).astype(np.int32)
        cache = np.zeros((3 * pages, page_size, 2), dtype=np.int64)
        cache[table] = rows.reshape(3, pages, page_size, 2)
    (moved, again), after = accept.compact_kv([cache, cache + 100], lengths, nodes, counts, table)
    assert (again == moved + 100).all() and after.tolist() == [4, 5, 7] and after.dtype == np.int32
    if page_size:
        moved = moved[table].reshape(3, capacity, 2)
    for b, path in enumerate(([0, 2, 3, 9], [0, 1], [])):
        length = int(lengths[b])
        expected = rows[b].tolist()
        expected[length : length + len(path)] = [rows[b, length + node].tolist() for node in path]
        assert moved[b].tolist() == expected
    assert lengths.tolist() == [0, 3, 7]


def test_moves_that_lead_outside_are_left_out() -> None:
    cache = np.arange(4 * 6).reshape(4, 6, 1)
    lengths = np.array([-1, 4, 3, 1], dtype=np.int32)
    nodes = np.array([[0, 1, 2], [0, 1, 2], [0, 2, 4], [0, 3, 1]], dtype=np.int32)
    (moved,), after = accept.compact_kv([cache], lengths, nodes, np.full(4, 3, dtype=np.int32))
    expected = cache.copy()
    expected[2, 4] = cache[2, 5]  # its third node stands behind the cache
    expected[3, 2] = cache[3, 4]  # the third is smaller than its place
    assert (moved == expected).all() and after.tolist() == [-1, 4, 6, 4]
    table = np.array([[0, -1, 1], [3, 2, 4]], dtype=np.int32)  # pages of 6 rows, of which four are there
    lengths, nodes = np.array([4, 10], dtype=np.int32), np.array([[0, 9, 10], [0, 2, 3]], dtype=np.int32)
    (moved,), after = accept.compact_kv([cache], lengths, nodes, np.full(2, 3, dtype=np.int32), table)
    expected = cache.copy()
    expected[0, 5] = cache[1, 1]  # row 13 to row 5; row 14 would go to row 6, on no page
    assert (moved == expected).all() and after.tolist() == [7, 13]


def test_gathered_rows() -> None:
    x = np.arange(2 * 4 * 2, dtype=np.float32).reshape(2, 4, 2)
    nodes = np.array([[0, 3, -1], [0, 4, 2]], dtype=np.int32)
    found = accept.gather_accepted(x, nodes)
    assert found.dtype == np.float32
    assert found.tolist() == [[[0, 1], [6, 7], [0, 0]], [[8, 9], [0, 0], [12, 13]]]
    assert accept.gather_accepted(x[..., 0], nodes).tolist() == [[0, 6, 0], [8, 0, 12]]


@pytest.mark.parametrize("seed", range(20))
def test_sglang_accepts_what_the_walk_accepts(seed: int) -> None:
    batch, size, columns = 4, 9, 1 + seed % 6
    rng = np.random.default_rng(seed)
    tree = assembled(*(random_tree(5 * seed + b, 3, size) for b in range(batch)), num_nodes=size, max_depth=columns - 1)
    targets = rng.integers(0, 3, (batch, size))
    # Where each node stands; the root stays.
    order = np.argsort(np.hstack([np.full((batch, 1), -1.0), rng.random((batch, size - 1))]), axis=1)
    rows = np.arange(batch)[:, None]

    def spread(x: np.ndarray) -> np.ndarray:
        found = np.zeros_like(x)
        found[rows, order] = x
        return found

    links = {}
    for name in ("first_child", "next_sibling"):
        moved = np.where(tree[name] < 0, -1, order[rows, np.maximum(tree[name], 0)])
        links[name] = spread(moved)
    places = np.arange(batch * size).reshape(batch, size)[::-1]
    flat = np.zeros(batch * size, dtype=np.int64)
    flat[places] = spread(targets)
    before = np.full(batch * size, -9), np.full((batch, columns), -8), np.full(batch, -7)
    predicts, index, count = accept.verify_tree_greedy(
        *before, spread(tree["tokens"]), places, links["first_child"], links["next_sibling"], flat.reshape(batch, size)
    )
    found = accept.accept_greedy(tree, targets)
    assert (count == found["num_accepted"] - 1).all() and (before[0] == -9).all()
    untouched = np.ones(batch * size, dtype=bool)
    for b in range(batch):
        path = found["nodes"][b, : count[b] + 1]
        assert index[b].tolist() == [*places[b, order[b, path]], *[-8] * (columns - len(path))]
        assert predicts[index[b, : len(path)]].tolist() == targets[b, path].tolist()
        untouched[index[b, : len(path)]] = False
    assert (predicts[untouched] == -9).all()


def test_sglang_by_hand_and_broken() -> None:
    #   0 -> 2 -> 1, and 3 beside 2
    arrays = {
        "candidates": [[5, 7, 6, 6]],
        "retrive_index": [[0, 1, 2, 3]],
        "retrive_next_token": [[2, -1, 1, -1]],
        "retrive_next_sibling": [[-1, -1, 3, -1]],
        "target_predict": [[6, 8, 7, 9]],
    }
    for change, predicts, index, count in (
        ({}, [6, 8, 7, -1], [0, 2, 1], 2),
        ({"target_predict": [[6, 8, 0, 9]]}, [6, -1, 0, -1], [0, 2, -1], 1),
        ({"candidates": [[5, 7, 0, 6]]}, [6, -1, -1, 9], [0, 3, -1], 1),
        ({"retrive_next_token": [[4, -1, 1, -1]]}, [6, -1, -1, -1], [0, -1, -1], 0),
        ({"retrive_next_token": [[-5, -1, 1, -1]]}, [6, -1, -1, -1], [0, -1, -1], 0),
        ({"candidates": [[5, 7, 0, 0]], "retrive_next_sibling": [[-1, -1, 3, 2]]}, [6, -1, -1, -1], [0, -1, -1], 0),
        ({"retrive_index": [[0, 1, 4, 3]]}, [6, -1, -1, -1], [0, -1, -1], 0),
        ({"retrive_index": [[-1, 1, 2, 3]]}, [-1, -1, -1, -1], [-1, -1, -1], 0),
    ):
        given = {name: np.array(x) for name, x in (arrays | change).items()}
        written = np.full(4, -1), np.full((1, 3), -1), np.full(1, -1)
        found = accept.verify_tree_greedy(*written, **given)
        assert [x.tolist() for x in found] == [predicts, [index], [count]]


@pytest.mark.parametrize("dtype", [np.uint16, np.int64])
def test_oracles_refuse_dtypes_that_they_would_misread(dtype: Any) -> None:
    x = np.zeros((1, 1, 3), dtype)
    with pytest.raises(TypeError, match="logits has dtype"):
        accept.argmax_tokens(x)
    with pytest.raises(TypeError, match="logits has dtype"):
        accept.target_probs(x, 1.0)
    with pytest.raises(TypeError, match="target_probs has dtype"):
        accept.accept_sampled(assembled(([-1], [0])), x, uniforms=np.zeros((1, 1)))
