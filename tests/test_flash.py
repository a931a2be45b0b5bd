"""Variant flash: what is its own. Tiles, splits, folded sums, workspace, parts of the keys, and the prefix and tail.

What every variant must keep is in test_verify_attention.py. Kernels run in the simulator, or on a GPU where there is
one; there, each combination of dtypes, layouts and widths is compiled, so these tests have few of them.
"""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
from cases import (
    Case,
    arguments,
    check_results,
    compare_lse,
    error_bound,
    exact_results,
    make_inputs,
    pack,
)
from test_verify_attention import (
    PORT_ERROR,
    Results,
    assert_same_bits,
    attend,
    misaligned,
    only_simulated,
    spread_out,
)
from wrong_flash import MISTAKES, TRAPS, Trap, build

import ddtree_numba as dd
from ddtree_numba.attention import flash, three_phase
from ddtree_numba.attention.problem import make_problem
from ddtree_numba.compare import compare
from ddtree_numba.device.launch import multiprocessors
from ddtree_numba.device.runtime import SIMULATOR

FLASH, MIRROR = "flash", "flash_numpy"
without_gpu = pytest.mark.skipif(not SIMULATOR, reason="the mirror alone, which needs no GPU")
both = pytest.mark.parametrize("variant", [FLASH, pytest.param(MIRROR, marks=without_gpu)])
each_tiles = pytest.mark.parametrize("tiles", [flash.SMALL, flash.LARGE], ids=["small", "large"])
SPLITS: list[dict[str, Any]] = [
    {},
    {"num_splits": 1},
    {"num_splits": 2},
    {"num_splits": 3},
    {"num_splits": 9},
    {"batch_invariant": True},
]
INVARIANT = [SPLITS[1], SPLITS[2], SPLITS[5]]


