"""pack and unpack: rows of a plain type to groups of interleaved rows, and back. Bits are permuted; nothing is decoded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import numpy as np

from ..formats import TYPES, PlanError, TensorType
from ..simd.compile import import_kernels
from .bit_permutation import BitPermutation, BlockRows
from .compile_layout import block_bytes, permutations

ReadRows = Callable[[int, int], np.ndarray]  # (first row, row after the last) -> uint8 [rows, row_bytes]


def pack(q: np.ndarray, type: str, n: int) -> tuple[np.ndarray, str]:
    """Rows of a plain type -> the same weights interleaved (layouts: `docs/formats/interleaved.md`).

    q: uint8 [rows, row_bytes] of the plain type; type: its name, or that of the interleaved type to make where there are
    several (q4_0_4x4); n: elements per row. Returns uint8 [rows, row_bytes of the interleaved type], in which the bytes of each
    group of rows follow one another, and the interleaved type's name. Raises PlanError for a type without an interleaved form,
    for a number of rows that is no multiple of the group, and for rows whose bytes do not fit n.
    """
    base, packed = _packed_types(type)
    q = _checked(q, base, packed, n)
    out = np.empty((q.shape[0], packed.row_bytes(n)), np.uint8)
    source, target = BlockRows(q, 1, base.row_meta), BlockRows(out, packed.rows, packed.row_meta)
    _permute(permutations(packed.name)[0], source, target, block_bytes(packed))
    if packed.row_meta:  # that of q8_KV also holds the sum of the row's codes, which that of q8_KV_r8 leaves out
        metas = _group_metas(out, packed)
        metas[:] = q[:, : packed.row_meta].reshape(metas.shape)
    return out, packed.name


@cache
def _packed_types(name: str) -> tuple[TensorType, TensorType]:
    """The plain and the interleaved type of either's name. Raises PlanError."""
    packed = TYPES.find(name)
    if packed.base is None:
        if packed.packed is None:
            raise PlanError(f"no repacked form of {packed.name}")
        packed = TYPES[packed.packed]
    return TYPES[str(packed.base)], packed


def unpack(q: np.ndarray, type: str, n: int) -> tuple[np.ndarray, str]:
    """Interleaved rows -> rows of the plain type: the inverse of `pack`.

    q: uint8 [rows, row_bytes] of the interleaved type `type`, complete groups of rows; n: elements per row. Returns
    uint8 [rows, row_bytes of the plain type] and the plain type's name. Raises PlanError as `pack` does.
    """
    packed = TYPES.find(type)
    if packed.base is None:
        raise PlanError(f"no plain form of {packed.name}")
    base = TYPES[packed.base]
    q = _checked(q, packed, packed, n)
    out = np.empty((q.shape[0], base.row_bytes(n)), np.uint8)
    source, target = BlockRows(q, packed.rows, packed.row_meta), BlockRows(out, 1, base.row_meta)
    _permute(permutations(packed.name)[1], source, target, block_bytes(packed))
    if packed.row_meta:
        out[:, : packed.row_meta] = _group_metas(q, packed).reshape(q.shape[0], packed.row_meta)
    if base.row_meta > packed.row_meta:
        sums = out[:, base.row_meta :].view(np.int8).sum(axis=1, dtype="<i4")
        out[:, packed.row_meta : base.row_meta] = sums[:, None].view(np.uint8)
    return out, base.name


def repacked_rows(read: ReadRows, stored: TensorType, target: TensorType, n: int) -> ReadRows | None:
    """A function that reads rows as bytes of `target`, from `read`, which reads them as bytes of `stored`; n: elements per row.

    A copy if the types are equal, a permutation of bits between a type and the interleaved one of the same bits; None if they
    are neither and rows have to be decoded and encoded.
    """
    if stored is target:
        return read
    if target.base == stored.name:
        return lambda start, stop: pack(read(start, stop), target.name, n)[0]
    if stored.base != target.name:
        return None

    def read_plain(start: int, stop: int) -> np.ndarray:
        # The rows may begin or end inside a group: complete groups are read and cut.
        first, last = start // stored.rows * stored.rows, -(-stop // stored.rows) * stored.rows
        return unpack(read(first, last), stored.name, n)[0][start - first : stop - first]

    return read_plain


def packing_obstacle(packed: TensorType, shape: tuple[int, ...]) -> str:
    """Why a tensor of this shape (ne order) cannot be stored in this interleaved type; '' if it can."""
    columns, rows = shape[0], shape[1] if len(shape) > 1 else 1
    if rows % packed.rows:
        return f"{packed.name} interleaves {packed.rows} rows; {rows} rows are no multiple of it"
    if (packed.row_bytes(columns) - packed.row_meta) % block_bytes(packed):
        return f"{packed.name} needs rows of an even number of elements, not {columns}"
    return ""


def _group_metas(rows: np.ndarray, packed: TensorType) -> np.ndarray:
    """View uint8 [groups, rows of a group * row_meta] of the row metas, which lie at the beginning of each group."""
    groups = rows.reshape(rows.shape[0] // packed.rows, packed.rows * rows.shape[1])
    return groups[:, : packed.rows * packed.row_meta]


def _checked(q: np.ndarray, stored: TensorType, packed: TensorType, n: int) -> np.ndarray:
    """q, C-contiguous, if it holds rows of `stored` that make complete groups of `packed`; raises PlanError otherwise."""
    row_bytes = stored.row_bytes(n)
    if q.dtype != np.uint8 or q.ndim != 2 or q.shape[1] != row_bytes:
        raise PlanError(f"{stored.name} rows of {n} elements take {row_bytes} bytes each, not an array of {q.dtype} {q.shape}")
    obstacle = packing_obstacle(packed, (n, q.shape[0]))
    if obstacle:
        raise PlanError(obstacle)
    return np.ascontiguousarray(q)


def _permute(permutation: BitPermutation, source: BlockRows, target: BlockRows, block_bytes: int) -> None:
    _permutation_kernels().permute(permutation, source, target, block_bytes)


@cache
def _permutation_kernels() -> ModuleType:
    """Imported when first needed: numba takes longer to import than a small job to plan."""
    return import_kernels(".permute", __package__)
