"""MXFP4 weights as gpt-oss stores them, NAME_blocks and NAME_scales, both uint8, re-ordered into ggml's mxfp4 without loss.

blocks are [..., rows, n, 16], scales [..., rows, n]: n blocks of 32 elements per row. Byte j of a block has elements 2 j (low
four bits) and 2 j + 1; in ggml it has elements j and j + 16, and the scale comes first. Codes and scales are the same in both
(OCP Microscaling Formats 1.0: E2M1 elements, E8M0 scale).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from ...formats import TYPES, FormatError
from ...formats.safetensors import StoredTensor
from ...quantize import decode
from ...simd.compile import kernel
from .stored_weights import Rows, StoredWeight

_TYPE = TYPES["mxfp4"]
_HALF = 8  # bytes with the first 16 elements of a block


@kernel
def _reorder(blocks, scales, out):
    """blocks uint8 [n, 16], scales uint8 [n] -> out uint8 [n, 17]."""
    for b in range(len(scales)):
        reordered, block = out[b], blocks[b]
        reordered[0] = scales[b]
        for j in range(_HALF):
            first, second = block[j], block[j + _HALF]
            reordered[1 + 2 * j] = (first & 15) | ((second & 15) << 4)
            reordered[2 + 2 * j] = (first >> 4) | (second & 240)


class Mxfp4Weight(StoredWeight):
    """A matrix, or a stack of experts' matrices as one."""

    __slots__ = ("_blocks", "_scales")

    def __init__(self, blocks: StoredTensor, scales: StoredTensor):
        """Raises FormatError if the two are not uint8 or do not fit together."""
        self.stored, self.source_type, self.ggml_type = blocks, _TYPE.name, _TYPE
        self.shape = blocks.shape
        for tensor in (blocks, scales):
            if tensor.dtype != "U8":
                raise FormatError(f"{tensor.path}: {tensor.name} is {tensor.dtype}; mxfp4 blocks and scales are U8")
        if len(blocks.shape) < 3 or blocks.shape[-1] != _TYPE.block // 2 or scales.shape != blocks.shape[:-1]:
            raise FormatError(
                f"{blocks.path}: {blocks.name} of shape {list(blocks.shape)} with scales of shape {list(scales.shape)}"
                f" are no mxfp4: [rows, blocks, {_TYPE.block // 2}] and [rows, blocks] are needed"
            )
        self.rows, blocks_per_row = prod(blocks.shape[:-2]), blocks.shape[-2]
        self.columns = blocks_per_row * _TYPE.block
        self._blocks = replace(blocks, shape=(self.rows, blocks_per_row * blocks.shape[-1]))
        self._scales = replace(scales, shape=(self.rows, blocks_per_row))

    def raw(self, rows: Rows) -> np.ndarray:
        """uint8 [number of rows, row_bytes] in ggml's layout. For single rows, the run that contains them all is read."""
        if isinstance(rows, slice):
            start, stop = rows.start, rows.stop
        else:
            start, stop = int(rows.min()), int(rows.max()) + 1
        blocks, scales = self._blocks.rows(start, stop), self._scales.rows(start, stop)
        if not isinstance(rows, slice):
            blocks, scales = blocks[rows - start], scales[rows - start]
        out = np.empty((len(blocks), _TYPE.row_bytes(self.columns)), np.uint8)
        _reorder(blocks.reshape(-1, _TYPE.block // 2), scales.reshape(-1), out.reshape(-1, _TYPE.block_bytes))
        return out

    def read(self, rows: Rows) -> np.ndarray:
        """float32 [number of rows, columns], exact."""
        return decode(self.raw(rows), _TYPE.name, self.columns)
