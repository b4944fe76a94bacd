"""A graph with activations rounded to bf16: what a model's predictions are worth, where bf16 is what it was trained in."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from . import ops
from .graph import Graph
from .ops import Op
from .values import RoutingValue, Value

_ROUNDED = (ops.Add, ops.Norm, ops.Attention, ops.LatentAttention, ops.Activation, ops.GatedActivation, ops.CombineExperts)
_SPLITTER = 65537.0  # 2^16 + 1: c - (c - x) with c = 65537 x is x with 24 - 16 = 8 bits (Veltkamp's splitting)


def rounded(graph: Graph) -> Graph:
    """The graph with the outputs of norms, attention, activations and sums rounded to bf16, as rows of one vector per token: so
    everything that matrices are multiplied with, and the residual stream. Made of sums and products that every backend has."""
    made: list[Op] = []
    known: dict[int, Value] = {}  # index -> the value that takes its place
    index = 1 + max(value.index for op in (*graph.ops, *graph.head) for value in op.outputs)
    for op in graph.ops:
        renamed = _renamed(op, known)
        made.append(renamed)
        if not isinstance(op, _ROUNDED) or len(op.out.shape) != 1 or isinstance(op.out, RoutingValue):
            continue
        scaled, rest, result = (Value(index + i, op.out.shape) for i in range(3))
        made += [ops.Scale(scaled, renamed.out, _SPLITTER), ops.Add(rest, scaled, renamed.out, -1.0)]
        made.append(ops.Add(result, scaled, rest, -1.0))
        known[op.out.index] = result
        index += 3
    head = tuple(_renamed(op, known) for op in graph.head)
    layers = tuple(known.get(value.index, value) for value in graph.layers)
    return replace(graph, ops=tuple(made), head=head, hidden=known.get(graph.hidden.index, graph.hidden), layers=layers)


def _renamed(op: Op, known: dict[int, Value]) -> Op:
    """The op with other values in the place of its inputs."""
    read = {field.name: getattr(op, field.name) for field in fields(op) if field.name not in ("out", "more")}
    changed: dict[str, Any] = {}
    for name, value in read.items():
        if isinstance(value, Value) and value.index in known:
            changed[name] = known[value.index]
        elif isinstance(value, tuple) and any(isinstance(each, Value) for each in value):
            changed[name] = tuple(known.get(each.index, each) if isinstance(each, Value) else each for each in value)
    return replace(op, **changed) if changed else op
