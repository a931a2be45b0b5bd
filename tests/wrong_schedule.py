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
    "lengths_not_clamped": (("return (min(max(length, 0), max_seqlen) + num_nodes", "return (length + num_nodes"),),
    "prefixes_not_clamped": (("return min(max(lengths[b], 0), max_seqlen)", "return lengths[b]"),),
    "nodes_not_counted": (("max_seqlen) + num_nodes + 63) >> 6", "max_seqlen) + 63) >> 6"),),
    "tiles_rounded_down": (("num_nodes + 63) >> 6", "num_nodes) >> 6"),),
    "shares_rounded_down": (
        ("return over(length * row_tiles + blocks - 1, blocks)", "return over(length * row_tiles, blocks)"),
    ),
    "no_teams": (("return min(over(blocks, row_tiles), over(length, share)) * share", "return 0"),),
    "scan_of_neighbours_alone": (("        step *= 2\n    return sums[t]", "        step *= 4\n    return sums[t]"),),
    "scan_without_the_first": (("if t >= step else 0", "if t > step else 0"),),
    "even_runs_never": (("if batch * row_tiles <= blocks:", "if batch * row_tiles <= 0:"),),
    "even_runs_always": (("if even <= share * TILE", "if 0 <= share * TILE"),),
    "merging_costs_nothing": (("            even += MERGE\n", "            even += 0\n"),),
    "longest_of_the_first_thread": (("sums[t] = max(sums[t], sums[t + step])", "sums[t] = sums[t]"),),
    "second_slot_is_the_first": (("    return block * 2 + 1\n", "    return block * 2\n"),),
    "no_slot_behind_the_teams": (("    if at == cut and at > begin:", "    if at < 0 and at > begin:"),),
    "whole_row_tiles_leave_states": (("split = at > begin or last < end", "split = True"),),
    "pieces_begin_where_they_lie_on_the_line": (
        ("row_tile, at - begin, last - at, slot", "row_tile, at, last - at, slot"),
    ),
    "chain_ends_early": (("if count + last - at < stop else -1", "if count + last - at < stop - 1 else -1"),),
    "second_pieces_of_two_blocks_in_one_row": (("n = blocks + _scan(sums, t, more) - more", "n = blocks"),),
    "items_of_two_threads_in_one_row": (("m = _scan(sums, t, num_items) - num_items", "m = 0"),),
    "items_not_counted": (("plan[ITEMS] = m + num_items", "plan[ITEMS] = 0"),),
    "idle_blocks_not_told": (
        ("        pieces[c, COUNT] = 0\n        pieces[c, NEXT] = -1\n    while", "        pass\n    while"),
    ),
    "states_of_two_threads_in_one_place": (("mine if lane == 0 else 0) - mine", "mine if lane == 0 else 0) * 0"),),
    "states_of_two_items_in_one_place": (
        ("            items[m, STATES] = place\n        place += num", "            items[m, STATES] = place"),
    ),
    "one_lane_lists_all_states": (("for i in range(lane, num, lanes):", "for i in range(lane, num, num):"),),
    "no_barrier_ahead_of_the_lists": (
        ("            num_items += new_items\n    cuda.syncthreads()\n", "            num_items += new_items\n"),
    ),
    "too_few_splits": (("over(longest - 1, share) + 3", "1"),),
    "no_barrier_ahead_of_the_requests": (
        ("        starts[batch] = length\n    cuda.syncthreads()\n", "        starts[batch] = length\n"),
    ),
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
