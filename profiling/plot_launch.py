"""Draw what a launch costs: ``python profiling/plot_launch.py [--results DIR] [--out DIR]``.

launch: for each operator the host's time until a call returns, ours and others'; and what a call of ours takes when
the host launches it, which is the host's time where the GPU is faster, beside its part of a CUDA graph, for the problem
that takes the GPU the least. Needs matplotlib.
"""

from __future__ import annotations

import statistics

import matplotlib.pyplot as plt
import style
from matplotlib.lines import Line2D
from plot_speedup import FILES, NAMES, ORDER, is_ours, operator_of
from style import Drawing, Rows, Theme

LOOK = style.Look("ours", "blue", "o", True)


def name_of(row: dict[str, str]) -> str:
    """The operator, or which step; the many conversions between encodings go by one name."""
    operator = operator_of(row)
    if operator == "step":
        return f"whole step, {row['case']}"
    return NAMES.get(operator, operator) if operator in ORDER else "encodings of trees"


def shown(row: dict[str, str]) -> bool:
    """Whether a row has the host's time and is an operator or a whole step."""
    return bool(row.get("host_us")) and operator_of(row) not in ("stage", "copy", "matmul")


def order_of(row: dict[str, str]) -> float:
    """In data-path order; encodings behind the trees, steps last."""
    operator = operator_of(row)
    if operator in ORDER:
        return ORDER.index(operator)
    return len(ORDER) if operator == "step" else ORDER.index("chain") + 0.5


def draw(theme: Theme, *files: Rows) -> plt.Figure | None:
    """A line for each operator, two panels."""
    rows = sorted((row for some in files for row in some if shown(row)), key=order_of)
    ours = [row for row in rows if is_ours(row) or operator_of(row) == "step"]
    names = list(dict.fromkeys(name_of(row) for row in ours))
    if not names:
        return None
    figure, (both,) = style.panels(theme, 1, 2, 1.45 + 0.3 * len(names), sharey=True)
    left, right = both
    seen: dict[str, Line2D] = {}
    for height, name in enumerate(names):
        key = name.replace(" ", "_")
        by_variant: dict[str, list[float]] = {}
        for row in rows:
            if name_of(row) == name:
                variant = "ours" if row in ours else row["variant"]
                by_variant.setdefault(variant, []).append(float(row["host_us"]))
        for variant, times in by_variant.items():
            look = LOOK if variant == "ours" else style.look(variant)
            label = "PyTorch" if look.colour == "vermilion" else look.name
            colour = getattr(theme, look.colour)
            dot = left.plot(statistics.median(times), height, color=colour, marker=look.marker, ms=6, zorder=3)[0]
            dot.set_gid(f"host-{key}-{variant}")
            left.plot([min(times), max(times)], [height] * 2, color=colour, lw=1.2, alpha=0.5, zorder=2)
            seen.setdefault(label, dot)
        small = [row for row in ours if name_of(row) == name and row.get("graph_us")]
        if small:
            row = min(small, key=lambda row: float(row["graph_us"]))
            graph = float(row["graph_us"])
            eager = max(float(row["host_us"]), float(row["microseconds"]))
            right.plot([graph, eager], [height] * 2, color=theme.faint, lw=2.5, zorder=1)
            right.plot(graph, height, color=theme.green, marker="s", ms=5.5, zorder=3)[0].set_gid(f"graph-{key}")
            right.plot(eager, height, color=theme.blue, marker="o", ms=6, zorder=3)[0].set_gid(f"eager-{key}")
    for axes in both:
        axes.set_xscale("log")
        axes.margins(x=0.06)
        style.log_ticks(axes.xaxis, style.duration)
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.5)
    style.title(left, theme, "the host's time until a call returns")
    style.title(right, theme, "a call of ours, the smallest problem")
    inches = figure.get_figheight()
    written = {"fontsize": 8, "frameon": False, "labelcolor": theme.text, "loc": "center", "handletextpad": 0.2}
    kinds = [
        Line2D([], [], ls="", marker="s", ms=5.5, color=theme.green, label="in a CUDA graph"),
        Line2D([], [], ls="", marker="o", ms=6, color=theme.blue, label="launched by the host"),
    ]
    others = [
        Line2D([], [], ls="", marker=line.get_marker(), ms=6, color=line.get_color(), label=name)
        for name, line in seen.items()
    ]
    style.headline(figure, theme, "What a launch costs", style.gpu_of(*files))
    style.margins(figure, left=1.75, top=0.68, bottom=0.72, across=0.35)
    for axes, handles in ((left, others), (right, kinds)):
        box = axes.get_position()
        columns = 1 if handles is kinds else -(-len(handles) // 2)
        place = {"bbox_to_anchor": ((box.x0 + box.x1) / 2, 0.24 / inches), "ncols": columns, "columnspacing": 1.2}
        figure.legend(handles=handles, **written, **place)
    return figure


DRAWINGS = (
    Drawing(
        *("launch", FILES, draw),
        "Left: the host's time until a call returns, the median over all problems and their range. Right: what a call "
        "of ours takes for the smallest problem, launched by the host and as a part of a CUDA graph.",
    ),
)


if __name__ == "__main__":
    style.main("Draw what a launch costs.", DRAWINGS)
