"""LLVM code that works on packed weights: gathering bytes, taking numbers out of bits, tables, 8-bit products.

An `Emitter` binds the pieces of `simd` to one builder and one target, and adds what readers of blocks need: bytes and bits at
constant places. All targets give the same integers, and floating-point numbers are added up in the order written, so
results are the same too, but of types whose signed bytes, or scaled products as integers, only some targets add.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from llvmlite import ir

from ....simd import llvm
from ....simd.instructions import dot_products, permute, scaled_dots
from ....simd.instructions.half_precision import half_to_float
from ....simd.llvm import CACHE_LINE, F32, I1, I8, I16, I32, I64, LANES, constant, vector
from ....simd.target import Target, target
from .packed_numbers import numbers_in_bytes, numbers_in_halves, runs_of_bits

__all__ = [
    "BYTES",
    "F32",
    "I1",
    "I8",
    "I16",
    "I32",
    "I64",
    "LANES",
    "PREFETCH_DISTANCE",
    "Emitter",
    "constant",
    "vector",
]

BYTES = 4 * LANES  # of a vector
PREFETCH_DISTANCE = 6144  # bytes
# Bytes from the first of four pieces of sixteen to the end of the last, if those between them fill the gaps: then two loads are
# enough for both. Pieces further apart are loaded one by one, which crosses fewer borders of cache lines.
_SHARED_LOADS = 7 * 16
PREFETCH_LOCALITY = 1  # the last level of the caches
# Distance, level, of interleaved rows of eight bits or more: long runs of memory with few instructions for each line. One line
# of a step suffices, and all of them take a tenth longer on Zen 5 (where none at all would do).
SPARSE_PREFETCH = 4096, 1
# The same with AVX2 and no AVX-512, and of floats: a Zen 3 reads bf16 at 86 % of what memory gives, at 67 with `prefetch` and
# at 78 with none; f16 at 87, 75 and 78, f32 at 88, 81 and 92, bf16_r16 at 81, 57 and 78, q8_0_r8 at 80, 71 and 77. (Intel's
# without AVX-512 were not measured.)
NEAR_PREFETCH = 768, 3
# Size, distance, level, of several streams: the processor itself follows each of them, and finds its next lines by the first
# that are asked for. Every line of a step takes longer than none (Zen 4).
STREAM_PREFETCH = CACHE_LINE, 2048, 2


class Emitter:
    """Instructions at the end of `builder`'s block, for a target (None: that of this process).

    streams: runs of memory, far from each other, that are read side by side
    """

    def __init__(self, builder: Any, of: Target | None = None, streams: int = 1):
        self.builder = builder
        self.target = of or target()
        self.streams = streams

    # --- vectors -----------------------------------------------------------------------------------------------------

    def load(self, base: Any, offset: int, kind: ir.Type) -> Any:
        """`kind` from the address (int64) base + offset."""
        return llvm.load(self.builder, base, kind, offset)

    def store(self, base: Any, offset: int, value: Any) -> None:
        """A value to the address (int64) base + offset."""
        llvm.store(self.builder, value, base, offset)

    def prefetch(self, base: Any, size: int, distance: int = PREFETCH_DISTANCE, locality: int = PREFETCH_LOCALITY) -> None:
        """Prefetches `size` bytes `distance` after an address; where no memory is, nothing happens.

        Products with weights from memory are up to twice as fast with it. A shorter distance, or the first level of the caches,
        is slower by up to a tenth for most types (the processor can wait for a small number of lines there). Of several streams
        a line of each is prefetched instead.
        """
        if self.streams > 1:
            size, distance, locality = STREAM_PREFETCH
        for offset in range(0, size, CACHE_LINE):
            llvm.prefetch(self.builder, base, distance + offset, locality)

    def prefetch_floats(self, base: Any, size: int) -> None:
        """`prefetch` for rows of 16 bits and more per weight."""
        self.prefetch(base, size, *(NEAR_PREFETCH if self.target.vector_bits == 256 else ()))

    def prefetch_sparsely(self, base: Any) -> None:
        """`prefetch` for interleaved rows of eight bits or more."""
        self.prefetch(base, CACHE_LINE, *(NEAR_PREFETCH if self.target.vector_bits == 256 else SPARSE_PREFETCH))

    def splat(self, value: Any, count: int = LANES) -> Any:
        return llvm.splat(self.builder, value, count)

    def shuffle(self, source: Any, places: Sequence[int] | np.ndarray) -> Any:
        """Elements by number; -1 for a zero."""
        places = [int(p) for p in places]
        count = source.type.count
        if places == list(range(count)):
            return source
        zeros = ir.Constant(source.type, None) if -1 in places else None
        return llvm.shuffle(self.builder, source, zeros, [count if p < 0 else p for p in places])

    def concat(self, parts: list[Any]) -> Any:
        """Vectors of one type, a power of two of them, one after the other."""
        return llvm.concat(self.builder, parts)

    def pick(self, sources: Sequence[Any], which: np.ndarray, places: np.ndarray) -> Any:
        """Lane i: element places[i] of sources[which[i]] (zero where places[i] < 0). Sources of one type."""
        source_of_lane = np.where(places < 0, -1, which)
        result: Any = None
        for source in sorted(set(source_of_lane[source_of_lane >= 0].tolist())):
            lanes = source_of_lane == source
            if result is None and np.all(lanes):
                return self.shuffle(sources[source], places)
            if result is None:
                result = self.shuffle(sources[source], np.where(lanes, places, -1))
                continue
            if result.type == sources[source].type:  # one two-source permutation
                count = result.type.count
                index = np.where(lanes, places + count, np.arange(count))
                result = self.builder.shuffle_vector(result, sources[source], constant(I32, index))
            else:
                picked = self.shuffle(sources[source], np.where(lanes, places, 0))
                index = np.where(lanes, np.arange(len(lanes)) + len(lanes), np.arange(len(lanes)))
                result = self.builder.shuffle_vector(result, picked, constant(I32, index))
        assert result is not None
        return result

    # --- numbers in packed bits --------------------------------------------------------------------------------------

    def gather(self, base: Any, addresses: np.ndarray, size: int) -> Any:
        """Bytes at constant offsets from base, of which offsets 0 to size - 1 may be read; a power of two of them."""
        low, high = int(addresses.min()), int(addresses.max())
        runs = np.flatnonzero(np.diff(addresses) != 1) + 1
        if len(runs) == 0:
            return self.load(base, low, vector(I8, len(addresses)))
        for window in (4, 8, 16, 32, 64):
            if high - low < window <= size:
                start = min(low, size - window)
                return self.shuffle(self.load(base, start, vector(I8, window)), addresses - start)
        is_near = len(addresses) == BYTES and high - low < 2 * BYTES <= size
        if is_near and self.target.has("avx512vbmi") and not (high - low > _SHARED_LOADS and _in_runs(addresses, 16)):
            start = min(low, size - 2 * BYTES)
            halves = [self.load(base, start + half, vector(I8, BYTES)) for half in (0, BYTES)]
            return self.builder.shuffle_vector(*halves, constant(I32, addresses - start))
        # Otherwise distinct pieces of one length are loaded one by one and concatenated.
        for length in (32, 16, 8, 4, 2, 1):
            if length > 1 and len(addresses) % length == 0 and _in_runs(addresses, length):
                return self.concat([self.load(base, int(first), vector(I8, length)) for first in addresses[::length]])
            starts = np.minimum(_pieces(addresses, length), size - length)
            if len(starts) * length <= BYTES and length <= size and (length > 2 or len(starts) <= LANES):
                count = 1 << (len(starts) - 1).bit_length()
                loads = [self.load(base, int(start), vector(I8, length)) for start in starts]
                which = np.searchsorted(starts, addresses, "right") - 1
                return self.shuffle(
                    self.concat(loads + loads[-1:] * (count - len(loads))), which * length + addresses - starts[which]
                )
        raise AssertionError("pieces of one byte can always be loaded")

    def numbers(self, base: Any, bits: np.ndarray, size: int, lane: ir.IntType = I32) -> Any:
        """<n x i32> (or of i16) of unsigned numbers; bits [n, width]: bit addresses, lowest first; n a power of two."""
        if (in_bytes := numbers_in_bytes(self, base, bits, size)) is not None:
            return self.builder.zext(in_bytes, vector(lane, len(bits)))
        if lane == I16 and (in_halves := numbers_in_halves(self, base, bits, size)) is not None:
            return in_halves
        total: Any = None
        for unit in (lane.width, 8):  # in words that a run of bits does not cross, where it crosses bytes
            runs = runs_of_bits(bits, unit)
            words = bits.max() // unit - bits.min() // unit + 1
            fits = (bits.max() // unit + 1) * unit // 8 <= size and (lane == I32 or words <= BYTES * 8 // unit)
            if unit == 8 or (len(runs) < len(runs_of_bits(bits, 8)) and fits):
                break
        for first, stop in runs:
            shift = bits[:, first] % unit
            if unit == 8:
                part = self.builder.zext(self.gather(base, bits[:, first] // 8, size), vector(lane, len(bits)))
            else:
                part = self._words(base, bits[:, first] // unit, lane)
            if shift.any():
                part = self.builder.lshr(part, constant(lane, shift))
            if (shift + stop - first).min() < unit:
                part = self.builder.and_(part, constant(lane, [(1 << stop - first) - 1] * len(bits)))
            if first:
                part = self.builder.shl(part, constant(lane, [first] * len(bits)))
            total = part if total is None else self.builder.or_(total, part)
        return total

    def _words(self, base: Any, numbers: np.ndarray, lane: ir.IntType) -> Any:
        """<n x lane> of the words of these numbers."""
        first = int(numbers.min())
        count = int(numbers.max()) - first + 1
        return self.shuffle(self.load(base, lane.width // 8 * first, vector(lane, count)), numbers - first)

    def number(self, base: Any, bits: np.ndarray, size: int) -> Any:
        """int64 of one unsigned number; bits [width], lowest first, in runs of up to 25 that may cross bytes."""
        cuts = [0, *(np.flatnonzero(np.diff(bits) != 1) + 1).tolist(), len(bits)]
        total: Any = None
        for first, stop in pairwise(cuts):
            low, high = int(bits[first]) // 8, int(bits[stop - 1]) // 8
            count = 1 << (high - low).bit_length()  # bytes to load
            start = min(low, size - count)
            part = self.builder.zext(self.load(base, start, ir.IntType(8 * count)), I64)
            part = self.builder.lshr(part, I64(int(bits[first]) - 8 * start))
            part = self.builder.shl(self.builder.and_(part, I64((1 << stop - first) - 1)), I64(first))
            total = part if total is None else self.builder.or_(total, part)
        return total

    def halves(self, base: Any, addresses: np.ndarray) -> Any:
        """<n x float> of float16 at constant byte offsets, n a power of two."""
        if np.all(np.diff(addresses) == 2):
            return self.half_to_float(self.load(base, int(addresses[0]), vector(I16, len(addresses))))
        unique, where = np.unique(addresses, return_inverse=True)
        if len(unique) == 1 and self.target.vector_bits == 256:
            # Of a single number LLVM replaces the lowest part of any register, and waits for what was in it.
            eight = self.half_to_float(self.splat(self.load(base, int(unique[0]), I16), 8))
            return self.shuffle(eight, where)
        count = 1 << max(len(unique) - 1, 0).bit_length()
        words = ir.Constant(vector(I16, count), ir.Undefined)
        for i in range(count):
            word = self.load(base, int(unique[min(i, len(unique) - 1)]), I16)
            words = self.builder.insert_element(words, word, I32(i))
        return self.shuffle(self.half_to_float(words), where)

    def half_to_float(self, bits: Any) -> Any:
        """float32 of the float16 whose bits are an i16, or of each of a vector of them."""
        return half_to_float(self.builder, bits, self.target)

    # --- bytes -------------------------------------------------------------------------------------------------------

    def byte_shift(self, value: Any, right: np.ndarray) -> Any:
        """<n x i8> shifted right (negative: left) by bits; lanes of four bytes have one shift each. Bits of neighbours may
        come in where the shifts differ: mask the result."""
        if not right.any():
            return value
        if np.all(right == right[0]):
            amount = constant(I8, [abs(int(right[0]))] * len(right))
            return self.builder.lshr(value, amount) if right[0] > 0 else self.builder.shl(value, amount)
        by_word = right[::4]
        words = self.builder.bitcast(value, vector(I32, len(by_word)))
        if by_word.max() > 0:
            words = self.builder.lshr(words, constant(I32, np.maximum(by_word, 0)))
        if by_word.min() < 0:
            words = self.builder.shl(words, constant(I32, np.maximum(-by_word, 0)))
        return self.builder.bitcast(words, value.type)

    def look_up(self, table: Sequence[int], codes: Any) -> Any:
        """Per byte table[code]; up to 64 entries 0 to 255, codes below len(table)."""
        return permute.lookup_bytes(self.builder, table, codes, self.target)

    def look_up_words(self, table: Sequence[int], codes: Any) -> Any:
        """Per lane of <n x i32>, n up to 64, the entry of up to 16 (-128 to 127) that a code picks."""
        count = codes.type.count
        narrow = self.builder.trunc(codes, vector(I8, count))
        entries = self.look_up([v & 255 for v in table], self.shuffle(narrow, list(range(count)) * (BYTES // count)))
        return self.builder.sext(self.shuffle(entries, range(count)), codes.type)

    def test(self, value: Any, masks: Sequence[int] | np.ndarray) -> Any:
        """Per byte whether a bit of the mask is set: <64 x i1>."""
        masked = self.builder.and_(value, constant(I8, masks))
        return self.builder.icmp_unsigned("!=", masked, constant(I8, [0] * len(masks)))

    def bits_of_bytes(self, source: Any, which: np.ndarray, bits: np.ndarray) -> Any:
        """<64 x i1>: of each lane bit bits[lane] of byte which[lane] of <32 x i8>."""
        return permute.bits_of_bytes(self.builder, source, which, bits, self.target)

    def with_signs(self, value: Any, signs: Any) -> Any:
        """<64 x i8>: value, -127 to 127, negated where signs are: <64 x i1>, or <64 x i8> below or above 0."""
        if signs.type.element == I1:
            return self.builder.select(signs, self.builder.neg(value), value)
        return dot_products.apply_signs(self.builder, value, signs, self.target)

    @staticmethod
    def in_words(places: np.ndarray) -> bool:
        """Whether of 64 bytes each comes from the four (of 32) that go with its word of eight."""
        return bool((places // 4 == np.arange(BYTES) // 8).all())

    def mask(self, bits: Any) -> Any:
        """<n x i1> of an integer of n bits: lane l is bit l."""
        return permute.mask_of_bits(self.builder, bits, self.target)

    def dot(self, total: Any, unsigned: Any, signed: Any, largest: int) -> Any:
        """<16 x i32> total + the sums of four products of bytes each: unsigned 0..largest, signed -127..127."""
        return dot_products.add_byte_dots(self.builder, total, unsigned, signed, largest, self.target)

    @property
    def multiplies_signed(self) -> bool:
        """Whether `signed_dot` takes fewer instructions than `dot` with numbers beyond 128."""
        return dot_products.multiplies_signed(self.target)

    def signed_dot(self, total: Any, a: Any, b: Any) -> Any:
        """<16 x i32> total + the sums of four products of signed bytes each: a -128..127, b -127..127."""
        return dot_products.add_signed_byte_dots(self.builder, total, a, b, self.target)

    def byte_sums(self, value: Any) -> Any:
        """<16 x i32> of <64 x i8>: sums of four bytes, 0 to 63 each."""
        return dot_products.byte_sums(self.builder, value, self.target)

    def add_byte_sums(self, total: Any, value: Any) -> Any:
        """<16 x i32> total + byte_sums(value)."""
        return dot_products.add_byte_sums(self.builder, total, value, self.target)

    def scales_of_dots(self, scales: Any, orders: Sequence[Sequence[int]]) -> list[Any]:
        """<16 x i32>, one for each order: lane i has scales[order[i]] of <16 x i16>, as `scaled_dot` takes them."""
        return scaled_dots.scales_of_dots(self.builder, scales, orders, self.target)

    def scaled_dot(self, total: Any, a: Any, b: Any, scales: Any, largest: int | None) -> Any:
        """<16 x i32> total + scale * the sums of four products of bytes each: a 0..largest (128 or less), or -128..127 (None,
        where the target `multiplies_signed`), b -127..127."""
        return scaled_dots.add_scaled_dots(self.builder, total, a, b, scales, largest, self.target)

    def word_pairs(self, a: Any, b: Any) -> Any:
        """<8 x i32>: the sums of two products of <16 x i16> each."""
        return dot_products.word_pairs(self.builder, a, b, self.target)

    # --- floats ------------------------------------------------------------------------------------------------------

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return llvm.fma(self.builder, a, b, c)

    def to_float(self, integers: Any) -> Any:
        return llvm.to_float(self.builder, integers)

    def fold(self, value: Any, keys: Sequence[int], count: int) -> Any:
        """<count x float>: sums over the lanes whose key is 0, 1, ...; keys repeat with a power of two of lanes each."""
        order = np.argsort(np.asarray(keys), kind="stable").reshape(count, -1)
        while order.shape[1] > 1:
            half = order.shape[1] // 2
            low, high = (self.shuffle(value, part.reshape(-1)) for part in (order[:, :half], order[:, half:]))
            value = self.builder.fadd(low, high)
            order = np.arange(value.type.count).reshape(count, -1)
        return self.shuffle(value, order.reshape(-1))

    def fold_each(self, values: list[Any]) -> Any:
        """<n x float>: the sum of each vector's lanes, in the order of `fold`; n is at least their number, and what follows the
        sums is not to be used. With several vectors in a register it takes a third of the instructions."""
        width, add, shuffle = values[0].type.count, self.builder.fadd, self.builder.shuffle_vector
        while width > 1:
            starts, half = np.arange(0, values[0].type.count * min(2, len(values)), width)[:, None], width // 2
            low, high = (starts + first + np.arange(half) for first in (0, half))
            pairs = zip(values[::2], values[1::2] + values[-1:], strict=False)
            values = [add(*(shuffle(a, b, constant(I32, part.reshape(-1))) for part in (low, high))) for a, b in pairs]
            width = half
        return values[0]


def _in_runs(addresses: np.ndarray, length: int) -> bool:
    """Whether addresses are pieces of so many neighbours."""
    return bool((np.diff(addresses.reshape(-1, length), axis=1) == 1).all())


def _pieces(addresses: np.ndarray, length: int) -> np.ndarray:
    """Starts of pieces of `length` bytes, not overlapping, that contain all addresses."""
    starts: list[int] = []
    for address in np.unique(addresses).tolist():
        if not starts or address >= starts[-1] + length:
            starts.append(address)
    return np.array(starts)
