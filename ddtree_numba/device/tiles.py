"""Tiles that a thread keeps in registers: wide loads and stores, products of tiles, sums over the lanes of a warp.

A tile is a local array that is only ever indexed by what the compiler knows, which is what lets it keep the tile in
registers. So sizes must be constants, and a place ``at`` in a tile a constant or made of the counters of loops of
constant length, which are unrolled. Arrays in memory are one-dimensional; indices count elements, and those of four
elements at once are multiples of 4.

=============================================  ==================================================================
``load4(array, i, tile, at)``                  ``tile[at : at + 4] = array[i : i + 4]``, float32, one load
``store4(tile, at, array, i)``                 the reverse, one store
``load_words(row, c, words, at, wide)``        the bits of ``row[c : c + 4]`` into uint32 words, packed; one load where
                                               ``wide`` is 1, four where it is 0 (any stride and alignment)
``store_words(words, at, row, array, i)``      those bits, as elements of the dtype of ``row`` (uint16: bfloat16), to
                                               four float32 of ``array``; one store
``multiply_add(acc, at, a, b, m, n, depth)``   ``acc[at + i * n + j] += sum_d a[i * depth + d] * b[j * depth + d]``,
                                               each term by a fused multiply-add, d rising
``scale_and_add(acc, at, pitch, a, b, m, n)``  ``acc[at + i * pitch + j] = acc[..] * a[i] + b[i * n + j]``, fused
``fill(tile, at, n, x)``                       ``tile[at : at + n] = x``
``sum_over_groups(tile, n)``                   see below
=============================================  ==================================================================

``sum_over_groups`` adds up the n values (a multiple of 8) of lanes that differ in lane // 4 only: eight lanes, as a
tree, (0 + 4) + (2 + 6) and so on. Lane g of them keeps the n / 8 sums from g * n / 8 on, at the front of its tile. All
lanes of the warp must call it.

Intrinsics on the GPU, plain functions (their twins) in the simulator.

Source: PTX ISA, ld/st.v4, fma.rn.f32, shfl.sync.bfly.
"""

from __future__ import annotations

import numpy as np

from ddtree_numba.device import runtime
from ddtree_numba.device.bf16 import array_to_f32

