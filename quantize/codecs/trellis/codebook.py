"""Codebooks of the trellis types, and the bounding-box tree in which encoders look for the nearest vector.

A codebook holds the 2**bits vectors of 8 (or 4) values that a multiplicative generator makes from its start states (Trellis in
formats/layouts/tables.py; the trellis of QTIP, Tseng et al. 2024, in ik_llama.cpp's form). For the search they are ordered by
halving them recursively at the median of their widest coordinate, down to runs of 16 vectors; a run has a bounding box, 16 runs
have a box around theirs, and so on. The tables hold 16 vectors or boxes as lanes: of two coordinates at a time, 32 int16 that
alternate between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from ....data_classes import dataclass
from ....formats.layouts.tables import Trellis
from ....simd.lanes import LANES

# Boxes are in fixed point: a coordinate c as (c + OFFSET) * RESOLUTION.
OFFSET, RESOLUTION = 256, 32


@dataclass(frozen=True, eq=False)
class TrellisCodebook:
    """A codebook and its tree.

    values        int8 [vectors, size]: the vectors by index
    order         int32 [vectors]: index of each vector in the order of the tree
    vectors       int16 [runs * size * 16]: the runs of 16 vectors, as lanes
    boxes         int16, as lanes: lower and upper bounds of 16 boxes for each pair of coordinates; all levels, from the top
    level_starts  int64 [levels]: where in `boxes` each level begins
    top_boxes     number of boxes of the top level, at most 32; the other levels have multiples of 16
    """

    values: np.ndarray
    order: np.ndarray
    vectors: np.ndarray
    boxes: np.ndarray
    level_starts: np.ndarray
    top_boxes: int

    @property
    def size(self) -> int:
        return self.values.shape[1]


class TrellisTree(NamedTuple):
    """The trees of all codebooks of a type, and how far they are searched (see nearest_search.py).

    limit_factor         float32: times the expected distance is the limit up to which boxes are opened
    distance_polynomial  float32 [4]: expected distance, by the mean square of a group over that of the codebook
    boxes, vectors       of the TrellisCodebooks, one after the other
    level_starts         int64 [codebooks, levels]; top_boxes: of each codebook
    """

    limit_factor: np.float32
    distance_polynomial: np.ndarray
    boxes: np.ndarray
    level_starts: np.ndarray
    top_boxes: int
    vectors: np.ndarray


def join_trees(codebooks: Sequence[TrellisCodebook], limit_factor: float, distance_polynomial: Sequence[float]) -> TrellisTree:
    """The tree of several codebooks; of none, which means that all vectors are tried, it has no boxes."""
    boxes, vectors = ([np.empty(0, np.int16), *(getattr(each, name) for each in codebooks)] for name in ("boxes", "vectors"))
    starts = [each.level_starts + i * each.boxes.size for i, each in enumerate(codebooks)] or [np.empty(0, np.int64)]
    top_boxes = codebooks[0].top_boxes if codebooks else 0
    return TrellisTree(
        np.float32(limit_factor),
        np.array(distance_polynomial, np.float32),
        np.concatenate(boxes),
        np.stack(starts),
        top_boxes,
        np.concatenate(vectors),
    )


@cache
def trellis_codebook(bits: int, size: int, offset: int = 4096, absolute: bool = False) -> TrellisCodebook:
    """The codebook of 2**bits vectors of `size` values, of their magnitudes if `absolute`. Takes about 0.2 s for 2**16."""
    values = Trellis(size, offset).values(bits)
    if absolute:
        values = np.abs(values)
    order = _tree_order(values)
    runs = values[order].reshape(-1, LANES, size).astype(np.int16)
    low, high = runs.min(axis=1), runs.max(axis=1)
    levels = []
    while True:
        top_boxes = len(low)
        # [groups of 16, box, lower or upper, pair, coordinate]
        bounds = np.zeros((-(-top_boxes // LANES), LANES, 2, size // 2, 2), np.int16)
        bounds.reshape(-1, 2, size)[:top_boxes] = (np.stack([low, high], axis=1) + OFFSET) * RESOLUTION
        levels.append(bounds.transpose(0, 3, 2, 1, 4).reshape(-1))
        if top_boxes <= 2 * LANES:
            break
        low = low.reshape(-1, LANES, size).min(axis=1)
        high = high.reshape(-1, LANES, size).max(axis=1)
    levels.reverse()
    starts = np.cumsum([0] + [level.size for level in levels[:-1]])
    vectors = runs.reshape(-1, LANES, size // 2, 2).transpose(0, 2, 1, 3)
    return TrellisCodebook(values, order, np.ascontiguousarray(vectors).reshape(-1), np.concatenate(levels), starts, top_boxes)


def _tree_order(values: np.ndarray) -> np.ndarray:
    """Indices of the vectors in the order of the tree."""
    order = np.arange(len(values), dtype=np.int32)[None]
    while order.shape[1] > LANES:
        nodes = values[order]
        widest = nodes.astype(np.float32).var(axis=1).argmax(axis=1)
        key = np.take_along_axis(nodes, widest[:, None, None], axis=2)[..., 0]
        order = np.take_along_axis(order, key.argsort(axis=1, kind="stable"), axis=1)
        order = order.reshape(-1, order.shape[1] // 2)
    return np.ascontiguousarray(order).reshape(-1)
