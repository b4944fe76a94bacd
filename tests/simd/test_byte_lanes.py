"""Operations on sixteen bytes, against numpy."""

import numba
import numpy as np
import pytest

from ggufmill.simd.block_reductions import has_nan
from ggufmill.simd.byte_lanes import (
    bytes_from_words,
    i8_to_float,
    load_bytes,
    load_u32,
    load_u64,
    lookup_bytes,
    low_bytes,
    nonzero,
    store_bytes,
    store_five_bits,
    store_nibbles,
    store_rounded,
    store_rounded_rows,
    store_truncated,
    transpose_bytes,
    truncated_nibbles,
)
from ggufmill.simd.lanes import load, select, store
from ggufmill.simd.scalar import ROUNDING_CONSTANT

ROW = np.random.default_rng(1).integers(0, 256, 80, np.uint8)


@numba.njit
def _arithmetic(row, other, out):
    a, b = load_bytes(row, 1), load_bytes(other, 0)
    store_bytes(out[0], 0, (a & b) | (a ^ 255) << 3)
    store_bytes(out[1], 0, a >> 5)
    store_bytes(out[2], 0, select(nonzero(a & 1), a, b))
    store_bytes(out[3], 0, lookup_bytes(a, b & 15))


def test_arithmetic_choice_and_permutation():
    out, other = np.empty((4, 16), np.uint8), ROW[40:56].copy()
    _arithmetic(ROW, other, out)
    a, b = ROW[1:17], other
    assert np.array_equal(out[0], (a & b) | ((a ^ 255) << 3).astype(np.uint8))
    assert np.array_equal(out[1], a >> 5)
    assert np.array_equal(out[2], np.where(a & 1, a, b))
    assert np.array_equal(out[3], a[b & 15])


@numba.njit
def _numbers(row, out):
    store(out[0], 0, i8_to_float(load_bytes(row, 3)))
    store(out[1], 0, i8_to_float(bytes_from_words(load_u64(row, 9), load_u64(row, 1))))


def test_bytes_become_numbers():
    out = np.empty((2, 16), np.float32)
    _numbers(ROW, out)
    assert np.array_equal(out[0], ROW[3:19].view(np.int8))
    assert np.array_equal(out[1], np.concatenate([ROW[9:17], ROW[1:9]]).view(np.int8))


@numba.njit
def _integers(row, at):
    return load_u32(row, at), load_u64(row, at)


def test_integers_at_odd_addresses():
    data = ROW.tobytes()
    assert _integers(ROW, 3) == (int.from_bytes(data[3:7], "little"), int.from_bytes(data[3:11], "little", signed=True))


@numba.njit
def _store_rows(y, out):
    a, b, c, d = load(y, 0), load(y, 16), load(y, 32), load(y, 48)
    e, f, g, h = load(y, 64), load(y, 80), load(y, 96), load(y, 112)
    store_rounded_rows(out, 3, a, b, c, d, e, f, g, h)


def test_rounded_rows_in_turn():
    y, out = np.random.default_rng(5).uniform(-127, 127, 128).astype(np.float32), np.zeros(133, np.int8)
    _store_rows(y, out.view(np.uint8))
    assert np.array_equal(out[3:131].reshape(4, 8, 4), np.rint(y).reshape(8, 4, 4).transpose(1, 0, 2))
    assert not out[[0, 1, 2, 131, 132]].any()


@numba.njit
def _round(y, out):
    store_bytes(out, 0, low_bytes(load(y, 0) + ROUNDING_CONSTANT))


def test_low_bytes_of_shifted_numbers_are_rounded_ties_to_even():
    y = np.array([-127, -126.5, -125.5, -1.5, -0.5, -0.2, 0, 0.5, 0.7, 1.5, 2.5, 3, 100.4, 126.5, 127, -3.5], np.float32)
    out = np.empty(16, np.uint8)
    _round(y, out)
    assert np.array_equal(out.view(np.int8), np.rint(y))


@numba.njit
def _pack(y, out, sums):
    a, b, c, d = load(y, 0), load(y, 16), load(y, 32), load(y, 48)
    store(sums, 0, store_rounded(out, 0, a, b, c, d))
    store_truncated(out, 64, 99, a, b, c, d)
    store_bytes(out, 131, truncated_nibbles(abs(a), abs(b)))


def test_bytes_of_four_vectors_and_nibbles_of_two():
    y = np.random.default_rng(3).uniform(-31, 31, 64).astype(np.float32)
    out, sums = np.empty(147, np.uint8), np.empty(16, np.float32)
    _pack(y, out, sums)
    assert np.array_equal(out[:64].view(np.int8), np.rint(y))
    assert sums.view(np.int32).sum() == np.rint(y).sum()
    assert np.array_equal(np.concatenate([out[64:96], out[99:131]]).view(np.int8), np.trunc(y))
    low, high = np.abs(y[:32]).astype(np.uint8).reshape(2, 16) & 15
    assert np.array_equal(out[131:], low | high << 4)


@numba.njit
def _nibbles(y, out):
    a, b, c, d = load(y, 0), load(y, 16), load(y, 32), load(y, 48)
    e, f, g, h = load(y, 64), load(y, 80), load(y, 96), load(y, 112)
    marks = store_nibbles(out, 1, 18, a, b, c, d, e, f, g, h)
    low, high, more_marks = store_five_bits(out, 80, 20, a, b, c, d, e, f, g, h)
    return low, high, has_nan(marks), has_nan(more_marks)


def test_nibbles_and_fifth_bits_of_four_pairs_are_limited_to_the_largest_code():
    y, out = np.random.default_rng(6).uniform(0, 32.9, 128).astype(np.float32), np.zeros(160, np.uint8)
    *fifths, marked, marked_fifths = _nibbles(y, out)
    fifths = np.array(fifths).view(np.uint64)
    assert (marked, marked_fifths) == (False, False)
    codes = y.astype(np.uint8).reshape(4, 2, 16)
    low = np.minimum(codes, 15)
    assert np.array_equal(out[1:73].reshape(4, 18)[:, :16], low[:, 0] | low[:, 1] << 4)
    codes = np.minimum(codes, 31)
    assert np.array_equal(out[80:160].reshape(4, 20)[:, :16], codes[:, 0] & 15 | (codes[:, 1] & 15) << 4)
    assert np.array_equal(np.unpackbits(fifths.view(np.uint8), bitorder="little").reshape(2, 4, 16), codes.swapaxes(0, 1) >> 4)
    assert not out[[0, 17, 18, 79, 96, 97, 98, 99]].any()


@pytest.mark.parametrize("place", [0, 17, 63, 64, 101, 127])
@pytest.mark.parametrize("value", [np.nan, -np.nan])
def test_nibbles_of_nan_are_marked(place, value):
    y = np.full(128, 31.5, np.float32)
    y[place] = value
    assert _nibbles(y, np.zeros(160, np.uint8))[2:] == (True, True)


@numba.njit
def _transpose(source, target):
    transpose_bytes(source, 5, target, 3, 18)


def test_lanes_of_bytes_become_runs():
    source, target = np.random.default_rng(4).integers(0, 256, 270, np.uint8), np.zeros(3 + 16 * 18, np.uint8)
    _transpose(source, target)
    expected = np.zeros((16, 18), np.uint8)
    expected[:, :16] = source[5:261].reshape(16, 16).T
    assert np.array_equal(target[3:], expected.reshape(-1))
    assert not target[:3].any()
