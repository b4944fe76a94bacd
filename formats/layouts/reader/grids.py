"""Reading weights that are points of a grid, four or eight at a time, most of them with signs that are stored apart."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ....simd.instructions import x86
from ....simd.instructions.permute import lookup_floats
from ....simd.target import Target
from .blocks import SUPERBLOCK, BlockReader, CodeVector
from .emitter import BYTES, F32, I1, I8, I16, I32, I64, LANES, Emitter, constant, vector

_MOST_POINTS = 512  # of a grid that is looked up in registers
_RUN = 32  # points that are looked up together, words of a register
_RUNS_AHEAD = 4  # looked up together where tables are too large for the registers
# Of 64 bytes whose halves are two runs' points in turns, eight of each: instructions interleave bytes within sixteen.
_INTERLEAVED = np.arange(BYTES) // 16 * 8 + np.arange(BYTES) % 8 + np.arange(BYTES) // 8 % 2 * _RUN
_UNPACKED = np.arange(_RUN).reshape(2, 2, 8).swapaxes(0, 1).reshape(-1)  # bytes in whose order instructions of AVX2 interleave
_LOW_SEVEN_BITS, _LOW_FOUR_BITS, _LOWEST_BIT = 0x7F7F7F7F7F7F7F7F, 0x0F0F0F0F0F0F0F0F, 0x0101010101010101  # of every byte


class _Run(NamedTuple):
    """Points that are read together, 32 of a step. number: of the run; rows, points: int [32], of each; places: int [16], of
    the points of a vector's lanes among them."""

    number: int
    rows: np.ndarray
    points: np.ndarray
    places: np.ndarray


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

    @cached_property
    def product_vectors(self) -> list[CodeVector]:
        """Of a row's superblock each of four vectors takes every fourth point. So a lane of all of them belongs to the same
        group of weights (of 32; groups of 16 alternate), and what is looked up for a vector lies in the eight bytes at its
        place.
        """
        if self.rows > 1 or self.columns != SUPERBLOCK:
            return self.code_vectors
        size = self._point_columns
        points = 4 * np.arange(BYTES // size)[:, None]
        rows = np.zeros(BYTES, np.int64)
        return [CodeVector(rows, ((points + j) * size + np.arange(size)).reshape(-1)) for j in range(4)]

    @property
    def _point_columns(self) -> int:
        assert self.layout.grid is not None
        return self.layout.grid.shape[1]

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
        size = self._point_columns
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
                index = builder.zext(emit.load(loaded["ahead"], 2 * place, I16), I64)
            else:
                index = emit.number(base, points[row, column // size], self.size)
            value = builder.load(builder.gep(table, [index]), align=size)
            values[-1] = builder.insert_element(values[-1], value, I32(i % count))
        return builder.bitcast(emit.concat(values), vector(I8, BYTES))

    def bytes_ahead(self, of: Target) -> int:
        return self._number_bytes_ahead(of) + self._sign_bytes_ahead(of)

    def _number_bytes_ahead(self, of: Target) -> int:
        """0 where numbers of points are not better taken out of their bits by vectors."""
        f = self.layout
        if f.grid is None or f.indices is None or not (of.has("avx2") or of.has("neon")):
            return 0
        points = self.rows * self.columns // self._point_columns
        if of.has("avx512bw"):
            in_memory = self._point_columns == 8 and (len(f.grid) > _MOST_POINTS or not of.has("avx512vbmi"))
        else:
            in_memory = self.rows == 1 and bool((np.diff(f.indices) != 1).any())  # else one load is a number, or nearly
        return 2 * points if in_memory and points % _RUN == 0 else 0

    def _sign_bytes_ahead(self, of: Target) -> int:
        """0 where signs are not words (see `signs`), whose products would wait for a dozen instructions one after the other."""
        return 2 * len(self._runs_of(8, _RUN)[0]) if self._has_sign_words(of) else 0

    def _has_sign_words(self, of: Target) -> bool:
        """Whether the target has an instruction that negates bytes, and the signs of a point are a byte. Points of four weights
        take as long, or longer, with words."""
        f = self.layout
        if not of.has("avx2") or of.has("avx512f") or not self.has_signs or f.grid is None or self._point_columns < 8:
            return False
        return f.weight_signs is None or bool((f.weight_signs[..., 0].reshape(-1, 8) % 8 == np.arange(8)).all())

    def write_ahead(self, emit: Emitter, base: Any, to: Any) -> None:
        """Writes the numbers of points, 16 bits each, to an address, which products get as loaded["ahead"]: those of runs one
        after the other for `look_up_ahead`; and words of signs."""
        assert self.layout.indices is not None
        size = self._number_bytes_ahead(emit.target)
        for run in range(self._sign_bytes_ahead(emit.target) // BYTES):
            part = slice(_RUN * run, _RUN * (run + 1))
            rows, octets = (each[part] for each in self._runs_of(8, _RUN))
            emit.store(to, size + BYTES * run, self._sign_words(emit, base, rows, octets))
        if not size:
            return
        points = self._in_all_blocks(self.layout.indices)
        if self.runs_looked_up(emit.target):
            points = points[self._runs_of(8, _RUN)]
        for i, part in enumerate(points.reshape(-1, _RUN, points.shape[-1])):
            emit.store(to, 2 * _RUN * i, emit.numbers(base, part, self.size, I16))

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
        found = [_bytes_of_table(builder, table, low, above) for table in tables]
        for i, halves in enumerate(zip(*found, strict=True)):
            for j, words in enumerate(_interleave(builder, *halves)):
                emit.store(at, BYTES * (2 * i + j), words)

    @cached_property
    def _word_tables(self) -> list[np.ndarray]:
        """The low and the high bytes of points as words of the numbers of their values, of two or four bits."""
        grid, size = self.layout.grid, self._point_columns
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
        size, levels = self._point_columns, np.unique(grid)
        width = 16 // size  # bits of a value
        fits = len(levels) <= 1 << width and (len(grid) <= _MOST_POINTS or "ahead" in loaded)
        found = self._run_of(code_vector, size)
        if not (fits and emit.target.has("avx512bw", "avx512vbmi")) or found is None:
            return None
        if "ahead" in loaded:
            loaded["points", found.number] = emit.load(loaded["ahead"], BYTES * found.number, vector(I16, _RUN))
        if ("points", found.number) not in loaded:
            self._load_words(emit, base, found, loaded)
        words, byte, place = loaded["points", found.number], np.arange(BYTES), np.repeat(found.places, 4)
        if emit.in_words(place):
            bits = place % 4 * 16
        else:
            words, bits = emit.shuffle(words, place[::2]), byte // size * size * 8 % 64
        bits = bits + code_vector.columns % size * width
        return self._levels(emit, width, x86.vpmultishiftqb(builder, constant(I8, bits), _as_bytes(builder, words)))

    def _load_words(self, emit: Emitter, base: Any, found: _Run, loaded: dict) -> None:
        """Puts the words of a run's points, or of two runs', to what is loaded."""
        builder, size = emit.builder, self._point_columns
        assert self.layout.indices is not None
        rows, points = self._runs_of(size, _RUN)
        if len(rows) % BYTES:
            low, high = self._word_tables
            numbers = emit.numbers(base, self._in_all_blocks(self.layout.indices)[found.rows, found.points], self.size, I16)
            loaded["points", found.number] = _words_of_table(builder, low | high << 8, numbers)
            return
        # Both bytes of 64 points take two thirds of the look-ups of twice 32 words. Bytes of two runs are interleaved within
        # sixteen bytes, as instructions do it.
        first = found.number // 2 * 2
        order = _INTERLEAVED + _RUN * first
        halves = self._look_up_points(emit, base, rows[order], points[order], self._word_tables)
        for i, words in enumerate(_interleave(builder, *halves)):
            loaded["points", first + i] = words

    def _from_byte_tables(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """The same for points of four weights, 64 at a time: a point is two bytes of two values each, the even and the odd
        ones."""
        grid, builder, width = self.layout.grid, emit.builder, 4
        assert grid is not None
        if self._point_columns != 4 or not emit.target.has("avx512bw", "avx512vbmi"):
            return None
        levels, found = np.unique(grid), self._run_of(code_vector, 4, BYTES)
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
        above += [self._bits_set(emit, base, bits[:, bit]) for bit in range(8, bits.shape[1])]
        return [_bytes_of_table(emit.builder, table, [numbers], [above])[0] for table in tables]

    def _bits_set(self, emit: Emitter, base: Any, bits: np.ndarray) -> Any:
        """<64 x i1>: whether each of 64 bits is set."""
        if (np.diff(bits) == 1).all() and not bits[0] % 8:
            return emit.mask(emit.load(base, int(bits[0]) // 8, I64))
        return emit.test(emit.gather(base, bits // 8, self.size), 1 << bits % 8)

    def negative(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i1>: which weights are negative; None for a type without signs. loaded: as for codes_less."""
        f, columns = self.layout, code_vector.columns
        found = self._run_of(code_vector, 8)
        if f.weight_signs is not None:
            all_bits = self._in_all_blocks(f.weight_signs)[..., 0]
            bits = all_bits[code_vector.rows, columns]
            octets = None if found is None else all_bits[found.rows[:, None], found.points[:, None] * 8 + np.arange(8)]
            if octets is None or (np.diff(bits) == 1).all() or (octets % 8 != np.arange(8)).any():
                return self._bits_set(emit, base, bits)
        elif f.sign_codes is None:
            return None
        assert found is not None, "32 octets of signs are decoded together"
        codes = None if f.sign_codes is None else self._in_all_blocks(f.sign_codes)[found.rows, found.points]
        key, place = ("signs", found.number), np.repeat(found.places, 4)
        if codes is not None and emit.target.has("avx512vbmi", "avx512bitalg") and self._signs_share_words(emit, place, codes):
            if key not in loaded:
                loaded[key] = self._signs_in_words(emit, base, codes)
            return x86.vpshufbitqmb(emit.builder, loaded[key], constant(I8, place % 4 * 8 + columns % 8))
        if key not in loaded and codes is not None:
            loaded[key] = self._signs(emit, base, codes)
        elif key not in loaded:
            loaded[key] = emit.gather(base, octets[:, 0] // 8, self.size)  # type: ignore[index]
        return emit.bits_of_bytes(loaded[key], place, columns % 8)

    def signs(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """Signs of a vector's weights as `Emitter.with_signs` takes them; None for a type without signs. loaded: as for
        codes_less.

        A multiplication makes a bit of each byte its highest. In words of the signs of eight weights (`_sign_words`) those of
        even columns stand in the lower byte, a place higher, those of odd columns in the upper one."""
        found = self._run_of(code_vector, 8)
        if found is None or not self._has_sign_words(emit.target):
            return self.negative(emit, base, code_vector, loaded)
        key = ("sign words", found.number)
        if key not in loaded and "ahead" in loaded:
            place = self._number_bytes_ahead(emit.target) + BYTES * found.number
            loaded[key] = emit.load(loaded["ahead"], place, vector(I16, _RUN))
        elif key not in loaded:
            loaded[key] = self._sign_words(emit, base, found.rows, found.points)
        words = emit.shuffle(loaded[key], np.repeat(found.places, 2))
        shifted = emit.builder.mul(words, constant(I16, 1 << 6 - code_vector.columns[::2] % 8))
        return emit.builder.bitcast(shifted, vector(I8, BYTES))

    def _sign_words(self, emit: Emitter, base: Any, rows: np.ndarray, octets: np.ndarray) -> Any:
        """<32 x i16>: the signs of 32 octets, and, doubled, below them. The lowest bits, which `signs` does not look at, are
        set: no byte is to be 0."""
        f, builder = self.layout, emit.builder
        rows, octets = rows[_UNPACKED], octets[_UNPACKED]
        if f.weight_signs is not None:
            bits = self._in_all_blocks(f.weight_signs)[rows, octets * 8, 0]
            eight = emit.gather(base, bits // 8, self.size)
        else:
            assert f.sign_codes is not None
            eight = self._signs(emit, base, self._in_all_blocks(f.sign_codes)[rows, octets])
        ones, places = constant(I8, [1] * _RUN), np.argsort(_UNPACKED)
        odd, even = builder.or_(eight, ones), builder.or_(builder.shl(eight, ones), ones)
        words = builder.shuffle_vector(even, odd, constant(I32, np.stack([places, places + _RUN], axis=1).reshape(-1)))
        return builder.bitcast(words, vector(I16, _RUN))

    def _run_of(self, code_vector: CodeVector, size: int, length: int = _RUN) -> _Run | None:
        """The 32 points (or octets of signs; `length`) of `size` columns that those of a vector are read with; None if they are
        not read together."""
        rows, points = self._runs_of(size, length)
        number = {pair: i for i, pair in enumerate(zip(rows.tolist(), points.tolist(), strict=True))}
        pairs = zip(code_vector.lane_rows, (code_vector.columns[::4] // size).tolist(), strict=True)
        places = np.array([number.get(pair, -1) for pair in pairs])
        run = int(places[0]) // length
        if (places < 0).any() or (places // length != run).any():
            return None
        part = slice(length * run, length * (run + 1))
        return _Run(run, rows[part], points[part], places % length)

    def _runs_of(self, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """`_points_of_runs`, found once."""
        if (size, length) not in self._runs:
            self._runs[size, length] = self._points_of_runs(size, length)
        return self._runs[size, length]

    @cached_property
    def _runs(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        return {}

    @staticmethod
    def _signs_share_words(emit: Emitter, place: np.ndarray, codes: np.ndarray) -> bool:
        """Whether the four codes whose signs go to a word of eight bytes lie in one themselves."""
        return emit.in_words(place) and bool((np.ptp(codes.reshape(BYTES // 8, -1), axis=1) < 64).all())

    def _points_of_runs(self, size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """int [runs * length]: rows and points of `size` columns, run after run; none where they fill no runs. Of interleaved
        rows the points that eight bytes of several vectors need lie side by side, as those of plain rows do by themselves."""
        rows, columns = (np.concatenate(parts) for parts in zip(*((v.rows, v.columns) for v in self.code_vectors), strict=True))
        if (columns < 0).any() or len(rows) % (size * length):
            return np.empty(0, np.int64), np.empty(0, np.int64)
        order = np.arange(len(rows))[::size]
        if self.rows > 1:
            order = order.reshape(-1, length * size // BYTES, BYTES // 8, 8 // size).swapaxes(1, 2).reshape(-1)
        return rows[order], columns[order] // size

    def _signs_in_words(self, emit: Emitter, base: Any, codes: np.ndarray) -> Any:
        """<64 x i8>: as _signs of 32 codes, of which the lowest half of each word of eight bytes has four."""
        first = codes.reshape(-1, 4, 7)[:, 0, 0] // 8
        start = first - max(0, int(first.max()) + 8 - self.size)  # what is read ends with the block
        words = emit.gather(base, (start[:, None] + np.arange(8)).reshape(-1), self.size)
        shifts = codes.reshape(-1, 4, 7)[:, :, 0] - 8 * start[:, None]
        assert shifts.max() <= 57, "seven bits of a word"
        numbers = x86.vpmultishiftqb(emit.builder, constant(I8, np.tile(shifts, 2).reshape(-1)), words)
        code = np.arange(128)
        odd = np.bitwise_count(code) & 1
        table = (code ^ code << 1) & 255 if self.layout.scrambled else code | odd << 7
        return _bytes_of_table(emit.builder, table, [numbers], [[]])[0]

    def _signs(self, emit: Emitter, base: Any, codes: np.ndarray) -> Any:
        """<n x i8>: eight signs each, of n codes; codes: bit addresses [n, 7], n a multiple of 8."""
        builder, kind, bytes_kind = emit.builder, vector(I64, len(codes) // 8), vector(I8, len(codes))
        code = self._sevens(emit, base, codes)
        if self.layout.scrambled:
            signs = builder.xor(code, builder.shl(code, constant(kind, 1)))
        elif emit.target.has("ssse3") or emit.target.has("neon"):  # the parity of four bits is looked up as the eighth
            folded = builder.and_(builder.xor(code, builder.lshr(code, constant(kind, 4))), constant(kind, _LOW_FOUR_BITS))
            table = [odd << 7 for odd in (np.bitwise_count(np.arange(16)) & 1).tolist()]
            parity = emit.look_up(table, builder.bitcast(folded, bytes_kind))
            return builder.xor(builder.bitcast(code, bytes_kind), parity)
        else:
            odd = code  # the lowest bit of every byte becomes the parity of the byte
            for shift in (4, 2, 1):
                odd = builder.xor(odd, builder.lshr(odd, constant(kind, shift)))
            signs = builder.or_(code, builder.shl(builder.and_(odd, constant(kind, _LOWEST_BIT)), constant(kind, 7)))
        return builder.bitcast(signs, bytes_kind)

    def _sevens(self, emit: Emitter, base: Any, codes: np.ndarray) -> Any:
        """<n / 8 x i64> whose bytes are n numbers of seven bits."""
        builder, kind = emit.builder, vector(I64, len(codes) // 8)
        shift = codes[:, 0] % 8
        if (shift == shift[0]).all() and shift[0] < 2:
            value = builder.bitcast(emit.gather(base, codes[:, 0] // 8, self.size), kind)
            return builder.and_(builder.lshr(value, constant(kind, int(shift[0]))), constant(kind, _LOW_SEVEN_BITS))
        firsts = codes.reshape(-1, 4, 7)[:, 0, 0] // 8  # 28 bits in a word
        word = builder.bitcast(emit.gather(base, (firsts[:, None] + np.arange(4)).reshape(-1), self.size), kind)
        # Two bits are put between its halves, then one between theirs: what is to move one place on is added to itself.
        low, high = (constant(kind, mask | mask << 32) for mask in (0x3FFF, 0x3FFF0000))
        halves = builder.or_(builder.and_(word, low), builder.and_(builder.shl(word, constant(kind, 2)), high))
        return builder.add(halves, builder.and_(halves, constant(kind, 0x3F803F803F803F80)))


def _words_of_table(builder: Any, table: np.ndarray, indices: Any) -> Any:
    """<32 x i16>: entries of a table, a power of two of at least 64, by indices."""
    tables = [constant(vector(I16, _RUN), part) for part in table.reshape(-1, _RUN)]
    parts = [x86.vpermi2w(builder, low, indices, high) for low, high in zip(tables[::2], tables[1::2], strict=True)]
    bit = 2 * _RUN
    while len(parts) > 1:
        upper = builder.icmp_unsigned("!=", builder.and_(indices, constant(indices.type, bit)), constant(indices.type, 0))
        parts = [builder.select(upper, high, low) for low, high in zip(parts[::2], parts[1::2], strict=True)]
        bit *= 2
    return parts[0]


def _bytes_of_table(builder: Any, table: np.ndarray, indices: list[Any], above: list[list[Any]]) -> list[Any]:
    """<64 x i8>, one for each of several vectors of indices: entries of a table, a power of two of at least 128, by indices, of
    which the bytes are the lowest bits and `above`, for each vector, bits 7, 8, ... as masks. Each half of the table is looked
    up and chosen from before the next is loaded."""
    if len(table) == 2 * BYTES:
        low, high = (constant(I8, part) for part in table.reshape(2, BYTES))
        return [x86.vpermi2b(builder, low, each, high) for each in indices]
    halves = [_bytes_of_table(builder, half, indices, [masks[:-1] for masks in above]) for half in np.split(table, 2)]
    return [builder.select(masks[-1], high, low) for masks, low, high in zip(above, *halves, strict=True)]


def _interleave(builder: Any, low: Any, high: Any) -> list[Any]:
    """<32 x i16>, two: words of low and high bytes in the order of _INTERLEAVED."""
    at = np.arange(BYTES) // 16 * 16 + np.arange(BYTES) % 16 // 2 + np.arange(BYTES) % 2 * BYTES
    words = [builder.shuffle_vector(low, high, constant(I32, at + 8 * half)) for half in range(2)]
    return [builder.bitcast(each, vector(I16, _RUN)) for each in words]


def _as_bytes(builder: Any, value: Any) -> Any:
    return builder.bitcast(value, vector(I8, BYTES))


def _global(builder: Any, value: ir.Constant) -> Any:
    """A global constant of the module, shared by all uses."""
    for known in builder.module.global_values:
        if isinstance(known, ir.GlobalVariable) and known.initializer == value:
            return known
    return cgutils.global_constant(builder.module, "book", value)
