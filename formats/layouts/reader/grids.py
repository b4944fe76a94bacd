"""Reading weights that are points of a grid, four or eight at a time, most of them with signs that are stored apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from .blocks import BlockReader, CodeVector
from .emitter import BYTES, I8, I32, I64, Emitter, constant, vector

_LOW_SEVEN_BITS, _LOWEST_BIT = 0x7F7F7F7F7F7F7F7F, 0x0101010101010101  # of every byte


class GridReader(BlockReader):
    """Vectors hold 64 columns of one row, or 16 of each of four rows."""

    def _code_vectors(self) -> list[CodeVector]:
        width = BYTES // self.rows
        rows = np.repeat(np.arange(self.rows), width)
        code_vectors = []
        for first in range(0, self.columns, width):
            columns = np.arange(first, first + width)
            code_vectors.append(CodeVector(rows, np.tile(np.where(columns < self.columns, columns, -1), self.rows)))
        return code_vectors

    def codes_less(self, subtracted: int, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        f, builder = self.layout, emit.builder
        assert f.grid is not None
        assert f.indices is not None
        assert subtracted == self.lowest, "values of grids fit unsigned bytes up to 128"
        size = f.grid.shape[1]
        points = self._in_all_blocks(f.indices)
        element = ir.IntType(8 * size)
        table = loaded.get("table")
        if table is None:
            packed = f.grid.copy().view(f"<u{size}")[:, 0]
            kind = ir.ArrayType(element, len(packed))
            table = loaded["table"] = _global(builder, ir.Constant(kind, packed.tolist()))
        values: Any = ir.Constant(vector(element, BYTES // size), ir.Undefined)
        for i in range(BYTES // size):
            row, column = code_vector.rows[i * size], code_vector.columns[i * size]
            if column < 0:
                values = builder.insert_element(values, element(0), I32(i))
                continue
            index = emit.number(base, points[row, column // size], self.size)
            values = builder.insert_element(values, builder.load(builder.gep(table, [I32(0), index]), align=size), I32(i))
        value = builder.bitcast(values, vector(I8, BYTES))
        if f.point_flags is not None:
            points = np.where(code_vector.columns < 0, 0, code_vector.columns) // 8
            bits = self._in_all_blocks(f.point_flags)[code_vector.rows, points, 0]
            as_is = emit.test(emit.gather(base, bits // 8, self.size), 1 << bits % 8)
            lift = builder.select(as_is, constant(I8, [0] * BYTES), constant(I8, [f.point_shift] * BYTES))
            value = builder.add(value, lift)
        negative = self.negative(emit, base, code_vector)
        if negative is None:
            return value
        middle = constant(I8, [-subtracted] * BYTES)
        return builder.select(negative, builder.sub(middle, value), builder.add(middle, value))

    def negative(self, emit: Emitter, base: Any, code_vector: CodeVector) -> Any:
        """<64 x i1>: which weights are negative; None for a type without signs."""
        f, builder = self.layout, emit.builder
        columns = np.where(code_vector.columns < 0, 0, code_vector.columns)
        if f.weight_signs is not None:
            bits = self._in_all_blocks(f.weight_signs)[code_vector.rows, columns, 0]
            if (np.diff(bits) == 1).all():
                return emit.mask(emit.load(base, int(bits[0]) // 8, I64))
            return emit.test(emit.gather(base, bits // 8, self.size), 1 << bits % 8)
        if f.sign_codes is None:
            return None
        codes = self._in_all_blocks(f.sign_codes)[code_vector.rows[::8], columns[::8] // 8]
        code = self._sevens(emit, base, codes)
        if f.scrambled:
            signs = builder.xor(code, builder.shl(code, I64(1)))
        else:
            odd = code  # the lowest bit of every byte becomes the parity of the byte
            for shift in (4, 2, 1):
                odd = builder.xor(odd, builder.lshr(odd, I64(shift)))
            signs = builder.or_(code, builder.shl(builder.and_(odd, I64(_LOWEST_BIT)), I64(7)))
        return emit.mask(signs)

    def _sevens(self, emit: Emitter, base: Any, codes: np.ndarray) -> Any:
        """int64 whose bytes are eight numbers of seven bits."""
        builder = emit.builder
        shift = codes[:, 0] % 8
        if (shift == shift[0]).all() and shift[0] < 2:
            value = builder.bitcast(emit.gather(base, codes[:, 0] // 8, self.size), I64)
            return builder.and_(builder.lshr(value, I64(int(shift[0]))), I64(_LOW_SEVEN_BITS))
        words = [emit.load(base, int(four[0, 0]) // 8, I32) for four in codes.reshape(2, 4, 7)]  # 28 bits in a word
        low, high = (builder.zext(word, I64) for word in words)
        word = builder.or_(low, builder.shl(high, I64(32)))
        total: Any = None
        for byte in range(4):
            part = builder.and_(word, I64(0x7F << 7 * byte | 0x7F << 7 * byte + 32))
            part = builder.shl(part, I64(byte)) if byte else part
            total = part if total is None else builder.or_(total, part)
        return total


def _global(builder: Any, value: ir.Constant) -> Any:
    """A global constant of the module, shared by all uses."""
    for known in builder.module.global_values:
        if isinstance(known, ir.GlobalVariable) and known.initializer == value:
            return known
    return cgutils.global_constant(builder.module, "book", value)
