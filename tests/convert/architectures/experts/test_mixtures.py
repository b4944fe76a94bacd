"""GLM-4.5, gpt-oss, ERNIE 4.5, Hunyuan and Kimi-K2: metadata, tensor names, what is left out and what is refused.

That the tensors are correct is tested by logits (tests/runtime/test_checkpoints.py).
"""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.convert.architectures.registry import model_spec
from ggufmill.convert.config import Config
from ggufmill.formats import FormatError

SIZES = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
}
ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "truncate": False}
KIMI_YARN = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16, "beta_fast": 1.0, "beta_slow": 1.0}
# As in the published files, with small numbers.
CONFIGS = {
    "glm4moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "rope_scaling": YARN,
        "rope_theta": 150000,
        "sliding_window": 16,
        "swiglu_limit": 7.0,
    },
    "ernie4_5": {
        "architectures": ["Ernie4_5_ForCausalLM"],
        "head_dim": 32,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "ernie4_5-moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "moe_capacity": [64, 64, 64],
        "moe_gate": "topk",
        "moe_intermediate_size": 48,
        "moe_k": 2,
        "moe_layer_interval": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 3,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 2,
        "moe_use_aux_free": True,
        "num_nextn_predict_layers": 1,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    "hunyuan-moe": {
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "attention_head_dim": 16,
        "cla_share_factor": 2,
        "moe_intermediate_size": [96] * 4,
        "moe_topk": [2] * 4,
        "num_experts": 4,
        "num_shared_expert": [1] * 4,
        "rope_scaling": ALPHA,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_cla": False,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
    },
    "hunyuan-dense": {
        "architectures": ["HunYuanDenseV1ForCausalLM"],
        "head_dim": 16,
        "rope_scaling": ALPHA,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_cla": False,
        "use_qk_norm": True,
    },
    "deepseek2": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "moe_intermediate_size": 48,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "rope_scaling": KIMI_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 16,
    },
}


def spec_of(name, n_stored=10**6, **changes):
    config = Config(Path("config.json"), SIZES | CONFIGS[name] | changes, n_stored)
    return model_spec(config, "ik")


@pytest.fixture
def convert(tmp_path, write_checkpoint):
    """The source of a checkpoint of zeros with all tensors that the spec needs, and more (name -> shape)."""

    def run(name, more=None, mtp=None, **changes):
        shapes = {s: t.shape for t in spec_of(name, **changes).tensors for s in t.sources} | (more or {})
        tensors = {n: np.zeros(shape, np.float32) for n, shape in shapes.items()}
        return open_source(write_checkpoint(tmp_path / "tiny", SIZES | CONFIGS[name] | changes, tensors), mtp=mtp)

    return run


KEYS = {
    "glm4moe": {
        "block_count": 4,
        "rope.dimension_count": 16,
        "rope.freq_base": 1e6,
        "attention.key_length": 32,
        "attention.head_count_kv": 2,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 48,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "leading_dense_block_count": 1,
    },
    "gpt-oss": {
        "attention.sliding_window": 16,
        "attention.key_length": 32,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 96,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 16,
    },
    "ernie4_5": {"rope.freq_base": 500000.0, "rope.dimension_count": 32, "attention.key_length": 32},
    "ernie4_5-moe": {
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 48,
        "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 96,
        "interleave_moe_layer_step": 2,
        "leading_dense_block_count": 1,
        "rope.dimension_count": 16,
    },
    "hunyuan-moe": {
        "context_length": 262144,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_feed_forward_length": 96,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": 96,
        "rope.freq_base": 10000 * 1000 ** (16 / 14),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 262144,
    },
    "hunyuan-dense": {"context_length": 262144, "rope.freq_base": 10000 * 1000 ** (16 / 14), "rope.scaling.type": "none"},
    "deepseek2": {
        "expert_gating_func": 2,
        "expert_weights_scale": 2.827,
        "rope.freq_base": 50000.0,
        "rope.scaling.yarn_beta_fast": 1.0,
        "rope.scaling.yarn_log_multiplier": 0.1,
    },
}


def test_bound_on_the_number_of_experts(convert):
    assert convert("gpt-oss", num_local_experts=300).tensors["blk.3.ffn_up_exps.weight"].shape == (64, 96, 300)
    few = convert("glm4moe", first_k_dense_replace=3, n_routed_experts=40)
    assert few.tensors["blk.3.ffn_up_exps.weight"].shape == (64, 48, 40)


@pytest.mark.parametrize("name", CONFIGS)
def test_metadata_and_tensor_names_are_known_to_gguf(convert, name):
    source = convert(name)
    assert source.architecture == name
    for key, value in KEYS[name].items():
        converted = source.metadata[f"{name}.{key}"]
        assert converted == (np.float32(value) if isinstance(value, float) else value), key
    groups = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
    known_keys = {v.replace("{arch}", name) for group in groups for v in vars(group).values() if isinstance(v, str)}
    assert {k for k in source.metadata if k.startswith(f"{name}.")} <= known_keys
    architecture = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[name]
    known_names = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[architecture]}
    assert {re.sub(r"blk\.\d+\.", "blk.{bid}.", t).rsplit(".", 1)[0] for t in source.tensors} <= known_names
    assert not any("group" in key for key in source.metadata)


