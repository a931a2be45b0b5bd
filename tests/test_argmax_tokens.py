"""argmax_tokens: kernel and mirror against the oracle, and the laws of the argument and the result.

The kernel runs in the simulator, or on a GPU where there is one.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from accept_cases import INF, NAN, as_oracle_floats, check_tokens, mirrored_argmax
from cases import cast
from hypothesis import given, settings
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
    value,
)
from tree_cases import FLOAT_NAMES
from wrong_accept import ARGMAX_MISTAKES, build

import ddtree_numba as dd
from ddtree_numba.accept import argmax_tokens as operator
from ddtree_numba.device.arrays import view
from ddtree_numba.device.runtime import SIMULATOR
from refs import accept

# Elements of a row that a block looks at in one go, words of float32: a row of more has a second group and a tail.
GROUP = operator.THREADS * operator.UNROLL * 2
SIZES = (1, 2, 3, 7, 8, 37, 64, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP + 5)

only_simulated = pytest.mark.skipif(not SIMULATOR, reason="wrong kernels run in the simulator alone")
each_dtype = pytest.mark.parametrize("dtype", FLOAT_NAMES)


def logits_of(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return cast(np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(3), dtype)


def check_both(logits: np.ndarray) -> None:
    """Kernel and mirror against the oracle."""
    exact = accept.argmax_tokens(as_oracle_floats(logits))
    check_tokens(mirrored_argmax(logits), exact, "mirror")
    check_tokens(dd.argmax_tokens(logits), exact, "kernel")


# All rows


@each_dtype
@pytest.mark.parametrize("vocabulary", SIZES)
def test_random_rows(vocabulary, dtype):
    check_both(logits_of(1, 2, vocabulary, dtype=dtype, seed=vocabulary))


@each_dtype
def test_rows_by_hand(dtype):
    rows = [
        ([1, 3, 2, 3], 1), ([3, 1, 2, 3], 0), ([1, 2, 3, 4], 3), ([-0.0, 0.0, -1, 0.0], 0), ([0.0, -0.0, -1, 0], 0),
        ([-1, -0.0, 0.0, -1], 1), ([-INF] * 4, 0), ([-INF, -INF, -9, -INF], 2), ([1, INF, 2, INF], 1),
        ([NAN, 1, 2, 3], -1), ([3, 1, 2, NAN], -1), ([-INF, NAN, -INF, -INF], -1), ([INF, NAN, 1, 2], -1),
        ([NAN] * 4, -1), ([-3, -2, -1, -2], 2),
    ]  # fmt: skip
    logits = cast(np.array([[row for row, _ in rows]], np.float32), dtype)
    wanted = np.array([[token for _, token in rows]], np.int32)
    check_tokens(dd.argmax_tokens(logits), wanted, "kernel")
    check_tokens(mirrored_argmax(logits), wanted, "mirror")


# Where ties may lie: in one word, in two words of a thread, in two threads, in two groups, in the tail.
TIES = (
    (0, 1), (0, GROUP), (1, 2 * GROUP + 4), (5, 2), (GROUP - 1, GROUP), (GROUP + 3, GROUP - 3), (2 * GROUP + 4, 0),
    (2 * GROUP + 3, 2 * GROUP + 4), (2, 2 + 2 * operator.THREADS, 2 + 4 * operator.THREADS),
)  # fmt: skip


@each_dtype
def test_of_ties_the_lowest_id(dtype):
    x = np.full((1, len(TIES), 2 * GROUP + 5), -1.0, np.float32)
    for i, places in enumerate(TIES):
        x[0, i, list(places)] = 2.5
    wanted = np.array([[min(places) for places in TIES]], np.int32)
    check_tokens(mirrored_argmax(cast(x, dtype)), wanted, "mirror")
    if dtype == "float32":
        check_tokens(dd.argmax_tokens(x), wanted, "kernel")  # odd rows are read one by one
    words = cast(np.pad(x, [(0, 0), (0, 0), (0, 3)], constant_values=-1), dtype)
    check_tokens(mirrored_argmax(words), wanted, "mirror")
    check_tokens(dd.argmax_tokens(words), wanted, "kernel")


def test_no_padding_is_picked():
    # 8,193 logits end in the middle of a group. Rows of one value, of -inf, and with ties at both ends.
    x = np.full((1, 4, 8193), -1e30, np.float32)
    x[0, 1] = -INF
    x[0, 2, [0, 8192]] = 5.0
    x[0, 3, [8191, 8192]] = -1e-30
    check_tokens(mirrored_argmax(x), np.array([[0, 0, 0, 8191]], np.int32), "mirror")
    check_tokens(dd.argmax_tokens(x[:, 1:]), np.array([[0, 0, 8191]], np.int32), "kernel")


@each_dtype
def test_a_nan_anywhere_refuses_its_row_alone(dtype):
    places = (0, 1, 7, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP, 2 * GROUP + 4)
    x = np.random.default_rng(0).standard_normal((1, len(places) + 2, 2 * GROUP + 5)).astype(np.float32)
    for i, place in enumerate(places):
        x[0, i, place] = NAN
        x[0, i, place - 1] = (INF, 9.0)[i % 2]
    logits = cast(x, dtype)
    exact = accept.argmax_tokens(as_oracle_floats(logits))
    assert (exact[0, :-2] == -1).all()
    assert (exact[0, -2:] >= 0).all()
    check_both(logits)


def test_nans_of_any_sign_and_payload():
    bits = np.zeros((1, 6, 8), np.uint16)
    bits[0, range(6), range(6)] = [0x7F81, 0x7FC0, 0x7FFF, 0xFF81, 0xFFC0, 0xFFFF]
    bits[0, :, 7] = 0x7F80  # infinity is none
    check_tokens(dd.argmax_tokens(bits), np.full((1, 6), -1, np.int32))
    check_tokens(mirrored_argmax(bits), np.full((1, 6), -1, np.int32))
    wide = bits.astype(np.uint32) << 16
    check_tokens(dd.argmax_tokens(wide.view(np.float32)), np.full((1, 6), -1, np.int32))


@pytest.mark.parametrize("seed", range(4))
def test_mirror_on_many_random_rows(seed):
    rng = np.random.default_rng(seed)
    for _ in range(30):
        shape = 2, 3, int(rng.integers(1, 5 * GROUP))
        x = rng.standard_normal(shape).astype(np.float32) * np.float32(rng.choice([0.1, 1, 100]))
        x = np.round(x) if rng.random() < 0.5 else x
        x[rng.random(shape) < rng.choice([0, 0, 0.003])] = NAN
        x[rng.random(shape) < rng.choice([0, 0.01, 0.99])] = -INF
        logits = cast(x, str(rng.choice(FLOAT_NAMES)))
        check_tokens(mirrored_argmax(logits), accept.argmax_tokens(as_oracle_floats(logits)))


@settings(max_examples=100, deadline=None)
@given(
    row=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-40, -1e-40]), min_size=1, max_size=70),
    dtype=st.sampled_from(FLOAT_NAMES),
)
def test_mirror_on_drawn_rows(row, dtype):
    logits = cast(np.array([[row]], np.float32), dtype)
    check_tokens(mirrored_argmax(logits), accept.argmax_tokens(as_oracle_floats(logits)))


def test_rows_that_break_the_links_of_a_walk_are_flagged():
    # What argmax refuses is what accept_greedy flags.
    logits = np.zeros((1, 1, 5), np.float32)
    logits[0, 0, 3] = NAN
    tree = dd.build_tree(np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, 1), np.int32), np.zeros(1, np.int32), 0)
    assert dd.accept_greedy(tree, dd.argmax_tokens(logits)).flags.tolist() == [dd.BAD_TARGET]


@pytest.mark.parametrize("shape", [(0, 3, 9), (2, 0, 9), (0, 0, 1)])
def test_no_rows(shape):
    tokens = dd.argmax_tokens(np.zeros(shape, np.float32))
    assert (tokens.shape, tokens.dtype) == (shape[:2], np.int32)


def test_the_logits_are_not_changed():
    logits = logits_of(1, 2, 40, dtype="bfloat16")
    before = logits.tobytes()
    logits.flags.writeable = False
    check_both(logits)
    assert before == logits.tobytes()


# Memory


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_strides_of_logits(dtype, layout):
    logits = logits_of(2, 2, 28, dtype=dtype)
    moved = layout(logits)
    exact = accept.argmax_tokens(as_oracle_floats(logits))
    check_tokens(dd.argmax_tokens(moved), exact, "kernel")
    check_tokens(mirrored_argmax(moved), exact, "mirror")


@pytest.mark.parametrize("start", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_begin_anywhere(dtype, start):
    check_both(logits_of(1, 2, 48, dtype=dtype)[..., start : start + 40])


def test_broadcast_logits():
    check_both(np.broadcast_to(logits_of(1, 1, 24), (2, 3, 24)))


@each_dtype
def test_both_ways_of_reading_a_row_are_taken(dtype):
    def words(x: np.ndarray) -> Any:
        return operator.arguments(view("logits", x), view("out", np.empty(x.shape[:2], np.int32)))[0].dtype

    x = logits_of(3, 2, 24, dtype=dtype)
    assert words(x) == np.uint64
    for narrow in (x[..., :-1], x[..., 1:-3], x[..., ::2], x[..., ::-1], logits_of(1, 2, 23, dtype=dtype)):
        assert words(narrow) == x.dtype, narrow.shape
    assert words(x[::-1, ::-1]) == np.uint64


@pytest.mark.parametrize("layout", ["spread_out", "backwards", "column_major", "axes_swapped"])
def test_a_given_result_of_any_strides(layout):
    logits = logits_of(2, 3, 24)
    out = LAYOUTS[layout](np.full((2, 3), -7, np.int32))
    assert dd.argmax_tokens(logits, out=out) is out
    check_tokens(np.ascontiguousarray(out), accept.argmax_tokens(logits))
    if layout == "spread_out":
        assert np.count_nonzero(out.base != np.iinfo(np.int32).max) == out.size, "something was written beside it"


@each_dtype
def test_numba_arrays_give_numba_arrays(dtype):
    logits = logits_of(1, 2, 24, dtype=dtype)
    if dtype == "bfloat16":  # Numba's arrays hold its bits
        logits = logits.view(np.uint16)
    given_array = cuda.to_device(logits)
    tokens = dd.argmax_tokens(given_array)
    assert isinstance(tokens, type(given_array))
    check_tokens(tokens.copy_to_host(), accept.argmax_tokens(as_oracle_floats(logits)))
    out = cuda.device_array((1, 2), np.int32)
    assert dd.argmax_tokens(given_array, out=out) is out
    check_tokens(out.copy_to_host(), accept.argmax_tokens(as_oracle_floats(logits)))


def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"\blogits\b is a PyTorch tensor on cpu"):
        dd.argmax_tokens(torch.zeros(1, 1, 4))


# Wrong arguments: one exception that names the argument, before anything is written


def out_over_logits(a: dict[str, Any]) -> dict[str, Any]:
    logits, out = overlapping(a["logits"].shape, a["out"].shape)
    return {"logits": logits, "out": out.view(np.int32)}


# Which text the message must hold, the exception, what is changed. B=2, Q=3, V=20.
ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    ("logits is None", "logits is a ", TypeError, value("logits", None)),
    ("logits is a list", "logits is a ", TypeError, change("logits", lambda x: x.tolist())),
    ("logits is float64", "logits has dtype float64", TypeError, change("logits", lambda x: x.astype(np.float64))),
    ("logits is int32", "logits has dtype int32", TypeError, change("logits", lambda x: x.astype(np.int32))),
    ("logits is int16", "logits has dtype int16", TypeError, change("logits", lambda x: x.astype(np.int16))),
    (
        "logits is float8",
        "logits has dtype float8_e4m3fn",
        TypeError,
        change("logits", lambda x: x.astype(ml_dtypes.float8_e4m3fn)),
    ),
    ("logits is big-endian", "logits .*native byte order", TypeError, change("logits", big_endian)),
    ("logits is misaligned", "logits .*not aligned", ValueError, change("logits", misaligned)),
    ("logits has misaligned strides", "logits .*not aligned", ValueError, change("logits", half_aligned_strides)),
    ("logits has 2 axes", r"logits has shape \[3, 20\].*\[B, Q, V\]", ValueError, change("logits", lambda x: x[0])),
    ("logits has 4 axes", r"logits has shape \[1, 2, 3, 20\]", ValueError, change("logits", lambda x: x[None])),
    ("there is no vocabulary", "logits .*has V = 0", ValueError, change("logits", lambda x: x[..., :0])),
    (
        "there is a vocabulary of 2**31",
        "logits .*has V = 2147483648",
        ValueError,
        value("logits", np.broadcast_to(np.float32(0), (2, 3, 2**31))),
    ),
    (
        "there are 2**31 rows",
        "logits .*has 2147483648 rows",
        ValueError,
        value("logits", np.broadcast_to(np.float32(0), (2**16, 2**15, 4))),
    ),
    ("out is a list", "out is a ", TypeError, change("out", lambda x: x.tolist())),
    ("out is int64", "out has dtype int64", TypeError, change("out", lambda x: x.astype(np.int64))),
    ("out is uint32", "out has dtype uint32", TypeError, change("out", lambda x: x.astype(np.uint32))),
    ("out has another B", r"out has shape \[1, 3\].*\[B, Q\] = \[2, 3\]", ValueError, change("out", lambda x: x[:1])),
    ("out has another Q", r"out has shape \[2, 2\]", ValueError, change("out", lambda x: x[:, :2])),
    ("out has 3 axes", r"out has shape \[2, 3, 1\]", ValueError, change("out", lambda x: x[..., None])),
    ("out is read-only", "out is read-only", ValueError, change("out", read_only)),
    ("out is misaligned", "out .*not aligned", ValueError, change("out", misaligned)),
    (
        "out is one place many times",
        "out .*overlaps itself",
        ValueError,
        change("out", lambda x: as_strided(x[:1].copy(), x.shape)),
    ),
    ("out overlaps the logits", "out overlaps logits", ValueError, out_over_logits),
]


@pytest.mark.parametrize(("match", "exception", "changes"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_wrong_arguments(monkeypatch, match, exception, changes):
    right = {"logits": logits_of(2, 3, 20), "out": np.full((2, 3), 7, np.int32)}
    wrong = right | changes(right)
    results = [x for x in (right["out"], wrong["out"]) if isinstance(x, np.ndarray)]
    before = [x.tobytes() for x in results]
    monkeypatch.setattr(operator, "launch", lambda *args, **options: pytest.fail("a kernel was launched"))
    with pytest.raises(exception, match=match) as caught:
        dd.argmax_tokens(**wrong)
    assert "\n" not in str(caught.value)
    assert before == [x.tobytes() for x in results], "something was written"


# Mirror and kernel are one algorithm


def test_mirror_and_kernel_have_the_same_phases():
    assert phases(operator, "mirror") == phases(operator, "kernel")
    assert [p.split(":")[0] for p in phases(operator, "mirror")] == ["# Phase 1", "# Phase 2", "# Phase 3"]


def test_what_only_the_gpu_needs_is_marked():
    for line in function_source(operator, "kernel").splitlines():
        assert "cuda." not in line or "  # gpu: " in line, line


# Wrong kernels must fail: else the comparisons above would prove nothing


def traps() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    ties = np.full((2, 2, 2 * GROUP + 8), -1.0, np.float32)
    ties[0, 0, [5, GROUP + 5]] = 2.0  # of one thread, in two groups
    ties[0, 1, [GROUP + 5, 2 * GROUP + 5]] = 2.0  # likewise, the second in the tail
    ties[1, 0, [2 * operator.THREADS, 2]] = 2.0  # the lower id is the later thread's
    ties[1, 1, [10 * operator.THREADS + 3, 10 * operator.THREADS + 2]] = 2.0  # in one word, the sixth of a thread
    nan = np.zeros((1, 3, 12), np.float32)
    nan[0, 0, 5] = NAN
    nan[0, 1, 11] = 1
    nan[0, 2, 8] = NAN
    return [nan, cast(rng.standard_normal((2, 2, 72)), "bfloat16"), ties]


TRAPS = traps() if SIMULATOR else []


@only_simulated
def test_the_kernel_without_a_mistake_passes():
    for logits in TRAPS:
        check_tokens(build(operator).argmax_tokens(logits), accept.argmax_tokens(logits))


@only_simulated
@pytest.mark.parametrize("mistake", ARGMAX_MISTAKES)
def test_a_kernel_with_a_mistake_fails(mistake):
    made = build(operator, *ARGMAX_MISTAKES[mistake])
    with pytest.raises(AssertionError, match="FAIL"):
        for logits in TRAPS:
            check_tokens(made.argmax_tokens(logits), accept.argmax_tokens(logits))
