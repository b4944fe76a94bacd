"""Attention kernels against a plain softmax in float64, and the types that a cache may have."""

import itertools
from types import SimpleNamespace

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode
from ggufmill.runtime.backends.cpu import flash
from ggufmill.runtime.backends.cpu.attention import AttentionParams, scored_attention
from ggufmill.runtime.backends.cpu.flash import Segment, attend
from ggufmill.runtime.backends.cpu.kernels.attention import job_parts
from ggufmill.runtime.backends.cpu.kernels.attention.bf16_products import _value_pairs
from ggufmill.runtime.backends.cpu.kernels.attention.block_panels import BLOCK, WORD_BYTES, encode_words
from ggufmill.runtime.backends.cpu.kernels.attention.cache_rows import BYTES, ROW_WORDS, TYPE_IDS, WORDS
from ggufmill.runtime.backends.cpu.kernels.attention.flash import KEYS
from ggufmill.runtime.backends.cpu.kernels.attention.job_parts import parts_of
from ggufmill.runtime.backends.cpu.kernels.gemm.vector_products import has_bf16_dots
from ggufmill.runtime.backends.cpu.kv_cache import CacheRows, KVCache
from ggufmill.runtime.cache_layout import CachePart, LayerCache
from ggufmill.runtime.settings import CACHE_TYPES
from ggufmill.simd.target import target
from ggufmill.simd.workers import Workers

ALONE, TWO, MANY = Workers(1), Workers(2), Workers(7)
ROUNDING = 2e-5
WORD_ROUNDING = 2e-4  # queries and weights as 16-bit integers: a fortieth of what rows of q8_0 differ by


