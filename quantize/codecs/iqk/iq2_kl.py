"""iq2_kl: five bits for every two weights, which select one of 32 pairs of values.

A row has one float16 scale, a block of 32 weights an integer scale -32 ... 31 (docs/formats/layouts.md; encoders.md, iq2_kl).
"""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES
from ....simd.scalar import round_product
from ..codec import Codec
from ..fields import BlockFields
from ..float_range import normalise_importance, normalise_rows, to_f16
from ..importance import guard_importance
from ..row_decoder import row_decoder
from .fit import row_weights
from .iq2_kl_search import BLOCK, PAIRS, assign_pairs, pair_terms, score_pairs, search_pairs
from .table_search import MIN_AMAX, ORDINARY_EXPONENTS, signed_max

_SUPERBLOCK = 256
_PAIRS = BLOCK // 2
_LINES = len(PAIRS) * LANES
MIN_INT_SCALE, MAX_INT_SCALE = -32, 31  # integer scales
SIGMA2_FACTOR = np.float32(2.25)  # of the mean square in the weights


@kernel
def _best_int_scale(p, c, middle, d):
    """The integer scale of least error of a block, out of three around `middle`."""
    best, least = np.float32(0), np.float32(0)
    for step in (0, -1, 1):
        int_scale = min(max(middle + np.float32(step), np.float32(MIN_INT_SCALE)), np.float32(MAX_INT_SCALE))
        score = score_pairs(p, c, d * int_scale)
        if score < least:
            best, least = int_scale, score
    return best


@kernel
def _fit(x, importance, codes, int_scales, d):
    """float32 x [rows, n] -> codes uint8 [rows, n / 2], int_scales float32 [rows, n / 32], d float32 [rows]."""
    rows, n = x.shape
    w = np.empty((1, n), np.float32)
    p, c, scratch = np.empty(_LINES, np.float32), np.empty(_LINES, np.float32), np.empty(4 * LANES, np.float32)
    scales = np.empty(n // BLOCK, np.float32)
    for r in range(rows):
        if importance.shape[0]:
            row_weights(x[r : r + 1], importance, r, SIGMA2_FACTOR, np.float32(0), w)
        else:
            for j in range(n):
                w[0, j] = abs(x[r, j])
        for b in range(scales.size):
            at = slice(b * BLOCK, (b + 1) * BLOCK)
            pair_terms(x[r, at], w[0, at], scratch, p, c)
            scales[b] = search_pairs(x[r, at], p, c)
        d[r] = -signed_max(scales) / np.float32(-MIN_INT_SCALE)
        for b in range(scales.size):
            int_scales[r, b] = round_product(scales[b], np.float32(1) / d[r]) if d[r] != 0 else np.float32(0)
        sxq = sqq = np.float32(0)
        for b in range(scales.size):
            at = slice(b * BLOCK, (b + 1) * BLOCK)
            pair_terms(x[r, at], w[0, at], scratch, p, c)
            int_scale = _best_int_scale(p, c, int_scales[r, b], d[r])
            int_scales[r, b] = int_scale
            xq, qq = assign_pairs(p, c, d[r] * int_scale, codes[r, b * _PAIRS : (b + 1) * _PAIRS])
            sxq += int_scale * xq
            sqq += int_scale * int_scale * qq
        if sqq > 0:
            d[r] = sxq / sqq


def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """iq2_kl: float32 [rows, n], n a multiple of 256, importance float32 [n] or None -> uint8 [rows, 2 + n / 256 * 86]."""
    rows, n = x.shape
    v = normalise_importance(guard_importance(x, importance, BLOCK))
    x, exponents = normalise_rows(x, ORDINARY_EXPONENTS, MIN_AMAX)
    codes, int_scales = np.empty((rows, n // 2), np.uint8), np.empty((rows, n // BLOCK), np.float32)
    d = np.empty(rows, np.float32)
    _fit(x, v, codes, int_scales, d)
    fields, levels = BlockFields.of("iq2_kl"), (int_scales - MIN_INT_SCALE).astype(np.uint8)
    q = fields.pack(rows, n, codes=codes, scales=levels)
    q[d == 0] = 0
    d = np.where(d == 0, np.float32(0), d)  # not -0
    fields.write_scale(q, to_f16(np.ldexp(d, exponents)))
    return q


CODECS = {"iq2_kl": Codec(encode, row_decoder("iq2_kl"))}
