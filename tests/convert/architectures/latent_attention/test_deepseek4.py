"""DeepSeek-V4 as it is published: names, fp8 and mxfp4 with e8m0 scales, older keys of config.json; and what is refused."""

import json

import ml_dtypes
import numpy as np
import pytest

from ggufmill import convert_model
from ggufmill.convert import open_source
from ggufmill.formats import FormatError, open_gguf
from ggufmill.quantize import decode
from ggufmill.runtime import load_model

E8M0, E4M3 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
VOCAB, WIDTH, HEADS, HEAD, RANK, ROWS, EXPERTS, USED, HC = 40, 64, 4, 32, 32, 64, 5, 2, 4
CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "qk_rope_head_dim": 16,
    "q_lora_rank": RANK,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 3,
    "sliding_window": 8,
    "compress_ratios": [0, 4, 128, 0],
    "num_hash_layers": 1,
    "moe_intermediate_size": ROWS,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": USED,
    "num_nextn_predict_layers": 1,
    "hc_mult": HC,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]},
    "expert_dtype": "fp4",
}


def compressor(prefix, series, head, every):
    rows = series * head
    names = {"wkv.weight": (rows, WIDTH), "wgate.weight": (rows, WIDTH), "ape": (every, rows), "norm.weight": (head,)}
    return {f"{prefix}.{name}": shape for name, shape in names.items()}


def layer_shapes(i):
    """Names and shapes of a layer's tensors, experts apart."""
    shapes = {
        "attn_norm.weight": (WIDTH,),
        "ffn_norm.weight": (WIDTH,),
        "attn.attn_sink": (HEADS,),
        "attn.q_norm.weight": (RANK,),
    }
    shapes |= {"attn.kv_norm.weight": (HEAD,), "attn.wq_a.weight": (RANK, WIDTH), "attn.wq_b.weight": (HEADS * HEAD, RANK)}
    shapes |= {"attn.wkv.weight": (HEAD, WIDTH), "attn.wo_a.weight": (64, 64), "attn.wo_b.weight": (WIDTH, 64)}
    shapes |= {"ffn.gate.weight": (EXPERTS, WIDTH), "ffn.gate.bias": (EXPERTS,)}
    shapes |= {f"ffn.shared_experts.w{j}.weight": (WIDTH, ROWS) for j in (1, 2, 3)}  # of one shape, as WIDTH is ROWS
    for block in ("attn", "ffn"):
        sizes = {"fn": ((2 + HC) * HC, HC * WIDTH), "base": ((2 + HC) * HC,), "scale": (3,)}
        shapes |= {f"hc_{block}_{part}": shape for part, shape in sizes.items()}
    if i == 1:
        shapes |= compressor("attn.compressor", 2, HEAD, 4) | compressor("attn.indexer.compressor", 2, 32, 4)
        shapes |= {"attn.indexer.wq_b.weight": (8 * 32, RANK), "attn.indexer.weights_proj.weight": (8, WIDTH)}
    return shapes | (compressor("attn.compressor", 1, HEAD, 128) if i == 2 else {})