def plain(q, k, v, past, params):
    """q [n, heads, width], k, v [kv heads, m, width] -> [n, heads, width of v], in float64, score by score."""
    n, heads, _ = q.shape
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = np.empty((n, heads, v.shape[2]))
    for i, h in itertools.product(range(n), range(heads)):
        of, distance = h * len(k) // heads, past + i - np.arange(past + n)
        scores = params.scale * k[of] @ q[i, h]
        if params.softcap:
            scores = params.softcap * np.tanh(scores / params.softcap)
        if params.slopes is not None:
            scores -= params.slopes[h] * np.abs(distance)
        if params.causal:
            scores[distance < 0] = -np.inf
        if params.window < 0:
            scores[: (past + i) // -params.window * -params.window] = -np.inf
        elif params.window:
            scores[distance >= params.window if params.causal else np.abs(distance) > params.window // 2] = -np.inf
        if params.sinks is not None:
            scores = np.append(scores, params.sinks[h])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[i, h] = weights[: past + n] @ v[of]
    return out


def cached(k, v, past, k_type="f32", v_type="f32"):
    """A cache of one layer that holds all rows, the last of them as those of a pass that is under way."""
    heads, m, k_width = k.shape
    rows = {"k": CachePart(heads, k_width, k_type), "v": CachePart(heads, v.shape[2], v_type)}
    cache = KVCache([LayerCache(rows)], m)
    for rows in (slice(0, past), slice(past, m)):
        if rows.stop > rows.start:
            for name, x in (("k", k), ("v", v)):
                cache.put(0, name, x[:, rows].transpose(1, 0, 2))
            if rows.start == 0 and past:
                cache.commit(past)
    return cache


def result(q, cache, past, params, workers=ALONE, generated=False, rounds=False):
    new, width = len(q), cache.layers[0].rows["v"].width
    out = np.full((new, q.shape[1], width), np.nan, np.float32)
    part = Segment(np.ascontiguousarray(q), cache.rows(0, "k", new), cache.rows(0, "v", new), past, out)
    attend([part], cache.layers[0].rows["k"].heads, params, workers, generated, rounds)
    return out


def random(rng, n, heads, kv_heads, k_width, v_width, past):
    shapes = ((n, heads, k_width), (kv_heads, past + n, k_width), (kv_heads, past + n, v_width))
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_attention_is_that_of_a_plain_softmax(data):
    draw = data.draw
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    heads, n, past = kv_heads * group, draw(st.integers(1, 40)), draw(st.sampled_from([0, 1, 7, 127, 128, 300]))
    k_width, v_width = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    q, k, v = random(rng, n, heads, kv_heads, k_width, v_width, past)
    sinks = rng.standard_normal(heads, dtype=np.float32) if draw(st.booleans()) else None
    slopes = np.linspace(0.001, 0.5, heads, dtype=np.float32) if draw(st.booleans()) else None
    causal = draw(st.booleans())
    window = draw(st.sampled_from([0, 1, 5, 128, 200, -1, -7, -130] if causal else [0, 1, 2, 9, 128, 260]))
    params = AttentionParams(k_width**-0.5, window, draw(st.sampled_from([0.0, 3.0])), sinks, slopes, causal)
    got = result(q, cached(k, v, past), past, params, draw(st.sampled_from([ALONE, TWO, MANY])), draw(st.booleans()))
    assert np.abs(got - plain(q, k, v, past, params)).max() < ROUNDING


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "k_width", "v_width", "past"),
    [
        (1, 4, 2, 64, 64, 5000),
        (1, 3, 1, 80, 48, 2999),
        (1, 150, 1, 72, 64, 700),
        (600, 2, 1, 16, 16, 0),
        (3, 300, 1, 16, 16, 900),
    ],
)
def test_long_contexts_and_many_heads(n, heads, kv_heads, k_width, v_width, past):
    q, k, v = random(np.random.default_rng(1), n, heads, kv_heads, k_width, v_width, past)
    sinks = np.linspace(-3, 3, heads, dtype=np.float32)
    cache = cached(k, v, past)
    for options in ({"sinks": sinks}, {"window": 1000}, {"window": -1000}):
        params = AttentionParams(k_width**-0.5, **options)
        queries = (q * np.float32(params.scale)).reshape(n, kv_heads, -1, k_width).transpose(1, 2, 0, 3)
        expected = scored_attention(queries, k, v, 1 << 20, ALONE, params).transpose(2, 0, 1, 3).reshape(n, heads, v_width)
        for workers, generated in itertools.product((ALONE, MANY), (True, False)):
            assert np.abs(result(q, cache, past, params, workers, generated) - expected).max() < ROUNDING


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(0.2),
        AttentionParams(0.2, window=300),
        AttentionParams(0.2, window=-300),
        AttentionParams(0.2, softcap=3.0, sinks=np.array([1.0, -2.0], np.float32)),
    ],
)
def test_stored_scores_give_a_query_the_same_bits_in_any_batch(params):
    random_ = np.random.default_rng(6)
    q, k, v = (random_.standard_normal(shape).astype(np.float32) for shape in ((1, 2, 200, 24), (1, 700, 24), (1, 700, 40)))
    expected = scored_attention(q, k, v, 1 << 20, ALONE, params)
    for cuts in ((1, 150), (77,), (10, 11, 12)):
        ends, parts = [*cuts, 200], []
        for start, end in zip([0, *cuts], ends, strict=True):
            seen = 500 + end
            parts.append(scored_attention(q[:, :, start:end], k[:, :seen], v[:, :seen], 1 << 14, Workers(3), params))
        assert np.array_equal(np.concatenate(parts, axis=2), expected)


@pytest.mark.parametrize(("n", "past"), [(1, 130), (13, 130), (40, 100)])
def test_a_few_tokens_after_others(n, past):
    """Of the file, what tests/levels.py runs at every level: without AVX-512 tiles are of one vector. The last tokens see
    panels that the first ones do not."""
    params = AttentionParams(0.2, window=100)
    q, k, v = random(np.random.default_rng(n), n, 4, 2, 24, 40, past)
    assert np.abs(result(q, cached(k, v, past), past, params, generated=n == 1) - plain(q, k, v, past, params)).max() < ROUNDING


