"""Draw when `wgmma` does what: ``python profiling/plot_pipeline.py [--results DIR] [--out DIR]``.

wgmma_pipeline: what the two consumer warpgroups of a block are at during three pairs of key tiles, and meanwhile which
products are with the tensor cores, by clocks within the kernel (trace_wgmma.py). Needs matplotlib.
"""

from __future__ import annotations

from typing import NamedTuple

import matplotlib.pyplot as plt
import style
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from style import Drawing, Rows, Theme

SHOWN = 3  # pairs
KINDS = {"scores": "blue", "softmax": "vermilion", "values": "green", "waiting": "faint"}  # and their colours
NEXT = "next "  # ahead of an event of the next pair

Times = dict[tuple[int, str], float]  # microseconds of an event of a pair


class Span(NamedTuple):
    """What lies between two events of a pair; names, the longest that fits is written; which row and part of it."""

    begin: str
    end: str
    kind: str
    names: tuple[str, ...] = ()
    row: int = 0
    part: str = ""  # "left", "right": of the columns, the upper and the lower half of the row


ROWS = (
    *("warpgroup 0", "warpgroup 1"),
    *("tensor cores: QK(A)", "QK(B)", "PV(A) left\nPV(A) right", "PV(B) left\nPV(B) right"),
)
SPANS = (
    Span("SCORES_A", "WEIGHTS_A", "softmax", ("softmax A", "soft-\nmax A")),
    Span("WEIGHTS_A", "PV_A_LEFT", "waiting"),
    Span("PV_A_LEFT", "PV_A_LEFT_DONE", "values", ("PV(A)",)),
    Span("PV_A_LEFT_DONE", "P_B_THERE", "waiting"),
    Span("P_B_THERE", "PV_B_LEFT_DONE", "values", ("PV(B)",)),
    Span("PV_B_LEFT_DONE", NEXT + "SCORES_A", "scores", ("QK(A)",)),
    Span("QK_B", "QK_B_DONE", "scores", ("QK(B)",), 1),
    Span("QK_B_DONE", "MAXIMA_B", "softmax", (), 1),
    Span("MAXIMA_B", "P_A_THERE", "waiting", (), 1),
    Span("P_A_THERE", "WEIGHTS_B", "softmax", ("softmax B", "soft-\nmax B"), 1),
    Span("WEIGHTS_B", "PV_A_RIGHT_DONE", "values", ("PV(A)",), 1),
    Span("PV_A_RIGHT_DONE", "PV_B_RIGHT_DONE", "values", ("PV(B)",), 1),
    Span("PV_B_RIGHT_DONE", NEXT + "QK_B", "waiting", (), 1),
    # Products: from where the first is issued, at the latest, to where they have been waited for.
    Span("PV_B_LEFT_DONE", NEXT + "SCORES_A", "scores", (), 2),
    Span("QK_B", "QK_B_DONE", "scores", (), 3),
    Span("PV_A_LEFT", "PV_A_LEFT_DONE", "values", (), 4, "left"),
    Span("P_A_THERE", "PV_A_RIGHT_DONE", "values", (), 4, "right"),
    Span("P_B_THERE", "PV_B_LEFT_DONE", "values", (), 5, "left"),
    Span("PV_A_RIGHT_DONE", "PV_B_RIGHT_DONE", "values", (), 5, "right"),
)


def times_of(rows: Rows) -> Times:
    """When each event was; rows that name none are left out."""
    return {(int(row["pair"]), row["event"]): float(row["ns"]) / 1e3 for row in rows if row.get("ns")}


def bars(times: Times, span: Span) -> list[tuple[int, float, float]]:
    """Pair, begin and end of a span, wherever both events are there."""
    later = span.end.startswith(NEXT)
    found = []
    for pair in sorted({pair for pair, _ in times}):
        begin, end = (pair, span.begin), (pair + later, span.end.removeprefix(NEXT))
        if begin in times and end in times:
            found.append((pair, times[begin], times[end]))
    return found


