"""Covariances as the file has them: the upper triangle, row after row, as correlations of 16 bits or covariances of 32.

A correlation is a covariance divided by the root mean squares of both columns, from -1 to 1; as an int16 it is multiplied by
32767. So each is off by at most 1/65534, which is below the sampling error of any text; float16 would be coarser near 1, where
the correlations of a low-rank covariance lie, and bfloat16 coarser everywhere.
"""

from __future__ import annotations

import numpy as np

from ...simd.compile import kernel

DTYPES = {"i16": np.dtype("<i2"), "f32": np.dtype("<f4")}  # name of the GGUF type -> dtype
_ONE = 32767
_TILE = 64  # rows and columns that are mirrored at a time


def triangle_size(columns: int) -> int:
    """Numbers of an upper triangle with its diagonal."""
    return columns * (columns + 1) // 2


def fold(matrix: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """A covariance float32 [n, n] -> its upper triangle in a dtype of DTYPES, and the mean squares float32 [n]."""
    mean_squares = np.diagonal(matrix).copy()
    triangle = np.empty(triangle_size(len(matrix)), dtype)
    if dtype == DTYPES["f32"]:
        _copy_triangle(matrix, triangle)
    else:
        _fold(matrix, _inverses(mean_squares), triangle)
    return triangle, mean_squares


def unfold(triangle: np.ndarray, mean_squares: np.ndarray) -> np.ndarray:
    """What `fold` gave -> the covariance float32 [n, n], symmetric, with exactly these mean squares on its diagonal."""
    n = len(mean_squares)
    matrix = np.empty((n, n), np.float32)
    if triangle.dtype == DTYPES["f32"]:
        _mirror(triangle, np.ones(n, np.float32), np.float32(1), matrix)
    else:
        _mirror(triangle, np.sqrt(mean_squares), np.float32(1 / _ONE), matrix)
    np.fill_diagonal(matrix, mean_squares)
    return matrix


def _inverses(mean_squares: np.ndarray) -> np.ndarray:
    """1 / root mean square, 0 where that is 0."""
    roots = np.sqrt(mean_squares)
    return np.divide(np.float32(1), roots, out=np.zeros_like(roots), where=roots > 0)


@kernel
def _fold(matrix, inverses, out):
    n, at, one = len(inverses), 0, np.float32(_ONE)
    for i in range(n):
        row, factor = matrix[i], inverses[i]
        for j in range(i, n):
            value = min(max(row[j] * factor * inverses[j], np.float32(-1)), np.float32(1))
            out[at + j - i] = np.int16(np.rint(value * one))
        at += n - i


@kernel
def _copy_triangle(matrix, out):
    n, at = len(matrix), 0
    for i in range(n):
        out[at : at + n - i] = matrix[i, i:]
        at += n - i


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
