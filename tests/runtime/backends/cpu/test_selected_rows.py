"""Attention to chosen rows, and the scores by which they are chosen, against plain numpy."""

import numpy as np
import pytest
from checkpoint_cases import TOLERANCE, convert_case
from op_graphs import VOCABULARY, Tensors, close, compiled, graph_of, run_both

from ggufmill import quantize_model
from ggufmill.formats import TYPES, PlanError, TensorSource
from ggufmill.quantize import decode, encode
from ggufmill.runtime import load_model
from ggufmill.runtime.backends import reference
from ggufmill.runtime.backends.cpu.attention import AttentionParams
from ggufmill.runtime.backends.cpu.kernels.attention.byte_keys import BYTE_SCORES, round_byte_queries, score_bytes
from ggufmill.runtime.backends.cpu.kernels.attention.index_scores import SCORES, score_keys
from ggufmill.runtime.backends.cpu.kernels.attention.largest_scores import LARGEST, take_largest
from ggufmill.runtime.backends.cpu.kv_cache import CacheRows, KVCache
from ggufmill.runtime.backends.cpu.lower import latent_batch, sparse_attention
from ggufmill.runtime.backends.cpu.selected_rows import GatheredAttention, float_rows, gather
from ggufmill.runtime.cache_layout import CachePart, LayerCache
from ggufmill.runtime.settings import CACHE_TYPES
from ggufmill.simd import team
from ggufmill.simd.workers import Workers

PAST, KV_HEADS, HEADS, WIDTH = 300, 2, 6, 64
PARTS = {
    "f32": CachePart(KV_HEADS, WIDTH),
    "f16": CachePart(KV_HEADS, WIDTH, "f16"),
    "q8_0": CachePart(KV_HEADS, WIDTH, "q8_0"),
    "rotated": CachePart(KV_HEADS, WIDTH, "q8_0", rotation=(64,)),
}


@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("kind", PARTS)
def test_attention_is_that_over_the_chosen_rows(kind, generated):
    draw, part = np.random.default_rng(1), PARTS[kind]
    cache = KVCache([LayerCache({"k": part, "v": part})], 1000)
    for name in "kv":
        cache.put(0, name, draw.standard_normal((PAST, KV_HEADS, WIDTH)).astype(np.float32))
    cache.commit(PAST)
    q, out = draw.standard_normal((5, HEADS, WIDTH)).astype(np.float32), np.empty((5, HEADS, WIDTH), np.float32)
    chosen = [np.sort(draw.permutation(PAST)[:count]) for count in (1, 40, 128, 200, PAST)]
    attention = GatheredAttention(KV_HEADS, AttentionParams(0.2), Workers(2), generated, part, part)
    for row, positions in enumerate(chosen):
        keys, values = (gather(cache.rows(0, name), positions) for name in "kv")
        attention.add(q[row], keys, values, out[row])
    attention.run()
    keys, values = cache.read(0, "k"), cache.read(0, "v")
    for row, positions in enumerate(chosen):
        for head in range(HEADS):
            kv = head * KV_HEADS // HEADS
            weights = np.exp(0.2 * (keys[kv, positions] @ q[row, head]).astype(np.float64))
            expected = weights @ values[kv, positions] / weights.sum()
            assert np.allclose(out[row, head], expected, atol=1e-5 if kind.startswith("f") else 1e-3)
    again = np.empty_like(out[3])  # by itself, and by one thread
    attention = GatheredAttention(KV_HEADS, AttentionParams(0.2), Workers(1), generated, part, part)
    attention.add(q[3], *(gather(cache.rows(0, name), chosen[3]) for name in "kv"), again)
    attention.run()
    assert np.array_equal(again, out[3])


def test_words_of_few_rows_are_those_of_all():
    part = CachePart(1, 96, "f16")
    cache = KVCache([LayerCache({"kv": part})], 200)
    cache.put(0, "kv", np.random.default_rng(3).standard_normal((100, 1, 96)).astype(np.float32))
    cache.commit(97)
    positions = np.array([3, 50, 96, 99])
    few, _ = latent_batch._words_of_rows(cache, 0, 3, positions)
    assert np.array_equal(few.memory, latent_batch._words_of_latents(cache, 0, 3).memory[:, positions])


