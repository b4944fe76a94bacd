"""q8_0, q6_0 and q5_0 against bytes of the reference encoder and against gguf's decoder."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode

GOLDEN = np.load(Path(__file__).parent.parent / "data" / "golden_standard.npz")
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]
NAMES = ("q8_0", "q6_0", "q5_0")


@pytest.mark.parametrize("name", NAMES)
def test_decode_is_bit_exact(name):
    want = GOLDEN[f"{name}/dequant"]
    got = decode(GOLDEN[f"{name}/im"][: len(want)], name, X.shape[1])
    assert got.dtype == np.float32
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", ["q8_0", "q5_0"])
def test_decode_of_any_bits_equals_ggufs(name):
    rng = np.random.default_rng(5)
    q = rng.integers(0, 256, (7, TYPES[name].row_bytes(160)), np.uint8)
    q.reshape(-1, TYPES[name].block_bytes)[:, :2] = rng.standard_normal((35, 1)).astype(np.float16).view(np.uint8)
    want = dequantize(q, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(decode(q, name, 160).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("name", ["q8_0", "q5_0"])
@pytest.mark.parametrize("weighted", [True, False])
def test_encode_gives_the_references_bytes(name, weighted):
    # q8_0 takes no notice of importance
    want = GOLDEN[f"{name}/im" if weighted or name == "q8_0" else f"{name}/no"]
    assert np.array_equal(encode(X, name, IMATRIX if weighted else None), want)


@pytest.mark.parametrize("weighted", [True, False])
def test_encode_q6_0_gives_the_references_bytes_but_for_near_ties(weighted):
    want, got = GOLDEN["q6_0/im" if weighted else "q6_0/no"], encode(X, "q6_0", IMATRIX if weighted else None)
    differ = (got != want).reshape(-1, TYPES["q6_0"].block_bytes).any(axis=1)
    assert differ.mean() < 0.01
    weight = IMATRIX if weighted else 1
    errors = [(weight * (decode(q, "q6_0", 1024).astype(np.float64) - X) ** 2).sum() for q in (got, want)]
    assert errors[0] < 1.00001 * errors[1]


def test_q8_0_rounds_halves_away_from_zero():
    x = np.zeros((1, 32), np.float32)
    x[0, :7] = [127, 0.5, -0.5, 1.5, -2.5, 0.49999997, -0.49999997]
    codes = encode(x, "q8_0")[0, 2:].view(np.int8)
    assert codes[:7].tolist() == [127, 1, -1, 2, -3, 0, 0]


@pytest.mark.parametrize("name", ["q6_0", "q5_0"])
def test_importance_moves_the_error_to_where_it_does_not_matter(name):
    rng = np.random.default_rng(11)
    x = rng.standard_t(4, (8, 256)).astype(np.float32)
    importance = np.where(np.arange(256) % 4 == 0, 100, 0.01).astype(np.float32)
    errors = [importance * (decode(encode(x, name, i), name, 256) - x) ** 2 for i in (None, importance)]
    assert errors[1].sum() < 0.9 * errors[0].sum()


@pytest.mark.parametrize("name", NAMES)
def test_blocks_without_importance_keep_their_weights(name):
    rng = np.random.default_rng(12)
    x = rng.standard_normal((2, 96)).astype(np.float32)
    importance = np.repeat(np.float32([0, 1, 0]), 32)
    missed = decode(encode(x, name, importance), name, 96) - x
    assert np.abs(missed).max() < 0.15