def test_keys_are_split_among_threads_where_heads_are_few():
    tasks, splits, split_blocks, *_ = flash.divide(flash.AttentionShape(1, 4, 1, 10_000, 0, 128, 128, 4, generated=True))
    assert splits > 1
    assert len(tasks) == splits
    ranges = sorted((int(task[6]), int(task[7])) for task in tasks)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == -(-10_001 // KEYS)  # beyond what a query sees there is nothing to do
    assert all(a[1] == b[0] == (i + 1) * split_blocks for i, (a, b) in enumerate(itertools.pairwise(ranges)))


@pytest.mark.parametrize("window", [0, 100, 1000])
@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "past", "generated"),
    [
        *((1, 4, 1, 5000, True), (1, 6, 3, 1400, True), (1, 130, 1, 900, True), (5, 4, 2, 2222, True)),
        *((1, 6, 3, 1400, False), (5, 4, 2, 2222, False), (300, 4, 1, 777, False)),
    ],
)
def test_results_do_not_depend_on_the_number_of_threads(n, heads, kv_heads, past, generated, window):
    q, k, v = random(np.random.default_rng(8), n, heads, kv_heads, 64, 48, past)
    params = AttentionParams(0.2, window, sinks=np.linspace(-3, 3, heads, dtype=np.float32))
    cache = cached(k, v, past)
    shape = n, heads // kv_heads, kv_heads, past, window, 64, 48
    divisions = [flash.divide(flash.AttentionShape(*shape, threads, generated)) for threads in (1, 2, 3, 7)]
    if window != 100 and n * heads > 20:
        assert len({division.tasks.tobytes() for division in divisions}) > 1  # the tasks do depend on it
    expected = result(q, cache, past, params, ALONE, generated)
    assert np.abs(expected - plain(q, k, v, past, params)).max() < ROUNDING
    for workers in (TWO, Workers(3), MANY):
        assert np.array_equal(result(q, cache, past, params, workers, generated), expected)


@pytest.mark.parametrize("window", [0, 150, -150, 700])
@pytest.mark.parametrize(
    ("past", "group", "type_name"), [(500, 2, "f32"), (1300, 9, "f32"), (500, 2, "q8_0"), (500, 5, "q5_0")]
)
@pytest.mark.parametrize("generated", [False, True])
def test_a_query_has_the_same_bits_whatever_queries_are_beside_it(generated, past, group, type_name, window):
    n, params = 200, AttentionParams(0.2, window=window)
    q, k, v = random(np.random.default_rng(9), n, 2 * group, 2, 32, 32, past)

    def results(start, stop, workers):
        end = past + stop
        made = cached(k[:, :end], v[:, :end], past + start, type_name, type_name)
        return result(q[start:stop], made, past + start, params, workers, generated)

    expected = results(0, n, ALONE)
    keys, values = (decode(encode(x.reshape(-1, 32), type_name), type_name, 32).reshape(x.shape) for x in (k, v))
    plainly = plain(q, keys, values, past, params)
    assert np.abs(expected - plainly).max() < (ROUNDING if type_name == "f32" else WORD_ROUNDING)
    for start, stop in ((0, 77), (77, 200), (31, 90), (12, 13), (13, 14), (140, 148), (199, 200)):
        assert np.array_equal(results(start, stop, TWO), expected[start:stop])


@pytest.mark.parametrize("type_name", CACHE_TYPES)
def test_large_scores_do_not_overflow_and_nan_is_not_lost(type_name):
    q, k, v = random(np.random.default_rng(2), 20, 2, 1, 32, 32, 140)
    types, params = (type_name, type_name), AttentionParams(1.0)
    assert np.isfinite(result(100 * q, cached(100 * k, v, 140, *types), 140, params)).all()
    for array in (q, k, v):
        kept, array[0, 1, 5] = array[0, 1, 5], np.nan
        assert np.isnan(result(q, cached(k, v, 140, *types), 140, params)[0, 1]).all()
        array[0, 1, 5] = kept


def test_several_sequences_at_once():
    rng, params, parts, expected = np.random.default_rng(3), AttentionParams(0.2), [], []
    for n, past in ((1, 300), (1, 2), (9, 0)):
        q, k, v = random(rng, n, 4, 2, 32, 16, past)
        cache = cached(k, v, past)
        out = np.empty((n, 4, 16), np.float32)
        parts.append(Segment(q, cache.rows(0, "k", n), cache.rows(0, "v", n), past, out))
        expected.append(plain(q, k, v, past, params))
    attend(parts, 2, params, MANY)
    for part, wanted in zip(parts, expected, strict=True):
        assert np.abs(part.out - wanted).max() < ROUNDING


