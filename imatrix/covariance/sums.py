"""The sums of x x^T over the inputs of one matrix, which come a few rows at a time."""

from __future__ import annotations

import numpy as np

from ...errors import MillError
from ...quantize.covariance.matrix.triangles import FoldedCovariance, fold_rows
from ...simd.memory import scratch
from ...simd.workers import Workers
from ..windows import NotFiniteError
from .products import BLOCK, LANES, TILE, add_tiles, panel_shape, round_panels, tile_count, tile_diagonal, tile_rows

_PARTS_PER_THREAD = 4


class Sums:
    """Sums of the products of all pairs of columns, float32, over tokens.

    Rows are summed in blocks of `block` tokens, in the order in which they come: how many come at a time makes no difference.
    A block ends early where the weight of the tokens changes, and when `flush` is called.

    name     of a weight that has this input, for errors
    columns  numbers of an input
    block    tokens of a block, BLOCK at most
    tokens   those that were added, each as often as it counts
    totals   float32 [tiles, TILE, TILE] (see `products`), without the rows that wait for the rest of their block
    """

    def __init__(self, name: str, columns: int, block: int = BLOCK):
        self.name, self.columns, self.block = name, columns, block
        self.totals = np.empty((tile_count(columns), TILE, TILE), np.float32)
        self.totals.fill(0)  # not np.zeros, which asks for no huge pages: small ones take longer to make than a block to sum
        self.tokens = 0
        self.waiting = np.empty((0, columns), np.float32)  # rows, with room for a block once there are any
        self.n_waiting, self.weight = 0, 1

    def add(self, x: np.ndarray, weight: int, workers: Workers) -> None:
        """Adds float32 [n, columns] with contiguous columns, each row `weight` times. Raises NotFiniteError."""
        if self.n_waiting and weight != self.weight:
            self.flush(workers)
        self.weight, first = weight, 0
        if self.n_waiting:
            first = min(self.block - self.n_waiting, len(x))
            self._wait(x[:first])
            if self.n_waiting == self.block:
                self.flush(workers)
        while len(x) - first >= self.block:
            self._add_block(x[first : first + self.block], workers)
            first += self.block
        if first < len(x):
            self._wait(x[first:])
        self.tokens += weight * len(x)

    def flush(self, workers: Workers) -> None:
        """Adds the rows that wait for the rest of their block."""
        if self.n_waiting:
            self._add_block(self.waiting[: self.n_waiting], workers)
            self.n_waiting = 0

    def merge(self, other: Sums, workers: Workers) -> None:
        """Adds the sums of other tokens."""
        for one in (self, other):
            one.flush(workers)
        self.totals += other.totals
        self.tokens += other.tokens

    def folded(self, dtype: np.dtype, workers: Workers) -> FoldedCovariance:
        """The mean of x x^T over all tokens, in a dtype of DTYPES; zeros where there were none. Ends the last block. Raises
        MillError for sums that float32 cannot hold."""
        self.flush(workers)
        divisor, mean_squares = np.float32(max(1, self.tokens)), np.empty(self.columns, np.float32)
        tile_diagonal(self.totals, divisor, mean_squares)
        if not np.isfinite(mean_squares).all():
            raise MillError(f"{self.name}: the sums of the squares of its inputs are too large for float32")
        triangle = fold_rows(
            mean_squares,
            dtype,
            lambda first, stop, out: tile_rows(self.totals, divisor, self.columns, first, stop, out),
            workers,
        )
        return FoldedCovariance(triangle, mean_squares, self.tokens)

    def _wait(self, x: np.ndarray) -> None:
        if not np.isfinite(x).all():
            raise NotFiniteError(self.name)
        if not len(self.waiting):
            self.waiting = np.empty((self.block, self.columns), np.float32)
        self.waiting[self.n_waiting : self.n_waiting + len(x)] = x
        self.n_waiting += len(x)

    def _add_block(self, x: np.ndarray, workers: Workers) -> None:
        assert x.strides[1] == 4
        shape = panel_shape(self.columns, len(x))
        signed, unsigned = (scratch(f"covariance {name}", shape, np.int32) for name in ("signed", "unsigned"))
        scales, sums = (scratch(f"covariance {d.__name__}", (shape[0], LANES), d) for d in (np.float32, np.int32))
        source, step, rows, work = x.ctypes.data, x.strides[0], len(x), self.columns * self.columns // 8 * len(x)

        def round_part(part: range) -> bool:
            return round_panels(source, step, rows, self.columns, part.start, part.stop, signed, unsigned, scales, sums)

        if not all(workers.map(round_part, _parts(shape[0], workers.count), work)):
            raise NotFiniteError(self.name)
        factor = np.float32(self.weight)

        def add_part(part: range) -> None:
            add_tiles(signed, unsigned, scales, sums, factor, part.start, part.stop, self.totals)

        workers.map(add_part, _parts(len(self.totals), workers.count), work)


def _parts(count: int, threads: int) -> list[range]:
    """0 to count - 1 in runs that threads take one after the other."""
    step = -(-count // (threads * _PARTS_PER_THREAD)) if threads > 1 else count
    return [range(first, min(first + step, count)) for first in range(0, count, step)]
