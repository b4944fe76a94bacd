"""Latent attention with quantised matrices: from packed bytes for a few tokens, decoded for many; the same numbers."""

import dataclasses

import numpy as np
import pytest

from ggufmill.formats import TYPES, MillError, SourceTensor, TensorSource
from ggufmill.quantize import decode, encode
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.cpu.kernels.gemm.vector_products import has_bf16_dots
from ggufmill.runtime.backends.cpu.lower import latent_batch
from ggufmill.runtime.backends.cpu.weights import HeadWeights, WeightStore
from ggufmill.simd.instructions import amx

N_EMBD, HEADS, NOPE, ROPE, V, RANK, N_VOCAB = 64, 4, 64, 32, 32, 256, 96
NOISE = 0.03  # of the logits' root mean square: what activations of eight bits may change


def stored_as(name, array, type_name):
    """A tensor of that type; array in numpy order."""
    kind, shape = TYPES[type_name], array.shape[::-1]
    data = encode(np.ascontiguousarray(array.reshape(-1, shape[0]), np.float32), kind.name)

    def read(start, stop):
        low, high = start // kind.rows * kind.rows, -(-stop // kind.rows) * kind.rows
        return decode(data[low:high], kind.name, shape[0])[start - low : stop - low]

    return SourceTensor(name, shape, kind.name, read, lambda start, stop: data[start:stop], kind, mapped=data)


def model_source(layout, latent_type="q8_0", layers=2):
    """layout: which tensors hold K and V, 'ik', 'mainline' or 'legacy' (see `latent`)."""
    draw = np.random.default_rng(4)

    def random(*shape):
        return draw.standard_normal(shape, np.float32) / np.sqrt(shape[-1])

    tensors = {"token_embd": random(N_VOCAB, N_EMBD) * 8, "output": random(N_VOCAB, N_EMBD), "output_norm": np.ones(N_EMBD)}
    for i in range(layers):
        both = random(HEADS * (NOPE + V), RANK)
        if layout == "ik" and latent_type != "bf16":  # there k_b is made from what kv_b holds
            both = decode(encode(both, latent_type), latent_type, RANK)
        k, v = np.split(both.reshape(HEADS, NOPE + V, RANK), [NOPE], axis=1)
        b = f"blk.{i}."
        tensors |= {f"{b}attn_norm": np.ones(N_EMBD), f"{b}ffn_norm": np.ones(N_EMBD), f"{b}attn_kv_a_norm": np.ones(RANK)}
        tensors |= {f"{b}attn_q": 3 * random(HEADS * (NOPE + ROPE), N_EMBD), f"{b}attn_kv_a_mqa": random(RANK + ROPE, N_EMBD)}
        tensors |= {f"{b}attn_output": random(N_EMBD, HEADS * V), f"{b}ffn_gate": random(96, N_EMBD)}
        tensors |= {f"{b}ffn_up": random(96, N_EMBD), f"{b}ffn_down": random(N_EMBD, 96)}
        if layout != "mainline":
            tensors[f"{b}attn_kv_b"] = np.concatenate([k, v], axis=1).reshape(-1, RANK)
        if layout != "legacy":
            k_b = k.transpose(0, 2, 1)
            tensors |= {f"{b}attn_k_b": k_b, f"{b}attn_v_b": v}
        if layout == "ik":
            tensors |= {f"{b}attn_k_b": k_b.reshape(-1, NOPE), f"{b}attn_v_b": v.reshape(-1, RANK)}
    values = {"block_count": layers, "context_length": 256, "embedding_length": N_EMBD, "feed_forward_length": 96}
    values |= {"leading_dense_block_count": layers, "expert_count": 0, "rope.dimension_count": ROPE}
    values |= {"attention.head_count": HEADS, "attention.kv_lora_rank": RANK, "attention.layer_norm_rms_epsilon": 1e-5}
    values |= {"attention.key_length": NOPE + ROPE, "attention.value_length": V}
    metadata = {"general.architecture": "deepseek2"} | {f"deepseek2.{key}": value for key, value in values.items()}
    return TensorSource(
        "test model", metadata, {f"{n}.weight": of_name(f"{n}.weight", x, latent_type) for n, x in tensors.items()}, ""
    )


