"""The named cases of build_tree and topk_logprobs, and what every result must satisfy.

Trees are held to refs.trees bit by bit, in every field, padding included. Zeros count with their sign: both sides do
the same float64 additions in the same order, so there is no excuse for -0.0 in place of 0.0.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cases import as_float, cast

from ddtree_numba.tree import topk_threshold
from ddtree_numba.tree.draft_tree import DTYPES, DraftTree, shapes
from refs import oracle, trees

Shape = tuple[int, int, int]
Fill = Callable[[np.random.Generator], np.ndarray]
EPS = float(np.finfo(np.float32).eps)
VOCABULARY = 163_840
TEMPTING = -(2.0**-9)  # stands behind the end of a row: better than all others, if it were a candidate


# Rows of log-probabilities


def falling(*shape: int, scale: float = 3.0) -> Fill:
    """Uniform in -scale .. 0. Float64 holds nearly all sums of these exactly."""
    return lambda rng: -np.sort(rng.random(shape, np.float32) * np.float32(scale), axis=2)


def inexact(*shape: int) -> Fill:
    """Steep rows, every other one smaller by 2**30: float64 rounds their sums, and the next more coarsely."""

    def fill(rng: np.random.Generator) -> np.ndarray:
        x = -np.sort(np.exp2(-4 * rng.random(shape)), axis=2).astype(np.float32)
        x[:, ::2] *= np.float32(2.0**-30)
        return x

    return fill


def rounded(*shape: int, scale: float = 2.0) -> Fill:
    """Multiples of 1/16, as bfloat16 logits between 8 and 16 are: candidates tie, and so do sums of different paths."""
    return lambda rng: np.ceil(falling(*shape, scale=scale)(rng) * np.float32(16)) / np.float32(16)


def whole(*shape: int, most: int = 3) -> Fill:
    """Whole numbers: next to everything ties."""
    return lambda rng: -np.sort(rng.integers(0, most + 1, shape), axis=2).astype(np.float32)


def filled(*shape: int, value: float) -> Fill:
    return lambda rng: np.full(shape, value, np.float32)


def steps(*shape: int) -> Fill:
    """-1, -2, -3, ..: a score is the depth plus the ranks, and ties are everywhere."""
    return lambda rng: np.broadcast_to(-1 - np.arange(shape[2], dtype=np.float32), shape).copy()


def multiples(*shape: int, of: float, start: float = 0.0) -> Fill:
    """start - n * of, with n from 1 to 50."""
    return lambda rng: (
        np.float32(start) - np.sort(rng.integers(1, 51, shape), axis=2).astype(np.float32) * np.float32(of)
    )


def zeros_of_both_signs(*shape: int) -> Fill:
    """0.0 and -0.0 in any order, which is no increase, and then a few -1."""

    def fill(rng: np.random.Generator) -> np.ndarray:
        x = np.where(rng.random(shape) < 0.5, np.float32(0.0), np.float32(-0.0))
        x[::2, :, 0] = -0.0  # the sum of two of them is one, while that of a sibling, -0.0 - -0.0 + -0.0, is 0.0
        x[..., -2:] -= 1
        return x

    return fill


def ended(*ends: tuple[int, int, int, float], rows: Fill) -> Fill:
    """Rows that end early: at (request, position, candidate) stands a value, and tempting ones behind it."""

    def fill(rng: np.random.Generator) -> np.ndarray:
        x = rows(rng)
        for b, d, r, value in ends:
            x[b, d, r] = value
            x[b, d, r + 1 :] = TEMPTING
        return x

    return fill


def anywhere(value: float) -> Fill:
    """A request for each of 9 places: there the value ends the row."""
    return ended(*((3 * d + r, d, r, value) for d in range(3) for r in range(3)), rows=falling(9, 3, 3))


@dataclass(frozen=True)
class TreeCase:
    """One problem of build_tree.

    Attributes
    ----------
    name : str
        Also seeds the random numbers.
    logprobs : function
        Makes float32 [B, L, K].
    tree_budget : int
    ids : str
        "int32" or "int64": random tokens; "few": each position has tokens 0 and 1 alone, many times; "ends": the first
        and the last token of the vocabulary come first.
    """

    name: str
    logprobs: Fill
    tree_budget: int
    ids: str = "int32"

    def __str__(self) -> str:
        return self.name


INF, NAN = np.inf, np.nan

TREE_CASES = (
    TreeCase("plain", falling(3, 4, 8), 20),
    TreeCase("bfloat16_ties", rounded(2, 4, 8), 31),
    TreeCase("whole_numbers", whole(2, 4, 5), 20),
    TreeCase("all_equal", filled(1, 3, 5, value=-0.5), 40),
    TreeCase("all_zero", filled(1, 3, 3, value=0.0), 39),
    TreeCase("minus_inf_anywhere", anywhere(-INF), 8),
    TreeCase("nan_anywhere", anywhere(NAN), 8),
    TreeCase("plus_inf_anywhere", anywhere(INF), 8),
    TreeCase("nothing_anywhere", filled(2, 2, 3, value=-INF), 5),
    TreeCase(
        "requests_of_all_sizes",
        ended((1, 0, 0, NAN), (2, 1, 0, -INF), (3, 0, 1, INF), (3, 1, 1, NAN), (3, 2, 0, -INF), rows=falling(5, 4, 4)),
        20,
    ),
    TreeCase("the_last_request_is_the_smallest", ended((1, 0, 0, -INF), rows=falling(2, 3, 4)), 9),
    TreeCase("the_first_request_is_the_smallest", ended((0, 0, 1, NAN), (0, 1, 0, NAN), rows=falling(2, 3, 4)), 9),
    TreeCase("duplicate_tokens", rounded(2, 3, 6), 20, ids="few"),
    TreeCase("first_and_last_token", falling(2, 3, 4), 12, ids="ends"),
    TreeCase("int64_ids", falling(2, 3, 4), 12, ids="int64"),
    TreeCase("chain", falling(2, 12, 1), 20),
    TreeCase("star_of_40", falling(1, 1, 40), 40),
    TreeCase("star_of_40_ties", rounded(1, 1, 40, scale=0.2), 39),
    TreeCase("one_candidate", falling(2, 1, 1), 3),
    TreeCase("more_budget_than_nodes", falling(1, 3, 3), 64),
    TreeCase("more_candidates_than_budget", falling(2, 3, 50, scale=0.2), 7),
    TreeCase("no_budget", falling(2, 3, 4), 0),
    TreeCase("budget_1", falling(2, 3, 4), 1),
    *(TreeCase(f"{n}_nodes", rounded(1, 6, 6), n - 1) for n in (31, 32, 33, 64, 65)),
    TreeCase("three_words_of_mask", falling(1, 4, 8), 70),
    TreeCase("float32_neighbours", multiples(1, 3, 6, of=2.0**-23, start=-1.0), 30),
    TreeCase("inexact_sums", inexact(3, 6, 8), 22),
    TreeCase("tiny", multiples(1, 3, 6, of=1e-8), 30),
    TreeCase("denormal", multiples(1, 3, 6, of=1.5e-45), 30),
    TreeCase(
        "tiny_beside_large",
        lambda rng: np.concatenate([multiples(2, 2, 6, of=1e-8)(rng), falling(2, 2, 6)(rng)], 1),
        30,
    ),
    TreeCase("huge", falling(2, 4, 4, scale=3e38), 20),
    TreeCase("zeros_of_both_signs", zeros_of_both_signs(3, 3, 5), 16),
    TreeCase("seven_words_of_ranks", rounded(1, 32, 4, scale=0.5), 45),
    TreeCase("seven_words_of_ranks_all_equal", filled(1, 32, 3, value=-0.25), 36),
    TreeCase("seven_words_of_ranks_all_zero", filled(1, 32, 2, value=0.0), 40),
    TreeCase(
        "ties_in_the_second_word_of_ranks",
        ended(*((0, d, 1, NAN) for d in range(5)), rows=steps(1, 9, 5)),
        40,
    ),
    TreeCase("ten_words_of_ranks_all_zero", filled(1, 46, 2, value=0.0), 60),
)


def random_ids(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Tokens of one of the kinds of `TreeCase`."""
    if kind == "few":
        return rng.integers(0, 2, shape).astype(np.int32)
    ids = rng.integers(0, VOCABULARY, shape)
    if kind == "ends":
        ids[..., 0], ids[..., 1] = 0, VOCABULARY - 1
    return ids.astype(np.int64 if kind == "int64" else np.int32)


