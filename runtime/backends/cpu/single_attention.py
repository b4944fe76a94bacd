"""Grouped-query attention, written down for the program of a single token."""

from __future__ import annotations

from typing import Any

import numpy as np

from .grouped import GroupedAttention
from .kernels import products
from .program import Program, check_known
from .writer import Task

_FIELDS = {"input", "fused", "ends", "output", "bias", "norm", "layer", "heads", "rope", "span", "norm_after_rope"}


def grouped(program: Program, layer: int, attention: GroupedAttention, norm: Any, out: np.ndarray) -> list[Task]:
    """What is still to be done to the result, float32 [n_embd], once the stages are done."""
    check_known(attention, _FIELDS)
    heads = attention.heads
    widths = {"q": heads.k_width, "k": heads.k_width, "v": heads.v_width}
    counts = {"q": heads.n, "k": heads.n_kv, "v": heads.n_kv}
    plans = [program.plan(linear) for linear in attention.input.linears]
    inputs = program.begin(norm, plans)
    row = program.room(sum(int(plan[products.ROWS]) for plan in plans))
    stage, at = [], row.ctypes.data
    for plan in plans:
        stage.append(program.product(plan, inputs, at))
        at += 4 * int(plan[products.ROWS])
    program.stage(stage)
    stage, at = [], row.ctypes.data
    places = {}
    for name in "qkv":
        places[name] = at
        stage.append(program.in_turn(_heads(program, attention, name, at, counts[name], widths[name])))
        at += 4 * counts[name] * widths[name]
    program.stage(stage)
    mixed = program.attended(
        layer, places["q"], ("k", "v"), (heads.n, heads.n_kv), (heads.k_width, heads.v_width), attention.span
    )
    plan = program.plan(attention.output)
    inputs, quantise = program.quantised(mixed, [plan])
    program.stage(quantise)
    program.stage([program.product(plan, inputs, out.ctypes.data)])
    return program.biased(attention.bias.get("output"), out)


def _heads(program: Program, attention: GroupedAttention, name: str, at: int, count: int, width: int) -> list[Task]:
    """What queries, keys or values at an address go through; the last two into the cache."""
    tasks = [program.add(attention.bias[name], at, count * width)] if name in attention.bias else []
    if name != "v":
        norm = program.normalised(attention.norm[name], at, at, count, width) if name in attention.norm else []
        rotate = [] if attention.rope is None else [program.rotated(attention.rope, at, count, width)]
        tasks += rotate + norm if attention.norm_after_rope else norm + rotate
    if name != "q":
        tasks.append(program.kept(attention.layer, name, at))
    return tasks
