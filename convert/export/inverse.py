"""Undoing what the conversion did to tensors: where each number of a GGUF's tensor belongs in the checkpoint.

A transform says where the numbers of its result come from: it is applied to weights whose numbers are their own places. Runs of
whole rows, the usual case, are recognised by the array that the transform hands through.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from ...data_classes import dataclass
from ..quantization.stored_weights import Rows, StoredWeight
from ..tensor_spec import TensorSpec
from ..tensor_transforms import Changed

_ELEMENTS = 1 << 21  # of a tensor at a time


class PlaceWeight(StoredWeight):
    """A weight that is not there. Its numbers are int64: where they lie among those of all sources of a tensor, from `first`
    on; or, with `by_rows`, any: then `asked` has the rows that were read, and the array that was returned."""

    __slots__ = ("asked", "by_rows", "first")

    def __init__(self, shape: tuple[int, ...], first: int):
        self.shape, self.first, self.source_type = shape, first, "f32"
        self.rows, self.columns = prod(shape[:-1]), shape[-1] if shape else 1
        self.ggml_type, self._scale = None, None
        self.by_rows = False
        self.asked: tuple[np.ndarray, np.ndarray] | None = None

    def words(self, rows: Rows) -> np.ndarray:
        """int64 [number of rows, columns]."""
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else np.asarray(rows)
        if self.by_rows:
            whole = np.broadcast_to(np.int64(0), (len(numbers), self.columns))
            self.asked = numbers, whole
            return whole
        return self.first + numbers[:, None].astype(np.int64) * self.columns + np.arange(self.columns)

    def read(self, rows: Rows) -> np.ndarray:
        """As `words`."""
        return self.words(rows)

    @property
    def has_read_bf16(self) -> bool:
        """False: there are no values."""
        return False


def place_weights(spec: TensorSpec) -> list[PlaceWeight]:
    """A weight for each source of the tensor."""
    weights: list[PlaceWeight] = []
    first = 0
    for number in range(len(spec.sources)):
        weights.append(PlaceWeight(spec.source_shape(number), first))
        first += weights[-1].rows * weights[-1].columns
    return weights


def made_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The ne shape of the tensor in the GGUF."""
    return spec.transform(spec.name, [*place_weights(spec)]).shape


@dataclass(frozen=True)
class RowRun:
    """A run of rows of a GGUF's tensor, and where its numbers belong.

    start, stop  of the rows
    source       number of the source, where all are whole rows of it, else None
    rows         int64 [stop - start], of that source
    places       int64 [stop - start, columns], among the numbers of all sources, where `source` is None
    """

    start: int
    stop: int
    source: int | None
    rows: np.ndarray | None = None
    places: np.ndarray | None = None


def runs(spec: TensorSpec) -> Iterator[RowRun]:
    """All rows of the tensor, in runs of bounded size that stay within a matrix."""
    transform = spec.transform.move if isinstance(spec.transform, Changed) else spec.transform
    weights = place_weights(spec)
    tensor = transform(spec.name, [*weights])
    in_matrix = tensor.shape[1] if len(tensor.shape) > 1 else 1
    columns = tensor.n_elements // max(1, tensor.n_rows)
    step = max(1, min(in_matrix, _ELEMENTS // max(1, columns)))
    by_rows = True
    for matrix in range(0, tensor.n_rows, in_matrix):
        for start in range(matrix, matrix + in_matrix, step):
            stop = min(start + step, matrix + in_matrix)
            found = _whole_rows(weights, tensor.read, start, stop) if by_rows else None
            if found is None:
                by_rows = False  # nor will other runs of this tensor be
                yield RowRun(start, stop, None, places=np.asarray(tensor.read(start, stop)).astype(np.int64))
            else:
                yield found


def _whole_rows(weights: list[PlaceWeight], read, start: int, stop: int) -> RowRun | None:
    """The run, if the transform hands an array of a weight through as it is."""
    for weight in weights:
        weight.by_rows, weight.asked = True, None
    try:
        result = read(start, stop)
        for number, weight in enumerate(weights):
            if weight.asked is not None and weight.asked[1] is result:
                return RowRun(start, stop, number, rows=weight.asked[0])
        return None
    finally:
        for weight in weights:
            weight.by_rows = False
