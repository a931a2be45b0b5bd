"""The table of hostile arguments: for each public operator one small right call, and mistakes made in it.

A row changes the arguments of the right call in one place. Either the operator refuses them, by an exception whose
class and message the row names; or they are contents, which it takes, and the row says what they give.

Mistakes that every array can have (a list in its place, another byte order, an odd address, ..) are made in each array
of each operator; the page shows them once. ``python tests/hostile.py --write`` writes docs/hostile_input.md.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import ddtree_numba as dd  # noqa: E402  isort: skip  (chooses the backend: before anything imports numba.cuda)

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from hostile_checks import CHECKS  # noqa: E402

from ddtree_numba.device import arrays  # noqa: E402
from ddtree_numba.tree.draft_tree import DTYPES  # noqa: E402

PAGE = ROOT / "docs" / "hostile_input.md"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ("float32", "float16", "bfloat16", "uint16")
FILLER = 77
NAN, INF = math.nan, math.inf

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class Row:
    """One mistake, and its answer.

    Attributes
    ----------
    argument : str
        Where the mistake is, as "q", "tree.tokens" or "out[0]".
    mistake : str
    change : function
        Makes wrong arguments of the right ones.
    error : exception class or None
        None: the operator takes it.
    answer : str
        What the message must match; without an error what the call gives, in words.
    general : bool
        Every array answers to this mistake alike.
    host : bool
        The mistake can be made in host memory alone: a thing of NumPy's, or of mirrors.
    """

    argument: str
    mistake: str
    change: Change
    error: type[Exception] | None
    answer: str
    general: bool = False
    host: bool = False


@dataclass(frozen=True)
class Operator:
    """An operator with one right call of it.

    Attributes
    ----------
    name : str
        Of the function in `ddtree_numba`; behind a blank, which of its ways is meant.
    given : function
        Makes fresh arguments; results are full of FILLER.
    rows : list of Row
    """

    name: str
    given: Callable[[], Arguments]
    rows: list[Row] = field(default_factory=list)

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(dd, self.name.split()[0])

    def check(self, before: Arguments, found: Any, after: Arguments) -> None:
        """Raise AssertionError unless a call has given what its arguments must give."""
        CHECKS[self.name.split()[0]](before, found, after)


# Arguments, and places in them


def parts(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


def get(given: Any, path: str) -> Any:
    for part in parts(path):
        if isinstance(given, dict):
            given = given[part]
        else:
            given = given[int(part)] if part.isdigit() else getattr(given, part)
    return given


def put(given: Any, path: str, value: Any) -> Any:
    """The same arguments, another value in one place."""
    first, *rest = parts(path)
    if rest:
        value = put(get(given, first), ".".join(rest), value)
    if isinstance(given, dict):
        return given | {first: value}
    if first.isdigit():
        return type(given)(value if n == int(first) else x for n, x in enumerate(given))
    return replace(given, **{first: value})


def arrays_in(x: Any) -> Iterator[np.ndarray]:
    """All NumPy arrays in arguments or results."""
    if isinstance(x, np.ndarray):
        yield x
    elif isinstance(x, dict):
        yield from arrays_in(list(x.values()))
    elif isinstance(x, (list, tuple)):
        for one in x:
            yield from arrays_in(one)
    elif isinstance(x, (dd.DraftTree, dd.Accepted)):
        yield from arrays_in(list(vars(x).values()))


def copied(x: Any) -> Any:
    """Arguments with arrays of their own."""
    if isinstance(x, np.ndarray):
        return x.copy() if x.nbytes < 2**24 else x  # a large one is one element, shown many times
    if isinstance(x, dict):
        return {name: copied(one) for name, one in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(copied(one) for one in x)
    if isinstance(x, (dd.DraftTree, dd.Accepted)):
        return replace(x, **{name: copied(one) for name, one in vars(x).items()})
    return x


# Mistakes


def set_to(path: str, value: Any) -> Change:
    return lambda given: put(given, path, value)


def made(path: str, function: Callable[[Any], Any]) -> Change:
    return lambda given: put(given, path, function(get(given, path)))


def several(*changes: Change) -> Change:
    def change(given: Arguments) -> Arguments:
        for one in changes:
            given = one(given)
        return given

    return change


def content(path: str, at: Any, value: Any) -> Change:
    """The array, one of its elements another."""

    def change(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[at] = value
        return x

    return made(path, change)


def validated(change: Change) -> Change:
    return several(change, set_to("validate", True))


def odd_address(x: np.ndarray) -> np.ndarray:
    raw = np.zeros(x.nbytes + 16, np.uint8)
    return np.ndarray(x.shape, x.dtype, raw, offset=1)


def uneven_strides(x: np.ndarray) -> np.ndarray:
    """Elements whose distance is no multiple of the item size."""
    step = x.dtype.itemsize + 1
    raw = np.zeros(max(x.size, 1) * step + 16, np.uint8)
    return np.ndarray(x.shape, x.dtype, raw, strides=arrays.contiguous_strides(x.shape, step))


def in_one_place(x: np.ndarray) -> np.ndarray:
    """A writable array whose first axis has stride 0."""
    one = x[:1].copy()
    return np.lib.stride_tricks.as_strided(one, x.shape, (0, *one.strides[1:]))


def locked(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def longer(axis: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.concatenate([x, np.take(x, [0], axis)], axis)


def one_memory(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two with their contents, in C order, the last bytes of the first the first ones of the second."""
    meet = max(first.nbytes - 1, 0) // 16 * 16
    raw = np.zeros(meet + max(second.nbytes, 16) + 16, np.uint8)
    two = np.ndarray(second.shape, second.dtype, raw, offset=meet)
    one = np.ndarray(first.shape, first.dtype, raw)
    two[...] = second
    one[...] = first
    return one, two


def overlap(path: str, other: str) -> Change:
    """Two arguments that share memory."""

    def change(given: Arguments) -> Arguments:
        one, two = one_memory(get(given, other), get(given, path))
        return put(put(given, other, one), path, two)

    return change


NO_ARRAY = "it must be a CuPy, Numba or PyTorch array on a GPU, or a NumPy array"


def array_rows(
    path: str,
    *allowed: str,
    fixed: Sequence[int] = (),
    ranks: bool = True,
    any_dtype: bool = False,
    optional: bool = False,
    brief: bool = False,
    name: str | None = None,
    no_array: str = NO_ARRAY,
) -> list[Row]:
    """Mistakes in an array.

    Parameters
    ----------
    path : str
        Where it is; messages call it ``name``.
    allowed : str
        Its dtypes.
    fixed : sequence of int
        Axes whose length the operator knows.
    ranks : bool
        The number of axes is fixed.
    any_dtype : bool
        All dtypes are right.
    optional : bool
        None is right.
    brief : bool
        One mistake of each family alone: for the many arrays of a tree.
    """
    word = re.escape(name or path)
    rows: list[Row] = []

    def add(mistake: str, change: Change, error: type[Exception], message: str, **options: Any) -> None:
        rows.append(Row(path, mistake, change, error, f"^{word} {message}", **options))

    def general(mistake: str, change: Change, error: type[Exception], message: str, host: bool = False) -> None:
        add(mistake, change, error, message, general=True, host=host)

    things: list[tuple[str, Any]] = [("None", None), ("a string", "abc"), ("a number", 1.5), ("a dict", {})]
    for mistake, thing in things[int(optional) : 2 if brief else None]:
        general(mistake, set_to(path, thing), TypeError, rf"is a builtins\.\w+; {no_array}")
    general("a list", made(path, np.ndarray.tolist), TypeError, rf"is a builtins\.list; {no_array}")
    others = ["float64", "float32", "complex64", "int64", "int32", "int8", "uint32", "bool", "float8_e4m3fn"]
    wrong = [] if any_dtype else [x for x in others if x not in allowed][: 2 if brief else None]
    for dtype in wrong:
        change = made(path, lambda x, dtype=dtype: np.zeros(x.shape, getattr(ml_dtypes, dtype, dtype)))
        add(f"{dtype}", change, TypeError, f"has dtype {dtype}; it must be {' or '.join(allowed)}$")
    odd = "is not aligned: its address and strides must be multiples of its item size"
    kind = r"[\w<>|]+\[[\d, ]*\]"
    whole = allowed[:1] not in (("bool",), ("uint8",))  # else an element is one byte, which has no order nor alignment
    if whole:
        general("an odd address", made(path, odd_address), ValueError, f"{kind} {odd}")
    if not brief:
        objects = made(path, lambda x: x.astype(object))
        general("objects", objects, TypeError, "has dtype object, which no kernel takes", host=True)
        masked = made(path, lambda x: np.ma.masked_array(x))
        general("a masked array", masked, TypeError, f"is a numpy.*MaskedArray; {NO_ARRAY}", host=True)
        nothing = made(path, lambda x: np.zeros(x.shape, "V0"))
        general("elements of no bytes", nothing, TypeError, r"has dtype \|V0, which no kernel takes", host=True)
        if not any_dtype:
            records = made(path, lambda x: np.zeros(x.shape, [("a", "i4"), ("b", "i4")]))
            general("records", records, TypeError, r"has dtype \[.*\]; it must be", host=True)
            texts = made(path, lambda x: np.zeros(x.shape, "U1"))
            general("texts", texts, TypeError, r"has dtype <U1; it must be", host=True)
        if whole:
            swapped = made(path, lambda x: np.zeros(x.shape, swapped_dtype(x.dtype)))
            general(
                "another byte order", swapped, TypeError, "has dtype >.*; it must be in native byte order", host=True
            )
            general("strides between elements", made(path, uneven_strides), ValueError, f"{kind} {odd}")
    if ranks:
        for mistake, function in (("an axis too many", lambda x: x[None]), ("an axis too few", lambda x: x[0, ...])):
            add(mistake, made(path, function), ValueError, r"has shape \[[\d, ]*\]; it must be")
    for axis in fixed:
        change = made(path, longer(axis))
        add(f"axis {axis} is longer", change, ValueError, r"has shape \[[\d, ]*\]; it must be")
    return rows


def swapped_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Big-endian; bfloat16, of which there is none, as its bits."""
    return (np.dtype(np.uint16) if dtype == BFLOAT16 else dtype).newbyteorder(">")


def result_rows(
    path: str, *reads: str, name: str | None = None, names: Sequence[str] = (), brief: bool = False
) -> list[Row]:
    """Mistakes in an array that is written to; ``names`` are those of ``reads`` in messages, where they differ."""
    word = re.escape(name or path)
    read_only = rf"^{word} is read-only; the result cannot be written to it"
    rows = [Row(path, "read-only", made(path, locked), ValueError, read_only)]
    if not brief:
        itself = rf"^{word} .* overlaps itself: strides \(0.* put several elements in one place"
        rows.append(Row(path, "stride 0 along the first axis", made(path, in_one_place), ValueError, itself))
    for read, called in zip(reads, names or reads, strict=True):
        message = f"^({word} overlaps {re.escape(called)}|{re.escape(called)} overlaps {word}) in memory; "
        message += "(the result needs|each layer needs) memory of its own"
        rows.append(Row(path, f"overlaps {called}", overlap(path, read), ValueError, message))
    return rows


def integer_rows(
    path: str, *, least: int, most: int | None = None, optional: bool = False, name: str | None = None
) -> list[Row]:
    """Mistakes in an integer between two bounds."""
    word = re.escape(name or path)
    things: list[Any] = [None, 1.5, NAN, "3", True, [3], np.zeros(2, np.int32)]
    rows = [
        Row(path, short(thing), set_to(path, thing), TypeError, rf"^{word} is .*; it must be an integer$")
        for thing in things[int(optional) :]
    ]
    for number in (least - 1, -(10**30), *(() if most is None else (most + 1, 10**30, 10**5000))):
        rows.append(Row(path, short(number), set_to(path, number), ValueError, f"^{word} is .*; it must"))
    return rows


def short(value: Any) -> str:
    """A value for the page."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**9:
        digits = len(bin(value)) * 0.30103
        known = {10**30: "10**30", -(10**30): "-10**30", 10**5000: "10**5000"}
        return known.get(value, f"{value}" if digits < 30 else f"about 10**{digits:.0f}")
    return " ".join(repr(value).split())


def variant_rows(*, argument: str = "variant") -> list[Row]:
    message = f"^{argument} is .*; it must be one of: "
    things = ("tcgen05", "", None, 3, ["auto"], np.array(["auto", "flash"]))
    return [Row(argument, short(thing), set_to(argument, thing), ValueError, message) for thing in things]


def tree_rows() -> list[Row]:
    """Mistakes in a DraftTree that is read."""
    path = "tree"
    rows = [
        Row(path, short(thing), set_to(path, thing), TypeError, rf"^{path} is a .*; it must be a DraftTree")
        for thing in (None, "tree", [1])
    ]
    for name, dtype in DTYPES.items():
        axes = {"num_nodes": [0], "tree_mask": [0, 1, 2]}.get(name, [0, 1])
        rows += array_rows(f"{path}.{name}", dtype.name, fixed=[] if name == "tokens" else axes, brief=True)
    message = rf"^{path}\.\w+ has shape .*; it must be \[B"
    rows.append(Row(f"{path}.tokens", "axis 1 is longer", made(f"{path}.tokens", longer(1)), ValueError, message))
    rows += integer_rows(f"{path}.max_depth", least=0)
    return rows


