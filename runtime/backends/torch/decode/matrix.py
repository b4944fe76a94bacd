"""`PackedMatrix`: the rows of a tensor, one matrix or several stacked ones, as the bytes of its file on a device of torch.

Products decode tile by tile: at most TILE_WEIGHTS weights at a time, or KERNELS_TILE_WEIGHTS where Triton serves the
device; with few vectors only what a kernel has in registers there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .....errors import PlanError
from .....formats import TYPES, TensorType, dims
from .....quantize import can_encode, decode
from .....quantize.torch_encoders.decoder import Decoder, decoder_of
from ..triton import MOST_TOGETHER, kernels_of, row_kernels

TILE_WEIGHTS = 8 << 20  # decoded at a time: 32 MiB of float32
KERNELS_TILE_WEIGHTS = (
    64 << 20
)  # by kernels, in the type of the product: 128 MiB of bfloat16; smaller ones are slower on an H200
_ROOM = 4  # times as many rows as there are, at most, that are multiplied when experts are taken together
_PAIRS = 64  # tokens times experts, at most, that are multiplied one by one in a single kernel


class StoredMatrix(Protocol):
    """What `packed` reads of a tensor of a GGUF file (`formats.TensorInfo`): data is uint8 [rows, row_bytes]."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> TensorType | str: ...
    @property
    def data(self) -> np.ndarray: ...


def packed(tensor: StoredMatrix, device: torch.device | str) -> PackedMatrix:
    """A tensor of a file -> its bytes on a device. On the CPU they stay where they are (a memory-mapped file is not read)."""
    columns, rows, matrices = dims(tensor.shape)
    name = tensor.type if isinstance(tensor.type, str) else tensor.type.name
    data = np.ascontiguousarray(tensor.data).reshape(-1)
    with warnings.catch_warnings():  # torch warns of arrays that cannot be written to; nothing here writes
        warnings.simplefilter("ignore", UserWarning)
        stored = torch.from_numpy(data)
    return PackedMatrix(name, columns, rows, matrices, stored.to(device))


def _decoder(type: str, device: torch.device) -> Decoder | Callable[[Tensor, int], Tensor]:
    """On a processor compiled decoders take a thirtieth of the time of torch's operations, for the same numbers."""
    if device.type != "cpu" or not can_encode(TYPES[type]):
        return decoder_of(type, device)
    return lambda groups, n: torch.from_numpy(decode(groups.numpy().reshape(-1, TYPES[type].row_bytes(n)), type, n))