if runtime.SIMULATOR:
    from ddtree_numba.device.warp import of_all_lanes

    def load4(array, i, tile, at):
        tile[at : at + 4] = memory_of(array)[i : i + 4]

    def store4(tile, at, array, i):
        memory_of(array)[i : i + 4] = tile[at : at + 4]

    def load_words(row, c, words, at, wide):
        found = np.ascontiguousarray(memory_of(row)[c : c + 4]).view(np.uint32)
        words[at : at + found.size] = found

    def store_words(words, at, row, array, i):
        n = row.dtype.itemsize
        memory_of(array)[i : i + 4] = array_to_f32(words[at : at + n].view(row.dtype))

    def multiply_add(acc, at, a, b, m, n, depth):
        into = acc[at : at + m * n].reshape(m, n)
        for d in range(depth):
            into += np.multiply.outer(a[d : m * depth : depth], b[d : n * depth : depth])

    def scale_and_add(acc, at, pitch, a, b, m, n):
        for i in range(m):
            acc[at + i * pitch : at + i * pitch + n] *= a[i]
            acc[at + i * pitch : at + i * pitch + n] += b[i * n : (i + 1) * n]

    def fill(tile, at, n, x):
        tile[at : at + n] = x

    def sum_over_groups(tile, n):
        lane, tiles = of_all_lanes(tile.copy())
        group, others = (lane // 4) % 8, lane // 32 * 32 + lane % 4
        x = np.stack([tiles[others + 4 * g] for g in range(8)])[:, group * n // 8 : (group + 1) * n // 8]
        while len(x) > 1:
            x = x[: len(x) // 2] + x[len(x) // 2 :]
        tile[: n // 8] = x[0]

    def memory_of(array):
        return array._ary if hasattr(array, "_ary") else array

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from ddtree_numba.device.bf16 import widen
    from ddtree_numba.device.warp import butterfly

    _I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()

    def constants(*sizes):
        """Their values, or None when Numba tries types without values first; it comes again with them."""
        return [n.literal_value for n in sizes] if all(isinstance(n, types.Literal) for n in sizes) else None

    def data_of(context, builder, array_type, array):
        return context.make_array(array_type)(context, builder, array)

    def _at(builder, pointer, i):
        return builder.gep(pointer, [i])

    def places_of(builder, pointer, first, count):
        return [_at(builder, pointer, builder.add(first, first.type(k))) for k in range(count)]

    def _vector(builder, pointer, scalar, count):
        vector = ir.VectorType(scalar, count)
        return builder.bitcast(pointer, ir.PointerType(vector, getattr(pointer.type, "addrspace", 0))), vector

    @intrinsic
    def load4(typingctx, array, i, tile, at):
        def codegen(context, builder, signature, args):
            pointer = _at(builder, data_of(context, builder, array, args[0]).data, args[1])
            wide, _ = _vector(builder, pointer, _F32, 4)
            found = builder.load(wide, align=16)
            registers = data_of(context, builder, tile, args[2]).data
            for k, place in enumerate(places_of(builder, registers, args[3], 4)):
                builder.store(builder.extract_element(found, _I32(k)), place)
            return context.get_dummy_value()

        return types.void(array, i, tile, at), codegen

    @intrinsic
    def store4(typingctx, tile, at, array, i):
        def codegen(context, builder, signature, args):
            pointer = _at(builder, data_of(context, builder, array, args[2]).data, args[3])
            wide, vector = _vector(builder, pointer, _F32, 4)
            registers = data_of(context, builder, tile, args[0]).data
            value = ir.Constant(vector, ir.Undefined)
            for k, place in enumerate(places_of(builder, registers, args[1], 4)):
                value = builder.insert_element(value, builder.load(place), _I32(k))
            builder.store(value, wide, align=16)
            return context.get_dummy_value()

        return types.void(tile, at, array, i), codegen

    @intrinsic
    def load_words(typingctx, row, c, words, at, wide):
        sizes = constants(wide)
        if sizes is None:
            return None
        (in_one,) = sizes
        count = row.dtype.bitwidth * 4 // 32

        def codegen(context, builder, signature, args):
            source = data_of(context, builder, row, args[0])
            scalar = ir.IntType(row.dtype.bitwidth)
            if in_one:
                pointer, _ = _vector(builder, _at(builder, source.data, args[1]), _I32, count)
                found = builder.load(pointer, align=4 * count)
                values = [builder.extract_element(found, _I32(k)) for k in range(count)]
            else:
                stride = builder.extract_value(source.strides, 0)
                first_byte = builder.ptrtoint(source.data, ir.IntType(64))
                c64 = args[1] if args[1].type.width == 64 else builder.zext(args[1], ir.IntType(64))
                values = []
                for k in range(4):
                    offset = builder.mul(builder.add(c64, ir.IntType(64)(k)), stride)
                    pointer = builder.inttoptr(builder.add(first_byte, offset), scalar.as_pointer())
                    values.append(builder.load(pointer))
                if count == 2:
                    halves = [builder.zext(v, _I32) for v in values]
                    values = [
                        builder.or_(low, builder.shl(high, _I32(16)))
                        for low, high in zip(halves[0::2], halves[1::2], strict=True)
                    ]
            registers = data_of(context, builder, words, args[2]).data
            for value, place in zip(values, places_of(builder, registers, args[3], count), strict=True):
                builder.store(value, place)
            return context.get_dummy_value()

        return types.void(row, c, words, at, wide), codegen

    @intrinsic
    def store_words(typingctx, words, at, row, array, i):
        dtype = row.dtype
        count = dtype.bitwidth * 4 // 32

        def codegen(context, builder, signature, args):
            registers = data_of(context, builder, words, args[0]).data
            bits = [builder.load(place) for place in places_of(builder, registers, args[1], count)]
            if count == 2:
                shifts = [(b, s) for b in bits for s in (0, 16)]
                bits = [builder.trunc(builder.lshr(b, _I32(s)), _I16) for b, s in shifts]
            if dtype == types.uint16:
                values = [widen(builder, b) for b in bits]
            else:
                held = [builder.bitcast(b, context.get_value_type(dtype)) for b in bits]
                values = [context.cast(builder, x, dtype, types.float32) for x in held]
            pointer = _at(builder, data_of(context, builder, array, args[3]).data, args[4])
            wide, vector = _vector(builder, pointer, _F32, 4)
            value = ir.Constant(vector, ir.Undefined)
            for k, x in enumerate(values):
                value = builder.insert_element(value, x, _I32(k))
            builder.store(value, wide, align=16)
            return context.get_dummy_value()

        return types.void(words, at, row, array, i), codegen

    @intrinsic
    def multiply_add(typingctx, acc, at, a, b, m, n, depth):
        sizes = constants(m, n, depth)
        if sizes is None:
            return None
        rows, columns, terms = sizes

        def codegen(context, builder, signature, args):
            into = data_of(context, builder, acc, args[0]).data
            lefts = places_of(builder, data_of(context, builder, a, args[2]).data, _I32(0), rows * terms)
            rights = places_of(builder, data_of(context, builder, b, args[3]).data, _I32(0), columns * terms)
            places = places_of(builder, into, args[1], rows * columns)
            left, right = [builder.load(p) for p in lefts], [builder.load(p) for p in rights]
            sums = [builder.load(p) for p in places]
            for d in range(terms):
                for j in range(columns):
                    # Back and forth: neighbours share an operand, which then need not be read from its register again.
                    for i in range(rows) if j % 2 == 0 else reversed(range(rows)):
                        e = i * columns + j
                        sums[e] = builder.fma(left[i * terms + d], right[j * terms + d], sums[e])
            for value, place in zip(sums, places, strict=True):
                builder.store(value, place)
            return context.get_dummy_value()

        return types.void(acc, at, a, b, m, n, depth), codegen

    @intrinsic
    def scale_and_add(typingctx, acc, at, pitch, a, b, m, n):
        sizes = constants(pitch, m, n)
        if sizes is None:
            return None
        step, rows, columns = sizes

        def codegen(context, builder, signature, args):
            into = data_of(context, builder, acc, args[0]).data
            factors = [
                builder.load(p) for p in places_of(builder, data_of(context, builder, a, args[3]).data, _I32(0), rows)
            ]
            terms = places_of(builder, data_of(context, builder, b, args[4]).data, _I32(0), rows * columns)
            for i in range(rows):
                first = builder.add(args[1], args[1].type(i * step))
                for j, place in enumerate(places_of(builder, into, first, columns)):
                    term = builder.load(terms[i * columns + j])
                    builder.store(builder.fma(builder.load(place), factors[i], term), place)
            return context.get_dummy_value()

        return types.void(acc, at, pitch, a, b, m, n), codegen

    @intrinsic
    def fill(typingctx, tile, at, n, x):
        sizes = constants(n)
        if sizes is None:
            return None
        (count,) = sizes

        def codegen(context, builder, signature, args):
            for place in places_of(builder, data_of(context, builder, tile, args[0]).data, args[1], count):
                builder.store(args[3], place)
            return context.get_dummy_value()

        return types.void(tile, at, n, tile.dtype), codegen

    @intrinsic
    def sum_over_groups(typingctx, tile, n):
        sizes = constants(n)
        if sizes is None:
            return None
        (count,) = sizes

        def codegen(context, builder, signature, args):
            places = places_of(builder, data_of(context, builder, tile, args[0]).data, _I32(0), count)
            values = [builder.load(p) for p in places]
            lane = builder.call(ir.InlineAsm(ir.FunctionType(_I32, []), "mov.u32 $0, %laneid;", "=r"), [])
            for mask in (16, 8, 4):
                # A lane keeps the half of its bit, and hands the other half to the lane that keeps that one.
                upper = builder.icmp_unsigned("!=", builder.and_(lane, _I32(mask)), _I32(0))
                half = len(values) // 2
                kept = []
                for low, high in zip(values[:half], values[half:], strict=True):
                    sent = butterfly(builder, builder.select(upper, low, high), _I32(mask))
                    kept.append(builder.fadd(builder.select(upper, high, low), sent))
                values = kept
            for value, place in zip(values, places, strict=False):
                builder.store(value, place)
            return context.get_dummy_value()

        return types.void(tile, n), codegen
