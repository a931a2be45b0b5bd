"""target_probs: kernel and mirror against a float64 oracle that sorts: what is kept, and its probabilities.

Kernels run in the simulator, or on a GPU where there is one. GPU-only tests are in test_target_probs_gpu.py.
"""

from __future__ import annotations

import ast
import importlib
import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from cases import BFLOAT16, as_float, cast
from numba import cuda
from test_build_tree import function_source, phases
from test_docs import DOCS, assert_errors, bare_signature, run_until, table_under
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

from ddtree_numba.accept.target_probs import target_probs
from ddtree_numba.device import arrays
from ddtree_numba.device.arrays import View
from ddtree_numba.device.runtime import SIMULATOR

module = importlib.import_module("ddtree_numba.accept.target_probs")

EPS = 2.0**-23
UNDERFLOW = 2.0**-125  # what exp and products may flush to 0
INF, NAN = math.inf, math.nan
PAGE = DOCS / "target_probs.md"

only_simulated = pytest.mark.skipif(not SIMULATOR, reason="module constants can be changed in the simulator alone")
# In the simulator NumPy says so when finite logits lie so far apart that their difference becomes -inf.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


# The oracle


def border_of(x: np.ndarray, p: np.ndarray, top_k: int, top_p: float) -> float:
    """The least logit that is kept; x and p are the row's logits and probabilities before the cut."""
    order = np.argsort(-x, kind="stable")
    x, p = x[order], p[order]
    if 0 < top_k < x.size:
        keep = x >= x[top_k - 1]
        x, p = x[keep], p[keep]
    if top_p < 1:
        at = np.searchsorted(np.cumsum(p) / p.sum(), top_p)
        return float(x[min(at, x.size - 1)])
    return float(x[-1])


def is_refused(x: np.ndarray, temperature: float, top_p: float) -> bool:
    finite = not np.isnan(x).any() and np.isfinite(x.max())
    return not (finite and 0 <= temperature < INF and top_p > 0)


def check_row(actual: np.ndarray, x: np.ndarray, temperature: float, top_k: int, top_p: float) -> None:
    """One row of results; x in float64."""
    assert actual.dtype == np.float32
    assert ((actual >= 0) & (actual <= 1)).all()  # and no NaN
    if is_refused(x, temperature, top_p):
        assert (actual == 0).all()
        return
    if temperature < 2.0**-126:
        assert actual.argmax() == x.argmax()
        assert actual.sum() == actual.max() == 1
        return
    with np.errstate(over="ignore"):
        z = (x - x.max()) / temperature
    p = np.exp(z) / np.exp(z).sum()
    # What is kept: all logits from some border on.
    border, expected = float(x[actual > 0].min()), border_of(x, p, top_k, top_p)
    if 0 < top_k < x.size:
        of_top_k = x >= np.sort(x)[-top_k]
        assert (actual[~of_top_k] == 0).all()
        p = np.where(of_top_k, p, 0)
        p /= p.sum()
    far = np.abs(np.where(np.isfinite(z), z, 0))
    if border != expected:
        # Only by rounding: where the mass is as good as top_p, or what is between has no weight.
        mass_error = EPS * (4 + 3 * (p * far).sum())
        assert p[x >= border].sum() >= min(top_p, 1) - mass_error
        assert p[x > border].sum() <= min(top_p, 1) + mass_error
    kept = x >= border
    exact = np.where(kept, p, 0) / p[kept].sum()
    mean = (exact * far).sum()
    bound = EPS * exact * (4 + 1.5 * far + 1.5 * mean) + UNDERFLOW
    assert (np.abs(actual - exact) <= bound).all(), f"off by {(np.abs(actual - exact) / bound).max()} of the bound"
    assert abs(float(actual.sum(dtype=np.float64)) - 1) <= EPS * (4 + 3 * mean)


