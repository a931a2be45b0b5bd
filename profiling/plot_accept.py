"""Draw the stages of a decoding step from the CSV alone: ``python profiling/plot_accept.py [--csv PATH] [--out DIR]``.

step_stages: for a greedy and for a sampling step a bar of its stages one after the other, each as long as it takes
alone from a cold L2, and a mark where the whole step ends as one CUDA graph; in a light and a dark version, as SVG and
PNG. The SVG's description holds the SHA-256 of the CSV, so that a test can tell that the figure shows the committed
measurements. Nothing is drawn while there are none. Needs matplotlib.
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

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
CASES = ("greedy", "sampled")


@dataclass(frozen=True)
class Theme:
    """Colours that differ between a light and a dark page; the stages' are Okabe and Ito's."""

    name: str
    page: str
    text: str
    stages: tuple[str, ...]  # by place in the step


THEMES = (
    Theme(
        *("light", "#ffffff", "#1f2328"),
        ("#0072B2", "#009E73", "#767676", "#D55E00", "#9C5482", "#A86F00", "#767676"),
    ),
    Theme(
        *("dark", "#0d1117", "#e6edf3"),
        ("#56B4E9", "#2BC49A", "#8b949e", "#E69F00", "#CC79A7", "#F0E442", "#8b949e"),
    ),
)


def stages_of(rows: tables.Rows, case: str) -> list[tuple[str, float]]:
    """Stages and microseconds, in the order of the step."""
    return [
        (row["variant"], float(row["microseconds"]))
        for row in rows
        if (row["operator"], row["case"]) == ("stage", case) and row["microseconds"]
    ]


def draw_step(axes: Axes, rows: tables.Rows, case: str, theme: Theme, longest: float) -> None:
    """The bar of one step, its stages named below, evenly spread."""
    stages = stages_of(rows, case)
    whole = float(tables.pick(rows, operator="step", case=case)["microseconds"])
    begin = 0.0
    for n, ((name, time), colour) in enumerate(zip(stages, theme.stages, strict=True)):
        axes.barh(0, time, left=begin, height=0.8, color=colour, edgecolor=theme.page, lw=0.6).patches[0].set_gid(
            f"{case}-{name}"
        )
        at = longest * (n + 0.5) / len(stages)
        kwargs = {"ha": "center", "va": "top", "color": colour}
        axes.text(at, -0.72, name, fontsize=7.8, fontweight="bold", **kwargs)
        axes.text(at, -1.2, f"{tables.number(str(time))} µs", fontsize=7.8, **kwargs)
        begin += time
    axes.plot([whole, whole], [-0.55, 0.55], color=theme.text, lw=1.6, solid_capstyle="butt")
    axes.text(
        0,
        0.62,
        f"{case}: {tables.number(str(whole))} µs as one CUDA graph (the mark), "
        f"{tables.number(f'{begin:.1f}')} µs in stages, each alone",
        fontsize=9.5,
        color=theme.text,
        va="bottom",
    )
    axes.set_xlim(0, longest)
    axes.set_ylim(-1.75, 1.2)
    axes.axis("off")


def draw(rows: tables.Rows, theme: Theme) -> plt.Figure:
    """The whole figure, 9 inches wide: 900 px at 100 dpi."""
    figure, every = plt.subplots(len(CASES), 1, figsize=(9.0, 3.4), facecolor=theme.page)
    ends = [sum(time for _, time in stages_of(rows, case)) for case in CASES]
    ends += [float(tables.pick(rows, operator="step", case=case)["microseconds"]) for case in CASES]
    for axes, case in zip(every, CASES, strict=True):
        draw_step(axes, rows, case, theme, 1.01 * max(ends))
    row = tables.pick(rows, operator="step", case=CASES[0])
    title = "A decoding step but for the target's forward pass"
    where = f"{row['gpu']}; {row['B']} requests, {row['Q']} nodes, V = {int(row['V']):,}, {row['layers']} layers"
    figure.text(0.012, 0.945, title, fontsize=11, color=theme.text, va="center")
    figure.text(0.988, 0.945, where, fontsize=8, color=theme.text, alpha=0.75, ha="right", va="center")
    figure.subplots_adjust(left=0.012, right=0.988, top=0.87, bottom=0.02, hspace=0.08)
    return figure


def describe(path: Path) -> str:
    """What the SVG says of itself: the measurements it shows."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"Drawn by profiling/plot_accept.py from {path.name}, SHA-256 {digest}"


def main(arguments: list[str] | None = None) -> None:
    """Write the four files."""
    parser = argparse.ArgumentParser(description="Draw the stages of a decoding step.")
    parser.add_argument("--csv", type=Path, default=tables.ACCEPTS, metavar="PATH", help="measurements")
    parser.add_argument("--out", type=Path, default=FIGURES, metavar="DIR", help="folder; default: docs/figures")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = tables.read_rows(options.csv)
    if not rows:
        print(f"{options.csv.name} is not measured yet")
        return
    with matplotlib.rc_context({"svg.hashsalt": "ddtree_numba", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        for theme in THEMES:
            figure = draw(rows, theme)
            name = f"step_stages_{theme.name}"
            figure.savefig(options.out / f"{name}.svg", metadata={"Date": None, "Description": describe(options.csv)})
            figure.savefig(options.out / f"{name}.png", dpi=200, metadata={"Software": None})
            plt.close(figure)


if __name__ == "__main__":
    main()
