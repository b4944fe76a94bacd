"""The value tables of the tensor types, the grids of the i-quants and the generator of the trellis types, each in one place.

Numbers from llama.cpp (ggml-common.h) and from the ik_llama.cpp fork; `docs/formats/layouts.md` prints them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...data_classes import dataclass

# Non-uniform tables, by the code's width in bits: 2 for iq2_k and iq2_ks; 3 for iq3_k and iq3_ks; 4 for iq4_nl, iq4_xs, iq4_k,
# iq4_ks, iq4_kss and the scales of iq1_kt and iq2_kt; 5 for iq5_k and iq5_ks; 6 for iq6_k.
IQ2_VALUES = np.array([-31, -13, 1, 17])
IQ3_VALUES = np.array([-63, -40, -23, -10, 1, 13, 28, 47])
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
IQ5_VALUES = np.array(
    [-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
     -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121]
)  # fmt: skip
IQ6_VALUES = np.array(
    [-127, -121, -115, -109, -104, -98, -93, -88, -84, -79, -74, -70, -66, -62, -58, -54,
     -51, -47, -44, -40, -37, -34, -31, -28, -25, -22, -19, -16, -13, -11, -8, -5,
     -2, 0, 3, 6, 9, 12, 14, 17, 20, 23, 27, 30, 33, 36, 40, 44,
     47, 51, 55, 59, 63, 68, 72, 77, 82, 87, 92, 98, 103, 109, 115, 121]
)  # fmt: skip
# What is added to all entries of each table for blocks whose flag is not set, and whose flag is.
IQ2_SHIFTS, IQ3_SHIFTS, IQ4_SHIFTS, IQ5_SHIFTS, IQ6_SHIFTS = (0, 5), (0, 4), (0, 4), (0, 2), (0, 1)
IQ1_SHIFTS = (1, -1)  # of the grid iq1s, in its unit: an eighth

# iq2_kl: the two neighbouring weights that each code of five bits stands for, [32, 2].
IQ2_KL_PAIRS = np.array(
    [
        (-63, -23), (-63, 13), (-40, -63), (-40, -10), (-40, 13), (-40, 47), (-23, -40), (-23, -23),
        (-23, 1), (-23, 13), (-23, 28), (-10, -63), (-10, 1), (-10, 13), (-10, 47), (1, -23),
        (1, -10), (1, 1), (1, 13), (1, 28), (13, -40), (13, -23), (13, -10), (13, 1),
        (13, 13), (28, -63), (28, -23), (28, 1), (28, 28), (28, 47), (47, -23), (47, 13),
    ]
)  # fmt: skip

# Twice the values of E2M1, so that all are whole numbers; a code's highest bit is its sign. (mxfp4, nvfp4)
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


def polynomial_values(coefficients: Sequence[float], count: int) -> np.ndarray:
    """float32 [count]: of 0, 1, ... the polynomial with these coefficients, the lowest first, in fused multiply-adds."""
    codes, value = np.arange(count, dtype=np.float64), np.full(count, coefficients[-1], np.float32)
    for coefficient in coefficients[-2::-1]:
        # A product of two float32 is exact in float64, so each step is rounded like a fused multiply-add.
        value = (codes * value.astype(np.float64) + coefficient).astype(np.float32)
    return value


# What iq6_k decodes with in place of IQ6_VALUES: a cubic of the code, in fused multiply-adds, whose rounding is IQ6_VALUES.
IQ6_POLYNOMIAL = tuple(float(np.float32(k)) for k in (-127.0, 6.2568, -0.11218, 0.0011972))
IQ6_DECODED = polynomial_values(IQ6_POLYNOMIAL, 64)


def _half_ue4m3() -> np.ndarray:
    """Half of each unsigned E4M3 number (the eighth bit is ignored, 0x7F counts as 0): the scales of nvfp4 for E2M1_DOUBLED."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes == 0x7F, 0, value / 2)


HALF_UE4M3 = _half_ue4m3()


class Grid(NamedTuple):
    """A codebook of the i-quants: what the levels of its points stand for, as whole multiples of `unit`; points have `size`
    weights whose levels are packed `bits` bits each."""

    levels: tuple[int, ...]
    unit: float
    size: int
    bits: int


GRIDS = {
    "iq1s": Grid((-8, 0, 8), 1 / 8, 8, 2),
    "iq2xxs": Grid((8, 25, 43), 1 / 8, 8, 2),
    "iq2xs": Grid((8, 25, 43), 1 / 8, 8, 2),
    "iq2s": Grid((8, 25, 43), 1 / 8, 8, 2),
    "iq3xxs": Grid((4, 12, 20, 28, 36, 44, 52, 62), 1 / 4, 4, 4),
    "iq3s": Grid((1, 3, 5, 7, 9, 11, 13, 15), 1.0, 4, 4),
}


def codebook_points(name: str) -> np.ndarray:
    """uint16 [points]: the packed levels of a grid's points in the order of their indices, the first weight's lowest."""
    with np.load(Path(__file__).with_name("codebooks.npz")) as file:
        return file[name]


@cache
def codebook_values(name: str) -> np.ndarray:
    """int64 [points, size]: the weights of a grid's points in multiples of its unit."""
    grid = GRIDS[name]
    levels = codebook_points(name)[:, None] >> grid.bits * np.arange(grid.size, dtype=np.uint16) & ((1 << grid.bits) - 1)
    return np.array(grid.levels)[levels]


@dataclass(frozen=True)
class Trellis:
    """The generator of the trellis types. From the start state `code + first` on, a state is the one before times `multiplier`
    (mod 2^32), and a value the sum of the state's four bytes, each cut to six bits, minus `mean`. size: values per start."""

    size: int
    first: int = 4096
    multiplier: int = 0xCBAC1FED
    kept_bits: int = 0x3F3F3F3F
    mean: int = 126

    def values(self, bits: int) -> np.ndarray:
        """int8 [2^bits, size]: the values that follow each start state."""
        state = np.arange(1 << bits, dtype=np.uint32) + np.uint32(self.first)
        values = np.empty((1 << bits, self.size), np.int8)
        for j in range(self.size):
            state *= np.uint32(self.multiplier)
            values[:, j] = (state & np.uint32(self.kept_bits)).view(np.uint8).reshape(-1, 4).sum(
                axis=1, dtype=np.int64
            ) - self.mean
        return values
