"""Operations on sixteen bytes, against numpy."""

import numba
import numpy as np
import pytest

from ggufmill.simd.byte_lanes import (
    bits_of,
    choose,
    float_at,
    half_at,
    half_of,
    is_set,
    join_words,
    load_apart,
    load_bytes,
    low_bytes,
    nibbles_of,
    pairs_of,
    permute,
    signed,
    store_apart,
    store_bytes,
    unsigned,
    word16_at,
    word32_at,
    word64_at,
)
from ggufmill.simd.lanes import load, store
from ggufmill.simd.scalar import ROUNDER

ROW = np.random.default_rng(1).integers(0, 256, 80, np.uint8)


@numba.njit
def _arithmetic(row, other, out):
    a, b = load_bytes(row, 1), load_bytes(other, 0)
    store_bytes(out[0], 0, (a & b) | (a ^ 255) << 3)
    store_bytes(out[1], 0, a >> 5)
    store_bytes(out[2], 0, choose(is_set(a & 1), a, b))
    store_bytes(out[3], 0, permute(a, b & 15))


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
    store(out[0], 0, unsigned(load_bytes(row, 3)))
    store(out[1], 0, signed(load_bytes(row, 3)))
    store(out[2], 0, unsigned(nibbles_of(word64_at(row, 5))))
    store(out[3], 0, unsigned(pairs_of(word32_at(row, 5))))
    store(out[4], 0, unsigned(bits_of(word16_at(row, 5))))
    store(out[5], 0, unsigned(join_words(word64_at(row, 9), word64_at(row, 1))))


def test_bytes_and_fields_become_numbers():
    out = np.empty((6, 16), np.float32)
    _numbers(ROW, out)
    assert np.array_equal(out[0], ROW[3:19])
    assert np.array_equal(out[1], ROW[3:19].view(np.int8))
    for line, width in ((2, 4), (3, 2), (4, 1)):
        word = int.from_bytes(ROW[5:13].tobytes(), "little")
        assert out[line].tolist() == [word >> (width * lane) & ((1 << width) - 1) for lane in range(16)]
    assert np.array_equal(out[5], np.concatenate([ROW[9:17], ROW[1:9]]))


@numba.njit
def _scalars(row, at):
    return (
        word16_at(row, at),
        word32_at(row, at),
        word64_at(row, at),
        float_at(row, at),
        half_at(row, at),
        half_of(word16_at(row, at)),
    )


@pytest.mark.parametrize("value", [1.0, -0.0, 6e-8, 65504.0, -3.25e-5])
def test_numbers_at_odd_addresses(value):
    row = ROW[:12].copy()
    row[3:5] = np.array([value], np.float16).view(np.uint8)
    row[5:7] = 0x40, 0x3F
    word16, word32, word64, number, half, same = _scalars(row, 3)
    assert (word16, word32) == tuple(int.from_bytes(row[3 : 3 + size].tobytes(), "little") for size in (2, 4))
    assert word64 == int.from_bytes(row[3:11].tobytes(), "little", signed=True)
    assert np.float32(number) == row[3:7].copy().view(np.float32)[0]
    assert half == same == np.float16(value)
    assert np.signbit(half) == np.signbit(value)


@numba.njit
def _apart(row, out, back):
    store_apart(out, 2, 8, load_bytes(row, 0))
    store_bytes(back, 0, load_apart(out, 2, 8))


def test_fours_apart():
    out, back = np.zeros(40, np.uint8), np.empty(16, np.uint8)
    _apart(ROW, out, back)
    want = np.zeros(40, np.uint8)
    for k in range(4):
        want[2 + 8 * k : 6 + 8 * k] = ROW[4 * k : 4 * k + 4]
    assert np.array_equal(out, want)
    assert np.array_equal(back, ROW[:16])


@numba.njit
def _round(y, out):
    store_bytes(out, 0, low_bytes(load(y, 0) + ROUNDER))


def test_low_bytes_of_shifted_numbers_are_rounded_ties_to_even():
    y = np.array([-127, -126.5, -125.5, -1.5, -0.5, -0.2, 0, 0.5, 0.7, 1.5, 2.5, 3, 100.4, 126.5, 127, -3.5], np.float32)
    out = np.empty(16, np.uint8)
    _round(y, out)
    assert np.array_equal(out.view(np.int8), np.rint(y))
