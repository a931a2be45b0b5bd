"""Instructions of the PTX ISA that Numba has no function for: asynchronous copies, matrices of a warp, named barriers.

Places ``at`` in shared memory count words of four bytes of a one-dimensional shared array. Fragments are what a thread
holds of a matrix, in local arrays that are only ever indexed by what the compiler knows (see tiles.py): words of two
16-bit elements, the lower half first, or float32. An array ``like`` says what these elements are: float16, or uint16
for bfloat16.

================================================  ===============================================================
``copy_async(shared, at, row, c, size)``          cp.async: 16 bytes, ``row[c : c + 8]``, to shared memory; of them
                                                  ``size`` (16 or 0) are read and the others become 0
``commit_copies()``                               cp.async.commit_group: this thread's copies since the last such
                                                  call become a group
``wait_copies(n)``                                cp.async.wait_group: until at most the latest n groups are under way
``load_matrices(shared, at, words, to)``          ldmatrix.x4: four 8 x 8 matrices into ``words[to : to + 4]``
``load_matrices_transposed(...)``                 ldmatrix.x4.trans: each of the four transposed
``multiply_tiles(acc, a, b, m, n, like)``         mma.sync.m16n8k16, m * n times: m tiles of A by n tiles of B
``scale_rows(acc, factors, m, n)``                each row of m * n accumulator tiles by its factor
``store_tiles(acc, m, n, array, at, pitch)``      those tiles to rows of ``array`` that are ``pitch`` elements apart
``exp2_approx(x)``                                ex2.approx.ftz: 2 to the power of a float32
``pack_pair(low, high, like)``                    cvt.rn: two float32 to a word, each to nearest, ties to even
``barrier_sync(number, threads)``                 bar.sync: wait at barrier 1 .. 15 until as many threads have come
``barrier_arrive(number, threads)``               bar.arrive: be one of them, and go on
================================================  ===============================================================

`shuffle_xor` of warp.py, with masks 1 and 2, is the exchange within a quad: the four lanes that share a fragment's row.

What must be ordered around them:

- A copy may be done at any time between `copy_async` and the `wait_copies` that waits for its group. So no thread may
  still read the place when it is called, and none may read it before the thread that copied has waited and then met the
  reader at a barrier. ``at`` is a multiple of 4, and the address of ``row[c]`` of 16.
- All lanes of a warp must reach `load_matrices`, `multiply_tiles` and the barriers together (``.sync.aligned``). What
  others wrote to shared memory must be there: a barrier lies between.
- The threads of a named barrier are counted in whole warps, and the count is the same in every call of a round.
  `barrier_sync` orders shared memory as ``cuda.syncthreads`` does. `barrier_arrive` orders what came before it for
  those who wait, and nothing behind it. Number 0 is ``cuda.syncthreads``.

Lane l of a warp has g = l // 4 and q = l % 4. Fragments of a tile (PTX ISA, "Matrix Fragments for mma.m16n8k16"):

=====================  ===================================================================
A, 16 rows x 16 (k)    word r: row g + 8 * (r % 2), columns 2q + 8 * (r // 2) and the next
B, 16 (k) x 8 columns  word r: rows 2q + 8 * r and the next, column g
C, 16 rows x 8         float32 r: row g + 8 * (r // 2), column 2q + r % 2
8 x 8 of ldmatrix      row g, columns 2q and the next; transposed: column g, rows 2q and the next
=====================  ===================================================================

Lanes 8i .. 8i + 7 of `load_matrices` give the places of the rows of matrix i, 16 bytes each; word i is of it. Tiles
follow each other: A tile i at ``a[4 * i]``, B tile j at ``b[2 * j]``, C tile (i, j) at ``acc[4 * (i * n + j)]``.
``factors[2 * i + h]`` is for the rows g + 8h of tiles (i, any). `store_tiles` takes the lane's own place: that of row
g, column 2q of tile (0, 0), a multiple of 2 as ``pitch`` is.

Intrinsics on the GPU, plain functions (their twins) in the simulator. The twin of `copy_async` spoils the place at
once, and `wait_copies` fills it as late as it may: who is early or late on either side sees NaN. Sums of
`multiply_tiles` are exact over the 16 products of a tile in the twin, and rounded to float32 once with what was there;
the GPU may round in between.

Source: PTX ISA, sections "cp.async" (sm_80 and later), "ldmatrix", "mma", "ex2", "cvt", "bar, barrier".
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ddtree_numba.device import runtime


def multiplied(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``c + a @ b`` with a step of 16 products a rounding, as the twin of `multiply_tiles` has it; for mirrors."""
    c = c.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for k in range(0, a.shape[1], 16):
            c = (a[:, k : k + 16].astype(np.float64) @ b[k : k + 16].astype(np.float64) + c).astype(np.float32)
    return c


