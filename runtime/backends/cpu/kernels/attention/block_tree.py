"""The results of blocks of keys, added up as a binary tree over the blocks' numbers.

A node of the tree is the number of a buffer: values float32 [rows, width], width a multiple of LANES, at the address
`values + node * step`, and the rows' maxima and sums likewise. `nodes` and `levels` are a stack of the nodes that are not yet
added up, and their heights in the tree.
"""

from __future__ import annotations

import numpy as np

from ......simd.compile import kernel
from ......simd.exponential import exp
from ......simd.lanes import LANES, load, store
from ......simd.memory import view

MAX_LEVELS = 64


@kernel
def _add_node(left, right, rows, width, values, step, maxima, sums, row_step):
    """Adds the node `right` to the node `left`."""
    size = rows * width
    a_values, b_values = view(values + left * step, size, np.float32), view(values + right * step, size, np.float32)
    a_maxima, b_maxima = view(maxima + left * row_step, rows, np.float32), view(maxima + right * row_step, rows, np.float32)
    a_sums, b_sums = view(sums + left * row_step, rows, np.float32), view(sums + right * row_step, rows, np.float32)
    for r in range(rows):
        difference = a_maxima[r] - b_maxima[r]
        factor = exp(-abs(difference))
        a, b = (np.float32(1), factor) if difference >= 0 else (factor, np.float32(1))
        a_maxima[r] = max(a_maxima[r], b_maxima[r])
        a_sums[r] = a_sums[r] * a + b_sums[r] * b
        for j in range(r * width, (r + 1) * width, LANES):
            store(a_values, j, load(a_values, j) * a + load(b_values, j) * b)


@kernel
def push_node(number, depth, nodes, levels, rows, width, values, step, maxima, sums, row_step):
    """Adds the node nodes[depth], the leaf of this number, to all that it completes; returns the depth of the stack then."""
    level = 0
    while number >> level & 1:
        if depth > 0 and levels[depth - 1] == level:
            depth -= 1
            _add_node(nodes[depth], nodes[depth + 1], rows, width, values, step, maxima, sums, row_step)
        level += 1
    levels[depth] = level
    return depth + 1


@kernel
def add_stack(depth, nodes, rows, width, values, step, maxima, sums, row_step):
    """Adds all nodes of the stack to its first one."""
    while depth > 1:
        depth -= 1
        _add_node(nodes[depth - 1], nodes[depth], rows, width, values, step, maxima, sums, row_step)
