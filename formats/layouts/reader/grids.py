"""Reading weights that are points of a grid, four or eight at a time, most of them with signs that are stored apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ....simd.instructions import x86
from .blocks import BlockReader, CodeVector
from .emitter import BYTES, I8, I16, I32, I64, Emitter, constant, vector

_MOST_POINTS, _WORDS = 1024, 32  # of a grid that is looked up in registers; words of a register
_SIGNS = 4  # vectors whose signs are decoded together
_LOW_SEVEN_BITS, _LOWEST_BIT = 0x7F7F7F7F7F7F7F7F, 0x0101010101010101  # of every byte


class GridReader(BlockReader):
    """Vectors hold 64 columns of one row, or 16 of each of four rows."""

    @property
    def _has_gaps(self) -> bool:
        return any((each.columns < 0).any() for each in self.code_vectors)

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
        value = self._from_registers(emit, base, code_vector, loaded)
        if value is None:
            value = self._from_memory(emit, base, code_vector, loaded)
        if f.point_flags is not None:
            points = np.where(code_vector.columns < 0, 0, code_vector.columns) // 8
            bits = self._in_all_blocks(f.point_flags)[code_vector.rows, points, 0]
            as_is = emit.test(emit.gather(base, bits // 8, self.size), 1 << bits % 8)
            lift = builder.select(as_is, constant(I8, [0] * BYTES), constant(I8, [f.point_shift] * BYTES))
            value = builder.add(value, lift)
        negative = self.negative(emit, base, code_vector, loaded)
        if negative is None:
            return value
        middle = constant(I8, [-subtracted] * BYTES)
        return builder.select(negative, builder.sub(middle, value), builder.add(middle, value))

    def _from_memory(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i8>: values of points that are loaded one by one."""
        f, builder = self.layout, emit.builder
        assert f.grid is not None
        assert f.indices is not None
        size = f.grid.shape[1]
        points = self._in_all_blocks(f.indices)
        element = ir.IntType(8 * size)
        table = loaded.get("table")
        if table is None:
            packed = f.grid.copy().view(f"<u{size}")[:, 0]
            kind = ir.ArrayType(element, len(packed))
            table = loaded["table"] = _global(builder, ir.Constant(kind, packed.tolist()))
        values: Any = ir.Constant(vector(element, BYTES // size), ir.Undefined)
        numbers, first = self._numbers_of_run(emit, base, code_vector, loaded)
        for i in range(BYTES // size):
            row, column = code_vector.rows[i * size], code_vector.columns[i * size]
            if column < 0:
                values = builder.insert_element(values, element(0), I32(i))
                continue
            if numbers is None:
                index = emit.number(base, points[row, column // size], self.size)
            else:
                word, place = divmod(first + i, 4)
                shifted = builder.lshr(builder.extract_element(numbers, I32(word)), I64(16 * place))
                index = builder.and_(shifted, I64(0xFFFF))
            values = builder.insert_element(values, builder.load(builder.gep(table, [I32(0), index]), align=size), I32(i))
        return builder.bitcast(values, vector(I8, BYTES))

    def _numbers_of_run(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> tuple[Any, int]:
        """The numbers of the points of a run of vectors as words of 16 bits, <8 x i64>, and the place of this vector's first
        among them: taken out of their bits all at once, and out of the register four at a time. None where the processor or the
        type does not permit it."""
        assert self.layout.grid is not None
        assert self.layout.indices is not None
        size, builder = self.layout.grid.shape[1], emit.builder
        vectors, place = self._run_of(code_vector, _WORDS * size // BYTES)
        points = len(vectors) * BYTES // size
        if not emit.target.has("avx512bw", "avx512vbmi") or points != _WORDS or self._has_gaps:
            return None, 0
        key = ("numbers", id(vectors[0]))
        if key not in loaded:
            rows, columns = (np.concatenate([getattr(each, axis)[::size] for each in vectors]) for axis in ("rows", "columns"))
            numbers = emit.numbers(base, self._in_all_blocks(self.layout.indices)[rows, columns // size], self.size, I16)
            loaded[key] = builder.bitcast(numbers, vector(I64, _WORDS // 4))
        return loaded[key], place * BYTES // size

    def _from_registers(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """As `_from_memory`, 32 points at a time: a point is a word of the numbers of its values, two or four bits each, and
        words are looked up in tables that lie in registers. None where the processor or the grid does not permit it."""
        f, builder = self.layout, emit.builder
        assert f.grid is not None
        assert f.indices is not None
        size, levels = f.grid.shape[1], np.unique(f.grid)
        width, together = 16 // size, BYTES // size  # bits of a value; points of a vector
        number = next((i for i, each in enumerate(self.code_vectors) if each is code_vector), None)
        fits = len(levels) <= 1 << width and len(f.grid) <= _MOST_POINTS and len(self.code_vectors) * together % _WORDS == 0
        if not (fits and emit.target.has("avx512bw", "avx512vbmi")) or number is None or self._has_gaps:
            return None
        first = number * together % _WORDS
        run = number * together // _WORDS
        if ("points", run) not in loaded:
            vectors = self.code_vectors[run * _WORDS // together : (run + 1) * _WORDS // together]
            rows, columns = (np.concatenate([getattr(each, axis)[::size] for each in vectors]) for axis in ("rows", "columns"))
            numbers = emit.numbers(base, self._in_all_blocks(f.indices)[rows, columns // size], self.size, I16)
            packed = (np.searchsorted(levels, f.grid) << width * np.arange(size)).sum(axis=1)
            loaded["points", run] = _words_of_table(builder, packed, numbers)
        words = emit.shuffle(loaded["points", run], first + np.arange(BYTES // 2) * 2 // size)
        places = np.arange(BYTES) % size * width + np.arange(BYTES) // size * size * 8 % 64
        codes = x86.vpmultishiftqb(builder, constant(I8, places), builder.bitcast(words, vector(I8, BYTES)))
        codes = builder.and_(codes, constant(I8, [(1 << width) - 1] * BYTES))
        return emit.look_up(levels.tolist(), codes)

    def negative(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i1>: which weights are negative; None for a type without signs. loaded: as for codes_less."""
        f = self.layout
        columns = np.where(code_vector.columns < 0, 0, code_vector.columns)
        if f.weight_signs is not None:
            bits = self._in_all_blocks(f.weight_signs)[code_vector.rows, columns, 0]
            if (np.diff(bits) == 1).all():
                return emit.mask(emit.load(base, int(bits[0]) // 8, I64))
            return emit.test(emit.gather(base, bits // 8, self.size), 1 << bits % 8)
        if f.sign_codes is None:
            return None
        vectors, place = self._run_of(code_vector, _SIGNS)
        key = ("signs", id(vectors[0]))
        if key not in loaded:
            rows, columns = (np.concatenate([getattr(each, axis)[::8] for each in vectors]) for axis in ("rows", "columns"))
            codes = self._in_all_blocks(f.sign_codes)[rows, np.maximum(columns, 0) // 8]
            loaded[key] = self._signs(emit, base, codes)
        lanes = np.arange(BYTES)
        return emit.test(emit.shuffle(loaded[key], 8 * place + lanes // 8), 1 << lanes % 8)

    def _run_of(self, code_vector: CodeVector, count: int) -> tuple[list[CodeVector], int]:
        """`count` neighbouring vectors that are read together, and the place of this one among them; if there are not as many,
        this one alone."""
        number = next((i for i, each in enumerate(self.code_vectors) if each is code_vector), None)
        if number is None or len(self.code_vectors) % count:
            return [code_vector], 0
        first = number // count * count
        return self.code_vectors[first : first + count], number - first

    def _signs(self, emit: Emitter, base: Any, codes: np.ndarray) -> Any:
        """<n x i8>: eight signs each, of n codes; codes: bit addresses [n, 7], n a multiple of 8."""
        builder, kind = emit.builder, vector(I64, len(codes) // 8)
        code = self._sevens(emit, base, codes)
        if self.layout.scrambled:
            signs = builder.xor(code, builder.shl(code, constant(kind, 1)))
        else:
            odd = code  # the lowest bit of every byte becomes the parity of the byte
            for shift in (4, 2, 1):
                odd = builder.xor(odd, builder.lshr(odd, constant(kind, shift)))
            signs = builder.or_(code, builder.shl(builder.and_(odd, constant(kind, _LOWEST_BIT)), constant(kind, 7)))
        return builder.bitcast(signs, vector(I8, len(codes)))

    def _sevens(self, emit: Emitter, base: Any, codes: np.ndarray) -> Any:
        """<n / 8 x i64> whose bytes are n numbers of seven bits."""
        builder, kind = emit.builder, vector(I64, len(codes) // 8)
        shift = codes[:, 0] % 8
        if (shift == shift[0]).all() and shift[0] < 2:
            value = builder.bitcast(emit.gather(base, codes[:, 0] // 8, self.size), kind)
            return builder.and_(builder.lshr(value, constant(kind, int(shift[0]))), constant(kind, _LOW_SEVEN_BITS))
        firsts = codes.reshape(-1, 4, 7)[:, 0, 0] // 8  # 28 bits in a word
        word = builder.bitcast(emit.gather(base, (firsts[:, None] + np.arange(4)).reshape(-1), self.size), kind)
        total: Any = None
        for byte in range(4):
            part = builder.and_(word, constant(kind, 0x7F << 7 * byte | 0x7F << 7 * byte + 32))
            part = builder.shl(part, constant(kind, byte)) if byte else part
            total = part if total is None else builder.or_(total, part)
        return total


def _words_of_table(builder: Any, table: np.ndarray, indices: Any) -> Any:
    """<32 x i16>: entries of a table, a power of two of at least 64, by indices."""
    tables = [constant(vector(I16, _WORDS), part) for part in table.reshape(-1, _WORDS)]
    parts = [x86.vpermi2w(builder, low, indices, high) for low, high in zip(tables[::2], tables[1::2], strict=True)]
    bit = 2 * _WORDS
    while len(parts) > 1:
        upper = builder.icmp_unsigned("!=", builder.and_(indices, constant(indices.type, bit)), constant(indices.type, 0))
        parts = [builder.select(upper, high, low) for low, high in zip(parts[::2], parts[1::2], strict=True)]
        bit *= 2
    return parts[0]


def _global(builder: Any, value: ir.Constant) -> Any:
    """A global constant of the module, shared by all uses."""
    for known in builder.module.global_values:
        if isinstance(known, ir.GlobalVariable) and known.initializer == value:
            return known
    return cgutils.global_constant(builder.module, "book", value)
