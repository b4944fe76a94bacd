"""Layouts of the i-quants with codebooks: codes number the points of a grid of eight or four weights.

Grids of the iq2 and iq3 types hold magnitudes, and signs are stored apart. The grid of the iq1 types holds -1, 0 and 1, to
which an eighth is added or, where a flag is set, subtracted. (iq4_nl is in legacy.py, iq4_xs in iqk.py.)

Sources: llama.cpp (ggml-common.h and the decoders of the gguf package), ik_llama.cpp for iq1_s_r4 and iq1_m_r4; written out in
`docs/formats/layouts.md` and `docs/formats/interleaved.md`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .description import BlockLayout, consecutive, float16_at, high_bits, linear, records
from .tables import GRIDS, IQ1_SHIFTS

_SIGN_CODES = (0, 7, 14, 21)  # first bits of the sign codes in a word of 32 bits, of which the last four are a scale code


def _grid_of_magnitudes(grid: str, codes: np.ndarray, scales: np.ndarray, **signs: Any) -> BlockLayout:
    """A scale is (2 code + 1) * d, in the grid's units."""
    return BlockLayout(
        256,
        codes,
        codebook=grid,
        unit=GRIDS[grid].unit,
        d=float16_at(0),
        scales=scales,
        levels=linear(4, 1, 2),
        **signs,
    )


_IQ1: dict[str, Any] = {"codebook": "iq1s", "unit": GRIDS["iq1s"].unit, "shifts": IQ1_SHIFTS}


def _iq1_s() -> BlockLayout:
    """For each 32 weights a word of 16 bits: the high bits of four codes, the scale code and the flag."""
    words = 8 * (34 + 2 * np.arange(8))[:, None]
    high = (words + 3 * np.arange(4)).reshape(-1, 1) + np.arange(3)
    return BlockLayout(
        256,
        high_bits(consecutive(2, 32), high),
        d=float16_at(0),
        scales=words + np.arange(12, 15),
        levels=linear(3, 1, 2),
        flags=words + 15,
        **_IQ1,
    )


def _iq1_s_r4() -> BlockLayout:
    """An encoding of its own, of 32 weights of four rows: low bytes of codes, then for each row a word as in iq1_s."""
    row, j = np.arange(4)[:, None, None], np.arange(4)[:, None]
    words = 8 * (16 + 2 * row)
    codes = np.concatenate([8 * (4 * j + row) + np.arange(8), words + 3 * j + np.arange(3)], axis=2)
    scales = words + np.arange(12, 15)
    return BlockLayout(32, codes, row_scale="f16", scales=scales, levels=linear(3, 1, 2), flags=words + 15, **_IQ1)


def _iq1_m() -> BlockLayout:
    """For each eight weights a nibble: three high bits of the code and the flag. Each of four words of 16 bits holds four scale
    codes of three bits and a quarter of d."""
    high, words, pair = consecutive(32, 32, 4), 8 * 48 + 16 * np.arange(4)[:, None], np.arange(16)[:, None]
    return BlockLayout(
        256,
        high_bits(consecutive(0, 32), high[:, :3]),
        d=(words + 12 + np.arange(4)).reshape(1, 16),
        scales=8 * 48 + 16 * (pair // 4) + 3 * (pair % 4) + np.arange(3),
        levels=linear(3, 1, 2),
        flags=high[:, 3:],
        **_IQ1,
    )


def _iq1_m_r4() -> BlockLayout:
    """An encoding of its own, of 32 weights of four rows: low bytes of codes, nibbles as in iq1_m, and scale codes of four bits
    that are not odd multiples."""
    row, j = np.arange(4)[:, None, None], np.arange(4)[:, None]
    high = 8 * (16 + 4 * (j // 2) + row) + 4 * (j % 2)
    codes = np.concatenate([8 * (4 * j + row) + np.arange(8), high + np.arange(3)], axis=2)
    scales = 8 * (24 + row) + 4 * np.arange(2)[:, None] + np.arange(4)
    return BlockLayout(32, codes, row_scale="f16", scales=scales, levels=linear(4), flags=high + 3, **_IQ1)


LAYOUTS: dict[str, BlockLayout] = {
    "iq2_xxs": _grid_of_magnitudes(
        "iq2xxs",
        records(2, 8, 8, (0, 8, 16, 24), 8),
        records(6, 8, 8, (28,), 4),
        sign_codes=records(6, 8, 8, _SIGN_CODES, 7),
    ),
    "iq2_xs": _grid_of_magnitudes(
        "iq2xs", records(2, 2, 32, (0,), 9), consecutive(66, 16, 4), sign_codes=records(2, 2, 32, (9,), 7)
    ),
    "iq2_s": _grid_of_magnitudes(
        "iq2s",
        high_bits(consecutive(2, 32), consecutive(66, 32, 2)),
        consecutive(74, 16, 4),
        signs=consecutive(34, 256, 1),
    ),
    "iq3_xxs": _grid_of_magnitudes(
        "iq3xxs", consecutive(2, 64), records(66, 4, 8, (28,), 4), sign_codes=records(66, 4, 8, _SIGN_CODES, 7)
    ),
    "iq3_s": _grid_of_magnitudes(
        "iq3s",
        high_bits(consecutive(2, 64), consecutive(66, 64, 1)),
        consecutive(106, 8, 4),
        signs=consecutive(74, 256, 1),
    ),
    "iq1_s": _iq1_s(),
    "iq1_m": _iq1_m(),
    "iq1_s_r4": _iq1_s_r4(),
    "iq1_m_r4": _iq1_m_r4(),
}
