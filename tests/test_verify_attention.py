"""verify_attention: mirror against oracle, kernel against mirror, and the laws that both must keep.

Kernels run in the simulator, or on a GPU where there is one. "Bit for bit" means equal bytes.
"""

from __future__ import annotations

import ast
import io
import math
import tokenize
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import (
    BFLOAT16,
    CASES,
    CHUNK,
    STALE_ENTRIES,
    Case,
    ancestor_mask,
    arguments,
    as_float,
    check_results,
    compare_lse,
    error_bound,
    make_inputs,
    pack,
    to_pages,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import cuda
from wrong_kernels import MISTAKES, RACES, build, build_race

import ddtree_numba as dd
from ddtree_numba.attention import three_phase
from ddtree_numba.attention.problem import make_problem
from ddtree_numba.compare import compare
from ddtree_numba.device.launch import shared_bytes_limit
from ddtree_numba.device.runtime import SIMULATOR

Results = tuple[np.ndarray, np.ndarray]

# The simulator differs from the mirror by the last bit of exp alone (1e-7 was the most seen); a GPU also fuses
# multiplications with additions, which rounds the logits differently.
PORT_ERROR = 2.5e-7
KERNEL, MIRROR, FLASH, FLASH_MIRROR = "three_phase", "three_phase_numpy", "flash", "flash_numpy"
KERNELS, MIRRORS = (KERNEL, FLASH), (MIRROR, FLASH_MIRROR)
only_simulated = pytest.mark.skipif(not SIMULATOR, reason="wrong kernels run in the simulator alone")
# The kernel of flash takes seconds in the simulator and, for each combination of dtypes and layouts, to compile. So it
# takes part where that pays: in all backends, or in the simulator alone, which compiles nothing.
simulated_flash = pytest.param(
    FLASH, marks=pytest.mark.skipif(not SIMULATOR, reason="test_flash_gpu.py has this with fewer kernels to compile")
)
each_variant = pytest.mark.parametrize("variant", [KERNEL, MIRROR, FLASH, FLASH_MIRROR])
each_when_simulated = pytest.mark.parametrize("variant", [KERNEL, MIRROR, simulated_flash, FLASH_MIRROR])
but_flash = pytest.mark.parametrize("variant", [KERNEL, MIRROR, FLASH_MIRROR])
three_phase_alone = pytest.mark.parametrize("variant", [KERNEL, MIRROR])
each_mirror = pytest.mark.parametrize("variant", MIRRORS)

# What flash runs of SIMULATED: each dtype, mask and layout, rows and keys in several tiles.
FLASH_SIMULATED = (
    *("prefix_0_to_2", "prefix_of_two_chunks", "ragged_paged_with_idle_slot", "padded_nodes", "two_words", "causal"),
    *("page_size_16", "narrow", "rope_as_wide_as_latent", "rope_wider_than_latent", "steep_softmax", "float16"),
    *("bfloat16", "bfloat16_on_float32", "float16_on_bfloat16_bits"),
)
# On a GPU: all lengths, page sizes and trees, but few dtypes and widths, since each combination is compiled.
FLASH_WIDTHS = ((32, 16), (512, 64))


def runs_flash(case: Case) -> bool:
    if SIMULATOR:
        return case.name in FLASH_SIMULATED
    usual = case.dtype == "float32" and case.cache_dtype is None and case.mask == "packed" and case.Q > 1
    return usual and (case.R, case.P) in FLASH_WIDTHS


KERNEL_CASES = [(KERNEL, case) for case in CASES if case.simulate or not SIMULATOR]
KERNEL_CASES += [(FLASH, case) for case in CASES if runs_flash(case)]


def attend(inputs: dict[str, Any], variant: str = MIRROR, **changes: Any) -> Results:
    return dd.verify_attention(**arguments(inputs, **changes), variant=variant)


def assert_same_bits(actual: Results, expected: Results) -> None:
    for name, a, e in zip(("out", "lse"), actual, expected, strict=True):
        assert a.dtype == e.dtype, name
        assert a.shape == e.shape, name
        bits = f"u{a.dtype.itemsize}"
        np.testing.assert_array_equal(np.ascontiguousarray(a).view(bits), np.ascontiguousarray(e).view(bits), name)


def bits_differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Per row (the last axis): whether any bit differs."""
    return (a.view(f"u{a.dtype.itemsize}") != b.view(f"u{b.dtype.itemsize}")).any(axis=-1)


# All cases: mirror against oracle, kernel against mirror and oracle


@each_mirror
@pytest.mark.parametrize("case", CASES, ids=str)
def test_mirror_against_oracle(case, variant):
    inputs = make_inputs(case)
    check_results(attend(inputs, variant), inputs, variant)


@pytest.mark.parametrize(("variant", "case"), KERNEL_CASES, ids=str)
def test_kernel_against_mirror_and_oracle(variant, case):
    inputs = make_inputs(case)
    mirrored = attend(inputs, f"{variant}_numpy")
    results = attend(inputs, variant)
    assert results[0].dtype == inputs["q"].dtype
    check_results(results, inputs, variant)
    out, mirrored_out = (as_float(x[0]) for x in (results, mirrored))
    if out.dtype == np.float32:
        bound = PORT_ERROR if SIMULATOR else error_bound(inputs, variant)
        compare(out, mirrored_out, name="kernel against mirror", rel_frobenius=bound).check()
    else:
        compare(out, mirrored_out, name="kernel against mirror", max_ulp=1.0).check()
    compare_lse(results[1], mirrored[1].astype(np.float64), PORT_ERROR if SIMULATOR else 1e-5).check()


@pytest.mark.parametrize(("capacity", "chosen"), [(32, "three_phase"), (33, FLASH)])
def test_the_default_variant(capacity, chosen):
    inputs = make_inputs(Case("default", (2,), Q=2, slack=capacity - 4))
    expected = attend(inputs, chosen)
    assert_same_bits(dd.verify_attention(**arguments(inputs)), expected)
    assert_same_bits(dd.verify_attention(**arguments(inputs), variant="auto"), expected)


# Properties on random shapes, lengths and masks (not only those of trees)

SPLITS: list[dict[str, Any]] = [{}, {"num_splits": 1}, {"num_splits": 2}, {"num_splits": 5}, {"batch_invariant": True}]


@st.composite
def problems(draw: Any, max_rows: int, max_prefix: int) -> dict[str, Any]:
    num_nodes = draw(st.integers(1, min(40, max_rows)))
    num_heads = draw(st.integers(1, min(3, max_rows // num_nodes)))
    batch = draw(st.integers(1, min(3, max_rows // (num_nodes * num_heads))))
    dtypes = st.sampled_from(["float32", "float32", "float16", "bfloat16", "uint16"])
    case = Case(
        name="random",
        prefixes=tuple(draw(st.lists(st.integers(0, max_prefix), min_size=batch, max_size=batch))),
        Q=num_nodes,
        H=num_heads,
        R=16 * draw(st.integers(1, 3)),
        P=16 * draw(st.integers(1, 3)),
        dtype=draw(dtypes),
        cache_dtype=draw(dtypes),
        page_size=draw(st.sampled_from([None, 1, 2, 5, 16])),
        logit_std=draw(st.sampled_from([0.1, 1.0, 3.0])),
        slack=draw(st.integers(0, 4)),
    )
    inputs = make_inputs(case, seed=draw(st.integers(0, 2**32 - 1)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    mask = rng.random((batch, num_nodes, num_nodes)) < density
    return inputs | {"tree_mask": draw(st.sampled_from([mask, pack(mask), None]))}


@settings(max_examples=60, deadline=None)
@given(inputs=problems(max_rows=80, max_prefix=150), options=st.sampled_from(SPLITS))
def test_mirror_on_random_problems(inputs, options):
    check_results(attend(inputs, validate=True), inputs)
    check_results(attend(inputs, FLASH_MIRROR, validate=True, **options), inputs, FLASH_MIRROR)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(inputs=problems(max_rows=6, max_prefix=70))
def test_kernel_on_random_problems(inputs):
    check_results(attend(inputs, KERNEL, validate=True), inputs)


@pytest.mark.skipif(not SIMULATOR, reason="on a GPU each dtype and width would be compiled")
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(inputs=problems(max_rows=18, max_prefix=20), options=st.sampled_from(SPLITS))
def test_kernel_of_flash_on_random_problems(inputs, options):
    check_results(attend(inputs, FLASH, validate=True, **options), inputs, FLASH)


# Masks, exactly: with q = 0 the weights are equal, and with unit vectors for rows the output is the mask itself


def mask_problem(mask: np.ndarray, prefix: int = 0) -> dict[str, Any]:
    """Row k of the cache is the k-th unit vector, q is 0: output k of a node is 1/n if it sees key k, of n keys."""
    batch, num_nodes = mask.shape[:2]
    num_keys = prefix + num_nodes
    width = -(-num_keys // 16) * 16
    cache = np.zeros((batch, num_keys, width + 16), np.float32)
    cache[..., :num_keys, :num_keys] = np.eye(num_keys, dtype=np.float32)
    return {
        "q": np.zeros((batch, num_nodes, 1, width + 16), np.float32),
        "kv_cache": cache,
        "cache_seqlens": np.full(batch, prefix, np.int32),
        "tree_mask": mask,
        "block_table": None,
        "sm_scale": 1.0,
        "kv_lora_rank": width,
    }


def assert_output_is_the_mask(results: Results, mask: np.ndarray, prefix: int) -> None:
    out, lse = results[0][:, :, 0], results[1][:, :, 0]
    seen = np.concatenate([np.ones((*mask.shape[:2], prefix), np.bool_), mask], axis=2)
    count = seen.sum(axis=2, dtype=np.float32)
    expected = np.zeros_like(out)
    expected[..., : seen.shape[2]] = seen / np.maximum(count, np.float32(1.0))[..., None]
    np.testing.assert_array_equal(out, expected)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(count.astype(np.float64)), rtol=1e-6)


def test_masks_of_the_package_are_those_of_the_cases():
    for case in (
        Case("masks", (0, 0), Q=65, padded=2),
        Case("masks", (0,), Q=32, tree="star"),
        Case("masks", (0,), Q=1),
    ):
        inputs = make_inputs(case)
        mask = ancestor_mask(inputs["parents"])
        np.testing.assert_array_equal(dd.mask_from_parents(inputs["parents"]), mask)
        np.testing.assert_array_equal(dd.pack_mask(mask), inputs["tree_mask"])
        np.testing.assert_array_equal(dd.unpack_mask(inputs["tree_mask"], case.Q), mask)


def random_mask(num_nodes: int, batch: int = 1) -> np.ndarray:
    return np.random.default_rng(num_nodes).random((batch, num_nodes, num_nodes)) < 0.5


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("num_nodes", [1, 2, 31, 32, 33, 63, 64, 65])
@each_mirror
def test_each_mask_bit_in_the_mirror(variant, num_nodes, prefix):
    mask = random_mask(num_nodes, batch=2)
    for given_mask in (mask, pack(mask)):
        assert_output_is_the_mask(attend(mask_problem(mask, prefix), variant, tree_mask=given_mask), mask, prefix)


@pytest.mark.parametrize(
    ("variant", "num_nodes", "packed"),
    [
        *((KERNEL, 31, True), (KERNEL, 33, True), (KERNEL, 65, True), (KERNEL, 33, False)),
        pytest.param(FLASH, 35, True, marks=simulated_flash.marks),
        pytest.param(FLASH, 15, False, marks=simulated_flash.marks),
    ],
)
def test_each_mask_bit_in_the_kernel(variant, num_nodes, packed):
    mask = random_mask(num_nodes)
    results = attend(mask_problem(mask, prefix=2), variant, tree_mask=pack(mask) if packed else mask)
    assert_output_is_the_mask(results, mask, 2)


@pytest.mark.parametrize(
    ("variant", "num_nodes"),
    [(MIRROR, 33), (MIRROR, 65), (KERNEL, 3), (FLASH_MIRROR, 33), (FLASH_MIRROR, 65)],
)
def test_each_flipped_mask_bit_shows(variant, num_nodes):
    mask = random_mask(num_nodes)
    base, _ = attend(mask_problem(mask), variant)
    for j in range(num_nodes):
        flipped = mask.copy()
        flipped[:, :, j] ^= True
        out, _ = attend(mask_problem(flipped), variant, tree_mask=pack(flipped))
        assert bits_differ(out, base).all(), f"column {j}"


@each_variant
def test_mask_bits_past_the_last_node_are_ignored_and_refused_by_validate(variant):
    inputs = make_inputs(Case("spare_bits", (2,), Q=3))
    expected = attend(inputs, variant)
    for spare in (3, 31):
        words = inputs["tree_mask"] | np.uint32(1 << spare)
        assert_same_bits(attend(inputs, variant, tree_mask=words), expected)
        with pytest.raises(ValueError, match=r"tree_mask\[0, 0\] has a bit at or past column 3"):
            attend(inputs, variant, tree_mask=words, validate=True)


# One problem, written down in several ways: the same bits


@but_flash
def test_chain_is_causal(variant):
    for num_nodes in (1, 4, 33, 65) if variant in MIRRORS else (1, 4):
        inputs = make_inputs(Case("chain", (5, 0), Q=num_nodes, tree="chain"))
        assert_same_bits(attend(inputs, variant, tree_mask=None), attend(inputs, variant))


@each_when_simulated
def test_bool_mask_is_packed_mask(variant):
    for num_nodes in (4, 33, 65) if variant in MIRRORS else (4,):
        inputs = make_inputs(Case("tree", (5, 0), Q=num_nodes, mask="bool"))
        assert_same_bits(attend(inputs, variant, tree_mask=pack(inputs["tree_mask"])), attend(inputs, variant))


@pytest.mark.parametrize(
    ("variant", "prefixes"),
    [*((v, p) for v in (KERNEL, *MIRRORS) for p in ((18, 1), (CHUNK + 2,))), (FLASH, (18, 1))],
)
def test_pages_do_not_change_a_bit(variant, prefixes):
    inputs = make_inputs(Case("paged", prefixes, Q=3))
    expected = attend(inputs, variant)
    stops = inputs["cache_seqlens"] + 3
    for page_size in (3,) if variant == FLASH else (1, 3, 16):
        rng = np.random.default_rng(page_size)
        pages, table = to_pages(inputs["kv_cache"], stops, page_size, rng)
        paged = inputs | {"kv_cache": pages, "block_table": table}
        assert_same_bits(attend(paged, variant, validate=True), expected)


@each_variant
def test_an_axis_for_the_kv_head(variant):
    for page_size in (None, 3):
        inputs = make_inputs(Case("kv_head", (4,), Q=2, page_size=page_size))
        cache = inputs["kv_cache"][:, :, None, :]
        assert_same_bits(attend(inputs, variant, kv_cache=cache), attend(inputs, variant))


@each_when_simulated
def test_q_in_two_parts(variant):
    inputs = make_inputs(Case("two_parts", (4,), Q=2, H=2))
    q, rank = inputs["q"], inputs["kv_lora_rank"]
    expected = attend(inputs, variant)
    parts = q[..., :rank], q[..., rank:]
    assert_same_bits(attend(inputs, variant, q=parts), expected)
    assert_same_bits(attend(inputs, variant, q=[np.ascontiguousarray(part) for part in parts]), expected)


@each_when_simulated
def test_bfloat16_bits_are_bfloat16(variant):
    inputs = make_inputs(Case("bits", (4,), Q=2, dtype="uint16"))
    out, lse = attend(inputs, variant)
    values = {name: as_float(inputs[name]) for name in ("q", "kv_cache")}
    as_values, same_lse = attend(inputs, variant, **values)
    assert (out.dtype, as_values.dtype) == (np.uint16, BFLOAT16)
    assert_same_bits((out, lse), (as_values.view(np.uint16), same_lse))


# Rows do not know each other


@each_when_simulated
def test_order_of_requests(variant):
    inputs = make_inputs(Case("requests", (7, 0, 3), Q=3, page_size=3))
    order = [2, 0, 1]
    moved = {name: inputs[name][order] for name in ("q", "cache_seqlens", "tree_mask", "block_table")}
    expected = attend(inputs, variant, batch_invariant=True)
    assert_same_bits(attend(inputs, variant, **moved, batch_invariant=True), tuple(x[order] for x in expected))


@but_flash
def test_a_request_alone(variant):
    inputs = make_inputs(Case("alone", (7, 0, 3), Q=3))
    together = attend(inputs, variant, batch_invariant=True)
    for b in range(3):
        one = slice(b, b + 1)
        alone = {name: inputs[name][one] for name in ("q", "kv_cache", "cache_seqlens", "tree_mask")}
        results = attend(inputs, variant, **alone, batch_invariant=True)
        assert_same_bits(results, tuple(x[one] for x in together))


@each_variant
def test_order_of_heads(variant):
    inputs = make_inputs(Case("heads", (7,), Q=2, H=3))
    order = [2, 0, 1]
    permuted = attend(inputs, variant, q=inputs["q"][:, :, order])
    assert_same_bits(permuted, tuple(x[:, :, order] for x in attend(inputs, variant)))


@each_variant
def test_order_of_nodes(variant):
    case = Case("nodes", (7,), Q=6 if variant in KERNELS else 40)
    inputs = make_inputs(case)
    order = np.random.default_rng(0).permutation(case.Q)
    mask = dd.unpack_mask(inputs["tree_mask"], case.Q)
    cache = inputs["kv_cache"].copy()
    cache[:, 7 : 7 + case.Q] = cache[:, 7 : 7 + case.Q][:, order]
    moved = {"q": inputs["q"][:, order], "kv_cache": cache, "tree_mask": pack(mask[:, order][:, :, order])}
    out, lse = attend(inputs | moved, variant)
    expected_out, expected_lse = attend(inputs, variant)
    # The sums run in another order: twice the rounding error.
    compare(out, expected_out[:, order], rel_frobenius=2 * error_bound(inputs, variant)).check()
    compare_lse(lse, expected_lse[:, order].astype(np.float64)).check()


@each_variant
def test_the_same_bits_in_every_run(variant):
    inputs = make_inputs(Case("again", (9, 2), Q=3, page_size=3))
    expected = attend(inputs, variant)
    for _ in range(2):
        assert_same_bits(attend(inputs, variant), expected)


# What must not be read, and what empty rows get


@each_variant
def test_nan_of_an_idle_slot_stays_there(variant):
    case = Case("idle", (5, 0, 2), Q=2, idle=(1,))
    inputs = make_inputs(case)
    assert np.isnan(inputs["kv_cache"][1]).all()
    out, lse = attend(inputs, variant)
    assert np.isfinite(out).all()
    assert not out[1].any()
    assert np.isneginf(lse[1]).all()
    assert np.isfinite(lse[[0, 2]]).all()
    assert not np.signbit(out[1]).any(), "0, not -0"


@three_phase_alone
def test_nan_in_a_visible_row_spreads_to_the_nodes_that_see_it_alone(variant):
    inputs = make_inputs(Case("spreads", (2, 3), Q=4, tree="star"))
    expected = attend(inputs, variant)
    cache = inputs["kv_cache"].copy()
    cache[0, 2 + 3] = np.nan  # node 3 sees it, and no other
    out, lse = attend(inputs, variant, kv_cache=cache)
    assert np.isnan(out[0, 3]).all()
    assert np.isnan(lse[0, 3]).all()
    assert_same_bits((out[0, :3], lse[0, :3]), (expected[0][0, :3], expected[1][0, :3]))
    assert_same_bits((out[1], lse[1]), (expected[0][1], expected[1][1]))


@each_variant
def test_a_nan_query_does_not_look_like_a_node_that_sees_nothing(variant):
    inputs = make_inputs(Case("nan_query", (2,), Q=2))
    q = inputs["q"].copy()
    q[0, 1] = np.nan
    out, lse = attend(inputs, variant, q=q)
    assert np.isfinite(out[0, 0]).all()
    assert np.isnan(out[0, 1]).all()
    assert np.isnan(lse[0, 1]).all()


@each_when_simulated
def test_inputs_are_not_changed(variant):
    for case in (Case("kept", (5, 0), Q=2, page_size=3), Case("kept", (5, 0), Q=2, dtype="bfloat16", mask="bool")):
        inputs = make_inputs(case)
        arrays = {name: x for name, x in inputs.items() if isinstance(x, np.ndarray)}
        before = {name: x.tobytes() for name, x in arrays.items()}
        for x in arrays.values():
            x.flags.writeable = False
        attend(inputs, variant)
        assert before == {name: x.tobytes() for name, x in arrays.items()}


# Memory layouts of inputs and outputs

SMALL = Case("small", (4, 0), Q=3, H=2, mask="bool")
SMALL_PAGED = Case("small_paged", (4, 0), Q=3, H=2, page_size=3)


def spread_out(x: np.ndarray) -> np.ndarray:
    """Every second element of every axis of a larger array of NaN, or of the largest number."""
    filler = np.nan if x.dtype.kind == "f" else True if x.dtype == np.bool_ else np.iinfo(x.dtype).max
    big = np.full([2 * n + 1 for n in x.shape], filler, x.dtype)
    inner = big[tuple(slice(1, None, 2) for _ in x.shape)]
    inner[...] = x
    return inner


def backwards(x: np.ndarray) -> np.ndarray:
    """Negative strides along every axis."""
    flipped = tuple(slice(None, None, -1) for _ in x.shape)
    return x[flipped].copy()[flipped]


LAYOUTS = {
    "spread_out": spread_out,
    "backwards": backwards,
    "column_major": np.asfortranarray,
    "axes_swapped": lambda x: np.swapaxes(np.swapaxes(x, 0, 1).copy(), 0, 1) if x.ndim > 1 else x,
    "in_a_larger_array": lambda x: np.pad(x, [(1, 2)] * x.ndim)[tuple(slice(1, -2) for _ in x.shape)],
}


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        *((v, x) for v in (KERNEL, *MIRRORS) for x in LAYOUTS),
        pytest.param(FLASH, "spread_out", marks=simulated_flash.marks),
        pytest.param(FLASH, "backwards", marks=simulated_flash.marks),
    ],
)
def test_strides_of_inputs(variant, layout):
    for case in (SMALL_PAGED,) if variant == FLASH else (SMALL, SMALL_PAGED):
        inputs = make_inputs(case)
        moved = {name: LAYOUTS[layout](x) for name, x in arguments(inputs).items() if isinstance(x, np.ndarray)}
        assert_same_bits(attend(inputs, variant, **moved), attend(inputs, variant))


@each_when_simulated
def test_broadcast_inputs(variant):
    inputs = make_inputs(Case("broadcast", (4,), Q=2))
    alone = attend(inputs, variant)
    names = ("q", "kv_cache", "cache_seqlens", "tree_mask")
    three = {name: np.broadcast_to(inputs[name], (3, *inputs[name].shape[1:])) for name in names}
    out, lse = attend(inputs, variant, **three)
    for b in range(3):
        assert_same_bits((out[b : b + 1], lse[b : b + 1]), alone)


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        *((v, x) for v in (KERNEL, *MIRRORS) for x in ("spread_out", "backwards", "column_major", "axes_swapped")),
        pytest.param(FLASH, "spread_out", marks=simulated_flash.marks),
        pytest.param(FLASH, "axes_swapped", marks=simulated_flash.marks),
    ],
)
def test_given_results_of_any_strides(variant, layout):
    inputs = make_inputs(SMALL)
    expected = attend(inputs, variant)
    out = LAYOUTS[layout](np.full_like(expected[0], np.nan))
    lse = LAYOUTS[layout](np.full_like(expected[1], np.nan))
    around = [x.base if x.base is not None else x for x in (out, lse)]
    results = attend(inputs, variant, out=out, lse=lse)
    assert results[0] is out
    assert results[1] is lse
    assert_same_bits(results, expected)
    if layout == "spread_out":
        for whole, part in zip(around, expected, strict=True):
            assert np.count_nonzero(~np.isnan(whole)) == part.size, "something was written beside the results"


@each_when_simulated
def test_one_of_the_results_given(variant):
    inputs = make_inputs(Case("one_given", (1,), Q=1))
    expected = attend(inputs, variant)
    for name, index in (("out", 0), ("lse", 1)):
        given_array = np.empty_like(expected[index])
        results = attend(inputs, variant, **{name: given_array})
        assert results[index] is given_array
        assert_same_bits(results, expected)


@each_when_simulated
def test_results_beside_the_inputs_in_one_allocation(variant):
    inputs = make_inputs(Case("beside", (2,), Q=2))
    expected = attend(inputs, variant)
    q, rank = inputs["q"], inputs["kv_lora_rank"]
    # Columns: q, then out, then one for lse. Extents overlap, elements do not.
    whole = np.zeros((*q.shape[:3], q.shape[3] + rank + 1), np.float32)
    whole[..., : q.shape[3]] = q
    results = attend(inputs, variant, q=whole[..., : q.shape[3]], out=whole[..., q.shape[3] : -1], lse=whole[..., -1])
    assert_same_bits(results, expected)


# dtypes of the result


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint16"])
@each_when_simulated
def test_the_result_has_the_dtype_of_q(variant, dtype):
    inputs = make_inputs(Case("dtype_of_q", (3,), Q=1, dtype=dtype, cache_dtype="bfloat16"))
    out, lse = attend(inputs, variant)
    assert out.dtype == inputs["q"].dtype
    assert lse.dtype == np.float32


@pytest.mark.parametrize(
    ("out_dtype", "dtype"),
    [
        (np.float32, np.float32),
        ("float32", np.float32),
        (np.float16, np.float16),
        (np.dtype(np.float16), np.float16),
        (ml_dtypes.bfloat16, BFLOAT16),
        (BFLOAT16, BFLOAT16),
        ("bfloat16", BFLOAT16),
    ],
    ids=str,
)
@but_flash
def test_out_dtype(variant, out_dtype, dtype):
    inputs = make_inputs(Case("out_dtype", (3,), Q=2))
    exact = attend(inputs, variant)
    results = attend(inputs, variant, out_dtype=out_dtype)
    # The same float32 arithmetic, rounded once at the end.
    assert_same_bits(results, (exact[0].astype(dtype), exact[1]))
    assert_same_bits(attend(inputs, variant, out=np.empty(exact[0].shape, dtype)), results)
    low = {name: inputs[name].astype(BFLOAT16) for name in ("q", "kv_cache")}
    assert attend(inputs, variant, **low, out_dtype=out_dtype)[0].dtype == dtype


@each_when_simulated
def test_bfloat16_results_as_bits(variant):
    inputs = make_inputs(Case("out_bits", (3,), Q=1))
    expected, lse = attend(inputs, variant, out_dtype="bfloat16")
    bits = np.empty(expected.shape, np.uint16)
    for out_dtype in (None, "bfloat16"):
        results = attend(inputs, variant, out=bits, out_dtype=out_dtype)
        assert_same_bits(results, (expected.view(np.uint16), lse))


def test_ties_round_to_even():
    # One key: the output is the key's row, so float32 rows between two bfloat16 show the rounding.
    inputs = make_inputs(Case("ties", (1,), Q=1, H=1))
    inputs["tree_mask"][:] = 0
    upper, lower = 1.0 + 2.0**-7, 1.0
    between = [lower + 2.0**-8, upper + 2.0**-8, lower + 2.0**-8 + 2.0**-20, lower + 2.0**-8 - 2.0**-20]
    inputs["kv_cache"][0, 0, :4] = between
    for variant in (KERNEL, *MIRRORS, *([FLASH] if SIMULATOR else [])):
        out, _ = attend(inputs, variant, out_dtype="bfloat16")
        assert out[0, 0, 0, :4].astype(np.float64).tolist() == [lower, upper + 2.0**-7, upper, lower]


# Sizes and lengths at the ends of their ranges


@pytest.mark.parametrize("page_size", [None, 4])
@each_variant
def test_no_requests(variant, page_size):
    for mask in ("bool", "packed", "causal"):
        inputs = make_inputs(Case("none", (), Q=3, H=2, page_size=page_size, mask=mask))
        for validate in (False, True):
            out, lse = attend(inputs, variant, validate=validate)
            assert (out.shape, out.dtype) == ((0, 3, 2, 32), np.float32)
            assert (lse.shape, lse.dtype) == ((0, 3, 2), np.float32)


@but_flash
def test_max_seqlen_above_all_lengths_changes_nothing(variant):
    inputs = make_inputs(Case("max_seqlen", (5, 2), Q=2, slack=9))
    expected = attend(inputs, variant)
    for max_seqlen in (5, np.int64(7), 5 + 9):
        assert_same_bits(attend(inputs, variant, max_seqlen=max_seqlen, validate=True), expected)


@each_variant
def test_lengths_are_clamped_without_validate_and_refused_with_it(variant):
    inputs = make_inputs(Case("clamped", (4, 0), Q=2, page_size=3))
    expected = attend(inputs, variant)
    lowest, highest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    for lengths, b in (((5, -1), 0), ((highest, lowest), 0), ((4, -1), 1)):
        wrong = np.array(lengths, np.int32)
        assert_same_bits(attend(inputs, variant, cache_seqlens=wrong, max_seqlen=4), expected)
        with pytest.raises(ValueError, match=rf"cache_seqlens\[{b}\] is {lengths[b]}; .* between 0 and 4"):
            attend(inputs, variant, cache_seqlens=wrong, max_seqlen=4, validate=True)


@each_variant
def test_pages_that_are_none_are_clamped_without_validate_and_refused_with_it(variant):
    inputs = make_inputs(Case("bad_pages", (4,), Q=2, page_size=2))
    pages = np.nan_to_num(inputs["kv_cache"])
    table = inputs["block_table"].copy()
    table[0, :3] = (10**9, table[0, 1], -7)
    clamped = np.clip(table, 0, len(pages) - 1)
    expected = attend(inputs, variant, kv_cache=pages, block_table=clamped)
    assert_same_bits(attend(inputs, variant, kv_cache=pages, block_table=table), expected)
    with pytest.raises(ValueError, match=r"block_table\[0, 0\] is 1000000000; it must be between 0 and 5"):
        attend(inputs, variant, kv_cache=pages, block_table=table, validate=True)


def test_validate_takes_stale_entries_behind_the_live_pages():
    inputs = make_inputs(Case("stale", (4, 1), Q=2, page_size=2))
    assert set(STALE_ENTRIES) & set(inputs["block_table"].ravel().tolist())
    assert_same_bits(attend(inputs, validate=True), attend(inputs))


@each_when_simulated
def test_arguments_that_change_nothing(variant):
    inputs = make_inputs(Case("options", (2,), Q=1))
    expected = attend(inputs, variant)
    for options in (
        {"num_splits": 1},
        {"batch_invariant": True},
        {"workspace": np.empty(2**16, np.float32)},
        {"sm_scale": np.float64(inputs["sm_scale"])},
        {"kv_lora_rank": np.int64(32)},
        {"validate": True},
    ):
        assert_same_bits(attend(inputs, variant, **options), expected)


def long_row(num_keys: int) -> dict[str, Any]:
    """A cache of many tokens that takes no memory, with a prefix of 3."""
    inputs = make_inputs(Case("long_row", (3,), Q=1))
    inputs["kv_cache"] = np.broadcast_to(np.float32(0.5), (1, num_keys, inputs["q"].shape[3]))
    return inputs


def test_a_score_row_beyond_shared_memory_is_refused():
    free = shared_bytes_limit(-1) // 4 - 48 - three_phase.KEYS_PER_PASS * three_phase.PITCH
    inputs = long_row(free + 100)
    with pytest.raises(ValueError, match=rf"shared memory for max_seqlen = {free + 99} .* max_seqlen = {free - 1}\."):
        attend(inputs, KERNEL)
    with pytest.raises(ValueError, match="shared memory"):
        attend(inputs, KERNEL, max_seqlen=free)
    expected = attend(long_row(10), KERNEL)
    assert_same_bits(attend(inputs, KERNEL, max_seqlen=free - 1), expected)
    assert_same_bits(attend(inputs, MIRROR), attend(long_row(10), MIRROR))


# Kinds of arrays


@pytest.mark.parametrize(
    ("variant", "case"),
    [
        *((KERNEL, x) for x in (SMALL, SMALL_PAGED, Case("small_bits", (4,), Q=2, dtype="uint16"))),
        pytest.param(FLASH, SMALL_PAGED, marks=simulated_flash.marks),
    ],
    ids=str,
)
def test_numba_arrays_give_numba_arrays(variant, case):
    inputs = make_inputs(case)
    expected = attend(inputs, variant)
    on_device = {name: cuda.to_device(x) for name, x in arguments(inputs).items() if isinstance(x, np.ndarray)}
    kind = type(on_device["q"])
    results = attend(inputs, variant, **on_device)
    assert [type(x) for x in results] == [kind, kind]
    assert_same_bits(tuple(x.copy_to_host() for x in results), expected)
    given_out, given_lse = (cuda.device_array(x.shape, x.dtype) for x in expected)
    results = attend(inputs, variant, **on_device, out=given_out, lse=given_lse, validate=True)
    assert results[0] is given_out
    assert results[1] is given_lse
    assert_same_bits(tuple(x.copy_to_host() for x in results), expected)


def test_numba_arrays_hold_bfloat16_as_bits():
    inputs = make_inputs(Case("numba_bits", (4,), Q=2))
    expected, lse = attend(inputs, KERNEL, out_dtype="bfloat16")
    on_device = {name: cuda.to_device(x) for name, x in arguments(inputs).items() if isinstance(x, np.ndarray)}
    results = attend(inputs, KERNEL, **on_device, out_dtype="bfloat16")
    assert_same_bits(tuple(x.copy_to_host() for x in results), (expected.view(np.uint16), lse))


def test_torch_tensors_on_the_cpu_are_refused():
    torch = pytest.importorskip("torch")
    inputs = make_inputs(SMALL)
    for name in ("q", "kv_cache", "cache_seqlens", "tree_mask"):
        with pytest.raises(TypeError, match=rf"\b{name}\b is a PyTorch tensor on cpu"):
            attend(inputs, **{name: torch.from_numpy(inputs[name])})


# Scales


def test_scale_presets():
    assert round(dd.KIMI_K2_SM_SCALE, 6) == 0.144680
    assert round(dd.DEEPSEEK_V3_SM_SCALE, 6) == 0.135234
    assert pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2, rel=1e-15) == dd.KIMI_K2_SM_SCALE
    for factor in (1.0, 0.5):
        assert dd.yarn_sm_scale(factor) == 192**-0.5
    assert dd.yarn_sm_scale(40.0, qk_head_dim=64, mscale_all_dim=0.0) == 0.125


# Wrong arguments: one exception that names the argument, before anything is written


def big_endian(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder(">"))


def misaligned(x: np.ndarray) -> np.ndarray:
    raw = np.zeros(x.nbytes + 1, np.uint8)
    return np.frombuffer(raw, x.dtype, offset=1).reshape(x.shape)


def half_aligned_strides(x: np.ndarray) -> np.ndarray:
    """Rows whose distance is no multiple of the item size."""
    raw = np.zeros((x.shape[0], x[0].nbytes + 1), np.uint8)
    strides = (raw.strides[0], *x.strides[1:])
    return np.ndarray(x.shape, x.dtype, raw, strides=strides)


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def overlapping(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Two float32 arrays in C order; the last element of the first is the first of the second."""
    n, m = math.prod(first), math.prod(second)
    memory = np.zeros(n + m - 1, np.float32)
    return memory[:n].reshape(first), memory[n - 1 :].reshape(second)


def out_over(name: str, result: str = "out") -> Any:
    def changes(a: dict[str, Any]) -> dict[str, Any]:
        one, two = overlapping(a[name].shape, a[result].shape)
        return {name: one, result: two}

    return changes


def change(name: str, function: Any) -> Any:
    """The wrong argument is made from the right one."""
    return lambda a: {name: function(a[name])}


def value(name: str, x: Any) -> Any:
    return lambda a: {name: x}


# Which argument the message must name, the exception, what is changed. SMALL: B=2, Q=3, H=2, R=32, P=16, S=10.
ERRORS: list[tuple[str, str, type[Exception], Any]] = [
    ("q is None", "q", TypeError, value("q", None)),
    ("q is a number", "q", TypeError, value("q", 1.0)),
    ("q is a list of three", "q", TypeError, value("q", [1.0, 2.0, 3.0])),
    ("q is a nested list", "q_nope", TypeError, change("q", lambda x: x.tolist())),
    ("q has 3 axes", "q", ValueError, change("q", lambda x: x[0])),
    ("q has 5 axes", "q", ValueError, change("q", lambda x: x[None])),
    ("q is float64", "q", TypeError, change("q", lambda x: x.astype(np.float64))),
    ("q is int32", "q", TypeError, change("q", lambda x: x.astype(np.int32))),
    ("q is complex", "q", TypeError, change("q", lambda x: x.astype(np.complex64))),
    ("q is float8", "q", TypeError, change("q", lambda x: x.astype(ml_dtypes.float8_e4m3fn))),
    ("q is big-endian", "q", TypeError, change("q", big_endian)),
    ("q is misaligned", "q", ValueError, change("q", misaligned)),
    ("q has misaligned strides", "q", ValueError, change("q", half_aligned_strides)),
    ("q has no rope part", "q", ValueError, change("q", lambda x: x[..., :32])),
    ("q has a rope part of 8", "q", ValueError, change("q", lambda x: x[..., :40])),
    ("q has no nodes", "q", ValueError, change("q", lambda x: x[:, :0])),
    ("q has no heads", "q", ValueError, change("q", lambda x: x[:, :, :0])),
    ("q has too many requests", "q", ValueError, change("q", lambda x: np.broadcast_to(x[:1], (65536, 3, 2, 48)))),
    ("q has another B than the rest", "kv_cache", ValueError, change("q", lambda x: x[:1])),
    ("q_nope has another rank", "q_nope", ValueError, change("q", lambda x: (x[..., :16], x[..., 32:]))),
    ("q_nope is a list", "q_nope", TypeError, change("q", lambda x: ([1.0], x[..., 32:]))),
    ("q_pe has another dtype", "q_pe", TypeError, change("q", lambda x: (x[..., :32], x[..., 32:].astype(np.float16)))),
    ("q_pe has another shape", "q_pe", ValueError, change("q", lambda x: (x[..., :32], x[:, :1, :, 32:]))),
    ("kv_cache is a list", "kv_cache", TypeError, change("kv_cache", lambda x: x.tolist())),
    ("kv_cache is float64", "kv_cache", TypeError, change("kv_cache", lambda x: x.astype(np.float64))),
    ("kv_cache is int8", "kv_cache", TypeError, change("kv_cache", lambda x: np.zeros(x.shape, np.int8))),
    ("kv_cache is big-endian", "kv_cache", TypeError, change("kv_cache", big_endian)),
    ("kv_cache is misaligned", "kv_cache", ValueError, change("kv_cache", misaligned)),
    ("kv_cache has 2 axes", "kv_cache", ValueError, change("kv_cache", lambda x: x[0])),
    ("kv_cache has 2 kv heads", "kv_cache", ValueError, change("kv_cache", lambda x: np.stack([x, x], axis=2))),
    ("kv_cache has another B", "kv_cache", ValueError, change("kv_cache", lambda x: x[:1])),
    ("kv_cache has another D", "kv_cache", ValueError, change("kv_cache", lambda x: x[..., :32])),
    ("kv_cache is too short", "kv_cache", ValueError, change("kv_cache", lambda x: x[:, :2])),
    ("cache_seqlens is a list", "cache_seqlens", TypeError, value("cache_seqlens", [4, 0])),
    ("cache_seqlens is a number", "cache_seqlens", TypeError, value("cache_seqlens", 4)),
    ("cache_seqlens is int64", "cache_seqlens", TypeError, change("cache_seqlens", lambda x: x.astype(np.int64))),
    ("cache_seqlens is uint32", "cache_seqlens", TypeError, change("cache_seqlens", lambda x: x.astype(np.uint32))),
    ("cache_seqlens is float", "cache_seqlens", TypeError, change("cache_seqlens", lambda x: x.astype(np.float32))),
    ("cache_seqlens is big-endian", "cache_seqlens", TypeError, change("cache_seqlens", big_endian)),
    ("cache_seqlens is misaligned", "cache_seqlens", ValueError, change("cache_seqlens", misaligned)),
    ("cache_seqlens has 2 axes", "cache_seqlens", ValueError, change("cache_seqlens", lambda x: x[:, None])),
    ("cache_seqlens has another B", "cache_seqlens", ValueError, change("cache_seqlens", lambda x: x[:1])),
    ("tree_mask is a list", "tree_mask", TypeError, change("tree_mask", lambda x: x.tolist())),
    ("tree_mask is float32", "tree_mask", TypeError, change("tree_mask", lambda x: x.astype(np.float32))),
    ("tree_mask is uint8", "tree_mask", TypeError, change("tree_mask", lambda x: x.astype(np.uint8))),
    ("tree_mask is int32", "tree_mask", TypeError, change("tree_mask", lambda x: pack(x).astype(np.int32))),
    ("tree_mask has 2 axes", "tree_mask", ValueError, change("tree_mask", lambda x: x[0])),
    ("tree_mask is not square", "tree_mask", ValueError, change("tree_mask", lambda x: x[..., :2])),
    ("tree_mask has another B", "tree_mask", ValueError, change("tree_mask", lambda x: x[:1])),
    ("tree_mask has a word too many", "tree_mask", ValueError, value("tree_mask", np.zeros((2, 3, 2), np.uint32))),
    ("tree_mask has no words", "tree_mask", ValueError, value("tree_mask", np.zeros((2, 3, 0), np.uint32))),
    ("block_table is a list", "block_table", TypeError, value("block_table", [[0], [1]])),
    ("block_table is int64", "block_table", TypeError, value("block_table", np.zeros((2, 1), np.int64))),
    ("block_table has 1 axis", "block_table", ValueError, value("block_table", np.zeros(2, np.int32))),
    ("block_table has another B", "block_table", ValueError, value("block_table", np.zeros((3, 1), np.int32))),
    ("block_table has no pages", "kv_cache", ValueError, value("block_table", np.zeros((2, 0), np.int32))),
    (
        "block_table allows too many tokens",
        "kv_cache",
        ValueError,
        value("block_table", np.broadcast_to(np.int32(0), (2, 2**31 // 10 + 1))),
    ),
    (
        "paged kv_cache without pages",
        "kv_cache",
        ValueError,
        lambda a: {"kv_cache": a["kv_cache"][:0], "block_table": np.zeros((2, 2), np.int32)},
    ),
    ("sm_scale is 0", "sm_scale", ValueError, value("sm_scale", 0)),
    ("sm_scale is negative", "sm_scale", ValueError, value("sm_scale", -1.0)),
    ("sm_scale is NaN", "sm_scale", ValueError, value("sm_scale", math.nan)),
    ("sm_scale is infinite", "sm_scale", ValueError, value("sm_scale", math.inf)),
    ("sm_scale is text", "sm_scale", TypeError, value("sm_scale", "x")),
    ("sm_scale is None", "sm_scale", TypeError, value("sm_scale", None)),
    ("kv_lora_rank is 24", "kv_lora_rank", ValueError, value("kv_lora_rank", 24)),
    ("kv_lora_rank is 0", "kv_lora_rank", ValueError, value("kv_lora_rank", 0)),
    ("kv_lora_rank is negative", "kv_lora_rank", ValueError, value("kv_lora_rank", -16)),
    ("kv_lora_rank is all of D", "kv_lora_rank", ValueError, value("kv_lora_rank", 48)),
    ("kv_lora_rank is a bool", "kv_lora_rank", TypeError, value("kv_lora_rank", True)),
    ("kv_lora_rank is a float", "kv_lora_rank", TypeError, value("kv_lora_rank", 32.0)),
    ("max_seqlen is too large", "max_seqlen", ValueError, value("max_seqlen", 10 - 3 + 1)),
    ("max_seqlen is negative", "max_seqlen", ValueError, value("max_seqlen", -1)),
    ("max_seqlen is a float", "max_seqlen", TypeError, value("max_seqlen", 4.0)),
    ("max_seqlen is a bool", "max_seqlen", TypeError, value("max_seqlen", True)),
    ("num_splits is 2", "num_splits", ValueError, lambda a: {"num_splits": 2, "variant": KERNEL}),
    ("num_splits is 0", "num_splits", ValueError, value("num_splits", 0)),
    ("sm_scale underflows", "sm_scale", ValueError, value("sm_scale", 1e-50)),
    ("sm_scale overflows", "sm_scale", ValueError, value("sm_scale", 1e39)),
    ("sm_scale is huge", "sm_scale", ValueError, value("sm_scale", 10**400)),
    ("sm_scale is a string", "sm_scale", TypeError, value("sm_scale", "0.5")),
    ("sm_scale is True", "sm_scale", TypeError, value("sm_scale", True)),
    ("num_splits is text", "num_splits", TypeError, value("num_splits", "1")),
    ("variant is unknown", "variant", ValueError, value("variant", "flash9")),
    ("variant is None", "variant", ValueError, value("variant", None)),
    ("out_dtype is int32", "out_dtype", TypeError, value("out_dtype", np.int32)),
    ("out_dtype is float64", "out_dtype", TypeError, value("out_dtype", "float64")),
    ("out_dtype is uint16", "out_dtype", TypeError, value("out_dtype", np.uint16)),
    ("out_dtype is a float", "out_dtype", TypeError, value("out_dtype", float)),
    ("out_dtype is not that of out", "out", TypeError, value("out_dtype", "float16")),
    ("out is a list", "out", TypeError, change("out", lambda x: x.tolist())),
    ("out is int32", "out", TypeError, change("out", lambda x: x.astype(np.int32))),
    ("out is float64", "out", TypeError, change("out", lambda x: x.astype(np.float64))),
    ("out is big-endian", "out", TypeError, change("out", big_endian)),
    ("out is misaligned", "out", ValueError, change("out", misaligned)),
    ("out has another shape", "out", ValueError, change("out", lambda x: x[..., :16])),
    ("out has 3 axes", "out", ValueError, change("out", lambda x: x[0])),
    ("out is read-only", "out", ValueError, change("out", read_only)),
    ("out is one place many times", "out", ValueError, change("out", lambda x: as_strided(x[:1].copy(), x.shape))),
    ("out overlaps q", "out", ValueError, out_over("q")),
    ("out overlaps the cache", "out", ValueError, out_over("kv_cache")),
    ("out overlaps lse", "out", ValueError, out_over("lse")),
    ("out is q's latent part", "out", ValueError, lambda a: {"out": a["q"][..., :32]}),
    ("lse is a list", "lse", TypeError, change("lse", lambda x: x.tolist())),
    ("lse is float64", "lse", TypeError, change("lse", lambda x: x.astype(np.float64))),
    ("lse is float16", "lse", TypeError, change("lse", lambda x: x.astype(np.float16))),
    ("lse has another shape", "lse", ValueError, change("lse", lambda x: x[..., :1])),
    ("lse is read-only", "lse", ValueError, change("lse", read_only)),
    ("lse is one place many times", "lse", ValueError, change("lse", lambda x: as_strided(x[:1].copy(), x.shape))),
    ("lse overlaps q", "lse", ValueError, out_over("q", "lse")),
    ("lse overlaps the cache", "lse", ValueError, out_over("kv_cache", "lse")),
    ("workspace is a list", "workspace", TypeError, value("workspace", [0.0])),
    (
        "workspace is too small",
        "workspace",
        ValueError,
        lambda a: {"workspace": np.zeros(16, np.float32), "variant": FLASH},
    ),
    ("workspace is misaligned", "workspace", ValueError, value("workspace", misaligned(np.zeros(2**16, np.float32)))),
    ("workspace is strided", "workspace", ValueError, value("workspace", np.zeros(2**17, np.float32)[::2])),
    ("workspace overlaps out", "workspace", ValueError, lambda a: {"workspace": a["out"]}),
    ("workspace overlaps lse", "workspace", ValueError, lambda a: {"workspace": a["lse"]}),
    ("workspace overlaps q", "workspace", ValueError, lambda a: {"workspace": a["q"]}),
    ("workspace overlaps the cache", "workspace", ValueError, lambda a: {"workspace": a["kv_cache"]}),
    ("validate: a length below 0", "cache_seqlens", ValueError, value("cache_seqlens", np.array([4, -1], np.int32))),
    ("validate: a length too long", "cache_seqlens", ValueError, value("cache_seqlens", np.array([8, 0], np.int32))),
    ("validate: a mask bit too far", "tree_mask", ValueError, value("tree_mask", np.full((2, 3, 1), 8, np.uint32))),
]


def as_strided(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A writable array of ``shape`` whose first axis has stride 0."""
    return np.lib.stride_tricks.as_strided(x, shape, (0, *x.strides[1:]))


@pytest.mark.parametrize(("name", "exception", "changes"), [e[1:] for e in ERRORS], ids=[e[0] for e in ERRORS])
def test_wrong_arguments(name, exception, changes):
    inputs = make_inputs(SMALL)
    out, lse = np.full((2, 3, 2, 32), 7.0, np.float32), np.full((2, 3, 2), 7.0, np.float32)
    right = arguments(inputs, out=out, lse=lse)
    wrong = right | {"validate": True} | changes(right)
    results = [x for x in (out, lse, wrong["out"], wrong["lse"]) if isinstance(x, np.ndarray)]
    before = [x.tobytes() for x in results]
    with pytest.raises(exception, match=rf"\b{name}\b") as caught:
        dd.verify_attention(**wrong)
    assert "\n" not in str(caught.value)
    assert before == [x.tobytes() for x in results], "something was written"
    check_results(dd.verify_attention(**right, variant=MIRROR), inputs)


def test_an_error_of_the_launch_leaves_the_next_call_alone():
    inputs = make_inputs(Case("next", (3,), Q=1))
    out = np.full((1, 1, 1, 32), 7.0, np.float32)
    row = long_row(shared_bytes_limit(-1))
    with pytest.raises(ValueError, match="shared memory"):
        attend(row, KERNEL, out=out)
    assert (out == 7.0).all()
    results = attend(inputs, KERNEL, out=out)
    assert results[0] is out
    check_results(results, inputs)


# Mirror and kernel are one algorithm

# Names of the mirror alone, and what stands in the kernel for them.
MIRROR_ONLY = {
    "j": "key - prefix, passed to sees()",
    "seen": "the condition around each key, by sees()",
    "terms": "each product goes straight into s",
}
SHARED_NAMES = {
    *("batch", "num_nodes", "num_heads", "kv_lora_rank", "num_pages", "page_size", "head_dim", "b", "i", "h"),
    *("prefix", "num_keys", "key", "page", "slot", "row", "q_row", "partial", "s", "scores"),
    *("m_i", "l_i", "p", "chunk", "acc"),
}
NOT_IN_READABLE_KERNELS = ("atomic", "shfl", "ballot", "syncwarp", "activemask", "match_any", "match_all", "vote")


def source_of(name: str) -> str:
    with open(three_phase.__file__, encoding="utf-8") as file:
        source = file.read()
    functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name]
    assert len(functions) == 1
    segment = ast.get_source_segment(source, functions[0])
    assert segment is not None
    return segment


def tokens(source: str, kind: int) -> list[str]:
    return [token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == kind]


def assigned_names(source: str) -> set[str]:
    nodes = ast.walk(ast.parse(source))
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def test_mirror_and_kernel_have_the_same_phases():
    comments = (tokens(source_of(name), tokenize.COMMENT) for name in ("mirror", "kernel"))
    mirror, kernel = ([c for c in found if c.startswith("# Phase ")] for found in comments)
    assert mirror == kernel
    assert [c.split(":")[0] for c in mirror] == ["# Phase 0", "# Phase 1", "# Phase 2", "# Phase 3"]


def test_mirror_and_kernel_have_the_same_parameters():
    mirror, kernel = (ast.parse(source_of(name)).body[0] for name in ("mirror", "kernel"))
    assert ast.unparse(mirror.args) == ast.unparse(kernel.args)


def test_mirror_and_kernel_use_the_same_names():
    in_mirror = assigned_names(source_of("mirror"))
    in_kernel = set(tokens(source_of("kernel"), tokenize.NAME))
    assert in_mirror - in_kernel == set(MIRROR_ONLY)
    assert in_mirror & in_kernel >= SHARED_NAMES


def test_what_only_the_gpu_needs_is_marked():
    for line in source_of("kernel").splitlines():
        assert "cuda." not in line or "  # gpu: " in line, line


def test_no_atomics_and_no_warp_intrinsics():
    with open(three_phase.__file__, encoding="utf-8") as file:
        names = set(tokens(file.read(), tokenize.NAME))
    found = [n for n in names for word in NOT_IN_READABLE_KERNELS if word in n.lower()]
    assert not found


# Wrong kernels must fail: else the comparisons above would prove nothing

TRAPS = (
    Case("ragged", (9, 15), Q=3, H=2, R=16, page_size=8, padded=1),  # as many pages as slots: a swap stays inside
    Case("empty", (0, 0), Q=3, R=16, padded=1, idle=(0,)),
    Case("chunk_border_in_a_page", (CHUNK + 2,), Q=1, R=16, page_size=3),
)


def run_changed(module: Any, inputs: dict[str, Any]) -> Results:
    out = np.full((*inputs["q"].shape[:3], inputs["kv_lora_rank"]), np.nan, np.float32)
    lse = np.full(inputs["q"].shape[:3], np.nan, np.float32)
    options: dict[str, Any] = {"max_seqlen": None, "out_dtype": None, "workspace": None, "validate": True}
    module.run(make_problem(**arguments(inputs), out=out, lse=lse, **options))
    return out, lse


@only_simulated
def test_the_kernel_without_a_mistake_passes():
    module = build()
    for case in TRAPS:
        inputs = make_inputs(case)
        check_results(run_changed(module, inputs), inputs)


@only_simulated
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_kernel_with_a_mistake_fails(mistake):
    module = build(MISTAKES[mistake])

    def check_all() -> None:
        for case in TRAPS:
            inputs = make_inputs(case)
            check_results(run_changed(module, inputs), inputs)

    with pytest.raises(AssertionError, match="FAIL"):
        check_all()


@only_simulated
@pytest.mark.parametrize("race", RACES)
def test_a_missing_barrier_shows_and_a_late_thread_alone_does_not(race):
    inputs = make_inputs(Case("race", (three_phase.KEYS_PER_PASS + 16,), Q=1, R=16))
    late = build_race(race, with_barrier=True)
    check_results(run_changed(late, inputs), inputs)
    racing = build_race(race, with_barrier=False)
    results = run_changed(racing, inputs)
    with pytest.raises(AssertionError, match="FAIL"):
        check_results(results, inputs)


@but_flash
def test_validate_takes_stale_entries_of_idle_slots_and_behind_padded_nodes(variant):
    inputs = make_inputs(Case("stale", (3, 0), Q=3, page_size=4, mask="bool", idle=(1,), padded=2))
    table = inputs["block_table"].copy()
    table[1] = -1
    mask = inputs["tree_mask"].copy()
    mask[0, 1:] = False
    table[0, 1:] = 2147480000
    attend(inputs, variant, block_table=table, tree_mask=mask, validate=True)
    mask[0, 2, 2] = True  # now row 5 is live, and with it the second page
    with pytest.raises(ValueError, match=r"block_table\[0, 1\]"):
        attend(inputs, variant, block_table=table, tree_mask=mask, validate=True)


@but_flash
def test_validate_refuses_bools_that_are_neither_0_nor_1(variant):
    inputs = make_inputs(Case("bytes", (3,), Q=2, mask="bool"))
    mask = np.full((1, 2, 2), 2, np.uint8).view(np.bool_)
    with pytest.raises(ValueError, match="tree_mask has a byte"):
        attend(inputs, variant, tree_mask=mask, validate=True)


def test_a_tree_that_alone_exceeds_shared_memory_is_refused_without_a_negative_bound():
    num_nodes = shared_bytes_limit(-1) // 4
    q = np.broadcast_to(np.float32(0), (1, num_nodes, 1, 32))
    cache = np.broadcast_to(np.float32(0), (1, num_nodes, 32))
    mask = np.broadcast_to(np.uint32(0), (1, num_nodes, -(-num_nodes // 32)))
    with pytest.raises(ValueError, match="too little for the tree alone"):
        dd.verify_attention(q, cache, np.zeros(1, np.int32), mask, sm_scale=1.0, kv_lora_rank=16, variant=KERNEL)
