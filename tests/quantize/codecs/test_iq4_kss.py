"""iq4_kss: its layout, its quadruples against all possible ones, and its error against that of the reference."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ggufmill.quantize import decode, encode
from ggufmill.quantize.codecs.iqk.iq4_kss import _pack
from ggufmill.quantize.codecs.iqk.iq4_kss_search import SIZE, assign_quads, gather_quads, scatter_quads, search_quads
from ggufmill.quantize.codecs.iqk.value_tables import V4

DATA = Path(__file__).parents[2] / "data"
GOLDEN = np.load(DATA / "golden_iq4_kss.npz")
with np.load(DATA / "golden_iqk.npz") as _file:
    X, IMATRIX = _file["x"], _file["imatrix"]

# All quadruples of codes whose sixteen bits have even parity, [32768, 4].
CODES = np.array([q for q in product(range(16), repeat=4) if sum(c.bit_count() for c in q) % 2 == 0])


def block_of(seed):
    rng = np.random.default_rng(seed)
    return rng.standard_t(4, 32).astype(np.float32), rng.uniform(0.1, 2, 32).astype(np.float32)


def quads_of(a):
    quads = np.empty(SIZE, np.float32)
    gather_quads(a, quads)
    return quads


def test_decode_of_random_bytes_follows_the_layout():
    rng = np.random.default_rng(1)
    q = rng.integers(0, 256, (3, 4 + 128), np.uint8)
    q[:, :4] = np.float32([0.5, -2, 3])[:, None].view(np.uint8)
    want = np.empty((3, 256), np.float32)
    for row, d in enumerate(np.float32([0.5, -2, 3])):
        words = q[row, 4:].view("<u2").reshape(8, 8)
        for c in range(8):
            s = sum((int(w) & 1) << k for k, w in enumerate(words[c]))
            for k, word in enumerate(words[c]):
                v = (int(word) & 0xFFFE) ^ ((int(word) & 0xFFFE) >> 1)
                for i, j in enumerate((2 * k, 2 * k + 16, 2 * k + 1, 2 * k + 17)):
                    want[row, 32 * c + j] = d * np.float32((s & 254) - 127) * V4[s & 1, (v >> 4 * i) & 15]
    assert np.array_equal(decode(q, "iq4_kss", 256), want)


@pytest.mark.parametrize(("key", "most"), [("im", 0.87), ("no", 0.72)])
def test_error_is_lower_than_that_of_the_reference(key, most):
    v = IMATRIX if key == "im" else None
    ours, theirs = (
        ((1 if v is None else v) * (decode(q, "iq4_kss", 1024) - X) ** 2).sum() for q in (encode(X, "iq4_kss", v), GOLDEN[key])
    )
    assert ours < most * theirs


def test_every_even_quadruple_can_be_stored():
    rng = np.random.default_rng(2)
    codes = CODES[rng.integers(0, len(CODES), (64, 8))]
    codes[:2] = [CODES[:8], CODES[-8:]]
    int_scales, flags = rng.integers(-64, 64, 64).astype(np.float32) * 2 + 1, rng.integers(0, 2, 64, np.uint8)
    int_scales[:2] = -127, 127
    entries = np.empty((64, 32), np.float32)
    for j, at in enumerate((0, 16, 1, 17)):
        entries[:, at : at + 16 : 2] = V4[flags[:, None], codes[:, :, j]]
    q = _pack(entries.reshape(8, 256), flags.reshape(8, 8), int_scales.reshape(8, 8), np.full(8, 0.25, np.float32))
    assert np.array_equal(decode(q, "iq4_kss", 256).reshape(64, 32), entries * int_scales[:, None] * np.float32(0.25))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scale", [0.03, -0.02, 0.005])
def test_assigned_quadruples_are_optimal(seed, scale):
    x, w = block_of(seed)
    q, row = np.empty(SIZE, np.float32), np.empty(32, np.float32)
    sxq, sqq = assign_quads(quads_of(x), quads_of(w), np.float32(scale), q)
    for flag in range(2):
        scatter_quads(q, flag, row)
        assert np.isclose((w * x * row).sum(), sxq[flag], rtol=1e-4)
        assert np.isclose((w * row * row).sum(), sqq[flag], rtol=1e-4)
        for k in range(8):
            at = [2 * k, 2 * k + 16, 2 * k + 1, 2 * k + 17]
            least = (w[at] * (x[at] - scale * V4[flag, CODES]) ** 2).sum(axis=1).min()
            assert sum(int(np.flatnonzero(V4[flag] == e)[0]).bit_count() for e in row[at]) % 2 == 0
            assert (w[at] * (x[at] - scale * row[at]) ** 2).sum() <= least * (1 + 1e-5)


def test_equal_losses_leave_the_parity_even():
    x, w = np.full(32, 0.5, np.float32), np.zeros(32, np.float32)
    x[16:20] = -0.25
    q, row = np.empty(SIZE, np.float32), np.empty(32, np.float32)
    for scale in np.geomspace(0.001, 0.1, 40, dtype=np.float32):
        assign_quads(quads_of(x), quads_of(w), scale, q)
        scatter_quads(q, 0, row)
        bits = [int(np.flatnonzero(V4[0] == e)[0]).bit_count() for e in row]
        assert all((bits[j] + bits[j + 16] + bits[j + 1] + bits[j + 17]) % 2 == 0 for j in range(0, 16, 2))


def test_search_is_as_good_as_a_fine_grid_of_scales():
    scratch = np.empty(SIZE, np.float32)
    gains = []
    for seed in range(30):
        x, w = map(quads_of, block_of(seed))
        best = 0
        for factor, sign in product(np.geomspace(0.8, 2.5, 200), (1, -1)):
            sxq, sqq = assign_quads(x, w, np.float32(sign * np.abs(x).max() / 127 / factor), scratch)
            best = max(best, *(np.square(sxq) / sqq))
        sxq, sqq = assign_quads(x, w, search_quads(x, w, scratch), scratch)
        error_of_zeros = (w * x * x).sum() / 2
        gains.append((error_of_zeros - max(np.square(sxq) / sqq)) / (error_of_zeros - best))
    assert np.mean(gains) < 1.1


def test_a_zero_block_in_a_nonzero_row_stays_close_to_zero():
    x = np.random.default_rng(3).standard_normal((1, 256)).astype(np.float32)
    x[:, 32:64] = 0
    assert np.abs(decode(encode(x, "iq4_kss"), "iq4_kss", 256)[:, 32:64]).max() < 1e-3


@pytest.mark.parametrize("power", [-40, -25, 14, 90])
def test_the_row_scale_follows_powers_of_two(power):
    x = np.random.default_rng(4).standard_normal((2, 512)).astype(np.float32)
    plain, scaled = encode(x, "iq4_kss"), encode(np.ldexp(x, power), "iq4_kss")
    assert np.array_equal(plain[:, 4:], scaled[:, 4:])
    assert np.array_equal(np.ldexp(plain[:, :4].copy().view("<f4"), power), scaled[:, :4].copy().view("<f4"))


def test_important_columns_have_lower_errors():
    x = np.random.default_rng(5).standard_normal((4, 1024)).astype(np.float32)
    v = np.where(np.arange(1024) % 4 == 0, 100, 1).astype(np.float32)
    errors = [((decode(encode(x, "iq4_kss", imp), "iq4_kss", 1024) - x) ** 2 * v).sum() for imp in (v, None)]
    assert errors[0] < 0.9 * errors[1]
