"""Draw where a step of decoding text spends its time: ``python profiling/plot_decode.py [--results DIR] [--out DIR]``.

decode_stages: for one request and for a batch, a bar for each mode: milliseconds of its stages, one behind the other,
and behind the bar what comes of it, tokens a step and tokens a second. Needs matplotlib.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import style
from matplotlib.patches import Patch
from style import Drawing, Rows, Theme

STAGES = {"draft": "purple", "build": "green", "verify": "blue", "accept": "vermilion"}  # and their colours


def draw(theme: Theme, rows: Rows) -> plt.Figure | None:
    """A panel for each batch size, a bar for each mode."""
    rows = [row for row in rows if all(row.get(f"{stage}_ms") for stage in STAGES)]
    batches = list(dict.fromkeys(row["B"] for row in rows))
    if not batches:
        return None
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, (every,) = style.panels(theme, 1, len(batches), 1.35 + 0.36 * len(modes), sharex=True, sharey=True)
    for axes, batch in zip(every, batches, strict=True):
        for row in (row for row in rows if row["B"] == batch):
            height, begin = modes.index(row["mode"]), 0.0
            for stage, colour in STAGES.items():
                time = float(row[f"{stage}_ms"])
                bar = axes.barh(height, time, left=begin, height=0.62, color=getattr(theme, colour), lw=0).patches[0]
                bar.set_gid(f"{batch}-{row['mode']}-{stage}")
                begin += time
            per_step = float(row["tokens"]) / float(row["steps"])
            said = f"{per_step:.1f} tokens a step, {float(row['tokens_per_second']):.0f} a second"
            axes.text(begin, height, f"  {said}", fontsize=8, color=theme.text, va="center")
        style.title(axes, theme, "one request" if batch == "1" else f"{batch} requests together")
        axes.grid(False)
    longest = max(sum(float(row[f"{stage}_ms"]) for stage in STAGES) for row in rows)
    every[0].set_xlim(0, 2.0 * longest)
    every[0].set_yticks(range(len(modes)), modes)
    every[0].set_ylim(len(modes) - 0.5, -0.5)
    style.headline(figure, theme, "A step of decoding text", style.gpu_of(rows))
    style.below(figure, theme, "milliseconds a step", x=0.6)
    style.margins(figure, left=1.15, top=0.68, bottom=0.45, across=0.3)
    figure.legend(
        handles=[Patch(color=getattr(theme, colour), lw=0, label=stage) for stage, colour in STAGES.items()],
        loc="center left",
        bbox_to_anchor=(0.0, 0.14 / figure.get_figheight()),
        ncols=len(STAGES),
        **{"fontsize": 8, "frameon": False, "labelcolor": theme.text, "handlelength": 1.0, "columnspacing": 1.0},
    )
    return figure


DRAWINGS = (
    Drawing(
        *("decode_stages", ("decode",), draw),
        "A step of decoding text in each mode, for one request and for a batch: its stages one behind the other, and "
        "the tokens that come of it.",
    ),
)


if __name__ == "__main__":
    style.main("Draw where a step of decoding text spends its time.", DRAWINGS)
