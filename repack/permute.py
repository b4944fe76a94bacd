"""The kernel that permutes the bits of blocks as a BitPermutation says."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..simd.compile import kernel
from ..simd.memory import address, keep_alive, load_word, store_word
from ..simd.scalar import rotate_right
from .bit_permutation import BitPermutation, BlockRows


def permute(permutation: BitPermutation, source: BlockRows, target: BlockRows, block_bytes: int) -> None:
    """Writes all blocks of `target` from those of `source`, without the row metas. One of the two is interleaved; block_bytes:
    bytes of a block of one row, the same in both."""
    group = max(source.group, target.group)
    groups = source.rows.shape[0] // group
    blocks = (source.rows.shape[1] - source.row_meta) // block_bytes
    if groups == 0 or blocks == 0:
        return
    read = source.rows.view()
    read.flags.writeable = False  # as rows of files are: else it would be compiled twice
    # Bytes before the first block, from group to group and from block to block.
    strides = [(side.group * side.row_meta, group * side.rows.shape[1], side.group * block_bytes) for side in (source, target)]
    _permute(
        groups,
        blocks,
        read,
        target.rows,
        *strides,
        _word_places(permutation, target.rows.shape[1]),
        permutation.initial,
        permutation.runs,
        _term_places(permutation, source.rows.shape[1]),
        permutation.rotation,
        permutation.mask,
        permutation.step,
    )


# Kept for rows of the same length, which mostly follow: for few rows this takes as long as the bits.


@lru_cache(maxsize=64)
def _word_places(permutation: BitPermutation, row_bytes: int) -> np.ndarray:
    """Bytes from the first destination block to each word, uint64 [words]."""
    return (permutation.word_row * row_bytes + permutation.word_offset).astype(np.uint64)


@lru_cache(maxsize=64)
def _term_places(permutation: BitPermutation, row_bytes: int) -> np.ndarray:
    """Bytes from the first source block to each term's word, uint64 [terms]."""
    return (permutation.term_row * row_bytes + permutation.term_offset).astype(np.uint64)


@kernel
def _permute(groups, blocks, source, target, strides, to_strides, word_at, initial, runs, term_at, rotation, mask, step):
    # Four blocks at a time, so that the numbers of a term are read once for four words. uint64 throughout, because numba makes
    # a float of int64 + uint64 and tests signed indices for being negative.
    step_source, step_target = np.uint64(strides[2]), np.uint64(to_strides[2])
    for g in range(groups):
        for b in range(0, blocks, 4):
            remaining = blocks - b
            s0 = np.uint64(address(source) + strides[0] + g * strides[1] + b * strides[2])
            d0 = np.uint64(address(target) + to_strides[0] + g * to_strides[1] + b * to_strides[2])
            # At the end of a row the last block is written several times, in place of those that are missing.
            s1 = s0 + step_source if remaining > 1 else s0
            d1 = d0 + step_target if remaining > 1 else d0
            s2 = s1 + step_source if remaining > 2 else s1
            d2 = d1 + step_target if remaining > 2 else d1
            s3 = s2 + step_source if remaining > 3 else s2
            d3 = d2 + step_target if remaining > 3 else d2
            w = np.uint64(0)
            t = np.uint64(0)
            p = np.uint64(0)
            for run in range(runs.shape[0]):
                if runs[run, 1] == 0:  # copied words
                    for _ in range(runs[run, 0]):
                        at, to, x = term_at[t], word_at[w], initial[w]
                        store_word(d0 + to, load_word(s0 + at) ^ x)
                        store_word(d1 + to, load_word(s1 + at) ^ x)
                        store_word(d2 + to, load_word(s2 + at) ^ x)
                        store_word(d3 + to, load_word(s3 + at) ^ x)
                        t += np.uint64(1)
                        w += np.uint64(1)
                    continue
                for _ in range(runs[run, 0]):
                    x0 = initial[w]
                    x1 = x0
                    x2 = x0
                    x3 = x0
                    for _ in range(runs[run, 1]):
                        at, right, m = term_at[t], rotation[t], mask[t]
                        x0 ^= rotate_right(load_word(s0 + at), right) & m
                        x1 ^= rotate_right(load_word(s1 + at), right) & m
                        x2 ^= rotate_right(load_word(s2 + at), right) & m
                        x3 ^= rotate_right(load_word(s3 + at), right) & m
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
    keep_alive(source)
    keep_alive(target)
