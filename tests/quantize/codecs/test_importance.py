"""The weights of errors and the guard against dead blocks."""

import numpy as np
import pytest

from ggufmill.quantize.codecs.importance import NONE, as_rows, guarded, mean_square, weigh

RNG = np.random.default_rng(4)
X = RNG.standard_normal((3, 128)).astype(np.float32)
V = RNG.random(128, np.float32) + np.float32(0.1)


def test_no_importance_is_of_no_rows():
    assert as_rows(None) is NONE
    assert guarded(X, None, 32) is NONE
    assert as_rows(V).shape == (1, 128)


def test_live_blocks_keep_their_importance():
    assert np.array_equal(guarded(X, V, 32), V[None])


@pytest.mark.parametrize("block", [16, 32])
def test_a_block_without_importance_gets_some_in_every_row(block):
    v = V.copy()
    v[64 : 64 + block] = 0
    got = guarded(X, v, block)
    want = np.tile(V, (3, 1))
    want[:, 64 : 64 + block] = 1e-9
    assert np.array_equal(got, want)


def test_a_block_of_zeros_is_guarded_in_its_row_only():
    x = X.copy()
    x[1, :32] = 0
    got = guarded(x, V, 32)
    want = np.tile(V, (3, 1))
    want[1, :32] = 1e-9
    assert np.array_equal(got, want)


def test_a_block_counts_as_dead_when_importance_and_weights_do_not_meet():
    x, v = X.copy(), V.copy()
    x[2, :16] = 0
    v[16:32] = 0
    assert np.all(guarded(x, v, 32)[2, :32] == np.float32(1e-9))
    assert np.array_equal(guarded(x, v, 32)[0], v)


def test_weights_are_those_of_the_formula():
    w = np.empty(128, np.float32)
    sigma2 = mean_square(X[0])
    assert sigma2 == pytest.approx((X[0].astype(np.float64) ** 2).mean(), rel=1e-6)
    weigh(X[0], V, sigma2, w)
    np.testing.assert_allclose(w, V * np.sqrt(sigma2 + X[0] ** 2), rtol=1e-6)
