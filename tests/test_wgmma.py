"""Variant wgmma without a GPU: its mirror against the oracle, what it takes, its workspace, and what it launches.

The kernels themselves compile in profiling/resources.py and run in test_wgmma_gpu.py; their plan is in
test_schedule.py.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import DTYPES, Case, arguments, compare_lse, exact_results, make_inputs, pack, to_pages
from test_mma import REFERENCES, check_against_oracle, reference_inputs
from test_verify_attention import Results, assert_same_bits, random_mask

import ddtree_numba as dd
from ddtree_numba.attention import wgmma_host
from ddtree_numba.attention.problem import make_problem
from ddtree_numba.attention.wgmma_host import Part, Sizes, bytes_of, cut, plan_parts, state_parts, takes
from ddtree_numba.device.arrays import HOST, View
from ddtree_numba.device.runtime import SIMULATOR

# The mirror needs no GPU, and what is taken would be told of the GPU that is there.
pytestmark = pytest.mark.skipif(not SIMULATOR, reason="what needs no GPU")

ROOT = Path(__file__).resolve().parent.parent
MODEL: dict[str, Any] = {"R": 512, "P": 64}
# Of float32 results, relative to their norm: one rounding of a weight, since sums are of weights before it, and one of
# a state. 1.2e-3 and 2.5e-4 were the most seen.
BOUNDS = {"bfloat16": 2.0**-9, "uint16": 2.0**-9, "float16": 3.0e-4}
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def case(name: str, prefixes: tuple[int, ...], dtype: str = "bfloat16", **given: Any) -> Case:
    return Case(f"wgmma_{name}", prefixes, dtype=dtype, **MODEL | given)


def attend(inputs: dict[str, Any], **changes: Any) -> Results:
    """Results in float32, unless asked for otherwise."""
    given = {"out_dtype": np.float32, "variant": "wgmma_numpy"} | changes
    return dd.verify_attention(**arguments(inputs, **given))


def check(inputs: dict[str, Any], **changes: Any) -> Results:
    results = attend(inputs, **changes)
    check_against_oracle(results, inputs, BOUNDS)
    return results


def use_blocks(monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    monkeypatch.setattr(wgmma_host, "multiprocessors", lambda device: blocks)


# The mirror against the oracle


@each_dtype
@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.stem)
def test_reference_files_in_the_mirror(path, dtype):
    assert len(REFERENCES) == 6
    inputs = reference_inputs(path, dtype)
    if "h64" in path.stem:  # all of it takes seconds
        inputs["q"] = inputs["q"][:, :, ::16]
    check(inputs)


@each_dtype
@pytest.mark.parametrize("logit_std", [0.02, 3.0, 12.0])
@pytest.mark.parametrize("prefixes", [(5,), (140, 17, 0), (300,)], ids=str)
def test_mirror_at_the_widths_of_the_model(prefixes, logit_std, dtype):
    check(make_inputs(case("model", prefixes, dtype, Q=9, H=8, logit_std=logit_std)))


@pytest.mark.parametrize("blocks", [1, 2, 5, 12, 132])
@pytest.mark.parametrize("given", [{"prefixes": (400, 0, 3, 133, 64), "H": 17}, {"prefixes": (1500,), "H": 2}], ids=str)
def test_any_number_of_blocks_in_the_mirror(monkeypatch, given, blocks):
    use_blocks(monkeypatch, blocks)
    check(make_inputs(case("blocks", Q=5, **given)))


@pytest.mark.parametrize("Q", [1, 3])
def test_lengths_around_tiles_in_the_mirror(monkeypatch, Q):
    use_blocks(monkeypatch, 7)
    lengths = {0, 1, *(n * 64 + k - own for n in (1, 2) for k in (-1, 0, 1) for own in (0, Q))}
    check(make_inputs(case("around", tuple(sorted(lengths)), Q=Q, H=2)))


@pytest.mark.parametrize("page_size", [64, 128, 16])
def test_pages_in_the_mirror(page_size):
    check(make_inputs(case("pages", (200, 64, 0), Q=5, H=2, page_size=page_size, padded=1)))


@pytest.mark.parametrize(("dtype", "out_dtype"), [("uint16", None), ("float16", None), ("bfloat16", "float16")])
def test_formats_in_the_mirror(dtype, out_dtype):
    inputs = make_inputs(case("formats", (70,), dtype, Q=3))
    out, _ = check(inputs, out_dtype=out_dtype)
    assert out.dtype == (inputs["q"].dtype if out_dtype is None else DTYPES[out_dtype])


@pytest.mark.parametrize("step", [0.01, 0.1, 1.0, 40.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_rising_and_falling_scores_in_the_mirror(step, sign):
    """References lag behind scores that rise by ``step`` nats a key, and stay where they fall."""
    inputs = make_inputs(case("rising", (200,), Q=1))
    q, cache = np.zeros_like(inputs["q"]), inputs["kv_cache"].copy()
    q[..., -1] = sign
    cache[0, :201, -1] = np.arange(201)
    check(inputs | {"q": q, "kv_cache": cache, "sm_scale": step})


def test_references_lag_in_the_mirror(monkeypatch):
    """Results of references that follow each score differ in the last bits, and are right too."""
    inputs = make_inputs(case("lag", (300,), Q=2, logit_std=3.0))
    lagging = check(inputs)
    monkeypatch.setattr(wgmma_host, "SLACK", np.float32(0))
    following = check(inputs)
    assert (lagging[0] != following[0]).any()


def test_logits_of_magnitude_1e4_in_the_mirror():
    inputs = make_inputs(case("huge", (100,), Q=3, logit_std=1e4))
    compare_lse(check(inputs)[1], exact_results(inputs)[1]).check()


# Masks and rows


@pytest.mark.parametrize("prefix", [0, 3, 70])
@pytest.mark.parametrize("num_nodes", [1, 31, 33, 65])
def test_each_mask_bit_in_the_mirror(num_nodes, prefix):
    """With q = 0 and unit vectors for rows, output k of a node is 1/n if it sees key k, of n keys."""
    mask = random_mask(num_nodes, batch=2)
    num_keys = prefix + num_nodes
    cache = np.zeros((2, num_keys, 576), np.float16)
    cache[..., :num_keys] = np.eye(num_keys)
    seen = np.concatenate([np.ones((*mask.shape[:2], prefix), np.bool_), mask], axis=2)
    count = seen.sum(axis=2, dtype=np.float32)
    expected = np.zeros((2, num_nodes, 512), np.float32)
    expected[..., :num_keys] = seen / np.maximum(count, np.float32(1))[..., None]
    for given in (mask, pack(mask)):
        out, lse = attend(
            {
                "q": np.zeros((2, num_nodes, 1, 576), np.float16),
                "kv_cache": cache,
                "cache_seqlens": np.full(2, prefix, np.int32),
                "tree_mask": given,
                "block_table": None,
                "sm_scale": 1.0,
                "kv_lora_rank": 512,
            }
        )
        np.testing.assert_allclose(out[:, :, 0], expected, rtol=1e-6)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[:, :, 0], np.log(count.astype(np.float64)), rtol=1e-6)


def test_rows_and_requests_that_see_nothing_in_the_mirror():
    check(make_inputs(case("nothing", (0, 0, 160), Q=9, H=3, padded=4, idle=(1,), page_size=64)))


def test_causal_masks_and_longest_lengths_in_the_mirror():
    inputs = make_inputs(case("causal", (100, 0), Q=5, H=3, mask="causal", tree="chain"))
    expected = check(inputs)
    clamped = inputs | {"cache_seqlens": np.array([2**31 - 1, -5], np.int32)}
    assert_same_bits(attend(clamped, max_seqlen=100), expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nan_queries_and_rows_stay_where_they_are_in_the_mirror():
    inputs = make_inputs(case("nan", (20, 3), Q=5, H=2))
    expected = attend(inputs)
    q, cache = inputs["q"].copy(), inputs["kv_cache"].copy()
    q[0, 1, 0, 3] = np.nan
    cache[1, 2] = np.nan
    out, lse = attend(inputs, q=q, kv_cache=cache)
    assert np.isnan(out[0, 1, 0]).all() and np.isnan(lse[0, 1, 0])
    assert np.isnan(out[1]).all() and np.isnan(lse[1]).all()
    others = [0, 2, 3, 4]
    assert_same_bits((out[0, others], lse[0, others]), (expected[0][0, others], expected[1][0, others]))


# What is taken


def problem_of(inputs: dict[str, Any], **changes: Any) -> Any:
    options = {"max_seqlen": None, "out": None, "lse": None, "out_dtype": None, "workspace": None, "validate": False}
    return make_problem(**options | arguments(inputs) | changes)


def reason(q: np.ndarray, cache: np.ndarray, table: Any = None) -> str:
    """Why not, but for the simulator."""
    batch, num_nodes = (q[0] if isinstance(q, tuple) else q).shape[:2]
    inputs = make_inputs(case("layouts", (64,) * batch, Q=num_nodes))
    found = takes(problem_of(inputs | {"q": q, "kv_cache": cache, "block_table": table}))
    return "" if "simulator" in found else found


def aligned(*shape: int) -> np.ndarray:
    """Zeros in float16 at an address that is a multiple of 64."""
    nbytes = 2 * math.prod(shape)
    raw = np.zeros(nbytes + 64, np.uint8)
    return np.ndarray(shape, np.float16, raw, offset=-raw.ctypes.data % 64)


TABLE = np.arange(4, dtype=np.int32).reshape(2, 2)


@pytest.mark.parametrize(
    ("q", "cache", "table"),
    [
        pytest.param(aligned(2, 3, 4, 576), aligned(2, 70, 576), None, id="contiguous"),
        pytest.param(aligned(2, 3, 4, 640)[..., 32:608], aligned(2, 70, 640)[..., 8:584], None, id="between others"),
        pytest.param((aligned(2, 3, 4, 512), aligned(2, 3, 4, 64)), aligned(2, 70, 576), None, id="a pair"),
        pytest.param(aligned(3, 3, 4, 576)[::2], aligned(4, 70, 576)[::2], None, id="every second request"),
        pytest.param(aligned(2, 3, 8, 576)[:, :, ::2], aligned(2, 140, 576)[:, ::2], None, id="every second row"),
        pytest.param(aligned(2, 9, 1, 576)[:, ::3], aligned(2, 70, 576), None, id="one head"),
        pytest.param(aligned(2, 1, 9, 576)[:, :, :3], aligned(2, 70, 576), None, id="one node, some heads"),
        pytest.param(aligned(2, 3, 4, 576), aligned(4, 64, 576), TABLE, id="pages of 64"),
        pytest.param(aligned(2, 3, 4, 576), aligned(9, 192, 576)[::2], TABLE, id="pages of 192"),
    ],
)
def test_layouts_that_are_taken(q, cache, table):
    assert reason(q, cache, table) == ""


@pytest.mark.parametrize(
    ("q", "cache", "table", "message"),
    [
        pytest.param(aligned(2, 3, 8, 576)[:, :, :4], aligned(2, 70, 576), None, "one axis of rows", id="some heads"),
        pytest.param(aligned(2, 6, 4, 576)[:, ::2], aligned(2, 70, 576), None, "one axis of rows", id="some nodes"),
        pytest.param(aligned(2, 3, 4, 580)[..., 4:], aligned(2, 70, 576), None, "tensor maps", id="odd rows of q"),
        pytest.param(aligned(2, 3, 4, 576), aligned(2, 70, 577)[..., 1:], None, "tensor maps", id="odd rows"),
        pytest.param(aligned(2, 3, 4, 584)[..., 4:580], aligned(2, 70, 576), None, "tensor maps", id="odd address"),
        pytest.param(aligned(2, 3, 4, 576), aligned(2, 70, 1152)[..., ::2], None, "tensor maps", id="odd columns"),
        pytest.param(aligned(2, 3, 4, 576), aligned(2, 70, 576)[:, ::-1], None, "tensor maps", id="backwards"),
        pytest.param(aligned(2, 3, 4, 576), aligned(4, 96, 576), TABLE, "a multiple of 64", id="pages of 96"),
    ],
)
def test_layouts_that_are_not_taken(q, cache, table, message):
    assert message in reason(q, cache, table)


def test_other_gpus_are_refused_by_name(monkeypatch):
    inputs = make_inputs(case("gpu", (64,)))
    for capability in ((8, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(wgmma_host, "compute_capability", lambda device, found=capability: found)
        for call in (
            lambda: dd.verify_attention(**arguments(inputs), variant="wgmma"),
            lambda: dd.workspace_bytes(1, 5, 1, 64, variant="wgmma"),
            lambda: dd.plan_attention(inputs["cache_seqlens"], num_nodes=5, num_heads=1, max_seqlen=64),
        ):
            with pytest.raises(ValueError, match=r"variant 'wgmma' needs compute capability 9.x, which the simulator"):
                call()


# Workspace


@pytest.mark.parametrize("offset", range(0, 128, 16))
def test_parts_of_a_workspace_lie_apart_within_it_and_aligned(offset):
    sizes = Sizes(batch=3, num_nodes=9, num_heads=64, blocks=132)
    parts = plan_parts(sizes) + state_parts(sizes)
    start = 2**40 + offset
    memory = View("workspace", "torch", 0, start, (bytes_of(parts) // 4,), (4,), np.dtype(np.float32), False, None)
    found = cut(memory, parts)
    assert [*found] == [part.name for part in parts]
    extents = sorted(x.extent() for x in found.values())
    assert extents[0][0] >= start and extents[-1][1] <= start + bytes_of(parts)
    assert all(low % 128 == 0 for low, _ in extents)
    assert all(end <= begin for (_, end), (begin, _) in zip(extents, extents[1:], strict=False))
    for part in parts:
        assert found[part.name].shape == part.shape and found[part.name].dtype == part.dtype


def test_the_workspace_holds_what_the_kernels_index():
    sizes = Sizes(batch=40, num_nodes=3, num_heads=8, blocks=132)
    shapes = {part.name: part for part in plan_parts(sizes) + state_parts(sizes)}
    assert shapes["states"] == Part("states", (2 * 132 + 1, 64, 512), "float16")
    assert shapes["beside"] == Part("beside", (2 * 132 + 1, 3, 64), "float32")
    assert shapes["items"].shape == (2 * 132 + 1, 8), "a row lists a state, of which there are as many as slots"
    assert shapes["plan"].shape == (8 + 4 * 132 + 1 + 40,) and shapes["pieces"].shape == (40 + 2 * 132 + 1, 8)


def test_workspace_bytes_are_those_of_the_parts(monkeypatch):
    use_blocks(monkeypatch, 132)
    nbytes = dd.workspace_bytes(4, 9, 64, 1000, variant="wgmma")
    sizes = Sizes(4, 9, 64, 132)
    assert nbytes == bytes_of(plan_parts(sizes) + state_parts(sizes)) and nbytes % 16 == 0
    with pytest.raises(ValueError, match=r"counts up to \d+ for B = 60000, .*less than 2\*\*31"):
        dd.workspace_bytes(60000, 65, 128, 2**20, variant="wgmma")


# Launches: recorded in another process, since the kernels' module is not for the simulator

RECORD = """
import json, sys
from dataclasses import fields, replace
from unittest import mock
import numpy as np
import ddtree_numba as dd
from ddtree_numba.attention import wgmma_host
from ddtree_numba.attention.problem import make_problem
from ddtree_numba.device import launch
from ddtree_numba.device.arrays import View

