"""The codebooks of the i-quants: which vectors of levels they hold, and for every other vector the points near it.

A codebook of the iq1 and iq2 types holds vectors of eight levels 0, 1, 2; one of the iq3 types vectors of four levels 0 ... 7.
Eight or four levels are packed into 16 bits, of two or four bits each, the first lowest. The points come from the ggml
sources (formats/layouts, in the order of their indices); what a level stands for does too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from ....formats.layouts.tables import GRIDS, codebook_points

# name of a codebook -> what its levels stand for, in units of a block's scale
_LEVELS = {name: tuple(level * grid.unit for level in grid.levels) for name, grid in GRIDS.items()}

# Candidates kept for each vector of levels. With all points as candidates, errors would be less by 0 to 2 percent.
NEAREST = 32


@dataclass(frozen=True)
class Codebook:
    """points  uint16 [points], their packed levels
    levels  float32 [levels], what a level stands for
    size    elements of a point: 8 or 4
    bits    of a packed level: 2 or 4
    ranks   uint16 [2, 256]: ranks[0, code & 255] + ranks[1, code >> 8] numbers all vectors of levels
    index   int16 [vectors]: which point a vector is, -1 for none
    near    uint16 [vectors * NEAREST]: packed levels of the NEAREST points next to each vector, in ascending order of
            distance (Euclidean, of what levels stand for)
    """

    points: np.ndarray
    levels: np.ndarray
    size: int
    bits: int
    ranks: np.ndarray
    index: np.ndarray
    near: np.ndarray


@cache
def codebook(name: str) -> Codebook:
    """The codebook of that name, its near points worked out (some tenths of a second)."""
    levels, points = _LEVELS[name], codebook_points(name)
    size, bits = GRIDS[name].size, GRIDS[name].bits
    count = len(levels)
    shifts = bits * np.arange(size, dtype=np.uint16)
    digits = count ** np.arange(size)
    ranks = np.zeros((2, 256), np.uint16)
    half = size // 2
    for part in range(2):
        level = (np.arange(256)[:, None] >> shifts[:half]) % (1 << bits)
        ranks[part] = (level * digits[part * half :][:half]).sum(axis=1)
    vectors = np.arange(count**size)[:, None] // digits % count
    packed = (vectors << shifts).sum(axis=1)
    index = np.full(1 << 16, -1, np.int16)
    index[points] = np.arange(len(points))
    near = points[_nearest(vectors, points[:, None] >> shifts & ((1 << bits) - 1), np.array(levels))]
    return Codebook(points, np.array(levels, np.float32), size, bits, ranks, index[packed], near.reshape(-1))


def _nearest(vectors: np.ndarray, points: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Which points are nearest to each vector, both [number, size] of levels: [vectors, NEAREST]."""
    v, p = ((8 * levels[a]).astype(np.float32) for a in (vectors, points))  # whole numbers: all sums are exact
    distance = (v**2).sum(axis=1)[:, None] + (p**2).sum(axis=1) - 2 * (v @ p.T)
    # The point's number in the low bits makes every key different, so the result is the same everywhere.
    keys = distance.astype(np.int32) * len(points) + np.arange(len(points), dtype=np.int32)
    keys.partition(NEAREST - 1, axis=1)
    return np.sort(keys[:, :NEAREST], axis=1) % len(points)
