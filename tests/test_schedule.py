"""The plan of wgmma: kernel against mirror, and what every plan must keep, whatever its lengths.

The kernel runs in the simulator with a block of few threads, or on a GPU where there is one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from wrong_schedule import MISTAKES, build

from ddtree_numba.attention import schedule
from ddtree_numba.attention.schedule import (
    COUNT,
    ITEM_FIELDS,
    ITEMS,
    LISTED,
    NEXT,
    NUM,
    ORDER,
    PIECE_FIELDS,
    REQUEST,
    ROW_TILE,
    SINGLE,
    SPLITS,
    STATES,
)
from ddtree_numba.device import launch
from ddtree_numba.device.arrays import view
from ddtree_numba.device.runtime import SIMULATOR

only_simulated = pytest.mark.skipif(not SIMULATOR, reason="wrong kernels run in the simulator alone")

Piece = tuple[int, ...]  # request, row tile, first key tile, how many, slot, prefix
SPOILED = -7


class Sizes(dict):
    """lengths, num_nodes, max_seqlen, row_tiles, blocks, whole: the first arguments of kernel and mirror."""

    def __init__(self, whole: bool = False, **given: Any) -> None:
        super().__init__(**given, whole=whole)

    @property
    def tiles(self) -> np.ndarray:
        """Key tiles of each request."""
        return -(-(np.clip(self["lengths"], 0, self["max_seqlen"]) + self["num_nodes"]) // 64)


def drawn(seed: int) -> Sizes:
    """Sizes of all kinds; of one in three so few row tiles that each piece may have a block, of some of them whole."""
    rng = np.random.default_rng(seed)
    batch, blocks = int(rng.integers(1, 12)), int(rng.integers(1, 20))
    row_tiles = int(rng.integers(1, 12)) if seed % 3 else max(1, blocks // batch)
    most = int(rng.choice([0, 60, 700, 3000]))
    lengths = rng.integers(-5, most + 20, batch).astype(np.int32)
    num_nodes, whole = int(rng.integers(1, 70)), seed % 5 == 0
    return Sizes(whole, lengths=lengths, num_nodes=num_nodes, max_seqlen=most, row_tiles=row_tiles, blocks=blocks)


def sizes_of(tiles: tuple[int, ...], row_tiles: int, blocks: int) -> Sizes:
    """Requests of so many key tiles, the last one full."""
    lengths = np.array([64 * n - 1 for n in tiles], np.int32)
    return Sizes(lengths=lengths, num_nodes=1, max_seqlen=2**20, row_tiles=row_tiles, blocks=blocks)


# Single pieces of 18 tiles would do but for the merging of two of them.
BETWEEN = sizes_of((36, 18), 1, 4)


def planned(sizes: Sizes, module: ModuleType = schedule) -> dict[str, np.ndarray]:
    """What the kernel writes; the rest is spoiled."""
    batch, row_tiles, blocks = len(sizes["lengths"]), sizes["row_tiles"], sizes["blocks"]
    shapes: dict[str, Any] = {
        "plan": schedule.plan_words(batch, blocks),
        "pieces": (schedule.most_pieces(batch, row_tiles, blocks), PIECE_FIELDS),
        "items": (schedule.slots(row_tiles, blocks), ITEM_FIELDS),
    }
    found = {name: np.full(shape, SPOILED, np.int32) for name, shape in shapes.items()}
    numbers = [np.int32(x) for x in list(sizes.values())[1:]]
    args = (view("lengths", sizes["lengths"]), *numbers, *(view(name, x) for name, x in found.items()))
    launch.launch(module.plan_blocks, (1, 1, 1), module.THREADS, args, results=3, shared_bytes=0)
    return found


def pieces_of(found: dict[str, np.ndarray], blocks: int) -> list[list[Piece]]:
    """Each block's pieces, as it follows them from one to the next."""
    pieces, taken, chains = found["pieces"], set(), []
    for c in range(blocks):
        n, chain = c, []
        while n >= 0 and pieces[n, COUNT]:
            assert n not in taken, f"FAIL: two pieces in row {n}"
            assert pieces[n, ORDER] == len(chain)
            taken.add(n)
            chain.append(tuple(int(x) for x in pieces[n, :NEXT]))
            n = int(pieces[n, NEXT])
        chains.append(chain)
    return chains


