"""Numbers taken out of packed bits at constant places, with the instructions that some processors have for it.

`Emitter.numbers` takes them where `numbers_in_bytes` and `numbers_in_halves`, which return None then, do not. emit: an
`Emitter`, which is built on this module.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from ....simd.instructions import x86
from ....simd.llvm import I1, I8, I16, I32, I64, LANES, constant, split_vector, vector

_WORD_BITS = 16
_WORDS = 32  # of them in a vector of 64 bytes


def numbers_in_bytes(emit: Any, base: Any, bits: np.ndarray, size: int) -> Any:
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


def numbers_in_halves(emit: Any, base: Any, bits: np.ndarray, size: int) -> Any:
    """<16 x i16> of numbers of up to eight bits, eight in each half of a register of 256 bits: sixteen bytes, or twice the same
    eight, are loaded into both halves, and each eight of them shifted by a number of bits, so that a permutation within halves
    takes all numbers. None where that is not so."""
    count, width = bits.shape
    if not emit.target.permutes_in_halves or count != LANES or width > 8:
        return None
    builder, total = emit.builder, None
    for first, stop in runs_of_bits(bits):
        of_run, part = constant(I16, [(1 << stop) - (1 << first)] * LANES), None
        if stop == first + 1 and (are_set := bits_of_word(emit, base, bits[:, first], size)) is not None:
            part = builder.select(are_set, of_run, constant(I16, [0] * LANES))
        for length in (8, 16) if part is None else ():
            lowest = bits[:, first] - first  # where a byte begins that has these bits as the number has them
            start = min(int(lowest.min()) // 8, size - length)
            place, shift = np.divmod(lowest - 8 * start, 8)
            if start < 0 or place.max() >= length or (8 * (place % 8) + shift + stop).max() > 64:
                continue
            if (found := _shifts_of_eights(place, shift, length)) is None:
                continue
            eights, shifts = found
            words = emit.load(base, start, vector(I64, length // 8))
            words = emit.shuffle(words, [0, length // 8 - 1] * 2)
            if shifts.any():
                words = builder.lshr(words, constant(I64, shifts))
            at = 16 * (np.arange(LANES) // 8) + 8 * eights + place % 8
            places = np.stack([at, np.full(LANES, -1)], axis=1).reshape(-1)
            part = emit.shuffle(builder.bitcast(words, vector(I8, 2 * LANES)), places)
            part = builder.and_(builder.bitcast(part, vector(I16, LANES)), of_run)
            break
        if part is None:
            return None
        total = part if total is None else builder.or_(total, part)
    return total


def _shifts_of_eights(place: np.ndarray, shift: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Which eight bytes of a half each of sixteen lanes takes its number from, eight lanes to a half, and by how many bits the
    four eights are shifted; int [16], [4]. place, shift: of each number among `length` bytes. None where that is not enough."""
    eights, shifts = place // 8, np.zeros(4, np.int64)
    for half in range(2):
        lanes = np.arange(8) + 8 * half
        if length == 8:  # twice the same: one for each shift
            found = np.unique(shift[lanes])
            eights[lanes] = np.searchsorted(found, shift[lanes])
        for eight in range(2):
            found = np.unique(shift[lanes][eights[lanes] == eight])
            if len(found) > 1 or eights[lanes].max() > 1:
                return None
            shifts[2 * half + eight] = found[0] if len(found) else 0
    return eights, shifts


def bits_of_word(emit: Any, base: Any, bits: np.ndarray, size: int) -> Any:
    """<16 x i1>: whether bits, int [16] of addresses, are set; None where they are not in 16 that begin at a byte."""
    start = min(int(bits.min()) // 8, size - 2)
    if start < 0 or bits.max() >= 8 * start + 16:
        return None
    word, places = emit.load(base, start, I16), bits - 8 * start
    if (places == np.arange(LANES)).all():
        return emit.mask(word)
    tested = emit.builder.and_(emit.splat(word), constant(I16, 1 << places))
    return emit.builder.icmp_unsigned("!=", tested, constant(I16, [0] * LANES))


def lowest_bits_of_words(emit: Any, base: Any, bits: np.ndarray, lane: ir.IntType = I32) -> Any:
    """<n x i32> (or of i16) of numbers of up to eight bits, bits [n, width]: which are the lowest bits of neighbouring words of
    16 bits among 64 words, those of each number among eight that begin at a multiple of eight."""
    builder, kind = emit.builder, vector(lane, len(bits))
    order = np.arange(8)  # of the eights of words in `total`
    total = I64(0)  # as one number: through memory, halves would be read together before they are written
    for half in range(2):
        stored = emit.load(base, 2 * _WORDS * half, vector(I16, _WORDS))
        if emit.target.permutes_in_halves:  # LLVM would take bit after bit
            shifted = builder.shl(stored, constant(I16, [15] * _WORDS))
            signs = x86.packs(builder, *split_vector(builder, shifted, 2))
            lowest, order = builder.icmp_signed("<", signs, constant(I8, [0] * _WORDS)), np.array([0, 2, 1, 3, 4, 6, 5, 7])
        else:
            lowest = builder.trunc(stored, vector(I1, _WORDS))
        total = builder.or_(total, builder.shl(builder.zext(builder.bitcast(lowest, I32), I64), I64(_WORDS * half)))
    numbers = builder.insert_element(ir.Constant(vector(I64, 2), None), total, I32(0))
    eights, first = np.divmod(bits[:, 0] // _WORD_BITS, 8)
    value = builder.zext(emit.shuffle(builder.bitcast(numbers, vector(I8, LANES)), order[eights]), kind)
    value = builder.lshr(value, constant(lane, first)) if first.any() else value
    return builder.and_(value, constant(lane, [(1 << bits.shape[-1]) - 1] * len(bits)))


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