def of_name(name, array, latent_type):
    kind = latent_type if name.split(".")[-2] in ("attn_kv_b", "attn_k_b", "attn_v_b") else "f32"
    if not TYPES[kind].fits(array.shape[-1]):
        kind = "q8_0"
    return stored_as(name, np.asarray(array, np.float32), kind)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(2).integers(0, N_VOCAB, 40)


def rms(x):
    return np.sqrt(np.mean(np.square(x, dtype=np.float64)))


@pytest.mark.parametrize("layout", ["ik", "mainline", "legacy"])
@pytest.mark.parametrize("kind", ["q8_0", "q8_0_r8", "q4_K", "bf16"])
@pytest.mark.parametrize("mla", [0, 1, 3])
def test_generation_is_as_exact_as_eight_bits_are(tokens, monkeypatch, layout, kind, mla):
    source = model_source(layout, kind)
    expected = load_model(source, mla=2, exact=True).logits(tokens)
    decoded = []
    all_rows = WeightStore.all_rows
    monkeypatch.setattr(WeightStore, "all_rows", lambda store, tensor: decoded.append(tensor.name) or all_rows(store, tensor))
    model = load_model(source, mla=mla, cache_k="f32", cache_v="f32", threads=2)
    session = model.session()
    first = session.feed(tokens[:30])
    decoded.clear()
    differences = [session.feed(tokens[i : i + 1]) - expected[i] for i in range(30, 40)]
    assert rms(first - expected[29]) < NOISE * rms(expected)
    assert rms(differences) < NOISE * rms(expected)
    if layout != "mainline" or mla:  # nothing is decoded where packed rows can do it
        assert not decoded
    exact = load_model(source, mla=mla, exact=True).session()
    exact.feed(tokens[:30])
    assert np.abs(exact.feed(tokens[30:31]) - expected[30]).max() < 1e-3


def test_sequences_that_absorb_and_such_that_expand_in_one_pass(tokens):
    model = load_model(model_source("ik"), mla=3, cache_k="f32", threads=2)
    one, two, three = (model.new_cache(100) for _ in range(3))
    model.hidden([(one, tokens[:20]), (two, tokens[:25])])
    alone = [model.hidden([(c.fork(), t)])[0] for c, t in ((one, [5]), (three.fork(), tokens), (two, [6, 7]))]
    together = model.hidden([(one, [5]), (three, tokens), (two, [6, 7])])
    for a, b in zip(alone, together, strict=True):
        assert rms(a - b) < NOISE * rms(a)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cache_k", ["f16", "q8_0"])
def test_latents_expanded_in_pieces_give_the_same_numbers(tokens, monkeypatch, threads, cache_k):
    expected = load_model(model_source("ik"), mla=2, cache_k=cache_k, threads=threads, ubatch=32).logits(tokens)
    monkeypatch.setattr(latent_batch, "_PIECE", 16)
    plain = 2e-2 if cache_k == "f16" else 0.08  # flash attention may have 12 bits, or 8, of what is made of latents
    for flash in (True, False):
        model = load_model(model_source("ik"), mla=2, cache_k=cache_k, threads=threads, ubatch=32, flash=flash)
        assert np.abs(model.logits(tokens) - expected).max() < (1e-6 if flash else plain) * rms(expected)


@pytest.mark.parametrize(("kind", "fast"), [("q8_0", False), ("f16", True), ("f16", False), ("bf16", False)])
@pytest.mark.parametrize("cache_k", ["f16", "bf16", "f32"])
def test_keys_made_of_latents_are_rounded_where_these_are_rounded_more(tokens, monkeypatch, kind, fast, cache_k):
    source, words, convert = model_source("ik", kind), [], latent_batch._words
    expected = load_model(source, mla=2, exact=True).logits(tokens)
    monkeypatch.setattr(latent_batch, "_words", lambda x, *kind: words.append(x) or convert(x, *kind))
    logits = load_model(source, mla=2, cache_k=cache_k, fast=fast).logits(tokens)
    has_bf16 = has_bf16_dots() or amx.permitted()
    assert bool(words) == (has_bf16 and cache_k != "f32" and (kind == "q8_0" or fast))
    assert rms(logits - expected) < NOISE * rms(expected)


