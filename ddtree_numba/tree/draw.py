"""One request's draft tree, as text for a terminal and as a picture.

Both show, for each node, the conditional probability of its token given its parent, ``exp(score - score of parent)``,
as the drafter has it. `text` adds the probability of the path from the root, ``exp(score)``. Both work on the host: the
arrays are copied there, which synchronizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree_numba.device import arrays
from ddtree_numba.tree.draft_tree import DraftTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot", "text"]


@dataclass(frozen=True)
class Drawn:
    """What is drawn: one request's n nodes, on the host and checked.

    tokens, parents, children and depths have an entry a node; so have `edges`, the conditional probabilities (the
    root's is 1), and `paths`, those from the root. NaN where the scores give none. `accepted` is without its padding.
    """

    tokens: list[int]
    parents: list[int]
    children: list[list[int]]
    depths: list[int]
    edges: list[float]
    paths: list[float]
    accepted: list[int]


def text(
    tree: DraftTree,
    request: int = 0,
    *,
    decode: Callable[[int], str] | None = None,
    accepted: Any = None,
    max_nodes: int | None = None,
) -> str:
    """One request's tree in the manner of the ``tree`` command: a line of headings, then a line a node.

    A line holds the conditional probability of the node's token given its parent, the probability of the path from the
    root, a ``*`` on accepted nodes, the branches, the node's index and its token. Children stand in ascending node
    order.

    Parameters
    ----------
    tree : DraftTree
        On a GPU or on the host.
    request : int
        Which request of the batch.
    decode : callable, optional
        Text of a token id. It is shown as Python writes a string, control characters escaped; without it, the id.
    accepted : int [n], optional
        Accepted nodes of this request, root first, padded with -1.
    max_nodes : int, optional
        Most nodes shown. The accepted ones come first, then those of the smallest indices, which in the builder's order
        are the likeliest; a last line counts those left out. Default: all.

    Returns
    -------
    str
        Lines without a line break behind the last.

    Raises
    ------
    TypeError
        ``tree`` is no `DraftTree`; ``request``, ``max_nodes`` or ``accepted`` are no integers; ``decode`` cannot be
        called or returns no str.
    ValueError
        ``request`` is no request of the tree, ``accepted`` no path from its root, or ``max_nodes`` below 1; a parent
        does not stand before its node, ``num_nodes`` is not 1..Q, or two arrays differ in shape; ``decode`` raised: its
        exception is the cause.
    """
    drawn = _read(tree, request, decode, accepted)
    num_nodes = len(drawn.parents)
    most = num_nodes if max_nodes is None else _integer("max_nodes", max_nodes, 1)
    path = set(drawn.accepted)
    # Any first part of this order holds the parents of its nodes.
    shown = set([*drawn.accepted, *(i for i in range(num_nodes) if i not in path)][:most])

    marks = accepted is not None
    lines = ["   edge     path  " + ("  node token  (* accepted)" if marks else "node token")]
    stack = [(0, "", "")]  # a node, what stands before it, what stands before its children
    while stack:
        node, before, below = stack.pop()
        edge = _percent(drawn.edges[node]) if node else ""
        mark = ("* " if node in path else "  ") if marks else ""
        token = drawn.tokens[node]
        label = str(token) if decode is None else repr(_decoded(decode, token))
        lines.append(f"{edge:>7}  {_percent(drawn.paths[node]):>7}  {mark}{before}{node} {label}")
        children = [child for child in drawn.children[node] if child in shown]
        for child in reversed(children):  # the stack turns them round
            branch, under = ("└─ ", "   ") if child == children[-1] else ("├─ ", "│  ")
            stack.append((child, below + branch, below + under))
    if len(shown) < num_nodes:
        lines.append(f"... {num_nodes - len(shown)} of {num_nodes} nodes left out")
    return "\n".join(lines)


# Okabe and Ito's vermilion, apart from grey in every kind of colour vision. The accepted path is also the thickest
# line, so that it shows in a grey print.
ACCEPTED = "#D55E00"


@dataclass(frozen=True)
class Theme:
    """Colours that differ between a light and a dark page."""

    page: str
    text: str  # and the edges
    outline: str  # of nodes with labels


THEMES = {
    "light": Theme(page="#ffffff", text="#1f2328", outline="#8c959f"),
    "dark": Theme(page="#0d1117", text="#e6edf3", outline="#6e7681"),
}

FONT = "DejaVu Sans"  # comes with matplotlib: the same picture everywhere
MISSING = "\N{WHITE SQUARE}"  # for characters which that font lacks
LONGEST_LABEL = 12  # characters
# In points:
NODE_SIZE, EDGE_SIZE, TITLE_SIZE = 9.0, 6.5, 9.0
BOX_PAD, LABEL_GAP = 3.2, 6.0
# In inches:
MARGIN = 0.15  # beside the outermost nodes
HEADROOM, FOOT = 0.55, 0.32  # from the root to the top, where the title is; from the deepest nodes to the bottom
LEAST_WIDTH, MOST_WIDTH, MOST_HEIGHT = 3.4, 18.0, 24.0
BARE_WIDTH = 0.13  # a node without label
LEAST_LEVEL = 0.62  # labels of full size need this much from one depth to the next
# Labels that would have to be smaller than this part of their size are left out.
LEAST_SCALE = 0.6
# Where on its curve the label of an edge stands: near the child, where curves are apart.
LABEL_AT = 0.75
# How far apart the labels of two edges are at least, as part of their children's distance: the curve's x there.
LABEL_SPREAD = LABEL_AT**2 * (3 - 2 * LABEL_AT)


@dataclass(frozen=True)
class Labels:
    """What stands on nodes and edges, an entry a node (the root's edge is empty), and each node's width in inches."""

    nodes: list[str]
    edges: list[str]
    widths: list[float]


@dataclass(frozen=True)
class Frame:
    """Axes in inches, what an inch of the layout is in them, and a depth, in inches."""

    width: float
    height: float
    across: float
    level: float


def plot(
    tree: DraftTree,
    request: int = 0,
    *,
    decode: Callable[[int], str] | None = None,
    accepted: Any = None,
    ax: Axes | None = None,
    theme: str = "light",
    max_labels: int = 80,
) -> Axes:
    """Draw one request's tree: the root on top, a level a depth, edges as thick as their tokens are probable.

    A node carries its token's text when there is a decoder, else its index (``decode=str`` shows token ids); an edge
    the conditional probability of the child's token. Labels are left out of trees above `max_labels` nodes, and where
    there is no room for them; the title says so.

    Parameters
    ----------
    tree : DraftTree
        On a GPU or on the host.
    request : int
        Which request of the batch.
    decode : callable, optional
        Text of a token id. Spaces are shown as an open box, control characters escaped, long texts cut.
    accepted : int [n], optional
        Accepted nodes of this request, root first, padded with -1. Their
        path is drawn in vermilion and thicker than any other.
    ax : matplotlib.axes.Axes, optional
        Where to draw; labels shrink to its size. Default: a new pyplot figure, sized by the tree.
    theme : str
        "light" or "dark".
    max_labels : int
        Most nodes of a tree with labels; 0 for none at all.

    Returns
    -------
    matplotlib.axes.Axes
        Each edge is a patch of gid ``edge-<parent>-<child>``; with labels, each node is a text of gid ``node-<index>``.

    Raises
    ------
    ImportError
        matplotlib is missing.
    TypeError
        As in `text`; also, ``ax`` is no Axes, or ``max_labels`` no integer.
    ValueError
        As in `text`; also, ``theme`` is neither, or ``max_labels`` below 0.

    Notes
    -----
    Subtrees stand side by side, each as wide as its labels need, a parent in the middle over its children. The same
    call draws the same figure; for the same bytes of SVG, set ``svg.hashsalt`` and save with
    ``metadata={"Date": None}``.
    """
    try:
        from matplotlib.axes import Axes
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error

    if theme not in THEMES:
        raise ValueError(f"theme is {theme!r}; it must be one of: {', '.join(THEMES)}")
    if ax is not None and not isinstance(ax, Axes):
        raise TypeError(f"ax is a {type(ax).__name__}; it must be a matplotlib Axes")
    most = _integer("max_labels", max_labels, 0)
    drawn = _read(tree, request, decode, accepted)
    size = None if ax is None else _size_of(ax)

    num_nodes = len(drawn.parents)
    title = f"{num_nodes} {'node' if num_nodes == 1 else 'nodes'}, depth {max(drawn.depths)}"
    labels = _labels(drawn, decode) if num_nodes <= most else None
    if labels is None:
        title += f"\nlabels left out above {most} nodes"
    elif _scale(_frame(drawn, _total_widths(drawn.children, labels.widths)[0], True, size)) < LEAST_SCALE:
        labels = None
        title += "\nlabels left out for want of room"
    widths = labels.widths if labels else [BARE_WIDTH] * num_nodes
    xs = layout(drawn.children, widths)
    frame = _frame(drawn, 2 * xs[0], labels is not None, size)

    colours = THEMES[theme]
    if ax is None:
        import matplotlib.pyplot as plt

        figure = plt.figure(figsize=(frame.width, frame.height), facecolor=colours.page)
        ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    _set_up(ax, drawn, xs, frame, colours, title)
    if labels:
        _draw_edges(ax, drawn, xs, colours, _scale(frame))
        _draw_labels(ax, drawn, xs, colours, labels, _scale(frame))
    else:  # the closer nodes stand, the thinner and smaller
        _draw_edges(ax, drawn, xs, colours, min(1.0, max(0.3, frame.across)))
        diameter = 72 * 0.6 * min(BARE_WIDTH * frame.across, frame.level)
        _draw_markers(ax, drawn, xs, colours, min(5.0, max(0.9, diameter)))
    return ax


def _total_widths(children: list[list[int]], widths: list[float]) -> list[float]:
    """Width of each node's subtree: its own, or that of its children side by side if they are wider."""
    totals = list(widths)
    for node in reversed(range(len(children))):  # children before their parent
        totals[node] = max(widths[node], sum(totals[child] for child in children[node]))
    return totals


def layout(children: list[list[int]], widths: list[float]) -> list[float]:
    """Middle of each node: subtrees side by side from 0 on, in ascending node order, a parent midway over its children.

    Nothing overlaps, since each node stays within its subtree's width. With equal widths this is the layout that counts
    leaves.

    Parameters
    ----------
    children : list of n lists
        Children of each node, whose indices are larger than the node's own.
    widths : list of n floats
        Room for each node.

    Returns
    -------
    list of n floats
        In the unit of ``widths``; the root's is half of the whole width.
    """
    totals = _total_widths(children, widths)
    xs = [totals[0] / 2] * len(children)
    for node, mine in enumerate(children):
        left = xs[node] - sum(totals[child] for child in mine) / 2
        for child in mine:
            xs[child] = left + totals[child] / 2
            left += totals[child]
    return xs


def _labels(drawn: Drawn, decode: Callable[[int], str] | None) -> Labels:
    nodes = [str(i) if decode is None else _printable(_decoded(decode, token)) for i, token in enumerate(drawn.tokens)]
    edges = ["", *(_short_percent(p) for p in drawn.edges[1:])]
    widths = []
    for node, edge in zip(nodes, edges, strict=True):
        box = _width(node, NODE_SIZE) + 2 * BOX_PAD / 72
        widths.append(max(box, _width(edge, EDGE_SIZE) / LABEL_SPREAD) + LABEL_GAP / 72)
    return Labels(nodes, edges, widths)


def _size_of(ax: Axes) -> tuple[float, float]:
    """Width and height in inches."""
    box = ax.get_window_extent().transformed(ax.figure.dpi_scale_trans.inverted())
    return float(box.width), float(box.height)


def _frame(drawn: Drawn, total: float, labelled: bool, size: tuple[float, float] | None) -> Frame:
    """Fit a layout of a total width into axes of a size, or choose the size."""
    depth = max(1, *drawn.depths)
    if size is None:
        width = min(MOST_WIDTH, max(LEAST_WIDTH, total + 2 * MARGIN))
        # Wide trees get higher levels, for flat curves are hard to follow.
        level = min(1.0, max(0.75 if labelled else 0.3, 0.35 * width / depth))
        height = min(MOST_HEIGHT, HEADROOM + FOOT + level * max(drawn.depths))
    else:
        width, height = size
    # A small tree is not pulled apart to fill wide axes; tiny axes leave no room, but a picture all the same.
    across = min((width - 2 * MARGIN) / total, 2.0 if labelled else 4.0)
    level = (height - HEADROOM - FOOT) / depth if max(drawn.depths) else LEAST_LEVEL
    return Frame(width, height, max(across, 1e-3), max(level, 1e-3))


def _scale(frame: Frame) -> float:
    """What part of their full size labels can have."""
    return min(1.0, frame.across, frame.level / LEAST_LEVEL)


def _set_up(ax: Axes, drawn: Drawn, xs: list[float], frame: Frame, colours: Theme, title: str) -> None:
    """The view, with the tree in the middle, and titles inside the axes."""
    half = frame.width / 2 / frame.across
    top = HEADROOM / frame.level
    ax.set_xlim(xs[0] - half, xs[0] + half)
    ax.set_ylim(top - frame.height / frame.level, top)
    ax.set_facecolor(colours.page)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    style: dict[str, Any] = {
        "y": 1.0,
        "pad": -8.0,
        "va": "top",
        "fontsize": TITLE_SIZE,
        "family": FONT,
        "usetex": False,
    }
    inset = MARGIN / 2 / frame.width
    ax.set_title(title, loc="left", x=inset, color=colours.text, **style)
    if drawn.accepted:
        count = len(drawn.accepted)
        name = f"accepted path: {count} {'node' if count == 1 else 'nodes'}"
        ax.set_title(name, loc="right", x=1 - inset, color=ACCEPTED, fontweight="bold", **style)


def _controls(x0: float, y0: float, x1: float, y1: float) -> tuple[tuple[float, float], tuple[float, float]]:
    """Inner control points of an edge's Bezier curve, which leaves and arrives upright."""
    return (x0, (y0 + y1) / 2), (x1, (y0 + y1) / 2)


def _place_of_label(drawn: Drawn, xs: list[float], child: int) -> tuple[float, float]:
    """The point of an edge's curve where its label stands."""
    parent, t = drawn.parents[child], LABEL_AT
    start, end = (xs[parent], -float(drawn.depths[parent])), (xs[child], -float(drawn.depths[child]))
    points = (start, *_controls(*start, *end), end)
    weights = ((1 - t) ** 3, 3 * (1 - t) ** 2 * t, 3 * (1 - t) * t**2, t**3)
    x, y = (sum(w * point[axis] for w, point in zip(weights, points, strict=True)) for axis in (0, 1))
    return x, y


def _draw_edges(ax: Axes, drawn: Drawn, xs: list[float], colours: Theme, thinning: float) -> None:
    """Curves, wider and darker with the conditional probability; those of the accepted path above all others."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    for child in range(1, len(xs)):
        parent = drawn.parents[child]
        start, end = (xs[parent], -drawn.depths[parent]), (xs[child], -drawn.depths[child])
        curve = Path([start, *_controls(*start, *end), end], [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
        strength = min(1.0, max(0.0, drawn.edges[child]))  # 0 for NaN
        if child in drawn.accepted:
            style = {"edgecolor": ACCEPTED, "linewidth": max(1.8, 3.4 * thinning), "zorder": 2}
        else:
            width = (0.6 + 1.6 * strength) * thinning
            style = {"edgecolor": colours.text, "alpha": 0.25 + 0.5 * strength, "linewidth": width, "zorder": 1}
        ax.add_patch(PathPatch(curve, fill=False, gid=f"edge-{parent}-{child}", **style))


def _draw_labels(ax: Axes, drawn: Drawn, xs: list[float], colours: Theme, labels: Labels, scale: float) -> None:
    """Boxes with the nodes' texts, and the edges' probabilities on patches of page."""
    # Token texts are no mathematics, whatever they hold.
    style: dict[str, Any] = {"ha": "center", "va": "center", "family": FONT, "parse_math": False, "usetex": False}
    for i, name in enumerate(labels.nodes):
        on_path = i in drawn.accepted
        box = {
            "boxstyle": f"round,pad={BOX_PAD / NODE_SIZE},rounding_size=0.35",
            "facecolor": colours.page,
            "edgecolor": ACCEPTED if on_path else colours.outline,
            "linewidth": (2.4 if on_path else 0.9) * scale,
        }
        size = NODE_SIZE * scale
        ax.text(
            xs[i],
            -drawn.depths[i],
            name,
            fontsize=size,
            color=colours.text,
            bbox=box,
            zorder=4,
            gid=f"node-{i}",
            **style,
        )
    behind = {"boxstyle": "square,pad=0.15", "facecolor": colours.page, "edgecolor": "none"}
    for i in range(1, len(xs)):
        x, y = _place_of_label(drawn, xs, i)
        size = EDGE_SIZE * scale
        ax.text(x, y, labels.edges[i], fontsize=size, color=colours.text, bbox=behind, zorder=3, **style)


def _draw_markers(ax: Axes, drawn: Drawn, xs: list[float], colours: Theme, size: float) -> None:
    """Discs of a size in points; accepted ones larger."""
    others = [i for i in range(len(xs)) if i not in drawn.accepted]
    for nodes, colour, diameter in ((others, colours.text, size), (drawn.accepted, ACCEPTED, max(3.0, 1.5 * size))):
        depths = [-drawn.depths[i] for i in nodes]
        ax.scatter([xs[i] for i in nodes], depths, s=diameter**2, color=colour, linewidths=0, zorder=4)


def _read(tree: DraftTree, request: int, decode: Any, accepted: Any) -> Drawn:
    """One request's nodes on the host, and every check that both drawings share."""
    if not isinstance(tree, DraftTree):
        raise TypeError(f"tree is a {type(tree).__name__}; it must be a DraftTree")
    if decode is not None and not callable(decode):
        raise TypeError(f"decode is a {type(decode).__name__}; it must be a function from a token id to its text")
    views = {name: arrays.view(name, getattr(tree, name)) for name in ("tokens", "parents", "scores", "num_nodes")}
    arrays.require_shape(views["tokens"], "[B, Q]", None, None)
    batch, room = views["tokens"].shape
    arrays.require_shape(views["parents"], "[B, Q]", batch, room)
    arrays.require_shape(views["scores"], "[B, Q]", batch, room)
    arrays.require_shape(views["num_nodes"], "[B]", batch)
    request = _integer("request", request)
    if not 0 <= request < batch:
        raise ValueError(f"request is {request}; it must be at least 0 and below {batch}, the number of requests")

    # Not DraftTree.to_host: the masks, by far the largest array, are not needed.
    host = {name: view.to_host()[request] for name, view in views.items()}
    num_nodes = int(host["num_nodes"])
    if not 1 <= num_nodes <= room:
        raise ValueError(f"num_nodes[{request}] is {num_nodes}; it must be 1..{room}, the root counted")
    parents: list[int] = host["parents"][:num_nodes].tolist()
    children: list[list[int]] = [[] for _ in parents]
    depths = [0] * num_nodes
    if parents[0] != -1:
        raise ValueError(f"parents[{request}, 0] is {parents[0]}; the root's must be -1")
    for i, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < i:  # so no cycle either
            raise ValueError(f"parents[{request}, {i}] is {parent}; it must be the index of an earlier node")
        children[parent].append(i)
        depths[i] = depths[parent] + 1
    scores = host["scores"][:num_nodes].astype(np.float64)
    with np.errstate(all="ignore"):  # a tree without probabilities is drawn too
        paths = np.exp(scores)
        edges = np.exp(scores - scores[np.maximum(parents, 0)])
    tokens = host["tokens"][:num_nodes].tolist()
    path = [] if accepted is None else _path(accepted, parents)
    return Drawn(tokens, parents, children, depths, edges.tolist(), paths.tolist(), path)


def _path(accepted: Any, parents: list[int]) -> list[int]:
    """The accepted nodes without their padding, checked to be a path from the root."""
    if isinstance(accepted, (list, tuple)):
        found = np.asarray(accepted) if accepted else np.zeros(0, np.int32)
    else:
        found = arrays.view("accepted", accepted).to_host()
    if found.dtype.kind not in "iu":
        raise TypeError(f"accepted has dtype {found.dtype}; it must hold integers")
    if found.ndim != 1:
        raise ValueError(f"accepted has shape {list(found.shape)}; it must be one request's row of node indices")
    nodes: list[int] = found.tolist()
    path = nodes[: nodes.index(-1)] if -1 in nodes else nodes
    if any(node != -1 for node in nodes[len(path) :]):
        raise ValueError(f"accepted is {nodes}; only -1 may stand behind a -1")
    for k, node in enumerate(path):
        if not 0 <= node < len(parents):
            raise ValueError(f"accepted[{k}] is {node}; the tree has {len(parents)} nodes")
        if k == 0 and node != 0:
            raise ValueError(f"accepted[0] is {node}; a path starts at the root, which is node 0")
        if k > 0 and parents[node] != path[k - 1]:
            raise ValueError(
                f"accepted[{k}] is {node}, whose parent is {parents[node]}, not accepted[{k - 1}] = {path[k - 1]}"
            )
    return path


def _integer(name: str, value: Any, least: int | None = None) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a {type(value).__name__}; it must be an integer") from None
    if least is not None and found < least:
        raise ValueError(f"{name} is {found}; it must be at least {least}")
    return found


def _decoded(decode: Callable[[int], str], token: int) -> str:
    try:
        found = decode(token)
    except Exception as error:
        raise ValueError(f"decode failed at token {token}: {type(error).__name__}: {error}") from error
    if not isinstance(found, str):
        raise TypeError(f"decode returned a {type(found).__name__} for token {token}; it must return a str")
    return found


def _percent(p: float) -> str:
    if math.isnan(p):
        return "?"
    return f"{100 * p:.1f}%" if p >= 0.0005 or p == 0 else f"{100 * p:.0e}%"


def _short_percent(p: float) -> str:
    """At most four characters below 1000%, for a picture."""
    if 0 < p < 0.0005:
        return "<.1%"
    return f"{100 * p:.0f}%" if p >= 0.0995 else _percent(p)


def _printable(text: str) -> str:
    """A token's text with every character in sight, one that the font has; cut where it is long."""
    from matplotlib.font_manager import findfont, get_font

    shown = "".join("␣" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in text) or "''"
    if len(shown) > LONGEST_LABEL:
        shown = shown[: LONGEST_LABEL - 1] + "…"
    glyphs = get_font(findfont(FONT)).get_charmap()
    return "".join(c if ord(c) in glyphs else MISSING for c in shown)


def _width(text: str, size: float) -> float:
    """Width of a text in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(family=FONT, size=size), ismath=False)
    return float(width) / 72
