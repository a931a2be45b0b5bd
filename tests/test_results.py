"""The numbers in README.md and docs are those of the committed measurements, and the measurements passed.

What measures and draws them is tried here on NumPy arrays and made-up times.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ddtree_numba as dd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))

import bench_trees  # noqa: E402
import tables  # noqa: E402

ROWS = tables.read_rows()
TREE_ROWS = tables.tree_rows()
needs_tree_rows = pytest.mark.skipif(not TREE_ROWS, reason=f"{tables.TREES.name} is not measured yet")


def words(path):
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def test_readme_quotes_the_measurement():
    assert tables.readme_sentence(ROWS) in words("README.md")


def test_numerics_quotes_the_measurement():
    assert tables.numerics_table(ROWS) in (ROOT / "docs/numerics.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['case']}-{row['B']}-{row['dtype']}-{row['variant']}")
def test_rows_say_what_was_measured_and_on_what(row):
    assert row["right"] == "True"
    assert len(row["commit"]) == 40 and row["driver"] and row["gpu"] and int(row["sm_clock_mhz"]) > 0
    if row["variant"] == "three_phase":
        assert float(row["rel_frobenius"]) <= float(row["bound"]) and float(row["lse_error"]) <= 1e-5


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


# The measuring, on NumPy arrays


class Numpy:
    """Stands in for bench_trees.Gpu: the same inputs and exact results from NumPy, and times that are made up."""

    repeats = 30

    def __init__(self):
        self.timed = 0

    def logits(self, shape, dtype):
        x = np.random.default_rng(0).normal(0, bench_trees.LOGIT_STD, shape).astype(np.float32)
        return x.astype(ml_dtypes.bfloat16) if dtype == "bfloat16" else x

    def rows(self, batch, k, dtype):
        logits = self.logits((batch, 4, 300), dtype)
        exact = self.exact_topk(logits, k)
        return exact["logprobs"].astype(np.float32), exact["token_ids"], self.roots(batch)

    def roots(self, batch):
        return np.arange(batch, dtype=np.int32)

    def copy(self, x):
        return np.ascontiguousarray(x)

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

    def peers(self, logits, k):
        exact = self.exact_topk(logits, k)
        logprobs = exact["logprobs"].astype(np.float32)
        topk = exact["values"].astype(logits.dtype), exact["token_ids"]
        return {"torch_topk": lambda: topk, "torch_eager": lambda: (logprobs, exact["token_ids"])}

    def time(self, call, calls_in_graph=bench_trees.GRAPH_CALLS):
        call()
        self.timed += 1
        return dict.fromkeys(bench_trees.TIMES, "8.0")

    def machine(self):
        return {**dict.fromkeys(bench_trees.MACHINE, "some"), **bench_trees.host_machine()}


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


def test_the_whole_measurement_on_numpy(small, tmp_path):
    jobs = list(bench_trees.jobs(Numpy(), quick=False))
    assert len(jobs) == bench_trees.number_of_jobs(quick=False)
    made = [row for job in jobs for row in job()]
    assert [row for row in made if not row["right"]] == []
    tables.write_rows(tmp_path / "trees.csv", made, bench_trees.FIELDS)
    rows = tables.read_rows(tmp_path / "trees.csv")
    assert list(tmp_path.iterdir()) == [tmp_path / "trees.csv"]
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
    first = next(bench_trees.build_rows(gpu, gpu.rows(2, 6, "float32"), "float32 logits", 6))
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
    given = gpu.rows(1, 6, "float32")
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
    rows = list(bench_trees.build_rows(gpu, gpu.rows(1, 6, "float32"), "float32 logits", 6))
    assert [row["right"] for row in rows] == [False, False, True, True]
    assert rows[0]["note"].startswith("ZeroDivisionError")


def test_the_heap_on_the_cpu_is_the_oracle_with_ties_and_what_nodes_see():
    gpu = Numpy()
    logprobs, ids, roots = gpu.rows(2, 40, "bfloat16")
    logprobs = np.round(logprobs)  # ties
    found = bench_trees.batch_on_cpu(logprobs, ids, roots, 40)
    assert bench_trees.right_trees(found, logprobs, ids, roots, 40)
    for tree in found:
        assert np.array_equal(tree["sees"], dd.mask_from_parents(tree["parents"]))
        for node, parent in enumerate(tree["parents"].tolist()):
            assert node == 0 or tree["children"][parent][int(tree["tokens"][node])] == node


@pytest.mark.skipif(not bench_trees.runtime.SIMULATOR, reason="there is a GPU")
def test_measuring_says_that_it_needs_a_gpu(capsys):
    assert bench_trees.main([]) == 2
    assert "there is none" in capsys.readouterr().err


# The sentences, tables and figure, from made-up times

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


def shown(svg):
    """The SHA-256 of the measurements that a figure says it shows."""
    return re.search(r"<dc:description>.*SHA-256 ([0-9a-f]{64})</dc:description>", svg.read_text(encoding="utf-8"))[1]


def test_the_figure_of_build_times(made_up, tmp_path):
    pytest.importorskip("matplotlib")
    import plot_trees

    for folder in ("first", "second"):
        plot_trees.main(["--csv", str(made_up), "--out", str(tmp_path / folder)])
    files = sorted((tmp_path / "first").iterdir())
    themes, kinds = ("dark", "light"), ("png", "svg")
    assert [file.name for file in files] == [f"build_tree_{theme}.{kind}" for theme in themes for kind in kinds]
    for file in files:
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes(), file.name
    for svg in (file for file in files if file.suffix == ".svg"):
        assert shown(svg) == hashlib.sha256(made_up.read_bytes()).hexdigest()
        curves = set(re.findall(r'id="((?:frontier|heap|cpu_heap)-\d+)"', svg.read_text(encoding="utf-8")))
        assert {f"frontier-{budget}" for budget in bench_trees.BUDGETS} < curves
        assert "heap-256" in curves and "heap-1024" not in curves


@needs_tree_rows
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_committed_figure_shows_the_committed_measurements(theme):
    svg = ROOT / "docs" / "figures" / f"build_tree_{theme}.svg"
    assert shown(svg) == hashlib.sha256(tables.TREES.read_bytes()).hexdigest()
    assert svg.with_suffix(".png").stat().st_size > 10_000
