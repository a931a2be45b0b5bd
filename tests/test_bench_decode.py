"""profiling/bench_decode.py on the small model, without a GPU: what it counts, and the law of what is sampled."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from decode_cases import write_model

from ddtree_numba.decode import load

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))

import bench_decode
import tables


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_decode, "_loaded", load(write_model(tmp_path / "small.gguf"), "numpy"))


def test_there_are_two_hundred_different_prompts():
    assert len(set(bench_decode.PROMPTS)) == len(bench_decode.PROMPTS) == 200


def test_replies_of_every_mode_are_compared_with_one_token_a_step():
    rows = bench_decode.compare((bench_decode.PROMPTS[:2], 5))
    assert [(row["mode"], row["B"]) for row in rows] == [("tree", 2)] * 2 + [("chain", 2)] * 2
    assert all(row["gap"] == "" and row["equal"] == row["tokens"] <= 5 for row in rows)


def test_a_reply_that_differs_is_listed_with_its_gap(monkeypatch):
    decode = bench_decode.decode

    def wrong(prompts, *, mode, **settings):
        replies = decode(prompts, mode=mode, **settings)
        if mode == "tree":
            replies[0].tokens[3] += 1
        return replies

    monkeypatch.setattr(bench_decode, "decode", wrong)
    tree, chain = bench_decode.compare((bench_decode.PROMPTS[:1], 5))
    assert tree["equal"] == 3 and float(tree["gap"]) > 0
    assert chain["equal"] == 5 and chain["gap"] == ""


def test_samples_are_beginnings_that_the_model_can_say_and_follow_its_law(monkeypatch):
    monkeypatch.setattr(bench_decode, "SAMPLES", 48)
    monkeypatch.setattr(bench_decode, "SAMPLE_BATCH", 24)
    row = bench_decode.sampled_row("tree")
    assert row["beginnings"] == 64 and row["samples"] == 48
    assert float(row["p_value"]) > bench_decode.LEAST_PROBABLE


def test_draws_pass_and_draws_of_another_law_fail():
    law = {(n,): p for n, p in enumerate(np.random.default_rng(1).dirichlet(np.ones(64)))}
    other = bench_decode.flatter(law)
    draws = np.random.default_rng(2).choice(64, 8192, p=list(law.values()))
    counts = Counter((int(n),) for n in draws)
    assert bench_decode.p_value(counts, law) > 0.01
    assert bench_decode.p_value(counts, other) < bench_decode.LEAST_PROBABLE
    assert bench_decode.p_value(Counter({(99,): 1}), law) == 0


def test_a_row_of_times_has_all_stages():
    row = bench_decode.speed_row("chain", 2, 4)
    assert float(row["step_ms"]) == pytest.approx(sum(float(row[f"{s}_ms"]) for s in bench_decode.STAGES), abs=0.01)
    assert set(row) | set(bench_decode.MACHINE) == set(bench_decode.SPEED)


def test_without_a_gpu_it_says_so(capsys):
    if not bench_decode.runtime.SIMULATOR:
        pytest.skip("there is a GPU here")
    assert bench_decode.main([]) == 2
    assert "there is none" in capsys.readouterr().err


def test_the_sentence_counts_equal_replies_and_means_acceptance():
    row = {"gpu": "NVIDIA H200", "tokens": "9", "gap": ""}
    rows = [
        {**row, "prompt": "a", "mode": "tree", "B": "8", "acceptance_length": "3"},
        {**row, "prompt": "b", "mode": "tree", "B": "8", "acceptance_length": "2", "gap": "1e-5"},
        {**row, "prompt": "a", "mode": "chain", "B": "8", "acceptance_length": "1.5"},
        {**row, "prompt": "a", "mode": "tree", "B": "1", "acceptance_length": "9", "tokens": "12"},
    ]
    said = tables.decode_sentence(rows)
    assert "in 2 of 3 replies to 2 prompts in batches of 8, in 1 of 1 replies to 1 prompts alone, 12 tokens" in said
    assert "2.50 in mode `tree` and 1.50 in mode `chain`" in said


def test_the_law_is_told_with_both_probabilities():
    row = {"samples": "8192", "beginnings": "64", "p_value": "0.4157", "flatter_p_value": "0.0001"}
    tree, chain = ({**row, "mode": mode, "acceptance_length": x} for mode, x in (("tree", "1.925"), ("chain", "1.377")))
    said = tables.law_sentence([tree, chain])
    assert "8,192 sampled replies" in said and "the same p = 0.4157 in modes `tree` and `chain`" in said
    assert "1.925 and 1.377 accepted a step" in said and said.endswith("p = 0.0001.")
    said = tables.law_sentence([tree, {**chain, "p_value": "0.5000", "flatter_p_value": "0.0300"}])
    assert "p = 0.4157 in mode `tree` and 0.5000 in mode `chain`" in said and said.endswith("p = 0.0300.")
