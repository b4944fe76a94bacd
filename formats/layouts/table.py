"""The layout of every tensor type: those that are written down, and those of interleaved types, which follow from them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from ..types import TYPES
from . import iqk, iquants, kquants, legacy
from .description import BlockLayout
from .interleaved import TWINS, Twin

_WRITTEN = {name.lower(): layout for family in (legacy, kquants, iquants, iqk) for name, layout in family.LAYOUTS.items()}
_TWINS = {name.lower(): twin for name, twin in TWINS.items()}


@cache
def layout_of(type_name: str) -> BlockLayout:
    """The layout of a tensor type (any letter case), its bit arrays [rows of a group, n, width]. Raises KeyError for an unknown
    name."""
    kind = TYPES[type_name]
    if kind.base is not None:
        return _interleaved(twin_of(type_name), _WRITTEN[kind.base.lower()], kind.rows, kind.block_bytes)
    written = _WRITTEN[kind.name.lower()]
    return written if written.codes.ndim == 3 else written.moved(lambda bits: bits[None])


def twin_of(type_name: str) -> Twin:
    """Where the bits of the plain type go in this interleaved one. Raises KeyError for a type that is no permutation."""
    return _TWINS[TYPES[type_name].name.lower()]


def plain_of(twin: Twin, plain: BlockLayout, block_bytes: int) -> BlockLayout:
    """The layout of what counts as one plain block: `twin.blocks` of them, side by side."""
    if twin.blocks == 1:
        return plain
    assert list(plain.bit_arrays()) == ["codes"], "only codes are joined"
    codes = np.concatenate([plain.codes + 8 * block_bytes * i for i in range(twin.blocks)])
    return replace(plain, block=plain.block * twin.blocks, codes=codes)


def _interleaved(twin: Twin, plain: BlockLayout, rows: int, block_bytes: int) -> BlockLayout:
    """The layout of an interleaved type, bit arrays [rows, n, width], from that of its plain type, [n, width].

    rows: of a group; block_bytes: of a plain block.
    """
    plain = plain_of(twin, plain, block_bytes)
    to = np.full((rows, 8 * block_bytes * twin.blocks), -1)
    for part in twin.parts:
        bits = part.plain_bits(plain)
        to[:, bits] = part.place(rows, *bits.shape)
    layout = plain.moved(lambda bits: to[:, bits])
    if twin.flip:
        assert layout.table is not None
        flip = twin.flip & (len(layout.table) - 1)
        layout = replace(layout, table=layout.table[np.arange(len(layout.table)) ^ flip])
    return replace(layout, scrambled=any(part.scrambled for part in twin.parts))
