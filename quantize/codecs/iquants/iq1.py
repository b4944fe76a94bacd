"""The iq1 types: levels -1, 0, 1 by eights from one codebook, moved by an eighth up or down, and scales of three or four bits.

iq1_s and iq1_m have a float16 over 256 weights; iq1_s_r4 and iq1_m_r4 are encodings of their own, of four interleaved rows
with a float16 each. Layouts: spec C.2 and, for the standard types, the decoders of the gguf package. The search is that of
iq1_search.py; weights as in grid_weights.py, with factors and spans of spec D.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....formats import TYPES
from ....simd.compile import kernel
from ....simd.lanes import LANES, load, mask_from_bits, select, splat, store, store_half
from ..importance import importance_rows
from ..registry import Codec, empty_rows
from .codebooks import codebook
from .grid_search import SUPER, patterns, values_of_eights
from .grid_weights import NOTHING, inverse_of_greatest, peak_of, take_weights
from .iq1_decode import BOOK, decode_iq1_m, decode_iq1_s, level_tables
from .iq1_search import SHIFT, ZERO, make_search

_ROWS = 4  # of a group of the interleaved types


def _make_encoder(block: int, shared: int) -> Any:
    search_levels = make_search(block, shared)

    @kernel
    def encode_units(
        x, importance, unit, span, factor, share, steps, tries, base, step, top, ranks, index, near, plus, minus,
        points, signs, scales, d,
    ):  # fmt: skip
        """Encodes units of `unit` elements of x, float32 [rows, n]: points uint16 [units, unit / 8], signs uint8 [units, unit /
        8], scale codes uint8 [units, unit / block], d as float16 in uint16 [units made up to a multiple of 16]. The mean square
        in the weights is over `span` elements; the rest as in search_levels."""
        flat = x.reshape(-1)
        n = x.shape[1]
        w, near_one = np.empty(unit, np.float32), np.empty(unit, np.float32)
        found = np.zeros(d.size, np.float32)
        for u in range(flat.size // unit):
            start = u * unit
            peak = peak_of(flat[start : start + unit])
            if peak < NOTHING:
                points[u, :] = index[np.intp(ranks[0, ZERO & 255]) + np.intp(ranks[1, ZERO >> 8])]
                signs[u, :], scales[u, :] = 0, 0
                continue
            over = np.float32(1) / peak
            inverse = inverse_of_greatest(importance, start, n, unit)
            for j in range(0, unit, span):
                take_weights(flat, over, importance, inverse, start + j, n, span, factor, w[j : j + span])
            for j in range(0, unit, LANES):
                store(near_one, j, load(flat, start + j) * over)
            fitted = search_levels(
                near_one, w, share, steps, tries, base, step, top, ranks, near, plus, minus, points[u], signs[u], scales[u]
            )
            found[u] = fitted * peak
            for g in range(points.shape[1]):
                code = points[u, g]
                points[u, g] = index[np.intp(ranks[0, code & 255]) + np.intp(ranks[1, code >> 8])]
        for u in range(0, d.size, LANES):
            store_half(d, u, load(found, u))

    return encode_units


_encode_s, _encode_m = _make_encoder(32, 32), _make_encoder(16, 8)


# A kernel with variables of an enclosing function is not kept on disk: hence these, which are.
@kernel
def _shift_of_32(*arguments):
    _encode_s(*arguments)


@kernel
def _shift_of_8(*arguments):
    _encode_m(*arguments)


@kernel
def _decode_units(points, signs, scales, packed, table, out):
    """points: uint16 [units, groups], their numbers; signs: uint8 [units, groups], not 0 where the shift is negative; scales:
    float32 [units, blocks]; packed: the packed levels of all points; table: patterns(...); out: float32 [units, n]."""
    codes = np.empty(2, np.uint16)
    block = out.shape[1] // scales.shape[1]
    low = mask_from_bits(255)
    for u in range(points.shape[0]):
        row = out[u]
        for h in range(row.size // LANES):
            codes[0], codes[1] = packed[points[u, 2 * h]], packed[points[u, 2 * h + 1]]
            shift1, shift2 = -SHIFT if signs[u, 2 * h] else SHIFT, -SHIFT if signs[u, 2 * h + 1] else SHIFT
            shift = select(low, splat(shift1), splat(shift2))
            store(row, LANES * h, scales[u, LANES * h // block] * (values_of_eights(codes, 0, table) + shift))


@dataclass(frozen=True)
class _Parts:
    """Of units (super-blocks or rows): numbers of points uint16 [units, n / 8], signs of shifts uint8 [units, n / 8] (1:
    negative), scale codes uint8 [units, n / block], float16 scales as uint16 [units]."""

    points: np.ndarray
    signs: np.ndarray
    scales: np.ndarray
    d: np.ndarray


def _words(bytes_: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bytes_).view("<u2")


def _as_bytes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).astype("<u2").view(np.uint8)


_TRIPLES, _FOURS = np.array([0, 3, 6, 9], np.uint16), np.array([0, 4, 8, 12], np.uint16)


def _shift_words(parts: _Parts) -> np.ndarray:
    """For each 32 weights the high bits of four points, the scale code and the sign of the shift, as uint16 [units, n / 32]."""
    high = ((parts.points >> 8).reshape(len(parts.points), -1, 4) << _TRIPLES).sum(axis=2, dtype=np.uint16)
    return high | parts.scales.astype(np.uint16) << 12 | parts.signs[:, ::4].astype(np.uint16) << 15


def _from_shift_words(low: np.ndarray, words: np.ndarray, d: np.ndarray) -> _Parts:
    high = (words[..., None] >> _TRIPLES & 7).reshape(len(words), -1)
    points, scales = low | high << 8, (words >> 12 & 7).astype(np.uint8)
    return _Parts(points.astype(np.uint16), np.repeat((words >> 15).astype(np.uint8), 4, axis=1), scales, d)


def _as_nibbles(parts: _Parts) -> np.ndarray:
    """High bits of a point and sign of its shift, uint8 [units, n / 8]."""
    return (parts.points >> 8).astype(np.uint8) | parts.signs << 3


def _from_nibbles(low: np.ndarray, nibbles: np.ndarray, scales: np.ndarray, d: np.ndarray) -> _Parts:
    return _Parts(low | (nibbles & 7).astype(np.uint16) << 8, nibbles >> 3, scales, d)


def _halves(bytes_: np.ndarray) -> np.ndarray:
    """[..., k] -> [..., 2 k]: low nibbles before high ones."""
    return np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(*bytes_.shape[:-1], -1)


def _write_iq1_s(parts: _Parts) -> np.ndarray:
    return np.concatenate(
        [_as_bytes(parts.d[:, None]), (parts.points & 255).astype(np.uint8), _as_bytes(_shift_words(parts))], axis=1
    )


def _write_iq1_m(parts: _Parts) -> np.ndarray:
    nibbles = _as_nibbles(parts)
    scales = (parts.scales.reshape(-1, 4, 4).astype(np.uint16) << _TRIPLES).sum(axis=2, dtype=np.uint16)
    scales |= (parts.d[:, None] >> _FOURS & 15) << 12
    low = (parts.points & 255).astype(np.uint8)
    return np.concatenate([low, nibbles[:, 0::2] | nibbles[:, 1::2] << 4, _as_bytes(scales)], axis=1)


def _interleaved(a: np.ndarray, each: int) -> np.ndarray:
    """Rows of some array of so many entries per 32 weights: [rows, ...] -> [groups, n / 32, each, 4], rows innermost."""
    return a.reshape(-1, _ROWS, a.shape[1] // each, each).transpose(0, 2, 3, 1)


def _rows(a: np.ndarray) -> np.ndarray:
    """The inverse of _interleaved."""
    return a.transpose(0, 3, 1, 2).reshape(len(a) * _ROWS, -1)


def _with_scales(d: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Groups of four rows as bytes, [rows, row_bytes]: their scales, then blocks uint8 [groups, n / 32, bytes]."""
    groups = len(blocks)
    whole = np.concatenate([_as_bytes(d.reshape(groups, _ROWS)), blocks.reshape(groups, -1)], axis=1)
    return whole.reshape(groups * _ROWS, -1)


