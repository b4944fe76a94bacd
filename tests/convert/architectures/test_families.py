"""The families' functions: the metadata that they make of a config.json, and what they refuse."""

from pathlib import Path

import numpy as np
import pytest

from ggufmill.convert.architectures import (
    exaone,
    gemma,
    layer_norm,
    llama,
    llama_variants,
    qwen,
)
from ggufmill.convert.architectures.experts import mixtures
from ggufmill.convert.architectures.latent_attention import minicpm3
from ggufmill.convert.config import Config
from ggufmill.formats import FormatError

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN2MOE = EXPERTS | {"shared_expert_intermediate_size": 24}
# text_config of google/gemma-3-4b-it on the hub
GEMMA3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
GEMMA2_27B = {
    "vocab_size": 256000,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_hidden_layers": 46,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 144,
    "rope_theta": 10000.0,
}


def spec_of(function, values, **changes):
    return function(Config(Path("config.json"), values | changes), "ik")


def layer_sources(spec, layer=0):
    """Name of each tensor of a layer -> its names in the checkpoint."""
    prefix = f"blk.{layer}."
    return {t.name.removeprefix(prefix): t.sources for t in spec.tensors if t.name.startswith(prefix)}


def test_gemma3_4b():
    spec = spec_of(gemma.gemma3, {"text_config": GEMMA3_4B})
    keys = {key.removeprefix("gemma3."): value for key, value in spec.metadata.items()}
    assert keys == {
        "block_count": 34,
        "context_length": 131072,
        "embedding_length": 2560,
        "feed_forward_length": 10240,
        "vocab_size": 262208,
        "attention.head_count": 8,
        "attention.head_count_kv": 4,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": np.float32(1e-6),
        "attention.sliding_window": 1024,
        "rope.dimension_count": 256,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8,
    }
    assert layer_sources(spec)["post_ffw_norm.weight"] == ("model.layers.0.post_feedforward_layernorm.weight",)
    assert "output.weight" not in {t.name for t in spec.tensors}
    assert "vision_tower." in spec.skipped_prefixes
    assert not spec_of(gemma.gemma3, GEMMA3_4B).skipped_prefixes.keys() & {"vision_tower.", "multi_modal_projector."}


def test_gemma2_27b():
    keys = spec_of(gemma.gemma2, GEMMA2_27B).metadata
    assert keys["gemma2.attention.scale"] == np.float32(1 / 12)
    assert keys["gemma2.attn_logit_softcapping"] == 50
    assert keys["gemma2.final_logit_softcapping"] == 30
    assert keys["gemma2.attention.sliding_window"] == 4096
    assert "gemma2.attention.sliding_window_pattern" not in keys
    assert "gemma2.attention.scale" not in spec_of(gemma.gemma2, GEMMA2_27B, query_pre_attn_scalar=128).metadata


def test_sliding_windows():
    spec = spec_of(llama.mistral, SIZES, sliding_window=64)
    assert spec.metadata["llama.attention.sliding_window"] == 64
    assert any("window of 64" in note for note in spec.notes)
    assert not any("sliding_window" in key for key in spec_of(llama.llama, SIZES, sliding_window=64).metadata)
    assert not any("sliding_window" in key for key in spec_of(llama.mistral, SIZES, sliding_window=None).metadata)

    windowed = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 5}
    keys = spec_of(qwen.qwen2, SIZES, **windowed).metadata
    assert keys["qwen2.attention.sliding_window_pattern"].tolist() == [False] * 5 + [True] * 2
    assert not any(
        "sliding_window" in key for key in spec_of(qwen.qwen2, SIZES, **windowed | {"max_window_layers": 7}).metadata
    )
    assert not any("sliding_window" in key for key in spec_of(qwen.qwen2, SIZES, sliding_window=64).metadata)
    layer_types = ["sliding_attention", "full_attention"] * 3 + ["sliding_attention"]
    keys = spec_of(qwen.qwen3, SIZES, **windowed, layer_types=layer_types).metadata
    assert keys["qwen3.attention.sliding_window_pattern"].tolist() == [t == "sliding_attention" for t in layer_types]
    assert (
        "gemma2.attention.sliding_window_pattern"
        not in spec_of(gemma.gemma2, SIZES | {"head_dim": 8}, layer_types=layer_types).metadata
    )


def test_experts():
    keys = spec_of(qwen.qwen2moe, SIZES | QWEN2MOE).metadata
    assert {k.removeprefix("qwen2moe."): v for k, v in keys.items() if "expert" in k} == {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 16,
        "expert_shared_feed_forward_length": 24,
        "expert_weights_norm": False,
    }
    mixtral = layer_sources(spec_of(llama.mixtral, SIZES, num_local_experts=3, num_experts_per_tok=2))
    assert mixtral["ffn_up_exps.weight"] == tuple(f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight" for e in range(3))


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4, 5.0]}
PHI = {"original_max_position_embeddings": 64, "rope_scaling": LONG}
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
RELU2 = {"hidden_act": "relu2", "norm_eps": 1e-5}
DOTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_longrope(name):
    spec = spec_of(llama_variants.phi3, SIZES, **PHI | {"rope_scaling": LONG | {"rope_type": name}})
    keys = spec.metadata
    assert keys["phi3.rope.scaling.original_context_length"] == 64
    assert keys["phi3.rope.scaling.attn_factor"] == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)
    long = next(t for t in spec.tensors if t.name == "rope_factors_long.weight").transform("x", [])
    assert long.read(0, 1).tolist() == [[2, 3, 4, 5]]
    assert "phi3.rope.scaling.type" not in keys


