"""The weights of a checkpoint as rows of float32, however they are stored: f32, f16, bf16, or fp8 with scales.

Scales of fp8: DeepSeek's `weight_scale_inv` (V4: `scale`) has a multiplier (despite its name) for each block of
weight_block_size, in float32 or as powers of two (e8m0); other checkpoints have `weight_scale`, one multiplier per row, per run
of columns or for the whole matrix. The shape of the scale tensor shows which. Integer and four-bit weights have modules of
their own (see `methods`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from ...formats import TYPES, FormatError, TensorScale, TensorType
from ...formats.floats import bf16_to_f32, e8m0_to_f32, f16_to_f32
from ...formats.fp8 import fp8_to_bf16, fp8_to_f32
from ...formats.safetensors import StoredTensor

Rows = slice | np.ndarray  # of a matrix: a run (with start and stop), or row numbers in any order

SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")  # next to the `weight` that they scale; scale: DeepSeek-V4
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"  # of the names of mxfp4 weights and their scales
_FLOATS = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16"}
_FP8 = ("F8_E4M3", "F8_E5M2")
_INTEGERS = ("I32", "I64")  # tables, such as those of experts by token id
_SCALE_DTYPES = ("F32", "F16", "BF16", "F8_E8M0", "U8")  # U8: e8m0, from versions of safetensors without a name for it


class StoredWeight:
    """A matrix of the checkpoint, a vector as a matrix of one row, or a stack of matrices as one matrix with all their rows.

    shape          as stored, outermost dimension first
    rows, columns  as a matrix
    source_type    how it is stored, such as 'bf16' or 'f8_e4m3'
    ggml_type      the ggml type that the stored bytes already have, else None
    stored         the tensor with the weight's values or codes
    """

    __slots__ = ("_block", "_matrix", "_scale", "columns", "ggml_type", "rows", "shape", "source_type", "stored")

    def __init__(self, stored: StoredTensor, scale: StoredTensor | None = None, block: tuple[int, int] | None = None):
        """scale, and block (rows, columns that share a scale), are for fp8 only. Raises FormatError if they do not fit."""
        self._describe(stored, stored.shape, stored.source_type)
        self._scale, self._block = scale, (self.rows, self.columns)
        if stored.dtype in _FP8:
            if scale is None:
                raise FormatError(f"{stored.path}: {stored.name} is {stored.dtype} without a {' or '.join(SCALE_NAMES)}")
            self._block = self._block_shape(scale, block)
        elif stored.dtype not in (*_FLOATS, *_INTEGERS):
            known = ", ".join((*_FLOATS, *_FP8))
            raise FormatError(f"{stored.path}: {stored.name} is {stored.dtype}; weights can be {known}")
        elif stored.dtype in _FLOATS and stored.dtype != "F64":
            self.ggml_type = TYPES[_FLOATS[stored.dtype]]

    def _describe(self, stored: StoredTensor, shape: tuple[int, ...], source_type: str) -> None:
        """Sets all attributes but the scale's; shape: of the weight, which differs from `stored`'s for packed codes."""
        self.stored, self.shape, self.source_type = stored, shape, source_type
        self.rows, self.columns = prod(shape[:-1]), shape[-1] if shape else 1
        self.ggml_type: TensorType | None = None
        is_by_rows = stored.shape[:-1] == shape[:-1]
        self._matrix = replace(stored, shape=(self.rows, *stored.shape[-1:])) if is_by_rows else stored

    def _block_shape(self, scale: StoredTensor, block: tuple[int, int] | None) -> tuple[int, int]:
        """Rows and columns that share a scale, from the scale's shape. Raises FormatError for a shape that does not fit."""
        if scale.dtype not in _SCALE_DTYPES:
            raise FormatError(f"{scale.path}: {scale.name} is {scale.dtype}; scales can be {', '.join(_SCALE_DTYPES)}")
        matrices, rows = prod(self.shape[:-2]), self.rows // max(1, prod(self.shape[:-2]))
        # shape of the scale -> block
        fitting = {(): (self.rows, self.columns), (1,): (self.rows, self.columns), (1, 1): (self.rows, self.columns)}
        fitting |= {self.shape[:-1]: (1, self.columns), (*self.shape[:-1], 1): (1, self.columns)}
        if matrices > 1:  # a stack with one scale per matrix
            fitting |= dict.fromkeys(((matrices,), (matrices, 1), (matrices, 1, 1)), (rows, self.columns))
        last = scale.shape[-1] if scale.shape else 0
        if scale.shape[:-1] == self.shape[:-1] and last and self.columns % last == 0:
            fitting.setdefault(scale.shape, (1, self.columns // last))
        if block is not None and (matrices <= 1 or rows % block[0] == 0):
            fitting[*self.shape[:-2], -(-rows // block[0]), -(-self.columns // block[1])] = block
        if scale.shape not in fitting:
            blocks = f"blocks of {block[0]} x {block[1]}, " if block else ""
            raise FormatError(
                f"{scale.path}: {scale.name} of shape {list(scale.shape)} does not fit a weight of {self.rows} x {self.columns}"
                f" (one factor for {blocks}each row or the whole matrix is supported)"
            )
        return fitting[scale.shape]

    def read(self, rows: Rows) -> np.ndarray:
        """float32 [number of rows, columns]; exact, except for the rounding of the product of an fp8 value and its scale."""
        words = self.words(rows)
        if self.stored.dtype in _FP8:
            return fp8_to_f32(words, self.source_type, self._scales_of(rows), self._block[1])
        return self.to_float32(words)

    @property
    def has_read_bf16(self) -> bool:
        """Whether `read_bf16` can be called."""
        return self.stored.dtype in _FP8

    def read_bf16(self, rows: Rows) -> np.ndarray:
        """uint8 [number of rows, 2 * columns]: what `read` gives, rounded to bf16. For fp8 only, where it is one pass."""
        return fp8_to_bf16(self.words(rows), self.source_type, self._scales_of(rows), self._block[1]).view(np.uint8)

    def to_float32(self, words: np.ndarray) -> np.ndarray:
        """Stored words [rows, columns] of a float type, C-contiguous -> float32 of that shape."""
        match self.stored.dtype:
            case "BF16":
                return bf16_to_f32(words)
            case "F16":
                return f16_to_f32(words)
        return words.astype(np.float32, copy=False)

    @property
    def scale(self) -> TensorScale | None:
        """The factor that `read` applies and `raw` does not contain, float32 [1]; None if there is none."""
        return None

    def raw(self, rows: Rows) -> np.ndarray:
        """uint8 [number of rows, row_bytes], in the encoding of `ggml_type`; only if that is not None."""
        return self.words(rows).view(np.uint8)

    def words(self, rows: Rows) -> np.ndarray:
        """[number of rows, columns] as stored, C-contiguous. For single rows, the run that contains them all is read."""
        if isinstance(rows, slice):
            return self._matrix.rows(rows.start, rows.stop)
        first = int(rows.min())
        return self._matrix.rows(first, int(rows.max()) + 1)[rows - first]

    def _scales_of(self, rows: Rows) -> np.ndarray:
        """float32 [number of rows, blocks along a row]."""
        assert self._scale is not None
        data = self._scale.data
        convert = {"BF16": bf16_to_f32, "F16": f16_to_f32, "F8_E8M0": e8m0_to_f32, "U8": e8m0_to_f32}
        grid = data.reshape(-(-self.rows // self._block[0]), -(-self.columns // self._block[1]))
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return convert.get(self._scale.dtype, np.asarray)(grid[numbers // self._block[0]])


def find_scale(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """The tensor that scales the weight of this name, or None."""
    if name.endswith(BLOCKS_SUFFIX):
        return stored.get(name.removesuffix(BLOCKS_SUFFIX) + SCALES_SUFFIX)
    stem = name.removesuffix("weight")
    return next((stored[stem + s] for s in SCALE_NAMES if stem + s in stored), None)


WeightTensors = tuple[StoredWeight, list[StoredTensor]]  # a weight, and the stored tensors that it is decoded from


def sibling_tensors(
    name: str, stored: Mapping[str, StoredTensor], required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, StoredTensor] | None:
    """The tensors STEM.SUFFIX of a weight STEM.weight, suffix -> tensor: all required ones and those optional ones that exist.

    None if the first required one does not exist. Raises FormatError if another required one is missing.
    """
    stem = name.removesuffix("weight")
    if not name.endswith(".weight") or stem + required[0] not in stored:
        return None
    for suffix in required:
        if stem + suffix not in stored:
            first = stored[stem + required[0]]
            raise FormatError(f"{first.path}: {stem}{suffix} is missing, which {first.name} needs")
    return {suffix: stored[stem + suffix] for suffix in (*required, *optional) if stem + suffix in stored}
