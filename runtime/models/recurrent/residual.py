"""What goes from layer to layer: a sum of all results, or several that each layer weighs (attention residuals; Kimi K3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...graph import hyper_connection_ops

if TYPE_CHECKING:
    from ...graph import GraphBuilder, Value


class Residual:
    """The sum of a model's embedding and its layers' results.

    With `block` > 0 a new sum begins at every block-th layer, with what its attention gives. All that reads the sums reads
    their mean, with weights by the softmax of scores (`ScoreStreams`).

    value  (width,), or (sums, width)
    scale  of the results, where there is one sum
    """

    def __init__(self, graph: GraphBuilder, x: Value, *, scale: float, block: int = 0, epsilon: float = 0.0):
        self.graph, self.scale, self.block, self.epsilon = graph, scale, block, epsilon
        self.value = graph.reshape(x, 1, *x.shape) if block else x

    def read(self, name: str) -> Value:
        """(width,); name: of the tensor with which the sums are scored."""
        graph, x = self.graph, self.value
        if not self.block:
            return x
        sums, width = x.shape
        weight = graph.weight(f"{name}.weight", (width,))
        factors = graph.append(hyper_connection_ops.ScoreStreams(graph.value(sums), x, weight, self.epsilon))
        return graph.append(hyper_connection_ops.CollapseStreams(graph.value(width), x, factors))

    def add(self, result: Value, attention_of: int | None = None) -> None:
        """attention_of: the layer whose attention the result is of."""
        graph, x = self.graph, self.value
        if not self.block:
            self.value = graph.add(x, result, self.scale)
            return
        sums, width = x.shape
        if attention_of is not None and attention_of % self.block == 0:
            joined = graph.concat(graph.reshape(x, sums * width), result)
            self.value = graph.reshape(joined, sums + 1, width)
            return
        constants = (*[0.0] * (sums - 1), 1.0)
        self.value = graph.append(hyper_connection_ops.HyperConnectionAdd(graph.value(sums, width), x, result, None, constants))
