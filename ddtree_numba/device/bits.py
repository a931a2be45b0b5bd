"""The bits of numbers inside kernels: integers that order like floats, and several elements in one wide load.

====================================  ====================================================================
``f32_bits(x)``, ``f64_bits(x)``      the bits of a float32 as uint32, of a float64 as uint64
``bits_f32(b)``                       the float32 that has these bits
``per_word(words, like)``             elements of array ``like`` that one element of ``words`` holds; constant
``element(word, e, like)``            element e of a word, of the dtype of ``like``, as float32 (uint16: bfloat16)
``max_nan(x, y)``                     the larger of two float32, or NaN if one is
``max_words(a, b, like)``             the same for each pair of elements of two words, as a word
``f32_to_u64(x)``                     a float32 below 2**64 without its fraction; 0 if it is negative or NaN
``multiply_high(a, b)``               the upper 64 bits of the product of two uint64
``load_once(row, i)``                 element i of a row that is not read again, so that it displaces nothing in L2
====================================  ====================================================================

Intrinsics on the GPU, plain functions (their twins) in the simulator. A machine of either kind is little-endian, so
element 0 is in the lowest bits.

Source: PTX ISA, max.NaN of f32, f16, f16x2, bf16 and bf16x2 (sm_80 and later), cvt.rzi.u64.f32, mul.hi.u64,
ld.global.cs.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ddtree_numba.device import runtime
from ddtree_numba.device.bf16 import to_f32

if runtime.SIMULATOR:

    def f32_bits(x):
        return np.float32(x).view(np.uint32)

    def f64_bits(x):
        return np.float64(x).view(np.uint64)

    def bits_f32(bits):
        return np.uint32(bits).view(np.float32)

    def per_word(words, like):
        return words.dtype.itemsize // like.dtype.itemsize

    def element(word, e, like):
        return to_f32(np.array([word]).view(like.dtype)[e])

    def max_nan(x, y):
        return np.maximum(np.float32(x), np.float32(y))

    def max_words(a, b, like):
        dtype = ml_dtypes.bfloat16 if like.dtype == np.uint16 else like.dtype
        with np.errstate(invalid="ignore"):  # NumPy warns of a NaN in bfloat16
            larger = np.maximum(*(np.array([word]).view(dtype) for word in (a, b)))
        return larger.view(a.dtype)[0]

    def f32_to_u64(x):
        return np.uint64(np.float32(x) if 0 <= x < 2**64 else 0)

    def load_once(row, i):
        return row[i]

    def multiply_high(a, b):
        return np.uint64(int(a) * int(b) >> 64)

else:
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    from ddtree_numba.device.bf16 import widen

    _I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)

    @intrinsic
    def f32_bits(typingctx, x):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], _I32)

        return types.uint32(types.float32), codegen

    @intrinsic
    def f64_bits(typingctx, x):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], _I64)

        return types.uint64(types.float64), codegen

    @intrinsic
    def bits_f32(typingctx, bits):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], ir.FloatType())

        return types.float32(types.uint32), codegen

    @intrinsic
    def per_word(typingctx, words, like):
        ratio = words.dtype.bitwidth // like.dtype.bitwidth

        def codegen(context, builder, signature, args):
            return _I64(ratio)

        return types.int64(words, like), codegen

    @intrinsic
    def element(typingctx, word, e, like):
        bits = like.dtype.bitwidth

        def codegen(context, builder, signature, args):
            value, index, _ = args
            if word.bitwidth > bits:
                shift = builder.mul(index, _I64(bits))
                shift = builder.trunc(shift, value.type) if word.bitwidth < 64 else shift
                value = builder.trunc(builder.lshr(value, shift), ir.IntType(bits))
                if like.dtype != types.uint16:
                    value = builder.bitcast(value, context.get_value_type(like.dtype))
            if like.dtype == types.uint16:
                return widen(builder, value)
            return context.cast(builder, value, like.dtype, types.float32)

        return types.float32(word, types.int64, like), codegen

    @intrinsic
    def max_nan(typingctx, x, y):
        def codegen(context, builder, signature, args):
            function_type = ir.FunctionType(ir.FloatType(), [ir.FloatType(), ir.FloatType()])
            return builder.call(ir.InlineAsm(function_type, "max.NaN.f32 $0, $1, $2;", "=f,f,f"), args)

        return types.float32(types.float32, types.float32), codegen

    # The operation, and the type and constraint of its operands, by dtype: in pairs of elements, and alone.
    _MAX_PAIRS = {types.float16: "f16x2", types.uint16: "bf16x2"}
    _MAX_ALONE = {types.float32: ("f32", "f"), types.float16: ("f16", "h"), types.uint16: ("bf16", "h")}

    def _max(builder, name, constraint, a, b):
        text = f"max.NaN.{name} $0, $1, $2;"
        asm = ir.InlineAsm(ir.FunctionType(a.type, [a.type] * 2), text, ",".join(["=" + constraint] + [constraint] * 2))
        return builder.call(asm, [a, b])

    @intrinsic
    def max_words(typingctx, a, b, like):
        dtype = like.dtype

        def codegen(context, builder, signature, args):
            bits = ir.IntType(a.bitwidth)
            words = [builder.bitcast(x, bits) for x in args[:2]]
            result = bits(0)
            name, constraint = _MAX_ALONE[dtype]
            per_step = dtype.bitwidth
            if a.bitwidth > per_step and dtype in _MAX_PAIRS:
                per_step, name, constraint = 32, _MAX_PAIRS[dtype], "r"
            for at in range(0, a.bitwidth, per_step):
                parts = [builder.lshr(x, bits(at)) if at else x for x in words]
                parts = [builder.trunc(x, ir.IntType(per_step)) if per_step < a.bitwidth else x for x in parts]
                if constraint == "f":
                    parts = [builder.bitcast(x, ir.FloatType()) for x in parts]
                larger = builder.bitcast(_max(builder, name, constraint, *parts), ir.IntType(per_step))
                larger = builder.zext(larger, bits) if per_step < a.bitwidth else larger
                result = builder.or_(result, builder.shl(larger, bits(at)) if at else larger)
            return builder.bitcast(result, args[0].type)

        return a(a, b, like), codegen

    @intrinsic
    def f32_to_u64(typingctx, x):
        def codegen(context, builder, signature, args):
            asm = ir.InlineAsm(ir.FunctionType(_I64, [ir.FloatType()]), "cvt.rzi.u64.f32 $0, $1;", "=l,f")
            return builder.call(asm, args)

        return types.uint64(types.float32), codegen

    @intrinsic
    def load_once(typingctx, row, i):
        bits = row.dtype.bitwidth
        constraint = {16: "h", 32: "r", 64: "l"}[bits]

        def codegen(context, builder, signature, args):
            array = context.make_array(row)(context, builder, args[0])
            shape, strides = cgutils.unpack_tuple(builder, array.shape), cgutils.unpack_tuple(builder, array.strides)
            at = cgutils.get_item_pointer2(context, builder, array.data, shape, strides, row.layout, [args[1]])
            address = builder.ptrtoint(at, _I64)
            load = ir.InlineAsm(
                ir.FunctionType(ir.IntType(bits), [_I64]), f"ld.global.cs.b{bits} $0, [$1];", f"={constraint},l"
            )
            return builder.bitcast(builder.call(load, [address]), context.get_value_type(row.dtype))

        return row.dtype(row, types.int64), codegen

    @intrinsic
    def multiply_high(typingctx, a, b):
        def codegen(context, builder, signature, args):
            function_type = ir.FunctionType(_I64, [_I64, _I64])
            return builder.call(ir.InlineAsm(function_type, "mul.hi.u64 $0, $1, $2;", "=l,l,l"), args)

        return types.uint64(types.uint64, types.uint64), codegen
