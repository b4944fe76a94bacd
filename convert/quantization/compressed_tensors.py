"""compressed-tensors (vllm-project/compressed-tensors): packed integers, int8 and four-bit floats.

Symmetric int4 in groups of 32 (Kimi-K2-Thinking, Kimi-K2.5) is what ggml's q4_0 is, (code - 8) * scale, in another order: `raw`
gives such weights without a loss.

config_groups assigns a scheme to modules by name or pattern, but the tensors of a module show the same: `weight_packed` of
int32 (integers of 1 to 8 bits, -2^(bits-1) stored as 0) or of uint8 (see fp4.py), or a `weight` of int8. So neither groups with
different schemes nor lists of ignored modules have to be looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from ...formats import TYPES, FormatError
from ...formats.safetensors import StoredTensor
from ...simd.compile import kernel
from .fp4 import Fp4Weight
from .integer_weights import (
    SCALE_DTYPES,
    DecodedWeight,
    columns_per_group,
    dequantise,
    scale_by_index,
    to_float32,
    unpack_codes,
)
from .stored_weights import Rows, WeightTensors, sibling_tensors

_Q4_0 = TYPES["q4_0"]
_HALF = 16  # bytes of a block's codes


@kernel
def _q4_0_blocks(codes, scales, out):
    """codes uint8 [n, 16], two neighbours per byte, scales uint8 [n, 2] -> out uint8 [n, 18], codes i and i + 16 per byte."""
    for b in range(len(codes)):
        block, row = out[b], codes[b]
        block[0], block[1] = scales[b, 0], scales[b, 1]
        for j in range(_HALF // 2):
            first, second = row[j], row[j + _HALF // 2]
            block[2 + 2 * j] = (first & 15) | ((second & 15) << 4)
            block[3 + 2 * j] = (first >> 4) | (second & 240)


class IntegerWeight(DecodedWeight):
    """Packed codes or int8. Scales are [rows, groups], [rows], or one; zero points likewise, or packed along the rows."""

    __slots__ = ("_bits", "_group_size", "_groups", "_index", "_scales", "_zeros")

    def __init__(
        self,
        shape: tuple[int, ...],
        codes: StoredTensor,
        scales: StoredTensor,
        zeros: StoredTensor | None = None,
        index: StoredTensor | None = None,
    ):
        """shape: that the weight must have; index: group of each column. Raises FormatError if the tensors do not fit."""
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
        if scales.dtype not in SCALE_DTYPES:
            raise FormatError(f"{scales.path}: {scales.name} is {scales.dtype}; scales can be {', '.join(SCALE_DTYPES)}")
        self._groups = self._groups_per_row(scales, shape)
        self._group_size = columns_per_group(self._groups, columns)
        if not self._group_size:
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
        self._scales, self._zeros, self._index = scales, zeros, index
        is_symmetric = zeros is None and index is None and codes.dtype == "I32"
        if is_symmetric and self._bits == 4 and self._group_size == _Q4_0.block and columns % _Q4_0.block == 0:
            self.ggml_type = _Q4_0

    @staticmethod
    def _groups_per_row(scales: StoredTensor, shape: tuple[int, ...]) -> int:
        """1 for a scale per row or for the whole matrix; 0 if the shapes do not fit."""
        if prod(scales.shape) == 1:
            return 1
        if scales.shape == shape[:-1]:
            return 1
        return scales.shape[-1] if scales.shape[:-1] == shape[:-1] else 0

    def _rows_of(self, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
        """Rows of the scales or of unpacked zero points, [stop - start, groups]."""
        data = tensor.data
        if data.size == 1:
            return np.broadcast_to(data.reshape(1, 1), (stop - start, 1))
        return data.reshape(self.rows, self._groups)[start:stop]

    def raw(self, rows: Rows) -> np.ndarray:
        """uint8 [number of rows, row_bytes of q4_0], only if that is `ggml_type`; decoded, they are what `read` gives.

        Raises FormatError for a scale that is no number of half precision (those of bf16 from 2^-17 to 65280 are).
        """
        if not isinstance(rows, slice):
            first = int(rows.min())
            return self.raw(slice(first, int(rows.max()) + 1))[rows - first]
        stored = to_float32(self._rows_of(self._scales, rows.start, rows.stop), self._scales.dtype)
        with np.errstate(over="ignore"):
            scales = stored.astype(np.float16)
        if not np.array_equal(scales, stored):
            row, group = np.argwhere(scales != stored)[0]
            raise FormatError(
                f"{self._scales.path}: {self._scales.name} has the scale {stored[row, group]} in row {rows.start + row}, which"
                " q4_0 cannot hold exactly; choose another type for this tensor, for instance bf16 or q8_0"
            )
        codes = self._matrix.rows(rows.start, rows.stop).view(np.uint8).reshape(-1, _HALF)
        out = np.empty((rows.stop - rows.start, _Q4_0.row_bytes(self.columns)), np.uint8)
        _q4_0_blocks(codes, scales.reshape(-1, 1).view(np.uint8), out.reshape(-1, _Q4_0.block_bytes))
        return out

    def _zero_points(self, start: int, stop: int) -> np.ndarray:
        """In units of codes, float32 [stop - start, groups]."""
        midpoint = np.float32(1 << (self._bits - 1))
        if self._zeros is None:
            return np.full((stop - start, self._groups), midpoint, np.float32)
        if self._zeros.dtype == "I8":
            return np.ascontiguousarray(self._rows_of(self._zeros, start, stop).astype(np.float32) + midpoint)
        base = start - start % 32
        words = self._zeros.data[base * self._bits // 32 : -(-stop * self._bits // 32)]
        zeros = unpack_codes(words.T, self._bits, stop - base)[:, start - base :]
        return np.ascontiguousarray(zeros.T).astype(np.float32)

    def read_run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns], exact for scales of 16 bits. Raises FormatError for groups that do not exist."""
        scale = np.ascontiguousarray(to_float32(self._rows_of(self._scales, start, stop), self._scales.dtype))
        zero = self._zero_points(start, stop)
        codes = self._matrix.rows(start, stop).view(np.uint8).reshape(stop - start, -1)
        flip = np.uint8(128 if self.stored.dtype == "I8" else 0)
        out = np.empty((stop - start, self.columns), np.float32)
        if self._index is None:
            dequantise(codes, self._bits, flip, scale, zero, self._group_size, out)
            return out
        index = np.asarray(self._index.data, np.int32)
        if index.min() < 0 or index.max() >= self._groups:
            raise FormatError(f"{self._index.path}: {self._index.name} has groups beyond the {self._groups} that there are")
        ones = np.ones((stop - start, 1), np.float32)
        dequantise(codes, self._bits, flip, ones, np.zeros_like(ones), self.columns, out)
        scale_by_index(index, scale, zero, out)
        return out


