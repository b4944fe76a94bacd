"""bf16 numbers as matrix products want them: rows of activations, and panels of 16 rows of weights.

A panel holds the same two columns of all its rows together: uint16 bits [columns / 2, 16, 2]. That is how bf16_r16 lies in
files, what the tile unit takes as its second factor, and what a dot-product instruction multiplies with two columns of a token.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types

from ...formats.kernels import kernel
from ...quantize.arithmetic import operation
from .gemm_bytes import PANEL
from .lines import empty, scratch
from .x86 import FLOATS, I64, LANES, WORDS, address, load, same, shuffle, store

STEP, TOKENS = 32, 16  # columns of rows and panels, and tokens, are filled up to multiples


def round_rows(x: np.ndarray, parts: int = 1) -> np.ndarray:
    """float32 [n, columns] -> bf16 (as uint16), rounded to the nearest, ties to even, in blocks of 16 tokens and 32 columns
    that are filled up with zeros: [parts, n / 16, columns / 32, 16, 32].

    parts: 1, or 2 for what the first rounding left as well, so that the sum of both is x up to 2^-17 of it.
    """
    n, columns = x.shape
    out = empty((parts, -(-n // TOKENS), -(-columns // STEP), TOKENS, STEP), np.uint16)
    _round(np.ascontiguousarray(x, np.float32), out)
    return out


@operation
def _round_step(typingctx, source, target, remainder):
    """32 float32 at an address, rounded to bf16 at another; what is left, if it is not nothing (remainder 0), at a third."""

    def generate(context, builder, signature, args):
        b = builder
        source, target, remainder = args
        shorts = ir.VectorType(ir.IntType(16), LANES)

        def rounded(value):
            words = b.bitcast(value, WORDS)
            odd = b.and_(b.lshr(words, same(WORDS, 16)), same(WORDS, 1))
            near = b.add(words, b.add(odd, same(WORDS, 0x7FFF)))
            # Rounding could make a zero of a NaN.
            return b.and_(b.select(b.fcmp_unordered("uno", value, value), words, near), same(WORDS, -0x10000))

        for half in range(2):
            value = load(b, source, FLOATS, 4 * LANES * half)
            words = rounded(value)
            store(b, b.trunc(b.lshr(words, same(WORDS, 16)), shorts), target, 2 * LANES * half)
            with b.if_then(b.icmp_signed("!=", remainder, I64(0))):
                left = rounded(b.fsub(value, b.bitcast(words, FLOATS)))
                store(b, b.trunc(b.lshr(left, same(WORDS, 16)), shorts), remainder, 2 * LANES * half)
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, i, i), generate


@kernel
def _round(x, out):
    n, columns = x.shape
    last = np.zeros(STEP, np.float32)
    part_bytes = out[0].size * 2
    for t in range(out.shape[1] * TOKENS):
        at = address(x) + 4 * t * columns
        for step in range(out.shape[2]):
            first = step * STEP
            source = at + 4 * first
            if t >= n:
                last[:] = 0
                source = address(last)
            elif first + STEP > columns:
                last[: columns - first] = x[t, first:]
                last[columns - first :] = 0
                source = address(last)
            to = address(out) + 2 * (((t // TOKENS * out.shape[2] + step) * TOKENS + t % TOKENS) * STEP)
            _round_step(source, to, to + part_bytes if out.shape[0] > 1 else 0)


def plain_nan(b, value):
    """A vector of float32 whose NaN, if any, have the usual bits: `bf16_pair` would make zeros of others."""
    return b.select(b.fcmp_unordered("uno", value, value), ir.Constant(FLOATS, [float("nan")] * LANES), value)


def bf16_pair(b, low, high):
    """Two vectors of float32 rounded to the nearest bf16, as the low and the high halves of words. (Ties go away from zero:
    one instruction instead of three.) NaN has to have the usual bits."""
    half = same(WORDS, 0x8000)
    high = b.and_(b.add(b.bitcast(high, WORDS), half), same(WORDS, -0x10000))
    return b.or_(high, b.lshr(b.add(b.bitcast(low, WORDS), half), same(WORDS, 16)))


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


@operation
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
                lines.append(load(b, at, WORDS))
                continue
            first, second = load(b, at, FLOATS), load(b, at, FLOATS, 4 * LANES)
            even, odd = (plain_nan(b, shuffle(b, first, second, range(i, 2 * LANES, 2))) for i in range(2))
            lines.append(bf16_pair(b, even, odd))
        for i, line in enumerate(_transposed(b, lines)):
            store(b, line, out, 4 * LANES * i)
        return context.get_dummy_value()

    i = types.int64
    return types.void(sample, i, i, i, i), generate


@kernel
def _panels(rows, tail, panels):
    """rows: [n, columns]; tail: [n, 32], what is beyond the last multiple of 32 columns and zeros."""
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
    rows = rows.view()
    rows.flags.writeable = False  # one signature, whether they come from a file or not
    _panels(rows, tail, panels)
    panels.flags.writeable = False
    return panels
