"""The tensors of a source on devices of torch: matrices packed as they are stored, small ones decoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....data_classes import dataclass
from ....formats import FormatError, SourceTensor, TensorSource, dims
from ...graph import Weight
from .decode import PackedMatrix, packed

_Copies = dict[tuple[int, torch.device], PackedMatrix]
_FLOATS = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Matrix:
    """A matrix, or a stack of them, of a weight as one op uses it.

    stored   its bytes, on the device where they stay
    device   where products are made: the bytes are copied there for each use, if they lie elsewhere or do not stay
    stays    whether the bytes may stay on the device; else they lie in the machine's memory, even where torch has both as one
    factors  float32 [matrices] that products are multiplied with, since the bytes do not contain them; None: none
    dtype    what weights and activations are rounded to for products
    copies   copies of bytes on other devices than theirs that are kept for now, by the address of the stored matrix; or None
    """

    def __init__(
        self,
        stored: PackedMatrix,
        device: torch.device,
        stays: bool,
        factors: Tensor | None,
        dtype: torch.dtype,
        copies: _Copies | None,
    ):
        self.stored, self.device, self.dtype, self._copies = stored, device, dtype, copies
        self._is_here = stays and stored.device == device
        self.factors = None if factors is None else factors.to(device)

    def _here(self) -> PackedMatrix:
        stored = self.stored
        if self._is_here:
            return stored
        if self._copies is not None and (id(stored), self.device) in self._copies:
            return self._copies[id(stored), self.device]
        sizes = stored.columns, stored.rows_per_matrix, stored.matrices
        copy = PackedMatrix(stored.type, *sizes, stored.data.to(self.device, copy=True))
        if self._copies is not None:
            self._copies[id(stored), self.device] = copy
        return copy

    def multiply(self, x: Tensor, prepared: dict[Any, Any] | None = None) -> Tensor:
        """x float32 [n, columns] -> float32 [n, rows], by the only matrix. prepared: as of `PackedMatrix.matmul`."""
        out = self._here().matmul(x, self.dtype, prepared=prepared)
        return out if self.factors is None else out * self.factors[0]

    def multiply_together(self, others: Sequence[Matrix], x: Tensor, prepared: dict[Any, Any] | None = None) -> list[Tensor]:
        """`multiply` of this matrix and of as many of the others, from the first on, as one kernel multiplies with it."""
        plain = list(takewhile(lambda each: each._is_here and each.factors is None, (self, *others)))
        count = self.stored.together([each.stored for each in plain[1:]], len(x), self.dtype) if plain else 0
        if not count:
            return [self.multiply(x, prepared)]
        return self.stored.matmul_together([each.stored for each in plain[1 : count + 1]], x, prepared)

    def multiply_experts(self, x: Tensor, experts: Tensor, prepared: dict[Any, Any] | None = None) -> Tensor:
        """x float32 [n, columns] or [n, used, columns], experts int64 [n, used] -> float32 [n, used, rows]."""
        out = self._here().matmul_experts(x, experts, self.dtype, prepared)
        return out if self.factors is None else out * self.factors[experts][..., None]

    def multiply_back(self, g: Tensor) -> Tensor:
        """The gradient of what `multiply` was given: g float32 [n, rows], that of its result -> float32 [n, columns]."""
        return self._here().matmul_rows(g if self.factors is None else g * self.factors[0])

    def multiply_experts_back(self, g: Tensor, experts: Tensor) -> Tensor:
        """As `multiply_back`, of `multiply_experts`: g float32 [n, used, rows] -> float32 [n, used, columns]."""
        return self._here().matmul_expert_rows(g if self.factors is None else g * self.factors[experts][..., None], experts)

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Rows of a table: [...] -> [..., columns]."""
        return self.gather(ids.reshape(-1)).reshape(*ids.shape, -1)

    def gather(self, ids: Tensor) -> Tensor:
        """Rows by number, float32 [..., columns], decoded where they lie: only they are copied."""
        rows = self.stored.gather(ids.to(self.stored.device)).to(self.device)
        return rows if self.factors is None else rows * self.factors[0]

    def decoded(self) -> Tensor:
        """All rows of all matrices one after the other, float32 [rows in all, columns]."""
        here = self._here()
        rows = torch.cat([here.rows(0, here.rows_per_matrix, matrix) for matrix in range(here.matrices)])
        return rows if self.factors is None else rows * self.factors.repeat_interleave(here.rows_per_matrix)[:, None]


