"""The command line: check and info."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from ddtree_numba import check, kdtr
from ddtree_numba.__main__ import main
from ddtree_numba.device.runtime import SIMULATOR
from ddtree_numba.tree.draft_tree import DTYPES
from refs import trees

SMALL = check.REFERENCE_FOLDER / "verify_attn_h8_p1_b4.kdtr"
BFLOAT16 = check.REFERENCE_FOLDER / "verify_attn_r32_h9_p150_b16_bf16.kdtr"
PAGED_TENSOR_CORES = check.REFERENCE_FOLDER / "verify_attn_h4_p40_b8_bf16.kdtr"
TENSOR_CORES = check.REFERENCE_FOLDER / "verify_attn_h5_p20_b6_f16.kdtr"
WIDE = check.REFERENCE_FOLDER / "verify_attn_r32_h5_p60_b4_wide.kdtr"
MERGE = check.REFERENCE_FOLDER / "merge_states_r32_f32.kdtr"
MERGE_BFLOAT16 = check.REFERENCE_FOLDER / "merge_states_r48_bf16.kdtr"
TOPK = check.REFERENCE_FOLDER / "topk_logprobs_v300_k1_f32.kdtr"
TREE = check.REFERENCE_FOLDER / "build_tree_steep_l8_k8_b16.kdtr"
ENCODINGS = check.REFERENCE_FOLDER / "tree_encodings_q8.kdtr"
ARGMAX = check.REFERENCE_FOLDER / "argmax_tokens_v61_f32.kdtr"
GREEDY = check.REFERENCE_FOLDER / "accept_greedy_q24_int32.kdtr"
GREEDY_INT64 = check.REFERENCE_FOLDER / "accept_greedy_q40_int64.kdtr"
SAMPLED = check.REFERENCE_FOLDER / "accept_sampled_v41_f32.kdtr"
PROBS = check.REFERENCE_FOLDER / "target_probs_v157_f32.kdtr"
COMPACT = check.REFERENCE_FOLDER / "compact_kv_contiguous_float32.kdtr"
PAGED = check.REFERENCE_FOLDER / "compact_kv_page64_bfloat16.kdtr"
SGLANG = check.REFERENCE_FOLDER / "verify_tree_greedy_q16_int64.kdtr"
QUICK = ["--budget", "0.1"]


def run(capsys, *arguments):
    """Exit code, standard output and standard error of a command."""
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rewritten(tmp_path, source=SMALL, /, **changes):
    """A small reference file with some tensors replaced, or left out where None is given."""
    tensors = {**kdtr.read(source), **changes}
    path = tmp_path / f"{'_'.join(changes)}.kdtr"
    kdtr.write(path, {name: x for name, x in tensors.items() if x is not None})
    return path


# The simulator's NumPy scalars warn where a row is NaN or above 1, and where it adds up such rows' weights.
rows_without_a_law = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")


def variants(path):
    """Those that take a file."""
    tensors = kdtr.read(path)
    every = check.OPERATORS[bytes(tensors["operator"]).decode()].variants
    tensor_cores = tensors["q"].dtype.itemsize == 2 and tensors["q"].shape[3] == 576 if "q" in tensors else False
    hopper = not SIMULATOR and check.wgmma_host.compute_capability(-1)[0] == 9
    every = [variant for variant in every if hopper or variant != "wgmma"]
    return [variant for variant in every if tensor_cores or not variant.startswith(("mma", "wgmma"))]


@pytest.mark.parametrize(
    ("path", "operator"),
    [
        (SMALL, "verify_attention"),
        (WIDE, "verify_attention"),
        (TENSOR_CORES, "verify_attention"),
        (MERGE, "merge_states"),
        (MERGE_BFLOAT16, "merge_states"),
        (TOPK, "topk_logprobs"),
        (TREE, "build_tree"),
        (ENCODINGS, "tree_encodings"),
        (ARGMAX, "argmax_tokens"),
        (GREEDY, "accept_greedy"),
        (GREEDY_INT64, "accept_greedy"),
        (SAMPLED, "accept_sampled"),
        (PROBS, "target_probs"),
        (COMPACT, "compact_kv"),
        (PAGED, "compact_kv"),
        (SGLANG, "verify_tree_greedy"),
    ],
    ids=lambda x: getattr(x, "stem", ""),
)
@rows_without_a_law
def test_a_reference_file_passes(capsys, path, operator):
    code, out, _ = run(capsys, "check", path, *QUICK)
    assert code == 0
    assert path.stem in out and f"{len(variants(path))} passed, 0 failed" in out
    assert bytes(kdtr.read(path)["operator"]).decode() == operator
    assert all(variant in out for variant in variants(path))


def test_there_are_files_for_each_operator():
    assert all(check.reference_files(operator) for operator in check.OPERATORS)
    assert sum(len(check.reference_files(operator)) for operator in check.OPERATORS) == len(check.reference_files())


def test_json_says_what_was_checked(capsys):
    code, out, _ = run(capsys, "check", SMALL, "--json", *QUICK)
    report = json.loads(out)
    assert code == 0 and report["passed"]
    assert [row["variant"] for row in report["rows"]] == list(variants(SMALL))
    for row in report["rows"]:
        out, lse = row["reports"]
        assert (out["name"], lse["name"]) == ("out", "lse")
        assert row["passed"] and out["rel_frobenius_error"] <= out["rel_frobenius"]
        assert lse["max_abs_error"] <= lse["max_abs"] == check.LSE_BOUND


def test_16_bit_results_are_held_to_twice_the_error_of_casting():
    exact = kdtr.read(BFLOAT16)["out"].astype(np.float64)
    error = np.linalg.norm(exact.astype(ml_dtypes.bfloat16).astype(np.float64) - exact) / np.linalg.norm(exact)
    row = next(check.check_file(BFLOAT16, None))
    out = row.reports[0]
    assert row.passed and row.checked == "all 153 rows"
    assert out.rel_frobenius == pytest.approx(2 * error) and 2e-3 < out.rel_frobenius < 4e-3
    assert out.rel_frobenius_error == pytest.approx(error, rel=0.01), "rounded once, to bfloat16"


def test_what_tensor_cores_take_is_checked_on_them_where_the_gpu_has_them(monkeypatch):
    monkeypatch.setitem(check.OPERATORS, "verify_attention", check.OPERATORS["verify_attention"]._replace(check=passes))
    every = check.OPERATORS["verify_attention"].variants

    def checked(path):
        rows = list(check.check_file(path, 0.0))
        assert all(row.passed for row in rows)
        return [row.variant for row in rows]

    monkeypatch.setattr(check.wgmma_host, "_backend", lambda: "")  # as on a GPU
    monkeypatch.setattr(check.wgmma_host, "compute_capability", lambda device: (9, 0))
    sixteen_bits = [path for path in check.reference_files("verify_attention") if len(checked(path)) == len(every)]
    assert [path.stem.split("_")[-1] for path in sixteen_bits] == ["bf16", "f16"]
    assert checked(SMALL) == checked(BFLOAT16) == list(every[:-4])
    monkeypatch.setattr(check.wgmma_host, "compute_capability", lambda device: (8, 0))
    assert checked(TENSOR_CORES) == list(every[:-1])
    monkeypatch.setattr(check.mma, "fitting_tiles", lambda device: [])
    assert checked(TENSOR_CORES) == [*every[:-4], "mma_numpy", "wgmma_numpy"]  # the mirrors are left


def test_wgmma_gets_paged_files_in_pages_of_64(monkeypatch, tmp_path):
    """With the same rows, none in its old place, and NaN in all others."""
    seen = []
    attention, operator = check.verify_attention, check.OPERATORS["verify_attention"]
    monkeypatch.setitem(check.OPERATORS, "verify_attention", operator._replace(variants=("mma_numpy", "wgmma_numpy")))

    def noted(**given):
        seen.append((given["variant"], given["kv_cache"], given["block_table"]))
        attention(**given)

    monkeypatch.setattr(check, "verify_attention", noted)
    rows = {row.variant: row for row in check.check_file(PAGED_TENSOR_CORES, 0.0)}
    assert all(row.passed for row in rows.values())
    assert rows["wgmma_numpy"].checked == "all 72 rows in pages of 64" and rows["mma_numpy"].checked == "all 72 rows"
    cache, table = next((cache, table) for variant, cache, table in seen if variant == "wgmma_numpy")
    tensors = kdtr.read(PAGED_TENSOR_CORES)
    assert cache.shape == (4, 64, 576) and table.tolist() == [[3, 2], [1, 0]]
    for b, length in enumerate(tensors["cache_seqlens"]):
        live = length + tensors["q"].shape[1]
        found = cache[table[b]].reshape(-1, 576)
        kept = tensors["kv_cache"][np.clip(tensors["block_table"][b], 0, 9)].reshape(-1, 576)
        np.testing.assert_array_equal(found[:live].view(np.uint16), kept[:live].view(np.uint16))
        assert np.isnan(found[live:].astype(np.float32)).all()
    for wrong in (tensors["kv_cache"][:, ::-1], tensors["kv_cache"][::-1]):
        path = rewritten(tmp_path, PAGED_TENSOR_CORES, kv_cache=np.ascontiguousarray(wrong))
        assert not any(row.passed for row in check.check_file(path, 0.0))


def passes(tensors, variant, seconds):
    return "all", (), 0.0


def test_json_names_each_result(capsys):
    code, out, _ = run(capsys, "check", MERGE, TOPK, TREE, ENCODINGS, "--json", *QUICK)
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) == 11
    names = {row["operator"]: [report["name"] for report in row["reports"]] for row in rows}
    assert names["merge_states"] == ["out", "lse", "out beside an empty state", "lse beside an empty state"]
    assert names["topk_logprobs"] == ["logprobs", "token_ids"]
    assert names["build_tree"] == list(DTYPES)
    # Each form of the file, and the way back from it.
    forms = set(kdtr.read(ENCODINGS)) - {"operator", "cache_seqlens"} - {"tokens", "scores", "num_nodes", "input_ids"}
    forms = {name for name in forms if not name.endswith("max_depth")}
    back = {"parents_from_mask", "parents_from_sglang", "parents_from_retrieve_indices"}
    back |= {f"tree_mask_from_{form}" for form in ("full_mask", "qlen_only", "tensorrt", "bias", "bitpacked")}
    assert set(names["tree_encodings"]) == forms | back
    for row in rows:
        for report in row["reports"]:
            assert report["passed"] and report["num_elements"] > 0
            bounds = {
                "topk_logprobs": {"logprobs": check.LOGPROB_BOUND},
                "merge_states": {"out": check.MERGE_BOUND, "lse": check.MERGE_BOUND},
            }
            assert report["max_abs_error"] <= bounds.get(row["operator"], {}).get(report["name"], 0)


@rows_without_a_law
def test_json_names_each_result_of_accept(capsys):
    files = (ARGMAX, GREEDY, SAMPLED, PROBS, COMPACT, SGLANG)
    code, out, _ = run(capsys, "check", *files, "--json", *QUICK)
    rows = json.loads(out)["rows"]
    assert code == 0 and len(rows) == 2 * len(files)
    caches = ["kv_cache_0", "kv_cache_1"]
    names = {
        "argmax_tokens": ["target_tokens"],
        "accept_greedy": list(check.ACCEPTED),
        "accept_sampled": [f"{kind}.{name}" for kind in ("seeded", "uniform") for name in check.ACCEPTED],
        "target_probs": ["target_probs", "kept"],
        "compact_kv": [*caches, "cache_seqlens", "gathered"],
        "verify_tree_greedy": list(check.SGLANG_RESULTS),
    }
    for row in rows:
        mirror = row["variant"] == "kernel_numpy"
        found = [report["name"] for report in row["reports"]]
        assert found == (caches if mirror and row["operator"] == "compact_kv" else names[row["operator"]])
        for report in row["reports"]:
            assert report["passed"] and report["num_elements"] > 0
            assert report["max_abs_error"] <= (check.PROBS_BOUND if report["name"] == "target_probs" else 0)


def cells_of(out, path):
    """The words of each of a file's lines in the table."""
    return [line.split() for line in out.splitlines() if line.split()[:1] == [path.stem]]


