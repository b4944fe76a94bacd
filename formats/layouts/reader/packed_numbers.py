"""Numbers taken out of packed bits at constant places, with the instructions that some processors have for it.

`Emitter.numbers` takes them where these functions, which return None then, cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ....simd.instructions import x86
from ....simd.llvm import I8, I16, I64, LANES, constant, vector

if TYPE_CHECKING:
    from .emitter import Emitter


def numbers_in_bytes(emit: Emitter, base: Any, bits: np.ndarray, size: int) -> Any:
    """<16 x i8> of numbers of up to eight bits in several runs, each of which one instruction takes out of eight bytes for
    every eight numbers; None where that is not so."""
    count, width = bits.shape
    runs = runs_of_bits(bits)
    if not emit.target.has("avx512vbmi") or count != LANES or width > 8 or size < 8 or len(runs) == 1:
        return None
    if not np.ptp(bits[:, [first for first, _ in runs]] % 8, axis=0).any():  # one shift for all takes as little
        return None
    total: Any = None
    for first, stop in runs:
        at, start = bits[:, first], min(int(bits[:, first].min()) // 8, size - 8)
        if bits[:, stop - 1].max() < 8 * (start + 8):
            place = at // 8 - start
            words = emit.builder.bitcast(emit.splat(emit.load(base, start, I64), 2), vector(I8, LANES))
        elif (window := _eight_bytes(bits)) is not None:
            place = (np.repeat(window.reshape(-1, 8), 8, axis=0) == at[:, None] // 8).argmax(axis=1)
            words = emit.gather(base, window, size)
        else:
            return None
        shifts = (8 * place + at % 8 - first) % 64
        part = x86.vpmultishiftqb(emit.builder, constant(I8, shifts), words)
        if total is not None:
            below = constant(I8, [(1 << first) - 1] * LANES)
            total = emit.builder.and_(total, below)
            part = emit.builder.or_(total, emit.builder.and_(part, emit.builder.not_(below)))
        total = part
    return emit.builder.and_(total, constant(I8, [(1 << width) - 1] * LANES))


def numbers_in_halves(emit: Emitter, base: Any, bits: np.ndarray, size: int) -> Any:
    """<16 x i16> of numbers of up to eight bits, eight in each half of a register of 256 bits, into which eight bytes are
    loaded twice, each time shifted by another number of bits, so that a permutation within halves takes all numbers. None
    where that is not so."""
    count, width = bits.shape
    if not emit.target.has("avx2") or emit.target.has("avx512vbmi") or count != LANES or width > 8:
        return None
    total: Any = None
    for first, stop in runs_of_bits(bits):
        of_run = constant(I16, [(1 << stop) - (1 << first)] * LANES)
        if stop == first + 1 and (are_set := bits_of_word(emit, base, bits[:, first], size)) is not None:
            part = emit.builder.select(are_set, of_run, constant(I16, [0] * LANES))
            total = part if total is None else emit.builder.or_(total, part)
            continue
        lowest = bits[:, first] - first  # where a byte begins that has these bits as the number has them
        start = min(int(lowest.min()) // 8, size - 8)
        place, shift = np.divmod(lowest - 8 * start, 8)
        of_halves = [np.unique(half) for half in shift.reshape(2, -1)]
        if start < 0 or bits[:, stop - 1].max() >= 8 * (start + 8) or max(map(len, of_halves)) > 2:
            return None
        shifts = np.stack([np.resize(half, 2) for half in of_halves])
        words = emit.splat(emit.load(base, start, I64), 4)
        if shifts.any():
            words = emit.builder.lshr(words, constant(I64, shifts.reshape(-1)))
        half = np.arange(LANES) // 8
        at = 16 * half + np.where(shift == shifts[half, 0], 0, 8) + place
        places = np.stack([at, np.full(LANES, -1)], axis=1).reshape(-1)
        part = emit.builder.bitcast(
            emit.shuffle(emit.builder.bitcast(words, vector(I8, 2 * LANES)), places), vector(I16, LANES)
        )
        part = emit.builder.and_(part, of_run)
        total = part if total is None else emit.builder.or_(total, part)
    return total


def bits_of_word(emit: Emitter, base: Any, bits: np.ndarray, size: int) -> Any:
    """<16 x i1>: whether bits, int [16] of addresses, are set; None where they are not in 16 that begin at a byte."""
    start = min(int(bits.min()) // 8, size - 2)
    if start < 0 or bits.max() >= 8 * start + 16:
        return None
    word, places = emit.load(base, start, I16), bits - 8 * start
    if (places == np.arange(LANES)).all():
        return emit.mask(word)
    tested = emit.builder.and_(emit.splat(word), constant(I16, 1 << places))
    return emit.builder.icmp_unsigned("!=", tested, constant(I16, [0] * LANES))


def _eight_bytes(bits: np.ndarray) -> np.ndarray | None:
    """Offsets, eight for every eight of n numbers, of bytes that have their bits [n, width]; None where these are more."""
    windows = [np.unique(eight // 8) for eight in bits.reshape(len(bits) // 8, -1)]
    return np.concatenate([np.resize(used, 8) for used in windows]) if max(map(len, windows)) <= 8 else None


def runs_of_bits(bits: np.ndarray, unit: int = 8) -> list[tuple[int, int]]:
    """Cuts numbers, bit addresses [..., width], into runs (first, stop) whose bits are adjacent in all of them, within one byte
    (or another unit of bits)."""
    width = bits.shape[-1]
    cuts = [0]
    for j in range(1, width):
        adjacent = (bits[..., j] == bits[..., j - 1] + 1) & (bits[..., j] // unit == bits[..., j - 1] // unit)
        if not adjacent.all():
            cuts.append(j)
    return list(zip(cuts, [*cuts[1:], width], strict=True))
