"""Rows of caches of keys and values that are kept in blocks, written by tasks of a pass; other types are written by Python."""

from __future__ import annotations

import numpy as np

from .....quantize.codecs.legacy.symmetric import encode_q8_0_blocks
from .....simd.memory import fill, view
from .task_kernel import CONSTANT, HEADS, cell, head_of, reads, task_kernel


@task_kernel(x=reads(HEADS), addresses=CONSTANT)
def store_q8_0(task, number):
    """Writes rows of heads of whole blocks; of a row with NaN or infinity all bits are set, which is NaN.

    addresses: int64 [rows, 2], of head 0's row in the cache, and bytes from there to the next head's.
    """
    first, stop, _, _ = cell(task, number)
    width = task.x.width
    for r in range(first, stop):
        place = view(task.addresses + 16 * r, 2, np.int64)
        for h in range(task.x.heads):
            row, out = head_of(task.x, r, h, 0, width), view(place[0] + h * place[1], width // 32 * 34, np.uint8)
            is_finite = True
            for i in range(width):
                is_finite &= abs(row[i]) < np.inf
            if is_finite:
                encode_q8_0_blocks(row, out)
            else:
                fill(out, 0xFF)
