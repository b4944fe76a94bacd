"""f32, f16 and bf16 against numpy and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

from ggufmill.quantize import decode, encode, encode_unchecked
from ggufmill.repack import pack

RNG = np.random.default_rng(2)
SPECIAL = np.float32(
    [0, -0.0, 1, -1, 65504, -65504, 6e-8, 2e-8, 1e-40, 2049, 2051, 1.00048828125, 0.1, -0.3, 1.00390625, 1.01171875]
)


@pytest.mark.parametrize("n", [1, 14, 16, 33])
def test_f32_round_trip(n):
    x = RNG.standard_normal((3, n)).astype(np.float32)
    q = encode(x, "f32")
    assert q.shape == (3, 4 * n)
    assert not np.shares_memory(q, x)
    assert np.array_equal(decode(q, "f32", n), x)


def rows_of(n, start):
    """float32 [5, n], whose first row begins so many numbers after a cache line."""
    numbers = np.concatenate([SPECIAL, RNG.standard_normal(50).astype(np.float32)])
    memory = np.empty(5 * n + 32, np.float32)
    x = memory[(-memory.ctypes.data % 64) // 4 + start :][: 5 * n].reshape(5, n)
    x[:] = np.resize(numbers, (5, n))
    return x


@pytest.mark.parametrize("n", [1, 14, 16, 33, 96, 1056])
@pytest.mark.parametrize("start", [0, 1, 4, 12])
def test_f16_rounds_to_nearest(n, start):
    x = rows_of(n, start)
    q = encode(x, "f16")
    want = x.astype(np.float16)
    assert np.array_equal(q.view(np.uint16), want.view(np.uint16))
    assert np.array_equal(decode(q, "f16", n).view(np.uint32), want.astype(np.float32).view(np.uint32))


def test_f16_decodes_every_number():
    words = np.arange(65536, dtype=np.uint16)[None]
    want = words.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(decode(words.view(np.uint8), "f16", 65536), want)


def test_f16_overflow_becomes_the_largest_finite_number():
    x = np.float32([[1e30, -1e30, 65520, -7e4]])
    assert decode(encode_unchecked(x, "f16"), "f16", 4).tolist() == [[65504, -65504, 65504, -65504]]


@pytest.mark.parametrize("n", [1, 14, 33, 96, 1056])
@pytest.mark.parametrize("start", [0, 1, 4, 12])
def test_bf16_rounds_to_nearest(n, start):
    x = rows_of(n, start)
    q = encode(x, "bf16")
    want = x.astype(ml_dtypes.bfloat16)
    assert np.array_equal(q.view(np.uint16), want.view(np.uint16))
    assert np.array_equal(decode(q, "bf16", n), want.astype(np.float32))


@pytest.mark.parametrize("shape", [(16, 32), (32, 96), (48, 1056), (16, 34)])
@pytest.mark.parametrize("start", [0, 1, 4, 12])
def test_bf16_r16_is_bf16_interleaved(shape, start):
    """Wherever rows begin within a cache line, and also where they are no whole vectors."""
    rows, n = shape
    x = np.random.default_rng(start).standard_t(2, rows * n + start).astype(np.float32)[start:].reshape(shape)
    x[0, :3] = np.finfo(np.float32).max, 1e-40, 1.001953125
    q = encode_unchecked(x, "bf16_r16")
    assert np.array_equal(q, pack(encode_unchecked(x, "bf16"), "bf16", n)[0])
    assert np.array_equal(decode(q, "bf16_r16", n), decode(encode_unchecked(x, "bf16"), "bf16", n))
