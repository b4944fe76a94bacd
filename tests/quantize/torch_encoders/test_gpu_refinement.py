"""Refinement under a covariance on a GPU, with a processor in its place: the processor's bytes."""

import numpy as np
import pytest
from covariances import covariance, weights

torch = pytest.importorskip("torch")
from gpu_on_processor import DEVICE, use_it  # noqa: E402

from ggufmill.quantize import encode  # noqa: E402

pytestmark = pytest.mark.oracle
CASES = [
    ("q4_K", 1, 256),
    ("iq3_ks", 2, 256),
    ("iq4_kss", 1, 256),
    ("q8_0", 0, 96),
    ("iq2_xxs", 1, 256),
    ("iq2_kl", 1, 256),
    ("iq1_s", 0, 256),
]


@pytest.mark.parametrize(("name", "effort", "columns"), CASES)
def test_the_bytes_of_the_processor(name, effort, columns, monkeypatch):
    use_it(monkeypatch)
    x, h = weights(7, columns), covariance(columns, 40)
    expected, actual = (encode(x, name, covariance=h, effort=effort, device=d) for d in (None, DEVICE))
    assert np.array_equal(actual, expected)
    assert not np.array_equal(actual, encode(x, name, h.diagonal))
