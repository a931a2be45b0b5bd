"""All results of a folder as one page: ``python profiling/report.py [--results DIR] [--out FILE]``.

One HTML file that needs no other: the figures inside as SVG, in the colours that the reader's system asks for, the rows
of every CSV file as a table, on what machine and of which commit they were measured, and which rows were wrong. A file
resources.json beside the page, as resources.py --json prints it, is shown too. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

import compare
import plot_accept
import plot_attention
import plot_decode
import plot_launch
import plot_pipeline
import plot_speedup
import plot_trees
import style
import tables
from style import Drawing, Rows

DRAWINGS = {
    drawing.name: drawing
    for script in (plot_trees, plot_attention, plot_accept, plot_decode, plot_speedup, plot_launch, plot_pipeline)
    for drawing in script.DRAWINGS
}
# In data-path order: title, figures, files.
SECTIONS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("Ours and others", ("speedup",), ()),
    ("Ceilings of this GPU", (), ("ceilings",)),
    ("Draft trees", ("topk_sweeps", "build_tree", "build_tree_budget", "build_tree_sweeps"), ("trees", "encodings")),
    (
        "Attention: speed",
        *(
            ("attention_speed", "attention_kv", "attention_nodes", "attention_heads", "attention_batch")
            + ("attention_pages", "attention_roofline"),
            ("verify_attention",),
        ),
    ),
    ("Attention: the pipeline of wgmma", ("wgmma_pipeline",), ("wgmma_trace",)),
    ("Attention: error", ("attention_error", "attention_error_keys", "attention_error_logits"), ("attention_error",)),
    ("Merging states", (), ("merge_states",)),
    ("After the target's forward pass", ("step_stages", "accept_sweeps"), ("accept",)),
    ("Decoding text", ("decode_stages",), ("decode", "decode_samples")),
    ("Launches", ("launch",), ()),
)
ENVIRONMENT = {
    **{"gpu": "", "driver": "driver ", "cpu": "CPU ", "python": "Python ", "numpy": "NumPy "},
    **{"numba_cuda": "numba-cuda ", "torch": "PyTorch ", "triton": "Triton ", "cupy": "CuPy "},
}
RANGES = {"sm_clock_mhz": "SM clock, MHz", "power_w": "power, W", "temperature_c": "temperature, °C"}
OPEN_ROWS = 12  # tables of at most so many rows are open from the start

CSS = """
:root { color-scheme: light dark; COLOURS_LIGHT }
@media (prefers-color-scheme: dark) { :root { COLOURS_DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 66rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--text);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 .75rem; padding-top: .5rem; border-top: 1px solid var(--faint); }
a { color: var(--blue); }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; list-style: none; margin: 1rem 0; padding: 0; }
figure { margin: 1.5rem 0 2rem; }
figcaption { font-size: .875rem; margin-top: .5rem; max-width: 48rem; }
.scroll { overflow-x: auto; -webkit-overflow-scrolling: touch; }
.scroll:focus-visible { outline: 2px solid var(--blue); }
figure svg { display: block; width: 100%; min-width: 40rem; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
details { margin: 1rem 0; }
summary { cursor: pointer; font-weight: 600; }
.tall { max-height: 32rem; overflow: auto; }
table { border-collapse: collapse; font-size: .8125rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--faint);
         white-space: nowrap; }
td.n { text-align: right; }
td.long { white-space: normal; min-width: 14rem; }
thead th { position: sticky; top: 0; background: var(--page); }
tr.wrong td { color: var(--crimson); font-weight: 600; }
.same, .quiet { font-size: .8125rem; color: var(--grey); }
code { font-size: .875em; overflow-wrap: anywhere; }
"""


# Figures


def inline(svg: str, name: str) -> str:
    """An SVG file as an element of the page: its ids its own, its colours those of the page, its size the column's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    names = {getattr(style.LIGHT, colour): colour for colour in colours()}
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda match: f"var(--{names[match[0]]})", svg)
    head, body = svg.split(">", 1)
    head = re.sub(r'\s(width|height|version|xmlns(:\w+)?)="[^"]*"', "", head)
    return f'{head} role="img" aria-labelledby="says-{name}">{body.strip()}'


def colours() -> list[str]:
    """What the themes name."""
    return [name for name in style.LIGHT.__dataclass_fields__ if name != "name"]


