"""Draw how much longer others take than ours: ``python profiling/plot_speedup.py [--results DIR] [--out DIR]``.

- speedup: for each operator and each peer measured beside it, the peer's time over ours, a dot for each problem.

`draw_file` draws a single results file, each problem on a line of its own: for a kernel of your own beside ours. Where
several of our variants were measured, the faster one counts. Needs matplotlib.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import compare
import matplotlib.pyplot as plt
import style
import tables
from matplotlib.lines import Line2D
from style import Drawing, Rows, Theme

FILES = ("trees", "encodings", "verify_attention", "merge_states", "accept")
ORDER = (
    *("topk_logprobs", "build_tree", "chain", "verify_attention", "merge_states", "argmax_tokens", "accept_greedy"),
    *("target_probs", "accept_sampled", "compact_kv", "gather_accepted"),
)
NAMES = {"chain": "topk_logprobs + build_tree"}
PARTS = ("stage", "step", "copy", "matmul")  # have no peer
NOT_OURS_ALONE = ("flash_small",)  # is flash with a choice that users do not have
HOW = ("variant", "splits", "tiles", "checked", "path")  # how a problem was solved, not which

Problem = tuple[tuple[str, str], ...]


class Pair(NamedTuple):
    """One problem's time of another, over ours."""

    operator: str
    problem: Problem
    variant: str
    ratio: float


def operator_of(row: dict[str, str]) -> str:
    """The operator of a row; the files of attention have no such column."""
    return row.get("operator") or "verify_attention"


def is_ours(row: dict[str, str]) -> bool:
    """Whether it is a variant of this package, as users call it."""
    variant = row["variant"]
    named = variant == operator_of(row) or variant == "threshold + frontier" or style.look(variant).ours
    return named and variant not in NOT_OURS_ALONE


def problem_of(row: dict[str, str]) -> Problem:
    """What was to be computed."""
    return tuple((name, value) for name, value in compare.key_of(row) if name not in (*HOW, "operator"))


def pairs(rows: Rows) -> Iterator[Pair]:
    """Every other variant beside the faster of ours that solved the same problem with the defaults."""
    rows = [row for row in rows if row.get("microseconds") and operator_of(row) not in PARTS]
    rows = [row for row in rows if row.get("splits", "") in ("", tables.EVEN)]
    ours: dict[tuple[str, Problem], float] = {}
    for row in filter(is_ours, rows):
        key = operator_of(row), problem_of(row)
        ours[key] = min(float(row["microseconds"]), ours.get(key, float("inf")))
    for row in rows:
        key = operator_of(row), problem_of(row)
        if key in ours and not is_ours(row) and row["variant"] not in NOT_OURS_ALONE:
            yield Pair(*key, row["variant"], float(row["microseconds"]) / ours[key])


