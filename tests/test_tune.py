"""profiling/tune.py and the file that it writes: what is wrong is refused, nothing is measured twice, auto follows.

The tuning is tried here on NumPy arrays, in the simulator, with made-up times.
"""

from __future__ import annotations

import importlib
import json
import logging
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import ddtree_numba as dd
from ddtree_numba.attention import flash, merge, tuned, verify
from ddtree_numba.attention.flash import LARGE, SMALL, TINY, Tiles, Tuned
from ddtree_numba.device import launch
from ddtree_numba.device.runtime import SIMULATOR
from refs import oracle

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))

import bench_verify_attention  # noqa: E402
import harness  # noqa: E402
import tables  # noqa: E402
import tune  # noqa: E402

only_simulated = pytest.mark.skipif(not SIMULATOR, reason="there is a GPU")

LONG = Tiles(rows=16, keys=32, warps=1, score_rows=8, score_keys=8, value_rows=4, max_rank=256, blocks=1)
CHOICE = Tuned(few_keys=20, large=LONG, large_waves=2, small=LONG, small_waves=3)


@pytest.fixture(autouse=True)
def no_file(monkeypatch, tmp_path):
    """No file of the user's, and nothing that another test has read."""
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    monkeypatch.setenv("DDTREE_NUMBA_CACHE", str(tmp_path / "cache"))
    tuned.of_name.cache_clear()
    yield
    tuned.of_name.cache_clear()


def give(monkeypatch, tmp_path, text: str) -> Path:
    """The file that auto reads, with this in it."""
    file = tmp_path / "given.json"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setenv(tuned.VARIABLE, str(file))
    return file


def inputs(prefix: int, num_nodes: int = 3, batch: int = 1):
    random = np.random.default_rng(0)
    return {
        "q": random.normal(size=(batch, num_nodes, 2, 48)).astype(np.float32),
        "kv_cache": random.normal(size=(batch, prefix + num_nodes, 48)).astype(np.float32),
        "cache_seqlens": np.full(batch, prefix, np.int32),
        "tree_mask": np.tril(np.ones((batch, num_nodes, num_nodes), np.bool_)),
        "sm_scale": 0.3,
        "kv_lora_rank": 32,
    }