def accepted_rows(*reads: str) -> list[Row]:
    """Mistakes in an Accepted that is written to."""
    rows = [
        Row("out", short(thing), set_to("out", thing), TypeError, "^out is a .*; it must be an Accepted")
        for thing in ("out", [1], (None,) * 5)
    ]
    for name in ("nodes", "num_accepted", "bonus_tokens", "flags", "tokens"):
        path = f"out.{name}"
        rows += array_rows(path, "int32", fixed=[0, 1] if name in ("nodes", "tokens") else [0], brief=True)
        rows += result_rows(path, *reads[:1], brief=name != "nodes")
    same = made("out", lambda out: replace(out, flags=out.num_accepted))
    rows.append(Row("out.flags", "is out.num_accepted", same, ValueError, r"^out\.flags overlaps out\.num_accepted"))
    return rows


def stop_rows() -> list[Row]:
    path = "stop_tokens"
    token = "^a stop token is .*; "
    no_array = f"{NO_ARRAY}, or an integer, or a list, tuple or set of integers"
    return [
        *(Row(path, short(x), set_to(path, x), ValueError, f"{token}a token is 0 to") for x in (-1, 2**31, [5, -1])),
        *(Row(path, short(x), set_to(path, x), ValueError, token) for x in (10**30, 10**5000)),
        *(
            Row(path, short(x), set_to(path, x), TypeError, f"{token}it must be an integer")
            for x in (True, [1.5], ["a"])
        ),
        *(
            Row(path, short(x), set_to(path, x), TypeError, rf"^stop_tokens is a .*; {no_array}")
            for x in (1.5, "5", {"a": 5})
        ),
        Row(
            path, "float32", set_to(path, np.zeros(2, np.float32)), TypeError, "^stop_tokens has dtype float32; it must"
        ),
        Row(
            path,
            "3 axes",
            set_to(path, np.zeros((2, 1, 1), np.int64)),
            ValueError,
            "^stop_tokens has shape .*; it must",
        ),
        Row(
            path,
            "another B",
            set_to(path, np.zeros((3, 1), np.int64)),
            ValueError,
            "^stop_tokens has shape .*; it must",
        ),
    ]


def refused(argument: str, mistake: str, change: Change, error: type[Exception], answer: str, **options: Any) -> Row:
    return Row(argument, mistake, change, error, answer, **options)


def gives(argument: str, mistake: str, change: Change, answer: str, **options: Any) -> Row:
    return Row(argument, mistake, change, None, answer, **options)


def invalid(argument: str, mistake: str, change: Change, answer: str, message: str) -> list[Row]:
    """Contents that are taken, and refused under validate=True."""
    return [
        gives(argument, mistake, change, answer),
        refused(argument, f"{mistake}, validate=True", validated(change), ValueError, message),
    ]


# The operators


