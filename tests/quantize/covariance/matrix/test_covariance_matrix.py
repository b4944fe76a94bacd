"""`Covariance`: damping, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ggufmill.errors import PlanError
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance


def _covariance(n: int, tokens: int) -> Covariance:
    x = np.random.default_rng(n).standard_normal((tokens, n)).astype(np.float32)
    return Covariance((x.T @ x / np.float32(tokens) + (x.T @ x).T / np.float32(tokens)) / np.float32(2), tokens)


@pytest.mark.parametrize(("tokens", "damping", "shrinkage"), [(32, 0.4, 1.2), (64, 0.2, 0.6), (38_400, 0.01, 0.001)])
def test_damping(tokens, damping, shrinkage):
    covariance = _covariance(64, tokens)
    assert covariance.damping == pytest.approx(damping)
    assert covariance.shrinkage == pytest.approx(shrinkage)
    added = covariance.damped() - covariance.matrix
    diagonal = np.diagonal(covariance.matrix)
    assert np.diagonal(added) == pytest.approx(damping * diagonal.mean() + shrinkage * diagonal, rel=1e-4)
    assert np.count_nonzero(added - np.diag(np.diagonal(added))) == 0


@pytest.mark.parametrize(("tokens", "enough"), [(0, False), (31, False), (32, True)])
def test_tokens_for_more_than_the_diagonal(tokens, enough):
    assert Covariance(np.eye(64, dtype=np.float32), tokens).has_enough_tokens is enough


@pytest.mark.parametrize("matrix", [np.ones((4, 5), np.float32), np.ones(4, np.float32), np.eye(4)])
def test_refuses_other_arrays(matrix):
    with pytest.raises(PlanError, match="square matrix of float32"):
        Covariance(matrix, 10)


@pytest.mark.parametrize(
    ("row", "column", "value", "message"),
    [(3, 5, np.nan, "infinite or NaN"), (3, 5, np.inf, "infinite or NaN"), (1, 2, 7, "not symmetric"), (4, 4, -1, "negative")],
)
def test_check(row, column, value, message):
    covariance = _covariance(8, 100)
    covariance.check()
    covariance.matrix[row, column] = value
    with pytest.raises(PlanError, match=message):
        covariance.check()
