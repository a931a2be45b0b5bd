"""The documentation holds: its code runs, its links lead somewhere, its names and tables are those of the code."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import ddtree_numba as dd
from ddtree_numba.attention import flash, three_phase
from ddtree_numba.attention.verify import VARIANTS
from ddtree_numba.tree import build_frontier, build_heap, build_tree, topk_logprobs, topk_rounds, topk_threshold
from ddtree_numba.tree.draft_tree import DTYPES

ROOT = Path(__file__).resolve().parent.parent
DOCS, PACKAGE = ROOT / "docs", ROOT / "ddtree_numba"
PAGES = [page for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))) if page.exists()]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

FENCE = re.compile(r"(?P<skip>^<!-- no-run -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: Path) -> Iterator[tuple[str, bool]]:
    """The page's Python, at its own line numbers, and whether it is to be run."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match["language"] == "python":
            yield "\n" * text.count("\n", 0, match.start("code")) + match["code"], match["skip"] is None


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def table_under(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, its head left out."""
    _, found, rest = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    assert found, f"{page.name} has no heading {heading!r}"
    rows = re.search(r"(?:^\|.*\|\n)+", rest, re.MULTILINE)
    assert rows, f"there is no table under {heading!r}"
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]]


# Code


@every_page
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for code, run in python_blocks(page):
        compiled = compile(code, str(page), "exec")
        if run:
            exec(compiled, namespace)


def test_the_engines_page_has_a_snippet_for_each_engine():
    assert [run for _, run in python_blocks(DOCS / "engines.md")] == [True] * 4


def test_the_absorbed_mla_example(tmp_path):
    command = [sys.executable, str(DOCS / "examples" / "absorbed_mla.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith(("in Numba's simulator", "on the GPU"))
    assert [line.split(":")[0] for line in lines[1:]] == ["ok  out after W_UV, against explicit heads", "ok  lse"]


def test_the_absorbed_mla_example_can_fail(monkeypatch, capsys):
    example = load(DOCS / "examples" / "absorbed_mla.py")
    explicit = example.explicit
    monkeypatch.setattr(example, "explicit", lambda layer: explicit(layer | {"w_uk": 1.001 * layer["w_uk"]}))
    assert example.main() == 1
    assert "FAIL out after W_UV" in capsys.readouterr().out


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# Links and names


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the page's headings."""
    found: dict[str, int] = {}
    result = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = found[slug] = found.get(slug, -1) + 1
        result.add(f"{slug}-{count}" if count else slug)
    return result


@every_page
def test_links_lead_somewhere(page):
    text = prose(page)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", text)
    broken = []
    for target in targets:
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or ROOT not in (file, *file.parents) or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@every_page
def test_names_exist(page):
    missing = []
    for name in re.findall(r"\b(?:dd|ddtree_numba)((?:\.[A-Za-z_]\w*)+)", page.read_text(encoding="utf-8")):
        found: Any = dd
        for part in name.split(".")[1:]:
            if inspect.ismodule(found) and not hasattr(found, part):
                try:
                    importlib.import_module(f"{found.__name__}.{part}")
                except ImportError:
                    missing.append(name)
                    break
            if not hasattr(found, part):
                missing.append(name)
                break
            found = getattr(found, part)
    assert not missing


@every_page
def test_files_in_backticks_exist(page):
    files = re.findall(r"`([\w./]+/[\w.]+\.(?:py|md|kdtr|cfg))`", prose(page))
    assert not [name for name in files if not (ROOT / name).exists() and not (PACKAGE / name).exists()]


# The pages of verify_attention and flash; test_merge_states.py has that of merge_states

VERIFY, FLASH = DOCS / "verify_attention.md", DOCS / "flash.md"
OPERATORS = (dd.verify_attention, dd.workspace_bytes, dd.prefix_attention, dd.verify_attention_prefix_tail)


def bare_signature(function: Any) -> str:
    """Its parameters and defaults, without types."""
    actual = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in actual.parameters.values()]
    return f"def f{actual.replace(parameters=parameters, return_annotation=actual.empty)}: pass"


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda x: x.__name__)
def test_the_signature_is_the_operators(operator):
    pattern = rf"^[\w, ]+ = dd\.{operator.__name__}\((.*?)\)$"
    call = re.search(pattern, VERIFY.read_text(encoding="utf-8"), re.M | re.S)
    assert call
    documented = ast.parse(f"def f({call[1]}): pass").body[0]
    assert ast.unparse(documented) == ast.unparse(ast.parse(bare_signature(operator)).body[0])


