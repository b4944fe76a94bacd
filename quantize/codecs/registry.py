"""Encoding and decoding rows of any type: the registry of codec modules, one per family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

import numpy as np

from ...formats import TYPES, MillError, PlanError, TensorType
from ...formats.floats import all_finite
from ...repack import pack, unpack
from .importance import guarded

_LINE = 64  # bytes


@dataclass(frozen=True)
class Codec:
    """encode: (float32 [rows, n], importance) -> uint8 [rows, row_bytes]; decode: (that, n) -> float32 [rows, n].

    Importance is None, float32 [n] for all rows alike, or [rows, n]. Both take and give C-contiguous arrays; encode sees finite
    values and at least one row. An interleaved type with a base needs no codec: `pack` makes it from its base. One without
    (q8_k_r8), or for which that would take longer than encoding (q8_KV_r8), has its own, which is given whole groups of rows.
    """

    encode: Callable[[np.ndarray, np.ndarray | None], np.ndarray]
    decode: Callable[[np.ndarray, int], np.ndarray]
    looks: bool = False  # encode may be given what is not finite and calls `refuse_nonfinite` itself: it looks at x once less


def new_rows(rows: int, n: int) -> np.ndarray:
    """float32 [rows, n] with any contents, from the start of a cache line on: vector stores across two lines are slow."""
    whole = np.empty(rows * n + _LINE // 4, np.float32)
    start = -whole.ctypes.data % _LINE // 4
    return whole[start : start + rows * n].reshape(rows, n)


def decoder(run: Callable[..., None], *arguments: Any) -> Callable[[np.ndarray, int], np.ndarray]:
    """`decode` of a codec whose kernel takes all bytes of the rows and fills in all elements: run(q, *arguments, out), with q
    uint8 [bytes], read-only so that the kernel has a single signature, and out float32 [elements]."""

    def decode(q: np.ndarray, n: int) -> np.ndarray:
        bytes_ = q.reshape(-1).view()
        bytes_.flags.writeable = False
        out = new_rows(len(q), n)
        run(bytes_, *arguments, out.reshape(-1))
        return out

    return decode


# Packed types whose encoder makes up importance for blocks of this many elements that have none (spec D.0), though
# the encoder of their base type does not: so their bytes are not always those of the packed base type.
_GUARDED = {
    32: ("iq4_nl_r4", "q4_0_r8", "q6_0_r4", "iq4_xs_r8", "q4_k_r4", "q5_k_r4", "iq2_xxs_r4", "iq3_xxs_r4"),
    16: ("q2_k_r4", "q3_k_r4", "q6_k_r4", "iq2_xs_r4", "iq2_s_r4", "iq3_s_r4"),
}
_GUARD_OF = {name: block for block, names in _GUARDED.items() for name in names}


class NonFiniteError(MillError):
    """A weight is NaN or infinite; row and column say where in the array that was to be encoded."""

    def __init__(self, row: int, column: int, value: float):
        super().__init__(f"the weight at row {row}, column {column} is {value}")
        self.row, self.column, self.value = row, column, value


def can_encode(kind: TensorType) -> bool:
    """Whether `encode` and `decode` know this type."""
    return kind.has_codec


@cache
def _codec(name: str) -> Codec:
    module = TYPES[name].codec
    if module is None:
        raise PlanError(f"tensor type {name} cannot be encoded or decoded yet")
    return import_module(f".{module}", __package__).CODECS[name.lower()]


def refuse_nonfinite(x: np.ndarray) -> NoReturn:
    """Raises NonFiniteError for the first number of [rows, columns] that is NaN or infinite; there has to be one."""
    row, column = map(int, np.argwhere(~np.isfinite(x))[0])
    raise NonFiniteError(row, column, float(x[row, column]))


def encode(x: np.ndarray, type: str, importance: np.ndarray | None = None) -> np.ndarray:
    """float32 [rows, n] -> uint8 [rows, row_bytes] of the named type, repacked types included.

    importance: float32 [n], the weight of each column's squared error; None for none. Raises PlanError for an unknown type, a
    row length or row count that it cannot hold, or importance of another width or that is no weight (negative, not finite);
    NonFiniteError for NaN or infinity in x.
    """
    kind = TYPES.find(type)
    x = np.ascontiguousarray(x, np.float32)
    if x.ndim != 2:
        raise PlanError(f"encode takes an array of [rows, columns], not of {x.ndim} dimensions")
    rows, n = x.shape
    kind.row_bytes(n)
    if rows % kind.rows:
        raise PlanError(f"{kind.name} interleaves {kind.rows} rows; {rows} rows are no multiple of it")
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
        if importance.shape != (n,):
            raise PlanError(f"importance of shape {importance.shape} does not fit rows of {n} elements")
        if not (all_finite(importance, "f32") and importance.min(initial=0) >= 0):
            raise PlanError("importance has entries that are negative, infinite or NaN: collect the imatrix again")
    base = _with_codec(kind)
    codec = _codec(base.name)
    if not codec.looks and not all_finite(x, "f32"):
        refuse_nonfinite(x)
    if x.size == 0:
        return np.empty((rows, kind.row_bytes(n)), np.uint8)
    if importance is not None and kind.name.lower() in _GUARD_OF:
        importance = guarded(x, importance, _GUARD_OF[kind.name.lower()])
    q = codec.encode(x, importance)
    return q if base is kind else pack(q, kind.name, n)[0]


def decode(q: np.ndarray, type: str, n: int) -> np.ndarray:
    """uint8 [rows, row_bytes] -> float32 [rows, n]; for a repacked type rows have to be whole groups. Raises PlanError."""
    kind = TYPES.find(type)
    if q.ndim != 2 or q.shape[1] != kind.row_bytes(n) or q.shape[0] % kind.rows:
        raise PlanError(f"{kind.name} rows of {n} elements take {kind.row_bytes(n)} bytes each, not an array of {q.shape}")
    if q.size == 0:
        return np.empty((len(q), n), np.float32)
    q = np.ascontiguousarray(q)
    base = _with_codec(kind)
    if base is not kind:
        q, _ = unpack(q, kind.name, n)
    return _codec(base.name).decode(q, n)


def _with_codec(kind: TensorType) -> TensorType:
    """The type itself if it has a codec or is plain, else the plain type whose bits it permutes."""
    return kind if kind.base is None or kind.codec is not None else TYPES[kind.base]
