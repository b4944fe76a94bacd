"""The search for the first op whose result has NaN or infinity."""

from __future__ import annotations

import numpy as np

from ..formats import MillError, TensorSource, dims
from .graph import Observer, Op, Weight
from .graph.compressed_attention_ops import WindowAttention
from .graph.ops import Add, Attention, LatentAttention

_READ_BYTES = 16 << 20  # decoded weights that are in memory at a time
_GROUP = 16  # rows that may be interleaved: such groups are decoded together


class FiniteCheck(Observer):
    """Raises MillError at the first result that is not finite, naming the tensor at fault, or else the op.

    source: the model; cache_types: what it caches keys and values as, in words.
    """

    def __init__(self, source: TensorSource, cache_types: str):
        self.source, self.cache_types = source, cache_types
        self._layer = 0

    def wants_output(self, op: Op) -> bool:
        return True

    def on_output(self, op: Op, out: np.ndarray) -> None:
        if isinstance(op, Attention | LatentAttention | WindowAttention):
            self._layer = op.layer
        if not np.isfinite(out).all():
            what = "the first output that is not finite (NaN or infinity) is that of"
            raise MillError(f"{self.source.path}: {what} {self._describe(op)}")

    def _describe(self, op: Op) -> str:
        """The first of its tensors that is damaged, else its first tensor, else the op in words."""
        damaged = next(filter(None, map(self._damaged, op.weights)), None)
        if damaged is not None:
            return damaged
        if isinstance(
            op, Attention | LatentAttention | WindowAttention
        ):  # they may be beyond the range of the type that they are kept in
            return f"the attention of layer {op.layer} over keys and values kept as {self.cache_types}"
        if op.weights:
            return op.weights[0].name
        return f"{'a sum' if isinstance(op, Add) else type(op).__name__} in layer {self._layer}"

    def _damaged(self, weight: Weight) -> str | None:
        """The tensor, with the number of its first matrix that has NaN or infinity; None if all weights are finite."""
        tensor = self.source.tensors[weight.name]
        columns, rows, matrices = dims(tensor.shape)
        step = max(_GROUP, _READ_BYTES // (4 * columns) // _GROUP * _GROUP)
        for first in range(0, matrices * rows, rows):
            for start in range(first, first + rows, step):
                if not np.isfinite(tensor.read(start, min(start + step, first + rows))).all():
                    return f"{weight.name} (matrix {first // rows})" if matrices > 1 else weight.name
        return None
