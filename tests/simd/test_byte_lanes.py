"""Operations on sixteen bytes, against numpy."""

import numba
import numpy as np
import pytest

from ggufmill.simd.byte_lanes import (
    bytes_from_words,
    i8_to_float,
    load_bytes,
    load_f16,
    load_f32,
    load_u16,
    load_u32,
    load_u64,
    lookup_bytes,
    low_bytes,
    nonzero,
    store_bytes,
    store_strided_words,
    u8_to_float,
    unpack_1bit,
    unpack_2bit,
    unpack_4bit,
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
    store(out[0], 0, u8_to_float(load_bytes(row, 3)))
    store(out[1], 0, i8_to_float(load_bytes(row, 3)))
    store(out[2], 0, u8_to_float(unpack_4bit(load_u64(row, 5))))
    store(out[3], 0, u8_to_float(unpack_2bit(load_u32(row, 5))))
    store(out[4], 0, u8_to_float(unpack_1bit(load_u16(row, 5))))
    store(out[5], 0, u8_to_float(bytes_from_words(load_u64(row, 9), load_u64(row, 1))))


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
        load_u16(row, at),
        load_u32(row, at),
        load_u64(row, at),
        load_f32(row, at),
        load_f16(row, at),
    )


@pytest.mark.parametrize("value", [1.0, -0.0, 6e-8, 65504.0, -3.25e-5])
def test_numbers_at_odd_addresses(value):
    row = ROW[:12].copy()
    row[3:5] = np.array([value], np.float16).view(np.uint8)
    row[5:7] = 0x40, 0x3F
    word16, word32, word64, number, half = _scalars(row, 3)
    assert (word16, word32) == tuple(int.from_bytes(row[3 : 3 + size].tobytes(), "little") for size in (2, 4))
    assert word64 == int.from_bytes(row[3:11].tobytes(), "little", signed=True)
    assert np.float32(number) == row[3:7].copy().view(np.float32)[0]
    assert half == np.float16(value)
    assert np.signbit(half) == np.signbit(value)


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
