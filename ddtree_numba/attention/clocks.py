"""Where the clocked kernel of variant `wgmma` looks at its clocks, and where it leaves what it saw.

``wgmma.make_kernel(..., clocked=True)`` is for profiling/trace_wgmma.py alone. One thread of each consumer warpgroup
writes two clocks at each place below, cycles of its multiprocessor and nanoseconds, for the first `PAIRS` pairs of key
tiles of a block's first piece. What is left: int64 [blocks, 2 warpgroups, PAIRS, EVENTS, WORDS].
"""

from __future__ import annotations

PAIRS = 16  # a power of two
EVENTS = 7
WORDS = 2
CYCLES, NANOSECONDS = 0, 1

# Of warpgroup 0 in a pair, in the order in which they happen. What begins is about to be issued; what is done has
# been waited for.
SCORES_A, WEIGHTS_A, PV_A_LEFT, PV_A_LEFT_DONE, P_B_THERE, PV_B_LEFT_DONE = range(6)
# Of warpgroup 1.
QK_B, QK_B_DONE, MAXIMA_B, P_A_THERE, WEIGHTS_B, PV_A_RIGHT_DONE, PV_B_RIGHT_DONE = range(7)

NAMES = (
    ("SCORES_A", "WEIGHTS_A", "PV_A_LEFT", "PV_A_LEFT_DONE", "P_B_THERE", "PV_B_LEFT_DONE"),
    ("QK_B", "QK_B_DONE", "MAXIMA_B", "P_A_THERE", "WEIGHTS_B", "PV_A_RIGHT_DONE", "PV_B_RIGHT_DONE"),
)


def words(blocks: int) -> int:
    """int64 that a clocked kernel of so many blocks leaves."""
    return blocks * 2 * PAIRS * EVENTS * WORDS
