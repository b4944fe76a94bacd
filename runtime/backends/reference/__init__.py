"""The reference backend: a graph in plain numpy float32, slow and short. Other backends are tested against it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....formats import MillError, PlanError, TensorSource
from ....simd.workers import Workers
from ...graph import Graph, Observer, Op, Value, Weight, check_support, ops
from .. import Executable, last_rows
from .functions import FUNCTIONS, SUPPORT
from .reference_pass import ReferenceCache, ReferencePass


class ReferenceExecutable(Executable):
    """A graph that can be run. observer: what inputs and outputs of ops are reported to; None: nothing."""

    def __init__(self, graph: Graph, source: TensorSource):
        self.graph, self.source = graph, source
        self._weights: dict[str, np.ndarray] = {}

    def new_cache(self, limit: int) -> ReferenceCache:
        """An empty cache for a sequence of at most `limit` tokens."""
        return ReferenceCache(limit)

    @property
    def workers(self) -> Workers:
        """One thread."""
        return Workers(1)

    @property
    def decode_batch(self) -> int:
        """One: numpy's products may depend on how many rows there are."""
        return 1

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the table of embeddings: int [n] -> float32 [n, n_embd]."""
        return self._weight(self.graph.embedding)[ids]

    def hidden(
        self,
        tokens: np.ndarray,
        caches: Sequence[tuple[ReferenceCache, int]],
        inputs: np.ndarray | None = None,
        generated: bool = False,
        last: Sequence[int] | None = None,
    ) -> np.ndarray:
        """One pass. tokens int [n]; caches: each sequence's cache and how many of the tokens, in order, are its next ones;
        inputs: float32 [n, n_embd], for graphs with a `HiddenInput`; last: how many of each one's last tokens are wanted, None:
        all.

        Returns the normalised output of the last layer, float32 [n or wanted, n_embd]; the caches then hold the tokens. Raises
        MillError where they do not fit.
        """
        segments, positions, row = [], [], 0
        for cache, count in caches:
            if cache.length + count > cache.limit:
                raise MillError(f"the context is full: {cache.length} + {count} tokens do not fit into {cache.limit}")
            segments.append((cache, slice(row, row + count)))
            positions.append(np.arange(cache.length, cache.length + count))
            row += count
        step = ReferencePass(
            np.asarray(tokens), np.concatenate(positions), segments, self.observer or Observer(), inputs=inputs
        )
        out = self._run(self.graph.ops, {}, step)[self.graph.hidden.index]
        for cache, count in caches:
            cache.length += count
        rows = last_rows([count for _, count in caches], last)
        return out if rows is None else out[rows]

    def logits(self, hidden: np.ndarray, generated: bool | None = None) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_vocab]. Raises PlanError for a model without a head."""
        if self.graph.logits is None:
            raise PlanError(f"{self.source.path}: {self.graph.architecture} has no output matrix: it predicts no tokens")
        nothing = np.zeros(0, np.int64)
        step = ReferencePass(nothing, nothing, [], self.observer or Observer())
        return self._run(self.graph.head, {self.graph.hidden.index: hidden}, step)[self.graph.logits.index]

    def _run(self, ops_: Sequence[Op], values: dict[int, Any], step: ReferencePass) -> dict[int, Any]:
        for op in ops_:
            step.op, (function, names) = op, FUNCTIONS[type(op)]
            arguments = {name: self._argument(op, name, values) for name in names}
            with np.errstate(all="ignore"):
                result = function(step, **arguments)
            results = result if isinstance(op, ops.Split) else [result]
            values.update(zip((out.index for out in op.outputs), results, strict=True))
            if step.observer.wants_output(op):
                step.observer.on_output(op, result[1] if isinstance(op, ops.Route) else results[0])
        return values

    def _argument(self, op: Op, name: str, values: dict[int, Any]) -> Any:
        """A field of an op: values and weights as arrays, whatever else as it is."""
        field = getattr(op, name)
        if isinstance(field, Value) and name != "out":
            return values[field.index]
        return self._weight(field) if isinstance(field, Weight) else field

    def _weight(self, weight: Weight) -> np.ndarray:
        """Decoded, float32 in numpy's order of axes: the reverse of ne."""
        if weight.name not in self._weights:
            tensor = self.source.tensors[weight.name]
            rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
            matrices = [tensor.read(first, first + rows) for first in range(0, tensor.n_rows, rows)]
            self._weights[weight.name] = np.concatenate(matrices).astype(np.float32).reshape(tensor.shape[::-1])
        return self._weights[weight.name]


def compile_graph(graph: Graph, source: TensorSource) -> ReferenceExecutable:
    """Raises PlanError, naming it, for an op or an option that there is no function for."""
    check_support(graph, "reference", SUPPORT)
    return ReferenceExecutable(graph, source)
