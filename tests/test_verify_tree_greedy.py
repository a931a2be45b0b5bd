"""verify_tree_greedy: SGLang's arrays and conventions, kernel and mirror against the oracle and against accept_greedy.

The kernel runs in the simulator, or on a GPU where there is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from accept_cases import FILLER, STAGED, check_tokens, drafted_tree, following_targets
from numba import cuda
from test_build_tree import function_source, phases
from test_verify_attention import LAYOUTS, as_strided, big_endian, change, misaligned, read_only, value
from wrong_accept import SGLANG_MISTAKES, build

import ddtree_numba as dd
from ddtree_numba.accept import sglang
from ddtree_numba.device.runtime import SIMULATOR
from refs import accept

only_simulated = pytest.mark.skipif(not SIMULATOR, reason="wrong kernels run in the simulator alone")
RESULTS = ("predicts", "accept_index", "accept_token_num")
READ = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")


def spoiled(batch: int, num_nodes: int, columns: int) -> dict[str, np.ndarray]:
    """Results to write to, full of what no walk gives; each element with a value of its own."""
    shapes = {"predicts": (batch * num_nodes,), "accept_index": (batch, columns), "accept_token_num": (batch,)}
    return {n: -FILLER - np.arange(np.prod(s), dtype=np.int32).reshape(s) for n, s in shapes.items()}


def engine_arrays(tree: dd.DraftTree, targets: np.ndarray, dtype: Any = np.int64) -> dict[str, np.ndarray]:
    """A DraftTree as SGLang has it."""
    batch, num_nodes = tree.tokens.shape
    arrays = {
        "candidates": tree.tokens,
        "retrive_index": np.arange(batch * num_nodes).reshape(batch, num_nodes),
        "retrive_next_token": tree.first_child,
        "retrive_next_sibling": tree.next_sibling,
        "target_predict": targets,
    }
    return {name: x.astype(dtype) for name, x in arrays.items()}


def shuffled(rng: np.random.Generator, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same trees with their nodes in another order, the root first, at other places, and requests apart."""
    batch, num_nodes = given["candidates"].shape
    order = np.argsort(np.hstack([np.full((batch, 1), -1.0), rng.random((batch, num_nodes - 1))]), axis=1)
    rows = np.arange(batch)[:, None]
    places = rng.permutation(batch * num_nodes).reshape(batch, num_nodes)
    found = {name: np.empty_like(x) for name, x in given.items()}
    found["candidates"][rows, order] = given["candidates"]
    for name in ("retrive_next_token", "retrive_next_sibling"):
        links = given[name]
        found[name][rows, order] = np.where(links < 0, -1, order[rows, np.maximum(links, 0)])
    found["retrive_index"][rows, order] = places
    found["target_predict"].reshape(-1)[places] = given["target_predict"]
    return found


def check_both(given: dict[str, np.ndarray], columns: int, run: Any = None) -> dict[str, np.ndarray]:
    """Kernel and mirror against the oracle, what is not written included; returns the results."""
    before = spoiled(*given["candidates"].shape, columns)
    exact = dict(zip(RESULTS, accept.verify_tree_greedy(**before, **given), strict=True))
    by_mirror = {name: x.copy() for name, x in before.items()}
    sglang.mirror(*(given[name] for name in READ), *by_mirror.values())
    assert (run or dd.verify_tree_greedy)(**before, **given) is None
    for name in RESULTS:
        check_tokens(by_mirror[name], exact[name], f"mirror's {name}")
        check_tokens(before[name], exact[name], name)
    return before


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("tree_budget", [0, 1, STAGED, 40])
def test_the_walk_is_that_of_accept_greedy(tree_budget, dtype):
    rng = np.random.default_rng(tree_budget)
    tree = drafted_tree(rng, 6, tree_budget, idle=False)  # SGLang has no idle slots
    targets = following_targets(rng, tree)
    found = check_both(engine_arrays(tree, targets, dtype), tree.max_depth + 1)
    walked = dd.accept_greedy(tree, targets)
    num_nodes = tree_budget + 1
    check_tokens(found["accept_token_num"], walked.num_accepted - 1)
    for b, count in enumerate(walked.num_accepted.tolist()):
        path = walked.nodes[b, :count]
        assert found["accept_index"][b, :count].tolist() == (b * num_nodes + path).tolist()
        assert found["predicts"][b * num_nodes + path].tolist() == walked.tokens[b, :count].tolist()


