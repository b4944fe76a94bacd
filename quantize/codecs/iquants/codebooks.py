"""The codebooks (grids) of the i-quants: their points, and for every vector of levels the grid points nearest to it.

A grid of the iq1 and iq2 types holds vectors of eight levels 0, 1, 2; one of the iq3 types vectors of four levels 0 ... 7.
Eight or four levels are packed into 16 bits, of two or four bits each, the first lowest. The points, in the order of their
indices, and the values of levels are those of formats/layouts/tables.py.
"""

from __future__ import annotations

from functools import cache
from threading import Lock

import numpy as np

from ....data_classes import dataclass
from ....formats.layouts.tables import GRIDS, codebook_points
from ....simd.compile import kernel

# name of a grid -> values of its levels, in multiples of a block's scale
_LEVEL_VALUES = {name: tuple(level * grid.unit for level in grid.levels) for name, grid in GRIDS.items()}

# Candidates for each vector of levels. With all grid points as candidates errors would be 0 to 2 percent lower.
NEIGHBOURS = 32

_DISTANCES = 1 << 19  # that are computed at once: all those of iq1's grid would take 160 MB
_finding = Lock()


@dataclass(frozen=True)
class Codebook:
    """A grid and its look-up tables. (llama.cpp's kgrid, kmap and kneighbours.)

    points      uint16 [points], packed levels of each grid point
    levels      float32 [levels], the values that levels stand for
    size        elements of a point: 8 or 4
    bits        bits of a packed level: 2 or 4
    ranks       uint16 [2, 256]: ranks[0, code & 255] + ranks[1, code >> 8] numbers all vectors of levels
    grid_index  int16 [vectors]: index of the grid point that a vector is, -1 if it is not on the grid
    neighbours  uint16 [vectors * NEIGHBOURS]: packed levels of the NEIGHBOURS grid points nearest to each vector, by rising
                Euclidean distance of the values
    """

    points: np.ndarray
    levels: np.ndarray
    size: int
    bits: int
    ranks: np.ndarray
    grid_index: np.ndarray
    neighbours: np.ndarray


def codebook(name: str) -> Codebook:
    """The codebook of a grid, by its name in formats.layouts.tables.GRIDS.

    Finding all neighbours takes a fraction of a second, for which other threads wait.
    """
    with _finding:
        return _found(name)


@cache
def _found(name: str) -> Codebook:
    levels, points = _LEVEL_VALUES[name], codebook_points(name)
    size, bits = GRIDS[name].size, GRIDS[name].bits
    count = len(levels)
    shifts = bits * np.arange(size, dtype=np.uint16)
    digits = count ** np.arange(size)
    ranks = np.zeros((2, 256), np.uint16)
    half_size = size // 2
    for half in range(2):
        level_table = (np.arange(256)[:, None] >> shifts[:half_size]) % (1 << bits)
        ranks[half] = (level_table * digits[half * half_size :][:half_size]).sum(axis=1)
    level_vectors = np.arange(count**size)[:, None] // digits % count
    packed = (level_vectors << shifts).sum(axis=1)
    grid_index = np.full(1 << 16, -1, np.int16)
    grid_index[points] = np.arange(len(points))
    neighbours = points[_nearest_points(level_vectors, points[:, None] >> shifts & ((1 << bits) - 1), np.array(levels))]
    return Codebook(points, np.array(levels, np.float32), size, bits, ranks, grid_index[packed], neighbours.reshape(-1))


def _nearest_points(vectors: np.ndarray, points: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Indices of the points nearest to each vector, int [vectors, NEIGHBOURS]. Both are given as levels [count, size]."""
    v, p = ((8 * levels[a]).astype(np.float32) for a in (vectors, points))  # integers: all sums are exact
    step, squares = max(1, _DISTANCES // len(p)), (p**2).sum(axis=1)
    nearest = np.empty((len(v), NEIGHBOURS), np.intp)
    for start in range(0, len(v), step):
        some = v[start : start + step]
        distance = (some**2).sum(axis=1)[:, None] + squares - 2 * (some @ p.T)
        # The index in the low bits makes all keys different, so that the result does not depend on the sorting algorithm.
        keys = distance.astype(np.int32) * len(points) + np.arange(len(points), dtype=np.int32)
        keys.partition(NEIGHBOURS - 1, axis=1)
        nearest[start : start + step] = np.sort(keys[:, :NEIGHBOURS], axis=1) % len(points)
    return nearest


@kernel
def codes_to_grid_indices(codes, ranks, grid_index):
    """Replaces packed levels of grid points, uint16 [groups], by the points' indices; ranks, grid_index: of the Codebook."""
    for g in range(codes.size):
        code = codes[g]
        codes[g] = grid_index[np.intp(ranks[0, code & 255]) + np.intp(ranks[1, code >> 8])]
