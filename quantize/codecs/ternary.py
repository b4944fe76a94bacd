"""Rows of -1, 0, 1 times one scale, for models trained that way: iq1_bn (1.625 bits), iq2_bn (2 bits) (spec B, D.8).

The scale is the largest magnitude of the row; what is smaller than half of it becomes 0. Importance is not used. Decoding
applies the row's scale: so do the reference's matrix products and iq2_bn_r4, but not its conversion of these types to floats.
"""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...simd.byte_lanes import load_bytes, u8_to_float
from ...simd.compile import kernel
from ...simd.lanes import LANES, load, max_lanes, reduce_max, select, splat, store
from .registry import Codec, new_rows

BLOCK = 64
_POWERS = np.array([1, 3, 9, 27, 81])

# iq1_bn: a byte is a fraction of 256 whose first five digits to the base 3 are five digits, the last of them first.
_BYTE_OF = ((256 * np.arange(243) + 242) // 243).astype(np.uint8)
_DIGITS = ((np.arange(256)[:, None] * 3 ** np.arange(4, -1, -1) % 256 * 3) >> 8).astype(np.int8)


@kernel
def _scales_of(x, out):
    for r in range(x.shape[0]):
        row = x[r]
        top = splat(0)
        for i in range(0, row.size, LANES):
            top = max_lanes(abs(load(row, i)), top)
        out[r] = reduce_max(top)


@kernel
def _find_digits(block, half, digits):
    """0, 1, 2 for -1, 0, 1 times the scale: writes uint8 [64]."""
    for i in range(0, BLOCK, LANES):
        v = load(block, i)
        store(digits, i, select(v >= half, splat(2), select(v <= -half, splat(0), splat(1))))


@kernel
def _encode_iq2_bn(x, halves, meta, out):
    """halves: float32 [rows], half the scale, above 0; meta: bytes before the blocks; out: uint8 [rows, row_bytes]."""
    digits = np.empty(BLOCK, np.uint8)
    for r in range(x.shape[0]):
        row, to = x[r], out[r, meta:]
        for b in range(row.size // BLOCK):
            _find_digits(row[BLOCK * b : BLOCK * (b + 1)], halves[r], digits)
            for j in range(16):
                to[16 * b + j] = digits[j] | digits[16 + j] << 2 | digits[32 + j] << 4 | digits[48 + j] << 6


@kernel
def _encode_iq1_bn(x, halves, meta, byte_of, out):
    digits = np.empty(BLOCK, np.uint8)
    for r in range(x.shape[0]):
        row, to = x[r], out[r, meta:]
        for b in range(row.size // BLOCK):
            _find_digits(row[BLOCK * b : BLOCK * (b + 1)], halves[r], digits)
            last = 0
            for g in range(4):
                for k in range(3):
                    index = 0
                    for j in range(5):
                        index += digits[16 * g + 5 * k + j] * _POWERS[j]
                    to[13 * b + 3 * g + k] = byte_of[index]
                last += digits[16 * g + 15] * _POWERS[g]
            to[13 * b + 12] = byte_of[last]


@kernel
def _decode_iq2_bn(q, scales, meta, out):
    bytes_ = q.reshape(-1)
    for r in range(q.shape[0]):
        to, d, at = out[r], scales[r], q.shape[1] * r + meta
        for b in range(to.size // BLOCK):
            pairs = load_bytes(bytes_, at + 16 * b)
            for i in range(BLOCK * b, BLOCK * b + BLOCK, LANES):
                store(to, i, (u8_to_float(pairs & 3) - 1) * d)
                pairs = pairs >> 2


@kernel
def _decode_iq1_bn(q, scales, meta, digits, out):
    for r in range(q.shape[0]):
        to, d = out[r], scales[r]
        blocks = q[r, meta:]
        for b in range(to.size // BLOCK):
            for g in range(4):
                start = BLOCK * b + 16 * g
                for k in range(3):
                    for j in range(5):
                        to[start + 5 * k + j] = d * np.float32(digits[blocks[13 * b + 3 * g + k], j] - 1)
                to[start + 15] = d * np.float32(digits[blocks[13 * b + 12], g] - 1)


def _codec(name: str, scale: type, run, undo, *tables) -> Codec:
    """scale: the dtype of the row's scale in the file; tables: what run (first) and undo (second) need besides."""
    kind = TYPES[name]

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        rows, n = x.shape
        out = np.empty((rows, kind.row_bytes(n)), np.uint8)
        tops = np.empty(rows, np.float32)
        _scales_of(x, tops)
        halves = np.where(tops > 0, tops * np.float32(0.5), np.float32(1))
        run(x, np.maximum(halves, np.finfo(np.float32).smallest_subnormal), kind.row_meta, *tables[:1], out)
        stored = np.minimum(tops, np.finfo(scale).max).astype(scale)
        out[:, : kind.row_meta] = stored[:, None].view(np.uint8)
        return out

    def decode(q: np.ndarray, n: int) -> np.ndarray:
        out = new_rows(len(q), n)
        scales = q[:, : kind.row_meta].copy().view(scale)[:, 0].astype(np.float32)
        undo(q, scales, kind.row_meta, *tables[1:], out)
        return out

    return Codec(encode, decode)


CODECS: dict[str, Codec] = {
    "iq1_bn": _codec("iq1_bn", np.float16, _encode_iq1_bn, _decode_iq1_bn, _BYTE_OF, _DIGITS),
    "iq2_bn": _codec("iq2_bn", np.float32, _encode_iq2_bn, _decode_iq2_bn),
}