@pytest.mark.slow(keep=["k-*", "v-*f*"])
@pytest.mark.parametrize("type_name", CACHE_TYPES)
@pytest.mark.parametrize("side", ["k", "v"])
def test_rows_of_every_type_are_read_as_their_codec_decodes_them(type_name, side):
    q, k, v = random(np.random.default_rng(4), 37, 6, 2, 96, 64, 150)
    types = {"k_type": "f32", "v_type": "f32"} | {f"{side}_type": type_name}
    cache = cached(k, v, 150, **types)
    given = k if side == "k" else v
    flat = given.reshape(-1, given.shape[2])
    stored = decode(encode(flat, type_name), type_name, given.shape[2]).reshape(given.shape)
    assert np.array_equal(cache.read(0, side, 37), stored)
    params = AttentionParams(96**-0.5)
    expected = plain(q, stored if side == "k" else k, stored if side == "v" else v, 150, params)
    rounding = ROUNDING if TYPES[type_name].is_float else WORD_ROUNDING
    assert np.abs(result(q, cache, 150, params) - expected).max() < rounding


@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("n", "group", "k_width", "v_width", "past"),
    [(1, 1, 96, 80, 300), (1, 7, 64, 64, 129), (3, 5, 80, 192, 127), (1, 16, 144, 128, 400), (2, 17, 80, 24, 250)],
)
def test_rows_are_multiplied_as_they_lie_in_the_cache(n, group, k_width, v_width, past, type_name):
    """Where the keys of generated tokens are split: for any number of queries, and values that end within a panel or are the
    first numbers of the keys."""
    q, k, v = random(np.random.default_rng(11), n, 2 * group, 2, k_width, v_width, past)
    k_stored, v_stored = (
        decode(encode(x.reshape(-1, x.shape[2]), type_name), type_name, x.shape[2]).reshape(x.shape) for x in (k, v)
    )
    cache, params = cached(k, v, past, type_name, type_name), AttentionParams(k_width**-0.5)
    expected = plain(q, k_stored, v_stored, past, params)
    assert np.abs(result(q, cache, past, params, TWO, generated=True) - expected).max() < ROUNDING
    if v_width <= k_width:
        rows, out = cache.rows(0, "k", n), np.empty((n, 2 * group, v_width), np.float32)
        attend([Segment(q, rows, rows, past, out)], 2, params, TWO, generated=True)
        assert np.abs(out - plain(q, k_stored, k_stored[:, :, :v_width], past, params)).max() < ROUNDING
    k[1, 5, 7] = np.nan
    got = result(q, cached(k, v, past, type_name, type_name), past, params, TWO, generated=True)
    assert np.isnan(got[:, group:]).all()
    assert np.isfinite(got[:, :group]).all()


def test_many_queries_of_narrow_heads_have_keys_decoded():
    """71 heads of 64 numbers with one of keys, as Falcon's, take longer over rows as they lie in the cache; 128 heads over
    latents do not."""
    f16 = TYPE_IDS["f16"]
    decoded = f16, 0, 0, 0
    assert parts_of(f16, f16, True, 71, 64) == decoded == parts_of(f16, f16, False, 8, 64)
    assert parts_of(f16, f16, True, 8, 64) == parts_of(f16, f16, True, 128, 576) != decoded


