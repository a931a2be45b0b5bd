"""build_tree: all variants against the oracle, bit by bit, and the laws of its arguments and results.

Kernels run in the simulator, or on a GPU where there is one. The oracle itself is held against enumeration in
test_trees_oracle.py.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import tokenize
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import cuda
from test_verify_attention import (
    LAYOUTS,
    as_strided,
    big_endian,
    change,
    half_aligned_strides,
    misaligned,
    read_only,
    tokens,
    value,
)
from tree_cases import (
    INF,
    NAN,
    TREE_CASES,
    VOCABULARY,
    check_trees,
    ended,
    expected_trees,
    falling,
    filled,
    make_trees,
    multiples,
    random_trees,
    rounded,
    whole,
)
from wrong_trees import TREE_MISTAKES, build

import ddtree_numba as dd
from ddtree_numba.device import launch as launches
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.tree import build_frontier, build_heap, search
from ddtree_numba.tree import build_tree as operator
from ddtree_numba.tree.draft_tree import DTYPES, shapes
from refs import trees

KERNELS = ("heap", "frontier")
MIRRORS = ("heap_numpy", "frontier_numpy")
each_kernel = pytest.mark.parametrize("variant", KERNELS)
each_mirror = pytest.mark.parametrize("variant", MIRRORS)
each_variant = pytest.mark.parametrize("variant", KERNELS + MIRRORS)
only_simulated = pytest.mark.skipif(not SIMULATOR, reason="wrong kernels run in the simulator alone")


def case_named(name: str) -> dict[str, Any]:
    return make_trees(next(case for case in TREE_CASES if case.name == name))


def problem_of(logprobs: Any, tree_budget: int, seed: int = 0) -> dict[str, Any]:
    """Random tokens for the rows that a function of tree_cases makes."""
    rng = np.random.default_rng(seed)
    rows = logprobs(rng)
    return {
        "logprobs": rows,
        "token_ids": rng.integers(0, VOCABULARY, rows.shape).astype(np.int32),
        "root_tokens": rng.integers(0, VOCABULARY, rows.shape[0]).astype(np.int32),
        "tree_budget": tree_budget,
    }


def filled_tree(batch: int, tree_budget: int, max_depth: int, fill: int = 77) -> dd.DraftTree:
    """A tree to write to, full of what no tree holds."""
    made = {name: np.full(shape, fill, DTYPES[name]) for name, shape in shapes(batch, tree_budget + 1).items()}
    return dd.DraftTree(**made, max_depth=max_depth)


# All cases


@pytest.mark.parametrize("case", TREE_CASES, ids=str)
@each_variant
def test_against_the_oracle(variant, case):
    problem = make_trees(case)
    if variant == "frontier" and -(-problem["logprobs"].shape[1] // search.FIELDS) > build_frontier.LANES:
        with pytest.raises(ValueError, match="a word of 5 ranks a lane.* Variant 'heap'"):
            dd.build_tree(**problem, variant=variant)
    else:
        check_trees(dd.build_tree(**problem, variant=variant), problem)


def test_the_cases_are_valid_arguments():
    for case in TREE_CASES:
        problem = make_trees(case)
        check_trees(dd.build_tree(**problem, variant="heap_numpy", validate=True), problem)


def test_the_cases_are_what_they_are_called():
    counts = {case.name: expected_trees(make_trees(case))["num_nodes"].tolist() for case in TREE_CASES}
    assert counts["requests_of_all_sizes"] == [21, 1, 5, 3, 21]
    assert counts["the_last_request_is_the_smallest"] == [10, 1]
    assert counts["the_first_request_is_the_smallest"] == [2, 10]
    assert counts["chain"] == [13, 13]
    assert counts["star_of_40"] == [41]
    assert counts["more_budget_than_nodes"] == [1 + 3 + 9 + 27]
    assert counts["no_budget"] == [1, 1]
    assert counts["nothing_anywhere"] == [1, 1]
    for n in (31, 32, 33, 64, 65):
        assert counts[f"{n}_nodes"] == [n]
    deep = expected_trees(case_named("seven_words_of_ranks_all_zero"))
    assert deep["depths"].max() == 32
    for name in ("bfloat16_ties", "whole_numbers", "seven_words_of_ranks", "star_of_40_ties", "zeros_of_both_signs"):
        scores = expected_trees(case_named(name))["scores"][0]
        assert np.unique(scores).size < scores.size, f"{name} has no ties"
    signs = expected_trees(case_named("zeros_of_both_signs"))["scores"]
    assert np.signbit(signs[signs == 0]).any()
    assert not np.signbit(signs[signs == 0]).all()


def test_scores_follow_the_recurrence_and_not_the_sum():
    problem = case_named("inexact_sums")
    exact = expected_trees(problem)
    ranks = [trees.best_first_tree(rows, problem["tree_budget"])["ranks"] for rows in problem["logprobs"]]
    sums = np.zeros_like(exact["scores"])
    for b, paths in enumerate(ranks):
        for n, path in enumerate(paths):
            for d, r in enumerate(path):  # not sum(): newer Pythons compensate it
                sums[b, n] += float(problem["logprobs"][b, d, r])
    differ = sums != exact["scores"]
    assert differ[2, :21].sum() > 3, "the case, or the part of it that is a trap, does not show the difference"
    np.testing.assert_allclose(sums, exact["scores"], rtol=1e-13)
    for variant in KERNELS + MIRRORS:
        tree = dd.build_tree(**problem, variant=variant)
        np.testing.assert_array_equal(tree.scores.view(np.int64), exact["scores"].view(np.int64))


@each_kernel
def test_the_default_variant_gives_the_same_tree(variant):
    problem = case_named("budget_1")
    for options in ({}, {"variant": "auto"}, {"variant": variant}):
        check_trees(dd.build_tree(**problem, **options), problem)


@pytest.mark.parametrize(("simulator", "fits", "taken"), [(False, True, 0), (False, False, 1), (True, True, 1)])
def test_auto_takes_the_fast_variant_where_it_fits(monkeypatch, simulator, fits, taken):
    launched = []
    for module in (build_frontier, build_heap):
        monkeypatch.setattr(module, "launch_search", lambda *arguments, module=module: launched.append(module))
    monkeypatch.setattr(operator, "runtime", SimpleNamespace(SIMULATOR=simulator))
    if not fits:
        monkeypatch.setattr(build_frontier, "plan", lambda problem: None)
    dd.build_tree(np.zeros((1, 2, 3), np.float32), np.zeros((1, 2, 3), np.int32), np.zeros(1, np.int32), 4)
    assert launched == [(build_frontier, build_heap)[taken]]


# Random problems


@pytest.mark.parametrize("seed", range(8))
def test_mirrors_on_thousands_of_random_problems(seed):
    rng = np.random.default_rng(seed)
    count = 0
    while count < 640:
        problem = random_trees(rng, 24, largest=24)
        exact = expected_trees(problem)
        for variant in MIRRORS:
            check_trees(dd.build_tree(**problem, variant=variant), problem, exact)
        count += 24
    # 8 seeds of 648 problems: 5,184 in all.


@pytest.mark.parametrize("seed", range(3))
def test_kernels_on_random_problems(seed):
    problem = random_trees(np.random.default_rng(100 + seed), 24, largest=6)
    exact = expected_trees(problem)
    for variant in KERNELS:
        check_trees(dd.build_tree(**problem, variant=variant), problem, exact)


@st.composite
def problems(draw: Any, max_nodes: int) -> dict[str, Any]:
    """Rows from a short list of values, so that nearly all scores tie; or any floats at most 0, and what ends a row."""
    batch, length, candidates = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(1, 6))
    few = st.sampled_from([0.0, -0.0, -0.5, -1.0, -1.5, -1e-8, -1.4e-45])
    any_float = st.floats(max_value=0.0, width=32, allow_nan=False, allow_infinity=False)
    element = draw(st.sampled_from([few, any_float]))
    count = batch * length * candidates
    flat = draw(st.lists(element, min_size=count, max_size=count))
    logprobs = -np.sort(-np.array(flat, np.float32).reshape(batch, length, candidates), axis=2)
    for _ in range(draw(st.integers(0, 2))):
        b, d, r = (draw(st.integers(0, n - 1)) for n in logprobs.shape)
        logprobs[b, d, r:] = draw(st.sampled_from([-INF, NAN, INF]))
    ids = draw(st.sampled_from([np.int32, np.int64]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return {
        "logprobs": logprobs,
        "token_ids": rng.integers(0, VOCABULARY, logprobs.shape).astype(ids),
        "root_tokens": rng.integers(0, VOCABULARY, batch).astype(ids),
        "tree_budget": draw(st.integers(0, max_nodes)),
    }


@settings(max_examples=150, deadline=None)
@given(problem=problems(max_nodes=70))
def test_mirrors_on_drawn_problems(problem):
    exact = expected_trees(problem)
    for variant in MIRRORS:
        check_trees(dd.build_tree(**problem, variant=variant, validate=True), problem, exact)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(max_nodes=12))
def test_kernels_on_drawn_problems(problem):
    exact = expected_trees(problem)
    for variant in KERNELS:
        check_trees(dd.build_tree(**problem, variant=variant, validate=True), problem, exact)


# The order of requests, of candidates, and the budget


@each_variant
def test_a_request_alone(variant):
    problem = case_named("requests_of_all_sizes")
    exact = expected_trees(problem)
    for b in (0, 3):
        one = problem | {name: problem[name][b : b + 1] for name in ("logprobs", "token_ids", "root_tokens")}
        check_trees(dd.build_tree(**one, variant=variant), one, {n: x[b : b + 1] for n, x in exact.items() if x.ndim})


@each_variant
def test_a_smaller_budget_gives_the_first_nodes(variant):
    problem = case_named("bfloat16_ties")
    large = dd.build_tree(**problem, variant=variant)
    small = dd.build_tree(**problem | {"tree_budget": 11}, variant=variant)
    for name in ("tokens", "parents", "depths", "scores", "input_ids"):
        np.testing.assert_array_equal(getattr(small, name), getattr(large, name)[:, :12])


@each_variant
def test_rows_behind_the_budget_are_no_part_of_the_problem(variant):
    # 400 rows in shared memory would leave no room; paths of 3 ranks need one word.
    problem = problem_of(rounded(1, 400, 300), 3)
    tree = dd.build_tree(**problem, variant=variant, validate=True)
    check_trees(tree, problem)
    assert tree.max_depth == 3


@each_variant
def test_the_fields_agree_with_each_other(variant):
    problem = case_named("requests_of_all_sizes")
    tree = dd.build_tree(**problem, variant=variant)
    np.testing.assert_array_equal(dd.depths_from_parents(tree.parents, validate=True), tree.depths)
    np.testing.assert_array_equal(dd.mask_from_parents(tree.parents, packed=True)[[0, 3, 4]], tree.tree_mask[[0, 3, 4]])
    for found, stored in zip(dd.links_from_parents(tree.parents), (tree.first_child, tree.next_sibling), strict=True):
        np.testing.assert_array_equal(found, stored)
    mask = tree.mask_bool()
    assert mask.shape == (5, 21, 21)
    np.testing.assert_array_equal(
        mask.sum(axis=2), np.where(np.arange(21) < tree.num_nodes[:, None], tree.depths + 1, 0)
    )


@pytest.mark.parametrize("variant", ["heap", *MIRRORS])
def test_scores_never_rise(variant):
    # But for rounding: a sibling's score is rounded twice.
    for name in ("inexact_sums", "plain"):
        scores = dd.build_tree(**case_named(name), variant=variant).scores
        assert (np.diff(scores, axis=1) <= 1e-15).all()


@each_variant
def test_the_same_bits_in_every_run(variant):
    problem = case_named("duplicate_tokens")
    exact = expected_trees(problem)
    for _ in range(2):
        check_trees(dd.build_tree(**problem, variant=variant), problem, exact)


@each_variant
def test_inputs_are_not_changed(variant):
    problem = case_named("nan_anywhere")
    arrays = [x for x in problem.values() if isinstance(x, np.ndarray)]
    before = [x.tobytes() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    dd.build_tree(**problem, variant=variant, validate=True)
    assert before == [x.tobytes() for x in arrays]


@each_variant
def test_no_requests(variant):
    problem = problem_of(falling(0, 3, 4), 5)
    for validate in (False, True):
        check_trees(dd.build_tree(**problem, variant=variant, validate=validate), problem)


@each_variant
def test_rows_that_break_the_rule_give_some_tree(variant):
    # Without validate their contents are anything; the search ends, and what it gives is a tree.
    rng = np.random.default_rng(0)
    problem = problem_of(lambda _: rng.standard_normal((4, 3, 5)).astype(np.float32) * 3, 15)
    problem["logprobs"][2:] = rng.choice(np.array([3e38, -3e38, 1.0, INF, NAN], np.float32), (2, 3, 5))
    tree = dd.build_tree(**problem, variant=variant)
    assert ((tree.num_nodes >= 1) & (tree.num_nodes <= 16)).all()
    for b, count in enumerate(tree.num_nodes.tolist()):
        assert tree.parents[b, 0] == -1
        assert (tree.parents[b, 1:count] >= 0).all()
        assert (tree.parents[b, 1:count] < np.arange(1, count)).all()
        assert (tree.parents[b, count:] == -1).all()
        assert np.isin(tree.tokens[b, 1:count], problem["token_ids"][b]).all()
    np.testing.assert_array_equal(dd.depths_from_parents(tree.parents), tree.depths)


# Memory


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@each_variant
def test_strides_of_inputs(variant, layout):
    problem = case_named("int64_ids")
    moved = {name: layout(x) if isinstance(x, np.ndarray) else x for name, x in problem.items()}
    check_trees(dd.build_tree(**moved, variant=variant, validate=True), problem)


@each_variant
def test_broadcast_inputs(variant):
    problem = case_named("more_candidates_than_budget")
    one = {name: problem[name][:1] for name in ("logprobs", "token_ids", "root_tokens")}
    three = problem | {name: np.broadcast_to(x, (3, *x.shape[1:])) for name, x in one.items()}
    check_trees(dd.build_tree(**three, variant=variant), three)


@pytest.mark.parametrize("layout", ["spread_out", "backwards", "column_major", "axes_swapped"])
@each_variant
def test_given_trees_of_any_strides(variant, layout):
    problem = case_named("requests_of_all_sizes")
    plain = filled_tree(5, 20, 9)
    moved = {name: LAYOUTS[layout](getattr(plain, name)) for name in DTYPES}
    out = dd.DraftTree(**moved, max_depth=9)
    tree = dd.build_tree(**problem, variant=variant, out=out)
    assert tree is out
    assert tree.max_depth == 9
    for name, x in moved.items():
        assert getattr(tree, name) is x
    check_trees(dd.build_tree(**problem, variant=variant, out=dataclasses.replace(out, max_depth=4)), problem)
    if layout == "spread_out":
        for name, x in moved.items():
            around = np.ones(x.base.shape, np.bool_)
            around[tuple(slice(1, None, 2) for _ in x.shape)] = False
            filler = NAN if DTYPES[name].kind == "f" else np.iinfo(DTYPES[name]).max
            np.testing.assert_array_equal(x.base[around], np.full(around.sum(), filler), name)


@each_variant
def test_a_given_tree_keeps_its_bound_on_the_depth(variant):
    problem = case_named("budget_1")  # L = 3, but no node is deeper than 1
    for max_depth in (1, 3, 9):
        out = filled_tree(2, 1, max_depth)
        assert dd.build_tree(**problem, variant=variant, out=out).max_depth == max_depth
    out = dd.DraftTree.empty(problem["logprobs"], 2, 1, 1)
    check_trees(dd.build_tree(**problem, variant=variant, out=out), problem)


def test_an_empty_tree():
    for like in (np.zeros(1), cuda.to_device(np.zeros(1))):
        tree = dd.DraftTree.empty(like, 3, 32, 7)
        for name, shape in shapes(3, 33).items():
            x = getattr(tree, name)
            assert (tuple(x.shape), x.dtype) == (shape, DTYPES[name]), name
            assert isinstance(x, type(like))
        assert tree.tree_mask.shape == (3, 33, 2)
        assert tree.max_depth == 7
    with pytest.raises(TypeError, match=r"\blike\b"):
        dd.DraftTree.empty([1.0], 3, 32, 7)


@each_kernel
def test_numba_arrays_give_numba_arrays(variant):
    problem = case_named("requests_of_all_sizes")
    on_device = {n: cuda.to_device(x) if isinstance(x, np.ndarray) else x for n, x in problem.items()}
    kind = type(on_device["logprobs"])
    tree = dd.build_tree(**on_device, variant=variant, validate=True)
    assert all(isinstance(getattr(tree, name), kind) for name in DTYPES)
    check_trees(tree, problem)
    out = dd.DraftTree.empty(on_device["logprobs"], 5, 20, 4)
    assert dd.build_tree(**on_device, variant=variant, out=out) is out
    check_trees(out, problem)


def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    problem = case_named("budget_1")
    for name in ("logprobs", "token_ids", "root_tokens"):
        with pytest.raises(TypeError, match=rf"\b{name}\b is a PyTorch tensor on cpu"):
            dd.build_tree(**problem | {name: torch.from_numpy(problem[name])})


# Shared memory


def limit_shared_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let all modules of the builders see a smaller limit."""
    for module in (search, build_heap, build_frontier):
        if hasattr(module, "shared_bytes_limit"):
            monkeypatch.setattr(module, "shared_bytes_limit", lambda device: nbytes)


