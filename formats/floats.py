"""Float formats of files to and from float32: f16, bf16, and e8m0 block scales."""

from __future__ import annotations

import numpy as np

from ..simd.compile import kernel

_E8M0_VALUES = np.where(np.arange(256) == 255, np.nan, 2.0 ** (np.arange(256.0) - 127)).astype(np.float32)


def flat(array: np.ndarray, dtype: type) -> np.ndarray:
    """The array's elements as a 1-D, contiguous, aligned, read-only array: a kernel is then compiled for one signature."""
    flags = array.flags
    if array.dtype != dtype or not (flags.c_contiguous and flags.aligned):  # `require` alone takes as long as a short row
        array = np.require(array, dtype, ["C", "A"])
    elements = array.reshape(-1).view()
    elements.flags.writeable = False
    return elements


@kernel
def _widen_bf16(words, out):
    for i in range(words.size):
        out[i] = np.uint32(words[i]) << np.uint32(16)


def bf16_to_f32(words: np.ndarray) -> np.ndarray:
    """uint16 words of any shape -> float32 of that shape, exact."""
    out = np.empty(words.size, np.uint32)
    _widen_bf16(flat(words, np.uint16), out)
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
    _widen_f16(flat(halves.view(np.uint16), np.uint16), out)
    return out.view(np.float32).reshape(halves.shape)


@kernel
def narrow_bf16(bits, out):
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
    narrow_bf16(flat(x, np.float32).view(np.uint32), out)
    return out.reshape(x.shape)


def e8m0_to_f32(codes: np.ndarray) -> np.ndarray:
    """uint8 exponents of any shape -> float32 powers of two (OCP microscaling formats: 127 is 1.0, 255 is NaN)."""
    return _E8M0_VALUES[codes]


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
