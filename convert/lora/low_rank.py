"""Changes of low rank: what an adapter adds to a matrix, or to each matrix of a stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...data_classes import dataclass
from ...formats import SourceTensor, dims
from ...simd.compile import kernel


@dataclass(frozen=True)
class LowRank:
    """scale * b @ a, for each matrix of a stack (one, where the tensor is a matrix).

    a  float32 [matrices, rank, columns]
    b  float32 [matrices, rows, rank]
    """

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def matrices(self) -> int:
        return len(self.a)

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    @property
    def rows(self) -> int:
        return self.b.shape[1]

    @property
    def columns(self) -> int:
        return self.a.shape[2]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether it can be added to a tensor of this ne shape."""
        return 1 <= len(shape) <= 3 and dims(shape) == (self.columns, self.rows, self.matrices)

    def with_scale(self, scale: float) -> LowRank:
        """The same change with another `scale`; b changes unless it is the present one."""
        return self if scale == self.scale else replace(self, b=self.b * np.float32(self.scale / scale), scale=scale)


def add_changes(changes: Sequence[LowRank]) -> LowRank:
    """The sum of changes of one tensor: their factors side by side, with scale 1."""
    parts = [change.with_scale(1.0) for change in changes]
    return LowRank(np.concatenate([p.a for p in parts], 1), np.concatenate([p.b for p in parts], 2), 1.0)


def changed_tensor(tensor: SourceTensor, change: LowRank) -> SourceTensor:
    """The tensor with the change added in float32 as its rows are read. The order of the sums does not depend on the rows asked
    for, nor on the processor."""
    rows = change.rows

    def read(start: int, stop: int) -> np.ndarray:
        matrix, first = divmod(start, rows)
        out = np.array(tensor.read(start, stop), np.float32, order="C")
        _add_product(change.b[matrix, first : first + stop - start], change.a[matrix], np.float32(change.scale), out)
        return out

    # Weights that were quantised stay known as such (quantising them again has to be asked for); floats are no longer stored.
    stored = tensor.stored if tensor.stored is not None and tensor.source_type == tensor.stored.name else None
    stored = None if stored is not None and stored.is_float else stored
    return replace(tensor, read=read, raw=None, stored=stored, mapped=None, read_bf16=None)


@kernel
def _add_product(b, a, scale, out):
    """out float32 [rows, columns] += scale * b @ a; b float32 [rows, rank], a float32 [rank, columns]."""
    for i in range(out.shape[0]):
        row = out[i]
        for k in range(a.shape[0]):
            factor, other = scale * b[i, k], a[k]
            for j in range(out.shape[1]):
                row[j] += factor * other[j]
