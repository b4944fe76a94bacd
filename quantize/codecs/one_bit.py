"""q1_0_g128: the signs of 128 elements and one float16 scale (docs/formats/layouts.md; encoders.md, legacy types)."""

from __future__ import annotations

import numpy as np

from ...formats import TYPES
from ...simd.compile import kernel
from ...simd.lanes import LANES, any_lane, fma_lanes, load, mask_bits, select, splat, store_half
from ...simd.memory import address, keep_alive, view
from .block_lanes import transpose_blocks, transpose_importance
from .codec import Codec
from .importance import importance_rows
from .row_decoder import row_decoder

BLOCK = 128
_BYTES = TYPES["q1_0_g128"].block_bytes


@kernel
def _encode(x, importance, out):
    """x float32 [rows, n] -> out uint8 [blocks, 18]. The scale of least weighted squared error is the weighted mean of |x|."""
    n, tile = x.shape[1], LANES * BLOCK
    # Importance of one row comes again with each row, or each sixteen blocks, whichever are more: it is transposed once then.
    comes_again = importance.shape[0] == 1 and max(n, tile) % min(n, tile) == 0
    period = max(n, tile) if comes_again else tile
    x_lanes, qw_lanes = np.empty(tile, np.float32), np.empty(period, np.float32)
    d_bits, flat, words = np.empty(LANES, np.uint16), x.reshape(-1), view(address(out), out.size // 2, np.uint16)
    for first in range(0, out.shape[0], LANES):
        count = min(LANES, out.shape[0] - first)
        transpose_blocks(x, first, BLOCK, x_lanes)
        scale, is_plain = splat(0), splat(0) < 1
        if importance.shape[0] > 0:
            at = first * BLOCK % period
            if not comes_again or first * BLOCK < period:
                transpose_importance(importance, x, first, BLOCK, qw_lanes[at : at + tile])
            sum_w, sum_wx = splat(0), splat(0)
            for i in range(0, tile, LANES):
                qw = load(qw_lanes, at + i)
                sum_w = sum_w + qw
                sum_wx = fma_lanes(qw, abs(load(x_lanes, i)), sum_wx)
            # Where the importance of a block is 0, or the sums overflow, the unweighted mean.
            is_plain = ~((sum_w > 0) & (sum_w < np.float32(3e38)) & (sum_wx < np.float32(3e38)))
            scale = sum_wx / select(is_plain, splat(1), sum_w)
        if any_lane(is_plain):
            mean = splat(0)
            for i in range(0, tile, LANES):
                mean = mean + abs(load(x_lanes, i)) * np.float32(1 / BLOCK)
            scale = select(is_plain, mean, scale)
        store_half(d_bits, 0, scale)
        for lane in range(count):
            place, start = np.uintp((first + lane) * (_BYTES // 2)), (first + lane) * BLOCK
            words[place] = d_bits[lane]
            for i in range(BLOCK // LANES):
                words[place + np.uintp(1 + i)] = mask_bits(load(flat, start + LANES * i) >= 0)
    keep_alive(out)


def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    """q1_0_g128: float32 [rows, n], n a multiple of 128, importance float32 [n] or None -> uint8 [rows, n / 128 * 18]."""
    rows, n = x.shape
    out = np.empty((rows, TYPES["q1_0_g128"].row_bytes(n)), np.uint8)
    _encode(x, importance_rows(importance), out.reshape(-1, _BYTES))
    return out


CODECS: dict[str, Codec] = {"q1_0_g128": Codec(encode, row_decoder("q1_0_g128"))}
