"""Matrix-vector products straight on packed weights: for generation, where every weight is read once for a token or a few.

    gemv(type_name) -> Gemv | None

A Gemv's `address` is a part for programs of team.py. Its argument is the address of an int64 table of FIELDS words:

    WEIGHTS, MATRIX_BYTES, ROW_BYTES   address of matrix 0, bytes from matrix to matrix (experts), bytes of a row
    ROWS, COLUMNS                      of a matrix
    SLICES                             parts that the rows of a matrix are cut into
    CODES, SCALES, SUMS                addresses of the activations as activations.quantise makes them; for types of floats
                                       (`activations` 0) CODES is that of float32 [n, columns] and the others are not read
    OUT, OUT_STRIDE                    address of float32 [n, OUT_STRIDE], of which the first ROWS columns are written
    JOBS                               address of int64 [jobs, 4]: MATRIX, FIRST, TOKENS, TARGET. Tokens FIRST ... of the
                                       activations times that matrix go to the rows TARGET ... of OUT
    ABREAST                            slices that are equally large, a divisor of SLICES: so many of the first have half of all
                                       rows, the next half of what is left, and so on, the last all of it

Part number p is slice p % SLICES of job p // SLICES, so a program's PARTS is jobs * SLICES. A slice reads its weights from
memory once for all of its tokens. A plain product is one job; a mixture of experts has one per expert. Threads that take large
slices first read long stretches of memory in order, which is up to a fifth faster than taking turns at short ones, and yet end
at about the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numba import types

from ......formats.types import TYPES
from ......simd.compile import intrinsic, kernel, native_entry
from ......simd.memory import view
from ......simd.team import call_part
from ..activations import Activations
from .emitter import Emitter
from .float_rows import FLOATS, emit_float_product
from .gemv_layout import gemv_layout
from .rows import emit_product

(WEIGHTS, MATRIX_BYTES, ROW_BYTES, ROWS, COLUMNS, SLICES, CODES, SCALES, SUMS, OUT, OUT_STRIDE, JOBS, ABREAST) = range(13)
FIELDS = 13
MATRIX, FIRST, TOKENS, TARGET = range(4)
TOGETHER = 4  # tokens whose products are computed in one pass over the codes of a group of rows


@intrinsic
def _multiply(typingctx, name, level, tokens, weights, columns, codes, scales, sums, out, stride):
    if not isinstance(name, types.StringLiteral):
        return None

    def generate(context, builder, signature, args):
        emit = Emitter(builder, level.literal_value)
        weights, columns, codes, scales, sums, out, stride = args[3:]
        kind, count = name.literal_value, tokens.literal_value
        if kind in FLOATS:
            emit_float_product(emit, kind, count, weights, columns, codes, out, stride)
        else:
            emit_product(emit, kind, count, weights, columns, (codes, scales, sums), out, stride)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(name, level, tokens, i64, i64, i64, i64, i64, i64, i64), generate


def _part(name: str, level: str, group: int, code_bytes: int, activations: int) -> Callable[[int, int], None]:
    def product(argument, number):
        table = view(argument, FIELDS, np.int64)
        job = view(table[JOBS] + number // table[SLICES] * 32, 4, np.int64)
        columns, n = table[COLUMNS], job[TOKENS]
        groups = table[ROWS] // group
        turn, place = number % table[SLICES] // table[ABREAST], number % table[ABREAST]
        left = groups >> turn
        share = left if (turn + 1) * table[ABREAST] == table[SLICES] else left - (left >> 1)
        start = groups - left + share * place // table[ABREAST]
        stop = groups - left + share * (place + 1) // table[ABREAST]
        codes = table[CODES] + job[FIRST] * columns * code_bytes
        scales = table[SCALES] + job[FIRST] * (columns // activations) * 4
        sums = table[SUMS] + job[FIRST] * (columns // 16) * 2
        stride = table[OUT_STRIDE] * 4
        for row in range(start * group, stop * group, group):
            weights = table[WEIGHTS] + job[MATRIX] * table[MATRIX_BYTES] + row * table[ROW_BYTES]
            out = table[OUT] + job[TARGET] * stride + row * 4
            t = 0
            while t < n:
                c = codes + t * columns * code_bytes
                s = scales + t * (columns // activations) * 4
                u = sums + t * (columns // 16) * 2
                if n - t >= TOGETHER:
                    _multiply(name, level, TOGETHER, weights, columns, c, s, u, out + t * stride, stride)
                    t += TOGETHER
                else:
                    _multiply(name, level, 1, weights, columns, c, s, u, out + t * stride, stride)
                    t += 1

    return product


@dataclass(frozen=True)
class Gemv:
    """The product of one type of weights.

    name         the type's
    activations  columns that one scale of the activations spans, 32 or 256; 0: float32 activations
    rows         slices hold multiples of so many rows
    columns      the row length has to be a multiple of this
    """

    name: str
    activations: int
    rows: int
    columns: int
    level: str = ""

    @cached_property
    def _native(self):
        code_bytes, block = (1, self.activations) if self.activations else (4, 1)
        function = _part(self.name, self.level, self.rows, code_bytes, block)
        return native_entry(types.void(types.int64, types.int64), function)

    @property
    def address(self) -> int:
        """The address of the compiled part (compiled or loaded at the first use)."""
        return self._native.address


@cache
def gemv(type_name: str, level: str = "") -> Gemv | None:
    """The product for a type's name (any letter case), None if there is none. level: as for Emitter; '': the best here."""
    kind = TYPES[type_name]
    if kind.name in FLOATS:
        return Gemv(kind.name, 0, kind.rows, FLOATS[kind.name].columns, level)
    layout = gemv_layout(kind.name)
    return Gemv(kind.name, layout.activations, kind.rows, max(layout.block, layout.activations), level) if layout else None


def products() -> list[str]:
    """The names of all types that have one."""
    return [name for name in TYPES if gemv(name) is not None]


@kernel
def run_parts(address, argument, first, stop):
    """Calls parts first to stop - 1 of a compiled part, on this thread."""
    for number in range(first, stop):
        call_part(address, argument, number)


def multiply(packed: np.ndarray, type_name: str, activations: Activations | np.ndarray, level: str = "") -> np.ndarray:
    """uint8 [rows, row_bytes] of a type times n tokens -> float32 [n, rows], on one thread.

    activations: quantised with the block that gemv(type_name).activations says, or float32 [n, columns] if that is 0.
    """
    product = gemv(type_name, level)
    if product is None:
        raise ValueError(f"{type_name} has no matrix-vector product")
    arrays = list(activations[:3]) if isinstance(activations, Activations) else [np.asarray(activations, np.float32)]
    arrays = [np.ascontiguousarray(a) for a in arrays]
    (n, columns), rows = arrays[0].shape, len(packed)
    packed = np.ascontiguousarray(packed)
    out = np.empty((n, rows), np.float32)
    jobs = np.array([[0, 0, n, 0]], np.int64)
    inputs = [a.ctypes.data for a in arrays] + [0, 0]
    table = np.array(
        [packed.ctypes.data, 0, packed.shape[1], rows, columns, 1, *inputs[:3], out.ctypes.data, rows, jobs.ctypes.data, 1],
        np.int64,
    )
    run_parts(product.address, table.ctypes.data, 0, 1)
    return out
