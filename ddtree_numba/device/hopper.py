"""Hopper's asynchronous units (sm_90a): mbarriers, bulk tensor copies, wgmma, register budgets.

Places in shared memory are 32-bit addresses of the block's window (`shared_address`), places in global memory 64-bit
ones (`address`). Fragments travel as tuples of float32 or uint32, which the compiler keeps in registers.

==========================================  ========================================================================
``mbarrier_init(at, count)``                mbarrier.init: a phase ends after ``count`` arrivals and all bytes expected
``mbarrier_fence()``                        fence.mbarrier_init: copies started by others see the barriers
``mbarrier_expect(at, nbytes)``             arrive, and expect as many bytes of copies in this phase
``mbarrier_arrive(at)``                     arrive
``mbarrier_wait(at, parity)``               wait until the phase of this parity has ended
``parameter_at(n)()``                       cvta.param: the address of the kernel's parameter n of 64 bits, for a tensor
                                            map that is passed as 16 int64. Its place must be a multiple of 64 bytes
``copy_box(to, map, at, c, row, page)``     cp.async.bulk.tensor.3d: a box to shared memory; its bytes count at the
                                            mbarrier ``at``. What lies outside the tensor arrives as zeros. Its lines
                                            are the first to leave L2 (evict_first)
``async_fence()``                           fence.proxy.async: what this thread wrote to shared memory is there for
                                            copies and wgmma of whoever it meets at a barrier
``named_sync(n, threads)``                  bar.sync and bar.arrive; barrier n counts ``threads``, whole warps
``named_arrive(n, threads)``
``fewer_registers(n)``                      setmaxnreg: of each thread of the warpgroup
``more_registers(n)``
``descriptor(at, leading, stride)``         wgmma's matrix descriptor for 128-byte swizzled tiles; strides in bytes
``make_wgmma(...)``                         wgmma.mma_async, several k steps in one piece of assembly
``prefetch(at)``                            prefetch.global.L2: the line of global memory
``touch(at, address)``                      a byte of global memory to shared memory, so that its line is in L1
``let_follow()``                            griddepcontrol.launch_dependents: blocks of the next kernel on the stream,
                                            if it is launched to overlap, may start
``wait_for_kernel()``                       griddepcontrol.wait: until the kernel ahead has ended and is seen
``keep_clocks(at, others)``                 %clock64 and %globaltimer (nanoseconds) to global memory where ``others`` is
                                            0, without a branch
``make_wait(n, pending)``                   wgmma.wait_group; takes and returns the accumulators, so that nothing that
                                            reads them moves ahead of it
==========================================  ========================================================================

What must be ordered around them:

- Who starts copies must see the mbarriers: `mbarrier_init`, `mbarrier_fence`, then a barrier of the block.
  `mbarrier_expect` comes ahead of the copies that it counts. Who has waited for a phase sees what its copies brought;
  the next phase must not end before all have waited, so whoever copies anew waits until the readers have arrived.
- What threads wrote to shared memory is there for wgmma and for copies behind `async_fence` by the writer and a barrier
  that it and the reader meet at. What wgmma reads there may be written again when its group has been waited for.
- All warps of a warpgroup reach a wgmma, its wait and the register budgets together, all lanes of a warp the named
  barriers and whatever exchanges values (``quad_..``, `store_matrices`, `make_store_halves`). Between a wgmma and its
  wait nothing may touch its accumulators, and no branch may join.
- `more_registers` of one warpgroup ends when `fewer_registers` of another has freed them. Code of the one must not be
  shared with the other, so who has fewer returns first.
- `wait_for_kernel` stands ahead of the first access to what the kernel ahead writes.

A fragment of m64nN in a warpgroup: warp w has rows 16 w .. 16 w + 15; lane l holds of every 8 columns those numbered
2 (l % 4) and the next, in rows l / 4 (elements 0 and 1) and l / 4 + 8 (2 and 3). Pairs ``(a, b)`` of row values are for
these two rows.

Source: PTX ISA, "mbarrier", "cp.async.bulk.tensor", "wgmma.mma_async", "setmaxnreg", "cvta", "bar, barrier",
"stmatrix", "fence.proxy", "griddepcontrol", "createpolicy"; CUDA C++ Programming Guide, "Programmatic Dependent
Launch".
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

I1, I16, I32, I64, F32 = ir.IntType(1), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VOID = ir.VoidType()


def assembly(builder, result, args, text, constraints, effect=True):
    function_type = ir.FunctionType(result, [a.type for a in args])
    return builder.call(ir.InlineAsm(function_type, text, constraints, side_effect=effect), args)


def sized(builder, x, bits):
    """An integer of as many bits."""
    if x.type.width == bits:
        return x
    return builder.trunc(x, ir.IntType(bits)) if x.type.width > bits else builder.sext(x, ir.IntType(bits))


def elements(builder, x):
    return [builder.extract_value(x, i) for i in range(x.type.count)]


def packed(builder, element, values):
    found = ir.Constant(ir.ArrayType(element, len(values)), ir.Undefined)
    for i, v in enumerate(values):
        found = builder.insert_value(found, v, i)
    return found


def floats(n):
    return types.UniTuple(types.float32, n)


def words(n):
    return types.UniTuple(types.uint32, n)


def of_arguments(body, count):
    """``body``, which takes any number of arguments, as a function of so many: an intrinsic's are counted."""
    return (
        lambda ctx: body(ctx),
        lambda ctx, a: body(ctx, a),
        lambda ctx, a, b: body(ctx, a, b),
        lambda ctx, a, b, c: body(ctx, a, b, c),
        lambda ctx, a, b, c, d: body(ctx, a, b, c, d),
        lambda ctx, a, b, c, d, e: body(ctx, a, b, c, d, e),
        lambda ctx, a, b, c, d, e, f: body(ctx, a, b, c, d, e, f),
    )[count]


