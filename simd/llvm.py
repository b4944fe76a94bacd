"""Processor instructions for products, as pieces of LLVM code: chosen by what numba compiles for, with portable equivalents.

Every piece works on vectors of sixteen 32-bit lanes, which LLVM maps to one, two or four registers. The integer pieces give the
same numbers everywhere.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.core import config
from numba.core.cgutils import get_or_insert_function
from numba.core.codegen import get_host_cpu_features

LANES = 16
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
I32X16, F32X16 = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)


@cache
def features() -> frozenset[str]:
    """What the code that numba generates may use, as LLVM spells it: 'avx2', 'avx512vnni', 'amx-bf16'."""
    asked: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    listed = (get_host_cpu_features() if asked is None else asked).split(",")
    return frozenset(name[1:] for name in listed if name.startswith("+"))


def registers() -> int:
    """How many values of sixteen 32-bit lanes the processor's registers hold (AVX-512: 32, AVX2: 8)."""
    return 32 if "avx512f" in features() else 8 if "avx2" in features() else 4


def pointer(builder, address, kind):
    """An address (i64) as a pointer to the IR type."""
    return builder.inttoptr(address, kind.as_pointer())


def load(builder, address, kind, offset=0):
    """A value of the IR type from address + offset bytes (offset: a number or an i64), not aligned."""
    if not isinstance(offset, int) or offset:
        address = builder.add(address, I64(offset) if isinstance(offset, int) else offset)
    return builder.load(pointer(builder, address, kind), align=1)


def store(builder, value, address, offset=0):
    """Writes a value to address + offset bytes, not aligned."""
    if not isinstance(offset, int) or offset:
        address = builder.add(address, I64(offset) if isinstance(offset, int) else offset)
    builder.store(value, pointer(builder, address, value.type), align=1)


def shuffle(builder, a, b, places):
    """Lanes of a and b, laid end to end, by number. b None: of a alone."""
    mask = ir.Constant(ir.VectorType(I32, len(places)), [int(place) for place in places])
    return builder.shuffle_vector(a, ir.Constant(a.type, ir.Undefined) if b is None else b, mask)


def concat(builder, parts):
    """Vectors of one type laid end to end; their number is a power of two."""
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        parts = [shuffle(builder, a, b, range(count)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def splat(builder, value, count=LANES):
    """A scalar in every lane."""
    vector = ir.VectorType(value.type, count)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return shuffle(builder, first, None, [0] * count)


def constant(kind, value):
    """The constant of a vector type with `value` in every lane."""
    return ir.Constant(kind, [value] * kind.count)


def call(builder, name, result, *args):
    function = get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def fma(builder, a, b, c):
    return call(builder, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)


def loop(builder, count, body):
    """A loop: body(i) for i (i64) from 0 to count - 1."""
    before, inside, after = builder.block, builder.append_basic_block("body"), builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed(">", count, I64(0)), inside, after)
    builder.position_at_end(inside)
    i = builder.phi(I64)
    i.add_incoming(I64(0), before)
    body(i)
    following = builder.add(i, I64(1))
    i.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)


# --- products of bytes ----------------------------------------------------------------------------------------------


def _halves(builder, value):
    count = value.type.count // 2
    return shuffle(builder, value, None, range(count)), shuffle(builder, value, None, range(count, 2 * count))


class ByteDots:
    """Lane by lane sums of four products: the unsigned bytes of one word with the signed bytes of another, added to a lane.

    weights(w) prepares a vector of words once for many products; activations(word) puts four signed bytes (an i32) in every
    lane; add(total, weights, activations) is the sum, <16 x i32>. None of it saturates. has: features to use instead of
    this processor's.
    """

    def __init__(self, builder, has: frozenset[str] | None = None):
        self.builder, self.has = builder, features() if has is None else has
        has = self.has
        self.width = 16 if "avx512vnni" in has and "avx512f" in has else 8 if "avxvnni" in has else 0

    def weights(self, words):
        if self.width == 16:
            return words
        if self.width == 8:
            return _halves(self.builder, words)
        b = self.builder
        low = constant(I32X16, 0x00FF00FF)
        return b.and_(words, low), b.and_(b.lshr(words, constant(I32X16, 8)), low)

    def activations(self, word):
        b = self.builder
        if self.width:
            return splat(b, word, self.width)
        # The even and the odd bytes as pairs of 16 bits, signs extended.
        pairs = ir.VectorType(I16, 2)
        halves = b.bitcast(word, pairs)
        eight = ir.Constant(pairs, [8, 8])
        even = b.bitcast(b.ashr(b.shl(halves, eight), eight), I32)
        odd = b.bitcast(b.ashr(halves, eight), I32)
        return splat(b, even), splat(b, odd)

    def add(self, total, weights, activations):
        b = self.builder
        if self.width == 16:
            return call(b, "llvm.x86.avx512.vpdpbusd.512", I32X16, total, weights, activations)
        if self.width == 8:
            parts = [
                call(b, "llvm.x86.avx512.vpdpbusd.256", t.type, t, w, activations)
                for t, w in zip(_halves(b, total), weights, strict=True)
            ]
            return concat(b, parts)
        for w, a in zip(weights, activations, strict=True):
            total = b.add(total, self._pairs(w, a))
        return total

    def _pairs(self, w, a):
        """Sums of two products of 16-bit numbers each."""
        b = self.builder
        short, has = ir.VectorType(I16, 2 * LANES), self.has
        if "avx512bw" in has:
            return call(b, "llvm.x86.avx512.pmaddw.d.512", I32X16, b.bitcast(w, short), b.bitcast(a, short))
        if "avx2" in has:
            half = ir.VectorType(I16, LANES)
            parts = [
                call(b, "llvm.x86.avx2.pmadd.wd", x.type, b.bitcast(x, half), b.bitcast(y, half))
                for x, y in zip(_halves(b, w), _halves(b, a), strict=True)
            ]
            return concat(b, parts)
        sixteen = constant(I32X16, 16)
        low = b.mul(b.ashr(b.shl(w, sixteen), sixteen), b.ashr(b.shl(a, sixteen), sixteen))
        return b.add(low, b.mul(b.ashr(w, sixteen), b.ashr(a, sixteen)))
