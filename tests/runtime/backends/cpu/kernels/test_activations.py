import numpy as np
import pytest
from cpu_products import quantise
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.runtime.backends.cpu.kernels.activations import RUN


def reference(x, block):
    """Codes, scales and sums by numpy; the product with the reciprocal is rounded once, as its exact value."""
    blocks = x.reshape(len(x), -1, block)
    largest = np.abs(blocks).max(axis=2)
    live = largest >= np.float32(1e-30)
    inverse = np.where(live, np.float32(127) / np.where(live, largest, 1), 0).astype(np.float32)
    codes = np.rint(blocks.astype(np.float64) * inverse[..., None]).astype(np.int8).reshape(x.shape)
    scales = np.where(live, largest / np.float32(127), 0).astype(np.float32)
    return codes, scales, codes.reshape(len(x), -1, RUN).sum(axis=2, dtype=np.int16)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.sampled_from([32, 256]), st.integers(-40, 38), st.integers(0, 2**31))
def test_codes_scales_and_sums_are_those_of_numpy(n, blocks, block, exponent, seed):
    x = np.random.default_rng(seed).standard_t(3, (n, blocks * block))
    x = np.clip(x * 10.0**exponent, -3e38, 3e38).astype(np.float32)
    found = quantise(x, block)
    for ours, expected in zip(found[:3], reference(x, block), strict=True):
        assert ours.dtype == expected.dtype
        assert np.array_equal(ours, expected)
    assert np.abs(found.codes).max(initial=0) <= 127


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [1, 9], ids=["of sixteen blocks", "of the rest"])
def test_what_is_not_finite_spoils_its_block_alone(bad, row):
    x = np.ones((10, 64), np.float32)
    x[row, 40] = bad
    found, spoilt = quantise(x, 32), np.zeros((10, 2), bool)
    spoilt[row, 1] = True
    assert np.array_equal(np.isnan(found.scales), spoilt)
    assert not found.codes[row, 32:].any()
    assert not found.sums[row, 2:].any()
    assert np.all(found.codes.reshape(10, 2, 32)[~spoilt] == 127)