def find_weight(name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> WeightTensors | None:
    """A packed or int8 weight; None if neither is stored under this name."""
    optional = ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale", "input_global_scale")
    if name in stored:
        if stored[name].dtype != "I8":
            return None
        tensors = sibling_tensors(name, stored, ("weight", "weight_scale"), optional)
    else:
        tensors = sibling_tensors(name, stored, ("weight_packed", "weight_scale"), optional)
    if tensors is None:
        return None
    codes, scales = tensors.get("weight_packed") or tensors["weight"], tensors["weight_scale"]
    _check_shape(tensors.get("weight_shape"), shape)
    if codes.dtype == "U8":
        global_scale, inputs = tensors.get("weight_global_scale"), tensors.get("input_global_scale")
        return Fp4Weight(codes, scales, global_scale, inputs, global_is_divisor=True), list(tensors.values())
    zeros, index = tensors.get("weight_zero_point"), tensors.get("weight_g_idx")
    return IntegerWeight(shape, codes, scales, zeros, index), list(tensors.values())


def _check_shape(declared: StoredTensor | None, shape: tuple[int, ...]) -> None:
    """declared: the tensor weight_shape, if it is stored."""
    if declared is None:
        return
    if declared.nbytes > 1024 or tuple(declared.data.reshape(-1).tolist()) != shape[-declared.data.size :]:
        raise FormatError(f"{declared.path}: {declared.name} is not {list(shape)}, the shape according to config.json")
