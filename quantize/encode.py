"""Rows to and from any tensor type: codecs, what lowers errors under a covariance, and torch's devices in one call."""

# What imports numba is imported where it is needed: most commands only ask for types here, and take less time than that import.

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from ..formats import TYPES, PlanError, TensorType
from ..formats.floats import all_finite
from ..formats.layouts import layout_of
from ..simd.compile import import_kernels
from ..simd.compile.compile_time import compiling_for
from .codecs.codec import Codec, raise_nonfinite
from .covariance.covariance_matrix import EFFORTS, Covariance
from .torch_encoders.encode_on_device import TYPES_ON_DEVICES, encode_on_device

if TYPE_CHECKING:
    from .covariance.coupling import CoupledRows
    from .covariance.prepared import PreparedCovariance

_WHOLE_NUMBERS = {"i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}  # decoded, never encoded: tables


# Block size -> repacked types whose encoders guard importance (docs/formats/encoders.md, imatrix sanitising) while those of
# their base types do not: their bytes are not always those of the repacked base type.
_GUARDED_PACKED_TYPES = {
    32: ("iq4_nl_r4", "q4_0_r8", "q6_0_r4", "iq4_xs_r8", "q4_k_r4", "q5_k_r4", "iq2_xxs_r4", "iq3_xxs_r4"),
    16: ("q2_k_r4", "q3_k_r4", "q6_k_r4", "iq2_xs_r4", "iq2_s_r4", "iq3_s_r4"),
}
_GUARD_BLOCK_OF = {name: block for block, names in _GUARDED_PACKED_TYPES.items() for name in names}


def can_encode(tensor_type: TensorType) -> bool:
    """Whether `encode` and `decode` support this type."""
    return tensor_type.has_codec


@cache
def _codec(name: str) -> Codec:
    module = TYPES[name].codec
    if module is None:
        raise PlanError(f"tensor type {name} cannot be encoded or decoded yet")
    return import_kernels(f".codecs.{module}", __package__).CODECS[name.lower()]


def encode(
    x: np.ndarray,
    type: str,
    importance: np.ndarray | None = None,
    covariance: Covariance | PreparedCovariance | None = None,
    effort: int = 1,
    device: str | None = None,
    coupled: CoupledRows | None = None,
) -> np.ndarray:
    """Quantises rows to a tensor type: float32 [rows, n] -> uint8 [rows, row_bytes].

    x           float32 (other dtypes are converted), C-contiguous or not
    type        name of any type with a codec, in any letter case, repacked types included
    importance  float32 [n], weight of each column's squared error (mean squared activations of an imatrix); None for none, or
                for the diagonal of the covariance, if there is one
    covariance  of the inputs: the codes of each row are then chosen for a small error r H r^T (r: the row minus what it decodes
                to, H: the damped covariance), which is never larger than without. Covariances that will be used again should
                be prepared once (`quantize.covariance.prepared.prepare`). One of too few tokens counts as its diagonal
    effort      how much is searched with a covariance: 0 little, 1 codes, 2 and 3 scales too; see quantize/covariance/README.md
    coupled     what `coupling.couple` makes of the second moments of the gradients at the outputs of these rows: their errors R
                are then weighed together, tr(A R H R^T). Only with a covariance
    device      a device of torch ('cuda', 'cuda:1') that encodes the types that `quantize.torch_encoders` knows; None: this
                program

    Raises PlanError for an unknown type, for rows that the type cannot hold (their length, or their number for an interleaved
    type), and for importance or covariance of another width or with impossible entries; NonFiniteError for NaN or infinity
    in x. The layouts are those of docs/formats/layouts.md, the searches those of docs/formats/encoders.md.
    """
    tensor_type = TYPES.find(type)
    x = np.ascontiguousarray(x, np.float32)
    if x.ndim != 2:
        raise PlanError(f"encode takes an array of [rows, columns], not of {x.ndim} dimensions")
    rows, n = x.shape
    tensor_type.row_bytes(n)
    if rows % tensor_type.rows:
        raise PlanError(f"{tensor_type.name} interleaves {tensor_type.rows} rows; {rows} rows are no multiple of it")
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
        if importance.shape != (n,):
            raise PlanError(f"importance of shape {importance.shape} does not fit rows of {n} elements")
        if not (all_finite(importance, "f32") and importance.min(initial=0) >= 0):
            raise PlanError("importance has entries that are negative, infinite or NaN: collect the imatrix again")
    prepared = None
    if covariance is not None:  # the kernels of the covariance are imported by those alone who use them
        from .covariance.prepared import prepare

        if effort not in EFFORTS:
            raise PlanError(f"an effort of {effort}; it is one of {', '.join(map(str, EFFORTS))}")
        if covariance.columns != n:
            raise PlanError(f"a covariance of {covariance.columns} columns does not fit rows of {n} elements")
        prepared = prepare(covariance) if isinstance(covariance, Covariance) else covariance
        importance = prepared.importance if importance is None else importance
    codec_type = _codec_type(tensor_type)
    codec = _codec(codec_type.name)
    if not codec.checks_finite and not all_finite(x, "f32"):
        raise_nonfinite(x)
    if x.size == 0:
        return np.empty((rows, tensor_type.row_bytes(n)), np.uint8)
    with compiling_for(tensor_type.name):
        if importance is not None and tensor_type.name.lower() in _GUARD_BLOCK_OF:
            from .codecs.importance import guard_importance

            importance = guard_importance(x, importance, _GUARD_BLOCK_OF[tensor_type.name.lower()])
        if device is not None and codec_type.name in TYPES_ON_DEVICES:
            encode_rows = partial(encode_on_device, importance=importance, type_name=codec_type.name, device=device)
        else:
            encode_rows = partial(_encode_rows, codec, importance)
        if prepared is None:
            q = encode_rows(x)
        elif coupled is not None and prepared.damped is not None and _is_refined(codec_type):
            from .covariance.row_feedback import encode_coupled

            q = encode_coupled(x, encode_rows, codec_type.name, prepared.damped, effort, coupled)
        else:
            q = _refine(x, encode_rows(x), codec_type, prepared, effort, device)
        if codec_type is tensor_type:
            return q
        from ..repack import pack

        return pack(q, tensor_type.name, n)[0]


def _encode_rows(codec: Codec, importance: np.ndarray | None, x: np.ndarray) -> np.ndarray:
    return codec.encode(x, importance)


def _is_refined(codec_type: TensorType) -> bool:
    from .covariance.refine import takes_covariance

    return takes_covariance(codec_type)


def _refine(
    x: np.ndarray,
    q: np.ndarray,
    codec_type: TensorType,
    prepared: PreparedCovariance,
    effort: int,
    device: str | None,
) -> np.ndarray:
    if device is not None and layout_of(codec_type.name).trellis is None:  # whose search is the processor's alone
        from .torch_encoders.refine_on_device import refine_on_device

        return refine_on_device(x, q, codec_type.name, prepared, effort, device)
    from .covariance.refine import refine

    return refine(x, q, codec_type.name, prepared, effort)


def decode(q: np.ndarray, type: str, n: int) -> np.ndarray:
    """Dequantises rows of a tensor type: uint8 [rows, row_bytes] -> float32 [rows, n].

    n: elements per row. Rows of an interleaved type have to be whole groups. Raises PlanError for an unknown type and for an
    array of another shape.
    """
    tensor_type = TYPES.find(type)
    if q.ndim != 2 or q.shape[1] != tensor_type.row_bytes(n) or q.shape[0] % tensor_type.rows:
        raise PlanError(
            f"{tensor_type.name} rows of {n} elements take {tensor_type.row_bytes(n)} bytes each, not an array of {q.shape}"
        )
    if q.size == 0:
        return np.empty((len(q), n), np.float32)
    q = np.ascontiguousarray(q)
    if tensor_type.name in _WHOLE_NUMBERS:
        return q.view(_WHOLE_NUMBERS[tensor_type.name]).astype(np.float32)
    codec_type = _codec_type(tensor_type)
    with compiling_for(tensor_type.name):
        if codec_type is not tensor_type:
            from ..repack import unpack

            q, _ = unpack(q, tensor_type.name, n)
        return _codec(codec_type.name).decode(q, n)


def _codec_type(tensor_type: TensorType) -> TensorType:
    """The type whose codec is used: the type itself if it has one, else the plain type whose bits it permutes."""
    return tensor_type if tensor_type.codec is not None else TYPES.plain(tensor_type)
