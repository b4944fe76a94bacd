"""Better codes for encoded rows: the same type, scales and size, a smaller error under the covariance of the inputs."""

from __future__ import annotations

import numpy as np

from ...formats import TYPES, TensorType
from ..codecs.fields import BlockFields
from .coupling import CoupledRows
from .matrix.prepared import DampedCovariance, PreparedCovariance
from .refinement import Refinement
from .scalar_refinement import ScalarRefinement
from .values import ScalarRows, is_scalar
from .vector_refinement import VectorRefinement
from .vectors import VectorRows, is_vector


def takes_covariance(tensor_type: TensorType) -> bool:
    """Whether rows of this type (interleaved ones too) get other codes with a covariance than without."""
    name = tensor_type.name if tensor_type.codec is not None else tensor_type.base_name
    return is_scalar(name) or is_vector(name)


def triangles_of(tensor_type: TensorType) -> int:
    """Triangles of a covariance (see `prepare`) that are in memory while rows of this type are encoded, which takes one."""
    name = tensor_type.name if tensor_type.codec is not None else tensor_type.base_name
    return 2 if is_vector(name) or BlockFields.of(name).layout.gray_words else 1


def refine(x: np.ndarray, q: np.ndarray, type_name: str, prepared: PreparedCovariance, effort: int) -> np.ndarray:
    """Rows that the encoder of a type made -> rows of no larger error r H r^T, r = x - decoded, H being damped.

    x float32 [rows, n], q uint8 [rows, row_bytes] -> uint8 [rows, row_bytes]. Rows that cannot be made better keep their bytes,
    as do all rows of types that are neither scalar nor of vectors.
    """
    if prepared.damped is None or not takes_covariance(TYPES[type_name]):
        return q
    return refine_damped(x, q, type_name, prepared.damped, effort)


def refine_damped(
    x: np.ndarray, q: np.ndarray, type_name: str, damped: DampedCovariance, effort: int, coupled: CoupledRows | None = None
) -> np.ndarray:
    """As `refine`, of a type that `takes_covariance`. With `coupled`, the curvature A of the outputs of these rows, it is the
    error tr(A R H R^T) of all of them that is made smaller."""
    return rows_of(refinement_of(x, q, type_name, damped, effort, coupled), q)


def refinement_of(
    x: np.ndarray, q: np.ndarray, type_name: str, damped: DampedCovariance, effort: int, coupled: CoupledRows | None = None
) -> Refinement:
    """The rows q taken apart, for the steps of a refinement."""
    rows = taken_apart(q, type_name)
    if isinstance(rows, VectorRows):
        return VectorRefinement(x, rows, damped, effort, coupled)
    return ScalarRefinement(x, rows, damped, effort, coupled)


def taken_apart(q: np.ndarray, type_name: str) -> ScalarRows | VectorRows:
    """The fields and codes of encoded rows, uint8 [rows, row_bytes], of a type that `takes_covariance`."""
    return VectorRows.of(q, type_name) if is_vector(type_name) else ScalarRows.of(q, type_name)


def rows_of(refinement: Refinement, q: np.ndarray) -> np.ndarray:
    """Runs a refinement of the rows q: uint8 [rows, row_bytes], of which those without a smaller error stay what they were."""
    before, out = refinement.errors(), q.copy()
    refinement.run()
    refinement.rows.write(out)
    refinement.rows.fields.copy_rows(q, out, ~(refinement.errors() < before))
    return out
