import ml_dtypes
import numpy as np
import pytest

from ggufmill.formats.floats import bf16_to_f32, e8m0_to_f32, f16_to_f32, f32_to_bf16
from ggufmill.formats.fp8 import fp8_to_bf16, fp8_to_f32

ALL_WORDS = np.arange(65536, dtype=np.uint16)


def same_floats(a, b):
    """Equal bit for bit, except for the payload of NaNs."""
    return a.dtype == b.dtype == np.float32 and np.array_equal(np.isnan(a), np.isnan(b)) and same_finite(a, b)


def same_finite(a, b):
    keep = ~np.isnan(a)
    return np.array_equal(a[keep].view(np.uint32), b[keep].view(np.uint32))


def test_widening_is_exact_for_every_word():
    assert same_floats(f16_to_f32(ALL_WORDS), ALL_WORDS.view(np.float16).astype(np.float32))
    assert same_floats(f16_to_f32(ALL_WORDS.view(np.float16)), f16_to_f32(ALL_WORDS))
    assert same_floats(bf16_to_f32(ALL_WORDS), ALL_WORDS.view(ml_dtypes.bfloat16).astype(np.float32))


def test_strided_unaligned_and_empty_arrays():
    matrix = ALL_WORDS[:600].reshape(20, 30)
    assert f16_to_f32(matrix[::2, 3:]).shape == (10, 27)
    assert same_floats(bf16_to_f32(matrix[::2, 3:]), np.ascontiguousarray(bf16_to_f32(matrix)[::2, 3:]))
    unaligned = np.frombuffer(b"\0" + matrix.tobytes(), np.uint8)[1:].view(np.uint16)  # at an odd address, read-only
    assert same_floats(f16_to_f32(unaligned), f16_to_f32(matrix).reshape(-1))
    assert bf16_to_f32(np.empty((0, 4), np.uint16)).shape == (0, 4)


def test_narrowing_rounds_to_nearest_even():
    draw = np.random.default_rng(0)
    x = np.concatenate([draw.standard_normal(1000), [0.0, -0.0, np.inf, -np.inf, 1e-40, 3.4e38]]).astype(np.float32)
    ties = (draw.integers(0, 1 << 15, 500).astype(np.uint32) << 16 | 0x8000).view(np.float32)
    x = np.concatenate([x, ties[np.isfinite(ties)]])
    assert np.array_equal(f32_to_bf16(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.isnan(bf16_to_f32(f32_to_bf16(np.array([np.nan, -np.nan], np.float32)))).all()


@pytest.mark.parametrize(("dtype", "reference"), [("f8_e4m3", ml_dtypes.float8_e4m3fn), ("f8_e5m2", ml_dtypes.float8_e5m2)])
def test_fp8_values(dtype, reference):
    codes = np.arange(256, dtype=np.uint8)
    ones = np.ones((1, 1), np.float32)
    with np.errstate(invalid="ignore"):
        assert same_floats(fp8_to_f32(codes[None], dtype, ones, 256)[0], codes.view(reference).astype(np.float32))


def test_fp8_blocks_with_a_short_last_one():
    draw = np.random.default_rng(1)
    codes = draw.integers(0, 0x7F, (5, 20)).astype(np.uint8)
    scale = draw.random((5, 3), np.float32)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.repeat(scale, 8, axis=1)[:, :20]
    assert np.array_equal(fp8_to_f32(codes, "f8_e4m3", scale, 8), expected)


@pytest.mark.parametrize("dtype", ["f8_e4m3", "f8_e5m2"])
@pytest.mark.parametrize(("columns", "block"), [(256, 256), (256, 128), (250, 64), (100, 128), (7, 1), (0, 4)])
def test_fp8_to_bf16_equals_both_steps(dtype, columns, block):
    """Bit for bit, with special values as scales, and rows whose scales differ from those before in the sign of a zero only."""
    draw = np.random.default_rng(9)
    special = [0, -0.0, 1e-45, -3e-39, 1.0, np.inf, -np.inf, np.nan, 3.4e38, 2.0**-120, 0.1]
    scale = np.concatenate([np.repeat(special, 2), draw.standard_normal(30)]).astype(np.float32)[:, None]
    scale = np.broadcast_to(scale, (len(scale), -(-columns // block))).copy()
    scale[30:, :1] *= -1
    codes = draw.integers(0, 256, (len(scale), columns), np.uint8)
    codes[:, : min(columns, 256)] = np.arange(256)[:columns]
    with np.errstate(all="ignore"):
        expected = f32_to_bf16(fp8_to_f32(codes, dtype, scale, block))
    assert np.array_equal(fp8_to_bf16(codes, dtype, scale, block), expected)


def test_e8m0():
    codes = np.arange(256, dtype=np.uint8)
    assert same_floats(e8m0_to_f32(codes), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
