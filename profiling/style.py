"""What the figures share: two themes, names and marks of the curves, labels that find their place, and the saving.

A script plot_*.py holds `DRAWINGS`, and `main` here draws them: ``python profiling/plot_NAME.py [--results DIR]
[--out DIR]``. Each figure is drawn from CSV alone, in a light and a dark version, as SVG and PNG; the description in
each file holds the SHA-256 of every CSV that it shows, so that a test can tell whether these are the committed ones.
What is not measured is not drawn. The two versions differ in nothing but colours. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import tables
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
WIDTH = 9.0  # inches: 900 px at 100 dpi
PNG_DPI = 200

Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Theme:
    """Colours of a page. Those of curves are Okabe and Ito's, darker or lighter where the page asks for it."""

    name: str
    page: str
    text: str
    faint: str  # grids
    blue: str
    green: str
    vermilion: str
    brown: str
    purple: str
    sky: str
    indigo: str
    crimson: str
    olive: str
    grey: str


LIGHT = Theme(
    *("light", "#ffffff", "#1f2328", "#d8dee4"),
    *("#0072b2", "#009e73", "#d55e00", "#a86f00", "#9c5482", "#2b8cbe", "#5e3c99", "#b2182b", "#5c7a00", "#6e7781"),
)
DARK = Theme(
    *("dark", "#0d1117", "#e6edf3", "#30363d"),
    *("#56b4e9", "#2bc49a", "#e69f00", "#f0e442", "#cc79a7", "#76e4f7", "#a78bfa", "#ff7b8a", "#b5d33d", "#9198a1"),
)
THEMES = (LIGHT, DARK)


class Look(NamedTuple):
    """Name of a variant for people, a colour of the theme, a shape for who sees no colours, and whether it is ours."""

    name: str
    colour: str
    marker: str
    ours: bool = False


LOOKS = {
    "flash": Look("flash", "blue", "o", True),
    "flash_small": Look("flash, small tiles", "sky", "o", True),
    "mma": Look("mma", "olive", "p", True),
    "wgmma": Look("wgmma", "indigo", "*", True),
    "wgmma_planned": Look("wgmma, planned", "indigo", "*", True),
    "three_phase": Look("three_phase", "green", "s", True),
    "frontier": Look("GPU frontier", "blue", "o", True),
    "heap": Look("GPU heap", "green", "s", True),
    "threshold": Look("threshold", "blue", "o", True),
    "rounds": Look("rounds", "green", "s", True),
    "breadth_first": Look("breadth first", "blue", "o", True),
    "depth_first": Look("depth first", "blue", "o", True),
    "torch_eager": Look("PyTorch eager", "vermilion", "^"),
    "torch_compile": Look("torch.compile", "brown", "v"),
    "torch_compiled": Look("torch.compile", "brown", "v"),
    "torch_sdpa": Look("PyTorch SDPA", "purple", "P"),
    "torch_flex": Look("flex_attention", "sky", "X"),
    "triton": Look("Triton", "text", "D"),
    "flashinfer": Look("FlashInfer, causal", "indigo", "<"),
    "flashmla": Look("FlashMLA, causal", "crimson", ">"),
    "naive": Look("one long sum", "grey", "d"),
    "numpy": Look("NumPy on the CPU", "grey", "d"),
    "cpu_heap": Look("CPU heap", "vermilion", "^"),
    "refs_trees": Look("reference's heap on the CPU", "grey", "d"),
    "torch_eager + cpu_heap": Look("PyTorch, then the CPU heap", "vermilion", "^"),
    "torch_topk": Look("torch.topk", "brown", "v"),
    "torch_argmax": Look("torch.argmax", "vermilion", "^"),
    "torch_multinomial": Look("torch.multinomial", "vermilion", "^"),
    "torch_index": Look("PyTorch's indexing", "vermilion", "^"),
    "torch_copy": Look("PyTorch's copy", "vermilion", "^"),
    "cpu": Look("Python on the CPU", "grey", "d"),
}


def look(variant: str) -> Look:
    """How a variant is shown; one that is not known here goes by its own name."""
    return LOOKS.get(variant, Look(variant, "blue", "*"))


def colour(theme: Theme, variant: str) -> str:
    """The colour of a variant's curve."""
    return getattr(theme, look(variant).colour)


# Figures and their files


class Drawing(NamedTuple):
    """A figure: its name, the results it is drawn from, what draws it, and what it shows, in words.

    `draw` is given a theme and the rows of each file, none for a file that is not there. It returns None where the rows
    do not hold what it shows.
    """

    name: str
    files: tuple[str, ...]
    draw: Callable[..., plt.Figure | None]
    says: str


