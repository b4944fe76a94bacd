"""Panels of bytes whose scales are per 16 or 32 columns, rounded in place to signed bytes with one scale per 256 columns.

Products then take one conversion and multiplication per 256 columns of a row and a token, not one for each group, and reach
what instructions for dot products permit; or, where activations keep a scale per 32 columns, one for each of these, without a
scale of the weights in it. (ik_llama.cpp does the former with weights of most i-quants, its q8_k_r8.) A weight is off by half
of a 127th, at the most, of the largest one that the 256 could have: so this is for products that round activations anyway.

A code c becomes m c + b, of its group, in 16-bit numbers with six bits behind the point.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba.core import types

from ......formats import TensorType
from ......simd.compile import intrinsic
from ......simd.instructions.dot_products import rounded_high_products
from ......simd.llvm import F32, F32X16, I16, I16X32, I32X16, I64, LANES, constant, fma, load, loop, shuffle, splat, store
from ......simd.memory import view
from ......simd.target import Forms, Target, target
from ......simd.team import TaskKernel
from .byte_tiles import BLOCK, PANEL, TILES, code_bias, pair_sums
from .float_panels import CODES, COLUMNS, LEAST_CODE, MOST_CODE, PANELS, ROOM, SCALES, TERMS, UNPACK_FIELDS, ZERO_CODE
from .unpack_panels import PanelForm

# Bits per weight of types that are rounded: their own errors are six times as large as those of the rounding, or more. Rounding
# activations to one scale per 256, too, changes results five times as much: so that is for fewer bits.
MOST_BITS = 6.625
MOST_BITS_OF_BOTH = 5
ROUNDED = PanelForm(zero=128, least=1, most=255, group=256, has_terms=False)
# Columns that share a scale of the activations with types of those fewer bits: with dot products of 256 bits 32 are faster.
SPANS: Forms[int] = ((("avx512f",), ROUNDED.group), (("avxvnni",), BLOCK), ((), ROUNDED.group))
_LARGEST = 127.0  # of a rounded weight
_FRACTION = 6  # bits behind the point
_SMALLEST = 1e-30  # what is below it counts as zero: its reciprocal would not be finite
_LINE = 4 * PANEL  # bytes of four columns of a panel, or of a group's scales


def rounded_span(stored: TensorType, panels: PanelForm) -> int | None:
    """Columns that share a scale of the activations where the panels of a type are rounded: 256 or BLOCK. None if they may not
    be, or products would not be faster then (with 30 tokens or more): so where (AVX2) those of its own codes take fewer
    instructions than those of eight bits."""
    bits = 8 * stored.block_bytes / stored.block
    if bits > MOST_BITS or pair_sums(panels.most) != pair_sums(ROUNDED.most):
        return None
    return target().choose(SPANS) if bits <= MOST_BITS_OF_BOTH else BLOCK


def write_rounding(
    b: Any,
    of: Target,
    group: int,
    codes: Any,
    scales: Any,
    terms: Any,
    to: Any,
    zero: Any,
    least: Any,
    most: Any,
    shift: Any,
) -> None:
    """LLVM code that rounds 256 columns of a panel. group: columns that share a scale. The others are int64: addresses (terms:
    None if there are none; to: of the new scales, perhaps those of the first old ones), what PanelForm says, and the bits that
    codes are moved by, so many that 2 ** (shift - 6) is more than an old scale can be in units of the new one."""
    together, flipped = of.choose(TILES).columns // 4, constant(I16X32, -0x7F80 if code_bias(of) else 0)
    nothing = constant(F32X16, 0.0)
    ends = [splat(b, b.sitofp(b.sub(code, zero), F32)) for code in (least, most, I64(0))]

    def numbers(at: Any) -> tuple[Any, list[Any]]:
        """The scales of a group, and what the least and the largest code and 0 stand for."""
        scale, term = load(b, scales, F32X16, at), nothing if terms is None else load(b, terms, F32X16, at)
        return scale, [fma(b, scale, end, term) for end in ends]

    largest, spoiled = nothing, nothing
    for g in range(ROUNDED.group // group):
        for value in numbers(I64(_LINE * g))[1][:2]:
            magnitude = b.select(b.fcmp_ordered("<", value, nothing), b.fneg(value), value)
            largest = b.select(b.fcmp_ordered(">", magnitude, largest), magnitude, largest)
            spoiled = fma(b, value, nothing, spoiled)  # NaN, if there is one, or something infinite
    smallest = constant(F32X16, _SMALLEST)
    is_any = b.fcmp_ordered(">", largest, smallest)
    unit = b.fdiv(b.select(is_any, largest, nothing), constant(F32X16, _LARGEST))
    inverse = b.fdiv(constant(F32X16, _LARGEST), b.select(is_any, largest, smallest))
    one = b.shl(I64(1), b.sub(I64(15 + _FRACTION), shift))  # 2 ** 15 / 2 ** shift, with the fraction
    steps, moved = splat(b, b.sitofp(one, F32)), splat(b, b.trunc(shift, I16), 32)
    start = constant(F32X16, (128 << _FRACTION) + (1 << _FRACTION >> 1))

    def in_both_halves(value: Any, part: int) -> Any:
        """Numbers of rows as 16-bit integers, in the order of a part of a panel's lines."""
        words = b.and_(b.fptosi(value, I32X16), constant(I32X16, 0xFFFF))
        if together > 1:
            words = shuffle(b, words, None, [(LANES * part + lane) // together for lane in range(LANES)])
        return b.bitcast(b.or_(words, b.shl(words, constant(I32X16, 16))), I16X32)

    def round_group(g: Any) -> None:
        scale, (_, _, lowest) = numbers(b.mul(g, I64(_LINE)))
        factor = b.fmul(b.fmul(scale, inverse), steps)
        begin = fma(b, b.fmul(lowest, inverse), constant(F32X16, float(1 << _FRACTION)), start)
        factors, begins = ([in_both_halves(value, part) for part in range(together)] for value in (factor, begin))
        eight, low = constant(I16X32, 8), constant(I16X32, 0xFF)
        for number in range(group // 4):
            at = b.add(b.mul(g, I64(PANEL * group)), I64(_LINE * number))
            line = b.xor(load(b, codes, I16X32, at), flipped)
            rounded = []
            for half in (b.and_(line, low), b.lshr(line, eight)):
                part = number % together
                product = rounded_high_products(b, b.shl(half, moved), factors[part], of)
                rounded.append(b.add(product, begins[part]))
            even, odd = b.lshr(rounded[0], constant(I16X32, _FRACTION)), b.shl(rounded[1], constant(I16X32, 8 - _FRACTION))
            line = b.or_(b.and_(even, low), b.and_(odd, constant(I16X32, -0x100)))
            store(b, b.xor(line, flipped), codes, at)

    loop(b, I64(ROUNDED.group // group), round_group)
    store(b, b.fadd(unit, spoiled), to)


@intrinsic
def _round_columns(typingctx, runs, codes, scales, terms, to, zero, least, most, shift):
    """`write_rounding` for this process. runs: a tuple as long as a group has runs of 16 columns."""
    has_terms = not isinstance(terms, types.NoneType)

    def generate(context, builder, signature, args):
        codes, scales, terms, *rest = args[1:]
        write_rounding(builder, target(), 16 * len(runs), codes, scales, terms if has_terms else None, *rest)
        return context.get_dummy_value()

    i = types.int64
    return types.void(runs, i, i, i if has_terms else terms, i, i, i, i, i), generate


@cache
def rounder(group: int, has_terms: bool) -> TaskKernel:
    """The part that rounds what a part of `unpack_panels` has unpacked, with the same table."""
    runs = (True,) * (group // 16)

    def round_panels(argument, number):
        table = view(argument, UNPACK_FIELDS, np.int64)
        zero, least, most, room, shift = table[ZERO_CODE], table[LEAST_CODE], table[MOST_CODE], table[ROOM], _FRACTION
        while most - least << shift - _FRACTION <= 2 * _LARGEST:  # then codes of `most` take 16 bits, too, of every type
            shift += 1
        for panel in range(table[PANELS]):
            for column in range(0, table[COLUMNS], 256):
                first = panel * room + column
                codes, place = table[CODES] + first * PANEL, first // group * _LINE
                scales, to = table[SCALES] + place, table[SCALES] + first // 256 * _LINE
                if has_terms:
                    _round_columns(runs, codes, scales, table[TERMS] + place, to, zero, least, most, shift)
                else:
                    _round_columns(runs, codes, scales, None, to, zero, least, most, shift)

    return TaskKernel(round_panels)
