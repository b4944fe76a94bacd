"""Dense models that differ from Llama in little: Granite 3, SmolLM 3, Seed-OSS, OLMo, Phi 3 to 4, GLM-4-0414, Arcee, Apertus.

All raise FormatError for settings that cannot be converted.
"""

from __future__ import annotations

from ..config import Config
from ..model_spec import ModelSpec
from ..rope import OTHER_NAMES
from ..tensor_transforms import unchanged
from .decoder_spec import DecoderSpec, LayerTensor, linear

# metadata key -> key of config.json
GRANITE_FACTORS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
OLMO_EPSILON = 1e-5  # in the model's own code
SMOLLM3_PERIOD = 4  # every fourth layer has no rotary embedding; llama.cpp assumes that
PHI3_SCALINGS = OTHER_NAMES | {"yarn": "longrope"}  # the first published files call LongRoPE yarn


def granite(config: Config, mla_layout: str) -> ModelSpec:
    """Granite 3: a Llama with factors for embeddings, residuals and attention scores, and a divisor of the logits."""
    config.require("hidden_act", "silu", "this activation")
    spec = DecoderSpec("granite", config)
    spec.add_float32({name: config.number(key, 1.0, positive=True) for name, key in GRANITE_FACTORS.items()})
    return spec.build(_llama_layer(spec))


def smollm3(config: Config, mla_layout: str) -> ModelSpec:
    """SmolLM 3: a Llama without rotary embedding in every fourth layer; with one in all it is a Llama."""
    config.require("hidden_act", "silu", "this activation")
    n_layers, period = config.count("num_hidden_layers"), config.integer("no_rope_layer_interval", SMOLLM3_PERIOD)
    listed = config.get("no_rope_layers")
    rotates = [(i + 1) % period != 0 for i in range(n_layers)] if listed is None else listed
    spec = DecoderSpec("llama" if rotates == [True] * n_layers else "smollm3", config)
    if spec.architecture == "smollm3" and rotates != [(i + 1) % SMOLLM3_PERIOD != 0 for i in range(n_layers)]:
        raise config.error(
            "no_rope_layers: a GGUF has a key for rotation in three of four layers, or in all, but for no others"
        )
    if config.flag("use_sliding_window", False):
        spec.add_sliding_window(spec.local_layers(lambda i: rotates[i]))
        spec.notes.append("llama.cpp does not know of the sliding window in this architecture")
    return spec.build(_llama_layer(spec), tied=True)


def _llama_layer(spec: DecoderSpec) -> list[LayerTensor]:
    bias = spec.config.flag("attention_bias", False)
    return [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(permute=True, bias=bias, output_bias=bias),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *spec.gated_mlp(bias=spec.config.flag("mlp_bias", False)),
    ]


def seed_oss(config: Config, mla_layout: str) -> ModelSpec:
    """Seed-OSS: biases on q, k and v, and heads wider than hidden_size / heads."""
    config.require("hidden_act", "silu", "this activation")
    spec = DecoderSpec("seed_oss", config.with_defaults({"head_dim": 128}))
    bias, output_bias = config.flag("attention_bias", True), config.flag("attention_out_bias", False)
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=bias, output_bias=output_bias),
        spec.norm("post_attention_norm", "post_attention_layernorm"),
        *spec.gated_mlp(bias=config.flag("mlp_bias", False)),
    ]
    return spec.build(layer)


def olmo(config: Config, mla_layout: str) -> ModelSpec:
    """OLMo 1: a Llama with layer norms that have no weights; queries, keys and values may be clamped."""
    config.require("hidden_act", "silu", "this activation")
    bias = config.flag("attention_bias", False)
    config = config.with_values({"layer_norm_eps": OLMO_EPSILON})
    spec = DecoderSpec("olmo", config, norm=("attention.layer_norm_epsilon", "layer_norm_eps"))
    if config.get("clip_qkv") is not None:
        spec.add_float32({"attention.clamp_kqv": config.number("clip_qkv", positive=True)})
    return spec.build([*spec.attention(permute=True, bias=bias, output_bias=bias), *spec.gated_mlp()], has_norm=False)


def olmo2(config: Config, mla_layout: str) -> ModelSpec:
    """OLMo 2: norms after the blocks instead of before, queries and keys normalised over all heads together."""
    spec = DecoderSpec("olmo2", config)
    return spec.build(_olmo2_layer(spec), needs_output=True)


def _olmo2_layer(spec: DecoderSpec) -> list[LayerTensor]:
    spec.config.require("hidden_act", "silu", "this activation")
    bias = spec.config.flag("attention_bias", False)
    return [
        *spec.attention(bias=bias, output_bias=bias),
        spec.norm("attn_q_norm", "self_attn.q_norm", spec.n_heads * spec.head_dim),
        spec.norm("attn_k_norm", "self_attn.k_norm", spec.n_kv_heads * spec.head_dim),
        spec.norm("post_attention_norm", "post_attention_layernorm"),
        *spec.gated_mlp(),
        spec.norm("post_ffw_norm", "post_feedforward_layernorm"),
    ]


