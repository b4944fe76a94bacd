"""The trellis codecs against bytes of the reference, an exhaustive search, and on extreme rows."""

from pathlib import Path

import numpy as np
import pytest

from ggufmill.formats.layouts.tables import Trellis
from ggufmill.quantize.codecs.trellis.codebook import OFFSET, RESOLUTION, trellis_codebook
from ggufmill.quantize.codecs.trellis.fit import _error_weights
from ggufmill.quantize.codecs.trellis.iq_kt import _TYPES, CODECS
from ggufmill.quantize.codecs.trellis.nearest_search import (
    BLOCK,
    best_vectors,
    find_near_vectors,
    least_error,
    new_block_search,
    prepare_block,
)
from ggufmill.simd.lanes import LANES

NAMES = list(CODECS)
SPECS = {spec.name: spec for spec in _TYPES}
GOLDEN = np.load(Path(__file__).parents[2] / "data" / "golden_trellis.npz")
X, IMATRIX = GOLDEN["x"], GOLDEN["imatrix"]

# Relative error (root mean square) on normal weights that each type stays below. Rate-distortion theory allows 0.324, 0.25,
# 0.125 and 0.074 for 1.625, 2, 3 and 3.75 bits; without importance large weights are favoured at the expense of the sum.
ERROR = {"iq1_kt": 0.46, "iq2_kt": 0.34, "iq3_kt": 0.18, "iq4_kt": 0.1}


def normal(rows, n, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, n)) * 0.02).astype(np.float32)


def roundtrip(name, x, importance=None):
    return CODECS[name].decode(CODECS[name].encode(x, importance), x.shape[1])


def test_generator_gives_the_published_values():
    # Worked out by hand for the first two start states of the first codebook.
    want = []
    for state in (4096, 4097):
        values = []
        for _ in range(8):
            state = state * 0xCBAC1FED % 2**32
            values.append(sum(state >> shift & 63 for shift in (0, 8, 16, 24)) - 126)
        want.append(values)
    assert Trellis(8, 4096).values(13)[:2].tolist() == want
    assert Trellis(8, 4096).values(16)[:2].tolist() == want


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["im", "no"])
def test_error_is_not_above_that_of_the_reference(name, key):
    v = IMATRIX if key == "im" else None
    weight = 1 if v is None else v
    theirs = CODECS[name].decode(GOLDEN[f"{name}/{key}"], X.shape[1])
    assert (weight * (roundtrip(name, X, v) - X) ** 2).sum() < (weight * (theirs - X) ** 2).sum()


@pytest.mark.parametrize("name", NAMES)
def test_error_on_normal_weights(name):
    x = normal(4, 1024)
    assert np.sqrt(((x - roundtrip(name, x)) ** 2).mean() / (x**2).mean()) < ERROR[name]


@pytest.mark.parametrize("name", NAMES)
def test_important_columns_have_lower_errors(name):
    x = normal(4, 1024)
    v = np.where(np.arange(1024) % 4 == 0, 100, 1).astype(np.float32)
    errors = [((roundtrip(name, x, importance) - x) ** 2 * v).sum() for importance in (v, None)]
    assert errors[0] < 0.9 * errors[1]


CODEBOOKS = [(13, 8, 4096, False), (16, 8, 4096, True), (15, 4, 36864, False)]


