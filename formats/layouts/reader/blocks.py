"""Blocks of one type read by LLVM code, written from its `CodeLayout`: codes as bytes, scales and terms as floats.

A reader takes one block of 256 weights of each row of a group (fewer where rows are interleaved and blocks small). Codes are
read 64 at a time, in the order in which they are stored.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from ....data_classes import dataclass
from ....simd.instructions.ue4m3 import half_ue4m3_to_float
from ....simd.llvm import call
from ....simd.target import Target
from ...types import TYPES
from .code_layout import CodeLayout, code_layout
from .emitter import BYTES, F32, I1, I8, I16, I32, LANES, Emitter, constant, vector
from .packed_numbers import lowest_bits_of_words, runs_of_bits

SUPERBLOCK = 256
_INDEX = 6  # bits of a byte by which AVX512-VBMI looks up
_NIBBLE = 4  # likewise by which others do


@dataclass(frozen=True)
class CodeVector:
    """64 codes that are multiplied in one vector. rows, columns: int [64], of each code; column -1: there is no code."""

    rows: np.ndarray
    columns: np.ndarray

    @property
    def lane_rows(self) -> tuple[int, ...]:
        return tuple(self.rows[::4].tolist())

    @property
    def words(self) -> np.ndarray:
        """Number of the four columns that each lane holds (column // 4): int [16], -1 for none."""
        return np.where(self.columns[::4] < 0, -1, self.columns[::4] // 4)


class BlockReader:
    """Writes the code that reads `blocks` blocks of each row of a group of one type."""

    def __init__(self, name: str, blocks: int):
        stored, layout = TYPES[name], code_layout(name)
        assert layout is not None
        self.layout: CodeLayout = layout
        self.rows, self.columns = stored.rows, blocks * layout.block
        self.block_bytes = stored.rows * (stored.row_bytes(layout.block) - stored.row_meta)
        self.size = blocks * self.block_bytes
        self.code_vectors = self._code_vectors()
        lowest, table = min(layout.table), np.array(layout.table)
        self.lowest, self.highest = lowest, int(table.max()) - lowest
        self.table = None if (np.diff(table) == 1).all() else [int(v) - lowest for v in table]
        self.numbers = self.rows * self.columns // layout.group
        self.scale_vectors = [np.arange(i, i + LANES) for i in range(0, self.numbers, LANES)]

    @cached_property
    def product_vectors(self) -> list[CodeVector]:
        """The codes in the order in which products take them, those of the same rows and groups one after the other: where each
        of four vectors of a row has groups of its own, two share theirs, one with the first half of every group."""
        vectors = self.code_vectors
        columns = np.stack([each.columns for each in vectors])
        alone = len({self.keys(each) for each in vectors}) == len(vectors)
        if self.rows > 1 or not alone or columns.shape != (4, BYTES) or (columns < 0).any():
            return vectors
        shifts = [(self._bits(each)[:, 0] % 8).tolist() for each in vectors]
        order = sorted(range(len(vectors)), key=lambda i: shifts.index(shifts[i]))  # of one shift, if they may be
        groups = columns[order].reshape(2, -1, self.layout.group)
        if self.layout.group % 8 or (groups // self.layout.group != groups[..., :1] // self.layout.group).any():
            return vectors
        halves = groups.reshape(*groups.shape[:2], 2, -1).swapaxes(1, 2).reshape(-1, BYTES)
        return [CodeVector(vectors[0].rows, half) for half in halves]

    @property
    def has_signs(self) -> bool:
        """Whether signs of weights are stored apart, as only a `GridReader` can read them."""
        return self.layout.weight_signs is not None or self.layout.sign_codes is not None

    def _in_all_blocks(self, bits: np.ndarray) -> np.ndarray:
        """Bit addresses [rows, n, width] of one block -> [rows, blocks * n, width] of all blocks."""
        starts = 8 * np.arange(0, self.size, self.block_bytes)
        return (bits[:, None] + starts[:, None, None]).reshape(self.rows, -1, bits.shape[-1])

    def _code_vectors(self) -> list[CodeVector]:
        assert self.layout.codes is not None
        self.codes = self._in_all_blocks(self.layout.codes)
        rows, columns = (axis.reshape(-1) for axis in np.indices(self.codes.shape[:2]))
        first = self.codes[:, :, 0].reshape(-1)
        for order in (np.lexsort((columns, first // 8, first % 8)), np.lexsort((columns, rows))):
            r, c = rows[order].reshape(-1, 4), columns[order].reshape(-1, 4)
            if (r == r[:, :1]).all() and (c == c[:, :1] + np.arange(4)).all() and not (c[:, 0] % 4).any():
                break
        r, c = (np.concatenate([a.reshape(-1), np.full(-a.size % BYTES, -1)]) for a in (r, c))
        r = np.where(r < 0, np.resize(r[: len(order)], len(r)), r)
        code_vectors = [CodeVector(a, b) for a, b in zip(r.reshape(-1, BYTES), c.reshape(-1, BYTES), strict=True)]
        # Vectors of the same rows and groups follow each other: their products are summed before they are scaled.
        keys = [self.keys(code_vector) for code_vector in code_vectors]
        return [code_vectors[i] for i in sorted(range(len(code_vectors)), key=lambda i: (keys.index(keys[i]), i))]

    def row_vectors(self) -> list[CodeVector]:
        """The codes in the order of rows and columns instead, a row's last vector filled up."""
        columns = np.append(np.arange(self.columns), np.full(-self.columns % BYTES, -1))
        return [CodeVector(np.full(BYTES, r), c) for r in range(self.rows) for c in columns.reshape(-1, BYTES)]

    def keys(self, code_vector: CodeVector) -> tuple:
        """What the products of each lane are scaled by: (row, group of weights), group -1 for none."""
        groups = np.where(code_vector.words < 0, -1, code_vector.words * 4 // self.layout.group)
        return tuple(zip(code_vector.lane_rows, groups.tolist(), strict=True))

    def bytes_ahead(self, of: Target) -> int:
        """Bytes that `write_ahead` writes of a step before it is multiplied; 0 for none."""
        return 0

    def write_ahead(self, emit: Emitter, base: Any, to: Any) -> None:
        """Writes what products get as loaded["ahead"] to an address; only a `GridReader` does."""
        raise NotImplementedError

    def runs_looked_up(self, of: Target) -> int:
        """Runs of 64 of the bytes written ahead that `look_up_ahead` replaces at a time; 0 where it is not to be called."""
        return 0

    def look_up_ahead(self, emit: Emitter, at: Any) -> None:
        raise NotImplementedError

    # --- instructions -------------------------------------------------------------------------------------------------

    def codes_less(self, subtracted: int, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i8>: table[code] - subtracted of 64 codes. loaded: values that were loaded for other codes of these blocks."""
        table = None if self.table is None and subtracted == self.lowest else [v - subtracted & 255 for v in self.layout.table]
        width = self.codes.shape[-1]
        in_bytes = emit.target.has("avx512vbmi") and width <= _INDEX
        if table is not None and len(table) == 1 << width and (in_bytes or width == 2) and len(runs_of_bits(self.codes)) == 1:
            bits = self._bits(code_vector)
            shift = bits[:, 0] % 8
            if (shift == shift[0]).all():
                key = (bits[:, 0] // 8).tobytes()
                value = self._stored_bytes(emit, base, bits[:, 0] // 8, loaded)
                look_up = self._look_up_in_bytes if in_bytes else self._look_up_pairs
                return look_up(emit, table, value, int(shift[0]), key, loaded)
        if table is not None and (chosen := self._look_up_and_choose(emit, table, base, code_vector, loaded)) is not None:
            return chosen
        total = self.raw_codes(emit, base, code_vector, loaded)
        if self.layout.signed_bytes:
            return emit.builder.sub(total, constant(I8, [subtracted] * BYTES)) if subtracted else total
        if self.layout.code_offset is not None:
            total = emit.builder.or_(total, constant(I8, self.layout.code_offset[code_vector.columns]))
        return total if table is None else emit.look_up(table, total)

    def _bits(self, code_vector: CodeVector) -> np.ndarray:
        return self.codes[code_vector.rows, np.where(code_vector.columns < 0, 0, code_vector.columns)]

    def _stored_bytes(self, emit: Emitter, base: Any, addresses: np.ndarray, loaded: dict) -> Any:
        """<64 x i8> at offsets from the first block, loaded once."""
        key = addresses.tobytes()
        if key not in loaded:
            value = emit.gather(base, addresses, self.size)
            loaded[key] = self._gray_of_words(emit, value) if self.layout.gray_words else value
        return loaded[key]

    def raw_codes(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i8>: the codes themselves, below 256."""
        bits = self._bits(code_vector)
        total: Any = None
        for first, stop in runs_of_bits(self.codes):
            shift, width = bits[:, first] % 8, stop - first
            value = self._stored_bytes(emit, base, bits[:, first] // 8, loaded)
            by_word = shift.reshape(LANES, 4)
            if (by_word != by_word[:, :1]).any():
                part = self._tested_bits(emit, value, shift, width, first)
            elif width == 1 and (shift != shift[0]).any() and not self._shifts_in_halves(emit, shift):
                place_bits = self._rotated_bits if emit.target.has("avx512f") else self._tested_bits
                part = place_bits(emit, value, shift, width, first)
            else:
                part = emit.byte_shift(value, shift - first)
                if width < 8:
                    part = emit.builder.and_(part, constant(I8, [((1 << width) - 1) << first] * BYTES))
            total = part if total is None else emit.builder.or_(total, part)
        return (
            total
            if self.layout.digits is None
            else self._digits(emit, total, self.layout.digits[code_vector.columns % self.layout.block])
        )

    @staticmethod
    def _shifts_in_halves(emit: Emitter, shift: np.ndarray) -> bool:
        """Whether registers have 256 bits, and the bytes of each are shifted by one number of bits. shift: int [64]"""
        registers = shift.reshape(2, BYTES // 2)
        return emit.target.vector_bits == 256 and bool((registers == registers[:, :1]).all())

    @staticmethod
    def _digits(emit: Emitter, codes: Any, powers: np.ndarray) -> Any:
        """<64 x i8>: 3 * (byte * power mod 256) >> 8."""
        builder, kind = emit.builder, vector(I16, BYTES)
        fraction = builder.and_(builder.mul(builder.zext(codes, kind), constant(I16, powers)), constant(I16, [255] * BYTES))
        digits = builder.lshr(builder.mul(fraction, constant(I16, [3] * BYTES)), constant(I16, [8] * BYTES))
        return builder.trunc(digits, vector(I8, BYTES))

    @staticmethod
    def _tested_bits(emit: Emitter, value: Any, shift: np.ndarray, width: int, first: int) -> Any:
        """<64 x i8>: `width` bits of each byte from bit shift[byte] on, tested one by one, as bits `first` and higher."""
        none, total = constant(I8, [0] * BYTES), None
        for i in range(width):
            part = emit.builder.select(emit.test(value, 1 << shift + i), constant(I8, [1 << first + i] * BYTES), none)
            total = part if total is None else emit.builder.or_(total, part)
        return total

    @staticmethod
    def _rotated_bits(emit: Emitter, value: Any, shift: np.ndarray, width: int, first: int) -> Any:
        """The same where bytes of a word of four have them at one place, by turning words: one instruction."""
        builder = emit.builder
        words = builder.bitcast(value, vector(I32, LANES))
        right = constant(I32, (shift[::4] - first) % 32)
        words = call(builder, f"llvm.fshr.v{LANES}i32", words.type, words, words, right)
        return builder.and_(builder.bitcast(words, value.type), constant(I8, [((1 << width) - 1) << first] * BYTES))

    @staticmethod
    def _look_up_pairs(emit: Emitter, table: list[int], value: Any, shift: int, key: bytes, loaded: dict) -> Any:
        """Entries for codes of two bits by a look-up of four bits of each byte: shift and mask then serve two codes."""
        part = (key, "halves", shift // 4)
        if part not in loaded:
            right = np.full(BYTES, shift // 4 * 4)
            loaded[part] = emit.builder.and_(emit.byte_shift(value, right), constant(I8, [15] * BYTES))
        return emit.look_up([table[code >> shift % 4 & 3] for code in range(16)], loaded[part])

    def _look_up_and_choose(self, emit: Emitter, table: list[int], base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """Entries for codes whose bits above the lowest four are stored apart: these choose, by the signs of shifted bytes,
        among entries that the four pick. None but with registers of 256 bits (wider ones have masks and larger look-ups, for
        others it was not tried), and where bits are not so stored."""
        runs, bits = runs_of_bits(self.codes), self._bits(code_vector)
        offsets, width = self.layout.code_offset, bits.shape[-1]
        if emit.target.vector_bits != 256 or len(runs) == 1 or runs[0][1] != _NIBBLE:
            return None
        in_pairs = offsets is not None and (bits[::2] == bits[1::2]).all()
        if in_pairs:  # of neighbours that share a code: in the order in which registers interleave their bytes
            bits = bits[::2].reshape(2, 2, 8, width).swapaxes(0, 1).reshape(-1, width)
        shift, count = bits % 8, len(bits)
        if (shift.reshape(-1, 4, width) != shift[::4, None]).any() or len(table) != (1 + in_pairs) << width:
            return None
        low, *high = (self._stored_bytes(emit, base, bits[:, bit] // 8, loaded) for bit in (0, *range(_NIBBLE, width)))
        codes = emit.builder.and_(emit.byte_shift(low, shift[:, 0]), constant(I8, [15] * count))
        entries = [emit.look_up(table[first : first + 16], codes) for first in range(0, len(table), 16)]
        for bit, value in enumerate(high, _NIBBLE):
            upper = emit.builder.icmp_signed("<", emit.byte_shift(value, shift[:, bit] - 7), constant(I8, [0] * count))
            entries = [emit.builder.select(upper, b, a) for a, b in zip(entries[::2], entries[1::2], strict=True)]
        if not in_pairs:
            return entries[0]
        places = np.arange(count).reshape(2, 2, 8).swapaxes(0, 1).reshape(-1)
        return emit.builder.shuffle_vector(*entries, constant(I32, np.stack([places, places + count], axis=1).reshape(-1)))

    @staticmethod
    def _look_up_in_bytes(emit: Emitter, table: list[int], value: Any, shift: int, key: bytes, loaded: dict) -> Any:
        """Entries for codes of a few bits by a look-up of the six lowest of each byte, without a mask for those beside them."""
        beyond = max(0, shift + len(table).bit_length() - 1 - _INDEX)
        if beyond and (key, beyond) not in loaded:
            words = emit.builder.bitcast(value, vector(I16, BYTES // 2))
            words = emit.builder.lshr(words, constant(words.type, beyond))
            loaded[key, beyond] = emit.builder.bitcast(words, value.type)
        places = np.arange(1 << _INDEX) >> shift - beyond & len(table) - 1
        return emit.look_up([table[place] for place in places], loaded[key, beyond] if beyond else value)

    @staticmethod
    def _gray_of_words(emit: Emitter, value: Any) -> Any:
        words = emit.builder.bitcast(value, vector(I16, BYTES // 2))
        words = emit.builder.and_(words, constant(I16, [0xFFFE] * (BYTES // 2)))
        words = emit.builder.xor(words, emit.builder.lshr(words, constant(I16, [1] * (BYTES // 2))))
        return emit.builder.bitcast(words, vector(I8, BYTES))

    def rows_and_groups(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row, group) of scales by their number in the step; numbers past the end stand for the last."""
        numbers = np.minimum(numbers, self.numbers - 1)
        return numbers % self.rows, numbers // self.rows

    def _integers(self, emit: Emitter, base: Any, bits: np.ndarray, numbers: np.ndarray) -> Any:
        rows, blocks = self.rows_and_groups(numbers)
        if self.layout.gray_words:
            return lowest_bits_of_words(emit, base, bits[0, blocks])
        return emit.numbers(base, self._in_all_blocks(bits)[rows, blocks], self.size)

    def _are_set(self, emit: Emitter, base: Any, bits: np.ndarray, numbers: np.ndarray) -> Any:
        flags = self._integers(emit, base, bits, numbers)
        return emit.builder.icmp_unsigned("!=", flags, constant(flags.type, 0))

    def flags_set(self, emit: Emitter, base: Any, numbers: np.ndarray) -> Any:
        """<n x i1>: whether the flags of these groups are set, for a type that has them."""
        assert self.layout.flags is not None
        return self._are_set(emit, base, self.layout.flags, numbers)

    def _float16_or_e8m0(self, emit: Emitter, base: Any, bits: np.ndarray, numbers: np.ndarray) -> Any:
        """<n x float>: d, dmin or offset of the block that each scale belongs to."""
        rows, blocks = self.rows_and_groups(numbers)
        where = self._in_all_blocks(bits)[rows, blocks * self.layout.group // self.layout.block]
        if self.layout.d_format == "f16":
            if (np.diff(where) == 1).all():
                return emit.halves(base, where[:, 0] // 8)
            return emit.half_to_float(emit.builder.trunc(emit.numbers(base, where, self.size), vector(I16, len(numbers))))
        assert self.layout.d_format == "e8m0"
        power = emit.numbers(base, where, self.size)
        one = constant(power.type, 1)
        normal = emit.builder.shl(emit.builder.sub(power, one), constant(power.type, 23))
        small = emit.builder.shl(constant(power.type, 0x00200000), emit.builder.and_(power, one))
        is_normal = emit.builder.icmp_unsigned(">", power, one)
        return emit.builder.bitcast(emit.builder.select(is_normal, normal, small), vector(F32, len(numbers)))

    def scale(self, emit: Emitter, base: Any, numbers: np.ndarray) -> Any:
        """<n x float>: what the values of these groups are multiplied by."""
        scale = self.scale_in_units(emit, base, numbers)
        return scale if self.layout.unit == 1 else emit.builder.fmul(scale, constant(scale.type, self.layout.unit))

    def scale_in_units(self, emit: Emitter, base: Any, numbers: np.ndarray) -> Any:
        """`scale` over the unit of the weights."""
        f, builder = self.layout, emit.builder
        words, floats = vector(I32, len(numbers)), vector(F32, len(numbers))
        scale = constant(floats, 1.0) if f.d is None else self._float16_or_e8m0(emit, base, f.d, numbers)
        if f.scales is None:
            return scale
        level = self._integers(emit, base, f.scales, numbers)
        if f.level_table is not None:
            level = emit.look_up_words(f.level_table, level)
        if f.signed_levels:
            level = builder.sub(builder.xor(level, constant(words, 128)), constant(words, 128))
        if f.level_step != 1:
            level = builder.mul(level, constant(words, f.level_step))
        if f.level_zero:
            level = builder.add(level, constant(words, f.level_zero))
        if f.scale_signs is not None:
            negative = self._are_set(emit, base, f.scale_signs, numbers)
            level = builder.select(negative, builder.neg(level), level)
        level = half_ue4m3_to_float(builder, level) if f.ue4m3_levels else emit.to_float(level)
        return level if f.d is None else builder.fmul(scale, level)

    @property
    def has_minima_beside(self) -> bool:
        """Whether scales and minima of a step fit the lanes of one vector, and differ in nothing but their place and factor."""
        f = self.layout
        if f.scales is None or f.minima is None or f.dmin is None or self.rows > 1 or 2 * self.numbers != LANES:
            return False
        plain = (f.level_table, f.level_step, f.level_zero, f.unit, f.d_format, f.flags) == (None, 1, 0, 1, "f16", None)
        return plain and not self.lowest and f.scales.shape == f.minima.shape

    def scales_beside_terms(self, emit: Emitter, base: Any) -> Any:
        """<16 x float>: `scale` of the groups, then `term` of the groups, for a type that `has_minima_beside`."""
        f, builder = self.layout, emit.builder
        assert f.d is not None
        assert f.dmin is not None
        bits = np.concatenate([self._in_all_blocks(each)[0] for each in (f.scales, f.minima) if each is not None])
        level = emit.to_float(emit.numbers(base, bits, self.size))
        d, dmin = (emit.half_to_float(emit.load(base, int(each[0, 0, 0]) // 8, I16)) for each in (f.d, f.dmin))
        first = constant(vector(I1, LANES), np.arange(LANES) < self.numbers)
        factor = builder.select(first, emit.splat(d), emit.splat(builder.fneg(dmin)))
        return builder.fmul(factor, level)

    def term(self, emit: Emitter, base: Any, numbers: np.ndarray) -> Any:
        """<n x float>: what is added to all weights of these groups; None if the type adds nothing."""
        f, builder = self.layout, emit.builder
        if f.minima is not None and f.dmin is not None:
            minimum = emit.to_float(self._integers(emit, base, f.minima, numbers))
            return builder.fneg(builder.fmul(self._float16_or_e8m0(emit, base, f.dmin, numbers), minimum))
        return None if f.offset is None else self._float16_or_e8m0(emit, base, f.offset, numbers)