started, maps, made = [], [], []

def record(kernel, blocks, threads, args, *, results, shared_bytes, overlap=False):
    assert overlap == (kernel.py_func.__name__ == "combine")
    first = launch.first_view(args)
    names = list(kernel.py_func.__code__.co_varnames[: kernel.py_func.__code__.co_argcount])
    started.append([kernel.py_func.__name__, blocks[0], threads, shared_bytes, first.kind, first.device, len(names),
                    len(args), [str(x) for x in launch.signature(launch.type_keys(args))]])

def tensor_map(pointer, shape, strides, kind):
    maps.append([shape, strides, kind])
    return (0,) * 16

def empty(like, shape, dtype, purpose=""):
    made.append([list(shape), dtype.name])
    return np.zeros(shape, dtype)

def call(out=None, plan=False, table=None, cache=(2, 320, 576)):
    q, cache = np.zeros((2, 17, 64, 576), np.float16), np.zeros(cache, np.float16)
    lengths = np.zeros(2, np.int32)
    problem = make_problem(q, cache, lengths, np.zeros((2, 17, 1), np.uint32), sm_scale=1.0, kv_lora_rank=512,
        block_table=table, max_seqlen=None, out=out, lse=None, out_dtype=None, workspace=None, validate=False)
    on = lambda x: replace(x, device=0, kind="torch")
    views = {f.name: x for f in fields(problem) if isinstance(x := getattr(problem, f.name), View)}
    problem = replace(problem, **{name: on(x) for name, x in views.items()})
    problem = replace(problem, block_table=replace(problem.block_table, kind="numba"))
    ready = None
    if plan:
        ready = dd.plan_attention(lengths, num_nodes=17, num_heads=64, max_seqlen=100)
        started.clear()
    for x in (maps, made):
        x.clear()
    wgmma_host.check(problem, None, False, ready)
    wgmma_host.run(problem, ready)
    found = [list(x) for x in (started, maps, made)]
    started.clear()
    return found