def test_the_table_says_what_was_compared(capsys):
    _, out, _ = run(capsys, "check", SMALL, MERGE, TOPK, TREE, *QUICK)
    for cells in cells_of(out, SMALL):
        assert cells[-4:-2][0] == "lse" and float(cells[-3]) <= check.LSE_BOUND
    assert len(cells_of(out, MERGE)) == 2
    for cells in cells_of(out, MERGE):
        error, bound, lse = (float(cell.rstrip(",")) for cell in (cells[-8], cells[-6], cells[-4]))
        assert error <= bound == pytest.approx(check.MERGE_BOUND, rel=0.01) and lse <= bound
        assert cells[-5] == "lse" and cells[-3] == "exact"
    assert len(cells_of(out, TOPK)) == len(cells_of(out, TREE)) == 4
    for cells in cells_of(out, TOPK):
        error, bound = float(cells[-6]), float(cells[-4])
        assert error <= bound == pytest.approx(check.LOGPROB_BOUND, rel=0.01) and cells[-3] == "exact"
    for cells in cells_of(out, TREE):
        assert cells[-6:-2] == ["0.0e+00", "-", "exact", "-"]


@pytest.mark.skipif(not SIMULATOR, reason="a GPU checks all rows")
@pytest.mark.parametrize("seconds", [0.0, 1.0, 1e9])
@pytest.mark.parametrize("variant", ["three_phase", "flash", "mma"])
@pytest.mark.parametrize("path", check.reference_files("verify_attention"), ids=lambda path: path.stem)
def test_a_part_has_at_least_four_rows_and_is_named(path, variant, seconds):
    tensors = kdtr.read(path)
    arrays, checked = check._select(tensors, variant, seconds)
    rows = int(np.prod(arrays["q"].shape[:3]))
    total = int(np.prod(tensors["q"].shape[:3]))
    assert 4 <= rows <= total
    assert arrays["expected_out"].shape[:3] == arrays["expected_lse"].shape == arrays["q"].shape[:3]
    if seconds == 1e9:
        assert rows == total
    if rows == total:
        assert checked == f"all {total} rows"
    else:
        heads = "head 0, " if tensors["q"].shape[2] == 1 else "heads 0 and "
        assert checked.startswith(f"{rows} of {total} rows: nodes 0-{arrays['q'].shape[1] - 1}, {heads}")


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("out", lambda x: x + np.float32(1e-5)),
        ("out", lambda x: np.where(np.arange(x.shape[-1]) == 7, np.float32(np.nan), x)),
        ("lse", lambda x: x * np.float32(1 + 1e-4)),
        ("lse", lambda x: np.full_like(x, -np.inf)),
        ("sm_scale", lambda x: np.float64(x * 1.001)),
        ("tree_mask", lambda x: x ^ np.uint32(1)),
        ("q", lambda x: x[..., ::-1]),
    ],
)
def test_wrong_values_fail(capsys, tmp_path, name, spoil):
    path = rewritten(tmp_path, **{name: np.asarray(spoil(kdtr.read(SMALL)[name]))})
    code, out, _ = run(capsys, "check", path, *QUICK)
    assert code == 1
    assert f"0 passed, {len(variants(SMALL))} failed" in out and "FAIL" in out


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("out", lambda x: x * np.float32(1.005)),
        ("lse", lambda x: x * np.float32(1 + 1e-4)),
        ("q", lambda x: x.view(np.float16)),  # the bits, read wrongly
        ("kv_cache", lambda x: np.nan_to_num(x[:, ::-1])),
        ("tree_mask", lambda x: x ^ np.uint32(1)),
    ],
)
def test_wrong_bfloat16_values_fail(tmp_path, name, spoil):
    path = rewritten(tmp_path, BFLOAT16, **{name: np.ascontiguousarray(spoil(kdtr.read(BFLOAT16)[name]))})
    assert not any(row.passed for row in check.check_file(path, 0.0))