def check(probs: Any, logits: np.ndarray, temperature: Any, top_k: Any = None, top_p: Any = None) -> None:
    probs = np.asarray(probs)
    assert probs.shape == logits.shape
    batch = logits.shape[0]
    temperatures = np.broadcast_to(np.float32(temperature), batch)
    top_ks = np.broadcast_to(0 if top_k is None else top_k, batch)
    top_ps = np.broadcast_to(np.float32(1 if top_p is None else top_p), batch)
    x = as_float(logits).astype(np.float64)
    for b, q in np.ndindex(logits.shape[:2]):
        check_row(probs[b, q], x[b, q], float(temperatures[b]), int(top_ks[b]), float(top_ps[b]))


def mirrored(*args: Any, **options: Any) -> np.ndarray:
    """The operator on host arrays, the mirror in place of the kernel."""

    def run(kernel: Any, blocks: Any, threads: int, args: tuple[Any, ...], **sizes: Any) -> None:
        module.mirror(*(a.as_numpy() if isinstance(a, View) else a for a in args))

    with mock.patch.multiple(module, launch=run, require_backend=lambda: None):
        return np.asarray(target_probs(*args, **options))


def logits_of(*shape: int, dtype: str = "float32", std: float = 2.0, seed: int = 0) -> np.ndarray:
    return cast(np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(std), dtype)


def assert_same_bits(actual: Any, expected: np.ndarray) -> None:
    actual = np.asarray(actual)
    assert (actual.dtype, actual.shape) == (np.float32, expected.shape)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


# Cases

TIES = np.repeat(np.array([3.0, 2.0, 2.0, 2.0, 1.0, 1.0, -0.0, 0.0], np.float32), 3).reshape(1, 1, 24)[..., ::-1]
SPREAD = np.array([[[3e38, -3e38, 2.9e38, -INF, 0.0, 3e38, 1.0]]], np.float32)


def special_rows() -> np.ndarray:
    x = logits_of(2, 4, 26)
    x[0, 0, 25] = NAN
    x[0, 1, 3:] = -INF
    x[0, 2] = -INF
    x[0, 3, 7] = INF
    x[1, 0, :] = 2.5
    x[1, 1, 11] = -NAN
    x[1, 2, ::2] = -INF
    return x


# Name, logits, temperature, top_k, top_p.
CASES: list[tuple[str, np.ndarray, float, Any, Any]] = [
    ("off", logits_of(1, 2, 97), 0.7, None, None),
    ("off_float16", logits_of(1, 1, 44, dtype="float16"), 1.5, None, None),
    ("off_beyond_unrolled", logits_of(1, 1, 300), 1.0, 0, 1.0),
    ("one_token", logits_of(1, 2, 1), 0.3, 1, 0.1),
    ("top_k", logits_of(1, 1, 64), 0.7, 5, None),
    ("top_k_1", logits_of(1, 1, 33, dtype="bfloat16"), 2.0, 1, None),
    ("top_k_V", logits_of(1, 1, 20), 0.7, 20, None),
    ("top_k_above_V", logits_of(1, 1, 20), 0.7, 21, None),
    ("top_k_ties", TIES, 1.0, 5, None),
    ("top_p", logits_of(1, 1, 65, std=4.0), 0.8, None, 0.9),
    ("top_p_tiny", logits_of(1, 1, 31), 0.8, None, 1e-30),
    ("top_p_ties", TIES, 1.0, None, 0.4),
    ("both", logits_of(1, 1, 80, dtype="bfloat16"), 0.6, 12, 0.8),
    ("both_float16", logits_of(1, 1, 47, dtype="float16"), 0.6, 9, 0.95),
    ("uint16", logits_of(1, 1, 36, dtype="uint16"), 1.0, 7, 0.7),
    ("hot", logits_of(1, 1, 24), 1e38, 6, None),
    ("cold", logits_of(1, 1, 24), 1e-30, 6, 0.9),
    ("greedy", logits_of(1, 2, 71, dtype="bfloat16"), 0.0, 3, 0.5),
    ("greedy_ties", TIES, 0.0, None, None),
    ("subnormal_temperature", TIES, 1e-40, None, None),
    ("far_apart", SPREAD, 1.0, None, None),
    ("far_apart_top", SPREAD, 1.0, 4, 0.9),
    ("special_rows", special_rows(), 0.9, 4, None),
    ("special_rows_off", special_rows(), 0.9, None, None),
    # Beyond the keys that there is room for, or too few of them: the row is searched.
    ("all_equal_top_k", np.full((1, 1, 40), 1.0, BFLOAT16), 1.0, 3, 0.5),
    ("flat_top_p", logits_of(1, 1, 60, dtype="bfloat16", std=0.2), 1.0, None, 0.9),
    ("large_top_k", logits_of(1, 1, 72, dtype="float16"), 1.0, 40, None),
    ("rising", cast(np.arange(96, dtype=np.float32).reshape(1, 1, 96) / 8, "bfloat16"), 1.0, 30, 0.5),
]
EACH_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
SEARCHED = ("all_equal_top_k", "flat_top_p", "large_top_k", "rising")


