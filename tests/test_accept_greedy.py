"""accept_greedy: kernel and mirror against the oracle, and the laws of the arguments and the results.

The kernel runs in the simulator, or on a GPU where there is one. The oracle itself is held against less in
test_accept_oracle.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from accept_cases import (
    FIELDS,
    FILLER,
    NAN,
    STAGED,
    UNSTAGED,
    changed,
    check_accepted,
    check_contract,
    check_greedy,
    check_tokens,
    drafted_tree,
    following_targets,
    host_arrays,
    make_tree,
    mirrored_greedy,
    spoiled,
)
from numba import cuda
from test_build_tree import function_source, phases
from test_verify_attention import LAYOUTS, as_strided, big_endian, change, misaligned, read_only, value
from wrong_accept import GREEDY_MISTAKES, build

import ddtree_numba as dd
from ddtree_numba.accept import accepted as shared_code
from ddtree_numba.accept import argmax_tokens, greedy, sampled
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.tree.draft_tree import DTYPES
from refs import accept

only_simulated = pytest.mark.skipif(not SIMULATOR, reason="wrong kernels run in the simulator alone")
LARGEST = 2**31 - 1
#        0
#      /   \
#     1     2        and 5 behind 3: the path below is 0, 1, 3, 5, then token 2
#     3     4
TREE = ([-1, 0, 0, 1, 2, 3], [9, 4, 6, 5, 5, 0])
PATH = [4, 5, 8, 0, 8, 2]


def check_both(tree: dd.DraftTree, targets: np.ndarray, stop_tokens: Any = None) -> dd.Accepted:
    """Kernel and mirror against the oracle; the kernel writes over what no walk gives."""
    exact = accept.accept_greedy(host_arrays(tree), targets, stop_tokens)
    check_accepted(mirrored_greedy(tree, targets, stop_tokens), exact)
    found = dd.accept_greedy(tree, targets, stop_tokens=stop_tokens, out=spoiled(targets.shape[0], tree.max_depth))
    check_accepted(found, exact)
    return found


# Trees that the builder makes


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("tree_budget", [0, 1, STAGED, greedy.MAX_STAGED - 1, greedy.MAX_STAGED, UNSTAGED])
def test_kernel_on_drafted_trees(tree_budget, dtype):
    rng = np.random.default_rng(tree_budget)
    tree = drafted_tree(rng, 7, tree_budget, length=8)
    found = check_both(tree, following_targets(rng, tree, dtype=dtype))
    check_contract(found, tree)
    assert (found.num_accepted == 0).sum() == 1, "one request is idle"
    if tree_budget >= STAGED:
        assert found.num_accepted.max() >= 4, "no walk was long"


@pytest.mark.parametrize("seed", range(10))
def test_mirror_on_hundreds_of_drafted_trees(seed):
    rng = np.random.default_rng(100 + seed)
    lengths = []
    for _ in range(12):
        vocabulary, length = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        tree = drafted_tree(rng, 16, int(rng.integers(0, 60)), vocabulary=vocabulary, length=length)
        targets = following_targets(rng, tree, vocabulary=vocabulary + 1, share=float(rng.choice([0.5, 0.95])))
        stops = [None, int(rng.integers(6)), rng.integers(-1, 12, 3).tolist(), rng.integers(-1, 6, (16, 2))]
        stop_tokens = stops[int(rng.integers(4))]
        found = mirrored_greedy(tree, targets, stop_tokens)
        check_greedy(found, tree, targets, stop_tokens)
        check_contract(found, tree)
        lengths += found.num_accepted.tolist()
    assert len(set(lengths)) >= 5, "all walks are of few lengths"


@pytest.mark.parametrize("seed", range(3))
def test_kernel_on_drafted_trees_with_stop_tokens(seed):
    rng = np.random.default_rng(seed)
    tree = drafted_tree(rng, 8, (STAGED, UNSTAGED, STAGED)[seed], length=7)
    targets = following_targets(rng, tree)
    for stop_tokens in (3, [7, 1], np.array([2, -1]), rng.integers(-1, 6, (8, 2))):
        found = check_both(tree, targets, stop_tokens)
        check_contract(found, tree)
    assert (dd.accept_greedy(tree, targets, stop_tokens=[0, 1, 2, 3]).flags[tree.num_nodes > 0] == dd.STOPPED).all()


# By hand


@pytest.mark.parametrize(
    ("targets", "stops", "nodes", "tokens", "bonus", "flags"),
    [
        (PATH, None, [0, 1, 3, 5], [4, 5, 0, 2], 2, 0),
        (PATH, (), [0, 1, 3, 5], [4, 5, 0, 2], 2, 0),
        (PATH, 5, [0, 1, 3], [4, 5], -1, dd.STOPPED),
        (PATH, 4, [0, 1], [4], -1, dd.STOPPED),
        (PATH, np.int64(5), [0, 1, 3], [4, 5], -1, dd.STOPPED),
        (PATH, [7, 0], [0, 1, 3, 5], [4, 5, 0], -1, dd.STOPPED),
        (PATH, (5, 4), [0, 1], [4], -1, dd.STOPPED),
        (PATH, {5, 77}, [0, 1, 3], [4, 5], -1, dd.STOPPED),
        (PATH, frozenset({2}), [0, 1, 3, 5], [4, 5, 0, 2], 2, dd.STOPPED),
        (PATH, range(5, 9), [0, 1, 3], [4, 5], -1, dd.STOPPED),
        (PATH, np.array([-1, 2], np.int32), [0, 1, 3, 5], [4, 5, 0, 2], 2, dd.STOPPED),
        (PATH, np.array([-1, 0], np.int64), [0, 1, 3, 5], [4, 5, 0], -1, dd.STOPPED),
        (PATH, np.array([[2, 7]]), [0, 1, 3, 5], [4, 5, 0, 2], 2, dd.STOPPED),
        (PATH, np.array([2**32 + 5, 2**32]), [0, 1, 3, 5], [4, 5, 0, 2], 2, 0),  # no token is as large
        (PATH, [9, 6, 8], [0, 1, 3, 5], [4, 5, 0, 2], 2, 0),  # tokens off the path, and the root's
        ([7, *PATH[1:]], 7, [0], [7], 7, dd.STOPPED),
        ([0, *PATH[1:]], None, [0], [0], 0, 0),
        ([LARGEST, *PATH[1:]], LARGEST, [0], [LARGEST], LARGEST, dd.STOPPED),
        ([2**31, *PATH[1:]], None, [0], [], -1, dd.BAD_TARGET),
        ([2**32 + 4, *PATH[1:]], None, [0], [], -1, dd.BAD_TARGET),
        ([-(2**63), *PATH[1:]], None, [0], [], -1, dd.BAD_TARGET),
        ([4 - 2**32, *PATH[1:]], None, [0], [], -1, dd.BAD_TARGET),
        ([-1, *PATH[1:]], np.array([-1]), [0], [], -1, dd.BAD_TARGET),  # a negative stop token is none
        ([*PATH[:3], -5, 8, 2], None, [0, 1, 3], [4, 5], -1, dd.BAD_TARGET),
        ([*PATH[:2], -5, 0, -5, 2], None, [0, 1, 3, 5], [4, 5, 0, 2], 2, 0),  # nobody comes there
    ],
)
def test_walks_by_hand(targets, stops, nodes, tokens, bonus, flags):
    tree = make_tree(TREE, max_depth=4)
    wanted = {
        "nodes": np.array([nodes + [-1] * (5 - len(nodes))]),
        "num_accepted": np.array([len(nodes)]),
        "bonus_tokens": np.array([bonus]),
        "flags": np.array([flags]),
        "tokens": np.array([tokens + [-1] * (5 - len(tokens))]),
    }
    given = np.array([targets], np.int64)
    check_accepted(dd.accept_greedy(tree, given, stop_tokens=stops, out=spoiled(1, 4), validate=True), wanted)
    if isinstance(stops, (tuple, set, frozenset, range)):
        stops = [*stops, -1]
    check_accepted(mirrored_greedy(tree, given, stops), wanted)


def test_many_stop_tokens():
    # More than the kernel has room for beside the tree.
    many = np.arange(100, 103 + greedy.MAX_STAGED)
    for stops in (many, [*many.tolist(), 5], np.append(many, 5)[None]):
        found = check_both(make_tree(TREE, max_depth=4), np.array([PATH], np.int32), stops)
        assert found.flags.tolist() == [0 if stops is many else dd.STOPPED]


def test_of_equal_siblings_the_first():
    tree = make_tree(([-1, 0, 0, 0, 2, 1, 3], [8, 1, 0, 0, 5, 5, 6]))
    found = check_both(tree, np.array([[0, 9, 5, 6, 7, 9, 9]], np.int32))
    assert found.nodes.tolist() == [[0, 2, 4]]


def test_token_0_is_an_ordinary_token():
    tree = make_tree(([-1, 0, 1, 2], [0, 0, 0, 0]), num_nodes=6)
    found = check_both(tree, np.zeros((1, 6), np.int32))
    assert found.nodes.tolist() == [[0, 1, 2, 3]]
    assert found.tokens.tolist() == [[0, 0, 0, 0]]
    found = check_both(tree, np.zeros((1, 6), np.int32), 0)
    assert found.tokens.tolist() == [[0, -1, -1, -1]]


def test_the_root_alone():
    for num_nodes, max_depth in ((1, 0), (5, 0), (5, 3)):
        tree = make_tree(([-1], [3]), ([-1], [3]), num_nodes=num_nodes, max_depth=max_depth)
        targets = np.full((2, num_nodes), -9, np.int32)
        targets[:, 0] = 3, -1
        found = check_both(tree, targets)
        assert found.num_accepted.tolist() == [1, 1]
        assert found.bonus_tokens.tolist() == [3, -1]
        assert found.flags.tolist() == [0, dd.BAD_TARGET]


@pytest.mark.parametrize("num_nodes", [1, 7])
def test_no_requests(num_nodes):
    tree = dd.build_tree(
        *(np.zeros((0, 3, 4), t) for t in (np.float32, np.int32)), np.zeros(0, np.int32), num_nodes - 1
    )
    for validate in (False, True):
        found = dd.accept_greedy(tree, np.zeros((0, num_nodes), np.int32), stop_tokens=[1], validate=validate)
        assert found.nodes.shape == found.tokens.shape == (0, min(num_nodes - 1, 3) + 1)
        assert found.num_accepted.shape == found.bonus_tokens.shape == found.flags.shape == (0,)


@pytest.mark.parametrize("count", [0, -1, -(2**31)])
def test_an_idle_slot_has_nothing(count):
    tree = make_tree(TREE, TREE, TREE, max_depth=4)
    tree.num_nodes[1] = count
    tree.tokens[1] = 4  # whatever its rows hold
    found = check_both(tree, np.array([PATH] * 3, np.int32), [4])
    assert found.num_accepted.tolist() == [2, 0, 2]
    assert found.flags.tolist() == [dd.STOPPED, 0, dd.STOPPED]
    for name in ("nodes", "bonus_tokens", "tokens"):
        assert (getattr(found, name)[1] == -1).all()


def test_what_stands_behind_a_stop_token_does_not_show():
    # Nodes 1, 2, 3 continue each other and the targets agree; the stop token is that of node 1.
    tree = make_tree(([-1, 0, 1, 2], [9, 11, 12, 13]))
    targets = np.array([[11, 12, 13, 14]], np.int32)
    whole = check_both(tree, targets)
    assert whole.tokens.tolist() == [[11, 12, 13, 14]]
    found = check_both(tree, targets, [11])
    assert found.nodes.tolist() == [[0, 1, -1, -1]]
    assert found.tokens.tolist() == [[11, -1, -1, -1]]
    assert found.bonus_tokens.tolist() == [-1]
    assert found.flags.tolist() == [dd.STOPPED]
    for name in FIELDS:
        assert not np.isin(getattr(found, name), [12, 13, 14]).any()


def test_a_walk_is_no_longer_than_the_result_has_room_for():
    chain = ([-1, 0, 1, 2, 3], [5, 1, 2, 3, 4])
    targets = np.array([[1, 2, 3, 4, 6]], np.int32)
    for max_depth in range(6):
        found = check_both(make_tree(chain, max_depth=max_depth), targets)
        last = min(max_depth, 4)
        assert found.nodes[0, : last + 1].tolist() == list(range(last + 1))
        assert found.bonus_tokens.tolist() == [int(targets[0, last])]
        assert found.flags.tolist() == [0]
    found = check_both(make_tree(chain, max_depth=2), targets, [3])
    assert (found.bonus_tokens.tolist(), found.flags.tolist()) == ([3], [dd.STOPPED])


# Contents that are no tree


@pytest.mark.parametrize(
    ("name", "node", "link", "nodes", "flags"),
    [
        ("first_child", 0, 0, [0], dd.BAD_LINK),
        ("first_child", 0, 6, [0], dd.BAD_LINK),
        ("first_child", 0, LARGEST, [0], dd.BAD_LINK),
        ("first_child", 0, -2, [0], dd.BAD_LINK),
        ("first_child", 0, -(2**31), [0], dd.BAD_LINK),
        ("first_child", 0, -1, [0], 0),
        ("first_child", 0, 2, [0], 0),  # a wrong, later node is a node
        ("first_child", 1, 1, [0, 1], dd.BAD_LINK),
        ("first_child", 1, 0, [0, 1], dd.BAD_LINK),
        ("first_child", 5, 3, [0, 1, 3, 5], dd.BAD_LINK),
        ("next_sibling", 1, 1, [0, 1, 3, 5], 0),  # behind the child that was found
        ("next_sibling", 3, -7, [0, 1, 3, 5], 0),
    ],
)
def test_broken_links_end_the_walk(name, node, link, nodes, flags):
    tree = make_tree(TREE, max_depth=4)
    getattr(tree, name)[0, node] = link
    found = check_both(tree, np.array([PATH], np.int32))
    assert found.nodes.tolist() == [nodes + [-1] * (5 - len(nodes))]
    assert found.flags.tolist() == [flags]
    assert found.bonus_tokens[0] == PATH[nodes[-1]]


def test_a_broken_link_and_a_stop_token_in_one_walk():
    tree = make_tree(TREE, max_depth=4)
    tree.first_child[0, 1] = 17
    assert check_both(tree, np.array([PATH], np.int32), 5).flags.tolist() == [dd.BAD_LINK + dd.STOPPED]


def test_cycles_end():
    links = ([1, -1, -1, -1], [-1, 2, 3, 1])  # siblings 1, 2, 3, 1, ..
    tree = make_tree(([-1, 0, 0, 0], [9, 1, 2, 3]), max_depth=3)
    targets = np.full((1, 4), 8, np.int32)
    for first_child, next_sibling in (links, ([1, 2, 1, -1], [-1] * 4), ([1, 1, -1, -1], [-1] * 4)):
        broken = changed(
            tree, first_child=np.array([first_child], np.int32), next_sibling=np.array([next_sibling], np.int32)
        )
        for t in (8, 1, 2, 3):
            check_both(broken, targets * 0 + t)
    broken = changed(tree, next_sibling=np.array([links[1]], np.int32))
    assert check_both(broken, targets).flags.tolist() == [dd.BAD_LINK]


@pytest.mark.parametrize("num_nodes", [STAGED + 1, UNSTAGED + 1])
def test_links_to_nodes_behind_the_last(num_nodes):
    # What is there looks like a node.
    tree = make_tree(([-1, 0, 1], [9, 1, 2]), num_nodes=num_nodes, max_depth=4)
    tree.num_nodes[0] = num_nodes - 4
    tree.tokens[0, -4:] = 5
    tree.first_child[0, 0] = num_nodes - 4
    found = check_both(tree, np.full((1, num_nodes), 5, np.int32))
    assert found.nodes.tolist() == [[0, -1, -1, -1, -1]]
    assert found.flags.tolist() == [dd.BAD_LINK]


def test_more_nodes_than_there_is_room_for_are_as_many_as_there_is():
    tree = make_tree(([-1, 0, 1, 2], [5, 1, 2, 3]))
    targets = np.array([[1, 2, 3, 4]], np.int32)
    for count in (5, LARGEST):
        tree.num_nodes[0] = count
        assert check_both(tree, targets).num_accepted.tolist() == [4]


def garbage_tree(rng: np.random.Generator, batch: int, num_nodes: int, max_depth: int) -> dd.DraftTree:
    """Links, tokens and counts of anything; the few that are right let walks begin."""
    tree = make_tree(*[([-1], [0])] * batch, num_nodes=num_nodes, max_depth=max_depth)
    for name in ("first_child", "next_sibling"):
        links = rng.integers(-2, num_nodes + 2, (batch, num_nodes))
        later = np.minimum(np.arange(num_nodes) + rng.integers(1, 4, links.shape), num_nodes)
        links = np.where(rng.random(links.shape) < 0.7, later, links)
        wild = rng.choice([-(2**31), LARGEST, -1, 0], links.shape)
        getattr(tree, name)[...] = np.where(rng.random(links.shape) < 0.05, wild, links)
    tree.tokens[...] = rng.integers(-1, 3, tree.tokens.shape)
    tree.num_nodes[...] = rng.choice([-3, 0, 1, num_nodes // 2, num_nodes, num_nodes, num_nodes + 7, LARGEST], batch)
    return tree


def garbage_targets(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    targets = rng.integers(0, 3, shape)
    wild = rng.choice([-1, -(2**63), 2**31, 2**32, 2**63 - 1, 2**31 - 1], shape)
    return np.where(rng.random(shape) < 0.03, wild, targets)


@pytest.mark.parametrize("num_nodes", [3, STAGED + 1, UNSTAGED + 1])
def test_kernel_on_garbage(num_nodes):
    rng = np.random.default_rng(num_nodes)
    tree = garbage_tree(rng, 24, num_nodes, max_depth=min(num_nodes, 9))
    found = check_both(tree, garbage_targets(rng, tree.tokens.shape), [2])
    if num_nodes > 3:
        assert {f & 7 for f in found.flags.tolist()} >= {0, dd.BAD_LINK, dd.STOPPED}


@pytest.mark.parametrize("seed", range(4))
def test_mirror_on_garbage(seed):
    rng = np.random.default_rng(seed)
    seen: set[int] = set()
    for _ in range(10):
        tree = garbage_tree(rng, 32, int(rng.integers(1, 40)), max_depth=int(rng.integers(0, 40)))
        targets = garbage_targets(rng, tree.tokens.shape)
        found = mirrored_greedy(tree, targets, [2] if seed % 2 else None)
        check_greedy(found, tree, targets, [2] if seed % 2 else None)
        assert (found.num_accepted <= tree.max_depth + 1).all()
        seen |= set(found.flags.tolist())
    assert seen >= {0, dd.BAD_TARGET, dd.BAD_LINK}


# validate


VALID_CHANGES = {
    "a number of nodes beyond Q": ("num_nodes", (1,), 7, r"tree\.num_nodes\[1\] is 7; .* Q = 6"),
    "a negative number of nodes": ("num_nodes", (0,), -1, r"tree\.num_nodes\[0\] is -1"),
    "a child that is its parent": ("first_child", (1, 3), 3, r"tree\.first_child\[1, 3\] is 3; .* has 6"),
    "a child before its parent": ("first_child", (1, 3), 0, r"tree\.first_child\[1, 3\] is 0"),
    "a child outside": ("first_child", (0, 5), 6, r"tree\.first_child\[0, 5\] is 6"),
    "a negative child": ("first_child", (0, 0), -2, r"tree\.first_child\[0, 0\] is -2"),
    "a sibling before": ("next_sibling", (1, 2), 1, r"tree\.next_sibling\[1, 2\] is 1"),
    "a sibling outside": ("next_sibling", (0, 4), 2**31 - 1, r"tree\.next_sibling\[0, 4\] is 2147483647"),
}


@pytest.mark.parametrize(("name", "at", "wrong", "match"), VALID_CHANGES.values(), ids=VALID_CHANGES)
def test_validate_refuses(name, at, wrong, match):
    tree = make_tree(TREE, TREE, max_depth=4)
    targets = np.array([PATH, PATH], np.int32)
    out = spoiled(2, 4)
    dd.accept_greedy(tree, targets, validate=True)
    getattr(tree, name)[at] = wrong
    with pytest.raises(ValueError, match=match):
        dd.accept_greedy(tree, targets, out=out, validate=True)
    assert all((getattr(out, field) == FILLER).all() for field in FIELDS), "something was written"
    check_greedy(dd.accept_greedy(tree, targets), tree, targets)


def test_validate_takes_what_stands_behind_the_last_node():
    tree = make_tree(TREE, ([-1], [3]), num_nodes=8, max_depth=4)
    for name in ("first_child", "next_sibling"):
        getattr(tree, name)[0, 6:] = 99
        getattr(tree, name)[1, 1:] = -99
    targets = np.full((2, 8), -7, np.int32)
    targets[0, :6] = PATH
    targets[1, 0] = 1
    check_greedy(dd.accept_greedy(tree, targets, validate=True), tree, targets)


# Results and memory


def test_results_are_those_of_no_other_request():
    rng = np.random.default_rng(5)
    tree = drafted_tree(rng, 5, STAGED)
    targets = following_targets(rng, tree)
    together = check_both(tree, targets)
    for b in range(5):
        one = changed(tree, **{name: getattr(tree, name)[b : b + 1] for name in DTYPES})
        alone = dd.accept_greedy(one, targets[b : b + 1])
        check_accepted(alone, {name: getattr(together, name)[b : b + 1] for name in FIELDS})


def test_the_same_results_in_every_run_and_inputs_are_not_changed():
    rng = np.random.default_rng(6)
    tree = drafted_tree(rng, 4, STAGED)
    targets = following_targets(rng, tree)
    given = [targets, *(getattr(tree, name) for name in DTYPES)]
    before = [x.tobytes() for x in given]
    for x in given:
        x.flags.writeable = False
    first = dd.accept_greedy(tree, targets, validate=True)
    check_accepted(dd.accept_greedy(tree, targets), first)
    assert before == [x.tobytes() for x in given]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides_of_inputs_and_results(layout):
    rng = np.random.default_rng(7)
    tree = drafted_tree(rng, 4, STAGED)
    targets = following_targets(rng, tree, dtype=np.int64)
    moved = changed(tree, **{name: layout(getattr(tree, name)) for name in DTYPES})
    stops = np.array([[3, -1]] * 4)
    plain = spoiled(4, tree.max_depth)
    out = dd.Accepted(**{name: layout(getattr(plain, name)) for name in FIELDS})
    assert dd.accept_greedy(moved, layout(targets), stop_tokens=layout(stops), out=out, validate=True) is out
    packed = dd.Accepted(**{name: np.ascontiguousarray(getattr(out, name)) for name in FIELDS})
    check_greedy(packed, tree, targets, stops)
    if layout is LAYOUTS["spread_out"]:
        for name in FIELDS:
            x = getattr(out, name)
            assert np.count_nonzero(x.base != np.iinfo(np.int32).max) == x.size, f"written beside {name}"


def test_numba_arrays_give_numba_arrays():
    rng = np.random.default_rng(8)
    tree = drafted_tree(rng, 4, STAGED)
    targets = following_targets(rng, tree)
    given = changed(tree, **{name: cuda.to_device(getattr(tree, name)) for name in DTYPES})
    on_device = cuda.to_device(targets)
    for stops in (None, 3, cuda.to_device(np.array([3, 1]))):
        found = dd.accept_greedy(given, on_device, stop_tokens=stops, validate=True)
        assert all(isinstance(getattr(found, name), type(on_device)) for name in FIELDS)
        stops = stops.copy_to_host() if hasattr(stops, "copy_to_host") else stops
        check_greedy(found.to_host(), tree, targets, stops)
    out = dd.Accepted.empty(on_device, 4, tree.max_depth)
    assert dd.accept_greedy(given, on_device, out=out) is out
    check_greedy(out, tree, targets)


def test_empty_results():
    for like in (np.zeros(1), cuda.to_device(np.zeros(1))):
        out = dd.Accepted.empty(like, 3, 7)
        assert [tuple(getattr(out, name).shape) for name in FIELDS] == [(3, 8), (3,), (3,), (3,), (3, 8)]
        assert all(getattr(out, name).dtype == np.int32 for name in FIELDS)
        assert all(isinstance(getattr(out, name), type(like)) for name in FIELDS)
        assert repr(out).startswith("Accepted(B=3, max_depth=7, ")
    for arguments, match in (((1, -1, 3), "batch is -1"), ((1, 3, -2), "max_depth is -2")):
        with pytest.raises(ValueError, match=match):
            dd.Accepted.empty(np.zeros(1), *arguments[1:])
    with pytest.raises(TypeError, match="max_depth is 1.0"):
        dd.Accepted.empty(np.zeros(1), 3, 1.0)
    with pytest.raises(TypeError, match=r"\blike\b"):
        dd.Accepted.empty([1.0], 3, 7)


def test_results_on_the_host_keep_what_is_none():
    made = dd.Accepted(np.zeros((2, 3), np.int32), *(np.zeros(2, np.int32) for _ in range(3)))
    host = made.to_host()
    assert host.tokens is None
    assert host.nodes.shape == (2, 3)


def test_from_logits_to_the_accepted_path():
    rng = np.random.default_rng(9)
    tree = drafted_tree(rng, 3, 10, vocabulary=12)
    targets = following_targets(rng, tree, vocabulary=12)
    logits = rng.standard_normal((3, 11, 12)).astype(np.float32)
    np.put_along_axis(logits, targets[..., None], 99.0, axis=2)
    logits[0, 0, 5] = NAN
    targets[0, 0] = -1
    chosen = dd.argmax_tokens(logits)
    check_tokens(chosen, targets)
    found = dd.accept_greedy(tree, chosen)
    check_greedy(found, tree, targets)
    assert found.flags[0] == dd.BAD_TARGET


# Wrong arguments: one exception that names the argument, before anything is written


def tree_with(name: str, function: Any) -> Any:
    return lambda a: {"tree": changed(a["tree"], **{name: function(getattr(a["tree"], name))})}


def out_with(name: str, function: Any) -> Any:
    return lambda a: {"out": dataclasses.replace(a["out"], **{name: function(getattr(a["out"], name))})}


# Which text the message must hold, the exception, what is changed. B=2, Q=6, max_depth=4.
SHARED_ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    ("tree is None", "tree is a NoneType; it must be a DraftTree", TypeError, value("tree", None)),
    ("tree is a dict", "tree is a dict; it must be", TypeError, change("tree", lambda tree: host_arrays(tree))),
    ("tree.tokens is a list", r"tree\.tokens is a ", TypeError, tree_with("tokens", lambda x: x.tolist())),
    (
        "tree.tokens is int64",
        r"tree\.tokens has dtype int64; it must be int32",
        TypeError,
        tree_with("tokens", lambda x: x.astype(np.int64)),
    ),
    ("tree.tokens has 1 axis", r"tree\.tokens has shape \[6\]", ValueError, tree_with("tokens", lambda x: x[0])),
    ("the trees have no node", r"tree\.tokens .*has Q = 0", ValueError, tree_with("tokens", lambda x: x[:, :0])),
    (
        "tree.first_child is short",
        r"tree\.first_child has shape \[2, 5\]; it must be \[B, Q\] = \[2, 6\]",
        ValueError,
        tree_with("first_child", lambda x: x[:, :5]),
    ),
    (
        "tree.next_sibling is of one request",
        r"tree\.next_sibling has shape \[1, 6\]",
        ValueError,
        tree_with("next_sibling", lambda x: x[:1]),
    ),
    (
        "tree.num_nodes is float32",
        r"tree\.num_nodes has dtype float32",
        TypeError,
        tree_with("num_nodes", lambda x: x.astype(np.float32)),
    ),
    (
        "tree.num_nodes has 2 axes",
        r"tree\.num_nodes has shape \[2, 1\]; it must be \[B\]",
        ValueError,
        tree_with("num_nodes", lambda x: x[:, None]),
    ),
    ("tree.max_depth is negative", r"tree\.max_depth is -1", ValueError, tree_with("max_depth", lambda x: -1)),
    ("tree.max_depth is a float", r"tree\.max_depth is 4\.0", TypeError, tree_with("max_depth", lambda x: 4.0)),
    ("tree.max_depth is a bool", r"tree\.max_depth is True", TypeError, tree_with("max_depth", lambda x: True)),
    (
        "a stop token is negative",
        "a stop token is -1; a token is 0 to 2147483647",
        ValueError,
        value("stop_tokens", -1),
    ),
    ("a stop token is no int32", "a stop token is 2147483648", ValueError, value("stop_tokens", [1, 2**31])),
    ("a stop token is a float", r"a stop token is 1\.0", TypeError, value("stop_tokens", [1.0])),
    ("a stop token is a bool", "a stop token is True", TypeError, value("stop_tokens", [True])),
    ("stop_tokens is text", "stop_tokens is a ", TypeError, value("stop_tokens", "12")),
    ("stop_tokens is a dict", "stop_tokens is a ", TypeError, value("stop_tokens", {1: 2})),
    (
        "stop_tokens is float32",
        "stop_tokens has dtype float32; it must be int32 or int64",
        TypeError,
        value("stop_tokens", np.zeros(2, np.float32)),
    ),
    (
        "stop_tokens is of another batch",
        r"stop_tokens has shape \[3, 2\]; it must be \[n\] or \[B, n\] with B = 2",
        ValueError,
        value("stop_tokens", np.zeros((3, 2), np.int32)),
    ),
    (
        "stop_tokens has 3 axes",
        r"stop_tokens has shape \[2, 1, 1\]",
        ValueError,
        value("stop_tokens", np.zeros((2, 1, 1), np.int32)),
    ),
    ("out is a tuple", "out is a tuple; it must be an Accepted", TypeError, value("out", (1, 2))),
    ("out has no tokens", r"out\.tokens is a ", TypeError, out_with("tokens", lambda x: None)),
    (
        "out.nodes is int64",
        r"out\.nodes has dtype int64; it must be int32",
        TypeError,
        out_with("nodes", lambda x: x.astype(np.int64)),
    ),
    (
        "out.nodes has another max_depth",
        r"out\.nodes has shape \[2, 4\]; it must be \[B, max_depth \+ 1\] = \[2, 5\]",
        ValueError,
        out_with("nodes", lambda x: x[:, :4]),
    ),
    (
        "out.flags has another B",
        r"out\.flags has shape \[1\]; it must be \[B\] = \[2\]",
        ValueError,
        out_with("flags", lambda x: x[:1]),
    ),
    (
        "out.num_accepted is read-only",
        r"out\.num_accepted is read-only",
        ValueError,
        out_with("num_accepted", read_only),
    ),
    ("out.tokens is misaligned", r"out\.tokens .*not aligned", ValueError, out_with("tokens", misaligned)),
    ("out.tokens is big-endian", r"out\.tokens .*native byte order", TypeError, out_with("tokens", big_endian)),
    (
        "out.tokens is one place many times",
        r"out\.tokens .*overlaps itself",
        ValueError,
        out_with("tokens", lambda x: as_strided(x[:1].copy(), x.shape)),
    ),
    (
        "two results are one",
        r"out\.tokens overlaps out\.nodes",
        ValueError,
        lambda a: {"out": dataclasses.replace(a["out"], tokens=a["out"].nodes)},
    ),
    (
        "a result is an input",
        r"out\.bonus_tokens overlaps tree\.num_nodes",
        ValueError,
        lambda a: {"out": dataclasses.replace(a["out"], bonus_tokens=a["tree"].num_nodes)},
    ),
    (
        "a result is the stop tokens",
        r"out\.flags overlaps stop_tokens",
        ValueError,
        lambda a: {"stop_tokens": a["out"].flags},
    ),
]
ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    *SHARED_ERRORS,
    ("target_tokens is None", "target_tokens is a ", TypeError, value("target_tokens", None)),
    (
        "target_tokens is float32",
        "target_tokens has dtype float32; it must be int32 or int64",
        TypeError,
        change("target_tokens", lambda x: x.astype(np.float32)),
    ),
    (
        "target_tokens is uint32",
        "target_tokens has dtype uint32",
        TypeError,
        change("target_tokens", lambda x: x.astype(np.uint32)),
    ),
    (
        "target_tokens is short",
        r"target_tokens has shape \[2, 5\]; it must be \[B, Q\] = \[2, 6\]",
        ValueError,
        change("target_tokens", lambda x: x[:, :5]),
    ),
    (
        "target_tokens are logits",
        r"target_tokens has shape \[2, 6, 1\]",
        ValueError,
        change("target_tokens", lambda x: x[..., None]),
    ),
    ("target_tokens is misaligned", "target_tokens .*not aligned", ValueError, change("target_tokens", misaligned)),
    (
        "a result is the targets",
        r"out\.nodes overlaps target_tokens",
        ValueError,
        lambda a: {"out": dataclasses.replace(a["out"], nodes=a["target_tokens"][:, :5])},
    ),
]


def check_refusal(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, call: Any, right: dict[str, Any], error: tuple[Any, ...]
) -> None:
    """One exception with the text, before a launch, and nothing is written."""
    match, exception, changes = error
    wrong = right | changes(right)
    outs = [right["out"], wrong["out"]]
    results = [getattr(o, name) for o in outs if isinstance(o, dd.Accepted) for name in FIELDS]
    before = [x.tobytes() for x in results if x is not None]
    monkeypatch.setattr(module, "launch", lambda *args, **options: pytest.fail("a kernel was launched"))
    with pytest.raises(exception, match=match) as caught:
        call(**wrong)
    assert "\n" not in str(caught.value)
    assert before == [x.tobytes() for x in results if x is not None], "something was written"


@pytest.mark.parametrize("error", [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_wrong_arguments(monkeypatch, error):
    right = {
        "tree": make_tree(TREE, TREE, max_depth=4),
        "target_tokens": np.array([PATH, PATH], np.int32),
        "stop_tokens": None,
        "out": spoiled(2, 4),
    }
    check_refusal(monkeypatch, greedy, dd.accept_greedy, right, error)


def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    tree = make_tree(TREE)
    with pytest.raises(TypeError, match=r"\btarget_tokens\b is a PyTorch tensor on cpu"):
        dd.accept_greedy(tree, torch.zeros((1, 6), dtype=torch.int32))
    with pytest.raises(TypeError, match=r"\bstop_tokens\b is a PyTorch tensor on cpu"):
        dd.accept_greedy(tree, np.array([PATH], np.int32), stop_tokens=torch.zeros(3, dtype=torch.int32))


# Mirror and kernel are one algorithm


@pytest.mark.parametrize(("module", "count"), [(greedy, 4), (sampled, 6)], ids=["greedy", "sampled"])
def test_mirror_and_kernel_have_the_same_phases(module, count):
    mirror = phases(module, "mirror")
    assert [p.split(":")[0] for p in mirror] == [f"# Phase {n + 1}" for n in range(count)]
    parts = ("kernel",) if module is greedy else ("kernel", "sample")
    found = sorted(itertools.chain(*(phases(module, part) for part in parts)))
    assert found == mirror


@pytest.mark.parametrize("module", [greedy, sampled, argmax_tokens], ids=lambda module: module.__name__.split(".")[-1])
def test_what_only_the_gpu_needs_is_marked(module):
    for line in function_source(module, "kernel").splitlines():
        assert "cuda." not in line or "  # gpu: " in line, line


def test_flags_are_bits_of_their_own():
    flags = dd.BAD_TARGET, dd.BAD_LINK, dd.STOPPED
    assert flags == (accept.BAD_TARGET, accept.BAD_LINK, accept.STOPPED) == (1, 2, 4)
    assert shared_code.LARGEST_TOKEN == LARGEST


# Wrong kernels must fail: else the comparisons above would prove nothing


def greedy_traps() -> list[tuple[dd.DraftTree, np.ndarray, Any]]:
    rng = np.random.default_rng(0)
    small = drafted_tree(rng, 6, 14, length=7)
    broken = make_tree(*[TREE] * 6, num_nodes=8, max_depth=4)
    broken.tokens[:, 6:] = 0
    broken.first_child[0, 0] = -2
    broken.first_child[1, 5] = 6
    broken.next_sibling[2, 1] = 0
    broken.first_child[3, 1] = 7
    broken.num_nodes[4] = -1
    targets = np.array([[*PATH, 3, 3]] * 6)
    targets[2, 0] = 6
    targets[5, 0] = 2**31 + 4
    # Requests 0, 2, 4, 6 do not fit shared memory; a link of the first leads behind its last node.
    large = drafted_tree(np.random.default_rng(1), 7, UNSTAGED, length=7)
    large.num_nodes[0] = UNSTAGED
    large.first_child[0, 0] = UNSTAGED
    large.tokens[0, UNSTAGED] = 2
    large_targets = following_targets(np.random.default_rng(2), large, dtype=np.int64)
    large_targets[0, 0] = 2
    large_targets[4, 0] = 2**31
    return [
        (small, following_targets(rng, small), None),
        (small, following_targets(rng, small), [2]),
        (small, following_targets(rng, small), rng.integers(0, 4, (6, 2))),
        (make_tree(TREE, max_depth=3), np.array([PATH]), [2, 0]),
        (make_tree(TREE), np.array([[LARGEST, *PATH[1:]]]), None),
        (broken, targets, None),
        (large, large_targets, None),
        (large, large_targets, [0, 1]),
    ]


TRAPS = greedy_traps() if SIMULATOR else []


def check_traps(made: Any) -> None:
    """Raise AssertionError unless the kernel of a module that was run anew passes all traps."""
    for tree, targets, stops in TRAPS:
        out = spoiled(targets.shape[0], tree.max_depth)
        check_greedy(made.accept_greedy(tree, targets, stop_tokens=stops, out=out), tree, targets, stops)


@only_simulated
def test_the_kernel_without_a_mistake_passes():
    check_traps(build(greedy))


@only_simulated
@pytest.mark.parametrize("mistake", GREEDY_MISTAKES)
def test_a_kernel_with_a_mistake_fails(mistake):
    module, text = GREEDY_MISTAKES[mistake]
    made = build(greedy, module, text)
    with pytest.raises(AssertionError, match="FAIL"):
        check_traps(made)


@only_simulated
def test_rows_that_end_early_make_idle_and_small_trees():
    # What the traps and the random tests rest on.
    tree = drafted_tree(np.random.default_rng(3), 9, STAGED)
    counts = set(tree.num_nodes.tolist())
    assert 0 in counts
    assert STAGED + 1 in counts
    assert len(counts) >= 4