def test_wrong_lse_far_below_zero_fails(tmp_path):
    """A softmax that starts from some finite number in place of -inf."""
    path = rewritten(tmp_path, WIDE, lse=np.maximum(kdtr.read(WIDE)["lse"], np.float32(-5e4)))
    assert not any(row.passed for row in check.check_file(path, 0.0))


def first(x, value=None):
    """A copy whose first element is another."""
    x = np.array(x)
    x.flat[0] = ~x.flat[0] if x.dtype == bool else x.flat[0] + 1 if value is None else value
    return x


def swapped(x):
    """A copy whose requests are in another order."""
    return np.ascontiguousarray(x[::-1])


def changed(x, row, value):
    """A copy with another value in a row of the first request and node: row 0 has an empty state, row 4 has two."""
    x = np.array(x)
    x.reshape(30, -1)[row] = value
    return x


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("out", lambda x: x + np.float32(2e-6)),
        ("out", lambda x: changed(x, 20, np.nan)),
        ("out", lambda x: changed(x, 4, 1e-30)),
        ("out", lambda x: changed(x, 0, np.nextafter(x.reshape(30, -1)[0], np.float32(9)))),
        ("lse", lambda x: x * np.float32(1 + 1e-6)),
        ("lse", lambda x: changed(x, 4, -1e30)),
        ("lse", lambda x: changed(x, 4, np.inf)),
        ("lse", lambda x: changed(x, 0, np.nextafter(x.reshape(30)[0], np.float32(9)))),
        ("out_a", swapped),
        ("out_b", swapped),
        ("lse_a", lambda x: changed(x, 0, 1.0)),
        ("lse_b", lambda x: changed(x, 20, x.reshape(30)[20] + 1)),
    ],
)
def test_wrong_merged_states_fail(capsys, tmp_path, name, spoil):
    path = rewritten(tmp_path, MERGE, **{name: spoil(kdtr.read(MERGE)[name])})
    code, out, _ = run(capsys, "check", path)
    assert code == 1
    assert "0 passed, 2 failed" in out and "FAIL" in out


