"""Codes of a non-uniform table of 16 values: iq4_nl, blocks of 32 with a float16 scale each, and iq4_xs, super-blocks of 256
with a float16 scale and a six-bit scale for each 32 elements (spec C.0, D.3)."""

from __future__ import annotations

import numpy as np

from ....formats import TYPES
from ....formats.layouts.tables import IQ4_VALUES
from ....simd.byte_lanes import (
    i8_to_float,
    load_bytes,
    load_f16,
    load_u16,
    load_u32,
    lookup_bytes,
    u8_to_float,
    unpack_2bit,
    unpack_4bit,
)
from ....simd.compile import kernel
from ....simd.lanes import LANES, any_lane, clamp, fma_lanes, load, round_product_lanes, select, splat, store, store_half
from ....simd.table_lookup import lookup_lanes
from ..block_lanes import importance_weights, square_weights, sum_of_squares, transpose_blocks, transpose_importance
from ..importance import importance_rows
from ..registry import Codec, kernel_decoder
from ..scale_search import add_to_codes, largest_magnitude

BLOCK, SUPER = 32, 256
ENTRIES = 16
VALUES = IQ4_VALUES.astype(np.float32)
_BYTES = VALUES.astype(np.int8)
_LOWEST, _HIGHEST = VALUES[0], VALUES[-1]

# The line from -128 to 128 is cut into 32 bins of 8, of which none holds more than one midpoint between entries. Per bin: that
# midpoint, and the index below it. (Entries lie 12 or more apart but for 11 between -10 and 1.)
_BINS, _BIN = 32, 8


def _bins() -> tuple[np.ndarray, np.ndarray]:
    middles = (VALUES[1:] + VALUES[:-1]) / 2
    edges = np.arange(_BINS) * _BIN - 128
    below = np.searchsorted(middles, edges, side="left")
    return np.append(middles, np.inf)[below].astype(np.float32), below.astype(np.float32)


_MIDDLE, _BELOW = _bins()
_VALUE_BELOW = VALUES[_BELOW.astype(int)]
_VALUE_ABOVE = VALUES[np.minimum(_BELOW.astype(int) + 1, ENTRIES - 1)]
_PADDED = np.concatenate([VALUES, np.full(_BINS - ENTRIES, VALUES[-1])])  # look_up wants 32 entries


@kernel
def _bin_of(y):
    return clamp((y + 128) * (1 / _BIN), 0, _BINS - 1)


@kernel
def _nearest_value(y):
    """The table's entry nearest to y, of two equally near the larger."""
    where = _bin_of(y)
    return select(y >= lookup_lanes(_MIDDLE, where), lookup_lanes(_VALUE_ABOVE, where), lookup_lanes(_VALUE_BELOW, where))


@kernel
def _nearest_index(y):
    where = _bin_of(y)
    below = lookup_lanes(_BELOW, where)
    return select(y >= lookup_lanes(_MIDDLE, where), below + 1, below)


