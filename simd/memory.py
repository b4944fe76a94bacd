"""Memory for kernels: aligned arrays, scratch arrays per thread, and access by address from inside kernels.

A vector load across two cache lines takes twice as long as one within a line, and with 64-byte vectors either all do or none.
So arrays that inner loops read with vectors begin at a cache line.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from math import prod

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import DTypeLike

from . import llvm
from .compile import intrinsic, kernel
from .llvm import CACHE_LINE

_thread_arrays = threading.local()
_I32, _I64 = ir.IntType(32), ir.IntType(64)


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """A C-contiguous array, not initialised, whose first element lies at the beginning of a cache line."""
    size = prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(size + CACHE_LINE, np.uint8)
    start = -buffer.ctypes.data % CACHE_LINE
    return buffer[start : start + size].view(dtype).reshape(shape)


def sparse_zeros(count: int) -> np.ndarray:
    """float32 [count] of zeros that begins at a page. Pages that are never written take no memory (on Windows they count as
    used, but are not in memory), as those of the lower half of a triangular matrix."""
    nbytes = max(count, 1) * 4
    if not hasattr(mmap, "MAP_PRIVATE"):
        return np.zeros(count, np.float32)
    mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # which would make pages of what lies between written ones
        with suppress(OSError):  # of a kernel without huge pages
            mapped.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(mapped, np.float32, count)


def scratch(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """As `aligned_empty`, from a buffer that this thread keeps under `name`: valid until it asks for that name again."""
    size = prod(shape) * np.dtype(dtype).itemsize
    buffer = getattr(_thread_arrays, name, None)
    if buffer is None or buffer.size < size:
        buffer = aligned_empty((size,), np.uint8)
        setattr(_thread_arrays, name, buffer)
    return buffer[:size].view(dtype).reshape(shape)


# --- in kernels only; addresses are not checked ---------------------------------------------------------------------


@intrinsic
def address(typingctx, array):
    """The address of an array's first element, as int64; the caller keeps the array alive while the address is used."""
    if not isinstance(array, types.Array):
        return None

    def generate(context, builder, signature, args):
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, _I64)

    return types.int64(array), generate


@kernel
def line_address(array):
    """The address of the first cache line that begins in an array: `CACHE_LINE` bytes more than are used suffice."""
    return (address(array) + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@intrinsic
def view(typingctx, address, shape, dtype):
    """The elements of a dtype (np.float32, ...) that begin at an address, as a C-contiguous array; shape: int or tuple of ints.

    As numba.carray, which is compiled as a function of its own for every dtype.
    """
    shape_type = shape if isinstance(shape, types.BaseTuple) else types.UniTuple(types.int64, 1)
    array_type = types.Array(dtype.dtype, len(shape_type), "C")

    def generate(context, builder, signature, args):
        extents = cgutils.unpack_tuple(builder, args[1]) if isinstance(shape, types.BaseTuple) else [args[1]]
        from numba.np.arrayobj import populate_array  # most commands find their kernels compiled, and need not import it

        array = context.make_array(array_type)(context, builder)
        item_bytes = context.get_abi_sizeof(context.get_data_type(dtype.dtype))
        strides = [_I64(item_bytes)]
        for extent in extents[:0:-1]:
            strides.insert(0, builder.mul(strides[0], extent, flags=["nsw"]))
        data = builder.inttoptr(args[0], context.get_data_type(dtype.dtype).as_pointer())
        populate_array(array, data, extents, strides, item_bytes, None)
        return array._getvalue()

    extent_types = types.UniTuple(types.int64, len(shape_type)) if isinstance(shape, types.BaseTuple) else types.int64
    return array_type(types.int64, extent_types, dtype), generate


@intrinsic
def keep_alive(typingctx, array):
    """Does nothing, but the array stays alive until here, where only its address was used."""

    def generate(context, builder, signature, args):
        return context.get_dummy_value()

    return types.void(array), generate


@intrinsic
def prefetch_lines(typingctx, address, size):
    """Asks for the cache lines of `size` bytes (a literal) from an address on, to be read, into the second-level cache; where
    no memory is, nothing happens."""
    if not isinstance(size, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, args):
        for offset in range(0, size.literal_value, CACHE_LINE):
            llvm.prefetch(builder, args[0], offset, 2)
        return context.get_dummy_value()

    return types.void(types.int64, size), generate


@intrinsic
def prefetch_elements(typingctx, row, index, count):
    """Asks for `count` (a literal) elements of a row from row[index] on, to be read, into the nearest cache; beyond the row's
    end, too."""
    if not isinstance(count, types.IntegerLiteral) or not isinstance(row, types.Array):
        return None

    def generate(context, builder, signature, args):
        first = builder.gep(context.make_array(row)(context, builder, args[0]).data, [args[1]])
        address = builder.ptrtoint(first, _I64)  # a load from a place nearby shares its registers
        for offset in range(0, row.dtype.bitwidth // 8 * count.literal_value, CACHE_LINE):
            llvm.prefetch(builder, address, offset, 3)
        return context.get_dummy_value()

    return types.void(row, types.intp, count), generate


@kernel
def elements_to_line(x):
    """How many elements of a row of float32 lie before its first cache line. 0 if they are not whole groups of four."""
    elements = -address(x) % CACHE_LINE // 4
    keep_alive(x)
    return elements if elements % 4 == 0 else 0


@kernel
def fill(array, value):
    """Sets all elements of an array of one dimension: numba's `array[:] = value` takes far longer to compile."""
    for i in range(array.size):
        array[i] = value


@intrinsic
def load_word(typingctx, address):
    """The uint32 at any address (uint64); an array would need alignment, or a multiplication per access."""

    def generate(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], _I32.as_pointer()), align=1)

    return types.uint32(types.uint64), generate


@intrinsic
def store_word(typingctx, address, word):
    """Writes a uint32 to any address (uint64)."""

    def generate(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], _I32.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint32), generate
