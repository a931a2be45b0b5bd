"""Kernels of mma with one mistake each, which the tests must catch: see wrong_flash.py.

Text is replaced behind the mirror, and the module run anew from its source, with shorter and fewer rows and half the
warps. Text that is not there exactly once raises.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, NamedTuple

from cases import Case

from ddtree_numba.attention import mma

DEVICE_CODE = "@functools.cache\ndef make_kernel"  # ends the mirror

Change = tuple[str, str]

SMALLER: tuple[Change, ...] = (
    ("R, P = 512, 64", "R, P = 128, 64"),
    ("WARPS = 8", "WARPS = 4"),
    ("SMALL = Tiles(rows=32,", "SMALL = Tiles(rows=16,"),
)


class Trap(NamedTuple):
    """A problem, and how its keys are split."""

    case: Case
    options: dict[str, Any] = {}


NARROW: dict[str, Any] = {"R": 128, "P": 64, "dtype": "bfloat16"}

# In the simulator a tile has 16 rows and 16 keys here, and the even parts of all work go to three blocks.
TRAPS = {
    # One tile of each kind, and the same for a node that sees nothing, beside others.
    "whole": Trap(Case("mma_whole", (2,), Q=3, **NARROW), {"num_splits": 1}),
    "empty": Trap(Case("mma_empty", (0,), Q=3, padded=1, **NARROW), {"num_splits": 1}),
    # Two row tiles, three columns of heads, three key tiles, scores so far apart that references move.
    "rows": Trap(Case("mma_rows", (39,), Q=6, H=3, logit_std=12.0, **NARROW), {"num_splits": 1}),
    # Requests of one, two and one key tiles on three blocks: the last one has a request and a half.
    "ragged": Trap(Case("mma_ragged", (9, 20, 3), Q=5, H=2, page_size=8, **NARROW)),
    # Two row tiles of three key tiles on three blocks: the second one has an end and a beginning.
    "shared": Trap(Case("mma_shared", (40,), Q=3, H=6, **NARROW)),
    # Two key tiles in three parts: the first has none.
    "parts": Trap(Case("mma_parts", (20,), Q=2, **NARROW), {"num_splits": 3}),
}

NEXT_TILE = (
    "commit_copies()\n\n                # Phase 2: scores",
    "commit_copies()\n                cuda.syncthreads()\n\n                # Phase 2: scores",
)
COPIES_ARE_THERE = ("cuda.syncthreads()  # gpu: all threads' copies are there", "pass  #")

MISTAKES: dict[str, dict[str, tuple[Change, ...]]] = {
    "whole": {
        "scale_forgotten": (("            s *= scale_log2\n", ""),),
        "rope_part_from_the_latent": (("q_pe[b, i, h], c - R, size", "q_nope[b, i, h], c - R, size"),),
        "queries_in_the_wrong_matrices": (
            ("(lane & 15)) * PITCH + (lane >> 4) * 4 +", "(lane & 15)) * PITCH + (lane >> 3 & 1) * 4 +"),
        ),
        "keys_in_the_wrong_matrices": (("key + (lane & 7) + (lane >> 4) * 8", "key + (lane & 15)"),),
        "values_not_transposed": (("load_matrices_transposed(words, v_at", "load_matrices(words, v_at"),),
        "values_in_the_wrong_matrices": (
            ("warp * (R // WARPS // 2) + (lane >> 4) * 4", "warp * (R // WARPS // 2) + (lane >> 3 & 1) * 4"),
        ),
        "one_share_of_the_columns": (("for share in range(1, SHARES):", "for share in range(1, 1):"),),
        "shares_of_different_columns": (
            ("(lane >> 3 & 1) * 4 + share * STEPS * 8)", "(lane >> 3 & 1) * 4 + (share ^ 1) * STEPS * 8)"),
        ),
        "keys_behind_the_last_not_cleared": (
            ("if key >= stop:", "if key > stop + 99:"),
            ("min(key, stop - 1), kv_cache", "key, kv_cache"),
        ),
        "mask_left_out": (("    if masked and not visible(", "    if False and not visible("),),
        "mask_transposed": (("min(i, num_nodes - 1), j)", "j, min(i, num_nodes - 1))"),),
        "maximum_of_one_lane": (("m = max(m, shuffle_xor(m, np.int32(other)))", "shuffle_xor(m, np.int32(other))"),),
        "lse_of_one_lane": (("l += shuffle_xor(l", "shuffle_xor(l"),),
        "sum_of_one_lane": (("w += shuffle_xor(w", "shuffle_xor(w"),),
        "pairs_of_weights_swapped": (("pack_pair(low, high, like)", "pack_pair(high, low, like)"),),
        "output_not_divided": (("quotient(scores[r * OUT_PITCH + d], w, share)", "scores[r * OUT_PITCH + d]"),),
        "lse_without_reference": (("log_sum(scores[REF + r] * LN_2,", "log_sum(ZERO,"),),
        "reference_in_bits": (("log_sum(scores[REF + r] * LN_2,", "log_sum(scores[REF + r],"),),
        "copies_not_waited_for": (("wait_copies(0)", "wait_copies(1)"),),
    },
    "empty": {
        "root_seen_by_all": (("if j < 0:\n            return True", "if j <= 0:\n            return True"),),
        "empty_row_not_zero": (
            ("value = ZERO\n                if w != ZERO:", "value = ONE\n                if w != ZERO:"),
        ),
        "nothing_seen_is_no_number": (("if moved == NEG_INF:", "if moved == ONE:"),),
    },
    "rows": {
        "query_heads_first": (
            ("i, h = node_and_head(min(row,", "h, i = node_and_head(min(row,"),
            ("num_rows - 1), num_heads)\n", "num_rows - 1), q_nope.shape[1])\n"),
        ),
        "result_heads_first": (
            ("i, h = node_and_head(numbers[ROW] + r, num_heads)", "h, i = node_and_head(numbers[ROW] + r, 6)"),
        ),
        "mask_only_behind_the_prefix": (("masked = (tile + 1) * N >", "masked = tile * N >"),),
        "accumulators_not_scaled": (("scale_rows(acc, factors, ROW_TILES, COLUMN_TILES)", "pass"),),
        "factors_of_the_first_rows": (("scores[SCALE + (lane >> 2) + 8 * n]", "scores[SCALE + (lane >> 2)]"),),
        "sum_of_lse_not_scaled": (("scores[L_I + row] * scale + l", "scores[L_I + row] + l"),),
        "sum_of_weights_not_scaled": (("scores[W_I + row] * scale + w", "scores[W_I + row] + w"),),
        "reference_not_kept": (("scores[REF + row] = moved\n", "pass\n"),),
        "one_room_for_all_key_tiles": (("((tile & 1) * N + r) * PITCH", "r * PITCH"),),
        "values_of_the_other_room": (("v_row = (tile & 1) * N", "v_row = (tile + 1 & 1) * N"),),
        "no_barrier_behind_the_copies": (COPIES_ARE_THERE,),
        "next_tile_sent_for_too_early": (COPIES_ARE_THERE, NEXT_TILE),
        "no_barrier_behind_the_scores": (
            ("s, a, b_words, q_nope)\n                cuda.syncthreads()\n", "s, a, b_words, q_nope)\n"),
        ),
        "no_barrier_behind_the_weights": (
            ("num_heads, q_nope)\n                cuda.syncthreads()\n", "num_heads, q_nope)\n"),
        ),
        "weights_in_the_wrong_matrices": (
            ("(lane & 15) * S_PITCH + (lane >> 4) * 4", "(lane & 7) * S_PITCH + (lane >> 4) * 4"),
        ),
        "result_over_tiles_in_use": (("cuda.syncthreads()  # gpu: nobody reads the tiles any more", "pass"),),
    },
    "ragged": {
        "table_of_the_first_request": (("locate(block_table, numbers[REQUEST],", "locate(block_table, 0,"),),
        "page_and_slot_swapped": (("row = kv_cache[page, slot]", "row = kv_cache[slot, page]"),),
        "queries_of_the_first_request": (("q_nope[b, i, h], c, size", "q_nope[0, i, h], c, size"),),
        "rope_part_of_the_first_head": (("q_pe[b, i, h], c - R, size", "q_pe[b, i, 0], c - R, size"),),
        "mask_of_the_first_request": (("bits_per_word, numbers[REQUEST], min(i,", "bits_per_word, 0, min(i,"),),
        "next_request_left_out": (("numbers[REQUEST] += 1\n", "pass\n"),),
    },
    "shared": {
        "mask_rows_of_the_first_tile": (
            ("i, _ = node_and_head(numbers[ROW] + row, num_heads)", "i, _ = node_and_head(row, num_heads)"),
        ),
        "second_state_over_the_first": (("block += block + (first == 0)", "block += block"),),
        "row_tiles_do_not_move_on": (("numbers[ROW] += M\n", "numbers[ROW] += 0\n"),),
        "next_row_tile_begins_late": (("numbers[FIRST] = 0\n", "numbers[FIRST] = 1\n"),),
        "state_without_its_sum": (("share = l * reciprocal(", "share = reciprocal("),),
        "state_in_bits": (("= scores[REF + r] * LN_2\n", "= scores[REF + r]\n"),),
    },
    "parts": {
        "empty_part_leaves_no_state": (("if left == 0:", "if left < 0:"),),
    },
}


def build(*changes: Change) -> ModuleType:
    """The module mma for narrow rows, with changed device code."""
    head, mark, device_code = inspect.getsource(mma).partition(DEVICE_CODE)
    assert mark, "mma no longer reads as expected"
    for old, new in SMALLER:
        assert head.count(old) == 1, f"{old!r} occurs {head.count(old)} times ahead of the device code"
        head = head.replace(old, new)
    for old, new in changes:
        assert device_code.count(old) == 1, f"{old!r} occurs {device_code.count(old)} times in the device code"
        device_code = device_code.replace(old, new)
    module = ModuleType("mma_changed")
    exec(compile(head + mark + device_code, mma.__file__, "exec"), module.__dict__)
    return module
