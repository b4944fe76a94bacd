"""Latent attention, written down for the program of a single token: what `latent` does with the packed matrices."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np

from .latent import LatentAttention
from .program import Program, UnknownError, check_known
from .weights import PerHead
from .writer import Task

_FIELDS = {"shape", "q_a", "q_a_norm", "q", "kv_a", "kv_a_norm", "matrices", "output"}
_FIELDS |= {"store", "layer", "rope", "span", "mode", "buffer_bytes"}
_MATRICES = {"store", "shape", "prefix", "kv_b", "k_b", "v_b", "into_query", "into_output"}
_HEADS = 16  # whose queries one thread takes at a time


def latent(program: Program, layer: int, attention: LatentAttention, norm: Any, out: np.ndarray) -> list[Task]:
    """What is still to be done to the result, float32 [n_embd], once the stages are done: nothing."""
    check_known(attention, _FIELDS)
    check_known(attention.matrices, _MATRICES)
    s, q_a = attention.shape, attention.q_a
    q, kept = program.room(s.n_head * (s.nope + s.rope)), program.room(s.rank + s.rope)
    low = q if q_a is None else program.room(q_a.rows)
    plans = [program.plan(attention.q if q_a is None else q_a), program.plan(attention.kv_a)]
    inputs = program.begin(norm, plans)
    program.stage([program.product(plan, inputs, to.ctypes.data) for plan, to in zip(plans, (low, kept), strict=True)])
    q_stages: list[list[Task]] = []
    if q_a is not None:
        plan, at = program.plan(attention.q), low.ctypes.data
        inputs, quantise = program.quantised(low, [plan])
        q_stages.append([program.in_turn([*program.normalised(attention.q_a_norm, at, at, 1, low.size), *quantise])])
        q_stages.append([program.product(plan, inputs, q.ctypes.data)])
    latents = [
        *program.normalised(attention.kv_a_norm, kept.ctypes.data, kept.ctypes.data, 1, s.rank),
        program.rotated(attention.rope, kept.ctypes.data + 4 * s.rank, 1, s.rope),
    ]
    mixed = (_over_heads if attention.mode == 0 else _over_latents)(program, layer, attention, q, kept, q_stages, latents)
    plan = program.plan(attention.output)
    inputs, quantise = program.quantised(mixed, [plan])
    program.stage(quantise)
    program.stage([program.product(plan, inputs, out.ctypes.data)])
    return []


def _side_by_side(program: Program, *sides: list[list[Task]]) -> None:
    for tasks in zip_longest(*sides, fillvalue=[]):
        program.stage(*tasks)


def _over_latents(
    program: Program,
    layer: int,
    attention: LatentAttention,
    q: np.ndarray,
    kept: np.ndarray,
    q_stages: list[list[Task]],
    latents: list[Task],
) -> np.ndarray:
    """Attention with K absorbed into the queries and V into the result; float32 [heads * v]."""
    s, heads = attention.shape, attention.shape.n_head
    if not attention.absorbs(1, 0):
        raise UnknownError("attention that expands keys and values")
    k_plan, v_plan = _plan(attention.matrices.into_query), _plan(attention.matrices.into_output)
    jobs = program.hold(np.array([(head, head, 1, head) for head in range(heads)], np.int64))
    nope, wide = program.room(heads * s.nope), program.room(heads * (s.rank + s.rope))
    runs = heads // _HEADS if heads % _HEADS == 0 else 1
    inputs, quantise = program.quantised(nope, [k_plan], runs)
    split, some = [], heads // runs
    q_step, wide_step = 4 * (s.nope + s.rope), 4 * (s.rank + s.rope)
    for run in range(runs):
        of_q, turned = q.ctypes.data + run * some * q_step, wide.ctypes.data + run * some * wide_step + 4 * s.rank
        tasks = [
            program.move(of_q, q_step, nope.ctypes.data + run * some * 4 * s.nope, 4 * s.nope, some, s.nope),
            program.move(of_q + 4 * s.nope, q_step, turned, wide_step, some, s.rope),
            program.rotated(attention.rope, turned, some, s.rank + s.rope),
        ]
        split.append(program.in_turn([*tasks, *quantise[run : run + 1]]))
    absorb = program.product(k_plan, inputs, wide.ctypes.data, jobs, s.rank + s.rope)
    keep = [program.kept(layer, name, kept.ctypes.data) for name in program.parts]
    _side_by_side(program, [*q_stages, split, [absorb]], [[program.in_turn([*latents, *keep])]])
    names = ("kv", "v" if attention.mode == 1 else "kv")
    weighted = program.attended(layer, wide.ctypes.data, names, (heads, 1), (s.rank + s.rope, s.rank), attention.span)
    inputs, quantise = program.quantised(weighted, [v_plan])
    program.stage(quantise)
    mixed = program.room(heads * s.v)
    program.stage([program.product(v_plan, inputs, mixed.ctypes.data, jobs)])
    return mixed


def _plan(matrices: list[PerHead]) -> np.ndarray:
    plan = next((each.plan for each in matrices if each.takes(1)), None)
    if plan is None:
        raise UnknownError("matrices that have to be decoded")
    return plan


def _over_heads(
    program: Program,
    layer: int,
    attention: LatentAttention,
    q: np.ndarray,
    kept: np.ndarray,
    q_stages: list[list[Task]],
    latents: list[Task],
) -> np.ndarray:
    """Attention over each head's keys and values; float32 [heads * v]."""
    s, heads, kv_b = attention.shape, attention.shape.n_head, attention.matrices.kv_b
    if kv_b is None:
        raise UnknownError("matrices that have to be decoded")
    plan, height, width = program.plan(kv_b), s.nope + s.v, s.nope + s.rope
    both, k, v = program.room(heads * height), program.room(heads * width), program.room(heads * s.v)
    inputs, quantise = program.quantised(kept[: s.rank], [plan])
    turned = q.ctypes.data + 4 * s.nope
    k_at, v_at, from_ = k.ctypes.data, v.ctypes.data, both.ctypes.data
    keys = [
        program.move(from_, 4 * height, k_at, 4 * width, heads, s.nope),
        program.move(kept.ctypes.data + 4 * s.rank, 0, k_at + 4 * s.nope, 4 * width, heads, s.rope),
        program.kept(layer, "k", k_at),
    ]
    values = [program.move(from_ + 4 * s.nope, 4 * height, v_at, 4 * s.v, heads, s.v), program.kept(layer, "v", v_at)]
    kv_stages = [
        [program.in_turn([*latents, *quantise])],
        [program.product(plan, inputs, from_)],
        [program.in_turn(keys), program.in_turn(values)],
    ]
    _side_by_side(program, [*q_stages, [program.rotated(attention.rope, turned, heads, width)]], kv_stages)
    return program.attended(layer, q.ctypes.data, ("k", "v"), (heads, heads), (width, s.v), attention.span)
