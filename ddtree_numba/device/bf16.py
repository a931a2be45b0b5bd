"""Number formats inside kernels: bfloat16, float16 and float32 in, float32 arithmetic, any of the three out.

bfloat16 travels as its 16 bits in a uint16, the upper half of a float32. Numba's own bfloat16 would turn every load
and store into an external call and has no shared arrays.

Each function is an intrinsic on the GPU and a plain function (its twin) in the simulator:

=====================  =======================================================================
``bf16_to_f32(bits)``  uint16 -> float32, exact
``f32_to_bf16(x)``     float32 -> uint16, to nearest, ties to even; NaN stays NaN
``to_f32(x)``          what an input array holds -> float32, exact (uint16 is read as bfloat16)
``from_f32(x, a)``     float32 -> what array ``a`` holds, to nearest, ties to even
=====================  =======================================================================

Two more work on whole NumPy arrays, for the mirrors: ``array_to_f32(a)`` and ``array_from_f32(x, dtype)``.

Source: PTX ISA, cvt (``cvt.rn.bf16.f32`` needs sm_80, ``cvt.rn.f16.f32`` any).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ddtree_numba.device import runtime


def array_to_f32(a: np.ndarray) -> np.ndarray:
    """What an input array holds, as float32; uint16 is read as bfloat16 bits."""
    return (a.view(ml_dtypes.bfloat16) if a.dtype == np.uint16 else a).astype(np.float32)


def array_from_f32(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """float32 as float32, float16 or (dtype uint16) bfloat16 bits, to nearest, ties to even."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == np.uint16 else x.astype(dtype)


if runtime.SIMULATOR:

    def bf16_to_f32(bits):
        return (np.uint32(bits) << np.uint32(16)).view(np.float32)

    def f32_to_bf16(x):
        bits = np.float32(x).view(np.uint32)
        if x != x:
            return np.uint16(0x7FFF)
        tie_to_even = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.uint16((int(bits) + int(tie_to_even)) >> 16)

    def to_f32(x):
        return bf16_to_f32(x) if x.dtype == np.uint16 else np.float32(x)

    def from_f32(x, array):
        return f32_to_bf16(x) if array.dtype == np.uint16 else array.dtype.type(x)

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    _I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()

    def widen(builder, bits):
        return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _F32)

    def _narrow(builder, x):
        round_to_bf16 = ir.InlineAsm(ir.FunctionType(_I16, [_F32]), "cvt.rn.bf16.f32 $0, $1;", "=h,f")
        return builder.call(round_to_bf16, [x])

    @intrinsic
    def bf16_to_f32(typingctx, bits):
        def codegen(context, builder, signature, args):
            return widen(builder, args[0])

        return types.float32(types.uint16), codegen

    @intrinsic
    def f32_to_bf16(typingctx, x):
        def codegen(context, builder, signature, args):
            return _narrow(builder, args[0])

        return types.uint16(types.float32), codegen

    @intrinsic
    def to_f32(typingctx, x):
        def codegen(context, builder, signature, args):
            if x == types.uint16:
                return widen(builder, args[0])
            return context.cast(builder, args[0], x, types.float32)

        return types.float32(x), codegen

    @intrinsic
    def from_f32(typingctx, x, array):
        def codegen(context, builder, signature, args):
            if array.dtype == types.uint16:
                return _narrow(builder, args[0])
            return context.cast(builder, args[0], types.float32, array.dtype)

        return array.dtype(types.float32, array), codegen
