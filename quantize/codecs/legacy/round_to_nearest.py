"""q4_0, q5_0, q4_1, q5_1 without importance: scale and minimum follow from the block's extremes, without a search.

See docs/formats/encoders.md (legacy types).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....formats import TYPES
from ....simd.block_reductions import block_extremes, block_farthest, has_nan, nan_bits, or_bits
from ....simd.byte_lanes import store_bytes, store_five_bits, store_nibbles, truncated_nibbles
from ....simd.compile import kernel
from ....simd.lanes import (
    LANES,
    fma_lanes,
    load,
    mask_bits,
    max_lanes,
    min_lanes,
    reduce_max,
    select,
    splat,
    store,
    store_half_pairs,
)
from ....simd.memory import address, keep_alive, prefetch_elements, store_word
from ..codec import Codec, Encoded, ItemEncoder
from ..float_range import NO_ROWS, amax_of, finite_amax, with_row
from ..row_decoder import row_decoder

BLOCK = 32
_BLOCKS = 4 * LANES  # whose scales are found together, before their codes: then no processor waits for one scale after another
_FLOATS = 2 * _BLOCKS + BLOCK * LANES  # of working memory: inverse scales, minima, a copy of less than sixteen blocks


@kernel
def round_to_nearest(row, max_code, has_min, out):
    """row float32 [elements] -> out uint8 [bytes]. max_code: largest code, 15 or 31; has_min: whether the type has a minimum.

    With a minimum the codes range from the smallest to the largest element. Without one the element of largest magnitude (the
    first on ties) gets code 0. Ties round up.
    """
    _round_row(row, max_code, has_min, np.zeros(_FLOATS, np.float32), np.zeros(_BLOCKS, np.uint32), out)


def _rows_kernel(max_code: int, has_min: bool) -> Callable[[np.ndarray, np.ndarray], tuple[float, float]]:
    """The kernel of one type: as `round_to_nearest`, x float32 [rows, n] -> out uint8 [rows, row_bytes]. Returns the least and
    the largest of the rows' largest magnitudes."""

    @kernel
    def round_rows_to_nearest(x, out):
        floats, words, range_ = np.zeros(_FLOATS, np.float32), np.zeros(_BLOCKS, np.uint32), NO_ROWS
        for r in range(x.shape[0]):
            range_ = with_row(range_, _round_row(x[r], max_code, has_min, floats, words, out[r]))
        return range_

    return round_rows_to_nearest