def test_what_is_rounded_where_there_are_dot_products(monkeypatch):
    """Prompts over rows of f16 and bf16, and over keys of q8_0; weights that a shared part reads afterwards are not."""
    f32, f16, bf16, q8_0 = (TYPE_IDS[name] for name in ("f32", "f16", "bf16", "q8_0"))

    def part(address):
        return SimpleNamespace(address=address)

    products = {f16: SimpleNamespace(score=part(2), add=part(3)), bf16: SimpleNamespace(score=part(4), add=part(5))}
    monkeypatch.setattr(job_parts, "ROUNDED_PRODUCTS", products)
    monkeypatch.setattr(job_parts, "round_to_bf16", part(1))
    monkeypatch.setattr(job_parts, "has_bf16_dots", lambda: True)
    monkeypatch.setattr(job_parts, "target", lambda: SimpleNamespace(has_vnni=True, has_avx_vnni=False))

    def rounded(*types, generated=False, width=64, **options):
        return parts_of(*types, generated, 4, width, True, **options)

    assert rounded(f16, f16) == (f16, 1, 2, 3)
    assert rounded(bf16, f16, width=96) == (bf16, 1, 4, 3)
    assert rounded(q8_0, q8_0) == rounded(q8_0, f32) == parts_of(BYTES, f32, False, 4, 64)
    for k_type, v_type in ((f32, f32), (f32, f16), (f16, f32), (f16, q8_0)):
        assert rounded(k_type, v_type) == (k_type, 0, 0, 0)
    assert rounded(f16, f16, width=80) == (f16, 0, 0, 0)
    for type_id, generated, has_shared in itertools.product((f16, q8_0), (False, True), (False, True)):
        if generated or has_shared:
            as_before = parts_of(type_id, type_id, generated, 4, 64, False, has_shared)
            assert rounded(type_id, type_id, generated=generated, has_shared=has_shared) == as_before
    assert rounded(f16, f16, generated=True, has_shared=True) == (f16, 0, 0, 0)


def is_rounded(k_type, v_type):
    """Whether this processor has the dot products that prompts are rounded for."""
    if k_type == "q8_0":
        return target().has_vnni or target().has_avx_vnni
    return "f32" not in (k_type, v_type) and has_bf16_dots()


