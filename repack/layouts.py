"""Where every bit of a plain block goes in its interleaved twin: the layouts, as data.

A layout is a list of parts. Each part names bits of one base block, as an array [numbers, width] of bit addresses (8 * byte +
bit), and the place of the same numbers of row k in the interleaved block. Both sides together cover every bit once, which
moves.py checks when it turns a layout into a program. Source: FORMATS C.0 to C.2; words used there (tile, slots, M16, M32):

* In a group of R rows, number s of all rows together is R * (number of the row) + k; C.1 calls that order M16 or M32.
* Inside 32 elements e = 16 h + 4 q + i, with q = 2 q1 + q0. A tile keeps i and k in the byte (4 k + i) and spreads h, q0, q1
  over byte and bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Place = Callable[[int, int, int], np.ndarray]  # (rows, numbers, width) -> bit addresses [rows, numbers, width]


@dataclass(frozen=True)
class Part:
    """Some numbers of a block. base: bit addresses [numbers, width]; place: where they go.

    scrambled: the packed number is u with u ^ (u << 1) == the base number: u is the running XOR of its bits (`scr` in C.2).
    """

    base: np.ndarray
    place: Place
    scrambled: bool = False


@dataclass(frozen=True)
class Layout:
    """parts cover a base block. flip: XORed to each packed byte from `flip_from` on (not together with scrambled parts);
    block_bytes: what counts as a block where the type's own is too small for 32-bit moves."""

    parts: tuple[Part, ...]
    flip: int = 0
    flip_from: int = 0
    block_bytes: int | None = None


# --- bits of the base block -----------------------------------------------------------------------------------------