on_gpu = lambda name, x: replace(View(name, "numpy", -1, x.ctypes.data, x.shape, x.strides, x.dtype, False, x),
                                 device=0, kind="torch")
with mock.patch.multiple(wgmma_host, launch=record, require_backend=lambda: None, tensor_map=tensor_map, empty=empty,
                         view=on_gpu):
    table = np.arange(10, dtype=np.int32).reshape(2, 5)
    print(json.dumps([call(), call(plan=True), call(out=np.zeros((2, 64, 17, 512), np.float16).swapaxes(1, 2)),
                      call(table=table, cache=(10, 64, 576))]))
"""


@pytest.fixture(scope="module")
def launched() -> list[Any]:
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", RECORD], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_three_kernels_run_two_with_a_plan_and_a_copy_for_other_strides(launched):
    names = [[kernel[0] for kernel in started] for started, _, _ in launched]
    assert names == [
        ["plan_blocks", "wgmma", "combine"],
        ["wgmma", "combine"],
        ["plan_blocks", "wgmma", "combine", "copy_rows"],
        ["plan_blocks", "wgmma", "combine"],
    ]
    for started, _, _ in launched:
        for _, blocks, threads, shared_bytes, kind, device, wanted, given, _ in started:
            assert (kind, device) == ("torch", 0), "the stream must be the one of q"
            assert wanted == given and blocks > 0 and threads <= 384
            assert shared_bytes <= 227 * 1024


def test_tensor_maps_describe_queries_and_pages(launched):
    queries = [[[512, 17 * 64, 2], [1152, 17 * 64 * 1152], "f16"], [[64, 17 * 64, 2], [1152, 17 * 64 * 1152], "f16"]]
    assert launched[0][1] == [*queries, [[576, 320, 2], [1152, 320 * 1152], "f16"]]
    assert launched[3][1] == [*queries, [[576, 64, 10], [1152, 64 * 1152], "f16"]]


def test_kernels_get_the_types_that_they_are_written_for(launched):
    types = next(kernel[-1] for kernel in launched[0][0] if kernel[0] == "wgmma")
    assert types[:2] == ["array(float16, 3d, C)", "array(float32, 3d, C)"], "22 words, which wgmma.maps_here counts on"
    assert types[2:5] == ["UniTuple(int64 x 16)"] * 3
    assert types[5:11] == ["array(int32, 2d, C)", "array(uint32, 3d, C)", *["int32"] * 3, "float32"]
    assert types[11:14] == ["UniTuple(int64 x 1)", "array(int32, 1d, C)", "array(int32, 2d, C)"]
    assert types[14:] == ["array(float16, 3d, C)", "array(float32, 2d, C)"]


def test_a_workspace_is_made_and_room_for_results_of_other_strides(launched):
    made = [found for _, _, found in launched]
    assert [len(x) for x in made] == [1, 1, 2, 1]
    assert made[1][0][0][0] < made[0][0][0][0], "a plan needs no room for another"
    assert made[2][1] == [[2, 17 * 64, 512], "float16"]


@pytest.mark.parametrize("swapped", [False, True])
def test_results_are_spread_over_any_strides(swapped):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 15, 8)).astype(np.float32)
    target = np.zeros((2, 3, 5, 8) if not swapped else (8, 5, 3, 2), np.float32)
    target = target.transpose(3, 2, 1, 0) if swapped else target
    wgmma_host.spread(dd_view("rows", rows), dd_view("out", target))
    np.testing.assert_array_equal(target, rows.reshape(2, 3, 5, 8))
    lse = np.zeros((5, 3, 2), np.float32).transpose(2, 1, 0)
    wgmma_host.spread(dd_view("rows", np.ascontiguousarray(rows[..., 0])), dd_view("lse", lse))
    np.testing.assert_array_equal(lse, rows[..., 0].reshape(2, 3, 5))


def dd_view(name: str, x: np.ndarray) -> View:
    return replace(wgmma_host.view(name, x), device=HOST)


def test_pages_of_one_request_each_may_have_any_size():
    rows = make_inputs(case("capacity", (64,), Q=3))["kv_cache"]
    pages, table = to_pages(rows.astype(np.float32), np.array([67]), rows.shape[1], np.random.default_rng(0))
    assert table.shape == (1, 1) and reason(aligned(1, 3, 1, 576), aligned(*pages.shape), table) == ""
