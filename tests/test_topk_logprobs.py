"""topk_logprobs: all variants against the float64 oracle: ids exactly, log-probabilities within a derived bound.

Kernels run in the simulator, or on a GPU where there is one.
"""

from __future__ import annotations

import inspect
import math
import re
import tokenize
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import BFLOAT16, as_float, cast
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import cuda
from test_build_tree import function_source, phases
from test_verify_attention import (
    LAYOUTS,
    as_strided,
    big_endian,
    change,
    half_aligned_strides,
    misaligned,
    overlapping,
    read_only,
    tokens,
    value,
)
from tree_cases import FLOAT_NAMES, INF, MANY, NAN, TOPK_CASES, check_topk, in_order, make_logits, normal
from wrong_trees import TOPK_MISTAKES, build

import ddtree_numba as dd
from ddtree_numba.device.arrays import view
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.tree import topk_logprobs as operator
from ddtree_numba.tree import topk_rounds, topk_threshold
from refs import oracle

Results = tuple[np.ndarray, np.ndarray]

KERNELS = ("rounds", "threshold")
MIRRORS = ("rounds_numpy", "threshold_numpy")
each_kernel = pytest.mark.parametrize("variant", KERNELS)
each_variant = pytest.mark.parametrize("variant", KERNELS + MIRRORS)
only_simulated = pytest.mark.skipif(not SIMULATOR, reason="wrong kernels run in the simulator alone")
RUN_BY_KERNELS = tuple(case for case in TOPK_CASES if case.simulate or not SIMULATOR)


def logits_of(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return cast(normal(*shape)(np.random.default_rng(seed)), dtype)


def assert_same_bits(actual: Results, expected: Results) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(e).view(np.uint32))


# All cases


@pytest.mark.parametrize("case", TOPK_CASES, ids=str)
@pytest.mark.parametrize("variant", MIRRORS)
def test_mirror_against_the_oracle(variant, case):
    logits = make_logits(case)
    check_topk(dd.topk_logprobs(logits, case.k, variant=variant), logits, case.k)


# In the simulator NumPy says so when finite logits lie so far apart that their difference becomes -inf.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("case", RUN_BY_KERNELS, ids=str)
@each_kernel
def test_kernel_against_the_oracle(variant, case):
    logits = make_logits(case)
    check_topk(dd.topk_logprobs(logits, case.k, variant=variant), logits, case.k)


def test_the_cases_are_what_they_are_called():
    logits = {case.name: (make_logits(case), case.k) for case in TOPK_CASES if case.dtype == "float32"}
    x, k = logits["special_rows"]
    _, ids = dd.topk_logprobs(x, k, variant="rounds_numpy")
    refused = (ids == -1).all(axis=2)
    assert refused.sum() == 8
    assert not (ids[~refused] == -1).any()
    for case in TOPK_CASES:
        x = as_float(make_logits(case))
        if "ties" in case.name or "equal" in case.name:
            assert np.unique(x[0, 0]).size < x.shape[2], case
        if case.name.startswith(("all_equal", "more_than", "longer_rows_")):
            assert x.shape[2] > topk_threshold.ITEMS, case


def test_both_ways_of_reading_a_row_are_taken():
    def words(x: np.ndarray) -> Any:
        results = view("logprobs", np.empty((1, 1, 1), np.float32)), view("token_ids", np.empty((1, 1, 1), np.int32))
        return topk_threshold.arguments(topk_rounds.Problem(view("logits", x), *results))[0].dtype

    for dtype, per in (("float32", 2), ("float16", 4), ("bfloat16", 4), ("uint16", 4)):
        x = logits_of(3, 2, 24, dtype=dtype)
        assert words(x) == np.uint64
        for narrow in (x[..., :-1], x[..., 1:-3], x[..., ::2], x[..., ::-1], logits_of(1, 2, 23, dtype=dtype)):
            assert words(narrow) == x.dtype, narrow.shape
        assert words(x[::-1, ::-1]) == np.uint64
        assert words(x[:, :, per:]) == np.uint64


