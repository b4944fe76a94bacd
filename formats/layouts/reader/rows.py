"""The readers of a row of any type that has a `CodeLayout`, and the scales of rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ...types import TYPES, TensorType
from .blocks import SUPERBLOCK, BlockReader
from .code_layout import CodeLayout, code_layout
from .emitter import F32, Emitter, vector
from .grids import GridReader
from .trellis import TrellisReader

_COLUMNS = {1: 256, 4: 128, 8: 64}  # rows of a group -> columns that are read at a time, for types of small blocks


@cache
def readers(name: str) -> list[BlockReader]:
    """The readers that a row is divided among, largest first: as many blocks at a time as fit, then single blocks."""
    layout = code_layout(name)
    assert layout is not None
    reader = TrellisReader if layout.trellis else GridReader if layout.grid is not None else BlockReader
    blocks = max(1, (SUPERBLOCK if layout.block == SUPERBLOCK else _COLUMNS[TYPES[name].rows]) // layout.block)
    return [reader(name, blocks), reader(name, 1)] if blocks > 1 else [reader(name, 1)]


def row_scales(emit: Emitter, layout: CodeLayout, stored: TensorType, weights: Any) -> Any:
    """<rows x float>: the row scales of a group; None if the type has none."""
    if layout.row_scale is None:
        return None
    if layout.row_scale == "f16":
        return emit.halves(weights, np.arange(stored.rows) * 2)
    assert stored.rows == 1 or stored.row_meta == 4, "the row scales of a group lie side by side"
    return emit.load(weights, 0, vector(F32, stored.rows))
