"""The intrinsics of hopper.py on a GPU of compute capability 9.x, each against a definition written out with numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ddtree_numba.device.launch import compute_capability
from ddtree_numba.device.runtime import SIMULATOR, has_gpu

pytestmark = pytest.mark.gpu
if SIMULATOR or not has_gpu() or compute_capability(-1)[0] != 9:
    pytest.skip("needs a GPU of compute capability 9.x", allow_module_level=True)

from llvmlite import ir  # noqa: E402
from numba import cuda  # noqa: E402
from numba.cuda import types  # noqa: E402
from numba.cuda.extending import intrinsic  # noqa: E402

from ddtree_numba.attention.wgmma_host import tensor_map  # noqa: E402
from ddtree_numba.device import hopper as h  # noqa: E402
from ddtree_numba.device.arrays import view  # noqa: E402
from ddtree_numba.device.launch import launch  # noqa: E402

FORMATS = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
KINDS = sorted(FORMATS)
WARPGROUP = 128
LANES = np.arange(WARPGROUP)
ROWS = LANES // 32 * 16 + LANES % 32 // 4  # a thread's first row of a fragment; the other one is 8 below
QUARTERS = LANES % 4
INF = np.float32(np.inf)


def run(kernel: Any, *args: np.ndarray, threads: int = WARPGROUP, shared_bytes: int = 0, results: int = 1) -> Any:
    """One block. Arrays go to the GPU, and the last ones come back."""
    there = [view(f"x{n}", cuda.to_device(a)) for n, a in enumerate(args)]
    launch(kernel, (1, 1, 1), threads, tuple(there), results=results, shared_bytes=shared_bytes)
    found = [x.owner.copy_to_host() for x in there[-results:]]
    return found[0] if results == 1 else found


def numbers(*shape: int, seed: int = 0, spread: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32)


def loader(count: int) -> Any:
    """A fragment of so many float32 from global memory, one behind the other."""

    @intrinsic
    def load(typingctx, at):
        def codegen(context, builder, signature, args):
            found = []
            for i in range(count):
                found.append(h.assembly(builder, h.F32, [args[0]], f"ld.global.f32 $0, [$1+{4 * i}];", "=f,l"))
            return h.packed(builder, h.F32, found)

        return h.floats(count)(types.int64), codegen

    return load


@intrinsic
def keep(typingctx, fragment, at):
    """A fragment's float32 or words to global memory, one behind the other."""

    def codegen(context, builder, signature, args):
        for i, x in enumerate(h.elements(builder, args[0])):
            kind = "f" if x.type == h.F32 else "r"
            text = f"st.global.b32 [$0+{4 * i}], $1;"
            h.assembly(builder, ir.VoidType(), [args[1], x], text, f"l,{kind},~{{memory}}")
        return context.get_dummy_value()

    return types.void(fragment, types.int64), codegen


load2, load32, load128 = loader(2), loader(32), loader(128)
wait32, wait128 = h.make_wait(32), h.make_wait(128)


