"""Variant mma: mirror against oracle, kernel against mirror, and what every variant must keep, on tensor cores.

Kernels run in the simulator, with rows narrower than the kernel takes, or on a GPU where there is one. What the twins
of the instructions are worth is in test_ptx.py.
"""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import (
    DTYPES,
    Case,
    arguments,
    as_float,
    compare_lse,
    exact_results,
    make_inputs,
    pack,
    to_pages,
)
from test_verify_attention import (
    PORT_ERROR,
    Results,
    assert_same_bits,
    misaligned,
    only_simulated,
    random_mask,
    spread_out,
)
from wrong_mma import MISTAKES, TRAPS, Trap, build

import ddtree_numba as dd
from ddtree_numba.attention import flash, mma
from ddtree_numba.attention.problem import make_problem
from ddtree_numba.compare import compare
from ddtree_numba.device.runtime import SIMULATOR

MMA, MIRROR = "mma", "mma_numpy"
MODEL: dict[str, Any] = {"R": 512, "P": 64}
ROWS: dict[str, Any] = {"R": 128, "P": 64} if SIMULATOR else MODEL
without_gpu = pytest.mark.skipif(not SIMULATOR, reason="the mirror alone, which needs no GPU")
both = pytest.mark.parametrize("variant", [MMA, pytest.param(MIRROR, marks=without_gpu)])
each_tiles = pytest.mark.parametrize("tiles", [mma.SMALL, mma.MEDIUM, mma.LARGE], ids=["small", "medium", "large"])
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
SPLITS: list[dict[str, Any]] = [{}, {"num_splits": 1}, {"num_splits": 3}, {"num_splits": 9}, {"batch_invariant": True}]

# Of float32 results, relative to their norm: half of the most that one rounding of a weight is. 5.3e-4 and 6.9e-5 were
# the most seen.
BOUNDS = {"bfloat16": 2.0**-10, "uint16": 2.0**-10, "float16": 2.0**-13}


NARROW = {"R": 128, "D": 192, "PITCH": 100, "OUT_PITCH": 132, "WARPS": 4, "THREADS": 128}


@pytest.fixture(autouse=True)
def narrow_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Narrower rows and fewer warps, which the simulator allows, since it compiles nothing."""
    if not SIMULATOR or "model_width" in request.keywords:
        yield
    else:
        for name, value in NARROW.items():
            monkeypatch.setattr(mma, name, value)
        mma.make_kernel.cache_clear()
        yield
        mma.make_kernel.cache_clear()


def test_the_narrower_rows_are_laid_out_as_the_kernels_own():
    for name, value in {"D": mma.R + mma.P, "PITCH": mma.D // 2 + 4, "OUT_PITCH": mma.R + 4}.items():
        assert getattr(mma, name) == value
    assert mma.THREADS == 32 * mma.WARPS


def case(name: str, prefixes: tuple[int, ...], dtype: str = "bfloat16", **given: Any) -> Case:
    return Case(name, prefixes, dtype=dtype, **ROWS | given)


def attend(inputs: dict[str, Any], variant: str = MIRROR, **changes: Any) -> Results:
    """Results in float32, unless asked for otherwise."""
    return dd.verify_attention(**arguments(inputs, **{"out_dtype": np.float32} | changes), variant=variant)


def check_against_oracle(results: Results, inputs: dict[str, Any], bounds: dict[str, float] = BOUNDS) -> None:
    out, lse = results
    exact, exact_lse = exact_results(inputs)
    bound = bounds[str(inputs["q"].dtype)]
    if as_float(out).dtype != np.float32:
        own = as_float(out).dtype
        bound = math.hypot(bound, np.linalg.norm(exact.astype(own).astype(float) - exact) / np.linalg.norm(exact))
    compare(as_float(out), exact, name="out", rel_frobenius=bound).check()
    compare_lse(lse, exact_lse).check()
    empty = np.isneginf(exact_lse)
    assert not as_float(out)[empty].any() and np.isneginf(lse[empty]).all()


def check(inputs: dict[str, Any], variant: str = MIRROR, **options: Any) -> Results:
    """Attend, against the oracle; in the simulator the kernel must also agree with the mirror but for float32."""
    results = attend(inputs, variant, **options)
    check_against_oracle(results, inputs)
    if variant == MMA and SIMULATOR:
        mirrored = attend(inputs, MIRROR, **options)
        if results[0].dtype == np.float32:
            compare(results[0], mirrored[0], name="kernel against mirror", rel_frobenius=PORT_ERROR).check()
        else:
            compare(as_float(results[0]), as_float(mirrored[0]), name="kernel against mirror", max_ulp=1.0).check()
        compare_lse(results[1], mirrored[1].astype(np.float64), PORT_ERROR).check()
    return results


# Against the oracle

# Those of the model's widths in float32; `python -m ddtree_numba check` has those in 16 bits.
REFERENCES = sorted(
    path for path in Path(__file__).parent.parent.glob("refs/verify_attn_h*.kdtr") if not path.stem.endswith("f16")
)


def reference_inputs(path: Path, dtype: str) -> dict[str, Any]:
    """A reference file's inputs, rounded to a format; its own results are those of other inputs."""
    found = dd.kdtr.read(path)
    found = {name: x.item() if name in ("sm_scale", "kv_lora_rank") else x for name, x in found.items()}
    rounded = {name: found[name].astype(DTYPES[dtype]) for name in ("q", "kv_cache")}
    return {"block_table": None} | found | rounded


