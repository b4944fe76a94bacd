"""The IQK codecs against plain searches and on extreme rows; see test_golden.py for bytes."""

from itertools import combinations_with_replacement, product
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES
from ggufmill.quantize.codecs.importance import guard_importance
from ggufmill.quantize.codecs.iqk import value_tables as tables
from ggufmill.quantize.codecs.iqk.boundary_search import search_boundaries, sorting_network
from ggufmill.quantize.codecs.iqk.iq_k_ks import _TYPES, CODECS, scale_numbers
from ggufmill.quantize.codecs.iqk.table_search import search_blocks_of_three, search_blocks_of_two
from ggufmill.simd import table_lookup
from ggufmill.simd.instructions import permute
from ggufmill.simd.lanes import load, store
from ggufmill.simd.target import target, target_at

NAMES = list(CODECS)
SPECS = {t.name: t for t in _TYPES}

# Relative error (root mean square) on normal weights that each type stays below.
ERROR = {
    "iq2_k": 0.3,
    "iq3_k": 0.15,
    "iq4_k": 0.07,
    "iq5_k": 0.035,
    "iq6_k": 0.02,
    "iq2_ks": 0.35,
    "iq3_ks": 0.17,
    "iq4_ks": 0.08,
    "iq5_ks": 0.04,
}


@pytest.fixture(scope="module")
def golden():
    """x float32 [4, 1024], imatrix [1024]; TYPE/im, TYPE/no: bytes of the reference; TYPE/dequant: floats of row 0 of im."""
    with np.load(Path(__file__).parents[2] / "data" / "golden_iqk.npz") as file:
        return dict(file)


def normal(rows, n, seed=0):
    return (np.random.default_rng(seed).standard_normal((rows, n)) * 0.02).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["im", "no"])
def test_iq2_ks_has_a_lower_error_than_the_reference(golden, key):
    """The reference searches this type coarsely by default, so its bytes are not reproduced."""
    x, v = golden["x"], golden["imatrix"] if key == "im" else None
    ours, theirs = (
        (w * (CODECS["iq2_ks"].decode(q, 1024) - x) ** 2).sum()
        for w in [1 if v is None else v]
        for q in (CODECS["iq2_ks"].encode(x, v), golden[f"iq2_ks/{key}"])
    )
    assert ours < 0.98 * theirs


@pytest.mark.parametrize("name", NAMES)
def test_scale_numbers_stand_for_the_integer_scales(name):
    layout = SPECS[name].layout
    levels = layout.levels if layout.signs is None else np.concatenate([layout.levels, -layout.levels])
    int_scales = np.random.default_rng(1).permutation(levels)[None].astype(np.float32)
    numbers = scale_numbers(layout, int_scales)
    decoded = layout.levels[numbers["scales"]]
    assert np.array_equal(np.where(numbers["signs"], -decoded, decoded) if layout.signs is not None else decoded, int_scales)


@pytest.mark.parametrize("name", NAMES)
def test_error_on_normal_weights(name):
    x = normal(4, 1024)
    y = CODECS[name].decode(CODECS[name].encode(x, None), 1024)
    assert np.sqrt(((x - y) ** 2).mean() / (x**2).mean()) < ERROR[name]


@pytest.mark.parametrize("name", NAMES)
def test_important_columns_have_lower_errors(name):
    x = normal(4, 1024)
    v = np.where(np.arange(1024) % 4 == 0, 100, 1).astype(np.float32)
    errors = [((CODECS[name].decode(CODECS[name].encode(x, imp), 1024) - x) ** 2 * v).sum() for imp in (v, None)]
    assert errors[0] < errors[1]