def instruction(text, operands="", result=types.void, effect=True):
    """An intrinsic that is one instruction; operands: r and l for integers of 32 and 64 bits, f for float32."""

    def body(typingctx, *arguments):
        def codegen(context, builder, signature, args):
            kinds = zip(args, operands, strict=True)
            given = [a if c == "f" else sized(builder, a, 32 if c == "r" else 64) for a, c in kinds]
            outer = {types.void: (VOID, []), types.float32: (F32, ["=f"]), types.int32: (I32, ["=r"])}
            outer[types.int64] = (I64, ["=l"])
            kind, out = outer[result]
            constraints = ",".join([*out, *operands, *(["~{memory}"] if effect else [])])
            found = assembly(builder, kind, given, text, constraints, effect)
            return context.get_dummy_value() if result == types.void else found

        return result(*arguments), codegen

    return intrinsic(of_arguments(body, len(operands)))


@intrinsic
def shared_address(typingctx, array):
    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte = ir.IntType(8)
        shared = builder.addrspacecast(builder.bitcast(data, byte.as_pointer()), byte.as_pointer(3))
        return builder.ptrtoint(shared, I32)

    return types.int32(array), codegen


@intrinsic
def address(typingctx, array):
    def codegen(context, builder, signature, args):
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, I64)

    return types.int64(array), codegen


mbarrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", "rr")
mbarrier_fence = instruction("fence.mbarrier_init.release.cluster;")
mbarrier_expect = instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "rr")
mbarrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "r")
mbarrier_wait = instruction(
    "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n"
    "@done bra DONE;\nbra AGAIN;\nDONE:\n}",
    "rr",
)
EVICT_FIRST = "0x12F0000000000000"  # what createpolicy.fractional.L2::evict_first makes for all of an access
copy_box = instruction(
    "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    f" [$0], [$1, {{$3, $4, $5}}], [$2], {EVICT_FIRST};",
    "rlrrrr",
)
async_fence = instruction("fence.proxy.async.shared::cta;")
named_sync = instruction("bar.sync $0, $1;", "rr")
named_arrive = instruction("bar.arrive $0, $1;", "rr")
store_shared = instruction("st.shared.f32 [$0], $1;", "rf")
load_shared = instruction("ld.shared.f32 $0, [$1];", "r", types.float32)
clear_shared = instruction("st.shared.v4.b32 [$0], {0, 0, 0, 0};", "r")