@each_dtype
@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
@pytest.mark.model_width
@without_gpu
def test_reference_files_in_the_mirror(path, dtype):
    assert len(REFERENCES) == 6
    inputs = reference_inputs(path, dtype)
    if "p2048" in path.stem:  # all of it takes seconds
        inputs["q"] = inputs["q"][:, :, ::16]
    check(inputs, num_splits=None if dtype == "bfloat16" else 2)


@each_dtype
@pytest.mark.parametrize("logit_std", [0.02, 3.0, 12.0])
@pytest.mark.parametrize("prefixes", [(5,), (40, 17, 0), (300,)], ids=str)
@pytest.mark.model_width
@without_gpu
def test_mirror_at_the_widths_of_the_model(prefixes, logit_std, dtype):
    inputs = make_inputs(case("model", prefixes, dtype, Q=9, H=3, logit_std=logit_std, **MODEL))
    for options in ({}, {"num_splits": 3}):
        check(inputs, **options)


@each_dtype
@pytest.mark.model_width
@without_gpu
def test_a_long_prefix_in_the_mirror(dtype):
    check(make_inputs(case("long", (1500,), dtype, Q=2, logit_std=3.0, **MODEL)))


@pytest.mark.parametrize(
    ("dtype", "options"), [("bfloat16", {}), ("float16", {"num_splits": 1})], ids=["bfloat16", "float16"]
)
@pytest.mark.model_width
def test_kernel_at_the_widths_of_the_model(dtype, options):
    check(make_inputs(case("model", (14,), dtype, Q=5, H=2, page_size=3, **MODEL)), MMA, **options)


@each_tiles
@pytest.mark.model_width
@pytest.mark.parametrize("Q", [1, 3])
@pytest.mark.parametrize("options", SPLITS, ids=str)
@without_gpu
def test_lengths_around_tiles_in_the_mirror(monkeypatch, tiles, Q, options):
    monkeypatch.setattr(mma, "TILES", (tiles,))
    N = tiles.keys
    lengths = {0, 1, *(n * N + k - own for n in (1, 2) for k in (-1, 0, 1) for own in (0, Q))}
    check(make_inputs(case("around", tuple(sorted(n for n in lengths if n >= 0)), Q=Q, **MODEL)), **options)


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}], ids=str)
def test_lengths_around_tiles(options):
    N = mma.SMALL.keys
    check(make_inputs(case("around", (0, N - 2, N - 1, 2 * N - 2), Q=2)), MMA, **options)


