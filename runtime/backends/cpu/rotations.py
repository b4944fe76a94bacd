"""Rotary embeddings of a pass's positions, as kernels read them."""

from __future__ import annotations

import numpy as np

from ...graph.values import RotaryEmbedding

_RUN = 64  # positions that are computed at once for tokens that are generated one by one: it takes hardly longer than one


class Rotations:
    """table: complex64 [n, pairs], of the positions that were filled in last."""

    def __init__(self, rope: RotaryEmbedding, n: int):
        self.rope, self.table = rope, np.zeros((n, len(rope.frequencies)), np.complex64)
        self._first, self._run = -1, self.table  # a run of positions, of a pass of one token

    def fill(self, positions: np.ndarray) -> None:
        """int64 [n]."""
        if len(positions) > 1:
            self._compute(positions, self.table)
            return
        at = int(positions[0])
        if at - at % _RUN != self._first:
            self._first, self._run = at - at % _RUN, np.empty((_RUN, self.table.shape[1]), np.complex64)
            self._compute(np.arange(self._first, self._first + _RUN), self._run)
        self.table[0] = self._run[at % _RUN]

    def _compute(self, positions: np.ndarray, out: np.ndarray) -> None:
        angles = (positions[:, None] + self.rope.offset) * self.rope.frequencies
        out.real, out.imag = self.rope.magnitude * np.cos(angles), self.rope.magnitude * np.sin(angles)
