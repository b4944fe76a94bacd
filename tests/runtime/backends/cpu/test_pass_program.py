"""Passes of whole models with packed weights: one token, a few, many; again and again; side by side; on several threads."""

import dataclasses
import gc
import threading
import weakref

import numpy as np
import pytest

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.quantize import decode, encode
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.cpu.lower import expert_batches

N_EMBD, N_FF, HEADS, KV_HEADS, VOCABULARY, EXPERTS = 256, 256, 4, 2, 40, 6
WIDTH = N_EMBD // HEADS
LATENT, NOPE, ROTATED, V, MANY = 64, 32, 16, 32, 32  # latent attention: rank, parts of a head, heads
LATENT_KEYS = {"attention.kv_lora_rank": LATENT, "rope.dimension_count": ROTATED, "attention.head_count": MANY}
LATENT_KEYS |= {"attention.key_length": NOPE + ROTATED, "attention.value_length": V}
LATENT_TENSORS = {
    "attn_q.weight": (N_EMBD, MANY * (NOPE + ROTATED)),
    "attn_k.weight": None,
    "attn_v.weight": None,
    "attn_kv_a_mqa.weight": (N_EMBD, LATENT + ROTATED),
    "attn_kv_a_norm.weight": (LATENT,),
    "attn_kv_b.weight": (LATENT, MANY * (NOPE + V)),
    "attn_k_b.weight": (NOPE, LATENT * MANY),
    "attn_v_b.weight": (LATENT, V * MANY),
    "attn_output.weight": (MANY * V, N_EMBD),
}
LOW_RANK = {"attn_q.weight": None, "attn_q_a.weight": (N_EMBD, 64), "attn_q_a_norm.weight": (64,)}
LOW_RANK |= {"attn_q_b.weight": (64, MANY * (NOPE + ROTATED))}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.07}
YARN |= {"rope.scaling.original_context_length": 128}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
EXPERT_KEYS = {"expert_count": EXPERTS, "expert_used_count": 3, "expert_feed_forward_length": N_FF}