def slots(offset: int, size: int, width: int, times: int = 1) -> np.ndarray:
    """Numbers of `width` bits in `size` bytes: number s in byte s % size at shift width * (s // size); `times` such areas."""
    per_area = size * 8 // width
    s = np.arange(per_area * times)
    byte = offset + s // per_area * size + s % size
    return (8 * byte + s % per_area // size * width)[:, None] + np.arange(width)


def string(offset: int, numbers: int, width: int = 8) -> np.ndarray:
    """Numbers of `width` bits one after the other, lowest bits first."""
    return (8 * offset + width * np.arange(numbers))[:, None] + np.arange(width)


def records(offset: int, stride: int, times: int, first: tuple[int, ...], width: int) -> np.ndarray:
    """In each of `times` records of `stride` bytes, numbers of `width` bits that begin at the bits `first`."""
    return (8 * (offset + stride * np.arange(times))[:, None] + np.array(first)).reshape(-1, 1) + np.arange(width)


def wide(*parts: np.ndarray) -> np.ndarray:
    """Numbers put together from their low and high bits."""
    return np.concatenate(parts, axis=1)


# --- bits of the interleaved block ----------------------------------------------------------------------------------


def runs(offset: int, size: int, unit: int = 1, shift: int = 0) -> Place:
    """Units of some bytes: `size` of row 0, `size` of row 1, ..., then the next `size` of row 0; the number at bit `shift`."""

    def place(rows: int, numbers: int, width: int) -> np.ndarray:
        j, k = np.arange(numbers), np.arange(rows)[:, None]
        byte = offset + unit * ((rows * (j // size) + k) * size + j % size)
        return (8 * byte + shift)[:, :, None] + np.arange(width)

    return place


def into_slots(offset: int, size: int) -> Place:
    """Numbers in the order R * s + k in the slots of `size` bytes."""

    def place(rows: int, numbers: int, width: int) -> np.ndarray:
        s = rows * np.arange(numbers) + np.arange(rows)[:, None]
        return 8 * (offset + s % size)[:, :, None] + (s // size * width)[:, :, None] + np.arange(width)

    return place


@dataclass(frozen=True)
class Tile:
    """size: bytes of 32 elements of one row; byte, bit: what h, q0 and q1 add to byte (in runs of one i and k) and bit."""

    size: int
    byte: tuple[int, int, int]
    bit: tuple[int, int, int]

    def at(self, offset: int) -> Place:
        def place(rows: int, numbers: int, width: int) -> np.ndarray:
            e, k = np.arange(numbers), np.arange(rows)[:, None]
            digits = np.stack([e // 16 % 2, e // 4 % 2, e // 8 % 2])
            byte = e // 32 * self.size * rows + np.array(self.byte) @ digits * 4 * rows + 4 * k + e % 4
            bit = np.array(self.bit) @ digits
            return (8 * (offset + byte) + bit)[:, :, None] + np.arange(width)

        return place


T4 = Tile(16, (1, 2, 0), (0, 0, 4))
T2 = Tile(8, (1, 0, 0), (0, 2, 4))
T2s = Tile(8, (1, 0, 0), (0, 4, 2))
T1a = Tile(4, (0, 0, 0), (4, 1, 2))
T1b = Tile(4, (0, 0, 0), (4, 2, 1))
T1c = Tile(4, (0, 0, 0), (2, 4, 1))
T1d = Tile(4, (0, 0, 0), (1, 2, 4))
T4x = Tile(16, (2, 0, 1), (0, 4, 0))  # iq4_xs_r8

# --- the table ------------------------------------------------------------------------------------------------------

_E = np.arange(32)
_Q6_0_HIGH = (8 * (2 + _E % 8) + 4 * (_E % 16 // 8) + 2 * (_E // 16))[:, None] + np.arange(2)

# q4_K and q5_K: eight 6-bit scales and mins in 12 bytes S at offset 4; the high pairs of the last four ride on the first four.
_S = 8 * (4 + np.arange(12))[:, None]
_K_LOW = wide(
    np.concatenate([_S[0:4] + np.arange(4), _S[8:12] + np.arange(4)]),  # scale & 15
    np.concatenate([_S[4:8] + np.arange(4), _S[8:12] + np.arange(4, 8)]),  # min & 15
)
_K_HIGH = wide(
    np.concatenate([_S[0:4] + np.arange(4, 6), _S[0:4] + np.arange(6, 8)]),  # scale >> 4
    np.concatenate([_S[4:8] + np.arange(4, 6), _S[4:8] + np.arange(6, 8)]),  # min >> 4
)
_K_HEAD = (
    Part(string(0, 2), runs(0, 2)),
    Part(string(2, 2), runs(8, 2)),
    Part(_K_HIGH, into_slots(16, 16)),
    Part(_K_LOW, into_slots(32, 32)),
)
_D = Part(string(0, 2), runs(0, 2))
_EXTRA = Part(string(2, 16, 1), into_slots(8, 8))
_IQ4_K_HEAD = (_D, _EXTRA, Part(string(4, 16, 2), into_slots(16, 16)), Part(string(8, 16, 4), into_slots(32, 32)))


def _sign_words(offset: int, stride: int) -> tuple[Part, Part]:
    """iq2_xxs, iq3_xxs: a u32 per 32 elements with four 7-bit sign codes and a 4-bit scale, to a byte per sign code."""
    codes, scale_bits = (0, 7, 14, 21), (28, 29, 30, 31)
    return (
        Part(records(offset, stride, 8, codes, 7), runs(8, 4, shift=1), scrambled=True),
        Part(records(offset, stride, 8, scale_bits, 1), runs(8, 4)),
    )


_INDEX_ORDER = np.concatenate([c * 8 + np.array([0, 4, 1, 5, 2, 6, 3, 7]) for c in range(8)])  # iq3_s_r4: j%4, then j/4
_QUANTS_4 = string(2, 16)

LAYOUTS: dict[str, Layout] = {
    "q4_0_r8": Layout((_D, Part(_QUANTS_4, runs(16, 4)))),
    "q4_0_4x4": Layout((_D, Part(_QUANTS_4, runs(8, 4))), flip=0x88, flip_from=8),
    "q4_0_4x8": Layout((_D, Part(_QUANTS_4, runs(8, 8))), flip=0x88, flip_from=8),
    "q4_0_8x8": Layout((_D, Part(_QUANTS_4, runs(16, 8))), flip=0x88, flip_from=16),
    "mxfp4_r8": Layout((Part(string(0, 1), runs(0, 1)), Part(string(1, 16), runs(8, 4)))),
    "q8_0_r8": Layout((_D, Part(string(2, 32), runs(16, 4)))),
    "q8_kv_r8": Layout((Part(string(0, 32), runs(0, 4)),)),
    "bf16_r16": Layout((Part(string(0, 4), runs(0, 4)),), block_bytes=4),
    "q5_0_r4": Layout((_D, Part(string(2, 32, 1), T1d.at(8)), Part(slots(6, 16, 4), T4.at(24)))),
    "q6_0_r4": Layout((_D, Part(_Q6_0_HIGH, T2.at(8)), Part(slots(10, 16, 4), T4.at(40)))),
    "iq4_nl_r4": Layout((_D, Part(slots(2, 16, 4), T4.at(8)))),
    "q2_k_r4": Layout(
        (
            Part(string(80, 2), runs(0, 2)),
            Part(string(82, 2), runs(8, 2)),
            Part(string(0, 16), runs(16, 1)),
            Part(slots(16, 32, 2, 2), T2.at(80)),
        )
    ),
    "q3_k_r4": Layout(
        (
            Part(string(108, 2), runs(0, 2)),
            Part(slots(104, 4, 2), into_slots(8, 16)),
            Part(slots(96, 8, 4), into_slots(24, 32)),
            Part(slots(0, 32, 1), T1a.at(56)),
            Part(slots(32, 32, 2, 2), T2.at(184)),
        )
    ),
    "q4_k_r4": Layout((*_K_HEAD, Part(slots(16, 32, 4, 4), T4.at(64)))),
    "q5_k_r4": Layout((*_K_HEAD, Part(slots(16, 32, 1), T1b.at(64)), Part(slots(48, 32, 4, 4), T4.at(192)))),
    "q6_k_r4": Layout(
        (
            Part(string(208, 2), runs(0, 2)),
            Part(string(192, 16), runs(8, 1)),
            Part(slots(128, 32, 2, 2), T2s.at(72)),
            Part(slots(0, 64, 4, 2), T4.at(328)),
        )
    ),
    "iq2_k_r4": Layout((_D, _EXTRA, Part(string(4, 16, 4), into_slots(16, 32)), Part(slots(12, 32, 2, 2), T2.at(48)))),
    "iq3_k_r4": Layout(
        (
            _D,
            _EXTRA,
            Part(string(4, 16, 1), into_slots(16, 8)),
            Part(string(6, 16, 4), into_slots(24, 32)),
            Part(slots(14, 32, 2, 2), T2.at(56)),
            Part(slots(78, 32, 1), T1a.at(312)),
        )
    ),
    "iq4_k_r4": Layout((*_IQ4_K_HEAD, Part(slots(16, 16, 4, 8), T4.at(64)))),
    "iq5_k_r4": Layout((*_IQ4_K_HEAD, Part(slots(16, 32, 4, 4), T4.at(64)), Part(slots(144, 32, 1), T1c.at(576)))),
    "iq4_ks_r4": Layout((Part(string(0, 8), runs(0, 1)), Part(slots(8, 16, 4, 8), T4.at(32)))),
    "iq5_ks_r4": Layout(
        (Part(string(0, 8), runs(0, 1)), Part(slots(8, 32, 4, 4), T4.at(32)), Part(slots(136, 32, 1), T1c.at(544)))
    ),
    "iq4_xs_r8": Layout(
        (
            _D,
            Part(string(2, 8, 2), into_slots(16, 16)),
            Part(string(4, 8, 4), into_slots(32, 32)),
            Part(slots(8, 16, 4, 8), T4x.at(64)),
        )
    ),
    "iq2_xxs_r4": Layout((_D, *_sign_words(6, 8), Part(records(2, 8, 8, (0, 8, 16, 24), 8), runs(136, 4)))),
    "iq3_xxs_r4": Layout((_D, *_sign_words(66, 4), Part(string(2, 64), runs(136, 8)))),
    "iq2_xs_r4": Layout(
        (
            _D,
            Part(records(2, 2, 32, (0,), 9), runs(8, 4, unit=2)),
            Part(records(2, 2, 32, (9,), 7), runs(8, 4, unit=2, shift=9), scrambled=True),
            Part(string(66, 8), runs(264, 1)),
        )
    ),
    "iq2_s_r4": Layout(
        (
            _D,
            Part(string(2, 32), runs(8, 4)),
            Part(string(66, 8), runs(136, 1)),
            Part(string(34, 32), runs(168, 4)),
            Part(string(74, 8), runs(296, 1)),
        )
    ),
    "iq3_s_r4": Layout(
        (
            _D,
            Part(string(2, 64)[_INDEX_ORDER], runs(8, 1)),
            Part(string(66, 8), runs(264, 1)),
            Part(string(74, 256, 1), T1a.at(296)),
            Part(string(106, 8, 4), into_slots(424, 16)),
        )
    ),
    "iq2_bn_r4": Layout((Part(slots(0, 16, 2), T2.at(0)),)),
}