def test_every_argument_is_in_the_table():
    names = [row[0].strip("`") for row in table_under(VERIFY, "Arguments") if row[0]]
    assert names == list(inspect.signature(dd.verify_attention).parameters)


def test_every_variant_is_in_the_table():
    assert {row[0].strip('`"') for row in table_under(VERIFY, "Variants")} == set(VARIANTS)


def nested(source: str, *path: str) -> str:
    """The source of a function inside another one, and so on."""
    node: Any = ast.parse(source)
    for name in path:
        node = next(n for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n.name == name)
    return str(ast.get_source_segment(source, node))


@pytest.mark.parametrize(
    "page, module, paths",
    [
        (VERIFY, three_phase, (("mirror",), ("kernel",))),
        (FLASH, flash, (("mirror",), ("make_kernel", "kernel"))),
    ],
    ids=lambda x: getattr(x, "stem", ""),
)
def test_the_phases_are_those_of_mirror_and_kernel(page, module, paths):
    quoted = re.findall(r"`(# Phase \d: [^`]*)`", page.read_text(encoding="utf-8"))
    for path in paths:
        assert re.findall(r"# Phase \d: .*", nested(inspect.getsource(module), *path)) == quoted, path


def test_the_constants_of_flash():
    text = " ".join(FLASH.read_text(encoding="utf-8").split())
    assert f"parts of `CHUNK` = {flash.CHUNK:,} keys" in text
    assert f'"Enough" is {flash.LEAST_WORK} pairs' in text
    for name, *sizes, _ in table_under(FLASH, "Two sizes of tiles"):
        tiles = getattr(flash, name.strip("`"))
        found = (tiles.rows, tiles.keys, 32 * tiles.warps, tiles.blocks, tiles.max_rank)
        assert [int(size.replace(",", "")) for size in sizes] == list(found)
    assert f"every {flash.CHUNK:,} keys" in VERIFY.read_text(encoding="utf-8")


def assert_errors(operator: Any, given: dict[str, Any], namespace: dict[str, Any], rows: list[list[str]]) -> None:
    """Each row's change of the call raises what the row says."""
    for change, exception, message in rows:
        changes = eval(f"dict({change.strip('`')})", namespace)
        with pytest.raises((TypeError, ValueError)) as caught:
            operator(**given | changes)
        assert type(caught.value).__name__ == exception, change
        pattern = ".*".join(re.escape(part.strip()) for part in message.split("..."))
        assert re.search(pattern, str(caught.value)), f"{change}: {caught.value}"


def test_the_table_of_errors():
    namespace: dict[str, Any] = {}
    exec(next(code for code, _ in python_blocks(VERIFY)), namespace)
    rows = table_under(VERIFY, "Errors")
    assert len(rows) > 25
    assert_errors(dd.verify_attention, namespace["given"], namespace, rows)


def test_the_table_of_errors_of_prefix_and_tail():
    namespace: dict[str, Any] = {}
    blocks = [code for code, run in python_blocks(VERIFY) if run]
    exec(blocks[0], namespace)
    exec(next(code for code in blocks if "tail_given =" in code), namespace)
    rows = table_under(VERIFY, "Errors of prefix and tail")
    assert len(rows) > 7
    assert_errors(dd.verify_attention_prefix_tail, namespace["tail_given"], namespace, rows)


# The pages of topk_logprobs and build_tree

