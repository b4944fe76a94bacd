"""Better codes for encoded rows: the same type, scales and size, a smaller error under the covariance of the inputs."""

from __future__ import annotations

import numpy as np

from ...formats import TYPES, TensorType
from ...formats.layouts import layout_of
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


def refine(
    x: np.ndarray, q: np.ndarray, type_name: str, prepared: PreparedCovariance, effort: int, device: str | None = None
) -> np.ndarray:
    """Rows that the encoder of a type made -> rows of no larger error r H r^T, r = x - decoded, H being damped.

    x float32 [rows, n], q uint8 [rows, row_bytes] -> uint8 [rows, row_bytes]. Rows that cannot be made better come back as they
    are, as do all rows of types that are neither scalar nor of vectors. device: of torch, which chooses the codes, but those of
    trellis types, whose search it cannot follow; None: this program. Raises MillError when a device's memory does not suffice.
    """
    damped = prepared.damped
    if damped is None or not takes_covariance(TYPES[type_name]):
        return q
    if device is not None and layout_of(type_name).trellis is None:
        from ..devices.refine import refine_on_device

        return refine_on_device(x, q, type_name, damped, effort, device, _refined)
    if is_vector(type_name):
        return _refined(VectorRefinement(x, VectorRows.of(q, type_name), damped, effort), q)
    return _refined(ScalarRefinement(x, ScalarRows.of(q, type_name), damped, effort), q)


def _refined(refinement: Refinement, q: np.ndarray) -> np.ndarray:
    before, out = refinement.errors(), q.copy()
    refinement.run()
    refinement.rows.write(out)
    refinement.rows.fields.copy_rows(q, out, ~(refinement.errors() < before))
    return out
