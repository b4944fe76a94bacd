"""A decoder of all tensor types in plain numpy, written from the description alone: slow, short, the check of all others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .block_bits import BlockBits
from .description import BlockLayout
from .table import layout_of

_STORED = {"f16": np.float16, "f32": np.float32}


def decode(q: np.ndarray, type_name: str, n: int, integer_values: bool = False) -> np.ndarray:
    """uint8 [rows, row_bytes] of a type (any of the table of types) -> float32 [rows, n]; rows are whole groups.

    Bit for bit what `quantize.decode` gives, for the types that it knows. integer_values: with the integers of a layout's
    `values` where decoders take `decoded`, as products of the runtime do. Raises PlanError for rows that are no whole groups of
    n elements.
    """
    layout = layout_of(type_name)
    layout = replace(layout, polynomial=None) if integer_values else layout
    rows = BlockBits.unpack(q, type_name, n)
    with np.errstate(over="ignore", invalid="ignore"):
        weights = _weights(layout, rows)
    return np.ascontiguousarray(weights.transpose(0, 2, 1, 3)).reshape(len(q), n)


def _weights(layout: BlockLayout, rows: BlockBits) -> np.ndarray:
    """float32 [groups, blocks, rows, block]."""

    def per_weight(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, layout.block // values.shape[-1], axis=-1)

    if layout.number is not None:
        return _as_float32(rows.numbers(layout.codes), layout.number, layout.codes.shape[-1])
    scale = per_weight(block_scales(layout, rows) * np.float32(layout.unit))
    if layout.scales is not None and layout.levels is not None:
        scale = scale * per_weight(layout.levels.astype(np.float32)[rows.numbers(layout.scales)])
    weights = scale * signed_values(layout, rows)
    if layout.dmin is not None and layout.minima is not None:
        weights = weights - per_weight(rows.float16s(layout.dmin) * rows.numbers(layout.minima).astype(np.float32))
    if layout.offset is not None:
        weights = weights + per_weight(rows.float16s(layout.offset))
    return weights


def signed_values(layout: BlockLayout, rows: BlockBits) -> np.ndarray:
    """What the scales are multiplied by: (value + shifts[flag]) * sign, float32 [groups, blocks, rows, block]."""
    value = _values(layout, rows)
    if layout.flags is not None:
        shifts = np.array(layout.shifts, np.float32)[rows.numbers(layout.flags)]
        value = value + np.repeat(shifts, layout.block // shifts.shape[-1], axis=-1)
    for negative in _signs(layout, rows):
        value = np.where(np.repeat(negative, layout.block // negative.shape[-1], axis=-1), -value, value)
    return value


def block_scales(layout: BlockLayout, rows: BlockBits) -> np.ndarray:
    """`d`: float32 [groups, blocks or 1, rows, 1]."""
    if layout.row_scale is not None:
        dtype = np.dtype(_STORED[layout.row_scale])
        return np.ascontiguousarray(rows.metas[:, :, : dtype.itemsize]).view(dtype).astype(np.float32)[:, None]
    if layout.d is None:
        return np.ones((1, 1, 1, 1), np.float32)
    stored = rows.numbers(layout.d)
    if layout.d_format == "e8m0":
        return np.ldexp(np.float32(1), (stored - 128).astype(np.int32))
    dtype = np.dtype(_STORED[layout.d_format])
    return stored.astype(f"u{dtype.itemsize}").view(dtype).astype(np.float32)


def _values(layout: BlockLayout, rows: BlockBits) -> np.ndarray:
    """float32 [groups, blocks, rows, block]."""
    if layout.gray_words:
        words = np.packbits(rows.bits, axis=2, bitorder="little").view("<u2") & 0xFFFE
        gray = np.unpackbits((words ^ words >> 1).view(np.uint8), axis=2, bitorder="little")
        codes = (gray[:, :, layout.codes] << np.arange(layout.codes.shape[-1], dtype=np.uint8)).sum(axis=-1)
    else:
        codes = rows.numbers(layout.codes)
    if layout.digits is not None:
        codes = codes * layout.digits % 256 * 3 >> 8
    return layout.decoded_values.astype(np.float32)[codes].reshape(*codes.shape[:-1], layout.block)


def _signs(layout: BlockLayout, rows: BlockBits) -> list[np.ndarray]:
    """Which runs of weights are negated: bool arrays [groups, blocks, rows, n]."""
    signs = [] if layout.signs is None else [rows.numbers(layout.signs) > 0]
    if layout.sign_codes is not None:
        code = rows.numbers(layout.sign_codes)
        if layout.scrambled:
            eight = code ^ code << 1
        else:
            eight = code | np.bitwise_count(code).astype(np.int64) % 2 << 7
        signs.append((eight[..., None] >> np.arange(8) & 1 > 0).reshape(*code.shape[:-1], -1))
    return signs


def _as_float32(stored: np.ndarray, number: str, width: int) -> np.ndarray:
    words = stored.astype(f"u{width // 8}")
    if number == "bf16":
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.view(f"{number[0]}{width // 8}").astype(np.float32)
