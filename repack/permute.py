"""The kernel that permutes the bits of blocks as a BitPermutation says."""

from __future__ import annotations

import numpy as np

from ..simd.compile import kernel
from ..simd.memory import load_word, store_word
from .bit_permutation import BitPermutation, BlockRows


def permute(permutation: BitPermutation, source: BlockRows, target: BlockRows, block_bytes: int) -> None:
    """Writes all blocks of `target` from those of `source`, without the row metas. One of the two is interleaved; block_bytes:
    bytes of a block of one row, the same in both."""
    group = max(source.group, target.group)
    groups = source.rows.shape[0] // group
    blocks = (source.rows.shape[1] - source.row_meta) // block_bytes
    if groups == 0 or blocks == 0:
        return
    strides = []  # of source and target: address of the first block, bytes from group to group and from block to block
    for side in (source, target):
        row_bytes = side.rows.shape[1]
        strides += [side.rows.ctypes.data + side.group * side.row_meta, group * row_bytes, side.group * block_bytes]
    _permute(
        groups,
        blocks,
        np.array(strides, np.uint64),
        (permutation.word_row * target.rows.shape[1] + permutation.word_offset).astype(np.uint64),
        permutation.initial,
        permutation.runs,
        (permutation.term_row * source.rows.shape[1] + permutation.term_offset).astype(np.uint64),
        permutation.rotation,
        permutation.mask,
        permutation.step,
    )


@kernel
def _permute(groups, blocks, strides, word_at, initial, runs, term_at, rotation, mask, step):
    # Four blocks at a time, so that the numbers of a term are read once for four words. uint64 throughout, because numba makes
    # a float of int64 + uint64 and tests signed indices for being negative.
    for g in range(groups):
        for b in range(0, blocks, 4):
            remaining = blocks - b
            s0 = strides[0] + np.uint64(g) * strides[1] + np.uint64(b) * strides[2]
            d0 = strides[3] + np.uint64(g) * strides[4] + np.uint64(b) * strides[5]
            # At the end of a row the last block is written several times, in place of those that are missing.
            s1 = s0 + strides[2] if remaining > 1 else s0
            d1 = d0 + strides[5] if remaining > 1 else d0
            s2 = s1 + strides[2] if remaining > 2 else s1
            d2 = d1 + strides[5] if remaining > 2 else d1
            s3 = s2 + strides[2] if remaining > 3 else s2
            d3 = d2 + strides[5] if remaining > 3 else d2
            w = np.uint64(0)
            t = np.uint64(0)
            p = np.uint64(0)
            for run in range(runs.shape[0]):
                for _ in range(runs[run, 0]):
                    x0 = initial[w]
                    x1 = x0
                    x2 = x0
                    x3 = x0
                    for _ in range(runs[run, 1]):
                        at, right, m = term_at[t], rotation[t], mask[t]
                        left = (np.uint32(32) - right) & np.uint32(31)
                        y = load_word(s0 + at)
                        x0 ^= ((y >> right) | (y << left)) & m
                        y = load_word(s1 + at)
                        x1 ^= ((y >> right) | (y << left)) & m
                        y = load_word(s2 + at)
                        x2 ^= ((y >> right) | (y << left)) & m
                        y = load_word(s3 + at)
                        x3 ^= ((y >> right) | (y << left)) & m
                        t += np.uint64(1)
                    for _ in range(runs[run, 2]):
                        s, m, exchange = step[p, 0], step[p, 1], step[p, 2]
                        y = (((x0 >> s) & exchange) ^ x0) & m
                        x0 ^= (y & exchange) ^ (y << s)
                        y = (((x1 >> s) & exchange) ^ x1) & m
                        x1 ^= (y & exchange) ^ (y << s)
                        y = (((x2 >> s) & exchange) ^ x2) & m
                        x2 ^= (y & exchange) ^ (y << s)
                        y = (((x3 >> s) & exchange) ^ x3) & m
                        x3 ^= (y & exchange) ^ (y << s)
                        p += np.uint64(1)
                    at = word_at[w]
                    store_word(d0 + at, x0)
                    store_word(d1 + at, x1)
                    store_word(d2 + at, x2)
                    store_word(d3 + at, x3)
                    w += np.uint64(1)
