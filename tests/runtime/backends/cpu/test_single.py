"""A single token's pass as one program: the same bits as layer by layer, whatever the layers are made of."""

import dataclasses
import threading

import numpy as np
import pytest

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.quantize import decode, encode
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.cpu.kernels.attention.flash import JOB_FIELDS
from ggufmill.runtime.backends.cpu.single import Single

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

# Architecture: metadata beside the usual, tensors of a layer beside the usual (None: taken away), whether it is written down.
CASES = {
    "llama": ({}, {}, True),
    "qwen2": ({}, {f"attn_{p}.bias": (n,) for p, n in (("q", N_EMBD), ("k", 128), ("v", 128), ("output", N_EMBD))}, True),
    "qwen3": ({}, {"attn_q_norm.weight": (WIDTH,), "attn_k_norm.weight": (WIDTH,)}, True),
    "hunyuan-dense": ({}, {"attn_q_norm.weight": (WIDTH,), "attn_k_norm.weight": (WIDTH,)}, True),
    "gemma2": (
        {"attention.sliding_window": 5},
        {"post_attention_norm.weight": (N_EMBD,), "post_ffw_norm.weight": (N_EMBD,)},
        True,
    ),
    "llama-biases": ({}, {"ffn_gate.bias": (N_FF,), "ffn_up.bias": (N_FF,), "ffn_down.bias": (N_EMBD,)}, True),
    "qwen3moe": (EXPERT_KEYS, {"ffn_gate_inp.weight": (N_EMBD, EXPERTS), "exps": ()}, True),
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
        True,
    ),
    "qwen2moe": (  # a gate in front of the shared expert
        EXPERT_KEYS,
        {
            "ffn_gate_inp.weight": (N_EMBD, EXPERTS),
            "exps": (),
            **{f"ffn_{p}_shexp.weight": (N_EMBD, N_FF) for p in ("gate", "up", "down")},
            "ffn_gate_inp_shexp.weight": (N_EMBD,),
        },
        True,
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
        True,
    ),
    "phi3": (
        {},
        {
            **{f"attn_{p}.weight": None for p in "qkv"},
            "attn_qkv.weight": (N_EMBD, N_EMBD + 2 * KV_HEADS * WIDTH),
            "ffn_gate.weight": None,
            "ffn_up.weight": (N_EMBD, 2 * N_FF),
        },
        True,
    ),
    "starcoder2": (
        LAYER_NORM,
        {"ffn_gate.weight": None, "ffn_up.bias": (N_FF,), "ffn_down.bias": (N_EMBD,)}
        | {f"{name}_norm.bias": (N_EMBD,) for name in ("attn", "ffn")},
        True,
    ),
    "nemotron": (LAYER_NORM, {"ffn_gate.weight": None}, True),
    "command-r": (LAYER_NORM, {"ffn_norm.weight": None}, True),
    "granite": ({"residual_scale": 0.3}, {}, True),
    "olmo2": (
        {},
        {
            **{f"{name}.weight": None for name in ("attn_norm", "ffn_norm")},
            **{f"{name}.weight": (N_EMBD,) for name in ("post_attention_norm", "post_ffw_norm", "attn_q_norm")},
            "attn_k_norm.weight": (KV_HEADS * WIDTH,),
        },
        True,
    ),
    "deepseek2": (LATENT_KEYS | YARN | {"attention.q_lora_rank": 64}, LATENT_TENSORS | LOW_RANK, True),
    "deepseek2-lite": (LATENT_KEYS, LATENT_TENSORS, True),
    "minicpm3": (
        LATENT_KEYS | {"attention.q_lora_rank": 64},
        LATENT_TENSORS | LOW_RANK | {"attn_k_b.weight": None, "attn_v_b.weight": None},
        True,
    ),
    # Norms of each head with weights of their own are not known.
    "command-r-plus": (LAYER_NORM, {"ffn_norm.weight": None, "attn_q_norm.weight": (WIDTH, HEADS)}, False),
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
    keys, tensors, _ = CASES[case]
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


def usual_way(model):
    model.executable = dataclasses.replace(model.executable, single=None)
    return model


