"""Four-bit float checkpoints written bit for bit: nvfp4 with its factors as tensors of their own, and mxfp4."""

import json

import ml_dtypes
import numpy as np
import pytest
from quantized_weights import CT, E4M3

from ggufmill import convert_model, quantize_model
from ggufmill.convert import open_source
from ggufmill.convert.config import Config
from ggufmill.convert.quantization.methods import WeightFinder
from ggufmill.formats import MillError, open_gguf
from ggufmill.formats.safetensors import open_safetensors
from ggufmill.quantize import decode
from ggufmill.quantize.tensor_scale import takes_scale
from ggufmill.runtime import load_model

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SETTINGS = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "nvfp4-pack-quantized": CT | {"format": "nvfp4-pack-quantized"},
    "mxfp4-pack-quantized": CT | {"format": "mxfp4-pack-quantized"},
}


def stored_as(form: str, x: np.ndarray, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(the stored tensors by suffix, the values that they stand for) of a matrix rounded to four bits."""
    group = 32 if form.startswith("mx") else 16
    groups = x.reshape(len(x), -1, group)
    amax = np.abs(groups).max(axis=2)
    if group == 32:
        exponent = np.floor(np.log2(amax)).astype(int) - 2
        scales, factors = (exponent + 127).astype(np.uint8), np.ldexp(np.float32(1), exponent)
    else:
        factor = np.float32(rng.uniform(1, 1.2) * np.abs(x).max() / (6 * 448))
        scales = (amax / 6 / factor).astype(E4M3)
        factors = scales.astype(np.float32) * factor
    codes = np.abs(groups[..., None] / factors[..., None, None] - E2M1).argmin(axis=3).astype(np.uint8)
    values = (E2M1[codes] * factors[..., None]).reshape(x.shape)
    codes = codes.reshape(len(x), -1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    if form == "modelopt":
        return {
            "weight": packed,
            "weight_scale": scales,
            "weight_scale_2": np.asarray(factor),
            "input_scale": np.asarray(np.float32(0.25)),
        }, values
    tensors = {"weight_packed": packed, "weight_scale": scales}
    if group == 16:
        tensors |= {"weight_global_scale": np.array([1 / factor]), "input_global_scale": np.array([4], np.float32)}
    return tensors, values


@pytest.fixture
def fp4_llama(tmp_path, write_checkpoint, tiny_llama):
    """make(form): (the quantised checkpoint's folder, the folder of the same weights in float32)."""

    def make(form: str, **options):
        config, tensors = tiny_llama(np.float32, hidden_size=64, intermediate_size=128, num_key_value_heads=4, **options)
        tensors = {n: (x.view(np.uint32) & 0xFFFF0000).view(np.float32) for n, x in tensors.items()}  # which bf16 holds
        expected, rng = dict(tensors), np.random.default_rng(4)
        for name in [n for n in tensors if "_proj" in n]:
            stored, expected[name] = stored_as(form, tensors.pop(name), rng)
            tensors |= {name.removesuffix("weight") + suffix: array for suffix, array in stored.items()}
        config["quantization_config"] = SETTINGS[form]
        quantised = write_checkpoint(tmp_path / form, config, tensors)
        return quantised, write_checkpoint(tmp_path / "plain", {**config, "quantization_config": None}, expected)

    return make


@pytest.mark.parametrize("form", SETTINGS)
def test_rows_are_kept_bit_for_bit(fp4_llama, tmp_path, form):
    folder, plain = fp4_llama(form)
    convert_model(folder, tmp_path / "out.gguf")
    written, expected = open_gguf(tmp_path / "out.gguf"), open_source(plain).tensors
    type_name = "mxfp4" if form.startswith("mx") else "nvfp4"
    kept = [name for name, info in written.tensors.items() if info.type.name == type_name]
    assert len(kept) == 7 * 2
    scales = {name for name in written.tensors if name.endswith("scale")}
    ends = () if form.startswith("mx") else ("scale", "input_scale")
    assert scales == {name.removesuffix("weight") + end for name in kept for end in ends}
    if ends:
        inputs = written.tensors["blk.0.attn_q.input_scale"]
        assert (inputs.shape, inputs.type.name) == ((1,), "f32")
        assert inputs.data.view(np.float32).item() == 0.25
    source = open_source(tmp_path / "out.gguf")
    assert source.tensors.keys() == expected.keys()
    for name, tensor in source.tensors.items():
        values = expected[name].read(0, tensor.n_rows)
        if name in kept:
            np.testing.assert_allclose(tensor.read(0, tensor.n_rows), values, rtol=3e-7 if ends else 0, err_msg=name)


@pytest.mark.parametrize("form", ["modelopt", "nvfp4-pack-quantized"])
def test_logits_are_those_of_the_plain_weights(fp4_llama, tmp_path, form):
    folder, plain = fp4_llama(form)
    convert_model(folder, tmp_path / "out.gguf", verify=True)
    convert_model(plain, tmp_path / "plain.gguf", outtype="f32")
    tokens = np.arange(20) % 11
    expected = load_model(tmp_path / "plain.gguf", exact=True).logits(tokens)
    exact = load_model(tmp_path / "out.gguf", exact=True).logits(tokens)
    assert np.abs(exact - expected).max() < 1e-4 * expected.std()
    rounded = load_model(tmp_path / "out.gguf")  # products from packed rows, by GEMM and by GEMV
    for n in (20, 1):
        error = rounded.logits(tokens[:n]) - exact[:n]
        assert np.sqrt((error**2).mean()) < 0.1 * expected.std()


def test_another_type_has_no_factors_beside_it(fp4_llama, tmp_path):
    folder, plain = fp4_llama("modelopt")
    quantize_model(folder, tmp_path / "direct.gguf", "q8_0")
    convert_model(folder, tmp_path / "nvfp4.gguf")
    quantize_model(tmp_path / "nvfp4.gguf", tmp_path / "again.gguf", "q8_0", allow_requantize=True)
    for name in ("direct", "again"):
        tensors = open_gguf(tmp_path / f"{name}.gguf").tensors
        assert not [n for n in tensors if n.endswith("scale")]
        source, expected = open_source(tmp_path / f"{name}.gguf").tensors, open_source(plain).tensors
        for key in ("blk.1.ffn_up.weight", "blk.0.attn_q.weight"):
            values = expected[key].read(0, expected[key].n_rows)
            assert np.abs(source[key].read(0, len(values)) - values).max() < 0.01 * np.abs(values).max()


def test_copies_keep_the_factors(fp4_llama, tmp_path):
    folder, _ = fp4_llama("modelopt")
    convert_model(folder, tmp_path / "nvfp4.gguf")
    quantize_model(tmp_path / "nvfp4.gguf", tmp_path / "copy.gguf", custom_q="nothing=q8_0")
    first, second = (open_gguf(tmp_path / name).tensors for name in ("nvfp4.gguf", "copy.gguf"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[n].data, second[n].data) for n in first)


def test_scales_that_nvfp4_cannot_hold(fp4_llama, tmp_path, write_checkpoint, tiny_llama):
    config, tensors = tiny_llama(np.float32, hidden_size=64, intermediate_size=128, num_key_value_heads=4)
    for name in [n for n in tensors if "_proj" in n]:
        stored, _ = stored_as("modelopt", tensors.pop(name), np.random.default_rng(4))
        tensors |= {name.removesuffix("weight") + suffix: array for suffix, array in stored.items()}
    tensors["model.layers.1.mlp.up_proj.weight_scale"][2, 1] = -1
    config["quantization_config"] = SETTINGS["modelopt"]
    folder = write_checkpoint(tmp_path / "negative", config, tensors)
    with pytest.raises(MillError, match=r"up_proj.weight_scale has the E4M3 code 0xb8 in row 2, which nvfp4 cannot hold"):
        convert_model(folder, tmp_path / "out.gguf")


def test_float_weights_become_nvfp4_with_a_factor_of_each_matrix(tmp_path, write_checkpoint, tiny_llama):
    config, tensors = tiny_llama(np.float32, hidden_size=64, intermediate_size=128, num_key_value_heads=4)
    folder = write_checkpoint(tmp_path / "plain", config, {n: x * np.float32(0.01) for n, x in tensors.items()})
    quantize_model(folder, tmp_path / "out.gguf", "NVFP4", verify=True)
    source, expected = open_source(tmp_path / "out.gguf").tensors, open_source(folder).tensors
    for name, tensor in source.items():
        if tensor.source_type == "nvfp4":
            assert takes_scale(name)
            values = expected[name].read(0, tensor.n_rows)
            error = tensor.read(0, tensor.n_rows) - values
            assert np.sqrt((error**2).mean() / (values**2).mean()) < 0.13


def test_fp8_with_experts_in_fp4(tmp_path, write_checkpoint):
    """As DeepSeek-V4 stores them: NAME.scale in e8m0 beside fp8 in blocks and beside packed four-bit floats of int8."""
    rng, e8m0 = np.random.default_rng(5), ml_dtypes.float8_e8m0fnu
    codes = rng.integers(0, 256, (64, 48)).astype(np.uint8)
    exponents = rng.integers(118, 128, (64, 3)).astype(np.uint8)
    values = rng.standard_normal((64, 96)).astype(E4M3)
    blocks = np.array([[120, 121, 126], [127, 119, 128]], np.uint8)
    tensors = {
        "expert.weight": codes.view(np.int8),
        "expert.scale": exponents.view(e8m0),
        "dense.weight": values,
        "dense.scale": blocks.view(e8m0),
    }
    settings = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
    folder = write_checkpoint(tmp_path / "model", {"quantization_config": settings, "expert_dtype": "fp4"}, tensors)
    find = WeightFinder(Config(folder / "config.json", json.loads((folder / "config.json").read_text())))
    stored = open_safetensors(folder)
    expert, used = find("expert.weight", stored, (64, 96))
    assert {t.name for t in used} == {"expert.weight", "expert.scale"}
    assert (expert.shape, expert.ggml_type.name, expert.scale) == ((64, 96), "mxfp4", None)
    expected = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(64, 96)]
    expected = expected * np.repeat(np.ldexp(np.float32(1), exponents.astype(int) - 127), 32, 1)
    assert np.array_equal(expert.read(slice(0, 64)), expected)
    assert np.array_equal(decode(expert.raw(slice(3, 60)), "mxfp4", 96), expected[3:60])
    dense, _ = find("dense.weight", stored, (64, 96))
    factors = np.ldexp(np.float32(1), blocks.astype(int) - 127).repeat(32, 0).repeat(32, 1)
    assert np.array_equal(dense.read(slice(0, 64)), values.astype(np.float32) * factors)
