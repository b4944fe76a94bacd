"""Encoded rows refined under a covariance on a device, in pieces where its memory asks for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...formats import TYPES
from ..covariance.fields import BlockFields
from ..covariance.prepared import DampedCovariance
from ..covariance.refinement import Refinement
from ..covariance.values import ScalarRows
from ..covariance.vectors import VectorRows, is_vector
from .covariance import forget_matrices
from .memory import in_pieces
from .parity_covariance import DeviceParityRefinement
from .scalar_covariance import DeviceScalarRefinement
from .vector_covariance import DeviceVectorRefinement, rows_at_once


def refine_on_device(
    x: np.ndarray, q: np.ndarray, type_name: str, damped: DampedCovariance, effort: int, device: str,
    refine_rows: Callable[[Refinement, np.ndarray], np.ndarray],
) -> np.ndarray:  # fmt: skip
    """As `covariance.encode.refine`, for types that it refines; refine_rows(refinement, q) runs a refinement of the rows q."""

    def refine_piece(first: int, stop: int) -> np.ndarray:
        rows = q[first:stop]
        return refine_rows(_refinement(x[first:stop], rows, type_name, damped, effort, device), rows)

    at_once = rows_at_once(type_name) if is_vector(type_name) else len(x)
    what = f"refine {type_name} under a covariance of {x.shape[1]} columns"
    return in_pieces(refine_piece, len(x), at_once, what, device, group=TYPES[type_name].rows, free=forget_matrices)


def _refinement(
    x: np.ndarray, q: np.ndarray, type_name: str, damped: DampedCovariance, effort: int, device: str
) -> DeviceVectorRefinement | DeviceScalarRefinement:
    if is_vector(type_name):
        return DeviceVectorRefinement(x, VectorRows.of(q, type_name), damped, effort, device)
    in_fours = BlockFields.of(type_name).layout.gray_words
    chosen = DeviceParityRefinement if in_fours else DeviceScalarRefinement
    return chosen(x, ScalarRows.of(q, type_name), damped, effort, device)
