"""The product of one group of rows with one or several tokens: steps along the rows, then the sums of the lanes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ......formats.layouts.reader.emitter import BYTES, I8, I32, I64, LANES, Emitter, constant
from ......formats.layouts.reader.rows import readers, row_scales
from ......formats.types import TYPES
from ......simd.target import Target, target
from ..activations import RUN
from .block_steps import BlockStep, TokenSums
from .float_rows import FLOATS
from .integer_steps import IntegerStep, has_integer_scales

_AHEAD = 16  # steps of a row whose numbers of points, and signs, are written together


@cache
def steps(name: str, of: Target) -> list[BlockStep]:
    """The steps that a row is divided into, one for each reader."""
    return [(IntegerStep if has_integer_scales(name, of) else BlockStep)(reader) for reader in readers(name)]


def arranges(name: str) -> bool:
    """Whether products of a type take activations in the order of `emit_arrangement`."""
    return name not in FLOATS and any(step.arranges for step in steps(name, target()))


def bytes_of_starts(name: str, of: Target) -> tuple[int, int]:
    """Columns of a whole step, and the bytes that follow their codes where activations are arranged (its `start_bytes`)."""
    first = steps(name, of)[0]
    return first.columns, first.start_bytes


def emit_product(
    emit: Emitter, name: str, tokens: int, weights: list, columns: Any, activations: tuple, out: list, stride: Any, whole: bool
) -> None:
    """Multiplies the rows of groups (each from one of the addresses `weights`) with `tokens` tokens, all of them step by step:
    activations are the addresses of the first token's codes, scales and sums; results of a group go to its address of `out`,
    bytes from token to token: stride. All int64. whole: columns are a multiple of the first step's, and nothing is written
    for others."""
    builder, stored, step_sizes = emit.builder, TYPES[name], steps(name, emit.target)[: 1 if whole else None]
    layout = step_sizes[0].layout
    orders = {tuple((np.arange(LANES) % stored.rows).tolist()): None}
    orders.update({code_vector.lane_rows: None for step in step_sizes for code_vector in step.reader.code_vectors})
    places = []
    per_token = (
        _arranged(emit, name, columns),
        _bytes_per(builder, columns, step_sizes[0].activations, 4),
        _bytes_per(builder, columns, RUN, 2),
    )
    sums_of_groups = [[TokenSums(emit, list(orders)) for _ in range(tokens)] for _ in weights]
    for t in range(tokens):
        before = [builder.mul(size, I64(t)) for size in per_token]
        places.append([builder.add(a, b) for a, b in zip(activations, before, strict=True)])
    firsts = [builder.add(each, I64(stored.rows * stored.row_meta)) for each in weights]

    def multiply(step: BlockStep, column: Any, before: Any, loaded: dict) -> None:
        at = [
            (
                builder.add(codes, _arranged(emit, name, column)),
                builder.add(scales, _bytes_per(builder, column, step_sizes[0].activations, 4)),
                builder.add(sums, _bytes_per(builder, column, RUN, 2)),
            )
            for codes, scales, sums in places
        ]
        for first, token_sums in zip(firsts, sums_of_groups, strict=True):
            for token, addresses in zip(token_sums, at, strict=True):
                token.at(*addresses)
            step.accumulate(emit, builder.add(first, before), token_sums, dict(loaded))

    _along_row(emit, step_sizes, columns, multiply, firsts[0] if len(firsts) == 1 else None)
    for row, to, token_sums in zip(weights, out, sums_of_groups, strict=True):
        _store_sums(emit, stored, layout, step_sizes[0].unit, row, token_sums, to, stride)


def _store_sums(
    emit: Emitter, stored: Any, layout: Any, unit: float, weights: Any, token_sums: list[TokenSums], out: Any, stride: Any
) -> None:
    builder, tokens = emit.builder, len(token_sums)
    factor = row_scales(emit, layout, stored, weights)
    if stored.rows == 1 and tokens > 1:
        values = emit.fold_each([builder.load(total) for token in token_sums for total in token.totals.values()])
        factor = None if factor is None else emit.shuffle(factor, [0] * values.type.count)
        values = _scaled(builder, values, factor, unit)
        results = [builder.extract_element(values, I32(t)) for t in range(tokens)]
    else:
        results = []
        for token in token_sums:
            parts = [emit.fold(builder.load(total), order, stored.rows) for order, total in token.totals.items()]
            results.append(_scaled(builder, reduce(builder.fadd, parts), factor, unit))
    for t, value in enumerate(results):
        address = builder.add(out, builder.mul(stride, I64(t)))
        builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _scaled(builder: Any, value: Any, factor: Any, unit: float) -> Any:
    """value times a factor, if there is one, and a number."""
    value = value if factor is None else builder.fmul(value, factor)
    return value if unit == 1 else builder.fmul(value, constant(value.type, unit))


def emit_arrangement(emit: Emitter, name: str, columns: Any, codes: Any, to: Any) -> None:
    """Writes a token's activations in the order in which `emit_product` takes them of a type that `arranges`. Addresses."""

    def write(step: BlockStep, column: Any, *_: Any) -> None:
        step.arrange(emit, emit.builder.add(codes, column), emit.builder.add(to, _arranged(emit, name, column)))

    _along_row(emit, steps(name, emit.target), columns, write)


