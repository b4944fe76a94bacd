"""What attention kernels are made of: products with panels, transposition, conversions, sixteen numbers at a time.

A *panel* is PANEL columns of a matrix, row after row: a register tile of a product reads it from start to end. The tile keeps
ROWS x PANEL sums in registers: 24 of the 32 that AVX-512 has, 12 of the 16 of AVX2.
"""

from __future__ import annotations

from numba import types
from numba.core.cgutils import alloca_once

from ......simd.compile import intrinsic, kernel
from ......simd.exponential import exp_lanes
from ......simd.instructions.half_precision import float_to_half
from ......simd.instructions.x86 import vdpbf16ps
from ......simd.lane_types import F32 as LANES_F32
from ......simd.lane_types import element_pointer
from ......simd.llvm import (
    F32,
    F32X16,
    I16,
    I32,
    I32X16,
    I64,
    LANES,
    constant,
    fma,
    load,
    loop,
    prefetch,
    splat,
    store,
    vector,
)  # fmt: skip
from ......simd.target import target
from ..gemm.float_panels import load_floats, nearest_bf16, transposed

VECTORS = 4 if target().vector_bits == 512 else 1  # of sixteen columns
PANEL = LANES * VECTORS
ROWS = 6
_VECTOR_BYTES = 4 * LANES
PAIRS = "bf16 pairs"  # words of two numbers, for processors with dot products of them


def ask_in_turn(builder, ahead, step, last):
    """LLVM code for a step of a loop: asks for one cache line of those from the address `ahead` to `last`. So memory that is
    needed soon comes while there is work to do; all of it at once would wait for what a processor keeps track of."""
    at = builder.add(ahead, builder.shl(step, I64(6)))
    prefetch(builder, builder.select(builder.icmp_signed("<", at, last), at, last), 0, 2)


def _register_tile(rows: int, type_name: str):
    """The operation (a, a_step, b, b_step, c, c_step, depth, overwrite, ahead, last): c = a b if overwrite, else c += a b.

    a: address of float32 [rows, depth], its rows a_step bytes apart; b: of [depth, PANEL] of the type, f32, f16 or bf16, its
    rows b_step bytes apart; of PAIRS both are words of two bf16, whose products are added up. c: of float32 [rows, PANEL], its
    rows c_step bytes apart. ahead, last: see `ask_in_turn`.
    """

    @intrinsic
    def register_tile(typingctx, a, a_step, b, b_step, c, c_step, depth, overwrite, ahead, last):
        def generate(context, builder, signature, args):
            a, a_step, b, b_step, c, c_step, depth, overwrite, ahead, last = args
            tile = [(row, v) for row in range(rows) for v in range(VECTORS)]
            c_rows = [builder.add(c, builder.mul(c_step, I64(row))) for row in range(rows)]
            sums = {place: alloca_once(builder, F32X16) for place in tile}
            with builder.if_else(overwrite) as (then, otherwise):
                with then:
                    for place in tile:
                        builder.store(constant(F32X16, 0.0), sums[place])
                with otherwise:
                    for row, v in tile:
                        builder.store(load(builder, c_rows[row], F32X16, _VECTOR_BYTES * v), sums[row, v])
            a_rows = [builder.add(a, builder.mul(a_step, I64(row))) for row in range(rows)]

            def step(i):
                ask_in_turn(builder, ahead, i, last)
                b_row, a_offset = builder.add(b, builder.mul(i, b_step)), builder.mul(i, I64(4))
                if type_name == PAIRS:
                    columns = [load(builder, b_row, I32X16, _VECTOR_BYTES * v) for v in range(VECTORS)]
                else:
                    columns = [load_floats(builder, target(), type_name, b_row, LANES * v) for v in range(VECTORS)]
                for row in range(rows):
                    factor = splat(builder, load(builder, a_rows[row], I32 if type_name == PAIRS else F32, a_offset))
                    for v in range(VECTORS):
                        total = builder.load(sums[row, v])
                        if type_name == PAIRS:
                            total = vdpbf16ps(builder, total, columns[v], factor)
                        else:
                            total = fma(builder, factor, columns[v], total)
                        builder.store(total, sums[row, v])

            loop(builder, depth, step)
            for row, v in tile:
                store(builder, builder.load(sums[row, v]), c_rows[row], _VECTOR_BYTES * v)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, types.boolean, types.int64, types.int64), generate

    return register_tile


# Which keys rows of queries see, as three numbers: how many of a block the first row sees, rows of a token, each of which sees
# one key more than the one before, and what the keys are: columns of panels, or their rows.
KEY_COLUMNS, KEY_ROWS = range(2)
ALL_KEYS = 0, 0, KEY_COLUMNS  # nothing is left out: without rows of a token, `first_row` is 0 whatever is seen


@kernel
def first_row(keys, panel):
    """The first row that sees a key of a panel whose columns are keys; 0 of other panels."""
    seen, members, places = keys
    return max(0, (panel * PANEL + 1 - seen) * members) if places == KEY_COLUMNS else 0