@pytest.mark.parametrize("seed", range(6))
def test_nodes_in_any_order_at_any_place(seed):
    rng = np.random.default_rng(seed)
    tree = drafted_tree(rng, 5, (0, 3, STAGED, 30, 12, 20)[seed], idle=False)
    given = engine_arrays(tree, following_targets(rng, tree))
    moved = shuffled(rng, given)
    plain, found = (check_both(x, 1 + tree.max_depth) for x in (given, moved))
    check_tokens(found["accept_token_num"], plain["accept_token_num"])
    for b, count in enumerate(plain["accept_token_num"].tolist()):
        tokens = [r["predicts"][r["accept_index"][b, : count + 1]].tolist() for r in (plain, found)]
        assert tokens[0] == tokens[1]
    assert seed == 0 or plain["accept_token_num"].max() >= 2


@pytest.mark.parametrize("columns", [1, 2, 3, 9])
def test_columns_bound_the_walk(columns):
    rng = np.random.default_rng(1)
    tree = drafted_tree(rng, 5, STAGED, idle=False)
    targets = following_targets(rng, tree, share=1.0)
    longest = dd.accept_greedy(tree, targets).num_accepted.max() - 1
    assert longest >= 3
    found = check_both(engine_arrays(tree, targets), columns)
    assert found["accept_token_num"].max() == min(columns - 1, longest)


# What SGLang itself gives: sgl-kernel/tests/speculative/test_eagle_utils.py, and a chain

SGLANG = {
    "candidates": [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]],
    "retrive_index": [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]],
    "retrive_next_token": [[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]],
    "retrive_next_sibling": [[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]],
    "target_predict": [[3, 18, 18, 4, 5, 18], [11, 18, 18, 18, 12, 18]],
}
CHAIN = {
    "candidates": [[10, 3, 4, 5]],
    "retrive_index": [[0, 1, 2, 3]],
    "retrive_next_token": [[1, 2, 3, -1]],
    "retrive_next_sibling": [[-1, -1, -1, -1]],
    "target_predict": [[3, 4, 9, 9]],
}


@pytest.mark.parametrize(
    ("given", "predicts", "index", "count"),
    [
        (SGLANG, [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18], [[0, 3, 4, 5], [6, 10, 11, -1]], [3, 2]),
        (CHAIN, [3, 4, 9, -1], [[0, 1, 2, -1]], [2]),
    ],
)
def test_known_answers(given, predicts, index, count):
    arrays = {name: np.array(x, np.int64) for name, x in given.items()}
    check_both(arrays, 4)
    batch, num_nodes = arrays["candidates"].shape
    found = {
        "predicts": np.full(batch * num_nodes, -1, np.int32),
        "accept_index": np.full((batch, 4), -1, np.int32),
        "accept_token_num": np.zeros(batch, np.int32),
    }
    dd.verify_tree_greedy(**found, **arrays)
    assert [x.tolist() for x in found.values()] == [predicts, index, count]


# By hand: 0 -> 2 -> 1, and 3 beside 2

HAND = {
    "candidates": [[5, 7, 6, 6]],
    "retrive_index": [[0, 1, 2, 3]],
    "retrive_next_token": [[2, -1, 1, -1]],
    "retrive_next_sibling": [[-1, -1, 3, -1]],
    "target_predict": [[6, 8, 7, 9]],
}
KEPT = [-77, -78, -79, -80]  # what `spoiled` holds


