"""Rows to and from any tensor type: codecs, what lowers errors under a covariance, and torch's devices in one call."""

# What imports numba is imported where it is needed: most commands only ask for types here, and take less time than that import.

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import lcm
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from ..formats import TYPES, PlanError, TensorType, layouts
from ..formats.floats import bf16_to_f32
from ..simd.compile.compile_time import compiling_for
from .coarse_rows import CoarseRowReport
from .codecs.codec import NonFiniteError
from .covariance.matrix.covariance_matrix import EFFORTS, SecondMoments
from .plain_rows import PlainRows, can_encode, float_range, is_gpu, plain_rows
from .scale_range import Report, mended, suspects

if TYPE_CHECKING:
    from .covariance.coupling import CoupledRows
    from .covariance.matrix.prepared import PreparedCovariance

__all__ = ["can_encode", "decode", "encode", "encode_unchecked"]

_COMPILED_COLUMNS = 512
_WHOLE_NUMBERS = {"i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64}  # decoded, never encoded: tables


def encode(
    x: np.ndarray,
    type: str,
    importance: np.ndarray | None = None,
    covariance: SecondMoments | PreparedCovariance | None = None,
    effort: int = 1,
    device: str | None = None,
    coupled: CoupledRows | None = None,
    report: Report | bool = True,
    bf16: bool = False,
) -> np.ndarray:
    """Quantises rows to a tensor type: float32 [rows, n] -> uint8 [rows, row_bytes].

    x           float32 (other dtypes are converted), C-contiguous or not
    type        name of any type with a codec, in any letter case, repacked types included
    importance  float32 [n], weight of each column's squared error (mean squared activations of an imatrix); None for none, or
                for the diagonal of the covariance, if there is one
    covariance  of the inputs: the codes of each row are then chosen for a small error r H r^T (r: the row minus what it decodes
                to, H: the damped covariance), which is never larger than without. Covariances that will be used again should
                be prepared once (`quantize.covariance.matrix.prepared.prepare`). One of too few tokens counts as its diagonal
    effort      how much is searched with a covariance: 0 little, 1 codes, 2 and 3 scales too; see quantize/covariance/README.md
    coupled     what `coupling.couple` makes of the second moments of the gradients at the outputs of these rows: their errors R
                are then weighed together, tr(A R H R^T). Only with a covariance
    device      as torch names it: a GPU of NVIDIA ('cuda', 'cuda:1') encodes, with the same bytes; None, and any other: the
                processor
    bf16        x is uint16 [rows, n], the bits of bf16 numbers: half of what a GPU is sent otherwise
    report      called with the rows that stay far coarser than the type is for others (see `scale_range`); True: they are an
                error or a warning, False: neither

    Raises PlanError for an unknown type, for rows that the type cannot hold (their length, or their number for an interleaved
    type), and for importance or covariance of another width or with impossible entries; NonFiniteError for NaN or infinity
    in x; MillError for a row whose weights are too large or too small for the type, if it is not negligible compared with the
    others (then a warning is logged). The layouts are those of docs/formats/layouts.md, the searches those of
    docs/formats/encoders.md.
    """
    plain = _plain_rows(type, device)
    tensor_type = plain.target
    x = np.ascontiguousarray(x, np.uint16 if bf16 else np.float32)
    if x.ndim != 2:
        raise PlanError(f"encode takes an array of [rows, columns], not of {x.ndim} dimensions")
    rows, n = x.shape
    if n % tensor_type.block:
        tensor_type.row_bytes(n)  # raises
    if rows % tensor_type.rows:
        raise PlanError(f"{tensor_type.name} interleaves {tensor_type.rows} rows; {rows} rows are no multiple of it")
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
        if importance.shape != (n,):
            raise PlanError(f"importance of shape {importance.shape} does not fit rows of {n} elements")
        importance = float_range().limit_importance(importance)
    prepared = None
    if covariance is not None:  # the kernels of the covariance are imported by those alone who use them
        from .covariance.matrix.prepared import prepare

        if effort not in EFFORTS:
            raise PlanError(f"an effort of {effort}; it is one of {', '.join(map(str, EFFORTS))}")
        if covariance.columns != n:
            raise PlanError(f"a covariance of {covariance.columns} columns does not fit rows of {n} elements")
        prepared = prepare(covariance) if isinstance(covariance, SecondMoments) else covariance
        importance = float_range().limit_importance(prepared.importance) if importance is None else importance
    if not x.size:
        return np.empty((rows, tensor_type.row_bytes(n)), np.uint8)
    used = type, importance is not None
    if prepared is None and device is None and used in _used and not bf16:  # the rest takes as long as short rows
        q, _ = _encode_checked(x, importance, plain, report)
        return q if plain.type is tensor_type else _packed(q, plain, n)
    on_gpu = device is not None and plain.is_on_gpu(importance is not None)
    if bf16 and (prepared is not None or not on_gpu):
        x = _float32(x)
    with compiling_for(tensor_type.name):
        _compile(plain.type.name, importance is not None)
        refined = None
        if prepared is not None and coupled is not None:
            refined, suspicious = _encode_together(x, plain, importance, prepared, effort, coupled)
            if refined is not None and not suspicious:
                return _packed(refined, plain, n)
        encode_rows = _encode_on_gpu if on_gpu else _encode_checked
        q, changed = encode_rows(x, importance, plain, report)
        if prepared is not None:
            refined = _refine(x, q, plain.type, prepared, effort, device) if refined is None else refined
            q = refined if changed is None else np.where(changed[:, None], q, refined)
        q = _packed(q, plain, n)
    if not on_gpu:
        _used.add(used)
    return q


# (type as it was named, whether with importance) of what this process has encoded: what that takes is compiled.
_used: set[tuple[str, bool]] = set()
_decoded: set[str] = set()  # types as they were named that it has decoded

# Types that were asked for once are found faster.
_find = cache(TYPES.find)


@cache
def _plain_rows(type: str, device: str | None) -> PlainRows:
    return plain_rows(_find(type), device)


def compile_codec(name: str) -> None:
    """Compiles what `encode` and `decode` need for a type, with importance and without. Does nothing for a type that cannot be
    encoded."""
    _try_codec(name, True, encode)
    _try_codec(name, False, encode)


def compile_weighted_codec(name: str) -> None:
    """Compiles a type's codec for rows with importance, without what `encode` needs for rows of any type."""
    _try_codec(name, True, encode_unchecked)


def compile_plain_codec(name: str) -> None:
    """Compiles a type's codec for rows without importance, without what `encode` needs for rows of any type."""
    _try_codec(name, False, encode_unchecked)


def _try_codec(name: str, weighted: bool, encode_rows: Callable[..., np.ndarray]) -> None:
    """Encodes and decodes a few rows."""
    from .codec_kernels import codec_unit

    stored = TYPES[name]
    if can_encode(stored):
        columns = lcm(_COMPILED_COLUMNS, stored.block)
        x = np.random.default_rng(0).standard_normal((stored.rows, columns), np.float32)
        decode(encode_rows(x, name, np.ones(columns, np.float32) if weighted else None), name, columns)
        codec_unit(name, weighted).mark()


@cache
def _compile(name: str, weighted: bool) -> None:
    """Waits for a process that compiles a type's codec, or compiles it, where that fell to this process."""
    from ..simd.compile.background import compiling
    from .codec_kernels import codec_unit

    with compiling(codec_unit(name, weighted)) as falls_here:
        if falls_here:
            _try_codec(name, weighted, encode_unchecked)


def encode_unchecked(x: np.ndarray, type: str, importance: np.ndarray | None = None) -> np.ndarray:
    """Rows as their codec encodes them, float32 [rows, n] -> uint8 [rows, row_bytes]: scales that the type cannot hold are
    clipped or dropped without a word. For caches, where speed matters more. Raises NonFiniteError for NaN or infinity in x."""
    x, plain = np.ascontiguousarray(x, np.float32), _plain_rows(type, None)
    if x.size == 0:
        return np.empty((len(x), plain.target.row_bytes(x.shape[1])), np.uint8)
    with compiling_for(plain.target.name):
        return _packed(plain.encode_with_amax(x, importance)[0], plain, x.shape[1])


def _float32(x: np.ndarray) -> np.ndarray:
    """Of the bits of bf16 numbers; others as they are."""
    return x if x.dtype == np.float32 else bf16_to_f32(x)


def _report_to(report: Report | bool, x: np.ndarray, plain: PlainRows) -> Report | None:
    """What is called with coarse rows of x, float32 or the bits of bf16."""
    if isinstance(report, bool):
        return CoarseRowReport.of_array(_float32(x), plain.target.name) if report else None
    return report


def _encode_on_gpu(
    x: np.ndarray, importance: np.ndarray | None, plain: PlainRows, report: Report | bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """As `_encode_checked`, x being float32 or the bits of bf16; rows that need more than their encoder are the processor's."""
    from .torch_encoders.encode_on_gpu import encode_on_gpu

    assert plain.device is not None
    q, some = encode_on_gpu(x, importance, plain, plain.device)
    if not len(some):
        return q, None
    report_to = _report_to(report, x, plain)
    report_some = report_to is not None and (lambda coarse: report_to(coarse._replace(rows=some[coarse.rows])))
    try:
        q[some], changed_some = _encode_checked(_float32(x[some]), importance, plain, report_some)
    except NonFiniteError as error:
        raise NonFiniteError(int(some[error.row]), error.column, error.value) from None
    if changed_some is None:
        return q, None
    changed = np.zeros(len(q), bool)
    changed[some] = changed_some
    return q, changed


def _encode_checked(
    x: np.ndarray, importance: np.ndarray | None, plain: PlainRows, report: Report | bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """Rows of the plain type by the processor, and which were encoded in another way than usual (bool, None for none)."""
    q, amax, range_ = plain.encode_with_amax(x, importance)
    rows = suspects(x, q, amax, range_, importance is not None, plain)
    if not len(rows):
        return q, None
    with compiling_for(plain.target.name):
        return mended(x, q, rows, importance, plain, _report_to(report, x, plain))


def _packed(q: np.ndarray, plain: PlainRows, n: int) -> np.ndarray:
    return q if plain.type is plain.target else _repack().pack(q, plain.target.name, n)[0]


@cache
def _repack() -> ModuleType:
    """The module of this name: an `import` at each call would take as long as a short row."""
    from .. import repack

    return repack


def _encode_together(
    x: np.ndarray,
    plain: PlainRows,
    importance: np.ndarray | None,
    prepared: PreparedCovariance,
    effort: int,
    coupled: CoupledRows,
) -> tuple[np.ndarray | None, bool]:
    """Rows whose errors are weighed together (None: the type or the covariance does not allow it), and whether there are any
    that have to be looked at by `mended`, which starts from what the type's own encoder makes of them."""
    from .covariance.refine import takes_covariance
    from .covariance.row_feedback import encode_coupled

    if prepared.damped is None or not takes_covariance(plain.type):
        return None, True
    amax, range_ = float_range().finite_amax(x)
    encode_rows = partial(plain.encode, importance=importance)
    given = x, encode_rows, plain.type.name, prepared.damped, effort, coupled
    q = encode_coupled(*given)
    return q, bool(len(suspects(x, q, amax, range_, importance is not None, plain)))


def _refine(
    x: np.ndarray,
    q: np.ndarray,
    codec_type: TensorType,
    prepared: PreparedCovariance,
    effort: int,
    device: str | None,
) -> np.ndarray:
    if is_gpu(device) and layouts.layout_of(codec_type.name).trellis is None:  # whose search is the processor's alone
        from .torch_encoders.gpu_refinement import refine_on_gpu

        assert device is not None
        return refine_on_gpu(x, q, codec_type.name, prepared, effort, device)
    from .covariance.refine import refine

    return refine(x, q, codec_type.name, prepared, effort)


def decode(q: np.ndarray, type: str, n: int) -> np.ndarray:
    """Dequantises rows of a tensor type: uint8 [rows, row_bytes] -> float32 [rows, n].

    n: elements per row. Rows of an interleaved type have to be whole groups. Raises PlanError for an unknown type and for an
    array of another shape.
    """
    tensor_type = _find(type)
    if q.ndim != 2 or q.shape[1] != tensor_type.row_bytes(n) or q.shape[0] % tensor_type.rows:
        raise PlanError(
            f"{tensor_type.name} rows of {n} elements take {tensor_type.row_bytes(n)} bytes each, not an array of {q.shape}"
        )
    if q.size == 0:
        return np.empty((len(q), n), np.float32)
    q = np.ascontiguousarray(q)
    if tensor_type.name in _WHOLE_NUMBERS:
        return q.view(_WHOLE_NUMBERS[tensor_type.name]).astype(np.float32)
    plain = _plain_rows(type, None)
    if type in _decoded:
        return _decode(q, plain, n)
    with compiling_for(tensor_type.name):
        x = _decode(q, plain, n)
    _decoded.add(type)
    return x


def _decode(q: np.ndarray, plain: PlainRows, n: int) -> np.ndarray:
    if plain.type is plain.target:
        return plain.decode(q, n)
    from ..repack import unpack

    return plain.decode(unpack(q, plain.target.name, n)[0], n)
