"""Comparison of a kernel's array with a reference, in an order that nothing slips through.

    1. shape     equal, never broadcast; something must be there to compare
    2. NaN       in either array fails, also where both hold one
    3. infinity  the same places with the same sign (an empty row has lse = -inf: this is legal)
    4. errors    over the finite elements, in float64, each against its bound

With a = actual, e = expected, taken over the finite elements:

    max_abs         max |a - e|                              in the unit of the array
    rel_frobenius   ||a - e||_F / ||e||_F                    1
    max_scaled      max |a - e| / rms(e)                     1; rms(e) = sqrt(mean(e**2)) is the array's own scale
    max_ulp         max |a - e| / ulp(max |e| of the row)    ulp of actual's dtype; a row is the last axis

A ratio over zero is 0 when the arrays are identical and inf when they are not. No elementwise relative error: near zero
denominators it says nothing. Integers and bools are compared exactly.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__all__ = ["Report", "compare", "ulp"]

# Mantissa bits stored, exponent of the smallest normal number.
_FLOATS = {np.float16: (10, -14), ml_dtypes.bfloat16: (7, -126), np.float32: (23, -126), np.float64: (52, -1022)}
_LABELS = {"max_abs": "max abs", "rel_frobenius": "rel fro", "max_scaled": "max scaled", "max_ulp": "max ulp"}


@dataclasses.dataclass(frozen=True)
class Report:
    """Outcome of one comparison; true when it passed, one line when printed.

    Attributes
    ----------
    name : str
        What was compared.
    passed : bool
        Whether every check held.
    reason : str
        Why not; empty when passed.
    num_elements, num_finite, num_mismatched : int
        Elements compared; those that are finite in both arrays, over which the errors run; those with NaN or another
        infinity (integers: those that differ). The first two are 0 when the shapes differ.
    max_abs_error, rel_frobenius_error, max_scaled_error, max_ulp_error : float or None
        The metrics of this module; None where a check before them failed. Integers have the first only, as exact int.
    worst_index : tuple of int or None
        Coordinates of the largest absolute error, or of the first element with NaN or another infinity; None where
        nothing differs.
    worst_actual, worst_expected : float, int, bool or None
        The two values there.
    ulp_index : tuple of int or None
        Coordinates of the largest error in ulp, often in another row than `worst_index`; None where nothing differs.
    ulp_dtype : str or None
        Name of the dtype that the ulp belongs to.
    max_abs, rel_frobenius, max_scaled, max_ulp : float or None
        The bounds that applied: none for integers.
    """

    name: str
    passed: bool
    reason: str = ""
    num_elements: int = 0
    num_finite: int = 0
    num_mismatched: int = 0
    max_abs_error: float | None = None
    rel_frobenius_error: float | None = None
    max_scaled_error: float | None = None
    max_ulp_error: float | None = None
    worst_index: tuple[int, ...] | None = None
    worst_actual: float | None = None
    worst_expected: float | None = None
    ulp_index: tuple[int, ...] | None = None
    ulp_dtype: str | None = None
    max_abs: float | None = None
    rel_frobenius: float | None = None
    max_scaled: float | None = None
    max_ulp: float | None = None

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        head = "" if self.passed else self.reason
        if not self.passed and self.worst_index is not None:
            head += f"; worst at {self.worst_index}: got {self.worst_actual!r}, expected {self.worst_expected!r}"
        parts = [f"{self.num_elements} elements"]
        if self.max_abs_error is not None and self.num_finite < self.num_elements:
            parts[0] += f" ({self.num_elements - self.num_finite} infinite in both)"
        for metric, label in _LABELS.items():
            error, bound = getattr(self, f"{metric}_error"), getattr(self, metric)
            if error is None:
                continue
            text = f"{label} {error:.3g}" if isinstance(error, float) else f"{label} {error}"
            if metric == "max_ulp":
                text += f" {self.ulp_dtype}"
            if bound is not None:
                text += f" {'<=' if error <= bound else '>'} {bound:.3g}"
            index = {"max_abs": self.worst_index, "max_ulp": self.ulp_index}.get(metric)
            parts.append(text if index is None else f"{text} at {index}")
        texts = [head, ", ".join(parts) if self.num_elements else ""]
        # A name with a line break must not break the line.
        name = " ".join(self.name.split())
        return f"{'ok ' if self.passed else 'FAIL'} {name + ': ' if name else ''}{'; '.join(filter(None, texts))}"

    def check(self) -> Report:
        """Return this report when it passed.

        Raises
        ------
        AssertionError
            With the one-line text, when the comparison failed.
        """
        # Not an assert statement: python -O would drop it.
        if not self.passed:
            raise AssertionError(str(self))
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as strict JSON values: tuples as lists, non-finite floats as "inf", "-inf", "nan"."""

        def plain(value: Any) -> Any:
            if isinstance(value, tuple):
                return list(value)
            return str(value) if isinstance(value, float) and not math.isfinite(value) else value

        return {key: plain(value) for key, value in vars(self).items()}


