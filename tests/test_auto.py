"""``variant="auto"``: which variant is taken, of sizes and of what each takes; its plan and its workspace.

What a GPU would say is put in its place, so none is needed. On one, test_wgmma_gpu.py has the results.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import Case, arguments, make_inputs

import ddtree_numba as dd
from ddtree_numba.attention import flash, mma, three_phase, verify, wgmma_host
from ddtree_numba.attention.verify import FEW_KEYS, first_of, likely
from ddtree_numba.device.runtime import SIMULATOR

without_gpu = pytest.mark.skipif(not SIMULATOR, reason="the GPU would have its say")

MODEL: dict[str, Any] = {"R": 512, "P": 64}
USUAL: dict[str, Any] = {"num_splits": None, "batch_invariant": False, "planned": False}
SPLITS: list[dict[str, Any]] = [{"num_splits": 1}, {"num_splits": 2}, {"batch_invariant": True}]
LAST = ("flash", "three_phase")
# In place of what was measured, which test_results.py holds against its measurements.
MMA_KEYS, WGMMA_PAIRS, PLANNED_PAIRS = 64, 2**17, 2**12
MEASURED = {name: getattr(verify, name) for name in ("MMA_KEYS", "WGMMA_PAIRS", "PLANNED_PAIRS")}


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """The form of the rule is tested here, whatever its numbers."""
    for name in MEASURED:
        monkeypatch.setattr(verify, name, globals()[name])


def of_sizes(batch: int, num_heads: int, num_nodes: int, prefix: int, **given: Any) -> tuple[str, ...]:
    return likely(batch, num_nodes, num_heads, prefix, **USUAL | given)


# The rule


@pytest.mark.parametrize(
    ("sizes", "candidates", "planned"),
    [
        ((1, 64, 17, 2048), ("wgmma", "mma", *LAST), ("wgmma", "mma", *LAST)),
        ((64, 16, 33, 1024), ("wgmma", "mma", *LAST), ("wgmma", "mma", *LAST)),
        ((1, 8, 9, 8192), ("wgmma", "mma", *LAST), ("wgmma", "mma", *LAST)),
        ((2, 8, 9, 37), LAST, ("wgmma", *LAST)),
        ((1, 1, 1, 4), ("three_phase",), ("three_phase",)),
        ((0, 8, 9, 1000), ("mma", *LAST), ("mma", *LAST)),
    ],
)
def test_shapes_of_the_tables(sizes, candidates, planned):
    assert of_sizes(*sizes) == candidates
    assert of_sizes(*sizes, planned=True) == planned


def test_planning_takes_time():
    """Else a workspace, which is sized for either, could be too small for calls without a plan."""
    assert MEASURED["PLANNED_PAIRS"] <= MEASURED["WGMMA_PAIRS"]


def test_each_limit():
    for limit, options in ((WGMMA_PAIRS, {}), (PLANNED_PAIRS, {"planned": True})):
        assert "wgmma" in of_sizes(1, 1, 1, limit - 1, **options)  # the prefix and the node itself
        assert "wgmma" not in of_sizes(1, 1, 1, limit - 2, **options)
        assert "wgmma" in of_sizes(2, 1, 1, -(-limit // 2) - 1, **options), "of all requests"
    for keys, found in (
        (MMA_KEYS, ("mma", *LAST)),
        (MMA_KEYS - 1, LAST),
        (FEW_KEYS + 1, LAST),
        (FEW_KEYS, ("three_phase",)),
    ):
        assert of_sizes(1, 1, 3, keys - 3) == found
    assert of_sizes(1, 1, 3, 5, few_keys=7) == LAST and of_sizes(1, 1, 3, 50, few_keys=53) == ("three_phase",)


@pytest.mark.parametrize("given", SPLITS, ids=str)
def test_with_splits_the_batch_has_no_say(given):
    """A row's bits must not depend on the other requests, and so not its variant."""
    for prefix in (0, 20, 40, 100, 100_000):
        found = {
            of_sizes(batch, 64, 9, prefix, planned=planned, **given) for batch in (1, 50, 5000) for planned in (0, 1)
        }
        assert len(found) == 1 and "wgmma" not in found.pop()


def test_more_splits_than_one_are_never_for_three_phase():
    for prefix in (0, 100):
        assert of_sizes(1, 1, 3, prefix, num_splits=2)[-1] == "flash"


def test_the_first_that_takes_the_arguments():
    order = ("wgmma", "mma", *LAST)
    for fitting in itertools.chain.from_iterable(itertools.combinations(order, n) for n in range(5)):
        expected = min((order.index(name) for name in fitting), default=3)
        assert first_of(order, fitting.__contains__) == order[expected]
    assert first_of(("flash",), lambda variant: False) == "flash"


