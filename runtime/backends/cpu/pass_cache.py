"""The cache of a sequence as functions of Python see it within a pass."""

from __future__ import annotations

import numpy as np

from .compiled_graph import CompiledGraph
from .kv_cache import KVCache


class PassCache:
    """With the methods of the reference backend's cache. The last rows that an op needs are recurrent states: rings, in which
    position p has row p modulo their length. What has no state of its own is in the cache's `history`."""

    def __init__(self, compiled: CompiledGraph, cache: KVCache):
        self.length, self.rows = cache.length, cache.history.rows
        self._compiled, self._cache = compiled, cache

    def append(self, layer: int, name: str, new: np.ndarray) -> np.ndarray:
        """The rows of the past and the new ones after them; they become past when the pass ends."""
        return self._cache.history.append(layer, name, new)

    def extend(self, layer: int, name: str, new: np.ndarray, first: int) -> np.ndarray:
        """The rows from position `first` on, zeros where that is negative, and the new ones after them."""
        layers, state = self._compiled.layers, self._cache.state
        part = layers[layer].states.get(name) if layer < len(layers) else None
        if part is None or state is None:
            return self._cache.history.extend(layer, name, new, first)
        read, written = state.arrays(self._compiled.state_offsets[layer, name], part.padded_shape)
        written[:] = read
        size, width, end = len(read), part.shape[1], self.length + len(new)
        last = min(len(new), size)
        written[np.arange(end - last, end) % size, :width] = new[len(new) - last :]
        return np.concatenate([read[np.arange(first, self.length) % size, :width], new])