@EACH_CASE
def test_against_the_oracle(case):
    _, logits, *controls = case
    expected = mirrored(logits, *controls)
    check(expected, logits, *controls)
    actual = target_probs(logits, *controls)
    check(actual, logits, *controls)
    if SIMULATOR:  # exp is the same
        assert_same_bits(actual, expected)


@only_simulated
def test_the_cases_take_both_ways():
    ways = {}
    for name, logits, *controls in CASES:
        with mock.patch.object(module, "mirror_in_row", wraps=module.mirror_in_row) as search:
            mirrored(logits, *controls)
        ways[name] = search.called
    assert {name for name, searched in ways.items() if searched} == set(SEARCHED)


@pytest.mark.parametrize("seed", range(8))
def test_mirror_on_random_rows(seed):
    rng = np.random.default_rng(seed)
    for _ in range(25):
        shape = 2, 2, int(rng.integers(1, 300))
        logits = logits_of(*shape, std=float(rng.choice([0.01, 1.0, 5.0])), seed=int(rng.integers(1 << 30)))
        if rng.integers(2):
            logits = np.round(logits * 4) / 4
        if rng.integers(4) == 0:
            logits[rng.random(shape) < 0.7] = -INF
        logits = cast(logits, str(rng.choice(["float32", "float16", "bfloat16", "uint16"])))
        top_k = None if rng.integers(3) == 0 else int(rng.integers(1, shape[2] + 2))
        top_p = None if rng.integers(3) == 0 else float(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]))
        controls = float(rng.choice([0.0, 0.1, 0.7, 1.0, 3.0])), top_k, top_p
        probs = mirrored(logits, *controls)
        check(probs, logits, *controls)
        # Both ways give the same.
        with mock.patch.object(module, "ITEMS", 0):
            assert_same_bits(mirrored(logits, *controls), probs)
        with mock.patch.multiple(module, ITEMS=1 << 20, WANTED=1 << 20):
            assert_same_bits(mirrored(logits, *controls), probs)


@only_simulated
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ways_of_the_kernel_give_the_same(monkeypatch, dtype):
    logits = logits_of(1, 1, 52, dtype=dtype)
    expected = mirrored(logits, 0.9, 14, 0.9)
    for items in (module.THREADS, 128):
        monkeypatch.setattr(module, "ITEMS", items)
        with mock.patch.object(module, "mirror_in_row", wraps=module.mirror_in_row) as search:
            assert_same_bits(mirrored(logits, 0.9, 14, 0.9), expected)
        assert search.called == (items == module.THREADS)
        assert_same_bits(target_probs(logits, 0.9, 14, 0.9), expected)


