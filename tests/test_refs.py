"""The reference files and what makes them: regeneration, the float64 oracles, the best-first builder.

Everything else is held against these, so they are held against less: hand-computed numbers, scalar loops over Python
floats, and enumeration of all trees of a small problem.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddtree_numba import kdtr
from refs import accept, make_refs, oracle, trees

REFS = Path(make_refs.__file__).parent
STATISTICS = ("logit_std", "logit_max", "logit_magnitude")
# What a mathematical library may change: results by a last bit, float64 figures by a few. All else is the same bytes.
RESULTS = {
    "verify_attention": ("out", "lse"),
    "merge_states": ("out", "lse"),
    "topk_logprobs": ("logprobs",),
    "target_probs": ("target_probs",),
}
FIGURES = {"verify_attention": STATISTICS, "topk_logprobs": ("lse",)}
ARGUMENTS = ("q", "kv_cache", "cache_seqlens", "tree_mask", "sm_scale", "kv_lora_rank", "block_table")
ALL_CASES = (
    *make_refs.CASES,
    *make_refs.MERGE_CASES,
    *make_refs.TOPK_CASES,
    *make_refs.TREE_CASES,
    *make_refs.ENCODING_CASES,
    *make_refs.ARGMAX_CASES,
    *make_refs.GREEDY_CASES,
    *make_refs.SAMPLED_CASES,
    *make_refs.PROBS_CASES,
    *make_refs.COMPACT_CASES,
    *make_refs.SGLANG_CASES,
)


def each(cases: Any) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


each_case = each(make_refs.CASES)
each_merge_case = each(make_refs.MERGE_CASES)
each_topk_case = each(make_refs.TOPK_CASES)
each_tree_case = each(make_refs.TREE_CASES)
each_encoding_case = each(make_refs.ENCODING_CASES)
each_argmax_case = each(make_refs.ARGMAX_CASES)
each_greedy_case = each(make_refs.GREEDY_CASES)
each_sampled_case = each(make_refs.SAMPLED_CASES)
each_probs_case = each(make_refs.PROBS_CASES)
each_compact_case = each(make_refs.COMPACT_CASES)
each_sglang_case = each(make_refs.SGLANG_CASES)


def stored(case: Any) -> dict[str, Any]:
    return kdtr.read(REFS / f"{case.name}.kdtr")


# Reference files


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refs") / "new"
    make_refs.main(["--out", str(folder)])
    return folder


def test_files_are_those_of_the_table(regenerated: Path) -> None:
    names = sorted(f"{case.name}.kdtr" for case in ALL_CASES)
    assert len(set(names)) == len(names)
    assert sorted(path.name for path in REFS.glob("*.kdtr")) == names
    assert sorted(path.name for path in regenerated.iterdir()) == names
    assert sum(path.stat().st_size for path in REFS.glob("verify_attn_*.kdtr")) <= 24e6
    assert sum(path.stat().st_size for path in REFS.glob("verify_attn_r*.kdtr")) <= 6e6
    assert sum(path.stat().st_size for path in REFS.glob("[bmt]*.kdtr")) <= 2e6
    of_accept = ("argmax_tokens", "accept", "target_probs", "compact_kv", "verify_tree_greedy")
    assert sum(path.stat().st_size for name in of_accept for path in REFS.glob(f"{name}_*.kdtr")) <= 6e5


def test_generator_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, str(REFS / "make_refs.py"), "--help"]
    assert "--out" in subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout


@each(ALL_CASES)
def test_regeneration(case: Any, regenerated: Path) -> None:
    old, new = stored(case), kdtr.read(regenerated / f"{case.name}.kdtr")
    assert list(old) == list(new)
    operator = old["operator"].tobytes().decode()
    for name in old:
        assert (old[name].dtype, old[name].shape) == (new[name].dtype, new[name].shape), name
        if name in FIGURES.get(operator, ()):
            np.testing.assert_allclose(new[name], old[name], rtol=1e-12, err_msg=name)
        elif name in RESULTS.get(operator, ()):
            same_infinities = np.isinf(old[name]) == np.isinf(new[name])
            assert same_infinities.all() and not np.isnan(new[name]).any(), name
            finite = np.isfinite(old[name])
            gap = np.abs(old[name][finite] - new[name][finite])
            assert (gap <= np.spacing(np.abs(old[name][finite]))).all(), f"{name}: worst {gap.max()}"
        else:
            assert old[name].tobytes() == new[name].tobytes(), name


@each_case
def test_layout(case: make_refs.Case) -> None:
    t = stored(case)
    num_requests, num_nodes = len(case.prefixes), max(case.tree_budgets) + 1
    assert t["operator"].tobytes() == b"verify_attention"
    rank, dim = case.kv_lora_rank, case.kv_lora_rank + case.qk_rope_head_dim
    assert t["q"].shape == (num_requests, num_nodes, case.num_heads, dim) and t["q"].dtype.name == case.dtype
    assert t["kv_cache"].shape[2] == dim and t["kv_cache"].dtype.name == case.dtype
    assert t["out"].shape == (num_requests, num_nodes, case.num_heads, rank) and t["out"].dtype == np.float32
    assert t["lse"].shape == t["out"].shape[:3] and t["lse"].dtype == np.float32
    assert t["cache_seqlens"].tolist() == list(case.prefixes) and t["cache_seqlens"].dtype == np.int32
    assert t["num_nodes"].tolist() == [budget + 1 for budget in case.tree_budgets]
    assert t["tree_mask"].shape == (num_requests, num_nodes, -(-num_nodes // 32)) and t["tree_mask"].dtype == np.uint32
    assert (t["kv_lora_rank"].dtype, t["kv_lora_rank"].shape, int(t["kv_lora_rank"])) == (np.int32, (), rank)
    assert (t["sm_scale"].dtype, t["sm_scale"].shape) == (np.float64, ())
    assert float(t["sm_scale"]) == pytest.approx(192**-0.5 * (0.1 * math.log(64) + 1) ** 2, rel=1e-15)
    assert ("block_table" in t) == (case.page_size is not None)


@each_case
def test_live_rows_are_finite_and_all_others_poison(case: make_refs.Case) -> None:
    t = stored(case)
    cache = t["kv_cache"].astype(np.float32)
    live = np.zeros(cache.shape[:2], dtype=bool)
    for b, length in enumerate(case.prefixes):
        for position in range(length + t["q"].shape[1]):
            if case.page_size is None:
                place = (b, position)
            else:
                assert cache.shape[1] == case.page_size
                page = t["block_table"][b, position // case.page_size]
                assert 0 <= page < cache.shape[0]
                place = (page, position % case.page_size)
            assert not live[place], "two positions share a row"
            live[place] = True
    assert np.isfinite(cache[live]).all() and np.isnan(cache[~live]).all()
    assert (~live).any()


@each([case for case in make_refs.CASES if case.page_size])
def test_paged_file_has_shuffled_pages_and_stale_entries(case: make_refs.Case) -> None:
    t = stored(case)
    table, num_pages = t["block_table"], t["kv_cache"].shape[0]
    invalid = (table < 0) | (table >= num_pages)
    assert set(table[invalid].tolist()) == {2147480000, -1} and invalid.any(axis=1).all()
    assert len(table[~invalid]) < num_pages
    longest = int(np.argmax(case.prefixes))
    assert (np.diff(table[longest][~invalid[longest]]) < 0).any()


def test_files_hold_long_and_odd_shapes() -> None:
    narrow = [case for case in make_refs.CASES if case.kv_lora_rank != 512]
    assert {max(case.tree_budgets) + 1 for case in narrow} >= {17, 33, 65}
    assert max(max(case.prefixes) for case in narrow if case.page_size is None) == 4097
    assert {(min(case.prefixes), max(case.prefixes), case.page_size) for case in narrow} >= {(0, 5000, 64)}
    assert any(len(case.prefixes) >= 4 and 0 in case.prefixes and max(case.prefixes) > 1000 for case in narrow)
    assert any(case.kv_lora_rank == case.qk_rope_head_dim == 192 for case in narrow)
    assert any(case.dtype == "bfloat16" and case.num_heads % 2 for case in narrow)
    assert all((REFS / f"{case.name}.kdtr").stat().st_size < 1e6 for case in narrow)


def test_wide_file_has_rows_of_logits_far_from_zero() -> None:
    (case,) = (case for case in make_refs.CASES if case.head_logits)
    t = stored(case)
    num_heads = t["q"].shape[2]
    found: list[list[float]] = [[] for _ in range(num_heads)]
    plain = t | {"sm_scale": float(t["sm_scale"]), "tree_mask": unpacked(t["tree_mask"])}
    for b, i, h in np.ndindex(*t["q"].shape[:3]):
        found[h] += logits(plain, b, i, h)
    ordinary, spread, above, below, far_below = (np.array(x) for x in found)
    assert np.abs(ordinary).max() < 20 and 2 < ordinary.std() < 4
    assert 2000 < spread.std() < 4000 and 7e3 < np.abs(spread).max() < 2e4 and (spread > 0).any()
    assert above.min() > 9.9e3 and below.max() < -9.9e3 and far_below.max() < -5e4
    # Close to each other, so that several keys have weight.
    assert all(2 < x.std() < 4 for x in (above, below, far_below))
    assert (t["lse"][:, :, 4] < -5e4).all()


@each_case
def test_trees_are_real_and_mask_and_depths_follow_parents(case: make_refs.Case) -> None:
    t = stored(case)
    num_requests, num_nodes = t["parents"].shape
    for b in range(num_requests):
        count = int(t["num_nodes"][b])
        parents, depths = t["parents"][b].tolist(), t["depths"][b].tolist()
        sees: list[set[int]] = [{0}]
        for i in range(1, count):
            assert 0 <= parents[i] < i
            assert depths[i] == depths[parents[i]] + 1
            sees.append(sees[parents[i]] | {i})
        assert parents[0] == -1 and depths[0] == 0
        assert parents[count:] == [-1] * (num_nodes - count) and depths[count:] == [0] * (num_nodes - count)
        sees += [set()] * (num_nodes - count)
        packed_rows = [sum(int(word) << 32 * n for n, word in enumerate(words)) for words in t["tree_mask"][b]]
        assert packed_rows == [sum(2**j for j in row) for row in sees]
        leaves = count - len(set(parents[1:count]))
        branching = [i for i in range(count) if parents.count(i) >= 2]
        assert leaves >= 2 and 2 <= max(depths) <= 8
        assert count <= 7 or (max(depths) >= 3 and leaves >= 3 and any(i > 0 for i in branching))
    masks = {t["tree_mask"][b].tobytes() for b in range(num_requests)}
    assert len(masks) == num_requests, "equal masks would hide a mix-up of requests"


@each_case
def test_statistics_say_what_the_logits_are(case: make_refs.Case) -> None:
    t = stored(case)
    factors, shifts = np.array(case.head_logits or [(1.0, 0.0)]).T
    spread = math.sqrt(np.mean((factors * case.logit_std) ** 2 + shifts**2) - np.mean(shifts) ** 2)
    assert float(t["logit_std"]) == pytest.approx(spread, rel=0.15)
    found = oracle.logit_statistics(**{name: t[name] for name in ARGUMENTS if name in t})
    assert found == {name: pytest.approx(float(t[name]), rel=1e-12) for name in STATISTICS}
    # Real caches have a mean, which outputs keep while the rest averages out.
    latent = t["kv_cache"][..., : case.kv_lora_rank].astype(np.float64)
    means = np.abs(np.nanmean(latent, axis=(0, 1), dtype=np.float64))
    assert means.max() > 0.5 * case.latent_std


def test_some_nodes_see_nothing_and_some_only_the_prefix() -> None:
    empty, prefix_only = 0, 0
    for case in make_refs.CASES:
        t = stored(case)
        blind = (t["tree_mask"] == 0).all(axis=2)
        nothing = blind & (t["cache_seqlens"] == 0)[:, None]
        assert (t["lse"][nothing] == -np.inf).all() and (t["out"][nothing] == 0).all()
        assert np.isfinite(t["lse"][~nothing]).all() and (t["out"][~nothing] != 0).any(axis=2).all()
        empty += int(nothing.sum())
        prefix_only += int((blind & ~nothing).sum())
    assert empty and prefix_only


# Files of merge_states


@each_merge_case
def test_layout_of_merge_files(case: make_refs.MergeCase) -> None:
    t = stored(case)
    assert t["operator"].tobytes() == b"merge_states"
    for name, dtype in (("out_a", case.dtype), ("out_b", case.dtype), ("out", "float32")):
        assert (t[name].dtype.name, t[name].shape) == (dtype, case.shape), name
    for name in ("lse_a", "lse_b", "lse"):
        assert (t[name].dtype.name, t[name].shape) == ("float32", case.shape[:-1]), name
    assert (REFS / f"{case.name}.kdtr").stat().st_size < 3e4


@each_merge_case
def test_merge_files_hold_what_the_definition_says(case: make_refs.MergeCase) -> None:
    t = stored(case)
    for row in np.ndindex(*case.shape[:-1]):
        states = [(float(t[f"lse_{x}"][row]), t[f"out_{x}"][row].astype(np.float64)) for x in "ab"]
        for lse, out in states:
            assert np.isnan(out).all() if math.isinf(lse) else np.isfinite(out).all()
        states = [(lse, out) for lse, out in states if not math.isinf(lse)]
        if not states:
            assert t["lse"][row] == -np.inf and (t["out"][row] == 0).all()
            continue
        top = max(lse for lse, _ in states)
        total = math.fsum(math.exp(lse - top) for lse, _ in states)
        mean = sum(math.exp(lse - top) / total * out for lse, out in states)
        np.testing.assert_allclose(t["out"][row], mean, rtol=0, atol=3e-7)
        assert t["lse"][row] == pytest.approx(top + math.log(total), rel=1e-7, abs=1e-7)


def test_merge_files_hold_each_difficulty() -> None:
    assert {case.dtype for case in make_refs.MERGE_CASES} == {"float32", "bfloat16", "float16"}
    for case in make_refs.MERGE_CASES:
        t = stored(case)
        a, b = t["lse_a"].ravel(), t["lse_b"].ravel()
        for x, y in ((a, b), (b, a)):
            assert ((x == -np.inf) & np.isfinite(y)).any() and ((x == np.inf) & np.isfinite(y)).any()
        for x, y in ((-np.inf, -np.inf), (np.inf, np.inf), (np.inf, -np.inf)):
            assert ((a == x) & (b == y)).any()
        both = np.isfinite(a) & np.isfinite(b)
        a, b = a[both].astype(np.float64), b[both].astype(np.float64)
        for gap in (0, 1e-3, 1, 100, 1e4):
            assert np.isclose(np.abs(a - b), gap, rtol=1e-6, atol=0).any(), gap
        for size in (1e5, -1e5):
            assert ((np.abs(a - size) < 2) & (np.abs(b - size) < 2) & (a != b)).any()
        assert ((a > b) & (np.abs(a) < 10)).any() and ((a < b) & (np.abs(a) < 10)).any()
        ordinary = t["lse_a"].ravel()[len(make_refs.MERGE_ROWS) :]
        assert len(ordinary) >= 8 and 1 < ordinary.std() < 6


# Files of topk_logprobs


@each_topk_case
def test_layout_of_topk_files(case: make_refs.TopkCase) -> None:
    t = stored(case)
    rows = (case.batch, case.draft_positions)
    assert t["operator"].tobytes() == b"topk_logprobs"
    assert (t["logits"].dtype.name, t["logits"].shape) == (case.dtype, (*rows, case.vocabulary))
    assert (t["k"].dtype, t["k"].shape, int(t["k"])) == (np.int32, (), case.k)
    assert (t["logprobs"].dtype, t["logprobs"].shape) == (np.float32, (*rows, case.k))
    assert (t["token_ids"].dtype, t["token_ids"].shape) == (np.int32, (*rows, case.k))
    assert (t["lse"].dtype, t["lse"].shape) == (np.float64, rows)


@each_topk_case
def test_topk_files_hold_the_best_tokens_in_order(case: make_refs.TopkCase) -> None:
    t = stored(case)
    for row in np.ndindex(*t["lse"].shape):
        logits, ids, logprobs = t["logits"][row].astype(np.float64), t["token_ids"][row], t["logprobs"][row]
        if not np.isfinite(t["lse"][row]):
            assert np.isnan(logits).any() or logits.max() in (np.inf, -np.inf)
            assert (ids == -1).all() and (logprobs == -np.inf).all()
            continue
        assert len(set(ids.tolist())) == case.k
        for (x, i), (y, j) in itertools.pairwise(zip(logits[ids], ids, strict=True)):
            assert x > y or (x == y and i < j)
        left = np.delete(logits, ids)
        last = logits[ids[-1]]
        assert (left <= last).all() and (np.setdiff1d(np.flatnonzero(logits == last), ids) > ids[-1]).all()
        with np.errstate(over="raise"):
            assert math.isclose(np.exp(logits - t["lse"][row]).sum(), 1, rel_tol=1e-12)
        assert (logprobs == (logits[ids] - t["lse"][row]).astype(np.float32)).all()


def test_topk_files_hold_each_difficulty() -> None:
    special = [case for case in make_refs.TOPK_CASES if case.special == make_refs.EVERY]
    assert {case.dtype for case in make_refs.TOPK_CASES} == {"float32", "float16", "bfloat16"}
    assert {case.k for case in special} >= {1} and any(case.k == case.vocabulary for case in special)
    assert max(case.vocabulary for case in make_refs.TOPK_CASES) > 4096
    for case in special:
        t = stored(case)
        logits = t["logits"].astype(np.float64).reshape(-1, case.vocabulary)
        lse = t["lse"].ravel()
        named = dict(zip(make_refs.SPECIAL_ROWS, range(len(logits)), strict=True))
        refused = ~np.isfinite(lse)
        wanted = {"a NaN", "nothing but -inf", "a +inf", "a NaN in front"}
        assert {name for name, row in named.items() if refused[row]} == wanted
        assert not (refused[1:] & refused[:-1]).any(), "a row's failure could hide behind its neighbour's"
        assert len(set(logits[named["all equal"]])) == 1
        assert (logits[named["the maximum three times"]] == 50).sum() == 3
        assert 1 <= np.isneginf(logits[named["some -inf"]]).sum() < case.vocabulary / 8
        assert 1 <= np.isfinite(logits[named["few finite ones"]]).sum() <= max(1, case.k - 3)
        assert lse[named["large"]] > 1000 and lse[named["very negative"]] < -980
        assert np.exp(logits[named["one far above the others"]] - 200).sum() == 1
        zeros = logits[named["zeros of both signs"]]
        assert zeros.max() == 0 and len(set(np.signbit(zeros[zeros == 0]))) == 2
        assert np.signbit(zeros[zeros == 0])[0]
        assert (np.diff(logits[named["rising"]]) >= 0).all() and logits[named["rising"]].std() > 2
        assert len(set(logits[named["whole numbers"]])) < 25
    ties = stored(make_refs.TOPK_CASES[1])  # bfloat16 rounds different logits to the same value
    chosen = np.take_along_axis(ties["logits"].astype(np.float64), ties["token_ids"], axis=2)
    assert (np.diff(chosen, axis=2) == 0).sum() > 20


# Files of build_tree and tree_encodings

TREE_ARRAYS = {
    "tokens": "int32",
    "parents": "int32",
    "depths": "int32",
    "scores": "float64",
    "num_nodes": "int32",
    "tree_mask": "uint32",
    "first_child": "int32",
    "next_sibling": "int32",
    "input_ids": "int32",
    "max_depth": "int32",
}


def check_tree_layout(t: dict[str, Any], prefix: str, batch: int, num_nodes: int) -> None:
    shapes = {
        "num_nodes": (batch,),
        "tree_mask": (batch, num_nodes, -(-num_nodes // 32)),
        "max_depth": (),
    }
    for name, dtype in TREE_ARRAYS.items():
        array = t[prefix + name]
        assert (array.dtype.name, array.shape) == (dtype, shapes.get(name, (batch, num_nodes))), name


@each_tree_case
def test_layout_of_tree_files(case: make_refs.TreeCase) -> None:
    t = stored(case)
    rows = (case.batch, case.draft_positions, case.candidates)
    assert t["operator"].tobytes() == b"build_tree"
    assert (t["logprobs"].dtype, t["logprobs"].shape) == (np.float32, rows)
    assert (t["token_ids"].dtype, t["token_ids"].shape) == (np.int32, rows)
    assert (t["root_tokens"].dtype, t["root_tokens"].shape) == (np.int32, (case.batch,))
    assert (t["tree_budget"].dtype, t["tree_budget"].shape) == (np.int32, ())
    assert int(t["tree_budget"]) == case.tree_budget
    check_tree_layout(t, "", case.batch, case.tree_budget + 1)
    assert int(t["max_depth"]) == min(case.draft_positions, case.tree_budget) >= t["depths"].max()
    # What a drafter gives: falling rows up to their end. Each token of a row is another.
    live = np.logical_and.accumulate(np.isfinite(t["logprobs"]), axis=2)
    falling = np.where(live, t["logprobs"], -np.inf)
    assert (falling <= 0).all() and (falling[..., 1:] <= falling[..., :-1]).all()
    assert live.all() == (case.kind != "ended")
    assert (np.diff(np.sort(t["token_ids"], axis=2), axis=2) > 0).all() and (t["token_ids"] >= 0).all()
    # Different requests, so that a mix-up shows; token 0 among the nodes.
    assert len({t["scores"][b].tobytes() for b in range(case.batch)}) == (case.batch if case.tree_budget else 1)
    assert (t["tokens"][t["parents"] >= 0] == 0).any() or case.tree_budget == 0
    assert t["root_tokens"][-1] == 0


def test_tree_files_hold_each_difficulty() -> None:
    files = {case.name.removeprefix("build_tree_"): stored(case) for case in make_refs.TREE_CASES}
    sizes = {name: t["num_nodes"].tolist() for name, t in files.items()}
    assert sizes["steep_l3_k3_b64"] == [40, 40], "fewer prefixes than the budget"
    assert sizes["steep_l12_k1_b20"] == [13, 13] and sizes["steep_l4_k4_b0"] == [1, 1]
    assert (files["flat_l1_k40_b40"]["depths"][:, 1:] == 1).all() and sizes["flat_l1_k40_b40"] == [41, 41]
    assert sizes["ended_l5_k6_b32"] == [33, 33, 33, 1, 33, 33, 7, 33]
    ends = files["ended_l5_k6_b32"]["logprobs"]
    assert np.isnan(ends).any() and np.isposinf(ends).any() and np.isneginf(ends).any()
    assert sizes["flat_l16_k32_b255"] == [256, 256] and sizes["flat_l12_k20_b1100"] == [1101]
    assert any(t["depths"].max() >= 6 and t["num_nodes"].max() > 65 for t in files.values())

    # Ties decide: between neighbours in a row, and between paths of different depths.
    for name in ("bfloat16_l4_k8_b31", "equal_l3_k5_b100", "flat_l15_k64_b64", "flat_l16_k32_b255"):
        scores, depths = files[name]["scores"], files[name]["depths"]
        tied = scores[:, 1:] == scores[:, :-1]
        assert tied[np.isfinite(scores[:, 1:])].sum() >= 5, name
        assert (tied & (depths[:, 1:] != depths[:, :-1])).any(), name
    rounded = files["bfloat16_l4_k8_b31"]["logprobs"]
    assert (rounded.astype(ml_dtypes.bfloat16).astype(np.float32) == rounded).all()

    # A sum along the path is not always the score: here the order of the additions shows.
    t = files["wide_l5_k6_b100"]
    differing = 0
    for b, values in enumerate(t["logprobs"].astype(np.float64)):
        found = trees.best_first_tree(t["logprobs"][b], int(t["tree_budget"]))
        for ranks, score in zip(found["ranks"], found["scores"], strict=True):
            differing += score != sum(values[d, r] for d, r in enumerate(ranks))
    assert differing >= 10


@each_encoding_case
def test_layout_of_encoding_files(case: make_refs.EncodingCase) -> None:
    t = stored(case)
    batch, num_nodes = len(case.tree_sizes) + 3, case.num_nodes
    assert t["operator"].tobytes() == b"tree_encodings"
    for prefix in ("", "breadth_first.", "depth_first."):
        check_tree_layout(t, prefix, batch, num_nodes)
        assert t[prefix + "num_nodes"].tolist() == [*case.tree_sizes, *[num_nodes] * 3]
    lengths = t["cache_seqlens"]
    assert lengths.dtype == np.int32 and lengths[-1] == 0 and lengths.max() > 0
    assert t["full_mask"].shape == (num_nodes * (int(lengths.sum()) + batch * num_nodes),)
    assert t["retrieve_indices"].shape == (batch, num_nodes - 1, num_nodes)
    assert ("bitpacked_mask" in t) == (num_nodes <= 32)
    for order in ("breadth_first", "depth_first"):
        assert (t[f"{order}.parents"] != t["parents"]).any(), "the order of the file is another"


def test_encoding_files_have_trees_around_the_borders_of_words() -> None:
    sizes = {size for case in make_refs.ENCODING_CASES for size in (*case.tree_sizes, case.num_nodes)}
    assert sizes >= {1, 31, 32, 33, 64, 65}
    words = {stored(case)["bitpacked_mask"].dtype.name for case in make_refs.ENCODING_CASES if case.num_nodes <= 32}
    assert words == {"uint8", "uint16", "uint32"}


# Files of the accept operators

ACCEPTED = ("nodes", "num_accepted", "bonus_tokens", "flags", "tokens")


def check_accepted_layout(t: dict[str, Any], prefix: str, batch: int, max_depth: int) -> None:
    for name in ACCEPTED:
        shape = (batch, max_depth + 1) if name in ("nodes", "tokens") else (batch,)
        assert (t[prefix + name].dtype, t[prefix + name].shape) == (np.int32, shape), name


def tree_of(t: dict[str, Any]) -> dict[str, Any]:
    return {name: t[name] for name in TREE_ARRAYS}


@each_argmax_case
def test_argmax_files_hold_the_first_of_the_largest(case: make_refs.ArgmaxCase) -> None:
    t = stored(case)
    assert t["operator"].tobytes() == b"argmax_tokens"
    rows = (case.batch, case.num_nodes)
    assert (t["logits"].dtype.name, t["logits"].shape) == (case.dtype, (*rows, case.vocabulary))
    assert (t["target_tokens"].dtype, t["target_tokens"].shape) == (np.int32, rows)
    logits, tokens = t["logits"].astype(np.float64).reshape(-1, case.vocabulary), t["target_tokens"].ravel()
    for row, token in zip(logits, tokens, strict=True):
        if np.isnan(row).any():
            assert token == -1
        else:
            assert (row <= row[token]).all() and (row[:token] < row[token]).all()
    refused = tokens == -1
    assert not (refused[1:] & refused[:-1]).any(), "a row's failure could hide behind its neighbour's"
    assert refused.any()


def test_argmax_files_hold_each_difficulty() -> None:
    assert {case.dtype for case in make_refs.ARGMAX_CASES} == {"float32", "float16", "bfloat16"}
    assert {case.vocabulary for case in make_refs.ARGMAX_CASES} >= {1, 8193}
    special = [case for case in make_refs.ARGMAX_CASES if case.special == tuple(make_refs.ARGMAX_ROWS)]
    assert {case.dtype for case in special} == {"float32", "float16", "bfloat16"}
    for case in special:
        tokens = stored(case)["target_tokens"].ravel().tolist()
        named = dict(zip(make_refs.ARGMAX_ROWS, tokens, strict=False))
        last = case.vocabulary - 1
        assert named["the maximum at the end, three times"] == last - 2
        assert named["-inf but for the last"] == last and named["rising"] > last - 4
        assert named["all equal"] == named["nothing but -inf"] == named["the maximum at the front"] == 0
        assert named["the maximum three times"] == named["a +inf, twice"] == 5
        assert named["a NaN behind the maximum"] == named["a NaN in front"] == named["a NaN among -inf"] == -1
        zeros = stored(case)["logits"].reshape(-1, case.vocabulary)[list(named).index("zeros of both signs")]
        assert zeros[named["zeros of both signs"]] == 0 and np.signbit(zeros[named["zeros of both signs"]])


@each_greedy_case
def test_layout_of_greedy_files(case: make_refs.GreedyCase) -> None:
    t = stored(case)
    batch = len(case.walks) + case.random_trees
    assert t["operator"].tobytes() == b"accept_greedy"
    check_tree_layout(t, "", batch, case.num_nodes)
    assert (t["target_tokens"].dtype.name, t["target_tokens"].shape) == (case.dtype, (batch, case.num_nodes))
    shape = (3,) if case.dtype == "int64" else (batch, 2)
    assert (t["stop_tokens"].dtype.name, t["stop_tokens"].shape) == (case.dtype, shape)
    check_accepted_layout(t, "accepted.", batch, case.max_depth)
    assert int(t["max_depth"]) == case.max_depth


def test_greedy_files_hold_what_their_walks_are_for() -> None:
    found: dict[str, tuple[list[int], int, int]] = {}
    for case in make_refs.GREEDY_CASES:
        t = stored(case)
        for b, name in enumerate(case.walks):
            nodes = t["accepted.nodes"][b, : t["accepted.num_accepted"][b]].tolist()
            found[name] = nodes, int(t["accepted.bonus_tokens"][b]), int(t["accepted.flags"][b])
        random = t["accepted.num_accepted"][len(case.walks) :]
        assert len(set(random.tolist())) > 1 and random.max() >= 3
    leaf, chain = [0, 1, 3, 6, 9], list(range(40))
    assert found == {
        "to a leaf": (leaf, 99, 0),
        "no node": ([], -1, 0),
        "the root alone": ([0], 5, 0),
        "no child": ([0, 1], 14, 0),
        "nothing at the root": ([0], 3, 0),
        "the second child": ([0, 2, 5, 8], 11, 0),
        "equal siblings": ([0, 1], 6, 0),
        "equal siblings in a row": ([0, 1, 2, 5], 6, 0),
        "token 0": ([0, 2, 3], 0, 0),
        "a stop token as a node": (leaf[:3], -1, accept.STOPPED),
        "a stop token as the last node": (leaf, -1, accept.STOPPED),
        "a stop token as the bonus": (leaf, 99, accept.STOPPED),
        "a stop token off the path": (leaf, 99, 0),
        "token 0 stops": ([0, 2], -1, accept.STOPPED),
        "no target at the root": ([0], -1, accept.BAD_TARGET),
        "no target at a node": (leaf[:3], -1, accept.BAD_TARGET),
        "no target at the last node": (leaf, -1, accept.BAD_TARGET),
        "no target off the path": (leaf, 99, 0),
        "a link to itself": ([0], 11, accept.BAD_LINK),
        "a link back": (leaf[:3], 15, accept.BAD_LINK),
        "a link behind the last node": (leaf[:4], 18, accept.BAD_LINK),
        "a link behind all": (leaf[:4], 18, accept.BAD_LINK),
        "a negative link": (leaf[:2], 12, accept.BAD_LINK),
        "a broken link that is not met": (leaf, 99, 0),
        "a stop token and a broken link": (leaf[:3], 15, accept.BAD_LINK | accept.STOPPED),
        "a negative number of nodes": ([], -1, 0),
        "more nodes than there is room for": (chain[:7], 37, 0),
        "fewer nodes than have links": (leaf[:3], 15, accept.BAD_LINK),
        "a long chain": (chain, 77, 0),
        "a chain, left at node 33": (chain[:34], 9, 0),
        "a chain, stopped behind node 34": (chain[:35], 555, accept.STOPPED),
        "the largest token": (chain[:6], 2**31 - 1, 0),
        "above the largest token": (chain[:7], -1, accept.BAD_TARGET),
        "a token of 41 bits": (chain[:8], -1, accept.BAD_TARGET),
        "a token of -2**40": (chain[:9], -1, accept.BAD_TARGET),
    }


@each_sampled_case
def test_layout_of_sampled_files(case: make_refs.SampledCase) -> None:
    t = stored(case)
    rows = (case.batch, case.num_nodes)
    assert t["operator"].tobytes() == b"accept_sampled"
    check_tree_layout(t, "", *rows)
    assert (t["target_probs"].dtype.name, t["target_probs"].shape) == (case.dtype, (*rows, case.vocabulary))
    dtypes = [t[name].dtype.name for name in ("seeds", "positions", "uniforms", "stop_tokens")]
    if case.position_a_node:
        assert dtypes == ["uint64", "int32", "float64", "int32"] and t["positions"].shape == rows
    else:
        assert dtypes == ["int64", "int64", "float32", "int32"] and t["positions"].shape == rows[:1]
    assert t["seeds"].shape == rows[:1] and t["uniforms"].shape == rows and t["stop_tokens"].shape == (2,)
    for kind in ("seeded.", "uniform."):
        check_accepted_layout(t, kind, case.batch, 6)
    # The ordinary rows sum to 1, exactly before they are rounded to 16 bits.
    sums = t["target_probs"].astype(np.float64).sum(axis=2)
    ordinary = sums[np.arange(case.batch) > 20 * case.special]
    assert (ordinary == 1).all() if case.dtype == "float32" else np.abs(ordinary - 1).max() < 0.01


@each_sampled_case
def test_sampled_files_hold_what_was_drawn(case: make_refs.SampledCase) -> None:
    """A token that has probability, at each node; the tokens lead along the path; the two kinds of draws differ."""
    t = stored(case)
    for kind in ("seeded.", "uniform."):
        for b, count in enumerate(t[f"{kind}num_accepted"].tolist()):
            nodes, tokens = t[f"{kind}nodes"][b, :count].tolist(), t[f"{kind}tokens"][b].tolist()
            assert t["tokens"][b, nodes[1:]].tolist() == tokens[: max(count - 1, 0)]
            for node, token in zip(nodes, tokens, strict=False):
                assert token == -1 or t["target_probs"][b, node, token] > 0
    assert (t["seeded.tokens"] != t["uniform.tokens"]).any()


def test_sampled_files_hold_each_difficulty() -> None:
    assert {case.dtype for case in make_refs.SAMPLED_CASES} == {"float32", "bfloat16"}
    refused = {"all zero", "a NaN", "below 0", "above 1", "+inf", "too tiny"}
    for case in (case for case in make_refs.SAMPLED_CASES if case.special):
        t = stored(case)
        names = list(make_refs.LAW_ROWS)
        behind = len(names) + len(make_refs.BAD_UNIFORMS)
        for kind in ("seeded.", "uniform."):
            bad = (t[f"{kind}flags"] & accept.BAD_TARGET) > 0
            assert {name for name, x in zip(names, bad, strict=False) if x} == refused
            assert not (bad[1 : len(names)] & bad[: len(names) - 1]).any()
            assert t[f"{kind}num_accepted"][behind] == 0, "an idle request"
            assert t[f"{kind}num_accepted"][behind + 1] == 2 and bad[behind + 1], "a second node without a law"
            assert t[f"{kind}num_accepted"].max() >= 3
            assert t[f"{kind}bonus_tokens"][names.index("one token")] == case.vocabulary - 1
            assert t[f"{kind}bonus_tokens"][names.index("one of them just large enough")] == 5
        uniforms = t["uniforms"][len(names) : behind, 0]
        np.testing.assert_array_equal(uniforms, make_refs.BAD_UNIFORMS)
        assert (t["uniform.flags"][len(names) : behind] & 1).tolist() == [0, 1, 1, 0, 0]
        # The ends of the unit interval, at a row whose first and last tokens have no probability.
        zeros = names.index("zeros on both sides")
        assert t["uniforms"][zeros, 0] == 0 and t["uniform.tokens"][zeros, 0] >= 3
        assert {0.0, 1 - 2**-24} <= set(t["uniforms"][: len(names), 0].astype(np.float64).tolist())
        assert (t["seeds"].view(np.uint64) >= 2**63).any() and (t["seeds"].view(np.uint64) < 2**63).any()
        # Positions that carry into their high half within a walk, or out of it.
        roots = (t["positions"][:, 0] if case.position_a_node else t["positions"])[-2:]
        assert roots.tolist() == [2**31 - 9 if case.position_a_node else 2**32 - 1, -2]
        assert t["seeded.num_accepted"][-1] >= 3 and t["seeded.num_accepted"][-2] >= 2
        # A stop token as a node, and as the bonus token.
        stopped = {(kind, x >= 0) for kind in ("seeded.", "uniform.") for x in stopped_bonuses(t, kind)}
        assert {as_bonus for _, as_bonus in stopped} == {False, True}


def stopped_bonuses(t: dict[str, Any], kind: str) -> list[int]:
    """Bonus tokens of the requests that a stop token ended; -1 where it was a node."""
    return t[f"{kind}bonus_tokens"][(t[f"{kind}flags"] & accept.STOPPED) > 0].tolist()


@each_probs_case
def test_probs_files_hold_laws_of_what_is_kept(case: make_refs.ProbsCase) -> None:
    t = stored(case)
    batch = len(case.requests)
    assert t["operator"].tobytes() == b"target_probs"
    shape = (batch, case.num_nodes, case.vocabulary)
    assert (t["logits"].dtype.name, t["logits"].shape) == (case.dtype, shape)
    assert (t["target_probs"].dtype, t["target_probs"].shape) == (np.float32, shape)
    for name, dtype in (("temperature", "float32"), ("top_k", "int32"), ("top_p", "float32")):
        assert (t[name].dtype.name, t[name].shape) == (dtype, (batch,))
    for b, i in np.ndindex(*shape[:2]):
        logits, probs = t["logits"][b, i].astype(np.float64), t["target_probs"][b, i].astype(np.float64)
        if np.isnan(logits).any() or not np.isfinite(logits.max()):
            assert not probs.any()
            continue
        assert probs.sum() == pytest.approx(1, rel=1e-6)
        keeps = probs > 0
        least = logits[keeps].min()
        if t["temperature"][b] == 0:
            assert np.flatnonzero(keeps).tolist() == [int(np.argmax(logits))]
            continue
        assert (keeps == (np.isfinite(logits) & (logits >= least))).all(), "of equal logits, all or none"
        exact = np.exp((logits - logits.max()) / float(t["temperature"][b])) * keeps
        np.testing.assert_allclose(probs, exact / exact.sum(), rtol=1e-6)
        top_k, top_p = int(t["top_k"][b]), float(t["top_p"][b])
        if 0 < top_k < case.vocabulary:
            assert (logits > least).sum() < top_k
        if top_p >= 1:
            assert keeps.sum() >= min(top_k if top_k > 0 else case.vocabulary, np.isfinite(logits).sum())


def test_probs_files_hold_each_difficulty() -> None:
    assert {case.dtype for case in make_refs.PROBS_CASES} == {"float32", "bfloat16"}
    for case in make_refs.PROBS_CASES:
        t = stored(case)
        keeps = (t["target_probs"] > 0).sum(axis=2)
        limited = (t["temperature"] > 0) & ((t["top_p"] < 1) | ((t["top_k"] > 0) & (t["top_k"] < case.vocabulary)))
        assert (t["temperature"] == 0).any() and (~limited).any() and limited.sum() >= 3
        assert len(set(keeps[limited].ravel().tolist())) >= 4
        by_k = (t["top_k"] > 0) & (t["top_k"] < case.vocabulary) & (t["top_p"] >= 1) & (t["temperature"] > 0)
        if by_k.any():
            assert (keeps[by_k] > t["top_k"][by_k, None]).any(), "more are kept than top_k, by a tie"
        assert t["target_probs"][t["target_probs"] > 0].min() > 2.0**-100, "nothing underflows"
        assert (keeps == 0).any() or not case.special


@each_compact_case
def test_compact_files_hold_what_moved(case: make_refs.CompactCase) -> None:
    t = stored(case)
    batch = len(case.prefixes)
    assert t["operator"].tobytes() == b"compact_kv"
    assert t["cache_seqlens"].tolist() == list(case.prefixes) and t["cache_seqlens"].dtype == np.int32
    check_accepted_layout(t, "accepted.", batch, 8)
    assert ("block_table" in t) == (case.page_size is not None)
    for n, columns in enumerate(case.layers):
        old, new = t[f"kv_cache_{n}"], t[f"compacted.kv_cache_{n}"]
        assert old.dtype.name == new.dtype.name == case.dtype and old.shape == new.shape and old.shape[2:] == columns
        assert (old.shape[1] if case.page_size else old.shape[:2]) == (case.page_size or (batch, make_refs.CAPACITY))
        rows = old.reshape(-1, math.prod(columns)).view(np.uint8)
        assert len(np.unique(rows, axis=0)) > 0.99 * len(rows), "rows differ"
        changed = (old.view(np.uint8) != new.view(np.uint8)).reshape(*old.shape[:2], -1).any(axis=2)
        assert 4 <= changed.sum() <= t["accepted.num_accepted"].sum()
    assert t["x"].shape == (batch, case.num_nodes, make_refs.HIDDEN_SIZE) and t["x"].dtype == np.float32
    assert t["gathered"].shape == (batch, 9, make_refs.HIDDEN_SIZE) and t["gathered"].dtype == np.float32
    for b, count in enumerate(t["accepted.num_accepted"].tolist()):
        nodes = t["accepted.nodes"][b, :count]
        assert (t["gathered"][b, :count] == t["x"][b, nodes]).all() and (t["gathered"][b, count:] == 0).all()
    assert t["accepted.num_accepted"][make_refs.IDLE_REQUEST] == 0


def test_compact_files_hold_each_difficulty() -> None:
    cases = {case.page_size: case for case in make_refs.COMPACT_CASES}
    assert set(cases) == {None, 16, 64}
    for page_size, case in cases.items():
        t = stored(case)
        lengths, nodes, counts = t["cache_seqlens"], t["accepted.nodes"], t["accepted.num_accepted"]
        # Where a row is read and another one is written over it.
        assert any(len(set(nodes[b, :n].tolist()) & set(range(n))) > 1 for b, n in enumerate(counts.tolist()))
        after = t["compacted.cache_seqlens"]
        if page_size is None:
            assert (lengths < 0).any() and (after[lengths < 0] == lengths[lengths < 0]).all()
            full = lengths + counts > make_refs.CAPACITY
            assert full.any() and (after[full] == lengths[full]).all()
            last = np.take_along_axis(nodes, np.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
            assert ((lengths + last >= make_refs.CAPACITY) & ~full & (after > lengths)).any(), "a move is left out"
            assert t["kv_cache_0"].shape[2:] != t["kv_cache_1"].shape[2:]
            continue
        assert (after == lengths + counts).all()
        moves = [
            ((lengths[b] + nodes[b, k]) // page_size, (lengths[b] + k) // page_size)
            for b, n in enumerate(counts.tolist())
            for k in range(n)
        ]
        assert any(source > target for source, target in moves), "over the border of a page"
        assert len({target for _, target in moves}) > 1
    assert (stored(cases[16])["block_table"] == -5).any()


@each_sglang_case
def test_sglang_files_hold_what_the_walk_accepts(case: make_refs.SglangCase) -> None:
    t = stored(case)
    rows = (case.batch, case.num_nodes)
    assert t["operator"].tobytes() == b"verify_tree_greedy"
    forms = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")
    for name in forms:
        assert (t[name].dtype.name, t[name].shape) == (case.dtype, rows), name
    shapes = {
        "predicts": (math.prod(rows),),
        "accept_index": (case.batch, case.columns),
        "accept_token_num": (case.batch,),
    }
    for name, shape in shapes.items():
        for prefix in ("", "accepted."):
            assert (t[prefix + name].dtype, t[prefix + name].shape) == (np.int32, shape), name
    links = np.concatenate([t["retrive_next_token"][:, 1:], t["retrive_next_sibling"][:, 1:]], axis=1)
    nodes = np.tile(np.arange(1, case.num_nodes), 2)
    assert (links < nodes).all() and (links >= 0).any(), "links lead to smaller nodes"
    assert sorted(t["retrive_index"].ravel().tolist()) == list(range(math.prod(rows)))
    counts, index = t["accepted.accept_token_num"], t["accepted.accept_index"]
    assert len(set(counts.tolist())) > 1
    targets, written = t["target_predict"].ravel(), np.zeros(math.prod(rows), dtype=bool)
    for b, count in enumerate(counts.tolist()):
        places = index[b, : count + 1]
        assert places[0] == t["retrive_index"][b, 0]
        assert (index[b, count + 1 :] == t["accept_index"][b, count + 1 :]).all()
        tokens = t["candidates"][b].ravel()[[np.flatnonzero(t["retrive_index"][b] == place)[0] for place in places[1:]]]
        assert (tokens == targets[places[:-1]]).all()
        written[places] = True
    assert (t["accepted.predicts"] == np.where(written, targets, t["predicts"])).all()
    assert case.columns > counts.max() + 1 or case.columns == counts.max() + 1 < case.num_nodes


# Best-first trees


def all_prefixes(logprobs: np.ndarray) -> list[tuple[float, tuple[int, ...]]]:
    """Every prefix as (-score, ranks), in the order of the rule; scores by direct sums."""
    found = []
    for depth in range(1, len(logprobs) + 1):
        for ranks in itertools.product(range(logprobs.shape[1]), repeat=depth):
            values = [float(logprobs[d, r]) for d, r in enumerate(ranks)]
            if all(math.isfinite(x) for x in values):
                found.append((-sum(values), ranks))
    return sorted(found)


@pytest.mark.parametrize("seed", range(40))
def test_best_first_is_the_head_of_all_prefixes_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_positions, num_candidates = rng.integers(1, 4, size=2)
    # Few distinct values, zero among them: most pops are decided by a tie. Quarters make direct sums exact.
    drops = rng.integers(0, 1 + seed % 4, size=(num_positions, num_candidates))
    logprobs = (-np.cumsum(drops, axis=1) / 4).astype(np.float32)
    if seed % 3 == 0:
        logprobs[-1, -1] = (-np.inf, np.nan, np.inf)[seed // 3 % 3]
    ordered = all_prefixes(logprobs)
    for tree_budget in (0, 1, 2, 3, 5, 8, 13, 1000):
        tree = trees.best_first_tree(logprobs, tree_budget)
        head = [(0.0, ()), *ordered[:tree_budget]]
        assert tree["ranks"] == [ranks for _, ranks in head]
        assert tree["scores"].tolist() == [-negative for negative, _ in head]
        assert tree["depths"].tolist() == [len(ranks) for _, ranks in head]
        assert tree["parents"][0] == -1
        for ranks, parent in zip(tree["ranks"][1:], tree["parents"][1:], strict=True):
            assert tree["ranks"][parent] == ranks[:-1]
        assert {name: tree[name].dtype.name for name in ("parents", "depths", "scores")} == {
            "parents": "int32",
            "depths": "int32",
            "scores": "float64",
        }


def test_no_other_tree_has_a_higher_expected_acceptance() -> None:
    logprobs = np.log(np.array([[0.5, 0.3, 0.1], [0.6, 0.2, 0.15]], dtype=np.float32))
    prefixes = [ranks for _, ranks in all_prefixes(logprobs)]
    weight = {ranks: math.exp(-negative) for negative, ranks in all_prefixes(logprobs)}
    for tree_budget in range(1, len(prefixes) + 1):
        best = max(
            sum(weight[ranks] for ranks in nodes)
            for nodes in itertools.combinations(prefixes, tree_budget)
            if all(len(ranks) == 1 or ranks[:-1] in nodes for ranks in nodes)
        )
        tree = trees.best_first_tree(logprobs, tree_budget)
        assert sum(weight[ranks] for ranks in tree["ranks"][1:]) == pytest.approx(best, rel=1e-12)


def test_all_ties_give_the_lexicographic_order() -> None:
    tree = trees.best_first_tree(np.zeros((2, 2), np.float32), 10)
    assert tree["ranks"] == [(), (0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("a", "b", "c", "other"),
    [
        (-5.774e-11, -1.0, -5.0, lambda a, b, c: a + c),
        (-8.9e-11, -1.3e-12, -3.4, lambda a, b, c: a + b + (c - b)),
    ],
)
def test_scores_follow_the_recurrence_to_the_last_bit(a: float, b: float, c: float, other: Any) -> None:
    logprobs = np.array([[a, -9.0], [b, c]], dtype=np.float32)
    a, b, c = float(logprobs[0, 0]), float(logprobs[1, 0]), float(logprobs[1, 1])
    assert a + b - b + c != other(a, b, c)
    tree = trees.best_first_tree(logprobs, 10)
    assert tree["scores"][tree["ranks"].index((0, 1))] == a + b - b + c


@pytest.mark.parametrize("end", [np.nan, -np.inf, np.inf])
def test_what_is_not_finite_ends_its_row(end: float) -> None:
    logprobs = np.array([[-0.5, -1, end, -1.5], [end, -1, -2, -3]], dtype=np.float32)
    assert trees.best_first_tree(logprobs, 10)["ranks"] == [(), (0,), (1,)]
    assert trees.best_first_tree(logprobs[1:], 10)["ranks"] == [()]


def test_empty_problems_give_the_root() -> None:
    for logprobs, tree_budget in ((np.zeros((0, 3)), 4), (np.zeros((3, 0)), 4), (np.zeros((3, 3)), 0)):
        tree = trees.best_first_tree(logprobs.astype(np.float32), tree_budget)
        assert (tree["parents"].tolist(), tree["depths"].tolist(), tree["scores"].tolist()) == ([-1], [0], [0.0])
        assert tree["ranks"] == [()]


# Oracle


def problem(seed: int, *, num_nodes: int = 5, paged: bool = False, poison: bool = True) -> dict[str, Any]:
    """Three requests of 7, 0 and 2 prefix rows, R = 4, P = 2, a random mask (no tree), NaN where no live row stands."""
    rng = np.random.default_rng(seed)
    lengths = np.array([7, 0, 2], dtype=np.int32)
    q = rng.standard_normal((3, num_nodes, 2, 6)).astype(np.float32)
    cache = np.full((3, 7 + num_nodes + 4, 6), np.nan if poison else 1.0, dtype=np.float32)
    for b, length in enumerate(lengths):
        cache[b, : length + num_nodes] = rng.standard_normal((length + num_nodes, 6))
    mask = rng.random((3, num_nodes, num_nodes)) < 0.5
    mask[0, 1] = False  # sees the prefix only
    mask[1, 1] = False  # sees nothing
    arguments = {"q": q, "kv_cache": cache, "cache_seqlens": lengths, "tree_mask": mask}
    if paged:
        page_size = 3
        num_pages = -(-cache.shape[1] // page_size)
        table = rng.permutation(3 * num_pages).reshape(3, num_pages).astype(np.int32)
        pages = np.full((3 * num_pages, page_size, 6), np.nan, dtype=np.float32)
        for b, position in np.ndindex(*cache.shape[:2]):
            pages[table[b, position // page_size], position % page_size] = cache[b, position]
        for b, length in enumerate(lengths):
            table[b, -(-(length + num_nodes) // page_size) :] = 2147480000
        arguments |= {"kv_cache": pages, "block_table": table}
    return {**arguments, "sm_scale": 0.7, "kv_lora_rank": 4}


def visible_rows(t: dict[str, Any], b: int, i: int) -> list[list[float]]:
    """The rows that a node sees, as Python floats; tree_mask is bool."""
    length = int(t["cache_seqlens"][b])
    rows = []
    for position in range(length + t["q"].shape[1]):
        if position < length or t["tree_mask"][b][i][position - length]:
            if "block_table" in t:
                page, slot = divmod(position, t["kv_cache"].shape[1])
                rows.append([float(x) for x in t["kv_cache"][t["block_table"][b][page]][slot]])
            else:
                rows.append([float(x) for x in t["kv_cache"][b][position]])
    return rows


def logits(t: dict[str, Any], b: int, i: int, h: int) -> list[float]:
    q = [float(x) for x in t["q"][b, i, h]]
    return [t["sm_scale"] * sum(x * y for x, y in zip(q, row, strict=True)) for row in visible_rows(t, b, i)]


def unpacked(words: np.ndarray) -> np.ndarray:
    """bool [B, Q, Q] of uint32 [B, Q, ceil(Q/32)]."""
    num_nodes = words.shape[1]
    return np.stack([words[..., j // 32] >> np.uint32(j % 32) & np.uint32(1) == 1 for j in range(num_nodes)], axis=-1)


def packed(mask: np.ndarray) -> np.ndarray:
    words = np.zeros((*mask.shape[:2], -(-mask.shape[2] // 32)), dtype=np.uint32)
    for b, i, j in np.argwhere(mask):
        words[b, i, j // 32] += np.uint32(2 ** (j % 32))
    return words


@pytest.mark.parametrize("paged", [False, True])
def test_oracle_against_a_loop_over_elements(paged: bool) -> None:
    t = problem(11, paged=paged)
    out, lse = oracle.verify_attention(**t)
    assert out.dtype == lse.dtype == np.float64 and out.shape == (3, 5, 2, 4) and lse.shape == (3, 5, 2)
    for b, i, h in np.ndindex(*lse.shape):
        rows, weights = visible_rows(t, b, i), [math.exp(s) for s in logits(t, b, i, h)]
        if not rows:
            assert (b, i) == (1, 1) and lse[b, i, h] == -np.inf and out[b, i, h].tolist() == [0] * 4
            continue
        assert lse[b, i, h] == pytest.approx(math.log(sum(weights)), rel=1e-13, abs=1e-13)
        for r in range(4):
            expected = sum(w * row[r] for w, row in zip(weights, rows, strict=True)) / sum(weights)
            assert out[b, i, h, r] == pytest.approx(expected, rel=1e-13, abs=1e-13)
    assert np.isneginf(lse).sum() == 2


def test_oracle_two_keys_by_hand() -> None:
    q = np.ones((1, 1, 1, 3), dtype=np.float32)
    kv_cache = np.array([[[1, 0, 0], [0, 2, 1]]], dtype=np.float32)  # logits 0.5 and 1.5
    out, lse = oracle.verify_attention(q, kv_cache, np.array([1]), None, sm_scale=0.5, kv_lora_rank=2)
    assert out.ravel().tolist() == pytest.approx([1 / (1 + math.e), 2 * math.e / (1 + math.e)], rel=1e-15)
    assert lse.item() == pytest.approx(0.5 + math.log(1 + math.e), rel=1e-15)


def test_oracle_zero_query_gives_the_mean_of_the_visible_rows() -> None:
    t = problem(12)
    out, lse = oracle.verify_attention(**t | {"q": np.zeros_like(t["q"])})
    for b, i, h in np.ndindex(*lse.shape):
        rows = visible_rows(t, b, i)
        if rows:
            np.testing.assert_allclose(out[b, i, h], np.mean(rows, axis=0)[:4], rtol=1e-14, atol=1e-15)
            assert lse[b, i, h] == pytest.approx(math.log(len(rows)), rel=1e-15)


def test_oracle_does_not_overflow() -> None:
    t = problem(13)
    out, lse = oracle.verify_attention(**t | {"sm_scale": 1e5})
    seen = np.isfinite(lse)
    assert np.isfinite(out).all() and seen.sum() == lse.size - 2
    assert np.abs(lse[seen]).max() > 1e4


@pytest.mark.parametrize("num_nodes", [5, 32, 33, 70])
def test_oracle_mask_encodings_agree(num_nodes: int) -> None:
    t = problem(14, num_nodes=num_nodes)
    words = packed(t["tree_mask"])
    expected = oracle.verify_attention(**t)
    if num_nodes % 32:
        words[..., -1] |= np.uint32(2**32 - 2 ** (num_nodes % 32))  # bits behind the last node mean nothing
    for got, want in zip(oracle.verify_attention(**t | {"tree_mask": words}), expected, strict=True):
        assert got.tobytes() == want.tobytes()


def test_oracle_without_a_mask_is_causal() -> None:
    t = problem(15)
    causal = np.broadcast_to(np.arange(5)[:, None] >= np.arange(5), (3, 5, 5))
    expected = oracle.verify_attention(**t | {"tree_mask": causal})
    for got, want in zip(oracle.verify_attention(**t | {"tree_mask": None}), expected, strict=True):
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_oracle_takes_each_float_exactly(dtype: Any) -> None:
    t = problem(16)
    narrow = t | {"q": t["q"].astype(dtype), "kv_cache": t["kv_cache"].astype(dtype)}
    wide = narrow | {name: narrow[name].astype(np.float64) for name in ("q", "kv_cache")}
    for got, want in zip(oracle.verify_attention(**narrow), oracle.verify_attention(**wide), strict=True):
        assert got.tobytes() == want.tobytes()
    assert oracle.logit_statistics(**narrow) == oracle.logit_statistics(**wide)


def test_oracle_reads_no_row_that_a_node_does_not_see() -> None:
    t = problem(17)
    clean = oracle.verify_attention(**t)
    assert np.isfinite(clean[0]).all()  # NaN stands behind the live rows
    t["kv_cache"][0, 7 + 3] = np.nan  # node 3 of request 0
    sees = t["tree_mask"][0, :, 3]
    assert sees.any() and not sees.all()
    out, lse = oracle.verify_attention(**t)
    assert np.isnan(out[0, sees]).all() and np.isnan(lse[0, sees]).all()
    out[0, sees], lse[0, sees] = clean[0][0, sees], clean[1][0, sees]
    assert out.tobytes() == clean[0].tobytes() and lse.tobytes() == clean[1].tobytes()


def test_oracle_idle_slot_reads_no_page() -> None:
    t = problem(18, paged=True)
    t["tree_mask"][1] = False
    t["block_table"][1] = 2147480000  # would be an IndexError
    out, lse = oracle.verify_attention(**t)
    assert (out[1] == 0).all() and (lse[1] == -np.inf).all() and np.isfinite(lse[[0, 2]]).all()


def test_oracle_of_no_request() -> None:
    t = problem(19)
    none = t | {name: t[name][:0] for name in ("q", "kv_cache", "cache_seqlens", "tree_mask")}
    out, lse = oracle.verify_attention(**none)
    assert out.shape == (0, 5, 2, 4) and lse.shape == (0, 5, 2)


@pytest.mark.parametrize("paged", [False, True])
def test_oracle_of_a_part_sees_that_part_alone(paged: bool) -> None:
    t = problem(23, paged=paged)
    blind = t | {"tree_mask": np.zeros_like(t["tree_mask"])}
    for got, want in zip(oracle.verify_attention(**t, part="prefix"), oracle.verify_attention(**blind), strict=True):
        assert got.tobytes() == want.tobytes()
    out, lse = oracle.verify_attention(**t, part="tree")
    for b, i, h in np.ndindex(*lse.shape):
        length = int(t["cache_seqlens"][b])
        seen = int(t["tree_mask"][b, i].sum())
        scores, rows = logits(t, b, i, h)[length:], visible_rows(t, b, i)[length:]
        assert len(scores) == len(rows) == seen
        if not seen:
            assert lse[b, i, h] == -np.inf and (out[b, i, h] == 0).all()
            continue
        weights = [math.exp(s) for s in scores]
        assert lse[b, i, h] == pytest.approx(math.log(sum(weights)), rel=1e-13, abs=1e-13)
        expected = np.average(rows, axis=0, weights=weights)[:4]
        np.testing.assert_allclose(out[b, i, h], expected, rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="part is 'root'; it must be one of: all, prefix, tree"):
        oracle.verify_attention(**t, part="root")


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("sm_scale", [0.02, 0.7, 300.0])
def test_oracle_prefix_and_tree_merge_to_the_whole(sm_scale: float, paged: bool) -> None:
    t = problem(24, paged=paged) | {"sm_scale": sm_scale}
    whole = oracle.verify_attention(**t)
    parts = [oracle.verify_attention(**t, part=part) for part in ("prefix", "tree")]
    assert any(np.isneginf(lse).any() and np.isfinite(lse).any() for _, lse in parts)
    for got, want in zip(oracle.merge_states(*parts[0], *parts[1]), whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@each([case for case in make_refs.CASES if case.kv_lora_rank != 512])
def test_prefix_and_tree_of_files_merge_to_the_expected_values(case: make_refs.Case) -> None:
    t = stored(case)
    arguments = {name: t[name] for name in ARGUMENTS if name in t}
    parts = [oracle.verify_attention(**arguments, part=part) for part in ("prefix", "tree")]
    out, lse = oracle.merge_states(*parts[0], *parts[1])
    np.testing.assert_allclose(out, t["out"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, t["lse"], rtol=1e-6, atol=1e-6)


def test_oracle_refuses_dtypes_that_it_would_misread() -> None:
    t = problem(20)
    for function in (oracle.verify_attention, oracle.logit_statistics):
        for name, dtype in (("q", np.uint16), ("kv_cache", np.uint16), ("tree_mask", np.int64)):
            with pytest.raises(TypeError, match=rf"{name} has dtype {np.dtype(dtype)}"):
                function(**t | {name: np.zeros_like(t[name], dtype=dtype)})


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("sm_scale", [0.02, 0.7, 5.0])  # either term of the magnitude's maximum takes part
def test_logit_statistics_by_loop(sm_scale: float, paged: bool) -> None:
    t = problem(21, paged=paged) | {"sm_scale": sm_scale}
    pooled: list[float] = []
    means: list[float] = []
    for b, i, h in np.ndindex(*t["q"].shape[:3]):
        scores, rows = logits(t, b, i, h), visible_rows(t, b, i)
        if not rows:
            continue
        pooled += scores
        total = sum(math.exp(s) for s in scores)
        mean = 0.0
        for s, row in zip(scores, rows, strict=True):
            walk = sum((sm_scale * float(x) * y) ** 2 for x, y in zip(t["q"][b, i, h], row, strict=True))
            mean += math.exp(s) / total * max(s * s, walk)
        means.append(mean)
    average = sum(pooled) / len(pooled)
    assert oracle.logit_statistics(**t) == {
        "logit_std": pytest.approx(math.sqrt(sum((s - average) ** 2 for s in pooled) / len(pooled)), rel=1e-12),
        "logit_max": pytest.approx(max(abs(s) for s in pooled), rel=1e-12),
        "logit_magnitude": pytest.approx(math.sqrt(sum(means) / len(means)), rel=1e-12),
    }
    assert len(means) == 28  # the node that sees nothing is left out, for both heads


def test_logit_statistics_of_nothing() -> None:
    t = problem(22)
    blind = t | {"cache_seqlens": np.zeros(3, np.int32), "tree_mask": np.zeros_like(t["tree_mask"])}
    assert set(oracle.logit_statistics(**blind).values()) == {0.0}


# Oracle of merge_states


def states(seed: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Attention states [4, 3, 5], [4, 3]: lse far apart and close, one state in five empty."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        lse = rng.choice([0.0, 1e-3, 30.0, -1e5, 1e5], size=(4, 3)) + rng.standard_normal((4, 3))
        lse[rng.random((4, 3)) < 0.2] = rng.choice([-np.inf, np.inf])
        out = rng.standard_normal((4, 3, 5))
        out[np.isinf(lse)] = np.nan
        found.append((out, lse))
    return found


def test_merge_oracle_by_hand() -> None:
    out_a, out_b = np.array([[1.0, 0.0]]), np.array([[0.0, 4.0]])
    for base in (0.0, 700.0, -900.0):  # exp of the last two is inf or 0
        lse_a, lse_b = np.array([base + math.log(3)]), np.array([base])
        out, lse = oracle.merge_states(out_a, lse_a, out_b, lse_b)
        assert out.dtype == lse.dtype == np.float64
        assert out.ravel().tolist() == pytest.approx([0.75, 1.0], rel=1e-12)
        assert lse.tolist() == pytest.approx([base + math.log(4)], rel=1e-15)


def test_merge_oracle_of_softmax_over_parts() -> None:
    rng = np.random.default_rng(31)
    scores, values = 3 * rng.standard_normal(20), rng.standard_normal((20, 5))

    def state(part: slice) -> tuple[np.ndarray, np.ndarray]:
        weights = np.exp(scores[part])
        return weights @ values[part] / weights.sum(), np.log(weights.sum())

    whole = state(slice(None))
    for border in (1, 7, 19):
        merged = oracle.merge_states(*state(slice(border)), *state(slice(border, None)))
        np.testing.assert_allclose(merged[0], whole[0], rtol=1e-12)
        np.testing.assert_allclose(merged[1], whole[1], rtol=1e-14)


def test_merge_oracle_commutes_and_associates() -> None:
    for seed in range(20):
        a, b, c = states(seed, 3)
        for got, want in zip(oracle.merge_states(*a, *b), oracle.merge_states(*b, *a), strict=True):
            assert got.tobytes() == want.tobytes()
        left = oracle.merge_states(*oracle.merge_states(*a, *b), *c)
        right = oracle.merge_states(*a, *oracle.merge_states(*b, *c))
        for got, want in zip(left, right, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-10)  # an lse of 1e5 is rounded by 7e-12


@pytest.mark.parametrize("nothing", [-np.inf, np.inf])
def test_merge_oracle_has_an_identity(nothing: float) -> None:
    ((out, lse),) = states(32, 1)
    seen = np.isfinite(lse)
    wanted = np.where(seen[..., None], out, 0), np.where(seen, lse, -np.inf)
    empty = np.full_like(out, np.nan), np.full_like(lse, nothing)
    for merged in (oracle.merge_states(out, lse, *empty), oracle.merge_states(*empty, out, lse)):
        for got, want in zip(merged, wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    assert seen.any() and not seen.all()


def test_merge_oracle_keeps_a_nan_in_its_row() -> None:
    out, lse = np.ones((3, 1, 2)), np.zeros((3, 1))
    lse[0], out[1, 0, 1] = np.nan, np.nan
    merged, log = oracle.merge_states(np.ones((3, 1, 2)), np.zeros((3, 1)), out, lse)
    assert np.isnan(merged).tolist() == [[[True, True]], [[False, True]], [[False, False]]]
    assert np.isnan(log).tolist() == [[True], [False], [False]]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_merge_oracle_takes_each_float_exactly(dtype: Any) -> None:
    (out_a, lse_a), (out_b, lse_b) = states(33, 2)
    narrow = [out_a.astype(dtype), lse_a.astype(np.float32), out_b.astype(dtype), lse_b.astype(np.float32)]
    wide = [x.astype(np.float64) for x in narrow]
    for got, want in zip(oracle.merge_states(*narrow), oracle.merge_states(*wide), strict=True):
        assert got.tobytes() == want.tobytes()


def test_merge_oracle_refuses_what_it_would_misread() -> None:
    given = {
        "out_a": np.ones((2, 3, 4)),
        "lse_a": np.ones((2, 3)),
        "out_b": np.ones((2, 3, 4)),
        "lse_b": np.ones((2, 3)),
    }
    for name, array in given.items():
        with pytest.raises(TypeError, match=f"{name} has dtype uint16"):
            oracle.merge_states(**given | {name: array.astype(np.uint16)})
    for name, shape in (("out_b", (2, 3, 5)), ("lse_b", (3,)), ("out_a", (3, 4)), ("out_b", (1, 3, 4))):
        with pytest.raises(ValueError, match="has shape"):
            oracle.merge_states(**given | {name: np.ones(shape)})
