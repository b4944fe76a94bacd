"""compressed-tensors: packed integers, int8 and four-bit floats, each module as its own tensors say.

Its config_groups give a scheme to modules by name or pattern, but the tensors beside a weight tell the same: `weight_packed`
of int32 (integers of 1 to 8 bits, -2^(bits-1) stored as 0) or of uint8 (see fp4.py), or a `weight` of int8. So groups of
several kinds and lists of ignored modules need no looking up.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from ...formats import FormatError
from ...formats.safetensors import StoredTensor
from .fp4 import Fp4Weight
from .integer_weights import SCALES, DecodedWeight, as_float, scale_by_index, share, unpacked, widen_codes
from .stored_weights import Found, beside


class IntegerWeight(DecodedWeight):
    """Packed codes or int8. scales [rows, groups], [rows], or one; zero points alike, or packed down the rows."""

    __slots__ = ("_bits", "_codes", "_groups", "_index", "_per", "_scales", "_zeros")

    def __init__(
        self,
        shape: tuple[int, ...],
        codes: StoredTensor,
        scales: StoredTensor,
        zeros: StoredTensor | None = None,
        index: StoredTensor | None = None,
    ):
        """shape: that the weight has to have. Raises FormatError if the tensors do not fit it."""
        columns, rows = (shape[-1], prod(shape[:-1])) if shape else (0, 0)
        where = f"{codes.path}: {codes.name} is {codes.dtype} {list(codes.shape)}"
        self._bits = 8
        if codes.dtype == "I32":
            fits = [b for b in (4, 8, 2, 3, 5, 6, 7, 1) if codes.shape == (*shape[:-1], -(-columns * b // 32))]
            if not fits:
                raise FormatError(f"{where}; a weight of {list(shape)} has [.., columns * bits / 32] with 1 to 8 bits")
            self._bits = fits[0]
        elif codes.dtype != "I8" or codes.shape != shape:
            raise FormatError(f"{where}; I8 {list(shape)} or packed I32 is needed")
        if scales.dtype not in SCALES:
            raise FormatError(f"{scales.path}: {scales.name} is {scales.dtype}; scales can be {', '.join(SCALES)}")
        self._groups = self._grid(scales, shape)
        self._per = share(self._groups, columns)
        if not self._per:
            raise FormatError(
                f"{scales.path}: {scales.name} of shape {list(scales.shape)} does not fit a weight of {list(shape)}"
            )
        if zeros is not None and zeros.dtype not in ("I8", "I32"):
            raise FormatError(f"{zeros.path}: {zeros.name} is {zeros.dtype}; zero points are I8, or I32 where they are packed")
        if zeros is not None and zeros.dtype == "I8" and zeros.shape != scales.shape:
            raise FormatError(f"{zeros.path}: {zeros.name} is {list(zeros.shape)}, not {list(scales.shape)} as its scales")
        if zeros is not None and zeros.dtype == "I32" and zeros.shape != (-(-rows * self._bits // 32), self._groups):
            raise FormatError(f"{zeros.path}: {zeros.name} of shape {list(zeros.shape)} does not fit {rows} x {self._groups}")
        if index is not None and (index.shape != (columns,) or index.dtype not in ("I32", "I64")):
            raise FormatError(f"{index.path}: {index.name} is {index.dtype} {list(index.shape)}, not integers [{columns}]")
        super().__init__(codes, shape, f"int{self._bits}")
        self._codes, self._scales, self._zeros, self._index = self._flat, scales, zeros, index

    @staticmethod
    def _grid(scales: StoredTensor, shape: tuple[int, ...]) -> int:
        """Scales per row: 1 for one of each row or of the whole; 0 if they do not fit."""
        if prod(scales.shape) == 1:
            return 1
        if scales.shape == shape[:-1]:
            return 1
        return scales.shape[-1] if scales.shape[:-1] == shape[:-1] else 0

    def _rows_of(self, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        """Rows of a table like the scales, [stop - start, groups]."""
        data = tensor.data
        if data.size == 1:
            return np.broadcast_to(data.reshape(1, 1), (stop - start, 1))
        return data.reshape(self.rows, self._groups)[start:stop]

    def _zero_points(self, start: int, stop: int) -> np.ndarray:
        """As codes, float32 [stop - start, groups]."""
        middle = np.float32(1 << (self._bits - 1))
        if self._zeros is None:
            return np.full((stop - start, self._groups), middle, np.float32)
        if self._zeros.dtype == "I8":
            return np.ascontiguousarray(self._rows_of(self._zeros, start, stop).astype(np.float32) + middle)
        base = start - start % 32
        words = self._zeros.data[base * self._bits // 32 : -(-stop * self._bits // 32)]
        table = unpacked(words.T, self._bits, stop - base)[:, start - base :]
        return np.ascontiguousarray(table.T).astype(np.float32)

    def run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns], exact for scales of 16 bits."""
        scale = np.ascontiguousarray(as_float(self._rows_of(self._scales, start, stop), self._scales.dtype))
        zero = self._zero_points(start, stop)
        codes = self._codes.rows(start, stop).view(np.uint8).reshape(stop - start, -1)
        flip = np.uint8(128 if self.stored.dtype == "I8" else 0)
        out = np.empty((stop - start, self.columns), np.float32)
        if self._index is None:
            widen_codes(codes, self._bits, flip, scale, zero, self._per, out)
            return out
        index = np.asarray(self._index.data, np.int32)
        if index.min() < 0 or index.max() >= self._groups:
            raise FormatError(f"{self._index.path}: {self._index.name} has groups beyond the {self._groups} that there are")
        plain = np.ones((stop - start, 1), np.float32)
        widen_codes(codes, self._bits, flip, plain, np.zeros_like(plain), self.columns, out)
        scale_by_index(index, scale, zero, out)
        return out


def find(name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Found | None:
    """A packed or int8 weight, whichever lies there."""
    optional = ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale")
    if name in stored:
        if stored[name].dtype != "I8":
            return None
        parts = beside(name, stored, ("weight", "weight_scale"), optional)
    else:
        parts = beside(name, stored, ("weight_packed", "weight_scale"), optional)
    if parts is None:
        return None
    codes, scales = parts.get("weight_packed") or parts["weight"], parts["weight_scale"]
    _check_shape(parts.get("weight_shape"), shape)
    if codes.dtype == "U8":
        return Fp4Weight(codes, scales, parts.get("weight_global_scale"), True), list(parts.values())
    zeros, index = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    return IntegerWeight(shape, codes, scales, zeros, index), list(parts.values())


def _check_shape(told: StoredTensor | None, shape: tuple[int, ...]) -> None:
    if told is not None and (told.nbytes > 1024 or tuple(told.data.reshape(-1).tolist()) != shape[-told.data.size :]):
        raise FormatError(f"{told.path}: {told.name} does not say {list(shape)}, the shape that the model's config gives")
