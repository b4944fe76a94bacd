"""The Walsh-Hadamard transform of runs of a row, against the matrix of its definition."""

import numpy as np
import pytest

from ggufmill.runtime.backends.cpu.kernels.hadamard import transform_rows


def matrix(size):
    """Sylvester's, orthogonal."""
    out = np.ones((1, 1))
    while len(out) < size:
        out = np.kron([[1, 1], [1, -1]], out)
    return out / np.sqrt(size)


@pytest.mark.parametrize("blocks", [(1,), (2,), (8, 8, 8), (16,), (32, 4), (64, 64, 64), (512, 64), (4, 256), (128,)])
def test_each_run_is_multiplied_with_its_matrix(blocks):
    width = sum(blocks)
    x = np.random.default_rng(len(blocks)).standard_normal((5, width + 3)).astype(np.float32)
    expected, start = x.astype(np.float64), 0
    for size in blocks:
        expected[:, start : start + size] = expected[:, start : start + size] @ matrix(size)
        start += size
    found = x.copy()
    transform_rows(found, np.array(blocks, np.int64))
    assert np.abs(found - expected).max() < 1e-5
    assert np.array_equal(found[:, width:], x[:, width:])
    transform_rows(found, np.array(blocks, np.int64))
    assert np.abs(found - x).max() < 1e-5


def test_rows_that_end_before_the_last_run():
    x = np.random.default_rng(3).standard_normal((2, 32)).astype(np.float32)
    found = x.copy()
    transform_rows(found, np.array((32, 64), np.int64))
    assert np.abs(found - x @ matrix(32)).max() < 1e-5


def test_numbers_that_are_not_finite_stay_so():
    x = np.ones((1, 64), np.float32)
    x[0, 5] = np.inf
    transform_rows(x, np.array((32, 32), np.int64))
    assert not np.isfinite(x[0, :32]).any()
    assert np.isfinite(x[0, 32:]).all()
