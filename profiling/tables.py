"""The tables and figures that README and docs quote, from the committed CSV alone.

``python profiling/tables.py`` prints them; tests/test_results.py holds README.md and docs/ to them.
"""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

H200 = Path(__file__).resolve().parent / "results" / "nvidia-h200" / "verify_attention.csv"
TREES = H200.with_name("trees.csv")

BUILDERS = {"frontier": "`frontier`", "heap": "`heap`", "cpu_heap": "heap on the CPU"}
TOPK = {"threshold": "`threshold`", "rounds": "`rounds`", "torch_topk": "torch.topk", "torch_eager": "with logsumexp"}


def read_rows(path: Path = H200) -> list[dict[str, str]]:
    """The rows of a results file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, Any]], fields: Sequence[str]) -> None:
    """Write a results file whole or not at all; what a row does not have stays empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


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


def tree_rows(path: Path = TREES) -> list[dict[str, str]]:
    """The measurements of top-k and trees; none while there is no such file."""
    return read_rows(path) if path.exists() else []


def pick(rows: list[dict[str, str]], **wanted: Any) -> dict[str, str]:
    """The one row whose columns say what is wanted."""
    found = [row for row in rows if all(row[name] == str(value) for name, value in wanted.items())]
    assert len(found) == 1, f"{len(found)} rows with {wanted}"
    return found[0]


def number(text: str) -> str:
    """Three digits or more of a number, thousands apart; a dash where nothing was measured."""
    if not text:
        return "–"
    value = float(text)
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def in_order(rows: list[dict[str, str]], *names: str) -> list[tuple[str, ...]]:
    """What the rows have in these columns, each combination once, in the order of the file."""
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def build_table(rows: list[dict[str, str]], inputs: str = "float32 logits") -> str:
    """Microseconds for a batch of trees, as Markdown: a line for each budget and builder, a column for each batch."""
    rows = [row for row in rows if row["operator"] == "build_tree" and row["inputs"] == inputs]
    batches = [batch for (batch,) in in_order(rows, "B")]
    lines = [f"| tree_budget | variant | B = {' | '.join(batches)} |", "|" + "---|" * (2 + len(batches))]
    for (budget,) in in_order(rows, "budget"):
        for variant, name in BUILDERS.items():
            ours = [row for row in rows if (row["budget"], row["variant"]) == (budget, variant)]
            some = {row["B"]: row["microseconds"] for row in ours}
            if any(some.values()):
                cells = (number(some.get(batch, "")) for batch in batches)
                lines.append(f"| {budget} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def topk_table(rows: list[dict[str, str]]) -> str:
    """Microseconds of each way to the best logits of a batch, and our share of the memory's speed, as Markdown."""
    rows = [row for row in rows if row["operator"] == "topk_logprobs"]
    names = list(TOPK.values())
    lines = [f"| B,L,V | dtype | k | {names[0]} | GB/s | {' | '.join(names[1:])} |", "|" + "---|" * (4 + len(names))]
    sizes = ("B", "L", "V", "inputs", "K")
    for size in in_order(rows, *sizes):
        some = {row["variant"]: row for row in rows if tuple(row[name] for name in sizes) == size}
        times = [number(some[variant]["microseconds"] if variant in some else "") for variant in TOPK]
        cells = (",".join(size[:3]), *size[3:], times[0], number(some["threshold"]["gb_per_s"]), *times[1:])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def build_sentence(rows: list[dict[str, str]], batch: int = 64, budget: int = 64) -> str:
    """What README says of build_tree: its time, and the CPU's for the same trees."""
    known = {"operator": "build_tree", "inputs": "float32 logits", "B": batch, "budget": budget}
    ours, theirs = pick(rows, **known, variant="frontier"), pick(rows, **known, variant="cpu_heap")
    tied = pick(rows, **{**known, "inputs": "bfloat16 logits"}, variant="frontier")
    ratio = float(theirs["microseconds"]) / float(ours["microseconds"])
    return (
        f"builds the trees of {batch} requests, {budget} nodes each, in {number(ours['microseconds'])} µs of device "
        f"time ({number(tied['microseconds'])} from bfloat16 logits, whose sums tie), where the reference's algorithm "
        f"takes the CPU {number(theirs['microseconds'])} µs in Python, {ratio:,.0f} times as long"
    )


def topk_sentence(rows: list[dict[str, str]]) -> str:
    """What README says of topk_logprobs, at [64, 15, 151936] in bfloat16."""
    known = {"operator": "topk_logprobs", "inputs": "bfloat16", "B": 64, "V": 151936, "K": 64}
    ours, theirs = pick(rows, **known, variant="threshold"), pick(rows, **known, variant="torch_eager")
    return (
        f"takes {number(ours['microseconds'])} µs for the 64 best of 151,936 bfloat16 logits in 960 rows "
        f"({number(ours['gb_per_s'])} GB/s), where PyTorch's topk and logsumexp take {number(theirs['microseconds'])}"
    )


def chain_sentence(rows: list[dict[str, str]]) -> str:
    """What the docs say of the way from logits to trees, as one CUDA graph."""
    ours = pick(rows, operator="chain", variant="threshold + frontier")
    theirs = pick(rows, operator="chain", variant="torch_eager + cpu_heap")
    return (
        f"From the logits of {ours['B']} requests to their trees it takes {number(ours['graph_us'])} µs as one CUDA "
        f"graph ({number(ours['host_us'])} µs of the host's time without one); with PyTorch's top-k, the copy to the "
        f"host and the heap there, {number(theirs['microseconds'])} µs"
    )


if __name__ == "__main__":
    print(readme_sentence(read_rows()))
    print(numerics_table(read_rows()))
    if TREES.exists():
        for say in (build_sentence, topk_sentence, chain_sentence, build_table, topk_table):
            print(say(tree_rows()))