@pytest.mark.parametrize("name", [name for name in NAMES if SPECS[name].trials[0]])
def test_search_finds_the_best_trial(name):
    spec = SPECS[name]
    rng = np.random.default_rng(2)
    x = rng.standard_t(4, (40, spec.block)).astype(np.float32)
    w = rng.uniform(0.1, 2, x.shape).astype(np.float32)
    offsets, trial_count, first_values, candidates, three, _ = spec.search
    scales, flags = np.empty(40, np.float32), np.empty(40, np.uint8)
    search = search_blocks_of_three if three else search_blocks_of_two
    search(x, w, offsets, trial_count, first_values, candidates, scales, flags)
    ntry, step = spec.trials
    for xb, wb, scale, flag in zip(x.astype(np.float64), w, scales, flags, strict=True):
        mx = xb[np.abs(xb).argmax()]
        best, scores = 0, []
        for i, shifted, sign in product(range(-ntry, ntry + 1), (0, 1), (1, -1)):
            table = spec.table[shifted].astype(np.float64)
            q = table[np.abs(sign * (i * step + table[0]) / mx * xb[:, None] - table).argmin(axis=1)]
            score = (wb * xb * q).sum() ** 2 / (wb * q * q).sum()
            best = max(best, score)
            if shifted == flag and np.isclose((wb * xb * q).sum() / (wb * q * q).sum(), scale, rtol=1e-5):
                scores.append(score)
        assert max(scores) >= best * (1 - 1e-5)


def test_boundary_search_finds_the_best_cut():
    rng = np.random.default_rng(3)
    x = rng.standard_t(4, 256).astype(np.float32)
    x[16:32] = np.abs(x[16:32])  # a block of one sign,
    x[32:40] = 0  # one with zeros,
    x[48:64] = 0.5  # a constant one,
    x[64:80] = 0  # and a dead one
    w = rng.uniform(0.1, 2, 256).astype(np.float32)
    scales, flags = np.empty(16, np.float32), np.empty(16, np.uint8)
    search_boundaries(x.reshape(16, 16), w.reshape(16, 16), SPECS["iq2_k"].table, sorting_network(16), scales, flags)
    assert (scales[4], flags[4]) == (0, 0)
    cuts = np.array(list(combinations_with_replacement(range(16), 3)))
    run = (np.arange(16) >= cuts[:, :, None]).sum(axis=1)  # [cuts, elements]: which run an element is in
    for b in [b for b in range(16) if b != 4]:
        order = np.argsort(x[16 * b : 16 * b + 16], kind="stable")
        xb, wb = (a[16 * b : 16 * b + 16][order].astype(np.float64) for a in (x, w))
        best, reached = 0, 0
        for flag in (0, 1):
            for values in (SPECS["iq2_k"].table[flag], SPECS["iq2_k"].table[flag][::-1]):
                q = values[run].astype(np.float64)
                scores = (wb * xb * q).sum(axis=1) ** 2 / (wb * q * q).sum(axis=1)
                best = max(best, scores.max())
                if flag == flags[b]:
                    same = np.isclose((wb * xb * q).sum(axis=1) / (wb * q * q).sum(axis=1), scales[b], rtol=1e-5)
                    reached = max(reached, scores[same].max(initial=0))
        assert reached >= best * (1 - 1e-5)


@pytest.mark.parametrize("entries", [16, 32, 64])
def test_lookups_agree_at_all_levels_of_the_processor(entries, monkeypatch):
    table = np.linspace(-7, 5, entries, dtype=np.float32)
    midpoints = np.append((table[1:] + table[:-1]) / 2, np.float32(np.inf))
    y = np.concatenate(
        [np.float32([-100, 100, 0]), midpoints[:5], np.random.default_rng(4).uniform(-8, 6, 8).astype(np.float32)]
    )
    results = []
    for level in target().levels:
        for module in (table_lookup, permute):
            monkeypatch.setattr(module, "target", lambda level=level: target_at(level))
        nearest_entry = table_lookup._nearest_entry(entries)

        @numba.njit
        def quantise(y, codes, values, nearest_entry=nearest_entry):
            store(values, 0, nearest_entry(load(y, 0), midpoints, table, codes, 0))

        codes, values = np.zeros(16, np.uint8), np.zeros(16, np.float32)
        quantise(y, codes, values)
        results.append(codes)
        assert np.array_equal(codes, (y[:, None] >= midpoints).sum(axis=1))
        assert np.array_equal(values, table[codes])
    assert all(np.array_equal(codes, results[0]) for codes in results)


