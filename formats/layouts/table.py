"""The layout of every tensor type: those that are written down, and those of interleaved types, which follow from them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from ..types import TYPES, TensorType
from . import iqk, iquants, kquants, legacy
from .description import BlockLayout
from .interleaved import INTERLEAVINGS, Interleaving, Part

_WRITTEN = {name.lower(): layout for family in (legacy, kquants, iquants, iqk) for name, layout in family.LAYOUTS.items()}
_INTERLEAVINGS = {name.lower(): interleaving for name, interleaving in INTERLEAVINGS.items()}


@cache
def layout_of(type_name: str) -> BlockLayout:
    """The layout of a tensor type (any letter case), its bit arrays [rows of a group, n, width]. Raises KeyError for an unknown
    name."""
    kind = TYPES[type_name]
    if kind.base is not None:
        return _interleaved(kind)
    written = _WRITTEN[kind.name.lower()]
    return written if written.codes.ndim == 3 else written.moved(lambda bits: bits[None])


def interleaving_of(type_name: str) -> Interleaving:
    """Where the bits of the plain type go in this interleaved one. Raises KeyError for a type that is no permutation."""
    return _INTERLEAVINGS[TYPES[type_name].name.lower()]


def plain_parts(type_name: str) -> list[tuple[Part, np.ndarray]]:
    """The parts of an interleaved type, each with its bit addresses in the plain block, int64 [numbers, width]."""
    kind, interleaving = TYPES[type_name], interleaving_of(type_name)
    plain = _joined(_WRITTEN[str(kind.base).lower()], interleaving.blocks, kind.block_bytes)
    return [(part, part.plain_bits(plain)) for part in interleaving.parts]


def _joined(plain: BlockLayout, blocks: int, block_bytes: int) -> BlockLayout:
    """The layout of several plain blocks, side by side, as one."""
    if blocks == 1:
        return plain
    assert list(plain.bit_arrays()) == ["codes"], "only codes are joined"
    codes = np.concatenate([plain.codes + 8 * block_bytes * i for i in range(blocks)])
    return replace(plain, block=plain.block * blocks, codes=codes)


def _interleaved(kind: TensorType) -> BlockLayout:
    interleaving = interleaving_of(kind.name)
    to = np.full((kind.rows, 8 * kind.block_bytes * interleaving.blocks), -1)  # where each bit of a plain block goes, by row
    for part, bits in plain_parts(kind.name):
        to[:, bits] = part.place(kind.rows, *bits.shape)
    layout = _joined(_WRITTEN[str(kind.base).lower()], interleaving.blocks, kind.block_bytes).moved(lambda bits: to[:, bits])
    if interleaving.flip:
        assert layout.table is not None
        flip = interleaving.flip & (len(layout.table) - 1)
        layout = replace(layout, table=layout.table[np.arange(len(layout.table)) ^ flip])
    return replace(layout, scrambled=any(part.scrambled for part in interleaving.parts))
