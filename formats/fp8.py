"""Eight-bit floats (e4m3, e5m2) to float32 and bf16, with scales."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np

from ..simd.compile import import_kernels
from .floats import flat


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


def fp8_to_f32(codes: np.ndarray, dtype: str, scale: np.ndarray, block_columns: int) -> np.ndarray:
    """Rows of an fp8 matrix -> float32 [rows, columns]: the value of each code times the scale of its block.

    codes: uint8 [rows, columns]; dtype: 'f8_e4m3' or 'f8_e5m2'; scale: float32 [rows, ceil(columns / block_columns)], for each
    row the scales of its blocks of block_columns elements (the last block may be shorter).
    """
    out = np.empty(codes.shape, np.float32)
    _kernels().scale_fp8(*_fp8_of(codes, dtype, scale), block_columns, out)
    return out


def _fp8_of(codes: np.ndarray, dtype: str, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool, np.ndarray]:
    """The first arguments of kernels."""
    words = flat(codes, np.uint8).reshape(codes.shape)
    return words, FP8_VALUES[dtype], dtype == "f8_e4m3", np.ascontiguousarray(scale, np.float32)


def fp8_to_bf16(codes: np.ndarray, dtype: str, scale: np.ndarray, block_columns: int) -> np.ndarray:
    """`f32_to_bf16(fp8_to_f32(...))` in one pass, bit for bit the same -> uint16 words [rows, columns]."""
    out, row = np.empty(codes.shape, np.uint16), np.empty((1, codes.shape[1]), np.float32)
    _kernels().narrow_fp8(*_fp8_of(codes, dtype, scale), block_columns, row, row[0].view(np.uint32), out)
    return out


@cache
def _kernels() -> ModuleType:
    return import_kernels(".fp8_rows", __package__)  # numba with it, which a program that only reads headers does without
