"""Kernels of three_phase with one mistake each, made by replacing text in its source: the tests must catch them all.

`build` runs the changed source as a module of its own. Only the device code behind the mirror is changed, and a text
that is no longer there raises, so that a mistake cannot quietly stop being one.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ddtree_numba.attention import three_phase

DEVICE_CODE = "@cuda.jit(device=True"  # the first one ends the mirror

Change = tuple[str, str]

MISTAKES: dict[str, Change] = {
    "last_key_left_out": ("num_keys = prefix + num_nodes", "num_keys = prefix + num_nodes - 1"),
    "prefix_one_short": ("prefix = min(max(cache_seqlens[b], 0)", "prefix = min(max(cache_seqlens[b] - 1, 0)"),
    "root_seen_by_all": ("if key < prefix or sees(", "if key <= prefix or sees("),
    "mask_transposed": ("b, i, key - prefix)", "b, key - prefix, i)"),
    "mask_of_first_request": ("word = tree_mask[b, i,", "word = tree_mask[0, i,"),
    "mask_bits_reversed": ("return (word >> (np", "return (word >> (np.uint32(bits_per_word) - np.uint32(1) - np"),
    "odd_terms_left_out": (
        "partial[(key - first) * PITCH + lane] = s + s_odd",
        "partial[(key - first) * PITCH + lane] = s",
    ),
    "odd_lanes_left_out": ("scores[key] = (s + s_odd) * sm_scale", "scores[key] = s * sm_scale"),
    "scale_forgotten": ("(s + s_odd) * sm_scale", "s + s_odd"),
    "first_head_for_all": ("to_f32(q_nope[b, i, h, c])", "to_f32(q_nope[b, i, 0, c])"),
    "rope_part_of_first_node": ("to_f32(q_pe[b, i, h, c])", "to_f32(q_pe[b, 0, h, c])"),
    "rope_part_left_out": (
        "while c < head_dim - lane:",
        "while c < kv_lora_rank - lane:",
    ),
    "page_and_slot_swapped_in_scores": ("row = kv_cache[page, slot, lane:]", "row = kv_cache[slot, page, lane:]"),
    "page_and_slot_swapped_in_output": ("to_f32(kv_cache[page, slot, d])", "to_f32(kv_cache[slot, page, d])"),
    "run_from_the_page_start": ("kv_cache[page, slot : slot + run, d]", "kv_cache[page, 0:run, d]"),
    "table_of_first_request": ("page = block_table[b,", "page = block_table[0,"),
    "max_for_sum": ("l_i = block_sum(partial, l_i)", "l_i = block_max(partial, l_i)"),
    "sum_not_divided": ("scores[key] /= l_i", "scores[key] /= ZERO + np.float32(1.0)"),
    "last_chunk_left_out": ("acc += mid + chunk", "acc += mid"),
    "last_group_left_out": ("acc += mid + chunk", "acc += chunk"),
    "lse_without_max": ("lse[b, i, h] = m_i + math.log(l_i)", "lse[b, i, h] = math.log(l_i)"),
    "lse_in_bits": ("m_i + math.log(l_i)", "(m_i + math.log(l_i)) / math.log(2.0)"),
    "empty_row_not_written": ("            out[b, i, h, d] = from_f32(ZERO, out)\n", "            pass\n"),
}

# A race shows only when threads run in an unlucky order. So one thread holds at a place where a barrier should protect
# it, until the block's others have gone on to their next barrier. Changes are made in order: hold, then the barrier's
# removal.
RACES: dict[str, tuple[Change, Change]] = {
    # Lane 5 of the rotary part is written late: whoever reads it without waiting has a wrong score.
    "query_row": (
        (
            "    for c in range(t, head_dim - kv_lora_rank, THREADS):\n",
            "    if t == 5:\n        hold()\n    for c in range(t, head_dim - kv_lora_rank, THREADS):\n",
        ),
        ("    cuda.syncthreads()  # gpu: phase 1 reads the whole row\n", ""),
    ),
    # Lane 5 delivers its part of key 0 late: who adds up without waiting lacks it.
    "partial_sums": (
        (
            "            partial[(key - first) * PITCH + lane] = s + s_odd\n",
            "            if lane == 5 and key == 0:\n                hold()\n"
            "            partial[(key - first) * PITCH + lane] = s + s_odd\n",
        ),
        ("        cuda.syncthreads()  # gpu: the partial sums of this pass are complete\n", ""),
    ),
    # Thread 5 adds up key 5 late: who starts the next pass without waiting overwrites the parts.
    "next_pass": (
        (
            "        for key in range(first + t, stop, THREADS):\n            s = ZERO\n",
            "        for key in range(first + t, stop, THREADS):\n            s = ZERO\n"
            "            if key == 5:\n                hold()\n",
        ),
        ("        cuda.syncthreads()  # gpu: the next pass overwrites partial\n", ""),
    ),
    # Thread 5 divides the weight of key 5 late: who adds up rows without waiting takes it undivided.
    "weights": (
        ("        scores[key] /= l_i\n", "        if key == 5:\n            hold()\n        scores[key] /= l_i\n"),
        ("    cuda.syncthreads()  # gpu: phase 3 reads all weights\n", ""),
    ),
    # Thread 5 fetches the maximum late: who goes on to the sum without waiting overwrites it.
    "maximum": (
        (
            "            partial[t] = max(partial[t], partial[t + width])\n        cuda.syncthreads()\n"
            "        width //= 2\n    result = partial[0]\n",
            "            partial[t] = max(partial[t], partial[t + width])\n        cuda.syncthreads()\n"
            "        width //= 2\n    if t == 5:\n        hold()\n    result = partial[0]  # held\n",
        ),
        ("    result = partial[0]  # held\n    cuda.syncthreads()\n", "    result = partial[0]\n"),
    ),
}


def build(*changes: Change, **names: Any) -> ModuleType:
    """The module three_phase with changed device code; ``names`` are put among its globals."""
    source = inspect.getsource(three_phase)
    head, mark, device_code = source.partition(DEVICE_CODE)
    assert mark, f"{DEVICE_CODE!r} is no longer in three_phase"
    for old, new in changes:
        assert device_code.count(old) == 1, f"{old!r} occurs {device_code.count(old)} times in the device code"
        device_code = device_code.replace(old, new)
    module = ModuleType("three_phase_changed")
    module.__dict__.update(names)
    exec(compile(head + mark + device_code, three_phase.__file__, "exec"), module.__dict__)
    return module


def build_race(name: str, *, with_barrier: bool) -> ModuleType:
    """A kernel of `RACES` in which one thread is late, with or without the barrier that protects it."""
    from ddtree_numba.device.simulator import let_others_go_first

    hold, removal = RACES[name]
    return build(hold, *([] if with_barrier else [removal]), hold=let_others_go_first)
