"""Operations on several residual streams (see graph.special_ops), as parts like those of row_parts, over whole rows."""

from __future__ import annotations

import numpy as np

from .....simd.memory import view
from .....simd.team import part
from .elementwise import mean, mean_square
from .row_parts import cell, row_view


@part
def mix_streams(argument, number):
    """Table: ..., x, coefficients, out (each with its row bytes), streams, width."""
    table = view(argument, 12, np.int64)
    first, stop, _, _ = cell(table, number)
    streams, width = table[10], table[11]
    for r in range(first, stop):
        x, out = row_view(table[4], table[5], r, 0, streams * width), row_view(table[8], table[9], r, 0, streams * width)
        factors = row_view(table[6], table[7], r, 0, streams * streams)
        for s in range(streams):
            for j in range(width):
                out[s * width + j] = x[s * width + j]
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
