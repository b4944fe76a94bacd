"""Where each bit of a plain block goes in the interleaved types (_R4, _R8, _R16), as data.

A group of R rows is stored as one: the rows' scales side by side, then interleaved blocks, each made of one block of every row.
`INTERLEAVINGS` lists for each interleaved type the parts of the plain block and their places; every bit is placed exactly once.
k is the row within the group; number j of row k is number R * j + k of all rows. Of 32 weights, weight e is 16 h + 4 q + i, and
q is 2 q1 + q0.

Source: ik_llama.cpp; written out in `docs/formats/interleaved.md`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...data_classes import dataclass
from .description import BlockLayout

Place = Callable[[int, int, int], np.ndarray]  # (rows, numbers, width) -> bit addresses [rows, numbers, width]


@dataclass(frozen=True)
class Part:
    """Some numbers of the plain block and where they go.

    fields     names of fields of BlockLayout, separated by spaces: their numbers joined, the first field's bits lowest
    place      bit addresses of these numbers in the interleaved block
    bits       which bits of the numbers (None: all)
    order      the numbers in another order
    width      bits of the numbers that are placed, where they are others: neighbours are joined, or numbers cut up
    scrambled  the interleaved number is u with (u ^ (u << 1)) & 127 == the plain one: u is the running XOR of its bits
    """

    fields: str
    place: Place
    bits: slice | None = None
    order: np.ndarray | None = None
    width: int | None = None
    scrambled: bool = False

    def plain_bits(self, plain: BlockLayout) -> np.ndarray:
        """Bit addresses [numbers, width] in the plain block."""
        bits = np.concatenate([getattr(plain, name)[:, self.bits or slice(None)] for name in self.fields.split()], axis=1)
        bits = bits if self.order is None else bits[self.order]
        return bits if self.width is None else bits.reshape(-1, self.width)


@dataclass(frozen=True)
class Interleaving:
    """parts cover a plain block. flip: XORed to each interleaved byte from `flip_from` on; blocks: how many plain blocks count
    as one (of bf16 a single one would be too small for moves of 32 bits)."""

    parts: tuple[Part, ...]
    flip: int = 0
    flip_from: int = 0
    blocks: int = 1


# --- places in the interleaved block ------------------------------------------------------------------------------------


def runs(byte: int, size: int = 1, unit: int = 1, shift: int = 0) -> Place:
    """`size` numbers of row 0, `size` of row 1, ..., then the next `size` of row 0; each at bit `shift` of a unit of bytes."""

    def place(rows: int, numbers: int, width: int) -> np.ndarray:
        j, k = np.arange(numbers), np.arange(rows)[:, None]
        at = byte + unit * ((rows * (j // size) + k) * size + j % size)
        return (8 * at + shift)[:, :, None] + np.arange(width)

    return place


def slots(byte: int, size: int) -> Place:
    """Number s of all rows in byte s % size, above those of the numbers before it in this byte."""

    def place(rows: int, numbers: int, width: int) -> np.ndarray:
        s = rows * np.arange(numbers) + np.arange(rows)[:, None]
        return (8 * (byte + s % size) + s // size * width)[:, :, None] + np.arange(width)

    return place


@dataclass(frozen=True)
class CodeTile:
    """The codes of 32 weights of each row: i and k choose the byte 4 k + i, and each of h, q0 and q1 adds something to the byte
    (`bytes`, in units of 4 R) and to the bit (`bits`). size: bytes of one row."""

    size: int
    bytes: tuple[int, int, int]
    bits: tuple[int, int, int]

    def at(self, byte: int) -> Place:
        def place(rows: int, numbers: int, width: int) -> np.ndarray:
            e, k = np.arange(numbers), np.arange(rows)[:, None]
            digits = np.stack([e // 16 % 2, e // 4 % 2, e // 8 % 2])
            at = byte + e // 32 * self.size * rows + np.array(self.bytes) @ digits * 4 * rows + 4 * k + e % 4
            return (8 * at + np.array(self.bits) @ digits)[:, :, None] + np.arange(width)

        return place


T4 = CodeTile(16, (1, 2, 0), (0, 0, 4))
T4_PLAIN = CodeTile(16, (0, 1, 2), (4, 0, 0))  # bytes stay as they are in the plain type
T4_XS = CodeTile(16, (2, 0, 1), (0, 4, 0))
T2 = CodeTile(8, (1, 0, 0), (0, 2, 4))
T2S = CodeTile(8, (1, 0, 0), (0, 4, 2))
T1A = CodeTile(4, (0, 0, 0), (4, 1, 2))
T1B = CodeTile(4, (0, 0, 0), (4, 2, 1))
T1C = CodeTile(4, (0, 0, 0), (2, 4, 1))
T1D = CodeTile(4, (0, 0, 0), (1, 2, 4))

# --- the table ------------------------------------------------------------------------------------------------------

_LOW, _HIGH, _ABOVE_2 = (
    slice(0, 4),
    slice(4, None),
    slice(2, None),
)  # bits of a number: the low nibble, what is above it or a pair
_D = Part("d", runs(0, unit=2))
_SIX_BIT_MINIMA = (
    _D,
    Part("dmin", runs(8, unit=2)),
    Part("scales minima", slots(16, 16), _HIGH),
    Part("scales minima", slots(32, 32), _LOW),
)
_FLAGS = Part("flags", slots(8, 8))
_SIX_BIT_SCALES = (_D, _FLAGS, Part("scales", slots(16, 16), _HIGH), Part("scales", slots(32, 32), _LOW))
# Each byte of a sign code has a bit of the scale code below it.
_SIGNS_AND_SCALES = (Part("sign_codes", runs(8, 4, shift=1), scrambled=True), Part("scales", runs(8, 4), width=1))
_IQ3_S_ORDER = np.concatenate([c * 8 + np.array([0, 4, 1, 5, 2, 6, 3, 7]) for c in range(8)])
_Q4_0_ORDER = np.arange(32).reshape(2, 16).T.reshape(-1)  # as the nibbles follow each other


def _older_q4_0(rows: int, run: int) -> Interleaving:
    """The bytes of q4_0 in runs, both nibbles with their highest bit flipped."""
    parts = _D, Part("codes", runs(2 * rows, run), order=_Q4_0_ORDER, width=8)
    return Interleaving(parts, flip=0x88, flip_from=2 * rows)


INTERLEAVINGS: dict[str, Interleaving] = {
    "q4_0_r8": Interleaving((_D, Part("codes", T4_PLAIN.at(16)))),
    "q4_0_4x4": _older_q4_0(4, 4),
    "q4_0_4x8": _older_q4_0(4, 8),
    "q4_0_8x8": _older_q4_0(8, 8),
    "mxfp4_r8": Interleaving((Part("d", runs(0)), Part("codes", T4_PLAIN.at(8)))),
    "q8_0_r8": Interleaving((_D, Part("codes", runs(16, 4)))),
    "q8_KV_r8": Interleaving((Part("codes", runs(0, 4)),)),
    "bf16_r16": Interleaving((Part("codes", runs(0, 2, unit=2)),), blocks=2),
    "q5_0_r4": Interleaving((_D, Part("codes", T1D.at(8), _HIGH), Part("codes", T4.at(24), _LOW))),
    "q6_0_r4": Interleaving((_D, Part("codes", T2.at(8), _HIGH), Part("codes", T4.at(40), _LOW))),
    "iq4_nl_r4": Interleaving((_D, Part("codes", T4.at(8)))),
    "q2_k_r4": Interleaving((_D, Part("dmin", runs(8, unit=2)), Part("scales minima", runs(16)), Part("codes", T2.at(80)))),
    "q3_k_r4": Interleaving(
        (
            _D,
            Part("scales", slots(8, 16), _HIGH),
            Part("scales", slots(24, 32), _LOW),
            Part("codes", T1A.at(56), _ABOVE_2),
            Part("codes", T2.at(184), slice(0, 2)),
        )
    ),
    "q4_k_r4": Interleaving((*_SIX_BIT_MINIMA, Part("codes", T4.at(64)))),
    "q5_k_r4": Interleaving((*_SIX_BIT_MINIMA, Part("codes", T1B.at(64), _HIGH), Part("codes", T4.at(192), _LOW))),
    "q6_k_r4": Interleaving((_D, Part("scales", runs(8)), Part("codes", T2S.at(72), _HIGH), Part("codes", T4.at(328), _LOW))),
    "iq2_k_r4": Interleaving((_D, _FLAGS, Part("scales", slots(16, 32)), Part("codes", T2.at(48)))),
    "iq3_k_r4": Interleaving(
        (
            _D,
            _FLAGS,
            Part("signs", slots(16, 8)),
            Part("scales", slots(24, 32)),
            Part("codes", T2.at(56), slice(0, 2)),
            Part("codes", T1A.at(312), _ABOVE_2),
        )
    ),
    "iq4_k_r4": Interleaving((*_SIX_BIT_SCALES, Part("codes", T4.at(64)))),
    "iq5_k_r4": Interleaving((*_SIX_BIT_SCALES, Part("codes", T4.at(64), _LOW), Part("codes", T1C.at(576), _HIGH))),
    "iq4_ks_r4": Interleaving((Part("flags scales", runs(0)), Part("codes", T4.at(32)))),
    "iq5_ks_r4": Interleaving(
        (Part("flags scales", runs(0)), Part("codes", T4.at(32), _LOW), Part("codes", T1C.at(544), _HIGH))
    ),
    "iq4_xs_r8": Interleaving(
        (_D, Part("scales", slots(16, 16), _HIGH), Part("scales", slots(32, 32), _LOW), Part("codes", T4_XS.at(64)))
    ),
    "iq2_xxs_r4": Interleaving((_D, *_SIGNS_AND_SCALES, Part("codes", runs(136, 4)))),
    "iq3_xxs_r4": Interleaving((_D, *_SIGNS_AND_SCALES, Part("codes", runs(136, 8)))),
    "iq2_xs_r4": Interleaving(
        (
            _D,
            Part("codes", runs(8, 4, unit=2)),
            Part("sign_codes", runs(8, 4, unit=2, shift=9), scrambled=True),
            Part("scales", runs(264), width=8),
        )
    ),
    "iq2_s_r4": Interleaving(
        (
            _D,
            Part("codes", runs(8, 4), slice(0, 8)),
            Part("codes", runs(136), slice(8, None), width=8),
            Part("signs", runs(168, 4), width=8),
            Part("scales", runs(296), width=8),
        )
    ),
    "iq3_s_r4": Interleaving(
        (
            _D,
            Part("codes", runs(8), slice(0, 8), order=_IQ3_S_ORDER),
            Part("codes", runs(264), slice(8, None), width=8),
            Part("signs", T1A.at(296)),
            Part("scales", slots(424, 16)),
        )
    ),
    "iq2_bn_r4": Interleaving((Part("codes", T2.at(0)),)),
}
