"""Settings of `load_model` that choose what is kept in memory and how: cache types, latent attention, repacking, experts."""

import itertools

import numpy as np
import pytest
from small_models import latent, llama

from ggufmill.formats import TYPES, PlanError
from ggufmill.runtime import Settings, load_model
from ggufmill.runtime.backends.cpu.kernels.experts import reduce_experts
from ggufmill.runtime.backends.cpu.kv_cache import KVCache
from ggufmill.runtime.cache_layout import LayerCache, latent_parts
from ggufmill.runtime.settings import CACHE_TYPES

ROUNDING = 1e-4
EXACT = {"exact": True, "cache_k": "f32", "cache_v": "f32"}


@pytest.fixture(scope="module")
def dense():
    return llama()


@pytest.fixture(scope="module")
def deep():
    return latent()


# The largest change of a logit (their standard deviation is about 1) that a type of keys and values may make.
BOUNDS = {
    "f32": ROUNDING,
    "f16": 0.01,
    "bf16": 0.06,
    "q8_0": 0.1,
    "q8_KV": 0.15,
    "q6_0": 0.5,
    "q5_0": 1.0,
    "iq4_nl": 1.5,
    "q4_0": 2.0,
}


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("type_name", CACHE_TYPES)
def test_every_cache_type_stays_near_the_exact_logits(dense, tokens, type_name, flash):
    expected = load_model(dense, **EXACT, flash=False).logits(tokens)
    values = type_name if flash or TYPES[type_name].is_float else "f32"
    logits = load_model(dense, exact=True, cache_k=type_name, cache_v=values, flash=flash).logits(tokens)
    assert np.abs(logits - expected).max() < BOUNDS[type_name]


@pytest.mark.parametrize("mla", range(4))
@pytest.mark.parametrize("type_name", CACHE_TYPES)
def test_every_cache_type_works_with_every_kind_of_latent_attention(deep, tokens, type_name, mla):
    expected = load_model(deep, **EXACT, flash=False, mla=2).logits(tokens)
    settings = {"cache_k": type_name} | ({"cache_v": "f16"} if mla == 1 else {"cache_v": type_name})
    model = load_model(deep, exact=True, mla=mla, **settings)
    assert np.abs(model.logits(tokens) - expected).max() < 2 * BOUNDS[type_name] + BOUNDS["f16"]
    session = model.session()
    session.feed(tokens[:150])
    session.rewind(100)
    again = np.concatenate([session.feed(tokens[i : i + 1]) for i in range(100, 110)]).reshape(10, -1)
    # A number that comes out a little different may be rounded to the next code of its type.
    assert np.abs(again - model.logits(tokens[:110])[100:]).max() < max(20 * ROUNDING, BOUNDS[type_name] / 10)


@pytest.mark.parametrize("mla", range(4))
def test_buffers_threads_and_passes_do_not_change_latent_attention(deep, tokens, mla):
    expected = load_model(deep, **EXACT, mla=2, flash=False, threads=1).logits(tokens)
    changes = [{"attention_bytes": 1}, {"attention_bytes": 1 << 17}, {"threads": 3}, {"ubatch": 33}, {"flash": False}, {}]
    for change in changes:
        logits = load_model(deep, **EXACT, mla=mla, **change).logits(tokens)
        assert np.abs(logits - expected).max() < ROUNDING, change


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("make", [llama, latent])
def test_passes_threads_and_neighbours_do_not_change_the_logits(make, tokens, flash):
    source = make()
    expected = load_model(source, **EXACT, threads=1).logits(tokens)
    for threads, ubatch in itertools.product((1, 2, 5), (7, 64, 2048)):
        model = load_model(source, **EXACT, threads=threads, ubatch=ubatch, flash=flash)
        parts = [tokens, tokens[:31], tokens[:1]]
        together = model.hidden([(model.new_cache(200), part) for part in parts])
        for part, hidden in zip(parts, together, strict=True):
            assert np.abs(model.head(hidden) - expected[: len(part)]).max() < ROUNDING


def test_a_forked_sequence_goes_on_by_itself(dense, tokens):
    model = load_model(dense, cache_k="q8_0", cache_v="q8_0")
    session = model.session()
    session.feed(tokens[:60])
    other = session.fork(50)
    assert other.tokens == session.tokens[:50]
    session.feed(tokens[60:70])
    expected = model.logits(np.concatenate([tokens[:50], tokens[80:90]]))[-1]
    assert np.abs(other.feed(tokens[80:90]) - expected).max() < BOUNDS["q8_0"] / 10
    assert np.abs(session.feed(tokens[70:80]) - model.logits(tokens[:80])[-1]).max() < BOUNDS["q8_0"] / 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache_k": "q5_1"}, "-ctk q5_1: no type for a cache; there are f32, f16, bf16, q8_0"),
        ({"cache_v": "q8_0", "flash": False}, r"quantised values \(-ctv q8_0\) need flash attention"),
        ({"mla": 4}, "mla is one of 0, 1, 2, 3"),
        ({"mla": 3}, "-mla 3 has no effect: test model has no latent attention"),
        ({"expert_reduction": (2, 0.5)}, "-ser 2,0.5 has no effect: test model has no experts"),
        ({"expert_reduction": (0, 0.5)}, "at least 1 expert"),
        ({"ubatch": 0}, "ubatch has to be positive"),
    ],
)
def test_what_does_not_work_is_refused(dense, change, message):
    with pytest.raises(PlanError, match=message):
        load_model(dense, **change)


