"""A model's tensors as the graphs use them: matrices that multiply, decoded as they are needed.

Decoded float32 rows are kept until `cache_bytes` are used up, first come first kept: every token walks through all layers in
the same order, so dropping the oldest for the newest would always drop what is needed next. What is not kept is decoded
tile by tile at every use, and memory stays bounded whatever the model's size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from math import prod

import numpy as np

from ..formats import FormatError, MillError, SourceTensor, TensorSource
from .threads import WORTH_SHARING, Workers

Observer = Callable[[str, int, np.ndarray], None]

TILE_BYTES = 8 << 20  # decoded float32 of one tile: a few MB, so that one product per tile still is a big one
GROUP = 16  # tiles begin at multiples of this many rows: the widest row interleave, so that no group is decoded twice


class WeightStore:
    """The tensors of one source, and what all uses of them share.

    workers   the threads that products are shared out to
    observer  called as observer(tensor name, matrix index, activations float32 [n, row length]) at every linear use, by one
              thread at a time
    watch     check every result and name the first tensor whose output is not finite (slow; for finding the cause of NaN)
    """

    def __init__(self, source: TensorSource, cache_bytes: int, threads: int = 1):
        self.source, self.workers = source, Workers(threads)
        self.free = cache_bytes
        self.observer: Observer | None = None
        self.watch = False
        self.lock = threading.Lock()
        self._kept: dict[tuple[str, int, int], np.ndarray] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.source.tensors

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> SourceTensor:
        """Raises FormatError when there is no such tensor, or it has another shape."""
        tensor = self.source.tensors.get(name)
        if tensor is None:
            raise FormatError(f"{self.source.path}: tensor {name} is missing")
        if shape is not None and tensor.shape != shape:
            raise FormatError(f"{self.source.path}: tensor {name} has shape {tensor.shape}, expected is {shape}")
        return tensor

    def linear(self, name: str, *shape: int) -> Linear:
        """The matrix (or stack of matrices) `name`; shape in ne order, not checked when left out."""
        return Linear(self, self.tensor(name, shape or None))

    def vector(self, name: str, size: int) -> np.ndarray:
        """A one-dimensional tensor, float32 [size]."""
        return self.tensor(name, (size,)).read(0, 1)[0]

    def rows(self, tensor: SourceTensor, matrix: int, start: int, stop: int) -> np.ndarray:
        """Decoded rows [stop - start, row length] of one matrix, kept if there is room."""
        key = (tensor.name, matrix, start)
        kept = self._kept.get(key)
        if kept is not None and len(kept) == stop - start:
            return kept
        first = matrix * tensor.shape[1]
        decoded = np.ascontiguousarray(tensor.read(first + start, first + stop), np.float32)
        self._keep(key, decoded)
        return decoded

    def _keep(self, key: tuple[str, int, int], decoded: np.ndarray) -> None:
        with self.lock:
            if key not in self._kept and decoded.nbytes <= self.free:
                self.free -= decoded.nbytes
                self._kept[key] = decoded

    def whole(self, tensor: SourceTensor) -> np.ndarray:
        """All rows of all matrices, float32 [rows in all, row length], kept if there is room."""
        per_matrix = tensor.shape[1]
        if tensor.n_rows == per_matrix:
            return self.rows(tensor, 0, 0, per_matrix)
        key = (tensor.name, -1, 0)
        kept = self._kept.get(key)
        if kept is not None:
            return kept
        decoded = np.empty((tensor.n_rows, tensor.shape[0]), np.float32)
        for first in range(0, tensor.n_rows, per_matrix):
            decoded[first : first + per_matrix] = tensor.read(first, first + per_matrix)
        self._keep(key, decoded)
        return decoded

    def check(self, what: str, values: np.ndarray) -> None:
        """Raises MillError if `watch` is on and a value is NaN or infinite."""
        if self.watch and not np.isfinite(values).all():
            raise MillError(f"{self.source.path}: the first output that is not finite (NaN or infinity) is that of {what}")


class Linear:
    """A weight matrix [rows, columns], or a stack of them (one per expert or head), applied as x @ W.T."""

    def __init__(self, store: WeightStore, tensor: SourceTensor):
        if len(tensor.shape) < 2:
            raise FormatError(f"{store.source.path}: tensor {tensor.name} of shape {tensor.shape} is no matrix")
        self.store, self.tensor, self.name = store, tensor, tensor.name
        self.columns, self.rows = tensor.shape[:2]
        self.matrices = prod(tensor.shape[2:])
        self._tile = max(GROUP, TILE_BYTES // (4 * self.columns) // GROUP * GROUP)

    def matmul(self, x: np.ndarray, matrix: int = 0) -> np.ndarray:
        """x float32 [n, columns] times one matrix -> float32 [n, rows]. Tells the observer."""
        self.observe(x, matrix)
        workers, whole, step = self.store.workers, None, self._tile
        if self.rows <= self._tile:
            whole = self.store.rows(self.tensor, matrix, 0, self.rows)
            step = self.rows if len(x) * whole.size < WORTH_SHARING else -(-self.rows // workers.count)
        out = np.empty((len(x), self.rows), np.float32)

        def multiply(low: int) -> None:
            high = min(low + step, self.rows)
            weights = self.store.rows(self.tensor, matrix, low, high) if whole is None else whole[low:high]
            np.matmul(x, weights.T, out=out[:, low:high])

        workers.map(multiply, range(0, self.rows, step))
        if self.store.watch:
            self.store.check(self.name + (f" (matrix {matrix})" if self.matrices > 1 else ""), out)
        return out

    def observe(self, x: np.ndarray, matrix: int = 0) -> None:
        observer = self.store.observer
        if observer is not None:
            rows = np.ascontiguousarray(x, np.float32).reshape(-1, self.columns)
            with self.store.lock:
                observer(self.name, matrix, rows)

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """Rows by number, float32 [len(ids), columns]: what an embedding does."""
        if self.rows <= self._tile:
            return self.store.rows(self.tensor, 0, 0, self.rows)[ids]
        wanted, where = np.unique(ids, return_inverse=True)
        found = np.empty((len(wanted), self.columns), np.float32)
        for i, row in enumerate(wanted.tolist()):
            found[i] = self.tensor.read(row, row + 1)[0]
        return found[where]

    def heads(self, n: int) -> np.ndarray:
        """The whole tensor decoded and cut into n equal runs of rows: float32 [n, rows of all / n, columns].

        For products along the rows instead of the columns. A 2D tensor and a 3D one with a matrix per head come out alike.
        """
        return self.store.whole(self.tensor).reshape(n, -1, self.columns)
