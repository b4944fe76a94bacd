"""The product of one group of rows with one or several tokens: steps along the rows, then the sums of the lanes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba.core import cgutils

from ......formats.types import TYPES, TensorType
from ..activations import RUN
from .block_steps import BlockStep, TokenSums
from .emitter import F32, I64, LANES, Emitter, vector
from .gemv_layout import GemvLayout, gemv_layout
from .grid_steps import GridStep
from .integer_steps import IntegerStep, has_integer_scales
from .trellis_steps import TrellisStep

_STEP_COLUMNS = {1: 256, 4: 128, 8: 64}  # rows of a group -> columns of a step, for types of small blocks


@cache
def steps(name: str) -> list[BlockStep]:
    """The steps that a row is divided into, largest first: as many large ones as fit, then single blocks."""
    layout = gemv_layout(name)
    assert layout is not None
    if layout.trellis:
        step = TrellisStep
    elif layout.grid is not None:
        step = GridStep
    else:
        step = IntegerStep if has_integer_scales(name) else BlockStep
    blocks = max(1, (256 if layout.activations == 256 else _STEP_COLUMNS[TYPES[name].rows]) // layout.block)
    return [step(name, blocks), step(name, 1)] if blocks > 1 else [step(name, 1)]


def emit_product(
    emit: Emitter, name: str, tokens: int, weights: Any, columns: Any, activations: tuple, out: Any, stride: Any
) -> None:
    """Multiplies the rows of one group (from address `weights`) with `tokens` tokens: activations are the addresses of the
    first token's codes, scales and sums; results go to out, bytes from token to token: stride. All int64."""
    builder, stored, step_sizes = emit.builder, TYPES[name], steps(name)
    layout = step_sizes[0].layout
    orders = {tuple((np.arange(LANES) % stored.rows).tolist()): None}
    orders.update({code_vector.lane_rows: None for step in step_sizes for code_vector in step.code_vectors})
    places = []
    per_token = (columns, _bytes_per(builder, columns, layout.activations, 4), _bytes_per(builder, columns, RUN, 2))
    token_sums = [TokenSums(emit, list(orders)) for _ in range(tokens)]
    for t in range(tokens):
        before = [builder.mul(size, I64(t)) for size in per_token]
        places.append([builder.add(a, b) for a, b in zip(activations, before, strict=True)])
    done: Any = I64(0)  # columns
    at: Any = builder.add(weights, I64(stored.rows * stored.row_meta))
    for step in step_sizes:
        count = builder.udiv(builder.sub(columns, done), I64(step.columns))
        with cgutils.for_range(builder, count, intp=I64) as loop:
            column = builder.add(done, builder.mul(loop.index, I64(step.columns)))
            for token, (codes, scales, sums) in zip(token_sums, places, strict=True):
                token.at(
                    builder.add(codes, column),
                    builder.add(scales, _bytes_per(builder, column, layout.activations, 4)),
                    builder.add(sums, _bytes_per(builder, column, RUN, 2)),
                )
            step.accumulate(emit, builder.add(at, builder.mul(loop.index, I64(step.size))), token_sums)
        done = builder.add(done, builder.mul(count, I64(step.columns)))
        at = builder.add(at, builder.mul(count, I64(step.size)))
    factor = row_scales(emit, layout, stored, weights)
    for t, token in enumerate(token_sums):
        parts = [emit.fold(builder.load(total), order, stored.rows) for order, total in token.totals.items()]
        value = parts[0]
        for part in parts[1:]:
            value = builder.fadd(value, part)
        if factor is not None:
            value = builder.fmul(value, factor)
        address = builder.add(out, builder.mul(stride, I64(t)))
        builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _bytes_per(builder: Any, columns: Any, run: int, size: int) -> Any:
    return builder.mul(builder.udiv(columns, I64(run)), I64(size))


def row_scales(emit: Emitter, layout: GemvLayout, stored: TensorType, weights: Any) -> Any:
    """<rows x float>: the row scales of a group; None if the type has none."""
    if layout.row_scale is None:
        return None
    if layout.row_scale == "f16":
        return emit.halves(weights, np.arange(stored.rows) * 2)
    assert stored.rows == 1 or stored.row_meta == 4, "the row scales of a group lie side by side"
    return emit.load(weights, 0, vector(F32, stored.rows))
