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
from ...repack.interleave import type_named
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


# type name in lower case -> the module of its family, which has a dict CODECS of the same names
_FAMILIES = {
    "floats": ("f32", "f16", "bf16"),
    "legacy.symmetric": ("q8_0", "q6_0", "q5_0", "q4_0"),
    "legacy.offset": ("q4_1", "q5_1"),
    "iquants.iq4": ("iq4_nl", "iq4_xs"),
    "kquants.symmetric": ("q3_k", "q6_k"),
    "kquants.offset": ("q2_k", "q4_k", "q5_k"),
    "mxfp4": ("mxfp4",),
    "q8_rows": ("q8_kv", "q8_kv_r8", "q8_k_r8"),
    "ternary": ("iq1_bn", "iq2_bn"),
    "one_bit": ("q1_0_g128",),
    "iquants.iq1": ("iq1_s", "iq1_m", "iq1_s_r4", "iq1_m_r4"),
    "iquants.iq2_iq3": ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"),
    "iqk.iqk": ("iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k", "iq2_ks", "iq3_ks", "iq4_ks", "iq5_ks"),
    "iqk.iq4_kss": ("iq4_kss",),
    "iqk.iq2_kl": ("iq2_kl",),
    "trellis.trellis": ("iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt"),
}

# Packed types whose encoder makes up importance for blocks of this many elements that have none (spec D.0), though
# the encoder of their base type does not: so their bytes are not always those of the packed base type.
_GUARDED = {
    32: ("iq4_nl_r4", "q4_0_r8", "q6_0_r4", "iq4_xs_r8", "q4_k_r4", "q5_k_r4", "iq2_xxs_r4", "iq3_xxs_r4"),
    16: ("q2_k_r4", "q3_k_r4", "q6_k_r4", "iq2_xs_r4", "iq2_s_r4", "iq3_s_r4"),
}
_GUARD_OF = {name: block for block, names in _GUARDED.items() for name in names}
_FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names}


class NonFiniteError(MillError):
    """A weight is NaN or infinite; row and column say where in the array that was to be encoded."""

    def __init__(self, row: int, column: int, value: float):
        super().__init__(f"the weight at row {row}, column {column} is {value}")
        self.row, self.column, self.value = row, column, value


def can_encode(kind: TensorType) -> bool:
    """Whether `encode` and `decode` know this type."""
    return (kind.base or kind.name).lower() in _FAMILY_OF


@cache
def _codec(name: str) -> Codec:
    family = _FAMILY_OF.get(name.lower())
    if family is None:
        raise PlanError(f"tensor type {name} cannot be encoded or decoded yet")
    return import_module(f".{family}", __package__).CODECS[name.lower()]


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
    kind = type_named(type)
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
    kind = type_named(type)
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
    return kind if kind.base is None or kind.name.lower() in _FAMILY_OF else TYPES[kind.base]
