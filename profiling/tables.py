"""The tables and sentences that README and docs quote, from the committed CSV alone.

``python profiling/tables.py`` prints them, and with ``--write`` puts those of `QUOTES` into the pages, between their
marks. tests/test_results.py holds README.md and docs/ to them.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
H200 = ROOT / "profiling" / "results" / "nvidia-h200" / "verify_attention.csv"
TREES = H200.with_name("trees.csv")
ERRORS = H200.with_name("attention_error.csv")
MERGES = H200.with_name("merge_states.csv")
ENCODINGS = H200.with_name("encodings.csv")
ACCEPTS = H200.with_name("accept.csv")
DECODED = H200.with_name("decode_tokens.csv")
SAMPLED = H200.with_name("decode_samples.csv")
DECODING = H200.with_name("decode.csv")

BUILDERS = {"frontier": "`frontier`", "heap": "`heap`", "cpu_heap": "heap on the CPU"}
TOPK = {"threshold": "`threshold`", "rounds": "`rounds`", "torch_topk": "torch.topk", "torch_eager": "with logsumexp"}
MERGE = {"merge_states": "`merge_states`", "triton": "Triton", "torch_compile": "torch.compile", "torch_eager": "eager"}
STAGES = {  # of a step, by what is drawn: greedy, sampled
    "topk_logprobs": "`topk_logprobs`",
    "build_tree": "`build_tree`",
    "prepare": "positions, idle slots",
    "argmax_tokens": "`argmax_tokens`",
    "accept_greedy": "`accept_greedy`",
    "target_probs": "`target_probs`",
    "accept_sampled": "`accept_sampled`",
    "compact_kv": "moves of `compact_kv`",
    "finish": "lengths, roots",
}
EVEN = "even"  # splits of a row of flash that was called without num_splits
SHAPE = ("B", "H", "Q", "prefix")

Rows = list[dict[str, str]]


def read_rows(path: Path = H200) -> Rows:
    """The rows of a results file; none while there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, Any]], fields: Sequence[str]) -> None:
    """Write a results file whole or not at all; what a row does not have stays empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, newline="", encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def markdown(*lines: Sequence[str]) -> str:
    """A table; the first line is its head."""
    head, *body = ("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body])


# verify_attention


def problems(rows: Rows) -> list[dict[str, dict[str, str]]]:
    """The rows of each case by variant, called with the defaults; from before flash, three_phase and PyTorch alone.

    Sweeps are for figures.
    """
    found: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        if row.get("splits", "") in ("", EVEN) and not row["case"].endswith(" sweep"):
            key = tuple(row[name] for name in ("case", *SHAPE, "dtype"))
            found.setdefault(key, {})[row["variant"]] = row
    return [by_variant for by_variant in found.values() if "torch_eager" in by_variant]


def ours(by_variant: dict[str, dict[str, str]]) -> dict[str, str]:
    """The row of the faster of our variants."""
    return by_variant["flash" if "flash" in by_variant else "three_phase"]


def shape_of(row: dict[str, str]) -> str:
    """B,H,Q,prefix."""
    return ",".join(row[name] for name in SHAPE)


def value(by_variant: dict[str, dict[str, str]], variant: str, column: str) -> str:
    """A cell; a dash for what was not measured."""
    return by_variant.get(variant, {}).get(column, "") or "–"


def microseconds(by_variant: dict[str, dict[str, str]], variant: str) -> str:
    """The time of a variant, as `number` writes it."""
    return number(by_variant.get(variant, {}).get("microseconds", ""))


def numerics_table(rows: Rows) -> str:
    """Errors beside PyTorch eager and the bound."""
    variants = {"flash": "flash", "mma": "mma", "three_phase": "three_phase", "torch_eager": "PyTorch eager"}
    names = ("inputs", "B,H,Q,prefix", "dtype", *variants.values(), "bound", "max abs", "LSE")
    lines: list[Sequence[str]] = [names]
    for case in problems(rows):
        row = ours(case)
        errors = (value(case, variant, "rel_frobenius") for variant in variants)
        last = (row["bound"], row["max_abs"], row["lse_error"])
        lines.append((row["case"], shape_of(row), row["dtype"], *errors, *last))
    return markdown(*lines)


def speed_table(rows: Rows) -> str:
    """Microseconds and TFLOP/s of each variant, for random inputs of equal lengths."""
    names = (
        "B,H,Q,prefix",
        "dtype",
        "flash",
        "TFLOP/s",
        "tiles",
        "16x16 tiles",
        "mma",
        "TFLOP/s",
        "three_phase",
        "PyTorch eager",
        "TFLOP/s",
    )
    lines: list[Sequence[str]] = [names]
    for case in problems(rows):
        row = ours(case)
        if row["case"] != "logit std 2":
            continue
        tiles = value(case, "flash", "tiles")
        small = "flash" if tiles == "16x16" else "flash_small"
        lines.append(
            (
                *(shape_of(row), row["dtype"], microseconds(case, "flash"), value(case, "flash", "tflops"), tiles),
                *(microseconds(case, small), microseconds(case, "mma"), value(case, "mma", "tflops")),
                *(microseconds(case, variant) for variant in ("three_phase", "torch_eager")),
                value(case, "torch_eager", "tflops"),
            )
        )
    return markdown(*lines)


def verify_table(rows: Rows) -> str:
    """Tensor cores on paged caches: microseconds of a call, spaced out and back to back."""
    names = ("B,H,Q,prefix", "mma", "wgmma", "with a plan", "TFLOP/s", "back to back", "MHz", "W", "host")
    lines: list[Sequence[str]] = [names]
    rows = [row for row in rows if row["case"] == "tree verify"]
    for key in in_order(rows, *SHAPE):
        case = {row["variant"]: row for row in rows if tuple(row[name] for name in SHAPE) == key}
        times = (microseconds(case, variant) for variant in ("mma", "wgmma", "wgmma_planned"))
        planned = case.get("wgmma_planned", {})
        last = ("tflops", "sustained_us", "sustained_mhz", "sustained_w", "host_us")
        lines.append((",".join(key), *times, *(number(planned.get(name, "")) for name in last)))
    return markdown(*lines)


def splits_table(rows: Rows) -> str:
    """Microseconds by the way in which the work is shared out."""
    columns = {EVEN: "even parts of all work", "1": "`num_splits=1`", "2048 keys": "`batch_invariant=True`"}
    lines: list[Sequence[str]] = [("B,H,Q,longest prefix", "lengths", *columns.values())]
    keys = [tuple(row[name] for name in ("case", *SHAPE, "dtype")) for row in rows if row.get("splits", "") == "1"]
    for key in keys:
        same = [row for row in rows if tuple(row[name] for name in ("case", *SHAPE, "dtype")) == key]
        times = {row["splits"]: row["microseconds"] for row in same if row["variant"] == "flash"}
        lengths = "100 to 16,000" if "ragged" in key[0] else "equal"
        lines.append((",".join(key[1:5]), lengths, *(number(times.get(name, "")) for name in columns)))
    return markdown(*lines)


def attention_sentence(rows: Rows) -> str:
    """What README says of the speed and error of verify_attention, at 8,64,9,2048 in float32."""
    wanted = {"case": "logit std 2", "B": "8", "prefix": "2048", "dtype": "float32"}
    case = next(c for c in problems(rows) if all(ours(c)[name] == text for name, text in wanted.items()))
    row, theirs = ours(case), case["torch_eager"]
    part = 100 * float(row["rel_frobenius"]) / float(theirs["rel_frobenius"])
    return (
        "`verify_attention` takes "
        f"{number(row['microseconds'])} µs for 8 requests of 64 heads, 9 nodes and 2,048 cached tokens in float32 "
        f"(variant `{row['variant']}`, {float(row['tflops']):.1f} TFLOP/s), PyTorch's eager attention "
        f"{number(theirs['microseconds'])} ({float(theirs['tflops']):.1f}); its error is {part:.0f} % of PyTorch's."
    )


def bfloat16_sentence(rows: Rows) -> str:
    """What README says of bfloat16: on tensor cores, once these are measured, else in the same arithmetic."""
    wanted = {"case": "logit std 2", "B": "8", "prefix": "2048", "dtype": "bfloat16"}
    case = next(c for c in problems(rows) if all(ours(c)[name] == text for name, text in wanted.items()))
    row, theirs = case.get("wgmma") or case.get("mma") or ours(case), case["torch_eager"]
    times = float(theirs["rel_frobenius"]) / float(row["rel_frobenius"])
    how = "on tensor cores" if row["variant"] in ("wgmma", "mma") else "in float32"
    return (
        f"With bfloat16 inputs `{row['variant']}` takes {number(row['microseconds'])} µs {how}, PyTorch's eager "
        f"attention {number(theirs['microseconds'])}, at {times:.0f} times the error."
    )


# attention_error


def error_table(rows: Rows) -> str:
    """Errors of float32 against keys, a few of them, for a usual and an all but flat softmax."""
    rows = [row for row in rows if row.get("dtype") in (None, "float32") and row["logit_std"] in ("2", "0.02")]
    variants = {"flash": "flash", "three_phase": "three_phase", "torch_eager": "PyTorch eager", "naive": "one long sum"}
    lines: list[Sequence[str]] = [("logit std", "keys", "flash", "bound", *list(variants.values())[1:])]
    for logit_std, keys in in_order(rows, "logit_std", "keys"):
        if int(keys) not in (16, 128, 1024, 4097, 32768, 131072):
            continue
        case = {row["variant"]: row for row in rows if (row["logit_std"], row["keys"]) == (logit_std, keys)}
        errors = [value(case, variant, "rel_frobenius") for variant in variants]
        lines.append((logit_std, f"{int(keys):,}", errors[0], value(case, "flash", "bound"), *errors[1:]))
    return markdown(*lines)


def error_sentence(rows: Rows) -> str:
    """How errors grow from 1,024 keys to 131,072, where the softmax is all but flat."""

    def growth(variant: str) -> str:
        first, last = (pick(rows, logit_std="0.02", keys=keys, variant=variant) for keys in (1024, 131072))
        return f"from {first['rel_frobenius']} to {last['rel_frobenius']}"

    return (
        f"Under an all but flat softmax the error goes {growth('flash')} between 1,024 and 131,072 keys in flash, "
        f"{growth('torch_eager')} in PyTorch's eager attention, and {growth('naive')} where each sum is one long sum."
    )


# merge_states


def merge_table(rows: Rows) -> str:
    """Microseconds of each way to merge, and our share of the memory's speed."""
    lines: list[Sequence[str]] = [("T,H,R", "dtype", "layout", "`merge_states`", "GB/s", *list(MERGE.values())[1:])]
    sizes = ("T", "H", "R", "dtype", "layout")
    for size in in_order(rows, *sizes):
        some = {row["variant"]: row for row in rows if tuple(row[name] for name in sizes) == size}
        times = [microseconds(some, variant) for variant in MERGE]
        speed = number(some["merge_states"]["gb_per_s"])
        lines.append((",".join(size[:3]), *size[3:], times[0], speed, *times[1:]))
    return markdown(*lines)


