"""Attention of single tokens to chosen rows of the cache: these are gathered, in the type in which they are stored, and flash
attention runs over them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ....simd.lanes import LANES
from ....simd.workers import Workers
from ...cache_layout import CachePart
from .attention import AttentionParams
from .flash import Segment, attend
from .kv_cache import CacheRows, rotate

_GATHERED_BYTES = 1 << 24  # of rows that are gathered before attention runs over them


def gather(rows: CacheRows, positions: np.ndarray) -> CacheRows:
    """The rows of some positions, int64 [count], as an array of their own."""
    return CacheRows.of(np.take(rows.memory, positions, axis=1), rows.type_id)


def float_rows(parts: Iterable[np.ndarray]) -> CacheRows:
    """Rows float32 [rows of each part, width], one part after the other, of one head."""
    parts = list(parts)
    width = parts[0].shape[1]
    joined = np.zeros((1, sum(map(len, parts)), -(-width // LANES) * LANES), np.float32)
    np.concatenate(parts, out=joined[0, :, :width])
    return CacheRows.of(joined)


class GatheredAttention:
    """Collects queries, each with its rows, and computes the attention of many at a time.

    kv_heads  key heads of every query's rows
    parts     keys and values as the cache keeps them, whose rotations the queries and results take part in
    """

    def __init__(self, kv_heads: int, params: AttentionParams, workers: Workers, generated: bool, *parts: CachePart):
        self._settings, self._segments, self._nbytes = (kv_heads, params, workers, generated), list[Segment](), 0
        self._k_part, self._v_part = parts or (None, None)

    def add(self, q: np.ndarray, keys: CacheRows, values: CacheRows, out: np.ndarray) -> None:
        """q float32 [heads, width], out float32 [heads, width of values], both C-contiguous: written by `run` at the latest."""
        if self._k_part is not None and self._k_part.rotation:
            q = q.copy()
            rotate(q, self._k_part)
        self._segments.append(Segment(q[None], keys, values, keys.memory.shape[1] - 1, out[None]))
        self._nbytes += keys.memory.nbytes + (0 if values is keys else values.memory.nbytes)
        if self._nbytes >= _GATHERED_BYTES:
            self.run()

    def run(self) -> None:
        if self._segments:
            attend(self._segments, *self._settings)
        if self._v_part is not None and self._v_part.rotation:
            for segment in self._segments:
                rotate(segment.out[0], self._v_part)
        self._segments, self._nbytes = [], 0
