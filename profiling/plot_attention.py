"""Draw errors and speed of attention: ``python profiling/plot_attention.py [--results DIR] [--out DIR]``.

From attention_error.csv:

- attention_error: relative error of float32 attention against the number of keys, with the derived bounds, for logits
  of two spreads.
- attention_error_keys: relative error, and the largest in units of the last place, against the number of keys, for
  each dtype.
- attention_error_logits: the same against the spread of the logits.

From verify_attention.csv, with the ceilings of ceilings.csv where they are measured:

- attention_speed: TFLOP/s at the shapes of the tables, beside PyTorch's eager attention.
- attention_kv, attention_nodes, attention_heads, attention_batch, attention_pages: TFLOP/s and GB/s against the one
  size that a sweep changes, below the roof that the ceilings allow.
- attention_roofline: TFLOP/s of all that is measured against the FLOPs for each byte.

Needs matplotlib.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import style
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from style import Drawing, Label, Rows, Theme

DTYPES = ("float32", "float16", "bfloat16")
SPREADS = {"2": "logits of standard deviation 2", "0.02": "of 0.02: an all but flat softmax"}
DASHES = (0, (4, 3))
TICK = 0.62  # inches that the number of a tick takes
KEYS = (16, 128, 1024, 8192, 65536)

Points = tuple[list[float], list[float]]


def curve(rows: Rows, x: str, y: str, **known: str) -> Points:
    """Two columns of the rows that have these values, rising by the first."""
    points = sorted(
        (float(row[x]), float(row[y]))
        for row in rows
        if all(row.get(name) == value for name, value in known.items()) and row.get(x) and row.get(y)
    )
    return [a for a, _ in points], [b for _, b in points]


def variants_of(rows: Rows) -> list[str]:
    """Their variants, in the order of `style.LOOKS`, and then any others."""
    found = dict.fromkeys(row["variant"] for row in rows)
    return [v for v in style.LOOKS if v in found] + [v for v in found if v not in style.LOOKS]


def draw_curve(axes: Axes, theme: Theme, variant: str, points: Points, gid: str) -> Label:
    """The line of a variant; ours are thicker."""
    shown = style.look(variant)
    colour = style.colour(theme, variant)
    width, size = (1.8, 3.8) if shown.ours else (1.2, 3.4)
    axes.plot(*points, color=colour, marker=shown.marker, ms=size, lw=width, zorder=3)[0].set_gid(gid)
    return Label(shown.name, colour, *points)


def known_dtype(rows: Rows) -> Rows:
    """Rows with a dtype: those from before it was a column are float32."""
    return [{"dtype": "float32", **row} for row in rows]


def name_all(figure: plt.Figure, labels: list[tuple[Axes, list[Label]]], left: float, across: float) -> None:
    """Margins and names of a grid of panels: beside the panels where these have many curves."""
    many = max(len(names) for _, names in labels) > 6
    room = {"across": across + 1.25, "right": 1.4} if many else {"across": across}
    style.margins(figure, left=left, top=0.68, bottom=0.5, down=0.3, **room)
    for axes, names in labels:
        (style.label_beside if many else style.label_curves)(axes, names)


# Errors


def draw_error(theme: Theme, rows: Rows) -> plt.Figure | None:
    """float32: errors against keys with their bounds, a panel for each spread of the logits."""
    rows = [row for row in known_dtype(rows) if row["dtype"] == "float32" and row["logit_std"] in SPREADS]
    if not rows:
        return None
    figure, every = style.panels(theme, 1, 2, 4.0, sharey=True)
    labels: list[list[Label]] = []
    for axes, (logit_std, name) in zip(every[0], SPREADS.items(), strict=True):
        names: list[Label] = []
        of_bounds: list[Label] = []
        for variant in variants_of(rows):
            of = {"variant": variant, "logit_std": logit_std}
            points = curve(rows, "keys", "rel_frobenius", **of)
            if points[0]:
                names.append(draw_curve(axes, theme, variant, points, f"{variant}-{logit_std}"))
            bounds = curve(rows, "keys", "bound", **of)
            if bounds[0] and (variant == "naive" or style.look(variant).ours):
                colour = style.colour(theme, variant)
                line = axes.plot(*bounds, color=colour, ls=DASHES, lw=1.1, alpha=0.8, zorder=2)[0]
                line.set_gid(f"bound-{variant}-{logit_std}")
                of_bounds.append(Label(f"bound of {style.look(variant).name}", colour, *bounds, small=True))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        style.fixed_ticks(axes.xaxis, KEYS)
        style.title(axes, theme, name)
        labels.append(names + of_bounds)
    style.log_ticks(axes.yaxis, style.power_of_ten)
    style.headline(figure, theme, "Relative error of float32 attention", style.gpu_of(rows))
    style.below(figure, theme, "keys")
    style.margins(figure, left=0.76, top=0.68, bottom=0.5)
    for axes, names in zip(every[0], labels, strict=True):
        style.label_curves(axes, names)
    return figure


def draw_errors_against(theme: Theme, rows: Rows, x: str, known: dict[str, str], head: str, what: str) -> Any:
    """Relative error above, the largest in units of the last place below; a column for each dtype."""
    rows = [row for row in known_dtype(rows) if all(row[name] == value for name, value in known.items())]
    dtypes = [dtype for dtype in DTYPES if len(curve(rows, x, "rel_frobenius", dtype=dtype)[0]) > 1]
    measures = {"rel_frobenius": "relative error", "max_ulp": "largest error, ulp"}
    measures = {column: name for column, name in measures.items() if any(row.get(column) for row in rows)}
    sizes = sorted({float(row[x]) for row in rows})
    if len(sizes) < 3 or len(dtypes) + len(measures) < 3:  # one panel alone is attention_error again
        return None
    figure, every = style.panels(theme, len(measures), len(dtypes), 1.0 + 2.6 * len(measures), sharex=True)
    labels = []
    for line, (column, name) in zip(every, measures.items(), strict=True):
        style.beside(line[0], theme, name)
        for axes, dtype in zip(line, dtypes, strict=True):
            names = []
            for variant in variants_of(rows):
                points = curve(rows, x, column, dtype=dtype, variant=variant)
                if points[0]:
                    gid = f"{column}-{dtype}-{variant}"
                    names.append(draw_curve(axes, theme, variant, points, gid))
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.margins(x=0.06, y=0.12)
            how = style.power_of_ten if column == "rel_frobenius" else style.plain
            style.log_ticks(axes.yaxis, how)
            labels.append((axes, names))
    for axes, dtype in zip(every[0], dtypes, strict=True):
        style.title(axes, theme, dtype)
    style.headline(figure, theme, head, style.gpu_of(rows))
    style.below(figure, theme, what)
    name_all(figure, labels, left=0.95, across=0.65)
    for axes, _ in labels:  # names beside the curves leave less room
        most = max(2, int(axes.get_position().width * figure.get_figwidth() / TICK))
        style.fixed_ticks(axes.xaxis, style.spread_out(sizes, min(most, 12 // len(dtypes))))
    return figure


def draw_error_keys(theme: Theme, rows: Rows) -> plt.Figure | None:
    """Errors against the number of keys."""
    head = "Error of attention by dtype, logits of standard deviation 2"
    return draw_errors_against(theme, rows, "keys", {"logit_std": "2"}, head, "keys")


def draw_error_logits(theme: Theme, rows: Rows) -> plt.Figure | None:
    """Errors against the spread of the logits, for the number of keys that has the most of them."""
    spreads: dict[str, set[str]] = {}
    for row in rows:
        spreads.setdefault(row["keys"], set()).add(row["logit_std"])
    if not spreads:
        return None
    keys = max(spreads, key=lambda keys: (len(spreads[keys]), int(keys)))
    head = f"Error of attention by dtype, {int(keys):,} keys"
    return draw_errors_against(theme, rows, "logit_std", {"keys": keys}, head, "standard deviation of the logits")


# Speed


def usual(rows: Rows) -> Rows:
    """Those that were timed, of calls with the defaults."""
    return [row for row in rows if row.get("splits", "") in ("", "even") and row["microseconds"]]


def draw_speed(theme: Theme, rows: Rows) -> plt.Figure | None:
    """TFLOP/s: a panel for each dtype, a line for each shape."""
    shown = ("flash", "mma", "wgmma_planned", "three_phase", "torch_eager")
    panels: dict[str, dict[str, dict[str, float]]] = {"float32": {}, "bfloat16": {}}
    for row in usual(rows):
        if row["case"] == "logit std 2" and row["variant"] in shown and row["dtype"] in panels:
            shape = ",".join(row[name] for name in ("B", "H", "Q", "prefix"))
            panels[row["dtype"]].setdefault(shape, {})[row["variant"]] = float(row["tflops"])
    # The shapes that both dtypes have stand first, so that lines of the same height are of the same shape.
    shapes = sorted(
        dict.fromkeys(shape for found in panels.values() for shape in found),
        key=lambda shape: -sum(shape in found for found in panels.values()),
    )
    if not shapes:
        return None
    figure, every = style.panels(theme, 1, 2, 1.5 + 0.3 * len(shapes), sharey=True)
    for axes, (dtype, found) in zip(every[0], panels.items(), strict=True):
        for height, shape in enumerate(shapes):
            values = found.get(shape, {})
            if values:
                ends = [min(values.values()), max(values.values())]
                axes.plot(ends, [height] * 2, color=theme.faint, lw=2.5, zorder=1)
            for variant, value in values.items():
                colour, marker = style.colour(theme, variant), style.look(variant).marker
                dot = axes.plot(value, height, color=colour, marker=marker, ms=6.5, zorder=3)[0]
                dot.set_gid(f"{variant}-{dtype}-{shape}")
        axes.set_xscale("log")
        style.log_ticks(axes.xaxis)
        style.fixed_ticks(axes.xaxis, [0.2, 0.5, 1, 2, 5, 10, 20, 50, 100])
        axes.set_yticks(range(len(shapes)), shapes)
        axes.set_ylim(len(shapes) - 0.5, -0.5)
        style.title(axes, theme, dtype)
    style.headline(figure, theme, "Speed of tree-verify attention", style.gpu_of(rows))
    handles = [
        Line2D([], [], ls="", color=style.colour(theme, v), marker=style.look(v).marker, ms=6, label=style.look(v).name)
        for v in shown
        if any(v in values for found in panels.values() for values in found.values())
    ]
    figure.legend(
        handles=handles,
        loc="center",
        bbox_to_anchor=(0.56, 1 - 0.46 / figure.get_figheight()),
        ncols=len(handles),
        fontsize=8.5,
        frameon=False,
        labelcolor=theme.text,
    )
    style.below(figure, theme, "TFLOP/s (by B,H,Q,prefix)", x=0.56)
    style.margins(figure, left=1.17, top=0.9, bottom=0.5)
    return figure


def ceilings_of(ceilings: Rows, dtype: str) -> tuple[float, float] | None:
    """TFLOP/s of a matrix product and GB/s of a copy; float16 has the units of bfloat16."""
    dtypes = (dtype, "bfloat16") if dtype == "float16" else (dtype,)
    products = [row["tflops"] for row in ceilings if row["operator"] == "matmul" and row.get("dtype") in dtypes]
    copies = [row["gb_per_s"] for row in ceilings if row["operator"] == "copy" and row["gb_per_s"]]
    if not copies or not any(products):
        return None
    return max(map(float, filter(None, products))), max(map(float, copies))


def roof(row: dict[str, str], column: str, tflops: float, gb_per_s: float) -> float:
    """What the slower of both ceilings leaves of a column, for the FLOPs and bytes of this row."""
    flops_per_byte = 1000 * float(row["tflops"]) / float(row["gb_per_s"])
    attainable = min(tflops, flops_per_byte * gb_per_s / 1000)
    return attainable if column == "tflops" else 1000 * attainable / flops_per_byte


def draw_roof(axes: Axes, theme: Theme, rows: Rows, x: str, column: str, ceilings: tuple[float, float]) -> Label | None:
    """The roof over a sweep of one dtype."""
    points = {float(row[x]): roof(row, column, *ceilings) for row in rows if row.get("gb_per_s") and row["tflops"]}
    if not points:
        return None
    xs = sorted(points)
    ys = [points[at] for at in xs]
    axes.plot(xs, ys, color=theme.grey, ls=DASHES, lw=1.3, zorder=2)[0].set_gid(f"roof-{column}-{rows[0]['dtype']}")
    return Label("roof", theme.grey, xs, ys)


def draw_sweep(theme: Theme, rows: Rows, ceilings: Rows, case: str, x: str, head: str, what: str) -> plt.Figure | None:
    """TFLOP/s above, GB/s below, against the column that a sweep changes; a column of panels for each dtype."""
    rows = [row for row in usual(rows) if row["case"] == case and row.get(x)]
    constants = [name for name in ("B", "H", "Q", "prefix", "page_size") if name != x]
    same = Counter(tuple(row.get(name, "") for name in constants) for row in rows)
    if not same:
        return None
    values = same.most_common(1)[0][0]
    rows = [row for row in rows if tuple(row.get(name, "") for name in constants) == values]
    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    measures = {"tflops": "TFLOP/s", "gb_per_s": "GB/s"}
    measures = {column: name for column, name in measures.items() if any(row.get(column) for row in rows)}
    sizes = sorted({float(row[x]) for row in rows})
    if len(sizes) < 2 or not measures:
        return None
    figure, every = style.panels(theme, len(measures), len(dtypes), 1.0 + 2.7 * len(measures), sharex=True)
    labels: list[tuple[Axes, list[Label]]] = []
    for line, (column, name) in zip(every, measures.items(), strict=True):
        style.beside(line[0], theme, name)
        for axes, dtype in zip(line, dtypes, strict=True):
            of_dtype = [row for row in rows if row["dtype"] == dtype]
            names = []
            for variant in variants_of(of_dtype):
                points = curve(of_dtype, x, column, variant=variant)
                if points[0]:
                    names.append(draw_curve(axes, theme, variant, points, f"{column}-{dtype}-{variant}"))
            top = ceilings_of(ceilings, dtype)
            over = draw_roof(axes, theme, of_dtype, x, column, top) if top else None
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.margins(x=0.06, y=0.1)
            style.fixed_ticks(axes.xaxis, style.spread_out(sizes, 10 // len(dtypes)))
            style.log_ticks(axes.yaxis)
            labels.append((axes, names + ([over] if over else [])))
    for axes, dtype in zip(every[0], dtypes, strict=True):
        style.title(axes, theme, dtype)
    units = {"B": "requests", "H": "heads", "Q": "nodes", "prefix": "keys ahead of the tree"}
    fixed = [f"{int(v):,} {units[n]}" for n, v in zip(constants, values, strict=True) if n in units]
    fixed = ["1 " + text[2:-1] if text.startswith("1 ") and text.endswith("s") else text for text in fixed]
    style.headline(figure, theme, head, f"{style.gpu_of(rows)}; {', '.join(fixed)}")
    style.below(figure, theme, what)
    name_all(figure, labels, left=0.85, across=0.55)
    return figure


def sweep(case: str, x: str, head: str, what: str) -> Callable[..., plt.Figure | None]:
    """What draws one sweep."""
    return lambda theme, rows, ceilings: draw_sweep(theme, rows, ceilings, case, x, head, what)


def draw_roofline(theme: Theme, rows: Rows, ceilings: Rows) -> plt.Figure | None:
    """Everything measured against FLOPs a byte, a panel for each dtype, below the two ceilings."""
    rows = [row for row in usual(rows) if row.get("gb_per_s") and row["tflops"]]
    tops = {dtype: ceilings_of(ceilings, dtype) for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)}
    tops = {dtype: top for dtype, top in tops.items() if top}
    if not tops:
        return None
    figure, every = style.panels(theme, 1, len(tops), 4.2, sharey=True)
    labels = []
    for axes, (dtype, top) in zip(every[0], tops.items(), strict=True):
        of_dtype = [row for row in rows if row["dtype"] == dtype]
        intensity = [1000 * float(row["tflops"]) / float(row["gb_per_s"]) for row in of_dtype]
        ridge = 1000 * top[0] / top[1]
        xs = [min(*intensity, ridge / 4) / 1.3, ridge, max(*intensity, ridge * 2) * 1.3]
        ys = [min(top[0], x * top[1] / 1000) for x in xs]
        axes.plot(xs, ys, color=theme.grey, ls=DASHES, lw=1.3, zorder=2)[0].set_gid(f"roof-{dtype}")
        names = []
        for variant in variants_of(of_dtype):
            points = sorted(
                (x, float(row["tflops"]))
                for x, row in zip(intensity, of_dtype, strict=True)
                if row["variant"] == variant
            )
            xy = [a for a, _ in points], [b for _, b in points]
            colour, marker = style.colour(theme, variant), style.look(variant).marker
            axes.plot(*xy, ls="", color=colour, marker=marker, ms=4, alpha=0.85, zorder=3)[0].set_gid(
                f"{variant}-{dtype}"
            )
            names.append(Label(style.look(variant).name, colour, *xy))
        roofs = [
            Label(f"{top[1]:,.0f} GB/s", theme.grey, xs[:2], ys[:2]),
            Label(f"{top[0]:,.0f} TFLOP/s", theme.grey, xs[1:], ys[1:]),
        ]
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.margins(x=0.03, y=0.08)
        style.log_ticks(axes.xaxis, subs=(1,))
        style.title(axes, theme, dtype)
        labels.append((axes, names, roofs))
    style.log_ticks(axes.yaxis)
    style.beside(every[0][0], theme, "TFLOP/s")
    style.headline(figure, theme, "Attention below the roof of this GPU", style.gpu_of(rows))
    style.below(figure, theme, "floating-point operations for each byte that must be moved")
    style.margins(figure, left=0.75, top=0.68, bottom=0.5, across=1.55, right=1.4)
    for axes, names, roofs in labels:
        style.label_curves(axes, roofs)
        style.label_beside(axes, names, leaders=False)
    return figure


SPEEDS = ("verify_attention", "ceilings")
DRAWINGS = (
    Drawing(
        *("attention_error", ("attention_error",), draw_error),
        "Relative error of float32 attention against the number of keys, with the derived bounds (dashed), for logits "
        "of two spreads.",
    ),
    Drawing(
        *("attention_error_keys", ("attention_error",), draw_error_keys),
        "Error of each variant against the number of keys, by dtype: relative (Frobenius), and the largest in units of "
        "the last place of the largest result.",
    ),
    Drawing(
        *("attention_error_logits", ("attention_error",), draw_error_logits),
        "Error of each variant against the spread of the logits, by dtype.",
    ),
    Drawing(
        *("attention_speed", ("verify_attention",), draw_speed),
        "TFLOP/s at each shape, beside PyTorch's eager attention.",
    ),
    Drawing(
        *("attention_kv", SPEEDS),
        sweep("kv sweep", "prefix", "Attention against the length of the cache", "keys ahead of the tree"),
        "TFLOP/s and GB/s against the length of the cache. The roof is what the measured ceilings of matrix products "
        "and of copies allow for the operations and bytes of each shape.",
    ),
    Drawing(
        *("attention_nodes", SPEEDS),
        sweep("Q sweep", "Q", "Attention against the size of the tree", "nodes of a tree"),
        "TFLOP/s and GB/s against the number of nodes of a tree.",
    ),
    Drawing(
        *("attention_heads", SPEEDS),
        sweep("H sweep", "H", "Attention against the number of heads", "heads"),
        "TFLOP/s and GB/s against the number of heads.",
    ),
    Drawing(
        *("attention_batch", SPEEDS),
        sweep("B sweep", "B", "Attention against the size of the batch", "requests in the batch"),
        "TFLOP/s and GB/s against the number of requests.",
    ),
    Drawing(
        *("attention_pages", SPEEDS),
        sweep("page sweep", "page_size", "Attention against the size of a page of the cache", "keys of a page"),
        "TFLOP/s and GB/s against the size of a page of the cache.",
    ),
    Drawing(
        *("attention_roofline", SPEEDS, draw_roofline),
        "TFLOP/s of everything measured against the operations for each byte that must be moved, below the measured "
        "ceilings (dashed).",
    ),
)


if __name__ == "__main__":
    style.main("Draw errors and speed of attention.", DRAWINGS)
