"""Importance as the kernels take it, and the guard for blocks without usable importance."""

import numba
import numpy as np
import pytest

from ggufmill.quantize.codecs.importance import NO_IMPORTANCE, guard_importance, importance_rows

RNG = np.random.default_rng(4)
X = RNG.standard_normal((3, 128)).astype(np.float32)
QW = RNG.random(128, np.float32) + np.float32(0.1)


def test_no_importance_has_no_rows():
    assert importance_rows(None) is NO_IMPORTANCE
    assert guard_importance(X, None, 32) is NO_IMPORTANCE
    assert importance_rows(QW).shape == (1, 128)


def test_encoders_are_compiled_for_one_kind_of_importance():
    given = None, QW.repeat(2), np.zeros(256, np.float32)
    assert len({numba.typeof(importance_rows(importance)) for importance in given}) == 1
    assert QW.flags.writeable


def test_guard_leaves_other_blocks():
    assert np.array_equal(guard_importance(X, QW, 32), QW[None])


@pytest.mark.parametrize("block", [16, 32])
def test_guard_of_a_block_without_importance_in_every_row(block):
    qw = QW.copy()
    qw[64 : 64 + block] = 0
    got = guard_importance(X, qw, block)
    want = np.tile(QW, (3, 1))
    want[:, 64 : 64 + block] = 1e-9
    assert np.array_equal(got, want)


def test_guard_of_a_block_of_zeros_in_its_row_only():
    x = X.copy()
    x[1, :32] = 0
    got = guard_importance(x, QW, 32)
    want = np.tile(QW, (3, 1))
    want[1, :32] = 1e-9
    assert np.array_equal(got, want)


def test_guard_where_importance_and_weights_do_not_overlap():
    x, qw = X.copy(), QW.copy()
    x[2, :16] = 0
    qw[16:32] = 0
    assert np.all(guard_importance(x, qw, 32)[2, :32] == np.float32(1e-9))
    assert np.array_equal(guard_importance(x, qw, 32)[0], qw)