def full(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    return np.full(shape, FILLER, dtype)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def draft_tree() -> dd.DraftTree:
    """Two trees of room for 4 nodes: a root with two children, one of which has a child; and a chain of two."""
    logprobs = np.log(np.array([[[0.6, 0.4], [0.9, 0.1]], [[0.7, NAN], [NAN, NAN]]], np.float32))
    tokens = np.array([[[3, 4], [5, 6]], [[7, 8], [9, 1]]], np.int32)
    return dd.build_tree(logprobs, tokens, np.array([1, 2], np.int32), 3, variant="heap_numpy")


def empty_accepted(max_depth: int = 2) -> dd.Accepted:
    path = (2, max_depth + 1)
    return dd.Accepted(full(*path), full(2), full(2), full(2), full(*path))


def accepted_paths() -> dd.Accepted:
    """What a walk of the trees of `draft_tree` gives: nodes 0, 1, 3 and 0."""
    nodes, counts = np.array([[0, 2, 3], [0, -1, -1]], np.int32), np.array([3, 1], np.int32)
    return dd.Accepted(nodes, counts, np.zeros(2, np.int32), np.zeros(2, np.int32))


def argmax_tokens() -> Operator:
    def given() -> Arguments:
        return {"logits": normal(2, 2, 5), "out": full(2, 2)}

    rows = [
        *array_rows("logits", *FLOATS),
        *array_rows("out", "int32", fixed=[0, 1], optional=True),
        *result_rows("out", "logits"),
        refused(
            "logits",
            "V = 0",
            made("logits", lambda x: x[..., :0]),
            ValueError,
            "^logits .* has V = 0; it must be at least 1",
        ),
        refused(
            "logits",
            "2**32 rows",
            set_to("logits", np.broadcast_to(np.float32(0), (2**16, 2**16, 1))),
            ValueError,
            "^logits .* has 4294967296 rows; they must",
        ),
        gives("logits", "a NaN", content("logits", (0, 1, 2), NAN), "-1 in that row"),
        gives("logits", "nothing but -inf", content("logits", (0, 1), -INF), "0 in that row"),
        gives("logits", "+inf twice", content("logits", (0, 1, slice(2, 4)), INF), "the lower id"),
    ]
    return Operator("argmax_tokens", given, rows)


def topk_logprobs() -> Operator:
    def given() -> Arguments:
        out = full(2, 1, 2, dtype=np.float32), full(2, 1, 2)
        return {"logits": normal(2, 1, 4), "k": 2, "variant": "rounds", "out": out}

    rows = [
        *array_rows("logits", *FLOATS),
        *integer_rows("k", least=1, most=4),
        refused(
            "k",
            "above 1024",
            several(set_to("logits", np.zeros((1, 1, 2000), np.float32)), set_to("k", 1025)),
            ValueError,
            "^k is 1025; it must be between 1 and 1024",
        ),
        *variant_rows(),
        *(
            refused("out", short(x), set_to("out", x), TypeError, "^out must be a pair of arrays")
            for x in ("ab", [1], {}, full(2))
        ),
        *array_rows("out[0]", "float32", fixed=[0, 1, 2]),
        *array_rows("out[1]", "int32", fixed=[0, 1, 2]),
        *result_rows("out[0]", "logits", "out[1]"),
        *result_rows("out[1]", "logits"),
        refused(
            "logits",
            "V = 0",
            made("logits", lambda x: x[..., :0]),
            ValueError,
            "^logits .* has V = 0; it must be at least 1",
        ),
        refused(
            "logits",
            "2**32 rows",
            several(set_to("logits", np.broadcast_to(np.float32(0), (2**16, 2**16, 1))), set_to("k", 1)),
            ValueError,
            "^logits .* has 4294967296 rows; they must",
        ),
        gives("logits", "a NaN", content("logits", (0, 0, 1), NAN), "log-probabilities -inf and ids -1 in that row"),
        gives("logits", "a +inf", content("logits", (0, 0, 1), INF), "log-probabilities -inf and ids -1 in that row"),
        gives(
            "logits",
            "-inf all over a row",
            content("logits", (0, 0), -INF),
            "log-probabilities -inf and ids -1 in that row",
        ),
        gives(
            "logits",
            "-inf but for one",
            content("logits", (0, 0, slice(1, 4)), -INF),
            "that token with 0, then -inf with the lowest ids",
        ),
    ]
    return Operator("topk_logprobs", given, rows)


def build_tree() -> Operator:
    def given() -> Arguments:
        out = dd.DraftTree.empty(np.zeros(1), 2, 3, 2)
        for x in arrays_in(out):
            x.fill(FILLER)
        logprobs = np.log(np.array([[[0.6, 0.3], [0.8, 0.1]], [[0.5, 0.4], [0.4, 0.2]]], np.float32))
        ids = np.array([[[3, 4], [5, 6]], [[7, 8], [9, 1]]], np.int32)
        return {
            "logprobs": logprobs,
            "token_ids": ids,
            "root_tokens": np.array([1, 2], np.int32),
            "tree_budget": 3,
            "variant": "heap",
            "out": out,
        }

    out_rows: list[Row] = []
    for name, dtype in DTYPES.items():
        path, axes = f"out.{name}", {"num_nodes": [0], "tree_mask": [0, 1, 2]}.get(name, [0, 1])
        out_rows += array_rows(path, dtype.name, fixed=axes, brief=True)
        out_rows += result_rows(path, "logprobs", brief=name != "tokens")
    logprob = r"^logprobs\[0, 0, \d\] is .*, which is "
    token = "; a token is 0 to 2147483647"
    rows = [
        *array_rows("logprobs", "float32", ranks=True),
        *array_rows("token_ids", "int32", "int64", fixed=[0, 1, 2]),
        *array_rows("root_tokens", "int32", "int64", fixed=[0]),
        refused(
            "logprobs",
            "L = 0",
            made("logprobs", lambda x: x[:, :0]),
            ValueError,
            "^logprobs .* has L = 0, K = 2; both must",
        ),
        refused(
            "logprobs",
            "K = 0",
            made("logprobs", lambda x: x[..., :0]),
            ValueError,
            "^logprobs .* has L = 2, K = 0; both must",
        ),
        *integer_rows("tree_budget", least=0, most=4094),
        refused(
            "tree_budget",
            "beyond shared memory",
            several(
                set_to("tree_budget", 4094),
                set_to("logprobs", np.zeros((1, 500, 1), np.float32)),
                set_to("token_ids", np.zeros((1, 500, 1), np.int32)),
                set_to("root_tokens", np.zeros(1, np.int32)),
                set_to("out", None),
            ),
            ValueError,
            "^tree_budget = 4094 with L = 500 needs more shared memory than",
            host=True,
        ),
        *variant_rows(),
        *(
            refused("out", short(x), set_to("out", x), TypeError, "^out is a .*; it must be a DraftTree")
            for x in ("tree", [1])
        ),
        *(row for row in integer_rows("out.max_depth", least=0) if row.error is TypeError),
        refused(
            "out.max_depth",
            "too small",
            set_to("out.max_depth", 1),
            ValueError,
            "^out has max_depth = 1; it must be at least 2",
        ),
        *out_rows,
        refused(
            "out.depths",
            "is out.parents",
            made("out", lambda out: replace(out, depths=out.parents)),
            ValueError,
            r"^out\.depths overlaps out\.parents",
        ),
        gives(
            "logprobs",
            "NaN first in a row",
            content("logprobs", (0, 0, 0), NAN),
            "the root alone: the row has no candidate",
        ),
        gives("logprobs", "a NaN behind", content("logprobs", (0, 0, 1), NAN), "the row ends before it"),
        gives("logprobs", "+inf", content("logprobs", (0, 1, 0), INF), "the row ends before it"),
        *invalid(
            "logprobs",
            "a rising row",
            content("logprobs", (0, 0, 1), -0.125),
            "some tree of at most tree_budget + 1 nodes",
            f"{logprob}larger than the entry before it",
        ),
        *invalid(
            "logprobs",
            "above 0",
            content("logprobs", (0, 0, 0), 3.0),
            "some tree of at most tree_budget + 1 nodes",
            f"{logprob}above 0",
        ),
        *invalid(
            "token_ids",
            "a negative token",
            content("token_ids", (0, 0, 0), -5),
            "the token as it is",
            rf"^token_ids\[0, 0, 0\] is -5{token}",
        ),
        *invalid(
            "root_tokens",
            "a negative token",
            content("root_tokens", 1, -5),
            "the token as it is",
            rf"^root_tokens\[1\] is -5{token}",
        ),
    ]
    return Operator("build_tree", given, rows)


def accept_greedy() -> Operator:
    def given() -> Arguments:
        targets = np.array([[4, 0, 0, 5], [9, 7, 0, 0]], np.int32)
        return {"tree": draft_tree(), "target_tokens": targets, "stop_tokens": None, "out": empty_accepted()}

    rows = [
        *tree_rows(),
        refused(
            "tree.max_depth",
            "2**31 - 1",
            set_to("tree.max_depth", 2**31 - 1),
            ValueError,
            r"^tree\.max_depth is 2147483647; it must be less than",
        ),
        *array_rows("target_tokens", "int32", "int64", fixed=[0, 1]),
        *stop_rows(),
        *accepted_rows("target_tokens"),
        *walk_contents(),
        gives("target_tokens", "negative", content("target_tokens", (0, 0), -7), "flag BAD_TARGET, bonus token -1"),
        gives(
            "target_tokens",
            "no int32",
            several(made("target_tokens", lambda x: x.astype(np.int64)), content("target_tokens", (0, 0), 2**40)),
            "flag BAD_TARGET, bonus token -1",
        ),
    ]
    return Operator("accept_greedy", given, rows)


def walk_contents() -> list[Row]:
    """Contents of trees, for both walks."""
    later = "it must be -1 or a later node of the tree, which has"
    count = r"^tree\.num_nodes\[0\] is .*; it must be between 0 and Q = 4"
    return [
        *invalid("tree.num_nodes", "above Q", content("tree.num_nodes", 0, 10**9), "the same as Q", count),
        *invalid("tree.num_nodes", "negative", content("tree.num_nodes", 0, -3), "an idle slot", count),
        *invalid(
            "tree.first_child",
            "a link to the node itself",
            content("tree.first_child", (0, 0), 0),
            "flag BAD_LINK; children behind it are not seen",
            rf"^tree\.first_child\[0, 0\] is 0; {later}",
        ),
        *invalid(
            "tree.next_sibling",
            "a cycle of siblings",
            content("tree.next_sibling", (0, 1), 1),
            "flag BAD_LINK; children behind it are not seen",
            rf"^tree\.next_sibling\[0, 1\] is 1; {later}",
        ),
        *invalid(
            "tree.first_child",
            "a link far outside",
            content("tree.first_child", (0, 0), 2**31 - 1),
            "flag BAD_LINK; children behind it are not seen",
            rf"^tree\.first_child\[0, 0\] is 2147483647; {later}",
        ),
        *invalid(
            "tree.next_sibling",
            "a link far below 0",
            content("tree.next_sibling", (0, 1), -(2**31)),
            "flag BAD_LINK; children behind it are not seen",
            rf"^tree\.next_sibling\[0, 1\] is -2147483648; {later}",
        ),
    ]


def accept_sampled() -> Operator:
    def given() -> Arguments:
        probs = np.full((2, 4, 6), 1 / 6, np.float32)
        return {
            "tree": draft_tree(),
            "target_probs": probs,
            "seeds": np.array([5, -6]),
            "positions": np.array([3, 4]),
            "uniforms": None,
            "stop_tokens": None,
            "out": empty_accepted(),
        }

    by_uniforms = several(
        set_to("seeds", None), set_to("positions", None), set_to("uniforms", np.full((2, 4), 0.7, np.float32))
    )
    uniforms = [
        replace(row, change=several(by_uniforms, row.change))
        for row in array_rows("uniforms", "float32", "float64", fixed=[0, 1], optional=True)
    ]
    randomness = "^the randomness is given by .*; it must be either seeds and positions, or uniforms"
    rows = [
        *tree_rows(),
        *array_rows("target_probs", *FLOATS, fixed=[0, 1]),
        refused(
            "target_probs",
            "V = 0",
            made("target_probs", lambda x: x[..., :0]),
            ValueError,
            "^target_probs .* has V = 0; it must be between 1",
        ),
        refused(
            "target_probs",
            "V above 2**19",
            set_to("target_probs", np.broadcast_to(np.float32(0), (2, 4, 2**19 + 1))),
            ValueError,
            "^target_probs .* has V = 524289; it must be between 1",
        ),
        *array_rows("seeds", "int64", "uint64", fixed=[0], optional=True),
        *array_rows("positions", "int32", "int64", ranks=False, fixed=[0], optional=True),
        *uniforms,
        refused("seeds", "None", set_to("seeds", None), ValueError, randomness),
        refused("positions", "None", set_to("positions", None), ValueError, randomness),
        refused(
            "uniforms", "together with seeds", set_to("uniforms", np.zeros((2, 4), np.float32)), ValueError, randomness
        ),
        refused(
            "positions",
            "3 axes",
            set_to("positions", np.zeros((2, 4, 1), np.int64)),
            ValueError,
            r"^positions has shape \[2, 4, 1\]; it must be \[B\] or \[B, Q\]",
        ),
        *stop_rows(),
        *accepted_rows("target_probs"),
        *walk_contents(),
        gives("target_probs", "a NaN", content("target_probs", (0, 0, 2), NAN), "flag BAD_TARGET, bonus token -1"),
        gives("target_probs", "negative", content("target_probs", (0, 0, 2), -0.5), "flag BAD_TARGET, bonus token -1"),
        gives("target_probs", "above 1", content("target_probs", (0, 0, 2), 1.5), "flag BAD_TARGET, bonus token -1"),
        gives("target_probs", "+inf", content("target_probs", (0, 0, 2), INF), "flag BAD_TARGET, bonus token -1"),
        gives("target_probs", "all 0", content("target_probs", (0, 0), 0.0), "flag BAD_TARGET, bonus token -1"),
        gives(
            "uniforms",
            "a NaN",
            several(by_uniforms, content("uniforms", (0, 0), NAN)),
            "flag BAD_TARGET, bonus token -1",
        ),
        gives(
            "uniforms",
            "negative",
            several(by_uniforms, content("uniforms", (0, 0), -0.25)),
            "flag BAD_TARGET, bonus token -1",
        ),
        gives(
            "uniforms",
            "above 1",
            several(by_uniforms, content("uniforms", (0, 0), 9.0)),
            "the last token of any weight",
        ),
        gives("positions", "the least int64", content("positions", 0, -(2**63)), "a draw like any other"),
    ]
    return Operator("accept_sampled", given, rows)


def verify_tree_greedy() -> Operator:
    index = np.arange(8).reshape(2, 4)

    def given() -> Arguments:
        tree = draft_tree()
        return {
            "predicts": full(9),
            "accept_index": full(2, 3),
            "accept_token_num": full(2),
            "candidates": tree.tokens.astype(np.int64),
            "retrive_index": index.copy(),
            "retrive_next_token": tree.first_child.astype(np.int64),
            "retrive_next_sibling": tree.next_sibling.astype(np.int64),
            "target_predict": np.array([[4, 0, 0, 5], [9, 7, 0, 0]]),
        }

    read = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling", "target_predict")
    rows: list[Row] = []
    for name in read:
        rows += array_rows(name, "int32", "int64", fixed=[] if name == "candidates" else [0, 1])
    for name, fixed in (("predicts", []), ("accept_index", [0]), ("accept_token_num", [0])):
        rows += array_rows(name, "int32", fixed=fixed)
        rows += result_rows(name, "candidates", "target_predict")
    rows += [
        refused(
            "candidates",
            "Q = 0",
            lambda given: given | {name: given[name][:, :0] for name in read},
            ValueError,
            "^candidates .* has Q = 0; it must be at least 1",
        ),
        refused(
            "predicts",
            "less than B * Q",
            made("predicts", lambda x: x[:7]),
            ValueError,
            r"^predicts int32\[7\] has room for less than B \* Q = 8",
        ),
        refused(
            "accept_index",
            "overlaps predicts",
            overlap("accept_index", "predicts"),
            ValueError,
            "^accept_index overlaps predicts",
        ),
        gives(
            "retrive_index",
            "a root far outside",
            content("retrive_index", (0, 0), 2**40),
            "accept_token_num 0, nothing else is written",
        ),
        gives(
            "retrive_index",
            "a negative root",
            content("retrive_index", (0, 0), -1),
            "accept_token_num 0, nothing else is written",
        ),
        gives(
            "retrive_index",
            "a node outside",
            content("retrive_index", (0, slice(1, 4)), 10**9),
            "the walk ends before it",
        ),
        gives("retrive_next_token", "far outside", content("retrive_next_token", (0, 0), 2**62), "the walk ends"),
        gives(
            "retrive_next_token",
            "the root again",
            content("retrive_next_token", (0, 0), 0),
            "the walk ends after Q visits",
        ),
        gives(
            "retrive_next_sibling",
            "a cycle",
            content("retrive_next_sibling", (0, 1), 1),
            "the walk ends after Q visits",
        ),
        gives(
            "accept_index",
            "no column",
            made("accept_index", lambda x: x[:, :0]),
            "accept_token_num 0, nothing else is written",
        ),
    ]
    return Operator("verify_tree_greedy", given, rows)


def target_probs() -> Operator:
    def given() -> Arguments:
        return {
            "logits": normal(2, 1, 5),
            "temperature": 0.75,
            "top_k": 3,
            "top_p": 0.9,
            "out": full(2, 1, 5, dtype=np.float32),
        }

    def control(path: str, dtype: str) -> list[Row]:
        number = f"it must be a number, or an array .B. of {dtype}"
        array = set_to(path, np.ones(2, dtype))
        mistakes = [
            replace(row, change=several(array, row.change))
            for row in array_rows(path, dtype, fixed=[0])
            if not row.general
            or row.mistake
            in ("an odd address", "strides between elements", "objects", "a masked array", "another byte order")
        ]
        things = (True, "1", [1.0], {}, 1j) if path != "temperature" else (None, True, "1", [1.0], {}, 1j)
        return [
            *(refused(path, short(x), set_to(path, x), TypeError, f"^{path} is .*; {number}") for x in things),
            *mistakes,
        ]

    temperature = "^temperature is .*; it must be at least 0 and finite in float32"
    top_p = "^top_p is .*; it must be above 0 and at most 1"
    zeros = "0 in all rows of the request"
    rows = [
        *array_rows("logits", *FLOATS),
        refused(
            "logits",
            "V = 0",
            made("logits", lambda x: x[..., :0]),
            ValueError,
            "^logits .* has V = 0; it must be between 1",
        ),
        refused(
            "logits",
            "V above 2**19",
            set_to("logits", np.broadcast_to(np.float32(0), (2, 1, 2**19 + 1))),
            ValueError,
            "^logits .* has V = 524289; it must be between 1",
        ),
        *control("temperature", "float32"),
        *control("top_k", "int32"),
        *control("top_p", "float32"),
        *(
            refused("temperature", short(x), set_to("temperature", x), ValueError, temperature)
            for x in (-1.0, NAN, INF, 1e39, 10**5000, -(10**5000))
        ),
        refused("top_k", "1.5", set_to("top_k", 1.5), TypeError, "^top_k is 1.5; it must be an integer"),
        refused("top_k", "nan", set_to("top_k", NAN), TypeError, "^top_k is nan; it must be an integer"),
        *(gives("top_k", short(x), set_to("top_k", x), "off") for x in (10**30, -(10**5000))),
        *(
            refused("top_p", short(x), set_to("top_p", x), ValueError, top_p)
            for x in (0, -0.5, NAN, INF, 1.5, 10**5000)
        ),
        *array_rows("out", "float32", fixed=[0, 1, 2], optional=True),
        *result_rows("out", "logits"),
        refused(
            "out",
            "overlaps temperature",
            several(set_to("temperature", np.ones(2, np.float32)), overlap("out", "temperature")),
            ValueError,
            "^out overlaps temperature",
        ),
        gives("logits", "a NaN", content("logits", (0, 0, 1), NAN), "0 in that row"),
        gives("logits", "a +inf", content("logits", (0, 0, 1), INF), "0 in that row"),
        gives("logits", "nothing but -inf", content("logits", (0, 0), -INF), "0 in that row"),
        *(
            gives("temperature", f"{x} in an array", set_to("temperature", np.array([x, 1], np.float32)), zeros)
            for x in (NAN, -1.0, INF)
        ),
        *(
            gives("top_p", f"{x} in an array", set_to("top_p", np.array([x, 1], np.float32)), zeros)
            for x in (NAN, 0.0, -1.0)
        ),
        gives("top_p", "2.0 in an array", set_to("top_p", np.array([2, 1], np.float32)), "the same as 1: off"),
        *(
            gives("top_k", f"{x} in an array", set_to("top_k", np.array([x, 2], np.int32)), "off")
            for x in (-(2**31), 2**31 - 1)
        ),
    ]
    return Operator("target_probs", given, rows)


def compact_kv() -> Operator:
    def given() -> Arguments:
        caches = [np.arange(2 * 8 * 3, dtype=np.float32).reshape(2, 8, 3) + n for n in range(2)]
        return {
            "kv_caches": caches,
            "cache_seqlens": np.array([2, 3], np.int32),
            "accepted": accepted_paths(),
            "block_table": None,
        }

    def paged(given: Arguments) -> Arguments:
        pages = [cache.reshape(8, 2, 3) for cache in given["kv_caches"]]
        return given | {"kv_caches": pages, "block_table": np.arange(8, dtype=np.int32).reshape(2, 4)}

    def shifted(given: Arguments) -> Arguments:
        memory = np.zeros((2, 9, 3), np.float32)
        return given | {"kv_caches": [memory[:, :8], memory[:, 1:]]}

    def crossing(given: Arguments) -> Arguments:
        memory = np.zeros((2, 8, 4), np.float32)
        return given | {"kv_caches": [memory[..., :3], memory[..., 2:]]}

    def layouts(given: Arguments) -> Arguments:
        memory = np.zeros(2 * 8 * 4, np.float32)
        return given | {"kv_caches": [memory.reshape(2, 8, 4), memory.view(np.float64)[8:24].reshape(2, 8, 1)]}

    table_rows = [
        replace(row, change=several(paged, row.change))
        for row in array_rows("block_table", "int32", fixed=[0], optional=True)
    ]
    order = made("kv_caches", lambda caches: [caches[0], np.zeros((2, 8, 4, 3)).swapaxes(2, 3)])
    left_out = "the request's moves are left out, its length stays"
    shared = r"^kv_caches\[1\] overlaps kv_caches\[0\] in memory; each layer needs memory of its own"
    rows = [
        *array_rows("kv_caches[0]", any_dtype=True, ranks=False),
        *(
            refused(
                "kv_caches", short(x), set_to("kv_caches", x), TypeError, rf"^kv_caches is a builtins\.\w+; {NO_ARRAY}"
            )
            for x in (None, "abc", {}, 3)
        ),
        *(
            refused(
                "kv_caches", short(x), set_to("kv_caches", x), ValueError, "^kv_caches has no layers; there must be"
            )
            for x in ([], ())
        ),
        refused(
            "kv_caches[0]",
            "an axis",
            made("kv_caches[0]", lambda x: x[0, :, 0]),
            ValueError,
            r"^kv_caches\[0\] has shape \[8\]; it must be \[B, S, ...\] with B = 2",
        ),
        refused(
            "kv_caches[0]",
            "axis 0 is longer",
            made("kv_caches[0]", longer(0)),
            ValueError,
            r"^kv_caches\[0\] has shape .*; it must be \[B, S, ...\] with B = 2",
        ),
        refused(
            "kv_caches[1]",
            "axis 1 is longer",
            made("kv_caches[1]", longer(1)),
            ValueError,
            r"^kv_caches\[1\] .* and kv_caches\[0\] .* differ in their first two axes",
        ),
        refused(
            "kv_caches[1]",
            "rows of no elements",
            made("kv_caches[1]", lambda x: x[..., :0]),
            ValueError,
            r"^kv_caches\[1\] .* has rows of no elements",
        ),
        refused(
            "kv_caches[1]",
            "rows not in C order",
            order,
            ValueError,
            r"^kv_caches\[1\] .* has strides .*; the axes behind the second must follow each other",
        ),
        refused("kv_caches[1]", "read-only", made("kv_caches[1]", locked), ValueError, r"^kv_caches\[1\] is read-only"),
        refused(
            "kv_caches[0]",
            "stride 0",
            made("kv_caches[0]", in_one_place),
            ValueError,
            r"^kv_caches\[0\] .* overlaps itself",
        ),
        refused(
            "kv_caches",
            "the same cache twice",
            made("kv_caches", lambda x: [x[0], x[0]]),
            ValueError,
            "^kv_caches has the same cache twice; its rows would move twice",
        ),
        refused("kv_caches[1]", "a row behind kv_caches[0]", shifted, ValueError, shared),
        refused("kv_caches[1]", "a column behind kv_caches[0]", crossing, ValueError, shared),
        refused("kv_caches[1]", "kv_caches[0]'s memory in another layout", layouts, ValueError, shared),
        *(
            refused(
                "kv_caches[0]",
                f"overlaps {x}",
                overlap("kv_caches[0]", x),
                ValueError,
                rf"^kv_caches\[0\] overlaps {re.escape(x)}",
            )
            for x in ("cache_seqlens", "accepted.nodes", "accepted.num_accepted")
        ),
        refused(
            "kv_caches[0]",
            "overlaps block_table",
            several(paged, overlap("kv_caches[0]", "block_table")),
            ValueError,
            r"^kv_caches\[0\] overlaps block_table",
        ),
        *array_rows("cache_seqlens", "int32"),
        refused(
            "cache_seqlens",
            "axis 0 is longer",
            made("cache_seqlens", longer(0)),
            ValueError,
            r"^accepted\.nodes has shape \[2, 3\]; it must be .* = \[3, any\]",
        ),
        *result_rows("cache_seqlens", "accepted.nodes", "accepted.num_accepted"),
        *(
            refused("accepted", short(x), set_to("accepted", x), TypeError, "^accepted is a .*; it must be an Accepted")
            for x in (None, "a", (1, 2))
        ),
        *array_rows("accepted.nodes", "int32", fixed=[0]),
        *array_rows("accepted.num_accepted", "int32", fixed=[0]),
        *table_rows,
        gives("cache_seqlens", "negative", content("cache_seqlens", 0, -1), left_out),
        gives("cache_seqlens", "the least int32", content("cache_seqlens", 0, -(2**31)), left_out),
        gives("cache_seqlens", "the largest int32", content("cache_seqlens", 0, 2**31 - 1), left_out),
        gives(
            "cache_seqlens",
            "the cache ends within the path",
            content("cache_seqlens", 0, 5),
            "moves from and to rows of the cache; the length stays where it would leave it",
        ),
        gives("accepted.nodes", "far outside", content("accepted.nodes", (0, 1), 2**31 - 1), "that move is left out"),
        gives("accepted.nodes", "negative", content("accepted.nodes", (0, 1), -5), "that move is left out"),
        gives("accepted.nodes", "falling", content("accepted.nodes", (0, 2), 1), "that move is left out"),
        gives(
            "accepted.num_accepted",
            "far too many",
            content("accepted.num_accepted", 0, 10**9),
            "the same as max_depth + 1",
        ),
        gives("accepted.num_accepted", "negative", content("accepted.num_accepted", 0, -4), "the same as 0"),
        *(
            gives(
                "block_table",
                f"the page {x}",
                several(paged, content("block_table", (0, 1), x)),
                "moves from and to that page are left out",
            )
            for x in (-1, 8, 2**31 - 1)
        ),
    ]
    return Operator("compact_kv", given, rows)


def gather_accepted() -> Operator:
    def given() -> Arguments:
        x = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3)
        return {"x": x, "accepted": accepted_paths(), "out": full(2, 3, 3, dtype=np.float32)}

    order = several(made("x", lambda x: np.zeros((2, 4, 3, 2), np.float32).swapaxes(2, 3)), set_to("out", None))
    rows = [
        *array_rows("x", any_dtype=True, ranks=False),
        refused(
            "x", "an axis", made("x", lambda x: x[0, :, 0]), ValueError, r"^x has shape \[4\]; it must be \[B, Q, ...\]"
        ),
        refused(
            "x",
            "rows not in C order",
            order,
            ValueError,
            "^x .* has strides .*; the axes behind the second must follow each other",
        ),
        *(
            refused("accepted", short(x), set_to("accepted", x), TypeError, "^accepted is a .*; it must be an Accepted")
            for x in (None, "a", (1, 2))
        ),
        *array_rows("accepted.nodes", "int32", fixed=[0]),
        *array_rows("accepted.num_accepted", "int32", fixed=[0]),
        *array_rows("out", "float32", fixed=[0, 1, 2], optional=True),
        *result_rows("out", "x", "accepted.nodes", "accepted.num_accepted"),
        gives("accepted.nodes", "far outside", content("accepted.nodes", (0, 1), 2**31 - 1), "zeros in that row"),
        gives("accepted.nodes", "negative", content("accepted.nodes", (0, 1), -5), "zeros in that row"),
        gives(
            "accepted.num_accepted",
            "far too many",
            content("accepted.num_accepted", 0, 10**9),
            "the same as max_depth + 1",
        ),
        gives("accepted.num_accepted", "negative", content("accepted.num_accepted", 0, -4), "zeros in all rows"),
    ]
    return Operator("gather_accepted", given, rows)


