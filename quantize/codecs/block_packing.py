"""The numbers of one block put into its bytes by a kernel whose work items are blocks (see lane_packing.py for its tables)."""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel
from ...simd.lanes import LANES, splat, store_half

NO_PARTS = np.empty((0, 5), np.int64)  # of a field that a type has not


@kernel
def put_numbers(numbers, parts, block):
    """Enters a field's numbers, integers, into a block's bytes, 0 before. parts: `lane_parts` of the field."""
    for i in range(parts.shape[0]):
        bits = (np.int64(numbers[parts[i, 0]]) >> parts[i, 4] & parts[i, 3]) << parts[i, 2]
        block[parts[i, 1]] |= np.uint8(bits)


@kernel
def put_half(number, parts, block):
    """As put_numbers, of one float32 number that is stored as float16."""
    words = np.empty(LANES, np.uint16)
    store_half(words, 0, splat(number))
    put_numbers(words, parts, block)


@kernel
def put_superblocks(grid_indices, signs, scales, d, per_sign, code_parts, sign_parts, scale_parts, d_parts, out):
    """Numbers of superblocks of grid points, of whose signs one of `per_sign` is stored -> out uint8 [superblocks, bytes]."""
    packed = np.empty(out.shape[1], np.uint8)
    for s in range(out.shape[0]):
        packed[:] = 0
        put_numbers(grid_indices[s], code_parts, packed)
        put_numbers(signs[s, ::per_sign], sign_parts, packed)
        put_numbers(scales[s], scale_parts, packed)
        put_half(d[s], d_parts, packed)
        for k in range(out.shape[1]):
            out[s, k] = packed[k]
