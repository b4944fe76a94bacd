"""Intel's tile unit (AMX): whether this process may use it, and its instructions as pieces of LLVM code.

The operating system hands out the tiles' registers on request, once per process (Linux: arch_prctl); threads started later have
them too. Tiles are configured per thread, at the beginning of a kernel, and given back at its end.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache

from llvmlite import ir
from numba.core import types
from numba.core.cgutils import alloca_once, get_or_insert_function

from .compile import intrinsic
from .llvm import I8, features

ROWS, ROW_BYTES, TILES = 16, 64, 8
_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_PERM, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1022, 0x1023, 18


@cache
def permitted() -> bool:
    """Whether the processor has bf16 tiles and the operating system lets this process use them (asks it to).

    The environment variable GGUFMILL_AMX=0 says no, for comparing.
    """
    if os.environ.get("GGUFMILL_AMX") == "0":
        return False
    if not {"amx-tile", "amx-bf16", "avx512f"} <= features():
        return False
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    if syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, ctypes.c_ulong(_XTILEDATA)) != 0:
        return False
    granted = ctypes.c_uint64(0)
    if syscall(_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_PERM, ctypes.byref(granted)) != 0:
        return False
    return bool(granted.value >> _XTILEDATA & 1)


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