def bytes_with_columns(problem: dict[str, Any], columns: int) -> int:
    """A limit that leaves room for just as many columns of float32 rows, in the variant `heap`."""
    length, num_nodes = problem["logprobs"].shape[1], problem["tree_budget"] + 1
    per_slot = 20 + 8 * -(-length // search.FIELDS)
    return search.STATIC_BYTES + num_nodes * (16 + per_slot) + 4 * (length + 1) * (columns + 1)


def wide_problem() -> dict[str, Any]:
    """The search goes through many ranks of each row."""
    return problem_of(rounded(2, 2, 30, scale=0.3), 40)


@only_simulated
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 29])
def test_heap_reads_what_has_no_room_in_shared_memory(monkeypatch, columns):
    problem = wide_problem()
    limit_shared_memory(monkeypatch, bytes_with_columns(problem, columns))
    exact = expected_trees(problem)
    check_trees(dd.build_tree(**problem, variant="heap"), problem, exact)
    check_trees(dd.build_tree(**problem), problem, exact)


@only_simulated
@pytest.mark.parametrize("end", [(0, 0, 4, NAN), (0, 1, 5, INF), (0, 0, 6, -INF), (1, 0, 29, NAN)])
def test_rows_that_end_behind_what_is_in_shared_memory(monkeypatch, end):
    problem = problem_of(ended(end, rows=rounded(2, 2, 30, scale=0.3)), 40)
    limit_shared_memory(monkeypatch, bytes_with_columns(problem, 4))
    check_trees(dd.build_tree(**problem, variant="heap"), problem)