@kernel
def _table_scale(x, w, at, codes):
    """Scale of sixteen blocks: a grid of start scales from both ends of the table, then ascent.

    The blocks lie at x[at], w[at]; `codes` is scratch for one block of each lane.
    """
    extreme, magnitude = largest_magnitude(x, at, BLOCK)
    dead = magnitude < 1e-15
    extreme = select(dead, splat(1), extreme)
    inverse = -_LOWEST / extreme
    scale, best = splat(0), splat(0)
    sxq, sqq = splat(0), splat(0)
    for k in range(31):
        trial = inverse
        if k > 0:
            trial = ((k - 1) // 2 - 7 + (_LOWEST if k % 2 else _HIGHEST)) / extreme
        txq, tqq = splat(0), splat(0)
        for i in range(at, at + LANES * BLOCK, LANES):
            xi, wi = load(x, i), load(w, i)
            q = _nearest_value(trial * xi)
            wq = wi * q
            txq = fma_lanes(wq, xi, txq)
            tqq = fma_lanes(wq, q, tqq)
        better = (tqq > 0) & (txq * txq > best * tqq)
        scale = select(better, txq / tqq, scale)
        best = select(better, scale * txq, best)
        inverse = select(better, trial, inverse)
        sxq, sqq = select(better, txq, sxq), select(better, tqq, sqq)
    for i in range(0, LANES * BLOCK, LANES):
        store(codes, i, _nearest_index(inverse * load(x, at + i)))
    # Where sums of weights vanish or overflow, the scale that fits the largest element has to do.
    lost = ~dead & ~((abs(scale) > 0) & (abs(scale) < np.float32(3e38)))
    scale = _ascend(x, w, at, codes, select(dead | lost, splat(0), scale), sxq, sqq, best)
    return select(lost, extreme / _LOWEST, scale)


@kernel
def _ascend(x, w, at, codes, scale, sxq, sqq, best):
    active = abs(scale) > 0
    for _ in range(BLOCK * ENTRIES):
        soonest, where, move = splat(np.inf), splat(-1), splat(0)
        wm, xm, vm, um = splat(0), splat(0), splat(0), splat(0)
        for i in range(BLOCK):
            xi, wi, q = load(x, at + LANES * i), load(w, at + LANES * i), load(codes, LANES * i)
            value = lookup_lanes(_PADDED, q)
            slope = scale * wi * fma_lanes(-scale, value, xi)
            up, down = (slope > 0) & (q < ENTRIES - 1), (slope < 0) & (q > 0)
            step = select(up, splat(1), splat(-1))
            neighbour = lookup_lanes(_PADDED, clamp(q + step, 0, ENTRIES - 1))
            wait = (neighbour - value) / slope
            take = (up | down) & (wait < soonest)
            soonest, where = select(take, wait, soonest), select(take, splat(i), where)
            move = select(take, step, move)
            wm, xm = select(take, wi, wm), select(take, xi, xm)
            vm, um = select(take, value, vm), select(take, neighbour, um)
        txq = fma_lanes(wm * xm, um - vm, sxq)
        tqq = fma_lanes(wm, um * um - vm * vm, sqq)
        active = active & (where >= 0) & (tqq > 0) & (txq * txq > best * tqq)
        if not any_lane(active):
            break
        add_to_codes(codes, 0, BLOCK, active, where, move)
        sxq, sqq = select(active, txq, sxq), select(active, tqq, sqq)
        scale = select(active, sxq / sqq, scale)
        best = select(active, scale * sxq, best)
    return scale


@kernel
def _find_codes(x, at, scale, codes):
    """The codes of a block with a scale that is not yet rounded to float16, as in the reference."""
    live = abs(scale) > np.float32(3e-39)
    inverse = select(live, 1 / select(live, scale, splat(1)), splat(0))
    for i in range(at, at + LANES * BLOCK, LANES):
        store(codes, i, _nearest_index(inverse * load(x, i)))


@kernel
def _encode(x, importance, out):
    """out: uint8 [blocks, 18]."""
    size = LANES * BLOCK
    X, W, C = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float32)
    codes, halves = np.empty(size, np.uint8), np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        transpose_blocks(x, first, BLOCK, X)
        if importance.shape[0] == 0:
            square_weights(X, 0, BLOCK, W)
        else:
            transpose_importance(importance, x, first, BLOCK, W)
            importance_weights(X, W, 0, BLOCK, 2 * sum_of_squares(X, 0, BLOCK) / BLOCK, W)
        scale = _table_scale(X, W, 0, C)
        store_half(halves, 0, scale)
        _find_codes(X, 0, scale, codes)
        for lane in range(min(LANES, out.shape[0] - first)):
            block = out[first + lane]
            block[0], block[1] = halves[lane] & 255, halves[lane] >> 8
            for j in range(16):
                block[2 + j] = codes[LANES * j + lane] | codes[LANES * (j + 16) + lane] << 4


