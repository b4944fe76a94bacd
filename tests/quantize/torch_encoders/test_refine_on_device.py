"""Codes chosen under a covariance by torch, on its DEVICE, against the codecs: the same errors, and none larger than before."""

import warnings

import numpy as np
import pytest
from covariances import covariance, row_errors, weights

torch = pytest.importorskip("torch")
from op_graphs import DEVICE  # noqa: E402

from ggufmill import quantize  # noqa: E402

pytestmark = pytest.mark.oracle

SCALAR = [("q4_1", 1), ("q3_K", 0), ("q4_K", 1), ("iq3_ks", 2), ("mxfp4", 1), ("q8_0", 1), ("iq4_kss", 0), ("iq4_kss", 2)]
VECTORS = [("iq2_xxs", 1), ("iq2_kl", 1), ("iq3_s", 2), ("iq1_m", 0), ("iq1_s_r4", 1)]


@pytest.mark.parametrize(("name", "effort"), [*SCALAR, *VECTORS])
def test_errors_of_the_cpu(name, effort):
    """Errors are those of the DEVICE's refinement, on average over rows; each alone is no larger than before it."""
    x, h = weights(16, 256), covariance(256, 40)
    options = {"covariance": h, "effort": effort}
    before = row_errors(x, quantize.encode(x, name, h.diagonal, device=DEVICE), name, h)
    expected, actual = quantize.encode(x, name, **options), quantize.encode(x, name, **options, device=DEVICE)
    errors = row_errors(x, actual, name, h)
    assert (errors <= before * (1 + 1e-5)).all()
    assert errors.sum() == pytest.approx(row_errors(x, expected, name, h).sum(), rel=1e-4)
    assert np.mean(actual == expected) > 0.99


def test_rows_that_cannot_be_written():
    """As those of a mapped file: torch would warn of them."""
    x, h = weights(4, 256), covariance(256, 40)
    x.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize.encode(x, "q4_K", covariance=h, effort=1, device=DEVICE)


def test_rows_shorter_than_a_panel():
    x, h = weights(8, 96), covariance(96, 40)
    expected, actual = (quantize.encode(x, "iq1_s_r4", covariance=h, device=device) for device in (None, DEVICE))
    assert np.mean(actual == expected) > 0.99


def test_trellis_types_stay_with_the_processor():
    x, h = weights(8, 256), covariance(256, 40)
    expected, actual = (quantize.encode(x, "iq2_kt", covariance=h, effort=0, device=device) for device in (None, DEVICE))
    assert np.array_equal(actual, expected)
