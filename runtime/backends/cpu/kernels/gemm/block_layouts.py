"""Where the codes and scales of a block lie, as data: for every type whose weights are scale * (number - zero) + term.

A number is a code, or the entry of a table at that code, perhaps shifted by a constant where the group's flag is set. Places
are addresses of bits (8 * byte + bit) in a block of one row, arrays [numbers, width], lowest bit first. An interleaved type has
no entry: its places follow from its base's through the layout that repacking uses. Source: FORMATS, parts B and C.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from ......formats import TYPES, TensorType
from ......quantize.codecs.iqk import value_tables as iqk_tables
from ......repack.layouts import LAYOUTS, slots, string, wide


@dataclass(frozen=True)
class Kind:
    """A plain type. Places are of one row's block; those of flags, signs, scales and terms have a number per group.

    group   columns that share a scale: 16 or 32 (of a longer block the scale is repeated)
    zero    the number that stands for 0, after the table; a power of two
    table   whole numbers by code, zero not yet added; None: the code itself
    flags   where one is set, `shift` is added to the group's numbers
    scales  codes of the group's level: code * times + plus, negated where a sign is set; signed: int8. None: all levels are 1
    terms   codes of what is subtracted, times m
    d, m    byte offsets of the float that levels are multiplied with, and of that of the terms (with no terms: it is the term)
    number  how d is stored: 'f16', 'f32' or 'e8m0' (half a power of two)
    meta    d comes once per row before the blocks, there at byte offset d
    int8    the codes are signed bytes
    """

    codes: np.ndarray
    group: int
    zero: int = 0
    table: tuple[int, ...] | None = None
    flags: np.ndarray | None = None
    shift: int = 0
    scales: np.ndarray | None = None
    times: int = 1
    plus: int = 0
    signed: bool = False
    signs: np.ndarray | None = None
    terms: np.ndarray | None = None
    d: int = 0
    m: int | None = None
    number: str = "f16"
    meta: bool = False
    int8: bool = False


@dataclass(frozen=True)
class Places:
    """Bits of every row of a group in its interleaved block: as in Kind, the row as first axis; d, m: byte offsets [rows]."""

    codes: np.ndarray
    flags: np.ndarray | None
    scales: np.ndarray | None
    signs: np.ndarray | None
    terms: np.ndarray | None
    d: np.ndarray
    m: np.ndarray | None


def _table(name: str) -> tuple[int, ...]:
    return tuple(int(value) for value in getattr(iqk_tables, name)[0])


def _bit_plane(offset: int) -> np.ndarray:
    return slots(offset, 32, 1)


def _pair_plane(offset: int) -> np.ndarray:
    return slots(offset, 32, 2, 2)


def _narrow_nibbles(offset: int) -> np.ndarray:
    return slots(offset, 16, 4, 8)


def _wide_nibbles(offset: int) -> np.ndarray:
    return slots(offset, 32, 4, 4)


_E = np.arange(32)
_Q6_0_HIGH = (8 * (2 + _E % 8) + 4 * (_E % 16 // 8) + 2 * (_E // 16))[:, None] + np.arange(2)

# q4_K, q5_K: eight scales and eight mins of six bits in 12 bytes.
_S = 8 * (4 + np.arange(12))[:, None]
_K_SCALES = wide(
    np.concatenate([_S[0:4] + np.arange(4), _S[8:12] + np.arange(4)]),
    np.concatenate([_S[0:4] + np.arange(4, 6), _S[0:4] + np.arange(6, 8)]),
)
_K_MINS = wide(
    np.concatenate([_S[4:8] + np.arange(4), _S[8:12] + np.arange(4, 8)]),
    np.concatenate([_S[4:8] + np.arange(4, 6), _S[4:8] + np.arange(6, 8)]),
)
_K = {"scales": _K_SCALES, "terms": _K_MINS, "m": 2}
_V2, _V3, _V4, _V5, _V6 = (_table(name) for name in ("V2", "V3", "V4", "V5", "V6"))
_EXTRA = string(2, 16, 1)
_SIX_BIT = {"scales": wide(string(8, 16, 4), string(4, 16, 2)), "plus": -32, "flags": _EXTRA}
_BYTE = string(0, 8)
_ODD_BYTE = {"scales": _BYTE[:, 1:], "times": 2, "plus": -127, "flags": _BYTE[:, :1], "number": "f32", "meta": True}
_ROW = {"number": "f32", "meta": True}

KINDS: dict[str, Kind] = {
    "q4_0": Kind(slots(2, 16, 4), 32, 8),
    "q4_1": Kind(slots(4, 16, 4), 32, m=2),
    "q5_0": Kind(wide(slots(6, 16, 4), string(2, 32, 1)), 32, 16),
    "q5_1": Kind(wide(slots(8, 16, 4), string(4, 32, 1)), 32, m=2),
    "q6_0": Kind(wide(slots(10, 16, 4), _Q6_0_HIGH), 32, 32),
    "q8_0": Kind(string(2, 32), 32, 128, int8=True),
    "q8_KV": Kind(string(0, 32), 32, 128, int8=True, **_ROW),
    "iq4_nl": Kind(slots(2, 16, 4), 32, 128, _V4),
    "mxfp4": Kind(slots(1, 16, 4), 32, 16, (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), number="e8m0"),
    "q1_0_g128": Kind(string(2, 128, 1), 32, 1, (-1, 1)),
    "iq2_bn": Kind(slots(0, 16, 2), 32, 1, **_ROW),
    "q2_K": Kind(_pair_plane(16), 16, scales=string(0, 16)[:, :4], terms=string(0, 16)[:, 4:], d=80, m=82),
    "q3_K": Kind(
        wide(_pair_plane(32), _bit_plane(0)), 16, 4, scales=wide(slots(96, 8, 4), slots(104, 4, 2)), plus=-32, d=108
    ),
    "q4_K": Kind(_wide_nibbles(16), 32, **_K),
    "q5_K": Kind(wide(_wide_nibbles(48), _bit_plane(16)), 32, **_K),
    "q6_K": Kind(wide(slots(0, 64, 4, 2), _pair_plane(128)), 16, 32, scales=string(192, 16), signed=True, d=208),
    "iq4_xs": Kind(_narrow_nibbles(8), 32, 128, _V4, scales=wide(string(4, 8, 4), string(2, 8, 2)), plus=-32),
    "iq2_k": Kind(_pair_plane(12), 16, 32, _V2, _EXTRA, 5, string(4, 16, 4), plus=-8),
    "iq3_k": Kind(
        wide(_pair_plane(14), _bit_plane(78)), 16, 64, _V3, _EXTRA, 4, string(6, 16, 4), 2, 1, signs=string(4, 16, 1)
    ),
    "iq4_k": Kind(_narrow_nibbles(16), 16, 128, _V4, shift=4, **_SIX_BIT),
    "iq5_k": Kind(wide(_wide_nibbles(16), _bit_plane(144)), 16, 128, _V5, shift=2, **_SIX_BIT),
    "iq6_k": Kind(
        wide(_wide_nibbles(20), _pair_plane(148)), 16, 128, _V6, _EXTRA, 1, string(4, 16), signed=True
    ),
    "iq2_ks": Kind(
        _pair_plane(6), 32, 32, _V2, string(0, 8, 1), 5, wide(string(2, 8, 4), string(1, 8, 1)), plus=-16, meta=True
    ),
    "iq3_ks": Kind(
        wide(_pair_plane(6), _bit_plane(70)), 32, 64, _V3, string(1, 8, 1), 4,
        wide(slots(2, 4, 4), string(0, 8, 1)), plus=-16, meta=True,
    ),
    "iq4_ks": Kind(_narrow_nibbles(8), 32, 128, _V4, shift=4, **_ODD_BYTE),
    "iq5_ks": Kind(wide(_wide_nibbles(8), _bit_plane(136)), 32, 128, _V5, shift=2, **_ODD_BYTE),
}  # fmt: skip
_BY_LOWER = {name.lower(): kind for name, kind in KINDS.items()}


def kind_of(type_name: str) -> Kind | None:
    """The entry of a type or of its base; None for a type that has none (grids, trellises, floats)."""
    stored = TYPES[type_name]
    if stored.base is not None and (stored.name.lower() not in LAYOUTS or LAYOUTS[stored.name.lower()].flip):
        return None
    return _BY_LOWER.get((stored.base or stored.name).lower())


@cache
def places_of(type_name: str) -> Places:
    """Of a type that kind_of knows, plain (one row) or interleaved."""
    stored, kind = TYPES[type_name], kind_of(type_name)
    assert kind is not None
    to = _moved(stored)

    def moved(bits: np.ndarray | None) -> np.ndarray | None:
        return None if bits is None else to[:, bits]

    def byte(offset: int) -> np.ndarray:
        return to[:, 8 * offset] // 8

    size = {"f16": 2, "f32": 4, "e8m0": 1}[kind.number]
    d = np.arange(stored.rows) * size if kind.meta else byte(kind.d)
    return Places(
        to[:, kind.codes],
        moved(kind.flags),
        moved(kind.scales),
        moved(kind.signs),
        moved(kind.terms),
        d,
        None if kind.m is None else byte(kind.m),
    )


def _moved(stored: TensorType) -> np.ndarray:
    """Where each bit of a plain block goes, int64 [rows of a group, bits]."""
    bits = 8 * stored.block_bytes
    if stored.base is None:
        return np.arange(bits)[None]
    to = np.full((stored.rows, bits), -1)
    for part in LAYOUTS[stored.name.lower()].parts:
        assert not part.scrambled
        to[:, part.base] = part.place(stored.rows, *part.base.shape)
    return to
