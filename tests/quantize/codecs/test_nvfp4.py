"""nvfp4 against bytes of llama.cpp, an exhaustive search over scales, and the definition of E4M3."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats.layouts.tables import E2M1_DOUBLED, HALF_UE4M3
from ggufmill.quantize import decode, encode
from ggufmill.quantize.codecs.nvfp4 import scale_code

DATA = Path(__file__).parents[2] / "data"
GOLDEN = dict(np.load(DATA / "golden_standard.npz")) | dict(np.load(DATA / "golden_llama_cpp.npz"))
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]


def weighted_errors(q: np.ndarray, x: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Weighted squared error of each group of 16."""
    squares = (decode(q, "nvfp4", x.shape[1]).astype(np.float64) - x) ** 2
    return (squares * importance).reshape(-1, 16).sum(axis=1)


def test_bytes_are_those_of_llama_cpp():
    assert np.array_equal(encode(X, "nvfp4"), GOLDEN["nvfp4/im"])


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(2**-11, 1000, width=32))
def test_scale_is_the_nearest_number_of_e4m3(scale):
    """Below 256, where llama.cpp has the largest code for everything; halves are rounded up."""
    code, numbers = scale_code(np.float32(scale)), 2 * HALF_UE4M3[:120].astype(np.float64)
    if scale < 256 - 8:  # which rounds to 256
        assert abs(numbers[code] - scale) == np.abs(numbers - scale).min()
    elif scale >= 256:
        assert code == 0x7E


def test_importance_never_makes_a_group_worse_and_gets_near_the_best_scale():
    x = np.random.default_rng(2).standard_t(4, (20, 256)).astype(np.float32)
    importance = np.random.default_rng(3).random(256, np.float32) ** 2
    with_importance = weighted_errors(encode(x, "nvfp4", importance), x, importance)
    without = weighted_errors(encode(x, "nvfp4"), x, importance)
    assert (with_importance <= without * (1 + 1e-5)).all()
    groups, weights = x.reshape(-1, 16, 1), np.tile(importance, 20).reshape(-1, 16)
    best = np.full(len(groups), np.inf)
    for half_scale in HALF_UE4M3[1:0x7F]:
        error = np.abs(groups - half_scale * E2M1_DOUBLED).min(axis=2).astype(np.float64) ** 2
        best = np.minimum(best, (error * weights).sum(axis=1))
    assert with_importance.sum() < 1.02 * best.sum() < 0.97 * without.sum()


@pytest.mark.parametrize("seed", range(3))
def test_rows_decoded_from_nvfp4_are_reproduced(seed):
    rng = np.random.default_rng(seed)
    q = rng.integers(0, 256, (40, 36), np.uint8)
    q[:, :4] = rng.integers(8, 120, (40, 4))
    q[:, 4::8] |= 0x77  # a magnitude of 6 in every group, from which the scale is found
    y = decode(q, "nvfp4", 64)
    assert np.array_equal(decode(encode(y, "nvfp4"), "nvfp4", 64), y)
