"""Which block of the wgmma variant takes which key tiles, from lengths that only the device knows.

Work is a rectangle for each request: its row tiles (64 rows of nodes and heads) by its key tiles (64 keys), which
blocks take in pairs. A *piece* is a row tile and a run of pairs of one request; a block takes its pieces one after the
other. A row tile whose keys are one piece is *whole*: its block writes results. The pieces of the others leave states,
in slots, that `combine` merges.

The pairs of all requests stand one behind the other on a line; each of the R row tiles has such a line. A block may
take so many pieces and pairs as cost no more than the *cap*, the same for all. First come teams of R blocks, which take
the same run of the R lines, so that a key comes from memory once and from L2 R - 1 times; then the blocks that are
left, line by line behind the place that the teams have reached, the *cut*:

::

    row tile 0  | block 0   | block 3   | block 6 .. |      R = 3 lines, 8 blocks: two teams of three,
    row tile 1  | block 1   | block 4   | .. 6, 7 .. |      and two blocks for what the teams leave
    row tile 2  | block 2   | block 5   | .. 7       |
                                        cut

The smallest cap that covers all work is taken. Where there are teams for all requests, no block need begin a second
piece: these *single* pieces are another plan, and the one that costs less is taken. All follows from the lengths alone,
so the same lengths give the same pieces, and the same bits.
"""

from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.device import runtime

TILE_KEYS = 64
PAIR, PIECE, MERGE = 2, 3, 3  # costs, 1.5 us each on an H200: a pair, a piece beside its pairs, merging
LEAST = 2  # pairs, of a piece behind others that the cap cuts short
SLACK = PIECE + (PIECE + LEAST * PAIR)  # more than a block that is not the last one leaves of its cap

_device = cuda.jit(device=True, inline="always")
_i32 = types.int32  # sums of two are of 64 bits, which take two registers