@pytest.fixture(autouse=True)
def small_tiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the simulator: of the large ones, test_flash_gpu.py compiles a kernel or two."""
    monkeypatch.setattr(flash, "TILES", (flash.SMALL,))


def check(inputs: dict[str, Any], variant: str = MIRROR, **options: Any) -> Results:
    """Attend, against the oracle; in the simulator the kernel must also agree with the mirror but for a bit of exp."""
    results = attend(inputs, variant, **options)
    check_results(results, inputs, FLASH)
    if variant == FLASH and SIMULATOR:
        mirrored = attend(inputs, MIRROR, **options)
        compare(results[0], mirrored[0], name="kernel against mirror", rel_frobenius=PORT_ERROR).check()
        compare_lse(results[1], mirrored[1].astype(np.float64), PORT_ERROR).check()
    return results


# Lengths around tiles


@each_tiles
@pytest.mark.parametrize("Q", [1, 3])
@pytest.mark.parametrize("options", SPLITS, ids=str)
@without_gpu
def test_lengths_around_tiles_in_the_mirror(monkeypatch, tiles, Q, options):
    monkeypatch.setattr(flash, "TILES", (tiles,))
    N = tiles.keys
    lengths = {0, 1, *(n * N + k - own for n in (1, 2) for k in (-1, 0, 1) for own in (0, Q))}
    check(make_inputs(Case("around", tuple(sorted(n for n in lengths if n >= 0)), Q=Q)), **options)


@pytest.mark.parametrize("options", [{}, {"num_splits": 1}], ids=str)
def test_lengths_around_tiles(options):
    N = flash.SMALL.keys
    prefixes = (0, N - 2, N - 1) if SIMULATOR else (0, 1, N - 2, N - 1, N, N + 1, 2 * N - 2, 2 * N - 1, 2 * N)
    check(make_inputs(Case("around", prefixes, Q=2)), FLASH, **options)


@only_simulated
def test_large_tiles_in_the_simulator(monkeypatch):
    monkeypatch.setattr(flash, "TILES", (flash.LARGE,))
    N = flash.LARGE.keys
    check(make_inputs(Case("large_tiles", (N - 2,), Q=2, H=33)), FLASH, num_splits=1)  # two row tiles, one key tile
    check(make_inputs(Case("large_tiles", (N - 1,), Q=2)), FLASH, num_splits=2)


@pytest.mark.parametrize(("capability", "expected"), [((8, 0), [16]), ((9, 0), [64, 16]), ((10, 0), [16])])
def test_large_tiles_are_for_compute_capability_9(monkeypatch, capability, expected):
    monkeypatch.setattr(flash, "TILES", (flash.LARGE, flash.SMALL))
    monkeypatch.setattr(flash, "compute_capability", lambda device: capability)
    assert [tiles.rows for tiles in flash.fitting_tiles(512, 576, -1)] == expected


@each_tiles
@without_gpu
def test_seventeen_nodes_of_nine_heads_in_the_mirror(monkeypatch, tiles):
    monkeypatch.setattr(flash, "TILES", (tiles,))
    for prefixes in ((0, 40), (7, 0, 100)):
        for options in SPLITS:
            check(make_inputs(Case("17x9", prefixes, Q=17, H=9)), **options)


def test_seventeen_nodes_of_nine_heads():
    check(make_inputs(Case("17x9", (0,), Q=17, H=9)), FLASH, num_splits=1)


@pytest.mark.parametrize("options", [{}, {"num_splits": 2}], ids=str)
def test_more_nodes_than_prefix(options):
    inputs = make_inputs(Case("long_tree", (1,), Q=18))
    check(inputs, MIRROR, **options)
    check(inputs, FLASH, **options)


# Splits


@pytest.mark.parametrize("options", SPLITS, ids=str)
@pytest.mark.parametrize("case", [Case("splits", (70, 0, 3, 33), Q=3, H=2), Case("splits", (300,), Q=5, H=7)])
@without_gpu
def test_splits_in_the_mirror(case, options):
    check(make_inputs(case), **options)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 5])
def test_splits(num_splits):
    # Two key tiles and one: with three parts and more there are some without keys.
    check(make_inputs(Case("splits", (20, 1), Q=2)), FLASH, num_splits=num_splits)


def test_even_parts_of_all_work_cut_row_tiles_and_requests_anywhere():
    # 3 * 2 pairs and 1 * 2 pairs, on six blocks in the simulator: some blocks have an end, and a beginning.
    inputs = make_inputs(Case("shares", (40, 5), Q=2, H=9))
    if SIMULATOR:
        assert multiprocessors(-1) * flash.SMALL.blocks == 6
    check(inputs, FLASH)


@pytest.mark.parametrize("num_blocks", range(1, 40))
@without_gpu
def test_any_number_of_blocks_in_the_mirror(num_blocks):
    inputs = make_inputs(Case("blocks", (70, 0, 3, 33, 0), Q=3, H=7))
    out, lse, plan, problem = planned(inputs)
    flash.run_mirror(problem, plan._replace(num_blocks=num_blocks))
    check_results((out, lse), inputs, FLASH)


def planned(inputs: dict[str, Any], part: int = flash.ALL, **options: Any) -> tuple[Any, Any, flash.Plan, Any]:
    """Spoiled results, the plan and the checked arguments of a call; the workspace holds NaN."""
    out = np.full((*inputs["q"].shape[:3], inputs["kv_lora_rank"]), np.nan, np.float32)
    lse = np.full(inputs["q"].shape[:3], np.nan, np.float32)
    workspace = np.full(2**18, np.nan, np.float32)
    given: dict[str, Any] = {"max_seqlen": None, "out_dtype": None, "workspace": workspace, "validate": True}
    problem = make_problem(**arguments(inputs), out=out, lse=lse, **given)
    options = {"num_splits": None, "batch_invariant": False} | options
    return out, lse, flash.plan_of(problem, part=part, **options), problem


def test_more_parts_than_a_grid_holds_are_refused():
    inputs = make_inputs(Case("grid", (3,), Q=2))
    with pytest.raises(ValueError, match="num_splits is 2147483648; a grid holds at most 2147483647 for 1 row tiles"):
        attend(inputs, FLASH, num_splits=2**31)


# Fixed borders: a row's bits depend on its own request alone


@pytest.mark.parametrize("chunk", [16, 32, 64])
@without_gpu
def test_chunks_in_the_mirror(monkeypatch, chunk):
    monkeypatch.setattr(flash, "CHUNK", chunk)
    check(make_inputs(Case("chunks", (70, 0, 20, 29, 30, 31, 62, 63), Q=2)), batch_invariant=True)


def test_chunks(monkeypatch):
    monkeypatch.setattr(flash, "CHUNK", 32)
    check(make_inputs(Case("chunks", (40, 5), Q=2)), FLASH, batch_invariant=True)


@pytest.mark.parametrize("options", INVARIANT, ids=str)
@without_gpu
def test_bits_do_not_depend_on_other_lengths_in_the_mirror(monkeypatch, options):
    monkeypatch.setattr(flash, "CHUNK", 32)
    inputs = make_inputs(Case("others", (90, 0, 33, 64), Q=3, H=7))
    expected = attend(inputs, MIRROR, **options)
    for b, length in ((0, 1), (0, 40), (1, 0), (2, 10), (3, 5)):
        lengths = inputs["cache_seqlens"].copy()
        lengths[b] = min(length, lengths[b])
        others = [n for n in range(4) if n != b]
        results = attend(inputs, MIRROR, cache_seqlens=lengths, **options)
        assert_same_bits(tuple(x[others] for x in results), tuple(x[others] for x in expected))


@without_gpu
def test_bits_do_not_depend_on_the_batch_in_the_mirror(monkeypatch):
    monkeypatch.setattr(flash, "CHUNK", 32)
    inputs = make_inputs(Case("others", (90, 0, 33, 64), Q=3, H=7))
    expected = attend(inputs, MIRROR, batch_invariant=True)
    names = ("q", "kv_cache", "cache_seqlens", "tree_mask")
    for kept in ([0], [3], [2, 1], [3, 2, 1, 0], [0, 0, 1, 2, 3, 3]):
        moved = {name: inputs[name][kept] for name in names}
        for max_seqlen in (None, int(moved["cache_seqlens"].max())):
            results = attend(inputs, MIRROR, **moved, batch_invariant=True, max_seqlen=max_seqlen)
            assert_same_bits(results, tuple(x[kept] for x in expected))


@pytest.mark.parametrize("options", INVARIANT, ids=str)
def test_bits_do_not_depend_on_other_lengths(monkeypatch, options):
    monkeypatch.setattr(flash, "CHUNK", 32)
    inputs = make_inputs(Case("others", (40, 17), Q=2))
    expected = attend(inputs, FLASH, **options)
    results = attend(inputs, FLASH, cache_seqlens=np.array([40, 2], np.int32), **options)
    assert_same_bits(tuple(x[:1] for x in results), tuple(x[:1] for x in expected))
    if "batch_invariant" in options:
        alone = {name: inputs[name][1:] for name in ("q", "kv_cache", "cache_seqlens", "tree_mask")}
        assert_same_bits(attend(inputs, FLASH, **alone, **options), tuple(x[1:] for x in expected))


# Folded sums


@each_tiles
@pytest.mark.parametrize("fold", [1, 2, 3, 16])
@without_gpu
def test_folded_sums_in_the_mirror(monkeypatch, tiles, fold):
    monkeypatch.setattr(flash, "TILES", (tiles,))
    monkeypatch.setattr(flash, "FOLD", fold)
    inputs = make_inputs(Case("folded", (tiles.keys * 7 - 2, 3), Q=3, logit_std=3.0))
    for options in SPLITS:
        check(inputs, **options)


@only_simulated  # in a compiled kernel FOLD is a constant; the GPU's tests have prefixes of more tiles
@pytest.mark.parametrize(("fold", "options"), [(2, {"num_splits": 1}), (1, {"num_splits": 2})], ids=str)
def test_folded_sums(monkeypatch, fold, options):
    monkeypatch.setattr(flash, "FOLD", fold)
    flash.make_kernel.cache_clear()
    check(make_inputs(Case("folded", (62,), Q=3, logit_std=3.0)), FLASH, **options)
    flash.make_kernel.cache_clear()


@without_gpu
def test_errors_of_long_prefixes_grow_no_faster_than_derived():
    bounds = []
    for length in (400, 6400):
        inputs = make_inputs(Case("long", (length,), Q=2, logit_std=0.5))
        out, _ = attend(inputs, MIRROR, num_splits=1)
        exact, _ = exact_results(inputs)
        bounds.append(error_bound(inputs, "flash"))
        assert np.linalg.norm(out - exact) / np.linalg.norm(exact) < bounds[-1]
    assert bounds[1] < 1.5 * bounds[0]  # one long sum would double it with each factor of 4


# Extreme logits


def constant_scores(score: float, Q: int = 2, prefix: int = 20) -> dict[str, Any]:
    """All logits lie within a few nats of ``score``."""
    inputs = make_inputs(Case("constant", (prefix,), Q=Q))
    rng = np.random.default_rng(1)
    inputs["q"][:] = np.float32(math.copysign(1.0, score))
    cache = 1.0 + 1e-5 * rng.standard_normal(inputs["kv_cache"].shape)
    inputs["kv_cache"] = cache.astype(np.float32)
    inputs["sm_scale"] = abs(score) / inputs["q"].shape[3]
    return inputs


EXTREMES = (-6e4, 6e4, -1e30, 1e30)


@pytest.mark.parametrize("score", EXTREMES)
@pytest.mark.parametrize("options", SPLITS, ids=str)
@without_gpu
def test_logits_far_from_zero_in_the_mirror(score, options):
    inputs = constant_scores(score, prefix=60)
    if abs(score) < 1e6:
        check(inputs, **options)
    else:  # the winner takes all; which one it is, is beyond float32
        out, lse = attend(inputs, MIRROR, **options)
        assert np.isfinite(out).all() and np.isfinite(lse).all()
        np.testing.assert_allclose(out, 1.0, atol=1e-3)


@pytest.mark.parametrize(("score", "options"), [(-6e4, {}), (6e4, {"num_splits": 1}), (-1e30, {"num_splits": 2})])
def test_logits_far_from_zero(score, options):
    inputs = constant_scores(score)
    out, lse = attend(inputs, FLASH, **options)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    np.testing.assert_allclose(lse, score, rtol=1e-3)
    if abs(score) < 1e6:
        check_results((out, lse), inputs, FLASH)


@both
def test_logits_of_magnitude_1e4(variant):
    inputs = make_inputs(Case("huge_logits", (30,), Q=3, logit_std=1e4))
    for options in SPLITS if variant == MIRROR else [{}]:
        check(inputs, variant, **options)


# Non-finite contents


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@both
def test_nan_queries_stay_in_their_row(variant):
    inputs = make_inputs(Case("nan_queries", (20,), Q=5))
    q = inputs["q"].copy()
    q[0, 1, 0, 3] = np.nan
    q[0, 3] = np.inf
    others = [0, 2, 4]
    for options in SPLITS if variant == MIRROR else [{}, {"num_splits": 1}]:
        expected = attend(inputs, variant, **options)
        out, lse = attend(inputs, variant, q=q, **options)
        assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 1]).all()
        assert_same_bits((out[:, others], lse[:, others]), (expected[0][:, others], expected[1][:, others]))


@both
def test_nan_in_a_live_row_stays_in_its_request(variant):
    inputs = make_inputs(Case("nan_row", (20, 3), Q=3))
    expected = attend(inputs, variant)
    cache = inputs["kv_cache"].copy()
    cache[1, 4] = np.nan
    out, lse = attend(inputs, variant, kv_cache=cache)
    assert_same_bits((out[:1], lse[:1]), (expected[0][:1], expected[1][:1]))


@both
def test_nan_behind_the_last_row_and_in_unused_pages(variant):
    inputs = make_inputs(Case("poison", (17, 2), Q=2, page_size=8, slack=20))
    table = inputs["block_table"].copy()
    used = -(-(inputs["cache_seqlens"] + 2) // 8)
    for b in range(2):
        assert np.isnan(inputs["kv_cache"][table[b, used[b] - 1], 4:]).all()  # the last page's padding
        table[b, used[b] :] = 2147480000
    expected = attend(inputs | {"kv_cache": np.nan_to_num(inputs["kv_cache"])}, variant)
    assert_same_bits(attend(inputs, variant, block_table=table, validate=True), expected)
    check_results(expected, inputs, FLASH)


# One key, and none


@both
def test_nodes_that_see_themselves_alone_get_their_own_row(variant):
    num_nodes = 20  # in two key tiles
    inputs = make_inputs(Case("alone", (0,), Q=num_nodes))
    eye = np.eye(num_nodes, dtype=np.bool_)[None]
    own = inputs["kv_cache"][:, :num_nodes, None, :32]
    for options in SPLITS if variant == MIRROR else [{}, {"num_splits": 3}]:
        out, lse = attend(inputs, variant, tree_mask=pack(eye), **options)
        np.testing.assert_array_equal(out, own)
        compare_lse(lse, exact_results(inputs | {"tree_mask": eye})[1]).check()


@both
def test_one_key(variant):
    inputs = make_inputs(Case("one_key", (0, 1), Q=1, H=2))
    inputs["tree_mask"][1] = 0  # the prefix's only key, or the root alone
    out, lse = check(inputs, variant)
    np.testing.assert_array_equal(out, np.repeat(inputs["kv_cache"][:, :1, None, :32], 2, axis=2))


@both
@pytest.mark.parametrize("options", [{}, {"num_splits": 2}, {"batch_invariant": True}], ids=str)
def test_rows_and_requests_that_see_nothing(variant, options):
    inputs = make_inputs(Case("nothing", (0, 0, 16), Q=3, padded=1, idle=(1,)))
    assert np.isnan(inputs["kv_cache"][1]).all()
    out, lse = check(inputs, variant, **options)
    assert not out[0, 2].any() and np.isneginf(lse[0, 2]).all()
    assert not out[1].any() and np.isneginf(lse[1]).all()
    assert not np.signbit(out[1]).any() and not np.signbit(out[0, 2]).any(), "0, not -0"


@pytest.mark.parametrize("options", SPLITS, ids=str)
@without_gpu
def test_rows_that_see_nothing_until_the_last_tile(options):
    # A mask of bools that is not a tree's: the first key tiles are hidden from half of the nodes.
    num_nodes = 70
    inputs = make_inputs(Case("late", (0,), Q=num_nodes))
    mask = np.tril(np.ones((1, num_nodes, num_nodes), np.bool_))
    mask[:, ::2, :64] = False
    mask[:, 1::2, 33:] = False
    check(inputs | {"tree_mask": mask}, **options)


# Widths


def test_the_widest_latent():
    inputs = make_inputs(Case("widest", (3,), Q=2, R=flash.SMALL.max_rank))
    check(inputs)
    check(inputs, FLASH)


def test_wider_latents_are_refused_by_flash_and_auto_takes_three_phase():
    rank = flash.SMALL.max_rank + 16
    inputs = make_inputs(Case("too_wide", (1,), Q=2, R=rank, slack=40))
    for variant in (FLASH, MIRROR):
        with pytest.raises(ValueError, match=rf"up to {rank - 16} \(here it is {rank}\) .*three_phase"):
            attend(inputs, variant)
    assert_same_bits(dd.verify_attention(**arguments(inputs)), attend(inputs, "three_phase"))
    with pytest.raises(ValueError, match="'flash' takes kv_lora_rank up to"):
        dd.verify_attention(**arguments(inputs), num_splits=2)


def test_rows_that_exceed_shared_memory_are_refused_by_flash_and_auto_takes_three_phase():
    inputs = make_inputs(Case("too_long_rows", (1,), Q=2, R=16, P=2048, slack=40))
    with pytest.raises(ValueError, match="bytes of shared memory for D = 2064"):
        attend(inputs, FLASH)
    assert_same_bits(dd.verify_attention(**arguments(inputs)), attend(inputs, "three_phase"))


def test_bounds_of_the_error():
    assert flash.error_bound(1.0, 100, 576) < flash.error_bound(10.0, 100, 576)
    assert flash.error_bound(1.0, 100, 576) < flash.error_bound(1.0, 100_000, 576)
    assert flash.error_bound(1.0, 100, 64) < flash.error_bound(1.0, 100, 576)
    assert flash.error_bound(3.0, 100_000, 576) < three_phase.error_bound(3.0, 100_000, 576) * 3


# Workspace


def sizes(inputs: dict[str, Any]) -> tuple[int, int, int, int]:
    """What `workspace_bytes` must be told: B, Q, H, and the bound on the prefix that follows from the cache."""
    batch, num_nodes, num_heads, _ = inputs["q"].shape
    return batch, num_nodes, num_heads, inputs["kv_cache"].shape[1] - num_nodes


WIDTHS = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}


@pytest.mark.parametrize("options", SPLITS, ids=str)
@both
def test_a_workspace_of_just_the_bytes_that_it_needs(variant, options):
    inputs = make_inputs(Case("workspace", (17, 1), Q=2))
    if variant == FLASH and options.get("num_splits", 2) not in (2, 3):
        inputs = make_inputs(Case("workspace", (2,), Q=2))
    nbytes = dd.workspace_bytes(*sizes(inputs), **WIDTHS, **options)
    assert nbytes % 16 == 0
    expected = attend(inputs, variant, **options)
    for dtype in (np.float32, np.uint8):
        memory = np.full(nbytes + 64, 0xFF, np.uint8)  # NaN, as float32
        start = -memory.ctypes.data % 16
        memory, behind = memory[start : start + nbytes], memory[start + nbytes :]
        results = attend(inputs, variant, workspace=memory.view(dtype), **options)
        assert_same_bits(results, expected)
        assert (behind == 0xFF).all(), "something was written behind the workspace"


@both
def test_a_workspace_too_small_is_refused_with_the_bytes_that_it_needs(variant):
    inputs = make_inputs(Case("workspace", (17, 1), Q=2))
    for options in SPLITS:
        needed = flash.plan_of(planned(inputs)[3], options.get("num_splits"), "batch_invariant" in options)
        nbytes = 4 * needed.workspace_floats
        assert nbytes <= dd.workspace_bytes(*sizes(inputs), **WIDTHS, **options)
        with pytest.raises(ValueError, match=rf"workspace has {nbytes - 4} bytes; it must have at least {nbytes}\b"):
            attend(inputs, variant, workspace=aligned(nbytes - 4), **options)


def aligned(nbytes: int) -> np.ndarray:
    """Bytes at an address that is a multiple of 16."""
    memory = np.zeros(nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + nbytes]


@both
def test_workspaces_that_will_not_do(variant):
    inputs = make_inputs(Case("workspace", (3,), Q=2))
    out, lse = np.zeros((1, 2, 1, 32), np.float32), np.zeros((1, 2, 1), np.float32)
    for workspace, message in (
        (misaligned(np.zeros(2**14, np.float32)), "workspace .* is not aligned"),
        (aligned(2**16)[4:], "workspace .* multiple of 16"),
        (spread_out(np.zeros(2**14, np.float32)), "workspace .* C order"),
        (inputs["q"], "workspace overlaps q"),
        (inputs["kv_cache"], "workspace overlaps kv_cache"),
        (out, "workspace overlaps out"),
        (lse, "workspace overlaps lse"),
        (aligned(16), "workspace has 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(inputs, variant, workspace=workspace, out=out, lse=lse)
    assert not out.any() and not lse.any()
    check(inputs, variant)


def test_bytes_of_a_workspace():
    assert dd.workspace_bytes(0, 17, 16, 1000) >= 16
    # Even parts of all work: two states a block, whatever the lengths are.
    most = dd.workspace_bytes(1024, 17, 64, 10**6)
    assert most == dd.workspace_bytes(1024, 17, 64, 2 * 10**6)
    assert dd.workspace_bytes(1, 17, 64, 1000, num_splits=2) > dd.workspace_bytes(1, 17, 64, 1000, num_splits=1)
    tail = dd.workspace_bytes(2, 17, 64, 1000, prefix_tail=True)
    assert tail >= 4 * 2 * 17 * 64 * 513
    errors: list[tuple[dict[str, Any], type[Exception]]]
    errors = [({"batch": -1}, ValueError), ({"num_heads": 1.5}, TypeError), ({"max_seqlen": -1}, ValueError)]
    for wrong, error in errors:
        given = {"batch": 1, "num_nodes": 3, "num_heads": 2, "max_seqlen": 9} | wrong
        with pytest.raises(error, match=next(iter(wrong))):
            dd.workspace_bytes(**given)
    with pytest.raises(ValueError, match="num_splits is 0"):
        dd.workspace_bytes(1, 3, 2, 9, num_splits=0)
    with pytest.raises(ValueError, match="three_phase"):
        dd.workspace_bytes(1, 3, 2, 9, kv_lora_rank=2048)


@both
def test_preallocated_results_of_four_strided_axes(variant):
    inputs = make_inputs(Case("strided_out", (17,), Q=3, H=2))
    expected = attend(inputs, variant)
    whole = np.full((2, 6, 5, 64), np.nan, np.float32)
    out = whole[1:, ::2, 3:0:-2, 1::2]
    lse = np.full((1, 2, 3), np.nan, np.float32).swapaxes(1, 2)
    results = attend(inputs, variant, out=out, lse=lse)
    assert results[0] is out and results[1] is lse
    assert_same_bits(results, expected)
    assert np.count_nonzero(~np.isnan(whole)) == out.size, "something was written beside the results"


# Parts of the keys: the prefix alone, the tree alone

PARTS = {"prefix": flash.PREFIX, "tree": flash.TREE}
PART_CASES = (
    Case("parts", (0, 1, 15, 16, 17, 40), Q=3),
    Case("parts_paged", (5, 33), Q=19, H=3, page_size=4, padded=2),
    Case("parts_long_tree", (2, 0), Q=65, mask="bool", idle=(1,)),
)


@pytest.mark.parametrize("options", SPLITS, ids=str)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("case", PART_CASES, ids=str)
@without_gpu
def test_parts_of_the_keys_in_the_mirror(monkeypatch, case, part, options):
    monkeypatch.setattr(flash, "CHUNK", 32)
    inputs = make_inputs(case)
    given = inputs
    if part == "prefix":  # as prefix_attention has it: no node sees a tree key
        given = inputs | {"tree_mask": np.zeros_like(inputs["tree_mask"])}
    out, lse, plan, problem = planned(given, part=PARTS[part], **options)
    flash.run_mirror(problem, plan)
    check_results((out, lse), inputs, FLASH, part)


def small_problem() -> dict[str, Any]:
    return make_inputs(Case("prefix_tail", (17, 0), Q=3, padded=1))


@pytest.mark.parametrize("options", [{}, {"num_splits": 2}], ids=str)
@pytest.mark.parametrize("length", [0, 17])
def test_attention_to_the_prefix(length, options):
    inputs = make_inputs(Case("prefix", (length,), Q=3))
    given = {name: x for name, x in arguments(inputs).items() if name != "tree_mask"}
    results = dd.prefix_attention(**given, **options, validate=True)
    check_results(results, inputs, FLASH, "prefix")
    if length == 0:
        assert np.isneginf(results[1]).all() and not results[0].any()


def test_attention_to_prefixes_of_several_requests():
    inputs = make_inputs(Case("prefixes", (17, 0), Q=3, H=2, page_size=4))
    given = {name: x for name, x in arguments(inputs).items() if name != "tree_mask"}
    check_results(dd.prefix_attention(**given), inputs, FLASH, "prefix")


def test_the_tree_rows_are_not_read_for_the_prefix():
    inputs = make_inputs(Case("prefix", (17,), Q=3))
    given = {name: x for name, x in arguments(inputs).items() if name != "tree_mask"}
    expected = dd.prefix_attention(**given)
    cache = inputs["kv_cache"].copy()
    cache[0, 17:] = np.nan
    assert_same_bits(dd.prefix_attention(**given | {"kv_cache": cache}), expected)


def exact_prefix(inputs: dict[str, Any]) -> Results:
    out, lse = exact_results(inputs, "prefix")
    return out.astype(np.float32), lse.astype(np.float32)


def test_prefix_and_tail_from_a_pair():
    inputs = small_problem()
    pair = exact_prefix(inputs)
    before = [x.copy() for x in pair]
    results = dd.verify_attention_prefix_tail(**arguments(inputs), prefix=pair)
    check_results(results, inputs, FLASH)
    assert_same_bits(pair, tuple(before))
    whole = attend(inputs, MIRROR)
    compare(results[0], whole[0], name="beside the single kernel", rel_frobenius=2 * error_bound(inputs, FLASH)).check()
    compare_lse(results[1], whole[1].astype(np.float64)).check()


def test_the_prefix_is_not_read_for_the_tail():
    inputs = small_problem()
    pair = exact_prefix(inputs)
    expected = dd.verify_attention_prefix_tail(**arguments(inputs), prefix=pair)
    cache = inputs["kv_cache"].copy()
    cache[0, :17] = np.nan
    results = dd.verify_attention_prefix_tail(**arguments(inputs, kv_cache=cache), prefix=list(pair))
    assert_same_bits(results, expected)


def test_prefix_and_tail_from_a_callable():
    inputs = small_problem()
    seen = []

    def prefix(q: Any, kv_cache: Any, cache_seqlens: Any, **options: Any) -> Results:
        seen.append((q, kv_cache, cache_seqlens, options))
        return exact_prefix(inputs)

    out, lse = np.zeros((2, 3, 1, 32), np.float32), np.zeros((2, 3, 1), np.float32)
    results = dd.verify_attention_prefix_tail(**arguments(inputs), prefix=prefix, out=out, lse=lse, validate=True)
    assert results[0] is out and results[1] is lse
    check_results(results, inputs, FLASH)
    ((q, cache, lengths, options),) = seen
    assert q is inputs["q"] and cache is inputs["kv_cache"] and lengths is inputs["cache_seqlens"]
    assert options == {name: inputs[name] for name in ("sm_scale", "kv_lora_rank", "block_table")}


def test_our_own_prefix_as_the_callable():
    inputs = make_inputs(Case("own_prefix", (18,), Q=3, H=2, page_size=4))
    results = dd.verify_attention_prefix_tail(**arguments(inputs), prefix=dd.prefix_attention)
    check_results(results, inputs, FLASH)


@only_simulated  # on a GPU this would be a kernel of its own; test_flash_gpu.py has it at the widths of the model
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_prefix_and_tail_round_once(dtype):
    inputs = make_inputs(Case("tail_rounds", (5,), Q=3, dtype=dtype))
    results = dd.verify_attention_prefix_tail(**arguments(inputs), prefix=exact_prefix(inputs))
    assert results[0].dtype == inputs["q"].dtype
    check_results(results, inputs, FLASH)
    exact = dd.verify_attention_prefix_tail(**arguments(inputs), prefix=exact_prefix(inputs), out_dtype=np.float32)
    assert exact[0].dtype == np.float32
    np.testing.assert_array_equal(results[0], exact[0].astype(results[0].dtype))


def test_an_empty_prefix_of_another_backend():
    inputs = make_inputs(Case("no_prefix", (0,), Q=3, padded=1))
    tree = attend(inputs, MIRROR)
    for empty in (-np.inf, np.inf):
        pair = np.full((1, 3, 1, 32), np.nan, np.float32), np.full((1, 3, 1), empty, np.float32)
        results = dd.verify_attention_prefix_tail(**arguments(inputs), prefix=pair)
        check_results(results, inputs, FLASH)
        assert_close(results, tree)


def assert_close(results: Results, expected: Results) -> None:
    np.testing.assert_allclose(results[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[1], expected[1], rtol=1e-5, atol=1e-6)


def test_the_results_may_be_those_of_the_prefix():
    inputs = small_problem()
    pair = exact_prefix(inputs)
    expected = dd.verify_attention_prefix_tail(**arguments(inputs), prefix=exact_prefix(inputs))
    results = dd.verify_attention_prefix_tail(**arguments(inputs), prefix=pair, out=pair[0], lse=pair[1])
    assert results[0] is pair[0] and results[1] is pair[1]
    assert_same_bits(results, expected)


def test_workspace_of_prefix_and_tail():
    inputs = small_problem()
    pair = exact_prefix(inputs)
    expected = dd.verify_attention_prefix_tail(**arguments(inputs), prefix=pair)
    nbytes = dd.workspace_bytes(*sizes(inputs), **WIDTHS, prefix_tail=True)
    workspace = aligned(nbytes)
    workspace[:] = 0xFF
    results = dd.verify_attention_prefix_tail(**arguments(inputs), prefix=pair, workspace=workspace)
    assert_same_bits(results, expected)
    with pytest.raises(ValueError, match=r"workspace has 512 bytes; it must have at least \d+ \(see workspace_bytes"):
        dd.verify_attention_prefix_tail(**arguments(inputs), prefix=pair, workspace=aligned(512))


PREFIX_ERRORS: list[tuple[str, type[Exception], Any]] = [
    ("prefix is a ndarray; it must be the pair", TypeError, lambda out, lse: out),
    ("prefix is a tuple; it must be the pair", TypeError, lambda out, lse: (out, lse, lse)),
    ("prefix is a NoneType", TypeError, lambda out, lse: None),
    ("prefix is a tuple", TypeError, lambda out, lse: lambda *given, **options: (out,)),
    ("prefix lse .* dtype", TypeError, lambda out, lse: (out, lse.astype(np.float64))),
    ("prefix out .* dtype", TypeError, lambda out, lse: (out.astype(np.int32), lse)),
    ("prefix out .* shape", ValueError, lambda out, lse: (out[:1], lse)),
    ("prefix lse .* shape", ValueError, lambda out, lse: (out, lse.swapaxes(0, 1))),
]


@pytest.mark.parametrize(("message", "exception", "wrong"), PREFIX_ERRORS, ids=[e[0] for e in PREFIX_ERRORS])
def test_wrong_prefixes(message, exception, wrong):
    inputs = small_problem()
    out, lse = exact_prefix(inputs)
    result = np.full_like(out, 7.0)
    with pytest.raises(exception) as caught:
        dd.verify_attention_prefix_tail(**arguments(inputs), prefix=wrong(out, lse), out=result)
    assert re.search(message, str(caught.value)) or message.split(" .*")[0] in str(caught.value)
    assert (result == 7.0).all()


# Mirror and kernel are one algorithm


def phases_of(function: Any) -> list[str]:
    """The headings in a function, those of its inner ones too."""
    return re.findall(r"^ +(# Phase \d: .*)$", inspect.getsource(inspect.unwrap(function)), re.M)


def test_mirror_and_kernel_have_the_same_phases():
    assert phases_of(flash.mirror) == phases_of(flash.make_kernel)
    assert [phase[:9] for phase in phases_of(flash.mirror)] == [f"# Phase {n}" for n in range(7)]
    assert [phase[:9] for phase in phases_of(flash.make_combine)] == ["# Phase 1", "# Phase 2", "# Phase 3"]


# Wrong kernels must fail: else the comparisons above would prove nothing


def spring(trap: Trap, module: Any) -> None:
    """Raise AssertionError unless the kernels of a module solve the trap's problem."""
    inputs = make_inputs(trap.case)
    out, lse, plan, problem = planned(inputs, **trap.options)
    module.FOLD = trap.fold
    module.run(problem, plan)
    check_results((out, lse), inputs, FLASH)


@only_simulated
@pytest.mark.parametrize("trap", TRAPS)
def test_kernels_without_a_mistake_pass(trap):
    spring(TRAPS[trap], build())


@only_simulated
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("trap", "mistake"), [(trap, mistake) for trap in MISTAKES for mistake in MISTAKES[trap]])
def test_kernels_with_a_mistake_fail(trap, mistake):
    with pytest.raises((AssertionError, IndexError), match=r"FAIL|out of bounds"):
        spring(TRAPS[trap], build(MISTAKES[trap][mistake]))