TOPK, BUILD = DOCS / "topk_logprobs.md", DOCS / "build_tree.md"
# Page: how a call begins there, the operator, its variants, and the headings under which a module's phases are quoted.
TREE_PAGES: dict[Path, tuple[str, Any, tuple[str, ...], dict[str, Any]]] = {
    TOPK: (
        "logprobs, token_ids = dd.topk_logprobs",
        dd.topk_logprobs,
        topk_logprobs.VARIANTS,
        {"rounds": topk_rounds, "threshold": topk_threshold},
    ),
    BUILD: (
        "tree = dd.build_tree",
        dd.build_tree,
        build_tree.VARIANTS,
        {"heap": build_heap, "frontier": build_frontier},
    ),
}
each_tree_page = pytest.mark.parametrize("page", TREE_PAGES, ids=lambda page: page.name)


@each_tree_page
def test_the_signatures_of_the_tree_operators(page):
    begin, operator, _, _ = TREE_PAGES[page]
    call = re.search(rf"^{re.escape(begin)}\((.*?)\)$", page.read_text(encoding="utf-8"), re.M | re.S)
    assert call
    documented = ast.parse(f"def f({call[1]}): pass").body[0]
    assert ast.unparse(documented) == ast.unparse(ast.parse(bare_signature(operator)).body[0])


@each_tree_page
def test_every_argument_and_variant_of_the_tree_operators_is_in_a_table(page):
    _, operator, variants, _ = TREE_PAGES[page]
    names = [row[0].strip("`") for row in table_under(page, "Arguments") if row[0]]
    assert names == list(inspect.signature(operator).parameters)
    assert {row[0].strip('`"') for row in table_under(page, "Variants")} == set(variants)


@each_tree_page
def test_the_phases_of_the_tree_operators_are_those_of_mirror_and_kernel(page):
    sections = re.split(r"^##+ (.*)\n", page.read_text(encoding="utf-8"), flags=re.M)
    under = dict(zip(sections[1::2], sections[2::2], strict=True))
    for heading, module in TREE_PAGES[page][3].items():
        quoted = re.findall(r"^- `(# Phase \d: [^`]*)`", under[heading], re.M)
        source = inspect.getsource(module)
        definitions = {n.name: n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)}
        for name in ("mirror", "kernel"):
            code = ast.get_source_segment(source, definitions[name])
            assert re.findall(r"# Phase \d: .*", str(code)) == quoted, f"{module.__name__}.{name}"


def run_until(page: Path, name: str) -> dict[str, Any]:
    """What the page's code has defined once ``name`` is there."""
    namespace: dict[str, Any] = {}
    for code, run in python_blocks(page):
        if run:
            exec(code, namespace)
        if name in namespace:
            return namespace
    raise AssertionError(f"{page.name} does not define {name}")


def test_the_fields_of_a_tree_are_in_the_table():
    rows = table_under(BUILD, "Results")
    fields = {row[0].strip("`"): row for row in rows}
    assert list(fields) == [*DTYPES, "max_depth"]
    padded = dd.build_tree(
        np.full((1, 2, 1), -1, np.float32), np.full((1, 2, 1), 5, np.int32), np.array([9], np.int32), 39
    )
    letters = {"B": 1, "Q": 40, "ceil(Q/32)": 2}
    for name, dtype in DTYPES.items():
        _, shape, documented, _, behind = fields[name]
        array = getattr(padded, name)
        assert documented == dtype.name
        assert tuple(letters[axis] for axis in shape.strip("[]").split(", ")) == array.shape
        if behind:
            last = {"the root's token": 9, "-inf": -np.inf}.get(behind)
            assert (array[0, -1] == (int(behind) if last is None else last)).all(), name


def test_the_results_of_topk_are_in_the_table():
    results = dd.topk_logprobs(np.zeros((1, 1, 3), np.float32), 2)
    rows = table_under(TOPK, "Results")
    assert [row[0] for row in rows] == ["`logprobs`", "`token_ids`"]
    assert [(row[1], row[2]) for row in rows] == [("[B, L, k]", x.dtype.name) for x in results]