def ulp(x: npt.ArrayLike, dtype: npt.DTypeLike) -> npt.NDArray[np.float64]:
    """Spacing of the numbers of a dtype at the magnitude of x.

    Parameters
    ----------
    x : array_like, any shape
        Values, read as float64; they need not be representable in `dtype`.
    dtype : dtype
        float16, bfloat16 (ml_dtypes), float32 or float64.

    Returns
    -------
    float64 array, shape of x
        2**(floor(log2 |x|) - mantissa bits), never below the smallest subnormal, which is also the spacing at 0. Above
        the largest finite number the spacing goes on growing. inf at +-inf, NaN at NaN.

    Raises
    ------
    TypeError
        If `dtype` is none of the four.
    """
    if np.dtype(dtype).type not in _FLOATS:
        raise TypeError(f"dtype: got {np.dtype(dtype)}, must be float16, bfloat16, float32 or float64")
    mantissa_bits, min_exponent = _FLOATS[np.dtype(dtype).type]
    magnitude = np.abs(np.asarray(x, dtype=np.float64))
    # frexp calls the exponent of 0 zero: here it belongs to the subnormals.
    exponent = np.where(magnitude > 0.0, np.frexp(magnitude)[1] - 1, min_exponent)
    spacing = np.ldexp(1.0, np.maximum(exponent, min_exponent) - mantissa_bits)
    return np.asarray(np.where(np.isfinite(magnitude), spacing, magnitude), dtype=np.float64)


