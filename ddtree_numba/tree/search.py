"""What the two builders share: entries of the best-first search, rows in shared memory, and the tree they write.

The search keeps entries, each a path that may become a node. Taking an entry makes node n of it and offers two more:
its next sibling (the path's last rank plus one), in the same slot, and its first child, in slot n. So Q slots do.

The rule is the reference's: highest score first, and among equal scores the lexicographically smallest tuple of ranks.
A tuple travels as words of FIELDS fields, first rank in the highest bits, each field rank + 1, and 0 behind the last:
so comparing the words in turn compares the tuples, and a path comes before its continuations. The tuples are all
different, so the order is total, and the tree does not depend on how the best entry is found.

Scores follow the reference's arithmetic to the last bit: float64 over float32 log-probabilities, a sibling
``score - logprob[rank] + logprob[rank + 1]`` (two roundings), a first child ``score + logprob[0]``.

Shared memory of a block (`carve`): of each node its score, and its integers packed into one; of each slot the same, its
words, and one integer more; the first columns of the rows, each row followed by -inf, and a row of -inf.

Source: github.com/liranringel/ddtree, ddtree.py; DDTree (arXiv 2604.12989).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from ddtree_numba.device import runtime
from ddtree_numba.device.arrays import HOST, View
from ddtree_numba.device.launch import launch, shared_bytes_limit
from ddtree_numba.device.runtime import require_backend

THREADS = 8 if runtime.SIMULATOR else 256  # Python threads are dear in the simulator
STATIC_BYTES = 16  # the kernels' one statically sized array, with room for its alignment
FIELDS = 5
FIELD_BITS = 12
MAX_BUDGET = (1 << FIELD_BITS) - 2  # a rank is below the budget, and a field holds rank + 1

SHORT = np.uint32(16)
AT_BITS = np.uint32(20)
AT_MASK = np.uint32((1 << 20) - 1)

NEG_INF = np.float64(-np.inf)
ROW_END = np.float32(-np.inf)


@dataclass(frozen=True)
class Problem:
    """Checked arguments of build_tree, as views of the caller's memory.

    Attributes
    ----------
    logprobs : float32 [B, L, K]
    token_ids : int32 or int64 [B, L, K]
    root_tokens : int32 or int64 [B]
    tree : dict of View
        The arrays of the DraftTree to write, by name.
    """

    logprobs: View
    token_ids: View
    root_tokens: View
    tree: dict[str, View]

    @property
    def batch(self) -> int:
        return self.logprobs.shape[0]

    @property
    def length(self) -> int:
        return self.logprobs.shape[1]

    @property
    def num_nodes(self) -> int:
        return self.tree["tokens"].shape[1]


@dataclass(frozen=True)
class Layout:
    """How a block's shared memory is laid out: see `carve`.

    Attributes
    ----------
    slots : int
        Entries that the search has room for.
    words : int
        Words that hold the ranks of a path.
    columns : int
        Columns of each row that are in shared memory.
    row_bytes : int
        Bytes of a log-probability there: 4, or 8 where no conversion shall stand in the way.
    """

    slots: int
    words: int
    columns: int
    row_bytes: int

    def bytes_of_nodes(self, num_nodes: int, slots: int) -> int:
        """What stands before the rows."""
        return 16 * num_nodes + (20 + 8 * self.words) * slots

    def shared_bytes(self, problem: Problem) -> int:
        """Dynamic shared memory of a block in bytes."""
        rows = self.row_bytes * (problem.length + 1) * (self.columns + 1)
        return self.bytes_of_nodes(problem.num_nodes, self.slots) + rows


def columns_used(problem: Problem) -> int:
    """Columns that a search may read: rank r of a row is reached through r other nodes."""
    return min(problem.logprobs.shape[2], max(problem.num_nodes - 1, 1))


def make_layout(problem: Problem, *, group: int, row_bytes: int) -> Layout:
    """The layout for slots in whole groups, with as many columns as this GPU's shared memory has room for."""
    require_backend()
    slots = -(-problem.num_nodes // group) * group
    words = -(-problem.length // FIELDS)
    before = Layout(slots, words, 0, row_bytes).bytes_of_nodes(problem.num_nodes, slots)
    limit = shared_bytes_limit(problem.logprobs.device) - STATIC_BYTES
    columns = max(limit - before, 0) // (row_bytes * (problem.length + 1)) - 1
    return Layout(slots, words, min(columns, columns_used(problem)), row_bytes)


def arguments(problem: Problem, layout: Layout) -> tuple[Any, ...]:
    """The kernels' arguments, in their order."""
    names = ("tokens", "parents", "depths", "scores", "num_nodes", "tree_mask", "first_child", "next_sibling")
    return (
        problem.logprobs,
        problem.token_ids,
        problem.root_tokens,
        np.int32(layout.columns),
        np.int32(layout.slots),
        *(problem.tree[name] for name in names),
        problem.tree["input_ids"],
    )


def launch_search(kernel: Any, problem: Problem, layout: Layout) -> None:
    """Launch one of the builders, a block a request."""
    nbytes = layout.shared_bytes(problem)
    launch(kernel, (problem.batch, 1, 1), THREADS, arguments(problem, layout), results=9, shared_bytes=nbytes)


def run_search_mirror(variant: str, mirror: Any, problem: Problem) -> None:
    """Run one of the mirrors; raises ValueError for arguments on a GPU."""
    if problem.logprobs.device != HOST:
        raise ValueError(f"variant {variant!r} works on host arrays; {problem.logprobs} is on a GPU")
    token_ids, root_tokens = (x.as_numpy().astype(np.int32) for x in (problem.token_ids, problem.root_tokens))
    tree = {name: x.as_numpy() for name, x in problem.tree.items()}
    mirror(problem.logprobs.as_numpy(), token_ids, root_tokens, tree)


@cuda.jit(device=True, inline="always")
def carve(num_nodes, slots, words):
    """The block's dynamic shared memory as arrays, largest items first; the rows begin at the byte that is returned.

    ``slot_words`` is for what a builder keeps of each slot beside these: a heap, or halves of scores.
    """
    doubles = cuda.shared.array(0, types.float64)
    node_score = doubles[:num_nodes]
    slot_score = doubles[num_nodes : num_nodes + slots]
    longs = cuda.shared.array(0, types.int64)[num_nodes + slots :]
    node_info = longs[:num_nodes]
    slot_info = longs[num_nodes : num_nodes + slots]
    slot_ranks = longs[num_nodes + slots : num_nodes + (1 + words) * slots]
    first = 2 * (2 * num_nodes + (2 + words) * slots)
    slot_words = cuda.shared.array(0, types.uint32)[first : first + slots]
    return node_score, slot_score, node_info, slot_info, slot_ranks, slot_words, 4 * (first + slots)


@cuda.jit(device=True, inline="always")
def is_finite(x):
    """Neither infinite nor NaN: a candidate."""
    return x > NEG_INF and x < -NEG_INF


@cuda.jit(device=True, inline="always")
def staged(logprobs, b, columns, index):
    """What stands at an index of the rows in shared memory: a log-probability, -inf behind a row and where it ends."""
    pitch = np.uint32(columns + 1)
    d, r = index // pitch, index % pitch
    x = ROW_END
    if d < np.uint32(logprobs.shape[1]) and r < np.uint32(columns):
        x = logprobs[b, d, r]
    return x if is_finite(x) else ROW_END


@cuda.jit(device=True, inline="always")
def stage(logprobs, b, columns, rows, node_score, slot_score, node_info):
    """Phase 0 of both builders: the rows into shared memory, no entries, and the root."""
    t = np.uint32(cuda.threadIdx.x)
    size = np.uint32(rows.shape[0])
    step = np.uint32(THREADS)
    index = t
    while index < size:  # four loads are on their way before the first is used
        x_0 = staged(logprobs, b, columns, index)
        x_1 = staged(logprobs, b, columns, index + step)
        x_2 = staged(logprobs, b, columns, index + step + step)
        x_3 = staged(logprobs, b, columns, index + step + step + step)
        for x in (x_0, x_1, x_2, x_3):
            if index < size:
                rows[index] = x
            index += step
    index = t
    while index < np.uint32(slot_score.shape[0]):
        slot_score[index] = NEG_INF
        index += step
    if t == 0:
        node_score[0] = 0.0
        node_info[0] = 0
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def logprob_of(rows, columns, logprobs, b, depth, rank):
    """Log-probability of a rank at a depth from 1 on; -inf where there is no candidate."""
    if rank < columns or depth > logprobs.shape[1]:
        return np.float64(rows[(depth - 1) * (columns + 1) + rank])
    if rank >= logprobs.shape[2]:
        return NEG_INF
    x = np.float64(logprobs[b, depth - 1, rank])
    return x if is_finite(x) else NEG_INF


@cuda.jit(device=True, inline="always")
def pack(parent, last, depth, at):
    """An entry's integers in one: parent node, node of the rank before its own, depth, and where the rows hold it."""
    upper = np.uint32(np.uint32(parent) << SHORT) | np.uint32(last)
    lower = np.uint32(np.uint32(depth) << AT_BITS) | np.uint32(at)
    return (np.int64(upper) << np.int64(32)) | np.int64(lower)


@cuda.jit(device=True, inline="always")
def unpack(info):
    """The inverse of `pack`."""
    upper, lower = np.uint32(info >> np.int64(32)), np.uint32(info & np.int64(0xFFFFFFFF))
    parent, last = np.uint32(upper >> SHORT), np.uint32(upper & np.uint32(0xFFFF))
    return parent, last, np.uint32(lower >> AT_BITS), np.uint32(lower & AT_MASK)


@cuda.jit(device=True, inline="always")
def word_of(depth):
    """Index of the word that holds the rank at a depth from 1 on."""
    return np.uint32(np.uint32(depth) - np.uint32(1)) // np.uint32(FIELDS)


@cuda.jit(device=True, inline="always")
def one_at(depth):
    """The value of 1 in the field of a depth from 1 on."""
    place = np.uint32(np.uint32(depth) - np.uint32(1)) % np.uint32(FIELDS)
    return np.int64(1) << np.int64(np.uint32(FIELD_BITS * (FIELDS - 1)) - np.uint32(FIELD_BITS) * place)


@cuda.jit(device=True, inline="always")
def stands_before(slot_score, slot_ranks, words, x, y):
    """Whether the entry in slot x is taken before the one in slot y."""
    if slot_score[x] != slot_score[y]:
        return slot_score[x] > slot_score[y]
    slots = np.uint32(slot_score.shape[0])
    last = slots * np.uint32(words - 1)
    x = np.uint32(x)
    y = np.uint32(y)
    while last > 0 and slot_ranks[x] == slot_ranks[y]:
        x = np.uint32(x + slots)
        y = np.uint32(y + slots)
        last = np.uint32(last - slots)
    return slot_ranks[x] < slot_ranks[y]


@cuda.jit(device=True, inline="always")
def write_tree(
    token_ids, root_tokens, b, columns, count, node_score, node_info, tokens, parents, depths, scores, num_nodes,
    tree_mask, first_child, next_sibling, input_ids,
):  # fmt: skip
    """Phase 2 of both builders: all threads write what the search left in shared memory."""
    t = cuda.threadIdx.x
    room = tokens.shape[1]
    words = np.uint32(tree_mask.shape[2])
    pitch = np.uint32(columns + 1)
    root = np.int32(root_tokens[b])
    for n in range(t, room, THREADS):
        parent, _, depth, at = unpack(node_info[n] if n < count else 0)
        token = root
        if depth > 0:
            d = np.uint32(depth - np.uint32(1))
            token = np.int32(token_ids[b, d, np.uint32(at - np.uint32(d * pitch))])
        tokens[b, n] = token if n < count else -1
        input_ids[b, n] = token
        parents[b, n] = np.int32(parent) if depth > 0 else -1
        depths[b, n] = depth
        scores[b, n] = node_score[n] if n < count else NEG_INF
        first_child[b, n] = -1
        next_sibling[b, n] = -1
    cuda.syncthreads()
    for n in range(1 + t, count, THREADS):
        parent, last, depth, at = unpack(node_info[n])
        if at == np.uint32(np.uint32(depth - np.uint32(1)) * pitch):
            first_child[b, parent] = n
        else:
            next_sibling[b, last] = n
    index = np.uint32(t)
    while index < np.uint32(tree_mask.shape[1]) * words:
        n, w = index // words, index % words
        bits = np.uint32(0)
        if n < np.uint32(count):
            j = n
            while j >= w * np.uint32(32):  # ancestors have falling indices
                if j < (w + np.uint32(1)) * np.uint32(32):
                    bits |= np.uint32(1) << (j % np.uint32(32))
                if j == 0:
                    break
                j = np.uint32((node_info[j] >> 48) & 0xFFFF)
        tree_mask[b, n, w] = bits
        index += np.uint32(THREADS)
    if t == 0:
        num_nodes[b] = count


def mirror_word_of(depth):
    """Index of the word that holds the rank at a depth from 1 on."""
    return (int(depth) - 1) // FIELDS


def mirror_one_at(depth):
    """The value of 1 in the field of a depth from 1 on."""
    return np.int64(1) << np.int64(FIELD_BITS * (FIELDS - 1 - (int(depth) - 1) % FIELDS))


def mirror_rows(logprobs, b):
    """Phase 0 of both mirrors: the candidates of each row as float64, up to the first that is not finite."""
    rows = []
    for row in logprobs[b]:
        finite = np.isfinite(row)
        rows.append(row[: row.size if finite.all() else int(np.argmin(finite))].astype(np.float64))
    return rows


def mirror_write_tree(token_ids, root_tokens, b, count, node_score, nodes, tree):
    """Phase 2 of both mirrors; ``nodes`` are parent, depth, rank, first child and next sibling of each node."""
    parent, depth, rank, first, following = nodes
    tokens, input_ids, tree_mask = tree["tokens"][b], tree["input_ids"][b], tree["tree_mask"][b]
    tokens[:], input_ids[:], tree_mask[:] = -1, root_tokens[b], 0
    tree["parents"][b], tree["depths"][b], tree["scores"][b] = parent, depth, node_score
    tree["first_child"][b], tree["next_sibling"][b], tree["num_nodes"][b] = first, following, count
    tokens[0] = root_tokens[b]
    for n in range(count):
        if n > 0:
            tokens[n] = input_ids[n] = token_ids[b, depth[n] - 1, rank[n]]
            tree_mask[n] = tree_mask[parent[n]]
        tree_mask[n, n // 32] |= np.uint32(1) << np.uint32(n % 32)
