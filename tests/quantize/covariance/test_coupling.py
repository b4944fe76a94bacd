"""Rows whose errors are weighed together by the curvature of their outputs: against plain numpy, and never worse."""

from __future__ import annotations

import numpy as np
import pytest
from covariances import covariance, random_rows, weights

from ggufmill.errors import PlanError
from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode
from ggufmill.quantize.codecs.codec import NonFiniteError
from ggufmill.quantize.covariance.coupling import ALONE, Coupling, couple, coupled_error
from ggufmill.quantize.covariance.descent.scalar_descent import feed_back
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance
from ggufmill.quantize.covariance.matrix.prepared import prepare
from ggufmill.quantize.covariance.refine import refinement_of, takes_covariance
from ggufmill.quantize.covariance.row_feedback import encode_coupled
from ggufmill.quantize.covariance.scalar_refinement import ScalarRefinement
from ggufmill.quantize.covariance.values import ScalarRows
from ggufmill.quantize.plain_rows import PlainRows

COVARIANCE_TYPES = [TYPES[name].name for name in TYPES if takes_covariance(TYPES[name]) and TYPES[name].codec is not None]
ROWS, COLUMNS = 72, 256


def coupled_rows(rows: int = ROWS, rank: int = 12, tokens: int = 5000):
    coupled = couple(Covariance(covariance(rows, rank, 3).matrix, tokens))
    assert coupled is not None
    return coupled


def loss(x: np.ndarray, q: np.ndarray, type_name: str, h: Covariance, a: np.ndarray) -> float:
    """tr(A R H R^T) in float64, both damped."""
    r = x.astype(np.float64) - decode(q, type_name, x.shape[1])
    return float(np.einsum("ij,jk,kl,il->", a.astype(np.float64), r, h.damped().astype(np.float64), r, optimize=True))


def test_factors():
    coupled = coupled_rows()
    a, lower = coupled.descent.shares.astype(np.float64), coupled.feedback.shares.astype(np.float64)
    assert np.array_equal(lower, np.tril(lower))
    assert np.array_equal(np.diagonal(lower), np.ones(ROWS))
    assert np.abs(lower * coupled.pivots @ lower.T - a).max() < 1e-5 * np.abs(a).max()
    assert np.allclose(coupled.descent.inverses, 1 / np.diagonal(a))


def test_few_tokens_couple_nothing():
    assert couple(Covariance(covariance(64, 8).matrix, 20)) is None
    assert couple(Covariance(np.zeros((64, 64), np.float32), 1000)) is None


def test_what_is_no_curvature_is_refused():
    matrix = covariance(64, 8).matrix.copy()
    matrix[3, 4] = np.nan
    with pytest.raises(PlanError, match="infinite or NaN"):
        couple(Covariance(matrix, 1000))


