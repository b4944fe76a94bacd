"""Moving bits between blocks: 32-bit words made of rotated, masked words of other blocks, by one kernel for all types.

A destination word is start XOR the terms `rotate_right(source word, r) & mask`; some words then go through a few more steps.
Interleaved layouts keep runs of four bytes together, so that a word of 8-bit numbers takes one term, of nibbles two, and so on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..simd.compile import kernel
from ..simd.memory import load_word, store_word


@dataclass(frozen=True)
class Program:
    """The moves that make destination blocks (one interleaved block, or one block of each row) from source blocks.

    Words are written in this order; terms and steps are stored word after word. All offsets are in bytes.
    word_row, word_at   int64 [words]: row and offset in the row's block of each word (row 0 throughout if interleaved)
    start               uint32 [words]
    lengths             int64 [n, 3]: so many words, each of so many terms and so many steps
    term_row, term_at   int64 [terms]: row and offset of each term's source word
    rotate, mask        uint32 [terms]
    step                uint32 [steps, 3]: shift s, mask m, keep g of x ^= (t & g) ^ (t << s) with t = (((x >> s) & g) ^ x) & m.
                        With g all ones the bits of m trade places with those s above, with g = 0 they are XORed to them.
    """

    word_row: np.ndarray
    word_at: np.ndarray
    start: np.ndarray
    lengths: np.ndarray
    term_row: np.ndarray
    term_at: np.ndarray
    rotate: np.ndarray
    mask: np.ndarray
    step: np.ndarray


@dataclass(frozen=True)
class Side:
    """Rows as blocks see them. rows: uint8 [rows, row_bytes], C-contiguous; group: how many of them make an interleaved group
    (1: not interleaved); meta: bytes before each row's blocks."""

    rows: np.ndarray
    group: int
    meta: int


def move(program: Program, source: Side, target: Side, block_bytes: int) -> None:
    """Runs the program over all blocks of `source` into `target`. One of the sides is interleaved; a block of one row takes
    block_bytes on both."""
    group = max(source.group, target.group)
    groups = source.rows.shape[0] // group
    blocks = (source.rows.shape[1] - source.meta) // block_bytes
    if groups == 0 or blocks == 0:
        return
    layout = []  # address of the first block, bytes from group to group, bytes from block to block
    for side in (source, target):
        row_bytes = side.rows.shape[1]
        layout += [side.rows.ctypes.data + side.group * side.meta, group * row_bytes, side.group * block_bytes]
    _run(
        groups,
        blocks,
        np.array(layout, np.uint64),
        (program.word_row * target.rows.shape[1] + program.word_at).astype(np.uint64),
        program.start,
        program.lengths,
        (program.term_row * source.rows.shape[1] + program.term_at).astype(np.uint64),
        program.rotate,
        program.mask,
        program.step,
    )


@kernel
def _run(groups, blocks, layout, word_at, start, lengths, term_at, rotate, mask, step):
    # Four blocks go side by side: the numbers of a term are read once for four words. uint64 throughout, because numba makes
    # a float of int64 + uint64 and tests signed indices for being negative.
    for g in range(groups):
        for b in range(0, blocks, 4):
            left = blocks - b
            s0 = layout[0] + np.uint64(g) * layout[1] + np.uint64(b) * layout[2]
            d0 = layout[3] + np.uint64(g) * layout[4] + np.uint64(b) * layout[5]
            # At the end of a row the last block stands in for those that are missing.
            s1 = s0 + layout[2] if left > 1 else s0
            d1 = d0 + layout[5] if left > 1 else d0
            s2 = s1 + layout[2] if left > 2 else s1
            d2 = d1 + layout[5] if left > 2 else d1
            s3 = s2 + layout[2] if left > 3 else s2
            d3 = d2 + layout[5] if left > 3 else d2
            w = np.uint64(0)
            t = np.uint64(0)
            p = np.uint64(0)
            for run in range(lengths.shape[0]):
                for _ in range(lengths[run, 0]):
                    x0 = start[w]
                    x1 = x0
                    x2 = x0
                    x3 = x0
                    for _ in range(lengths[run, 1]):
                        at, right, m = term_at[t], rotate[t], mask[t]
                        back = (np.uint32(32) - right) & np.uint32(31)
                        y = load_word(s0 + at)
                        x0 ^= ((y >> right) | (y << back)) & m
                        y = load_word(s1 + at)
                        x1 ^= ((y >> right) | (y << back)) & m
                        y = load_word(s2 + at)
                        x2 ^= ((y >> right) | (y << back)) & m
                        y = load_word(s3 + at)
                        x3 ^= ((y >> right) | (y << back)) & m
                        t += np.uint64(1)
                    for _ in range(lengths[run, 2]):
                        s, m, keep = step[p, 0], step[p, 1], step[p, 2]
                        y = (((x0 >> s) & keep) ^ x0) & m
                        x0 ^= (y & keep) ^ (y << s)
                        y = (((x1 >> s) & keep) ^ x1) & m
                        x1 ^= (y & keep) ^ (y << s)
                        y = (((x2 >> s) & keep) ^ x2) & m
                        x2 ^= (y & keep) ^ (y << s)
                        y = (((x3 >> s) & keep) ^ x3) & m
                        x3 ^= (y & keep) ^ (y << s)
                        p += np.uint64(1)
                    at = word_at[w]
                    store_word(d0 + at, x0)
                    store_word(d1 + at, x1)
                    store_word(d2 + at, x2)
                    store_word(d3 + at, x3)
                    w += np.uint64(1)