def check_pieces(chains: list[list[Piece]], sizes: Sizes) -> None:
    """Every place is in one piece, split row tiles alone have slots, and no two pieces the same one."""
    places = [np.zeros((sizes["row_tiles"], n), int) for n in sizes.tiles]
    parts = np.zeros((len(places), sizes["row_tiles"]), int)
    for b, row_tile, first, count, _, prefix in (piece for chain in chains for piece in chain):
        assert count > 0 and first >= 0 and prefix == np.clip(sizes["lengths"][b], 0, sizes["max_seqlen"])
        assert first + count <= sizes.tiles[b], "FAIL: a piece reaches past its request"
        places[b][row_tile, first : first + count] += 1
        parts[b, row_tile] += 1
    assert all((x == 1).all() for x in places), "FAIL: a place is in no piece or in several"
    slots = [piece[4] for chain in chains for piece in chain if piece[4] >= 0]
    assert len(slots) == len(set(slots)), "FAIL: two pieces have one slot"
    assert all(slot < schedule.slots(sizes["row_tiles"], sizes["blocks"]) for slot in slots)
    for piece in (piece for chain in chains for piece in chain):
        assert (piece[4] >= 0) == (parts[piece[0], piece[1]] > 1), "FAIL: whole and with a slot, or split and without"


