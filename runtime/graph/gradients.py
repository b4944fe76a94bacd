"""Which ops of a graph have gradients that can be observed at the outputs of their weights, and how these are handed over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...data_classes import dataclass
from . import ops
from .graph import Graph
from .ops import Op
from .values import Weight


@dataclass(frozen=True)
class OutputGradient:
    """The gradients of some tokens at what one op's weight computes of them.

    g         float32 [n, groups, rows]: of each token, for each of its experts, of the heads, or of the only matrix
    matrices  int64 [n, groups], the experts (-1: none); None: group i is that of matrix or head i
    """

    op: Op
    weight: Weight
    g: np.ndarray
    matrices: np.ndarray | None = None


OnGradient = Callable[[OutputGradient], None]


def is_choice(op: Op) -> bool:
    """Whether an op only chooses, so that nothing it computes has a gradient."""
    return isinstance(op, ops.SelectKeys | ops.SelectBlocks)


def observed_weights(op: Op) -> tuple[Weight, ...]:
    """The matrices of an op at whose outputs gradients are observed: those that the model has, and not those of an adapter."""
    if isinstance(op, ops.LatentAttention):
        absorbed = (op.k_b, op.v_b) if op.k_b is not None and op.v_b is not None else ()
        return tuple(filter(None, (op.kv_b, *absorbed)))
    if isinstance(op, ops.Linear | ops.ExpertLinear | ops.GroupedLinear) and not op.weights[0].is_of_adapter:
        return op.weights[:1]
    return ()


def reached_ops(graph: Graph) -> list[Op]:
    """The ops on whose results the logits depend in a way that has a derivative, in order: not those that only prepare choices.
    None in a graph without a head."""
    makers = {value.index: op for op in (*graph.ops, *graph.head) for value in op.outputs}
    keepers = {op.layer: op for op in graph.ops if isinstance(op, ops.Attention) and op.k is not None}
    found: set[int] = set()
    rest = [] if graph.logits is None else [makers[graph.logits.index]]
    while rest:
        op = rest.pop()
        if id(op) in found or is_choice(op):
            continue
        found.add(id(op))
        rest += [makers[value.index] for value in op.inputs if value.index in makers]
        if isinstance(op, ops.Attention) and op.k is None:  # it reads what another layer keeps
            rest.append(keepers[op.layer])
    return [op for op in (*graph.ops, *graph.head) if id(op) in found]
