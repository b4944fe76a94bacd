"""Superblocks of the K types encoded and packed by one kernel, for GPUs: the fit of fit.py, and the bytes."""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.cuda.work_items import WorkItems
from ..block_packing import put_half, put_numbers
from .fit import fit_items


@kernel
def _encode_superblocks(
    x, importance, block, sigma2_factor, sigma2_share, search, midpoints, table, scheme, requantise, scale_factor, zero_codes,
    pairwise_sums, levels, zero_bytes, code_parts, flag_parts, scale_parts, sign_parts, d_parts, out,
):  # fmt: skip
    """x float32 [superblocks, 256] -> out uint8 [superblocks, bytes].

    The arguments from importance to pairwise_sums are those of `fit_rows`; levels: the first level of block scales and the step
    to the next, 0 for signed bytes; parts: `lane_parts`.
    """
    superblocks, size = x.shape
    codes, flags = np.empty((superblocks, size), np.uint8), np.empty((superblocks, size // block), np.uint8)
    int_scales, d = np.empty((superblocks, size // block), np.float32), np.empty(superblocks, np.float32)
    fit_items(
        x, importance, block, sigma2_factor, sigma2_share, search, midpoints, table, scheme, requantise, scale_factor,
        zero_codes, pairwise_sums, codes, flags, int_scales, d,
    )  # fmt: skip
    packed = np.empty(out.shape[1], np.uint8)
    numbers, signs = np.empty(size // block, np.uint8), np.empty(size // block, np.uint8)
    first, step = levels
    for s in range(superblocks):
        packed[:] = 0
        if not zero_bytes or d[s] != 0:
            for b in range(size // block):
                level = int_scales[s, b]
                signs[b] = level < 0
                if sign_parts.shape[0] > 0:
                    level = abs(level)
                number = np.int64(level)
                numbers[b] = max(number - first, 0) // step if step else number & 255
            put_numbers(codes[s], code_parts, packed)
            put_numbers(flags[s], flag_parts, packed)
            put_numbers(numbers, scale_parts, packed)
            put_numbers(signs, sign_parts, packed)
            put_half(d[s], d_parts, packed)
        for k in range(out.shape[1]):
            out[s, k] = packed[k]


# In search_boundaries lanes are blocks, else elements or trials.
_ITEMS = WorkItems(("x",), ("out",), shared_rows=("importance",))
encode_superblocks = kernel(_encode_superblocks.__wrapped__, items=_ITEMS)
encode_superblocks_by_boundaries = kernel(_encode_superblocks.__wrapped__, items=_ITEMS._replace(lanes=1))
