"""Qwen3-Next and Qwen 3.5: metadata, tensor names, order of heads, what is left out and what is refused, plans of all mixes.

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
from ggufmill.quantize.importance import AssumedImportance
from ggufmill.quantize.planning import plan_quantize
from ggufmill.quantize.recipes.mix_tables import FILE_TYPE_IDS
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.recipes import find, names

SIZES = {
    "full_attention_interval": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 40,
}
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 256}
ROPE = {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25, "rope_theta": 1e7}
DENSE = SIZES | {"intermediate_size": 512, "mtp_num_hidden_layers": 1, "rope_parameters": ROPE | {"rope_type": "default"}}
CONFIGS = {
    "qwen3next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "decoder_sparse_step": 1,
        "intermediate_size": 512,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 1e7,
    }
    | SIZES
    | EXPERTS,
    "qwen35": {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": [*["linear_attention"] * 3, "full_attention"]} | DENSE,
    "qwen35moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": {"model_type": "qwen3_5_moe_text"} | {k: v for k, v in DENSE.items() if k[:5] != "inter"} | EXPERTS,
        "tie_word_embeddings": False,
        "vision_config": {"depth": 1},
    },
}


def spec_of(name, **changes):
    return model_spec(Config(Path("config.json"), CONFIGS[name] | changes, 10**6), "ik")


def sources_of(name, **changes):
    """Tensors of the checkpoint: name -> shape."""
    prefix = "model.language_model." if "text_config" in CONFIGS[name] else "model."
    shapes = {source: t.shape for t in spec_of(name, **changes).tensors for source in t.sources}
    return {re.sub(r"^model\.", prefix, source): shape for source, shape in shapes.items()}


@pytest.fixture
def convert(tmp_path, write_checkpoint):
    """The source of a checkpoint with all tensors that the spec needs, each of the numbers 0, 1, ..., and more."""

    def run(name, more=None, mtp=None, **changes):
        shapes = sources_of(name, **changes) | (more or {})
        tensors = {n: np.arange(np.prod(shape), dtype=np.float32).reshape(shape) for n, shape in shapes.items()}
        return open_source(write_checkpoint(tmp_path / "tiny", CONFIGS[name] | changes, tensors), mtp=mtp)

    return run


@pytest.mark.parametrize("name", CONFIGS)
def test_metadata_and_tensor_names_are_those_of_llama_cpp(convert, name):
    source = convert(name)
    keys = {"block_count": 4, "rope.dimension_count": 16, "rope.freq_base": 1e7, "attention.key_length": 64}
    keys |= {"ssm.conv_kernel": 4, "ssm.state_size": 64, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 256}
    keys |= {"full_attention_interval": 4}
    if name != "qwen35":
        keys |= {"expert_count": 4, "expert_feed_forward_length": 256, "expert_shared_feed_forward_length": 256}
    assert {key: source.metadata[f"{name}.{key}"] for key in keys} == keys
    if name != "qwen3next":
        assert source.metadata[f"{name}.rope.dimension_sections"].tolist() == [3, 3, 2, 0]
    groups = (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope, gguf.Keys.SSM)
    known_keys = {v.replace("{arch}", name) for group in groups for v in vars(group).values() if isinstance(v, str)}
    assert {k for k in source.metadata if k.startswith(f"{name}.")} <= known_keys
    architecture = {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[name]
    known_names = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[architecture]}
    converted = {re.sub(r"blk\.\d+\.", "blk.{bid}.", t) for t in source.tensors}
    assert {re.sub(r"\.(weight|bias)$", "", t) for t in converted} <= known_names
    assert source.tensors["blk.0.ssm_conv1d.weight"].shape == (4, 512)
    assert source.tensors["blk.0.ssm_a"].shape == source.tensors["blk.0.ssm_dt.bias"].shape == (4,)
    assert source.tensors["blk.3.attn_q.weight"].shape == (256, 2 * 256)


def rows_of(source, name, columns=256):
    tensor = source.tensors[f"blk.0.{name}"]
    return (tensor.read(0, tensor.n_rows)[:, 0] / columns).astype(int)


def test_order_of_heads(convert):
    """With two key heads, value heads 0, 1 and 2, 3 share keys; tiled, that is 0, 2 and 1, 3."""
    tiled = convert("qwen35")
    values = np.concatenate([np.arange(64) + 64 * head for head in (0, 2, 1, 3)])
    assert rows_of(tiled, "attn_gate.weight").tolist() == values.tolist()
    assert rows_of(tiled, "attn_qkv.weight").tolist() == [*range(256), *(256 + values)]
    assert rows_of(tiled, "ssm_conv1d.weight", 4).tolist() == [*range(256), *(256 + values)]
    assert rows_of(tiled, "ssm_alpha.weight").tolist() == rows_of(tiled, "ssm_beta.weight").tolist() == [0, 2, 1, 3]
    assert tiled.tensors["blk.0.ssm_out.weight"].read(0, 1)[0].tolist() == values.tolist()
    assert tiled.tensors["blk.0.ssm_dt.bias"].read(0, 1)[0].tolist() == [0, 2, 1, 3]
    assert tiled.tensors["blk.0.ssm_a"].read(0, 1)[0] == pytest.approx(-np.exp([0, 2, 1, 3]))


def test_joined_projections_are_taken_apart(convert):
    """in_proj_qkvz has q, k, v and z of one key head after the other: 64, 64, 128 and 128 rows."""
    source = convert("qwen3next")
    qkvz = np.arange(2 * 384).reshape(2, 384)
    q, k, v, z = (part.ravel().tolist() for part in np.split(qkvz, [64, 128, 256], axis=1))
    assert rows_of(source, "attn_qkv.weight").tolist() == [*q, *k, *v]
    assert rows_of(source, "attn_gate.weight").tolist() == z
    assert rows_of(source, "ssm_ba.weight").tolist() == list(range(8))
    assert rows_of(source, "ssm_conv1d.weight", 4).tolist() == list(range(512))


def test_what_is_left_out_is_said(convert):
    more = {"mtp.fc.weight": (256, 512), "mtp.layers.0.input_layernorm.weight": (256,), "model.visual.x.weight": (3, 3)}
    source = convert("qwen35moe", more, mtp=False)
    assert not any("nextn" in name or "visual" in name for name in source.tensors)
    notes = " ".join(source.notes)
    assert "draft layers (multi-token prediction): 2 tensors left out (mtp.*)" in notes
    assert "vision tower" in notes


def test_other_orders_of_layers(convert):
    types = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    source = convert("qwen35", layer_types=types)
    assert source.metadata["qwen35.attention.recurrent_layers"].tolist() == [False, True, True, False]
    assert "llama.cpp does not know of this order" in " ".join(source.notes)
    regular = spec_of("qwen35", layer_types=["linear_attention", "full_attention"] * 2)
    assert regular.metadata["qwen35.full_attention_interval"] == 2
    assert not any("recurrent_layers" in key for key in regular.metadata)
    dense = spec_of("qwen3next", mlp_only_layers=[1], decoder_sparse_step=2)
    assert [t.name for t in dense.tensors if t.name.endswith("ffn_up.weight")] == [f"blk.{i}.ffn_up.weight" for i in (0, 1, 2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 3}, "3 value heads .* cannot share 2 keys evenly"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types is"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": ROPE | {"mrope_section": [1.5]}}, "mrope_section is"),
    ],
)
def test_what_cannot_be_converted_is_refused(changes, message):
    with pytest.raises(FormatError, match=message):
        spec_of("qwen35", **changes)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_mix_and_every_shipped_recipe_plans_it(convert, name):
    source = convert(name)
    matrices = {n for n, t in source.tensors.items() if len(t.shape) > 1}
    stay = {n for n in matrices if "ssm_conv1d" in n or n.endswith("ffn_gate_inp.weight")}
    recipes = [{"rules": load_recipe(find(each)).rules} for each in names() if each.endswith(".txt")]
    mixes = [{"type": mix} for mix in (*FILE_TYPE_IDS, "IQ4_K", "IQ1_S", "IQ2_XXS", "Q8_0")]
    for options in [*mixes, *recipes]:
        asked = {"type": "Q4_K_M", "importance": AssumedImportance({}), "ignore_imatrix_rules": True} | options
        plan = plan_quantize(source, "out.gguf", **asked)
        assert {t.name for t in plan.outputs if t.type.name == "f32" and t.name in matrices} == stay, options
