"""Where the numbers of packed weights lie, as data: for every type the bits of codes, scales, minima and flags.

    weight = d * S(scale) * (table[code] + shift * flag) - dmin * minimum        S(s) = factor * s + zero, negated by a sign bit

All addresses are bit addresses in a block (8 * byte + bit), the lowest bit of a number first, as in repack/layouts.py. What
is here is said of plain types; that of their interleaved twins follows from the layouts. Source: FORMATS parts B and C.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ......formats.types import TYPES
from ......quantize.codecs.iqk.iq2_kl_search import PAIRS
from ......quantize.codecs.iqk.value_tables import V2, V3, V4, V5, V6
from ......quantize.codecs.iquants.codebooks import vectors_of
from ......repack.layouts import LAYOUTS, records, slots, string, wide

HALF, FLOAT, EXPONENT = "half", "float", "exponent"  # what d is: float16, float32 or a power of two (E8M0)


@dataclass(frozen=True, eq=False)
class Book:
    """values: uint8 [points, 8 or 4]: magnitudes where weights have signs, else what exceeds the smallest of the table."""

    values: np.ndarray


@dataclass(frozen=True)
class Fields:
    """block    weights per block; group: weights per scale (16 or 32; 32 where the block has no scales but d)
    activations  columns per scale of the activations, 32 or 256
    codes    bits [block, width]; of an interleaved type [rows, block, width], and so on for all others
    fixed    int [block] or None: added to the code (above its own bits), known from the place alone
    table    int [codes]: what a code stands for
    d        bits [1, width] of the block's factor (None: none, or the row's), kind of it: HALF or EXPONENT; dmin likewise
    row      HALF or FLOAT when the row begins with its factor, row_bytes bytes before the first block
    scales   bits [block / group, width], taken as factor * s + zero (signed: s is int8); signs: bits [.., 1] that negate
    flags    bits [.., 1] that add `shift` to the table's values
    minima   bits [.., width]; add: bits of the float16 that is added to every weight
    woven    iq4_kss: 16-bit words hold x with x ^ (x >> 1) == codes, above a bit of the scale
    book     codes None: points (bits [block / size, width]) are indices into it, and `signs_of` its values (bits [block, 1]) or
             sign_codes (bits [block / 8, 7]: seven signs, with the eighth the number of minus signs is even) negate them;
             scrambled: u ^ (u << 1) is the code with its eighth bit
    lifts    bits [block / 8, 1]: where one is not set, 2 is added to eight values of the book
    trellis  weights per state of a generator (4 or 8; 0: none); points are where it starts. With signs_of, they are the signs
             of magnitudes
    levels   what scales stand for, before factor and zero
    unit     a power of two that all values are to be multiplied by
    """

    codes: np.ndarray | None
    table: tuple[int, ...]
    block: int = 256
    group: int = 16
    activations: int = 256
    fixed: np.ndarray | None = None
    d: np.ndarray | None = None
    kind: str = HALF
    dmin: np.ndarray | None = None
    add: np.ndarray | None = None
    row: str | None = None
    scales: np.ndarray | None = None
    signed: bool = False
    factor: int = 1
    zero: int = 0
    signs: np.ndarray | None = None
    flags: np.ndarray | None = None
    shift: int = 0
    minima: np.ndarray | None = None
    woven: bool = False
    book: Book | None = None
    points: np.ndarray | None = None
    signs_of: np.ndarray | None = None
    sign_codes: np.ndarray | None = None
    scrambled: bool = False
    lifts: np.ndarray | None = None
    trellis: int = 0
    levels: tuple[int, ...] | None = None
    unit: float = 1.0


def _d(byte: int = 0) -> np.ndarray:
    return string(byte, 1, 16)


def _p2(byte: int) -> np.ndarray:
    return slots(byte, 32, 2, 2)


def _p1(byte: int) -> np.ndarray:
    return slots(byte, 32, 1)


def _n64(byte: int) -> np.ndarray:
    return slots(byte, 32, 4, 4)


def _n32(byte: int, blocks: int = 8) -> np.ndarray:
    return slots(byte, 16, 4, blocks)


def _whole(width: int, zero: int) -> tuple[int, ...]:
    return tuple(range(-zero, (1 << width) - zero))


def _values(table: np.ndarray) -> tuple[int, ...]:
    return tuple(int(v) for v in table[0])


def _nibble_halves(byte: int) -> np.ndarray:
    """Eight 4-bit numbers: those of the first four in the low nibbles of four bytes, then the high ones."""
    return slots(byte, 4, 4)


_INT8 = tuple(range(-128, 128))  # signed bytes are taken as they are, with the top bit flipped
_SIX_BIT = wide(string(8, 16, 4), string(4, 16, 2))  # iq4_k, iq5_k
_S = 8 * (4 + np.arange(12))[:, None]
_K_SCALES = wide(
    np.concatenate([_S[0:4] + np.arange(4), _S[8:12] + np.arange(4)]),
    np.concatenate([_S[0:4] + np.arange(4, 6), _S[0:4] + np.arange(6, 8)]),
)
_K_MINIMA = wide(
    np.concatenate([_S[4:8] + np.arange(4), _S[8:12] + np.arange(4, 8)]),
    np.concatenate([_S[4:8] + np.arange(4, 6), _S[4:8] + np.arange(6, 8)]),
)
_E = np.arange(32)
_Q6_0_HIGH = (8 * (2 + _E % 8) + 4 * (_E % 16 // 8) + 2 * (_E // 16))[:, None] + np.arange(2)
_KSS_SCALES = (128 * np.arange(8))[:, None] + 16 * np.arange(8)  # bit 0 of the eight words of a 32-block
_C = np.arange(8)  # blocks of 32
_SEVENS = (0, 7, 14, 21)  # where the sign codes of a word begin
_BOOK_UNIT = {"iq2xxs": 8, "iq2xs": 8, "iq2s": 8, "iq3xxs": 4, "iq3s": 1}  # makes whole numbers of a book's values
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_PAIRS = 32  # entries of iq2_kl's table: the first of each pair, then the second


def _iq2_kl() -> Fields:
    pair = np.arange(256) // 2  # elements 2 p and 2 p + 1 of a 32-block share a code
    codes = wide(slots(6, 16, 4, 4)[pair // 16 * 16 + pair % 16], slots(70, 16, 1)[pair])
    table = tuple(int(v) for v in np.asarray(PAIRS).T.reshape(-1))
    scales = wide(_nibble_halves(2), string(0, 8, 2))
    return Fields(codes, table, 256, 32, fixed=np.arange(256) % 2 * _PAIRS, row=HALF, scales=scales, zero=-32)


def _legacy(codes: np.ndarray, table: tuple[int, ...], **others: Any) -> Fields:
    given: dict[str, Any] = {"block": 32, "group": 32, "activations": 32, "d": _d(), **others}
    return Fields(codes, table, **given)


def _from_book(name: str, inverse_unit: int, points: np.ndarray, scales: np.ndarray, group: int = 32, **signs: Any) -> Fields:
    """The types whose scale is (2 s + 1) / inverse_unit in the units of a book of magnitudes."""
    values = np.rint(vectors_of(name) * _BOOK_UNIT[name]).astype(np.uint8)
    largest = int(values.max())
    return Fields(
        None, (-largest, largest), group=group, d=_d(), scales=scales, factor=2, zero=1, book=Book(values), points=points,
        unit=1 / inverse_unit, **signs,
    )  # fmt: skip


def _iq1_s() -> dict[str, Fields]:
    """Values -1, 0, 1 plus or minus an eighth, by a flag per 32 weights: in eighths -9 to 9."""
    shared: dict[str, Any] = {"group": 32, "factor": 2, "zero": 1, "shift": -2, "unit": 1 / 8, "table": (-7, 9)}
    shared["book"] = Book(np.rint(8 * (vectors_of("iq1s") + 1)).astype(np.uint8))
    words = 8 * (34 + 2 * np.arange(8))[:, None]
    high = (words + 3 * np.arange(4)).reshape(-1, 1) + np.arange(3)
    plain = Fields(
        None,
        d=_d(),
        points=wide(string(2, 32), high),
        scales=words + np.arange(12, 15),
        flags=words + np.array([[15]]),
        **shared,
    )
    row, j = np.arange(4)[:, None, None], np.arange(4)[None, :, None]  # iq1_s_r4: another encoding, of 32 weights
    word = 8 * (16 + 2 * row)
    points = np.concatenate([8 * (4 * j + row) + np.arange(8), word + 3 * j + np.arange(3)], axis=2)
    four = Fields(
        None, block=32, activations=32, row=HALF, points=points, scales=word + np.arange(12, 15), flags=word + 15, **shared
    )
    return {"iq1_s": plain, "iq1_s_r4": four}


def _iq1_m() -> dict[str, Fields]:
    """As iq1_s, but the flag goes with every eight weights, and scales with sixteen."""
    shared: dict[str, Any] = {"group": 16, "unit": 1 / 8, "table": (-9, 9)}
    shared["book"] = Book(np.rint(8 * (vectors_of("iq1s") + 1)).astype(np.uint8))
    high = string(32, 32, 4)
    scales = (8 * 48 + 16 * (_C // 2) + 6 * (_C % 2))[:, None, None] + 3 * np.arange(2)[:, None] + np.arange(3)
    d = (8 * 48 + 16 * np.arange(4) + 12)[:, None] + np.arange(4)
    plain = Fields(
        None, d=d.reshape(1, -1), points=wide(string(0, 32), high[:, :3]), lifts=high[:, 3:], scales=scales.reshape(16, 3),
        factor=2, zero=1, **shared,
    )  # fmt: skip
    row, j = np.arange(4)[:, None, None], np.arange(4)[None, :, None]  # iq1_m_r4
    high = 8 * (16 + 4 * (j // 2) + row) + 4 * (j % 2)
    points = np.concatenate([8 * (4 * j + row) + np.arange(8), high + np.arange(3)], axis=2)
    scales = 8 * (24 + row) + 4 * np.arange(2)[None, :, None] + np.arange(4)
    four = Fields(None, block=32, activations=32, row=HALF, points=points, lifts=high + 3, scales=scales, **shared)
    return {"iq1_m": plain, "iq1_m_r4": four}


def _trellis() -> dict[str, Fields]:
    shared: dict[str, Any] = {"codes": None, "group": 32, "row": FLOAT, "trellis": 8, "table": (-126, 126)}
    v4 = _values(V4)
    group = np.arange(32)
    c, g = group // 4, group % 4
    one = wide(string(8, 32), slots(40, 16, 4), (8 * c + 4 + g)[:, None])
    words = 32 * _C[:, None]
    triples = (words + 8 + 3 * np.arange(8)).reshape(-1, 1) + np.arange(3)
    four = wide(string(32, 64), slots(96, 32, 4), triples, np.repeat(words, 8, axis=0))
    return {
        "iq1_kt": Fields(**shared, points=one, scales=string(0, 8)[:, :4], levels=v4),
        "iq2_kt": Fields(**shared, points=string(4, 32, 16), scales=_nibble_halves(0), levels=v4),
        "iq3_kt": Fields(**shared, points=string(4, 32, 16), scales=_nibble_halves(0), signs_of=_p1(68)),
        "iq4_kt": Fields(**{**shared, "trellis": 4}, points=four, scales=words + np.arange(1, 8), zero=-64),
    }


def _q8_k_r8() -> Fields:
    row, e = np.arange(8)[:, None], np.arange(256)
    codes = 8 * (16 + 32 * (e // 4) + 4 * row + e % 4)[:, :, None] + np.arange(8)
    return Fields(codes, _INT8, group=32, d=16 * np.arange(8)[:, None, None] + np.arange(16))


@cache
def _plain() -> dict[str, Fields]:
    """All types but interleaved twins, by lower-case name; bits without an axis of rows where there is one row."""
    k_head: dict[str, Any] = {"group": 32, "d": _d(), "dmin": _d(2), "scales": _K_SCALES, "minima": _K_MINIMA}
    iqk: dict[str, Any] = {"d": _d(), "flags": string(2, 16, 1)}
    ks: dict[str, Any] = {
        "group": 32,
        "row": FLOAT,
        "factor": 2,
        "zero": -127,
        "flags": string(0, 8)[:, :1],
        "scales": string(0, 8)[:, 1:],
    }
    v2, v3, v4, v5, v6 = map(_values, (V2, V3, V4, V5, V6))
    found = {
        "q4_0": _legacy(_n32(2, 1), _whole(4, 8)),
        "q4_1": _legacy(_n32(4, 1), _whole(4, 0), add=_d(2)),
        "q5_0": _legacy(wide(_n32(6, 1), string(2, 32, 1)), _whole(5, 16)),
        "q5_1": _legacy(wide(_n32(8, 1), string(4, 32, 1)), _whole(5, 0), add=_d(2)),
        "q6_0": _legacy(wide(_n32(10, 1), _Q6_0_HIGH), _whole(6, 32)),
        "q8_0": _legacy(string(2, 32), _INT8),
        "q8_KV": _legacy(string(0, 32), _INT8, d=None, row=FLOAT),
        "iq4_nl": _legacy(_n32(2, 1), v4),
        "mxfp4": _legacy(_n32(1, 1), _MXFP4, d=string(0, 1), kind=EXPONENT),
        "q1_0_g128": _legacy(string(2, 128, 1), (-1, 1), block=128),
        "iq2_bn": _legacy(slots(0, 16, 2), _whole(2, 1), block=64, d=None, row=FLOAT),
        "q2_K": Fields(_p2(16), _whole(2, 0), d=_d(80), dmin=_d(82), scales=string(0, 16)[:, :4], minima=string(0, 16)[:, 4:]),
        "q3_K": Fields(
            wide(_p2(32), _p1(0)), _whole(3, 4), d=_d(108), scales=wide(slots(96, 8, 4), slots(104, 4, 2)), zero=-32
        ),
        "q4_K": Fields(_n64(16), _whole(4, 0), **k_head),
        "q5_K": Fields(wide(_n64(48), _p1(16)), _whole(5, 0), **k_head),
        "q6_K": Fields(
            wide(slots(0, 64, 4, 2), _p2(128)), _whole(6, 32), d=_d(208), scales=string(192, 16), signed=True
        ),
        "iq4_xs": Fields(
            _n32(8), v4, group=32, d=_d(), scales=wide(string(4, 8, 4), string(2, 8, 2)), zero=-32
        ),
        "iq2_k": Fields(_p2(12), v2, **iqk, shift=5, scales=string(4, 16, 4), zero=-8),
        "iq3_k": Fields(
            wide(_p2(14), _p1(78)), v3, **iqk, shift=4, scales=string(6, 16, 4), factor=2, zero=1, signs=string(4, 16, 1)
        ),
        "iq4_k": Fields(_n32(16), v4, **iqk, shift=4, scales=_SIX_BIT, zero=-32),
        "iq5_k": Fields(wide(_n64(16), _p1(144)), v5, **iqk, shift=2, scales=_SIX_BIT, zero=-32),
        "iq6_k": Fields(wide(_n64(20), _p2(148)), v6, **iqk, shift=1, scales=string(4, 16), signed=True),
        "iq2_ks": Fields(
            _p2(6), v2, 256, 32, row=HALF, shift=5, flags=string(0, 8, 1), zero=-16,
            scales=wide(string(2, 8, 4), string(1, 8, 1)),
        ),
        "iq3_ks": Fields(
            wide(_p2(6), _p1(70)), v3, 256, 32, row=HALF, shift=4, flags=string(1, 8, 1), zero=-16,
            scales=wide(_nibble_halves(2), string(0, 8, 1)),
        ),
        "iq4_ks": Fields(_n32(8), v4, **ks, shift=4),
        "iq5_ks": Fields(wide(_n64(8), _p1(136)), v5, **ks, shift=2),
        "iq4_kss": Fields(
            _n32(0), v4, group=32, row=FLOAT, factor=2, zero=-127, shift=4, woven=True,
            flags=_KSS_SCALES[:, :1], scales=_KSS_SCALES[:, 1:],
        ),
        "iq2_kl": _iq2_kl(),
        "iq2_xxs": _from_book(
            "iq2xxs", 8, records(2, 8, 8, (0, 8, 16, 24), 8), records(6, 8, 8, (28,), 4),
            sign_codes=records(6, 8, 8, _SEVENS, 7),
        ),
        "iq2_xs": _from_book(
            "iq2xs", 8, records(2, 2, 32, (0,), 9), string(66, 16, 4), 16, sign_codes=records(2, 2, 32, (9,), 7)
        ),
        "iq2_s": _from_book(
            "iq2s", 8, wide(string(2, 32), string(66, 32, 2)), string(74, 16, 4), 16, signs_of=string(34, 256, 1)
        ),
        "iq3_xxs": _from_book(
            "iq3xxs", 4, string(2, 64), records(66, 4, 8, (28,), 4), sign_codes=records(66, 4, 8, _SEVENS, 7)
        ),
        "iq3_s": _from_book(
            "iq3s", 1, wide(string(2, 64), string(66, 64, 1)), string(106, 8, 4), signs_of=string(74, 256, 1)
        ),
        **_iq1_s(),
        **_iq1_m(),
        **_trellis(),
        "q8_k_r8": _q8_k_r8(),
    }  # fmt: skip
    return {name.lower(): described for name, described in found.items()}


_BITS = ("codes", "d", "dmin", "add", "scales", "signs", "flags", "minima", "points", "lifts", "signs_of", "sign_codes")


def _moved(name: str, block_bytes: int, rows: int) -> np.ndarray:
    """Bit of a plain block [8 * bytes] -> bit of the interleaved block, per row: int [rows, 8 * bytes]."""
    layout = LAYOUTS[name]
    where = np.full((rows, 8 * (layout.block_bytes or block_bytes)), -1)
    for part in layout.parts:
        where[:, part.base] = part.place(rows, *part.base.shape)
    return where


@cache
def fields(name: str) -> Fields | None:
    """The fields of a type, plain or interleaved; every bit array has a first axis of rows (1 for plain types). None: a type
    that is not described by fields."""
    kind = TYPES[name]
    base = _plain().get((kind.base or kind.name).lower())
    if base is None or (kind.rows > 1 and not kind.base):
        return base
    moved = _moved(kind.name.lower(), kind.block_bytes, kind.rows) if kind.base else np.arange(8 * kind.block_bytes)[None]
    placed: dict[str, Any] = {b: moved[:, bits] for b in _BITS if (bits := getattr(base, b)) is not None}
    if kind.base and (flip := LAYOUTS[kind.name.lower()].flip & 15):
        placed["table"] = tuple(base.table[code ^ flip] for code in range(len(base.table)))
    return replace(base, **placed, scrambled=kind.base is not None)
