"""merge_states and the lse converters against the float64 oracle and the laws of the operation.

Kernels run in the simulator, or on a GPU where there is one.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from cases import BFLOAT16, as_float, cast
from hypothesis import strategies as st
from numba import cuda
from test_build_tree import function_source, phases
from test_docs import DOCS, run_until, table_under
from test_verify_attention import (
    LAYOUTS,
    as_strided,
    assert_same_bits,
    big_endian,
    change,
    half_aligned_strides,
    misaligned,
    overlapping,
    read_only,
    value,
)
from wrong_merges import CONVERTER_MISTAKES, MISTAKES, build, build_race

import ddtree_numba as dd
from ddtree_numba.attention import merge
from ddtree_numba.device.arrays import contiguous_strides, view
from ddtree_numba.device.runtime import SIMULATOR
from refs import oracle

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))

import bench_merge_states  # noqa: E402

INF, NAN = np.float32(np.inf), np.float32(np.nan)
EPS = 2.0**-23
FLOAT_NAMES = ("float32", "float16", "bfloat16", "uint16")
MANTISSA = {"float32": 24, "float16": 11, "bfloat16": 8}
SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
PAGE = DOCS / "merge_states.md"
only_simulated = pytest.mark.skipif(not SIMULATOR, reason="wrong kernels run in the simulator alone")

States = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Results = tuple[np.ndarray, np.ndarray]


def states(*shape: int, dtypes: str = "float32 float32", spread: float = 2.0, seed: int = 0) -> States:
    """Random states; ``spread`` is the standard deviation of the lse."""
    rng = np.random.default_rng(seed)
    outs = [cast(rng.standard_normal(shape).astype(np.float32), dtype) for dtype in dtypes.split()]
    lses = [(spread * rng.standard_normal(shape[:-1])).astype(np.float32) for _ in range(2)]
    return outs[0], lses[0], outs[1], lses[1]


def special_states(*shape: int, dtypes: str = "float32 float32") -> States:
    """Every pair of kinds of lse, over and over; what an empty state holds for out is NaN, infinity or anything."""
    out_a, lse_a, out_b, lse_b = states(*shape, dtypes=dtypes)
    kinds = np.array([0.5, -3.0, -INF, INF, NAN, 1e5, -1e5, 1e4, 0.5], np.float32)
    pairs = np.array(list(itertools.product(kinds, kinds)), np.float32)
    # A NaN beside an empty state: what that gives is told by a test of its own.
    pairs = pairs[~(np.isnan(pairs) & np.isinf(pairs[:, ::-1])).any(axis=1)]
    lse_a.reshape(-1)[:], lse_b.reshape(-1)[:] = np.resize(pairs, (lse_a.size, 2)).T
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        junk = cast(np.resize(np.array([np.nan, np.inf, 7.0], np.float32), shape), out.dtype.name)
        out[np.isinf(lse)] = junk[np.isinf(lse)]
    return out_a, lse_a, out_b, lse_b


def spoiled(given: States, out_dtype: Any = None) -> Results:
    """Arrays for the results that hold what no right result does."""
    out = np.full(given[0].shape, 777.0, np.float32)
    name = given[0].dtype.name if out_dtype is None else out_dtype
    return cast(out, name), np.full(given[1].shape, 777.0, np.float32)


def merged(given: States, module: Any = dd, **changes: Any) -> Results:
    out, lse = spoiled(given)
    return module.merge_states(*given, **({"out": out, "lse": lse} | changes))


def mirrored(given: States, out_dtype: Any = None) -> Results:
    out, lse = spoiled(given, out_dtype)
    arrays = [x.view(np.uint16) if x.dtype == BFLOAT16 else x for x in (*given, out, lse)]
    with np.errstate(over="ignore"):
        merge.mirror(*arrays)
    return out, lse


def check_merged(results: Results, given: States) -> None:
    """Raise AssertionError unless out and lse are those of the oracle, within the bounds that the page derives."""
    out, lse = as_float(results[0]), results[1]
    a, l_a, b, l_b = (as_float(x) for x in given)
    exact_out, exact_lse = oracle.merge_states(a, l_a, b, l_b)
    assert out.shape == exact_out.shape and lse.shape == exact_lse.shape and lse.dtype == np.float32
    found = out.astype(np.float64)
    name = out.dtype.name
    scale = np.maximum(
        *(np.where(np.isinf(l)[..., None], 0, np.abs(x.astype(np.float64))) for x, l in ((a, l_a), (b, l_b)))
    )
    bound = 4 * EPS * scale + (2.0 ** -MANTISSA[name] * np.abs(exact_out) if name != "float32" else 0) + SMALLEST[name]
    fine = np.where(np.isnan(exact_out), np.isnan(found), np.abs(found - exact_out) <= bound)
    assert fine.all(), f"FAIL out: {(~fine).sum()} of {fine.size}, first {np.argwhere(~fine)[0]}"
    fine = np.where(
        np.isfinite(exact_lse),
        np.abs(lse - np.where(np.isfinite(exact_lse), exact_lse, 0)) <= 2 * EPS * np.maximum(1, np.abs(exact_lse)),
        (lse == exact_lse) | (np.isnan(lse) & np.isnan(exact_lse)),
    )
    assert fine.all(), f"FAIL lse: {(~fine).sum()} of {fine.size}, first {np.argwhere(~fine)[0]}"
    neither = np.isneginf(exact_lse)
    assert (found[neither] == 0).all() and not np.signbit(found[neither]).any(), "FAIL: two empty states give 0"


# Against the oracle: all shapes, dtypes, extremes

SHAPES = [(1, 1), (3, 2, 1), (2, 3, 7), (3, 2, 16), (2, 1, 20), (2, 2, 2, 36), (5, 64), (1, 2, 300), (2, 1, 2, 1, 40)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    given = states(*shape)
    check_merged(mirrored(given), given)
    check_merged(merged(given), given)


@pytest.mark.parametrize("R", [3, 16, 24])
@pytest.mark.parametrize("b", FLOAT_NAMES)
@pytest.mark.parametrize("a", FLOAT_NAMES)
def test_dtypes(a, b, R):
    given = states(2, 2, R, dtypes=f"{a} {b}")
    out, lse = dd.merge_states(*given)
    assert out.dtype == given[0].dtype and lse.dtype == np.float32
    check_merged((out, lse), given)
    for dtype in FLOAT_NAMES:
        results = merged(given, out=spoiled(given, dtype)[0])
        assert results[0].dtype == cast(np.zeros(1), dtype).dtype
        check_merged(results, given)
        check_merged(mirrored(given, dtype), given)


@pytest.mark.parametrize("dtypes", ["float32 float32", "bfloat16 bfloat16", "float16 float32", "float32 uint16"])
@pytest.mark.parametrize("R", [5, 16])
def test_empty_and_extreme_states(R, dtypes):
    given = special_states(7, 13, R, dtypes=dtypes)
    check_merged(mirrored(given), given)
    check_merged(merged(given), given)


@pytest.mark.parametrize("difference", [1e4, 1e5, 3e38])
def test_huge_differences_are_exact(difference):
    out_a, lse_a, out_b, lse_b = states(2, 3, 8)
    lse_a[:], lse_b[:] = np.float32(difference), np.float32(-0.5)
    for given in ((out_a, lse_a, out_b, lse_b), (out_b, lse_b, out_a, lse_a)):
        for out, lse in (merged(given), mirrored(given)):
            np.testing.assert_array_equal(out, out_a)
            np.testing.assert_array_equal(lse, lse_a)


def test_attention_over_parts_of_the_keys():
    # The definition of an attention state, on softmax itself.
    rng = np.random.default_rng(0)
    scores, values = rng.standard_normal((2, 3, 50)) * 3, rng.standard_normal((50, 8))

    def state(keys: slice) -> Results:
        p = np.exp(scores[..., keys])
        total = p.sum(-1)
        return (p @ values[keys] / total[..., None]).astype(np.float32), np.log(total).astype(np.float32)

    whole = state(slice(0, 50))
    first, second, third = state(slice(0, 7)), state(slice(7, 8)), state(slice(8, 50))
    for order in itertools.permutations((first, second, third)):
        found = dd.merge_states(*dd.merge_states(*order[0], *order[1]), *order[2])
        for x, exact in zip(found, whole, strict=True):
            np.testing.assert_allclose(x, exact, rtol=0, atol=1e-6)


def test_kernel_and_mirror_round_alike():
    # They differ by the last bits of exp and log1p.
    given = states(4, 3, 24)
    for actual, expected in zip(merged(given), mirrored(given), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3 * EPS * 4)
    equal = (given[0], given[1], given[2], given[1])  # the exponential of 0 is 1 for both
    np.testing.assert_array_equal(merged(equal)[0], mirrored(equal)[0])


@st.composite
def drawn_states(draw: Any) -> States:
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 2), st.sampled_from([1, 4, 8, 9])))
    lse = st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([-INF, INF, 0.0, -0.0, 1.0]))
    some = st.floats(-1024, 1024, width=16)
    size = int(np.prod(shape))
    outs = [
        cast(
            np.array(draw(st.lists(some, min_size=size, max_size=size)), np.float32).reshape(shape),
            draw(st.sampled_from(FLOAT_NAMES)),
        )
        for _ in range(2)
    ]
    rows = shape[0] * shape[1]
    lses = [
        np.array(draw(st.lists(lse, min_size=rows, max_size=rows)), np.float32).reshape(shape[:2]) for _ in range(2)
    ]
    return outs[0], lses[0], outs[1], lses[1]


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(given=drawn_states())
def test_mirror_on_drawn_states(given):
    check_merged(mirrored(given), given)


@hypothesis.settings(max_examples=25, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(given=drawn_states())
def test_kernel_on_drawn_states(given):
    results = merged(given)
    check_merged(results, given)
    a, l_a, b, l_b = given
    assert_same_bits(merged((b, l_b, a, l_a), out=spoiled(given)[0]), results)


# The laws


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_commutative_bit_for_bit(dtype):
    a, l_a, b, l_b = states(8, 4, 24, dtypes=f"{dtype} {dtype}")
    l_b[::2] = l_a[::2]  # ties
    for find in (merged, mirrored):
        assert_same_bits(find((b, l_b, a, l_a)), find((a, l_a, b, l_b)))


def test_commutative_among_the_smallest_numbers():
    # On a tie both weights are 1/2, which is inexact for odd multiples of the smallest number.
    n = np.arange(1, 25, dtype=np.uint32)
    a, b = (np.stack([x] * 24).reshape(1, 24, 24).view(np.float32) for x in (n, n))
    b = np.ascontiguousarray(b.transpose(0, 2, 1))
    lse = np.zeros((1, 24), np.float32)
    for find in (merged, mirrored):
        assert_same_bits(find((b, lse, a, lse)), find((a, lse, b, lse)))


def test_associative_up_to_rounding():
    a, l_a, b, l_b = states(6, 4, 16)
    c, l_c, *_ = states(6, 4, 16, seed=1)
    left = dd.merge_states(*dd.merge_states(a, l_a, b, l_b), c, l_c)
    right = dd.merge_states(a, l_a, *dd.merge_states(b, l_b, c, l_c))
    for x, y in zip(left, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=8 * EPS * 4)


@pytest.mark.parametrize("mark", [-INF, INF], ids=["-inf", "+inf"])
@pytest.mark.parametrize("R", [6, 16])
@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_an_empty_state_changes_no_bit(dtype, R, mark):
    out, lse = states(3, 2, R, dtypes=f"{dtype} {dtype}")[:2]
    bits = out.view(f"u{out.dtype.itemsize}")
    bits[0, 0, :4] = np.array([0, 1, 1 << (8 * out.dtype.itemsize - 1), 3], bits.dtype)  # zeros and smallest numbers
    out[1, 1, :2] = cast(np.array([np.inf, -np.inf], np.float32), dtype)
    bits[2, 0, 0] = np.iinfo(bits.dtype).max - 5  # a NaN, with its payload
    lse[0, 0] = -0.0
    lse[1, 0] = NAN  # not empty
    empty, nothing = cast(np.full(out.shape, np.nan, np.float32), dtype), np.full(lse.shape, mark, np.float32)
    for find in (merged, mirrored):
        assert_same_bits(find((out, lse, empty, nothing)), (out, lse))
        assert_same_bits(find((empty, nothing, out, lse)), (out, lse))
        zero, minus_inf = find((empty, nothing, empty, -nothing))
        assert not zero.view(np.uint8).any()
        assert np.isneginf(minus_inf).all()


def test_nan_stays_in_its_row():
    given = states(2, 3, 8)
    clean = merged(given)
    given[1][1, 1] = NAN
    out, lse = merged(given)
    assert np.isnan(out[1, 1]).all() and np.isnan(lse[1, 1])
    clean[0][1, 1], clean[1][1, 1] = out[1, 1], lse[1, 1]
    assert_same_bits((out, lse), clean)
    given = states(2, 3, 8)
    given[2][0, 2, 5] = NAN
    out, lse = merged(given)
    assert np.argwhere(np.isnan(out)).tolist() == [[0, 2, 5]] and np.isfinite(lse).all()


def test_the_same_bits_in_every_run_and_layout():
    given = states(3, 4, 24, dtypes="uint16 float32")
    expected = merged(given)
    assert_same_bits(merged(given), expected)
    for layout in LAYOUTS.values():  # words or single elements, the roundings are the same
        assert_same_bits(merged(tuple(map(layout, given))), expected)


# Memory


def arguments_of(given: States) -> list[Any]:
    views = [view("x", x) for x in (*given, *spoiled(given))]
    return list(merge.launches(views))


def test_both_ways_of_reading_rows_are_taken():
    for dtypes, words in (
        ("float32 float32", (np.complex128, np.complex128)),
        ("bfloat16 uint16", (np.complex128, np.complex128)),
        ("float16 float32", (np.uint64, np.complex128)),
    ):
        given = states(2, 2, 16, dtypes=dtypes)
        (args, _), *more = arguments_of(given)
        assert not more and (args[0].dtype, args[3].dtype) == words
        assert args[9].shape == (1, 1, 4), "rows in C order are one axis"
        for narrow in (given[0][..., 1:], given[0][..., ::2], given[0][..., ::-1], given[0][..., :-1]):
            other = narrow.copy() if narrow.shape[-1] != 16 else given[2]
            odd = (narrow, given[1], np.zeros(narrow.shape, other.dtype), given[3])
            assert arguments_of(odd)[0][0][0].dtype == given[0].dtype
    assert len(arguments_of(tuple(x[::-1, ::-1] for x in states(2, 2, 16)))) == 1
    wide = tuple(np.asfortranarray(x) for x in states(2, 3, 2, 2, 2, 5))
    assert len(arguments_of(wide)) == 2 * 3, "a launch for each index of what stands ahead of three axes"


@pytest.mark.parametrize("log_lanes", range(5))
def test_rows_of_all_lengths_have_the_threads_that_they_need(log_lanes):
    for num_words in (4 * (1 << log_lanes) - 3 if log_lanes else 1, 4 * (1 << log_lanes)):
        ((args, blocks),) = arguments_of(states(5, 3, 4 * num_words))
        expected = min(max(num_words + 3, 4) // 4 - 1, 10**6).bit_length()
        assert args[7] == min(expected, merge.THREADS.bit_length() - 1, merge.MAX_LOG_LANES)
        assert (blocks - 1) * (merge.THREADS >> args[7]) < 15 <= blocks * (merge.THREADS >> args[7])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 2, 16), (2, 2, 3, 5), (2, 2, 2, 2, 2, 4)], ids=str)
def test_strides(layout, shape):
    given = states(*shape)
    for n in (None, 0, 1, 2, 3):
        moved = tuple(LAYOUTS[layout](x) if n in (None, i) else x for i, x in enumerate(given))
        out, lse = (LAYOUTS[layout](x) for x in spoiled(given))
        assert all(x is y for x, y in zip(merged(moved, out=out, lse=lse), (out, lse), strict=True))
        check_merged((out, lse), given)
        if layout == "spread_out":
            assert np.count_nonzero(~np.isnan(out.base)) == out.size, "something was written beside the results"


def test_lse_in_the_layout_of_flashmla():
    given = states(2, 3, 4, 16)
    swapped = [np.ascontiguousarray(given[n].transpose(0, 2, 1)).transpose(0, 2, 1) for n in (1, 3)]
    assert_same_bits(merged((given[0], swapped[0], given[2], swapped[1])), merged(given))


def test_broadcast_states():
    a, l_a, b, l_b = states(3, 2, 16)
    same = np.broadcast_to(b[:1], b.shape), np.broadcast_to(l_b[:1], l_b.shape)
    check_merged(merged((a, l_a, *same)), (a, l_a, *same))


@pytest.mark.parametrize("R", [5, 16, 300])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_place(dtype, R):
    given = states(3, 2, R, dtypes=f"{dtype} {dtype}")
    expected = merged(given)
    for out_at, lse_at in ((0, 1), (2, 3), (0, 3), (2, 1), (0, None), (None, 3)):
        mine = tuple(x.copy() for x in given)
        out = spoiled(given)[0] if out_at is None else mine[out_at]
        lse = spoiled(given)[1] if lse_at is None else mine[lse_at]
        results = dd.merge_states(*mine, out=out, lse=lse)
        assert results[0] is out and results[1] is lse
        assert_same_bits(results, expected)
    mine = tuple(x.copy() for x in given)
    bits = mine[0].view(np.uint16) if dtype == "bfloat16" else mine[0][...]  # another array, the same memory
    dd.merge_states(*mine, out=bits)
    assert_same_bits((mine[0], expected[1]), expected)


def test_a_state_with_itself():
    out, lse, *_ = states(3, 2, 16)
    expected = merged((out, lse, out.copy(), lse.copy()))
    np.testing.assert_array_equal(expected[0], out)
    assert_same_bits(dd.merge_states(out, lse, out, lse, out=out, lse=lse), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_beside_each_other_in_one_allocation(dtype):
    memory = cast(np.zeros((2, 3, 48), np.float32), dtype)
    parts = memory[..., :16], memory[..., 16:32], memory[..., 32:]
    given = states(2, 3, 16, dtypes=f"{dtype} {dtype}")
    parts[0][...], parts[1][...] = given[0], given[2]
    out, lse = dd.merge_states(parts[0], given[1], parts[1], given[3], out=parts[2])
    assert out is parts[2]
    check_merged((out.copy(), lse), given)


def test_inputs_are_not_changed():
    given = states(2, 2, 16)
    before = [x.tobytes() for x in given]
    for x in given:
        x.flags.writeable = False
    merged(given)
    assert before == [x.tobytes() for x in given]


@pytest.mark.parametrize("shape", [(0, 2, 8), (2, 0, 8), (0, 3, 4, 8), (0, 8)])
def test_no_rows(shape):
    out, lse = dd.merge_states(*states(*shape, dtypes="float16 float32"))
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (shape, np.float16, shape[:-1], np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_numba_arrays_give_numba_arrays(dtype):
    given = states(2, 2, 16, dtypes=f"{dtype} {dtype}")
    on_device = [cuda.to_device(x) for x in given]
    results = dd.merge_states(*on_device)
    assert [type(x) for x in results] == [type(on_device[0])] * 2
    assert_same_bits(tuple(x.copy_to_host() for x in results), merged(given))
    in_place = dd.merge_states(*on_device, out=on_device[2], lse=on_device[1])
    assert in_place[0] is on_device[2] and in_place[1] is on_device[1]
    assert_same_bits(tuple(x.copy_to_host() for x in in_place), merged(given))


def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"\bout_a\b is a PyTorch tensor on cpu"):
        dd.merge_states(torch.zeros(1, 4), torch.zeros(1), torch.zeros(1, 4), torch.zeros(1))


# The converters


def check_converters(module: Any = dd) -> None:
    """Raise AssertionError unless a module's converters do what their page says."""
    lse = np.random.default_rng(0).standard_normal((3, 2, 5)).astype(np.float32) * 20
    lse[0, 1, 2], lse[2, 0, 3], lse[1, 1, 1], lse[2, 1, 4] = -INF, INF, NAN, 0
    finite = np.isfinite(lse)
    for shape in ((3, 2, 5), (6, 5), (30,), (1, 3, 2, 1, 5)):
        nats = module.lse_from_log2(lse.reshape(shape), out=np.full(shape, 777, np.float32)).reshape(lse.shape)
        np.testing.assert_allclose(nats[finite], lse[finite].astype(np.float64) * np.log(2.0), rtol=EPS)
        assert np.isneginf(nats[np.isinf(lse)]).all() and np.isnan(nats[1, 1, 1]), "FAIL: infinities and NaN"
    expected = np.where(np.isinf(lse), -INF, lse).transpose(0, 2, 1)
    for layout in (np.array, *LAYOUTS.values()):
        found = module.lse_from_flashmla(layout(lse), out=layout(np.full((3, 5, 2), 777, np.float32)))
        np.testing.assert_array_equal(found, expected)