def test_which_layers_have_experts():
    def layers(name, part, **changes):
        return [int(t.name.split(".")[1]) for t in spec_of(name, **changes).tensors if t.name.endswith(part)]

    assert layers("glm4moe", "ffn_up.weight") == [0]
    assert layers("glm4moe", "ffn_up_shexp.weight") == [1, 2, 3]
    assert layers("glm4moe", "ffn_up_shexp.weight", n_shared_experts=0) == []
    assert layers("ernie4_5-moe", "ffn_gate_inp.weight") == [1, 3]
    assert layers("ernie4_5-moe", "ffn_up.weight") == [0, 2]
    assert layers("ernie4_5-moe", "exp_probs_b.bias", moe_layer_interval=1, moe_layer_end_index=-1) == [1, 2, 3]
    assert layers("ernie4_5-moe", "exp_probs_b.bias", moe_use_aux_free=False) == []
    assert layers("hunyuan-moe", "ffn_up_exps.weight") == [0, 1, 2, 3]
    assert layers("glm4moe", "attn_q_norm.weight", use_qk_norm=False) == []
    assert layers("gpt-oss", "attn_q.bias", attention_bias=False) == []
    assert layers("gpt-oss", "attn_sinks.weight") == [0, 1, 2, 3]


def test_prediction_layers_are_left_out(convert):
    source = convert(
        "glm4moe",
        {f"model.layers.4.{n}.weight": (64, 64) for n in ("eh_proj", "self_attn.q_proj", "shared_head.head")},
        mtp=False,
    )
    assert "draft layers (multi-token prediction): 3 tensors left out (model.layers.4.*)" in source.notes
    assert "glm4moe.nextn_predict_layers" not in source.metadata
    more = {"model.mtp_block.0.mlp.up_proj.weight": (64, 64), "model.mtp_emb_norm.0.weight": (64,)}
    notes = convert("ernie4_5-moe", more).notes
    what = "multi-token prediction, which has no names in a GGUF of this architecture"
    assert f"{what}: 2 tensors left out (model.mtp_block.*, model.mtp_emb_norm.*)" in notes


def test_groups_of_experts():
    keys = spec_of("glm4moe", n_group=2, topk_group=1).metadata
    assert keys["glm4moe.expert_group_count"] == np.uint32(2)
    assert keys["glm4moe.expert_group_used_count"] == np.uint32(1)


def test_yarn_truncate():
    key = "gpt-oss.rope.scaling.yarn_truncate"
    assert key not in spec_of("gpt-oss").metadata
    assert spec_of("gpt-oss", rope_scaling=YARN | {"truncate": True}).metadata[key] is True
    assert spec_of("gpt-oss", rope_scaling={k: v for k, v in YARN.items() if k != "truncate"}).metadata[key] is True
    assert key not in spec_of("gpt-oss", rope_scaling=None).metadata


def test_window_pattern_is_written_if_not_the_default():
    assert "gpt-oss.attention.sliding_window_pattern" not in spec_of("gpt-oss").metadata
    layer_types = ["full_attention", "sliding_attention"] * 2
    keys = spec_of("gpt-oss", layer_types=layer_types).metadata
    assert list(keys["gpt-oss.attention.sliding_window_pattern"]) == [False, True, False, True]


def test_defaults_of_the_models_own_code():
    assert spec_of("glm4moe", partial_rotary_factor=None).metadata["glm4moe.rope.dimension_count"] == np.uint32(16)
    assert spec_of("ernie4_5", rope_theta=None).metadata["ernie4_5.rope.freq_base"] == np.float32(500000)
    keys = spec_of("gpt-oss", rope_theta=None, head_dim=None, sliding_window=None).metadata
    assert keys["gpt-oss.rope.freq_base"] == np.float32(150000)
    assert keys["gpt-oss.attention.key_length"] == np.uint32(64)
    assert keys["gpt-oss.attention.sliding_window"] == np.uint32(128)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("glm4moe", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("glm4moe", {"first_k_dense_replace": 5}, "first_k_dense_replace is 5, of 4 layers"),
        ("glm4moe", {"n_group": 3}, r"1 of 3 groups \(topk_group, n_group\) cannot be taken of 4 experts"),
        ("glm4moe", {"n_group": 2, "topk_group": 3}, "3 of 2 groups"),
        ("glm4moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, more than n_routed_experts, which is 4"),
        ("glm4moe", {"use_qk_norm": "yes"}, "use_qk_norm is 'yes'"),
        ("glm4moe", {"n_routed_experts": 9}, "n_routed_experts is 9 in each of 3 layers, more than the 20 tensors"),
        ("ernie4_5-moe", {"moe_num_experts": 11}, "moe_num_experts is 11 in each of 2 layers, more than the 20 tensors"),
        ("gpt-oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0: this steepness"),
        ("gpt-oss", {"layer_types": ["full_attention"]}, "layer_types is"),
        ("ernie4_5-moe", {"moe_layer_end_index": 2}, "moe_layer_end_index is 2; only experts up to the last layer, 3,"),
        ("ernie4_5-moe", {"moe_num_experts": [4, 4]}, r"moe_num_experts is \[4, 4\]"),
        ("hunyuan-moe", {"moe_topk": [1, 2, 2, 2]}, r"moe_topk is \[1, 2, 2, 2\]; only the same value"),
        ("hunyuan-moe", {"moe_intermediate_size": [48] * 4}, "moe_intermediate_size is 48; it has to be intermediate_size"),
        ("hunyuan-moe", {"use_cla": True}, "use_cla is True: attention across layers"),
        ("hunyuan-dense", {"use_qk_norm": False}, "use_qk_norm is False"),
        ("hunyuan-dense", {"rope_scaling": ALPHA | {"alpha": -1.0}}, "alpha is -1.0"),
    ],
)
def test_configs_that_cannot_be_converted(name, changes, message):
    with pytest.raises(FormatError, match=message):
        spec_of(name, 20, **changes)


def test_dynamic_rope_without_alpha_is_refused():
    with pytest.raises(FormatError, match="dynamic rotary scaling"):
        spec_of("hunyuan-dense", rope_scaling={"type": "dynamic", "factor": 2.0})
    assert spec_of("hunyuan-dense").notes == []