def test_rows_of_parts_follow_each_other():
    draw = np.random.default_rng(2)
    first, second = draw.standard_normal((3, 24)).astype(np.float32), draw.standard_normal((9, 24)).astype(np.float32)
    rows = float_rows([first, second]).memory
    assert np.array_equal(rows[0, :, :24], np.concatenate([first, second]))
    assert not rows[..., 24:].any()  # kernels read sixteen numbers at a time


@pytest.mark.parametrize(("heads", "run"), [(8, 0), (3, 24)])
@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_scores_of_keys(heads, run, has_factors, as_bytes):
    draw, tokens, count, width, step = np.random.default_rng(3), 3, 1000, 96 if as_bytes else 40, 10 * 24 if run else 256
    q = draw.standard_normal((tokens, heads, width)).astype(np.float32)
    rows = np.zeros((1, count, -(-width // 16) * 16), np.float32)
    rows[..., :width] = draw.standard_normal((count, width))
    keys, factors = CacheRows.of(rows), draw.standard_normal((tokens, heads)).astype(np.float32)
    shape = (tokens, heads, -(-count // run)) if run else (tokens, -(-count // step) * step)
    out = np.full(shape, np.nan, np.float32)
    record, rounding, parts = np.zeros(1, SCORES), np.zeros(1, BYTE_SCORES), -(-count // step)
    rounded, stages = np.empty((tokens * heads, 2 * width), np.uint8), [(1, score_keys.address, record.ctypes.data, parts)]
    sizes = count, factors.ctypes.data if has_factors else 0, run, out.ctypes.data, shape[-1], step
    by = (0, 0)
    if as_bytes:
        keys, by = latent_batch._bytes(rows, Workers(1)), (rounded.ctypes.data, score_bytes.address)
        rounding[0] = (q.ctypes.data, rounded.ctypes.data, len(rounded), width, *(0,) * (len(BYTE_SCORES) - 4))
        stages.append((0, round_byte_queries.address, rounding.ctypes.data, 1))
    record[0] = (q.ctypes.data, tokens, heads, width, keys.address, keys.row_bytes, *sizes, *by)
    team.run(Workers(2).ready(), np.array(sorted(stages), np.int64))
    scores, near = q @ rows[0, :, :width].T, 1e-4
    if as_bytes:  # as numpy rounds both
        q, k = (decode(encode(x, "q8_0"), "q8_0", width) for x in (q.reshape(-1, width), rows[0]))
        scores, near = (q @ k.T).reshape(scores.shape), 0.02 * np.sqrt(heads)
    if run:
        assert np.allclose(out, np.maximum.reduceat(scores, np.arange(0, count, run), axis=2), atol=near)
    else:
        expected = (np.maximum(scores, 0) * (factors if has_factors else np.ones_like(factors))[..., None]).sum(axis=1)
        assert np.allclose(out[:, :count], expected, atol=near)


@pytest.mark.parametrize("kind", ["any", "few values", "signs of zero", "near each other", "not finite"])
@pytest.mark.parametrize("always", [0, 3])
def test_numbers_of_the_largest_scores(kind, always):
    draw, tokens, heads, step = np.random.default_rng(4), 5, 3, 700
    scores = {
        "any": draw.standard_normal((tokens, heads, step)) * 10.0 ** draw.integers(-40, 38, (tokens, heads, step)),
        "few values": draw.integers(-2, 3, (tokens, heads, step)) / 7,
        "signs of zero": np.where(draw.random((tokens, heads, step)) < 0.5, -0.0, 0.0),
        "near each other": 1 + draw.integers(0, 300, (tokens, heads, step)) * 2.0**-23,
        "not finite": np.where(draw.random((tokens, heads, step)) < 0.2, np.inf, -np.inf),
    }[kind].astype(np.float32)
    counts, given = np.array([700, 699, 400, 64, 51]), scores.copy()
    for wanted in (1, 17, 50):
        scores[:] = given
        out = np.full((tokens, heads, wanted + 2), -1, np.float32)
        task = np.zeros(1, LARGEST)
        sizes = scores.ctypes.data, heads, step, counts.ctypes.data, wanted, min(always, wanted)
        task[0] = (*sizes, out.ctypes.data, *out.strides[:2])
        team.run(Workers(2).ready(), np.array([(0, take_largest.address, task.ctypes.data, tokens * heads)], np.int64))
        assert (out[..., wanted:] == -1).all()
        for token, count in enumerate(counts.tolist()):
            for head in range(heads):
                row, taken = given[token, head, :count].copy(), out[token, head, :wanted].astype(np.int64)
                row[count - min(always, wanted) :] = np.inf
                assert (np.diff(taken) > 0).all()
                assert (taken >= 0).all()
                assert np.array_equal(np.sort(row[taken]), np.sort(row)[count - wanted :])


@pytest.mark.parametrize("local", [0, 1])
@pytest.mark.parametrize(("index_heads", "kv_heads"), [(2, 2), (1, 2), (4, 2)])
def test_blocks_that_are_selected_are_those_of_the_reference(local, index_heads, kv_heads):
    """Without a block of its own, a token's last block counts by the keys up to the token."""

    def build(b, x):
        def rows(name, heads, width):
            return b.reshape(b.linear(x, name, heads * width), heads, width)

        chosen = b.select_blocks(rows("iq", index_heads, 8), b.linear(x, "ik", 8), 0, block=4, top_k=3, local=local)
        out = b.attention(rows("q", 4, 8), rows("k", kv_heads, 8), rows("v", kv_heads, 8), 0, 0.5, selection=chosen, block=4)
        return b.add(x, b.linear(out, "o", 32))

    shapes = {"ik__weight": (32, 8), "iq__weight": (32, 8 * index_heads), "q__weight": (32, 32)}
    shapes |= {"k__weight": (32, 8 * kv_heads), "v__weight": (32, 8 * kv_heads), "o__weight": (32, 32)}
    source = TensorSource("test", {}, Tensors(1, **shapes), "test")
    graph = graph_of(source, build)
    both = reference.compile_graph(graph, source), compiled(graph, source, threads=2, exact=True)
    caches = [executable.new_cache(VOCABULARY) for executable in both]
    tokens, start = np.random.default_rng(5).permutation(VOCABULARY), 0  # of two that are equal either block may be chosen
    for count in (1, 2, 40, 3, 1):
        part = tokens[start : start + count]
        expected, found = (e.hidden(part, [(cache, count)]) for e, cache in zip(both, caches, strict=True))
        close(found, expected)
        start += count


def test_heads_that_select_divide_those_of_keys():
    def build(b, x):
        def rows(name, heads, width):
            return b.reshape(b.linear(x, name, heads * width), heads, width)

        chosen = b.select_blocks(rows("iq", 6, 8), b.linear(x, "ik", 8), 0, block=4, top_k=3, local=1)
        out = b.attention(rows("q", 12, 8), rows("k", 4, 8), rows("v", 4, 8), 0, 0.5, selection=chosen, block=4)
        return b.add(x, b.linear(out, "o", 32))

    shapes = {"ik__weight": (32, 8), "iq__weight": (32, 48), "q__weight": (32, 96), "k__weight": (32, 32)}
    with pytest.raises(PlanError, match="6 index heads for 4 key heads"):
        run_both(build, **shapes, v__weight=(32, 32), o__weight=(96, 32))


@pytest.fixture(scope="module")
def wide_latents(tmp_path_factory):
    """Latents so wide that selected ones are brought together only from position 61 on: (tokens, logits, path)."""
    pytest.importorskip("torch")
    changes = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "index_topk": 20}
    return convert_case("deepseek32", tmp_path_factory.mktemp("wide"), changes)


@pytest.mark.oracle
@pytest.mark.parametrize("ubatch", [512, 70, 33])
def test_keys_that_are_not_selected_are_hidden(wide_latents, ubatch, monkeypatch):
    tokens, expected, path = wide_latents
    marked, mark = [], latent_batch.mark_selected
    monkeypatch.setattr(latent_batch, "mark_selected", lambda selection, out: (marked.append(out.shape), mark(selection, out)))
    assert np.abs(load_model(path, ubatch=ubatch, exact=True).logits(tokens) - expected).max() < TOLERANCE
    assert marked


@pytest.mark.oracle
@pytest.mark.parametrize(("ubatch", "rotated"), [(512, False), (33, False), (33, True)])
def test_latents_that_round_are_multiplied_as_words(wide_latents, ubatch, rotated, monkeypatch, tmp_path):
    """Selected ones not where they are rotated."""
    tokens, _, path = wide_latents
    rounded, words = tmp_path / "q8_0.gguf", []
    quantize_model(path, rounded, "q8_0", pure=True)
    exact, errors = load_model(rounded, exact=True).logits(tokens), []
    convert = latent_batch._words
    monkeypatch.setattr(latent_batch, "_words", lambda x, *kind: words.append(x.shape[2]) or convert(x, *kind))
    for may_round in (False, True):
        assert not words
        monkeypatch.setattr(latent_batch, "may_round", lambda *_, may_round=may_round: may_round)
        logits = load_model(rounded, ubatch=ubatch, k_cache_hadamard=rotated).logits(tokens)
        errors.append(np.median(np.abs(logits - exact).max(axis=1)))  # a token may take other experts
    assert set(words) == {64, 32} | ({96} if not rotated else set())  # keys, values, and latents with their rotated keys
    assert errors[1] < 1.5 * errors[0]  # of activations of eight bits


@pytest.mark.oracle
@pytest.mark.parametrize("ubatch", [512, 33])
@pytest.mark.parametrize("cache_k", CACHE_TYPES)
@pytest.mark.parametrize("rotated", [True, False])
def test_prompts_over_caches_of_every_type(wide_latents, ubatch, cache_k, rotated, monkeypatch, tmp_path):
    """Products of bytes over latents in blocks, and there alone, are as near to exact ones as those of words and floats."""
    tokens, _, path = wide_latents
    rounded, read, by_bytes = tmp_path / "q8_0.gguf", [], latent_batch._bytes
    quantize_model(path, rounded, "q8_0", pure=True)
    monkeypatch.setattr(latent_batch, "_bytes", lambda x, *given: read.append(x.shape[2]) or by_bytes(x, *given))
    exact = load_model(rounded, exact=True, cache_k=cache_k, ubatch=ubatch, k_cache_hadamard=rotated).logits(tokens)
    assert not read
    logits = [load_model(rounded, cache_k=cache_k, ubatch=ubatch, k_cache_hadamard=rotated).logits(tokens)]
    assert bool(read) == (not TYPES[cache_k].is_float)
    monkeypatch.setattr(CachePart, "suits_bytes", False)
    logits.append(load_model(rounded, cache_k=cache_k, ubatch=ubatch, k_cache_hadamard=rotated).logits(tokens))
    errors = [np.median(np.abs(x - exact).max(axis=1)) for x in logits]  # a token may take other experts
    assert errors[0] < 2 * errors[1]  # of activations of eight bits


@pytest.mark.oracle
@pytest.mark.parametrize(("weights", "options"), [("f32", {}), ("bf16", {}), ("bf16", {"fast": True}), ("q8_0", {"mla": 1})])
def test_nothing_of_float_weights_or_without_expanded_keys_is_bytes(wide_latents, weights, options, monkeypatch, tmp_path):
    tokens, _, path = wide_latents
    quantize_model(path, tmp_path / "a.gguf", weights, pure=True)
    read, by_bytes = [], latent_batch._bytes
    monkeypatch.setattr(latent_batch, "_bytes", lambda *given: read.append("keys") or by_bytes(*given))
    encoded = sparse_attention.encode_with_nan
    monkeypatch.setattr(sparse_attention, "encode_with_nan", lambda *given: read.append("scores") or encoded(*given))
    load_model(tmp_path / "a.gguf", cache_k="q8_0", **options).logits(tokens)
    assert not read
    load_model(path, cache_k="q8_0", **options).logits(tokens)
    assert not read
    quantize_model(path, tmp_path / "q.gguf", "q8_0", pure=True)
    load_model(tmp_path / "q.gguf", cache_k="q8_0").logits(tokens)
    assert set(read) == {"keys", "scores"}


@pytest.mark.oracle
@pytest.mark.parametrize("mla", [1, 2, 3])
@pytest.mark.parametrize("cache_v", ["f32", "q4_0"])
def test_generated_tokens_read_the_values_of_their_cache(wide_latents, mla, cache_v):
    """As prompts do, whose values they then differ from by as much as these from exact ones."""
    if mla != 1 and cache_v != "f32":
        pytest.skip("latents are cached once there")
    tokens, expected, path = wide_latents
    model = load_model(path, exact=True, mla=mla, cache_k="f32", **({"cache_v": cache_v} if mla == 1 else {}))
    session = model.session()
    session.feed(tokens[:50])
    errors = [np.abs(session.feed(tokens[at : at + 1]) - expected[at]).max() for at in range(50, 80)]
    assert (max(errors) < TOLERANCE) == (cache_v == "f32")