def check_costs(chains: list[list[Piece]], sizes: Sizes, single: bool) -> None:
    """No block has much more than its share; in a plan of single pieces none has more than one, and none is longer than
    must be. Nothing is cut that must be whole."""
    row_tiles, blocks = sizes["row_tiles"], sizes["blocks"]
    pairs, teams = -(-sizes.tiles // 2), blocks // row_tiles
    if sizes["whole"] and len(pairs) <= teams:
        assert all(piece[4] < 0 for chain in chains for piece in chain), "FAIL: cut, and must be whole"
    elif single:
        longest = max(-(-piece[3] // 2) for chain in chains for piece in chain)
        assert max(map(len, chains)) == 1, "FAIL: a block has several pieces"
        assert longest == 1 or (-(-pairs // (longest - 1))).sum() > teams, "FAIL: shorter pieces would do"
    else:
        total = int((schedule.PIECE + schedule.PAIR * pairs).sum())
        share = total / teams if teams else total * row_tiles / blocks
        costs = [sum(schedule.PIECE + schedule.PAIR * -(-piece[3] // 2) for piece in chain) for chain in chains]
        assert max(costs) <= share + schedule.SLACK + 1, "FAIL: too much for a block"


def check_for_combine(found: dict[str, np.ndarray], chains: list[list[Piece]], sizes: Sizes) -> None:
    """The items are the split row tiles, and lead combine to the slots of their pieces, in order."""
    plan, rows = found["plan"], found["items"]
    items = rows[: plan[ITEMS]]
    slots: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for b, row_tile, first, _, slot, _ in (piece for chain in chains for piece in chain):
        if slot >= 0:
            slots.setdefault((b, row_tile), []).append((first, slot))
    keys = [(int(item[REQUEST]), int(item[ROW_TILE])) for item in items]
    assert sorted(keys) == sorted(slots), "FAIL: other items than split row tiles"
    for key, item in zip(keys, items, strict=True):
        listed = rows[item[STATES] : item[STATES] + item[NUM], LISTED].tolist()
        wanted = [slot for _, slot in sorted(slots[key])]
        assert listed == wanted, "FAIL: combine looks for states elsewhere"
        assert len(wanted) <= plan[SPLITS], "FAIL: more splits than the plan says"
    assert (rows[len(items) :, : STATES + 1] == SPOILED).all()
    assert (rows[sum(map(len, slots.values())) :, LISTED] == SPOILED).all()


def check(sizes: Sizes, module: ModuleType = schedule) -> bool:
    """Raise AssertionError unless the kernel's plan is the mirror's and keeps all; whether its pieces are single."""
    found = planned(sizes, module)
    chains = pieces_of(found, sizes["blocks"])
    check_pieces(chains, sizes)
    check_costs(chains, sizes, bool(found["plan"][SINGLE]))
    check_for_combine(found, chains, sizes)
    assert chains == schedule.mirror(*sizes.values()), "FAIL: other pieces than the mirror's"
    return bool(found["plan"][SINGLE])


def test_plans_of_all_kinds_of_sizes():
    single = [check(drawn(seed)) for seed in range(60)]
    assert 10 < sum(single) < 50, "both ways of cutting must have been tried"
    assert not check(BETWEEN) and check(sizes_of((36, 18), 1, 5))


@pytest.mark.parametrize("lengths", [(0,), (63,), (64,), (100000,), (0, 0, 0), (5000, 0, 0, 1)], ids=str)
@pytest.mark.parametrize("blocks", [1, 7, 16])
def test_plans_of_few_requests(lengths, blocks):
    for row_tiles in (1, 3, 20):
        given = np.array(lengths, np.int32)
        check(Sizes(lengths=given, num_nodes=1, max_seqlen=200000, row_tiles=row_tiles, blocks=blocks))


def test_more_requests_than_threads_and_more_blocks_than_places():
    lengths = np.arange(2 * schedule.THREADS + 5, dtype=np.int32) * 7
    check(Sizes(lengths=lengths, num_nodes=9, max_seqlen=500, row_tiles=2, blocks=13))
    check(Sizes(lengths=lengths[:1], num_nodes=1, max_seqlen=500, row_tiles=1, blocks=40))


@pytest.mark.parametrize("seed", range(300))
def test_mirror_alone(seed):
    sizes = drawn(1000 + seed)
    sizes["blocks"] = int(np.random.default_rng(seed).integers(1, 140))
    chains = schedule.mirror(*sizes.values())
    check_pieces(chains, sizes)


def test_a_key_is_read_by_a_team_of_blocks_at_a_time():
    """Blocks of a team have the same run of one request's keys, so that they meet in the L2 cache."""
    sizes = Sizes(lengths=np.array([3000], np.int32), num_nodes=8, max_seqlen=3000, row_tiles=3, blocks=7)
    chains = schedule.mirror(*sizes.values())
    for team in (chains[:3], chains[3:6]):
        assert {chain[0][1] for chain in team} == {0, 1, 2}
        assert len({chain[0][2:4] for chain in team}) == 1


@only_simulated
def test_the_kernel_without_a_mistake_passes():
    module = build()
    for seed in range(12):
        check(drawn(seed), module)


@only_simulated
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_kernels_with_a_mistake_fail(mistake):
    module = build(*MISTAKES[mistake])
    with pytest.raises((AssertionError, IndexError), match=r"FAIL|out of bounds|assert"):
        for seed in range(60):
            check(drawn(seed), module)
        check(BETWEEN, module)


@pytest.mark.parametrize("seed", range(100))
def test_lengths_on_the_host_say_whether_row_tiles_may_stay_whole(seed):
    """A plan that cuts none costs little more than another, where they say so."""
    sizes = drawn(seed)
    given = [sizes[name] for name in ("lengths", "num_nodes", "max_seqlen", "row_tiles", "blocks")]

    def cost(whole: bool) -> int:
        chains = schedule.mirror(*given, whole)
        merging = schedule.MERGE * any(piece[4] >= 0 for chain in chains for piece in chain)
        return max(sum(schedule.PIECE + schedule.PAIR * -(-p[3] // 2) for p in chain) for chain in chains) + merging

    if schedule.is_whole(*given):
        assert cost(True) <= cost(False) + schedule.PIECE