if runtime.SIMULATOR:
    from ddtree_numba.device.simulator import current_thread
    from ddtree_numba.device.tiles import memory_of

    SPOILED = np.uint32(0xFFFFFFFF)  # NaN in each of the formats

    def copy_async(shared, at, row, c, size):
        source = memory_of(row)
        if at % 4 or source[c:].ctypes.data % 16 or source.strides != (2,):
            raise ValueError(f"cp.async to word {at} from {source[c:].ctypes.data:#x} is not aligned to 16 bytes")
        shared[at : at + 4] = SPOILED
        current_thread().copies[-1].append((shared, at, source[c : c + 8] if size else None))

    def commit_copies():
        current_thread().copies.append([])

    def wait_copies(n):
        groups = current_thread().copies
        while len(groups) - 1 > n:
            for shared, at, source in groups.pop(0):
                shared[at : at + 4] = 0 if source is None else source.view(np.uint32)

    def _rows_of_matrices(brought):
        """uint32 [matrix, row, word] of the rows whose places the lanes bring."""
        return np.stack([shared[at : at + 4] for shared, at in brought]).reshape(4, 8, 4)

    def _plain(brought):
        return _rows_of_matrices(brought).reshape(4, 32).T

    def _transposed(brought):
        halves = _rows_of_matrices(brought).view(np.uint16).swapaxes(1, 2)
        return np.ascontiguousarray(halves).view(np.uint32).reshape(4, 32).T

    def load_matrices(shared, at, words, to):
        words[to : to + 4] = current_thread().with_warp((shared, at), _plain)

    def load_matrices_transposed(shared, at, words, to):
        words[to : to + 4] = current_thread().with_warp((shared, at), _transposed)

    def _halves(words, like):
        dtype = ml_dtypes.bfloat16 if like.dtype == np.uint16 else like.dtype
        return np.stack(words).view(dtype)

    def multiply_tiles(acc, a, b, m, n, like):
        def work(brought):
            accs, a_words, b_words = zip(*brought, strict=True)
            # Axes: g, q, tile, two or four registers, half of a word.
            left = _halves(a_words, like).reshape(8, 4, m, 2, 2, 2).transpose(2, 4, 0, 3, 1, 5).reshape(16 * m, 16)
            right = _halves(b_words, like).reshape(8, 4, n, 2, 2).transpose(3, 1, 4, 2, 0).reshape(16, 8 * n)
            before = np.stack(accs).reshape(8, 4, m, n, 2, 2).transpose(2, 4, 0, 3, 1, 5).reshape(16 * m, 8 * n)
            after = multiplied(left, right, before)
            return after.reshape(m, 2, 8, n, 4, 2).transpose(2, 4, 0, 3, 1, 5).reshape(32, -1)

        tiles = acc[: 4 * m * n]
        tiles[:] = current_thread().with_warp((tiles, a[: 4 * m], b[: 2 * n]), work)

    def scale_rows(acc, factors, m, n):
        acc[: 4 * m * n].reshape(m, n, 2, 2)[:] *= factors[: 2 * m].reshape(m, 1, 2, 1)

    def store_tiles(acc, m, n, array, at, pitch):
        tiles = acc[: 4 * m * n].reshape(m, n, 2, 2)
        for i, j, h in np.ndindex(m, n, 2):
            place = at + (16 * i + 8 * h) * pitch + 8 * j
            array[place : place + 2] = tiles[i, j, h]

    def exp2_approx(x):
        return np.exp2(np.float32(x))

    def pack_pair(low, high, like):
        dtype = ml_dtypes.bfloat16 if like.dtype == np.uint16 else like.dtype
        return np.array([low, high], np.float32).astype(dtype).view(np.uint32)[0]

    def barrier_sync(number, threads):
        current_thread().barrier_sync(number, threads)

    def barrier_arrive(number, threads):
        current_thread().barrier_arrive(number, threads)

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from ddtree_numba.device.tiles import constants, data_of, places_of

    _I8, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
    _NOTHING = ir.VoidType()

    def _asm(builder, result, args, text, constraints, *, effect=True, together=False):
        """A call of inline assembly. ``effect``: it is neither dropped, doubled nor moved past others that have one.

        ``together``: all lanes of the warp must reach it, so it is never moved into a branch.
        """
        function_type = ir.FunctionType(result, [x.type for x in args])
        asm = ir.InlineAsm(function_type, text, constraints, side_effect=effect)
        return builder.call(asm, args, attrs=("convergent",) if together else ())

    def _as_i32(builder, x):
        return builder.trunc(x, _I32) if x.type.width > 32 else x

    def _shared_address(context, builder, array_type, array, at):
        """The 32-bit address of word ``at`` of a shared array, as instructions of the shared window take it."""
        data = builder.bitcast(data_of(context, builder, array_type, array).data, _I8.as_pointer())
        base = builder.ptrtoint(builder.addrspacecast(data, _I8.as_pointer(3)), _I32)
        return builder.add(base, builder.shl(_as_i32(builder, at), _I32(2)))

    @intrinsic
    def copy_async(typingctx, shared, at, row, c, size):
        def codegen(context, builder, signature, args):
            to = _shared_address(context, builder, shared, args[0], args[1])
            source = builder.gep(data_of(context, builder, row, args[2]).data, [args[3]])
            window = builder.addrspacecast(builder.bitcast(source, _I8.as_pointer()), _I8.as_pointer(1))
            operands = [to, builder.ptrtoint(window, _I64), _as_i32(builder, args[4])]
            _asm(builder, _NOTHING, operands, "cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r,~{memory}")
            return context.get_dummy_value()

        return types.void(shared, at, row, c, size), codegen

    @intrinsic
    def commit_copies(typingctx):
        def codegen(context, builder, signature, args):
            _asm(builder, _NOTHING, [], "cp.async.commit_group;", "~{memory}")
            return context.get_dummy_value()

        return types.void(), codegen

    @intrinsic
    def wait_copies(typingctx, n):
        sizes = constants(n)
        if sizes is None:
            return None
        (groups,) = sizes

        def codegen(context, builder, signature, args):
            _asm(builder, _NOTHING, [], f"cp.async.wait_group {groups};", "~{memory}")
            return context.get_dummy_value()

        return types.void(n), codegen

    def _load_matrices(context, builder, signature, args, how):
        shared, _, words, _ = signature.args
        address = _shared_address(context, builder, shared, args[0], args[1])
        found = _asm(
            builder,
            ir.LiteralStructType([_I32] * 4),
            [address],
            f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
            "=r,=r,=r,=r,r,~{memory}",
            together=True,
        )
        registers = data_of(context, builder, words, args[2]).data
        for k, place in enumerate(places_of(builder, registers, args[3], 4)):
            builder.store(builder.extract_value(found, k), place)
        return context.get_dummy_value()

    @intrinsic
    def load_matrices(typingctx, shared, at, words, to):
        def codegen(context, builder, signature, args):
            return _load_matrices(context, builder, signature, args, "")

        return types.void(shared, at, words, to), codegen

    @intrinsic
    def load_matrices_transposed(typingctx, shared, at, words, to):
        def codegen(context, builder, signature, args):
            return _load_matrices(context, builder, signature, args, ".trans")

        return types.void(shared, at, words, to), codegen

    _NAMES = {types.uint16: "bf16", types.float16: "f16"}

    @intrinsic
    def multiply_tiles(typingctx, acc, a, b, m, n, like):
        sizes = constants(m, n)
        if sizes is None:
            return None
        rows, columns = sizes
        name = _NAMES[like.dtype]
        text = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$0, $1, $2, $3};"
        )

        def codegen(context, builder, signature, args):
            def registers(array_type, array, count):
                return places_of(builder, data_of(context, builder, array_type, array).data, _I32(0), count)

            places = registers(acc, args[0], 4 * rows * columns)
            left = [builder.load(p) for p in registers(a, args[1], 4 * rows)]
            right = [builder.load(p) for p in registers(b, args[2], 2 * columns)]
            tiles = [builder.load(p) for p in places]
            for i in range(rows):
                for j in range(columns):
                    at = 4 * (i * columns + j)
                    operands = [*left[4 * i : 4 * i + 4], *right[2 * j : 2 * j + 2], *tiles[at : at + 4]]
                    result = ir.LiteralStructType([_F32] * 4)
                    constraints = "=f,=f,=f,=f,r,r,r,r,r,r,0,1,2,3"
                    found = _asm(builder, result, operands, text, constraints, effect=False, together=True)
                    tiles[at : at + 4] = [builder.extract_value(found, k) for k in range(4)]
            for value, place in zip(tiles, places, strict=True):
                builder.store(value, place)
            return context.get_dummy_value()

        return types.void(acc, a, b, m, n, like), codegen

    @intrinsic
    def scale_rows(typingctx, acc, factors, m, n):
        sizes = constants(m, n)
        if sizes is None:
            return None
        rows, columns = sizes

        def codegen(context, builder, signature, args):
            into = data_of(context, builder, acc, args[0]).data
            given = data_of(context, builder, factors, args[1]).data
            scales = [builder.load(p) for p in places_of(builder, given, _I32(0), 2 * rows)]
            for k, place in enumerate(places_of(builder, into, _I32(0), 4 * rows * columns)):
                scale = scales[k // (4 * columns) * 2 + k % 4 // 2]
                builder.store(builder.fmul(builder.load(place), scale), place)
            return context.get_dummy_value()

        return types.void(acc, factors, m, n), codegen

    @intrinsic
    def store_tiles(typingctx, acc, m, n, array, at, pitch):
        sizes = constants(m, n, pitch)
        if sizes is None:
            return None
        rows, columns, step = sizes

        def codegen(context, builder, signature, args):
            registers = data_of(context, builder, acc, args[0]).data
            tiles = [builder.load(p) for p in places_of(builder, registers, _I32(0), 4 * rows * columns)]
            first = builder.gep(data_of(context, builder, array, args[3]).data, [args[4]])
            pair = ir.VectorType(_F32, 2)
            for k in range(0, len(tiles), 2):
                i, j, h = k // (4 * columns), k // 4 % columns, k % 4 // 2
                place = builder.gep(first, [_I32((16 * i + 8 * h) * step + 8 * j)])
                value = ir.Constant(pair, ir.Undefined)
                for e in range(2):
                    value = builder.insert_element(value, tiles[k + e], _I32(e))
                builder.store(value, builder.bitcast(place, pair.as_pointer()), align=8)
            return context.get_dummy_value()

        return types.void(acc, m, n, array, at, pitch), codegen

    @intrinsic
    def exp2_approx(typingctx, x):
        def codegen(context, builder, signature, args):
            return _asm(builder, _F32, args, "ex2.approx.ftz.f32 $0, $1;", "=f,f", effect=False)

        return types.float32(types.float32), codegen

    @intrinsic
    def pack_pair(typingctx, low, high, like):
        text = f"cvt.rn.{_NAMES[like.dtype]}x2.f32 $0, $1, $2;"

        def codegen(context, builder, signature, args):
            return _asm(builder, _I32, [args[1], args[0]], text, "=r,f,f", effect=False)

        return types.uint32(types.float32, types.float32, like), codegen

    def _barrier(builder, operation, args):
        operands = [_as_i32(builder, x) for x in args]
        _asm(builder, _NOTHING, operands, f"{operation} $0, $1;", "r,r,~{memory}", together=True)

    @intrinsic
    def barrier_sync(typingctx, number, threads):
        def codegen(context, builder, signature, args):
            _barrier(builder, "bar.sync", args)
            return context.get_dummy_value()

        return types.void(number, threads), codegen

    @intrinsic
    def barrier_arrive(typingctx, number, threads):
        def codegen(context, builder, signature, args):
            _barrier(builder, "bar.arrive", args)
            return context.get_dummy_value()

        return types.void(number, threads), codegen
