"""Planning kernels with one mistake each, which the tests must catch: see wrong_flash.py.

Text is replaced ahead of the mirror, and the module run anew from its source. Text that is not there exactly once
raises.
"""

from __future__ import annotations

import inspect
from types import ModuleType

from ddtree_numba.attention import schedule

MIRROR = "def mirror("  # ends the device code

Change = tuple[str, str]

MISTAKES: dict[str, tuple[Change, ...]] = {
    "lengths_not_clamped": (("(_clamped(lengths, b, max_seqlen) + num_nodes + 63)", "(lengths[b] + num_nodes + 63)"),),
    "prefixes_not_clamped": (
        ("pieces[row, PREFIX] = _clamped(lengths, b, max_seqlen)", "pieces[row, PREFIX] = lengths[b]"),
    ),
    "nodes_not_counted": (("+ num_nodes + 63) >> 6", "+ 63) >> 6"),),
    "tiles_rounded_down": (("num_nodes + 63) >> 6", "num_nodes) >> 6"),),
    "pairs_rounded_down": (("max_seqlen) + 1) >> 1", "max_seqlen)) >> 1"),),
    "no_teams": (("    stop = teams\n    full", "    teams = 0\n    stop = teams\n    full"),),
    "scan_of_neighbours_alone": (("        step *= 2\n    return sums[t]", "        step *= 4\n    return sums[t]"),),
    "scan_without_the_first": (("if t >= step else 0", "if t > step else 0"),),
    "single_pieces_never": (("may_be_single = batch <= teams", "may_be_single = batch < 0"),),
    "single_pieces_whatever_they_cost": (("(whole or single_high", "(True or single_high"),),
    "merging_costs_nothing": (("merging = MERGE if single_high < PIECE", "merging = 0 if single_high < PIECE"),),
    "whole_or_not": (("    elif whole:\n", "    elif whole < 0:\n"),),
    "longest_of_the_first_thread": (("sums[t] = max(sums[t], sums[t + step])", "sums[t] = sums[t]"),),
    "a_cap_too_small": (("take_single else high, take_single", "take_single else high - 1, take_single"),),
    "a_cap_too_large": (("take_single else high, take_single", "take_single else high + 1, take_single"),),
    "pieces_cost_nothing": (("over(max(_i32(room - PIECE), _i32", "over(max(_i32(room), _i32"),),
    "short_pieces_begun": (("take == left or take >= LEAST or", "take == left or take >= 1 or"),),
    "passed_one_too_many": (("over(left - 1, full), stop", "over(left - 1, full) + 1, stop"),),
    "the_cut_is_the_end": (
        ("cut_request, cut_left, row_tile = b, left, _i32", "cut_request, cut_left, row_tile = b, 0, _i32"),
    ),
    "second_slot_is_the_first": (("slot = _i32(2 * c + 1)\n", "slot = _i32(2 * c)\n"),),
    "no_slot_behind_the_teams": (
        ("elif p > 0 and b == begins[CUT_REQUEST]", "elif p < 0 and b == begins[CUT_REQUEST]"),
    ),
    "whole_row_tiles_leave_states": (("if p > 0 or until < pairs[b]:", "if True:"),),
    "pieces_of_pairs": (("pieces[row, FIRST] = 2 * p", "pieces[row, FIRST] = p"),),
    "last_tile_twice": (("min(2 * until, tiles) - 2 * p", "2 * until - 2 * p"),),
    "chain_ends_early": (("pieces[row, NEXT] = n\n", "pieces[row, NEXT] = -1\n"),),
    "second_pieces_of_two_blocks_in_one_row": (("n = blocks + _scan(sums, t, n) - n", "n = blocks"),),
    "items_of_two_threads_in_one_row": (("m = _scan(sums, t, m) - m", "m = _scan(sums, t, m) * 0"),),
    "items_of_two_blocks_in_one_row": (
        ("                m += 1\n        if write:", "                m += 0\n        if write:"),
    ),
    "states_of_two_threads_in_one_place": (("_scan(sums, t, states) - states", "_scan(sums, t, states) * 0"),),
    "states_of_two_blocks_in_one_place": (("            place += states\n", "            place += 0\n"),),
    "items_not_counted": (("begins[ITEMS] = num_items", "begins[ITEMS] = 0"),),
    "idle_blocks_not_told": (("        pieces[c, COUNT] = 0\n        pieces[c, NEXT] = -1\n", "        pass\n"),),
    "states_not_cleared": (("        begins[places + c] = 0\n", "        pass\n"),),
    "states_behind_the_cut_in_an_item_of_their_own": (
        ("of_team or b == begins[CUT_REQUEST] and begins[CUT_PAIR] > 0", "of_team"),
    ),
    "states_behind_the_cut_first": (("k = _i32(begins[TEAMS])\n", "k = _i32(first)\n"),),
    "following_of_another_request": (("pairs[min(b + 1, batch - 1)])", "pairs[min(b, batch - 1)])"),),
    "none_behind_the_first_of_the_cut": (("if p > begins[CUT_PAIR]:", "if p < begins[CUT_PAIR]:"),),
    "held_by_the_next": (("            low = middle\n", "            low = min(middle + 1, high)\n"),),
    "held_in_any_row_tile": (("if of_row_tile < row_tile or of_row_tile == row_tile and earlier:", "if earlier:"),),
    "last_states_not_counted": (("begins[places + first] = number + 1", "begins[places + first] = number"),),
    "too_few_splits": (("begins[SPLITS] = splits", "begins[SPLITS] = 1"),),
}


def build(*changes: Change) -> ModuleType:
    """The module schedule with changed device code."""
    device_code, mark, rest = inspect.getsource(schedule).partition(MIRROR)
    assert mark, "schedule no longer reads as expected"
    for old, new in changes:
        assert device_code.count(old) == 1, f"{old!r} occurs {device_code.count(old)} times in the device code"
        device_code = device_code.replace(old, new)
    module = ModuleType("schedule_changed")
    exec(compile(device_code + mark + rest, schedule.__file__, "exec"), module.__dict__)
    return module
