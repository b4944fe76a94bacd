"""Sums of squares over the tokens of windows that run together: what a batch adds to an importance matrix."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache

import numpy as np

from ..data_classes import dataclass
from ..formats import dims
from ..runtime.graph import ExpertInputs, Weight
from ..simd.compile import kernel
from ..simd.memory import view
from ..simd.workers import Workers
from .windows import NotFiniteError

TILE = 512  # columns whose sums stay in the L1 cache
LARGEST = 3.4028234e38  # of float32, which files hold


@kernel
def add_squares(address, offsets, head_step, sums, columns, width, heads):
    """sums[h, :width] += sums over rows of x^2: float64 sums [heads, columns] at an address, of which `width` are added to.

    x: float32; the columns of head h in row r are at address + offsets[r] + h * head_step (bytes). Row is added after row, as
    float64, which holds each square exactly: so sums do not depend on how rows come in calls, on how columns are divided, or
    on the processor. Returns whether all sums are numbers that float32 can hold.
    """
    rows, is_finite = len(offsets), True
    rows_by_eight = rows // 8 * 8
    for h in range(heads):
        for start in range(0, width, TILE):
            size = min(TILE, width - start)
            tile = view(sums + 8 * (h * columns + start), size, np.float64)
            first = address + h * head_step + 4 * start
            for r in range(0, rows_by_eight, 8):
                a, b = view(first + offsets[r], size, np.float32), view(first + offsets[r + 1], size, np.float32)
                c, d = view(first + offsets[r + 2], size, np.float32), view(first + offsets[r + 3], size, np.float32)
                e, f = view(first + offsets[r + 4], size, np.float32), view(first + offsets[r + 5], size, np.float32)
                g, i = view(first + offsets[r + 6], size, np.float32), view(first + offsets[r + 7], size, np.float32)
                for j in range(size):
                    total = tile[j] + np.float64(a[j]) * np.float64(a[j])
                    total += np.float64(b[j]) * np.float64(b[j])
                    total += np.float64(c[j]) * np.float64(c[j])
                    total += np.float64(d[j]) * np.float64(d[j])
                    total += np.float64(e[j]) * np.float64(e[j])
                    total += np.float64(f[j]) * np.float64(f[j])
                    total += np.float64(g[j]) * np.float64(g[j])
                    tile[j] = total + np.float64(i[j]) * np.float64(i[j])
            for r in range(rows_by_eight, rows):
                a = view(first + offsets[r], size, np.float32)
                for j in range(size):
                    tile[j] += np.float64(a[j]) * np.float64(a[j])
            for j in range(size):
                is_finite &= tile[j] <= LARGEST  # not of NaN
    return is_finite


@kernel
def add_runs(address, offsets, starts, counts, matrices, sums, columns):
    """As `add_squares` for each run k: counts[k] rows from starts[k] on are added to the sums of the matrix matrices[k]."""
    is_finite = True
    for k in range(len(starts)):
        rows = offsets[starts[k] : starts[k] + counts[k]]
        is_finite &= add_squares(address, rows, 0, sums + 8 * matrices[k] * columns, columns, columns, 1)
    return is_finite


_TIMED_ROWS, _TIMED_COLUMNS, _TIMED_SECONDS = 512, 1024, 0.01  # that are added to see how long it takes, and for how long
_MIN_SHARED_ELEMENTS = 1 << 20  # activations summed by several threads; fewer take less than a few hundred microseconds
_PARTS_PER_THREAD = 4  # of a layer's experts, which have different numbers of tokens


@dataclass(frozen=True)
class Addition:
    """What a batch adds to the sums of a weight.

    squares  float64 [matrices, columns], sums of the activations' squares; counts: int64 [matrices], activations of each
    weight   how many times both count
    """

    name: str
    squares: np.ndarray
    counts: np.ndarray
    weight: int


@dataclass
class _Squares:
    """The sums and counts of one weight, or of several that have the same input; leader: the one whose inputs are added."""

    leader: str
    sums: np.ndarray
    counts: np.ndarray


class BatchSums:
    """Sums over the tokens of a batch in their order, however many come at a time: micro-batches make no difference.

    Methods take `source`: what is the same for weights with the same input; weights that follow each other with one source
    share an array, to which the first of them adds; (): none. They raise NotFiniteError for NaN and infinity, also in the sums.
    """

    def __init__(self, workers: Workers):
        self._workers = workers
        self._entries: dict[tuple[str, tuple], _Squares] = {}  # by name and source
        self._last: tuple[tuple, _Squares | None] = (), None

    def add(self, weight: Weight, x: np.ndarray, matrix: int, source: tuple = ()) -> None:
        """Adds float32 [n, columns] with contiguous columns to a matrix of a weight."""
        entry = self._leading(weight, source)
        if entry is not None:
            entry.counts[matrix] += len(x)
            self._add(weight, entry.sums[matrix : matrix + 1], x.ctypes.data, np.arange(len(x)) * x.strides[0], 0)

    def add_heads(self, weight: Weight, x: np.ndarray) -> None:
        """Adds float32 [n, heads, columns] with contiguous columns to the matrix of each head, or to the one that all share."""
        entry, (n, heads, _), (row_step, head_step, _) = self._entry(weight, ()), x.shape, x.strides
        offsets = np.arange(n) * row_step
        if len(entry.sums) == 1:  # token after token
            offsets, n = (offsets[:, None] + np.arange(heads) * head_step).reshape(-1), n * heads
        entry.counts += n
        self._add(weight, entry.sums, x.__array_interface__["data"][0], offsets, head_step)

    def add_head_squares(self, weight: Weight, squares: np.ndarray, n: int) -> None:
        """Adds each head's sums over n tokens, float64 [heads, columns]. Raises NotFiniteError for NaN or infinity."""
        if not (squares <= LARGEST).all():
            raise NotFiniteError(weight.name)
        entry = self._entry(weight, ())
        is_shared = len(entry.sums) == 1
        entry.sums += squares.sum(axis=0) if is_shared else squares
        entry.counts += n * len(squares) if is_shared else n

    def add_runs(self, weight: Weight, inputs: ExpertInputs, source: tuple = ()) -> None:
        """Adds runs of rows, each to another matrix. Raises NotFiniteError for NaN or infinity."""
        entry, workers = self._leading(weight, source), self._workers
        if entry is None:
            return
        x, matrices, starts, counts, rows = inputs
        entry.counts[matrices] += counts
        offsets = (np.arange(len(x)) if rows is None else rows) * x.strides[0]
        address, sums, columns = x.ctypes.data, entry.sums.ctypes.data, x.shape[1]
        step = max(1, -(-len(starts) // (_PARTS_PER_THREAD * workers.count)))

        def add_part(first: int) -> bool:
            part = slice(first, first + step)
            return add_runs(address, offsets, starts[part], counts[part], matrices[part], sums, columns)

        if not all(workers.map(add_part, range(0, len(starts), step))):
            raise NotFiniteError(weight.name)

    def take(self, weight: int) -> Iterator[Addition]:
        """What the batch adds, whose tokens count `weight` times; the next one begins."""
        entries, self._entries, self._last = self._entries, {}, ((), None)
        for (name, _), entry in entries.items():
            yield Addition(name, entry.sums, entry.counts, weight)

    def _entry(self, weight: Weight, source: tuple) -> _Squares:
        """Those of a weight, which may be those of the weight before it."""
        entry = self._entries.get((weight.name, source))
        if entry is None:
            before, last = self._last
            if last is None or not source or source != before:
                matrices = dims(weight.shape)[2]
                last = _Squares(weight.name, np.zeros((matrices, weight.shape[0])), np.zeros(matrices, np.int64))
            entry = self._entries[weight.name, source] = last
        self._last = source, entry
        return entry

    def _leading(self, weight: Weight, source: tuple) -> _Squares | None:
        """As `_entry`; None where another weight has added the same inputs."""
        entry = self._entry(weight, source)
        return entry if entry.leader == weight.name else None

    def _add(self, weight: Weight, sums: np.ndarray, address: int, offsets: np.ndarray, head_step: int) -> None:
        """Adds rows at offsets (in bytes) from an address to sums float64 [heads, columns]: threads take heads or columns."""
        (heads, columns), to, workers = sums.shape, sums.ctypes.data, self._workers
        if len(offsets) * sums.size < _MIN_SHARED_ELEMENTS or workers.count == 1:
            is_finite = add_squares(address, offsets, head_step, to, columns, columns, heads)
        elif heads > 1:
            step = -(-heads // workers.count)

            def add_heads(first: int) -> bool:
                count, at = min(step, heads - first), to + 8 * first * columns
                return add_squares(address + first * head_step, offsets, head_step, at, columns, columns, count)

            is_finite = all(workers.map(add_heads, range(0, heads, step)))
        else:

            def add_tile(first: int) -> bool:
                width = min(TILE, columns - first)
                return add_squares(address + 4 * first, offsets, 0, to + 8 * first, columns, width, 1)

            is_finite = all(workers.map(add_tile, range(0, columns, TILE)))
        if not is_finite:
            raise NotFiniteError(weight.name)


@cache
def squaring_seconds() -> float:
    """Of a thread, for a number whose square is added, on average, measured now."""
    sums, x = BatchSums(Workers(1)), np.ones((_TIMED_ROWS, _TIMED_COLUMNS), np.float32)
    weight = Weight("", (_TIMED_COLUMNS, 1))
    sums.add(weight, x, 0)
    begun, calls, taken = time.thread_time(), 0, 0.0
    while taken < _TIMED_SECONDS:
        sums.add(weight, x, 0)
        calls, taken = calls + 1, time.thread_time() - begun
    return taken / (calls * x.size)