def merge_sentence(rows: Rows) -> str:
    """What README says of merge_states, at [288, 64, 512] in bfloat16."""
    known = {"T": 288, "H": 64, "R": 512, "dtype": "bfloat16", "layout": "C order"}
    times = {variant: pick(rows, **known, variant=variant) for variant in MERGE}
    mine = times["merge_states"]
    return (
        f"`merge_states` merges two states of 288 tokens, 64 heads and 512 columns in bfloat16 in "
        f"{number(mine['microseconds'])} µs ({number(mine['gb_per_s'])} GB/s); a Triton kernel takes "
        f"{number(times['triton']['microseconds'])}, torch.compile {number(times['torch_compile']['microseconds'])}, "
        f"PyTorch's operators {number(times['torch_eager']['microseconds'])}."
    )


# Trees


def tree_rows(path: Path = TREES) -> list[dict[str, str]]:
    """The measurements of top-k and trees; none while there is no such file."""
    return read_rows(path)


def pick(rows: list[dict[str, str]], **wanted: Any) -> dict[str, str]:
    """The one row whose columns say what is wanted."""
    found = [row for row in rows if all(row[name] == str(value) for name, value in wanted.items())]
    assert len(found) == 1, f"{len(found)} rows with {wanted}"
    return found[0]


def number(text: str) -> str:
    """Three digits or more of a number, thousands apart; a dash where nothing was measured."""
    if not text:
        return "–"
    x = float(text)
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}"


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
    rows = [row for row in rows if row["operator"] == "topk_logprobs" and "sweep" not in row["inputs"]]
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


