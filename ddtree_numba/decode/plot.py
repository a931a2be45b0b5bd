"""A picture of a decoded batch: how many tokens the steps gave, and the first reply's last tree."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from ddtree_numba.decode.loop import Decoded


def plot(replies: list[Decoded], tokenizer: Any, path: str | os.PathLike[str]) -> None:
    """Write the picture; the ending of the path says which kind.

    Raises
    ------
    ImportError
        matplotlib is missing.
    OSError, ValueError
        The file cannot be written, or its ending is of no kind that matplotlib knows.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(1, 3))
    steps = Counter(run for reply in replies for run in reply.runs)
    sizes = range(1, max(steps, default=1) + 1)
    above.bar(sizes, [steps[size] for size in sizes], color="#0072B2")
    above.set(xlabel="tokens of a step", ylabel="steps", xticks=list(sizes))
    mean = sum(size * count for size, count in steps.items()) / max(steps.total(), 1)
    above.set_title(f"acceptance length {mean:.2f}", loc="left")
    above.spines[["top", "right"]].set_visible(False)
    if replies and replies[0].last_tree is not None:
        tree, request, accepted = replies[0].last_tree
        tree.plot(request, decode=lambda token: tokenizer.decode([token]), accepted=accepted, ax=below)
    figure.savefig(path)
