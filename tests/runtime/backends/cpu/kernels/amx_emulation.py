"""The instructions of the tile unit (AMX) as LLVM code for any processor: tiles lie in memory. Importing it replaces them, so
it has to come before any kernel is compiled, and kernels compiled with it must not be kept with others (GGUFMILL_CACHE)."""

import numpy as np
from llvmlite import ir
from numba.core import types

from ggufmill.simd.compile import intrinsic
from ggufmill.simd.instructions import amx
from ggufmill.simd.llvm import F32X16, I32, I32X16, I64, load, loop, splat, store

TILE_BYTES = amx.ROWS * amx.ROW_BYTES
MEMORY = np.zeros(amx.TILES * TILE_BYTES + 64, np.uint8)
FIRST = -(-MEMORY.ctypes.data // 64) * 64


def words(value):
    return ir.Constant(I32X16, [value] * 16)


def tile_address(tile):
    return I64(FIRST + TILE_BYTES * tile)


def zero(builder, tile):
    for row in range(amx.ROWS):
        store(builder, words(0), tile_address(tile), amx.ROW_BYTES * row)


def copy_rows(builder, source, source_step, target, target_step):
    def copy(row):
        value = load(builder, source, I32X16, builder.mul(row, source_step))
        store(builder, value, target, builder.mul(row, target_step))

    loop(builder, I64(amx.ROWS), copy)


def load_tile(builder, tile, address, step):
    copy_rows(builder, address, step, tile_address(tile), I64(amx.ROW_BYTES))


def store_tile(builder, tile, address, step):
    copy_rows(builder, tile_address(tile), I64(amx.ROW_BYTES), address, step)


def add_products(builder, total, left, right):
    b = builder

    def add_row(row):
        place = b.mul(row, I64(amx.ROW_BYTES))

        def add_pair(pair):
            a = splat(b, load(b, tile_address(left), I32, b.add(place, b.mul(pair, I64(4)))))
            other = load(b, tile_address(right), I32X16, b.mul(pair, I64(amx.ROW_BYTES)))
            value = load(b, tile_address(total), F32X16, place)
            even = [b.shl(word, words(16)) for word in (a, other)]
            odd = [b.and_(word, words(-0x10000)) for word in (a, other)]
            for x, y in (even, odd):
                value = b.fadd(value, b.fmul(b.bitcast(x, F32X16), b.bitcast(y, F32X16)))
            store(b, value, tile_address(total), place)

        loop(b, I64(16), add_pair)

    loop(b, I64(amx.ROWS), add_row)


@intrinsic
def nothing(typingctx):
    return types.void(), lambda context, builder, signature, args: context.get_dummy_value()


amx.permitted = lambda: True
amx.zero, amx.load_tile, amx.store_tile, amx.add_products = zero, load_tile, store_tile, add_products
amx.configure = amx.release = nothing
