"""Checkpoints of modelopt with iq1_s and iq2_xs blocks: copied bit for bit, and decoded as gguf-py decodes them."""

import gguf
import numpy as np
import pytest

from ggufmill import convert_model
from ggufmill.convert import open_source
from ggufmill.formats import TYPES, FormatError, open_gguf
from ggufmill.quantize import decode, encode
from ggufmill.runtime import load_model


@pytest.fixture
def iq_llama(tmp_path, write_checkpoint, tiny_llama):
    """make(type name, shape of a weight in bytes -> stored shape): (folder, the folder of the decoded weights in float32)."""

    def make(type_name, shaped=lambda *shape: shape):
        config, tensors = tiny_llama(np.float32, hidden_size=256, intermediate_size=512, num_key_value_heads=4)
        tensors = {n: (x.view(np.uint32) & 0xFFFF0000).view(np.float32) for n, x in tensors.items()}  # which bf16 holds
        kind, expected = TYPES[type_name], dict(tensors)
        for name in [n for n in tensors if "_proj" in n]:
            x = tensors[name]
            packed = encode(x, type_name, np.ones(x.shape[1], np.float32))
            expected[name] = decode(packed, type_name, x.shape[1])
            oracle = gguf.quants.dequantize(packed, getattr(gguf.GGMLQuantizationType, type_name.upper()))
            np.testing.assert_array_equal(expected[name], oracle)
            tensors[name] = packed.reshape(shaped(len(x), x.shape[1] // kind.block, kind.block_bytes))
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": type_name.upper(), "packing": "ggml"}
        folder = write_checkpoint(tmp_path / "iq", config, tensors)
        return folder, write_checkpoint(tmp_path / "plain", {**config, "quantization_config": None}, expected)

    return make


@pytest.mark.parametrize("type_name", ["iq1_s", "iq2_xs"])
def test_blocks_are_kept(iq_llama, tmp_path, type_name):
    folder, plain = iq_llama(type_name)
    convert_model(folder, tmp_path / "out.gguf", verify=True)
    convert_model(plain, tmp_path / "plain.gguf", outtype="f32")
    written, expected = open_gguf(tmp_path / "out.gguf").tensors, open_source(tmp_path / "plain.gguf").tensors
    kept = [name for name, info in written.items() if info.type.name == type_name]
    assert len(kept) == 7 * 2
    for name in kept:  # queries and keys are among them, whose rows are in another order
        values = decode(written[name].data, type_name, written[name].shape[0])
        np.testing.assert_array_equal(values, expected[name].read(0, expected[name].n_rows), err_msg=name)
    tokens = np.arange(20) % 11
    exact, plain_logits = (load_model(tmp_path / f"{name}.gguf", exact=True).logits(tokens) for name in ("out", "plain"))
    assert np.abs(exact - plain_logits).max() < 1e-4 * plain_logits.std()
    convert_model(folder, tmp_path / "f32.gguf", outtype="f32")
    for name, tensor in open_source(tmp_path / "f32.gguf").tensors.items():
        np.testing.assert_array_equal(tensor.read(0, tensor.n_rows), expected[name].read(0, tensor.n_rows), err_msg=name)


@pytest.mark.parametrize(
    "shaped", [lambda rows, n, nbytes: (rows, n * nbytes // 2, 2), lambda rows, n, nbytes: (rows, n * nbytes)]
)
def test_other_shapes_are_refused(iq_llama, shaped):
    folder, _ = iq_llama("iq2_xs", shaped)
    with pytest.raises(FormatError, match="q_proj"):
        open_source(folder)
