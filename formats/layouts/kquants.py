"""Layouts of the k-quants: super-blocks of 256 with a scale code, and in q2_K, q4_K and q5_K a minimum, for 16 or 32 weights.

Source: llama.cpp (ggml-common.h and the decoders of the gguf package); written out in `docs/formats/layouts.md`.
"""

from __future__ import annotations

import numpy as np

from .description import SIGNED_BYTES, BlockLayout, consecutive, float16_at, high_bits, linear, strided

# q4_K and q5_K: eight scales and eight minima of six bits in the 12 bytes from 4 on. The first four scales are the low six bits
# of bytes 4 to 7, the first four minima those of bytes 8 to 11. Bytes 12 to 15 hold the low nibbles of the other scales and
# minima, whose high pairs are the top bits of bytes 4 to 11.
_BYTE = 8 * (4 + np.arange(12))[:, None]
_SIX_BIT_SCALES = high_bits(
    np.concatenate([_BYTE[0:4] + np.arange(4), _BYTE[8:12] + np.arange(4)]),
    np.concatenate([_BYTE[0:4] + np.arange(4, 6), _BYTE[0:4] + np.arange(6, 8)]),
)
_SIX_BIT_MINIMA = high_bits(
    np.concatenate([_BYTE[4:8] + np.arange(4), _BYTE[8:12] + np.arange(4, 8)]),
    np.concatenate([_BYTE[4:8] + np.arange(4, 6), _BYTE[4:8] + np.arange(6, 8)]),
)


def _with_six_bit_minima(codes: np.ndarray) -> BlockLayout:
    return BlockLayout(
        256,
        codes,
        linear(codes.shape[1]),
        d=float16_at(0),
        dmin=float16_at(2),
        scales=_SIX_BIT_SCALES,
        levels=linear(6),
        minima=_SIX_BIT_MINIMA,
    )


LAYOUTS: dict[str, BlockLayout] = {
    "q2_K": BlockLayout(
        256,
        strided(16, 32, 2, areas=2),
        linear(2),
        d=float16_at(80),
        dmin=float16_at(82),
        scales=consecutive(0, 16)[:, :4],
        levels=linear(4),
        minima=consecutive(0, 16)[:, 4:],
    ),
    "q3_K": BlockLayout(
        256,
        high_bits(strided(32, 32, 2, areas=2), strided(0, 32, 1)),
        linear(3, -4),
        d=float16_at(108),
        scales=high_bits(strided(96, 8, 4), strided(104, 4, 2)),
        levels=linear(6, -32),
    ),
    "q4_K": _with_six_bit_minima(strided(16, 32, 4, areas=4)),
    "q5_K": _with_six_bit_minima(high_bits(strided(48, 32, 4, areas=4), strided(16, 32, 1))),
    "q6_K": BlockLayout(
        256,
        high_bits(strided(0, 64, 4, areas=2), strided(128, 32, 2, areas=2)),
        linear(6, -32),
        d=float16_at(208),
        scales=consecutive(192, 16),
        levels=SIGNED_BYTES,
    ),
}
