"""Draw errors and speed of attention from the CSV alone: ``python profiling/plot_attention.py [--out DIR]``.

- attention_error: relative error of out against the number of keys, with the derived bounds, for logits of two spreads.
- attention_speed: TFLOP/s at the measured shapes, beside PyTorch's eager attention of the same run.

Each in a light and a dark version, as SVG and PNG. An SVG's description holds the SHA-256 of its CSV, so that a test
can tell that the figure shows the committed measurements. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import tables
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"

Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Theme:
    """Colours that differ between a light and a dark page; the curves' are Okabe and Ito's."""

    name: str
    page: str
    text: str
    faint: str
    curves: dict[str, str]  # by variant


THEMES = (
    Theme(
        "light",
        "#ffffff",
        "#1f2328",
        "#d8dee4",
        {"flash": "#0072B2", "three_phase": "#009E73", "torch_eager": "#D55E00", "naive": "#6e7781"},
    ),
    Theme(
        "dark",
        "#0d1117",
        "#e6edf3",
        "#30363d",
        {"flash": "#56B4E9", "three_phase": "#2BC49A", "torch_eager": "#E69F00", "naive": "#9198a1"},
    ),
)
MARKERS = {"flash": "o", "three_phase": "s", "torch_eager": "^", "naive": "D"}  # shapes too, for who sees no colours
NAMES = {"flash": "flash", "three_phase": "three_phase", "torch_eager": "PyTorch eager", "naive": "one long sum"}
SPREADS = {"2": "logits of standard deviation 2", "0.02": "of 0.02: an all but flat softmax"}


def curve(rows: Rows, variant: str, logit_std: str, column: str) -> tuple[list[int], list[float]]:
    """Keys and values of one curve, rising."""
    points = sorted(
        (int(row["keys"]), float(row[column]))
        for row in rows
        if (row["variant"], row["logit_std"]) == (variant, logit_std) and row[column]
    )
    return [keys for keys, _ in points], [value for _, value in points]


def style(axes: Axes, theme: Theme) -> None:
    """What all panels share."""
    axes.set_facecolor(theme.page)
    axes.grid(color=theme.faint, lw=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.text, labelsize=7.5, length=0, pad=5)
    for spine in axes.spines.values():
        spine.set_visible(False)


def power_of_ten(value: float, _: object = None) -> str:
    """10 to the n, as people write it."""
    mantissa, exponent = f"{value:.0e}".split("e")
    power = f"10$^{{{int(exponent)}}}$"
    return power if mantissa == "1" else f"{mantissa} · {power}"


def title(figure: plt.Figure, text: str, row: dict[str, str], theme: Theme) -> None:
    """Headline, and the GPU on the other side."""
    figure.text(0.012, 0.955, text, fontsize=11, color=theme.text, va="center")
    figure.text(0.988, 0.955, row["gpu"], fontsize=8, color=theme.text, alpha=0.75, ha="right", va="center")


def legend(figure: plt.Figure, variants: list[str], theme: Theme, more: list[Line2D]) -> None:
    """Names of the curves, above the panels."""
    handles = [
        Line2D([], [], color=theme.curves[v], marker=MARKERS[v], ms=5, lw=1.8, label=NAMES[v]) for v in variants
    ] + more
    figure.legend(
        handles=handles,
        loc="center",
        bbox_to_anchor=(0.5, 0.885),
        ncols=len(handles),
        fontsize=8.5,
        frameon=False,
        labelcolor=theme.text,
        handlelength=1.8,
        columnspacing=1.8,
    )


def draw_error(rows: Rows, theme: Theme) -> plt.Figure:
    """Errors against keys: a panel for each spread of the logits."""
    figure, every = plt.subplots(1, 2, figsize=(9.0, 4.0), sharey=True, squeeze=False, facecolor=theme.page)
    for axes, (logit_std, name) in zip(every[0], SPREADS.items(), strict=True):
        for variant, colour in theme.curves.items():
            keys, errors = curve(rows, variant, logit_std, "rel_frobenius")
            line = axes.plot(keys, errors, color=colour, marker=MARKERS[variant], ms=3.5, lw=1.6, zorder=3)[0]
            line.set_gid(f"{variant}-{logit_std}")
            keys, bounds = curve(rows, variant, logit_std, "bound")
            if keys:
                line = axes.plot(keys, bounds, color=colour, ls=(0, (4, 3)), lw=1.1, alpha=0.8, zorder=2)[0]
                line.set_gid(f"bound-{variant}-{logit_std}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator([16, 128, 1024, 8192, 65536]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda keys, _: f"{keys:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(power_of_ten))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_title(name, fontsize=9.5, color=theme.text, pad=7)
        style(axes, theme)
    title(figure, "Relative error of float32 attention", next(row for row in rows if row["gpu"]), theme)
    bound = Line2D([], [], color=theme.text, ls=(0, (4, 3)), lw=1.1, label="derived bound")
    present = [variant for variant in theme.curves if any(row["variant"] == variant for row in rows)]
    legend(figure, present, theme, [bound])
    figure.text(0.53, 0.03, "keys", fontsize=8.5, color=theme.text, ha="center", va="center")
    figure.subplots_adjust(left=0.085, right=0.988, top=0.775, bottom=0.125, wspace=0.06)
    return figure


def speeds(rows: Rows, dtype: str) -> dict[str, dict[str, float]]:
    """TFLOP/s by shape and variant: random inputs, equal lengths, work shared out evenly."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        usual = row["case"] == "logit std 2" and row.get("splits", "") in ("", "even")
        if usual and row["dtype"] == dtype and row["variant"] in NAMES and row["microseconds"]:
            shape = ",".join(row[name] for name in ("B", "H", "Q", "prefix"))
            found.setdefault(shape, {})[row["variant"]] = float(row["tflops"])
    return found


