"""Kernels of rows of eight-bit floats (`fp8`)."""

from __future__ import annotations

from ..simd.compile import kernel
from ..simd.instructions.e4m3 import load_e4m3
from ..simd.lanes import LANES, splat, store
from .floats import narrow_bf16


@kernel
def scale_fp8(codes, table, is_e4m3, scale, block_columns, out):
    for r in range(codes.shape[0]):
        for b in range(scale.shape[1]):
            s = scale[r, b]
            # Slices instead of indices: without numba's checks for negative indices the loop is twice as fast.
            source = codes[r, b * block_columns : (b + 1) * block_columns]
            target = out[r, b * block_columns : (b + 1) * block_columns]
            by_lanes = source.size // LANES * LANES if is_e4m3 else 0
            factor = splat(s)
            for c in range(0, by_lanes, LANES):
                store(target, c, load_e4m3(source, c) * factor)
            for c in range(by_lanes, source.size):
                target[c] = table[source[c]] * s


@kernel
def narrow_fp8(codes, table, is_e4m3, scale, block_columns, row, row_bits, out):
    """row: float32 [1, columns], and its bits: a row at a time stays in a core's nearest cache."""
    for r in range(codes.shape[0]):
        scale_fp8(codes[r : r + 1], table, is_e4m3, scale[r : r + 1], block_columns, row)
        narrow_bf16(row_bits, out[r])
