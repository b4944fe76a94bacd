"""Extremes of blocks and sums of bits, against numpy."""

import numpy as np
import pytest

from ggufmill.simd.block_reductions import (
    block_extremes,
    block_farthest,
    block_magnitude,
    has_nan,
    max_magnitude,
    max_of_eight,
    nan_bits,
    or_bits,
    reduce_max_magnitude,
    reduce_sum_bits,
    sum_bits,
)
from ggufmill.simd.compile import kernel
from ggufmill.simd.lanes import load, splat, store

X = np.random.default_rng(4).standard_normal(16 * 32 + 5).astype(np.float32)


@kernel
def _of_blocks(x, start, out):
    least, largest = block_extremes(x, start)
    store(out, 0, largest)
    store(out, 16, least)
    store(out, 32, block_magnitude(x, start))
    negative, positive = block_farthest(x, start)
    store(out, 48, positive)
    store(out, 64, negative)


def test_extremes_of_sixteen_blocks():
    out, blocks = np.empty(80, np.float32), X[5:].reshape(16, 32)
    _of_blocks(X, 5, out)
    extremes = [blocks.max(1), blocks.min(1)]
    assert np.array_equal(out, np.concatenate([*extremes, np.abs(blocks).max(1), *extremes]))


def test_where_all_have_one_sign_the_farthest_are_one_number():
    out = np.empty(80, np.float32)
    for sign in (np.float32(1), np.float32(-1)):
        blocks = np.copysign(X[5:], sign)
        _of_blocks(blocks, 0, out)
        assert np.array_equal(out[48:], np.tile(sign * np.abs(blocks).reshape(16, 32).max(1), 2))


def test_of_zeros_of_either_sign_the_same_place_counts_in_every_block():
    """Of a block's minimum the sign is stored: it must not depend on where among sixteen the block lies."""
    block = np.where(np.random.default_rng(2).random(32) < 0.5, np.float32(-0.0), np.float32(0))
    out = np.empty(80, np.float32)
    _of_blocks(np.tile(block, 16), 0, out)
    assert len(set(np.signbit(out[:32]))) == 1
    assert not np.signbit(out[32:64]).any()


@kernel
def _magnitude(x):
    return reduce_max_magnitude(max_magnitude(load(x, 16), max_magnitude(load(x, 0), splat(0))))


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, -9.0])
@pytest.mark.parametrize("place", [0, 15, 16, 31])
def test_magnitudes_keep_what_is_not_finite(value, place):
    x = X[:32].copy()
    x[place] = value
    assert np.array_equal(_magnitude(x), np.abs(x).max(), equal_nan=True)


@kernel
def _of_eight(x, out):
    a, b, c, d = load(x, 0), load(x, 16), load(x, 32), load(x, 48)
    e, f, g, h = load(x, 64), load(x, 80), load(x, 96), load(x, 112)
    store(out, 0, max_of_eight(a, b, c, d, e, f, g, h))


def test_the_largest_of_each_of_eight():
    x, out = np.abs(X[:128]), np.empty(16, np.float32)
    x[[37, 90]] = np.nan, np.inf
    _of_eight(x, out)
    assert np.array_equal(out, np.tile(x.reshape(8, 16).max(1), 2), equal_nan=True)


@kernel
def _bits(x):
    return reduce_sum_bits(sum_bits(load(x, 0), load(x, 16)))


def test_sums_of_bits():
    words = np.random.default_rng(5).integers(0, 1 << 20, 32).astype(np.int32)
    assert _bits(words.view(np.float32)) == words.sum()


@kernel
def _has_nan(x):
    return has_nan(or_bits(nan_bits(load(x, 0), load(x, 16)), splat(0)))


@pytest.mark.parametrize("place", [0, 15, 16, 31])
def test_nan_is_never_missed(place):
    x = X[:32].copy()
    x[[2, 20]] = np.inf, -np.inf
    assert not _has_nan(x)
    for value in (np.nan, -np.nan):
        x[place] = value
        assert _has_nan(x)
