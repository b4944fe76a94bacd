"""Intel's tile unit (AMX) with products of bf16: its instructions as pieces of LLVM code.

Tiles are configured per thread, at the beginning of a kernel, and given back at its end.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once, get_or_insert_function

from .compile import intrinsic
from .llvm import I8
from .target import target

ROWS, ROW_BYTES, TILES = 16, 64, 8


def permitted() -> bool:
    """Whether kernels may use the tile unit."""
    return target().has_amx


def _call(builder, name, *args):
    kind = ir.FunctionType(ir.VoidType(), [a.type for a in args])
    builder.call(get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _bytes_at(builder, address):
    return builder.inttoptr(address, I8.as_pointer())


def zero(builder, tile):
    _call(builder, "tilezero", I8(tile))


def load_tile(builder, tile, address, step):
    """Sixteen rows of 64 bytes, `step` bytes apart (both i64)."""
    _call(builder, "tileloadd64", I8(tile), _bytes_at(builder, address), step)


def store_tile(builder, tile, address, step):
    _call(builder, "tilestored64", I8(tile), _bytes_at(builder, address), step)


def add_products(builder, total, left, right):
    """total[i, j] += sum over 16 pairs of left[i, pair] * right[pair, j]: float32 sums of products of bf16."""
    _call(builder, "tdpbf16ps", I8(total), I8(left), I8(right))


@intrinsic
def configure(typingctx):
    """Makes all eight tiles of this thread 16 rows of 64 bytes."""

    def generate(context, builder, signature, args):
        # Palette 1, then at byte 16 the bytes per row as 16-bit numbers, at byte 48 the rows as bytes.
        content = [1] + [0] * 15 + [ROW_BYTES, 0] * TILES + [0] * 16 + [ROWS] * TILES + [0] * 8
        whole = ir.ArrayType(I8, 64)
        place = alloca_once(builder, whole)
        builder.store(ir.Constant(whole, content), place)
        _call(builder, "ldtilecfg", builder.bitcast(place, I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def release(typingctx):
    """Ends the use of tiles on this thread."""

    def generate(context, builder, signature, args):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate
