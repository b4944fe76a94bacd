import time

import gguf
import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.formats import FormatError, PlanError

resource = pytest.importorskip("resource")  # not on Windows

HEADS, NOPE, VALUE, RANK = 4, 16, 12, 48  # of the tiny model


def read_all(tensor):
    """All rows of a source tensor, read matrix by matrix as `execute` does, with the outermost dimension first."""
    rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
    matrices = [tensor.read(start, start + rows) for start in range(0, tensor.n_rows, rows)]
    return np.concatenate(matrices).reshape(tensor.shape[::-1])


def dense(tensors, name, block):
    """A weight of the checkpoint as float32, with fp8 scales applied by numpy."""
    values = tensors[f"{name}.weight"].astype(np.float32)
    if not block or f"{name}.weight_scale_inv" not in tensors:
        return values
    scale = tensors[f"{name}.weight_scale_inv"]
    return values * np.repeat(np.repeat(scale, block[0], 0), block[1], 1)[: values.shape[0], : values.shape[1]]


@pytest.fixture
def convert(tmp_path, write_checkpoint, tiny_deepseek):
    def run(block=None, layout="ik", shards=1, **changes):
        config, tensors = tiny_deepseek(block, **changes)
        folder = write_checkpoint(tmp_path / "tiny", config, tensors, shards, vocab=False)
        return open_source(folder, mla_layout=layout), tensors

    return run


ATTENTION_KEYS = {
    "ik": {"head_count_kv": 4, "key_length": 24, "value_length": 12},
    "legacy": {"head_count_kv": 4, "key_length": 24, "value_length": 12},
    "mainline": {"head_count_kv": 1, "key_length": 56, "value_length": 48, "key_length_mla": 24, "value_length_mla": 12},
}


@pytest.mark.parametrize("layout", ["ik", "mainline", "legacy"])
def test_metadata(convert, layout):
    source, _ = convert(layout=layout)
    numbers = {
        "block_count": 3,
        "context_length": 640,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.q_lora_rank": 24,
        "attention.kv_lora_rank": 48,
        "vocab_size": 40,
        "leading_dense_block_count": 1,
        "expert_count": 4,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 40,
        "expert_gating_func": 2,
        "expert_group_count": 2,
        "expert_group_used_count": 1,
        "rope.dimension_count": 8,
        "rope.scaling.original_context_length": 16,
    } | {f"attention.{k}": v for k, v in ATTENTION_KEYS[layout].items()}
    expected = {f"deepseek2.{k}": np.uint32(v) for k, v in numbers.items()} | {
        "general.architecture": "deepseek2",
        "general.type": "model",
        "general.name": "tiny",
        "general.size_label": "4x103K",
        "deepseek2.attention.layer_norm_rms_epsilon": np.float32(1e-6),
        "deepseek2.rope.freq_base": np.float32(10000),
        "deepseek2.expert_weights_scale": np.float32(2.5),
        "deepseek2.expert_weights_norm": True,
        "deepseek2.rope.scaling.type": "yarn",
        "deepseek2.rope.scaling.factor": np.float32(40),
        "deepseek2.rope.scaling.yarn_log_multiplier": np.float32(0.1),
        "tokenizer.ggml.model": "no_vocab",
    }
    if layout == "mainline":  # ik_llama.cpp does not load draft layers of deepseek2
        expected |= {"deepseek2.block_count": np.uint32(4), "deepseek2.nextn_predict_layers": np.uint32(1)}
        expected["general.size_label"] = "4x148K"
    assert source.metadata == expected
    assert {k: type(v) for k, v in source.metadata.items()} == {k: type(v) for k, v in expected.items()}


def test_names(convert):
    source, tensors = convert(layout="legacy")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.DEEPSEEK2, 3)
    expected = set()
    for name in tensors:
        if name.startswith("model.layers.3."):
            continue
        parts = name.split(".")
        if "experts" in parts:
            del parts[parts.index("experts") + 1]
        name = ".".join(parts).replace("e_score_correction_bias", "e_score_correction.bias")
        expected.add(names.get_name(name, (".weight", ".bias")))
    assert set(source.tensors) == expected
    blocks = [int(n.split(".")[1]) for n in source.tensors if n.startswith("blk.")]
    assert blocks == sorted(blocks)


