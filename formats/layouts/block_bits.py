"""Rows of a tensor type as bits, in which numbers are read and written by the addresses of a layout."""

from __future__ import annotations

import numpy as np

from ...data_classes import dataclass
from ...errors import PlanError
from ..types import TYPES
from .table import layout_of


@dataclass
class BlockBits:
    """bits: uint8 [groups, blocks, 8 * bytes], of a group of interleaved rows (for plain types one row) those of all its rows;
    metas: uint8 [groups, rows, row_meta], the bytes before the rows' first blocks."""

    bits: np.ndarray
    metas: np.ndarray

    @classmethod
    def unpack(cls, q: np.ndarray, type_name: str, n: int) -> BlockBits:
        """uint8 [rows, row_bytes]; rows are whole groups. Raises PlanError for rows that are no whole groups of n elements."""
        kind, layout = TYPES[type_name], layout_of(type_name)
        if q.ndim != 2 or q.shape[1] != kind.row_bytes(n) or len(q) % kind.rows or n % layout.block:
            raise PlanError(f"{kind.name} rows of {n} elements take {kind.row_bytes(n)} bytes each, not an array of {q.shape}")
        groups = np.ascontiguousarray(q).reshape(len(q) // kind.rows, -1)
        metas, blocks = np.split(groups, [kind.rows * kind.row_meta], axis=1)
        block_bytes = kind.rows * (kind.row_bytes(layout.block) - kind.row_meta)
        blocks = blocks.reshape(len(groups), n // layout.block, block_bytes)
        return cls(np.unpackbits(blocks, axis=2, bitorder="little"), metas.reshape(len(groups), kind.rows, -1))

    def packed(self) -> np.ndarray:
        """What `unpack` took: uint8 [rows, row_bytes]."""
        blocks = np.packbits(self.bits, axis=2, bitorder="little").reshape(len(self.bits), -1)
        groups = np.concatenate([self.metas.reshape(len(self.metas), -1), blocks], axis=1)
        return groups.reshape(self.metas.shape[0] * self.metas.shape[1], -1)

    def numbers(self, addresses: np.ndarray) -> np.ndarray:
        """Unsigned numbers at bit addresses [rows, n, width], int64 (uint64 of 64 bits) [groups, blocks, rows, n]."""
        powers = np.uint64(1) << np.arange(addresses.shape[-1], dtype=np.uint64)
        return (self.bits[:, :, addresses] * powers).sum(axis=-1, dtype=np.uint64).view(np.int64)

    def put(self, addresses: np.ndarray, numbers: np.ndarray) -> None:
        """Writes what `numbers` reads, int64 [groups, blocks, rows, n]."""
        self.bits[:, :, addresses] = numbers[..., None] >> np.arange(addresses.shape[-1]) & 1

    def float16s(self, addresses: np.ndarray) -> np.ndarray:
        """float32 [groups, blocks, rows, n]."""
        return self.numbers(addresses).astype(np.uint16).view(np.float16).astype(np.float32)

    def put_float16s(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Values [groups, blocks, rows, n], rounded to float16."""
        self.put(addresses, values.astype(np.float16).view(np.uint16).astype(np.int64))