def test_converters():
    check_converters()
    lse = np.linspace(-30, 30, 12, dtype=np.float32).reshape(2, 3, 2)
    for convert, mirror_of in ((dd.lse_from_log2, lse), (dd.lse_from_flashmla, lse.transpose(0, 2, 1))):
        out = np.empty(mirror_of.shape, np.float32)
        merge.convert_mirror(mirror_of, merge.LN_2 if convert is dd.lse_from_log2 else merge.ONE, out)
        np.testing.assert_array_equal(convert(lse), out)
        assert convert(lse).strides == contiguous_strides(out.shape, 4)
    assert dd.lse_from_log2(lse, out=lse) is lse
    assert dd.lse_from_log2(np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert dd.lse_from_flashmla(np.zeros((2, 0, 3), np.float32)).shape == (2, 3, 0)


def test_states_of_other_libraries_merge_with_ours():
    given = states(2, 3, 4, 16)
    given[1][0, 1] = -INF
    expected = merged(given)
    theirs = np.where(np.isneginf(given[1]), INF, given[1]).transpose(0, 2, 1).copy()
    ours = dd.lse_from_flashmla(theirs)
    assert_same_bits(merged((given[0], ours, *given[2:])), expected)
    assert_same_bits(merged((given[0], theirs.transpose(0, 2, 1), *given[2:])), expected)
    base_2 = given[1] * np.float32(1 / np.log(2.0))
    check_merged(merged((given[0], dd.lse_from_log2(base_2), *given[2:])), (given[0], base_2 * merge.LN_2, *given[2:]))


@pytest.mark.parametrize(
    ("call", "exception", "match"),
    [
        (lambda x: dd.lse_from_log2(None), TypeError, "lse is a builtins.NoneType"),
        (lambda x: dd.lse_from_log2(x.astype(np.float16)), TypeError, "lse has dtype float16; it must be float32"),
        (lambda x: dd.lse_from_log2(x, out=x[:1]), ValueError, "out has shape"),
        (lambda x: dd.lse_from_log2(x, out=x[::-1]), ValueError, "out overlaps lse"),
        (lambda x: dd.lse_from_log2(x, out=read_only(x)), ValueError, "out is read-only"),
        (lambda x: dd.lse_from_flashmla(x[0]), ValueError, r"lse has shape \[3, 4\]; it must be"),
        (lambda x: dd.lse_from_flashmla(x, out=x.copy()), ValueError, r"out has shape \[2, 3, 4\]; it must be"),
        (lambda x: dd.lse_from_flashmla(x, out=x.transpose(0, 2, 1)), ValueError, "out overlaps lse"),
        (lambda x: dd.lse_from_flashmla(x, out=np.zeros((2, 4, 3))), TypeError, "out has dtype float64"),
        (
            lambda x: dd.lse_from_log2(np.broadcast_to(x[0, 0, :1], (2**31,))),
            ValueError,
            r"less than 2\*\*31",
        ),
    ],
)
def test_wrong_arguments_of_converters(call, exception, match):
    with pytest.raises(exception, match=match):
        call(np.zeros((2, 3, 4), np.float32))


# Wrong arguments: one exception that names the argument, before anything is written


def shifted(name: str, other: str) -> Any:
    """A result that overlaps an argument by one element."""

    def changes(a: dict[str, Any]) -> dict[str, Any]:
        first, second = overlapping(a[other].shape, a[name].shape)
        return {other: first, name: second}

    return changes


# Which argument the message must name, the exception, what is changed. [2, 3, 8] in float32.
ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    *[(f"{name} is None", name, TypeError, value(name, None)) for name in ("out_a", "lse_a", "out_b", "lse_b")],
    *[
        (f"{name} is float64", name, TypeError, change(name, lambda x: x.astype(np.float64)))
        for name in ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")
    ],
    *[
        (f"{name} is misaligned", name, ValueError, change(name, misaligned))
        for name in ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")
    ],
    *[
        (f"{name} has another shape", name, ValueError, change(name, lambda x: x[:1]))
        for name in ("lse_a", "out_b", "lse_b", "out", "lse")
    ],
    *[
        (f"{name} is read-only", f"{name} is read-only", ValueError, change(name, read_only)) for name in ("out", "lse")
    ],
    *[
        (f"{name} is one place many times", name, ValueError, change(name, lambda x: as_strided(x[:1].copy(), x.shape)))
        for name in ("out", "lse")
    ],
    *[
        (f"{name} overlaps {other}", f"{name} overlaps {other}", ValueError, shifted(name, other))
        for name in ("out", "lse")
        for other in ("out_a", "lse_a", "out_b", "lse_b")
    ],
    ("lse is float16", "lse", TypeError, change("lse", lambda x: x.astype(np.float16))),
    ("out_a is a list", "out_a", TypeError, change("out_a", lambda x: x.tolist())),
    ("out_a is int16", "out_a", TypeError, change("out_a", lambda x: x.astype(np.int16))),
    ("out_b is float8", "out_b", TypeError, change("out_b", lambda x: x.astype(ml_dtypes.float8_e4m3fn))),
    ("out_a is big-endian", "out_a", TypeError, change("out_a", big_endian)),
    ("out_a has misaligned strides", "out_a", ValueError, change("out_a", half_aligned_strides)),
    ("out_a has 1 axis", "out_a", ValueError, change("out_a", lambda x: x[0, 0])),
    ("out_a has other rows than lse_a", "out_b", ValueError, change("out_a", lambda x: x[:, :2])),
    ("out_b has another R", "out_b", ValueError, change("out_b", lambda x: x[..., :4])),
    ("lse_a has an axis more", "lse_a", ValueError, change("lse_a", lambda x: x[..., None])),
    (
        "R is 0",
        "R = 0",
        ValueError,
        lambda a: {name: a[name][..., :0] for name in ("out_a", "out_b", "out")},
    ),
    (
        "there are 2**31 rows",
        "lse_a",
        ValueError,
        lambda a: {
            name: np.broadcast_to(np.float32(0), shape)
            for name, shape in (("out_a", (2**31, 1)), ("out_b", (2**31, 1)), ("lse_a", (2**31,)), ("lse_b", (2**31,)))
        },
    ),
    ("out is out_a backwards", "out overlaps out_a", ValueError, lambda a: {"out": a["out_a"][::-1]}),
    ("out is out_a as other bits", "out overlaps out_a", ValueError, lambda a: {
        "out": np.ndarray((2, 3, 8), np.uint16, a["out_a"], strides=a["out_a"].strides)
    }),
    ("lse is lse_a and out is lse_b", "overlaps", ValueError, lambda a: {
        "lse": a["lse_a"], "lse_b": a["out"][..., 0]
    }),
    ("out is both states shifted", "out overlaps out_b", ValueError, lambda a: {
        "out_a": (whole := np.zeros((3, 3, 8), np.float32))[:2], "out": whole[:2], "out_b": whole[1:]
    }),
    ("out and lse overlap", "out overlaps lse", ValueError, lambda a: {"lse": a["out"][..., 0]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "exception", "changes"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_wrong_arguments(monkeypatch, name, exception, changes):
    given = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), states(2, 3, 8), strict=True))
    right = {**given, "out": np.full((2, 3, 8), 7, np.float32), "lse": np.full((2, 3), 7, np.float32)}
    wrong = right | changes(right)
    before = [x.tobytes() for x in right.values()]
    with monkeypatch.context() as patch:
        patch.setattr(merge, "launch", lambda *args, **options: pytest.fail("a kernel was launched"))
        with pytest.raises(exception, match=rf"(?<!\w){name}(?!\w)") as caught:
            dd.merge_states(**wrong)
    assert "\n" not in str(caught.value)
    assert before == [x.tobytes() for x in right.values()], "something was written"
    check_merged(dd.merge_states(**right), tuple(given.values()))


