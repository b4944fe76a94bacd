"""LLVM instructions for dot products on packed weights: gathering bytes, taking numbers out of bits, tables, 8-bit products.

An `Emitter` writes vector instructions of no particular machine, which LLVM maps to what there is. Two things it cannot
express well, looking up bytes and multiplying bytes, go by *level*: "avx512" (VNNI, VBMI where there), "avx2" or "portable".
All levels give the same integers, and floating-point numbers are added up in the order written, so results are the same too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core.cgutils import get_or_insert_function

from ......simd.llvm import features

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, HALF = ir.FloatType(), ir.HalfType()
LANES = 16  # 32-bit lanes of a vector; 64 bytes
BYTES = 4 * LANES
LINE = 64  # bytes of a cache line
AHEAD, CACHE = 6144, 1  # prefetching: bytes ahead, and into which cache (3: the first level, 1: the last)

LEVELS = ("avx512", "avx2", "portable")


def levels_here() -> list[str]:
    """The levels that code compiled here may use, the best one first."""
    has = features()
    first = 0 if {"avx512bw", "avx512vnni"} <= has else 1 if "avx2" in has else 2
    return list(LEVELS[first:])


def vector(element: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(element, count)


def constant(element: ir.Type, values: Sequence[int] | Sequence[float] | np.ndarray) -> ir.Constant:
    return ir.Constant(vector(element, len(values)), [v.item() if isinstance(v, np.generic) else v for v in values])


class Emitter:
    """Instructions at the end of `builder`'s block, for one level ('': the best here)."""

    def __init__(self, builder: Any, level: str = ""):
        self.builder, self.level = builder, level or levels_here()[0]

    # --- vectors -----------------------------------------------------------------------------------------------------

    def call(self, name: str, result: ir.Type, *args: Any) -> Any:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(get_or_insert_function(self.builder.module, kind, name), args)

    def load(self, base: Any, offset: int, kind: ir.Type) -> Any:
        """`kind` from the address (int64) base + offset."""
        address = self.builder.add(base, I64(offset)) if offset else base
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def prefetch(self, base: Any, size: int) -> None:
        """Asks for the cache lines of `size` bytes at some distance after an address; where no memory is, nothing happens.

        From memory products are up to twice as fast with it. Less far ahead, or into the first level, is slower by up to a
        tenth (there the processor can wait for few lines only).
        """
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        for offset in range(0, size, LINE):
            place = self.builder.inttoptr(self.builder.add(base, I64(AHEAD + offset)), I8.as_pointer())
            self.builder.call(function, [place, I32(0), I32(CACHE), I32(1)])

    def splat(self, value: Any, count: int = LANES) -> Any:
        kind = vector(value.type, count)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), constant(I32, [0] * count))

    def shuffle(self, source: Any, places: Sequence[int] | np.ndarray) -> Any:
        """Elements by number; -1 for a zero."""
        places = [int(p) for p in places]
        count = source.type.count
        if places == list(range(count)):
            return source
        other = ir.Constant(source.type, None if -1 in places else ir.Undefined)
        return self.builder.shuffle_vector(source, other, constant(I32, [count if p < 0 else p for p in places]))

    def join(self, parts: list[Any]) -> Any:
        """Vectors of one type, a power of two of them, one after the other."""
        while len(parts) > 1:
            both = constant(I32, range(2 * parts[0].type.count))
            parts = [self.builder.shuffle_vector(a, b, both) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def pick(self, sources: Sequence[Any], which: np.ndarray, places: np.ndarray) -> Any:
        """Lane i: element places[i] of sources[which[i]] (zero where places[i] < 0). Sources of one type."""
        wanted = np.where(places < 0, -1, which)
        found: Any = None
        for source in sorted(set(wanted[wanted >= 0].tolist())):
            mine = wanted == source
            if found is None and np.all(mine):
                return self.shuffle(sources[source], places)
            if found is None:
                found = self.shuffle(sources[source], np.where(mine, places, -1))
                continue
            if found.type == sources[source].type:  # one two-source permutation
                count = found.type.count
                index = np.where(mine, places + count, np.arange(count))
                found = self.builder.shuffle_vector(found, sources[source], constant(I32, index))
            else:
                one = self.shuffle(sources[source], np.where(mine, places, 0))
                index = np.where(mine, np.arange(len(mine)) + len(mine), np.arange(len(mine)))
                found = self.builder.shuffle_vector(found, one, constant(I32, index))
        assert found is not None
        return found

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
        # Far apart: the distinct pieces of some length are loaded one by one and put side by side.
        for length in (32, 16, 8, 4, 2, 1):
            pieces = addresses.reshape(-1, length) if len(addresses) % length == 0 else None
            if length > 1 and pieces is not None and np.all(np.diff(pieces, axis=1) == 1):
                return self.join([self.load(base, int(piece[0]), vector(I8, length)) for piece in pieces])
            starts = _pieces(addresses, length)
            if len(starts) * length <= BYTES and starts[-1] + length <= size and (length > 2 or len(starts) <= LANES):
                count = 1 << (len(starts) - 1).bit_length()
                loads = [self.load(base, int(start), vector(I8, length)) for start in starts]
                which = np.searchsorted(starts, addresses, "right") - 1
                return self.shuffle(
                    self.join(loads + loads[-1:] * (count - len(loads))), which * length + addresses - starts[which]
                )
        raise AssertionError("pieces of one byte always do")

    def numbers(self, base: Any, bits: np.ndarray, size: int, lane: ir.IntType = I32) -> Any:
        """<n x i32> (or of i16) of unsigned numbers; bits [n, width]: bit addresses, lowest first; n a power of two."""
        total: Any = None
        for unit in (32, 8):  # in words that a run of bits does not cross, where it crosses bytes
            runs = runs_of_bits(bits, unit)
            if unit == 8 or (lane == I32 and len(runs) < len(runs_of_bits(bits, 8)) and bits.max() // 32 * 4 + 4 <= size):
                break
        for first, stop in runs:
            shift = bits[:, first] % unit
            if unit == 8:
                part = self.builder.zext(self.gather(base, bits[:, first] // 8, size), vector(lane, len(bits)))
            else:
                part = self._words(base, bits[:, first] // 32)
            if shift.any():
                part = self.builder.lshr(part, constant(lane, shift))
            if (shift + stop - first).min() < unit:
                part = self.builder.and_(part, constant(lane, [(1 << stop - first) - 1] * len(bits)))
            if first:
                part = self.builder.shl(part, constant(lane, [first] * len(bits)))
            total = part if total is None else self.builder.or_(total, part)
        return total

    def _words(self, base: Any, numbers: np.ndarray) -> Any:
        """<n x i32> of the words at 4 * number."""
        first = int(numbers.min())
        count = int(numbers.max()) - first + 1
        return self.shuffle(self.load(base, 4 * first, vector(I32, count)), numbers - first)

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
            values = self.load(base, int(addresses[0]), vector(I16, len(addresses)))
            return self.builder.fpext(self.builder.bitcast(values, vector(HALF, len(addresses))), vector(F32, len(addresses)))
        unique, where = np.unique(addresses, return_inverse=True)
        count = 1 << max(len(unique) - 1, 0).bit_length()
        words = ir.Constant(vector(I16, count), ir.Undefined)
        for i in range(count):
            word = self.load(base, int(unique[min(i, len(unique) - 1)]), I16)
            words = self.builder.insert_element(words, word, I32(i))
        floats = self.builder.fpext(self.builder.bitcast(words, vector(HALF, count)), vector(F32, count))
        return self.shuffle(floats, where)

    # --- bytes -------------------------------------------------------------------------------------------------------

    def byte_shift(self, value: Any, right: np.ndarray) -> Any:
        """<64 x i8> shifted right (negative: left) by bits; lanes of four bytes have one shift each. Bits of neighbours may
        come in where the shifts differ: mask the result."""
        if not right.any():
            return value
        if np.all(right == right[0]):
            amount = constant(I8, [abs(int(right[0]))] * BYTES)
            return self.builder.lshr(value, amount) if right[0] > 0 else self.builder.shl(value, amount)
        words = self.builder.bitcast(value, vector(I32, LANES))
        by_word = right.reshape(LANES, 4)[:, 0]
        if by_word.max() > 0:
            words = self.builder.lshr(words, constant(I32, np.maximum(by_word, 0)))
        if by_word.min() < 0:
            words = self.builder.shl(words, constant(I32, np.maximum(-by_word, 0)))
        return self.builder.bitcast(words, vector(I8, BYTES))

    def look_up(self, table: Sequence[int], codes: Any) -> Any:
        """Per byte table[code]; up to 64 entries 0 to 255, codes below len(table)."""
        entries = [int(v) for v in table]
        width = 1 << max(4, (len(entries) - 1).bit_length())
        entries += [0] * (width - len(entries))
        if width > 16 and self.level == "avx512" and "avx512vbmi" in features():
            whole = constant(I8, (entries * 4)[:BYTES])
            return self.call("llvm.x86.avx512.permvar.qi.512", vector(I8, BYTES), whole, codes)
        pieces = [self._look_up_16(entries[i : i + 16], codes) for i in range(0, width, 16)]
        bit = 16
        while len(pieces) > 1:
            on = self.test(codes, [bit] * BYTES)
            pieces = [self.builder.select(on, b, a) for a, b in zip(pieces[::2], pieces[1::2], strict=True)]
            bit *= 2
        return pieces[0]

    def look_up_words(self, table: Sequence[int], codes: Any) -> Any:
        """Per lane of <16 x i32> the entry of up to 16 (-128 to 127) that a code picks."""
        narrow = self.builder.trunc(codes, vector(I8, LANES))
        found = self.look_up([v & 255 for v in table], self.shuffle(narrow, list(range(LANES)) * 4))
        return self.builder.sext(self.shuffle(found, range(LANES)), vector(I32, LANES))

    def _look_up_16(self, entries: list[int], codes: Any) -> Any:
        if self.level == "avx512":
            return self.call("llvm.x86.avx512.pshuf.b.512", vector(I8, BYTES), constant(I8, entries * 4), codes)
        if self.level == "avx2":
            return self._by_halves(
                lambda half: self.call("llvm.x86.avx2.pshuf.b", vector(I8, 32), constant(I8, entries * 2), half), codes
            )
        low = self.builder.and_(codes, constant(I8, [15] * BYTES))
        found = constant(I8, [entries[0]] * BYTES)
        for code, entry in enumerate(entries[1:], 1):
            same = self.builder.icmp_unsigned("==", low, constant(I8, [code] * BYTES))
            found = self.builder.select(same, constant(I8, [entry] * BYTES), found)
        return found

    def _by_halves(self, function: Callable, *vectors: Any) -> Any:
        parts = []
        for half in range(2):
            places = [range(v.type.count // 2 * half, v.type.count // 2 * (half + 1)) for v in vectors]
            parts.append(function(*(self.shuffle(v, list(p)) for v, p in zip(vectors, places, strict=True))))
        return self.join(parts)

    def test(self, value: Any, masks: Sequence[int] | np.ndarray) -> Any:
        """Per byte whether a bit of the mask is set: <64 x i1>."""
        kept = self.builder.and_(value, constant(I8, masks))
        return self.builder.icmp_unsigned("!=", kept, constant(I8, [0] * len(masks)))

    def dot(self, total: Any, unsigned: Any, signed: Any, small: bool) -> Any:
        """<16 x i32> total + the sums of four products of bytes each: unsigned 0..255 (small: 0..128), signed -127..127."""
        if self.level == "avx512":
            a, b = (self.builder.bitcast(v, vector(I32, LANES)) for v in (unsigned, signed))
            return self.call("llvm.x86.avx512.vpdpbusd.512", vector(I32, LANES), total, a, b)
        if self.level == "avx2":
            products = self._by_halves(self._dot_small if small else self._dot_wide, unsigned, signed)
            return self.builder.add(total, products)
        a, b = (self.builder.bitcast(v, vector(I32, LANES)) for v in (unsigned, signed))
        for byte in range(4):
            left = self.builder.and_(self.builder.lshr(a, constant(I32, [8 * byte] * LANES)), constant(I32, [255] * LANES))
            right = self.builder.ashr(self.builder.shl(b, constant(I32, [24 - 8 * byte] * LANES)), constant(I32, [24] * LANES))
            total = self.builder.add(total, self.builder.mul(left, right))
        return total

    def dot_pairs(self, unsigned: Any, signed: Any) -> Any:
        """<32 x i16>: sums of two products of bytes each, unsigned 0..128 and signed -127..127."""
        kind = vector(I16, BYTES // 2)
        if self.level == "avx512":
            return self.call("llvm.x86.avx512.pmaddubs.w.512", kind, unsigned, signed)
        if self.level == "avx2":
            pair = vector(I16, BYTES // 4)
            return self._by_halves(lambda a, b: self.call("llvm.x86.avx2.pmadd.ub.sw", pair, a, b), unsigned, signed)
        eight, low = constant(I16, [8] * kind.count), constant(I16, [255] * kind.count)
        a, b = (self.builder.bitcast(v, kind) for v in (unsigned, signed))
        even = self.builder.mul(self.builder.and_(a, low), self.builder.ashr(self.builder.shl(b, eight), eight))
        return self.builder.add(even, self.builder.mul(self.builder.lshr(a, eight), self.builder.ashr(b, eight)))

    def add_pairs(self, total: Any, a: Any, b: Any) -> Any:
        """<16 x i32> total + the sums of two products of i16 each."""
        if self.level == "avx512":
            words = [self.builder.bitcast(v, vector(I32, LANES)) for v in (a, b)]
            return self.call("llvm.x86.avx512.vpdpwssd.512", vector(I32, LANES), total, *words)
        return self.builder.add(total, self.join([self._words_of_pairs(*half) for half in self._halves(a, b)]))

    def add_few(self, total: Any, a: Any, b: Any) -> Any:
        """As add_pairs, of sixteen i16 each, for the first eight lanes."""
        found = self._words_of_pairs(a, b)
        both = self.join([found, constant(I32, [0] * (LANES // 2))])
        return self.builder.add(total, both)

    def _halves(self, *vectors: Any) -> list[tuple]:
        count = vectors[0].type.count // 2
        return [tuple(self.shuffle(v, range(i, i + count)) for v in vectors) for i in (0, count)]

    def _words_of_pairs(self, a: Any, b: Any) -> Any:
        """<8 x i32> of <16 x i16>."""
        if self.level != "portable":
            return self.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), a, b)
        a, b = (self.builder.bitcast(v, vector(I32, 8)) for v in (a, b))
        high = constant(I32, [16] * 8)
        low = self.builder.mul(*(self.builder.ashr(self.builder.shl(v, high), high) for v in (a, b)))
        return self.builder.add(low, self.builder.mul(*(self.builder.ashr(v, high) for v in (a, b))))

    def _dot_small(self, unsigned: Any, signed: Any) -> Any:
        pairs = self.call("llvm.x86.avx2.pmadd.ub.sw", vector(I16, 16), unsigned, signed)
        return self.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), pairs, constant(I16, [1] * 16))

    def _dot_wide(self, unsigned: Any, signed: Any) -> Any:
        """Even and odd bytes on their own: pairs of products of 255 would not fit 16 bits."""
        eight = constant(I16, [8] * 16)
        a, b = (self.builder.bitcast(v, vector(I16, 16)) for v in (unsigned, signed))
        even = (self.builder.and_(a, constant(I16, [255] * 16)), self.builder.ashr(self.builder.shl(b, eight), eight))
        odd = (self.builder.lshr(a, eight), self.builder.ashr(b, eight))
        sums = [self.call("llvm.x86.avx2.pmadd.wd", vector(I32, 8), *pair) for pair in (even, odd)]
        return self.builder.add(*sums)

    # --- floats ------------------------------------------------------------------------------------------------------

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call(f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)

    def to_float(self, integers: Any) -> Any:
        return self.builder.sitofp(integers, vector(F32, integers.type.count))

    def fold(self, value: Any, keys: Sequence[int], count: int) -> Any:
        """<count x float>: sums over the lanes whose key is 0, 1, ...; keys repeat with a power of two of lanes each."""
        order = np.argsort(np.asarray(keys), kind="stable").reshape(count, -1)
        while order.shape[1] > 1:
            half = order.shape[1] // 2
            low, high = (self.shuffle(value, part.reshape(-1)) for part in (order[:, :half], order[:, half:]))
            value = self.builder.fadd(low, high)
            order = np.arange(value.type.count).reshape(count, -1)
        return self.shuffle(value, order.reshape(-1))


def _pieces(addresses: np.ndarray, length: int) -> np.ndarray:
    """Starts of pieces of some length, not overlapping, that hold all addresses."""
    starts: list[int] = []
    for address in np.unique(addresses).tolist():
        if not starts or address >= starts[-1] + length:
            starts.append(address)
    return np.array(starts)


def runs_of_bits(bits: np.ndarray, unit: int = 8) -> list[tuple[int, int]]:
    """Cuts numbers, bit addresses [..., width], into runs (first, stop) that lie side by side in all of them, in one byte (or
    another unit of bits)."""
    width = bits.shape[-1]
    cuts = [0]
    for j in range(1, width):
        together = (bits[..., j] == bits[..., j - 1] + 1) & (bits[..., j] // unit == bits[..., j - 1] // unit)
        if not together.all():
            cuts.append(j)
    return list(zip(cuts, [*cuts[1:], width], strict=True))
