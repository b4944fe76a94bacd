"""The readers of a row of any type that has a `CodeLayout`, those of the trellis types too, whose codes are start states of a
generator of weights; and the scales of rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...types import TYPES, TensorType
from .blocks import SUPERBLOCK, BlockReader, CodeVector
from .code_layout import CodeLayout, code_layout
from .emitter import BYTES, F32, I8, I32, LANES, Emitter, constant, vector
from .grids import GridReader


class TrellisReader(GridReader):
    """State j after a start is start * multiplier^j (mod 2^32), so the states of a group are computed side by side."""

    def codes_less(self, subtracted: int, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        f, builder = self.layout, emit.builder
        value = self._byte_sums(emit, base, code_vector)
        if not f.magnitudes:
            more = self.lowest - subtracted
            return builder.add(value, constant(I8, [more] * BYTES)) if more else value
        size_of, zero = self._magnitudes(emit, value), constant(I8, [-subtracted] * BYTES)
        negative = self.negative(emit, base, code_vector, loaded)
        return builder.select(negative, builder.sub(zero, size_of), builder.add(zero, size_of))

    def unsigned_codes(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i8>: the magnitudes of a type whose signs are stored."""
        return self._magnitudes(emit, self._byte_sums(emit, base, code_vector))

    def _magnitudes(self, emit: Emitter, value: Any) -> Any:
        builder, middle = emit.builder, constant(I8, [self.layout.trellis.mean] * BYTES)  # type: ignore[union-attr]
        above = builder.icmp_unsigned(">", value, middle)
        return builder.select(above, builder.sub(value, middle), builder.sub(middle, value))

    def _byte_sums(self, emit: Emitter, base: Any, code_vector: CodeVector) -> Any:
        """<64 x i8>: the values of the generator, and `mean`."""
        f, builder = self.layout, emit.builder
        assert f.indices is not None
        assert f.trellis is not None
        size, trellis = f.trellis.size, f.trellis
        groups = code_vector.columns[::size] // size
        starts = emit.numbers(base, self._in_all_blocks(f.indices)[0, groups], self.size)
        starts = builder.add(starts, constant(I32, [trellis.first] * len(groups)))
        powers = constant(I32, [pow(trellis.multiplier, j + 1, 1 << 32) for j in range(size)] * (LANES // size))
        parts = []
        for first in range(0, len(groups), LANES // size):
            state = builder.mul(emit.shuffle(starts, first + np.arange(LANES) // size), powers)
            masked = builder.bitcast(builder.and_(state, constant(I32, [trellis.kept_bits] * LANES)), vector(I8, BYTES))
            parts.append(emit.byte_sums(masked))
        return emit.concat(parts)


_COLUMNS = {1: 256, 4: 128, 8: 64}  # rows of a group -> columns that are read at a time, for types of small blocks


@cache
def readers(name: str) -> list[BlockReader]:
    """The readers that a row is divided among, largest first: as many blocks at a time as fit, then single blocks."""
    layout = code_layout(name)
    assert layout is not None
    reader = TrellisReader if layout.trellis else GridReader if layout.grid is not None else BlockReader
    blocks = max(1, (SUPERBLOCK if layout.block == SUPERBLOCK else _COLUMNS[TYPES[name].rows]) // layout.block)
    return [reader(name, blocks), reader(name, 1)] if blocks > 1 else [reader(name, 1)]


def row_scales(emit: Emitter, layout: CodeLayout, stored: TensorType, weights: Any) -> Any:
    """<rows x float>: the row scales of a group; None if the type has none."""
    if layout.row_scale is None:
        return None
    if layout.row_scale == "f16":
        return emit.halves(weights, np.arange(stored.rows) * 2)
    assert stored.rows == 1 or stored.row_meta == 4, "the row scales of a group lie side by side"
    return emit.load(weights, 0, vector(F32, stored.rows))
