"""Which inputs a model's matrices have, and which matrices share one: read from the graph.

Ops that read the same value of the graph share its covariance, whatever their weights are called: query, key and value; gate
and up of a dense block; router, shared expert and the gate and up of all experts, each of which gets the layer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from ...data_classes import dataclass
from ...runtime.graph import Graph, Op, Weight
from ...runtime.graph.ops import ExpertLinear, LatentAttention, Linear
from .products import BLOCK, TILE, tile_count

EXPERT_BLOCK = 128  # tokens of a block of an expert's own inputs, of which a pass has fewer


@dataclass(frozen=True)
class Input:
    """What one matrix or several are multiplied with.

    tensors   those that share it, in the graph's order; the first names it
    columns   numbers of an input
    matrices  1, or how many of a stack have inputs of their own
    ops       indexes of the values that the observed ops compute: several where the matrix is used several times
    layer     number of the layer; None: the output
    block     tokens that are summed at a time
    rows      of a token that an op of it sums: of its heads, or of the experts that it is sent to; None: one for each matrix
    """

    tensors: tuple[str, ...]
    columns: int
    matrices: int
    ops: tuple[int, ...]
    layer: int | None
    block: int = BLOCK
    rows: int | None = None

    @property
    def name(self) -> str:
        """That of the first of the tensors that share the input."""
        return self.tensors[0]

    @property
    def sums_bytes(self) -> int:
        """What its sums take in memory, and in the state of an interrupted collection."""
        return 4 * self.matrices * len(self.ops) * tile_count(self.columns) * TILE * TILE

    @property
    def waiting_bytes(self) -> int:
        """What rows take at most that wait for the rest of their block."""
        return 4 * self.matrices * len(self.ops) * self.columns * self.block

    @property
    def rows_of_token(self) -> int:
        """Rows that are summed of each token."""
        return len(self.ops) * (self.matrices if self.rows is None else self.rows)

    @property
    def is_stack_of_experts(self) -> bool:
        """Whether a token goes to some of the matrices only."""
        return self.block != BLOCK


def covariance_inputs(graph: Graph, experts: bool = False) -> list[Input]:
    """The inputs of all linear weights of a model: the output's first, then layer by layer.

    experts: the down matrices of experts too, each with a covariance of its own.
    """
    shared: dict[int, list[Op]] = {}
    own: list[Input] = []
    for op in (*graph.head, *graph.ops):
        if op.weights and op.weights[0].is_of_adapter:
            continue
        if isinstance(op, Linear) or (isinstance(op, ExpertLinear) and len(op.x.shape) == 1):
            shared.setdefault(op.x.index, []).append(op)
        elif isinstance(op, ExpertLinear) and experts:
            (columns, _, count), used, number = op.weight.shape, op.routing.shape[0], layer_number(op.weight.name)
            own.append(Input((op.weight.name,), columns, count, (op.out.index,), number, EXPERT_BLOCK, used))
        elif isinstance(op, LatentAttention):
            own += _latent_inputs(op)
    inputs = []
    for ops in shared.values():
        linear = next((op for op in ops if isinstance(op, Linear)), None)
        if linear is not None:  # inputs of experts alone are observed by expert
            names = tuple(dict.fromkeys(op.weights[0].name for op in ops))
            inputs.append(Input(names, prod(linear.x.shape), 1, (linear.out.index,), layer_number(names[0])))
    return sorted([*_merged(inputs), *own], key=lambda one: -1 if one.layer is None else one.layer)


def _merged(inputs: Sequence[Input]) -> list[Input]:
    """With one input of each name: a matrix that multiplies several values has one covariance, over all of them."""
    by_name: dict[str, Input] = {}
    for one in inputs:
        before = by_name.get(one.name)
        if before is not None:
            one = replace(before, tensors=tuple(dict.fromkeys((*before.tensors, *one.tensors))), ops=(*before.ops, *one.ops))
        by_name[one.name] = one
    return list(by_name.values())


def reads_head(inputs: Sequence[Input]) -> bool:
    """Whether some are inputs of the output, which there are only where predictions are scored."""
    return any(one.layer is None for one in inputs)


def _latent_inputs(op: LatentAttention) -> Iterator[Input]:
    """The inputs of the latent matrices that the model has; a stack of a matrix per head gets a covariance for each."""
    for weight in filter(None, (op.kv_b, op.k_b, op.v_b)):
        number, rows = layer_number(weight.name), None if weight == op.kv_b else op.q.shape[0]
        yield Input((weight.name,), weight.shape[0], _matrices(weight), (op.out.index,), number, rows=rows)


def _matrices(weight: Weight) -> int:
    return weight.shape[2] if len(weight.shape) > 2 else 1


def layer_number(name: str) -> int | None:
    """The number in blk.N.; None for a tensor of no layer."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" else None
