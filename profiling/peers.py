"""What else computes tree-verify attention on this machine: calls that are measured beside ours, in the same run.

- torch_eager: matrix products, logsumexp and softmax, one after the other.
- torch_compiled: the same through torch.compile. The keys are padded to a multiple of `PADDING`, since odd lengths cost
  cuBLAS several times as much, and the mask is added.
- torch_sdpa: scaled_dot_product_attention with the heads folded into the rows and an additive mask; it has no lse.
- torch_flex: flex_attention, compiled, heads folded, a mask by block.
- triton: triton_attention.py.
- flashinfer, flashmla: their MLA kernels for paged caches. They take no tree mask: what is measured is causal, and is
  held against causal attention. Left out where they cannot be imported.

What does not depend on the queries and the cache's contents is prepared ahead of the call and is not timed: padding,
masks, block tables, plans, compilation.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from ddtree_numba.device.arrays import HOST
from ddtree_numba.device.launch import multiprocessors

PADDING = 64  # keys
PAGE = 64  # what FlashMLA takes
WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation has
LN_2 = 0.6931471805599453
MOST_COMPILED = 64  # shapes of one function; PyTorch stops at 8, and flex_attention then fails

# Relative Frobenius error of out, and of lse relative to max(1, |lse|), that a peer may have to be timed. For bfloat16,
# what PyTorch's scores rounded to bfloat16 lead to at logits of a few nats, with room.
BOUNDS = {"float32": (2e-5, 1e-5), "float16": (4e-3, 2e-3), "bfloat16": (2e-2, 1e-2)}

Results = tuple[Any, Any]  # out [B, Q, H, R] and lse [B, Q, H], or None for an lse that a peer does not have


class Peer(NamedTuple):
    """A call, and the arrays that it is called with: of these the harness may make copies."""

    call: Callable[..., Results]
    arrays: tuple[Any, ...]


class Problem(NamedTuple):
    """The arguments of `verify_attention`, and its live rows alone as one batch of equal lengths or several."""

    torch: Any
    inputs: dict[str, Any]
    parts: list[tuple[Any, Any, Any]]  # q, cache [B, prefix + Q, D], mask as bool
    results: dict[str, Any]
    sm_scale: float

    @property
    def rank(self) -> int:
        return self.results["out"].shape[3]

    @property
    def one_part(self) -> tuple[Any, Any, Any]:
        if len(self.parts) != 1:
            raise ValueError("this takes one batch of equal lengths")
        return self.parts[0]


def eager(problem: Problem) -> Peer:
    """Batch after batch where lengths differ; a node that sees nothing gets 0 and -inf."""
    torch, sm_scale, rank = problem.torch, problem.sm_scale, problem.rank

    def dense(q: Any, cache: Any, mask: Any) -> Results:
        batch, num_nodes, num_heads, head_dim = q.shape
        scores = torch.matmul(q.reshape(batch, -1, head_dim), cache.transpose(1, 2)).mul_(sm_scale)
        scores = scores.view(batch, num_nodes, num_heads, -1)
        scores[..., -num_nodes:].masked_fill_(~mask[:, :, None, :], float("-inf"))
        lse = torch.logsumexp(scores, -1)
        p = torch.softmax(scores, -1).masked_fill_(lse[..., None] == float("-inf"), 0)
        out = torch.matmul(p.view(batch, num_nodes * num_heads, -1), cache[..., :rank])
        return out.view(*q.shape[:3], -1), lse

    if len(problem.parts) == 1:
        q, cache, mask = problem.parts[0]
        return Peer(lambda q, cache: dense(q, cache, mask), (q, cache))

    def call() -> Results:
        outs, lses = zip(*(dense(*part) for part in problem.parts), strict=True)
        return torch.cat(outs), torch.cat(lses)

    return Peer(call, ())


def padded(problem: Problem) -> tuple[Any, Any, Any]:
    """Queries, the cache with rows of 0 behind it, and what is added to the scores [B, Q, keys]: 0 or -inf."""
    torch, (q, cache, mask) = problem.torch, problem.one_part
    num_nodes, keys = q.shape[1], cache.shape[1]
    more = -keys % PADDING
    bias = torch.zeros((*q.shape[:2], keys + more), dtype=q.dtype, device=q.device)
    bias[..., keys - num_nodes : keys].masked_fill_(~mask, float("-inf"))
    bias[..., keys:] = float("-inf")
    return q, torch.nn.functional.pad(cache, (0, 0, 0, more)), bias


@functools.cache
def compiled_attention(torch: Any, sm_scale: float, rank: int) -> Callable[..., Results]:
    """One function for all sizes, which are dynamic: a compilation for each shape would take longer than measuring."""
    torch._dynamo.config.recompile_limit = MOST_COMPILED

    def attention(q: Any, cache: Any, bias: Any) -> Results:
        batch, num_nodes, num_heads, _ = q.shape
        scores = torch.matmul(q.flatten(1, 2), cache.transpose(1, 2)).view(batch, num_nodes, num_heads, -1)
        scores = scores.float() * sm_scale + bias[:, :, None, :]
        p = torch.softmax(scores, -1).to(q.dtype)
        out = torch.matmul(p.flatten(1, 2), cache[..., :rank])
        return out.view(batch, num_nodes, num_heads, rank), torch.logsumexp(scores, -1)

    return torch.compile(attention, dynamic=True)


def compiled(problem: Problem) -> Peer:
    q, cache, bias = padded(problem)
    attention = compiled_attention(problem.torch, problem.sm_scale, problem.rank)
    return Peer(lambda q, cache: attention(q, cache, bias), (q, cache))


def sdpa(problem: Problem) -> Peer:
    attention, rank, sm_scale = problem.torch.nn.functional.scaled_dot_product_attention, problem.rank, problem.sm_scale
    q, cache, bias = padded(problem)
    batch, num_nodes, num_heads, head_dim = q.shape
    bias = bias[:, None, :, None, :].expand(-1, -1, -1, num_heads, -1).flatten(2, 3)

    def call(q: Any, cache: Any) -> Results:
        keys = cache[:, None]
        folded = q.reshape(batch, 1, -1, head_dim)
        out = attention(folded, keys, keys[..., :rank], attn_mask=bias, scale=sm_scale)
        return out.view(batch, num_nodes, num_heads, rank), None

    return Peer(call, (q, cache))


@functools.cache
def compiled_flex(torch: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = MOST_COMPILED
    return torch.compile(flex_attention, dynamic=False)


def flex(problem: Problem) -> Peer:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    torch, rank, sm_scale = problem.torch, problem.rank, problem.sm_scale
    q, cache, mask = problem.one_part
    batch, num_nodes, num_heads, head_dim = q.shape
    keys = cache.shape[1]
    prefix, last, attention, aux = keys - num_nodes, num_nodes - 1, compiled_flex(torch), AuxRequest(lse=True)

    def sees(b: Any, _: Any, row: Any, key: Any) -> Any:
        tree_key = torch.clamp(key - prefix, 0, last)
        node = torch.clamp(row // num_heads, 0, last)  # rows are rounded up to whole blocks
        return (key < prefix) | mask[b, node, tree_key]

    blocks = create_block_mask(sees, batch, None, num_nodes * num_heads, keys, device=q.device)

    def call(q: Any, cache: Any) -> Results:
        rows = cache[:, None]
        folded = q.reshape(batch, 1, -1, head_dim)
        out, more = attention(folded, rows, rows[..., :rank], block_mask=blocks, scale=sm_scale, return_aux=aux)
        return out.view(batch, num_nodes, num_heads, rank), more.lse.view(batch, num_nodes, num_heads)

    return Peer(call, (q, cache))


def triton(problem: Problem) -> Peer:
    import triton_attention

    inputs, shape = problem.inputs, {"sm_scale": problem.sm_scale, "multiprocessors": multiprocessors(HOST)}
    call = triton_attention.attention(problem.torch, inputs, **problem.results, **shape)
    return Peer(call, (inputs["q"], inputs["kv_cache"]))


def pages(problem: Problem) -> tuple[Any, Any, Any]:
    """The cache as pages [num_pages, PAGE, D], the block table, and the lengths with the tree's rows."""
    torch, (q, cache, _) = problem.torch, problem.one_part
    batch, keys, head_dim = cache.shape
    cache = torch.nn.functional.pad(cache, (0, 0, 0, -keys % PAGE)).view(-1, PAGE, head_dim)
    table = torch.arange(len(cache), dtype=torch.int32, device=q.device).view(batch, -1)
    return cache, table, torch.full((batch,), keys, dtype=torch.int32, device=q.device)