@only_simulated
def test_frontier_refuses_what_has_no_room_in_shared_memory(monkeypatch):
    problem = wide_problem()
    limit_shared_memory(monkeypatch, bytes_with_columns(problem, 5))
    out = filled_tree(2, 40, 2)
    before = {name: getattr(out, name).copy() for name in DTYPES}
    with pytest.raises(ValueError, match="frontier.* shared memory.*heap"):
        dd.build_tree(**problem, variant="frontier", out=out)
    for name, x in before.items():
        np.testing.assert_array_equal(getattr(out, name), x)


@each_kernel
@only_simulated
def test_a_budget_beyond_shared_memory_is_refused(variant):
    problem = problem_of(falling(1, 32, 4), search.MAX_BUDGET)
    out = filled_tree(1, search.MAX_BUDGET, 32)
    with pytest.raises(ValueError, match="shared memory") as caught:
        dd.build_tree(**problem, variant=variant, out=out)
    assert launches.SIMULATED_NAME in str(caught.value)
    assert (out.tokens == 77).all()


@only_simulated
@pytest.mark.parametrize("length", [1, 5, 6, 17, 32])
@pytest.mark.parametrize("limit", [2_000, 3_001, 5_500])
def test_the_budget_that_the_message_names_fits(monkeypatch, length, limit):
    limit_shared_memory(monkeypatch, limit)
    problem = problem_of(filled(1, length, 2, value=-1.0), 3000)
    with pytest.raises(ValueError, match="tree_budget = 3000 with L = .* shared memory") as caught:
        dd.build_tree(**problem, variant="heap")
    fits = re.search(r"(\d+) would fit", str(caught.value))
    assert fits
    largest = int(fits[1])
    assert largest >= 1
    smaller = problem | {"tree_budget": largest}
    check_trees(dd.build_tree(**smaller, variant="heap"), smaller)
    if largest >= length:  # below, fewer rows take less than the message counts
        with pytest.raises(ValueError, match="shared memory"):
            dd.build_tree(**problem | {"tree_budget": largest + 4}, variant="heap")


