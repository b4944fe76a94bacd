"""Quantised checkpoints as sources, and tensors that do not fit together."""

import json

import numpy as np
import pytest
from quantized_weights import BF16, CT, E4M3, F16, GPTQ4, gptq, packed, random_scales

from ggufmill import convert_model, quantize_model
from ggufmill.convert import open_source
from ggufmill.convert.config import Config
from ggufmill.convert.quantization.methods import WeightFinder
from ggufmill.formats import FormatError, PlanError
from ggufmill.formats.safetensors import open_safetensors


def test_a_checkpoint_with_several_groups(tmp_path, write_checkpoint, tiny_llama):
    """int4, int8 and fp8 side by side, other tensors unquantised: each module is decoded as its tensors require."""
    config, tensors = tiny_llama(np.float32, hidden_size=64, intermediate_size=96, num_key_value_heads=4)
    expected = dict(tensors)
    for name in list(tensors):
        if "layers" not in name or "norm" in name:
            continue
        stem = name.removesuffix("weight")
        x = tensors.pop(name)
        scale = (np.abs(x).max(1, keepdims=True) / 7).astype(BF16)
        factors = scale.astype(np.float32)
        if "mlp" in name:
            codes = np.clip(np.round(x / factors), -8, 7)
            tensors |= {f"{stem}weight_packed": packed(codes + 8, 4), f"{stem}weight_shape": np.array(x.shape)}
        elif "k_proj" in name or "q_proj" in name:
            codes = np.clip(np.round(x / factors), -128, 127)
            tensors[f"{stem}weight"] = codes.astype(np.int8)
        else:
            codes = (x / factors).astype(E4M3)
            tensors[f"{stem}weight"] = codes
        tensors[f"{stem}weight_scale"] = scale
        expected[name] = codes.astype(np.float32) * factors
    groups = {
        f"group_{i}": {"format": form, "weights": {}}
        for i, form in enumerate(("pack-quantized", "int-quantized", "float-quantized"))
    }
    config |= {
        "quantization_config": {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    }
    source = open_source(write_checkpoint(tmp_path / "mixed", config, tensors))
    plain = open_source(write_checkpoint(tmp_path / "plain", {**config, "quantization_config": None}, expected))
    assert source.tensors.keys() == plain.tensors.keys()
    source_types = set()
    for name, tensor in source.tensors.items():
        assert np.array_equal(tensor.read(0, tensor.n_rows), plain.tensors[name].read(0, tensor.n_rows)), name
        source_types.add(tensor.source_type)
    assert source_types == {"f32", "int4", "int8", "f8_e4m3"}


def int4_in_groups_of_32(x, scale_dtype):
    """(codes -8 to 7 [rows, columns], scales [rows, groups], the values that they stand for)."""
    scale = (np.abs(x.reshape(len(x), -1, 32)).max(2) / 7).astype(scale_dtype)
    factors = np.repeat(scale.astype(np.float32), 32, 1)
    codes = np.clip(np.round(x / factors), -8, 7)
    return codes, scale, codes.astype(np.float32) * factors


def test_symmetric_int4_is_converted_without_loss(tmp_path, write_checkpoint, tiny_llama):
    """As in Kimi-K2-Thinking: --outtype auto writes q4_0 with the very weights, permuted rows included; and quantising them
    to another type is no second quantisation."""
    config, tensors = tiny_llama(np.float32, hidden_size=64, intermediate_size=96, num_key_value_heads=4)
    expected = dict(tensors)
    for name in [n for n in tensors if "_proj" in n]:
        x, stem = tensors.pop(name), name.removesuffix("weight")
        codes, scale, expected[name] = int4_in_groups_of_32(x, BF16)
        tensors |= {f"{stem}weight_packed": packed(codes + 8, 4), f"{stem}weight_scale": scale}
    config["quantization_config"] = CT
    folder = write_checkpoint(tmp_path / "int4", config, tensors)
    plain = open_source(write_checkpoint(tmp_path / "plain", {**config, "quantization_config": None}, expected))
    convert_model(folder, tmp_path / "out.gguf")
    for name, tensor in open_source(tmp_path / "out.gguf").tensors.items():
        values = plain.tensors[name].read(0, tensor.n_rows)
        if name.startswith("blk.") and "norm" not in name:
            assert tensor.source_type == "q4_0", name
            assert np.array_equal(tensor.read(0, tensor.n_rows), values), name
    convert_model(folder, tmp_path / "flag.gguf", outtype="q8_0", symmetric_q40=True)
    for name, tensor in open_source(tmp_path / "flag.gguf").tensors.items():
        if name.startswith("blk.") and "norm" not in name:
            assert tensor.source_type == "q4_0", name
    quantize_model(folder, tmp_path / "q5.gguf", "q5_1")
    with pytest.raises(PlanError, match="adds a second error"):
        quantize_model(tmp_path / "out.gguf", tmp_path / "q5-again.gguf", "q5_1")


def test_symmetric_q40_without_such_weights(tmp_path, write_checkpoint, tiny_llama):
    config, tensors = tiny_llama(np.float32, hidden_size=64, intermediate_size=128, num_key_value_heads=4)
    plain = write_checkpoint(tmp_path / "plain", config, tensors)
    with pytest.raises(PlanError, match="--symmetric-q40: .*plain has no weights in symmetric int4"):
        convert_model(plain, tmp_path / "out.gguf", symmetric_q40=True)
    for name in [n for n in tensors if "_proj" in n]:
        x, stem = tensors.pop(name), name.removesuffix("weight")
        scale = (np.abs(x).max(1, keepdims=True) / 7).astype(BF16)  # one per row, not per 32 columns
        codes = np.clip(np.round(x / scale.astype(np.float32)), -8, 7)
        tensors |= {f"{stem}weight_packed": packed(codes + 8, 4), f"{stem}weight_scale": scale}
    config["quantization_config"] = CT
    with pytest.raises(
        PlanError, match=r"14 weights in int4 are not symmetric in groups of 32 \(the first is blk.0.attn_q.weight"
    ):
        convert_model(write_checkpoint(tmp_path / "rows", config, tensors), tmp_path / "out.gguf", symmetric_q40=True)
    assert not (tmp_path / "out.gguf").exists()


def test_a_gptq_checkpoint_with_biases_of_zero(tmp_path, write_checkpoint, tiny_llama):
    """Rows of q and k are permuted, and biases that the architecture does not have are accepted if they are zero."""
    config, tensors = tiny_llama(np.float32, hidden_size=64, intermediate_size=96, num_key_value_heads=4)
    expected = dict(tensors)
    for name in [n for n in tensors if "_proj" in n]:
        x, stem = tensors.pop(name), name.removesuffix("weight")
        codes, scale, expected[name] = int4_in_groups_of_32(x, F16)
        tensors[f"{stem}qweight"] = np.ascontiguousarray(packed(codes + 8, 4).T)
        tensors[f"{stem}qzeros"] = packed(np.full(scale.T.shape, 7), 4)
        tensors |= {f"{stem}scales": np.ascontiguousarray(scale.T), f"{stem}bias": np.zeros(len(x), F16)}
    config["quantization_config"] = GPTQ4
    source = open_source(write_checkpoint(tmp_path / "gptq", config, tensors))
    plain = open_source(write_checkpoint(tmp_path / "plain", {**config, "quantization_config": None}, expected))
    for name, tensor in source.tensors.items():
        for start, stop in ((0, tensor.n_rows), (3, 9)):
            if stop <= tensor.n_rows:
                assert np.array_equal(tensor.read(start, stop), plain.tensors[name].read(start, stop)), name
    tensors["model.layers.1.mlp.up_proj.bias"][5] = 1
    with pytest.raises(FormatError, match=r"1 tensors are unknown to this architecture: model.layers.1.mlp.up_proj.bias"):
        open_source(write_checkpoint(tmp_path / "gptq", config, tensors))


def test_modelopt_settings_in_hf_quant_config(tmp_path, write_checkpoint):
    folder = write_checkpoint(tmp_path / "model", {}, {"x.weight": np.zeros((2, 2), np.float32)})
    path = folder / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(FormatError, match="quant_algo 'W4A8_AWQ'"):
        WeightFinder(Config(folder / "config.json", {}))
    path.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    codes, scales = np.full((2, 8), 0x21, np.uint8), np.ones((2, 1), E4M3)
    write_checkpoint(folder, {}, {"x.weight": codes, "x.weight_scale": scales, "x.weight_scale_2": np.float32([2])})
    weight, _ = WeightFinder(Config(folder / "config.json", {}))("x.weight", open_safetensors(folder), (2, 16))
    assert weight.read(slice(0, 2)).tolist() == [[1.0, 2.0] * 8] * 2


NVFP4 = {"weight_packed": np.zeros((8, 32), np.uint8), "weight_scale": np.zeros((8, 4), E4M3)}


@pytest.mark.parametrize(
    ("settings", "tensors", "message"),
    [
        (GPTQ4, {"qweight": np.zeros((8, 8), np.int32)}, "x.qzeros is missing, which x.qweight needs"),
        (
            GPTQ4,
            {"qweight": np.zeros((9, 8), np.int32), "qzeros": 0, "scales": 0},
            r"x.qweight is I32 \[9, 8\]; for a weight of",
        ),
        (
            GPTQ4,
            {"qweight": np.zeros((8, 8), np.int32), "qzeros": 0, "scales": np.zeros((2, 9), F16)},
            r"x.scales is \[2, 9\], not",
        ),
        (
            GPTQ4,
            {"qweight": np.zeros((8, 8), np.int32), "qzeros": np.zeros((2, 2), np.int32), "scales": np.zeros((2, 8), F16)},
            r"x.qzeros is \[2, 2\], not \[2, 1\]",
        ),
        (
            {"quant_method": "awq", "bits": 4},
            {"qweight": np.zeros((64, 2), np.int32), "qzeros": 0, "scales": 0},
            r"x.qweight is \[64, 2\], not \[64, 1\]",
        ),
        (
            CT,
            {"weight_packed": np.zeros((8, 7), np.int32), "weight_scale": random_scales(8, 1)},
            r"x.weight_packed is I32 \[8, 7\]",
        ),
        (
            CT,
            {"weight_packed": np.zeros((8, 8), np.int32), "weight_scale": random_scales(8, 5)},
            r"x.weight_scale of shape \[8, 5\]",
        ),
        (CT, {"weight_packed": np.zeros((8, 8), np.int32)}, "x.weight_scale is missing"),
        (CT, NVFP4, "lacks NVFP4's global scale"),
        (CT, NVFP4 | {"weight_global_scale": np.ones(2, np.float32)}, r"x.weight_global_scale is F32 \[2\]; one F32"),
        (
            CT,
            {
                "weight_packed": np.zeros((8, 8), np.int32),
                "weight_scale": random_scales(8, 1),
                "weight_shape": np.array([8, 65]),
            },
            r"x.weight_shape is not \[8, 64\]",
        ),
    ],
)
def test_tensors_that_do_not_fit(check_weight, settings, tensors, message):
    tensors = {name: np.zeros((1, 1), np.int32) if isinstance(t, int) else t for name, t in tensors.items()}
    with pytest.raises(FormatError, match=message):
        check_weight(settings, tensors, np.zeros((8, 64), np.float32))


def test_group_index_out_of_range(check_weight):
    tensors, expected = gptq(4, 32)
    tensors["g_idx"][5] = 99
    with pytest.raises(FormatError, match="x.g_idx has groups beyond the 6 that there are"):
        check_weight(GPTQ4, tensors, expected)
