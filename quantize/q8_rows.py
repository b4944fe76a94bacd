"""Eight bits and wide scales: q8_KV, one scale for a row, and q8_k_r8, one for 256 elements of each of eight interleaved rows.

q8_k_r8 is an encoding of its own, not a permutation of another type: its codec works on whole groups of eight rows in their
interleaved layout (spec C.2, C.3, D.8). Neither type uses importance.
"""

from __future__ import annotations

import numpy as np

from ..formats import TYPES
from ..formats.kernels import kernel
from .codec import Codec
from .lanes import LANES, highest_lane, larger, load, nearest, spread, store, store_half

_META = TYPES["q8_KV"].row_meta
SUPER, GROUP = 256, 8
_HEAD = 2 * GROUP  # bytes of float16 scales before the codes of an interleaved block


@kernel
def _largest(x):
    """The largest magnitude of a row of a multiple of 32 elements."""
    one = two = spread(0)
    for i in range(0, x.size, 2 * LANES):
        one, two = larger(abs(load(x, i)), one), larger(abs(load(x, i + LANES)), two)
    return highest_lane(larger(one, two))


@kernel
def _encode_rows(x, scales, sums, out):
    """scales: float32 [rows], sums: int32 [rows], both written; out: uint8 [rows, row_bytes], of which the codes are."""
    totals = np.empty(LANES, np.float32)
    for r in range(x.shape[0]):
        row, to = x[r], out[r]
        d = _largest(row) / np.float32(127)
        live = d > np.float32(3e-39)  # the inverse of less is infinite
        inverse = np.float32(1) / d if live else np.float32(0)
        scales[r] = d if live else np.float32(0)
        total = spread(0)  # exact: below 2^24 for rows of up to two million elements
        for i in range(0, row.size, LANES):
            q = nearest(load(row, i) * inverse, spread(1))
            store(to, _META + i, q)
            total = total + q
        store(totals, 0, total)
        sums[r] = 0
        for lane in range(LANES):
            sums[r] += np.int32(totals[lane])


@kernel
def _decode_rows(q, scales, out):
    for r in range(q.shape[0]):
        row, to, d = q[r], out[r], scales[r]
        for i in range(to.size):
            to[i] = d * np.float32(np.int8(row[_META + i]))


@kernel
def _encode_groups(x, out):
    """x: float32 [8 * groups, n]; out: uint8 [groups * n / 256, 2064]."""
    tops, halves = np.zeros(LANES, np.float32), np.empty(LANES, np.uint16)
    codes = np.empty(SUPER, np.uint8)
    words = codes.view(np.uint32)
    columns = x.shape[1] // SUPER
    for b in range(out.shape[0]):
        to = out[b].view(np.uint32)
        group, column = b // columns, b % columns
        for k in range(GROUP):
            block = x[GROUP * group + k, SUPER * column : SUPER * (column + 1)]
            top = _largest(block)
            tops[k] = top
            inverse = np.float32(127) / top if top > np.float32(1e-36) else np.float32(0)
            for i in range(0, SUPER, LANES):
                store(codes, i, nearest(load(block, i) * inverse, spread(1)))
            for w in range(SUPER // 4):
                to[_HEAD // 4 + GROUP * w + k] = words[w]
        store_half(halves, 0, load(tops, 0) / 127)
        for k in range(GROUP):
            out[b, 2 * k], out[b, 2 * k + 1] = halves[k] & 255, halves[k] >> 8


@kernel
def _decode_groups(q, scales, out):
    """q: uint8 [groups * n / 256, 2064], scales: float32 [that, 8]; out: float32 [8 * groups, n]."""
    columns = out.shape[1] // SUPER
    for b in range(q.shape[0]):
        block = q[b]
        group, column = b // columns, b % columns
        for k in range(GROUP):
            to, d = out[GROUP * group + k, SUPER * column : SUPER * (column + 1)], scales[b, k]
            for w in range(SUPER // 4):
                for i in range(4):
                    to[4 * w + i] = d * np.float32(np.int8(block[_HEAD + 4 * (GROUP * w + k) + i]))


def encode_rows(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    rows, n = x.shape
    out = np.empty((rows, TYPES["q8_KV"].row_bytes(n)), np.uint8)
    scales, sums = np.empty(rows, np.float32), np.empty(rows, np.int32)
    _encode_rows(x, scales, sums, out)
    out[:, :4] = scales[:, None].view(np.uint8)
    out[:, 4:_META] = sums[:, None].view(np.uint8)
    return out


def decode_rows(q: np.ndarray, n: int) -> np.ndarray:
    out = np.empty((len(q), n), np.float32)
    _decode_rows(q, q[:, :4].copy().view(np.float32)[:, 0], out)
    return out


def encode_groups(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
    rows, n = x.shape
    kind = TYPES["q8_k_r8"]
    out = np.empty((rows, kind.row_bytes(n)), np.uint8)
    _encode_groups(x, out.reshape(-1, GROUP * kind.block_bytes))
    return out


def decode_groups(q: np.ndarray, n: int) -> np.ndarray:
    blocks = q.reshape(-1, GROUP * TYPES["q8_k_r8"].block_bytes)
    out = np.empty((len(q), n), np.float32)
    _decode_groups(blocks, blocks[:, :_HEAD].copy().view(np.float16).astype(np.float32), out)
    return out


CODECS: dict[str, Codec] = {"q8_kv": Codec(encode_rows, decode_rows), "q8_k_r8": Codec(encode_groups, decode_groups)}
