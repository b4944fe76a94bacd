"""The iq2 and iq3 types: magnitudes from a grid, separate signs, a scale code for 16 or 32 weights and a float16 scale for 256.

Layouts: docs/formats/layouts.md. The search is that of grid_search.py, with the weights of grid_weights.py; unlike llama.cpp's
encoders, these all work without importance too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....formats import TYPES
from ....simd.compile import kernel
from ....simd.lanes import LANES, load, mask_bits, mask_from_bits, reduce_min, select, splat, store, store_half
from ..codec import Codec
from ..float_range import f16_scales
from ..importance import importance_rows
from .codebooks import codebook, codes_to_grid_indices
from .grid_search import GROUP_2BIT, SUPERBLOCK, make_grid_search, nibble_tables, values_of_2bit_levels, values_of_4bit_levels
from .grid_weights import prepare_superblock

# The eight signs (bit set: negative) that a code of seven bits stands for: the eighth makes their parity even.
_SIGNS_OF_7_BITS = np.array([t | t.bit_count() % 2 << 7 for t in range(128)], np.uint8)


@kernel
def _split_signs(x, w, even_signs, signs):
    """Replaces x, float32, by its magnitudes and writes the signs (bit set: negative), uint8 [x.size / 8].

    even_signs: the number of negatives in a group of eight is made even by flipping the sign of the element of least w * |x|,
    whose magnitude becomes negative.
    """
    for j in range(0, x.size, LANES):
        magnitude = abs(load(x, j))
        bits = mask_bits(load(x, j) < 0)
        if even_signs:
            loss = load(w, j) * magnitude
            for half in range(2):
                group = 255 << (8 * half)
                parity = bits & group
                parity ^= parity >> 4
                parity ^= parity >> 2
                parity ^= parity >> 1
                if (parity >> (8 * half)) & 1:
                    in_group = mask_from_bits(group)
                    least_loss = reduce_min(select(in_group, loss, splat(np.inf)))
                    flipped = mask_bits(in_group & (loss == least_loss))
                    flipped &= -flipped
                    bits ^= flipped
                    magnitude = select(mask_from_bits(flipped), -magnitude, magnitude)
        store(x, j, magnitude)
        signs[j // 8], signs[j // 8 + 1] = bits & 255, bits >> 8


def _make_encoder(size: int, block: int) -> Any:
    search_superblock = make_grid_search(size, block)

    @kernel
    def encode_blocks(
        x, importance, sigma2_factor, even_signs, norm_share, trial_scales, trial_factors, trial_divisors, ranks, grid_index,
        neighbours, tables, bounds, grid_indices, signs, scales, d,
    ):  # fmt: skip
        """Encodes superblocks of x, float32 [rows, n].

        grid_indices  uint16 [superblocks, groups], out
        signs         uint8 [superblocks, 32], out: bit set for a negative element
        scales        uint8 [superblocks, blocks], out: scale codes
        d             uint16 [superblocks rounded up to a multiple of 16], out: float16 scales

        The other arguments are those of search_superblock in grid_search.py.
        """
        flat = x.reshape(-1)
        n = x.shape[1]
        w, magnitudes = np.empty(SUPERBLOCK, np.float32), np.empty(SUPERBLOCK, np.float32)
        fitted_scales = np.zeros(d.size, np.float32)
        for s in range(flat.size // SUPERBLOCK):
            amax = prepare_superblock(flat, importance, s * SUPERBLOCK, n, SUPERBLOCK, SUPERBLOCK, sigma2_factor, magnitudes, w)
            if amax == 0:
                grid_indices[s, :], signs[s, :], scales[s, :] = 0, 0, 0
                continue
            _split_signs(magnitudes, w, even_signs, signs[s])
            scale = search_superblock(
                magnitudes, w, norm_share, trial_scales, trial_factors, trial_divisors, ranks, grid_index, neighbours, tables,
                bounds, grid_indices[s], scales[s],
            )  # fmt: skip
            fitted_scales[s] = scale * amax
            codes_to_grid_indices(grid_indices[s], ranks, grid_index)
        for s in range(0, d.size, LANES):
            store_half(d, s, load(fitted_scales, s))

    return encode_blocks


_encode_8_16, _encode_8_32, _encode_4_32 = _make_encoder(8, 16), _make_encoder(8, 32), _make_encoder(4, 32)


# Kernels with variables of an enclosing function are not cached on disk; these, which call them, are.
@kernel
def _encode_8_16_kernel(*arguments):
    _encode_8_16(*arguments)


@kernel
def _encode_8_32_kernel(*arguments):
    _encode_8_32(*arguments)


@kernel
def _encode_4_32_kernel(*arguments):
    _encode_4_32(*arguments)


_ENCODERS = {(8, 16): _encode_8_16_kernel, (8, 32): _encode_8_32_kernel, (4, 32): _encode_4_32_kernel}


def _make_decoder(size: int) -> Any:
    values_of_levels, groups = values_of_2bit_levels if size == GROUP_2BIT else values_of_4bit_levels, LANES // size

    @kernel
    def decode_blocks(grid_indices, signs, scales, points, tables, out):
        """Values of superblocks from their fields -> out float32 [superblocks, 256].

        grid_indices: uint16 [superblocks, groups]; signs: uint8 [superblocks, 32]; scales: float32 [superblocks, blocks];
        points: packed levels of all grid points; tables: nibble_tables(...).
        """
        codes = np.empty(groups, np.uint16)
        block = SUPERBLOCK // scales.shape[1]
        for s in range(grid_indices.shape[0]):
            row = out[s]
            for h in range(SUPERBLOCK // LANES):
                for g in range(groups):
                    codes[g] = points[grid_indices[s, groups * h + g]]
                y = scales[s, LANES * h // block] * values_of_levels(codes, 0, tables)
                minus = mask_from_bits(np.int64(signs[s, 2 * h]) | np.int64(signs[s, 2 * h + 1]) << 8)
                store(row, LANES * h, select(minus, -y, y))

    return decode_blocks


_decode_8, _decode_4 = _make_decoder(8), _make_decoder(4)


@kernel
def _decode_8_kernel(*arguments):
    _decode_8(*arguments)


@kernel
def _decode_4_kernel(*arguments):
    _decode_4(*arguments)


_DECODERS = {8: _decode_8_kernel, 4: _decode_4_kernel}


@dataclass(frozen=True)
class _Fields:
    """What superblocks consist of, each [superblocks, ...]: grid indices uint16, signs (bit set: negative) and scale codes."""

    grid_indices: np.ndarray
    signs: np.ndarray
    scales: np.ndarray


def _signs_and_scales(fields: _Fields) -> np.ndarray:
    """For every 32 weights four sign codes of seven bits and a scale code of four bits: uint8 [superblocks, 8, 4]."""
    signs = fields.signs.reshape(-1, 8, 4).astype(np.uint32) & 127
    words = signs[..., 0] | signs[..., 1] << 7 | signs[..., 2] << 14 | signs[..., 3] << 21
    return (words | fields.scales.astype(np.uint32) << 28).astype("<u4")[..., None].view(np.uint8)


def _from_signs_and_scales(words: np.ndarray, points: np.ndarray) -> _Fields:
    words = np.ascontiguousarray(words).view("<u4")[..., 0]
    signs = _SIGNS_OF_7_BITS[words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127]
    return _Fields(points.reshape(len(points), -1).astype(np.uint16), signs.reshape(-1, 32), (words >> 28).astype(np.uint8))


def _pack_nibbles(codes: np.ndarray) -> np.ndarray:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _unpack_nibbles(bytes_: np.ndarray) -> np.ndarray:
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(len(bytes_), -1)


def _write_iq2_xxs(fields: _Fields, out: np.ndarray) -> None:
    blocks = out[:, 2:].reshape(-1, 8, 8)
    blocks[..., :4] = fields.grid_indices.reshape(-1, 8, 4)
    blocks[..., 4:] = _signs_and_scales(fields)


def _read_iq2_xxs(q: np.ndarray) -> _Fields:
    blocks = q[:, 2:].reshape(-1, 8, 8)
    return _from_signs_and_scales(blocks[..., 4:], blocks[..., :4])


def _write_iq3_xxs(fields: _Fields, out: np.ndarray) -> None:
    out[:, 2:66] = fields.grid_indices
    out[:, 66:] = _signs_and_scales(fields).reshape(-1, 32)


def _read_iq3_xxs(q: np.ndarray) -> _Fields:
    return _from_signs_and_scales(q[:, 66:].reshape(-1, 8, 4), q[:, 2:66])


def _write_iq2_xs(fields: _Fields, out: np.ndarray) -> None:
    words = fields.grid_indices | (fields.signs & 127).astype(np.uint16) << 9
    out[:, 2:66] = words.astype("<u2").view(np.uint8)
    out[:, 66:] = _pack_nibbles(fields.scales)


def _read_iq2_xs(q: np.ndarray) -> _Fields:
    words = np.ascontiguousarray(q[:, 2:66]).view("<u2")
    return _Fields((words & 511).astype(np.uint16), _SIGNS_OF_7_BITS[words >> 9], _unpack_nibbles(q[:, 66:]))


def _write_iq2_s(fields: _Fields, out: np.ndarray) -> None:
    high = (fields.grid_indices >> 8).astype(np.uint8).reshape(-1, 8, 4)
    out[:, 2:34] = fields.grid_indices & 255
    out[:, 34:66] = fields.signs
    out[:, 66:74] = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
    out[:, 74:] = _pack_nibbles(fields.scales)


def _read_iq2_s(q: np.ndarray) -> _Fields:
    high = (q[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 32)
    return _Fields(q[:, 2:34] | high.astype(np.uint16) << 8, q[:, 34:66], _unpack_nibbles(q[:, 74:]))


def _write_iq3_s(fields: _Fields, out: np.ndarray) -> None:
    out[:, 2:66] = fields.grid_indices & 255
    out[:, 66:74] = np.packbits((fields.grid_indices >> 8).astype(np.uint8), axis=1, bitorder="little")
    out[:, 74:106] = fields.signs
    out[:, 106:] = _pack_nibbles(fields.scales)


def _read_iq3_s(q: np.ndarray) -> _Fields:
    high = np.unpackbits(q[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    return _Fields(q[:, 2:66] | high << 8, q[:, 74:106], _unpack_nibbles(q[:, 106:]))


def _trial_scales(lowest: float, ratio: float) -> np.ndarray:
    """Trial scales for a block with an amax of 1: 1 / `lowest` and smaller ones."""
    return (1 / (lowest * ratio ** np.arange(LANES))).astype(np.float32)


# Arguments of search_superblock, two of them by the size of a group. The largest scale of a superblock, of code 15, is 31 d.
_TRIAL_SCALES = {8: _trial_scales(3.6, 1.13), 4: _trial_scales(9, 1.1)}
_TRIAL_FACTORS = {8: np.array([1], np.float32), 4: np.array([0.96, 1.03], np.float32)}
_TRIAL_DIVISORS = (24 + np.arange(LANES)).astype(np.float32)


@dataclass(frozen=True)
class _GridType:
    """An iq2 or iq3 type.

    codebook       name of its grid
    block          elements per scale code
    even_signs     whether the eighth sign of a group is implied by even parity
    sigma2_factor  of mean(x^2) in the weights
    norm_share     see grid_search.norm_corrected_scale
    write, read    between _Fields and superblocks as bytes; write leaves out the float16 scale in front
    """

    name: str
    codebook: str
    block: int
    even_signs: bool
    sigma2_factor: float
    norm_share: float
    write: Callable[[_Fields, np.ndarray], None]
    read: Callable[[np.ndarray], _Fields]

    def encode(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        tensor_type, book = TYPES[self.name], codebook(self.codebook)
        superblocks = x.size // SUPERBLOCK
        grid_indices = np.empty((superblocks, SUPERBLOCK // book.size), np.uint16)
        signs = np.empty((superblocks, SUPERBLOCK // 8), np.uint8)
        scales = np.empty((superblocks, SUPERBLOCK // self.block), np.uint8)
        d = np.empty(superblocks + -superblocks % LANES, np.uint16)
        bounds = ((book.levels[1:] + book.levels[:-1]) / 2)[[0, 1, -1]]
        _ENCODERS[book.size, self.block](
            x, importance_rows(importance), np.float32(self.sigma2_factor), self.even_signs, np.float32(self.norm_share),
            _TRIAL_SCALES[book.size], _TRIAL_FACTORS[book.size], _TRIAL_DIVISORS, book.ranks, book.grid_index,
            book.neighbours, nibble_tables(book), bounds, grid_indices, signs, scales, d,
        )  # fmt: skip
        out = np.empty((superblocks, tensor_type.block_bytes), np.uint8)
        out[:, :2] = d[:superblocks, None].astype("<u2").view(np.uint8)
        self.write(_Fields(grid_indices, signs, scales), out)
        return out.reshape(len(x), -1)

    def decode(self, q: np.ndarray, n: int) -> np.ndarray:
        """uint8 [rows, row_bytes] -> float32 [rows, n]: (2 * code + 1) * d * level, llama.cpp's formula up to powers of two."""
        blocks = q.reshape(-1, TYPES[self.name].block_bytes)
        fields, book = self.read(blocks), codebook(self.codebook)
        scales = f16_scales(blocks)[:, None] * (2 * fields.scales.astype(np.float32) + 1)
        out = np.empty((len(blocks), SUPERBLOCK), np.float32)
        signs = np.ascontiguousarray(fields.signs)
        _DECODERS[book.size](fields.grid_indices, signs, scales, book.points, nibble_tables(book), out)
        return out.reshape(-1, n)


_TYPES = (
    _GridType("iq2_xxs", "iq2xxs", 32, True, 1.0, 0.5, _write_iq2_xxs, _read_iq2_xxs),
    _GridType("iq2_xs", "iq2xs", 16, True, 1.0, 0.5, _write_iq2_xs, _read_iq2_xs),
    _GridType("iq2_s", "iq2s", 16, False, 2.0, 0.0, _write_iq2_s, _read_iq2_s),
    _GridType("iq3_xxs", "iq3xxs", 32, True, 2.0, 0.0, _write_iq3_xxs, _read_iq3_xxs),
    _GridType("iq3_s", "iq3s", 32, False, 2.0, 0.0, _write_iq3_s, _read_iq3_s),
)
CODECS: dict[str, Codec] = {t.name: Codec(t.encode, t.decode) for t in _TYPES}
