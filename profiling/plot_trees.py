"""Draw the times of build_tree from CSV alone: ``python profiling/plot_trees.py [--results DIR] [--out DIR]``.

- build_tree: microseconds for a batch of trees against its size, a panel for each budget, beside the heap on the CPU of
  the same run.
- build_tree_budget: the same against the budget, a panel for each size of the batch.
- build_tree_sweeps, topk_sweeps: microseconds against one size at a time: candidates of a position and positions for
  trees; also vocabulary and batch for topk_logprobs.

Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import style
from matplotlib.axes import Axes
from style import Drawing, Label, Rows, Theme

BUDGETS = ("16", "64", "256", "1024")
BATCHES = ("1", "8", "64", "256")
VARIANTS = ("frontier", "heap", "cpu_heap")
LEFT_OUT = ("refs_trees", "rounds")  # the one is another CPU heap, the other is not swept


SIZES = ("B", "L", "V", "K", "budget")
# What each sweep changes, and its name.
BUILD_SWEEPS = {"K": "candidates of a position", "L": "positions"}
TOPK_SWEEPS = {"V": "tokens of the vocabulary", "K": "candidates", "L": "positions", "B": "requests"}


def usual(rows: Rows, *sweeps: str) -> Rows:
    """Trees of float32 logits with as many candidates as nodes, and of these sweeps."""
    inputs = ("float32 logits", *(f"float32 logits, {sweep}" for sweep in sweeps))
    rows = [row for row in rows if row["operator"] == "build_tree" and row["inputs"] in inputs]
    return [row for row in rows if row["microseconds"]]


def curve(rows: Rows, x: str, **known: str) -> tuple[list[int], list[float]]:
    """Sizes and microseconds of the rows that have these values, rising."""
    points = sorted(
        (int(row[x]), float(row["microseconds"]))
        for row in rows
        if all(row[name] == value for name, value in known.items())
    )
    return [size for size, _ in points], [time for _, time in points]


def draw_curves(axes: Axes, theme: Theme, rows: Rows, x: str, variants: Sequence[str], gid: str) -> list[Label]:
    """The curves of one panel."""
    names = []
    for variant in variants:
        points = curve(rows, x, variant=variant)
        if points[0]:
            colour, shown = style.colour(theme, variant), style.look(variant)
            line = axes.plot(*points, color=colour, marker=shown.marker, ms=4.5, lw=1.8, zorder=3)[0]
            line.set_gid(f"{variant}-{gid}")
            names.append(Label(shown.name, colour, *points))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(x=0.08, y=0.12)
    sizes = sorted({int(row[x]) for row in rows})
    style.fixed_ticks(axes.xaxis, style.spread_out(sizes, 4))
    return names


def times_axis(axes: Axes) -> None:
    """Round times."""
    style.log_ticks(axes.yaxis, style.duration)


def draw_panels(theme: Theme, rows: Rows, x: str, panel: str, values: Sequence[str], head: str) -> plt.Figure | None:
    """Times against one column, a panel for each value of the other."""
    panels = {value: [row for row in rows if row[panel] == value] for value in values}
    panels = {value: some for value, some in panels.items() if len({row[x] for row in some}) > 1}
    if not panels:
        return None
    figure, every = style.panels(theme, 1, len(panels), 3.5, sharey=True)
    labels = []
    for axes, (value, some) in zip(every[0], panels.items(), strict=True):
        labels.append((axes, draw_curves(axes, theme, some, x, VARIANTS, value)))
        name = f"tree_budget = {value}" if panel == "budget" else f"{value} request{'s' * (value != '1')}"
        style.title(axes, theme, name)
    times_axis(every[0][0])
    row = next(row for row in rows if row["gpu"])
    style.headline(figure, theme, head, f"{row['gpu']}, {row['cpu']}")
    style.below(figure, theme, "requests in the batch" if x == "B" else "tree_budget")
    style.margins(figure, left=0.68, top=0.68, bottom=0.52, across=0.2)
    for axes, names in labels:
        style.label_curves(axes, names)
    return figure


def draw_batches(theme: Theme, rows: Rows) -> plt.Figure | None:
    """Against the size of the batch."""
    head = "Time to build the draft trees of a batch"
    return draw_panels(theme, usual(rows), "B", "budget", BUDGETS, head)


def draw_budgets(theme: Theme, rows: Rows) -> plt.Figure | None:
    """Against the budget."""
    head = "Time to build draft trees against their size"
    return draw_panels(theme, usual(rows, "budget sweep"), "budget", "B", BATCHES, head)


def draw_sweeps(theme: Theme, rows: Rows, sweeps: dict[str, str], dtype: str, head: str) -> plt.Figure | None:
    """A panel for each sweep: its rows, and that of the usual sizes, which belongs to all of them."""
    panels = {}
    for x in sweeps:
        swept = [row for row in rows if row["inputs"] == f"{dtype}, {x} sweep" and row["microseconds"]]
        others = [name for name in SIZES if name != x]
        same = {tuple(row[name] for name in others) for row in swept}
        base = [row for row in rows if row["inputs"] == dtype and row["microseconds"]]
        panels[x] = swept + [row for row in base if tuple(row[name] for name in others) in same]
    panels = {x: some for x, some in panels.items() if len({row[x] for row in some}) > 1}
    if not panels:
        return None
    figure, every = style.panels(theme, 1, len(panels), 3.3, sharey=True)
    labels = []
    for axes, (x, some) in zip(every[0], panels.items(), strict=True):
        variants = [v for v in style.LOOKS if any(row["variant"] == v for row in some) and v not in LEFT_OUT]
        labels.append((axes, draw_curves(axes, theme, some, x, variants, x)))
        style.title(axes, theme, sweeps[x])
        fixed = (f"{name} = {int(some[0][name]):,}" for name in SIZES if name != x and some[0][name])
        axes.set_xlabel(", ".join(fixed), fontsize=7.5, color=theme.text, labelpad=8)
    times_axis(every[0][0])
    style.headline(figure, theme, head, style.gpu_of(rows))
    style.margins(figure, left=0.68, top=0.68, bottom=0.6, across=0.2)
    for axes, names in labels:
        style.label_curves(axes, names)
    return figure


def draw_build_sweeps(theme: Theme, rows: Rows) -> plt.Figure | None:
    """Trees against one size at a time."""
    rows = [row for row in rows if row["operator"] == "build_tree"]
    return draw_sweeps(theme, rows, BUILD_SWEEPS, "float32 logits", "Time to build draft trees against one size")


def draw_topk_sweeps(theme: Theme, rows: Rows) -> plt.Figure | None:
    """topk_logprobs against one size at a time."""
    rows = [row for row in rows if row["operator"] == "topk_logprobs"]
    return draw_sweeps(theme, rows, TOPK_SWEEPS, "bfloat16", "Time of topk_logprobs, bfloat16")


DRAWINGS = (
    Drawing(
        *("build_tree", ("trees",), draw_batches),
        "Time to build the draft trees of a batch against its size, for each budget, on the GPU and on the CPU.",
    ),
    Drawing(
        *("build_tree_budget", ("trees",), draw_budgets),
        "Time to build draft trees against their budget, for each size of the batch, on the GPU and on the CPU.",
    ),
    Drawing(
        *("build_tree_sweeps", ("trees",), draw_build_sweeps),
        "Time to build draft trees against the number of candidates of a position, and of positions.",
    ),
    Drawing(
        *("topk_sweeps", ("trees",), draw_topk_sweeps),
        "Time of topk_logprobs against one size at a time, beside PyTorch's topk, which computes no logarithms of "
        "probabilities, and PyTorch's topk with logsumexp.",
    ),
)


if __name__ == "__main__":
    style.main("Draw the times of build_tree.", DRAWINGS)
