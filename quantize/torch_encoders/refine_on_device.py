"""Encoded rows refined under a covariance on a device, in pieces where its memory asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...formats import TYPES
from ..codecs.fields import BlockFields
from ..covariance.coupling import CoupledRows
from ..covariance.matrix.prepared import DampedCovariance, PreparedCovariance
from ..covariance.refine import rows_of, takes_covariance
from ..covariance.row_feedback import encode_coupled
from ..covariance.values import ScalarRows
from ..covariance.vectors import VectorRows, is_vector
from .device_coupled_refinement import DeviceCoupledRefinement
from .device_parity_refinement import DeviceParityRefinement
from .device_refinement import forget_matrices
from .device_scalar_refinement import DeviceScalarRefinement
from .device_vector_refinement import DeviceVectorRefinement, rows_at_once
from .memory import in_pieces


def refine_on_device(
    x: np.ndarray, q: np.ndarray, type_name: str, prepared: PreparedCovariance, effort: int, device: str
) -> np.ndarray:
    """As `covariance.refine.refine`, but that a device chooses the codes. Trellis types cannot be refined here.

    Raises MillError when the device's memory does not suffice.
    """
    damped = prepared.damped
    if damped is None or not takes_covariance(TYPES[type_name]):
        return q

    def refine_piece(first: int, stop: int) -> np.ndarray:
        rows = q[first:stop]
        return rows_of(_refinement(x[first:stop], rows, type_name, damped, effort, device), rows)

    at_once = rows_at_once(type_name) if is_vector(type_name) else len(x)
    what = f"refine {type_name} under a covariance of {x.shape[1]} columns"
    return in_pieces(refine_piece, len(x), at_once, what, device, group=TYPES[type_name].rows, free=forget_matrices)


def encode_coupled_on_device(
    x: np.ndarray,
    encode_rows: Callable[[np.ndarray], np.ndarray],
    type_name: str,
    damped: DampedCovariance,
    effort: int,
    coupled: CoupledRows,
    device: str,
) -> np.ndarray:
    """As `covariance.row_feedback.encode_coupled`, but that a device chooses the codes of types that `couples_on_device`.

    Raises MillError when the device's memory does not suffice.
    """

    def refined(*given: Any) -> DeviceCoupledRefinement:
        x, q, name, damped, effort, coupled = given
        return DeviceCoupledRefinement(x, ScalarRows.of(q, name), damped, effort, device, coupled)

    def encode_all(first: int, stop: int) -> np.ndarray:
        return encode_coupled(x, encode_rows, type_name, damped, effort, coupled, refined)

    what = f"encode {type_name} under a curvature, with {x.shape[1]} columns"
    return in_pieces(encode_all, len(x), len(x), what, device, group=len(x), free=forget_matrices)


def _refinement(
    x: np.ndarray, q: np.ndarray, type_name: str, damped: DampedCovariance, effort: int, device: str
) -> DeviceVectorRefinement | DeviceScalarRefinement:
    if is_vector(type_name):
        return DeviceVectorRefinement(x, VectorRows.of(q, type_name), damped, effort, device)
    in_fours = BlockFields.of(type_name).layout.gray_words
    chosen = DeviceParityRefinement if in_fours else DeviceScalarRefinement
    return chosen(x, ScalarRows.of(q, type_name), damped, effort, device)
