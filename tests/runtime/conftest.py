"""Tiny random models of transformers, and the same weights as a tensor source under GGUF names: both sides of a comparison."""

import math

import numpy as np
import pytest

from ggufmill.formats import SourceTensor, TensorSource
from ggufmill.runtime.graph import Observer, ops


class InputRecorder(Observer):
    """Keeps all inputs of linear ops: (name, matrix) -> [float32 [n, columns]], one per pass."""

    def __init__(self):
        self.seen = {}

    def wants_input(self, op):
        return isinstance(op, ops.Linear | ops.ExpertLinear | ops.LatentAttention)

    def on_input(self, op, weight, matrix, x):
        assert x.dtype == np.float32
        self.seen.setdefault((weight.name, matrix), []).append(x.copy())


@pytest.fixture
def input_recorder():
    return InputRecorder


def make_source(metadata, tensors):
    """tensors: name -> array in numpy order (ne order reversed)."""

    def source_tensor(name, array):
        array = np.ascontiguousarray(array, np.float32)
        flat = array.reshape(-1, array.shape[-1])
        return SourceTensor(name, array.shape[::-1], "f32", lambda start, stop: flat[start:stop])

    return TensorSource("test model", metadata, {name: source_tensor(name, t) for name, t in tensors.items()}, "test")


def _randomised(model, torch):
    """Weights of a size that makes logits of order 1, so that a tolerance of 2e-3 means something."""
    generator = torch.Generator().manual_seed(1)

    def noise(tensor):
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * noise(tensor))
            elif tensor.dim() == 1:
                tensor.copy_((0 if name.endswith("bias") else 1) + 0.2 * noise(tensor))
            else:
                tensor.copy_(noise(tensor) / math.sqrt(tensor.shape[-1]))
    return model.float().eval()


