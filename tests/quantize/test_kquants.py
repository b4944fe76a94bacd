"""q4_K and q6_K against bytes of the reference encoder and against gguf's decoder."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode

GOLDEN = np.load(Path(__file__).parent.parent / "data" / "golden_standard.npz")
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]
NAMES = ("q4_K", "q6_K")
SCALES_AT = {"q4_K": slice(0, 4), "q6_K": slice(208, 210)}


@pytest.mark.parametrize("name", NAMES)
def test_decode_is_bit_exact(name):
    want = GOLDEN[f"{name}/dequant"]
    got = decode(GOLDEN[f"{name}/im"][: len(want)], name, X.shape[1])
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_decode_of_any_bits_equals_ggufs(name):
    rng = np.random.default_rng(5)
    q = rng.integers(0, 256, (6, TYPES[name].row_bytes(512)), np.uint8)
    blocks = q.reshape(-1, TYPES[name].block_bytes)
    place = SCALES_AT[name]
    halves = (place.stop - place.start) // 2
    blocks[:, place] = rng.standard_normal((len(blocks), halves)).astype(np.float16).view(np.uint8)
    want = dequantize(q, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(decode(q, name, 512).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [True, False])
def test_encode_gives_the_references_bytes(name, weighted):
    got = encode(X, name, IMATRIX if weighted else None)
    assert np.array_equal(got, GOLDEN[f"{name}/im" if weighted else f"{name}/no"])


@pytest.mark.parametrize(("name", "limit"), [("q4_K", 0.08), ("q6_K", 0.02)])
def test_error_stays_small_whatever_the_offset_of_a_block(name, limit):
    """Blocks that are all positive, all negative, or around zero: the relative error is that of the number of bits."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((3, 256)).astype(np.float32) + np.float32([[0], [3], [-3]])
    error = decode(encode(x, name), name, 256) - x
    assert np.sqrt((error**2).mean(axis=1) / (x**2).mean(axis=1)).max() < limit


@pytest.mark.parametrize("name", NAMES)
def test_super_blocks_without_importance_keep_their_weights(name):
    rng = np.random.default_rng(12)
    x = rng.standard_normal((2, 768)).astype(np.float32)
    importance = np.repeat(np.float32([0, 1, 0]), 256)
    missed = decode(encode(x, name, importance), name, 768) - x
    assert np.abs(missed).max() < 0.5


def test_a_zero_q6_K_super_block_is_zero_bytes():
    assert not encode(np.zeros((1, 256), np.float32), "q6_K").any()