def test_16_bit_merged_states_are_rounded_to_nearest(tmp_path):
    """One unit in the last place of the largest element off is wrong."""
    tensors = kdtr.read(MERGE_BFLOAT16)
    out = np.array(tensors["out"])
    at = np.unravel_index(np.argmax(np.abs(out)), out.shape)
    out[at] *= np.float32(1 + 2**-6)
    path = rewritten(tmp_path, MERGE_BFLOAT16, out=out)
    assert not any(row.passed for row in check.check_file(path, None))


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("logprobs", lambda x: x * np.float32(1 + 4e-6)),
        ("logprobs", lambda x: first(x, np.nan)),
        ("logprobs", lambda x: first(x, -np.inf)),
        ("logprobs", lambda x: np.where(np.isneginf(x), np.float32(-1e30), x)),
        ("token_ids", first),
        ("token_ids", swapped),
        ("token_ids", lambda x: np.where(x == -1, 0, x).astype(np.int32)),
        ("token_ids", lambda x: x.astype(np.int64)),
        ("logits", swapped),
    ],
)
def test_wrong_logprobs_and_ids_fail(capsys, tmp_path, name, spoil):
    path = rewritten(tmp_path, TOPK, **{name: spoil(kdtr.read(TOPK)[name])})
    code, out, _ = run(capsys, "check", path, *QUICK)
    assert code == 1
    assert "0 passed, 4 failed" in out and "FAIL" in out


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        *((name, lambda x: first(x, 2)) for name in DTYPES),
        ("scores", lambda x: np.nextafter(x, np.inf)),
        ("scores", lambda x: x.astype(np.float32)),
        ("tokens", swapped),
        ("logprobs", lambda x: x * np.float32(1.5)),
        ("logprobs", lambda x: np.full_like(x, np.nan)),
        ("token_ids", swapped),
        ("root_tokens", lambda x: x + np.int32(1)),
    ],
)
def test_wrong_trees_fail(capsys, tmp_path, name, spoil):
    path = rewritten(tmp_path, TREE, **{name: spoil(kdtr.read(TREE)[name])})
    code, out, _ = run(capsys, "check", path, *QUICK)
    assert code == 1
    assert "0 passed, 4 failed" in out and "FAIL" in out


