"""The numbers in README.md and docs are those of the committed measurements, and the measurements passed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "profiling"))

import tables  # noqa: E402

ROWS = tables.read_rows()


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
