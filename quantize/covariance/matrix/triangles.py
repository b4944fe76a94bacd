"""Covariances as the file has them: the upper triangle, row after row, as correlations of 16 bits or covariances of 32.

A correlation is a covariance divided by the root mean squares of both columns, from -1 to 1; as an int16 it is multiplied by
32767. So each is off by at most 1/65534, which is below the sampling error of any text; float16 would be coarser near 1, where
the correlations of a low-rank covariance lie, and bfloat16 coarser everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field

import numpy as np

from ....data_classes import dataclass
from ....errors import PlanError
from ....simd.compile import kernel
from ....simd.memory import scratch
from ....simd.workers import ALONE, Workers
from .covariance_matrix import NEGATIVE, NOT_FINITE, SecondMoments
from .panels import WIDTH, padded, run_in_parts

DTYPES = {"i16": np.dtype("<i2"), "f32": np.dtype("<f4")}  # name of the GGUF type -> dtype
_ONE = 32767
_RUN = 1 << 20  # numbers of a triangle that a thread takes at a time
RUN_BYTES = 4 * _RUN  # of these as float32
_TILE = 64  # rows and columns that are mirrored at a time


def triangle_size(columns: int) -> int:
    """Numbers of an upper triangle with its diagonal."""
    return columns * (columns + 1) // 2


def fold(matrix: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """A covariance float32 [n, n] -> its upper triangle in a dtype of DTYPES, and the mean squares float32 [n]."""
    mean_squares = np.diagonal(matrix).copy()
    return fold_rows(mean_squares, dtype, lambda first, stop, out: _copy_rows(matrix, first, stop, out)), mean_squares


def fold_rows(
    mean_squares: np.ndarray, dtype: np.dtype, rows: Callable[[int, int, np.ndarray], object], workers: Workers = ALONE
) -> np.ndarray:
    """The triangle that `fold` gives, of a covariance whose rows are made a few at a time: rows(first, stop, out) writes those
    of its upper triangle, one after the other, to out (float32, flat). mean_squares: its diagonal."""
    (triangle,) = folded_blocks(mean_squares, dtype, rows, triangle_size(len(mean_squares)) * dtype.itemsize, workers)
    return triangle


def folded_blocks(
    mean_squares: np.ndarray,
    dtype: np.dtype,
    rows: Callable[[int, int, np.ndarray], object],
    nbytes: int,
    workers: Workers = ALONE,
) -> Iterator[np.ndarray]:
    """The triangle of `fold_rows` in consecutive parts of so many bytes at the most, but a run of rows at the least, each of
    which is made when it is asked for."""
    n, is_whole = len(mean_squares), dtype == DTYPES["f32"]
    inverses, runs = _inverses(mean_squares), list(row_runs(n))
    while runs:
        begin, count = _start(n, runs[0][0]), 1
        while count < len(runs) and (_start(n, runs[count][1]) - begin) * dtype.itemsize <= nbytes:
            count += 1
        block = np.empty(_start(n, runs[count - 1][1]) - begin, dtype)

        def write(run: tuple[int, int], block: np.ndarray = block, begin: int = begin) -> None:
            first, stop = run
            part = block[_start(n, first) - begin : _start(n, stop) - begin]
            if is_whole:
                rows(first, stop, part)
                return
            values = scratch("rows of a triangle", (len(part),), np.float32)
            rows(first, stop, values)
            _fold_rows(values, inverses, first, stop, part)

        workers.map(write, runs[:count], block.size)
        del runs[:count]
        yield block


def row_runs(n: int) -> Iterator[tuple[int, int]]:
    """(first, stop) of rows of a triangle that have about _RUN numbers together."""
    first = 0
    while first < n:
        stop = min(n, first + max(1, _RUN // (n - first)))
        yield first, stop
        first = stop


def _start(n: int, row: int) -> int:
    """Of a row in the triangle."""
    return row * n - row * (row - 1) // 2


def unfold(triangle: np.ndarray, mean_squares: np.ndarray) -> np.ndarray:
    """What `fold` gave -> the covariance float32 [n, n], symmetric, with exactly these mean squares on its diagonal."""
    n = len(mean_squares)
    matrix = np.empty((n, n), np.float32)
    _mirror(triangle, *_factors(triangle, mean_squares), matrix)
    np.fill_diagonal(matrix, mean_squares)
    return matrix


@dataclass(frozen=True, eq=False)
class FoldedCovariance(SecondMoments):
    """A covariance as the file has it: a quarter of the memory of `Covariance` with 16 bits.

    triangle, mean_squares  what `fold` gave; tokens: how many inputs the mean was taken of
    """

    triangle: np.ndarray = field(repr=False)
    mean_squares: np.ndarray = field(repr=False)
    tokens: int

    @property
    def diagonal(self) -> np.ndarray:
        return self.mean_squares

    @property
    def nbytes(self) -> int:
        return self.triangle.nbytes + self.mean_squares.nbytes

    @property
    def matrix(self) -> np.ndarray:
        """float32 [columns, columns], made anew each time."""
        return unfold(self.triangle, self.mean_squares)

    def rows(self, first: int, stop: int, out: np.ndarray) -> None:
        """Writes the rows first ... stop - 1 of the upper triangle, one after the other, to out: float32, flat."""
        n = self.columns
        part = self.triangle[_start(n, first) : _start(n, stop)]
        _unfold_rows(part, *_factors(self.triangle, self.mean_squares), self.mean_squares, first, stop, out)

    def check(self) -> None:
        if not np.isfinite(self.mean_squares).all() or (
            self.triangle.dtype.kind == "f" and not np.isfinite(self.triangle).all()
        ):
            raise PlanError(NOT_FINITE)
        if self.columns and self.mean_squares.min() < 0:
            raise PlanError(NEGATIVE)

    def write_panels(self, panels: np.ndarray, workers: Workers) -> None:
        n, flat = self.columns, panels.reshape(-1)
        factors, scale = _factors(self.triangle, self.mean_squares)
        panels[:, n:], panels[-1, :, n - (len(panels) - 1) * WIDTH :] = 0, 0

        def write(first: int, stop: int) -> None:
            _mirror_to_panels(self.triangle, factors, scale, first, stop, padded(n), flat)

        run_in_parts(workers, len(panels), write)
        at = np.arange(n)
        flat[(at // WIDTH * padded(n) + at) * WIDTH + at % WIDTH] = self.mean_squares


def _factors(triangle: np.ndarray, mean_squares: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """(float32 [n], a number) of whose product an entry is multiplied by those of its row and column, the number once."""
    if triangle.dtype == DTYPES["f32"]:
        return np.ones(len(mean_squares), np.float32), np.float32(1)
    return np.sqrt(mean_squares), np.float32(1 / _ONE)


def _inverses(mean_squares: np.ndarray) -> np.ndarray:
    """1 / root mean square, 0 where that is 0."""
    roots = np.sqrt(mean_squares)
    return np.divide(np.float32(1), roots, out=np.zeros_like(roots), where=roots > 0)


@kernel
def _fold_rows(values, inverses, first, stop, out):
    """Rows first ... stop - 1 of an upper triangle, float32 -> int16, both flat."""
    n, at, one = len(inverses), 0, np.float32(_ONE)
    for i in range(first, stop):
        factor = inverses[i]
        for j in range(i, n):
            value = min(max(values[at] * factor * inverses[j], np.float32(-1)), np.float32(1))
            out[at] = np.int16(np.rint(value * one))
            at += 1


@kernel
def _copy_rows(matrix, first, stop, out):
    n, at = len(matrix), 0
    for i in range(first, stop):
        out[at : at + n - i] = matrix[i, i:]
        at += n - i


@kernel
def _unfold_rows(part, factors, scale, mean_squares, first, stop, out):
    n, at = len(factors), 0
    for i in range(first, stop):
        factor, begin = factors[i] * scale, at
        for j in range(i, n):
            out[at] = np.float32(part[at]) * factor * factors[j]
            at += 1
        out[begin] = mean_squares[i]


@kernel
def _mirror(triangle, factors, scale, out):
    n = len(factors)
    for top in range(0, n, _TILE):
        for left in range(top, n, _TILE):
            for i in range(top, min(top + _TILE, n)):
                at = i * n - i * (i - 1) // 2 - i  # of column 0, were it there
                factor = factors[i] * scale
                for j in range(max(left, i), min(left + _TILE, n)):
                    value = np.float32(triangle[at + j]) * factor * factors[j]
                    out[i, j] = value
                    out[j, i] = value


@kernel
def _mirror_to_panels(triangle, factors, scale, first, stop, size, out):
    """The rows of the panels first ... stop - 1 of the triangle, and what mirrors them, to panels of `size` rows (flat)."""
    n = len(factors)
    for top in range(64 * first, min(64 * stop, n), 64):
        for left in range(top, n, 64):
            to, mirrored = left // 64 * size * 64, top // 64 * size * 64
            for i in range(top, min(top + 64, n)):
                at = i * n - i * (i - 1) // 2 - i  # of column 0, were it there
                factor = factors[i] * scale
                for j in range(max(left, i), min(left + 64, n)):
                    value = np.float32(triangle[at + j]) * factor * factors[j]
                    out[to + i * 64 + j - left] = value
                    out[mirrored + j * 64 + i - top] = value
