"""Merging attention states: (out, lse) of two disjoint sets of keys to that of their union.

An attention state is what softmax attention over a set of keys leaves of it: ``out``, the weighted mean of the values,
and ``lse``, the logarithm of the sum of the exponentiated scores. For two disjoint sets, and likewise for any row::

    lse = log(exp(l_a) + exp(l_b)),    out = exp(l_a - lse) * out_a + exp(l_b - lse) * out_b

The operation is commutative and associative, and its identity is the state of no keys, out 0 and lse -inf. With
e = exp(-|l_a - l_b|), which cannot overflow, and s = 1 + e, the state of the larger lse has the weight 1 / s, the other
e / s, and lse = max(l_a, l_b) + log1p(e).

- Phase 1: the two weights. A state is empty if its lse is -inf, or +inf as some libraries mark it; a NaN is not empty.
- Phase 2: the output. What an empty state holds for out is selected away, never multiplied by 0: it may be NaN. Where
  one state is empty, the other passes bit for bit.
- Phase 3: the lse, once every thread of the row has read what it may overwrite.

Commutative bit for bit: phase 1 depends on |l_a - l_b| and on which lse is larger; on a tie both weights are 1/2. In
phase 2 each product is rounded by itself, never fused with the sum, and a sum of two does not know their order. (NaN
stays NaN, but its payload is the hardware's affair.)

A row belongs to 2**log_lanes threads of one warp. Each keeps UNROLL words of either state on their way, before it needs
the first or knows the weights. A word is 16 bytes of the widest of the three dtypes, as many elements of the others.
Where rows cannot be read in words (strides, alignment, R), a word is one element.

Cost of a row: 3 R FLOPs, and 3 R elements and 3 lse moved, each once: nothing but bandwidth.

Source: recursive attention as in FlashInfer (arXiv 2501.01005), section 2.2; the combination of parts in FlashDecoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba.device import arrays, runtime
from ddtree_numba.device.arrays import FLOATS, View, kernel_dtype
from ddtree_numba.device.bf16 import array_from_f32, array_to_f32
from ddtree_numba.device.launch import jit, launch
from ddtree_numba.device.runtime import require_backend

# Python threads are dear in the simulator. No bit of a result depends on the number of threads.
THREADS = 16 if runtime.SIMULATOR else 128
LAUNCH_BOUNDS = (THREADS, 7)  # at most 72 registers
UNROLL = 4
MAX_LOG_LANES = 5  # a warp
AXES = 3  # ahead of the columns, as the kernels take them
WORD_BYTES = 16
MAX_ROWS = 2**31

ZERO = np.float32(0.0)  # a literal 0.0 would be float64 on the GPU
ONE = np.float32(1.0)
INF = np.float32(np.inf)
NEG_INF = np.float32(-np.inf)
LN_2 = np.float32(math.log(2.0))


# Words of a row. They stay as they are in memory until two of them are blended, so that what passes alone keeps all its
# bits. Arrays `like` say what dtype the elements have (uint16: bfloat16). Intrinsics on the GPU, plain functions in the
# simulator:
#
#   load(row, w)          the bits of word w, in one load
#   store(row, w, bits)   the reverse, in one store
#   blend(a, like_a, w_a, b, like_b, w_b, seen, like)
#                         w_a * a + w_b * b as elements of `like`. `seen` has bit 0 set where a counts, bit 1 where b
#                         does; where one counts alone it is taken as it is, and 0 where none does.

if runtime.SIMULATOR:

    def load(row, w):
        return np.array([row[w]])

    def store(row, w, elements):
        row[w] = elements.view(row.dtype)[0]

    def blend(a, like_a, w_a, b, like_b, w_b, seen, like):
        a, b = a.view(like_a.dtype), b.view(like_b.dtype)
        if seen == 3:
            return array_from_f32(w_a * array_to_f32(a) + w_b * array_to_f32(b), like.dtype)
        if seen == 0:
            return np.zeros(a.shape, like.dtype)
        return held_by(a if seen == 1 else b, like.dtype)

else:
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    _I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()

    def _bits(word):
        """The Numba type of a word's bits: 32 at a time, or 16 where it is no more."""
        if word.bitwidth < 32:
            return types.UniTuple(types.uint16, 1)
        return types.UniTuple(types.uint32, word.bitwidth // 32)

    def _place(context, builder, row_type, row, w):
        """Where word w is, as a pointer to a vector of its bits."""
        array = context.make_array(row_type)(context, builder, row)
        shape, strides = cgutils.unpack_tuple(builder, array.shape), cgutils.unpack_tuple(builder, array.strides)
        at = cgutils.get_item_pointer2(context, builder, array.data, shape, strides, row_type.layout, [w])
        bits = _bits(row_type.dtype)
        return builder.bitcast(at, ir.VectorType(context.get_value_type(bits.dtype), bits.count).as_pointer())

    def _cvt(builder, name, result, constraint, *args):
        """A conversion from float32 to nearest; of two, the first comes out in the lower half."""
        text = f"cvt.rn.{name}.f32 $0, " + ", ".join(f"${len(args) - n}" for n in range(len(args))) + ";"
        asm = ir.InlineAsm(ir.FunctionType(result, [_F32] * len(args)), text, constraint + ",f" * len(args))
        return builder.call(asm, args)

    def _floats(builder, words, element):
        """The elements in these bits as float32."""
        if element == types.float32:
            return [builder.bitcast(word, _F32) for word in words]
        if element == types.uint16 and words[0].type == _I32:
            halves = [half(builder, word) for word in words for half in (_lower_as_upper, _upper)]
            return [builder.bitcast(half, _F32) for half in halves]
        if words[0].type == _I32:
            words = [builder.trunc(builder.lshr(word, _I32(by)), _I16) for word in words for by in (0, 16)]
        if element == types.uint16:
            return [builder.bitcast(builder.shl(builder.zext(word, _I32), _I32(16)), _F32) for word in words]
        widen = ir.InlineAsm(ir.FunctionType(_F32, [_I16]), "cvt.f32.f16 $0, $1;", "=f,h")
        return [builder.call(widen, [word]) for word in words]

    def _lower_as_upper(builder, word):
        return builder.shl(word, _I32(16))

    def _upper(builder, word):
        return builder.and_(word, _I32(0xFFFF0000))

    def _words(builder, floats, element):
        """The reverse, to nearest, ties to even."""
        if element == types.float32:
            return [builder.bitcast(x, _I32) for x in floats]
        name = "bf16" if element == types.uint16 else "f16"
        if len(floats) == 1:
            return [_cvt(builder, name, _I16, "=h", *floats)]
        pairs = zip(floats[::2], floats[1::2], strict=True)
        return [_cvt(builder, name + "x2", _I32, "=r", *pair) for pair in pairs]

    @intrinsic
    def load(typingctx, row, w):
        bits = _bits(row.dtype)

        def codegen(context, builder, signature, args):
            index = context.cast(builder, args[1], w, types.intp)
            found = builder.load(_place(context, builder, row, args[0], index), align=row.dtype.bitwidth // 8)
            words = [builder.extract_element(found, _I32(n)) for n in range(bits.count)]
            return context.make_tuple(builder, bits, words)

        return bits(row, w), codegen

    @intrinsic
    def store(typingctx, row, w, words):
        def codegen(context, builder, signature, args):
            index = context.cast(builder, args[1], w, types.intp)
            vector = ir.Constant(ir.VectorType(context.get_value_type(words.dtype), words.count), ir.Undefined)
            for n, word in enumerate(cgutils.unpack_tuple(builder, args[2])):
                vector = builder.insert_element(vector, word, _I32(n))
            builder.store(vector, _place(context, builder, row, args[0], index), align=row.dtype.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(row, w, words), codegen

    @intrinsic
    def blend(typingctx, a, like_a, w_a, b, like_b, w_b, seen, like):
        elements = a.count * a.dtype.bitwidth // like_a.dtype.bitwidth
        width = elements * like.dtype.bitwidth
        result = types.UniTuple(types.uint32, width // 32) if width >= 32 else types.UniTuple(types.uint16, 1)

        def codegen(context, builder, signature, args):
            multiply = ir.InlineAsm(ir.FunctionType(_F32, [_F32, _F32]), "mul.rn.f32 $0, $1, $2;", "=f,f,f")
            floats, alone = [], []
            for state, like_state in ((args[0], like_a), (args[3], like_b)):
                words = cgutils.unpack_tuple(builder, state)
                floats.append(_floats(builder, words, like_state.dtype))
                alone.append(words if like_state.dtype == like.dtype else _words(builder, floats[-1], like.dtype))
            sums = [
                builder.fadd(builder.call(multiply, [args[2], x]), builder.call(multiply, [args[5], y]))
                for x, y in zip(*floats, strict=True)
            ]
            sees_a, sees_b = (
                builder.icmp_unsigned("!=", builder.and_(args[6], args[6].type(bit)), args[6].type(0)) for bit in (1, 2)
            )
            words = []
            for both, x, y in zip(_words(builder, sums, like.dtype), *alone, strict=True):
                with_a = builder.select(sees_b, both, x)
                without_a = builder.select(sees_b, y, y.type(0))
                words.append(builder.select(sees_a, with_a, without_a))
            return context.make_tuple(builder, result, words)

        return result(a, like_a, types.float32, b, like_b, types.float32, types.int32, like), codegen


def held_by(x, dtype):
    """Elements as those of another dtype; where it is the same, the bits themselves."""
    return x if x.dtype == dtype else array_from_f32(array_to_f32(x), dtype)


def mirror(out_a, lse_a, out_b, lse_b, out, lse):
    """The kernel in NumPy: the same phases, the same roundings. Arguments as in `merge_states`, on the host."""
    for row in np.ndindex(lse.shape):
        l_a, l_b = lse_a[row], lse_b[row]

        # Phase 1: the weights
        seen = int(np.abs(l_a) != INF) + 2 * int(np.abs(l_b) != INF)
        w_a = w_b = ZERO
        merged = NEG_INF
        if seen == 3:
            e = np.exp(-np.abs(l_a - l_b))
            s = ONE + e
            w_a, w_b = (ONE / s, e / s) if l_a > l_b else (e / s, ONE / s)
            merged = max(l_a, l_b) + np.log1p(e)
        elif seen == 1:
            merged = l_a
        elif seen == 2:
            merged = l_b

        # Phase 2: the output
        if seen == 3:
            sums = w_a * array_to_f32(out_a[row]) + w_b * array_to_f32(out_b[row])
            out[row] = array_from_f32(sums, out.dtype)
        elif seen == 0:
            out[row] = 0
        else:
            out[row] = held_by(out_a[row] if seen == 1 else out_b[row], out.dtype)

        # Phase 3: the lse
        lse[row] = merged


@cuda.jit(device=True, inline="always")
def index_of(row, shape):
    """Indices of a row along three axes. Where all rows lie along the last, as they mostly do, nothing is divided."""
    if shape[0] * shape[1] == 1:
        return np.uint32(0), np.uint32(0), row
    rest = np.uint32(row // np.uint32(shape[2]))
    x = np.uint32(rest // np.uint32(shape[1]))
    return x, np.uint32(rest - x * np.uint32(shape[1])), np.uint32(row - rest * np.uint32(shape[2]))


@cuda.jit(device=True, inline="always")
def load_batch(row, w, lanes, num_words):
    """UNROLL words from w on, ``lanes`` apart; for one behind the row's end word w again, which nobody will use."""
    w_1 = np.uint32(w + lanes)  # the sum of two uint32 has 64 bits
    w_2 = np.uint32(w_1 + lanes)
    w_3 = np.uint32(w_2 + lanes)
    return (
        load(row, w),
        load(row, w_1 if w_1 < num_words else w),
        load(row, w_2 if w_2 < num_words else w),
        load(row, w_3 if w_3 < num_words else w),
    )


@jit(launch_bounds=LAUNCH_BOUNDS)
def kernel(out_a, like_a, lse_a, out_b, like_b, lse_b, like, log_lanes, out, lse):
    """2**log_lanes threads a row. ``out`` and its like [.., .., .., words], ``lse`` and its like [.., .., ..].

    ``out`` and ``lse`` may be those of a state: a thread writes only words that it has read and no other thread does,
    and the lse behind a barrier.
    """
    t = np.uint32(cuda.threadIdx.x)  # gpu: a row's threads take its words in turn
    shift = np.uint32(log_lanes)
    lanes = np.uint32(np.uint32(1) << shift)
    lane = np.uint32(t & np.uint32(lanes - np.uint32(1)))
    row = np.uint32(np.uint32(cuda.blockIdx.x) * (np.uint32(THREADS) >> shift) + (t >> shift))  # gpu: loops
    live = row < np.uint32(lse.size)
    x, y, z = index_of(row, lse.shape)
    merged = NEG_INF
    if live:
        num_words = np.uint32(out.shape[3])
        row_a, row_b, row_out = out_a[x, y, z], out_b[x, y, z], out[x, y, z]
        l_a, l_b = lse_a[x, y, z], lse_b[x, y, z]
        w = lane
        a_0, a_1, a_2, a_3 = load_batch(row_a, w, lanes, num_words)
        b_0, b_1, b_2, b_3 = load_batch(row_b, w, lanes, num_words)

        # Phase 1: the weights
        seen = np.int32(0)
        if math.fabs(l_a) != INF:
            seen += np.int32(1)
        if math.fabs(l_b) != INF:
            seen += np.int32(2)
        w_a = w_b = ZERO
        if seen == 3:
            e = math.exp(-math.fabs(l_a - l_b))
            s = ONE + e
            larger, smaller = ONE / s, e / s
            w_a, w_b = (larger, smaller) if l_a > l_b else (smaller, larger)
            merged = max(l_a, l_b) + math.log1p(e)
        elif seen == 1:
            merged = l_a
        elif seen == 2:
            merged = l_b

        # Phase 2: the output
        while w < num_words:
            w_1 = np.uint32(w + lanes)
            w_2 = np.uint32(w_1 + lanes)
            w_3 = np.uint32(w_2 + lanes)
            store(row_out, w, blend(a_0, like_a, w_a, b_0, like_b, w_b, seen, like))
            if w_1 < num_words:
                store(row_out, w_1, blend(a_1, like_a, w_a, b_1, like_b, w_b, seen, like))
            if w_2 < num_words:
                store(row_out, w_2, blend(a_2, like_a, w_a, b_2, like_b, w_b, seen, like))
            if w_3 < num_words:
                store(row_out, w_3, blend(a_3, like_a, w_a, b_3, like_b, w_b, seen, like))
            w = np.uint32(w_3 + lanes)
            if w < num_words:
                a_0, a_1, a_2, a_3 = load_batch(row_a, w, lanes, num_words)
                b_0, b_1, b_2, b_3 = load_batch(row_b, w, lanes, num_words)

    # Phase 3: the lse
    cuda.syncthreads()  # gpu: the row's other threads have read what it may overwrite
    if live and lane == 0:
        lse[x, y, z] = merged


def flops(num_rows: int, kv_lora_rank: int) -> int:
    """Multiplications and additions of `merge_states`: two and one an element, the few for each row left out."""
    return 3 * num_rows * kv_lora_rank


def bytes_moved(num_rows: int, kv_lora_rank: int, itemsize: int) -> int:
    """Bytes that `merge_states` must move: two states read and one written, each row with its lse of 4 bytes."""
    return 3 * num_rows * (kv_lora_rank * itemsize + 4)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, lse: Any = None
) -> tuple[Any, Any]:
    """The attention state of the union of two disjoint sets of keys, from the states of the two.

    For each row, with natural logarithms::

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    Parameters
    ----------
    out_a : float [..., H, R]
        Attention output over the first set. float32, float16, bfloat16, or uint16 read as bfloat16 bits. Any leading
        axes, none too; any strides.
    lse_a : float32 [..., H]
        Log-sum-exp of its scores in nats. -inf means that the set is empty, and so does +inf; ``out_a`` may then hold
        anything, NaN included.
    out_b : float [..., H, R]
        Of the second set; not necessarily of the dtype of ``out_a``.
    lse_b : float32 [..., H]
        Likewise.
    out : float [..., H, R], optional
        Written to in place of a new array; may be ``out_a`` or ``out_b`` itself (the same memory and strides), but must
        not overlap the arguments in any other way.
    lse : float32 [..., H], optional
        Likewise; may be ``lse_a`` or ``lse_b`` itself.

    Returns
    -------
    out : float [..., H, R]
        Of the kind and dtype of ``out_a``. 0 where both sets are empty; bit for bit that of the other state where one
        is, if it has the same dtype.
    lse : float32 [..., H]
        In nats; -inf where both sets are empty.

    Raises
    ------
    TypeError
        An argument is no array that kernels take, or has the wrong dtype.
    ValueError
        A wrong shape, alignment or device; R = 0; 2**31 rows or columns or more; a result that overlaps an argument
        without being the same.
    RuntimeError
        There is no usable GPU and the simulator is off.

    Notes
    -----
    Runs on the caller's current stream without synchronizing, except for NumPy arrays, which are copied to the device
    and back. With ``out`` and ``lse`` nothing is allocated, so a call can be captured in a CUDA graph. All arithmetic
    is float32. Swapping the states changes no bit. `lse_from_log2` and `lse_from_flashmla` make the lse of other
    libraries ours.

    Source: recursive attention, FlashInfer (arXiv 2501.01005), section 2.2.
    """
    a, b = arrays.view("out_a", out_a), arrays.view("out_b", out_b)
    l_a, l_b = arrays.view("lse_a", lse_a), arrays.view("lse_b", lse_b)
    arrays.require_dtype(a, *FLOATS, np.uint16)
    if len(a.shape) < 2:
        raise ValueError(f"out_a has shape {list(a.shape)}; it must be [..., H, R]")
    arrays.require_dtype(b, *FLOATS, np.uint16)
    arrays.require_shape(b, "[..., H, R] of out_a", *a.shape)
    for x in (l_a, l_b):
        arrays.require_dtype(x, np.float32)
        arrays.require_shape(x, "[..., H] of out_a", *a.shape[:-1])
    if not 1 <= a.shape[-1] < 2**31:
        raise ValueError(f"{a} has R = {a.shape[-1]}; it must be at least 1 and less than 2**31")
    _require_less_rows(l_a)
    arrays.require_one_place([a, l_a, b, l_b])
    if out is None:
        out = arrays.empty(a, a.shape, a.dtype)
    if lse is None:
        lse = arrays.empty(a, l_a.shape, np.dtype(np.float32))
    o, l = arrays.view("out", out), arrays.view("lse", lse)
    arrays.require_dtype(o, *FLOATS, np.uint16)
    arrays.require_shape(o, "[..., H, R] of out_a", *a.shape)
    arrays.require_dtype(l, np.float32)
    arrays.require_shape(l, "[..., H] of out_a", *l_a.shape)
    arrays.require_one_place([a, o, l])
    arrays.require_apart(o, [l, l_a, l_b, *(x for x in (a, b) if not same_memory(o, x))])
    arrays.require_apart(l, [a, b, *(x for x in (l_a, l_b) if not same_memory(l, x))])
    run([a, l_a, b, l_b, o, l])
    return out, lse


def run(states: list[View]) -> None:
    """Launch the kernel on checked arguments: out_a, lse_a, out_b, lse_b, out, lse."""
    if 0 in states[-1].shape:
        return
    require_backend()
    for args, blocks in launches(states):
        launch(kernel, (blocks, 1, 1), THREADS, args, results=2, shared_bytes=0)


def _require_less_rows(x: View) -> None:
    rows = math.prod(x.shape)
    if rows >= MAX_ROWS:
        raise ValueError(f"{x} has {rows} elements; they must be less than 2**31")


def same_memory(a: View, b: View) -> bool:
    """Whether the same elements have the same addresses, so that each thread reads what it writes and nobody else."""
    steps = [[s for n, s in zip(x.shape, x.strides, strict=True) if n > 1] for x in (a, b)]
    return (a.pointer, steps[0], kernel_dtype(a.dtype)) == (b.pointer, steps[1], kernel_dtype(b.dtype))


def launches(states: list[View]) -> Iterator[tuple[tuple[Any, ...], int]]:
    """The kernel's arguments, in its order, and how many blocks it takes; one launch, but for odd strides.

    ``states`` are out_a, lse_a, out_b, lse_b, out, lse.
    """
    for out_a, lse_a, out_b, lse_b, out, lse in in_three_axes(states, len(states[-1].shape)):
        rows = [out_a, out_b, out]
        per = per_word(rows)
        a, b, o = (as_words(x, per) for x in rows)
        like_a, like_b, like = (replace(x, shape=(1,), strides=(x.dtype.itemsize,)) for x in rows)
        threads = -(-o.shape[-1] // UNROLL)  # that keep UNROLL words each on their way
        log_lanes = min((threads - 1).bit_length(), MAX_LOG_LANES, THREADS.bit_length() - 1)
        blocks = -(-math.prod(lse.shape) // (THREADS >> log_lanes))
        yield (a, like_a, lse_a, b, like_b, lse_b, like, np.int32(log_lanes), o, lse), blocks


def in_three_axes(views: list[View], leading: int) -> Iterator[list[View]]:
    """The same arrays with `AXES` axes in place of the first ``leading``, whose lengths they share.

    Axes that follow each other in memory without a gap, in every array, become one: arrays in C order have one axis. If
    more than three are left, the first is taken apart.
    """
    lengths: list[int] = []
    strides: list[list[int]] = [[] for _ in views]
    for axis, n in enumerate(views[0].shape[:leading]):
        if n == 1:
            continue
        if lengths and all(s[-1] == n * x.strides[axis] for x, s in zip(views, strides, strict=True)):
            lengths[-1] *= n
            for x, s in zip(views, strides, strict=True):
                s[-1] = x.strides[axis]
        else:
            lengths.append(n)
            for x, s in zip(views, strides, strict=True):
                s.append(x.strides[axis])
    missing = max(AXES - len(lengths), 0)
    shape = (*[1] * missing, *lengths)
    found = [
        replace(x, shape=(*shape, *x.shape[leading:]), strides=(*[0] * missing, *s, *x.strides[leading:]))
        for x, s in zip(views, strides, strict=True)
    ]
    if len(shape) == AXES:
        yield found
        return
    for n in range(shape[0]):
        parts = [
            replace(x, pointer=x.pointer + n * x.strides[0], shape=x.shape[1:], strides=x.strides[1:]) for x in found
        ]
        yield from in_three_axes(parts, len(shape) - 1)


def per_word(rows: list[View]) -> int:
    """How many elements a word has: those of the widest dtype in 16 bytes where all rows can be read so, else 1."""
    per = WORD_BYTES // max(x.dtype.itemsize for x in rows)
    for x in rows:
        nbytes = per * x.dtype.itemsize
        gaps = [s for n, s in zip(x.shape[:-1], x.strides[:-1], strict=True) if n > 1]
        side_by_side = x.strides[-1] == x.dtype.itemsize and x.shape[-1] % per == 0
        if not side_by_side or any(address % nbytes for address in (x.pointer, *gaps)):
            return 1
    return per


def as_words(x: View, per: int) -> View:
    """Rows of words. complex128 is the one type of 16 bytes that Numba's arrays take; no number is ever made of it."""
    if per == 1:
        return x
    nbytes = per * x.dtype.itemsize
    dtype = np.dtype({8: np.uint64, WORD_BYTES: np.complex128}[nbytes])
    return replace(x, shape=(*x.shape[:-1], x.shape[-1] // per), strides=(*x.strides[:-1], nbytes), dtype=dtype)


# The lse of other libraries


def convert_mirror(lse, scale, out):
    """`convert_kernel` in NumPy."""
    for at in np.ndindex(lse.shape):
        out[at] = NEG_INF if lse[at] == INF else lse[at] * scale


@jit(launch_bounds=LAUNCH_BOUNDS)
def convert_kernel(lse, scale, out):
    """A thread an element of [.., .., ..]: +inf to -inf, all else times ``scale``."""
    n = np.uint32(np.uint32(cuda.blockIdx.x) * THREADS + cuda.threadIdx.x)  # gpu: the mirror's loop
    if n < np.uint32(out.size):
        x, y, z = index_of(n, out.shape)
        found = lse[x, y, z]
        out[x, y, z] = NEG_INF if found == INF else found * scale


def lse_from_log2(lse: Any, *, out: Any = None) -> Any:
    """A base-2 log-sum-exp, as FlashInfer returns it, in nats: ``lse * ln 2``.

    Parameters
    ----------
    lse : float32 [...]
        log2 of the sum of exponentials. Any shape, any strides.
    out : float32 [...], optional
        Written to in place of a new array; may be ``lse`` itself.

    Returns
    -------
    float32 [...]
        In nats, of the kind of array of ``lse``. -inf stays -inf; +inf becomes -inf, since both mean that there are no
        keys.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `merge_states`.

    Notes
    -----
    Runs on the caller's stream, and can be captured, as `merge_states`.

    Source: FlashInfer, "Attention States and Recursive Attention" in its documentation.
    """
    given = arrays.view("lse", lse)
    arrays.require_dtype(given, np.float32)
    return _convert(given, "the shape of lse", LN_2, out, in_place=True)


def lse_from_flashmla(lse: Any, *, out: Any = None) -> Any:
    """The softmax_lse of FlashMLA, [B, H, Q] with +inf for nothing seen, as [B, Q, H] with -inf.

    Parameters
    ----------
    lse : float32 [B, H, Q]
        In nats. Any strides.
    out : float32 [B, Q, H], optional
        Written to in place of a new array; no overlap with ``lse``.

    Returns
    -------
    float32 [B, Q, H]
        In nats, of the kind of array of ``lse``; -inf where it was -inf or +inf.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As in `merge_states`.

    Notes
    -----
    Runs on the caller's stream, and can be captured, as `merge_states`. To merge, a transposed view of ``lse`` would do
    as well: `merge_states` takes any strides, and +inf.

    Source: FlashMLA, flash_mla_with_kvcache (github.com/deepseek-ai/FlashMLA).
    """
    given = arrays.view("lse", lse)
    arrays.require_dtype(given, np.float32)
    arrays.require_shape(given, "[B, H, Q]", None, None, None)
    (batch, heads, nodes), strides = given.shape, given.strides
    swapped = replace(given, shape=(batch, nodes, heads), strides=(strides[0], strides[2], strides[1]))
    return _convert(swapped, "[B, Q, H]", ONE, out, in_place=False)


def _convert(lse: View, meaning: str, scale: np.float32, out: Any, *, in_place: bool) -> Any:
    _require_less_rows(lse)
    if out is None:
        out = arrays.empty(lse, lse.shape, np.dtype(np.float32))
    result = arrays.view("out", out)
    arrays.require_dtype(result, np.float32)
    arrays.require_shape(result, meaning, *lse.shape)
    arrays.require_one_place([lse, result])
    arrays.require_apart(result, [] if in_place and same_memory(result, lse) else [lse])
    if 0 not in lse.shape:
        require_backend()
        for source, target in in_three_axes([lse, result], len(lse.shape)):
            blocks = -(-math.prod(target.shape) // THREADS)
            launch(convert_kernel, (blocks, 1, 1), THREADS, (source, scale, target), results=1, shared_bytes=0)
    return out