def test_candidate_values_refuse_a_search_that_is_too_wide():
    with pytest.raises(ValueError, match="four entries"):
        tables.candidate_values(SPECS["iq5_k"].table, 0.3)


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows(name):
    q = CODECS[name].encode(np.zeros((2, 512), np.float32), np.ones(512, np.float32))
    if name == "iq4_k":  # the reference stores -0, middle scale codes and middle codes
        block = [0, 128, 0, 0, *[170] * 4, *[0] * 8, *[136] * 128]
        assert np.array_equal(q, np.tile(np.array(block, np.uint8), (2, 2)))
    elif name == "iq3_ks":  # the row scale is -0
        assert np.array_equal(q, np.tile(np.array([0, 128, *[0] * 204], np.uint8), (2, 1)))
    else:
        assert not q.any()
    assert not CODECS[name].decode(q, 512).any()


@pytest.mark.parametrize("name", ["iq4_ks", "iq5_ks"])
@pytest.mark.parametrize("power", [-40, -25, 14, 90])
def test_row_scale_follows_powers_of_two(name, power):
    x = normal(2, 512)
    plain, scaled = (CODECS[name].encode(np.ldexp(x, p), None) for p in (0, power))
    assert np.array_equal(plain[:, 4:], scaled[:, 4:])
    assert np.array_equal(np.ldexp(plain[:, :4].copy().view("<f4"), power), scaled[:, :4].copy().view("<f4"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1e30, -1e30, 1e-30, 1e-42, 7.0])
@pytest.mark.parametrize("importance", [None, 0, 1e-30, 1, 1e30])
def test_extreme_values_stay_finite(name, value, importance):
    v = None if importance is None else np.full(512, importance, np.float32)
    constant = np.full((1, 512), value, np.float32)
    spikes = np.where(np.arange(512) % 100 == 0, np.float32(value), normal(1, 512))
    x = np.concatenate([constant, spikes])
    assert np.isfinite(CODECS[name].decode(CODECS[name].encode(x, v), 512)).all()


@pytest.mark.parametrize("name", ["iq4_ks", "iq5_ks"])
def test_constant_rows_of_any_magnitude_are_reproduced(name):
    x = np.array([[1e-12], [1e30], [-3.0]], np.float32).repeat(256, axis=1)
    assert np.allclose(CODECS[name].decode(CODECS[name].encode(x, None), 256), x, rtol=0.02)


row = st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=40)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(pattern=row, weights=st.lists(st.floats(0, 1000, width=32), min_size=1, max_size=20))
def test_rows_are_independent_and_repeatable(name, pattern, weights):
    x = np.stack([np.resize(np.float32(pattern), 512), normal(1, 512)[0], np.resize(np.float32(pattern[::-1]), 512)])
    v = np.resize(np.float32(weights), 512)
    q = CODECS[name].encode(x, v)
    assert q.shape == (3, TYPES[name].row_bytes(512))
    assert np.array_equal(q, CODECS[name].encode(x, v))
    assert np.array_equal(q, np.concatenate([CODECS[name].encode(x[i : i + 1], v) for i in range(3)]))
    y = CODECS[name].decode(q, 512)
    assert np.isfinite(y).all()
    assert np.abs(y).max() <= 2 * np.abs(x).max()


def test_zero_importance_is_guarded_to_be_uniform():
    """Where all importance is 0 the guard makes it uniform, so uniform importance gives the same codes."""
    x = normal(2, 512)
    assert np.ptp(guard_importance(x, np.zeros(512, np.float32), 16)) == 0
    for name in NAMES:
        even = CODECS[name].encode(x, np.full(512, 2.0**-30, np.float32))
        assert np.array_equal(CODECS[name].encode(x, np.zeros(512, np.float32)), even)