def encodings_table(rows: Rows) -> str:
    """Microseconds of each conversion between encodings, by the size of the batch of trees."""
    sizes = sorted(in_order(rows, "B", "Q"), key=lambda size: (int(size[1]), int(size[0])))
    lines: list[Sequence[str]] = [("", *(f"B,Q = {','.join(size)}" for size in sizes))]
    for operator, variant in in_order(rows, "operator", "variant"):
        some = {(row["B"], row["Q"]): row for row in rows if (row["operator"], row["variant"]) == (operator, variant)}
        way = "" if variant == operator else ", NumPy on the CPU" if variant == "numpy" else f", {variant}"
        times = (number(some[size]["microseconds"]) if size in some else "–" for size in sizes)
        lines.append((f"`{operator}`{way}", *times))
    return markdown(*lines)


# Accepting


def beside(rows: Rows, operator: str, *names: str) -> list[tuple[tuple[str, ...], dict[str, dict[str, str]]]]:
    """The rows of an operator by variant, for each combination of these columns."""
    some = [row for row in rows if row["operator"] == operator and "sweep" not in row["case"]]
    return [
        (size, {row["variant"]: row for row in some if tuple(row[name] for name in names) == size})
        for size in in_order(some, *names)
    ]


def times_of(row: dict[str, str]) -> tuple[str, str, str]:
    """From a cold L2, from one full of lines to write back, and in a graph."""
    return number(row["microseconds"]), number(row["dirty_microseconds"]), number(row["graph_us"])


