"""Steps over superblocks of table values with integer scales: only the sum of a superblock is converted to float.

Sums of products of codes (less the smallest of their table, and then no larger than 128; or signed ones as they are) and
activations are multiplied by the scales of their groups and added as 32-bit integers, and so is the contribution of the
subtracted number and of flags:

    w . a = d (sum over groups of  S (u . a) + S (subtracted + shift flag) sum(a))

and minima by sums of activations as integers of their own. That is a fifth less work than one float per group, a third with
registers of 256 bits. (With others it saves nothing where codes need no table, measured, nor do signed ones with groups of 32;
minima, signed scales and scales in lowest bits were not tried.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ......formats.layouts.reader.blocks import CodeVector
from ......formats.layouts.reader.code_layout import code_layout
from ......formats.layouts.reader.emitter import F32, I16, I32, LANES, Emitter, constant, vector
from ......formats.layouts.reader.packed_numbers import bits_of_word, lowest_bits_of_words
from ......formats.types import TYPES
from ......simd.instructions.dot_products import multiplies_signed
from ......simd.target import Target
from ..activations import RUN
from .block_steps import BlockStep, TokenSums

_I16_MAX = 32767
_MOST_LEVEL = 4096  # times sixteen products of a lane of bytes, and what is subtracted: less than 2 ** 31


def has_integer_scales(name: str, of: Target) -> bool:
    """Whether the products of a type are computed by `IntegerStep`."""
    layout, in_halves = code_layout(name), of.permutes_in_halves
    assert layout is not None
    if TYPES[name].rows > 1 or (layout.block, layout.d_format, layout.unit) != (256, "f16", 1):
        return False
    if layout.codes is None or layout.scales is None:
        return False
    if layout.level_table is not None or layout.offset is not None:
        return False
    has_other_scales = layout.minima is not None or layout.signed_levels or layout.gray_words
    if not in_halves and (has_other_scales or (np.diff(layout.table) == 1).all()):
        return False
    if layout.minima is not None and layout.minima.shape[-1] >= 16:
        return False
    lowest, highest = min(layout.table), max(layout.table)
    codes = (128,) if layout.signed_levels else (0, (1 << layout.scales.shape[-1]) - 1)
    largest = max(abs(layout.level_step * code + layout.level_zero) for code in codes)
    if highest - lowest > 128:
        if not multiplies_signed(of) or lowest < -128 or highest > 127 or (layout.group > RUN and not in_halves):
            return False
        lowest = 0
    return largest <= _MOST_LEVEL and largest * max(abs(lowest), abs(lowest + layout.shift)) <= _I16_MAX


class IntegerStep(BlockStep):
    """One superblock of one row."""

    @property
    def start_bytes(self) -> int:
        """None: sums of activations are multiplied with the scales of their groups."""
        return 0

    def _vectors(self) -> list[CodeVector]:
        """As they are stored: each is scaled by itself."""
        return self.reader.code_vectors

    def _order(self, emit: Emitter) -> np.ndarray:
        """The run of 16 columns that each lane of scales is of. Where permutations of bytes stay in halves of 256 bits, a scale
        lies in the half in which it is needed, if all its vectors need it there."""
        natural = np.arange(LANES)
        if not emit.target.permutes_in_halves:
            return natural
        runs = np.stack([each.words * 4 // RUN for each in self.vectors]).reshape(-1, 2, LANES // 4)
        order = np.concatenate([np.unique(runs[:, half]) for half in range(2)])
        return order if len(order) == LANES and (np.sort(order) == natural).all() else natural

    def _runs(self, order: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Bit addresses of the number of the group of each run of an order."""
        return bits[0][order * RUN // self.layout.group]

    def _numbers(self, emit: Emitter, base: Any, order: np.ndarray, bits: np.ndarray) -> Any:
        """<16 x i16>: the unsigned number of each run of an order."""
        runs = self._runs(order, bits)
        if self.layout.gray_words:
            return lowest_bits_of_words(emit, base, runs, I16)
        return emit.numbers(base, runs, self.reader.size, I16)

    def _set(self, emit: Emitter, base: Any, bits: np.ndarray) -> Any:
        """<16 x i1>: the bit of each lane's run."""
        order = self._order(emit)
        if (are_set := bits_of_word(emit, base, self._runs(order, bits)[:, 0], self.reader.size)) is not None:
            return are_set
        return emit.builder.icmp_unsigned("!=", self._numbers(emit, base, order, bits), constant(I16, [0] * LANES))

    def _scale(self, emit: Emitter, base: Any) -> Any:
        """<16 x i16>: the level of each run, by which its products are multiplied."""
        f, builder = self.layout, emit.builder
        assert f.scales is not None
        level = self._numbers(emit, base, self._order(emit), f.scales)
        if f.signed_levels:
            level = builder.sub(builder.xor(level, constant(I16, [128] * LANES)), constant(I16, [128] * LANES))
        if f.level_step != 1:
            level = builder.mul(level, constant(I16, [f.level_step] * LANES))
        if f.level_zero:
            level = builder.add(level, constant(I16, [f.level_zero] * LANES))
        if f.scale_signs is not None:
            level = builder.select(self._set(emit, base, f.scale_signs), builder.neg(level), level)
        return level

    def _factor(self, emit: Emitter, base: Any, bits: np.ndarray | None, token: TokenSums) -> Any:
        """float: d or dmin, of these bits, times the scale of the token's activations."""
        factor = emit.load(token.scale, 0, F32)
        if bits is None:
            return factor
        stored = emit.load(base, int(bits[0, 0, 0]) // 8, I16)
        return emit.builder.fmul(emit.half_to_float(stored), factor)

    def accumulate(self, emit: Emitter, base: Any, tokens: list[TokenSums], loaded: dict) -> None:
        """Adds the products of this step to the tokens' sums. base: address of the superblock; loaded: as for codes_less."""
        r, f, builder = self.reader, self.layout, emit.builder
        subtracted = self._subtracted(emit)
        largest = r.highest if subtracted == r.lowest else None
        assert largest is None or largest <= 128, "has_integer_scales and _subtracted agree"
        emit.prefetch(base, r.size)
        scale = self._scale(emit, base)
        offset: Any = None
        if f.flags is not None:
            low, high = (constant(I16, [v] * LANES) for v in (subtracted, subtracted + f.shift))
            offset = builder.mul(scale, builder.select(self._set(emit, base, f.flags), high, low))
        elif subtracted:
            offset = builder.mul(scale, constant(I16, [subtracted] * LANES))
        sums = [emit.load(token.sums, 0, vector(I16, LANES)) for token in tokens]
        lanes = np.argsort(self._order(emit))
        totals = [constant(I32, [0] * LANES)] * len(tokens)
        if offset is not None:
            offset = emit.shuffle(offset, lanes)  # lanes as on other processors, which get the same bits
            nothing = constant(I32, [0] * (LANES // 2))
            totals = [emit.concat([emit.word_pairs(offset, s), nothing]) for s in sums]
        minima = None if f.minima is None else self._numbers(emit, base, np.arange(LANES), f.minima)
        factors = emit.scales_of_dots(scale, [lanes[each.words * 4 // RUN].tolist() for each in self.vectors])
        for position, code_vector in enumerate(self.vectors):
            codes = r.codes_less(subtracted, emit, base, code_vector, loaded)
            for t, token in enumerate(tokens):
                words = self.activation_words(emit, token.codes, position)
                totals[t] = emit.scaled_dot(totals[t], codes, words, factors[position], largest)
        for t, token in enumerate(tokens):
            (place,) = token.totals.values()
            factor = emit.splat(self._factor(emit, base, f.d, token))
            value = emit.fma(emit.to_float(totals[t]), factor, builder.load(place))
            if minima is not None:
                pairs = emit.word_pairs(minima, sums[t])
                subtracted_factor = emit.splat(builder.fneg(self._factor(emit, base, f.dmin, token)), LANES // 2)
                low = emit.fma(emit.to_float(pairs), subtracted_factor, emit.shuffle(value, range(LANES // 2)))
                value = emit.concat([low, emit.shuffle(value, range(LANES // 2, LANES))])
            builder.store(value, place)