@pytest.mark.parametrize("tiles", [mma.MEDIUM, mma.LARGE], ids=["medium", "large"])
@pytest.mark.model_width
@only_simulated
def test_larger_tiles_in_the_simulator(monkeypatch, tiles):
    monkeypatch.setattr(mma, "TILES", (tiles,))
    check(make_inputs(case("large_tiles", (tiles.keys + 3,), Q=2, H=23, logit_std=12.0, **MODEL)), MMA, num_splits=1)


@pytest.mark.parametrize(
    ("limit", "capability", "expected"),
    [(227, (9, 0), mma.LARGE), (227, (10, 0), mma.LARGE), (163, (8, 0), mma.MEDIUM), (99, (8, 6), mma.SMALL)],
    ids=str,
)
@pytest.mark.model_width
def test_the_largest_tiles_that_fit_are_taken(monkeypatch, limit, capability, expected):
    monkeypatch.setattr(mma, "TILES", (mma.LARGE, mma.MEDIUM, mma.SMALL))
    monkeypatch.setattr(mma, "shared_bytes_limit", lambda device: limit * 1024)
    monkeypatch.setattr(mma, "compute_capability", lambda device: capability)
    options: dict[str, Any] = {"device": -1, "num_splits": None, "batch_invariant": False}
    assert mma.make_plan(1, 9, 64, 512, 576, 100, **options).tiles == expected


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [("bfloat16", None), ("float16", None), ("uint16", None), ("float16", "bfloat16"), ("bfloat16", "float16")],
    ids=str,
)
def test_formats(dtype, out_dtype):
    inputs = make_inputs(case("formats", (9,), dtype, Q=3))
    out, _ = check(inputs, MMA, out_dtype=out_dtype)
    assert out.dtype == (inputs["q"].dtype if out_dtype is None else DTYPES[out_dtype])


@pytest.mark.parametrize("options", SPLITS, ids=str)
@pytest.mark.parametrize("given", [{"prefixes": (70, 0, 3, 33), "Q": 3, "H": 2}, {"prefixes": (300,), "Q": 5, "H": 17}])
@without_gpu
def test_splits_in_the_mirror(given, options):
    check(make_inputs(case("splits", **given)), **options)


@pytest.mark.parametrize("num_splits", [2, 3])
def test_splits(num_splits):
    # Two key tiles and one: with three parts there are some without keys.
    check(make_inputs(case("splits", (20, 1), Q=2)), MMA, num_splits=num_splits)


@pytest.mark.parametrize("num_blocks", [*range(1, 12), 19, 29, 39])
@without_gpu
def test_any_number_of_blocks_in_the_mirror(num_blocks):
    inputs = make_inputs(case("blocks", (70, 0, 3, 33, 0), Q=3, H=17))
    out, lse, plan, problem = planned(inputs)
    mma.run_mirror(problem, plan._replace(num_blocks=num_blocks))
    check_against_oracle((out, lse), inputs)