def attention_arguments() -> Arguments:
    mask = np.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]], np.bool_)
    return {
        "q": normal(2, 3, 1, 32),
        "kv_cache": normal(2, 6, 32, seed=1),
        "cache_seqlens": np.array([3, 0], np.int32),
        "tree_mask": mask,
        "sm_scale": 0.25,
        "kv_lora_rank": 16,
        "block_table": None,
        "max_seqlen": None,
        "num_splits": None,
        "out": full(2, 3, 1, 16, dtype=np.float32),
        "lse": full(2, 3, 1, dtype=np.float32),
        "out_dtype": None,
        "workspace": None,
    }


def with_pages(given: Arguments) -> Arguments:
    table = np.array([[3, 1, 2], [0, 5, 4]], np.int32)
    return given | {"kv_cache": normal(6, 2, 32, seed=1), "block_table": table}


def words(given: Arguments) -> Arguments:
    return given | {"tree_mask": np.array([[[1], [3], [5]], [[1], [3], [7]]], np.uint32)}


def attention_rows(function: str) -> list[Row]:
    """Mistakes in what the three attention operators share."""
    scale = r"^sm_scale is .*; it must be a"
    length = r"^cache_seqlens\[0\] is .*; it must be between 0 and 3"
    page = r"^block_table\[0, 0\] is .*; it must be between 0 and 5"
    has_mask = function != "prefix_attention"
    mask_rows = (
        [
            *array_rows("tree_mask", "bool", "uint32", fixed=[0, 1, 2], optional=True),
            refused(
                "tree_mask",
                "a word too many",
                several(words, made("tree_mask", longer(2))),
                ValueError,
                r"^tree_mask has shape \[2, 3, 2\]; it must be \[B, Q, ceil\(Q/32\)\] = \[2, 3, 1\]",
            ),
            *invalid(
                "tree_mask",
                "a bit at Q",
                several(words, content("tree_mask", (0, 1, 0), 8 + 1)),
                "bits from Q on are not read",
                r"^tree_mask\[0, 1\] has a bit at or past column 3",
            ),
            *invalid(
                "tree_mask",
                "a bool of 2",
                made("tree_mask", lambda x: (x * np.uint8(2)).view(np.bool_)),
                "the lowest bit counts",
                "^tree_mask has a byte other than 0 and 1",
            ),
            gives(
                "tree_mask",
                "no bit at all",
                made("tree_mask", np.zeros_like),
                "the prefix alone; without one out 0, lse -inf",
            ),
        ]
        if has_mask
        else []
    )
    table_rows = [
        replace(row, change=several(with_pages, row.change))
        for row in array_rows("block_table", "int32", fixed=[0], optional=True)
    ]
    halves = made("q", lambda q: (q[..., :16].copy(), q[..., 16:].copy()))
    halved = [
        replace(row, change=several(halves, row.change))
        for row in (
            *array_rows("q[0]", *FLOATS, name="q_nope", fixed=[3]),
            *array_rows("q[1]", "float32", name="q_pe", fixed=[0, 1, 2]),
        )
    ]
    empty_pages = several(with_pages, made("kv_cache", lambda x: x[:0]))
    wide_table = several(with_pages, set_to("block_table", np.broadcast_to(np.int32(0), (2, 2**30))))
    numbers = "ab", None, True, [1.0], 1j, {}, np.ones(2)
    return [
        *(row for row in array_rows("q", *FLOATS) if row.mistake != "a list"),
        refused("q", "a list", made("q", np.ndarray.tolist), TypeError, rf"^q_nope is a builtins\.list; {NO_ARRAY}"),
        refused(
            "q",
            "a list of three",
            set_to("q", [1, 2, 3]),
            TypeError,
            "^q is a sequence of 3; it must be one array or the pair",
        ),
        *halved,
        refused(
            "q",
            "Q = 0",
            made("q", lambda x: x[:, :0]),
            ValueError,
            "^q has B = 2, Q = 0, H = 1; Q and H must be at least 1",
        ),
        refused(
            "q",
            "H = 0",
            made("q", lambda x: x[:, :, :0]),
            ValueError,
            "^q has B = 2, Q = 3, H = 0; Q and H must be at least 1",
        ),
        refused(
            "q",
            "B = 65536",
            made("q", lambda x: np.broadcast_to(x[:1], (65536, 3, 1, 32))),
            ValueError,
            "^q has B = 65536, .*; B and Q must be at most 65535",
        ),
        refused(
            "q",
            "D = kv_lora_rank",
            made("q", lambda x: x[..., :16]),
            ValueError,
            "^q .* has D = 16; it must be kv_lora_rank",
        ),
        refused(
            "q",
            "8 columns for the rotary part",
            made("q", lambda x: x[..., :24]),
            ValueError,
            "^q leaves qk_rope_head_dim = 8; it must be a positive multiple of 16",
        ),
        refused(
            "q",
            "axis 0 is longer",
            made("q", longer(0)),
            ValueError,
            r"^kv_cache has shape .*; it must be \[B, S, D\] = \[3, any, 32\]",
        ),
        *array_rows("kv_cache", *FLOATS, fixed=[0, 2]),
        refused(
            "kv_cache",
            "two KV heads",
            made("kv_cache", lambda x: np.stack([x, x], 2)),
            ValueError,
            r"^kv_cache has shape \[2, 6, 2, 32\]; it must be \[.., .., 1, D\]",
        ),
        refused(
            "kv_cache",
            "too short",
            made("kv_cache", lambda x: x[:, :2]),
            ValueError,
            "^kv_cache holds 2 tokens a request; it must hold",
        ),
        refused("kv_cache", "no page", empty_pages, ValueError, "^kv_cache .* has no page or no slot"),
        refused(
            "block_table",
            "2**31 tokens a request",
            wide_table,
            ValueError,
            "^kv_cache allows 2147483648 tokens a request; it must",
        ),
        *array_rows("cache_seqlens", "int32", fixed=[0]),
        *mask_rows,
        *table_rows,
        *(refused("sm_scale", short(x), set_to("sm_scale", x), TypeError, scale) for x in numbers),
        *(
            refused("sm_scale", short(x), set_to("sm_scale", x), ValueError, scale)
            for x in (0, -1.0, NAN, INF, 1e-50, 1e39, 10**5000)
        ),
        *integer_rows("kv_lora_rank", least=16, most=None),
        refused(
            "kv_lora_rank",
            "24",
            set_to("kv_lora_rank", 24),
            ValueError,
            "^kv_lora_rank is 24; it must be a positive multiple of 16",
        ),
        *integer_rows("max_seqlen", least=0, most=3, optional=True),
        *integer_rows("num_splits", least=1, optional=True),
        *(
            refused("out_dtype", short(x), set_to("out_dtype", x), TypeError, "^out_dtype is .*; it must be one of")
            for x in ("float64", np.int32, 3, 10**5000, [1])
        ),
        refused(
            "out_dtype",
            "not that of out",
            set_to("out_dtype", "float16"),
            TypeError,
            "^out has dtype float32, but out_dtype is float16",
        ),
        *array_rows("out", *FLOATS, fixed=[0, 1, 2, 3], optional=True),
        *result_rows("out", "q", "kv_cache", "cache_seqlens", "lse"),
        *array_rows("lse", "float32", fixed=[0, 1, 2], optional=True),
        *result_rows("lse", "q", "kv_cache", "cache_seqlens"),
        *(
            refused(
                "workspace", short(x), set_to("workspace", x), TypeError, rf"^workspace is a builtins\.\w+; {NO_ARRAY}"
            )
            for x in ([0.0], "abc", 4096)
        ),
        refused(
            "workspace",
            "an odd address",
            set_to("workspace", np.zeros(2**16 + 1, np.uint8)[1:]),
            ValueError,
            "^workspace .* must be in C order, at an address that is a multiple of 16",
        ),
        refused(
            "workspace",
            "strides",
            set_to("workspace", np.zeros(2**16, np.float32)[::2]),
            ValueError,
            "^workspace .* must be in C order",
        ),
        refused(
            "workspace",
            "read-only",
            set_to("workspace", locked(np.zeros(2**16, np.float32))),
            ValueError,
            "^workspace is read-only",
        ),
        *(
            refused(
                "workspace",
                f"overlaps {x}",
                several(set_to("workspace", np.zeros(2**14, np.float32)), overlap("workspace", x)),
                ValueError,
                f"^workspace overlaps {x}",
            )
            for x in ("q", "kv_cache", "out", "lse")
        ),
        *invalid("cache_seqlens", "negative", content("cache_seqlens", 0, -7), "clamped to 0", length),
        *invalid(
            "cache_seqlens", "beyond the cache", content("cache_seqlens", 0, 2**31 - 1), "clamped to max_seqlen", length
        ),
        *invalid(
            "block_table",
            "a negative page",
            several(with_pages, content("block_table", (0, 0), -1)),
            "clamped to page 0",
            page,
        ),
        *invalid(
            "block_table",
            "a page far outside",
            several(with_pages, content("block_table", (0, 0), 2**31 - 1)),
            "clamped to the last page",
            page,
        ),
        gives(
            "block_table",
            "stale entries behind the live pages",
            several(with_pages, content("block_table", (1, 2), -9)),
            "not read",
        ),
        gives("kv_cache", "NaN behind the live rows", content("kv_cache", (1, slice(3, 6)), NAN), "not read"),
    ]


