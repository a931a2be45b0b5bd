"""The numbers in README.md and docs are those of the committed measurements, and the measurements passed.

What measures them is tried here on NumPy arrays and made-up times.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import ddtree_numba as dd
from ddtree_numba.attention import flash, mma, verify
from ddtree_numba.attention.verify import FEW_KEYS, first_of, likely
from refs import oracle

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))

import bench_accept  # noqa: E402
import bench_attention_error  # noqa: E402
import bench_decode  # noqa: E402
import bench_encodings  # noqa: E402
import bench_merge_states  # noqa: E402
import bench_trees  # noqa: E402
import bench_verify_attention  # noqa: E402
import harness  # noqa: E402
import peers  # noqa: E402
import tables  # noqa: E402

ROWS = tables.read_rows()
TREE_ROWS = tables.tree_rows()
ERROR_ROWS, MERGE_ROWS = tables.read_rows(tables.ERRORS), tables.read_rows(tables.MERGES)
ACCEPT_ROWS = tables.read_rows(tables.ACCEPTS)
ENCODING_ROWS = tables.read_rows(tables.ENCODINGS)
SAMPLED_ROWS, DECODING_ROWS = tables.read_rows(tables.SAMPLED), tables.read_rows(tables.DECODING)
needs_tree_rows = pytest.mark.skipif(not TREE_ROWS, reason=f"{tables.TREES.name} is not measured yet")
needs_error_rows = pytest.mark.skipif(not ERROR_ROWS, reason=f"{tables.ERRORS.name} is not measured yet")
needs_merge_rows = pytest.mark.skipif(not MERGE_ROWS, reason=f"{tables.MERGES.name} is not measured yet")
needs_accept_rows = pytest.mark.skipif(not ACCEPT_ROWS, reason=f"{tables.ACCEPTS.name} is not measured yet")


def words(path):
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("quote", tables.QUOTES, ids=lambda quote: f"{quote.page}-{quote.name}")
def test_the_pages_quote_the_measurements(quote):
    found = tables.between_marks(quote.name).findall((ROOT / quote.page).read_text(encoding="utf-8"))
    assert len(found) == 1
    if quote.path.exists():
        assert found[0][1] == quote.text() + "\n", "python profiling/tables.py --write"
    else:
        assert found[0][1] == ""


def assert_measured(row):
    """It says on what, and was right."""
    assert row["right"] == "True"
    # "-dirty": a working tree; results/nvidia-h200/gpu_tests.md says which.
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", row["commit"])
    assert row["driver"] and row["gpu"] and int(row["sm_clock_mhz"]) > 0


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: "-".join(row.get(name, "") for name in ("case", "B", "dtype", "variant", "splits"))
)
def test_rows_say_what_was_measured_and_on_what(row):
    if row["variant"] in peers.PEERS and row["right"] != "True":
        assert row["note"]
        return
    assert_measured(row)
    assert float(row["microseconds"]) > 0 and float(row["tflops"]) > 0
    if row["variant"] not in peers.PEERS:
        assert float(row["rel_frobenius"]) <= float(row["bound"]) and float(row["lse_error"]) <= 1e-5


def test_the_rule_of_auto_takes_the_faster_variant():
    """Between 32 and 50 keys, the one is faster here and the other there, but never by more than 7 %."""
    for case in tables.problems(ROWS):
        if {"flash", "three_phase"} <= set(case):
            ours = case["flash"]
            ratio = float(ours["microseconds"]) / float(case["three_phase"]["microseconds"])
            keys = int(ours["prefix"]) + int(ours["Q"])
            assert ratio > 1 if keys <= FEW_KEYS else ratio < (1.07 if keys <= 50 else 1), ours


@pytest.mark.skipif(not any(row["variant"] == "wgmma" for row in ROWS), reason="wgmma has not been measured yet")
@pytest.mark.parametrize("planned", [False, True])
def test_the_rule_of_auto_takes_the_fastest_variant_for_16_bits(planned):
    """Or one that takes less than 10 % more, where variants cross. Cases without rows of wgmma are not for it."""
    names = ("three_phase", "flash", "mma", "wgmma_planned" if planned else "wgmma")
    cases: dict[tuple[str, ...], dict[str, float]] = {}
    for row in ROWS:
        if row["variant"] in names and row["splits"] in ("", tables.EVEN):
            case = tuple(row[name] for name in ("B", "Q", "H", "prefix", "dtype", "case", "page_size"))
            cases.setdefault(case, {})[row["variant"].removesuffix("_planned")] = float(row["microseconds"])
    cases = {case: times for case, times in cases.items() if "mma" in times}
    assert sum("wgmma" in times for times in cases.values()) > 5
    for case, times in cases.items():
        candidates = likely(*map(int, case[:4]), num_splits=None, batch_invariant=False, planned=planned)
        if not times.keys() & {*candidates}:
            continue  # flash is not among the shapes of tree verification
        taken = first_of(candidates, times.__contains__)
        assert times[taken] < 1.10 * min(times.values()), (case, times)


@needs_error_rows
def test_errors_are_below_their_bounds():
    for row in ERROR_ROWS:
        if row["variant"] in peers.PEERS and row["note"]:
            continue
        assert_measured(row)
        assert not row["bound"] or float(row["rel_frobenius"]) <= float(row["bound"])
    variants = {row["variant"] for row in ERROR_ROWS}
    assert {"flash", "three_phase", "torch_eager", "naive"} <= variants <= {*bench_attention_error.VARIANTS}


@needs_merge_rows
def test_merge_rows_say_what_was_measured_and_on_what():
    for row in MERGE_ROWS:
        if row["variant"] == "merge_states" or not row["note"]:
            assert_measured(row)
            assert float(row["microseconds"]) > 0 and int(row["repeats"]) >= 30


@needs_accept_rows
def test_accept_rows_are_complete_and_say_what_was_measured_and_on_what():
    for row in ACCEPT_ROWS:
        if row["variant"] in bench_accept.PEERS and row["note"]:
            continue
        assert_measured(row)
        assert float(row["microseconds"]) > 0 and row["checked"] and int(row["repeats"]) >= 30
        if row["variant"] not in bench_accept.PEERS:
            times = ("microseconds", "dirty_microseconds", "graph_us", "host_us")
            assert all(float(row[name]) > 0 for name in times)
    assert kinds_of_rows(ACCEPT_ROWS) == accept_kinds()
    copy = tables.pick(ACCEPT_ROWS, operator="copy")
    for row in ACCEPT_ROWS:  # nothing is faster than the memory, but that results may stay in L2
        if row["gb_per_s"]:
            assert float(row["gb_per_s"]) < 2 * float(copy["gb_per_s"]), row


def test_encoding_rows_are_complete_and_say_what_was_measured_and_on_what():
    conversions = [*((name, name) for name in bench_encodings.CONVERSIONS), ("mask_from_parents", "numpy")]
    conversions += [("relabel", order) for order in bench_encodings.ORDERS]
    expected = {(*of, str(batch), str(nodes)) for of in conversions for batch, nodes in bench_encodings.SIZES}
    found = [tuple(row[name] for name in ("operator", "variant", "B", "Q")) for row in ENCODING_ROWS]
    assert len(found) == len(set(found)) and set(found) == expected
    for row in ENCODING_ROWS:
        assert_measured(row)
        assert float(row["microseconds"]) > 0 and row["checked"] and int(row["repeats"]) >= 3


def test_samples_of_both_modes_follow_the_law_and_not_a_flatter_one():
    assert [row["mode"] for row in SAMPLED_ROWS] == list(bench_decode.MODES)
    for row in SAMPLED_ROWS:
        assert int(row["samples"]) == bench_decode.SAMPLES and re.fullmatch("[0-9a-f]{40}", row["commit"])
        assert float(row["p_value"]) > bench_decode.LEAST_PROBABLE > float(row["flatter_p_value"])


def test_decoding_rows_have_every_mode_alone_and_together_and_their_stages_are_the_step():
    modes = (*bench_decode.MODES, "autoregressive")
    found = [(row["B"], row["mode"]) for row in DECODING_ROWS]
    assert found == [(str(batch), mode) for batch in (1, bench_decode.BATCH) for mode in modes]
    for row in DECODING_ROWS:
        stages = sum(float(row[f"{stage}_ms"]) for stage in bench_decode.STAGES)
        assert float(row["step_ms"]) == pytest.approx(stages, abs=0.003)
        rate = 1e3 * int(row["tokens"]) / int(row["steps"]) / float(row["step_ms"])
        assert float(row["tokens_per_second"]) == pytest.approx(rate, rel=0.005)


def kinds_of_rows(rows):
    """Operators and variants, with how many rows each has beside those of sweeps."""
    return Counter((row["operator"], row["variant"]) for row in rows if "sweep" not in row["case"])


def accept_kinds():
    """The same of a complete measurement."""
    counts = {
        ("argmax_tokens", "torch_argmax"): len(bench_accept.ARGMAX),
        ("accept_greedy", "cpu"): len(bench_accept.GREEDY),
        ("accept_sampled", "torch_multinomial"): len(bench_accept.SAMPLED),
        ("target_probs", "torch_eager"): len(bench_accept.FILTERS),
        ("compact_kv", "torch_index"): len(bench_accept.COMPACT),
        ("gather_accepted", "torch_index"): 1,
    }
    found = Counter({(ours, variant): n for (ours, peer), n in counts.items() for variant in (ours, peer)})
    found += Counter({("copy", "torch_copy"): 1, ("step", "graph"): len(bench_accept.STAGES)})
    return found + Counter(("stage", stage) for stages in bench_accept.STAGES.values() for stage in stages)


@needs_tree_rows
def test_readme_and_docs_quote_the_measured_trees():
    for sentence in (tables.build_sentence(TREE_ROWS), tables.topk_sentence(TREE_ROWS)):
        assert sentence in words("README.md")
    assert tables.topk_sentence(TREE_ROWS) in words("docs/topk_logprobs.md")
    assert tables.chain_sentence(TREE_ROWS) in words("docs/build_tree.md")
    build, topk = (
        (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("build_tree", "topk_logprobs")
    )
    assert tables.build_table(TREE_ROWS) in build and tables.build_table(TREE_ROWS, "bfloat16 logits") in build
    assert tables.topk_table(TREE_ROWS) in topk


@needs_tree_rows
def test_tree_rows_say_what_was_measured_and_on_what():
    for row in TREE_ROWS:
        assert row["right"] == "True"
        if row["note"]:
            assert row["note"].startswith("left out") and not row["microseconds"]
            continue
        assert len(row["commit"]) == 40 and row["driver"] and row["gpu"] and row["cpu"] and int(row["sm_clock_mhz"]) > 0
        assert float(row["microseconds"]) > 0 and row["checked"] and int(row["repeats"]) >= 3
        if row["variant"] in ("frontier", "heap", "threshold", "rounds", "threshold + frontier"):
            assert int(row["repeats"]) >= 30 and float(row["graph_us"]) > 0 and float(row["host_us"]) > 0
    for say in SAY:
        assert say(TREE_ROWS)


# The measuring of trees, on NumPy arrays

OURS = ("frontier", "heap", "threshold", "rounds")


class Numpy:
    """Stands in for bench_trees.Gpu: the same inputs and exact results from NumPy, and times that are made up."""

    repeats = 30

    def __init__(self):
        self.timed = 0

    def logits(self, shape, dtype):
        x = np.random.default_rng(0).normal(0, harness.LOGIT_STD, shape).astype(np.float32)
        return x.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else x

    def rows(self, batch, length, k, dtype):
        logits = self.logits((batch, length, 300), dtype)
        exact = self.exact_topk(logits, k)
        return exact["logprobs"].astype(np.float32), exact["token_ids"], self.roots(batch)

    def roots(self, batch):
        return np.arange(batch, dtype=np.int32)

    def to_host(self, x):
        return x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x

    def pair(self, shape):
        return np.empty(shape, np.float32), np.empty(shape, np.int32)

    def exact_topk(self, logits, k):
        x = logits.astype(np.float64)
        ids = np.argsort(-x, axis=-1, kind="stable")[..., :k].astype(np.int32)
        values = np.take_along_axis(x, ids, -1)
        lse = np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) + x.max(-1, keepdims=True)
        scale = np.maximum(np.maximum(np.abs(values), np.abs(lse)), 1)
        return {"values": values, "token_ids": ids, "logprobs": values - lse, "scale": scale}

    def peers(self, k):
        def topk(logits):
            exact = self.exact_topk(logits, k)
            return exact["values"].astype(logits.dtype), exact["token_ids"]

        def eager(logits):
            exact = self.exact_topk(logits, k)
            return exact["logprobs"].astype(np.float32), exact["token_ids"]

        return {"torch_topk": topk, "torch_eager": eager}

    def time(self, call, calls_in_graph=1, *, inputs=(), before=lambda: None, replay=None):
        before()
        replay() if replay else call(*inputs)
        self.timed += 1
        return dict.fromkeys(harness.TIMES, "8.0")

    def machine(self):
        return {**dict.fromkeys(harness.MACHINE, "some"), **harness.host_machine()}

    def free(self):
        pass


@pytest.fixture
def small(monkeypatch):
    """The measurements at sizes for the simulator."""
    monkeypatch.setattr(bench_trees, "BUDGETS", (3, 6))
    monkeypatch.setattr(bench_trees, "TIED_BUDGETS", (6,))
    monkeypatch.setattr(bench_trees, "BATCHES", (1, 2))
    monkeypatch.setattr(bench_trees, "HEAP_BATCH", 1)
    monkeypatch.setattr(bench_trees, "CPU_NODES", {"cpu_heap": 12, "refs_trees": 6})
    monkeypatch.setattr(bench_trees, "TOPK", (((1, 2, 101), 5, "bfloat16"), ((1, 2, 101), 9, "float32")))
    monkeypatch.setattr(bench_trees, "ROUNDS_K", 5)
    monkeypatch.setattr(bench_trees, "CHAIN", ((1, 2, 101), 4, "bfloat16", 5))
    monkeypatch.setattr(bench_trees, "LENGTH", 4)
    monkeypatch.setattr(bench_trees, "SWEPT_BATCH", 1)
    monkeypatch.setattr(bench_trees, "SWEPT_BUDGET", 5)
    monkeypatch.setattr(bench_trees, "SWEPT_K", (1, 2))
    monkeypatch.setattr(bench_trees, "SWEPT_LENGTHS", (1, 3))
    monkeypatch.setattr(bench_trees, "SWEPT_BUDGETS", (4,))
    monkeypatch.setattr(bench_trees, "TOPK_SWEEPS", {"V sweep": (((1, 1, 67), 3),), "K sweep": (((1, 2, 67), 1),)})


def test_the_whole_measurement_on_numpy(small, tmp_path):
    made = [row for job in bench_trees.jobs(Numpy(), quick=False) for row in job()]
    assert [row for row in made if not row["right"]] == []
    tables.write_rows(tmp_path / "trees.csv", made, bench_trees.FIELDS)
    rows = tables.read_rows(tmp_path / "trees.csv")
    assert list(tmp_path.iterdir()) == [tmp_path / "trees.csv"]
    swept = Counter(row["inputs"] for row in rows if row["inputs"].endswith("sweep") and row["variant"] in OURS)
    assert swept == {
        "float32 logits, K sweep": 2 * 2,
        "float32 logits, L sweep": 2 * 2,
        "float32 logits, budget sweep": 2,
        "bfloat16, V sweep": 1,
        "bfloat16, K sweep": 1,
    }
    rows = [row for row in rows if not row["inputs"].endswith("sweep")]
    trees = [row for row in rows if row["operator"] == "build_tree"]
    assert len(trees) == 6 * 3 + 3  # frontier and both on the CPU everywhere, heap at the smallest batch
    assert {row["variant"] for row in trees if row["note"]} == {"refs_trees"}
    assert all(bool(row["microseconds"]) != row["note"].startswith("left out") for row in rows)
    topk = [(row["K"], row["variant"]) for row in rows if row["operator"] == "topk_logprobs"]
    peers = ["torch_topk", "torch_eager"]
    assert topk == [("5", v) for v in ("threshold", "rounds", *peers)] + [("9", v) for v in ("threshold", *peers)]
    assert [row["variant"] for row in rows if row["operator"] == "chain"] == [
        "threshold + frontier",
        "torch_eager + cpu_heap",
    ]


@pytest.mark.parametrize("array", ["parents", "tokens", "depths", "scores"])
def test_a_wrong_tree_is_not_timed(small, monkeypatch, array):
    build_tree = dd.build_tree

    def wrong(*args, **kwargs):
        tree = build_tree(*args, **kwargs)
        changed = getattr(tree, array).copy()
        changed.view(np.int64 if array == "scores" else np.int32)[-1, -1] ^= 1  # the last bit of the last request
        return dataclasses.replace(tree, **{array: changed})

    monkeypatch.setattr(dd, "build_tree", wrong)
    gpu = Numpy()
    first = next(bench_trees.build_rows(gpu, gpu.rows(2, 4, 6, "float32"), "float32 logits", 6))
    assert first["variant"] == "frontier" and first["right"] is False
    assert gpu.timed == 0 and "microseconds" not in first


@pytest.mark.parametrize("result", [0, 1])
def test_a_wrong_topk_is_not_timed(small, monkeypatch, result):
    topk_logprobs = dd.topk_logprobs

    def wrong(*args, **kwargs):
        results = topk_logprobs(*args, **kwargs)
        results[result][0, -1, -1] += 1
        return results

    monkeypatch.setattr(dd, "topk_logprobs", wrong)
    gpu = Numpy()
    first = next(bench_trees.topk_rows(gpu, (1, 2, 101), 5, "bfloat16"))
    assert first["variant"] == "threshold" and first["right"] is False and gpu.timed == 0


def test_what_another_variant_left_does_not_count(small, monkeypatch):
    gpu = Numpy()
    given = gpu.rows(1, 4, 6, "float32")
    tree = dd.DraftTree.empty(given[0], 1, 6, 4)
    monkeypatch.setattr(dd.DraftTree, "empty", lambda *args: tree)  # memory that is used again
    build_tree, topk_logprobs = dd.build_tree, dd.topk_logprobs

    def idle(operator, idler):
        return lambda *args, variant, out: out if variant == idler else operator(*args, variant=variant, out=out)

    monkeypatch.setattr(dd, "build_tree", idle(build_tree, "heap"))
    monkeypatch.setattr(dd, "topk_logprobs", idle(topk_logprobs, "rounds"))
    rows = [
        *bench_trees.build_rows(gpu, given, "float32 logits", 6),
        *bench_trees.topk_rows(gpu, (1, 2, 101), 5, "float32"),
    ]
    assert [row["variant"] for row in rows if not row["right"]] == ["heap", "rounds"]


def test_a_row_that_fails_does_not_cost_the_others(small, monkeypatch):
    monkeypatch.setattr(dd, "build_tree", lambda *args, **kwargs: 1 / 0)
    gpu = Numpy()
    rows = list(bench_trees.build_rows(gpu, gpu.rows(1, 4, 6, "float32"), "float32 logits", 6))
    assert [row["right"] for row in rows] == [False, False, True, True]
    assert rows[0]["note"].startswith("ZeroDivisionError")


def test_the_heap_on_the_cpu_is_the_oracle_with_ties_and_what_nodes_see():
    gpu = Numpy()
    logprobs, ids, roots = gpu.rows(2, 4, 40, "bfloat16")
    logprobs = np.round(logprobs)  # ties
    found = bench_trees.batch_on_cpu(logprobs, ids, roots, 40)
    assert bench_trees.right_trees(found, logprobs, ids, roots, 40)
    for tree in found:
        assert np.array_equal(tree["sees"], dd.mask_from_parents(tree["parents"]))
        for node, parent in enumerate(tree["parents"].tolist()):
            assert node == 0 or tree["children"][parent][int(tree["tokens"][node])] == node


@pytest.mark.skipif(not harness.runtime.SIMULATOR, reason="there is a GPU")
def test_measuring_says_that_it_needs_a_gpu(capsys):
    assert bench_trees.main([]) == 2
    assert "there is none" in capsys.readouterr().err


# The sentences and tables of trees, from made-up times

SAY = (tables.build_sentence, tables.topk_sentence, tables.chain_sentence, tables.build_table, tables.topk_table)


@pytest.fixture
def made_up(tmp_path):
    """A CSV as bench_trees.py writes it, of made-up times."""
    known = {"right": True, "L": 15, "gpu": "some GPU", "cpu": "some CPU"}
    build = {"operator": "build_tree", "inputs": "float32 logits", **known}
    rows = []
    for budget in bench_trees.BUDGETS:
        for batch in bench_trees.BATCHES:
            one = {**build, "B": batch, "K": budget, "budget": budget}
            times = {"frontier": 4 + budget * 0.3 * max(1, batch / 264), "cpu_heap": (60 + 3.5 * budget) * batch}
            if budget <= bench_trees.HEAP_BUDGET and batch <= bench_trees.HEAP_BATCH:
                times["heap"] = 4 + 3.0 * budget
            rows += [{**one, "variant": variant, "microseconds": f"{t:.1f}"} for variant, t in times.items()]
            rows.append({**one, "variant": "refs_trees", "note": "left out: too slow", "gpu": ""})
    tied = {**build, "inputs": "bfloat16 logits", "B": 64, "K": 64, "budget": 64}
    rows.append({**tied, "variant": "frontier", "microseconds": "34.5"})
    for (batch, length, vocabulary), k, dtype in bench_trees.TOPK:
        one = {"operator": "topk_logprobs", "inputs": dtype, "B": batch, "V": vocabulary, "K": k, **known, "L": length}
        for variant, t in {"threshold": 100, "torch_topk": 300.04, "torch_eager": 1234.5}.items():
            rows.append({**one, "variant": variant, "microseconds": t, "gb_per_s": 2000})
    one = {"operator": "chain", "B": 64, **known}
    rows.append({**one, "variant": "threshold + frontier", "microseconds": 150, "graph_us": 140, "host_us": 50})
    rows.append({**one, "variant": "torch_eager + cpu_heap", "microseconds": 20000})
    tables.write_rows(tmp_path / "trees.csv", rows, bench_trees.FIELDS)
    return tmp_path / "trees.csv"


def test_sentences_and_tables_of_trees(made_up):
    rows = tables.tree_rows(made_up)
    assert "64 nodes each, in 23.2 µs of device time (34.5 from bfloat16" in tables.build_sentence(rows)
    assert "18,176 µs in Python, 783 times as long" in tables.build_sentence(rows)
    assert "takes 100 µs" in tables.topk_sentence(rows) and "logsumexp take 1,234" in tables.topk_sentence(rows)
    chain = tables.chain_sentence(rows)
    assert "140 µs as one CUDA graph (50.0 µs" in chain and chain.endswith("20,000 µs")
    table = tables.build_table(rows).splitlines()
    assert table[0] == "| tree_budget | variant | B = 1 | 8 | 32 | 64 | 256 | 1024 |"
    assert table[3] == "| 16 | `heap` | 52.0 | 52.0 | 52.0 | 52.0 | – | – |"
    assert len(table) == 2 + 4 * 2 + 3 and len({line.count("|") for line in table}) == 1
    table = tables.topk_table(rows).splitlines()
    assert table[2] == "| 8,15,163840 | bfloat16 | 16 | 100 | 2,000 | – | 300 | 1,234 |"
    assert len(table) == 2 + len(bench_trees.TOPK) and len({line.count("|") for line in table}) == 1


def test_no_tree_rows_without_a_file(tmp_path):
    assert tables.tree_rows(tmp_path / "trees.csv") == []


# The measuring of attention, on NumPy arrays


class Attention:
    """Stands in for the Gpu of both benchmarks of attention: NumPy, the simulator, and times that are made up."""

    repeats = 30

    def __init__(self):
        self.calls = []

    def inputs(self, case):
        (batch, num_heads, num_nodes, prefix), width = case.shape, bench_verify_attention.HEAD_DIM
        random = np.random.default_rng(0)
        dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[case.dtype]
        q = random.normal(0, case.logit_std / (dd.KIMI_K2_SM_SCALE * width**0.5), (batch, num_nodes, num_heads, width))
        return {
            "q": q.astype(dtype),
            "kv_cache": random.normal(0, 1, (batch, prefix + num_nodes, width)).astype(dtype),
            "cache_seqlens": np.array(case.prefixes or [prefix] * batch, np.int32),
            "tree_mask": dd.mask_from_parents(bench_verify_attention.random_parents(batch, num_nodes)),
        }

    def results(self, inputs):
        shape = (*inputs["q"].shape[:3], bench_verify_attention.KV_LORA_RANK)
        return {"out": np.empty(shape, inputs["q"].dtype), "lse": np.empty(shape[:3], np.float32)}

    def workspace(self, nbytes):
        return np.empty(nbytes, np.uint8)

    def scores(self, *shape):
        return np.empty(shape, np.float32)

    def exact(self, inputs, sm_scale):
        given = {**inputs, "sm_scale": sm_scale, "kv_lora_rank": bench_verify_attention.KV_LORA_RANK}
        return *oracle.verify_attention(**given), oracle.logit_statistics(**given)["logit_magnitude"]

    def peer(self, name, inputs, results, sm_scale):
        seen = self.causal(inputs) if name in peers.CAUSAL else inputs

        def call(q, kv_cache):
            out, lse, _ = self.exact({**seen, "q": q, "kv_cache": kv_cache}, sm_scale)
            return out.astype(q.dtype), None if name == "torch_sdpa" else lse.astype(np.float32)

        return peers.Peer(call, (inputs["q"], inputs["kv_cache"]))

    def causal(self, inputs):
        return {**inputs, "tree_mask": np.tril(np.ones_like(inputs["tree_mask"]))}

    def errors(self, found, exact):
        difference = found[0].astype(np.float64) - exact[0]
        errors = {"rel_frobenius": np.linalg.norm(difference) / np.linalg.norm(exact[0])}
        errors["max_abs"] = np.abs(difference).max()
        if found[1] is not None:
            errors["lse_error"] = np.max(np.abs(found[1] - exact[1]) / np.maximum(1, np.abs(exact[1])))
        return {name: float(error) for name, error in errors.items()}

    def largest(self, x):
        return float(np.abs(x).max())

    def cast(self, x, dtype):
        return x.astype(dtype)

    def timed(self, call, inputs, sustain):
        self.calls.append((call, inputs, sustain))
        return {"microseconds": "8.0", "spread_microseconds": "0.5"}

    def machine(self):
        return dict.fromkeys(harness.MACHINE, "some")


@pytest.fixture
def narrow(monkeypatch):
    """Attention at widths and sizes for the simulator."""
    monkeypatch.setattr(bench_verify_attention, "KV_LORA_RANK", 32)
    monkeypatch.setattr(bench_verify_attention, "HEAD_DIM", 48)
    monkeypatch.setattr(bench_attention_error, "NUM_HEADS", 1)
    monkeypatch.setattr(bench_attention_error, "NUM_NODES", 2)
    monkeypatch.setattr(bench_attention_error, "THREADS", 16)


def test_the_whole_measurement_of_one_problem_on_numpy(narrow, tmp_path):
    gpu, ways, tiles = Attention(), (*bench_verify_attention.WAYS, ("torch_eager", "")), flash.TILES
    case = bench_verify_attention.Case((2, 1, 3, 20), "float32", ways=ways, prefixes=(20, 4))
    made = list(bench_verify_attention.case_rows(gpu, case))
    assert [row["right"] for row in made] == [True] * (len(ways) - 3), made
    tables.write_rows(tmp_path / "rows.csv", made, bench_verify_attention.FIELDS)
    rows = tables.read_rows(tmp_path / "rows.csv")
    # The simulator's tiles are as small as the smaller ones, so flash_small would be the same again; the others take
    # 16 bits.
    left_out = ("flash_small", "mma", "wgmma")
    assert [(row["variant"], row["splits"]) for row in rows] == [way for way in ways if way[0] not in left_out]
    assert [row["tiles"] for row in rows] == ["", "16x16", "16x16", "16x16", ""]
    work = 2 * 3 * (23 + 7) * (48 + 32)
    nbytes = 4 * (2 * 3 * 48 + (23 + 7) * 48 + 2 * 3 * (32 + 1)) + 2 * (4 + 9)
    assert all((row["tflops"], row["gb_per_s"]) == (f"{work / 8e6:.2f}", f"{nbytes / 8e3:.0f}") for row in rows)
    assert [sustain for *_, sustain in gpu.calls] == [False] * len(rows)
    assert {row["case"] for row in rows} == {"logit std 2, ragged"} and {row["prefix"] for row in rows} == {"20"}
    assert bench_verify_attention.line(made[0])
    assert flash.TILES is tiles and flash.make_plan.__module__ == flash.__name__


def test_bfloat16_is_held_to_the_rounding_of_the_exact_result(narrow):
    case = bench_verify_attention.Case((1, 1, 2, 5), "bfloat16", ways=(("flash", "even"), ("torch_eager", "")))
    rows = list(bench_verify_attention.case_rows(Attention(), case))
    assert [row["right"] for row in rows] == [True, True]
    assert 1e-3 < float(rows[0]["bound"]) < 5e-3 and float(rows[1]["bound"]) == peers.BOUNDS["bfloat16"][0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tensor_cores_are_measured_where_they_take_dtype_widths_and_gpu(monkeypatch, dtype):
    monkeypatch.setattr(bench_attention_error, "NUM_HEADS", 1)
    monkeypatch.setattr(bench_attention_error, "NUM_NODES", 2)
    case = bench_verify_attention.Case((1, 1, 2, 5), dtype, ways=(("mma", "even"), ("torch_eager", "")))

    def measured():
        rows = list(bench_verify_attention.case_rows(Attention(), case))
        assert all(row["right"] for row in rows) and all(row.keys() <= {*bench_verify_attention.FIELDS} for row in rows)
        return {row["variant"]: row for row in rows}

    assert measured()["mma"]["tiles"] == "32x16" and measured()["mma"]["microseconds"]
    monkeypatch.setattr(bench_attention_error, "VARIANTS", ("mma",))
    (row,) = bench_attention_error.error_rows(Attention(), 7, 2.0, dtype)
    assert row["right"] and row["tiles"] == "32x16" and float(row["rel_frobenius"]) <= float(row["bound"])
    assert list(bench_attention_error.error_rows(Attention(), 7, 2.0)) == []
    monkeypatch.setattr(mma, "fitting_tiles", lambda device: [])
    assert list(measured()) == ["torch_eager"]


@pytest.mark.parametrize("result, wrong", [("out", np.nan), ("lse", np.nan), ("out", 1e-4), ("lse", 1e-4)])
def test_wrong_attention_is_not_timed(narrow, monkeypatch, result, wrong):
    verify_attention = dd.verify_attention

    def changed(*args, **kwargs):
        results = verify_attention(*args, **kwargs)
        kwargs[result][0, -1, -1] += wrong
        return results

    monkeypatch.setattr(dd, "verify_attention", changed)
    gpu, case = Attention(), bench_verify_attention.Case((1, 1, 2, 5), "float32", ways=(("flash", "even"),))
    (row,) = bench_verify_attention.case_rows(gpu, case)
    assert row["right"] is False and "microseconds" not in row and not gpu.calls and row["rel_frobenius"]
    assert row["note"] == "error above its bound"


def test_attention_that_fails_does_not_cost_the_others(narrow, monkeypatch):
    monkeypatch.setattr(dd, "verify_attention", lambda *args, **kwargs: 1 / 0)
    case = bench_verify_attention.Case((1, 1, 2, 5), "float32", ways=(("flash", "even"), ("torch_eager", "")))
    rows = list(bench_verify_attention.case_rows(Attention(), case))
    assert [row["right"] for row in rows] == [False, True] and rows[0]["note"].startswith("ZeroDivisionError")
    assert bench_verify_attention.line(rows[0]).endswith("WRONG")


def test_peers_are_measured_or_noted_and_never_fail_the_run(narrow, monkeypatch, tmp_path):
    """One is wrong, one fails with pages of words; two take no tree, and are held against causal attention."""
    monkeypatch.setattr(peers, "takes", lambda name, dtype: True)
    gpu, peer = Attention(), Attention.peer

    def changed(self, name, *given):
        found = peer(self, name, *given)
        if name == "torch_flex":
            raise RuntimeError("no kernel " * 1000)
        if name == "triton":
            return peers.Peer(lambda *arrays: [1.1 * x for x in found.call(*arrays)], found.arrays)
        return found

    monkeypatch.setattr(Attention, "peer", changed)
    case = bench_verify_attention.Case((1, 1, 4, 9), "bfloat16", ways=(*((name, "") for name in peers.PEERS),))
    rows = {row["variant"]: row for row in bench_verify_attention.case_rows(gpu, case)}
    assert {name for name, row in rows.items() if not row["right"]} == {"torch_flex", "triton"}
    assert {name for name, row in rows.items() if "microseconds" not in row} == {"torch_flex", "triton"}
    assert rows["triton"]["note"] == "error above its bound" and float(rows["triton"]["rel_frobenius"]) > 0.09
    assert rows["torch_flex"]["note"].startswith("RuntimeError: no kernel") and len(rows["torch_flex"]["note"]) <= 200
    assert rows["torch_sdpa"]["note"] == "no lse" and "lse_error" not in rows["torch_sdpa"]
    assert rows["flashmla"]["note"] == rows["flashinfer"]["note"] == "causal: takes no tree mask"

    def made(description, name, fields, jobs, count, line, gpu_class, arguments, names):
        return [row["variant"] for row in rows.values() if not row["right"] and row["variant"] not in names]

    monkeypatch.setattr(harness, "main", made)
    assert bench_verify_attention.main([]) == bench_attention_error.main([]) == []


@pytest.mark.parametrize("shift, right", [(0.0, True), (1e-3, False)])
def test_a_kernel_of_someone_else_is_checked_as_ours_is(narrow, monkeypatch, shift, right):
    def call(q, kv_cache, cache_seqlens, tree_mask, *, sm_scale, kv_lora_rank, out, lse):
        given = (q, kv_cache, cache_seqlens, tree_mask)
        out[...], lse[...] = oracle.verify_attention(*given, sm_scale=sm_scale, kv_lora_rank=kv_lora_rank)
        out[..., -1] += shift
        return out, lse

    case = bench_verify_attention.Case((2, 1, 3, 9), "float32", ways=bench_verify_attention.BESIDE_EAGER)
    monkeypatch.setattr(bench_verify_attention, "AGAINST", (case,))
    gpu = Attention()
    rows = {row["variant"]: row for row in bench_verify_attention.rows_against(gpu, "mine", call, quick=False)}
    assert list(rows) == ["flash", "torch_eager", "mine"] and rows["flash"]["right"]
    assert rows["mine"]["right"] is right and ("microseconds" in rows["mine"]) is right


@pytest.mark.parametrize("quick", [False, True])
def test_every_case_of_attention_is_one_of_its_own(quick):
    """compare.py tells rows apart by what was measured."""
    cases = bench_verify_attention.QUICK if quick else bench_verify_attention.CASES
    sweeps = bench_verify_attention.SWEEPS
    cases = [*cases, *(case for name in sweeps for case in bench_verify_attention.swept(name, quick))]
    found = [(case.name, case.shape, case.dtype, case.page_size, way) for case in cases for way in case.ways]
    assert len(found) == len(set(found))
    more = () if quick else (bench_verify_attention.VERIFY,)
    assert all(0 not in case.shape for case in cases) and {case.sweep for case in cases} == {"", *sweeps, *more}
    assert len(bench_verify_attention.jobs(None, quick)) == len(cases) + (not quick) * len(
        bench_verify_attention.files()
    )
    problems = bench_attention_error.problems(quick)
    assert len(problems) == len(set(problems)) and len({dtype for *_, dtype in problems}) == 3 - quick


def test_the_reference_files_that_are_timed_have_the_models_widths():
    names = [path.stem for path in bench_verify_attention.files()]
    assert names and all(re.fullmatch(r"verify_attn_h\d+_p\d+_b\d+(_bf16|_f16)?", name) for name in names)


def test_the_measurement_of_errors_on_numpy(narrow):
    rows = list(bench_attention_error.error_rows(Attention(), 20, 2.0))
    variants = [x for x in bench_attention_error.VARIANTS if x not in peers.PEERS or peers.takes(x, "float32")]
    variants = [x for x in variants if x not in ("mma", "wgmma")]
    assert [row["variant"] for row in rows] == variants
    assert all(row["right"] for row in rows), rows
    assert all(float(row["max_ulp"]) < 20 for row in rows)
    assert all(row.keys() <= set(bench_attention_error.FIELDS) and bench_attention_error.line(row) for row in rows)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_errors_of_16_bits_are_half_a_unit_in_the_last_place_where_nothing_but_the_result_is_rounded(narrow, dtype):
    rows = {row["variant"]: row for row in bench_attention_error.error_rows(Attention(), 20, 2.0, dtype)}
    assert "naive" not in rows and all(row["right"] for row in rows.values()), rows
    assert 0.1 < float(rows["torch_eager"]["max_ulp"]) <= 0.5  # the stand-in rounds the exact result


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [1.0, 1.75, 2.0, 0.3, 1000.0])
def test_a_unit_in_the_last_place_is_the_spacing_of_numbers(dtype, value):
    kind = {"bfloat16": ml_dtypes.bfloat16}.get(dtype) or np.dtype(dtype).type
    assert bench_attention_error.ulp(dtype, float(kind(value))) == float(np.spacing(kind(value)))


def test_an_error_above_its_bound_is_seen(narrow, monkeypatch):
    monkeypatch.setattr(flash, "error_bound", lambda *args: 1e-9)
    rows = {row["variant"]: row for row in bench_attention_error.error_rows(Attention(), 20, 2.0)}
    assert rows["flash"]["right"] is False and rows["three_phase"]["right"]


@pytest.mark.skipif(not harness.runtime.SIMULATOR, reason="there is a GPU")
@pytest.mark.parametrize("script", [bench_verify_attention, bench_attention_error], ids=lambda s: s.__name__)
def test_measuring_attention_says_that_it_needs_a_gpu(script, capsys):
    assert script.main([]) == 2
    assert "there is none" in capsys.readouterr().err


# The sentences and tables of attention, from made-up times


@pytest.fixture
def made_up_attention(tmp_path):
    """verify_attention.csv and attention_error.csv as the benchmarks write them, of made-up numbers."""
    rows = []
    for case in bench_verify_attention.CASES:
        (batch, num_heads, num_nodes, prefix), known = case.shape, {"case": case.name, "dtype": case.dtype}
        work = verify.flops(num_nodes, num_heads, list(case.prefixes) or [prefix] * batch)
        known |= {"B": batch, "H": num_heads, "Q": num_nodes, "prefix": prefix, "right": True, "gpu": "some GPU"}
        for variant, splits in case.ways:
            if variant == "mma" and case.dtype == "float32":
                continue
            if variant == "three_phase" and work > bench_verify_attention.THREE_PHASE_FLOPS:
                continue
            speed = {"three_phase": 4, "flash": 16 if splits == "1" else 32, "flash_small": 26, "torch_eager": 25}.get(
                variant, 40
            )
            row = {**known, "variant": variant, "splits": splits, "tflops": f"{speed:.2f}"}
            row |= {"tiles": "64x32" if variant == "flash" else "", "microseconds": f"{work / speed / 1e6:.1f}"}
            row |= {"rel_frobenius": "2.000e-06" if variant == "torch_eager" else "5.000e-07", "bound": "1.500e-06"}
            rows.append(row | {"max_abs": "1.000e-06", "lse_error": "1.000e-07"})
    tables.write_rows(tmp_path / "verify_attention.csv", rows, bench_verify_attention.FIELDS)
    rows = []
    for logit_std in bench_attention_error.LOGIT_STDS:
        for keys in bench_attention_error.KEYS:
            for n, variant in enumerate(name for name in bench_attention_error.VARIANTS if "mma" not in name):
                if variant == "three_phase" and not bench_attention_error.fits(keys):
                    continue
                row = {
                    "keys": keys,
                    "logit_std": f"{logit_std:g}",
                    "dtype": "float32",
                    "variant": variant,
                    "gpu": "some GPU",
                    "right": True,
                }
                row["rel_frobenius"] = f"{1e-7 * (1 + n) * keys**0.1:.3e}"
                rows.append(row | {"bound": "" if variant in peers.PEERS else f"{1e-6 * (1 + n):.3e}"})
    tables.write_rows(tmp_path / "attention_error.csv", rows, bench_attention_error.FIELDS)
    return tmp_path


def test_sentences_and_tables_of_attention(made_up_attention):
    rows = tables.read_rows(made_up_attention / "verify_attention.csv")
    sentence = tables.attention_sentence(rows)
    assert "takes 644 µs for 8 requests" in sentence and "variant `flash`, 32.0 TFLOP/s" in sentence
    assert sentence.endswith("eager attention 825 (25.0); its error is 25 % of PyTorch's.")
    assert "at 4 times the error" in tables.bfloat16_sentence(rows)
    speed = tables.speed_table(rows).splitlines()
    assert len(speed) == 2 + 16 and len({line.count("|") for line in speed}) == 1
    assert speed[2] == "| 1,64,17,2048 | float32 | 153 | 32.00 | 64x32 | 188 | – | – | 1,222 | 196 | 25.00 |"
    assert speed[3].startswith("| 1,64,17,2048 | bfloat16 | 153 | 32.00 | 64x32 | 188 | 122 | 40.00 | 1,222 |")
    assert "| 1,64,65,32768 | float32 | 9,288 | 32.00 | 64x32 | – | – | – | – | 11,888 | 25.00 |" in speed
    errors = tables.numerics_table(rows).splitlines()
    assert len(errors) == 2 + 16 + 2 and len({line.count("|") for line in errors}) == 1
    splits = tables.splits_table(rows).splitlines()
    assert splits[2:] == [
        "| 8,64,9,2048 | equal | 644 | 1,289 | 644 |",
        "| 16,64,9,16000 | 100 to 16,000 | 3,278 | 6,555 | 3,278 |",
    ]


def test_tables_of_long_rows(made_up_attention):
    rows = tables.read_rows(made_up_attention / "attention_error.csv")
    table = tables.error_table(rows).splitlines()
    assert len(table) == 2 + 2 * 6 and len({line.count("|") for line in table}) == 1
    assert table[7].startswith("| 2 | 131,072 | ") and table[7].split(" | ")[4] == "–"
    assert "goes from 4.000e-07 to 6.498e-07 between 1,024" in tables.error_sentence(rows)


def test_tables_of_merges(tmp_path):
    known = {"T": 288, "H": 64, "R": 512, "dtype": "bfloat16", "layout": "C order", "gb_per_s": 2856}
    rows = [{**known, "variant": variant, "microseconds": 20 + n} for n, variant in enumerate(tables.MERGE)]
    rows.append({**known, "layout": "in place", "variant": "merge_states", "microseconds": 19})
    tables.write_rows(tmp_path / "merges.csv", rows, bench_merge_states.FIELDS)
    read = tables.read_rows(tmp_path / "merges.csv")
    assert tables.merge_table(read).splitlines()[2:] == [
        "| 288,64,512 | bfloat16 | C order | 20.0 | 2,856 | 21.0 | 22.0 | 23.0 |",
        "| 288,64,512 | bfloat16 | in place | 19.0 | 2,856 | – | – | – |",
    ]
    assert "in 20.0 µs (2,856 GB/s); a Triton kernel takes 21.0, torch.compile 22.0" in tables.merge_sentence(read)


def test_rows_from_before_flash(tmp_path):
    known = {"case": "logit std 2", "B": 8, "H": 64, "Q": 9, "prefix": 2048, "right": True, "rel_frobenius": "1e-7"}
    known |= {"microseconds": 10, "tflops": 2, "bound": "2e-7", "max_abs": "1e-7", "lse_error": "1e-7"}
    rows = [
        {**known, "dtype": dtype, "variant": variant}
        for dtype in ("float32", "bfloat16")
        for variant in ("three_phase", "torch_eager")
    ]
    fields = [name for name in bench_verify_attention.FIELDS if name not in ("splits", "tiles")]
    tables.write_rows(tmp_path / "old.csv", rows, fields)
    read = tables.read_rows(tmp_path / "old.csv")
    assert "variant `three_phase`" in tables.attention_sentence(read) and tables.bfloat16_sentence(read)
    assert tables.speed_table(read).count("\n") == tables.numerics_table(read).count("\n") == 3
    assert tables.splits_table(read).count("\n") == 1


def test_quotes_are_written_between_their_marks(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("ahead\n<!-- measured: it -->\nold\nlines\n<!-- end of it -->\nbehind\n")
    csv = tmp_path / "x.csv"
    csv.write_text("a\n1\n")
    quotes = (tables.Quote("page.md", "it", csv, (lambda rows: f"one {rows[0]['a']}.", lambda rows: "two")),)
    monkeypatch.setattr(tables, "QUOTES", (*quotes, quotes[0]._replace(path=tmp_path / "none.csv")))
    for _ in range(2):
        tables.write_quotes(tmp_path)
        assert page.read_text() == "ahead\n<!-- measured: it -->\none 1. two\n<!-- end of it -->\nbehind\n"
    monkeypatch.setattr(tables, "QUOTES", (quotes[0]._replace(name="other"),))
    with pytest.raises(AssertionError, match="0 places for 'other'"):
        tables.write_quotes(tmp_path)


# The measuring of what follows the target's forward pass, on NumPy arrays


class Accepting(Numpy):
    """Stands in for bench_accept.Gpu: NumPy, the simulator, and times that are made up."""

    def logits(self, shape, dtype):
        x = super().logits(shape, "float32")
        return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def to_device(self, x):
        return x.copy()

    def empty(self, shape, dtype):
        return np.empty(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def drafts(self, batch, k):
        logits = self.logits((batch, bench_accept.LENGTH, bench_accept.TREE_VOCABULARY), "float32")
        exact = self.exact_topk(logits * bench_accept.SHARPNESS, k)
        return exact["logprobs"].astype(np.float32), exact["token_ids"]

    def law(self, tokens, vocabulary, dtype):
        x = np.exp(self.logits((*tokens.shape, vocabulary), "float32"))
        x *= (1 - bench_accept.FOLLOWED) / x.sum(-1, keepdims=True)
        at = tokens[..., None]
        np.put_along_axis(x, at, np.take_along_axis(x, at, -1) + np.float32(bench_accept.FOLLOWED), -1)
        return x.astype(self.empty((), dtype).dtype)

    def peak(self, logits, tokens):
        np.put_along_axis(logits, tokens[..., None], bench_accept.PEAK, -1)

    def fill(self, cache, layer):
        cache.view(np.uint16)[...] = np.random.default_rng(layer).integers(0, 1 << 16, cache.shape)
        return cache

    def image(self, x):
        return np.ascontiguousarray(x).view(np.uint8).copy()

    def same(self, image, x):
        return np.array_equal(image, np.ascontiguousarray(x).view(np.uint8))

    def moved(self, cache, target, source):
        rows = cache.reshape(-1, cache.shape[-1]).copy()
        rows[target] = rows[source]
        return self.image(rows.reshape(cache.shape))

    def argmax(self, logits):
        return logits.argmax(-1)

    def multinomial(self, probs):
        return probs.argmax(-1)

    def softmax(self, logits, top_k, top_p):
        x = np.exp(logits.astype(np.float32) / bench_accept.TEMPERATURE)
        return x / x.sum(-1, keepdims=True)

    def move(self, caches, target, source):
        def call():
            for rows in (cache.reshape(-1, cache.shape[-1]) for cache in caches):
                rows[target] = rows[source]

        return call

    def take(self, nodes):
        return lambda x: x[np.arange(len(x))[:, None], nodes.clip(min=0)]

    def copies(self):
        return np.arange(64), np.empty(64, np.int64)

    def time(self, call, calls_in_graph=1, **more):
        found = super().time(call, calls_in_graph, **more)
        return {**found, "dirty_microseconds": "9.0", "graph_us": "7.0" if calls_in_graph else ""}

    def capture(self, call):
        return call


@pytest.fixture
def short(monkeypatch):
    """The same measurements at sizes for the simulator."""
    changed = {
        "LENGTH": 3,
        "TREE_VOCABULARY": 29,
        "ARGMAX": (((2, 3, 41), "bfloat16"), ((1, 2, 40), "float16")),
        "GREEDY": ((2, 6),),
        "SAMPLED": (((2, 6, 67), "bfloat16"), ((1, 6, 64), "float32")),
        "PROBS_SHAPE": (1, 1, 70),
        "FILTERS": ((None, None), (7, None), (None, 0.9), (9, 0.9)),
        "COMPACT": ((3, 2, 3, 4), (1, 2, 4, 0)),
        "HEAD_DIM": 8,
        "CAPACITY": 24,
        "TREE_NODES": 9,
        "COLUMNS": 7,
        "COPY_BYTES": 512,
        "GATHER": (2, 12, 10),
        "STEP": {"batch": 2, "draft_positions": 3, "vocabulary": 30, "tree_budget": 6},
        "STEP_LAYERS": 2,
        "STEP_PREFIX": 9,
        "PAGE_SIZE": 4,
        "SWEPT_VOCABULARIES": (),
        "SWEPT_BATCHES": (),
        "SWEPT_NODES": (),
        "SWEPT_PAGES": (),
    }
    for name, value in changed.items():
        monkeypatch.setattr(bench_accept, name, value)


@pytest.mark.slow
def test_the_whole_measurement_of_accepting_on_numpy(short, tmp_path):
    made = [row for job in bench_accept.jobs(Accepting(), quick=False) for row in job()]
    assert [row for row in made if not row["right"]] == []
    tables.write_rows(tmp_path / "accept.csv", made, bench_accept.FIELDS)
    rows = tables.read_rows(tmp_path / "accept.csv")
    assert kinds_of_rows(rows) == accept_kinds()
    assert all(row["microseconds"] and row["checked"] and bench_accept.line(row) for row in rows)
    assert all(float(row["path"]) > 1 for row in rows if row["operator"] in ("accept_greedy", "step", "compact_kv"))
    speeds = [row["gb_per_s"] for row in rows if row["operator"] == "compact_kv"]
    assert speeds == [f"{2 * moved * 8 * 2 / 8e3:.0f}" for moved in (3 * 2 * 2, 3 * 2 * 2, 2 * 3, 2 * 3)]
    jobs = bench_accept.jobs(None, quick=True)
    assert len({job.func for job in jobs}) == len(jobs) == 8


def test_the_sweeps_of_accepting_on_numpy(short, monkeypatch):
    for name, sizes in (("VOCABULARIES", (51, 64)), ("BATCHES", (1,)), ("NODES", (3,)), ("PAGES", (1, 3))):
        monkeypatch.setattr(bench_accept, f"SWEPT_{name}", sizes)
    monkeypatch.setattr(bench_accept, "PROBS_SHAPE", (1, 2, 70))
    jobs = [partial(rows, Accepting(), *given, name) for rows, name, given in bench_accept.sweeps()]
    rows = [row for job in jobs for row in job()]
    assert [row for row in rows if not row["right"]] == []
    kinds = Counter((row["operator"], row["case"].split(", ")[-1]) for row in rows if row["variant"] == row["operator"])
    some = ("argmax_tokens", "accept_sampled", "target_probs")
    expected = {(name, f"{size} sweep"): 1 + (size == "V") for name in some for size in "VBQ"}
    expected |= {("accept_greedy", "B sweep"): 1, ("accept_greedy", "Q sweep"): 1, ("compact_kv", "page sweep"): 2}
    assert kinds == expected


@pytest.mark.parametrize(
    "operator, job, given",
    [
        ("argmax_tokens", "argmax_rows", ((2, 3, 41), "bfloat16")),
        ("accept_greedy", "greedy_rows", (2, 6)),
        ("accept_sampled", "sampled_rows", ((2, 6, 67), "float32")),
        ("target_probs", "probs_rows", (7, 0.9)),
        ("compact_kv", "compact_rows", (2, 2, 3, 4)),
        ("gather_accepted", "gather_rows", ((2, 12, 10),)),
    ],
)
def test_what_is_accepted_wrongly_is_not_timed(short, monkeypatch, operator, job, given):
    operate = getattr(dd, operator)

    def wrong(*args, **kwargs):
        found = operate(*args, **kwargs)
        if operator == "compact_kv":
            args[0][-1].view(np.uint16)[0, 0, 0] ^= 1
        else:
            x = found.bonus_tokens if isinstance(found, dd.Accepted) else found
            x[(-1,) * x.ndim] += 1
        return found

    gpu = Accepting()
    monkeypatch.setattr(dd, operator, wrong)
    rows = list(getattr(bench_accept, job)(gpu, *given))
    assert [row["right"] for row in rows] == [False, True]
    assert "microseconds" not in rows[0] and rows[0]["variant"] == operator and rows[1]["variant"] in bench_accept.PEERS


@pytest.mark.slow
@pytest.mark.parametrize("case", bench_accept.STAGES)
def test_stages_that_do_nothing_are_seen(short, monkeypatch, case):
    rows = bench_accept.step_rows(Accepting(), case)
    assert next(rows)["right"]
    stages = bench_accept.STAGES[case]
    for name in set(stages) & set(dd.__all__):  # the step itself does not take them from there
        monkeypatch.setattr(dd, name, lambda *args, **kwargs: None)
    idle = SimpleNamespace(run=lambda *_: None, moves_of=lambda *_: None, launch=lambda *_, **__: None, LARGEST_INT32=0)
    monkeypatch.setattr(bench_accept, "compact_kv", idle)
    monkeypatch.setattr(bench_accept, "launch", idle)
    assert [(row["variant"], row["right"]) for row in rows] == [(stage, False) for stage in stages]


def test_a_graph_that_does_less_is_seen(short, monkeypatch):
    gpu = Accepting()
    monkeypatch.setattr(gpu, "capture", lambda call: lambda: None, raising=False)
    assert next(bench_accept.step_rows(gpu, "greedy"))["right"] is False


def test_a_job_that_fails_does_not_cost_the_others(short, monkeypatch):
    monkeypatch.setattr(dd, "build_tree", lambda *args, **kwargs: 1 / 0)
    gpu = Accepting()
    (row,) = harness.rows_of(gpu, lambda: bench_accept.greedy_rows(gpu, 2, 6))
    assert row["right"] is False and row["note"].startswith("ZeroDivisionError") and row["variant"] == ""
    assert row["variant"] not in bench_accept.PEERS and bench_accept.line(row).endswith("WRONG")
    assert row.keys() <= set(bench_accept.FIELDS)


@pytest.mark.skipif(not harness.runtime.SIMULATOR, reason="there is a GPU")
def test_measuring_accepting_says_that_it_needs_a_gpu(capsys, tmp_path):
    assert bench_accept.main(["--out", str(tmp_path)]) == 2
    assert "there is none" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


# The sentences and tables of accepting, from made-up times


@pytest.fixture
def made_up_accept(tmp_path):
    """accept.csv as bench_accept.py writes it, of made-up times."""
    known = {"right": True, "gpu": "some GPU", "checked": "all", "repeats": 30}
    rows = []

    def add(operator, variants, **more):
        for variant, time in variants.items():
            times = {"microseconds": time, "dirty_microseconds": time + 12, "graph_us": time - 2, "host_us": 50}
            rows.append({**known, "operator": operator, "variant": variant, "gb_per_s": 3000, **times, **more})

    for shape, dtype in bench_accept.ARGMAX:
        of = dict(zip("BQV", shape, strict=True), dtype=dtype)
        add("argmax_tokens", {"argmax_tokens": 50, "torch_argmax": 100.04}, **of)
    for batch, num_nodes in bench_accept.GREEDY:
        add("accept_greedy", {"accept_greedy": 4, "cpu": 1234.5}, B=batch, Q=num_nodes, path="4.5")
    for shape, dtype in bench_accept.SAMPLED:
        of = dict(zip("BQV", shape, strict=True), dtype=dtype)
        add("accept_sampled", {"accept_sampled": 60}, **of, path="4.1")
        add("accept_sampled", {"torch_multinomial": 900}, **of)
    for case in ("no filter", "top_k 50", "top_p 0.9", "top_k 50, top_p 0.9"):
        of = {**dict(zip("BQV", bench_accept.PROBS_SHAPE, strict=True)), "dtype": "bfloat16", "case": case}
        add("target_probs", {"target_probs": 300, "torch_eager": 5000}, **of)
    for layers, batch, path, size in bench_accept.COMPACT:
        of = {"layers": layers, "B": batch, "path": path, "page_size": size or "", "case": "some"}
        add("compact_kv", {"compact_kv": 20, "torch_index": 700}, **of)
    add("gather_accepted", {"gather_accepted": 5, "torch_index": 9}, B=8, Q=65, path=6, case="rows of 7168")
    add("copy", {"torch_copy": 500}, case="1024 MiB")
    for case, stages in bench_accept.STAGES.items():
        of = {"case": case, "B": 8, "Q": 65, "V": 163840, "layers": 61, "path": "4.5"}
        add("step", {"graph": 150.5 if case == "greedy" else 450}, **of)
        add("stage", {stage: 10 + 20 * n for n, stage in enumerate(stages)}, **of)
    tables.write_rows(tmp_path / "accept.csv", rows, bench_accept.FIELDS)
    return tmp_path / "accept.csv"


def test_sentences_and_tables_of_accepting(made_up_accept):
    rows = tables.read_rows(made_up_accept)
    assert kinds_of_rows(rows) == accept_kinds()
    found = {}
    for table, lines in (
        (tables.argmax_table, len(bench_accept.ARGMAX)),
        (tables.greedy_table, len(bench_accept.GREEDY)),
        (tables.sampled_table, len(bench_accept.SAMPLED)),
        (tables.probs_table, len(bench_accept.FILTERS)),
        (tables.compact_table, len(bench_accept.COMPACT)),
        (tables.stages_table, len(tables.STAGES) + 2),
    ):
        found[table] = table(rows).splitlines()
        assert len(found[table]) == 2 + lines and len({line.count("|") for line in found[table]}) == 1
    assert found[tables.argmax_table][2] == "| 8,65,163840 | bfloat16 | 50.0 | 62.0 | 48.0 | 3,000 | 100 |"
    assert found[tables.greedy_table][3] == "| 1,65 | 4.5 | 4.0 | 16.0 | 2.0 | 1,234 |"
    assert found[tables.sampled_table][2] == "| 8,65,163840 | float32 | 4.1 | 60.0 | 72.0 | 58.0 | 900 |"
    assert found[tables.probs_table][2] == "| 8,65,163840 | bfloat16 | all | 300 | 312 | 298 | 3,000 | 5,000 |"
    assert found[tables.compact_table][2] == "| 61,64 | 6 | pages of 64 | 20.0 | 32.0 | 18.0 | 3,000 | 700 |"
    assert found[tables.compact_table][-1] == "| 1,8 | 6 | contiguous | 20.0 | 32.0 | 18.0 | 3,000 | 700 |"
    stages = found[tables.stages_table]
    assert stages[5] == "| `argmax_tokens` | 70.0 | 68.0 | – | – |"
    assert stages[-2:] == ["| their sum | 490 | 476 | 490 | 476 |", "| the step as one graph | 150 | 148 | 450 | 448 |"]
    assert "1024 MiB within the GPU's memory reaches 3,000 GB/s" in tables.copy_sentence(rows)
    assert "takes 5.0 µs for 6 rows of 7168 bfloat16" in tables.gather_sentence(rows)
    assert "takes 150 µs as one CUDA graph, and 450 µs where" in tables.step_sentence(rows)
    assert {stage for some in bench_accept.STAGES.values() for stage in some} == tables.STAGES.keys()
