"""The search for the first op whose result has NaN or infinity."""

from __future__ import annotations

import numpy as np

from ..formats import MillError
from .graph import Observer, Op, Weight
from .graph.ops import Add, Attention, Embedding, ExpertLinear, LatentAttention


class FiniteCheck(Observer):
    """Raises MillError at the first result that is not finite, naming the op's weight where it has one.

    path: of the model; cache_types: what it caches keys and values as, in words.
    """

    def __init__(self, path: str, cache_types: str):
        self.path, self.cache_types = path, cache_types
        self._layer = 0
        self._tokens: dict[int, dict[int, set[int]]] = {}  # of each routing: matrix -> the tokens that it multiplies

    def wants_output(self, op: Op) -> bool:
        return True

    def wants_input(self, op: Op) -> bool:
        return isinstance(op, ExpertLinear)

    def on_expert_inputs(
        self,
        op: Op,
        weight: Weight,
        x: np.ndarray,
        matrices: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        rows: np.ndarray | None,
    ) -> None:
        if isinstance(op, ExpertLinear) and rows is not None:
            tokens = self._tokens.setdefault(op.routing.index, {})
            for matrix, start, count in zip(matrices.tolist(), starts.tolist(), counts.tolist(), strict=True):
                tokens[matrix] = set(rows[start : start + count].tolist())

    def on_output(self, op: Op, out: np.ndarray) -> None:
        if isinstance(op, Embedding):  # the first of a pass
            self._tokens = {}
        if isinstance(op, Attention | LatentAttention):
            self._layer = op.layer
        if not np.isfinite(out).all():
            what = "the first output that is not finite (NaN or infinity) is that of"
            raise MillError(f"{self.path}: {what} {self._describe(op, out)}")

    def _describe(self, op: Op, out: np.ndarray) -> str:
        if isinstance(op, Attention | LatentAttention):  # keys and values may be beyond the range of the type they are kept in
            weights = "".join(f", or {weight.name}" for weight in op.weights)
            return f"the attention of layer {op.layer} over keys and values kept as {self.cache_types}{weights}"
        if not op.weights:
            return f"{'a sum' if isinstance(op, Add) else type(op).__name__} in layer {self._layer}"
        name = op.weights[0].name
        if not isinstance(op, ExpertLinear):
            return name
        bad = set(np.flatnonzero(~np.isfinite(out).all(axis=(1, 2))).tolist())
        matrices = [matrix for matrix, tokens in self._tokens.get(op.routing.index, {}).items() if tokens == bad]
        return f"{name} (matrix {matrices[0]})" if len(matrices) == 1 else name