def verify_attention() -> Operator:
    def given() -> Arguments:
        return attention_arguments() | {"variant": "auto"}

    splits = several(set_to("variant", "three_phase"), set_to("num_splits", 2))
    many = several(set_to("variant", "flash"), set_to("num_splits", 2**31))
    small = several(set_to("variant", "flash"), set_to("workspace", np.zeros(4, np.float32)))
    wide = several(
        set_to("variant", "flash"),
        set_to("kv_lora_rank", 1040),
        set_to("out", None),
        set_to("q", np.zeros((2, 3, 1, 1056), np.float32)),
        set_to("kv_cache", np.zeros((2, 6, 1056), np.float32)),
    )
    long = several(
        set_to("variant", "three_phase"), set_to("kv_cache", np.broadcast_to(np.float32(0), (2, 60_000, 32)))
    )

    def with_mma(q: np.ndarray, cache: np.ndarray) -> Change:
        names = {"variant": "mma", "kv_lora_rank": 512, "out": None, "q": q, "kv_cache": cache}
        return several(*(set_to(name, x) for name, x in names.items()))

    q, cache = np.zeros((2, 3, 1, 576), np.float16), np.zeros((2, 6, 576), np.float16)
    apart = np.zeros((2, 6, 580), np.float16)[..., :576]
    rows = [
        *attention_rows("verify_attention"),
        *variant_rows(),
        refused(
            "num_splits",
            "2 with three_phase",
            splits,
            ValueError,
            "^num_splits is 2; variant 'three_phase' takes 1 or None",
        ),
        refused("num_splits", "2**31 with flash", many, ValueError, "^num_splits is 2147483648; a grid holds at most"),
        refused(
            "workspace", "too small for flash", small, ValueError, "^workspace has 16 bytes; it must have at least"
        ),
        refused(
            "kv_lora_rank",
            "1040 with flash",
            wide,
            ValueError,
            "^variant 'flash' takes kv_lora_rank up to 1024 .*here it is 1040",
        ),
        refused(
            "kv_lora_rank",
            "16 with mma",
            set_to("variant", "mma"),
            ValueError,
            "^variant 'mma' takes kv_lora_rank = 512 and D = 576 alone",
        ),
        refused(
            "kv_cache",
            "float32 with mma",
            with_mma(q, cache.astype(np.float32)),
            TypeError,
            "^variant 'mma' takes q and kv_cache both bfloat16 or both float16; here they are float16 and float32",
        ),
        refused(
            "kv_cache",
            "rows of 1,160 bytes with mma",
            with_mma(q, apart),
            ValueError,
            "^kv_cache .* has strides .* variant 'mma' reads 16 bytes at a time",
        ),
        *wgmma_rows(),
        refused(
            "max_seqlen",
            "beyond shared memory with three_phase",
            long,
            ValueError,
            "^variant 'three_phase' needs .* bytes of shared memory for max_seqlen = 59997",
            host=True,
        ),
    ]
    return Operator("verify_attention", given, rows)


def wgmma_rows() -> list[Row]:
    """What wgmma answers; the last of these is what the simulator makes of a right call."""
    q, cache = np.zeros((2, 3, 2, 576), np.float16), np.zeros((2, 6, 576), np.float16)
    names = {"variant": "wgmma", "kv_lora_rank": 512, "out": None, "lse": None, "q": q, "kv_cache": cache}
    right = several(*(set_to(name, x) for name, x in names.items()))
    paged = several(set_to("kv_cache", np.zeros((6, 2, 576), np.float16)), made("block_table", table_of_six))
    apart, broad = np.zeros((2, 6, 580), np.float16)[..., :576], np.broadcast_to(q[:1], q.shape)
    heads_first = np.zeros((2, 2, 3, 576), np.float16).swapaxes(1, 2)
    small = set_to("workspace", np.zeros(16, np.uint8))

    def planned(num_heads: int, max_seqlen: int) -> Change:
        sizes = {"num_nodes": 3, "num_heads": num_heads, "max_seqlen": max_seqlen}
        return lambda given: given | {"plan": dd.plan_attention(np.array([3, 0], np.int32), **sizes)}

    def no(argument: str, mistake: str, change: Change, answer: str, error: type[Exception] = ValueError) -> Row:
        # On a device the answer would be that of its compute capability.
        return refused(argument, f"{mistake} with wgmma", several(right, change), error, answer, host=True)

    rows = "^variant 'wgmma' takes queries whose nodes and heads are one axis of rows"
    maps = "^variant 'wgmma' copies rows by tensor maps: .*; here {} has strides"
    return [
        no("num_splits", "1", set_to("num_splits", 1), "^num_splits is 1; variant 'wgmma' shares all work out evenly"),
        no("batch_invariant", "True", set_to("batch_invariant", True), "^batch_invariant is True; variant 'wgmma'"),
        refused(
            "kv_lora_rank",
            "16 with wgmma",
            set_to("variant", "wgmma"),
            ValueError,
            "^variant 'wgmma' takes kv_lora_rank = 512 and D = 576 alone",
        ),
        no(
            "kv_cache",
            "float32",
            set_to("kv_cache", cache.astype(np.float32)),
            "^variant 'wgmma' takes q and kv_cache both bfloat16 or both float16; here they are float16 and float32",
            TypeError,
        ),
        no("q", "heads ahead of nodes", set_to("q", heads_first), rows),
        no("q", "one for all requests", set_to("q", broad), maps.format("q_?[a-z]* .*")),
        no("kv_cache", "rows of 1,160 bytes", set_to("kv_cache", apart), maps.format("kv_cache .*")),
        no("block_table", "pages of 2", paged, "^variant 'wgmma' takes pages of a multiple of 64 tokens"),
        no("workspace", "too small", small, "^workspace has 16 bytes; it must have at least"),
        no("plan", "a number", set_to("plan", 3), "^plan is 3; it must be an AttentionPlan", TypeError),
        no("plan", "one for other heads", planned(1, 3), "^plan is for B = 2, Q = 3, H = 1"),
        no("plan", "one for longer prefixes", planned(2, 4), "^plan is for B = 2, Q = 3, H = 2, max_seqlen = 4"),
        refused("plan", "3 with auto", set_to("plan", 3), TypeError, "^plan is 3; it must be an AttentionPlan"),
        refused(
            "plan",
            "3 with flash",
            several(set_to("variant", "flash"), set_to("plan", 3)),
            ValueError,
            "^plan is 3; variant 'flash' takes None, variants 'auto' and 'wgmma' an AttentionPlan",
        ),
        Row(
            "variant",
            "wgmma in the simulator",
            right,
            ValueError,
            "^variant 'wgmma' does not run in the simulator; its mirror is 'wgmma_numpy'",
            host=True,
        ),
    ]


def table_of_six(_: Any) -> np.ndarray:
    return np.arange(6, dtype=np.int32).reshape(2, 3)


def plan_attention() -> Operator:
    def given() -> Arguments:
        return {"cache_seqlens": np.array([300, 0, 64], np.int32), "num_nodes": 5, "num_heads": 16, "max_seqlen": 400}

    rows = [
        *array_rows("cache_seqlens", "int32"),
        *integer_rows("num_nodes", least=1),
        *integer_rows("num_heads", least=1),
        *integer_rows("max_seqlen", least=0),
        refused(
            "num_nodes", "65536", set_to("num_nodes", 65536), ValueError, "^cache_seqlens has B = 3 and num_nodes is"
        ),
        refused(
            "num_heads", "2**31", set_to("num_heads", 2**31), ValueError, "^variant 'wgmma' counts up to .* for B = 3"
        ),
        refused("host_lengths", "a list", set_to("host_lengths", [300, 0, 64]), TypeError, "^host_lengths is a .*list"),
        refused(
            "host_lengths",
            "int64",
            set_to("host_lengths", np.array([300, 0, 64])),
            TypeError,
            "^host_lengths has dtype int64; it must be int32",
        ),
        refused(
            "host_lengths",
            "of 2 requests",
            set_to("host_lengths", np.array([300, 0], np.int32)),
            ValueError,
            r"^host_lengths has shape \[2\]; it must be \[B\] = \[3\]",
        ),
        gives(
            "host_lengths",
            "not those of cache_seqlens",
            set_to("host_lengths", np.zeros(3, np.int32)),
            "the same",
            host=True,
        ),
        gives("cache_seqlens", "-1", content("cache_seqlens", 0, -1), "as 0"),
        gives("cache_seqlens", "max_seqlen + 1", content("cache_seqlens", 0, 401), "as max_seqlen"),
    ]
    return Operator("plan_attention", given, rows)


def prefix_attention() -> Operator:
    def given() -> Arguments:
        return {name: x for name, x in attention_arguments().items() if name != "tree_mask"}

    rows = [
        *attention_rows("prefix_attention"),
        refused(
            "workspace",
            "too small",
            set_to("workspace", np.zeros(4, np.float32)),
            ValueError,
            "^workspace has 16 bytes; it must have at least",
        ),
    ]
    return Operator("prefix_attention", given, rows)


def verify_attention_prefix_tail() -> Operator:
    def given() -> Arguments:
        prefix = normal(2, 3, 1, 16, seed=2), np.where([[[True]], [[False]]], normal(2, 3, 1, seed=3), -INF)
        return attention_arguments() | {"prefix": (prefix[0], prefix[1].astype(np.float32))}

    pair = r"^prefix is a .*; it must be the pair \(out, lse\), or a callable that returns it"
    names = {"name": "prefix out"}, {"name": "prefix lse"}
    rows = [
        *attention_rows("verify_attention_prefix_tail"),
        *(refused("prefix", short(x), set_to("prefix", x), TypeError, pair) for x in (None, "ab", (), [1], {})),
        refused("prefix", "a callable that returns None", set_to("prefix", lambda *_, **__: None), TypeError, pair),
        *array_rows("prefix[0]", *FLOATS, fixed=[0, 1, 2, 3], **names[0]),
        *array_rows("prefix[1]", "float32", fixed=[0, 1, 2], **names[1]),
        refused("out", "overlaps prefix out", overlap("out", "prefix[0]"), ValueError, "^out overlaps prefix out"),
        refused("lse", "overlaps prefix lse", overlap("lse", "prefix[1]"), ValueError, "^lse overlaps prefix lse"),
        refused(
            "workspace",
            "too small",
            set_to("workspace", np.zeros(4, np.float32)),
            ValueError,
            "^workspace has 16 bytes; it must have at least .*prefix_tail=True",
        ),
        refused(
            "workspace",
            "overlaps prefix out",
            several(set_to("workspace", np.zeros(2**14, np.float32)), overlap("workspace", "prefix[0]")),
            ValueError,
            "^workspace overlaps prefix out",
        ),
        gives("prefix[1]", "+inf", content("prefix[1]", (1,), INF), "an empty prefix, as -inf"),
    ]
    return Operator("verify_attention_prefix_tail", given, rows)