def argmax_table(rows: Rows) -> str:
    """Microseconds of argmax_tokens and of PyTorch's argmax."""
    lines: list[Sequence[str]] = [
        ("B,Q,V", "dtype", "`argmax_tokens`", "L2 dirty", "in a graph", "GB/s", "torch.argmax")
    ]
    for (*shape, dtype), some in beside(rows, "argmax_tokens", "B", "Q", "V", "dtype"):
        ours = some["argmax_tokens"]
        peer = microseconds(some, "torch_argmax")
        lines.append((",".join(shape), dtype, *times_of(ours), number(ours["gb_per_s"]), peer))
    return markdown(*lines)


def greedy_table(rows: Rows) -> str:
    """Microseconds of accept_greedy, and of the walk in Python."""
    lines: list[Sequence[str]] = [
        ("B,Q", "nodes accepted", "`accept_greedy`", "L2 dirty", "in a graph", "copies to the host, walk in Python")
    ]
    for (*shape, path), some in beside(rows, "accept_greedy", "B", "Q", "path"):
        lines.append((",".join(shape), path, *times_of(some["accept_greedy"]), microseconds(some, "cpu")))
    return markdown(*lines)


def sampled_table(rows: Rows) -> str:
    """Microseconds of accept_sampled, and of drawing a token of every row."""
    head = (
        "B,Q,V",
        "dtype",
        "nodes accepted",
        "`accept_sampled`",
        "L2 dirty",
        "in a graph",
        "torch.multinomial, all rows",
    )
    lines: list[Sequence[str]] = [head]
    for (*shape, dtype), some in beside(rows, "accept_sampled", "B", "Q", "V", "dtype"):
        ours = some["accept_sampled"]
        lines.append((",".join(shape), dtype, ours["path"], *times_of(ours), microseconds(some, "torch_multinomial")))
    return markdown(*lines)


def probs_table(rows: Rows) -> str:
    """Microseconds of target_probs and of PyTorch's operators, by what is kept."""
    lines: list[Sequence[str]] = [
        ("B,Q,V", "dtype", "kept", "`target_probs`", "L2 dirty", "in a graph", "GB/s", "PyTorch")
    ]
    for (*shape, dtype, case), some in beside(rows, "target_probs", "B", "Q", "V", "dtype", "case"):
        ours = some["target_probs"]
        peer = microseconds(some, "torch_eager")
        kept = case if case != "no filter" else "all"
        lines.append((",".join(shape), dtype, kept, *times_of(ours), number(ours["gb_per_s"]), peer))
    return markdown(*lines)


def compact_table(rows: Rows) -> str:
    """Microseconds of the moves of compact_kv, and of PyTorch's indexing."""
    head = (
        "layers,B",
        "nodes accepted",
        "cache",
        "`compact_kv`",
        "L2 dirty",
        "in a graph",
        "GB/s",
        "PyTorch's indexing",
    )
    lines: list[Sequence[str]] = [head]
    for (layers, batch, path, size), some in beside(rows, "compact_kv", "layers", "B", "path", "page_size"):
        ours = some["compact_kv"]
        cache = f"pages of {size}" if size else "contiguous"
        peer = microseconds(some, "torch_index")
        lines.append((f"{layers},{batch}", path, cache, *times_of(ours), number(ours["gb_per_s"]), peer))
    return markdown(*lines)


def copy_sentence(rows: Rows) -> str:
    """The ceiling of the memory in the same run."""
    copy = pick(rows, operator="copy")
    return f"A copy of {copy['case']} within the GPU's memory reaches {number(copy['gb_per_s'])} GB/s in the same run."


