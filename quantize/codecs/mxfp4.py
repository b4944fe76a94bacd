"""mxfp4: blocks of 32 four-bit floats (E2M1) with a power of two as their scale (OCP Microscaling Formats; spec B, D.1).

The usual rule takes the exponent of the largest element, less 2; it cuts off what lies above 6/8 of the next power of two. Here
the next larger exponent is tried as well, and the one with the smaller (importance-weighted) squared error is kept. Rows that
came from mxfp4 are reproduced exactly.
"""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...formats.layouts.tables import E2M1_DOUBLED
from ...simd.byte_lanes import i8_to_float, load_bytes, lookup_bytes
from ...simd.compile import kernel
from ...simd.lanes import (
    LANES,
    fma_lanes,
    load,
    max_lanes,
    min_lanes,
    reduce_max,
    reduce_sum,
    round_product_lanes,
    select,
    splat,
    store,
)
from .importance import as_rows
from .registry import Codec, decoder

BLOCK = 32
_BYTES = TYPES["mxfp4"].block_bytes

_VALUE_BYTES = E2M1_DOUBLED.astype(np.int8)

# Half of 2^(E - 127) for each exponent byte E: the unit of E2M1_DOUBLED.
_UNITS = np.ldexp(1.0, np.arange(256) - 128).astype(np.float32)
# The inverse of the units below this one is infinite. Blocks of magnitudes below 2^-122 lose precision by it.
_LEAST = 3
_INVERSES = np.concatenate([np.zeros(_LEAST), np.ldexp(1.0, 128 - np.arange(_LEAST, 256))]).astype(np.float32)

_TIES_DOWN = np.float32(1 - 2**-23)  # halfway between two values the smaller magnitude is taken


@kernel
def _round(x, inverse):
    """The magnitude, in units, of the value nearest to x."""
    y = abs(x) * inverse * _TIES_DOWN
    step = select(y < 4, splat(1), select(y < 8, splat(2), splat(4)))
    over = select(y < 4, splat(1), select(y < 8, splat(0.5), splat(0.25)))
    return round_product_lanes(min_lanes(y, splat(12)), over) * step


@kernel
def _code(x, inverse):
    v = _round(x, inverse)
    code = select(v < 4, v, select(v < 8, v * 0.5 + 2, v * 0.25 + 4))
    return select((x < 0) & (v > 0), code + 8, code)


@kernel
def _miss(x, unit, inverse):
    return abs(x) - _round(x, inverse) * unit


@kernel
def _encode(x, importance, units, inverses, out):
    """out: uint8 [rows, row_bytes]. Here the lanes are elements of one block."""
    rows, n = x.shape
    top = np.empty(1, np.float32)
    bits = top.view(np.uint32)
    for r in range(rows):
        row, to = x[r], out[r]
        v = importance[r % importance.shape[0]] if importance.shape[0] > 0 else row
        for b in range(n // BLOCK):
            a, c = load(row, BLOCK * b), load(row, BLOCK * b + LANES)
            top[0] = reduce_max(max_lanes(abs(a), abs(c)))
            e = max(np.int64(bits[0] >> np.uint32(23)) - 2, _LEAST)
            miss_a, miss_c = _miss(a, units[e], inverses[e]), _miss(c, units[e], inverses[e])
            more_a, more_c = _miss(a, units[e + 1], inverses[e + 1]), _miss(c, units[e + 1], inverses[e + 1])
            # In units, so that squares of tiny and of huge weights stay in range.
            unit = inverses[e]
            miss_a, miss_c, more_a, more_c = miss_a * unit, miss_c * unit, more_a * unit, more_c * unit
            gain_a, gain_c = fma_lanes(miss_a, miss_a, -(more_a * more_a)), fma_lanes(miss_c, miss_c, -(more_c * more_c))
            if importance.shape[0] > 0:
                gain_a, gain_c = gain_a * load(v, BLOCK * b), gain_c * load(v, BLOCK * b + LANES)
            if reduce_sum(gain_a + gain_c) > 0:
                e += 1
            to[_BYTES * b] = e if top[0] > 0 else 0
            store(to, _BYTES * b + 1, fma_lanes(_code(c, inverses[e]), splat(16), _code(a, inverses[e])))


@kernel
def _decode(q, units, out):
    """q: uint8 [bytes]; out: float32 [elements]."""
    table = load_bytes(_VALUE_BYTES, 0)
    for b in range(out.size // BLOCK):
        unit, nibbles = units[q[_BYTES * b]], load_bytes(q, _BYTES * b + 1)
        store(out, BLOCK * b, i8_to_float(lookup_bytes(table, nibbles & 15)) * unit)
        store(out, BLOCK * b + LANES, i8_to_float(lookup_bytes(table, nibbles >> 4)) * unit)


def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """float32 [rows, n], n a multiple of 32, and importance float32 [n] or None -> uint8 [rows, n / 32 * 17] (spec part B)."""
    rows, n = x.shape
    out = np.empty((rows, TYPES["mxfp4"].row_bytes(n)), np.uint8)
    _encode(x, as_rows(importance), _UNITS, _INVERSES, out)
    return out


CODECS: dict[str, Codec] = {"mxfp4": Codec(encode, decoder(_decode, _UNITS))}
