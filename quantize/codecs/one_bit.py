"""q1_0_g128: the signs of 128 elements and one float16 scale (spec B, D.1)."""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...simd.compile import kernel
from ...simd.lanes import LANES, fma_lanes, load, select, splat, store_half
from .block_lanes import take_blocks, take_importance
from .importance import as_rows
from .legacy.symmetric import half_scales
from .registry import Codec

BLOCK = 128
_BYTES = TYPES["q1_0_g128"].block_bytes


@kernel
def _encode(x, importance, out):
    """The scale with the least (weighted) squared error is the (weighted) mean of the magnitudes. out: uint8 [blocks, 18]."""
    X, V, halves = np.empty(LANES * BLOCK, np.float32), np.empty(LANES * BLOCK, np.float32), np.empty(LANES, np.uint16)
    for first in range(0, out.shape[0], LANES):
        count = min(LANES, out.shape[0] - first)
        take_blocks(x, first, BLOCK, X)
        total = splat(0)
        for i in range(0, LANES * BLOCK, LANES):
            total = total + abs(load(X, i)) * np.float32(1 / BLOCK)
        if importance.shape[0] > 0:
            take_importance(importance, x, first, BLOCK, V)
            weights, weighted = splat(0), splat(0)
            for i in range(0, LANES * BLOCK, LANES):
                v = load(V, i)
                weights = weights + v
                weighted = fma_lanes(v, abs(load(X, i)), weighted)
            # Without importance, or where the sums overflow, all count alike.
            known = (weights > 0) & (weights < np.float32(3e38)) & (weighted < np.float32(3e38))
            total = select(known, weighted / select(known, weights, splat(1)), total)
        store_half(halves, 0, total)
        for lane in range(count):
            block = out[first + lane]
            block[0], block[1] = halves[lane] & 255, halves[lane] >> 8
            for k in range(16):
                byte = 0
                for bit in range(8):
                    byte |= (X[LANES * (8 * k + bit) + lane] >= 0) << bit
                block[2 + k] = byte


@kernel
def _decode(q, scales, out):
    for b in range(q.shape[0]):
        block, row, d = q[b], out[b], scales[b]
        for k in range(16):
            for bit in range(8):
                row[8 * k + bit] = d if (block[2 + k] >> bit) & 1 else -d


def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """float32 [rows, n], n a multiple of 128, and importance float32 [n] or None -> uint8 [rows, n / 128 * 18] (spec D.1)."""
    rows, n = x.shape
    out = np.empty((rows, TYPES["q1_0_g128"].row_bytes(n)), np.uint8)
    _encode(x, as_rows(importance), out.reshape(-1, _BYTES))
    return out


def decode(q: np.ndarray, n: int) -> np.ndarray:
    """uint8 [rows, n / 128 * 18] -> float32 [rows, n] (spec part B)."""
    blocks = q.reshape(-1, _BYTES)
    out = np.empty((len(blocks), BLOCK), np.float32)
    _decode(blocks, half_scales(blocks), out)
    return out.reshape(-1, n)


CODECS: dict[str, Codec] = {"q1_0_g128": Codec(encode, decode)}
