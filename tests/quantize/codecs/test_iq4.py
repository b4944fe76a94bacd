"""iq4_nl and iq4_xs: codes are those of the nearest table values; see test_golden.py for bytes."""

from pathlib import Path

import numpy as np
import pytest

from ggufmill.quantize import decode, encode
from ggufmill.quantize.codecs.iquants.iq4 import VALUES

DATA = Path(__file__).parents[2] / "data"
GOLDEN = dict(np.load(DATA / "golden_standard.npz")) | dict(np.load(DATA / "golden_iq4.npz"))
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]


NAMES = ("iq4_nl", "iq4_xs")


def test_codes_are_those_of_the_nearest_values():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 32)).astype(np.float32)
    q = encode(x, "iq4_nl")
    d = q[:, :2].copy().view(np.float16).astype(np.float64)
    codes = np.concatenate([q[:, 2:] & 15, q[:, 2:] >> 4], axis=1)
    distance = np.abs(x[..., None] / d[..., None] - VALUES)
    chosen = np.take_along_axis(distance, codes[..., None].astype(int), axis=-1)[..., 0]
    # The codes are those of the scale before it was rounded to float16.
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
