"""q2_K to q6_K against errors of the reference encoder; see test_golden.py for bytes."""

from pathlib import Path

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode

DATA = Path(__file__).parents[2] / "data"
GOLDEN = dict(np.load(DATA / "golden_standard.npz")) | dict(np.load(DATA / "golden_kquants.npz"))
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]
NAMES = ("q2_K", "q3_K", "q4_K", "q5_K", "q6_K")


@pytest.mark.parametrize(("weighted", "least"), [(True, 0.9), (False, 1)])
def test_q3_K_matches_the_reference_but_for_ties(weighted, least):
    """With importance, codes and a scale of opposite signs may fit equally well: then rounding decides."""
    expected = GOLDEN["q3_K/im" if weighted else "q3_K/no"]
    equal = encode(X, "q3_K", IMATRIX if weighted else None) == expected
    assert equal.reshape(-1, TYPES["q3_K"].block_bytes).all(axis=1).mean() >= least


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("weighted", [True, False])
def test_error_is_no_larger_than_that_of_the_reference(name, weighted):
    """For q2_K with importance, where d and dmin are refitted at the end, it is smaller."""
    want, got = GOLDEN[f"{name}/im" if weighted else f"{name}/no"], encode(X, name, IMATRIX if weighted else None)
    weight = IMATRIX if weighted else 1
    errors = [(weight * (decode(q, name, 1024).astype(np.float64) - X) ** 2).sum() for q in (got, want)]
    assert errors[0] <= (0.99 if name == "q2_K" and weighted else 1.000001) * errors[1]


def test_an_outlier_does_not_coarsen_the_scales_of_other_q2_K_blocks():
    """Its block needs two codes only, 0 and 2 or 0 and 3: with 3 its scale, the largest of all, is smaller."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((1, 256)).astype(np.float32) * np.float32(0.01)
    x[0, :16] = 0
    x[0, 3] = -0.5
    q = encode(x, "q2_K", np.ones(256, np.float32))
    assert decode(q, "q2_K", 256)[0, 3] == pytest.approx(-0.5, rel=1e-2)
    assert q[0, 80:82].view(np.float16)[0] < 0.5 / 2 / 15 * 0.7


def test_q2_K_reproduces_ternary_rows():
    rng = np.random.default_rng(8)
    x = rng.integers(-1, 2, (4, 512)).astype(np.float32) * np.float32(0.37)
    for importance in (None, np.ones(512, np.float32)):
        assert np.abs(decode(encode(x, "q2_K", importance), "q2_K", 512) - x).max() < 0.37 * 2e-3


@pytest.mark.parametrize(("name", "limit"), [("q2_K", 0.35), ("q3_K", 0.21), ("q4_K", 0.08), ("q5_K", 0.04), ("q6_K", 0.02)])
def test_error_of_blocks_with_an_offset(name, limit):
    """The relative error of rows around 0, 3 and -3 is within what the number of bits allows."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((3, 256)).astype(np.float32) + np.float32([[0], [3], [-3]])
    error = decode(encode(x, name), name, 256) - x
    assert np.sqrt((error**2).mean(axis=1) / (x**2).mean(axis=1)).max() < limit


@pytest.mark.parametrize("name", NAMES)
def test_superblocks_without_importance_are_still_encoded_well(name):
    rng = np.random.default_rng(12)
    x = rng.standard_normal((2, 768)).astype(np.float32)
    importance = np.repeat(np.float32([0, 1, 0]), 256)
    error = decode(encode(x, name, importance), name, 768) - x
    assert np.abs(error).max() < {"q2_K": 2, "q3_K": 1}.get(name, 0.5)


def test_a_zero_q6_K_superblock_is_zero_bytes():
    assert not encode(np.zeros((1, 256), np.float32), "q6_K").any()