@pytest.mark.parametrize(
    "name",
    [
        *("first_child", "next_sibling", "depths", "tree_mask", "bitpacked_mask", "cache_seqlens"),
        *check.ENGINE_FORMS,
        *(f"{order}.{name}" for order in ("depth_first", "breadth_first") for name in (*DTYPES, "permutation")),
    ],
)
def test_wrong_encodings_fail(tmp_path, name):
    path = rewritten(tmp_path, ENCODINGS, **{name: first(kdtr.read(ENCODINGS)[name])})
    (row,) = check.check_file(path, 0.0)
    assert not row.passed
    if name != "cache_seqlens":  # its tensors do not fit each other: nothing is compared
        failed = {report.name for report in row.reports if not report.passed}
        assert name in failed or not row.reports


# What differs is among the requests that the simulator checks in no time.
@pytest.mark.parametrize(
    ("path", "name", "spoil"),
    [
        (ARGMAX, "target_tokens", first),
        (ARGMAX, "target_tokens", lambda x: np.maximum(x, 0)),  # in place of -1
        (ARGMAX, "logits", lambda x: np.nan_to_num(x, nan=-100.0)),
        *((GREEDY, f"accepted.{name}", first) for name in check.ACCEPTED),
        *((SAMPLED, f"seeded.{name}", first) for name in check.ACCEPTED),
        *((SAMPLED, f"uniform.{name}", first) for name in check.ACCEPTED),
        *((SGLANG, f"accepted.{name}", first) for name in check.SGLANG_RESULTS),
        (GREEDY, "target_tokens", swapped),
        (GREEDY, "stop_tokens", lambda x: np.full_like(x, -1)),
        (GREEDY, "num_nodes", lambda x: np.maximum(x, 1)),
        (GREEDY, "next_sibling", lambda x: np.full_like(x, -1)),
        (GREEDY_INT64, "target_tokens", lambda x: x.astype(np.int32)),
        (GREEDY_INT64, "stop_tokens", lambda x: x.astype(np.int32)),
        (SAMPLED, "seeds", lambda x: x + 1),
        (SAMPLED, "positions", lambda x: x + 1),
        (SAMPLED, "uniforms", lambda x: np.float32(0.99) - np.nan_to_num(x)),
        (SAMPLED, "target_probs", lambda x: np.ascontiguousarray(x[:, :, ::-1])),
        (PROBS, "target_probs", lambda x: x * np.float32(1 + 2e-6)),
        (PROBS, "target_probs", lambda x: np.where(x == 0, np.float32(1e-12), x)),
        (PROBS, "temperature", lambda x: x + np.float32(0.01)),
        (PROBS, "top_k", lambda x: np.full_like(x, 3)),
        (PROBS, "top_p", lambda x: np.full_like(x, 0.6)),
        *((COMPACT, f"compacted.kv_cache_{n}", first) for n in (0, 1)),
        (PAGED, "block_table", swapped),
        (PAGED, "compacted.kv_cache_1", lambda x: np.where(x == x.flat[0], x + x.dtype.type(1), x)),
        (PAGED, "accepted.nodes", lambda x: np.where(x > 0, x + 1, x).astype(np.int32)),
        (COMPACT, "cache_seqlens", lambda x: x + np.int32(1)),
        (SGLANG, "retrive_next_sibling", lambda x: np.full_like(x, -1)),
        (SGLANG, "target_predict", swapped),
        (SGLANG, "predicts", lambda x: x - np.int32(1)),  # what is not written to keeps its contents
        (SGLANG, "accept_index", lambda x: x - np.int32(1)),
    ],
)
@rows_without_a_law
def test_wrong_results_of_accept_fail(tmp_path, path, name, spoil):
    changed = rewritten(tmp_path, path, **{name: spoil(kdtr.read(path)[name])})
    rows = list(check.check_file(changed, 0.0))
    assert len(rows) == 2 and not any(row.passed for row in rows)
    assert all(row.reports for row in rows), "it is compared, and differs"


