"""The inner loop of a matrix-vector product on packed weights, written for one type around its `BlockReader`.

Codes become bytes 0 to 255 (table value minus the smallest of the table) in the order in which they are stored; where these
go beyond 128 and products of signed bytes take fewer instructions, bytes are the values themselves, and where signs are stored
apart they are magnitudes, and activations are negated. Activations are permuted into that order, once for the rows of a slice
where they are whole superblocks. Each 32-bit lane then holds the sum of products of four neighbouring columns of one row, which
is multiplied by the scale of their group. The number subtracted from the table, flags and minima contribute a multiple of the
sum of the activations' codes:

    w . a = sum over blocks of  d S (u . a)  +  (d S (lowest + shift flag) - dmin minimum) sum(a)
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numba.core import cgutils

from ......formats.layouts.reader.blocks import SUPERBLOCK, BlockReader, CodeVector
from ......formats.layouts.reader.code_layout import CodeLayout
from ......formats.layouts.reader.emitter import BYTES, F32, I8, I16, I32, LANES, Emitter, constant, vector
from ......formats.layouts.reader.grids import GridReader
from ......simd.instructions.dot_products import PairDots, pairs_that_fit
from ..activations import RUN

_MOST_DECODED = 4  # vectors of codes that stay in 32 registers of 512 bits while token after token is multiplied


def activation_block(layout: CodeLayout) -> int:
    """Columns per scale of the activations that a type is multiplied with."""
    return SUPERBLOCK if layout.block == SUPERBLOCK else 32


class BlockStep:
    """The products of the blocks that a reader reads."""

    def __init__(self, reader: BlockReader):
        self.reader, self.layout = reader, reader.layout
        self.columns, self.activations = reader.columns, activation_block(reader.layout)
        self.one_scale = self.columns == self.activations  # of a token's activations in a step
        self.vectors = self._vectors()
        self.lanes = 8 if reader.numbers <= 8 and not reader.has_minima_beside else LANES  # of scales
        self.scale_vectors = [np.arange(i, i + self.lanes) for i in range(0, reader.numbers, self.lanes)]
        if self._scales_in_lanes:
            self.lanes, self.scale_vectors = LANES, list(self._numbers_of_lanes.values())

    def _vectors(self) -> list[CodeVector]:
        """The codes that are multiplied in one instruction each, in their order."""
        return self.reader.product_vectors

    @cached_property
    def _numbers_of_lanes(self) -> dict[tuple, np.ndarray]:
        """For each key of product vectors the numbers of its lanes' scales, -1 for none."""
        keys = dict.fromkeys(self.reader.keys(each) for each in self.vectors)
        return {key: np.array([block * self.reader.rows + row if block >= 0 else -1 for row, block in key]) for key in keys}

    @property
    def _scales_in_lanes(self) -> bool:
        """Whether scales are read lane by lane at once, as they are needed: of few kinds of vectors, whose sums of activations
        are not needed."""
        r = self.reader
        fits = r.rows == 1 and self.one_scale and r.has_signs and r.layout.scales is not None
        return fits and len(self._numbers_of_lanes) <= 2

    def _subtracted(self, emit: Emitter) -> int:
        """What is subtracted from table values for the products: the lowest, or 0 where signed bytes are multiplied, or
        signs go to the activations."""
        r = self.reader
        if r.has_signs:
            return 0
        is_signed = r.highest > 128 and r.lowest >= -128 and r.lowest + r.highest <= 127
        return 0 if is_signed and emit.multiplies_signed else r.lowest

    @property
    def unit(self) -> float:
        """What sums of a row are multiplied by at its end: the unit of weights, if all that is added to them is in it."""
        return self.layout.unit if self.layout.minima is None and self.layout.offset is None else 1

    def _begins(self, emit: Emitter, tokens: int) -> bool:
        """Whether products begin with `starts`, so that nothing else is to be done about what is subtracted. Signs cost as many
        instructions in the codes as in two tokens' activations."""
        return bool(self.start_bytes) and (
            tokens > 1 if self.reader.has_signs else self._subtracted(emit) == self.reader.lowest
        )

    def offset(self, emit: Emitter, base: Any, numbers: np.ndarray, scale: Any) -> Any:
        """<n x float>: factors of the sums of these groups' activations; None for none."""
        f, builder, subtracted = self.layout, emit.builder, 0 if self._begins(emit, 1) else self._subtracted(emit)
        offset: Any = None
        if f.flags is not None:
            low, high = (constant(scale.type, float(v)) for v in (subtracted, subtracted + f.shift))
            offset = builder.fmul(scale, builder.select(self.reader.flags_set(emit, base, numbers), high, low))
        elif subtracted:
            offset = builder.fmul(scale, constant(scale.type, float(subtracted)))
        term = self.reader.term(emit, base, numbers)
        return offset if term is None else term if offset is None else builder.fadd(term, offset)

    def sums_of_blocks(self, emit: Emitter, sums: Any) -> Any:
        """<n x float>: sums of the activations' codes over each group of weights, n at least 2."""
        runs = self.columns // RUN
        values = emit.builder.sext(emit.load(sums, 0, vector(I16, runs)), vector(I32, runs))
        if self.layout.group == 2 * RUN:
            both = [emit.shuffle(values, [min(i, runs - 1) for i in range(first, max(runs, 4), 2)]) for first in (0, 1)]
            values = emit.builder.add(*both)
        return emit.to_float(values)

    @cached_property
    def arranges(self) -> bool:
        """Whether activations are brought into the order of the vectors before they are multiplied, once for many rows."""
        if self.reader.rows > 1 or self.columns != len(self.vectors) * BYTES:
            return False
        words = np.concatenate([each.words for each in self.vectors])
        return bool((words >= 0).all() and (np.diff(words) != 1).any())

    @property
    def start_bytes(self) -> int:
        """Bytes of the starts of a step: what is subtracted from its codes times the sums of a lane's activations, <16 x i32>
        for each key of its vectors. 0 where activations are not arranged, or groups of weights differ in it, and for what is
        left of a row."""
        has_starts = self.arranges and self.columns == SUPERBLOCK and self.layout.flags is None and self.reader.lowest
        return BYTES * len(self._numbers_of_lanes) if has_starts else 0

    def arrange(self, emit: Emitter, codes: Any, to: Any) -> None:
        """Writes the activations of a step in the order of its vectors, and its starts behind them, if it `arranges`, else as
        they are. Addresses."""
        if not self.arranges:
            emit.store(to, 0, emit.load(codes, 0, vector(I8, self.columns)))
            return
        sums = dict.fromkeys(self._numbers_of_lanes, constant(I32, [0] * LANES))
        for position, code_vector in enumerate(self.vectors):
            words, key = self._words(emit, codes, code_vector.words), self.reader.keys(code_vector)
            emit.store(to, BYTES * position, words)
            sums[key] = emit.dot(sums[key], constant(I8, [1] * BYTES), words, 1)
        for number, total in enumerate(sums.values() if self.start_bytes else ()):
            emit.store(to, self.columns + BYTES * number, emit.builder.mul(total, constant(I32, [self.reader.lowest] * LANES)))

    def activation_words(self, emit: Emitter, codes: Any, position: int) -> Any:
        """<64 x i8>: the codes of activations for the vector of this number, four columns per lane."""
        if self.arranges:
            return emit.load(codes, BYTES * position, vector(I8, BYTES))
        return self._words(emit, codes, self.vectors[position].words)

    def _words(self, emit: Emitter, codes: Any, words: np.ndarray) -> Any:
        """<64 x i8>: the codes of activations of these words of four columns (-1: zeros)."""
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

    def _codes(
        self, subtracted: int, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict, begins: bool
    ) -> tuple[Any, Any]:
        """<64 x i8>: what activations are multiplied with; the signs that these are given before, None for none."""
        r = self.reader
        if begins or not (isinstance(r, GridReader) and r.has_signs):
            return r.codes_less(subtracted, emit, base, code_vector, loaded), None
        codes = r.unsigned_codes(emit, base, code_vector, loaded)
        return codes, r.signs(emit, base, code_vector, loaded)

    def accumulate(self, emit: Emitter, base: Any, tokens: list[TokenSums], loaded: dict) -> None:
        """Adds the products of this step to the tokens' sums. base: address of the blocks; loaded: as for codes_less."""
        r = self.reader
        if r.rows > 1 and r.size >= r.rows * r.columns:
            emit.prefetch_sparsely(base)
        else:
            emit.prefetch(base, r.size)
        if r.has_minima_beside:
            scales = offsets = [r.scales_beside_terms(emit, base)]
        else:
            scales = [(r.scale_in_units if self.unit != 1 else r.scale)(emit, base, v) for v in self.scale_vectors]
            offsets = [self.offset(emit, base, v, scale) for v, scale in zip(self.scale_vectors, scales, strict=True)]
        for token in tokens:
            token.start_step(self, emit, scales)
            if offsets[0] is not None:
                token.add_offsets(self, emit, offsets)
        begins = self._begins(emit, len(tokens))
        subtracted = r.lowest if begins else self._subtracted(emit)
        fit = len(self.vectors) <= _MOST_DECODED and emit.target.has("avx512f") and (begins or not r.has_signs)
        together = len(self.vectors) if fit else 1
        for first in range(0, len(self.vectors), together):
            run = range(first, first + together)
            codes = [self._codes(subtracted, emit, base, self.vectors[position], loaded, begins) for position in run]
            for token in tokens:
                for position, (values, signs) in zip(run, codes, strict=True):
                    if token.products is None:
                        token.products = self._start(emit, token, position) if begins else constant(I32, [0] * LANES)
                    self._multiply(emit, token, position, values, signs, subtracted)
        for token in tokens:
            token.finish_step(self, emit)

    def _start(self, emit: Emitter, token: TokenSums, position: int) -> Any:
        number = list(self._numbers_of_lanes).index(self.reader.keys(self.vectors[position]))
        return emit.load(token.codes, self.columns + BYTES * number, vector(I32, LANES))

    def _multiply(self, emit: Emitter, token: TokenSums, position: int, codes: Any, signs: Any, subtracted: int) -> None:
        """Adds the products of the vector of this number to a token's sums."""
        vectors, key = self.vectors, self.reader.keys(self.vectors[position])
        words = self.activation_words(emit, token.codes, position)
        words = words if signs is None else emit.with_signs(words, signs)
        is_last = position + 1 == len(vectors) or self.reader.keys(vectors[position + 1]) != key
        if signs is None and subtracted != self.reader.lowest:
            token.products = emit.signed_dot(token.products, codes, words)
        else:
            largest = self.reader.highest if signs is None else max(self.layout.table)
            token.add_products(emit, codes, words, largest, is_last)
        if not is_last:
            return
        number = self._numbers_of_lanes[key]
        if self._scales_in_lanes:
            scale = token.scales[list(self._numbers_of_lanes).index(key)]
        else:
            scale = emit.pick(token.scales, number // self.lanes, np.where(number < 0, -1, number % self.lanes))
        token.add(vectors[position].lane_rows, emit.to_float(token.products), scale, emit)
        token.products = None


class TokenSums:
    """The activations of one token, and the sums of its products with a group of rows: for each order of rows over the lanes
    <16 x float> in memory."""

    def __init__(self, emit: Emitter, orders: list[tuple[int, ...]]):
        zero = constant(F32, [0.0] * LANES)
        self.totals = {}
        for order in orders:
            self.totals[order] = cgutils.alloca_once(emit.builder, vector(F32, LANES))
            emit.builder.store(zero, self.totals[order])
        self.codes = self.scale = self.sums = None
        self.products: Any = None
        self.pairs: tuple[int, Any] = 0, None  # how many sums of two products, as 16-bit numbers, that are not in `products`
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
                emit.shuffle(values, step.reader.rows_and_groups(v)[1] * step.layout.group // step.activations)
                for v in step.scale_vectors
            ]
            self.scales = [emit.builder.fmul(s, a) for s, a in zip(scales, self.of_blocks, strict=True)]

    def add_offsets(self, step: BlockStep, emit: Emitter, offsets: list) -> None:
        sums = step.sums_of_blocks(emit, self.sums)
        order = tuple((np.arange(LANES) % step.reader.rows).tolist())
        for i, numbers in enumerate(step.scale_vectors):
            places = np.where(numbers < step.reader.numbers, numbers // step.reader.rows, -1)
            if step.reader.has_minima_beside:
                places = np.roll(places, step.reader.numbers)
            factor = offsets[i] if self.of_blocks is None else emit.builder.fmul(offsets[i], self.of_blocks[i])
            values = emit.shuffle(sums, places)
            if step.lanes == LANES:
                self.add(order, values, factor, emit)
            else:  # the only vector of offsets, and the first of what is added: the other lanes are zero
                places = [*range(step.lanes), *[-1] * (LANES - step.lanes)]
                self.step[order] = emit.shuffle(emit.builder.fmul(values, factor), places)

    def add(self, order: tuple[int, ...], values: Any, factors: Any, emit: Emitter) -> None:
        before = self.step.get(order)
        self.step[order] = emit.builder.fmul(values, factors) if before is None else emit.fma(values, factors, before)

    def add_products(self, emit: Emitter, unsigned: Any, signed: Any, largest: int, is_last: bool) -> None:
        """Adds those of <64 x i8>, 0 to `largest` and -127 to 127, to `products`. Where the processor adds two at a time, as
        many as fit 16 bits are added up before, at the latest with the last vector of the same scales."""
        run = pairs_that_fit(largest, emit.target) if largest <= 128 else None
        if not run:
            self.products = emit.dot(self.products, unsigned, signed, largest)
            return
        dots, (count, sums) = PairDots(emit.builder, run, emit.target), self.pairs
        self.pairs = count + 1, dots.add_pairs(sums, unsigned, signed)
        if is_last or count + 1 == run:
            self.products, self.pairs = dots.widen(self.products, self.pairs[1]), (0, None)

    def finish_step(self, step: BlockStep, emit: Emitter) -> None:
        factor = emit.splat(emit.load(self.scale, 0, F32)) if step.one_scale else None
        for order, value in self.step.items():
            before = emit.builder.load(self.totals[order])
            after = emit.builder.fadd(before, value) if factor is None else emit.fma(value, factor, before)
            emit.builder.store(after, self.totals[order])