def _arranged(emit: Emitter, name: str, column: Any) -> Any:
    """Bytes of arranged activations before a column."""
    columns, size = bytes_of_starts(name, emit.target)
    return emit.builder.add(column, _bytes_per(emit.builder, column, columns, size)) if size else column


def _along_row(emit: Emitter, of: list[BlockStep], columns: Any, body: Callable[..., None], row: Any = None) -> None:
    """body(step, first column, bytes of the row before it, what is loaded) for all steps along a row: as many of each as fit.

    row: the address of one row of a reader that has `bytes_ahead`: those of several steps are written before these steps,
    so that no step waits for them.
    """
    builder = emit.builder
    done, at = I64(0), I64(0)
    for step in of:
        count, size = builder.udiv(builder.sub(columns, done), I64(step.columns)), step.reader.size

        def one(number: Any, loaded: dict, step: BlockStep = step, done: Any = done, at: Any = at) -> None:
            place = builder.add(at, builder.mul(number, I64(step.reader.size)))
            body(step, builder.add(done, builder.mul(number, I64(step.columns))), place, loaded)

        ahead = step.reader.bytes_ahead(emit.target) if row is not None else 0
        if ahead:
            looked_up = BYTES * step.reader.runs_looked_up(emit.target)
            most = _AHEAD if looked_up else _AHEAD // step.reader.rows
            with builder.goto_entry_block():  # without zeros, which `alloca_once` writes
                memory = builder.alloca(ir.ArrayType(I8, most * ahead))
            memory.align = BYTES
            memory = builder.ptrtoint(memory, I64)
            with cgutils.for_range_slice(builder, I64(0), count, I64(most), intp=I64) as (start, _):
                left = builder.sub(count, start)
                steps_now = builder.select(builder.icmp_unsigned("<", left, I64(most)), left, I64(most))
                before = builder.add(builder.add(row, at), builder.mul(start, I64(size)))
                with cgutils.for_range(builder, steps_now, intp=I64) as loop:
                    base = builder.add(before, builder.mul(loop.index, I64(size)))
                    step.reader.write_ahead(emit, base, builder.add(memory, builder.mul(loop.index, I64(ahead))))
                if looked_up:
                    written = builder.mul(steps_now, I64(ahead))  # what follows it is looked up, too, and not read
                    with cgutils.for_range_slice(builder, I64(0), written, I64(looked_up), intp=I64) as (part, _):
                        step.reader.look_up_ahead(emit, builder.add(memory, part))
                with cgutils.for_range(builder, steps_now, intp=I64) as loop:
                    written = builder.add(memory, builder.mul(loop.index, I64(ahead)))
                    one(builder.add(start, loop.index), {"ahead": written})
        else:
            with cgutils.for_range(builder, count, intp=I64) as loop:
                one(loop.index, {})
        done = builder.add(done, builder.mul(count, I64(step.columns)))
        at = builder.add(at, builder.mul(count, I64(size)))


def _bytes_per(builder: Any, columns: Any, run: int, size: int) -> Any:
    return builder.mul(builder.udiv(columns, I64(run)), I64(size))
