"""Weights of four-bit floats (E2M1), two per byte with the lower four bits first, and a scale per group of columns.

NVFP4: groups of 16, fp8 (e4m3) scales, and a global float32 scale: a multiplier (`weight_scale_2`, modelopt) or a divisor
(`weight_global_scale`, compressed-tensors). MXFP4 as compressed-tensors and DeepSeek-V4 pack it: groups of 32, e8m0 scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from ...formats import TYPES, FormatError, TensorScale
from ...formats.floats import e8m0_to_f32
from ...formats.safetensors import StoredTensor
from ...simd.compile import kernel
from .integer_weights import DecodedWeight, to_float32
from .stored_weights import Rows, WeightTensors, find_scale, sibling_tensors

_PACKED = ("U8", "I8")  # dtypes that hold two codes
NO_NUMBER = 0x7F  # of E4M3, without its sign


@kernel
def _value(code, scale):
    """E2M1 code -> 0, 0.5, 1, 1.5, 2, 3, 4, 6 or their negatives, times the scale."""
    magnitude = np.uint32(code & np.uint32(7))
    bits = np.uint32((magnitude + np.uint32(252)) << np.uint32(22))  # exponent (2 bits, bias 1) and one bit of mantissa
    bits = bits if magnitude >= np.uint32(2) else np.uint32(magnitude * np.uint32(0x3F000000))
    sign = np.uint32(np.uint32(code & np.uint32(8)) << np.uint32(28))
    return np.uint32(bits | sign).view(np.float32) * scale


@kernel
def _dequantise(codes, scale, group_size, out):
    """codes uint8 [rows, columns / 2], scale float32 [rows, columns / group_size] -> out float32 [rows, columns]."""
    half = group_size // 2
    for r in range(codes.shape[0]):
        for g in range(scale.shape[1]):
            s, pairs = scale[r, g], codes[r, g * half : (g + 1) * half]
            values = out[r, g * group_size : (g + 1) * group_size]
            for i in range(half):
                values[2 * i] = _value(np.uint32(pairs[i]) & np.uint32(15), s)
                values[2 * i + 1] = _value(np.uint32(pairs[i]) >> np.uint32(4), s)


@kernel
def _blocks(codes, scales, groups_per_block, group, out):
    """codes uint8 [rows, columns / 2], scales uint8 [rows, columns / group] -> out uint8 [rows, row_bytes] of ggml's mxfp4 (one
    group to a block) or nvfp4 (four): the scales, then for each group bytes with codes i and i + group / 2."""
    half, quarter = group // 2, group // 4
    block_bytes = groups_per_block * (half + 1)
    for r in range(codes.shape[0]):
        for g in range(scales.shape[1]):
            block, place = g // groups_per_block * block_bytes, g % groups_per_block
            out[r, block + place] = scales[r, g]
            packed, pairs = out[r, block + groups_per_block + half * place :], codes[r, half * g : half * (g + 1)]
            for i in range(quarter):
                first, second = pairs[i], pairs[i + quarter]
                packed[2 * i] = (first & 15) | ((second & 15) << 4)
                packed[2 * i + 1] = (first >> 4) | (second & 240)


class Fp4Weight(DecodedWeight):
    """A matrix, or a stack of matrices. `raw` gives ggml's nvfp4 or mxfp4 without a loss, where rows are whole blocks."""

    __slots__ = ("_global_is_divisor", "_global_scale", "_group_size", "_input_scale", "_scales")

    def __init__(
        self,
        codes: StoredTensor,
        scales: StoredTensor,
        global_scale: StoredTensor | None,
        input_scale: StoredTensor | None = None,
        *,
        global_is_divisor: bool,
    ):
        """input_scale: of the layer's inputs, a multiplier or a divisor as global_scale. Raises FormatError if the tensors
        do not fit together."""
        source_type, self._group_size = ("nvfp4", 16) if scales.dtype == "F8_E4M3" else ("mxfp4", 32)
        shape = (*codes.shape[:-1], 2 * codes.shape[-1]) if len(codes.shape) > 1 else (0, 0)
        groups = (*shape[:-1], shape[-1] // self._group_size)
        is_known = codes.dtype in _PACKED and scales.dtype in ("F8_E4M3", "F8_E8M0", "U8") and shape[-1] % self._group_size == 0
        if not is_known or scales.shape != groups:
            raise FormatError(
                f"{codes.path}: {codes.name} is {codes.dtype} {list(codes.shape)} with scales {scales.dtype}"
                f" {list(scales.shape)}; U8 [rows, columns / 2] with F8_E4M3 [rows, columns / 16] (NVFP4)"
                " or e8m0 [rows, columns / 32] (MXFP4) is known"
            )
        if (global_scale is not None) != (source_type == "nvfp4"):
            raise FormatError(f"{codes.path}: {codes.name} lacks NVFP4's global scale, or has one as MXFP4")
        if global_scale is not None and (global_scale.dtype != "F32" or prod(global_scale.shape) != 1):
            where = f"{global_scale.path}: {global_scale.name}"
            raise FormatError(f"{where} is {global_scale.dtype} {list(global_scale.shape)}; one F32 is needed")
        super().__init__(codes, shape, "f4_e2m1")
        self._scales, self._global_scale, self._global_is_divisor = scales, global_scale, global_is_divisor
        has_input = input_scale is not None and input_scale.dtype == "F32" and prod(input_scale.shape) == 1
        self._input_scale = input_scale if has_input else None
        self.ggml_type = TYPES[source_type] if TYPES[source_type].fits(self.columns) else None

    @property
    def scale(self) -> TensorScale | None:
        """NVFP4's global scale as a multiplier, and that of the inputs."""
        if self._global_scale is None or self.ggml_type is None:
            return None
        return TensorScale(self._factor(self._global_scale), self._factor(self._input_scale) if self._input_scale else None)

    def _factor(self, stored: StoredTensor) -> Callable[[], np.ndarray]:
        """() -> float32 [1]: a stored scale as a multiplier."""

        def factor() -> np.ndarray:
            value = np.array(stored.data, np.float32).reshape(1)
            return np.float32(1) / value if self._global_is_divisor else value

        return factor

    def raw(self, rows: Rows) -> np.ndarray:
        """uint8 [number of rows, row_bytes] in `ggml_type`. Raises FormatError for a scale that is negative or no number."""
        if not isinstance(rows, slice):
            first = int(rows.min())
            return self.raw(slice(first, int(rows.max()) + 1))[rows - first]
        assert self.ggml_type is not None
        scales = np.ascontiguousarray(self._scales.data.reshape(self.rows, -1)[rows.start : rows.stop]).view(np.uint8)
        if self._global_scale is not None and scales.size and scales.max() >= NO_NUMBER:
            row, group = np.argwhere(scales >= NO_NUMBER)[0]
            raise FormatError(
                f"{self._scales.path}: {self._scales.name} has the E4M3 code {scales[row, group]:#x} in row {rows.start + row},"
                " which nvfp4 cannot hold; choose another type for this tensor, for instance bf16"
            )
        out = np.empty((rows.stop - rows.start, self.ggml_type.row_bytes(self.columns)), np.uint8)
        groups_per_block = self.ggml_type.block // self._group_size
        codes = self._matrix.rows(rows.start, rows.stop).view(np.uint8)
        _blocks(codes, scales, groups_per_block, self._group_size, out)
        return out

    def read_run(self, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, columns]; exact, except for the rounding of products with scales."""
        scales = self._scales.data.reshape(self.rows, -1)[start:stop]
        if self._global_scale is None:
            scale = e8m0_to_f32(scales)
        else:
            global_scale = np.float32(self._global_scale.data.reshape(()))
            scale = to_float32(scales, self._scales.dtype)
            scale = scale / global_scale if self._global_is_divisor else scale * global_scale
        codes = self._matrix.rows(start, stop).view(np.uint8)
        out = np.empty((stop - start, self.columns), np.float32)
        _dequantise(codes, scale, self._group_size, out)
        return out


def find_mxfp4_weight(name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> WeightTensors | None:
    """A weight NAME in MXFP4 among weights in fp8, with e8m0 scales under one of SCALE_NAMES: the experts of DeepSeek-V4."""
    codes, scales = stored.get(name), find_scale(name, stored)
    if codes is None or codes.dtype not in _PACKED or scales is None or scales.dtype not in ("F8_E8M0", "U8"):
        return None
    return Fp4Weight(codes, scales, None, global_is_divisor=False), [codes, scales]


def find_modelopt_weight(name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> WeightTensors | None:
    """A weight NAME in NVFP4 as modelopt stores it, with NAME_scale and NAME_scale_2; None if NAME is not in NVFP4."""
    if name not in stored or stored[name].dtype != "U8":
        return None
    tensors = sibling_tensors(name, stored, ("weight", "weight_scale", "weight_scale_2"), ("input_scale",))
    if tensors is None:
        return None
    global_scale, inputs = tensors["weight_scale_2"], tensors.get("input_scale")
    weight = Fp4Weight(tensors["weight"], tensors["weight_scale"], global_scale, inputs, global_is_divisor=False)
    return weight, list(tensors.values())
