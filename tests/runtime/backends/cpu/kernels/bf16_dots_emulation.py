"""Dot products of bf16 and roundings to it (AVX512-BF16) as LLVM code for any processor, which is said to have them. As with
amx_emulation: to be imported before kernels are, and kernels compiled with it must not be kept with others (GGUFMILL_CACHE)."""

from ggufmill.simd.instructions import x86
from ggufmill.simd.llvm import I16, I32, concat, constant, vector
from ggufmill.simd.target import Target


def vdpbf16ps(builder, total, a, b):
    words = vector(I32, total.type.count)
    for of_pair in (lambda x: builder.shl(x, constant(words, 16)), lambda x: builder.and_(x, constant(words, -0x10000))):
        x, y = (builder.bitcast(of_pair(numbers), total.type) for numbers in (a, b))
        total = builder.fadd(total, builder.fmul(x, y))
    return total


def cvtne2ps2bf16(builder, high, low):
    from ggufmill.runtime.backends.cpu.kernels.gemm.float_panels import nearest_bf16

    halves = [builder.lshr(nearest_bf16(builder, x), constant(vector(I32, x.type.count), 16)) for x in (low, high)]
    shorts = concat(builder, [builder.trunc(half, vector(I16, half.type.count)) for half in halves])
    return builder.bitcast(shorts, vector(I32, low.type.count))


x86.vdpbf16ps, x86.cvtne2ps2bf16 = vdpbf16ps, cvtne2ps2bf16
Target.has_bf16_dots = property(lambda target: True)
