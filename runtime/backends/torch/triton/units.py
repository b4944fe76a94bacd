"""Where the weights of a type lie in *units*: pieces of a block of a few neighbouring words of 32 bits of codes, with all
weights whose codes are there.

Every address in a unit is its place in the first unit plus what depends on the unit alone; so in a kernel, whose threads take a
unit each, words are loaded whole, shifts and masks are constants, and what a run of weights shares is read once.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np

from .....data_classes import dataclass
from .....formats import TYPES
from .....formats.layouts import layout_of
from .block_format import Digit, block_format, digits_of


class _NoUnits(Exception):
    """Weights that do not lie as units need it."""


@dataclass(frozen=True)
class UnitBits:
    """Neighbouring bits of numbers of a unit, which go to bit `up` of the numbers.

    They begin at the bits `offsets` of (what is at `byte` + sum of `bytes`) >> sum of `shifts`, both sums over digits of the
    unit's number; most: the greatest shift.
    """

    byte: int
    bytes: tuple[Digit, ...]
    shifts: tuple[Digit, ...]
    most: int
    offsets: tuple[int, ...]
    width: int
    up: int


@dataclass(frozen=True)
class Units:
    """count     units per block; aligned: bytes, of which the addresses of all blocks are a multiple
    first, base  the weight that a unit's places count from: a number, and a sum over digits of the unit
    places       of the weights of a unit, in the order of codes; runs: the run of `BlockFormat.run` weights of each
    fields       codes, sign_codes (of each eight weights), scales, minima, flags (of each run), signs (of each run or weight)
    """

    count: int
    aligned: int
    first: int
    base: tuple[Digit, ...]
    places: tuple[int, ...]
    runs: tuple[int, ...]
    fields: dict[str, tuple[UnitBits, ...]]


@cache
def units_of(type_name: str, words: int) -> Units | None:
    """Units of so many words of a tensor type; None for types that have none: interleaved rows, and where addresses are no sums
    of a unit's and a number's part, or tables of several weights not of bytes."""
    kind, layout, form = TYPES[type_name], layout_of(type_name), block_format(type_name)
    if (
        form is None
        or kind.rows > 1
        or form.gray_words
        or (form.size > 1 and (form.size % 4 or not _bytes(layout.decoded_values)))
    ):
        return None
    arrays = {name: bits[0].astype(np.int64) for name, bits in layout.bit_arrays().items()}
    codes = arrays["codes"]
    main = max(_pieces(codes[None]), key=lambda piece: piece.stop - piece.start)  # what is taken word by word
    begin = codes[:, main.start]
    unit = (begin - begin.min()) // (32 * words)
    count = int(unit.max()) + 1
    numbers = np.lexsort((begin, unit))
    if begin.min() % 8 or np.any(np.bincount(unit) * count != len(numbers)):
        return None
    aligned = int(np.gcd.reduce([4, form.block_bytes, form.meta_bytes]))
    numbers = numbers.reshape(count, -1)
    weights = (numbers[:, :, None] * form.size + np.arange(form.size)).reshape(count, -1)
    try:
        first, base, places = _separated(weights)
        _, _, runs = _separated(weights // form.run)
        fields = {"codes": _bits(codes[numbers], aligned)}
        signs_of_runs = form.signs.count * form.run <= form.block
        for name, members in (("signs", weights), ("sign_codes", weights[:, ::8])):
            if name in arrays and not (name == "signs" and signs_of_runs):
                if form.flags.count:
                    return None  # what flags add would have signs, too
                fields[name] = _bits(arrays[name][members * len(arrays[name]) // form.block], aligned)
        of_runs = (weights // form.run).min(axis=1)[:, None] + np.unique(runs)
        for name in ("scales", "minima", "flags", "signs"):
            if name in arrays and name not in fields:
                fields[name] = _bits(arrays[name][of_runs * form.run * len(arrays[name]) // form.block], aligned)
    except _NoUnits:
        return None
    return Units(count, aligned, first, base, places, runs, fields)


def _bytes(values: np.ndarray) -> bool:
    """Whether values are whole numbers -128 ... 127."""
    return bool(np.all((values == np.round(values)) & (abs(values + 0.5) < 128)))


def _separated(numbers: np.ndarray) -> tuple[int, tuple[Digit, ...], tuple[int, ...]]:
    """[units, n] as first + sum over digits of the unit + offsets[n], the smallest of which is 0."""
    least = numbers.min(axis=1)
    offsets, digits = numbers[0] - least[0], digits_of(least)
    if digits is None or np.any(numbers != least[:, None] + offsets) or any(step < 0 for _, _, step in digits):
        raise _NoUnits
    return int(least[0]), digits, tuple(offsets.tolist())


def _pieces(addresses: np.ndarray) -> list[slice]:
    """Bits [units, n, width] that are neighbours in every number."""
    breaks = (np.diff(addresses, axis=-1) != 1).any(axis=(0, 1))
    cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), addresses.shape[-1]]
    return [slice(*pair) for pair in pairwise(cuts)]


def _bits(addresses: np.ndarray, aligned: int) -> tuple[UnitBits, ...]:
    """Bit addresses [units, n, width]. A shift that depends on the unit is one of a whole aligned word where that has all
    bits."""
    found = []
    for piece in _pieces(addresses):
        first, digits, offsets = _separated(addresses[:, :, piece.start])
        width = piece.stop - piece.start
        for word in (32, 16, 8):
            shifts = tuple((low, size, step % word) for low, size, step in digits if step % word)
            most, bit = sum((size - 1) * step for _, size, step in shifts), first % word
            if aligned % (word // 8) == 0 and (not shifts or most + bit + max(offsets) + width <= word):
                break
        places = tuple(bit + offset for offset in offsets)
        if most + bit >= word or any(place % 32 + width + most > 32 for place in places):
            raise _NoUnits
        steps = tuple((low, size, step // word * word // 8) for low, size, step in digits if step >= word)
        found.append(UnitBits(first // word * word // 8, steps, shifts, most, places, width, piece.start))
    return tuple(found)
