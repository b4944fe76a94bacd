"""Encoding under a covariance: never worse per row, the same bytes however it is computed, and against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from covariances import covariance, row_errors, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.errors import PlanError
from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance
from ggufmill.quantize.covariance.matrix.prepared import prepare
from ggufmill.quantize.covariance.values import is_scalar

SCALAR_TYPES = [TYPES[name].name for name in TYPES if is_scalar(name)]


@pytest.mark.slow(keep=["3-q4_0", "3-q4_K", "3-iq4_k", "0-*"])
@pytest.mark.parametrize("type_name", SCALAR_TYPES)
@pytest.mark.parametrize("effort", [0, 1, 3])
def test_error_is_smaller(type_name, effort):
    x, h = weights(20, 512), covariance(512, 40)
    before = row_errors(x, encode(x, type_name, h.diagonal), type_name, h)
    after = row_errors(x, encode(x, type_name, covariance=h, effort=effort), type_name, h)
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.85 * before.sum()


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["q4_0", "q4_1", "q4_K", "q3_K", "iq2_k", "iq4_ks", "q8_0", "mxfp4"]),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 300),
    st.integers(0, 1000),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([1e-30, 1e-6, 1.0, 1e4]),
)
def test_no_row_is_worse(type_name, rows, blocks, rank, seed, effort, magnitude):
    n = 256 * blocks
    rng = np.random.default_rng(seed)
    x = weights(rows, n, seed) * np.exp(3 * rng.standard_normal((rows, n))).astype(np.float32) * np.float32(magnitude)
    x[:, rng.random(n) < 0.1] = 0
    h = covariance(n, rank, seed % 3)
    dead = h.matrix.copy()
    dead[: n // 8], dead[:, : n // 8] = 0, 0
    h = Covariance(dead, h.tokens)
    before = row_errors(x, encode(x, type_name, h.diagonal, report=False), type_name, h)
    after = row_errors(x, encode(x, type_name, covariance=h, effort=effort, report=False), type_name, h)
    assert (after <= before * (1 + 1e-5)).all()


def descent_in_numpy(x: np.ndarray, values: np.ndarray, levels: list[np.ndarray], h: np.ndarray, sweeps: int) -> np.ndarray:
    """Plain coordinate descent on one row; levels: the values that each weight may take."""
    values = values.copy()
    for _ in range(sweeps):
        for j in range(len(x)):
            target = values[j] + (x - values) @ h[j] / h[j, j]
            values[j] = levels[j][np.argmin(np.abs(levels[j] - target))]
    return values


def test_sweeps_are_those_of_plain_descent():
    x, h = weights(6, 256), covariance(256, 16)
    q = encode(x, "q4_0", h.diagonal)
    decoded = decode(q, "q4_0", 256).astype(np.float64)
    refined = decode(encode(x, "q4_0", covariance=h, effort=0), "q4_0", 256)
    d = q.reshape(6, 8, 18)[:, :, :2].copy().view(np.float16).astype(np.float64).repeat(32, axis=1)[:, :, 0]
    for row in range(6):
        levels = [d[row, j] * np.arange(-8, 8) for j in range(256)]
        plain = descent_in_numpy(x[row].astype(np.float64), decoded[row], levels, h.damped().astype(np.float64), 2)
        assert np.mean(plain != refined[row]) < 0.01  # but for ties and roundings of float32


def test_rows_do_not_depend_on_each_other():
    x, h = weights(50, 320), prepare(covariance(320, 30))
    for type_name in ("q4_0", "iq4_nl"):
        together = encode(x, type_name, covariance=h)
        apart = np.concatenate([encode(x[i : i + 7], type_name, covariance=h) for i in range(0, 50, 7)])
        assert np.array_equal(together, apart)


def test_interleaved_types_are_the_plain_ones_repacked():
    from ggufmill.repack import pack

    x, h = weights(8, 512), prepare(covariance(512, 40))
    plain = encode(x, "iq4_k", covariance=h)
    assert np.array_equal(encode(x, "iq4_k_r4", covariance=h), pack(plain, "iq4_k_r4", 512)[0])


def test_few_tokens_leave_only_the_diagonal():
    x, h = weights(4, 256), covariance(256, 20, tokens=100)
    assert np.array_equal(encode(x, "q4_K", covariance=h), encode(x, "q4_K", h.diagonal))


@pytest.mark.parametrize("type_name", ["f16", "q8_KV", "iq2_bn"])
def test_types_without_scalar_codes_are_encoded_as_usual(type_name):
    x, h = weights(4, 256), covariance(256, 20)
    assert np.array_equal(encode(x, type_name, covariance=h), encode(x, type_name, h.diagonal))


def test_bad_arguments():
    x, h = weights(4, 256), covariance(256, 20)
    with pytest.raises(PlanError, match="covariance of 512 columns does not fit rows of 256"):
        encode(x, "q4_K", covariance=covariance(512, 40))
    with pytest.raises(PlanError, match="an effort of 7"):
        encode(x, "q4_K", covariance=h, effort=7)
    damaged = Covariance(h.matrix.copy(), 4096)
    damaged.matrix[3, 4] = np.nan
    with pytest.raises(PlanError, match="NaN"):
        encode(x, "q4_K", covariance=damaged)
