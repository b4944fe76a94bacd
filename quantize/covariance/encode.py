"""Better codes for encoded rows: the same type, scales and size, a smaller error under the covariance of the inputs."""

from __future__ import annotations

import numpy as np

from ...formats import TensorType
from .fields import BlockFields
from .prepared import PreparedCovariance
from .refinement import Refinement
from .scalar_refinement import ScalarRefinement
from .values import ScalarRows, is_scalar
from .vector_refinement import VectorRefinement
from .vectors import VectorRows, is_vector


def takes_covariance(tensor_type: TensorType) -> bool:
    """Whether rows of this type (interleaved ones too) get other codes with a covariance than without."""
    name = tensor_type.name if tensor_type.codec is not None else tensor_type.base_name
    return is_scalar(name) or is_vector(name)


def is_refined_on_devices(type_name: str) -> bool:
    """Whether a device chooses the codes of a plain type: scalar ones, but for codes in fours (iq4_kss)."""
    return is_scalar(type_name) and not BlockFields.of(type_name).layout.gray_words


def refine(
    x: np.ndarray, q: np.ndarray, type_name: str, prepared: PreparedCovariance, effort: int, device: str | None = None
) -> np.ndarray:
    """Rows that the encoder of a type made -> rows of no larger error r H r^T, r = x - decoded, H being damped.

    x float32 [rows, n], q uint8 [rows, row_bytes] -> uint8 [rows, row_bytes]. Rows that cannot be made better come back as they
    are, as do all rows of types that are neither scalar nor of vectors. device: of torch, which chooses the codes where
    `is_refined_on_devices` holds.
    """
    if prepared.damped is None:
        return q
    if is_vector(type_name):
        refinement: Refinement = VectorRefinement(x, VectorRows.of(q, type_name), prepared.damped, effort)
    elif device is not None and is_refined_on_devices(type_name):
        from ..devices.covariance import DeviceRefinement

        refinement = DeviceRefinement(x, ScalarRows.of(q, type_name), prepared.damped, effort, device)
    elif is_scalar(type_name):
        refinement = ScalarRefinement(x, ScalarRows.of(q, type_name), prepared.damped, effort)
    else:
        return q
    before, out = refinement.errors(), q.copy()
    refinement.run()
    refinement.rows.write(out)
    refinement.rows.fields.copy_rows(q, out, ~(refinement.errors() < before))
    return out