@each_mirror
def test_mirrors_know_no_shared_memory(variant):
    problem = problem_of(multiples(1, 3, 2000, of=1e-4), 1500)
    check_trees(dd.build_tree(**problem, variant=variant), problem)


# Wrong arguments: one exception that names the argument, before anything is written


def out_changed(name: str, function: Any) -> Any:
    return lambda a: {"out": dataclasses.replace(a["out"], **{name: function(getattr(a["out"], name))})}


# Which argument the message must name, the exception, what is changed. B=2, L=3, K=4, tree_budget=5.
ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    ("logprobs is None", "logprobs", TypeError, value("logprobs", None)),
    ("logprobs is a list", "logprobs", TypeError, change("logprobs", lambda x: x.tolist())),
    ("logprobs is float64", "logprobs", TypeError, change("logprobs", lambda x: x.astype(np.float64))),
    ("logprobs is float16", "logprobs", TypeError, change("logprobs", lambda x: x.astype(np.float16))),
    ("logprobs is int32", "logprobs", TypeError, change("logprobs", lambda x: x.astype(np.int32))),
    ("logprobs is big-endian", "logprobs", TypeError, change("logprobs", big_endian)),
    ("logprobs is misaligned", "logprobs", ValueError, change("logprobs", misaligned)),
    ("logprobs has misaligned strides", "logprobs", ValueError, change("logprobs", half_aligned_strides)),
    ("logprobs has 2 axes", "logprobs", ValueError, change("logprobs", lambda x: x[0])),
    ("logprobs has 4 axes", "logprobs", ValueError, change("logprobs", lambda x: x[None])),
    ("logprobs has no positions", "logprobs", ValueError, change("logprobs", lambda x: x[:, :0])),
    ("logprobs has no candidates", "logprobs", ValueError, change("logprobs", lambda x: x[..., :0])),
    ("token_ids is None", "token_ids", TypeError, value("token_ids", None)),
    ("token_ids is a list", "token_ids", TypeError, change("token_ids", lambda x: x.tolist())),
    ("token_ids is float32", "token_ids", TypeError, change("token_ids", lambda x: x.astype(np.float32))),
    ("token_ids is uint32", "token_ids", TypeError, change("token_ids", lambda x: x.astype(np.uint32))),
    ("token_ids is int16", "token_ids", TypeError, change("token_ids", lambda x: x.astype(np.int16))),
    ("token_ids is big-endian", "token_ids", TypeError, change("token_ids", big_endian)),
    ("token_ids is misaligned", "token_ids", ValueError, change("token_ids", misaligned)),
    ("token_ids has another B", "token_ids", ValueError, change("token_ids", lambda x: x[:1])),
    ("token_ids has another L", "token_ids", ValueError, change("token_ids", lambda x: x[:, :2])),
    ("token_ids has another K", "token_ids", ValueError, change("token_ids", lambda x: x[..., :3])),
    ("token_ids has 2 axes", "token_ids", ValueError, change("token_ids", lambda x: x[0])),
    ("root_tokens is None", "root_tokens", TypeError, value("root_tokens", None)),
    ("root_tokens is a number", "root_tokens", TypeError, value("root_tokens", 7)),
    ("root_tokens is a list", "root_tokens", TypeError, value("root_tokens", [7, 8])),
    ("root_tokens is float32", "root_tokens", TypeError, change("root_tokens", lambda x: x.astype(np.float32))),
    ("root_tokens is big-endian", "root_tokens", TypeError, change("root_tokens", big_endian)),
    ("root_tokens is misaligned", "root_tokens", ValueError, change("root_tokens", misaligned)),
    ("root_tokens has another B", "root_tokens", ValueError, change("root_tokens", lambda x: x[:1])),
    ("root_tokens has 2 axes", "root_tokens", ValueError, change("root_tokens", lambda x: x[:, None])),
    ("tree_budget is negative", "tree_budget", ValueError, value("tree_budget", -1)),
    ("tree_budget is too large", "tree_budget", ValueError, value("tree_budget", search.MAX_BUDGET + 1)),
    ("tree_budget is a float", "tree_budget", TypeError, value("tree_budget", 5.0)),
    ("tree_budget is a bool", "tree_budget", TypeError, value("tree_budget", True)),
    ("tree_budget is None", "tree_budget", TypeError, value("tree_budget", None)),
    ("tree_budget is an array", "tree_budget", TypeError, value("tree_budget", np.array([5]))),
    ("variant is unknown", "variant", ValueError, value("variant", "levels")),
    ("variant is None", "variant", ValueError, value("variant", None)),
    ("out is an array", "out", TypeError, lambda a: {"out": a["out"].tokens}),
    ("out is a dict", "out", TypeError, lambda a: {"out": {"tokens": a["out"].tokens}}),
    ("out has another budget", r"out\.tokens", ValueError, value("out", filled_tree(2, 4, 3))),
    ("out has another B", r"out\.tokens", ValueError, value("out", filled_tree(3, 5, 3))),
    ("out is not deep enough", "out", ValueError, value("out", filled_tree(2, 5, 2))),
    ("out.tokens is int64", r"out\.tokens", TypeError, out_changed("tokens", lambda x: x.astype(np.int64))),
    ("out.tokens is None", r"out\.tokens", TypeError, out_changed("tokens", lambda x: None)),
    ("out.parents is too short", r"out\.parents", ValueError, out_changed("parents", lambda x: x[:, :5])),
    ("out.depths is read-only", r"out\.depths", ValueError, out_changed("depths", read_only)),
    ("out.scores is float32", r"out\.scores", TypeError, out_changed("scores", lambda x: x.astype(np.float32))),
    ("out.num_nodes has 2 axes", r"out\.num_nodes", ValueError, out_changed("num_nodes", lambda x: x[:, None])),
    ("out.tree_mask is int32", r"out\.tree_mask", TypeError, out_changed("tree_mask", lambda x: x.view(np.int32))),
    ("out.tree_mask is bool", r"out\.tree_mask", TypeError, out_changed("tree_mask", lambda x: x.astype(np.bool_))),
    ("out.tree_mask has 2 words", r"out\.tree_mask", ValueError, out_changed("tree_mask", lambda x: x.repeat(2, 2))),
    ("out.first_child is big-endian", r"out\.first_child", TypeError, out_changed("first_child", big_endian)),
    ("out.next_sibling is misaligned", r"out\.next_sibling", ValueError, out_changed("next_sibling", misaligned)),
    (
        "out.input_ids is one place many times",
        r"out\.input_ids",
        ValueError,
        out_changed("input_ids", lambda x: as_strided(x[:1].copy(), x.shape)),
    ),
    (
        "out.input_ids is out.tokens",
        r"out\.input_ids",
        ValueError,
        lambda a: out_changed("input_ids", lambda x: a["out"].tokens)(a),
    ),
    (
        "out.tokens lies in token_ids",
        r"out\.tokens",
        ValueError,
        lambda a: out_changed("tokens", lambda x: a["token_ids"].reshape(2, 12)[:, :6])(a),
    ),
    (
        "out.depths lies in logprobs",
        r"out\.depths",
        ValueError,
        lambda a: out_changed("depths", lambda x: a["logprobs"].view(np.int32).reshape(2, 12)[:, 6:])(a),
    ),
    (
        "out.num_nodes is root_tokens",
        r"out\.num_nodes",
        ValueError,
        lambda a: out_changed("num_nodes", lambda x: a["root_tokens"])(a),
    ),
    (
        "validate: a row above 0",
        r"logprobs\[1, 2, 0\]",
        ValueError,
        change("logprobs", lambda x: put(x, (1, 2, 0), 0.5)),
    ),
    (
        "validate: a row that rises",
        r"logprobs\[1, 0, 2\]",
        ValueError,
        change("logprobs", lambda x: put(x, (1, 0, 2), -0.0)),
    ),
    (
        "validate: it rises by a bit",
        r"logprobs\[0, 1, 3\]",
        ValueError,
        change("logprobs", lambda x: put(x, (0, 1, 3), np.nextafter(x[0, 1, 2], np.float32(0)))),
    ),
    ("validate: no token", r"token_ids\[0, 1, 3\]", ValueError, change("token_ids", lambda x: put(x, (0, 1, 3), -1))),
]


