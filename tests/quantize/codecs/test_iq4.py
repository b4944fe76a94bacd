"""iq4_nl and iq4_xs against bytes of the reference encoder, the gguf package's decoder, and the nearest table values."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode
from ggufmill.quantize.codecs.iquants.iq4 import VALUES

DATA = Path(__file__).parents[2] / "data"
GOLDEN = dict(np.load(DATA / "golden_standard.npz")) | dict(np.load(DATA / "golden_iq4.npz"))
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]


NAMES = ("iq4_nl", "iq4_xs")


@pytest.mark.parametrize("name", NAMES)
def test_decode_is_bit_exact(name):
    want = GOLDEN[f"{name}/dequant"]
    got = decode(GOLDEN[f"{name}/im"][: len(want)], name, X.shape[1])
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_decode_of_random_bytes_matches_gguf(name):
    rng = np.random.default_rng(5)
    q = rng.integers(0, 256, (7, TYPES[name].row_bytes(512)), np.uint8)
    blocks = q.reshape(-1, TYPES[name].block_bytes)
    blocks[:, :2] = rng.standard_normal((len(blocks), 1)).astype(np.float16).view(np.uint8)
    want = dequantize(q, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(decode(q, name, 512).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [True, False])
def test_encode_matches_the_reference_byte_for_byte(name, weighted):
    got = encode(X, name, IMATRIX if weighted else None)
    assert np.array_equal(got, GOLDEN[f"{name}/im" if weighted else f"{name}/no"])


def test_codes_are_those_of_the_nearest_values():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 32)).astype(np.float32)
    q = encode(x, "iq4_nl")
    d = q[:, :2].copy().view(np.float16).astype(np.float64)
    codes = np.concatenate([q[:, 2:] & 15, q[:, 2:] >> 4], axis=1)
    distance = np.abs(x[..., None] / d[..., None] - VALUES)
    chosen = np.take_along_axis(distance, codes[..., None].astype(int), axis=-1)[..., 0]
    # The codes were found with the scale before it was rounded to float16.
    assert np.all(chosen <= distance.min(axis=-1) + 0.15)


def test_a_zero_iq4_xs_block_among_others_stays_zero():
    x = np.random.default_rng(3).standard_normal((1, 256)).astype(np.float32)
    x[0, 64:96] = 0
    y = decode(encode(x, "iq4_xs"), "iq4_xs", 256)
    assert not y[0, 64:96].any()
    assert y[0, :64].all()


@pytest.mark.parametrize("name", NAMES)
def test_superblocks_without_importance_are_still_encoded_well(name):
    rng = np.random.default_rng(12)
    x = rng.standard_normal((2, 768)).astype(np.float32)
    importance = np.repeat(np.float32([0, 1, 0]), 256)
    error = decode(encode(x, name, importance), name, 768) - x
    assert np.abs(error).max() < 0.5
