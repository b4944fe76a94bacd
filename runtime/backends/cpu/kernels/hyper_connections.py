"""Operations on several residual streams (graph.hyper_connection_ops): kernels as those of row_kernels, on whole rows."""

from __future__ import annotations

import numpy as np

from .....simd.exponential import exp
from .....simd.memory import view
from .elementwise import mean_square, product
from .task_kernel import CONSTANT, INT, REAL, ROWS, cell, reads, row_of, task_kernel, writes


@task_kernel(x=reads(ROWS), coefficients=reads(ROWS), out=writes(ROWS), streams=INT, width=INT, adds=INT)
def mix(task, number):
    """As graph.hyper_connection_ops.HyperConnectionMix."""
    first, stop, _, _ = cell(task, number)
    streams, width = task.streams, task.width
    for r in range(first, stop):
        x, out = row_of(task.x, r, 0, streams * width), row_of(task.out, r, 0, streams * width)
        factors = row_of(task.coefficients, r, 0, streams * streams)
        for s in range(streams):
            for j in range(width):
                out[s * width + j] = x[s * width + j] if task.adds else np.float32(0)
            for i in range(streams):
                factor = factors[s * streams + i]
                for j in range(width):
                    out[s * width + j] += factor * x[i * width + j]


@task_kernel(
    x=reads(ROWS), update=reads(ROWS), coefficients=reads(ROWS), out=writes(ROWS), constants=CONSTANT, streams=INT, width=INT
)  # fmt: skip
def add(task, number):
    """As graph.hyper_connection_ops.HyperConnectionAdd. coefficients: None: none."""
    first, stop, _, _ = cell(task, number)
    streams, width = task.streams, task.width
    constants = view(task.constants, streams, np.float32)
    for r in range(first, stop):
        x, out = row_of(task.x, r, 0, streams * width), row_of(task.out, r, 0, streams * width)
        update = row_of(task.update, r, 0, width)
        for s in range(streams):
            factor = constants[s]
            if task.coefficients.address:
                factor += row_of(task.coefficients, r, s, 1)[0]
            for j in range(width):
                out[s * width + j] = x[s * width + j] + factor * update[j]


@task_kernel(
    x=reads(ROWS), out=writes(ROWS), scale=CONSTANT, base=CONSTANT, scales=INT, streams=INT, iterations=INT, epsilon=REAL
)  # fmt: skip
def weights(task, number):
    """As graph.hyper_connection_ops.HyperConnectionWeights, x and out of one layout. scale, base: float32; scales: numbers of
    scale."""
    first, stop, _, width = cell(task, number)
    s, iterations, least = task.streams, task.iterations, np.float32(task.epsilon)
    scale, base = view(task.scale, task.scales, np.float32), view(task.base, width, np.float32)
    matrix = np.empty(s * s, np.float32)
    for r in range(first, stop):
        x, out = row_of(task.x, r, 0, width), row_of(task.out, r, 0, width)
        for i in range(min(width, 2 * s)):
            value = np.float32(1) / (np.float32(1) + exp(-(x[i] * scale[i // s] + base[i])))
            out[i] = value + least if i < s else np.float32(2) * value
        if width == s:
            continue
        for i in range(s):
            at = 2 * s + i * s
            largest, total = np.float32(-np.inf), np.float32(0)
            for j in range(s):
                matrix[i * s + j] = x[at + j] * scale[2] + base[at + j]
                largest = max(largest, matrix[i * s + j])
            for j in range(s):
                matrix[i * s + j] = exp(matrix[i * s + j] - largest)
                total += matrix[i * s + j]
            for j in range(s):
                matrix[i * s + j] = matrix[i * s + j] / total + least
        for turn in range(2 * iterations - 1):
            along, across = (1, s) if turn % 2 else (s, 1)
            for i in range(s):
                total = least
                for j in range(s):
                    total += matrix[i * across + j * along]
                for j in range(s):
                    matrix[i * across + j * along] /= total
        for i in range(s):
            for j in range(s):
                out[2 * s + j * s + i] = matrix[i * s + j]


@task_kernel(x=reads(ROWS), factors=reads(ROWS), out=writes(ROWS), streams=INT, width=INT)
def collapse(task, number):
    """As graph.hyper_connection_ops.CollapseStreams."""
    first, stop, _, _ = cell(task, number)
    streams, width = task.streams, task.width
    for r in range(first, stop):
        x, out = row_of(task.x, r, 0, streams * width), row_of(task.out, r, 0, width)
        factors = row_of(task.factors, r, 0, streams)
        for j in range(width):
            out[j] = factors[0] * x[j]
        for s in range(1, streams):
            factor = factors[s]
            for j in range(width):
                out[j] += factor * x[s * width + j]


@task_kernel(x=reads(ROWS), out=writes(ROWS), weight=CONSTANT, streams=INT, width=INT, epsilon=REAL)
def score(task, number):
    """As graph.hyper_connection_ops.ScoreStreams. weight: float32 [width]."""
    first, stop, _, _ = cell(task, number)
    width, weight = task.width, view(task.weight, task.width, np.float32)
    for r in range(first, stop):
        out, highest, total = row_of(task.out, r, 0, task.streams), np.float32(-np.inf), np.float32(0)
        for s in range(task.streams):
            x = row_of(task.x, r, s * width, width)
            out[s] = product(x, weight) / np.sqrt(mean_square(x) + np.float32(task.epsilon))
            highest = max(highest, out[s])
        for s in range(task.streams):
            out[s] = exp(out[s] - highest)
            total += out[s]
        for s in range(task.streams):
            out[s] /= total


@task_kernel(x=reads(ROWS), y=reads(ROWS), out=writes(ROWS), streams=INT, width=INT)
def match(task, number):
    """As graph.hyper_connection_ops.MatchStreams."""
    first, stop, _, _ = cell(task, number)
    for r in range(first, stop):
        out = row_of(task.out, r, 0, task.streams)
        for s in range(task.streams):
            x, y = row_of(task.x, r, s * task.width, task.width), row_of(task.y, r, s * task.width, task.width)
            found = product(x, y) / np.sqrt(np.float32(task.width))
            out[s] = np.sign(found) * np.sqrt(max(abs(found), np.float32(1e-6)))
