"""iq4_nl against bytes of the reference encoder, gguf's decoder, and an exhaustive nearest-entry search."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode
from ggufmill.quantize.iq4 import VALUES

GOLDEN = np.load(Path(__file__).parent.parent / "data" / "golden_standard.npz")
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]


def test_decode_is_bit_exact():
    want = GOLDEN["iq4_nl/dequant"]
    got = decode(GOLDEN["iq4_nl/im"][: len(want)], "iq4_nl", X.shape[1])
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


def test_decode_of_any_bits_equals_ggufs():
    rng = np.random.default_rng(5)
    q = rng.integers(0, 256, (7, TYPES["iq4_nl"].row_bytes(160)), np.uint8)
    q.reshape(-1, TYPES["iq4_nl"].block_bytes)[:, :2] = rng.standard_normal((35, 1)).astype(np.float16).view(np.uint8)
    want = dequantize(q, gguf.GGMLQuantizationType.IQ4_NL)
    assert np.array_equal(decode(q, "iq4_nl", 160).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("weighted", [True, False])
def test_encode_gives_the_references_bytes(weighted):
    got = encode(X, "iq4_nl", IMATRIX if weighted else None)
    assert np.array_equal(got, GOLDEN["iq4_nl/im" if weighted else "iq4_nl/no"])


def test_codes_are_of_the_nearest_entries():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 32)).astype(np.float32)
    q = encode(x, "iq4_nl")
    d = q[:, :2].copy().view(np.float16).astype(np.float64)
    codes = np.concatenate([q[:, 2:] & 15, q[:, 2:] >> 4], axis=1)
    distance = np.abs(x[..., None] / d[..., None] - VALUES)
    chosen = np.take_along_axis(distance, codes[..., None].astype(int), axis=-1)[..., 0]
    # The codes were found with the scale before it was rounded to float16.
    assert np.all(chosen <= distance.min(axis=-1) + 0.15)


def test_blocks_without_importance_keep_their_weights():
    rng = np.random.default_rng(12)
    x = rng.standard_normal((2, 96)).astype(np.float32)
    importance = np.repeat(np.float32([0, 1, 0]), 32)
    missed = decode(encode(x, "iq4_nl", importance), "iq4_nl", 96) - x
    assert np.abs(missed).max() < 0.5
