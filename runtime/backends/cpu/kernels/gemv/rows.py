"""The product of one group of rows with some tokens: steps along the rows, and the sums of their lanes at the end."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba.core import cgutils

from ......formats.types import TYPES, TensorType
from ..activations import RUN
from .block_steps import Step, Token
from .codebook_steps import BookStep
from .emitter import F32, I64, LANES, Emitter, vector
from .gemv_layout import GemvLayout, gemv_layout
from .integer_steps import WholeStep, takes
from .trellis_steps import TrellisStep

_STEP = {1: 256, 4: 128, 8: 64}  # rows of a group -> columns of a step, for types of small blocks


@cache
def steps(name: str) -> list[Step]:
    """The steps that a row is cut into: large ones, then, for what is left, single blocks."""
    layout, kind = gemv_layout(name), TYPES[name]
    assert layout is not None
    step = TrellisStep if layout.trellis else BookStep if layout.grid is not None else WholeStep if takes(name) else Step
    blocks = max(1, (256 if layout.activations == 256 else _STEP[kind.rows]) // layout.block)
    return [step(name, blocks), step(name, 1)] if blocks > 1 else [step(name, 1)]


def emit_product(
    emit: Emitter, name: str, tokens: int, weights: Any, columns: Any, activations: tuple, out: Any, stride: Any
) -> None:
    """Multiplies the rows of one group (from address `weights`) with `tokens` tokens: activations are the addresses of the
    first token's codes, scales and sums; results go to out, bytes from token to token: stride. All int64."""
    builder, kind, plans = emit.builder, TYPES[name], steps(name)
    layout = plans[0].layout
    orders = {tuple((np.arange(LANES) % kind.rows).tolist()): None}
    orders.update({slot.lane_rows: None for plan in plans for slot in plan.slots})
    places = []
    per_token = (columns, _bytes_per(builder, columns, layout.activations, 4), _bytes_per(builder, columns, RUN, 2))
    all_tokens = [Token(emit, list(orders)) for _ in range(tokens)]
    for t in range(tokens):
        before = [builder.mul(size, I64(t)) for size in per_token]
        places.append([builder.add(a, b) for a, b in zip(activations, before, strict=True)])
    done: Any = I64(0)  # columns
    at: Any = builder.add(weights, I64(kind.rows * kind.row_meta))
    for plan in plans:
        count = builder.udiv(builder.sub(columns, done), I64(plan.columns))
        with cgutils.for_range(builder, count, intp=I64) as loop:
            column = builder.add(done, builder.mul(loop.index, I64(plan.columns)))
            for token, (codes, scales, sums) in zip(all_tokens, places, strict=True):
                token.at(
                    builder.add(codes, column),
                    builder.add(scales, _bytes_per(builder, column, layout.activations, 4)),
                    builder.add(sums, _bytes_per(builder, column, RUN, 2)),
                )
            plan.accumulate(emit, builder.add(at, builder.mul(loop.index, I64(plan.size))), all_tokens)
        done = builder.add(done, builder.mul(count, I64(plan.columns)))
        at = builder.add(at, builder.mul(count, I64(plan.size)))
    factor = _row_factors(emit, layout, kind, weights)
    for t, token in enumerate(all_tokens):
        parts = [emit.fold(builder.load(total), order, kind.rows) for order, total in token.totals.items()]
        value = parts[0]
        for part in parts[1:]:
            value = builder.fadd(value, part)
        if factor is not None:
            value = builder.fmul(value, factor)
        address = builder.add(out, builder.mul(stride, I64(t)))
        builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _bytes_per(builder: Any, columns: Any, run: int, size: int) -> Any:
    return builder.mul(builder.udiv(columns, I64(run)), I64(size))


def _row_factors(emit: Emitter, layout: GemvLayout, kind: TensorType, weights: Any) -> Any:
    """<rows x float>: what the rows of a group begin with; None if nothing."""
    if layout.row_scale is None:
        return None
    if layout.row_scale == "f16":
        return emit.halves(weights, np.arange(kind.rows) * 2)
    assert kind.rows == 1 or kind.row_meta == 4, "factors of a group lie side by side"
    return emit.load(weights, 0, vector(F32, kind.rows))