def test_the_steps_of_the_worked_tree():
    namespace = run_until(BUILD, "given")
    tree, probabilities = namespace["tree"], np.exp(namespace["logprobs"][0].astype(np.float64))
    sections = BUILD.read_text(encoding="utf-8").split("| step |")
    assert len(sections) == 2
    rows = re.search(r"(?:^\|.*\|\n)+", sections[1].split("\n", 1)[1], re.M)
    assert rows
    frontier = {(0,)}
    for n, row in enumerate(rows[0].splitlines()[1:], start=1):
        step, takes, p, offers, behind = (cell.strip() for cell in row.strip("|").split("|"))
        path = ast.literal_eval(takes.replace(")", ",)"))
        assert int(step) == n
        assert path in frontier
        frontier.remove(path)
        # The node that was made of it, by its tokens from the root on.
        lineage, node = [], n
        while node:
            lineage.append(int(tree.tokens[0, node]))
            node = int(tree.parents[0, node])
        assert lineage[::-1] == [int(namespace["token_ids"][0, d, r]) for d, r in enumerate(path)]
        assert float(p) == pytest.approx(np.exp(tree.scores[0, n]), rel=1e-6)
        new = [tuple(ast.literal_eval(x.replace(")", ",)"))) for x in re.findall(r"\([^)]*\)", offers)]
        expected = [(*path[:-1], path[-1] + 1)] if path[-1] < 2 else []
        assert new == expected + ([(*path, 0)] if len(path) < 2 else [])
        frontier |= set(new)
        stated = re.findall(r"(\([^)]*\)) ([\d.]+)", behind)
        assert {ast.literal_eval(x.replace(")", ",)")) for x, _ in stated} == frontier
        for x, probability in stated:
            ranks = ast.literal_eval(x.replace(")", ",)"))
            assert float(probability) == pytest.approx(np.prod([probabilities[d, r] for d, r in enumerate(ranks)]))
    assert n == given_budget(namespace)


def given_budget(namespace: dict[str, Any]) -> int:
    return int(namespace["given"]["tree_budget"])


def test_the_text_of_the_worked_tree():
    tree = run_until(BUILD, "given")["tree"]
    texts = [m["code"] for m in FENCE.finditer(BUILD.read_text(encoding="utf-8")) if m["language"] == "text"]
    assert tree.text() + "\n" in texts


@each_tree_page
def test_the_tables_of_errors_of_the_tree_operators(page):
    operator = TREE_PAGES[page][1]
    namespace = run_until(page, "given") | {"dataclasses": dataclasses}
    rows = table_under(page, "Errors")
    assert len(rows) > 12
    assert_errors(operator, namespace["given"], namespace, rows)


# The rooms

# From the ground up; a room may import the rooms of lower floors.
FLOORS = (
    ("device", "masks", "kdtr", "compare"),
    ("attention", "tree"),
    ("accept",),
    ("step",),
    ("check", "decode"),
    ("__main__",),
)


