"""The bits of numbers inside kernels: integers that order like floats, and several elements in one wide load.

====================================  ====================================================================
``f32_bits(x)``, ``f64_bits(x)``      the bits of a float32 as uint32, of a float64 as uint64
``bits_f32(b)``                       the float32 that has these bits
``per_word(words, like)``             elements of array ``like`` that one element of ``words`` holds; constant
``element(word, e, like)``            element e of a word, of the dtype of ``like``, as float32 (uint16: bfloat16)
====================================  ====================================================================

Intrinsics on the GPU, plain functions (their twins) in the simulator. A machine of either kind is little-endian, so
element 0 is in the lowest bits.
"""

from __future__ import annotations

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

else:
    from llvmlite import ir
    from numba.cuda import types
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
                value = builder.trunc(builder.lshr(value, shift), ir.IntType(bits))
                if like.dtype != types.uint16:
                    value = builder.bitcast(value, context.get_value_type(like.dtype))
            if like.dtype == types.uint16:
                return widen(builder, value)
            return context.cast(builder, value, like.dtype, types.float32)

        return types.float32(word, types.int64, like), codegen
