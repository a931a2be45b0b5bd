"""Kernels of build_tree and topk_logprobs with one mistake each, which the tests must catch: see wrong_kernels.py.

A mistake replaces text in the device code of one module. The kernel's module is then run anew from its source, with the
changed module in the place of the one that it imports. Text that is not there exactly once raises.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from ddtree_numba.tree import build_frontier, build_heap, search, topk_rounds, topk_threshold

DEVICE_CODE = "@cuda.jit(device=True"  # the first one begins the device code, the launcher or a mirror ends it
ENDS = ("\ndef arguments(", "\ndef plan(", "\ndef run(", "\ndef mirror_")

Change = tuple[str, str]

# What both builders share. They are made in `heap`, and caught there.
OF_SEARCH: dict[str, Change] = {
    "rows_of_the_first_request": ("x = logprobs[b, d, r]", "x = logprobs[0, d, r]"),
    "largest_ranks_first": ("return slot_ranks[x] < slot_ranks[y]", "return slot_ranks[x] > slot_ranks[y]"),
    "ranks_of_the_first_word_alone": ("while last > 0 and slot_ranks[x] == slot_ranks[y]:", "while False:"),
    "scores_not_compared": ("    if slot_score[x] != slot_score[y]:\n", "    if False:\n"),
    "lowest_score_first": ("return slot_score[x] > slot_score[y]", "return slot_score[x] < slot_score[y]"),
    "fields_of_one_bit_too_few": ("np.uint32(FIELD_BITS) * place", "np.uint32(1) * place"),
    "root_of_the_first_request": ("np.int32(root_tokens[b])", "np.int32(root_tokens[0])"),
    "token_0_for_padding": ("token if n < count else -1", "token if n < count else 0"),
    "score_0_for_padding": ("node_score[n] if n < count else NEG_INF", "node_score[n] if n < count else 0.0"),
    "input_ids_padded_with_-1": ("input_ids[b, n] = token", "input_ids[b, n] = token if n < count else -1"),
    "root_is_its_own_parent": ("np.int32(parent) if depth > 0 else -1", "np.int32(parent)"),
    "last_node_without_link": ("in range(1 + t, count, THREADS)", "in range(1 + t, count - 1, THREADS)"),
    "mask_without_the_node": ("            j = n\n", "            j = np.uint32((node_info[n] >> 48) & 0xFFFF)\n"),
    "mask_without_the_root": ("                if j == 0:\n", "                if j <= 1:\n"),
    "full_trees_alone_are_counted": ("num_nodes[b] = count", "num_nodes[b] = room"),
    "rest_of_the_row_from_the_first_request": (
        "np.float64(logprobs[b, depth - 1, rank])",
        "np.float64(logprobs[0, depth - 1, rank])",
    ),
}
OF_HEAP: dict[str, Change] = {
    "sibling_by_the_difference": (
        "score - logprob_of(rows, columns, logprobs, b, depth, rank) + logprob",
        "score + (logprob - logprob_of(rows, columns, logprobs, b, depth, rank))",
    ),
    "child_without_its_parents_score": ("slot_score[n] = score + logprob", "slot_score[n] = logprob"),
    "child_without_ranks": (
        "slot_ranks[w * slots + n] = slot_ranks[w * slots + slot]",
        "slot_ranks[w * slots + n] = 0",
    ),
    "sibling_with_the_same_rank": ("slot_ranks[word_of(depth) * slots + slot] += one_at(depth)", "pass"),
    "sibling_of_the_root": ("pack(parent, n, depth, at + 1)", "pack(parent, 0, depth, at + 1)"),
    "one_node_short": ("while n < room and size > 0:", "while n < room - 1 and size > 0:"),
    "sinks_to_the_left_alone": (
        "if child + 1 < size - 1 and stands_before(slot_score, slot_ranks, words, heap[child + 1], heap[child]):",
        "if False:",
    ),
    "does_not_sink": ("    while child < size - 1:\n", "    while False:\n"),
    "does_not_rise": ("    while at > 0 and stands_before(", "    while False and stands_before("),
}
# This module changes the most often: where its text has changed, change it here.
OF_FRONTIER: dict[str, Change] = {
    "sibling_by_the_difference": (
        "sibling = score - logprob + next_logprob",
        "sibling = score + (next_logprob - logprob)",
    ),
    "child_in_float32": ("child = score + first_logprob", "child = np.float64(np.float32(score + first_logprob))"),
    "minus_zero_below_zero": (
        "return ~bits + np.uint64(1) if bits > SIGN else bits | SIGN",
        "return ~bits if bits >= SIGN else bits | SIGN",
    ),
    "upper_halves_alone": ("tied = tied & (lower == greatest)", "tied = tied & (lower == lower)"),
    "upper_half_of_a_word_alone": ("half = np.uint32(word & HALF_MASK)", "half = np.uint32(0)"),
    "first_word_alone": ("        at = np.uint32(at + slots)\n", "        at = np.uint32(at)\n"),
    "sibling_of_the_root": (
        "pack(parent, n, depth, np.uint32(at + ONE))",
        "pack(parent, 0, depth, np.uint32(at + ONE))",
    ),
    "one_node_short": ("while n < room:", "while n < room - ONE:"),
    "sibling_keeps_the_score": ("slot_score[slot] = sibling\n", "slot_score[slot] = score\n"),
    "child_of_the_parent": ("slot_info[n] = pack(n, 0,", "slot_info[n] = pack(parent, 0,"),
    "upper_half_of_the_child_forgotten": ("slot_upper[n] = child_upper\n", "pass\n"),
}
OF_ROUNDS: dict[str, Change] = {
    "a_tie_is_taken_twice": ("x == last and v > last_id", "x == last and v >= last_id"),
    "ties_are_left_out": ("x < last or (x == last and v > last_id)", "x < last"),
    "highest_id_of_a_tie": ("ids[other] < ids[t]", "ids[other] > ids[t]"),
    "minus_infinity_is_no_logit": ("if behind and (x > best or best_id == NO_ID):", "if behind and x > best:"),
    "logit_beside_the_maximum": ("last - lse", "last - m"),
    "sum_of_half_the_threads": ("values[t] += values[t + width]", "values[t] += ZERO"),
    "refused_rows_have_token_0": ("token_ids[b, l, r] = -1", "token_ids[b, l, r] = 0"),
    "the_first_request_for_all": ("x = to_f32(logits[b, l, v])", "x = to_f32(logits[0, l, v])"),
}
OF_THRESHOLD: dict[str, Change] = {
    "threshold_too_high": ("if reached >= k:", "if reached >= k - 1:"),
    "what_is_at_the_threshold_is_left_out": ("if x >= limit:", "if x > limit:"),
    "highest_id_of_a_tie": ("np.uint64(~np.uint32(v))", "np.uint64(np.uint32(v))"),
    "sum_of_three_groups": ("(sum_0 + sum_1) + (sum_2 + sum_3)", "(sum_0 + sum_1) + sum_2"),
    "ids_of_another_group": (
        "sum_3 = visit(word_3, like, per, w + 3 * THREADS,",
        "sum_3 = visit(word_3, like, per, w + 2 * THREADS,",
    ),
    "smallest_first": ("rising = (i & run) != 0", "rising = (i & run) == 0"),
    "last_merge_left_out": ("while run <= size:", "while run < size:"),
    "minus_zero_below_zero": ("bits = f32_bits(x + ZERO)", "bits = f32_bits(x)"),
    "one_of_too_many_is_missing": (
        "if count_from(row, like, trial, counter) >= k:",
        "if count_from(row, like, trial, counter) >= k - 1:",
    ),
    "rows_with_nan_are_ranked": ("    if not is_finite(lse):\n", "    if False:\n"),
    "logit_beside_the_maximum": (
        "float_of(np.uint32(items[r] >> np.uint64(32))) - lse",
        "float_of(np.uint32(items[r] >> np.uint64(32))) - m",
    ),
    "first_element_of_a_word_for_all": (
        "found = item_of(element(word, e, like), w * per + e)",
        "found = item_of(element(word, 0, like), w * per + e)",
    ),
}

# Name of a mistake: what is changed, and the kernel that makes it.
TREE_MISTAKES: dict[str, tuple[ModuleType, Change, ModuleType]] = {
    **{f"search_{name}": (search, change, build_heap) for name, change in OF_SEARCH.items()},
    **{f"heap_{name}": (build_heap, change, build_heap) for name, change in OF_HEAP.items()},
    **{f"frontier_{name}": (build_frontier, change, build_frontier) for name, change in OF_FRONTIER.items()},
}
TOPK_MISTAKES: dict[str, tuple[ModuleType, Change, ModuleType]] = {
    **{f"rounds_{name}": (topk_rounds, change, topk_rounds) for name, change in OF_ROUNDS.items()},
    **{f"threshold_{name}": (topk_threshold, change, topk_threshold) for name, change in OF_THRESHOLD.items()},
}


def device_code(module: ModuleType) -> tuple[str, str, str]:
    """The module's source: what stands ahead of its device code, this, and what stands behind."""
    head, mark, rest = inspect.getsource(module).partition(DEVICE_CODE)
    assert mark, f"{DEVICE_CODE!r} is no longer in {module.__name__}"
    places = [rest.find(text) for text in ENDS]
    end = min((place for place in places if place >= 0), default=len(rest))
    return head, mark + rest[:end], rest[end:]


def _run(module: ModuleType, source: str) -> ModuleType:
    made = ModuleType(module.__name__)
    made.__file__ = module.__file__
    # Under its own name: dataclasses look their module up.
    present, sys.modules[module.__name__] = sys.modules[module.__name__], made
    try:
        exec(compile(source, str(module.__file__), "exec"), made.__dict__)
    finally:
        sys.modules[module.__name__] = present
    return made


def build(kernel: ModuleType, changed: ModuleType | None = None, change: Change | None = None) -> Any:
    """The kernel's module, run anew: with a change to itself, or to a module that it imports from."""
    if changed is None or change is None:
        return _run(kernel, inspect.getsource(kernel))
    head, code, tail = device_code(changed)
    old, new = change
    assert code.count(old) == 1, f"{old!r} occurs {code.count(old)} times in the device code of {changed.__name__}"
    made = _run(changed, head + code.replace(old, new) + tail)
    if changed is kernel:
        return made
    present, sys.modules[changed.__name__] = sys.modules[changed.__name__], made
    try:
        return _run(kernel, inspect.getsource(kernel))
    finally:
        sys.modules[changed.__name__] = present