def feedback_in_numpy(w: np.ndarray, a: np.ndarray, h: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Weights rounded one by one, rows from the last on, columns from the first on, each with what those before it lost."""
    low = np.linalg.cholesky(a)
    low /= np.diagonal(low)
    flipped = np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    up = flipped / np.diagonal(flipped)
    values, errors = np.zeros_like(w), np.zeros_like(w)
    for i in range(len(w) - 1, -1, -1):
        for j in range(w.shape[1]):
            target = w[i, j] + low[i:, i] @ errors[i:, : j + 1] @ up[: j + 1, j]
            values[i, j] = levels[i, j][np.argmin(np.abs(levels[i, j] - target))]
            errors[i, j] = w[i, j] - values[i, j]
    return values


def test_feedback_over_both_axes():
    rows, n = 12, 128
    x, h, coupled = weights(rows, n), covariance(n, 40), coupled_rows(rows, 4)
    q = encode(x, "q4_0", h.diagonal)
    damped = prepare(h).damped
    assert damped is not None
    refinement = ScalarRefinement(x, ScalarRows.of(q, "q4_0"), damped, 1, coupled)
    refinement.round_in_order()
    d = refinement.rows.parameters()[0].repeat(32, axis=1).astype(np.float64)
    levels = d[..., None] * np.arange(-8, 8)
    expected = feedback_in_numpy(
        x.astype(np.float64), coupled.descent.shares.astype(np.float64), h.damped().astype(np.float64), levels
    )
    assert np.mean(np.abs(expected - refinement.values) > 1e-4 * np.abs(d)) < 0.01  # but for ties and float32


def test_feedback_without_shares_is_that_of_single_rows():
    x, h = weights(9, COLUMNS), covariance(COLUMNS, 40)
    damped = prepare(h).damped
    assert damped is not None
    identity = Coupling(np.eye(9, dtype=np.float32), np.ones(9, np.float32), True)
    results = []
    for coupling in (ALONE, identity):
        rows = ScalarRows.of(encode(x, "iq4_k", h.diagonal), "iq4_k")
        r = ScalarRefinement(x, rows, damped, 1)
        sums = np.zeros(len(x) * damped.size, np.float32)
        feed_back(coupling, x, *r._parameters(), damped.triangle, damped.size, sums, r.values, rows.codes)
        results.append(r.values)
    assert np.array_equal(*results)


# Vectors of 8 weights stand for those of 4 and 2 (iq3_s, iq3_xxs, iq4_kt, iq2_kl): the same code, which takes 6 s to compile.
@pytest.mark.slow(
    keep=[
        "1-q4_0",
        "1-iq2_k",
        "2-q4_K",
        "1-iq2_xxs",
        "1-iq2_kt",
        "0-[!i]*",
        "0-iq1*",
        "0-iq2_[xs]*",
        "0-*_k",
        "0-*_[nx][ls]",
        "0-*_ks",
        "0-iq[23]_kt",
    ]
)
@pytest.mark.parametrize("type_name", COVARIANCE_TYPES)
@pytest.mark.parametrize("effort", [0, 1, 2])
def test_the_loss_is_smaller_than_with_rows_by_themselves(type_name, effort):
    x, h, coupled = weights(ROWS, COLUMNS), covariance(COLUMNS, 30), coupled_rows()
    alone = encode(x, type_name, h.diagonal) if effort == 0 else encode(x, type_name, covariance=h, effort=effort)
    together = encode(x, type_name, covariance=h, effort=effort, coupled=coupled)
    assert together.shape == alone.shape
    a = coupled.descent.shares
    assert loss(x, together, type_name, h, a) < loss(x, alone, type_name, h, a)


@pytest.mark.parametrize("type_name", ["q4_K", "iq4_kss", "iq2_xxs"])
def test_the_error_that_steps_watch_is_the_loss(type_name):
    """The gradient is kept up to date through all steps: feedback, descent, scales of single rows, pairs."""
    x, h, coupled = weights(40, COLUMNS), covariance(COLUMNS, 30), coupled_rows(40)
    damped = prepare(h).damped
    assert damped is not None
    refinement = refinement_of(x, encode(x, type_name, h.diagonal), type_name, damped, 2, coupled)
    refinement.run()
    q = encode(x, type_name, h.diagonal)
    refinement.rows.write(q)
    found = coupled_error(coupled.descent, x, refinement.values, refinement.gradient, damped.size)
    assert found == pytest.approx(loss(x, q, type_name, h, coupled.descent.shares), rel=1e-3)


@pytest.mark.parametrize("type_name", ["q8_KV", "iq1_bn"])
def test_types_without_covariance_are_encoded_as_they_are(type_name):
    x, h = random_rows(type_name, 8, COLUMNS) if type_name == "iq1_bn" else weights(8, COLUMNS), covariance(COLUMNS, 30)
    x = x if x.dtype == np.float32 else decode(x, type_name, COLUMNS)
    assert np.array_equal(encode(x, type_name, covariance=h), encode(x, type_name, covariance=h, coupled=coupled_rows(8, 4)))


def test_interleaved_rows_are_packed():
    x, h, coupled = weights(64, COLUMNS), covariance(COLUMNS, 30), coupled_rows(64)
    packed = encode(x, "q4_k_r4", covariance=h, coupled=coupled)
    plain = encode(x, "q4_K", covariance=h, coupled=coupled)
    assert np.array_equal(decode(packed, "q4_k_r4", COLUMNS), decode(plain, "q4_K", COLUMNS))


def test_blocks_are_encoded_from_the_last_row_on():
    """What a block loses is made up for by the rows before it, not by those after it."""
    x, h, coupled = weights(64, COLUMNS), covariance(COLUMNS, 30), coupled_rows(64)
    damped = prepare(h).damped
    assert damped is not None
    seen: list[np.ndarray] = []

    def encode_rows(target: np.ndarray) -> np.ndarray:
        seen.append(target)
        return encode(target, "q4_0", h.diagonal)

    encode_coupled(x, encode_rows, "q4_0", damped, 1, coupled)
    assert len(seen) == 2
    assert np.array_equal(seen[0], x[32:])
    assert not np.array_equal(seen[1], x[:32])


@pytest.mark.parametrize("type_name", ["q4_K", "iq4_k", "iq3_kt"])
def test_ordinary_encoders_see_every_row_once(type_name, monkeypatch):
    x, h, coupled, seen = weights(64, COLUMNS), covariance(COLUMNS, 30), coupled_rows(64), list[int]()
    expected, ordinary = encode(x, type_name, covariance=h, coupled=coupled), PlainRows.encode
    monkeypatch.setattr(PlainRows, "encode", lambda self, x, importance: seen.append(len(x)) or ordinary(self, x, importance))
    assert np.array_equal(encode(x, type_name, covariance=h, coupled=coupled), expected)
    assert sum(seen) == len(x)


def test_the_highest_effort_does_what_is_of_use():
    x, h, coupled = weights(32, COLUMNS), covariance(COLUMNS, 30), coupled_rows(32)
    two, three, one = (encode(x, "q4_K", covariance=h, coupled=coupled, effort=effort) for effort in (2, 3, 1))
    assert np.array_equal(two, three)
    assert not np.array_equal(two, one)


def test_rows_that_a_type_cannot_hold_are_still_found(caplog):
    x, h, coupled = weights(64, COLUMNS), covariance(COLUMNS, 30), coupled_rows(64)
    x[5] *= np.float32(2.0**-30)
    encode(x, "q4_0", covariance=h, coupled=coupled)
    assert "rows 5 to 5 have weights so small that q4_0 makes them coarse or zero" in caplog.text
    x[5] = np.inf
    with pytest.raises(NonFiniteError):
        encode(x, "q4_0", covariance=h, coupled=coupled)
