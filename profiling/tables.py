"""The tables and figures that README and docs quote, from the committed CSV alone.

``python profiling/tables.py`` prints them; tests/test_results.py holds README.md and docs/numerics.md to them.
"""

from __future__ import annotations

import csv
from pathlib import Path

H200 = Path(__file__).resolve().parent / "results" / "nvidia-h200" / "verify_attention.csv"


def read_rows(path: Path = H200) -> list[dict[str, str]]:
    """The rows of a results file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def pairs(rows: list[dict[str, str]]) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Each case's row for three_phase and the one for PyTorch eager."""
    ours = [row for row in rows if row["variant"] == "three_phase"]
    theirs = [row for row in rows if row["variant"] == "torch_eager"]
    same = ("case", "B", "H", "Q", "prefix", "dtype")
    assert [[row[name] for name in same] for row in ours] == [[row[name] for name in same] for row in theirs]
    return list(zip(ours, theirs, strict=True))


def numerics_table(rows: list[dict[str, str]]) -> str:
    """Errors beside PyTorch eager and the bound, as Markdown."""
    lines = [
        "| inputs | B,H,Q,prefix | dtype | error | PyTorch eager | bound | max abs | LSE |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ours, theirs in pairs(rows):
        shape = ",".join(ours[name] for name in ("B", "H", "Q", "prefix"))
        cells = (ours["case"], shape, ours["dtype"], ours["rel_frobenius"], theirs["rel_frobenius"])
        lines.append(f"| {' | '.join((*cells, ours['bound'], ours['max_abs'], ours['lse_error']))} |")
    return "\n".join(lines)


def readme_sentence(rows: list[dict[str, str]]) -> str:
    """What README says of the speed and error of three_phase, at 8,64,9,2048 in float32."""
    ours, theirs = next(
        pair for pair in pairs(rows) if (pair[0]["B"], pair[0]["prefix"], pair[0]["dtype"]) == ("8", "2048", "float32")
    )
    part = 100 * float(ours["rel_frobenius"]) / float(theirs["rel_frobenius"])
    return (
        f"reaches {float(ours['tflops']):.1f} TFLOP/s in float32, where PyTorch's eager attention reaches "
        f"{float(theirs['tflops']):.1f}, at {part:.0f} % of its error"
    )


if __name__ == "__main__":
    print(readme_sentence(read_rows()))
    print(numerics_table(read_rows()))