class Weights:
    """The tensors of one source. Each is read when it is first used, and then stays.

    homes  tensor name -> the device where its bytes stay; None: in the machine's memory, to be copied for each use; tensors
           that are not in it stay where they are used first
    exact  products in float32; else they are made of weights and activations in bfloat16, but for those on the CPU
    """

    def __init__(self, source: TensorSource, homes: Mapping[str, torch.device | None], exact: bool):
        self.source, self.homes, self.exact = source, homes, exact
        self._stored: dict[str, PackedMatrix] = {}
        self._vectors: dict[tuple[str, torch.device], Tensor] = {}
        self._here: dict[tuple[str, torch.device], Matrix] = {}  # whose bytes stay on an accelerator
        self._lock = threading.Lock()
        self._copies: _Copies | None = None

    def exactly(self) -> Weights:
        """The same tensors, for products in float32; bytes of the file that are on devices already are shared."""
        twin = Weights(self.source, self.homes, exact=True)
        twin._stored = {name: stored for name, stored in self._stored.items() if _raw(self.source.tensors[name]) is not None}
        return twin

    def release(self, most: int) -> None:
        """Forgets what was copied into the machine's memory, where these copies take more than `most` bytes: it is read again
        when it is used. Files that are mapped into memory are no copies."""
        with self._lock:
            copies = {
                name: stored.nbytes
                for name, stored in self._stored.items()
                if stored.device.type == "cpu" and self.source.tensors[name].mapped is None
            }
            if sum(copies.values()) > most:
                for name in copies:
                    del self._stored[name]

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Within this, a matrix that is copied to a device stays there, for all passes that use it."""
        self._copies = {}
        try:
            yield
        finally:
            self._copies = None

    def product_dtype(self, device: torch.device) -> torch.dtype:
        return torch.float32 if self.exact or device.type == "cpu" else torch.bfloat16

    def matrix(self, weight: Weight, device: torch.device) -> Matrix:
        """A weight for products on a device. Raises FormatError where it is missing."""
        if (known := self._here.get((weight.name, device))) is not None:
            return known
        tensor, dtype = self._tensor(weight), self.product_dtype(device)
        home = self.homes.get(weight.name, device)
        with self._lock:
            if weight.name not in self._stored:
                self._stored[weight.name] = _stored(tensor, home or torch.device("cpu"), dtype)
        stored = self._stored[weight.name]
        holds_factors = tensor.scale is None or _raw(tensor) is None
        factors = None if holds_factors or tensor.scale is None else torch.from_numpy(np.array(tensor.scale.factors()))
        matrix = Matrix(stored, device, home is not None, factors, dtype, self._copies)
        if device.type != "cpu" and matrix._is_here:
            self._here[weight.name, device] = matrix
        return matrix

    def vector(self, weight: Weight, device: torch.device) -> Tensor:
        """A small tensor decoded on a device: float32, its axes in numpy's order."""
        key = weight.name, device
        if key not in self._vectors:
            self._vectors[key] = torch.from_numpy(_decoded(self._tensor(weight)).reshape(weight.shape[::-1])).to(device)
        return self._vectors[key]

    def _tensor(self, weight: Weight) -> SourceTensor:
        tensor = self.source.tensors.get(weight.name)
        if tensor is None:
            raise FormatError(f"{self.source.path}: tensor {weight.name} is missing")
        return tensor


def _raw(tensor: SourceTensor) -> np.ndarray | None:
    """All encoded rows, uint8 [rows of all matrices, row bytes]; None where they are not in a type that can be decoded."""
    if tensor.stored is None or tensor.raw is None or not tensor.stored.is_known:
        return None
    if tensor.mapped is not None:
        return tensor.mapped
    rows = dims(tensor.shape)[1]
    return np.concatenate([tensor.raw(first, first + rows) for first in range(0, tensor.n_rows, rows)])


def _decoded(tensor: SourceTensor) -> np.ndarray:
    """float32 [rows of all matrices, columns]."""
    rows = dims(tensor.shape)[1]
    runs = [tensor.read(first, first + rows) for first in range(0, tensor.n_rows, rows)]
    return np.ascontiguousarray(np.concatenate(runs), np.float32)


@dataclass(frozen=True)
class _Stored:
    """What `packed` reads of a tensor."""

    shape: tuple[int, ...]
    type: str
    data: np.ndarray


def _stored(tensor: SourceTensor, home: torch.device, dtype: torch.dtype) -> PackedMatrix:
    """The bytes of a tensor on a device; of a type that only checkpoints have, as numbers of the dtype."""
    raw = _raw(tensor)
    if raw is not None and tensor.stored is not None:
        return packed(_Stored(tensor.shape, tensor.stored.name, raw), home)
    numbers = torch.from_numpy(_decoded(tensor)).to(dtype).view(torch.uint8).numpy()
    return packed(_Stored(tensor.shape, _FLOATS[dtype], numbers), home)
