"""Tests of docs/accept.md, docs/compact_kv.md and docs/step.md."""

import ast
import dataclasses
import inspect
import re

import pytest
from test_docs import DOCS, FENCE, assert_errors, bare_signature, run_until, table_under

import ddtree_numba as dd
from ddtree_numba.accept import argmax_tokens, compact_kv, greedy, sampled, sglang
from ddtree_numba.accept.accepted import shapes

ACCEPT, COMPACT, STEP = (DOCS / f"{name}.md" for name in ("accept", "compact_kv", "step"))


@pytest.mark.parametrize(
    ("page", "call", "operator"),
    [
        (ACCEPT, "target_tokens = dd.argmax_tokens", dd.argmax_tokens),
        (ACCEPT, "accepted = dd.accept_greedy", dd.accept_greedy),
        (ACCEPT, "accepted = dd.accept_sampled", dd.accept_sampled),
        (ACCEPT, "dd.verify_tree_greedy", dd.verify_tree_greedy),
        (COMPACT, "cache_seqlens = dd.compact_kv", dd.compact_kv),
        (COMPACT, "rows = dd.gather_accepted", dd.gather_accepted),
        (STEP, "step = dd.DecodeStep", dd.DecodeStep),
        (STEP, "accepted = step", dd.DecodeStep.__call__),
    ],
)
def test_the_signatures_of_the_accept_operators(page, call, operator):
    found = re.search(rf"^{re.escape(call)}\((.*?)\)$", page.read_text(encoding="utf-8"), re.M | re.S)
    assert found
    documented = ast.unparse(ast.parse(f"def f({found[1]}): pass").body[0])
    assert documented == ast.unparse(ast.parse(bare_signature(operator).replace("f(self, ", "f(")).body[0])


@pytest.mark.parametrize(
    ("page", "heading", "operator", "given", "least"),
    [
        (ACCEPT, "Errors", dd.accept_greedy, "given", 20),
        (ACCEPT, "Errors of sampling", dd.accept_sampled, "sampled_given", 15),
        (ACCEPT, "Errors of argmax_tokens", dd.argmax_tokens, "argmax_given", 5),
        (ACCEPT, "Errors of SGLang's form", dd.verify_tree_greedy, "sglang_given", 7),
        (COMPACT, "Errors", dd.compact_kv, "given", 15),
        (COMPACT, "Errors of gather_accepted", dd.gather_accepted, "gather_given", 7),
        (STEP, "Errors", "step", "given", 15),
        (STEP, "Errors of the sizes", dd.DecodeStep, "sizes", 8),
    ],
)
def test_the_tables_of_errors_of_the_accept_operators(page, heading, operator, given, least):
    namespace = run_until(page, given) | {"dataclasses": dataclasses}
    rows = table_under(page, heading)
    assert len(rows) > least
    assert_errors(
        namespace.get(operator, operator) if isinstance(operator, str) else operator, namespace[given], namespace, rows
    )


@pytest.mark.parametrize(
    ("page", "heading", "module"),
    [
        (ACCEPT, "argmax_tokens", argmax_tokens),
        (ACCEPT, "accept_greedy", greedy),
        (ACCEPT, "accept_sampled", sampled),
        (ACCEPT, "verify_tree_greedy", sglang),
        (COMPACT, "What each thread does", compact_kv),
    ],
)
def test_the_phases_of_the_accept_operators(page, heading, module):
    sections = re.split(r"^##+ (.*)\n", page.read_text(encoding="utf-8"), flags=re.M)
    under = dict(zip(sections[1::2], sections[2::2], strict=True))
    quoted = re.findall(r"^- `(# Phase \d: [^`]*)`", under[heading], re.M)
    source = inspect.getsource(module)
    mirror = next(n for n in ast.parse(source).body if getattr(n, "name", "") == "mirror")
    assert quoted == re.findall(r"# Phase \d: .*", str(ast.get_source_segment(source, mirror)))


def test_the_walk_of_the_page_is_drawn_as_text():
    namespace = run_until(ACCEPT, "accepted")
    texts = [m["code"] for m in FENCE.finditer(ACCEPT.read_text(encoding="utf-8")) if m["language"] == "text"]
    assert namespace["tree"].text(accepted=namespace["accepted"].nodes[0]) + "\n" in texts


def test_the_results_of_a_walk_are_in_the_table():
    assert [row[0].strip("`") for row in table_under(ACCEPT, "Results")] == list(shapes(0, 0))


def test_the_flags_are_in_the_table():
    assert [(row[0], int(row[1])) for row in table_under(ACCEPT, "Flags")] == [
        (f"`dd.{name}`", getattr(dd, name)) for name in ("BAD_TARGET", "BAD_LINK", "STOPPED")
    ]