@pytest.mark.parametrize("block", [None, (16, 16), (7, 9), (128, 128)])
def test_parts_of_kv_b(convert, block):
    source, tensors = convert(block)
    attn = "model.layers.1.self_attn"
    kv_b = dense(tensors, f"{attn}.kv_b_proj", block)
    heads = kv_b.reshape(HEADS, NOPE + VALUE, RANK)
    keys, values = heads[:, :NOPE], heads[:, NOPE:]
    ik = {p: source.tensors[f"blk.1.attn_{p}.weight"] for p in ("kv_b", "k_b", "v_b")}
    assert {p: t.shape for p, t in ik.items()} == {"kv_b": (48, 112), "k_b": (16, 192), "v_b": (48, 48)}
    assert np.array_equal(read_all(ik["kv_b"]), kv_b)
    assert np.array_equal(read_all(ik["k_b"]), keys.transpose(0, 2, 1).reshape(-1, NOPE))
    assert np.array_equal(read_all(ik["v_b"]), values.reshape(-1, RANK))
    # any run of rows, also across heads
    for part, start, stop in (("k_b", 40, 150), ("k_b", 47, 48), ("v_b", 10, 30), ("kv_b", 1, 100)):
        assert np.array_equal(ik[part].read(start, stop), read_all(ik[part])[start:stop])
    mainline, _ = convert(block, "mainline")
    for part, shape in (("k_b", (16, 48, 4)), ("v_b", (48, 12, 4))):
        tensor = mainline.tensors[f"blk.1.attn_{part}.weight"]
        assert tensor.shape == shape
        assert np.array_equal(read_all(tensor).reshape(-1), read_all(ik[part]).reshape(-1))
    # q . k and the values are the same as with kv_b_proj itself
    latent = np.random.default_rng(0).standard_normal(RANK).astype(np.float32)
    query = np.random.default_rng(1).standard_normal((HEADS, NOPE)).astype(np.float32)
    direct = np.einsum("hn,hn->h", query, (kv_b @ latent).reshape(HEADS, -1)[:, :NOPE])
    k_b = read_all(ik["k_b"]).reshape(HEADS, RANK, NOPE)
    absorbed = np.einsum("hrn,hn,r->h", k_b, query, latent)
    assert np.allclose(direct, absorbed, rtol=1e-4, atol=1e-4)
    assert np.allclose(
        (kv_b @ latent).reshape(HEADS, -1)[:, NOPE:].reshape(-1), read_all(ik["v_b"]) @ latent, rtol=1e-4, atol=1e-4
    )


def test_tensors_of_each_layout(convert):
    names = {layout: set(convert(layout=layout)[0].tensors) for layout in ("ik", "mainline", "legacy")}
    kv_b, k_b_and_v_b = (
        {f"blk.{i}.attn_kv_b.weight" for i in range(3)},
        {f"blk.{i}.attn_{p}_b.weight" for i in range(3) for p in "kv"},
    )
    assert names["ik"] - names["mainline"] == kv_b
    assert names["ik"] - names["legacy"] == k_b_and_v_b
    with pytest.raises(PlanError, match="unknown MLA layout 'other'; known are ik, mainline, legacy"):
        convert(layout="other")


@pytest.mark.parametrize("block", [None, (16, 24)])
def test_experts_are_stacked(convert, block):
    source, tensors = convert(block, shards=3)
    for part, shape in (("gate", (64, 40, 4)), ("up", (64, 40, 4)), ("down", (40, 64, 4))):
        tensor = source.tensors[f"blk.2.ffn_{part}_exps.weight"]
        expected = np.stack([dense(tensors, f"model.layers.2.mlp.experts.{e}.{part}_proj", block) for e in range(4)])
        assert tensor.shape == shape
        assert np.array_equal(read_all(tensor), expected)
        rows = shape[1]
        assert np.array_equal(tensor.read(3 * rows + 5, 3 * rows + 9), expected[3, 5:9])
        if block:
            assert (tensor.source_type, tensor.raw, tensor.stored) == ("f8_e4m3", None, None)
        else:
            stored = tensors[f"model.layers.2.mlp.experts.3.{part}_proj.weight"]
            assert tensor.raw(3 * rows + 5, 3 * rows + 9).tobytes() == stored[5:9].tobytes()
            assert tensor.stored.name == "bf16"


