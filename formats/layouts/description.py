"""`BlockLayout`, the description of one tensor type's blocks, and the helpers with which layouts are written down.

A bit address is 8 * byte + bit, counted from the start of a block. A number is an array of bit addresses, its lowest bit first;
n numbers of equal width are an array [n, width]. In a layout as `layout_of` returns it a first axis says which row of an
interleaved group a number belongs to ([rows, n, width]; one row for plain types). Whatever a field describes, its n numbers
divide a block evenly: each goes with `block / n` neighbouring weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property

import numpy as np

from ...data_classes import dataclass
from .tables import Trellis, codebook_values, polynomial_values

SIGNED_BYTES = np.arange(256).astype(np.uint8).view(np.int8).astype(np.int64)  # two's complement: what each byte stands for


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Where the numbers of a block lie, and how they make weights:

        weight = d * level * (value + shifts[flag]) * sign - dmin * minimum + offset

    evaluated in float32, one rounding per operation: (unit * d * level) first, then the product with the value.

    block       weights per block
    codes       bits [block / size, width]: each is the number of an entry of `values`, which holds `size` weights
    table       entries by code, int [entries], or [entries, size] where a code stands for several neighbouring weights
    codebook    the name of the grid in tables.GRIDS whose points the codes number (instead of a table)
    trellis     the generator whose start states the codes are (instead of a table)
    number      the codes are the weights themselves, stored as 'f32', 'f16', 'bf16', 'f64' or 'i8' ... 'i64'
    polynomial  float32 coefficients, the lowest first: decoders use this polynomial of the code, in fused multiply-adds, for
                `values`, where kernels on integers use a rounded table (iq6_k)
    magnitudes  only the magnitudes of the values are used; the signs are stored
    unit        a power of two that every weight is multiplied by, where the values are whole multiples of it
    d           bits [1, 16, 32 or 8] of the block's scale, a d_format: 'f16', 'f32' or 'e8m0' (half of 2^(E - 127))
    row_scale   'f16' or 'f32': d comes once per row, in the bytes that precede its first block (row_meta)
    scales      bits [n, width] of scale codes; levels: what each code stands for
    flags       bits [n, 1]; shifts: what a flag of 0 and one of 1 adds to the values
    dmin        bits of a float16; minima: bits [n, width]: minimum codes, multiples of dmin
    offset      bits of a float16 that is added to all weights of the block
    signs       bits [n, 1]: where one is set, the weights are negated
    sign_codes  bits [block / 8, 7]: the signs of eight weights, of which the eighth makes the number of minus signs even
    scrambled   sign_codes hold u with (u ^ (u << 1)) & 255 == the eight signs
    gray_words  codes are those of x ^ (x >> 1) for each 16-bit word x of the block, its lowest bit cleared (iq4_kss)
    digits      int [block]: codes are base-3 digits: 3 * (digit * byte mod 256) >> 8 with this power of three
    sums        bits that hold sums of other numbers, for activations' products; not needed for decoding
    """

    block: int
    codes: np.ndarray
    table: np.ndarray | None = None
    codebook: str | None = None
    trellis: Trellis | None = None
    number: str | None = None
    polynomial: tuple[float, ...] | None = None
    magnitudes: bool = False
    unit: float = 1.0
    d: np.ndarray | None = None
    d_format: str = "f16"
    row_scale: str | None = None
    scales: np.ndarray | None = None
    levels: np.ndarray | None = None
    flags: np.ndarray | None = None
    shifts: tuple[int, int] = (0, 0)
    dmin: np.ndarray | None = None
    minima: np.ndarray | None = None
    offset: np.ndarray | None = None
    signs: np.ndarray | None = None
    sign_codes: np.ndarray | None = None
    scrambled: bool = False
    gray_words: bool = False
    digits: np.ndarray | None = None
    sums: np.ndarray | None = None

    @cached_property
    def values(self) -> np.ndarray:
        """int64 [entries, size]: the weights that each code stands for, before shift, scale and sign."""
        if self.codebook is not None:
            values = codebook_values(self.codebook)
        elif self.trellis is not None:
            values = self.trellis.values(self.codes.shape[-1])
        else:
            assert self.table is not None, "numbers have no table"
            values = self.table.reshape(len(self.table), -1)
        return np.abs(values).astype(np.int64) if self.magnitudes else values.astype(np.int64)

    @cached_property
    def decoded(self) -> np.ndarray | None:
        """float32 [entries]: the polynomial of each code."""
        return None if self.polynomial is None else polynomial_values(self.polynomial, len(self.values))

    @property
    def decoded_values(self) -> np.ndarray:
        """[entries, size]: what decoders use for `values`."""
        return self.values if self.decoded is None else self.decoded[:, None]

    @property
    def size(self) -> int:
        """Weights per code."""
        return self.block // self.codes.shape[-2]

    @property
    def group(self) -> int:
        """Weights per scale code; a block without scale codes is taken in groups of 32."""
        return min(32, self.block) if self.scales is None else self.block // self.scales.shape[-2]

    def bit_arrays(self) -> dict[str, np.ndarray]:
        """The fields that hold bit addresses, by name."""
        return {name: bits for name in BIT_FIELDS if (bits := getattr(self, name)) is not None}

    def moved(self, move: Callable[[np.ndarray], np.ndarray]) -> BlockLayout:
        """The same layout with other bit addresses: `move` takes and gives an array of them."""
        return replace(self, **{name: move(bits) for name, bits in self.bit_arrays().items()})


BIT_FIELDS = tuple(
    f.name
    for f in fields(BlockLayout)
    if f.name in {"codes", "d", "scales", "flags", "dmin", "minima", "offset", "signs", "sign_codes", "sums"}
)


# --- arrays of bit addresses ------------------------------------------------------------------------------------------


def consecutive(byte: int, count: int, width: int = 8) -> np.ndarray:
    """`count` numbers of `width` bits, one after the other from a byte on."""
    return (8 * byte + width * np.arange(count))[:, None] + np.arange(width)


def strided(byte: int, stride: int, width: int, areas: int = 1) -> np.ndarray:
    """Numbers of `width` bits that fill `areas` areas of `stride` bytes from a byte on. In an area the lowest bits of all bytes
    come first, then the next higher bits of all bytes, and so on."""
    per_area = stride * 8 // width
    s = np.arange(per_area * areas)
    address = 8 * (byte + s // per_area * stride + s % stride) + s % per_area // stride * width
    return address[:, None] + np.arange(width)


def records(byte: int, record_bytes: int, count: int, first_bits: tuple[int, ...], width: int) -> np.ndarray:
    """In each of `count` records of equal size, the numbers of `width` bits that begin at the record's bits `first_bits`."""
    starts = 8 * (byte + record_bytes * np.arange(count))[:, None] + np.array(first_bits)
    return starts.reshape(-1, 1) + np.arange(width)


def high_bits(low: np.ndarray, *higher: np.ndarray) -> np.ndarray:
    """Numbers put together from their low bits and, one array after the other, their higher ones."""
    return np.concatenate([low, *higher], axis=1)


def float16_at(byte: int) -> np.ndarray:
    """The 16 bits of one number from a byte on."""
    return consecutive(byte, 1, 16)


# --- tables of what codes stand for ----------------------------------------------------------------------------------------


def linear(width: int, first: int = 0, step: int = 1) -> np.ndarray:
    """int [2^width]: first, first + step, ..."""
    return first + step * np.arange(1 << width)
