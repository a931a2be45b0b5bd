"""Which block of the wgmma variant takes which key tiles, from lengths that only the device knows.

Work is a rectangle for each request: its row tiles (64 rows of nodes and heads) by its key tiles (64 keys). A *piece* is
a row tile and a run of key tiles of one request; a block takes its pieces one after the other. A row tile whose keys are
one piece is *whole*: its block writes results. The pieces of the others leave states, in slots, that `combine` merges.

The key tiles of all requests stand one behind the other on a line of ``length`` tiles; each of the R row tiles has such
a line. The G blocks take equal shares of the R lines, of ``share`` tiles each:

::

    row tile 0  | block 0   | block 3   | block 6 .. |      R = 3 lines, G = 8 blocks: two teams of three blocks, which
    row tile 1  | block 1   | block 4   | .. 6, 7 .. |      take the same share of the three lines, so that a key comes
    row tile 2  | block 2   | block 5   | .. 7       |      from memory once and from L2 R - 1 times; what is left
                0           share       cut      length     behind the teams is counted line by line

Where all row tiles together are no more than blocks, requests may be cut into even runs instead, each for a block of its
own: no block then begins a second piece. The cheaper one by `TILE`, `PIECE` and `MERGE` is taken. All follows from the lengths
alone, so the same lengths give the same pieces, and the same bits.

The functions are compiled into the kernels and are plain Python at the same time.
"""

from __future__ import annotations

TILE_ROWS = TILE_KEYS = 64
TILE, PIECE, MERGE = 1450, 4500, 4000  # nanoseconds on an H200: a key tile, a piece beside its tiles, merging


def key_tiles(length, num_nodes, max_seqlen):
    """Key tiles of a request: those of its prefix, clamped, and of its nodes' rows."""
    return (min(max(length, 0), max_seqlen) + num_nodes + 63) >> 6


def share_of(length, row_tiles, blocks):
    """Tiles of a block."""
    return (length * row_tiles + blocks - 1) // blocks


def cut_of(length, share, row_tiles, blocks):
    """Where the teams' part of the line ends."""
    return min(blocks // row_tiles, length // share) * share


def count_of(row_tile, at, length, share, cut, row_tiles):
    """The number of a place, row tile and position on the line, in the order in which blocks take shares."""
    if at < cut:
        return (at // share * row_tiles + row_tile) * share + at % share
    return cut * row_tiles + row_tile * (length - cut) + at - cut


def end_of(count, at, end, share, cut):
    """Where the piece ends that begins at a place of this number, ``end`` being its request's."""
    end = min(end, at + share - count % share)
    return min(end, cut) if at < cut else end


def slot_of(count, at, begin, share, cut, row_tile, blocks):
    """Where the piece leaves its state that begins at a place of this number; no two of a problem have the same one.

    A block has one piece that begins its share, and one that is cut by the share's end. Pieces that begin where the
    teams' part ends are one for each row tile.
    """
    if count % share == 0:
        return count // share * 2
    if at == cut and at > begin:
        return blocks * 2 + row_tile
    return count // share * 2 + 1


def even_run(row_tiles, blocks, longest, total_runs):
    """Key tiles of a run in mode even, the fewest of which all requests together have no more runs than blocks.

    ``total_runs(run)``: runs of all requests, of so many tiles.
    """
    low, high = 1, longest
    while low < high:
        middle = (low + high) // 2
        if total_runs(middle) * row_tiles <= blocks:
            high = middle
        else:
            low = middle + 1
    return low


def slots(row_tiles, blocks):
    """How many states there may be."""
    return 2 * blocks + (row_tiles if row_tiles <= blocks else 0)
