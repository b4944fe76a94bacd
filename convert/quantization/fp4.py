"""Weights of four-bit floats (E2M1), two to a byte with the lower four bits first, and a scale per run of columns.

NVFP4: runs of 16, scales fp8 e4m3, and one float32 for the whole: a factor (`weight_scale_2`, modelopt) or a divisor
(`weight_global_scale`, compressed-tensors). MXFP4 as compressed-tensors packs it: runs of 32, scales e8m0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...formats import FormatError
from ...formats.floats import e8m0_to_f32
from ...formats.safetensors import StoredTensor
from ...simd.compile import kernel
from .integer_weights import DecodedWeight, as_float
from .stored_weights import Found, beside


@kernel
def _value(code, scale):
    """E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and the same below zero, times scale."""
    size = np.uint32(code & np.uint32(7))
    bits = np.uint32((size + np.uint32(252)) << np.uint32(22))  # exponent (2 bits, bias 1) and the one bit behind it
    bits = bits if size >= np.uint32(2) else np.uint32(size * np.uint32(0x3F000000))
    sign = np.uint32(np.uint32(code & np.uint32(8)) << np.uint32(28))
    return np.uint32(bits | sign).view(np.float32) * scale


@kernel
def _widen(codes, scale, per, out):
    """codes uint8 [rows, columns / 2], scale float32 [rows, columns / per] -> out float32 [rows, columns]."""
    half = per // 2
    for r in range(codes.shape[0]):
        for g in range(scale.shape[1]):
            s, part, to = scale[r, g], codes[r, g * half : (g + 1) * half], out[r, g * per : (g + 1) * per]
            for i in range(half):
                to[2 * i] = _value(np.uint32(part[i]) & np.uint32(15), s)
                to[2 * i + 1] = _value(np.uint32(part[i]) >> np.uint32(4), s)


class Fp4Weight(DecodedWeight):
    """A matrix, or a stack of matrices."""

    __slots__ = ("_divides", "_global", "_per", "_scales")

    def __init__(self, codes: StoredTensor, scales: StoredTensor, whole: StoredTensor | None, divides: bool):
        """whole: the one factor (or divisor, if `divides`) beside the scales. Raises FormatError if they do not fit."""
        kind, self._per = ("nvfp4", 16) if scales.dtype == "F8_E4M3" else ("mxfp4", 32)
        shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if len(codes.shape) > 1 else (0, 0)
        runs = (*shape[:-1], shape[-1] // self._per)
        is_known = codes.dtype == "U8" and scales.dtype in ("F8_E4M3", "F8_E8M0", "U8") and shape[-1] % self._per == 0
        if not is_known or scales.shape != runs:
            raise FormatError(
                f"{codes.path}: {codes.name} is {codes.dtype} {list(codes.shape)} with scales {scales.dtype}"
                f" {list(scales.shape)}; U8 [rows, columns / 2] with F8_E4M3 [rows, columns / 16] (NVFP4)"
                " or e8m0 [rows, columns / 32] (MXFP4) is known"
            )
        if (whole is not None) != (kind == "nvfp4"):
            raise FormatError(f"{codes.path}: {codes.name} lacks NVFP4's global scale, or has one as MXFP4")
        if whole is not None and (whole.dtype != "F32" or np.prod(whole.shape, dtype=np.int64) != 1):
            raise FormatError(f"{whole.path}: {whole.name} is {whole.dtype} {list(whole.shape)}; one F32 is needed")
        super().__init__(codes, shape, kind)
        self._scales, self._global, self._divides = scales, whole, divides

    def run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns]; exact but for the product of a value with its scales."""
        scales = self._scales.data.reshape(self.rows, -1)[start:stop]
        if self._global is None:
            scale = e8m0_to_f32(scales)
        else:
            one = np.float32(self._global.data.reshape(()))
            scale = as_float(scales, self._scales.dtype)
            scale = scale / one if self._divides else scale * one
        codes = self._flat.rows(start, stop)
        out = np.empty((stop - start, self.columns), np.float32)
        _widen(codes, scale, self._per, out)
        return out


def modelopt(name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Found | None:
    """NAME, NAME_scale and NAME_scale_2 as modelopt writes NVFP4."""
    if name not in stored or stored[name].dtype != "U8":
        return None
    parts = beside(name, stored, ("weight", "weight_scale", "weight_scale_2"))
    if parts is None:
        return None
    return Fp4Weight(parts["weight"], parts["weight_scale"], parts["weight_scale_2"], False), list(parts.values())