def merge_states() -> Operator:
    def given() -> Arguments:
        return {
            "out_a": normal(3, 2, 4),
            "lse_a": normal(3, 2, seed=1),
            "out_b": normal(3, 2, 4, seed=2),
            "lse_b": normal(3, 2, seed=3),
            "out": full(3, 2, 4, dtype=np.float32),
            "lse": full(3, 2, dtype=np.float32),
        }

    rows = [
        *array_rows("out_a", *FLOATS, ranks=False),
        *array_rows("out_b", *FLOATS, fixed=[0, 1, 2]),
        *array_rows("lse_a", "float32", fixed=[0, 1]),
        *array_rows("lse_b", "float32", fixed=[0, 1]),
        *array_rows("out", *FLOATS, fixed=[0, 1, 2], optional=True),
        *array_rows("lse", "float32", fixed=[0, 1], optional=True),
        *result_rows("out", "out_a", "out_b", "lse_a", "lse_b", "lse"),
        *result_rows("lse", "out_a", "out_b", "lse_a", "lse_b"),
        refused(
            "out_a",
            "an axis",
            made("out_a", lambda x: x[0, 0]),
            ValueError,
            r"^out_a has shape \[4\]; it must be \[..., H, R\]",
        ),
        refused(
            "out_a",
            "another shape",
            made("out_a", longer(0)),
            ValueError,
            r"^out_b has shape \[3, 2, 4\]; it must be \[..., H, R\] of out_a",
        ),
        refused(
            "out_a",
            "R = 0",
            lambda given: given | {name: given[name][..., :0] for name in ("out_a", "out_b", "out")},
            ValueError,
            "^out_a .* has R = 0; it must be at least 1",
        ),
        gives("lse_a", "a NaN", content("lse_a", (0, 0), NAN), "NaN in that row"),
        gives("lse_a", "+inf", content("lse_a", (0, 0), INF), "an empty state: the other one, bit for bit"),
        gives(
            "out_a",
            "NaN in an empty state",
            several(content("lse_a", (0, 0), -INF), content("out_a", (0, 0), NAN)),
            "the other state, bit for bit",
        ),
        gives(
            "lse_b",
            "3e38 against -3e38",
            several(content("lse_a", (0, 0), -3e38), content("lse_b", (0, 0), 3e38)),
            "the state of the larger lse",
        ),
    ]
    return Operator("merge_states", given, rows)


def lse_from_log2() -> Operator:
    def given() -> Arguments:
        return {"lse": normal(2, 3), "out": full(2, 3, dtype=np.float32)}

    rows = [
        *array_rows("lse", "float32", ranks=False),
        *array_rows("out", "float32", fixed=[0, 1], optional=True),
        *result_rows("out", "lse"),
        gives("lse", "+inf", content("lse", (0, 0), INF), "-inf"),
        gives("lse", "a NaN", content("lse", (0, 0), NAN), "NaN"),
    ]
    return Operator("lse_from_log2", given, rows)


def lse_from_flashmla() -> Operator:
    def given() -> Arguments:
        return {"lse": normal(2, 3, 2), "out": full(2, 2, 3, dtype=np.float32)}

    rows = [
        *array_rows("lse", "float32"),
        *array_rows("out", "float32", fixed=[0, 1, 2], optional=True),
        *result_rows("out", "lse"),
        refused(
            "out",
            "lse itself",
            lambda given: {"lse": given["lse"][:, :2], "out": given["lse"][:, :2]},
            ValueError,
            "^out overlaps lse",
        ),
        gives("lse", "+inf", content("lse", (0, 0, 0), INF), "-inf"),
    ]
    return Operator("lse_from_flashmla", given, rows)


def workspace_bytes() -> Operator:
    def given() -> Arguments:
        return {
            "batch": 2,
            "num_nodes": 3,
            "num_heads": 2,
            "max_seqlen": 40,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "num_splits": None,
            "variant": "auto",
        }

    rows = [row for name in list(given())[:-2] for row in integer_rows(name, least=0)]
    rows += integer_rows("num_splits", least=1, optional=True)
    rows += variant_rows()
    rows += [
        refused(
            "variant",
            "mma, with other widths",
            set_to("variant", "mma"),
            ValueError,
            "^variant 'mma' takes kv_lora_rank = 512 and D = 576 alone",
        ),
        refused(
            "variant",
            "wgmma, with other widths",
            set_to("variant", "wgmma"),
            ValueError,
            "^variant 'wgmma' takes kv_lora_rank = 512 and D = 576 alone",
        ),
        refused(
            "num_splits",
            "1 with wgmma",
            several(set_to("variant", "wgmma"), set_to("num_splits", 1)),
            ValueError,
            "^num_splits is 1; variant 'wgmma' shares all work out evenly and takes None",
        ),
        gives(
            "variant",
            "wgmma, with its widths",
            several(*(set_to(*x) for x in {"variant": "wgmma", "kv_lora_rank": 512, "qk_rope_head_dim": 64}.items())),
            "bytes for it",
        ),
        refused(
            "kv_lora_rank",
            "1040",
            set_to("kv_lora_rank", 1040),
            ValueError,
            "^variant 'flash' takes kv_lora_rank up to 1024",
        ),
        refused(
            "num_splits",
            "2**31",
            set_to("num_splits", 2**31),
            ValueError,
            "^num_splits is 2147483648; a grid holds at most",
        ),
        gives("batch", "an int64 of NumPy", set_to("batch", np.int64(2**62)), "counted without an end"),
    ]
    return Operator("workspace_bytes", given, rows)


def yarn_sm_scale() -> Operator:
    rows = [
        *(
            refused(name, short(x), set_to(name, x), TypeError, f"^{name} is .*; it must be a number")
            for name in ("factor", "mscale_all_dim")
            for x in (None, "40", True, [40], 1j)
        ),
        *(
            refused(name, short(x), set_to(name, x), ValueError, f"^{name} is .*; it must be finite")
            for name in ("factor", "mscale_all_dim")
            for x in (NAN, INF, -INF, 10**5000)
        ),
        *integer_rows("qk_head_dim", least=1),
        gives("factor", "-3.0", set_to("factor", -3.0), "the scale without an extension"),
    ]
    return Operator("yarn_sm_scale", lambda: {"factor": 40.0, "qk_head_dim": 192, "mscale_all_dim": 1.0}, rows)


# The encodings: most take one or two arrays [B, Q], and give one

PARENTS = np.array([[-1, 0, 0, 1], [-1, 0, 1, -1]], np.int32)
LENGTHS = np.array([2, 1], np.int32)
PADDING = "the node and those below it count as padding"


def encoding(name: str, arguments: Callable[[], Arguments], *rows: Row, results: Sequence[str] = ("out",)) -> Operator:
    """An encoding's operator; ``results`` are the places of its results, apart from which they may share no memory."""
    given = arguments()
    reads = [path for path, x in given.items() if isinstance(x, np.ndarray) and path not in results]
    called = {path: f"out's {n}" for path, n in zip(results, RESULT_NAMES.get(name, ()), strict=False)}
    written: list[Row] = []
    for path in results:
        x = get(given, path)
        optional = True
        written += array_rows(path, x.dtype.name, fixed=range(x.ndim), optional=optional, name=called.get(path))
        written += result_rows(path, *reads, name=called.get(path))
    if "out[0]" in results:
        shape = rf"^out is a .*; it must be the tuple \({', '.join(RESULT_NAMES[name])}\)"
        written += [Row("out", short(x), set_to("out", x), TypeError, shape) for x in ("ab", (1,), {})]
        same = made("out", lambda out: (out[0], out[0], *out[2:]))
        written.append(Row("out[1]", "is out[0]", same, ValueError, "^out's .* overlaps out's"))
    every = [*rows, *written]
    if name.endswith("on the device"):  # what is no array goes the way of the host, and NumPy's things with it
        aligned = "an odd address", "strides between elements"
        every = [row for row in every if not row.host and (not row.general or row.mistake in aligned)]
    return Operator(name, arguments, every)


RESULT_NAMES = {
    "links_from_parents": ("first_child", "next_sibling"),
    "sglang_links": ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling"),
}


def size_rows(path: str) -> list[Row]:
    """Mistakes in B and Q of an array [B, Q, ..]."""
    return [
        Row(
            path,
            "Q = 0",
            made(path, lambda x: np.zeros((2, *[0] * (x.ndim - 1)), x.dtype)),
            ValueError,
            f"^{path} .* has Q = 0; it must be at least 1",
        ),
        Row(
            path,
            "B = 65536",
            made(path, lambda x: np.broadcast_to(x[:1], (65536, *x.shape[1:]))),
            ValueError,
            f"^{path} .* has B = 65536; it must be at most 65535",
        ),
    ]


def parents_rows() -> list[Row]:
    """Mistakes in parents."""
    earlier = "it must be -1 or the index of an earlier node"
    return [
        *array_rows("parents", "int32"),
        *size_rows("parents"),
        *invalid(
            "parents",
            "a node that is its own parent",
            content("parents", (0, 1), 1),
            PADDING,
            rf"^parents\[0, 1\] is 1; {earlier}",
        ),
        *invalid(
            "parents",
            "a cycle",
            several(content("parents", (0, 1), 2), content("parents", (0, 2), 1)),
            PADDING,
            rf"^parents\[0, 1\] is 2; {earlier}",
        ),
        *invalid(
            "parents",
            "far outside",
            content("parents", (0, 1), 2**31 - 1),
            PADDING,
            rf"^parents\[0, 1\] is 2147483647; {earlier}",
        ),
        *invalid(
            "parents",
            "the least int32",
            content("parents", (0, 1), -(2**31)),
            PADDING,
            rf"^parents\[0, 1\] is -2147483648; {earlier}",
        ),
        *invalid(
            "parents",
            "a root with a parent",
            content("parents", (0, 0), 2),
            "node 0 is the root whatever its parent",
            r"^parents\[0, 0\] is 2; the root's parent must be -1",
        ),
        *invalid(
            "parents",
            "a child of padding",
            content("parents", (1, 1), -1),
            PADDING,
            r"^parents\[1, 2\] is 1; that node is padding",
        ),
    ]


def mask_rows(path: str, *, contents: bool = True) -> list[Row]:
    """Mistakes in a mask that is bool or packed."""
    rows = [
        *array_rows(path, "bool", "uint32", fixed=[1, 2]),
        *size_rows(path)[1:],
    ]
    if contents:
        packed = set_to(path, np.array([[[1], [3], [5], [11]], [[1], [3], [7], [16]]], np.uint32))
        bools = made(path, lambda x: (x * np.uint8(2)).view(np.bool_))
        rows += [
            *invalid(
                path,
                "a bit at Q",
                packed,
                "bits from Q on are not read",
                rf"^{path}\[1, 3\] is 16; the last word of a row must have no bit at or past node 4",
            ),
            *invalid(
                path,
                "bools of 2",
                bools,
                "the lowest bit counts: False",
                rf"^{path}\[0, 0, 0\] is 2; a bool must be 0 or 1",
            ),
        ]
    return rows


def lengths_rows(*, most: str | None = None) -> list[Row]:
    """Mistakes in cache_seqlens; B is known."""
    message = r"^cache_seqlens\[0\] is -3; it must be between 0 and"
    return [
        *array_rows("cache_seqlens", "int32", fixed=[0]),
        *invalid("cache_seqlens", "negative", content("cache_seqlens", 0, -3), "clamped to 0", message),
        *(
            []
            if most is None
            else [gives("cache_seqlens", "the largest int32", content("cache_seqlens", 0, 2**31 - 1), most)]
        ),
    ]


def tree_mask() -> np.ndarray:
    return np.array(dd.mask_from_parents(PARENTS))


def links() -> tuple[np.ndarray, np.ndarray]:
    first = np.array([[1, 3, -1, -1], [1, 2, -1, -1]], np.int32)
    return first, np.array([[-1, 2, -1, -1], [-1, -1, -1, -1]], np.int32)


def link_rows(first: str, second: str, dtype: str) -> list[Row]:
    later = "it must be -1 or the index of a later node, below 4"
    ends = "the list of children ends there"
    return [
        *array_rows(first, dtype),
        *size_rows(first),
        *array_rows(second, dtype, fixed=[0, 1]),
        *invalid(first, "the node itself", content(first, (0, 1), 1), ends, rf"^{first}\[0, 1\] is 1; {later}"),
        *invalid(second, "a cycle", content(second, (0, 1), 1), ends, rf"^{second}\[0, 1\] is 1; {later}"),
        *invalid(
            second,
            "far outside",
            content(second, (0, 1), 2**31 - 1),
            ends,
            rf"^{second}\[0, 1\] is 2147483647; {later}",
        ),
        *invalid(
            first,
            "the least int32",
            content(first, (0, 1), -(2**31)),
            ends,
            rf"^{first}\[0, 1\] is -2147483648; {later}",
        ),
        refused(
            first,
            "a child twice, validate=True",
            validated(content(first, (0, 2), 3)),
            ValueError,
            f"^{first} and {second} make node 3 of request 0 a child twice",
        ),
    ]