@pytest.mark.parametrize(
    ("changes", "predicts", "index", "count"),
    [
        ({}, {0: 6, 1: 8, 2: 7}, [0, 2, 1], 2),
        ({"target_predict": [[6, 8, 0, 9]]}, {0: 6, 2: 0}, [0, 2], 1),
        ({"candidates": [[5, 7, 0, 6]]}, {0: 6, 3: 9}, [0, 3], 1),
        ({"target_predict": [[0, 8, 7, 9]]}, {0: 0}, [0], 0),
        ({"retrive_next_token": [[4, -1, 1, -1]]}, {0: 6}, [0], 0),
        ({"retrive_next_token": [[-5, -1, 1, -1]]}, {0: 6}, [0], 0),
        ({"retrive_next_token": [[2**40, -1, 1, -1]]}, {0: 6}, [0], 0),
        ({"candidates": [[5, 7, 0, 0]], "retrive_next_sibling": [[-1, -1, 3, 2]]}, {0: 6}, [0], 0),  # a cycle
        ({"candidates": [[5, 7, 0, 0]], "retrive_next_sibling": [[-1, -1, 2, -1]]}, {0: 6}, [0], 0),  # a self-link
        ({"retrive_index": [[0, 1, 4, 3]]}, {0: 6}, [0], 0),
        ({"retrive_index": [[0, 1, -1, 3]]}, {0: 6}, [0], 0),
        ({"retrive_index": [[-1, 1, 2, 3]]}, {}, [], 0),
        ({"retrive_index": [[4, 1, 2, 3]]}, {}, [], 0),
        ({"retrive_index": [[3, 2, 1, 0]]}, {3: 9}, [3], 0),
        ({"candidates": [[-1, -1, -1, -1]], "target_predict": [[-1, -1, -1, -1]]}, {0: -1, 1: -1, 2: -1}, [0, 2, 1], 2),
    ],
)
def test_by_hand(changes, predicts, index, count):
    given = {name: np.array(x) for name, x in (HAND | changes).items()}
    found = check_both(given, 3)
    assert found["predicts"].tolist() == [predicts.get(n, KEPT[n]) for n in range(4)]
    assert found["accept_index"].tolist() == [[*index, *KEPT[len(index) : 3]]]
    assert found["accept_token_num"].tolist() == [count]


def test_a_match_on_a_cycle_is_taken_until_all_visits_are_used():
    # 0 -> 1 -> 2 -> 1 -> ..: each time the target agrees.
    given = {name: np.array(x) for name, x in HAND.items()}
    given["candidates"][:] = given["target_predict"][:] = 5
    given["retrive_next_token"][:] = [[1, 2, 1, -1]]
    found = check_both(given, 9)
    assert found["accept_token_num"].tolist() == [4]
    assert found["accept_index"][0, :5].tolist() == [0, 1, 2, 1, 2]


@pytest.mark.parametrize("seed", range(6))
def test_garbage_ends(seed):
    rng = np.random.default_rng(seed)
    for _ in range(5 if SIMULATOR else 40):
        batch, num_nodes, columns = (int(rng.integers(1, n)) for n in (6, 20, 9))
        shape = batch, num_nodes
        wild = rng.choice([-(2**63), 2**63 - 1, -1, -7, 2**31, batch * num_nodes], shape)
        given = {name: rng.integers(0, num_nodes, shape) for name in READ}
        given["candidates"], given["target_predict"] = rng.integers(-1, 2, shape), rng.integers(-1, 2, shape)
        given["retrive_index"] = rng.integers(0, batch * num_nodes, shape)
        for name in READ[1:4]:
            given[name] = np.where(rng.random(shape) < 0.1, wild, given[name])
        found = check_both(given, columns)
        assert (found["accept_token_num"] <= min(columns - 1, num_nodes)).all()


def test_no_columns_write_nothing_but_the_count():
    given = {name: np.array(x) for name, x in HAND.items()}
    results = spoiled(1, 4, 0)
    dd.verify_tree_greedy(**results, **given)
    assert results["accept_token_num"].tolist() == [0]
    assert results["predicts"].tolist() == KEPT


def test_places_behind_the_last_node_are_kept():
    # SGLang's engine passes one place more.
    given = {name: np.array(x) for name, x in HAND.items()}
    results = spoiled(1, 4, 3) | {"predicts": np.full(6, FILLER, np.int32)}
    dd.verify_tree_greedy(**results, **given)
    assert results["predicts"].tolist() == [6, 8, 7, FILLER, FILLER, FILLER]


