"""Attention of many queries over cached rows of f16 or bf16 with everything rounded to bf16, by dot products of pairs
(AVX512-BF16): twice as many products per instruction as of float32. See `Settings.fast`.

Queries and weights are rounded where they lie. A pair are two numbers of a key, or a column's of two values. What is rounded
depends on one query, or one row of the cache, alone; sums are float32, in the order of the keys.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from ......formats import TYPES
from ......simd.compile import intrinsic
from ......simd.instructions.x86 import cvtne2ps2bf16
from ......simd.llvm import F32X16, I64, LANES, constant, load, loop, store
from ......simd.memory import fill, view
from ......simd.target import target
from ......simd.team import TaskKernel
from ..gemm.float_panels import STEP, load_floats, nearest_bf16_pair, write_transposed
from .cache_rows import TYPE_IDS, ask
from .row_products import SCORES, VALUES
from .tiles import KEY_COLUMNS, KEY_ROWS, PAIRS, PANEL, multiplication

_multiply = multiplication(PAIRS)


@intrinsic
def _round_numbers(typingctx, at, steps):
    """Rounds so many times 32 float32 at an address to bf16, which then begin there."""

    def generate(context, builder, signature, args):
        b = builder
        at, steps = args

        def step(i):
            source = b.add(at, b.mul(i, I64(4 * STEP)))
            low, high = (load(b, source, F32X16, 4 * LANES * half) for half in range(2))
            store(b, cvtne2ps2bf16(b, high, low), at, b.mul(i, I64(2 * STEP)))

        loop(b, steps, step)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _key_columns(type_name: str):
    """The operation (source, row_bytes, rows, to): writes 32 numbers of up to sixteen keys as sixteen vectors of pairs, PANEL
    words apart; the last key stands in for missing ones. Addresses, and bytes from row to row."""

    @intrinsic
    def key_columns(typingctx, source, row_bytes, rows, to):
        def generate(context, builder, signature, args):
            source, row_bytes, rows, to = args
            # For the address as a number that comes from nowhere, see float_panels.
            at = builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [source], side_effect=False)
            write_transposed(builder, target(), type_name, False, at, row_bytes, rows, to, out_step=4 * PANEL)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return key_columns


def _value_pairs(type_name: str):
    """The operation (value, following, is_pair, to): writes sixteen numbers of a value, and of the next one or zeros
    (is_pair), as words of one of each. Addresses."""

    @intrinsic
    def value_pairs(typingctx, value, following, is_pair, to):
        def generate(context, builder, signature, args):
            b = builder
            value, following, is_pair, to = args
            low, high = (load_floats(b, target(), type_name, at) for at in (value, following))
            high = b.select(is_pair, high, constant(F32X16, 0.0))
            store(b, nearest_bf16_pair(b, low, high), to)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.boolean, types.int64), generate

    return value_pairs


class RoundedProducts(NamedTuple):
    """Parts of attention for rows of one type, with operands of SCORES and VALUES."""

    score: TaskKernel
    add: TaskKernel


def _round(task, number):
    _round_numbers(task.queries, task.rows * task.width // STEP)


def _rounded_products(type_name: str) -> RoundedProducts:
    size = TYPES[type_name].block_bytes
    key_columns, value_pairs = _key_columns(type_name), _value_pairs(type_name)

    def score(task, number):
        width, panels = task.width, (task.count + PANEL - 1) // PANEL
        for key in range(0, task.count, LANES):
            source, rows = task.keys + key * task.key_step, min(LANES, task.count - key)
            ask(source + task.ahead, rows * task.key_step if task.ahead else 0)
            to = task.panels + 4 * (key // PANEL * (width // 2) * PANEL + key % PANEL)
            for column in range(0, width, STEP):
                key_columns(source + size * column, task.key_step, rows, to + 2 * PANEL * column)
        every = np.bool_(True)
        _multiply(
            *(task.queries, task.step, task.rows, task.panels, 4 * PANEL, 2 * PANEL * width, panels, width // 2),
            *(task.scores, task.scores_step, every, task.first, task.last, (task.seen, task.members, KEY_COLUMNS)),
        )

    def add(task, number):
        pairs = (task.count + 1) // 2
        panel_bytes = 4 * PANEL * pairs
        for row in range(task.rows):
            _round_numbers(task.weights + row * task.step, (task.count + STEP - 1) // STEP)
        if task.width < PANEL * task.panels:
            fill(view(task.memory + (task.panels - 1) * panel_bytes, panel_bytes // 4, np.int32), 0)
        for pair in range(pairs):
            value = task.values + 2 * pair * task.value_step
            is_pair = 2 * pair + 1 < task.count
            following = value + task.value_step if is_pair else value
            ask(value + task.ahead, 2 * task.value_step if task.ahead else 0)
            for column in range(0, task.width, LANES):
                to = task.memory + column // PANEL * panel_bytes + 4 * (pair * PANEL + column % PANEL)
                value_pairs(value + size * column, following + size * column, is_pair, to)
        _multiply(
            *(task.weights, task.step, task.rows, task.memory, 4 * PANEL, panel_bytes, task.panels, pairs, task.sums),
            *(task.sums_step, task.replaces != 0, task.first, task.last, (task.seen, task.members, KEY_ROWS)),
        )

    score.__qualname__, add.__qualname__ = f"score_rounded_{type_name}", f"add_rounded_{type_name}"
    return RoundedProducts(TaskKernel(score, SCORES), TaskKernel(add, VALUES))


round_to_bf16 = TaskKernel(_round, SCORES)
# Not of f32: who asks for a cache of it wants its precision.
ROUNDED_PRODUCTS = {TYPE_IDS[name]: _rounded_products(name) for name in ("f16", "bf16")}
