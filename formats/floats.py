"""Float formats of files to and from float32: f16, bf16, fp8 (e4m3, e5m2) with per-block scales."""

from __future__ import annotations

import numpy as np

from .kernels import kernel


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


@kernel
def _widen_bf16(words, out):
    for i in range(words.size):
        out[i] = np.uint32(words[i]) << np.uint32(16)


def bf16_to_f32(words: np.ndarray) -> np.ndarray:
    """uint16 words of any shape -> float32 of that shape, exact."""
    flat = np.ascontiguousarray(words).reshape(-1)
    out = np.empty(flat.size, np.uint32)
    _widen_bf16(flat, out)
    return out.view(np.float32).reshape(words.shape)


@kernel
def _narrow_bf16(bits, out):
    for i in range(bits.size):
        b = bits[i]
        if b & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):  # NaN: keep the sign and payload, make it quiet
            out[i] = np.uint16((b >> np.uint32(16)) | np.uint32(64))
        else:
            out[i] = np.uint16((b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 of any shape -> uint16 words, rounded to nearest, ties to even."""
    flat = np.ascontiguousarray(x, np.float32).reshape(-1)
    out = np.empty(flat.size, np.uint16)
    _narrow_bf16(flat.view(np.uint32), out)
    return out.reshape(x.shape)


@kernel
def _scale_fp8(codes, table, scale, first_row, block_rows, block_columns, out):
    rows, columns = codes.shape
    for r in range(rows):
        scales = scale[(first_row + r) // block_rows]
        for b in range(scales.size):
            s = scales[b]
            for c in range(b * block_columns, min(columns, (b + 1) * block_columns)):
                out[r, c] = table[codes[r, c]] * s


def fp8_to_f32(codes: np.ndarray, kind: str, scale: np.ndarray, first_row: int, block: tuple[int, int]) -> np.ndarray:
    """Rows of an fp8 matrix -> float32 [rows, columns].

    codes: uint8 [rows, columns], rows first_row ... of the whole matrix; kind: 'f8_e4m3' or 'f8_e5m2'; scale: float32
    [ceil(all rows / block[0]), ceil(columns / block[1])], the factor of each block (DeepSeek's weight_scale_inv).
    """
    out = np.empty(codes.shape, np.float32)
    _scale_fp8(np.ascontiguousarray(codes), FP8_VALUES[kind], scale, first_row, block[0], block[1], out)
    return out