def _pairs_together(weight, heads):
    """Rows of a q or k matrix or bias: Hugging Face keeps the halves of a head apart, GGUF each rotated pair together."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _llama(torch, transformers, rope, **changes):
    options = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
    } | changes
    config = transformers.LlamaConfig(**options)
    model = _randomised(transformers.LlamaForCausalLM(config), torch)
    state = {name: t.detach().numpy() for name, t in model.state_dict().items()}
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": rope["rope_theta"],
        "llama.rope.dimension_count": config.head_dim,
    }
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    tensors = {"token_embd.weight": state["model.embed_tokens.weight"], "output_norm.weight": state["model.norm.weight"]}
    if not config.tie_word_embeddings:
        tensors["output.weight"] = state["lm_head.weight"]
    for name, array in state.items():
        parts = name.split(".")
        if parts[1] == "layers":
            part, kind = ".".join(parts[3:-1]), parts[-1]
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                array = _pairs_together(array, config.num_attention_heads if "q_" in part else config.num_key_value_heads)
            tensors[f"blk.{parts[2]}.{names[part]}.{kind}"] = array
    if rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(rope, config.head_dim)
    elif rope["rope_type"] == "linear":
        metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": rope["factor"]}
    elif rope["rope_type"] == "yarn":
        metadata |= {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": rope["factor"],
            "llama.rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return model, make_source(metadata, tensors)


def _llama3_factors(rope, dims):
    """What the converter of llama.cpp stores: by how much each frequency is divided."""
    factors = []
    for i in range(0, dims, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dims)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


_DEEPSEEK_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}


def _deepseek_source(config, state, sigmoid, layout):
    heads, nope, v, rank = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank
    rope = config.rope_parameters
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "leading_dense_block_count": config.first_k_dense_replace,
        "attention.head_count": heads,
        "attention.head_count_kv": heads,
        "attention.key_length": nope + config.qk_rope_head_dim,
        "attention.value_length": v,
        "attention.kv_lora_rank": rank,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": bool(config.norm_topk_prob),
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    if config.q_lora_rank:
        values["attention.q_lora_rank"] = config.q_lora_rank
    if sigmoid:
        values["expert_gating_func"] = 2
    if config.n_group and config.n_group > 1:
        values |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if rope["rope_type"] == "yarn":
        values |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    if layout == "mainline":
        values |= {"attention.key_length_mla": nope + config.qk_rope_head_dim, "attention.value_length_mla": v}
        values |= {"attention.head_count_kv": 1, "attention.key_length": rank + config.qk_rope_head_dim}
        values |= {"attention.value_length": rank}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }
    for name, array in state.items():
        parts = name.split(".")
        if parts[1] != "layers":
            continue
        prefix, rest = f"blk.{parts[2]}.", ".".join(parts[3:])
        if rest == "mlp.experts.gate_up_proj":
            gate, up = np.split(array, 2, axis=1)
            tensors |= {f"{prefix}ffn_gate_exps.weight": gate, f"{prefix}ffn_up_exps.weight": up}
        elif rest == "self_attn.kv_b_proj.weight":
            k, values_part = np.split(array.reshape(heads, nope + v, rank), [nope], axis=1)
            k_b, v_b = k.transpose(0, 2, 1), values_part
            if layout != "mainline":
                tensors[f"{prefix}attn_kv_b.weight"] = array
            if layout == "ik":
                k_b, v_b = k_b.reshape(heads * rank, nope), v_b.reshape(heads * v, rank)
            if layout != "legacy":
                tensors |= {f"{prefix}attn_k_b.weight": k_b, f"{prefix}attn_v_b.weight": v_b}
        else:
            tensors[prefix + _DEEPSEEK_NAMES[rest]] = array
    metadata = {"general.architecture": "deepseek2"} | {f"deepseek2.{key}": value for key, value in values.items()}
    return make_source(metadata, tensors)


_DEEPSEEK = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 72,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
}


def _yarn(multiplier):
    return {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": multiplier,
        "mscale_all_dim": multiplier,
    }


@pytest.fixture(scope="session")
def build():
    """build(kind, layout='ik') -> (transformers model, tensor source) of the same random weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made = {}

    def llama3(**changes):
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        return _llama(torch, transformers, rope | {"original_max_position_embeddings": 64}, **changes)

    def plain(**changes):
        return _llama(torch, transformers, {"rope_type": "default", "rope_theta": 10000.0}, **changes)

    def v3():
        sizes = {"q_lora_rank": 28, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
        config = transformers.DeepseekV3Config(
            **_DEEPSEEK, **sizes, norm_topk_prob=True, num_nextn_predict_layers=0, rope_parameters=_yarn(1.0)
        )
        return _randomised(transformers.DeepseekV3ForCausalLM(config), torch), True

    def v2(**changes):
        sizes = {"q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.0, "topk_method": "greedy"}
        config = transformers.DeepseekV2Config(**(_DEEPSEEK | sizes | {"rope_parameters": _yarn(0.707)} | changes))
        return _randomised(transformers.DeepseekV2ForCausalLM(config), torch), False

    makers = {
        "llama": plain,
        "llama-biased-tied": lambda: plain(attention_bias=True, tie_word_embeddings=True),
        "llama3": llama3,
        "llama-linear": lambda: _llama(torch, transformers, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
        "llama-yarn": lambda: _llama(
            torch,
            transformers,
            {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        "v3": v3,
        "v2-lite": v2,
        "v2-groups": lambda: v2(
            q_lora_rank=28, topk_method="group_limited_greedy", n_group=4, topk_group=2, routed_scaling_factor=4.0
        ),
    }

    def get(kind, layout="ik"):
        if kind not in made:
            made[kind] = makers[kind]()
        model, second = made[kind]
        if isinstance(second, TensorSource):
            return model, second
        state = {name: t.detach().numpy() for name, t in model.state_dict().items()}
        return model, _deepseek_source(model.config, state, second, layout)

    return get


@pytest.fixture(scope="session")
def tokens():
    """200 token ids below 96."""
    return np.random.default_rng(3).integers(0, 96, 200)


@pytest.fixture(scope="session")
def tiny():
    """A llama of one layer with a vocabulary of single bytes, made without torch: ids 0 BOS, 1 EOS, 2.. the bytes 0 .. 255."""
    random = np.random.default_rng(5)
    n_embd, n_ff, n_head, n_kv, n_vocab = 32, 48, 4, 2, 258
    width = n_embd // n_head

    def matrix(rows, columns):
        return random.standard_normal((rows, columns), np.float32) / math.sqrt(columns)

    tensors = {
        "token_embd.weight": matrix(n_vocab, n_embd) * 4,
        "output_norm.weight": np.ones(n_embd),
        "output.weight": matrix(n_vocab, n_embd) * 2,
        "blk.0.attn_norm.weight": np.ones(n_embd),
        "blk.0.attn_q.weight": matrix(n_embd, n_embd),
        "blk.0.attn_k.weight": matrix(n_kv * width, n_embd),
        "blk.0.attn_v.weight": matrix(n_kv * width, n_embd),
        "blk.0.attn_output.weight": matrix(n_embd, n_embd),
        "blk.0.ffn_norm.weight": np.ones(n_embd),
        "blk.0.ffn_gate.weight": matrix(n_ff, n_embd),
        "blk.0.ffn_up.weight": matrix(n_ff, n_embd),
        "blk.0.ffn_down.weight": matrix(n_embd, n_ff),
    }
    byte_level = [chr(b) if chr(b).isprintable() and b not in (32, 160, 173) else None for b in range(256)]
    others = iter(range(256, 512))
    characters = [c if c is not None else chr(next(others)) for c in byte_level]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_ff,
        "llama.attention.head_count": n_head,
        "llama.attention.head_count_kv": n_kv,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", *characters],
        "tokenizer.ggml.token_type": np.array([3, 3] + [1] * 256, np.int32),
        "tokenizer.ggml.merges": ["zz zz"],  # not usable: its parts are no tokens
        "tokenizer.ggml.bos_token_id": np.uint32(0),
        "tokenizer.ggml.eos_token_id": np.uint32(1),
        "tokenizer.ggml.add_bos_token": True,
    }
    return make_source(metadata, tensors)
