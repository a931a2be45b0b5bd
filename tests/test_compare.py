"""The comparison itself: each rule once, and above all that what must fail does fail."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddtree_numba.compare import Report, compare, ulp

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
BOUNDS = ["max_abs", "rel_frobenius", "max_scaled", "max_ulp"]
METRICS = [f"{bound}_error" for bound in BOUNDS]
HUGE = dict.fromkeys(BOUNDS, 1e300)


# Arguments


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_without_a_bound_are_refused(dtype):
    with pytest.raises(ValueError, match="at least one of max_abs, rel_frobenius, max_scaled, max_ulp"):
        compare(np.ones(3, dtype), np.ones(3, dtype))


def test_no_bound_is_refused_before_anything_is_compared():
    with pytest.raises(ValueError, match="no bound"):
        compare(np.ones(3), np.ones(4))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("value", [-1e-30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_bound_must_be_finite_and_not_negative(bound, value, dtype):
    with pytest.raises(ValueError, match=bound):
        compare(np.ones(3, dtype), np.ones(3, dtype), **{bound: value})


@pytest.mark.parametrize("dtype", [np.complex64, object, "U1", "V2", "M8[s]", np.longdouble, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype):
    if np.dtype(dtype) == np.float64:
        pytest.skip("longdouble is float64 on this platform")
    array = np.zeros(2, dtype)
    with pytest.raises(TypeError, match="actual"):
        compare(array, np.zeros(2), max_abs=1.0)
    with pytest.raises(TypeError, match="expected"):
        compare(np.zeros(2), array, max_abs=1.0)


def test_float_against_integer_is_refused_both_ways():
    # bfloat16 bits in uint16 against float32 values: comparing them would be nonsense.
    with pytest.raises(TypeError, match="uint16.*float32"):
        compare(np.zeros(2, np.uint16), np.zeros(2, np.float32), max_abs=1.0)
    with pytest.raises(TypeError, match="float32.*bool"):
        compare(np.zeros(2, np.float32), np.zeros(2, bool), max_abs=1.0)


# Shape, and something to compare


@pytest.mark.parametrize(
    ("shape", "other"),
    [
        ((3,), (4,)),
        ((3,), (1,)),
        ((1,), ()),
        ((), (1,)),
        ((2, 3), (3,)),
        ((2, 3), (1, 3)),
        ((2, 3), (3, 2)),
        ((0,), (1,)),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_another_shape_fails_and_is_never_broadcast(shape, other, dtype):
    report = compare(np.zeros(shape, dtype), np.zeros(other, dtype), **HUGE)
    assert not report
    assert str(shape) in report.reason and str(other) in report.reason
    assert report.num_elements == 0 and report.max_abs_error is None


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, bool])
def test_empty_arrays_fail(shape, dtype):
    report = compare(np.zeros(shape, dtype), np.zeros(shape, dtype), **HUGE)
    assert not report and "nothing was compared" in report.reason


@pytest.mark.parametrize("dtype", [*FLOATS, np.int32, bool])
def test_zero_dimensional_arrays(dtype):
    one, zero = np.array(1, dtype), np.array(0, dtype)
    assert compare(one, one, max_abs=0.0)
    report = compare(one, zero, max_abs=0.5)
    assert not report
    assert (report.worst_index, report.worst_actual, report.worst_expected, report.max_abs_error) == ((), 1, 0, 1)


# NaN and infinity


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("in_actual", "in_expected"), [(True, False), (False, True), (True, True)])
def test_nan_fails_wherever_it_stands(dtype, in_actual, in_expected):
    actual, expected = np.ones((2, 3), dtype), np.ones((2, 3), dtype)
    if in_actual:
        actual[1, 2] = np.nan
    if in_expected:
        expected[1, 2] = np.nan
    report = compare(actual, expected, **HUGE)
    assert not report
    assert report.reason == f"NaN: {int(in_actual)} in actual, {int(in_expected)} in expected"
    assert (report.worst_index, report.num_mismatched, report.num_finite) == ((1, 2), 1, 5)
    assert all(getattr(report, metric) is None for metric in METRICS)


def test_nan_fails_beside_matching_infinities_and_among_a_million():
    assert not compare(np.array([np.inf, np.nan]), np.array([np.inf, np.nan]), **HUGE)
    array = np.zeros(10**6, np.float32)
    array[765_432] = np.nan
    assert compare(array, array, **HUGE).worst_index == (765_432,)


@pytest.mark.parametrize(
    ("got", "want"),
    [(np.inf, -np.inf), (-np.inf, np.inf), (np.inf, 1.0), (1.0, np.inf), (-np.inf, 0.0), (-1.0, -np.inf)],
)
def test_another_infinity_fails_before_any_error(got, want):
    report = compare(np.array([-np.inf, 1.0, got]), np.array([-np.inf, 5.0, want]), **HUGE)
    assert not report and "infinities" in report.reason
    assert (report.worst_index, report.worst_actual, report.worst_expected) == ((2,), got, want)
    assert report.num_mismatched == 1 and report.max_abs_error is None


def test_infinity_against_a_finite_value_beyond_the_range_of_actual_fails():
    assert not compare(np.array([np.inf], np.float32), np.array([1e39]), **HUGE)


@pytest.mark.parametrize("dtype", FLOATS)
def test_all_elements_infinite_alike_pass_with_error_zero(dtype):
    lse = np.full((2, 3), -np.inf, dtype)
    report = compare(lse, lse.astype(np.float64), **dict.fromkeys(BOUNDS, 0.0))
    assert report and [getattr(report, metric) for metric in METRICS] == [0.0] * 4
    assert (report.num_elements, report.num_finite, report.num_mismatched) == (6, 0, 0)
    assert "6 elements (6 infinite in both)" in str(report)


def test_errors_run_over_the_finite_elements():
    report = compare(np.array([np.inf, 2.5, -2.0]), np.array([np.inf, 2.0, -2.0]), max_abs=1.0)
    assert report and report.num_finite == 2
    assert report.max_abs_error == 0.5
    assert report.max_scaled_error == 0.25  # rms of (2, -2), not of three elements
    assert report.rel_frobenius_error == pytest.approx(0.5 / math.sqrt(8), rel=1e-15)
    assert not compare(np.array([np.inf, 2.5]), np.array([np.inf, 2.0]), max_abs=0.25)


# Metrics


def test_all_metrics_against_hand_computed_values():
    expected = np.array([[3.0, 0.0], [0.0, 4.0]])
    actual = np.array([[3.0, 0.5], [0.0, 4.0]], np.float32)
    report = compare(actual, expected, max_abs=0.5)
    assert report.max_abs_error == 0.5
    assert report.rel_frobenius_error == 0.1
    assert report.max_scaled_error == 0.2  # rms = sqrt(25 / 4)
    assert report.max_ulp_error == 0.5 / 2**-22  # row maximum 3
    assert (report.worst_index, report.worst_actual, report.worst_expected) == ((0, 1), 0.5, 0.0)


@pytest.mark.parametrize(
    ("bound", "error"), [("max_abs", 0.5), ("rel_frobenius", 0.1), ("max_scaled", 0.2), ("max_ulp", 2**21)]
)
def test_equality_with_a_bound_passes_and_just_below_it_fails(bound, error):
    expected = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
    actual = expected + np.array([[0.0, 0.5], [0.0, 0.0]], np.float32)
    assert compare(actual, expected, **{bound: error})
    report = compare(actual, expected, **{bound: np.nextafter(error, 0.0)})
    assert not report and "over the bound" in report.reason


def test_every_bound_given_must_hold():
    expected, actual = np.full(4, 2.0), np.array([2.0, 2.0, 2.0, 2.5])
    assert compare(actual, expected, max_abs=0.5, max_scaled=0.25)
    report = compare(actual, expected, max_abs=0.5, max_scaled=0.2)
    assert not report and report.reason == "max scaled over the bound"
    report = compare(actual, expected, max_abs=0.4, max_scaled=0.2, rel_frobenius=1.0)
    assert report.reason == "max abs and max scaled over the bound"


def test_worst_coordinates_are_exact_in_any_memory_order():
    expected = np.zeros((2, 3, 4, 5))
    actual = np.zeros((2, 3, 4, 5), np.float32)
    actual[0, 2, 1, 3], actual[1, 0, 3, 4] = 0.25, -0.5
    for got in (actual, np.asfortranarray(actual), np.moveaxis(np.moveaxis(actual, 1, 3).copy(), 3, 1)):
        report = compare(got, expected, max_abs=0.1)
        assert (report.worst_index, report.worst_actual, report.worst_expected) == ((1, 0, 3, 4), -0.5, 0.0)
        assert all(type(i) is int for i in report.worst_index)


def test_one_wrong_element_among_a_million_is_seen():
    expected = np.ones((1000, 1000), np.float32)
    actual = expected.copy()
    actual[123, 456] = 1.01
    report = compare(actual, expected, max_abs=1e-3, rel_frobenius=1.0)
    assert not report and report.worst_index == (123, 456)


def test_expected_zero():
    zero, some = np.zeros(3, np.float32), np.array([0.0, 1e-30, 0.0], np.float32)
    report = compare(zero, -zero, **dict.fromkeys(BOUNDS, 0.0))
    assert report and [getattr(report, metric) for metric in METRICS] == [0.0] * 4
    report = compare(some, zero, max_abs=1e-20)
    assert report and report.rel_frobenius_error == report.max_scaled_error == math.inf
    assert not compare(some, zero, rel_frobenius=1e300)
    assert not compare(some, zero, max_scaled=1e300)
    assert not compare(some, zero, max_ulp=1e3)


def test_ulp_error_is_in_units_of_the_row_maximum():
    # The same absolute error: harmless in the row of 1024, ruinous in the row of 2**-10.
    expected = np.array([[1024.0, 0.0], [2.0**-10, 0.0]])
    actual = expected.astype(np.float32)
    actual[:, 1] = 2.0**-13
    report = compare(actual, expected, max_ulp=1e9)
    assert report.max_ulp_error == 2.0**-13 / 2.0**-33
    assert report.ulp_index == (1, 1) and report.ulp_dtype == "float32"
    assert compare(actual[:1], expected[:1], max_ulp=1.0).max_ulp_error == 1.0
    # The largest absolute error may stand in a row where it is nothing.
    actual[0, 1] = 2.0**-12
    report = compare(actual, expected, max_ulp=1e9)
    assert report.worst_index == (0, 1) and report.ulp_index == (1, 1)


def test_the_row_maximum_leaves_infinities_out_and_takes_magnitudes():
    report = compare(np.array([-np.inf, -4.0, 0.5], np.float32), np.array([-np.inf, -4.0, 0.0]), max_ulp=1e9)
    assert report.max_ulp_error == 0.5 / 2**-21


@pytest.mark.parametrize(
    ("dtype", "bits"), [(np.float16, 10), (ml_dtypes.bfloat16, 7), (np.float32, 23), (np.float64, 52)]
)
def test_the_ulp_is_that_of_the_dtype_of_actual(dtype, bits):
    expected = np.array([1.0, 1.0])
    actual = np.array([1.0, 1.0 + 2.0**-bits]).astype(dtype)
    report = compare(actual, expected, max_ulp=1.0)
    assert report and report.max_ulp_error == 1.0 and report.ulp_dtype == np.dtype(dtype).name


def test_bfloat16_against_float64():
    rng = np.random.default_rng(1)
    expected = rng.standard_normal((64, 32))
    actual = expected.astype(ml_dtypes.bfloat16)
    report = compare(actual, expected, rel_frobenius=2.0**-8, max_ulp=0.5)
    assert report and report.rel_frobenius_error > 2.0**-11
    assert report.worst_actual == float(actual[report.worst_index])
    assert not compare(actual, expected, rel_frobenius=1e-4)
    assert compare(actual, actual, max_abs=0.0)


def test_differences_are_taken_in_float64():
    # In float16 or float32 each of these differences is 0 or inf.
    assert compare(np.array([1.0], np.float32), np.array([1.0 + 1e-12]), max_abs=1.0).max_abs_error > 0
    half = np.array([60000.0], np.float16)
    assert compare(half, -half, max_abs=1.2e5).max_abs_error == 2 * float(half[0])


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_squares_neither_overflow_nor_underflow(scale):
    expected = np.array([1.0, -1.0, 1.0, 1.0]) * scale
    actual = expected * np.array([1.0, 1.0, 1.5, 1.0])
    report = compare(actual, expected, max_scaled=1.0)
    assert report.rel_frobenius_error == pytest.approx(0.25, rel=1e-12)
    assert report.max_scaled_error == pytest.approx(0.5, rel=1e-12)


def test_a_difference_beyond_the_float64_range_fails():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = compare(np.array([1.7e308, 0.0]), np.array([-1.7e308, 0.0]), **dict.fromkeys(BOUNDS, 1.7e308))
    assert not report and [getattr(report, metric) for metric in METRICS] == [math.inf] * 4


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_quotient_that_underflows_is_not_identity(bound):
    assert not compare(np.array([1e308, 5e-324]), np.array([1e308, 0.0]), **{bound: 0.0})


def test_byte_order_does_not_matter():
    array = np.array([1.0, 2.5], np.float32)
    assert compare(array.astype(">f4"), array, max_abs=0.0)
    assert not compare(array.astype(">f4"), array + 1, max_abs=0.5)


def test_input_is_left_alone():
    for dtype in (np.float32, np.float64, np.int64, np.uint64):
        actual, expected = np.array([[1, 2], [3, 4]], dtype), np.array([[1, 2], [3, 5]], dtype)
        if np.dtype(dtype).kind == "f":
            actual[0, 0] = expected[0, 0] = -np.inf
        before = actual.copy(), expected.copy()
        actual.flags.writeable = expected.flags.writeable = False
        compare(actual, expected, max_abs=2.0)
        assert np.array_equal(actual, before[0]) and np.array_equal(expected, before[1])


# Integers and bools


INTEGERS = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, bool]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("other", INTEGERS)
def test_integers_are_exact_without_a_bound_and_with_one(dtype, other):
    actual, expected = np.array([[0, 1], [1, 0]], dtype), np.array([[0, 1], [1, 0]], other)
    assert compare(actual, expected)
    expected[1, 0] = 0
    report = compare(actual, expected, max_abs=100.0)
    assert not report and report.reason == "1 of 4 elements differ"
    assert (report.worst_index, report.worst_actual, report.worst_expected, report.max_abs_error) == ((1, 0), 1, 0, 1)
    assert report.num_mismatched == 1 and report.rel_frobenius_error is None
    assert report.max_abs is None and "<=" not in str(report)


@pytest.mark.parametrize(
    ("got", "dtype", "want", "other"),
    [
        (2**53 + 1, np.int64, 2**53, np.int64),
        (2**53, np.uint64, 2**53 + 1, np.uint64),
        (2**63 - 1, np.int64, -(2**63), np.int64),
        (2**64 - 1, np.uint64, 0, np.uint64),
        (2**63 - 1, np.int64, 2**63, np.uint64),
        (2**64 - 1, np.uint64, -(2**63), np.int64),
        (2**64 - 1, np.uint64, -1, np.int8),
        (255, np.uint8, -1, np.int8),
    ],
)
def test_integers_beyond_2_to_the_53(got, dtype, want, other):
    report = compare(np.array([5, got], dtype), np.array([5, want], other))
    assert not report and report.max_abs_error == abs(got - want)
    assert (report.worst_index, report.worst_actual, report.worst_expected) == ((1,), got, want)
    assert json.loads(json.dumps(report.as_dict()))["max_abs_error"] == abs(got - want)


def test_the_worst_integer_is_the_worst_one():
    expected = np.full(4, 2**60, np.int64)
    report = compare(expected + np.array([0, 1, -3, 2]), expected)
    assert (report.worst_index, report.max_abs_error, report.num_mismatched) == ((2,), 3, 3)


# Report


REPORTS = {
    "passed": compare(np.array([1.0, 2.5], np.float32), np.array([1.0, 2.0]), name="out", max_abs=0.5),
    "errors": compare(np.array([1.0, 2.5], np.float32), np.array([1.0, 2.0]), name="out", max_abs=0.25, max_ulp=3),
    "zero": compare(np.array([1.0, 2.5], np.float32), np.array([0.0, 0.0]), name="out", rel_frobenius=0.25),
    "nan": compare(np.array([np.nan]), np.array([1.0]), name="out", max_abs=1),
    "infinity": compare(np.array([np.inf]), np.array([-np.inf]), name="out", max_abs=1),
    "shape": compare(np.ones(2), np.ones((2, 1)), name="out", max_abs=1),
    "empty": compare(np.ones(0), np.ones(0), name="out", max_abs=1),
    "integers": compare(np.array([3, 4]), np.array([3, 6]), name="out"),
    "line break": compare(np.array([3, 4]), np.array([3, 4]), name="out\nof two\r\nlines"),
    "nameless": compare(np.array([3, 4]), np.array([3, 4])),
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_a_report_prints_one_line(report):
    assert len(str(report).splitlines()) == 1
    assert str(report).startswith("ok  " if report.passed else "FAIL ")
    assert bool(report) is report.passed is (report.reason == "")
    if report.name:
        assert " out" in str(report)


def test_the_line_says_what_happened():
    assert str(REPORTS["passed"]) == (
        "ok  out: 2 elements, max abs 0.5 <= 0.5 at (1,), rel fro 0.224, "
        "max scaled 0.316, max ulp 2.1e+06 float32 at (1,)"
    )
    assert str(REPORTS["errors"]).startswith(
        "FAIL out: max abs and max ulp over the bound; worst at (1,): got 2.5, expected 2.0; "
        "2 elements, max abs 0.5 > 0.25"
    )
    assert "worst at (0,): got nan, expected 1.0" in str(REPORTS["nan"])
    assert str(REPORTS["integers"]) == (
        "FAIL out: 1 of 2 elements differ; worst at (1,): got 4, expected 6; 2 elements, max abs 2 at (1,)"
    )
    assert str(REPORTS["shape"]) == "FAIL out: shape (2,), expected (2, 1)"


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_check_raises_the_line_or_returns_the_report(report):
    if report.passed:
        assert report.check() is report
    else:
        with pytest.raises(AssertionError) as raised:
            report.check()
        assert str(raised.value) == str(report)


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_a_report_as_strict_json(report):
    fields = report.as_dict()
    assert list(fields) == [field.name for field in dataclasses.fields(Report)]
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields


def test_non_finite_numbers_become_strings():
    assert REPORTS["nan"].as_dict()["worst_actual"] == "nan"
    assert REPORTS["infinity"].as_dict()["worst_expected"] == "-inf"
    assert REPORTS["zero"].as_dict()["rel_frobenius_error"] == "inf"


def test_bounds_given_as_numpy_scalars_are_kept_as_floats():
    report = compare(np.ones(2), np.ones(2), max_abs=np.float32(0.5), max_ulp=1)
    json.dumps(report.as_dict())
    assert report.max_abs == 0.5 and type(report.max_abs) is float and report.rel_frobenius is None


def test_a_report_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORTS["nan"].passed = True


# ulp


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_is_the_spacing_of_the_dtype(dtype):
    info = ml_dtypes.finfo(dtype)
    tiny, normal = float(info.smallest_subnormal), float(info.smallest_normal)
    samples = np.array([0.0, tiny, normal / 2, normal, 0.999, 1.0, 1.5, 2.0, 3.0, 1000.0, float(info.max) / 2])
    representable = samples.astype(dtype)
    above = np.nextafter(representable, np.array(np.inf, dtype)).astype(np.float64)
    spacing = above - representable.astype(np.float64)
    assert np.array_equal(ulp(representable, dtype), spacing)
    assert np.array_equal(ulp(-representable, dtype), spacing)


def test_ulp_at_the_edges():
    assert ulp(np.inf, np.float32) == ulp(-np.inf, np.float32) == np.inf
    assert np.isnan(ulp(np.nan, np.float32))
    assert ulp(2.0**200, np.float32) == 2.0**177
    assert ulp(1.0, np.float32).shape == () and ulp(np.ones((2, 3)), "float16").shape == (2, 3)
    with pytest.raises(TypeError, match="int32"):
        ulp(1.0, np.int32)


# Properties


FINITE = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=5),
    elements=st.floats(-(2.0**60), 2.0**60, width=32),
)


@settings(deadline=None)
@given(FINITE)
def test_an_array_equals_itself(array):
    assert compare(array, array, **dict.fromkeys(BOUNDS, 0.0))
    assert compare(array, array.astype(np.float64), **dict.fromkeys(BOUNDS, 0.0))


@settings(deadline=None)
@given(FINITE, st.data())
def test_one_element_off_by_more_than_the_bound_fails(array, data):
    index = tuple(data.draw(st.integers(0, side - 1)) for side in array.shape)
    # Integers below 2**50 and a power of two, no less than 1: the perturbation is exact.
    expected = np.asarray(np.trunc(array.astype(np.float64) / 2.0**11))
    bound = 2.0 ** data.draw(st.integers(-1, 40))
    actual = expected.copy()
    actual[index] += data.draw(st.sampled_from([-1.0, 1.0])) * bound * 2
    report = compare(actual, expected, max_abs=bound)
    assert not report and report.worst_index == index and report.max_abs_error == 2 * bound
    assert compare(actual, expected, max_abs=2 * bound)


@settings(deadline=None)
@given(FINITE, FINITE)
def test_metrics_agree_with_their_definitions(expected, other):
    actual = np.asarray(expected + np.resize(other, expected.shape), np.float32)
    report = compare(actual, expected, **HUGE)
    a, e = actual.astype(np.float64), expected.astype(np.float64)
    d = np.abs(a - e)
    assert report.max_abs_error == d.max()
    if d.max() and np.abs(e).max():
        assert report.rel_frobenius_error == pytest.approx(float(np.sqrt((d * d).sum() / (e * e).sum())), rel=1e-9)
        assert report.max_scaled_error == pytest.approx(float(d.max() / np.sqrt((e * e).mean())), rel=1e-9)
        row_ulp = np.spacing(np.abs(np.atleast_1d(expected)).max(axis=-1, keepdims=True)).astype(np.float64)
        assert report.max_ulp_error == float((np.atleast_1d(d) / row_ulp).max())