# Architecture: metadata beside the usual, tensors of a layer beside the usual (None: taken away).
CASES = {
    "llama": ({}, {}),
    "qwen2": ({}, {f"attn_{p}.bias": (n,) for p, n in (("q", N_EMBD), ("k", 128), ("v", 128), ("output", N_EMBD))}),
    "qwen3": ({}, {"attn_q_norm.weight": (WIDTH,), "attn_k_norm.weight": (WIDTH,)}),
    "hunyuan-dense": ({}, {"attn_q_norm.weight": (WIDTH,), "attn_k_norm.weight": (WIDTH,)}),
    "gemma2": (
        {"attention.sliding_window": 5},
        {"post_attention_norm.weight": (N_EMBD,), "post_ffw_norm.weight": (N_EMBD,)},
    ),
    "llama-biases": ({}, {"ffn_gate.bias": (N_FF,), "ffn_up.bias": (N_FF,), "ffn_down.bias": (N_EMBD,)}),
    "qwen3moe": (EXPERT_KEYS, {"ffn_gate_inp.weight": (N_EMBD, EXPERTS), "exps": ()}),
    "glm4moe": (
        EXPERT_KEYS | {"expert_weights_scale": 1.5, "expert_weights_norm": True},
        {
            "ffn_norm.weight": None,
            "post_attention_norm.weight": (N_EMBD,),
            "ffn_gate_inp.weight": (N_EMBD, EXPERTS),
            "exp_probs_b.bias": (EXPERTS,),
            "exps": (),
            **{f"ffn_{p}_shexp.weight": (N_EMBD, N_FF) for p in ("gate", "up", "down")},
        },
    ),
    "qwen2moe": (  # a gate in front of the shared expert
        EXPERT_KEYS,
        {
            "ffn_gate_inp.weight": (N_EMBD, EXPERTS),
            "exps": (),
            **{f"ffn_{p}_shexp.weight": (N_EMBD, N_FF) for p in ("gate", "up", "down")},
            "ffn_gate_inp_shexp.weight": (N_EMBD,),
        },
    ),
    "gpt-oss": (
        EXPERT_KEYS | {"attention.sliding_window": 5},
        {
            "attn_sinks.weight": (HEADS,),
            "ffn_norm.weight": None,
            "post_attention_norm.weight": (N_EMBD,),
            "ffn_gate_inp.weight": (N_EMBD, EXPERTS),
            "ffn_gate_inp.bias": (EXPERTS,),
            "exps": (),
            **{f"ffn_{p}_exps.bias": (N_EMBD, EXPERTS) for p in ("gate", "up", "down")},
        },
    ),
    "phi3": (
        {},
        {
            **{f"attn_{p}.weight": None for p in "qkv"},
            "attn_qkv.weight": (N_EMBD, N_EMBD + 2 * KV_HEADS * WIDTH),
            "ffn_gate.weight": None,
            "ffn_up.weight": (N_EMBD, 2 * N_FF),
        },
    ),
    "starcoder2": (
        LAYER_NORM,
        {"ffn_gate.weight": None, "ffn_up.bias": (N_FF,), "ffn_down.bias": (N_EMBD,)}
        | {f"{name}_norm.bias": (N_EMBD,) for name in ("attn", "ffn")},
    ),
    "nemotron": (LAYER_NORM, {"ffn_gate.weight": None}),
    "command-r": (LAYER_NORM, {"ffn_norm.weight": None}),
    "granite": ({"residual_scale": 0.3}, {}),
    "olmo2": (
        {},
        {
            **{f"{name}.weight": None for name in ("attn_norm", "ffn_norm")},
            **{f"{name}.weight": (N_EMBD,) for name in ("post_attention_norm", "post_ffw_norm", "attn_q_norm")},
            "attn_k_norm.weight": (KV_HEADS * WIDTH,),
        },
    ),
    "deepseek2": (LATENT_KEYS | YARN | {"attention.q_lora_rank": 64}, LATENT_TENSORS | LOW_RANK),
    "deepseek2-lite": (LATENT_KEYS, LATENT_TENSORS),
    "minicpm3": (
        LATENT_KEYS | {"attention.q_lora_rank": 64},
        LATENT_TENSORS | LOW_RANK | {"attn_k_b.weight": None, "attn_v_b.weight": None},
    ),
    # Norms of each head with weights of their own are not known.
    "command-r-plus": (LAYER_NORM, {"ffn_norm.weight": None, "attn_q_norm.weight": (WIDTH, HEADS)}),
}
NAMES = {"llama-biases": "llama", "deepseek2-lite": "deepseek2", "command-r-plus": "command-r"}
USUAL = {
    "attn_norm.weight": (N_EMBD,),
    "attn_q.weight": (N_EMBD, N_EMBD),
    "attn_k.weight": (N_EMBD, KV_HEADS * WIDTH),
    "attn_v.weight": (N_EMBD, KV_HEADS * WIDTH),
    "attn_output.weight": (N_EMBD, N_EMBD),
    "ffn_norm.weight": (N_EMBD,),
    "ffn_gate.weight": (N_EMBD, N_FF),
    "ffn_up.weight": (N_EMBD, N_FF),
    "ffn_down.weight": (N_FF, N_EMBD),
}
# Products that want other kinds of activations stand side by side.
STORED = {"attn_q": "q4_K", "attn_k": "q8_0", "attn_v": "bf16", "ffn_up": "iq4_ks", "ffn_gate_inp": "f32", "output": "q8_0"}


def stored(name, shape, random):
    rows = int(np.prod(shape[1:]))
    values = (random.standard_normal((rows, shape[0])) / np.sqrt(shape[0])).astype(np.float32)
    if len(shape) == 1 or "bias" in name or "norm" in name:
        values = values if name.endswith("bias") else 1 + values
        return SourceTensor(name, shape, "f32", lambda start, stop: values[start:stop])
    kind = "q8_0" if shape[0] % 256 else STORED.get(name.split(".")[-2].removesuffix("_exps"), "q4_K")
    q = encode(values, kind)
    return SourceTensor(
        name,
        shape,
        kind,
        lambda start, stop: decode(q[start:stop], kind, shape[0]),
        raw=lambda start, stop: q[start:stop],
        stored=TYPES[kind],
        mapped=q,
    )


