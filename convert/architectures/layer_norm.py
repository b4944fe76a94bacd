"""Models with LayerNorm instead of RMSNorm: StarCoder 2, Nemotron, Command-R, Jais 2, Phi-3.5 MoE, StableLM, Phi 1 and 2.

All raise FormatError for settings that cannot be converted.
"""

from __future__ import annotations

from ..config import Config
from ..model_spec import ModelSpec
from ..tensor_transforms import add_one, stack_rows
from .decoder_spec import CheckpointNames, DecoderSpec, LayerTensor, linear
from .llama import MIXTRAL_EXPERTS

EPSILON = "attention.layer_norm_epsilon"  # metadata key; its name in config.json differs
COHERE_DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}
NEMOTRON_ROPE_FRACTION = 0.5  # the default of the model's own code


def starcoder2(config: Config, mla_layout: str) -> ModelSpec:
    """StarCoder 2: biases everywhere, a feed-forward block without a gate."""
    config = config.with_defaults({"norm_epsilon": 1e-5})
    config.require("hidden_act", "gelu_pytorch_tanh", "this activation")
    spec = DecoderSpec("starcoder2", config, norm=(EPSILON, "norm_epsilon"))
    window = config.get("sliding_window")
    if window is not None and window < config.integer("max_position_embeddings"):
        spec.add_sliding_window([True] * spec.n_layers)
        spec.notes.append(f"llama.cpp does not know of the sliding window of {window} tokens in this architecture")
    bias = config.flag("use_bias", True)
    layer = [
        *spec.layer_norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias),
        *spec.layer_norm("ffn_norm", "post_attention_layernorm"),
        *linear("ffn_up", "mlp.c_fc", (spec.intermediate_size, spec.hidden_size), bias=bias),
        *linear("ffn_down", "mlp.c_proj", (spec.hidden_size, spec.intermediate_size), bias=bias),
    ]
    return spec.build(layer, norm_bias=True, tied=True)


def nemotron(config: Config, mla_layout: str) -> ModelSpec:
    """Nemotron 3 and 4, Minitron: norms that multiply by 1 + weight, squared ReLU without a gate, partial rotation."""
    config.require("hidden_act", "relu2", "this activation")
    config = config.with_defaults({"norm_eps": 1e-5})
    fraction = config.get("partial_rotary_factor", config.get("rope_percent", config.get("rope_percentage")))
    rope = config.with_defaults({"partial_rotary_factor": fraction or NEMOTRON_ROPE_FRACTION})
    spec = DecoderSpec("nemotron", config, norm=(EPSILON, "norm_eps"), rope=rope)
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    layer = [
        *spec.layer_norm("attn_norm", "input_layernorm", add_one),
        *spec.attention(bias=bias, output_bias=bias),
        *spec.layer_norm("ffn_norm", "post_attention_layernorm", add_one),
        *linear("ffn_up", "mlp.up_proj", (spec.intermediate_size, spec.hidden_size), bias=mlp_bias),
        *linear("ffn_down", "mlp.down_proj", (spec.hidden_size, spec.intermediate_size), bias=mlp_bias),
    ]
    return spec.build(layer, norm_transform=add_one, norm_bias=True, needs_output=True)


def jais2(config: Config, mla_layout: str) -> ModelSpec:
    """Jais 2: biases everywhere, squared ReLU without a gate."""
    config.require("hidden_act", "relu2", "this activation")
    spec = DecoderSpec("jais2", config.with_defaults({"layer_norm_eps": 1e-5}), norm=(EPSILON, "layer_norm_eps"))
    bias, mlp_bias = config.flag("attention_bias", True), config.flag("mlp_bias", True)
    layer = [
        *spec.layer_norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias),
        *spec.layer_norm("ffn_norm", "post_attention_layernorm"),
        *linear("ffn_up", "mlp.up_proj", (spec.intermediate_size, spec.hidden_size), bias=mlp_bias),
        *linear("ffn_down", "mlp.down_proj", (spec.hidden_size, spec.intermediate_size), bias=mlp_bias),
    ]
    return spec.build(layer, norm_bias=True)


def phimoe(config: Config, mla_layout: str) -> ModelSpec:
    """Phi-3.5 MoE: two experts in each layer, chosen by SparseMixer (arXiv:2409.12136), LongRoPE with its own magnitude."""
    config.require("hidden_act", "silu", "this activation")
    config.require("num_experts_per_tok", 2, "a choice of other than two experts")
    config = config.with_defaults({"rope_theta": 1e6})
    settings = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(settings, dict) and settings.get("long_mscale") is not None:
        if settings.get("short_mscale") != settings["long_mscale"]:
            config.lose("short_mscale and long_mscale of the rotary embedding differ: a GGUF can only say the latter, for both")
        key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
        config = config.with_values({key: settings | {"attention_factor": settings["long_mscale"]}})
    spec = DecoderSpec("phimoe", config)
    spec.add_float32({"expert_router_jitter": config.number("router_jitter_noise", 0.01)})
    window = config.get("sliding_window")
    if window is not None and window < config.integer("max_position_embeddings"):
        spec.add_sliding_window([True] * spec.n_layers)
    n, bias = spec.add_expert_counts("num_local_experts"), config.flag("attention_bias", False)
    layer = [
        *spec.layer_norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias),
        *spec.layer_norm("ffn_norm", "post_attention_layernorm"),
        *spec.experts(n, spec.intermediate_size, MIXTRAL_EXPERTS, "block_sparse_moe.gate"),
    ]
    return spec.build(layer, norm_bias=True, head_bias=config.flag("lm_head_bias", False))


