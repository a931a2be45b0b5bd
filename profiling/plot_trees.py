"""Draw the times of build_tree from the CSV alone: ``python profiling/plot_trees.py [--csv PATH] [--out DIR]``.

build_tree: microseconds for a batch of trees against its size, a panel for each budget, beside the heap on the CPU of
the same run; in a light and a dark version, as SVG and PNG. The SVG's description holds the SHA-256 of the CSV, so that
a test can tell that the figure shows the committed measurements. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import tables
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
BUDGETS = ("16", "64", "256", "1024")


@dataclass(frozen=True)
class Theme:
    """Colours that differ between a light and a dark page; the curves' are Okabe and Ito's."""

    name: str
    page: str
    text: str
    faint: str
    curves: dict[str, str]  # by variant


THEMES = (
    Theme("light", "#ffffff", "#1f2328", "#d8dee4", {"frontier": "#0072B2", "heap": "#009E73", "cpu_heap": "#D55E00"}),
    Theme("dark", "#0d1117", "#e6edf3", "#30363d", {"frontier": "#56B4E9", "heap": "#2BC49A", "cpu_heap": "#E69F00"}),
)
MARKERS = {"frontier": "o", "heap": "s", "cpu_heap": "^"}  # shapes too, for who sees no colours

# Name of each curve, the point it stands at, offset from there in points, alignment: where no other curve can pass.
LABELS = {
    "frontier": ("GPU frontier", 0, (-3, -7), "left", "top"),
    "heap": ("GPU heap", 1, (0, 8), "center", "bottom"),
    "cpu_heap": ("CPU heap", -2, (-7, 3), "right", "bottom"),
}


def curve(rows: list[dict[str, str]], variant: str, budget: str) -> tuple[list[int], list[float]]:
    """Batches and microseconds of one curve, rising."""
    points = sorted(
        (int(row["B"]), float(row["microseconds"]))
        for row in rows
        if (row["variant"], row["budget"]) == (variant, budget) and row["microseconds"]
    )
    return [batch for batch, _ in points], [microseconds for _, microseconds in points]


def duration(microseconds: float, _: object = None) -> str:
    """A round time in the unit that people would use."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= size:
            return f"{microseconds / size:g} {unit}"
    return f"{microseconds:g} µs"


def draw_panel(axes: Axes, rows: list[dict[str, str]], budget: str, theme: Theme) -> None:
    """The curves of one budget."""
    for variant, colour in theme.curves.items():
        batches, times = curve(rows, variant, budget)
        if not batches:
            continue
        line = axes.plot(batches, times, color=colour, marker=MARKERS[variant], ms=4.5, lw=1.8, zorder=3)[0]
        line.set_gid(f"{variant}-{budget}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"tree_budget = {budget}", fontsize=9.5, color=theme.text, pad=7)


def draw_labels(axes: Axes, rows: list[dict[str, str]], budget: str, theme: Theme) -> None:
    """Names on the curves of a panel."""
    for variant, (name, at, offset, horizontal, vertical) in LABELS.items():
        points = list(zip(*curve(rows, variant, budget), strict=True))
        if points:
            axes.annotate(
                name,
                points[max(at, -len(points))],
                xytext=offset,
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                fontsize=8.5,
                fontweight="bold",
                color=theme.curves[variant],
            )


def draw(rows: list[dict[str, str]], theme: Theme) -> plt.Figure:
    """The whole figure, 9 inches wide: 900 px at 100 dpi."""
    rows = [row for row in rows if row["operator"] == "build_tree" and row["inputs"] == "float32 logits"]
    budgets = [budget for budget in BUDGETS if any(row["budget"] == budget for row in rows)]
    batches = sorted({int(row["B"]) for row in rows})
    figure, every = plt.subplots(1, len(budgets), figsize=(9.0, 3.5), sharey=True, squeeze=False, facecolor=theme.page)
    for axes, budget in zip(every[0], budgets, strict=True):
        draw_panel(axes, rows, budget, theme)
        axes.set_facecolor(theme.page)
        axes.xaxis.set_major_locator(FixedLocator(batches))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda batch, _: f"{batch:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(duration))
        axes.grid(color=theme.faint, lw=0.7)
        axes.tick_params(colors=theme.text, labelsize=7.5, length=0, pad=5)
        for spine in axes.spines.values():
            spine.set_visible(False)
    draw_labels(every[0][0], rows, budgets[0], theme)
    low, high = every[0][0].get_ylim()
    every[0][0].set_ylim(low / 2, high)  # room for the lowest curve's name
    row = next(row for row in rows if row["gpu"])
    figure.text(0.012, 0.955, "Time to build the draft trees of a batch", fontsize=11, color=theme.text, va="center")
    figure.text(0.53, 0.035, "requests in the batch", fontsize=8.5, color=theme.text, ha="center", va="center")
    where = f"{row['gpu']}, {row['cpu']}"
    figure.text(0.988, 0.955, where, fontsize=8, color=theme.text, alpha=0.75, ha="right", va="center")
    figure.subplots_adjust(left=0.075, right=0.988, top=0.81, bottom=0.155, wspace=0.1)
    return figure


def describe(path: Path) -> str:
    """What the SVG says of itself: the measurements it shows."""
    return f"Drawn by profiling/plot_trees.py from {path.name}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def main(arguments: list[str] | None = None) -> None:
    """Write the four files."""
    parser = argparse.ArgumentParser(description="Draw the times of build_tree.")
    parser.add_argument("--csv", type=Path, default=tables.TREES, metavar="PATH", help="measurements")
    parser.add_argument("--out", type=Path, default=FIGURES, metavar="DIR", help="folder; default: docs/figures")
    options = parser.parse_args(arguments)
    rows = tables.read_rows(options.csv)
    options.out.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "ddtree_numba", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        for theme in THEMES:
            figure = draw(rows, theme)
            name = f"build_tree_{theme.name}"
            figure.savefig(options.out / f"{name}.svg", metadata={"Date": None, "Description": describe(options.csv)})
            figure.savefig(options.out / f"{name}.png", dpi=200, metadata={"Software": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
