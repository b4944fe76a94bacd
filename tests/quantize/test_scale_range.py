"""Weights of any magnitude: what a type's scales cannot hold is told, with tensor and row."""

import logging
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES, MillError, SourceTensor
from ggufmill.quantize import can_encode, decode
from ggufmill.quantize.scale_range import plain_range
from ggufmill.quantize.transform import row_producer
from ggufmill.quantize.verify import reference_error

ENCODED = [t.name for t in TYPES.values() if can_encode(t) and not (t.name[0] == "i" and t.name[1:].isdigit())]
NAME = "blk.0.ffn_up.weight"


def _encoded(x, name, shape=None):
    tensor = SourceTensor(NAME, shape or x.shape[::-1], "f32", lambda start, stop: x[start:stop])
    importance = np.ones((1, x.shape[1]), np.float32)
    with np.errstate(over="ignore"):
        return decode(row_producer(tensor, TYPES[name], importance)(0, len(x)), name, x.shape[1])


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
        row_producer(tensor, TYPES["q4_0"], None)(4, 8)


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
