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
    store_strided_words,
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
def _apart(row, out):
    store_strided_words(out, 2, 8, load_bytes(row, 0))


def test_fours_apart():
    out = np.zeros(40, np.uint8)
    _apart(ROW, out)
    want = np.zeros(40, np.uint8)
    for k in range(4):
        want[2 + 8 * k : 6 + 8 * k] = ROW[4 * k : 4 * k + 4]
    assert np.array_equal(out, want)


@numba.njit
def _round(y, out):
    store_bytes(out, 0, low_bytes(load(y, 0) + ROUNDING_CONSTANT))


def test_low_bytes_of_shifted_numbers_are_rounded_ties_to_even():
    y = np.array([-127, -126.5, -125.5, -1.5, -0.5, -0.2, 0, 0.5, 0.7, 1.5, 2.5, 3, 100.4, 126.5, 127, -3.5], np.float32)
    out = np.empty(16, np.uint8)
    _round(y, out)
    assert np.array_equal(out.view(np.int8), np.rint(y))
