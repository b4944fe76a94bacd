"""Layouts of iq4_xs and of the IQK and trellis types of ik_llama.cpp, all in super-blocks of 256.

Codes number the entries of a non-uniform table, which a flag per block shifts by a constant, or start a generator. Written out
in `docs/formats/layouts.md`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .description import SIGNED_BYTES, BlockLayout, consecutive, float16_at, high_bits, linear, strided
from .tables import (
    IQ2_KL_PAIRS,
    IQ2_SHIFTS,
    IQ2_VALUES,
    IQ3_SHIFTS,
    IQ3_VALUES,
    IQ4_SHIFTS,
    IQ4_VALUES,
    IQ5_SHIFTS,
    IQ5_VALUES,
    IQ6_POLYNOMIAL,
    IQ6_SHIFTS,
    IQ6_VALUES,
    Trellis,
)

_IQ2: dict[str, Any] = {"table": IQ2_VALUES, "shifts": IQ2_SHIFTS}
_IQ3: dict[str, Any] = {"table": IQ3_VALUES, "shifts": IQ3_SHIFTS}
_IQ4: dict[str, Any] = {"table": IQ4_VALUES, "shifts": IQ4_SHIFTS}
_IQ5: dict[str, Any] = {"table": IQ5_VALUES, "shifts": IQ5_SHIFTS}
_IQ6: dict[str, Any] = {"table": IQ6_VALUES, "shifts": IQ6_SHIFTS, "polynomial": IQ6_POLYNOMIAL}


def _pairs(byte: int) -> np.ndarray:
    """256 numbers of two bits in 64 bytes."""
    return strided(byte, 32, 2, areas=2)


def _bits(byte: int) -> np.ndarray:
    """256 bits in 32 bytes."""
    return strided(byte, 32, 1)


def _nibbles_of_64(byte: int) -> np.ndarray:
    """256 nibbles in 128 bytes, two neighbouring runs of 32 in the low and high nibbles of 32 bytes."""
    return strided(byte, 32, 4, areas=4)


def _nibbles_of_32(byte: int) -> np.ndarray:
    """256 nibbles in 128 bytes, two neighbouring runs of 16 in the low and high nibbles of 16 bytes."""
    return strided(byte, 16, 4, areas=8)


# iq4_k and iq5_k: six bits per 16 weights, the low nibbles in eight bytes, the high pairs in the four before them.
_SIX_BIT_SCALES: dict[str, Any] = {"scales": high_bits(consecutive(8, 16, 4), consecutive(4, 16, 2)), "levels": linear(6, -32)}
_WITH_FLAGS: dict[str, Any] = {"d": float16_at(0), "flags": consecutive(2, 16, 1)}  # the types whose name ends in _k

# iq4_ks and iq5_ks: a byte per 32 weights, whose lowest bit is the flag and whose other bits number the odd levels.
_ODD_LEVELS: dict[str, Any] = {"row_scale": "f32", "scales": consecutive(0, 8)[:, 1:], "levels": linear(7, -127, 2)}
_BYTE_FLAGS: dict[str, Any] = {"flags": consecutive(0, 8)[:, :1]}

# iq4_kss: the same byte, in the lowest bits of the eight words of a block of 32.
_WORD_BITS = 16 * np.arange(64).reshape(8, 8)


def _trellis(size: int, codes: np.ndarray, scales: np.ndarray, levels: np.ndarray, **signs) -> BlockLayout:
    """The trellis types: codes are start states of a generator of eight (iq4_kt: four) weights."""
    return BlockLayout(256, codes, trellis=Trellis(size), row_scale="f32", scales=scales, levels=levels, **signs)


def _iq1_kt() -> BlockLayout:
    """A byte for each 32 weights: the scale code, then the highest bits of its four codes."""
    code = np.arange(32)
    codes = high_bits(consecutive(8, 32), strided(40, 16, 4), (8 * (code // 4) + 4 + code % 4)[:, None])
    return _trellis(8, codes, consecutive(0, 8)[:, :4], IQ4_VALUES)


def _iq4_kt() -> BlockLayout:
    """A word of 32 bits for each 32 weights: the highest bit of all its eight codes, seven bits of the scale code, and for each
    code three bits. (So the highest bit of a code moves the start state by 2^15.)"""
    words = 32 * np.arange(8)[:, None]
    triples = (words + 8 + 3 * np.arange(8)).reshape(-1, 1) + np.arange(3)
    codes = high_bits(consecutive(32, 64), strided(96, 32, 4), triples, np.repeat(words, 8, axis=0))
    return _trellis(4, codes, words + np.arange(1, 8), linear(7, -64))


LAYOUTS: dict[str, BlockLayout] = {
    "iq4_xs": BlockLayout(
        256,
        _nibbles_of_32(8),
        IQ4_VALUES,
        d=float16_at(0),
        scales=high_bits(consecutive(4, 8, 4), consecutive(2, 8, 2)),
        levels=linear(6, -32),
    ),
    "iq2_k": BlockLayout(256, _pairs(12), **_IQ2, **_WITH_FLAGS, scales=consecutive(4, 16, 4), levels=linear(4, -8)),
    "iq3_k": BlockLayout(
        256,
        high_bits(_pairs(14), _bits(78)),
        **_IQ3,
        **_WITH_FLAGS,
        scales=consecutive(6, 16, 4),
        levels=linear(4, 1, 2),
        signs=consecutive(4, 16, 1),
    ),
    "iq4_k": BlockLayout(256, _nibbles_of_32(16), **_IQ4, **_WITH_FLAGS, **_SIX_BIT_SCALES),
    "iq5_k": BlockLayout(256, high_bits(_nibbles_of_64(16), _bits(144)), **_IQ5, **_WITH_FLAGS, **_SIX_BIT_SCALES),
    "iq6_k": BlockLayout(
        256,
        high_bits(_nibbles_of_64(20), _pairs(148)),
        **_IQ6,
        **_WITH_FLAGS,
        scales=consecutive(4, 16),
        levels=SIGNED_BYTES,
    ),
    "iq2_ks": BlockLayout(
        256,
        _pairs(6),
        **_IQ2,
        row_scale="f16",
        scales=high_bits(consecutive(2, 8, 4), consecutive(1, 8, 1)),
        levels=linear(5, -16),
        flags=consecutive(0, 8, 1),
    ),
    "iq3_ks": BlockLayout(
        256,
        high_bits(_pairs(6), _bits(70)),
        **_IQ3,
        row_scale="f16",
        scales=high_bits(strided(2, 4, 4), consecutive(0, 8, 1)),
        levels=linear(5, -16),
        flags=consecutive(1, 8, 1),
    ),
    "iq4_ks": BlockLayout(256, _nibbles_of_32(8), **_IQ4, **_ODD_LEVELS, **_BYTE_FLAGS),
    "iq5_ks": BlockLayout(256, high_bits(_nibbles_of_64(8), _bits(136)), **_IQ5, **_ODD_LEVELS, **_BYTE_FLAGS),
    "iq4_kss": BlockLayout(
        256,
        _nibbles_of_32(0),
        **_IQ4,
        **{**_ODD_LEVELS, "scales": _WORD_BITS[:, 1:]},
        flags=_WORD_BITS[:, :1],
        gray_words=True,
    ),
    "iq2_kl": BlockLayout(
        256,
        high_bits(strided(6, 16, 4, areas=4), strided(70, 16, 1)),
        IQ2_KL_PAIRS,
        row_scale="f16",
        scales=high_bits(strided(2, 4, 4), consecutive(0, 8, 2)),
        levels=linear(6, -32),
    ),
    "iq1_kt": _iq1_kt(),
    "iq2_kt": _trellis(8, consecutive(4, 32, 16), strided(0, 4, 4), IQ4_VALUES),
    "iq3_kt": _trellis(8, consecutive(4, 32, 16), strided(0, 4, 4), linear(4), signs=strided(68, 32, 1), magnitudes=True),
    "iq4_kt": _iq4_kt(),
}
