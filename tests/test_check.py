"""The command line: check and info."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ddtree_numba import check, kdtr
from ddtree_numba.__main__ import main
from ddtree_numba.device.runtime import SIMULATOR

SMALL = check.REFERENCE_FOLDER / "verify_attn_h8_p1_b4.kdtr"
QUICK = ["--budget", "0.1"]


def run(capsys, *arguments):
    """Exit code, standard output and standard error of a command."""
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rewritten(tmp_path, **changes):
    """The small reference file with some tensors replaced, or left out where None is given."""
    tensors = {**kdtr.read(SMALL), **changes}
    path = tmp_path / f"{'_'.join(changes)}.kdtr"
    kdtr.write(path, {name: x for name, x in tensors.items() if x is not None})
    return path


def test_a_reference_file_passes(capsys):
    code, out, _ = run(capsys, "check", SMALL, *QUICK)
    assert code == 0
    assert "verify_attn_h8_p1_b4" in out and "three_phase_numpy" in out and "2 passed, 0 failed" in out


def test_json_says_what_was_checked(capsys):
    code, out, _ = run(capsys, "check", SMALL, "--json", *QUICK)
    report = json.loads(out)
    assert code == 0 and report["passed"]
    assert [row["variant"] for row in report["rows"]] == ["three_phase_numpy", "three_phase"]
    for row in report["rows"]:
        assert row["passed"] and row["out"]["rel_frobenius_error"] <= row["out"]["rel_frobenius"]
        assert row["lse"]["max_abs_error"] <= check.LSE_BOUND


@pytest.mark.skipif(not SIMULATOR, reason="a GPU checks all blocks")
@pytest.mark.parametrize("seconds", [0.0, 1.0, 1e9])
@pytest.mark.parametrize("path", check.reference_files(), ids=lambda path: path.stem)
def test_a_part_has_at_least_four_blocks_and_is_named(path, seconds):
    tensors = kdtr.read(path)
    arrays, checked = check._select(tensors, seconds)
    blocks = int(np.prod(arrays["q"].shape[:3]))
    total = int(np.prod(tensors["q"].shape[:3]))
    assert 4 <= blocks <= total
    assert arrays["expected_out"].shape[:3] == arrays["expected_lse"].shape == arrays["q"].shape[:3]
    if seconds == 1e9:
        assert blocks == total
    if blocks == total:
        assert checked == f"all {total} blocks"
    else:
        assert checked.startswith(f"{blocks} of {total} blocks: nodes 0-{arrays['q'].shape[1] - 1}, heads 0 and ")


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
    assert "0 passed, 2 failed" in out and "FAIL" in out


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
    ):
        code, out, _ = run(capsys, "check", path, SMALL, *QUICK)
        assert code == 1
        assert reason in " ".join(out.split()), reason
        assert "2 passed" in out, "the good file beside it still counts"


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