@kernel
def tile_depth(keys, row, rows, depth):
    """How many of `depth` keys, rows of a panel, are multiplied with the tile from a row on: those that the last of its ROWS
    rows sees. Tiles of 4, 2 or 1 rows, the last ones, all go as far as the last row sees. Keys that a row does not see have a
    weight of 0."""
    seen, members, places = keys
    return min(depth, seen + (min(row + ROWS, rows) - 1) // members) if places == KEY_ROWS else depth


def multiplication(type_name: str):
    """The kernel (a, a_step, rows, b, b_step, panel_step, panels, depth, c, c_step, overwrite, ahead, last, keys): c = a b if
    overwrite, else c += a b.

    a float32 [rows, depth], b [panels, depth, PANEL] of the type, f32, f16 or bf16, c float32 [rows, panels * PANEL]:
    addresses, and bytes from row to row, of b from panel to panel too. Of PAIRS a and b are words of two bf16 each, of which
    the second is of the next column, or key. depth has to be positive. ahead, last: addresses of the first and the last cache
    line to ask for meanwhile; any memory if none. keys: see `first_row` and `tile_depth`.
    """
    six_rows, four_rows, two_rows, one_row = (_register_tile(rows, type_name) for rows in (ROWS, 4, 2, 1))
    together = 2 if type_name == PAIRS else 1

    @kernel
    def multiply(a, a_step, rows, b, b_step, panel_step, panels, depth, c, c_step, overwrite, ahead, last, keys):
        for panel in range(panels):
            b_panel, c_panel, row = b + panel_step * panel, c + 4 * PANEL * panel, first_row(keys, panel)
            while row < rows:
                x, y, left = a + row * a_step, c_panel + row * c_step, rows - row
                steps = (tile_depth(keys, row, rows, depth * together) + together - 1) // together
                if left >= ROWS:
                    six_rows(x, a_step, b_panel, b_step, y, c_step, steps, overwrite, ahead, last)
                    row += ROWS
                elif left >= 4:
                    four_rows(x, a_step, b_panel, b_step, y, c_step, steps, overwrite, ahead, last)
                    row += 4
                elif left >= 2:
                    two_rows(x, a_step, b_panel, b_step, y, c_step, steps, overwrite, ahead, last)
                    row += 2
                else:
                    one_row(x, a_step, b_panel, b_step, y, c_step, steps, overwrite, ahead, last)
                    row += 1
                ahead += 64 * depth

    return multiply


_multiply = multiplication("f32")


@kernel
def multiply_panels(a, a_step, rows, b, panels, depth, c, c_step, overwrite, ahead, last, keys):
    """As `multiplication` of float32 panels that lie one after the other."""
    _multiply(a, a_step, rows, b, 4 * PANEL, 4 * PANEL * depth, panels, depth, c, c_step, overwrite, ahead, last, keys)


@intrinsic
def transpose(typingctx, source, source_step, target, target_step):
    """Writes sixteen rows of sixteen float32 as columns. Addresses of the first rows, and bytes from row to row."""

    def generate(context, builder, signature, args):
        source, source_step, target, target_step = args
        rows = [load(builder, source, F32X16, builder.mul(source_step, I64(row))) for row in range(LANES)]
        for row, value in enumerate(transposed(builder, rows)):
            store(builder, value, target, builder.mul(target_step, I64(row)))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def store_float16(typingctx, words, index, value):
    """Writes float32 lanes as float16 to a uint16 row, ties to even; what is too large becomes infinite, NaN stays NaN."""

    def generate(context, builder, signature, args):
        place = element_pointer(context, builder, signature.args[0], args[0], args[1], I16)
        builder.store(float_to_half(builder, args[2]), place, align=2)
        return context.get_dummy_value()

    return types.void(words, types.intp, LANES_F32), generate


@intrinsic
def store_bfloat16(typingctx, words, index, value):
    """Writes float32 lanes as bfloat16 to a uint16 row, ties to even; NaN stays NaN."""

    def generate(context, builder, signature, args):
        upper = builder.trunc(builder.lshr(nearest_bf16(builder, args[2]), constant(I32X16, 16)), vector(I16, LANES))
        builder.store(upper, element_pointer(context, builder, signature.args[0], args[0], args[1], I16), align=2)
        return context.get_dummy_value()

    return types.void(words, types.intp, LANES_F32), generate


@intrinsic
def load_bfloat16(typingctx, words, index):
    """Sixteen bfloat16 of a uint16 row, as float32 lanes."""

    def generate(context, builder, signature, args):
        place = element_pointer(context, builder, signature.args[0], args[0], args[1], I16)
        bits = builder.shl(builder.zext(builder.load(place, align=2), I32X16), constant(I32X16, 16))
        return builder.bitcast(bits, F32X16)

    return LANES_F32(words, types.intp), generate


@kernel
def soft_cap(x, cap):
    """cap * tanh(x / cap) per lane; cap a number."""
    e = exp_lanes(x * (2 / cap))
    return cap - (2 * cap) / (e + 1)