def planned(inputs: dict[str, Any], module: Any = mma, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Spoiled results, the plan and the checked arguments of a call; the workspace holds NaN."""
    out = np.full((*inputs["q"].shape[:3], inputs["kv_lora_rank"]), np.nan, np.float32)
    lse = np.full(inputs["q"].shape[:3], np.nan, np.float32)
    workspace = np.full(2**19, np.nan, np.float32)
    given: dict[str, Any] = {"max_seqlen": None, "out_dtype": None, "workspace": workspace, "validate": True}
    problem = make_problem(**arguments(inputs), out=out, lse=lse, **given)
    options = {"num_splits": None, "batch_invariant": False} | options
    return out, lse, module.plan_of(problem, **options), problem


def test_even_parts_of_all_work_cut_row_tiles_and_requests_anywhere():
    # 2 row tiles of 3 and of 1 key tiles on three blocks in the simulator.
    check(make_inputs(case("shares", (40, 5), Q=3, H=11)), MMA)


# The reference that lags


def rising(step: float) -> dict[str, Any]:
    """Scores that rise with the key, by ``step`` nats a key; queries and keys are exact in bfloat16."""
    inputs = make_inputs(case("rising", (60,), Q=1))
    q, cache = np.zeros_like(inputs["q"]), inputs["kv_cache"].copy()
    q[..., -1] = 1
    cache[0, :61, -1] = np.arange(61)
    return inputs | {"q": q, "kv_cache": cache, "sm_scale": step}


@pytest.mark.parametrize("step", [0.01, 0.1, 1.0, 40.0])
@without_gpu
def test_rising_scores_in_the_mirror(step):
    for options in SPLITS:
        check(rising(step), **options)


@pytest.mark.parametrize("step", [0.1, 1.0])
def test_rising_scores(step):
    check(rising(step), MMA, num_splits=1)


@without_gpu
def test_weights_below_the_lag_are_not_rescaled():
    """The result of a reference that never lags differs in the last bits: so it does lag, and both are right."""
    lagging = check(rising(0.1))
    previous, mma.LAG = mma.LAG, np.float32(0)
    try:
        following = check(rising(0.1))
    finally:
        mma.LAG = previous
    assert (lagging[0] != following[0]).any()


@pytest.mark.parametrize("score", [-6e4, 6e4, -1e30, 1e30])
@without_gpu
def test_logits_far_from_zero_in_the_mirror(score):
    inputs = make_inputs(case("far", (60,), Q=2))
    inputs["q"][:] = math.copysign(1.0, score)
    inputs["kv_cache"][:] = 1
    inputs["sm_scale"] = abs(score) / inputs["q"].shape[3]
    for options in SPLITS:
        out, lse = attend(inputs, **options)
        np.testing.assert_array_equal(out, 1)
        np.testing.assert_allclose(lse, score, rtol=1e-3)


def test_logits_of_magnitude_1e4():
    inputs = make_inputs(case("huge", (30,), Q=3, logit_std=1e4))
    out, lse = attend(inputs, MMA)
    exact, exact_lse = exact_results(inputs)
    compare(out, exact, rel_frobenius=2.0**-10).check()
    compare_lse(lse, exact_lse).check()


# Masks and rows


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("num_nodes", [1, 2, 31, 32, 33, 64, 65])
@without_gpu
def test_each_mask_bit_in_the_mirror(num_nodes, prefix):
    mask = random_mask(num_nodes, batch=2)
    for given in (mask, pack(mask)):
        assert_output_is_the_mask(attend(mask_problem(mask, prefix), tree_mask=given), mask, prefix)


@pytest.mark.parametrize("packed", [True, False])
def test_each_mask_bit(packed):
    mask = random_mask(35)
    results = attend(mask_problem(mask, 2), MMA, tree_mask=pack(mask) if packed else mask)
    assert_output_is_the_mask(results, mask, 2)


def mask_problem(mask: np.ndarray, prefix: int) -> dict[str, Any]:
    """Row k of the cache is the k-th unit vector, q is 0: output k of a node is 1/n if it sees key k, of n keys."""
    batch, num_nodes = mask.shape[:2]
    num_keys = prefix + num_nodes
    cache = np.zeros((batch, num_keys, ROWS["R"] + 64), np.float16)
    cache[..., :num_keys] = np.eye(num_keys)
    return {
        "q": np.zeros((batch, num_nodes, 1, ROWS["R"] + 64), np.float16),
        "kv_cache": cache,
        "cache_seqlens": np.full(batch, prefix, np.int32),
        "tree_mask": mask,
        "block_table": None,
        "sm_scale": 1.0,
        "kv_lora_rank": ROWS["R"],
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


@both
def test_nodes_that_see_themselves_alone_get_their_own_row(variant):
    num_nodes = 20  # in two key tiles
    inputs = make_inputs(case("alone", (0,), Q=num_nodes))
    eye = np.eye(num_nodes, dtype=np.bool_)[None]
    own = inputs["kv_cache"][:, :num_nodes, None, : ROWS["R"]].astype(np.float32)
    for options in SPLITS if variant == MIRROR else [{}, {"num_splits": 3}]:
        out, lse = attend(inputs, variant, tree_mask=pack(eye), **options)
        np.testing.assert_array_equal(out, own)
        compare_lse(lse, exact_results(inputs | {"tree_mask": eye})[1]).check()


@both
@pytest.mark.parametrize("options", [{}, {"num_splits": 2}], ids=str)
def test_rows_and_requests_that_see_nothing(variant, options):
    inputs = make_inputs(case("nothing", (0, 0, 16), Q=3, padded=1, idle=(1,)))
    assert np.isnan(inputs["kv_cache"][1].astype(np.float32)).all()
    out, lse = check(inputs, variant, **options)
    for rows in (out[0, 2], out[1]):
        assert not rows.any() and not np.signbit(rows).any(), "0, not -0"
    assert np.isneginf(lse[0, 2]).all() and np.isneginf(lse[1]).all()


@without_gpu
def test_rows_that_see_nothing_until_the_last_tile():
    num_nodes = 70
    inputs = make_inputs(case("late", (0,), Q=num_nodes))
    mask = np.tril(np.ones((1, num_nodes, num_nodes), np.bool_))
    mask[:, ::2, :64] = False
    mask[:, 1::2, 33:] = False
    for options in SPLITS:
        check(inputs | {"tree_mask": mask}, **options)


def test_a_tree_of_more_than_two_words_and_padding():
    inputs = make_inputs(case("words", (3,), Q=65, padded=2))
    check(inputs)
    if not SIMULATOR:
        check(inputs, MMA)


# One problem in several ways: the same bits


@both
def test_masks_pages_and_pairs_do_not_change_a_bit(variant):
    inputs = make_inputs(case("ways", (18, 1), Q=4, mask="bool"))
    expected = attend(inputs, variant)
    pages, table = to_pages(
        inputs["kv_cache"].astype(np.float32), inputs["cache_seqlens"] + 4, 3, np.random.default_rng(3)
    )
    paged = {"kv_cache": pages.astype(inputs["kv_cache"].dtype), "block_table": table}
    assert_same_bits(attend(inputs | paged, variant, tree_mask=pack(inputs["tree_mask"]), validate=True), expected)
    rank = ROWS["R"]
    pair = inputs["q"][..., :rank], np.ascontiguousarray(inputs["q"][..., rank:])
    assert_same_bits(attend(inputs, variant, q=pair, kv_cache=inputs["kv_cache"][:, :, None]), expected)


@both
def test_strides_that_allow_reads_of_sixteen_bytes(variant):
    inputs = make_inputs(case("strides", (5, 17), Q=3, H=2))
    expected = attend(inputs, variant)

    def apart(x: np.ndarray) -> np.ndarray:
        """Every axis but the last with other elements in between, in the reverse order."""
        big = np.full([2 * n for n in x.shape[:-1]] + [x.shape[-1] + 8], np.nan, x.dtype)
        inner = big[tuple(slice(None, None, -2) for _ in x.shape[:-1])][..., 8:]
        inner[...] = x
        return inner

    lengths, mask = (spread_out(inputs[name]) for name in ("cache_seqlens", "tree_mask"))
    moved = {"q": apart(inputs["q"]), "kv_cache": apart(inputs["kv_cache"]), "cache_seqlens": lengths}
    whole = np.full((4, 6, 5, 2 * ROWS["R"]), np.nan, np.float32)
    out = whole[1::2, ::2, 3:0:-2, 1::2]
    lse = np.full((2, 2, 3), np.nan, np.float32).swapaxes(1, 2)
    results = attend(inputs | moved, variant, tree_mask=mask, out=out, lse=lse, out_dtype=None)
    assert results[0] is out and results[1] is lse
    assert_same_bits(results, expected)
    assert np.count_nonzero(~np.isnan(whole)) == out.size, "something was written beside the results"


@pytest.mark.parametrize("options", [{"num_splits": 2}, {"batch_invariant": True}], ids=str)
@without_gpu
def test_bits_do_not_depend_on_other_lengths_in_the_mirror(monkeypatch, options):
    monkeypatch.setattr(flash, "CHUNK", 32)
    inputs = make_inputs(case("others", (90, 0, 33, 64), Q=3, H=7))
    expected = attend(inputs, **options)
    for b, length in ((0, 1), (0, 40), (2, 10), (3, 5)):
        lengths = inputs["cache_seqlens"].copy()
        lengths[b] = length
        others = [n for n in range(4) if n != b]
        results = attend(inputs, cache_seqlens=lengths, **options)
        assert_same_bits(tuple(x[others] for x in results), tuple(x[others] for x in expected))


def test_chunks_and_the_same_bits_in_every_run(monkeypatch):
    monkeypatch.setattr(flash, "CHUNK", 32)
    inputs = make_inputs(case("chunks", (40, 5), Q=2))
    expected = check(inputs, MMA, batch_invariant=True)
    assert_same_bits(attend(inputs, MMA, batch_invariant=True), expected)


# What must not be read, and what may not spread


@both
def test_nan_behind_the_last_row_and_in_unused_pages(variant):
    inputs = make_inputs(case("poison", (17, 2), Q=2, page_size=8, slack=20))
    table = inputs["block_table"].copy()
    used = -(-(inputs["cache_seqlens"] + 2) // 8)
    for b in range(2):
        assert np.isnan(inputs["kv_cache"][table[b, used[b] - 1], 4:].astype(np.float32)).all()
        table[b, used[b] :] = 2147480000
    clean = np.nan_to_num(inputs["kv_cache"].astype(np.float32)).astype(inputs["kv_cache"].dtype)
    expected = attend(inputs | {"kv_cache": clean}, variant)
    assert_same_bits(attend(inputs, variant, block_table=table, validate=True), expected)
    check_against_oracle(expected, inputs)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@both
def test_nan_queries_and_rows_stay_where_they_are(variant):
    inputs = make_inputs(case("nan", (20, 3), Q=5))
    expected = attend(inputs, variant)
    q, cache = inputs["q"].copy(), inputs["kv_cache"].copy()
    q[0, 1, 0, 3] = np.nan
    q[0, 3] = np.inf
    cache[1, 4] = np.nan
    out, lse = attend(inputs, variant, q=q, kv_cache=cache)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 1]).all()
    others = [0, 2, 4]
    assert_same_bits((out[0, others], lse[0, others]), (expected[0][0, others], expected[1][0, others]))


# What is refused


@pytest.mark.parametrize("variant", [MMA, MIRROR])
@pytest.mark.model_width
def test_other_formats_widths_and_strides_are_refused(variant):
    inputs = make_inputs(case("refused", (3,), Q=2, **MODEL))
    narrow = make_inputs(case("refused", (3,), Q=2, R=256, P=64))
    cache = np.zeros((1, 8, 580), inputs["q"].dtype)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, r"kv_lora_rank = 512 and D = 576 alone \(here they are 256 and 320\)", narrow),
        (TypeError, "both bfloat16 or both float16; here .* float32", {"q": inputs["q"].astype(np.float32)}),
        (TypeError, "here they are bfloat16 and float16", {"kv_cache": inputs["kv_cache"].astype(np.float16)}),
        (ValueError, "kv_cache .* reads 16 bytes", {"kv_cache": cache[..., :576]}),
        (ValueError, "q .* reads 16 bytes", {"q": np.zeros((1, 2, 1, 1152), inputs["q"].dtype)[..., ::2]}),
        (ValueError, "at an address 2 above", {"kv_cache": cache.reshape(-1)[1 : 1 + 8 * 576].reshape(1, 8, 576)}),
        (ValueError, "workspace has 64 bytes", {"workspace": np.zeros(16, np.float32)}),
        (ValueError, "num_splits is 2147483648; a grid holds", {"num_splits": 2**31}),
    ]
    for error, message, change in wrong:
        given = {name: x for name, x in change.items() if name != "parents"}
        with pytest.raises(error, match=message):
            attend(inputs, variant, **given)
    with pytest.raises(ValueError, match="q .* is not aligned"):
        attend(inputs, variant, q=misaligned(inputs["q"]))


@pytest.mark.model_width
def test_gpus_without_the_instructions_or_the_memory_are_refused(monkeypatch):
    inputs = make_inputs(case("refused", (3,), Q=2, **MODEL))
    for name, answer in (("compute_capability", (7, 5)), ("shared_bytes_limit", 64 * 1024)):
        with monkeypatch.context() as patch:
            patch.setattr(mma, name, lambda device, answer=answer: answer)
            with pytest.raises(ValueError, match="needs compute capability 8.0 or later and 85552 bytes"):
                attend(inputs, MMA)


# Workspace


@both
@pytest.mark.parametrize("options", [SPLITS[0], SPLITS[2]], ids=str)
def test_a_workspace_of_just_the_bytes_that_it_needs(variant, options):
    inputs = make_inputs(case("workspace", (17, 1), Q=2))
    batch, num_nodes, num_heads, _ = inputs["q"].shape
    sizes = (batch, num_nodes, num_heads, inputs["kv_cache"].shape[1] - num_nodes)
    nbytes = dd.workspace_bytes(*sizes, kv_lora_rank=ROWS["R"], **options, variant=variant)
    assert nbytes % 16 == 0
    expected = attend(inputs, variant, **options)
    memory = np.full(nbytes + 64, 0xFF, np.uint8)  # NaN, as float32
    start = -memory.ctypes.data % 16
    memory, behind = memory[start : start + nbytes], memory[start + nbytes :]
    assert_same_bits(attend(inputs, variant, workspace=memory, **options), expected)
    assert (behind == 0xFF).all(), "something was written behind the workspace"
    with pytest.raises(ValueError, match=r"workspace has 16 bytes; it must have at least \d+"):
        attend(inputs, variant, workspace=memory[:16], **options)


# Mirror, kernel and page are one algorithm


def test_mirror_kernel_and_page_have_the_same_phases():
    page = (Path(__file__).parent.parent / "docs" / "mma.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`(# Phase \d: [^`]*)`", page)
    assert [phase[:9] for phase in quoted] == [f"# Phase {n}" for n in range(6)]
    for function in (mma.mirror, mma.make_kernel):
        assert re.findall(r"^ +(# Phase \d: .*)$", inspect.getsource(inspect.unwrap(function)), re.M) == quoted


@pytest.mark.model_width
def test_the_sizes_on_the_page():
    page = (Path(__file__).parent.parent / "docs" / "mma.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(LARGE|MEDIUM|SMALL)` \| (.*) \| with", page, re.M)
    assert len(rows) == 3
    for name, sizes in rows:
        tiles = getattr(mma, name)
        found = [int(size.replace(",", "")) for size in sizes.split(" | ")]
        assert found == [*tiles, mma.column_shares(tiles), mma.shared_bytes(tiles)]
    assert f"`LAG` = {mma.LAG:.0f}:" in page
    M, N, pitch = *mma.LARGE[:2], mma.PITCH
    places = (M * pitch, (M + N) * pitch, (M + 2 * N) * pitch, (M + 2 * N) * pitch + 2 * M * (N + 4))
    assert all(f"word {place}" in page for place in places)


# Wrong kernels must fail: else the comparisons above would prove nothing


def spring(trap: Trap, module: Any) -> None:
    """Raise AssertionError unless the kernels of a module solve the trap's problem."""
    inputs = make_inputs(trap.case)
    out, lse, plan, problem = planned(inputs, module, **trap.options)
    module.run(problem, plan)
    check_against_oracle((out, lse), inputs)


@only_simulated
@pytest.mark.parametrize("trap", TRAPS)
def test_kernels_without_a_mistake_pass(trap):
    spring(TRAPS[trap], build())


@only_simulated
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("trap", "mistake"), [(trap, mistake) for trap in MISTAKES for mistake in MISTAKES[trap]])
def test_kernels_with_a_mistake_fail(trap, mistake):
    with pytest.raises((AssertionError, IndexError), match=r"FAIL|out of bounds|assert"):
        spring(TRAPS[trap], build(*MISTAKES[trap][mistake]))
