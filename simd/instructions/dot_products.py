"""Dot products of bytes and of 16-bit integers, as pieces of LLVM code, with the best instruction that the target has.

A table lists the forms of an operation with the features that each needs; the first one that the target can execute is used,
and the last one runs everywhere. All of them give the same integers: nothing saturates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..llvm import (
    I8,
    I8X64,
    I16,
    I16X32,
    I32,
    I32X16,
    bits_of,
    by_parts,
    concat,
    constant,
    shuffle,
    splat,
    split_vector,
    vector,
)
from ..target import Forms, Target, target
from . import arm, x86

_I16_MAX = 32767

# --- pairs ----------------------------------------------------------------------------------------------------------


class _Instruction(NamedTuple):
    """A function of vectors that works on registers of that many bits."""

    bits: int
    function: Callable

    def __call__(self, builder: Any, *values: Any) -> Any:
        return by_parts(builder, self.bits, self.function, *values)

    def __str__(self) -> str:
        return f"{self.function.__name__} ({self.bits} bits)"


def _portable_word_pairs(builder: Any, a: Any, b: Any) -> Any:
    """LLVM knows this form: it becomes vpmaddwd where that exists, smull on NEON."""
    wide = vector(I32, a.type.count)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = (shuffle(builder, products, None, range(first, wide.count, 2)) for first in (0, 1))
    return builder.add(even, odd)


def _portable_byte_pairs(builder: Any, unsigned: Any, signed: Any) -> Any:
    ir_type = vector(I16, unsigned.type.count // 2)
    a, b = builder.bitcast(unsigned, ir_type), builder.bitcast(signed, ir_type)
    eight = constant(ir_type, 8)
    even = builder.mul(builder.and_(a, constant(ir_type, 255)), builder.ashr(builder.shl(b, eight), eight))
    return builder.add(even, builder.mul(builder.lshr(a, eight), builder.ashr(b, eight)))


def _portable_rounded_high(builder: Any, a: Any, b: Any) -> Any:
    wide = vector(I32, a.type.count)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    return builder.trunc(builder.ashr(builder.add(products, constant(wide, 1 << 14)), constant(wide, 15)), a.type)


_WORD_PAIRS = (
    (("avx512bw",), _Instruction(512, x86.pmaddwd)),
    (("avx2",), _Instruction(256, x86.pmaddwd)),
    (("ssse3",), _Instruction(128, x86.pmaddwd)),
    ((), _portable_word_pairs),
)
_BYTE_PAIRS = (
    (("avx512bw",), _Instruction(512, x86.pmaddubsw)),
    (("avx2",), _Instruction(256, x86.pmaddubsw)),
    (("ssse3",), _Instruction(128, x86.pmaddubsw)),
    ((), _portable_byte_pairs),
)


def word_pairs(builder: Any, a: Any, b: Any, of: Target | None = None) -> Any:
    """<n x i32> of two <2n x i16>: sums of two products each."""
    return (of or target()).choose(_WORD_PAIRS)(builder, a, b)


def add_word_pairs(builder: Any, total: Any, a: Any, b: Any, of: Target | None = None) -> Any:
    """<16 x i32> total + word_pairs(a, b)."""
    of = of or target()
    if of.has_vnni:
        return x86.vpdpwssd(builder, total, a, b)
    return builder.add(total, word_pairs(builder, a, b, of))


def byte_pairs(builder: Any, unsigned: Any, signed: Any, of: Target | None = None) -> Any:
    """<n x i16> of two <2n x i8>: sums of two products of an unsigned byte, 0 to 128, and a signed one, -127 to 127."""
    return (of or target()).choose(_BYTE_PAIRS)(builder, unsigned, signed)


_ROUNDED_HIGH = (
    (("avx512bw",), _Instruction(512, x86.pmulhrsw)),
    (("avx2",), _Instruction(256, x86.pmulhrsw)),
    (("ssse3",), _Instruction(128, x86.pmulhrsw)),
    (("neon",), _Instruction(128, arm.sqrdmulh)),
    ((), _portable_rounded_high),
)


def rounded_high_products(builder: Any, a: Any, b: Any, of: Target | None = None) -> Any:
    """i16 lanes: (a * b + 2**14) >> 15; not both may be -2**15."""
    return (of or target()).choose(_ROUNDED_HIGH)(builder, a, b)


# --- fours ----------------------------------------------------------------------------------------------------------


class _Fours(NamedTuple):
    """One instruction for four products of an unsigned and a signed byte. Operands: the parts, one per register."""

    bits: int
    instruction: Callable
    bias: int = 0

    def __str__(self) -> str:
        return f"{self.instruction.__name__.strip('_')} ({self.bits} bits)"

    def unsigned(self, builder: Any, value: Any) -> Any:
        return split_vector(builder, value, bits_of(value.type) // self.bits)

    signed = unsigned

    def signed_word(self, builder: Any, word: Any) -> Any:
        return [splat(builder, word, self.bits // 32)] * (512 // self.bits)

    def add(self, builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
        parts = zip(split_vector(builder, total, len(unsigned)), unsigned, signed, strict=True)
        return concat(builder, [self.instruction(builder, *part) for part in parts])


def _usdot(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    ir_type = vector(I8, 16)
    return arm.usdot(builder, total, builder.bitcast(unsigned, ir_type), builder.bitcast(signed, ir_type))


def _smull(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """As arm.sdot, on every ARM processor; two products have to fit 16 bits."""
    return builder.add(total, arm.saddlp(builder, arm.smull_pairs(builder, a, b)))


def _sdot_sum(builder: Any, total: Any, signed: Any) -> Any:
    """total + 128 * the sums of four signed bytes."""
    half = constant(signed.type, 64)
    return arm.sdot(builder, arm.sdot(builder, total, signed, half), signed, half)


def _smull_sum(builder: Any, total: Any, signed: Any) -> Any:
    sums = arm.saddlp(builder, arm.saddlp(builder, signed))
    return builder.add(total, builder.mul(sums, constant(sums.type, 128)))


class _SignedFours(NamedTuple):
    """NEON's products of signed bytes: 128 (`bias`) is subtracted from unsigned ones that may be larger than 127."""

    instruction: Callable
    sum_of_signed: Callable
    bias: int

    def __str__(self) -> str:
        return f"{self.instruction.__name__.strip('_')} (128 bits)"

    def _bytes(self, builder: Any, value: Any) -> Any:
        return split_vector(builder, builder.bitcast(value, vector(I8, 64)), 4)

    def unsigned(self, builder: Any, value: Any) -> Any:
        parts = self._bytes(builder, value)
        return [builder.xor(part, constant(part.type, -128)) for part in parts] if self.bias else parts

    signed = _bytes

    def signed_word(self, builder: Any, word: Any) -> Any:
        return [builder.bitcast(splat(builder, word, 4), vector(I8, 16))] * 4

    def add(self, builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
        parts = zip(split_vector(builder, total, 4), unsigned, signed, strict=True)
        return concat(builder, [self.instruction(builder, *part) for part in parts])

    def add_bias(self, builder: Any, total: Any, signed: Any) -> Any:
        """total + bias * the sums of four signed bytes."""
        if not self.bias:
            return total
        parts = zip(split_vector(builder, total, 4), signed, strict=True)
        return concat(builder, [self.sum_of_signed(builder, *part) for part in parts])


class _Pairs(NamedTuple):
    """Even and odd bytes on their own, as pairs of 16-bit numbers. Operands: both as <32 x i16>."""

    of: Target
    bias: int = 0

    def __str__(self) -> str:
        pairs = self.of.choose(_WORD_PAIRS)
        return str(pairs) if isinstance(pairs, _Instruction) else "portable"

    def unsigned(self, builder: Any, value: Any) -> Any:
        value = builder.bitcast(value, I16X32)
        return builder.and_(value, constant(I16X32, 255)), builder.lshr(value, constant(I16X32, 8))

    @staticmethod
    def _signed(builder: Any, value: Any) -> Any:
        eight = constant(value.type, 8)
        return builder.ashr(builder.shl(value, eight), eight), builder.ashr(value, eight)

    def signed(self, builder: Any, value: Any) -> Any:
        return self._signed(builder, builder.bitcast(value, I16X32))

    def signed_word(self, builder: Any, word: Any) -> Any:
        pairs = self._signed(builder, builder.bitcast(word, vector(I16, 2)))
        return [builder.bitcast(splat(builder, builder.bitcast(pair, I32)), I16X32) for pair in pairs]

    def add(self, builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
        for a, b in zip(unsigned, signed, strict=True):
            total = builder.add(total, word_pairs(builder, a, b, self.of))
        return total


# Key: a target and the bias of signed products, 128, or 0 where the unsigned bytes are at most 127.
_BYTE_FOURS = (
    (("avx512f", "avx512vnni"), lambda of, bias: _Fours(512, x86.vpdpbusd)),
    (("avxvnni",), lambda of, bias: _Fours(256, x86.vpdpbusd)),
    (("neon", "i8mm"), lambda of, bias: _Fours(128, _usdot)),
    (("neon", "dotprod"), lambda of, bias: _SignedFours(arm.sdot, _sdot_sum, bias)),
    (("neon",), lambda of, bias: _SignedFours(_smull, _smull_sum, bias)),
    ((), lambda of, bias: _Pairs(of)),
)


class ByteDots:
    """Lane by lane sums of four products: the unsigned bytes of one word, 0 to `largest`, with the signed bytes of another,
    -127 to 127, added to a lane.

    Operands are prepared once for many products: unsigned(v) and signed(v) from <16 x i32> or <64 x i8>, signed_word(word) from
    four signed bytes (an i32) that go to every lane. add(total, unsigned, signed) is the sum, <16 x i32>, of the products of
    (unsigned - bias) with signed: `bias` is 128 where the instruction takes signed bytes only, else 0, and the caller adds
    bias times the sum of the signed bytes once.
    """

    def __init__(self, builder: Any, of: Target | None = None, largest: int = 255):
        self.builder, of = builder, of or target()
        self._form = of.choose(_BYTE_FOURS)(of, 128 if largest > 127 else 0)
        self.bias: int = self._form.bias

    def unsigned(self, value: Any) -> Any:
        return self._form.unsigned(self.builder, value)

    def signed(self, value: Any) -> Any:
        return self._form.signed(self.builder, value)

    def signed_word(self, word: Any) -> Any:
        return self._form.signed_word(self.builder, word)

    def add(self, total: Any, unsigned: Any, signed: Any) -> Any:
        return self._form.add(self.builder, total, unsigned, signed)

    def add_bias(self, total: Any, signed: Any) -> Any:
        """total + bias times the sums of four signed bytes."""
        return self._form.add_bias(self.builder, total, signed) if isinstance(self._form, _SignedFours) else total


def byte_dots_bias(of: Target | None = None) -> int:
    """The bias of ByteDots for unsigned bytes up to 255."""
    of = of or target()
    return of.choose(_BYTE_FOURS)(of, 128).bias


def pairs_that_fit(most: int, of: Target | None = None) -> int | None:
    """How many sums of two products of bytes, unsigned ones up to `most` and signed ones of -127 to 127, fit 16 bits together;
    0 if the target has no instruction for them.

    None where `ByteDots` is the best form: the target has an instruction for four products.
    """
    of = of or target()
    if not isinstance(of.choose(_BYTE_FOURS)(of, 0), _Pairs):
        return None
    return _I16_MAX // (2 * 127 * most) if of.has("ssse3") else 0


class PairDots:
    """As ByteDots, for x86 processors without an instruction for four products: vpmaddubsw adds two as 16-bit numbers.

    run: number of these sums that are added before they are widened, see `pairs_that_fit`.
    """

    def __init__(self, builder: Any, run: int, of: Target | None = None):
        self.builder, self.of, self.run = builder, of or target(), run

    def unsigned(self, value: Any) -> Any:
        return self.builder.bitcast(value, I8X64)

    def signed_word(self, word: Any) -> Any:
        return self.builder.bitcast(splat(self.builder, word), I8X64)

    def add_pairs(self, sums: Any, unsigned: Any, signed: Any) -> Any:
        """<32 x i16> sums (None: nothing yet) + sums of two products each; at most `run` of them may be added up."""
        pairs = byte_pairs(self.builder, unsigned, signed, self.of)
        return pairs if sums is None else self.builder.add(sums, pairs)

    def widen(self, total: Any, sums: Any) -> Any:
        """<16 x i32> total + the sums of two neighbours of `add_pairs`' sums."""
        return self.builder.add(total, word_pairs(self.builder, sums, constant(I16X32, 1), self.of))


def byte_dots_instruction(of: Target) -> str:
    """The name of the instruction that ByteDots uses: "vpdpbusd (512 bits)"."""
    return str(of.choose(_BYTE_FOURS)(of, 128))


def add_byte_dots(builder: Any, total: Any, unsigned: Any, signed: Any, largest: int, of: Target | None = None) -> Any:
    """<16 x i32> total + the sums of four products of <64 x i8> each: unsigned 0 to `largest`, signed -127 to 127."""
    of = of or target()
    # Up to 128, sums of two products fit 16 bits.
    if largest <= 128 and of.has("ssse3") and not of.has_vnni and not of.has_avx_vnni:
        pairs = byte_pairs(builder, unsigned, signed, of)
        return builder.add(total, word_pairs(builder, pairs, constant(I16X32, 1), of))
    dots = ByteDots(builder, of, largest)
    unsigned, signed = dots.unsigned(unsigned), dots.signed(signed)
    return dots.add(dots.add_bias(total, signed), unsigned, signed)


def _negated_where_negative(builder: Any, value: Any, signs: Any) -> Any:
    is_negative = builder.icmp_signed("<", signs, constant(signs.type, 0))
    return builder.select(is_negative, builder.neg(value), value)


_SIGNS = (
    (("avx512bw",), _negated_where_negative),
    (("avx2",), _Instruction(256, x86.psignb)),
    ((), _Instruction(128, x86.psignb)),
)


def apply_signs(builder: Any, value: Any, signs: Any, of: Target | None = None) -> Any:
    """Byte lanes: value, -127 to 127, negated where signs, which are not 0, are below 0; for x86 with SSSE3."""
    return (of or target()).choose(_SIGNS)(builder, value, signs)


def signed_byte_pairs(builder: Any, a: Any, b: Any, of: Target | None = None) -> Any:
    """<n x i16> of two <2n x i8>: sums of two products of a, -128 to 127, and b, -127 to 127; for x86 with SSSE3."""
    of = of or target()
    return byte_pairs(builder, _negated_where_negative(builder, a, a), of.choose(_SIGNS)(builder, b, a), of)


def _signed_pairs(builder: Any, total: Any, a: Any, b: Any, of: Target) -> Any:
    return builder.add(total, word_pairs(builder, signed_byte_pairs(builder, a, b, of), constant(I16X32, 1), of))


def _signed_quarters(builder: Any, total: Any, a: Any, b: Any, of: Target) -> Any:
    parts = zip(*(split_vector(builder, value, 4) for value in (total, a, b)), strict=True)
    instruction = arm.sdot if of.has("dotprod") else _smull
    return concat(builder, [instruction(builder, *part) for part in parts])


# None: the target has one instruction for unsigned bytes with signed ones, and not for signed ones, or none for bytes.
_SIGNED_FOURS: Forms[Callable | None] = (
    (("avx512f", "avx512vnni"), None),
    (("avxvnni",), None),
    (("ssse3",), _signed_pairs),
    (("neon",), _signed_quarters),
    ((), None),
)


def multiplies_signed(of: Target) -> bool:
    """Whether products of signed bytes take fewer instructions than those of unsigned bytes beyond 128 with signed ones."""
    return of.choose(_SIGNED_FOURS) is not None


def add_signed_byte_dots(builder: Any, total: Any, a: Any, b: Any, of: Target | None = None) -> Any:
    """<16 x i32> total + the sums of four products of <64 x i8> each: a -128 to 127, b -127 to 127; for targets that
    `multiplies_signed`."""
    of = of or target()
    form = of.choose(_SIGNED_FOURS)
    assert form is not None
    return form(builder, total, a, b, of)


def _dots_with_ones(builder: Any, total: Any, value: Any, of: Target) -> Any:
    return add_byte_dots(builder, total, value, constant(I8, [1] * 64), 63, of)


def _addp_twice(builder: Any, total: Any, value: Any, of: Target) -> Any:
    a, b, c, d = split_vector(builder, value, 4)
    sums = builder.zext(arm.addp(builder, arm.addp(builder, a, b), arm.addp(builder, c, d)), I32X16)
    return builder.add(total, sums)


_BYTE_SUMS = ((("neon",), _addp_twice), ((), _dots_with_ones))


def add_byte_sums(builder: Any, total: Any, value: Any, of: Target | None = None) -> Any:
    """<16 x i32> total + the sums of four bytes of <64 x i8>, 0 to 63 each."""
    of = of or target()
    return of.choose(_BYTE_SUMS)(builder, total, value, of)


def byte_sums(builder: Any, value: Any, of: Target | None = None) -> Any:
    """<16 x i32> of <64 x i8>: sums of four bytes, 0 to 63 each."""
    return add_byte_sums(builder, constant(I32X16, 0), value, of)
