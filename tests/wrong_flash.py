"""Kernels of flash with one mistake each, which the tests must catch: see wrong_kernels.py.

Text is replaced behind the mirror, and the module run anew from its source. Text that is not there exactly once raises.
Each mistake stands under the problem that must show it, since one call takes seconds in the simulator.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, NamedTuple

from cases import Case

from ddtree_numba.attention import flash

DEVICE_CODE = "@cuda.jit(device=True"  # the first one ends the mirror

Change = tuple[str, str]


class Trap(NamedTuple):
    """A problem, how its keys are split, and how many key tiles are added up before the sums go to the workspace."""

    case: Case
    options: dict[str, Any] = {}
    fold: int = flash.FOLD


# In the simulator a tile has 16 rows and 16 keys, and the even parts of all work go to six blocks.
TRAPS = {
    # One request in one tile and one in two, which two blocks share; as many pages as slots: a swap stays inside.
    "ragged": Trap(Case("flash_ragged", (9, 15), Q=5, H=2, R=16, page_size=8)),
    # One tile, and the same for a node that sees nothing, beside others.
    "whole": Trap(Case("flash_whole", (2,), Q=3, R=16), {"num_splits": 1}),
    "empty": Trap(Case("flash_empty", (0,), Q=3, R=16, padded=1), {"num_splits": 1}),
    # Two row tiles, three columns of heads, two key tiles.
    "rows": Trap(Case("flash_rows", (14,), Q=8, H=3, R=16, logit_std=3.0), {"num_splits": 1}),
    # Five key tiles, folded behind the second, the fourth and the last.
    "folded": Trap(Case("flash_folded", (70,), Q=2, R=16, logit_std=3.0), {"num_splits": 1}, fold=2),
    # Two requests of two and three key tiles and a row tile and a half: ten pairs on six blocks.
    "shared": Trap(Case("flash_shared", (20, 40), Q=2, H=9, R=16)),
    # Two key tiles in three parts: the first has none. Columns enough for a second four of a lane.
    "parts": Trap(Case("flash_parts", (20,), Q=2, R=144), {"num_splits": 3}),
    # Two row tiles in two parts each.
    "row_parts": Trap(Case("flash_row_parts", (15,), Q=2, H=9, R=16), {"num_splits": 2}),
}

MISTAKES: dict[str, dict[str, Change]] = {
    "ragged": {
        "prefix_one_short": ("return min(max(cache_seqlens[b], 0), max_seqlen)", "return max(cache_seqlens[b] - 1, 0)"),
        "last_key_left_out": ("return 0, prefix + num_nodes\n", "return 0, prefix + num_nodes - 1\n"),
        "table_of_first_request": ("locate(block_table, numbers[REQUEST], key", "locate(block_table, 0, key"),
        "page_and_slot_swapped": ("row = kv_cache[page, slot]", "row = kv_cache[slot, page]"),
        "queries_of_first_request": ("load_words(q_nope[b, i, h], c,", "load_words(q_nope[0, i, h], c,"),
        "rope_part_of_first_head": ("load_words(q_pe[b, i, h], c - R", "load_words(q_pe[b, i, 0], c - R"),
        "mask_of_first_request": ("sees(tree_mask, bits_per_word, b, i, j)", "sees(tree_mask, bits_per_word, 0, i, j)"),
    },
    "whole": {
        "scale_forgotten": ("s[n] * sm_scale", "s[n]"),
        "keys_not_swizzled": (" at = r * DP + (lane * 4 ^ (r & 1) << 4)", " at = r * DP + lane * 4"),
        "queries_not_swizzled": ("Q_TILE + r * DP + (lane * 4 ^ (r & 1) << 4)", "Q_TILE + r * DP + lane * 4"),
        "scores_read_the_other_side": (
            "key * DP + (group * 4 ^ key_side * 16)",
            "key * DP + (group * 4 ^ row_side * 16)",
        ),
        "values_of_odd_rows_not_swapped": ("odd = np.int32((even ^ 16) + DP)", "odd = np.int32(even + DP)"),
        "scores_of_the_wrong_key": ("WEIGHTS + (key + 2 * j) * PITCH", "WEIGHTS + (key + 2 * j ^ 1) * PITCH"),
        "mask_transposed": ("sees(tree_mask, bits_per_word, b, i, j)", "sees(tree_mask, bits_per_word, b, j, i)"),
        "mask_left_out": ("    mask(shared, tree_mask, bits_per_word, numbers, tile, num_heads)\n", "    pass\n"),
        "maximum_of_one_lane": ("m = max(m, shuffle_xor(m, np.int32(other)))", "shuffle_xor(m, np.int32(other))"),
        "sum_of_one_lane": ("l += shuffle_xor(l, np.int32(other))", "shuffle_xor(l, np.int32(other))"),
        "output_not_divided": ("quotient(shared[np.uint32(r * R + d)], l, share)", "shared[np.uint32(r * R + d)]"),
        "lse_without_maximum": ("log_sum(shared[np.uint32(M_SUM + r)], l)", "log_sum(ZERO, l)"),
        "lse_in_bits": ("return m + math.log(l)", "return (m + math.log(l)) / np.float32(math.log(2.0))"),
    },
    "empty": {
        "root_seen_by_all": ("if j >= 0:", "if j > 0:"),
        "empty_row_not_zero": (
            "                value = ZERO\n                if l != ZERO:\n                    value = quotient(shared",
            "                value = ONE\n                if l != ZERO:\n                    value = quotient(shared",
        ),
        "lse_of_an_empty_row": ("        return NEG_INF\n    return m", "        return ZERO\n    return m"),
    },
    "rows": {
        "mask_rows_of_the_first_tile": (
            "node_and_head(numbers[ROW] + row, num_heads)",
            "node_and_head(row, num_heads)",
        ),
        "query_heads_first": (
            "i, h = node_and_head(row, num_heads)\n            fill(words",
            "h, i = node_and_head(row, q_nope.shape[1])\n            fill(words",
        ),
        "result_heads_first": (
            "i, h = node_and_head(row, num_heads)\n            l = shared",
            "h, i = node_and_head(row, out.shape[1])\n            l = shared",
        ),
        "mask_only_behind_the_prefix": (
            "if numbers[ORIGIN] + (tile + 1) * N > numbers[PREFIX_LENGTH]:",
            "if numbers[ORIGIN] + tile * N > numbers[PREFIX_LENGTH]:",
        ),
        "sum_not_rescaled": (
            "l_i, l_low = shared[np.uint32(L_I + row)] * scale, shared",
            "l_i, l_low = shared[np.uint32(L_I + row)], shared",
        ),
        "accumulators_not_rescaled": ("load4(shared, SCALE + row + 4 * i, p, 4 * i)", "fill(p, 4 * i, 4, ONE)"),
        "maximum_not_kept": ("shared[np.uint32(M_I + row)] = m\n", "pass\n"),
    },
    "folded": {
        "earlier_weights_forgotten": ("add_exactly_device(l_i, l_low, l)", "add_exactly_device(ZERO, l_low, l)"),
        "accumulators_folded_without_their_scale": ("p[0] = shared[np.uint32(SCALE + row + i)]", "p[0] = ONE"),
        "accumulators_folded_twice": (
            "num_splits))\n                        fill(acc, 0, ACC, ZERO)\n",
            "num_splits))\n",
        ),
        "earlier_accumulators_forgotten": ("if tile - numbers[FIRST] > FOLD:", "if tile - numbers[FIRST] > 2 * FOLD:"),
        "maximum_of_the_sum_not_kept": ("shared[np.uint32(M_SUM + row)] = m\n", "pass\n"),
    },
    "shared": {
        "one_pair_of_each_share_left_out": (
            "left = (block + 1) * work // num_blocks - first\n",
            "left = (block + 1) * work // num_blocks - first - 1\n",
        ),
        "second_state_over_the_first": ("block += block + (first == 0)", "block += block"),
        "first_state_looked_for_in_the_wrong_slot": ("step, ahead = 2, 1", "step, ahead = 2, 0"),
        "last_state_left_out": ("// work - first_block + 1\n", "// work - first_block\n"),
        "first_block_of_the_next_pair": (
            "first_block = ((begin + 1) * num_blocks - 1) // work",
            "first_block = ((begin + 2) * num_blocks - 1) // work",
        ),
        "row_tiles_do_not_move_on": ("numbers[ROW] += M\n", "numbers[ROW] += 0\n"),
        "next_request_left_out": ("numbers[REQUEST] += 1\n", "pass\n"),
        "next_row_tile_begins_late": ("numbers[FIRST] = 0\n", "numbers[FIRST] = 1\n"),
        "work_of_earlier_requests_forgotten": ("begin = row_tile * count\n", "begin = row_tile\n"),
    },
    "parts": {
        "empty_part_leaves_no_state": ("if left == 0:  # an empty", "if left < 0:  # an empty"),
        "states_not_weighed": ("p[0] = math.exp(m_n - base)", "p[0] = ONE"),
        "sums_not_weighed": ("l_low, l_n * math.exp(m_n - base))", "l_low, l_n)"),
        "combined_not_divided": ("value = quotient(acc[n], l, share)", "value = acc[n]"),
        "second_four_of_a_lane_is_the_first": ("n // 4 * 128", "n // 4 * 64"),
        "columns_of_a_state_mixed_up": (
            "acc, i * COLS + 4 * j, array, at + i * R + 32 * j)",
            "acc, i * COLS + 4 * j, array, at + i * R)",
        ),
    },
    "row_parts": {
        "row_of_the_first_tile": ("r = row % M\n", "r = row % COMBINE_ROWS\n"),
        "parts_of_the_next_row_tile": ("block // num_splits % row_tiles", "block % row_tiles"),
        "slots_of_the_first_row_tile": ("(b * row_tiles + row_tile) * num_splits", "b * row_tiles * num_splits"),
    },
}


def build(*changes: Change) -> ModuleType:
    """The module flash with changed device code."""
    head, mark, device_code = inspect.getsource(flash).partition(DEVICE_CODE)
    assert mark, f"{DEVICE_CODE!r} is no longer in flash"
    for old, new in changes:
        assert device_code.count(old) == 1, f"{old!r} occurs {device_code.count(old)} times in the device code"
        device_code = device_code.replace(old, new)
    module = ModuleType("flash_changed")
    exec(compile(head + mark + device_code, flash.__file__, "exec"), module.__dict__)
    return module
