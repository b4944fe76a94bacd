"""tq1_0, tq2_0 and q2_0 against their layouts, ternary input, and the gguf package's encoder."""

import gguf
import numpy as np
import pytest
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode, encode_unchecked

NAMES = ("tq1_0", "tq2_0", "q2_0")


def ternary_rows(rows: int, n: int, seed: int) -> np.ndarray:
    """-1, 0, 1 times a scale of each block of 256 that float16 holds."""
    rng = np.random.default_rng(seed)
    scales = rng.uniform(0.01, 2, (rows, n // 256, 1)).astype(np.float16).astype(np.float32)
    digits = rng.integers(-1, 2, (rows, n // 256, 256)).astype(np.float32)
    digits[:, :, ::64] = 1  # no block without its scale
    return (digits * scales).reshape(rows, n)


@pytest.mark.parametrize("name", NAMES)
def test_ternary_rows_are_reproduced(name):
    x = ternary_rows(7, 1024, 1)
    assert np.array_equal(decode(encode(x, name), name, 1024), x)


@pytest.mark.parametrize("name", ["tq1_0", "tq2_0"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), exponent=st.integers(-20, 12))
def test_bytes_are_those_of_the_gguf_package(name, seed, exponent):
    x = np.ldexp(np.random.default_rng(seed).standard_normal((3, 512)), exponent).astype(np.float32)
    assert np.array_equal(encode(x, name), quantize(x, gguf.GGMLQuantizationType[name.upper()]))


def test_q2_0_follows_the_layout():
    """A float16 scale, then element i at bits 2 (i % 4) of byte i / 4; a code stands for itself less one."""
    q = np.random.default_rng(3).integers(0, 256, (5, 3 * 18), np.uint8)
    blocks = q.reshape(15, 18)
    scales = np.linspace(-2, 2, 15).astype(np.float16)
    blocks[:, :2] = scales[:, None].view(np.uint8)
    codes = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6]) & 3).reshape(15, 64)
    want = scales.astype(np.float32)[:, None] * (codes.astype(np.float32) - 1)
    assert np.array_equal(decode(q, "q2_0", 192), want.reshape(5, 192))


@pytest.mark.parametrize("name", NAMES)
def test_weights_from_half_of_amax_on_keep_their_sign(name):
    x = np.zeros((1, 256), np.float32)
    x[0, :6] = [2, -2, 1, -1, 0.99, -0.99]
    assert decode(encode(x, name), name, 256)[0, :7].tolist() == [2, -2, 2, -2, 0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_scales_beyond_float16_stay_finite(name):
    x = np.full((1, TYPES[name].block), 1e30, np.float32)
    assert (decode(encode_unchecked(x, name), name, x.shape[1]) == 65504).all()
