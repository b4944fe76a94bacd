"""The iq1 types: levels -1, 0, 1 by eights from one grid, shifted by 1/8 up or down, and block scales of three or four bits.

iq1_s and iq1_m have a float16 scale per superblock of 256; iq1_s_r4 and iq1_m_r4 are encodings of their own, of four
interleaved rows with a float16 scale each (docs/formats/layouts.md and interleaved.md). The search is that of iq1_search.py,
with the weights of grid_weights.py; factors and spans of these are those of docs/formats/encoders.md (codebook i-quants).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....formats import TYPES
from ....simd.compile import kernel
from ....simd.lanes import LANES, load, mask_from_bits, select, splat, store, store_half
from ..codec import Codec, empty_rows
from ..importance import importance_rows
from .codebooks import codebook, codes_to_grid_indices
from .grid_search import SUPERBLOCK, nibble_tables, values_of_2bit_levels
from .grid_weights import prepare_superblock
from .iq1_decode import CODEBOOK, decode_iq1_m, decode_iq1_s, decoder_tables
from .iq1_search import SHIFT, ZERO_LEVELS, make_iq1_search

_GROUP_ROWS = 4  # of the interleaved types


def _make_encoder(block: int, shift_block: int) -> Any:
    search_superblock = make_iq1_search(block, shift_block)

    @kernel
    def encode_superblocks(
        x, importance, superblock, sigma2_span, sigma2_factor, norm_share, trial_scales, trial_divisors, base, step, max_code,
        ranks, grid_index, neighbours, tables_plus, tables_minus, grid_indices, signs, scales, d,
    ):  # fmt: skip
        """Encodes superblocks of `superblock` elements of x, float32 [rows, n].

        sigma2_span  elements over which the mean square in the weights is taken
        grid_indices uint16 [superblocks, superblock / 8], out
        signs        uint8 [superblocks, superblock / 8], out: 1 for a negative shift
        scales       uint8 [superblocks, superblock / block], out: scale codes
        d            uint16 [superblocks rounded up to a multiple of 16], out: float16 scales

        The other arguments are those of search_superblock in iq1_search.py.
        """
        flat = x.reshape(-1)
        n = x.shape[1]
        w, normalised = np.empty(superblock, np.float32), np.empty(superblock, np.float32)
        fitted_scales = np.zeros(d.size, np.float32)
        for s in range(flat.size // superblock):
            amax = prepare_superblock(
                flat, importance, s * superblock, n, superblock, sigma2_span, sigma2_factor, normalised, w
            )
            if amax == 0:
                grid_indices[s, :] = ZERO_LEVELS
                codes_to_grid_indices(grid_indices[s], ranks, grid_index)
                signs[s, :], scales[s, :] = 0, 0
                continue
            scale = search_superblock(
                normalised, w, norm_share, trial_scales, trial_divisors, base, step, max_code, ranks, neighbours, tables_plus,
                tables_minus, grid_indices[s], signs[s], scales[s],
            )  # fmt: skip
            fitted_scales[s] = scale * amax
            codes_to_grid_indices(grid_indices[s], ranks, grid_index)
        for s in range(0, d.size, LANES):
            store_half(d, s, load(fitted_scales, s))

    return encode_superblocks


_encode_iq1_s, _encode_iq1_m = _make_encoder(32, 32), _make_encoder(16, 8)


# Kernels with variables of an enclosing function are not cached on disk; these, which call them, are.
@kernel
def _encode_iq1_s_kernel(*arguments):
    _encode_iq1_s(*arguments)


@kernel
def _encode_iq1_m_kernel(*arguments):
    _encode_iq1_m(*arguments)


@kernel
def _decode_fields(grid_indices, signs, scales, points, tables, out):
    """Values of superblocks from their fields -> out float32 [superblocks, n].

    grid_indices: uint16 [superblocks, groups]; signs: uint8 [superblocks, groups], not 0 for a negative shift; scales: float32
    [superblocks, blocks]; points: packed levels of all grid points; tables: nibble_tables(...).
    """
    codes = np.empty(2, np.uint16)
    block = out.shape[1] // scales.shape[1]
    lower_lanes = mask_from_bits(255)
    for s in range(grid_indices.shape[0]):
        row = out[s]
        for h in range(row.size // LANES):
            codes[0], codes[1] = points[grid_indices[s, 2 * h]], points[grid_indices[s, 2 * h + 1]]
            shift1, shift2 = -SHIFT if signs[s, 2 * h] else SHIFT, -SHIFT if signs[s, 2 * h + 1] else SHIFT
            shift = select(lower_lanes, splat(shift1), splat(shift2))
            store(row, LANES * h, scales[s, LANES * h // block] * (values_of_2bit_levels(codes, 0, tables) + shift))


@dataclass(frozen=True)
class _Fields:
    """What superblocks (of interleaved types: rows) consist of.

    grid_indices  uint16 [superblocks, n / 8]
    signs         uint8 [superblocks, n / 8], 1 for a negative shift
    scales        uint8 [superblocks, n / block], scale codes
    d             uint16 [superblocks], float16 scales
    """

    grid_indices: np.ndarray
    signs: np.ndarray
    scales: np.ndarray
    d: np.ndarray


def _as_words(bytes_: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bytes_).view("<u2")


def _as_bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).astype("<u2").view(np.uint8)


_SHIFTS_3BIT, _SHIFTS_4BIT = np.array([0, 3, 6, 9], np.uint16), np.array([0, 4, 8, 12], np.uint16)


def _qh_words(fields: _Fields) -> np.ndarray:
    """uint16 [superblocks, n / 32]: the high bits of four grid indices, the scale code and the sign of the shift."""
    high = ((fields.grid_indices >> 8).reshape(len(fields.grid_indices), -1, 4) << _SHIFTS_3BIT).sum(axis=2, dtype=np.uint16)
    return high | fields.scales.astype(np.uint16) << 12 | fields.signs[:, ::4].astype(np.uint16) << 15


def _from_qh_words(low: np.ndarray, words: np.ndarray, d: np.ndarray) -> _Fields:
    high = (words[..., None] >> _SHIFTS_3BIT & 7).reshape(len(words), -1)
    points, scales = low | high << 8, (words >> 12 & 7).astype(np.uint8)
    return _Fields(points.astype(np.uint16), np.repeat((words >> 15).astype(np.uint8), 4, axis=1), scales, d)


def _qh_nibbles(fields: _Fields) -> np.ndarray:
    """uint8 [superblocks, n / 8]: the high bits of the grid index and the sign of the shift of each group."""
    return (fields.grid_indices >> 8).astype(np.uint8) | fields.signs << 3


def _from_qh_nibbles(low: np.ndarray, nibbles: np.ndarray, scales: np.ndarray, d: np.ndarray) -> _Fields:
    return _Fields(low | (nibbles & 7).astype(np.uint16) << 8, nibbles >> 3, scales, d)


def _write_iq1_s(fields: _Fields) -> np.ndarray:
    return np.concatenate(
        [_as_bytes(fields.d[:, None]), (fields.grid_indices & 255).astype(np.uint8), _as_bytes(_qh_words(fields))], axis=1
    )


def _write_iq1_m(fields: _Fields) -> np.ndarray:
    nibbles = _qh_nibbles(fields)
    scales = (fields.scales.reshape(-1, 4, 4).astype(np.uint16) << _SHIFTS_3BIT).sum(axis=2, dtype=np.uint16)
    scales |= (fields.d[:, None] >> _SHIFTS_4BIT & 15) << 12
    low = (fields.grid_indices & 255).astype(np.uint8)
    return np.concatenate([low, nibbles[:, 0::2] | nibbles[:, 1::2] << 4, _as_bytes(scales)], axis=1)


def _interleave(a: np.ndarray, each: int) -> np.ndarray:
    """A field of `each` entries per 32 weights: [rows, ...] -> [groups, n / 32, each, 4], rows innermost."""
    return a.reshape(-1, _GROUP_ROWS, a.shape[1] // each, each).transpose(0, 2, 3, 1)


def _deinterleave(a: np.ndarray) -> np.ndarray:
    """The inverse of _interleave."""
    return a.transpose(0, 3, 1, 2).reshape(len(a) * _GROUP_ROWS, -1)


def _join_groups(d: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Groups of four rows as bytes [rows, row_bytes]: their scales, then blocks uint8 [groups, n / 32, bytes]."""
    groups = len(blocks)
    rows = np.concatenate([_as_bytes(d.reshape(groups, _GROUP_ROWS)), blocks.reshape(groups, -1)], axis=1)
    return rows.reshape(groups * _GROUP_ROWS, -1)