def encodings() -> list[Operator]:
    words = np.array([[[1], [3], [5], [11]], [[1], [3], [7], [0]]], np.uint32)
    flat = np.concatenate(
        [
            np.concatenate([np.ones((4, n), np.bool_), rows], 1).reshape(-1)
            for n, rows in zip(LENGTHS, tree_mask(), strict=True)
        ]
    )
    bias = np.where(tree_mask(), np.float32(0), np.float32(-INF))
    paths = np.array([[[0, 1, 3], [0, 2, -1]], [[0, 1, 2], [-1, -1, -1]]], np.int32)
    num_nodes = integer_rows("num_nodes", least=1, most=2**31 - 1)
    return [
        encoding(
            "links_from_parents",
            lambda: {"parents": PARENTS.copy(), "out": (full(2, 4), full(2, 4))},
            *parents_rows(),
            results=("out[0]", "out[1]"),
        ),
        encoding(
            "parents_from_links",
            lambda: dict(zip(("first_child", "next_sibling"), links(), strict=True)) | {"out": full(2, 4)},
            *link_rows("first_child", "next_sibling", "int32"),
        ),
        encoding(
            "sglang_links",
            lambda: {"parents": PARENTS.copy(), "out": tuple(full(2, 4, dtype=np.int64) for _ in range(3))},
            *parents_rows(),
            results=("out[0]", "out[1]", "out[2]"),
        ),
        encoding(
            "parents_from_sglang",
            lambda: (
                dict(
                    zip(
                        ("retrieve_next_token", "retrieve_next_sibling"),
                        (x.astype(np.int64) for x in links()),
                        strict=True,
                    )
                )
                | {"out": full(2, 4)}
            ),
            *link_rows("retrieve_next_token", "retrieve_next_sibling", "int64"),
        ),
        encoding("depths_from_parents", lambda: {"parents": PARENTS.copy(), "out": full(2, 4)}, *parents_rows()),
        encoding(
            "positions",
            lambda: {
                "cache_seqlens": LENGTHS.copy(),
                "depths": np.array([[0, 1, 1, 2], [0, 1, 2, 0]], np.int32),
                "out": full(2, 4),
            },
            *array_rows("depths", "int32"),
            *size_rows("depths"),
            *lengths_rows(most="clamped, the sum too: 2**31 - 1"),
            *invalid(
                "depths",
                "negative",
                content("depths", (0, 1), -5),
                "clamped to 0",
                r"^depths\[0, 1\] is -5; it must be between 0 and 3",
            ),
            *invalid(
                "depths",
                "beyond Q",
                content("depths", (0, 1), 2**31 - 1),
                "clamped to Q - 1",
                r"^depths\[0, 1\] is 2147483647; it must be between 0 and 3",
            ),
        ),
        Operator(
            "mask_from_parents on the host",
            lambda: {"parents": PARENTS.copy(), "packed": False, "out": full(2, 4, 4, dtype=np.bool_)},
            host_mask_rows(),
        ),
        encoding(
            "mask_from_parents on the device",
            lambda: {"parents": PARENTS.copy(), "packed": True, "out": full(2, 4, 1, dtype=np.uint32)},
            *(row for row in parents_rows() if not row.host),
        ),
        encoding(
            "parents_from_mask",
            lambda: {"tree_mask": tree_mask(), "out": full(2, 4)},
            *mask_rows("tree_mask"),
            *invalid(
                "tree_mask",
                "no row of a tree",
                content("tree_mask", (0, 3, 2), True),
                "the last of the earlier nodes that it sees",
                r"^tree_mask\[0, 3\] sees \[0, 1, 2, 3\]; it must see nothing",
            ),
        ),
        Operator(
            "pack_mask on the host",
            lambda: {"mask": tree_mask(), "out": full(2, 4, 1, dtype=np.uint32)},
            host_pack_rows(),
        ),
        encoding(
            "pack_mask on the device",
            lambda: {"mask": tree_mask(), "out": full(2, 4, 1, dtype=np.uint32)},
            *(row for row in array_rows("mask", "bool", fixed=[1, 2]) if not row.host),
        ),
        Operator(
            "unpack_mask on the host",
            lambda: {"words": words.copy(), "num_nodes": 4, "out": full(2, 4, 4, dtype=np.bool_)},
            host_unpack_rows(),
        ),
        encoding(
            "unpack_mask on the device",
            lambda: {"words": words.copy(), "num_nodes": 4, "out": full(2, 4, 4, dtype=np.bool_)},
            *(row for row in array_rows("words", "uint32", fixed=[1, 2]) if not row.host),
            *num_nodes,
        ),
        encoding(
            "full_mask",
            lambda: {
                "tree_mask": tree_mask(),
                "cache_seqlens": LENGTHS.copy(),
                "seqlens_sum": 3,
                "out": full(44, dtype=np.bool_),
            },
            *mask_rows("tree_mask"),
            *lengths_rows(most="clamped to seqlens_sum; the mask ends at the end of the result"),
            *integer_rows("seqlens_sum", least=0, most=2**31 - 1),
            refused(
                "seqlens_sum",
                "not the sum, validate=True",
                validated(several(set_to("seqlens_sum", 4), set_to("out", None))),
                ValueError,
                "^seqlens_sum is 4; cache_seqlens sums up to 3",
            ),
        ),
        encoding(
            "tree_mask_from_full_mask",
            lambda: {
                "mask": flat.copy(),
                "cache_seqlens": LENGTHS.copy(),
                "num_nodes": 4,
                "out": full(2, 4, 4, dtype=np.bool_),
            },
            *array_rows("mask", "bool", ranks=False),
            refused(
                "mask",
                "an axis too many",
                made("mask", lambda x: x[None]),
                ValueError,
                r"^mask has shape .*; it must be \[n\]",
            ),
            *(
                row
                for row in lengths_rows(most="what would lie past the end reads as False")
                if row.mistake != "axis 0 is longer"
            ),
            *num_nodes,
            refused(
                "mask",
                "too short",
                made("mask", lambda x: x[:31]),
                ValueError,
                "^mask holds 31 elements; 2 requests of 4 nodes need at least 32",
            ),
            refused(
                "mask",
                "too short for the lengths, validate=True",
                validated(made("mask", lambda x: x[:40])),
                ValueError,
                "^mask holds 40 elements; these lengths need 44",
            ),
        ),
        encoding(
            "qlen_only_mask",
            lambda: {"tree_mask": tree_mask(), "out": full(32, dtype=np.bool_)},
            *mask_rows("tree_mask"),
        ),
        encoding(
            "tree_mask_from_qlen_only",
            lambda: {
                "mask": tree_mask().reshape(-1),
                "num_nodes": 4,
                "packed": True,
                "out": full(2, 4, 1, dtype=np.uint32),
            },
            *array_rows("mask", "bool", ranks=False),
            *num_nodes,
            refused(
                "mask",
                "no whole number of requests",
                made("mask", lambda x: x[:31]),
                ValueError,
                r"^mask holds 31 elements; it must be a multiple of Q \* Q = 16",
            ),
        ),
        encoding(
            "bitpacked_mask",
            lambda: {"tree_mask": tree_mask(), "out": full(8, dtype=np.uint8)},
            *mask_rows("tree_mask"),
            refused(
                "tree_mask",
                "Q = 33",
                several(set_to("tree_mask", np.zeros((1, 33, 33), np.bool_)), set_to("out", None)),
                ValueError,
                "^tree_mask's num_nodes is 33; a bit-packed mask .* holds at most 32",
            ),
        ),
        encoding(
            "tree_mask_from_bitpacked",
            lambda: {"words": words.astype(np.uint8).reshape(-1), "num_nodes": 4, "out": full(2, 4, 4, dtype=np.bool_)},
            *array_rows("words", "uint8", ranks=False),
            *num_nodes,
            refused(
                "num_nodes",
                "33",
                set_to("num_nodes", 33),
                ValueError,
                "^num_nodes is 33; a bit-packed mask .* holds at most 32",
            ),
            refused(
                "words",
                "no whole number of requests",
                made("words", lambda x: x[:7]),
                ValueError,
                "^words holds 7 elements; it must be a multiple of Q = 4",
            ),
            *invalid(
                "words",
                "a bit at Q",
                content("words", 3, 16),
                "bits from Q on are not read",
                r"^words\[3\] is 16; the last word of a row must have no bit at or past node 4",
            ),
        ),
        encoding("tensorrt_mask", lambda: {"tree_mask": tree_mask(), "out": full(2, 4, 1)}, *mask_rows("tree_mask")),
        encoding(
            "tree_mask_from_tensorrt",
            lambda: {"words": words.view(np.int32).copy(), "out": full(2, 4, 4, dtype=np.bool_)},
            *array_rows("words", "int32", fixed=[2]),
            *invalid(
                "words",
                "a bit at Q",
                content("words", (1, 3, 0), 16),
                "bits from Q on are not read",
                r"^words\[1, 3\] is 16; the last word of a row must have no bit",
            ),
        ),
        encoding(
            "dense_bias",
            lambda: {
                "tree_mask": tree_mask(),
                "dtype": "float32",
                "cache_seqlens": LENGTHS.copy(),
                "max_seqlen": 2,
                "out": full(2, 4, 6, dtype=np.float32),
            },
            *mask_rows("tree_mask"),
            *(row for row in lengths_rows(most="clamped to max_seqlen") if row.mistake != "None"),
            *integer_rows("max_seqlen", least=0, most=2**31 - 1, optional=True),
            *(
                refused(
                    "dtype",
                    short(x),
                    set_to("dtype", x),
                    TypeError,
                    "^dtype is .*; it must be one of: float32, float16, bfloat16",
                )
                for x in ("float64", None, np.int32, 3, 10**5000, [1], ["float32"] * 40)
            ),
            refused(
                "max_seqlen",
                "None",
                set_to("max_seqlen", None),
                ValueError,
                "^max_seqlen is None; cache_seqlens and max_seqlen must be given together",
            ),
            refused(
                "cache_seqlens",
                "None",
                set_to("cache_seqlens", None),
                ValueError,
                "^cache_seqlens is None; cache_seqlens and max_seqlen must be given together",
            ),
        ),
        encoding(
            "tree_mask_from_bias",
            lambda: {"bias": bias.copy(), "out": full(2, 4, 4, dtype=np.bool_)},
            *array_rows("bias", *FLOATS, fixed=[1, 2]),
            *size_rows("bias"),
            *invalid(
                "bias",
                "a NaN",
                content("bias", (0, 1, 1), NAN),
                "not seen",
                r"^bias\[0, 1, 1\] is nan; it must be 0 or -inf",
            ),
        ),
        encoding(
            "retrieve_indices",
            lambda: {"parents": PARENTS.copy(), "max_depth": 2, "max_leaves": 3, "out": full(2, 3, 3)},
            *parents_rows(),
            *integer_rows("max_depth", least=0, most=2**31 - 1),
            *integer_rows("max_leaves", least=1, most=2**31 - 1, optional=True),
            *invalid(
                "max_depth",
                "less than the tree is deep",
                several(set_to("max_depth", 1), set_to("out", None)),
                "nodes below are left out",
                r"^parents\[0, 3\] is 1; the node is deeper than max_depth = 1",
            ),
            *invalid(
                "max_leaves",
                "less than there are leaves",
                several(set_to("max_leaves", 1), set_to("out", None)),
                "later leaves are left out",
                r"^parents\[0\] has 2 leaves; max_leaves is 1",
            ),
            refused(
                "parents",
                "Q beyond shared memory",
                several(set_to("parents", np.broadcast_to(np.int32(-1), (1, 2**18))), set_to("out", None)),
                ValueError,
                "^parents .* has Q = 262144; .* bytes of shared memory",
            ),
        ),
        encoding(
            "parents_from_retrieve_indices",
            lambda: {"paths": paths.copy(), "num_nodes": 4, "out": full(2, 4)},
            *array_rows("paths", "int32", "int64"),
            *num_nodes,
            refused(
                "paths",
                "no column",
                made("paths", lambda x: x[..., :0]),
                ValueError,
                "^paths .* has no column; it must have at least one",
            ),
            *invalid(
                "paths",
                "far outside",
                content("paths", (0, 0, 2), 2**31 - 1),
                "the step is passed over",
                r"^paths\[0, 0, 2\] is 2147483647; it must be -1 or the index of a node, below 4",
            ),
            *invalid(
                "paths",
                "below -1",
                content("paths", (0, 0, 2), -(2**31)),
                "the step is passed over",
                r"^paths\[0, 0, 2\] is -2147483648; it must be -1 or the index of a node",
            ),
            *invalid(
                "paths",
                "falling",
                content("paths", (0, 0, 2), 1),
                "the step is passed over",
                r"^paths\[0, 0, 2\] is 1; it must be -1, or follow a node of smaller index",
            ),
        ),
        Operator("relabel", relabel_arguments, relabel_rows()),
        encoding(
            "inverse_permutation",
            lambda: {"permutation": np.array([[0, 2, 1, 3], [0, 1, 2, 3]], np.int32), "out": full(2, 4)},
            *array_rows("permutation", "int32"),
            *size_rows("permutation"),
            *invalid(
                "permutation",
                "outside",
                content("permutation", (0, 1), 2**31 - 1),
                "-1 for the node that does not occur",
                r"^permutation\[0, 1\] is 2147483647; it must be between 0 and 3",
            ),
            *invalid(
                "permutation",
                "a node twice",
                content("permutation", (0, 1), 3),
                "the first of the places; -1 for the node that does not occur",
                r"^permutation\[0\] holds a node twice",
            ),
        ),
    ]


