"""What the mixtures of experts have beside a router and stacks: biases, a limited activation, layers that are not run."""

import numpy as np
import pytest

from ggufmill.formats import FormatError, SourceTensor, TensorSource
from ggufmill.runtime import load_model

N_EMBD, N_FF, EXPERTS, USED, HEADS, WIDTH, LAYERS, WINDOW = 24, 16, 5, 2, 2, 12, 2, 6
YARN = {"type": "yarn", "factor": 32.0, "original_context_length": 64}
TOKENS = np.random.default_rng(8).integers(0, 30, 20)


def gpt_oss():
    """(metadata, arrays in numpy order) of a random gpt-oss, without what its converter does."""
    draw = np.random.default_rng(7)

    def noise(*shape, spread=None):
        return (draw.standard_normal(shape) * (spread or shape[-1] ** -0.5)).astype(np.float32)

    values = {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "expert_feed_forward_length": N_FF,
        "expert_count": EXPERTS,
        "expert_used_count": USED,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "attention.key_length": WIDTH,
        "attention.value_length": WIDTH,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": WINDOW,
        "rope.dimension_count": WIDTH,
        "rope.freq_base": 1000.0,
    }
    tensors = {"token_embd.weight": noise(30, N_EMBD, spread=1.0), "output.weight": noise(30, N_EMBD)}
    tensors["output_norm.weight"] = 1 + noise(N_EMBD, spread=0.2)
    for i in range(LAYERS):
        block = f"blk.{i}"
        tensors[f"{block}.attn_norm.weight"] = 1 + noise(N_EMBD, spread=0.2)
        tensors[f"{block}.post_attention_norm.weight"] = 1 + noise(N_EMBD, spread=0.2)
        for part in ("q", "k", "v", "output"):
            rows = N_EMBD if part == "output" else HEADS * WIDTH
            tensors[f"{block}.attn_{part}.weight"] = noise(rows, N_EMBD)
            tensors[f"{block}.attn_{part}.bias"] = noise(rows, spread=0.3)
        tensors[f"{block}.attn_sinks.weight"] = noise(HEADS, spread=1.0)
        tensors[f"{block}.ffn_gate_inp.weight"] = noise(EXPERTS, N_EMBD)
        tensors[f"{block}.ffn_gate_inp.bias"] = noise(EXPERTS, spread=0.3)
        for part, rows, columns in (("gate", N_FF, N_EMBD), ("up", N_FF, N_EMBD), ("down", N_EMBD, N_FF)):
            tensors[f"{block}.ffn_{part}_exps.weight"] = noise(EXPERTS, rows, columns, spread=1.5)  # the limit has to show
            tensors[f"{block}.ffn_{part}_exps.bias"] = noise(EXPERTS, rows, spread=0.3)
    return {"general.architecture": "gpt-oss"} | {f"gpt-oss.{k}": v for k, v in values.items()}, tensors


def source_of(metadata, tensors):
    def source_tensor(name, array):
        flat = array.reshape(-1, array.shape[-1])
        return SourceTensor(name, array.shape[::-1], "f32", lambda start, stop: flat[start:stop])

    return TensorSource("test model", metadata, {name: source_tensor(name, t) for name, t in tensors.items()}, "test")


def by_hand(metadata, tensors, tokens):
    """Logits, one token and one expert at a time, in float64."""
    t = {name: array.astype(np.float64) for name, array in tensors.items()}

    def normed(x, name):
        return x / np.sqrt((x * x).mean() + 1e-5) * t[f"{name}.weight"]

    def rotated(x, position):
        half = WIDTH // 2
        angles = position * 1000.0 ** (-np.arange(half) / half)
        a, b = x[:half], x[half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])

    xs = [t["token_embd.weight"][token] for token in tokens]
    for i in range(LAYERS):
        block = f"blk.{i}"
        inputs = [normed(x, f"{block}.attn_norm") for x in xs]
        q, k, v = (
            [(t[f"{block}.attn_{p}.weight"] @ x + t[f"{block}.attn_{p}.bias"]).reshape(HEADS, WIDTH) for x in inputs]
            for p in "qkv"
        )
        for n, x in enumerate(list(xs)):
            first = max(0, n + 1 - WINDOW) if i % 2 == 0 else 0
            mixed = []
            for h in range(HEADS):
                query = rotated(q[n][h], n)
                scores = [query @ rotated(k[m][h], m) / np.sqrt(WIDTH) for m in range(first, n + 1)]
                parts = np.exp(np.array([*scores, t[f"{block}.attn_sinks.weight"][h]]))
                mixed.append(sum(p * v[m][h] for p, m in zip(parts, range(first, n + 1), strict=False)) / parts.sum())
            xs[n] = x + t[f"{block}.attn_output.weight"] @ np.concatenate(mixed) + t[f"{block}.attn_output.bias"]
        for n, x in enumerate(list(xs)):
            y = normed(x, f"{block}.post_attention_norm")
            scores = t[f"{block}.ffn_gate_inp.weight"] @ y + t[f"{block}.ffn_gate_inp.bias"]
            best = np.argsort(-scores)[:USED]
            shares = np.exp(scores[best]) / np.exp(scores[best]).sum()
            for expert, share in zip(best, shares, strict=True):
                gate, up = (
                    t[f"{block}.ffn_{p}_exps.weight"][expert] @ y + t[f"{block}.ffn_{p}_exps.bias"][expert]
                    for p in ("gate", "up")
                )
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
                inner = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
                down = t[f"{block}.ffn_down_exps.weight"][expert] @ inner + t[f"{block}.ffn_down_exps.bias"][expert]
                xs[n] = xs[n] + share * down
    return np.array([t["output.weight"] @ normed(x, "output_norm") for x in xs])


def test_gpt_oss_by_hand():
    metadata, tensors = gpt_oss()
    expected = by_hand(metadata, tensors, TOKENS)
    logits = load_model(source_of(metadata, tensors), cache_k="f32", cache_v="f32").logits(TOKENS)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize(
    "name", ["attn_sinks.weight", "ffn_gate_inp.bias", "ffn_down_exps.bias", "ffn_up_exps.bias", "attn_q.bias"]
)
def test_every_bias_counts(name):
    metadata, tensors = gpt_oss()
    before = load_model(source_of(metadata, tensors)).logits(TOKENS)
    without = {k: v for k, v in tensors.items() if not k.endswith(name)}
    assert np.abs(load_model(source_of(metadata, without)).logits(TOKENS) - before).max() > 1e-2


def test_biases_of_a_stack_have_to_fit():
    metadata, tensors = gpt_oss()
    name = "blk.0.ffn_up_exps.bias"
    with pytest.raises(FormatError, match=rf"{name} has shape .*, expected is \(16, 5\)"):
        load_model(source_of(metadata, tensors | {name: tensors[name][:3]}))


def test_layers_for_several_tokens_at_once_are_not_run():
    """llama.cpp's converter counts them in block_count and writes their tensors behind the others'."""
    metadata, tensors = gpt_oss()
    before = load_model(source_of(metadata, tensors)).logits(TOKENS)
    metadata |= {"gpt-oss.block_count": LAYERS + 1, "gpt-oss.nextn_predict_layers": 1}
    more = {k.replace("blk.0.", f"blk.{LAYERS}."): v for k, v in tensors.items() if k.startswith("blk.0.")}
    model = load_model(source_of(metadata, tensors | more))
    assert model.n_layers == LAYERS
    assert np.array_equal(model.logits(TOKENS), before)
