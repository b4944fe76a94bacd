"""The weights of a checkpoint as rows of float32, whatever they are stored as: f32, f16, bf16, or fp8 with scales.

How fp8 is scaled: DeepSeek's `weight_scale_inv` holds the factor of each block of weight_block_size (a multiplier, despite
its name); others hold `weight_scale`, one factor per row or one for the whole matrix. The shape of the scale tells which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from ..formats import TYPES, FormatError, TensorType
from ..formats.floats import bf16_to_f32, e8m0_to_f32, f16_to_f32, fp8_to_f32
from ..formats.safetensors import StoredTensor
from .config import Config

Rows = slice | np.ndarray  # of a matrix: a run (start and stop given), or the numbers of single rows in any order

SCALE_NAMES = ("weight_scale_inv", "weight_scale")  # beside the `weight` that they scale
BLOCKS, SCALES = "_blocks", "_scales"  # ends of the names of mxfp4 weights and of what scales them
_FLOATS = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16"}
_FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("F32", "F16", "BF16", "F8_E8M0")

# quant_method of quantization_config -> where it says how it quantises, and the values of that which mean fp8 weights
_METHODS: dict[str, tuple[str, tuple[object, ...]]] = {
    "fp8": ("fmt", (None, "e4m3", "e5m2")),
    "fbgemm_fp8": ("quant_method", ("fbgemm_fp8",)),
    "compressed-tensors": ("format", ("float-quantized", "naive-quantized")),
    "modelopt": ("quant_algo", ("FP8",)),
    "mxfp4": ("quant_method", ("mxfp4",)),  # of experts' stacks, whose names say so: see mxfp4.py
}


def scale_block(config: Config) -> tuple[int, int] | None:
    """Rows and columns that share one fp8 scale, as config.json says; None if it does not say.

    Raises FormatError for a quantization that cannot be decoded, naming it.
    """
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise config.fail("quantization_config is not an object")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise config.fail(f"quantization_config has quant_method {method!r}; known are {', '.join(_METHODS)}")
    key, known = _METHODS[method]
    if settings.get(key) not in known:
        raise config.fail(f"quantization_config of quant_method {method} has {key} {settings.get(key)!r}; only fp8 is known")
    block = settings.get("weight_block_size")
    if method == "compressed-tensors":
        block = _group_block(config, settings)
    if block is None:
        return None
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block):
        raise config.fail(f"weight_block_size is {block!r}; two whole numbers are needed")
    return block[0], block[1]


def _group_block(config: Config, settings: dict) -> object:
    """The block_structure of compressed-tensors' config_groups: one for all groups, or None."""
    try:
        groups = settings["config_groups"].values()
        structures = {tuple(s) for group in groups if (s := group["weights"].get("block_structure"))}
    except (KeyError, TypeError, AttributeError):
        raise config.fail("quantization_config of quant_method compressed-tensors lacks config_groups with weights") from None
    if len(structures) > 1:
        raise config.fail(f"quantization_config has several block structures: {sorted(map(str, structures))}")
    return next(iter(structures), None)


class Weight:
    """A matrix of the checkpoint, a vector as a matrix of one row, or a stack of matrices one below the other.

    rows, columns  its shape; of a stack, all rows together
    source_type    what is stored, such as 'bf16' or 'f8_e4m3'
    kind           the ggml type of the stored bytes where they are one as they lie, else None
    """

    __slots__ = ("_block", "_matrix", "_scale", "columns", "kind", "rows", "source_type", "stored")

    def __init__(self, stored: StoredTensor, scale: StoredTensor | None = None, block: tuple[int, int] | None = None):
        """scale and block (rows, columns that share a factor) only for fp8. Raises FormatError if they do not fit."""
        shape = stored.shape
        self.stored = stored
        self.rows, self.columns = prod(shape[:-1]), shape[-1]
        self._matrix = replace(stored, shape=(self.rows, self.columns))
        self.source_type = stored.source_type
        self.kind: TensorType | None = None
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

    def _shape_of_block(self, scale: StoredTensor, block: tuple[int, int] | None) -> tuple[int, int]:
        if scale.dtype not in _SCALES:
            raise FormatError(f"{scale.path}: {scale.name} is {scale.dtype}; scales can be {', '.join(_SCALES)}")
        fitting = {(): (self.rows, self.columns), (1,): (self.rows, self.columns), (1, 1): (self.rows, self.columns)}
        fitting |= {(self.rows,): (1, self.columns), (self.rows, 1): (1, self.columns)}
        if block is not None:
            fitting[-(-self.rows // block[0]), -(-self.columns // block[1])] = block
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
            return self._matrix.rows(rows.start, rows.stop)
        first = int(rows.min())
        return self._matrix.rows(first, int(rows.max()) + 1)[rows - first]

    def _factors(self, rows: Rows) -> np.ndarray:
        """float32 [number of rows, blocks along a row]."""
        assert self._scale is not None
        data = self._scale.data
        widen = {"BF16": bf16_to_f32, "F16": f16_to_f32, "F8_E8M0": e8m0_to_f32}.get(self._scale.dtype, np.asarray)
        grid = data.reshape(-(-self.rows // self._block[0]), -(-self.columns // self._block[1]))
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        return widen(grid[numbers // self._block[0]])


def find_scale(name: str, stored: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """The tensor that scales the weight of this name, or None."""
    if name.endswith(BLOCKS):
        return stored.get(name.removesuffix(BLOCKS) + SCALES)
    stem = name.removesuffix("weight")
    return next((stored[stem + s] for s in SCALE_NAMES if stem + s in stored), None)