def rooms_imported(path: Path) -> set[str]:
    """Rooms of this package that a file imports, anywhere in it; "ddtree_numba" for the package itself."""
    package = ("ddtree_numba", *path.relative_to(PACKAGE).parts[:-1])
    modules = []
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            modules += [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            above = package[: len(package) - statement.level + 1] if statement.level else ()
            base = ".".join((*above, *filter(None, [statement.module])))
            modules += [f"{base}.{alias.name}" for alias in statement.names]
    parts = [module.split(".") for module in modules if module.split(".")[0] == "ddtree_numba"]
    return {name[1] if len(name) > 1 else name[0] for name in parts}


def imports_of_rooms() -> dict[str, set[str]]:
    """Room to what it imports of other rooms; the package's __init__ and its version are none."""
    rooms: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in ("__init__", "_version"):
            rooms.setdefault(room, set()).update(rooms_imported(path) - {room})
    return rooms


def test_lower_rooms_never_import_upper_ones():
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    rooms = imports_of_rooms()
    assert set(rooms) == set(floor_of), "a new room needs its floor, here and in docs/architecture.md"
    for room, imported in rooms.items():
        if room == "__main__":
            imported = imported - {"ddtree_numba"}
        assert all(floor_of[other] < floor_of[room] for other in imported), f"{room} imports {sorted(imported)}"


def test_the_table_of_rooms_is_what_the_code_has():
    documented = {
        room.strip("`"): set(re.findall(r"`(\w+)`", imported))
        for room, _, imported in table_under(DOCS / "architecture.md", "Rooms")
    }
    assert documented == {room: imported - {"ddtree_numba"} for room, imported in imports_of_rooms().items()}


def test_imports_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    file = tmp_path / "device" / "x.py"
    file.parent.mkdir()
    for line, room in (
        ("import ddtree_numba", "ddtree_numba"),
        ("import ddtree_numba.attention.verify as v", "attention"),
        ("from ddtree_numba import check", "check"),
        ("from ddtree_numba.kdtr import read", "kdtr"),
        ("def f():\n    from ddtree_numba.attention import verify", "attention"),
        ("from ..attention import verify", "attention"),
        ("from .. import check", "check"),
        ("from . import arrays", "device"),
    ):
        file.write_text(line)
        assert rooms_imported(file) == {room}, line
    file.write_text("import numba.cuda\nfrom numpy import array")
    assert rooms_imported(file) == set()


# The figures


@pytest.fixture(scope="module")
def figures():
    pytest.importorskip("matplotlib")
    return load(DOCS / "figures" / "make_figures.py")


def cells(svg: Path) -> dict[tuple[int, int], bool]:
    """Node and key of each cell of the mask, and whether it is drawn as seen."""
    found = {}
    for element in ElementTree.parse(svg).iter():
        match = re.fullmatch(r"(seen|unseen)-(\d+)-(\d+)", element.get("id", ""))
        if match:
            found[int(match[2]), int(match[3])] = match[1] == "seen"
    return found


def test_the_figure_shows_the_mask_of_its_tree(figures, tmp_path):
    figures.main(["--out", str(tmp_path)])
    data = figures.make_data()
    num_nodes = len(data.parents)
    assert num_nodes == figures.TREE_BUDGET + 1
    expected = {}
    for i in range(num_nodes):
        seen, node = set(), i
        while node >= 0:
            seen.add(node)
            node = int(data.parents[node])
        for k in range(figures.PREFIX + num_nodes):
            expected[i, k] = k < figures.PREFIX or k - figures.PREFIX in seen
    for name in ("tree_verify_light.svg", "tree_verify_dark.svg"):
        assert cells(tmp_path / name) == expected
        assert cells(DOCS / "figures" / name) == expected, f"{name} is not what make_figures.py draws"
        assert (DOCS / "figures" / name.replace(".svg", ".png")).stat().st_size > 10_000


def test_the_accepted_path_is_a_path_and_leaves_the_likeliest_chain(figures):
    data = figures.make_data()
    assert data.accepted[0] == 0
    assert all(data.parents[child] == parent for parent, child in zip(data.accepted, data.accepted[1:], strict=False))
    assert [data.tokens[i] for i in data.accepted[1:]] == list(figures.TARGET[: len(data.accepted) - 1])
    assert len(data.accepted) > 3
    assert figures.NODE in data.accepted
    np.testing.assert_allclose(data.weights.sum(), 1.0)
    seen = np.concatenate([np.ones(figures.PREFIX, np.bool_), data.mask[figures.NODE]])
    assert np.array_equal(data.weights > 0, seen)


def test_figures_are_the_same_bytes_each_time(figures, tmp_path):
    for run in ("first", "second"):
        figures.main(["--out", str(tmp_path / run)])
    for file in sorted((tmp_path / "first").iterdir()):
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes(), file.name
