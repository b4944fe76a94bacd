"""Permutations of the bits of blocks: each 32-bit word of a destination block is put together from rotated and masked words of
source blocks, by one kernel for all types (permute.py).

A destination word is its initial value XOR the terms `rotate_right(source word, r) & mask`; a few more steps then permute bits
inside some words. Interleaved layouts keep four neighbouring bytes of a row together, so a word of 8-bit numbers takes one
term, of nibbles two, and so on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..data_classes import dataclass


@dataclass(frozen=True, eq=False)
class BitPermutation:
    """How destination blocks (one interleaved block, or one block of each row) are made from source blocks.

    Words are written in this order; terms and steps are listed word after word. All offsets are in bytes.
    word_row, word_offset  int64 [words]: row, and offset in the row's block, of each word (row 0 if the destination is
                           interleaved)
    initial                uint32 [words]: the value before the terms
    runs                   int64 [n, 3]: how many words follow with equal numbers of terms and steps, and these two numbers; 0
                           terms: words whose only term is a source word as it is
    term_row, term_offset  int64 [terms]: row, and offset in the row's block, of each term's source word
    rotation, mask         uint32 [terms]
    step                   uint32 [steps, 3]: shift s, mask m, exchange g of x ^= (t & g) ^ (t << s) with
                           t = (((x >> s) & g) ^ x) & m. With g all ones the bits of m are exchanged with those s above them,
                           with g = 0 they are XORed to them.
    """

    word_row: np.ndarray
    word_offset: np.ndarray
    initial: np.ndarray
    runs: np.ndarray
    term_row: np.ndarray
    term_offset: np.ndarray
    rotation: np.ndarray
    mask: np.ndarray
    step: np.ndarray


class BlockRows(NamedTuple):
    """Rows as groups of blocks. rows: uint8 [rows, row_bytes], C-contiguous; group: rows that are interleaved (1: plain rows);
    row_meta: bytes before each row's blocks (the metas of a group lie side by side)."""

    rows: np.ndarray
    group: int
    row_meta: int
