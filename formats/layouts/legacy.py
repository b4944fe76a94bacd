"""Layouts of the types without a codebook and without nested scales: numbers, blocks of 32 with one scale, 8-bit rows, ternary.

Sources: llama.cpp (ggml-common.h), for the fork's own types ik_llama.cpp; written out in `docs/formats/layouts.md`.
"""

from __future__ import annotations

import numpy as np

from .description import SIGNED_BYTES, BlockLayout, consecutive, float16_at, high_bits, linear, strided
from .tables import E2M1_DOUBLED, HALF_UE4M3, IQ4_VALUES


def _number(name: str, width: int) -> BlockLayout:
    return BlockLayout(1, consecutive(0, 1, width), number=name)


def _block_of_32(codes: np.ndarray, table: np.ndarray, **fields) -> BlockLayout:
    """Blocks of 32 that begin with a float16 scale."""
    return BlockLayout(32, codes, table, d=float16_at(0), **fields)


# q6_0: byte 2 + j % 8 holds the high pairs of elements j, j + 16, j + 8 and j + 24 (j < 8), in this order.
_E = np.arange(32)
_Q6_0_HIGH = (8 * (2 + _E % 8) + 4 * (_E % 16 // 8) + 2 * (_E // 16))[:, None] + np.arange(2)

# iq1_bn: five base-3 digits in each of twelve bytes, digit j of byte 3 g + k for element 16 g + 5 k + j; the four elements
# 16 g + 15 share a thirteenth byte.
_IQ1_BN_BYTE = np.where(_J15 := np.arange(64) % 16 == 15, 12, np.arange(64) // 16 * 3 + np.arange(64) % 16 // 5)
_IQ1_BN_DIGIT = np.where(_J15, np.arange(64) // 16, np.arange(64) % 16 % 5)


def _tq1_0() -> BlockLayout:
    """Digit k of byte m is element m + size * k of an area: areas of 32 and 16 bytes with five digits, of 4 bytes with four."""
    areas = [(0, 32, 5), (32, 16, 5), (48, 4, 4)]
    byte = np.concatenate([first + np.tile(np.arange(size), digits) for first, size, digits in areas])
    digit = np.concatenate([np.repeat(np.arange(digits), size) for _, size, digits in areas])
    return BlockLayout(256, 8 * byte[:, None] + np.arange(8), linear(2, -1)[:3], digits=3**digit, d=float16_at(52))


def _interleaved_bytes(rows: int, head: int) -> np.ndarray:
    """256 signed bytes of each row of a group, after the rows' scales: four of row 0, four of row 1, ... [rows, 256, 8]."""
    row, e = np.arange(rows)[:, None], np.arange(256)
    return 8 * (head + 4 * rows * (e // 4) + 4 * row + e % 4)[:, :, None] + np.arange(8)


LAYOUTS: dict[str, BlockLayout] = {
    "f32": _number("f32", 32),
    "f16": _number("f16", 16),
    "bf16": _number("bf16", 16),
    "f64": _number("f64", 64),
    **{f"i{width}": _number(f"i{width}", width) for width in (8, 16, 32, 64)},
    "q4_0": _block_of_32(strided(2, 16, 4), linear(4, -8)),
    "q4_1": _block_of_32(strided(4, 16, 4), linear(4), offset=float16_at(2)),
    "q5_0": _block_of_32(high_bits(strided(6, 16, 4), consecutive(2, 32, 1)), linear(5, -16)),
    "q5_1": _block_of_32(high_bits(strided(8, 16, 4), consecutive(4, 32, 1)), linear(5), offset=float16_at(2)),
    "q6_0": _block_of_32(high_bits(strided(10, 16, 4), _Q6_0_HIGH), linear(6, -32)),
    "q8_0": _block_of_32(consecutive(2, 32), SIGNED_BYTES),
    "iq4_nl": _block_of_32(strided(2, 16, 4), IQ4_VALUES),
    "mxfp4": BlockLayout(32, strided(1, 16, 4), E2M1_DOUBLED, d=consecutive(0, 1), d_format="e8m0"),
    "nvfp4": BlockLayout(64, strided(4, 8, 4, areas=4), E2M1_DOUBLED, scales=consecutive(0, 4), levels=HALF_UE4M3),
    "q1_0_g128": BlockLayout(128, consecutive(2, 128, 1), np.array([-1, 1]), d=float16_at(0)),
    "q2_0": BlockLayout(64, consecutive(2, 64, 2), linear(2, -1), d=float16_at(0)),
    "tq1_0": _tq1_0(),
    "tq2_0": BlockLayout(256, strided(0, 32, 2, areas=2), linear(2, -1), d=float16_at(64)),
    "iq1_bn": BlockLayout(
        64,
        8 * _IQ1_BN_BYTE[:, None] + np.arange(8),
        linear(2, -1)[:3],
        digits=3 ** (4 - _IQ1_BN_DIGIT),
        row_scale="f16",
    ),
    "iq2_bn": BlockLayout(64, strided(0, 16, 2), linear(2, -1), row_scale="f32"),
    # The row scale of q8_KV is followed by the int32 sum of the row's codes.
    "q8_KV": BlockLayout(32, consecutive(0, 32), SIGNED_BYTES, row_scale="f32"),
    # Activations' formats, which have an id but no place in files of weights.
    "q8_1": _block_of_32(consecutive(4, 32), SIGNED_BYTES, sums=float16_at(2)),
    "q8_K": BlockLayout(
        256,
        consecutive(8, 256),
        SIGNED_BYTES,
        d=consecutive(0, 1, 32),
        d_format="f32",
        sums=np.concatenate([consecutive(4, 2, 16), consecutive(264, 16, 16)]),
    ),
    # Interleaved types that no plain type has the bits of.
    "q8_k_r8": BlockLayout(256, _interleaved_bytes(8, 16), SIGNED_BYTES, d=consecutive(0, 8, 16)[:, None]),
    "q8_k_r16": BlockLayout(256, _interleaved_bytes(16, 32), linear(8, -128), d=consecutive(0, 16, 16)[:, None]),
}