prefetch = instruction("prefetch.global.L2 [$0];", "l")
touch = instruction("{\n.reg .b32 x;\nld.global.b8 x, [$1];\nst.shared.b32 [$0], x;\n}", "rl")
let_follow = instruction("griddepcontrol.launch_dependents;")
wait_for_kernel = instruction("griddepcontrol.wait;")
keep_clocks = instruction(
    "{\n.reg .pred here;\n.reg .b64 cycles, time;\nmov.u64 cycles, %clock64;\nmov.u64 time, %globaltimer;\n"
    "setp.eq.b32 here, $1, 0;\n@here st.global.v2.b64 [$0], {cycles, time};\n}",
    "lr",
)


@intrinsic
def load_state(typingctx, at):
    """Four eights of a state, 512 bytes apart, as words of two float16; not ahead of what stands before it."""

    def codegen(context, builder, signature, args):
        found = []
        for k in range(4):
            text = f"ld.global.v4.b32 {{$0,$1,$2,$3}}, [$4+{512 * k}];"
            four = assembly(builder, ir.LiteralStructType([I32] * 4), [args[0]], text, "=r,=r,=r,=r,l")
            found += [builder.extract_value(four, i) for i in range(4)]
        return packed(builder, I32, found)

    return words(16)(types.int64), codegen


@intrinsic
def no_state(typingctx):
    """Words of no value."""

    def codegen(context, builder, signature, args):
        return ir.Constant(ir.ArrayType(I32, 16), ir.Undefined)

    return words(16)(), codegen


def fewer_registers(n):
    return instruction(f"setmaxnreg.dec.sync.aligned.u32 {n};")


def more_registers(n):
    return instruction(f"setmaxnreg.inc.sync.aligned.u32 {n};")


def parameter_at(n):
    """The address of parameter n of the kernel that it is called in, of words."""

    @intrinsic
    def found(typingctx):
        def codegen(context, builder, signature, args):
            name = f"{builder.function.name}_param_{n}"
            text = f"{{\n.reg .b64 at;\nmov.b64 at, {name};\ncvta.param.u64 $0, at;\n}}"
            return assembly(builder, I64, [], text, "=l", False)

        return types.int64(), codegen

    return found


@intrinsic
def descriptor(typingctx, at, leading, stride):
    def codegen(context, builder, signature, args):
        place = builder.zext(sized(builder, args[0], 32), I64)
        fields = [(place, 0), (sized(builder, args[1], 64), 16), (sized(builder, args[2], 64), 32)]
        found = I64(1 << 62)
        for value, shift in fields:
            field = builder.and_(builder.lshr(value, I64(4)), I64(0x3FFF))
            found = builder.or_(found, builder.shl(field, I64(shift)))
        return found

    return types.int64(at, leading, stride), codegen


def make_wgmma(kind, n, a_offsets, b_offsets, *, b_transposed=0, first=False, commit=True):
    """wgmma m64nNk16 for each of ``b_offsets``, bytes from the descriptors; kind: "bf16" or "f16".

    a_offsets : bytes from A's descriptor; None: A is a tuple of 4 words a step.
    first : the accumulators' old values do not count.
    """
    count = n // 2
    num_a = 1 if a_offsets is not None else 4 * len(b_offsets)
    accumulators = ", ".join(f"${i}" for i in range(count))
    lines = ["{", ".reg .pred more;", ".reg .b64 a, b;", "wgmma.fence.sync.aligned;"]
    for step, offset in enumerate(b_offsets):
        lines.append(f"setp.ne.b32 more, {0 if first and step == 0 else 1}, 0;")
        lines.append(f"add.s64 b, ${count + num_a}, {offset >> 4};")
        if a_offsets is None:
            a = "{" + ",".join(f"${count + 4 * step + i}" for i in range(4)) + "}"
            flags = f"more, 1, 1, {b_transposed}"
        else:
            lines.append(f"add.s64 a, ${count}, {a_offsets[step] >> 4};")
            a, flags = "a", f"more, 1, 1, 0, {b_transposed}"
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{accumulators}}}, {a}, b, {flags};")
    if commit:
        lines.append("wgmma.commit_group.sync.aligned;")
    text = "\n".join([*lines, "}"])
    of_a = ["l"] if a_offsets is not None else ["r"] * num_a
    constraints = ",".join([*["=f"] * count, *of_a, "l", *map(str, range(count)), "~{memory}"])
    struct = ir.LiteralStructType([F32] * count)

    @intrinsic
    def wgmma(typingctx, acc, a, b):
        def codegen(context, builder, signature, args):
            first_operand = [args[1]] if a_offsets is not None else elements(builder, args[1])
            given = [*first_operand, args[2], *elements(builder, args[0])]
            found = assembly(builder, struct, given, text, constraints)
            return packed(builder, F32, [builder.extract_value(found, i) for i in range(count)])

        return floats(count)(acc, a, b), codegen

    return wgmma