def test_the_mass_needed_is_exact():
    rng = np.random.default_rng(0)
    for total in (1, 2**32 - 1, 2**32, 2**63, *map(int, rng.integers(1, 2**63, 200))):
        for top_p in np.float32([1e-40, 2.0**-33, 2.0**-32, 0.1, 0.5, 0.9, 1 - 2.0**-24, rng.random()]):
            share = int(float(top_p) * 2**32)
            exact = max(1, -(-share * total // 2**32))
            assert module.mirror_needed(float(top_p), total) == exact <= total
            if SIMULATOR:
                assert int(module.needed(top_p, np.uint64(total))) == exact


def test_top_p_is_exact_at_a_border():
    # Four equal weights: half of the mass is two of them, the tie keeps all four; of two and two, just two.
    logits = np.array([[[0.0, 1.0, 1.0, 0.0]]], np.float32)
    assert np.count_nonzero(mirrored(np.zeros((1, 1, 4), np.float32), 1.0, None, 0.5)) == 4
    half = np.float32(1 / (1 + math.exp(-1)))
    below, above = np.nextafter(half, np.float32(0)), np.nextafter(half, np.float32(1))
    counts = [np.count_nonzero(mirrored(logits, 1.0, None, float(p))) for p in (below - EPS, below, above, above + EPS)]
    assert counts[0] == 2
    assert counts[-1] == 4
    assert counts == sorted(counts)


def test_top_p_counts_only_what_top_k_keeps():
    logits = np.log(np.array([[[0.4, 0.3, 0.2, 0.1]]], np.float32))
    probs = mirrored(logits, 1.0, 2, 0.5)  # 0.4 of 0.7 is more than half
    assert probs.tolist() == [[[1.0, 0.0, 0.0, 0.0]]]
    assert np.count_nonzero(mirrored(logits, 1.0, None, 0.5)) == 2


def test_the_oracle_notices():
    logits = logits_of(1, 1, 40)
    right = mirrored(logits, 0.7, 8, 0.9)
    check(right, logits, 0.7, 8, 0.9)
    order = np.argsort(-logits[0, 0])
    last = order[np.count_nonzero(right) - 1]
    one_less, one_more, shifted = right.copy(), right.copy(), right.copy()
    one_less[0, 0, last] = 0
    one_less /= one_less.sum()
    one_more[0, 0, order[np.count_nonzero(right)]] = right[0, 0, last] / 2
    one_more /= one_more.sum()
    shifted[0, 0, order[:2]] += np.float32([3e-6, -3e-6])
    for wrong in (one_less, one_more, shifted, right * np.float32(1.00001), np.roll(right, 1)):
        with pytest.raises(AssertionError):
            check(wrong, logits, 0.7, 8, 0.9)
    for controls in ((0.71, 8, 0.9), (0.7, 3, 0.9), (0.7, 8, 0.5)):
        with pytest.raises(AssertionError):
            check(right, logits, *controls)


# Requests with controls of their own

TEMPERATURES = np.array([0.0, 0.7, 1.3, -1.0, NAN, INF, 0.7, 0.7], np.float32)
TOP_KS = np.array([2, 5, 0, 3, 3, 3, -7, 2**31 - 1], np.int32)
TOP_PS = np.array([0.5, 1.0, 0.6, 0.9, 0.9, 0.9, NAN, INF], np.float32)


def test_controls_of_requests():
    logits = logits_of(8, 1, 22)
    actual = target_probs(logits, TEMPERATURES, TOP_KS, TOP_PS)
    check(actual, logits, TEMPERATURES, TOP_KS, TOP_PS)
    assert (actual[3:7] == 0).all()
    assert (actual[[0, 1, 2, 7]].sum(axis=2) > 0.99).all()
    if SIMULATOR:
        assert_same_bits(actual, mirrored(logits, TEMPERATURES, TOP_KS, TOP_PS))
        assert_same_bits(actual[1:2], mirrored(logits[1:2], 0.7, 5))


def test_bad_top_p_refuses_the_request_alone():
    logits = logits_of(6, 2, 12)
    top_p = np.array([0.0, -0.0, -1.0, NAN, 2.0, 0.5], np.float32)
    for temperature in (0.0, 1.0):
        probs = mirrored(logits, temperature, None, top_p)
        assert (probs[:4] == 0).all()
        check(probs, logits, temperature, None, top_p)


def test_numbers_and_arrays_mean_the_same():
    logits = logits_of(2, 1, 30)
    expected = mirrored(logits, 0.75, 6, 0.875)
    full = np.full(2, 0.75, np.float32), np.full(2, 6, np.int32), np.full(2, 0.875, np.float32)
    for chosen in range(8):
        pairs = zip((0.75, 6, 0.875), full, strict=True)
        controls = [pair[chosen >> n & 1] for n, pair in enumerate(pairs)]
        assert_same_bits(mirrored(logits, *controls), expected)
    assert_same_bits(mirrored(logits, np.float64(0.75), np.int64(6), np.float16(0.875)), expected)
    strided = (np.repeat(x, 3)[::3] for x in full)
    assert_same_bits(mirrored(logits, *strided), expected)
    assert_same_bits(mirrored(logits, 1, top_k=-1, top_p=1), mirrored(logits, 1.0))
    assert_same_bits(mirrored(logits, 1, top_k=10**30), mirrored(logits, 1.0))
    assert_same_bits(mirrored(logits, -0.0), mirrored(logits, 0.0))
    assert_same_bits(mirrored(logits, 1e-50), mirrored(logits, 0.0))


def test_numbers_become_arrays_once():
    logits = logits_of(2, 1, 9)
    mirrored(logits, 0.123, 3, 0.456)
    with mock.patch.object(arrays, "view", wraps=arrays.view) as view:
        mirrored(logits, 0.123, 3, 0.456)
    assert [call.args[0] for call in view.call_args_list] == ["logits", "out"]
    # In C order as arrays are, for one request, too: one compiled kernel takes them all.
    for batch in (1, 2, 1024, 1025):
        x = arrays.view("logits", np.zeros((batch, 1, 1), np.float32))
        control = module._per_request("top_k", 3, module._checked_top_k, module._integers, x)
        assert control.shape == (batch,)
        assert control.in_c_order
        assert (control.as_numpy() == 3).all()


# Memory


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_strides(layout):
    for dtype in ("float32", "uint16"):
        logits = logits_of(2, 1, 28, dtype=dtype)
        expected = mirrored(logits, 0.7, 5)
        assert_same_bits(mirrored(layout(logits), 0.7, 5), expected)
    out = layout(np.full((2, 1, 28), NAN, np.float32))
    assert target_probs(layout(logits), 0.7, out=out) is out
    check(out, logits, 0.7)


@pytest.mark.parametrize("start", [1, 2, 3, 4])
def test_rows_that_begin_anywhere(start):
    logits = logits_of(1, 2, 40, dtype="float16")[..., start : start + 32]
    out = np.full((1, 2, 34), 7.0, np.float32)
    target_probs(logits, 0.7, out=out[..., 1:-1])
    check(out[..., 1:-1], logits, 0.7)
    assert (out[..., [0, -1]] == 7).all()


def test_words_are_read_where_they_can():
    for dtype in ("float32", "bfloat16"):
        x = arrays.view("logits", logits_of(2, 2, 24, dtype=dtype))
        words, logits, *_, lowest, _ = module.arguments(x, x, x, x, x)
        assert (words.dtype, logits.dtype) == (np.uint64, x.dtype)
        assert lowest.dtype == np.int32


def test_broadcast_logits_and_no_rows():
    logits = np.broadcast_to(logits_of(1, 1, 24), (2, 2, 24))
    check(target_probs(logits, 0.7), logits, 0.7)
    for shape in ((0, 3, 9), (2, 0, 9)):
        probs = target_probs(np.zeros(shape, np.float32), 0.7, 3)
        assert (probs.shape, probs.dtype) == (shape, np.float32)
    empty = np.zeros(0, np.float32)
    assert target_probs(np.zeros((0, 3, 9), np.float32), empty, empty.astype(np.int32), empty).shape == (0, 3, 9)


def test_inputs_are_not_changed():
    logits = read_only(logits_of(1, 1, 40, dtype="bfloat16"))
    before = logits.tobytes()
    target_probs(logits, 0.7)
    assert before == logits.tobytes()


def test_numba_arrays_give_numba_arrays():
    logits = logits_of(2, 1, 24, dtype="uint16")
    controls = [cuda.to_device(x) for x in (np.float32([0.7, 0.0]), np.int32([5, 5]), np.float32([0.9, 1.0]))]
    on_device = cuda.to_device(logits)
    probs = target_probs(on_device, *controls)
    assert type(probs) is type(on_device)
    check(probs.copy_to_host(), logits, *(x.copy_to_host() for x in controls))
    out = cuda.device_array((2, 1, 24), np.float32)
    assert target_probs(on_device, 0.7, out=out) is out
    check(out.copy_to_host(), logits, 0.7)


def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"\blogits\b is a PyTorch tensor on cpu"):
        target_probs(torch.zeros(1, 1, 4), 1.0)


# Wrong arguments: one exception that names the argument, before anything is written


def out_over(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def changes(a: dict[str, Any]) -> dict[str, Any]:
        first, second = overlapping(a[name].shape, a["out"].shape)
        return {name: first, "out": second}

    return changes


# Which argument the message must name, the exception, what is changed. B=2, Q=3, V=20.
ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    ("logits is None", "logits", TypeError, value("logits", None)),
    ("logits is a list", "logits", TypeError, change("logits", lambda x: x.tolist())),
    ("logits is float64", "logits", TypeError, change("logits", lambda x: x.astype(np.float64))),
    ("logits is float8", "logits", TypeError, change("logits", lambda x: x.astype(ml_dtypes.float8_e4m3fn))),
    ("logits is big-endian", "logits", TypeError, change("logits", big_endian)),
    ("logits is misaligned", "logits", ValueError, change("logits", misaligned)),
    ("logits has misaligned strides", "logits", ValueError, change("logits", half_aligned_strides)),
    ("logits has 2 axes", "logits", ValueError, change("logits", lambda x: x[0])),
    ("logits has no vocabulary", "logits", ValueError, change("logits", lambda x: x[..., :0])),
    (
        "logits has a vocabulary above 2**19",
        "logits",
        ValueError,
        value("logits", np.broadcast_to(np.float32(0), (1, 1, 2**19 + 1))),
    ),
    ("2**31 rows", "logits", ValueError, value("logits", np.broadcast_to(np.float32(0), (2, 2**30, 1)))),
    ("temperature is None", "temperature", TypeError, value("temperature", None)),
    ("temperature is a bool", "temperature", TypeError, value("temperature", True)),
    ("temperature is text", "temperature", TypeError, value("temperature", "0.7")),
    ("temperature is a list", "temperature", TypeError, value("temperature", [0.7, 0.7])),
    ("temperature is negative", "temperature", ValueError, value("temperature", -0.1)),
    ("temperature is NaN", "temperature", ValueError, value("temperature", NAN)),
    ("temperature is infinite", "temperature", ValueError, value("temperature", INF)),
    ("temperature is beyond float32", "temperature", ValueError, value("temperature", 10**39)),
    ("temperature is float64", "temperature", TypeError, change("temperature", lambda x: x.astype(np.float64))),
    ("temperature has another B", "temperature", ValueError, change("temperature", lambda x: x[:1])),
    ("temperature has 2 axes", "temperature", ValueError, change("temperature", lambda x: x[:, None])),
    ("temperature has no axes", "temperature", ValueError, value("temperature", np.array(0.7, np.float32))),
    ("top_k is a float", "top_k", TypeError, value("top_k", 4.0)),
    ("top_k is a bool", "top_k", TypeError, value("top_k", True)),
    ("top_k is text", "top_k", TypeError, value("top_k", "4")),
    ("top_k is int64", "top_k", TypeError, change("top_k", lambda x: x.astype(np.int64))),
    ("top_k has another B", "top_k", ValueError, change("top_k", lambda x: np.tile(x, 2))),
    ("top_p is a bool", "top_p", TypeError, value("top_p", True)),
    ("top_p is text", "top_p", TypeError, value("top_p", "1")),
    ("top_p is 0", "top_p", ValueError, value("top_p", 0)),
    ("top_p is negative", "top_p", ValueError, value("top_p", -0.5)),
    ("top_p is above 1", "top_p", ValueError, value("top_p", 1.01)),
    ("top_p is NaN", "top_p", ValueError, value("top_p", NAN)),
    ("top_p is float16", "top_p", TypeError, change("top_p", lambda x: x.astype(np.float16))),
    ("top_p has another B", "top_p", ValueError, change("top_p", lambda x: x[:0])),
    ("out is a number", "out", TypeError, value("out", 1.0)),
    ("out is float64", "out", TypeError, change("out", lambda x: x.astype(np.float64))),
    ("out has another V", "out", ValueError, change("out", lambda x: x[..., :19])),
    ("out has 2 axes", "out", ValueError, change("out", lambda x: x[0])),
    ("out is read-only", "out", ValueError, change("out", read_only)),
    ("out is one place many times", "out", ValueError, change("out", lambda x: as_strided(x[:1].copy(), x.shape))),
    ("out is the logits", "out", ValueError, lambda a: {"out": a["logits"]}),
    ("out overlaps the logits", "out", ValueError, out_over("logits")),
    ("out overlaps the temperature", "out", ValueError, out_over("temperature")),
    ("out overlaps top_p", "out", ValueError, out_over("top_p")),
]


@pytest.mark.parametrize(("name", "exception", "changes"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_wrong_arguments(monkeypatch, name, exception, changes):
    out = np.full((2, 3, 20), 7.0, np.float32)
    right = {
        "logits": logits_of(2, 3, 20),
        "temperature": np.float32([0.7, 0.8]),
        "top_k": np.int32([3, 4]),
        "top_p": np.float32([0.9, 1.0]),
        "out": out,
    }
    wrong = right | changes(right)
    results = [x for x in (out, wrong["out"]) if isinstance(x, np.ndarray)]
    before = [x.tobytes() for x in results]
    monkeypatch.setattr(module, "launch", lambda *args, **options: pytest.fail("a kernel was launched"))
    with pytest.raises(exception, match=rf"(?<!\w){name}(?!\w)") as caught:
        target_probs(**wrong)
    assert "\n" not in str(caught.value)
    assert before == [x.tobytes() for x in results], "something was written"
    mirrored(**right)


def test_arrays_on_different_devices_are_refused():
    x = logits_of(2, 1, 4)
    there = arrays.view

    def elsewhere(name: str, array: Any) -> View:
        found = there(name, array)
        return arrays.replace(found, device=3) if name == "top_k" else found

    with mock.patch.object(arrays, "view", elsewhere), pytest.raises(ValueError, match="top_k in GPU 3"):
        target_probs(x, 1.0, np.int32([1, 2]))


# Mirror, kernel and page are one


def test_mirror_and_kernel_have_the_same_phases():
    mirror = phases(module, "mirror")
    assert mirror == phases(module, "kernel")
    assert [int(re.findall(r"\d", phase)[0]) for phase in mirror] == list(range(1, 7))
    assert re.findall(r"^- `(# Phase \d: [^`]*)`", PAGE.read_text(encoding="utf-8"), re.M) == mirror


def test_what_only_the_gpu_needs_is_marked():
    for line in function_source(module, "kernel").splitlines():
        assert "cuda." not in line or "  # gpu: " in line, line


def test_the_page_has_signature_and_arguments():
    text = PAGE.read_text(encoding="utf-8")
    call = re.search(r"^probs = dd\.target_probs\((.*?)\)$", text, re.M | re.S)
    assert call
    documented = ast.parse(f"def f({call[1]}): pass").body[0]
    assert ast.unparse(documented) == ast.unparse(ast.parse(bare_signature(target_probs)).body[0])
    names = [row[0].strip("`") for row in table_under(PAGE, "Arguments")]
    assert names == ["logits", "temperature", "top_k", "top_p", "out"]


def test_the_table_of_errors():
    namespace = run_until(PAGE, "given")
    rows = table_under(PAGE, "Errors")
    assert len(rows) > 10
    assert_errors(target_probs, namespace["given"], namespace, rows)