@pytest.mark.parametrize("arguments", CODEBOOKS)
def test_boxes_contain_their_vectors(arguments):
    tree = trellis_codebook(*arguments)
    assert np.array_equal(np.sort(tree.order), np.arange(len(tree.order)))
    size = tree.size
    vectors = tree.vectors.reshape(-1, size // 2, LANES, 2).transpose(0, 2, 1, 3).reshape(-1, size)
    assert np.array_equal(vectors, tree.values[tree.order])
    ends = [*tree.level_starts[1:], tree.boxes.size]
    for start, end in zip(tree.level_starts, ends, strict=True):
        boxes = tree.boxes[start:end].reshape(-1, size // 2, 2, LANES, 2).transpose(2, 0, 3, 1, 4).reshape(2, -1, size)
        if start == 0:
            boxes = boxes[:, : tree.top_boxes]
        inside = (vectors.reshape(boxes.shape[1], -1, size) + OFFSET) * RESOLUTION
        assert np.array_equal(inside.min(axis=1), boxes[0])
        assert np.array_equal(inside.max(axis=1), boxes[1])


def search(spec, x, w, center, scale, limit_factor):
    """(vectors int [groups], score) of a block of 32 by the kernels."""
    size, groups, orders = spec.size, BLOCK // spec.size, spec.search.orders
    found, out = new_block_search(size, orders.shape[1] // LANES), np.empty(groups, np.int32)
    prepare_block(x, w, w.view(np.int32), 0, size, found)
    tree = spec.tree._replace(limit_factor=np.float32(limit_factor))
    find_near_vectors(x, 0, size, np.float32(center), tree, 0, found)
    score = least_error(np.float32(scale), groups, found)
    best_vectors(np.float32(scale), groups, found, out, 0)
    return orders[0][out], score


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("limit_factor", "slack"), [(2.0, 1.002), (0.35, 1.2)])
def test_search_is_nearly_as_good_as_an_exhaustive_one(name, limit_factor, slack):
    spec = SPECS[name]
    rng = np.random.default_rng(4)
    values = spec.codebooks[0].values.astype(np.float32)
    error = least = 0.0
    for _ in range(6):
        x = (rng.standard_t(5, BLOCK) * 0.02).astype(np.float32)
        x = np.abs(x) if spec.absolute else x
        w = rng.chisquare(2, BLOCK).astype(np.float32) + np.float32(0.01)
        scale = np.sqrt((x**2).mean()) / 30 * (1 if spec.absolute else rng.choice([-1, 1]))
        vectors, score = search(spec, x, w, scale, scale, limit_factor)
        block_error = (w * (x - scale * values[vectors].reshape(-1)) ** 2).sum()
        assert score + (w * x * x).sum() == pytest.approx(block_error, rel=0.02)
        differences = x.reshape(-1, 1, spec.size) - scale * values
        error += block_error
        least += (w.reshape(-1, 1, spec.size) * differences**2).sum(axis=2).min(axis=1).sum()
    assert least * 0.9999 <= error <= least * slack


def test_error_weights_follow_the_formula_and_are_positive():
    x, v = normal(1, 512, seed=3)[0], np.random.default_rng(3).random(512, np.float32)
    x[256:288], v[320:352] = 0, 0
    w, has_weight = np.empty_like(x), np.empty(16, np.bool_)
    _error_weights(x, v, w, has_weight)
    sigma2 = 2 * (x.astype(np.float64).reshape(2, 256) ** 2).mean(axis=1).repeat(256)
    want = v * np.sqrt(sigma2 + x.astype(np.float64) ** 2)
    normal_blocks = np.arange(512) // 32 != 10
    np.testing.assert_allclose(w[normal_blocks], np.maximum(want, 1e-9)[normal_blocks], rtol=1e-5)
    assert (w > 0).all()
    assert has_weight.tolist() == [b != 10 for b in range(16)]
    _error_weights(x, v[:0], w, has_weight)
    np.testing.assert_allclose(w, 0.25 * sigma2 + x.astype(np.float64) ** 2, rtol=1e-5)
    assert has_weight.all()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name):
    x = normal(3, 256)
    x[1] = 0
    for importance in (None, np.ones(256, np.float32), np.zeros(256, np.float32)):
        y = roundtrip(name, x, importance)
        assert not y[1].any()
        assert y[0].any()


@pytest.mark.parametrize("name", ["iq3_kt", "iq4_kt"])
def test_blocks_of_zeros_stay_zeros_in_other_rows(name):
    x = normal(2, 512)
    x[:, 64:96] = 0
    y = roundtrip(name, x)
    assert not y[:, 64:96].any()
    assert y[:, :64].any()


@pytest.mark.parametrize("name", NAMES)
def test_powers_of_two_change_nothing_but_the_row_scale(name):
    x = normal(2, 512)
    v = np.random.default_rng(6).random(512, np.float32)
    q = CODECS[name].encode(x, v)
    for by in (2.0**-60, 2.0**50):
        again = CODECS[name].encode(x * np.float32(by), v)
        y = CODECS[name].decode(again, 512) / np.float32(by)
        error, unscaled_error = (((z - x) ** 2).sum() for z in (y, CODECS[name].decode(q, 512)))
        assert error < 1.02 * unscaled_error


@pytest.mark.parametrize("name", NAMES)
def test_columns_without_importance_do_not_affect_the_others(name):
    x = normal(2, 256, seed=8)
    x[:, 128:] *= 100
    v = np.repeat(np.float32([1, 0]), 128)
    y = roundtrip(name, x, v)
    assert np.sqrt(((y - x)[:, :128] ** 2).mean() / (x[:, :128] ** 2).mean()) < 2 * ERROR[name]
    assert np.isfinite(y).all()