# What runs


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """The simulator is none, and answers for an H200 but for its compute capability."""
    monkeypatch.setattr(verify, "runtime", SimpleNamespace(SIMULATOR=False))
    monkeypatch.setattr(wgmma_host, "_backend", lambda: "")
    monkeypatch.setattr(mma, "TILES", (mma.LARGE, mma.MEDIUM, mma.SMALL))
    for module in (flash, mma, wgmma_host):
        monkeypatch.setattr(module, "compute_capability", lambda device: capability)
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)


def ran(monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any], **given: Any) -> tuple[str, Any]:
    """What a call runs, and its plan."""
    found: list[tuple[str, Any]] = []
    with monkeypatch.context() as patch:
        for name, module in (("three_phase", three_phase), ("flash", flash), ("mma", mma), ("wgmma", wgmma_host)):
            patch.setattr(module, "run", lambda problem, plan=None, name=name: found.append((name, plan)))
        dd.verify_attention(**arguments(inputs, **given))
    (one,) = found
    return one


def case(prefixes: tuple[int, ...] = (300, 20), **given: Any) -> Case:
    """2 times 72 rows of up to 312 keys are some 2**15 pairs; tests that are to take wgmma lower its limit."""
    return Case("auto", prefixes, **MODEL | {"Q": 9, "H": 8, "dtype": "bfloat16"} | given)


@without_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "uint16", "float16"])
@pytest.mark.parametrize(
    ("capability", "page_size", "variant"),
    [
        ((9, 0), None, "wgmma"),
        ((9, 0), 64, "wgmma"),
        ((9, 0), 16, "mma"),
        ((8, 0), 64, "mma"),
        ((10, 0), None, "mma"),
        ((12, 0), 64, "mma"),
        ((7, 5), None, "flash"),
    ],
)
def test_each_gpu_takes_what_it_has(monkeypatch, capability, page_size, variant, dtype):
    as_on_a_gpu(monkeypatch, capability)
    monkeypatch.setattr(verify, "WGMMA_PAIRS", 2**14)
    assert ran(monkeypatch, make_inputs(case(dtype=dtype, page_size=page_size)))[0] == variant


@without_gpu
def test_what_tensor_cores_do_not_take_is_left_to_flash(monkeypatch):
    as_on_a_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(verify, "WGMMA_PAIRS", 2**14)
    for given in ({"dtype": "float32"}, {"cache_dtype": "float16"}, {"R": 256}, {"P": 32}):
        assert ran(monkeypatch, make_inputs(case(**given)))[0] == "flash", given
    inputs = make_inputs(case())
    cache = inputs["kv_cache"]
    apart = np.zeros((*cache.shape[:2], 580), cache.dtype)[..., :576]
    apart[:] = cache
    assert ran(monkeypatch, inputs, kv_cache=apart)[0] == "flash"
    heads_first = np.ascontiguousarray(inputs["q"].swapaxes(1, 2)).swapaxes(1, 2)
    assert ran(monkeypatch, inputs, q=heads_first)[0] == "mma", "which knows no rows of nodes and heads"


@without_gpu
def test_splits_and_few_keys(monkeypatch):
    as_on_a_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(verify, "WGMMA_PAIRS", 2**14)
    for given in SPLITS:
        assert ran(monkeypatch, make_inputs(case()), **given)[0] == "mma", given
    few = make_inputs(case((3, 0), Q=2, slack=0))
    assert ran(monkeypatch, few)[0] == "three_phase"
    assert ran(monkeypatch, few, num_splits=2)[0] == "flash"
    assert ran(monkeypatch, make_inputs(case((300, 20), H=1, Q=2)))[0] == "mma", "few pairs"


@without_gpu
def test_the_simulator_keeps_to_float32():
    inputs = make_inputs(case())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "WGMMA_PAIRS", 2**14)
        assert ran(patch, inputs)[0] == "flash"
        assert ran(patch, inputs, max_seqlen=20)[0] == "three_phase"


# A plan


def plan_for(inputs: dict[str, Any], **changes: int) -> Any:
    _, num_nodes, num_heads, _ = inputs["q"].shape
    sizes = {"num_nodes": num_nodes, "num_heads": num_heads, "max_seqlen": 300} | changes
    return dd.plan_attention(inputs["cache_seqlens"], **sizes)


@without_gpu
def test_a_plan_is_used_by_wgmma_and_no_other(monkeypatch):
    as_on_a_gpu(monkeypatch, (9, 0))
    inputs, paged = make_inputs(case()), make_inputs(case(page_size=16))
    plan = plan_for(inputs)
    assert ran(monkeypatch, inputs)[0] == "mma", "below the limit of calls without a plan"
    variant, found = ran(monkeypatch, inputs, plan=plan)
    assert variant == "wgmma" and found is plan
    variant, found = ran(monkeypatch, paged, plan=plan)
    assert variant == "mma" and isinstance(found, mma.Plan)
    variant, found = ran(monkeypatch, inputs, plan=plan, batch_invariant=True)
    assert variant == "mma" and isinstance(found, mma.Plan)


