"""The kernels as functions of tensors: which types and devices they serve, sizes of tiles, and the launches."""

# Constants of kernels are declared constexpr, which Python values are not to pyright.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from .....formats.layouts import layout_of
from . import kernels
from .block_format import block_format

# Tiles, in rows and columns of weights (and tokens). A vector's product reads whole runs of blocks of few rows, so that there
# are many programs; a matrix product decodes each tile once for all its tokens.
_DECODE_TILE = 16, 256
_VECTOR_TILE = 8, 512
_MATRIX_TILE, _TOKENS, _MIN_TOKENS = (64, 64), 64, 16


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

    def decode(self, data: Tensor, columns: int, first: int, count: int) -> Tensor:
        """Rows first ... first + count - 1, bit for bit: float32 [count, columns]. data: uint8, the bytes of all rows."""
        out = torch.empty((count, columns), device=data.device)
        rows, width = _DECODE_TILE
        grid = -(-count // rows), -(-columns // width)
        kernels.decode_rows[grid](
            data, self._values, self._levels, out, first, count, columns, self._format, rows, width, enable_fp_fusion=False
        )
        return out

    def matvec(self, data: Tensor, x: Tensor, matrices: Tensor, count: int) -> Tensor:
        """Stacked matrices of `count` rows times vectors: float32 [pairs, count].

        matrices: integers [pairs], which; x: [n, columns], of which each row is for pairs / n neighbouring pairs.
        """
        out = torch.empty((len(matrices), count), device=data.device)
        rows, width = _VECTOR_TILE
        x, matrices = x.contiguous(), matrices.contiguous()
        kernels.matvec[-(-count // rows), len(matrices)](
            data, self._values, self._levels, x, matrices, out, count, x.shape[1], max(1, len(matrices) // max(1, len(x))),
            self._format, rows, width,
        )  # fmt: skip
        return out

    def matmul(self, data: Tensor, x: Tensor, first: int, count: int) -> Tensor:
        """x [n, columns] times rows first ... of the tensor, transposed: float32 [n, count]; in the type of x, as torch's."""
        out = torch.empty((len(x), count), device=data.device)
        rows, width = _MATRIX_TILE
        tokens = min(_TOKENS, max(_MIN_TOKENS, 1 << (len(x) - 1).bit_length()))
        x = x.contiguous()
        kernels.matmul[-(-count // rows), -(-len(x) // tokens)](
            data, self._values, self._levels, x, out, first, count, len(x), x.shape[1], self._format, rows, tokens, width
        )
        return out
