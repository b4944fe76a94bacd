"""The numbers of a type's blocks, read out of encoded rows and written back, straight from its layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...formats import TYPES, TensorType
from ...formats.layouts import BlockLayout, layout_of
from ...simd.compile import kernel

_ROW_SCALES = {"f16": np.float16, "f32": np.float32}


@kernel
def _read_numbers(q, start, block_bytes, addresses, out):
    """Fills out, integers [rows, blocks, count], with numbers at bit addresses [rows of a group, count, width] of blocks.

    q: uint8 [groups, bytes], whose blocks begin at `start`
    """
    for row in range(out.shape[0]):
        group, member = row // addresses.shape[0], row % addresses.shape[0]
        for block in range(out.shape[1]):
            first = start + block * block_bytes
            for i in range(addresses.shape[1]):
                number = 0
                for bit in range(addresses.shape[2]):
                    at = addresses[member, i, bit]
                    number |= (np.int64(q[group, first + (at >> 3)]) >> (at & 7) & 1) << bit
                out[row, block, i] = number


@kernel
def _write_numbers(numbers, start, block_bytes, addresses, q):
    """Sets the bits of numbers, integers [rows, blocks, count], in q; the inverse of `_read_numbers`."""
    for row in range(numbers.shape[0]):
        group, member = row // addresses.shape[0], row % addresses.shape[0]
        for block in range(numbers.shape[1]):
            first = start + block * block_bytes
            for i in range(addresses.shape[1]):
                number = np.int64(numbers[row, block, i])
                for bit in range(addresses.shape[2]):
                    at = addresses[member, i, bit]
                    byte = q[group, first + (at >> 3)]
                    q[group, first + (at >> 3)] = byte & ~(1 << (at & 7)) | (number >> bit & 1) << (at & 7)


@dataclass(frozen=True)
class BlockFields:
    """Reads and writes the fields of the rows (uint8 [rows, row_bytes]) of a type that has an encoding of its own.

    See `BlockLayout`. Where a type interleaves rows, arrays are of whole groups of them.
    """

    type: TensorType
    layout: BlockLayout

    @classmethod
    def of(cls, type_name: str) -> BlockFields:
        return cls(TYPES[type_name], layout_of(type_name))

    def _groups(self, q: np.ndarray) -> tuple[np.ndarray, int, int]:
        """The bytes of groups of rows [groups, bytes], a view; where their blocks begin; the bytes of a block of all rows."""
        rows = self.type.rows
        return q.reshape(len(q) // rows, -1), rows * self.type.row_meta, rows * self.type.block_bytes

    def read(self, q: np.ndarray, name: str) -> np.ndarray:
        """The numbers of a field: uint8 (wider ones: uint32) [rows, numbers of all blocks]."""
        addresses = getattr(self.layout, name)
        blocks = (q.shape[1] - self.type.row_meta) // self.type.block_bytes
        out = np.empty((len(q), blocks, addresses.shape[1]), np.uint8 if addresses.shape[2] <= 8 else np.uint32)
        if self.layout.gray_words and name == "codes":
            words = self._words(q) & 0xFFFE
            q = self._with_words(q, words ^ words >> 1)
        groups, start, block_bytes = self._groups(q)
        _read_numbers(groups, start, block_bytes, addresses, out)
        return out.reshape(len(q), -1)

    def write(self, q: np.ndarray, name: str, numbers: np.ndarray) -> None:
        """Puts numbers as `read` gives them into q (C-contiguous); the other bits stay."""
        addresses = getattr(self.layout, name)
        numbers = numbers.reshape(len(q), -1, addresses.shape[1])
        if self.layout.gray_words and name == "codes":
            gray = np.zeros_like(q)
            groups, start, block_bytes = self._groups(gray)
            _write_numbers(numbers, start, block_bytes, addresses, groups)
            words = self._words(gray)
            for shift in (1, 2, 4, 8):  # every bit becomes the sum of those from it on
                words = words ^ words >> shift
            q[:] = self._with_words(q, self._words(q) & 1 | words & 0xFFFE)
            return
        groups, start, block_bytes = self._groups(q)
        _write_numbers(numbers, start, block_bytes, addresses, groups)

    def copy_rows(self, source: np.ndarray, target: np.ndarray, rows: np.ndarray) -> None:
        """Makes the rows of target for which `rows` (bool) is set those of source."""
        if self.type.rows == 1:
            target[rows] = source[rows]
            return
        for name in self.layout.bit_arrays():
            self.write(target, name, np.where(rows[:, None], self.read(source, name), self.read(target, name)))
        if self.layout.row_scale is not None:
            self.write_scale(target, np.where(rows[:, None], self.read_scale(source), self.read_scale(target)))

    def _row_metas(self, q: np.ndarray) -> np.ndarray:
        """What precedes the blocks of rows: uint8 [rows, row_meta], a copy where rows are interleaved."""
        groups, start, _ = self._groups(q)
        return groups[:, :start].reshape(len(q), -1)

    def _words(self, q: np.ndarray) -> np.ndarray:
        """The blocks of rows as uint16 [rows, words]."""
        return np.ascontiguousarray(q[:, self.type.row_meta :]).view("<u2")

    def _with_words(self, q: np.ndarray, words: np.ndarray) -> np.ndarray:
        return np.concatenate([q[:, : self.type.row_meta], words.astype("<u2").view(np.uint8)], axis=1)

    def read_scale(self, q: np.ndarray) -> np.ndarray:
        """d of every block, or of every row: float32 [rows, blocks or 1]."""
        if self.layout.row_scale is not None:
            dtype = np.dtype(_ROW_SCALES[self.layout.row_scale])
            return np.ascontiguousarray(self._row_metas(q)[:, : dtype.itemsize]).view(dtype).astype(np.float32)
        stored = self.read(q, "d")
        if self.layout.d_format == "e8m0":
            return np.ldexp(np.float32(1), stored.astype(np.int32) - 128).astype(np.float32)
        return stored.astype(np.uint16).view(np.float16).astype(np.float32)

    def write_scale(self, q: np.ndarray, d: np.ndarray) -> None:
        """Stores d, which has to be representable."""
        if self.layout.row_scale is not None:
            stored = d.astype(_ROW_SCALES[self.layout.row_scale]).view(np.uint8).reshape(len(q), -1)
            metas = self._row_metas(q).copy()
            metas[:, : stored.shape[1]] = stored
            groups, start, _ = self._groups(q)
            groups[:, :start] = metas.reshape(len(groups), -1)
        elif self.layout.d_format == "e8m0":
            self.write(q, "d", (np.frexp(d)[1] + 127).astype(np.uint8))
        else:
            self.write(q, "d", d.astype(np.float16).view(np.uint16))

    def read_half(self, q: np.ndarray, name: str) -> np.ndarray:
        """A float16 field (dmin, offset) as float32 [rows, blocks]."""
        return self.read(q, name).astype(np.uint16).view(np.float16).astype(np.float32)

    def write_half(self, q: np.ndarray, name: str, values: np.ndarray) -> None:
        self.write(q, name, values.astype(np.float16).view(np.uint16))
