"""Weights of any magnitude: what a type's scales cannot hold is told, with tensor and row."""

import logging
import re

import numpy as np
import pytest
from covariances import covariance
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES, MillError, SourceTensor
from ggufmill.quantize import can_encode, decode, encode
from ggufmill.quantize.row_producer import ErrorWeights, RowProducer
from ggufmill.quantize.scale_range import plain_range
from ggufmill.quantize.subnormal_scales import has_float16_scales, refit
from ggufmill.quantize.verify import reference_error

ENCODED = [t.name for t in TYPES.values() if can_encode(t) and not (t.name[0] == "i" and t.name[1:].isdigit())]
NAME = "blk.0.ffn_up.weight"


def _encoded(x, name, shape=None):
    tensor = SourceTensor(NAME, shape or x.shape[::-1], "f32", lambda start, stop: x[start:stop])
    importance = np.ones((1, x.shape[1]), np.float32)
    with np.errstate(over="ignore"):
        return decode(RowProducer(tensor, TYPES[name], ErrorWeights(importance))(0, len(x)), name, x.shape[1])


def _weights(rows=16, seed=3):
    return np.random.default_rng(seed).standard_t(5, (rows, 256)).astype(np.float32)


@pytest.mark.parametrize("name", ENCODED)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(exponent=st.integers(-12, 12))
def test_weights_of_any_magnitude_are_close_or_told(name, exponent):
    x = (_weights() * 10.0**exponent).astype(np.float32)
    logging.getLogger("ggufmill").addHandler(handler := _Records())
    try:
        y, told = _encoded(x, name), ""
    except MillError as error:
        y, told = x, str(error)
    finally:
        logging.getLogger("ggufmill").removeHandler(handler)
    error = np.sqrt(np.square(y.astype(float) - x).sum() / np.square(x.astype(float)).sum())
    reference = reference_error(name)
    assert handler.texts or error < min(2 * reference + 0.02, (1 + reference) / 2 + 0.02)
    if told:
        assert plain_range(name) is not None  # other types hold every magnitude
        assert re.search(rf"{NAME}: row \d+ .*: .*--custom-q '{NAME}=bf16'", told)


class _Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("name", ["q8_0", "q2_K", "iq2_xs", "q4_k_r4", "f16"])
def test_one_huge_weight_is_an_error(name):
    x = _weights()
    x[5, 77] = 1e38
    with pytest.raises(MillError, match=r"row 5 \(largest weight 1e\+38\) is too large for"):
        _encoded(x, name)


def test_rows_are_counted_within_their_matrix():
    x = _weights()
    x[6] *= np.float32(1e30)
    tensor = SourceTensor(NAME, (256, 4, 4), "f32", lambda start, stop: x[start:stop])
    with pytest.raises(MillError, match="row 2 of matrix 1"):
        RowProducer(tensor, TYPES["q4_0"])(4, 8)


@pytest.mark.parametrize("name", ["q6_K", "q8_0", "q4_k_r4"])
def test_rows_that_are_negligible_are_a_warning(name, caplog):
    x = _weights(16)
    x[4:7] *= np.float32(1e-9)
    x[9] = 0
    with caplog.at_level(logging.WARNING, "ggufmill"):
        logging.getLogger("ggufmill").addHandler(caplog.handler)
        _encoded(x, name)
        logging.getLogger("ggufmill").removeHandler(caplog.handler)
    assert f"{NAME}: 3 of the rows 4 to" in caplog.text


def test_zeros_are_no_error():
    assert not _encoded(np.zeros((8, 256), np.float32), "q4_K").any()


F16_SCALED = [name for name in ENCODED if has_float16_scales(name)]


def _error(x, q, name, importance):
    return np.sqrt((np.square(decode(q, name, x.shape[1]).astype(float) - x) * importance).sum())


@pytest.mark.parametrize("name", F16_SCALED)
def test_subnormal_scales_cost_little(name):
    x = np.ldexp(_weights(), -3 - np.frexp(np.abs(_weights()).max(1))[1][:, None])
    x[3] = x[5, :32] = 0
    importance = np.random.default_rng(5).random(256, np.float32)
    ordinary = _error(x, encode(x, name, importance), name, importance)
    small = np.ldexp(x, -10)  # largest weights of 6e-5 to 1.2e-4
    q = refit(small, name, importance)
    assert np.ldexp(_error(small, q, name, importance), 10) < 1.1 * ordinary + 0.003 * np.linalg.norm(x)
    assert not decode(q, name, 256)[3].any()


@pytest.mark.parametrize("name", F16_SCALED)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(exponent=st.integers(-30, -4), seed=st.integers(0, 99))
def test_nothing_is_worse_than_zeros(name, exponent, seed):
    x = np.ldexp(_weights(seed=seed), exponent)
    assert _error(x, refit(x, name, None), name, 1) <= 1.0001 * np.linalg.norm(x)


@pytest.mark.parametrize("name", ["q6_K", "iq4_k", "q8_0"])
def test_only_coarse_rows_are_encoded_again(name):
    x = _weights()
    x[2] *= np.float32(1e-6)
    tensor = SourceTensor(NAME, x.shape[::-1], "f32", lambda start, stop: x[start:stop])
    actual, expected = RowProducer(tensor, TYPES[name])(0, len(x)), encode(x, name)
    assert np.flatnonzero((actual != expected).any(1)).tolist() == [2]
    assert _error(x[2:3], actual[2:3], name, 1) < 0.9 * _error(x[2:3], expected[2:3], name, 1)


@pytest.mark.slow
def test_rows_under_a_covariance_too():
    x = _weights() * np.float32(1e-5)
    h = covariance(256, rank=32)
    tensor = SourceTensor(NAME, x.shape[::-1], "f32", lambda start, stop: x[start:stop])
    q = RowProducer(tensor, TYPES["q6_K"], ErrorWeights(covariance_of=lambda matrix: h))(0, len(x))
    assert _error(x, q, "q6_K", 1) < 0.04 * np.linalg.norm(x)
