"""iq1_bn, iq2_bn and iq2_bn_r4 against bytes of the reference encoder and against the ternary input."""

from pathlib import Path

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode, encode_unchecked
from ggufmill.repack import unpack

GOLDEN = np.load(Path(__file__).parents[2] / "data" / "golden_ternary.npz")
X = GOLDEN["x"]
NAMES = ("iq1_bn", "iq2_bn", "iq2_bn_r4")


@pytest.mark.parametrize("name", ["iq1_bn", "iq2_bn"])
def test_encode_matches_the_reference_byte_for_byte(name):
    assert np.array_equal(encode(X, name), GOLDEN[f"{name}/im"])
    assert np.array_equal(encode(X, name, np.ones(1024, np.float32)), GOLDEN[f"{name}/im"])


@pytest.mark.parametrize("name", NAMES)
def test_ternary_rows_are_reproduced(name):
    y = decode(encode(X, name), name, 1024)
    if name == "iq1_bn":  # its scale is a float16
        assert np.array_equal(np.sign(y), np.sign(X))
        assert np.allclose(y, X, rtol=2**-11, atol=0)
    else:
        assert np.array_equal(y, X)


def test_decode_iq1_bn_follows_the_layout():
    q = np.random.default_rng(3).integers(0, 256, (40, TYPES["iq1_bn"].row_bytes(64)), np.uint8)
    scales = np.linspace(-2, 2, 40).astype(np.float16)
    q[:, :2] = scales[:, None].view(np.uint8)

    def digit(byte, j):
        t = int(byte) * (81, 27, 9, 3, 1)[j] % 256
        return (t + (t >> 1)) >> 7

    want = np.empty((40, 64), np.float32)
    for r in range(40):
        for g in range(4):
            for k in range(3):
                for j in range(5):
                    want[r, 16 * g + 5 * k + j] = digit(q[r, 2 + 3 * g + k], j) - 1
            want[r, 16 * g + 15] = digit(q[r, 14], g) - 1
    assert np.array_equal(decode(q, "iq1_bn", 64), want * scales.astype(np.float32)[:, None])


def test_decode_iq2_bn_follows_the_layout():
    q = np.random.default_rng(3).integers(0, 256, (9, TYPES["iq2_bn"].row_bytes(128)), np.uint8)
    scales = np.linspace(-2, 2, 9).astype(np.float32)
    q[:, :4] = scales[:, None].view(np.uint8)
    codes = q[:, 4:].reshape(9, 2, 1, 16) >> np.array([0, 2, 4, 6])[:, None] & 3
    want = scales[:, None] * (codes.astype(np.float32) - 1).reshape(9, 128)
    assert np.array_equal(decode(q, "iq2_bn", 128), want)
    packed = encode(X[:4], "iq2_bn_r4")
    assert np.array_equal(unpack(packed, "iq2_bn_r4", 1024)[0], encode(X[:4], "iq2_bn"))


@pytest.mark.parametrize("name", ["iq1_bn", "iq2_bn"])
def test_weights_below_half_of_amax_become_zero(name):
    x = np.zeros((1, 64), np.float32)
    x[0, :6] = [2, -2, 1, -1, 0.99, -0.99]
    assert decode(encode(x, name), name, 64)[0, :7].tolist() == [2, -2, 2, -2, 0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_extreme_rows_give_finite_and_independent_rows(name):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((8, 64)) * np.array([0, 1e-45, 1e-41, 1e-20, 1, 1e5, 1e30, 3e37])[:, None]).astype(np.float32)
    y = decode(encode_unchecked(x, name), name, 64)
    assert np.isfinite(y).all()
    assert not y[0].any()
    assert np.array_equal(encode_unchecked(x[4:], name), encode_unchecked(x, name)[4:])
