"""pack and unpack: rows of a plain type to groups of interleaved rows, and back. Bits change places; nothing is decoded."""

from __future__ import annotations

import numpy as np

from ..formats import TYPES, PlanError, TensorType
from .bit_permutation import Side, move
from .compile_layout import block_bytes, programs


def pack(q: np.ndarray, type: str, n: int) -> tuple[np.ndarray, str]:
    """Rows of a plain type -> the same weights interleaved (layouts: FORMATS C.2).

    q: uint8 [rows, row_bytes] of the plain type; type: its name, or that of the packed type to make where there are several
    (q4_0_4x4); n: elements per row. Returns uint8 [rows, row_bytes of the packed type], where the bytes of each group of rows
    lie side by side, and the packed type's name. Raises PlanError for a type without a repacked form, for rows that are no
    whole groups, and for a width that is not the type's.
    """
    packed = type_named(type)
    if packed.base is None:
        if packed.packed is None:
            raise PlanError(f"no repacked form of {packed.name}")
        packed = TYPES[packed.packed]
    base = TYPES[str(packed.base)]
    q = _checked(q, base, packed, n)
    out = np.empty((q.shape[0], packed.row_bytes(n)), np.uint8)
    move(programs(packed.name)[0], Side(q, 1, base.row_meta), _packed_side(out, packed), block_bytes(packed))
    # q8_KV has a second row scale, the sum of its quants, which its packed form does without.
    metas = _group_metas(out, packed)
    metas[:] = q[:, : packed.row_meta].reshape(metas.shape)
    return out, packed.name


def unpack(q: np.ndarray, type: str, n: int) -> tuple[np.ndarray, str]:
    """Interleaved rows -> rows of the plain type: the inverse of `pack`.

    q: uint8 [rows, row_bytes] of the packed type `type`, whole groups of rows; n: elements per row. Returns uint8 [rows,
    row_bytes of the base type] and the base type's name. Raises PlanError as `pack` does.
    """
    packed = type_named(type)
    if packed.base is None:
        raise PlanError(f"no plain form of {packed.name}")
    base = TYPES[packed.base]
    q = _checked(q, packed, packed, n)
    out = np.empty((q.shape[0], base.row_bytes(n)), np.uint8)
    move(programs(packed.name)[1], _packed_side(q, packed), Side(out, 1, base.row_meta), block_bytes(packed))
    out[:, : packed.row_meta] = _group_metas(q, packed).reshape(q.shape[0], packed.row_meta)
    if base.row_meta > packed.row_meta:
        sums = out[:, base.row_meta :].view(np.int8).sum(axis=1, dtype="<i4")
        out[:, packed.row_meta : base.row_meta] = sums[:, None].view(np.uint8)
    return out, base.name


def obstacle(packed: TensorType, shape: tuple[int, ...]) -> str:
    """Why a tensor of this shape (ne order) cannot be packed to this type; '' if it can."""
    columns, rows = shape[0], shape[1] if len(shape) > 1 else 1
    if rows % packed.rows:
        return f"{packed.name} interleaves {packed.rows} rows; {rows} rows are no multiple of it"
    if (packed.row_bytes(columns) - packed.row_meta) % block_bytes(packed):
        return f"{packed.name} needs rows of an even number of elements, not {columns}"
    return ""


def _packed_side(rows: np.ndarray, packed: TensorType) -> Side:
    return Side(rows, packed.rows, packed.row_meta)


def _group_metas(rows: np.ndarray, packed: TensorType) -> np.ndarray:
    """View [groups, rows of a group * row_meta] of the row scales, which lie at the head of each group."""
    groups = rows.reshape(rows.shape[0] // packed.rows, packed.rows * rows.shape[1])
    return groups[:, : packed.rows * packed.row_meta]


def type_named(name: str) -> TensorType:
    """Raises PlanError for a name that no type has."""
    if name not in TYPES:
        raise PlanError(f"unknown tensor type {name!r}")
    return TYPES[name]


def _checked(q: np.ndarray, kind: TensorType, packed: TensorType, n: int) -> np.ndarray:
    """q, C-contiguous, if it is whole groups of rows of `kind`; raises PlanError otherwise."""
    row_bytes = kind.row_bytes(n)
    if q.dtype != np.uint8 or q.ndim != 2 or q.shape[1] != row_bytes:
        raise PlanError(f"{kind.name} rows of {n} elements take {row_bytes} bytes each, not an array of {q.dtype} {q.shape}")
    reason = obstacle(packed, (n, q.shape[0]))
    if reason:
        raise PlanError(reason)
    return np.ascontiguousarray(q)
