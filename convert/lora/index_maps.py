"""Where the elements of a converted tensor come from: a transform of `tensor_transforms`, applied to weights whose elements are
their own row or column numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..model_spec import TensorSpec
from ..quantization.stored_weights import Rows, StoredWeight


@dataclass(frozen=True)
class IndexMap:
    """Where a run of rows of a converted matrix comes from.

    start       its first row
    rows        int64: of the sources' rows, counted through all sources, those that its rows (its columns, if transposed) are
    columns     int64: the sources' columns that its columns (its rows) are
    """

    start: int
    rows: np.ndarray
    columns: np.ndarray
    transposed: bool


class _Numbers(StoredWeight):
    """A weight of which each element is the number of its row, from `first` on, or of its column."""

    def __init__(self, shape: tuple[int, ...], first: int | None):
        self.shape, self.source_type, self.ggml_type = shape, "f32", None
        self.rows, self.columns = int(np.prod(shape[:-1])), shape[-1]
        self._first = first

    @property
    def has_read_bf16(self) -> bool:
        return False

    def read(self, rows: Rows) -> np.ndarray:
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else np.asarray(rows)
        if self._first is None:
            return np.broadcast_to(np.arange(self.columns, dtype=np.float64), (len(numbers), self.columns))
        return np.broadcast_to((self._first + numbers.astype(np.float64))[:, None], (len(numbers), self.columns))


def index_maps(spec: TensorSpec) -> list[list[IndexMap]] | None:
    """For each matrix of the tensor that a spec makes of matrices, where it comes from: one run of rows, or several
    (attn_k_b of all heads, each transposed). None where its elements are not whole rows or columns of the sources'."""
    rows_per_source = int(np.prod(spec.shape[:-1]))
    by_row = spec.transform(spec.name, [_Numbers(spec.shape, i * rows_per_source) for i in range(len(spec.sources))])
    by_column = spec.transform(spec.name, [_Numbers(spec.shape, None) for _ in spec.sources])
    maps, height = [], by_row.shape[1] if len(by_row.shape) > 1 else 1  # a vector that was a matrix of one row
    for first in range(0, by_row.n_rows, height):
        rows, columns = by_row.read(first, first + height), by_column.read(first, first + height)
        whole = _map(rows, columns, 0)
        if whole is not None:
            maps.append([whole])
            continue
        starts = [0, *(np.flatnonzero(rows[1:, 0] != rows[:-1, 0]) + 1).tolist()]
        runs = [_map(rows[a:b], columns[a:b], a) for a, b in pairwise([*starts, height])]
        if None in runs:
            return None
        maps.append(runs)
    return maps


def _map(rows: np.ndarray, columns: np.ndarray, start: int) -> IndexMap | None:
    """Numbers of the rows and columns that the elements of a run are -> its map. A few lines of each are compared."""
    across, down = (np.array([0, n // 2, n - 1]) for n in (rows.shape[1], rows.shape[0]))
    for transposed in (False, True):
        if transposed:
            rows, columns, across, down = rows.T, columns.T, down, across
        from_rows, from_columns = rows[:, across].T, columns[down]
        if (from_rows == from_rows[0]).all() and (from_columns == from_columns[0]).all():
            return IndexMap(start, from_rows[0].astype(np.int64), from_columns[0].astype(np.int64), transposed)
    return None