def phi3(config: Config, mla_layout: str) -> ModelSpec:
    """Phi 3, 3.5 and 4: q, k and v in one matrix, gate and up in another, LongRoPE factors for short and long texts."""
    config.require("hidden_act", "silu", "this activation")
    config.require("attention_bias", False, "biases in the attention")
    spec = DecoderSpec("phi3", config, rope_names=PHI3_SCALINGS)
    window = config.integer("sliding_window") if config.get("sliding_window") is not None else None
    if window is not None and window < config.integer("max_position_embeddings"):
        spec.add_sliding_window([True] * spec.n_layers)
        spec.notes.append(f"llama.cpp does not use the sliding window of {window} tokens in this architecture")
    else:
        spec.add_uint32({"attention.sliding_window": 0})  # ik_llama.cpp does not load a file without the key
    q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    hidden_size, rows = spec.hidden_size, spec.intermediate_size
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        LayerTensor("attn_qkv.weight", "self_attn.qkv_proj.weight", (q_rows + 2 * kv_rows, hidden_size)),
        LayerTensor("attn_output.weight", "self_attn.o_proj.weight", (hidden_size, q_rows)),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        LayerTensor("ffn_up.weight", "mlp.gate_up_proj.weight", (2 * rows, hidden_size)),
        LayerTensor("ffn_down.weight", "mlp.down_proj.weight", (hidden_size, rows)),
    ]
    return spec.build(layer)


def glm4(config: Config, mla_layout: str) -> ModelSpec:
    """GLM-4-0414: norms before and after both blocks, neighbouring elements of a part of each head are rotated."""
    config.require("hidden_act", "silu", "this activation")
    config = config.with_defaults({"head_dim": 128})
    spec = DecoderSpec("glm4", config, rope=config.with_defaults({"partial_rotary_factor": 0.5}))
    if spec.rope.settings.get("mrope_section") is not None:
        raise config.error("mrope_section is set: rotation by positions in images cannot be converted for this architecture")
    rows, hidden_size = spec.intermediate_size, spec.hidden_size
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=config.flag("attention_bias", True)),
        spec.norm("post_attention_norm", "post_self_attn_layernorm"),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        LayerTensor("ffn_up.weight", "mlp.gate_up_proj.weight", (2 * rows, hidden_size)),
        LayerTensor("ffn_down.weight", "mlp.down_proj.weight", (hidden_size, rows)),
        spec.norm("post_ffw_norm", "post_mlp_layernorm"),
    ]
    return spec.build(layer)


def arcee(config: Config, mla_layout: str) -> ModelSpec:
    """Arcee (AFM): a Llama whose feed-forward block has no gate, and squared ReLU."""
    config.require("hidden_act", "relu2", "this activation")
    spec = DecoderSpec("arcee", config)
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    rows, hidden_size = spec.intermediate_size, spec.hidden_size
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(permute=True, bias=bias, output_bias=bias),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *linear("ffn_up", "mlp.up_proj", (rows, hidden_size), bias=mlp_bias),
        *linear("ffn_down", "mlp.down_proj", (hidden_size, rows), bias=mlp_bias),
    ]
    return spec.build(layer)


def olmo3(config: Config, mla_layout: str) -> ModelSpec:
    """OLMo 3: as OLMo 2, with local layers, whose rotation is not scaled."""
    parameters = config.get("rope_parameters")
    rope = config
    if isinstance(parameters, dict) and isinstance(parameters.get("full_attention"), dict):
        local = config.part(parameters.get("sliding_attention") or {})
        local.require("rope_type", "default", "rotary scaling of local layers")
        rope = config.with_values({"rope_parameters": parameters["full_attention"]})
        local.require("rope_theta", parameters["full_attention"].get("rope_theta"), "another base for local layers")
    spec = DecoderSpec("olmo2", config, rope=rope.with_defaults({"rope_theta": 500000.0}))
    spec.add_sliding_window(spec.local_layers(lambda i: (i + 1) % 4 != 0))
    return spec.build(_olmo2_layer(spec), needs_output=True)


def apertus(config: Config, mla_layout: str) -> ModelSpec:
    """Apertus: normalised heads, a feed-forward block without a gate, whose activation xIELU (arXiv:2411.13010) has two numbers
    for each layer, tensors in the checkpoint and metadata in the GGUF."""
    config.require("hidden_act", "xielu", "this activation")
    spec = DecoderSpec("apertus", config)
    bias, rows, hidden_size = config.flag("attention_bias", False), spec.intermediate_size, spec.hidden_size
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        layers = range(spec.n_layers)
        spec.stored_values[f"xielu.{name}"] = tuple(f"model.layers.{i}.mlp.act_fn.{name}" for i in layers)
    layer = [
        spec.norm("attn_norm", "attention_layernorm"),
        *spec.attention(bias=bias, output_bias=bias, head_norms=unchanged),
        spec.norm("ffn_norm", "feedforward_layernorm"),
        *linear("ffn_up", "mlp.up_proj", (rows, hidden_size)),
        *linear("ffn_down", "mlp.down_proj", (hidden_size, rows)),
    ]
    return spec.build(layer, needs_output=True)
