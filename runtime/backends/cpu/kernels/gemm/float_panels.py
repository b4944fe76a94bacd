"""bf16 numbers as matrix products want them: rows of activations, and panels of 16 rows of weights.

A panel holds the same two columns of all its rows together: uint16 bits [columns / 2, 16, 2]. That is how bf16_r16 lies in
files, what the tile unit takes as its second factor, and what a dot-product instruction multiplies with two columns of a token.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types

from ......simd.compile import intrinsic, kernel
from ......simd.llvm import F32X16, I32X16, I64, LANES, constant, load, shuffle, store
from ......simd.memory import address, aligned_empty, scratch, view
from .byte_products import PANEL

STEP, TOKENS = 32, 16  # columns of rows and panels, and tokens, are filled up to multiples


def round_rows(x: np.ndarray, parts: int = 1) -> np.ndarray:
    """float32 [n, columns] -> bf16 (as uint16), rounded to the nearest, ties to even, in blocks of 16 tokens and 32 columns
    that are filled up with zeros: [n / 16, parts, columns / 32, 16, 32].

    parts: 1, or 2 for what the first rounding left as well, so that the sum of both is x up to 2^-17 of it.
    """
    n, columns = x.shape
    out = aligned_empty((-(-n // TOKENS), parts, -(-columns // STEP), TOKENS, STEP), np.uint16)
    _round(np.ascontiguousarray(x, np.float32), out)
    return out


@intrinsic
def _round_step(typingctx, source, target, remainder):
    """32 float32 at an address, rounded to bf16 at another; what is left, if it is not nothing (remainder 0), at a third."""

    def generate(context, builder, signature, args):
        b = builder
        source, target, remainder = args
        shorts = ir.VectorType(ir.IntType(16), LANES)

        def rounded(value):
            words = b.bitcast(value, I32X16)
            odd = b.and_(b.lshr(words, constant(I32X16, 16)), constant(I32X16, 1))
            near = b.add(words, b.add(odd, constant(I32X16, 0x7FFF)))
            # Rounding could make a zero of a NaN.
            return b.and_(b.select(b.fcmp_unordered("uno", value, value), words, near), constant(I32X16, -0x10000))

        for half in range(2):
            value = load(b, source, F32X16, 4 * LANES * half)
            words = rounded(value)
            store(b, b.trunc(b.lshr(words, constant(I32X16, 16)), shorts), target, 2 * LANES * half)
            with b.if_then(b.icmp_signed("!=", remainder, I64(0))):
                left = rounded(b.fsub(value, b.bitcast(words, F32X16)))
                store(b, b.trunc(b.lshr(left, constant(I32X16, 16)), shorts), remainder, 2 * LANES * half)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i), generate


@kernel
def round_row(source, columns, first, stop, target, remainder, last):
    """Rounds the columns first (a multiple of 32) to stop - 1 of a row of float32, or zeros if its address is 0, to their
    places in a block: `target` is that of the row's column 0, `remainder` (if not 0) that of what is left. last: zeros
    [32], for use meanwhile."""
    for column in range(first, min(stop, columns), STEP):
        at = source + 4 * column
        if source == 0:
            at = address(last)
        elif column + STEP > columns:
            for i in range(columns - column):
                last[i] = view(at, columns - column, np.float32)[i]
            at = address(last)
        place = 2 * TOKENS * column
        _round_step(at, target + place, remainder + place if remainder else 0)
        if at == address(last):
            last[:] = 0


@kernel
def _round(x, out):
    n, columns = x.shape
    last = np.zeros(STEP, np.float32)
    block_bytes, part_bytes = 2 * out[0].size, 2 * out[0, 0].size
    for t in range(out.shape[0] * TOKENS):
        to = address(out) + t // TOKENS * block_bytes + t % TOKENS * 2 * STEP
        source = address(x) + 4 * t * columns if t < n else 0
        round_row(source, columns, 0, columns, to, to + part_bytes if out.shape[1] > 1 else 0, last)


def plain_nan(b, value):
    """A vector of float32 whose NaN, if any, have the usual bits: `bf16_pair` would make zeros of others."""
    return b.select(b.fcmp_unordered("uno", value, value), ir.Constant(F32X16, [float("nan")] * LANES), value)


def bf16_pair(b, low, high):
    """Two vectors of float32 rounded to the nearest bf16, as the low and the high halves of words. (Ties go away from zero:
    one instruction instead of three.) NaN has to have the usual bits."""
    half = constant(I32X16, 0x8000)
    high = b.and_(b.add(b.bitcast(high, I32X16), half), constant(I32X16, -0x10000))
    return b.or_(high, b.lshr(b.add(b.bitcast(low, I32X16), half), constant(I32X16, 16)))


def _transposed(b, rows):
    """Sixteen vectors of sixteen words: word i of vector j becomes word j of vector i."""
    for bit in (8, 4, 2, 1):
        upper = [j & bit for j in range(LANES)]
        low_places = [LANES + j - bit if up else j for j, up in enumerate(upper)]
        high_places = [LANES + j if up else j + bit for j, up in enumerate(upper)]
        done = list(rows)
        for i in range(LANES):
            if not i & bit:
                done[i] = shuffle(b, rows[i], rows[i | bit], low_places)
                done[i | bit] = shuffle(b, rows[i], rows[i | bit], high_places)
        rows = done
    return rows


@intrinsic
def _turn(typingctx, sample, source, row_bytes, rows, out):
    """Writes 32 columns of a panel at address `out` from 16 rows at address `source`, `row_bytes` apart, of the numbers that
    the array `sample` holds: float32, or bf16 as uint16. The last of `rows` rows stands in for missing ones."""
    if not isinstance(sample, types.Array) or sample.dtype not in (types.float32, types.uint16):
        return None

    def generate(context, builder, signature, args):
        b = builder
        _, source, row_bytes, rows, out = args
        last = b.sub(rows, I64(1))
        lines = []
        for r in range(PANEL):
            row = b.select(b.icmp_signed("<", I64(r), last), I64(r), last)
            at = b.add(source, b.mul(row, row_bytes))
            if sample.dtype == types.uint16:
                lines.append(load(b, at, I32X16))
                continue
            first, second = load(b, at, F32X16), load(b, at, F32X16, 4 * LANES)
            even, odd = (plain_nan(b, shuffle(b, first, second, range(i, 2 * LANES, 2))) for i in range(2))
            lines.append(bf16_pair(b, even, odd))
        for i, line in enumerate(_transposed(b, lines)):
            store(b, line, out, 4 * LANES * i)
        return context.get_dummy_value()

    i = types.int64
    return types.void(sample, i, i, i, i), generate


@kernel
def fill_panels(rows, tail, panels):
    """Writes rows [n, columns] to panels uint16 [n / 16, columns / 2, 16, 2]. tail: [n, 32], what is beyond the last multiple
    of 32 columns and zeros (not read if there is nothing)."""
    n, columns = rows.shape
    size = rows.itemsize
    whole = columns // STEP * STEP
    at, out, width = address(rows), address(panels), panels.shape[1] * 2
    for panel in range(panels.shape[0]):
        first, to = panel * PANEL, out + panel * width * PANEL * 2
        count = min(PANEL, n - first)
        for c in range(0, whole, STEP):
            _turn(rows, at + (first * columns + c) * size, columns * size, count, to + c * PANEL * 2)
        if whole < columns:
            _turn(rows, address(tail) + first * STEP * size, STEP * size, count, to + whole * PANEL * 2)


def panels_of(rows: np.ndarray) -> np.ndarray:
    """float32 or bf16 (as uint16) [n, columns], C-contiguous -> bf16 panels, uint16 [n / 16, columns / 2, 16, 2], filled up;
    valid until this thread calls it again."""
    n, columns = rows.shape
    padded = -(-columns // STEP) * STEP
    tail = np.zeros((n if padded > columns else 0, STEP), rows.dtype)
    if padded > columns:
        tail[:, : columns % STEP] = rows[:, columns // STEP * STEP :]
    panels = scratch("panels", (-(-n // PANEL), padded // 2, PANEL, 2), np.uint16)
    fill_panels(rows, tail, panels)
    return panels
