"""The pieces that attention is made of: products of small tiles, transposition, conversions, sixteen numbers at a time.

A *panel* is PANEL columns of a matrix, its rows one after the other: what a tile of a product reads from start to end. The
tile keeps ROWS x PANEL sums in registers: 24 of the 32 that AVX-512 has, 12 of the 16 of AVX2.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function

from ......simd.compile import intrinsic, kernel
from ......simd.exponential import exp_lanes
from ......simd.half_precision import float_to_half
from ......simd.lane_types import F32, LANES, element_pointer
from ......simd.target import target

WIDE = target().vector_bits == 512
VECTORS = 4 if WIDE else 1  # of sixteen columns
PANEL = LANES * VECTORS
ROWS = 6

_INT, _FLOAT, _VECTOR = ir.IntType(64), ir.FloatType(), F32.vector
_NUMBERS = ir.VectorType(ir.IntType(32), LANES)


def _pointer(builder, address, kind):
    return builder.inttoptr(address, kind.as_pointer())


def _tile(rows: int):
    """The operation (a, a_step, b, c, c_step, depth, fresh): c = a b, or c += a b unless fresh.

    a: address of float32 [rows, depth], its rows a_step bytes apart; b: of a panel [depth, PANEL]; c: of [rows, PANEL], its
    rows c_step bytes apart.
    """

    @intrinsic
    def tile(typingctx, a, a_step, b, c, c_step, depth, fresh):
        def generate(context, builder, signature, args):
            a, a_step, b, c, c_step, depth, fresh = args
            fma = get_or_insert_function(builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32")
            places = [(r, v) for r in range(rows) for v in range(VECTORS)]
            into = [builder.add(c, builder.add(builder.mul(c_step, _INT(r)), _INT(64 * v))) for r, v in places]
            zero = ir.Constant(_VECTOR, [0.0] * LANES)
            first = builder.block
            start, loop, end = (builder.append_basic_block(name) for name in ("tile.start", "tile.loop", "tile.end"))
            builder.cbranch(fresh, loop, start)
            builder.position_at_end(start)
            before = [builder.load(_pointer(builder, place, _VECTOR), align=4) for place in into]
            builder.branch(loop)
            builder.position_at_end(loop)
            k = builder.phi(_INT)
            sums = [builder.phi(_VECTOR) for _ in places]
            k.add_incoming(_INT(0), first)
            k.add_incoming(_INT(0), start)
            for total, old in zip(sums, before, strict=True):
                total.add_incoming(zero, first)
                total.add_incoming(old, start)
            row = builder.add(b, builder.mul(k, _INT(4 * PANEL)))
            parts = [builder.load(_pointer(builder, builder.add(row, _INT(64 * v)), _VECTOR), align=4) for v in range(VECTORS)]
            new = list(sums)
            undefined, zeros = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_NUMBERS, [0] * LANES)
            for r in range(rows):
                begin = _pointer(builder, builder.add(a, builder.mul(a_step, _INT(r))), _FLOAT)
                number = builder.load(builder.gep(begin, [k]), align=4)
                factor = builder.shuffle_vector(builder.insert_element(undefined, number, ir.IntType(32)(0)), undefined, zeros)
                for v in range(VECTORS):
                    at = r * VECTORS + v
                    new[at] = builder.call(fma, [factor, parts[v], sums[at]])
            following = builder.add(k, _INT(1))
            k.add_incoming(following, builder.block)
            for total, result in zip(sums, new, strict=True):
                total.add_incoming(result, builder.block)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, end)
            builder.position_at_end(end)
            for place, result in zip(into, new, strict=True):
                builder.store(result, _pointer(builder, place, _VECTOR), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, types.boolean), generate

    return tile


_six, _four, _two, _one = (_tile(rows) for rows in (ROWS, 4, 2, 1))


@kernel
def multiply(a, a_step, rows, b, panels, depth, c, c_step, fresh):
    """c = a b, or c += a b unless fresh: a float32 [rows, depth], b `panels` panels of PANEL x depth, c [rows, panels * PANEL].

    a, b, c: addresses; a_step, c_step: bytes from row to row. depth has to be positive.
    """
    for panel in range(panels):
        from_, to, r = b + 4 * PANEL * depth * panel, c + 4 * PANEL * panel, 0
        while r + ROWS <= rows:
            _six(a + r * a_step, a_step, from_, to + r * c_step, c_step, depth, fresh)
            r += ROWS
        if r + 4 <= rows:
            _four(a + r * a_step, a_step, from_, to + r * c_step, c_step, depth, fresh)
            r += 4
        if r + 2 <= rows:
            _two(a + r * a_step, a_step, from_, to + r * c_step, c_step, depth, fresh)
            r += 2
        if r < rows:
            _one(a + r * a_step, a_step, from_, to + r * c_step, c_step, depth, fresh)


@intrinsic
def transpose(typingctx, source, source_step, target, target_step):
    """Writes sixteen rows of sixteen float32 as columns. Addresses of the first rows, and bytes from row to row."""

    def generate(context, builder, signature, args):
        source, source_step, target, target_step = args
        rows = []
        for r in range(LANES):
            place = builder.add(source, builder.mul(source_step, _INT(r)))
            rows.append(builder.load(_pointer(builder, place, _VECTOR), align=4))
        step = LANES // 2
        while step:
            # Blocks of step x step beside the diagonal of blocks twice that size change places.
            low = ir.Constant(_NUMBERS, [j if not j & step else LANES + j - step for j in range(LANES)])
            high = ir.Constant(_NUMBERS, [j + step if not j & step else LANES + j for j in range(LANES)])
            for r in range(LANES):
                if not r & step:
                    a, b = rows[r], rows[r + step]
                    rows[r], rows[r + step] = builder.shuffle_vector(a, b, low), builder.shuffle_vector(a, b, high)
            step //= 2
        for r, row in enumerate(rows):
            place = builder.add(target, builder.mul(target_step, _INT(r)))
            builder.store(row, _pointer(builder, place, _VECTOR), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def store_as_half(typingctx, words, index, value):
    """Writes float32 lanes as float16 to a uint16 row, ties to even; what is too large becomes infinite, NaN stays NaN."""

    def generate(context, builder, signature, args):
        place = element_pointer(context, builder, signature.args[0], args[0], args[1], ir.IntType(16))
        builder.store(float_to_half(builder, args[2]), place, align=2)
        return context.get_dummy_value()

    return types.void(words, types.intp, F32), generate


@intrinsic
def store_as_bfloat(typingctx, words, index, value):
    """Writes float32 lanes as bfloat16 to a uint16 row, ties to even; NaN stays NaN."""

    def generate(context, builder, signature, args):
        def every(number):
            return ir.Constant(_NUMBERS, [number] * LANES)

        bits = builder.bitcast(args[2], _NUMBERS)
        odd = builder.and_(builder.lshr(bits, every(16)), every(1))
        rounded = builder.add(bits, builder.add(odd, every(0x7FFF)))
        kept = builder.select(builder.fcmp_unordered("uno", args[2], args[2]), builder.or_(bits, every(1 << 22)), rounded)
        words = builder.trunc(builder.lshr(kept, every(16)), ir.VectorType(ir.IntType(16), LANES))
        builder.store(words, element_pointer(context, builder, signature.args[0], args[0], args[1], ir.IntType(16)), align=2)
        return context.get_dummy_value()

    return types.void(words, types.intp, F32), generate


@intrinsic
def load_bfloat(typingctx, words, index):
    """Sixteen bfloat16 of a uint16 row, as float32 lanes."""

    def generate(context, builder, signature, args):
        place = element_pointer(context, builder, signature.args[0], args[0], args[1], ir.IntType(16))
        wide = builder.zext(builder.load(place, align=2), _NUMBERS)
        return builder.bitcast(builder.shl(wide, ir.Constant(_NUMBERS, [16] * LANES)), _VECTOR)

    return F32(words, types.intp), generate


@kernel
def capped(x, cap):
    """cap * tanh(x / cap) per lane; cap a number."""
    e = exp_lanes(x * (2 / cap))
    return cap - (2 * cap) / (e + 1)
