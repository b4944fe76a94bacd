"""Vectors as whole numbers of 16 bits in two bytes each, with a scale for every 32: what `byte_source`'s kernels multiply."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32  # numbers that have one scale


class VectorBytes(NamedTuple):
    """words: int32 [n, row_words]: the high bytes of all numbers, from part_words on the low ones, from 2 part_words on the
    scales."""

    words: Tensor
    part_words: int


def empty_bytes(n: int, columns: int, device: torch.device) -> VectorBytes:
    """For n vectors. Parts begin at multiples of 64 bytes, so that four words are loaded at once."""
    part = -(-columns // 64) * 16
    return VectorBytes(torch.empty((n, 2 * part + -(-columns // (16 * GROUP)) * 16), dtype=torch.int32, device=device), part)