def test_no_requests():
    given = {name: np.zeros((0, 4), np.int64) for name in READ}
    dd.verify_tree_greedy(**spoiled(0, 4, 3), **given)


# Memory


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides(layout):
    rng = np.random.default_rng(2)
    tree = drafted_tree(rng, 3, 9)
    given = engine_arrays(tree, following_targets(rng, tree))
    before = spoiled(3, 10, 5)
    exact = accept.verify_tree_greedy(**before, **given)
    moved = {name: layout(x) for name, x in before.items()}
    inputs = {name: layout(x) for name, x in given.items()}
    copies = {name: x.copy() for name, x in inputs.items()}
    dd.verify_tree_greedy(**moved, **inputs)
    for name, wanted in zip(RESULTS, exact, strict=True):
        check_tokens(np.ascontiguousarray(moved[name]), wanted, name)
    for name, x in copies.items():
        np.testing.assert_array_equal(inputs[name], x)


def test_numba_arrays_in_the_order_of_sglang():
    rng = np.random.default_rng(3)
    tree = drafted_tree(rng, 3, 9)
    given = engine_arrays(tree, following_targets(rng, tree))
    before = spoiled(3, 10, 5)
    exact = accept.verify_tree_greedy(**before, **given)
    results = [cuda.to_device(x) for x in before.values()]
    assert dd.verify_tree_greedy(*results, *(cuda.to_device(given[name]) for name in READ)) is None
    for name, x, wanted in zip(RESULTS, results, exact, strict=True):
        check_tokens(x.copy_to_host(), wanted, name)


def test_the_array_of_links_may_be_given_twice():
    # Inputs may be one array: with the root alone no link leads anywhere.
    given = {name: np.array([[0]]) for name in READ}
    given["retrive_next_token"] = given["retrive_next_sibling"] = np.array([[-1]])
    check_both(given, 2)


# Wrong arguments: one exception that names the argument, before anything is written. B=2, Q=4, S=3.


def in_place_of(name: str, other: str) -> Any:
    """The result lies where another array does."""
    return lambda a: {name: a[other].reshape(-1).view(np.int32)[: a[name].size].reshape(a[name].shape)}


ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    *(
        error
        for name in READ
        for error in (
            (f"{name} is None", f"{name} is a ", TypeError, value(name, None)),
            (
                f"{name} is float32",
                f"{name} has dtype float32; it must be int32 or int64",
                TypeError,
                change(name, lambda x: x.astype(np.float32)),
            ),
            (f"{name} is big-endian", f"{name} .*byte order", TypeError, change(name, big_endian)),
            (f"{name} is misaligned", f"{name} .*not aligned", ValueError, change(name, misaligned)),
            (f"{name} has 3 axes", rf"{name} has shape \[2, 4, 1\]", ValueError, change(name, lambda x: x[..., None])),
        )
    ),
    *(
        (
            f"{name} is short",
            rf"{name} has shape \[2, 3\]; it must be \[B, Q\] = \[2, 4\]",
            ValueError,
            change(name, lambda x: x[:, :3]),
        )
        for name in READ[1:]
    ),
    *(
        error
        for name in RESULTS
        for error in (
            (f"{name} is a list", f"{name} is a ", TypeError, change(name, lambda x: x.tolist())),
            (
                f"{name} is int64",
                f"{name} has dtype int64; it must be int32",
                TypeError,
                change(name, lambda x: x.astype(np.int64)),
            ),
            (f"{name} is read-only", f"{name} is read-only", ValueError, change(name, read_only)),
            (f"{name} is an input", f"{name} overlaps candidates", ValueError, in_place_of(name, "candidates")),
        )
    ),
    ("there are no nodes", "candidates .*has Q = 0", ValueError, lambda a: {name: a[name][:, :0] for name in READ}),
    (
        "predicts has 2 axes",
        r"predicts has shape \[2, 4\]; it must be \[B \* Q or more\]",
        ValueError,
        change("predicts", lambda x: x.reshape(2, 4)),
    ),
    (
        "predicts is short",
        r"predicts .*\[7\] has room for less than B \* Q = 8 tokens",
        ValueError,
        change("predicts", lambda x: x[:7]),
    ),
    (
        "accept_index has another B",
        r"accept_index has shape \[1, 3\]; it must be \[B, S\] = \[2, any\]",
        ValueError,
        change("accept_index", lambda x: x[:1]),
    ),
    (
        "accept_index has 1 axis",
        r"accept_index has shape \[6\]",
        ValueError,
        change("accept_index", lambda x: x.reshape(-1)),
    ),
    (
        "accept_token_num has another B",
        r"accept_token_num has shape \[1\]; it must be \[B\] = \[2\]",
        ValueError,
        change("accept_token_num", lambda x: x[:1]),
    ),
    (
        "accept_index is one place many times",
        "accept_index .*overlaps itself",
        ValueError,
        change("accept_index", lambda x: as_strided(x[:1].copy(), x.shape)),
    ),
    (
        "two results are one",
        "accept_token_num overlaps predicts",
        ValueError,
        lambda a: {"accept_token_num": a["predicts"][3:5]},
    ),
]