@pytest.mark.parametrize(
    "types",
    [
        *(("f32", "f32"), ("f16", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("f16", "bf16")),
        *(("q8_0", "q8_0"), ("q8_0", "f16")),
    ],
)
@pytest.mark.parametrize(
    ("n", "group", "widths", "past", "options"),
    [
        *((37, 3, (64, 64), 301, {}), (1, 1, (96, 32), 254, {}), (150, 2, (32, 160), 0, {"window": 90})),
        *(
            (20, 7, (128, 96), 129, {"window": -100}),
            (9, 4, (64, 64), 130, {"softcap": 3.0}),
            (70, 2, (64, 64), 3, {"causal": False}),
        ),
    ],
)
def test_prompts_may_be_rounded(n, group, widths, past, options, types):
    """Queries, weights and rows of f16 and bf16 to bf16, queries to bytes for keys of q8_0, where the processor multiplies
    those; nothing with rows of f32."""
    q, k, v = random(np.random.default_rng(12), n, 2 * group, 2, *widths, past)
    cache, params = cached(k, v, past, *types), AttentionParams(widths[0] ** -0.5, **options)
    expected, exact = plain(q, k, v, past, params), result(q, cache, past, params)
    got = result(q, cache, past, params, rounds=True)
    assert np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)) < (1.2e-2 if types[0] == "q8_0" else 5e-3)
    assert np.array_equal(got, exact) != is_rounded(*types)
    assert np.array_equal(result(q, cache, past, params, MANY, rounds=True), got)
    assert np.array_equal(
        result(q, cache, past, params, generated=True, rounds=True), result(q, cache, past, params, generated=True)
    )
    for start, stop in ((0, -(-n // 2)), (n // 2, n), (n - 1, n)) if params.causal else ():
        end = past + stop
        made = cached(k[:, :end], v[:, :end], past + start, *types)
        assert np.array_equal(result(q[start:stop], made, past + start, params, TWO, rounds=True), got[start:stop])
    for array, at in ((q, (0, 0, 5)), (k, (0, past, 5)), (v, (0, past, 5))):
        kept, array[at] = array[at], np.nan
        broken = result(q, cached(k, v, past, *types), past, params, rounds=True)
        assert np.isnan(broken[0, 0]).any()
        assert np.isfinite(broken[:, group:]).all()
        array[at] = kept


@pytest.mark.parametrize(
    "types", [("f32", "f32"), ("f16", "f16"), ("bf16", "bf16"), ("q8_0", "q8_0"), ("q8_0", "f16"), ("f16", "bf16")]
)
@pytest.mark.parametrize(
    ("group", "widths", "past", "options"),
    [
        *((15, (64, 64), 300, {}), (16, (64, 64), 301, {}), (24, (96, 96), 1500, {"window": 200})),
        *((130, (160, 128), 700, {}), (17, (64, 32), 140, {"softcap": 3.0})),
    ],
)
def test_generated_tokens_are_rounded_where_many_queries_share_keys(group, widths, past, options, types):
    """One by one or several at a time, whatever threads and tasks there are."""
    n, params = 5, AttentionParams(widths[0] ** -0.5, **options)
    q, k, v = random(np.random.default_rng(15), n, 2 * group, 2, *widths, past)

    def results(start, stop, workers=ALONE, rounds=True):
        end = past + stop
        made = cached(k[:, :end], v[:, :end], past + start, *types)
        return result(q[start:stop], made, past + start, params, workers, generated=True, rounds=rounds)

    got, expected = results(0, n), plain(q, k, v, past, params)
    assert np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)) < (1.2e-2 if types[0] == "q8_0" else 5e-3)
    assert np.array_equal(got, results(0, n, rounds=False)) != (group >= 16 and is_rounded(*types))
    assert np.array_equal(results(0, n, MANY), got)
    for start, stop in ((0, 1), (1, 3), (4, 5)):
        assert np.array_equal(results(start, stop, TWO), got[start:stop])
    for array, at in ((q, (0, 0, 5)), (k, (0, past, 5)), (v, (0, past, 5))):
        array[at] = np.nan
        broken = results(0, n)
        assert np.isnan(broken[0, 0]).any()
        assert np.isfinite(broken[:, group:]).all()
        array[at] = 1


@pytest.mark.parametrize("types", [("f16", "f16"), ("bf16", "bf16"), ("q8_0", "f16")])
def test_rounding_does_not_make_results_larger(types):
    """Values of one sign, of f16: one in eight is halfway between two of bf16."""
    q, k, v = random(np.random.default_rng(13), 150, 4, 2, 64, 64, 150)
    cache, params = cached(k, v + 1, 150, *types), AttentionParams(1 / 8)
    got, exact = (result(q, cache, 150, params, rounds=rounds).astype(np.float64) for rounds in (True, False))
    assert abs(got.mean() / exact.mean() - 1) < 1e-4


@pytest.mark.parametrize("type_name", ["f16", "bf16"])
def test_pairs_of_values_are_rounded_to_even(type_name):
    """All numbers of a type, beside their negatives or nothing."""
    write, words = _value_pairs(type_name), np.arange(1 << 16, dtype=np.uint16)

    @numba.njit  # not cached on disk, as `write` is not
    def pairs(values, following, is_pair, out):
        for i in range(0, 1 << 16, 16):
            write(values + 2 * i, following + 2 * i, is_pair, out + 4 * i)

    def as_bf16(shorts):
        return (shorts.astype(np.uint32) << 16).view(np.float32)

    for is_pair in (True, False):
        values, out = (words, words ^ 0x8000), np.zeros((1 << 16, 2), np.uint16)
        pairs(values[0].ctypes.data, values[1].ctypes.data, is_pair, out.ctypes.data)
        for i, of in enumerate(values if is_pair else values[:1]):
            x = of.view(np.float16).astype(np.float32) if type_name == "f16" else as_bf16(of)
            bits, is_nan = x.view(np.uint32), np.isnan(x)
            assert np.array_equal(out[~is_nan, i], (bits + 0x7FFF + (bits >> 16 & 1) >> 16)[~is_nan])
            assert np.array_equal(np.isnan(as_bf16(out[:, i])), is_nan)
        assert is_pair or not out[:, 1].any()


# Root mean square error of the output, relative to that of float32 rows, with keys and values both of the type.
BOUNDS = {
    "f32": 1e-6,
    "f16": 4e-4,
    "bf16": 4e-3,
    "q8_0": 8e-3,
    "q8_KV": 1.2e-2,
    "q6_0": 0.04,
    "q5_0": 0.08,
    "iq4_nl": 0.12,
    "q4_0": 0.14,
}


@pytest.mark.parametrize("type_name", CACHE_TYPES)
def test_the_error_of_a_type_is_bounded(type_name):
    q, k, v = random(np.random.default_rng(5), 50, 4, 2, 64, 64, 200)
    expected = plain(q, k, v, 200, AttentionParams(1 / 8))
    got = result(q, cached(k, v, 200, type_name, type_name), 200, AttentionParams(1 / 8))
    error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
    assert error < BOUNDS[type_name]
    assert type_name == "f32" or error > BOUNDS[type_name] / 4  # a bound that says something


@pytest.mark.parametrize("type_name", CACHE_TYPES)
def test_a_cache_can_be_cut_and_copied(type_name):
    _, k, v = random(np.random.default_rng(6), 1, 2, 2, 64, 32, 99)
    cache = cached(k, v, 60, type_name, type_name)
    cache.commit(40)
    everything = cache.read(0, "k").copy()
    copy = cache.fork(70)
    assert copy.length == 70
    assert np.array_equal(copy.read(0, "k"), everything[:, :70])
    cache.truncate(30)
    rows = np.ones((5, 2, 64), np.float32)
    cache.put(0, "k", rows)
    cache.commit(5)
    assert np.array_equal(cache.read(0, "k")[:, :30], everything[:, :30])
    assert np.abs(cache.read(0, "k")[:, 30:] - 1).max() < 0.01
    assert np.array_equal(copy.read(0, "k"), everything[:, :70])  # not touched by what the first one does


@pytest.mark.parametrize("type_name", CACHE_TYPES)
def test_rows_that_are_not_finite_stay_so(type_name):
    _, k, v = random(np.random.default_rng(7), 1, 2, 2, 64, 32, 9)
    k[1, 4, 7] = np.nan
    read = cached(k, v, 0, type_name, "f32").read(0, "k", 10)
    assert np.isnan(read[1, 4]).any()
    assert np.isfinite(np.delete(read.reshape(20, -1), 14, axis=0)).all()


def test_a_cache_takes_what_its_types_take_and_no_more_than_its_limit():
    parts = {"k": CachePart(2, 64, "q8_0"), "v": CachePart(2, 48, "f16")}
    cache = KVCache([LayerCache(parts)] * 3, 100)
    assert cache.nbytes == 0
    assert cache.token_bytes == 3 * 2 * (68 + 96)
    for _ in range(3):
        for layer, (name, part) in itertools.product(range(3), parts.items()):
            cache.put(layer, name, np.zeros((33, part.heads, part.width), np.float32))
        cache.commit(33)
    assert cache.length * cache.token_bytes <= cache.nbytes <= 100 * cache.token_bytes
    assert CachePart(1, 10, "f16").row_bytes == 32  # sixteen numbers
    assert CachePart(1, 128, "q8_KV").row_bytes == TYPES["q8_KV"].row_bytes(128)


@pytest.mark.parametrize("generated", [False, True])
def test_rows_of_words_are_twelve_bits_of_float32(generated):
    """Keys and values that come from quantised latents."""
    q, k, v = random(np.random.default_rng(10), 37, 6, 2, 96, 64, 301)
    v[0, :40] *= 50  # of which the scale of others does not depend
    rows = []
    for x in (k, v):
        words = np.empty((*x.shape[:2], x.shape[2] // BLOCK * WORD_BYTES), np.uint8)
        encode_words(x.reshape(-1), BLOCK, words.reshape(-1))
        rows.append(CacheRows.of(words, WORDS))
    out, params = np.empty((37, 6, 64), np.float32), AttentionParams(96**-0.5)
    attend([Segment(q, *rows, 301, out)], 2, params, TWO, generated)
    error = out - plain(q, k, v, 301, params)
    assert np.abs(error[:, 3:]).max() < 1e-3
    assert np.abs(error[:, :3]).max() < 5e-2
    k[1, 5, 7] = np.nan
    encode_words(k.reshape(-1), BLOCK, rows[0].memory.reshape(-1))
    attend([Segment(q, *rows, 301, out)], 2, params, TWO, generated)
    assert np.isnan(out[:, 3:]).all()
    assert np.isfinite(out[:, :3]).all()


def rows_of_bytes(k, v):
    """Keys as BYTES, values as ROW_WORDS."""
    keys = encode(k.reshape(-1, k.shape[2]), "q8_0").reshape(*k.shape[:2], -1)
    words = np.empty((*v.shape[:2], v.shape[2] // BLOCK * WORD_BYTES), np.uint8)
    encode_words(v.reshape(-1), v.shape[2], words.reshape(-1))
    return CacheRows.of(keys, BYTES), CacheRows.of(words, ROW_WORDS)


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("widths", [(96, 64), (64, 160)])
def test_rows_of_bytes_are_eight_bits_of_float32(generated, widths):
    """Queries are rounded as keys are."""
    q, k, v = random(np.random.default_rng(11), 37, 6, 2, *widths, 301)
    v[0, :40] *= 50  # of which others do not depend
    rows, params = rows_of_bytes(k, v), AttentionParams(widths[0] ** -0.5)
    out, alone, one = (np.empty((37, 6, widths[1]), np.float32) for _ in range(3))
    attend([Segment(q, *rows, 301, out)], 2, params, TWO, generated)
    rounded = [decode(encode(x.reshape(-1, widths[0]), "q8_0"), "q8_0", widths[0]).reshape(x.shape) for x in (q, k)]
    error = out - plain(*rounded, v, 301, params)
    assert np.abs(error[:, 3:]).max() < 1e-3
    assert np.abs(error[:, :3]).max() < 2e-2
    attend([Segment(q, *rows, 301, alone)], 2, params, Workers(1), generated)
    assert np.array_equal(alone, out)
    for t in range(37) if not generated else ():
        part = np.empty((1, 6, widths[1]), np.float32)
        attend([Segment(np.ascontiguousarray(q[t : t + 1]), *rows, 301 + t, part)], 2, params, TWO, generated)
        one[t] = part[0]
    assert generated or np.array_equal(one, out)  # whatever queries are beside it
    rows[0].memory[1, 5, :2] = 0xFF  # the scale of a block
    attend([Segment(q, *rows, 301, out)], 2, params, TWO, generated)
    assert np.isnan(out[:, 3:]).all()
    assert np.isfinite(out[:, :3]).all()
    q[5, 0, 7] = np.nan
    attend([Segment(q, *rows, 301, out)], 2, params, TWO, generated)
    assert np.isnan(out[5, 0]).all()
    assert np.isfinite(out[:, 1:3]).all()


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("words", [False, True])
def test_keys_that_a_query_does_not_see(generated, words):
    """Scattered ones, whole blocks of them, all but one."""
    draw, (n, past, heads, width) = np.random.default_rng(5), (7, 3 * KEYS - 4, 3, 64)
    q = 0.3 * draw.standard_normal((n, heads, width)).astype(np.float32)
    k, v = (draw.standard_normal((heads, past + n, width)).astype(np.float32) for _ in "kv")
    seen = np.zeros((n, past + n), np.uint8)
    for t in range(n):
        seen[t, draw.permutation(past + t + 1)[: past // 3]] = 1
    seen[1], seen[2], seen[3, : 2 * KEYS] = 1, 0, 0
    seen[2, 0] = 1
    rows = [CacheRows.of(x) for x in (k, v)]
    if words:
        packed = [np.empty((heads, past + n, width // BLOCK * WORD_BYTES), np.uint8) for _ in "kv"]
        for x, out in zip((k, v), packed, strict=True):
            encode_words(x.reshape(-1), BLOCK, out.reshape(-1))
        rows = [CacheRows.of(x, WORDS) for x in packed]
    found = np.full((n, heads, width), np.nan, np.float32)
    attend([Segment(q, *rows, past, found, seen=seen)], heads, AttentionParams(0.125), TWO, generated)
    scores = 0.125 * np.einsum("nhd,hmd->nhm", q.astype(np.float64), k.astype(np.float64))
    scores[np.broadcast_to(((seen == 0) | ~np.tri(n, past + n, past, dtype=bool))[:, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    expected = np.einsum("nhm,hmd->nhd", weights / weights.sum(axis=2, keepdims=True), v.astype(np.float64))
    assert np.abs(found - expected).max() < (1e-3 if words else ROUNDING)  # one key's values have 12 bits