@pytest.mark.parametrize("seed", range(6))
def test_mirrors_on_random_rows(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        shape = 2, 3, int(rng.integers(1, 400))
        case_of = [normal(*shape, std=float(rng.choice([0.01, 1.0, 20.0]))), in_order(*shape)][rng.integers(4) // 3]
        logits = cast(case_of(rng), str(rng.choice(FLOAT_NAMES)))
        k = int(rng.integers(1, min(shape[2], 200) + 1))
        for variant in MIRRORS:
            check_topk(dd.topk_logprobs(logits, k, variant=variant), logits, k)


@st.composite
def problems(draw: Any, most: int) -> tuple[np.ndarray, int]:
    """One row from a few values, all ties, or of any floats."""
    vocabulary = draw(st.integers(1, most))
    some = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -INF, 1e-8, -3.0])
    any_float = st.floats(-(2.0**100), 2.0**100, width=32)
    special = st.sampled_from([0.0, 1.0, -INF, NAN, INF])
    element = draw(st.sampled_from([some, some, any_float, any_float, special]))
    row = draw(st.lists(element, min_size=vocabulary, max_size=vocabulary))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "uint16"]))
    return cast(np.array(row, np.float32).reshape(1, 1, -1), dtype), draw(st.integers(1, min(vocabulary, 64)))


@settings(max_examples=200, deadline=None)
@given(problem=problems(most=150))
def test_mirrors_on_drawn_rows(problem):
    logits, k = problem
    for variant in MIRRORS:
        check_topk(dd.topk_logprobs(logits, k, variant=variant), logits, k)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems(most=24))
def test_kernels_on_drawn_rows(problem):
    logits, k = problem
    for variant in KERNELS:
        check_topk(dd.topk_logprobs(logits, k, variant=variant), logits, k)


# Rows, and what they are


@each_variant
def test_rows_do_not_know_each_other(variant):
    logits = logits_of(2, 2, 40)
    together = dd.topk_logprobs(logits, 3, variant=variant)
    for b, l in ((0, 1), (1, 0)):
        alone = dd.topk_logprobs(logits[b : b + 1, l : l + 1], 3, variant=variant)
        assert_same_bits(alone, tuple(x[b : b + 1, l : l + 1] for x in together))


@each_variant
def test_a_smaller_k_gives_the_first_entries(variant):
    logits = logits_of(1, 1, 60, dtype="bfloat16")
    large = dd.topk_logprobs(logits, 12, variant=variant)
    assert_same_bits(dd.topk_logprobs(logits, 5, variant=variant), tuple(x[..., :5] for x in large))


@each_variant
def test_the_same_bits_in_every_run(variant):
    logits = logits_of(1, 2, 60)
    expected = dd.topk_logprobs(logits, 5, variant=variant)
    for _ in range(2):
        assert_same_bits(dd.topk_logprobs(logits, 5, variant=variant), expected)


@each_variant
def test_refused_rows_are_minus_infinity_without_a_token(variant):
    for bad in (NAN, INF):
        logits = logits_of(1, 2, 40)
        logits[0, 1, 11] = bad
        logprobs, token_ids = dd.topk_logprobs(logits, 4, variant=variant)
        assert np.isneginf(logprobs[0, 1]).all()
        assert (token_ids[0, 1] == -1).all()
        assert np.isfinite(logprobs[0, 0]).all()


@each_variant
def test_the_best_may_be_certain(variant):
    # exp underflows to 0 for all others: the log-probability is 0, not above.
    logits = np.full((1, 1, 33), -200.0, np.float32)
    logits[0, 0, 32] = 100.0
    logprobs, token_ids = dd.topk_logprobs(logits, 2, variant=variant)
    assert logprobs.tolist() == [[[0.0, -300.0]]]
    assert token_ids.tolist() == [[[32, 0]]]


