"""Block layouts as the kernels take them: tuples of whole numbers, known when a kernel is compiled.

A bit address of a layout is a sum over the bits of the number's index in nearly every type (`strided`, `consecutive`, the
places of interleaved rows). Such an address needs no table: bits of the index that count up are one digit,
(index >> low) % size * step.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import numpy as np

from .....data_classes import dataclass
from .....formats import TYPES
from .....formats.layouts import layout_of
from .....formats.layouts.byte_parts import StraightLine, byte_parts, straight_line

RUN = 32  # weights, at most, whose scales a kernel takes from one place

Digit = tuple[int, int, int]  # (lowest bit of the index, size, step)


@dataclass(frozen=True)
class ByteBits:
    """Bits of a number that lie in one byte: `(bytes[byte] >> shift & mask) << up`.

    aligned  shift is the same for all numbers, and byte = first + sum of digits; otherwise 8 * byte + shift is that sum
    """

    first: int
    digits: tuple[Digit, ...]
    aligned: bool
    shift: int
    mask: int
    up: int


@dataclass(frozen=True)
class BlockField:
    """`count` numbers per row of a block; number n of row r has the index r * count + n."""

    count: int
    parts: tuple[ByteBits, ...]


@dataclass(frozen=True, eq=False)
class BlockFormat:
    """What the kernels know of a tensor type, of which there is one for each: launches compare them by identity. Fields that a
    type lacks have a count of 0.

    rows        interleaved rows; block: weights per block and row; block_bytes: of all rows; meta_bytes: before the first block
    run         weights that take all scale-like numbers from one place
    size        weights per code; values, levels: what codes and scale codes stand for
    d_format    'f16', 'f32', 'e8m0' or '' for none; d_in_meta: d is one number per row, before its blocks
    shifts      added to values where the flag is 0 and where it is 1
    unit        a factor of all scales
    scrambled   how the seven bits of a sign code give eight signs
    gray_words  codes are those of x ^ (x >> 1) for each word x of 16 bits, its lowest bit cleared
    """

    rows: int
    block: int
    block_bytes: int
    meta_bytes: int
    run: int
    size: int
    values: StraightLine
    levels: StraightLine
    d_format: str
    d_in_meta: bool
    shifts: tuple[int, int]
    unit: float
    scrambled: bool
    gray_words: bool
    codes: BlockField
    d: BlockField
    scales: BlockField
    flags: BlockField
    dmin: BlockField
    minima: BlockField
    offset: BlockField
    signs: BlockField
    sign_codes: BlockField


_NONE = BlockField(0, ())
_FIELDS = tuple(f.name for f in fields(BlockFormat) if f.type == BlockField.__name__)


@cache
def block_format(type_name: str) -> BlockFormat | None:
    """The format of a tensor type (any letter case); None for those that the kernels do not read: plain numbers, which need no
    decoding, and base-3 digits."""
    kind, layout = TYPES[type_name], layout_of(type_name)
    if layout.number is not None or layout.digits is not None:
        return None
    arrays = layout.bit_arrays()
    if layout.row_scale is not None:
        width = 16 if layout.row_scale == "f16" else 32
        arrays["d"] = (8 * kind.row_meta * np.arange(kind.rows))[:, None, None] + np.arange(width)
    found = {name: field_of(arrays[name]) if name in arrays else _NONE for name in _FIELDS}
    if None in found.values():
        return None
    scalars = [arrays[name].shape[1] for name in ("scales", "flags", "minima", "signs", "offset") if name in arrays]
    run = min([RUN, layout.block, *(layout.block // count for count in scalars if count < layout.block)])
    return BlockFormat(
        kind.rows,
        layout.block,
        kind.rows * (kind.row_bytes(layout.block) - kind.row_meta),
        kind.rows * kind.row_meta,
        run,
        layout.size,
        straight_line(layout.decoded_values),
        straight_line(layout.levels) if layout.levels is not None else StraightLine(0, 0, 0),
        (layout.row_scale or (layout.d_format if layout.d is not None else "")),
        layout.row_scale is not None,
        (int(layout.shifts[0]), int(layout.shifts[1])),
        float(layout.unit),
        layout.scrambled,
        layout.gray_words,
        **found,  # type: ignore[arg-type]
    )


def field_of(addresses: np.ndarray) -> BlockField | None:
    """Bit addresses [rows, n, width] as a field; None where they are no sums over the bits of the index."""
    parts = []
    for part in byte_parts(addresses):
        byte, shift, mask = (a.reshape(-1).astype(np.int64) for a in (part.byte, part.shift, part.mask))
        aligned = not np.any(shift != shift[0])
        numbers = byte if aligned else 8 * byte + shift
        digits = digits_of(numbers)
        if digits is None or np.any(mask != mask[0]):
            return None
        parts.append(ByteBits(int(numbers[0]), digits, aligned, int(shift[0]), int(mask[0]), part.up))
    return BlockField(addresses.shape[1], tuple(parts))


def digits_of(numbers: np.ndarray) -> tuple[Digit, ...] | None:
    """numbers[i] - numbers[0] as a sum over the bits of i, neighbouring bits that count up joined; None if it is none."""
    bits = (len(numbers) - 1).bit_length()
    index = np.arange(len(numbers))
    steps = [int(numbers[1 << bit] - numbers[0]) for bit in range(bits)]
    if len(numbers) != 1 << bits or np.any(
        numbers != numbers[0] + sum((index >> b & 1) * step for b, step in enumerate(steps))
    ):
        return None
    digits: list[Digit] = []
    for bit, step in enumerate(steps):
        low, size, first = digits[-1] if digits else (0, 0, 0)
        if step and digits and low + size.bit_length() - 1 == bit and step == first * size:
            digits[-1] = low, 2 * size, first
        elif step:
            digits.append((bit, 2, step))
    return tuple(digits)
