"""Operations on several residual streams (graph.special_ops, compressed_ops): parts as those of row_parts, on whole rows."""

from __future__ import annotations

import numpy as np

from .....simd.exponential import exp
from .....simd.memory import view
from .....simd.team import part
from .elementwise import mean, mean_square
from .row_parts import cell, row_view


@part
def mix_streams(argument, number):
    """Table: ..., x, coefficients, out (each with its row bytes), streams, width, whether x is added."""
    table = view(argument, 13, np.int64)
    first, stop, _, _ = cell(table, number)
    streams, width = table[10], table[11]
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, 0, streams * width), row_view(table[8], table[9], r, 0, streams * width)
        factors = row_view(table[6], table[7], r, 0, streams * streams)
        for s in range(streams):
            for j in range(width):
                out[s * width + j] = x[s * width + j] if table[12] else np.float32(0)
            for i in range(streams):
                factor = factors[s * streams + i]
                for j in range(width):
                    out[s * width + j] += factor * x[i * width + j]


@part
def add_to_streams(argument, number):
    """Table: ..., x, update, coefficients (0: none), out (each with its row bytes), constants float32, streams, width."""
    table = view(argument, 15, np.int64)
    first, stop, _, _ = cell(table, number)
    streams, width = table[13], table[14]
    constants = view(table[12], streams, np.float32)
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, 0, streams * width), row_view(table[10], table[11], r, 0, streams * width)
        update = row_view(table[6], table[7], r, 0, width)
        for s in range(streams):
            factor = constants[s]
            if table[8]:
                factor += row_view(table[8], table[9], r, s, 1)[0]
            for j in range(width):
                out[s * width + j] = x[s * width + j] + factor * update[j]


@part
def stream_weights(argument, number):
    """As graph.compressed_ops.StreamWeights, x and out of one layout. Table: ..., x, out (each with its row bytes), scale, base
    (float32), streams, iterations, epsilon (float64), numbers of scale."""
    table, least = view(argument, 14, np.int64), np.float32(view(argument, 14, np.float64)[12])
    first, stop, _, width = cell(table, number)
    s, iterations = table[10], table[11]
    scale, base = view(table[8], table[13], np.float32), view(table[9], width, np.float32)
    matrix = np.empty(s * s, np.float32)
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, 0, width), row_view(table[6], table[7], r, 0, width)
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


@part
def collapse_streams(argument, number):
    """Table: ..., x, factors, out (each with its row bytes), streams, width."""
    table = view(argument, 12, np.int64)
    first, stop, _, _ = cell(table, number)
    streams, width = table[10], table[11]
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, 0, streams * width), row_view(table[8], table[9], r, 0, width)
        factors = row_view(table[6], table[7], r, 0, streams)
        for j in range(width):
            out[j] = factors[0] * x[j]
        for s in range(1, streams):
            factor = factors[s]
            for j in range(width):
                out[j] += factor * x[s * width + j]


@part
def scale_channels(argument, number):
    """Table: ..., x, out (each with its row bytes), weight float32 [columns]."""
    table = view(argument, 9, np.int64)
    first, stop, _, width = cell(table, number)
    weight = view(table[8], width, np.float32)
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, 0, width), row_view(table[6], table[7], r, 0, width)
        for j in range(width):
            out[j] = x[j] * weight[j]


@part
def keep_largest(argument, number):
    """Table: ..., x, out (each with its row bytes), factor (float64)."""
    table, factor = view(argument, 9, np.int64), np.float32(view(argument, 9, np.float64)[8])
    first, stop, _, width = cell(table, number)
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, 0, width), row_view(table[6], table[7], r, 0, width)
        shift = mean(x)
        for j in range(width):
            out[j] = x[j] - shift
        cutoff = factor * np.sqrt(mean_square(out))
        for j in range(width):
            out[j] = max(out[j] - cutoff, np.float32(0)) if out[j] == out[j] else out[j]