def test_older_keys_of_partial_rotation():
    assert (
        spec_of(mixtures.minimax_m2, SIZES | LOCAL, head_dim=16, rotary_dim=4).metadata["minimax-m2.rope.dimension_count"] == 4
    )
    assert spec_of(layer_norm.nemotron, SIZES | RELU2, rope_percent=0.25).metadata["nemotron.rope.dimension_count"] == 2
    assert spec_of(layer_norm.nemotron, SIZES | RELU2).metadata["nemotron.rope.dimension_count"] == 4


def test_command_r_has_the_context_that_it_was_trained_for():
    """max_position_embeddings of the published config.json is 8192, where model_max_length is 131072."""
    long = spec_of(layer_norm.command_r, SIZES, max_position_embeddings=8192, model_max_length=131072)
    assert long.metadata["command-r.context_length"] == 131072
    assert spec_of(layer_norm.command_r, SIZES, max_position_embeddings=8192).metadata["command-r.context_length"] == 8192


def test_local_layers_between_global_ones():
    default = spec_of(layer_norm.cohere2, SIZES, sliding_window=8, layer_norm_eps=1e-5).metadata
    assert default["cohere2.attention.sliding_window"] == 8
    assert "cohere2.attention.sliding_window_pattern" not in default
    pattern = spec_of(exaone.exaone4, SIZES, sliding_window=8, sliding_window_pattern="LLG").metadata
    assert pattern["exaone4.attention.sliding_window_pattern"].tolist() == [True, True, False, True, True, False, False]
    assert "exaone4.attention.sliding_window" not in spec_of(exaone.exaone4, SIZES, sliding_window=None).metadata


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        (llama.mixtral, {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok is 3, more than num_local_"),
        (llama.mixtral, {"num_experts_per_tok": 3}, "the key num_local_experts is missing"),
        (llama.mistral, {"sliding_window": "wide"}, "sliding_window is 'wide'; a whole number"),
        (llama.llama, {"partial_rotary_factor": 0.5}, "does not know of rotating a part of each head"),
        (llama.llama, {"partial_rotary_factor": 2}, "partial_rotary_factor is 2.0; at most 1"),
        (qwen.qwen2, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (qwen.qwen2, {"use_sliding_window": True, "max_window_layers": 0}, "the key sliding_window is missing"),
        (qwen.qwen3, {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types is"),
        (qwen.qwen3, {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["linear"] * 7}, "layer_types is"),
        (qwen.qwen3moe, EXPERTS | {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'; a list of layers is needed"),
        (llama.llama, {"rope_scaling": {"type": "longrope"}}, "original_max_position_embeddings is missing"),
        (mixtures.dots1, DOTS | {"n_group": 3}, "groups .* cannot be taken of"),
        (qwen.qwen3moe, EXPERTS | {"norm_topk_prob": 1}, "norm_topk_prob is 1; true or false"),
        (
            llama_variants.phi3,
            PHI | {"rope_scaling": LONG | {"long_factor": [1.0] * 3}},
            "long_factor is .* 4 numbers above 0 are needed",
        ),
        (llama_variants.phi3, PHI | {"rope_scaling": LONG | {"short_factor": [1.0, 0, 1.0, 1.0]}}, "short_factor is"),
        (llama_variants.phi3, {"rope_scaling": LONG}, "the key original_max_position_embeddings is missing"),
        (layer_norm.starcoder2, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (layer_norm.nemotron, {}, "hidden_act is 'silu'"),
        (llama_variants.smollm3, {"no_rope_layers": [1, 0, 1, 0, 1, 0, 1]}, "rotation in three of four layers, or in all"),
        (llama_variants.smollm3, {"no_rope_layer_interval": 3}, "rotation in three of four layers, or in all"),
        (mixtures.minimax_m2, LOCAL | {"shared_intermediate_size": 64}, "a shared expert cannot be converted"),
        (minicpm3.minicpm3, MLA | {"attention_bias": True}, "biases in the attention"),
        (minicpm3.minicpm3, MLA | {"num_key_value_heads": 2}, "latent attention has one per head"),
        (mixtures.dots1, DOTS | {"first_k_dense_replace": 9}, "first_k_dense_replace is 9, of 7 layers"),
        (mixtures.bailing, EXPERTS | {"norm_softmax": True}, "normalised rows of the output"),
        (mixtures.bailing, EXPERTS | {"first_k_dense_replace": 1}, "dense layers cannot be converted"),
        (layer_norm.command_r, {"logit_scale": -1}, "logit_scale is -1"),
        (gemma.gemma2, {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        (gemma.gemma2, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (gemma.gemma3, {"text_config": 3}, "text_config is 3; an object"),
        (gemma.gemma3, {"use_bidirectional_attention": True}, "attention to later tokens cannot be converted"),
        (gemma.gemma3, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; a whole number of at least 1"),
        (
            gemma.gemma3,
            {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "yarn"}}},
            "rotary scaling of local layers cannot be converted",
        ),
    ],
)
def test_configs_that_cannot_be_converted(function, changes, message):
    with pytest.raises(FormatError, match=message):
        spec_of(function, SIZES | changes)
