"""The kernels as functions of tensors: which types and devices they serve, sizes of tiles, and the launches."""

# Constants of kernels are declared constexpr, which Python values are not to pyright.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .....formats.layouts import layout_of
from . import kernels
from .block_format import block_format
from .byte_source import byte_kernel, byte_table
from .bytes4 import IS_INTERPRETED
from .dependent import launched
from .unit_source import LANES, unit_kernel, unit_tables
from .units import units_of
from .vector_bytes import VectorBytes

# Tiles, in rows and columns of weights, and warps of a program. On an H200 the fewest warps were fastest.
_DECODE_TILE, _DECODE_WARPS = (4, 512), 2
_VECTOR_TILE = 8, 512
# Words of a unit and rows of a program, by how codes are read; the fastest of those tried on an H200. Fewer rows take fewer
# registers, more read x less often.
_IN_VECTORS, _BY_TABLE, _OTHERS = (4, 8), (2, 4), (4, 4)
# Of products of bytes: words of a unit, the first that a type has, and weights, at most; rows and warps of a program, where it
# has several vectors, and for one where there are many rows, and else. The fastest of those tried on an H100.
_BYTE_WORDS, _CODEBOOK_WORDS, _BYTE_WEIGHTS = (4, 2, 8, 1), (2, 4, 1), 64
_BYTE_TILE, _BYTE_TILE_OF_MANY, _BYTE_TILE_OF_FEW, _MANY_ROWS = (4, 1), (4, 2), (2, 2), 6144
_CODEBOOK_WEIGHTS = 32  # of a unit at most, where codes stand for several weights
_ROWS_OF_SEVERAL = 2  # of a program for several vectors
_VECTORS = 4  # of a program at most