@pytest.mark.parametrize("name", ["compacted.cache_seqlens", "gathered", "x"])
def test_wrong_lengths_and_gathered_rows_fail(tmp_path, name):
    changed = rewritten(tmp_path, COMPACT, **{name: first(kdtr.read(COMPACT)[name])})
    mirror, kernel = check.check_file(changed, None)
    assert mirror.passed, "it has no such result"
    assert not kernel.passed and kernel.reports


@rows_without_a_law
def test_results_of_accept_that_are_never_written_fail(monkeypatch):
    for module, name, path in (
        (check.argmax, "argmax_tokens", ARGMAX),
        (check.greedy, "accept_greedy", GREEDY),
        (check.sampled, "accept_sampled", SAMPLED),
        (check.probabilities, "target_probs", PROBS),
        (check.compact, "compact_kv", COMPACT),
        (check.compact, "gather_accepted", PAGED),
        (check.sglang, "verify_tree_greedy", SGLANG),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *args, **kwargs: None)
            patch.setattr(module, "mirror", lambda *args: None)
            rows = list(check.check_file(path, 0.0))
        assert not any(row.passed for row in rows) and all(row.reports for row in rows), name


@pytest.mark.skipif(not SIMULATOR, reason="a GPU checks all")
@pytest.mark.parametrize("seconds", [0.0, 0.5, 10.0, 1e9])
def test_work_on_files_of_accept_is_bounded(seconds):
    for each in (1e-6, 0.3, 100.0):
        for total in (1, 4, 5, 40):
            count = check._affordable(seconds, each, total)
            assert min(total, 4) <= count <= total
            assert count <= 4 or count * each <= min(seconds, check.SIMULATED_MOST)
            chosen = check._spread(count, total)
            assert len(set(chosen)) == count and chosen[0] == 0 and chosen == sorted(chosen) and chosen[-1] < total
    assert check._affordable(None, 100.0, 40) == 40 and check._spread(40, 40) == list(range(40))