@pytest.mark.parametrize("delta", [1e-3, 0.37, 2.0])
@pytest.mark.parametrize("variant", MIRRORS)
def test_flat_rows_stay_within_the_documented_bound(variant, delta):
    # All exponentials but one are equal, so their sum rounds the same way every time.
    logits = np.full((1, 1, 40_000), -delta, np.float32)
    logits[..., 7] = 0
    in_a_row = 40_000 / (topk_rounds.THREADS if variant == "rounds_numpy" else topk_threshold.THREADS * 4)
    logprobs, _ = dd.topk_logprobs(logits, 3, variant=variant)
    exact, _, lse = oracle.topk_logprobs(logits, 3)
    eps = 2.0**-23
    assert np.abs(logprobs - exact).max() <= 4 * eps * max(1, float(np.abs(lse).max())) + eps / 2 * in_a_row


def test_kernels_and_mirrors_add_in_the_same_order():
    # In the simulator: they differ by the last bits of exp and log.
    logits = logits_of(1, 2, 288)
    for kernel, mirror in zip(KERNELS, MIRRORS, strict=True):
        actual, expected = (dd.topk_logprobs(logits, 8, variant=variant) for variant in (kernel, mirror))
        np.testing.assert_array_equal(actual[1], expected[1])
        np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=4e-6)


@each_variant
def test_bfloat16_bits_are_bfloat16(variant):
    bits = logits_of(1, 2, 36, dtype="uint16")
    as_bits = dd.topk_logprobs(bits, 5, variant=variant)
    assert_same_bits(dd.topk_logprobs(bits.view(BFLOAT16), 5, variant=variant), as_bits)


@pytest.mark.parametrize("shape", [(0, 3, 9), (2, 0, 9), (0, 0, 9)])
@each_variant
def test_no_rows(variant, shape):
    logprobs, token_ids = dd.topk_logprobs(np.zeros(shape, np.float32), 4, variant=variant)
    assert (logprobs.shape, logprobs.dtype) == ((*shape[:2], 4), np.float32)
    assert (token_ids.shape, token_ids.dtype) == ((*shape[:2], 4), np.int32)


@each_variant
def test_inputs_are_not_changed(variant):
    logits = logits_of(1, 2, 40, dtype="bfloat16")
    before = logits.tobytes()
    logits.flags.writeable = False
    dd.topk_logprobs(logits, 3, variant=variant)
    assert before == logits.tobytes()


def test_the_default_variant_gives_the_same():
    logits = logits_of(1, 1, 40)
    for options in ({}, {"variant": "auto"}):
        check_topk(dd.topk_logprobs(logits, 3, **options), logits, 3)
    check_topk(dd.topk_logprobs(logits, np.int64(3)), logits, 3)


# Memory


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@each_variant
def test_strides_of_logits(variant, layout):
    for dtype in ("float32", "uint16") if variant in MIRRORS else ("uint16",):
        logits = logits_of(2, 1, 28, dtype=dtype)
        check_topk(dd.topk_logprobs(layout(logits), 3, variant=variant), logits, 3)


@pytest.mark.parametrize("start", [1, 2, 3, 4])
@each_variant
def test_rows_that_begin_anywhere(variant, start):
    whole = logits_of(1, 2, 40, dtype="float16")
    logits = whole[..., start : start + 36]
    check_topk(dd.topk_logprobs(logits, 3, variant=variant), logits, 3)


@each_variant
def test_broadcast_logits(variant):
    logits = np.broadcast_to(logits_of(1, 1, 24), (2, 2, 24))
    check_topk(dd.topk_logprobs(logits, 3, variant=variant), logits, 3)


@pytest.mark.parametrize("layout", ["spread_out", "backwards", "column_major", "axes_swapped"])
@each_variant
def test_given_results_of_any_strides(variant, layout):
    logits = logits_of(2, 1, 24)
    out = (
        LAYOUTS[layout](np.full((2, 1, 3), np.nan, np.float32)),
        LAYOUTS[layout](np.full((2, 1, 3), np.iinfo(np.int32).max, np.int32)),
    )
    for pair in (out, list(out)) if variant in MIRRORS else (out,):
        results = dd.topk_logprobs(logits, 3, variant=variant, out=pair)
        assert results[0] is out[0]
        assert results[1] is out[1]
        check_topk(results, logits, 3)
    if layout == "spread_out":
        assert np.count_nonzero(~np.isnan(out[0].base)) == out[0].size, "something was written beside the results"
        assert np.count_nonzero(out[1].base != np.iinfo(np.int32).max) == out[1].size