def make_wait(count, pending=0):
    constraints = ",".join([*["=f"] * count, *map(str, range(count)), "~{memory}"])
    struct = ir.LiteralStructType([F32] * count)

    @intrinsic
    def wait(typingctx, acc):
        def codegen(context, builder, signature, args):
            text = f"wgmma.wait_group.sync.aligned {pending};"
            found = assembly(builder, struct, elements(builder, args[0]), text, constraints)
            return packed(builder, F32, [builder.extract_value(found, i) for i in range(count)])

        return floats(count)(acc), codegen

    return wait


def make_undefined(count):
    """Accumulators of no value, for a wgmma that does not read them."""

    @intrinsic
    def undefined(typingctx):
        def codegen(context, builder, signature, args):
            return ir.Constant(ir.ArrayType(F32, count), ir.Undefined)

        return floats(count)(), codegen

    return undefined


def make_zeros(count):
    @intrinsic
    def zeros(typingctx):
        def codegen(context, builder, signature, args):
            return packed(builder, F32, [F32(0.0)] * count)

        return floats(count)(), codegen

    return zeros


def multiply_add(builder, x, y, z):
    return assembly(builder, F32, [x, y, z], "fma.rn.ftz.f32 $0, $1, $2, $3;", "=f,f,f,f", False)


# Fragments


def half(i):
    """Which of a thread's two rows element i is of."""
    return (i >> 1) & 1


def maximum(builder, a, b):
    return assembly(builder, F32, [a, b], "max.f32 $0, $1, $2;", "=f,f,f", False)


