"""A token has the same results, to the bit, whatever is cached, whatever else a pass computes, and however a prompt is divided
into passes: with every architecture, kind of attention and type of weights. A generated token has other bits than one of a
prompt, and always the same."""

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
from recorded_models import LATENT, kept_cases, record_of

from ggufmill import quantize_model
from ggufmill.convert import open_source
from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.cpu.kernels.attention import job_parts
from ggufmill.runtime.backends.cpu.kernels.gemm.vector_products import has_bf16_dots
from ggufmill.runtime.backends.cpu.lower import experts
from ggufmill.simd.target import target

DEMO = FOLDER / "demo"  # fp8, latent attention, experts
LENGTH = 150  # more than a block of keys, and than all windows
READ, PROMPTS = 120, [[7], [3, 4, 40, 41, 90], [108, 109]]
# One of each kind of attention, of recurrent layers and of experts; the others take longer.
KINDS = ["llama", "v3", "deepseek4", "gpt-oss", "llama4", "minimax-m3-odd", "mamba", "kimi-linear", "lfm2", "mpt-clip"]
RUNS = [(case, mla) for case in kept_cases() for mla in ((0, 1, 2, 3) if case in LATENT else (None,))]
# Others than the kept cases have: matrices that are read in blocks, by codebooks and trellises, interleaved, decoded for GEMM,
# without GEMV, of floats, and of a checkpoint; two of mixtures.
TYPES_OF_DEMO = ["f16", "bf16", "q8_0", "q4_K", "iq4_k", "iq3_xxs", "iq4_kt", "mxfp4", "q4_k_r4", "bf16_r16", "iq1_bn", "fp8"]


def packed(source, kind):
    """The source with its matrices in another type, as far as that can hold them."""

    def pack(tensor):
        columns, rows = tensor.shape[0], tensor.shape[1] if len(tensor.shape) > 1 else 1
        fits = len(tensor.shape) > 1 and "norm" not in tensor.name and not columns % TYPES[kind].block and rows > 1
        name = kind if fits else "f32"
        runs = [tensor.read(at, at + rows) for at in range(0, tensor.n_rows, rows)]
        data = encode(np.concatenate(runs), name)
        return dataclasses.replace(
            tensor,
            source_type=name,
            read=lambda start, stop: decode(data[start:stop], name, columns),
            raw=lambda start, stop: data[start:stop],
            stored=TYPES[name],
            mapped=data,
        )

    whole_numbers = [name for name, tensor in source.tensors.items() if "tid2eid" in name or tensor.source_type.startswith("i")]
    return dataclasses.replace(source, tensors={n: t if n in whole_numbers else pack(t) for n, t in source.tensors.items()})


def text_of(model, case=None):
    """Tokens, LENGTH of them or as many as there are positions."""
    if case is None:
        return np.random.default_rng(1).integers(3, model.n_vocab, LENGTH)
    return np.resize(record_of(case).tokens, min(LENGTH, model.graph.n_positions or LENGTH))


def check_prompts(models, tokens):
    """Whole, cut, and beside other sequences."""
    (whole,) = models[0].hidden([(models[0].new_cache(LENGTH), tokens)])
    assert np.isfinite(whole).all()
    for model in models:
        for cuts in PROMPTS:
            cache = model.new_cache(LENGTH)
            ends = pairwise([0, *(cut for cut in cuts if cut < len(tokens)), len(tokens)])
            found = [model.hidden([(cache, tokens[start:end])])[0] for start, end in ends]
            assert np.array_equal(np.concatenate(found), whole), cuts
        caches = [model.new_cache(LENGTH) for _ in range(3)]
        model.hidden([(cache, tokens[start:60]) for cache, start in zip(caches[:2], (0, 20), strict=True)])
        following = [tokens[:5], tokens[60:], tokens[:9]]
        found = model.hidden(list(zip([caches[1], caches[0], caches[2]], following, strict=True)))
        assert np.array_equal(found[1], whole[60:])
        # Of the last layer only what is wanted is computed.
        batch = [(model.new_cache(LENGTH), tokens), (model.new_cache(LENGTH), tokens[:9])]
        found = model.hidden(batch, [2, 1])
        assert [len(rows) for rows in found] == [2, 1]
        assert np.array_equal(found[0], whole[-2:])
        assert np.array_equal(found[1], whole[8:9]) or not model.graph.is_causal
        if model.has_head:
            logits = model.head(whole[:20], False)
            assert np.array_equal(np.concatenate([model.head(whole[:3], False), model.head(whole[3:20], False)]), logits)