def put(x: np.ndarray, at: tuple[int, ...], new: float) -> np.ndarray:
    x = x.copy()
    x[at] = new
    return x


@pytest.mark.parametrize(("name", "exception", "changes"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_wrong_arguments(monkeypatch, name, exception, changes):
    problem = problem_of(falling(2, 3, 4), 5)
    out = filled_tree(2, 5, 3)
    right = problem | {"out": out}
    wrong = right | {"validate": True} | changes(right)
    given_tree = wrong["out"]
    results = [getattr(t, n) for t in (out, given_tree) if isinstance(t, dd.DraftTree) for n in DTYPES]
    before = [x.tobytes() if x is not None else None for x in results]
    monkeypatch.setattr(search, "launch", lambda *args, **options: pytest.fail("a kernel was launched"))
    with pytest.raises(exception, match=rf"\b{name}(?!\w)") as caught:
        dd.build_tree(**wrong)
    assert "\n" not in str(caught.value)
    assert before == [x.tobytes() if x is not None else None for x in results], "something was written"
    check_trees(dd.build_tree(**right, variant="heap_numpy"), problem)


def test_validate_takes_what_stands_behind_the_end_of_a_row():
    problem = problem_of(falling(2, 3, 4), 12)
    problem["logprobs"][0, 0, 1:] = (NAN, 5.0, 6.0)
    problem["token_ids"][0, 0, 1:] = -1
    problem["logprobs"][1, 1] = (-INF, 2.0, 1.0, INF)
    problem["token_ids"][1, 1] = -1
    for variant in KERNELS + MIRRORS:
        check_trees(dd.build_tree(**problem, variant=variant, validate=True), problem)


def test_tokens_that_are_no_int32_are_refused_by_validate():
    problem = case_named("int64_ids")
    problem["token_ids"][1, 0, 2] = 2**31
    with pytest.raises(ValueError, match=r"token_ids\[1, 0, 2\] is 2147483648"):
        dd.build_tree(**problem, validate=True)
    problem = case_named("int64_ids")
    for token in (-1, 2**31):
        problem["root_tokens"][1] = token
        with pytest.raises(ValueError, match=rf"root_tokens\[1\] is {token}"):
            dd.build_tree(**problem, validate=True)


def test_results_of_topk_are_valid_arguments():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((3, 4, 50)).astype(np.float32) * np.float32(3)
    logits[0, 1, 7] = NAN
    logits[1, 0, 3:] = -INF
    logits[2, 2] = -INF
    for dtype in (np.float32, np.float16):
        logprobs, token_ids = dd.topk_logprobs(logits.astype(dtype), 6, variant="threshold_numpy")
        problem = {"logprobs": logprobs, "token_ids": token_ids, "root_tokens": np.arange(3, dtype=np.int32)}
        problem["tree_budget"] = 30
        check_trees(dd.build_tree(**problem, variant="heap_numpy", validate=True), problem)
        assert dd.build_tree(**problem, variant="heap_numpy").depths.max(axis=1).tolist() == [1, 4, 2]


# Mirror and kernel are one algorithm

BUILDERS: tuple[ModuleType, ...] = (build_heap, build_frontier)
each_builder = pytest.mark.parametrize("module", BUILDERS, ids=lambda module: module.__name__.split(".")[-1])


def function_source(module: ModuleType, name: str) -> str:
    """Source of the one function of this name, wherever it stands in the module."""
    source = inspect.getsource(module)
    found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == name]
    assert len(found) == 1
    segment = ast.get_source_segment(source, found[0])
    assert segment is not None
    return segment


def phases(module: ModuleType, name: str) -> list[str]:
    return re.findall(r"# Phase \d: .*", function_source(module, name))


@each_builder
def test_mirror_and_kernel_have_the_same_phases(module):
    assert phases(module, "mirror") == phases(module, "kernel")
    assert [p.split(":")[0] for p in phases(module, "mirror")] == ["# Phase 0", "# Phase 1", "# Phase 2"]


@each_builder
def test_what_only_the_gpu_needs_is_marked(module):
    for line in function_source(module, "kernel").splitlines():
        assert "cuda." not in line or "  # gpu: " in line, line


def test_the_readable_builder_has_no_atomics_and_no_warp_intrinsics():
    forbidden = ("atomic", "shfl", "ballot", "syncwarp", "activemask", "match_any", "match_all", "vote", "warp")
    for module in (build_heap, search):
        names = set(tokens(inspect.getsource(module), tokenize.NAME))
        assert not [name for name in names for word in forbidden if word in name.lower()]


# Wrong kernels must fail: else the comparisons above would prove nothing


def one_request(problem: dict[str, Any], b: int) -> dict[str, Any]:
    return {name: x[b : b + 1] if isinstance(x, np.ndarray) else x for name, x in problem.items()}


TRAPS: tuple[tuple[dict[str, Any], int | None], ...] = (
    (problem_of(ended((0, 0, 2, INF), (1, 1, 0, NAN), rows=falling(3, 3, 4)), 9), None),
    (problem_of(multiples(1, 2, 9, of=2.0**-23, start=-1.0), 15), None),
    (one_request(case_named("zeros_of_both_signs"), 0), None),
    (problem_of(whole(1, 7, 3, most=1), 20), None),
    (case_named("ties_in_the_second_word_of_ranks"), None),
    (one_request(case_named("inexact_sums"), 2) | {"tree_budget": 20}, None),
    (problem_of(falling(2, 3, 4, scale=0.2), 40), 2),  # of which columns are in shared memory, in `heap`
)


def check_traps(monkeypatch: pytest.MonkeyPatch, kernel: ModuleType, made: Any) -> None:
    """Raise AssertionError unless the kernel of a module that was run anew passes all traps."""
    name = kernel.__name__.split(".")[-1]
    monkeypatch.setattr(operator, name, made)
    for problem, columns in TRAPS:
        if columns is not None:
            if kernel is not build_heap:
                continue
            monkeypatch.setattr(made, "make_layout", functools.partial(narrow_layout, made.make_layout, columns))
        check_trees(dd.build_tree(**problem, variant=name.removeprefix("build_")), problem)


def narrow_layout(plain: Any, columns: int, *args: Any, **options: Any) -> Any:
    """As ``plain`` makes it, with this many columns of the rows in shared memory."""
    return dataclasses.replace(plain(*args, **options), columns=columns)


@only_simulated
@each_builder
def test_kernels_without_a_mistake_pass(monkeypatch, module):
    check_traps(monkeypatch, module, build(module))


@only_simulated
@pytest.mark.parametrize("mistake", TREE_MISTAKES)
def test_a_kernel_with_a_mistake_fails(monkeypatch, mistake):
    changed, text, kernel = TREE_MISTAKES[mistake]
    made = build(kernel, changed, text)
    with pytest.raises(AssertionError, match="FAIL"):
        check_traps(monkeypatch, kernel, made)