def host_out_rows(dtype: str, read: str) -> list[Row]:
    return [
        *array_rows("out", dtype, fixed=range(3), optional=True),
        *result_rows("out", read)[:2],
    ]


def host_mask_rows() -> list[Row]:
    things = (None, "ab", 3, 1.5, {}, [0.5], [], [None], [[-1], [-1, 0]])
    whole = "^parents (has dtype .* axes|.*); it must be an array of integers"
    earlier = "^parents must hold -1 or the index of an earlier node"
    return [
        *(refused("parents", short(x), set_to("parents", x), TypeError, whole, host=True) for x in things),
        refused(
            "parents",
            "a masked array",
            made("parents", lambda x: np.ma.masked_array(x)),
            TypeError,
            "^parents is a .*MaskedArray",
            host=True,
        ),
        *(
            refused("parents", f"a parent {x}", content("parents", (0, 1), x), ValueError, earlier, host=True)
            for x in (1, 2**31 - 1, -2)
        ),
        refused(
            "parents",
            "a root with a parent, validate=True",
            validated(content("parents", (0, 0), 0)),
            ValueError,
            earlier,
            host=True,
        ),
        gives("parents", "a child of padding", content("parents", (1, 1), -1), PADDING, host=True),
        *(replace(row, host=True) for row in host_out_rows("bool", "parents")),
    ]


def host_pack_rows() -> list[Row]:
    return [
        *(
            refused("mask", short(x), set_to("mask", x), TypeError, "^mask (has dtype|is) .*; it must be", host=True)
            for x in (None, "ab", 3, {}, [0, 1], [[True], [True, False]])
        ),
        refused(
            "mask", "True", set_to("mask", True), ValueError, r"^mask has shape \[\]; it must be \[.., Q\]", host=True
        ),
        refused(
            "mask",
            "a masked array",
            made("mask", lambda x: np.ma.masked_array(x)),
            TypeError,
            "^mask is a .*MaskedArray",
            host=True,
        ),
        refused(
            "mask",
            "bools of 2, validate=True",
            validated(made("mask", lambda x: (x * np.uint8(2)).view(np.bool_))),
            ValueError,
            r"^mask\[0, 0, 0\] is 2; a bool must be 0 or 1",
            host=True,
        ),
        *(replace(row, host=True) for row in host_out_rows("uint32", "mask")),
    ]


def host_unpack_rows() -> list[Row]:
    return [
        *(
            refused("words", short(x), set_to("words", x), TypeError, "^words (has dtype|is) .*; it must be", host=True)
            for x in (None, "ab", 3, {}, [0.5], [[1], [1, 2]])
        ),
        refused(
            "words",
            "a uint32",
            set_to("words", np.uint32(3)),
            ValueError,
            r"^words has shape \[\]; it must be \[.., ceil\(Q/32\)\]",
            host=True,
        ),
        refused(
            "words",
            "a word too many",
            made("words", longer(2)),
            ValueError,
            "^words has 2 words a row; 4 nodes need 1",
            host=True,
        ),
        refused(
            "words",
            "a masked array",
            made("words", lambda x: np.ma.masked_array(x)),
            TypeError,
            "^words is a .*MaskedArray",
            host=True,
        ),
        refused(
            "words",
            "a bit at Q, validate=True",
            validated(content("words", (0, 1, 0), 16)),
            ValueError,
            r"^words\[0, 1\] is 16; the last word of a row must have no bit",
            host=True,
        ),
        *(
            replace(row, host=True)
            for row in (*integer_rows("num_nodes", least=1, most=2**31 - 1), *host_out_rows("bool", "words"))
        ),
    ]


def relabel_arguments() -> Arguments:
    out = dd.DraftTree.empty(np.zeros(1), 2, 3, 2)
    for x in arrays_in(out):
        x.fill(FILLER)
    return {"tree": draft_tree(), "order": "depth_first", "out": out, "permutation": full(2, 4)}


def relabel_rows() -> list[Row]:
    rows = tree_rows()
    rows += [
        Row("out", short(x), set_to("out", x), TypeError, "^out is a .*; it must be a DraftTree") for x in ("a", [1])
    ]
    for name, dtype in DTYPES.items():
        axes = {"num_nodes": [0], "tree_mask": [0, 1, 2]}.get(name, [0, 1])
        rows += array_rows(f"out.{name}", dtype.name, fixed=axes, brief=True)
        rows += result_rows(f"out.{name}", "tree.tokens", brief=True)
    return [
        *rows,
        refused(
            "out.max_depth",
            "not the tree's",
            set_to("out.max_depth", 1),
            ValueError,
            r"^out\.max_depth is 1; it must be the tree's, 2",
        ),
        *(
            refused(
                "out.max_depth",
                short(x),
                set_to("out.max_depth", x),
                TypeError,
                r"^out\.max_depth is .*; it must be an integer",
            )
            for x in (None, NAN, "2")
        ),
        *(replace(row, argument="order") for row in variant_rows(argument="order")),
        *array_rows("permutation", "int32", fixed=[0, 1], optional=True),
        *result_rows("permutation", "tree.tokens", "out.tokens"),
        *invalid(
            "tree.parents",
            "a cycle",
            content("tree.parents", (0, 1), 1),
            "no parent for that node",
            r"^tree\.parents\[0, 1\] is 1; it must be -1 or the index of an earlier node",
        ),
        *invalid(
            "tree.first_child",
            "a link to the node itself",
            content("tree.first_child", (0, 0), 0),
            "the walk ends there; other nodes keep their places",
            r"^tree\.first_child\[0, 0\] is 0; it must be -1 or",
        ),
        *invalid(
            "tree.num_nodes",
            "above Q",
            content("tree.num_nodes", 0, 10**9),
            "copied as it is",
            r"^tree\.num_nodes\[0\] is 1000000000; it must be between 1 and 4",
        ),
    ]


def with_flags(operator: Operator) -> Operator:
    """The operator with mistakes in its flags too."""
    names = [
        x
        for x in ("validate", "packed", "batch_invariant", "prefix_tail")
        if x in inspect.signature(operator.function).parameters
    ]
    rows = [
        refused(name, short(x), set_to(name, x), TypeError, f"^{name} is .*; it must be True or False")
        for name in names
        for x in (np.ones(2, np.bool_), np.zeros(0))
    ]
    return replace(operator, rows=[*operator.rows, *rows])


OPERATORS: list[Operator] = [
    topk_logprobs(),
    build_tree(),
    *encodings(),
    verify_attention(),
    prefix_attention(),
    verify_attention_prefix_tail(),
    plan_attention(),
    workspace_bytes(),
    yarn_sm_scale(),
    merge_states(),
    lse_from_log2(),
    lse_from_flashmla(),
    argmax_tokens(),
    accept_greedy(),
    accept_sampled(),
    target_probs(),
    verify_tree_greedy(),
    compact_kv(),
    gather_accepted(),
]
OPERATORS = [with_flags(operator) for operator in OPERATORS]


# The page

INTRODUCTION = """# Hostile input

What every public operator answers to wrong arguments, and to contents that it did not expect. The tables are made from
[tests/hostile.py](../tests/hostile.py), and each line is a test: of the answer, of nothing having been written and no
kernel launched, and of the next right call.

- [What is checked, and when](#what-is-checked-and-when)
- [Contents](#contents)
- [What cannot be seen](#what-cannot-be-seen)
- [Arguments at random](#arguments-at-random)
- [Any array](#any-array)
- [Operator by operator](#operator-by-operator)

## What is checked, and when

All that can be told without reading device memory, in every call, before anything is launched or written: kind of
array, dtype, byte order, number of axes, shape, alignment, which GPU, whether results may be written to and have memory
of their own, and all numbers and names. A mistake is one exception, of one line: a TypeError for a thing of the wrong
kind, a ValueError for one that is wrong in size, place or value. The message names the argument, what it was and what
it must be. Results given as `out` keep their bits, and the GPU knows nothing of it: the next call works.

`validate`, `packed` and `batch_invariant` are read as Python reads a condition; an array is a TypeError. Results that
are too large for memory (a `max_depth` of 2**30, say) are refused by whoever allocates them: a MemoryError, or the
library's own.

## Contents

Lengths, links, page numbers, tokens and floats lie on the device, where no call waits to look at them. Kernels take
any: an index that leads outside is clamped or counts as none, walks follow links to later nodes alone, and a float that
is none spreads no further than stated. So no contents hang a kernel or make it read or write outside its arguments. The
tables say what they give. `validate=True`, where an operator has it, copies them to the host, checks, and raises a
ValueError.

## What cannot be seen

- Device memory that has been freed, while it is still mapped: CuPy's and PyTorch's pools keep what arrays give back.
  What was given back to the driver is refused (`points to 0x.., which is not memory of a GPU`).
- A `__cuda_array_interface__` that claims more elements than there is memory.
- Memory that another stream is still writing to, and a buffer that is freed or reused before the kernel has read it.
- Contents that are wrong but possible: a stale length, the block table of another request.
- Tokens beyond int32 in `verify_tree_greedy`'s `target_predict`: a GPU writes their low 32 bits, and NumPy, in
  the simulator, raises an OverflowError.
"""

FUZZED = re.compile(r"<!-- fuzzed -->\n.*<!-- end of fuzzed -->\n", re.S)
NOT_FUZZED = "<!-- fuzzed -->\n<!-- end of fuzzed -->\n"

AT_RANDOM = """
## Arguments at random

[tests/fuzz_arguments.py](../tests/fuzz_arguments.py) draws arguments of all kinds, right and wrong, and of hostile
contents, and holds every result against the oracles. An exception that is not documented, a message that names no
argument, a result that is off, a changed argument or a call that does not end counts as a failure. On one core
all takes some three quarters of an hour.

"""

ANY_ARRAY = """
## Any array

Mistakes that are met by one demand share a line, in all tables; the message is that of the first.

What each array argument of each operator answers, here with the name of `argmax_tokens`'s. Where an operator has more
to say (`stop_tokens` may be numbers, the masks on the host lists), its own table has it.

"""


def answer_of(operator: Operator, row: Row) -> str:
    """What the page says: the error and its message, or what the contents give."""
    if row.error is None:
        return f"taken: {row.answer}"
    try:
        given = row.change(operator.given())
        operator.function(**(as_numba(given) if operator.name.endswith("on the device") else given))
    except row.error as error:
        text = re.sub(r"numpy\.ma[\w.]*MaskedArray", "numpy.ma.MaskedArray", str(error))
        return f"{row.error.__name__}: {text}"
    raise AssertionError(f"{operator.name}: {row} raises nothing")


def as_numba(x: Any) -> Any:
    """Arguments whose arrays are Numba's, in the simulator of the same memory."""
    if isinstance(x, dict):
        return {name: as_numba(one) for name, one in x.items()}
    return arrays.SimulatedArray(x) if isinstance(x, np.ndarray) else x


def demand(answer: str) -> str:
    """What an answer says apart from what the argument was."""
    return re.sub(r"(is|has) .*?; (it|they|both|there) must", "must", answer)


def table(operator: Operator, rows: list[Row]) -> list[str]:
    """Lines of a table; mistakes in one argument that are met by one demand share a line, and the first's message."""
    lines: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for row in rows:
        answer = answer_of(operator, row)
        lines.setdefault((row.argument, demand(answer)), (answer, []))[1].append(row.mistake)
    return [
        "| argument | mistake | answer |",
        "|---|---|---|",
        *(
            f"| `{argument}` | {'; '.join(mistakes)} | {answer} |".replace("|V0", "\\|V0")
            for (argument, _), (answer, mistakes) in lines.items()
        ),
    ]


def page() -> str:
    """The page; what is between the marks of the fuzzing is kept."""
    known = FUZZED.search(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else None
    example = next(operator for operator in OPERATORS if operator.name == "argmax_tokens")
    general = [row for row in example.rows if row.general and row.argument == "logits"]
    lines = [*table(example, general), "", "## Operator by operator"]
    for operator in OPERATORS:
        lines += ["", f"### {operator.name}", "", *table(operator, [row for row in operator.rows if not row.general])]
    kept = known[0] if known else NOT_FUZZED
    return f"{INTRODUCTION}{AT_RANDOM}{kept}{ANY_ARRAY}" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/hostile_input.md")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    print(f"{len(OPERATORS)} operators, {sum(len(operator.rows) for operator in OPERATORS)} rows")


if __name__ == "__main__":
    main()