def window(times: Times) -> tuple[int, float, float] | None:
    """The first pair that is drawn, and from when to when; one pair on each side reaches into it."""
    pairs = sorted(pair for pair, event in times if event == "SCORES_A")
    if len(pairs) < SHOWN + 2:
        return None
    first = pairs[1]
    return first, times[first, "SCORES_A"], times[first + SHOWN, "SCORES_A"]


def mean_pair(times: Times) -> float:
    """Microseconds from a pair to the next, over all pairs of the file."""
    starts = [time for (_, event), time in sorted(times.items()) if event == "SCORES_A"]
    return (starts[-1] - starts[0]) / (len(starts) - 1)


def write_name(axes: Axes, theme: Theme, names: tuple[str, ...], begin: float, end: float, row: float) -> None:
    """The first of the names that fits into the bar, if one does."""
    (x0, _), (x1, _) = axes.transData.transform([(begin, row), (end, row)])
    for name in names:
        text = axes.text((begin + end) / 2, row, name, color=theme.page, fontsize=7.5, ha="center", va="center")
        text.set_linespacing(0.95)
        if text.get_window_extent(axes.figure.canvas.get_renderer()).width < x1 - x0 - 3:
            return
        text.remove()


def draw(theme: Theme, rows: Rows) -> plt.Figure | None:
    """A row for each warpgroup, and one for each product of the tensor cores."""
    times = times_of(rows)
    place = window(times)
    if place is None:
        return None
    first, start, stop = place
    figure, ((axes,),) = style.panels(theme, 1, 1, 3.9)
    axes.grid(axis="y", visible=False)
    heights = [0.0, 1.0, *(2.25 + 0.75 * n for n in range(len(ROWS) - 2))]
    axes.set_xlim(0, stop - start)
    axes.set_ylim(heights[-1] + 0.45, -0.5)
    axes.set_yticks(heights, ROWS)
    style.headline(figure, theme, "wgmma: three pairs of key tiles in one block", style.gpu_of(rows))
    style.margins(figure, left=1.5, top=0.68, bottom=0.72)
    for span in SPANS:
        height = 0.78 if span.row < 2 else 0.52
        middle = heights[span.row]
        if span.part:
            height = 0.29
            middle += 0.16 if span.part == "right" else -0.16
        colour = getattr(theme, KINDS[span.kind])
        for pair, begin, end in bars(times, span):
            left, right = max(begin, start) - start, min(end, stop) - start
            if left >= right:
                continue
            (bar,) = axes.barh(middle, right - left, height, left, color=colour, edgecolor=theme.page, lw=0.6, zorder=2)
            bar.set_gid(f"{span.row}-{pair}-{span.begin}")
            write_name(axes, theme, span.names, left, right, middle)
    for n in range(SHOWN):
        begin, end = (times[first + k, "SCORES_A"] - start for k in (n, n + 1))
        axes.axvline(begin, color=theme.text, lw=0.7, alpha=0.5, zorder=1)
        axes.text((begin + end) / 2, -0.58, f"pair {first + n}", color=theme.text, fontsize=8, ha="center", va="bottom")
    handles = [Patch(color=getattr(theme, colour), label=kind) for kind, colour in KINDS.items()]
    inches = figure.get_figheight()
    written = {"fontsize": 8, "frameon": False, "labelcolor": theme.text, "loc": "center", "handlelength": 1.2}
    figure.legend(handles=handles, **written, bbox_to_anchor=(0.24, 0.15 / inches), ncols=4, columnspacing=1.2)
    style.below(figure, theme, f"microseconds; a pair takes {mean_pair(times):.2f} on average", x=0.72)
    return figure


DRAWINGS = (
    Drawing(
        *("wgmma_pipeline", ("wgmma_trace",), draw),
        "What the two consumer warpgroups of a block do in three pairs of key tiles, by clocks within the kernel, and "
        "which products are with the tensor cores meanwhile.",
    ),
)


if __name__ == "__main__":
    style.main("Draw when wgmma does what.", DRAWINGS)
