"""The iq2 and iq3 types: magnitudes from a codebook, signs apart, a scale for 16 or 32 weights and a float16 over 256.

Layouts: spec C.0. The search is that of grid_search.py, with weights as in grid_weights.py: so, unlike the reference's, these
encoders all work without importance too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....formats import TYPES
from ....simd.compile import kernel
from ....simd.lanes import LANES, load, mask_from_bits, reduce_min, select, splat, store, store_half
from ..float_range import f16_scales
from ..importance import importance_rows
from ..iqk.scale_search import mask_bits
from ..registry import Codec
from .codebooks import codebook
from .grid_search import PAIRS, SUPER, make_search, patterns, values_of_eights, values_of_fours
from .grid_weights import NOTHING, inverse_of_greatest, peak_of, take_weights

# The eight signs (bit set: minus) that a code of seven bits stands for: the eighth makes the number of minuses even.
_SIGNS = np.array([t | t.bit_count() % 2 << 7 for t in range(128)], np.uint8)


@kernel
def _take_signs(x, over, w, even, magnitudes, signs):
    """Magnitudes of x * over and their signs (bit set: minus), uint8 [x.size / 8].

    even: the number of minuses in a group of eight is made even, by turning round the sign of least w * |x|; the magnitude
    of that element is negative.
    """
    for j in range(0, x.size, LANES):
        xj = load(x, j) * over
        magnitude = abs(xj)
        bits = mask_bits(xj < 0)
        if even:
            cost = load(w, j) * magnitude
            for half in range(2):
                group = 255 << (8 * half)
                parity = bits & group
                parity ^= parity >> 4
                parity ^= parity >> 2
                parity ^= parity >> 1
                if (parity >> (8 * half)) & 1:
                    inside = mask_from_bits(group)
                    least = reduce_min(select(inside, cost, splat(np.inf)))
                    chosen = mask_bits(inside & (cost == least))
                    chosen &= -chosen
                    bits ^= chosen
                    magnitude = select(mask_from_bits(chosen), -magnitude, magnitude)
        store(magnitudes, j, magnitude)
        signs[j // 8], signs[j // 8 + 1] = bits & 255, bits >> 8


def _make_encoder(size: int, block: int) -> Any:
    search_grid = make_search(size, block)

    @kernel
    def encode_blocks(
        x, importance, factor, even, share, steps, trials, tries, ranks, index, near, shapes, bounds, points, signs, scales, d
    ):
        """Encodes super-blocks of x, float32 [rows, n]: points uint16 [supers, groups], signs uint8 [supers, 32], scale codes
        uint8 [supers, blocks], d as float16 in uint16 [supers made up to a multiple of 16]. The rest as in search_grid."""
        flat = x.reshape(-1)
        n = x.shape[1]
        w, magnitudes = np.empty(SUPER, np.float32), np.empty(SUPER, np.float32)
        found = np.zeros(d.size, np.float32)
        for s in range(flat.size // SUPER):
            start = s * SUPER
            part = flat[start : start + SUPER]
            peak = peak_of(part)
            if peak < NOTHING:
                points[s, :], signs[s, :], scales[s, :] = 0, 0, 0
                continue
            over = np.float32(1) / peak
            inverse = inverse_of_greatest(importance, start, n, SUPER)
            take_weights(flat, over, importance, inverse, start, n, SUPER, factor, w)
            _take_signs(part, over, w, even, magnitudes, signs[s])
            fitted = search_grid(
                magnitudes, w, share, steps, trials, tries, ranks, index, near, shapes, bounds, points[s], scales[s]
            )
            found[s] = fitted * peak
            for g in range(points.shape[1]):
                code = points[s, g]
                points[s, g] = index[np.intp(ranks[0, code & 255]) + np.intp(ranks[1, code >> 8])]
        for s in range(0, d.size, LANES):
            store_half(d, s, load(found, s))

    return encode_blocks


_encode_8_16, _encode_8_32, _encode_4_32 = _make_encoder(8, 16), _make_encoder(8, 32), _make_encoder(4, 32)


# A kernel with variables of an enclosing function is not kept on disk: hence these, which are.
@kernel
def _eights_in_16(*arguments):
    _encode_8_16(*arguments)


@kernel
def _eights_in_32(*arguments):
    _encode_8_32(*arguments)


@kernel
def _fours_in_32(*arguments):
    _encode_4_32(*arguments)


_ENCODERS = {(8, 16): _eights_in_16, (8, 32): _eights_in_32, (4, 32): _fours_in_32}


def _make_decoder(size: int) -> Any:
    values, groups = values_of_eights if size == PAIRS else values_of_fours, LANES // size

    @kernel
    def decode_blocks(points, signs, scales, packed, table, out):
        """points: uint16 [supers, groups], their numbers; signs: uint8 [supers, 32]; scales: float32 [supers, blocks]; packed:
        the packed levels of all points; table: patterns(...); out: float32 [supers, 256]."""
        codes = np.empty(groups, np.uint16)
        block = SUPER // scales.shape[1]
        for s in range(points.shape[0]):
            row = out[s]
            for h in range(SUPER // LANES):
                for g in range(groups):
                    codes[g] = packed[points[s, groups * h + g]]
                y = scales[s, LANES * h // block] * values(codes, 0, table)
                minus = mask_from_bits(np.int64(signs[s, 2 * h]) | np.int64(signs[s, 2 * h + 1]) << 8)
                store(row, LANES * h, select(minus, -y, y))

    return decode_blocks


_decode_8, _decode_4 = _make_decoder(8), _make_decoder(4)


@kernel
def _decode_eights(*arguments):
    _decode_8(*arguments)


@kernel
def _decode_fours(*arguments):
    _decode_4(*arguments)


_DECODERS = {8: _decode_eights, 4: _decode_fours}


@dataclass(frozen=True)
class _Parts:
    """What a super-block is made of: [supers, ...] of point numbers (uint16), signs (uint8, bit set: minus), scale codes."""

    points: np.ndarray
    signs: np.ndarray
    scales: np.ndarray


def _as_words(parts: _Parts) -> np.ndarray:
    """Four sign codes of seven bits and a scale code, for every 32 weights: uint8 [supers, 8, 4]."""
    signs = parts.signs.reshape(-1, 8, 4).astype(np.uint32) & 127
    words = signs[..., 0] | signs[..., 1] << 7 | signs[..., 2] << 14 | signs[..., 3] << 21
    return (words | parts.scales.astype(np.uint32) << 28).astype("<u4")[..., None].view(np.uint8)


def _from_words(words: np.ndarray, points: np.ndarray) -> _Parts:
    words = np.ascontiguousarray(words).view("<u4")[..., 0]
    signs = _SIGNS[words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127]
    return _Parts(points.reshape(len(points), -1).astype(np.uint16), signs.reshape(-1, 32), (words >> 28).astype(np.uint8))


def _as_nibbles(codes: np.ndarray) -> np.ndarray:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _from_nibbles(bytes_: np.ndarray) -> np.ndarray:
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(len(bytes_), -1)


def _write_iq2_xxs(parts: _Parts, out: np.ndarray) -> None:
    rest = out[:, 2:].reshape(-1, 8, 8)
    rest[..., :4] = parts.points.reshape(-1, 8, 4)
    rest[..., 4:] = _as_words(parts)


def _read_iq2_xxs(q: np.ndarray) -> _Parts:
    rest = q[:, 2:].reshape(-1, 8, 8)
    return _from_words(rest[..., 4:], rest[..., :4])


def _write_iq3_xxs(parts: _Parts, out: np.ndarray) -> None:
    out[:, 2:66] = parts.points
    out[:, 66:] = _as_words(parts).reshape(-1, 32)


def _read_iq3_xxs(q: np.ndarray) -> _Parts:
    return _from_words(q[:, 66:].reshape(-1, 8, 4), q[:, 2:66])


def _write_iq2_xs(parts: _Parts, out: np.ndarray) -> None:
    words = parts.points | (parts.signs & 127).astype(np.uint16) << 9
    out[:, 2:66] = words.astype("<u2").view(np.uint8)
    out[:, 66:] = _as_nibbles(parts.scales)


def _read_iq2_xs(q: np.ndarray) -> _Parts:
    words = np.ascontiguousarray(q[:, 2:66]).view("<u2")
    return _Parts((words & 511).astype(np.uint16), _SIGNS[words >> 9], _from_nibbles(q[:, 66:]))


def _write_iq2_s(parts: _Parts, out: np.ndarray) -> None:
    high = (parts.points >> 8).astype(np.uint8).reshape(-1, 8, 4)
    out[:, 2:34] = parts.points & 255
    out[:, 34:66] = parts.signs
    out[:, 66:74] = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
    out[:, 74:] = _as_nibbles(parts.scales)


def _read_iq2_s(q: np.ndarray) -> _Parts:
    high = (q[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 32)
    return _Parts(q[:, 2:34] | high.astype(np.uint16) << 8, q[:, 34:66], _from_nibbles(q[:, 74:]))


def _write_iq3_s(parts: _Parts, out: np.ndarray) -> None:
    out[:, 2:66] = parts.points & 255
    out[:, 66:74] = np.packbits((parts.points >> 8).astype(np.uint8), axis=1, bitorder="little")
    out[:, 74:106] = parts.signs
    out[:, 106:] = _as_nibbles(parts.scales)


def _read_iq3_s(q: np.ndarray) -> _Parts:
    high = np.unpackbits(q[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    return _Parts(q[:, 2:66] | high << 8, q[:, 74:106], _from_nibbles(q[:, 106:]))


def _steps(lowest: float, ratio: float) -> np.ndarray:
    """Trial scales of a block whose largest magnitude is 1: that is `lowest` and more scales."""
    return (1 / (lowest * ratio ** np.arange(LANES))).astype(np.float32)


# Arguments of search_grid, two of them by the size of a group. The highest scale of a super-block is 31 d where its code is 15.
_STEPS = {8: _steps(3.6, 1.13), 4: _steps(9, 1.1)}
_TRIALS = {8: np.array([1], np.float32), 4: np.array([0.96, 1.03], np.float32)}
_TRIES = (24 + np.arange(LANES)).astype(np.float32)


@dataclass(frozen=True)
class _Type:
    """book: its codebook; block: elements per scale code; even: whether the eighth sign of a group is parity; factor: of
    mean(x^2) in the weights; share: as in unshrunk; write, read: between parts and super-blocks as bytes (write leaves the
    float16 at the front)."""

    name: str
    book: str
    block: int
    even: bool
    factor: float
    share: float
    write: Callable[[_Parts, np.ndarray], None]
    read: Callable[[np.ndarray], _Parts]

    def encode(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        kind, book = TYPES[self.name], codebook(self.book)
        supers = x.size // SUPER
        points = np.empty((supers, SUPER // book.size), np.uint16)
        signs, scales = np.empty((supers, SUPER // 8), np.uint8), np.empty((supers, SUPER // self.block), np.uint8)
        d = np.empty(supers + -supers % LANES, np.uint16)
        bounds = ((book.levels[1:] + book.levels[:-1]) / 2)[[0, 1, -1]]
        _ENCODERS[book.size, self.block](
            x, importance_rows(importance), np.float32(self.factor), self.even, np.float32(self.share), _STEPS[book.size],
            _TRIALS[book.size], _TRIES, book.ranks, book.index, book.near, patterns(book), bounds, points, signs, scales, d,
        )  # fmt: skip
        out = np.empty((supers, kind.block_bytes), np.uint8)
        out[:, :2] = d[:supers, None].astype("<u2").view(np.uint8)
        self.write(_Parts(points, signs, scales), out)
        return out.reshape(len(x), -1)

    def decode(self, q: np.ndarray, n: int) -> np.ndarray:
        """The decoders' (0.5 + code) * d, a power of two and 8 * level, in exact powers of two: (2 * code + 1) * d * level."""
        blocks = q.reshape(-1, TYPES[self.name].block_bytes)
        parts, book = self.read(blocks), codebook(self.book)
        scales = f16_scales(blocks)[:, None] * (2 * parts.scales.astype(np.float32) + 1)
        out = np.empty((len(blocks), SUPER), np.float32)
        signs = np.ascontiguousarray(parts.signs)
        _DECODERS[book.size](parts.points, signs, scales, book.points, patterns(book), out)
        return out.reshape(-1, n)


_ALL = (
    _Type("iq2_xxs", "iq2xxs", 32, True, 1.0, 0.5, _write_iq2_xxs, _read_iq2_xxs),
    _Type("iq2_xs", "iq2xs", 16, True, 1.0, 0.5, _write_iq2_xs, _read_iq2_xs),
    _Type("iq2_s", "iq2s", 16, False, 2.0, 0.0, _write_iq2_s, _read_iq2_s),
    _Type("iq3_xxs", "iq3xxs", 32, True, 2.0, 0.0, _write_iq3_xxs, _read_iq3_xxs),
    _Type("iq3_s", "iq3s", 32, False, 2.0, 0.0, _write_iq3_s, _read_iq3_s),
)
CODECS: dict[str, Codec] = {kind.name: Codec(kind.encode, kind.decode) for kind in _ALL}