def gather_sentence(rows: Rows) -> str:
    """What the docs say of gather_accepted."""
    ours = pick(rows, operator="gather_accepted", variant="gather_accepted")
    theirs = pick(rows, operator="gather_accepted", variant="torch_index")
    return (
        f"`gather_accepted` takes {number(ours['microseconds'])} µs for {ours['path']} {ours['case']} bfloat16 numbers "
        f"of each of {ours['B']} requests, PyTorch's indexing {number(theirs['microseconds'])}."
    )


def step_sentence(rows: Rows) -> str:
    """What the docs say of a whole step."""
    greedy, sampled = (pick(rows, operator="step", case=case) for case in ("greedy", "sampled"))
    return (
        f"All of a step but the target's forward pass takes {number(greedy['microseconds'])} µs as one CUDA graph, and "
        f"{number(sampled['microseconds'])} µs where tokens are sampled: {greedy['B']} requests, {greedy['Q']} nodes, "
        f"V = {int(greedy['V']):,}, {greedy['layers']} layers of a paged cache, with {greedy['path']} and "
        f"{sampled['path']} nodes accepted. Without a graph the host needs {number(greedy['host_us'])} µs, or "
        f"{number(sampled['host_us'])}, to launch it."
    )


def stages_table(rows: Rows) -> str:
    """Microseconds of each stage of a step alone, their sum, and the step as one graph."""
    lines: list[Sequence[str]] = [
        ("stage", *(f"{case}{when}" for case in ("greedy", "sampled") for when in ("", ", in a graph")))
    ]
    found = {(row["case"], row["variant"]): row for row in rows if row["operator"] == "stage"}
    names = ("microseconds", "graph_us")
    for stage, name in STAGES.items():
        cells = [found.get((case, stage), {}).get(time, "") for case in ("greedy", "sampled") for time in names]
        lines.append((name, *map(number, cells)))
    sums = [
        sum(float(row[time]) for (of, _), row in found.items() if of == case)
        for case in ("greedy", "sampled")
        for time in names
    ]
    lines.append(("their sum", *(number(f"{x:.1f}") for x in sums)))
    whole = [pick(rows, operator="step", case=case)[time] for case in ("greedy", "sampled") for time in names]
    lines.append(("the step as one graph", *map(number, whole)))
    return markdown(*lines)


# Decoding


def decode_sentence(rows: Rows) -> str:
    """In how many replies the tokens are those of one token a step, and what is accepted."""
    said = []
    for batch in dict.fromkeys(row["B"] for row in rows):
        same_batch = [row for row in rows if row["B"] == batch]
        equal = sum(row["gap"] == "" for row in same_batch)
        prompts = len({row["prompt"] for row in same_batch})
        together = "alone" if batch == "1" else f"in batches of {batch}"
        said.append(f"in {equal} of {len(same_batch)} replies to {prompts} prompts {together}")
    lengths = {
        mode: sum(float(row["acceptance_length"]) for row in found) / len(found)
        for mode in ("tree", "chain")
        if (found := [row for row in rows if row["mode"] == mode and row["B"] == rows[0]["B"]])
    }
    most = max(int(row["tokens"]) for row in rows)
    accepted = " and ".join(f"{length:.2f} in mode `{mode}`" for mode, length in lengths.items())
    return (
        f"On an {rows[0]['gpu'].removeprefix('NVIDIA ')} the greedy tokens of modes `tree` and `chain` are those of "
        f"one token a step {', '.join(said)}, {most} tokens each at most. `PromptLookup` has {accepted} accepted a "
        "step, on average over prompts."
    )


def law_sentence(rows: Rows) -> str:
    """How probable the sampled beginnings are under the model's law, and under a flatter one."""
    modes = {mode: [row for row in rows if row["mode"] == mode] for mode in ("tree", "chain")}
    (tree,), (chain,) = modes.values()
    if tree["p_value"] == chain["p_value"]:
        found = f"the same p = {tree['p_value']} in modes `tree` and `chain`"
    else:
        found = f"p = {tree['p_value']} in mode `tree` and {chain['p_value']} in mode `chain`"
    flatter = max(float(row["flatter_p_value"]) for row in rows)
    return (
        f"Of {int(tree['samples']):,} sampled replies the beginnings of three tokens, {tree['beginnings']} of them "
        f"possible, follow the model's own law: a chi-square test has {found}, with {tree['acceptance_length']} and "
        f"{chain['acceptance_length']} accepted a step. Against the law of a temperature a fifth higher the same "
        f"samples have p = {flatter:.4f}."
    )


