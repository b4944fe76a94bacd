"""The outputs of a model's matrices at which second moments of gradients are collected: read from the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

from ...data_classes import dataclass
from ...quantize.covariance.row_blocks import ROWS, RowBlocks, row_blocks
from ...runtime.graph import Graph, Op, Weight
from ...runtime.graph.gradients import observed_weights, reached_ops
from ...runtime.graph.ops import ExpertLinear, GroupedLinear, LatentAttention
from .files import OUTPUT_SUFFIX
from .inputs import EXPERT_BLOCK, Input, layer_number
from .products import BLOCK


@dataclass(frozen=True)
class MatrixOutput(Input):
    """What one tensor's matrices compute; as an `Input` whose columns are the rows of a block, and whose matrices are the
    blocks of all matrices, matrix after matrix.

    blocks  of each matrix
    """

    blocks: RowBlocks = field(kw_only=True)

    @property
    def weight(self) -> str:
        """Name of the tensor."""
        return self.name.removesuffix(OUTPUT_SUFFIX)

    @property
    def stack(self) -> int:
        """Matrices of the tensor."""
        return self.matrices // self.blocks.count


def covariance_outputs(graph: Graph, limit: int = ROWS) -> list[MatrixOutput]:
    """The outputs of all matrices on which the predictions depend in a way that has a derivative: the output matrix's first,
    then layer by layer. limit: of the rows of a block."""
    found: dict[str, MatrixOutput] = {}
    for op in reached_ops(graph):
        for weight in observed_weights(op):
            stack, run = _stack(op, weight)
            blocks = row_blocks(weight.shape[1], run, limit)
            tokens, rows = BLOCK, None
            if isinstance(op, ExpertLinear):
                tokens, rows = EXPERT_BLOCK, op.routing.shape[0] * blocks.count
            names, matrices = (weight.name + OUTPUT_SUFFIX,), stack * blocks.count
            layer = layer_number(weight.name)
            one = MatrixOutput(names, blocks.size, matrices, (op.out.index,), layer, tokens, rows, blocks=blocks)
            if weight.name in found:
                one = replace(one, ops=(*found[weight.name].ops, *one.ops))
            found[weight.name] = one
    return sorted(found.values(), key=lambda one: -1 if one.layer is None else one.layer)


def _stack(op: Op, weight: Weight) -> tuple[int, int]:
    """(matrices of a tensor, rows of each that blocks are cut from)."""
    rows, matrices = weight.shape[1], weight.shape[2] if len(weight.shape) > 2 else 1
    groups = 1
    if isinstance(op, GroupedLinear):
        groups = op.x.shape[0]
    elif isinstance(op, LatentAttention) and weight != op.kv_b and matrices == 1:
        groups = op.q.shape[0]
    return matrices, rows // groups


def outputs_of(inputs: Sequence[Input]) -> list[MatrixOutput]:
    """Those that are outputs."""
    return [one for one in inputs if isinstance(one, MatrixOutput)]