def test_router_and_dense_layer(convert):
    source, tensors = convert((16, 16))
    bias, gate = source.tensors["blk.1.exp_probs_b.bias"], source.tensors["blk.1.ffn_gate_inp.weight"]
    assert np.array_equal(bias.read(0, 1)[0], tensors["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert np.array_equal(read_all(gate), tensors["model.layers.1.mlp.gate.weight"].astype(np.float32))
    assert "blk.0.ffn_gate.weight" in source.tensors
    assert "blk.0.ffn_gate_inp.weight" not in source.tensors


def test_draft_layers_are_left_out_for_ik_llama_cpp(convert):
    source, tensors = convert()
    count = sum(n.startswith("model.layers.3.") for n in tensors)
    reason = "multi-token prediction, which ik_llama.cpp does not load; --mtp keeps them"
    assert f"draft layers ({reason}): {count} tensors left out (model.layers.3.*)" in source.notes
    assert not any(n.startswith("blk.3.") for n in source.tensors)
    source, _ = convert(num_nextn_predict_layers=0)
    assert not any("prediction" in note for note in source.notes)


def test_draft_layers_that_the_files_lack_are_noted(tmp_path, write_checkpoint, tiny_deepseek):
    config, tensors = tiny_deepseek()
    tensors = {name: x for name, x in tensors.items() if not name.startswith("model.layers.3.")}
    missing = "draft layers (multi-token prediction): the model has 1, the files have none"
    folder = write_checkpoint(tmp_path, config, tensors)
    assert missing in open_source(folder).notes
    assert missing not in open_source(folder, mtp=False).notes


def test_draft_layers_are_a_block_of_their_own(convert):
    source, tensors = convert(layout="mainline")
    own = {name.removeprefix("blk.3.nextn.") for name in source.tensors if name.startswith("blk.3.nextn.")}
    parts = ("eh_proj", "enorm", "hnorm", "shared_head_norm", "embed_tokens", "shared_head_head")
    assert own == {f"{part}.weight" for part in parts}
    others = {name[6:] for name in source.tensors if name.startswith("blk.3.") and "nextn" not in name}
    assert others == {name[6:] for name in source.tensors if name.startswith("blk.2.")}
    for name, stored in (("eh_proj", "eh_proj"), ("shared_head_head", "shared_head.head")):
        weight = tensors[f"model.layers.3.{stored}.weight"].astype(np.float32)
        assert np.array_equal(read_all(source.tensors[f"blk.3.nextn.{name}.weight"]), weight)
    assert any("ik_llama.cpp does not load deepseek2 with its draft layers" in note for note in source.notes)


LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "q_lora_rank": None,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 2,
    "num_nextn_predict_layers": 0,
}


def test_v2_lite(convert):
    source, tensors = convert(**LITE)
    keys = {k.removeprefix("deepseek2."): v for k, v in source.metadata.items()}
    assert "attention.q_lora_rank" not in keys
    assert "expert_group_count" not in keys
    assert (keys["expert_gating_func"], keys["expert_shared_count"]) == (1, 2)
    assert keys["expert_weights_norm"] is False
    assert source.tensors["blk.0.attn_q.weight"].shape == (64, 96)
    assert np.array_equal(
        read_all(source.tensors["blk.2.attn_q.weight"]), tensors["model.layers.2.self_attn.q_proj.weight"].astype(np.float32)
    )
    assert source.tensors["blk.1.ffn_up_shexp.weight"].shape == (64, 80)
    assert "blk.1.exp_probs_b.bias" not in source.tensors


def test_v2_expert_groups(convert):
    source, _ = convert(**LITE | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 24})
    assert source.metadata["deepseek2.expert_group_count"] == np.uint32(4)
    assert source.metadata["deepseek2.expert_group_used_count"] == np.uint32(2)


