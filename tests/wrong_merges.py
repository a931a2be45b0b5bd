"""merge.py with one mistake each, which the tests must catch: see wrong_kernels.py.

Text is replaced behind the mirror, and the module run anew from its source. Text that is not there exactly once raises.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ddtree_numba.attention import merge

DEVICE_CODE = "@cuda.jit(device=True"  # the first one ends the mirror

Change = tuple[str, str]

MISTAKES: dict[str, Change] = {
    "weights_swapped": ("smaller) if l_a > l_b else", "smaller) if l_a < l_b else"),
    "weights_of_equal_states": ("w_a, w_b = (larger, smaller) if l_a > l_b else (smaller, larger)", "w_a = larger"),
    "sum_not_divided": ("larger, smaller = ONE / s, e / s", "larger, smaller = ONE, e"),
    "inf_is_not_empty_in_a": ("math.fabs(l_a) != INF", "l_a != NEG_INF"),
    "inf_is_not_empty_in_b": ("math.fabs(l_b) != INF", "l_b != NEG_INF"),
    "nan_is_empty": ("math.fabs(l_a) != INF", "math.fabs(l_a) < INF"),
    "empty_state_multiplied_by_0": (
        "store(row_out, w, blend(a_0, like_a, w_a, b_0, like_b, w_b, seen, like))",
        "store(row_out, w, blend(a_0, like_a, w_a, b_0, like_b, w_b, np.int32(3), like))",
    ),
    "lse_is_the_larger": ("max(l_a, l_b) + math.log1p(e)", "max(l_a, l_b)"),
    "lse_from_the_smaller": ("max(l_a, l_b) + math", "min(l_a, l_b) + math"),
    "lse_in_bits": ("math.log1p(e)", "math.log1p(e) / LN_2"),
    "lse_of_the_empty_state": (
        "elif seen == 1:\n            merged = l_a",
        "elif seen == 1:\n            merged = l_b",
    ),
    "lse_of_two_empty_states": ("    merged = NEG_INF\n", "    merged = ZERO\n"),
    "exponential_of_the_wrong_sign": ("math.exp(-math.fabs(l_a - l_b))", "math.exp(min(math.fabs(l_a - l_b), 80.0))"),
    "second_word_is_the_first": ("load(row, w_1 if w_1 < num_words else w)", "load(row, w)"),
    "third_word_is_the_first": ("load(row, w_2 if w_2 < num_words else w)", "load(row, w)"),
    "fourth_word_is_the_first": ("load(row, w_3 if w_3 < num_words else w)", "load(row, w)"),
    "fourth_word_not_written": ("            if w_3 < num_words:\n", "            if w_3 < 0:\n"),
    "states_blended_crosswise": ("blend(a_2, like_a, w_a, b_2", "blend(a_2, like_a, w_a, b_1"),
    "first_batch_of_b_from_a": (
        "b_0, b_1, b_2, b_3 = load_batch(row_b, w, lanes, num_words)\n\n        # Phase 1",
        "b_0, b_1, b_2, b_3 = load_batch(row_a, w, lanes, num_words)\n\n        # Phase 1",
    ),
    "later_batches_are_the_first": (
        "            if w < num_words:\n                a_0, a_1, a_2, a_3 =",
        "            if w < 0:\n                a_0, a_1, a_2, a_3 =",
    ),
    "only_one_batch": ("        while w < num_words:\n", "        while w == lane:\n"),
    "last_row_left_out": ("live = row < np.uint32(lse.size)", "live = row + 1 < np.uint32(lse.size)"),
    "blocks_overlap": ("(np.uint32(THREADS) >> shift) + (t", "(np.uint32(THREADS) >> shift) // 2 + (t"),
    "axes_of_strided_rows_swapped": (
        "return x, np.uint32(rest - x * np.uint32(shape[1])), ",
        "return np.uint32(rest - x * np.uint32(shape[1])), x, ",
    ),
    "first_index_of_strided_rows_is_0": (
        "return x, np.uint32(rest - x",
        "return np.uint32(0), np.uint32(rest - x",
    ),
    "axes_joined_that_do_not_follow": ("if lengths and all(", "if lengths and any("),
    "first_part_of_many_axes_alone": ("for n in range(shape[0]):", "for n in range(1):"),
    "last_columns_left_out": ("x.strides[-1] == x.dtype.itemsize and x.shape[-1] % per == 0", "True"),
    "lse_of_b_for_a": ("l_a, l_b = lse_a[x, y, z], lse_b[x, y, z]", "l_a, l_b = lse_b[x, y, z], lse_b[x, y, z]"),
}

CONVERTER_MISTAKES: dict[str, Change] = {
    "inf_kept": ("NEG_INF if found == INF else found * scale", "found * scale"),
    "logarithm_to_base_2_kept": ("LN_2, out, in_place=True", "ONE, out, in_place=True"),
    "axes_not_swapped": (
        "strides=(strides[0], strides[2], strides[1])",
        "strides=(strides[0], strides[1], strides[2])",
    ),
    "last_element_left_out": ("if n < np.uint32(out.size):", "if n + 1 < np.uint32(out.size):"),
}

# The second of a row's threads reads the lse late. Without the barrier the first has overwritten it by then. Changes in
# order: hold, then the barrier's removal.
RACE: tuple[Change, Change] = (
    (
        "        l_a, l_b = lse_a[x, y, z], lse_b[x, y, z]\n",
        "        if lane == 1:\n            hold()\n        l_a, l_b = lse_a[x, y, z], lse_b[x, y, z]\n",
    ),
    ("    cuda.syncthreads()  # gpu: the row's other threads have read what it may overwrite\n", ""),
)


def build(*changes: Change, **names: Any) -> ModuleType:
    """The module merge with changes behind its mirror; ``names`` are put among its globals."""
    head, mark, code = inspect.getsource(merge).partition(DEVICE_CODE)
    assert mark, f"{DEVICE_CODE!r} is no longer in merge"
    for old, new in changes:
        assert code.count(old) == 1, f"{old!r} occurs {code.count(old)} times behind the mirror"
        code = code.replace(old, new)
    module = ModuleType("merge_changed")
    module.__dict__.update(names)
    exec(compile(head + mark + code, merge.__file__, "exec"), module.__dict__)
    return module


def build_race(*, with_barrier: bool) -> ModuleType:
    """The kernel with a late thread, with or without the barrier that protects it."""
    from ddtree_numba.device.simulator import let_others_go_first

    hold, removal = RACE
    return build(hold, *([] if with_barrier else [removal]), hold=let_others_go_first)
