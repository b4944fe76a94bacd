"""The inner loop of a matrix-vector product on packed weights, written for one type from its `GemvLayout`.

A step takes one block of 256 weights of each row of a group (fewer where rows are interleaved and blocks small).
Codes become bytes 0 to 255 (table value minus the smallest of the table) in the order in which they are stored; where these go
beyond 128 and products of signed bytes take fewer instructions, bytes are the values themselves. Activations are permuted into
that order. Each 32-bit lane then holds the sum of products of four neighbouring columns of one row, which is multiplied by the
scale of their group. The number subtracted from the table, flags and minima contribute a multiple of the sum
of the activations' codes:

    w . a = sum over blocks of  d S (u . a)  +  (d S (lowest + shift flag) - dmin minimum) sum(a)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.core import cgutils

from ......formats.types import TYPES
from ......simd.instructions.ue4m3 import half_ue4m3_to_float
from ..activations import RUN
from .emitter import BYTES, F32, I1, I8, I16, I32, LANES, Emitter, constant, runs_of_bits, vector
from .gemv_layout import GemvLayout, gemv_layout


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


class BlockStep:
    """The code for `blocks` blocks of each row of a group of one type."""

    def __init__(self, name: str, blocks: int):
        stored, layout = TYPES[name], gemv_layout(name)
        assert layout is not None
        self.layout: GemvLayout = layout
        self.rows, self.columns, self.activations = stored.rows, blocks * layout.block, layout.activations
        self.one_scale = self.columns == self.activations  # of a token's activations in a step
        self.block_bytes = stored.rows * stored.block_bytes
        self.size = blocks * self.block_bytes
        self.code_vectors = self._code_vectors()
        lowest, table = min(layout.table), np.array(layout.table)
        self.lowest, self.highest = lowest, int(table.max()) - lowest
        self.table = None if (np.diff(table) == 1).all() else [int(v) - lowest for v in table]
        numbers = self.rows * self.columns // layout.group
        self.scale_vectors = [np.arange(i, i + LANES) for i in range(0, numbers, LANES)]
        self.numbers = numbers

    def _in_all_blocks(self, bits: np.ndarray) -> np.ndarray:
        """Bit addresses [rows, n, width] of one block -> [rows, blocks * n, width] of all blocks of the step."""
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

    def keys(self, code_vector: CodeVector) -> tuple:
        """What the products of each lane are scaled by: (row, group of weights), group -1 for none."""
        groups = np.where(code_vector.words < 0, -1, code_vector.words * 4 // self.layout.group)
        return tuple(zip(code_vector.lane_rows, groups.tolist(), strict=True))

    def _subtracted(self, emit: Emitter) -> int:
        """What is subtracted from table values for the products: the lowest, or 0 where signed bytes are multiplied."""
        is_signed = self.highest > 128 and self.lowest >= -128 and self.lowest + self.highest <= 127
        return 0 if is_signed and emit.multiplies_signed else self.lowest

    # --- instructions -------------------------------------------------------------------------------------------------

    def codes_less(self, subtracted: int, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i8>: table[code] - subtracted of 64 codes. loaded: values that were loaded for other codes of this step."""
        table = None if self.table is None and subtracted == self.lowest else [v - subtracted & 255 for v in self.layout.table]
        bits = self.codes[code_vector.rows, np.where(code_vector.columns < 0, 0, code_vector.columns)]
        total: Any = None
        for first, stop in runs_of_bits(self.codes):
            addresses, shift, width = bits[:, first] // 8, bits[:, first] % 8, stop - first
            value = loaded.get(addresses.tobytes())
            if value is None:
                value = emit.gather(base, addresses, self.size)
                value = loaded[addresses.tobytes()] = self._gray_of_words(emit, value) if self.layout.gray_words else value
            if width == self.codes.shape[-1] == 2 and table is not None and (shift == shift[0]).all():
                return self._look_up_pairs(emit, table, value, int(shift[0]), (addresses.tobytes(), "halves"), loaded)
            by_word = shift.reshape(LANES, 4)
            if (by_word != by_word[:, :1]).any() or (width == 1 and (shift != shift[0]).any()):
                part = self._tested_bits(emit, value, shift, width, first)
            else:
                part = emit.byte_shift(value, shift - first)
                if width < 8:
                    part = emit.builder.and_(part, constant(I8, [((1 << width) - 1) << first] * BYTES))
            total = part if total is None else emit.builder.or_(total, part)
        if self.layout.signed_bytes:
            return emit.builder.sub(total, constant(I8, [subtracted] * BYTES)) if subtracted else total
        if self.layout.code_offset is not None:
            total = emit.builder.or_(total, constant(I8, self.layout.code_offset[code_vector.columns]))
        return total if table is None else emit.look_up(table, total)

    @staticmethod
    def _tested_bits(emit: Emitter, value: Any, shift: np.ndarray, width: int, first: int) -> Any:
        """<64 x i8>: `width` bits of each byte from bit shift[byte] on, tested one by one, as bits `first` and higher."""
        none, total = constant(I8, [0] * BYTES), None
        for i in range(width):
            part = emit.builder.select(emit.test(value, 1 << shift + i), constant(I8, [1 << first + i] * BYTES), none)
            total = part if total is None else emit.builder.or_(total, part)
        return total

    @staticmethod
    def _look_up_pairs(emit: Emitter, table: list[int], value: Any, shift: int, key: tuple, loaded: dict) -> Any:
        """Entries for codes of two bits by a look-up of four bits of each byte: shift and mask then serve two codes."""
        key = (*key, shift // 4)
        if key not in loaded:
            right = np.full(BYTES, shift // 4 * 4)
            loaded[key] = emit.builder.and_(emit.byte_shift(value, right), constant(I8, [15] * BYTES))
        return emit.look_up([table[code >> shift % 4 & 3] for code in range(16)], loaded[key])

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
            return self._lowest_bits_of_words(emit, base, bits, blocks)
        return emit.numbers(base, self._in_all_blocks(bits)[rows, blocks], self.size)

    @staticmethod
    def _lowest_bits_of_words(emit: Emitter, base: Any, bits: np.ndarray, blocks: np.ndarray) -> Any:
        """<16 x i32> of numbers whose bits are the lowest bits of neighbouring 16-bit words, eight words per group."""
        builder, words = emit.builder, BYTES // 2
        halves = []
        for half in range(2):
            lowest = builder.trunc(emit.load(base, BYTES * half, vector(I16, words)), vector(I1, words))
            halves.append(builder.bitcast(builder.bitcast(lowest, I32), vector(I8, 4)))
        value = builder.zext(emit.shuffle(emit.concat(halves), blocks), vector(I32, LANES))
        first = int(bits.reshape(-1)[0]) // 16
        value = builder.lshr(value, constant(I32, [first] * LANES)) if first else value
        return builder.and_(value, constant(I32, [(1 << bits.shape[-1]) - 1] * LANES))

    def _are_set(self, emit: Emitter, base: Any, bits: np.ndarray, numbers: np.ndarray) -> Any:
        flags = self._integers(emit, base, bits, numbers)
        return emit.builder.icmp_unsigned("!=", flags, constant(I32, [0] * LANES))

    def flags_set(self, emit: Emitter, base: Any, numbers: np.ndarray) -> Any:
        """<16 x i1>: whether the flags of these groups are set, for a type that has them."""
        assert self.layout.flags is not None
        return self._are_set(emit, base, self.layout.flags, numbers)

    def _float16_or_e8m0(self, emit: Emitter, base: Any, bits: np.ndarray, numbers: np.ndarray) -> Any:
        """<16 x float>: d, dmin or offset of the block that each scale belongs to."""
        rows, blocks = self.rows_and_groups(numbers)
        where = self._in_all_blocks(bits)[rows, blocks * self.layout.group // self.layout.block]
        if self.layout.d_format == "f16":
            if (np.diff(where) == 1).all():
                return emit.halves(base, where[:, 0] // 8)
            return emit.half_to_float(emit.builder.trunc(emit.numbers(base, where, self.size), vector(I16, LANES)))
        assert self.layout.d_format == "e8m0"
        power = emit.numbers(base, where, self.size)
        one = constant(I32, [1] * LANES)
        normal = emit.builder.shl(emit.builder.sub(power, one), constant(I32, [23] * LANES))
        small = emit.builder.shl(constant(I32, [0x00200000] * LANES), emit.builder.and_(power, one))
        is_normal = emit.builder.icmp_unsigned(">", power, one)
        return emit.builder.bitcast(emit.builder.select(is_normal, normal, small), vector(F32, LANES))

    def scale(self, emit: Emitter, base: Any, numbers: np.ndarray) -> Any:
        """<16 x float>: what the values of these groups are multiplied by."""
        f, builder = self.layout, emit.builder
        scale = constant(F32, [1.0] * LANES) if f.d is None else self._float16_or_e8m0(emit, base, f.d, numbers)
        if f.scales is not None:
            level = self._integers(emit, base, f.scales, numbers)
            if f.level_table is not None:
                level = emit.look_up_words(f.level_table, level)
            if f.signed_levels:
                flip = constant(I32, [128] * LANES)
                level = builder.sub(builder.xor(level, flip), flip)
            if f.level_step != 1:
                level = builder.mul(level, constant(I32, [f.level_step] * LANES))
            if f.level_zero:
                level = builder.add(level, constant(I32, [f.level_zero] * LANES))
            if f.scale_signs is not None:
                negative = self._are_set(emit, base, f.scale_signs, numbers)
                level = builder.select(negative, builder.neg(level), level)
            level = half_ue4m3_to_float(builder, level) if f.ue4m3_levels else emit.to_float(level)
            scale = level if f.d is None else builder.fmul(scale, level)
        return scale if f.unit == 1 else builder.fmul(scale, constant(F32, [f.unit] * LANES))

    def term(self, emit: Emitter, base: Any, numbers: np.ndarray) -> Any:
        """<16 x float>: what is added to all weights of these groups; None if the type adds nothing."""
        f, builder = self.layout, emit.builder
        if f.minima is not None and f.dmin is not None:
            minimum = emit.to_float(self._integers(emit, base, f.minima, numbers))
            return builder.fneg(builder.fmul(self._float16_or_e8m0(emit, base, f.dmin, numbers), minimum))
        return None if f.offset is None else self._float16_or_e8m0(emit, base, f.offset, numbers)

    def offset(self, emit: Emitter, base: Any, numbers: np.ndarray, scale: Any) -> Any:
        """<16 x float>: factors of the sums of these groups' activations; None for none."""
        f, builder, subtracted = self.layout, emit.builder, self._subtracted(emit)
        offset: Any = None
        if f.flags is not None:
            low, high = (constant(F32, [float(v)] * LANES) for v in (subtracted, subtracted + f.shift))
            offset = builder.fmul(scale, builder.select(self.flags_set(emit, base, numbers), high, low))
        elif subtracted:
            offset = builder.fmul(scale, constant(F32, [float(subtracted)] * LANES))
        term = self.term(emit, base, numbers)
        return offset if term is None else term if offset is None else builder.fadd(term, offset)

    def sums_of_blocks(self, emit: Emitter, sums: Any) -> Any:
        """<n x float>: sums of the activations' codes over each group of weights, n at least 2."""
        runs = self.columns // RUN
        values = emit.builder.sext(emit.load(sums, 0, vector(I16, runs)), vector(I32, runs))
        if self.layout.group == 2 * RUN:
            both = [emit.shuffle(values, [min(i, runs - 1) for i in range(first, max(runs, 4), 2)]) for first in (0, 1)]
            values = emit.builder.add(*both)
        return emit.to_float(values)

    def activation_words(self, emit: Emitter, codes: Any, words: np.ndarray) -> Any:
        """<64 x i8>: the codes of activations, four columns per lane."""
        if (words >= 0).all() and (np.diff(words.reshape(2, -1)) == 1).all():
            halves = [emit.load(codes, 4 * int(first), vector(I32, LANES // 2)) for first in words[:: LANES // 2]]
            return emit.builder.bitcast(emit.concat(halves), vector(I8, BYTES))
        used = words[words >= 0]
        low, high = int(used.min()), int(used.max())
        total = self.columns // 4
        for window in (8, 16):
            if high - low < window <= total:
                start = min(low, total - window)
                picked = emit.shuffle(emit.load(codes, 4 * start, vector(I32, window)), np.where(words < 0, -1, words - start))
                break
        else:
            parts = sorted(set((used // LANES).tolist()))
            loads = [emit.load(codes, 4 * LANES * part, vector(I32, LANES)) for part in parts]
            picked = emit.pick(loads, np.searchsorted(parts, words // LANES), np.where(words < 0, -1, words % LANES))
        return emit.builder.bitcast(picked, vector(I8, BYTES))

    def accumulate(self, emit: Emitter, base: Any, tokens: list[TokenSums]) -> None:
        """Adds the products of this step to the tokens' sums. base: address of the blocks."""
        emit.prefetch(base, self.size)
        scales = [self.scale(emit, base, v) for v in self.scale_vectors]
        offsets = [self.offset(emit, base, v, scale) for v, scale in zip(self.scale_vectors, scales, strict=True)]
        for token in tokens:
            token.start_step(self, emit, scales)
            if offsets[0] is not None:
                token.add_offsets(self, emit, offsets)
        loaded, subtracted = {}, self._subtracted(emit)
        for position, code_vector in enumerate(self.code_vectors):
            key = self.keys(code_vector)
            codes = self.codes_less(subtracted, emit, base, code_vector, loaded)
            last = position + 1 == len(self.code_vectors) or self.keys(self.code_vectors[position + 1]) != key
            number = np.array([block * self.rows + row if block >= 0 else -1 for row, block in key])
            for token in tokens:
                before = token.products if token.products is not None else constant(I32, [0] * LANES)
                words = self.activation_words(emit, token.codes, code_vector.words)
                if subtracted != self.lowest:
                    token.products = emit.signed_dot(before, codes, words)
                else:
                    token.products = emit.dot(before, codes, words, self.highest)
                if last:
                    scale = emit.pick(token.scales, number // LANES, np.where(number < 0, -1, number % LANES))
                    token.add(code_vector.lane_rows, emit.to_float(token.products), scale, emit)
                    token.products = None
        for token in tokens:
            token.finish_step(self, emit)


class TokenSums:
    """The activations of one token, and the sums of its products with a group of rows: for each order of rows over the lanes
    <16 x float> in memory."""

    def __init__(self, emit: Emitter, orders: list[tuple[int, ...]]):
        zero = constant(F32, [0.0] * LANES)
        self.totals = {}
        for order in orders:
            self.totals[order] = cgutils.alloca_once(emit.builder, vector(F32, LANES))
            emit.builder.store(zero, self.totals[order])
        self.codes = self.scale = self.sums = self.products = None
        self.scales: list = []
        self.step: dict = {}

    def at(self, codes: Any, scale: Any, sums: Any) -> None:
        self.codes, self.scale, self.sums = codes, scale, sums

    def start_step(self, step: BlockStep, emit: Emitter, scales: list) -> None:
        self.step, self.scales = {}, list(scales)
        self.of_blocks = None
        if not step.one_scale:
            values = emit.load(self.scale, 0, vector(F32, step.columns // step.activations))
            self.of_blocks = [
                emit.shuffle(values, step.rows_and_groups(v)[1] * step.layout.group // step.activations)
                for v in step.scale_vectors
            ]
            self.scales = [emit.builder.fmul(s, a) for s, a in zip(scales, self.of_blocks, strict=True)]

    def add_offsets(self, step: BlockStep, emit: Emitter, offsets: list) -> None:
        sums = step.sums_of_blocks(emit, self.sums)
        order = tuple((np.arange(LANES) % step.rows).tolist())
        for i, numbers in enumerate(step.scale_vectors):
            places = np.where(numbers < step.numbers, numbers // step.rows, -1)
            factor = offsets[i] if self.of_blocks is None else emit.builder.fmul(offsets[i], self.of_blocks[i])
            self.add(order, emit.shuffle(sums, places), factor, emit)

    def add(self, order: tuple[int, ...], values: Any, factors: Any, emit: Emitter) -> None:
        before = self.step.get(order)
        self.step[order] = emit.builder.fmul(values, factors) if before is None else emit.fma(values, factors, before)

    def finish_step(self, step: BlockStep, emit: Emitter) -> None:
        factor = emit.splat(emit.load(self.scale, 0, F32)) if step.one_scale else None
        for order, value in self.step.items():
            before = emit.builder.load(self.totals[order])
            after = emit.builder.fadd(before, value) if factor is None else emit.fma(value, factor, before)
            emit.builder.store(after, self.totals[order])