def find(results: Path, name: str) -> Path:
    """NAME.csv of a folder of results, or, where that is not there, what the short sweep left."""
    path = results / f"{name}.csv"
    return path if path.exists() else results / f"{name}_quick.csv"


def usable(rows: Rows) -> Rows:
    """The rows that passed their check and have numbers."""
    return [row for row in rows if row.get("right", "True") == "True"]


def describe(drawing: Drawing, paths: Iterable[Path]) -> str:
    """What a file says of itself: the measurements it shows."""
    sources = (f"{path.name}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths)
    return f"Drawn by profiling/{Path(inspect.getfile(drawing.draw)).name} from {'; '.join(sources)}"


@contextmanager
def drawn(drawing: Drawing, results: Path, theme: Theme) -> Iterator[tuple[plt.Figure, str] | None]:
    """The figure and its description; None where there is nothing to draw."""
    paths = [find(results, name) for name in drawing.files]
    rows = [usable(tables.read_rows(path)) for path in paths]
    fixed = {"svg.hashsalt": "ddtree_numba", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(fixed):
        figure = drawing.draw(theme, *rows) if any(rows) else None
        yield None if figure is None else (figure, describe(drawing, (p for p in paths if p.exists())))
        if figure is not None:
            plt.close(figure)


def write_svg(figure: plt.Figure, file: Any, description: str) -> None:
    """The same bytes each time."""
    figure.savefig(file, format="svg", metadata={"Date": None, "Description": description})


def draw_files(drawings: Sequence[Drawing], results: Path, out: Path) -> list[str]:
    """Write the four files of each figure that can be drawn; returns the names of these figures."""
    out.mkdir(parents=True, exist_ok=True)
    names = []
    for drawing in drawings:
        for theme in THEMES:
            with drawn(drawing, results, theme) as found:
                if found is None:
                    break
                figure, description = found
                file = out / f"{drawing.name}_{theme.name}"
                write_svg(figure, f"{file}.svg", description)
                figure.savefig(f"{file}.png", dpi=PNG_DPI, metadata={"Software": None, "Description": description})
        else:
            names.append(drawing.name)
    return names


def svg_of(drawing: Drawing, results: Path) -> str | None:
    """The light version as text; None where there is nothing to draw."""
    with drawn(drawing, results, LIGHT) as found:
        if found is None:
            return None
        text = io.StringIO()
        write_svg(found[0], text, found[1])
        return text.getvalue()


def pairs_of_colours() -> dict[str, str]:
    """The dark colour for each light one."""
    names = [field.name for field in fields(Theme) if field.name != "name"]
    return {getattr(LIGHT, name): getattr(DARK, name) for name in names}


def main(description: str, drawings: Sequence[Drawing], arguments: list[str] | None = None) -> None:
    """The command line of every plot_*.py."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--results",
        type=Path,
        default=tables.H200.parent,
        metavar="DIR",
        help="folder of CSV files; default: the committed ones",
    )
    parser.add_argument("--out", type=Path, default=FIGURES, metavar="DIR", help="folder; default: docs/figures")
    options = parser.parse_args(arguments)
    names = draw_files(drawings, options.results, options.out)
    for drawing in drawings:
        if drawing.name in names:
            print(f"{options.out / drawing.name}_{{light,dark}}.{{svg,png}}")
        else:
            print(f"{drawing.name}: not in {' or '.join(drawing.files)} of {options.results}")


# Parts of a figure


def panels(theme: Theme, rows: int, columns: int, height: float, **kwargs: Any) -> tuple[plt.Figure, np.ndarray]:
    """A figure and its axes [rows, columns]."""
    figure, every = plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, facecolor=theme.page, **kwargs)
    for axes in every.flat:
        axes.set_facecolor(theme.page)
        axes.grid(color=theme.faint, lw=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=theme.text, labelsize=7.5, length=0, pad=5)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return figure, every


def margins(
    figure: plt.Figure,
    left: float,
    top: float,
    bottom: float,
    across: float = 0.3,
    down: float = 0.5,
    right: float = 0.11,
) -> None:
    """Room around and between the panels, in inches."""
    width, height = figure.get_size_inches()
    grid = figure.axes[0].get_gridspec()
    wide = (width - left - right - across * (grid.ncols - 1)) / grid.ncols
    high = (height - top - bottom - down * (grid.nrows - 1)) / grid.nrows
    figure.subplots_adjust(
        *(left / width, bottom / height, 1 - right / width, 1 - top / height),
        wspace=across / wide,
        hspace=down / high,
    )


def headline(figure: plt.Figure, theme: Theme, text: str, where: str) -> None:
    """What the figure shows, and on the other side on what machine."""
    y = 1 - 0.19 / figure.get_figheight()
    figure.text(0.012, y, text, fontsize=11, color=theme.text, va="center")
    figure.text(0.988, y, where, fontsize=8, color=theme.text, alpha=0.75, ha="right", va="center")


def below(figure: plt.Figure, theme: Theme, text: str, x: float = 0.53) -> None:
    """What the horizontal axes show."""
    y = 0.13 / figure.get_figheight()
    figure.text(x, y, text, fontsize=8.5, color=theme.text, ha="center", va="center")


def title(axes: Axes, theme: Theme, text: str) -> None:
    """The head of a panel."""
    axes.set_title(text, fontsize=9.5, color=theme.text, pad=7, y=1.0)


def beside(axes: Axes, theme: Theme, text: str) -> None:
    """What the vertical axis shows."""
    axes.set_ylabel(text, fontsize=8.5, color=theme.text)


def gpu_of(*tables_of_rows: Rows) -> str:
    """The GPU of these rows."""
    return next((row["gpu"] for rows in tables_of_rows for row in rows if row.get("gpu")), "")


def plain(value: float, _: object = None) -> str:
    """A number as people write it."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def power_of_ten(value: float, _: object = None) -> str:
    """10 to the n, as people write it."""
    mantissa, exponent = f"{value:.0e}".split("e")
    power = f"10$^{{{int(exponent)}}}$"
    return power if mantissa == "1" else f"{mantissa} · {power}"


def duration(microseconds: float, _: object = None) -> str:
    """A round time in the unit that people would use."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if microseconds >= size:
            return f"{microseconds / size:g} {unit}"
    return f"{microseconds:g} µs"


def log_ticks(axis: Any, how: Callable[..., str] = plain, subs: Sequence[float] = (1, 2, 5)) -> None:
    """Few round numbers on a logarithmic axis; every power of ten alone where it spans more than three."""
    low, high = sorted(axis.get_view_interval())
    wide = high / low > 1000
    axis.set_major_locator(LogLocator(10, subs=(1,) if wide else subs))
    axis.set_major_formatter(FuncFormatter(how))
    axis.set_minor_locator(NullLocator())


def fixed_ticks(axis: Any, values: Sequence[float], how: Callable[..., str] = plain) -> None:
    """Exactly these."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(how))
    axis.set_minor_locator(NullLocator())


def spread_out(values: Sequence[float], most: int) -> list[float]:
    """At most about so many of rising values, evenly spread; powers of two where nearly all are."""
    powers = [value for value in values if float(np.log2(value)).is_integer()]
    values = powers if len(powers) > 0.7 * len(values) else list(values)
    apart = (values[-1] / values[0]) ** (0.9 / most)
    kept = [values[-1]]  # the largest is always among them
    for value in reversed(values[:-1]):
        if kept[-1] >= value * apart:
            kept.append(value)
    return kept[::-1]


# Labels that find their place


class Label(NamedTuple):
    """A name for the curve through these points."""

    text: str
    colour: str
    xs: Sequence[float]
    ys: Sequence[float]
    small: bool = False


# From a point of the curve: direction in units of the gap, and how the text is aligned there.
PLACES = (
    (1, 0, "left", "center"),
    (0, 1, "center", "bottom"),
    (0, -1, "center", "top"),
    (0.7, 0.7, "left", "bottom"),
    (0.7, -0.7, "left", "top"),
    (-0.7, 0.7, "right", "bottom"),
    (-0.7, -0.7, "right", "top"),
)
SHIFT = {"left": 0.0, "center": -0.5, "right": -1.0, "bottom": 0.0, "top": -1.0}
GAP = 6.0  # pixels at 100 dpi between a curve and its name


def along(points: np.ndarray, step: float = 4.0) -> np.ndarray:
    """Points [N, 2] in pixels, as close to each other as `step`, on the lines between those given."""
    parts = [points[:1]]
    for a, b in zip(points, points[1:], strict=False):
        count = max(1, int(np.hypot(*(b - a)) / step))
        parts.append(a + (b - a) * (np.arange(1, count + 1) / count)[:, None])
    return np.concatenate(parts)


def pixels(axes: Axes, xs: Sequence[float], ys: Sequence[float]) -> np.ndarray:
    """Points [N, 2] of a panel in pixels."""
    return axes.transData.transform(np.column_stack([np.asarray(xs, float), np.asarray(ys, float)]))


def inside(points: np.ndarray, boxes: np.ndarray, across: float, down: float) -> np.ndarray:
    """How many points lie in each of the boxes [N, 4] (x0, y0, x1, y1), made larger by so much on each side."""
    x, y = points.T[:, None]
    x0, y0, x1, y1 = (boxes + (-across, -down, across, down)).T[:, :, None]
    return ((x > x0) & (x < x1) & (y > y0) & (y < y1)).sum(1)


def label_curves(axes: Axes, labels: Sequence[Label], size: float = 8.0) -> None:
    """Write each name beside its curve, where it covers no curve and no other name, if there is such a place.

    All places around points along the curve are tried; the one that covers the least of what is drawn is taken, rather
    away from other curves, and near the end of its own. To be called when limits and margins stand.
    """
    renderer = axes.figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    lines = [along(pixels(axes, *line.get_data())) for line in axes.lines if len(line.get_xdata()) > 1]
    taken = np.zeros((0, 4))
    for label in labels:
        weight = {"fontsize": size - 1} if label.small else {"fontsize": size, "fontweight": "bold"}
        written = {**weight, "color": label.colour, "zorder": 5}
        trial = axes.text(0.5, 0.5, label.text, transform=axes.transAxes, **written)
        extent = trial.get_window_extent(renderer)
        trial.remove()
        own = along(pixels(axes, label.xs, label.ys))
        others = [line for line in lines if not (len(line) == len(own) and np.allclose(line, own))]
        points, places = own[::2], np.array([place[:2] for place in PLACES])
        shifts = np.array([(SHIFT[h] * extent.width, SHIFT[v] * extent.height) for _, _, h, v in PLACES])
        corners = (points[:, None] + GAP * places + shifts).reshape(-1, 2)
        boxes = np.hstack([corners, corners + (extent.width, extent.height)])
        cost = 2.0 * (1 - np.repeat(np.arange(len(points)), len(PLACES)) / len(points))
        others_points = np.concatenate([*others, own[:0]])
        cost += 4.0 * (inside(own, boxes, 3, 3) + inside(others_points, boxes, 3, 3))
        cost += 0.5 * inside(others_points, boxes, 8, 9)
        for x0, y0, x1, y1 in taken:
            x_meets = (boxes[:, 0] < x1 + 3) & (boxes[:, 2] > x0 - 3)
            cost += 1000 * (x_meets & (boxes[:, 1] < y1 + 1) & (boxes[:, 3] > y0 - 1))
        cost += 1e6 * ((boxes[:, :2] < (frame.x0, frame.y0)) | (boxes[:, 2:] > (frame.x1 + 2, frame.y1))).any(1)
        best = int(cost.argmin())
        taken = np.vstack([taken, boxes[best]])
        x, y, horizontal, vertical = PLACES[best % len(PLACES)]
        axes.annotate(
            label.text,
            axes.transData.inverted().transform(points[best // len(PLACES)]),
            xytext=(x * GAP * 0.72, y * GAP * 0.72),  # 72 points are 100 pixels
            textcoords="offset points",
            ha=horizontal,
            va=vertical,
            **written,
        )


def label_beside(axes: Axes, labels: Sequence[Label], size: float = 8.0, leaders: bool = True) -> None:
    """Write the names one below the other on the right of a panel, in the order of the curves' ends.

    For many curves: a thin line leads from the end of each to its name. To be called when limits and margins stand.
    """
    frame = axes.get_window_extent(axes.figure.canvas.get_renderer())
    ends = [pixels(axes, label.xs[-1:], label.ys[-1:])[0] for label in labels]
    order = sorted(range(len(labels)), key=lambda n: ends[n][1])
    apart = size / 0.72 * 1.18
    heights: list[float] = []
    for n in order:  # each where its curve ends, or as high as the one below makes it go
        heights.append(max(ends[n][1], heights[-1] + apart if heights else -np.inf))
    over = heights[-1] - max(frame.y1, ends[order[-1]][1])
    for n in reversed(range(len(heights))):  # the uppermost stays in the panel, and pushes those below it down
        top = heights[n + 1] - apart if n + 1 < len(heights) else heights[n] - max(0.0, over)
        heights[n] = min(heights[n], top)
    to_panel = axes.transAxes.inverted().transform
    for n, height in zip(order, heights, strict=True):
        label = labels[n]
        x, y = to_panel((frame.x1 + 12, height))
        if leaders:
            start, corner = to_panel(ends[n]), to_panel((frame.x1 + 1, height))
            axes.plot(
                *zip(start, corner, (x - 0.004, y), strict=True),
                transform=axes.transAxes,
                **{"color": label.colour, "lw": 0.6, "alpha": 0.7, "clip_on": False, "zorder": 2},
            )
        written = {"fontsize": size, "fontweight": "bold", "color": label.colour, "va": "center_baseline"}
        axes.text(x, y, label.text, transform=axes.transAxes, **written)
