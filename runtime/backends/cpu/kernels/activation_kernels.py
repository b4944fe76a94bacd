"""Activations and gates of rows, as task kernels like those of row_kernels."""

from __future__ import annotations

import math

import numpy as np

from .....simd.compile import kernel
from .....simd.lanes import LANES, load, store
from .....simd.memory import fill
from .attention.tiles import soft_cap as capped
from .elementwise import gate_run, mean, mean_square
from .task_kernel import INT, REAL, ROWS, cell, reads, row_of, task_kernel, writes


@task_kernel(x=reads(ROWS), up=reads(ROWS), out=writes(ROWS), function=INT, limit=REAL)
def gate(task, number):
    """out = function(x) * up, as elementwise.gate_run. up None: ones."""
    first, stop, column, width = cell(task, number)
    limit = np.float32(task.limit)
    ones = np.empty(0 if task.up.address else width, np.float32)
    fill(ones, 1)
    for r in range(first, stop):
        x, out = row_of(task.x, r, column, width), row_of(task.out, r, column, width)
        up = row_of(task.up, r, column, width) if task.up.address else ones
        # Elements to the part's next row: the part that this thread takes next is not known.
        ahead = task.x.row_bytes // 4 if r + 1 < stop else 0
        up_ahead = task.up.row_bytes // 4 if r + 1 < stop else 0
        gate_run(task.function, x, up, out, limit, ahead, up_ahead)


@task_kernel(x=reads(ROWS), out=writes(ROWS), alpha_p=REAL, alpha_n=REAL, beta=REAL, epsilon=REAL)
def xielu(task, number):
    """As graph.activation_ops.Xielu."""
    first, stop, column, width = cell(task, number)
    alpha_p, alpha_n = np.float32(task.alpha_p), np.float32(task.alpha_n)
    beta, epsilon = np.float32(task.beta), np.float32(task.epsilon)
    for r in range(first, stop):
        x, out = row_of(task.x, r, column, width), row_of(task.out, r, column, width)
        for j in range(width):
            value = x[j]
            if value > 0:
                out[j] = alpha_p * value * value + beta * value
            else:
                # In float64: the C library's last bit does not show.
                out[j] = alpha_n * (np.float32(math.expm1(np.float64(min(value, epsilon)))) - value) + beta * value


@task_kernel(x=reads(ROWS), out=writes(ROWS), limit=REAL)
def clamp(task, number):
    """out = x limited to +-limit."""
    first, stop, column, width = cell(task, number)
    limit = np.float32(task.limit)
    for r in range(first, stop):
        x, out = row_of(task.x, r, column, width), row_of(task.out, r, column, width)
        for j in range(width):
            out[j] = min(max(x[j], -limit), limit) if x[j] == x[j] else x[j]


@task_kernel(x=reads(ROWS), out=writes(ROWS), cap=REAL)
def soft_cap(task, number):
    """out = cap * tanh(x / cap)."""
    first, stop, column, width = cell(task, number)
    cap, lanes = np.float32(task.cap), np.empty(LANES, np.float32)
    for r in range(first, stop):
        x, out = row_of(task.x, r, column, width), row_of(task.out, r, column, width)
        whole = width // LANES * LANES
        for j in range(0, whole, LANES):
            store(out, j, capped(load(x, j), cap))
        for j in range(whole, width):
            lanes[j - whole] = x[j]
        store(lanes, 0, capped(load(lanes, 0), cap))
        for j in range(whole, width):
            out[j] = lanes[j - whole]


@kernel
def _softplus(x):
    """log(1 + e^x), computed in float64."""
    return x if x > np.float32(20) else np.float32(math.log1p(math.exp(np.float64(x))))


@task_kernel(x=reads(ROWS), gate=reads(ROWS), out=writes(ROWS), share=INT)
def softplus_gate(task, number):
    """out = x * softplus(gate). share: numbers of x for each of the gate."""
    first, stop, _, width = cell(task, number)
    share = task.share
    for r in range(first, stop):
        x, out = row_of(task.x, r, 0, width), row_of(task.out, r, 0, width)
        gate = row_of(task.gate, r, 0, width // share)
        for i in range(gate.size):
            factor = _softplus(gate[i])
            for j in range(i * share, (i + 1) * share):
                out[j] = x[j] * factor


@task_kernel(x=reads(ROWS), out=writes(ROWS), factor=REAL)
def gaussian_top_k(task, number):
    """As graph.activation_ops.GaussianTopK."""
    first, stop, _, width = cell(task, number)
    factor = np.float32(task.factor)
    for r in range(first, stop):
        x, out = row_of(task.x, r, 0, width), row_of(task.out, r, 0, width)
        shift = mean(x)
        for j in range(width):
            out[j] = x[j] - shift
        cutoff = factor * np.sqrt(mean_square(out))
        for j in range(width):
            out[j] = max(out[j] - cutoff, np.float32(0)) if out[j] == out[j] else out[j]
