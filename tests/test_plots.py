"""Figures show what their CSV files hold, say which these are, and the committed ones show the committed measurements.

Where nothing is measured yet, made-up numbers stand in for it here; no figure of them is kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
RESULTS = ROOT / "profiling" / "results" / "nvidia-h200"
sys.path.insert(0, str(ROOT / "profiling"))

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import plot_accept  # noqa: E402
import plot_attention  # noqa: E402
import plot_decode  # noqa: E402
import plot_launch  # noqa: E402
import plot_pipeline  # noqa: E402
import plot_speedup  # noqa: E402
import plot_trees  # noqa: E402
import report  # noqa: E402
import style  # noqa: E402
import tables  # noqa: E402
from matplotlib.text import Text  # noqa: E402
from PIL import Image  # noqa: E402  # comes with matplotlib

from ddtree_numba.attention import clocks  # noqa: E402

SCRIPTS = (plot_trees, plot_attention, plot_accept, plot_decode, plot_speedup, plot_launch, plot_pipeline)
DRAWINGS = {drawing.name: drawing for script in SCRIPTS for drawing in script.DRAWINGS}
each_drawing = pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)

MACHINE = {"gpu": "some GPU", "cpu": "some CPU", "driver": "1.2", "torch": "2", "commit": 40 * "a", "right": True}
MACHINE |= {"sm_clock_mhz": 1980, "python": "3", "numpy": "2", "numba_cuda": "0.30", "repeats": 30, "note": ""}


# Made-up results, of the shape that the benchmarks write


def write(path, rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    tables.write_rows(path, [MACHINE | row for row in rows], [*names, *(name for name in MACHINE if name not in names)])


def ceilings():
    rows = [{"operator": "copy", "case": "1024 MiB", "dtype": "", "gb_per_s": 4300}]
    for dtype, tflops in (("bfloat16", 790), ("float32", 52)):
        rows.append({"operator": "matmul", "case": "8192^3", "dtype": dtype, "tflops": tflops})
    return [{"variant": "torch", "microseconds": 500, "spread_microseconds": 1, **row} for row in rows]


PEAKS = {  # of a variant: TFLOP/s it comes near, microseconds a call takes at least
    **{
        "flash": (33, 15),
        "mma": (300, 14),
        "three_phase": (4, 12),
        "torch_eager": (70, 60),
        "torch_compiled": (380, 50),
    },
    **{"torch_sdpa": (115, 15), "torch_flex": (52, 50), "triton": (240, 12), "flashinfer": (430, 25)},
    "flashmla": (650, 22),
}
SWEEPS = {
    "kv sweep": ("prefix", (128, 512, 2048, 8192, 32768, 131072)),
    "Q sweep": ("Q", (1, 4, 9, 17, 65)),
    "H sweep": ("H", (8, 16, 32, 64, 128)),
    "B sweep": ("B", (1, 4, 16, 64)),
    "page sweep": ("page_size", (16, 32, 64, 128)),
}


def attention_row(case, variant, dtype, **sizes):
    sizes = {"B": 8, "H": 64, "Q": 9, "prefix": 2048, "page_size": ""} | sizes
    keys = sizes["prefix"] + sizes["Q"]
    flops = 2 * sizes["B"] * sizes["H"] * sizes["Q"] * keys * 1088
    nbytes = (4 if dtype == "float32" else 2) * sizes["B"] * (keys * 576 + sizes["Q"] * sizes["H"] * 1088)
    peak, least = PEAKS[variant]
    peak = min(peak, 45) if dtype == "float32" else peak
    microseconds = least + flops / peak / 1e6 + nbytes / 4e6
    row = {"case": case, **sizes, "dtype": dtype, "variant": variant, "splits": "even" if variant == "flash" else ""}
    row |= {"tiles": "", "rel_frobenius": 1e-6, "max_abs": 1e-6, "lse_error": 1e-7, "bound": 2e-6}
    row |= {
        "microseconds": f"{microseconds:.1f}",
        "spread_microseconds": 1,
        "tflops": f"{flops / microseconds / 1e6:.3f}",
    }
    row |= {
        "gb_per_s": f"{nbytes / microseconds / 1e3:.1f}",
        "graph_us": f"{microseconds - 3:.1f}",
        "host_us": least + 90,
    }
    return row | {"sustained_us": f"{1.1 * microseconds:.1f}", "sustained_mhz": 1500, "sustained_w": 690}


def attention():
    rows = [
        attention_row(case, variant, dtype, **{x: size})
        for case, (x, sizes) in SWEEPS.items()
        for size in sizes
        for dtype in ("float32", "bfloat16")
        for variant in PEAKS
        if not (variant == "three_phase" and x == "prefix" and size > 10000)
        and not (dtype == "float32" and variant in ("flashinfer", "flashmla", "mma"))
    ]
    for dtype in ("float32", "bfloat16"):
        for prefix in (37, 40000):
            rows += [
                attention_row("logit std 2", v, dtype, prefix=prefix) for v in ("flash", "three_phase", "torch_eager")
            ]
    return rows


def errors():
    rows = []
    for dtype, size in (("float32", 1e-7), ("float16", 4e-4), ("bfloat16", 3e-3)):
        for n, variant in enumerate(("flash", "three_phase", "torch_eager", "triton", "naive")):
            for keys in (16, 64, 256, 1024, 4096, 16384, 65536, 131072):
                for std in (0.02, 0.1, 0.5, 1, 2, 4, 8, 16):
                    if std not in (0.02, 2) and keys != 4096:
                        continue
                    error = size * (1 + n) * (1 + 0.4 * std) * keys ** (0.02 * n)
                    row = {"keys": keys, "logit_std": f"{std:g}", "dtype": dtype, "variant": variant}
                    row |= {"rel_frobenius": f"{error:.3e}", "max_ulp": f"{error / size * 3:.2f}"}
                    rows.append(row | {"bound": "" if variant in ("torch_eager", "triton") else f"{error * 5:.3e}"})
    return rows


def tree_rows():
    rows = []

    def add(operator, inputs, microseconds, **sizes):
        known = {"operator": operator, "inputs": inputs, "B": "", "L": 15, "V": "", "K": "", "budget": ""} | sizes
        for variant, time in microseconds.items():
            row = known | {"variant": variant, "checked": "all", "microseconds": f"{time:.1f}"}
            row |= {} if "cpu" in variant else {"graph_us": f"{time - 2:.1f}", "host_us": 300, "gb_per_s": 50}
            rows.append(row)

    def builds(inputs, batch, length, k, budget):
        times = {"frontier": 6 + budget * 0.28 * max(1, batch / 264), "cpu_heap": (60 + 3.5 * budget) * batch}
        times |= {"heap": 4 + 2.0 * budget} if budget <= 256 and batch <= 64 else {}
        scale = (k / budget) ** 0.2 * (length / 15) ** 0.3
        add("build_tree", inputs, {v: t * scale for v, t in times.items()}, B=batch, L=length, K=k, budget=budget)

    for budget in (16, 64, 256, 1024):
        for batch in (1, 8, 64, 256, 1024):
            builds("float32 logits", batch, 15, budget, budget)
    for budget in (1, 4, 32, 128, 512, 2048):
        builds("float32 logits, budget sweep", 1, 15, budget, budget)
    for k in (1, 4, 16, 256):
        builds("float32 logits, K sweep", 64, 15, k, 64)
    for length in (1, 3, 7, 31):
        builds("float32 logits, L sweep", 64, length, 64, 64)

    def topk(inputs, batch, length, vocabulary, k):
        time = batch * length * vocabulary * 2 / 4e6 + 0.02 * k
        times = {"threshold": 30 + time, "torch_topk": 90 + 5 * time, "torch_eager": 200 + 9 * time}
        add("topk_logprobs", inputs, times, B=batch, L=length, V=vocabulary, K=k)

    topk("bfloat16", 8, 15, 163840, 64)
    for vocabulary in (8192, 32000, 65536, 128256, 262144):
        topk("bfloat16, V sweep", 8, 15, vocabulary, 64)
    for batch in (2, 4, 16, 32, 64):
        topk("bfloat16, B sweep", batch, 15, 163840, 64)
    for length in (1, 4, 31):
        topk("bfloat16, L sweep", 8, length, 163840, 64)
    for k in (1, 4, 32, 128, 512):
        topk("bfloat16, K sweep", 8, 15, 163840, k)
    add(
        "chain",
        "bfloat16",
        {"threshold + frontier": 340, "torch_eager + cpu_heap": 17000},
        B=64,
        V=151936,
        K=64,
        budget=64,
    )
    return rows


def merges():
    return [
        {"operator": "merge_states", "T": t, "H": 64, "R": 512, "dtype": "bfloat16", "layout": "C order"}
        | {
            "variant": variant,
            "checked": "all",
            "microseconds": f"{us + t / 20:.1f}",
            "graph_us": us,
            "host_us": 8 * us,
        }
        for t in (9, 288, 4096)
        for variant, us in {"merge_states": 5, "torch_eager": 30, "torch_compile": 7, "triton": 4.9}.items()
    ]


def accepts():
    rows = []

    def add(operator, times, case="", **more):
        for variant, time in times.items():
            row = {"operator": operator, "case": case, "dtype": "bfloat16", "B": 8, "Q": 65, "V": 163840, "layers": 61}
            row |= {"variant": variant, "checked": "all", "microseconds": time, "graph_us": time - 2, "host_us": 150}
            rows.append(row | more)

    add("argmax_tokens", {"argmax_tokens": 45, "torch_argmax": 104})
    add("accept_greedy", {"accept_greedy": 7, "cpu": 150})
    add("target_probs", {"target_probs": 320, "torch_eager": 740}, "no filter")
    add("accept_sampled", {"accept_sampled": 150, "torch_multinomial": 600})
    add("compact_kv", {"compact_kv": 21, "torch_index": 470}, "paged")
    add("gather_accepted", {"gather_accepted": 7, "torch_index": 13})
    for x, sizes in {"V": (8192, 32000, 262144), "B": (1, 64), "Q": (9, 17, 257)}.items():
        for size in sizes:
            for operator, time in {"argmax_tokens": 45, "accept_sampled": 150, "target_probs": 320}.items():
                scaled = {x: size, "case": f"{'no filter, ' * (operator == 'target_probs')}{x} sweep"}
                row = next(row for row in rows if row["variant"] == operator)
                rows.append(row | scaled | {"microseconds": 4 + time * size / row[x]})
    for case, accept in (("greedy", "accept_greedy"), ("sampled", "accept_sampled")):
        add("step", {"graph": 140}, case, host_us=2500)
        middle = {"argmax_tokens" if case == "greedy" else "target_probs": 45, accept: 7}
        add(
            "stage",
            {"topk_logprobs": 44, "build_tree": 39, "prepare": 5, **middle, "compact_kv": 10, "finish": 5},
            case,
        )
    return rows


def decodings():
    return [
        {"mode": mode, "B": batch, "tokens": 96 * batch, "steps": steps, "tokens_per_second": 96e3 / steps / 20}
        | {"draft_ms": 2 * batch, "build_ms": 1.5, "verify_ms": 20 + batch, "accept_ms": 1.25}
        for batch in (1, 8)
        for mode, steps in (("tree", 40), ("chain", 48), ("autoregressive", 96))
    ]


# Nanoseconds behind the beginning of a pair of 2,400, as a warpgroup passes the places of wgmma's clocks.
PASSED = (
    (0, 610, 660, 1150, 1180, 1740),
    (70, 640, 700, 720, 1120, 1200, 1790),
)


def trace():
    return [
        {"case": "trace", "variant": "wgmma", "block": 5, "warpgroup": w, "pair": pair, "event": name}
        | {"ns": f"{2400 * (pair - 2) + time:.1f}", "cycles": 4300 * (pair - 2) + 2 * time}
        for pair in range(2, 10)
        for w in (0, 1)
        for name, time in zip(clocks.NAMES[w], PASSED[w], strict=True)
    ]


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    """A folder of results in which every figure finds what it shows."""
    folder = tmp_path_factory.mktemp("results")
    files = {"verify_attention": attention, "attention_error": errors, "ceilings": ceilings, "trees": tree_rows}
    for name, rows in {
        **files,
        "merge_states": merges,
        "accept": accepts,
        "decode": decodings,
        "wgmma_trace": trace,
    }.items():
        write(folder / f"{name}.csv", rows())
    return folder


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shown(figure):
    """The files and SHA-256 that an SVG or PNG says it shows."""
    if figure.suffix == ".svg":
        said = ElementTree.parse(figure).find(".//{http://purl.org/dc/elements/1.1/}description").text
    else:
        with Image.open(figure) as image:
            said = image.info["Description"]
    assert re.match(r"Drawn by profiling/plot_[a-z]+\.py from ", said)
    return dict(re.findall(r"([\w.]+\.csv), SHA-256 ([0-9a-f]{64})", said))


def sources(drawing, results):
    paths = (style.find(results, name) for name in drawing.files)
    return {path.name: digest(path) for path in paths if path.exists()}


class Drawn(NamedTuple):
    """Of a figure: points of each named curve, every text with its place in pixels, and the figure's size."""

    curves: dict
    texts: list
    size: tuple


