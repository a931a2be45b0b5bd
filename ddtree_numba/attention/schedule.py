"""Which block of the wgmma variant takes which key tiles, from lengths that only the device knows.

Work is a rectangle for each request: its row tiles (64 rows of nodes and heads) by its key tiles (64 keys). A *piece*
is a row tile and a run of key tiles of one request; a block takes its pieces one after the other. A row tile whose keys
are one piece is *whole*: its block writes results. The pieces of the others leave states, in slots, that `combine`
merges.

The key tiles of all requests stand one behind the other on a line of ``length`` tiles; each of the R row tiles has such
a line. The G blocks take equal shares of the R lines, of ``share`` tiles each:

::

    row tile 0  | block 0   | block 3   | block 6 .. |      R = 3 lines, G = 8 blocks: two teams of three blocks, which
    row tile 1  | block 1   | block 4   | .. 6, 7 .. |      take the same share of the three lines, so that a key comes
    row tile 2  | block 2   | block 5   | .. 7       |      from memory once and from L2 R - 1 times; what is left
                0           share       cut      length     behind the teams is counted line by line

Where all row tiles together are no more than blocks, requests may be cut into even runs instead, each for a block of
its own: no block then begins a second piece. The cheaper one by `TILE`, `PIECE` and `MERGE` is taken. All follows from
the lengths alone, so the same lengths give the same pieces, and the same bits.
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.device import runtime

TILE_KEYS = 64
TILE, PIECE, MERGE = 1450, 4500, 4000  # nanoseconds on an H200: a key tile, a piece beside its tiles, merging

_device = cuda.jit(device=True, inline="always")


@_device
def over(a, b):
    """a // b of numbers from 0 to 2**31 - 1: in 32 bits, and without the call that a signed division takes."""
    return types.int32(types.uint32(a) // types.uint32(b))


@_device
def key_tiles(length, num_nodes, max_seqlen):
    """Key tiles of a request: those of its prefix, clamped, and of its nodes' rows."""
    return (min(max(length, 0), max_seqlen) + num_nodes + 63) >> 6


@_device
def share_of(length, row_tiles, blocks):
    """Tiles of a block."""
    return over(length * row_tiles + blocks - 1, blocks)


@_device
def cut_of(length, share, row_tiles, blocks):
    """Where the teams' part of the line ends."""
    return min(over(blocks, row_tiles), over(length, share)) * share


@_device
def count_of(row_tile, at, length, share, cut, row_tiles):
    """The number of a place, row tile and position on the line, in the order in which blocks take shares."""
    if at < cut:
        team = over(at, share)
        return (team * (row_tiles - 1) + row_tile) * share + at
    return cut * row_tiles + row_tile * (length - cut) + at - cut


@_device
def slot_of(count, at, begin, share, cut, row_tile, blocks):
    """Where the piece leaves its state that begins at a place of this number; no two of a problem have the same one.

    A block has one piece that begins its share, and one that is cut by the share's end. Pieces that begin where the
    teams' part ends are one for each row tile.
    """
    block = over(count, share)
    if count == block * share:
        return block * 2
    if at == cut and at > begin:
        return blocks * 2 + row_tile
    return block * 2 + 1


@_device
def in_teams(begin, end, share, cut):
    """How many pieces a request's run has behind its first up to, and with, the one that begins at the cut."""
    if begin >= cut:
        return 0
    found = over(min(end, cut) - 1, share) - over(begin, share)
    return found + 1 if end > cut else found


@_device
def pieces_of(row_tile, begin, end, length, share, cut, row_tiles):
    """How many pieces the run of a request on a row tile's line is cut into."""
    found = 1 + in_teams(begin, end, share, cut)
    if end > cut:
        at = max(begin, cut)
        count = count_of(row_tile, at, length, share, cut, row_tiles)
        found += over(count + end - at - 1, share) - over(count, share)
    return found


@_device
def start_of(i, row_tile, begin, end, length, share, cut, row_tiles):
    """Where on the line piece i of it begins."""
    if i == 0:
        return begin
    teams = in_teams(begin, end, share, cut)
    if i <= teams:
        return (over(begin, share) + i) * share
    at = max(begin, cut)
    count = count_of(row_tile, at, length, share, cut, row_tiles)
    return at + (i - teams + over(count, share)) * share - count


def slots(row_tiles, blocks):
    """How many states there may be."""
    return 2 * blocks + (row_tiles if row_tiles <= blocks else 0)


# The plan: a header, then where each request begins on the line. Pieces: one row for each block's first one, then the
# others; NEXT is the row of the next one, -1 behind the last. Items: row tiles that are split; column LISTED has
# the slots of their states, those of one item behind those of the other, in the order of keys.
RUN, LENGTH, SHARE, CUT, ITEMS, SPLITS, HEADER = 0, 1, 2, 3, 4, 5, 8
REQUEST, ROW_TILE, FIRST, COUNT, SLOT, PREFIX, NEXT, ORDER, PIECE_FIELDS = 0, 1, 2, 3, 4, 5, 6, 7, 8
STATES, NUM, LISTED = 2, 3, 4  # of an item beside request and row tile: where its states are listed, and how many
BEGIN, END, ITEM_FIELDS = 5, 6, 8  # its run on the line
THREADS = 8 if runtime.SIMULATOR else 256  # Python threads are dear in the simulator
LINE = 8 if runtime.SIMULATOR else 1024  # requests, and one, whose beginnings are near; those of more are in the plan


@_device
def _scan(sums, t, x):
    """The sum of x of the threads up to this one; all threads of the block call it."""
    cuda.syncthreads()
    sums[t] = x
    cuda.syncthreads()
    step = 1
    while step < THREADS:
        other = sums[t - step] if t >= step else 0
        cuda.syncthreads()
        sums[t] += other
        cuda.syncthreads()
        step *= 2
    return sums[t]


@_device
def _largest(sums, t, x):
    """The largest x of all threads; all threads of the block call it."""
    cuda.syncthreads()
    sums[t] = x
    cuda.syncthreads()
    step = THREADS // 2
    while step > 0:
        if t < step:
            sums[t] = max(sums[t], sums[t + step])
        cuda.syncthreads()
        step //= 2
    return sums[0]


@_device
def _request_at(starts, batch, at):
    """The request whose run holds a place on the line."""
    low, high = 0, batch - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if starts[middle] <= at:
            low = middle
        else:
            high = middle - 1
    return low


@_device
def _clamped(lengths, b, max_seqlen):
    return min(max(lengths[b], 0), max_seqlen)


@_device
def _even_pieces(c, batch, run, starts, lengths, max_seqlen, num_nodes, row_tiles, plan, pieces, items, m, write):
    """The piece of a block in mode even; returns pieces and items."""
    index = over(c, row_tiles)
    row_tile = c - index * row_tiles
    if index >= starts[batch]:
        if write:
            pieces[c, COUNT] = 0
            pieces[c, NEXT] = -1
        return 0, 0
    b = _request_at(starts, batch, index)
    begin, end = starts[b], starts[b + 1]
    split = end - begin > 1
    if write:
        first = (index - begin) * run
        count = min(run, key_tiles(lengths[b], num_nodes, max_seqlen) - first)
        _write_piece(pieces, c, b, row_tile, first, count, c if split else -1, lengths, max_seqlen, -1, 0)
        if split and index == begin:
            _write_item(items, m, b, row_tile, begin, end)
    return 1, 1 if split and index == begin else 0


@_device
def _shared_pieces(c, batch, starts, lengths, max_seqlen, row_tiles, blocks, plan, pieces, items, n, m, write):
    """The pieces of a block in mode share; returns pieces and items."""
    length, share, cut = plan[LENGTH], plan[SHARE], plan[CUT]
    count, stop = c * share, min(c * share + share, length * row_tiles)
    num_pieces, num_items, b, last = 0, 0, 0, -1
    if write and count >= stop:
        pieces[c, COUNT] = 0
        pieces[c, NEXT] = -1
    while count < stop:
        if count < cut * row_tiles:
            team = over(c, row_tiles)
            row_tile = c - team * row_tiles
            at = count - (c - team) * share
            edge = cut
        else:
            rest = length - cut
            row_tile = over(count - cut * row_tiles, rest)
            at = cut + count - cut * row_tiles - row_tile * rest
            edge = length
        if at == last:
            b += 1
        else:
            b = _request_at(starts, batch, at)
        begin, end = starts[b], starts[b + 1]
        last = min(min(end, edge), at + stop - count)
        split = at > begin or last < end
        if write:
            slot = slot_of(count, at, begin, share, cut, row_tile, blocks) if split else -1
            row = c if num_pieces == 0 else n + num_pieces - 1
            following = n + num_pieces if count + last - at < stop else -1
            _write_piece(
                pieces, row, b, row_tile, at - begin, last - at, slot, lengths, max_seqlen, following, num_pieces
            )
        if split and at == begin:
            if write:
                _write_item(items, m + num_items, b, row_tile, begin, end)
            num_items += 1
        num_pieces += 1
        count += last - at
    return num_pieces, num_items


@_device
def _write_piece(pieces, n, b, row_tile, first, count, slot, lengths, max_seqlen, following, order):
    pieces[n, REQUEST] = b
    pieces[n, ROW_TILE] = row_tile
    pieces[n, FIRST] = first
    pieces[n, COUNT] = count
    pieces[n, SLOT] = slot
    pieces[n, PREFIX] = _clamped(lengths, b, max_seqlen)
    pieces[n, NEXT] = following
    pieces[n, ORDER] = order


@_device
def _write_item(items, m, b, row_tile, begin, end):
    items[m, REQUEST] = b
    items[m, ROW_TILE] = row_tile
    items[m, BEGIN] = begin
    items[m, END] = end


@_device
def _states_of(plan, items, m, row_tiles):
    """How many states an item has."""
    begin, end = items[m, BEGIN], items[m, END]
    if plan[RUN] > 0:
        return end - begin
    return pieces_of(items[m, ROW_TILE], begin, end, plan[LENGTH], plan[SHARE], plan[CUT], row_tiles)


@_device
def _slot_at(plan, i, row_tile, begin, end, row_tiles, blocks):
    """Where its state i is."""
    if plan[RUN] > 0:
        return (begin + i) * row_tiles + row_tile
    length, share, cut = plan[LENGTH], plan[SHARE], plan[CUT]
    at = start_of(i, row_tile, begin, end, length, share, cut, row_tiles)
    return slot_of(count_of(row_tile, at, length, share, cut, row_tiles), at, begin, share, cut, row_tile, blocks)


@cuda.jit
def plan_blocks(lengths, num_nodes, max_seqlen, row_tiles, blocks, plan, pieces, items):
    """Cut the work of requests of these lengths into pieces for so many blocks. One block of `THREADS`."""
    t = cuda.threadIdx.x
    sums = cuda.shared.array(THREADS, types.int32)
    batch = lengths.shape[0]
    line = cuda.shared.array(LINE, types.int32)
    starts = line if batch < LINE else plan[HEADER:]

    # Phase 1: where each request begins on the line
    each = over(batch + THREADS - 1, THREADS)
    low, high = min(t * each, batch), min(t * each + each, batch)
    mine, most = 0, 0
    for b in range(low, high):
        tiles = key_tiles(lengths[b], num_nodes, max_seqlen)
        mine += tiles
        most = max(most, tiles)
    end = _scan(sums, t, mine)
    length = sums[THREADS - 1]
    before = end - mine
    for b in range(low, high):
        starts[b] = before
        before += key_tiles(lengths[b], num_nodes, max_seqlen)
    longest = _largest(sums, t, most)

    # Phase 2: shares or runs, whichever takes less
    share = share_of(length, row_tiles, blocks)
    cut = cut_of(length, share, row_tiles, blocks)
    run = 0
    if batch * row_tiles <= blocks:
        low, high = 1, longest
        while low < high:  # the threads try as many runs at once
            step = over(high - low + THREADS - 1, THREADS)
            tried = min(low + t * step, high)
            total = 0
            for b in range(batch):
                total += over(key_tiles(lengths[b], num_nodes, max_seqlen) + tried - 1, tried)
            first = _largest(sums, t, t + 1 if total * row_tiles > blocks else 0)  # longer runs fit, too
            high = min(low + first * step, high)
            if first > 0:
                low = min(low + (first - 1) * step + 1, high)
        even = low * TILE + PIECE
        if low < longest:
            even += MERGE
        if even <= share * TILE + 2 * PIECE + MERGE:
            run = low
    if run > 0:
        low, high = min(t * each, batch), min(t * each + each, batch)
        mine = 0
        for b in range(low, high):
            mine += over(key_tiles(lengths[b], num_nodes, max_seqlen) + run - 1, run)
        end = _scan(sums, t, mine)
        length = sums[THREADS - 1]
        before = end - mine
        for b in range(low, high):
            starts[b] = before
            before += over(key_tiles(lengths[b], num_nodes, max_seqlen) + run - 1, run)
    if t == 0:
        plan[SPLITS] = over(longest + run - 1, run) if run > 0 else over(longest - 1, share) + 3
        plan[RUN] = run
        plan[LENGTH] = length
        plan[SHARE] = share
        plan[CUT] = cut
        starts[batch] = length
    cuda.syncthreads()

    # Phase 3: the pieces of each block, counted, then written
    each = over(blocks + THREADS - 1, THREADS)
    low, high = min(t * each, blocks), min(t * each + each, blocks)
    n, m = 0, 0
    more, num_items = 0, 0
    for phase in range(2):
        write = phase == 1
        if write:
            n = blocks + _scan(sums, t, more) - more
            m = _scan(sums, t, num_items) - num_items
            if t == THREADS - 1:
                plan[ITEMS] = m + num_items
        for c in range(low, high):
            if run > 0:
                new_pieces, new_items = _even_pieces(
                    c, batch, run, starts, lengths, max_seqlen, num_nodes, row_tiles, plan, pieces, items, m, write
                )
            else:
                new_pieces, new_items = _shared_pieces(
                    c, batch, starts, lengths, max_seqlen, row_tiles, blocks, plan, pieces, items, n, m, write
                )
            n += max(new_pieces - 1, 0)
            m += new_items
            more += max(new_pieces - 1, 0)
            num_items += new_items
    cuda.syncthreads()

    # Phase 4: the slots of the items' states; as many threads an item as there are
    num_items = plan[ITEMS]
    lanes = 1
    while 0 < lanes * 2 * num_items <= THREADS:
        lanes *= 2
    each = over(num_items * lanes + THREADS - 1, THREADS)
    low, high = min(over(t, lanes) * each, num_items), min(over(t, lanes) * each + each, num_items)
    lane = t - over(t, lanes) * lanes
    mine = 0
    for m in range(low, high):
        num = _states_of(plan, items, m, row_tiles)
        mine += num
        if lane == 0:
            items[m, NUM] = num
    place = _scan(sums, t, mine if lane == 0 else 0) - mine
    for m in range(low, high):
        num, row_tile, begin, end = items[m, NUM], items[m, ROW_TILE], items[m, BEGIN], items[m, END]
        for i in range(lane, num, lanes):
            items[place + i, LISTED] = _slot_at(plan, i, row_tile, begin, end, row_tiles, blocks)
        if lane == 0:
            items[m, STATES] = place
        place += num


def most_pieces(batch, row_tiles, blocks):
    """Rows of the array of pieces: each begins a request's row tile, a block's share or a row tile behind the teams."""
    return batch * row_tiles + 2 * blocks + row_tiles


def mirror(lengths, num_nodes, max_seqlen, row_tiles, blocks):
    """What `plan_blocks` finds, from its definition: for each block a list of its pieces, tuples of `PIECE_FIELDS`."""
    prefixes = [min(max(int(n), 0), max_seqlen) for n in lengths]
    tiles = np.array([-(-(n + num_nodes) // TILE_KEYS) for n in prefixes])
    share = -(-int(tiles.sum()) * row_tiles // blocks)
    length = int(tiles.sum())
    cut = min(blocks // row_tiles, length // share) * share
    pieces = [[] for _ in range(blocks)]

    # Even runs
    if len(tiles) * row_tiles <= blocks:
        fitting = (run for run in range(1, tiles.max() + 1) if np.sum(-(-tiles // run)) * row_tiles <= blocks)
        run = next(fitting)
        cost = run * TILE + PIECE + (MERGE if run < tiles.max() else 0)
        if cost <= share * TILE + 2 * PIECE + MERGE:
            c = 0
            for b, count in enumerate(tiles):
                for first in range(0, count, run):
                    for row_tile in range(row_tiles):
                        slot = c if count > run else -1
                        pieces[c] = [(b, row_tile, first, min(run, count - first), slot, prefixes[b])]
                        c += 1
            return pieces

    # Equal shares: all places in the order in which blocks take them, cut where anything changes
    ends = np.cumsum(tiles)
    line = np.arange(length)
    teams, rest = line[:cut].reshape(-1, 1, share), line[cut:]
    at = np.concatenate([np.repeat(teams, row_tiles, 1).ravel(), np.tile(rest, row_tiles)])
    of_teams = np.broadcast_to(np.arange(row_tiles)[None, :, None], (len(teams), row_tiles, share)).ravel()
    row_tile = np.concatenate([of_teams, np.repeat(np.arange(row_tiles), len(rest))])
    request = np.searchsorted(ends, at, side="right")
    block = np.arange(len(at)) // share
    change = np.diff(at) != 1
    for x in (block, row_tile, request):
        change |= np.diff(x) != 0
    first = np.flatnonzero(np.concatenate([[True], change]))
    for n, stop in zip(first, [*first[1:], len(at)], strict=True):
        b, c = request[n], block[n]
        begin, end = ends[b] - tiles[b], ends[b]
        slot = -1
        if at[n] > begin or at[n] + stop - n < end:
            slot = 2 * c + (n % share != 0)
            if at[n] == cut > begin and n % share:
                slot = 2 * blocks + row_tile[n]
        piece = (b, row_tile[n], at[n] - begin, stop - n, slot, prefixes[b])
        pieces[c].append(tuple(int(x) for x in piece))
    return pieces