@kernel
def _decode(q, out):
    """q: uint8 [bytes]; out: float32 [elements]."""
    table = load_bytes(_BYTES, 0)
    for b in range(out.size // BLOCK):
        _look_up_block(q, 18 * b + 2, table, load_f16(q, 18 * b), out, BLOCK * b)


@kernel
def _look_up_block(q, at, table, scale, out, to):
    nibbles = load_bytes(q, at)
    store(out, to, i8_to_float(lookup_bytes(table, nibbles & 15)) * scale)
    store(out, to + LANES, i8_to_float(lookup_bytes(table, nibbles >> 4)) * scale)


@kernel
def _encode_xs(x, importance, out):
    """out: uint8 [super-blocks, 136]."""
    size = LANES * SUPER
    X, W, C = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(LANES * BLOCK, np.float32)
    scales, packed = np.empty(LANES * 8, np.float32), np.empty(LANES * 8, np.uint8)
    codes, halves = np.empty(size, np.uint8), np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        transpose_blocks(x, first, SUPER, X)
        if importance.shape[0] == 0:
            square_weights(X, 0, SUPER, W)
        else:
            transpose_importance(importance, x, first, SUPER, W)
            importance_weights(X, W, 0, SUPER, 2 * sum_of_squares(X, 0, SUPER) / SUPER, W)
        for c in range(8):
            store(scales, LANES * c, _table_scale(X, W, LANES * BLOCK * c, C))
        extreme, _ = largest_magnitude(scales, 0, 8)
        d = -extreme / 32
        store_half(halves, 0, d)
        live = abs(d) > np.float32(3e-39)
        inverse = select(live, 1 / select(live, d, splat(1)), splat(0))
        for c in range(8):
            level = clamp(round_product_lanes(inverse, load(scales, LANES * c)), -32, 31)
            store(packed, LANES * c, level + 32)
            _find_codes(X, LANES * BLOCK * c, d * level, codes)
        for lane in range(min(LANES, out.shape[0] - first)):
            _pack_xs(halves[lane], packed, codes, lane, out[first + lane])


@kernel
def _pack_xs(half, packed, codes, lane, out):
    out[0], out[1] = half & 255, half >> 8
    high = 0
    for c in range(8):
        high |= (packed[LANES * c + lane] >> 4) << (2 * c)
    out[2], out[3] = high & 255, high >> 8
    for k in range(4):
        out[4 + k] = (packed[LANES * 2 * k + lane] & 15) | (packed[LANES * (2 * k + 1) + lane] & 15) << 4
    for c in range(8):
        for j in range(16):
            at = LANES * (BLOCK * c + j) + lane
            out[8 + 16 * c + j] = codes[at] | codes[at + LANES * 16] << 4


@kernel
def _decode_xs(q, out):
    table, scales = load_bytes(_BYTES, 0), np.empty(LANES, np.float32)
    for s in range(out.size // SUPER):
        at = 136 * s
        codes = unpack_4bit(load_u32(q, at + 4)) | unpack_2bit(load_u16(q, at + 2)) << 4
        store(scales, 0, (u8_to_float(codes) - 32) * load_f16(q, at))
        for c in range(8):
            _look_up_block(q, at + 8 + 16 * c, table, scales[c], out, SUPER * s + BLOCK * c)


def _codec(name: str, run, undo) -> Codec:
    kind = TYPES[name]

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.empty((rows, kind.row_bytes(n)), np.uint8)
        run(x, importance_rows(importance), out.reshape(-1, kind.block_bytes))
        return out

    return Codec(encode, kernel_decoder(undo))


CODECS: dict[str, Codec] = {
    "iq4_nl": _codec("iq4_nl", _encode, _decode),
    "iq4_xs": _codec("iq4_xs", _encode_xs, _decode_xs),
}
