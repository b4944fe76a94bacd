"""q1_0_g128: the layout, and that no other scale is better."""

import numpy as np
import pytest

from ggufmill.quantize import decode, encode


def test_decode_follows_the_layout():
    rng = np.random.default_rng(3)
    q = rng.integers(0, 256, (6, 36), np.uint8)
    blocks = q.reshape(-1, 18)
    scales = rng.standard_normal(12).astype(np.float16)
    blocks[:, :2] = scales[:, None].view(np.uint8)
    signs = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
    assert np.array_equal(decode(q, "q1_0_g128", 256), (scales.astype(np.float32)[:, None] * signs).reshape(6, 256))


def test_scale_is_the_mean_magnitude_and_zeros_are_positive():
    x = np.random.default_rng(3).standard_normal((20, 128)).astype(np.float32)
    x[:, 5] = 0
    y = decode(encode(x, "q1_0_g128"), "q1_0_g128", 128)
    assert np.array_equal(y > 0, x >= 0)
    assert np.abs(y) == pytest.approx(np.repeat(np.abs(x).mean(axis=1, keepdims=True), 128, axis=1), rel=1e-3)


def test_scale_is_optimal_with_importance():
    rng = np.random.default_rng(4)
    x, importance = rng.standard_t(4, (10, 256)).astype(np.float32), rng.random(256, np.float32) ** 4
    y = decode(encode(x, "q1_0_g128", importance), "q1_0_g128", 256)

    def errors(factor):
        return (importance * (y * factor - x) ** 2).reshape(20, 128).sum(axis=1)

    assert np.all(errors(1) < errors(1.01))
    assert np.all(errors(1) < errors(0.99))


def test_blocks_without_importance_have_the_unweighted_scale():
    x = np.random.default_rng(4).standard_normal((1, 256)).astype(np.float32)
    plain, half = encode(x, "q1_0_g128"), encode(x, "q1_0_g128", np.repeat(np.float32([0, 1]), 128))
    assert np.array_equal(plain, half)