def source(case, layers=3):
    keys, tensors = CASES[case]
    architecture = NAMES.get(case, case)
    layer = {name: shape for name, shape in (USUAL | tensors).items() if shape is not None}
    if "exps" in layer:
        del layer["exps"]
        for p in ("gate", "up", "down"):
            layer[f"ffn_{p}_exps.weight"] = (*layer.pop(f"ffn_{p}.weight"), EXPERTS)
    shapes = {"token_embd.weight": (N_EMBD, VOCABULARY), "output_norm.weight": (N_EMBD,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    metadata = {
        "block_count": layers,
        "context_length": 512,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": WIDTH,
        **keys,
    }
    random = np.random.default_rng(3)
    return TensorSource(
        "test model",
        {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in metadata.items()},
        {name: stored(name, shape, random) for name, shape in shapes.items()},
        "test",
    )


def feed_all(session, batches):
    return [session.feed(batch) for batch in batches]


BEGINNING = np.random.default_rng(1).integers(0, VOCABULARY, 60)
SINGLE = [[token] for token in (3, 1, 4, 1, 5)]  # the cache grows beyond 64 tokens meanwhile


@pytest.mark.parametrize("case", CASES)
def test_threads_and_company_change_no_bits(case):
    """One thread or two, a token by itself or with those of other sequences, a pass that is written or one used again."""
    opened = source(case)
    alone, shared = load_model(opened, threads=1), load_model(opened, threads=2)
    batches = [BEGINNING, *SINGLE, [5, 6, 7], BEGINNING[:20]]
    expected = feed_all(alone.session(), batches)
    for _ in range(2):
        found = feed_all(shared.session(), batches)
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
    sessions = [shared.session() for _ in range(3)]
    for session, length in zip(sessions, (60, 7, 30), strict=True):
        session.feed(BEGINNING[:length])
    forks = [session.fork() for session in sessions]
    for token in (3, 1):
        together = shared.feed([(session, [token + i]) for i, session in enumerate(sessions)])
        for i, fork in enumerate(forks):
            assert np.array_equal(fork.feed([token + i]), together[i])


@pytest.mark.parametrize("case", CASES)
def test_token_by_token_is_all_at_once_within_rounding(case):
    """With exact products: rounded activations would differ between GEMV and GEMM."""
    model = load_model(source(case), threads=2, exact=True)
    expected = model.logits(BEGINNING[:25])
    session = model.session()
    found = [session.feed(BEGINNING[i : i + 1]) for i in range(9)]
    found += [session.feed(BEGINNING[9:12]), session.feed(BEGINNING[12:25])]
    scale = np.abs(expected).max()
    assert np.abs(np.array(found) - expected[[*range(9), 11, 24]]).max() < 1e-4 * scale


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("case", ["llama", "deepseek2"])
def test_types_of_the_cache(case, kind):
    opened = source(case)
    more = {"mla": 1} if case == "deepseek2" else {}
    types = {"cache_k": "f16" if (case, kind) == ("deepseek2", "q8_0") else kind, "cache_v": kind}
    expected = feed_all(load_model(opened, threads=1, **more).session(), [BEGINNING, *SINGLE])
    found = feed_all(load_model(opened, threads=2, **types, **more).session(), [BEGINNING, *SINGLE])
    for a, b in zip(expected, found, strict=True):
        assert np.abs(a - b).max() < 0.1 * np.abs(a).max()


def test_long_contexts_are_divided_among_threads():
    opened = source("llama", layers=1)
    alone, shared = (load_model(opened, threads=threads, exact=True).session() for threads in (1, 2))
    beginning = np.random.default_rng(1).integers(0, VOCABULARY, 500)
    for batch in (beginning, [1], [2], [3]):
        assert np.array_equal(shared.feed(batch), alone.feed(batch))
    executable = shared.model.executable
    written = executable._passes[(1,), ("k", "v"), True, False, len(executable.steps)][0]
    (jobs,) = written.attention._groups[0].values()
    assert jobs.division.splits > 1
    assert jobs.memory.size


@pytest.mark.parametrize("settings", [{"flash": False}, {"cache_k": "q8_0"}, {"expert_reduction": (1, 0.5)}, {"exact": True}])
def test_settings_that_take_other_steps(settings):
    opened = source("qwen3moe", layers=2)
    alone, shared = (load_model(opened, threads=threads, **settings) for threads in (1, 2))
    expected, found = (feed_all(model.session(), [BEGINNING, *SINGLE, [5, 6, 7]]) for model in (alone, shared))
    for a, b in zip(expected, found, strict=True):
        assert np.array_equal(a, b)
    usual = feed_all(load_model(opened, threads=1).session(), [BEGINNING])[0]
    if "expert_reduction" in settings:
        assert np.abs(found[0] - usual).max() > 1e-3


@pytest.mark.parametrize("case", ["qwen3moe", "glm4moe", "gpt-oss"])
def test_memory_for_experts_changes_nothing(case, monkeypatch):
    model = load_model(source(case), threads=2)
    expected = model.logits(BEGINNING)
    monkeypatch.setattr(expert_batches, "CHUNK_BYTES", 1)  # an expert at a time
    assert np.array_equal(model.logits(BEGINNING), expected)


def test_several_threads_may_use_one_model():
    model = load_model(source("llama"), threads=2)
    alone = [model.session().feed([token]) for token in range(4)]
    found = {}

    def feed(token):
        found[token] = [model.session().feed([token]) for _ in range(5)]

    threads = [threading.Thread(target=feed, args=(token,)) for token in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for token, results in found.items():
        assert all(np.array_equal(result, alone[token]) for result in results)


def test_nan_goes_through():
    opened = source("llama")
    bad = opened.tensors["blk.1.attn_norm.weight"]
    spoiled = np.full((1, N_EMBD), np.nan, np.float32)
    opened.tensors["blk.1.attn_norm.weight"] = dataclasses.replace(bad, read=lambda start, stop: spoiled)
    model = load_model(opened, threads=1)
    for n in (1, 5, 20):
        assert np.isnan(model.session().feed(BEGINNING[:n])).all()
        assert "blk.1.attn_norm.weight" in str(model.explain_nonfinite(BEGINNING[:n]))


@pytest.mark.parametrize("case", ["deepseek2", "deepseek2-lite", "minicpm3"])
@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_modes_of_latent_attention(case, mla):
    opened = source(case)
    expected = feed_all(load_model(opened, threads=1, exact=True).session(), [BEGINNING, *SINGLE, [5, 6]])
    model = load_model(opened, threads=2, mla=mla, exact=True)
    found = feed_all(model.session(), [BEGINNING, *SINGLE, [5, 6]])
    for a, b in zip(expected, found, strict=True):
        assert np.abs(a - b).max() < 1e-4 * np.abs(a).max()


def test_a_cache_that_grew_while_others_used_it():
    model = load_model(source("llama", layers=2), threads=1)
    a, b = model.session(), model.session()
    for session in (a, b):
        session.feed([1, 2])
        session.feed([3])
    a.feed(np.arange(30).repeat(5) % VOCABULARY)  # its memory moves
    a.rewind(3)
    for token in (4, 5):
        assert np.array_equal(a.feed([token]), b.feed([token]))


@pytest.mark.parametrize("case", ["qwen3moe", "llama"])
def test_nothing_is_left_of_a_pass_that_is_not_kept(case, monkeypatch):
    """Its blocks, and whatever has views of them, without a collection of garbage."""
    from ggufmill.runtime.backends.cpu import executable, memory

    blocks = []
    made = memory.Block.__init__

    def counted(self, *arguments):
        made(self, *arguments)
        blocks.append(weakref.ref(self.array.base))

    monkeypatch.setattr(memory.Block, "__init__", counted)
    monkeypatch.setattr(executable, "CACHED_BYTES", 0)
    model = load_model(source(case), threads=2)
    gc.collect()
    gc.disable()
    try:
        hidden = model.hidden_of_windows(np.zeros((2, 40), np.int64))
        logits = model.head(hidden[0])
        del logits
    finally:
        gc.enable()
    assert len(blocks) > 10
    assert sum(block() is not None for block in blocks) == 0
