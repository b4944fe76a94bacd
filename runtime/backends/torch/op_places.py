"""On which device each op of a graph runs, and which runs of ops the cpu backend computes.

An op runs where its weights lie; one that keeps a state where its layer does; one with neither where all of its inputs are
made, or else where its layer is. A mixture of experts whose stacks all lie in the machine's memory runs there as a whole; of
one that is divided, each product runs where its stack lies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch

from ...graph import Graph, Op, ops
from .host_segment import state_layer

HOST = None  # the cpu backend
PROCESSOR = torch.device("cpu")  # torch on the same processor
_LAYER = re.compile(r"blk\.(\d+)\.")

Place = torch.device | None
Run = tuple[Place, list[Op]]  # a device and ops, one after the other


class Places:
    """homes: tensor name -> where it lies; layers: number -> where its state and its ops without weights are; rest: for what
    neither of both has; tied: where the embeddings lie as output matrix. Of all, HOST stands for the cpu backend."""

    def __init__(self, homes: Mapping[str, Place], layers: Mapping[int, Place], rest: Place, tied: Place = HOST):
        self.homes, self.layers, self.rest, self.tied = homes, dict(layers), rest, tied

    def runs(self, graph: Graph, members: Sequence[Op]) -> list[Run]:
        """The ops in an order in which they can be run, cut where the device changes."""
        layers = dict(self.layers)
        while True:
            runs = _cut(self._places(graph, members, layers))
            divided = _divided_layers(runs)
            if not divided:
                return runs
            layers |= dict.fromkeys(divided, PROCESSOR)  # one cache has to serve all of the layer's ops

    def _places(self, graph: Graph, members: Sequence[Op], layers: Mapping[int, Place]) -> list[tuple[Op, Place]]:
        out: list[tuple[Op, Place]] = []
        current, made = self.rest, dict[int, Place]()  # value index -> where it is made
        mixtures = {id(op): group for group in _mixtures(members) for op in group}
        for op in members:
            number = _layer_of(op)
            if number is not None:
                current = layers.get(number, self.rest)
            group = mixtures.get(id(op))
            if group is None:
                sources = {made[value.index] for value in op.inputs if value.index in made}
                place = sources.pop() if len(sources) == 1 and state_layer(op) is None else current
                if isinstance(op, ops.Linear) and op.weight == graph.embedding:
                    current = place = self.tied
                elif op.weights and state_layer(op) is None:
                    place = self.homes.get(op.weights[0].name, place)
                    current = place if number is None else current
                placed = [(op, place)]
            else:
                placed = self._mixture(group, current) if op is group[-1] else []
            out += placed
            made |= {value.index: place for op, place in placed for value in op.outputs}
        return out

    def _mixture(self, group: Sequence[Op], current: Place) -> list[tuple[Op, Place]]:
        stacks = {id(op): self.homes.get(op.weight.name, current) for op in group if isinstance(op, ops.ExpertLinear)}
        if all(place is HOST for place in stacks.values()):
            return [(op, HOST) for op in group]
        places = [(op, stacks.get(id(op), current)) for op in group]
        return [(op, PROCESSOR if place is HOST else place) for op, place in places]


def _layer_of(op: Op) -> int | None:
    layer = state_layer(op)
    if layer is not None:
        return layer
    match = _LAYER.match(op.weights[0].name) if op.weights else None
    return int(match[1]) if match else None


def _mixtures(members: Sequence[Op]) -> list[list[Op]]:
    """Of each mixture of experts the ops from Route to CombineExperts."""
    out: list[list[Op]] = []
    for at, route in enumerate(members):
        if isinstance(route, ops.Route):
            reached, group = {route.out.index}, list(members[at : at + 1])
            for op in members[at + 1 :]:
                if any(value.index in reached for value in op.inputs):
                    group.append(op)
                    reached.update(value.index for value in op.outputs)
                    if isinstance(op, ops.CombineExperts):
                        break
            out.append(group)
    return out


def _cut(placed: Sequence[tuple[Op, Place]]) -> list[Run]:
    runs: list[Run] = []
    for op, place in placed:
        if not runs or runs[-1][0] != place:
            runs.append((place, []))
        runs[-1][1].append(op)
    return runs


def _divided_layers(runs: Sequence[Run]) -> set[int]:
    """Layers whose state ops of several runs on the host would have to share."""
    by_layer: dict[int, set[int]] = {}
    for number, (place, members) in enumerate(runs):
        for op in members if place is HOST else ():
            layer = state_layer(op)
            if layer is not None:
                by_layer.setdefault(layer, set()).add(number)
    return {layer for layer, numbers in by_layer.items() if len(numbers) > 1}
