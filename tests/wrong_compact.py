"""compact_kv.py with one mistake each, which the tests must catch: see wrong_kernels.py.

Text is replaced behind the mirror, and the module run anew from its source. Text that is not there exactly once raises.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ddtree_numba.accept import compact_kv

DEVICE_CODE = "@cuda.jit(device=True"  # the first one ends the mirror

Change = tuple[str, str]

MISTAKES: dict[str, tuple[Change, ...]] = {
    "tiles_from_the_last_to_the_first": (
        ("    first = 0\n", "    first = (count - 1) // ROWS * ROWS\n"),
        ("    while first < count:\n", "    while first >= 0:\n"),
        ("        first += ROWS\n", "        first -= ROWS\n"),
    ),
    "one_row_too_far": (("target = length + first + k", "target = length + first + k + 1"),),
    "the_row_before_the_node": (("source = length + node", "source = length + node - 1"),),
    "a_tile_starts_at_the_prefix": (("target = length + first + k", "target = length + k"),),
    "first_tile_alone": (("        first += ROWS\n", "        first += count\n"),),
    "last_row_of_a_tile_left_out": (("if first + k < count:", "if first + k < count and k < ROWS - 1:"),),
    "last_row_left_out": (("if first + k < count:", "if first + k < count - 1:"),),
    "rows_beyond_the_count": (("count = min(num_accepted[b], nodes.shape[1])", "count = nodes.shape[1]"),),
    "count_of_the_first_request": (("count = min(num_accepted[b], nodes", "count = min(num_accepted[0], nodes"),),
    "page_of_the_first_request": (("entry = block_table[b, page]", "entry = block_table[0, page]"),),
    "pages_in_order": (("entry = block_table[b, page]", "entry = b * block_table.shape[1] + page"),),
    "source_on_the_page_of_the_target": (
        ("pages[0, k] = page_of(block_table, b, source", "pages[0, k] = page_of(block_table, b, target"),
    ),
    "source_at_the_slot_of_the_target": (("slots[0, k] = source % page_size", "slots[0, k] = target % page_size"),),
    "entries_that_are_no_page": (("return entry if 0 <= entry < num_pages else -1", "return entry"),),
    "rows_behind_the_table": (("    if page >= block_table.shape[1]:\n        return -1\n", ""),),
    "target_on_no_page": (("if pages[1, k] >= 0:", "if True:"),),
    "moves_to_behind_the_source": (("if node > first + k:", "if node != first + k:"),),
    "negative_length_is_a_length": (("    if length < 0:\n        count = 0\n", ""),),
    "first_layer_for_all": (("offset = offsets[layer]", "offset = offsets[0]"),),
    "layers_beyond_the_blocks_left_out": (("layer += cuda.gridDim.y", "layer += offsets.shape[0]"),),
    "every_layer_by_every_block": (("layer = cuda.blockIdx.y", "layer = 0"), ("layer += cuda.gridDim.y", "layer += 1")),
    "layouts_told_apart_by_shape_alone": (("setdefault((x.shape, x.strides), [])", "setdefault(x.shape, [])"),),
    "words_that_addresses_do_not_allow": (
        ("for n in (x.pointer, x.shape[2], *x.strides[:2])", "for n in (x.shape[2], *x.strides[:2])"),
    ),
    "words_that_rows_do_not_allow": (
        ("for n in (x.pointer, x.shape[2], *x.strides[:2])", "for n in (x.pointer, *x.strides[:2])"),
    ),
    "fifth_word_not_written": (("put(target_row, w + 4 * LANES, end, word_4)", "pass"),),
    "second_word_is_the_first": (("word_at(source_row, w + LANES, end)", "word_at(source_row, w, end)"),),
    "first_batch_of_words_alone": (("while start < row_words:", "while start == 0 and row_words > 0:"),),
    "a_word_too_many": (("(row_words if moves else 0)", "(row_words + 1 if moves else 0)"),),
    "length_stays": (("cache_seqlens[b] = length + count", "cache_seqlens[b] = length"),),
    "length_grows_by_all_columns": (("count = min(num_accepted[b], most)", "count = most"),),
    "length_behind_the_cache": (("0 <= length <= capacity - count", "0 <= length <= capacity"),),
    "negative_length_grows": (("0 <= length <= capacity - count", "length <= capacity - count"),),
}  # fmt: skip

GATHER_MISTAKES: dict[str, tuple[Change, ...]] = {
    "rows_beyond_the_count": (("there = k < num_accepted[b] and 0 <=", "there = 0 <="),),
    "nodes_that_are_none": (("there = k < num_accepted[b] and 0 <= node < x.shape[1]", "there = k < num_accepted[b]"),),
    "rows_of_the_first_request": (("word = x[b, node, w]", "word = x[0, node, w]"),),
    "rows_in_order": (("word = x[b, node, w]", "word = x[b, k, w]"),),
    "old_contents_behind_the_path": (
        ("        out[b, k, w] = word\n", "        if there:\n            out[b, k, w] = word\n"),
    ),
    "first_words_alone": (("    while w < x.shape[2]:\n", "    while w < min(x.shape[2], THREADS):\n"),),
}  # fmt: skip

# A thread holds until the block's others have gone on to their next barrier. Changes are made in order: hold, then the
# barrier's removal. Rows are of two words, one a lane.
RACES: dict[str, tuple[Change, Change]] = {
    # Row 2 is read for row 1 late: by then row 3 has been written to it.
    "words_read": (
        ("word_0 = word_at(", "word_0 = hold_if(lane == 0 and first + k == 1) or word_at("),
        ("cuda.syncthreads()  # gpu: all have read\n", "pass\n"),
    ),
    # The first lane tells the second move of the second tile late: the other lane has gone on without.
    "moves_known": (
        ("node = nodes[b, first + k]", "node = hold_if(first + k == ROWS + 1) or nodes[b, first + k]"),
        ("cuda.syncthreads()  # gpu: all moves are known\n", "pass\n"),
    ),
}


def build(*changes: Change, **names: Any) -> ModuleType:
    """The module compact_kv with changes behind its mirror; ``names`` are put among its globals."""
    head, mark, code = inspect.getsource(compact_kv).partition(DEVICE_CODE)
    assert mark, f"{DEVICE_CODE!r} is no longer in compact_kv"
    for old, new in changes:
        assert code.count(old) == 1, f"{old!r} occurs {code.count(old)} times behind the mirror"
        code = code.replace(old, new)
    module = ModuleType("compact_kv_changed")
    module.__dict__.update(names)
    exec(compile(head + mark + code, compact_kv.__file__, "exec"), module.__dict__)
    module.BLOCKS = 1  # fewer blocks than layers
    return module


def build_race(name: str, *, with_barrier: bool) -> ModuleType:
    """The kernel with a late thread, with or without the barrier that protects it."""
    from ddtree_numba.device.simulator import let_others_go_first

    hold, removal = RACES[name]
    return build(hold, *([] if with_barrier else [removal]), hold_if=lambda now: let_others_go_first() if now else None)