def flashinfer(problem: Problem) -> Peer:
    """Causal. Its lse is of base 2."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    torch, rank = problem.torch, problem.rank
    q, (cache, table, lengths) = problem.one_part[0], pages(problem)
    batch, num_nodes, num_heads, head_dim = q.shape

    def steps(size: int) -> Any:
        return torch.arange(0, (batch + 1) * size, size, dtype=torch.int32, device=q.device)

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    widths = (num_heads, rank, head_dim - rank, PAGE, True, problem.sm_scale, q.dtype, q.dtype)
    wrapper.plan(steps(num_nodes), steps(table.shape[1]), table.flatten(), lengths, *widths)

    def call(q: Any, cache: Any) -> Results:
        rows = q.flatten(0, 1)
        parts = (rows[..., :rank], rows[..., rank:], cache[..., :rank], cache[..., rank:])
        out, lse = wrapper.run(*parts, return_lse=True)
        return out.view(batch, num_nodes, num_heads, rank), lse.view(batch, num_nodes, num_heads) * LN_2

    return Peer(call, (q, cache))


def flashmla(problem: Problem) -> Peer:
    """Causal. Its lse is [B, H, Q]."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    q, (cache, table, lengths) = problem.one_part[0], pages(problem)
    plan = get_mla_metadata(lengths, q.shape[1] * q.shape[2], 1)

    def call(q: Any, cache: Any) -> Results:
        given = (q, cache[:, :, None], table, lengths, problem.rank, *plan)
        out, lse = flash_mla_with_kvcache(*given, softmax_scale=problem.sm_scale, causal=True)
        return out, lse.transpose(1, 2)

    return Peer(call, (q, cache))


PEERS: dict[str, Callable[[Problem], Peer]] = {
    "torch_eager": eager,
    "torch_compiled": compiled,
    "torch_sdpa": sdpa,
    "torch_flex": flex,
    "triton": triton,
    "flashinfer": flashinfer,
    "flashmla": flashmla,
}
PACKAGES = {"triton": "triton", "flashinfer": "flashinfer", "flashmla": "flash_mla"}
CAUSAL = ("flashinfer", "flashmla")
NOTES = {
    "torch_sdpa": "no lse",
    "flashinfer": "causal: takes no tree mask",
    "flashmla": "causal: takes no tree mask",
}


def takes(name: str, dtype: str) -> bool:
    """Whether a peer has what it needs beside PyTorch, and kernels for a dtype."""
    there = name not in PACKAGES or importlib.util.find_spec(PACKAGES[name]) is not None
    return there and not (name in CAUSAL and dtype == "float32")