class PackedMatrix:
    """type: name of the tensor type; columns: weights per row; rows: of one matrix; matrices: how many are stacked (experts);
    data: uint8, the tensor's bytes.

    Raises PlanError where the bytes are not those of such a tensor."""

    def __init__(self, type: str, columns: int, rows: int, matrices: int, data: Tensor):
        kind = TYPES[type]
        if data.numel() != kind.row_bytes(columns) * rows * matrices or rows % kind.rows:
            raise PlanError(f"{matrices} x {rows} rows of {columns} weights in {type} are not {data.numel()} bytes")
        self.type, self.columns, self.rows_per_matrix, self.matrices = type, columns, rows, matrices
        self.data = data.reshape(matrices * rows // kind.rows, kind.rows * kind.row_bytes(columns))
        self.device, self.group_rows = data.device, kind.rows
        self._decoder = _decoder(type, data.device)
        self._kernels = kernels_of(type, data.device)
        self._numbers = torch.arange(matrices, device=data.device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.data.numel()

    def rows(self, start: int, stop: int, matrix: int = 0) -> Tensor:
        """Rows start ... stop - 1 of a matrix, decoded: float32 [stop - start, columns]."""
        base = matrix * self.rows_per_matrix
        if self._kernels is not None and stop > start:
            return self._kernels.decode(self.data, self.columns, base + start, stop - start)
        first, last = (base + start) // self.group_rows, -(-(base + stop) // self.group_rows)
        decoded = self._decoder(self.data[first:last], self.columns)
        offset = base + start - first * self.group_rows
        return decoded[offset : offset + stop - start]

    def gather(self, ids: Tensor, matrix: int = 0) -> Tensor:
        """Rows by number, as of an embedding: integers [...] -> float32 [..., columns]."""
        flat = ids.reshape(-1).to(self.device, torch.int64) + matrix * self.rows_per_matrix
        out = torch.empty((len(flat), self.columns), device=self.device)
        step = max(1, TILE_WEIGHTS // (self.columns * self.group_rows))
        for at in range(0, len(flat), step):
            part = flat[at : at + step]
            groups = self._decoder(self.data.index_select(0, part // self.group_rows), self.columns)
            groups = groups.view(len(part), self.group_rows, self.columns)
            out[at : at + step] = groups[torch.arange(len(part), device=self.device), part % self.group_rows]
        return out.view(*ids.shape, self.columns)

    def matmul(
        self, x: Tensor, dtype: torch.dtype = torch.float32, matrix: int = 0, prepared: dict[Any, Any] | None = None
    ) -> Tensor:
        """x [n, columns] times the transposed matrix -> float32 [n, rows].

        dtype: what weights and activations are rounded to before the product (float32, bfloat16 or float16); the sums of
        torch's matrix product are float32 in any case. float32 means full float32, also where torch may use TF32 elsewhere.
        Kernels for few vectors do not round weights, and vectors to whole numbers of 16 bits, or to the dtype. prepared: what
        products have made of x, and what this one makes for others.
        """
        if self._kernels is not None and 0 < len(x) <= self._kernels.vectors:
            return self._matvec(x, dtype, self._numbers[matrix : matrix + 1], True, prepared)
        prepared = {} if prepared is None else prepared
        if dtype not in prepared or prepared[dtype].device != x.device:
            prepared[dtype] = x.to(dtype)
        x = prepared[dtype]
        if len(self._tiles()) == 1:
            return _product(x, self._rounded_rows(0, self.rows_per_matrix, matrix, dtype))
        out = torch.empty((len(x), self.rows_per_matrix), device=self.device)
        for start, stop in self._tiles():
            out[:, start:stop] = _product(x, self._rounded_rows(start, stop, matrix, dtype))
        return out

    def together(self, others: Sequence[PackedMatrix], count: int, dtype: torch.dtype) -> int:
        """With how many of the others, from the first on, one kernel multiplies so many vectors; 0: not."""
        kernels = self._kernels
        if kernels is None or not 0 < count <= kernels.vectors or not kernels.multiplies_bytes(self.data, dtype):
            return 0
        for number, other in enumerate(others[: MOST_TOGETHER - 1]):
            is_alike = (other.type, other.columns, other.device) == (self.type, self.columns, self.device)
            if not is_alike or not kernels.multiplies_bytes(other.data, dtype):
                return number
        return min(len(others), MOST_TOGETHER - 1)

    def matmul_together(self, others: Sequence[PackedMatrix], x: Tensor, prepared: dict[Any, Any] | None) -> list[Tensor]:
        """`matmul` of this matrix and of others that `together` allows."""
        parts, kernels = [(each.data, each.rows_per_matrix) for each in (self, *others)], self._kernels
        assert kernels is not None
        return kernels.matvec_bytes_of(parts, self._as_bytes(x, prepared), self._numbers[:1], self.columns)

    def _as_bytes(self, x: Tensor, prepared: dict[Any, Any] | None) -> Any:
        prepared = {} if prepared is None else prepared
        if self.device not in prepared:
            prepared[self.device] = row_kernels(self.device).as_bytes(x)
        return prepared[self.device]

    def _matvec(
        self, x: Tensor, dtype: torch.dtype, matrices: Tensor, same: bool, prepared: dict[Any, Any] | None = None
    ) -> Tensor:
        """Few vectors times the matrices of these numbers, as `PackedProducts.matvec`."""
        kernels = self._kernels
        assert kernels is not None
        if not kernels.multiplies_bytes(self.data, dtype):
            return kernels.matvec(self.data, x.to(dtype), matrices, self.rows_per_matrix, same)
        words = self._as_bytes(x, prepared)
        return kernels.matvec_bytes(self.data, words, matrices, self.rows_per_matrix, self.columns, same)

    def _rounded_rows(self, start: int, stop: int, matrix: int, dtype: torch.dtype) -> Tensor:
        if self._kernels is None:
            return self.rows(start, stop, matrix).to(dtype)
        return self._kernels.decode(self.data, self.columns, matrix * self.rows_per_matrix + start, stop - start, dtype)

    def matmul_experts(
        self, x: Tensor, experts: Tensor, dtype: torch.dtype = torch.float32, prepared: dict[Any, Any] | None = None
    ) -> Tensor:
        """Each token times the matrices of its experts: float32 [n, k, rows].

        x        [n, columns], the same for all experts of a token, or [n, k, columns]
        experts  integers [n, k]: which matrices
        """
        n, k = experts.shape
        if self._kernels is not None and 0 < n * k <= _PAIRS:
            chosen = experts.reshape(-1).to(self.device)
            return self._matvec(x.reshape(-1, self.columns), dtype, chosen, False, prepared).view(n, k, -1)
        each, flat, numbers = k if x.ndim == 2 else 1, x.reshape(-1, self.columns), experts.reshape(-1)
        if self._kernels is not None:
            found = self._by_batch(flat, numbers, each, dtype)
            if found is not None:
                return found.view(n, k, -1)
        out = torch.empty((n * k, self.rows_per_matrix), device=self.device)
        for matrix in torch.unique(numbers).tolist():
            rows = torch.nonzero(numbers == matrix)[:, 0]
            out[rows] = self.matmul(flat[rows // each], dtype, matrix)
        return out.view(n, k, self.rows_per_matrix)

    def _by_batch(self, x: Tensor, numbers: Tensor, each: int, dtype: torch.dtype) -> Tensor | None:
        """Row i // each of x times matrix numbers[i], of as many matrices at once as are decoded at once, for each of which
        there is room for the rows of the one that has most. None where that would be most of the work."""
        counts = torch.bincount(numbers, minlength=self.matrices).tolist()
        most = max(counts)
        if most * self.matrices > _ROOM * len(numbers):
            return None
        starts = np.cumsum([0, *counts])
        order = torch.argsort(numbers, stable=True)
        within = torch.arange(len(order), device=self.device) - torch.from_numpy(starts).to(self.device)[numbers[order]]
        places = numbers[order] * most + within
        out = torch.empty((len(numbers), self.rows_per_matrix), device=self.device)
        step = max(1, KERNELS_TILE_WEIGHTS // (self.rows_per_matrix * self.columns))
        for first in range(0, self.matrices, step):
            count = min(step, self.matrices - first)
            part = slice(int(starts[first]), int(starts[first + count]))
            members, own = order[part], places[part] - first * most
            room = torch.zeros((count * most, self.columns), dtype=dtype, device=self.device)
            room[own] = x[members // each].to(dtype)
            rows = self._rounded_rows(0, count * self.rows_per_matrix, first, dtype).view(count, self.rows_per_matrix, -1)
            out[members] = _product(room.view(count, most, -1), rows).view(count * most, -1)[own]
        return out

    def matmul_rows(self, g: Tensor, matrix: int = 0) -> Tensor:
        """g [n, rows] times the matrix itself -> float32 [n, columns]: the gradient of what `matmul` is given, of the gradient
        of its result. In float32, tile by tile."""
        out = torch.zeros((len(g), self.columns), device=self.device)
        for start, stop in self._tiles():
            out += g[:, start:stop] @ self.rows(start, stop, matrix)
        return out

    def matmul_expert_rows(self, g: Tensor, experts: Tensor) -> Tensor:
        """As `matmul_rows`, of `matmul_experts`: g [n, k, rows], experts integers [n, k] -> float32 [n, k, columns]."""
        flat, numbers = g.reshape(-1, self.rows_per_matrix), experts.reshape(-1)
        out = torch.empty((len(flat), self.columns), device=self.device)
        for matrix in torch.unique(numbers).tolist():
            tokens = torch.nonzero(numbers == matrix)[:, 0]
            out[tokens] = self.matmul_rows(flat[tokens], matrix)
        return out.view(*experts.shape, self.columns)

    def _tiles(self) -> list[tuple[int, int]]:
        """Ranges of rows, whole groups, of at most TILE_WEIGHTS weights."""
        weights = TILE_WEIGHTS if self._kernels is None else KERNELS_TILE_WEIGHTS
        step = max(1, weights // (self.columns * self.group_rows)) * self.group_rows
        return [(start, min(start + step, self.rows_per_matrix)) for start in range(0, self.rows_per_matrix, step)]


def _product(x: Tensor, rows: Tensor) -> Tensor:
    """x times the transposed rows, of one matrix or of as many as there are of x, in float32 where torch offers that for
    narrower types."""
    if x.device.type == "cuda" and torch.version.hip is None and x.dtype != torch.float32 and len(x):
        return (torch.mm if x.ndim == 2 else torch.bmm)(x, rows.mT, out_dtype=torch.float32)  # since torch 2.8
    return (x @ rows.mT).float()