def factor(value: float) -> str:
    """A ratio as people write it."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def name_of(pair: Pair) -> str:
    """The operator, and for attention the dtype, which decides whether there are units for it."""
    name = NAMES.get(pair.operator, pair.operator)
    return f"{name}, {dict(pair.problem)['dtype']}" if pair.operator == "verify_attention" else name


def draw(theme: Theme, *files: Rows) -> plt.Figure | None:
    """A line for each operator and peer."""
    found: dict[str, dict[str, list[float]]] = {}
    every_pair = [pair for rows in files for pair in pairs(rows)]
    known = {operator: n for n, operator in enumerate(ORDER)}
    for pair in sorted(every_pair, key=lambda pair: known.get(pair.operator, len(known))):
        found.setdefault(name_of(pair), {}).setdefault(pair.variant, []).append(pair.ratio)
    if not found:
        return None
    lines = sum(map(len, found.values())) + len(found)
    figure, every = style.panels(theme, 1, 1, 1.05 + 0.2 * lines)
    axes = every[0, 0]
    height, heights, names = 0.0, [], []
    for operator, by_variant in found.items():
        axes.text(
            *(-0.005, height, operator),
            transform=axes.get_yaxis_transform(),
            **{"ha": "right", "va": "center", "fontsize": 8.5, "fontweight": "bold", "color": theme.text},
        )
        for variant, ratios in by_variant.items():
            height += 1
            heights.append(height)
            names.append(style.look(variant).name)
            colour, marker = style.colour(theme, variant), style.look(variant).marker
            middle = statistics.median(ratios)
            axes.plot([min(ratios), max(ratios)], [height] * 2, color=theme.faint, lw=2.5, zorder=1)
            dots = axes.plot(ratios, [height] * len(ratios), ls="", color=colour, marker=marker, ms=4, alpha=0.7)[0]
            dots.set_gid(f"{operator}-{variant}".replace(" ", "_"))
            axes.plot([middle] * 2, [height - 0.34, height + 0.34], color=theme.text, lw=1.4, zorder=4)
            axes.text(
                *(1.005, height, factor(middle)),
                transform=axes.get_yaxis_transform(),
                **{"ha": "left", "va": "center", "fontsize": 8, "color": theme.text},
            )
        height += 1
    axes.axvline(1, color=theme.text, lw=1.1, zorder=2)
    axes.set_xscale("log")
    axes.margins(x=0.03)
    style.log_ticks(axes.xaxis, style.plain)
    axes.set_yticks(heights, names)
    axes.grid(False, axis="y")
    axes.set_ylim(height - 0.4, -0.7)
    style.headline(
        figure, theme, "Time of others over ours, the same problem on the same model of GPU", style.gpu_of(*files)
    )
    style.below(figure, theme, "their time / ours: right of the line they take longer", x=0.6)
    style.margins(figure, left=2.3, top=0.62, bottom=0.5)
    box = axes.get_position()
    axes.set_position((box.x0, box.y0, box.width - 0.05, box.height))
    axes.text(
        *(1.005, 1 + 0.09 / (figure.get_figheight() * box.height), "median"),
        transform=axes.transAxes,
        **{"fontsize": 8, "color": theme.text, "alpha": 0.75, "va": "bottom"},
    )
    return figure


def draw_problems(theme: Theme, rows: Rows) -> plt.Figure | None:
    """A line for each problem of one file."""
    found: dict[Problem, list[Pair]] = {}
    for pair in pairs(rows):
        found.setdefault(pair.problem, []).append(pair)
    if not found:
        return None
    values = {name: {dict(problem).get(name) for problem in found} for problem in found for name, _ in problem}
    shown = [name for name in values if len(values[name]) > 1]
    figure, every = style.panels(theme, 1, 1, 1.4 + 0.26 * len(found))
    axes = every[0, 0]
    variants = dict.fromkeys(pair.variant for line in found.values() for pair in line)
    for height, line in enumerate(found.values()):
        axes.plot([1, *(pair.ratio for pair in line)], [height] * (len(line) + 1), color=theme.faint, lw=2.5, zorder=1)
        for pair in line:
            colour, marker = style.colour(theme, pair.variant), style.look(pair.variant).marker
            dot = axes.plot(pair.ratio, height, color=colour, marker=marker, ms=6.5, zorder=3)[0]
            dot.set_gid(f"{pair.variant}-{height}".replace(" ", "_"))
    axes.axvline(1, color=theme.text, lw=1.1, zorder=2)
    axes.set_xscale("log")
    axes.margins(x=0.04)
    style.log_ticks(axes.xaxis)
    axes.set_yticks(range(len(found)), [named(dict(problem), shown) for problem in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    head = f"{next(iter(found.values()))[0].operator}: time of others over ours"
    style.headline(figure, theme, head, style.gpu_of(rows))
    handles = [
        Line2D([], [], ls="", color=style.colour(theme, v), marker=style.look(v).marker, ms=6, label=style.look(v).name)
        for v in variants
    ]
    figure.legend(
        handles=handles,
        loc="center",
        bbox_to_anchor=(0.56, 1 - 0.52 / figure.get_figheight()),
        ncols=min(5, len(handles)),
        fontsize=8.5,
        frameon=False,
        labelcolor=theme.text,
    )
    style.below(figure, theme, "their time / ours: right of the line they take longer", x=0.6)
    renderer = figure.canvas.get_renderer()
    longest = max(text.get_window_extent(renderer).width for text in axes.get_yticklabels())
    style.margins(figure, left=1.05 * longest / figure.dpi + 0.2, top=0.8, bottom=0.5)
    return figure


def named(problem: dict[str, str], shown: list[str]) -> str:
    """What sets a problem apart: sizes with their names, words without."""
    some = {name: problem[name] for name in shown if name in problem}
    sizes = [f"{name} {int(value):,}" for name, value in some.items() if value.isdigit()]
    return ", ".join([*sizes, *(value for value in some.values() if not value.isdigit())])


def draw_file(path: Path, out: Path) -> list[str]:
    """Draw one results file into a folder, in four files of its name; returns the name, or nothing without times."""
    path = Path(path)
    drawing = Drawing(path.stem, (path.stem,), draw_problems, "Time of others over ours.")
    return style.draw_files((drawing,), path.parent, Path(out))


DRAWINGS = (
    Drawing(
        *("speedup", FILES, draw),
        "Time of each peer over that of ours for the same problem on the same model of GPU: a dot for each problem; "
        "the tick and the number are the median.",
    ),
)


if __name__ == "__main__":
    style.main("Draw how much longer others take than ours.", DRAWINGS)
