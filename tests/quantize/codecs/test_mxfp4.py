"""mxfp4 against the gguf package's decoder, the reference encoder's errors, and an exhaustive search over exponents."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from ggufmill.formats.layouts.tables import E2M1_DOUBLED
from ggufmill.quantize import decode, encode

DATA = Path(__file__).parents[2] / "data"
GOLDEN = dict(np.load(DATA / "golden_standard.npz")) | dict(np.load(DATA / "golden_mxfp4.npz"))
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]


def bits(y):
    return y.view(np.uint32)


def test_decode_of_random_bytes_matches_gguf():
    q = np.random.default_rng(5).integers(0, 256, (512, 17), np.uint8)
    q[:256, 0] = np.arange(256)  # every exponent
    with np.errstate(over="ignore"):
        want = dequantize(q, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(bits(decode(q, "mxfp4", 32)), bits(want))


@pytest.mark.parametrize("weighted", [True, False])
def test_error_is_smaller_than_that_of_the_reference(weighted):
    weight = IMATRIX if weighted else 1
    q = encode(X, "mxfp4", IMATRIX if weighted else None)
    errors = [(weight * (decode(b, "mxfp4", 1024).astype(np.float64) - X) ** 2).sum() for b in (q, GOLDEN["mxfp4/im"])]
    assert errors[0] < 0.98 * errors[1]


def test_blocks_with_the_exponent_of_the_reference_have_its_bytes():
    got, want = (q.reshape(-1, 17) for q in (encode(X, "mxfp4"), GOLDEN["mxfp4/im"]))
    same_exponent = got[:, 0] == want[:, 0]
    assert same_exponent.mean() > 0.5
    assert np.array_equal(got[same_exponent], want[same_exponent])
    assert np.array_equal(got[~same_exponent, 0], want[~same_exponent, 0] + 1)


@pytest.mark.parametrize("weighted", [True, False])
def test_better_of_two_exponents_is_taken(weighted):
    rng = np.random.default_rng(2)
    x = rng.standard_t(4, (60, 32)).astype(np.float32)
    importance = rng.random(32, np.float32) if weighted else None
    exponent = np.floor(np.log2(np.abs(x).max(axis=1))) - 3  # of the scale of E2M1_DOUBLED
    errors = []
    for k in (0, 1):
        values = np.ldexp(E2M1_DOUBLED[None, None].astype(np.float64), (exponent + k).astype(int)[:, None, None])
        error = np.abs(x[..., None] - values).min(axis=-1)
        errors.append(((importance if weighted else 1) * error**2).sum(axis=1))
    got = (importance if weighted else 1) * (decode(encode(x, "mxfp4", importance), "mxfp4", 32).astype(np.float64) - x) ** 2
    assert got.sum(axis=1) == pytest.approx(np.minimum(*errors), rel=1e-5)
    assert 0.05 < (errors[1] < errors[0]).mean() < 0.9


def test_rows_decoded_from_mxfp4_are_reproduced():
    q = np.random.default_rng(5).integers(0, 256, (64, 17), np.uint8)
    q[:, 0] = np.arange(64) + 96
    y = decode(q, "mxfp4", 32)
    assert np.array_equal(decode(encode(y, "mxfp4"), "mxfp4", 32), y)


def test_ties_go_to_the_smaller_magnitude():
    x = np.zeros((1, 32), np.float32)
    x[0, :8] = np.array([8, 0.5, 1.5, -2.5, 3.5, 5, -7, -0.5]) / 2
    y = decode(encode(x, "mxfp4"), "mxfp4", 32)[0] * 2
    assert y[:8].tolist() == [8, 0, 1, -2, 3, 4, -6, 0]


def test_zeros_are_zero_bytes():
    assert not encode(np.zeros((2, 64), np.float32), "mxfp4").any()