def fragments(tile: np.ndarray) -> np.ndarray:
    """What each thread of a warpgroup holds of a tile [64, n]: [128, n / 2]."""
    columns = np.arange(tile.shape[1] // 8)[:, None, None] * 8 + 2 * QUARTERS[None, :, None] + np.arange(2)
    both = [tile[(ROWS + 8 * i)[None, :, None], columns] for i in (0, 1)]  # [eights, threads, 2] each
    return np.ascontiguousarray(np.stack(both, axis=2).transpose(1, 0, 2, 3).reshape(WARPGROUP, -1))


def swizzled(rows: np.ndarray) -> np.ndarray:
    """Rows of 128 bytes as copies lay them down: 16-byte chunk c of row r at c ^ r % 8. Its own inverse."""
    chunks = rows.view(np.uint8).reshape(len(rows), 8, 16)
    return np.stack([row[np.arange(8) ^ r % 8] for r, row in enumerate(chunks)]).reshape(len(rows), 128)


# Copies, mbarriers, the parameters' place


@cuda.jit
def copies(x, other, tensor, box, first, second):
    s = h.shared_address(cuda.shared.array(0, types.uint8, alignment=1024))
    t = cuda.threadIdx.x
    bar = s + 16384
    if t == 0:
        h.mbarrier_init(bar, 1)
        h.mbarrier_init(bar + 8, 1)
        h.mbarrier_fence()
    cuda.syncthreads()
    if t == 0:
        at = parameter_22()
        h.mbarrier_expect(bar, 8192)
        h.copy_box(s, at, bar, first[0], first[1], first[2])
        h.mbarrier_expect(bar + 8, 8192)
        h.copy_box(s + 8192, at, bar + 8, second[0], second[1], second[2])
    h.mbarrier_wait(bar, 0)
    h.mbarrier_wait(bar + 8, 0)
    shared = cuda.shared.array(0, types.float32, alignment=1024)
    for i in range(t, 4096, 128):
        box[i] = shared[i]


parameter_22 = h.parameter_at(22)


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_of_a_tensor_map_among_the_parameters(kind):
    pages, rows, columns = 3, 100, 136
    x = numbers(pages, rows, columns).astype(FORMATS[kind])
    place, box, other = (
        view(f"x{n}", cuda.to_device(a))
        for n, a in enumerate((x.view(np.uint16), np.full(4096, np.nan, np.float32), np.zeros((1, 1, 1), np.int32)))
    )
    tensor = tensor_map(place.pointer, (columns, rows, pages), (2 * columns, 2 * columns * rows), kind)
    given = (place, other, tensor, box, (64, 50, 2), (128, 10, 1))
    launch(copies, (1, 1, 1), WARPGROUP, given, results=0, shared_bytes=16384 + 16)
    found = box.owner.copy_to_host().view(np.uint8).reshape(2, 64, 128)
    wide = np.zeros((pages, 200, 200), x.dtype)  # zeros behind all ends
    wide[:, :rows, :columns] = x
    for boxed, (c, row, page) in zip(found, given[4:], strict=True):
        want = np.ascontiguousarray(wide[page, row : row + 64, c : c + 64])
        np.testing.assert_array_equal(swizzled(boxed), want.view(np.uint8))


@cuda.jit
def in_turn(out):
    s = h.shared_address(cuda.shared.array(0, types.uint8, alignment=16))
    shared = cuda.shared.array(0, types.int32, alignment=16)
    t = cuda.threadIdx.x
    bar, back = s + 256, s + 264
    if t == 0:
        h.mbarrier_init(bar, 2)
        h.mbarrier_init(back, 1)
        h.mbarrier_fence()
    cuda.syncthreads()
    for n in range(out.shape[0]):
        if t == 32 or t == 64:
            if n > 0:
                h.mbarrier_wait(back, (n - 1) & 1)
            shared[t >> 5] = t * 1000 + n
            h.mbarrier_arrive(bar)
        if t == 0:
            h.mbarrier_wait(bar, n & 1)
            out[n, 0] = shared[1]
            out[n, 1] = shared[2]
            h.mbarrier_arrive(back)


def test_mbarriers_wait_for_all_arrivals_of_a_phase():
    found = run(in_turn, np.zeros((50, 2), np.int32), threads=96, shared_bytes=512)
    np.testing.assert_array_equal(found, np.array([32000, 64000]) + np.arange(50)[:, None])


@cuda.jit
def handed_over(out):
    shared = cuda.shared.array(0, types.int32, alignment=16)
    t = cuda.threadIdx.x
    for n in range(out.shape[0]):
        if t >= 64:
            if n > 0:
                h.named_sync(2, 128)
            shared[t - 64] = t + 1000 * n
            h.named_arrive(1, 128)
        else:
            h.named_sync(1, 128)
            out[n, t] = shared[63 - t]
            h.named_arrive(2, 128)
    if t >= 64:
        h.named_sync(2, 128)


def test_named_barriers_hand_over_between_warps():
    found = run(handed_over, np.zeros((30, 64), np.int32), shared_bytes=256)
    np.testing.assert_array_equal(found, 127 - np.arange(64) + 1000 * np.arange(30)[:, None])


@cuda.jit
def single_words(x, out):
    s = h.shared_address(cuda.shared.array(0, types.uint8, alignment=16))
    shared = cuda.shared.array(0, types.uint32, alignment=16)
    t = cuda.threadIdx.x
    h.store_shared(s + 4 * t, x[t])
    cuda.syncthreads()
    out[0, t] = h.load_shared(s + 4 * (127 - t))
    cuda.syncthreads()
    if t & 3 == 0 and t & 4:
        h.clear_shared(s + 4 * t)
    h.prefetch(h.address(x))
    h.touch(s + 512 + 4 * t, h.address(x) + 4 * t)
    cuda.syncthreads()
    out[1, t] = h.load_shared(s + 4 * t)
    out[2, t] = shared[128 + t] & 0xFF


def test_words_of_shared_memory():
    x = numbers(WARPGROUP)
    found = run(single_words, x, np.zeros((3, WARPGROUP), np.float32), shared_bytes=1024)
    np.testing.assert_array_equal(found[0], x[::-1])
    np.testing.assert_array_equal(found[1], np.where(LANES & 4, np.float32(0), x))
    np.testing.assert_array_equal(found[2], x.view(np.uint8)[::4])


# Products


@cuda.jit(device=True, inline="always")
def brought(given):
    """The address in shared memory of words, which are there for wgmma."""
    shared = cuda.shared.array(0, types.uint32, alignment=1024)
    for i in range(cuda.threadIdx.x, given.shape[0], 128):
        shared[i] = given[i]
    h.async_fence()
    cuda.syncthreads()
    return h.shared_address(shared)


def product_of(kind: str, transposed: bool, in_registers: bool) -> Any:
    """QK's: [64, 128] times the transpose of [64, 128], from shared memory; or PV's: [64, 64] times [64, 256]."""
    fill = h.make_undefined(32)
    zeros = h.make_zeros(128)
    pack = h.make_pack_tile(kind)
    steps = [8192 * box + 32 * i for box in range(2) for i in range(4)]
    qk_low = h.make_wgmma(kind, 64, steps[:4], [16384 + x for x in steps[:4]], first=True, commit=False)
    qk_high = h.make_wgmma(kind, 64, steps[4:], [16384 + x for x in steps[4:]])
    values = [16384 + 2048 * i for i in range(4)]
    pv = h.make_wgmma(kind, 256, None if in_registers else steps[:4], values, b_transposed=1)

    @cuda.jit(launch_bounds=(WARPGROUP, 1))
    def qk(given, x, out):
        s, t = brought(given), cuda.threadIdx.x
        d = h.descriptor(s, 16, 1024)
        keep(wait32(qk_high(qk_low(fill(), d, d), d, d)), h.address(out) + t * 128)

    @cuda.jit(launch_bounds=(WARPGROUP, 1))
    def of_values(given, x, out):
        s, t = brought(given), cuda.threadIdx.x
        acc = wait128(zeros())
        if in_registers:
            a = pack(load32(h.address(x) + t * 128))
            acc = pv(acc, a, h.descriptor(s, 8192, 1024))
        else:
            acc = pv(acc, h.descriptor(s, 16, 1024), h.descriptor(s, 8192, 1024))
        keep(wait128(acc), h.address(out) + t * 512)

    return of_values if transposed else qk


def boxes(*matrices: np.ndarray) -> np.ndarray:
    """Matrices of 64 rows as boxes of 64 columns, swizzled, each matrix from a multiple of 16 KB on, as words."""
    found = b""
    for x in matrices:
        mine = b"".join(swizzled(np.ascontiguousarray(x[:, c : c + 64])).tobytes() for c in range(0, x.shape[1], 64))
        found += mine + bytes(-len(mine) % 16384)
    return np.frombuffer(found, np.uint32)


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_queries_and_keys(kind):
    a, b = (numbers(64, 128, seed=n).astype(FORMATS[kind]) for n in (1, 2))
    given = boxes(a, b)
    result = np.zeros((WARPGROUP, 32), np.float32)
    found = run(product_of(kind, False, False), given, numbers(1), result, shared_bytes=given.nbytes)
    want = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(found, fragments(want), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("in_registers", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_probabilities_and_values(kind, in_registers):
    p, v = numbers(64, 64, seed=3), numbers(64, 256, seed=4).astype(FORMATS[kind])
    rounded = p.astype(FORMATS[kind])
    given = boxes(rounded, v)
    result = np.zeros((WARPGROUP, 128), np.float32)
    found = run(product_of(kind, True, in_registers), given, fragments(p), result, shared_bytes=given.nbytes)
    want = rounded.astype(np.float64) @ v.astype(np.float64)
    np.testing.assert_allclose(found, fragments(want), atol=1e-4, rtol=1e-5)


@cuda.jit
def descriptors(out):
    out[0] = h.descriptor(0x12340, 16, 1024)
    out[1] = h.descriptor(0x3FFF0, 8192, 1024)


def test_descriptors():
    found = run(descriptors, np.zeros(2, np.int64), threads=1).tolist()
    want = [(at >> 4 & 0x3FFF) | lead >> 4 << 16 | 64 << 32 | 1 << 62 for at, lead in ((0x12340, 16), (0x3FFF0, 8192))]
    assert found == want


# Fragments


@cuda.jit
def pairs(x, y, out):
    t = cuda.threadIdx.x
    a, b = load2(h.address(x) + t * 8), load2(h.address(y) + t * 8)
    to = h.address(out) + t * 8
    keep(h.rows_max(a, b), to)
    keep(h.rows_add(a, b), to + 1024)
    keep(h.rows_times(a, b), to + 2 * 1024)
    keep(h.raised(a, b, np.float32(0.5)), to + 3 * 1024)
    keep(h.moved(a, b), to + 4 * 1024)
    keep(h.factor(a, b), to + 5 * 1024)
    keep(h.weights(a, h.rows_max(a, b)), to + 6 * 1024)
    keep(h.quad_max(a), to + 7 * 1024)
    keep(h.quad_sum(a), to + 8 * 1024)


def test_pairs_of_row_values():
    x, y = (numbers(WARPGROUP, 2, seed=n, spread=40) for n in (5, 6))
    found = run(pairs, x, y, np.zeros((9, WARPGROUP, 2), np.float32))
    quads = np.repeat(x.reshape(32, 4, 2), 4, axis=0).reshape(WARPGROUP, 4, 2)
    want = [np.maximum(x, y), x + y, x * y, np.maximum(x, y * np.float32(0.5)), np.maximum(y, x - np.float32(60))]
    want += [np.exp2(np.minimum(x - y, 60)), np.exp2(x - np.maximum(x, y)), quads.max(1), quads.sum(1)]
    for mine, right in zip(found, want, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-30)


@cuda.jit
def of_sums(x, y, out):
    t = cuda.threadIdx.x
    a, b = load2(h.address(x) + t * 8), load2(h.address(y) + t * 8)
    keep(h.inverses(a), h.address(out) + t * 8)
    keep(h.log_sums(b, a), h.address(out) + t * 8 + 1024)


def test_inverses_and_logarithms_of_sums():
    x, y = np.exp(numbers(WARPGROUP, 2, seed=7, spread=10)), numbers(WARPGROUP, 2, seed=8, spread=30)
    x[3], x[4] = 0.0, np.nan
    inverse, logs = run(of_sums, x, y, np.zeros((2, WARPGROUP, 2), np.float32))
    with np.errstate(divide="ignore"):
        want = np.where(x == 0, 0, 1 / x.astype(np.float64)), np.log(x.astype(np.float64)) + y * np.log(2.0)
    np.testing.assert_allclose(inverse, want[0], rtol=3e-7)
    np.testing.assert_allclose(logs, want[1], rtol=1e-5, atol=1e-5)
    assert (logs[3] == -INF).all() and np.isnan(logs[4]).all()


@cuda.jit
def tiles(x, bits, pair, out, both):
    t = cuda.threadIdx.x
    s, p = load32(h.address(x) + t * 128), load2(h.address(pair) + t * 8)
    to = h.address(out) + t * 128
    keep(h.exp_tile(s, p, np.float32(0.5)), to)
    keep(h.exp_tile_in_place(s, p, np.float32(0.5)), to + 16384)
    keep(h.mask_tile(s, (bits[t, 0], bits[t, 1])), to + 2 * 16384)
    keep(h.scale_tile(s, p), to + 3 * 16384)
    keep(h.clear_tile(s, p), to + 4 * 16384)
    keep(h.tile_max(s), h.address(both) + t * 8)
    keep(h.tile_most(s), h.address(both) + t * 8 + 1024)
    keep(h.tile_sum(s), h.address(both) + t * 8 + 2048)


def test_tiles_of_scores():
    s = numbers(64, 64, seed=9, spread=3)
    seen = np.random.default_rng(10).random((64, 64)) < 0.5
    of_row = np.abs(numbers(64, seed=11))
    of_row[5] = 0.0
    s[5, 7] = np.nan  # of a row that nobody sees
    words = (seen.astype(np.uint64) << np.arange(64, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)
    rows = np.stack([ROWS, ROWS + 8], axis=1)
    bits = words[rows] >> (2 * QUARTERS[:, None]).astype(np.uint64)
    out, both = np.zeros((5, WARPGROUP, 32), np.float32), np.zeros((3, WARPGROUP, 2), np.float32)
    found, found_rows = run(tiles, fragments(s), bits, of_row[rows], out, both, results=2)
    r = of_row[:, None]
    wanted = [np.exp2(s * np.float32(0.5) - r), np.where(seen, s, -INF), s * r, np.where(r > 0, s, np.float32(0))]
    for mine, want in zip(found, (wanted[0], *wanted), strict=True):
        np.testing.assert_allclose(mine, fragments(want), rtol=1e-5)
    mine = fragments(s).reshape(WARPGROUP, 8, 2, 2)
    clean = ~np.isnan(mine).any(axis=(1, 3))
    for got, want in zip(found_rows, (mine.max((1, 3)), np.abs(mine).max((1, 3)), mine.sum((1, 3))), strict=True):
        np.testing.assert_allclose(got[clean], want[clean], rtol=1e-5, atol=1e-6)


def packed_and_stored(kind: str) -> Any:
    pack = h.make_pack_tile(kind)

    @cuda.jit
    def kernel(x, words, out):
        s = h.shared_address(cuda.shared.array(0, types.uint8, alignment=1024))
        shared = cuda.shared.array(0, types.uint32, alignment=1024)
        t = cuda.threadIdx.x
        p = pack(load32(h.address(x) + t * 128))
        keep(p, h.address(words) + t * 64)
        h.store_matrices(p, s + ((t >> 5) * 16 + (t & 15)) * 128, t >> 4 & 1, t & 7)
        cuda.syncthreads()
        for i in range(t, 2048, 128):
            out[i] = shared[i]

    return kernel


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_rounded_and_stored_as_copies_would(kind):
    p = numbers(64, 64, seed=12)
    words, out = np.zeros((WARPGROUP, 16), np.uint32), np.zeros(2048, np.uint32)
    words, out = run(packed_and_stored(kind), fragments(p), words, out, shared_bytes=8192, results=2)
    rounded = p.astype(FORMATS[kind])
    np.testing.assert_array_equal(words, fragments(rounded).view(np.uint32))
    np.testing.assert_array_equal(swizzled(out.view(np.uint8).reshape(64, 128)), rounded.view(np.uint8))


def rows_stored(kind: str) -> Any:
    nbytes = 4 if kind == "f32" else 2
    lane_bytes = 8 if kind == "f32" else 16
    if kind == "f32":

        @cuda.jit(device=True, inline="always")
        def store(acc, at, below, f, here, here_below, room, lane):
            h.store_floats(acc, at, below, f, here, here_below)

    else:
        store = h.make_store_halves(kind)

    @cuda.jit
    def kernel(x, inverse, live, out):
        s = h.shared_address(cuda.shared.array(0, types.uint8, alignment=1024))
        t = cuda.threadIdx.x
        acc, f = load128(h.address(x) + t * 512), load2(h.address(inverse) + t * 8)
        row = (t >> 5) * 16 + (t & 31) // 4
        at = h.address(out) + row * 256 * nbytes + (t & 3) * lane_bytes
        below = at + 8 * 256 * nbytes
        store(acc, at, below, f, row < live[0], row + 8 < live[0], s + (t >> 5) * 1024, t & 31)

    return kernel


@pytest.mark.parametrize("live", [64, 13, 0])
@pytest.mark.parametrize("kind", [*KINDS, "f32"])
def test_rows_of_results(kind, live):
    dtype = FORMATS.get(kind, np.dtype(np.float32))
    x, inverse = numbers(64, 256, seed=13), numbers(64, seed=14)
    out = np.full((64, 256), 7, dtype)
    given = (fragments(x), np.stack([inverse[ROWS], inverse[ROWS + 8]], axis=1), np.array([live], np.int32))
    found = run(rows_stored(kind), *given, out.view(np.uint8), shared_bytes=4096).view(dtype)
    np.testing.assert_array_equal(found[:live], (x * inverse[:, None])[:live].astype(dtype))
    np.testing.assert_array_equal(found[live:], out[live:])


@cuda.jit
def kept(x, factors, state, out):
    s = h.shared_address(cuda.shared.array(0, types.uint8, alignment=1024))
    t = cuda.threadIdx.x
    acc, f = load128(h.address(x) + t * 512), load2(h.address(factors) + t * 8)
    place = h.address(state) + (t >> 5) * 8192 + (t & 31) * 16
    h.store_state(acc, place, f)
    cuda.syncthreads()
    part = h.add_state(load32(h.address(x) + t * 512), h.load_state(place), f)
    keep(part, h.address(out) + t * 128)
    h.keep_part(part, s + t * 4)
    cuda.syncthreads()
    keep(h.add_part(part, s + (t ^ 32) * 4, f), h.address(out) + t * 128 + 16384)


def test_states_and_parts_of_them():
    x, factors = numbers(WARPGROUP, 128, seed=15), numbers(WARPGROUP, 2, seed=16)
    out, state = np.zeros((2, WARPGROUP, 32), np.float32), np.zeros((4, 16, 32, 8), np.float16)
    # keep_part's numbers are 1024 bytes apart: of 256 threads, of which half are here
    state, (first, second) = run(kept, x, factors, state, out, shared_bytes=32 * 1024, results=2)
    by_row = np.tile(np.repeat(factors[:, None], 2, axis=2).reshape(WARPGROUP, 4), (1, 32))
    rounded = (x * by_row).astype(np.float16)
    np.testing.assert_array_equal(state, rounded.reshape(4, 32, 16, 8).transpose(0, 2, 1, 3))
    want = x[:, :32] + rounded[:, :32].astype(np.float32) * by_row[:, :32]
    np.testing.assert_allclose(first, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(second, first + first[LANES ^ 32] * by_row[:, :32], rtol=1e-5, atol=1e-6)


# Registers, clocks, the kernel ahead

fewer, more = h.fewer_registers(40), h.more_registers(232)


@cuda.jit(launch_bounds=(384, 1))
def budgets(x, out):
    t = cuda.threadIdx.x
    if t >= 256:
        fewer()
        out[t] = x[t] + 1
        return
    more()
    acc = load128(h.address(x))
    out[t] = h.tile_sum(acc)[0]


def test_registers_move_between_warpgroups():
    x = numbers(384, seed=17)
    found = run(budgets, x, np.zeros(384, np.float32), threads=384)
    np.testing.assert_array_equal(found[256:], x[256:] + 1)
    np.testing.assert_allclose(found[:256], x[:128].reshape(32, 2, 2)[:, 0].sum(), rtol=1e-5)


@cuda.jit
def clocked(out):
    t = cuda.threadIdx.x
    for n in range(2):
        h.keep_clocks(h.address(out) + 32 * t + 16 * n, t & 1)


def test_clocks_are_kept_where_nothing_speaks_against_it():
    found = run(clocked, np.zeros((WARPGROUP, 2, 2), np.int64))
    assert (found[1::2] == 0).all() and (found[::2] > 0).all()
    assert (found[::2, 1, 0] > found[::2, 0, 0]).all() and (found[::2, 1, 1] >= found[::2, 0, 1]).all()


@cuda.jit
def ahead(x):
    h.let_follow()
    for _ in range(100):
        cuda.nanosleep(np.uint32(1000))
    x[cuda.blockIdx.x, cuda.threadIdx.x] += 1


@cuda.jit
def behind(x, out):
    h.wait_for_kernel()
    out[cuda.blockIdx.x, cuda.threadIdx.x] = x[cuda.gridDim.x - 1 - cuda.blockIdx.x, cuda.threadIdx.x]


def test_a_kernel_that_overlaps_sees_what_the_one_ahead_wrote():
    x, out = (view(name, cuda.to_device(np.zeros((64, WARPGROUP), np.int32))) for name in ("x", "out"))
    for n in range(1, 6):
        launch(ahead, (64, 1, 1), WARPGROUP, (x,), results=0, shared_bytes=0)
        launch(behind, (64, 1, 1), WARPGROUP, (x, out), results=0, shared_bytes=0, overlap=True)
        assert (out.owner.copy_to_host() == n).all()
