"""The legacy types: near-ties, rounding, minima and importance; see test_golden.py for bytes."""

from pathlib import Path

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.quantize import NonFiniteError, decode, encode

DATA = Path(__file__).parents[2] / "data"
GOLDEN = dict(np.load(DATA / "golden_standard.npz")) | dict(np.load(DATA / "golden_legacy.npz"))
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]
NAMES = ("q8_0", "q6_0", "q5_0", "q4_0", "q5_1", "q4_1")
WITH_MINIMUM = ("q5_1", "q4_1")


@pytest.mark.parametrize("name", ["q6_0", "q4_0"])
@pytest.mark.parametrize("weighted", [True, False])
def test_encode_matches_the_reference_but_for_near_ties(name, weighted):
    want, got = GOLDEN[f"{name}/im" if weighted else f"{name}/no"], encode(X, name, IMATRIX if weighted else None)
    differ = (got != want).reshape(-1, TYPES[name].block_bytes).any(axis=1)
    assert differ.mean() < 0.01
    weight = IMATRIX if weighted else 1
    errors = [(weight * (decode(q, name, 1024).astype(np.float64) - X) ** 2).sum() for q in (got, want)]
    assert errors[0] < 1.00001 * errors[1]


def test_q8_0_rounds_ties_away_from_zero():
    x = np.zeros((1, 32), np.float32)
    x[0, :7] = [127, 0.5, -0.5, 1.5, -2.5, 0.49999997, -0.49999997]
    codes = encode(x, "q8_0")[0, 2:].view(np.int8)
    assert codes[:7].tolist() == [127, 1, -1, 2, -3, 0, 0]


@pytest.mark.parametrize("name", WITH_MINIMUM)
@pytest.mark.parametrize("weighted", [True, False])
def test_minimum_absorbs_an_offset(name, weighted):
    """The error of elements between -2 and -1.5 is about that of elements between -0.5 and 0."""
    rng = np.random.default_rng(13)
    x = -rng.random((4, 64), np.float32) / 2
    importance = np.ones(64, np.float32) if weighted else None
    near, far = (decode(encode(y, name, importance), name, 64) - y for y in (x, x - np.float32(1.5)))
    assert np.abs(far).max() < 1.2 * np.abs(near).max() + 1e-3


@pytest.mark.parametrize("name", ["q6_0", "q5_0", "q4_0"])
def test_importance_lowers_the_weighted_error(name):
    rng = np.random.default_rng(11)
    x = rng.standard_t(4, (8, 256)).astype(np.float32)
    importance = np.where(np.arange(256) % 4 == 0, 100, 0.01).astype(np.float32)
    errors = [importance * (decode(encode(x, name, i), name, 256) - x) ** 2 for i in (None, importance)]
    assert errors[1].sum() < 0.9 * errors[0].sum()


@pytest.mark.parametrize("name", NAMES)
def test_blocks_without_importance_are_still_encoded_well(name):
    rng = np.random.default_rng(12)
    x = rng.standard_normal((2, 96)).astype(np.float32)
    importance = np.repeat(np.float32([0, 1, 0]), 32)
    error = decode(encode(x, name, importance), name, 96) - x
    assert np.abs(error).max() < (0.35 if name in ("q4_0", "q4_1") else 0.15)


@pytest.mark.parametrize(("name", "nmax"), [("q4_0", 8), ("q5_0", 16)])
@pytest.mark.parametrize("first", [1, -1])
def test_first_of_two_largest_magnitudes_is_exact(name, nmax, first):
    """It gets code 0; the other one is clipped by one step."""
    x = np.zeros((1, 32), np.float32)
    x[0, 5], x[0, 20] = first * nmax, -first * nmax
    y = decode(encode(x, name), name, 32)[0]
    assert (y[5], y[20]) == (first * nmax, -first * (nmax - 1))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
@pytest.mark.parametrize("n", [32, 512, 544, 2080])
def test_what_is_not_finite_is_found_wherever_it_is(name, n):
    """Rows of large and small numbers too: there the bits of all together look like infinity."""
    x = np.random.default_rng(n).standard_normal((3, n)).astype(np.float32) * np.array([[1e20], [1], [1e-5]], np.float32)
    x[0, ::2] *= np.float32(1e-20)
    encode(x, name, report=False)
    for row, column, value in ((0, 0, np.nan), (1, n - 1, -np.inf), (2, n // 2, np.inf)):
        bad = x.copy()
        bad[row, column] = value
        with pytest.raises(NonFiniteError, match=f"row {row}, column {column}"):
            encode(bad, name)
