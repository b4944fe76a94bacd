"""What is read from a graph whose matrices are replaced in order: their inputs, what their results are added to, and the steps
of a pass between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from math import prod

from ....data_classes import dataclass
from ...graph import Graph, Op, ops
from ...graph.values import CacheSpec, RoutingValue, Weight


@dataclass(frozen=True, eq=False)
class MatrixInput:
    """What some weights are multiplied with.

    kind      'value': the value `index`; 'experts': of each expert the rows of its tokens; 'heads', 'sums': of latent attention
              each head's queries, and weighted sums of latents, those of all heads together where `matrices` is 1
    op        the first op that multiplies it; index: of its value
    columns   numbers of an input; matrices: 1, or how many have inputs of their own
    streams   of some of the weights, by name, the values that what they make is added to, see `added_values`
    """

    kind: str
    op: Op
    index: int
    columns: int
    matrices: int
    streams: dict[Weight, tuple[int, ...]] = field(default_factory=dict)

    @property
    def missed_rows(self) -> int:
        """Rows of the weights whose stream is known."""
        return sum(weight.shape[1] for weight in self.streams)


@dataclass
class StreamStep:
    """Ops that are computed in one go, and the inputs that are handed over then. stop: how many ops are computed by then."""

    ops: list[Op] = field(default_factory=list)
    inputs: list[MatrixInput] = field(default_factory=list)
    stop: int = 0


def matrix_inputs(graph: Graph) -> dict[str, MatrixInput]:
    """Name of a weight -> what it is multiplied with: of the matrices that one op alone multiplies with. Those of groups, and
    tables, are not among them."""
    found: dict[str, MatrixInput] = {}
    uses: dict[str, int] = {}
    by_value: dict[int, MatrixInput] = {}
    for op in (*graph.ops, *graph.head):
        for weight in op.weights:
            uses[weight.name] = uses.get(weight.name, 0) + 1
        if isinstance(op, ops.Linear) or (isinstance(op, ops.ExpertLinear) and len(op.x.shape) == 1):
            one = MatrixInput("value", op, op.x.index, prod(op.x.shape), 1)
            found[op.weight.name] = by_value.setdefault(op.x.index, one)
        elif isinstance(op, ops.ExpertLinear):
            one = MatrixInput("experts", op, op.x.index, op.x.shape[-1], op.weight.shape[2])
            found[op.weight.name] = by_value.setdefault(op.x.index, one)
        elif isinstance(op, ops.LatentAttention):
            if op.kv_b is not None:
                one = MatrixInput("value", op, op.latent.index, prod(op.latent.shape), 1)
                found[op.kv_b.name] = by_value.setdefault(op.latent.index, one)
            for kind, weight in (("heads", op.k_b), ("sums", op.v_b)):
                if weight is not None:
                    matrices = prod(weight.shape[2:])
                    found[weight.name] = MatrixInput(kind, op, op.q.index, weight.shape[0], matrices)
    found = {name: one for name, one in found.items() if uses[name] == 1}
    for weight, stream in added_values(graph).items():
        if weight.name in found and found[weight.name].kind in ("value", "experts"):
            found[weight.name].streams[weight] = stream
    return found


def _lone_readers(graph: Graph) -> dict[int, Op]:
    """Index of a value that one op alone reads -> that op."""
    readers: dict[int, list[Op]] = {}
    for op in (*graph.ops, *graph.head):
        for index in {value.index for value in op.inputs}:
            readers.setdefault(index, []).append(op)
    return {index: found[0] for index, found in readers.items() if len(found) == 1}


def _is_addition(op: Op | None) -> bool:
    """Whether it adds two values as they are."""
    return isinstance(op, ops.Add) and op.scale == 1 and op.a.index != op.b.index


def added_late(graph: Graph) -> Graph:
    """The same graph with matrices whose results are added to others multiplied right before the addition: then as much as can
    be is known of what they are added to. So a shared expert's down comes behind the others."""
    readers = _lone_readers(graph)
    places = {id(op): place for place, op in enumerate(graph.ops)}

    def place(op: Op) -> float:
        reader = readers.get(op.out.index) if isinstance(op, ops.Linear) else None
        return places.get(id(reader), len(places)) - 0.5 if _is_addition(reader) else places[id(op)]

    return replace(graph, ops=tuple(sorted(graph.ops, key=place)))


def added_values(graph: Graph) -> dict[Weight, tuple[int, ...]]:
    """Weight -> the values that what it makes of a token, or experts together make, is added to, by nothing but additions, and
    that are there before it is multiplied: the stream of a layer, as a rule."""
    all_ops, readers = (*graph.ops, *graph.head), _lone_readers(graph)
    places = {value.index: place for place, op in enumerate(all_ops) for value in op.outputs}
    found: dict[Weight, tuple[int, ...]] = {}
    for place, op in enumerate(all_ops):
        if not isinstance(op, ops.Linear | ops.ExpertLinear):
            continue
        made, known = op.out, list[int]()
        combined = readers.get(made.index)
        if isinstance(op, ops.ExpertLinear):
            if not isinstance(combined, ops.CombineExperts) or not combined.weighted:
                continue
            made = combined.out
        while _is_addition(add := readers.get(made.index)):
            assert isinstance(add, ops.Add)
            other = add.b if add.a.index == made.index else add.a
            known += [other.index] if places.get(other.index, place) < place else []
            made = add.out
        if known:
            found[op.weight] = tuple(known)
    return found


def last_uses(graph: Graph) -> dict[int, int]:
    """Index of a value -> the place of the last op that reads it."""
    return {value.index: place for place, op in enumerate((*graph.ops, *graph.head)) for value in op.inputs}


def kept_bytes(graph: Graph, steps: Sequence[StreamStep]) -> int:
    """Bytes per token, at most, that both streams keep between steps, what layers have in caches included."""
    made, last = {value.index: (place, value) for place, op in enumerate(graph.ops) for value in op.outputs}, last_uses(graph)
    rows = {spec.layer: 0 for spec in graph.cache}
    for spec in graph.cache:
        rows[spec.layer] += spec.heads * spec.width if isinstance(spec, CacheSpec) else 0
    most = 0
    for step in steps:
        live = [value for place, value in made.values() if place < step.stop <= last.get(value.index, -1)]
        sums = sum(one.op.q.shape[0] * one.columns for one in step.inputs if one.kind == "sums")  # type: ignore[attr-defined]
        most = max(most, sum(prod(v.shape) * (3 if isinstance(v, RoutingValue) else 1) for v in live) + sums)
    return 2 * 4 * (most + max(rows.values(), default=0))


def steps_of(graph: Graph, inputs: Mapping[str, MatrixInput]) -> list[StreamStep]:
    """The steps of a pass in which weights are replaced; ops behind the last of them are not computed. inputs: theirs."""
    known = set[MatrixInput]()
    steps = [StreamStep()]
    for place, op in enumerate((*graph.ops, *graph.head)):
        needed = list(dict.fromkeys(inputs[weight.name] for weight in op.weights if weight.name in inputs))
        new = [one for one in needed if one not in known]
        known.update(new)
        # Sums of latents are made with matrices that have been replaced before.
        for group in ([one for one in new if one.kind != "sums"], [one for one in new if one.kind == "sums"]):
            if group:
                steps[-1].inputs, steps[-1].stop = group, place
                steps.append(StreamStep())
        steps[-1].ops.append(op)
    return steps[:-1]