@each_variant
def test_results_beside_the_logits_in_one_allocation(variant):
    memory = np.zeros((2, 2, 24 + 3 + 3), np.float32)
    memory[..., :24] = logits_of(2, 2, 24)
    logits, out = memory[..., :24], (memory[..., 24:27], memory[..., 27:].view(np.int32))
    check_topk(dd.topk_logprobs(logits, 3, variant=variant, out=out), logits.copy(), 3)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
@each_kernel
def test_numba_arrays_give_numba_arrays(variant, dtype):
    logits = logits_of(1, 2, 24, dtype=dtype)
    on_device = cuda.to_device(logits)
    results = dd.topk_logprobs(on_device, 3, variant=variant)
    assert [type(x) for x in results] == [type(on_device)] * 2
    check_topk(tuple(x.copy_to_host() for x in results), logits, 3)
    out = cuda.device_array((1, 2, 3), np.float32), cuda.device_array((1, 2, 3), np.int32)
    given_back = dd.topk_logprobs(on_device, 3, variant=variant, out=out)
    assert given_back[0] is out[0]
    assert given_back[1] is out[1]
    check_topk(tuple(x.copy_to_host() for x in out), logits, 3)


def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"\blogits\b is a PyTorch tensor on cpu"):
        dd.topk_logprobs(torch.zeros(1, 1, 4), 2)


# Wrong arguments: one exception that names the argument, before anything is written


def with_results(logprobs: Any = None, token_ids: Any = None) -> Any:
    """Changes to the results that are given."""

    def changes(a: dict[str, Any]) -> dict[str, Any]:
        first, second = a["out"]
        return {"out": (logprobs(first) if logprobs else first, token_ids(second) if token_ids else second)}

    return changes


def logprobs_over_logits(a: dict[str, Any]) -> dict[str, Any]:
    logits, first = overlapping(a["logits"].shape, a["out"][0].shape)
    return {"logits": logits, "out": (first, a["out"][1])}


def token_ids_over_logits(a: dict[str, Any]) -> dict[str, Any]:
    logits, second = overlapping(a["logits"].shape, a["out"][1].shape)
    return {"logits": logits, "out": (a["out"][0], second.view(np.int32))}


def token_ids_over_logprobs(a: dict[str, Any]) -> dict[str, Any]:
    first, second = overlapping(a["out"][0].shape, a["out"][1].shape)
    return {"out": (first, second.view(np.int32))}


