"""The weights of a checkpoint as rows of float32, whatever they are stored as: f32, f16, bf16, or fp8 with scales.

How fp8 is scaled: DeepSeek's `weight_scale_inv` holds the factor of each block of weight_block_size (a multiplier, despite
its name); others hold `weight_scale`, one factor per row, per run of columns or for the whole matrix. The shape of the scale
tells which. Weights of integers and of four bits are in modules of their own (see `methods`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from ...formats import TYPES, FormatError, TensorType
from ...formats.floats import bf16_to_f32, e8m0_to_f32, f16_to_f32, fp8_to_bf16, fp8_to_f32
from ...formats.safetensors import StoredTensor

Rows = slice | np.ndarray  # of a matrix: a run (start and stop given), or the numbers of single rows in any order

SCALE_NAMES = ("weight_scale_inv", "weight_scale")  # beside the `weight` that they scale
BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of mxfp4 weights and of what scales them
_FLOATS = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16"}
_FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("F32", "F16", "BF16", "F8_E8M0", "U8")  # the last: e8m0 where the type has no name yet


class Weight:
    """A matrix of the checkpoint, a vector as a matrix of one row, or a stack of matrices one below the other.

    shape          outermost first
    rows, columns  the same as a matrix; of a stack, all rows together
    source_type    what is stored, such as 'bf16' or 'f8_e4m3'
    kind           the ggml type of the stored bytes where they are one as they lie, else None
    """

    __slots__ = ("_block", "_flat", "_scale", "columns", "kind", "rows", "shape", "source_type", "stored")

    def __init__(self, stored: StoredTensor, scale: StoredTensor | None = None, block: tuple[int, int] | None = None):
        """scale and block (rows, columns that share a factor) only for fp8. Raises FormatError if they do not fit."""
        self._describe(stored, stored.shape, stored.source_type)
        self._scale, self._block = scale, (self.rows, self.columns)
        if stored.dtype in _FP8:
            if scale is None:
                raise FormatError(f"{stored.path}: {stored.name} is {stored.dtype} without a {' or '.join(SCALE_NAMES)}")
            self._block = self._shape_of_block(scale, block)
        elif stored.dtype not in _FLOATS:
            known = ", ".join((*_FLOATS, *_FP8))
            raise FormatError(f"{stored.path}: {stored.name} is {stored.dtype}; weights can be {known}")
        elif stored.dtype != "F64":
            self.kind = TYPES[_FLOATS[stored.dtype]]

    def _describe(self, stored: StoredTensor, shape: tuple[int, ...], source_type: str) -> None:
        self.stored, self.shape, self.source_type = stored, shape, source_type
        self.rows, self.columns = prod(shape[:-1]), shape[-1] if shape else 1
        self.kind: TensorType | None = None
        by_rows = stored.shape[:-1] == shape[:-1]
        self._flat = replace(stored, shape=(self.rows, *stored.shape[-1:])) if by_rows else stored

    def _shape_of_block(self, scale: StoredTensor, block: tuple[int, int] | None) -> tuple[int, int]:
        """Rows and columns that share a factor."""
        if scale.dtype not in _SCALES:
            raise FormatError(f"{scale.path}: {scale.name} is {scale.dtype}; scales can be {', '.join(_SCALES)}")
        matrices, rows = prod(self.shape[:-2]), self.rows // max(1, prod(self.shape[:-2]))
        fitting = {(): (self.rows, self.columns), (1,): (self.rows, self.columns), (1, 1): (self.rows, self.columns)}
        fitting |= {self.shape[:-1]: (1, self.columns), (*self.shape[:-1], 1): (1, self.columns)}
        if matrices > 1:  # of a stack, one for each
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
                f" (one factor for {blocks}each row or the whole is known)"
            )
        return fitting[scale.shape]

    def read(self, rows: Rows) -> np.ndarray:
        """float32 [number of rows, columns], exact but for the product of an fp8 value with its scale."""
        words = self.words(rows)
        if self.stored.dtype in _FP8:
            return fp8_to_f32(words, self.source_type, self._factors(rows), self._block[1])
        return self.widened(words)

    @property
    def narrows(self) -> bool:
        """Whether there is `narrow`."""
        return self.stored.dtype in _FP8

    def narrow(self, rows: Rows) -> np.ndarray:
        """uint8 [number of rows, 2 * columns]: what `read` gives, rounded to bf16; only for fp8, where it is one step."""
        return fp8_to_bf16(self.words(rows), self.source_type, self._factors(rows), self._block[1]).view(np.uint8)

    def widened(self, words: np.ndarray) -> np.ndarray:
        """Stored words [rows, columns] of a float type, C-contiguous -> float32 of that shape."""
        match self.stored.dtype:
            case "BF16":
                return bf16_to_f32(words)
            case "F16":
                return f16_to_f32(words)
        return words.astype(np.float32, copy=False)

    def raw(self, rows: Rows) -> np.ndarray:
        """uint8 [number of rows, bytes of a row] as stored; only where `kind` is given."""
        return self.words(rows).view(np.uint8)

    def words(self, rows: Rows) -> np.ndarray:
        """[number of rows, columns] as stored, C-contiguous. For single rows the run that holds them all is read."""
        if isinstance(rows, slice):
            return self._flat.rows(rows.start, rows.stop)
        first = int(rows.min())
        return self._flat.rows(first, int(rows.max()) + 1)[rows - first]

    def _factors(self, rows: Rows) -> np.ndarray:
        """float32 [number of rows, blocks along a row]."""
        assert self._scale is not None
        data = self._scale.data
        widen = {"BF16": bf16_to_f32, "F16": f16_to_f32, "F8_E8M0": e8m0_to_f32, "U8": e8m0_to_f32}
        grid = data.reshape(-(-self.rows // self._block[0]), -(-self.columns // self._block[1]))
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return widen.get(self._scale.dtype, np.asarray)(grid[numbers // self._block[0]])


def find_scale(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """The tensor that scales the weight of this name, or None."""
    if name.endswith(BLOCKS):
        return stored.get(name.removesuffix(BLOCKS) + SCALES)
    stem = name.removesuffix("weight")
    return next((stored[stem + s] for s in SCALE_NAMES if stem + s in stored), None)


Found = tuple[Weight, list[StoredTensor]]  # a weight, and the tensors that it is made of


def beside(
    name: str, stored: Mapping[str, StoredTensor], needed: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, StoredTensor] | None:
    """The tensors STEM.NEEDED and those of STEM.OPTIONAL that there are, by these endings; STEM.weight is `name`.

    None if the first of them is not there. Raises FormatError if another that is needed is missing.
    """
    stem = name.removesuffix("weight")
    if not name.endswith(".weight") or stem + needed[0] not in stored:
        return None
    for ending in needed:
        if stem + ending not in stored:
            first = stored[stem + needed[0]]
            raise FormatError(f"{first.path}: {stem}{ending} is missing, which {first.name} needs")
    return {ending: stored[stem + ending] for ending in (*needed, *optional) if stem + ending in stored}
