"""The continuous numbers of rows, the scales of blocks and what is added to them, as arrays that change the rows' bytes."""

from __future__ import annotations

import numpy as np

from ...data_classes import dataclass
from ..types import TYPES
from .table import layout_of

_DTYPES = {"f16": np.dtype("<f2"), "f32": np.dtype("<f4")}


@dataclass(frozen=True)
class BlockScale:
    """One of a type's numbers that weights are proportional to: `d`, or `dmin` or `offset` beside it.

    start     of the number in a block's bytes, or in a row's where there is one per row
    dtype     it is stored as
    step      bytes from one block to the next, 0: there is one per row; meta: bytes before a row's first block
    block     weights that it is for, 0: all of a row
    """

    start: int
    dtype: np.dtype
    step: int
    meta: int
    block: int

    def of(self, q: np.ndarray, n: int) -> np.ndarray:
        """The numbers of rows uint8 [rows, row_bytes] of n weights, contiguous: a view [rows, blocks], or [rows, 1]."""
        blocks = n // self.block if self.block else 1
        where = {"buffer": q.data, "offset": self.meta + self.start, "strides": (q.shape[1], self.step)}
        return np.ndarray((len(q), blocks), self.dtype, **where)


def block_scales(type_name: str) -> tuple[BlockScale, ...]:
    """Of a type the scale, and what it has beside it: where they are floats in bytes of their own. () for interleaved types,
    plain numbers, scales that are powers of two, and those whose bits lie apart."""
    kind, layout = TYPES[type_name], layout_of(type_name)
    if kind.rows > 1 or layout.number is not None:
        return ()
    step = kind.row_bytes(layout.block) - kind.row_meta
    if layout.row_scale is not None:
        found = [BlockScale(0, _DTYPES[layout.row_scale], 0, 0, 0)]
    else:
        scale = _at(layout.d, layout.d_format, step, kind.row_meta, layout.block)
        if scale is None:
            return ()
        found = [scale]
    more = [bits for bits in (layout.dmin, layout.offset) if bits is not None]
    others = [_at(bits, "f16", step, kind.row_meta, layout.block) for bits in more]
    return (*found, *others) if all(others) else ()  # type: ignore[return-value]


def _at(bits: np.ndarray | None, stored: str, step: int, meta: int, block: int) -> BlockScale | None:
    """The number whose bits these are; None where it is no float, or not in bytes of its own."""
    dtype = _DTYPES.get(stored)
    if bits is None or dtype is None:
        return None
    flat = bits.reshape(-1)
    first = int(flat[0])
    if first % 8 or len(flat) != 8 * dtype.itemsize or (np.diff(flat) != 1).any():
        return None
    return BlockScale(first // 8, dtype, step, meta, block)