# Which argument the message must name, the exception, what is changed. B=2, L=3, V=20, k=4.
ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    ("logits is None", "logits", TypeError, value("logits", None)),
    ("logits is a number", "logits", TypeError, value("logits", 1.0)),
    ("logits is a list", "logits", TypeError, change("logits", lambda x: x.tolist())),
    ("logits is float64", "logits", TypeError, change("logits", lambda x: x.astype(np.float64))),
    ("logits is int32", "logits", TypeError, change("logits", lambda x: x.astype(np.int32))),
    ("logits is int16", "logits", TypeError, change("logits", lambda x: x.astype(np.int16))),
    ("logits is float8", "logits", TypeError, change("logits", lambda x: x.astype(ml_dtypes.float8_e4m3fn))),
    ("logits is complex", "logits", TypeError, change("logits", lambda x: x.astype(np.complex64))),
    ("logits is big-endian", "logits", TypeError, change("logits", big_endian)),
    ("logits is misaligned", "logits", ValueError, change("logits", misaligned)),
    ("logits has misaligned strides", "logits", ValueError, change("logits", half_aligned_strides)),
    ("logits has 2 axes", "logits", ValueError, change("logits", lambda x: x[0])),
    ("logits has 4 axes", "logits", ValueError, change("logits", lambda x: x[None])),
    ("logits has no vocabulary", "logits", ValueError, change("logits", lambda x: x[..., :0])),
    ("logits has a vocabulary below k", "k", ValueError, change("logits", lambda x: x[..., :3])),
    (
        "logits has a vocabulary of 2**31",
        "logits",
        ValueError,
        value("logits", np.broadcast_to(np.float32(0), (1, 1, 2**31))),
    ),
    ("k is 0", "k", ValueError, value("k", 0)),
    ("k is negative", "k", ValueError, value("k", -1)),
    ("k is above V", "k", ValueError, value("k", 21)),
    ("k is above 1024", "k", ValueError, lambda a: {"k": 1025, "logits": np.zeros((2, 3, 2000), np.float32)}),
    ("k is a float", "k", TypeError, value("k", 4.0)),
    ("k is a bool", "k", TypeError, value("k", True)),
    ("k is None", "k", TypeError, value("k", None)),
    ("k is text", "k", TypeError, value("k", "4")),
    ("variant is unknown", "variant", ValueError, value("variant", "radix")),
    ("variant is None", "variant", ValueError, value("variant", None)),
    ("out is an array", "out", TypeError, lambda a: {"out": a["out"][0]}),
    ("out is one array", "out", TypeError, lambda a: {"out": a["out"][:1]}),
    ("out is three arrays", "out", TypeError, lambda a: {"out": (*a["out"], a["out"][0])}),
    ("out[0] is None", r"out\[0\]", TypeError, with_results(lambda x: None)),
    ("out[0] is float64", r"out\[0\]", TypeError, with_results(lambda x: x.astype(np.float64))),
    ("out[0] is float16", r"out\[0\]", TypeError, with_results(lambda x: x.astype(np.float16))),
    ("out[0] has another k", r"out\[0\]", ValueError, with_results(lambda x: x[..., :3])),
    ("out[0] has 2 axes", r"out\[0\]", ValueError, with_results(lambda x: x[0])),
    ("out[0] is read-only", r"out\[0\]", ValueError, with_results(read_only)),
    ("out[0] is big-endian", r"out\[0\]", TypeError, with_results(big_endian)),
    (
        "out[0] is one place many times",
        r"out\[0\]",
        ValueError,
        with_results(lambda x: as_strided(x[:1].copy(), x.shape)),
    ),
    ("out[1] is None", r"out\[1\]", TypeError, with_results(None, lambda x: None)),
    ("out[1] is int64", r"out\[1\]", TypeError, with_results(None, lambda x: x.astype(np.int64))),
    ("out[1] is float32", r"out\[1\]", TypeError, with_results(None, lambda x: x.astype(np.float32))),
    ("out[1] has another B", r"out\[1\]", ValueError, with_results(None, lambda x: x[:1])),
    ("out[1] is read-only", r"out\[1\]", ValueError, with_results(None, read_only)),
    ("out[1] is misaligned", r"out\[1\]", ValueError, with_results(None, misaligned)),
    (
        "out[1] is one place many times",
        r"out\[1\]",
        ValueError,
        with_results(None, lambda x: as_strided(x[:1].copy(), x.shape)),
    ),
    ("out[0] overlaps the logits", r"out\[0\]", ValueError, logprobs_over_logits),
    ("out[1] overlaps the logits", r"out\[1\]", ValueError, token_ids_over_logits),
    ("out[0] overlaps out[1]", r"out\[0\]", ValueError, token_ids_over_logprobs),
    ("out[0] lies in the logits", r"out\[0\]", ValueError, lambda a: {"out": (a["logits"][..., :4], a["out"][1])}),
]


