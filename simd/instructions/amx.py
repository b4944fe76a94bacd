"""Intel's tile unit (AMX) with products of bf16: its instructions as pieces of LLVM code.

Tiles are configured per thread, at the beginning of a kernel, and given back at its end.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once

from ..compile import intrinsic
from ..llvm import I8, call, pointer
from ..target import target

ROWS, ROW_BYTES, TILES = 16, 64, 8


def permitted() -> bool:
    """Whether kernels may use the tile unit."""
    return target().has_amx


def _call(builder, name, *args):
    call(builder, f"llvm.x86.{name}", ir.VoidType(), *args)


def zero(builder, tile):
    """Sets all of a tile, 0 to 7, to 0."""
    _call(builder, "tilezero", I8(tile))


def load_tile(builder, tile, address, stride):
    """Loads sixteen rows of 64 bytes from an address, `stride` bytes from one to the next (both i64)."""
    _call(builder, "tileloadd64", I8(tile), pointer(builder, address, I8), stride)


def store_tile(builder, tile, address, stride):
    """Stores a tile as load_tile loads it."""
    _call(builder, "tilestored64", I8(tile), pointer(builder, address, I8), stride)


def add_products(builder, total, left, right):
    """total += left times right: tiles of float32 [16, 16], bf16 [16, 32], and bf16 [32, 16] with rows interleaved in pairs."""
    _call(builder, "tdpbf16ps", I8(total), I8(left), I8(right))


@intrinsic
def configure(typingctx):
    """Configures all eight tiles of this thread as 16 rows of 64 bytes."""

    def generate(context, builder, signature, args):
        # Palette 1, then at byte 16 the bytes per row as 16-bit numbers, at byte 48 the rows as bytes.
        content = [1] + [0] * 15 + [ROW_BYTES, 0] * TILES + [0] * 16 + [ROWS] * TILES + [0] * 8
        ir_type = ir.ArrayType(I8, 64)
        memory = alloca_once(builder, ir_type)
        builder.store(ir.Constant(ir_type, content), memory)
        _call(builder, "ldtilecfg", builder.bitcast(memory, I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def release(typingctx):
    """Gives the tiles of this thread back: the system no longer saves them when it switches threads."""

    def generate(context, builder, signature, args):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate
