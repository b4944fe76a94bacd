"""Conversion of half precision: every float16, and float32 around every float16, with and without an instruction for it."""

import numba
import numpy as np
import pytest

from ggufmill.simd.compile import intrinsic
from ggufmill.simd.instructions.half_precision import float_to_half, half_to_float
from ggufmill.simd.llvm import F32X16, I16, I64, LANES, load, loop, store, vector
from ggufmill.simd.target import target, target_at

levels = pytest.mark.parametrize("level", sorted({"portable", target().levels[-1]}))
HALVES = np.arange(1 << 16, dtype=np.uint16)


def convert(level, to_half, given, result):
    """Fills `result` with the conversion of all of `given`, sixteen at a time."""
    of = target_at(level)

    @intrinsic
    def convert_all(typingctx, source, out, count):
        def code(context, builder, signature, args):
            def sixteen(i):
                at, bits = builder.mul(i, I64(4 * LANES)), builder.mul(i, I64(2 * LANES))
                if to_half:
                    store(builder, float_to_half(builder, load(builder, args[0], F32X16, at), of), args[1], bits)
                else:
                    store(builder, half_to_float(builder, load(builder, args[0], vector(I16, LANES), bits), of), args[1], at)

            loop(builder, args[2], sixteen)
            return context.get_dummy_value()

        return numba.types.void(*[numba.types.int64] * 3), code

    @numba.njit  # not cached: its code differs from level to level
    def call(source, out, count):
        convert_all(source, out, count)

    assert given.size == result.size == given.size // LANES * LANES
    call(given.ctypes.data, result.ctypes.data, given.size // LANES)
    return result


@levels
def test_every_half_becomes_its_float(level):
    expected = HALVES.view(np.float16).astype(np.float32)
    out = convert(level, False, HALVES, np.zeros(1 << 16, np.float32))
    number = ~np.isnan(expected)
    assert np.array_equal(out.view(np.uint32)[number], expected.view(np.uint32)[number])
    assert np.isnan(out[~number]).all()


def test_all_forms_treat_nan_alike():
    bits = [convert(level, False, HALVES, np.zeros(1 << 16, np.float32)).view(np.uint32) for level in target().levels]
    assert all(np.array_equal(bits[0], other) for other in bits)
    nan = np.random.default_rng(0).integers(0x7F800001, 0x80000000, 1 << 12).astype(np.uint32).view(np.float32)
    halves = [convert(level, True, nan, np.zeros(1 << 12, np.uint16)) for level in target().levels]
    assert all(np.array_equal(halves[0], other) for other in halves)


@levels
def test_floats_are_rounded_to_the_nearest_half(level):
    """Every float16, the ties between two of them, and the float32 next to either."""
    finite = HALVES.view(np.float16)[np.isfinite(HALVES.view(np.float16))].astype(np.float32)
    with np.errstate(over="ignore"):
        ties = (finite + np.nextafter(finite.astype(np.float16), np.float16(np.inf)).astype(np.float32)) / 2
    values = np.concatenate(
        [finite, ties, np.array([np.inf, -np.inf, 3e38, -3e38, 1e-45, -1e-45, 65520, 65519.996], np.float32)]
    )
    values = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(-np.inf))])
    values = np.resize(values[~np.isnan(values)], -(-len(values) // LANES) * LANES)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    out = convert(level, True, values, np.zeros(len(values), np.uint16))
    assert np.array_equal(out, expected.view(np.uint16))
