"""The readers of a row of any type that has a `CodeLayout`, those of the trellis types too, whose codes are start states of a
generator of weights; and the scales of rows.
"""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import numpy as np

from ...types import TYPES, TensorType
from .blocks import SUPERBLOCK, BlockReader, CodeVector
from .code_layout import CodeLayout, code_layout
from .emitter import BYTES, F32, I8, I32, LANES, Emitter, constant, vector
from .grids import GridReader


class TrellisReader(GridReader):
    """State j after a start is start * multiplier^j (mod 2^32), so the states of a group are computed side by side."""

    @cached_property
    def product_vectors(self) -> list[CodeVector]:
        """Each lane has columns of one start, four of `size` in each of several vectors: starts then lie in the lanes."""
        assert self.layout.trellis is not None
        size, rows = self.layout.trellis.size, np.zeros(BYTES, np.int64)
        starts = [size * np.arange(first, first + LANES)[:, None] for first in range(0, self.columns // size, LANES)]
        parts = [np.arange(part, part + 4) for part in range(0, size, 4)]
        return [CodeVector(rows, (start + part).reshape(-1)) for start in starts for part in parts]

    def codes_less(self, subtracted: int, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        f, builder = self.layout, emit.builder
        value = self._byte_sums(emit, base, code_vector, loaded)
        if not f.magnitudes:
            more = self.lowest - subtracted
            return builder.add(value, constant(I8, [more] * BYTES)) if more else value
        size_of, zero = self._magnitudes(emit, value), constant(I8, [-subtracted] * BYTES)
        negative = self.negative(emit, base, code_vector, loaded)
        return builder.select(negative, builder.sub(zero, size_of), builder.add(zero, size_of))

    def unsigned_codes(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i8>: the magnitudes of a type whose signs are stored."""
        return self._magnitudes(emit, self._byte_sums(emit, base, code_vector, loaded))

    def _magnitudes(self, emit: Emitter, value: Any) -> Any:
        builder, middle = emit.builder, constant(I8, [self.layout.trellis.mean] * BYTES)  # type: ignore[union-attr]
        above = builder.icmp_unsigned(">", value, middle)
        return builder.select(above, builder.sub(value, middle), builder.sub(middle, value))

    def _byte_sums(self, emit: Emitter, base: Any, code_vector: CodeVector, loaded: dict) -> Any:
        """<64 x i8>: the values of the generator, and `mean`."""
        f, builder = self.layout, emit.builder
        assert f.indices is not None
        assert f.trellis is not None
        size, trellis = f.trellis.size, f.trellis
        groups, place = code_vector.columns[::4] // size, code_vector.columns % size
        if len(set(groups.tolist())) == LANES:
            return self._byte_sums_of_starts(emit, base, groups, place[:4], loaded)
        groups = code_vector.columns[::size] // size
        starts = self._starts(emit, base, groups, loaded)
        powers = constant(I32, [pow(trellis.multiplier, j + 1, 1 << 32) for j in range(size)] * (LANES // size))
        parts = []
        for first in range(0, len(groups), LANES // size):
            state = builder.mul(emit.shuffle(starts, first + np.arange(LANES) // size), powers)
            masked = builder.bitcast(builder.and_(state, constant(I32, [trellis.kept_bits] * LANES)), vector(I8, BYTES))
            parts.append(builder.trunc(emit.byte_sums(masked), vector(I8, LANES)))
        return emit.concat(parts)

    def _byte_sums_of_starts(self, emit: Emitter, base: Any, groups: np.ndarray, places: np.ndarray, loaded: dict) -> Any:
        """The same where each lane has four columns, of these places, of one start."""
        builder, trellis = emit.builder, self.layout.trellis
        assert trellis is not None
        starts, total = self._starts(emit, base, groups, loaded), constant(I32, [0] * LANES)
        for place in reversed(places.tolist()):
            power, kept = pow(trellis.multiplier, place + 1, 1 << 32), trellis.kept_bits
            state = builder.and_(builder.mul(starts, constant(I32, [power] * LANES)), constant(I32, [kept] * LANES))
            total = builder.shl(total, constant(I32, [8] * LANES))
            total = emit.add_byte_sums(total, builder.bitcast(state, vector(I8, BYTES)))
        return builder.bitcast(total, vector(I8, BYTES))

    def _starts(self, emit: Emitter, base: Any, groups: np.ndarray, loaded: dict) -> Any:
        """<n x i32>: the start states of these groups."""
        f, key = self.layout, ("starts", groups.tobytes())
        assert f.indices is not None
        assert f.trellis is not None
        if key not in loaded:
            numbers = emit.numbers(base, self._in_all_blocks(f.indices)[0, groups], self.size)
            loaded[key] = emit.builder.add(numbers, constant(I32, [f.trellis.first] * len(groups)))
        return loaded[key]


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
