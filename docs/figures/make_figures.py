"""Draw the figures of the documentation: ``python docs/figures/make_figures.py [--out DIR]``. Needs matplotlib.

tree_verify: a draft tree, what each node sees, and the phases of the block that verifies one of them, in a light and a
dark version, as SVG and PNG. The tree comes from the best-first rule of `refs.trees`, the mask from
`ddtree_numba.mask_from_parents`, the accepted path from walking the target's choices; the scores are made up, and the
softmax is theirs.

draft_tree: what `DraftTree.plot` draws, of a tree that `ddtree_numba.build_tree` made of the same distributions.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the script runs from a plain checkout

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

import ddtree_numba as dd
from refs import trees

# A drafter's two best tokens of each of four positions, their probabilities, and what the target says.
CANDIDATES = (("cat", "dog"), ("sat", "ran"), ("on", "by"), ("the", "a"))
PROBABILITIES = ((0.60, 0.30), (0.65, 0.25), (0.60, 0.33), (0.70, 0.20))
ROOT = "The"
TARGET = ("cat", "sat", "by", "my")
TREE_BUDGET = 8
PREFIX = 5  # prefix keys drawn
NODE = 8  # the node whose block the right part shows

# Okabe and Ito's colours, which stay apart in every kind of colour vision.
BLUE, SKY, ORANGE, VERMILION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"


@dataclass(frozen=True)
class Theme:
    """Colours that differ between a light and a dark page."""

    name: str
    page: str
    text: str
    faint: str  # outlines, unseen cells
    unseen: str
    node: str
    prefix: str


THEMES = (
    Theme("light", page="#ffffff", text="#1f2328", faint="#afb8c1", unseen="#eff2f5", node="#ffffff", prefix=BLUE),
    Theme("dark", page="#0d1117", text="#e6edf3", faint="#57606a", unseen="#1b222b", node="#0d1117", prefix=SKY),
)


@dataclass(frozen=True)
class Data:
    """What the figure shows: tokens, parents and depths [Q], mask [Q, Q], accepted nodes, probabilities of `NODE`."""

    tokens: list[str]
    parents: np.ndarray
    depths: np.ndarray
    mask: np.ndarray
    accepted: list[int]
    scores: np.ndarray
    weights: np.ndarray


def make_data() -> Data:
    """Build the tree, its mask, the accepted path, and one row of scores with their softmax."""
    tree = trees.best_first_tree(np.log(np.array(PROBABILITIES, np.float32)), TREE_BUDGET)
    tokens = [ROOT] + [CANDIDATES[len(path) - 1][path[-1]] for path in tree["ranks"][1:]]
    parents = tree["parents"]
    mask = dd.mask_from_parents(parents)

    accepted = [0]
    for token in TARGET:
        children = [i for i in np.flatnonzero(parents == accepted[-1]) if tokens[i] == token]
        if not children:
            break
        accepted.append(int(children[0]))

    seen = np.concatenate([np.ones(PREFIX, np.bool_), mask[NODE]])
    scores = np.where(seen, np.random.default_rng(14).normal(0.0, 0.6, seen.size), -np.inf)
    weights = np.exp(scores - scores.max())
    return Data(tokens, parents, tree["depths"], mask, accepted, scores, weights / weights.sum())


def draw_tree(axes: Axes, data: Data, theme: Theme) -> None:
    """Nodes by depth from top to bottom; subtrees side by side."""
    place: dict[int, tuple[float, float]] = {}
    next_leaf = 0.0

    def settle(node: int) -> float:
        nonlocal next_leaf
        children = [int(i) for i in np.flatnonzero(data.parents == node)]
        if children:
            xs = [settle(child) for child in children]
            x = (xs[0] + xs[-1]) / 2
        else:
            x, next_leaf = next_leaf, next_leaf + 1
        place[node] = x, -float(data.depths[node])
        return x

    settle(0)
    for node, (x, y) in place.items():
        on_path = node in data.accepted
        if node:
            x0, y0 = place[int(data.parents[node])]
            colour, width = (VERMILION, 2.2) if on_path else (theme.faint, 1.1)
            axes.plot([x0, x], [y0 - 0.27, y + 0.27], color=colour, lw=width, zorder=1, solid_capstyle="round")
        edge, width = (VERMILION, 1.9) if on_path else (theme.faint, 1.1)
        box = FancyBboxPatch(
            (x - 0.37, y - 0.22),
            0.74,
            0.44,
            boxstyle="round,pad=0.03,rounding_size=0.14",
            fc=theme.node,
            ec=edge,
            lw=width,
        )
        axes.add_patch(box)
        axes.text(x + 0.05, y - 0.01, data.tokens[node], ha="center", va="center", fontsize=9, color=theme.text)
        axes.text(x - 0.33, y + 0.005, str(node), ha="left", va="center", fontsize=6.5, color=theme.text, alpha=0.75)
    x, y = place[data.accepted[-1]]
    axes.text(x + 0.52, y, "accepted path", color=VERMILION, fontsize=8.5, va="center", fontweight="bold")
    axes.set_xlim(-0.55, next_leaf - 0.45)
    axes.set_ylim(-4.5, 0.45)


def draw_mask(axes: Axes, data: Data, theme: Theme) -> None:
    """A row for each node, a column for each key: the prefix, a gap, the tree. Cells carry ids that a test reads."""
    num_nodes = len(data.tokens)
    gap = 0.6
    columns = [(j, True) for j in range(PREFIX)] + [(PREFIX + gap + j, False) for j in range(num_nodes)]
    for i in range(num_nodes):
        for k, (x, in_prefix) in enumerate(columns):
            seen = in_prefix or bool(data.mask[i, k - PREFIX])
            colour = (theme.prefix if in_prefix else ORANGE) if seen else theme.unseen
            cell = Rectangle((x + 0.07, -i - 0.93), 0.86, 0.86, fc=colour, ec="none")
            cell.set_gid(f"{'seen' if seen else 'unseen'}-{i}-{k}")
            axes.add_patch(cell)
        colour = VERMILION if i in data.accepted else theme.text
        axes.text(-0.35, -i - 0.5, data.tokens[i], ha="right", va="center", fontsize=8.5, color=colour)
        axes.text(-2.35, -i - 0.5, str(i), ha="right", va="center", fontsize=7, color=theme.text, alpha=0.75)
    right = PREFIX + gap + num_nodes
    frame = Rectangle((-0.03, -NODE - 1.03), right + 0.06, 1.06, fc="none", ec=theme.text, lw=1.1)
    axes.add_patch(frame)  # the row whose block the right part shows
    axes.text(PREFIX / 2, 0.3, "prefix", ha="center", va="bottom", fontsize=8.5, color=theme.prefix, fontweight="bold")
    axes.text(
        PREFIX + gap + num_nodes / 2,
        0.3,
        "tree",
        ha="center",
        va="bottom",
        fontsize=8.5,
        color=ORANGE,
        fontweight="bold",
    )
    for j in range(num_nodes):
        axes.text(
            PREFIX + gap + j + 0.5,
            -num_nodes - 0.12,
            str(j),
            ha="center",
            va="top",
            fontsize=7,
            color=theme.text,
            alpha=0.75,
        )
    axes.text(
        PREFIX / 2, -num_nodes - 0.2, "seen by all", ha="center", va="top", fontsize=7, color=theme.text, alpha=0.75
    )
    axes.set_xlim(-2.9, right + 0.12)
    axes.set_ylim(-num_nodes - 0.8, 0.95)
    axes.set_aspect(1.25)


def draw_phases(axes: Axes, data: Data, theme: Theme) -> None:
    """Three bands, one a phase: bars over the keys of `NODE`, their softmax, and the latent output."""
    gap = 0.6
    xs = [k + (gap if k >= PREFIX else 0.0) for k in range(len(data.scores))]
    width = xs[-1] + 1

    def bars(base: float, heights: np.ndarray) -> None:
        for k, (x, height) in enumerate(zip(xs, heights, strict=True)):
            if np.isneginf(data.scores[k]):
                axes.add_patch(Rectangle((x + 0.12, base - 0.03), 0.76, 0.06, fc=theme.faint, ec="none"))
                continue
            colour = theme.prefix if k < PREFIX else ORANGE
            axes.add_patch(Rectangle((x + 0.12, base), 0.76, height, fc=colour, ec="none"))

    def title(y: float, number: int, name: str, formula: str) -> None:
        axes.text(0, y, f"{number}  {name}", fontsize=8.5, fontweight="bold", color=theme.text, va="baseline")
        axes.text(width, y, formula, fontsize=8.5, color=theme.text, va="baseline", ha="right")

    def arrow(top: float, bottom: float) -> None:
        style = "-|>,head_length=3.5,head_width=2"
        axes.add_patch(
            FancyArrowPatch((width / 2, top), (width / 2, bottom), arrowstyle=style, color=theme.text, lw=1.1)
        )

    finite = np.where(np.isneginf(data.scores), 0.0, data.scores)
    title(9.0, 1, "scores", r"$s_k = (q \cdot row_k)\,\cdot\,scale$")
    bars(6.75, (finite - finite.min() + 0.25) / (np.ptp(finite) + 0.25) * 1.75)
    arrow(6.45, 5.75)
    title(5.2, 2, "softmax", r"$p_k = e^{s_k - m}\,/\,l$")
    bars(3.0, data.weights / data.weights.max() * 1.75)
    arrow(2.7, 2.0)
    title(1.4, 3, "latent output", r"$out = \Sigma_k\; p_k\, ckv_k$")
    shades = np.random.default_rng(3).uniform(0.15, 1.0, 16)
    for d, shade in enumerate(shades):
        x = d * width / len(shades)
        cell = Rectangle((x + 0.05, 0.1), width / len(shades) - 0.1, 0.75, fc=theme.text, ec="none", alpha=0.8 * shade)
        axes.add_patch(cell)
    axes.set_xlim(-0.2, width + 0.2)
    axes.set_ylim(-0.35, 9.75)


def draw(data: Data, theme: Theme) -> plt.Figure:
    """The whole figure, 9 inches wide: 900 px at 100 dpi."""
    figure = plt.figure(figsize=(9.0, 3.35), facecolor=theme.page)
    parts = (
        (draw_tree, (0.008, 0.29), "a draft tree"),
        (draw_mask, (0.325, 0.335), "what each node sees"),
        (draw_phases, (0.70, 0.285), f"one block: node {NODE}, one head"),
    )
    for part, (left, width), title in parts:
        axes = figure.add_axes((left, 0.02, width, 0.86), facecolor=theme.page)
        axes.set_axis_off()
        part(axes, data, theme)
        figure.text(left + width / 2, 0.94, title, ha="center", va="center", fontsize=10.5, color=theme.text)
    return figure


def draw_built(theme: Theme) -> plt.Figure:
    """A tree of the same candidates, built and drawn by the package."""
    logprobs = np.log(np.array([PROBABILITIES], np.float32))
    words = [word for pair in CANDIDATES for word in pair] + [ROOT]
    token_ids = np.arange(logprobs.size, dtype=np.int32).reshape(logprobs.shape)
    root = np.array([len(words) - 1], np.int32)
    tree = dd.build_tree(logprobs, token_ids, root, 13, variant="heap_numpy")
    accepted = [0]
    for target in TARGET:
        children = [i for i in np.flatnonzero(tree.parents[0] == accepted[-1]) if words[tree.tokens[0, i]] == target]
        accepted += children[:1]
    return tree.plot(decode=words.__getitem__, accepted=accepted, theme=theme.name).figure


def main(arguments: list[str] | None = None) -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description="Draw the figures of the documentation.")
    beside = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=beside, metavar="DIR", help="folder; default: beside this script")
    folder: Path = parser.parse_args(arguments).out
    folder.mkdir(parents=True, exist_ok=True)
    data = make_data()
    with matplotlib.rc_context({"svg.hashsalt": "ddtree_numba", "svg.fonttype": "path", "font.family": "DejaVu Sans"}):
        for theme in THEMES:
            for name, figure in (("tree_verify", draw(data, theme)), ("draft_tree", draw_built(theme))):
                figure.savefig(folder / f"{name}_{theme.name}.svg", metadata={"Date": None})
                figure.savefig(folder / f"{name}_{theme.name}.png", dpi=200, metadata={"Software": None})
                plt.close(figure)


if __name__ == "__main__":
    main()