@without_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_plan_is_one_error_whatever_is_taken(monkeypatch, dtype):
    as_on_a_gpu(monkeypatch, (9, 0))
    inputs = make_inputs(case(dtype=dtype))
    for wrong in ({"num_heads": 7}, {"num_nodes": 8}, {"max_seqlen": 1000}):
        with pytest.raises(ValueError, match="^plan is for B = 2"):
            dd.verify_attention(**arguments(inputs), plan=plan_for(inputs, **wrong))
    with pytest.raises(TypeError, match="^plan is 3; it must be an AttentionPlan"):
        dd.verify_attention(**arguments(inputs), plan=3)


@without_gpu
def test_a_plan_changes_nothing_in_the_simulator():
    inputs = make_inputs(Case("auto", (40, 3), Q=2, H=1))
    plan = dd.plan_attention(inputs["cache_seqlens"], num_nodes=2, num_heads=1, max_seqlen=40)
    for given in ({}, {"max_seqlen": 40}):
        expected = dd.verify_attention(**arguments(inputs), variant="flash", **given)
        for found, right in zip(dd.verify_attention(**arguments(inputs), plan=plan, **given), expected, strict=True):
            np.testing.assert_array_equal(found, right)


# Workspace

SIZES = [*itertools.product((1, 3, 64), (1, 9, 65), (1, 16, 128), (0, 30, 70, 3000, 100_000))]  # B, Q, H, max_seqlen


def needed(variant: str, sizes: tuple[int, ...], planned: bool, **splits: Any) -> int:
    """Bytes that a variant asks of a workspace."""
    if variant == "wgmma":
        of_call = wgmma_host.Sizes(*sizes[:3], 132)
        parts = wgmma_host.state_parts(of_call) + (() if planned else wgmma_host.plan_parts(of_call))
        return wgmma_host.bytes_of(parts)
    given = {"num_splits": None, "batch_invariant": False} | splits
    widths = (*sizes[:3], 512, 576, sizes[3])
    if variant == "mma":
        return 4 * mma.make_plan(*widths, device=-1, **given).workspace_floats
    if variant == "three_phase":
        return 0
    return 4 * flash.make_plan(*widths, device=-1, wide=True, part=flash.ALL, **given).workspace_floats


@without_gpu
@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (7, 5)], ids=str)
def test_a_workspace_is_enough_for_whatever_is_taken(monkeypatch, capability):
    as_on_a_gpu(monkeypatch, capability)
    taken = {(7, 5): {*LAST}, (8, 0): {"mma", *LAST}, (9, 0): {"wgmma", "mma", *LAST}}[capability]
    seen = set()
    for batch, num_nodes, num_heads, longest in SIZES:
        for splits in ({}, *SPLITS):
            nbytes = dd.workspace_bytes(batch, num_nodes, num_heads, longest, **splits)
            assert nbytes % 16 == 0
            for planned in (False, True):
                candidates = of_sizes(batch, num_heads, num_nodes, longest, planned=planned, **splits)
                for variant in taken.intersection(candidates):
                    size = needed(variant, (batch, num_nodes, num_heads, longest), planned, **splits)
                    assert size <= nbytes, (variant, batch, num_nodes, num_heads, longest, splits)
                    seen.add(variant)
    assert seen == taken


@without_gpu
def test_what_tensor_cores_cannot_take_adds_nothing_to_a_workspace(monkeypatch):
    others: list[dict[str, Any]] = [{"prefix_tail": True}, {"kv_lora_rank": 256}, {"qk_rope_head_dim": 32}]
    others += [{"variant": "flash"}, {"variant": "three_phase"}]

    def found() -> list[int]:
        return [dd.workspace_bytes(*sizes, **given) for sizes in SIZES for given in others]

    as_on_a_gpu(monkeypatch, (7, 5))
    expected = found()
    plain = [dd.workspace_bytes(*sizes) for sizes in SIZES]
    monkeypatch.setattr(mma, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(wgmma_host, "compute_capability", lambda device: (9, 0))
    assert found() == expected
    assert all(
        now >= before for now, before in zip((dd.workspace_bytes(*sizes) for sizes in SIZES), plain, strict=True)
    )
    assert dd.workspace_bytes(64, 9, 16, 3000) > dd.workspace_bytes(64, 9, 16, 3000, variant="flash")
    assert dd.workspace_bytes(64, 9, 16, 3000) == dd.workspace_bytes(64, 9, 16, 100_000), "whatever max_seqlen is"
    sizes = (2**16, 65, 128, 2**20)  # more than wgmma counts, so that it is not taken
    assert dd.workspace_bytes(*sizes) >= dd.workspace_bytes(*sizes, variant="mma")