@pytest.mark.parametrize(("name", "exception", "changes"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_wrong_arguments(monkeypatch, name, exception, changes):
    logits = logits_of(2, 3, 20)
    out = np.full((2, 3, 4), 7.0, np.float32), np.full((2, 3, 4), 7, np.int32)
    right = {"logits": logits, "k": 4, "out": out}
    wrong = right | changes(right)
    given_out = wrong["out"] if isinstance(wrong["out"], tuple) else ()
    results = [x for x in (*out, *given_out) if isinstance(x, np.ndarray)]
    before = [x.tobytes() for x in results]
    for module in (topk_rounds, topk_threshold):
        monkeypatch.setattr(module, "launch", lambda *args, **options: pytest.fail("a kernel was launched"))
    with pytest.raises(exception, match=rf"(?<!\w){name}(?!\w)") as caught:
        dd.topk_logprobs(**wrong)
    assert "\n" not in str(caught.value)
    assert before == [x.tobytes() for x in results], "something was written"
    check_topk(dd.topk_logprobs(**right, variant="threshold_numpy"), logits, 4)


# Mirror and kernel are one algorithm

VARIANTS: tuple[ModuleType, ...] = (topk_rounds, topk_threshold)
each_module = pytest.mark.parametrize("module", VARIANTS, ids=lambda module: module.__name__.split(".")[-1])


@each_module
def test_mirror_and_kernel_have_the_same_phases(module):
    mirror, kernel = phases(module, "mirror"), phases(module, "kernel")
    assert mirror == kernel
    assert [int(re.findall(r"\d", phase)[0]) for phase in mirror] == list(range(1, len(mirror) + 1))
    assert len(mirror) == {topk_rounds: 2, topk_threshold: 5}[module]


@each_module
def test_what_only_the_gpu_needs_is_marked(module):
    for line in function_source(module, "kernel").splitlines():
        assert "cuda." not in line or "  # gpu: " in line, line


def test_the_readable_variant_has_no_atomics_and_no_warp_intrinsics():
    forbidden = ("atomic", "shfl", "ballot", "syncwarp", "syncthreads_count", "match_any", "vote", "warp")
    names = set(tokens(inspect.getsource(topk_rounds), tokenize.NAME))
    assert not [name for name in names for word in forbidden if word in name.lower()]


def test_the_largest_k_has_room():
    # In the simulator, too.
    source = inspect.getsource(topk_threshold)
    items = re.search(r"^ITEMS = .*$", source, re.MULTILINE)
    assert items
    sizes = [int(n) for n in re.findall(r"\d+", items[0].split("#")[0])]
    assert all(math.log2(n).is_integer() for n in sizes)
    assert min(sizes) >= operator.MAX_K


# Wrong kernels must fail: else the comparisons above would prove nothing


def special_trap() -> np.ndarray:
    x = normal(2, 2, 72)(np.random.default_rng(1))
    x[0, 0, 71] = NAN
    x[0, 1, 3:] = -INF
    x[1, 1, 70] = INF
    return x


TRAPS: tuple[tuple[np.ndarray, int], ...] = (
    (special_trap(), 5),
    (cast(np.round(normal(1, 1, 288)(np.random.default_rng(2))), "bfloat16"), 9),
    (np.where(np.arange(40) % 3 == 0, np.float32(0.0), np.float32(-0.0)).reshape(1, 1, 40), 20),
    (logits_of(1, 1, 17), 17),
)
# More groups are asked for than there are in the simulator: all logits reach the threshold, and there is no room.
OVERFLOW = cast(np.round(normal(1, 1, MANY, std=0.9)(np.random.default_rng(3))), "bfloat16"), 150


def check_traps(monkeypatch: pytest.MonkeyPatch, kernel: ModuleType, made: Any) -> None:
    """Raise AssertionError unless the kernel of a module that was run anew passes all traps."""
    name = kernel.__name__.split(".")[-1]
    monkeypatch.setattr(operator, name, made)
    for logits, k in (*TRAPS, OVERFLOW) if kernel is topk_threshold else TRAPS:
        check_topk(dd.topk_logprobs(logits, k, variant=name.removeprefix("topk_")), logits, k)


@only_simulated
@each_module
def test_kernels_without_a_mistake_pass(monkeypatch, module):
    check_traps(monkeypatch, module, build(module))


@only_simulated
@pytest.mark.parametrize("mistake", TOPK_MISTAKES)
def test_a_kernel_with_a_mistake_fails(monkeypatch, mistake):
    changed, text, kernel = TOPK_MISTAKES[mistake]
    made = build(kernel, changed, text)
    with pytest.raises(AssertionError, match="FAIL"):
        check_traps(monkeypatch, kernel, made)
