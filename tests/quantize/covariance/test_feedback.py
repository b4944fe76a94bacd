"""Error feedback over vectors and the fit of scale codes, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from covariances import covariance, random_rows, weights

from ggufmill.quantize import decode
from ggufmill.quantize.covariance.descent.parity import FOURS
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance
from ggufmill.quantize.covariance.matrix.factor import factor
from ggufmill.quantize.covariance.matrix.panels import from_panels
from ggufmill.quantize.covariance.matrix.prepared import DampedCovariance, prepare
from ggufmill.quantize.covariance.scalar_refinement import ScalarRefinement
from ggufmill.quantize.covariance.scale_codes import fit_scale_codes
from ggufmill.quantize.covariance.values import ScalarRows
from ggufmill.quantize.covariance.vector_refinement import VectorRefinement
from ggufmill.quantize.covariance.vectors import VectorRows


def damped(h: Covariance) -> DampedCovariance:
    prepared = prepare(h).damped
    assert prepared is not None
    return prepared


def factors_in_numpy(h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """U (unit upper triangular) and D of H = U D U^T."""
    flipped = np.linalg.cholesky(h[::-1, ::-1])[::-1, ::-1]
    return flipped / np.diagonal(flipped), np.diagonal(flipped) ** 2


def feedback_in_numpy(h: np.ndarray, width: int, order: np.ndarray) -> np.ndarray:
    """M = U times the blocks D_SS U_SS^T, H's columns being taken in this order."""
    u, d = factors_in_numpy(h[order][:, order])
    m = np.zeros_like(u)
    for s in range(0, len(h), width):
        part = slice(s, s + width)
        m[:, part] = u[:, part] * d[part] @ u[part, part].T
    places = np.argsort(order)
    return m[places][:, places]


def test_factors():
    h = covariance(320, 30).damped()
    panels, pivots = factor(h)
    u = from_panels(panels, 320).astype(np.float64)
    assert np.array_equal(u, np.triu(u))
    assert np.array_equal(np.diagonal(u), np.ones(320))
    assert np.abs(u * pivots @ u.T - h).max() < 1e-5 * np.abs(h).max()


@pytest.mark.parametrize(("width", "in_fours"), [(2, False), (4, False), (8, False), (4, True)])
def test_feedback_matrix(width, in_fours):
    h = covariance(256, 30)
    matrix = damped(h).feedback(width, FOURS if in_fours else None)
    order = (np.arange(0, 256, 64)[:, None] + (FOURS if in_fours else np.arange(64))).reshape(-1)
    expected = feedback_in_numpy(h.damped().astype(np.float64), width, order)
    assert np.abs(from_panels(matrix.panels, 256) - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.array_equal(matrix.diagonal, np.diagonal(from_panels(matrix.panels, 256)))


def test_feedback_matrix_is_made_once_and_counted():
    prepared = prepare(covariance(256, 30))
    before = prepared.nbytes
    assert prepared.damped is not None
    assert prepared.damped.feedback(4) is prepared.damped.feedback(4)
    assert prepared.nbytes == before + 2 * 256 * 256


def test_feedback_is_that_of_plain_numpy():
    """Block LDLQ: every vector takes the entry that is best if all later weights could still move freely."""
    x, h, q = weights(1, 512), covariance(512, 40), random_rows("iq2_kl", 1, 512)
    refinement = VectorRefinement(x, VectorRows.of(q, "iq2_kl"), damped(h), 1)
    table, factors = refinement.rows.table, refinement.rows.parameters()[0][0].astype(np.float64)
    u, d = factors_in_numpy(h.damped().astype(np.float64))
    points = table.lanes.reshape(-1, 2, 16).transpose(0, 2, 1).reshape(-1, 2).astype(np.float64)
    expected, r = refinement.values[0].astype(np.float64), np.zeros(512)
    for v in range(256):
        s = slice(2 * v, 2 * v + 2)
        candidates = points * factors[v]
        e = (x[0, s] - candidates) @ u[s, s] + r @ u[:, s]
        if factors[v] != 0:
            expected[s] = candidates[np.argmin((e**2 * d[s]).sum(axis=1))]
        r[s] = x[0, s] - expected[s]
    refinement.feed_back()
    assert np.mean(np.abs(refinement.values[0] - expected) > 1e-6) < 0.02  # but for ties and roundings of float32
    gradient = (x - refinement.values).astype(np.float64) @ h.damped()
    assert np.abs(refinement.gradient - gradient).max() < 1e-4 * np.abs(gradient).max()


def test_feedback_in_fours_lowers_the_error():
    from ggufmill.quantize import encode

    x, h = weights(24, 512), covariance(512, 40)
    q = encode(x, "iq4_kss", h.diagonal)
    refinement = ScalarRefinement(x, ScalarRows.of(q, "iq4_kss"), damped(h), 1)
    before, out = refinement.errors().sum(), q.copy()
    refinement.feed_back()
    assert refinement.errors().sum() < 0.7 * before
    refinement.rows.write(out)
    assert np.array_equal(decode(out, "iq4_kss", 512), refinement.values)


@pytest.mark.slow(keep=["iq1_m", "iq[23]_kt", "iq4_kss"])
@pytest.mark.parametrize("type_name", ["iq3_s", "iq1_m", "iq2_kt", "iq3_kt", "iq4_kss"])
def test_scale_codes_are_the_best(type_name):
    """Where groups do not depend on each other, no other code of a group has a smaller error."""
    kinds = ScalarRows if type_name == "iq4_kss" else VectorRows
    x, q = weights(3, 512), random_rows(type_name, 3, 512)
    h = Covariance(np.diag(np.exp(np.random.default_rng(1).standard_normal(512))).astype(np.float32), 1 << 20)
    rows, matrix = kinds.of(q, type_name), damped(h)
    values, importance = rows.values(), np.diagonal(h.damped()).astype(np.float64)
    gradient = np.zeros((3, matrix.size), np.float32)
    gradient[:] = (x - values) * importance
    groups, old = 512 // rows.scales.shape[1], rows.scales.copy()
    fit_scale_codes(rows, matrix, gradient.reshape(-1), values)
    assert np.array_equal(values, rows.values())
    assert np.abs(gradient - (x - values) * importance).max() < 1e-4 * np.abs(gradient).max()
    assert (rows.scales != old).any()

    def errors() -> np.ndarray:
        r = x - rows.values().astype(np.float64)
        return (r * r * importance).reshape(3, -1, groups).sum(axis=2)

    fitted, least, levels = rows.scales, errors(), rows.fields.layout.levels
    started = levels[old] != 0  # where all weights were 0 no scale is better
    for code in np.flatnonzero(levels):
        rows.scales = np.full_like(fitted, code)
        assert (errors() >= least * (1 - 1e-4))[started].all()