def decode_table(rows: Rows) -> str:
    """Milliseconds a step of each stage of decoding text, and what comes of it."""
    stages = ("draft", "build", "verify", "accept", "step")
    lines: list[Sequence[str]] = [("B", "mode", *stages, "accepted a step", "tokens/s")]
    for row in rows:
        times = (f"{float(row[f'{stage}_ms']):.1f}" for stage in stages)
        accepted = f"{float(row['acceptance_length']):.2f}"
        lines.append((row["B"], f"`{row['mode']}`", *times, accepted, number(row["tokens_per_second"])))
    return markdown(*lines)


# Putting them into the pages


class Quote(NamedTuple):
    """What stands between two marks of a page; sentences follow each other as one paragraph."""

    page: str
    name: str
    path: Path
    says: tuple[Callable[[Rows], str], ...]

    def text(self) -> str:
        """What the page must say, by the committed measurements."""
        rows = read_rows(self.path)
        said = " ".join(say(rows) for say in self.says)
        return said if said.startswith("|") else textwrap.fill(said, 120, break_on_hyphens=False)


QUOTES = (
    Quote("README.md", "attention", H200, (attention_sentence, bfloat16_sentence)),
    Quote("README.md", "merge", MERGES, (merge_sentence,)),
    Quote("docs/verify_attention.md", "speed", H200, (speed_table,)),
    Quote("docs/wgmma.md", "verify", H200, (verify_table,)),
    Quote("docs/flash.md", "splits", H200, (splits_table,)),
    Quote("docs/numerics.md", "errors", H200, (numerics_table,)),
    Quote("docs/numerics.md", "long rows", ERRORS, (error_table,)),
    Quote("docs/numerics.md", "growth", ERRORS, (error_sentence,)),
    Quote("docs/merge_states.md", "merge", MERGES, (merge_table,)),
    Quote("docs/tree_encodings.md", "encodings", ENCODINGS, (encodings_table,)),
    Quote("docs/accept.md", "argmax", ACCEPTS, (argmax_table,)),
    Quote("docs/accept.md", "greedy", ACCEPTS, (greedy_table,)),
    Quote("docs/accept.md", "sampled", ACCEPTS, (sampled_table,)),
    Quote("docs/target_probs.md", "probs", ACCEPTS, (probs_table,)),
    Quote("docs/compact_kv.md", "compact", ACCEPTS, (compact_table,)),
    Quote("docs/compact_kv.md", "copy", ACCEPTS, (copy_sentence, gather_sentence)),
    Quote("docs/step.md", "step", ACCEPTS, (step_sentence,)),
    Quote("docs/step.md", "stages", ACCEPTS, (stages_table,)),
    Quote("docs/decode.md", "decode", DECODED, (decode_sentence,)),
    Quote("docs/decode.md", "law", SAMPLED, (law_sentence,)),
    Quote("docs/decode.md", "stages", DECODING, (decode_table,)),
)


def between_marks(name: str) -> re.Pattern[str]:
    """The marks of a quote, as groups 1 and 3, and what stands between them."""
    name = re.escape(name)
    return re.compile(rf"(<!-- measured: {name} -->\n)(.*?)(<!-- end of {name} -->\n)", re.DOTALL)


def write_quotes(root: Path = ROOT) -> None:
    """Bring the pages up to the measurements that are there."""
    for quote in QUOTES:
        page = root / quote.page
        if quote.path.exists():
            text = page.read_text(encoding="utf-8")
            new, count = between_marks(quote.name).subn(lambda m, q=quote: f"{m[1]}{q.text()}\n{m[3]}", text)
            assert count == 1, f"{quote.page} has {count} places for {quote.name!r}"
            page.write_text(new, encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Print all, or write."""
    parser = argparse.ArgumentParser(description="Tables and sentences from the committed measurements.")
    parser.add_argument("--write", action="store_true", help="put them into README.md and docs/")
    if parser.parse_args(arguments).write:
        write_quotes()
        return
    for quote in QUOTES:
        if quote.path.exists():
            print(f"{quote.page}, {quote.name}\n{quote.text()}\n")
    if TREES.exists():
        for say in (build_sentence, topk_sentence, chain_sentence, build_table, topk_table):
            print(say(tree_rows()))


if __name__ == "__main__":
    main()