# Mirror and kernel are one algorithm; the page is of the code


def test_mirror_and_kernel_have_the_same_phases():
    found = phases(merge, "mirror")
    assert found == phases(merge, "kernel") == re.findall(r"`(# Phase \d: [^`]*)`", PAGE.read_text(encoding="utf-8"))
    assert [phase[:9] for phase in found] == ["# Phase 1", "# Phase 2", "# Phase 3"]


def test_what_only_the_gpu_needs_is_marked():
    for kernel in ("kernel", "convert_kernel"):
        for line in function_source(merge, kernel).splitlines():
            assert "cuda." not in line or "  # gpu: " in line, line


@pytest.mark.parametrize("name", ["merge_states", "lse_from_log2", "lse_from_flashmla"])
def test_the_page_has_the_signature(name):
    actual = inspect.signature(getattr(dd, name))
    parameters = [p.replace(annotation=p.empty) for p in actual.parameters.values()]
    expected = ast.unparse(
        ast.parse(f"def f{actual.replace(parameters=parameters, return_annotation=actual.empty)}: pass").body[0]
    )
    call = re.search(rf"^[\w, ]+ = dd\.{name}\((.*?)\)$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert call and ast.unparse(ast.parse(f"def f({call[1]}): pass").body[0]) == expected


def test_the_table_of_arguments():
    names = [row[0].strip("`") for row in table_under(PAGE, "Arguments")]
    assert names == list(inspect.signature(dd.merge_states).parameters)


def test_the_table_of_errors():
    namespace = run_until(PAGE, "given")
    rows = table_under(PAGE, "Errors")
    assert len(rows) > 10
    for changed, exception, message in rows:
        changes = eval(f"dict({changed.strip('`')})", namespace)
        with pytest.raises((TypeError, ValueError)) as caught:
            dd.merge_states(**namespace["given"] | changes)
        assert type(caught.value).__name__ == exception, changed
        pattern = ".*".join(re.escape(part.strip()) for part in message.split("..."))
        assert re.search(pattern, str(caught.value)), f"{changed}: {caught.value}"


# The measuring, on NumPy arrays and made-up times


class Numpy:
    """Stands in for bench_merge_states.Gpu."""

    repeats = 30

    def __init__(self) -> None:
        self.timed = 0

    def states(self, shape: tuple[int, ...], dtype: str, layout: str) -> States:
        return states(*shape, dtypes=f"{dtype} {dtype}")

    def results(self, given: States) -> Results:
        return spoiled(given)

    def right(self, found: Results, given: States, dtype: str, bounds: tuple[float, float]) -> bool:
        try:
            check_merged(found, given)
        except AssertionError:
            return False
        return True

    def peers(self, given: States, results: Results) -> dict[str, Any]:
        return {"mirror": lambda *given: mirrored(given)}

    def time(self, call: Any, *, inputs: States) -> dict[str, str]:
        call(*inputs)
        self.timed += 1
        return dict.fromkeys(bench_merge_states.TIMES, "8.0")

    def machine(self) -> dict[str, str]:
        return dict.fromkeys(bench_merge_states.MACHINE, "some")

    def free(self) -> None:
        pass


@pytest.mark.parametrize("layout", ["C order", "in place"])
def test_the_measurement_on_numpy(layout, monkeypatch):
    gpu = Numpy()
    rows = list(bench_merge_states.merge_rows(gpu, (2, 3, 16), "bfloat16", layout))
    assert [row["variant"] for row in rows] == ["merge_states", "mirror"][: 1 if layout == "in place" else 2]
    assert all(row["right"] and row["gb_per_s"] == f"{3 * 6 * 36 / 8e3:.0f}" for row in rows)
    assert gpu.timed == len(rows) and all(row.keys() <= set(bench_merge_states.FIELDS) for row in rows)
    assert bench_merge_states.line(rows[0])
    monkeypatch.setattr(dd, "merge_states", lambda *given, out, lse: (out, lse))  # does nothing
    gpu = Numpy()
    first = next(bench_merge_states.merge_rows(gpu, (2, 3, 16), "bfloat16", layout))
    assert first["right"] is False and gpu.timed == 0 and "gb_per_s" not in first


@only_simulated
def test_measuring_says_that_it_needs_a_gpu(capsys):
    assert bench_merge_states.main([]) == 2
    assert "there is none" in capsys.readouterr().err


# Wrong kernels must fail: else the comparisons above would prove nothing


def check_traps(module: Any) -> None:
    """Raise AssertionError unless the merge_states of a module passes all traps."""
    for given in (
        special_states(7, 13, 4),
        states(1, 2, 300),
        states(3, 3, 13),
        states(1, 1, 13),
        states(1, 2, 64, dtypes="bfloat16 float32"),
        tuple(np.asfortranarray(x) for x in states(2, 3, 4, 2)),
        tuple(np.asfortranarray(x) for x in states(2, 2, 3, 2, 3)),
    ):
        check_merged(merged(given, module), given)
    out, lse, *_ = states(1, 2, 8)
    same = merged((out, lse, out, lse), module)
    assert (same[0] == out).all(), "FAIL: a state merged with itself"


@only_simulated
def test_the_module_without_a_mistake_passes():
    check_traps(build())
    check_converters(build())


@only_simulated
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_merge_with_a_mistake_fails(mistake):
    with pytest.raises((AssertionError, IndexError)):
        check_traps(build(MISTAKES[mistake]))


@only_simulated
@pytest.mark.parametrize("mistake", CONVERTER_MISTAKES)
def test_a_converter_with_a_mistake_fails(mistake):
    with pytest.raises(AssertionError):
        check_converters(build(CONVERTER_MISTAKES[mistake]))


@only_simulated
def test_a_missing_barrier_shows_and_a_late_thread_alone_does_not():
    given = states(1, 1, 32)
    for with_barrier in (True, False):
        mine = tuple(x.copy() for x in given)
        module = build_race(with_barrier=with_barrier)
        results = module.merge_states(*mine, out=mine[0], lse=mine[1])
        if with_barrier:
            check_merged(results, given)
        else:
            with pytest.raises(AssertionError, match="FAIL out"):
                check_merged(results, given)