def test_the_last_rows_of_a_prompt_that_takes_several_passes(tokens):
    model = load_model(model_source("ik"), ubatch=16)
    expected = model.hidden([(model.new_cache(100), tokens)])[0]
    for wanted in (1, 16, 17, len(tokens)):
        whole, rows = model.hidden([(model.new_cache(100), tokens), (model.new_cache(100), tokens)], [None, wanted])
        assert len(whole) == len(tokens)
        assert wanted <= len(rows) < wanted + 16
        logits = model.feed_rows([(model.session(100), tokens, wanted)])[0]
        assert np.abs(logits - model.head(expected[-wanted:])).max() < 1e-5 * rms(logits)


@pytest.mark.parametrize("layout", ["ik", "mainline"])
def test_an_observer_sees_floats_while_packed_rows_multiply(tokens, layout, input_recorder):
    model = load_model(model_source(layout), mla=3)
    session, inputs = model.session(), input_recorder()
    with model.observing(inputs):
        session.feed(tokens[:1])
    seen = {key: x for key, (x,) in inputs.seen.items()}
    names = [
        (f"blk.0.attn_{part}.weight", head) for part in ("k_b", "v_b") for head in range(HEADS if layout == "mainline" else 1)
    ]
    rows = [seen[at] for at in names]
    assert all(x.dtype == np.float32 and len(x) == (1 if layout == "mainline" else HEADS) for x in rows)
    latent = seen["blk.0.attn_kv_b.weight", 0]
    assert np.allclose(seen["blk.0.attn_v_b.weight", 0][0], latent[0], atol=2e-3)  # the first token sees itself, kept as f16


def test_a_matrix_per_head_is_that_of_its_rows():
    draw = np.random.default_rng(1)
    array = draw.standard_normal((3, 24, 64), np.float32)
    for kind, shape in (("q8_0", (3, 24, 64)), ("q8_0_r8", (72, 64)), ("f16", (72, 64))):
        tensor = stored_as("w", array.reshape(shape), kind)
        store = WeightStore(TensorSource("", {}, {"w": tensor}, ""), 1 << 20, 2)
        weights = store.matrix("w").heads(3)
        for part in (None, (8, 24)):
            low, high = part or (0, 24)
            each = HeadWeights(store.matrix("w"), 3, part)
            assert each.gemv_plan is not None
            for n in (1, 5, 9):
                x = draw.standard_normal((3, n, 64), np.float32)
                expected = x @ weights[:, low:high].transpose(0, 2, 1)
                assert each.rows == high - low
                assert rms(each.multiply(x) - expected) < 0.02 * rms(expected)
    interleaved = store_of_interleaved(array)
    assert HeadWeights(interleaved, 3, (4, 24)).gemv_plan is None  # begins within a group of rows
    assert HeadWeights(interleaved, 3, (8, 24)).gemv_plan is not None


def store_of_interleaved(array):
    tensor = stored_as("w", array.reshape(72, 64), "q8_0_r8")
    return WeightStore(TensorSource("", {}, {"w": tensor}, ""), 1 << 20).matrix("w")


def test_nan_in_a_packed_matrix_is_found(tokens):
    source = model_source("mainline")
    name = "blk.1.attn_v_b.weight"
    data = source.tensors[name].mapped.copy()
    data[5, :2] = 0xFF  # the scale of a block
    tensor = dataclasses.replace(
        source.tensors[name], mapped=data, raw=lambda a, b: data[a:b], read=lambda a, b: decode(data[a:b], "q8_0", RANK)
    )
    broken = dataclasses.replace(source, tensors=source.tensors | {name: tensor})
    model = load_model(broken)
    assert np.isnan(model.session().feed(tokens[:1])).any()
    error = model.explain_nonfinite(tokens[:1])
    assert isinstance(error, MillError)
    assert name in str(error)
