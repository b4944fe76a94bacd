"""Reading weights that are points of a grid, four or eight at a time, most of them with signs that are stored apart."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ....simd.instructions import x86
from ....simd.instructions.permute import lookup_floats
from ....simd.target import Target
from .blocks import SUPERBLOCK, CodeVector
from .emitter import BYTES, F32, I1, I8, I16, I32, I64, LANES, Emitter, constant, vector
from .signs import RUN, PointRun, SignReader, bytes_of_table

_MOST_POINTS = 512  # of a grid that is looked up in registers
_RUNS_AHEAD = 4  # looked up together where tables are too large for the registers
# Of 64 bytes whose halves are two runs' points in turns, eight of each: instructions interleave bytes within sixteen.
_INTERLEAVED = np.arange(BYTES) // 16 * 8 + np.arange(BYTES) % 8 + np.arange(BYTES) // 8 % 2 * RUN


class GridReader(SignReader):
    """Vectors hold 64 columns of one row, or 16 of each of four rows."""

    def _code_vectors(self) -> list[CodeVector]:
        width = BYTES // self.rows
        rows = np.repeat(np.arange(self.rows), width)
        code_vectors = []
        for first in range(0, self.columns, width):
            columns = np.arange(first, first + width)
            code_vectors.append(CodeVector(rows, np.tile(np.where(columns < self.columns, columns, -1), self.rows)))
        return code_vectors

    @cached_property
    def product_vectors(self) -> list[CodeVector]:
        """Of a row's superblock each of four vectors takes every fourth point. So a lane of all of them belongs to the same
        group of weights (of 32; groups of 16 alternate), and what is looked up for a vector lies in the eight bytes at its
        place.
        """
        if self.rows > 1 or self.columns != SUPERBLOCK:
            return self.code_vectors
        size = self.point_columns
        points = 4 * np.arange(BYTES // size)[:, None]
        rows = np.zeros(BYTES, np.int64)
        return [CodeVector(rows, ((points + j) * size + np.arange(size)).reshape(-1)) for j in range(4)]

    def scale_in_units(self, emit: Emitter, base: Any, numbers: np.ndarray) -> Any:
        """As of other blocks; of a vector of nibbles the levels are looked up as floats, whatever the bits above them are."""
        f, rows_and_groups = self.layout, self.rows_and_groups(numbers)
        if f.scales is None or f.d is None or f.scale_signs is not None or len(numbers) != LANES:
            return super().scale_in_units(emit, base, numbers)
        bits = self._in_all_blocks(f.scales)[rows_and_groups]
        shift = bits[:, 0] % 8
        if bits.shape[1] != 4 or (np.diff(bits, axis=1) != 1).any() or shift.max() > 4 or not emit.target.has("avx512f"):
            return super().scale_in_units(emit, base, numbers)
        stored = emit.gather(base, np.repeat(bits[:, 0] // 8, 4), self.size)
        nibbles = emit.builder.bitcast(stored, vector(I32, LANES))
        nibbles = emit.builder.lshr(nibbles, constant(I32, shift)) if shift.any() else nibbles
        levels = constant(F32, (f.level_step * np.arange(16.0) + f.level_zero).tolist())
        level = lookup_floats(emit.builder, [levels], nibbles, emit.target)
        return emit.builder.fmul(self._float16_or_e8m0(emit, base, f.d, numbers), level)

    def codes_less(self, subtracted: int, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        f, builder = self.layout, emit.builder
        assert subtracted == self.lowest, "values of grids fit unsigned bytes up to 128"
        value = self.unsigned_codes(emit, base, code_vector, loaded)
        if f.point_flags is not None:
            points = np.where(code_vector.columns < 0, 0, code_vector.columns) // 8
            bits = self._in_all_blocks(f.point_flags)[code_vector.rows, points, 0]
            as_is = emit.test(emit.gather(base, bits // 8, self.size), 1 << bits % 8)
            lift = builder.select(as_is, constant(I8, [0] * BYTES), constant(I8, [f.point_shift] * BYTES))
            value = builder.add(value, lift)
        signs = self.signs(emit, base, code_vector, loaded)
        if signs is None:
            return value
        middle = constant(I8, [-subtracted] * BYTES)
        if signs.type.element == I1:
            return builder.select(signs, builder.sub(middle, value), builder.add(middle, value))
        return builder.add(middle, emit.with_signs(value, signs))

    def unsigned_codes(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i8>: values of the grid, without signs."""
        for form in (self._from_byte_tables, self._from_word_tables):
            value = form(emit, base, code_vector, loaded)
            if value is not None:
                return value
        return self._from_memory(emit, base, code_vector, loaded)

    def _from_memory(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i8>: values of points that are loaded one by one."""
        f, builder = self.layout, emit.builder
        assert f.grid is not None
        assert f.indices is not None
        size = self.point_columns
        points = self._in_all_blocks(f.indices)
        element = ir.IntType(8 * size) if size < 8 else ir.DoubleType()  # numbers of 64 bits are put into a vector as they come
        numbered = "ahead" in loaded and self._number_bytes_ahead(emit.target) > 0
        table = loaded.get("table")
        if table is None:
            packed = f.grid.copy().view(f"<u{size}")[:, 0]
            kind = ir.ArrayType(ir.IntType(8 * size), len(packed))
            table = _global(builder, ir.Constant(kind, packed.tolist()))
            table = loaded["table"] = builder.bitcast(table, element.as_pointer())
        count = 16 // size
        values: list[Any] = []
        for i in range(BYTES // size):
            row, column = code_vector.rows[i * size], code_vector.columns[i * size]
            if i % count == 0:
                values.append(ir.Constant(vector(element, count), None))
            if column < 0:
                continue
            if numbered:
                place = int(row) * points.shape[1] + int(column) // size
                where = self.sign_bytes_ahead(emit.target) + 2 * int(self._places_ahead[place])
                index = builder.zext(emit.load(loaded["ahead"], where, I16), I64)
            else:
                index = emit.number(base, points[row, column // size], self.size)
            value = builder.load(builder.gep(table, [index]), align=size)
            values[-1] = builder.insert_element(values[-1], value, I32(i % count))
        return builder.bitcast(emit.concat(values), vector(I8, BYTES))

    def bytes_ahead(self, of: Target) -> int:
        return self._number_bytes_ahead(of) + self.sign_bytes_ahead(of)

    def _number_bytes_ahead(self, of: Target) -> int:
        """0 where numbers of points are not better taken out of their bits by vectors."""
        f = self.layout
        if f.grid is None or f.indices is None or not (of.has("avx2") or of.has("neon")):
            return 0
        points = self.rows * self.columns // self.point_columns
        if of.has("avx512bw"):
            in_memory = self.point_columns == 8 and (len(f.grid) > _MOST_POINTS or not of.has("avx512vbmi"))
        else:
            in_memory = bool((np.diff(f.indices) != 1).any())  # else one load is a number, or nearly
        return 2 * points if in_memory and points % RUN == 0 else 0

    def write_ahead(self, emit: Emitter, base: Any, to: Any) -> None:
        """Writes signs and numbers of points, 16 bits each, to an address, which products get as loaded["ahead"]: those of runs
        one after the other for `look_up_ahead`."""
        assert self.layout.indices is not None
        signs = self.sign_bytes_ahead(emit.target)
        if signs:
            self.write_signs(emit, base, to)
        if not self._number_bytes_ahead(emit.target):
            return
        points = self._in_all_blocks(self.layout.indices)
        if self.runs_looked_up(emit.target):
            points = points[self.runs_of(8, RUN)]
        else:
            points = points.reshape(-1, points.shape[-1])[np.argsort(self._places_ahead)]
        for i, part in enumerate(points.reshape(-1, RUN, points.shape[-1])):
            emit.store(to, signs + 2 * RUN * i, emit.numbers(base, part, self.size, I16))

    @cached_property
    def _places_ahead(self) -> np.ndarray:
        """Where among the numbers written ahead, in the order of their first bits, that of each row's points is."""
        assert self.layout.indices is not None
        return np.argsort(np.argsort(self._in_all_blocks(self.layout.indices)[..., 0].reshape(-1)))

    def runs_looked_up(self, of: Target) -> int:
        return _RUNS_AHEAD if of.has("avx512vbmi") else 0

    def look_up_ahead(self, emit: Emitter, at: Any) -> None:
        """Replaces the numbers of the points of four runs by words of the numbers of their values, as `_from_word_tables` has
        them. Tables are too large for the registers: what is loaded of them serves 128 points."""
        builder, tables, looked_up = emit.builder, self._word_tables, _INTERLEAVED
        low, above = [], []
        for first in range(0, _RUNS_AHEAD, 2):
            two = [emit.load(at, BYTES * (first + i), vector(I8, BYTES)) for i in range(2)]
            low.append(builder.shuffle_vector(*two, constant(I32, 2 * looked_up)))
            high = builder.shuffle_vector(*two, constant(I32, 2 * looked_up + 1))
            bits = [emit.test(high, [1 << bit] * BYTES) for bit in range((len(tables[0]) - 1).bit_length() - 8)]
            above.append([builder.icmp_signed("<", low[-1], constant(I8, [0] * BYTES)), *bits])
        found = [bytes_of_table(builder, table, low, above) for table in tables]
        for i, halves in enumerate(zip(*found, strict=True)):
            for j, words in enumerate(_interleave(builder, *halves)):
                emit.store(at, BYTES * (2 * i + j), words)

    @cached_property
    def _word_tables(self) -> list[np.ndarray]:
        """The low and the high bytes of points as words of the numbers of their values, of two or four bits."""
        grid, size = self.layout.grid, self.point_columns
        assert grid is not None
        packed = (np.searchsorted(np.unique(grid), grid) << 16 // size * np.arange(size)).sum(axis=1)
        return [packed & 255, packed >> 8]

    def _levels(self, emit: Emitter, bits: int, codes: Any) -> Any:
        """<64 x i8>: values of a grid by their numbers, the lowest `bits` bits of bytes (the rest is not looked at)."""
        levels = np.unique(self.layout.grid).tolist()  # type: ignore[arg-type]
        return emit.look_up(np.resize(levels + [0] * ((1 << bits) - len(levels)), 64).tolist(), codes)

    def _from_word_tables(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """As `_from_memory`, 32 points at a time: a point is a word of the numbers of its values, two or four bits each, and
        words are looked up in tables that lie in registers. None where the processor or the grid does not permit it."""
        grid, builder = self.layout.grid, emit.builder
        assert grid is not None
        size, levels = self.point_columns, np.unique(grid)
        width = 16 // size  # bits of a value
        fits = len(levels) <= 1 << width and (len(grid) <= _MOST_POINTS or "ahead" in loaded)
        found = self.run_of(code_vector, size)
        if not (fits and emit.target.has("avx512bw", "avx512vbmi")) or found is None:
            return None
        if "ahead" in loaded:
            loaded["points", found.number] = emit.load(loaded["ahead"], BYTES * found.number, vector(I16, RUN))
        if ("points", found.number) not in loaded:
            self._load_words(emit, base, found, loaded)
        words, byte, place = loaded["points", found.number], np.arange(BYTES), np.repeat(found.places, 4)
        if emit.in_words(place):
            bits = place % 4 * 16
        else:
            words, bits = emit.shuffle(words, place[::2]), byte // size * size * 8 % 64
        bits = bits + code_vector.columns % size * width
        return self._levels(emit, width, x86.vpmultishiftqb(builder, constant(I8, bits), _as_bytes(builder, words)))

    def _load_words(self, emit: Emitter, base: Any, found: PointRun, loaded: dict) -> None:
        """Puts the words of a run's points, or of two runs', to what is loaded."""
        builder, size = emit.builder, self.point_columns
        assert self.layout.indices is not None
        rows, points = self.runs_of(size, RUN)
        if len(rows) % BYTES:
            low, high = self._word_tables
            numbers = emit.numbers(base, self._in_all_blocks(self.layout.indices)[found.rows, found.points], self.size, I16)
            loaded["points", found.number] = _words_of_table(builder, low | high << 8, numbers)
            return
        # Both bytes of 64 points take two thirds of the look-ups of twice 32 words. Bytes of two runs are interleaved within
        # sixteen bytes, as instructions do it.
        first = found.number // 2 * 2
        order = _INTERLEAVED + RUN * first
        halves = self._look_up_points(emit, base, rows[order], points[order], self._word_tables)
        for i, words in enumerate(_interleave(builder, *halves)):
            loaded["points", first + i] = words

    def _from_byte_tables(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """The same for points of four weights, 64 at a time: a point is two bytes of two values each, the even and the odd
        ones."""
        grid, builder, width = self.layout.grid, emit.builder, 4
        assert grid is not None
        if self.point_columns != 4 or not emit.target.has("avx512bw", "avx512vbmi"):
            return None
        levels, found = np.unique(grid), self.run_of(code_vector, 4, BYTES)
        if len(levels) > 1 << width or found is None or (found.places // 8 != np.arange(LANES) // 2).any():
            return None
        key = ("bytes", found.number)
        if key not in loaded:
            numbers_of = np.searchsorted(levels, grid)
            pairs = [numbers_of[:, half] | numbers_of[:, half + 2] << width for half in range(2)]
            loaded[key] = self._look_up_points(emit, base, found.rows, found.points, pairs)
        value = np.arange(BYTES) % 4
        places = constant(I8, np.repeat(found.places, 4) % 8 * 8 + value // 2 * width)
        first, second = (x86.vpmultishiftqb(builder, places, half) for half in loaded[key])
        return self._levels(emit, width, builder.select(constant(vector(I1, BYTES), value % 2 == 0), first, second))

    def _look_up_points(self, emit: Emitter, base: Any, rows: np.ndarray, points: np.ndarray, tables: list[np.ndarray]) -> list:
        """Of each table of bytes <64 x i8>: its entries by the numbers of 64 points."""
        bits = self._in_all_blocks(self.layout.indices)[rows, points]  # type: ignore[arg-type]
        numbers = emit.gather(base, bits[:, 0] // 8, self.size)
        above = [emit.builder.icmp_signed("<", numbers, constant(I8, [0] * BYTES))]
        above += [self.bits_set(emit, base, bits[:, bit]) for bit in range(8, bits.shape[1])]
        return [bytes_of_table(emit.builder, table, [numbers], [above])[0] for table in tables]


def _words_of_table(builder: Any, table: np.ndarray, indices: Any) -> Any:
    """<32 x i16>: entries of a table, a power of two of at least 64, by indices."""
    tables = [constant(vector(I16, RUN), part) for part in table.reshape(-1, RUN)]
    parts = [x86.vpermi2w(builder, low, indices, high) for low, high in zip(tables[::2], tables[1::2], strict=True)]
    bit = 2 * RUN
    while len(parts) > 1:
        upper = builder.icmp_unsigned("!=", builder.and_(indices, constant(indices.type, bit)), constant(indices.type, 0))
        parts = [builder.select(upper, high, low) for low, high in zip(parts[::2], parts[1::2], strict=True)]
        bit *= 2
    return parts[0]


def _interleave(builder: Any, low: Any, high: Any) -> list[Any]:
    """<32 x i16>, two: words of low and high bytes in the order of _INTERLEAVED."""
    at = np.arange(BYTES) // 16 * 16 + np.arange(BYTES) % 16 // 2 + np.arange(BYTES) % 2 * BYTES
    words = [builder.shuffle_vector(low, high, constant(I32, at + 8 * half)) for half in range(2)]
    return [builder.bitcast(each, vector(I16, RUN)) for each in words]


def _as_bytes(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, vector(I8, BYTES))


def _global(builder: Any, value: ir.Constant) -> Any:
    """A global constant of the module, shared by all uses."""
    for known in builder.module.global_values:
        if isinstance(known, ir.GlobalVariable) and known.initializer == value:
            return known
    return cgutils.global_constant(builder.module, "book", value)
