"""GLM-4-9B as transformers has it (Glm), and ChatGLM 3 and GLM-4-9B as they were published (ChatGLM).

Both functions raise FormatError for settings that cannot be converted.
"""

from __future__ import annotations

from ..config import Config
from ..model_spec import ModelSpec
from .decoder_spec import CheckpointNames, DecoderSpec, LayerTensor, linear

CHATGLM_NAMES = CheckpointNames(
    "transformer.encoder.layers.{}",
    "transformer.embedding.word_embeddings.weight",
    "transformer.encoder.final_layernorm.weight",
    "transformer.output_layer.weight",
)
# key of other models -> its name in ChatGLM's config.json
CHATGLM_KEYS = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "padded_vocab_size",
    "max_position_embeddings": "seq_length",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
    "num_key_value_heads": "multi_query_group_num",
}


def glm(config: Config, mla_layout: str) -> ModelSpec:
    """GLM-4-9B, GLM-Edge: a rotary embedding of neighbouring elements, gate and up in one matrix."""
    config.require("hidden_act", "silu", "this activation")
    rope = config.with_defaults({"partial_rotary_factor": 0.5})
    spec = DecoderSpec("chatglm", config.with_defaults({"head_dim": 128, "num_key_value_heads": 2}), rope=rope)
    layer = [
        spec.norm("attn_norm", "input_layernorm"),
        *spec.attention(bias=config.flag("attention_bias", True)),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *linear("ffn_up", "mlp.gate_up_proj", (2 * spec.intermediate_size, spec.hidden_size)),
        *linear("ffn_down", "mlp.down_proj", (spec.hidden_size, spec.intermediate_size)),
    ]
    return spec.build(layer, needs_output=True)


def chatglm(config: Config, mla_layout: str) -> ModelSpec:
    """ChatGLM 2 and 3, GLM-4-9B with its own code: as `glm`, with queries, keys and values in one matrix."""
    for key, what in (("rmsnorm", "LayerNorm"), ("post_layer_norm", "a model without a norm at its end")):
        config.require(key, True, what)
    config.require("add_bias_linear", False, "biases in the feed-forward block")
    config.require("apply_residual_connection_post_layernorm", False, "residuals of normalised inputs")
    values = {key: config.get(old) for key, old in CHATGLM_KEYS.items() if config.get(old) is not None}
    if not config.flag("multi_query_attention", False):
        values["num_key_value_heads"] = config.integer("num_attention_heads")
    theta = 10000.0 * config.number("rope_ratio", 1.0, positive=True)
    config = config.with_values(values | {"rope_theta": theta, "partial_rotary_factor": 0.5, "rope_parameters": None})
    spec = DecoderSpec("chatglm", config)
    size, heads = spec.hidden_size, spec.n_heads * spec.head_dim
    shape = (heads + 2 * spec.n_kv_heads * spec.head_dim, size)
    layer: list[LayerTensor] = [
        spec.norm("attn_norm", "input_layernorm"),
        *linear("attn_qkv", "self_attention.query_key_value", shape, bias=config.flag("add_qkv_bias", False)),
        *linear("attn_output", "self_attention.dense", (size, heads)),
        spec.norm("ffn_norm", "post_attention_layernorm"),
        *linear("ffn_up", "mlp.dense_h_to_4h", (2 * spec.intermediate_size, size)),
        *linear("ffn_down", "mlp.dense_4h_to_h", (size, spec.intermediate_size)),
    ]
    spec.skipped_prefixes["transformer.rotary_pos_emb."] = "frequencies of the rotary embedding"
    return spec.build(layer, CHATGLM_NAMES)