def _split_groups(q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of _join_groups: (scales uint16 [rows], blocks)."""
    groups, d_bytes = q.reshape(len(q) // _GROUP_ROWS, -1), 2 * _GROUP_ROWS
    return _as_words(groups[:, :d_bytes]).reshape(-1), groups[:, d_bytes:].reshape(len(groups), n // 32, -1)


def _write_iq1_s_r4(fields: _Fields) -> np.ndarray:
    low = _interleave((fields.grid_indices & 255).astype(np.uint8), 4)
    words = _as_bytes(_interleave(_qh_words(fields), 1)[:, :, 0])
    return _join_groups(fields.d, np.concatenate([low.reshape(*low.shape[:2], -1), words], axis=2))


def _read_iq1_s_r4(q: np.ndarray, n: int) -> _Fields:
    d, blocks = _split_groups(q, n)
    low = _deinterleave(blocks[..., :16].reshape(*blocks.shape[:2], 4, _GROUP_ROWS))
    return _from_qh_words(low, _deinterleave(_as_words(blocks[..., 16:])[:, :, None]), d)


def _write_iq1_m_r4(fields: _Fields) -> np.ndarray:
    low = _interleave((fields.grid_indices & 255).astype(np.uint8), 4)
    nibbles, scales = _interleave(_qh_nibbles(fields), 4), _interleave(fields.scales, 2)
    high = (nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << 4).reshape(*low.shape[:2], -1)
    return _join_groups(
        fields.d, np.concatenate([low.reshape(*low.shape[:2], -1), high, scales[:, :, 0] | scales[:, :, 1] << 4], axis=2)
    )


def _read_iq1_m_r4(q: np.ndarray, n: int) -> _Fields:
    d, blocks = _split_groups(q, n)
    shape = blocks.shape[:2]
    low, packed = blocks[..., :16].reshape(*shape, 4, _GROUP_ROWS), blocks[..., 16:24].reshape(*shape, 2, _GROUP_ROWS)
    nibbles = np.stack([packed & 15, packed >> 4], axis=3).reshape(*shape, 4, _GROUP_ROWS)
    scales = np.stack([blocks[..., 24:] & 15, blocks[..., 24:] >> 4], axis=2)
    return _from_qh_nibbles(_deinterleave(low), _deinterleave(nibbles), _deinterleave(scales), d)


def _fields_decoder(
    read: Callable[[np.ndarray, int], _Fields], base: int, step: int
) -> Callable[[np.ndarray, int], np.ndarray]:
    """`Codec.decode` for a type whose block scales are d * (base + step * code)."""

    def decode(q: np.ndarray, n: int) -> np.ndarray:
        fields = read(q, n)
        scales = fields.d.view(np.float16).astype(np.float32)[:, None] * (base + step * fields.scales.astype(np.float32))
        out = empty_rows(len(q), n)
        _decode_fields(fields.grid_indices, np.ascontiguousarray(fields.signs), scales, *decoder_tables(), out)
        return out

    return decode


# Trial scales of a block with an amax of 1.
_TRIAL_SCALES = (1 / (0.7 * 1.16 ** np.arange(LANES))).astype(np.float32)


@dataclass(frozen=True)
class _Iq1Type:
    """An iq1 type and its encoder.

    block           elements per scale code
    encode_kernel   kernel for that block size
    sigma2_factor, sigma2_span  of the weights
    norm_share      see grid_search.norm_corrected_scale
    base, step, max_code  block scales are d * (base + step * code), code 0 ... max_code
    write           _Fields -> uint8 [rows, row_bytes]
    decode          as Codec.decode
    """

    name: str
    block: int
    encode_kernel: Callable[..., None]
    sigma2_factor: float
    sigma2_span: int
    norm_share: float
    base: int
    step: int
    max_code: int
    write: Callable[[_Fields], np.ndarray]
    decode: Callable[[np.ndarray, int], np.ndarray]

    @property
    def has_row_scale(self) -> bool:
        return TYPES[self.name].row_meta > 0

    def encode(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        book = codebook(CODEBOOK)
        superblock = x.shape[1] if self.has_row_scale else SUPERBLOCK
        superblocks = x.size // superblock
        grid_indices, signs = (
            np.empty((superblocks, superblock // 8), np.uint16),
            np.empty((superblocks, superblock // 8), np.uint8),
        )
        scales = np.empty((superblocks, superblock // self.block), np.uint8)
        d = np.empty(superblocks + -superblocks % LANES, np.uint16)
        max_scale = self.base + self.step * self.max_code
        trial_divisors = (max_scale * 0.85 * 1.06 ** np.arange(LANES)).astype(np.float32)
        self.encode_kernel(
            x, importance_rows(importance), superblock, self.sigma2_span, np.float32(self.sigma2_factor),
            np.float32(self.norm_share), _TRIAL_SCALES, trial_divisors, np.float32(self.base), np.float32(self.step),
            np.float32(self.max_code), book.ranks, book.grid_index, book.neighbours,
            nibble_tables(book, float(SHIFT)), nibble_tables(book, -float(SHIFT)), grid_indices, signs, scales, d,
        )  # fmt: skip
        return self.write(_Fields(grid_indices, signs, scales, d[:superblocks])).reshape(len(x), -1)


_TYPES = (
    _Iq1Type("iq1_s", 32, _encode_iq1_s_kernel, 2.0, 256, 1.0, 1, 2, 7, _write_iq1_s, decode_iq1_s),
    _Iq1Type("iq1_m", 16, _encode_iq1_m_kernel, 1.5, 32, 1.0, 1, 2, 7, _write_iq1_m, decode_iq1_m),
    _Iq1Type("iq1_s_r4", 32, _encode_iq1_s_kernel, 1.5, 32, 0.8, 1, 2, 7, _write_iq1_s_r4,
             _fields_decoder(_read_iq1_s_r4, 1, 2)),
    _Iq1Type("iq1_m_r4", 16, _encode_iq1_m_kernel, 1.5, 32, 0.7, 0, 1, 15, _write_iq1_m_r4,
             _fields_decoder(_read_iq1_m_r4, 0, 1)),
)  # fmt: skip
CODECS: dict[str, Codec] = {t.name: Codec(t.encode, t.decode) for t in _TYPES}
