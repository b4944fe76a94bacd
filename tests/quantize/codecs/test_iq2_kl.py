"""iq2_kl: its layout, its pairs against all possible ones, and its error against that of the reference."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ggufmill.quantize import decode, encode
from ggufmill.quantize.codecs.fields import BlockFields
from ggufmill.quantize.codecs.iqk.iq2_kl_search import PAIRS, assign_pairs, pair_terms, score_pairs, search_pairs

DATA = Path(__file__).parents[2] / "data"
GOLDEN = np.load(DATA / "golden_iq2_kl.npz")
with np.load(DATA / "golden_iqk.npz") as _file:
    X, IMATRIX = _file["x"], _file["imatrix"]


def block_of(seed):
    """x, w and the pair terms of a block."""
    rng = np.random.default_rng(seed)
    x, w = rng.standard_t(4, 32).astype(np.float32), rng.uniform(0.1, 2, 32).astype(np.float32)
    scratch, p, c = np.empty(64, np.float32), np.empty(512, np.float32), np.empty(512, np.float32)
    pair_terms(x, w, scratch, p, c)
    return x, w, p, c


def test_decode_of_random_bytes_follows_the_layout():
    q = np.random.default_rng(1).integers(0, 256, (2, 2 + 86), np.uint8)
    q[:, :2] = np.float16([0.5, -2])[:, None].view(np.uint8)
    want = np.empty((2, 256), np.float32)
    for row, d in enumerate(np.float32([0.5, -2])):
        block = [int(byte) for byte in q[row, 2:]]
        for c, i in product(range(8), range(16)):
            int_scale = ((block[2 + c % 4] >> 4 * (c // 4)) & 15) | (((block[0] | block[1] << 8) >> 2 * c) & 3) << 4
            code = ((block[6 + 16 * (c // 2) + i] >> 4 * (c % 2)) & 15) | ((block[70 + i] >> c) & 1) << 4
            want[row, 32 * c + 2 * i : 32 * c + 2 * i + 2] = d * np.float32(int_scale - 32) * PAIRS[code]
    assert np.array_equal(decode(q, "iq2_kl", 256), want)


@pytest.mark.parametrize(("key", "most"), [("im", 0.95), ("no", 0.97)])
def test_error_is_lower_than_that_of_the_reference(key, most):
    v = IMATRIX if key == "im" else None
    ours, theirs = (
        ((1 if v is None else v) * (decode(q, "iq2_kl", 1024) - X) ** 2).sum() for q in (encode(X, "iq2_kl", v), GOLDEN[key])
    )
    assert ours < most * theirs


def test_all_codes_and_integer_scales_round_trip():
    rng = np.random.default_rng(2)
    codes, int_scales = rng.integers(0, 32, (20, 8, 16), np.uint8), rng.integers(-32, 32, (20, 8)).astype(np.float32)
    fields = BlockFields.of("iq2_kl")
    q = fields.pack(20, 256, codes=codes, scales=(int_scales + 32).astype(np.uint8), d=np.ones(20, np.float16))
    assert np.array_equal(fields.read(q, "scales"), int_scales + 32)
    assert np.array_equal(decode(q, "iq2_kl", 256), (int_scales[..., None, None] * PAIRS[codes]).reshape(20, 256))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [0.05, -0.04, 0.01])
def test_assigned_pairs_are_optimal(seed, scale):
    x, w, p, c = block_of(seed)
    codes = np.empty(16, np.uint8)
    sxq, sqq = assign_pairs(p, c, np.float32(scale), codes)
    errors = (w.reshape(16, 1, 2) * (x.reshape(16, 1, 2) - scale * PAIRS) ** 2).sum(axis=2)
    assert np.all(errors[np.arange(16), codes] <= errors.min(axis=1) * (1 + 1e-4) + 1e-5)
    q = PAIRS[codes].reshape(32)
    assert np.allclose([sxq, sqq], [(w * x * q).sum(), (w * q * q).sum()], rtol=1e-5)
    assert np.isclose(score_pairs(p, c, np.float32(scale)), errors.min(axis=1).sum() - (w * x * x).sum(), rtol=1e-4)


def test_search_is_as_good_as_a_fine_grid_of_scales():
    codes = np.empty(16, np.uint8)

    def score(scale):
        sxq, sqq = assign_pairs(p, c, np.float32(scale), codes)
        return sxq * sxq / sqq

    gains = []
    for seed in range(30):
        x, w, p, c = block_of(seed)
        top, error_of_zeros = np.abs(x).max() / 63, (w * x * x).sum()
        best = max(score(sign * top / factor) for factor, sign in product(np.geomspace(0.7, 3, 200), (1, -1)))
        gains.append((error_of_zeros - score(search_pairs(x, p, c))) / (error_of_zeros - best))
    assert np.mean(gains) < 1.1


def test_zeros_get_integer_scale_zero():
    x = np.random.default_rng(3).standard_normal((1, 256)).astype(np.float32)
    x[:, 32:64] = 0
    for importance in (None, np.ones(256, np.float32)):
        assert not decode(encode(x, "iq2_kl", importance), "iq2_kl", 256)[:, 32:64].any()
    assert not encode(np.zeros((2, 256), np.float32), "iq2_kl").any()


def test_important_columns_have_lower_errors():
    x = np.random.default_rng(5).standard_normal((4, 1024)).astype(np.float32)
    v = np.where(np.arange(1024) // 2 % 4 == 0, 100, 1).astype(np.float32)
    errors = [((decode(encode(x, "iq2_kl", imp), "iq2_kl", 1024) - x) ** 2 * v).sum() for imp in (v, None)]
    assert errors[0] < 0.8 * errors[1]
