"""Operations on sixteen bytes, against numpy."""

import numba
import numpy as np

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
    store_low_bytes,
    store_words_of_rows,
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
def _words_of_rows(rows, out):
    a, b, c, d = load_bytes(rows, 0), load_bytes(rows, 16), load_bytes(rows, 32), load_bytes(rows, 48)
    e, f, g, h = load_bytes(rows, 64), load_bytes(rows, 80), load_bytes(rows, 96), load_bytes(rows, 112)
    store_words_of_rows(out, 3, a, b, c, d, e, f, g, h)


def test_words_of_rows_in_turn():
    rows, out = np.arange(128, dtype=np.uint8).reshape(8, 16), np.zeros(133, np.uint8)
    _words_of_rows(rows.reshape(-1), out)
    assert np.array_equal(out[3:131].reshape(4, 8, 4), rows.reshape(8, 4, 4).transpose(1, 0, 2))
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
def _pack(y, out):
    a, b, c, d = load(y, 0), load(y, 16), load(y, 32), load(y, 48)
    store_low_bytes(out, 0, a + ROUNDING_CONSTANT, b + ROUNDING_CONSTANT, c + ROUNDING_CONSTANT, d + ROUNDING_CONSTANT)
    store_bytes(out, 64, truncated_nibbles(abs(a), abs(b)))


def test_bytes_of_four_vectors_and_nibbles_of_two():
    y = np.random.default_rng(3).uniform(-31, 31, 64).astype(np.float32)
    out = np.empty(80, np.uint8)
    _pack(y, out)
    assert np.array_equal(out[:64].view(np.int8), np.rint(y))
    low, high = np.abs(y[:32]).astype(np.uint8).reshape(2, 16) & 15
    assert np.array_equal(out[64:], low | high << 4)


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
