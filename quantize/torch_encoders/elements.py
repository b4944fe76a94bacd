"""Kernels for single numbers of arrays on a GPU; an item has eight."""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel
from ...simd.cuda.work_items import WorkItems
from ...simd.scalar import float_from_bits

RUN = 8


@kernel(items=WorkItems(("words",), ("x",), lanes=1))
def from_bf16(words, x):
    """uint16 [runs, 8], the bits of bf16 numbers -> float32 [runs, 8]."""
    for i in range(x.shape[0]):
        for j in range(RUN):
            x[i, j] = float_from_bits(np.int32(np.uint32(words[i, j]) << np.uint32(16)))


@kernel(items=WorkItems(("a", "b"), ("difference",), lanes=1))
def subtract(a, b, difference):
    """float32 [runs, 8]: a - b."""
    for i in range(a.shape[0]):
        for j in range(RUN):
            difference[i, j] = a[i, j] - b[i, j]
