"""Ling 3 as its checkpoints have it, beyond what transformers saves: names, groups of layers, limits of activations."""

import json

import numpy as np
import pytest
from recorded_models import record_of
from safetensors.numpy import save_file

from ggufmill import FormatError
from ggufmill.convert import open_source
from ggufmill.runtime.graph.ops import GatedActivation
from ggufmill.runtime.models.architectures import build_graph

# keys of the published config.json in place of those that transformers writes
PUBLISHED = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "layer_types": None,
    "mlp_layer_types": None,
    "linear_head_dim": None,
    "linear_num_heads": None,
    "linear_conv_kernel_dim": None,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
    "no_kda_lora": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "rope_interleave": True,
    "score_function": "sigmoid",
    "moe_shared_expert_intermediate_size": 40,
}


def checkpoint(folder, changes, case="ling3-odd", rename=True):
    """The case's checkpoint with the names and keys of published ones."""
    record = record_of(case)
    record.write(folder)
    config = json.loads(record.config) | PUBLISHED | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = record.tensors()
    for name in [name for name in tensors if rename and name.endswith("attention.dense.weight")]:
        if name.replace("dense.weight", "f_proj.weight") in tensors:  # as published files call it in delta attention
            tensors[name.replace("dense", "o_proj")] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_published_names_give_the_same_model(tmp_path):
    """Layers are named by their groups; those of a group that is not whole are attention."""
    types = json.loads(record_of("ling3-odd").config)["layer_types"]
    assert [t == "full_attention" for t in types] == [False, False, True, False, False]
    with pytest.raises(FormatError, match=r"layers\.3\.attention\.(dense|kv_a|q_a)"):
        open_source(checkpoint(tmp_path / "group", {}))  # of five layers in groups of three, the last two are attention
    source = open_source(checkpoint(tmp_path / "whole", {"layer_types": types}))
    (tmp_path / "saved").mkdir()
    record_of("ling3-odd").write(tmp_path / "saved")
    saved = open_source(tmp_path / "saved")
    assert {*source.tensors} == {*saved.tensors}
    for name, tensor in source.tensors.items():
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
        assert np.array_equal(tensor.read(0, rows), saved.tensors[name].read(0, rows)), name
    assert source.metadata["bailingmoe3.kda.gate_lower_bound"] == np.float32(-4)
    assert source.metadata["bailingmoe3.attention.head_count_kv"].tolist() == [0, 0, 1, 0, 0]


def test_limits_of_activations_are_those_of_their_layers(tmp_path):
    """silu(gate) is limited, as the publisher's own vLLM does; transformers passes over these keys."""
    types = json.loads(record_of("ling3-odd").config)["layer_types"]
    limits = {"expert_swiglu_limit_list": [0, 0, 0, 4], "share_expert_swiglu_limit_list": [0, None, 5, 7, 0]}
    source = open_source(checkpoint(tmp_path / "model", limits | {"layer_types": types}))
    assert source.metadata["bailingmoe3.swiglu_clamp_exp"].tolist() == [0, 0, 0, 4, 0]
    graph = build_graph(source)
    gates = [op for op in graph.ops if isinstance(op, GatedActivation)]
    activations = [(op.function, op.limit) for op in gates if "silu" in op.function]
    plain, clamped = ("silu", 0.0), "clamped_silu"
    # two dense blocks, then the shared and the routed experts of each layer
    assert activations == [plain, plain, (clamped, 5.0), plain, (clamped, 7.0), (clamped, 4.0), plain, plain]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kda_safe_gate", False, "kda_safe_gate is False"),
        ("no_kda_lora", False, "no_kda_lora is False"),
        ("gated_attention_proj_granularity_type", "element_wise", "granularity_type is 'element_wise'"),
        ("kda_lower_bound", 1.0, "kda_lower_bound is 1; a number below 0"),
        ("num_shared_experts", 2, "num_shared_experts is 2"),
        ("expert_swiglu_limit_list", 3, "expert_swiglu_limit_list is 3; a list"),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0}, "rotary scaling linear cannot be converted"),
    ],
)
def test_what_cannot_be_said_is_refused(tmp_path, key, value, message):
    with pytest.raises(FormatError, match=message):
        open_source(checkpoint(tmp_path / "model", {key: value}, "ling3"))
