"""Residual streams that each token mixes in its own way: hyper-connections (arXiv:2512.24880; DeepSeek-V4, openPangu 2)."""

from __future__ import annotations

from collections.abc import Callable

from ...data_classes import dataclass
from ..graph import GraphBuilder, Value, hyper_connection_ops


@dataclass(frozen=True)
class StreamNames:
    """Endings of the tensors behind a prefix: the matrix, the factors of its results, what is added to them."""

    matrix: str = "_fn"
    scale: str = "_scale.weight"
    base: str = "_base.weight"


class Streams:
    """n streams of n_embd numbers each; iterations, epsilon: of `HyperConnectionWeights`."""

    def __init__(
        self, graph: GraphBuilder, n: int, n_embd: int, iterations: int, epsilon: float, names: StreamNames | None = None
    ):
        self.graph, self.n, self.n_embd, self.names = graph, n, n_embd, names or StreamNames()
        self.iterations, self.epsilon = iterations, epsilon

    def of(self, x: Value) -> Value:
        """Each stream is x."""
        return self.graph.append(hyper_connection_ops.RepeatStreams(self.graph.value(self.n, self.n_embd), x))

    def collapsed(self, x: Value, numbers: Value, prefix: str) -> Value:
        """The sum of the streams, with weights by the matrix's results for `numbers` (behind the last layer)."""
        return self._sum(x, self._weights(numbers, prefix, 1, self.n))

    def around(self, x: Value, numbers: Value, prefix: str, block: Callable[[Value], Value]) -> Value:
        """The streams behind a block, which reads a sum of them; numbers: that the matrix is multiplied with."""
        graph, n, shape = self.graph, self.n, (self.n, self.n_embd)
        before, behind, matrix = graph.split(self._weights(numbers, prefix, 3, (2 + n) * n), n, n, n**2)
        update = block(self._sum(x, before))
        mixed = graph.append(hyper_connection_ops.HyperConnectionMix(graph.value(*shape), x, matrix, adds=False))
        return graph.append(hyper_connection_ops.HyperConnectionAdd(graph.value(*shape), mixed, update, behind, (0.0,) * n))

    def _sum(self, x: Value, factors: Value) -> Value:
        return self.graph.append(hyper_connection_ops.CollapseStreams(self.graph.value(self.n_embd), x, factors))

    def _weights(self, numbers: Value, prefix: str, scales: int, size: int) -> Value:
        graph, names = self.graph, self.names
        return graph.append(
            hyper_connection_ops.HyperConnectionWeights(
                graph.value(size),
                graph.linear(numbers, f"{prefix}{names.matrix}", size),
                graph.weight(f"{prefix}{names.scale}", (scales,)),
                graph.weight(f"{prefix}{names.base}", (size,)),
                self.n,
                self.iterations,
                self.epsilon,
            )
        )