def test_rope_parameters_and_dtype_keys(convert):
    yarn = {"rope_type": "yarn", "rope_theta": 20000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    yarn |= {"mscale": 0.707, "mscale_all_dim": 0.707}
    changes = {"rope_theta": None, "rope_scaling": None, "rope_parameters": yarn, "torch_dtype": None, "dtype": "bfloat16"}
    source, _ = convert(scoring_func=None, topk_method="noaux_tc", **changes)
    assert source.metadata["deepseek2.rope.freq_base"] == np.float32(20000)
    assert source.metadata["deepseek2.rope.scaling.yarn_log_multiplier"] == np.float32(0.0707)
    assert source.metadata["deepseek2.expert_gating_func"] == np.uint32(2)
    assert not any("mscale" in note for note in source.notes)
    with pytest.raises(FormatError, match=r"mscale 1 and mscale_all_dim 0.707: a GGUF can only say the latter"):
        convert(**changes | {"rope_parameters": yarn | {"mscale": 1.0}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh'; known are softmax, sigmoid"),
        ({"topk_method": "random"}, "topk_method is 'random'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2: experts in only some of the layers"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; latent attention has one per head"),
        ({"kv_lora_rank": None}, "the key kv_lora_rank is missing"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace is 4, of 3 layers"),
        ({"topk_group": None}, "the key topk_group is missing"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, more than the [0-9]+ tensors that are stored"),
        ({"num_nextn_predict_layers": 10**8}, "num_nextn_predict_layers is 100000000, more than the"),
        ({"n_routed_experts": 10**9}, "n_routed_experts is 1000000000 in each of 2 layers, more than the"),
        ({"num_hidden_layers": 90, "n_routed_experts": 90}, "n_routed_experts is 90 in each of 89 layers, more than the"),
        ({"first_k_dense_replace": 3, "n_routed_experts": 10**9}, "n_routed_experts is 1000000000 in each of 1 layers, more"),
        ({"scoring_func": [1]}, r"scoring_func is \[1\]; known are softmax, sigmoid"),
        ({"scoring_func": {"a": 1}}, r"scoring_func is "),
        ({"topk_method": ["greedy"]}, r"topk_method is \['greedy'\]; known are"),
        ({"topk_method": 5}, r"topk_method is 5; known are"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor is inf"),
        ({"rope_scaling": {"type": "yarn", "factor": 0, "original_max_position_embeddings": 16}}, "factor is 0;"),
        ({"rope_scaling": {"type": "yarn", "factor": -40.0, "original_max_position_embeddings": 16}}, "factor is -40.0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16, "beta_fast": -1}},
            "beta_fast is -1",
        ),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, more than n_routed_experts, which is 4"),
        ({"topk_group": 3}, "topk_group is 3, more than n_group, which is 2"),
        ({"n_group": 3}, "n_routed_experts is 4, not a multiple of n_group, which is 3"),
    ],
)
def test_configs_that_cannot_be_converted(tmp_path, write_checkpoint, tiny_deepseek, changes, message):
    config, tensors = tiny_deepseek()
    with pytest.raises(FormatError, match=message):
        open_source(write_checkpoint(tmp_path / "tiny", config | changes, tensors))


def test_unused_expert_groups_are_not_checked(convert):
    source, _ = convert(**LITE | {"topk_method": "greedy", "n_group": 3, "topk_group": None})
    assert "deepseek2.expert_group_count" not in source.metadata


def test_checkpoint_saved_by_transformers(tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sizes = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 48, "qk_nope_head_dim": 16}
    sizes |= {"qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
    config = transformers.DeepseekV3Config(**sizes, topk_group=1, first_k_dense_replace=1)
    model = transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    source = open_source(tmp_path / "saved")
    experts = read_all(source.tensors["blk.1.ffn_down_exps.weight"])
    assert np.array_equal(experts, model.state_dict()["model.layers.1.mlp.experts.down_proj"].float().numpy())
    assert source.metadata["deepseek2.expert_gating_func"] == np.uint32(2)


@pytest.mark.slow
def test_deepseek_v3_in_full_size(header_only_deepseek_v3):
    start_rss, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    source = open_source(header_only_deepseek_v3, vocab=False)
    seconds, kib = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start_rss
    assert len(source.tensors) == 1147
    assert sum(t.n_elements for t in source.tensors.values()) == pytest.approx(672.050e9, abs=0.5e6)
    assert seconds < 30  # 0.8 s on an idle machine
    assert kib < 1 << 20  # 70 MiB
    shapes = {name: t.shape for name, t in source.tensors.items()}
    assert shapes["blk.60.attn_k_b.weight"] == (128, 65536)
    assert shapes["blk.60.attn_v_b.weight"] == (512, 16384)
    assert shapes["blk.60.attn_kv_b.weight"] == (512, 32768)
    assert shapes["blk.3.ffn_down_exps.weight"] == (2048, 7168, 256)
    assert source.metadata["general.size_label"] == "256x20B"
    expert = source.tensors["blk.60.ffn_up_exps.weight"].read(255 * 2048 + 100, 255 * 2048 + 110)
    assert expert.shape == (10, 7168)
    assert not expert.any()


def test_fp8_source_types(convert):
    source, _ = convert((16, 16))
    types = {t.source_type for t in source.tensors.values()}
    assert types == {"f8_e4m3", "bf16", "f32"}
    assert source.tensors["blk.0.attn_k_b.weight"].raw is None
    assert source.tensors["blk.0.attn_k_b.weight"].source_type == "f8_e4m3"