def figure_of(drawing: Drawing, results: Path) -> str:
    """A figure with its caption; nothing where its numbers are not there."""
    svg = style.svg_of(drawing, results)
    if svg is None:
        return ""
    sources = [path.name for path in (style.find(results, name) for name in drawing.files) if path.exists()]
    return (
        f'<figure id="{drawing.name}"><div class="scroll" tabindex="0">{inline(svg, drawing.name)}</div>\n'
        f'<figcaption><span id="says-{drawing.name}">{escape(drawing.says)}</span> '
        f'<span class="quiet">From {escape(", ".join(sources))}.</span></figcaption></figure>'
    )


# Tables


def is_number(text: str) -> bool:
    """Whether a cell is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def table(names: Sequence[str], lines: Iterable[Sequence[str]], wrong: Sequence[bool] = ()) -> str:
    """Rows of text; numbers stand to the right."""
    text = [f"<table><thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr></thead><tbody>"]
    for n, line in enumerate(lines):
        cells = []
        for cell in line:
            kind = ' class="n"' if is_number(cell) else ' class="long"' if len(cell) > 60 else ""
            cells.append(f"<td{kind}>{escape(cell)}</td>")
        begin = '<tr class="wrong">' if n < len(wrong) and wrong[n] else "<tr>"
        text.append(f"{begin}{''.join(cells)}</tr>")
    return "\n".join([*text, "</tbody></table>"])


def is_wrong(row: dict[str, str]) -> bool:
    """Whether a row failed its check, or could not be measured."""
    return row.get("right", "True") != "True"


def table_of(path: Path) -> str:
    """A results file: what all rows share in a sentence, the rest as a table."""
    rows = tables.read_rows(path)
    names = list(rows[0]) if rows else []
    values = {name: {row[name] or "" for row in rows} for name in names}
    same = {name: next(iter(found)) for name, found in values.items() if len(found) == 1 and len(rows) > 1}
    shown = [name for name in names if name not in same]
    wrong = [is_wrong(row) for row in rows]
    said = "; ".join(f"{name} {value}" for name, value in same.items() if value)
    count = f"{len(rows)} row{'s' * (len(rows) != 1)}"
    if any(wrong):
        count += f", {sum(wrong)} of them not right"
    shared = f'<p class="same">The same in all rows: {escape(said)}.</p>' if said else ""
    body = table(shown, ([row[name] or "" for name in shown] for row in rows), wrong)
    return (
        f'<details id="rows-{escape(path.stem)}"{" open" if len(rows) <= OPEN_ROWS else ""}>'
        f"<summary>{escape(path.name)}: {count}</summary>{shared}"
        f'<div class="tall" tabindex="0">{body}</div></details>'
    )


def resources(path: Path) -> str:
    """What resources.py printed: a row for each kernel and architecture."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"<p>{escape(path.name)} cannot be read: {escape(str(error))}.</p>"
    rows = [{**{k: v for k, v in row.items() if k != "mix"}, **row.get("mix", {})} for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    wrong = [not row.get("ok", True) for row in rows]
    count = f"{len(rows)} rows" + (f", {sum(wrong)} of them not as they must be" if any(wrong) else "")
    body = table(names, ([str(row.get(name, "")) for name in names] for row in rows), wrong)
    summary = f"<summary>registers, shared memory and spills, compiled offline: {count}</summary>"
    return f'<details>{summary}<div class="tall" tabindex="0">{body}</div></details>'


def several(values: Iterable[str]) -> str:
    """The different values, in the order in which they come."""
    return ", ".join(dict.fromkeys(value for value in values if value)) or "–"


def span(values: Iterable[str]) -> str:
    """The least and the largest."""
    numbers = sorted({float(value) for value in values if value and is_number(value)})
    if not numbers:
        return "–"
    return f"{numbers[0]:g}" if len(numbers) == 1 else f"{numbers[0]:g} to {numbers[-1]:g}"


def machine(files: dict[Path, Rows]) -> str:
    """On what the rows were measured: what all files share in a sentence, the rest as a line for each file."""
    every = [row for rows in files.values() for row in rows]
    values = {name: [several(row.get(name, "") for row in rows) for rows in files.values()] for name in ENVIRONMENT}
    same = {name: several(row.get(name, "") for row in every) for name in ENVIRONMENT if len(set(values[name])) == 1}
    said = ", ".join(f"{ENVIRONMENT[name]}{escape(value)}" for name, value in same.items() if value != "–")
    differ = [name for name in ENVIRONMENT if name not in same]
    lines = []
    for n, (path, rows) in enumerate(files.items()):
        lines.append(
            (
                *(path.name, str(len(rows)), several(short(row["commit"]) for row in rows)),
                *(values[name][n] for name in differ),
                *(span(row.get(name, "") for row in rows) for name in RANGES),
                hashlib.sha256(path.read_bytes()).hexdigest()[:16],
            )
        )
    names = ("file", "rows", "commit", *(ENVIRONMENT[name].strip() or "GPU" for name in differ), *RANGES.values())
    return f'<p>{said}.</p>\n<div class="scroll" tabindex="0">{table((*names, "SHA-256"), lines)}</div>'


def short(commit: str) -> str:
    """Enough of a commit to find it, and whether the tree was changed."""
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", commit)


# The page


def files_of(results: Path) -> list[Path]:
    """The results files of a folder; of a short sweep's and a full one's of the same name, the full one."""
    every = sorted(results.glob("*.csv"))
    every = [path for path in every if compare.is_result(path.read_text(encoding="utf-8"))]
    return [path for path in every if path == style.find(results, path.stem.removesuffix("_quick"))]


def sections(results: Path, files: Sequence[Path], kernels: Path | None = None) -> Iterator[tuple[str, str]]:
    """Titles and contents; nothing for what is not there."""
    left = list(files)
    for title, names, stems in SECTIONS:
        parts = [figure_of(DRAWINGS[name], results) for name in names]
        for path in (style.find(results, stem) for stem in stems):
            if path in left:
                left.remove(path)
                parts.append(table_of(path))
        if any(parts):
            yield title, "\n".join(part for part in parts if part)
    if left:
        yield "More results", "\n".join(map(table_of, left))
    if kernels and kernels.exists():
        yield "Resources of the kernels", resources(kernels)


def page(results: Path, kernels: Path | None = None) -> str:
    """The whole page; ``kernels`` is what resources.py printed, if anything did.

    Raises
    ------
    FileNotFoundError
        The folder has no results.
    """
    paths = files_of(results)
    files = {path: tables.read_rows(path) for path in paths}
    if not any(files.values()):
        raise FileNotFoundError(f"{results} has no CSV file of a benchmark")
    every = [row for rows in files.values() for row in rows]
    wrong = sum(map(is_wrong, every))
    gpus = several(row.get("gpu", "") for row in every)
    verdict = f"{len(every):,} rows; every one was checked before it was timed"
    verdict += f", and {wrong} are not right: they have no times, and stand out in the tables." if wrong else "."
    found = list(sections(results, paths, kernels))
    links = "".join(f'<li><a href="#part-{n}">{escape(title)}</a></li>' for n, (title, _) in enumerate(found))
    body = "\n".join(
        f'<section id="part-{n}"><h2>{escape(title)}</h2>\n{contents}</section>'
        for n, (title, contents) in enumerate(found)
    )
    css = CSS
    for theme in style.THEMES:
        variables = " ".join(f"--{name}: {getattr(theme, name)};" for name in colours())
        css = css.replace(f"COLOURS_{theme.name.upper()}", variables)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>ddtree_numba: measurements on {escape(gpus)}</title>
<style>{css}</style>
</head>
<body>
<header>
<h1>ddtree_numba: measurements on {escape(gpus)}</h1>
<p>{verdict} Times are medians, in microseconds.</p>
</header>
<nav><ul>{links}</ul></nav>
<main>
{machine(files)}
{body}
</main>
</body>
</html>
"""


def write(results: Path, out: Path) -> Path:
    """Write the page of a folder of results."""
    text = page(results, out.parent / "resources.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    return out


def main(arguments: list[str] | None = None) -> int:
    """Write the page; 2 where there are no results."""
    parser = argparse.ArgumentParser(description="All results of a folder as one HTML page.")
    parser.add_argument(
        "--results",
        type=Path,
        default=tables.H200.parent,
        metavar="DIR",
        help="folder of CSV files; default: the committed ones",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html among the results")
    options = parser.parse_args(arguments)
    try:
        print(write(options.results, options.out or options.results / "report.html"))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
