"""What a sequence keeps of its past tokens: rows of keys and values (or of latents) per layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..formats import MillError

_SMALLEST = 64


class KVCache:
    """Past rows of one sequence, float32, grown as needed up to `limit` tokens.

    parts: name -> (heads, width) of what each layer keeps per token. Within a pass every layer appends its rows; `commit`
    then makes them past. A pass that fails leaves the cache as it was.
    """

    def __init__(self, n_layers: int, parts: Mapping[str, tuple[int, int]], limit: int):
        self.parts, self.limit, self.length = dict(parts), limit, 0
        self._rows: list[dict[str, np.ndarray]] = [
            {name: np.empty((heads, 0, width), np.float32) for name, (heads, width) in parts.items()} for _ in range(n_layers)
        ]

    def room_for(self, n: int) -> None:
        """Raises MillError if n more tokens do not fit."""
        if self.length + n > self.limit:
            raise MillError(
                f"the context is full: {self.length} tokens are in it, {n} more do not fit into {self.limit} (set n_ctx higher)"
            )

    def append(self, layer: int, name: str, rows: np.ndarray) -> np.ndarray:
        """rows float32 [n, heads, width] of this pass -> a view [heads, length + n, width] of past and new rows."""
        n = len(rows)
        store, end = self._rows[layer][name], self.length + n
        if store.shape[1] < end:
            size = min(max(end, 2 * store.shape[1], _SMALLEST), max(self.limit, end))
            grown = np.empty((store.shape[0], size, store.shape[2]), np.float32)
            grown[:, : self.length] = store[:, : self.length]
            self._rows[layer][name] = store = grown
        store[:, self.length : end] = rows.transpose(1, 0, 2)
        return store[:, :end]

    def commit(self, n: int) -> None:
        self.length += n

    def truncate(self, length: int) -> None:
        """Forgets all tokens from position `length` on."""
        self.length = min(self.length, length)

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for layer in self._rows for rows in layer.values())