@kernel
def _round_row(row, max_code, has_min, floats, words, out):
    """floats, words: working memory, zeros at first. Returns the largest magnitude."""
    head_bytes = 4 if has_min else 2
    block_bytes = head_bytes + (max_code // 31) * 4 + BLOCK // 2
    shift, highest, largest = splat(0.5) if has_min else splat((max_code + 1) // 2 + 0.5), splat(max_code), splat(0)
    marks = splat(0)
    out_address, blocks = np.uint64(address(out)), row.size // BLOCK
    for first in range(0, blocks, _BLOCKS):
        count = min(_BLOCKS, blocks - first)
        amax = _store_scales(row, first, count, max_code, has_min, floats, words)
        largest = max_lanes(amax, largest)
        whole = count - count % 4
        for b in range(0, whole, 4):
            start, out_at = (first + b) * BLOCK, (first + b) * block_bytes
            x0, y0 = _steps(row, start, b, has_min, floats, shift)
            x1, y1 = _steps(row, start + BLOCK, b + 1, has_min, floats, shift)
            x2, y2 = _steps(row, start + 2 * BLOCK, b + 2, has_min, floats, shift)
            x3, y3 = _steps(row, start + 3 * BLOCK, b + 3, has_min, floats, shift)
            for k in range(4):
                # Whole words: what a type has no room for is written over by what follows.
                at = out_address + np.uint64(out_at + k * block_bytes)
                store_word(at, words[b + k])
            codes_at = out_at + block_bytes - BLOCK // 2
            if max_code == 15:
                marked = store_nibbles(out, codes_at, block_bytes, x0, y0, x1, y1, x2, y2, x3, y3)
            else:
                low, high, marked = store_five_bits(out, codes_at, block_bytes, x0, y0, x1, y1, x2, y2, x3, y3)
                for k in range(4):
                    fifth = np.uint32((low >> 16 * k) & 0xFFFF | ((high >> 16 * k) & 0xFFFF) << 16)
                    store_word(out_address + np.uint64(out_at + k * block_bytes + head_bytes), fifth)
            marks = or_bits(marked, marks)
        for b in range(whole, count):
            start, out_at = (first + b) * BLOCK, (first + b) * block_bytes
            x, y = _steps(row, start, b, has_min, floats, shift)
            marks = or_bits(nan_bits(x, y), marks)
            x, y = min_lanes(x, highest), min_lanes(y, highest)
            store_word(out_address + np.uint64(out_at), words[b])
            if max_code == 31:
                fifth = mask_bits(x >= 16) | mask_bits(y >= 16) << 16
                store_word(out_address + np.uint64(out_at + head_bytes), np.uint32(fifth))
            store_bytes(out, out_at + block_bytes - BLOCK // 2, truncated_nibbles(x, y))
    keep_alive(out)
    return amax_of(row, 0, row.size) if has_nan(marks) else reduce_max(largest)


@kernel
def _steps(row, start, b, has_min, floats, shift):
    """How many steps of block b's scale its two vectors, from row[start] on, are above code 0, and a half; none is below 0:
    elements are no less than the minimum, and no larger than half the scales' range. NaN for NaN, and where an element is
    infinite: then the inverse of the scale is 0."""
    x, y = load(row, start), load(row, start + LANES)
    prefetch_elements(row, start + _BLOCKS * BLOCK, BLOCK)
    if has_min:
        x, y = x - floats[_BLOCKS + b], y - floats[_BLOCKS + b]
    inverse = splat(floats[b])
    return fma_lanes(x, inverse, shift), fma_lanes(y, inverse, shift)


@kernel
def _store_scales(row, first, count, max_code, has_min, floats, words):
    """Inverse scales, minima (of types with a minimum) and both as float16 into the working memory, of blocks first ... first +
    count - 1 of a row. Lanes are sixteen blocks. Returns the largest magnitudes, if all elements are finite."""
    tile, amax = floats[2 * _BLOCKS :], splat(0)
    for b in range(0, count, LANES):
        begin = (first + b) * BLOCK
        if count - b >= LANES:
            low, high = block_extremes(row, begin) if has_min else block_farthest(row, begin)
        else:
            for i in range(0, tile.size, LANES):
                store(tile, i, load(row, begin + i) if i < (count - b) * BLOCK else splat(0))
            low, high = block_extremes(tile, 0) if has_min else block_farthest(tile, 0)
        store(floats, b, high)
        store(floats, _BLOCKS + b, low)
    # Apart from those, sixteen blocks would wait for the divisions of the sixteen before.
    for b in range(0, count, LANES):
        low, high = load(floats, _BLOCKS + b), load(floats, b)
        amax = max_lanes(max_lanes(high, -low), amax)
        if has_min:
            # Halved before subtracting: the difference of two huge numbers may be infinite.
            scale = (high / 2 - low / 2) / (np.float32(max_code) / 2)
        else:
            ties = mask_bits(high == -low)
            if ties:
                for lane in range(b, min(b + LANES, count)):
                    if ties >> (lane - b) & 1:
                        begin, magnitude = (first + lane) * BLOCK, -floats[_BLOCKS + lane]
                        floats[_BLOCKS + lane] = _first_of_magnitude(row, begin, magnitude)
                low = load(floats, _BLOCKS + b)
            scale = select(high > -low, high, low) / -((max_code + 1) // 2)
        nonzero = abs(scale) > np.float32(3e-39)  # the inverse of a smaller scale is infinite
        store(floats, b, select(nonzero, 1 / select(nonzero, scale, splat(1)), splat(0)))
        store_half_pairs(words, b, scale, low if has_min else splat(0))
    return amax


@kernel
def _first_of_magnitude(x, start, magnitude):
    """The first element of a block with this magnitude; of one that has none, for it is NaN somewhere, any."""
    i = start
    while i < start + BLOCK - 1 and abs(x[i]) != magnitude:
        i += 1
    return x[i]


def rounding_codec(
    name: str, max_code: int, has_min: bool, search: Callable[[np.ndarray, np.ndarray | None], np.ndarray]
) -> Codec:
    """The codec of a type that is rounded to nearest without importance; search: `Codec.encode` with importance."""

    round_rows = _rows_kernel(max_code, has_min)

    def encode_with_amax(x: np.ndarray, importance: np.ndarray | None) -> Encoded:
        if importance is not None:
            amax, range_ = finite_amax(x)
            return search(x, importance), amax, range_
        out = np.empty((len(x), TYPES[name].row_bytes(x.shape[1])), np.uint8)
        return out, None, round_rows(x, out)

    def encode(x: np.ndarray, importance: np.ndarray | None) -> np.ndarray:
        return encode_with_amax(x, None)[0] if importance is None else search(x, importance)

    items = ItemEncoder(search)
    return Codec(encode, row_decoder(name), encode_with_amax, rounds_without_importance=True, items=items)