@pytest.mark.parametrize("operator", ["topk_logprobs", "build_tree"])
def test_what_is_never_written_fails(monkeypatch, operator):
    path = {"topk_logprobs": TOPK, "build_tree": TREE}[operator]
    assert all(row.passed for row in check.check_file(path, 0.0))
    monkeypatch.setattr(check, operator, lambda *args, **kwargs: None)
    for row in check.check_file(path, 0.0):
        assert not row.passed and not any(row.reports)


def test_merged_states_that_are_never_written_fail(monkeypatch):
    monkeypatch.setattr(check.merge, "merge_states", lambda *args, **kwargs: None)
    monkeypatch.setattr(check.merge, "mirror", lambda *args: None)
    for path in (MERGE, MERGE_BFLOAT16):
        for row in check.check_file(path, 0.0):
            assert not row.passed and row.reports and not any(row.reports)


def test_encodings_that_are_never_written_fail(monkeypatch):
    for name in ("links_from_parents", "full_mask", "dense_bias", "relabel", "tree_mask_from_bitpacked"):
        with monkeypatch.context() as patch:
            patch.setattr(check.encodings, name, lambda *args, **kwargs: None)
            (row,) = check.check_file(ENCODINGS, 0.0)
        assert not row.passed and any(row.reports)


@pytest.mark.parametrize("path", check.reference_files("build_tree"), ids=lambda path: path.stem)
def test_the_first_nodes_are_the_tree_of_a_smaller_budget(path):
    tensors = kdtr.read(path)
    total = tensors["tokens"].shape[1]
    for nodes in {1, 2, 5, 31, 32, 33, total} & set(range(1, total + 1)):
        arguments = (tensors[name] for name in ("logprobs", "token_ids", "root_tokens"))
        expected = trees.draft_tree(*arguments, nodes - 1)
        found = check._first_nodes(tensors, nodes)
        assert set(found) == set(DTYPES)
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name, strict=True)


@pytest.mark.parametrize("path", check.reference_files("tree_encodings"), ids=lambda path: path.stem)
def test_the_first_requests_are_a_smaller_batch(path):
    tensors = kdtr.read(path)
    for requests in range(1, len(tensors["parents"]) + 1):
        found = check._first_requests(tensors, requests)
        tree = {name: found[name] for name in DTYPES} | {"max_depth": tensors["max_depth"]}
        lengths = found["cache_seqlens"]
        expected = trees.encodings(tree["parents"], lengths, int(tensors["max_depth"]))
        for order in ("depth_first", "breadth_first"):
            expected |= {f"{order}.{name}": array for name, array in trees.relabel(tree, order).items()}
        for name, array in expected.items():
            if not name.endswith("max_depth"):
                np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


