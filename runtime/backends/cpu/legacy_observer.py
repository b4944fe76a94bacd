"""Until graphs are compiled: tells a typed Observer what the decoder reports under tensors' names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...graph import Graph, Observer, Op, Weight
from ...graph.ops import ExpertLinear, LatentAttention, Linear


class LegacyObserver:
    def __init__(self, observer: Observer, graph: Graph):
        self.observer: Any = observer
        self.uses: dict[str, tuple[Op, Weight]] = {}
        for op in (*graph.ops, *graph.head):
            if isinstance(op, Linear | ExpertLinear | LatentAttention) and observer.wants_input(op):
                weights = op.observed if isinstance(op, LatentAttention) else (op.weight,)
                self.uses |= {weight.name: (op, weight) for weight in weights}
        if observer.wants_squares:
            self.squares = self.observer.squares

    def __call__(self, name: str, matrix: int, x: np.ndarray) -> None:
        if name in self.uses:
            self.observer.on_input(*self.uses[name], matrix, x)

    def add_heads(self, name: str, squares: np.ndarray, n: int, pooled: bool) -> None:
        if name in self.uses:
            self.observer.on_head_squares(*self.uses[name], squares, n)

    def add_runs(
        self,
        names: Sequence[str],
        x: np.ndarray,
        matrices: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        places: np.ndarray | None,
    ) -> None:
        for name in names:
            if name in self.uses:
                self.observer.on_expert_inputs(*self.uses[name], x, matrices, starts, counts, places)


def layer_listener(observer: Observer, graph: Graph) -> Any:
    """For Decoder.on_layer."""
    makers = {op.out.index: op for op in graph.ops}
    layers = [makers[value.index] for value in graph.layers]

    def on_layer(layer: int, x: np.ndarray) -> None:
        if observer.wants_output(layers[layer]):
            observer.on_output(layers[layer], x)

    return on_layer
