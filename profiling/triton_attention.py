"""Tree-verify MLA attention in Triton: what one would write today without this package, as a peer to measure against.

One program has a tile of a request's (node, head) rows and one part of its keys. It goes over them in tiles with an
online softmax, both products on the tensor cores, and leaves a normalized partial state; a second kernel merges the
states of a row. With a single part the first kernel writes the results themselves. The cache may be paged; a contiguous
one has a page for each request.

Float32 is multiplied as such: as TF32, Triton's default, it would keep three digits of seven. Needs Triton, which comes
with PyTorch.

Source: online softmax (Milakov and Gimelshein, arXiv 1805.02867); split keys: Flash-Decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

MOST_SPLITS = 32
START = 2  # what a part costs beside its keys, in key tiles: queries in, state out
LOG2_E, LN_2 = 1.4426950408889634, tl.constexpr(0.6931471805599453)


class Tiles(NamedTuple):
    """Of a program: rows, keys at a time, warps, key tiles on their way."""

    rows: int
    keys: int
    warps: int
    stages: int


TILES = {2: Tiles(64, 64, 8, 2), 4: Tiles(32, 16, 8, 2)}  # by bytes of an element


@triton.jit(do_not_specialize=["num_nodes", "num_heads", "page_size", "max_pages", "splits"])
def attend(
    q,
    cache,
    table,
    lengths,
    sees,
    out,
    lse,
    scale,
    num_nodes,
    num_heads,
    page_size,
    max_pages,
    splits,
    R: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """A partial state of a tile of rows; scale makes logits of base 2. out and lse: [B, splits, Q * H, ...]."""
    split, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    num_rows = num_nodes * num_heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    node = tl.minimum(row // num_heads, num_nodes - 1)
    latent, rope = tl.arange(0, R), tl.arange(0, P)
    at = (b * num_rows + row) * (R + P)
    q_nope = tl.load(q + at[:, None] + latent[None, :], mask=live[:, None], other=0.0)
    q_pe = tl.load(q + at[:, None] + R + rope[None, :], mask=live[:, None], other=0.0)
    prefix = tl.load(lengths + b)
    stop = prefix + num_nodes
    part = tl.cdiv(tl.cdiv(stop, KEYS), splits) * KEYS
    first = split * part
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, R], tl.float32)
    for start in range(first, tl.minimum(first + part, stop), KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < stop
        page = tl.load(table + b * max_pages + key // page_size, mask=inside, other=0).to(tl.int64)
        place = (page * page_size + key % page_size) * (R + P)
        k_nope = tl.load(cache + place[:, None] + latent[None, :], mask=inside[:, None], other=0.0)
        k_pe = tl.load(cache + place[:, None] + R + rope[None, :], mask=inside[:, None], other=0.0)
        s = tl.dot(q_nope, tl.trans(k_nope), input_precision="ieee")
        s = tl.dot(q_pe, tl.trans(k_pe), acc=s, input_precision="ieee") * scale
        j = key - prefix
        in_tree = (j >= 0) & inside
        bit = (b * num_nodes + node)[:, None] * num_nodes + j[None, :]
        seen = tl.load(sees + bit, mask=in_tree[None, :] & live[:, None], other=0) != 0
        s = tl.where((j < 0)[None, :] | seen, s, float("-inf"))
        higher = tl.maximum(m, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf - -inf would be NaN
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(k_nope.dtype), k_nope, acc=acc * shrink[:, None], input_precision="ieee")
        m = higher
    empty = l == 0.0
    state = (b * splits + split) * num_rows + row
    value = acc / tl.where(empty, 1.0, l)[:, None]
    tl.store(out + state[:, None] * R + latent[None, :], value.to(out.dtype.element_ty), mask=live[:, None])
    of_row = tl.where(empty, float("-inf"), (m + tl.log2(tl.where(empty, 1.0, l))) * LN_2)
    tl.store(lse + state, of_row, mask=live)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def combine(states, state_lses, out, lse, num_rows, splits, R: tl.constexpr):
    """A program a row: the state of all its parts."""
    b, row = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = tl.arange(0, R)
    first = b * splits * num_rows + row
    m = tl.full([1], float("-inf"), tl.float32)
    for n in range(splits):
        m = tl.maximum(m, tl.load(state_lses + first + n * num_rows))
    base = tl.where(m == float("-inf"), 0.0, m)
    l = tl.zeros([1], tl.float32)
    acc = tl.zeros([R], tl.float32)
    for n in range(splits):
        p = tl.exp(tl.load(state_lses + first + n * num_rows) - base)
        l += p
        acc += p * tl.load(states + (first + n * num_rows) * R + column)
    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    at = b * num_rows + row
    tl.store(out + at * R + column, (acc / l).to(out.dtype.element_ty))
    tl.store(lse + at + tl.arange(0, 1), tl.where(empty, float("-inf"), base + tl.log(l)))


def parts(programs: int, key_tiles: int, multiprocessors: int) -> int:
    """In how many parts the keys are split: the waves of programs, each as long as its part, should take least."""

    def cost(splits: int) -> int:
        return -(-programs * splits // multiprocessors) * (-(-key_tiles // splits) + START)

    return min(range(1, min(MOST_SPLITS, key_tiles) + 1), key=cost)


def attention(
    torch: Any,
    inputs: dict[str, Any],
    out: Any,
    lse: Any,
    *,
    sm_scale: float,
    multiprocessors: int,
    splits: int | None = None,
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A call with q and the cache that computes out and lse of verify_attention's arguments, all in C order.

    The mask is bool. splits: parts of the keys; default: what fills the GPU.
    """
    q, cache, lengths = inputs["q"], inputs["kv_cache"], inputs["cache_seqlens"]
    batch, num_nodes, num_heads, head_dim = q.shape
    table = inputs.get("block_table")
    if table is None:
        table = torch.arange(batch, dtype=torch.int32, device=q.device)[:, None]
    page_size, max_pages, rank = cache.shape[1], table.shape[1], out.shape[3]
    for x in (q, cache, table, out, lse):
        assert x.is_contiguous()
    sees = inputs["tree_mask"].contiguous().view(torch.uint8)
    tiles, num_rows = TILES[q.element_size()], num_nodes * num_heads
    row_tiles = -(-num_rows // tiles.rows)
    if splits is None:
        longest = int(lengths.max()) + num_nodes
        splits = parts(batch * row_tiles, -(-longest // tiles.keys), multiprocessors)
    states = (out, lse)
    if splits > 1:
        shape = (batch, splits, num_rows)
        states = (torch.empty((*shape, rank), device=q.device), torch.empty(shape, device=q.device))

    def call(q: Any, cache: Any) -> tuple[Any, Any]:
        attend[row_tiles, splits, batch](
            *(q, cache, table, lengths, sees, *states, sm_scale * LOG2_E),
            *(num_nodes, num_heads, page_size, max_pages, splits),
            R=rank,
            P=head_dim - rank,
            ROWS=tiles.rows,
            KEYS=tiles.keys,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if splits > 1:
            combine[num_rows, batch](*states, out, lse, num_rows, splits, R=rank, num_warps=4)
        return out, lse

    return call
