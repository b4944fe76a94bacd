"""The numbers of a type's blocks, read out of encoded rows and written back, straight from its layout."""

from __future__ import annotations

from functools import cache

import numpy as np

from ...data_classes import dataclass
from ...formats import TYPES, TensorType
from ...formats.layouts import BlockLayout, layout_of
from ...formats.layouts.byte_parts import byte_parts
from ...simd.byte_lanes import load_bytes, store_bytes
from ...simd.compile import kernel
from ...simd.lanes import LANES

_ROW_SCALES = {"f16": np.float16, "f32": np.float32}


# Columns of the table of a field: numbers FIRST, FIRST + STEP ... (COUNT of them) of a row of the group have their bits from UP
# on in the bytes BYTE, BYTE + STRIDE ..., under the mask MASK << SHIFT.
_ROW, _FIRST, _STEP, _COUNT, _BYTE, _STRIDE, _SHIFT, _MASK, _UP = range(9)


@cache
def _runs(type_name: str, name: str) -> np.ndarray:
    """int64 [runs, 9]: where the numbers of a field lie."""
    runs: list[list[int]] = []
    for part in byte_parts(getattr(layout_of(type_name), name)):
        for row in range(len(part.byte)):
            kinds = np.stack([part.shift[row], part.mask[row]], axis=1)
            for shift, mask in np.unique(kinds, axis=0).tolist():
                numbers = np.flatnonzero((kinds == (shift, mask)).all(axis=1)).tolist()
                places = [(number, int(part.byte[row, number])) for number in numbers]
                while places:
                    first, count = places[0], 1
                    step = tuple(np.subtract(places[1], first).tolist()) if len(places) > 1 else (1, 1)
                    while count < len(places) and tuple(np.subtract(places[count], places[count - 1]).tolist()) == step:
                        count += 1
                    runs.append([row, first[0], step[0], count, first[1], step[1], shift, mask, part.up])
                    places = places[count:]
    return np.array(runs)


@kernel
def _read_numbers(q, start, block_bytes, rows, runs, out):
    """Fills out, integers [rows, blocks, count], all 0 before, with the numbers of blocks.

    q: uint8 [groups, bytes], whose blocks begin at `start`; rows: of a group
    """
    for group in range(q.shape[0]):
        for block in range(out.shape[1]):
            for i in range(runs.shape[0]):
                numbers, number = out[group * rows + runs[i, _ROW], block], runs[i, _FIRST]
                at = start + block * block_bytes + runs[i, _BYTE]
                shift, mask, up = runs[i, _SHIFT], runs[i, _MASK], runs[i, _UP]
                if runs[i, _STEP] == 1 and runs[i, _STRIDE] == 1:
                    for k in range(runs[i, _COUNT]):
                        numbers[number + k] |= (np.int64(q[group, at + k]) >> shift & mask) << up
                else:
                    for _ in range(runs[i, _COUNT]):
                        numbers[number] |= (np.int64(q[group, at]) >> shift & mask) << up
                        number, at = number + runs[i, _STEP], at + runs[i, _STRIDE]


@kernel
def _write_numbers(values, are_bytes, start, block_bytes, rows, runs, q):
    """Sets the bits of integers [rows, blocks, count] in q; the inverse of `_read_numbers`. are_bytes: True for uint8,
    which are taken sixteen at a time, else None."""
    flat, flat_values = q.reshape(-1), values.reshape(-1)
    for group in range(q.shape[0]):
        for block in range(values.shape[1]):
            for i in range(runs.shape[0]):
                row, count = group * rows + runs[i, _ROW], runs[i, _COUNT]
                number = (row * values.shape[1] + block) * values.shape[2] + runs[i, _FIRST]
                at = group * q.shape[1] + start + block * block_bytes + runs[i, _BYTE]
                shift, mask, up = runs[i, _SHIFT], runs[i, _MASK], runs[i, _UP]
                kept = ~(mask << shift) & 255
                done = 0
                if are_bytes is not None and runs[i, _STEP] == 1 and runs[i, _STRIDE] == 1:
                    done = count & -LANES
                    for k in range(0, done, LANES):
                        bits = (load_bytes(flat_values, number + k) >> up & mask) << shift
                        store_bytes(flat, at + k, load_bytes(flat, at + k) & kept | bits)
                for k in range(done, count):
                    to, value = at + k * runs[i, _STRIDE], flat_values[number + k * runs[i, _STEP]]
                    flat[to] = flat[to] & kept | (np.int64(value) >> up & mask) << shift


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
        out = np.zeros((len(q), blocks, addresses.shape[1]), np.uint8 if addresses.shape[2] <= 8 else np.uint32)
        if self.layout.gray_words and name == "codes":
            words = self._words(q) & 0xFFFE
            q = self._with_words(q, words ^ words >> 1)
        groups, start, block_bytes = self._groups(q)
        _read_numbers(groups, start, block_bytes, self.type.rows, _runs(self.type.name, name), out)
        return out.reshape(len(q), -1)

    def write(self, q: np.ndarray, name: str, numbers: np.ndarray) -> None:
        """Puts numbers as `read` gives them into q (C-contiguous); the other bits stay."""
        addresses = getattr(self.layout, name)
        numbers = np.ascontiguousarray(numbers).reshape(len(q), -1, addresses.shape[1])
        if self.layout.gray_words and name == "codes":
            gray = np.zeros_like(q)
            self._put(numbers, name, gray)
            words = self._words(gray)
            for shift in (1, 2, 4, 8):  # every bit becomes the sum of those from it on
                words = words ^ words >> shift
            q[:] = self._with_words(q, self._words(q) & 1 | words & 0xFFFE)
            return
        self._put(numbers, name, q)

    def _put(self, numbers: np.ndarray, name: str, q: np.ndarray) -> None:
        groups, start, block_bytes = self._groups(q)
        are_bytes = True if numbers.dtype == np.uint8 else None
        _write_numbers(numbers, are_bytes, start, block_bytes, self.type.rows, _runs(self.type.name, name), groups)

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

    def pack(self, rows: int, n: int, **numbers: np.ndarray) -> np.ndarray:
        """uint8 [rows, row_bytes] of n weights each, with the numbers of each field, integers [any, of its blocks]; what is not
        given is 0. d: float16 (or the float32 of a row), or its bits."""
        q = np.zeros((rows, self.type.row_bytes(n)), np.uint8)
        for name, values in numbers.items():
            if name != "d":
                self.write(q, name, values)
            elif self.layout.row_scale is not None:
                self.write_scale(q, values.view(np.float16) if values.dtype == np.uint16 else values)
            else:
                self.write(q, name, values.view(np.uint16))
        return q
