"""The parts into which a graph is cut to take gradients: what each reads of others, and the memory that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from math import prod

from ....data_classes import dataclass
from ...graph import Graph, Op, ops
from ...graph.values import CacheSpec
from .differentiable import CacheKey


@dataclass
class GraphPart:
    """Ops between two cuts.

    reads, makes  values that other parts make, and that others read
    takes, gives  the same of rows in caches
    """

    ops: list[Op]
    reads: list[int] = field(default_factory=list)
    makes: list[int] = field(default_factory=list)
    takes: list[CacheKey] = field(default_factory=list)
    gives: list[CacheKey] = field(default_factory=list)


def cut_graph(graph: Graph, is_whole: bool) -> list[GraphPart]:
    """The ops of the body, cut behind those that make the residual stream after a layer."""
    ends = set() if is_whole else {value.index for value in graph.layers}
    parts = [GraphPart([])]
    for op in graph.ops:
        parts[-1].ops.append(op)
        if any(value.index in ends for value in op.outputs):
            parts.append(GraphPart([]))
    parts = [part for part in parts if part.ops]
    made = {value.index: number for number, part in enumerate(parts) for op in part.ops for value in op.outputs}
    wrote: dict[CacheKey, int] = {}
    for number, part in enumerate(parts):
        for op in part.ops:
            for value in op.inputs:
                source = made[value.index]
                if source != number:
                    part.reads += [value.index] if value.index not in part.reads else []
                    parts[source].makes += [value.index] if value.index not in parts[source].makes else []
            if isinstance(op, ops.Attention):
                for key in ((op.layer, name) for name in ("k", "v")):
                    if op.k is not None:
                        wrote[key] = number
                    elif wrote[key] != number:
                        part.takes += [key] if key not in part.takes else []
                        parts[wrote[key]].gives += [key] if key not in parts[wrote[key]].gives else []
    return parts


def kept_bytes(graph: Graph, parts: Sequence[GraphPart]) -> int:
    """Bytes per token that are kept while the parts are computed: values that go from one to others, and gradients of those
    that one part reads and makes at the most; rows of caches, and their gradients."""
    sizes = {value.index: prod(value.shape) for op in graph.ops for value in op.outputs}
    kept = {index for part in parts for index in part.makes} | {graph.hidden.index}
    most = max(sum(sizes[index] for index in {*part.reads, *part.makes}) for part in parts)
    given = {key for part in parts for key in part.gives}
    specs = [spec for spec in graph.cache if isinstance(spec, CacheSpec) and (spec.layer, spec.name) in given]
    return 4 * (sum(sizes[index] for index in kept) + 2 * sum(spec.heads * spec.width for spec in specs) + most)