def taken(monkeypatch, prefix: int, **options):
    """What a call runs: "three_phase", or flash's plan."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(verify.three_phase, "run", lambda problem: found.append("three_phase"))
        patch.setattr(flash, "run", lambda problem, plan: found.append(plan))
        dd.verify_attention(**inputs(prefix), **options)
    (one,) = found
    return one


# What auto takes


@only_simulated
def test_auto_follows_the_file(monkeypatch, tmp_path):
    before = {prefix: taken(monkeypatch, prefix) for prefix in (17, 18, 29, 30, 400)}
    assert [x if isinstance(x, str) else x.shape.tiles for x in before.values()] == ["three_phase"] * 3 + [TINY] * 2
    file = tmp_path / "given.json"
    tuned.write(file, launch.device_name(-1), CHOICE)
    monkeypatch.setenv(tuned.VARIABLE, str(file))
    assert taken(monkeypatch, 400) == before[400]  # the process has looked for a file before
    tuned.of_name.cache_clear()
    after = {prefix: taken(monkeypatch, prefix) for prefix in (17, 18, 400)}
    assert after[17] == "three_phase"
    assert after[18].shape.tiles == LONG and after[400].shape.tiles == LONG
    held = launch.multiprocessors(-1)
    assert after[400].num_blocks == min(held * 3, -(-403 // 32))  # little to do: three waves
    assert taken(monkeypatch, 400, variant="flash") == before[400]
    assert taken(monkeypatch, 400, batch_invariant=True).part_tiles == flash.CHUNK // LONG.keys


@only_simulated
def test_large_tiles_are_taken_where_there_is_much_to_do(monkeypatch):
    choice = CHOICE._replace(small=TINY)
    monkeypatch.setattr(flash, "LEAST_WORK", 4)
    held = launch.multiprocessors(-1)
    with tune.choosing(choice):  # one row tile, so that there are as many pairs of LARGE tiles as key tiles
        little, much = (taken(monkeypatch, LARGE.keys * n - 3) for n in (4 * held - 1, 4 * held))
    assert (little.shape.tiles, much.shape.tiles) == (TINY, LONG)
    assert (little.num_blocks, much.num_blocks) == (3 * held, 2 * held)


@only_simulated
def test_tuned_tiles_are_right(monkeypatch):
    """The same results within the bound, and a workspace of the stated size is enough."""
    given = inputs(70, batch=2)
    exact, _ = oracle.verify_attention(**given)
    with tune.choosing(CHOICE):
        nbytes = dd.workspace_bytes(2, 3, 2, 70, kv_lora_rank=32, qk_rope_head_dim=16)
        out, _ = dd.verify_attention(**given, workspace=np.empty(nbytes, np.uint8))
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)
    assert nbytes > dd.workspace_bytes(2, 3, 2, 70, kv_lora_rank=32, qk_rope_head_dim=16)


@only_simulated
def test_tiles_that_do_not_fit_leave_the_built_in_ones(monkeypatch):
    before = taken(monkeypatch, 400)
    with tune.choosing(CHOICE._replace(large=LONG._replace(max_rank=16))):
        assert taken(monkeypatch, 400) == before
    monkeypatch.setattr(flash, "in_pieces", lambda x, size: False)
    before = taken(monkeypatch, 400)
    with tune.choosing(CHOICE):
        assert taken(monkeypatch, 400) == before


@only_simulated
def test_a_gpu_that_the_file_does_not_name_has_the_built_in_choice(monkeypatch, tmp_path, caplog):
    before = taken(monkeypatch, 400)
    tuned.of_name.cache_clear()
    file = give(monkeypatch, tmp_path, "")
    file.unlink()
    tuned.write(file, "another GPU", CHOICE)
    assert taken(monkeypatch, 400) == before and not caplog.records


GOOD = {"format": tuned.FORMAT, "gpus": {}}
SIZE = {**LONG._asdict(), "waves": 1}
ENTRY = {"few_keys": 20, "large": SIZE, "small": SIZE}


def of_gpu(entry) -> str:
    return json.dumps({**GOOD, "gpus": {launch.device_name(-1): entry}})


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "it is no JSON: Expecting value"),
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("\x00\x01", "it is no JSON"),
        ("[]", 'it does not say "format": "ddtree_numba tuned 1"'),
        ('{"format": "something else", "gpus": {}}', 'it does not say "format"'),
        (json.dumps({**GOOD, "gpus": []}), 'it does not say "format"'),
        (" " * (tuned.MOST_BYTES + 1), "it has more than 1048576 bytes"),
        (of_gpu([]), r"\] must have the fields few_keys, large, small and no others"),
        (of_gpu({**ENTRY, "more": 1}), "must have the fields few_keys, large, small and no others"),
        (of_gpu({**ENTRY, "few_keys": True}), "few_keys is True; it must be a whole number from 0 to 1024"),
        (of_gpu({**ENTRY, "few_keys": 1025}), "few_keys is 1025; it must be a whole number from 0 to 1024"),
        (of_gpu({**ENTRY, "few_keys": "9"}), "few_keys is '9'; it must be a whole number from 0 to 1024"),
        (of_gpu({**ENTRY, "small": {**SIZE, "waves": 0}}), "small.waves is 0; it must be a whole number from 1 to 16"),
        (of_gpu({**ENTRY, "large": {**SIZE, "rows": 16.0}}), "large.rows is 16.0; it must be a whole number"),
        (of_gpu({**ENTRY, "large": {**SIZE, "rows": 24}}), "large is .* it must keep the rule: a warp has 1, 2, 4"),
        (of_gpu({**ENTRY, "large": {**SIZE, "keys": 64}}), "it must keep the rule: keys are 16 or 32"),
    ],
)
def test_a_broken_or_foreign_file_is_said_once_and_not_used(monkeypatch, tmp_path, caplog, text, reason):
    give(monkeypatch, tmp_path, text)
    with caplog.at_level(logging.WARNING, "ddtree_numba"):
        assert tuned.of(-1) is None
        assert tuned.of(-1) is None
    (record,) = caplog.records
    message = record.getMessage()
    assert "given.json is not used, and the built-in choice of tiles is: " in message
    assert re.search(reason, message), message


def test_a_named_file_that_is_missing_is_said_and_none_at_the_usual_place_is_not(monkeypatch, tmp_path, caplog):
    assert tuned.of(-1) is None and not caplog.records
    tuned.of_name.cache_clear()
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "missing.json"))
    assert tuned.of(-1) is None
    assert "there is no such file" in caplog.text
    tuned.of_name.cache_clear()
    caplog.clear()
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))  # a folder
    assert tuned.of(-1) is None and "is not used" in caplog.text


def test_where_the_file_is(monkeypatch, tmp_path):
    assert tuned.path() == tmp_path / "cache" / "tuned.json"
    monkeypatch.delenv("DDTREE_NUMBA_CACHE")
    if sys.platform != "win32":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert tuned.path() == tmp_path / "xdg" / "ddtree_numba" / "tuned.json"
    monkeypatch.setenv(tuned.VARIABLE, "")
    assert tuned.path() is None and tuned.of(-1) is None
    monkeypatch.setenv(tuned.VARIABLE, "some.json")
    assert tuned.path() == Path("some.json")


def test_writing_keeps_other_gpus_and_refuses_foreign_files(tmp_path):
    file = tmp_path / "new" / "tuned.json"
    other = Tuned(0, LARGE, 1, SMALL, 16)
    tuned.write(file, "one", other)
    tuned.write(file, "two", CHOICE)
    tuned.write(file, "two", CHOICE._replace(few_keys=7))
    assert tuned.read(file) == {"one": other, "two": CHOICE._replace(few_keys=7)}
    assert [x.name for x in file.parent.iterdir()] == ["tuned.json"]
    file.write_text('{"someone": "else"}')
    with pytest.raises(tuned.Unusable, match="it does not say"):
        tuned.write(file, "two", CHOICE)
    assert file.read_text() == '{"someone": "else"}'


# Sizes that a kernel can have


def test_all_tiles_that_are_tried_keep_the_rules():
    assert [flash.unfit(tiles) for tiles in (*tune.TILES, *flash.TILES, LONG)] == [""] * (
        len(tune.TILES) + len(flash.TILES) + 1
    )
    assert len({tune.name_of(tiles) for tiles in tune.TILES}) == len(tune.TILES)
    assert tune.TILES[:2] == (LARGE, SMALL)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 48},
        {"rows": 4096},
        {"keys": 8},
        {"keys": 64},
        {"warps": 3},
        {"warps": 32},
        {"score_rows": 64},
        {"score_keys": 16},
        {"score_rows": 1, "score_keys": 4},
        {"value_rows": 2},
        {"value_rows": 16},
        {"blocks": 5},
        {"blocks": 0},
    ],
    ids=str,
)
def test_other_tiles_break_a_rule(changes):
    assert flash.unfit(LARGE._replace(**changes))


def test_any_numbers_have_an_answer():
    generator = random.Random(0)
    sizes = (1, 2, 3, 4, 5, 8, 16, 24, 32, 64, 100, 128, 4096)
    answers = [flash.unfit(Tiles(*(generator.choice(sizes) for _ in Tiles._fields))) for _ in range(3000)]
    assert "" not in answers or len(set(answers)) > 5


@only_simulated
@pytest.mark.parametrize("sizes", [(16, 32, 2, 8, 8, 4), (32, 16, 1, 16, 2, 8), (64, 16, 4, 8, 2, 4)], ids=str)
def test_a_kernel_of_any_sizes_that_keep_the_rules_is_right(sizes):
    tiles = Tiles(*sizes, max_rank=1024, blocks=1)
    assert flash.unfit(tiles) == ""
    given = inputs(20)
    exact, _ = oracle.verify_attention(**given)
    with tune.choosing(Tuned(0, tiles, 1, tiles, 1)):
        out, _ = dd.verify_attention(**given)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)


def test_the_mirror_is_right_with_all_tiles_that_are_tried():
    given = inputs(50, num_nodes=9)
    exact, _ = oracle.verify_attention(**given)
    kept = flash.TILES
    for tiles in tune.TILES:
        try:
            flash.TILES = (tiles,)
            for options in ({}, {"num_splits": 2}):
                out, _ = dd.verify_attention(**given, **options, variant="flash_numpy")
                np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)
        finally:
            flash.TILES = kept


# The tuning


class Numpy:
    """Stands in for both Gpus: NumPy, the simulator, and times that the configurations make up."""

    repeats = 5

    def __init__(self):
        self.timed = []

    def inputs(self, case):
        batch, num_heads, num_nodes, prefix = case.shape
        generator = np.random.default_rng(0)
        return {
            "q": generator.normal(size=(batch, num_nodes, num_heads, 48)).astype(np.float32),
            "kv_cache": generator.normal(size=(batch, prefix + num_nodes, 48)).astype(np.float32),
            "cache_seqlens": np.full(batch, prefix, np.int32),
            "tree_mask": dd.mask_from_parents(bench_verify_attention.random_parents(batch, num_nodes)),
        }

    def results(self, given):
        if isinstance(given, tuple):
            return np.empty_like(given[0]), np.empty_like(given[1])
        shape = given["q"].shape[:3]
        return {"out": np.empty((*shape, 32), np.float32), "lse": np.empty(shape, np.float32)}

    def exact(self, given, sm_scale):
        given = {**given, "sm_scale": sm_scale, "kv_lora_rank": 32}
        return *oracle.verify_attention(**given), oracle.logit_statistics(**given)["logit_magnitude"]

    def errors(self, found, exact):
        of_lse = np.abs(found[1] - exact[1]) / np.maximum(1, np.abs(exact[1]))
        rel = np.linalg.norm(found[0] - exact[0]) / np.linalg.norm(exact[0])
        return {"rel_frobenius": float(rel), "lse_error": float(of_lse.max())}

    def used(self, kernel):
        return {"registers": 200, "local_bytes": 16}

    def states(self, shape, dtype, layout):
        generator = np.random.default_rng(0)
        return tuple(generator.normal(size=s).astype(np.float32) for s in (shape, shape[:2]) * 2)

    def right(self, found, states, dtype, bounds):
        a, l_a, b, l_b = states
        exact = (np.exp(l_a)[..., None] * a + np.exp(l_b)[..., None] * b) / (np.exp(l_a) + np.exp(l_b))[..., None]
        return bool(np.abs(found[0] - exact).max() < 1e-5)

    def alone(self, call):
        call()
        self.timed.append(call)
        return 10.0, 0.5

    def machine(self):
        return dict.fromkeys(harness.MACHINE, "some")


@pytest.fixture
def small(monkeypatch):
    """Sizes and configurations for the simulator."""
    monkeypatch.setattr(bench_verify_attention, "KV_LORA_RANK", 32)
    monkeypatch.setattr(bench_verify_attention, "HEAD_DIM", 48)
    monkeypatch.setattr(tune, "TILES", (TINY, LONG))
    monkeypatch.setattr(tune, "SHAPES", {tune.MUCH: (2, 1, 2, 16), tune.LITTLE: (1, 1, 2, 16)})
    monkeypatch.setattr(tune, "WAVES", (1, 2))
    monkeypatch.setattr(tune, "FEW_KEYS", (3, 8))
    monkeypatch.setattr(tune, "FEW_SHAPE", {"H": 1, "Q": 2})
    monkeypatch.setattr(tune, "FEW_BATCHES", (1,))
    monkeypatch.setattr(tune, "MERGE_SHAPES", ((2, 1, 16),))
    monkeypatch.setattr(tune, "LOG_LANES", (0, 1))
    tune.problem.cache_clear()
    yield
    tune.problem.cache_clear()


@only_simulated
def test_the_whole_tuning_on_numpy(small, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    gpu = Numpy()
    monkeypatch.setattr(harness, "open_gpu", lambda *args: gpu)

    def alone(call):  # the second tiles are the faster ones, and so is flash
        gpu.timed.append(call)
        tiles = tuned.of(-1)
        return (5.0 if tiles and tiles.large == LONG else 8.0), 0.1

    monkeypatch.setattr(gpu, "alone", alone)
    arguments = ["--quick", "--out", str(tmp_path / "out"), "--file", str(tmp_path / "tuned.json")]
    assert tune.main(arguments) == 0
    rows = tables.read_rows(tmp_path / "out" / "tune_quick.csv")
    assert len(rows) == tune.number_of_jobs(True) == 2 * 2 * 2 + 2 + 2
    assert [row for row in rows if row["right"] != "True"] == []
    assert {row["local_bytes"] for row in rows if row["sweep"] == tune.MUCH} == {"16"}
    found = tuned.read(tmp_path / "tuned.json")[launch.device_name(-1)]
    assert found == Tuned(0, LONG, 1, LONG, 1)
    text = (tmp_path / "out" / "tune_light.svg").read_text(encoding="utf-8")
    cells = set(re.findall(r'id="cell-([\w-]+)"', text))
    assert {"much-16x32x1-2", "little-16x16x1-1", "merge_states-16-2"} <= cells
    assert (merge.THREADS, merge.MAX_LOG_LANES) == (16, 5)  # as they were
    printed = capsys.readouterr().out
    assert "three_phase up to 0 keys" in printed and f"once {tuned.VARIABLE} names it" in printed

    count = len(gpu.timed)
    assert tune.main(arguments) == 0  # nothing is measured twice
    assert len(gpu.timed) == count
    assert f"{len(rows)} configurations of" in capsys.readouterr().out

    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "tuned.json"))
    tuned.of_name.cache_clear()
    assert taken(monkeypatch, 400).shape.tiles == LONG


@only_simulated
def test_a_start_that_was_interrupted_goes_on(small, monkeypatch, tmp_path):
    gpu, path, made = Numpy(), tmp_path / "tune.csv", []

    def row_of(gpu, row):
        made.append(row)
        if len(made) == 5:
            raise KeyboardInterrupt
        return {**row, "right": True, "microseconds": "8.0", **gpu.machine()}

    monkeypatch.setattr(tune, "attention_row", row_of)
    monkeypatch.setattr(tune, "merge_row", row_of)
    with pytest.raises(KeyboardInterrupt):
        tune.sweep((gpu, gpu), path, False, True)
    kept = tables.read_rows(path)
    assert len(kept) == 4 and [x.name for x in tmp_path.iterdir()] == ["tune.csv"]
    rows = tune.sweep((gpu, gpu), path, False, True)
    assert len(rows) == tune.number_of_jobs(True) == len(made) - 1
    assert tables.read_rows(path)[:4] == kept
    tune.sweep((gpu, gpu), path, True, True)  # anew
    assert len(made) - 1 == 2 * len(rows)


def test_rows_of_another_gpu_or_commit_or_with_an_exception_are_measured_again(tmp_path):
    path, machine = tmp_path / "tune.csv", dict.fromkeys(harness.MACHINE, "some")
    kept = {"sweep": tune.MUCH, "right": "True", **machine}
    others = ({"gpu": "other"}, {"commit": "other"}, {"note": "RuntimeError: no"})
    tables.write_rows(path, [kept, *({**kept, **other} for other in others)], tune.FIELDS)
    assert [row["sweep"] for row in tune.earlier(path, machine)] == [tune.MUCH]
    path.write_text("sweep,right\nmuch,True\n")
    with pytest.raises(ValueError, match="has other columns"):
        tune.sweep((Numpy(), Numpy()), path, False, True)


@only_simulated
def test_a_wrong_configuration_is_refused_before_it_is_timed(small, monkeypatch):
    gpu, run = Numpy(), flash.run

    def wrong(problem, plan):
        run(problem, plan)
        if plan.shape.tiles == LONG:
            problem.out.as_numpy()[-1, -1, -1, -1] += 1e-3

    monkeypatch.setattr(flash, "run", wrong)
    rows = [tune.attention_row(gpu, row) for row in tune.flash_settings(True)]
    assert {(row["tiles"], row["right"]) for row in rows} == {("16x16x1", True), ("16x32x1", False)}
    assert len(gpu.timed) == 4 and all("microseconds" not in row for row in rows if not row["right"])
    choice = tune.chosen(rows)
    assert choice.large == choice.small == TINY


@only_simulated
def test_a_configuration_that_does_not_compile_or_fit_costs_only_its_own_row(small, monkeypatch):
    gpu = Numpy()
    make_kernel = flash.make_kernel

    def failing(shape):
        if shape.tiles == LONG:
            raise RuntimeError("no\nregisters")
        return make_kernel(shape)

    monkeypatch.setattr(flash, "make_kernel", failing)
    rows = [tune.attention_row(gpu, row) for row in tune.flash_settings(True)]
    assert {row["note"] for row in rows if row["tiles"] == "16x32x1"} == {"RuntimeError: no registers"}
    assert sum(row["right"] for row in rows) == 4
    monkeypatch.setattr(tune, "TILES", (LONG._replace(max_rank=16),))
    row = tune.attention_row(gpu, next(tune.flash_settings(True)))
    assert row["right"] is False and "do not fit" in row["note"]


@only_simulated
def test_a_wrong_merge_is_refused(small, monkeypatch):
    gpu, run = Numpy(), merge.run

    def wrong(states):
        run(states)
        if merge.MAX_LOG_LANES == 1:
            states[-2].as_numpy()[-1, -1, -1] += 1

    monkeypatch.setattr(merge, "run", wrong)
    rows = [tune.merge_row(gpu, row) for row in tune.merge_settings(True)]
    assert [(row["lanes"], row["right"]) for row in rows] == [(1, True), (2, False)]


def flash_row(sweep: str, tiles: Tiles, waves: int, microseconds: float | None, dtype: str = "float32"):
    row = {"sweep": sweep, "dtype": dtype, "variant": "flash", "tiles": tune.name_of(tiles), "waves": waves}
    return {**row, "right": microseconds is not None, "microseconds": microseconds or ""}


def usual(monkeypatch):
    """The built-in choice of a GPU with both tiles."""
    monkeypatch.setattr(flash, "TILES", (LARGE, SMALL))
    return tune.built_in()


def test_the_fastest_over_all_cases_is_chosen(monkeypatch):
    assert usual(monkeypatch) == Tuned(verify.FEW_KEYS, LARGE, 1, SMALL, 1)
    third = tune.TILES[2]
    rows = [
        flash_row(tune.MUCH, LARGE, 1, 100.0),
        flash_row(tune.MUCH, LARGE, 1, 100.0, "bfloat16"),
        flash_row(tune.MUCH, third, 2, 50.0),
        flash_row(tune.MUCH, third, 2, 190.0, "bfloat16"),  # 97.5 in the mean: within noise
        flash_row(tune.MUCH, SMALL, 1, 10.0),  # was wrong in bfloat16
        flash_row(tune.MUCH, SMALL, 1, None, "bfloat16"),
        flash_row(tune.LITTLE, SMALL, 1, 50.0),
        flash_row(tune.LITTLE, third, 4, 48.0),
    ]
    assert tune.chosen(rows) == Tuned(verify.FEW_KEYS, LARGE, 1, third, 4)
    rows[3]["microseconds"] = 170.0
    assert tune.chosen(rows)[1:3] == (third, 2)
    assert tune.chosen([]) == tune.built_in()


@pytest.mark.parametrize(
    "ratios, expected",
    [
        ({8: (0.8, 0.9), 32: (0.9, 1.1), 64: (1.2, 1.0)}, 32),
        ({8: (0.8, 0.9), 32: (1.1, 1.1), 64: (0.9, 0.9)}, 8),
        ({8: (1.1, 1.1), 32: (0.9, 0.9)}, 0),
        ({8: (0.8, 0.9), 32: (0.9, 0.9)}, 32),
        ({}, None),
    ],
)
def test_three_phase_is_taken_as_long_as_it_is_faster(ratios, expected):
    rows = []
    for keys, values in ratios.items():
        for batch, ratio in zip((1, 8), values, strict=True):
            known = {"sweep": tune.FEW, "B": batch, "Q": 5, "prefix": keys - 5, "right": True}
            rows += [{**known, "variant": "three_phase", "microseconds": 10 * ratio}]
            rows += [{**known, "variant": "flash", "microseconds": 10}]
    assert tune.few_keys(rows) == expected


def test_a_foreign_file_is_not_overwritten(monkeypatch, tmp_path, capsys):
    file = tmp_path / "notes.json"
    file.write_text("{}")
    monkeypatch.setattr(harness, "open_gpu", lambda *args: pytest.fail("nothing is to be measured"))
    assert tune.main(["--file", str(file), "--out", str(tmp_path)]) == 2
    assert file.read_text() == "{}" and "is not overwritten" in capsys.readouterr().err
    monkeypatch.setenv(tuned.VARIABLE, "")
    assert tune.main(["--out", str(tmp_path)]) == 2 and "name one by --file" in capsys.readouterr().err


@only_simulated
def test_without_a_gpu_it_says_so(tmp_path, capsys):
    assert tune.main(["--quick", "--out", str(tmp_path)]) == 2
    assert "there is none" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_example_of_a_kernel_of_ones_own(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    example = importlib.import_module("own_kernel")
    if SIMULATOR:
        assert example.main() == 0 and capsys.readouterr().out.startswith("ok ")
        monkeypatch.setattr(example.math, "log", lambda x: x)
        assert example.main() == 1 and capsys.readouterr().out.startswith("FAIL ")
    with pytest.raises(TypeError, match="takes float32 alone"):
        example.mine(*[np.zeros((1, 1), np.float64)] * 4, out=None, lse=None)


def test_the_full_sweep_is_in_order_of_dtypes():
    """The last compiled kernel of a shape is then the one that ran, whose registers the row states."""
    dtypes = [row["dtype"] for row in tune.flash_settings(False)]
    assert dtypes == sorted(dtypes, key=tune.DTYPES.index) and set(dtypes) == set(tune.DTYPES)
    assert len({tune.key(row) for row in tune.flash_settings(False)}) == len(dtypes)