def stablelm(config: Config, mla_layout: str) -> ModelSpec:
    """StableLM 3B, 2 1.6B and 12B: a gated feed-forward block; in 12B parallel to the attention, with a norm of each head."""
    config.require("hidden_act", "silu", "this activation")
    config = config.with_defaults({"layer_norm_eps": config.number("norm_eps", 1e-5)})
    rope = config.with_defaults({"partial_rotary_factor": config.number("rope_pct", 0.25)})
    spec = DecoderSpec("stablelm", config, norm=(EPSILON, "layer_norm_eps"), rope=rope)
    parallel = config.flag("use_parallel_residual", False)
    spec.metadata["stablelm.use_parallel_residual"] = parallel
    layer = [*spec.layer_norm("attn_norm", "input_layernorm"), *spec.attention(bias=config.flag("use_qkv_bias", False))]
    if config.flag("qk_layernorm", False):
        for part, heads in (("q", spec.n_heads), ("k", spec.n_kv_heads)):
            source = f"self_attn.{part}_layernorm.norms.{{}}.weight"
            layer.append(LayerTensor(f"attn_{part}_norm.weight", source, (spec.head_dim,), stack_rows, heads))
    if not parallel:
        layer += spec.layer_norm("ffn_norm", "post_attention_layernorm")
    return spec.build([*layer, *spec.gated_mlp()], norm_bias=True, needs_output=True)


def phi2(config: Config, mla_layout: str) -> ModelSpec:
    """Phi 1, 1.5 and 2: attention and feed-forward block in parallel after one norm, biases everywhere, in the output too."""
    config.require("hidden_act", "gelu_new", "this activation")
    config.require("qk_layernorm", False, "a norm of queries and keys")
    config.require("tie_word_embeddings", False, "an output that is tied to the embeddings")
    config = config.with_defaults({"layer_norm_eps": 1e-5})
    rope = config.with_defaults({"partial_rotary_factor": 0.5})
    spec = DecoderSpec("phi2", config, norm=(EPSILON, "layer_norm_eps"), rope=rope)
    names = {part: f"self_attn.{part}_proj" for part in "qkv"} | {"output": "self_attn.dense"}
    layer = [
        *spec.layer_norm("attn_norm", "input_layernorm"),
        *spec.attention(names, bias=True, output_bias=True),
        *linear("ffn_up", "mlp.fc1", (spec.intermediate_size, spec.hidden_size), bias=True),
        *linear("ffn_down", "mlp.fc2", (spec.hidden_size, spec.intermediate_size), bias=True),
    ]
    return spec.build(layer, CheckpointNames(norm="model.final_layernorm.weight"), norm_bias=True, head_bias=True)


def command_r(config: Config, mla_layout: str) -> ModelSpec:
    """Command-R and R+: attention and feed-forward block in parallel after one norm, scaled logits; R+ normalises heads."""
    if config.get("model_max_length") is not None:  # the trained length: max_position_embeddings limits a cache of theirs
        config = config.with_values({"max_position_embeddings": config.integer("model_max_length")})
    spec = _cohere("command-r", config)
    head_norms = []
    if config.flag("use_qk_norm", False):
        heads = {"q": spec.n_heads, "k": spec.n_kv_heads}
        head_norms = [
            LayerTensor(f"attn_{p}_norm.weight", f"self_attn.{p}_norm.weight", (n, spec.head_dim)) for p, n in heads.items()
        ]
    return spec.build(_cohere_layer(spec, head_norms), tied=True)


def cohere2(config: Config, mla_layout: str) -> ModelSpec:
    """Command-R7B: as `command_r`, with local layers; every fourth layer is global and has no rotary embedding."""
    config = config.with_defaults({"sliding_window": 4096, "sliding_window_pattern": 4})
    spec = _cohere("cohere2", config)
    period = config.integer("sliding_window_pattern")
    is_local = spec.local_layers(lambda i: (i + 1) % period != 0)
    spec.add_sliding_window(is_local, default_period=4, always=True)
    return spec.build(_cohere_layer(spec, []), tied=True)


def _cohere(architecture: str, config: Config) -> DecoderSpec:
    config.require("hidden_act", "silu", "this activation")
    config = config.with_defaults(COHERE_DEFAULTS)
    spec = DecoderSpec(architecture, config, norm=(EPSILON, "layer_norm_eps"))
    spec.add_float32({"logit_scale": config.number("logit_scale", positive=True)})
    if spec.rope.scaling == "default":
        spec.metadata[f"{architecture}.rope.scaling.type"] = "none"
    return spec


def _cohere_layer(spec: DecoderSpec, head_norms: list[LayerTensor]) -> list[LayerTensor]:
    bias = spec.config.flag("attention_bias", False)
    return [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=bias),
        *head_norms,
        *spec.gated_mlp(),
    ]
