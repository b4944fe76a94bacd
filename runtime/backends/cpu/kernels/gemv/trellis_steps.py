"""Steps over the trellis types: weights are what a generator of pseudo-random numbers makes of a start that is stored."""

from __future__ import annotations

from typing import Any

import numpy as np

from .block_steps import Slot
from .codebook_steps import BookStep
from .emitter import BYTES, I8, I32, LANES, Emitter, constant, vector


class TrellisStep(BookStep):
    """Number j of a group is made of start * multiplier ** j, so all of them are worked out side by side."""

    def unsigned_codes(self, emit: Emitter, base: Any, slot: Slot, loaded: dict) -> Any:
        f, builder = self.layout, emit.builder
        assert f.indices is not None
        assert f.trellis is not None
        size, trellis = f.trellis.size, f.trellis
        groups = slot.columns[::size] // size
        starts = emit.numbers(base, self._over_blocks(f.indices)[0, groups], self.size)
        starts = builder.add(starts, constant(I32, [trellis.first] * len(groups)))
        powers = constant(I32, [pow(trellis.multiplier, j + 1, 1 << 32) for j in range(size)] * (LANES // size))
        ones, none = constant(I8, [1] * BYTES), constant(I32, [0] * LANES)
        parts = []
        for first in range(0, len(groups), LANES // size):
            state = builder.mul(emit.shuffle(starts, first + np.arange(LANES) // size), powers)
            kept = builder.bitcast(builder.and_(state, constant(I32, [trellis.kept_bits] * LANES)), vector(I8, BYTES))
            parts.append(builder.trunc(emit.dot(none, kept, ones, True), vector(I8, LANES)))
        value = emit.concat(parts)
        if not f.magnitudes:
            return value
        middle = constant(I8, [trellis.mean] * BYTES)
        above = builder.icmp_unsigned(">", value, middle)
        size_of = builder.select(above, builder.sub(value, middle), builder.sub(middle, value))
        return builder.select(self._negative(emit, base, slot), builder.sub(middle, size_of), builder.add(middle, size_of))
