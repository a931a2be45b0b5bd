"""verify_attention: the operator that users call. It checks, chooses a variant and hands over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ddtree_numba.attention import flash, mma, remembered, three_phase, tuned, wgmma_host
from ddtree_numba.attention.problem import Problem, make_problem
from ddtree_numba.device import runtime
from ddtree_numba.device.arrays import HOST, require_flag, require_integer, require_one_of, shown
from ddtree_numba.device.recording import recording

# Where variants cross, as measured on an H200 (profiling/results/nvidia-h200/verify_attention.csv).
FEW_KEYS = 32  # up to which three_phase, one kernel instead of two, is faster than flash
MMA_KEYS = 64  # of a request, from which mma is faster than flash
WGMMA_PAIRS = 2**17  # of a row and a key, in all requests, from which wgmma is faster than mma, its planning included
PLANNED_PAIRS = 2**12  # likewise with a plan that is given
VARIANTS = (
    "auto",
    "three_phase",
    "three_phase_numpy",
    "flash",
    "flash_numpy",
    "mma",
    "mma_numpy",
    "wgmma",
    "wgmma_numpy",
)


def verify_attention(
    q: Any,
    kv_cache: Any,
    cache_seqlens: Any,
    tree_mask: Any,
    *,
    sm_scale: float,
    kv_lora_rank: int = 512,
    block_table: Any = None,
    max_seqlen: int | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    variant: str = "auto",
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    workspace: Any = None,
    plan: Any = None,
    validate: bool = False,
) -> tuple[Any, Any]:
    """MLA attention of a draft tree in absorbed form: each node attends to the prefix and to its own ancestors.

    For node i of request b and head h, over the visible keys k::

        s[k]           = (q[b, i, h, :] . row[k, :]) * sm_scale
        out[b, i, h, :] = sum_k softmax(s)[k] * row[k, :kv_lora_rank]
        lse[b, i, h]    = log(sum_k exp(s[k]))

    Visible are the prefix rows 0 .. cache_seqlens[b] - 1 and, of the tree's Q rows that stand right behind them, those
    whose bit is set in ``tree_mask[b, i]``. A node that sees nothing gets out 0 and lse -inf. The value projection W_UV
    is left to a GEMM.

    Parameters
    ----------
    q : float [B, Q, H, D], or a pair float [B, Q, H, R], float [B, Q, H, P]
        Queries with W_UK absorbed, followed by their rotary part; D = R + P, R = kv_lora_rank, P = qk_rope_head_dim,
        both multiples of 16. float32, float16, bfloat16, or uint16 read as bfloat16 bits. Any strides.
    kv_cache : float [B, S, D], or paged float [num_pages, page_size, D]
        A row is ckv (R columns) followed by kpe (P columns), shared by all heads. An axis of length 1 for the KV head
        may stand before D. Any of the dtypes of q, not necessarily the same. Any strides.
    cache_seqlens : int32 [B]
        Prefix length of each request in tokens, the tree's rows not counted. Clamped to 0 .. max_seqlen.
    tree_mask : bool [B, Q, Q], or uint32 [B, Q, ceil(Q/32)] (bit j % 32 of word j // 32), or None
        Node i sees tree row j. None means causal: node i sees 0 .. i.
    sm_scale : float
        Softmax scale; see `KIMI_K2_SM_SCALE` and `yarn_sm_scale`. Never D**-0.5.
    kv_lora_rank : int
        R, the columns that are also the value.
    block_table : int32 [B, max_pages], optional
        Page of each run of page_size tokens; given, the cache is paged. Entries behind the live rows may hold anything.
    max_seqlen : int, optional
        Bound on every prefix length, in tokens; default: capacity - Q. It sizes three_phase's shared memory, and the
        grid and workspace of flash.
    num_splits : int, optional
        Even parts that each row's keys are split into; three_phase takes 1 only. Default: flash and mma share all work
        out evenly over the GPU, however different the lengths, and three_phase does not split.
    batch_invariant : bool
        A row's bits must not depend on the other requests. flash and mma then split every 2,048 keys; three_phase, and
        the others with ``num_splits``, always keep this.
    variant : {"auto", "three_phase", "flash", "mma", "wgmma", and each but "auto" with _numpy behind it}
        "auto": the fastest by sizes: wgmma or mma where they take the arguments, except in the simulator; else flash,
        but three_phase for at most 32 keys (max_seqlen + Q), and where flash does not take the widths. What
        profiling/tune.py found on this GPU decides between these two (docs/profiling.md). wgmma and mma round weights
        to 16 bits (docs/verify_attention.md has the errors); "flash" is float32 throughout.
        "mma": tensor cores, for q and a cache both bfloat16 or both float16, R = 512, P = 64, rows that can be read 16
        bytes at a time, compute capability 8.0 and later.
        "wgmma": Hopper's tensor cores, compute capability 9.x, for the same dtypes and widths; nodes and heads of q one
        axis of rows, pages of a multiple of 64 tokens or a contiguous cache, no num_splits, no batch_invariant
        (docs/wgmma.md). Its first call for a dtype, out_dtype and kind of mask compiles for some 8 seconds.
        Those in _numpy are the kernels' NumPy mirrors, for host arrays; they need no GPU and no simulator.
    out : float [B, Q, H, R], optional
        Written to in place of a new array; any strides, no overlap with the inputs.
    lse : float32 [B, Q, H], optional
        Likewise; natural logarithm.
    out_dtype : dtype, optional
        float32, float16 or bfloat16; default: that of q.
    workspace : array, optional
        Scratch memory for flash, mma and wgmma in place of a new array: `workspace_bytes` bytes of any dtype, in C
        order, at an address that is a multiple of 16. Nothing is kept in it between calls. three_phase needs none.
    plan : AttentionPlan, optional
        For wgmma: what `plan_attention` made of the lengths, for all layers of a step. Default: a call makes its own.
        With "auto" it is checked, and not used where another variant is taken.
    validate : bool
        Also check contents (lengths, live table entries, mask bits), which copies them to the host.

    Returns
    -------
    out : float [B, Q, H, R]
        Latent output, of the caller's kind of array.
    lse : float32 [B, Q, H]
        Log-sum-exp of the visible scores in nats; -inf where nothing is visible.

    Raises
    ------
    TypeError
        An argument is no array that kernels take, or has the wrong dtype.
    ValueError
        A wrong shape, alignment, device, scale, bound or variant; an output that overlaps an input; with ``validate``,
        wrong contents; a workspace that is too small; with three_phase, a score row that exceeds the GPU's shared
        memory; with flash, a kv_lora_rank above 1,024; with mma and wgmma, other widths, strides, pages or options than
        they take; a plan for other sizes.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream (PyTorch's, CuPy's, Numba's default) without synchronizing, except for NumPy
    arrays, which are copied to the device and back. Rows 0 .. length + Q - 1 of a live request must be finite; rows
    behind them and unused pages are never read.

    Source: absorbed MLA, DeepSeek-V2 (arXiv 2405.04434), section 2.1; tree attention, DDTree (arXiv 2604.12989).
    """
    key = None
    if validate is False and (plan is None or type(plan) is wgmma_host.AttentionPlan):
        queries = q if type(q) in (tuple, list) else (q,)
        key = remembered.key_of(
            (*queries, kv_cache, cache_seqlens, tree_mask, block_table, out, lse, workspace),
            (
                sm_scale,
                kv_lora_rank,
                max_seqlen,
                num_splits,
                batch_invariant,
                variant,
                out_dtype,
                None if plan is None else plan.facts,
                queries is q,
            ),
        )
    if key is not None:
        found = remembered.find(key)
        if isinstance(found, remembered.Allocating):
            out, lse, workspace, key = found.allocate(queries[0], out, lse, workspace)
            found = remembered.find(key)
        if isinstance(found, remembered.Call):
            found.start()
            return out, lse
    with recording() as made:
        results = _checked_and_launched(
            q,
            kv_cache,
            cache_seqlens,
            tree_mask,
            sm_scale=sm_scale,
            kv_lora_rank=kv_lora_rank,
            block_table=block_table,
            max_seqlen=max_seqlen,
            num_splits=num_splits,
            batch_invariant=batch_invariant,
            variant=variant,
            out=out,
            lse=lse,
            out_dtype=out_dtype,
            workspace=workspace,
            plan=plan,
            validate=validate,
        )
    if key is not None:
        remembered.remember(key, made, results)
    return results


def _checked_and_launched(
    q: Any,
    kv_cache: Any,
    cache_seqlens: Any,
    tree_mask: Any,
    *,
    num_splits: Any,
    batch_invariant: Any,
    variant: Any,
    plan: Any,
    **others: Any,
) -> tuple[Any, Any]:
    """`verify_attention` of a call that is not remembered."""
    require_one_of("variant", variant, VARIANTS)
    num_splits, batch_invariant = require_splits(num_splits), require_flag("batch_invariant", batch_invariant)
    if variant.startswith("three_phase") and num_splits not in (None, 1):
        raise ValueError(f"num_splits is {num_splits}; variant {variant!r} takes 1 or None, variant 'flash' any number")
    if plan is not None and variant not in ("auto", "wgmma"):
        raise ValueError(
            f"plan is {shown(plan)}; variant {variant!r} takes None, variants 'auto' and 'wgmma' an AttentionPlan"
        )
    problem = make_problem(q, kv_cache, cache_seqlens, tree_mask, **others)
    found = None
    if variant == "auto":
        found = tuned.of(problem.q_nope.device)
        if plan is not None:
            wgmma_host.require_plan(plan, problem)
        variant = chosen(problem, num_splits, batch_invariant, plan is not None, found)
    if variant == "three_phase_numpy":
        three_phase.run_mirror(problem)
    elif variant == "three_phase":
        three_phase.run(problem)
    elif variant == "flash_numpy":
        flash.run_mirror(problem, flash.plan_of(problem, num_splits, batch_invariant))
    elif variant == "mma":
        mma.run(problem, mma.plan_of(problem, num_splits, batch_invariant))
    elif variant == "mma_numpy":
        mma.run_mirror(problem, mma.plan_of(problem, num_splits, batch_invariant))
    elif variant == "wgmma":
        wgmma_host.check(problem, num_splits, batch_invariant, plan)
        wgmma_host.run(problem, plan)
    elif variant == "wgmma_numpy":
        wgmma_host.run_mirror(problem, num_splits, batch_invariant)
    else:
        flash.run(problem, flash.plan_of(problem, num_splits, batch_invariant, tuned=found))
    return problem.results


def chosen(
    problem: Problem, num_splits: int | None, batch_invariant: bool, planned: bool, found: flash.Tuned | None
) -> str:
    """What ``variant="auto"`` takes for checked arguments."""
    candidates = likely(
        problem.batch,
        problem.num_nodes,
        problem.num_heads,
        problem.max_seqlen,
        num_splits=num_splits,
        batch_invariant=batch_invariant,
        planned=planned,
        few_keys=FEW_KEYS if found is None else found.few_keys,
    )
    return first_of(candidates, lambda variant: takes(variant, problem))


def likely(
    batch: int,
    num_nodes: int,
    num_heads: int,
    max_seqlen: int,
    *,
    num_splits: int | None,
    batch_invariant: bool,
    planned: bool,
    few_keys: int = FEW_KEYS,
) -> tuple[str, ...]:
    """What ``variant="auto"`` may take for these sizes, the fastest first. docs/verify_attention.md has the times.

    wgmma's bits depend on the other requests in any case, so its limit may count them. Those of mma and three_phase do
    not: with num_splits or batch_invariant, a row's bits, and so its variant, must be the same in every batch.
    """
    keys, found = max_seqlen + num_nodes, []
    pairs = batch * num_nodes * num_heads * keys
    if num_splits is None and not batch_invariant and pairs >= (PLANNED_PAIRS if planned else WGMMA_PAIRS):
        found.append("wgmma")
    if keys >= MMA_KEYS:
        found.append("mma")
    if num_splits is not None and num_splits > 1:
        return (*found, "flash")  # and flash says what is wrong, if it is
    if keys > few_keys:
        found.append("flash")
    return (*found, "three_phase")


def first_of(candidates: Sequence[str], fits: Callable[[str], bool]) -> str:
    """The first that takes the arguments; the last is not asked."""
    return next(filter(fits, candidates[:-1]), candidates[-1])


def takes(variant: str, problem: Problem) -> bool:
    """Whether ``variant="auto"`` may take it here for checked arguments.

    Not the simulator's mma: what runs there is small, and meant to be exact.
    """
    if variant == "wgmma":
        return not wgmma_host.takes(problem)
    if variant == "mma":
        return not runtime.SIMULATOR and mma.takes(problem)
    return bool(flash.fitting_tiles(problem.kv_lora_rank, problem.head_dim, problem.q_nope.device))


def flops(
    num_nodes: int, num_heads: int, prefixes: Sequence[int], *, kv_lora_rank: int = 512, qk_rope_head_dim: int = 64
) -> int:
    """Multiplications and additions of `verify_attention`: each row times all of its request's keys, twice.

    A key of the tree counts whether the mask lets a node see it or not. prefixes: of the requests, in tokens.
    """
    keys = sum(prefix + num_nodes for prefix in prefixes)
    return 2 * num_nodes * num_heads * keys * (kv_lora_rank + qk_rope_head_dim + kv_lora_rank)


def bytes_moved(
    num_nodes: int,
    num_heads: int,
    prefixes: Sequence[int],
    itemsize: int,
    *,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
) -> int:
    """Bytes that `verify_attention` must move: queries and live cache rows read once, out and lse written.

    Elements of ``itemsize`` bytes; lengths of 4 bytes and a bool mask are read as well.
    """
    head_dim, rows = kv_lora_rank + qk_rope_head_dim, len(prefixes) * num_nodes * num_heads
    read = (rows + sum(prefix + num_nodes for prefix in prefixes)) * head_dim * itemsize
    read += len(prefixes) * (4 + num_nodes * num_nodes)
    return read + rows * (kv_lora_rank * itemsize + 4)


def workspace_bytes(
    batch: int,
    num_nodes: int,
    num_heads: int,
    max_seqlen: int,
    *,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    prefix_tail: bool = False,
    variant: str = "auto",
) -> int:
    """Bytes that ``workspace`` must have for these sizes on the current GPU.

    Parameters
    ----------
    batch, num_nodes, num_heads : int
        B, Q, H.
    max_seqlen : int
        Bound on every prefix length, in tokens, as it is passed on or as it follows from the cache: capacity - Q.
    kv_lora_rank, qk_rope_head_dim : int
        R and P.
    num_splits, batch_invariant
        As they are passed on.
    prefix_tail : bool
        For `verify_attention_prefix_tail`, which also keeps the tail's state there.
    variant
        As it is passed on.

    Returns
    -------
    int
        A multiple of 16.

    Raises
    ------
    TypeError
        A size is no integer.
    ValueError
        The variant does not take the widths, or there are more parts than a grid holds.
    """
    given = {"batch": batch, "num_nodes": num_nodes, "num_heads": num_heads, "max_seqlen": max_seqlen}
    given |= {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    sizes = {name: require_integer(name, value) for name, value in given.items()}
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} is {size}; it must not be negative")
    # Python's integers from here on, which have no end.
    batch, num_nodes, num_heads, max_seqlen, kv_lora_rank, qk_rope_head_dim = sizes.values()
    batch_invariant = require_flag("batch_invariant", batch_invariant)
    prefix_tail = require_flag("prefix_tail", prefix_tail)
    require_one_of("variant", variant, VARIANTS)
    if variant.startswith("wgmma"):
        wgmma_host.require_alone(variant, require_splits(num_splits), batch_invariant)
        head_dim = kv_lora_rank + qk_rope_head_dim
        return wgmma_host.workspace_bytes(variant, batch, num_nodes, num_heads, kv_lora_rank, head_dim, max_seqlen)
    if variant.startswith("mma"):
        plan = mma.make_plan(
            batch,
            num_nodes,
            num_heads,
            kv_lora_rank,
            kv_lora_rank + qk_rope_head_dim,
            max_seqlen,
            device=HOST,
            num_splits=require_splits(num_splits),
            batch_invariant=batch_invariant,
        )
        return 16 * -(-plan.workspace_floats // 4)
    floats = [
        flash.make_plan(
            batch,
            num_nodes,
            num_heads,
            kv_lora_rank,
            kv_lora_rank + qk_rope_head_dim,
            max_seqlen,
            device=HOST,
            wide=wide,
            num_splits=require_splits(num_splits),
            batch_invariant=batch_invariant,
            part=flash.TREE if prefix_tail else flash.ALL,
            tuned=choice,
        ).workspace_floats
        for wide, choice in ((True, None), (False, None), (True, None if prefix_tail else tuned.of(HOST)))
    ]
    state = batch * num_nodes * num_heads * (kv_lora_rank + 1) if prefix_tail else 0
    nbytes = 16 * -(-(max(floats) + state) // 4)
    if variant != "auto" or prefix_tail:
        return nbytes
    # With a plan wgmma is taken for smaller sizes, without one it needs more.
    options: dict[str, Any] = {"num_splits": require_splits(num_splits), "batch_invariant": batch_invariant}
    candidates = likely(batch, num_nodes, num_heads, max_seqlen, planned=True, **options)
    head_dim = kv_lora_rank + qk_rope_head_dim
    whole = (batch, num_nodes, num_heads, kv_lora_rank, head_dim, max_seqlen)
    if "wgmma" in candidates and not wgmma_host.takes_sizes(*whole, HOST):
        nbytes = max(nbytes, wgmma_host.workspace_bytes("wgmma", *whole))
    if "mma" in candidates and not runtime.SIMULATOR and mma.takes_widths(kv_lora_rank, head_dim, HOST):
        nbytes = max(nbytes, 16 * -(-mma.make_plan(*whole, device=HOST, **options).workspace_floats // 4))
    return nbytes


def require_splits(num_splits: Any) -> int | None:
    """The number of splits; raises unless it is None or a positive integer."""
    if num_splits is None:
        return None
    number = require_integer("num_splits", num_splits)
    if number < 1:
        raise ValueError(f"num_splits is {number}; it must be at least 1")
    return number