@pytest.mark.parametrize(("match", "exception", "changes"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_wrong_arguments(monkeypatch, match, exception, changes):
    right = spoiled(2, 4, 3) | {name: np.zeros((2, 4), np.int64) for name in READ}
    wrong = right | changes(right)
    results = [a[name] for a in (right, wrong) for name in RESULTS if isinstance(a[name], np.ndarray)]
    before = [x.tobytes() for x in results]
    monkeypatch.setattr(sglang, "launch", lambda *args, **options: pytest.fail("a kernel was launched"))
    with pytest.raises(exception, match=match) as caught:
        dd.verify_tree_greedy(**wrong)
    assert "\n" not in str(caught.value)
    assert before == [x.tobytes() for x in results], "something was written"


def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    given = {name: np.zeros((1, 4), np.int64) for name in READ}
    given["target_predict"] = torch.zeros((1, 4), dtype=torch.int64)
    with pytest.raises(TypeError, match=r"\btarget_predict\b is a PyTorch tensor on cpu"):
        dd.verify_tree_greedy(**spoiled(1, 4, 3), **given)


# Mirror and kernel are one algorithm


def test_mirror_and_kernel_have_the_same_phases():
    assert phases(sglang, "mirror") == phases(sglang, "kernel")
    assert [p.split(":")[0] for p in phases(sglang, "mirror")] == ["# Phase 1", "# Phase 2", "# Phase 3"]


def test_what_only_the_gpu_needs_is_marked():
    for line in function_source(sglang, "kernel").splitlines():
        assert "cuda." not in line or "  # gpu: " in line, line


# Wrong kernels must fail: else the comparisons above would prove nothing


def traps() -> list[tuple[dict[str, np.ndarray], int]]:
    rng = np.random.default_rng(0)
    tree = drafted_tree(rng, 5, 12, idle=False)
    given = engine_arrays(tree, following_targets(rng, tree))
    hand = {name: np.array(x) for name, x in HAND.items()}
    outside = hand | {"retrive_index": np.array([[0, 1, 4, 3]])}
    cycle = hand | {"candidates": hand["target_predict"] * 0 + 6, "target_predict": hand["target_predict"] * 0 + 6}
    cycle["retrive_next_token"] = np.array([[1, 2, 1, -1]])
    return [(given, tree.max_depth + 1), (shuffled(rng, given), 3), (hand, 3), (outside, 3), (cycle, 9)]


TRAPS = traps() if SIMULATOR else []


@only_simulated
def test_the_kernel_without_a_mistake_passes():
    for given, columns in TRAPS:
        check_both(given, columns, build(sglang).verify_tree_greedy)


@only_simulated
@pytest.mark.parametrize("mistake", SGLANG_MISTAKES)
def test_a_kernel_with_a_mistake_fails(mistake):
    made = build(sglang, *SGLANG_MISTAKES[mistake])
    with pytest.raises(AssertionError, match="FAIL"):
        for given, columns in TRAPS:
            check_both(given, columns, made.verify_tree_greedy)
