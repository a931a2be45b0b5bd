"""Kernels of accepting with one mistake each, which the tests must catch: see wrong_kernels.py and wrong_trees.py.

A mistake replaces text in the device code of one module. The kernel's module is then run anew from its source, with the
changed module in the place of the one that it imports. Text that is not there exactly once raises.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType

from wrong_trees import Change, _run

from ddtree_numba.accept import accepted, argmax_tokens, greedy, sampled, sglang
from ddtree_numba.device import philox

# Where the device code of a module begins and ends.
PARTS: dict[ModuleType, tuple[str, str]] = {
    accepted: ("\ndef mirror_child_with(", "\nchild_with, stops, take = "),
    argmax_tokens: ("\n@cuda.jit", "\ndef arguments("),
    greedy: ("\n@cuda.jit", "\ndef accept_greedy("),
    sampled: ("\n@cuda.jit", "\ndef accept_sampled("),
    sglang: ("\n@cuda.jit", "\ndef verify_tree_greedy("),
    philox: ("\n@cuda.jit", "\ndef mirror_random_bits("),
}

# The walk's step. Both walks take it; here the greedy one is caught.
OF_STEP: dict[str, Change] = {
    "token_0_is_padding": ("if token == t:", "if token == t and t != 0:"),
    "the_first_child_from_the_token_on": ("if token == t:", "if token >= t:"),
    "first_child_alone": ("        child = sibling\n", "        child = -1\n"),
    "a_broken_link_is_an_end": ("return -1 if child == -1 else -2", "return -1"),
    "an_end_is_a_broken_link": ("return -1 if child == -1 else -2", "return -2"),
    "nodes_behind_the_last_are_children": ("child < n:", "child < tokens.shape[0]:"),
    "first_stop_token_is_none": ("for s in range(stop_tokens.shape[0]):", "for s in range(1, stop_tokens.shape[0]):"),
    "goes_on_behind_a_stop_token": (
        "        seen |= STOPPED\n        child = -1\n",
        "        seen |= STOPPED\n",
    ),
    "no_room_for_the_deepest_node": ("if count == nodes.shape[0]:", "if count + 1 == nodes.shape[0]:"),
    "bonus_token_is_not_emitted": ("emitted[count - 1] = t", "emitted[count - 1] = t if child >= 0 else NO_TOKEN"),
    "an_accepted_token_is_a_bonus_token": ("    else:\n        bonus = t\n", "    bonus = t\n"),
    "negative_targets_are_tokens": ("if t < 0 or t > LARGEST_TOKEN:", "if t > LARGEST_TOKEN:"),
    "the_largest_token_is_none": ("if t < 0 or t > LARGEST_TOKEN:", "if t < 0 or t >= LARGEST_TOKEN:"),
    "broken_links_are_not_flagged": ("    if child == -2:\n        seen |= BAD_LINK\n", ""),
}
OF_GREEDY: dict[str, Change] = {
    "links_of_the_first_request": ("tokens[b, i], first_child[b, i],", "tokens[b, i], first_child[0, i],"),
    "siblings_for_children": ("staged[room + i] = child", "staged[room + i] = sibling"),
    "targets_cut_to_31_bits": (
        "np.int32(t) if 0 <= t <= LARGEST_TOKEN else NO_TOKEN",
        "np.int32(t & LARGEST_TOKEN)",
    ),
    "target_of_the_root_everywhere": ("target_tokens[b, i]\n", "target_tokens[b, 0]\n"),
    "all_slots_are_live": ("n = min(num_nodes[b], room)", "n = room"),
    "broken_links_are_ends": ("child = steps[cur] >> 1", "child = max(steps[cur] >> 1, -1)"),
    "nothing_stops_small_trees": ("stopping = (steps[cur] & 1) == 1", "stopping = False"),
    "nothing_stops_large_trees": ("stopping = stops(stop_tokens[b], target)", "stopping = False"),
    "stop_tokens_of_the_first_request": ("as_token(stop_tokens[b, i])", "as_token(stop_tokens[0, i])"),
    "large_trees_read_the_links_of_the_first_request": (
        "child_with(tokens[b], first_child[b],",
        "child_with(tokens[b], first_child[0],",
    ),
    "a_place_behind_the_path_is_kept": ("        if i >= ends[0]:\n", "        if i > ends[0]:\n"),
    "a_place_behind_the_tokens_is_kept": ("ends[1] = count if bonus >= 0 else max(count - 1, 0)", "ends[1] = count"),
    "root_not_counted": ("num_accepted[b] = count", "num_accepted[b] = count - 1"),
}
OF_ARGMAX: dict[str, Change] = {
    "highest_id_of_a_group": ("    e = per - 1\n    while e >= 0:\n", "    e = per - 1\n    while e >= per - 1:\n"),
    "last_group_with_the_largest": (
        "        if not of_group <= largest:\n            first = w\n",
        "        if not of_group < largest:\n            first = w\n",
    ),
    "last_group_with_the_largest_in_the_tail": (
        "        if not of_group <= largest:\n            first = last\n",
        "        if not of_group < largest:\n            first = last\n",
    ),
    "nan_is_a_token": ("ids[0] if m == m else NO_TOKEN", "ids[0]"),
    "nan_is_overlooked": (
        "largest = max_nan(largest, element(word, e, like))",
        "largest = max(largest, element(word, e, like))",
    ),
    "last_word_forgotten": (
        "    while w < num_words:\n        of_group",
        "    while w < num_words - 1:\n        of_group",
    ),
    "first_element_of_a_word_alone": (
        "largest = max_nan(largest, element(word, e, like))",
        "largest = max_nan(largest, element(word, 0, like))",
    ),
    "seven_words_of_eight": (
        "max_words(max_words(word_4, word_5, like), max_words(word_6, word_7, like), like),",
        "max_words(word_4, max_words(word_6, word_7, like), like),",
    ),
    "logits_of_the_first_request": ("row = words[b, i]", "row = words[0, i]"),
    "lowest_thread_with_the_largest": (
        "            ids[t] = min(ids[t], ids[t + width])\n",
        "            ids[t] = ids[t] if ids[t] < LARGEST_ID else ids[t + width]\n",
    ),
}
OF_SAMPLED: dict[str, Change] = {
    "a_token_without_weight": ("        while reached <= target:\n", "        while reached < target:\n"),
    "weights_of_24_bits": ("f32_to_u64(p * SCALE)", "f32_to_u64(p * np.float32(2.0**24))"),
    "nan_is_a_probability": ("f32_bits(element(word, e, like) + ZERO)", "f32_bits(max(element(word, e, like), ZERO))"),
    "minus_zero_is_none": ("f32_bits(element(word, e, like) + ZERO)", "f32_bits(element(word, e, like))"),
    "one_is_no_probability": ("worst > ONE_BITS", "worst >= ONE_BITS"),
    "rows_are_not_refused": ("if refused or total == 0:", "if total == 0:"),
    "law_of_the_root_everywhere": ("sample(words[b, cur], like,", "sample(words[b, 0], like,"),
    "law_of_the_first_request": ("sample(words[b, cur], like,", "sample(words[0, cur], like,"),
    "uniform_of_the_root_everywhere": ("u = uniforms[b, cur]", "u = uniforms[b, 0]"),
    "one_wraps_to_zero": ("    if x >= 1.0:\n        return LARGEST_DRAW\n", ""),
    "uniforms_of_32_bits": (
        "return (high << np.uint64(32)) | np.uint64((x * TWO_32 - np.float64(high)) * TWO_32)",
        "return high << np.uint64(32)",
    ),
    "seed_of_the_first_request": ("np.uint64(seeds[b])", "np.uint64(seeds[0])"),
    "position_of_the_root_everywhere": ("position += step[2] - 1", "position += 0"),
    "position_one_too_far": ("position += step[2] - 1", "position += step[2]"),
    "depth_on_top_of_a_nodes_position": ("if source == BY_DEPTH:", "if True:"),
    "last_words_of_a_segment_forgotten": (
        "    while w < end:\n        mass += mass_of(row[w], like, per)\n        worst",
        "    while w < end - 1:\n        mass += mass_of(row[w], like, per)\n        worst",
    ),
    "first_element_of_a_word_alone_is_checked": (
        "f32_bits(element(word, e, like) + ZERO)",
        "f32_bits(element(word, 0, like) + ZERO)",
    ),
    "segment_before_forgotten": ("before = values[t - LANES]", "before = np.uint64(0)"),
    "first_element_of_the_word_is_the_token": ("found[1] = w * per + e", "found[1] = w * per"),
}
OF_PHILOX: dict[str, Change] = {
    "nine_rounds": ("for _ in range(ROUNDS):", "for _ in range(ROUNDS - 1):"),
    "upper_half_of_the_counter_is_0": (
        "counter & WORD, counter >> HALF, np.uint64(0), np.uint64(0)",
        "counter & WORD, np.uint64(0), np.uint64(0), np.uint64(0)",
    ),
    "upper_half_of_the_key_is_0": ("k_0, k_1 = key & WORD, key >> HALF", "k_0, k_1 = key & WORD, np.uint64(0)"),
    "words_swapped": ("return (c_0 << HALF) | c_1", "return (c_1 << HALF) | c_0"),
    "key_not_raised": ("(k_0 + WEYL_0) & WORD", "k_0"),
}
OF_SGLANG: dict[str, Change] = {
    "children_for_siblings": (
        "cur = np.int64(retrive_next_sibling[b, cur])",
        "cur = np.int64(retrive_next_token[b, cur])",
    ),
    "local_indices": ("            last = place\n", "            last = b * num_nodes + cur\n"),
    "root_counted": ("    accept_token_num[b] = count\n", "    accept_token_num[b] = count + 1\n"),
    "no_bonus_token": (
        "    accept_token_num[b] = count\n    predicts[last] = target\n",
        "    accept_token_num[b] = count\n",
    ),
    "tokens_at_their_own_nodes": (
        "            predicts[last] = target\n            count += 1\n            last = place\n",
        "            count += 1\n            last = place\n            predicts[last] = target\n",
    ),
    "targets_by_local_index": (
        "            target = target_predict[last // num_nodes, last % num_nodes]\n            cur",
        "            target = target_predict[b, cur]\n            cur",
    ),
    "one_column_less": ("count + 1 < accept_index.shape[1]", "count + 2 < accept_index.shape[1]"),
    "one_visit_less": ("visits < num_nodes and", "visits < num_nodes - 1 and"),
    "root_is_not_written": ("    accept_index[b, 0] = last\n", ""),
    "a_place_outside_is_skipped": ("            break\n", "            cur = np.int64(retrive_next_sibling[b, cur])\n"),
}

# Name of a mistake: what is changed. The kernel is that of the operator.
GREEDY_MISTAKES: dict[str, tuple[ModuleType, Change]] = {
    **{f"step_{name}": (accepted, change) for name, change in OF_STEP.items()},
    **{f"greedy_{name}": (greedy, change) for name, change in OF_GREEDY.items()},
}
ARGMAX_MISTAKES: dict[str, tuple[ModuleType, Change]] = {
    name: (argmax_tokens, change) for name, change in OF_ARGMAX.items()
}
SAMPLED_MISTAKES: dict[str, tuple[ModuleType, Change]] = {
    **{f"sampled_{name}": (sampled, change) for name, change in OF_SAMPLED.items()},
    **{f"philox_{name}": (philox, change) for name, change in OF_PHILOX.items()},
}
SGLANG_MISTAKES: dict[str, tuple[ModuleType, Change]] = {name: (sglang, change) for name, change in OF_SGLANG.items()}


def device_code(module: ModuleType) -> tuple[str, str, str]:
    """The module's source: what stands ahead of its device code, this, and what stands behind."""
    source = inspect.getsource(module)
    start, end = (source.index(text) for text in PARTS[module])
    return source[:start], source[start:end], source[end:]


def build(kernel: ModuleType, module: ModuleType | None = None, change: Change | None = None) -> ModuleType:
    """The kernel's module, run anew: with a change to itself, or to a module that it imports from."""
    if module is None or change is None:
        return _run(kernel, inspect.getsource(kernel))
    head, code, tail = device_code(module)
    old, new = change
    assert code.count(old) == 1, f"{old!r} occurs {code.count(old)} times in the device code of {module.__name__}"
    made = _run(module, head + code.replace(old, new) + tail)
    if module is kernel:
        return made
    present, sys.modules[module.__name__] = sys.modules[module.__name__], made
    try:
        return _run(kernel, inspect.getsource(kernel))
    finally:
        sys.modules[module.__name__] = present