@pytest.fixture(scope="module")
def tensors():
    """(tensors as they are published, the same as float32 where they are quantised)"""
    rng, stored, plain = np.random.default_rng(2), {}, {}

    def add(name, shape):
        values = rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[-1]) if len(shape) > 1 else None
        stored[name] = 1 + 0.2 * rng.standard_normal(shape).astype(np.float32) if values is None else values
        plain[name] = stored[name]
        if ".attn.w" in name and "compressor" not in name:  # fp8 in blocks of 32 x 32
            scales = rng.integers(120, 126, tuple(n // 32 for n in shape)).astype(np.uint8)
            codes = rng.standard_normal(shape).astype(E4M3)
            factors = np.ldexp(np.float32(1), scales.astype(int) - 127).repeat(32, 0).repeat(32, 1)
            stored[name], stored[name.replace(".weight", ".scale")] = codes, scales.view(E8M0)
            plain[name] = codes.astype(np.float32) * factors

    add("embed.weight", (VOCAB, WIDTH))
    add("head.weight", (VOCAB, WIDTH))
    add("norm.weight", (WIDTH,))
    for part, shape in (("fn", (HC, HC * WIDTH)), ("base", (HC,)), ("scale", (1,))):
        add(f"hc_head_{part}", shape)
    for i in range(3):
        for name, shape in layer_shapes(i).items():
            add(f"layers.{i}.{name}", shape)
        for expert in range(EXPERTS):
            for j in (1, 2, 3):
                name = f"layers.{i}.ffn.experts.{expert}.w{j}"
                codes = rng.integers(0, 256, (64, 32)).astype(np.uint8)
                scales = rng.integers(121, 124, (64, 2)).astype(np.uint8)
                stored |= {f"{name}.weight": codes.view(np.int8), f"{name}.scale": scales.view(E8M0)}
    table = np.stack([rng.permutation(EXPERTS)[:USED] for _ in range(VOCAB)]).astype(np.int64)
    stored["layers.0.ffn.gate.tid2eid"] = plain["layers.0.ffn.gate.tid2eid"] = table
    stored["mtp.0.enorm.weight"] = np.ones(WIDTH, np.float32)
    return stored, plain


@pytest.fixture
def folder(tmp_path, write_checkpoint, tensors):
    return write_checkpoint(tmp_path / "model", CONFIG, tensors[0])


def test_metadata_and_types(folder, tmp_path):
    convert_model(folder, tmp_path / "out.gguf")
    file = open_gguf(tmp_path / "out.gguf")
    read = {key.removeprefix("deepseek4."): value for key, value in file.metadata.items()}
    assert list(read["attention.compress_ratios"]) == [0, 4, 128]
    expected = {
        "block_count": 3,
        "hash_layer_count": 1,
        "rope.dimension_count": 16,
        "expert_gating_func": 4,
        "feed_forward_length": 64,
    }
    expected |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.freq_base": 10000.0,
        "embedding_length_out": 256,
    }
    expected |= {"attention.compress_rope_freq_base": 160000.0, "rope.scaling.original_context_length": 256}
    assert {key: read[key] for key in expected} == expected
    assert "rope.scaling.attn_factor" not in read
    types = {name: info.type.name for name, info in file.tensors.items()}
    assert {types[f"blk.{i}.ffn_{part}_exps.weight"] for i in range(3) for part in ("gate", "up", "down")} == {"mxfp4"}
    assert types["blk.0.ffn_gate_tid2eid.weight"] == "i32"
    assert {kind for name, kind in types.items() if ".hc_" in name or "output_hc_" in name or "_ape" in name} == {"f32"}
    assert {types[f"blk.1.{name}.weight"] for name in ("attn_q_b", "attn_output_a", "indexer.attn_q_b")} == {"bf16"}
    assert "blk.0.exp_probs_b.bias" not in types
    assert "blk.1.exp_probs_b.bias" in types


def test_experts_and_tables_are_copied(folder, tmp_path, tensors):
    stored, _ = tensors
    convert_model(folder, tmp_path / "out.gguf")
    source = open_source(tmp_path / "out.gguf").tensors
    table = stored["layers.0.ffn.gate.tid2eid"]
    assert np.array_equal(source["blk.0.ffn_gate_tid2eid.weight"].read(0, VOCAB), table)
    assert np.array_equal(source["blk.0.ffn_gate_tid2eid.weight"].raw(3, 9).view(np.int32), table[3:9])
    for part, j in (("gate", 1), ("down", 2), ("up", 3)):
        for expert in range(EXPERTS):
            codes, scales = (stored[f"layers.1.ffn.experts.{expert}.w{j}.{suffix}"] for suffix in ("weight", "scale"))
            rows = source[f"blk.1.ffn_{part}_exps.weight"].raw(64 * expert, 64 * expert + 64)
            codes, exponents = codes.view(np.uint8), scales.view(np.uint8)
            values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(64, 64)]
            values = values * np.ldexp(np.float32(1), exponents.astype(int) - 127).repeat(32, 1)
            assert np.array_equal(rows.reshape(64, 2, 17)[..., 0], exponents)
            assert np.array_equal(decode(rows, "mxfp4", 64), values)


def test_published_names_are_those_of_transformers(folder, tmp_path, write_checkpoint, tensors):
    """Logits of the published checkpoint and of the same numbers in float32 under the names that transformers saves."""
    _, plain = tensors
    experts = open_source(folder).tensors
    renamed = {}
    for name, values in plain.items():
        if name == "layers.0.ffn.gate.bias":
            continue
        new = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}.get(name, name)
        new = f"model.{new}" if new.startswith("layers.") else new.replace("hc_head_", "model.hc_head.hc_")
        renamed[new.replace(".attn.kv_norm.", ".attn.norm.")] = values
    for i in range(3):
        for part, j in (("gate", 1), ("down", 2), ("up", 3)):
            for expert in range(EXPERTS):
                rows = experts[f"blk.{i}.ffn_{part}_exps.weight"].read(64 * expert, 64 * expert + 64)
                renamed[f"model.layers.{i}.ffn.experts.{expert}.w{j}.weight"] = rows
    config = {
        key: value for key, value in CONFIG.items() if key not in ("quantization_config", "expert_dtype", "compress_ratios")
    }
    config |= {"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]}
    config |= {"mlp_layer_types": ["hash_moe", "moe", "moe"]}
    other = write_checkpoint(tmp_path / "other", config, renamed)
    tokens = np.random.default_rng(1).integers(0, VOCAB, 150)
    logits, expected = (load_model(open_source(path), exact=True).logits(tokens) for path in (folder, other))
    assert expected.std() > 0.3
    assert np.abs(logits - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 8, 128]}, "compress_ratios is"),
        ({"compress_ratios": [0, 4]}, "for each layer"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types is"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe"]}, "only hash_moe before moe"),
        ({"o_groups": 3}, "4 heads cannot be projected in 3 groups"),
        ({"scoring_func": "softmax"}, "experts with these scores"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "'llama3' cannot be converted for compress layers"),
        ({"rope_scaling": CONFIG["rope_scaling"] | {"attention_factor": 1.2}}, "attention_factor"),
        ({"swiglu_limit": 0}, "swiglu_limit is 0"),
        ({"qk_rope_head_dim": 33}, "33 elements of heads"),
        ({"num_experts_per_tok": 6}, "6 of 5 experts"),
    ],
)
def test_configs_that_cannot_be_converted(folder, changes, message):
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(FormatError, match=message):
        open_source(folder)
