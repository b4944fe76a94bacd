"""iq4_kss: four bits per weight, block scale and table flag included (docs/formats/layouts.md; encoders.md, iq4_kss).

A row has one float32 scale; a block of 32 has an odd integer scale -127 ... 127 and a flag that selects the table V4 or its
shifted copy: eight bits, one in each of its eight 16-bit words. The other 15 bits of a word encode four codes of four bits,
whose sixteen bits have even parity.
"""

from __future__ import annotations

import numpy as np

from ....simd.compile import kernel
from ....simd.lanes import LANES, load, store
from ....simd.scalar import round_product
from ..codec import Codec
from ..fields import BlockFields
from ..float_range import normalise_importance, normalise_rows
from ..importance import guard_importance
from ..row_decoder import row_decoder
from .fit import row_weights
from .iq4_kss_search import BLOCK, SIZE, assign_quads, gather_quads, scatter_quads, search_quads
from .table_search import MIN_AMAX, ORDINARY_EXPONENTS, signed_max
from .value_tables import V4

MAX_INT_SCALE = 127
SIGMA2_FACTOR = np.float32(2)  # of the mean square in the weights
SIGMA2_SHARE = np.float32(0.25)  # of that, without importance
ROUNDS = 2  # rounds of choosing integer scales and codes and refitting the row's scale to them

# The code of each integer value of the plain table, counted from _LOWEST.
_LOWEST = int(V4[0, 0])
_CODE_OF = np.zeros(int(V4[0, -1]) - _LOWEST + 1, np.uint8)
_CODE_OF[(V4[0] - _LOWEST).astype(int)] = np.arange(16)
_SHIFT = int(V4[1, 0]) - _LOWEST


@kernel
def _odd_integer_scale(scale, d):
    """The odd integer nearest to scale / d, clamped to -127 ... 127."""
    if d == 0:
        return np.float32(1)
    half = round_product(np.float32(0.5), scale / d + np.float32(MAX_INT_SCALE))
    return np.float32(2) * min(max(half, np.float32(0)), np.float32(MAX_INT_SCALE)) - np.float32(MAX_INT_SCALE)


@kernel
def _best_int_scale(x, w, middle, d, trial_q, q):
    """The best integer scale of a block near `middle`: (integer scale, flag, sum of w x q, sum of w q q), q in multiples of d.

    x, w: arrays of quadruples; q: out, the table values of both tables; trial_q: scratch.
    """
    int_scale, flag, sxq, sqq, least = middle, 0, np.float32(0), np.float32(0), np.float32(np.inf)
    for step in (0, -2, 2):
        trial = middle + np.float32(step)
        if abs(trial) > MAX_INT_SCALE:
            continue
        scale = d * trial
        xq, qq = assign_quads(x, w, scale, trial_q)
        for table in range(2):
            error = scale * (scale * qq[table] - np.float32(2) * xq[table])
            if error < least:
                int_scale, flag, sxq, sqq, least = trial, table, trial * xq[table], trial * trial * qq[table], error
        if int_scale == trial:
            for i in range(0, SIZE, LANES):
                store(q, i, load(trial_q, i))
    return int_scale, flag, sxq, sqq


@kernel
def _fit(x, importance, entries, flags, int_scales, d):
    """float32 x [rows, n] -> entries float32 [rows, n]; flags uint8, odd int_scales float32 [rows, n / 32]; scales d [rows]."""
    rows, n = x.shape
    blocks = n // BLOCK
    w, scales = np.empty((1, n), np.float32), np.empty(blocks, np.float32)
    xs, ws = np.empty((blocks, SIZE), np.float32), np.empty((blocks, SIZE), np.float32)
    trial_q, q = np.empty(SIZE, np.float32), np.empty(SIZE, np.float32)
    for r in range(rows):
        row_weights(x[r : r + 1], importance, r, SIGMA2_FACTOR, SIGMA2_SHARE, w)
        for b in range(blocks):
            gather_quads(x[r, b * BLOCK :], xs[b])
            gather_quads(w[0, b * BLOCK :], ws[b])
            scales[b] = search_quads(xs[b], ws[b], q)
        d[r] = abs(signed_max(scales)) / np.float32(MAX_INT_SCALE)
        for b in range(blocks):
            int_scales[r, b] = _odd_integer_scale(scales[b], d[r])
        for _ in range(ROUNDS):
            sxq = sqq = np.float32(0)
            for b in range(blocks):
                int_scales[r, b], flags[r, b], xq, qq = _best_int_scale(xs[b], ws[b], int_scales[r, b], d[r], trial_q, q)
                sxq += xq
                sqq += qq
                scatter_quads(q, flags[r, b], entries[r, b * BLOCK :])
            if sqq > 0:
                d[r] = sxq / sqq


@kernel
def _codes_of(entries, flags, codes):
    """Table values, float32 [rows, n], to codes, uint8 [rows, n]; flags: uint8 [rows, n / 32], which copy of the table."""
    for r in range(entries.shape[0]):
        for i in range(entries.shape[1]):
            codes[r, i] = _CODE_OF[int(entries[r, i]) - _LOWEST - _SHIFT * flags[r, i // BLOCK]]


def _pack(entries: np.ndarray, flags: np.ndarray, int_scales: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The results of _fit -> uint8 [rows, row_bytes]."""
    codes, odd = np.empty(entries.shape, np.uint8), (int_scales + np.float32(MAX_INT_SCALE)).astype(np.uint8)
    _codes_of(entries, flags, codes)
    fields = BlockFields.of("iq4_kss")
    q = fields.pack(*entries.shape, codes=codes, scales=odd >> 1, flags=flags)
    q[d == 0] = 0
    fields.write_scale(q, d)
    return q


def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """iq4_kss: float32 [rows, n], n a multiple of 256, importance float32 [n] or None -> uint8 [rows, 4 + n / 256 * 128]."""
    rows, n = x.shape
    v = normalise_importance(guard_importance(x, importance, BLOCK))
    x, exponents = normalise_rows(x, ORDINARY_EXPONENTS, MIN_AMAX)
    entries = np.empty(x.shape, np.float32)
    flags, int_scales = np.empty((rows, n // BLOCK), np.uint8), np.empty((rows, n // BLOCK), np.float32)
    d = np.empty(rows, np.float32)
    _fit(x, v, entries, flags, int_scales, d)
    return _pack(entries, flags, int_scales, np.ldexp(d, exponents))


CODECS = {"iq4_kss": Codec(encode, row_decoder("iq4_kss"))}
