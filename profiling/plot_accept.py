"""Draw a decoding step and its parts from CSV alone: ``python profiling/plot_accept.py [--results DIR] [--out DIR]``.

- step_stages: for a greedy and for a sampling step a bar of its stages one after the other, each as long as it takes
  alone from a cold L2, and a mark where the whole step ends as one CUDA graph.
- accept_sweeps: microseconds of what follows the target's forward pass against one size at a time.

Needs matplotlib.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import style
import tables
from matplotlib.axes import Axes
from style import Drawing, Label, Rows, Theme

CASES = ("greedy", "sampled")
COLOURS = ("blue", "green", "grey", "vermilion", "purple", "brown", "grey")  # by place in the step
# Of what is swept: colour and shape.
OPERATORS = {
    "argmax_tokens": ("vermilion", "^"),
    "accept_greedy": ("purple", "s"),
    "target_probs": ("blue", "o"),
    "accept_sampled": ("green", "D"),
}
SWEEPS = {"V": "tokens of the vocabulary", "B": "requests", "Q": "nodes of a tree"}  # the last has all operators


def stages_of(rows: Rows, case: str) -> list[tuple[str, float]]:
    """Stages and microseconds, in the order of the step."""
    return [
        (row["variant"], float(row["microseconds"]))
        for row in rows
        if (row["operator"], row["case"]) == ("stage", case) and row["microseconds"]
    ]


def draw_step(axes: Axes, rows: Rows, case: str, theme: Theme, longest: float) -> None:
    """The bar of one step, its stages named below, evenly spread."""
    stages = stages_of(rows, case)
    whole = float(tables.pick(rows, operator="step", case=case)["microseconds"])
    begin = 0.0
    for n, ((name, time), place) in enumerate(zip(stages, COLOURS, strict=True)):
        colour = getattr(theme, place)
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


def draw(theme: Theme, rows: Rows) -> plt.Figure | None:
    """A bar for each step that has all its stages."""
    steps = {row["case"] for row in rows if row["operator"] == "step" and row["microseconds"]}
    cases = [case for case in CASES if case in steps and len(stages_of(rows, case)) == len(COLOURS)]
    if not cases:
        return None
    figure, every = style.panels(theme, len(cases), 1, 0.4 + 1.5 * len(cases))
    ends = [sum(time for _, time in stages_of(rows, case)) for case in cases]
    ends += [float(tables.pick(rows, operator="step", case=case)["microseconds"]) for case in cases]
    for axes, case in zip(every[:, 0], cases, strict=True):
        draw_step(axes, rows, case, theme, 1.01 * max(ends))
    row = tables.pick(rows, operator="step", case=cases[0])
    where = f"{row['gpu']}; {row['B']} requests, {row['Q']} nodes, V = {int(row['V']):,}, {row['layers']} layers"
    style.headline(figure, theme, "A decoding step but for the target's forward pass", where)
    style.margins(figure, left=0.11, top=0.44, bottom=0.07, down=0.1)
    return figure


def swept(rows: Rows, operator: str, x: str) -> dict[float, float]:
    """Microseconds of an operator by the size that a sweep changes, the rest of the sizes as in the most rows of it."""
    of = [row for row in rows if row["variant"] == row["operator"] == operator and row["microseconds"]]
    rows = [row for row in of if row["case"].endswith(f"{x} sweep")]
    others = [name for name in ("B", "Q", "V", "dtype") if name != x]
    same = {tuple(row[name] for name in others) for row in rows}
    # The row of the usual sizes belongs to every sweep.
    filters = {row["case"].removesuffix(f"{x} sweep").rstrip(", ") for row in rows}
    rows += [row for row in of if tuple(row[name] for name in others) in same and row["case"] in filters]
    return {float(row[x]): float(row["microseconds"]) for row in rows if row[x]}


def draw_sweeps(theme: Theme, rows: Rows) -> plt.Figure | None:
    """A panel for each size, a curve for each operator."""
    panels = {x: {operator: swept(rows, operator, x) for operator in OPERATORS} for x in SWEEPS}
    panels = {x: found for x, found in panels.items() if any(len(times) > 1 for times in found.values())}
    if not panels:
        return None
    figure, every = style.panels(theme, 1, len(panels), 3.6, sharey=True)
    labels = []
    for axes, (x, found) in zip(every[0], panels.items(), strict=True):
        names = []
        for operator, times in found.items():
            if len(times) > 1:
                colour, marker = getattr(theme, OPERATORS[operator][0]), OPERATORS[operator][1]
                points = sorted(times), [times[size] for size in sorted(times)]
                line = axes.plot(*points, color=colour, marker=marker, ms=4.2, lw=1.8, zorder=3)[0]
                line.set_gid(f"{operator}-{x}")
                names.append(Label(operator, colour, *points))
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.margins(x=0.08, y=0.12)
        style.fixed_ticks(axes.xaxis, style.spread_out(sorted({n for times in found.values() for n in times}), 5))
        style.title(axes, theme, SWEEPS[x])
        labels.append((axes, names))
    style.log_ticks(every[0][0].yaxis, style.duration)
    style.headline(figure, theme, "After the target's forward pass, against one size", style.gpu_of(rows))
    style.margins(figure, left=0.68, top=0.68, bottom=0.35, across=0.2, right=1.35)
    style.label_beside(*labels[-1])  # steep curves side by side leave no room between them
    return figure


DRAWINGS = (
    Drawing(
        *("accept_sweeps", ("accept",), draw_sweeps),
        "Time of what follows the target's forward pass against one size at a time.",
    ),
    Drawing(
        *("step_stages", ("accept",), draw),
        "The stages of a decoding step one behind the other, greedy and sampled; the mark is the end of the whole step "
        "as one CUDA graph.",
    ),
)


if __name__ == "__main__":
    style.main("Draw the stages of a decoding step.", DRAWINGS)