@cache
def drawn(name, results):
    """A figure, light; None where there is nothing to draw."""
    with style.drawn(DRAWINGS[name], results, style.LIGHT) as found:
        if found is None:
            return None
        figure = found[0]
        figure.draw_without_rendering()
        renderer = figure.canvas.get_renderer()
        lines = [line for axes in figure.axes for line in axes.lines if line.get_gid()]
        hidden = set()
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            low, high = sorted(axis.get_view_interval())
            shown = axis.axes.axison
            hidden |= {tick.label1 for tick in axis.get_major_ticks() if not (shown and low <= tick.get_loc() <= high)}
        texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
        places = [(text.get_text(), *text.get_window_extent(renderer).extents) for text in texts if text not in hidden]
        points = {line.get_gid(): np.column_stack(line.get_data()).tolist() for line in lines}
        return Drawn(points, places, (figure.bbox.width, figure.bbox.height))


def curves(name, results):
    return drawn(name, results).curves


# Every figure


@each_drawing
def test_a_figure_names_its_files_and_both_themes_show_the_same(drawing, made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(style, "PNG_DPI", 40)  # sooner drawn
    assert style.draw_files([drawing], made_up, tmp_path) == [drawing.name]
    names = [f"{drawing.name}_{theme}.{kind}" for theme in ("dark", "light") for kind in ("png", "svg")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert shown(tmp_path / name) == sources(drawing, made_up)
    light, dark = (
        (tmp_path / f"{drawing.name}_{theme}.svg").read_text(encoding="utf-8") for theme in ("light", "dark")
    )
    dark_of = style.pairs_of_colours()
    as_dark = re.sub("#[0-9a-f]{6}", lambda colour: dark_of[colour[0]], light)
    assert without_marker_ids(as_dark) == without_marker_ids(dark) and light != dark
    if drawing.name in ("build_tree", "attention_kv", "launch"):
        assert style.svg_of(drawing, made_up) == light  # the same bytes each time


@each_drawing
@pytest.mark.parametrize("results", ["made up", "committed"])
def test_no_text_of_a_figure_covers_another_or_leaves_the_page(drawing, results, made_up):
    folder = made_up if results == "made up" else RESULTS
    if drawn(drawing.name, folder) is None:
        pytest.skip(f"{' and '.join(drawing.files)} do not hold what {drawing.name} shows yet")
    _, boxes, (width, height) = drawn(drawing.name, folder)
    assert len(boxes) > 5
    for name, x0, y0, x1, y1 in boxes:
        assert x0 >= -1 and x1 <= width + 1 and y0 >= -1 and y1 <= height + 1, name
    for n, (name, x0, y0, x1, y1) in enumerate(boxes):
        for other, a, b, c, d in boxes[:n]:
            across, down = min(x1, c) - max(x0, a), min(y1, d) - max(y0, b)
            assert across < 2 or down < 3, (name, other)


def without_marker_ids(svg):
    """matplotlib names the shape of a marker by a hash of it and of its colour."""
    return re.sub(r"\bm[0-9a-f]{10}\b", "marker", svg)


@each_drawing
def test_the_committed_figures_show_the_committed_measurements(drawing):
    files = [FIGURES / f"{drawing.name}_{theme}.{kind}" for theme in ("light", "dark") for kind in ("svg", "png")]
    if drawn(drawing.name, RESULTS) is None:
        assert not any(path.exists() for path in files)
        return
    for path in files:
        assert shown(path) == sources(drawing, RESULTS), f"draw {path.name} again: profiling/plot_*.py"
        assert path.suffix == ".svg" or path.stat().st_size > 10_000


@each_drawing
def test_nothing_is_drawn_of_what_is_not_there(drawing, tmp_path):
    assert style.draw_files([drawing], tmp_path / "none", tmp_path / "out") == []
    for name in drawing.files:  # the columns, and one row that is of no use
        row = {"operator": "other", "case": "other", "variant": "flash", "microseconds": "", "inputs": "", "dtype": "x"}
        row |= dict.fromkeys(("keys", "logit_std", "B", "H", "Q", "prefix", "K", "L", "V", "budget", "splits"), "1")
        write(tmp_path / "some" / f"{name}.csv", [row | {"rel_frobenius": "", "tflops": "", "gb_per_s": ""}])
    assert style.draw_files([drawing], tmp_path / "some", tmp_path / "out") == []
    assert list((tmp_path / "out").iterdir()) == []


def test_rows_that_are_not_right_are_not_drawn(made_up, tmp_path):
    rows = tables.read_rows(made_up / "trees.csv")
    for row in rows:
        if (row["variant"], row["B"], row["budget"]) == ("frontier", "64", "256"):
            row["right"] = "False"
    tables.write_rows(tmp_path / "trees.csv", rows, list(rows[0]))
    before, after = (curves("build_tree", folder)["frontier-256"] for folder in (made_up, tmp_path))
    assert len(after) == len(before) - 1 and 64 in [x for x, _ in before] and 64 not in [x for x, _ in after]


def test_a_short_sweep_is_drawn_where_there_is_no_full_one(made_up, tmp_path):
    (tmp_path / "accept_quick.csv").write_bytes((made_up / "accept.csv").read_bytes())
    drawing = DRAWINGS["step_stages"]
    assert style.draw_files([drawing], tmp_path, tmp_path) == ["step_stages"]
    assert list(shown(tmp_path / "step_stages_dark.svg")) == ["accept_quick.csv"]


def test_the_command_says_what_it_drew_and_what_not(made_up, tmp_path, capsys):
    style.main("Draw.", plot_accept.DRAWINGS[1:], ["--results", str(tmp_path), "--out", str(tmp_path / "out")])
    assert capsys.readouterr().out == f"step_stages: not in accept of {tmp_path}\n"
    style.main("Draw.", plot_accept.DRAWINGS[1:], ["--results", str(made_up), "--out", str(tmp_path / "out")])
    assert capsys.readouterr().out == f"{tmp_path}/out/step_stages_{{light,dark}}.{{svg,png}}\n"
    assert len(list((tmp_path / "out").iterdir())) == 4


# What the curves go through


@pytest.mark.parametrize(
    "name, case, x", [("attention_kv", "kv sweep", "prefix"), ("attention_nodes", "Q sweep", "Q")], ids=["kv", "Q"]
)
def test_curves_of_a_sweep_go_through_its_rows(name, case, x, made_up):
    found = curves(name, made_up)
    rows = [row for row in tables.read_rows(made_up / "verify_attention.csv") if row["case"] == case]
    expected = {}
    for row in rows:
        for column in ("tflops", "gb_per_s"):
            key = f"{column}-{row['dtype']}-{row['variant']}"
            expected.setdefault(key, []).append([float(row[x]), float(row[column])])
    roofs = {gid for gid in found if gid.startswith("roof")}
    assert roofs == {f"roof-{column}-{dtype}" for column in ("tflops", "gb_per_s") for dtype in ("float32", "bfloat16")}
    assert {gid: found[gid] for gid in found if gid not in roofs} == expected


def test_the_roof_is_the_lower_of_both_ceilings():
    few = {"tflops": "10", "gb_per_s": "1000"}  # 10 operations a byte: 4300 GB/s allow 43 TFLOP/s
    assert plot_attention.roof(few, "tflops", 790, 4300) == pytest.approx(43)
    assert plot_attention.roof(few, "gb_per_s", 790, 4300) == pytest.approx(4300)
    many = {"tflops": "500", "gb_per_s": "500"}  # 1000 operations a byte: 790 TFLOP/s need 790 GB/s
    assert plot_attention.roof(many, "tflops", 790, 4300) == pytest.approx(790)
    assert plot_attention.roof(many, "gb_per_s", 790, 4300) == pytest.approx(790)


def test_each_dtype_has_its_own_ceiling():
    rows = [{name: str(value) for name, value in row.items()} for row in ceilings()]
    rows = [{"tflops": "", "gb_per_s": "", **row} for row in rows]
    assert plot_attention.ceilings_of(rows, "float32") == (52, 4300)
    assert plot_attention.ceilings_of(rows, "bfloat16") == plot_attention.ceilings_of(rows, "float16") == (790, 4300)
    assert plot_attention.ceilings_of(rows[1:], "float32") is None


def test_a_sweep_without_ceilings_has_no_roof(made_up, tmp_path):
    (tmp_path / "verify_attention.csv").write_bytes((made_up / "verify_attention.csv").read_bytes())
    found = curves("attention_kv", tmp_path)
    assert "tflops-bfloat16-flash" in found and not any(gid.startswith("roof") for gid in found)
    assert drawn("attention_roofline", tmp_path) is None


def test_errors_are_drawn_in_both_measures_for_every_dtype_and_variant(made_up):
    variants = ("flash", "three_phase", "torch_eager", "triton", "naive")
    dtypes, measures = ("float32", "float16", "bfloat16"), ("rel_frobenius", "max_ulp")
    expected = {f"{m}-{d}-{v}" for m in measures for d in dtypes for v in variants}
    by_keys, by_logits = (curves(f"attention_error_{x}", made_up) for x in ("keys", "logits"))
    assert by_keys.keys() == by_logits.keys() == expected
    assert [x for x, _ in by_keys["max_ulp-float32-flash"]] == [16, 64, 256, 1024, 4096, 16384, 65536, 131072]
    assert [x for x, _ in by_logits["max_ulp-float32-flash"]] == [0.02, 0.1, 0.5, 1, 2, 4, 8, 16]
    rows = tables.read_rows(made_up / "attention_error.csv")
    row = next(
        r for r in rows if (r["variant"], r["dtype"], r["keys"], r["logit_std"]) == ("flash", "float16", "64", "2")
    )
    assert [64, float(row["rel_frobenius"])] in by_keys["rel_frobenius-float16-flash"]


def test_float32_errors_stand_below_their_bounds_for_both_spreads(made_up):
    found = curves("attention_error", made_up)
    for std in ("2", "0.02"):
        assert f"bound-torch_eager-{std}" not in found
        for variant in ("flash", "three_phase", "naive"):
            for (x, error), (same, bound) in zip(
                found[f"{variant}-{std}"], found[f"bound-{variant}-{std}"], strict=True
            ):
                assert x == same and error < bound < 1e-3  # of float32, whose errors are small


def test_rows_from_before_dtypes_are_float32(made_up):
    found = curves("attention_error", RESULTS)
    assert {f"{variant}-2" for variant in ("flash", "three_phase", "torch_eager", "naive")} < found.keys()


def test_times_of_trees_go_through_their_rows(made_up):
    rows = tables.read_rows(made_up / "trees.csv")

    def points(x, **known):
        some = [row for row in rows if all(row[name] == value for name, value in known.items())]
        return sorted([float(row[x]), float(row["microseconds"])] for row in some)

    of = {"operator": "build_tree", "inputs": "float32 logits"}
    by_batch, by_budget = (curves(name, made_up) for name in ("build_tree", "build_tree_budget"))
    assert by_batch["frontier-64"] == points("B", **of, variant="frontier", budget="64")
    assert "heap-256" in by_batch and "heap-1024" not in by_batch
    assert by_budget["cpu_heap-64"] == points("budget", **of, variant="cpu_heap", B="64")
    swept = points("budget", **of | {"inputs": "float32 logits, budget sweep"}, variant="frontier", B="1")
    assert by_budget["frontier-1"] == sorted(swept + points("budget", **of, variant="frontier", B="1"))
    sweeps = curves("topk_sweeps", made_up)
    assert sweeps.keys() == {f"{v}-{x}" for v in ("threshold", "torch_topk", "torch_eager") for x in "VKLB"}
    assert [x for x, _ in sweeps["threshold-V"]] == [8192, 32000, 65536, 128256, 163840, 262144]  # the usual one too
    assert curves("build_tree_sweeps", made_up).keys() == {
        f"{variant}-{x}" for variant in ("frontier", "heap", "cpu_heap") for x in "KL"
    }


def test_the_stages_of_a_step_stand_one_behind_the_other(made_up):
    rows = tables.read_rows(made_up / "accept.csv")
    with style.drawn(DRAWINGS["step_stages"], made_up, style.LIGHT) as found:
        for axes, case in zip(found[0].axes, ("greedy", "sampled"), strict=True):
            bars = [(bar.get_gid(), bar.get_x(), bar.get_width()) for bar in axes.patches]
            stages = [row for row in rows if (row["operator"], row["case"]) == ("stage", case)]
            assert [gid for gid, _, _ in bars] == [f"{case}-{row['variant']}" for row in stages]
            assert [width for _, _, width in bars] == [float(row["microseconds"]) for row in stages]
            assert [x for _, x, _ in bars] == [sum(w for _, _, w in bars[:n]) for n in range(len(bars))]
            assert list(axes.lines[0].get_xdata()) == [140, 140]


def test_the_stages_of_decoding_stand_one_behind_the_other_for_every_mode(made_up):
    rows = tables.read_rows(made_up / "decode.csv")
    with style.drawn(DRAWINGS["decode_stages"], made_up, style.LIGHT) as found:
        for axes, batch in zip(found[0].axes, ("1", "8"), strict=True):
            bars = {bar.get_gid(): (bar.get_x(), bar.get_width()) for bar in axes.patches}
            expected = {}
            for row in (row for row in rows if row["B"] == batch):
                begin = 0.0
                for stage in ("draft", "build", "verify", "accept"):
                    time = float(row[f"{stage}_ms"])
                    expected[f"{batch}-{row['mode']}-{stage}"] = (begin, time)
                    begin += time
            assert bars == expected
    texts = {text.strip() for text, *_ in drawn("decode_stages", made_up).texts}
    assert {"2.4 tokens a step, 120 a second", "16.0 tokens a step, 100 a second"} <= texts


def test_a_sweep_of_accepting_has_the_row_of_the_usual_size(made_up):
    found = curves("accept_sweeps", made_up)
    swept = ("argmax_tokens", "target_probs", "accept_sampled")
    assert found.keys() == {f"{operator}-{x}" for operator in swept for x in "VBQ"}
    assert found["target_probs-B"] == [[1, 44], [8, 320], [64, 2564]]
    assert [x for x, _ in found["argmax_tokens-V"]] == [8192, 32000, 163840, 262144]


def test_a_launch_is_shown_as_the_host_and_as_a_graph_make_it(made_up):
    found = curves("launch", made_up)
    assert found["host-argmax_tokens-ours"][0][0] == 150
    assert found["host-merge_states-torch_eager"][0][0] == 240
    assert found["graph-accept_greedy"][0][0] == 5 and found["eager-accept_greedy"][0][0] == 150
    assert (
        found["graph-target_probs"][0][0] == 318 and found["eager-target_probs"][0][0] == 320
    )  # longer than launching
    assert found["eager-whole_step,_greedy"][0][0] == 2500


def bars(results):
    """Row, pair and event of each bar of the pipeline: when it begins and ends, in nanoseconds."""
    with style.drawn(DRAWINGS["wgmma_pipeline"], results, style.LIGHT) as (figure, _):
        patches = [patch for patch in figure.axes[0].patches if patch.get_gid()]
        return {
            tuple(patch.get_gid().split("-")): [
                round(1e3 * x) for x in (patch.get_x(), patch.get_x() + patch.get_width())
            ]
            for patch in patches
        }


def test_bars_of_the_pipeline_go_from_event_to_event(made_up):
    found = bars(made_up)  # pairs 3, 4 and 5 from the scores of A of pair 3 on
    assert found["0", "4", "SCORES_A"] == [2400, 3010] and found["0", "4", "PV_B_LEFT_DONE"] == [4140, 4800]
    assert found["1", "4", "QK_B"] == [2470, 3040] and found["1", "4", "P_A_THERE"] == [3120, 3520]
    assert found["4", "3", "P_A_THERE"] == [720, 1200] and found["5", "3", "PV_A_RIGHT_DONE"] == [1200, 1790]
    assert found["1", "2", "PV_B_RIGHT_DONE"] == [0, 70]  # cut where the pairs that are shown begin
    assert found["0", "5", "PV_B_LEFT_DONE"] == [6540, 7200] and not [key for key in found if key[1] in "67"]
    assert sorted({int(pair) for _, pair, _ in found}) == [2, 3, 4, 5]


def test_a_warpgroup_is_somewhere_at_all_times(made_up):
    found = bars(made_up)
    for row in "01":
        ends = sorted(ends for (of, *_), ends in found.items() if of == row)
        assert ends[0][0] == 0 and ends[-1][1] == 7200
        assert all(one[1] == other[0] for one, other in zip(ends, ends[1:], strict=False))


def test_the_pipeline_takes_events_that_the_kernel_has_in_their_order():
    order = {name: (w, n) for w, names in enumerate(clocks.NAMES) for n, name in enumerate(names)}
    for span in plot_pipeline.SPANS:
        (begin, first), (end, last) = order[span.begin], order[span.end.removeprefix(plot_pipeline.NEXT)]
        assert begin == end and (last > first or span.end.startswith(plot_pipeline.NEXT))
        assert span.row != 1 - begin  # of the other warpgroup
    assert {span.begin for span in plot_pipeline.SPANS} == set(order)


def test_a_pipeline_of_few_pairs_is_not_drawn(tmp_path):
    write(tmp_path / "wgmma_trace.csv", [row for row in trace() if row["pair"] < 6])
    assert style.draw_files(plot_pipeline.DRAWINGS, tmp_path, tmp_path / "out") == []


# Ours and others


def rows_of_two(**more):
    """flash, three_phase and PyTorch on two problems, flash in parts, and another dtype that ours did not solve."""
    known = {"case": "logit std 2", "B": "1", "H": "8", "Q": "9", "prefix": "100", "dtype": "float32", "right": "True"}
    known |= {"operator": "", "tiles": "", "note": "", **more}

    def row(variant, time, splits="", **other):
        return {**known, "variant": variant, "splits": splits, "microseconds": time, **other}

    return [
        row("flash", "20", "even"),
        row("flash", "5", "1"),
        row("flash_small", "1", "even"),
        row("three_phase", "10", tiles="16x16"),
        row("torch_eager", "25", note="some"),
        row("flash", "40", "even", prefix="200"),
        row("torch_eager", "20", prefix="200"),
        row("triton", "20", prefix="200", right="True"),
        row("torch_eager", "1", dtype="bfloat16"),
        row("triton", "", prefix="100"),
    ]


def test_others_are_held_against_the_faster_of_ours_on_the_same_problem():
    found = [(pair.variant, dict(pair.problem)["prefix"], pair.ratio) for pair in plot_speedup.pairs(rows_of_two())]
    assert found == [("torch_eager", "100", 2.5), ("torch_eager", "200", 0.5), ("triton", "200", 0.5)]


def test_every_operator_with_a_peer_is_among_the_ratios(made_up):
    found = curves("speedup", made_up)
    dots = {gid: sorted(x for x, _ in points) for gid, points in found.items()}
    assert 104 / 45 in dots["argmax_tokens-torch_argmax"] and dots["compact_kv-torch_index"] == [470 / 21]
    assert dots["accept_greedy-cpu"] == [150 / 7] and len(dots["merge_states-triton"]) == 3
    assert dots["topk_logprobs_+_build_tree-torch_eager_+_cpu_heap"] == [50.0]
    assert len(dots["verify_attention,_bfloat16-flashmla"]) == sum(len(sizes) for _, sizes in SWEEPS.values())
    assert "verify_attention,_float32-flashmla" not in dots and "build_tree-cpu_heap" in dots


def test_a_kernel_of_ones_own_is_drawn_beside_ours(tmp_path, monkeypatch):
    rows = [*rows_of_two(), {**rows_of_two()[0], "variant": "mine", "splits": "", "microseconds": "5"}]
    write(tmp_path / "verify_attention_mine.csv", rows)
    assert plot_speedup.draw_file(tmp_path / "verify_attention_mine.csv", tmp_path) == ["verify_attention_mine"]
    assert list(shown(tmp_path / "verify_attention_mine_light.png")) == ["verify_attention_mine.csv"]
    drawing = style.Drawing("x", ("verify_attention_mine",), plot_speedup.draw_problems, "")
    monkeypatch.setitem(DRAWINGS, "mine", drawing)
    found, texts, (width, _) = drawn("mine", tmp_path)
    assert found["mine-0"] == [[0.5, 0]] and found["torch_eager-1"] == [[0.5, 1]]
    assert {text for text, *_ in texts}.issuperset(("prefix 100", "prefix 200", "mine"))  # what sets the problems apart
    assert all(x0 >= 0 and x1 <= width for _, x0, _, x1, _ in texts)


def test_a_kernel_of_ones_own_that_is_wrong_is_not_drawn(tmp_path):
    rows = [{**row, "right": "False", "microseconds": ""} for row in rows_of_two()]
    write(tmp_path / "mine.csv", rows)
    assert plot_speedup.draw_file(tmp_path / "mine.csv", tmp_path / "out") == []
    assert list((tmp_path / "out").iterdir()) == []


# Colours, ticks, labels


def luminance(colour):
    rgb = np.array([int(colour[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ (0.2126, 0.7152, 0.0722)


@pytest.mark.parametrize("theme", style.THEMES, ids=["light", "dark"])
def test_every_colour_stands_out_from_its_page(theme):
    for name in report.colours():
        if name not in ("page", "faint"):
            a, b = sorted((luminance(getattr(theme, name)), luminance(theme.page)))
            assert (b + 0.05) / (a + 0.05) >= 3, name  # the least contrast of WCAG for graphics


def test_curves_of_one_figure_can_be_told_apart_without_colours():
    variants = ("flash", "three_phase", *(name for name in PEAKS if name not in ("flash", "three_phase")))
    assert len({style.look(variant).marker for variant in (*variants, "naive")}) == len(variants) + 1
    assert len({style.look(variant).colour for variant in (*variants, "naive")}) == len(variants) + 1


def test_a_problem_is_named_by_what_sets_it_apart():
    problem = {"case": "kv sweep", "B": "8", "prefix": "2048", "dtype": "bfloat16"}
    assert plot_speedup.named(problem, ["case", "prefix", "page_size"]) == "prefix 2,048, kv sweep"


def test_an_unknown_variant_goes_by_its_own_name():
    assert style.look("mine").name == "mine" and not style.look("mine").ours


def test_light_colours_have_one_dark_colour_each():
    assert len(style.pairs_of_colours()) == len(report.colours())


@pytest.mark.parametrize(
    "values, most, kept",
    [
        ([16, 32, 64, 128, 256], 3, [16, 64, 256]),
        ([1, 2, 4, 8], 9, [1, 2, 4, 8]),
        ([1, 3, 7, 15, 31], 9, [1, 3, 7, 15, 31]),
        ([16, 97, 128, 256, 1024], 9, [16, 128, 256, 1024]),
        ([5], 4, [5]),
    ],
)
def test_ticks_are_few_and_rather_powers_of_two(values, most, kept):
    assert style.spread_out(values, most) == kept


def test_numbers_are_written_as_people_do():
    assert [style.duration(x) for x in (0.5, 20, 1e3, 2e6)] == ["0.5 µs", "20 µs", "1 ms", "2 s"]
    assert [style.plain(x) for x in (0.02, 5, 131072)] == ["0.02", "5", "131,072"]
    assert [style.power_of_ten(x) for x in (1e-6, 2e-5)] == ["10$^{-6}$", "2 · 10$^{-5}$"]
    assert [plot_speedup.factor(x) for x in (0.54, 12.34, 1234)] == ["0.54", "12.3", "1,234"]


def test_a_label_goes_where_no_other_curve_is():
    figure, every = style.panels(style.LIGHT, 1, 1, 3.0)
    axes = every[0, 0]
    xs = np.linspace(0, 1, 9)
    low, high = 0.45 + 0 * xs, 0.55 + 0 * xs  # nothing fits between the two
    for ys in (low, high):
        axes.plot(xs, ys)
    axes.set_ylim(0, 1)
    style.label_curves(axes, [style.Label("low", "#000000", xs, low), style.Label("high", "#000000", xs, high)])
    lines = np.concatenate([style.along(style.pixels(axes, xs, ys), 1.0) for ys in (low, high)])
    boxes = np.array([text.get_window_extent().extents for text in axes.texts])
    assert style.inside(lines, boxes, 2, 2).tolist() == [0, 0] and np.ptp(boxes[:, 1]) > 10
    assert style.inside(lines, boxes, 60, 30).min() > 100  # what counts is that they do not lie elsewhere
    plt.close(figure)


def test_labels_beside_a_panel_keep_the_order_of_the_curves_and_their_distance():
    figure, every = style.panels(style.LIGHT, 1, 1, 3.0)
    axes = every[0, 0]
    ends = [0.5, 0.5, 0.51, 0.99, 1.0, 0.0]
    labels = [style.Label(str(n), "#000000", [0, 1], [0, end]) for n, end in enumerate(ends)]
    for label in labels:
        axes.plot(label.xs, label.ys)
    style.margins(figure, left=0.5, top=0.5, bottom=0.5, right=1.0)
    style.label_beside(axes, labels)
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    order = sorted(boxes, key=lambda name: boxes[name].y0)
    assert [ends[int(name)] for name in order] == sorted(ends)
    for below, above in zip(order, order[1:], strict=False):
        assert boxes[above].y0 - boxes[below].y0 > 11
    assert boxes[order[-1]].y1 < axes.get_window_extent().y1 + 8
    plt.close(figure)


# The report


class Page(HTMLParser):
    """Checks that tags are closed in order; collects ids, links, styles, cells and what would be loaded."""

    VOID = {"meta", "link", "br", "img", "input", "hr"}

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.links, self.loads, self.cells, self.tags = [], [], [], [], [], []
        self.wrong, self.headings, self.styles = 0, [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        if "id" in given:
            self.ids.append(given["id"])
        for name in ("href", "xlink:href"):
            if name in given:
                self.links.append(given[name])
        self.loads += [given[name] for name in ("src", "srcset", "data", "action", "poster") if name in given]
        self.links += re.findall(r"url\(([^)]*)\)", given.get("clip-path", "") + given.get("style", ""))
        self.styles.append(given.get("style", ""))
        self.wrong += given.get("class") == "wrong"
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


@pytest.fixture(scope="module")
def text(made_up):
    return report.page(made_up)


def test_the_page_loads_nothing(text):
    page = Page(text)
    assert page.loads == [] and not {"script", "link", "img", "iframe", "object", "base"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in text and "url(" not in re.search("<style>.*?</style>", text, re.DOTALL)[0]
    assert not re.search("https?:", text)


def test_ids_are_unique_and_every_link_has_a_target(text):
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids) and len(page.links) > 100


def test_the_page_has_every_figure_once_in_the_colours_of_the_reader(text):
    page = Page(text)
    assert page.tags.count("svg") == len(DRAWINGS) == len({*DRAWINGS} & {*page.ids})
    names = {name for names in (names for _, names, _ in report.SECTIONS) for name in names}
    assert names == set(DRAWINGS)
    styles = "".join(page.styles)
    assert "var(--blue)" in styles and "#" not in styles.replace("url(#", "")
    for theme in style.THEMES:
        for name in report.colours():
            assert f"--{name}: {getattr(theme, name)};" in text
    assert "prefers-color-scheme: dark" in text and 'name="viewport" content="width=device-width' in text


def test_every_row_of_every_file_is_on_the_page(made_up, text):
    page = Page(text)
    paths = list(made_up.glob("*.csv"))
    assert len(paths) == 8 and {f"rows-{path.stem}" for path in paths} <= set(page.ids)
    assert page.tags.count("tr") == 1 + len(paths) + sum(len(tables.read_rows(path)) + 1 for path in paths)
    rows = tables.read_rows(made_up / "verify_attention.csv")
    assert {row["microseconds"] for row in rows} <= set(page.cells)
    for path in paths:
        assert digest(path)[:16] in page.cells
    assert "some GPU, driver 1.2, CPU some CPU, Python 3" in text and "aaaaaaaaaaaa" in page.cells


def test_the_page_of_the_committed_results_states_machine_and_commits(monkeypatch):
    monkeypatch.setattr(report, "SECTIONS", ())  # all files stand at the end, without figures
    said = report.page(RESULTS)
    page = Page(said)
    for path in RESULTS.glob("*.csv"):
        rows = tables.read_rows(path)
        assert rows[0]["gpu"] in said and rows[0]["driver"] in said and rows[0]["commit"][:12] in said
        assert path.name in page.cells


def test_what_is_wrong_or_hostile_in_a_file_is_shown_as_text(tmp_path):
    rows = merges()
    rows[1] |= {"right": False, "microseconds": "", "note": "<script>alert(1)</script> & more"}
    write(tmp_path / "merge_states.csv", rows)
    write(tmp_path / "mine.csv", [{"operator": "other <b>", "variant": "x", "microseconds": "1"}])
    page = Page(said := report.page(tmp_path))
    assert page.wrong == 1 and "1 of them not right" in said and "and 1 are not right" in said
    assert "<script>alert(1)</script> & more" in page.cells and "script" not in page.tags and "b" not in page.tags
    assert page.headings[-1] == "More results" and "other <b>" in page.cells


def test_the_table_of_resources_beside_the_page_is_on_it(made_up, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "SECTIONS", ())
    (tmp_path / "accept.csv").write_bytes((made_up / "accept.csv").read_bytes())
    rows = [{"kernel": "<flash>", "arch": "sm_90", "registers": 254, "ok": True, "mix": {"of": "SASS", "FFMA": 77}}]
    rows.append({**rows[0], "kernel": "heap", "ok": False})
    (tmp_path / "resources.json").write_text(json.dumps(rows))
    assert report.main(["--results", str(tmp_path)]) == 0
    page = Page(said := (tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.headings[-1] == "Resources of the kernels" and "compiled offline: 2 rows, 1 of them not as" in said
    assert {"<flash>", "254", "77", "SASS"} <= set(page.cells) and page.wrong == 1
    assert not any("{" in cell for cell in page.cells)
    (tmp_path / "resources.json").write_text("[{")  # cut
    assert report.main(["--results", str(tmp_path)]) == 0
    page = Page(said := (tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "resources.json cannot be read" in said and page.wrong == 0


def test_a_full_sweep_goes_ahead_of_a_short_one(made_up, tmp_path):
    for name in ("trees", "trees_quick", "accept_quick"):
        (tmp_path / f"{name}.csv").write_bytes((made_up / f"{name.removesuffix('_quick')}.csv").read_bytes())
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")  # no measurement
    assert [path.name for path in report.files_of(tmp_path)] == ["accept_quick.csv", "trees.csv"]


def test_the_command_writes_the_page_among_the_results(made_up, tmp_path, capsys):
    (tmp_path / "accept.csv").write_bytes((made_up / "accept.csv").read_bytes())
    assert report.main(["--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert Page((tmp_path / "report.html").read_text(encoding="utf-8")).headings[0] == "Ours and others"


def test_no_page_without_results(tmp_path, capsys):
    assert report.main(["--results", str(tmp_path)]) == 2
    assert "has no CSV file of a benchmark" in capsys.readouterr().err and list(tmp_path.iterdir()) == []
