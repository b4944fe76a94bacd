"""Bit addresses of a layout as byte loads: which bytes a number is made of, and how they are shifted and masked."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...data_classes import dataclass


class BytePart(NamedTuple):
    """Some bits of numbers that lie in one byte each: `(bytes[byte] >> shift & mask) << up`.

    byte   int32 [rows, n]: index of the byte in the block of each number
    shift  uint8 [rows, n]
    mask   uint8 [rows, n]
    up     the place of these bits in the number
    """

    byte: np.ndarray
    shift: np.ndarray
    mask: np.ndarray
    up: int

    def repeated(self, times: int) -> BytePart:
        """The part of each number `times` times in a row: [rows, n * times]."""
        byte, shift, mask = (np.repeat(a, times, axis=1) for a in (self.byte, self.shift, self.mask))
        return BytePart(byte, shift, mask, self.up)


def byte_parts(addresses: np.ndarray, gray_words: bool = False) -> list[BytePart]:
    """Bit addresses [rows, n, width] as in `BlockLayout` -> the parts of the numbers; a number is the XOR of its parts.

    gray_words: as `BlockLayout.gray_words`: bit i of a word of 16 bits is the XOR of its stored bits i and i + 1, where bits
    0 and 16 count as 0.
    """
    if not gray_words:
        return _parts(addresses, np.ones(addresses.shape, bool))
    return _parts(addresses, addresses % 16 != 0) + _parts(addresses + 1, addresses % 16 != 15)


def _parts(addresses: np.ndarray, present: np.ndarray) -> list[BytePart]:
    """Parts of the bits that are `present` (bool [rows, n, width]); a part begins where any number enters another byte."""
    width = addresses.shape[-1]
    breaks = (np.diff(addresses, axis=-1) != 1) | (addresses[..., 1:] % 8 == 0)
    cuts = [0, *(np.flatnonzero(breaks.any(axis=(0, 1))) + 1).tolist(), width]
    parts = []
    for first, stop in pairwise(cuts):
        mask = (present[..., first:stop] << np.arange(stop - first)).sum(axis=-1)
        byte, shift = np.divmod(addresses[..., first], 8)
        byte = np.where(mask > 0, byte, 0)
        parts.append(BytePart(byte.astype(np.int32), shift.astype(np.uint8), mask.astype(np.uint8), first))
    return parts


@dataclass(frozen=True)
class StraightLine:
    """The table of the code c is (c ^ flip) * step + first. A step of 0: it is looked up."""

    flip: int
    step: int
    first: int


def straight_line(table: np.ndarray) -> StraightLine:
    """How a table, of one number for each code, is computed from the code; a step of 0 where it is no straight line of whole
    numbers, nor one of two's complement numbers."""
    flat = np.asarray(table, np.float64).reshape(-1)
    if len(flat) == np.shape(table)[0] and len(flat) > 1 and np.all(flat == np.round(flat)):
        index = np.arange(len(flat))
        for flip in (0, len(flat) // 2):
            line = flat[index ^ flip] if len(flat) == 1 << (len(flat) - 1).bit_length() or not flip else flat
            steps = np.diff(line)
            if np.all(steps == steps[0]) and steps[0]:
                return StraightLine(flip, int(steps[0]), int(line[0]))
    return StraightLine(0, 0, 0)