def exp2(builder, x, effect=False):
    return assembly(builder, F32, [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f", effect)


def over_quad(builder, x, join):
    for lanes in (1, 2):
        text = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"
        other = assembly(builder, I32, [builder.bitcast(x, I32)], text, "=r,r")
        x = join(builder, x, builder.bitcast(other, F32))
    return x


def joined(builder, values, join):
    """In pairs, so that no chain is longer than it must be."""
    while len(values) > 1:
        values = [join(builder, a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def add(builder, a, b):
    return builder.fadd(a, b)


def by_rows(work, count):
    """An intrinsic of pairs: element-wise ``work`` on the rows' values."""

    def body(typingctx, *pairs):
        def codegen(context, builder, signature, args):
            both = [elements(builder, a) if isinstance(a.type, ir.ArrayType) else [a] * 2 for a in args]
            return packed(builder, F32, [work(builder, *column) for column in zip(*both, strict=True)])

        return floats(2)(*pairs), codegen

    return intrinsic(of_arguments(body, count))


rows_max = by_rows(maximum, 2)
rows_add = by_rows(add, 2)
rows_times = by_rows(lambda b, x, y: b.fmul(x, y), 2)
quad_max = by_rows(lambda b, x: over_quad(b, x, maximum), 1)
quad_sum = by_rows(lambda b, x: over_quad(b, x, add), 1)
# The reference of a row, in units of log2: raised to what m, scaled, needs; how sums move from one to another; where
# they have moved to, since no factor is above 2**60.
raised = by_rows(lambda b, r, m, scale: maximum(b, r, b.fmul(m, scale)), 3)
moved = by_rows(lambda b, old, new: maximum(b, new, b.fsub(old, F32(60.0))), 2)


def _factor(builder, old, new):
    least = assembly(builder, F32, [builder.fsub(old, new), F32(60.0)], "min.f32 $0, $1, $2;", "=f,f,f", False)
    return exp2(builder, least)


factor = by_rows(_factor, 2)
weights = by_rows(lambda b, x, most: exp2(b, b.fsub(x, most)), 2)  # of x, in units of log2, none larger than most


def _inverse(builder, x):
    """1 / x to an ulp or so, 0 for 0, NaN for NaN: by a step of Newton's, since a division would take a call."""
    first = assembly(builder, F32, [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f", False)
    minus = builder.fsub(F32(-0.0), x)
    error = assembly(builder, F32, [minus, first], "fma.rn.ftz.f32 $0, $1, $2, 0f3F800000;", "=f,f,f", False)
    second = assembly(builder, F32, [error, first], "fma.rn.ftz.f32 $0, $1, $2, $2;", "=f,f,f", False)
    return builder.select(builder.fcmp_unordered(">", x, F32(0.0)), second, F32(0.0))


def _log_sum(builder, reference, x):
    """Natural logarithm of 2 ** reference * x, -inf for x = 0, NaN for NaN."""
    log2 = assembly(builder, F32, [x], "lg2.approx.ftz.f32 $0, $1;", "=f,f", False)
    found = builder.fmul(builder.fadd(reference, log2), F32(0.6931471805599453))
    return builder.select(builder.fcmp_unordered(">", x, F32(0.0)), found, F32(float("-inf")))


inverses, log_sums = by_rows(_inverse, 1), by_rows(_log_sum, 2)


def by_halves(builder, tile, join):
    """A pair: of a tile's elements in each row, all joined."""
    e = elements(builder, tile)
    rows = ([x for i, x in enumerate(e) if half(i) == h] for h in (0, 1))
    return packed(builder, F32, [joined(builder, row, join) for row in rows])


@intrinsic
def tile_max(typingctx, s):
    """This thread's largest score of each row."""

    def codegen(context, builder, signature, args):
        return by_halves(builder, args[0], maximum)

    return floats(2)(s), codegen


@intrinsic
def tile_most(typingctx, s):
    """This thread's largest magnitude of each row."""

    def codegen(context, builder, signature, args):
        magnitudes = [assembly(builder, F32, [x], "abs.f32 $0, $1;", "=f,f", False) for x in elements(builder, args[0])]
        return by_halves(builder, packed(builder, F32, magnitudes), maximum)

    return floats(2)(s), codegen


@intrinsic
def tile_sum(typingctx, p):
    """This thread's sum of each row."""

    def codegen(context, builder, signature, args):
        return by_halves(builder, args[0], add)

    return floats(2)(p), codegen


def _make_exp_tile(effect):
    @intrinsic
    def exp_tile(typingctx, s, reference, scale):
        """2 ** (s * scale - reference)."""

        def codegen(context, builder, signature, args):
            minus = [builder.fsub(F32(-0.0), r) for r in elements(builder, args[1])]
            found = []
            for i, x in enumerate(elements(builder, args[0])):
                text = "fma.rn.ftz.f32 $0, $1, $2, $3;"
                y = assembly(builder, F32, [x, args[2], minus[half(i)]], text, "=f,f,f,f", False)
                found.append(exp2(builder, y, effect))
            return packed(builder, F32, found)

        return floats(s.count)(s, reference, scale), codegen

    return exp_tile


exp_tile, exp_tile_in_place = _make_exp_tile(False), _make_exp_tile(True)  # the second keeps its place among wgmmas


@intrinsic
def mask_tile(typingctx, s, seen):
    """-inf where a bit of the row's 64 is off; the bits are shifted right by the lane's first column."""

    def codegen(context, builder, signature, args):
        bits = elements(builder, args[1])
        found = []
        for i, x in enumerate(elements(builder, args[0])):
            bit = 1 << (8 * (i // 4) + (i & 1))
            of_row = builder.and_(bits[half(i)], I64(bit - (1 << 64 if bit >> 63 else 0)))
            on = builder.icmp_unsigned("!=", of_row, I64(0))
            found.append(builder.select(on, x, F32(float("-inf"))))
        return packed(builder, F32, found)

    return floats(s.count)(s, seen), codegen


@intrinsic
def scale_tile(typingctx, acc, factors):
    def codegen(context, builder, signature, args):
        f = elements(builder, args[1])
        return packed(builder, F32, [builder.fmul(x, f[half(i)]) for i, x in enumerate(elements(builder, args[0]))])

    return floats(acc.count)(acc, factors), codegen


def rounded_pair(builder, kind, low, high):
    """Two float32 to a word of two 16-bit numbers, each to nearest, ties to even."""
    return assembly(builder, I32, [high, low], f"cvt.rn.{kind}x2.f32 $0, $1, $2;", "=r,f,f", False)


def make_pack_tile(kind):
    @intrinsic
    def pack_tile(typingctx, p):
        def codegen(context, builder, signature, args):
            e = elements(builder, args[0])
            return packed(builder, I32, [rounded_pair(builder, kind, *e[i : i + 2]) for i in range(0, len(e), 2)])

        return words(p.count // 2)(p), codegen

    return pack_tile


@intrinsic
def store_matrices(typingctx, tile, row, high, low_bits):
    """stmatrix: a 64 x 64 tile of words to a swizzled block; row: address of row 16 w + l % 16, high: l / 16, l % 8."""

    def codegen(context, builder, signature, args):
        given = elements(builder, args[0])
        row, high, low_bits = (sized(builder, a, 32) for a in args[1:])
        for m in range(len(given) // 4):
            chunk = builder.xor(builder.add(high, I32(2 * m)), low_bits)
            place = builder.add(row, builder.shl(chunk, I32(4)))
            text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"
            assembly(builder, VOID, [place, *given[4 * m : 4 * m + 4]], text, "r,r,r,r,r,~{memory}")
        return context.get_dummy_value()

    return types.void(tile, row, high, low_bits), codegen


@intrinsic
def clear_tile(typingctx, acc, inverse):
    """Zeros for rows of inverse 0, where there may be NaN, of rows that nobody sees."""

    def codegen(context, builder, signature, args):
        live = [builder.fcmp_unordered(">", f, F32(0.0)) for f in elements(builder, args[1])]
        found = [builder.select(live[half(i)], x, F32(0.0)) for i, x in enumerate(elements(builder, args[0]))]
        return packed(builder, F32, found)

    return floats(acc.count)(acc, inverse), codegen


@intrinsic
def store_floats(typingctx, acc, at, below, inverse, stored, stored_below):
    """Two rows of float32, scaled; at, below: addresses of the rows' columns 2 (l % 4)."""

    def codegen(context, builder, signature, args):
        e, f = elements(builder, args[0]), elements(builder, args[3])
        for h in (0, 1):
            there = builder.icmp_signed("!=", args[4 + h], args[4 + h].type(0))
            with builder.if_then(there):
                for j in range(len(e) // 4):
                    place = builder.add(args[1 + h], I64(32 * j))
                    pair = [builder.fmul(e[4 * j + 2 * h + i], f[h]) for i in (0, 1)]
                    assembly(builder, VOID, [place, *pair], "st.global.v2.f32 [$0], {$1,$2};", "l,f,f,~{memory}")
        return context.get_dummy_value()

    return types.void(acc, at, below, inverse, stored, stored_below), codegen


@intrinsic
def store_state(typingctx, acc, at, factors):
    """All accumulators of this thread, times their rows' factors, as float16, eight by eight, 512 bytes apart."""

    def codegen(context, builder, signature, args):
        f = elements(builder, args[2])
        x = [builder.fmul(value, f[half(i)]) for i, value in enumerate(elements(builder, args[0]))]
        words = [rounded_pair(builder, "f16", *x[i : i + 2]) for i in range(0, len(x), 2)]
        for j in range(len(words) // 4):
            text = f"st.global.v4.b32 [$0+{512 * j}], {{$1,$2,$3,$4}};"
            assembly(builder, VOID, [args[1], *words[4 * j : 4 * j + 4]], text, "l,r,r,r,r,~{memory}")
        return context.get_dummy_value()

    return types.void(acc, at, factors), codegen


@intrinsic
def add_state(typingctx, acc, state, factors):
    """Accumulators and a state's words, times their rows' factors."""

    def codegen(context, builder, signature, args):
        e, f = elements(builder, args[0]), elements(builder, args[2])
        text = "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $2;\ncvt.f32.f16 $0, low;\ncvt.f32.f16 $1, high;\n}"
        found = []
        for word in elements(builder, args[1]):
            two = assembly(builder, ir.LiteralStructType([F32] * 2), [word], text, "=f,=f,r", False)
            for i in (0, 1):
                k = len(found)
                found.append(multiply_add(builder, builder.extract_value(two, i), f[half(k)], e[k]))
        return packed(builder, F32, found)

    return floats(acc.count)(acc, state, factors), codegen


@intrinsic
def keep_part(typingctx, acc, at):
    """Accumulators to shared memory, 1024 bytes apart."""

    def codegen(context, builder, signature, args):
        for k, x in enumerate(elements(builder, args[0])):
            place = builder.add(sized(builder, args[1], 32), I32(1024 * k))
            assembly(builder, VOID, [place, x], "st.shared.f32 [$0], $1;", "r,f,~{memory}")
        return context.get_dummy_value()

    return types.void(acc, at), codegen


@intrinsic
def add_part(typingctx, acc, at, factors):
    """Accumulators and as many numbers in shared memory, 1024 bytes apart, times their rows' factors."""

    def codegen(context, builder, signature, args):
        e, f = elements(builder, args[0]), elements(builder, args[2])
        found = []
        for k, x in enumerate(e):
            place = builder.add(sized(builder, args[1], 32), I32(1024 * k))
            y = assembly(builder, F32, [place], "ld.shared.f32 $0, [$1];", "=f,r,~{memory}")
            found.append(multiply_add(builder, y, f[half(k)], x))
        return packed(builder, F32, found)

    return floats(acc.count)(acc, at, factors), codegen


def make_store_halves(kind):
    @intrinsic
    def store_halves(typingctx, acc, at, below, inverse, stored, stored_below, room, lane):
        """Two rows of 16-bit numbers, scaled, 16 bytes a lane, by way of a kilobyte of shared memory of the warp.

        at, below: addresses of the rows' columns 8 (l % 4). Of 32 columns at a time, matrices of 8 x 8 are stored to 64
        bytes a row, whose 16-byte chunks change places so that banks are used evenly, and read again row by row.
        """

        def codegen(context, builder, signature, args):
            e, f = elements(builder, args[0]), elements(builder, args[3])
            room, lane = sized(builder, args[6], 32), sized(builder, args[7], 32)
            there = [builder.zext(builder.icmp_signed("!=", a, a.type(0)), I32) for a in args[4:6]]

            def bits(first, count):
                return builder.and_(builder.lshr(lane, I32(first)), I32((1 << count) - 1))

            def place_of(row, chunk):
                chunk = builder.xor(chunk, builder.and_(builder.lshr(row, I32(1)), I32(3)))
                return builder.add(room, builder.add(builder.shl(row, I32(6)), builder.shl(chunk, I32(4))))

            kept = place_of(builder.and_(lane, I32(15)), bits(4, 1))
            kept_behind = builder.xor(kept, I32(32))
            read = place_of(bits(2, 3), bits(0, 2))
            for m in range(len(e) // 16):
                x = [builder.fmul(y, f[half(i)]) for i, y in enumerate(e[16 * m : 16 * m + 16])]
                given = [rounded_pair(builder, kind, *x[i : i + 2]) for i in range(0, 16, 2)]
                for place, four in ((kept, given[:4]), (kept_behind, given[4:])):
                    text = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};"
                    assembly(builder, VOID, [place, *four], text, "r,r,r,r,r,~{memory}")
                text = (
                    "bar.warp.sync 0xffffffff;\nld.shared.v4.b32 {$0,$1,$2,$3}, [$8];\n"
                    "ld.shared.v4.b32 {$4,$5,$6,$7}, [$8+512];\nbar.warp.sync 0xffffffff;"
                )
                found = assembly(
                    builder, ir.LiteralStructType([I32] * 8), [read], text, ",".join(["=r"] * 8 + ["r", "~{memory}"])
                )
                text = (
                    f"{{\n.reg .pred p;\nsetp.ne.b32 p, $5, 0;\n@p st.global.v4.b32 [$0+{64 * m}], {{$1,$2,$3,$4}};\n}}"
                )
                for h in (0, 1):
                    four = [builder.extract_value(found, 4 * h + i) for i in range(4)]
                    assembly(builder, VOID, [args[1 + h], *four, there[h]], text, "l,r,r,r,r,r,~{memory}")
            return context.get_dummy_value()

        return types.void(acc, at, below, inverse, stored, stored_below, room, lane), codegen

    return store_halves