def check_generated(models, tokens):
    """One by one, several at a time as drafts are, and beside other sequences."""

    def start(model, ids):
        cache = model.new_cache(LENGTH)
        model.hidden([(cache, ids)])
        return cache

    n_read = min(READ, len(tokens) - 30)
    rest, expected = tokens[n_read:], None
    for model in models:
        for step in (1, 2, 8, 24):
            cache = start(model, tokens[:n_read])
            runs = [rest[at : at + step] for at in range(0, len(rest), step)]
            found = np.concatenate([model.hidden([(cache, run)], generated=True)[0] for run in runs])
            expected = found if expected is None else expected
            assert np.array_equal(found, expected), step
        cache, others = start(model, tokens[:n_read]), [start(model, tokens[i : 5 * i + 2]) for i in range(4)]
        for i in range(0, 24, 2):
            beside = [(other, tokens[i : i + 1]) for other in others]
            found = model.hidden([*beside[:2], (cache, rest[i : i + 2]), *beside[2:]], generated=True)[2]
            assert np.array_equal(found, expected[i : i + 2])
        if model.has_head:
            logits = model.head(expected[:8])
            assert np.array_equal(np.concatenate([model.head(expected[i : i + 1]) for i in range(8)]), logits)


@pytest.mark.slow(keep=[f"{case}-{mla}" for case, mla in RUNS if case in KINDS and (case != "kimi-linear" or mla == 1)])
@pytest.mark.parametrize(("case", "mla"), RUNS)
def test_architectures(build, case, mla, alive_stores):
    """And nothing of a model stays when the last reference to it goes."""
    source = packed(build(case), "q8_0")
    mode = {} if mla is None else {"mla": mla}
    models = [load_model(source, threads=1, **mode), load_model(source, threads=2, ubatch=24, **mode)]
    check_prompts(models, text_of(models[0], case))
    check_generated(models, text_of(models[0], case))
    del models
    assert not alive_stores


@pytest.mark.parametrize("case", ["gpt-oss", "v3"])
def test_short_prompts_of_mixtures(build, case):
    """Experts by the products of generated tokens, all else by those of prompts: the same for every part of what is wanted, and
    whatever other sequences there are."""
    source, found = packed(build(case), "q8_0"), []
    for model in (load_model(source, threads=1), load_model(source, threads=2)):
        n, tokens = model.short_prompt, text_of(model, case)
        assert model.decode_batch < n
        (whole,) = model.hidden([(model.new_cache(LENGTH), tokens[:n])], generated=True)
        for count in (1, n - 1):
            (last,) = model.hidden([(model.new_cache(LENGTH), tokens[:n])], [count], generated=True)
            assert np.array_equal(last, whole[-count:])
        others = [(model.new_cache(LENGTH), tokens[i : i + 3]) for i in range(2)]
        beside = model.hidden([others[0], (model.new_cache(LENGTH), tokens[:n]), others[1]], generated=True)
        assert [len(rows) for rows in beside] == [3, n, 3]
        assert np.array_equal(beside[1], whole)
        (alone,) = model.hidden([(model.new_cache(LENGTH), others[0][1])], generated=True)
        assert np.array_equal(beside[0], alone)
        (prompt,) = model.hidden([(model.new_cache(LENGTH), tokens[:n])])
        assert not np.array_equal(whole, prompt)
        assert np.abs(whole - prompt).max() < 0.05 * np.abs(prompt).max()
        found.append(whole)
    assert np.array_equal(*found)
    assert load_model(source, ubatch=n - 1).short_prompt == model.decode_batch


@pytest.mark.slow(keep=["v3-*"])
@pytest.mark.parametrize("settings", [{"flash": False}, {"exact": True}, {"k_cache_hadamard": True, "v_cache_hadamard": True}])
@pytest.mark.parametrize("case", ["llama", "gpt-oss", "v3", "qwen4exp-odd"])
def test_settings(build, case, settings):
    source = packed(build(case), "q8_0")
    if case == "v3" and "v_cache_hadamard" in settings:
        settings = settings | {"mla": 1}
    models = [load_model(source, threads=1, **settings), load_model(source, threads=2, ubatch=24, **settings)]
    check_prompts(models, text_of(models[0], case))
    check_generated(models, text_of(models[0], case))


def with_wide_rotations():
    """The record of DeepSeek-V3 with rotated keys of 32 numbers in place of 16."""
    record = record_of("v3")
    config = json.loads(record.config) | {"qk_rope_head_dim": 32}
    rows = {
        "self_attn.kv_a_proj_with_mqa.weight": config["kv_lora_rank"] + 32,
        "self_attn.q_b_proj.weight": config["num_attention_heads"] * (config["qk_nope_head_dim"] + 32),
    }
    table = {
        name: ((next((n for end, n in rows.items() if name.endswith(end)), shape[0]), *shape[1:]), mean)
        for name, (shape, mean) in record.table.items()
    }
    return dataclasses.replace(record, config=json.dumps(config), table=table)


