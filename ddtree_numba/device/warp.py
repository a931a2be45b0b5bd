"""What the lanes of one warp do together: the largest and smallest of their values, votes, exchanges.

All lanes of the warp must call these, and the compiler is told so (``convergent``), so that it never moves such a call
into a branch that some lanes do not take.

========================  ======================================================================
``warp_max(x)``           largest uint32 of the warp's lanes, for each of them
``warp_min(x)``           smallest
``warp_votes(p)``         the lanes in which ``p`` is true, lane i as bit i of an uint32
``shuffle_xor(x, mask)``  the float32 ``x`` of lane ``lane ^ mask``
``warp_sync()``           orders the lanes' accesses to shared memory before and behind it
``choose(p, a, b)``       ``a`` where p is true, else ``b``, uint32; no branch is ever made of it (for one thread)
``fresh_thread()``        the thread's index, read anew: what is worked out from it takes no register until then
========================  ======================================================================

In the simulator the twins wait for the threads of the warp, which are fewer in a block of less than 32.

Source: PTX ISA, redux.sync (sm_80 and later), shfl.sync and bar.warp.sync.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from ddtree_numba.device import runtime

if runtime.SIMULATOR:
    from ddtree_numba.device.simulator import current_thread

    def of_all_lanes(x):
        """This thread's lane, and what all lanes of its warp bring, by theirs."""
        thread = current_thread()
        return thread.thread_id % 32, thread.with_warp(x, lambda brought: [brought] * len(brought))

    def for_all_lanes(x, work):
        """What ``work`` makes of what all lanes bring, the same for each."""
        return current_thread().with_warp(x, lambda brought: [work(brought)] * len(brought))

    def warp_max(x):
        return for_all_lanes(np.uint32(x), max)

    def warp_min(x):
        return for_all_lanes(np.uint32(x), min)

    def warp_votes(p):
        return for_all_lanes(bool(p), lambda votes: np.uint32(sum(vote << lane for lane, vote in enumerate(votes))))

    def shuffle_xor(x, mask):
        lane, values = of_all_lanes(np.float32(x))
        return values[lane ^ mask]

    def fresh_thread():
        return np.uint32(current_thread().thread_id)

    def choose(p, a, b):
        return a if p else b

    def warp_sync():
        of_all_lanes(None)

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    _I32 = ir.IntType(32)
    _ALL_LANES = 0xFFFFFFFF

    def _redux(builder, operation, x):
        function_type = ir.FunctionType(_I32, [_I32, _I32])
        asm = ir.InlineAsm(function_type, f"redux.sync.{operation}.u32 $0, $1, $2;", "=r,r,r", side_effect=True)
        return builder.call(asm, [x, _I32(_ALL_LANES)], attrs=("convergent",))

    @intrinsic
    def warp_max(typingctx, x):
        def codegen(context, builder, signature, args):
            return _redux(builder, "max", args[0])

        return types.uint32(types.uint32), codegen

    @intrinsic
    def warp_min(typingctx, x):
        def codegen(context, builder, signature, args):
            return _redux(builder, "min", args[0])

        return types.uint32(types.uint32), codegen

    @cuda.jit(device=True, inline="always")
    def warp_votes(p):
        return np.uint32(cuda.ballot_sync(_ALL_LANES, p))

    def butterfly(builder, x, mask):
        function_type = ir.FunctionType(ir.FloatType(), [ir.FloatType(), _I32])
        asm = ir.InlineAsm(function_type, "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=f,f,r", side_effect=True)
        return builder.call(asm, [x, mask], attrs=("convergent",))

    @intrinsic
    def shuffle_xor(typingctx, x, mask):
        def codegen(context, builder, signature, args):
            return butterfly(builder, *args)

        return types.float32(types.float32, types.int32), codegen

    @intrinsic
    def fresh_thread(typingctx):
        def codegen(context, builder, signature, args):
            asm = ir.InlineAsm(ir.FunctionType(_I32, []), "mov.u32 $0, %tid.x;", "=r", side_effect=True)
            return builder.call(asm, [])

        return types.uint32(), codegen

    @intrinsic
    def choose(typingctx, p, a, b):
        def codegen(context, builder, signature, args):
            return builder.select(*args)

        return types.uint32(types.boolean, types.uint32, types.uint32), codegen

    @intrinsic
    def warp_sync(typingctx):
        def codegen(context, builder, signature, args):
            function_type = ir.FunctionType(ir.VoidType(), [_I32])
            asm = ir.InlineAsm(function_type, "bar.warp.sync $0;", "r,~{memory}", side_effect=True)
            builder.call(asm, [_I32(_ALL_LANES)], attrs=("convergent",))
            return context.get_dummy_value()

        return types.void(), codegen
