"""Drawings of trees: the exact text, and pictures whose edges, labels and bytes are read back."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

from ddtree_numba.tree import draw
from ddtree_numba.tree.draft_tree import DraftTree


def make_tree(*requests, room=None):
    """DraftTree of requests (parents, tokens, conditional probabilities of the nodes behind the root)."""
    room = room or max(len(parents) for parents, _, _ in requests)
    batch, shape = len(requests), (len(requests), room)
    tokens, parents, links = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
    depths, scores = np.zeros(shape, np.int32), np.full(shape, -np.inf)
    num_nodes = np.array([len(above) for above, _, _ in requests], np.int32)
    for b, (above, names, probabilities) in enumerate(requests):
        n = len(above)
        tokens[b, :n], parents[b, :n], scores[b, 0] = names, above, 0.0
        for i in range(1, n):
            depths[b, i] = depths[b, above[i]] + 1
            scores[b, i] = scores[b, above[i]] + np.log(probabilities[i - 1])
    mask = np.zeros((batch, room, -(-room // 32)), np.uint32)
    return DraftTree(tokens, parents, depths, scores, num_nodes, mask, links, links, tokens, int(depths.max()))


def plain_tree(parents, probability=0.5):
    return make_tree((parents, list(range(len(parents))), [probability] * (len(parents) - 1)))


# 0 The -> 1 cat -> (2 sat -> (3 on), 5 ran), 4 dog
PARENTS, TOKENS, PROBABILITIES = [-1, 0, 1, 2, 0, 1], [7, 3, 0, 9, 4, 2], [0.6, 0.65, 0.93, 0.3, 0.25]
WORDS = {7: "The", 3: " cat", 0: " sat", 9: "\n", 4: "dog's", 2: "ran\x1b[0m"}
SMALL = make_tree((PARENTS, TOKENS, PROBABILITIES))
ACCEPTED = [0, 1, 2, -1, -1]

CHAIN = list(range(-1, 32))
STAR = [-1] + [0] * 64
LARGE = [-1] + [(i - 1) // 3 for i in range(1, 1025)]


# Text


def test_text():
    assert draw.text(SMALL) == "\n".join(
        [
            "   edge     path  node token",
            "          100.0%  0 7",
            "  60.0%    60.0%  ├─ 1 3",
            "  65.0%    39.0%  │  ├─ 2 0",
            "  93.0%    36.3%  │  │  └─ 3 9",
            "  25.0%    15.0%  │  └─ 5 2",
            "  30.0%    30.0%  └─ 4 4",
        ]
    )


def test_text_decoded_with_the_accepted_path():
    assert draw.text(SMALL, decode=WORDS.__getitem__, accepted=ACCEPTED) == "\n".join(
        [
            "   edge     path    node token  (* accepted)",
            "          100.0%  * 0 'The'",
            "  60.0%    60.0%  * ├─ 1 ' cat'",
            "  65.0%    39.0%  * │  ├─ 2 ' sat'",
            r"  93.0%    36.3%    │  │  └─ 3 '\n'",
            r"  25.0%    15.0%    │  └─ 5 'ran\x1b[0m'",
            '''  30.0%    30.0%    └─ 4 "dog's"''',
        ]
    )


def test_text_cut_keeps_the_accepted_path():
    assert draw.text(SMALL, accepted=[0, 1, 5], max_nodes=4) == "\n".join(
        [
            "   edge     path    node token  (* accepted)",
            "          100.0%  * 0 7",
            "  60.0%    60.0%  * └─ 1 3",
            "  65.0%    39.0%       ├─ 2 0",
            "  25.0%    15.0%  *    └─ 5 2",
            "... 2 of 6 nodes left out",
        ]
    )
    assert draw.text(SMALL, accepted=[0, 1, 5], max_nodes=1).splitlines()[1:] == [
        "          100.0%  * 0 7",
        "... 5 of 6 nodes left out",
    ]
    assert draw.text(SMALL, max_nodes=6) == draw.text(SMALL)


def test_text_of_another_request_and_its_padding():
    tree = make_tree((PARENTS, TOKENS, PROBABILITIES), ([-1, 0], [0, 5], [0.25]), ([-1], [4], []), room=40)
    assert draw.text(tree, 1).splitlines()[1:] == ["          100.0%  0 0", "  25.0%    25.0%  └─ 1 5"]
    assert draw.text(tree, np.int64(2)).splitlines()[1:] == ["          100.0%  0 4"]
    assert draw.text(tree) == draw.text(SMALL)


def test_text_of_small_and_of_missing_probabilities():
    tree = make_tree(([-1, 0, 0, 0, 0], range(5), [3e-6, 0.0006, 0.5, 0.5]))
    tree.scores[0, 3], tree.scores[0, 4] = -np.inf, np.nan
    shown = [re.findall(r"\S*%|\?", line) for line in draw.text(tree).splitlines()[2:]]
    assert shown == [["3e-04%"] * 2, ["0.1%"] * 2, ["0.0%"] * 2, ["?"] * 2]


@pytest.mark.parametrize("parents", (CHAIN, STAR, LARGE, list(range(-1, 1024))), ids=("chain", "star", "large", "deep"))
def test_text_has_a_line_for_each_node(parents):
    lines = draw.text(plain_tree(parents)).splitlines()[1:]
    assert sorted(int(re.search(r"(\d+) \d+$", line)[1]) for line in lines) == list(range(len(parents)))
    if parents is STAR:
        assert lines[-1].endswith("└─ 64 64")
        assert all("├─" in line for line in lines[1:-1])


@st.composite
def random_parents(draw_from):
    size = draw_from(st.integers(1, 40))
    return [-1] + [draw_from(st.integers(0, i - 1)) for i in range(1, size)]


@given(random_parents(), st.integers(1, 45))
@settings(deadline=None, max_examples=50)
def test_the_branches_of_the_text_tell_the_parents(parents, max_nodes):
    lines = draw.text(plain_tree(parents), max_nodes=max_nodes).splitlines()[1:]
    if max_nodes < len(parents):
        assert lines.pop() == f"... {len(parents) - max_nodes} of {len(parents)} nodes left out"
    found, above, order = {}, [], {}
    for line in lines:
        branches, node = re.fullmatch(r".{16}  ([│├└─ ]*)(\d+) \d+", line).groups()
        depth = len(branches) // 3
        above[depth:] = [int(node)]
        found[int(node)] = above[depth - 1] if depth else -1
        order.setdefault(found[int(node)], []).append(int(node))
    assert found == dict(enumerate(parents[:max_nodes]))
    assert all(children == sorted(children) for children in order.values())


# Pictures


@pytest.fixture
def plt():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def edges_of(ax):
    return {
        tuple(map(int, patch.get_gid().split("-")[1:])): patch
        for patch in ax.patches
        if (patch.get_gid() or "").startswith("edge-")
    }


def nodes_of(ax):
    return {int(t.get_gid()[5:]): t for t in ax.texts if (t.get_gid() or "").startswith("node-")}


def svg(ax):
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "x", "svg.fonttype": "path"}):
        ax.figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def children_of(parents):
    return [[i for i, parent in enumerate(parents) if parent == node] for node in range(len(parents))]


@given(random_parents(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_layout(parents, random):
    children = children_of(parents)
    depths = [0] * len(parents)
    for i, parent in enumerate(parents[1:], start=1):
        depths[i] = depths[parent] + 1
    widths = [random.choice([0.5, 1.0, 4.0]) for _ in parents]
    xs = draw.layout(children, widths)
    for i, j in itertools.combinations(range(len(parents)), 2):
        if depths[i] == depths[j]:
            assert abs(xs[i] - xs[j]) >= (widths[i] + widths[j]) / 2 - 1e-9
        if parents[i] == parents[j]:
            assert xs[i] < xs[j]
    for i, width in enumerate(widths):
        assert -1e-9 <= xs[i] - width / 2 <= xs[i] + width / 2 <= 2 * xs[0] + 1e-9
        if children[i]:
            assert xs[children[i][0]] <= xs[i] <= xs[children[i][-1]]

    # With one width for all, leaves are counted and parents stand midway over theirs.
    xs = draw.layout(children, [1.0] * len(parents))
    leaves = sorted((xs[i], i) for i in range(len(parents)) if not children[i])
    assert [x for x, _ in leaves] == [k + 0.5 for k in range(len(leaves))]
    for i in range(len(parents)):
        below = [x for x, leaf in leaves if i in ancestors(parents, leaf)]
        assert xs[i] == pytest.approx((below[0] + below[-1]) / 2)


def ancestors(parents, node):
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found


@pytest.mark.parametrize("parents", (PARENTS, CHAIN, STAR, LARGE), ids=("small", "chain", "star", "large"))
@pytest.mark.parametrize("theme", ("light", "dark"))
def test_every_edge_is_drawn_once_and_joins_its_nodes(plt, parents, theme):
    ax = draw.plot(plain_tree(parents), theme=theme)
    gids = [patch.get_gid() for patch in ax.patches]
    assert sorted(gids) == sorted(f"edge-{parent}-{child}" for child, parent in enumerate(parents) if parent >= 0)
    ends = {}
    for (parent, child), patch in edges_of(ax).items():
        vertices = patch.get_path().vertices
        for node, place in ((parent, vertices[0]), (child, vertices[-1])):
            assert ends.setdefault(node, tuple(place)) == tuple(place)
        assert vertices[-1][1] == vertices[0][1] - 1
    assert len(set(ends.values())) == len(parents)
    for node, label in nodes_of(ax).items():
        assert label.get_position() == ends[node]
    ax.figure.canvas.draw()
    left, right = ax.get_xlim()
    bottom, top = ax.get_ylim()
    assert all(left < x < right and bottom < y < top for x, y in ends.values())
    xs = [x for x, _ in ends.values()]
    if parents is STAR:
        assert min(xs) - left == pytest.approx(right - max(xs), rel=0.05)  # 1 is narrower than 64


def test_labels(plt):
    ax = draw.plot(SMALL)
    assert {i: label.get_text() for i, label in nodes_of(ax).items()} == {i: str(i) for i in range(6)}
    assert sorted(t.get_text() for t in ax.texts if t.get_gid() is None) == ["25%", "30%", "60%", "65%", "93%"]
    assert ax.get_title(loc="left") == "6 nodes, depth 3"
    assert ax.get_title(loc="right") == ""
    ids = nodes_of(draw.plot(SMALL, decode=str))
    assert [ids[i].get_text() for i in range(6)] == [str(token) for token in TOKENS]
    words = nodes_of(draw.plot(SMALL, decode=WORDS.__getitem__))
    assert [words[i].get_text() for i in range(6)] == ["The", "␣cat", "␣sat", r"\n", "dog's", r"ran\x1b[0m"]


def test_any_token_text_can_be_drawn(plt):
    texts = ["$", "$x", "$x^{$", r"\frac{", "猫", "\ud800", "\u202e", "", "a\tb", "{", "�", "x" * 50, "%", "&<>", "🦊"]
    ax = draw.plot(plain_tree([-1] + [0] * (len(texts) - 1)), decode=texts.__getitem__)
    svg(ax)
    shown = [label.get_text() for _, label in sorted(nodes_of(ax).items())]
    assert shown == [
        *("$", "$x", "$x^{$", r"\frac{", "□", r"\ud800", r"\u202e", "''", r"a\tb", "{", "�"),
        *("x" * 11 + "…", "%", "&<>", "□"),
    ]


@pytest.mark.parametrize("theme", ("light", "dark"))
@pytest.mark.parametrize("max_labels", (80, 0))
def test_the_accepted_path_stands_out(plt, theme, max_labels):
    ax = draw.plot(SMALL, accepted=np.array(ACCEPTED, np.int32), theme=theme, max_labels=max_labels)
    edges = edges_of(ax)
    on_path = {(0, 1), (1, 2)}
    others = set(edges) - on_path
    assert len(others) == 3
    assert {edges[e].get_edgecolor() for e in on_path}.isdisjoint(edges[e].get_edgecolor() for e in others)
    # In a grey print the width tells.
    assert min(edges[e].get_linewidth() for e in on_path) > 1.4 * max(edges[e].get_linewidth() for e in others)
    assert ax.get_title(loc="right") == "accepted path: 3 nodes"
    boxes = {i: label.get_bbox_patch().get_linewidth() for i, label in nodes_of(ax).items()}
    if max_labels:
        assert min(boxes[i] for i in (0, 1, 2)) > 2 * max(boxes[i] for i in (3, 4, 5))
    else:
        assert [len(collection.get_offsets()) for collection in ax.collections] == [3, 3]


def test_probable_edges_are_thicker(plt):
    edges = edges_of(draw.plot(SMALL))
    order = sorted(edges, key=lambda e: PROBABILITIES[e[1] - 1])
    widths, alphas = ([getattr(edges[e], get)() for e in order] for get in ("get_linewidth", "get_alpha"))
    assert widths == sorted(set(widths))
    assert alphas == sorted(set(alphas))


def test_themes_differ(plt):
    light, dark = (draw.plot(SMALL, theme=theme) for theme in ("light", "dark"))
    assert sum(light.figure.get_facecolor()[:3]) == 3.0
    assert sum(dark.figure.get_facecolor()[:3]) < 0.5
    assert nodes_of(light)[0].get_color() != nodes_of(dark)[0].get_color()


# A tree of 65 nodes as builders make them: a few chains, many short branches.
BUSHY = [-1, *[0] * 6, *[1] * 6, *[2] * 4, *[7] * 6, 8, 8, 9, 13, 13, *[17] * 5, *[23] * 3, *range(23, 53)]


@pytest.mark.parametrize("parents", (PARENTS, CHAIN, BUSHY), ids=("small", "chain", "bushy"))
@pytest.mark.parametrize("wide", (False, True))
def test_labels_do_not_overlap(plt, parents, wide):
    texts = [" understanding", "a", "on", "<|im_end|>"] if wide else ["a"]
    ax = draw.plot(plain_tree(parents), decode=lambda token: texts[token % len(texts)])
    ax.figure.canvas.draw()
    assert len(nodes_of(ax)) == len(parents)
    boxes = [label.get_bbox_patch().get_window_extent() for label in nodes_of(ax).values()]
    boxes += [t.get_window_extent() for t in ax.texts if t.get_gid() is None]
    boxes += [t.get_window_extent() for t in (ax.title, ax._left_title, ax._right_title) if t.get_text()]
    assert len(boxes) == 2 * len(parents)
    for a, b in itertools.combinations(boxes, 2):
        assert not a.overlaps(b)
    assert all(ax.bbox.x0 < box.x0 < box.x1 < ax.bbox.x1 and ax.bbox.y0 < box.y0 < box.y1 < ax.bbox.y1 for box in boxes)


def test_labels_are_left_out_of_large_trees(plt):
    ax = draw.plot(plain_tree(LARGE))
    assert not ax.texts
    assert ax.get_title(loc="left") == "1025 nodes, depth 6\nlabels left out above 80 nodes"
    small = draw.plot(SMALL, max_labels=5)
    assert not small.texts
    assert small.get_title(loc="left").endswith("labels left out above 5 nodes")
    assert small.collections[0].get_sizes()[0] > ax.collections[0].get_sizes()[0]
    assert len(ax.collections[0].get_offsets()) == 1025
    for axes in (ax, small):
        assert max(axes.figure.get_size_inches()) <= 24


def test_labels_are_left_out_where_there_is_no_room(plt):
    ax = draw.plot(plain_tree(STAR), decode=lambda token: "understanding")
    assert not ax.texts
    assert ax.get_title(loc="left") == "65 nodes, depth 1\nlabels left out for want of room"


def test_the_callers_axes(plt):
    figure, axes = plt.subplots(1, 3, figsize=(12, 4), width_ratios=(8, 3, 0.001))
    sizes = []
    for ax in axes:
        assert draw.plot(SMALL, decode=WORDS.__getitem__, ax=ax) is ax
        assert len(edges_of(ax)) == 5
        sizes += [label.get_fontsize() for label in nodes_of(ax).values()][:1]
    figure.canvas.draw()
    assert plt.get_fignums() == [figure.number]
    assert sizes[0] >= sizes[1]
    assert not axes[2].texts


@pytest.mark.parametrize("parents", (PARENTS, LARGE), ids=("small", "large"))
def test_the_same_call_gives_the_same_bytes(plt, parents):
    first, second = (svg(draw.plot(plain_tree(parents), accepted=[0, 1])) for _ in range(2))
    assert first == second
    assert first != svg(draw.plot(plain_tree(parents), accepted=[0]))


def test_the_users_settings_do_not_reach_token_texts(plt):
    with plt.rc_context({"text.parse_math": True, "font.family": "serif", "axes.titlelocation": "right"}):
        ax = draw.plot(SMALL, decode=lambda token: "$\\x$")
        svg(ax)
        assert {label.get_fontfamily()[0] for label in nodes_of(ax).values()} == {"DejaVu Sans"}


def test_improbable_scores_are_drawn(plt):
    tree = make_tree(([-1, 0, 0, 0, 0], range(5), [3e-6, 0.05, 0.5, 0.5]))
    tree.scores[0, 3:] = np.nan, 800.0
    ax = draw.plot(tree)
    assert [t.get_text() for t in ax.texts if t.get_gid() is None] == ["<.1%", "5.0%", "?", "inf%"]
    svg(ax)


def test_plot_names_the_extra_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        draw.plot(SMALL)


def test_arrays_on_the_device():
    arrays = {field.name: getattr(SMALL, field.name) for field in dataclasses.fields(SMALL)}
    there = {name: cuda.to_device(x) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
    accepted = cuda.to_device(np.array([ACCEPTED], np.int32))[0]
    assert draw.text(DraftTree(**there), accepted=accepted) == draw.text(SMALL, accepted=ACCEPTED)


# Errors of both


def changed(**arrays):
    return dataclasses.replace(SMALL, **{name: np.asarray(x) for name, x in arrays.items()})


def int32(*values):
    return np.array([values], np.int32)


def fail(token):
    raise KeyError(token)


ERRORS = [
    (dict(tree=[1]), TypeError, "tree is a list; it must be a DraftTree"),
    (dict(request=1), ValueError, "request is 1; it must be at least 0 and below 1"),
    (dict(request=-1), ValueError, "request is -1; "),
    (dict(request=0.0), TypeError, "request is a float; it must be an integer"),
    (dict(decode={}), TypeError, "decode is a dict; "),
    (dict(decode=lambda token: b"x"), TypeError, "decode returned a bytes for token 7; it must return a str"),
    (dict(decode=fail), ValueError, "decode failed at token 7: KeyError: 7"),
    (dict(accepted=[1]), ValueError, "accepted[0] is 1; a path starts at the root"),
    (dict(accepted=[0, 2]), ValueError, "accepted[1] is 2, whose parent is 1, not accepted[0] = 0"),
    (dict(accepted=[0, 1, 1]), ValueError, "accepted[2] is 1, whose parent is 0, not accepted[1] = 1"),
    (dict(accepted=[0, 6]), ValueError, "accepted[1] is 6; the tree has 6 nodes"),
    (dict(accepted=[0, -2]), ValueError, "accepted[1] is -2; "),
    (dict(accepted=[0, -1, 1]), ValueError, "only -1 may stand behind a -1"),
    (dict(accepted=[[0, 1]]), ValueError, "accepted has shape [1, 2]; it must be one request's row"),
    (dict(accepted=[0.0, 1.0]), TypeError, "accepted has dtype float64; it must hold integers"),
    (dict(accepted="01"), TypeError, "accepted is a builtins.str; "),
    (
        dict(tree=changed(parents=int32(-1, 2, 1, 0, 0, 0))),
        ValueError,
        "parents[0, 1] is 2; it must be the index of an",
    ),
    (dict(tree=changed(parents=int32(-1, 0, 2, 0, 0, 0))), ValueError, "parents[0, 2] is 2; "),
    (dict(tree=changed(parents=int32(-1, 0, -1, 0, 0, 0))), ValueError, "parents[0, 2] is -1; "),
    (dict(tree=changed(parents=int32(0, 0, 1, 2, 0, 1))), ValueError, "parents[0, 0] is 0; the root's must be -1"),
    (dict(tree=changed(parents=int32(-1, 0))), ValueError, "parents has shape [1, 2]; it must be [B, Q] = [1, 6]"),
    (dict(tree=changed(num_nodes=np.array([0], np.int32))), ValueError, "num_nodes[0] is 0; it must be 1..6"),
    (dict(tree=changed(num_nodes=np.array([7], np.int32))), ValueError, "num_nodes[0] is 7; it must be 1..6"),
    (dict(tree=changed(tokens=np.zeros(6, np.int32))), ValueError, "tokens has shape [6]; "),
]


@pytest.mark.parametrize("function", (draw.text, draw.plot), ids=("text", "plot"))
@pytest.mark.parametrize("arguments, exception, message", ERRORS, ids=[message for *_, message in ERRORS])
def test_errors(plt, function, arguments, exception, message):
    with pytest.raises(exception, match=re.escape(message)):
        function(**{"tree": SMALL} | arguments)
    assert not plt.get_fignums()


def test_errors_of_one(plt):
    for function, arguments, exception, message in (
        (draw.text, dict(max_nodes=0), ValueError, "max_nodes is 0; it must be at least 1"),
        (draw.text, dict(max_nodes="3"), TypeError, "max_nodes is a str; it must be an integer"),
        (draw.plot, dict(max_labels=-1), ValueError, "max_labels is -1; it must be at least 0"),
        (draw.plot, dict(theme="grey"), ValueError, "theme is 'grey'; it must be one of: light, dark"),
        (draw.plot, dict(ax=plt), TypeError, "ax is a module; it must be a matplotlib Axes"),
    ):
        with pytest.raises(exception, match=re.escape(message)):
            function(SMALL, **arguments)


def test_the_decoders_error_is_the_cause():
    with pytest.raises(ValueError) as caught:
        draw.text(SMALL, decode=fail)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("accepted", ([], (), [-1, -1], np.full(4, -1)), ids=repr)
def test_nothing_accepted(plt, accepted):
    assert "*" not in "".join(draw.text(SMALL, accepted=accepted).splitlines()[1:])
    assert draw.plot(SMALL, accepted=accepted).get_title(loc="right") == ""
