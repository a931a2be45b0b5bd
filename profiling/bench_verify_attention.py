"""Errors and times of verify_attention beside its peers on this GPU, as CSV.

``python profiling/bench_verify_attention.py --out profiling/results/nvidia-h200`` writes verify_attention.csv there:
reference files, shapes of tree verification (pages of 64, packed masks; all others have bool masks), the shapes of the
tables, and sweeps over one size at a time (column case). Each row is checked against float64 first; what is wrong is
not timed, and for variants of ours the exit code says so. The columns of time are those of harness.py, the sustained
ones for some shapes alone. tflops and gb_per_s are what the operator must compute and move, as the functions beside it
count, over microseconds. peers.py has the peers. `mma` is measured in 16 bits, where the GPU has what it needs. Columns
of `flash` and `mma`:

- tiles: rows and keys of its tiles, as it chose them. The variant flash_small has nothing but the smaller ones.
- splits: "even" is the default, even parts of all work; else num_splits, or the keys of a part with batch_invariant.

`wgmma`, measured in 16 bits on GPUs of compute capability 9.x, makes a plan in each call, by one more kernel;
wgmma_planned is the same with a plan made before, as all layers of a step but the first have it.

Needs PyTorch and nvidia-ml-py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import harness
import numpy as np
import peers
from harness import ITEMSIZE, MACHINE, TIMES, Job, Row, measured, spoil, with_rate

import ddtree_numba as dd
from ddtree_numba import kdtr
from ddtree_numba.attention import flash, mma, remembered, three_phase, verify
from ddtree_numba.check import LSE_BOUND, reference_files
from ddtree_numba.device.launch import compute_capability
from ddtree_numba.device.runtime import SIMULATOR

KV_LORA_RANK, HEAD_DIM = 512, 576  # reference files of other widths are left to `python -m ddtree_numba check`
MOST_SCORES = 1 << 27  # of a piece of the float64 reference: 1 GB
MOST_NOTE = 200  # characters
THREE_PHASE_FLOPS = 1e11  # the readable variant is measured up to these
RAGGED = (100, 16000, 350, 8000, 1000, 12000, 2048, 600, 16000, 100, 4096, 230, 15000, 1500, 512, 6000)  # prefixes

EVEN, CHUNKS = "even", f"{flash.CHUNK} keys"
# Variant and splits of a row of ours, and what the call is given.
WAYS: dict[tuple[str, str], dict[str, Any]] = {
    ("three_phase", ""): {"variant": "three_phase"},
    ("flash", EVEN): {"variant": "flash"},
    ("flash", "1"): {"variant": "flash", "num_splits": 1},
    ("flash", CHUNKS): {"variant": "flash", "batch_invariant": True},
    ("flash_small", EVEN): {"variant": "flash"},
    ("mma", EVEN): {"variant": "mma"},
    ("wgmma", ""): {"variant": "wgmma"},
}

HOPPER = (("wgmma", ""), ("wgmma_planned", ""))

SUSTAINED = ((8, 64, 9, 2048), (32, 64, 9, 8192))  # shapes whose sustained times are measured

Way = tuple[str, str]
Operator = Callable[..., Any]  # with the signature of verify_attention


def beside(*names: str) -> tuple[Way, ...]:
    """flash, mma and some peers."""
    return (("flash", EVEN), ("mma", EVEN), *((name, "") for name in names))


BESIDE_EAGER = beside("torch_eager")
BESIDE_TRITON = beside("triton")
BESIDE_BOTH = beside("torch_eager", "triton")
BESIDE_MOST = (*beside("torch_eager", "torch_compiled", "torch_sdpa", "triton", "flashinfer", "flashmla"), *HOPPER)
FLEX = (("torch_flex", ""),)  # for few shapes: it is compiled anew for each, which takes seconds
USUAL = (("three_phase", ""), BESIDE_MOST[0], ("flash_small", EVEN), *BESIDE_MOST[1:])
IN_PARTS = (*BESIDE_BOTH, ("flash", "1"), ("flash", CHUNKS))


class Case(NamedTuple):
    """Random inputs: B, H, Q, the longest prefix; dtype; standard deviation of the logits in nats; what is measured."""

    shape: tuple[int, int, int, int]
    dtype: str
    logit_std: float = 2.0
    ways: tuple[Way, ...] = USUAL
    prefixes: tuple[int, ...] = ()  # of the requests, where they differ
    page_size: int = 0  # 0: a contiguous cache
    sweep: str = ""  # that it belongs to

    @property
    def name(self) -> str:
        return self.sweep or f"logit std {self.logit_std:g}{', ragged' * bool(self.prefixes)}"


class Sweep(NamedTuple):
    """Over one size: all its values, those with --quick, the shape with 0 for it; what is measured of each dtype."""

    sizes: tuple[int, ...]
    few: tuple[int, ...]
    shape: tuple[int, int, int, int]
    float32: tuple[Way, ...]
    bfloat16: tuple[Way, ...]


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
SWEEPS = {
    "kv sweep": Sweep(LENGTHS, (2048, 8192, 32768), (1, 64, 17, 0), BESIDE_BOTH, BESIDE_MOST),
    "Q sweep": Sweep((1, 2, 5, 9, 17, 33, 65), (5, 17, 65), (8, 64, 0, 2048), BESIDE_BOTH, BESIDE_MOST),
    "H sweep": Sweep((8, 16, 32, 64, 128), (16, 64, 128), (8, 0, 9, 2048), BESIDE_EAGER, BESIDE_BOTH),
    "B sweep": Sweep((1, 2, 8, 32, 64), (2, 8, 32), (0, 64, 9, 2048), BESIDE_EAGER, BESIDE_BOTH),
    "page sweep": Sweep((1, 16, 32, 64, 256), (1, 16, 64), (8, 64, 9, 2048), beside(), BESIDE_TRITON + HOPPER),
}


def swept(name: str, quick: bool) -> list[Case]:
    """The cases of a sweep; with ``quick`` fewer sizes, and peers that need no compilation for them."""
    sweep, found = SWEEPS[name], []
    for dtype, ways in (("float32", sweep.float32), ("bfloat16", sweep.bfloat16)):
        for size in sweep.few if quick else sweep.sizes:
            some = tuple(way for way in ways if not quick or way in (*BESIDE_BOTH, *HOPPER))
            case = Case(sweep.shape, dtype, ways=some, sweep=name)
            if name == "page sweep":
                found.append(case._replace(page_size=size))
            else:
                found.append(case._replace(shape=tuple(n or size for n in sweep.shape)))
    return found


VERIFY = "tree verify"  # as a model does it: pages of 64, packed masks
SHAPES = (
    *((1, 64, 17, 2048), (8, 64, 9, 2048), (32, 64, 9, 8192), (32, 128, 2, 8192), (1, 64, 65, 32768)),
    *((64, 16, 33, 1024), (2, 8, 9, 37), (1, 64, 17, 131072), (1, 8, 9, 8192), (64, 128, 1, 4096)),
)
CASES = (
    *(Case(shape, "bfloat16", ways=(("mma", EVEN), *HOPPER), page_size=64, sweep=VERIFY) for shape in SHAPES),
    *(
        Case(shape, dtype, ways=USUAL + FLEX if (dtype, shape) == ("bfloat16", (8, 64, 9, 2048)) else USUAL)
        for shape in ((1, 64, 17, 2048), (8, 64, 9, 2048), (64, 16, 33, 1024), (2, 8, 9, 37), (1, 8, 9, 40000))
        for dtype in ("float32", "bfloat16")
    ),
    Case((1, 64, 17, 131072), "float32", ways=(*BESIDE_EAGER, ("flash_small", EVEN))),
    Case((1, 64, 17, 131072), "bfloat16", ways=BESIDE_MOST),
    Case((1, 64, 65, 32768), "float32", ways=BESIDE_EAGER),
    Case((1, 64, 65, 32768), "bfloat16", ways=BESIDE_MOST),
    Case((32, 64, 9, 8192), "bfloat16", ways=BESIDE_MOST + FLEX),
    Case((32, 128, 2, 8192), "bfloat16", ways=BESIDE_MOST),
    # Parts of fixed size, in a batch of equal lengths and in one of very different ones.
    Case((8, 64, 9, 2048), "float32", ways=(("flash", "1"), ("flash", CHUNKS))),
    Case((len(RAGGED), 64, 9, max(RAGGED)), "float32", ways=IN_PARTS, prefixes=RAGGED),
    # The same kernels on inputs of small logit spread, where errors in the logits all but vanish.
    Case((2, 8, 9, 37), "float32", logit_std=0.02),
)
QUICK = (
    Case((8, 64, 9, 2048), "float32", ways=(("three_phase", ""), *BESIDE_BOTH)),
    Case((8, 64, 9, 2048), "bfloat16", ways=BESIDE_MOST),
)
# What a kernel of someone else is tried on.
AGAINST = (
    *(Case((8, 64, 9, 2048), dtype, ways=BESIDE_BOTH) for dtype in ("float32", "bfloat16")),
    *(Case((1, 64, 17, n), "bfloat16", ways=BESIDE_BOTH, sweep="kv sweep") for n in (2048, 8192, 32768)),
    Case((4, 16, 9, 300), "float32", ways=BESIDE_BOTH, prefixes=(300, 0, 17, 128)),
)

FIELDS = (
    *("case", "B", "H", "Q", "prefix", "page_size", "dtype", "variant", "splits", "tiles"),
    *("rel_frobenius", "max_abs", "lse_error", "bound", "right"),
    *("microseconds", "spread_microseconds", "tflops", "gb_per_s", *TIMES[2:], "repeats", "note", *MACHINE),
)


def random_parents(batch: int, num_nodes: int) -> np.ndarray:
    """Trees whose nodes hang on one of the six nodes before them."""
    random = np.random.default_rng(0)
    parents = np.full((batch, num_nodes), -1)
    for i in range(1, num_nodes):
        parents[:, i] = random.integers(max(0, i - 6), i, size=batch)
    return parents


class Gpu(harness.Gpu):
    """Inputs, exact results and peers. Tests put NumPy in its place."""

    def __init__(self, commit: str, repeats: int = harness.REPEATS, sustain: float = harness.SUSTAIN) -> None:
        super().__init__(commit, repeats, sustain)
        self.torch.backends.cuda.matmul.allow_tf32 = False

    def inputs(self, case: Case) -> dict[str, Any]:
        """Random queries and rows with a given spread of the logits, and random trees; the same ones each time."""
        torch = self.torch
        (batch, num_heads, num_nodes, prefix), dtype = case.shape, getattr(torch, case.dtype)
        generator = torch.Generator(self.place).manual_seed(0)

        def normal(*sizes: int) -> Any:
            return torch.randn(sizes, device=self.place, generator=generator)

        q = normal(batch, num_nodes, num_heads, HEAD_DIM) * (case.logit_std / (dd.KIMI_K2_SM_SCALE * HEAD_DIM**0.5))
        lengths = case.prefixes or (prefix,) * batch
        found = {
            "q": q.to(dtype),
            "kv_cache": normal(batch, prefix + num_nodes, HEAD_DIM).to(dtype),
            "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=self.place),
            "tree_mask": torch.from_numpy(dd.mask_from_parents(random_parents(batch, num_nodes))).to(self.place),
        }
        return found | self.paged(found["kv_cache"], case.page_size) if case.page_size else found

    def paged(self, cache: Any, page_size: int) -> dict[str, Any]:
        """The cache in pages that lie in no order."""
        torch, (batch, keys, head_dim) = self.torch, cache.shape
        cache = torch.nn.functional.pad(cache, (0, 0, 0, -keys % page_size)).view(-1, page_size, head_dim)
        generator = torch.Generator(self.place).manual_seed(1)
        order = torch.randperm(len(cache), device=self.place, generator=generator)
        table = torch.empty_like(order)
        table[order] = torch.arange(len(cache), device=self.place)
        return {"kv_cache": cache[order], "block_table": table.int().view(batch, -1)}

    def packed(self, mask: Any) -> Any:
        """A bool mask as words."""
        words = dd.pack_mask(mask.cpu().numpy()).view(np.int32)
        return self.torch.from_numpy(words).to(self.place).view(self.torch.uint32)

    def from_file(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a reference file; the mask as bool, as in all other rows."""
        mask = dd.unpack_mask(tensors["tree_mask"], tensors["q"].shape[1])
        given = {name: tensors[name] for name in ("q", "kv_cache", "cache_seqlens", "block_table") if name in tensors}
        return {name: self.to_gpu(x) for name, x in (given | {"tree_mask": mask}).items()}

    def to_gpu(self, x: Any) -> Any:
        """A NumPy array on the GPU."""
        if x.dtype.name == "bfloat16":
            return self.to_gpu(x.view(np.uint16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(np.array(x)).to(self.place)

    def results(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arrays for the results of verify_attention."""
        torch, q = self.torch, inputs["q"]
        out = torch.empty((*q.shape[:3], KV_LORA_RANK), dtype=q.dtype, device=self.place)
        return {"out": out, "lse": torch.empty(q.shape[:3], device=self.place)}

    def workspace(self, nbytes: int) -> Any:
        """Memory for partial states."""
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.place)

    def dense(self, inputs: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
        """Queries, cache and mask of the same problem with the live rows alone: one batch, or a request each."""
        q, cache, mask, table = (inputs.get(name) for name in ("q", "kv_cache", "tree_mask", "block_table"))
        lengths, num_nodes = inputs["cache_seqlens"].tolist(), q.shape[1]
        if table is None and len(set(lengths)) == 1:
            return [(q, cache[:, : lengths[0] + num_nodes], mask)]
        parts = []
        for b, length in enumerate(lengths):
            one, live = slice(b, b + 1), length + num_nodes
            if table is None:
                rows = cache[one, :live]
            else:
                rows = cache[table[b, : -(-live // cache.shape[1])].long()].flatten(0, 1)[None, :live]
            parts.append((q[one], rows, mask[one]))
        return parts

    def peer(self, name: str, inputs: dict[str, Any], results: dict[str, Any], sm_scale: float) -> peers.Peer:
        """A call of one of `peers.PEERS`."""
        parts = self.dense(inputs)
        return peers.PEERS[name](peers.Problem(self.torch, inputs, parts, results, sm_scale))

    def causal(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The same problem with a chain in place of each tree."""
        return {**inputs, "tree_mask": self.torch.ones_like(inputs["tree_mask"]).tril()}

    def exact(self, inputs: dict[str, Any], sm_scale: float) -> tuple[Any, Any, float]:
        """out and lse in float64, and the logit_magnitude of the error bounds; piece by piece for the memory's sake."""
        torch, shape = self.torch, inputs["q"].shape
        found: list[tuple[Any, Any, Any]] = []
        for q, cache, mask in self.dense(inputs):
            for b in range(len(q)):
                queries, keys = q[b].flatten(0, 1).double(), cache[b].double()
                sees = mask[b].repeat_interleave(shape[2], 0)
                step = max(1, MOST_SCORES // len(keys))
                for n in range(0, len(queries), step):
                    found.append(self.exact_rows(queries[n : n + step], keys, sees[n : n + step], sm_scale))
        out, lse, squares = (torch.cat(parts) for parts in zip(*found, strict=True))
        magnitude = float(squares[lse > float("-inf")].mean().sqrt())
        return out.view(*shape[:3], -1), lse.view(shape[:3]), magnitude

    def exact_rows(self, q: Any, keys: Any, sees: Any, sm_scale: float) -> tuple[Any, Any, Any]:
        """out, lse and squared logit magnitude of rows of one request."""
        torch = self.torch
        scores = (q @ keys.T).mul_(sm_scale)
        walks = (q.square() @ keys.square().T).mul_(sm_scale**2)
        scores[:, -sees.shape[1] :].masked_fill_(~sees, float("-inf"))
        lse = torch.logsumexp(scores, -1)
        p = torch.softmax(scores, -1).masked_fill_(lse[:, None] == float("-inf"), 0)
        squares = torch.where(p > 0, p * torch.maximum(scores.square_(), walks), 0.0).sum(-1)
        return p @ keys[:, :KV_LORA_RANK], lse, squares

    def errors(self, found: tuple[Any, Any], exact: tuple[Any, Any]) -> dict[str, float]:
        """Relative Frobenius and maximum error of out; that of lse, if there is one, relative to max(1, |lse|)."""
        torch, (out, lse), (exact_out, exact_lse) = self.torch, found, exact
        difference = out.double() - exact_out
        errors = {
            "rel_frobenius": float(difference.norm() / exact_out.norm()),
            "max_abs": float(difference.abs().max()),
        }
        if lse is not None:
            scale = exact_lse.abs().clamp(min=1)
            of_lse = torch.where(lse == exact_lse, 0.0, (lse.double() - exact_lse).abs() / scale)
            errors["lse_error"] = float(of_lse.max())
        return errors

    def largest(self, x: Any) -> float:
        """The largest absolute value."""
        return float(x.abs().max())

    def cast(self, x: Any, dtype: str) -> Any:
        """Rounded to a dtype."""
        return x.to(getattr(self.torch, dtype))

    def timed(self, call: Callable[..., Any], inputs: tuple[Any, ...], sustain: bool) -> dict[str, str]:
        """The usual times; the sustained ones take longer than all others together, and are left out but for some."""
        kept = self.sustain
        self.sustain = kept if sustain else 0.0
        try:
            return self.time(call, inputs=inputs)
        finally:
            self.sustain = kept


def takes(variant: str, dtype: str) -> bool:
    """Whether a variant of ours takes a dtype here: those of tensor cores 16 bits, if the GPU has what they need."""
    if variant == "wgmma":
        return takes_wgmma(dtype, 0)
    if variant != "mma":
        return True
    return dtype != "float32" and (KV_LORA_RANK, HEAD_DIM) == (mma.R, mma.D) and bool(mma.fitting_tiles(-1))


@contextmanager
def planned(tiles: tuple[Any, ...] | None) -> Iterator[list[str]]:
    """Rows and keys of the tiles in the plans that are made meanwhile; flash chooses from these tiles, or its own."""
    kept, found = (flash.TILES, flash.make_plan, mma.make_plan), []

    def noted(plan: Any) -> Any:
        chosen = plan.tiles if isinstance(plan, mma.Plan) else plan.shape.tiles
        found.append(f"{chosen.rows}x{chosen.keys}")
        return plan

    flash.TILES = tiles or kept[0]
    flash.make_plan = lambda *args, **kwargs: noted(kept[1](*args, **kwargs))
    mma.make_plan = lambda *args, **kwargs: noted(kept[2](*args, **kwargs))
    remembered.forget()  # a call with the same arrays would launch what it did before
    try:
        yield found
    finally:
        flash.TILES, flash.make_plan, mma.make_plan = kept
        remembered.forget()


def bounds(gpu: Any, exact: tuple[Any, Any, float], dtype: str, num_keys: int) -> dict[str, float]:
    """What the error of each variant is held to: the derived bound, or twice the error of casting the exact result."""
    if dtype != "float32":
        cast = 2 * gpu.errors((gpu.cast(exact[0], dtype), exact[1]), exact[:2])["rel_frobenius"]
        return {"three_phase": cast, "flash": cast, "mma": cast, "wgmma": cast}
    return {
        "three_phase": three_phase.error_bound(exact[2], num_keys, HEAD_DIM),
        "flash": flash.error_bound(exact[2], num_keys, HEAD_DIM),
    }


def rows_of(
    gpu: Any,
    name: str,
    case: Case,
    inputs: dict[str, Any],
    sm_scale: float,
    exact: Any,
    others: dict[str, Operator] | None = None,
) -> Iterator[Row]:
    """Rows of one problem, ours, peers' and ``others``': errors first, then, if they are within bounds, times."""
    (batch, num_heads, num_nodes, longest), dtype, others = case.shape, case.dtype, others or {}
    prefixes = [int(n) for n in inputs["cache_seqlens"]]
    widths = {"kv_lora_rank": KV_LORA_RANK, "qk_rope_head_dim": HEAD_DIM - KV_LORA_RANK}
    work = verify.flops(num_nodes, num_heads, prefixes, **widths)
    nbytes = verify.bytes_moved(num_nodes, num_heads, prefixes, ITEMSIZE[dtype], **widths)
    limits = bounds(gpu, exact, dtype, longest + num_nodes)
    results = gpu.results(inputs)
    ours = inputs | {"tree_mask": gpu.packed(inputs["tree_mask"])} if case.sweep == VERIFY else inputs
    known: Row = {"case": name, "B": batch, "H": num_heads, "Q": num_nodes, "prefix": longest, "dtype": dtype}
    known["page_size"] = case.page_size or ""
    sustain = case.shape in SUSTAINED and not case.sweep or case.sweep == VERIFY
    small, taken = f"{flash.SMALL.rows}x{flash.SMALL.keys}", ""
    for variant, splits in (*case.ways, *((other, "") for other in others)):
        if variant == "three_phase" and work > THREE_PHASE_FLOPS:
            continue
        if (variant, splits) in HOPPER and not takes_wgmma(dtype, case.page_size):
            continue
        if variant == "flash_small" and taken == small:
            continue  # flash itself has just taken these
        if not takes(variant, dtype):
            continue
        bound, lse_bound = limits["three_phase" if variant == "three_phase" else "flash"], LSE_BOUND
        if variant in peers.PEERS:
            if not peers.takes(variant, dtype):
                continue
            bound, lse_bound = peers.BOUNDS[dtype]
            make = partial(gpu.peer, variant, inputs, results, sm_scale)
        elif (variant, splits) in HOPPER:
            make = partial(of_wgmma, gpu, ours, results, sm_scale, variant == "wgmma_planned")
        elif variant in others:
            if dtype == "float32":
                bound = peers.BOUNDS[dtype][0]  # the bounds of ours follow from the order of our sums
            make = partial(bound_to, others[variant], inputs, results, sm_scale)
        else:
            make = partial(of_ours, gpu, ours, results, sm_scale, **WAYS[variant, splits])
        row: Row = {**known, "variant": variant, "splits": splits, "bound": f"{bound:.3e}"}
        truth = exact
        if variant in peers.CAUSAL:
            truth = gpu.exact(gpu.causal(inputs), sm_scale)
        with planned((flash.SMALL,) if variant == "flash_small" else None) as plans:
            found = measured_row(gpu, row, make, results, truth[:2], (bound, lse_bound), sustain)
        if plans:
            found["tiles"] = plans[-1]  # those before were made for the size of the workspace
        if variant == "flash":
            taken = found.get("tiles", "")
        yield with_rate(with_rate(found, "tflops", work), "gb_per_s", nbytes)


def takes_wgmma(dtype: str, page_size: int) -> bool:
    """Whether the variant takes a case on this GPU."""
    return not SIMULATOR and compute_capability(-1)[0] == 9 and dtype != "float32" and page_size % 64 == 0


def of_wgmma(gpu: Any, inputs: dict[str, Any], results: Any, sm_scale: float, planned: bool) -> peers.Peer:
    """A call of wgmma, with a plan that is made here, from lengths that the host has, too, or without one."""
    _, num_nodes, num_heads, _ = inputs["q"].shape
    lengths, plan = inputs["cache_seqlens"], None
    if planned:
        known = np.array(lengths.tolist(), np.int32)
        sizes = {"num_nodes": num_nodes, "num_heads": num_heads, "max_seqlen": int(known.max())}
        plan = dd.plan_attention(lengths, **sizes, host_lengths=known)
    return of_ours(gpu, inputs, results, sm_scale, variant="wgmma", plan=plan)


def of_ours(gpu: Any, inputs: dict[str, Any], results: dict[str, Any], sm_scale: float, **way: Any) -> peers.Peer:
    """A call of verify_attention that allocates nothing, as in a model's steps; host_us is that of such a call."""
    if way["variant"] != "three_phase":
        (batch, num_nodes, num_heads, _), capacity = inputs["q"].shape, inputs["kv_cache"].shape[1]
        if "block_table" in inputs:
            capacity *= inputs["block_table"].shape[1]
        nbytes = dd.workspace_bytes(
            batch,
            num_nodes,
            num_heads,
            capacity - num_nodes,
            kv_lora_rank=KV_LORA_RANK,
            qk_rope_head_dim=HEAD_DIM - KV_LORA_RANK,
            **{name: x for name, x in way.items() if name != "plan"},
        )
        results = results | {"workspace": gpu.workspace(nbytes)}
    return bound_to(dd.verify_attention, inputs, results, sm_scale, **way)


def bound_to(operator: Operator, inputs: dict[str, Any], results: Any, sm_scale: float, **way: Any) -> peers.Peer:
    """A call of an operator with all but q and the cache given."""
    given = {name: x for name, x in inputs.items() if name not in ("q", "kv_cache")}
    call = partial(operator, **given, **results, sm_scale=sm_scale, kv_lora_rank=KV_LORA_RANK, **way)
    return peers.Peer(call, (inputs["q"], inputs["kv_cache"]))


def measured_row(
    gpu: Any,
    row: Row,
    make: Callable[[], peers.Peer],
    results: dict[str, Any],
    exact: tuple[Any, Any],
    limits: tuple[float, float],
    sustain: bool,
) -> Row:
    """The row with its errors, and with its times if they are within the limits of out and lse."""
    found: Row = {}
    made: list[peers.Peer] = []

    def right() -> bool:
        made.append(make())
        spoil(*results.values())
        errors = gpu.errors(made[0].call(*made[0].arrays), exact)
        found.update({name: f"{value:.3e}" for name, value in errors.items()})
        return errors["rel_frobenius"] <= limits[0] and errors.get("lse_error", 0.0) <= limits[1]  # a NaN is not

    measurement = measured(row, gpu, right, make, lambda _: gpu.timed(*made[0], sustain))
    notes = [peers.NOTES.get(row["variant"], ""), short(measurement.get("note", ""))]
    if found and not measurement["right"] and not notes[1]:
        notes.append("error above its bound")
    return {**measurement, **found, "note": "; ".join(filter(None, notes))}


def short(note: str) -> str:
    """As much of a note as a table bears: what compilers say goes on for pages."""
    return shorten(note, MOST_NOTE)


def reference_rows(gpu: Any, path: Path) -> Iterator[Row]:
    """Rows for one reference file, against the expected values stored in it."""
    tensors = kdtr.read(path)
    exact = gpu.to_gpu(tensors["out"]), gpu.to_gpu(tensors["lse"]), float(tensors["logit_magnitude"])
    batch, num_nodes, num_heads, _ = tensors["q"].shape
    shape = (batch, num_heads, num_nodes, int(tensors["cache_seqlens"].max()))
    case = Case(shape, tensors["q"].dtype.name, ways=(("three_phase", ""), *BESIDE_EAGER))
    yield from rows_of(gpu, path.stem, case, gpu.from_file(tensors), float(tensors["sm_scale"]), exact)


def case_rows(gpu: Any, case: Case, others: dict[str, Operator] | None = None) -> Iterator[Row]:
    """Rows for one random problem, against float64."""
    inputs, sm_scale = gpu.inputs(case), dd.KIMI_K2_SM_SCALE
    yield from rows_of(gpu, case.name, case, inputs, sm_scale, gpu.exact(inputs, sm_scale), others)


def rows_against(gpu: Any, name: str, call: Operator, quick: bool) -> Iterator[Row]:
    """A kernel of someone else beside flash, mma and two peers.

    Its results are held to what ours are in 16 bits, and in float32 to the bound of the peers.
    """
    for case in AGAINST[: 2 if quick else None]:
        yield from case_rows(gpu, case, {name: call})


def files() -> list[Path]:
    """The reference files of these widths."""
    paths = reference_files("verify_attention")
    widths = {path: kdtr.read(path, verify=False) for path in paths}
    return [
        path
        for path, tensors in widths.items()
        if (int(tensors["kv_lora_rank"]), tensors["q"].shape[3]) == (KV_LORA_RANK, HEAD_DIM)
    ]


def jobs(gpu: Any, quick: bool) -> list[Job]:
    """The measurements one after the other."""
    cases = [*(QUICK if quick else CASES), *(case for name in SWEEPS for case in swept(name, quick))]
    return [
        *(partial(reference_rows, gpu, path) for path in ([] if quick else files())),
        *(partial(case_rows, gpu, case) for case in cases),
    ]


def line(row: Row) -> str:
    """A row for people."""
    shape = ",".join(f"{row.get(n, ''):>{width}}" for n, width in (("B", 3), ("H", 3), ("Q", 3), ("prefix", 6)))
    pages = f"p{row['page_size']}" if row.get("page_size") else ""
    way = f"{row['variant']:15}{row.get('splits', ''):10}{row.get('tiles', ''):6}"
    found = f"rel {row.get('rel_frobenius', '-'):9} (bound {row.get('bound', '-'):9}) lse {row.get('lse_error', '-'):9}"
    rates = f"{row.get('tflops', '-'):>7} TFLOP/s {row.get('gb_per_s', '-'):>5} GB/s"
    text = f"{row.get('case', ''):26}{shape} {pages:5}{row.get('dtype', ''):9}{way} {found} {rates}"
    return text + harness.times_of(row)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    count = lambda quick: len(jobs(None, quick))  # noqa: E731
    names = tuple(peers.PEERS)
    return harness.main(__doc__, "verify_attention", FIELDS, jobs, count, line, Gpu, arguments, names)


if __name__ == "__main__":
    sys.exit(main())