class Counting:
    """Whether a decoder's program was used."""

    def __init__(self, model):
        self.single, self.taken = model.executable.single, []
        model.executable = dataclasses.replace(model.executable, single=self)

    def __call__(self, x, cache):
        self.taken.append(self.single(x, cache))
        return self.taken[-1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_layer_by_layer(case, threads):
    opened = source(case)
    fast, slow = load_model(opened, threads=threads), usual_way(load_model(opened, threads=threads))
    counting = Counting(fast)
    a, b = fast.session(), slow.session()
    beginning = np.random.default_rng(1).integers(0, VOCABULARY, 60)
    assert np.array_equal(a.feed(beginning), b.feed(beginning))
    for token in range(7):  # the cache grows beyond 64 tokens meanwhile
        assert np.array_equal(a.feed([token]), b.feed([token])), token
    assert counting.taken == [CASES[case][2]] * 7
    # Another sequence, from its first token on, and what several tokens make of what was cached.
    a, b = fast.session(), slow.session()
    for token in (3, 1):
        assert np.array_equal(a.feed([token]), b.feed([token]))
    assert np.array_equal(a.feed([5, 6, 7]), b.feed([5, 6, 7]))


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("case", ["llama", "deepseek2"])
def test_types_of_the_cache(case, kind):
    opened = source(case)
    more = {"mla": 1} if case == "deepseek2" else {}
    models = [load_model(opened, threads=2, cache_k=kind, cache_v="f16", **more) for _ in range(2)]
    counting = Counting(models[0])
    a, b = models[0].session(), usual_way(models[1]).session()
    for token in (3, 1, 2):
        assert np.array_equal(a.feed([token]), b.feed([token]))
    assert all(counting.taken)


def test_long_contexts_are_cut_among_threads():
    opened = source("llama", layers=1)
    fast, slow = load_model(opened, threads=2), usual_way(load_model(opened, threads=2))
    beginning = np.random.default_rng(1).integers(0, VOCABULARY, 500)
    a, b = fast.session(), slow.session()
    assert np.array_equal(a.feed(beginning), b.feed(beginning))
    for token in range(3):
        assert np.array_equal(a.feed([token]), b.feed([token]))
    assert (fast.executable.single._program.jobs[:, JOB_FIELDS.index("splits")] > 1).any()


def test_who_wants_to_see_more_gets_the_usual_way():
    def taken(**settings):
        model = load_model(source("qwen3moe", layers=1), threads=1, **settings)
        counting = Counting(model)
        return model, model.session(), counting.taken

    model, session, used = taken()
    session.feed([1])
    seen, layers = set(), []
    model.executable.store.observer = lambda name, matrix, x: seen.add(name)
    session.feed([2])
    model.executable.store.observer = None
    model.executable.on_layer.append(lambda layer, x: layers.append(layer))
    session.feed([3])
    model.executable.on_layer.clear()
    model.executable.store.watch = True
    session.feed([4])
    model.executable.store.watch = False
    session.feed([5])
    assert used == [True, False, False, False, True]
    assert "blk.0.ffn_down_exps.weight" in seen
    assert layers == [0]
    for settings in ({"flash": False}, {"cache_k": "q8_0"}, {"expert_reduction": (1, 0.5)}, {"exact": True}):
        _, session, used = taken(**settings)
        session.feed([1])
        assert used == [False], settings


def test_what_is_not_known_is_left_alone():
    """An option that was added to a kind of layer without a thought of the program."""
    model = load_model(source("llama", layers=1), threads=1)
    counting = Counting(model)
    model.executable.blocks[0].attention.another_option = True
    model.session().feed([1])
    assert counting.taken == [False]


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
    assert isinstance(model.executable.single, Single)
    assert np.isnan(model.session().feed([1])).all()


@pytest.mark.parametrize("case", ["deepseek2", "deepseek2-lite"])
@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_ways_of_latent_attention(case, mla):
    opened = source(case)
    models = [load_model(opened, threads=2, mla=mla) for _ in range(2)]
    counting = Counting(models[0])
    a, b = models[0].session(), usual_way(models[1]).session()
    for token in (3, 1, 2):
        assert np.array_equal(a.feed([token]), b.feed([token]))
    assert counting.taken == [mla != 2] * 3  # expanding what was cached takes decoded matrices


def test_a_cache_that_grew_while_others_used_it():
    opened = source("llama", layers=2)
    fast, slow = load_model(opened, threads=1), usual_way(load_model(opened, threads=1))
    a, b = fast.session(), slow.session()
    for session in (a, b):
        session.feed([1, 2])
        session.feed([3])
        session.feed(np.arange(30).repeat(5) % VOCABULARY)  # its memory moves
        session.rewind(3)
    for token in (4, 5):
        assert np.array_equal(a.feed([token]), b.feed([token]))