@pytest.mark.slow(keep=["3-f16"])
@pytest.mark.parametrize("cache", ["f16", "q8_0"])
@pytest.mark.parametrize("mla", [0, 1, 3])
def test_attention_that_rounds(mla, cache, monkeypatch, tmp_path):
    """In generated tokens as where many heads share keys."""
    with_wide_rotations().write(tmp_path)
    source, found = packed(open_source(tmp_path, vocab=False), "f32"), []
    for least in (1, 1000):
        monkeypatch.setattr(job_parts, "_ROUNDED_QUERIES", least)
        settings = {"cache_k": cache, "cache_v": cache, "fast": True, "mla": mla}
        models = [load_model(source, threads=1, **settings), load_model(source, threads=2, ubatch=24, **settings)]
        tokens = text_of(models[0], "v3")
        if least == 1:
            check_prompts(models, tokens)
        check_generated(models, tokens)
        found.append(models[0].hidden([(models[0].new_cache(LENGTH), tokens)], generated=True)[0])
    has_dots = has_bf16_dots() if cache == "f16" else target().has_vnni or target().has_avx_vnni
    assert np.array_equal(*found) != has_dots
    differences = np.linalg.norm(found[0] - found[1], axis=1) / np.linalg.norm(found[1], axis=1)
    assert np.median(differences) < 0.03  # some have other experts


CACHES = [
    {"cache_k": "q8_0"},
    {"cache_v": "q8_0", "mla": 1},
    {"cache_k": "bf16", "mla": 0},
    {"cache_k": "q4_0", "cache_v": "q5_0", "mla": 0},
    {"cache_k": "q4_0", "k_cache_hadamard": False},
    {"k_cache_hadamard": True, "v_cache_hadamard": True, "mla": 1},
    {"cache_k_first": ("q8_0", 1), "cache_k_last": ("q5_0", 2), "cache_v_last": ("q4_0", 1), "mla": 1},
]


@pytest.mark.slow(keep=["settings0"])
@pytest.mark.parametrize("settings", CACHES)
def test_types_of_the_cache(settings):
    models = [load_model(DEMO, threads=1, **settings), load_model(DEMO, threads=2, ubatch=24, **settings)]
    check_prompts(models, text_of(models[0]))
    check_generated(models, text_of(models[0]))


@pytest.mark.slow(keep=["q8_0", "q4_K"])
@pytest.mark.parametrize("kind", TYPES_OF_DEMO)
def test_types(tmp_path, kind):
    path = DEMO if kind == "fp8" else tmp_path / "demo.gguf"
    if kind != "fp8":
        quantize_model(DEMO, path, kind, pure=True)
    models = [load_model(path, threads=1), load_model(path, threads=2, ubatch=24, repack=kind == "q4_K")]
    check_prompts(models[:1] if kind == "q4_K" else models, text_of(models[0]))
    check_generated(models[:1] if kind == "q4_K" else models, text_of(models[0]))
    if kind == "q4_K":  # interleaved, its sums have another order
        check_prompts(models[1:], text_of(models[1]))


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 300])
def test_compressed_attention_to_more_than_a_tile_of_keys(build, window):
    """Where sums of products go over several runs of columns, which are the same for a query in every pass."""
    source = packed(build("deepseek4"), "f32")
    if window is not None:
        source.metadata["deepseek4.attention.sliding_window"] = window
    model = load_model(source, threads=2)
    tokens = np.random.default_rng(2).integers(3, model.n_vocab, 1200)
    (whole,) = model.hidden([(model.new_cache(1200), tokens)])
    for cuts in ([700], [1001, 1100], [1199]):
        cache = model.new_cache(1200)
        found = [model.hidden([(cache, tokens[start:end])])[0] for start, end in pairwise([0, *cuts, 1200])]
        assert np.array_equal(np.concatenate(found), whole)


@pytest.mark.parametrize("case", ["gpt-oss", "v3"])
def test_experts_as_tasks_and_in_batches(build, case, monkeypatch):
    source, found = packed(build(case), "q8_0"), []
    for limit in (experts.TASK_BYTES, 0):
        monkeypatch.setattr(experts, "TASK_BYTES", limit)
        model = load_model(source, threads=2)
        assert any(isinstance(step, experts.ExpertsStep) and step.gemm_tile for step in model.executable.steps)
        tokens = text_of(model, case)[:40]
        cuts = [0, 1, 3, 10, 40]
        cache = model.new_cache(LENGTH)
        found.append(np.concatenate([model.hidden([(cache, tokens[a:b])])[0] for a, b in pairwise(cuts)]))
    assert np.array_equal(*found)