def test_types_in_blocks_need_whole_blocks():
    source = llama(width=40)
    with pytest.raises(
        PlanError, match="-ctk q8_0: keys of this model have 40 numbers, no multiple of the 32 .* f32, f16 and bf16"
    ):
        load_model(source, cache_k="q8_0")
    with pytest.raises(PlanError, match="-ctv iq4_nl: values of this model"):
        load_model(source, cache_v="IQ4_NL")
    load_model(source, cache_k="bf16", cache_v="f16").logits([1, 2])


def test_a_type_for_values_that_are_not_cached_is_refused(deep):
    with pytest.raises(PlanError, match="-ctv q4_0 has no effect: with -mla 3 only latents are cached, as q8_0"):
        load_model(deep, cache_k="q8_0", cache_v="q4_0")
    load_model(deep, cache_k="q8_0", cache_v="Q8_0")
    load_model(deep, cache_k="q8_0", cache_v="q4_0", mla=1)


def test_memory_of_a_session_is_what_the_settings_say(dense, deep, tokens):
    for source, settings, per_token in (
        (dense, {"cache_k": "q8_0", "cache_v": "f16"}, 2 * 2 * (34 + 64)),
        (deep, {"cache_k": "q8_0", "mla": 3}, 2 * 3 * 34),
        (deep, {"cache_k": "q8_0", "cache_v": "f16", "mla": 1}, 2 * (3 * 34 + 2 * 64)),
        (deep, {"cache_k": "f16", "cache_v": "q4_0", "mla": 0}, 2 * 4 * (128 + 18)),
    ):
        model = load_model(source, **settings)
        session = model.session(150)
        assert session.cache.token_bytes == per_token
        session.feed(tokens[:130])
        assert 130 * per_token <= session.cache.nbytes <= 150 * per_token


# Bytes per token of a model with 61 layers, 512 latent and 64 rotated numbers, logged for ik_llama.cpp.
@pytest.mark.parametrize(
    ("mla", "heads", "k", "v", "nbytes"),
    [
        (0, 16, "f16", "f16", 610 * 1024),
        (0, 128, "f16", "f16", 4880 * 1024),
        (0, 16, "q8_0", "q8_0", 331_840),
        (0, 128, "q8_0", "f16", 3_591_680),
        (1, 128, "f16", "f16", 132_736),
        (1, 128, "q8_0", "f16", 99_796),
        (2, 128, "f16", None, 70_272),
        (3, 128, "f16", None, 70_272),
        (3, 128, "q8_0", None, 37_332),
    ],
)
def test_bytes_per_token_are_those_on_record(mla, heads, k, v, nbytes):
    parts = latent_parts(heads, 192, 128, 512, 64, Settings(mla=mla, cache_k=k, cache_v=v))
    cache = KVCache([LayerCache(parts)] * 61, 163_840)
    assert cache.token_bytes == nbytes
    if (mla, k) == (3, "q8_0"):  # the log: "KV self size = 5833.12 MiB" for 163840 tokens
        assert round(cache.token_bytes * 163_840 / 2**20, 2) == 5833.12


@pytest.mark.parametrize("type_name", ["q8_0", "q4_0", "iq4_nl", "bf16"])
def test_weights_interleaved_at_load_give_the_same_logits(tokens, type_name):
    source = llama(type_name, experts=6)
    model, plain = load_model(source, repack=True, exact=True), load_model(source, exact=True)
    packed = [t for t in model.source.tensors.values() if t.stored.base == type_name]
    # All matrices but the embedding (read row by row) and the routers (float32).
    assert len(packed) == len([t for t in source.tensors.values() if len(t.shape) > 1]) - 3
    assert model.packed_bytes == sum(t.stored.nbytes(t.shape) for t in packed)
    assert plain.packed_bytes == 0
    assert np.abs(model.logits(tokens) - plain.logits(tokens)).max() < ROUNDING


def test_experts_that_weigh_little_are_dropped():
    weights = np.array([[0.5, 0.3, 0.15, 0.05], [0.3, 0.28, 0.22, 0.2]], np.float32)

    def reduced(keep, share, normalise):
        experts, left = np.arange(8).reshape(2, 4), weights.copy()
        for row in range(2):
            reduce_experts(experts[row], left[row], keep, np.float32(share), normalise)
        return experts.tolist(), left

    experts, left = reduced(1, 0.5, True)
    assert experts == [[0, 1, -1, -1], [4, 5, 6, 7]]
    assert np.allclose(left[0], [0.625, 0.375, 0, 0])
    assert np.allclose(left[1], weights[1])
    experts, left = reduced(3, 1.0, False)
    assert experts == [[0, 1, 2, -1], [4, 5, 6, -1]]
    assert np.allclose(left[0], [0.5, 0.3, 0.15, 0])


def test_expert_reduction_uses_fewer_experts(tokens):
    source = llama(experts=6)
    everything = load_model(source, exact=True)
    expected = everything.logits(tokens)
    assert np.array_equal(load_model(source, exact=True, expert_reduction=(4, 1.0)).logits(tokens), expected)
    two = llama(experts=6)
    two.metadata["llama.expert_used_count"] = 2
    reduced_model = load_model(source, exact=True, expert_reduction=(2, 1.0))
    assert np.abs(reduced_model.logits(tokens) - load_model(two, exact=True).logits(tokens)).max() < ROUNDING
    assert np.abs(reduced_model.logits(tokens) - expected).max() > 0.1
    session = load_model(source, exact=True, expert_reduction=(2, 0.9)).session()
    reduced_model = load_model(source, exact=True, expert_reduction=(2, 0.9))
    for i in range(5):  # a token at a time takes another way through the experts
        assert np.abs(session.feed(tokens[i : i + 1]) - reduced_model.logits(tokens[:5])[i]).max() < ROUNDING