def draw_speed(rows: Rows, theme: Theme) -> plt.Figure:
    """TFLOP/s: a panel for each dtype, a line for each shape."""
    panels = {dtype: speeds(rows, dtype) for dtype in ("float32", "bfloat16")}
    # The shapes that both dtypes have stand first, so that lines of the same height are of the same shape.
    shapes = sorted(
        dict.fromkeys(shape for found in panels.values() for shape in found),
        key=lambda shape: -sum(shape in found for found in panels.values()),
    )
    figure, every = plt.subplots(
        1, 2, figsize=(9.0, 1.5 + 0.3 * len(shapes)), sharey=True, squeeze=False, facecolor=theme.page
    )
    for axes, (dtype, found) in zip(every[0], panels.items(), strict=True):
        for height, shape in enumerate(shapes):
            values = found.get(shape, {})
            if values:
                axes.plot(
                    [min(values.values()), max(values.values())], [height] * 2, color=theme.faint, lw=2.5, zorder=1
                )
            for variant, value in values.items():
                dot = axes.plot(value, height, color=theme.curves[variant], marker=MARKERS[variant], ms=6.5, zorder=3)[
                    0
                ]
                dot.set_gid(f"{variant}-{dtype}-{shape}")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(FixedLocator(range(len(shapes))))
        axes.set_yticklabels(shapes)
        axes.set_ylim(len(shapes) - 0.5, -0.5)
        axes.set_title(dtype, fontsize=9.5, color=theme.text, pad=7)
        style(axes, theme)
    title(figure, "Speed of tree-verify attention", next(row for row in rows if row["gpu"]), theme)
    variants = [v for v in theme.curves if any(v in of for found in panels.values() for of in found.values())]
    legend(figure, variants, theme, [])
    inches = figure.get_figheight()
    below = "TFLOP/s (by B,H,Q,prefix)"
    figure.text(0.56, 0.12 / inches, below, fontsize=8.5, color=theme.text, ha="center", va="center")
    figure.subplots_adjust(left=0.13, right=0.988, top=1 - 0.9 / inches, bottom=0.5 / inches, wspace=0.06)
    return figure


def describe(path: Path) -> str:
    """What the SVG says of itself: the measurements it shows."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return f"Drawn by profiling/plot_attention.py from {path.name}, SHA-256 {digest}"


def main(arguments: list[str] | None = None) -> None:
    """Write the files of the figures whose measurements are there."""
    parser = argparse.ArgumentParser(description="Draw errors and speed of attention.")
    parser.add_argument("--errors", type=Path, default=tables.ERRORS, metavar="PATH", help="attention_error.csv")
    parser.add_argument("--speeds", type=Path, default=tables.H200, metavar="PATH", help="verify_attention.csv")
    parser.add_argument("--out", type=Path, default=FIGURES, metavar="DIR", help="folder; default: docs/figures")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    figures: tuple[tuple[str, Path, Callable[[Rows, Theme], plt.Figure]], ...] = (
        ("attention_error", options.errors, draw_error),
        ("attention_speed", options.speeds, draw_speed),
    )
    with matplotlib.rc_context({"svg.hashsalt": "ddtree_numba", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        for name, path, draw in figures:
            for theme in THEMES if path.exists() else ():
                figure = draw(tables.read_rows(path), theme)
                file = options.out / f"{name}_{theme.name}"
                figure.savefig(f"{file}.svg", metadata={"Date": None, "Description": describe(path)})
                figure.savefig(f"{file}.png", dpi=200, metadata={"Software": None})
                plt.close(figure)


if __name__ == "__main__":
    main()
