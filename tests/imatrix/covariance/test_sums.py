"""Sums of products of 8-bit integers: against the same in numpy, to the last bit, and against float64."""

import numpy as np
import pytest

from ggufmill.errors import MillError
from ggufmill.imatrix.covariance.sums import Sums
from ggufmill.imatrix.windows import NotFiniteError
from ggufmill.quantize.covariance.matrix.triangles import DTYPES
from ggufmill.simd.workers import Workers


def inputs(n, columns, seed=0):
    """Correlated columns of different sizes, a column of zeros, one of tiny numbers and a token with outliers."""
    draw = np.random.default_rng(seed)
    mixed = draw.standard_normal((n, 8)) @ draw.standard_normal((8, columns)) + draw.standard_normal((n, columns))
    x = (mixed * draw.exponential(1, columns)).astype(np.float32)
    x[:, columns // 2] = 0
    x[:, columns // 3] = 1e-33
    x[n // 2] *= 50
    return x


def expected(x, block, weight=1):
    """The same sums in numpy: integers exactly, then scaled and added as float32, block after block."""
    totals = np.zeros((x.shape[1], x.shape[1]), np.float32)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        largest = np.abs(part).max(axis=0)
        largest[largest < 1e-30] = 0
        scales = largest / np.float32(127)
        inverses = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
        codes = np.rint(part * inverses).astype(np.int64)
        assert np.abs(codes).max() <= 127
        products = (codes.T @ codes).astype(np.float32)
        totals += products * (scales * np.float32(weight))[:, None] * scales
    return totals / np.float32(len(x) * weight)


@pytest.mark.parametrize("columns", [1, 16, 40, 64, 131, 200])
def test_every_bit_is_that_of_numpy(columns):
    x, sums = inputs(1100, columns), Sums("a", columns)
    sums.add(x, 1, Workers(1))
    covariance = sums.folded(DTYPES["f32"], Workers(1))
    upper = np.triu(expected(x, 512))
    assert covariance.tokens == 1100
    assert np.array_equal(np.triu(covariance.matrix), upper)
    assert np.array_equal(covariance.matrix, covariance.matrix.T)


def test_threads_and_sizes_of_passes_change_nothing():
    x, results = inputs(1500, 300), []
    for threads, step in ((1, 1500), (2, 77), (3, 512), (2, 1100)):
        sums, workers = Sums("a", 300), Workers(threads)
        for start in range(0, len(x), step):
            sums.add(x[start : start + step], 1, workers)
        results.append(sums.folded(DTYPES["f32"], workers).matrix)
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_rows_need_not_be_contiguous():
    x = inputs(700, 96)
    wide = np.zeros((700, 3, 96), np.float32)
    wide[:, 1] = x
    sums, strided = Sums("a", 96), Sums("a", 96)
    sums.add(x, 1, Workers(1))
    strided.add(wide[:, 1], 1, Workers(1))
    assert np.array_equal(sums.folded(DTYPES["f32"], Workers(1)).matrix, strided.folded(DTYPES["f32"], Workers(1)).matrix)


def test_weights_count_tokens_several_times():
    """A change of weight ends a block."""
    a, b, sums = inputs(300, 64), inputs(300, 64, seed=1), Sums("a", 64)
    sums.add(a, 1, Workers(1))
    sums.add(b, 3, Workers(1))
    covariance = sums.folded(DTYPES["f32"], Workers(1))
    assert covariance.tokens == 300 + 3 * 300
    both = (expected(a, 512) + 3 * expected(b, 512)) / 4
    np.testing.assert_allclose(covariance.matrix, np.triu(both) + np.triu(both, 1).T, rtol=1e-5)


def test_the_error_of_rounding_is_below_that_of_sampling():
    """Against float64: relative to the root mean squares of both columns."""
    x = inputs(4096, 128)
    sums = Sums("a", 128)
    sums.add(x, 1, Workers(2))
    exact = x.astype(np.float64).T @ x / len(x)
    roots = np.sqrt(np.maximum(np.diagonal(exact), 1e-60))
    error = (sums.folded(DTYPES["f32"], Workers(1)).matrix - exact) / np.outer(roots, roots)
    half = x[::2].astype(np.float64).T @ x[::2] / (len(x) // 2)
    sampling = (half - exact) / np.outer(roots, roots)
    used = roots > 1e-20
    assert np.abs(error[used][:, used]).max() < 5e-3
    assert np.sqrt(np.mean(error[used][:, used] ** 2)) < 0.05 * np.sqrt(np.mean(sampling[used][:, used] ** 2))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [5, 600])
def test_numbers_that_are_not_finite(value, rows):
    x = inputs(rows, 40)
    x[3, 37] = value
    with pytest.raises(NotFiniteError, match=r"the input of blk\.0\.x is not finite"):
        Sums("blk.0.x", 40).add(x, 1, Workers(1))


def test_sums_beyond_float32():
    sums = Sums("blk.0.x", 8)
    sums.add(np.full((600, 8), 3e19, np.float32), 1, Workers(1))
    with pytest.raises(MillError, match=r"blk\.0\.x: the sums of the squares of its inputs are too large for float32"):
        sums.folded(DTYPES["f32"], Workers(1))


def test_no_token():
    covariance = Sums("a", 24).folded(DTYPES["f32"], Workers(1))
    assert covariance.tokens == 0
    assert not covariance.matrix.any()
