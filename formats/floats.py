"""Float formats of files to and from float32: f16, bf16, fp8 (e4m3, e5m2), and e8m0 block scales."""

from __future__ import annotations

import numpy as np

from ..simd.compile import kernel
from ..simd.instructions.e4m3 import load_e4m3
from ..simd.lanes import LANES, splat, store


def _fp8_table(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Value of each of the 256 codes, float32 [256] (OCP 8-bit floating point: e4m3 has no infinity, e5m2 does)."""
    codes = np.arange(256)
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent.astype(float) - bias))
    if exponent_bits == 5:
        value = np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), value)
    else:
        value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
    return (sign * value).astype(np.float32)


FP8_VALUES = {"f8_e4m3": _fp8_table(4, 3, 7), "f8_e5m2": _fp8_table(5, 2, 15)}
_E8M0_VALUES = np.where(np.arange(256) == 255, np.nan, 2.0 ** (np.arange(256.0) - 127)).astype(np.float32)


def _flat(array: np.ndarray, dtype: type) -> np.ndarray:
    """The array's elements as a 1-D, contiguous, aligned, read-only array: a kernel is then compiled for one signature."""
    flat = np.require(array, dtype, ["C", "A"]).reshape(-1).view()
    flat.flags.writeable = False
    return flat


@kernel
def _widen_bf16(words, out):
    for i in range(words.size):
        out[i] = np.uint32(words[i]) << np.uint32(16)


def bf16_to_f32(words: np.ndarray) -> np.ndarray:
    """uint16 words of any shape -> float32 of that shape, exact."""
    out = np.empty(words.size, np.uint32)
    _widen_bf16(_flat(words, np.uint16), out)
    return out.view(np.float32).reshape(words.shape)


@kernel
def _widen_f16(words, out):
    for i in range(words.size):
        word = np.uint32(words[i])
        code = np.uint32(word & np.uint32(0x7FFF))
        bits = np.uint32(np.uint32(code << np.uint32(13)) + np.uint32(112 << 23))  # exponent bias: 15 becomes 127
        # A subnormal as integer times 2^-24: multiplying float32 subnormals instead would cost 100 times as much.
        subnormal = np.float32(np.float32(np.int32(code)) * np.float32(2.0**-24)).view(np.uint32)
        bits = bits if code >= np.uint32(0x400) else subnormal
        bits = bits if code < np.uint32(0x7C00) else np.uint32(bits + np.uint32(112 << 23))  # infinity and NaN
        out[i] = np.uint32(bits | np.uint32(np.uint32(word & np.uint32(0x8000)) << np.uint32(16)))


def f16_to_f32(halves: np.ndarray) -> np.ndarray:
    """float16, or its words as uint16, of any shape -> float32 of that shape, exact (several times as fast as numpy's cast)."""
    out = np.empty(halves.size, np.uint32)
    _widen_f16(_flat(halves.view(np.uint16), np.uint16), out)
    return out.view(np.float32).reshape(halves.shape)


@kernel
def _narrow_bf16(bits, out):
    for i in range(bits.size):
        b = bits[i]
        high = np.uint32(b >> np.uint32(16))
        rounded = np.uint32(np.uint32(b + np.uint32(0x7FFF)) + np.uint32(high & np.uint32(1))) >> np.uint32(16)
        is_nan = np.uint32(b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        quiet = np.uint32(high | np.uint32(64))  # quiet NaN with the same sign and payload
        out[i] = np.uint16(quiet if is_nan else rounded)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 of any shape -> uint16 words, rounded to nearest, ties to even."""
    out = np.empty(x.size, np.uint16)
    _narrow_bf16(_flat(x, np.float32).view(np.uint32), out)
    return out.reshape(x.shape)


def e8m0_to_f32(codes: np.ndarray) -> np.ndarray:
    """uint8 exponents of any shape -> float32 powers of two (OCP microscaling formats: 127 is 1.0, 255 is NaN)."""
    return _E8M0_VALUES[codes]


@kernel
def _scale_fp8(codes, table, is_e4m3, scale, block_columns, out):
    for r in range(codes.shape[0]):
        for b in range(scale.shape[1]):
            s = scale[r, b]
            # Slices instead of indices: without numba's checks for negative indices the loop is twice as fast.
            source = codes[r, b * block_columns : (b + 1) * block_columns]
            target = out[r, b * block_columns : (b + 1) * block_columns]
            by_lanes = source.size // LANES * LANES if is_e4m3 else 0
            factor = splat(s)
            for c in range(0, by_lanes, LANES):
                store(target, c, load_e4m3(source, c) * factor)
            for c in range(by_lanes, source.size):
                target[c] = table[source[c]] * s


def fp8_to_f32(codes: np.ndarray, dtype: str, scale: np.ndarray, block_columns: int) -> np.ndarray:
    """Rows of an fp8 matrix -> float32 [rows, columns]: the value of each code times the scale of its block.

    codes: uint8 [rows, columns]; dtype: 'f8_e4m3' or 'f8_e5m2'; scale: float32 [rows, ceil(columns / block_columns)], for each
    row the scales of its blocks of block_columns elements (the last block may be shorter).
    """
    out = np.empty(codes.shape, np.float32)
    _scale_fp8(*_fp8_of(codes, dtype, scale), block_columns, out)
    return out


def _fp8_of(codes: np.ndarray, dtype: str, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool, np.ndarray]:
    """The first arguments of kernels."""
    flat = _flat(codes, np.uint8).reshape(codes.shape)
    return flat, FP8_VALUES[dtype], dtype == "f8_e4m3", np.ascontiguousarray(scale, np.float32)


@kernel
def _narrow_fp8(codes, table, is_e4m3, scale, block_columns, row, row_bits, out):
    """row: float32 [1, columns], and its bits: a row at a time stays in a core's nearest cache."""
    for r in range(codes.shape[0]):
        _scale_fp8(codes[r : r + 1], table, is_e4m3, scale[r : r + 1], block_columns, row)
        _narrow_bf16(row_bits, out[r])


def fp8_to_bf16(codes: np.ndarray, dtype: str, scale: np.ndarray, block_columns: int) -> np.ndarray:
    """`f32_to_bf16(fp8_to_f32(...))` in one pass, bit for bit the same -> uint16 words [rows, columns]."""
    out, row = np.empty(codes.shape, np.uint16), np.empty((1, codes.shape[1]), np.float32)
    _narrow_fp8(*_fp8_of(codes, dtype, scale), block_columns, row, row[0].view(np.uint32), out)
    return out


# float type -> (dtype of the stored words, mask of all bits but the sign, the bits of infinity); magnitudes from those bits on
# are infinity and NaN
_INFINITY = {
    "f32": (np.uint32, np.uint32(0x7FFFFFFF), 0x7F800000),
    "f16": (np.uint16, np.uint16(0x7FFF), 0x7C00),
    "bf16": (np.uint16, np.uint16(0x7FFF), 0x7F80),
}


@kernel
def _largest_magnitude(words, magnitude):
    largest = np.uint32(0)
    for i in range(words.size):
        largest = max(largest, np.uint32(words[i] & magnitude))  # 32 bits wide, or LLVM does not vectorise it
    return largest


def all_finite(stored: np.ndarray, dtype: str) -> bool:
    """Whether none of the numbers stored in these C-contiguous bytes is NaN or infinite. dtype: 'f32', 'f16' or 'bf16'."""
    word, magnitude, infinity = _INFINITY[dtype]
    words = stored.reshape(-1).view(word)
    return not words.size or _largest_magnitude(words, magnitude) < infinity