@_device
def over(a, b):
    """a // b of numbers from 0 to 2**31 - 1: in 32 bits, and without the call that a signed division takes."""
    return _i32(types.uint32(a) // types.uint32(b))


@_device
def _clamped(lengths, b, max_seqlen):
    return min(max(lengths[b], 0), max_seqlen)


@_device
def key_tiles(lengths, b, num_nodes, max_seqlen):
    """Key tiles of a request: those of its prefix, clamped, and of its nodes' rows."""
    return (_clamped(lengths, b, max_seqlen) + num_nodes + 63) >> 6


def slots(row_tiles, blocks):
    """How many states there may be."""
    return 2 * blocks + (row_tiles if row_tiles <= blocks else 0)


# The plan: a header; where blocks are many, the places where teams begin, then those where the other blocks do, by
# their number, three words each, and where states are listed of the item that a block begins, one word each and one
# behind them; where requests are many, the pairs of each. Else all but the header is in shared memory.
# Pieces: one row for each block's first one, then the others; NEXT is the row of the next one, -1 behind the last.
# Items: row tiles that are split; column LISTED has the slots of their states, those of one item behind those of the
# other, in the order of keys.
SINGLE, TEAMS, USED, CUT_REQUEST, CUT_PAIR, ITEMS, SPLITS, HEADER = 0, 1, 2, 3, 4, 5, 6, 8
REQUEST, ROW_TILE, FIRST, COUNT, SLOT, PREFIX, NEXT, ORDER, PIECE_FIELDS = 0, 1, 2, 3, 4, 5, 6, 7, 8
STATES, NUM, LISTED, ITEM_FIELDS = 2, 3, 4, 8  # of an item beside request and row tile
THREADS = 8 if runtime.SIMULATOR else 256  # Python threads are dear in the simulator
CAPS = THREADS // 2  # tried at once, of plans of single pieces and of others
NEAR_REQUESTS, NEAR_BLOCKS = (8, 8) if runtime.SIMULATOR else (1024, 256)  # of more, what is known is in the plan
NEAR_WORDS = HEADER + 4 * NEAR_BLOCKS + 1


def plan_words(batch, blocks):
    return HEADER + 4 * blocks + 1 + batch


def most_pieces(batch, row_tiles, blocks):
    """Rows of the array of pieces: each begins a request's row tile, a block's work or a row tile behind the teams."""
    return batch * row_tiles + 2 * blocks + row_tiles


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
def _fitting(room):
    """Pairs of a piece that this much is left for."""
    return over(max(_i32(room - PIECE), _i32(0)), PAIR)


@_device
def _walk(pairs, batch, row_tiles, blocks, cap, single, begins, write):
    """Whether blocks that take so much each cover all work; ``write``: keep where they begin, and the header."""
    teams = over(blocks, row_tiles)
    stop = teams
    full = _fitting(cap)
    b, left = _i32(0), _i32(pairs[0])
    following = _i32(pairs[min(1, batch - 1)])  # of the next request, read ahead
    cut_request, cut_left = _i32(batch), _i32(0)
    i, row_tile = _i32(-1), _i32(-1)  # the team or block; of teams no row tile
    while row_tile < row_tiles and b < batch:
        # The next team or block
        i = _i32(i + 1)
        if i == teams and row_tile < 0:
            cut_request, cut_left, row_tile = b, left, _i32(0)
            i, stop = _i32(teams * row_tiles), _i32(blocks)
        if i >= stop or single and row_tile >= 0:
            return False
        # and those behind it that have nothing but a part of the same request
        passed = _i32(min(over(left - 1, full), stop - 1 - i)) if left > full else _i32(0)
        if write:
            for n in range(passed + 1):
                begins[HEADER + 3 * (i + n)] = row_tile
                begins[HEADER + 3 * (i + n) + 1] = b
                begins[HEADER + 3 * (i + n) + 2] = pairs[b] - left + n * full
        i = _i32(i + passed)
        left = _i32(left - passed * full)
        # Its pieces
        room = _i32(cap)
        take = min(full, left)
        while take == left or take >= LEAST or room == cap:
            room = _i32(0 if single else room - PIECE - take * PAIR)
            left = _i32(left - take)
            if left == 0:
                b = _i32(b + 1)
                left = following
                if b == batch:
                    if row_tile < 0:
                        break
                    row_tile = _i32(row_tile + 1)
                    if row_tile == row_tiles:
                        break
                    b, left = cut_request, cut_left
                following = _i32(pairs[min(b + 1, batch - 1)])
            take = min(_fitting(room), left)
    if write:
        begins[SINGLE] = 1 if single else 0
        begins[TEAMS] = i + 1 if row_tile < 0 else teams
        begins[USED] = teams * row_tiles if row_tile < 0 else i + 1
        begins[CUT_REQUEST] = cut_request
        begins[CUT_PAIR] = pairs[cut_request] - cut_left if cut_request < batch else 0
    return True


@_device
def _holder(begins, low, high, row_tile, b, p):
    """The last one of the teams or blocks from low to high that begins no later than a place."""
    low, high = _i32(low), _i32(high)
    while low < high:
        middle = _i32((low + high + 1) >> 1)
        at = HEADER + 3 * middle
        of_row_tile, of_request = begins[at], begins[at + 1]
        earlier = of_request < b or of_request == b and begins[at + 2] <= p
        if of_row_tile < row_tile or of_row_tile == row_tile and earlier:
            low = middle
        else:
            high = _i32(middle - 1)
    return low


@_device
def _state_at(begins, c, row_tile, b, p, row_tiles, blocks):
    """Of a split item's piece: the block that has the first piece, and the piece's number among all."""
    if p == 0:
        return _i32(c), _i32(0)
    teams = over(blocks, row_tiles)
    k = over(c, row_tiles)
    of_team = k < teams
    begun_by_team = of_team or b == begins[CUT_REQUEST] and begins[CUT_PAIR] > 0
    low, high = _i32(teams * row_tiles), _i32(c)
    if begun_by_team:
        low, high = _i32(0), k if of_team else _i32(begins[TEAMS] - 1)
    first = _holder(begins, low, high, -1 if begun_by_team else row_tile, b, 0)
    if not begun_by_team:
        return first, _i32(c - first)
    if not of_team:
        k = _i32(begins[TEAMS])
        if p > begins[CUT_PAIR]:  # else this block has the first piece behind the cut
            k += c - _holder(begins, teams * row_tiles, c, row_tile, b, begins[CUT_PAIR])
    return _i32(first * row_tiles + row_tile), _i32(k - first)


@_device
def _pieces_of(c, pairs, batch, lengths, max_seqlen, num_nodes, row_tiles, blocks, begins, pieces, items, n, m, write):
    """The pieces of a block behind its first one; ``write``: these, from row n on, its item, in row m, and states.

    Not to write: only the numbers of states of the items whose last pieces it has, beside where blocks begin.
    """
    teams = over(blocks, row_tiles)
    k = over(c, row_tiles)
    of_team = k < teams
    i = k if of_team else c
    stop = begins[TEAMS] if of_team else begins[USED]
    places = HEADER + 3 * blocks
    order, row, n = _i32(0), _i32(c), _i32(n)
    if write:
        pieces[c, COUNT] = 0
        pieces[c, NEXT] = -1
    if i < stop:
        row_tile, b, p = begins[HEADER + 3 * i], begins[HEADER + 3 * i + 1], begins[HEADER + 3 * i + 2]
        last, end, end_pair = _i32(row_tiles), begins[CUT_REQUEST], begins[CUT_PAIR]
        if i + 1 < stop:
            last, end, end_pair = begins[HEADER + 3 * i + 3], begins[HEADER + 3 * i + 4], begins[HEADER + 3 * i + 5]
        if of_team:
            row_tile = last = _i32(c - k * row_tiles)
        while row_tile < last or row_tile == last and (b < end or b == end and p < end_pair):
            until = end_pair if row_tile == last and b == end else pairs[b]
            slot = _i32(-1)
            if p > 0 or until < pairs[b]:
                slot = _i32(2 * c + 1)
                if order == 0:
                    slot = _i32(2 * c)
                elif p > 0 and b == begins[CUT_REQUEST] and p == begins[CUT_PAIR]:
                    slot = _i32(2 * blocks + row_tile)
                if write or until == pairs[b]:
                    first, number = _state_at(begins, c, row_tile, b, p, row_tiles, blocks)
                    if write:
                        items[begins[places + first] + number, LISTED] = slot
                    else:
                        begins[places + first] = number + 1
            if order > 0:
                if write:
                    pieces[row, NEXT] = n
                row = n
                n = _i32(n + 1)
            if write:
                tiles = key_tiles(lengths, b, num_nodes, max_seqlen)
                pieces[row, REQUEST] = b
                pieces[row, ROW_TILE] = row_tile
                pieces[row, FIRST] = 2 * p
                pieces[row, COUNT] = min(2 * until, tiles) - 2 * p
                pieces[row, SLOT] = slot
                pieces[row, PREFIX] = _clamped(lengths, b, max_seqlen)
                pieces[row, NEXT] = -1
                pieces[row, ORDER] = order
                if slot >= 0 and p == 0:
                    items[m, REQUEST] = b
                    items[m, ROW_TILE] = row_tile
                    items[m, STATES] = begins[places + c]
                    items[m, NUM] = begins[places + c + 1] - begins[places + c]
            order = _i32(order + 1)
            b, p = _i32(b + 1), _i32(0)
            if b == batch:
                row_tile = _i32(row_tile + 1)
                b, p = begins[CUT_REQUEST], begins[CUT_PAIR]
    return n


@cuda.jit
def plan_blocks(lengths, num_nodes, max_seqlen, row_tiles, blocks, whole, plan, pieces, items):
    """Cut the work of requests of these lengths into pieces for so many blocks. One block of `THREADS`.

    whole : cut no row tile, where each may have a block of its own, whatever it costs.
    """
    t = cuda.threadIdx.x
    sums = cuda.shared.array(THREADS, types.int32)
    batch = lengths.shape[0]
    near_pairs = cuda.shared.array(NEAR_REQUESTS, types.int32)
    pairs = near_pairs if batch <= NEAR_REQUESTS else plan[HEADER + 4 * blocks + 1 :]
    near_begins = cuda.shared.array(NEAR_WORDS, types.int32)
    begins = near_begins if blocks <= NEAR_BLOCKS else plan

    # Phase 1: the pairs of each request
    each = over(batch + THREADS - 1, THREADS)
    mine, most = 0, 0
    for b in range(min(t * each, batch), min(t * each + each, batch)):
        x = (key_tiles(lengths, b, num_nodes, max_seqlen) + 1) >> 1
        pairs[b] = x
        mine += PIECE + x * PAIR
        most = max(most, x)
    _scan(sums, t, mine)
    total = sums[THREADS - 1]
    longest = _largest(sums, t, most)

    # Phase 2: the smallest caps of both plans, many tried at once; a larger one than one that will do will do, too
    teams = over(blocks, row_tiles)
    low = max(over(total * row_tiles + blocks - 1, blocks), PIECE + PAIR)
    high = over(total + teams - 1, teams) + SLACK if teams > 0 else low + SLACK
    single_low, single_high = low, PIECE + PAIR * longest
    single = t < CAPS
    i = t if single else t - CAPS
    may_be_single = batch <= teams
    if not may_be_single:
        single_low = single_high
    elif whole:
        low, single_low = high, single_high
    while low < high or single_low < single_high:
        step = over(high - low + CAPS - 1, CAPS)
        single_step = over(max(single_high - single_low, 0) + CAPS - 1, CAPS)
        tried = low + i * step
        until = high
        if single:
            tried = single_low + i * single_step
            until = single_high
        short = tried < until and not _walk(pairs, batch, row_tiles, blocks, tried, single, begins, False)
        first = _largest(sums, t, i + 1 if short and not single else 0)
        high = min(low + first * step, high)
        if first > 0:
            low = min(low + (first - 1) * step + 1, high)
        first = _largest(sums, t, i + 1 if short and single else 0)
        single_high = min(single_low + first * single_step, single_high)
        if first > 0:
            single_low = min(single_low + (first - 1) * single_step + 1, single_high)
    if t == 0:
        merging = MERGE if single_high < PIECE + PAIR * longest else 0
        take_single = may_be_single and (whole or single_high + merging <= high + MERGE)
        _walk(pairs, batch, row_tiles, blocks, single_high if take_single else high, take_single, begins, True)
    cuda.syncthreads()

    # Phase 3: the pieces of each block, counted, then written; a block has the first piece of one split item at most
    each = over(blocks + THREADS - 1, THREADS)
    start, stop = min(t * each, blocks), min(t * each + each, blocks)
    places = HEADER + 3 * blocks
    for c in range(start, stop):
        begins[places + c] = 0
    n, m = 0, 0
    for phase in range(2):
        cuda.syncthreads()
        write = phase == 1
        for c in range(start, stop):
            n = _pieces_of(
                c, pairs, batch, lengths, max_seqlen, num_nodes, row_tiles, blocks, begins, pieces, items, n, m, write
            )
            if write and begins[places + c + 1] > begins[places + c]:
                m += 1
        if write:
            break
        cuda.syncthreads()
        states, splits = 0, 0
        for c in range(start, stop):
            m += 1 if begins[places + c] > 0 else 0
            states += begins[places + c]
            splits = max(splits, begins[places + c])
        n = blocks + _scan(sums, t, n) - n
        m = _scan(sums, t, m) - m
        num_items = sums[THREADS - 1]
        place = _scan(sums, t, states) - states
        splits = _largest(sums, t, splits)
        for c in range(start, stop):
            states = begins[places + c]
            begins[places + c] = place
            place += states
        if start < stop == blocks:
            begins[places + blocks] = place
        if t == 0:
            begins[ITEMS] = num_items
            begins[SPLITS] = splits
            for k in range(HEADER):
                plan[k] = begins[k]


def is_whole(lengths, num_nodes, max_seqlen, row_tiles, blocks):
    """Whether a plan that cuts no row tile is about as good as any, from lengths on the host."""
    costs = PIECE + PAIR * -(-(np.clip(lengths, 0, max_seqlen).astype(np.int64) + num_nodes) // (2 * TILE_KEYS))
    if not 0 < len(costs) * row_tiles <= blocks:
        return False
    return bool(costs.max() <= costs.sum() * row_tiles / blocks + PIECE + MERGE)  # a cut costs a piece, and merging


def mirror(lengths, num_nodes, max_seqlen, row_tiles, blocks, whole=False):
    """What `plan_blocks` finds, by trying caps one by one: for each block a list of its pieces, of `PIECE_FIELDS`."""
    prefixes = [min(max(int(n), 0), max_seqlen) for n in lengths]
    tiles = [-(-(n + num_nodes) // TILE_KEYS) for n in prefixes]
    pairs = [-(-n // 2) for n in tiles]
    teams = blocks // row_tiles
    least = max(-(-sum(PIECE + PAIR * n for n in pairs) * row_tiles // blocks), PIECE + PAIR)

    def walk(cap, single):
        """Row tile, request, first pair and pairs of each block's pieces, and the cut; None if the cap is too small."""
        found = [[] for _ in range(blocks)]
        b, p = 0, 0
        for k in range(teams):
            room, run = cap, []
            while b < len(pairs):
                left = pairs[b] - p
                take = min(max(room - PIECE, 0) // PAIR, left)
                if take < left and take < LEAST and run:
                    break
                if take == 0:
                    return None
                run.append((b, p, take))
                room -= PIECE + PAIR * take
                b, p = (b + 1, 0) if take == left else (b, p + take)
                if single or take < left:
                    break
            for row_tile in range(row_tiles):
                found[k * row_tiles + row_tile] = [(row_tile, *piece) for piece in run]
        cut = b, p
        c, room = teams * row_tiles - 1, 0
        if b < len(pairs) and single:
            return None
        for row_tile in range(row_tiles):
            b, p = cut
            while b < len(pairs):
                left = pairs[b] - p
                take = min(max(room - PIECE, 0) // PAIR, left)
                if take < left and take < LEAST:
                    c, room = c + 1, cap
                    take = min(max(room - PIECE, 0) // PAIR, left)
                    if c == blocks or take == 0:
                        return None
                found[c].append((row_tile, b, p, take))
                room -= PIECE + PAIR * take
                b, p = (b + 1, 0) if take == left else (b, p + take)
        return found, cut

    def smallest(single, cap):
        while (found := walk(cap, single)) is None:
            cap += 1
        return cap, *found

    longest = PIECE + PAIR * max(pairs)
    if whole and len(pairs) <= teams:
        _, found, cut = smallest(True, longest)
    else:
        cap, found, cut = smallest(False, least)
        if len(pairs) <= teams:
            single_cap, *of_single = smallest(True, min(least, longest))
            if single_cap + (MERGE if single_cap < longest else 0) <= cap + MERGE:
                found, cut = of_single
    pieces = []
    for c, run in enumerate(found):
        pieces.append([])
        for row_tile, b, p, take in run:
            slot = -1
            if take < pairs[b]:
                slot = 2 * c + (1 if pieces[c] else 0)
                if pieces[c] and p > 0 and (b, p) == cut:
                    slot = 2 * blocks + row_tile
            count = min(2 * (p + take), tiles[b]) - 2 * p
            pieces[c].append((b, row_tile, 2 * p, count, slot, prefixes[b]))
    return pieces