class PackedProducts:
    """Products of one type on one device, from the bytes of all its rows."""

    def __init__(self, type_name: str, device: torch.device):
        """Raises KeyError for a type that the kernels do not read."""
        layout, format = layout_of(type_name), block_format(type_name)
        if format is None:
            raise KeyError(type_name)
        self._format = format
        self._values = torch.tensor(layout.decoded_values.reshape(-1), dtype=torch.float32, device=device)
        levels = [0] if layout.levels is None else layout.levels
        self._levels = torch.tensor(levels, dtype=torch.float32, device=device)
        self._words, self._rows = unit_tile(type_name)
        units = units_of(type_name, self._words) if self._words else None
        if units is not None:
            values, *self._magics = unit_tables(type_name)
            self._unit_columns = LANES * len(units.places)  # of a program at a time
            self._unit_values = torch.from_numpy(values).to(device)
        self._type = type_name
        self._byte_words = byte_tile(type_name)
        self.has_bytes = bool(self._byte_words) and (torch.version.hip is None or IS_INTERPRETED)
        if self.has_bytes:
            self._byte_values = torch.from_numpy(byte_table(type_name)).to(device)
            units = units_of(type_name, self._byte_words)
            assert units is not None
            self._weights_of_unit = len(units.places)
        self.vectors = 2 * _VECTORS if self._words else 1  # of one matrix, for which `matvec` is to be used

    def decode(self, data: Tensor, columns: int, first: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows first ... first + count - 1, bit for bit, rounded to a type: [count, columns]. data: uint8, the bytes of all
        rows."""
        out = torch.empty((count, columns), device=data.device, dtype=dtype)
        rows, width = _DECODE_TILE
        grid = -(-count // rows), -(-columns // width)
        kernels.decode_rows[grid](
            data,
            self._values,
            self._levels,
            out,
            first,
            count,
            columns,
            self._format,
            rows,
            width,
            enable_fp_fusion=False,
            num_warps=_DECODE_WARPS,
            **launched(data.device),
        )
        return out

    def matvec(self, data: Tensor, x: Tensor, matrices: Tensor, count: int, same: bool = False) -> Tensor:
        """Stacked matrices of `count` rows times vectors: float32 [pairs, count].

        x: [n, columns]; matrices: integers [pairs], which, of which pairs / n neighbouring ones are for each row of x. same:
        one number, for all rows.
        """
        pairs = len(x) if same else len(matrices)
        out = torch.empty((pairs, count), device=data.device)
        x, matrices = x.contiguous(), matrices.contiguous()
        x_per_matrix = max(1, pairs // max(1, len(x)))
        if self._words and data.data_ptr() % 16 == 0:  # words are loaded whole
            vectors = min(_VECTORS, 1 << (pairs - 1).bit_length()) if same else 1
            rows = self._rows if vectors == 1 else _ROWS_OF_SEVERAL
            kernel = unit_kernel(self._type, self._words, rows, vectors)
            even = x.shape[1] % self._unit_columns == 0
            kernel[-(-count // rows), -(-pairs // vectors)](
                data, self._unit_values, self._levels, x, matrices, out, count, x.shape[1], pairs, x_per_matrix, *self._magics,
                even, same, num_warps=1, **launched(data.device),
            )  # fmt: skip
            return out
        rows, width = _VECTOR_TILE
        kernels.matvec[-(-count // rows), pairs](
            data, self._values, self._levels, x, matrices, out, count, x.shape[1], x_per_matrix, self._format, rows, width,
            same, **launched(data.device),
        )  # fmt: skip
        return out

    def multiplies_bytes(self, data: Tensor, dtype: torch.dtype) -> bool:
        """Whether vectors that may be rounded to a type are to be multiplied as bytes."""
        return self.has_bytes and dtype != torch.float32 and data.data_ptr() % 16 == 0

    def matvec_bytes(
        self, data: Tensor, x: VectorBytes, matrices: Tensor, count: int, columns: int, same: bool = False
    ) -> Tensor:
        """As `matvec`, of vectors as bytes."""
        return self._multiply_bytes([(data, count)], x, matrices, columns, same)[0]

    def matvec_bytes_of(self, parts: Sequence[tuple[Tensor, int]], x: VectorBytes, first: Tensor, columns: int) -> list[Tensor]:
        """Products of all rows of x with up to three matrices, of these bytes and numbers of rows, by one kernel. first:
        the number 0 on the device."""
        return self._multiply_bytes(parts, x, first, columns, True)

    def _multiply_bytes(
        self, parts: Sequence[tuple[Tensor, int]], x: VectorBytes, matrices: Tensor, columns: int, same: bool
    ) -> list[Tensor]:
        (data, count), device = parts[0], parts[0][0].device
        pairs, counts = len(x.words) if same else len(matrices), [each for _, each in parts]
        out = torch.empty(pairs * sum(counts), device=device)
        x_per_matrix = max(1, pairs // max(1, len(x.words)))
        vectors = min(_VECTORS, 1 << (pairs - 1).bit_length()) if same else 1
        of_one = _BYTE_TILE_OF_MANY if sum(counts) >= _MANY_ROWS else _BYTE_TILE_OF_FEW
        rows, warps = _BYTE_TILE if vectors > 1 else of_one
        warps = warps if columns > 32 * self._weights_of_unit else 1
        kernel = byte_kernel(self._type, self._byte_words, rows, vectors, LANES * warps)
        even = columns % (LANES * warps * self._weights_of_unit) == 0
        others = [(other.data_ptr() - data.data_ptr(), each) for other, each in parts[1:]]
        (distance1, count1), (distance2, count2) = [*others, (0, 0), (0, 0)][:2]
        kernel[sum(-(-each // rows) for each in counts), -(-pairs // vectors)](
            data, self._byte_values, self._levels, x.words, x.words.shape[1], x.part_words, matrices.contiguous(), out, count,
            columns, pairs, x_per_matrix, distance1, count1, distance2, count2, len(parts) > 1, even, same, num_warps=warps,
            **launched(device),
        )  # fmt: skip
        return [part.view(pairs, -1) for part in out.split([pairs * each for each in counts])]


def byte_tile(type_name: str) -> int:
    """Words of the units in which bytes are multiplied; 0 for types without."""
    form = block_format(type_name)
    for words in _BYTE_WORDS if form is None or form.size == 1 else _CODEBOOK_WORDS:
        units = units_of(type_name, words)
        if units is not None and len(units.places) <= _BYTE_WEIGHTS and byte_kernel(type_name, words, 1, 1, LANES) is not None:
            return words
    return 0


def unit_tile(type_name: str) -> tuple[int, int]:
    """Words of the units in which a type's vectors are multiplied, and rows of a program; words are 0 for types without."""
    form, all_words = block_format(type_name), (1, 2, 4, 8)
    sizes = {words: len(units.places) for words in all_words if (units := units_of(type_name, words)) is not None}
    if not sizes or form is None:
        return 0, 0
    if form.size > 1:
        few = [words for words in sizes if sizes[words] <= _CODEBOOK_WEIGHTS]
        return max(few, default=min(sizes)), _OTHERS[1]
    whole = [form.codes.parts[0].first // (1 if form.codes.parts[0].aligned else 8), form.block_bytes, form.meta_bytes]
    if not any(n % 16 for n in whole) and len(form.codes.parts) == 1:
        words, rows = _IN_VECTORS
    else:
        words, rows = _OTHERS if form.values.step else _BY_TABLE
    return min(sizes, key=lambda other: (abs(other - words), other)), rows