@pytest.mark.skipif(not SIMULATOR, reason="a GPU checks all")
@pytest.mark.parametrize(
    ("path", "seconds", "checked"),
    [
        (MERGE, 0.0, "4 of 30 rows: rows 0-3"),
        (TOPK, 0.0, "4 of 14 rows: request 0, positions 0-3"),
        (TOPK, 3.0, "7 of 14 rows: request 0, positions 0-6"),
        (TREE, 0.0, "12 of 51 nodes: nodes 0-3 of all requests"),
        (ENCODINGS, 0.0, "1 of 6 trees: request 0"),
        (ENCODINGS, 0.03, "2 of 6 trees: requests 0-1"),
        (ARGMAX, 0.0, "4 of 16 rows: rows 0-3"),
        (SAMPLED, 0.0, "4 of 24 requests: 0, 6, 12, 18"),
        (PROBS, 0.0, "4 of 42 rows: node 0 of requests 0, 3, 7, 10"),
    ],
)
@rows_without_a_law
def test_a_part_is_named(path, seconds, checked):
    total = checked.split(":")[0].split(" of ")[1]
    for row in check.check_file(path, seconds):
        assert row.passed and row.checked == (f"all {total}" if row.variant.endswith("_numpy") else checked)


@pytest.mark.parametrize(
    "path", [MERGE, TREE, ENCODINGS, ARGMAX, GREEDY, COMPACT, PAGED, SGLANG], ids=lambda path: path.stem
)
def test_without_a_budget_all_is_checked(path):
    for row in check.check_file(path, None):
        assert row.passed and row.checked.startswith("all ")


def test_files_that_cannot_be_used_fail_and_say_why(capsys, tmp_path):
    damaged = tmp_path / "damaged.kdtr"
    damaged.write_bytes(SMALL.read_bytes()[:-64])
    for path, reason in (
        (tmp_path / "missing.kdtr", "No such file"),
        (tmp_path, "directory"),
        (damaged, "damaged.kdtr"),
        (rewritten(tmp_path, operator=None), "tensor 'operator' says ''"),
        (rewritten(tmp_path, operator=np.frombuffer(b"fly", np.uint8), q=None), "tensor 'operator' says 'fly'"),
        (rewritten(tmp_path, q=None, lse=None), "tensors are missing: q, lse"),
        (rewritten(tmp_path, MERGE, lse_a=None), "tensors are missing: lse_a"),
        (rewritten(tmp_path, TOPK, k=None, token_ids=None), "tensors are missing: k, token_ids"),
        (rewritten(tmp_path, TREE, scores=None), "tensors are missing: scores"),
        (rewritten(tmp_path, ENCODINGS, full_mask=None), "tensors are missing: full_mask"),
        (rewritten(tmp_path, GREEDY, parents=None, stop_tokens=None), "tensors are missing: parents, stop_tokens"),
        (rewritten(tmp_path, COMPACT, kv_cache_0=None), "tensors are missing: kv_cache_0"),
    ):
        code, out, _ = run(capsys, "check", path, TREE, *QUICK)
        assert code == 1
        assert reason in " ".join(out.split()), reason
        assert "4 passed, 1 failed" in out, "the good file beside it still counts"


def test_no_files_is_wrong_usage(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "REFERENCE_FOLDER", tmp_path)
    code, _, err = run(capsys, "check")
    assert code == 2 and "no reference files" in err


def test_info(capsys):
    code, out, _ = run(capsys, "info")
    assert code == 0 and "backend" in out and "numba-cuda" in out
    code, out, _ = run(capsys, "info", "--json")
    facts = json.loads(out)
    assert ("simulator" in facts["backend"]) == SIMULATOR
    assert facts["shared memory a block"].endswith("bytes")


def test_brackets_in_names_and_messages_survive(capsys, tmp_path):
    path = tmp_path / "x[red]y[bold].kdtr"
    kdtr.write(path, {**kdtr.read(SMALL), "q": kdtr.read(SMALL)["q"][..., :512]})
    code, out, _ = run(capsys, "check", path, *QUICK)
    assert code == 1
    assert "x[red]y[bold].kdtr three_phase: ValueError: q float32[" in " ".join(out.split())


@pytest.mark.parametrize("budget", ["nan", "inf", "-1", "soon"])
def test_a_budget_is_a_time(capsys, budget):
    with pytest.raises(SystemExit) as caught:
        main(["check", "--budget", budget])
    assert caught.value.code == 2 and "--budget" in capsys.readouterr().err