def make_trees(case: TreeCase) -> dict[str, Any]:
    """The arguments of build_tree for a case: logprobs, token_ids, root_tokens, tree_budget."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    logprobs = case.logprobs(rng)
    assert logprobs.dtype == np.float32
    return {
        "logprobs": logprobs,
        "token_ids": random_ids(rng, case.ids, logprobs.shape),
        "root_tokens": random_ids(rng, case.ids, (logprobs.shape[0], 2))[:, 0].copy(),
        "tree_budget": case.tree_budget,
    }


def random_trees(rng: np.random.Generator, batch: int, *, largest: int = 40) -> dict[str, Any]:
    """A batch of random problems of one shape; of three requests one is full of ties, and some rows end early."""
    length, candidates = int(rng.integers(1, 9)), int(rng.integers(1, 13))
    shape = batch, length, candidates
    logprobs = falling(*shape, scale=float(rng.choice([0.05, 1.0, 8.0])))(rng)
    for fill, start in ((rounded, 0), (whole, 1), (inexact, 2)):
        logprobs[start::6] = fill(*shape)(rng)[start::6]
    for _ in range(batch // 4):
        b, d, r = (int(rng.integers(n)) for n in shape)
        logprobs[b, d, r] = rng.choice([-INF, NAN, INF])
    return {
        "logprobs": logprobs,
        "token_ids": random_ids(rng, str(rng.choice(["int32", "int64", "few", "ends"])), (*shape, 2))[..., 0].copy(),
        "root_tokens": random_ids(rng, "int32", (batch,)),
        "tree_budget": int(rng.integers(0, largest + 1)),
    }


def expected_trees(problem: dict[str, Any]) -> dict[str, np.ndarray]:
    """The trees of the oracle."""
    logprobs, tree_budget = problem["logprobs"], problem["tree_budget"]
    if logprobs.shape[0] == 0:
        return {name: np.zeros(shape, DTYPES[name]) for name, shape in shapes(0, tree_budget + 1).items()}
    return trees.draft_tree(logprobs, problem["token_ids"], problem["root_tokens"], tree_budget)


def check_trees(tree: DraftTree, problem: dict[str, Any], expected: dict[str, np.ndarray] | None = None) -> None:
    """Raise AssertionError unless all fields are the oracle's, bit by bit; the tree's arrays may lie anywhere."""
    expected = expected_trees(problem) if expected is None else expected
    found = tree.to_host()
    for name, dtype in DTYPES.items():
        actual, wanted = getattr(found, name), expected[name]
        assert (actual.dtype, actual.shape) == (dtype, wanted.shape), f"FAIL {name}: {actual.dtype}{actual.shape}"
        bits = f"u{dtype.itemsize}"
        wrong = np.argwhere(actual.view(bits) != np.ascontiguousarray(wanted).view(bits))
        if wrong.size:
            at = tuple(int(n) for n in wrong[0])
            raise AssertionError(f"FAIL {name}{list(at)}: {actual[at]} for {wanted[at]}; {len(wrong)} differ")
    assert tree.max_depth == min(problem["logprobs"].shape[1], problem["tree_budget"])


# Rows of logits


@dataclass(frozen=True)
class TopkCase:
    """One problem of topk_logprobs.

    Attributes
    ----------
    name : str
        Also seeds the random numbers.
    logits : function
        Makes float [B, L, V], before the rounding to ``dtype``.
    k : int
    dtype : str
        float32, float16, bfloat16, or uint16 (bfloat16 bits).
    simulate : bool
        Whether the kernels run it in the simulator, too; the mirrors and a GPU run all.
    """

    name: str
    logits: Fill
    k: int
    dtype: str = "float32"
    simulate: bool = True

    def __str__(self) -> str:
        return f"{self.name}_{self.dtype}"


def normal(*shape: int, std: float = 3.0, mean: float = 0.0) -> Fill:
    return lambda rng: rng.standard_normal(shape, np.float32) * np.float32(std) + np.float32(mean)


def in_order(*shape: int, step: float = 0.125) -> Fill:
    """Rising rows, then falling ones."""

    def fill(rng: np.random.Generator) -> np.ndarray:
        x = np.broadcast_to(np.arange(shape[2], dtype=np.float32) * np.float32(step), shape).copy()
        x[shape[0] // 2 :] = x[shape[0] // 2 :, :, ::-1]
        return x

    return fill


def special_rows(vocabulary: int) -> Fill:
    """Rows that have no finite logsumexp, one by one, each beside one that has."""

    def fill(rng: np.random.Generator) -> np.ndarray:
        x = normal(2, 9, vocabulary)(rng)
        last = vocabulary - 1
        x[0, 0, 0] = x[0, 2, vocabulary // 2] = x[0, 4, last] = NAN
        x[0, 6, vocabulary // 3] = INF
        x[0, 8] = -INF
        x[1, 1, [0, last]] = INF, NAN
        x[1, 3, [0, 1, last]] = -INF, INF, NAN
        x[1, 4, ::2] = -INF
        x[1, 5] = NAN
        x[1, 6, 3:] = -INF  # fewer finite ones than k
        x[1, 7, : last - 1] = -INF
        x[1, 8, :last] = -INF
        return x

    return fill


def mixed_zeros(*shape: int) -> Fill:
    """Nothing above zeros of both signs."""
    return lambda rng: np.where(rng.random(shape) < 0.5, rng.choice([0.0, -0.0], shape), -1.0).astype(np.float32)


MANY = topk_threshold.ITEMS + 88  # more logits than there is room for, if all reach the threshold
FLOAT_NAMES = ("float32", "float16", "bfloat16", "uint16")

TOPK_CASES = (
    # Rows of 96 and 288 logits are whole words of 8 bytes in every dtype; odd ones never are.
    *(TopkCase("plain", normal(2, 1, 96), 4, dtype) for dtype in FLOAT_NAMES),
    *(TopkCase("odd", normal(1, 1, 97), 9, dtype) for dtype in FLOAT_NAMES),
    *(TopkCase("special_rows", special_rows(40), 6, dtype, simulate=dtype == "bfloat16") for dtype in FLOAT_NAMES),
    TopkCase("special_rows_odd", special_rows(21), 4, simulate=False),
    TopkCase("one_logit", normal(2, 1, 1), 1),
    TopkCase("two_logits", normal(2, 1, 2), 2, "bfloat16"),
    TopkCase("best_one", normal(1, 2, 288), 1, "bfloat16"),
    TopkCase("all_of_them", normal(2, 1, 21), 21),
    TopkCase("all_of_them_wide", normal(1, 1, 48), 48, "float16"),
    TopkCase("ties", normal(1, 1, 288, std=0.5), 40, "bfloat16"),
    TopkCase("many_ties", lambda rng: rng.integers(-2, 2, (2, 1, 203)), 30),
    TopkCase("all_equal", lambda rng: np.full((1, 1, MANY + 1), -2.5), 9),
    TopkCase("all_equal_wide", lambda rng: np.full((1, 1, MANY), 7.0), 64, "bfloat16"),
    TopkCase("in_order", in_order(2, 1, 203), 7),
    TopkCase("in_order_wide", in_order(2, 1, 288), 20, "bfloat16"),
    TopkCase("zeros_of_both_signs", mixed_zeros(1, 1, 97), 40),
    TopkCase("far_above_zero", normal(1, 1, 97, mean=1000.0), 5),
    TopkCase("far_below_zero", normal(1, 1, 97, mean=-1000.0), 5),
    TopkCase("one_far_above_the_others", lambda rng: np.where(np.arange(97) == 20, 200.0, normal(1, 1, 97)(rng)), 5),
    TopkCase("huge", lambda rng: np.where(rng.random((1, 2, 96)) < 0.5, 3e38, -3e38), 50),
    TopkCase("denormal", lambda rng: rng.integers(-9, 9, (1, 2, 96)) * 1.5e-45, 20),
    TopkCase("largest_float16", lambda rng: rng.choice([65504.0, -65504.0, 6e-8, 0.0], (1, 1, 96)), 50, "float16"),
    TopkCase("k_of_64", normal(1, 1, 1031), 64, "float16"),
    TopkCase("k_of_65", normal(1, 1, 96), 65),
    # In the simulator there are 64 groups: for a k above that, all logits reach the threshold.
    TopkCase("more_than_there_is_room_for", normal(1, 1, MANY), 65),
    TopkCase("k_of_130_ties", normal(1, 1, 151, std=0.5), 130, "bfloat16"),
    TopkCase("long_row", normal(1, 1, 8193), 8),
    TopkCase("long_row_wide", normal(1, 1, 8192), 16, "bfloat16"),
    TopkCase("longer_rows", normal(2, 2, 20_011), 50, simulate=False),
    TopkCase("longer_rows_wide", normal(2, 2, 20_000), 1000, "bfloat16", simulate=False),
    TopkCase("longer_rows_in_order", in_order(2, 1, 20_000, step=2.0**-10), 1024, simulate=False),
    TopkCase("longer_rows_all_equal", lambda rng: np.full((1, 1, 20_011), 0.5), 1024, "float16", simulate=False),
)


def make_logits(case: TopkCase) -> np.ndarray:
    """The logits of a case, in its dtype."""
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    return cast(case.logits(rng), case.dtype)


def check_topk(results: tuple[np.ndarray, np.ndarray], logits: np.ndarray, k: int) -> None:
    """Raise AssertionError unless ids are the oracle's, and logprobs within 4 eps * max(1, |lse|, |logit|).

    In units of u = eps / 2: m + log(sum), its logarithm, logit - lse and its storing are 6 u times that at most. What
    remains, 2 u, holds the error of the sum: relative to the sum u * sqrt(n) after n additions in a row, which is well
    below for the rows here, where n is 600 at most and an lse of 4 and more stands beside it.
    """
    logprobs, token_ids = results
    exact, exact_ids, lse = oracle.topk_logprobs(as_float(logits), k)
    assert (logprobs.dtype, token_ids.dtype) == (np.float32, np.int32)
    assert logprobs.shape == token_ids.shape == exact.shape
    wrong = np.argwhere(token_ids != exact_ids)
    assert not wrong.size, f"FAIL token_ids{wrong[0].tolist()}: {len(wrong)} differ"
    assert not np.isnan(logprobs).any(), "FAIL logprobs: NaN"
    with np.errstate(over="ignore"):  # what no float32 holds is -inf
        live = np.isfinite(exact.astype(np.float32))
    assert np.array_equal(np.isneginf(logprobs), ~live), "FAIL logprobs: other entries are -inf"
    chosen = np.take_along_axis(as_float(logits).astype(np.float64), np.maximum(token_ids, 0), axis=2)
    unit = np.maximum(1, np.maximum(np.abs(chosen), np.abs(lse)[..., None]))[live]
    error = np.abs(logprobs[live].astype(np.float64) - exact[live]) / unit
    assert error.max(initial=0) <= 4 * EPS, f"FAIL logprobs: error {error.max() / EPS:.2f} eps"
    assert (logprobs <= 0).all(), "FAIL logprobs: above 0"
    assert (logprobs[..., 1:] <= logprobs[..., :-1]).all(), "FAIL logprobs: rising"