def compare(
    actual: npt.NDArray[Any],
    expected: npt.NDArray[Any],
    *,
    name: str = "",
    max_abs: float | None = None,
    rel_frobenius: float | None = None,
    max_scaled: float | None = None,
    max_ulp: float | None = None,
) -> Report:
    """Compare a result with its reference; every bound given must hold, and equality with a bound passes.

    Parameters
    ----------
    actual : array, any shape
        The result: float16, bfloat16, float32, float64, any integer or bool. Its dtype is the unit of `max_ulp`.
    expected : array, shape of actual
        The reference. Its float dtype may differ from that of `actual`; so may its integer dtype.
    name : str
        What is compared; it leads the printed line.
    max_abs, rel_frobenius, max_scaled, max_ulp : float, optional
        Bounds on the metrics of this module, finite and >= 0. Floats need at least one. Integers and bools must be
        equal whatever the bounds.

    Returns
    -------
    Report
        A failed comparison is a report too; `Report.check` turns it into an exception.

    Raises
    ------
    ValueError
        If floats come without a bound (such a comparison could not fail), or a bound is negative, inf or NaN.
    TypeError
        If a dtype is none of the above, or one array is float and the other is not (bfloat16 bits kept as uint16 must
        be viewed as ml_dtypes.bfloat16 first).

    Notes
    -----
    Neither array is changed. Floats take two float64 temporaries and a few bool ones, integers three of 64 bits; int64
    against uint64 goes through Python integers and is slow.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    given = {"max_abs": max_abs, "rel_frobenius": rel_frobenius, "max_scaled": max_scaled, "max_ulp": max_ulp}
    bounds: dict[str, Any] = {metric: None if bound is None else float(bound) for metric, bound in given.items()}
    for metric, bound in bounds.items():
        if bound is not None and not 0.0 <= bound < math.inf:
            raise ValueError(f"{metric}: got {bound}, must be finite and >= 0")
    is_float = _is_float(actual, "actual")
    if is_float != _is_float(expected, "expected"):
        raise TypeError(f"actual is {actual.dtype}, expected is {expected.dtype}: both must be float, or neither")
    if is_float and all(bound is None for bound in bounds.values()):
        raise ValueError(f"no bound: give at least one of {', '.join(given)}")

    report = dataclasses.replace(Report(name, passed=False), **(bounds if is_float else {}))
    if actual.shape != expected.shape:
        return dataclasses.replace(report, reason=f"shape {actual.shape}, expected {expected.shape}")
    if actual.size == 0:
        return dataclasses.replace(report, reason=f"nothing was compared: shape {actual.shape}")
    report = dataclasses.replace(report, num_elements=actual.size)
    # Signalling NaNs, and differences beyond the float64 range: both end in a failed report, not in a warning.
    with np.errstate(all="ignore"):
        return (_compare_floats if is_float else _compare_integers)(actual, expected, report)


def _compare_floats(actual: npt.NDArray[Any], expected: npt.NDArray[Any], report: Report) -> Report:
    a, e = actual.astype(np.float64, order="C"), expected.astype(np.float64, order="C")
    finite = np.isfinite(a)
    finite &= np.isfinite(e)
    num_finite = int(np.count_nonzero(finite))
    report = dataclasses.replace(report, num_finite=num_finite)
    if num_finite < a.size:
        nan_a, nan_e = np.isnan(a), np.isnan(e)
        nan = nan_a | nan_e
        if nan.any():
            reason = f"NaN: {np.count_nonzero(nan_a)} in actual, {np.count_nonzero(nan_e)} in expected"
            return _failed_pattern(actual, expected, report, nan, reason)
        infinity = ~finite & (a != e)
        if infinity.any():
            reason = f"infinities differ at {np.count_nonzero(infinity)} elements"
            return _failed_pattern(actual, expected, report, infinity, reason)
        a[~finite] = e[~finite] = 0.0

    a -= e
    error, magnitude = np.abs(a, out=a), np.abs(e, out=e)
    max_error = float(error.max())

    if max_error:
        report = _at(actual, expected, report, int(error.argmax()))

    rows = error.reshape(-1, error.shape[-1] if error.ndim else 1)
    row_ulps = rows.max(axis=1) / ulp(magnitude.reshape(rows.shape).max(axis=1), actual.dtype)
    row = int(row_ulps.argmax())
    ulp_index = _unravel(row * rows.shape[1] + int(rows[row].argmax()), actual.shape)

    error_norm, error_exponent = _norm(error)
    norm, exponent = _norm(magnitude)
    rms = float(np.ldexp(norm / math.sqrt(max(num_finite, 1)), exponent))
    errors: dict[str, Any] = {
        "max_abs": max_error,
        "rel_frobenius": float(np.ldexp(error_norm / norm, error_exponent - exponent)) if norm else math.inf,
        "max_scaled": max_error / rms if rms else math.inf,
        "max_ulp": float(row_ulps[row]),
    }
    # 0 means identical: a quotient that underflows must not read so.
    errors = {metric: max(value, math.ulp(0.0)) if max_error else 0.0 for metric, value in errors.items()}
    bounds = {metric: getattr(report, metric) for metric in errors}
    # "not <=", so that a NaN could never pass.
    exceeded = [metric for metric in errors if bounds[metric] is not None and not errors[metric] <= bounds[metric]]
    return dataclasses.replace(
        report,
        passed=not exceeded,
        reason=f"{' and '.join(_LABELS[metric] for metric in exceeded)} over the bound" if exceeded else "",
        ulp_index=ulp_index if max_error else None,
        ulp_dtype=actual.dtype.name,
        **{f"{metric}_error": value for metric, value in errors.items()},
    )


def _compare_integers(actual: npt.NDArray[Any], expected: npt.NDArray[Any], report: Report) -> Report:
    error: npt.NDArray[Any]
    common = np.result_type(actual, expected)
    if common.kind == "f":
        # int64 with uint64: no integer dtype holds both, and numpy's answer, float64, is not exact.
        error = np.abs(actual.astype(object) - expected.astype(object))
    else:
        wide = np.int64 if common.kind == "i" else np.uint64
        a, e = actual.astype(wide, order="C"), expected.astype(wide, order="C")
        error = np.maximum(a, e).view(np.uint64)
        # Modulo 2**64, which is exact: larger minus smaller lies in 0 .. 2**64 - 1.
        error -= np.minimum(a, e, out=a).view(np.uint64)
    error = np.asarray(error)
    worst = int(error.argmax())
    num_mismatched = int(np.count_nonzero(error))
    return dataclasses.replace(
        _at(actual, expected, report, worst) if num_mismatched else report,
        passed=num_mismatched == 0,
        reason=f"{num_mismatched} of {actual.size} elements differ" if num_mismatched else "",
        num_finite=actual.size,
        num_mismatched=num_mismatched,
        max_abs_error=int(error.flat[worst]),
    )


def _is_float(array: npt.NDArray[Any], argument: str) -> bool:
    # dtype.type, not dtype: a big-endian float32 is a float32 too.
    if array.dtype.type in _FLOATS:
        return True
    if array.dtype.kind in "biu":
        return False
    raise TypeError(f"{argument}: got {array.dtype}, must be float16, bfloat16, float32, float64, integer or bool")


def _norm(x: npt.NDArray[np.float64]) -> tuple[float, int]:
    """Return f, k with ||x||_F = f * 2**k, scaling x >= 0 in place: squares neither overflow nor underflow."""
    exponent = int(np.frexp(x.max())[1])
    flat = np.ldexp(x, -exponent, out=x).reshape(-1)
    return math.sqrt(float(np.dot(flat, flat))), exponent


def _unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape)) if shape else ()


def _at(actual: npt.NDArray[Any], expected: npt.NDArray[Any], report: Report, flat: int) -> Report:
    index = _unravel(flat, actual.shape)
    got, want = actual[index].item(), expected[index].item()
    return dataclasses.replace(report, worst_index=index, worst_actual=got, worst_expected=want)


def _failed_pattern(
    actual: npt.NDArray[Any], expected: npt.NDArray[Any], report: Report, bad: npt.NDArray[np.bool_], reason: str
) -> Report:
    report = _at(actual, expected, report, int(bad.argmax()))
    return dataclasses.replace(report, reason=reason, num_mismatched=int(np.count_nonzero(bad)))