def _of_groups(q: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    whole = q.reshape(len(q) // _ROWS, -1)
    return _words(whole[:, : 2 * _ROWS]).reshape(-1), whole[:, 2 * _ROWS :].reshape(len(whole), n // 32, -1)


def _write_iq1_s_r4(parts: _Parts) -> np.ndarray:
    low = _interleaved((parts.points & 255).astype(np.uint8), 4)
    words = _as_bytes(_interleaved(_shift_words(parts), 1)[:, :, 0])
    return _with_scales(parts.d, np.concatenate([low.reshape(*low.shape[:2], -1), words], axis=2))


def _read_iq1_s_r4(q: np.ndarray, n: int) -> _Parts:
    d, blocks = _of_groups(q, n)
    low = _rows(blocks[..., :16].reshape(*blocks.shape[:2], 4, _ROWS))
    return _from_shift_words(low, _rows(_words(blocks[..., 16:])[:, :, None]), d)


def _write_iq1_m_r4(parts: _Parts) -> np.ndarray:
    low = _interleaved((parts.points & 255).astype(np.uint8), 4)
    nibbles, scales = _interleaved(_as_nibbles(parts), 4), _interleaved(parts.scales, 2)
    high = (nibbles[:, :, 0::2] | nibbles[:, :, 1::2] << 4).reshape(*low.shape[:2], -1)
    return _with_scales(
        parts.d, np.concatenate([low.reshape(*low.shape[:2], -1), high, scales[:, :, 0] | scales[:, :, 1] << 4], axis=2)
    )


def _read_iq1_m_r4(q: np.ndarray, n: int) -> _Parts:
    d, blocks = _of_groups(q, n)
    shape = blocks.shape[:2]
    low, packed = blocks[..., :16].reshape(*shape, 4, _ROWS), blocks[..., 16:24].reshape(*shape, 2, _ROWS)
    nibbles = np.stack([packed & 15, packed >> 4], axis=3).reshape(*shape, 4, _ROWS)
    scales = np.stack([blocks[..., 24:] & 15, blocks[..., 24:] >> 4], axis=2)
    return _from_nibbles(_rows(low), _rows(nibbles), _rows(scales), d)


def _by_parts(read: Callable[[np.ndarray, int], _Parts], base: int, step: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """The decoder of rows with scales d * (base + step * code)."""

    def decode(q: np.ndarray, n: int) -> np.ndarray:
        parts = read(q, n)
        scales = parts.d.view(np.float16).astype(np.float32)[:, None] * (base + step * parts.scales.astype(np.float32))
        out = empty_rows(len(q), n)
        _decode_units(parts.points, np.ascontiguousarray(parts.signs), scales, *level_tables(), out)
        return out

    return decode


# Trial scales of a block whose largest magnitude is 1.
_STEPS = (1 / (0.7 * 1.16 ** np.arange(LANES))).astype(np.float32)


@dataclass(frozen=True)
class _Type:
    """block: elements with a scale code; encode_units: the kernel for those; factor, span: of the weights; share: as in
    unshrunk; base, step, top: scales are d * (base + step * code), code 0 ... top; write: from parts to rows of bytes;
    decode: as of a codec."""

    name: str
    block: int
    encode_units: Callable[..., None]
    factor: float
    span: int
    share: float
    base: int
    step: int
    top: int
    write: Callable[[_Parts], np.ndarray]
    decode: Callable[[np.ndarray, int], np.ndarray]

    @property
    def by_row(self) -> bool:
        return TYPES[self.name].row_meta > 0

    def encode(self, x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        book = codebook(BOOK)
        unit = x.shape[1] if self.by_row else SUPER
        units = x.size // unit
        points, signs = np.empty((units, unit // 8), np.uint16), np.empty((units, unit // 8), np.uint8)
        scales, d = np.empty((units, unit // self.block), np.uint8), np.empty(units + -units % LANES, np.uint16)
        highest = self.base + self.step * self.top
        tries = (highest * 0.85 * 1.06 ** np.arange(LANES)).astype(np.float32)
        self.encode_units(
            x, importance_rows(importance), unit, self.span, np.float32(self.factor), np.float32(self.share), _STEPS, tries,
            np.float32(self.base), np.float32(self.step), np.float32(self.top), book.ranks, book.index, book.near,
            patterns(book, float(SHIFT)), patterns(book, -float(SHIFT)), points, signs, scales, d,
        )  # fmt: skip
        return self.write(_Parts(points, signs, scales, d[:units])).reshape(len(x), -1)


_ALL = (
    _Type("iq1_s", 32, _shift_of_32, 2.0, 256, 1.0, 1, 2, 7, _write_iq1_s, decode_iq1_s),
    _Type("iq1_m", 16, _shift_of_8, 1.5, 32, 1.0, 1, 2, 7, _write_iq1_m, decode_iq1_m),
    _Type("iq1_s_r4", 32, _shift_of_32, 1.5, 32, 0.8, 1, 2, 7, _write_iq1_s_r4,
          _by_parts(_read_iq1_s_r4, 1, 2)),
    _Type("iq1_m_r4", 16, _shift_of_8, 1.5, 32, 0.7, 0, 1, 15, _write_iq1_m_r4,
          _by_parts(_read_iq1_m_r4, 0, 1)),
)  # fmt: skip
CODECS: dict[str, Codec] = {kind.name: Codec(kind.encode, kind.decode) for kind in _ALL}
